"""The known chips with the figures of their data sheets, and the mapping from a JAX device to its chip.

Calibration, kernel selection and the lab's roofline read this table. It is plain data: importing it touches neither JAX
nor a device.
"""

import re
from dataclasses import dataclass

__all__ = ["CHIPS", "Chip", "identify"]

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TERA = 1e12


@dataclass(frozen=True)
class Chip:
    """One accelerator model.

    Memory is the advertised size, with a "GB" of 2**30 bytes; bandwidth and peaks are decimal. Peaks are dense (data
    sheets print twice as much for 2:4 sparsity), and a GPU's half-precision peak is the one with float32 accumulation.

    Attributes:
        slug: the chip's name in this library, such as `nvidia-h200`.
        kind: `gpu` or `tpu`.
        vendor: `nvidia`, `amd` or `google`.
        capability: CUDA compute capability times ten (90 is sm_90), the generation of a TPU, 0 for AMD (see
            `arch`).
        arch: the compiler's name for it: `sm_90`, `gfx942`, `v5e`.
        shared_memory_per_block: the most shared memory a CTA can opt in to, in bytes; 0 on a TPU.
        sm_count: streaming multiprocessors, compute units, or a TPU's tensor cores.
        memory_bytes: device memory.
        memory_bandwidth: bytes a second.
        peak_flops: pairs of dtype name and dense operations a second; `tensorfloat32` is float32 on tensor
            cores.
        vmem_bytes: vector memory of one TPU core; 0 on a GPU.

    Example:
        >>> h200 = CHIPS["nvidia-h200"]
        >>> h200.shared_memory_per_block // 1024, h200.flops("bfloat16") > h200.flops("float32")
        (227, True)
    """

    slug: str
    kind: str
    vendor: str
    capability: int
    arch: str
    shared_memory_per_block: int
    sm_count: int
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: tuple[tuple[str, float], ...]
    vmem_bytes: int = 0

    def flops(self, dtype: str) -> float | None:
        """Dense peak for the name of a dtype, None if the chip does not support it.

        Example:
            >>> CHIPS["nvidia-v100"].flops("bfloat16") is None
            True
        """
        return dict(self.peak_flops).get(dtype)


_FLOPS_NAMES = {
    "f64": "float64",
    "f32": "float32",
    "tf32": "tensorfloat32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8": "float8_e4m3fn",
    "i8": "int8",
}


def _peaks(teraflops: dict[str, float | int]) -> tuple[tuple[str, float], ...]:
    return tuple((_FLOPS_NAMES[short], value * TERA) for short, value in teraflops.items())


def _nvidia(slug, capability, shared_kib, sm_count, memory_gib, terabytes_s, **teraflops) -> Chip:
    return Chip(
        slug=f"nvidia-{slug}",
        kind="gpu",
        vendor="nvidia",
        capability=capability,
        arch=f"sm_{capability}",
        shared_memory_per_block=shared_kib * KIB,
        sm_count=sm_count,
        memory_bytes=memory_gib * GIB,
        memory_bandwidth=terabytes_s * TERA,
        peak_flops=_peaks(teraflops),
    )


def _tpu(arch, generation, cores, vmem_mib, memory_gib, terabytes_s, **teraflops) -> Chip:
    return Chip(
        slug=f"tpu-{arch}",
        kind="tpu",
        vendor="google",
        capability=generation,
        arch=arch,
        shared_memory_per_block=0,
        sm_count=cores,
        memory_bytes=memory_gib * GIB,
        memory_bandwidth=terabytes_s * TERA,
        peak_flops=_peaks(teraflops),
        vmem_bytes=vmem_mib * MIB,
    )


_HOPPER_SXM = dict(f64=66.9, f32=66.9, tf32=494.7, f16=989.4, bf16=989.4, f8=1978.9, i8=1978.9)

