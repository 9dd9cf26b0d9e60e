"""Which keys a block of queries can see, as ranges that bound the loops.

Causality, windows and packed sequences all leave a query row one interval ``[start, stop)`` of keys, and both ends
never decrease from row to row. So the ends of a block's range are those of its first and last row, and the rows that
see a block of keys are found by bisection. Segment ids are arbitrary: they give the hull of the matching positions.

A *range* is four integers a block: ``[begin, end)`` may hold visible pairs, ``[full_begin, full_end)`` holds nothing
but visible pairs and needs no mask. Ranges of static masks are numpy arrays, so loops that cannot run are not built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# The arrays of a call that decide which pairs count.
BY_DATA = frozenset({"attention_mask", "bias", "q_segment_ids", "kv_start"})


class Ranges(NamedTuple):
    """For each batch entry (or one for all) and block, ``[batch or 1, blocks]`` each."""

    begin: Any
    end: Any
    full_begin: Any
    full_end: Any


def key_ranges(start, stop, segments, q_block: int, kv_len: int, shifted: bool = True) -> Ranges:
    """The keys that each block of queries needs; the last block is shifted back to the end, or else partial."""
    q_len = start.shape[1]
    first = np.arange(0, q_len, q_block)
    if shifted:
        first = np.minimum(first, q_len - q_block)
    last = np.minimum(first + q_block, q_len) - 1
    ranges = Ranges(start[:, first], stop[:, last], start[:, last], stop[:, first])
    if segments is not None:
        ranges = _intersect(ranges, _segment_ranges(*segments, first, q_block, kv_len))
    return ranges


def query_ranges(start, stop, segments, kv_block: int, kv_len: int) -> Ranges:
    """The queries that need each block of keys; the last, partial block of keys is never full."""
    first = np.arange(0, kv_len, kv_block)
    last = np.minimum(first + kv_block, kv_len)
    bisect = _bisect(start)
    ranges = Ranges(
        bisect(stop, first, "right"),
        bisect(start, last, "left"),
        bisect(stop, last, "left"),
        bisect(start, first, "right"),
    )
    if kv_len % kv_block:
        xp = np if isinstance(start, np.ndarray) else jnp
        partial = first == first[-1]
        ranges = ranges._replace(full_end=xp.where(partial, 0, ranges.full_end))
    if segments is not None:
        q_segments, kv_segments = segments
        ranges = _intersect(ranges, _segment_ranges(kv_segments, q_segments, first, kv_block, q_segments.shape[1]))
    return ranges


def _bisect(array) -> Callable:
    if isinstance(array, np.ndarray):
        return lambda rows, values, side: np.stack([np.searchsorted(row, values, side) for row in rows]).astype(
            np.int32
        )

    def count(row, values, side):
        # Every pair compared: a bisection is a loop of small kernels, which takes a GPU longer.
        return jnp.searchsorted(row, values, side=side, method="compare_all")

    search = jax.vmap(count, in_axes=(0, None, None))
    return lambda rows, values, side: search(jnp.asarray(rows), jnp.asarray(values, jnp.int32), side).astype(jnp.int32)


def _segment_ranges(own, other, first, block: int, length: int) -> Ranges:
    """The hull of the positions of ``other`` whose ids lie between those of each block of ``own``.

    A block of one id has nothing but visible pairs where that id is, if it is in one place. There is one reduction over blocks
    and one over positions: on a GPU, steps that depend on each other take longer than what they compute.
    """
    ids = own[:, np.minimum(first[:, None] + np.arange(block), own.shape[1] - 1)]
    large = jnp.asarray(jnp.iinfo(ids.dtype).max, ids.dtype)
    low = jnp.where(ids > 0, ids, large).min(-1)
    least, high = ids.min(-1), ids.max(-1)
    other = other[:, None, :]
    inside, same = (other >= low[..., None]) & (other <= high[..., None]), other == high[..., None]
    position = jnp.arange(length, dtype=jnp.int32)

    def hull(where):
        return jnp.where(where, position, length).min(-1), jnp.where(where, position + 1, 0).max(-1)

    (begin, end), (full_begin, full_end), count = hull(inside), hull(same), same.sum(-1, dtype=jnp.int32)
    full = (least == high) & (high > 0) & (count == full_end - full_begin)
    return Ranges(begin, end, jnp.where(full, full_begin, length), jnp.where(full, full_end, 0))


def _intersect(a: Ranges, b: Ranges) -> Ranges:
    return Ranges(
        jnp.maximum(a.begin, b.begin),
        jnp.minimum(a.end, b.end),
        jnp.maximum(a.full_begin, b.full_begin),
        jnp.minimum(a.full_end, b.full_end),
    )


class Walk(NamedTuple):
    """How a loop visits one block's range: ``head`` masked steps, ``full`` unmasked ones, ``tail`` masked ones.

    Arrays ``[batch tiles or 1, blocks]``; the steps follow each other from ``begin``, the last may pass ``end``.
    """

    begin: Any
    end: Any
    head: Any
    full: Any
    tail: Any


def plan_walk(ranges: Ranges, step: int, batch_tile: int, always_masked: bool) -> Walk:
    """Cut ranges into steps; entries that share a tile walk the union of what they need."""
    xp = np if all(isinstance(x, np.ndarray) for x in ranges) else jnp

    def merged(array, reduce):
        return array if array.shape[0] == 1 else reduce(array.reshape(-1, batch_tile, array.shape[1]), 1)

    begin, end = merged(ranges.begin, xp.min), merged(ranges.end, xp.max)
    middle, full_end = merged(ranges.full_begin, xp.max), merged(ranges.full_end, xp.min)
    end = xp.maximum(begin, end)
    steps = -((begin - end) // step)
    head = xp.clip(-((begin - middle) // step), 0, steps)
    full = xp.maximum(xp.minimum(full_end, end) - (begin + head * step), 0) // step
    if always_masked:
        full = xp.zeros_like(full)
    return Walk(begin, end, head, full, steps - head - full)


def table(plan: Walk, always_masked: bool = False) -> tuple[jax.Array, bool, bool]:
    """A plan as ``[batch tiles or 1, blocks, 4]``: begin, head, full, tail; whether any step is unmasked, whether any is masked."""
    xp = np if isinstance(plan.begin, np.ndarray) else jnp
    steps = xp.stack([plan.begin, plan.head, plan.full, plan.tail], -1).astype(np.int32)
    if xp is np:
        return jnp.asarray(steps), bool(plan.full.any()), bool((plan.head + plan.tail).any())
    return steps, not always_masked, True


def walk(plan: Walk, tile, block, step: int, length: int, full_step: Callable, masked_step: Callable, carry):
    """Run the steps of one block; a masked step is told where to load and which positions count."""

    def never(count) -> bool:
        return isinstance(count, np.ndarray) and not count.any()

    tile = tile if plan.begin.shape[0] > 1 else 0
    begin, end, head, full, tail = (jnp.asarray(x, jnp.int32)[tile, block] for x in plan)
    if not never(plan.full):
        carry = lax.fori_loop(head, head + full, lambda t, c: full_step(begin + t * step, c), carry)

    def masked(t, carry):
        first = begin + jnp.where(t < head, t, t + full) * step
        return masked_step(jnp.minimum(first, length - step), first, jnp.minimum(first + step, end), carry)

    if not (never(plan.head) and never(plan.tail)):
        carry = lax.fori_loop(jnp.int32(0), head + tail, masked, carry)
    return carry
