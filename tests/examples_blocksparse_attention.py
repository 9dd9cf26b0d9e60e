"""Calls of blocksparse_attention, and the dense attention that they must equal."""

import jax.numpy as jnp
import numpy as np
from examples import Example


def reference(query, key, value, sparsity_mask, softmax_aux=None, q_segment_ids=None, kv_segment_ids=None, *,
              block_size=64, causal=False, sliding_window=None, softmax_scale=None, logits_soft_cap=None,
              return_lse=False):  # fmt: skip
    """Dense attention under the mask blown up to positions."""
    batch, q_len, heads, dim = query.shape
    kv_len, kv_heads = key.shape[1:3]
    q_block, kv_block = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    seen = jnp.asarray(sparsity_mask).reshape((1,) * (4 - sparsity_mask.ndim) + sparsity_mask.shape)
    seen = jnp.repeat(jnp.repeat(seen, q_block, 2), kv_block, 3)[:, :, :q_len, :kv_len]
    ahead = np.arange(kv_len)[None, :] - (np.arange(q_len)[:, None] + kv_len - q_len)
    left, right = sliding_window if isinstance(sliding_window, tuple) else (sliding_window, sliding_window)
    if causal:
        seen = seen & (ahead <= 0)
    if left is not None:
        seen = seen & (ahead >= -left)
    if right is not None:
        seen = seen & (ahead <= right)
    if q_segment_ids is not None:
        same = (q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]) & (q_segment_ids[:, :, None] > 0)
        seen = seen & same[:, None]
    seen = jnp.broadcast_to(seen, (batch, heads, q_len, kv_len))
    key, value = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (key, value))
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (dim**-0.5 if softmax_scale is None else softmax_scale)
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    logits = jnp.where(seen, logits, -jnp.inf)
    sinks = (
        jnp.full((heads, 1), -jnp.inf)
        if softmax_aux is None
        else jnp.broadcast_to(softmax_aux, (heads, softmax_aux.shape[-1]))
    )
    sinks = jnp.broadcast_to(sinks[None, :, None, :], (batch, heads, q_len, sinks.shape[-1]))
    everything = jnp.concatenate([logits, sinks], -1)
    top = jnp.max(everything, -1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)
    total = jnp.exp(everything - top).sum(-1)
    alive = total > 0
    weights = jnp.where(alive[..., None], jnp.exp(logits - top) / jnp.where(alive, total, 1)[..., None], 0)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    if not return_lse:
        return out
    return out, jnp.where(alive, top[..., 0] + jnp.log(jnp.where(alive, total, 1)), -jnp.inf)


def example(name, *, batch=2, q_len=48, kv_len=48, heads=2, kv_heads=2, dim=8, value_dim=8, blocks=(16, 16), mask_heads=0,
            density=0.5, segments=False, sinks=0, traced_window=None, features=(), slow_interpreted=True, **statics):  # fmt: skip
    """``mask_heads``: 0 for one mask, 1 for one a head, 2 for one a batch entry and head."""
    grid = -(-q_len // blocks[0]), -(-kv_len // blocks[1])
    uneven = any(size < length and size % 64 for length, size in zip((q_len, kv_len), blocks, strict=True))
    mask_shape = {0: grid, 1: (heads, *grid), 2: (batch, heads, *grid)}[mask_heads]

    def make(rng):
        arrays = {
            "query": rng.standard_normal((batch, q_len, heads, dim)),
            "key": rng.standard_normal((batch, kv_len, kv_heads, dim)),
            "value": rng.standard_normal((batch, kv_len, kv_heads, value_dim)),
            "sparsity_mask": rng.random(mask_shape) < density,
        }
        if segments:
            for what, length in (("q", q_len), ("kv", kv_len)):
                arrays[f"{what}_segment_ids"] = np.sort(rng.integers(0, 4, (batch, length)), -1).astype(np.int32)
        if sinks:
            arrays["softmax_aux"] = rng.standard_normal((heads, sinks) if sinks > 1 else (sinks,))
        if traced_window is not None:
            arrays["sliding_window"] = np.asarray(traced_window, np.int32)
        return arrays

    axes = dict.fromkeys(("query", "key", "value", "q_segment_ids", "kv_segment_ids"), 0)
    return Example(
        "blocksparse_attention",
        name,
        make,
        reference,
        statics={"block_size": blocks if blocks[0] != blocks[1] else blocks[0], **statics},
        differentiable=("query", "key", "value", "softmax_aux"),
        features=frozenset(features)
        | ({"head_masks"} if mask_heads else set())
        | ({"uneven_blocks"} if uneven else set()),
        batch={**axes, **({"sparsity_mask": 0} if mask_heads == 2 else {})},
        keep=frozenset({"softmax_aux"}),
        slow_interpreted=slow_interpreted,
    )


EXAMPLES = [
    example("plain"),
    example("nothing_kept", density=0.0, features={"lse"}, return_lse=True),
    example("everything_kept", density=1.0, causal=True, features={"causal"}),
    example("odd", q_len=53, kv_len=41, blocks=(16, 24), features={"cross", "lse"}, return_lse=True),
    example("head_masks_gqa", heads=4, mask_heads=1, features={"gqa"}, slow_interpreted=False),
    example("batch_masks", heads=4, mask_heads=2, q_len=40, features={"gqa", "cross"}, causal=True),
    example("gqa", heads=4, value_dim=12, features={"gqa", "value_dim"}),
    example("window", sliding_window=(11, 3), features={"window"}, density=0.7, slow_interpreted=False),
    example("traced_window", traced_window=9, q_len=53, kv_len=61, heads=4, mask_heads=1, causal=True, sinks=1, density=0.7,
            features={"causal", "window", "traced_window", "gqa", "sinks", "cross", "lse"}, return_lse=True, slow_interpreted=False),
    example("segments", segments=True, features={"segments"}, density=0.7),
    example("sinks", sinks=1, features={"sinks", "lse"}, return_lse=True),
    example("blocks_longer_than_the_arrays", q_len=20, kv_len=30, dim=32, value_dim=32, blocks=(64, 64), features={"cross"}, density=1.0),
    example("everything", q_len=45, kv_len=52, heads=4, value_dim=12, blocks=(16, 8), mask_heads=2, density=0.6, segments=True,
            sinks=3, causal=True, sliding_window=(30, 0), logits_soft_cap=2.0, softmax_scale=0.3, return_lse=True,
            slow_interpreted=False,
            features={"causal", "window", "soft_cap", "segments", "sinks", "gqa", "value_dim", "cross", "lse"}),
]  # fmt: skip
