"""Patterns for ``blocksparse_attention``: which blocks of keys each block of queries attends to.

A pattern is called with the size of the grid, in blocks, and gives a boolean mask ``[nq, nk]``. Grids are aligned
bottom-right, as causal attention is: block ``(i, j)`` lies ``d = i + nk - nq - j`` blocks behind the diagonal. Patterns
combine with ``|`` and ``&``.

Example:
    >>> from ejkernel import patterns
    >>> pattern = patterns.causal() & (patterns.local(1) | patterns.global_tokens(1))
    >>> pattern(4, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 0, 1, 1]])
"""

from __future__ import annotations

import numbers
from collections.abc import Callable

import numpy as np

from ejkernel.errors import InvalidInputError

__all__ = ["Pattern", "causal", "global_tokens", "local", "strided"]


class Pattern:
    """A boolean rule on a grid of blocks; ``text`` is its repr."""

    def __init__(self, rule: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray], text: str):
        self._rule = rule
        self._text = text

    def __call__(self, nq: int, nk: int) -> np.ndarray:
        """The mask ``[nq, nk]`` for ``nq`` blocks of queries and ``nk`` blocks of keys."""
        nq, nk = _whole("nq", nq, 0), _whole("nk", nk, 0)
        row, column = np.arange(nq)[:, None], np.arange(nk)[None, :]
        return np.broadcast_to(self._rule(row, column, row + nk - nq - column), (nq, nk)).copy()

    def __or__(self, other: Pattern) -> Pattern:
        if not isinstance(other, Pattern):
            return NotImplemented
        return Pattern(lambda *grid: self._rule(*grid) | other._rule(*grid), f"({self} | {other})")

    def __and__(self, other: Pattern) -> Pattern:
        if not isinstance(other, Pattern):
            return NotImplemented
        return Pattern(lambda *grid: self._rule(*grid) & other._rule(*grid), f"({self} & {other})")

    def __repr__(self) -> str:
        return self._text


def local(n: int) -> Pattern:
    """The diagonal and ``n`` blocks on either side of it.

    Example:
        >>> local(0)(2, 3).astype(int)
        array([[0, 1, 0],
               [0, 0, 1]])
    """
    n = _whole("n", n, 0)
    return Pattern(lambda row, column, behind: abs(behind) <= n, f"local({n})")


def strided(k: int) -> Pattern:
    """Every ``k``-th block, counted from the diagonal in both directions.

    Example:
        >>> strided(2)(3, 3).astype(int)
        array([[1, 0, 1],
               [0, 1, 0],
               [1, 0, 1]])
    """
    k = _whole("k", k, 1)
    return Pattern(lambda row, column, behind: behind % k == 0, f"strided({k})")


def global_tokens(n: int) -> Pattern:
    """The first ``n`` blocks attend to everything, and everything attends to them.

    Example:
        >>> global_tokens(1)(3, 3).astype(int)
        array([[1, 1, 1],
               [1, 0, 0],
               [1, 0, 0]])
    """
    n = _whole("n", n, 0)
    return Pattern(lambda row, column, behind: (row < n) | (column < n), f"global_tokens({n})")


def causal() -> Pattern:
    """The blocks on and left of the diagonal. ``causal=True`` of the operation masks within the diagonal blocks.

    Example:
        >>> causal()(2, 3).astype(int)
        array([[1, 1, 0],
               [1, 1, 1]])
    """
    return Pattern(lambda row, column, behind: behind >= 0, "causal()")


def _whole(name: str, value: int, at_least: int) -> int:
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral) or value < at_least:
        raise InvalidInputError(f"patterns: {name} is {value!r}; expected an int ≥ {at_least}.")
    return int(value)
