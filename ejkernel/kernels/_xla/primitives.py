"""Blocks of arrays, products and loops, as XLA's compilers run them best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def load(array: Array, starts, sizes) -> Array:
    """A block of an array; the indices are int32 whatever JAX's default is."""
    return lax.dynamic_slice(array, [jnp.int32(s) for s in starts], sizes)


def store(array: Array, block: Array, starts) -> Array:
    """An array with a block replaced."""
    return lax.dynamic_update_slice(array, block, [jnp.int32(s) for s in starts])


def add_block(total: Array, block: Array, at) -> Array:
    """An array with a block added to it."""
    return store(total, load(total, at, block.shape) + block.astype(total.dtype), at)


def dot(a: Array, b: Array, contract_a: int, contract_b: int, dtype: Any) -> Array:
    """A product over one axis of each, counted from the end, with the leading axes as batch."""
    precision = lax.Precision.HIGHEST if a.dtype.itemsize >= 4 else None
    lead = tuple(range(a.ndim - 2))
    dims = (((a.ndim + contract_a,), (b.ndim + contract_b,)), (lead, lead))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=dtype)


def loop(steps: int, body: Callable, carry: Any) -> Any:
    """``fori_loop`` from 0, with an int32 index whatever JAX's default is."""
    return lax.fori_loop(jnp.int32(0), jnp.int32(steps), body, carry)
