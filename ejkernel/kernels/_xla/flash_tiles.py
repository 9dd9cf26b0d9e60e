"""The geometry of one call of flash attention in XLA, and the loads that depend on it; dimension names as in ``tiles.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._xla.primitives import add_block, load
from ejkernel.kernels._xla.tiles import HeadTiles, any_visible, head_axes, heads_per_step
from ejkernel.kernels.common import dropout
from ejkernel.kernels.common.intervals import intervals

BLOCK = 512


@dataclass(frozen=True)
class FlashTiles(HeadTiles):
    """One call's geometry and the loads that depend on it."""

    @classmethod
    def make(cls, arrays: dict[str, Any], spec: Any, params: Any) -> FlashTiles:
        batch, q_len, q_heads, _ = arrays["query"].shape
        kv_len, kv_heads = arrays["key"].shape[1:3]
        g = q_heads // kv_heads
        q_block, kv_block = min(params.q_blocksize or BLOCK, q_len), min(params.kv_blocksize or BLOCK, kv_len)
        b, h = heads_per_step(batch, kv_heads, g * q_block * kv_block, params.blocksize_heads)
        n = head_axes(b, h, batch, kv_heads, params.blocksize_heads)
        return cls(arrays, spec, n, b, h, g, q_block, kv_block)

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
        return intervals(self.spec.window, self.q_len, self.kv_len)

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

    def query_head(self, head):
        """Steps are counted in key heads."""
        return head * self.g

    def keys(self, array: Array, b0, h0, k0) -> Array:
        """A block of key-like rows, ``[n, k, d]``."""
        dim = array.shape[3]
        block = load(array, (b0, k0, h0, 0), (self.b, self.kv_block, self.h, dim))
        return block.swapaxes(1, 2).reshape(*self.n, self.kv_block, dim)

    def from_keys(self, block: Array) -> Array:
        """``[n, k, d]`` back to ``[b, k, h, d]``."""
        return block.reshape(self.b, self.h, self.kv_block, -1).swapaxes(1, 2)

    def tile(self, array: Array, b0, h0, q0, k0) -> Array:
        """The part of a ``[B|1, H|1, Sq|1, Sk|1]`` array that a step needs, ``[b|1, h|1, g|1, q|1, k|1]``."""
        starts = (b0, h0 * self.g, q0, k0)
        sizes = (self.b, self.h * self.g, self.q_block, self.kv_block)
        whole = array.shape
        starts = tuple(0 if n == 1 else s for n, s in zip(whole, starts, strict=True))
        sizes = tuple(1 if n == 1 else s for n, s in zip(whole, sizes, strict=True))
        block = load(array, starts, sizes)
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
            kv_ids = load(self.segments[1], (b0, k0), (self.b, self.kv_block))[:, None, None, None, :]
            seen &= (q_ids == kv_ids) & (q_ids > 0)
        if "attention_mask" in self.arrays:
            seen &= self.tile(self.arrays["attention_mask"], b0, h0, q0, k0)
        if "bias" in self.arrays:
            seen &= self.tile(self.arrays["bias"], b0, h0, q0, k0) > -jnp.inf
        return seen

    def _rows_of(self, array: Array, b0, q0) -> Array:
        shared = array.shape[0] == 1
        return load(array, (0 if shared else b0, q0), (1 if shared else self.b, self.q_block))

    def hide_keys(self, blocks: tuple[Array, ...], visible: Array, b0, q0, k0) -> tuple[Array, ...]:
        """Zero the keys that no query of the block sees, so that a NaN in padding meets no weight of 0."""
        if self.only_static:
            start, stop = (jnp.asarray(x)[0] for x in self.intervals)
            column = k0 + jnp.arange(self.kv_block, dtype=jnp.int32)
            seen = (column >= start[q0]) & (column < stop[q0 + self.q_block - 1])
        else:
            seen = any_visible(visible, (2, 3))
        return self._hide(blocks, jnp.broadcast_to(seen, (self.b, self.h, self.kv_block)))

    def hide_queries(self, blocks: tuple[Array, ...], visible: Array, b0, q0) -> tuple[Array, ...]:
        """Zero the queries that see no key of the block, for the sums over queries in the backward."""
        if self.only_static:
            start, stop = (self._rows_of(jnp.asarray(x), b0, q0) for x in self.intervals)
            seen = start < stop
        else:
            seen = any_visible(visible, (4,))
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
        flip_tile = flip if transposed else (lambda tile: tile)
        shape = s.shape
        s, slope = self.scale_and_cap(s)
        if visible is not None:
            s = s.reshape(self.five_flipped if transposed else self.five)
            if "bias" in self.arrays:
                s = s + flip_tile(self.tile(self.arrays["bias"], b0, h0, q0, k0)).astype(self.acc)
            s = jnp.where(flip_tile(visible), s, -jnp.inf).reshape(shape)
        return (s, slope) if transposed else s

    @property
    def five(self) -> tuple[int, ...]:
        """The axes of a step's logits, all apart."""
        return self.b, self.h, self.g, self.q_block, self.kv_block

    @property
    def five_flipped(self) -> tuple[int, ...]:
        """The same in the backward."""
        return self.b, self.h, self.kv_block, self.g, self.q_block

    def keep(self, b0, h0, q0, k0) -> Array:
        """Dropout's factors ``[b, h, g, q, k]``: 0, or 1 / (1 - p)."""
        batch_key = load(self.arrays["dropout_key"], (b0,), (self.b,))[:, None, None, None]
        head = (h0 * self.g + jnp.arange(self.h * self.g, dtype=jnp.int32)).reshape(self.h, self.g, 1)
        row = q0 + jnp.arange(self.q_block, dtype=jnp.int32)
        row_key = dropout.row_keys(batch_key, head, row)[..., None]
        column = k0 + jnp.arange(self.kv_block, dtype=jnp.int32)
        kept = dropout.keep(row_key, column, self.spec.dropout_prob)
        return jnp.where(kept, 1 / (1 - self.spec.dropout_prob), 0).astype(self.acc)

    def add_to_bias(self, dbias: Array, ds: Array, b0, h0, q0, k0) -> Array:
        """Add a step's logit gradients to the bias's, summed over the dimensions that the bias is broadcast along."""
        ds = ds.reshape(self.five_flipped)
        batch, heads, q_len, kv_len = (n > 1 for n in self.arrays["bias"].shape)
        keep = (batch, heads, kv_len, heads, q_len)
        block = ds.sum(tuple(axis for axis, kept in enumerate(keep) if not kept), keepdims=True)
        block = jnp.moveaxis(block, 2, -1)
        block = block.reshape(block.shape[0], block.shape[1] * block.shape[2], *block.shape[3:])
        at = tuple(
            s if kept else 0 for s, kept in zip((b0, h0 * self.g, q0, k0), (batch, heads, q_len, kv_len), strict=True)
        )
        return add_block(dbias, block, at)


def flip(tile: Array) -> Array:
    """``[b, h, g, q, k]`` to the backward's ``[b, h, k, g, q]``."""
    return jnp.moveaxis(tile, -1, 2)
