"""The backward: one kernel for the gradients of queries, keys and values, five products a pair of blocks.

Tiles of logits are transposed, ``[keys, queries]``, so lse and slope are rows along the lanes. The grid goes through the steps
of a query head, block of queries by block of queries. The gradient of a block of queries, transposed, is summed in vector
memory while its steps last; those of the keys and values stay there for all steps of all query heads of their group. So nothing
but results goes to memory, and every sum has one order.

Where vector memory does not hold the gradients of all keys, the keys are cut into spans, which run one after another; each
adds to the gradient of the queries, float32 then, that the ones before it left.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu.call import launch
from ejkernel.kernels._pallas.tpu.flash_attention.backward_steps import Lists
from ejkernel.kernels._pallas.tpu.flash_attention.plan import (
    FIRST,
    KIND_SHIFT,
    LAST,
    MASKED,
    PATTERN,
    WHOLE,
    Pattern,
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
)
from ejkernel.kernels._pallas.tpu.generations import Generation
from ejkernel.kernels.common.softmax import LOG2E

# Which axes are contracted: the last of both, the last and the first.
BY_ROWS = (((1,), (1,)), ((), ()))
PLAIN = (((1,), (0,)), ((), ()))
# Rows that are cleared or rounded at a time.
CHUNK = 128
# The side of the largest tile whose logits are computed at once.
LARGEST_TILE = 1024


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is static about a call.

    Attributes:
        terms: of its logits.
        heads, group: query heads, and those of a key head.
        q_block, kv_block: of a step.
        part: the side of a tile of a masked step.
        own_batches, own_heads: whether batch entries, and heads, have lists of their own.
        majors: blocks of queries.
        minors: blocks of keys of a span.
        room: steps for which a list has room.
        masked: whether there are masked steps without a pattern.
        whole: whether there are whole steps.
        patterns: of masked steps.
        adds: whether the gradient of the queries is added to what there is.
        queries, keys: whether their gradients are wanted; that of the values counts as keys.
    """

    terms: Terms
    heads: int
    group: int
    q_block: int
    kv_block: int
    part: int
    own_batches: bool
    own_heads: bool
    majors: int
    minors: int
    room: int
    masked: bool
    whole: bool
    patterns: tuple[Pattern, ...]
    adds: bool
    queries: bool
    keys: bool

    @property
    def masks(self) -> dict[int, bool | Pattern]:
        """The kinds of steps that there are, with their masks."""
        plain = {WHOLE: False} if self.whole else {}
        if self.masked:
            plain[MASKED] = True
        return plain | {PATTERN + n: pattern for n, pattern in enumerate(self.patterns)}

    def step(self, b: Any, kv_head: Any, g: Any, t: Any, prefetched: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Batch entry, query head, block of queries, block of keys and flags of a step."""
        span, major, minor, flags = prefetched
        head = kv_head * self.group + g
        own = b if self.own_batches else 0
        if self.own_heads:
            own = own * self.heads + head
        t = own * self.room + t
        return b, head, major[t], span[0] * self.minors + minor[t], flags[t]


def product(a: Array, b: Array, contracted: Any) -> Array:
    """In float32; operands of float32 are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, contracted, precision=precision, preferred_element_type=jnp.float32)


