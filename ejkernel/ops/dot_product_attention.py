"""``dot_product_attention``: the arguments of ``jax.nn.dot_product_attention``, the kernels of ``flash_attention``."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int32, Num

from ejkernel.contracts.support import Platform, as_member
from ejkernel.ops.attention import AttentionChecker, Side, as_seed, key_intervals, within
from ejkernel.ops.core.checks import is_data
from ejkernel.ops.core.operation import AnyArray, Operation
from ejkernel.ops.flash_attention import OPERATION

_check = AttentionChecker("dot_product_attention")


def dot_product_attention(
    query: Float[AnyArray, "*batch q_len heads head_dim"],
    key: Float[AnyArray, "*batch kv_len kv_heads head_dim"],
    value: Float[AnyArray, "*batch kv_len kv_heads head_dim"],
    bias: Num[AnyArray, "..."] | None = None,
    mask: Bool[AnyArray, "..."] | None = None,
    *,
    scale: float | int | np.number | Num[AnyArray, ""] | None = None,
    is_causal: bool | np.bool_ = False,
    query_seq_lengths: Int32[AnyArray, "..."] | Sequence[int] | None = None,
    key_value_seq_lengths: Int32[AnyArray, "..."] | Sequence[int] | None = None,
    local_window_size: Side | Sequence[Side] = None,
    implementation: Platform | str | None = None,
    return_residual: bool = False,
    dropout_rate: float | int | np.number = 0.0,
    dropout_seed: int | np.integer | Num[AnyArray, ""] | None = None,
    logits_soft_cap: float | int | np.number | None = None,
) -> Float[Array, "*batch q_len heads head_dim"] | tuple[Array, Array]:
    """What ``jax.nn.dot_product_attention`` computes, in memory that grows with the length, not with its square.

    Position ``i`` of the query is beside position ``i`` of the keys, whatever the lengths are: causality and windows are
    aligned top-left. ``flash_attention`` aligns bottom-right. A query that may attend to nothing gives 0.

    Args:
        query: ``[B, T, N, H]``, or ``[T, N, H]`` without a batch.
        key: ``[B, S, K, H]`` or ``[S, K, H]``; ``N`` is a multiple of ``K``.
        value: as the key.
        bias: added to the logits; broadcasts to ``[B, N, T, S]``.
        mask: boolean, True = attend; broadcasts to ``[B, N, T, S]``.
        scale: default ``H ** -0.5``. An array has a gradient.
        is_causal: query ``i`` sees keys ``j <= i``.
        query_seq_lengths: int32 ``[B]``: queries from there on give 0.
        key_value_seq_lengths: int32 ``[B]``: nobody sees keys from there on.
        local_window_size: ``(left, right)``: query ``i`` sees keys from ``i - left`` to ``i + right``; an int is both sides.
        implementation: a platform's name: run exactly its kernel, or raise. ``jax.nn`` knows ``"xla"`` and ``"cudnn"``.
        return_residual: also return the log-sum-exp of the logits, ``[B, T, N]`` or ``[T, N]`` in the key's dtype. It has no
            gradient, as there.
        dropout_rate, dropout_seed, logits_soft_cap: as in ``flash_attention``; ``jax.nn`` has none of them.

    Returns:
        As the query, or ``(out, residual)``. Query, key, value, bias and a scale that is an array have gradients.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel import dot_product_attention
        >>> x = jnp.ones((2, 6, 4, 8))
        >>> lengths = jnp.array([6, 3], jnp.int32)
        >>> dot_product_attention(x, x, x, is_causal=True, query_seq_lengths=lengths)[1, :, 0, 0].tolist()
        [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    """
    arguments = locals()
    query = _check.converted("query", query)
    result = OPERATION(_as_flash(**{**arguments, "query": query}))
    if not return_residual:
        return result if query.ndim == 4 else result.reshape(query.shape)
    out, lse = result
    residual = jax.lax.stop_gradient(lse.swapaxes(1, 2).astype(query.dtype))
    return (out, residual) if query.ndim == 4 else (out.reshape(query.shape), residual.reshape(query.shape[:-1]))


def _as_flash(
    query: Any, key: Any, value: Any, bias: Any, mask: Any, *, scale: Any, is_causal: Any, query_seq_lengths: Any,
    key_value_seq_lengths: Any, local_window_size: Any, implementation: Any, return_residual: Any, dropout_rate: Any,
    dropout_seed: Any, logits_soft_cap: Any,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of ``flash_attention`` for a call."""
    query, key, value = _four("query", query), _four("key", key), _four("value", value)
    _check.main_arrays(query, key, value)
    if value.shape != key.shape:
        _check.fail("value", value, f"the key's shape, {list(key.shape)}")
    batch, q_len, heads, head_dim = query.shape
    kv_len = key.shape[1]
    full = (batch, heads, q_len, kv_len)
    if bias is not None:
        bias = _broadcastable("bias", bias, full)
        wide = jnp.promote_types(query.dtype, jnp.float32)
        bias = bias if bias.dtype in (query.dtype, wide) else bias.astype(wide)
    if mask is not None:
        mask = _broadcastable("mask", mask, full)
        if mask.dtype != bool:
            _check.fail("mask", mask, "booleans; numbers to add to the logits are a bias")
    q_lengths = _lengths("query_seq_lengths", query_seq_lengths, batch)
    kv_lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    causal, window = _check.flag("is_causal", is_causal), _window(local_window_size)
    if not is_data(scale):
        scale = _check.scale(scale, head_dim, name="scale")
    arguments: dict[str, Any] = {
        **OPERATION.defaults,
        **_check.scaled_query({"query": query, "softmax_scale": scale}, name="scale"),
        "key": key,
        "value": value,
        "attention_mask": mask,
        "bias": bias,
        "dropout_prob": _check.dropout("dropout_rate", dropout_rate, dropout_seed),
        "dropout_seed": as_seed(dropout_seed),
        "logits_soft_cap": _check.soft_cap(logits_soft_cap),
        "return_lse": _check.flag("return_residual", return_residual),
        "platform": as_member(implementation, Platform, "dot_product_attention: implementation"),
    }
    static = all(side is None or (not is_data(side) and side >= 0) for side in window)
    bounded = causal or any(side is not None for side in window)
    if static and q_lengths is None and kv_lengths is None and (q_len == kv_len or not bounded):
        # Both alignments are one, so the kernels may know of causality and the window.
        return {**arguments, "causal": causal, "sliding_window": window}
    start, stop = _intervals(window, q_lengths, kv_lengths, causal, (q_len, kv_len))
    return {**arguments, "kv_start": start, "kv_stop": stop}


def _explained(*args: Any, **kwargs: Any) -> tuple[Operation, dict[str, Any]]:
    """The operation that runs a call, and its arguments with abstract arrays."""
    bound = inspect.signature(dot_product_attention).bind(*args, **kwargs)
    bound.apply_defaults()
    leaves, tree = jax.tree.flatten(bound.arguments)
    statics: dict[str, Any] = {}

    def rewritten(arrays: list) -> dict[str, Any]:
        arrays = iter(arrays)
        mixed = [next(arrays) if is_data(leaf) else leaf for leaf in leaves]
        arguments = _as_flash(**jax.tree.unflatten(tree, mixed))
        statics.update((name, x) for name, x in arguments.items() if not is_data(x))
        return {name: x for name, x in arguments.items() if is_data(x)}

    abstract = jax.eval_shape(rewritten, [leaf for leaf in leaves if is_data(leaf)])
    return OPERATION, {**statics, **abstract}


dot_product_attention.explained = _explained


def _four(name: str, value: Any) -> Any:
    array = _check.converted(name, value)
    if array.ndim > 4:
        _check.fail(name, array, f"at most four dimensions; it has {array.ndim}")
    return array if array.ndim == 4 else array.reshape((1,) * (4 - array.ndim) + array.shape)


def _broadcastable(name: str, value: Any, full: tuple[int, ...]) -> Any:
    array = _four(name, value)
    if not all(size in (1, whole) for size, whole in zip(array.shape, full, strict=True)):
        _check.fail(name, array, f"a shape that broadcasts to {list(full)}")
    return array


def _lengths(name: str, value: Any, batch: int) -> Any:
    if value is None:
        return None
    array = _check.converted(name, value)
    if array.shape != (batch,) or array.dtype != jnp.int32:
        _check.fail(name, array, f"int32[{batch}], one length a batch entry")
    return array


def _window(window: Any) -> tuple[Any, Any]:
    """Its two sides, each None, an int (which may be negative, as in ``jax.nn``) or an array."""
    sides = tuple(window) if isinstance(window, tuple | list) else (window, window)
    expected = "an int or a pair (left, right) of them; None is unbounded"
    if len(sides) != 2:
        _check.fail("local_window_size", window, expected)
    for side in sides:
        if is_data(side):
            _check.data("local_window_size", side, expected, (jnp.integer,), abstract=False)
        elif side is not None and (isinstance(side, bool) or not isinstance(side, numbers.Integral)):
            _check.fail("local_window_size", window, expected)
    return tuple(side if side is None or is_data(side) else int(side) for side in sides)


@functools.partial(jax.jit, static_argnames=("causal", "lengths"))
def _intervals(
    window: tuple, q_lengths: Any, kv_lengths: Any, causal: bool, lengths: tuple[int, int]
) -> tuple[Array, Array]:
    """``[B|1, T]`` starts and stops of the keys that each query sees."""
    q_len, kv_len = lengths
    longest = max(lengths)
    row = jnp.arange(q_len, dtype=jnp.int32)[None]
    padding = jnp.zeros((1, q_len), bool)
    if q_lengths is not None:
        last = jnp.clip(q_lengths, 0, q_len)[:, None] - 1
        padding, row = row > last, jnp.minimum(row, last)
    end = jnp.int32(kv_len) if kv_lengths is None else jnp.clip(kv_lengths, 0, kv_len)[:, None]
    # Sides past the arrays' ends hide nothing, or everything.
    left, right = (None if side is None else within(side, -longest, longest) for side in window)
    if causal:
        right = 0 if right is None else jnp.minimum(right, 0)
    start, stop, padding = jnp.broadcast_arrays(*key_intervals(row, jnp.int32(0), end, left, right), padding)
    # Rows past the end see nothing, at the place where the last row ends: neither end may decrease.
    return jnp.where(padding, stop, start), stop
