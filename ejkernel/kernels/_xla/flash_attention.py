"""Flash attention in plain XLA: blockwise online softmax with loops that stop where the mask does.

The arrays stay in their layout ``[batch, length, heads, dim]``; only the blocks being multiplied are transposed, so
the temporary memory is a few blocks. Nothing is padded: a last, partial block is loaded shifted back to the array's end
and the overlap is recomputed (forward) or masked (backward).

With the dimension names of ``tiles.py``, the forward holds logits as ``[n, g*q, k]``, the backward as ``[n, k, g*q]``: so
both take products that a CPU runs at full speed, and the backward transposes once.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.registry import kernel_registry
from ejkernel.contracts.support import ALL_FLOATS, Backend, Platform, Support, any_device
from ejkernel.kernels._xla import online_softmax
from ejkernel.kernels._xla.flash_tiles import BLOCK, FlashTiles, flip
from ejkernel.kernels._xla.primitives import add_block, dot, loop, store
from ejkernel.kernels._xla.tiles import LOGITS_PER_WIDE_STEP, effective_heads
from ejkernel.kernels.common import visibility
from ejkernel.kernels.common.softmax import sink_gradient

# Queries (backward: keys) beside a whole window of keys (queries).
NARROW = 128

READ = ("q_blocksize", "kv_blocksize", "blocksize_heads")


def forward(arrays: dict[str, Array], spec: Any, params: Any) -> tuple[Array, Array]:
    """Attention output ``[B, Sq, H, Dv]`` and the log-sum-exp of its logits ``[B, H, Sq]``."""
    query, value = arrays["query"], arrays["value"]
    p = FlashTiles.make(arrays, spec, params)
    ranges = visibility.key_ranges(*p.intervals, p.segments, p.q_block, p.kv_len)
    plan = visibility.plan_walk(ranges, p.kv_block, p.b, p.always_masked)

    def block_of_queries(index, carry):
        out, lse = carry
        tile, b0, h0, i = p.place(index, p.q_blocks)
        q0 = jnp.minimum(i * p.q_block, p.q_len - p.q_block)
        q = p.queries(query, b0, h0, q0, scaled=True)

        def step(k0, carry, visible=None):
            k, v = p.keys(arrays["key"], b0, h0, k0), p.keys(value, b0, h0, k0)
            if visible is not None:
                k, v = p.hide_keys((k, v), visible, b0, q0, k0)
            s = p.shape_logits(dot(q, k, -1, -1, p.acc), b0, h0, q0, k0, visible)

            def drop(weights):
                return weights * p.keep(b0, h0, q0, k0).reshape(weights.shape)

            def mix(weights):
                return dot(weights.astype(v.dtype), v, -1, -2, p.acc)

            return online_softmax.update(carry, s, mix, drop if spec.dropout_prob else None)

        def masked_step(k0, first, stop, carry):
            return step(k0, carry, p.visible(b0, h0, q0, k0, columns=(first, stop)))

        start = (*p.sink_state(b0, h0), p.zeros((*p.rows, p.value_dim)))
        top, total, acc = visibility.walk(plan, tile, i, p.kv_block, p.kv_len, step, masked_step, start)
        block_out = online_softmax.output(total, acc, total[..., None] == 0).astype(query.dtype)
        block_lse = online_softmax.log_sum_exp(top, total)
        out = store(out, p.from_rows(block_out), (b0, q0, h0 * p.g, 0))
        lse = store(lse, block_lse.reshape(p.b, p.h * p.g, p.q_block), (b0, h0 * p.g, q0))
        return out, lse

    batch, heads = query.shape[0], query.shape[2]
    start = (
        p.zeros((batch, p.q_len, heads, p.value_dim), query.dtype),
        p.zeros((batch, heads, p.q_len)),
    )
    return loop(p.tiles * p.q_blocks, block_of_queries, start)


def backward(
    arrays: dict[str, Array],
    spec: Any,
    params: Any,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
    wanted: frozenset[str],
) -> dict[str, Array]:
    """Gradients of the differentiable arrays, from the residuals ``(out, lse)``; the bias's only if it is wanted."""
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    bias = arrays["bias"] if "bias" in wanted else None
    p = FlashTiles.make(arrays, spec, params)
    ranges = visibility.query_ranges(*p.intervals, p.segments, p.kv_block, p.kv_len)
    plan = visibility.plan_walk(ranges, p.q_block, p.b, p.always_masked)
    finite_lse, slope = online_softmax.backward_statistics(out, lse, dout, dlse)

    def block_of_keys(index, carry):
        tile, b0, h0, j = p.place(index, p.kv_blocks)
        first_column = j * p.kv_block
        k0 = jnp.minimum(first_column, p.kv_len - p.kv_block)
        keys, values = p.keys(key, b0, h0, k0), p.keys(value, b0, h0, k0)

        def step(q0, carry, visible=None):
            dq, dk, dv, dbias = carry
            k, v = keys, values
            q, do = p.queries(query, b0, h0, q0, scaled=True), p.queries(dout, b0, h0, q0)
            if visible is not None:
                k, v = p.hide_keys((k, v), visible, b0, q0, k0)
                q, do = p.hide_queries((q, do), visible, b0, q0)
            raw = dot(k, q, -1, -1, p.acc)
            s, cap_slope = p.shape_logits(raw, b0, h0, q0, k0, visible, transposed=True)
            weights = jnp.exp(s - p.row_values(finite_lse, b0, h0, q0))
            dweights = dot(v, do, -1, -1, p.acc)
            kept = weights
            if spec.dropout_prob:
                keep = flip(p.keep(b0, h0, q0, k0)).reshape(weights.shape)
                kept, dweights = weights * keep, dweights * keep
            ds = weights * (dweights - p.row_values(slope, b0, h0, q0))
            if visible is not None and "softmax_aux" in arrays:
                # With sinks a row that sees nothing still has an lse, so its cotangents are in the slope.
                ds = jnp.where(flip(visible), ds.reshape(p.five_flipped), 0).reshape(ds.shape)
            if bias is not None:
                dbias = p.add_to_bias(dbias, ds, b0, h0, q0, k0)
            if cap_slope is not None:
                ds = ds * cap_slope
            ds = ds.astype(k.dtype)
            dv = dv + dot(kept.astype(v.dtype), do, -1, -2, p.acc)
            dk = dk + dot(ds, q, -1, -2, p.acc)
            # Without the barrier XLA folds the transpose into the product, which a CPU then runs at half speed.
            dq_block = dot(lax.optimization_barrier(ds.swapaxes(-1, -2)), k, -1, -2, p.acc)
            return add_block(dq, p.from_rows(dq_block), (b0, q0, h0 * p.g, 0)), dk, dv, dbias

        def masked_step(q0, first, stop, carry):
            columns = (first_column, first_column + p.kv_block)
            return step(q0, carry, p.visible(b0, h0, q0, k0, columns=columns, rows=(first, stop)))

        dq, dk, dv, dbias = carry
        start = (dq, p.zeros(keys.shape), p.zeros(values.shape), dbias)
        dq, dk_block, dv_block, dbias = visibility.walk(plan, tile, j, p.q_block, p.q_len, step, masked_step, start)
        at = (b0, k0, h0, 0)
        return dq, add_block(dk, p.from_keys(dk_block), at), add_block(dv, p.from_keys(dv_block), at), dbias

    start = (p.zeros(query.shape), p.zeros(key.shape), p.zeros(value.shape))
    start = (*start, None if bias is None else p.zeros(bias.shape))
    dq, dk, dv, dbias = loop(p.tiles * p.kv_blocks, block_of_keys, start)
    grads = {
        "query": (dq * spec.softmax_scale).astype(query.dtype),
        "key": (dk if p.prescaled else dk * spec.softmax_scale).astype(key.dtype),
        "value": dv.astype(value.dtype),
    }
    if bias is not None:
        grads["bias"] = dbias.astype(bias.dtype)
    if "softmax_aux" in arrays:
        grads["softmax_aux"] = sink_gradient(arrays["softmax_aux"], finite_lse, slope)
    return grads


