"""The forward's block sizes: defaults, those worth timing, and the clipping of parameters that do not fit."""

from __future__ import annotations

from typing import Any

from ejkernel.contracts.params import FwdParams
from ejkernel.kernels._pallas.tpu.generations import LANES, generation_of

# Queries and keys of a step, keys whose logits are computed at a time.
READS = ("q_blocksize", "kv_blocksize", "blocksize_keys")
# The side of what is computed at a time.
PART = 512


def _params(*sizes: int) -> FwdParams:
    return FwdParams(**dict(zip(READS, sizes, strict=True)))


def defaults(shapes: dict[str, Any], spec: Any, device: Any) -> FwdParams:
    """Blocks where nothing was tuned: large ones, for a step costs some 300 cycles beside what it computes.

    Counted from libtpu's schedules, 8192 queries of a head, causal, D 128, thousands of cycles with blocks of 1024 by 1024,
    1024 by 2048 and 2048 by 2048: 168, 165 and 161 on v5e, 93, 79 and 70 on v6e.
    """
    return effective(shapes, spec, _asked(shapes, _largest(shapes)), device)


def space(shapes: dict[str, Any], spec: Any, device: Any) -> list[FwdParams]:
    """Blocks worth timing."""
    sides = [_largest(shapes), (2048, 1024), (1024, 2048), (1024, 1024), (512, 1024)]
    return list(dict.fromkeys(effective(shapes, spec, _asked(shapes, x), device) for x in sides))


def _largest(shapes: dict[str, Any]) -> tuple[int, int]:
    """Six products in bfloat16 for one in float32, and biases and masks of pairs, are more code, and take more memory."""
    pairs = sum(shapes[name].dtype.itemsize for name in _of_pairs(shapes))
    if shapes["query"].dtype.itemsize > 2 or pairs > 2:
        return 1024, 1024
    # With a bias in bfloat16 on v6e, in thousands of cycles as above: 120 with 1024 by 1024, 110 with these, 103 with 2048 by
    # 2048, which takes twice the time to compile and more memory than v5p and tpu7x have.
    return (2048, 1024) if pairs else (2048, 2048)


def _asked(shapes: dict[str, Any], sides: tuple[int, int]) -> FwdParams:
    """Blocks of at most these sides into which the lengths divide evenly."""

    def even(length: int, side: int) -> int:
        each = -(-length // -(-length // side))
        unit = PART if each > PART else LANES
        return -(-each // unit) * unit

    lengths = shapes["query"].shape[1], shapes["key"].shape[1]
    return _params(*map(even, lengths, sides), PART)


def _of_pairs(shapes: dict[str, Any]) -> list[str]:
    """Arrays that have a value for every pair of a query and a key."""
    return [name for name in ("bias", "attention_mask") if name in shapes and min(shapes[name].shape[2:]) > 1]


def effective(shapes: dict[str, Any], spec: Any, params: FwdParams, device: Any) -> FwdParams:
    """What was asked for, clipped to the lengths and to the memory of the chip.

    A block is a multiple of 128, the keys computed at a time divide a block of keys.
    """
    generation = generation_of(device)
    lengths = shapes["query"].shape[1], shapes["key"].shape[1]
    rows, keys = (
        min(_whole(asked or 1024), _whole(length, up=True))
        for asked, length in zip((params.q_blocksize, params.kv_blocksize), lengths, strict=True)
    )
    while vmem_bytes(shapes, rows, keys) > generation.vmem_bytes and max(rows, keys) > LANES:
        rows, keys = (rows, _whole(keys // 2)) if keys >= rows else (_whole(rows // 2), keys)
    part = min(_whole(params.blocksize_keys or PART), keys)
    while keys % part:
        part -= LANES
    return _params(rows, keys, part)


def _whole(size: int, up: bool = False) -> int:
    """A multiple of 128, at least one."""
    return max(1, -(-size // LANES) if up else size // LANES) * LANES


def vmem_bytes(shapes: dict[str, Any], rows: int, keys: int) -> int:
    """What a step's blocks take, each of them twice, for one is copied while another is computed; and its logits."""
    query, value = shapes["query"], shapes["value"]
    size = query.dtype.itemsize
    dim, value_dim = (_whole(x.shape[3], up=True) for x in (query, value))
    blocks = 2 * size * (rows * dim + keys * dim + keys * value_dim + rows * value_dim)
    pairs = sum(2 * shapes[name].dtype.itemsize * rows * keys for name in _of_pairs(shapes))
    # What the compiler keeps of logits beside the two parts that the kernel does, by count.
    kept = (16 if pairs else 5) * rows * keys * size // 2
    return blocks + pairs + 4 * value_dim * rows + 2 * 4 * PART * PART + kept


def query_part(rows: int) -> int:
    """The queries whose logits are computed at a time: a part of a block's."""
    return next(part for part in (PART, 384, 256, 128) if rows % part == 0)
