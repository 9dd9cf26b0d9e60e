"""The kernel of the wide backward for a block of keys: dK and dV."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.backward_wide import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    SCORES,
    BlockLoop,
    Ring,
    WideConfig,
    accumulators,
    add,
    drain,
    launch,
    load_vector,
    mask_accumulator,
    part_columns,
    rem,
    score,
    scores,
    softmax_weights,
    store,
    tile,
    visible,
)
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.pairs import Tile, kept_weights, score_gradient
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import BACKWARD_CONSUMERS, ROWS
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import WHOLE


def key_gradients(
    c: WideConfig, query, key, value, dout, rows, table, optional: dict[str, Any], *, interpret: Any = False
):
    """dK ``[B, Sk, Hkv, D]`` and dV; ``rows`` as for ``query_gradient``, a step longer than the queries."""
    dtype = query.dtype
    queries, douts = c.key_slots
    pair = plgpu.Barrier(num_arrivals=1, num_barriers=2)
    of_vectors = plgpu.Barrier(num_arrivals=1, num_barriers=2 * BACKWARD_CONSUMERS)
    # dV is stored by way of the keys' place, dK by way of the values': no other warpgroup reads there.
    own = tile(dtype, max(c.parts, c.value_parts), ROWS, c.part)
    return launch(
        lambda *refs: _cta(c, *refs),
        (query, key, value, dout, rows, table),
        optional,
        grid=(key.shape[2], table.shape[1], key.shape[0]),
        out_type=(jax.ShapeDtypeStruct(key.shape, dtype), jax.ShapeDtypeStruct(value.shape, dtype)),
        scratch=[
            own,
            own,
            plgpu.Barrier(num_arrivals=c.parts),
            plgpu.Barrier(num_arrivals=c.value_parts),
            tile(jnp.float16, 2, ROWS, ROWS),
            pair,
            pair,
            plgpu.SMEM((BACKWARD_CONSUMERS, 2, ROWS), jnp.float32),
            of_vectors,
            of_vectors,
            *Ring.scratch(c, queries, dtype),
            *Ring.scratch(c, douts, dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=BACKWARD_CONSUMERS),
            tile(dtype, BACKWARD_CONSUMERS, ROWS, ROWS) if c.interpreted else None,
        ],
        interpret=interpret,
    )


def _cta(c: WideConfig, inputs, optional, dk_ref, dv_ref, k_smem, v_smem, k_ready, v_ready, p_smem, p_ready, p_free,
                 vector_smem, vector_ready, vector_free, q_smem, q_ready, q_free, do_smem, do_ready, do_free,
                 ping_pong, left_smem):  # fmt: skip
    q_ref, k_ref, v_ref, do_ref, rows_ref, table_ref = inputs
    kv_head, batch, warpgroup = (lax.axis_index(name) for name in ("head", "batch", "warpgroup"))
    loop = BlockLoop(c, table_ref, batch)
    key0 = loop.index * ROWS
    own = (batch, pl.ds(key0, ROWS), kv_head)
    queries, douts = Ring(q_smem, q_ready, q_free, c.parts), Ring(do_smem, do_ready, do_free, c.value_parts)

    def vector_slot(t, which):
        return 2 * which + rem(t, 2)

    @pl.when(warpgroup == BACKWARD_CONSUMERS)
    def _produce():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        for source, target, ready in ((k_ref, k_smem, k_ready), (v_ref, v_smem, v_ready)):
            for p, columns in enumerate(part_columns(c, source.shape[3])):
                plgpu.copy_gmem_to_smem(source.at[(*own, columns)], target.at[p], ready)
        begin, steps = loop.begin, loop.steps
        total = steps * c.group

        def vector(t, source, which):
            slot = vector_slot(t, which)
            pl.when(t >= 2)(lambda: plgpu.barrier_wait(vector_free.at[slot]))
            plgpu.copy_gmem_to_smem(source, vector_smem.at[which, rem(t, 2)], vector_ready.at[slot])

        def load(t, _):
            head, i = (kv_head, t) if c.group == 1 else (kv_head * c.group + lax.div(t, steps), lax.rem(t, steps))
            some = pl.ds(begin + i * ROWS, ROWS)
            queries.fill(t, lambda columns: q_ref.at[batch, some, head, columns])
            vector(t, rows_ref.at[batch, head, 0, some], 0)
            douts.fill(t, lambda columns: do_ref.at[batch, some, head, columns])
            vector(t, rows_ref.at[batch, head, 1, some], 1)

        lax.fori_loop(0, total, load, None)
        queries.drain(total)
        douts.drain(total)
        for which in range(BACKWARD_CONSUMERS):
            drain(total, 2, lambda t, which=which: vector_free.at[vector_slot(t, which)])

    def consume(me: int):
        """The first warpgroup computes P and dV, the second dP and dK."""
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        left, ready, scored, mixed = (k_smem, k_ready, queries, douts) if me == 0 else (v_smem, v_ready, douts, queries)
        plgpu.barrier_wait(ready)

        def ping_pong_wait():
            plgpu.barrier_wait(ping_pong.at[me])

        def ping_pong_arrive():
            plgpu.barrier_arrive(ping_pong.at[1 - me])

        def by_query(t):
            plgpu.barrier_wait(vector_ready.at[vector_slot(t, me)])
            return load_vector(vector_smem.at[me, rem(t, 2)], 1)

        def weights(t, i, s, masked):
            head = kv_head if c.group == 1 else kv_head * c.group + lax.div(t, loop.steps)
            where = Tile(c, optional, batch, head, key0, loop.begin + i * ROWS, by_keys=True)
            p, factor = softmax_weights(c, s, by_query(t), masked, where)
            slot = rem(t, 2)
            pl.when(t >= 2)(lambda: plgpu.barrier_wait(p_free.at[slot]))
            p_smem.at[slot][...] = factor.astype(p_smem.dtype)
            plgpu.barrier_arrive(p_ready.at[slot])
            return kept_weights(c, p).astype(q_ref.dtype)

        def score_gradients(t, dp):
            slope = by_query(t)
            if not c.dropout:
                dp = dp - slope
            slot = rem(t, 2)
            plgpu.barrier_wait(p_ready.at[slot])
            factor = plgpu.load(p_smem.at[slot], *WHOLE, layout=plgpu.Layout.WGMMA, optimized=True)
            plgpu.barrier_arrive(p_free.at[slot])
            factor = factor.astype(jnp.float32)
            return (score_gradient(c, factor, dp, slope) if c.dropout else factor * dp).astype(q_ref.dtype)

        def gradient(*accs):
            def step(t, i, masked):
                def seen():
                    return visible(c, optional, batch, t, loop.begin + i * ROWS, key0, 1)

                def products(acc):
                    mask_accumulator(c, acc, masked, seen)
                    score(acc, left, scored, t, lambda: mixed.release_last(t, 1))
                    ping_pong_arrive()
                    s = scores(c, acc, masked, seen)
                    for p in range(scored.parts):
                        scored.release(t, p)
                    mine = weights(t, i, s, masked) if me == 0 else score_gradients(t, s)
                    if c.interpreted:
                        plgpu.commit_smem()  # its race detector wants a fence between a read and a later copy
                    plgpu.barrier_arrive(vector_free.at[vector_slot(t, me)])
                    return mine

                mine = pl.run_scoped(products, SCORES)
                ping_pong_wait()
                add(c, accs, mine, lambda p: mixed.wait(t, p), left_smem.at[me] if c.interpreted else None)

            if me == 1:
                ping_pong_arrive()
            ping_pong_wait()
            if me == 1:
                # What is masked has a P of 0.
                total = loop.steps * c.group
                lax.fori_loop(0, total, lambda t, _: step(t, t, False), None)
            elif c.group == 1:
                total = loop.run(lambda i, masked: step(i, i, masked))
            else:

                def one_head(_, first):
                    return first + loop.run(lambda i, masked: step(first + i, i, masked))

                total = lax.fori_loop(0, c.group, one_head, jnp.int32(0))
            ping_pong_arrive()
            if me == 0:
                ping_pong_wait()
            mixed.release_last(total, 0)
            if me == 0:
                drain(total, 2, lambda t: p_free.at[rem(t, 2)])
                store(c, accs, 2.0**-c.weight_exponent / (1 - c.dropout), left, dv_ref, own)
            else:
                store(c, accs, c.scale * 2.0**-c.weight_exponent, left, dk_ref, own)

        pl.run_scoped(gradient, *accumulators(c, c.value_dim if me == 0 else c.dim))

    for me in range(BACKWARD_CONSUMERS):
        pl.when(warpgroup == me)(lambda me=me: consume(me))