class XlaFlashAttention:
    """The implementation for every device."""

    name = "flash-xla"
    version = 1
    reads: ClassVar = {"forward": READ, "backward": READ}
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Blocks where nothing was tuned.

        A narrow window is covered by one step: a few queries beside all the keys they see (backward: the reverse).
        """
        q_len, q_heads = shapes["query"].shape[1:3]
        kv_len, kv_heads = shapes["key"].shape[1:3]
        left, right = spec.window
        if left is not None and right is not None and left + right < 2 * BLOCK and "kv_start" not in shapes:
            wide = -(-(left + right + NARROW) // 64) * 64
            q, kv = (NARROW, wide) if direction == "forward" else (wide, NARROW)
        else:
            q, kv = max(64, BLOCK * kv_heads // q_heads), BLOCK
        # Arrays may be spread over several devices by batch or head: then a step takes all of them, and no device waits
        # for slices of another's.
        heads, everything = None, shapes["key"].shape[0] * kv_heads
        if device.shared_by > 1:
            heads = everything
            while q * kv * q_heads * shapes["key"].shape[0] > LOGITS_PER_WIDE_STEP and min(q, kv) > NARROW:
                q, kv = q // 2, kv // 2
        elif device.kind != "cpu":
            heads = max(1, min(everything, LOGITS_PER_WIDE_STEP * kv_heads // (q_heads * q * kv)))
        cls = FwdParams if direction == "forward" else BwdParams
        return cls(q_blocksize=_even(q, q_len), kv_blocksize=_even(kv, kv_len), blocksize_heads=heads)

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
        """Blocks worth trying."""
        cls = FwdParams if direction == "forward" else BwdParams
        q_len, kv_len = shapes["query"].shape[1], shapes["key"].shape[1]
        heads = XlaFlashAttention.defaults(shapes, spec, device, direction).blocksize_heads
        sizes = ((128, 256, 512), (256, 512, 1024)) if device.kind == "cpu" else ((512, 1024, 2048), (512, 1024, 2048))
        tried = [(_even(q, q_len), _even(kv, kv_len)) for q in sizes[0] for kv in sizes[1]]
        return [cls(q_blocksize=q, kv_blocksize=kv, blocksize_heads=heads) for q, kv in tried]

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The parameters as the kernel uses them."""
        p = FlashTiles.make(shapes, spec, params)
        heads = effective_heads(p.b, p.h, params.blocksize_heads)
        return type(params)(q_blocksize=p.q_block, kv_blocksize=p.kv_block, blocksize_heads=heads)


def _even(block: int, length: int) -> int:
    """A block no larger than asked that divides the length into nearly equal parts."""
    count = math.ceil(length / block)
    return min(length, -(-math.ceil(length / count) // 16) * 16)


kernel_registry.register(
    "flash_attention",
    Platform.XLA,
    Backend.ANY,
    support=Support(
        devices=any_device(),
        dtypes=ALL_FLOATS,
        features={
            "causal",
            "window",
            "soft_cap",
            "bias",
            "mask",
            "segments",
            "varlen",
            "sinks",
            "dropout",
            "gqa",
            "value_dim",
            "cross",
            "lse",
        },
        gradients={"query", "key", "value", "bias", "softmax_aux"},
    ),
)(XlaFlashAttention)
