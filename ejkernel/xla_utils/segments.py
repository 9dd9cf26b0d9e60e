"""Segment ids: attention masks of linear size. A query attends to the keys of its segment; ids ≤ 0 are padding."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import DTypeLike, Int, Integer, Shaped

from ejkernel.errors import InvalidInputError
from ejkernel.utils.arguments import as_array, as_dtype
from ejkernel.xla_utils.packing import AnyArray, prepare_sequence_ids

__all__ = ["mask_to_segment_ids", "segment_ids_from_cu_seqlens", "segment_ids_to_mask"]


def segment_ids_from_cu_seqlens(
    cu_seqlens: Int[AnyArray, " offsets"], total_length: int | None = None
) -> Int[Array, " total_tokens"]:
    """Segment ids of packed sequences: sequence i has id i + 1, tokens past the last have -1.

    Args:
        cu_seqlens: offsets of the sequences.
        total_length: number of tokens, needed under `jit`.

    Example:
        >>> segment_ids_from_cu_seqlens(jnp.array([0, 2, 2, 3]), total_length=4)
        Array([ 1,  1,  3, -1], dtype=int32)
    """
    sequences = prepare_sequence_ids(cu_seqlens, total_length)
    return jnp.where(sequences < 0, sequences, sequences + 1)


def segment_ids_to_mask(
    segment_ids: Integer[AnyArray, "*batch seq_len"]
    | tuple[Integer[AnyArray, "*q_batch q_len"], Integer[AnyArray, "*kv_batch kv_len"]],
    dtype: DTypeLike = jnp.bool_,
    return_separate_masks: bool = False,
) -> Shaped[Array, "..."] | tuple[Shaped[Array, "..."], Shaped[Array, "..."], Shaped[Array, "..."]]:
    """The attention mask `[batch, q_len, kv_len]` that segment ids describe.

    Args:
        segment_ids: ids for self-attention, or a pair for queries and keys.
        dtype: dtype of the masks.
        return_separate_masks: also return which queries and which keys are not padding, first.

    Example:
        >>> segment_ids_to_mask(jnp.array([[1, 1, 2, 0]]), dtype=jnp.int32)[0]
        Array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 1, 0],
               [0, 0, 0, 0]], dtype=int32)
    """
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    if len(pair) != 2:
        raise InvalidInputError(f"segment_ids has {len(pair)} parts; expected one array or a pair (queries, keys).")
    q_ids, kv_ids = (as_array(ids, "segment_ids") for ids in pair)
    dtype = as_dtype(dtype, "dtype")
    for name, ids in (("query", q_ids), ("key", kv_ids)):
        if ids.ndim == 0 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise InvalidInputError(
                f"segment_ids of the {name} have shape {ids.shape} and dtype {ids.dtype}; expected integers "
                "[batch, length]."
            )
    try:
        np.broadcast_shapes(q_ids.shape[:-1], kv_ids.shape[:-1])
    except ValueError:
        raise InvalidInputError(
            f"segment_ids have shapes {q_ids.shape} and {kv_ids.shape}; expected the same batch, or 1."
        ) from None
    attention = _same_segment(q_ids, kv_ids).astype(dtype)
    if return_separate_masks:
        return (q_ids > 0).astype(dtype), (kv_ids > 0).astype(dtype), attention
    return attention


def mask_to_segment_ids(
    mask: Shaped[AnyArray, "..."], per_head: bool = False, *, check: bool = True
) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """The segment ids that give this mask: 1, 2, … in order of first appearance, -1 for padding.

    The inverse of `segment_ids_to_mask`. A traced mask cannot be checked: if segments cannot express it, the ids
    describe another mask.

    Args:
        mask: `[q_len, kv_len]`, `[batch, q_len, kv_len]` or `[batch, heads, q_len, kv_len]`; non-zero =
            attend.
        per_head: return ids for each head of a 4-D mask; otherwise the heads must be equal.
        check: verify that the ids reproduce the mask, if it is concrete.

    Returns:
        Query ids and key ids, shaped as the mask without its last and its last but one axis (and without heads).

    Raises:
        InvalidInputError: if segments cannot express the mask, because two queries share some but not all keys.

    Example:
        >>> mask_to_segment_ids(jnp.array([[0, 1, 0], [1, 0, 0], [0, 1, 0]]))
        (Array([1, 2, 1], dtype=int32), Array([ 2,  1, -1], dtype=int32))
    """
    if isinstance(mask, jax.core.Tracer):
        return _mask_to_ids(mask, per_head, check=False)
    with jax.ensure_compile_time_eval():  # a constant is checked inside jit too
        return _mask_to_ids(as_array(mask, "mask"), per_head, check)


def _mask_to_ids(mask: Array, per_head: bool, check: bool) -> tuple[Array, Array]:
    if not 2 <= mask.ndim <= 4:
        raise InvalidInputError(f"mask has shape {mask.shape}; expected [q, k], [batch, q, k] or [batch, heads, q, k].")
    if mask.ndim == 4 and not per_head:
        if mask.shape[1] == 0:
            raise InvalidInputError(f"mask has shape {mask.shape}; expected at least one head.")
        heads = mask if jnp.issubdtype(mask.dtype, jnp.floating) else mask != 0
        if check and not bool(jnp.all(heads == heads[:, :1])):
            raise InvalidInputError("mask differs between heads; pass per_head=True to get ids for each head.")
        mask = mask[:, 0]
    q_ids, kv_ids = _link_ids(mask)
    if check:
        _require_round_trip(mask, q_ids, kv_ids)
    return q_ids, kv_ids


def _same_segment(q_ids: Array, kv_ids: Array) -> Array:
    return (q_ids[..., :, None] == kv_ids[..., None, :]) & (q_ids > 0)[..., :, None]


@jax.jit
def _link_ids(mask: Array) -> tuple[Array, Array]:
    # If segments express the mask, two rows that share one key are equal. So the first key of a row identifies its
    # segment, and the first row of that key is the first of the segment: two reductions, without comparing rows.
    *_, q_len, kv_len = mask.shape
    if mask.size == 0:
        return jnp.full(mask.shape[:-1], -1, jnp.int32), jnp.full((*mask.shape[:-2], kv_len), -1, jnp.int32)
    attend = mask != 0
    first_key = jnp.min(jnp.where(attend, jnp.arange(kv_len), kv_len), axis=-1)
    first_query = jnp.min(jnp.where(attend, jnp.arange(q_len)[:, None], q_len), axis=-2)
    leader = jnp.take_along_axis(first_query, first_key, axis=-1, mode="clip")
    sees_any = first_key < kv_len
    number = jnp.cumsum((leader == jnp.arange(q_len)) & sees_any, axis=-1, dtype=jnp.int32)
    q_ids = jnp.where(sees_any, jnp.take_along_axis(number, leader, axis=-1, mode="clip"), -1)
    kv_ids = jnp.take_along_axis(q_ids, first_query, axis=-1, mode="clip")
    return q_ids, jnp.where(first_query < q_len, kv_ids, -1)


@jax.jit
def _rows_given_back(mask: Array, q_ids: Array, kv_ids: Array) -> Array:
    # A float mask must hold 0 and 1: in an additive one, 0 means attend.
    attend = mask if jnp.issubdtype(mask.dtype, jnp.floating) else mask != 0
    return jnp.all(attend == _same_segment(q_ids, kv_ids), axis=-1)


def _require_round_trip(mask: Array, q_ids: Array, kv_ids: Array) -> None:
    wrong = np.argwhere(~np.asarray(_rows_given_back(mask, q_ids, kv_ids)))
    if wrong.size:
        *batch, query = (int(index) for index in wrong[0])
        place = f"query {query}" + (f" of batch {tuple(batch)}" if batch else "")
        raise InvalidInputError(
            f"mask ({mask.dtype}{list(mask.shape)}) cannot be expressed by segment ids: {place} shares some "
            "keys with another query but not all, as in a causal or a window mask, or the mask is not "
            "boolean. Pass it as attention_mask, or combine segment ids with causal=True or sliding_window."
        )
