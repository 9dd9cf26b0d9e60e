"""The gradient of a bias: a kernel of its own, which computes the logits and their gradient once more.

The bias's blocks are summed one after another, each over all that shares it: batch entries, heads, queries or keys. So nothing is
larger than the bias, and every sum has one order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu.call import launch
from ejkernel.kernels._pallas.tpu.flash_attention.backward import gradient_of_logits
from ejkernel.kernels._pallas.tpu.flash_attention.backward_steps import make_lists
from ejkernel.kernels._pallas.tpu.flash_attention.plan import FIRST, HIDDEN, KIND_SHIFT, LAST, MASKED, WHOLE
from ejkernel.kernels._pallas.tpu.flash_attention.terms import TURNED, Place, Terms, block_specs, of_names
from ejkernel.kernels._pallas.tpu.generations import LANES, Generation


@dataclass(frozen=True, kw_only=True)
class BiasConfig:
    """What is static about a call.

    Attributes:
        terms: of its logits.
        group: query heads of a key head.
        q_block, kv_block: of a step.
        own: which axes the bias has.
        shared_heads: heads that share a block of the bias.
        own_lists: whether batch entries have lists of their own.
        room: steps for which a list has room.
        kv_blocks: how many there are.
    """

    terms: Terms
    group: int
    q_block: int
    kv_block: int
    own: tuple[bool, ...]
    shared_heads: int
    own_lists: bool
    room: int
    kv_blocks: int

    def step(self, b: Any, h: Any, t: Any, r: Any, prefetched: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Batch entry, query head, block of queries, block of keys and flags of a step."""
        major, minor, flags = prefetched
        t = (b * self.room if self.own_lists else 0) + t
        # Typed, for with 64 bits enabled a Python number is one of 64 bits.
        shared_heads, kv_blocks = np.int32(self.shared_heads), np.int32(self.kv_blocks)
        b = b if self.own[0] else lax.div(r, shared_heads)
        h = h if self.own[1] else lax.rem(r, shared_heads)
        major, minor = major[t], minor[t]
        if self.own[2] and self.own[3]:
            i, j = lax.div(major, kv_blocks), lax.rem(major, kv_blocks)
        elif self.own[2]:
            i, j = major, minor
        elif self.own[3]:
            i, j = minor, major
        else:
            i, j = lax.div(minor, kv_blocks), lax.rem(minor, kv_blocks)
        return b, h, i, j, flags[t]

    @property
    def sums(self) -> tuple[int, int]:
        """The shape of what is summed: gradients of logits, those of a key in 128 lanes, or those of a query."""
        if self.own[3]:
            return (self.kv_block, self.q_block if self.own[2] else LANES)
        return (1, self.q_block)


def call(
    c: BiasConfig,
    lists: Any,
    tensors: list[Array],
    optional: list[Array],
    bias: Array,
    *,
    generation: Generation,
    costs: dict[str, int],
    interpret: Any,
) -> Array:
    """The gradient in the bias's shape and dtype; ``tensors`` as in ``backward.call``."""
    query, key, value = tensors[:3]
    batch, dim, value_dim = query.shape[0], query.shape[3], value.shape[3]
    own_batch, own_heads = bias.shape[:2]
    shared = (1 if c.own[0] else batch) * c.shared_heads

    def at(*grid):
        return c.step(*grid[:4], grid[4:])[:4]

    def of_queries(*grid):
        b, h, i, _ = at(*grid)
        return b, h, i, 0

    def of_keys(*grid):
        b, h, _, j = at(*grid)
        return b, lax.div(h, np.int32(c.group)), j, 0

    def of_rows(*grid):
        b, h, i, _ = at(*grid)
        return b, h, 0, i

    def of_result(*grid):
        _, _, i, j = at(*grid)
        if c.own[2] and c.own[3]:
            return grid[0], grid[1], i, j
        return grid[0], grid[1], 0, j if c.own[3] else i if c.own[2] else 0

    by_pair = c.own[2] and c.own[3]
    lengths = (
        (query.shape[2] if by_pair else 1),
        (key.shape[2] if c.own[3] else query.shape[2] if c.own[2] else c.q_block),
    )
    sides = (c.q_block if by_pair else 1), (c.kv_block if c.own[3] else c.q_block)
    (sums,) = launch(
        functools.partial(_kernel, c),
        [*lists[:3], *tensors, *optional],
        name="flash_attention_bias_gradient",
        out_shape=[jax.ShapeDtypeStruct((own_batch, own_heads, *lengths), bias.dtype if by_pair else jnp.float32)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(own_batch, own_heads, lists.count, shared),
            in_specs=[
                pl.BlockSpec((1, 1, c.q_block, dim), of_queries),
                pl.BlockSpec((1, 1, c.kv_block, dim), of_keys),
                pl.BlockSpec((1, 1, c.kv_block, value_dim), of_keys),
                pl.BlockSpec((1, 1, c.q_block, value_dim), of_queries),
                pl.BlockSpec((1, 1, 2, c.q_block), of_rows),
                *block_specs(c.terms, c.q_block, c.kv_block, at),
            ],
            out_specs=[pl.BlockSpec((1, 1, *sides), of_result)],
            scratch_shapes=[
                pltpu.VMEM(c.sums, jnp.float32),
                *([pltpu.VMEM((c.kv_block, c.q_block), jnp.float32)] if c.terms.of_pairs else []),
            ],
        ),
        semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        generation=generation,
        interpret=interpret,
        **costs,
    )
    if not c.own[3]:
        sums = sums.swapaxes(2, 3)
    for axis in (2, 3):
        size = bias.shape[axis]
        sums = sums.sum(axis, keepdims=True) if size == 1 else lax.slice_in_dim(sums, 0, size, axis=axis)
    return sums.astype(bias.dtype)


