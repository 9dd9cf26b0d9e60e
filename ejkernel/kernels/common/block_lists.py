"""Lists of the blocks that a mask keeps, made on the device: their lengths are data, so one compilation serves all masks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array


class Blocks(NamedTuple):
    """For each block of one axis the blocks of the other that it meets.

    Attributes:
        start: int32 ``[B|1, H|1, blocks]``, where the list of each block begins in ``index``.
        full: how many of them are wholly visible and need no mask; they come first.
        count: how many there are.
        index: int32 ``[B|1, length]``; what follows a list is not to be read.
    """

    start: Any
    full: Any
    count: Any
    index: Any


def list_blocks(kept: Array, full: Array | np.ndarray) -> Blocks:
    """Of ``[B|1, H|1, blocks, others]``: each block's list, with room for all others; ``full`` may have fewer dimensions."""
    batch, heads, blocks, others = kept.shape
    place = jnp.arange(others, dtype=jnp.int32)
    # One array is sorted, not a key with a place: a GPU takes less time for it.
    order = jnp.where(kept, jnp.where(full, 0, others), 2 * others) + place
    order = order.astype(jnp.uint16 if 3 * others < 2**16 else jnp.int32)
    index = jnp.sort(order, axis=-1, stable=False).astype(jnp.int32) % others
    start = jnp.arange(heads * blocks, dtype=jnp.int32).reshape(1, heads, blocks) * others
    counts = ((kept & full).sum(-1, dtype=jnp.int32), kept.sum(-1, dtype=jnp.int32))
    return Blocks(jnp.broadcast_to(start, counts[0].shape), *counts, index.reshape(batch, -1))


def block_kinds(lists: Blocks, others: int) -> Array:
    """int8 ``[B|1, H|1, blocks, others]`` from lists: 0 where a block is not listed, 2 where it is wholly visible, else 1."""
    start, full, count, index = map(jnp.asarray, lists)
    # Of a vmapped mask the counts may differ from one batch entry to the next where the starts do not.
    batch, (heads, blocks) = max(x.shape[0] for x in lists), start.shape[1:]
    entry = jnp.arange(others, dtype=jnp.int32)
    at = jnp.minimum(start[..., None] + entry, index.shape[1] - 1)
    at = jnp.broadcast_to(at, (batch, *at.shape[1:])).reshape(batch, -1)
    listed = jnp.take_along_axis(jnp.broadcast_to(index, (batch, index.shape[1])), at, axis=1)
    listed = listed.reshape(batch, heads, blocks, others)
    row = jnp.arange(batch * heads * blocks, dtype=jnp.int32).reshape(batch, heads, blocks, 1)
    target = jnp.where((entry < count[..., None]) & (listed < others), row * others + listed, listed.size)
    kinds = jnp.broadcast_to(jnp.where(entry < full[..., None], 2, 1).astype(jnp.int8), listed.shape)
    nowhere = jnp.zeros(listed.size, jnp.int8)
    kinds = nowhere.at[target.reshape(-1)].set(kinds.reshape(-1), mode="drop", unique_indices=True)
    return kinds.reshape(listed.shape)


def transposed(lists: Blocks, others: int, kv_heads: int, whole: int) -> Blocks:
    """Of the lists of blocks of queries: for each block of keys, those of the queries that list it.

    Lists that each query head has of its own become one a key head, which counts through the blocks of all its query heads,
    head by head. Of the blocks of queries the first ``whole`` have all their rows; another is never full here.
    """
    kinds = block_kinds(lists, others)
    batch, heads, blocks, _ = kinds.shape
    kinds = jnp.where((np.arange(blocks) < whole)[:, None], kinds, jnp.minimum(kinds, 1))
    if heads > 1:
        kinds = kinds.reshape(batch, kv_heads, heads // kv_heads * blocks, others)
    kinds = kinds.swapaxes(2, 3)
    return list_blocks(kinds > 0, kinds == 2)
