"""What the page of two reports says, section by section, as plain values: the templates turn them into HTML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel.lab.page import figures
from ejkernel.lab.page.comparison import verdict
from ejkernel.lab.page.sections import Card, Cell, machine_facts
from ejkernel.lab.page.series import is_ours, looks, panels
from ejkernel.lab.page.words import count, number, positive, power, ratio, word

SIDES = (("a", "A"), ("b", "B"))


def heading(result: Mapping[str, Any]) -> list[str]:
    """Both devices, each with its letter."""
    return [f"{m['name']}: {m['device']}" for m in result["machines"]]


def facts(result: Mapping[str, Any]) -> list[list[str]]:
    """What is known of each machine, one list a machine."""
    return [[f"{m['name']}:", *machine_facts({**m, "device": None})] for m in result["machines"]]


def headline(result: Mapping[str, Any]) -> list[Card]:
    """How fast the second is beside the first, how much both check, what only one has."""
    return [*_speed(result), *_passed(result), _shared(result)]


def _speed(result: Mapping[str, Any]) -> list[Card]:
    found = result["summary"]
    if not found["calls"]:
        return []
    tally = ", ".join(f"{found[v]} {v}" for v in ("faster", "level", "slower") if found[v])
    note = f"Geometric mean over {found['calls']} calls of ours that both timed: {tally}."
    return [Card("B’s speed beside A’s", ratio(found["mean"]), note, bad=verdict(found["mean"]) == "slower")]


def _passed(result: Mapping[str, Any]) -> list[Card]:
    ran = [[row[side] for row in result["checks"] if row[side] and not row[side]["refused"]] for side, _ in SIDES]
    passed = [sum(bool(check["passed"]) for check in checks) for checks in ran]
    off = [len(checks) - n for checks, n in zip(ran, passed, strict=True)]
    note = "Of those that ran. " + ("All of them." if not any(off) else f"Not passed: {off[0]} of A, {off[1]} of B.")
    return [Card("Checks passed, A and B", f"{passed[0]} · {passed[1]}", note, bad=any(off))] if any(ran) else []


def _shared(result: Mapping[str, Any]) -> Card:
    timings = result["timings"]
    alone = [sum(_time(row, side) is not None and row["ratio"] is None for row in timings) for side, _ in SIDES]
    note = f"Only A has {alone[0]} more, only B {alone[1]}."
    if any(alone):
        note += " The same length can be another call: batch, heads and dtype count."
    return Card("Times in both", sum(row["ratio"] is not None for row in timings), note)


def _time(row: Mapping[str, Any], side: str) -> float | None:
    return positive((row[side] or {}).get("ms"))


def beside_speed(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Every time that either has, with the ratio, and ours over length where both have it."""
    rows = result["timings"]
    shown = [
        {
            "operation": row["operation"],
            "what": row["what"],
            "call": row["call"],
            "length": Cell.of(row["length"], count),
            "implementation": row["implementation"],
            "ours": is_ours(row["implementation"]),
            "a": _timed(row, "a"),
            "b": _timed(row, "b"),
            "ratio": Cell.of(row["ratio"], ratio),
            "tone": {"faster": "good", "level": "none", "slower": "bad"}[verdict(row["ratio"])] if row["ratio"] else "none",
            "alone": "" if row["ratio"] else f"only in {'A' if _time(row, 'a') else 'B'}",
        }
        for row in rows
    ]  # fmt: skip
    both = [row for row in rows if row["ratio"] and row["implementation"] == "ejkernel"]
    drawn = [
        {
            "operation": r["operation"],
            "what": r["what"],
            "length": r["length"],
            "implementation": name,
            "ms": r[side]["ms"],
        }
        for side, name in SIDES
        for r in both
    ]
    plots = {"timings": drawn}
    figure = list(zip([_told(panel) for panel in panels(plots, "latency")],
                      figures.inline(plots).get("latency", []), strict=True))  # fmt: skip
    return {"rows": shown, "figures": figure, "legend": looks(plots)} if rows else None


def _timed(row: Mapping[str, Any], side: str) -> dict[str, Any]:
    found = row[side] or {}
    platforms = dict.fromkeys(word(c.get("platform")) for c in (found.get("chosen") or {}).values())
    return {
        "ms": Cell.of(found.get("ms"), number),
        "kernel": " + ".join(platforms),
        "unsteady": bool(found.get("flags")),
    }


def _kernel(chosen: Mapping[str, Any]) -> str:
    params = ", ".join(f"{name}={value}" for name, value in (chosen.get("params") or {}).items())
    return f"{chosen.get('platform')}, {chosen.get('source')}" + (f": {params}" if params else "")


def _told(panel: Any) -> str:
    """A panel in words, for those who cannot see it."""
    ends = "; ".join(f"{name} {number(row[1])} ms at {count(int(row[0]))}" for name, (*_, row) in panel.series.items())
    return f"Time against length, {panel.operation} {panel.what}. At the longest length: {ends}."


def beside_kernels(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """What each chooses for a plain call of each operation, and what else could run it."""
    rows = []
    for row in result["kernels"]:
        sides = [row[side] or {"chosen": [], "others": []} for side, _ in SIDES]
        rows.append({"operation": row["operation"], "sides": sides,
                     "differs": sides[0] != sides[1], "missing": [row[side] is None for side, _ in SIDES]})  # fmt: skip
    calls = [
        {
            "operation": row["operation"],
            "what": row["what"],
            "length": Cell.of(row["length"], count),
            **{side: [f"{direction}: {_kernel(c)}" for direction, c in ((row[side] or {}).get("chosen") or {}).items()]
               for side, _ in SIDES},
        }
        for row in result["timings"]
        if row["implementation"] == "ejkernel"
    ]  # fmt: skip
    return {"rows": rows, "calls": [row for row in calls if row["a"] != row["b"]]} if rows else None


def beside_correctness(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Every check, with both errors."""
    rows = [
        {
            **{name: word(row[name]) for name in ("operation", "platform", "check", "dtype")},
            "a": _checked(row["a"]),
            "b": _checked(row["b"]),
            "bound": Cell.of((row["a"] or row["b"])["bound"], power),
        }
        for row in result["checks"]
    ]
    return {"rows": rows} if rows else None


def _checked(found: Mapping[str, Any] | None) -> dict[str, Any]:
    if found is None:
        return {"error": Cell("—", ""), "tone": "none", "words": "not there"}
    if found["passed"]:
        return {"error": Cell.of(found["error"], power), "tone": "good", "words": "✓"}
    if found["error"] is None:
        return {"error": Cell("—", ""), "tone": "none", "words": word(found["reason"]) or "not run"}
    return {"error": Cell.of(found["error"], power), "tone": "bad", "words": "✗ too far off"}


def beside_versions(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """What was installed where, what differs first."""
    rows = sorted(result["versions"], key=lambda row: not row["differs"])
    return {"rows": [{**row, "a": word(row["a"]), "b": word(row["b"])} for row in rows]} if rows else None
