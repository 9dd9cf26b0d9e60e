"""One tile's product on the matrix unit."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def passes(x: Any, y: Any, operands: Any) -> int:
    """How often the matrix unit, which multiplies bfloat16, goes over a product of these dtypes."""
    if x == y:
        return 1 if x == jnp.bfloat16 else 6
    return 2 if operands == jnp.bfloat16 else 6


def dot(x: Array, y: Array, contract_x: int, contract_y: int, operands: Any) -> Array:
    """The product in float32.

    ``operands`` is the dtype of the caller's matrices, in which gradients are returned. Beside matrices in bfloat16 a
    cotangent in float32 is taken as the sum of two numbers in bfloat16, more exact than the gradient's own rounding.
    """
    dims = (((contract_x,), (contract_y,)), ((), ()))
    if x.dtype == y.dtype == jnp.bfloat16:
        return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)
    if x.dtype != y.dtype and operands == jnp.bfloat16:
        xs, ys = ((x,), _halves(y)) if x.dtype == jnp.bfloat16 else (_halves(x), (y,))
        return sum(lax.dot_general(a, b, dims, preferred_element_type=jnp.float32) for a in xs for b in ys)
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return lax.dot_general(x, y, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _halves(x: Array) -> tuple[Array, Array]:
    upper = x.astype(jnp.bfloat16)
    return (x - upper.astype(jnp.float32)).astype(jnp.bfloat16), upper
