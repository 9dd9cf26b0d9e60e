"""Dense attention of few queries to many keys: the forward of ``flash_attention`` against a plain KV cache.

The kernels are those of paged attention, with keys where they lie. The query heads that share a key head are rows of one
tile, and keys are cut into ranges that are computed apart and joined in order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from jax import Array

from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import FwdParams
from ejkernel.kernels._triton import few_queries
from ejkernel.kernels._triton.few_queries import Rows, attend
from ejkernel.kernels.common.query_tiles import Sequences


def forward(arrays: dict[str, Array], spec: Any, params: FwdParams, device: DeviceInfo | None) -> tuple[Array, Array]:
    """Attention output ``[B, Sq, H, Dv]`` and the log-sum-exp of its logits ``[B, H, Sq]``."""
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    batch, q_len, heads, dim = query.shape
    kv_len, kv_heads = key.shape[1:3]
    left, right = spec.window
    index = np.arange(batch, dtype=np.int32)
    s = Sequences(
        begin=index * q_len,
        count=np.full(batch, q_len, np.int32),
        lens=np.full(batch, kv_len, np.int32),
        row=index,
        tables=query,
        tokens=batch * q_len,
        packed=False,
    )
    rows = Rows(
        query=query.reshape(-1, heads, dim),
        key=key,
        value=value,
        tables=query,
        kv_heads=kv_heads,
        page=0,
        blocks=0,
        kv_len=kv_len,
        batch=1,
        scale=spec.softmax_scale,
        cap=spec.logits_soft_cap,
        left=left,
        causal=right == 0 or q_len == 1,
        sinks=arrays.get("softmax_aux"),
        k_scale=None,
        v_scale=None,
    )
    out, lse = attend(rows, s, effective(arrays, params, device), device)
    return out.reshape(batch, q_len, heads, -1), lse.reshape(batch, q_len, heads).swapaxes(1, 2)


def defaults(shapes: dict[str, Any], device: DeviceInfo | None) -> FwdParams:
    """Tiles where nothing was tuned."""
    query, key, value = shapes["query"], shapes["key"], shapes["value"]
    rows = query.shape[1] * (query.shape[2] // key.shape[2])
    width = max(query.shape[3], value.shape[3])
    return few_queries.defaults(rows, width, 0, query.dtype, key.dtype, device)


def candidates(shapes: dict[str, Any], device: DeviceInfo | None) -> list[FwdParams]:
    """Tiles worth trying."""
    return few_queries.candidates(defaults(shapes, device), shapes["query"].dtype)


def effective(shapes: dict[str, Any], params: FwdParams, device: DeviceInfo | None) -> FwdParams:
    """The parameters as the kernel uses them: all rows of a sequence are in one tile."""
    first = defaults(shapes, device)
    return few_queries.effective(replace(params, q_blocksize=first.q_blocksize), first)
