"""Uses of the public names: a type checker reads them (`make types`), nothing runs them."""

from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel
from ejkernel import (
    Backend,
    BwdParams,
    EjkernelError,
    FwdParams,
    InvalidInputError,
    Platform,
    Support,
    UnsupportedError,
    autotune,
    blocksparse_attention,
    dot_product_attention,
    explain,
    export_checks,
    flash_attention,
    grouped_matmul,
    kernel_registry,
    mean_pooling,
    merge_attention,
    overlay,
    page_attention,
    page_update,
    patterns,
    recurrent,
    ring_attention,
    ring_shard,
    ring_unshard,
    target,
)
from ejkernel.callib import get_shared_memory_limit, select_block_sizes
from ejkernel.ops.utils.fingerprint import device_fingerprint, short_hash, stable_json
from ejkernel.utils import chunk_array, log_sum_exp, safe_divide, timer, unchunk_array
from ejkernel.xla_utils import cdiv, prepare_cu_seqlens_from_mask, prepare_position_ids


def attention(q: Array, k: Array, v: Array, seed: Array, wanted: bool) -> None:
    assert_type(flash_attention(q, k, v), Array)
    assert_type(flash_attention(q, k, v, None, None, True, 0.1, return_lse=False), Array)
    out, lse = flash_attention(q, k, v, causal=True, sliding_window=(255, 0), return_lse=True)
    assert_type(out, Array)
    assert_type(lse, Array)
    assert_type(flash_attention(q, k, v, return_lse=wanted), Array | tuple[Array, Array])
    flash_attention(
        np.ones((1, 2, 2, 8), np.float32),
        k,
        v,
        attention_mask=jnp.ones((1, 2), bool),
        bias=k,
        softmax_scale=jnp.float32(0.1),
        dropout_prob=0.1,
        dropout_seed=seed,
        fwd_params=FwdParams(q_blocksize=64, kv_blocksize=np.int32(64)),
        bwd_params=BwdParams.from_fwd_params(FwdParams(q_blocksize=64)),
        sliding_window=[seed, None],
        logits_soft_cap=30,
        cum_seqlens_q=seed,
        cum_seqlens_k=seed,
        softmax_aux=k,
        platform="xla",
        backend=Backend.ANY,
    )
    loss: Callable[[Array], Array] = lambda q: flash_attention(q, k, v, causal=True).sum()  # noqa: E731
    jax.jit(jax.grad(loss))(q)
    assert_type(merge_attention(out, lse, out, lse), tuple[Array, Array])


def other_attention(q: Array, k: Array, v: Array, lengths: Array, mask: np.ndarray[Any, Any]) -> None:
    assert_type(dot_product_attention(q, k, v, is_causal=True), Array)
    out, residual = dot_product_attention(q, k, v, local_window_size=(8, 8), return_residual=True)
    assert_type((out, residual), tuple[Array, Array])
    assert_type(page_attention(q, k, v, lengths, lengths, block_size=16), Array)
    out, lse = page_attention(q, k, v, lengths, lengths, k_scale=0.5, return_lse=True)
    assert_type((out, lse), tuple[Array, Array])
    assert_type(page_update(k, v, k, v, lengths, lengths, cum_seqlens_q=lengths), tuple[Array, Array])
    pattern = patterns.causal() & (patterns.local(1) | patterns.strided(4) | patterns.global_tokens(1))
    assert_type(blocksparse_attention(q, k, v, pattern(8, 8), 64, causal=True), Array)
    out, lse = blocksparse_attention(q, k, v, mask, (64, 128), return_lse=True)
    assert_type((out, lse), tuple[Array, Array])
    assert_type(ring_attention(q, k, v, "ring", layout="zigzag"), Array)
    assert_type(ring_unshard(ring_shard(q, 4, "zigzag"), 4, "zigzag"), Array)


def layers(x: Array, weights: dict[str, Array], sizes: Array) -> None:
    outputs, final = recurrent(x, None, weights, "gru", lengths=sizes, bidirectional=True)
    assert_type(outputs, Array)
    del final
    assert_type(mean_pooling(x, cu_seqlens=sizes), Array)
    assert_type(grouped_matmul(x, x, sizes, group_offset=np.int32(1), preferred_element_type=jnp.float32), Array)


def selection(q: Array) -> None:
    found = explain(flash_attention, q, q, q, causal=True, device="nvidia-h200", gradients=["query"])
    explain("flash_attention", q, jax.ShapeDtypeStruct((1, 2, 2, 8), jnp.float32), q)
    if found.chosen is not None:
        assert_type(found.chosen.platform, Platform)
    for candidate in found.candidates:
        assert_type(candidate.verdict, str)
        assert_type(candidate.reasons, tuple[str, ...])
    assert_type(autotune(flash_attention)(q, q, q, causal=True), Array)
    out, lse = autotune(flash_attention)(q, q, q, return_lse=True)
    assert_type((out, lse), tuple[Array, Array])
    with overlay(flash_attention=FwdParams(q_blocksize=64)), target("nvidia-h200") as device:
        assert_type(device.kind, str)
    pinned = kernel_registry.get("flash_attention", Platform.XLA)
    pinned(q, q, q)
    assert_type(kernel_registry.list_algorithms(), list[str])
    assert_type([entry.priority for entry in kernel_registry.list_implementations("flash_attention")], list[int])
    assert_type(FwdParams.merge(FwdParams(num_warps=4), None), FwdParams)
    assert_type(FwdParams().to_dict(), dict[str, int])
    jax.export.export(jax.jit(flash_attention), disabled_checks=export_checks())


def refused(q: Array) -> None:
    """What a type checker has to find."""
    flash_attention(q, q)  # pyright: ignore[reportCallIssue]
    flash_attention(q, q, q, cuasal=True)  # pyright: ignore[reportCallIssue]
    flash_attention(q, q, q, return_lse=True).sum()  # pyright: ignore[reportAttributeAccessIssue]
    page_attention(q, q, q, q, q, num_splits="2")  # pyright: ignore[reportArgumentType]
    FwdParams(q_blocksize="64")  # pyright: ignore[reportArgumentType]
    ejkernel.flush_attention(q, q, q)  # pyright: ignore[reportAttributeAccessIssue]


@kernel_registry.register("mine", Platform.XLA, Backend.ANY, support=Support.everything(), priority=1)
def mine(x: Array) -> Array:
    return x


def errors(x: Array) -> EjkernelError:
    assert_type(mine(x), Array)
    try:
        return InvalidInputError(ejkernel.__version__)
    except UnsupportedError as error:
        return error


def utilities(x: Array, mask: Array) -> None:
    assert_type(unchunk_array(chunk_array(x, 16), 40), Array)
    assert_type(log_sum_exp(x), Array)
    assert_type(safe_divide(x, x), Array)
    with timer("products") as clock:
        clock(x @ x)
    offsets = prepare_cu_seqlens_from_mask(mask)
    assert_type(prepare_position_ids(offsets, total_length=8), Array)
    assert_type(cdiv(7, 2), int)
    assert_type(device_fingerprint(), str)
    assert_type(short_hash(stable_json({"a": 1})), str)
    assert_type(get_shared_memory_limit(), int)
    select_block_sizes(1024, 64, "gpu")
