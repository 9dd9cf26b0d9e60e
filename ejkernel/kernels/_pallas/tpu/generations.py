"""What the TPU kernels' geometry depends on: one row a generation, beside the figures of ``callib.chips``."""

from __future__ import annotations

from dataclasses import dataclass

from ejkernel.callib.chips import CHIPS, MIB
from ejkernel.contracts.device import DeviceInfo

LANES = 128  # a vector register's second axis; its first is 8 of 32 bits
SUBLANES = 8


@dataclass(frozen=True)
class Generation:
    """A TPU core as kernels see it.

    Attributes:
        name: of the chip in ``callib.chips``.
        vmem_bytes: what a kernel may use of a core's vector memory, at most 90 % of it.
        mxu: the side of a matrix unit.
        clock: of a core, in Hz, inferred from the chip's peak.
        hbm: bytes a second of one core.
    """

    name: str
    vmem_bytes: int
    mxu: int
    clock: float
    hbm: float


def _generation(name: str, mxu: int, gigahertz: float) -> Generation:
    chip = CHIPS[name]
    return Generation(
        name=name,
        vmem_bytes=chip.vmem_bytes * 9 // 10 // MIB * MIB,
        mxu=mxu,
        clock=gigahertz * 1e9,
        hbm=chip.memory_bandwidth / chip.sm_count,
    )


GENERATIONS = {
    generation.name: generation
    for generation in (
        _generation("tpu-v4", 128, 1.05),
        _generation("tpu-v5e", 128, 1.5),
        _generation("tpu-v5p", 128, 1.75),
        _generation("tpu-v6e", 256, 1.75),
        _generation("tpu-v7", 256, 2.2),
    )
}

_SMALLEST = GENERATIONS["tpu-v4"]


def generation_of(device: DeviceInfo | None) -> Generation:
    """The generation of a device; of a device that is no known TPU (an interpreter's CPU), the one with the least memory."""
    return GENERATIONS.get(device.name, _SMALLEST) if device is not None else _SMALLEST
