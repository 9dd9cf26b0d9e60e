"""Packed sequences: sequences of different lengths, concatenated along one axis.

Their offsets, `cu_seqlens`, are `[0, len_0, len_0 + len_1, …]`: one more than there are sequences, which may be empty.
Under `jit` the values of the offsets are unknown, so the length of a result must be given; positions past the last
sequence are then -1, or 0 in packed data.
"""

from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import DTypeLike, Int, Integer, Shaped

from ejkernel.errors import InvalidInputError
from ejkernel.utils.arguments import as_array, as_dtype
from ejkernel.utils.values import concrete

__all__ = [
    "cdiv",
    "cu_seqlens_from_lens",
    "pack",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "prepare_cu_seqlens_from_mask",
    "prepare_lens",
    "prepare_lens_from_mask",
    "prepare_position_ids",
    "prepare_sequence_ids",
    "prepare_token_indices",
    "unpack",
]

AnyArray = Array | np.ndarray
Whole = int | np.integer | Integer[AnyArray, "..."]


@overload
def cdiv(a: int, b: int) -> int: ...
@overload
def cdiv(a: Whole, b: Whole) -> Whole: ...
def cdiv(a: Whole, b: Whole) -> Whole:
    """Division of integers, rounded up.

    Example:
        >>> cdiv(7, 2), cdiv(jnp.array([0, 4, 5]), 4)
        (4, Array([0, 1, 2], dtype=int32))
    """
    # Not (a + b - 1) // b, which overflows near the end of the dtype.
    return a // b + (a % b != 0)


def prepare_lens(cu_seqlens: Int[AnyArray, " offsets"]) -> Int[Array, " offsets-1"]:
    """Lengths of the sequences.

    Example:
        >>> prepare_lens(jnp.array([0, 5, 12, 18]))
        Array([5, 7, 6], dtype=int32)
    """
    offsets = _as_offsets(cu_seqlens)
    return offsets[1:] - offsets[:-1]


def prepare_lens_from_mask(mask: Shaped[AnyArray, "batch seq_len"]) -> Int[Array, " batch"]:
    """Number of non-zero elements in each row of a mask of any dtype.

    Example:
        >>> prepare_lens_from_mask(jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]]))
        Array([3, 2], dtype=int32)
    """
    mask = as_array(mask, "mask")
    if mask.ndim != 2:
        raise InvalidInputError(f"mask has shape {mask.shape}; expected [batch, seq_len].")
    return jnp.sum(mask != 0, axis=-1, dtype=jnp.int32)


def prepare_cu_seqlens_from_mask(
    mask: Shaped[AnyArray, "batch seq_len"], out_dtype: DTypeLike = jnp.int32
) -> Int[Array, " batch+1"]:
    """Offsets of the sequences that a padding mask describes.

    Example:
        >>> prepare_cu_seqlens_from_mask(jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]]))
        Array([0, 3, 5], dtype=int32)
    """
    return cu_seqlens_from_lens(prepare_lens_from_mask(mask), out_dtype)


def cu_seqlens_from_lens(lens: Int[AnyArray, " batch"], out_dtype: DTypeLike | None = None) -> Int[Array, " batch+1"]:
    """Offsets of sequences of these lengths, in the dtype of `lens` unless `out_dtype` is given.

    Example:
        >>> cu_seqlens_from_lens(jnp.array([3, 0, 2]))
        Array([0, 3, 3, 5], dtype=int32)
    """
    vector = _as_signed_vector(lens, "lens")
    host, lens = _on_host(lens, needed=False), vector
    dtype = lens.dtype if out_dtype is None else as_dtype(out_dtype, "out_dtype")
    if not jnp.issubdtype(dtype, jnp.integer):
        raise InvalidInputError(f"out_dtype is {dtype}; expected an integer dtype, since offsets are.")
    if host is not None and int(np.sum(host, dtype=object)) > jnp.iinfo(dtype).max:
        raise InvalidInputError(
            f"lens add up to {np.sum(host, dtype=object)}; expected a sum that fits {dtype}: pass a wider out_dtype."
        )
    return jnp.pad(jnp.cumsum(lens, dtype=dtype), (1, 0))


