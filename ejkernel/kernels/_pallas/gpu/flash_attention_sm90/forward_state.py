"""What the parts of the forward kernel share: its configuration, its shared memory and barriers, a block of queries."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.pairs import Tile
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.panels import copies_of, head_copies, panels
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.parameters import narrow
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import CORE_ROWS, ROWS, KernelConfig
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import (
    BY_ROW,
    WHOLE,
    apply_mask,
    clear_rows,
    modulo,
    store_some_rows,
    transforms,
)
from ejkernel.kernels.common.softmax import LOG2E


def unit_of(scale: float, cap: float) -> float:
    """See ``ForwardConfig.unit``."""
    return cap or max(scale, 0.0) or 1.0


@dataclass(frozen=True, kw_only=True)
class ForwardConfig(KernelConfig):
    """Everything static about a forward.

    Attributes:
        consumers: computing warpgroups of a CTA, each with 64 queries.
        step: keys of one step of the loop, a multiple of 16.
        stages: slots of the ring, two at least: a consumer waits for the next keys before it frees the last values.
        ping_pong: whether consumers start their products alternately (FlashAttention-3's ping-pong scheduling).
        sinks: whether there are any.
        persistent: whether a CTA computes one block after another.
        speculative: whether a block is computed with the softmax reference of its first steps, and once more, with a
            running maximum, if a sum of weights exceeds ``forward_consumer.LIMIT``. Only persistent kernels are.
        clears: whether the producer puts zeros where values are padding: their weights are 0, but 0 times NaN is not.
        warps: whether the producer is a warp, or a warpgroup.
        pack: query heads of one key head whose rows share a block.
        copies: in how many parts a step's keys are copied.
        head, full, tail: whether any block has masked steps at first, unmasked ones, masked ones at last.

    The interpreter has none of Mosaic GPU's own operations: products then wait at once, and P goes through shared
    memory.
    """

    consumers: int
    step: int
    stages: int
    ping_pong: bool
    sinks: bool
    persistent: bool
    head: bool
    full: bool
    tail: bool
    speculative: bool = False
    clears: bool = False
    warps: bool = True
    pack: int = 1
    copies: int = 1

    @property
    def key_copies(self) -> int:
        """Copies of a step's keys; those of values are ``value_copies``."""
        return self.copies * copies_of(self.dim, self.head_panel)

    @property
    def value_copies(self) -> int:
        return self.copies * copies_of(self.value_dim, self.value_panel)

    @property
    def output_in_queries(self) -> bool:
        """Whether the output takes the queries' place in shared memory: wide heads leave it no other."""
        return not self.value_panel and self.dim == self.value_dim and not narrow(self.dim, self.value_dim)

    @property
    def unit(self) -> float:
        """What logits are multiplied by after the maximum was taken: it is positive. A bias is divided by it."""
        return unit_of(self.scale, self.cap)

    @property
    def factor(self) -> float:
        """The same, with log2(e)."""
        return self.unit * LOG2E


class Shared(NamedTuple):
    """Shared memory and barriers of a CTA; see ``forward`` for what each barrier means.

    The output may take the queries' place, see ``ForwardConfig.output_in_queries``. ``item`` holds the blocks that
    the CTA takes from the queue, ``retry`` a retry flag for each consumer; both are used alternately.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    p: Any
    item: Any
    retry: Any
    q_ready: Any
    q_free: Any
    ready: Any
    k_free: Any
    v_free: Any
    ping_pong: Any
    loaded: Any


def shared_memory(c: ForwardConfig, dtype) -> Shared:
    """The types of what a CTA has in shared memory."""

    def tile(*shape):
        return plgpu.SMEM(shape, dtype, transforms=transforms(shape[-1]))

    def of_head(panel, *shape):
        return panels(dtype, panel, *shape) if panel else tile(*shape)

    # Of panels the output goes from registers to global memory.
    if c.value_panel:
        out = plgpu.SMEM((c.consumers, ROWS, c.value_dim), dtype) if c.interpreted else None
    else:
        out = None if c.output_in_queries else tile(c.consumers, ROWS, c.value_dim)
    freed = plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages)
    one_each = plgpu.Barrier(num_arrivals=1, num_barriers=c.consumers)
    queries = plgpu.Barrier(num_arrivals=c.pack * copies_of(c.dim, c.head_panel), num_barriers=c.consumers)
    return Shared(
        q=of_head(c.head_panel, c.consumers, ROWS, c.dim),
        k=of_head(c.head_panel, c.stages, c.step, c.dim),
        v=of_head(c.value_panel, c.stages, c.step, c.value_dim),
        out=out,
        p=tile(c.consumers, ROWS, c.step) if c.interpreted else None,
        item=plgpu.SMEM((2, 1), jnp.int32) if c.persistent else None,
        retry=plgpu.SMEM((2 * c.consumers, 1), jnp.int32) if c.speculative else None,
        q_ready=queries,
        q_free=one_each if c.persistent else None,
        ready=plgpu.Barrier(num_arrivals=c.key_copies + c.value_copies, num_barriers=c.stages),
        k_free=freed,
        v_free=freed,
        ping_pong=one_each if c.ping_pong else None,
        loaded=plgpu.Barrier(num_arrivals=c.value_copies) if c.clears else None,
    )


class Context(NamedTuple):
    """What the roles of a CTA work with: inputs and outputs in global memory, ``optional`` what not every call has.

    ``block_type``: a subclass of ``QueryBlock``. ``grid``: how many blocks there are at most.
    """

    c: ForwardConfig
    shared: Shared
    q: Any
    k: Any
    v: Any
    table: Any
    optional: dict[str, Any]
    out: Any
    lse: Any
    block_type: Any
    grid: int

    @property
    def items(self):
        """How many blocks the queue has."""
        return self.block_type.count(self)

    def block(self, item=None) -> QueryBlock:
        """The block that an item of the queue stands for; without a queue, that of the CTA."""
        return self.block_type(self, item)

    def slot(self, i):
        """The slot of the ring that the ``i``-th step of a CTA uses."""
        return modulo(i, self.c.stages)

    def retry_requested(self, nth):
        """Whether a consumer has set its retry flag for the ``nth`` block that the CTA computed."""
        flags, first = self.shared.retry, modulo(nth, 2) * self.c.consumers
        return functools.reduce(jnp.logical_or, [flags[first + i, 0] == nth for i in range(self.c.consumers)])


class QueryBlock:
    """A block of queries: which, where its loop over keys begins, and where what it reads and writes is.

    Counts of steps are read where they are used: kept over a loop they would take registers.

    Attributes:
        consecutive: whether the keys of its steps follow each other.
    """

    consecutive = True

    def __init__(self, ctx: Context, item=None):
        self.ctx = ctx
        row = self._find(item, ctx.table.shape[1])
        self._place(ctx.c, self.batch if ctx.table.shape[0] > 1 else 0, row)

    def _find(self, item, blocks: int):
        """Its batch entry and head from an item of the queue, and which of their ``blocks`` rows of the table it has."""
        if item is None:
            self.batch, self.head, row = (lax.axis_index(name) for name in ("batch", "head", "block"))
        else:
            row, self.batch = divided(item, self.ctx.q.shape[0])
            self.head, row = divided(row, blocks)
        return row

    @staticmethod
    def count(ctx: Context):
        """How many blocks there are."""
        return ctx.grid

    def _place(self, c: ForwardConfig, *at):
        self._at, self._ever = at, (c.head, c.full, c.tail)
        self.begin, self.index = self.read(0), self.read(4)

    def read(self, column: int):
        """An entry of the block's row in the table."""
        return self.ctx.table[(*self._at, column)]

    def steps_before(self, part: int):
        """Steps before the ``part``-th of: masked, unmasked, masked ones. What no block has is a constant."""
        return sum((self.read(1 + i) for i in range(part) if self._ever[i]), jnp.int32(0))

    @property
    def steps(self):
        """All of them."""
        return self.steps_before(3)

    @property
    def kv_head(self):
        """The head of its keys."""
        return lax.div(self.head, jnp.int32(self.ctx.c.group))

    def first_row(self, warpgroup):
        """The query of a consumer's first row."""
        return (self.index * self.ctx.c.consumers + warpgroup) * ROWS

    def first_stop(self, row0):
        """Where the keys of a consumer's first row end, if the mask is static."""
        return jnp.minimum(row0 + self.ctx.c.right, self.ctx.c.kv_len)

    def last_stop(self, row0):
        """Where those of its last row end."""
        return self.first_stop(row0 + (ROWS - 1))

    def query_copies(self, warpgroup):
        """What is copied for a consumer's queries: from where, and to where."""
        target = self.ctx.shared.q.at[warpgroup]
        return head_copies(self.ctx.q, target, self.batch, self.first_row(warpgroup), ROWS, self.head)

    def key_copies(self, source, target, step, part):
        """What is copied as a part of a step's keys or values: from where and to where; if not always, whether at all."""
        rows = self.ctx.c.step
        return head_copies(source, target, self.batch, self.begin + step * rows, rows, self.kv_head), None

    def of_batch(self, name: str):
        """Its row of one of the optional arrays."""
        ref = self.ctx.optional[name]
        return ref.at[self.batch if ref.shape[0] > 1 else 0]

    def has_padding(self, step):
        """Whether there are values of a step that are padding. (Read before a wait, not after it.)"""
        first = jnp.maximum(self.begin + step * self.ctx.c.step, 0)
        return self.of_batch("padded")[lax.div(first, jnp.int32(CORE_ROWS))] > 0

    def clear_padding(self, tile, step):
        """Zeros in their place."""
        flags = self.of_batch("padding").at[pl.ds(self.begin + step * self.ctx.c.step, self.ctx.c.step)]
        panel = len(tile.shape) > 2
        for part in [tile.at[i] for i in range(tile.shape[0])] if panel else [tile]:
            clear_rows(self.ctx.c, part, flags, panel)

    def mask(self, s, row0, column0, all_started: bool):
        """``s`` with -inf where a row does not see a key, of a step that begins at ``column0``.

        A row sees ``[start, stop)``, counted from there. ``all_started``: no row has a start after the step's first key,
        so only the upper bound is tested.
        """
        c = self.ctx.c

        def of_rows(name):
            part = self.of_batch(name).at[pl.ds(row0, ROWS)]
            return plgpu.load(part, *WHOLE, layout=BY_ROW, optimized=False)

        start = ids = None
        if c.packed:
            stop = of_rows("stop") - column0
            if not all_started:
                start = of_rows("start") - column0
        else:
            row = row0 - column0 + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_ROW)
            # Where there are segments, keys past the last have the id 0.
            end = c.step if c.segments else c.kv_len - column0
            stop = plgpu.layout_cast(jnp.full((ROWS,), end, jnp.int32), BY_ROW)
            if c.right is not None:
                stop = row + c.right if c.segments else jnp.minimum(stop, row + c.right)
            if c.left is not None and not all_started:
                start = row + c.left
        if c.segments:
            mine = of_rows("q_ids")
            stop = jnp.where(mine > 0, stop, 0)
            ids = mine, self.of_batch("kv_ids").at[pl.ds(column0, c.step)]
        return apply_mask(c, s, stop, start, ids)

    def tile(self, row0, column0) -> Tile:
        """Where a tile of a consumer's logits is."""
        return Tile(self.ctx.c, self.ctx.optional, self.batch, self.head, row0, column0)

    def sinks(self):
        """Of its rows."""
        return self.of_batch("sinks")[self.head]

    def lse(self, row0, warpgroup):
        """Where the lse of a consumer's rows goes."""
        return self.ctx.lse.at[self.batch, self.head, pl.ds(row0, ROWS)]

    def store(self, x, target, row0):
        """The output of a consumer's rows, by way of ``target`` in shared memory; of panels straight from registers."""
        if self.ctx.c.value_panel:
            out = self.ctx.out.at[self.batch]
            store_some_rows(self.ctx.c, x, out, target, row0, self.head, 0, out.shape[0], 1)
            return
        target[...] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(target, self.ctx.out.at[self.batch, pl.ds(row0, ROWS), self.head])


def divided(x, by: int):
    """Quotient and remainder."""
    return lax.div(x, jnp.int32(by)), lax.rem(x, jnp.int32(by))
