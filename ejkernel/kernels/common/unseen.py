"""Keys and values that a mask or a bias hides from every query."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.kernels.common.intervals import intervals


def without_unseen(arrays: dict[str, Array], spec: Any) -> dict[str, Array]:
    """Keys and values that no query sees as zeros, where a mask or a bias decides: they may be NaN, and 0 * NaN is not 0.

    Looking for them takes a pass over the mask, so it is done only if there is anything to find.
    """
    if not {"attention_mask", "bias"} & arrays.keys():
        return arrays

    def zeroed(key, value):
        seen = _seen(arrays, spec)[..., None]
        return jnp.where(seen, key, 0), jnp.where(seen, value, 0)

    key, value = arrays["key"], arrays["value"]
    finite = jnp.isfinite(key).all() & jnp.isfinite(value).all()
    key, value = jax.lax.cond(finite, lambda key, value: (key, value), zeroed, key, value)
    return {**arrays, "key": key, "value": value}


def _seen(arrays: dict[str, Array], spec: Any) -> Array:
    """``[B, Sk, Hkv]``: whether any query sees a key."""
    q_len, kv_heads = arrays["query"].shape[1], arrays["key"].shape[2]
    kv_len = arrays["key"].shape[1]
    start, stop = (
        (arrays[n] for n in ("kv_start", "kv_stop")) if "kv_start" in arrays else intervals(spec.window, q_len, kv_len)
    )
    column = jnp.arange(kv_len)
    seen = ((column >= start[..., None]) & (column < stop[..., None]))[:, None]
    if "q_segment_ids" in arrays:
        q_ids, kv_ids = arrays["q_segment_ids"][:, None, :, None], arrays["kv_segment_ids"][:, None, None]
        seen &= (q_ids == kv_ids) & (q_ids > 0)
    if "attention_mask" in arrays:
        seen &= arrays["attention_mask"]
    if "bias" in arrays:
        seen &= arrays["bias"] > -jnp.inf
    seen = seen.any(2)  # [B|1, H|1, Sk]
    batch, _, heads, _ = arrays["query"].shape
    seen = jnp.broadcast_to(seen, (batch, heads, kv_len)).reshape(batch, kv_heads, -1, kv_len).any(2)
    return seen.swapaxes(1, 2)
