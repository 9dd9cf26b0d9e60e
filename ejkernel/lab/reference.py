"""Attention in float64 numpy, for checking kernels where the test suite is not installed."""

from __future__ import annotations

from typing import Any

import numpy as np


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool = False,
    sliding_window: tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: Any = None,
) -> np.ndarray:
    """The definition, with all logits at once.

    Example:
        >>> x = np.ones((1, 3, 2, 4))
        >>> attention(x, x, x, causal=True).shape
        (1, 3, 2, 4)
    """
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if logits_soft_cap is not None:
        logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
    distance = np.arange(k.shape[1]) - (np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1])
    hidden = (distance > 0) if causal else np.zeros(distance.shape, bool)
    if sliding_window is not None:
        hidden |= (distance < -sliding_window[0]) | (distance > sliding_window[1])
    logits = np.where(hidden, -np.inf, logits)
    top = logits.max(-1, keepdims=True)
    if softmax_aux is not None:
        sinks = np.asarray(softmax_aux, np.float64)
        top = np.maximum(top, sinks.max())
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    if softmax_aux is not None:
        total = total + np.exp(sinks - top).sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", weights / total, v)
