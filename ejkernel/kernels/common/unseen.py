"""Keys and values that no query sees: they may be NaN, and a weight of 0 times NaN is not 0."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels.common.intervals import intervals

# Of a query and a key, in all batch entries. On an H200 comparing 2**24, 2**26, 2**28 and 2**32 pairs took 8, 18, 95 and
# 2350 us, sorting and searching instead 32, 42, 46 and 58, nearly all of it the sort.
FEW_PAIRS = 2**27


def without_unseen(arrays: dict[str, Array], spec: Any) -> dict[str, Array]:
    """Keys and values that no query sees as zeros, where a mask or a bias decides: they may be NaN, and 0 * NaN is not 0.

    Looking for them takes a pass over the mask, so it is done only if there is anything to find.
    """
    if not {"attention_mask", "bias"} & arrays.keys():
        return arrays

    def zeroed(key, value):
        seen = _seen(arrays, spec)[..., None]
        return jnp.where(seen, key, 0), jnp.where(seen, value, 0)

    key, value = arrays["key"], arrays["value"]
    finite = jnp.isfinite(key).all() & jnp.isfinite(value).all()
    key, value = jax.lax.cond(finite, lambda key, value: (key, value), zeroed, key, value)
    return {**arrays, "key": key, "value": value}


def _seen(arrays: dict[str, Array], spec: Any) -> Array:
    """``[B, Sk, Hkv]``: whether any query sees a key."""
    q_len, kv_heads = arrays["query"].shape[1], arrays["key"].shape[2]
    kv_len = arrays["key"].shape[1]
    start, stop = (
        (arrays[n] for n in ("kv_start", "kv_stop")) if "kv_start" in arrays else intervals(spec.window, q_len, kv_len)
    )
    column = jnp.arange(kv_len)
    seen = ((column >= start[..., None]) & (column < stop[..., None]))[:, None]
    if "q_segment_ids" in arrays:
        q_ids, kv_ids = arrays["q_segment_ids"][:, None, :, None], arrays["kv_segment_ids"][:, None, None]
        seen &= (q_ids == kv_ids) & (q_ids > 0)
    if "attention_mask" in arrays:
        seen &= arrays["attention_mask"]
    if "bias" in arrays:
        seen &= arrays["bias"] > -jnp.inf
    seen = seen.any(2)  # [B|1, H|1, Sk]
    batch, _, heads, _ = arrays["query"].shape
    seen = jnp.broadcast_to(seen, (batch, heads, kv_len)).reshape(batch, kv_heads, -1, kv_len).any(2)
    return seen.swapaxes(1, 2)


def with_narrow_ids(arrays: dict[str, Array]) -> dict[str, Array]:
    """Ids of 64 bits as their ranks: kernels compare 32 bits, and two ids must not become one."""
    if "q_segment_ids" not in arrays or arrays["q_segment_ids"].dtype.itemsize <= 4:
        return arrays
    return with_ranked_ids(arrays)


def with_ranked_ids(arrays: dict[str, Array]) -> dict[str, Array]:
    """Ids as int32 of their order; those that are padding as 0."""
    names = ("q_segment_ids", "kv_segment_ids")
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
