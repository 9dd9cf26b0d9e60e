"""Who computes what in paged attention: tiles of rows, cut along the keys into items of like length.

Where lengths are data, the plan is computed on the device and one compilation serves all lengths; where they are numpy arrays,
while JAX traces. Its size is known before: a
tile has one item, and cutting makes at most ``extra`` more, for tiles are cut into pieces of at least 1/``extra`` of all steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels.common.query_tiles import Sequences, most_tiles, owners

# Steps of an item at least: shorter ones cost more to start and to join than they save.
SHORTEST = 4


@dataclass(frozen=True)
class Plan:
    """``items [P, 8]``: row of the tables, first row, where its rows end, first token, tokens before its first query, first key, where its
    keys end, slot (-1: the item is all of its tile). ``cut [K, 6]`` of tiles in several items: row of the tables, first row, where its rows
    end, first token, first slot, slots; None if no tile can be. ``slots``: how many there are.
    """

    items: Array
    cut: Array | None
    slots: int


@dataclass(frozen=True)
class Tiles:
    """Arrays ``[n]``: whose rows, the first of them, and the steps over keys that they need."""

    owner: Array
    row: Array
    first_step: Array
    steps: Array


def plan(
    s: Sequences,
    group: int,
    bm: int,
    bn: int,
    *,
    left: int | None,
    causal: bool,
    extra: int,
    pieces: int | None = None,
    most: int | None = None,
) -> Plan:
    """``extra`` items more than tiles at most, 0 for one a tile; or each tile in ``pieces``.

    ``most``: how many tiles there are at most, if that is less than the tokens let expect.
    """
    np_ = np if isinstance(s.lens, np.ndarray) else jnp
    extra = 0 if pieces == 1 else extra
    pieces = None if pieces == 1 else pieces
    n = tile_count(s.tokens, s.size, group, bm, s.packed)
    n = n if most is None else min(n, most)
    tiles = _tiles(s, n, group, bm, bn, left, causal)
    row_stop = s.count * group
    position = s.lens - s.count
    if pieces is not None:
        chunk = np_.maximum(-(-tiles.steps // pieces), 1)
        length, slots = n * pieces, n * pieces
    elif extra:
        chunk = np_.maximum(-(-tiles.steps.sum() // extra), SHORTEST)
        length, slots = n + extra, 2 * extra
    else:
        chunk, length, slots = np_.maximum(tiles.steps, 1), n, 0
    parts = np_.maximum(-(-tiles.steps // chunk), 1)
    if slots:
        tile, first_item = owners(parts, length)
        used = tile < n
        tile = np_.minimum(tile, n - 1)
        part = np_.arange(length, dtype=np.int32) - first_item[tile]
    else:
        tile, used, part = np_.arange(n, dtype=np.int32), np_.ones(n, bool), np_.zeros(n, np.int32)
    owner = tiles.owner[tile]
    size = chunk[tile] if chunk.ndim else chunk
    begin = tiles.first_step[tile] + part * size
    stop = np_.minimum(begin + size, tiles.first_step[tile] + tiles.steps[tile])
    is_cut = (parts > 1) if slots else np_.zeros(n, bool)
    first_slot = np_.cumsum(np_.where(is_cut, parts, 0), dtype=np.int32) - np_.where(is_cut, parts, 0)
    items = [
        s.row[owner],
        tiles.row[tile],
        np_.where(used, row_stop[owner], 0),
        s.begin[owner],
        position[owner] if causal else s.lens[owner] - 1,
        begin * bn,
        np_.minimum(stop * bn, s.lens[owner]),
        np_.where(is_cut[tile] & used, first_slot[tile] + part, -1),
    ]
    items = np_.stack([x.astype(np.int32) for x in items], 1)
    if not slots:
        return Plan(items, None, 0)
    which, _ = owners(is_cut.astype(np.int32), min(n, slots // 2))
    used = which < n
    which = np_.minimum(which, n - 1)
    owner = tiles.owner[which]
    cut = [
        s.row[owner],
        tiles.row[which],
        np_.where(used, row_stop[owner], 0),
        s.begin[owner],
        first_slot[which],
        parts[which],
    ]
    return Plan(items, np_.stack([x.astype(np.int32) for x in cut], 1), slots)


def tile_count(tokens: int, sequences: int, group: int, bm: int, packed: bool) -> int:
    """How many tiles a plan has."""
    if packed:
        return most_tiles(tokens * group, sequences, bm)
    rows = tokens // sequences * group
    return sequences * -(-rows // bm)


def _tiles(s: Sequences, n: int, group: int, bm: int, bn: int, left: int | None, causal: bool) -> Tiles:
    np_ = np if isinstance(s.lens, np.ndarray) else jnp
    index = np_.arange(n, dtype=np.int32)
    if s.packed:
        owner, first = owners(-(-s.count * group // bm), n)
        used = owner < s.size
        owner = np_.minimum(owner, s.size - 1)
        row = (index - first[owner]) * bm
    else:
        each = n // s.size
        owner, row, used = index // each, index % each * bm, True
    count, lens = s.count[owner], s.lens[owner]
    last = np_.minimum(row + bm, count * group) - 1
    stop = np_.clip(lens - count + last // group + 1, 0, lens) if causal else lens
    start = np_.zeros_like(lens) if left is None else np_.maximum(lens - count + row // group - left, 0)
    first_step = start // bn
    steps = np_.where(used & (stop > start), -(-stop // bn) - first_step, 0)
    return Tiles(owner, row, first_step, steps)
