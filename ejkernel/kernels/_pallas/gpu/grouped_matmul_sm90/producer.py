"""The producer: a warp that walks over the CTA's tiles and copies the operands of their steps into a ring of slots."""

from __future__ import annotations

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import ROWS
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import clear_outside, modulo
from ejkernel.kernels._pallas.gpu.grouped_matmul_sm90.state import PANEL, Context, Tile
from ejkernel.kernels._pallas.gpu.grouped_matmul_sm90.terms import store_info

ENDED = -1
# A copy's rows are static. What lies in the other rows of a slot is multiplied too, but for rows that nobody stores.
COPIED_ROWS = (16, 32, ROWS)


def produce_all(ctx: Context, cta):
    """All tiles of a CTA, then the word that there are no more."""
    c, shared = ctx.c, ctx.shared

    def one(carry):
        item, filled, *walk = carry
        filled = produce(ctx, ctx.tile(item, walk), filled)
        item = item + c.ctas
        return item, filled, *ctx.advance(item, tuple(walk))

    state = (cta, jnp.int32(0), *ctx.start(cta))
    _, filled, *_ = lax.while_loop(lambda carry: ctx.more(carry[0], carry[2:]), one, state)
    slot = wait_for_slot(ctx, filled)
    store_info(c, shared.info.at[slot], [jnp.int32(ENDED)])
    signal(ctx, shared.ready.at[slot])
    drain(ctx, filled + 1)


def wait_for_slot(ctx: Context, filled):
    """The next slot, once it is free; the first ones are without a wait."""
    slot = modulo(filled, ctx.c.stages)
    pl.when(filled >= ctx.c.stages)(lambda: plgpu.barrier_wait(ctx.shared.free.at[slot]))
    return slot


def signal(ctx: Context, barrier):
    """In place of the copies of a step."""
    for _ in range(ctx.c.copies):
        plgpu.barrier_arrive(barrier)


def produce(ctx: Context, tile: Tile, filled):
    """Copies the operands of a tile; ``filled``: how many slots the CTA has filled, before and after."""
    c, shared = ctx.c, ctx.shared
    steps = jnp.maximum(tile.steps, 1)

    def copy(step, slot, barrier):
        for i in range(c.consumers):
            copy_left(ctx, tile, step, i, shared.left.at[slot, i], barrier)
        for i in range(c.right_panels):
            plgpu.copy_gmem_to_smem(ctx.right_part(tile, step, i), shared.right.at[slot, i], barrier)

    def copy_and_clear(step, slot):
        """Zeros in both operands, for a NaN in a row of another group would survive a product with 0."""
        copy(step, slot, shared.loaded)
        plgpu.barrier_wait(shared.loaded)
        own = tile.count - step * PANEL
        for part in (*(shared.left.at[slot, i] for i in range(c.consumers)),
                     *(shared.right.at[slot, i] for i in range(c.right_panels))):  # fmt: skip
            clear_outside(c, part, jnp.int32(0), own, panel=True)
        if not c.warps:
            # No warp may still write zeros when the slot is filled again.
            plgpu.commit_smem()
        signal(ctx, shared.ready.at[slot])

    def one(step, _):
        slot = wait_for_slot(ctx, filled + step)
        ready = shared.ready.at[slot]
        pl.when(step == 0)(lambda: store_info(c, shared.info.at[slot], [tile.steps, tile.row, tile.stop, tile.column]))
        some = tile.steps > 0
        if ctx.sums:
            whole = (step + 1) * PANEL <= tile.count
            pl.when(some & whole)(lambda: copy(step, slot, ready))
            pl.when(some & ~whole)(lambda: copy_and_clear(step, slot))
        else:
            pl.when(some)(lambda: copy(step, slot, ready))
        pl.when(~some)(lambda: signal(ctx, ready))

    lax.fori_loop(0, steps, one, None)
    return filled + steps


def copy_left(ctx: Context, tile: Tile, step, consumer: int, target, barrier):
    """A consumer's part of the left operand: of a group with few rows not many more, for what it takes to copy them all."""
    if ctx.sums:
        plgpu.copy_gmem_to_smem(ctx.left_part(tile, step, consumer), target, barrier)
        return
    count = tile.stop - tile.row - consumer * ROWS
    pl.when(count <= 0)(lambda: plgpu.barrier_arrive(barrier))
    least = 0
    for rows in COPIED_ROWS:
        chosen = (count > least) & (count <= rows) if rows < ROWS else count > least

        @pl.when(chosen)
        def _(rows=rows):
            plgpu.copy_gmem_to_smem(ctx.left_part(tile, step, consumer, rows), target.at[pl.ds(0, rows)], barrier)

        least = rows


def drain(ctx: Context, filled):
    """Waits for every slot as often as it was filled, so that no CTA ends with barriers in flight."""

    def one(i, _):
        plgpu.barrier_wait(ctx.shared.free.at[modulo(i, ctx.c.stages)])

    lax.fori_loop(filled - jnp.minimum(filled, ctx.c.stages), filled, one, None)
