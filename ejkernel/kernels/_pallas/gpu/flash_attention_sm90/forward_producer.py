"""The producer of the forward kernel: a warp that copies queries, keys and values into shared memory."""

from __future__ import annotations

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.forward_state import Context, QueryBlock
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import CORE_ROWS, ROWS
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import clear_rows, store_scalar, take_item


def produce_all(ctx: Context, items: int, counter):
    """Of a persistent kernel: takes blocks from the queue until there are none, and copies what each needs."""
    c, shared = ctx.c, ctx.shared

    def each(act):
        for i in range(c.consumers):
            act(i)

    def one(carry):
        item, nth, filled, parity = carry
        block = ctx.block(item)
        each(lambda i: load_queries(ctx, block, i))
        filled = produce(ctx, block, filled)
        # Consumers read the other ``item`` before they freed the last block's queries.
        upcoming = take_item(c, counter, shared.item.at[1 - parity], item)
        each(lambda i: plgpu.barrier_wait(shared.q_free.at[i]))
        if c.speculative:
            retry = ctx.retry_requested(nth)

            @pl.when(retry)
            def _():
                each(lambda i: plgpu.barrier_arrive(shared.q_ready.at[i]))
                produce(ctx, block, filled)
                each(lambda i: plgpu.barrier_wait(shared.q_free.at[i]))

            retry = retry.astype(jnp.int32)
            filled, nth = filled + retry * (block.steps + 1), nth + retry
        return upcoming, nth + 1, filled, 1 - parity

    if c.speculative:
        for i in range(2 * c.consumers):
            store_scalar(c, shared.retry.at[i], -1)
    item = take_item(c, counter, shared.item.at[0], None)
    zero = jnp.int32(0)
    _, _, filled, _ = lax.while_loop(lambda carry: carry[0] < items, one, (item, zero, zero, zero))
    each(lambda i: plgpu.barrier_arrive(shared.q_ready.at[i]))
    drain(ctx, filled)


def load_queries(ctx: Context, block: QueryBlock, warpgroup):
    """Copies the 64 queries of one consumer."""
    rows = pl.ds((block.index * ctx.c.consumers + warpgroup) * ROWS, ROWS)
    source = ctx.q.at[block.batch, rows, block.head]
    plgpu.copy_gmem_to_smem(source, ctx.shared.q.at[warpgroup], ctx.shared.q_ready.at[warpgroup])


def produce(ctx: Context, block: QueryBlock, filled):
    """Copies a block's keys and values; ``filled``: how many slots the CTA has filled, before and after."""
    c, shared = ctx.c, ctx.shared
    kv_head = lax.div(block.head, jnp.int32(c.group))
    steps = block.steps

    def of_batch(name):
        ref = ctx.optional[name]
        return ref.at[block.batch if ref.shape[0] > 1 else 0]

    def load(i, wait):
        slot = ctx.slot(filled + i)
        keys = ctx.k, shared.k, shared.k_free, i
        values = ctx.v, shared.v, shared.v_free, i - 1
        if c.clears:
            # Read before a wait, not after it.
            eighth = lax.div(jnp.maximum(block.begin + (i - 1) * c.step, 0), jnp.int32(CORE_ROWS))
            padded = of_batch("padded")[eighth] > 0
        for source, target, free, step in (keys, values):
            if wait:
                plgpu.barrier_wait(free.at[slot])
            some = (step >= 0) & (step < steps)

            @pl.when(some)
            def _(source=source, target=target, step=step):
                rows = pl.ds(block.begin + step * c.step, c.step)

                def copy(barrier):
                    plgpu.copy_gmem_to_smem(source.at[block.batch, rows, kv_head], target.at[slot], barrier)

                if source is not ctx.v or not c.clears:
                    copy(shared.ready.at[slot])
                    return
                pl.when(~padded)(lambda: copy(shared.ready.at[slot]))

                @pl.when(padded)
                def _copy_and_clear():
                    copy(shared.loaded)
                    plgpu.barrier_wait(shared.loaded)
                    clear_rows(c, target.at[slot], of_batch("padding").at[rows])
                    plgpu.barrier_arrive(shared.ready.at[slot])

            @pl.when(~some)
            def _():
                plgpu.barrier_arrive(shared.ready.at[slot])

    def first(i, _):
        load(i, wait=False)

    def later(i, _):
        load(i, wait=True)

    # The CTA's first slots are free without a wait.
    prologue = jnp.clip(c.stages - filled, 0, steps + 1)
    lax.fori_loop(0, prologue, first, None)
    lax.fori_loop(prologue, steps + 1, later, None)
    return filled + steps + 1


def drain(ctx: Context, filled):
    """Waits for every slot as often as it was filled, so that no CTA ends with barriers in flight."""

    def one(i, _):
        plgpu.barrier_wait(ctx.shared.k_free.at[ctx.slot(i)])
        plgpu.barrier_wait(ctx.shared.v_free.at[ctx.slot(i)])

    lax.fori_loop(filled - jnp.minimum(filled, ctx.c.stages), filled, one, None)
