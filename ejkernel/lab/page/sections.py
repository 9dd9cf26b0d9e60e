"""What the page says, section by section, as plain values: the templates turn them into HTML."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ejkernel.lab.page import figures
from ejkernel.lab.page.comparison import Comparison, compare
from ejkernel.lab.page.series import Panel, is_ours, looks, panels, points, roofs
from ejkernel.lab.page.words import count, date, number, percent, positive, power, ratio, size, word

Rows = list[Mapping[str, Any]]
VERDICTS = ("faster", "level", "slower")


class Card(NamedTuple):
    """A number of the headline, and what it says."""

    name: str
    value: Any
    note: str
    total: int | None = None
    bad: bool = False


class Cell(NamedTuple):
    """A cell that sorts by value; what is no finite number is shown as it is and comes last."""

    text: str
    value: str

    @classmethod
    def of(cls, value: Any, shown: Callable[[Any], str]) -> Cell:
        """The cell of a value, as a function of words shows it."""
        if isinstance(value, (int, float)) and math.isfinite(value):
            return cls(shown(value), repr(float(value)))
        return cls(word(value) or "—", "")


def machine_facts(machine: Mapping[str, Any]) -> list[str]:
    """Versions, cores, date and fingerprint, as far as they are known."""
    parts = [
        f"{name} {machine[key]}"
        for key, name in (("ejkernel", "ejkernel"), ("jax", "jax"), ("jaxlib", "jaxlib"), ("python", "Python"))
        if machine.get(key) is not None
    ]
    if machine.get("processor") and machine.get("device") != "cpu":
        parts.append(str(machine["processor"]))
    if machine.get("cores") is not None:
        parts.append(f"{machine['cores']} cores" if machine["cores"] != 1 else "1 core")
    if machine.get("measured_at") is not None:
        parts.append(f"measured {date(str(machine['measured_at']))}")
    if machine.get("fingerprint") is not None:
        parts.append(f"fingerprint {machine['fingerprint']}")
    return parts


def headline(result: Mapping[str, Any]) -> list[Card]:
    """How much runs, how much is right and how fast it is, each in a number."""
    rows = (result.get(part) or [] for part in ("kernels", "checks", "timings"))
    return [card for cards, given in zip((_runs, _passes, _speed_up), rows, strict=True) for card in cards(given)]


def _runs(rows: Rows) -> list[Card]:
    if not rows:
        return []
    running = {row.get("operation") for row in rows if row.get("runs")}
    missing = sorted({word(row.get("operation")) or "?" for row in rows if row.get("operation") not in running})
    note = f"Nothing runs for {', '.join(missing)}." if missing else "Every operation has one that runs."
    return [Card("Kernels that run here", sum(bool(row.get("runs")) for row in rows), note, len(rows))]


def _passes(rows: Rows) -> list[Card]:
    if not rows:
        return []
    passed = sum(bool(row.get("passed")) for row in rows)
    errors = [row["error"] for row in rows if positive(row.get("error")) and row.get("passed")]
    off = sum(not row.get("passed") and row.get("error") is not None for row in rows)
    without = len(rows) - passed - off
    notes = [f"Largest error of those {power(max(errors))}." if errors else ""]
    notes += [f"{off} too far off." if off else "", f"{without} could not be run." if without else ""]
    return [Card("Checks against float64 passed", passed, " ".join(filter(None, notes)), len(rows), bad=bool(off))]


def _speed_up(rows: Rows) -> list[Card]:
    compared = compare(rows)
    if not compared:
        return []
    steady = [c for c in compared if not (c.ours.get("flags") or c.peer.get("flags"))]
    best, worst = max(steady or compared, key=lambda c: c.ratio), min(compared, key=lambda c: c.ratio)
    name = {
        "faster": "Best speed-up over the best peer",
        "level": "Level with the best peer, at best",
        "slower": "Slower than the best peer; at best",
    }[best.verdict]
    note = f"{best.call()}: {number(best.ours['ms'])}\u00a0ms"
    note += f" where {best.against} takes {number(best.peer['ms'])}\u00a0ms. "
    if flags := [*(best.ours.get("flags") or ()), *(best.peer.get("flags") or ())]:
        note += f"The times were unsteady ({word(flags[0])}). "
    if len(compared) > 1:
        counts = {verdict: sum(c.verdict == verdict for c in compared) for verdict in VERDICTS}
        tally = ", ".join(f"{many} {verdict}" for verdict, many in counts.items() if many)
        note += f"Over {len(compared)} calls: {tally}"
        note += f" ({ratio(worst.ratio)} at worst)." if worst.verdict == "slower" else "."
    return [Card(name, ratio(best.ratio), note, bad=best.verdict == "slower")]


def kernels(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Operations × platforms: what runs, and the reasons."""
    rows = result.get("kernels") or []
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        reasons = [word(reason) for reason in row.get("reasons") or ()] or ["no reason is given"]
        if row.get("backend") is not None:
            reasons.append(f"backend: {row['backend']}")
        place = word(row.get("operation")), word(row.get("platform"))
        cells.setdefault(place, []).append({"runs": bool(row.get("runs")), "reasons": reasons})
    operations, platforms = (list(dict.fromkeys(place[side] for place in cells)) for side in (0, 1))
    table = {operation: [cells.get((operation, platform), []) for platform in platforms] for operation in operations}
    return {"platforms": platforms, "table": table} if rows else None


