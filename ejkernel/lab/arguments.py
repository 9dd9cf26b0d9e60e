"""Arguments of several parts of the lab."""

from __future__ import annotations

import operator
from typing import Any

from ejkernel.errors import InvalidInputError

__all__ = ["counted", "integer"]


def counted(name: str, value: Any, least: int = 1) -> int:
    """An argument that counts something.

    Raises:
        InvalidInputError: for anything but an integer of at least so many; a bool is none.

    Example:
        >>> counted("n_repeat", 3)
        3
    """
    count = integer(value)
    if count is None or count < least:
        raise InvalidInputError(f"{name} is {value!r}; expected an integer of at least {least}.")
    return count


def integer(value: Any) -> int | None:
    """A value as an int where it is an integer of any kind, else None; a bool is none.

    Example:
        >>> integer(2), integer(2.0), integer(True)
        (2, None, None)
    """
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
