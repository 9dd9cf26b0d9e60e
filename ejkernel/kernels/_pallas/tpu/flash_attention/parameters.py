"""The forward's block sizes: defaults, those worth timing, and the clipping of parameters that do not fit."""

from __future__ import annotations

from typing import Any

from ejkernel.contracts.params import FwdParams
from ejkernel.kernels._pallas.tpu.generations import LANES, generation_of

# Queries and keys of a step, keys whose logits are computed at a time.
READS = ("q_blocksize", "kv_blocksize", "blocksize_keys")


def _params(*sizes: int) -> FwdParams:
    return FwdParams(**dict(zip(READS, sizes, strict=True)))


def defaults(shapes: dict[str, Any], spec: Any, device: Any) -> FwdParams:
    """Blocks where nothing was tuned."""
    return effective(shapes, spec, _params(1024, 1024, 512), device)


def space(shapes: dict[str, Any], spec: Any, device: Any) -> list[FwdParams]:
    """Blocks worth timing."""
    asked = [(1024, 1024, 512), (1024, 2048, 512), (512, 1024, 512), (2048, 2048, 512)]
    return list(dict.fromkeys(effective(shapes, spec, _params(*sizes), device) for sizes in asked))


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
    part = min(_whole(params.blocksize_keys or 512), keys)
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
    pairs = sum(
        2 * shapes[name].dtype.itemsize * rows * keys
        for name in ("bias", "attention_mask")
        if name in shapes and min(shapes[name].shape[2:]) > 1
    )
    return blocks + pairs + 4 * value_dim * rows + 6 * 4 * rows * min(keys, 512)


def query_part(rows: int) -> int:
    """The queries whose logits are computed at a time: a part of a block's."""
    return next(part for part in (512, 384, 256, 128) if rows % part == 0)