def prepare_sequence_ids(
    cu_seqlens: Int[AnyArray, " offsets"], total_length: int | None = None
) -> Int[Array, " total_tokens"]:
    """The index of each token's sequence.

    Args:
        cu_seqlens: offsets of the sequences.
        total_length: number of tokens, needed under `jit`; those past the last sequence get -1.

    Example:
        >>> prepare_sequence_ids(jnp.array([0, 3, 3, 5]), total_length=6)
        Array([ 0,  0,  0,  2,  2, -1], dtype=int32)
    """
    total = _total(cu_seqlens, total_length, prepare_sequence_ids)
    return _sequence_ids(_as_offsets(cu_seqlens), total)


def prepare_position_ids(
    cu_seqlens: Int[AnyArray, " offsets"], total_length: int | None = None
) -> Int[Array, " total_tokens"]:
    """The position of each token in its sequence.

    Args:
        cu_seqlens: offsets of the sequences.
        total_length: number of tokens, needed under `jit`; those past the last sequence get -1.

    Example:
        >>> prepare_position_ids(jnp.array([0, 3, 5]))
        Array([0, 1, 2, 0, 1], dtype=int32)
    """
    total = _total(cu_seqlens, total_length, prepare_position_ids)
    offsets = _as_offsets(cu_seqlens)
    return _position_ids(offsets, _sequence_ids(offsets, total))


def prepare_token_indices(
    cu_seqlens: Int[AnyArray, " offsets"], total_length: int | None = None
) -> Int[Array, "total_tokens 2"]:
    """The pair (sequence, position in it) of each token.

    Args:
        cu_seqlens: offsets of the sequences.
        total_length: number of tokens, needed under `jit`; those past the last sequence get (-1, -1).

    Example:
        >>> prepare_token_indices(jnp.array([0, 2, 3])).tolist()
        [[0, 0], [0, 1], [1, 0]]
    """
    total = _total(cu_seqlens, total_length, prepare_token_indices)
    return _token_indices(_as_offsets(cu_seqlens), total)


