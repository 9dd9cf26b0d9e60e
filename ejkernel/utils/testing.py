"""Comparison of arrays, and random inputs for attention."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import DTypeLike, Float, Key, UInt32

from ejkernel.errors import InvalidInputError
from ejkernel.utils.arguments import as_dtype

__all__ = ["assert_allclose", "generate_attention_inputs"]


def assert_allclose(
    actual: Any, expected: Any, rtol: float | int = 1e-5, atol: float | int = 1e-8, equal_nan: bool = True
) -> None:
    """Raise unless `|actual - expected| ≤ atol + rtol · |expected|` everywhere and the shapes are equal.

    Takes anything that numpy can convert to an array. Compares in float64 (64-bit integers: in long double), so that
    integers neither wrap nor round. Infinities are close only to themselves.

    Raises:
        AssertionError: with the number of elements that differ, and the position of the largest difference.

    Example:
        >>> assert_allclose(jnp.array([1.0, 2.0]), [1.0, 2.0])
        >>> assert_allclose(np.uint8(3), np.uint8(5))
        Traceback (most recent call last):
            ...
        AssertionError: 1 of 1 elements differ (rtol=1e-05, atol=1e-08).
        Largest difference: 2.0 at ()
        actual (uint8): 3
        expected (uint8): 5
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        raise AssertionError(f"Shapes differ: actual {actual.shape}, expected {expected.shape}.")
    for name, array in (("actual", actual), ("expected", expected)):
        if array.dtype == object:
            raise InvalidInputError(f"{name} holds objects, such as {array.ravel()[:1]}; expected numbers.")
    left, right = _widened(actual), _widened(expected)
    with np.errstate(invalid="ignore", over="ignore"):
        differ = ~np.isclose(left, right, rtol=rtol, atol=atol, equal_nan=equal_nan)
    if not differ.any():
        return
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.where(differ, np.abs(left - right), 0)
    distance = np.where(np.isnan(distance), np.inf, distance)  # a NaN on one side counts as the largest difference
    worst = np.unravel_index(int(np.argmax(distance)), distance.shape)
    raise AssertionError(
        f"{int(differ.sum())} of {differ.size} elements differ (rtol={rtol}, atol={atol}).\n"
        f"Largest difference: {distance[worst]} at {tuple(int(place) for place in worst)}\n"
        f"actual ({actual.dtype}): {actual[worst]}\n"
        f"expected ({expected.dtype}): {expected[worst]}"
    )


def generate_attention_inputs(
    batch_size: int = 2,
    seq_len: int = 128,
    num_heads: int = 8,
    head_dim: int = 64,
    dtype: DTypeLike = jnp.float32,
    key: Key[Array, ""] | UInt32[Array, "2"] | None = None,
    *,
    num_kv_heads: int | None = None,
    kv_seq_len: int | None = None,
    scale: float | int = 1.0,
) -> dict[str, Float[Array, "batch length heads head_dim"]]:
    """Random query, key and value: normal numbers times `scale`; with 1 the softmax is far from uniform.

    Args:
        batch_size: number of sequences.
        seq_len: length of the query, and of key and value unless `kv_seq_len` is given.
        num_heads: heads of the query, and of key and value unless `num_kv_heads` is given.
        head_dim: size of a head.
        dtype: dtype of all three.
        key: random key; `jax.random.PRNGKey(0)` by default.
        num_kv_heads: heads of key and value, a divisor of `num_heads`.
        kv_seq_len: length of key and value.
        scale: standard deviation.

    Example:
        >>> inputs = generate_attention_inputs(1, 16, 4, 8, num_kv_heads=2, kv_seq_len=32)
        >>> {name: array.shape for name, array in inputs.items()}
        {'query': (1, 16, 4, 8), 'key': (1, 32, 2, 8), 'value': (1, 32, 2, 8)}
    """
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    kv_length = seq_len if kv_seq_len is None else kv_seq_len
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "num_heads": num_heads, "head_dim": head_dim}
    for name, size in {**sizes, "num_kv_heads": kv_heads, "kv_seq_len": kv_length}.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < (name != "batch_size"):
            raise InvalidInputError(f"{name} is {size!r}; expected a positive int.")
    dtype = as_dtype(dtype, "dtype")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise InvalidInputError(f"dtype is {dtype}; expected a floating-point dtype.")
    if num_heads % kv_heads:
        raise InvalidInputError(f"num_kv_heads is {kv_heads}; expected a divisor of num_heads, which is {num_heads}.")
    keys = jax.random.split(jax.random.PRNGKey(0) if key is None else key, 3)
    shapes = {
        "query": (batch_size, seq_len, num_heads, head_dim),
        "key": (batch_size, kv_length, kv_heads, head_dim),
        "value": (batch_size, kv_length, kv_heads, head_dim),
    }
    return {
        name: jax.random.normal(sub_key, shape, dtype) * jnp.asarray(scale, dtype)
        for sub_key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _widened(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    # A long double is exact for the 64-bit integers that float64 rounds.
    wide = np.longdouble if array.dtype.kind in "iu" and array.dtype.itemsize == 8 else np.float64
    return array.astype(wide)
