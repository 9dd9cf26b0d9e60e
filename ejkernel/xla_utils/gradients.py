"""The dtype of gradients."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike, PyTree

from ejkernel.errors import InvalidInputError
from ejkernel.utils.arguments import as_dtype

__all__ = ["identity_dtype_convert"]


def identity_dtype_convert(dtype: DTypeLike) -> Callable[[PyTree], PyTree]:
    """An identity whose gradient is rounded to `dtype` in the backward pass, and keeps the input's dtype.

    Example:
        >>> through_bf16 = identity_dtype_convert(jnp.bfloat16)
        >>> float(jax.grad(lambda x: 1.001 * through_bf16(x))(1.0))
        1.0
    """
    target = as_dtype(dtype, "dtype")
    if not jnp.issubdtype(target, jnp.inexact):
        raise InvalidInputError(f"dtype is {target}; expected a floating-point dtype, since gradients are.")
    return _identity(target)


@functools.cache  # one function per dtype, so that jit's cache is hit
def _identity(dtype: jnp.dtype) -> Callable[[PyTree], PyTree]:
    def rounded(cotangent):
        if cotangent.dtype == jax.dtypes.float0:  # the input was an integer
            return cotangent
        # XLA may cancel a pair of conversions and keep the excess precision; the barrier forbids it.
        return jax.lax.optimization_barrier(cotangent.astype(dtype)).astype(cotangent.dtype)

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, cotangents: (jax.tree.map(rounded, cotangents),))
    return identity
