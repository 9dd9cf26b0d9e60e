"""The plan of a call on the host, and its launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.contracts.params import FwdParams
from ejkernel.kernels._pallas.gpu.blocksparse_attention_sm90.block import CONSUMER_BITS, ListedBlock, ListedConfig
from ejkernel.kernels._pallas.gpu.blocksparse_attention_sm90.parameters import effective
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.forward import any_in_step, launch
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import (
    ROWS,
    WARPS_PER_WARPGROUP,
    longest_first,
    mask_vectors,
    pad_rows,
    padded,
    statics,
)
from ejkernel.kernels.common.block_lists import block_kinds, list_blocks
from ejkernel.kernels.common.block_masks import any_masked, unseen_keys
from ejkernel.kernels.common.unseen import with_narrow_ids
from ejkernel.kernels.common.visibility import Walk


def forward(arrays: dict[str, Any], spec: Any, params: FwdParams, *, interpret: Any = False) -> tuple[Array, Array]:
    """Attention output ``[B, Sq, H, Dv]`` and the lse of its logits ``[B, H, Sq]``; ``interpret``: without a GPU."""
    params = effective(arrays, spec, params)
    arrays = with_narrow_ids(arrays)
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    batch, q_len, heads, _ = query.shape
    consumers, step = params.num_warps // WARPS_PER_WARPGROUP, params.kv_blocksize
    rows = rows_of_consumers(spec.grid, consumers)
    lists, joined = lists_of_ctas(arrays["blocks"], spec.grid, rows)
    blocks, kv_size = rows.shape[0], spec.grid.sizes[1]
    kv_blocks = -(-key.shape[1] // kv_size)
    some_masked = joined or any_masked(spec)
    # Segments are pairs' affair, and steps that do not divide a block pass its end: it is the only one then.
    all_masked = "q_segment_ids" in arrays or kv_size % step > 0
    if all_masked:
        lists = lists._replace(full=jnp.zeros_like(lists.full))
    # The keys of the block that lies past the last one are read too, by masks.
    keys = (kv_blocks + 1) * kv_size + step
    optional = {"entries": lists.entries, "starts": lists.start}
    optional |= mask_vectors(arrays, blocks * consumers * ROWS, keys)
    unseen = unseen_keys(arrays, spec)
    if unseen is not None:
        optional["padding"] = padded(unseen.astype(jnp.int32), keys)
        flat = optional["padding"].reshape(-1, keys)
        optional["padded"] = any_in_step(flat, step).reshape(*unseen.shape[:2], -1)
    if "softmax_aux" in arrays:
        optional["sinks"] = arrays["softmax_aux"]
    c = ListedConfig(
        consumers=consumers,
        step=step,
        stages=params.num_stages,
        ping_pong=consumers == 2 and not spec.logits_soft_cap,
        **statics(arrays, spec),
        sinks="softmax_aux" in arrays,
        persistent=True,
        clears=unseen is not None,
        # Float16 weights above 1 may overflow.
        speculative=value.dtype == jnp.bfloat16,
        head=some_masked or all_masked,
        full=not all_masked,
        tail=not all_masked,
        interpreted=bool(interpret),
        kv_size=kv_size,
        kv_blocks=kv_blocks,
        joined=joined,
    )
    results = (
        jax.ShapeDtypeStruct((batch, pad_rows(query).shape[1], heads, c.value_dim), query.dtype),
        jax.ShapeDtypeStruct((batch, heads, blocks * consumers * ROWS), jnp.float32),
    )
    operands = (*map(pad_rows, (query, key, value)), step_table(c, lists))
    grid = {"head": heads, "block": blocks, "batch": batch}
    out, lse = launch(c, operands, optional, results, grid, ListedBlock, interpret=interpret)
    return out[:, :q_len], lse[..., :q_len]


class Lists(NamedTuple):
    """Of each CTA: where its list begins in ``entries [B|1, n]``, how many of its blocks need no mask, how many it has.

    ``start``, ``full`` and ``count`` are ``[B|1, H|1, CTAs]``. The kernel requires a step: the first entry of an empty list is
    one that nobody sees, such as the block after the last one.
    """

    start: Any
    full: Any
    count: Any
    entries: Any


def rows_of_consumers(grid: Any, consumers: int) -> np.ndarray:
    """``[CTAs, consumers]``: the row of the mask that each consumer's queries are in; past the last query, the last."""
    q_len, q_size = grid.lengths[0], grid.sizes[0]
    first = np.arange(0, q_len, consumers * ROWS)[:, None] + np.arange(consumers) * ROWS
    return np.minimum(first, q_len - 1) // q_size


def lists_of_ctas(blocks: Any, grid: Any, rows: np.ndarray) -> tuple[Lists, bool]:
    """The lists, and whether they are unions of several rows'."""
    kv_blocks = -(-grid.lengths[1] // grid.sizes[1])
    if (rows != rows[:, :1]).any():
        return _union(block_kinds(blocks, kv_blocks), rows), True
    start, full, count = (jnp.asarray(x)[..., rows[:, 0]] for x in blocks[:3])
    entries = jnp.pad(jnp.asarray(blocks.index), ((0, 0), (0, 1)), constant_values=kv_blocks)
    return Lists(jnp.where(count > 0, start, entries.shape[1] - 1), full, count, entries), False


def _union(kinds: Array, rows: np.ndarray) -> Lists:
    """Lists of what any consumer sees, from ``block_kinds``: first what all of them see whole, then the others.

    An entry is a block of keys with a bit for each consumer that sees it. The first of an empty list has none.
    """
    kinds = kinds[:, :, rows]
    bits = jnp.asarray(1 << np.arange(rows.shape[1]), jnp.int32)[:, None]
    seeing = jnp.where(kinds > 0, bits, 0).sum(3, dtype=jnp.int32)
    lists = list_blocks(seeing > 0, (kinds == 2).all(3))
    index = lists.index.reshape(seeing.shape)
    entries = index * 2**CONSUMER_BITS + jnp.take_along_axis(seeing, index, -1)
    return Lists(lists.start, lists.full, lists.count, entries.reshape(lists.index.shape))


def step_table(c: ListedConfig, lists: Lists) -> Array:
    """``[B|1, H|1, CTAs, 5]``, see ``longest_first``. Until a list has had an unmasked block, not all rows have started."""
    full = lists.full * c.parts
    masked = jnp.maximum(lists.count * c.parts - full, lists.count == 0)
    head = jnp.where(full == 0, masked, 0) if c.head else jnp.zeros_like(full)
    zero = jnp.zeros_like(full)
    shape = full.shape
    walk = Walk(*(x.reshape(-1, shape[-1]) for x in (zero, zero, head, full, masked - head)))
    return longest_first(walk).reshape(*shape, -1)
