"""A consumer of the forward kernel: a warpgroup that computes 64 rows of a block of queries."""

from __future__ import annotations

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.ahead import ahead_of
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.forward_state import Context, ForwardConfig, QueryBlock
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.panels import start_pv, start_qk
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import ROWS
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import (
    BY_ROW,
    modulo,
    never_taken_branch,
    opaque_zero,
    partial_row_sums,
    reduce_rows,
    request_retry,
    rescale_rows,
    wait_for_products,
)
from ejkernel.kernels.common.softmax import LOG2E

# Where the softmax reference starts. Finite, so that a row without a visible key meets no inf - inf.
LOWEST = -1e30
# A row's weights are 2**(logit - reference). The reference cancels in the output and the lse, so any will do that keeps
# weights in range: it is a lazily updated running maximum, updated only when the maximum is more than this above. Then
# weights are at most 2**8, far under float16's 65504, and at least one was 1 when the reference was taken; sums are in
# float32. Most steps rescale nothing.
GROWTH = 8.0
# A speculative block takes no maxima after its first steps: weights are in range anyway, unless logits grow by tens.
# Beyond this sum it is computed again. Far from float32's 2**128, so that weights times values are in range as well.
LIMIT = 2.0**64


def consume_all(ctx: Context, warpgroup):
    """Of a persistent kernel: computes the blocks that the producer takes from the queue."""
    c = ctx.c

    def wait_for_queries():
        plgpu.barrier_wait(ctx.shared.q_ready.at[warpgroup])

    def one(carry):
        item, nth, first_slot, parity, *careful = carry
        block = ctx.block(item)
        if not c.speculative:
            first_slot = consume(ctx, block, warpgroup, first_slot)
            wait_for_queries()
            return ctx.shared.item[1 - parity, 0], nth + 1, first_slot, 1 - parity
        (careful,) = careful
        after = ctx.slot(first_slot + block.steps + 1)

        @pl.when(careful == 0)
        def _():
            consume(ctx, block, warpgroup, first_slot, nth)
            wait_for_queries()

        # A block without speculation sets no flag.
        retry = ctx.retry_requested(nth)
        again = retry | (careful > 0)

        @pl.when(again)
        def _():
            consume(ctx, block, warpgroup, jnp.where(retry, after, first_slot))
            wait_for_queries()

        # Outliers are rarely in one block alone: what follows a repeated block is not computed speculatively.
        repeats = retry.astype(jnp.int32)
        first_slot = ctx.slot(after + repeats * (block.steps + 1))
        return (
            ctx.shared.item[1 - parity, 0],
            nth + 1 + repeats,
            first_slot,
            1 - parity,
            again.astype(jnp.int32),
        )

    wait_for_queries()
    zero = jnp.int32(0)
    state = (ctx.shared.item[0, 0], zero, zero, zero) + ((zero,) if c.speculative else ())
    lax.while_loop(lambda carry: carry[0] < ctx.items, one, state)


