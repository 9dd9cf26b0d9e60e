"""What the plots show: values against length, roofs and points, and how each implementation is drawn."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ejkernel.lab.page.words import positive

THEME = {  # a role's colour on light and on dark
    "paper": ("#ffffff", "#14171c"),
    "shade": ("#f4f5f7", "#1d2128"),
    "rule": ("#dde0e5", "#343a44"),
    "ink": ("#1b1f24", "#eceff3"),
    "muted": ("#59626e", "#a6afbb"),
    "good": ("#0b6b4f", "#5fd0a6"),
    "bad": ("#ad3403", "#ff9f6b"),
    "c0": ("#0a5fa8", "#6db8ff"),
    "c1": ("#c4480a", "#ff9a57"),
    "c2": ("#007a5e", "#4fd0a4"),
    "c3": ("#9c3b85", "#ee9cd2"),
    "c4": ("#846100", "#e6c34f"),
    "c5": ("#5a6673", "#b3bdc9"),
}
_SERIES = [role for role in THEME if re.fullmatch(r"c\d", role)]
_MARKERS = {  # matplotlib's name of a marker and its outline about the origin
    "o": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "s": "M-3.6 -3.6h7.2v7.2h-7.2z",
    "^": "M0 -4.6l4.4 8h-8.8z",
    "D": "M0 -4.8l4.8 4.8l-4.8 4.8l-4.8 -4.8z",
    "v": "M0 4.6l4.4 -8h-8.8z",
}


class Look(NamedTuple):
    """How an implementation is drawn, the same in every plot."""

    role: str
    marker: str
    dashed: bool

    @property
    def outline(self) -> str:
        """Its marker about the origin, as a path of SVG."""
        return _MARKERS[self.marker]


class Panel(NamedTuple):
    """One operation's values against length: ``{implementation: [(length, value, high), …]}``."""

    operation: str
    what: str
    series: dict[str, list[tuple[float, float, float]]]


def device(result: Mapping[str, Any]) -> str:
    """What the result was measured on: a CPU by its processor's name, several by their number.

    Example:
        >>> device({"machine": {"device": "NVIDIA H200", "devices": 8}})
        '8 × NVIDIA H200'
    """
    machine = result.get("machine") or {}
    name = machine.get("device") or "Unknown device"
    if name == "cpu":
        name = machine.get("processor") or "CPU"
    count = machine.get("devices")
    return f"{count} × {name}" if isinstance(count, int) and count > 1 else str(name)


def is_ours(implementation: Any) -> bool:
    """Whether an implementation is the library's: "ejkernel" itself, or with one of its platforms named.

    Example:
        >>> is_ours("ejkernel xla"), is_ours("jax.nn")
        (True, False)
    """
    return str(implementation).split(" ")[0] == "ejkernel"


def looks(result: Mapping[str, Any]) -> dict[str, Look]:
    """Every timed implementation's look, ours first.

    Example:
        >>> list(looks({"timings": [{"implementation": "jax.nn"}, {"implementation": "ejkernel"}]}))
        ['ejkernel', 'jax.nn']
    """
    names = dict.fromkeys(str(row.get("implementation")) for row in result.get("timings") or ())
    markers = list(_MARKERS)
    return {
        name: Look(_SERIES[n % len(_SERIES)], markers[n % len(markers)], n >= len(_SERIES))
        for n, name in enumerate(sorted(names, key=lambda name: (not is_ours(name), name != "ejkernel")))
    }


def panels(result: Mapping[str, Any], kind: str) -> list[Panel]:
    """What there is to draw of ``kind``, "latency" (milliseconds) or "memory" (bytes): a panel a timed operation.

    Example:
        >>> row = {"operation": "op", "what": "forward", "length": 8, "implementation": "ejkernel", "ms": 2.0}
        >>> panels({"timings": [row]}, "latency")
        [Panel(operation='op', what='forward', series={'ejkernel': [(8.0, 2.0, 2.0)]})]
    """
    fields = {"latency": ("ms", "high_ms"), "memory": ("memory_bytes", "memory_bytes")}[kind]
    found: dict[tuple[str, str], dict[str, list]] = {}
    for row in result.get("timings") or ():
        length, value, high = (positive(row.get(field)) for field in ("length", *fields))
        if length and value:
            call = str(row.get("operation") or ""), str(row.get("what") or "")
            series = found.setdefault(call, {}).setdefault(str(row.get("implementation")), [])
            series.append((length, value, max(high or value, value)))
    order = list(looks(result))
    return [
        Panel(*call, {name: sorted(series[name]) for name in order if name in series}) for call, series in found.items()
    ]


def roofs(result: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """The roofs that are known, ``(TFLOP/s, TB/s)`` each: the measured one and the datasheet's.

    Example:
        >>> roofs({"roofline": {"ceilings": {"dtype": "float32", "tflops": 0.2, "tb_per_s": 0.02}}})
        {'measured, float32': (0.2, 0.02)}
    """
    roofline = result.get("roofline") or {}
    found = {}
    for part, name in (("ceilings", "measured, {dtype}"), ("peak", "datasheet, {name}")):
        roof = roofline.get(part) or {}
        pair = positive(roof.get("tflops")), positive(roof.get("tb_per_s"))
        if all(pair):
            known = {key: value for key, value in roof.items() if value is not None}
            found[name.format_map({"dtype": "", "name": "", **known}).removesuffix(", ")] = pair
    return found


def points(result: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """The roofline's points that can be drawn: name, FLOP/byte, TFLOP/s.

    Example:
        >>> points({"roofline": {"points": [{"name": "op", "intensity": 8, "tflops": 0.5}, {"name": "untimed"}]}})
        [('op', 8.0, 0.5)]
    """
    found = []
    for point in (result.get("roofline") or {}).get("points") or ():
        intensity, tflops = positive(point.get("intensity")), positive(point.get("tflops"))
        if intensity and tflops:
            found.append((str(point.get("name")), intensity, tflops))
    return found
