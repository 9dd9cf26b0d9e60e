"""The backward's steps: those of ``plan.list_steps``, a list for each batch entry or head that has blocks of its own.

The gradients of a key head are summed over the steps of all query heads of its group. So the grid has axes for batch entries,
key heads and the heads of a group, whatever has a list of its own, and goes through lists of equal length: behind its end a
list repeats its last step, without anything to do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels._pallas.tpu.flash_attention.plan import HIDDEN, list_steps


class Lists(NamedTuple):
    """Steps, int32 ``[lists * room]`` each.

    Attributes:
        major, minor: a step's block of queries and of keys.
        flags: as in ``plan.Steps``; 0 behind the end of a list.
        count: of the longest list; an int, or an int32 scalar of the device.
    """

    major: Array
    minor: Array
    flags: Array
    count: Any


def make_lists(kinds: Any) -> Lists:
    """Of a table of kinds ``[B|1, H|1, blocks of queries, blocks of keys]``, in its order."""
    _, _, majors, minors = kinds.shape
    tables = kinds.reshape(-1, 1, 1, majors, minors)
    if isinstance(kinds, np.ndarray):
        steps = [list_steps(table) for table in tables]
        count = max(int(s.count) for s in steps)
        columns = [_ended(s.major, s.minor, s.flags, s.count, count, np) for s in steps]
        major, minor, flags = (jnp.asarray(np.concatenate(x), jnp.int32) for x in zip(*columns, strict=True))
        return Lists(major, minor, flags, count)
    steps = jax.vmap(list_steps)(tables)

    def ended(major, minor, flags, count):
        return _ended(major, minor, flags, count, majors * minors, jnp)

    major, minor, flags = (x.reshape(-1) for x in jax.vmap(ended)(steps.major, steps.minor, steps.flags, steps.count))
    return Lists(major, minor, flags, steps.count.max())


def _ended(major: Any, minor: Any, flags: Any, count: Any, room: int, xp: Any) -> tuple[Any, Any, Any]:
    place = np.arange(room, dtype=np.int32)
    at = xp.minimum(place, count - 1)
    return major[at], minor[at], xp.where(place < count, flags[at], 0)


def make_span_lists(kinds: Any, spans: int) -> Lists:
    """Lists of each span of the keys, ``[spans, …]``; the minor blocks count from the span's first."""
    missing = -kinds.shape[3] % spans
    xp = np if isinstance(kinds, np.ndarray) else jnp
    kinds = xp.pad(kinds, ((0, 0), (0, 0), (0, 0), (0, missing)), constant_values=HIDDEN)
    parts = [make_lists(part) for part in xp.split(kinds, spans, axis=3)]
    lists = kinds.shape[0] * kinds.shape[1]
    room = max(part.major.size for part in parts) // lists

    def padded(x: Array, flags: bool) -> Array:
        x = x.reshape(lists, -1)
        return jnp.pad(x, ((0, 0), (0, room - x.shape[1])), mode="constant" if flags else "edge").reshape(-1)

    return Lists(
        *(jnp.stack([padded(part[i], flags=i == 2) for part in parts]) for i in range(3)),
        jnp.stack([jnp.asarray(part.count, jnp.int32) for part in parts]),
    )