def prepare_chunk_offsets(cu_seqlens: Int[AnyArray, " offsets"], chunk_size: int) -> Int[Array, " offsets"]:
    """Offsets in chunks instead of tokens; every sequence starts a new chunk.

    Example:
        >>> prepare_chunk_offsets(jnp.array([0, 5, 5, 9]), chunk_size=4)
        Array([0, 2, 2, 3], dtype=int32)
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int | np.integer) or chunk_size <= 0:
        raise InvalidInputError(f"chunk_size is {chunk_size!r}; expected a positive int.")
    lens = prepare_lens(cu_seqlens)
    # A chunk size above the dtype's largest value has the same effect as that value.
    return cu_seqlens_from_lens(cdiv(lens, min(int(chunk_size), jnp.iinfo(lens.dtype).max)))


def prepare_chunk_indices(
    cu_seqlens: Int[AnyArray, " offsets"], chunk_size: int, total_chunks: int | None = None
) -> Int[Array, "total_chunks 2"]:
    """The pair (sequence, index of the chunk in it) of each chunk.

    Args:
        cu_seqlens: offsets of the sequences.
        chunk_size: tokens per chunk; the last chunk of a sequence may have fewer.
        total_chunks: number of chunks, needed under `jit`; those past the last get (-1, -1).

    Example:
        >>> prepare_chunk_indices(jnp.array([0, 5, 5, 9]), chunk_size=4).tolist()
        [[0, 0], [0, 1], [2, 0]]
    """
    chunk_offsets = prepare_chunk_offsets(cu_seqlens, chunk_size)
    host = _offsets_on_host(cu_seqlens, needed=total_chunks is None)
    needed = None if host is None else int(np.sum(cdiv(np.diff(host), int(chunk_size))))
    return _token_indices(chunk_offsets, _static_size(total_chunks, needed, "total_chunks", prepare_chunk_indices))


def pack(
    padded: Shaped[AnyArray, "batch seq_len *features"],
    lens: Int[AnyArray, " batch"],
    total_length: int | None = None,
) -> tuple[Shaped[Array, " total_tokens *features"], Int[Array, " batch+1"]]:
    """Padded rows converted to packed tokens.

    Args:
        padded: `[batch, seq_len, …]`; elements past a row's length are ignored.
        lens: length of each row.
        total_length: number of tokens, needed under `jit`; those past the last sequence are 0.

    Returns:
        The packed tokens `[total_length, …]` and their offsets.

    Example:
        >>> pack(jnp.array([[1, 2, 0], [3, 0, 0]]), jnp.array([2, 1]))
        (Array([1, 2, 3], dtype=int32), Array([0, 2, 3], dtype=int32))
    """
    vector = _as_signed_vector(lens, "lens")
    host = _on_host(lens, needed=total_length is None)
    padded, lens = as_array(padded, "padded"), vector
    if padded.ndim < 2 or padded.shape[0] != lens.shape[0]:
        raise InvalidInputError(
            f"padded has shape {padded.shape} and lens {lens.shape}; expected [batch, seq_len, …], [batch]."
        )
    if host is not None and (np.any(host < 0) or np.any(host > padded.shape[1])):
        raise InvalidInputError(f"lens is {host}; expected lengths from 0 to padded's {padded.shape[1]}.")
    needed = None if host is None else int(np.sum(host))
    total = _static_size(total_length, needed, "total_length", pack)
    offsets = cu_seqlens_from_lens(lens)
    sequences = _sequence_ids(offsets, total)
    if padded.size == 0:
        return jnp.zeros((total, *padded.shape[2:]), padded.dtype), offsets
    tokens = padded.at[sequences, _position_ids(offsets, sequences)].get(mode="clip")
    return _zero_where_not(sequences >= 0, tokens), offsets


def unpack(
    packed: Shaped[AnyArray, " total_tokens *features"],
    cu_seqlens: Int[AnyArray, " offsets"],
    max_length: int | None = None,
) -> Shaped[Array, "offsets-1 max_length *features"]:
    """Packed tokens converted to padded rows, zeros past each sequence's end: the inverse of `pack`.

    Args:
        packed: `[total_tokens, …]`.
        cu_seqlens: offsets of the sequences.
        max_length: length of the rows, needed under `jit`; by default that of the longest sequence.

    Example:
        >>> unpack(jnp.array([1, 2, 3]), jnp.array([0, 2, 3]))
        Array([[1, 2],
               [3, 0]], dtype=int32)
    """
    host = _offsets_on_host(cu_seqlens, needed=max_length is None)
    packed, offsets = as_array(packed, "packed"), _as_offsets(cu_seqlens)
    if packed.ndim == 0:
        raise InvalidInputError("packed is a scalar; expected [total_tokens, …].")
    if host is not None and host[-1] > packed.shape[0]:
        raise InvalidInputError(f"cu_seqlens ends at {host[-1]}; expected at most packed's {packed.shape[0]} tokens.")
    longest = None if host is None else int(np.max(np.diff(host), initial=0))
    length = _static_size(max_length, longest, "max_length", unpack)
    within = jnp.arange(length)
    inside = within < prepare_lens(offsets)[:, None]
    if packed.size == 0:
        return jnp.zeros((*inside.shape, *packed.shape[1:]), packed.dtype)
    rows = packed.at[offsets[:-1, None] + within].get(mode="clip")
    return _zero_where_not(inside, rows)


def _zero_where_not(keep: Array, values: Array) -> Array:
    keep = keep.reshape(keep.shape + (1,) * (values.ndim - keep.ndim))
    return jnp.where(keep, values, jnp.zeros((), values.dtype))


# Up to this many sequences, every token is compared with every end: one small kernel, where a scatter and a cumulative
# sum are six sequential kernels on a GPU.
FEW = 64


def _sequence_ids(offsets: Array, total: int) -> Array:
    # A token's sequence is the number of sequences that end at or before it, which is right for empty ones too.
    # Indices narrower than int32 overflow in JAX's own arithmetic.
    ends, place = offsets[1:].astype(jnp.promote_types(offsets.dtype, jnp.int32)), jnp.arange(total)
    if ends.size <= FEW:
        before = (ends[:, None] <= place).sum(0, dtype=jnp.int32)
    else:
        before = jnp.cumsum(jnp.zeros(total, jnp.int32).at[ends].add(1, mode="drop", indices_are_sorted=True))
    return jnp.where(place < offsets[-1], before, -1).astype(offsets.dtype)


def _position_ids(offsets: Array, sequences: Array) -> Array:
    starts = offsets.at[sequences.astype(jnp.int32)].get(mode="clip")
    places = jnp.arange(sequences.shape[0]) - starts
    return jnp.where(sequences >= 0, places, -1).astype(offsets.dtype)


def _token_indices(offsets: Array, total: int) -> Array:
    sequences = _sequence_ids(offsets, total)
    return jnp.stack([sequences, _position_ids(offsets, sequences)], axis=1)


def _as_signed_vector(values: Any, name: str) -> Array:
    values = as_array(values, name)
    if values.ndim != 1 or not jnp.issubdtype(values.dtype, jnp.signedinteger):
        raise InvalidInputError(
            f"{name} has shape {values.shape} and dtype {values.dtype}; expected one axis of signed "
            "integers, such as int32."
        )
    return values


def _as_offsets(cu_seqlens: Any) -> Array:
    offsets = _as_signed_vector(cu_seqlens, "cu_seqlens")
    if offsets.shape[0] == 0:
        raise InvalidInputError("cu_seqlens is empty; expected [0, …], one more than there are sequences.")
    if offsets.shape[0] - 2 > jnp.iinfo(offsets.dtype).max:
        raise InvalidInputError(
            f"cu_seqlens has {offsets.shape[0] - 1} sequences in {offsets.dtype}; expected a dtype that can number them."
        )
    return offsets


def _on_host(values: Any, needed: bool) -> np.ndarray | None:
    """The values on the host, None if traced; where they are not needed but checked, only if that costs no copy.

    For arguments only: inside `jit` every computed array is traced.
    """
    if isinstance(values, jax.core.Tracer):
        return None
    return np.asarray(values) if needed or not isinstance(values, jax.Array) else concrete(values)


def _offsets_on_host(cu_seqlens: Any, needed: bool) -> np.ndarray | None:
    _as_offsets(cu_seqlens)
    host = _on_host(cu_seqlens, needed)
    if host is not None and (host[0] != 0 or np.any(host[1:] < host[:-1])):
        raise InvalidInputError(f"cu_seqlens is {host}; expected offsets that begin with 0 and never fall.")
    return host


def _total(cu_seqlens: Any, total_length: int | None, function: Callable) -> int:
    """The requested length of the packed axis, else the last offset."""
    host = _offsets_on_host(cu_seqlens, needed=total_length is None)
    return _static_size(total_length, None if host is None else int(host[-1]), "total_length", function)


def _static_size(size: Any, needed: int | None, name: str, function: Callable) -> int:
    """The requested size, else the needed one, which is None if the values are traced."""
    if size is None:
        if needed is None:
            raise InvalidInputError(
                f"{function.__name__} needs {name} when its offsets are traced (under jit or vmap), since "
                f"shapes are static: pass {name}=<int>, for instance the length of the packed axis."
            )
        return needed
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 0:
        raise InvalidInputError(f"{name} is {size!r}; expected a static int of at least 0.")
    if needed is not None and size < needed:
        raise InvalidInputError(f"{name} is {size}; expected at least {needed}, which the sequences fill.")
    return int(size)
