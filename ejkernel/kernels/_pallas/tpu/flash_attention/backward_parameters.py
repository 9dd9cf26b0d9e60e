"""The backward's block sizes: defaults, those worth timing, and the clipping of parameters that do not fit."""

from __future__ import annotations

import math
from typing import Any

from ejkernel.contracts.params import BwdParams
from ejkernel.kernels._pallas.tpu.generations import LANES, generation_of

# Queries and keys of a step.
READS = ("q_blocksize", "kv_blocksize")
BLOCK = 1024
# Of float32, whose products are six: more code than gain in larger blocks.
WIDE_BLOCK = 512
# Bytes of a float32.
WIDE = 4


def _params(*sizes: int) -> BwdParams:
    return BwdParams(**dict(zip(READS, sizes, strict=True)))


def defaults(shapes: dict[str, Any], spec: Any, device: Any) -> BwdParams:
    """Blocks where nothing was tuned."""
    block = WIDE_BLOCK if shapes["query"].dtype.itemsize == WIDE else BLOCK
    return effective(shapes, spec, _params(block, block), device)


def space(shapes: dict[str, Any], spec: Any, device: Any) -> list[BwdParams]:
    """Blocks worth timing."""
    asked = [(1024, 1024), (512, 1024), (1024, 512), (512, 512), (2048, 1024)]
    return list(dict.fromkeys(effective(shapes, spec, _params(*sizes), device) for sizes in asked))


def effective(shapes: dict[str, Any], spec: Any, params: BwdParams, device: Any) -> BwdParams:
    """What was asked for, clipped to the lengths and to the memory of the chip; blocks are multiples of 128."""
    room = generation_of(device).vmem_bytes
    lengths = shapes["query"].shape[1], shapes["key"].shape[1]
    rows, keys = (
        min(whole(asked or BLOCK), whole(length, up=True))
        for asked, length in zip((params.q_blocksize, params.kv_blocksize), lengths, strict=True)
    )
    while step_bytes(shapes, rows, keys) + span_bytes(shapes, keys) > room and max(rows, keys) > LANES:
        rows, keys = (rows, whole(keys // 2)) if keys >= rows else (whole(rows // 2), keys)
    return _params(rows, keys)


def spans(shapes: dict[str, Any], rows: int, keys: int, device: Any) -> int:
    """Into how many spans the keys are cut, so that vector memory holds the gradients of one; of these blocks."""
    room = generation_of(device).vmem_bytes - step_bytes(shapes, rows, keys)
    blocks = max(1, room // span_bytes(shapes, keys))
    return math.ceil(math.ceil(shapes["key"].shape[1] / keys) / blocks)


def whole(size: int, up: bool = False) -> int:
    """A multiple of 128, at least one."""
    return max(1, -(-size // LANES) if up else size // LANES) * LANES


def widths(shapes: dict[str, Any]) -> tuple[int, int]:
    """Of queries and of values, in whole registers."""
    return whole(shapes["query"].shape[3], up=True), whole(shapes["value"].shape[3], up=True)


def step_bytes(shapes: dict[str, Any], rows: int, keys: int) -> int:
    """What a step's blocks take, each of them twice, for one is copied while another is computed; its sums and its logits."""
    size, (dim, value_dim) = shapes["query"].dtype.itemsize, widths(shapes)
    blocks = 2 * size * (rows + keys) * (dim + value_dim) + 4 * WIDE * rows * dim
    pairs = sum(
        2 * shapes[name].dtype.itemsize * rows * keys
        for name in ("bias", "attention_mask")
        if name in shapes and min(shapes[name].shape[2:]) > 1
    )
    logits = (6 if pairs else 5 if size == WIDE else 3) * WIDE * rows * keys
    return blocks + pairs + WIDE * rows * dim + logits


def span_bytes(shapes: dict[str, Any], keys: int) -> int:
    """What the gradients of so many keys take: the sums, and the results that are copied to memory."""
    return (WIDE + shapes["query"].dtype.itemsize) * keys * sum(widths(shapes))
