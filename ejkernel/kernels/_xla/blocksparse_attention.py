"""Block-sparse attention in plain XLA: for each block of queries, a loop over its list of blocks of keys.

The wholly visible blocks come first in a list and need no mask: several are loaded and multiplied at once, what remains of
them one by one, and then the partial ones, each with its mask. A last, partial block is loaded shifted back to the array's
end, and what belongs to its neighbour is masked.

Where heads share a list, a step takes several of them and all query heads of a key head, ``g``; where each has its own, a
step takes one query head. ``n`` is the number of (batch, key head) pairs a step, ``r`` its query rows, ``g * q``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.registry import kernel_registry
from ejkernel.contracts.support import ALL_FLOATS, Backend, Platform, Support, any_device
from ejkernel.kernels._xla import online_softmax
from ejkernel.kernels._xla.primitives import add_block, dot, load, loop, store
from ejkernel.kernels._xla.tiles import (
    LOGITS_PER_WIDE_STEP,
    HeadTiles,
    any_visible,
    effective_heads,
    head_axes,
    heads_per_step,
)
from ejkernel.kernels.common.intervals import intervals
from ejkernel.kernels.common.softmax import sink_gradient

# Keys loaded at once where the blocks are smaller: larger products run faster, smaller ones mask fewer.
KEYS_PER_STEP = 256

READ = ("kv_blocksize", "blocksize_heads")


@dataclass(frozen=True)
class _Tile:
    """Where a step works: batch entries from ``b0`` on, key heads from ``h0``, query heads from ``q_head``, rows from ``q0``.

    ``first_row`` is where the block's own rows begin: after ``q0`` if the block is loaded shifted back.
    """

    b0: Any
    h0: Any
    q_head: Any
    q0: Any
    first_row: Any

    @property
    def rows(self) -> tuple[Any, Any, Any]:
        """Where its rows begin: batch entry, query head, position."""
        return self.b0, self.q_head, self.q0


@dataclass(frozen=True)
class ListedTiles(HeadTiles):
    """One call's geometry and the loads that depend on it; ``together`` blocks of keys are multiplied at once."""

    together: int

    @classmethod
    def make(cls, arrays: dict[str, Any], spec: Any, params: Any) -> ListedTiles:
        batch, _, q_heads, _ = arrays["query"].shape
        kv_heads = arrays["key"].shape[2]
        q_block, kv_block = spec.grid.sizes
        own_batch = any(x.shape[0] > 1 for x in arrays["blocks"])
        own_heads = arrays["blocks"].start.shape[1] > 1
        room = arrays["blocks"].index.shape[1]
        together = min(max(1, (params.kv_blocksize or KEYS_PER_STEP) // kv_block), room)
        g = 1 if own_heads else q_heads // kv_heads
        b, h = heads_per_step(
            batch, 1 if own_heads else kv_heads, g * q_block * kv_block * together, params.blocksize_heads
        )
        b, h = (1 if own_batch else b), (1 if own_heads else h)
        n = head_axes(b, h, batch, kv_heads, params.blocksize_heads)
        return cls(arrays, spec, n, b, h, g, q_block, kv_block, together)

    @property
    def own_heads(self) -> bool:
        """Whether each query head has its own lists."""
        return self.arrays["blocks"].start.shape[1] > 1

    @property
    def steps(self) -> int:
        """Of the outer loop: tiles of batch and heads, times blocks of queries."""
        batch, _, q_heads, _ = self.arrays["query"].shape
        return (batch // self.b) * (q_heads // (self.h * self.g)) * self.q_blocks

    def place(self, index) -> tuple[_Tile, tuple]:
        """A step of the outer loop → where it works and its list: start, full, count."""
        q_heads = self.arrays["query"].shape[2]
        tiles = q_heads // (self.h * self.g)
        i, tile = index % self.q_blocks, index // self.q_blocks
        b0, head_tile = (tile // tiles) * self.b, tile % tiles
        q_head = head_tile * self.h * self.g
        h0 = q_head // (q_heads // self.arrays["key"].shape[2])
        lists, head = self.arrays["blocks"], q_head if self.own_heads else 0
        first_row = i * self.q_block
        tile = _Tile(b0, h0, q_head, jnp.minimum(first_row, self.q_len - self.q_block), first_row)
        # Of a vmapped mask the counts may differ from one batch entry to the next where the starts do not.
        return tile, tuple(x[b0 if x.shape[0] > 1 else 0, head, i] for x in (lists.start, lists.full, lists.count))

    def starts(self, listed: Array) -> Array:
        """Where each block of keys is loaded."""
        return jnp.minimum(listed * self.kv_block, self.kv_len - self.kv_block)

    def keys(self, array: Array, tile: _Tile, starts: Array) -> Array:
        """Blocks of key-like rows one after the other, ``[n, k, d]``."""
        size = (self.b, self.kv_block, self.h, array.shape[3])
        blocks = [load(array, (tile.b0, k0, tile.h0, 0), size) for k0 in starts]
        block = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)
        return block.swapaxes(1, 2).reshape(*self.n, -1, array.shape[3])

    def add_keys(self, totals: tuple, parts: tuple, tile: _Tile, starts: Array) -> tuple:
        """Add the rows of each ``[n, k, d]`` to where they came from."""
        together = len(starts)
        parts = [x.reshape(self.b, self.h, together, self.kv_block, -1) for x in parts]

        # A loop, for a chain of updates of one array is copied between them.
        def add(t, totals):
            blocks = (lax.dynamic_index_in_dim(x, t, 2, keepdims=False).swapaxes(1, 2) for x in parts)
            at = (tile.b0, starts[t], tile.h0, 0)
            return tuple(add_block(total, block, at) for total, block in zip(totals, blocks, strict=True))

        return loop(together, add, totals)

    def visible(self, tile: _Tile, listed: Array) -> Array:
        """Which pairs of a step with one block of keys count, ``[b|1, q, k]``."""
        (k0,) = self.starts(listed)
        column = k0 + jnp.arange(self.kv_block, dtype=jnp.int32)
        seen = (column >= listed * self.kv_block)[None, None, :]
        row = tile.q0 + jnp.arange(self.q_block, dtype=jnp.int32)
        if self.spec.window != (None, None):
            start, stop = (
                jnp.asarray(x)[0][row][:, None] for x in intervals(self.spec.window, self.q_len, self.kv_len)
            )
            seen = seen & ((column >= start) & (column < stop))[None]
        if "kv_start" in self.arrays:
            start, stop = (self.row_ends(self.arrays[name], tile) for name in ("kv_start", "kv_stop"))
            seen = seen & (column >= start) & (column < stop)
        if self.q_len % self.q_block:
            seen = seen & (row >= tile.first_row)[None, :, None]
        if "q_segment_ids" in self.arrays:
            q_ids = load(self.arrays["q_segment_ids"], (tile.b0, tile.q0), (self.b, self.q_block))[:, :, None]
            kv_ids = load(self.arrays["kv_segment_ids"], (tile.b0, k0), (self.b, self.kv_block))[:, None, :]
            seen = seen & (q_ids == kv_ids) & (q_ids > 0)
        return jnp.broadcast_to(seen, (seen.shape[0], self.q_block, column.shape[0]))

    def row_ends(self, ends: Array, tile: _Tile) -> Array:
        """Of intervals, ``[b|1, q, 1]``."""
        own = ends.shape[0] > 1
        return load(ends, (tile.b0 if own else 0, tile.q0), (self.b if own else 1, self.q_block))[:, :, None]

    def hide(self, array: Array, seen: Array, repeats: int) -> Array:
        """Zero the rows of ``[n, ...]`` that nothing sees, so that a NaN there meets no weight of 0."""
        seen = jnp.broadcast_to(seen[:, None, None], (self.b, self.h, repeats, seen.shape[-1]))
        return jnp.where(seen.reshape(*array.shape[:-1], 1), array, 0)

    def shape_logits(self, s: Array, visible: Array | None, transposed: bool = False):
        """Scale, cap and mask. In the backward also the slope of the cap, None without one."""
        s, slope = self.scale_and_cap(s)
        if visible is not None:
            s = jnp.where(self.spread(visible, s.shape, transposed), s, -jnp.inf)
        return (s, slope) if transposed else s

    def spread(self, visible: Array, shape: tuple[int, ...], transposed: bool) -> Array:
        """``[b|1, q, k]`` over a step's logits, ``[n, r, k]`` or ``[n, k, r]``."""
        keys = visible.shape[-1]
        if transposed:
            seen = visible.swapaxes(1, 2)[:, None, :, None, :]
            wide = (self.b, self.h, keys, self.g, self.q_block)
        else:
            seen = visible[:, None, None]
            wide = (self.b, self.h, self.g, self.q_block, keys)
        return jnp.broadcast_to(seen, wide).reshape(shape)

    def walk(self, tile: _Tile, lists: tuple, step, carry):
        """Run the steps of one block of queries: full blocks together, the rest of them alone, then the partial ones."""
        start, full, count = lists
        index = self.arrays["blocks"].index
        entry = tile.b0 if index.shape[0] > 1 else 0

        def listed(first, blocks):
            return load(index, (entry, start + first), (1, blocks))[0]

        def unmasked(blocks, begin):
            return lambda t, carry: step(listed(begin + t * blocks, blocks), carry)

        def masked(t, carry):
            blocks = listed(t, 1)
            return step(blocks, carry, self.visible(tile, blocks))

        # A block that is loaded shifted back has rows that are not its own.
        full = jnp.where(tile.q0 == tile.first_row, full, 0)
        if "q_segment_ids" in self.arrays:
            full = jnp.zeros_like(full)
        elif self.together > 1:
            wide = full // self.together
            carry = lax.fori_loop(jnp.int32(0), wide, unmasked(self.together, 0), carry)
            done = wide * self.together
            carry = lax.fori_loop(jnp.int32(0), full - done, unmasked(1, done), carry)
        else:
            carry = lax.fori_loop(jnp.int32(0), full, unmasked(1, 0), carry)
        return lax.fori_loop(full, count, masked, carry)


def forward(arrays: dict[str, Any], spec: Any, params: Any) -> tuple[Array, Array]:
    """Attention output ``[B, Sq, H, Dv]`` and the log-sum-exp of its logits ``[B, H, Sq]``."""
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    p = ListedTiles.make(arrays, spec, params)

    def block_of_queries(index, carry):
        out, lse = carry
        tile, lists = p.place(index)
        q = p.queries(query, *tile.rows, scaled=True)

        def step(listed, carry, visible=None):
            starts = p.starts(listed)
            k, v = p.keys(key, tile, starts), p.keys(value, tile, starts)
            if visible is not None:
                seen = any_visible(visible, 1)
                k, v = p.hide(k, seen, 1), p.hide(v, seen, 1)
            s = p.shape_logits(dot(q, k, -1, -1, p.acc), visible)
            return online_softmax.update(carry, s, lambda weights: dot(weights.astype(v.dtype), v, -1, -2, p.acc))

        start = (*p.sink_state(tile.b0, tile.q_head), p.zeros((*p.rows, p.value_dim)))
        top, total, acc = p.walk(tile, lists, step, start)
        block_out = p.from_rows(online_softmax.output(total, acc, total[..., None] == 0).astype(query.dtype))
        block_lse = online_softmax.log_sum_exp(top, total).reshape(p.b, p.h * p.g, p.q_block)
        out_at, lse_at = (tile.b0, tile.q0, tile.q_head, 0), (tile.b0, tile.q_head, tile.q0)
        if p.q_len % p.q_block:
            own = tile.q0 + jnp.arange(p.q_block, dtype=jnp.int32) >= tile.first_row
            block_out = jnp.where(own[None, :, None, None], block_out, load(out, out_at, block_out.shape))
            block_lse = jnp.where(own, block_lse, load(lse, lse_at, block_lse.shape))
        return store(out, block_out, out_at), store(lse, block_lse, lse_at)

    batch, q_len, heads, _ = query.shape
    start = (p.zeros((batch, q_len, heads, p.value_dim), query.dtype), p.zeros((batch, heads, q_len)))
    return loop(p.steps, block_of_queries, start)


def backward(
    arrays: dict[str, Any], spec: Any, params: Any, out: Array, lse: Array, dout: Array, dlse: Array
) -> dict[str, Array]:
    """Gradients of the differentiable arrays, from the residuals ``(out, lse)``."""
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    p = ListedTiles.make(arrays, spec, params)
    finite_lse, slope = online_softmax.backward_statistics(out, lse, dout, dlse)

    def block_of_queries(index, carry):
        dq, dk, dv = carry
        tile, lists = p.place(index)
        queries, douts = p.queries(query, *tile.rows, scaled=True), p.queries(dout, *tile.rows)
        row_lse, row_slope = p.row_values(finite_lse, *tile.rows), p.row_values(slope, *tile.rows)

        def step(listed, carry, visible=None):
            dq_block, dk, dv = carry
            starts = p.starts(listed)
            q, do = queries, douts
            k, v = p.keys(key, tile, starts), p.keys(value, tile, starts)
            if visible is not None:
                seen, seeing = any_visible(visible, 1), any_visible(visible, 2)
                k, v = p.hide(k, seen, 1), p.hide(v, seen, 1)
                q, do = p.hide(q, seeing, p.g), p.hide(do, seeing, p.g)
            s, cap_slope = p.shape_logits(dot(k, q, -1, -1, p.acc), visible, transposed=True)
            weights = jnp.exp(s - row_lse)
            ds = weights * (dot(v, do, -1, -1, p.acc) - row_slope)
            if visible is not None and "softmax_aux" in arrays:
                # With sinks a row that sees nothing still has an lse, so its cotangents are in the slope.
                ds = jnp.where(p.spread(visible, ds.shape, transposed=True), ds, 0)
            if cap_slope is not None:
                ds = ds * cap_slope
            ds = ds.astype(k.dtype)
            parts = (dot(ds, q, -1, -2, p.acc), dot(weights.astype(v.dtype), do, -1, -2, p.acc))
            dk, dv = p.add_keys((dk, dv), parts, tile, starts)
            # Without the barrier XLA folds the transpose into the product, which a CPU then runs at half speed.
            dq_block = dq_block + dot(lax.optimization_barrier(ds.swapaxes(-1, -2)), k, -1, -2, p.acc)
            return dq_block, dk, dv

        dq_block, dk, dv = p.walk(tile, lists, step, (p.zeros(queries.shape), dk, dv))
        return add_block(dq, p.from_rows(dq_block), (tile.b0, tile.q0, tile.q_head, 0)), dk, dv

    dq, dk, dv = loop(p.steps, block_of_queries, tuple(p.zeros(x.shape) for x in (query, key, value)))
    grads = {
        "query": (dq * spec.softmax_scale).astype(query.dtype),
        "key": (dk if p.prescaled else dk * spec.softmax_scale).astype(key.dtype),
        "value": dv.astype(value.dtype),
    }
    if "softmax_aux" in arrays:
        grads["softmax_aux"] = sink_gradient(arrays["softmax_aux"], finite_lse, slope)
    return grads


class XlaBlockSparseAttention:
    """The implementation for every device."""

    name = "blocksparse-xla"
    version = 1
    reads: ClassVar = {"forward": READ, "backward": READ}
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Blocks a step where nothing was tuned."""
        batch, _, q_heads, _ = shapes["query"].shape
        keys = max(KEYS_PER_STEP, spec.grid.sizes[1])
        # On a CPU one head's logits stay in the cache of its core.
        heads = 1
        if device.kind != "cpu" or device.shared_by > 1:
            logits = q_heads * spec.grid.sizes[0] * keys
            heads = max(1, min(batch * shapes["key"].shape[2], LOGITS_PER_WIDE_STEP * shapes["key"].shape[2] // logits))
        cls = FwdParams if direction == "forward" else BwdParams
        return cls(kv_blocksize=keys, blocksize_heads=heads)

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
        """Keys a step worth trying."""
        cls = FwdParams if direction == "forward" else BwdParams
        heads = XlaBlockSparseAttention.defaults(shapes, spec, device, direction).blocksize_heads
        return [cls(kv_blocksize=keys, blocksize_heads=heads) for keys in (128, 256, 512)]

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The parameters as the kernel uses them."""
        p = ListedTiles.make(shapes, spec, params)
        heads = effective_heads(p.b, p.h, params.blocksize_heads)
        return type(params)(kv_blocksize=p.together * p.kv_block, blocksize_heads=heads)


kernel_registry.register(
    "blocksparse_attention",
    Platform.XLA,
    Backend.ANY,
    support=Support(
        devices=any_device(),
        dtypes=ALL_FLOATS,
        features={
            "causal",
            "window",
            "traced_window",
            "soft_cap",
            "segments",
            "sinks",
            "gqa",
            "value_dim",
            "cross",
            "head_masks",
            "uneven_blocks",
            "lse",
        },
        gradients={"query", "key", "value", "softmax_aux"},
    ),
)(XlaBlockSparseAttention)
