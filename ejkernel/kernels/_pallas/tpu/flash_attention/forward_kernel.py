"""The forward kernel: online softmax over the keys of a block of queries.

Logits are transposed, ``[keys, queries]``, and so is the output, ``[value dim, queries]``: maximum, sum and rescaling of a query
are a row along the lanes, and nothing is reduced or replicated across them. A step's logits are computed in parts. Those of the
next part are multiplied, and the weights of the last one, while those of this one are exponentiated: the matrix unit and the
vector units would else wait for each other. Between the two passes over logits (their maximum, then their exponentials) they
lie in vector memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu.call import launch
from ejkernel.kernels._pallas.tpu.flash_attention.plan import (
    FIRST,
    KIND_SHIFT,
    LAST,
    MASKED,
    PATTERN,
    WHOLE,
    Pattern,
    Steps,
)
from ejkernel.kernels._pallas.tpu.flash_attention.terms import (
    TURNED,
    Place,
    Terms,
    base_logits,
    block_specs,
    finished_logits,
    kept_pairs,
    of_names,
    seen_pairs,
)
from ejkernel.kernels._pallas.tpu.generations import Generation
from ejkernel.kernels.common.softmax import LOG2E

# Parts whose logits are in vector memory at a time.
AHEAD = 2


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is static about a call.

    Attributes:
        terms: of its logits.
        group: query heads of a key head.
        q_block, kv_block: of a step.
        q_part, kv_part: whose logits are computed at a time.
        masked: whether there are masked steps without a pattern.
        whole: whether there are whole steps.
        patterns: of masked steps.
        sinks: whether sinks join the denominator.
    """

    terms: Terms
    group: int
    q_block: int
    kv_block: int
    q_part: int
    kv_part: int
    masked: bool
    whole: bool
    patterns: tuple[Pattern, ...]
    sinks: bool

    @property
    def masks(self) -> dict[int, bool | Pattern]:
        """The kinds of steps that there are, with their masks."""
        plain: dict[int, bool | Pattern] = {WHOLE: False} if self.whole else {}
        if self.masked:
            plain[MASKED] = True
        return plain | {PATTERN + n: pattern for n, pattern in enumerate(self.patterns)}

    @property
    def scaled_late(self) -> bool:
        """Whether the scale multiplies what is exponentiated, not the logits; then it is larger than 0."""
        return "bias" not in self.terms.names and (self.terms.cap is not None or self.terms.scale > 0)

    @property
    def unit(self) -> float:
        """What logits as the kernel keeps them are to be multiplied by, for those in units of log 2."""
        if not self.scaled_late:
            return 1.0
        return (self.terms.cap or self.terms.scale) * LOG2E


class Part(NamedTuple):
    """Static slices of a step's queries and keys."""

    queries: slice
    keys: slice


def call(
    c: Config,
    steps: Steps,
    tensors: list[Array],
    sinks: list[Array],
    optional: list[Array],
    *,
    generation: Generation,
    costs: dict[str, int],
    interpret: Any,
) -> tuple[Array, Array]:
    """``[B, H, Dv, Sq]`` and the lse ``[B, H, 1, Sq]``, from ``[B, H, S, D]``, the sinks ``[B|1, H]`` and what masks read."""
    query, _, value = tensors
    batch, heads, q_len, dim = query.shape
    value_dim = value.shape[3]
    prefetched = steps.arrays

    def at(b, h, t, *refs):
        return steps.at(b, h, t, refs[: len(prefetched)])[:4]

    def of_queries(*grid):
        b, h, i, _ = at(*grid)
        return b, h, i, 0

    def of_keys(*grid):
        b, h, _, j = at(*grid)
        return b, lax.div(h, jnp.int32(c.group)) if c.group > 1 else h, j, 0

    def of_results(*grid):
        b, h, i, _ = at(*grid)
        return b, h, 0, i

    out_shape = [
        jax.ShapeDtypeStruct((batch, heads, value_dim, q_len), query.dtype),
        jax.ShapeDtypeStruct((batch, heads, 1, q_len), jnp.float32),
    ]
    return launch(
        functools.partial(_kernel, c, steps),
        [*prefetched, *tensors, *sinks, *optional],
        name="flash_attention_forward",
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=steps.grid(batch, heads),
            in_specs=[
                pl.BlockSpec((1, 1, c.q_block, dim), of_queries),
                pl.BlockSpec((1, 1, c.kv_block, dim), of_keys),
                pl.BlockSpec((1, 1, c.kv_block, value_dim), of_keys),
                *[pl.BlockSpec(memory_space=pltpu.SMEM) for _ in sinks],
                *block_specs(c.terms, c.q_block, c.kv_block, at),
            ],
            out_specs=[
                pl.BlockSpec((1, 1, value_dim, c.q_block), of_results),
                pl.BlockSpec((1, 1, 1, c.q_block), of_results),
            ],
            scratch_shapes=[
                *[pltpu.VMEM((1, c.q_block), jnp.float32) for _ in range(2)],
                pltpu.VMEM((value_dim, c.q_block), jnp.float32),
                pltpu.VMEM((AHEAD, c.kv_part, c.q_part), jnp.float32),
            ],
        ),
        semantics=("parallel", "parallel", "arbitrary"),
        generation=generation,
        interpret=interpret,
        **costs,
    )


