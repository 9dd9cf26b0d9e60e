"""Ours beside the fastest of the others, on each call that both have a time for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ejkernel.lab.page.series import is_ours
from ejkernel.lab.page.words import count, positive, ratio, word

LEVEL = 1.05  # times closer than this are called level: they change places from one run to the next


def verdict(ratio: float) -> str:
    """What a ratio of speeds means.

    Example:
        >>> verdict(2.0), verdict(1.01), verdict(0.5)
        ('faster', 'level', 'slower')
    """
    return "faster" if ratio >= LEVEL else "slower" if ratio <= 1 / LEVEL else "level"


class Comparison(NamedTuple):
    """Ours beside the fastest of the others, on one call."""

    operation: str
    what: str
    length: Any
    ours: Mapping[str, Any]
    peer: Mapping[str, Any]
    ratio: float

    @property
    def verdict(self) -> str:
        """How ours is: "faster", "level" or "slower"."""
        return verdict(self.ratio)

    @property
    def shown(self) -> str:
        """How many times as fast as the peer ours is, in words."""
        return ratio(self.ratio)

    @property
    def against(self) -> str:
        """The peer's name."""
        return word(self.peer.get("implementation")) or "?"

    def call(self) -> str:
        """The call, in words."""
        length = f"length {count(self.length)}" if self.length is not None else ""
        return ", ".join(filter(None, (self.operation, self.what, length)))


def compare(timings: Iterable[Mapping[str, Any]]) -> list[Comparison]:
    """Ours beside the best peer, for every call that both have a time for.

    Ours is what the library chooses by itself, or where that was not timed the fastest that was asked for by name.

    Example:
        >>> call = {"operation": "op", "what": "forward", "length": 8}
        >>> rows = [{**call, "implementation": "ejkernel", "ms": 2.0}, {**call, "implementation": "jax.nn", "ms": 5.0}]
        >>> compare(rows)[0].ratio
        2.5
    """
    calls: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in timings:
        if positive(row.get("ms")):
            calls.setdefault((row.get("operation"), row.get("what"), row.get("length")), []).append(row)
    found = []
    for (operation, what, length), rows in calls.items():
        ours = [row for row in rows if is_ours(row.get("implementation"))]
        ours = [row for row in ours if row.get("implementation") == "ejkernel"] or ours
        peers = [row for row in rows if not is_ours(row.get("implementation"))]
        if ours and peers:
            own, peer = (min(part, key=lambda row: row["ms"]) for part in (ours, peers))
            found.append(Comparison(word(operation), word(what), length, own, peer, peer["ms"] / own["ms"]))
    return found
