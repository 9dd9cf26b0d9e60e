"""What the parts of both kernels share: the configuration, shared memory and barriers, and the order of tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import ROWS

# What a step sums over, and the columns of a panel: 128 bytes, the widest swizzle.
PANEL = 64


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything static about a launch.

    Attributes:
        transposed: whether matrices are ``[columns, inner]``.
        consumers: computing warpgroups of a CTA, each with 64 rows of a tile.
        columns: of a tile.
        stages: slots of the ring.
        band: tiles of rows whose columns are computed side by side.
        ctas: of the launch.
        interpreted: run in JAX's interpreter, which has none of Mosaic GPU's own operations.
        warps: whether the producer is a warp, or a warpgroup.
    """

    transposed: bool
    consumers: int
    columns: int
    stages: int
    band: int
    ctas: int
    interpreted: bool = False
    warps: bool = True

    @property
    def rows(self) -> int:
        """Of a tile."""
        return self.consumers * ROWS

    @property
    def right_panels(self) -> int:
        """Copies of a step's right operand. Transposed, its columns are rows in memory, and one copy takes them all."""
        return 1 if self.transposed else self.columns // PANEL

    @property
    def copies(self) -> int:
        """Copies of a step."""
        return self.consumers + self.right_panels


class Shared(NamedTuple):
    """Shared memory and barriers of a CTA.

    ``info`` says, of the first step of a tile, which tile that is: its steps (-1: there are no more tiles), its first row and the
    first row behind its group in the result, and its first column.

    ``ready``: a slot holds both operands of a step. ``free``: all consumers have read them. ``loaded``: operands are there of
    which some rows are of another group, for the producer, which puts zeros in their place.
    """

    left: Any
    right: Any
    info: Any
    staging: Any
    ready: Any
    free: Any
    loaded: Any


def shared_memory(c: Config, operand, result, sums: bool) -> Shared:
    """The types of what a CTA has in shared memory."""
    swizzle = (plgpu.SwizzleTransform(2 * PANEL),)

    def panels(*shape):
        return plgpu.SMEM((c.stages, *shape), operand, transforms=swizzle)

    return Shared(
        left=panels(c.consumers, ROWS, PANEL),
        right=panels(c.right_panels, c.columns // c.right_panels, PANEL),
        info=plgpu.SMEM((c.stages, 4), jnp.int32),
        staging=plgpu.SMEM((c.consumers, ROWS, c.columns), result) if c.interpreted else None,
        ready=plgpu.Barrier(num_arrivals=c.copies, num_barriers=c.stages),
        free=plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages),
        loaded=plgpu.Barrier(num_arrivals=c.copies) if sums else None,
    )


class Tile(NamedTuple):
    """One tile of the result.

    Attributes:
        steps: of the sum; 0 if the tile is 0.
        row, stop: in the result ``[rows, columns]``, its first row and the first one that is no longer the group's.
        column: its first one.
        group: whose matrix it is multiplied by.
        first, count: of a sum over rows, the group's rows; ``side``: the tile's first column of the left operand.
    """

    steps: Any
    row: Any
    stop: Any
    column: Any
    group: Any
    first: Any = 0
    count: Any = 0
    side: Any = 0


