"""Arithmetic that stays finite where it can."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Inexact, Num, Shaped

from ejkernel.errors import InvalidInputError

__all__ = ["log_sum_exp", "safe_divide"]

AnyArray = Array | np.ndarray


def log_sum_exp(
    x: Num[AnyArray, "..."], axis: int | Sequence[int] | None = None, keepdims: bool = False
) -> Inexact[Array, "..."]:
    """`log(sum(exp(x)))` without overflow.

    Nothing to sum, or only -inf, gives -inf (with gradient 0); any +inf gives +inf. Half
    precision is summed in float32; the result has the input's dtype.

    Example:
        >>> round(float(log_sum_exp(jnp.array([1000.0, 1001.0, 1002.0]))), 3)
        1002.408
        >>> log_sum_exp(jnp.full((2, 3), -jnp.inf), axis=1)
        Array([-inf, -inf], dtype=float32)
    """
    x = jnp.asarray(x)
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(float)
    wide = x.astype(jnp.promote_types(dtype, jnp.float32))
    axis = tuple(axis) if isinstance(axis, Sequence) else axis
    largest = jax.lax.stop_gradient(jnp.max(wide, axis=axis, keepdims=True, initial=-jnp.inf))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    total = jnp.sum(jnp.exp(wide - largest), axis=axis, keepdims=True)
    # Two selections, since the gradient of log(0) would be NaN even where its value is not used.
    empty = total == 0
    result = jnp.where(empty, -jnp.inf, jnp.log(jnp.where(empty, 1, total)) + largest).astype(dtype)
    return result if keepdims else jnp.squeeze(result, axis=axis)


def safe_divide(
    numerator: Shaped[AnyArray, "..."] | float | int,
    denominator: Shaped[AnyArray, "..."] | float | int,
    min_denominator: float | int = 1e-10,
) -> Inexact[Array, "..."]:
    """`numerator / denominator`, with a denominator nearer to zero than `min_denominator` moved out to it.

    It keeps its sign. The bound is never below the smallest normal number of the dtype: it must not vanish.

    Example:
        >>> safe_divide(jnp.array([1.0, 1.0]), jnp.array([-2.0, 0.5]))
        Array([-0.5,  2. ], dtype=float32)
        >>> bool(jnp.isfinite(safe_divide(jnp.float16(1), jnp.float16(0))))
        True
    """
    if not 0 < min_denominator < math.inf:
        raise InvalidInputError(f"min_denominator is {min_denominator!r}; expected a positive, finite number.")
    numerator, denominator = jnp.asarray(numerator), jnp.asarray(denominator)
    dtype = jnp.result_type(numerator, denominator)
    dtype = dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise InvalidInputError(f"numerator and denominator are {dtype}; expected real numbers.")
    denominator = denominator.astype(dtype)
    bound = jnp.asarray(max(min_denominator, float(jnp.finfo(dtype).smallest_normal)), dtype)
    return numerator.astype(dtype) / jnp.copysign(jnp.maximum(jnp.abs(denominator), bound), denominator)
