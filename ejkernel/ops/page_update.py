"""``page_update``: writing new tokens' keys and values into a paged cache."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Integer, Num

from ejkernel.errors import UnsupportedError
from ejkernel.kernels.common.page_columns import tokens_are_columns
from ejkernel.kernels.common.query_tiles import sequences
from ejkernel.ops.core.checks import Checker
from ejkernel.ops.core.operation import AnyArray
from ejkernel.ops.core.run import usual_promotion
from ejkernel.ops.paging import (
    NARROW_CACHES,
    as_factor,
    check_caches,
    check_factor,
    check_placement,
    check_placement_values,
    placement,
)

_check = Checker("page_update")


def page_update(
    key_cache: Num[AnyArray, "num_blocks kv_heads block_size head_dim"],
    value_cache: Num[AnyArray, "num_blocks kv_heads block_size value_dim"],
    key: Float[AnyArray, "tokens kv_heads head_dim"],
    value: Float[AnyArray, "tokens kv_heads value_dim"],
    context_lens: Integer[AnyArray, " batch"],
    block_tables: Integer[AnyArray, "batch max_blocks"],
    *,
    cum_seqlens_q: Integer[AnyArray, " offsets"] | None = None,
    k_scale: float | int | np.number | Float[AnyArray, "..."] | None = None,
    v_scale: float | int | np.number | Float[AnyArray, "..."] | None = None,
) -> tuple[Array, Array]:
    """Write the newest tokens of each sequence where ``page_attention`` with the same arguments reads them.

    Inside a ``jit`` whose caches are donated nothing is copied: only the new tokens are written. (But for caches of float8 on a
    CPU, and of bfloat16 until jax 0.10, which XLA copies there, and on a TPU where neither pages nor head dim are multiples of 128:
    docs/tpu.md.)

    Args:
        key_cache, value_cache: ``[num_blocks, Hkv, block_size, D]`` and ``[num_blocks, Hkv, block_size, Dv]``.
        key, value: ``[B, Hkv, D]`` and ``[B, Hkv, Dv]``, one token a sequence, or ``[T, Hkv, …]`` packed. Of the caches' dtype, or
            of any float dtype beside caches of 8 bits.
        context_lens: ``[B]``: how many tokens each context has, these included. Length 0 writes nothing.
        block_tables: ``[B, max_blocks]``; an entry below 0 writes nothing.
        cum_seqlens_q: ``[B + 1]`` offsets into packed tokens; the tokens of a sequence are the last of its context. Tokens past
            the last offset are padding and write nothing.
        k_scale, v_scale: what is stored is ``x / scale``, a scalar or ``[Hkv]``; default 1. Caches of 8 bits get it rounded to
            nearest (even) and saturated; int8, which is ±127, needs a scale.

    Returns:
        ``(key_cache, value_cache)``. Differentiable in key, value and the caches, unless these are of 8 bits.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel import page_update
        >>> cache = jnp.zeros((6, 2, 4, 8))  # 6 pages of 4 tokens, 2 heads
        >>> new = jnp.ones((2, 2, 8))  # the newest token of 2 sequences
        >>> keys, values = page_update(cache, cache, new, new, jnp.array([6, 3]), jnp.array([[4, 1], [0, -1]]))
        >>> print(keys[1, 0, 1, 0], keys[0, 0, 2, 0], keys.sum())  # token 5 is in page 1, token 2 in page 0
        1.0 1.0 32.0
    """
    k_scale, v_scale = as_factor(k_scale), as_factor(v_scale)
    _check_arrays(key_cache, value_cache, key, value)
    kv_heads = key_cache.shape[1]
    check_placement(_check, context_lens, block_tables, cum_seqlens_q, key.shape[0])
    narrow = jnp.dtype(key_cache.dtype).name == "int8"
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_factor(_check, name, scale, kv_heads)
        if scale is None and narrow:
            _check.fail(name, scale, "a scale, for int8 holds whole numbers up to 127: for instance max|x| / 127")
    where = {
        "key_cache": key_cache,
        "context_lens": context_lens,
        "block_tables": block_tables,
        "cum_seqlens_q": cum_seqlens_q,
    }
    check_placement_values(_check, where, key, None, written=True)
    return _update(key_cache, value_cache, key, value, context_lens, block_tables, cum_seqlens_q, k_scale, v_scale)


def _check_arrays(key_cache: Any, value_cache: Any, key: Any, value: Any) -> None:
    check_caches(_check, key_cache, value_cache)
    for name, array, cache in (("key", key, key_cache), ("value", value, value_cache)):
        layout = f"[tokens, {cache.shape[1]}, {cache.shape[3]}], as the cache's heads and head dim are"
        _check.array(name, array, layout, ranks=(3,), kinds=(jnp.floating,))
        if array.shape[1:] != (cache.shape[1], cache.shape[3]):
            _check.fail(name, array, layout)
        if array.dtype != cache.dtype and jnp.dtype(cache.dtype).name not in NARROW_CACHES:
            _check.fail(name, array, f"the cache's dtype, {cache.dtype}: cast one of them")
    if value.shape[0] != key.shape[0]:
        _check.fail("value", value, f"as many tokens as key, {key.shape[0]}")


@jax.jit
def _update(key_cache, value_cache, key, value, context_lens, block_tables, offsets, k_scale, v_scale):
    with usual_promotion():
        at = _slots(key_cache, key, context_lens, block_tables, offsets)
        return _written(key_cache, key, k_scale, at), _written(value_cache, value, v_scale, at)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("blocks", "slots"), meta_fields=("pages",))
@dataclass(frozen=True)
class _Slots:
    """The block and the slot of each token, ``[T]``; blocks past the end, each another, for what is not written.

    ``pages``: as many as are written to at most.
    """

    blocks: Array
    slots: Array
    pages: int


def _slots(cache: Array, key: Array, lens: Any, tables: Any, offsets: Any) -> _Slots:
    blocks, _, block_size, _ = cache.shape
    tokens = key.shape[0]
    token = jnp.arange(tokens, dtype=jnp.int32)
    none = blocks + token
    # A sequence's tokens fill pages but for the first and the last.
    pages = tokens if offsets is None else min(tokens, tokens // block_size + 2 * tables.shape[0])
    if 0 in tables.shape:
        return _Slots(none, jnp.zeros_like(token), pages)
    arrays = {"query": key, **placement(lens, tables, offsets, tokens, block_size)}
    s = sequences({name: array[None] for name, array in arrays.items()})
    owner, owned = s.owner() if s.packed else (token, True)
    position = s.lens[owner] - s.count[owner] + token - s.begin[owner]
    entry = s.tables[owner, jnp.clip(position // block_size, 0, s.tables.shape[1] - 1)]
    writes = owned & (position >= 0) & (entry >= 0) & (entry < blocks)
    return _Slots(jnp.where(writes, entry, none), position % block_size, pages)


def _written(cache: Array, tokens: Array, scale: Array | None, at: _Slots) -> Array:
    """The cache with the tokens in their slots."""
    if jnp.dtype(cache.dtype).name in NARROW_CACHES:
        return _quantised(cache, tokens, scale, at)
    return _scattered(cache, _divided(tokens, scale).astype(cache.dtype), at)


def _scattered(cache: Array, stored: Array, at: _Slots) -> Array:
    if not tokens_are_columns(cache):
        return _by_token(cache, stored, at)
    return lax.platform_dependent(
        cache, stored, tpu=lambda *pair: _by_page(*pair, at), default=lambda *pair: _by_token(*pair, at)
    )


def _by_token(cache: Array, stored: Array, at: _Slots) -> Array:
    # One index a token and a head, and heads as a batch: with slices over all heads a TPU's compiler turns the cache over, which copies it;
    # with heads as indices a mesh's devices that share them would gather the tokens.
    places = jnp.broadcast_to(jnp.stack([at.blocks, at.slots], -1)[:, None], (*stored.shape[:2], 2))
    return lax.scatter(
        cache,
        places,
        stored,
        lax.ScatterDimensionNumbers(
            update_window_dims=(2,),
            inserted_window_dims=(0, 2),
            scatter_dims_to_operand_dims=(0, 2),
            operand_batching_dims=(1,),
            scatter_indices_batching_dims=(1,),
        ),
        unique_indices=True,
        mode="drop",
    )


def _by_page(cache: Array, stored: Array, at: _Slots) -> Array:
    """The same by whole pages, which are taken, mended and put back: to write columns a TPU's compiler turns the cache over."""
    blocks, size, count = cache.shape[0], cache.shape[2], stored.shape[0]
    order = jnp.argsort(at.blocks).astype(jnp.int32)
    block = at.blocks[order]
    first = (block < blocks) & jnp.concatenate([jnp.ones(1, bool), block[1:] != block[:-1]])
    run = jnp.where(block < blocks, jnp.cumsum(first) - 1, at.pages)
    none = blocks + jnp.arange(at.pages, dtype=jnp.int32)
    page = none.at[jnp.where(first, run, at.pages)].set(block, mode="drop")
    # Which token each column is to hold, past the end where it stays.
    token = jnp.full((at.pages, size), count, jnp.int32).at[run, at.slots[order]].set(order, mode="drop")
    pages = cache.swapaxes(2, 3)
    old, new = pages.at[page].get(mode="clip"), stored.at[token].get(mode="clip")
    mended = _chosen((token < count)[:, None, None], jnp.moveaxis(new, 1, 3), old)
    return pages.at[page].set(mended, mode="drop", unique_indices=True).swapaxes(2, 3)


