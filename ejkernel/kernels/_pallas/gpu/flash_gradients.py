"""The backward on Hopper: which kernels run, the plan of their walks, and what is left to XLA.

Heads of 64 and 128 take one kernel for all gradients (``flash_backward``). Wider ones leave it no registers, others do not
fill its squares: they take a kernel for queries and one for keys (``flash_backward_wide``), of which only those run whose
gradients are wanted.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.contracts.params import BwdParams
from ejkernel.kernels._pallas.gpu.flash_plan import (
    LOG2E,
    SIDE,
    WARPS_A_GROUP,
    in_eights,
    key_intervals,
    longest_first,
    mask_vectors,
    padded,
    segment_ids,
    statics,
    whole_tiles,
    without_padding,
)
from ejkernel.kernels.common import visibility
from ejkernel.kernels.common.softmax import sink_gradient, softmax_residuals

# Warpgroups that compute, in every kernel, and the rows of a block that they share.
CONSUMERS = 2
BLOCK = SIDE * CONSUMERS
# Slots of the single kernel's ring: as many as fit into shared memory.
STAGES = 2


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

    All of ``params`` are clipped to the one set that the kernels take, see ``defaults``.
    """
    dout, finite_lse, slope, arrays = softmax_residuals(arrays, out, lse, dout, dlse)
    arrays, hidden = without_padding(arrays, spec, backward=True)
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    rows, keys = (-(-x.shape[1] // BLOCK) * BLOCK + SIDE for x in (query, key))
    # A row that sees nothing, or lies past the end, weighs nothing.
    base2 = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)
    in_one = single(query.shape[3], value.shape[3])
    if in_one:
        by_row = [padded(-base2, rows, -jnp.inf), padded(-slope, rows)]
    else:
        by_row = [padded(base2 - boost_of(query.dtype), rows, jnp.inf), padded(slope, rows)]
    inputs = [*map(in_eights, (query, key, value, dout)), jnp.stack(by_row, 2)]
    optional = mask_vectors(arrays, rows, keys)
    of_kernels = wanted - {"softmax_aux"}
    grads = {}
    if of_kernels and in_one:
        grads = _all_at_once(arrays, spec, inputs, optional, interpret)
    elif of_kernels:
        grads = _one_by_one(arrays, spec, inputs, optional, of_kernels, interpret)
    grads = {name: x[:, : arrays[name].shape[1]] for name, x in grads.items()}
    if hidden:
        before = ((0, 0), (hidden, 0), (0, 0), (0, 0))
        grads |= {name: jnp.pad(grads[name], before) for name in ("key", "value") if name in grads}
    if "softmax_aux" in wanted:
        grads["softmax_aux"] = sink_gradient(arrays["softmax_aux"], finite_lse, slope)
    return {name: grads[name] for name in wanted}


def single(dim: int, value_dim: int) -> bool:
    """Whether one kernel computes all gradients. (Queries of 64 beside values of 128 exceed its shared memory.)"""
    return value_dim <= dim <= 2 * SIDE and dim % SIDE == value_dim % SIDE == 0


def step_of(dim: int) -> int:
    """Queries a step of the single kernel, whose two warpgroups share dQ: by rows at head dim 64, by columns at 128."""
    return BLOCK * SIDE // dim


def boost_of(dtype: Any) -> int:
    """The power of two that weights of wide heads are multiplied by: they are at most 2**15 then, half of float16's range.

    None for float16 inputs: their dS is float16 too, and would leave that range.
    """
    return 15 if dtype == jnp.bfloat16 else 0


def last_first(dim: int, right: int | None) -> bool:
    """Whether the single kernel starts with the last keys: where the future is hidden, at 64 faster by 7 %, at 128 slower."""
    return dim == SIDE and right is not None


def defaults(shapes: dict[str, Any]) -> BwdParams:
    """Queries a step, keys of a program, warps that compute: what always runs, whatever is asked for.

    Registers and shared memory leave one set at each head dim.
    """
    dim, value_dim = shapes["query"].shape[3], shapes["value"].shape[3]
    warps = CONSUMERS * WARPS_A_GROUP
    if single(dim, value_dim):
        return BwdParams(q_blocksize=step_of(dim), kv_blocksize=BLOCK, num_warps=warps, num_stages=STAGES)
    return BwdParams(q_blocksize=SIDE, kv_blocksize=SIDE, num_warps=warps)


# One kernel


def _all_at_once(arrays, spec, inputs, optional, interpret) -> dict[str, Array]:
    from ejkernel.kernels._pallas.gpu import flash_backward

    dim = arrays["query"].shape[3]
    step = step_of(dim)
    walks, (head, tail), visitors, visited = _visits(arrays, spec, step)
    c = flash_backward.Backward(
        consumers=CONSUMERS,
        step=step,
        stages=STAGES,
        head=head,
        tail=tail,
        upward=last_first(dim, spec.window[1]),
        interpreted=bool(interpret),
        **statics(arrays, spec),
    )
    dq, dk, dv = flash_backward.call(c, *inputs, walks, visitors, optional, interpret=interpret)
    if interpret:
        dq = jnp.where(_by_row(visited, step, dq.shape[2]), dq, 0).sum(0)
    seen = _by_row(visited.any(1), step, dq.shape[1])
    return {"query": jnp.where(seen, dq * c.scale, 0).astype(dk.dtype), "key": dk, "value": dv}


def _by_row(visited: Array, step: int, rows: int) -> Array:
    """``[B|1, (blocks,) steps]`` as ``[(blocks,) B|1, rows, 1, 1]``."""
    visited = jnp.repeat(jnp.asarray(visited), step, -1)[..., :rows, None, None]
    return jnp.moveaxis(visited, 1, 0) if visited.ndim == 5 else visited


def _visits(arrays: dict[str, Array], spec: Any, step: int):
    """For each block of keys its walk over queries, and whether any has masked steps at first, at last; for each step of
    queries the first and the last block that visit it, and which do.
    """
    ranges = visibility.query_ranges(*key_intervals(arrays, spec), segment_ids(arrays), BLOCK, arrays["key"].shape[1])
    begin, end = ranges.begin // step * step, ranges.end
    # Those that visit a step must be neighbours: both ends of the walks never go back from block to block.
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


def _one_by_one(arrays, spec, inputs, optional, wanted, interpret) -> dict[str, Array]:
    from ejkernel.kernels._pallas.gpu import flash_backward_wide

    start, stop = key_intervals(arrays, spec)
    segments, kv_len = segment_ids(arrays), arrays["key"].shape[1]
    common = {**statics(arrays, spec), "boost": boost_of(arrays["query"].dtype)}

    def run(kernel, ranges):
        ranges = ranges._replace(begin=whole_tiles(ranges.begin))
        plan = visibility.plan_walk(ranges, SIDE, 1, False)
        _, unmasked, masked = visibility.table(plan)
        c = flash_backward_wide.Wide(unmasked=unmasked, masked=masked, interpreted=bool(interpret), **common)
        return kernel(c, *inputs, longest_first(plan), optional, interpret=interpret)

    grads = {}
    if "query" in wanted:
        ranges = visibility.key_ranges(start, stop, segments, BLOCK, kv_len, shifted=False)
        grads["query"] = run(flash_backward_wide.query_gradient, ranges)
    if wanted & {"key", "value"}:
        ranges = visibility.query_ranges(start, stop, segments, SIDE, kv_len)
        grads["key"], grads["value"] = run(flash_backward_wide.key_gradients, ranges)
    return grads
