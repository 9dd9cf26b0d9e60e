"""The backward on the host: which kernels run, the plan of their steps, and what is left to XLA.

Heads of 64 to 128 take one kernel for all gradients (``backward``). Wider ones leave it no registers: they and others
take a kernel for queries and one for keys (``backward_wide``), of which only those run whose
gradients are wanted.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.contracts.params import BwdParams
from ejkernel.kernels._pallas.gpu.flash_attention_sm90 import backward as single_kernel
from ejkernel.kernels._pallas.gpu.flash_attention_sm90 import (
    backward_bias,
    backward_wide_keys,
    backward_wide_queries,
)
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.backward_order import head_parts
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.backward_state import BackwardConfig
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.backward_wide import WideConfig
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.padding import without_padding
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.pairs import pair_arrays, word_size
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.parameters import (
    BACKWARD_BLOCK,
    backward_effective,
    in_panels,
    single,
    whole_columns,
)
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import (
    CORE_ROWS,
    ROWS,
    WARPS_PER_WARPGROUP,
    has_whole_rows,
    key_intervals,
    longest_first,
    mask_vectors,
    pad_columns,
    pad_rows,
    padded,
    segment_ids,
    statics,
)
from ejkernel.kernels.common import visibility
from ejkernel.kernels.common.softmax import LOG2E, sink_gradient, softmax_residuals


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
    interpret: Any = False,
) -> dict[str, Array]:
    """The wanted gradients, from the residuals ``(out, lse)``; ``interpret``: without a GPU.

    Whatever ``params`` ask for, the kernels run with the one set that they have, see ``backward_effective``.
    """
    dout, finite_lse, slope, arrays = softmax_residuals(arrays, out, lse, dout, dlse)
    arrays, dropped = without_padding(arrays, spec, backward=True)
    widths = {name: arrays[name].shape[3] for name in ("query", "key", "value")}
    if not in_panels(widths["query"], widths["value"]):
        arrays, dout = _without_panels(arrays, dout)
    query, value = arrays["query"], arrays["value"]
    in_one = single(query.shape[3], value.shape[3])
    # The single kernel copies panels of heads of one head dim, whose rows need no whole tiles.
    parts = _parts(arrays, spec)
    by_panels = in_one and query.shape[3] == value.shape[3] and parts == 1
    inputs, optional = kernel_inputs(arrays, dout, lse, slope, in_one, whole_rows=not by_panels)

    def with_pairs(by_keys):
        """What kernels read beside the inputs; ``by_keys``: their tiles have keys by queries."""
        rows, keys = _padded_lengths(arrays)
        more = pair_arrays(arrays, rows, keys, word_size(ROWS), copy=bool(interpret), by_keys=by_keys)
        return {**optional, **more}

    of_kernels = wanted & {"query", "key", "value"}
    grads = {}
    if of_kernels and in_one:
        params = backward_effective(query.shape[3], value.shape[3])
        grads = _all_at_once(arrays, spec, params, parts, inputs, with_pairs(True), interpret)
    elif of_kernels:
        grads = _one_by_one(arrays, spec, inputs, with_pairs, of_kernels, interpret)
    grads = {name: x[:, : arrays[name].shape[1], :, : widths[name]] for name, x in grads.items()}
    if "bias" in wanted:
        grads["bias"] = _of_bias(arrays, spec, dout, lse, slope, with_pairs(False), interpret)
    if dropped:
        before = ((0, 0), (dropped, 0), (0, 0), (0, 0))
        grads |= {name: jnp.pad(grads[name], before) for name in ("key", "value") if name in grads}
    if "softmax_aux" in wanted:
        grads["softmax_aux"] = sink_gradient(arrays["softmax_aux"], finite_lse, slope)
    return {name: grads[name] for name in wanted}


def _without_panels(arrays: dict[str, Array], dout: Array) -> tuple[dict[str, Array], Array]:
    """For kernels whose heads do not lie in panels: columns of zeros, up to a head dim that they take."""
    tensors = {name: arrays[name] for name in ("query", "key", "value")} | {"dout": dout}
    tensors = {name: pad_columns(x, whole_columns(x.shape[3])) for name, x in tensors.items()}
    dout = tensors.pop("dout")
    return {**arrays, **tensors}, dout


def _padded_lengths(arrays: dict[str, Array]) -> list[int]:
    """Rows and keys up to which kernels read vectors."""
    return [-(-arrays[name].shape[1] // BACKWARD_BLOCK) * BACKWARD_BLOCK + ROWS for name in ("query", "key")]


def kernel_inputs(
    arrays: dict[str, Array],
    dout: Array,
    lse: Array,
    slope: Array,
    in_one: bool,
    exponent: int | None = None,
    whole_rows: bool = True,
):
    """What the kernels read of tensors and rows, and the arrays that masks read; ``in_one``: for the single kernel.

    ``exponent``: for the others, the power of two that weights are multiplied by, if not ``weight_exponent``. ``whole_rows``:
    whether they need rows to fill whole tiles.
    """
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    rows, keys = _padded_lengths(arrays)
    # A row that sees nothing, or lies past the end, weighs nothing.
    base2 = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)
    if in_one:
        by_row = [padded(-base2, rows, -jnp.inf), padded(-slope, rows)]
    else:
        exponent = weight_exponent(query.dtype) if exponent is None else exponent
        by_row = [padded(base2 - exponent, rows, jnp.inf), padded(slope, rows)]
    tensors = query, key, value, dout
    if whole_rows:
        tensors = map(pad_rows, tensors)
    return [*tensors, jnp.stack(by_row, 2)], mask_vectors(arrays, rows, keys)


def weight_exponent(dtype: Any) -> int:
    """The power of two that weights of wide heads are multiplied by.

    They are at most 2**15 then, half of float16's range. None for float16 inputs: their dS is float16 too, and would
    leave that range.
    """
    return 15 if dtype == jnp.bfloat16 else 0


def ascending(dim: int, right: int | None) -> bool:
    """Whether the single kernel loops over queries from the first, and starts with the last keys.

    Measured: with a causal mask faster by 7 % at 64, slower at 128.
    """
    return dim == ROWS and right is not None


# One kernel


def _parts(arrays, spec) -> int:
    """Among how many CTAs the query heads of one key head are divided."""
    if {"kv_start", "q_segment_ids"} & arrays.keys():
        return 1
    _, q_len, heads, dim = arrays["query"].shape
    return head_parts(dim, heads // arrays["key"].shape[2], spec.window, q_len)


def _all_at_once(arrays, spec, params: BwdParams, parts: int, inputs, optional, interpret) -> dict[str, Array]:
    dim, step = arrays["query"].shape[3], params.q_blocksize
    table, (head, tail), visitors, visited = _visits(arrays, spec, params.kv_blocksize, step)
    of_call = statics(arrays, spec)
    c = BackwardConfig(
        consumers=params.num_warps // WARPS_PER_WARPGROUP,
        step=step,
        stages=params.num_stages,
        head=head,
        tail=tail,
        partial_step=bool(arrays["query"].shape[1] % step),
        ascending=ascending(dim, spec.window[1]),
        parts=parts,
        whole_rows=has_whole_rows(*(x.shape[1] for x in inputs[:2])),
        interpreted=bool(interpret),
        **{**of_call, "group": of_call["group"] // parts},
    )
    dq, dk, dv = single_kernel.call(c, *inputs, table, visitors, optional, interpret=interpret)
    if interpret:
        dq = jnp.where(_by_row(visited, step, dq.shape[2]), dq, 0).sum(0)
    seen = _by_row(visited.any(1), step, dq.shape[1])
    if parts > 1:
        dk, dv = (
            (x.sum(0) * factor).astype(arrays["key"].dtype) for x, factor in ((dk, c.scale), (dv, 1 / (1 - c.dropout)))
        )
    return {"query": jnp.where(seen, dq * c.scale, 0).astype(dk.dtype), "key": dk, "value": dv}


def _by_row(visited: Array, step: int, rows: int) -> Array:
    """``[B|1, (blocks,) steps]`` as ``[(blocks,) B|1, rows, 1, 1]``."""
    visited = jnp.repeat(jnp.asarray(visited), step, -1)[..., :rows, None, None]
    return jnp.moveaxis(visited, 1, 0) if visited.ndim == 5 else visited


def _visits(arrays: dict[str, Array], spec: Any, block: int, step: int):
    """For each block of keys its steps over queries; whether any has masked steps at first, at last.

    Also, for each step of queries, the first and the last block of keys that visit it, and which do.
    """
    ranges = visibility.query_ranges(*key_intervals(arrays, spec), segment_ids(arrays), block, arrays["key"].shape[1])
    begin, end = ranges.begin // step * step, ranges.end
    # The blocks that visit a step must be neighbours: neither end of their ranges may decrease from block to block.
    if isinstance(begin, np.ndarray):
        begin, end = np.minimum.accumulate(begin[:, ::-1], 1)[:, ::-1], np.maximum.accumulate(end, 1)
    else:
        begin, end = jax.lax.cummin(begin, 1, reverse=True), jax.lax.cummax(end, 1)
    plan = visibility.plan_walk(ranges._replace(begin=begin, end=end), step, 1, False)
    masked = [not isinstance(x, np.ndarray) or bool(x.any()) for x in (plan.head, plan.tail)]
    at = np.arange(0, arrays["query"].shape[1], step)
    visited = (begin[..., None] <= at) & (at < end[..., None])
    visitors = (end[..., None] <= at).sum(1), begin.shape[1] - 1 - (begin[..., None] > at).sum(1)
    return visibility.table(plan)[0], masked, jnp.stack(visitors, -1).astype(jnp.int32), visited


# One kernel for queries, one for keys


def _one_by_one(arrays, spec, inputs, with_pairs, wanted, interpret) -> dict[str, Array]:
    start, stop = key_intervals(arrays, spec)
    segments, kv_len = segment_ids(arrays), arrays["key"].shape[1]
    common = {**statics(arrays, spec), "weight_exponent": weight_exponent(arrays["query"].dtype)}

    # A step of a mask begins with a whole word of it.
    unit = word_size(ROWS) if "attention_mask" in arrays else CORE_ROWS

    def run(kernel, ranges, by_keys):
        ranges = ranges._replace(begin=ranges.begin // unit * unit)
        plan = visibility.plan_walk(ranges, ROWS, 1, False)
        _, unmasked, masked = visibility.table(plan)
        c = WideConfig(unmasked=unmasked, masked=masked, interpreted=bool(interpret), **common)
        return kernel(c, *inputs, longest_first(plan), with_pairs(by_keys), interpret=interpret)

    grads = {}
    if "query" in wanted:
        ranges = visibility.key_ranges(start, stop, segments, BACKWARD_BLOCK, kv_len, shifted=False)
        grads["query"] = run(backward_wide_queries.query_gradient, ranges, by_keys=False)
    if wanted & {"key", "value"}:
        ranges = visibility.query_ranges(start, stop, segments, ROWS, kv_len)
        grads["key"], grads["value"] = run(backward_wide_keys.key_gradients, ranges, by_keys=True)
    return grads


# One kernel for the bias


def _of_bias(arrays, spec, dout, lse, slope, optional, interpret) -> Array:
    arrays, dout = _without_panels(arrays, dout)
    inputs, _ = kernel_inputs(arrays, dout, lse, slope, in_one=False, exponent=0)
    ranges = visibility.key_ranges(
        *key_intervals(arrays, spec), segment_ids(arrays), BACKWARD_BLOCK, arrays["key"].shape[1], shifted=False
    )
    of_call = statics(arrays, spec)
    c = WideConfig(unmasked=False, masked=True, weight_exponent=0, interpreted=bool(interpret), **of_call)
    return backward_bias.bias_gradient(c, *inputs, ranges, arrays["bias"], optional, interpret=interpret)
