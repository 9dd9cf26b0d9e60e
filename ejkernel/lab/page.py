"""The report as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from ejkernel.errors import InvalidInputError
from ejkernel.lab import figures
from ejkernel.lab.figures import is_ours, number, positive

LEVEL = 1.05  # times closer than this are called level: they change places from one run to the next


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
        return "faster" if self.ratio >= LEVEL else "slower" if self.ratio <= 1 / LEVEL else "level"

    @property
    def against(self) -> str:
        """The peer's name."""
        return _word(self.peer.get("implementation")) or "?"

    def call(self) -> str:
        """The call, in words."""
        length = f"length {_count(self.length)}" if self.length is not None else ""
        return ", ".join(filter(None, (self.operation, self.what, length)))


def write(result: Mapping[str, Any], folder: str | Path) -> Path:
    """Write the report: ``index.html``, which holds everything, ``report.json``, and the plots as PNG and SVG.

    Args:
        result: what the report collected.
        folder: where to; made where it is missing. Files of an earlier report in it are replaced.

    Returns:
        The page.

    Raises:
        InvalidInputError: the folder cannot be written, or the result is not JSON; nothing is written then.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write({"machine": {"device": "cpu"}, "kernels": []}, folder).name
        'index.html'
    """
    text = _json(result)
    plots = figures.render(result)
    files = {**plots, "report.json": text.encode(), "index.html": _render(result, text).encode("utf-8", "replace")}
    every = {f"{kind}.{suffix}" for kind in ("latency", "memory", "roofline") for suffix in ("svg", "png")}
    figures.put(folder, files, stale=every - set(plots))
    return Path(folder) / "index.html"


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
            found.append(Comparison(_word(operation), _word(what), length, own, peer, peer["ms"] / own["ms"]))
    return found


def _render(result: Mapping[str, Any], text: str) -> str:
    machine = result.get("machine") or {}
    device = figures.device(result)
    sections = [
        section
        for section in (
            _speed(result),
            _roofline(result),
            _kernels(result.get("kernels") or []),
            _checks(result.get("checks") or []),
            _times(result.get("timings") or []),
        )
        if section
    ]
    template = string.Template(resources.files("ejkernel.lab").joinpath("page.html").read_text("utf-8"))
    return template.substitute(
        title=f"{escape(device)} · ejkernel report",
        heading=escape(device),
        machine=_machine(machine),
        headline=_headline(result),
        contents=" ".join(f'<a href="#{name}">{title}</a>' for name, title, _ in [*sections, ("data", "Data", "")]),
        sections="\n".join(
            f'<section aria-labelledby="{name}">\n<h2 id="{name}">{title}</h2>\n{body}\n</section>'
            for name, title, body in sections
        ),
        footer=f"Written by <code>ejkernel {escape(_word(machine.get('ejkernel')))}</code>.",
        json=_in_script(text),
        light=_variables(0),
        dark=_variables(1),
    )


