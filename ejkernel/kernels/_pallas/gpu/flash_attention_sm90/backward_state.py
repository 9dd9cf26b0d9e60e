"""What the parts of the single backward kernel share: configuration, shared memory and barriers, a CTA's context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.backward_order import started_before
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.panels import aliased, columns_of
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import ROWS, KernelConfig, tail_of
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import transforms


@dataclass(frozen=True, kw_only=True)
class BackwardConfig(KernelConfig):
    """Everything static about a backward.

    Attributes:
        consumers: computing warpgroups of a CTA, each with 64 keys.
        step: queries of one step of the loop.
        stages: slots of the ring.
        head, tail: whether any block of keys has masked steps at first, at last.
        partial_step: whether there are queries past the last in a last step.
        ascending: whether the loop runs from the first query up, and the last keys start; or the other way round.
        round: blocks of keys that start in reverse order before those that follow, see ``backward_order``.
        parts: CTAs that share a block of keys of one head, each with ``group`` of the query heads; see ``backward_order``.
        listed: whether a block's queries come from a list, masked and unmasked steps among each other.
        warps: whether producer and writers are warps of one warpgroup; JAX has no such warps in its interpreter, nor
            where arrays vary over a mesh (``jax.shard_map``). There they are warpgroups.

    The interpreter has no reductions in global memory: every CTA then has a dQ of its own.
    """

    consumers: int
    step: int
    stages: int
    head: bool
    tail: bool
    ascending: bool
    partial_step: bool = True
    round: int = 1
    parts: int = 1
    listed: bool = False
    warps: bool = True

    @property
    def panel(self) -> int | None:
        """Columns of a head's second panel, where it has panels."""
        return tail_of(self.dim, self.whole_rows)

    @property
    def in_panels(self) -> bool:
        """Whether copies are by panels: the first 64 columns of a head, and those behind if there are any."""
        return self.panel is not None or not self.whole_rows

    @property
    def squares(self) -> int:
        """Of 64 keys by 64 columns."""
        return -(-self.dim // ROWS)

    @property
    def panels(self) -> int:
        """In how many a head is copied, and multiplied where rows are summed over."""
        return 2 if self.panel else 1

    @property
    def masked(self) -> bool:
        """Whether any step is masked."""
        return self.head or self.tail

    @property
    def separate_loops(self) -> bool:
        """Whether masked and unmasked steps have separate loops. With a cap at 64 there are too few registers."""
        return not (self.cap and self.dim == ROWS) and not self.listed

    @property
    def writers(self) -> int:
        """How many write dQ, alternately: a second warp costs nothing, a second warpgroup would cost registers."""
        return 2 if self.warps or self.interpreted else 1

    @property
    def eager(self) -> bool:
        """Whether dS and dQ are each published as soon as they are stored.

        Else one fence publishes both, after the next scores were started. Measured: at 64, causal, the first is faster
        by 4 %, at 128 the second by 1 to 5 %.
        """
        return self.dim == ROWS

    @property
    def slots(self) -> int:
        """Of dS: one is written, one is read. If published at once, a warpgroup that is behind may read a third."""
        return 3 if self.eager else 2

    @property
    def buffers(self) -> int:
        """Of dQ: one for each writer where the slots of dS leave room."""
        return 1 if self.eager else self.writers

    @property
    def registers(self) -> int:
        """Of a consumer's thread: what the other warpgroups leave."""
        return 240 if self.warps else 232

    @property
    def by_rows(self) -> bool:
        """Whether a warpgroup computes 64 rows of dQ, or else 64 of its columns: a square either way."""
        return self.step == ROWS * self.consumers


class Shared(NamedTuple):
    """Shared memory and barriers of a CTA; see ``backward`` for what each barrier means.

    Of heads in panels ``k``, ``v``, ``q`` and ``do`` have the first 64 columns, the tails what is behind. ``k`` is in squares
    for dQ, of which the second one is the tail, filled with zeros: where it has no fewer columns, there is no other.
    """

    k: Any
    v: Any
    q: Any
    do: Any
    k_tail: Any
    v_tail: Any
    q_tail: Any
    do_tail: Any
    ds: Any
    dq: Any
    rows: Any
    kv_ready: Any
    ready: Any
    free: Any
    ds_ready: Any
    dq_ready: Any
    dq_free: Any
    p: Any


def shared_memory(c: BackwardConfig, dtype) -> Shared:
    """The types of what a CTA has in shared memory."""

    def tile(*shape, dtype=dtype):
        width = 128 // jnp.dtype(dtype).itemsize
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)))

    def panel(*shape):
        """For the interpreter without the view for copies, which it cannot alias."""
        return plgpu.SMEM(shape, dtype, transforms=transforms(shape[-1])) if c.interpreted else aliased(dtype, *shape)

    def tail(*shape):
        return panel(*shape, c.panel) if c.panel else None

    of_head = panel if c.in_panels else tile
    columns, value_columns = (ROWS, ROWS) if c.in_panels else (c.dim, c.value_dim)
    key_tail = c.panel is not None and c.panel < ROWS
    return Shared(
        k=of_head(c.consumers, c.squares, ROWS, ROWS),  # in squares: read by rows of keys and by columns
        v=of_head(c.consumers, ROWS, value_columns),
        q=of_head(c.stages, c.step, columns),
        do=of_head(c.stages, c.step, value_columns),
        k_tail=tail(c.consumers, ROWS) if key_tail else None,
        v_tail=tail(c.consumers, ROWS),
        q_tail=tail(c.stages, c.step),
        do_tail=tail(c.stages, c.step),
        ds=tile(c.slots, c.consumers, c.step // ROWS, ROWS, ROWS),
        dq=tile(c.buffers, c.consumers, ROWS, ROWS, dtype=jnp.float32),
        rows=plgpu.SMEM((c.stages, 2, c.step), jnp.float32),
        kv_ready=plgpu.Barrier(num_arrivals=c.consumers * (c.squares + key_tail + c.panels)),
        ready=plgpu.Barrier(num_arrivals=1 + 2 * c.panels, num_barriers=c.stages),
        free=plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages),
        ds_ready=plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.slots),
        dq_ready=plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.writers),
        dq_free=plgpu.Barrier(num_arrivals=1, num_barriers=c.buffers),
        p=tile(c.consumers, ROWS, c.step) if c.interpreted else None,
    )