def consume(ctx: Context, block: QueryBlock, warpgroup, first_slot, nth=None):
    """Computes a block whose first step is in ``first_slot`` of the ring; returns the slot after its last.

    With ``nth``, the block's number among those of the CTA, it is computed speculatively, and the retry flag of that
    number is set if a sum of weights exceeds ``LIMIT``.
    """
    c, shared = ctx.c, ctx.shared
    row0 = block.first_row(warpgroup)
    q = shared.q.at[warpgroup]
    p_smem = shared.p.at[warpgroup] if c.interpreted else None
    other = lax.rem(warpgroup + 1, jnp.int32(c.consumers))

    def slot(i):
        return ctx.slot(first_slot + i)

    # The upper bound of a static mask is known for every row: each warpgroup has its own and leaves out what only
    # others see.
    own_end = block.consecutive and c.tail and c.right is not None and not (c.packed or c.segments)

    def steps_before(part):
        if not own_end or part < 2 or (part == 2 and not c.full):
            return block.steps_before(part)
        stop = block.first_stop(row0) if part == 2 else block.last_stop(row0)
        keys = jnp.maximum(stop - block.begin, 0)
        steps = lax.div(keys if part == 2 else keys + (c.step - 1), jnp.int32(c.step))
        least = block.steps_before(1) if part == 2 else jnp.maximum(block.steps_before(1), 1)
        return jnp.clip(steps, least, block.steps)

    steps = steps_before(3)

    def ping_pong_wait():
        if c.ping_pong:
            plgpu.barrier_wait(shared.ping_pong.at[warpgroup])

    def ping_pong_arrive():
        if c.ping_pong:
            plgpu.barrier_arrive(shared.ping_pong.at[other])

    def wait_for_next(i):
        """Wait for the next step's keys and this one's values.

        It stands between the exponentials and the wait for P·V: ptxas moves that wait to the front of its basic block,
        and would have the exponentials wait too, were there no branch between.
        """
        plgpu.barrier_wait(shared.ready.at[slot(i + 1)])

    def row_sums(p):
        return partial_row_sums(c, p) if c.speculative else reduce_rows(c, p, "add")

    def ahead(i, masked: bool):
        """What a step's logits meet beside each other, loaded while they are computed."""
        if not (c.bias or c.mask or c.dropout):
            return None
        # Were there no branches, ptxas would put this among the products, which would start late, or behind their wait.
        never_taken_branch(c)
        found = ahead_of(block.tile(row0, block.begin + i * c.step), c.step, may_end=masked, unit=c.unit)
        never_taken_branch(c)
        return found

    def softmax(s, i, top, total, given, masked: bool, all_started: bool = False):
        """Weights of a step, their sum so far, and, if the reference was updated, that and the factor of earlier terms.

        A row that has seen nothing keeps ``LOWEST``: its logits are -inf, which is not above, and its weights 0. Its
        first visible key takes the reference from there, and what was summed before, zeros, is multiplied by 0.

        ``all_started``: every row's first visible key lies at or before the step's first.
        """

        s = _logits(c, s)
        if given is not None:
            s = given.biased(s)
        if masked:
            s = block.mask(s, row0, block.begin + i * c.step, all_started)
        updated = ()
        if nth is None or not all_started:
            high = reduce_rows(c, s, "max") * c.factor
            new_top = jnp.where(high > top + GROWTH, high, top)
            decay = jnp.exp2(top - new_top)
            total, top = total * (lax.broadcast_in_dim(decay, total.shape, [0]) if c.speculative else decay), new_top
            updated = top, decay
        p = jnp.exp2(s * c.factor - lax.broadcast_in_dim(top, s.shape, [0]))
        total = total + row_sums(p)
        return p if given is None else given.dropped(p), total, updated

    def step(i, carry, masked: bool, all_started: bool):
        acc, top, total, p16 = carry
        now = slot(i)
        ping_pong_wait()
        s = start_qk(c, q, shared.k.at[now])
        acc = start_pv(c, acc, p16, shared.v.at[now], p_smem)
        ping_pong_arrive()
        given = ahead(i, masked)
        (s,) = wait_for_products(c, 1, s)
        plgpu.barrier_arrive(shared.k_free.at[now])
        p, total, updated = lax.optimization_barrier(softmax(s, i, top, total, given, masked, all_started))
        wait_for_next(i)
        acc, p = wait_for_products(c, 0, acc, p)
        plgpu.barrier_arrive(shared.v_free.at[now])
        if updated:
            top, decay = updated
            acc = rescale_rows(c, acc, decay)
        return acc, top, total, p.astype(shared.v.dtype)

    top = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), BY_ROW)
    # A speculative block's sums are each thread's own until its last step.
    if c.speculative:
        total = plgpu.layout_cast(jnp.zeros((ROWS, 8), jnp.float32), plgpu.Layout.WGMMA)
    else:
        total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), BY_ROW)
    acc = plgpu.layout_cast(jnp.zeros((ROWS, c.value_dim), jnp.float32), plgpu.Layout.WGMMA)

    # The first step has no P·V before it, the last none after it.
    plgpu.barrier_wait(shared.ready.at[slot(0)])
    ping_pong_wait()
    s = start_qk(c, q, shared.k.at[slot(0)])
    ping_pong_arrive()
    first_masked = c.head or c.tail
    given = ahead(jnp.int32(0), first_masked)
    (s,) = wait_for_products(c, 0, s)
    for free in (shared.k_free, shared.v_free):
        plgpu.barrier_arrive(free.at[slot(0)])
    p, total, (top, _) = softmax(s, jnp.int32(0), top, total, given, first_masked)
    wait_for_next(0)
    carry = acc, top, total, p.astype(shared.v.dtype)
    # All rows have started at the first unmasked step, or where it would be: trailing masked steps test only the upper
    # bound.
    parts = (True, False, c.head), (False, True, c.full), (True, True, c.tail)
    for part, (masked, all_started, ever) in enumerate(parts):
        if ever:
            body = functools.partial(step, masked=masked, all_started=all_started)
            carry = lax.fori_loop(jnp.maximum(steps_before(part), 1), steps_before(part + 1), body, carry)
    acc, top, total, p16 = carry
    if nth is not None:
        request_retry(c, shared.retry.at[modulo(nth, 2) * c.consumers + warpgroup], total, LIMIT, nth)
    if c.persistent and not c.output_in_queries:
        plgpu.barrier_arrive(shared.q_free.at[warpgroup])
    (acc,) = wait_for_products(c, 0, start_pv(c, acc, p16, shared.v.at[slot(steps)], p_smem))
    for free in (shared.k_free, shared.v_free):
        plgpu.barrier_arrive(free.at[slot(steps)])

    def skip(i, _):
        ping_pong_wait()
        ping_pong_arrive()
        plgpu.barrier_wait(shared.ready.at[slot(i)])
        for free in (shared.k_free, shared.v_free):
            plgpu.barrier_arrive(free.at[slot(i)])

    if own_end:
        lax.fori_loop(steps + 1, block.steps + 1, skip, None)
    if c.speculative:
        total = reduce_rows(c, total, "add")
    if c.sinks:
        # A sink may be far above the reference: here it becomes the maximum.
        sink = block.sinks() * LOG2E
        new_top = jnp.maximum(top, sink)
        decay = jnp.exp2(top - new_top)
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
        total, top = total * decay + jnp.exp2(sink - new_top), new_top
    # Addresses that are used at the end alone: the zero keeps ptxas from computing them before the loop.
    row0 = row0 + opaque_zero(steps)
    _store(ctx, block, warpgroup, row0, acc, top, total, again=nth is None)
    return ctx.slot(first_slot + block.steps + 1)


