"""The checks that operations share; each error names the argument, what it was, what was expected and what to do."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import InvalidInputError


def words(value: Any) -> str:
    """A value in an error: arrays by dtype and shape, other containers than tuples by their type alone."""
    if is_array(value):
        kind = "ShapeDtypeStruct " if isinstance(value, jax.ShapeDtypeStruct) else ""
        return f"{kind}{value.dtype}{list(value.shape)}"
    if isinstance(value, list | dict | set):
        return f"a {type(value).__name__}"
    if isinstance(value, type):
        place = "" if value.__module__ == "builtins" else f"{value.__module__}."
        return f"of type {place}{value.__qualname__}"
    if isinstance(value, tuple) and any(map(is_array, value)):
        return f"({', '.join(map(words, value))})"
    return f"{value!r} ({type(value).__name__})"


def is_array(value: Any) -> bool:
    """Whether a value has a shape and a dtype: an array, a tracer or a ``ShapeDtypeStruct``."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def is_data(value: Any) -> bool:
    """Whether a number came as an array, which may be traced; Python's and numpy's own numbers are static."""
    return is_array(value) and not isinstance(value, np.generic)


def is_concrete(value: Any) -> bool:
    """Whether a value is a JAX array with values, not a tracer."""
    return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)


def device_of(arrays: Iterable[Any]) -> Any:
    """That of the first array that has one, for numpy's and abstract ones have none; None where that one is traced."""
    first = next((value for value in arrays if isinstance(value, jax.Array)), None)
    return next(iter(first.devices())) if is_concrete(first) else None


class Checker:
    """Raises ``InvalidInputError`` in one format for one operation."""

    def __init__(self, operation: str):
        self.operation = operation

    def fail(self, name: str, value: Any, expected: str) -> None:
        """Refuse an argument."""
        raise InvalidInputError(f"{self.operation}: {name} is {words(value)}; expected {expected}.")

    def converted(self, name: str, value: Any) -> Any:
        """What ``jnp.asarray`` makes of an argument, which may be a list."""
        try:
            return jnp.asarray(value)
        except (TypeError, ValueError):
            self.fail(name, value, "an array")

    def array(self, name: str, value: Any, expected: str, *, ranks: tuple[int, ...], kinds: tuple[Any, ...]) -> None:
        """An array of one of the ranks, with a dtype of one of the kinds."""
        if not is_array(value):
            self.fail(name, value, f"an array {expected}: pass jnp.asarray({name})")
        if len(value.shape) not in ranks:
            count = len(value.shape)
            self.fail(name, value, f"{expected}; it has {count} dimension{'s' * (count != 1)}")
        if not all(isinstance(size, int) for size in value.shape):
            self.fail(name, value, f"{expected}, of sizes that are known: symbolic shapes are not supported")
        if not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
            self.fail(name, value, f"{expected}, of dtype {' or '.join(kind.__name__ for kind in kinds)}")

    def flag(self, name: str, value: Any) -> bool:
        """A Python truth value."""
        if not isinstance(value, bool | np.bool_):
            self.fail(name, value, "True or False, known when the call is traced")
        return bool(value)

    def number(self, name: str, value: Any, expected: str) -> float:
        """A finite Python number."""
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            self.fail(name, value, f"{expected}, as a finite Python number")
        return float(value)

    def window(self, name: str, value: Any) -> tuple[int | None, int | None]:
        """A window's two sides; an int is both."""
        sides = (value, value) if value is None or _is_whole(value) else value
        if (
            not isinstance(sides, tuple)
            or len(sides) != 2
            or not all(s is None or (_is_whole(s) and s >= 0) for s in sides)
        ):
            self.fail(name, value, "an int ≥ 0 or a pair (left, right) of ints ≥ 0 or None (None is unbounded)")
        return tuple(None if side is None else int(side) for side in sides)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool | np.bool_)
