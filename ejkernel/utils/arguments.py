"""Conversion of arguments to arrays and dtypes, with errors that name the argument."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.errors import InvalidInputError

__all__ = ["as_array", "as_dtype"]


def as_array(value: Any, name: str) -> Array:
    """A value converted to a JAX array.

    Example:
        >>> as_array([1, 2], "x")
        Array([1, 2], dtype=int32)
    """
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{name} is {str(value)[:60]!r} ({type(value).__name__}); expected an array or what makes one ({error})."
        ) from None


def as_dtype(dtype: Any, name: str) -> jnp.dtype:
    """A dtype from its name, its scalar type or a dtype.

    Example:
        >>> as_dtype("bfloat16", "dtype")
        dtype(bfloat16)
    """
    try:
        return jnp.dtype(dtype)
    except TypeError:
        raise InvalidInputError(f"{name} is {dtype!r}; expected a dtype, such as jnp.float32.") from None
