"""Half precision as integers, wherever numbers are moved or chosen and not computed with.

XLA's CPU code knows no bfloat16: it converts whole arrays to float32 and back around an update, a gather or a choice, in a
loop at every step.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def to_bits(array: Array) -> Array:
    """Half precision as uint16, anything else as it is. Zero stays zero."""
    return lax.bitcast_convert_type(array, jnp.uint16) if array.dtype.itemsize == 2 else array


def from_bits(array: Array, dtype: Any) -> Array:
    """The numbers again."""
    return lax.bitcast_convert_type(array, dtype) if array.dtype != dtype else array
