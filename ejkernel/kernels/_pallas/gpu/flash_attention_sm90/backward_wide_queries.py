"""The kernel of the wide backward for a block of queries: dQ."""

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
    launch,
    mask_accumulator,
    part_columns,
    score,
    scores,
    softmax_weights,
    store,
    tile,
    visible,
)
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.pairs import Tile, score_gradient
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import BACKWARD_CONSUMERS, ROWS
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import WHOLE


def query_gradient(
    c: WideConfig, query, key, value, dout, rows, table, optional: dict[str, Any], *, interpret: Any = False
):
    """dQ ``[B, Sq, H, D]``.

    ``rows``: ``[B, H, 2, blocks · 128]``, the lse in base 2 and the slope; ``table``: see ``longest_first``.
    """
    dtype = query.dtype
    keys, values = c.query_slots
    return launch(
        lambda *refs: _cta(c, *refs),
        (query, key, value, dout, rows, table),
        optional,
        grid=(query.shape[2], table.shape[1], query.shape[0]),
        out_type=jax.ShapeDtypeStruct(query.shape, dtype),
        scratch=[
            tile(dtype, BACKWARD_CONSUMERS, c.parts, ROWS, c.part),
            tile(dtype, BACKWARD_CONSUMERS, c.value_parts, ROWS, c.part),
            plgpu.Barrier(num_arrivals=c.parts + c.value_parts, num_barriers=BACKWARD_CONSUMERS),
            *Ring.scratch(c, keys, dtype),
            *Ring.scratch(c, values, dtype),
            tile(dtype, BACKWARD_CONSUMERS, ROWS, ROWS) if c.interpreted else None,
        ],
        interpret=interpret,
    )


def _cta(c: WideConfig, inputs, optional, dq_ref, q_smem, do_smem, own_ready,
                   k_smem, k_ready, k_free, v_smem, v_ready, v_free, ds_smem):  # fmt: skip
    q_ref, k_ref, v_ref, do_ref, rows_ref, table_ref = inputs
    head, batch, warpgroup = (lax.axis_index(name) for name in ("head", "batch", "warpgroup"))
    loop = BlockLoop(c, table_ref, batch)
    keys, values = Ring(k_smem, k_ready, k_free, c.parts), Ring(v_smem, v_ready, v_free, c.value_parts)

    @pl.when(warpgroup == BACKWARD_CONSUMERS)
    def _produce():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        kv_head = lax.div(head, jnp.int32(c.group))
        begin, steps = loop.begin, loop.steps

        def load(t, _):
            some = pl.ds(begin + t * ROWS, ROWS)
            keys.fill(t, lambda columns: k_ref.at[batch, some, kv_head, columns])
            values.fill(t, lambda columns: v_ref.at[batch, some, kv_head, columns])

        lax.fori_loop(0, steps, load, None)
        keys.drain(steps)
        values.drain(steps)

    @pl.when(warpgroup < BACKWARD_CONSUMERS)
    def _consume():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        row0 = loop.index * (BACKWARD_CONSUMERS * ROWS) + warpgroup * ROWS
        own = pl.ds(row0, ROWS)
        q_own, do_own = q_smem.at[warpgroup], do_smem.at[warpgroup]
        for source, target in ((q_ref, q_own), (do_ref, do_own)):
            for p, columns in enumerate(part_columns(c, source.shape[3])):
                plgpu.copy_gmem_to_smem(source.at[batch, own, head, columns], target.at[p], own_ready.at[warpgroup])

        def by_row(i):
            part = rows_ref.at[batch, head, i, own]
            return plgpu.load(part, *WHOLE, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

        def wide(vector):
            return lax.broadcast_in_dim(vector, (ROWS, ROWS), [0])

        lse, slope = by_row(0), by_row(1)
        plgpu.barrier_wait(own_ready.at[warpgroup])

        def gradient(*accs):
            def step(t, masked):
                def seen():
                    return visible(c, optional, batch, t, row0, loop.begin + t * ROWS, 0)

                def products(s_acc):
                    mask_accumulator(c, s_acc, masked, seen)
                    score(s_acc, q_own, keys, t, lambda: keys.release_last(t, 1))
                    # The registers of dP are taken only here, where those of the last dS are free again.
                    return pl.run_scoped(lambda dp_acc: more_products(s_acc, dp_acc), SCORES)

                def more_products(s_acc, dp_acc):
                    score(dp_acc, do_own, values, t)
                    s = scores(c, s_acc, masked, seen)
                    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=None)
                    for p in range(values.parts):
                        values.release(t, p)
                    where = Tile(c, optional, batch, head, row0, loop.begin + t * ROWS)
                    _, factor = softmax_weights(c, s, wide(lse), masked, where)
                    return score_gradient(c, factor, dp, wide(slope)).astype(q_smem.dtype)

                ds = pl.run_scoped(products, SCORES)
                add(c, accs, ds, lambda p: keys.get(t, p), ds_smem.at[warpgroup] if c.interpreted else None)

            steps = loop.run(step)
            keys.release_last(steps, 0)
            store(c, accs, c.scale * 2.0**-c.weight_exponent, q_own, dq_ref, (batch, own, head))

        pl.run_scoped(gradient, *accumulators(c, c.dim))
