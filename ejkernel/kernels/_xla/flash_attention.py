"""Flash attention in plain XLA: blockwise online softmax with loops that stop where the mask does.

The arrays stay in their layout ``[batch, length, heads, dim]``; only the blocks being multiplied are transposed, so
the temporary memory is a few blocks. Nothing is padded: a last, partial block is loaded shifted back to the array's end
and the overlap is recomputed (forward) or masked (backward).

Dimension names: ``b`` batch tile, ``h`` tile of key heads, ``n`` both together, ``g`` query heads a key head, ``q`` and
``k`` positions. The forward holds logits as ``[n, g*q, k]``, the backward as ``[n, k, g*q]``: so both take products that a
CPU runs at full speed, and the backward transposes once. ``n`` is one axis, which a CPU spreads over its cores best,
unless a step takes every head: then it is two, which the compiler can partition over devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels import dropout
from ejkernel.kernels._xla import visibility
from ejkernel.kernels.varying import vary_over, varying_axes
from ejkernel.ops.core.registry import kernel_registry
from ejkernel.ops.core.support import ALL_FLOATS, Backend, Platform, Support, any_device
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams

# Logits held at once by one step. 4 MiB of float32 leave room for their companions in a CPU's caches.
LOGITS_PER_STEP = 2**20
# The same for an accelerator, which wants wide steps, and for several devices, each of which holds a part.
LOGITS_PER_WIDE_STEP = 2**25
BLOCK = 512
NARROW = 128


def forward(arrays: dict[str, Array], spec: Any, params: Any) -> tuple[Array, Array]:
    """Attention output ``[B, Sq, H, Dv]`` and the log-sum-exp of its logits ``[B, H, Sq]``."""
    query, value = arrays["query"], arrays["value"]
    p = _Problem.make(arrays, spec, params)
    ranges = visibility.key_ranges(*p.intervals, p.segments, p.q_block, p.kv_len)
    plan = visibility.plan_walk(ranges, p.kv_block, p.b, p.always_masked)
    rows = (*p.n, p.g * p.q_block)

    def block_of_queries(index, carry):
        out, lse = carry
        tile, b0, h0, i = p.place(index, p.q_blocks)
        q0 = jnp.minimum(i * p.q_block, p.q_len - p.q_block)
        q = p.queries(query, b0, h0, q0, scaled=True)

        def step(k0, carry, visible=None):
            top, total, acc = carry
            k, v = p.keys(arrays["key"], b0, h0, k0), p.keys(value, b0, h0, k0)
            if visible is not None:
                k, v = p.hide_keys((k, v), visible, b0, q0, k0)
            s = p.shape_logits(_dot(q, k, -1, -1, p.acc), b0, h0, q0, k0, visible)
            new_top = jnp.maximum(top, s.max(-1))
            shift = jnp.where(new_top == -jnp.inf, 0, new_top)
            weights = jnp.exp(s - shift[..., None])
            decay = jnp.exp(top - shift)
            total = total * decay + weights.sum(-1)
            if spec.dropout_prob:
                weights = weights * p.keep(b0, h0, q0, k0).reshape(weights.shape)
            acc = acc * decay[..., None] + _dot(weights.astype(v.dtype), v, -1, -2, p.acc)
            return new_top, total, acc

        def masked_step(k0, first, stop, carry):
            return step(k0, carry, p.visible(b0, h0, q0, k0, columns=(first, stop)))

        top, total = p.sink_state(b0, h0, rows)
        start = (top, total, p.zeros((*rows, p.value_dim)))
        top, total, acc = visibility.walk(plan, tile, i, p.kv_block, p.kv_len, step, masked_step, start)
        block_out = jnp.where(total[..., None] > 0, acc / total[..., None], 0).astype(query.dtype)
        block_lse = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)
        out = _update(out, p.from_rows(block_out), (b0, q0, h0 * p.g, 0))
        lse = _update(lse, block_lse.reshape(p.b, p.h * p.g, p.q_block), (b0, h0 * p.g, q0))
        return out, lse

    batch, heads = query.shape[0], query.shape[2]
    start = (
        p.zeros((batch, p.q_len, heads, p.value_dim), query.dtype),
        p.zeros((batch, heads, p.q_len)),
    )
    return _loop(p.tiles * p.q_blocks, block_of_queries, start)


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
    p = _Problem.make(arrays, spec, params)
    ranges = visibility.query_ranges(*p.intervals, p.segments, p.kv_block, p.kv_len)
    plan = visibility.plan_walk(ranges, p.q_block, p.b, p.always_masked)
    finite_lse = jnp.where(lse == -jnp.inf, 0, lse)
    # d logits = weights * (d weights - slope): what the softmax's normalisation and the lse's cotangent take off.
    slope = _sum_last(out.astype(p.acc) * dout.astype(p.acc)).swapaxes(1, 2) - dlse
    # A row that sees nothing has no gradient, whatever its cotangents are.
    slope = jnp.where(lse == -jnp.inf, 0, slope)

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
            raw = _dot(k, q, -1, -1, p.acc)
            s, cap_slope = p.shape_logits(raw, b0, h0, q0, k0, visible, transposed=True)
            weights = jnp.exp(s - p.row_slice(finite_lse, b0, h0, q0))
            dweights = _dot(v, do, -1, -1, p.acc)
            kept = weights
            if spec.dropout_prob:
                keep = _flip(p.keep(b0, h0, q0, k0)).reshape(weights.shape)
                kept, dweights = weights * keep, dweights * keep
            ds = weights * (dweights - p.row_slice(slope, b0, h0, q0))
            if visible is not None and "softmax_aux" in arrays:
                # With sinks a row that sees nothing still has an lse, so its cotangents are in the slope.
                five = (p.b, p.h, p.kv_block, p.g, p.q_block)
                ds = jnp.where(_flip(visible), ds.reshape(five), 0).reshape(ds.shape)
            if bias is not None:
                dbias = p.add_to_bias(dbias, ds, b0, h0, q0, k0)
            if cap_slope is not None:
                ds = ds * cap_slope
            ds = ds.astype(k.dtype)
            dv = dv + _dot(kept.astype(v.dtype), do, -1, -2, p.acc)
            dk = dk + _dot(ds, q, -1, -2, p.acc)
            # Without the barrier XLA folds the transpose into the product, which a CPU then runs at half speed.
            dq_block = _dot(lax.optimization_barrier(ds.swapaxes(-1, -2)), k, -1, -2, p.acc)
            return _add_block(dq, p.from_rows(dq_block), (b0, q0, h0 * p.g, 0)), dk, dv, dbias

        def masked_step(q0, first, stop, carry):
            columns = (first_column, first_column + p.kv_block)
            return step(q0, carry, p.visible(b0, h0, q0, k0, columns=columns, rows=(first, stop)))

        dq, dk, dv, dbias = carry
        start = (dq, p.zeros(keys.shape), p.zeros(values.shape), dbias)
        dq, dk_block, dv_block, dbias = visibility.walk(plan, tile, j, p.q_block, p.q_len, step, masked_step, start)
        at = (b0, k0, h0, 0)
        return dq, _add_block(dk, p.from_keys(dk_block), at), _add_block(dv, p.from_keys(dv_block), at), dbias

    start = (p.zeros(query.shape), p.zeros(key.shape), p.zeros(value.shape))
    start = (*start, None if bias is None else p.zeros(bias.shape))
    dq, dk, dv, dbias = _loop(p.tiles * p.kv_blocks, block_of_keys, start)
    grads = {
        "query": (dq * spec.softmax_scale).astype(query.dtype),
        "key": (dk if p.prescaled else dk * spec.softmax_scale).astype(key.dtype),
        "value": dv.astype(value.dtype),
    }
    if bias is not None:
        grads["bias"] = dbias.astype(bias.dtype)
    if "softmax_aux" in arrays:
        sinks = arrays["softmax_aux"]
        share = jnp.where(sinks[..., None] == -jnp.inf, 0, jnp.exp(sinks[..., None] - finite_lse))
        dsinks = -(share * slope).sum(-1)
        grads["softmax_aux"] = dsinks if sinks.shape[0] > 1 else dsinks.sum(0, keepdims=True)
    return grads


def heads_per_step(batch: int, kv_heads: int, logits: int, wanted: int | None = None) -> tuple[int, int]:
    """How many batch entries and key heads one step takes, when one of them makes so many logits."""
    budget = wanted or max(1, LOGITS_PER_STEP // logits)
    heads = _largest_divisor(kv_heads, budget)
    return (_largest_divisor(batch, budget // heads) if heads == kv_heads else 1), heads


def _largest_divisor(number: int, at_most: int) -> int:
    return next(d for d in range(max(1, min(number, at_most)), 0, -1) if number % d == 0)


def _dot(a: Array, b: Array, contract_a: int, contract_b: int, dtype) -> Array:
    precision = lax.Precision.HIGHEST if a.dtype.itemsize >= 4 else None
    lead = tuple(range(a.ndim - 2))
    dims = (((a.ndim + contract_a,), (b.ndim + contract_b,)), (lead, lead))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=dtype)


def _sum_last(x: Array) -> Array:
    """A sum over the last, short axis, as a product with ones: XLA's CPU reduction takes 30 times as long (jax 0.10)."""
    return jnp.dot(x, jnp.ones(x.shape[-1], x.dtype), precision=lax.Precision.HIGHEST)


