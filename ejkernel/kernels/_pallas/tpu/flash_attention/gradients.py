"""The backward on the host: what kernels read, their steps, and what is left to XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.contracts.params import BwdParams
from ejkernel.kernels._pallas.tpu.flash_attention import backward as kernel
from ejkernel.kernels._pallas.tpu.flash_attention import backward_bias
from ejkernel.kernels._pallas.tpu.flash_attention.backward_parameters import effective, spans
from ejkernel.kernels._pallas.tpu.flash_attention.backward_steps import Lists, make_lists, make_span_lists
from ejkernel.kernels._pallas.tpu.flash_attention.plan import (
    MASKED,
    MOST_PATTERNS,
    WHOLE,
    block_kinds,
    key_intervals,
    segment_ids,
    with_patterns,
)
from ejkernel.kernels._pallas.tpu.flash_attention.terms import inputs, terms_of
from ejkernel.kernels._pallas.tpu.generations import generation_of
from ejkernel.kernels.common.intervals import intervals
from ejkernel.kernels.common.softmax import LOG2E, sink_gradient, softmax_residuals
from ejkernel.kernels.common.unseen import seen_keys, without_unseen
from ejkernel.kernels.common.varying import vary_over, varying_axes

# The side of a tile of a masked step: those that a pattern hides whole cost nothing.
PART = 512
# The sides of a block of the kernel for a bias, at most: its blocks of the bias and of the gradient are float32.
BIAS_BLOCK = 512


def backward(
    arrays: dict[str, Array],
    spec: Any,
    params: BwdParams,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
    wanted: frozenset[str],
    *,
    device: Any = None,
    interpret: Any = False,
) -> dict[str, Array]:
    """The wanted gradients, from the residuals ``(out, lse)``."""
    start, stop = key_intervals(arrays, spec)
    nothing = isinstance(start, np.ndarray) and bool((start >= stop).any())
    dout, finite_lse, slope, arrays = softmax_residuals(arrays, out, lse, dout, dlse, rows_may_see_nothing=nothing)
    arrays = _without_unseen(arrays, spec)
    params = effective(arrays, spec, params, device)
    blocks = params.q_blocksize, params.kv_blocksize
    rest = arrays, spec, dout, finite_lse, slope, device, interpret
    grads = {}
    if wanted & {"query", "key", "value"}:
        call = Call(*blocks, *rest)
        grads = call.tensor_gradients(wanted, *with_patterns(call.kinds, arrays, spec, *blocks, call.partial_rows))
    if "bias" in wanted:
        grads["bias"] = Call(*(min(block, BIAS_BLOCK) for block in blocks), *rest).bias_gradient()
    if "softmax_aux" in wanted:
        grads["softmax_aux"] = sink_gradient(arrays["softmax_aux"], finite_lse, slope)
    return {name: grads[name] for name in wanted}


def _without_unseen(arrays: dict[str, Array], spec: Any) -> dict[str, Array]:
    """Keys and values that no query sees as zeros: they may be NaN."""
    arrays = without_unseen(arrays, spec)
    intervals_of_keys, kv_len = key_intervals(arrays, spec), arrays["key"].shape[1]
    if "q_segment_ids" not in arrays and isinstance(intervals_of_keys[0], np.ndarray):
        start, stop = intervals_of_keys
        place = np.arange(kv_len)
        # Rows whose stop, and whose start, is at or before a key.
        if (np.searchsorted(stop[0], place, "right") < np.searchsorted(start[0], place, "right")).all():
            return arrays
    seen = seen_keys(*intervals_of_keys, segment_ids(arrays), kv_len)[..., None, None]
    return {**arrays, **{name: jnp.where(seen, arrays[name], 0) for name in ("key", "value")}}


class Call:
    """A call's arrays as a kernel with these blocks of queries and keys reads them."""

    def __init__(self, rows, keys, arrays, spec, dout, finite_lse, slope, device, interpret) -> None:
        self.rows, self.keys, self.arrays, self.spec = rows, keys, arrays, spec
        self.device, self.generation, self.interpret = device, generation_of(device), interpret
        self.terms = terms_of(arrays, spec)
        self.dout = dout
        # Rows behind the last query are zeros, and so is what they give.
        self.by_row = _padded(jnp.stack([finite_lse * LOG2E, slope * (1 - self.terms.dropout)], 2), 3, self.rows)
        bias = arrays.get("bias")
        self.partial_rows = bias is None or bias.shape[2] == 1

    @property
    def kinds(self) -> Any:
        """Of blocks, see ``plan.block_kinds``."""
        return block_kinds(self.arrays, self.spec, self.rows, self.keys, partial_rows=self.partial_rows)

    def tensors(self, key_step: int) -> list[Array]:
        """Query, key, value, the output's cotangent, ``[B, H, S, D]`` in whole blocks, and the rows."""
        a = self.arrays
        of_queries = [_padded(x.swapaxes(1, 2), 2, self.rows) for x in (a["query"], self.dout)]
        of_keys = [_padded(a[name].swapaxes(1, 2), 2, key_step) for name in ("key", "value")]
        return [of_queries[0], *of_keys, of_queries[1], self.by_row]

    def optional(self) -> list[Array]:
        """What decides logits beside the products."""
        return inputs(self.terms, self.arrays, self.spec, self.rows, self.keys)

    def tensor_gradients(self, wanted: frozenset[str], kinds: Any, patterns: tuple) -> dict[str, Array]:
        """Of query, key and value, those that are wanted; from a table of kinds of blocks, with patterns."""
        query, key, value = (self.arrays[name] for name in ("query", "key", "value"))
        count = spans(self.arrays, self.rows, self.keys, self.device)
        minors = -(-kinds.shape[3] // count)
        lists = make_lists(kinds) if count == 1 else make_span_lists(kinds, count)
        known = isinstance(kinds, np.ndarray)
        c = kernel.Config(
            terms=self.terms,
            heads=query.shape[2],
            group=query.shape[2] // key.shape[2],
            q_block=self.rows,
            kv_block=self.keys,
            part=PART,
            own_batches=kinds.shape[0] > 1,
            own_heads=kinds.shape[1] > 1,
            majors=kinds.shape[2],
            minors=minors,
            room=lists.major.shape[-1] // (kinds.shape[0] * kinds.shape[1]),
            # Unless patterns stand for all that is masked.
            masked=bool((kinds == MASKED).any()) if known else not 0 < len(patterns) < MOST_PATTERNS,
            whole=not known or bool((kinds == WHOLE).any()),
            patterns=patterns,
            adds=count > 1,
            queries="query" in wanted,
            keys=bool(wanted & {"key", "value"}),
        )
        tensors, optional = self.tensors(minors * self.keys), self.optional()
        told = costs(self.arrays, self.spec, self.dout, 3 * query.shape[3] + 2 * value.shape[3], count)

        def run(lists: Lists, span: Any, sums: list[Array]) -> tuple[Array, ...]:
            return kernel.call(
                c,
                lists,
                span,
                tensors,
                optional,
                sums,
                generation=self.generation,
                costs=told,
                interpret=self.interpret,
            )

        names = (["query"] if c.queries else []) + (["key", "value"] if c.keys else [])
        if count == 1:
            sums = run(lists, jnp.int32(0), [])
        else:
            like = dict(zip(("query", "key", "value"), tensors, strict=False))
            axes = varying_axes(*tensors, *optional, *jax.tree.leaves(lists))
            sums = [
                vary_over(jnp.zeros(like[n].shape, jnp.float32 if n == "query" else key.dtype), axes) for n in names
            ]

            def body(span, sums):
                own = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, span, keepdims=False), lists)
                return list(run(own, span, sums))

            sums = lax.fori_loop(jnp.int32(0), jnp.int32(count), body, sums)
        found = dict(zip(names, sums, strict=True))
        return {
            name: found[name][:, :, : self.arrays[name].shape[1]].swapaxes(1, 2).astype(query.dtype)
            for name in wanted & found.keys()
        }

    def bias_gradient(self) -> Array:
        """In the bias's shape and dtype."""
        query, value, bias = (self.arrays[name] for name in ("query", "value", "bias"))
        own, kinds = self.terms.bias, self.kinds
        lists = backward_bias.steps_of(kinds, own)
        lists_of_batch = kinds.shape[0] > 1 and own[0]
        c = backward_bias.BiasConfig(
            terms=self.terms,
            group=query.shape[2] // value.shape[2],
            q_block=self.rows,
            kv_block=self.keys,
            own=own,
            shared_heads=1 if own[1] else query.shape[2],
            own_lists=lists_of_batch,
            room=lists.major.size // (kinds.shape[0] if lists_of_batch else 1),
            kv_blocks=kinds.shape[3],
        )
        return backward_bias.call(
            c,
            lists,
            self.tensors(self.keys),
            self.optional(),
            bias,
            generation=self.generation,
            costs=costs(self.arrays, self.spec, self.dout, query.shape[3] + value.shape[3]),
            interpret=self.interpret,
        )


def costs(arrays: dict[str, Array], spec: Any, dout: Array, head_dims: int, launches: int = 1) -> dict[str, int]:
    """What the compiler is told of a launch: products over so many dims a visible pair, every array and its gradient once."""
    batch, q_len, heads, _ = arrays["query"].shape
    start, stop = intervals(spec.window, q_len, arrays["key"].shape[1])
    pairs = batch * heads * int((stop - start).sum(dtype=np.int64))
    size = sum(x.size * x.dtype.itemsize for x in (*jax.tree.leaves(arrays), dout))
    return {
        "flops": 2 * pairs * head_dims // launches,
        "transcendentals": pairs // launches,
        "bytes_accessed": 2 * size // launches,
    }


def _padded(x: Array, axis: int, step: int) -> Array:
    """With zeros up to a multiple of ``step``."""
    missing = -x.shape[axis] % step
    return jnp.pad(x, [(0, missing if n == axis else 0) for n in range(x.ndim)]) if missing else x