class Context(NamedTuple):
    """What the roles of a CTA work with: arrays in global memory."""

    c: Config
    shared: Shared
    left: Any
    right: Any
    bounds: Any
    out: Any

    @property
    def groups(self) -> int:
        return self.bounds.shape[1] - 1

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.out.shape[1]

    @property
    def column_tiles(self) -> int:
        return -(-self.width // self.c.columns)


class Rows(Context):
    """Rows times the matrix of their group.

    A walk is over the groups in their order, with what lies before the first one and behind the last one as groups too: which
    it is at, the tiles of all before that, and the group's rows.
    """

    sums = False

    def start(self, item):
        """The walk at a tile."""
        zero = jnp.int32(0)
        return self.advance(item, (zero, zero, zero, self.bounds[0, 0]))

    def advance(self, item, walk):
        """The walk on to a tile that is not before it."""

        def behind(walk):
            entry, before, start, stop = walk
            return (entry < self.groups + 2) & (item >= before + self._tiles(start, stop))

        def following(walk):
            entry, before, start, stop = walk
            entry = entry + 1
            bound = self.bounds[0, jnp.minimum(entry, self.groups)]
            return (
                entry,
                before + self._tiles(start, stop),
                stop,
                jnp.where(entry > self.groups, self.left.shape[1], bound),
            )

        return lax.while_loop(behind, following, walk)

    def more(self, item, walk):
        """Whether there is that tile."""
        return walk[0] < self.groups + 2

    def _tiles(self, start, stop):
        return _cdiv(stop - start, self.c.rows) * self.column_tiles

    def tile(self, item, walk) -> Tile:
        """The tile where the walk is."""
        entry, before, start, stop = walk
        row_tile, column_tile = _place(self.c, item - before, _cdiv(stop - start, self.c.rows), self.column_tiles)
        held = (entry > 0) & (entry <= self.groups)
        steps = -(-self.left.shape[2] // PANEL)
        return Tile(
            steps=jnp.where(held, steps, 0),
            row=start + row_tile * self.c.rows,
            stop=stop,
            column=column_tile * self.c.columns,
            group=entry - 1,
        )

    def left_part(self, tile: Tile, step, consumer: int, rows: int):
        """What a step copies for a consumer, so many rows of it."""
        return self.left.at[0, pl.ds(tile.row + consumer * ROWS, rows), pl.ds(step * PANEL, PANEL)]

    def right_part(self, tile: Tile, step, panel: int):
        """What a step copies for all of them."""
        inner = pl.ds(step * PANEL, PANEL)
        columns = pl.ds(tile.column + panel * PANEL, self.c.columns // self.c.right_panels)
        at = (columns, inner) if self.c.transposed else (inner, columns)
        return self.right.at[(0, tile.group, *at)]


class Sums(Context):
    """Sums over the rows of each group. There is nothing to walk: all groups have the same number of tiles."""

    sums = True

    @property
    def side(self) -> int:
        """Columns of the left operand: the rows of a group in the result."""
        return self.left.shape[2]

    @property
    def _row_tiles(self) -> int:
        return -(-self.side // self.c.rows)

    def start(self, item):
        """The walk at a tile."""
        return ()

    def advance(self, item, walk):
        """The walk on to a tile."""
        return walk

    def more(self, item, walk):
        """Whether there is that tile."""
        return item < self.groups * self._row_tiles * self.column_tiles

    def tile(self, item, walk) -> Tile:
        """A tile."""
        each = jnp.int32(self._row_tiles * self.column_tiles)
        group, local = lax.div(item, each), lax.rem(item, each)
        row_tile, column_tile = _place(self.c, local, jnp.int32(self._row_tiles), self.column_tiles)
        first = self.bounds[0, group]
        count = self.bounds[0, group + 1] - first
        return Tile(
            steps=_cdiv(count, PANEL),
            row=group * self.side + row_tile * self.c.rows,
            stop=(group + 1) * self.side,
            column=column_tile * self.c.columns,
            group=group,
            first=first,
            count=count,
            side=row_tile * self.c.rows,
        )

    def left_part(self, tile: Tile, step, consumer: int):
        """What a step copies for a consumer."""
        return self.left.at[0, pl.ds(tile.first + step * PANEL, PANEL), pl.ds(tile.side + consumer * ROWS, ROWS)]

    def right_part(self, tile: Tile, step, panel: int):
        """What a step copies for all of them."""
        return self.right.at[0, pl.ds(tile.first + step * PANEL, PANEL), pl.ds(tile.column + panel * PANEL, PANEL)]


def _cdiv(x, by: int):
    return lax.div(x + (by - 1), jnp.int32(by))


def _place(c: Config, local, row_tiles, column_tiles: int):
    """Row and column of a group's tile: down a band of rows first, then to the next column."""
    wide = jnp.int32(c.band * column_tiles)
    band, inside = lax.div(local, wide), lax.rem(local, wide)
    # At least 1: past the last group there is no tile, and nothing divides by its height.
    high = jnp.maximum(jnp.minimum(row_tiles - band * c.band, c.band), 1)
    return band * c.band + lax.rem(inside, high), lax.div(inside, high)
