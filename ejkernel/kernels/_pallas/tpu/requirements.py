"""What the TPU kernels need of JAX's Pallas, which changes between versions. A test compares the list with their sources."""

from __future__ import annotations

import functools
import importlib
import operator

import jax

from ejkernel.contracts.device import DeviceInfo

NAMES: dict[str, tuple[str, ...]] = {
    "jax.experimental.pallas": (
        *("ANY", "BlockSpec", "Buffered", "CostEstimate", "ds", "multiple_of"),
        *("num_programs", "pallas_call", "program_id", "when"),
    ),
    "jax.experimental.pallas.tpu": (
        *("CompilerParams", "HBM", "PrefetchScalarGridSpec", "SMEM", "SemaphoreType.DMA", "VMEM", "bitcast"),
        "make_async_copy",
    ),
}


@functools.cache
def changes() -> str | None:
    """What the installed JAX lacks; None if it lacks nothing. Imports Pallas, compiles nothing."""
    for path, names in NAMES.items():
        try:
            module = importlib.import_module(path)
        except ImportError as error:
            return f"{path} cannot be imported: {error}"
        for name in names:
            try:
                operator.attrgetter(name)(module)
            except AttributeError:
                return f"{path} has no {name}"
    return None


def refusal(device: DeviceInfo) -> str | None:
    """Why the kernels cannot run with this JAX; ``device`` is one that they are for."""
    changed = changes()
    return f"Pallas of jax {jax.__version__} is not the one known: {changed}" if changed else None
