"""The single backward kernel: all three gradients in one pass over the pairs, five products a pair of blocks.

A CTA owns a block of keys; each consumer warpgroup owns 64 of them and keeps their dK and dV in registers. The producer
loops over the queries that see the block and copies Q and dO by TMA into a ring. Scores are held transposed, keys by
queries, so that P and dS are left operands in registers where the sum is over queries:

    Sᵀ = K·Qᵀ    dPᵀ = V·dOᵀ - slope    P = exp2(S - lse)    dV += Pᵀ·dO    dS = P dP    dK += dSᵀ·Q    dQ = dS·K

Only dQ sums over the keys of both warpgroups, so dS also goes through shared memory, one step behind: the product for
the step before runs while the other warpgroup may still be at this one. Writer warps add dQ's blocks to float32 in
global memory by TMA. CTAs add to a block of queries in the order in which they start, each waiting for a counter of
that block, so that a rerun gives the same bits; the first one stores, so nothing must be zeroed before.

Every barrier has one meaning. ``kv_ready``: the CTA's keys and values are there. ``ready``: a slot of the ring holds
its queries. ``free``: all consumers have read those. ``ds_ready``: a slot of dS is complete. ``dq_ready``: dQ is there
for its writer. ``dq_free``: the writer has read it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.backward_consumer import consume
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.backward_order import (
    blocks_per_round,
    heads_together,
    started,
)
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.backward_state import (
    BackwardConfig,
    Context,
    Inputs,
    Shared,
    shared_memory,
)
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import CORE_ROWS, ROWS
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import modulo
from ejkernel.kernels.common.varying import vary_as, varying_axes

# Of the producer's and the writers' threads.
SERVICE_REGISTERS = 24


def call(
    c: BackwardConfig,
    query,
    key,
    value,
    dout,
    rows,
    table,
    visitors,
    optional: dict[str, Any],
    *,
    context_type: type[Context] = Context,
    interpret: Any = False,
):
    """``dQ`` in float32, without the scale, ``dK`` and ``dV``.

    Where several CTAs share a block of keys, ``dK`` and ``dV`` are what each of them has, in float32, and ``dK`` is without
    the scale: ``[parts, B, blocks · keys, Hkv, D]``.

    ``rows``: ``[B, H, 2, Sq]``, minus the lse in base 2, -inf where a row sees nothing, and minus the slope; ``table``:
    ``[B|1, blocks of keys, 4]``, see ``visibility.table``; ``visitors``: for each step of queries the first and the
    last block of keys that visit it, ``[B|1, steps, 2]``. First queries are multiples of a step.
    """
    batch, q_len, heads, _ = query.shape
    kv_heads, blocks = key.shape[2], table.shape[1]
    warps = not c.interpreted and not varying_axes(query, key, value, dout)
    c = dataclasses.replace(c, warps=warps, round=blocks_per_round(c, blocks))
    if c.masked:
        optional = {**optional, "places": jnp.asarray(np.arange(max(ROWS, c.step), dtype=np.int32)[None])}
    names, count = tuple(optional), len(Inputs._fields)
    inputs = count + len(names)

    def entry(*refs):
        of_masks = dict(zip(names, refs[count:inputs], strict=True))
        dq, dk, dv, *shared = refs[inputs:]
        _cta(c, Inputs(*refs[:count]), of_masks, dq, dk, dv, Shared(*shared), context_type)

    slices = batch * kv_heads * c.parts
    together = heads_together(c, slices, q_len * c.group * (4 * c.dim + 2 * c.dim + 2 * c.value_dim))
    dq_shape = (batch, q_len + -q_len % CORE_ROWS, heads, c.squares * ROWS)

    def of_keys(like):
        if c.parts == 1:
            return jax.ShapeDtypeStruct(like.shape, like.dtype)
        shape = (c.parts, batch, blocks * c.consumers * ROWS, kv_heads, like.shape[3])
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    run = plgpu.kernel(
        entry,
        out_type=(
            jax.ShapeDtypeStruct((blocks, *dq_shape) if c.interpreted else dq_shape, jnp.float32),
            of_keys(key),
            of_keys(value),
        ),
        scratch_types=list(shared_memory(c, query.dtype)),
        # The last is the fastest: blocks of keys start in order, each after all that it may wait for.
        grid=(slices // together, blocks, together),
        grid_names=("heads", "block", "head"),
        num_threads=c.consumers + (1 if c.warps else 1 + c.writers),
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({"interpret": interpret} if interpret else {}),
    )
    return vary_as(run(query, key, value, dout, rows, table, visitors, *optional.values()), query)


def _cta(
    c: BackwardConfig, inputs: Inputs, optional: dict[str, Any], dq, dk, dv, shared: Shared, context_type: type[Context]
):
    """The roles of one CTA."""
    nth, blocks = lax.axis_index("block"), inputs.table.shape[1]
    block = started(nth, c.round, blocks)
    head = lax.axis_index("heads") * lax.axis_size("head") + lax.axis_index("head")
    part = None
    if c.parts > 1:
        head, part = lax.div(head, jnp.int32(c.parts)), lax.rem(head, jnp.int32(c.parts))
    kv_heads = inputs.k.shape[-2]
    batch, kv_head = lax.div(head, jnp.int32(kv_heads)), lax.rem(head, jnp.int32(kv_heads))
    warpgroup = lax.axis_index("warpgroup")
    key0 = block * (c.consumers * ROWS)
    counters = None if c.interpreted else pl.get_global(plgpu.SemaphoreType.REGULAR(_counters(c, inputs.q)))
    ctx = context_type(c, inputs, optional, dq, dk, dv, shared, counters, nth, block, batch, kv_head, part, key0)

    services = [functools.partial(_produce, ctx), *(functools.partial(_write, ctx, i) for i in range(c.writers))]
    if c.warps:

        @pl.when(warpgroup == c.consumers)
        def _serve():
            plgpu.set_max_registers(SERVICE_REGISTERS, action="decrease")

            def warps():
                for i, work in enumerate(services):
                    pl.when(lax.axis_index("warp") == i)(work)

            pl.kernel(warps, mesh=plgpu.WarpMesh(axis_name="warp"))()

    else:
        for i, work in enumerate(services):

            @pl.when(warpgroup == c.consumers + i)
            def _serve(work=work):
                plgpu.set_max_registers(SERVICE_REGISTERS, action="decrease")
                work()

    @pl.when(warpgroup < c.consumers)
    def _consume():
        plgpu.set_max_registers(c.registers, action="increase")
        consume(ctx, warpgroup)


def _counters(c: BackwardConfig, q_ref) -> tuple[int, int, int]:
    batch, rows, heads, _ = q_ref.shape
    return batch, heads, -(-rows // c.step)


def _produce(ctx: Context):
    """Copies the CTA's keys and values, then Q, dO, lse and slope of every step."""
    c, inputs, shared = ctx.c, ctx.inputs, ctx.shared
    begin, _, _, steps = ctx.loop()
    total = steps * c.group
    for r in range(c.consumers if c.in_panels else 0):
        squares = [(shared.k, (r, h), h * ROWS) for h in range(c.squares)]
        values = (shared.v, r, 0), (shared.v_tail, r, ROWS)
        for array, targets in ((inputs.k, [*squares, (shared.k_tail, r, ROWS)]), (inputs.v, values)):
            for pair in ctx.panel_copies(array, ctx.key_row(r), ROWS, ctx.kv_head, *targets):
                plgpu.copy_gmem_to_smem(*pair, shared.kv_ready)
    for r in range(0 if c.in_panels else c.consumers):
        keys = (ctx.batch, pl.ds(ctx.key_row(r), ROWS), ctx.kv_head)
        for h in range(c.dim // ROWS):
            plgpu.copy_gmem_to_smem(inputs.k.at[(*keys, pl.ds(h * ROWS, ROWS))], shared.k.at[r, h], shared.kv_ready)
        plgpu.copy_gmem_to_smem(inputs.v.at[keys], shared.v.at[r], shared.kv_ready)

    def load(t, wait):
        head, row0 = ctx.place(t, begin, steps)
        slot = modulo(t, c.stages)
        rows = (ctx.batch, pl.ds(row0, c.step), head)
        if wait:
            plgpu.barrier_wait(shared.free.at[slot])
        if c.in_panels:
            for array, parts in ((inputs.q, (shared.q, shared.q_tail)), (inputs.do, (shared.do, shared.do_tail))):
                targets = (parts[0], slot, 0), (parts[1], slot, ROWS)
                for pair in ctx.panel_copies(array, row0, c.step, head, *targets):
                    plgpu.copy_gmem_to_smem(*pair, shared.ready.at[slot])
        else:
            plgpu.copy_gmem_to_smem(inputs.q.at[rows], shared.q.at[slot], shared.ready.at[slot])
        vectors = inputs.rows.at[ctx.batch, head, pl.ds(0, 2), pl.ds(row0, c.step)]
        plgpu.copy_gmem_to_smem(vectors, shared.rows.at[slot], shared.ready.at[slot])
        if not c.in_panels:
            plgpu.copy_gmem_to_smem(inputs.do.at[rows], shared.do.at[slot], shared.ready.at[slot])

    prologue = jnp.minimum(total, c.stages)
    lax.fori_loop(0, prologue, lambda t, _: load(t, wait=False), None)
    lax.fori_loop(prologue, total, lambda t, _: load(t, wait=True), None)

    # Every slot is waited for as often as it was filled, so that no CTA ends with barriers in flight.
    def drain(t, _):
        plgpu.barrier_wait(shared.free.at[modulo(t, c.stages)])

    lax.fori_loop(total - prologue, total, drain, None)


def _write(ctx: Context, writer: int):
    """Adds every ``writers``-th dQ to global memory, so that one may still be on its way when the next is ready.

    The consumers' first dQ is computed before there is any dS and is dropped: the n-th is that of step n - 1.
    """
    c, shared = ctx.c, ctx.shared
    begin, _, _, steps = ctx.loop()
    total = steps * c.group
    buffer = writer % c.buffers

    def add(i, _):
        n = i * c.writers + writer

        @pl.when(n == 0)
        def _drop():
            plgpu.barrier_wait(shared.dq_ready.at[writer])
            plgpu.barrier_arrive(shared.dq_free.at[buffer])

        @pl.when(n > 0)
        def _add():
            t = n - 1
            head, row0 = ctx.place(t, begin, steps)
            step = lax.div(row0, jnp.int32(c.step))
            earlier = ctx.earlier(t, step)

            def copy(**how):
                for part in range(c.consumers):
                    rows = pl.ds(row0 + part * ROWS, ROWS) if c.by_rows else pl.ds(row0, ROWS)
                    columns = pl.ds(0 if c.by_rows else part * ROWS, ROWS)
                    target = ctx.dq.at[(*((ctx.block,) if c.interpreted else ()), ctx.batch, rows, head, columns)]
                    plgpu.copy_smem_to_gmem(shared.dq.at[buffer, part], target, **how)

            if c.interpreted:
                plgpu.barrier_wait(shared.dq_ready.at[writer])
                copy()
                plgpu.wait_smem_to_gmem(0)
                plgpu.barrier_arrive(shared.dq_free.at[buffer])
            else:
                counter = ctx.counters.at[ctx.batch, head, step]
                plgpu.semaphore_wait(counter, earlier, decrement=False, memory_scope="gpu")
                plgpu.barrier_wait(shared.dq_ready.at[writer])
                pl.when(earlier == 0)(copy)
                pl.when(earlier > 0)(lambda: copy(reduction_op="add"))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(shared.dq_free.at[buffer])
                plgpu.wait_smem_to_gmem(0)
                plgpu.semaphore_signal(counter, memory_scope="gpu")

    if writer < c.buffers:
        plgpu.barrier_arrive(shared.dq_free.at[buffer])
    lax.fori_loop(0, lax.div(total + c.writers - writer, jnp.int32(c.writers)), add, None)