_ALL = (
    _nvidia("v100", 70, 96, 80, 16, 0.9, f64=7.8, f32=15.7, f16=125),
    _nvidia("t4", 75, 64, 40, 16, 0.32, f32=8.1, f16=65, i8=130),
    _nvidia("a10", 86, 99, 72, 24, 0.6, f32=31.2, tf32=62.5, f16=125, bf16=125, i8=250),
    _nvidia("a10g", 86, 99, 80, 24, 0.6, f32=31.5, tf32=35, f16=70, bf16=70, i8=140),
    _nvidia("rtx-a6000", 86, 99, 84, 48, 0.768, f32=38.7, tf32=77.4, f16=154.8, bf16=154.8, i8=309.7),
    _nvidia("a100", 80, 163, 108, 80, 2.039, f64=19.5, f32=19.5, tf32=156, f16=312, bf16=312, i8=624),
    _nvidia("l4", 89, 99, 58, 24, 0.3, f32=30.3, tf32=60, f16=121, bf16=121, f8=242.5, i8=242.5),
    _nvidia("l40", 89, 99, 142, 48, 0.864, f32=90.5, tf32=90.5, f16=181, bf16=181, f8=362, i8=362),
    _nvidia("l40s", 89, 99, 142, 48, 0.864, f32=91.6, tf32=183, f16=362, bf16=362, f8=733, i8=733),
    _nvidia("rtx-6000-ada", 89, 99, 142, 48, 0.96, f32=91.1, tf32=182.1, f16=364.2, bf16=364.2, f8=728.5, i8=728.5),
    _nvidia("rtx-4090", 89, 99, 128, 24, 1.008, f32=82.6, tf32=82.6, f16=165.2, bf16=165.2, f8=330.3, i8=660.6),
    _nvidia("h100", 90, 227, 132, 80, 3.35, **_HOPPER_SXM),
    _nvidia("h100-pcie", 90, 227, 114, 80, 2.0, f64=51, f32=51, tf32=378, f16=756, bf16=756, f8=1513, i8=1513),
    _nvidia("h200", 90, 227, 132, 141, 4.8, **_HOPPER_SXM),
    _nvidia("gh200", 90, 227, 132, 96, 4.0, **_HOPPER_SXM),
    _nvidia("b200", 100, 227, 148, 180, 7.7, f64=37, f32=75, tf32=1100, f16=2250, bf16=2250, f8=4500, i8=4500),
    Chip(
        slug="amd-mi300x",
        kind="gpu",
        vendor="amd",
        capability=0,
        arch="gfx942",
        shared_memory_per_block=64 * KIB,
        sm_count=304,
        memory_bytes=192 * GIB,
        memory_bandwidth=5.3 * TERA,
        peak_flops=_peaks(dict(f64=163.4, f32=163.4, tf32=653.7, f16=1307.4, bf16=1307.4, f8=2614.9, i8=2614.9)),
    ),
    _tpu("v4", 4, 2, 16, 32, 1.228, bf16=275, i8=275),
    _tpu("v5e", 5, 1, 128, 16, 0.819, bf16=197, i8=394),
    _tpu("v5p", 5, 2, 64, 95, 2.765, bf16=459, i8=918),
    _tpu("v6e", 6, 1, 128, 32, 1.64, bf16=918, i8=1836),
    _tpu("v7", 7, 2, 64, 192, 7.37, bf16=2307, f8=4614),
)

CHIPS: dict[str, Chip] = {chip.slug: chip for chip in _ALL}

# Matched against the lower-cased name with every run of punctuation turned into one space, so that word
# boundaries keep A100 from A10, L40 from L4 and H200 from both H20 and GH200. Names that contain a model but mean
# another chip (laptop parts, export versions) must stay unknown: wrong figures are worse than none.
_DEVICE_KINDS = tuple(
    (re.compile(pattern), CHIPS[slug])
    for pattern, slug in (
        (r"\bv100[sl]?\b", "nvidia-v100"),
        (r"\bt4\b", "nvidia-t4"),
        (r"\ba10\b", "nvidia-a10"),
        (r"\ba10g\b", "nvidia-a10g"),
        (r"\brtx a6000\b", "nvidia-rtx-a6000"),
        (r"\ba100x?\b", "nvidia-a100"),
        (r"\bl4\b", "nvidia-l4"),
        (r"\bl40g?\b", "nvidia-l40"),
        (r"\bl40s\b", "nvidia-l40s"),
        (r"\brtx 6000 ada\b", "nvidia-rtx-6000-ada"),
        (r"\brtx 4090\b(?! laptop| d\b)", "nvidia-rtx-4090"),
        (r"\bh100\b(?! pcie)", "nvidia-h100"),
        (r"\bh100 pcie\b", "nvidia-h100-pcie"),
        (r"\bh200\b", "nvidia-h200"),
        (r"\bgh200\b", "nvidia-gh200"),
        (r"\bg?b200\b", "nvidia-b200"),
        (r"\bmi300x\b", "amd-mi300x"),
        (r"^tpu v4$", "tpu-v4"),
        (r"^tpu v5( lite|e|litepod)$", "tpu-v5e"),
        (r"^tpu v5p?$", "tpu-v5p"),
        (r"^tpu v6( lite|e)$", "tpu-v6e"),
        (r"^tpu ?v?7x?$", "tpu-v7"),
    )
)


def identify(device_kind: str) -> Chip | None:
    """The chip of a JAX `device.device_kind` or a slug, None if it is not in the table.

    Example:
        >>> identify("NVIDIA H100 80GB HBM3").slug, identify("TPU v5 lite").slug, identify("nvidia-a10").slug
        ('nvidia-h100', 'tpu-v5e', 'nvidia-a10')
        >>> identify("NVIDIA H20") is None
        True
    """
    words = " ".join(re.findall(r"[a-z0-9]+", device_kind.lower()))
    return next((chip for pattern, chip in _DEVICE_KINDS if pattern.search(words)), None)