def correctness(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Every check against float64, and whether the notes have anything to say."""
    rows = result.get("checks") or []
    shown = [
        {
            **{name: word(row.get(name)) for name in ("operation", "platform", "check", "reason")},
            "error": Cell.of(row.get("error"), power),
            "bound": Cell.of(row.get("bound"), power),
            "verdict": "passed" if row.get("passed") else "not run" if row.get("error") is None else "too far off",
        }
        for row in rows
    ]
    return {"rows": shown, "noted": any(row["reason"] for row in shown)} if rows else None


def speed(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Against the best peer, and the plots over length."""
    timings = {"timings": result.get("timings") or []}
    pieces, appearance = figures.inline(timings), looks(timings)
    plots = []
    for kind, title, note in (
        (
            "latency",
            "Time against length",
            "Lower is better. Both axes are logarithmic; the bands reach from the best burst to the 90th percentile.",
        ),
        ("memory", "Memory against length", "Peak memory of a call; lower is better. Both axes are logarithmic."),
    ):
        drawn = panels(timings, kind)
        names = {name for panel in drawn for name in panel.series}
        if kind in pieces:
            legend = {name: look for name, look in appearance.items() if name in names}
            labels = [_told(panel, kind) for panel in drawn]
            figure = list(zip(labels, pieces[kind], strict=True))
            plots.append({"kind": kind, "title": title, "note": note, "legend": legend, "figures": figure})
    against = _against(compare(timings["timings"]))
    return {"against": against, "plots": plots} if against or plots else None


def _against(compared: list[Comparison]) -> dict[str, Any] | None:
    """Calls × lengths: how many times as fast as the best peer."""
    lengths = sorted({c.length for c in compared}, key=lambda length: (positive(length) or math.inf, word(length)))
    calls: dict[tuple[str, str], dict[Any, Comparison]] = {}
    for c in compared:
        calls.setdefault((c.operation, c.what), {})[c.length] = c
    rows = [(*call, [found.get(length) for length in lengths]) for call, found in calls.items()]
    return {"lengths": [count(length) or "—" for length in lengths], "rows": rows} if compared else None


def _told(panel: Panel, kind: str) -> str:
    """A panel in words, for those who cannot see it."""
    shown = {"latency": lambda ms: f"{number(ms)} ms", "memory": size}[kind]
    ends = "; ".join(f"{name} {shown(row[1])} at {count(int(row[0]))}" for name, (*_, row) in panel.series.items())
    what = "Time" if kind == "latency" else "Memory"
    return f"{what} against length, {panel.operation} {panel.what}. At the longest length: {ends}."


def times(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Every timing, beside ours on the same call."""
    rows = result.get("timings") or []
    ours = {(c.operation, c.what, c.length): c.ours["ms"] for c in compare(rows)}
    shown = []
    for row in rows:
        operation, what, length = word(row.get("operation")), word(row.get("what")), row.get("length")
        ms, own = positive(row.get("ms")), ours.get((operation, what, length))
        median, high = positive(row.get("median_ms")), positive(row.get("high_ms"))
        shown.append(
            {
                "operation": operation,
                "what": what,
                "implementation": word(row.get("implementation")),
                "ours": is_ours(row.get("implementation")),
                "length": Cell.of(length, count),
                "ms": Cell.of(row.get("ms"), number),
                "spread": f"{number(median)} – {number(high)}" if ms and median and high else "",
                "beside": Cell.of(ms / own if ms and own else None, ratio),
                "tflops": Cell.of(row.get("tflops"), number),
                "memory": Cell.of(row.get("memory_bytes"), size),
                "error": Cell.of(row.get("error"), power),
                "notes": "; ".join(filter(None, (word(row.get("reason")), *map(word, row.get("flags") or ())))),
            }
        )
    noted = any(row.get("reason") or row.get("flags") for row in rows)
    return {"rows": shown, "noted": noted} if rows else None


def roofline(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Roofs and points, drawn and listed."""
    drawn = figures.inline({"roofline": result.get("roofline")}).get("roofline")
    if not drawn:
        return None
    known, measured = roofs(result), points(result)
    told = [f"{name}: {number(tflops)} TFLOP/s, {number(tb)} TB/s" for name, (tflops, tb) in known.items()]
    lowest = next(iter(known.values()), None)
    listed = [
        {
            "name": name,
            "number": Cell(str(n), str(n)),
            "intensity": Cell.of(intensity, number),
            "tflops": Cell.of(tflops, number),
            "share": Cell.of(tflops / min(lowest[0], lowest[1] * intensity) if lowest else None, percent),
        }
        for n, (name, intensity, tflops) in enumerate(measured, 1)
    ]
    label = "Roofline. Roofs: " + "; ".join(told or ["none"]) + f". {len(measured)} operations, listed in the table."
    return {"roofs": told, "label": label, "svg": drawn[0], "points": listed}
