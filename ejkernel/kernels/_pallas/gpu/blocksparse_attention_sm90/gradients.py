"""The backward on the host: the plan of its steps, and what is left to XLA.

Flash attention's single kernel computes all gradients, with lists in place of its loops. It has head dims 64 and 128: others are
padded with zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.contracts.params import BwdParams
from ejkernel.kernels._pallas.gpu.blocksparse_attention_sm90.key_block import MASKED, STEP_SHIFT, ListedContext
from ejkernel.kernels._pallas.gpu.blocksparse_attention_sm90.parameters import backward_dims, backward_tile
from ejkernel.kernels._pallas.gpu.flash_attention_sm90 import backward as single_kernel
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.backward_state import BackwardConfig
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.gradients import kernel_inputs
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import (
    BACKWARD_CONSUMERS,
    ROWS,
    WARPS_PER_WARPGROUP,
    pad_columns,
    statics,
)
from ejkernel.kernels.common.block_lists import block_kinds
from ejkernel.kernels.common.block_masks import any_masked, unseen_keys
from ejkernel.kernels.common.intervals import intervals
from ejkernel.kernels.common.softmax import sink_gradient, softmax_residuals
from ejkernel.kernels.common.unseen import with_narrow_ids


def backward(
    arrays: dict[str, Any],
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
    """The wanted gradients, from the residuals ``(out, lse)``; ``interpret``: without a GPU."""
    dout, finite_lse, slope, arrays = softmax_residuals(arrays, out, lse, dout, dlse, rows_may_see_nothing=True)
    grads = {}
    if wanted - {"softmax_aux"}:
        grads = _by_kernel(arrays, spec, dout, lse, slope, interpret)
    if "softmax_aux" in wanted:
        grads["softmax_aux"] = sink_gradient(arrays["softmax_aux"], finite_lse, slope)
    return {name: grads[name] for name in wanted}


def _by_kernel(arrays, spec, dout, lse, slope, interpret) -> dict[str, Array]:
    arrays = _without_unseen(with_narrow_ids(arrays), spec)
    own_dims = {name: arrays[name].shape[3] for name in ("query", "key", "value")}
    dim, value_dim = backward_dims(own_dims["query"], own_dims["value"])
    wide = {"query": pad_columns(arrays["query"], dim), "key": pad_columns(arrays["key"], dim)}
    arrays = {**arrays, **wide, "value": pad_columns(arrays["value"], value_dim)}
    inputs, optional = kernel_inputs(arrays, pad_columns(dout, value_dim), lse, slope, in_one=True)
    params = backward_tile(arrays)
    group = arrays["query"].shape[2] // arrays["key"].shape[2]
    lists = step_lists(arrays, spec, params.q_blocksize, group)
    c = BackwardConfig(
        consumers=params.num_warps // WARPS_PER_WARPGROUP,
        step=params.q_blocksize,
        stages=params.num_stages,
        head=_any_masked(arrays, spec, params),
        tail=False,
        ascending=False,
        listed=True,
        interpreted=bool(interpret),
        # A list names the heads of a group one by one.
        **{**statics(arrays, spec), "group": 1},
    )
    dq, dk, dv = single_kernel.call(
        c, *inputs, lists.counts, lists.steps, optional, context_type=ListedContext, interpret=interpret
    )

    def by_row(visited):
        return jnp.repeat(visited, c.step, -2)[..., : dq.shape[-3], :, None]

    if interpret:
        dq = jnp.where(by_row(jnp.moveaxis(lists.visits, 1, 0)), dq, 0).sum(0)
    # Nothing was written where nobody came.
    dq = jnp.where(by_row(lists.visits.any(1)), dq * c.scale, 0).astype(dk.dtype)
    found = {"query": dq, "key": dk, "value": dv}
    return {name: x[:, : arrays[name].shape[1], :, : own_dims[name]] for name, x in found.items()}


def _any_masked(arrays: dict[str, Any], spec: Any, params: BwdParams) -> bool:
    """Whether a step may be masked: by pairs, or because the mask's blocks are no multiples of the kernel's."""
    own = params.q_blocksize, params.kv_blocksize
    multiples = all(size % part == 0 for size, part in zip(spec.grid.sizes, own, strict=True))
    return "q_segment_ids" in arrays or any_masked(spec) or not multiples


def _without_unseen(arrays: dict[str, Any], spec: Any) -> dict[str, Any]:
    """Zeros for keys of listed blocks that no query sees."""
    unseen = unseen_keys(arrays, spec)
    if unseen is None:
        return arrays
    batch, heads, kv_len = unseen.shape
    kv_heads = arrays["key"].shape[2]
    if heads > 1:
        unseen = unseen.reshape(batch, kv_heads, -1, kv_len).all(2)
    unseen = unseen.swapaxes(1, 2)[..., None]
    return {**arrays, **{name: jnp.where(unseen, 0, arrays[name]) for name in ("key", "value")}}


class StepLists(NamedTuple):
    """For each block of keys its steps over queries, see ``ListedContext``; and which steps of queries it visits.

    ``visits``: ``[B|1, blocks of keys, steps of queries, H|1]``.
    """

    counts: Array
    steps: Array
    visits: Array


def step_lists(arrays: dict[str, Any], spec: Any, step: int, group: int) -> StepLists:
    """The lists of all blocks of keys: from the last query down, the heads of a group side by side."""
    seen, whole = _squares(arrays, spec)
    batch, heads, q_squares, kv_squares = seen.shape
    rows = step // ROWS
    missing = ((0, 0), (0, 0), (0, -q_squares % rows), (0, -kv_squares % BACKWARD_CONSUMERS))
    seen, whole = (
        jnp.pad(x, missing).reshape(batch, heads, -1, rows, -(-kv_squares // BACKWARD_CONSUMERS), BACKWARD_CONSUMERS)
        for x in (seen, whole)
    )
    steps, blocks = seen.shape[2], seen.shape[4]
    bits = jnp.asarray(1 << np.arange(rows * BACKWARD_CONSUMERS).reshape(rows, 1, BACKWARD_CONSUMERS), jnp.int32)
    code = jnp.where(seen, bits, 0).sum((3, 5), dtype=jnp.int32) + jnp.where(whole.all((3, 5)), 0, MASKED)
    visited = seen.any((3, 5))

    def by_block(x):
        """``[B|1, H|1, steps, blocks]`` as ``[B|1, Hkv|1, blocks, n]``, in the order of a list."""
        x = x[:, :, None] if heads == 1 else x.reshape(batch, -1, group, steps, blocks)
        x = jnp.broadcast_to(x, (batch, x.shape[1], group, steps, blocks))
        return x.transpose(0, 1, 4, 3, 2)[:, :, :, ::-1].reshape(batch, x.shape[1], blocks, steps * group)

    visits = by_block(visited)
    number = np.arange(steps * group, dtype=np.int32).reshape(steps, group)[::-1].reshape(-1)
    entries = by_block(code) + number * (1 << STEP_SHIFT)
    # Blocks of keys start in order: a CTA's rank is how many before it visit the step.
    rank = jnp.cumsum(visits, 2, dtype=jnp.int32) - visits
    place = jnp.cumsum(visits, 3, dtype=jnp.int32) - 1
    kv_heads = visits.shape[1]
    at = (x[..., None] for x in np.ogrid[:batch, :kv_heads, :blocks])
    target = (*at, jnp.where(visits, place, steps * group))
    listed = jnp.zeros((*visits.shape, 2), jnp.int32)
    listed = listed.at[target].set(jnp.stack([entries, rank], -1), mode="drop", unique_indices=True)
    used = seen.any((2, 3))
    if heads > 1:
        used = used.reshape(batch, kv_heads, group, blocks, -1).any(2)
    used = jnp.where(used, jnp.asarray(1 << np.arange(BACKWARD_CONSUMERS), jnp.int32), 0).sum(-1, dtype=jnp.int32)
    counts = (place[..., -1] + 1) * (1 << BACKWARD_CONSUMERS) + used
    return StepLists(counts.swapaxes(1, 2), listed, visited.transpose(0, 3, 2, 1))


def _squares(arrays: dict[str, Any], spec: Any) -> tuple[Array, Array]:
    """``[B|1, H|1, Sq / 64, Sk / 64]``: which squares of 64 queries and keys have pairs that may count; which no others."""
    (q_len, kv_len), (q_size, kv_size) = spec.grid.lengths, spec.grid.sizes
    row, key = (np.arange(0, length, ROWS) for length in (q_len, kv_len))
    kept = block_kinds(arrays["blocks"], -(-kv_len // kv_size)) > 0
    kept = kept[:, :, row // q_size][..., key // kv_size]
    start, stop = (x[0] for x in intervals(spec.window, q_len, kv_len))
    last_row, last_key = (np.minimum(x + ROWS, n) - 1 for x, n in ((row, q_len), (key, kv_len)))
    first_start, last_start, first_stop, last_stop = (
        jnp.asarray(x[at])[:, None] for x in (start, stop) for at in (row, last_row)
    )
    seen = kept & (first_start <= last_key) & (last_stop > key)
    whole = seen & (last_start <= key) & (first_stop > last_key) & (key + ROWS <= kv_len)
    if "q_segment_ids" in arrays:
        whole = jnp.zeros_like(whole)
    return seen, whole
