"""Over which mesh axes a value varies inside ``shard_map``, and making values agree about it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def varying_axes(*arrays: Array) -> frozenset[str]:
    """The manual mesh axes over which any of the arrays varies; empty outside ``shard_map``."""
    axes: frozenset[str] = frozenset()
    for array in arrays:
        kind = jax.typeof(array)
        manual = getattr(kind, "manual_axis_type", None)
        axes |= frozenset(kind.vma if manual is None else manual.varying)
    return axes


def vary_over(array: Array, axes: frozenset[str]) -> Array:
    """The array, marked as varying over the axes; its gradient is summed over those it did not vary over."""
    missing = tuple(sorted(axes - varying_axes(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def full_beside(like: Array, shape: tuple[int, ...], fill: float | int, dtype: Any) -> Array:
    """A constant that varies as an input does: under ``shard_map`` a loop's carry must vary as the results put into it."""
    return vary_over(jnp.full(shape, fill, dtype), varying_axes(like))


def vary_as(results, *arrays: Array):
    """What a kernel that knows nothing of meshes made of the arrays, marked as varying as they do."""
    axes = varying_axes(*arrays)
    return jax.tree.map(lambda result: vary_over(result, axes), results)
