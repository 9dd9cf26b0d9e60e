"""Paged attention in plain XLA: online softmax over a context's own pages, read where they lie.

``page_walks.py`` has two ways to go over them: sequence after sequence for one CPU, all sequences at once elsewhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.registry import kernel_registry
from ejkernel.contracts.support import ALL_FLOATS, Backend, Platform, Support, any_device
from ejkernel.kernels._xla import online_softmax
from ejkernel.kernels._xla.page_walks import AllSequencesWalk, OneSequenceWalk
from ejkernel.kernels._xla.pages import PageWalk
from ejkernel.kernels.common.softmax import sink_terms, softmax_slope, sum_shared

# One sequence at a time: enough tokens a step to outweigh its overhead, few enough to stay in a CPU's caches. Pages are
# laid side by side by a loop that asks for each token which page it is of, so that many pages cost more than many steps.
TOKENS_PER_STEP = 256
PAGES_PER_STEP = 8
MOST_PAGES_PER_STEP = 32
# All at once: numbers in the pages of one step, by the kind of device. Longer steps gain at most a quarter on an H200.
HELD_PER_STEP = {"gpu": 2**23}
HELD_ELSEWHERE = 2**21
# A backward step's pages are compared with each other to find shared blocks: so many at most.
COMPARED_PER_STEP = 64

READ = ("q_blocksize", "kv_blocksize")


def make_walk(arrays: dict[str, Array], spec: Any, params: Any) -> PageWalk:
    """The walk that the parameters ask for: more than one query a step is all of them."""
    params = effective(arrays, params)
    walk = AllSequencesWalk if params.q_blocksize > 1 else OneSequenceWalk
    splits = params.num_key_splits if isinstance(params, FwdParams) else 1
    return walk(arrays, spec, splits, params.kv_blocksize // arrays["key_cache"].shape[3])


def effective(shapes: dict[str, Any], params: FwdParams | BwdParams) -> FwdParams | BwdParams:
    """The parameters as the kernel uses them: 1 or all queries a step, whole pages."""
    max_blocks, block_size = max(1, shapes["block_tables"].shape[1]), shapes["key_cache"].shape[3]
    every = (params.q_blocksize or 1) > 1
    pages = max(1, min((params.kv_blocksize or TOKENS_PER_STEP) // block_size, max_blocks))
    used = {
        "q_blocksize": max(2, shapes["query"].shape[0]) if every else 1,
        "kv_blocksize": block_size * (pages if every else min(pages, MOST_PAGES_PER_STEP)),
    }
    if isinstance(params, FwdParams):
        used["num_key_splits"] = min(params.num_key_splits or 1, max_blocks)
    return type(params)(**used)


def forward(arrays: dict[str, Array], spec: Any, params: Any) -> tuple[Array, Array]:
    """Attention output ``[B, H, Dv]`` and the log-sum-exp of its logits ``[B, H]``."""
    p = make_walk(arrays, spec, params)
    top, total, acc = online_softmax.merge_splits(p.contexts(p.scaled_query()), arrays.get("softmax_aux"))
    out = online_softmax.output(total, acc, (total == 0)[..., None]) * p.factor("v_scale")
    lse = online_softmax.log_sum_exp(top, total)
    batch, heads, _ = arrays["query"].shape
    return out.reshape(batch, heads, -1).astype(arrays["query"].dtype), lse.reshape(batch, heads)


def backward(
    arrays: dict[str, Array],
    spec: Any,
    params: Any,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
    wanted: frozenset[str],
) -> dict[str, Array]:
    """The wanted gradients, from the residuals ``(out, lse)``."""
    p = make_walk(arrays, spec, params)
    rows = (p.batch, p.kv_heads, p.group)
    nothing = lse == -jnp.inf
    finite_lse = jnp.where(nothing, 0, lse).reshape(rows)
    slope = softmax_slope(out, dout, dlse, lambda products: products.sum(-1))
    slope = jnp.where(nothing, 0, slope).reshape(rows)
    dq, dv_scale, dk, dv = p.gradients(p.scaled_query(), p.by_head(dout), finite_lse, slope, wanted)
    grads: dict[str, Array] = {}
    if "query" in wanted:
        dquery = dq * spec.softmax_scale * p.factor("k_scale")
        grads["query"] = dquery.reshape(arrays["query"].shape).astype(arrays["query"].dtype)
    if dk is not None:
        grads["key_cache"] = dk[None].astype(arrays["key_cache"].dtype)
    if dv is not None:
        grads["value_cache"] = dv[None].astype(arrays["value_cache"].dtype)
    if "k_scale" in wanted:
        # A context without tokens has no part in the scale, be its query NaN.
        bare = arrays["context_lens"][:, None, None, None] == 0
        products = jnp.where(bare, 0, p.by_head(arrays["query"])) * dq
        grads["k_scale"] = _like(arrays["k_scale"], products.sum((2, 3)) * spec.softmax_scale)
    if dv_scale is not None:
        grads["v_scale"] = _like(arrays["v_scale"], dv_scale.sum(2))
    if "softmax_aux" in wanted:
        sinks = arrays["softmax_aux"]
        heads = sinks.reshape(-1, p.kv_heads, p.group)
        grads["softmax_aux"] = _like(sinks, -sink_terms(heads, finite_lse, slope).reshape(lse.shape))
    return grads


def _like(array: Array, gradient: Array) -> Array:
    """A gradient ``[B, …]`` summed over a batch that shares the array."""
    return sum_shared(array, gradient).astype(array.dtype)


class XlaPageAttention:
    """The implementation for every device."""

    name = "page-xla"
    version = 1
    reads: ClassVar = {"forward": (*READ, "num_key_splits"), "backward": READ}
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Sequences (``q_blocksize``) and tokens (``kv_blocksize``) a step where nothing was tuned."""
        cls = FwdParams if direction == "forward" else BwdParams
        batch = shapes["query"].shape[0]
        _, _, kv_heads, block_size, dim = shapes["key_cache"].shape
        if device.kind == "cpu" and device.shared_by == 1:
            return cls(q_blocksize=1, kv_blocksize=max(block_size, min(TOKENS_PER_STEP, PAGES_PER_STEP * block_size)))
        held = HELD_PER_STEP.get(device.kind, HELD_ELSEWHERE) if direction == "forward" else HELD_ELSEWHERE
        tokens = held // (batch * kv_heads * dim)
        if direction == "backward":
            tokens = min(tokens, COMPARED_PER_STEP * block_size // batch)
        longest = shapes["block_tables"].shape[1] * block_size
        return cls(q_blocksize=max(2, batch), kv_blocksize=max(block_size, min(tokens, longest)))

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
        """Steps worth trying."""
        first = XlaPageAttention.defaults(shapes, spec, device, direction)
        block_size = shapes["key_cache"].shape[3]
        sizes = {max(block_size, first.kv_blocksize * times // 4) for times in (1, 2, 4, 8)}
        return [dataclasses.replace(first, kv_blocksize=size) for size in sorted(sizes)]

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The parameters as the kernel uses them."""
        return effective(shapes, params)


kernel_registry.register(
    "page_attention",
    Platform.XLA,
    Backend.ANY,
    support=Support(
        devices=any_device(),
        dtypes=ALL_FLOATS,
        features={
            "window",
            "soft_cap",
            "sinks",
            "int8_cache",
            "fp8_cache",
            "scales",
            "gqa",
            "value_dim",
            "lse",
        },
        gradients={"query", "key_cache", "value_cache", "softmax_aux", "k_scale", "v_scale"},
    ),
)(XlaPageAttention)
