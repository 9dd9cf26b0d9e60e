"""Splitting an axis into chunks, and the inverse."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Shaped

from ejkernel.errors import InvalidInputError
from ejkernel.utils.arguments import as_array

__all__ = ["chunk_array", "unchunk_array"]


def chunk_array(
    arr: Shaped[Array | np.ndarray, "..."], chunk_size: int, axis: int = 0, pad_value: Any = 0.0
) -> Shaped[Array, "..."]:
    """An axis split into `[…, num_chunks, chunk_size, …]`; the last chunk is padded with `pad_value`.

    Example:
        >>> chunk_array(jnp.arange(10), 4)
        Array([[0, 1, 2, 3],
               [4, 5, 6, 7],
               [8, 9, 0, 0]], dtype=int32)
    """
    arr = as_array(arr, "arr")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int | np.integer) or chunk_size <= 0:
        raise InvalidInputError(f"chunk_size is {chunk_size!r}; expected a positive int.")
    axis = _from_the_front(axis, arr.ndim)
    length = arr.shape[axis]
    num_chunks = -(-length // int(chunk_size))
    missing = num_chunks * int(chunk_size) - length
    if missing:
        widths = [(0, 0)] * arr.ndim
        widths[axis] = (0, missing)
        arr = jnp.pad(arr, widths, constant_values=jnp.asarray(pad_value).astype(arr.dtype))
    return arr.reshape(*arr.shape[:axis], num_chunks, int(chunk_size), *arr.shape[axis + 1 :])


def unchunk_array(arr: Shaped[Array | np.ndarray, "..."], original_length: int, axis: int = 0) -> Shaped[Array, "..."]:
    """The inverse of `chunk_array` with the same `axis`: two axes joined and cut to the original length.

    Example:
        >>> unchunk_array(jnp.array([[0, 1, 2, 3], [4, 5, 0, 0]]), 6)
        Array([0, 1, 2, 3, 4, 5], dtype=int32)
    """
    arr = as_array(arr, "arr")
    if arr.ndim < 2:
        raise InvalidInputError(f"arr has shape {arr.shape}; expected at least the two axes that chunk_array makes.")
    # A negative axis counts in the original array, which has one axis fewer.
    axis = _from_the_front(axis, arr.ndim - 1)
    length = arr.shape[axis] * arr.shape[axis + 1]
    is_int = isinstance(original_length, int | np.integer) and not isinstance(original_length, bool)
    if not is_int or not 0 <= original_length <= length:
        raise InvalidInputError(
            f"original_length is {original_length!r}; expected an int from 0 to {length}, the chunks' length."
        )
    joined = arr.reshape(*arr.shape[:axis], length, *arr.shape[axis + 2 :])
    return joined[(slice(None),) * axis + (slice(int(original_length)),)]


def _from_the_front(axis: int, ndim: int) -> int:
    is_int = isinstance(axis, int | np.integer) and not isinstance(axis, bool)
    if not is_int or not -ndim <= axis < ndim:
        raise InvalidInputError(
            f"axis is {axis!r}; expected an int from {-ndim} to {ndim - 1} for an array of {ndim} axes."
        )
    return int(axis) % ndim