def _kernel(c: Config, steps: Steps, *refs: Any) -> None:
    given = iter(refs)

    def take(count: int) -> list[Any]:
        return [next(given) for _ in range(count)]

    prefetched = take(len(steps.arrays))
    tensors = take(3)
    sinks = take(int(c.sinks))
    optional = of_names(c.terms, take(len(c.terms.names)))
    out, lse, top, total, acc, logits = given
    b, h, i, j, flags = steps.at(pl.program_id(0), pl.program_id(1), pl.program_id(2), prefetched)
    place = Place(b, h, i * c.q_block, j * c.kv_block)

    @pl.when(flags & FIRST != 0)
    def _():
        top[...] = jnp.full_like(top, -jnp.inf)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    kind = flags >> KIND_SHIFT
    for found, mask in c.masks.items():

        @pl.when(kind == found)
        def _(mask=mask):
            _step(c, place, mask, tensors, optional, top, total, acc, logits)

    @pl.when(flags & LAST != 0)
    def _():
        if c.sinks:
            [of_heads] = sinks
            sink = of_heads[b if of_heads.shape[0] > 1 else 0, h] * LOG2E
        else:
            sink = None
        _finish(c, sink, out, lse, top, total, acc)


def _step(
    c: Config, place: Place, mask: Any, tensors: list[Any], optional: dict[str, Any], top, total, acc, logits
) -> None:
    """Adds a pair of blocks to the running maximum, sum and output."""
    query, key, value = tensors
    parts = _parts(c, mask)

    def multiply(n: int) -> Array:
        """A part's logits, into vector memory, and their maximum."""
        queries, keys = parts[n]
        s = _product(key[0, 0, keys], query[0, 0, queries], (1, 1))
        ahead = logits.at[n % AHEAD]
        s = _logits(c, {**optional, TURNED: ahead}, place, queries, keys, s, mask)
        ahead[...] = s
        return s.max(0, keepdims=True)

    def exponentiate(n: int, highest: Array) -> Callable[[], None]:
        """The part's weights and their sum; what then adds them to the output."""
        queries, keys = parts[n]
        before = top[:, queries]
        now = jnp.maximum(before, highest)
        reference = jnp.where(now == -jnp.inf, 0.0, now)
        weights = jnp.exp2(_scaled(c, logits[n % AHEAD] - reference))
        shrink = jnp.exp2(_scaled(c, before - reference))
        top[:, queries] = now
        total[:, queries] = total[:, queries] * shrink + weights.sum(0, keepdims=True)
        if c.terms.dropout:
            weights = jnp.where(kept_pairs(c.terms, optional, place, queries, keys), weights, 0.0)

        def add() -> None:
            v = _values(c, place, mask, value[0, 0, keys], keys)
            acc[:, queries] = acc[:, queries] * shrink + _product(v, weights.astype(v.dtype), (0, 0))

        return add

    if not parts:
        return
    highest, add = multiply(0), None
    for n in range(len(parts)):
        following = multiply(n + 1) if n + 1 < len(parts) else None
        if add is not None:
            add()
        add = exponentiate(n, highest)
        highest = following
    add()


def _parts(c: Config, mask: bool | Pattern) -> list[Part]:
    """Those of a step in which a query sees a key."""
    parts = [
        Part(slice(q, q + c.q_part), slice(k, k + c.kv_part))
        for k in range(0, c.kv_block, c.kv_part)
        for q in range(0, c.q_block, c.q_part)
    ]
    return [x for x in parts if mask.sees(*x) is not False] if isinstance(mask, Pattern) else parts


def _logits(
    c: Config, refs: dict[str, Any], place: Place, queries: slice, keys: slice, product: Array, mask: Any
) -> Array:
    """Masked logits, to be multiplied by ``c.unit`` for units of log 2."""
    if not c.scaled_late:
        return finished_logits(c.terms, refs, place, queries, keys, base_logits(c.terms, product), mask)
    s = product if c.terms.cap is None else jnp.tanh(product * (c.terms.scale / c.terms.cap))
    seen = seen_pairs(c.terms, refs, place, queries, keys, mask)
    return s if seen is None else jnp.where(seen, s, -jnp.inf)


def _scaled(c: Config, x: Array) -> Array:
    return x * c.unit if c.scaled_late else x


def _values(c: Config, place: Place, mask: bool | Pattern, v: Array, keys: slice) -> Array:
    """Values, with zeros behind the last key, where memory holds anything."""
    if c.terms.kv_len % c.kv_block == 0 or mask is False:
        return v
    if isinstance(mask, Pattern):
        end = c.kv_block if mask.keys is None else mask.keys
        if keys.stop <= end:
            return v
    else:
        end = c.terms.kv_len - place.key
    row = lax.broadcasted_iota(jnp.int32, v.shape, 0)
    return jnp.where(row < end - keys.start, v.astype(jnp.float32), 0.0).astype(v.dtype)


def _finish(c: Config, sink: Any, out, lse, top, total, acc) -> None:
    """Writes a block's output and lse."""
    highest, weights = top[...] * c.unit, total[...]
    if sink is not None:
        joined = jnp.maximum(highest, sink)
        reference = jnp.where(joined == -jnp.inf, 0.0, joined)
        shrink = jnp.exp2(highest - reference)
        weights = weights * shrink + jnp.exp2(sink - reference)
        highest = joined
    else:
        shrink = 1.0
    nothing = weights == 0.0
    share = jnp.where(nothing, 0.0, shrink / (jnp.where(nothing, 1.0, weights) * (1.0 - c.terms.dropout)))
    out[0, 0] = (acc[...] * share).astype(out.dtype)
    # Of a row that sees nothing the maximum is -inf.
    lse[0, 0] = highest * math.log(2) + jnp.log(jnp.where(nothing, 1.0, weights))


def _product(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """In float32, contracted along these axes; operands of float32 are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    contracted = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, contracted, precision=precision, preferred_element_type=jnp.float32)
