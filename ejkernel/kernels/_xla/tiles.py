"""What the geometries of the XLA attention kernels share.

Dimension names: ``b`` batch entries a step, ``h`` key heads a step, ``n`` both together, ``g`` query heads a key head, ``q`` and
``k`` positions. ``n`` is one axis, which a CPU spreads over its cores best, unless a step takes every head: then it is two,
which the compiler can partition over devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._xla.online_softmax import soft_cap
from ejkernel.kernels._xla.primitives import load
from ejkernel.kernels.common.precision import accumulator_dtype
from ejkernel.kernels.common.varying import full_beside

# Logits held at once by one step. 4 MiB of float32 leave room for their companions in a CPU's caches.
LOGITS_PER_STEP = 2**20
# Where a step is wide: on an accelerator, and over several devices, each of which holds a part.
LOGITS_PER_WIDE_STEP = 2**25


@dataclass(frozen=True)
class AttentionCall:
    """One call's arrays and meaning, and the constants that loops over them start from."""

    arrays: dict[str, Any]
    spec: Any

    @property
    def acc(self):
        """The dtype of logits, statistics and accumulators."""
        return accumulator_dtype(self.arrays["query"])

    def full(self, shape, fill, dtype=None) -> Array:
        """A constant in the accumulators' dtype, to be a loop's carry."""
        return full_beside(self.arrays["query"], shape, fill, dtype or self.acc)

    def zeros(self, shape, dtype=None) -> Array:
        return self.full(shape, 0, dtype)


@dataclass(frozen=True)
class HeadTiles(AttentionCall):
    """Arrays ``[batch, length, heads, dim]`` in tiles of some heads and a block of positions."""

    n: tuple[int, ...]
    b: int
    h: int
    g: int
    q_block: int
    kv_block: int

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
    def q_blocks(self) -> int:
        return -(-self.q_len // self.q_block)

    @property
    def rows(self) -> tuple[int, ...]:
        """The axes of a step's rows, ``[n, g*q]``."""
        return (*self.n, self.g * self.q_block)

    @property
    def prescaled(self) -> bool:
        """Whether the scale goes into the query block: exact enough in float32, not in half precision."""
        return self.arrays["query"].dtype == self.acc

    def query_head(self, head):
        """The first query head of a step whose first head is ``head``, counted as the kernel counts them."""
        return head

    def queries(self, array: Array, b0, head, q0, scaled: bool = False) -> Array:
        """A block of query-like rows, ``[n, g*q, d]``."""
        dim = array.shape[3]
        block = load(array, (b0, q0, self.query_head(head), 0), (self.b, self.q_block, self.h * self.g, dim))
        block = block * self.spec.softmax_scale if scaled and self.prescaled else block
        return block.swapaxes(1, 2).reshape(*self.rows, dim)

    def from_rows(self, block: Array) -> Array:
        """``[n, g*q, d]`` back to ``[b, q, h*g, d]``."""
        return block.reshape(self.b, self.h * self.g, self.q_block, -1).swapaxes(1, 2)

    def row_values(self, array: Array, b0, head, q0) -> Array:
        """Rows of a ``[B, H, Sq]`` array for the backward, ``[n, 1, g*q]``."""
        block = load(array, (b0, self.query_head(head), q0), (self.b, self.h * self.g, self.q_block))
        return block.reshape(*self.n, 1, self.rows[-1])

    def sink_state(self, b0, head) -> tuple[Array, Array]:
        """Where the running maximum and the denominator start: at the sink, if there is one."""
        if "softmax_aux" not in self.arrays:
            return self.full(self.rows, -jnp.inf), self.zeros(self.rows)
        sinks = self.arrays["softmax_aux"].astype(self.acc)
        shared = sinks.shape[0] == 1
        at = (0 if shared else b0, self.query_head(head))
        block = load(sinks, at, (1 if shared else self.b, self.h * self.g))
        top = jnp.repeat(block.reshape(-1, self.h, self.g), self.q_block, axis=-1)
        top = self.zeros(self.rows) + jnp.broadcast_to(top, (self.b, self.h, self.rows[-1])).reshape(self.rows)
        return top, (top > -jnp.inf).astype(self.acc)

    def scale_and_cap(self, s: Array) -> tuple[Array, Array | None]:
        """Products of queries and keys as logits, and the cap's slope, None without a cap."""
        if not self.prescaled:
            s = s * self.spec.softmax_scale
        return soft_cap(s, self.spec.logits_soft_cap)


def head_axes(b: int, h: int, batch: int, kv_heads: int, wanted: int | None) -> tuple[int, ...]:
    """``n``: two axes if a step takes every head because that was asked for."""
    return (b, h) if wanted and (b, h) == (batch, kv_heads) else (b * h,)


def effective_heads(b: int, h: int, wanted: int | None) -> int | None:
    """``blocksize_heads`` as it is used. None stays: as many heads as ``LOGITS_PER_STEP`` allows, in one axis."""
    return b * h if wanted else None


def heads_per_step(batch: int, kv_heads: int, logits: int, wanted: int | None = None) -> tuple[int, int]:
    """How many batch entries and key heads one step takes, when one of them makes so many logits."""
    budget = wanted or max(1, LOGITS_PER_STEP // logits)
    heads = _largest_divisor(kv_heads, budget)
    return (_largest_divisor(batch, budget // heads) if heads == kv_heads else 1), heads


def _largest_divisor(number: int, at_most: int) -> int:
    return next(d for d in range(max(1, min(number, at_most)), 0, -1) if number % d == 0)


def any_visible(visible: Array, axes: int | tuple[int, ...]) -> Array:
    """Whether any pair along the axes counts."""
    return visible.astype(jnp.float32).max(axes) > 0
