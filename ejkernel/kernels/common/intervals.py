"""Which keys each query may see under causality and a window, as intervals."""

from __future__ import annotations

import numpy as np


def intervals(window: tuple[int | None, int | None], q_len: int, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """``[1, q_len]`` starts and stops for a window, aligned bottom-right; causality is a right side of 0."""
    position = np.arange(q_len, dtype=np.int64)[None] + (kv_len - q_len)
    left, right = window
    start = np.zeros_like(position) if left is None else position - left
    stop = np.full_like(position, kv_len) if right is None else position + right + 1
    start = np.clip(start, 0, kv_len)
    return start.astype(np.int32), np.clip(stop, start, kv_len).astype(np.int32)