def _json(result: Mapping[str, Any]) -> str:
    try:
        return json.dumps(finite(result), indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"result: expected what JSON can hold, got something else: {error}") from error


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: their names stand for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _in_script(text: str) -> str:
    """JSON that no HTML parser takes for the end of its script element."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _variables(theme: int) -> str:
    return " ".join(f"--{role}: {colours[theme]};" for role, colours in figures.THEME.items())


def _word(value: Any) -> str:
    return "" if value is None else str(value)


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else _word(value)


def _ratio(value: float) -> str:
    return f"{value:,.0f}×" if value >= 99.5 else f"{value:.1f}×" if value >= 1 else f"{value:.2g}×"


def _power(value: float) -> str:
    """A small number by its power of ten."""
    if not value:
        return "0"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}×10{str(int(power)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def _bytes(value: Any) -> str:
    if not isinstance(value, (int, float)):
        return ""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{number(value)} B"


def _machine(machine: Mapping[str, Any]) -> str:
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
        parts.append(f"measured {_date(str(machine['measured_at']))}")
    if machine.get("fingerprint") is not None:
        parts.append(f"fingerprint {machine['fingerprint']}")
    return " ".join(f"<li>{escape(part)}</li>" for part in parts)


def _date(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{moment.day} {moment:%B %Y, %H:%M} {moment.tzname() or ''}".rstrip()


def _headline(result: Mapping[str, Any]) -> str:
    cards = []

    def card(name: str, value: str, note: str, tone: str = "") -> None:
        value = f'<dd class="value {tone}">{value}</dd>'
        cards.append(f'<div><dt>{escape(name)}</dt>{value}<dd class="note">{escape(note)}</dd></div>')

    kernels = result.get("kernels") or []
    if kernels:
        running = {row.get("operation") for row in kernels if row.get("runs")}
        missing = sorted({_word(row.get("operation")) or "?" for row in kernels if row.get("operation") not in running})
        note = f"Nothing runs for {', '.join(missing)}." if missing else "Every operation has one that runs."
        card("Kernels that run here", _of(sum(bool(row.get("runs")) for row in kernels), len(kernels)), note)

    checks = result.get("checks") or []
    if checks:
        passed = sum(bool(row.get("passed")) for row in checks)
        errors = [row["error"] for row in checks if positive(row.get("error")) and row.get("passed")]
        off = sum(not row.get("passed") and row.get("error") is not None for row in checks)
        without = len(checks) - passed - off
        notes = [f"Largest error of those {_power(max(errors))}." if errors else ""]
        notes += [f"{off} too far off." if off else "", f"{without} could not be run." if without else ""]
        card(
            "Checks against float64 passed",
            _of(passed, len(checks)),
            " ".join(filter(None, notes)),
            "bad" if off else "",
        )

    compared = compare(result.get("timings") or [])
    if compared:
        best, worst = max(compared, key=lambda c: c.ratio), min(compared, key=lambda c: c.ratio)
        counts = {verdict: sum(c.verdict == verdict for c in compared) for verdict in ("faster", "level", "slower")}
        name = {
            "faster": "Best speed-up over the best peer",
            "level": "Level with the best peer, at best",
            "slower": "Slower than the best peer; at best",
        }[best.verdict]
        note = f"{best.call()}: {number(best.ours['ms'])}\u00a0ms"
        note += f" where {best.against} takes {number(best.peer['ms'])}\u00a0ms. "
        if flags := [*(best.ours.get("flags") or ()), *(best.peer.get("flags") or ())]:
            note += f"The times were unsteady ({_word(flags[0])}). "
        if len(compared) > 1:
            tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
            note += f"Over {len(compared)} calls: {tally}"
            note += f" ({_ratio(worst.ratio)} at worst)." if worst.verdict == "slower" else "."
        card(name, _ratio(best.ratio), note, "bad" if best.verdict == "slower" else "")
    return "".join(cards)


def _of(some: int, total: int) -> str:
    return f"{some}<small> of {total}</small>"


def _kernels(rows: list[Mapping[str, Any]]) -> tuple[str, str, str] | None:
    if not rows:
        return None
    operations = list(dict.fromkeys(_word(row.get("operation")) for row in rows))
    platforms = list(dict.fromkeys(_word(row.get("platform")) for row in rows))
    cells: dict[tuple[str, str], str] = {}
    for row in rows:
        place = _word(row.get("operation")), _word(row.get("platform"))
        cells[place] = cells.get(place, "") + _kernel(row)
    none = '<span class="none" aria-hidden="true">·</span><span class="hidden">no implementation</span>'
    body = "".join(
        f'<tr><th scope="row" class="name">{_breakable(operation)}</th>'
        + "".join(f"<td>{cells.get((operation, platform), none)}</td>" for platform in platforms)
        + "</tr>"
        for operation in operations
    )
    head = "".join(f'<th scope="col" class="name">{escape(platform)}</th>' for platform in platforms)
    return (
        "kernels",
        "Kernels",
        "<p>What can run a plain call of each operation on this machine. Open a mark for the reason.</p>"
        '<div class="tools"><button class="button" id="reasons" type="button">Show all reasons</button></div>'
        + _scrolls(
            "Kernels: operations and platforms",
            f'<table class="matrix"><thead><tr><th scope="col">Operation</th>{head}</tr></thead><tbody>{body}</tbody></table>',
        ),
    )


def _kernel(row: Mapping[str, Any]) -> str:
    mark = '<span class="good">✓ runs</span>' if row.get("runs") else '<span class="none">– no</span>'
    reasons = [_word(reason) for reason in row.get("reasons") or ()] or ["no reason is given"]
    if row.get("backend") is not None:
        reasons.append(f"backend: {row['backend']}")
    listed = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return f'<details><summary class="mark">{mark}</summary><ul>{listed}</ul></details>'


def _checks(rows: list[Mapping[str, Any]]) -> tuple[str, str, str] | None:
    if not rows:
        return None
    shown, noted = [], any(row.get("reason") for row in rows)
    for row in rows:
        if row.get("passed"):
            verdict = '<span class="mark good">✓ passed</span>'
        elif row.get("error") is None:
            verdict = '<span class="mark none">– not run</span>'
        else:
            verdict = '<span class="mark bad">✗ too far off</span>'
        shown.append(
            "<tr>"
            + "".join(_cell(row.get(part), "name") for part in ("operation", "platform"))
            + _cell(row.get("check"))
            + _number(row.get("error"), _power)
            + _number(row.get("bound"), _power)
            + f"<td>{verdict}</td>"
            + (_cell(row.get("reason"), "why") if noted else "")
            + "</tr>"
        )
    columns = ("Operation", "Platform", "Call", "#Largest error", "#Bound", "Result", *["Notes"] * noted)
    return (
        "correctness",
        "Correctness",
        "<p>Every implementation that runs here, on the same inputs as a reference in float64.</p>"
        + _table("checks", "Checks against float64", columns, shown),
    )


def _speed(result: Mapping[str, Any]) -> tuple[str, str, str] | None:
    timings = result.get("timings") or []
    compared = compare(timings)
    plots = figures.inline({"timings": timings})
    body = [_against(compared)] if compared else []
    for kind, title, note in (
        (
            "latency",
            "Time against length",
            "Lower is better. Both axes are logarithmic; the bands reach from the best burst to the 90th percentile.",
        ),
        ("memory", "Memory against length", "Peak memory of a call; lower is better. Both axes are logarithmic."),
    ):
        if kind in plots:
            body.append(f'<h3 id="{kind}">{title}</h3><p class="note">{note}</p>{_legend(timings, kind)}')
            drawn = zip(figures.panels(result, kind), plots[kind], strict=True)
            body.append(f'<div class="plots">{"".join(_figure(_told(p, kind), svg) for p, svg in drawn)}</div>')
    return ("speed", "Speed", "".join(body)) if body else None


def _against(compared: list[Comparison]) -> str:
    """Calls × lengths: how many times as fast as the best peer."""
    lengths = sorted({c.length for c in compared}, key=lambda length: (positive(length) or math.inf, _word(length)))
    calls: dict[tuple[str, str], dict[Any, Comparison]] = {}
    for c in compared:
        calls.setdefault((c.operation, c.what), {})[c.length] = c
    tone = {"faster": "good", "level": "none", "slower": "bad"}
    words = {"faster": "faster than", "level": "level with", "slower": "slower than"}
    rows = []
    for (operation, what), found in calls.items():
        cells = "".join(
            f'<td class="{tone[c.verdict]}"><b>{_ratio(c.ratio)}</b>'
            f"<span>{words[c.verdict]} {escape(c.against)}</span></td>"
            if (c := found.get(length))
            else '<td class="none">·</td>'
            for length in lengths
        )
        name = f'<span class="name">{_breakable(operation)}</span> <span class="range">{escape(what)}</span>'
        rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">{escape(_count(length) or "—")}</th>' for length in lengths)
    return (
        "<h3>Against the best peer</h3>"
        '<p class="note">The best peer’s time divided by ours, by length: 2× is twice as fast, 0.5× half as fast. '
        "The best peer is the fastest of the others on that call.</p>"
        + _scrolls(
            "Speed against the best peer",
            '<table class="matrix against"><thead><tr><th scope="col">Call</th>'
            f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>",
        )
    )


def _times(rows: list[Mapping[str, Any]]) -> tuple[str, str, str] | None:
    if not rows:
        return None
    ours = {(c.operation, c.what, c.length): c.ours["ms"] for c in compare(rows)}
    shown, noted = [], any(row.get("reason") or row.get("flags") for row in rows)
    for row in rows:
        ms, own = (
            positive(row.get("ms")),
            ours.get((_word(row.get("operation")), _word(row.get("what")), row.get("length"))),
        )
        median, high = positive(row.get("median_ms")), positive(row.get("high_ms"))
        spread = f'<span class="range">{number(median)} – {number(high)}</span>' if ms and median and high else ""
        notes = "; ".join(filter(None, (_word(row.get("reason")), *map(_word, row.get("flags") or ()))))
        shown.append(
            ("<tr class=ours>" if is_ours(row.get("implementation")) else "<tr>")
            + f'<td class="call"><span class="name">{_breakable(_word(row.get("operation")))}</span>'
            + f' <span class="range">{escape(_word(row.get("what")))}</span></td>'
            + _number(row.get("length"), _count)
            + _cell(row.get("implementation"))
            + _number(row.get("ms"), number, spread)
            + _number(ms / own if ms and own else None, _ratio)
            + _number(row.get("tflops"), number)
            + _number(row.get("memory_bytes"), _bytes)
            + _number(row.get("error"), _power)
            + (_cell(notes, "why") if noted else "")
            + "</tr>"
        )
    columns = (
        "Call",
        "#Length",
        "Implementation",
        "#Time (ms)",
        "#Time ÷ ours",
        "#TFLOP/s",
        "#Memory",
        "#Error",
        *["Notes"] * noted,
    )
    return (
        "times",
        "Times",
        "<p>The best burst of each call; below it the median and the 90th percentile. Ours are shaded.</p>"
        '<div class="tools"><label for="filter" class="hidden">Filter the times</label>'
        '<input id="filter" type="search" data-filter="timings" placeholder="Filter: forward 2,048 …">'
        "<output></output></div>" + _table("timings", "Times", columns, shown),
    )


def _roofline(result: Mapping[str, Any]) -> tuple[str, str, str] | None:
    roofs, points = figures.roofs(result), figures.points(result)
    drawn = figures.inline({"roofline": result.get("roofline")}).get("roofline")
    if not drawn:
        return None
    told = [f"{name}: {number(tflops)} TFLOP/s, {number(tb)} TB/s" for name, (tflops, tb) in roofs.items()]
    line = '<li><svg class="swatch" viewBox="-14 -7 28 14" aria-hidden="true"><path d="M-14 0h28" stroke="currentColor" stroke-width="2"{}/></svg>{}</li>'
    legend = "".join(line.format(' stroke-dasharray="5 3"' if n else "", escape(text)) for n, text in enumerate(told))
    lowest = next(iter(roofs.values()), None)
    rows = [
        f'<tr><td class="num" data-value="{n}">{n}</td>'
        + _cell(name, "name")
        + _number(intensity, number)
        + _number(tflops, number)
        + _number(tflops / min(lowest[0], lowest[1] * intensity) if lowest else None, "{:.0%}".format)
        + "</tr>"
        for n, (name, intensity, tflops) in enumerate(points, 1)
    ]
    label = "Roofline. Roofs: " + "; ".join(told or ["none"]) + f". {len(points)} operations, listed in the table."
    columns = ("#No.", "Operation", "#FLOP/byte", "#TFLOP/s", "#Of roof")
    table = _table("points", "Points of the roofline", columns, rows) if rows else ""
    body = (
        "<p>How fast an operation could be: bound by memory on the slope, by arithmetic on the flat. "
        "A point is what was measured, and its share is that of the solid roof.</p>"
        f'<ul class="legend">{legend}</ul><div class="beside">{_figure(label, drawn[0], "wide")}{table}</div>'
    )
    return "roofline", "Roofline", body


def _legend(timings: list[Mapping[str, Any]], kind: str) -> str:
    drawn = {name for panel in figures.panels({"timings": timings}, kind) for name in panel.series}
    looks = figures.looks({"timings": timings})
    items = "".join(f"<li>{look.swatch()}{escape(name)}</li>" for name, look in looks.items() if name in drawn)
    return f'<ul class="legend" aria-label="Legend">{items}</ul>'


def _told(panel: figures.Panel, kind: str) -> str:
    """A panel in words, for those who cannot see it."""
    shown = {"latency": lambda ms: f"{number(ms)} ms", "memory": _bytes}[kind]
    ends = "; ".join(f"{name} {shown(row[1])} at {_count(int(row[0]))}" for name, (*_, row) in panel.series.items())
    return f"{'Time' if kind == 'latency' else 'Memory'} against length, {panel.operation} {panel.what}. At the longest length: {ends}."


def _figure(label: str, svg: str, kind: str = "") -> str:
    return f'<figure role="img" class="{kind}" aria-label="{escape(label)}">{svg}</figure>'


def _scrolls(label: str, table: str) -> str:
    """A table in a frame of its own to scroll in, by keyboard too."""
    return f'<div class="wrap" role="region" tabindex="0" aria-label="{escape(label)}">{table}</div>'


def _table(name: str, label: str, columns: Iterable[str], rows: Iterable[str]) -> str:
    """A table that sorts; a column whose title begins with # holds numbers."""
    head = "".join(
        f'<th scope="col"{" class=num" if title[0] == "#" else ""}><button type="button">'
        f"{escape(title.removeprefix('#'))}</button></th>"
        for title in columns
    )
    return _scrolls(label, f'<table id="{name}"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>')


def _breakable(name: str) -> str:
    return escape(name).replace("_", "_<wbr>")


def _cell(value: Any, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(_word(value))}</td>' if kind else f"<td>{escape(_word(value))}</td>"


def _number(value: Any, shown: Callable[[Any], str], more: str = "") -> str:
    """A cell that sorts by value; what is no finite number is shown as it is and comes last."""
    if isinstance(value, (int, float)) and math.isfinite(value):
        return f'<td class="num" data-value="{float(value)!r}">{escape(shown(value))}{more}</td>'
    return f'<td class="num" data-value="">{escape(_word(value)) or "—"}</td>'