class Inputs(NamedTuple):
    """The kernel's inputs in global memory, but for those that only masks read."""

    q: Any
    k: Any
    v: Any
    do: Any
    rows: Any
    table: Any
    visitors: Any


class Context(NamedTuple):
    """What the roles of a CTA work with.

    Attributes:
        inputs, optional: in global memory; ``optional`` are the arrays that masks read.
        dq, dk, dv: the outputs, in global memory.
        counters: for each block of queries, how many CTAs have added to its dQ.
        nth: as which of its head's blocks of keys the CTA's starts.
        block: which block that is.
        part: which of the CTAs that share the block this is, if several do.
        key0: its first key.
    """

    c: BackwardConfig
    inputs: Inputs
    optional: dict[str, Any]
    dq: Any
    dk: Any
    dv: Any
    shared: Shared
    counters: Any
    nth: Any
    block: Any
    batch: Any
    kv_head: Any
    part: Any
    key0: Any

    def for_products(self, ref):
        """Shared memory of a head, as products take it."""
        return ref[0] if self.c.in_panels and not self.c.interpreted else ref

    def panel_copies(self, array, row, rows: int, head, *targets):
        """Pairs of what is copied, rows of a head in global memory by panels, and of their shared memory.

        A target: what a panel lies in, or None, where in it, and the panel's first column.
        """
        pairs = []
        for ref, at, column in targets:
            if ref is None:
                continue
            part = (ref if self.c.interpreted else ref[1]).at[at]
            pairs.append((columns_of(array, self.batch, row, rows, head, column, part.shape[-1]), part))
        return pairs

    @property
    def table_batch(self):
        """The batch entry's place in tables that may be shared by all."""
        return self.batch if self.inputs.table.shape[0] > 1 else 0

    @property
    def heads(self):
        """Which of the slices of query heads, ``group`` each, the CTA has."""
        return self.kv_head if self.c.parts == 1 else self.kv_head * self.c.parts + self.part

    def loop(self, zero=0):
        """The first query, the first unmasked step, the first masked one after those, and how many steps there are.

        Every role reads it: what the roles share is in registers of them all. So is what is read before a loop and used
        after it, unless it is read again, at an address with an ``opaque_zero`` in it. What never happens is a
        constant.
        """
        begin, head, full, tail = (self.inputs.table[self.table_batch, self.block + zero, i] for i in range(4))
        first = head if self.c.head else jnp.int32(0)
        last = first + full
        return begin, first, last, last + (tail if self.c.tail else 0)

    def order(self, t, steps):
        """Which step of the loop is the ``t``-th: descending or ascending, and each for all heads of the group.

        Loops that end alike then start alike, and no CTA is ahead of those that it waits for.
        """
        n = lax.div(t, jnp.int32(self.c.group))
        return n if self.c.ascending else steps - 1 - n

    def row(self, t, begin, steps):
        """The first query of the ``t``-th step."""
        return begin + self.order(t, steps) * self.c.step

    def place(self, t, begin, steps):
        """The head and the first query of the ``t``-th step."""
        return (
            self.heads * self.c.group + lax.rem(t, jnp.int32(self.c.group)),
            self.row(t, begin, steps),
        )

    def is_masked(self, t, first, last, steps):
        """Whether the ``t``-th step is masked; ``first`` and ``last`` as ``loop`` returns them."""
        i = self.order(t, steps)
        return (i < first) | (i >= last)

    def earlier(self, t, step):
        """How many CTAs that start before this one add to the dQ of its ``t``-th step, the ``step``-th of all queries."""
        visitors = (self.inputs.visitors[self.table_batch, step, i] for i in range(2))
        return started_before(self.nth, self.c.round, self.inputs.table.shape[1], *visitors)

    def key_row(self, consumer: int):
        """The key that a consumer's keys are copied from."""
        return self.key0 + consumer * ROWS

    def restrict(self, seen, t, key0):
        """Which of the pairs of the ``t``-th step that are ``seen`` by their positions and ids count, of keys from ``key0`` on."""
        return seen
