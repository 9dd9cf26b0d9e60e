"""The gradient of a bias: a kernel whose CTAs each own a tile of it, 128 queries by 64 keys, for all that share it.

A consumer warpgroup has 64 of the queries and sums the gradients of the tile's logits in registers, over the batch
entries, heads, queries or keys along which the bias is shared, always in the same order. So nothing is added across
CTAs, and no array is larger than the bias, up to a tile of rows or columns where it has one. The price is that scores
and dP are computed once more.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.backward_wide import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    SCORES,
    WideConfig,
    drain,
    launch,
    load_vector,
    mask_accumulator,
    part_columns,
    rem,
    scores,
    softmax_weights,
    tile,
    visible,
)
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.forward_state import divided
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.pairs import Tile, score_gradient
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import BACKWARD_CONSUMERS, ROWS, SHARED_MEMORY

QUERIES = BACKWARD_CONSUMERS * ROWS
# Bytes that barriers take.
RESERVED = 1024


def bias_gradient(
    c: WideConfig, query, key, value, dout, rows, ranges, bias, optional, *, interpret: Any = False
) -> Array:
    """The gradient, in the bias's shape and dtype.

    ``rows``: ``[B, H, 2, blocks · 128]``, the lse in base 2 and the slope; ``ranges``: the keys that each block of 128
    queries sees.
    """
    batch, q_len, heads, _ = query.shape
    whole = batch, heads, -(-q_len // QUERIES), -(-c.kv_len // ROWS)
    own = tuple(size if shared > 1 else 1 for size, shared in zip(whole, bias.shape, strict=True))
    stage = 2 * (QUERIES + ROWS) * (c.dim + c.value_dim)
    stages = max(1, min(2, (SHARED_MEMORY - RESERVED) // stage))
    copies = (BACKWARD_CONSUMERS + 1) * (c.parts + c.value_parts)
    sums = launch(
        lambda inputs, optional, *refs: _cta(c, whole, own, inputs, optional, *refs),
        (query, key, value, dout, rows, _visits(ranges, whole, own)),
        optional,
        grid=(own[1] * own[3], own[2], own[0]),
        out_type=jax.ShapeDtypeStruct((own[0], own[1], own[2] * QUERIES, own[3] * ROWS), _kind(bias)),
        scratch=[
            tile(query.dtype, stages, BACKWARD_CONSUMERS, c.parts, ROWS, c.part),
            tile(query.dtype, stages, BACKWARD_CONSUMERS, c.value_parts, ROWS, c.part),
            tile(query.dtype, stages, c.parts, ROWS, c.part),
            tile(query.dtype, stages, c.value_parts, ROWS, c.part),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=BACKWARD_CONSUMERS, num_barriers=stages),
        ],
        interpret=interpret,
    )
    for axis in (2, 3):
        size = bias.shape[axis]
        sums = sums.sum(axis, keepdims=True) if size == 1 else lax.slice_in_dim(sums, 0, size, axis=axis)
    return sums.astype(bias.dtype)


def _kind(bias: Array) -> Any:
    """Tiles that are summed further are float32, and so is what a kernel does not store."""
    rounded = min(bias.shape[2:]) > 1 and bias.dtype in (jnp.bfloat16, jnp.float16)
    return bias.dtype if rounded else jnp.float32


def _visits(ranges, whole: tuple[int, ...], own: tuple[int, ...]) -> Array:
    """``[own blocks of queries, own blocks of keys, 4]``: the blocks of queries and of keys that a CTA visits for each
    batch entry and head: the first, and how many.
    """
    begin, end = ranges.begin, ranges.end
    xp = np if isinstance(begin, np.ndarray) and isinstance(end, np.ndarray) else jnp
    key0 = np.arange(whole[3], dtype=np.int32) * ROWS
    seen = (begin.min(0)[:, None] < key0 + ROWS) & (end.max(0)[:, None] > key0)
    columns = []
    for axis in (0, 1):
        size = seen.shape[axis]
        place = np.arange(size, dtype=np.int32).reshape((-1, 1) if axis == 0 else (1, -1))
        shared = tuple(other for other in (0, 1) if own[2 + other] == 1)
        first = xp.where(seen, place, size).min(axis=shared, keepdims=True) if shared else xp.where(seen, place, size)
        last = xp.where(seen, place + 1, 0).max(axis=shared, keepdims=True) if shared else xp.where(seen, place + 1, 0)
        count = xp.maximum(last - first, 0)
        columns += [xp.where(count > 0, first, 0), count]
    return jnp.asarray(xp.stack(columns, -1), jnp.int32)


def _cta(c: WideConfig, whole, own, inputs, optional, out_ref, q_smem, do_smem, k_smem, v_smem, ready, free):
    q_ref, k_ref, v_ref, do_ref, rows_ref, visits_ref = inputs
    stages = k_smem.shape[0]
    own_head, own_key = divided(lax.axis_index("head"), own[3])
    own_query, own_batch, warpgroup = (lax.axis_index(name) for name in ("block", "batch", "warpgroup"))
    batches, heads = (whole[i] // own[i] for i in (0, 1))
    query_block, queries, key_block, keys = (visits_ref[own_query, own_key, i] for i in range(4))
    total = batches * heads * queries * keys

    def place(t):
        """Batch entry, head, first query and first key of the ``t``-th visit."""
        t, key = lax.div(t, keys), lax.rem(t, keys)
        t, query = lax.div(t, queries), lax.rem(t, queries)
        batch, head = divided(t, heads)
        query0, key0 = (query_block + query) * QUERIES, (key_block + key) * ROWS
        return own_batch + batch, own_head + head, query0, key0

    @pl.when(warpgroup == BACKWARD_CONSUMERS)
    def _produce():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def load(t, _):
            batch, head, query0, key0 = place(t)
            kv_head = lax.div(head, jnp.int32(c.group))
            slot = rem(t, stages)
            pl.when(t >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
            for source, target in ((k_ref, k_smem), (v_ref, v_smem)):
                for p, columns in enumerate(part_columns(c, source.shape[3])):
                    part = source.at[batch, pl.ds(key0, ROWS), kv_head, columns]
                    plgpu.copy_gmem_to_smem(part, target.at[slot, p], ready.at[slot])
            for i in range(BACKWARD_CONSUMERS):
                for source, target in ((q_ref, q_smem), (do_ref, do_smem)):
                    for p, columns in enumerate(part_columns(c, source.shape[3])):
                        part = source.at[batch, pl.ds(query0 + i * ROWS, ROWS), head, columns]
                        plgpu.copy_gmem_to_smem(part, target.at[slot, i, p], ready.at[slot])

        lax.fori_loop(0, total, load, None)
        drain(total, stages, lambda t: free.at[rem(t, stages)])

    @pl.when(warpgroup < BACKWARD_CONSUMERS)
    def _consume():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")

        def visit(t, sums):
            batch, head, query0, key0 = place(t)
            row0 = query0 + warpgroup * ROWS
            slot = rem(t, stages)
            plgpu.barrier_wait(ready.at[slot])

            def seen():
                return visible(c, optional, batch, t, row0, key0, 0)

            def by_row(i):
                return load_vector(rows_ref.at[batch, head, i, pl.ds(row0, ROWS)], 0)

            def products(s_acc, dp_acc):
                mask_accumulator(c, s_acc, True, seen)
                for p in range(c.parts):
                    plgpu.wgmma(s_acc, q_smem.at[slot, warpgroup, p], k_smem.at[slot, p].transpose((1, 0)))
                for p in range(c.value_parts):
                    plgpu.wgmma(dp_acc, do_smem.at[slot, warpgroup, p], v_smem.at[slot, p].transpose((1, 0)))
                s = scores(c, s_acc, True, seen)
                dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=None)
                plgpu.barrier_arrive(free.at[slot])
                # With a cap the gradient of the bias is that of the capped logits.
                p, _ = softmax_weights(c, s, by_row(0), True, Tile(c, optional, batch, head, row0, key0))
                return score_gradient(c, p, dp, by_row(1))

            return sums + pl.run_scoped(products, SCORES, SCORES)

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, ROWS), jnp.float32), plgpu.Layout.WGMMA)
        sums = lax.fori_loop(0, total, visit, zeros)
        rows = pl.ds(own_query * QUERIES + warpgroup * ROWS, ROWS)
        out_ref.at[own_batch, own_head, rows, pl.ds(own_key * ROWS, ROWS)][...] = sums.astype(out_ref.dtype)