def call(
    c: Config,
    lists: Lists,
    span: Any,
    tensors: list[Array],
    optional: list[Array],
    sums: list[Array],
    *,
    generation: Generation,
    costs: dict[str, int],
    interpret: Any,
) -> tuple[Array, ...]:
    """The wanted gradients, heads before positions.

    ``span``: the index of the keys' span; ``tensors``: query, key, value, the output's cotangent, all
    ``[B, H, S, D]`` with whole blocks, and ``[B, H, 2, Sq]`` of lse in base 2 and slope; ``sums``: with several spans the
    gradients so far, which the results take the place of.
    """
    query, key, value = tensors[:3]
    batch, heads, _, dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[3]
    span_keys = c.minors * c.kv_block

    def at(*grid):
        (b, kv_head, g, t), prefetched = grid[:4], grid[4:]
        return c.step(b, kv_head, g, t, prefetched)[:4]

    def of_queries(*grid):
        b, head, i, _ = at(*grid)
        return b, head, i, 0

    def of_keys(*grid):
        b, _, _, j = at(*grid)
        return b, grid[1], j, 0

    def of_rows(*grid):
        b, head, i, _ = at(*grid)
        return b, head, 0, i

    def of_span(*grid):
        return grid[0], grid[1], grid[4][0], 0

    def queries(width):
        return pl.BlockSpec((1, 1, c.q_block, width), of_queries)

    def keys(width):
        return pl.BlockSpec((1, 1, c.kv_block, width), of_keys)

    def span_of(width):
        return pl.BlockSpec((1, 1, span_keys, width), of_span, pipeline_mode=pl.Buffered(1))

    in_specs = [queries(dim), keys(dim), keys(value_dim), queries(value_dim)]
    in_specs.append(pl.BlockSpec((1, 1, 2, c.q_block), of_rows))
    in_specs += block_specs(c.terms, c.q_block, c.kv_block, at)
    out_shape, out_specs, scratch = [], [], []
    if c.queries:
        kind = jnp.float32 if c.adds else query.dtype
        out_shape.append(jax.ShapeDtypeStruct(query.shape, kind))
        out_specs.append(queries(dim))
        scratch.append(pltpu.VMEM((dim, c.q_block), jnp.float32))
    if c.keys:
        for x in (key, value):
            out_shape.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
            out_specs.append(span_of(x.shape[3]))
            scratch.append(pltpu.VMEM((span_keys, x.shape[3]), jnp.float32))
    if c.terms.of_pairs:
        scratch.append(pltpu.VMEM(tuple(min(LARGEST_TILE, size) for size in (c.kv_block, c.q_block)), jnp.float32))
    prefetched = [jnp.reshape(jnp.asarray(x, jnp.int32), -1) for x in (span, *lists[:3])]
    arrays = [*prefetched, *tensors, *optional, *sums]
    if sums:
        # Of the keys' gradients nothing is read: this span's take their place in the arrays of all spans.
        in_specs += [queries(dim)] if c.queries else []
        in_specs += [pl.BlockSpec(memory_space=pltpu.HBM)] * (len(sums) - c.queries)
    first = len(arrays) - len(sums)
    return launch(
        functools.partial(_kernel, c),
        arrays,
        name="flash_attention_backward",
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(batch, kv_heads, heads // kv_heads, lists.count),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        generation=generation,
        aliases={first + n: n for n in range(len(sums))},
        interpret=interpret,
        **costs,
    )


def _kernel(c: Config, *refs: Any) -> None:
    given = iter(refs)

    def take(count: int) -> list[Any]:
        return [next(given) for _ in range(count)]

    prefetched = take(4)
    tensors = take(5)
    optional = of_names(c.terms, take(len(c.terms.names)))
    before = take(c.queries + 2 * c.keys) if c.adds else []
    dq_ref = take(1)[0] if c.queries else None
    key_refs = take(2) if c.keys else []
    dq_sum = take(1)[0] if c.queries else None
    key_sums = take(2) if c.keys else []
    turned = take(1)[0] if c.terms.of_pairs else None

    g = pl.program_id(2)
    b, head, i, j, flags = c.step(pl.program_id(0), pl.program_id(1), g, pl.program_id(3), prefetched)
    first, last = (flags & FIRST) != 0, (flags & LAST) != 0
    here = j - prefetched[0][0] * c.minors
    place = Place(batch=b, head=head, query=i * c.q_block, key=j * c.kv_block)
    kept = 1 - c.terms.dropout

    if c.keys:

        @pl.when(first & (i == 0) & (g == 0))
        def _clear():
            def clear(at):
                for ref in key_sums:
                    ref[at, :] = jnp.zeros((CHUNK, ref.shape[1]), jnp.float32)

            _by_chunks(c, clear)

    if c.queries:

        @pl.when(first)
        def _clear_queries():
            dq_sum[...] = jnp.zeros_like(dq_sum)

    for kind, mask in c.masks.items():

        @pl.when((flags >> KIND_SHIFT) == kind)
        def _step(mask=mask):
            # A pattern hides whole tiles, or nothing of one; what else masks is known to the device alone.
            most = c.part if isinstance(mask, Pattern) else LARGEST_TILE
            rows, keys = (min(most, size) for size in (c.q_block, c.kv_block))
            key_columns = tensors[1][0, 0].T if c.queries else None
            for k in range(0, c.kv_block, keys):
                for q in range(0, c.q_block, rows):
                    of_keys, of_queries = slice(k, min(k + keys, c.kv_block)), slice(q, min(q + rows, c.q_block))
                    if isinstance(mask, Pattern) and mask.sees(of_queries, of_keys) is False:
                        continue
                    read = optional
                    if turned is not None:
                        sides = (slice(0, x.stop - x.start) for x in (of_keys, of_queries))
                        read = {**optional, TURNED: turned.at[*sides]}
                    _tile(c, tensors, read, key_columns, place, here, of_queries, of_keys, mask, dq_sum, key_sums)

    scale = c.terms.scale / kept
    if c.queries:

        @pl.when(last)
        def _store_queries():
            dq = dq_sum[...].T * scale
            dq_ref[0, 0] = ((before[0][0, 0] + dq) if c.adds else dq).astype(dq_ref.dtype)

    if c.keys:

        @pl.when(last & (i == c.majors - 1) & (g == c.group - 1))
        def _store():
            def store(at):
                for ref, total, factor in zip(key_refs, key_sums, (scale, 1 / kept), strict=True):
                    ref[0, 0, at, :] = (total[at, :] * factor).astype(ref.dtype)

            _by_chunks(c, store)


def _by_chunks(c: Config, run: Any) -> None:
    """For each chunk of a span's keys."""
    lax.fori_loop(
        jnp.int32(0),
        jnp.int32(c.minors * c.kv_block // CHUNK),
        lambda n, _: (run(pl.ds(pl.multiple_of(n * CHUNK, CHUNK), CHUNK)), jnp.int32(0))[1],
        jnp.int32(0),
    )


def _tile(
    c: Config,
    tensors: list[Any],
    optional: dict[str, Any],
    key_columns: Array | None,
    place: Place,
    here: Any,
    queries: slice,
    keys: slice,
    mask: bool | Pattern,
    dq_sum: Any,
    key_sums: list[Any],
) -> None:
    """Adds what a tile's pairs give. Gradients are without the scale, and without dropout's factor."""
    q_ref, k_ref, v_ref, do_ref, rows_ref = tensors
    q, do = q_ref[0, 0, queries, :], do_ref[0, 0, queries, :]
    k, v = k_ref[0, 0, keys, :], v_ref[0, 0, keys, :]
    lse, slope = rows_ref[0, 0, 0:1, queries], rows_ref[0, 0, 1:2, queries]
    ds, kept = gradient_of_logits(c.terms, optional, place, queries, keys, mask, q, k, v, do, lse, slope)
    ds = ds.astype(k.dtype)
    if c.keys:
        dk_sum, dv_sum = key_sums
        at = pl.ds(pl.multiple_of(here * c.kv_block, CHUNK) + keys.start, keys.stop - keys.start)
        dv_sum[at, :] += product(kept.astype(v.dtype), do, PLAIN)
        dk_sum[at, :] += product(ds, q, PLAIN)
    if c.queries:
        dq_sum[:, queries] += product(key_columns[:, keys], ds, PLAIN)


def gradient_of_logits(
    c: Terms,
    optional: dict[str, Any],
    place: Place,
    queries: slice,
    keys: slice,
    mask: bool | Pattern,
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    lse: Array,
    slope: Array,
    capped: bool = True,
) -> tuple[Array, Array]:
    """The gradient of logits, and the weights that dropout keeps, ``[keys, queries]`` in float32.

    The gradient is that of the products of queries and keys, without the scale; with ``capped`` False, that of the logits behind
    the cap. With dropout ``slope`` comes multiplied by ``1 - p``, and so are both results.
    """
    base = base_logits(c, product(k, q, BY_ROWS))
    s = finished_logits(c, optional, place, queries, keys, base, mask)
    if mask is True and c.bias is not None and c.bias[2]:
        # Behind the last query a block of the bias holds anything.
        row = lax.broadcasted_iota(jnp.int32, (1, s.shape[1]), 1) + (place.query + queries.start)
        s = jnp.where(row < c.q_len, s, -jnp.inf)
    weights = jnp.exp2(s - lse)
    dweights = product(v, do, BY_ROWS)
    kept = weights
    if c.dropout:
        keep = kept_pairs(c, optional, place, queries, keys)
        kept, dweights = jnp.where(keep, weights, 0), jnp.where(keep, dweights, 0)
    ds = weights * (dweights - slope)
    if c.cap is not None and capped:
        tanh = base * (1 / (c.cap * LOG2E))
        ds = ds * (1 - tanh * tanh)
    return ds, kept
