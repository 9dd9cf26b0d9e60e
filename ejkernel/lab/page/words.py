"""Numbers, sizes and dates as the page writes them."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any


def positive(value: Any) -> float | None:
    """The number where it is one that a logarithmic axis can show, else None.

    Example:
        >>> positive(2), positive(0.0), positive(float("nan")), positive(None)
        (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and value > 0 else None


def number(value: float) -> str:
    """A number with three digits that count.

    Example:
        >>> [number(value) for value in (0.000123, 0.5, 12.345, 4096, 0)]
        ['0.00012', '0.5', '12.3', '4,096', '0']
    """
    if value and abs(value) < 0.001:
        return f"{value:.5f}" if abs(value) >= 1e-4 else f"{value:.0e}"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def word(value: Any) -> str:
    """A value as it is, and nothing for None."""
    return "" if value is None else str(value)


def count(value: Any) -> str:
    """A number with separators; what is none as it is.

    Example:
        >>> count(4096), count("many")
        ('4,096', 'many')
    """
    return f"{value:,}" if isinstance(value, (int, float)) else word(value)


def ratio(value: float) -> str:
    """How many times something is something else.

    Example:
        >>> ratio(123.4), ratio(2), ratio(0.333)
        ('123×', '2.0×', '0.33×')
    """
    return f"{value:,.0f}×" if value >= 99.5 else f"{value:.1f}×" if value >= 1 else f"{value:.2g}×"


def power(value: float) -> str:
    """A small number by its power of ten.

    Example:
        >>> power(3e-7)
        '3×10⁻⁷'
    """
    if not value:
        return "0"
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}×10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def size(value: Any) -> str:
    """Bytes in the largest unit that they fill.

    Example:
        >>> size(3 * 2**20), size(None)
        ('3 MiB', '')
    """
    if not isinstance(value, (int, float)):
        return ""
    for unit, each in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= each:
            return f"{number(value / each)} {unit}"
    return f"{number(value)} B"


def percent(value: float) -> str:
    """A share."""
    return f"{value:.0%}"


def date(text: str) -> str:
    """An ISO date for a reader; what is none as it is.

    Example:
        >>> date("2026-11-15T15:00:00+00:00")
        '15 November 2026, 15:00 UTC'
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{moment.day} {moment:%B %Y, %H:%M} {moment.tzname() or ''}".rstrip()
