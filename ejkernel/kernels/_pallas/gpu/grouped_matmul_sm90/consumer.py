"""A consumer: a warpgroup that computes 64 rows of each tile."""

from __future__ import annotations

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import ROWS
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import modulo
from ejkernel.kernels._pallas.gpu.grouped_matmul_sm90.state import PANEL, Context
from ejkernel.kernels._pallas.gpu.grouped_matmul_sm90.terms import add_product, finished, store_rows, zeros


def consume_all(ctx: Context, warpgroup):
    """One tile after the other, until the producer says that there are no more."""
    shared = ctx.shared

    def one(carry):
        filled, _ = carry
        slot = modulo(filled, ctx.c.stages)
        plgpu.barrier_wait(shared.ready.at[slot])
        steps, row, stop, column = (shared.info[slot, i] for i in range(4))
        more = steps >= 0
        pl.when(more)(lambda: consume(ctx, warpgroup, filled, steps, row + warpgroup * ROWS, stop, column))
        pl.when(~more)(lambda: plgpu.barrier_arrive(shared.free.at[slot]))
        return filled + jnp.maximum(steps, 1), more.astype(jnp.int32)

    lax.while_loop(lambda carry: carry[1] > 0, one, (jnp.int32(0), jnp.int32(1)))


def consume(ctx: Context, warpgroup, filled, steps, row, stop, column):
    """A tile whose first step is there; ``filled``: how many slots were filled before it."""
    c = ctx.c
    some = row < stop
    # Of the last tile of columns that is less than half within the result, half is computed.
    half = c.columns // 2
    narrow = half >= PANEL and 0 < ctx.width % c.columns <= half
    last = column + half >= ctx.width
    wide = some & ~last if narrow else some
    pl.when(wide)(lambda: _multiply(ctx, warpgroup, filled, steps, row, stop, column, c.columns))
    if narrow:
        pl.when(some & last)(lambda: _multiply(ctx, warpgroup, filled, steps, row, stop, column, half))
    pl.when(~some)(lambda: _leave_out(ctx, filled, steps))


def _multiply(ctx: Context, warpgroup, filled, steps, row, stop, column, width: int):
    c, shared = ctx.c, ctx.shared

    def slot(step):
        return modulo(filled + step, c.stages)

    def one(step, acc):
        at = slot(step)
        pl.when(step > 0)(lambda: plgpu.barrier_wait(shared.ready.at[at]))
        acc = add_product(c, acc, shared.left.at[at, warpgroup], shared.right.at[at], ctx.sums)
        if not c.interpreted:
            plgpu.wgmma_wait(1)
        pl.when(step > 0)(lambda: plgpu.barrier_arrive(shared.free.at[slot(step - 1)]))
        return acc

    acc = finished(c, lax.fori_loop(0, steps, one, zeros(c, width)))
    plgpu.barrier_arrive(shared.free.at[slot(jnp.maximum(steps, 1) - 1)])
    staging = shared.staging.at[warpgroup] if c.interpreted else None
    store_rows(c, acc, ctx.out, staging, row, stop, column)


def _leave_out(ctx: Context, filled, steps):
    """A tile in which the group has no rows for this consumer."""
    shared = ctx.shared

    def one(step, _):
        at = modulo(filled + step, ctx.c.stages)
        pl.when(step > 0)(lambda: plgpu.barrier_wait(shared.ready.at[at]))
        plgpu.barrier_arrive(shared.free.at[at])

    lax.fori_loop(0, jnp.maximum(steps, 1), one, None)