def _any(visible: Array, axes: tuple[int, ...]) -> Array:
    return visible.astype(jnp.float32).max(axes) > 0


def _flip(tile: Array) -> Array:
    """``[b, h, g, q, k]`` to the backward's ``[b, h, k, g, q]``."""
    return jnp.moveaxis(tile, -1, 2)


def _add_block(total: Array, block: Array, at) -> Array:
    return _update(total, _slice(total, at, block.shape) + block.astype(total.dtype), at)


def _slice(array: Array, starts, sizes) -> Array:
    return lax.dynamic_slice(array, [jnp.int32(s) for s in starts], sizes)


def _update(array: Array, block: Array, starts) -> Array:
    return lax.dynamic_update_slice(array, block, [jnp.int32(s) for s in starts])


def _loop(steps: int, body, carry):
    return lax.fori_loop(jnp.int32(0), jnp.int32(steps), body, carry)


@dataclass(frozen=True)
class _Problem:
    """One call's geometry and the loads that depend on it."""

    arrays: dict[str, Array]
    spec: Any
    n: tuple[int, ...]
    b: int
    h: int
    g: int
    q_block: int
    kv_block: int

    @classmethod
    def make(cls, arrays: dict[str, Array], spec: Any, params: Any) -> _Problem:
        batch, q_len, q_heads, _ = arrays["query"].shape
        kv_len, kv_heads = arrays["key"].shape[1:3]
        g = q_heads // kv_heads
        q_block, kv_block = min(params.q_blocksize or BLOCK, q_len), min(params.kv_blocksize or BLOCK, kv_len)
        b, h = heads_per_step(batch, kv_heads, g * q_block * kv_block, params.blocksize_heads)
        n = (b, h) if params.blocksize_heads and (b, h) == (batch, kv_heads) else (b * h,)
        return cls(arrays, spec, n, b, h, g, q_block, kv_block)

    @property
    def q_len(self) -> int:
        return self.arrays["query"].shape[1]

    @property
    def kv_len(self) -> int:
        return self.arrays["key"].shape[1]

    @property
    def value_dim(self) -> int:
        return self.arrays["value"].shape[3]

    @property
    def acc(self):
        """The dtype of logits, statistics and accumulators."""
        return jnp.float64 if self.arrays["query"].dtype == jnp.float64 else jnp.float32

    @property
    def prescaled(self) -> bool:
        """Whether the scale goes into the query block: exact enough in float32, not in half precision."""
        return self.arrays["query"].dtype == self.acc

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.q_block)

    @property
    def kv_blocks(self) -> int:
        return -(-self.kv_len // self.kv_block)

    @property
    def tiles(self) -> int:
        batch, _, heads, _ = self.arrays["key"].shape
        return (batch // self.b) * (heads // self.h)

    @property
    def intervals(self):
        if "kv_start" in self.arrays:
            return self.arrays["kv_start"], self.arrays["kv_stop"]
        return visibility.intervals(self.spec.window, self.q_len, self.kv_len)

    @property
    def segments(self):
        if "q_segment_ids" in self.arrays:
            return self.arrays["q_segment_ids"], self.arrays["kv_segment_ids"]
        return None

    @property
    def always_masked(self) -> bool:
        return "attention_mask" in self.arrays or "bias" in self.arrays

    def place(self, index, blocks: int):
        """Loop index → batch tile, first batch entry, first key head, block."""
        head_tiles = self.arrays["key"].shape[2] // self.h
        tile = index // blocks
        return tile // head_tiles, (tile // head_tiles) * self.b, (tile % head_tiles) * self.h, index % blocks

    def zeros(self, shape, dtype=None) -> Array:
        """Zeros that vary over the mesh axes the inputs vary over, as a loop's carry under ``shard_map`` must."""
        return self.full(shape, 0, dtype)

    def full(self, shape, fill, dtype=None) -> Array:
        return vary_over(jnp.full(shape, fill, dtype or self.acc), varying_axes(self.arrays["query"]))

    def queries(self, array: Array, b0, h0, q0, scaled: bool = False) -> Array:
        """A block of query-like rows, ``[n, g*q, d]``."""
        dim = array.shape[3]
        block = _slice(array, (b0, q0, h0 * self.g, 0), (self.b, self.q_block, self.h * self.g, dim))
        block = block * self.spec.softmax_scale if scaled and self.prescaled else block
        return block.swapaxes(1, 2).reshape(*self.n, self.g * self.q_block, dim)

    def keys(self, array: Array, b0, h0, k0) -> Array:
        """A block of key-like rows, ``[n, k, d]``."""
        dim = array.shape[3]
        block = _slice(array, (b0, k0, h0, 0), (self.b, self.kv_block, self.h, dim))
        return block.swapaxes(1, 2).reshape(*self.n, self.kv_block, dim)

    def from_keys(self, block: Array) -> Array:
        """``[n, k, d]`` back to ``[b, k, h, d]``."""
        return block.reshape(self.b, self.h, self.kv_block, -1).swapaxes(1, 2)

    def from_rows(self, block: Array) -> Array:
        """``[n, g*q, d]`` back to ``[b, q, h*g, d]``."""
        return block.reshape(self.b, self.h * self.g, self.q_block, -1).swapaxes(1, 2)

    def row_slice(self, array: Array, b0, h0, q0) -> Array:
        """Rows of a ``[B, H, Sq]`` array for the backward, ``[n, 1, g*q]``."""
        block = _slice(array, (b0, h0 * self.g, q0), (self.b, self.h * self.g, self.q_block))
        return block.reshape(*self.n, 1, self.g * self.q_block)

    def sink_state(self, b0, h0, rows) -> tuple[Array, Array]:
        """Where the running maximum and the denominator start: at the sink, if there is one."""
        if "softmax_aux" not in self.arrays:
            return self.full(rows, -jnp.inf), self.zeros(rows)
        sinks = self.arrays["softmax_aux"].astype(self.acc)
        block = _slice(
            sinks, (b0 if sinks.shape[0] > 1 else 0, h0 * self.g), (min(self.b, sinks.shape[0]), self.h * self.g)
        )
        top = jnp.repeat(block.reshape(-1, self.h, self.g), self.q_block, axis=-1)
        top = self.zeros(rows) + jnp.broadcast_to(top, (self.b, self.h, rows[-1])).reshape(rows)
        return top, (top > -jnp.inf).astype(self.acc)

    def tile(self, array: Array, b0, h0, q0, k0) -> Array:
        """The part of a ``[B|1, H|1, Sq|1, Sk|1]`` array that a step needs, ``[b|1, h|1, g|1, q|1, k|1]``."""
        starts = (b0, h0 * self.g, q0, k0)
        sizes = (self.b, self.h * self.g, self.q_block, self.kv_block)
        whole = array.shape
        starts = tuple(0 if n == 1 else s for n, s in zip(whole, starts, strict=True))
        sizes = tuple(1 if n == 1 else s for n, s in zip(whole, sizes, strict=True))
        block = _slice(array, starts, sizes)
        heads = (1, 1) if whole[1] == 1 else (self.h, self.g)
        return block.reshape(sizes[0], *heads, *sizes[2:])

    def visible(self, b0, h0, q0, k0, columns, rows=None) -> Array:
        """Which pairs of a masked step count, broadcastable to ``[b, h, g, q, k]``."""
        row = q0 + jnp.arange(self.q_block, dtype=jnp.int32)
        column = k0 + jnp.arange(self.kv_block, dtype=jnp.int32)
        start, stop = (self._rows_of(jnp.asarray(x), b0, q0)[:, None, None, :, None] for x in self.intervals)
        seen = (column >= jnp.maximum(start, columns[0])) & (column < jnp.minimum(stop, columns[1]))
        if rows is not None:
            seen &= ((row >= rows[0]) & (row < rows[1]))[:, None]
        if self.segments is not None:
            q_ids = self._rows_of(self.segments[0], b0, q0)[:, None, None, :, None]
            kv_ids = _slice(self.segments[1], (b0, k0), (self.b, self.kv_block))[:, None, None, None, :]
            seen &= (q_ids == kv_ids) & (q_ids > 0)
        if "attention_mask" in self.arrays:
            seen &= self.tile(self.arrays["attention_mask"], b0, h0, q0, k0)
        if "bias" in self.arrays:
            seen &= self.tile(self.arrays["bias"], b0, h0, q0, k0) > -jnp.inf
        return seen

    def _rows_of(self, array: Array, b0, q0) -> Array:
        shared = array.shape[0] == 1
        return _slice(array, (0 if shared else b0, q0), (1 if shared else self.b, self.q_block))

    def hide_keys(self, blocks: tuple[Array, ...], visible: Array, b0, q0, k0) -> tuple[Array, ...]:
        """Zero the keys that no query of the block sees, so that a NaN in padding meets no weight of 0."""
        if self.only_static:
            start, stop = (jnp.asarray(x)[0] for x in self.intervals)
            column = k0 + jnp.arange(self.kv_block, dtype=jnp.int32)
            seen = (column >= start[q0]) & (column < stop[q0 + self.q_block - 1])
        else:
            seen = _any(visible, (2, 3))
        return self._hide(blocks, jnp.broadcast_to(seen, (self.b, self.h, self.kv_block)))

    def hide_queries(self, blocks: tuple[Array, ...], visible: Array, b0, q0) -> tuple[Array, ...]:
        """Zero the queries that see no key of the block, for the sums over queries in the backward."""
        if self.only_static:
            start, stop = (self._rows_of(jnp.asarray(x), b0, q0) for x in self.intervals)
            seen = start < stop
        else:
            seen = _any(visible, (4,))
        return self._hide(blocks, jnp.broadcast_to(seen, (self.b, self.h, self.g, self.q_block)))

    def _hide(self, blocks: tuple[Array, ...], seen: Array) -> tuple[Array, ...]:
        seen = seen.reshape(*blocks[0].shape[:-1], 1)
        return tuple(jnp.where(seen, block, 0) for block in blocks)

    @property
    def only_static(self) -> bool:
        """Whether causality and the window are all there is: a block's rows then see one run of keys."""
        return "kv_start" not in self.arrays and self.segments is None and not self.always_masked

    def shape_logits(self, s: Array, b0, h0, q0, k0, visible, transposed: bool = False):
        """Scale, cap, bias and mask. In the backward also the slope of the cap, None without one."""
        flip = _flip if transposed else (lambda tile: tile)
        shape, cap, slope = s.shape, self.spec.logits_soft_cap, None
        if not self.prescaled:
            s = s * self.spec.softmax_scale
        if cap is not None:
            bounded = jnp.tanh(s / cap)
            s, slope = cap * bounded, 1 - bounded * bounded
        if visible is not None:
            five = (self.b, self.h, self.kv_block, self.g, self.q_block) if transposed else self._five
            s = s.reshape(five)
            if "bias" in self.arrays:
                s = s + flip(self.tile(self.arrays["bias"], b0, h0, q0, k0)).astype(self.acc)
            s = jnp.where(flip(visible), s, -jnp.inf).reshape(shape)
        return (s, slope) if transposed else s

    @property
    def _five(self) -> tuple[int, ...]:
        return self.b, self.h, self.g, self.q_block, self.kv_block

    def keep(self, b0, h0, q0, k0) -> Array:
        """Dropout's factors ``[b, h, g, q, k]``: 0, or 1 / (1 - p)."""
        batch_key = _slice(self.arrays["dropout_key"], (b0,), (self.b,))[:, None, None, None]
        head = (h0 * self.g + jnp.arange(self.h * self.g, dtype=jnp.int32)).reshape(self.h, self.g, 1)
        row = q0 + jnp.arange(self.q_block, dtype=jnp.int32)
        row_key = dropout.row_keys(batch_key, head, row)[..., None]
        column = k0 + jnp.arange(self.kv_block, dtype=jnp.int32)
        kept = dropout.keep(row_key, column, self.spec.dropout_prob)
        return jnp.where(kept, 1 / (1 - self.spec.dropout_prob), 0).astype(self.acc)

    def add_to_bias(self, dbias: Array, ds: Array, b0, h0, q0, k0) -> Array:
        """Add a step's logit gradients to the bias's, summed over the dimensions that the bias is broadcast along."""
        ds = ds.reshape(self.b, self.h, self.kv_block, self.g, self.q_block)
        batch, heads, q_len, kv_len = (n > 1 for n in self.arrays["bias"].shape)
        keep = (batch, heads, kv_len, heads, q_len)
        block = ds.sum(tuple(axis for axis, kept in enumerate(keep) if not kept), keepdims=True)
        block = jnp.moveaxis(block, 2, -1)
        block = block.reshape(block.shape[0], block.shape[1] * block.shape[2], *block.shape[3:])
        at = tuple(
            s if kept else 0 for s, kept in zip((b0, h0 * self.g, q0, k0), (batch, heads, q_len, kv_len), strict=True)
        )
        return _add_block(dbias, block, at)


class XlaFlashAttention:
    """The implementation for every device."""

    version = 1
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
