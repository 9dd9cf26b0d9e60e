"""In what precision kernels accumulate."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def accumulator_dtype(array: Any) -> Any:
    """The dtype of logits, statistics and accumulators for inputs of the array's dtype."""
    return jnp.float64 if array.dtype == jnp.float64 else jnp.float32