def steps_of(kinds: Any, own: tuple[bool, ...]) -> Any:
    """The lists of a bias's blocks: a list for each batch entry if the bias and the blocks have them."""
    batch, _, rows, keys = kinds.shape
    xp = np if isinstance(kinds, np.ndarray) else jnp
    if batch > 1 and not own[0]:
        whole, seen = (kinds == WHOLE).all(0, keepdims=True), (kinds != HIDDEN).any(0, keepdims=True)
        kinds, batch = xp.where(whole, WHOLE, xp.where(seen, MASKED, HIDDEN)), 1
    if own[2] and own[3]:
        kinds = kinds.reshape(batch, 1, rows * keys, 1)
    elif own[3]:
        kinds = kinds.swapaxes(2, 3)
    elif not own[2]:
        kinds = kinds.reshape(batch, 1, 1, rows * keys)
    return make_lists(kinds)


def _kernel(c: BiasConfig, major, minor, flags, *refs: Any) -> None:
    tensors, optional = refs[:5], of_names(c.terms, refs[5 : 5 + len(c.terms.names)])
    result, total, *turned = refs[5 + len(c.terms.names) :]
    if turned:
        optional[TURNED] = turned[0]
    r = pl.program_id(3)
    b, h, i, j, flags = c.step(*(pl.program_id(n) for n in range(4)), (major, minor, flags))
    place = Place(batch=b, head=h, query=i * c.q_block, key=j * c.kv_block)

    @pl.when(((flags & FIRST) != 0) & (r == 0))
    def _clear():
        total[...] = jnp.zeros_like(total)

    for kind, mask in ((WHOLE, False), (MASKED, True)):

        @pl.when((flags >> KIND_SHIFT) == kind)
        def _step(mask=mask):
            q, k, v, do = (ref[0, 0] for ref in tensors[:4])
            lse, slope = tensors[4][0, 0, 0:1], tensors[4][0, 0, 1:2]
            everything = slice(0, c.q_block), slice(0, c.kv_block)
            ds, _ = gradient_of_logits(
                c.terms, optional, place, *everything, mask, q, k, v, do, lse, slope, capped=False
            )
            if not c.own[3]:
                ds = ds.sum(0, keepdims=True)
            elif not c.own[2]:
                ds = sum(ds[:, n : n + LANES] for n in range(0, c.q_block, LANES))
            total[...] += ds

    @pl.when(((flags & LAST) != 0) & (r == pl.num_programs(3) - 1))
    def _store():
        sums = total[...] * (1 / (1 - c.terms.dropout))
        if c.own[3]:
            sums = sums.T
        if c.own[3] and not c.own[2]:
            sums = sums.sum(0, keepdims=True)
        result[0, 0] = sums.astype(result.dtype)
