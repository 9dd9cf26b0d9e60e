"""Keys that no query may see: they may hold NaN, and a weight of 0 times NaN is not 0."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import key_intervals, segment_ids, whole_tiles
from ejkernel.kernels.common.intervals import intervals
from ejkernel.kernels.common.unseen import seen_keys, with_narrow_ids, without_unseen


def without_padding(
    arrays: dict[str, Array], spec: Any, backward: bool, by_kernel: bool = False
) -> tuple[dict[str, Array], int]:
    """``arrays`` with zeros for keys that no query may see, and how many keys before all windows were dropped.

    Where nothing but a static window decides, those are the keys before the first query's window. A forward multiplies values
    by weights, and replaces what it computes from such keys by -inf. ``by_kernel``: the kernel puts the zeros itself, and is
    told where: ``padding``, by key.
    """
    arrays = with_narrow_ids(arrays)
    if {"attention_mask", "bias"} & arrays.keys():
        return without_unseen(arrays, spec), 0
    q_len, kv_len = arrays["query"].shape[1], arrays["key"].shape[1]
    dropped = 0
    if "kv_start" not in arrays:
        start, stop = intervals(spec.window, q_len, kv_len)
        dropped = int(start.min(where=start < stop, initial=kv_len))
        # A forward reads from whole tiles on. Where no query sees anything, nothing is dropped.
        if dropped == kv_len or (not backward and whole_tiles(dropped) == dropped):
            dropped = 0
    if {"kv_start", "kv_segment_ids"} & arrays.keys():
        seen = seen_keys(*key_intervals(arrays, spec), segment_ids(arrays), kv_len)
        if by_kernel:
            cleared = {"padding": (~seen).astype(jnp.int32)}
        else:
            names = ("key", "value") if backward else ("value",)
            cleared = {name: jnp.where(seen[..., None, None], arrays[name], 0) for name in names}
        arrays = {**arrays, **cleared}
    if dropped:
        of_keys = {"key", "value", "kv_segment_ids", "padding"} & arrays.keys()
        arrays = {**arrays, **{name: arrays[name][:, dropped:] for name in of_keys}}
    return arrays, dropped
