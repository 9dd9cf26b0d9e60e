"""The producer of the forward kernel: a warp that copies queries, keys and values into shared memory."""

from __future__ import annotations

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.forward_state import Context, QueryBlock
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.panels import copies_of
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import store_scalar, take_item


def produce_all(ctx: Context, counter):
    """Of a persistent kernel: takes blocks from the queue until there are none, and copies what each needs."""
    c, shared = ctx.c, ctx.shared

    def each(act):
        for i in range(c.consumers):
            act(i)

    def wait_for_free_queries():
        each(lambda i: plgpu.barrier_wait(shared.q_free.at[i]))

    def one(carry):
        item, nth, filled, parity = carry
        block = ctx.block(item)

        def queries():
            if not c.speculative:
                pl.when(nth > 0)(wait_for_free_queries)
            each(lambda i: load_queries(ctx, block, i))

        filled = produce(ctx, block, filled, queries)
        # Consumers read the other ``item`` before they freed the last block's queries.
        upcoming = take_item(c, counter, shared.item.at[1 - parity], item)
        if c.speculative:
            wait_for_free_queries()
            retry = ctx.retry_requested(nth)

            @pl.when(retry)
            def _():
                each(lambda i: signal_queries(ctx, i))
                produce(ctx, block, filled)
                wait_for_free_queries()

            retry = retry.astype(jnp.int32)
            filled, nth = filled + retry * (block.steps + 1), nth + retry
        return upcoming, nth + 1, filled, 1 - parity

    if c.speculative:
        for i in range(2 * c.consumers):
            store_scalar(c, shared.retry.at[i], -1)
    item = take_item(c, counter, shared.item.at[0], None)
    zero = jnp.int32(0)
    _, count, filled, _ = lax.while_loop(lambda carry: carry[0] < ctx.items, one, (item, zero, zero, zero))
    if not c.speculative:
        pl.when(count > 0)(wait_for_free_queries)
    each(lambda i: signal_queries(ctx, i))
    drain(ctx, filled)


def load_queries(ctx: Context, block: QueryBlock, warpgroup):
    """Copies the queries of one consumer."""
    for source, target in block.query_copies(warpgroup):
        plgpu.copy_gmem_to_smem(source, target, ctx.shared.q_ready.at[warpgroup])


def signal_queries(ctx: Context, warpgroup):
    """In place of a copy of a consumer's queries."""
    for _ in range(ctx.c.pack * copies_of(ctx.c.dim, ctx.c.head_panel)):
        plgpu.barrier_arrive(ctx.shared.q_ready.at[warpgroup])


def produce(ctx: Context, block: QueryBlock, filled, queries=lambda: None):
    """Copies a block's keys and values; ``filled``: how many slots the CTA has filled, before and after.

    ``queries``: what copies its queries, which may wait until the last block's are read: the first keys do not.
    """
    c, shared = ctx.c, ctx.shared
    steps = block.steps

    def arrive(barrier, times):
        for _ in range(times):
            plgpu.barrier_arrive(barrier)

    def copy(source, target, step, barrier):
        def one(part, _):
            pairs, needed = block.key_copies(source, target, step, part)

            def copied():
                for source_part, target_part in pairs:
                    plgpu.copy_gmem_to_smem(source_part, target_part, barrier)

            if needed is None:
                copied()
                return
            pl.when(needed)(copied)
            pl.when(~needed)(lambda: plgpu.barrier_arrive(barrier))

        if c.copies == 1:
            one(0, None)
        else:
            lax.fori_loop(0, c.copies, one, None)

    def load(i):
        slot = ctx.slot(filled + i)
        keys = ctx.k, shared.k.at[slot], shared.k_free, i, c.key_copies
        values = ctx.v, shared.v.at[slot], shared.v_free, i - 1, c.value_copies
        ready = shared.ready.at[slot]
        padded = block.has_padding(i - 1) if c.clears else None
        for source, target, free, step, copies in (keys, values):
            # The CTA's first slots are free without a wait.
            pl.when(filled + i >= c.stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
            some = (step >= 0) & (step < steps)

            @pl.when(some)
            def _(source=source, target=target, step=step, copies=copies):
                if source is not ctx.v or not c.clears:
                    copy(source, target, step, ready)
                    return
                pl.when(~padded)(lambda: copy(source, target, step, ready))

                @pl.when(padded)
                def _copy_and_clear():
                    copy(source, target, step, shared.loaded)
                    plgpu.barrier_wait(shared.loaded)
                    block.clear_padding(target, step)
                    if not c.warps:
                        # No warp may still write zeros when the slot is filled again.
                        plgpu.commit_smem()
                    arrive(ready, copies)

            pl.when(~some)(lambda copies=copies: arrive(ready, copies))

    load(jnp.int32(0))
    queries()
    lax.fori_loop(1, steps + 1, lambda i, _: load(i), None)
    return filled + steps + 1


def drain(ctx: Context, filled):
    """Waits for every slot as often as it was filled, so that no CTA ends with barriers in flight."""

    def one(i, _):
        plgpu.barrier_wait(ctx.shared.k_free.at[ctx.slot(i)])
        plgpu.barrier_wait(ctx.shared.v_free.at[ctx.slot(i)])

    lax.fori_loop(filled - jnp.minimum(filled, ctx.c.stages), filled, one, None)
