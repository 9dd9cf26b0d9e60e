"""Heuristics for attention tiles, used where nothing was measured.

They are consistent: block sizes are selected so that one stage fits into the shared memory of a CTA, and the number of
stages so that all of them fit.
"""

import os
import re
from numbers import Integral
from typing import Any

import ml_dtypes  # noqa: F401 - so that numpy knows the name "bfloat16"
import numpy as np

from ejkernel.callib.chips import CHIPS, KIB, identify
from ejkernel.callib.devices import compute_capability, resolve_device
from ejkernel.callib.integers import power_of_two
from ejkernel.errors import InvalidInputError

__all__ = [
    "estimate_shared_memory_bytes",
    "get_shared_memory_limit",
    "select_block_sizes",
    "select_num_stages",
    "select_num_warps",
]

Whole = int | np.integer

_LIMIT_VARIABLE = "EJKERNEL_TRITON_SMEM_LIMIT"
_DEFAULT_LIMIT = 48 * KIB  # available to every CUDA kernel without opting in to more
_ALIGNMENT = 128
_DOT_SIDE = 16  # the smallest tile side that tensor cores multiply
_WARP_CHOICES = (4, 8, 16)
_ACCUMULATORS_PER_WARP = 32 * 128  # 32 lanes with half of their registers for accumulators
_LIMIT_BY_CAPABILITY = {
    chip.capability: chip.shared_memory_per_block for chip in CHIPS.values() if chip.vendor == "nvidia"
}
# Ada chips that are not in the table: all have the same shared memory.
_ADA = re.compile(r"\bada\b|\brtx 40\d0\b")
# Largest useful (query, key) block sizes by kind of device.
_LARGEST_BLOCKS = {"gpu": (128, 128), "tpu": (256, 512), "cpu": (32, 64)}
_KIND_OF_PLATFORM = {
    **dict.fromkeys(("gpu", "cuda", "rocm", "triton", "cudnn"), "gpu"),
    "tpu": "tpu",
    **dict.fromkeys(("cpu", "xla", "any", "unknown"), "cpu"),
}


