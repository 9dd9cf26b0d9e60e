"""Each operation from its definition in ``jnp``: run and differentiated in float64, kernels are checked against it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    bias: Any = None,
    softmax_aux: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    seen: Any = True,
) -> Any:
    """The definition, with all logits at once; ``seen`` broadcasts to ``[B, H, Sq, Sk]``.

    Every row must see some key or a sink, and segment ids are positive.

    Example:
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> attention(x, x, x, causal=True).shape
        (1, 3, 2, 4)
    """
    group = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, group, 2), jnp.repeat(value, group, 2)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    logits = logits * (query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    if bias is not None:
        logits = logits + bias
    q_len, kv_len = query.shape[1], key.shape[1]
    distance = jnp.arange(kv_len) - (jnp.arange(q_len)[:, None] + kv_len - q_len)
    if causal:
        seen = seen & (distance <= 0)
    left, right = sliding_window if isinstance(sliding_window, tuple) else (sliding_window, sliding_window)
    if left is not None:
        seen = seen & (distance >= -left)
    if right is not None:
        seen = seen & (distance <= right)
    if q_segment_ids is not None:
        seen = seen & (q_segment_ids[:, None, :, None] == kv_segment_ids[:, None, None, :])
    logits = jnp.where(seen, logits, -jnp.inf)
    if softmax_aux is not None:
        sinks = softmax_aux if softmax_aux.ndim == 2 else softmax_aux[None]
        logits = jnp.concatenate([logits, jnp.broadcast_to(sinks[:, None], (*logits.shape[:3], sinks.shape[-1]))], -1)
    weights = jax.nn.softmax(logits, -1)[..., :kv_len]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def page_attention(query: Any, key_cache: Any, value_cache: Any, context_lens: Any, block_tables: Any) -> Any:
    """All pages of a sequence side by side, then attention over those that it owns."""

    def dense(cache: Any) -> Any:
        pages = cache[block_tables]  # [B, blocks, Hkv, size, D]
        return pages.transpose(0, 1, 3, 2, 4).reshape(len(query), -1, cache.shape[1], cache.shape[3])

    keys, values = dense(key_cache), dense(value_cache)
    seen = jnp.arange(keys.shape[1]) < context_lens[:, None, None, None]
    return attention(query[:, None], keys, values, seen=seen)[:, 0]


def blocksparse_attention(
    query: Any, key: Any, value: Any, sparsity_mask: Any, block_size: int | tuple[int, int] = 64, **options: Any
) -> Any:
    """Attention with the mask of blocks spread over their elements."""
    rows, columns = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    seen = jnp.repeat(jnp.repeat(sparsity_mask, rows, -2), columns, -1)[..., : query.shape[1], : key.shape[1]]
    return attention(query, key, value, seen=seen, **options)


def recurrent(inputs: Any, weights: dict[str, Any], *, cell_type: str = "lstm") -> Any:
    """One step after the other, from a state of zeros, with PyTorch's gates."""
    w_ih, w_hh = weights["weight_ih"], weights["weight_hh"]
    size = w_hh.shape[1]

    def step(state: Any, x: Any) -> Any:
        h, c = state
        fed, kept = x @ w_ih.T, h @ w_hh.T
        if cell_type == "lstm":
            i, f, g, o = jnp.split(fed + kept, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
        elif cell_type == "gru":
            (r, z, n), (hr, hz, hn) = jnp.split(fed, 3, -1), jnp.split(kept, 3, -1)
            r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
            h = (1 - z) * jnp.tanh(n + r * hn) + z * h
        else:
            h = jnp.tanh(fed + kept)
        return (h, c), h

    zeros = jnp.zeros((inputs.shape[0], size), inputs.dtype)
    (h, c), outputs = jax.lax.scan(step, (zeros, zeros), inputs.swapaxes(0, 1))
    return outputs.swapaxes(0, 1), ((h, c) if cell_type == "lstm" else h)


def mean_pooling(inputs: Any, mask: Any = None, *, cu_seqlens: Any = None) -> Any:
    """Sums over counts, with each token's sequence as a row of a matrix of zeros and ones."""
    if cu_seqlens is not None:
        place = jnp.arange(inputs.shape[0])
        belongs = (place >= cu_seqlens[:-1, None]) & (place < cu_seqlens[1:, None])
        return belongs.astype(inputs.dtype) @ inputs / jnp.maximum(belongs.sum(1), 1)[:, None]
    counts = jnp.ones(inputs.shape[:2], bool) if mask is None else mask != 0
    return (inputs * counts[..., None]).sum(1) / jnp.maximum(counts.sum(1), 1)[:, None]


def grouped_matmul(a: Any, b: Any, group_sizes: Any = None) -> Any:
    """Every row times every group's matrix, of which one is kept."""
    if group_sizes is None:
        return a @ b
    ends = jnp.cumsum(group_sizes)
    rows = jnp.arange(a.shape[0])
    belongs = (rows >= ends[:, None] - group_sizes[:, None]) & (rows < ends[:, None])
    return jnp.einsum("gm,mk,gkn->mn", belongs.astype(a.dtype), a, b)


REFERENCES: dict[str, Callable[..., Any]] = {
    "flash_attention": attention,
    "ring_attention": attention,
    "page_attention": page_attention,
    "blocksparse_attention": blocksparse_attention,
    "recurrent": recurrent,
    "mean_pooling": mean_pooling,
    "grouped_matmul": grouped_matmul,
}


def in_float64(f: Callable[[dict[str, Any]], Any], arrays: dict[str, Any]) -> Any:
    """``f`` of the arrays in float64, on the CPU where JAX has it: an accelerator's compiler takes long for that."""

    def exact(x: Any) -> np.ndarray:
        return np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else None)

    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        cpu = None
    with jax.enable_x64(True), jax.default_device(cpu):
        return jax.tree.map(np.asarray, f(jax.tree.map(exact, arrays)))
