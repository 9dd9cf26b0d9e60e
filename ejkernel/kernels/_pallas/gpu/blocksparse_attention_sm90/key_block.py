"""A block of keys whose queries come from a list, for the backward.

CTAs add to a block of dQ in the order in which they start, as in flash attention: a CTA's rank among those that add is in the
list. It waits only for CTAs that started before it, which wait only for earlier ones still: the first of all waits for none,
so every wait ends. All lists go from the last query down: CTAs that start together come to the queries that they share in the
same order.
"""

from __future__ import annotations

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.backward_state import Context
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import BACKWARD_CONSUMERS, ROWS

# An entry of a list is a pair: a step of queries of one head with bits, and the CTA's rank. Bits: for each 64 queries of the step,
# which consumers' keys they see; whether the step is masked.
SEEN_BITS = 2 * BACKWARD_CONSUMERS
MASKED = 1 << SEEN_BITS
STEP_SHIFT = SEEN_BITS + 1


class ListedContext(Context):
    """``inputs.table``: ``[B|1, blocks, Hkv|1]``, how many steps a block has, with a bit for each consumer that has any;
    ``inputs.visitors``: ``[B|1, Hkv|1, blocks, n, 2]``, the steps.
    """

    def _count(self, zero=0):
        table = self.inputs.table
        return table[self.table_batch, self.block + zero, self.kv_head if table.shape[2] > 1 else 0]

    def _entry(self, t, column: int):
        lists = self.inputs.visitors
        return lists[self.table_batch, self.kv_head if lists.shape[1] > 1 else 0, self.block, t, column]

    def _step(self, t):
        """Of queries, and which of the heads of the group."""
        group = self.inputs.q.shape[2] // self.inputs.k.shape[2]
        number = lax.shift_right_logical(self._entry(t, 0), jnp.int32(STEP_SHIFT))
        return lax.div(number, jnp.int32(group)), lax.rem(number, jnp.int32(group)) + self.kv_head * group

    def loop(self, zero=0):
        nothing = jnp.int32(0)
        return nothing, nothing, nothing, lax.shift_right_logical(self._count(zero), jnp.int32(BACKWARD_CONSUMERS))

    def row(self, t, begin, steps):
        return self._step(t)[0] * self.c.step

    def place(self, t, begin, steps):
        step, head = self._step(t)
        return head, step * self.c.step

    def is_masked(self, t, first, last, steps):
        return (self._entry(t, 0) & MASKED) > 0

    def earlier(self, t, step):
        return self._entry(t, 1)

    def key_row(self, consumer: int):
        # Nobody sees the keys of a consumer without a step: they may hold NaN. Past the last key there are zeros.
        some = (self._count() & (1 << consumer)) > 0
        return jnp.where(some, super().key_row(consumer), self.inputs.k.shape[1])

    def restrict(self, seen, t, key0):
        consumer = lax.rem(lax.div(key0, jnp.int32(ROWS)), jnp.int32(BACKWARD_CONSUMERS))
        bits = lax.shift_right_logical(self._entry(t, 0), consumer)
        if self.c.step == ROWS:
            return seen & ((bits & 1) > 0)
        column = plgpu.broadcasted_iota(jnp.int32, seen.shape, 1, layout=plgpu.Layout.WGMMA)
        return seen & (jnp.where(column < ROWS, bits & 1, bits & (1 << BACKWARD_CONSUMERS)) > 0)
