"""What the attention of other packages' modules can be told beside their own arguments, and how it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.contracts.support import Platform, as_member
from ejkernel.ops.attention import AttentionChecker
from ejkernel.ops.dot_product_attention import dot_product_attention
from ejkernel.ops.flash_attention import flash_attention

__all__ = ["AttentionOptions"]

_check = AttentionChecker("attention options")


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What is stated once for a module, so that no dense mask has to say it.

    Equal options are equal objects, so a module that is built again is not compiled again.

    Attributes:
        causal: query ``i`` sees keys ``j <= i``.
        sliding_window: ``(left, right)``: query ``i`` sees keys from ``i - left`` to ``i + right``, both included; an int is both
            sides, None is unbounded.
        logits_soft_cap: ``cap * tanh(logits / cap)``.
        softmax_scale: default ``head_dim ** -0.5``.
        platform: run exactly this platform's kernel, or raise.

    A single query beside several keys, which is decoding with a cache, is at the last key that its mask shows it. With other
    lengths that differ, ``causal`` and ``sliding_window`` raise: where the queries are among the keys is not known.
    """

    causal: bool = False
    sliding_window: int | tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    softmax_scale: float | None = None
    platform: Platform | str | None = None

    def __post_init__(self) -> None:
        window = tuple(self.sliding_window) if isinstance(self.sliding_window, list) else self.sliding_window
        scale = self.softmax_scale
        checked = {
            "causal": _check.flag("causal", self.causal),
            "sliding_window": _check.window("sliding_window", window),
            "logits_soft_cap": _check.soft_cap(self.logits_soft_cap),
            "softmax_scale": None if scale is None else _check.number("softmax_scale", scale, "a number"),
            "platform": as_member(self.platform, Platform, "attention options: platform"),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def attended(
    options: AttentionOptions,
    query: Array,
    key: Array,
    value: Array,
    *,
    check: AttentionChecker,
    mask: Array | None = None,
    bias: Array | None = None,
    top_left: bool = False,
    dropout: tuple[float, Array | None] = (0.0, None),
    same_dropout: bool = False,
) -> Array:
    """Attention of ``[B, S, H, D]`` arrays.

    Args:
        options: of the module.
        query, key, value: of one dtype.
        check: of the caller, which errors name.
        mask: boolean, four sizes that are those of ``[B, H, Sq, Sk]`` or 1.
        bias: floats, likewise.
        top_left: causal, with query ``i`` beside key ``i`` whatever the lengths are.
        dropout: share of the weights to drop, and the seed that decides which; see ``dropout_of``.
        same_dropout: drop the same ones in every batch entry and head.
    """
    check.main_arrays(query, key, value)
    q_len, kv_len = query.shape[1], key.shape[1]
    causal, window = options.causal, options.sliding_window
    if q_len != kv_len and (causal or window != (None, None)):
        _check_lengths(options, check, q_len, kv_len, top_left)
        mask, window = _beside_last(mask, window, kv_len)
    share, seed = dropout
    more: dict[str, Any] = {"logits_soft_cap": options.logits_soft_cap, "dropout_seed": seed}

    def attend(query, key, value, mask, bias):
        if top_left and q_len != kv_len:
            return dot_product_attention(
                query, key, value, bias, mask, scale=options.softmax_scale, is_causal=True,
                implementation=options.platform, dropout_rate=share, **more,
            )  # fmt: skip
        return flash_attention(
            query, key, value, mask, bias, causal or top_left, options.softmax_scale, share,
            sliding_window=window, platform=options.platform, **more,
        )  # fmt: skip

    if share and same_dropout:
        return _by_head(attend, query, key, value, mask, bias)
    return attend(query, key, value, mask, bias)


def _check_lengths(options: AttentionOptions, check: AttentionChecker, q_len: int, kv_len: int, top_left: bool) -> None:
    name, value = ("causal", True) if options.causal else ("sliding_window", options.sliding_window)
    if top_left:
        check.fail(name, value, f"unset beside is_causal=True with {q_len} queries and {kv_len} keys")
    if q_len > 1:
        check.fail(
            name,
            value,
            f"unset with {q_len} queries and {kv_len} keys, of which it is not known who is beside whom: "
            "leave it out for this module and pass a mask",
        )


def dropout_of(
    check: AttentionChecker, rate_name: str, rate: Any, key_name: str, key: Any, off: bool
) -> tuple[float, Array | None]:
    """The share of the weights to drop and a seed, from a key of ``jax.random``; nothing is dropped where it is off."""
    share = 0.0 if off else check.probability(rate_name, rate)
    if share == 0:
        return 0.0, None
    given = isinstance(key, Array | np.ndarray)
    typed = given and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not given or not (key.shape == () if typed else key.dtype == jnp.uint32 and key.ndim == 1):
        shown = key if given or key is None else type(key)  # flax's Rngs has every attribute that it is asked for
        check.fail(key_name, shown, f"one key, such as jax.random.key(0), since {rate_name} is above 0")
    return share, jax.random.bits(key, dtype=jnp.uint32)


def _beside_last(mask: Array | None, window: tuple, kv_len: int) -> tuple[Array | None, tuple]:
    """A mask of single queries that leaves out what is left of the window, and what else is to be told of the window."""
    left = window[0]
    if mask is None or left is None:
        # Without a mask the query is at the last key, where flash_attention takes it to be; right of that is nothing.
        return mask, (left, None)
    position = jnp.arange(kv_len, dtype=jnp.int32)
    mask = jnp.broadcast_to(mask, (*mask.shape[:3], kv_len))
    last = jnp.where(mask, position, -1).max(-1, keepdims=True)
    return mask & (position >= last - left), (None, None)


def _by_head(attend: Callable, query: Array, key: Array, value: Array, mask: Any, bias: Any) -> Array:
    """Each head of each batch entry by itself, so that all have indices of 0, from which dropout is decided."""
    batch, _, heads, _ = query.shape
    key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
    main = [x.swapaxes(1, 2).reshape(batch * heads, x.shape[1], x.shape[3]) for x in (query, key, value)]
    extra, axes = [], []
    for x in (mask, bias):
        shared = x is None or x.shape[:2] == (1, 1)
        axes.append(None if shared else 0)
        if x is not None:
            x = x[0] if shared else jnp.broadcast_to(x, (batch, heads, *x.shape[2:])).reshape(-1, 1, *x.shape[2:])
        extra.append(x)

    def one(query, key, value, mask, bias):
        # [S, D] and [1, Sq, Sk] as a batch of one entry with one head.
        query, key, value = (x[None, :, None] for x in (query, key, value))
        mask, bias = (None if x is None else x[None] for x in (mask, bias))
        return attend(query, key, value, mask, bias)[0, :, 0]

    out = jax.vmap(one, in_axes=(0, 0, 0, *axes))(*main, *extra)
    return out.reshape(batch, heads, *out.shape[1:]).swapaxes(1, 2)
