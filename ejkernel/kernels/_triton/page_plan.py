"""Who computes what in paged attention: equal shares of all steps for all programs.

A tile of rows goes over its keys in steps, once for each key head. The steps of tile 0 with head 0, with head 1 and so on, then
those of tile 1, lie side by side, and program ``p`` takes those from ``p * share`` on. So one long context fills a chip, many short
ones end together, and at most two tiles of a program are not its own.

Where lengths are data, the plan is computed on the device and one compilation serves all lengths; where they are numpy arrays,
while JAX traces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels.common.query_tiles import Sequences, most_tiles, owners

# A share may grow by one part in so many.
ROUNDING = 24


@dataclass(frozen=True)
class Plan:
    """Integer arrays for the kernels.

    ``tiles [n, 8]``: row of the tables, first row, where the sequence's rows end, its first token, its tokens before its first query,
    first key, where the tile's keys end, steps. ``starts [P, 2]``: the tile in which a program begins, and how many steps of it (all
    heads') come before. ``header [2]``: the share, and all steps; where the window is data its left side too.
    """

    tiles: Any
    starts: Any
    header: Any


def tile_count(tokens: int, sequences: int, group: int, bm: int, packed: bool) -> int:
    """How many tiles a plan has at most."""
    if packed:
        return most_tiles(tokens * group, sequences, bm)
    rows = tokens // sequences * group
    return sequences * -(-rows // bm)


def even_share(np_: Any, share: Any, longest: Any) -> Any:
    """The share rounded up to whole tiles, or to a whole part of one, where that adds little: tiles are then cut less often.

    ``longest``: the steps of the longest tile with one head.
    """
    share = np_.maximum(share, 1)
    whole = -(-share // longest) * longest
    part = -(-longest // np_.maximum(longest // share, 1))
    rounded = np_.where(share > longest, whole, part)
    return np_.where(rounded * ROUNDING <= share * (ROUNDING + 1), rounded, share)


def plan(
    s: Sequences,
    n: int,
    programs: int,
    *,
    k_heads: int,
    group: int,
    bm: int,
    bn: int,
    left: int | Array | None,
    causal: bool,
    pieces: int | None = None,
) -> Plan:
    """Of ``n`` tiles for so many programs; ``pieces``: parts of the longest tile, instead of equal shares of all."""
    np_ = np if isinstance(s.lens, np.ndarray) else jnp
    index = np_.arange(n, dtype=np.int32)
    if s.packed:
        owner, first = owners(-(-s.count * group // bm), n)
        needed = owner < s.size
        owner = np_.minimum(owner, s.size - 1)
        row = (index - first[owner]) * bm
    else:
        each = n // s.size
        owner, row, needed = index // each, index % each * bm, True
    count, lens = s.count[owner], s.lens[owner]
    last = np_.minimum(row + bm, count * group) - 1
    needed &= row <= last
    stop = np_.clip(lens - count + last // group + 1, 0, lens) if causal else lens
    start = np_.zeros_like(lens) if left is None else np_.maximum(lens - count + row // group - left, 0)
    first_step = start // bn
    # A tile that sees nothing has one step too: it writes zeros.
    steps = np_.where(needed, np_.maximum(-(-stop // bn) - first_step, 1), 0).astype(np.int32)
    total = steps.sum(dtype=np.int32) * k_heads
    longest = np_.maximum(steps.max(), 1)
    share = -(-longest // pieces) if pieces else even_share(np_, -(-total // programs), longest)
    position = np_.arange(programs, dtype=np.int32) * share
    at, begins = owners(steps * k_heads, position)
    offset = position - begins[np_.minimum(at, n - 1)]

    def table(*columns):
        return np_.stack([np_.asarray(x).astype(np.int32) for x in columns], -1)

    tiles = table(s.row[owner], row, count * group, s.begin[owner], lens - count, first_step * bn, stop, steps)
    header = (share, total, left) if isinstance(left, Array) else (share, total)
    return Plan(tiles, table(at, offset), table(*header))
