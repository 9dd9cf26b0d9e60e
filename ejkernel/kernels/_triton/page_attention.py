"""Paged attention in Triton: decoding, chunks of a prompt, and both in one call.

The query heads that share a key head are rows of one tile, and programs share the steps over keys equally, so that one long
context fills a chip as well as many short ones do; see ``page_plan.py``. Gradients are other implementations' work.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jax import Array

from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels._triton import few_queries
from ejkernel.kernels._triton.few_queries import Rows, attend
from ejkernel.kernels._triton.registering import register
from ejkernel.kernels.common.query_tiles import sequences, with_padding

READ = ("q_blocksize", "kv_blocksize", "num_key_splits", "num_warps", "num_stages")


def forward(
    arrays: dict[str, Array], spec: Any, params: FwdParams, *, device: DeviceInfo | None = None
) -> tuple[Array, Array]:
    """Attention output ``[N, T, H, Dv]`` and the log-sum-exp of its logits ``[N, T, H]``."""
    params = effective(arrays, params, device)
    query, keys = arrays["query"], arrays["key_cache"]
    examples, tokens, heads, dim = query.shape
    _, blocks, kv_heads, page, _ = keys.shape
    s = sequences(arrays)
    rows = Rows(
        query=query.reshape(-1, heads, dim),
        key=keys,
        value=arrays["value_cache"],
        tables=s.tables,
        kv_heads=kv_heads,
        page=page,
        blocks=blocks,
        kv_len=0,
        batch=arrays["context_lens"].shape[1],
        scale=spec.softmax_scale,
        cap=spec.logits_soft_cap,
        left=arrays["window_left"][0] if "window_left" in arrays else spec.left,
        causal=True,
        sinks=arrays.get("softmax_aux"),
        k_scale=arrays.get("k_scale"),
        v_scale=arrays.get("v_scale"),
    )
    if s.packed:
        s = with_padding(s, arrays["query_starts"], tokens)
    out, lse = attend(rows, s, params, device)
    return out.reshape(examples, tokens, heads, -1), lse.reshape(examples, tokens, heads)


def effective(shapes: dict[str, Any], params: FwdParams, device: DeviceInfo | None) -> FwdParams:
    """The parameters as the kernel uses them."""
    return few_queries.effective(params, defaults(shapes, device))


def defaults(shapes: dict[str, Any], device: DeviceInfo | None) -> FwdParams:
    """Tiles where nothing was tuned."""
    query, keys = shapes["query"], shapes["key_cache"]
    _, tokens, heads, dim = query.shape
    rows = heads // keys.shape[2]
    if "query_starts" in shapes:
        rows *= -(-tokens // max(1, shapes["context_lens"].shape[1]))
    width = max(dim, shapes["value_cache"].shape[4])
    return few_queries.defaults(rows, width, keys.shape[3], query.dtype, keys.dtype, device)


class TritonPageAttention:
    """The implementation for GPUs; it has no backward."""

    name = "page-triton"
    version = 1
    residuals = True
    reads: ClassVar = {"forward": READ, "backward": ()}
    forward = staticmethod(forward)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Tiles where nothing was tuned."""
        return defaults(shapes, device) if direction == "forward" else BwdParams()

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams]:
        """Tiles worth trying."""
        if direction == "backward":
            return []
        return few_queries.candidates(defaults(shapes, device), shapes["query"].dtype)

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The parameters as the kernel uses them."""
        return effective(shapes, params, device) if direction == "forward" else BwdParams()


register(
    "page_attention",
    features={
        *(
            "varlen",
            "window",
            "traced_window",
            "soft_cap",
            "sinks",
            "int8_cache",
            "fp8_cache",
            "scales",
            "gqa",
            "value_dim",
            "lse",
        ),
        *("uneven_pages", "splits"),
    },
)(TritonPageAttention)
