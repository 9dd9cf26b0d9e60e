"""Arguments of several parts of the lab."""

from __future__ import annotations

import ast
import json
import operator
import re
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.errors import InvalidInputError

__all__ = ["array", "counted", "dtype", "integer", "sizes", "value"]

_ARRAY = re.compile(r"(?P<dtype>[a-z]+[0-9a-z_]*)\[(?P<sizes>.*)\]", re.DOTALL)
_LONG = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint"}


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


def array(text: str, name: str) -> jax.ShapeDtypeStruct | None:
    """``bf16[2,1024,8,64]`` as an abstract array; None for a text that does not look like one.

    Example:
        >>> array("f32[2,8]", "query"), array("tanh", "activation")
        (ShapeDtypeStruct(shape=(2, 8), dtype=float32), None)
    """
    found = _ARRAY.fullmatch(text.strip())
    if found is None:
        return None
    shape = sizes(found["sizes"], f"{name}'s shape") if found["sizes"].strip() else ()
    return jax.ShapeDtypeStruct(shape, dtype(found["dtype"], f"{name}'s dtype"))


def sizes(text: str, name: str) -> tuple[int, ...]:
    """``2,1024,8,64`` as a shape."""
    words = [word for word in re.split(r"[,\s]+", text.strip()) if word]
    if not words or not all(word.isdecimal() for word in words):
        raise InvalidInputError(f"{name} is {text!r}; expected sizes such as 2,1024,8,64.")
    return tuple(map(int, words))


def dtype(text: str, name: str) -> str:
    """The full name of a dtype, from that or from the short one that a call is printed with.

    Example:
        >>> dtype("bf16", "--dtype"), dtype("int32", "--dtype")
        ('bfloat16', 'int32')
    """
    short = re.fullmatch(r"(f|bf|i|u)(\d+)", text)
    try:
        return str(jnp.dtype(_LONG[short[1]] + short[2] if short else text))
    except TypeError:
        raise InvalidInputError(f"{name} is {text!r}; expected a dtype such as bfloat16 or float32.") from None


def value(text: str) -> Any:
    """A value as Python or JSON write it, lists as tuples; anything else is a string.

    Example:
        >>> value("True"), value("null"), value("[255, 0]"), value("lstm")
        (True, None, (255, 0), 'lstm')
    """
    for read in (ast.literal_eval, json.loads):
        try:
            found = read(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return tuple(found) if isinstance(found, list) else found
    return text
