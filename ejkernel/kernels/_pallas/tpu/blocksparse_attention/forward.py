"""The plan of a call: which blocks of the kernel hold a listed block of the mask, and which queries see which of them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.contracts.params import FwdParams
from ejkernel.kernels._pallas.tpu.flash_attention import plan
from ejkernel.kernels._pallas.tpu.flash_attention.forward import run
from ejkernel.kernels._pallas.tpu.flash_attention.terms import BITS
from ejkernel.kernels.common.block_lists import block_kinds
from ejkernel.kernels.common.block_masks import unseen_keys


def forward(
    arrays: dict[str, Any], spec: Any, params: FwdParams, *, device: Any = None, interpret: Any = False
) -> tuple[Array, Array]:
    """Output ``[B, Sq, H, Dv]`` and lse ``[B, H, Sq]``; ``interpret``: parameters of Pallas' interpreter."""
    arrays, kinds, patterns = planned(arrays, spec, params.q_blocksize, params.kv_blocksize, ("value",))
    return run(arrays, spec, params, kinds, patterns, device=device, interpret=interpret)


def planned(
    arrays: dict[str, Any], spec: Any, q_block: int, kv_block: int, cleared: tuple[str, ...]
) -> tuple[dict[str, Any], Any, tuple]:
    """The arrays with ``block_bits`` in place of the mask's lists, the kinds of the kernel's blocks, and the patterns of those.

    ``cleared``: the arrays in which zeros are to be where no query sees a key.
    """
    (q_len, kv_len), (q_size, kv_size) = spec.grid.lengths, spec.grid.sizes
    kept = block_kinds(arrays["blocks"], -(-kv_len // kv_size)) > 0
    arrays = {**arrays, **_without_unseen(arrays, spec, kept, cleared)}
    arrays.pop("blocks")
    rows = np.minimum(np.arange(-(-q_len // q_block) * q_block), q_len - 1) // q_size
    # For each block of keys of the kernel the blocks of the mask that it meets, in whole words.
    first = np.arange(0, kv_len, kv_block)[:, None]
    words = -(-((kv_block + kv_size - 2) // kv_size + 1) // BITS)
    met = first // kv_size + np.arange(words * BITS)
    there = met * kv_size < np.minimum(first + kv_block, kv_len)
    by_block = kept[..., np.minimum(met, kept.shape[3] - 1)] & there
    bits = by_block.reshape(*by_block.shape[:-1], words, BITS).astype(jnp.uint32) << jnp.arange(BITS, dtype=jnp.uint32)
    bits = bits.sum(-1, dtype=jnp.uint32).astype(jnp.int32)
    arrays["block_bits"] = jnp.moveaxis(bits, 2, 4)[..., rows]
    some, every = (
        x[:, :, rows].reshape(*kept.shape[:2], -1, q_block, len(first))
        for x in (by_block.any(-1), (by_block | ~there).all(-1))
    )
    of_window = plan.block_kinds(arrays, spec, q_block, kv_block, partial_rows=True)
    whole = every.all(3) & (of_window == plan.WHOLE)
    listed = some.any(3) & (of_window != plan.HIDDEN)
    kinds = jnp.where(whole, plan.WHOLE, jnp.where(listed, plan.MASKED, plan.HIDDEN)).astype(jnp.int8)
    return arrays, *plan.with_patterns(kinds, arrays, spec, q_block, kv_block, partial_rows=True)


def _without_unseen(arrays: dict[str, Any], spec: Any, kept: Array, names: tuple[str, ...]) -> dict[str, Array]:
    """Zeros for what no query sees: it may be NaN, which a weight of 0 does not hide."""
    value, kv_size = arrays["value"], spec.grid.sizes[1]
    unseen = unseen_keys(arrays, spec)
    seen = jnp.repeat(kept.any(2), kv_size, 2)[..., : value.shape[1]] if unseen is None else ~unseen
    heads, kv_heads = arrays["query"].shape[2], value.shape[2]
    seen = jnp.broadcast_to(seen, (seen.shape[0], heads, seen.shape[2]))
    seen = seen.reshape(seen.shape[0], kv_heads, heads // kv_heads, -1).any(2)
    return {name: jnp.where(seen.swapaxes(1, 2)[..., None], arrays[name], 0) for name in names}
