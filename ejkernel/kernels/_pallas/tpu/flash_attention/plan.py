"""Which blocks of queries and keys meet, as the list of steps that a kernel takes.

A call's blocks are a table of kinds, ``[B|1, H|1, blocks of queries, blocks of keys]``: numpy where nothing but shapes and
the window decides, else computed on the device. The table becomes a list, in the order in which a kernel visits the pairs
of blocks: its *major* block's results stay in the core while it goes through the *minor* ones. Pairs that nothing sees are
not listed. The list is prefetched to scalar memory, and its length, which data may decide, bounds the grid.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels.common import visibility
from ejkernel.kernels.common.intervals import intervals

# Kinds of pairs of blocks: no query sees a key; masked by whatever decides; every query sees every key. Those from
# ``PATTERN`` on are masked by a static pattern, ``kind - PATTERN`` in the list of patterns.
HIDDEN, MASKED, WHOLE, PATTERN = 0, 1, 2, 3
# Bits of a step's flags: the first and the last step of a major block; above them the kind.
FIRST, LAST, KIND_SHIFT = 1, 2, 2
# Static patterns for which code is made, at most.
MOST_PATTERNS = 4


class Pattern(NamedTuple):
    """Which keys the window and the lengths leave in a pair of blocks: of query ``q`` those with ``q + low <= k < q + high`` and ``k < keys``.

    All count from the first of their block; None is unbounded. ``queries``: how many rows the block of queries has, None if it
    is full.
    """

    low: int | None
    high: int | None
    keys: int | None
    queries: int | None

    def sees(self, queries: slice, keys: slice) -> bool | None:
        """Whether these queries see these keys: True if all do, False if none does, None if some do.

        Rows past the last query count as any other unless ``queries`` bounds them.

        Example:
            >>> causal = Pattern(None, 1, None, None)
            >>> [causal.sees(slice(0, 128), slice(first, first + 64)) for first in (0, 64, 128)]
            [None, None, False]
            >>> causal.sees(slice(128, 256), slice(0, 128))
            True
        """
        bounds = self._bounds(queries, keys)
        if all(bound <= least for bound, least, _ in bounds.values()):
            return True
        return None if all(bound <= most for bound, _, most in bounds.values()) else False

    def bounding(self, queries: slice, keys: slice) -> Pattern:
        """Without the bounds that hide nothing of these queries and keys."""
        bounds = self._bounds(queries, keys)
        idle = {name for name, (bound, least, _) in bounds.items() if bound <= least}
        return self._replace(**dict.fromkeys(idle))

    def _bounds(self, queries: slice, keys: slice) -> dict[str, tuple[int, int, int]]:
        """What some expression of the indices must reach, and the least and the most that it is."""
        apart = keys.start - queries.stop + 1, keys.stop - 1 - queries.start  # key - query
        bounds = {
            "low": (self.low, *apart),
            "high": (None if self.high is None else 1 - self.high, -apart[1], -apart[0]),
            "keys": (None if self.keys is None else 1 - self.keys, 1 - keys.stop, -keys.start),
            "queries": (None if self.queries is None else 1 - self.queries, 1 - queries.stop, -queries.start),
        }
        return {name: x for name, x in bounds.items() if x[0] is not None}


class Steps(NamedTuple):
    """A kernel's steps, int32 ``[room]`` each, of which the first ``count`` are to be taken.

    Attributes:
        batch, head: where a step is, if entries of the batch, or heads, have lists of their own; else None, and the grid has
            an axis for them.
        major, minor: the two blocks.
        flags: ``FIRST``, ``LAST`` and the kind, see ``KIND_SHIFT``. A major block that meets nothing has one step, of the kind
            ``HIDDEN``: its results are to be written too.
        count: an int, or an int32 scalar of the device.
    """

    batch: Any
    head: Any
    major: Any
    minor: Any
    flags: Any
    count: Any

    @property
    def arrays(self) -> list[Array]:
        """What is prefetched to scalar memory; ``at`` takes it back."""
        return [jnp.asarray(x, jnp.int32) for x in self[:5] if x is not None]

    def at(self, b: Any, h: Any, step: Any, prefetched: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Batch entry, head, major and minor block, and flags of a step of a grid ``(b, h, step)``; for kernels and index maps."""
        refs = iter(prefetched)
        b = b if self.batch is None else next(refs)[step]
        h = h if self.head is None else next(refs)[step]
        return b, h, next(refs)[step], next(refs)[step], next(refs)[step]

    def grid(self, batch: int, heads: int) -> tuple[int, int, Any]:
        """The grid ``(batch, heads, steps)``, without the axes that the list goes through itself."""
        return batch if self.batch is None else 1, heads if self.head is None else 1, self.count


def key_intervals(arrays: dict[str, Array], spec: Any) -> tuple[Any, Any]:
    """``[B|1, Sq]`` starts and stops of the keys that each query may see; those from data never lead out of bounds."""
    q_len, kv_len = arrays["query"].shape[1], arrays["key"].shape[1]
    if "kv_start" not in arrays:
        return intervals(spec.window, q_len, kv_len)
    start, stop = (jnp.clip(arrays[name], 0, kv_len) for name in ("kv_start", "kv_stop"))
    return start, jnp.maximum(start, stop)


