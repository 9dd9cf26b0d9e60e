"""Both kernels on the host: the roles of a CTA, and the launch.

A CTA is persistent: it computes every ``ctas``-th tile of the result. Its producer copies the operands of a step, 64 of what is
summed over, by TMA into a slot of a ring of ``stages``; it does not wait for the end of a tile to copy the next one's. Each
consumer, a warpgroup, multiplies 64 rows of the left operand with all columns of the tile, one step in flight while it waits for
the next, and writes its rows from registers, those of the group alone.

Where rows of groups begin and end is read on the device: the launch is the same for all sizes. Operands lie in shared memory in
panels of 64 columns, because a copy of a panel may begin at any row, as groups do, and may exceed the array.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array, lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.forward import CTAS
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import ROWS
from ejkernel.kernels._pallas.gpu.grouped_matmul_sm90 import consumer, producer
from ejkernel.kernels._pallas.gpu.grouped_matmul_sm90.parameters import Tiles
from ejkernel.kernels._pallas.gpu.grouped_matmul_sm90.state import Config, Context, Rows, Shared, Sums, shared_memory
from ejkernel.kernels.common.varying import vary_as, varying_axes

# By consumers: of two there are 128 sums in a thread. Three warpgroups of 128 threads share 65536 registers.
CONSUMER_REGISTERS = {1: 240, 2: 232}
PRODUCER_REGISTERS = {1: 40, 2: 40}


def rows_times_matrices(
    x: Array, matrices: Array, bounds: Array, transposed: bool, dtype: Any, tiles: Tiles, *, interpret: Any = False
) -> Array:
    """``[1, M, N]``: the rows of ``x`` ``[1, M, K]`` times the matrix of their group, 0 in rows without one."""
    rows, groups = x.shape[1], matrices.shape[1]
    columns = matrices.shape[2 if transposed else 3]
    # What lies before the first group and behind the last one has tiles of its own.
    row_tiles = -(-rows // tiles.rows) + groups + 1
    out = _launch(
        Rows, x, matrices, bounds, (rows, columns), dtype, tiles, row_tiles, transposed=transposed, interpret=interpret
    )
    return out[None]


def sums_over_rows(
    left: Array, right: Array, bounds: Array, dtype: Any, tiles: Tiles, *, interpret: Any = False
) -> Array:
    """``[1, G, I, J]``: of each group the transposed rows of ``left`` times those of ``right``, 0 without rows."""
    groups, side, columns = bounds.shape[1] - 1, left.shape[2], right.shape[2]
    row_tiles = groups * -(-side // tiles.rows)
    out = _launch(
        Sums,
        left,
        right,
        bounds,
        (groups * side, columns),
        dtype,
        tiles,
        row_tiles,
        transposed=False,
        interpret=interpret,
    )
    return out.reshape(1, groups, side, columns)


def _launch(
    kind: type[Context],
    left: Array,
    right: Array,
    bounds: Array,
    shape: tuple[int, int],
    dtype: Any,
    tiles: Tiles,
    row_tiles: int,
    *,
    transposed: bool,
    interpret: Any,
) -> Array:
    """A result of this shape, which has so many tiles of rows at most."""
    column_tiles = -(-shape[1] // tiles.columns)
    c = Config(
        transposed=transposed,
        consumers=tiles.rows // ROWS,
        columns=tiles.columns,
        stages=tiles.stages,
        band=_band(tiles),
        ctas=min(CTAS, row_tiles * column_tiles),
        interpreted=bool(interpret),
        # A kernel for warps cannot be traced where ``shard_map`` checks over which axes values vary.
        warps=not interpret and not varying_axes(left, right, bounds),
    )

    def entry(left_ref, right_ref, bounds_ref, out_ref, *scratch):
        _cta(kind(c, Shared(*scratch), left_ref, right_ref, bounds_ref, out_ref))

    run = plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        scratch_types=list(shared_memory(c, left.dtype, dtype, kind is Sums)),
        grid=(c.ctas,),
        grid_names=("cta",),
        num_threads=c.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({"interpret": interpret} if interpret else {}),
    )
    return vary_as(run(left, right, bounds), left)


def _band(tiles: Tiles) -> int:
    """Tiles of rows of a band: what all CTAs compute at a time then is about as high as it is wide, and reads least."""
    return max(1, round(math.sqrt(CTAS * tiles.columns / tiles.rows)))


def _cta(ctx: Context):
    """The roles of one CTA."""
    c = ctx.c
    warpgroup = lax.axis_index("warpgroup")
    # Before jax 0.11 a warp does not know the grid.
    cta = lax.axis_index("cta")

    @pl.when(warpgroup == c.consumers)
    def _producer():
        plgpu.set_max_registers(PRODUCER_REGISTERS[c.consumers], action="decrease")

        def produce():
            producer.produce_all(ctx, cta)

        if c.warps:
            mesh = plgpu.WarpMesh(axis_name="warp")
            pl.kernel(lambda: pl.when(lax.axis_index("warp") == 0)(produce), mesh=mesh)()
        else:
            produce()

    @pl.when(warpgroup < c.consumers)
    def _consumer():
        plgpu.set_max_registers(CONSUMER_REGISTERS[c.consumers], action="increase")
        consumer.consume_all(ctx, warpgroup)
