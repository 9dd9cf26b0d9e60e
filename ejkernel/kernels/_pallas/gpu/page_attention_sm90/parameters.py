"""The kernel's tile sizes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ejkernel.contracts.params import FwdParams
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.parameters import (
    forward_defaults,
    forward_effective,
    forward_space,
)
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import CHUNK, CORE_ROWS, ROWS

# Pages of one step, at most.
MOST_COPIES = 8
# The tile for head dims above 64: a little faster than that of the dense kernel, whose steps are longer.
THREE_CONSUMERS = FwdParams(q_blocksize=192, kv_blocksize=64, num_warps=12, num_stages=3)


def pack_of(group: int) -> int:
    """How many of the heads that share their keys have rows in one block. Copies are of 8 rows at least.

    Example:
        >>> [pack_of(group) for group in (1, 4, 6, 7, 16)]
        [1, 4, 2, 1, 8]
    """
    return math.gcd(group, ROWS // CORE_ROWS)


def step_of(page: int, most: int) -> int:
    """Keys a step, at most so many: whole pages, or a whole part of one. (Of pages that it does not take, 16.)

    Example:
        >>> [step_of(page, 128) for page in (16, 48, 64, 80, 256, 400)]
        [128, 96, 128, 80, 128, 80]
    """
    sizes = range(most // CHUNK * CHUNK, 0, -CHUNK)
    return next((x for x in sizes if (x % page == 0 and x // page <= MOST_COPIES) or page % x == 0), CHUNK)


def defaults(shapes: dict[str, Any]) -> FwdParams:
    """The tile where nothing was tuned."""
    dims = _head_dims(shapes)
    return effective(shapes, forward_defaults(*dims) if max(dims) <= ROWS else THREE_CONSUMERS)


def space(shapes: dict[str, Any]) -> list[FwdParams]:
    """The tiles that are worth timing."""
    tiles = [*forward_space(*_head_dims(shapes)), THREE_CONSUMERS]
    return list(dict.fromkeys(effective(shapes, params) for params in tiles))


def effective(shapes: dict[str, Any], params: FwdParams) -> FwdParams:
    """What was asked for, clipped to what the kernel takes, with steps of whole pages."""
    params = forward_effective(params, *_head_dims(shapes))
    return dataclasses.replace(params, kv_blocksize=step_of(shapes["key_cache"].shape[3], params.kv_blocksize))


def _head_dims(shapes: dict[str, Any]) -> tuple[int, int]:
    return shapes["query"].shape[3], shapes["value_cache"].shape[4]
