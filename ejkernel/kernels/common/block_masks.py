"""What a mask of blocks leaves to see."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels.common.block_lists import block_kinds
from ejkernel.kernels.common.intervals import intervals


def any_masked(spec: Any) -> bool:
    """Whether a listed block may hold pairs that do not count, segments aside."""
    some, every = _static_blocks(spec)
    return bool((some & ~every).any())


def _static_blocks(spec: Any) -> tuple[np.ndarray, np.ndarray]:
    """``[nq, nk]``: where causality and the window leave something, where they leave all."""
    grid = spec.grid
    shape = [-(-length // (size * parts)) for length, size, parts in zip(*grid, strict=True)]
    some, every = grid.visibility(np.ones(shape, bool), spec.window)
    return some[0, 0], every


def unseen_keys(arrays: dict[str, Any], spec: Any) -> Array | None:
    """``[B|1, H|1, Sk]``: keys of listed blocks that no query of theirs sees; None where there cannot be any.

    Such keys may hold NaN, and a weight of 0 times NaN is not 0.
    """
    (q_len, kv_len), (q_size, kv_size) = spec.grid.lengths, spec.grid.sizes
    by_data = "kv_start" in arrays
    start, stop = (arrays["kv_start"], arrays["kv_stop"]) if by_data else intervals(spec.window, q_len, kv_len)
    xp = jnp if by_data else np
    start, stop = (_by_block(xp, x, q_size) for x in (start, stop))  # of a row that is none both are 0
    # Intervals of neighbouring rows overlap or touch: of a block of rows, those that are not empty have one hull.
    low = xp.where(start < stop, start, kv_len).min(-1)
    high = xp.where(start < stop, stop, 0).max(-1)
    place = np.arange(kv_len, dtype=np.int32)
    if "q_segment_ids" in arrays:
        ids = jnp.pad(arrays["q_segment_ids"], ((0, 0), (0, -q_len % q_size))).reshape(-1, start.shape[1], q_size, 1)
        theirs = arrays["kv_segment_ids"][:, None, None]
        seen = (ids == theirs) & (theirs > 0)
        if by_data or spec.window != (None, None):
            seen = seen & (jnp.asarray(start)[..., None] <= place) & (place < jnp.asarray(stop)[..., None])
        seen = seen.any(2)
    else:
        if not by_data:
            some, _ = _static_blocks(spec)
            block = np.arange(0, kv_len, kv_size)
            covered = (low[0][:, None] <= block) & (high[0][:, None] >= np.minimum(block + kv_size, kv_len))
            if covered[some].all():
                return None
        seen = (jnp.asarray(low)[..., None] <= place) & (place < jnp.asarray(high)[..., None])
    kept = block_kinds(arrays["blocks"], -(-kv_len // kv_size)) > 0
    kept = jnp.repeat(kept, kv_size, 3)[..., :kv_len]
    return ~(kept & seen[:, None]).any(2)


def _by_block(xp: Any, rows: Any, size: int) -> Any:
    """``[B, Sq]`` as ``[B, blocks, size]``, with zeros behind the last row."""
    return xp.pad(rows, ((0, 0), (0, -rows.shape[1] % size))).reshape(rows.shape[0], -1, size)
