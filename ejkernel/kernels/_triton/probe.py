"""Whether the installed Triton and jax-triton are ones that the kernels can be compiled and called with.

Neither has an upper cap. Where something that the kernels need has moved, they are refused with that reason and the next
implementation runs, instead of an exception in the middle of a call.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
from importlib import resources

from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.support import is_present

PARAMETERS = ("kernel", "grid", "num_warps", "num_stages", "compute_capability", "input_output_aliases")
# What ``triton_call`` calls the types of its results: the first from jax-triton 0.4 on, the second before.
RESULTS = ("out_type", "out_shape")
LOWERING = "jaxlib.gpu_triton"


def refusal(device: DeviceInfo, interpreted: bool) -> str | None:
    """Why the kernels cannot be compiled with what is installed, or not be called on a device of this process."""
    changed = _changed_language() or (None if interpreted else _changed_call())
    if changed:
        return f"Triton cannot be used ({changed})"
    if is_present(device) and not interpreted and not _lowers():
        return f"JAX's plugin for {device.vendor or 'this'} GPUs has no Triton: {LOWERING} has no TritonKernel"
    return None


def results_argument() -> str:
    """The name of ``triton_call``'s parameter for the types of the results."""
    parameters = _parameters()
    return next(name for name in RESULTS if name in parameters)


@functools.cache
def _changed_language() -> str | None:
    """What the kernels need of Triton and do not find; None too if Triton is not installed, which ``Support`` reports."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        needed = {"triton": frozenset({"jit"}), "triton.language": _names()}
        missing = [
            f"{module}.{name}"
            for module, names in needed.items()
            for name in sorted(names)
            if not hasattr(importlib.import_module(module), name)
        ]
    except Exception as error:  # an import may fail in any way: with a driver, a library, another version of Python
        return f"{type(error).__name__}: {error}"
    return f"{_version('triton')} has no {missing[0]}" if missing else None


@functools.cache
def _names() -> frozenset[str]:
    """The names of ``triton.language`` that the kernels use."""
    here = resources.files("ejkernel.kernels._triton")
    texts = (file.read_text(encoding="utf-8") for file in here.iterdir() if file.name.endswith(".py"))
    return frozenset(name for text in texts for name in re.findall(r"\btl\.(\w+)", text))


@functools.cache
def _changed_call() -> str | None:
    """What we pass to ``jax_triton.triton_call`` and it does not take."""
    if importlib.util.find_spec("jax_triton") is None:
        return None
    try:
        parameters = _parameters()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    missing = [name for name in PARAMETERS if name not in parameters]
    if not any(name in parameters for name in RESULTS):
        missing.append(" or ".join(RESULTS))
    return f"{_version('jax_triton')}: triton_call does not take {missing[0]}" if missing else None


def _parameters() -> tuple[str, ...]:
    return tuple(inspect.signature(importlib.import_module("jax_triton").triton_call).parameters)


@functools.cache
def _lowers() -> bool:
    """Whether JAX's plugin can lower a Triton kernel."""
    try:
        return hasattr(importlib.import_module(LOWERING), "TritonKernel")
    except ImportError:
        return False


def _version(module: str) -> str:
    return f"{module} {getattr(importlib.import_module(module), '__version__', '')}".rstrip()
