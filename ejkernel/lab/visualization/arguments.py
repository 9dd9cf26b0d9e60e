"""Arguments of the plots: numbers, columns and limits, with errors that name them."""

from __future__ import annotations

import math
import reprlib
from typing import Any

import numpy as np

from ejkernel.errors import InvalidInputError


def brief(value: Any) -> str:
    """A value in an error: in one line, whatever it is."""
    return " ".join(reprlib.repr(value).split())


def positive_number(name: str, value: Any) -> float:
    """A positive, finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidInputError(f"{name} is {brief(value)}; pass a positive, finite number")
    return number


def pair(name: str, value: Any, what: str) -> tuple[float, float]:
    """A pair of positive numbers; `what` says of what, for the error."""
    try:
        first, second = value
    except (TypeError, ValueError):
        raise InvalidInputError(f"{name} is {brief(value)}; pass a pair {what}") from None
    return positive_number(f"{name}[0]", first), positive_number(f"{name}[1]", second)


def limits_of(name: str, value: Any) -> tuple[float, float] | None:
    """Limits of an axis, the smaller first; None stays None."""
    if value is None:
        return None
    low, high = pair(name, value, "(min, max)")
    if not low < high:
        raise InvalidInputError(f"{name} is {brief(value)}; pass the smaller limit first")
    return low, high


def operation_points(operations: Any) -> list[tuple[str, float, float | None]]:
    """Name, intensity and achieved TFLOPS (None: not measured) of the operations of a roofline."""
    if operations is None:
        return []
    if not callable(getattr(operations, "items", None)):  # a Mapping or a pandas Series
        raise InvalidInputError(f"operations is {brief(operations)}; pass a dict of names to FLOPs/Byte, or None")
    named = list(operations.items())
    if not named:
        raise InvalidInputError("operations is empty; pass at least one, or None to draw none")
    points = []
    for name, value in named:
        where = f"operations[{name!r}]"
        if isinstance(value, tuple | list) or getattr(value, "ndim", 0):
            points.append((str(name), *pair(where, value, "(FLOPs/Byte, achieved TFLOPS)")))
        else:
            points.append((str(name), positive_number(where, value), None))
    return points


def numbers(name: str, values: Any, *, missing: bool = False, zero: bool = False) -> np.ndarray:
    """One axis of numbers: positive, or also 0 with `zero` and NaN with `missing`."""
    try:
        array = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        array = np.array(math.nan)
    if array.ndim != 1:
        raise InvalidInputError(f"{name} is {brief(values)}; pass a list of numbers")
    if not array.size:
        raise InvalidInputError(f"{name} is empty; pass at least one number")
    good = np.isfinite(array) & ((array >= 0) if zero else (array > 0)) | (missing & np.isnan(array))
    if not good.all():
        kind = "zero or positive" if zero else "positive"
        raise InvalidInputError(f"{name} holds {array[~good][0]:g}; pass {kind}, finite numbers")
    return array


def columns_of(**columns: Any) -> list[np.ndarray]:
    """The first column in ascending order, and the others with it."""
    arrays = [numbers(name, values) for name, values in columns.items()]
    first = next(iter(columns))
    for name, array in zip(columns, arrays, strict=True):
        if len(array) != len(arrays[0]):
            raise InvalidInputError(
                f"{name} has {len(array)} values and {first} has {len(arrays[0])}; pass one for each of {first}"
            )
    order = np.argsort(arrays[0], kind="stable")
    return [array[order] for array in arrays]


def column_pair(name: str, value: Any) -> tuple[str, str]:
    """Two names of columns."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidInputError(f"{name} is {brief(value)}; pass two column names: standard, flash")
    return tuple(value)


def need_columns(df: Any, names: list[str]) -> None:
    """Refuse what has not all of these columns."""
    if not hasattr(df, "columns"):
        raise InvalidInputError(f"df is a {type(df).__name__}; pass a DataFrame with the columns {', '.join(names)}")
    missing = [str(name) for name in names if name not in df.columns]
    if missing:
        raise InvalidInputError(
            f"df has no column {', '.join(missing)} but {', '.join(map(str, df.columns)) or 'none at all'}; "
            "name its columns in seq_len_col, latency_cols and memory_cols"
        )
