"""Results as tables in a terminal."""

from __future__ import annotations

from typing import Any


def info(console: Any, result: dict[str, Any]) -> None:
    """The machine, and the kernels with reasons."""
    _machine(console, result["machine"])
    _kernels(console, result["kernels"])


def checks(console: Any, result: dict[str, Any]) -> None:
    """Errors against float64."""
    _machine(console, result["machine"])
    _checks(console, result["checks"])


def timings(console: Any, result: dict[str, Any]) -> None:
    """Times beside the peers'."""
    _machine(console, result["machine"])
    _timings(console, result["timings"])


def tuned(console: Any, result: dict[str, Any]) -> None:
    """What was measured and kept."""
    _machine(console, result["machine"])
    _table(
        console,
        "Measured and kept",
        ["operation", "length", "direction", "platform", "ms", "parameters"],
        [
            [r["operation"], str(r["length"]), r["direction"], r["platform"], f"{r['ms']:.3f}", r["params"]]
            for r in result["tuned"]
        ],
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


def _table(console: Any, title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    numbers = {"length", "ms", "error", "TFLOP/s", "MiB", "ejkernel is", "FLOP/byte", "of its roof", "bound"}
    shown = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        shown.add_column(column, justify="right" if column in numbers else "left")
    for row in rows:
        # Styled only where a cell is one of our own marks: a reason may hold brackets.
        shown.add_row(*(Text(cell, style={"ok": "green", "no": "red", "too far": "red"}.get(cell, "")) for cell in row))
    console.print(shown)


def _machine(console: Any, machine: dict[str, Any]) -> None:
    words = f"{machine['device']} × {machine['devices']} · {machine['processor']}, {machine['cores']} cores"
    versions = " · ".join(f"{name} {machine[name]}" for name in ("ejkernel", "jax", "jaxlib", "python"))
    console.print(f"{words}\n{versions} · fingerprint {machine['fingerprint']}", markup=False, highlight=False)


def _kernels(console: Any, rows: list[dict[str, Any]]) -> None:
    _table(
        console,
        "Kernels",
        ["operation", "platform", "backend", "runs here", "why"],
        [
            [r["operation"], r["platform"], r["backend"], "ok" if r["runs"] else "no", "; ".join(r["reasons"])]
            for r in rows
        ],
    )


def _checks(console: Any, rows: list[dict[str, Any]]) -> None:
    def verdict(row: dict[str, Any]) -> str:
        return "ok" if row["passed"] else "refused" if row["refused"] else "no"

    _table(
        console,
        "Against float64, values and gradients: the largest relative error",
        ["operation", "platform", "call", "dtype", "error", "bound", "", "why"],
        [
            [
                r["operation"],
                r["platform"],
                r["check"],
                r["dtype"],
                _number(r["error"], ".1e"),
                f"{r['bound']:.0e}",
                verdict(r),
                r["reason"],
            ]
            for r in rows
        ],
    )


def _timings(console: Any, rows: list[dict[str, Any]]) -> None:
    ours = {(r["operation"], r["what"], r["length"]): r["ms"] for r in rows if r["implementation"] == "ejkernel"}

    def beside(row: dict[str, Any]) -> str:
        own = ours.get((row["operation"], row["what"], row["length"]))
        return "" if row["implementation"] == "ejkernel" or not own or not row["ms"] else f"{row['ms'] / own:.2f} ×"

    _table(
        console,
        "Median times, with the error of each output against float64",
        ["operation", "what", "length", "implementation", "ms", "ejkernel is", "TFLOP/s", "MiB", "error", "notes"],
        [
            [
                r["operation"],
                r["what"],
                str(r["length"]),
                r["implementation"],
                _number(r["ms"], ".3f"),
                beside(r),
                _number(r["tflops"], ".3g"),
                _number(r["memory_bytes"] and r["memory_bytes"] / 2**20, ".1f"),
                _number(r["error"], ".1e"),
                "; ".join([r["reason"], *r["flags"]]).strip("; "),
            ]
            for r in rows
        ],
    )
    console.print("“ejkernel is”: how many times as fast as that row.", markup=False)


def _roofline(console: Any, found: dict[str, Any]) -> None:
    roof = found["ceilings"]
    console.print(
        f"Measured roofs: {roof['tflops']:.3g} TFLOP/s {roof['dtype']}, {roof['tb_per_s']:.3g} TB/s copied, "
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
