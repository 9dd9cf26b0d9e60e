"""What the parts of the forward kernel share: its configuration, its shared memory and barriers, a block of queries."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import ROWS, KernelConfig
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import modulo, transforms
from ejkernel.kernels.common.softmax import LOG2E


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

    @property
    def factor(self) -> float:
        """What logits are multiplied by after the maximum was taken: it is positive. With log2(e)."""
        return (self.cap or max(self.scale, 0.0) or 1.0) * LOG2E


class Shared(NamedTuple):
    """Shared memory and barriers of a CTA; see ``forward`` for what each barrier means.

    Unless the kernel is persistent, the output takes the queries' place where it fits. ``item`` holds the blocks that
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

    freed = plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages)
    one_each = plgpu.Barrier(num_arrivals=1, num_barriers=c.consumers)
    return Shared(
        q=tile(c.consumers, ROWS, c.dim),
        k=tile(c.stages, c.step, c.dim),
        v=tile(c.stages, c.step, c.value_dim),
        out=tile(c.consumers, ROWS, c.value_dim) if c.persistent or c.value_dim != c.dim else None,
        p=tile(c.consumers, ROWS, c.step) if c.interpreted else None,
        item=plgpu.SMEM((2, 1), jnp.int32) if c.persistent else None,
        retry=plgpu.SMEM((2 * c.consumers, 1), jnp.int32) if c.speculative else None,
        q_ready=one_each,
        q_free=one_each if c.persistent else None,
        ready=plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
        k_free=freed,
        v_free=freed,
        ping_pong=one_each if c.ping_pong else None,
        loaded=plgpu.Barrier(num_arrivals=1) if c.clears else None,
    )


class QueryBlock:
    """A block of queries: which, and where its loop over keys begins.

    Counts of steps are read where they are used: kept over a loop they would take registers.
    """

    def __init__(self, c: ForwardConfig, table, item=None, batches: int = 1):
        if item is None:
            self.batch, self.head, row = (lax.axis_index(name) for name in ("batch", "head", "block"))
        else:
            row, self.batch = _divided(item, batches)
            self.head, row = _divided(row, table.shape[1])
        self._table, self._at = table, (self.batch if table.shape[0] > 1 else 0, row)
        self._ever = c.head, c.full, c.tail
        self.begin, self.index = self._read(0), self._read(4)

    def _read(self, i: int):
        return self._table[(*self._at, i)]

    def steps_before(self, part: int):
        """Steps before the ``part``-th of: masked, unmasked, masked ones. What no block has is a constant."""
        return sum((self._read(1 + i) for i in range(part) if self._ever[i]), jnp.int32(0))

    @property
    def steps(self):
        """All of them."""
        return self.steps_before(3)


def _divided(x, by: int):
    return lax.div(x, jnp.int32(by)), lax.rem(x, jnp.int32(by))


class Context(NamedTuple):
    """What the roles of a CTA work with: inputs and outputs in global memory, ``optional`` what not every call has."""

    c: ForwardConfig
    shared: Shared
    q: Any
    k: Any
    v: Any
    table: Any
    optional: dict[str, Any]
    out: Any
    lse: Any

    def block(self, item) -> QueryBlock:
        """The block that an item of the queue stands for."""
        return QueryBlock(self.c, self.table, item, self.q.shape[0])

    def slot(self, i):
        """The slot of the ring that the ``i``-th step of a CTA uses."""
        return modulo(i, self.c.stages)

    def retry_requested(self, nth):
        """Whether a consumer has set its retry flag for the ``nth`` block that the CTA computed."""
        flags, first = self.shared.retry, modulo(nth, 2) * self.c.consumers
        return functools.reduce(jnp.logical_or, [flags[first + i, 0] == nth for i in range(self.c.consumers)])