def estimate_shared_memory_bytes(
    q_block: Whole,
    kv_block: Whole,
    head_dim: Whole,
    dtype: Any = np.float16,
    include_softmax: bool = True,
    *,
    num_stages: Whole = 1,
) -> int:
    """Shared memory of an attention tile: queries, `num_stages` blocks of keys and values, row statistics.

    Example:
        >>> estimate_shared_memory_bytes(128, 256, 64)
        82944
        >>> estimate_shared_memory_bytes(128, 256, 64, num_stages=3) - 82944  # two more stages
        131072
    """
    q_block, kv_block = _positive("q_block", q_block), _positive("kv_block", kv_block)
    num_stages = _positive("num_stages", num_stages)
    row = _positive("head_dim", head_dim) * _itemsize(dtype)
    statistics = 2 * 4 * q_block if include_softmax else 0  # a float32 maximum and sum a row
    total = q_block * row + 2 * kv_block * row * num_stages + statistics
    return -(-total // _ALIGNMENT) * _ALIGNMENT


def get_shared_memory_limit(device: Any = None) -> int:
    """The most shared memory a CTA can use, in bytes; the variable `EJKERNEL_TRITON_SMEM_LIMIT` overrides it.

    For a GPU that is not in the table, the compute capability decides. Where that is unknown too, and for everything
    that is not a GPU, it is 48 KiB.

    Args:
        device: a `jax.Device`, a topology's device, a chip or its slug; None is JAX's default device.

    Example:
        >>> get_shared_memory_limit("nvidia-h200"), get_shared_memory_limit("nvidia-t4")
        (232448, 65536)
    """
    override = os.environ.get(_LIMIT_VARIABLE, "").strip()
    if override:
        if not override.isdecimal() or int(override) == 0:
            raise InvalidInputError(
                f"{_LIMIT_VARIABLE} is {override!r}; expected a positive number of bytes, or unset it."
            )
        return int(override)
    device = resolve_device(device)
    model = str(getattr(device, "device_kind", ""))
    chip = identify(model)
    known = chip.shared_memory_per_block if chip else _LIMIT_BY_CAPABILITY.get(compute_capability(device))
    if not known and _ADA.search(model.lower()):
        known = _LIMIT_BY_CAPABILITY[89]
    return known or _DEFAULT_LIMIT


def select_num_warps(q_block: Whole, kv_block: Whole, head_dim: Whole, dtype: Any = np.float16) -> int:
    """The fewest warps, of 4, 8 or 16, whose registers hold the tile's scores and its output accumulator.

    Example:
        >>> select_num_warps(64, 64, 64), select_num_warps(128, 128, 128), select_num_warps(128, 64, 256)
        (4, 8, 16)
    """
    registers = max(_itemsize(dtype) // 4, 1)  # an accumulator is float32, or float64 with float64 inputs
    columns = _positive("kv_block", kv_block) + _positive("head_dim", head_dim)
    accumulators = _positive("q_block", q_block) * columns * registers
    fitting = (warps for warps in _WARP_CHOICES if accumulators <= warps * _ACCUMULATORS_PER_WARP)
    return next(fitting, _WARP_CHOICES[-1])


def select_num_stages(smem_bytes: Whole, *, device: Any = None) -> int:
    """How many pipeline stages of `smem_bytes` each, 1 to 3, fit into the shared memory of a CTA.

    Raises:
        InvalidInputError: if not even one fits.

    Example:
        >>> [select_num_stages(kib * 1024, device="nvidia-h200") for kib in (60, 100, 200)]
        [3, 2, 1]
    """
    smem_bytes = _positive("smem_bytes", smem_bytes)
    limit = get_shared_memory_limit(device)
    if smem_bytes > limit:
        raise InvalidInputError(
            f"smem_bytes is {smem_bytes}; expected at most {limit}, the shared memory of one block here. "
            f"Use smaller blocks (see select_block_sizes), or set {_LIMIT_VARIABLE} if the device has more."
        )
    spare = limit - smem_bytes
    return 3 if spare > 2 * smem_bytes else 2 if spare > smem_bytes else 1


def select_block_sizes(
    seq_len: Whole, head_dim: Whole, platform: Any, *, dtype: Any = np.float16, device: Any = None
) -> tuple[int, int]:
    """Query and key block sizes for attention: powers of two, no longer than the sequence needs.

    On a GPU they fit into its shared memory, as estimated by `estimate_shared_memory_bytes`.

    Args:
        seq_len: length of the longer sequence.
        head_dim: head dimension.
        platform: `gpu`, `tpu` or `cpu`, as returned by `get_device_platform`, or the name of a kernel platform.
        dtype: dtype of query, key and value.
        device: the device whose shared memory is the limit (see `get_shared_memory_limit`).

    Example:
        >>> select_block_sizes(4096, 128, "gpu", device="nvidia-h200"), select_block_sizes(4096, 128, "tpu")
        ((128, 128), (256, 512))
        >>> select_block_sizes(20, 128, "gpu", device="nvidia-h200")
        (32, 32)
    """
    seq_len, head_dim = _positive("seq_len", seq_len), _positive("head_dim", head_dim)
    name = str(getattr(platform, "value", platform)).lower()
    if name == "pallas":  # Pallas runs on GPUs and TPUs: the device decides
        name = str(getattr(resolve_device(device), "platform", ""))
    kind = _KIND_OF_PLATFORM.get(name)
    if kind is None:
        raise InvalidInputError(f"platform is {platform!r}; expected one of {', '.join(_KIND_OF_PLATFORM)}.")
    enough = max(_DOT_SIDE, power_of_two(seq_len))
    q_block, kv_block = (min(side, enough) for side in _LARGEST_BLOCKS[kind])
    if kind != "gpu":
        return q_block, kv_block
    limit = get_shared_memory_limit(device)

    def fits(num_stages: int) -> bool:
        return estimate_shared_memory_bytes(q_block, kv_block, head_dim, dtype, num_stages=num_stages) <= limit

    # A second stage hides the latency of loads, which is worth shorter key blocks, down to two tensor-core tiles.
    while kv_block > 2 * _DOT_SIDE and not fits(num_stages=2):
        kv_block //= 2
    # Sides below 16 cannot use tensor cores: the last resort for very large head dims.
    while not fits(num_stages=1) and (q_block, kv_block) != (1, 1):
        if q_block > kv_block or kv_block == 1:
            q_block //= 2
        else:
            kv_block //= 2
    if not fits(num_stages=1):
        raise InvalidInputError(
            f"head_dim is {head_dim}: one row of query, key and value does not fit in {limit} bytes of "
            f"shared memory. Use a smaller head_dim or dtype, or raise {_LIMIT_VARIABLE}."
        )
    return q_block, kv_block


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value <= 0:
        raise InvalidInputError(f"{name} is {value!r} ({type(value).__name__}); expected a positive int.")
    return int(value)


def _itemsize(dtype: Any) -> int:
    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        raise InvalidInputError(f"dtype is {dtype!r}; expected a dtype, such as float16.") from None
