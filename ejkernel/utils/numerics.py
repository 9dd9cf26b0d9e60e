"""Arithmetic that avoids overflow and division by zero."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Inexact, Num, Shaped

from ejkernel.errors import InvalidInputError
from ejkernel.utils.arguments import as_array

__all__ = ["log_sum_exp", "safe_divide"]

AnyArray = Array | np.ndarray


def log_sum_exp(
    x: Num[AnyArray, "..."], axis: int | Sequence[int] | None = None, keepdims: bool = False
) -> Inexact[Array, "..."]:
    """`log(sum(exp(x)))` without overflow.

    An empty sum, or one of -inf only, gives -inf (with gradient 0); any +inf gives +inf. Half precision is summed in
    float32; the result has the input's dtype.

    Example:
        >>> round(float(log_sum_exp(jnp.array([1000.0, 1001.0, 1002.0]))), 3)
        1002.408
        >>> log_sum_exp(jnp.full((2, 3), -jnp.inf), axis=1)
        Array([-inf, -inf], dtype=float32)
    """
    x = as_array(x, "x")
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(float)
    wide = x.astype(dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32)
    axis = _axes(axis, x.ndim)
    largest = jax.lax.stop_gradient(jnp.max(wide, axis=axis, keepdims=True, initial=-jnp.inf))
    finite = jnp.isfinite(largest)
    shifted = wide - jnp.where(finite, largest, 0)
    # The maximal terms are counted and the others enter through log1p: added to 1 they would be rounded away.
    top = finite & (wide == largest)
    count = jnp.maximum(jnp.sum(top, axis=axis, keepdims=True, dtype=wide.dtype), 1)
    rest = jnp.sum(jnp.where(top, 0, jnp.exp(shifted)), axis=axis, keepdims=True)
    # Counting drops the gradient of the maximal terms; expm1(0) = 0 adds it without changing the value.
    rest = rest + jnp.sum(jnp.where(top, jnp.expm1(shifted), 0), axis=axis, keepdims=True)
    known = jnp.log1p(jnp.where(finite, rest, 0) / count) + jnp.log(count) + largest
    result = jnp.where(finite, known, largest).astype(dtype)
    return result if keepdims else jnp.squeeze(result, axis=axis)


def _axes(axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    wanted = range(ndim) if axis is None else axis if isinstance(axis, Sequence) else (axis,)
    whole = all(isinstance(a, int | np.integer) and not isinstance(a, bool) and -ndim <= a < ndim for a in wanted)
    if not whole or len({a % ndim for a in wanted}) != len(wanted):
        raise InvalidInputError(f"axis is {axis!r}; expected different axes of an array of {ndim}, or None for all.")
    return tuple(int(a) % ndim for a in wanted)


def safe_divide(
    numerator: Shaped[AnyArray, "..."] | np.number | float | int,
    denominator: Shaped[AnyArray, "..."] | np.number | float | int,
    min_denominator: float | int = 1e-10,
) -> Inexact[Array, "..."]:
    """`numerator / denominator`, with the magnitude of the denominator bounded below by `min_denominator`.

    The sign is kept. The bound is at least the smallest normal number of the dtype, so that it does not underflow.

    Example:
        >>> safe_divide(jnp.array([1.0, 1.0]), jnp.array([-2.0, 0.5]))
        Array([-0.5,  2. ], dtype=float32)
        >>> bool(jnp.isfinite(safe_divide(jnp.float16(1), jnp.float16(0))))
        True
    """
    if not isinstance(min_denominator, float | int | np.number) or not 0 < min_denominator < math.inf:
        raise InvalidInputError(f"min_denominator is {min_denominator!r}; expected a positive, finite Python number.")
    numerator, denominator = as_array(numerator, "numerator"), as_array(denominator, "denominator")
    try:
        np.broadcast_shapes(numerator.shape, denominator.shape)
    except ValueError:
        raise InvalidInputError(
            f"denominator has shape {denominator.shape}; expected one that broadcasts with numerator's {numerator.shape}."
        ) from None
    dtype = jnp.result_type(numerator, denominator)
    dtype = dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise InvalidInputError(f"numerator and denominator are {dtype}; expected real numbers.")
    denominator = denominator.astype(dtype)
    bound = jnp.asarray(max(min_denominator, float(jnp.finfo(dtype).smallest_normal)), dtype)
    # A constant where the bound applies, so the gradient there is 0; that of a maximum would be inf * 0.
    moved = jax.lax.stop_gradient(jnp.copysign(bound, denominator))
    return numerator.astype(dtype) / jnp.where(jnp.abs(denominator) < bound, moved, denominator)
