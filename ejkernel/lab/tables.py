"""Results as tables in a terminal."""

from __future__ import annotations

import sys
from typing import Any


def to_terminal(draw: Any, result: dict[str, Any]) -> None:
    """Draw with a console whose reader may go away: that is a BrokenPipeError, as everywhere, and not an exit."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    draw(Terminal(), result)
    sys.stdout.flush()


def info(console: Any, result: dict[str, Any]) -> None:
    """The machine, and the kernels with reasons."""
    _machine(console, result["machine"])
    _kernels(console, result["kernels"])


def checks(console: Any, result: dict[str, Any]) -> None:
    """Errors against float64."""
    _machine(console, result["machine"])
    _checks(console, result["checks"])


def timings(console: Any, result: dict[str, Any]) -> None:
    """Times beside the peers', and what would be faster than what is selected."""
    _machine(console, result["machine"])
    _timings(console, result["timings"])
    for line in result["advice"]:
        console.print(f"Faster: {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def tuned(console: Any, result: dict[str, Any]) -> None:
    """What was measured and kept."""
    _machine(console, result["machine"])
    _table(
        console,
        "Measured and kept",
        ["call", "direction", "platform", "ms", "parameters"],
        [[r["name"], r["direction"], r["platform"], f"{r['ms']:.3f}", r["params"]] for r in result["tuned"]],
    )


def roofline(console: Any, result: dict[str, Any]) -> None:
    """The roofs, and each operation's share of the one above it."""
    _machine(console, result["machine"])
    _roofline(console, result["roofline"])
    console.print(f"Drawn in {result['picture']}", markup=False)


def report(console: Any, result: dict[str, Any]) -> None:
    """All of it."""
    info(console, result)
    _checks(console, result["checks"])
    _timings(console, result["timings"])
    _roofline(console, result["roofline"])


def comparison(console: Any, result: dict[str, Any]) -> None:
    """Two reports side by side, in short: the page has all of it."""
    for machine in result["machines"]:
        console.print(f"{machine['name']}: {machine['device']}", markup=False, highlight=False)
    _table(
        console,
        "What differs",
        ["", "A", "B"],
        [[r["name"], str(r["a"] or "—"), str(r["b"] or "—")] for r in result["versions"] if r["differs"]],
    )
    kernels = [(r["operation"], *(_chosen(r[side]) for side in ("a", "b"))) for r in result["kernels"]]
    _table(console, "Kernels of a plain call", ["operation", "A", "B"], [list(row) for row in kernels])
    ours = [r for r in result["timings"] if r["implementation"] == "ejkernel" and r["ratio"]]
    _table(
        console,
        "Ours",
        ["operation", "length", "A ms", "B ms", "A ÷ B"],
        [
            [f"{r['operation']}, {r['what']}", str(r["length"]), _number(r["a"]["ms"], ".3f"), _number(r["b"]["ms"], ".3f"),
             f"{r['ratio']:.2f} ×"]
            for r in ours
        ],
    )  # fmt: skip
    found, checks = result["summary"], result["checks"]
    if found["calls"]:
        tally = ", ".join(f"{found[verdict]} {verdict}" for verdict in ("faster", "level", "slower") if found[verdict])
        console.print(f"B is {found['mean']:.2f} × as fast as A, geometric mean of {found['calls']} calls: {tally}.")
    for side, name in (("a", "A"), ("b", "B")):
        off = [r for r in checks if r[side] and not r[side]["passed"] and not r[side]["refused"]]
        alone = sum(bool((r[side] or {}).get("ms")) and not r["ratio"] for r in result["timings"])
        console.print(f"{name}: {len(off)} checks not passed, {alone} times that the other has not.", highlight=False)


def _chosen(side: dict[str, Any] | None) -> str:
    return "—" if side is None else ", ".join(side["chosen"]) or "none"


_NUMBERS = {
    "length",
    "ms",
    "error",
    "TFLOP/s",
    "MiB",
    "ejkernel is",
    "FLOP/byte",
    "of its roof",
    "A ms",
    "B ms",
    "A ÷ B",
}
_STYLES = {"ok": "green", "yes": "green", "no": "red", "wrong": "bold red"}


def _table(console: Any, title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        shown.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
    for row in rows:
        # As text, not as markup: a reason may hold brackets.
        shown.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(shown)


def _machine(console: Any, machine: dict[str, Any]) -> None:
    words = f"{machine['device']} × {machine['devices']} · {machine['processor']}, {machine['cores']} cores"
    versions = " · ".join(f"{name} {number}" for name, number in machine["versions"].items())
    console.print(f"{words}\n{versions}\nfingerprint {machine['fingerprint']}", markup=False, highlight=False)


def _kernels(console: Any, rows: list[dict[str, Any]]) -> None:
    _table(
        console,
        "Kernels",
        ["operation", "platform", "runs here", "why"],
        [[r["operation"], r["platform"], "yes" if r["runs"] else "no", "; ".join(r["reasons"])] for r in rows],
    )


def _checks(console: Any, rows: list[dict[str, Any]]) -> None:
    def verdict(row: dict[str, Any]) -> list[str]:
        if row["passed"]:
            return ["ok"]
        return ["refused" if row["refused"] else "wrong"]

    _table(
        console,
        "Against float64, values and gradients",
        ["operation", "platform", "call", "error", ""],
        [
            [r["operation"], f"{r['platform']} {r['dtype']}", r["check"], _number(r["error"], ".1e"), *verdict(r)]
            for r in rows
        ],
    )
    for row in rows:
        if row["reason"]:
            console.print(f"{row['platform']} {row['operation']}, {row['check']}: {row['reason']}", markup=False)


def _timings(console: Any, rows: list[dict[str, Any]]) -> None:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        given = row["length"] is None
        if row["params"] is None or row["implementation"] == _fastest(rows, row):
            groups.setdefault((row["name"] if given else row["operation"], row["what"]), []).append(row)
    for (call, what), group in groups.items():
        ours = {r["length"]: r["ms"] for r in group if r["implementation"] == "ejkernel"}
        _table(
            console,
            f"{call}, {what}, {group[0]['dtype']}",
            [
                *(["length"] if group[0]["length"] is not None else []),
                "implementation",
                "ms",
                "ejkernel is",
                "TFLOP/s",
                "MiB",
                "error",
                "",
            ],
            [
                [
                    *([str(r["length"])] if r["length"] is not None else []),
                    r["implementation"],
                    _number(r["ms"], ".3f"),
                    _beside(r, ours.get(r["length"])),
                    _number(r["tflops"], ".3g"),
                    _number(r["memory_bytes"] and r["memory_bytes"] / 2**20, ".1f"),
                    _number(r["error"], ".1e"),
                    "~" if r["flags"] else "",
                ]
                for r in group
                if r["ms"]
            ],
        )
    absent = dict.fromkeys(f"{r['implementation']}: {r['reason']}" for r in rows if r["reason"])
    unchecked = dict.fromkeys(f"{r['name']}: {r['unchecked']}" for r in rows if r.get("unchecked"))
    console.print(
        "ejkernel is: how many times as fast as that row. error: of the output against float64. ~: the times were "
        "unsteady, see --json.",
        *(f"Not timed: {line}" for line in absent),
        *(f"No error for {line}" for line in unchecked),
        sep="\n",
        markup=False,
        highlight=False,
    )


def _fastest(rows: list[dict[str, Any]], row: dict[str, Any]) -> str:
    """The fastest parameter set of those timed on a row's call: the only one that is shown."""
    same = [r for r in rows if (r["name"], r["what"]) == (row["name"], row["what"]) and r["params"] and r["ms"]]
    return min(same, key=lambda r: r["ms"])["implementation"] if same else ""


def _beside(row: dict[str, Any], own: float | None) -> str:
    return "" if row["implementation"] == "ejkernel" or not own else f"{row['ms'] / own:.2f} ×"


def _roofline(console: Any, found: dict[str, Any]) -> None:
    roof = found["ceilings"]
    console.print(
        f"Measured roofs: {roof['tflops']:.3g} TFLOP/s {roof['dtype']}, {roof['copy_tb_per_s']:.3g} TB/s copied, "
        f"{roof['read_tb_per_s']:.3g} TB/s read",
        markup=False,
    )
    _table(
        console,
        "Under the measured roof",
        ["operation", "FLOP/byte", "TFLOP/s", "of its roof"],
        [
            [
                p["name"],
                f"{p['intensity']:.1f}",
                f"{p['tflops']:.3g}",
                f"{p['tflops'] / min(roof['tflops'], p['intensity'] * roof['tb_per_s']):.0%}",
            ]
            for p in found["points"]
        ],
    )


def _number(value: float | None, form: str) -> str:
    return "—" if value is None else format(value, form)
