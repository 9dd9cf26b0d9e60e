"""Keys that no query may see: they may hold NaN, and a weight of 0 times NaN is not 0."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import key_intervals, segment_ids, whole_tiles
from ejkernel.kernels.common.intervals import intervals
from ejkernel.kernels.common.unseen import without_unseen

# Of a query and a key, in all batch entries. On an H200 comparing 2**24, 2**26, 2**28 and 2**32 pairs took 8, 18, 95 and
# 2350 us, sorting and searching instead 32, 42, 46 and 58, nearly all of it the sort.
FEW_PAIRS = 2**27


def without_padding(
    arrays: dict[str, Array], spec: Any, backward: bool, by_kernel: bool = False
) -> tuple[dict[str, Array], int]:
    """``arrays`` with zeros for keys that no query may see, and how many keys before all windows were dropped.

    Where nothing but a static window decides, those are the keys before the first query's window. A forward multiplies values
    by weights, and replaces what it computes from such keys by -inf. ``by_kernel``: the kernel puts the zeros itself, and is
    told where: ``padding``, by key.
    """
    arrays = with_narrow_ids(arrays)
    if {"attention_mask", "bias"} & arrays.keys():
        return without_unseen(arrays, spec), 0
    q_len, kv_len = arrays["query"].shape[1], arrays["key"].shape[1]
    dropped = 0
    if "kv_start" not in arrays:
        start, stop = intervals(spec.window, q_len, kv_len)
        dropped = int(start.min(where=start < stop, initial=kv_len))
        # A forward reads from whole tiles on. Where no query sees anything, nothing is dropped.
        if dropped == kv_len or (not backward and whole_tiles(dropped) == dropped):
            dropped = 0
    if {"kv_start", "kv_segment_ids"} & arrays.keys():
        seen = seen_keys(*key_intervals(arrays, spec), segment_ids(arrays), kv_len)
        if by_kernel:
            cleared = {"padding": (~seen).astype(jnp.int32)}
        else:
            names = ("key", "value") if backward else ("value",)
            cleared = {name: jnp.where(seen[..., None, None], arrays[name], 0) for name in names}
        arrays = {**arrays, **cleared}
    if dropped:
        of_keys = {"key", "value", "kv_segment_ids", "padding"} & arrays.keys()
        arrays = {**arrays, **{name: arrays[name][:, dropped:] for name in of_keys}}
    return arrays, dropped


def with_narrow_ids(arrays: dict[str, Array]) -> dict[str, Array]:
    """Ids of 64 bits as their ranks: kernels compare 32 bits, and two ids must not become one."""
    names = ("q_segment_ids", "kv_segment_ids")
    if names[0] not in arrays or arrays[names[0]].dtype.itemsize <= 4:
        return arrays
    every = jnp.sort(jnp.concatenate([arrays[name] for name in names], 1), axis=1)

    def rank(ids):
        found = jax.vmap(jnp.searchsorted)(every, ids).astype(jnp.int32)
        return jnp.where(ids > 0, found + 1, 0).astype(jnp.int32)

    return {**arrays, **{name: rank(arrays[name]) for name in names}}


def seen_keys(start, stop, segments, kv_len: int) -> Array:
    """``[B|1, Sk]``: whether any query may see a key.

    Neither ``start`` nor ``stop`` decreases from row to row, so the rows whose interval holds a key are themselves an interval.
    With segments one of them must have the key's id. Few pairs are all compared, which is one reduction; of many, rows sorted
    by id and place are searched for the first one of that id that is not before the interval. Memory is linear in the lengths.

    Example:
        >>> ids = jnp.array([[1, 1, 3]]), jnp.array([[1, 2, 3, 3]])
        >>> seen_keys(*intervals((None, 0), 3, 4), ids, 4).tolist()
        [[True, False, True, True]]
    """
    place = np.arange(kv_len, dtype=np.int32)[None]
    # Rows whose stop, and whose start, is at or before a key.
    if isinstance(start, np.ndarray):
        first, last = (np.searchsorted(x[0], place[0], "right").astype(np.int32)[None] for x in (stop, start))
    else:
        first, last = (_lower_bound((x,), (jnp.asarray(place) + 1,)) for x in (stop, start))
    if segments is None:
        return jnp.asarray(first < last)
    q_ids, kv_ids = segments
    batch, q_len = q_ids.shape
    if batch * q_len * kv_len <= FEW_PAIRS:
        row = np.arange(q_len, dtype=np.int32)
        inside = (first[..., None] <= row) & (row < last[..., None])
        return (kv_ids > 0) & (inside & (q_ids[:, None] == kv_ids[..., None])).any(-1)
    order = jnp.argsort(q_ids, axis=1, stable=True).astype(jnp.int32)
    by_id = jnp.take_along_axis(q_ids, order, 1)
    at = _lower_bound((by_id, order), (kv_ids, jnp.asarray(first)))
    found_id, found = (_at(x, at) for x in (by_id, order))
    return (kv_ids > 0) & (found_id == kv_ids) & (found >= first) & (found < last)


def _lower_bound(columns: tuple[Array, ...], values: tuple[Array, ...]) -> Array:
    """Where values ``[B|1, n]`` belong among sorted rows of columns ``[B|1, m]``: before the first that is not below them.

    Compared lexicographically, and unrolled: XLA fuses several steps into a kernel, where ``jnp.searchsorted`` would loop.
    """
    size = columns[0].shape[1]
    batch = max(x.shape[0] for x in (*columns, *values))
    place = jnp.zeros((batch, values[0].shape[1]), jnp.int32)
    for step in (1 << i for i in reversed(range(size.bit_length()))):
        probe = place + step
        below = False
        for column, value in reversed(tuple(zip(columns, values, strict=True))):
            there = _at(column, probe - 1)
            below = (there < value) | ((there == value) & below)
        place = jnp.where((probe <= size) & below, probe, place)
    return place


def _at(column: Array, index: Array) -> Array:
    """``column [B|1, m]`` at ``index [B, n]``; past the end the last."""
    return jnp.take_along_axis(jnp.broadcast_to(column, (index.shape[0], column.shape[1])), index, 1, mode="clip")
