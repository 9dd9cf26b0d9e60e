"""Attention in float64 numpy, the slow and obvious way: what every implementation is judged by."""

import numpy as np


def visible_pairs(batch, heads, q_len, kv_len, *, attention_mask=None, causal=False, sliding_window=None,
                  cum_seqlens_q=None, cum_seqlens_k=None, q_segment_ids=None, kv_segment_ids=None):  # fmt: skip
    """Boolean ``[B, H, Sq, Sk]``: who may attend to whom."""
    left, right = sliding_window if isinstance(sliding_window, tuple) else (sliding_window, sliding_window)

    def structure(rows, columns):
        offset = np.arange(columns)[None, :] - (np.arange(rows)[:, None] + columns - rows)
        seen = np.ones((rows, columns), bool)
        if causal:
            seen &= offset <= 0
        if left is not None:
            seen &= offset >= -left
        if right is not None:
            seen &= offset <= right
        return seen

    if cum_seqlens_q is None:
        seen = structure(q_len, kv_len)
    else:
        seen = np.zeros((q_len, kv_len), bool)
        for q0, q1, k0, k1 in zip(cum_seqlens_q, cum_seqlens_q[1:], cum_seqlens_k, cum_seqlens_k[1:], strict=False):
            seen[q0:q1, k0:k1] = structure(q1 - q0, k1 - k0)
    seen = np.broadcast_to(seen, (batch, heads, q_len, kv_len)).copy()
    if attention_mask is not None:
        mask = np.asarray(attention_mask) != 0
        if mask.ndim == 2:
            mask = mask[:, None, None, :]
        elif mask.ndim == 3:
            mask = mask[:, None]
        seen &= mask
    if q_segment_ids is not None:
        q_ids, kv_ids = np.asarray(q_segment_ids), np.asarray(kv_segment_ids)
        same = (q_ids[:, :, None] == kv_ids[:, None, :]) & (q_ids[:, :, None] > 0)
        seen &= same[:, None]
    return seen


def _mix(x, last=True):
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16)) if last else x


def dropout_factors(seed, probability, batch, heads, q_len, kv_len):
    """``[B, H, Sq, Sk]``: 0 or 1 / (1 - p), as ``ejkernel.kernels.common.dropout`` documents it."""
    if not probability:
        return np.ones((batch, heads, q_len, kv_len))
    u = np.uint32
    with np.errstate(over="ignore"):
        b = _mix(_mix(np.asarray([seed & 0xFFFFFFFF], u)) ^ (np.arange(1, batch + 1, dtype=u) * u(0x9E3779B1)))
        h = _mix(b[:, None] ^ (np.arange(1, heads + 1, dtype=u) * u(0x85EBCA77)))
        r = _mix(h[:, :, None] ^ (np.arange(q_len, dtype=u) * u(0xC2B2AE3D)))
        c = _mix(r[..., None] ^ (np.arange(kv_len, dtype=u) * u(0x27D4EB2F)), last=False)
    return np.where(c >= u(round(probability * 2**32)), 1 / (1 - probability), 0.0)


def attention(query, key, value, bias=None, softmax_aux=None, *, softmax_scale=None, logits_soft_cap=None,
              dropout_prob=0.0, dropout_seed=0, dout=None, dlse=None, **masks):  # fmt: skip
    """``(out, lse)`` and, given cotangents, the gradients by name."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, q_len, heads, dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    seen = visible_pairs(batch, heads, q_len, kv_len, **masks)
    # What nobody may see is cut out, so that garbage in padding cannot reach a sum.
    seen_keys = seen.any(2).transpose(0, 2, 1)[..., None]
    k, v = np.where(seen_keys, k, 0), np.where(seen_keys, v, 0)

    raw = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    capped = raw if logits_soft_cap is None else logits_soft_cap * np.tanh(raw / logits_soft_cap)
    wide_bias = 0 if bias is None else np.broadcast_to(np.asarray(bias, np.float64), raw.shape)
    logits = np.where(seen, capped + wide_bias, -np.inf)
    if softmax_aux is not None:
        sinks = np.broadcast_to(np.asarray(softmax_aux, np.float64), (heads, np.shape(softmax_aux)[-1]))
        sinks = np.broadcast_to(sinks[None, :, None, :], (batch, heads, q_len, sinks.shape[-1]))
        everything = np.concatenate([logits, sinks], -1)
    else:
        everything = logits
    with np.errstate(invalid="ignore", divide="ignore"):
        top = everything.max(-1, keepdims=True)
        top = np.where(np.isfinite(top), top, 0)
        lse = np.log(np.exp(everything - top).sum(-1)) + top[..., 0]
        finite = np.where(np.isfinite(lse), lse, 0)[..., None]
        weights = np.exp(logits - finite)
    keep = dropout_factors(dropout_seed, dropout_prob, batch, heads, q_len, kv_len)
    out = np.einsum("bhqk,bkhd->bqhd", weights * keep, v)
    if dout is None:
        return out, lse

    dout = np.asarray(dout, np.float64)
    dlse = np.zeros_like(lse) if dlse is None else np.asarray(dlse, np.float64)
    dweights = np.einsum("bqhd,bkhd->bhqk", dout, v) * keep
    slope = (weights * dweights).sum(-1) - dlse
    dlogits = weights * (dweights - slope[..., None])
    draw = dlogits if logits_soft_cap is None else dlogits * (1 - (capped / logits_soft_cap) ** 2)

    def to_kv(x):
        return x.reshape(batch, kv_len, kv_heads, group, -1).sum(3)

    grads = {
        "query": np.einsum("bhqk,bkhd->bqhd", draw, k) * scale,
        "key": to_kv(np.einsum("bhqk,bqhd->bkhd", draw, q) * scale),
        "value": to_kv(np.einsum("bhqk,bqhd->bkhd", weights * keep, dout)),
    }
    if bias is not None:
        grads["bias"] = _sum_to(dlogits, np.shape(bias))
    if softmax_aux is not None:
        with np.errstate(invalid="ignore"):
            share = np.exp(sinks - finite)
        grads["softmax_aux"] = _sum_to(-(share * slope[..., None]).sum((0, 2)), np.shape(softmax_aux))
    return out, lse, grads


def _sum_to(x, shape):
    """Undo a broadcast."""
    padded = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(i for i, (have, want) in enumerate(zip(x.shape, padded, strict=True)) if have != want)
    return x.sum(axes, keepdims=True).reshape(shape)