def _store(ctx: Context, block: QueryBlock, warpgroup, row0, acc, top, total, again: bool):
    """Output and lse to global memory; ``again``: not for the first time, if the kernel is speculative."""
    c, shared = ctx.c, ctx.shared
    some = total != 0  # or NaN, which stays
    inverse = jnp.where(some, 1.0 / (1.0 - c.dropout) / total, 0.0)
    block.lse(row0, warpgroup)[...] = jnp.where(some, top * (1 / LOG2E) + jnp.log(total), -jnp.inf)
    target = (shared.q if shared.out is None else shared.out).at[warpgroup]
    if c.persistent:
        # The copy of a first result must not overtake that of the second.
        plgpu.wait_smem_to_gmem(0, wait_read_only=not again or not c.speculative)
    # Beside a NaN that other rows see, a row that sees nothing has 0 · NaN.
    acc = acc * lax.broadcast_in_dim(inverse, acc.shape, [0])
    block.store(jnp.where(lax.broadcast_in_dim(some, acc.shape, [0]), acc, 0.0).astype(target.dtype), target, row0)
    if c.persistent and c.output_in_queries:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(shared.q_free.at[warpgroup])


def _logits(c: ForwardConfig, s):
    """Logits, but for ``c.factor``."""
    if c.cap:
        return jnp.tanh(s * (c.scale / c.cap))
    return s if c.scale > 0 else s * c.scale
