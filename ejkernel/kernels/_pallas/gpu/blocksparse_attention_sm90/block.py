"""A block of queries whose keys are the blocks of a list."""

from __future__ import annotations

from dataclasses import dataclass

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.forward_state import (
    Context,
    ForwardConfig,
    QueryBlock,
    divided,
)
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import CORE_ROWS, ROWS
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import clear_rows

# Bits of a list's entry that say which consumers see a block, where their lists differ.
CONSUMER_BITS = 3


@dataclass(frozen=True, kw_only=True)
class ListedConfig(ForwardConfig):
    """Everything static about a forward over lists.

    Attributes:
        kv_size: keys of a block of the mask.
        kv_blocks: how many there are. A block of that number lies past the last key.
        joined: whether a CTA's consumers have lists of their own, of which its list is the union.
    """

    kv_size: int
    kv_blocks: int
    joined: bool

    @property
    def parts(self) -> int:
        """Steps of a block of keys."""
        return -(-self.kv_size // self.step)


class ListedBlock(QueryBlock):
    """Steps are counted over the list's blocks, one after the other; a block of keys is ``parts`` steps."""

    consecutive = False

    def __init__(self, ctx: Context, item=None):
        self.ctx = ctx
        batches, heads, blocks, _ = ctx.table.shape
        row = self._find(item, blocks)
        self._place(ctx.c, self.batch if batches > 1 else 0, self.head if heads > 1 else 0, row)

    def _of_mask(self, name: str):
        """One of the optional arrays that may be the batch entry's, and the head's, own."""
        ref = self.of_batch(name)
        return ref.at[self.head if ref.shape[0] > 1 else 0]

    def _first_key(self, i):
        """The first key of the ``i``-th step, and which consumers see it."""
        c = self.ctx.c
        nth, part = (i, 0) if c.parts == 1 else divided(i, c.parts)
        entry = self.of_batch("entries")[self._of_mask("starts")[self.index] + nth]
        seeing = None
        if c.joined:
            seeing, entry = entry & (2**CONSUMER_BITS - 1), lax.shift_right_logical(entry, jnp.int32(CONSUMER_BITS))
        return entry * c.kv_size + part * c.step, seeing

    def key_copies(self, source, target, step, part):
        rows = pl.ds(self._first_key(step)[0], self.ctx.c.step)
        return [(source.at[self.batch, rows, self.kv_head], target)], None

    def has_padding(self, step):
        first, _ = self._first_key(jnp.maximum(step, 0))
        return self._of_mask("padded")[lax.div(first, jnp.int32(CORE_ROWS))] > 0

    def clear_padding(self, tile, step):
        rows = pl.ds(self._first_key(step)[0], self.ctx.c.step)
        clear_rows(self.ctx.c, tile, self._of_mask("padding").at[rows])

    def mask(self, s, row0, column0, all_started: bool):
        c = self.ctx.c
        first, seeing = self._first_key(lax.div(column0, jnp.int32(c.step)))
        if c.joined:
            # What a consumer's list has not is masked as if it lay past the last key.
            consumer = lax.rem(lax.div(row0, jnp.int32(ROWS)), jnp.int32(c.consumers))
            sees = lax.shift_right_logical(seeing, consumer) & 1
            first = jnp.where(sees > 0, first, c.kv_blocks * c.kv_size)
        # That all rows have started says nothing of where a row's window begins in this block.
        return super().mask(s, row0, first, all_started=False)
