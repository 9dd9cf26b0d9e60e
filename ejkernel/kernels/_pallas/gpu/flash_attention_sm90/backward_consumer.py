"""A consumer of the single backward kernel: a warpgroup that computes dK and dV of 64 keys, and its part of dQ."""

from __future__ import annotations

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.backward_state import BackwardConfig, Context
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.pairs import Tile, kept_weights, score_gradient
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import ROWS
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import (
    WHOLE,
    modulo,
    never_taken_branch,
    opaque_zero,
    store_square,
)
from ejkernel.kernels.common.softmax import LOG2E

# What weights, which are at most 1, are multiplied by as float16: the least with all its digits is then 2**-29, not
# 2**-14.
FLOAT16_SCALE = 2.0**15


def consume(ctx: Context, warpgroup):
    """All steps, then dK and dV to global memory."""
    c, shared = ctx.c, ctx.shared
    own_key0 = ctx.key0 + warpgroup * ROWS
    p_own = None if shared.p is None else shared.p.at[warpgroup]
    shape = (ROWS, c.step)
    squares = ctx.for_products(shared.k)

    def along_columns(ref, tail, at):
        """The parts of what lies in shared memory, 64 columns at most each, or none where a product takes them all."""
        return [ctx.for_products(part).at[at] for part in (ref, tail) if part is not None]

    def store_ds(t, ds):
        slot = modulo(t, c.slots)
        for i in range(c.step // ROWS):
            part = ds if c.step == ROWS else ds[:, i * ROWS : (i + 1) * ROWS]
            store_square(c, shared.ds.at[slot, warpgroup, i], part)

    def publish_ds(t):
        plgpu.barrier_arrive(shared.ds_ready.at[modulo(t, c.slots)])

    def start_dq(acc, t):
        slot, zero = modulo(t, c.slots), opaque_zero(t)
        for r in range(c.consumers):
            row, column = (warpgroup, 0) if c.by_rows else (0, warpgroup)
            plgpu.wgmma(acc, shared.ds.at[slot, r, row].transpose((1, 0)), squares.at[zero + r, column])

    def store_dq(n, dq_acc, pending):
        buffer = modulo(n, c.buffers)
        plgpu.barrier_wait(shared.dq_free.at[buffer])
        dq = lax.optimization_barrier(plgpu.wgmma_accumulator_load(dq_acc, wait_n=pending))
        shared.dq.at[buffer, warpgroup][...] = dq

    def publish_dq(n):
        plgpu.barrier_arrive(shared.dq_ready.at[modulo(n, c.writers)])

    def publish_last(t):
        """What the step before ``t`` has stored. Before the first that is dS alone."""
        plgpu.commit_smem()
        publish_ds(t + c.slots - 1)
        pl.when(t > 0)(lambda: publish_dq(t + c.writers - 1))

    def release(t):
        """The slot of step ``t``, whose products are over; none before the first."""
        pl.when(t >= 0)(lambda: plgpu.barrier_arrive(shared.free.at[modulo(t + c.stages, c.stages)]))

    def step(t, masked, dk_acc, dv_acc):
        """``masked``: whether the step is, or what says so at run time."""
        slot, zero = modulo(t, c.stages), opaque_zero(t)
        q, do = along_columns(shared.q, shared.q_tail, slot), along_columns(shared.do, shared.do_tail, slot)

        def seen():
            begin, _, _, steps = ctx.loop(zero)
            return _visible(ctx, t, own_key0 + zero, ctx.row(t, begin, steps))

        def tile():
            begin, _, _, steps = ctx.loop(zero)
            head, row0 = ctx.place(t, begin, steps)
            return Tile(c, ctx.optional, ctx.batch, head, own_key0 + zero, row0, by_keys=True)

        def by_query(which):
            part = shared.rows.at[slot, which]
            return plgpu.load(part, *WHOLE, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)

        def spread(values):
            return lax.broadcast_in_dim(values, shape, [1])

        def softmax(s_acc, dp_acc):
            """P and dS of the step, rounded."""
            if masked is not False and not c.interpreted:
                # Where a pair does not count the sum starts at -inf, and stays there.
                def mask():
                    s_acc[...] = jnp.where(seen(), np.float32(0), np.float32(-np.inf))

                mask() if masked is True else pl.when(masked)(mask)

            for h in range(c.squares):
                part = q[h] if c.panel else q[0] if c.dim == ROWS else q[0].at[:, h * ROWS : (h + 1) * ROWS]
                keys = squares.at[zero + warpgroup, h]
                if h and shared.k_tail is not None:
                    keys = ctx.for_products(shared.k_tail).at[zero + warpgroup]
                plgpu.wgmma(s_acc, keys, part.transpose((1, 0)))
            if not c.eager:
                publish_last(t)
            plgpu.wgmma_wait(c.squares)
            release(t - 1)
            if not c.interpreted and not c.dropout:
                # The sum starts at minus the slope.
                dp_acc[...] = spread(by_query(1))
            # Loaded together they are waited for once. Where a step has 128 queries, there are too few registers.
            reference = lax.optimization_barrier(by_query(0)) if c.step == ROWS else None
            for values, part in zip(along_columns(shared.v, shared.v_tail, zero + warpgroup), do, strict=True):
                plgpu.wgmma(dp_acc, values, part.transpose((1, 0)))
            s = lax.optimization_barrier(plgpu.wgmma_accumulator_load(s_acc, wait_n=c.panels))
            if masked is not False and c.interpreted:
                s = jnp.where(seen() | jnp.logical_not(masked), s, -jnp.inf)
            capped = jnp.tanh(s * (c.scale / c.cap)) if c.cap else None
            if c.bias or c.mask:
                logits = capped * c.cap if c.cap else s * c.scale
                logits = tile().biased(logits, may_end=c.partial_step) * LOG2E
            else:
                logits = capped * (c.cap * LOG2E) if c.cap else s * (c.scale * LOG2E)
            p = jnp.exp2(logits + spread(by_query(0) if reference is None else reference))
            if masked is not False and (c.cap or c.scale <= 0):
                p = jnp.where(s == -jnp.inf, 0.0, p)
            if c.dropout:
                p = tile().dropped(p, mark=True)
            as_float16 = bool(c.cap) and c.dim == ROWS
            weight = p * (1 - capped * capped) if c.cap else None
            if as_float16:
                # Two of these share a register; dS is rounded at least as much.
                p = kept_weights(c, p).astype(ctx.inputs.do.dtype)
                weight = (weight * FLOAT16_SCALE).astype(jnp.float16)
            p, weight = lax.optimization_barrier((p, weight))
            # This wait is a branch: without one, ptxas would move the exponentials behind the wait for dP.
            plgpu.barrier_wait(shared.ds_ready.at[modulo(t + c.slots - 1, c.slots)])
            dp = lax.optimization_barrier(plgpu.wgmma_accumulator_load(dp_acc))
            if as_float16:
                weight = weight.astype(jnp.float32) * (1 / FLOAT16_SCALE)
            weight = weight if c.cap else p
            if c.dropout:
                ds = score_gradient(c, weight, dp, -spread(by_query(1)))
            else:
                ds = weight * (dp + spread(by_query(1)) if c.interpreted else dp)
            p = p if as_float16 else kept_weights(c, p).astype(ctx.inputs.do.dtype)
            return lax.optimization_barrier((p, ds.astype(ctx.inputs.q.dtype)))

        # Before the accumulators' scope: their zeros are folded into the first product only if no branch is between.
        plgpu.barrier_wait(shared.ready.at[slot])
        p, ds = pl.run_scoped(softmax, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
        store_ds(t, ds)
        if c.eager:
            plgpu.commit_smem()
            publish_ds(t)
        # Else P would be rounded only after dQ's product has started, and take twice the registers beside it.
        never_taken_branch(c)

        def products(dq_acc):
            start_dq(dq_acc, t + c.slots - 1)
            _add_product(c, dv_acc, p, do, p_own)
            _add_product(c, dk_acc, ds, q, p_own)
            store_dq(t, dq_acc, 2 * c.panels)
            if c.eager:
                plgpu.commit_smem()
                publish_dq(t)
            else:
                # Else ptxas waits for all products before it takes dQ's registers for the next scores.
                never_taken_branch(c)

        pl.run_scoped(products, plgpu.ACC((ROWS, ROWS), jnp.float32))

    def separate_loops(dk_acc, dv_acc):
        """Masked steps, unmasked ones, masked ones. Products in flight would hold the next loop's registers."""
        parts = [(0, c.head, True), (1, True, False), (2, c.tail, True)]
        done = jnp.int32(0)
        for part, ever, masked in parts if c.ascending else reversed(parts):
            if ever:
                cuts = jnp.int32(0), *ctx.loop(opaque_zero(done))[1:]
                begin, end = cuts[part : part + 2] if c.ascending else (cuts[3] - cuts[part + 1], cuts[3] - cuts[part])
                done = end * c.group
                body = functools.partial(step, masked=masked, dk_acc=dk_acc, dv_acc=dv_acc)
                lax.fori_loop(begin * c.group, done, lambda t, _, body=body: body(t), None)
                plgpu.wgmma_wait(0)
        return ctx.loop(opaque_zero(done))[3] * c.group if c.masked else done

    def one_loop(dk_acc, dv_acc):
        _, first, last, steps = ctx.loop()

        def one(t, _):
            step(t, ctx.is_masked(t, first, last, steps) if c.masked else False, dk_acc, dv_acc)

        lax.fori_loop(0, steps * c.group, one, None)
        plgpu.wgmma_wait(0)
        return steps * c.group

    def all_steps(dk_acc, dv_acc):
        before = jnp.int32(c.slots - 1)
        store_ds(before, plgpu.layout_cast(jnp.zeros(shape, ctx.inputs.q.dtype), plgpu.Layout.WGMMA))
        if c.eager:
            plgpu.commit_smem()
            publish_ds(before)
        plgpu.barrier_wait(shared.kv_ready)
        total = separate_loops(dk_acc, dv_acc) if c.separate_loops else one_loop(dk_acc, dv_acc)
        release(total - 1)
        if not c.eager:
            publish_last(total)

        def finish(dq_acc):
            plgpu.barrier_wait(shared.ds_ready.at[modulo(total + c.slots - 1, c.slots)])
            start_dq(dq_acc, total + c.slots - 1)
            store_dq(total, dq_acc, 0)
            plgpu.commit_smem()
            publish_dq(total)

        pl.run_scoped(finish, plgpu.ACC((ROWS, ROWS), jnp.float32))
        # When the writers have read dQ, both warpgroups have read the keys, whose place dK takes.
        for buffer in range(c.buffers):
            plgpu.barrier_wait(shared.dq_free.at[buffer])
        _store(ctx, warpgroup, own_key0, dk_acc, dv_acc)

    def scope(*accs):
        all_steps(accs[: c.panels], accs[c.panels :])

    widths = (ROWS, c.panel, ROWS, c.panel) if c.panel else (c.dim, c.value_dim)
    pl.run_scoped(scope, *(plgpu.ACC((ROWS, width), jnp.float32) for width in widths))


def _store(ctx: Context, warpgroup, key0, dk_acc, dv_acc):
    """dK and dV, by way of the shared memory of the keys and values, to global memory.

    What other CTAs add to stays in float32, for which that has no room: registers are stored.
    """
    c, shared = ctx.c, ctx.shared
    if c.in_panels:
        _store_panels(ctx, warpgroup, key0, dk_acc, dv_acc)
        return
    [dk_acc], [dv_acc] = dk_acc, dv_acc
    if c.parts > 1:
        own = (ctx.part, ctx.batch, pl.ds(key0, ROWS), ctx.kv_head)
        ctx.dv.at[own][...] = dv_acc[...]
        ctx.dk.at[own][...] = dk_acc[...]
        return
    dv = dv_acc[...] * (1 / (1 - c.dropout)) if c.dropout else dv_acc[...]
    shared.v.at[warpgroup][...] = dv.astype(shared.v.dtype)
    dk = (dk_acc[...] * c.scale).astype(shared.k.dtype)
    for h in range(c.dim // ROWS):
        shared.k.at[warpgroup, h][...] = dk if c.dim == ROWS else dk[:, h * ROWS : (h + 1) * ROWS]
    plgpu.commit_smem()
    keys = (ctx.batch, pl.ds(key0, ROWS), ctx.kv_head)
    for h in range(c.dim // ROWS):
        plgpu.copy_smem_to_gmem(shared.k.at[warpgroup, h], ctx.dk.at[(*keys, pl.ds(h * ROWS, ROWS))])
    plgpu.copy_smem_to_gmem(shared.v.at[warpgroup], ctx.dv.at[keys])
    plgpu.wait_smem_to_gmem(0)


def _store_panels(ctx: Context, warpgroup, key0, dk_accs, dv_accs):
    """The same of heads in panels: TMA leaves out the columns that a head does not have."""
    c, shared = ctx.c, ctx.shared
    in_squares = shared.k_tail is None and c.panel
    tail = (shared.k, (warpgroup, 1), ROWS) if in_squares else (shared.k_tail, warpgroup, ROWS)
    of_keys = (shared.k, (warpgroup, 0), 0), tail
    of_values = (shared.v, warpgroup, 0), (shared.v_tail, warpgroup, ROWS)
    for accs, targets, factor in ((dv_accs, of_values, 1 / (1 - c.dropout)), (dk_accs, of_keys, c.scale)):
        for acc, (ref, at, _) in zip(accs, targets, strict=False):
            values = acc[...] if factor == 1 else acc[...] * factor
            ctx.for_products(ref).at[at][...] = values.astype(ctx.inputs.k.dtype)
    plgpu.commit_smem()
    for array, targets in ((ctx.dk, of_keys), (ctx.dv, of_values)):
        for outside, inside in ctx.panel_copies(array, key0, ROWS, ctx.kv_head, *targets):
            plgpu.copy_smem_to_gmem(inside, outside)
    plgpu.wait_smem_to_gmem(0)


def _add_product(c: BackwardConfig, accs, left, rights, left_smem):
    """``accs += left · rights``, part by part, in flight."""
    if c.interpreted:
        left_smem[...] = left
        plgpu.commit_smem()
    for acc, right in zip(accs, rights, strict=True):
        plgpu.wgmma(acc, left_smem if c.interpreted else left, right)


def _visible(ctx: Context, t, key0, row0):
    """``[64, step]``: which pairs of keys and queries count."""
    c, batch = ctx.c, ctx.batch
    shape = (ROWS, c.step)

    def vector(name, start, axis):
        ref = ctx.optional[name]
        part = ref.at[batch if ref.shape[0] > 1 else 0, pl.ds(start, shape[axis])]
        values = plgpu.load(part, *WHOLE, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
        return lax.broadcast_in_dim(values, shape, [axis])

    def position(start, axis):
        # Loaded: what ptxas computes it keeps in registers over the loop.
        return start + vector("places", opaque_zero(t), axis)

    key = position(key0, 0)
    if c.packed:
        seen = (key >= vector("start", row0, 1)) & (key < vector("stop", row0, 1))
    else:
        seen = key < c.kv_len
        if c.left is not None or c.right is not None:
            row = position(row0, 1)
            if c.left is not None:
                seen &= key >= row + c.left
            if c.right is not None:
                seen &= key < row + c.right
    if c.segments:
        mine = vector("q_ids", row0, 1)
        seen &= (mine == vector("kv_ids", key0, 0)) & (mine > 0)
    return ctx.restrict(seen, t, key0)