def segment_ids(arrays: dict[str, Array]) -> tuple[Array, Array] | None:
    """Ids of queries and keys."""
    ids = arrays.get("q_segment_ids")
    return None if ids is None else (ids, arrays["kv_segment_ids"])


def block_kinds(arrays: dict[str, Array], spec: Any, q_block: int, kv_block: int, partial_rows: bool = False) -> Any:
    """int8 ``[B|1, 1, blocks of queries, blocks of keys]``: ``HIDDEN``, ``MASKED`` or ``WHOLE``.

    A last, partial block of keys is never whole; one of queries only with ``partial_rows``.  What a mask or a bias hides is not
    looked for: a mask leaves nothing whole.
    """
    q_len, kv_len = arrays["query"].shape[1], arrays["key"].shape[1]
    start, stop = key_intervals(arrays, spec)
    ranges = visibility.key_ranges(start, stop, segment_ids(arrays), q_block, kv_len, shifted=False)
    begin, end, full_begin, full_end = (x[..., None] for x in ranges)
    first = np.arange(0, kv_len, kv_block, dtype=np.int32)
    some = (first < end) & (first + kv_block > begin) & (begin < end)
    whole = some & (first >= full_begin) & (first + kv_block <= full_end)
    if "attention_mask" in arrays:
        whole = whole & False
    if not partial_rows and q_len % q_block:
        rows = np.arange(some.shape[1])[:, None] * q_block + q_block <= q_len
        whole = whole & rows
    xp = np if isinstance(some, np.ndarray) else jnp
    return xp.where(whole, WHOLE, xp.where(some, MASKED, HIDDEN)).astype(np.int8)[:, None]


def with_patterns(
    kinds: Any, arrays: dict[str, Array], spec: Any, q_block: int, kv_block: int, partial_rows: bool = False
) -> tuple[Any, tuple[Pattern, ...]]:
    """The table with patterns of the window in place of ``MASKED``, and the patterns.

    Segments and masks, of pairs or of blocks, hide more than a pattern; then one may have no bounds. If there are fewer patterns than
    ``MOST_PATTERNS``, nothing is left ``MASKED``. Intervals from data have none.
    """
    if "kv_start" in arrays:
        return kinds, ()
    by_data = bool({"q_segment_ids", "attention_mask", "block_bits"} & arrays.keys())
    plain = {name: arrays[name] for name in ("query", "key")}
    table = block_kinds(plain, spec, q_block, kv_block, partial_rows)[0, 0] if by_data else kinds[0, 0]
    q_len, kv_len = arrays["query"].shape[1], arrays["key"].shape[1]
    left, right = spec.window

    def pattern(i: int, j: int) -> Pattern:
        offset = i * q_block + kv_len - q_len - j * kv_block
        left_keys, left_rows = kv_len - j * kv_block, q_len - i * q_block
        return Pattern(
            low=None if left is None else offset - left,
            high=None if right is None else offset + right + 1,
            keys=left_keys if left_keys < kv_block else None,
            queries=left_rows if left_rows < q_block and not partial_rows else None,
        ).bounding(slice(0, q_block), slice(0, kv_block))

    at = [tuple(map(int, index)) for index in np.argwhere(table != HIDDEN if by_data else table == MASKED)]
    of = {index: pattern(*index) for index in at}
    patterns = tuple(found for found, _ in Counter(of.values()).most_common(MOST_PATTERNS))
    table = np.full_like(table, MASKED)
    for index, found in of.items():
        if found in patterns:
            table[index] = PATTERN + patterns.index(found)
    xp = np if isinstance(kinds, np.ndarray) else jnp
    return xp.where(kinds == MASKED, table, kinds), patterns


def list_steps(kinds: Any, by_keys: bool = False) -> Steps:
    """The steps of a table of kinds; ``by_keys``: blocks of keys are the major ones, else those of queries."""
    kinds = kinds.swapaxes(2, 3) if by_keys else kinds
    xp = np if isinstance(kinds, np.ndarray) else jnp
    listed = kinds != HIDDEN
    listed = listed | (~listed.any(-1, keepdims=True) & (np.arange(kinds.shape[3]) == 0))
    place = xp.cumsum(listed, -1, dtype=np.int32)
    flags = xp.where(place == 1, FIRST, 0) | xp.where(place == place[..., -1:], LAST, 0)
    flags = (flags | (kinds.astype(np.int32) << KIND_SHIFT)).reshape(-1)
    batch, heads, majors, minors = kinds.shape
    if xp is np:
        index = np.flatnonzero(listed)
        count: Any = index.size
    else:
        (index,) = jnp.nonzero(listed.reshape(-1), size=listed.size, fill_value=listed.size - 1)
        index, count = index.astype(jnp.int32), listed.sum(dtype=jnp.int32)
    major = index // minors
    return Steps(
        batch=major // (heads * majors) if batch > 1 else None,
        head=major // majors % heads if heads > 1 else None,
        major=major % majors,
        minor=index % minors,
        flags=flags[index],
        count=count,
    )
