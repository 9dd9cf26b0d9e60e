"""The kernel's tile sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.parameters import (
    backward_effective,
    forward_effective,
    forward_space,
)
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import CHUNK, ROWS

# Two consumers: more have more rows of the mask, and compute what only one of them sees. As many slots as there is room for.
DEFAULT = FwdParams(q_blocksize=128, kv_blocksize=128, num_warps=8, num_stages=4)
THREE_CONSUMERS = FwdParams(q_blocksize=192, kv_blocksize=64, num_warps=12, num_stages=3)


def defaults(shapes: dict[str, Any], spec: Any) -> FwdParams:
    """The tile where nothing was tuned."""
    return effective(shapes, spec, DEFAULT)


def space(shapes: dict[str, Any], spec: Any) -> list[FwdParams]:
    """The tiles that are worth timing."""
    tiles = [DEFAULT, *forward_space(*head_dims(shapes)), THREE_CONSUMERS]
    return list(dict.fromkeys(effective(shapes, spec, params) for params in tiles))


def effective(shapes: dict[str, Any], spec: Any, params: FwdParams) -> FwdParams:
    """What was asked for, clipped to what the kernel takes, with steps that divide a block of keys.

    The only block of keys may have any length: steps need not divide it.
    """
    dims = head_dims(shapes)
    tile = forward_effective(params, *dims)
    length, size = spec.grid.lengths[1], spec.grid.sizes[1]
    if size == length:
        return tile
    # Of blocks that the kernel does not take, 16.
    step = next((x for x in range(tile.kv_blocksize, 0, -CHUNK) if size % x == 0), CHUNK)
    # Shorter steps leave room for more slots.
    return forward_effective(dataclasses.replace(params, kv_blocksize=step), *dims)


def backward_dims(dim: int, value_dim: int) -> tuple[int, int]:
    """The head dims that the backward runs with: its kernel has 64 and 128, and others are padded.

    Example:
        >>> backward_dims(96, 32), backward_dims(64, 128)
        ((128, 64), (128, 128))
    """
    dim, value_dim = (-(-x // ROWS) * ROWS for x in (dim, value_dim))
    return max(dim, value_dim), value_dim


def backward_tile(shapes: dict[str, Any]) -> BwdParams:
    """The tile of the backward, which has one, whatever is asked for."""
    return backward_effective(*backward_dims(*head_dims(shapes)))


def head_dims(shapes: dict[str, Any]) -> tuple[int, int]:
    """Of queries and of values."""
    return shapes["query"].shape[3], shapes["value"].shape[3]
