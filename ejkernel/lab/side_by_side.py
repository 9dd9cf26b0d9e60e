"""Two saved reports side by side: two machines, or two versions on one."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ejkernel
from ejkernel.errors import InvalidInputError
from ejkernel.lab.page.comparison import verdict
from ejkernel.lab.page.series import device, is_ours
from ejkernel.lab.page.words import positive
from ejkernel.lab.report import VERSION

NAMES = ("A", "B")
# What each row of a report has to have.
_ROWS = {
    "kernels": ("operation", "platform", "runs", "chosen"),
    "checks": ("operation", "platform", "check", "dtype", "error", "bound", "passed"),
    "timings": ("operation", "what", "length", "call", "implementation", "dtype", "ms", "chosen"),
}


def load(path: str) -> dict[str, Any]:
    """A saved report: ``report.json``, or the folder that holds it.

    Raises:
        InvalidInputError: for a file that is none, that is damaged, or that another version wrote.
    """
    place = Path(path, "report.json") if os.path.isdir(path) else Path(path)
    said = f"--compare: {str(place)!r}"
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise InvalidInputError(
            f"{said} cannot be read ({why}); expected a report.json of `ejkernel report`."
        ) from error
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidInputError(
            f"{said} is damaged or no JSON ({error}); expected the report.json that `ejkernel report` wrote."
        ) from error
    if not isinstance(found, dict) or not {"machine", "kernels", "checks", "timings"} <= set(found):
        raise InvalidInputError(f"{said} is no report; expected the report.json that `ejkernel report` wrote.")
    version = found.get("report_version")
    if version != VERSION:
        written = (found["machine"] or {}).get("ejkernel") if isinstance(found["machine"], dict) else None
        raise InvalidInputError(
            f"{said} is a report of version {version or 0}, written by ejkernel {written or '?'}; this one "
            f"({ejkernel.__version__}) compares version {VERSION}: write it again with `ejkernel report`."
        )
    _check(found, said)
    return found


def _check(found: Mapping[str, Any], said: str) -> None:
    """Refuse a report that somebody has cut or changed."""
    damaged = f"{said} is damaged: {{}}; write it again with `ejkernel report`."
    if not isinstance(found["machine"], dict) or not isinstance(found["machine"].get("versions"), dict):
        raise InvalidInputError(damaged.format("machine has no versions"))
    for part, names in _ROWS.items():
        if not isinstance(found[part], list):
            raise InvalidInputError(damaged.format(f"{part} is no list"))
        for number, row in enumerate(found[part]):
            lacks = [name for name in names if not isinstance(row, dict) or name not in row]
            if lacks:
                raise InvalidInputError(damaged.format(f"{part}[{number}] has no {lacks[0]}"))
            for name in names:
                wanted = dict if (part, name) == ("timings", "chosen") else str | int | float | None
                if not isinstance(row[name], wanted):
                    raise InvalidInputError(damaged.format(f"{part}[{number}]: {name} is {row[name]!r}"))


def beside(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Both as rows; what only one of them has is None in the other.

    ``ratio`` is the first's time divided by the second's: 2 means that the second is twice as fast.
    """
    both = first, second
    timings = _timings(both)
    return {
        "report_version": VERSION,
        "machines": [{**r["machine"], "name": name, "device": device(r)} for name, r in zip(NAMES, both, strict=True)],
        "versions": _versions(both),
        "kernels": _kernels(both),
        "checks": _checks(both),
        "timings": timings,
        "summary": summary(timings),
    }


Both = tuple[Mapping[str, Any], Mapping[str, Any]]


def _paired(rows: tuple[Any, Any], key: Callable[[Any], Any]) -> dict[Any, tuple[Any, Any]]:
    """Rows of both by key, in the order of the first."""
    a, b = ({key(row): row for row in part} for part in rows)
    return {name: (a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b))}


def _versions(both: Both) -> list[dict[str, Any]]:
    found = []
    for name in dict.fromkeys(name for report in both for name in report["machine"]["versions"]):
        a, b = (report["machine"]["versions"].get(name) for report in both)
        found.append({"name": name, "a": a, "b": b, "differs": a != b})
    for name in ("device", "devices", "processor", "cores", "runtime", "fingerprint"):
        a, b = (report["machine"].get(name) for report in both)
        found.append({"name": name, "a": a, "b": b, "differs": a != b})
    return found


def _kernels(both: Both) -> list[dict[str, Any]]:
    """Per operation, what is chosen for a plain call and what else can run it."""

    def sides(report: Mapping[str, Any], operation: str) -> dict[str, Any] | None:
        rows = [row for row in report["kernels"] if row["operation"] == operation]
        chosen = [row["platform"] for row in rows if row["chosen"]]
        others = [row["platform"] for row in rows if row["runs"] and not row["chosen"]]
        return {"chosen": chosen, "others": others} if rows else None

    operations = dict.fromkeys(row["operation"] for report in both for row in report["kernels"])
    return [{"operation": name, "a": sides(both[0], name), "b": sides(both[1], name)} for name in operations]


def _checks(both: Both) -> list[dict[str, Any]]:
    names = ("operation", "platform", "check", "dtype")
    rows = _paired(tuple(r["checks"] for r in both), lambda row: tuple(str(row[name]) for name in names))

    def side(row: Any) -> dict[str, Any] | None:
        return row and {name: row.get(name) for name in ("error", "bound", "passed", "refused", "reason")}

    return [{**dict(zip(names, key, strict=True)), "a": side(a), "b": side(b)} for key, (a, b) in rows.items()]


def _timings(both: Both) -> list[dict[str, Any]]:
    """By call: the same operation at the same length is another call where its batch or its dtype is another."""
    names = ("operation", "what", "length", "call", "implementation")
    rows = _paired(tuple(r["timings"] for r in both), lambda row: tuple(row[name] for name in names))

    def side(row: Any) -> dict[str, Any] | None:
        return row and {name: row.get(name) for name in ("ms", "median_ms", "chosen", "error", "flags", "reason")}

    found = []
    for key, (a, b) in rows.items():
        times = [positive(row["ms"]) if row else None for row in (a, b)]
        ratio = times[0] / times[1] if all(times) else None
        found.append({**dict(zip(names, key, strict=True)), "a": side(a), "b": side(b), "ratio": ratio})
    # What neither could time says nothing about either.
    return [row for row in found if any(positive((row[side] or {}).get("ms")) for side in ("a", "b"))]


def summary(timings: list[dict[str, Any]]) -> dict[str, Any]:
    """Of ours on the calls that both timed: how many, the ratios' geometric mean, how many of each verdict."""
    ratios = [row["ratio"] for row in timings if row["ratio"] and is_ours(row["implementation"])]
    counts = {word: sum(verdict(r) == word for r in ratios) for word in ("faster", "level", "slower")}
    mean = math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None
    return {"calls": len(ratios), "mean": mean, **counts}
