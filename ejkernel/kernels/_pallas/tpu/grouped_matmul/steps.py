"""The steps of a ragged product, computed on the device: which tile of rows each takes, and for which group."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Steps(NamedTuple):
    """What a kernel gets in scalar memory, int32, and how many of the steps there are.

    Attributes:
        tile, group: of each step. Groups are those of ``bounds``.
        bounds: where each group's rows start, and where the last one's end.
        loads: the first and last group with a matrix and rows, then the first and last tile of such rows. A step outside of
            them multiplies nothing; it names what the nearest one that does has in memory, so that nothing is copied.
        count: of steps; the arrays are as long as there may be at most.
    """

    tile: Array
    group: Array
    bounds: Array
    loads: Array
    count: Array | int

    @property
    def scalars(self) -> tuple[Array, ...]:
        """The arrays."""
        return self.tile, self.group, self.bounds, self.loads


def by_tile(bounds: Array, rows: int, size: int) -> Steps:
    """Tiles in order, each with every group that has rows in it; no tile is left out.

    The rows before the first group are group 0 of ``Steps``, those after the last one its last group. Neither has a
    matrix. The matrices' groups are numbered from 1.
    """
    start, stop = bounds[:-1], bounds[1:]
    filled = stop > start
    groups = filled.shape[0]
    index = jnp.arange(groups, dtype=jnp.int32)
    any_filled = filled.any()
    loads = jnp.stack(
        [
            jnp.where(any_filled, jnp.min(jnp.where(filled, index, groups)), 0),
            jnp.max(jnp.where(filled, index, 0)),
            jnp.where(any_filled, bounds[0] // size, 0),
            jnp.where(any_filled, (bounds[-1] - 1) // size, 0),
        ]
    ).astype(jnp.int32)
    ends = jnp.asarray([0, rows], jnp.int32)
    bounds = jnp.concatenate([ends[:1], bounds, ends[1:]])
    tiles, at_most = -(-rows // size), -(-rows // size) + groups + 1
    return _steps(bounds, bounds[1:] > bounds[:-1], tiles, size, at_most, loads)


def by_group(bounds: Array, rows: int, size: int) -> Steps:
    """Groups in order, each with every tile in which it has rows; a group without rows has one step."""
    groups, tiles = bounds.shape[0] - 1, -(-rows // size)
    return _steps(bounds, jnp.full(groups, True), tiles, size, tiles + groups, jnp.zeros(4, jnp.int32))


def _steps(bounds: Array, visited: Array, tiles: int, size: int, at_most: int, loads: Array) -> Steps:
    start, stop = bounds[:-1], bounds[1:]
    first = jnp.minimum(start // size, tiles - 1)
    tiles_of = jnp.maximum(jnp.maximum(stop - 1, start) // size - first, 0) + 1
    ends = jnp.cumsum(jnp.where(visited, tiles_of, 0), dtype=jnp.int32)
    step = jnp.arange(at_most, dtype=jnp.int32)
    # Compared with every end: a search would be a loop on the device.
    group = (ends[None] <= step[:, None]).sum(1, dtype=jnp.int32)
    group = jnp.minimum(group, start.shape[0] - 1)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    tile = jnp.minimum(first[group] + step - before[group], tiles - 1)
    return Steps(tile, group, bounds, loads, ends[-1])


def even(rows: int, size: int, first_group: int) -> Steps:
    """Those of matrices of ``rows`` rows that are each their own: all tiles of one group."""
    tiles = -(-rows // size)
    tile = jnp.arange(tiles, dtype=jnp.int32)
    bounds = jnp.asarray([0] * first_group + [0, rows], jnp.int32)
    loads = jnp.asarray([0, 0, 0, tiles - 1], jnp.int32)
    return Steps(tile, jnp.full(tiles, first_group, jnp.int32), bounds, loads, tiles)
