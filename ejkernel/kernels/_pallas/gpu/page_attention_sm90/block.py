"""A block of queries of one sequence, whose keys are in pages."""

from __future__ import annotations

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.forward_state import Context, QueryBlock, divided
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import ROWS
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import (
    BY_ROW,
    apply_mask,
    clear_outside,
    store_some_rows,
)

# Columns of the table after those of every block: see ``forward.plan``.
TABLE_ROW, EXAMPLE, TOKEN, FIRST, END, SHIFT, LENGTH, SEEN_FROM, NEEDED = range(5, 14)


class PagedBlock(QueryBlock):
    """Queries ``[T, H, D]``, keys and values ``[blocks · Hkv, page, D]``, output ``[T, H, Dv]``, lse ``[H / pack, rows]``.

    Rows of a consumer are the tokens of one head, then those of the next, of ``pack`` heads that share their keys. Tokens are
    copied from a multiple of 8 on, so that some before and after may be other sequences'. They are computed as if they were
    the sequence's first or last one, and not stored.
    """

    def __init__(self, ctx: Context, item=None):
        self.ctx, c = ctx, ctx.c
        row, self.head = divided(lax.axis_index("block") if item is None else item, ctx.lse.shape[0])
        self._place(c, row)

    @staticmethod
    def count(ctx: Context):
        return ctx.table[0, NEEDED] * ctx.lse.shape[0]

    @property
    def row_span(self) -> int:
        """How many tokens a consumer has."""
        return ROWS // self.ctx.c.pack

    @property
    def kv_head(self):
        return lax.div(self.head, jnp.int32(self.ctx.c.group // self.ctx.c.pack))

    @property
    def first_head(self):
        """The first of its query heads."""
        return self.head * self.ctx.c.pack

    def first_row(self, warpgroup):
        return self.read(TOKEN) + warpgroup * self.row_span

    def _own(self, token):
        """A token as one of the sequence's."""
        return jnp.minimum(jnp.maximum(token, self.read(FIRST)), self.read(END) - 1)

    def first_stop(self, row0):
        return self._stop(row0, row0)

    def last_stop(self, row0):
        return self._stop(row0, row0 + (self.row_span - 1))

    def _stop(self, row0, token):
        """Where the keys of a consumer's token end: at 0 if none of its tokens is the sequence's, for it may then skip all."""
        some = (row0 < self.read(END)) & (row0 + self.row_span > self.read(FIRST))
        stop = jnp.minimum(self._own(token) + self.read(SHIFT) + 1, self.read(LENGTH))
        return jnp.where(some, stop, 0)

    def query_copies(self, warpgroup):
        tokens, shared = pl.ds(self.first_row(warpgroup), self.row_span), self.ctx.shared
        return [
            (
                self.ctx.q.at[tokens, self.first_head + i],
                shared.q.at[warpgroup, pl.ds(i * self.row_span, self.row_span)],
            )
            for i in range(self.ctx.c.pack)
        ]

    def key_copies(self, source, target, step, part):
        c, page = self.ctx.c, source.shape[1]
        kv_heads = self.ctx.q.shape[1] // c.group
        last_block = source.shape[0] // kv_heads - 1
        size = c.step // c.copies
        place = self.begin + step * c.step + part * size
        entry, within = divided(place, page)
        # What lies past the context is not read, nor is what the table has for it.
        needed = place < self.read(LENGTH)
        block = jnp.clip(self.ctx.optional["tables"][self.read(TABLE_ROW), jnp.where(needed, entry, 0)], 0, last_block)
        source = source.at[block * kv_heads + self.kv_head, pl.ds(within, size)]
        return [(source, target.at[pl.ds(part * size, size)])], needed

    def _seen(self, step):
        """Which of a step's keys any query of the sequence sees: from where, and to where."""
        first = self.begin + step * self.ctx.c.step
        return self.read(SEEN_FROM) - first, self.read(LENGTH) - first

    def has_padding(self, step):
        low, high = self._seen(step)
        return (low > 0) | (high < self.ctx.c.step)

    def clear_padding(self, tile, step):
        clear_outside(self.ctx.c, tile, *self._seen(step))

    def mask(self, s, row0, column0, all_started: bool):
        c = self.ctx.c
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_ROW)
        if c.pack > 1:
            row &= self.row_span - 1
        place = self._own(row + row0) + (self.read(SHIFT) - column0)
        stop = jnp.minimum(place + 1, self.read(LENGTH) - column0)
        start = place - c.left if c.left is not None and not all_started else None
        return apply_mask(c, s, stop, start, None)

    def sinks(self):
        ref = self.ctx.optional["sinks"]
        example = self.read(EXAMPLE) if ref.shape[0] > 1 else 0
        head = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_ROW) // self.row_span
        sinks = jnp.where(head == 0, ref[example, self.first_head], 0.0)
        for i in range(1, self.ctx.c.pack):
            sinks = jnp.where(head == i, ref[example, self.first_head + i], sinks)
        return sinks

    def lse(self, row0, warpgroup):
        return self.ctx.lse.at[self.head, pl.ds((self.index * self.ctx.c.consumers + warpgroup) * ROWS, ROWS)]

    def store(self, x, target, row0):
        out, span = self.ctx.out, self.row_span
        first, end = self.read(FIRST), self.read(END)
        every = (row0 >= first) & (row0 + span <= end)

        @pl.when(every)
        def _():
            target[...] = x
            plgpu.commit_smem()
            for i in range(self.ctx.c.pack):
                part = target.at[pl.ds(i * span, span)]
                plgpu.copy_smem_to_gmem(part, out.at[pl.ds(row0, span), self.first_head + i])

        @pl.when(~every)
        def _():
            store_some_rows(self.ctx.c, x, out, target, row0, self.first_head, first, end, self.ctx.c.pack)