def _chosen(condition: Array, x: Array, y: Array) -> Array:
    """``where``, which of 8 bits keeps those of a NaN."""
    if jnp.dtype(x.dtype).name not in NARROW_CACHES:
        return jnp.where(condition, x, y)
    chosen = jnp.where(condition, *(lax.bitcast_convert_type(array, jnp.uint8) for array in (x, y)))
    return lax.bitcast_convert_type(chosen, x.dtype)


def _as_bytes(cache: Array, stored: Array, at: _Slots) -> Array:
    """A CPU's compiler converts all of a float8 array to float16 and back for a scatter, which takes seven times as long and need not
    keep a NaN's bits; a TPU's copies an array to see it as bytes."""
    pages, stored = (lax.bitcast_convert_type(array, jnp.uint8) for array in (cache, stored))
    return lax.bitcast_convert_type(_scattered(pages, stored, at), cache.dtype)


@jax.custom_jvp
def _quantised(cache: Array, tokens: Array, scale: Array | None, at: _Slots) -> Array:
    """The same for a cache of 8 bits."""
    x = _divided(tokens, scale)
    if cache.dtype == jnp.int8:
        return _scattered(cache, jnp.clip(jnp.round(jnp.nan_to_num(x, nan=0.0)), -127, 127).astype(jnp.int8), at)
    largest = float(jnp.finfo(cache.dtype).max)
    stored = jnp.clip(x, -largest, largest).astype(cache.dtype)
    return lax.platform_dependent(
        cache, stored, cpu=lambda *pair: _as_bytes(*pair, at), default=lambda *pair: _scattered(*pair, at)
    )


@_quantised.defjvp
def _refuse(primals: tuple, tangents: tuple) -> None:
    raise UnsupportedError(
        f"page_update: there is no gradient through a cache of {primals[0].dtype}: stop the gradient of key, value and "
        "caches, or differentiate with caches of the key's dtype."
    )


def _divided(tokens: Array, scale: Array | None) -> Array:
    """``x / scale`` in float32 at least."""
    wide = tokens.astype(jnp.promote_types(tokens.dtype, np.float32))
    if scale is None:
        return wide
    divisors = jnp.broadcast_to(jnp.reshape(jnp.asarray(scale, wide.dtype), (-1, 1)), wide.shape)
    # Without the barrier the compiler multiplies by the reciprocal, which is another number: ties then round the wrong way.
    return wide / lax.optimization_barrier(divisors)
