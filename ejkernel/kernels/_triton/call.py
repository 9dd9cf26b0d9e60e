"""Calling Triton kernels from JAX: through jax-triton on a GPU, through Triton's interpreter on a CPU.

The interpreter runs where the environment says ``TRITON_INTERPRET=1`` before Triton is imported; then the very kernels
that a GPU gets run under ``jax.jit`` on a CPU, one program after another. It knows no bfloat16.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.callib.chips import CHIPS
from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.support import is_present
from ejkernel.kernels._triton import cache
from ejkernel.kernels._triton.probe import results_argument
from ejkernel.kernels.common.varying import vary_as

# Multiprocessors of a chip that is not in the table; those of the interpreter run one after another.
CORES, INTERPRETED_CORES = 132, 3


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def on_nvidia(device: DeviceInfo | None) -> bool:
    """Whether kernels are compiled for an NVIDIA GPU; without a device, JAX's default backend tells."""
    if interpreting():
        return False
    if device is not None:
        return device.vendor == "nvidia"
    return "rocm" not in str(jax.devices()[0].client.platform_version).lower()


def cores(device: DeviceInfo | None) -> int:
    """How many multiprocessors share a launch's programs."""
    if interpreting():
        return INTERPRETED_CORES
    chip = CHIPS.get(device.name) if device is not None else None
    return chip.sm_count if chip else CORES


def product_precision(dtype: Any, device: DeviceInfo | None) -> str:
    """How ``tl.dot`` multiplies numbers of a dtype.

    NVIDIA's tensor cores multiply float32 as three products of its upper and lower halves, in TF32: an error as that of a sum
    in float32, at many times the speed. AMD's multiply float32 itself.
    """
    if dtype != jnp.float32:
        return "tf32"
    return "tf32x3" if on_nvidia(device) else "ieee"


def passes_twice() -> bool:
    """Whether an array that is changed in place is a kernel's parameter as an array and as an output."""
    return interpreting() or results_argument() == "out_shape"


def call(
    kernel: Any,
    arrays: Sequence[Array],
    scalars: Sequence[int],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    programs: int,
    constants: Any,
    num_warps: int,
    num_stages: int,
    device: DeviceInfo | None = None,
    in_place: Mapping[int, int] | None = None,
) -> list[Array]:
    """Run ``programs`` instances of a kernel whose parameters are the arrays, the scalars, the outputs and ``C``.

    ``in_place``: by the index of an array, the output that is it: what the kernel does not write stays. The kernel has no
    parameters for such outputs, unless ``passes_twice``.

    The kernel is compiled for ``device`` if that is a described one, else for the GPU of this process.
    """
    if interpreting():
        results = _interpreted(kernel, arrays, tuple(scalars), tuple(outputs), programs, constants, in_place or {})
    else:
        launch = {"grid": (programs,), "num_warps": num_warps, "num_stages": num_stages, "C": constants}
        if in_place:
            launch["input_output_aliases"] = dict(in_place)
        results = _on_gpu(kernel, arrays, scalars, outputs, launch, device)
    return vary_as(list(results), *arrays)


def _on_gpu(kernel, arrays, scalars, outputs, launch: dict[str, Any], device: DeviceInfo | None) -> list[Array]:
    import jax_triton

    cache.install()
    # None: that of the GPU that is here.
    capability = None if device is None or is_present(device) else device.capability or None
    with warnings.catch_warnings():
        # What jax-triton 0.4 has instead of aliases, older ones do not have.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        return jax_triton.triton_call(
            *arrays,
            *scalars,
            kernel=kernel,
            compute_capability=capability,
            **launch,
            **{results_argument(): list(outputs)},
        )


# The interpreter patches Triton's language while it runs.
_interpreter = threading.Lock()


def _interpreted(kernel, arrays, scalars, outputs, programs, constants, in_place) -> list[Array]:
    origin = {output: array for array, output in in_place.items()}

    def run(*arrays):
        # Poison: what a kernel does not write is seen.
        results = [np.array(arrays[origin[i]]) if i in origin else _poisoned(like) for i, like in enumerate(outputs)]
        tensors = [_Tensor(np.ascontiguousarray(x)) for x in arrays] + [_Tensor(x) for x in results]
        with _interpreter:
            kernel[(programs,)](*tensors[: len(arrays)], *scalars, *tensors[len(arrays) :], C=constants)
        return tuple(results)

    return list(jax.pure_callback(run, tuple(outputs), *arrays))


def _poisoned(like: jax.ShapeDtypeStruct) -> np.ndarray:
    poison = np.nan if np.issubdtype(like.dtype, np.floating) else np.iinfo(like.dtype).min
    return np.full(like.shape, poison, like.dtype)


class _Tensor:
    """What Triton's interpreter needs to see of a torch tensor, over a numpy array that it works on in place."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = array.dtype
        self.shape = array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _Tensor:
        return self

    def cpu(self) -> _Tensor:
        return self

    def new_empty(self, *_: Any, **__: Any) -> _Tensor:
        return _Tensor(self.array)

    def set_(self, storage: _Tensor, *_: Any) -> None:
        self.__init__(storage.array)

    def copy_(self, other: _Tensor) -> None:
        """Host and device are one."""

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)
