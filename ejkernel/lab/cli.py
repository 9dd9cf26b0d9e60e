"""The command line."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of ``ejkernel``; says what to install where the command line's packages are missing."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f"ejkernel: the command line needs {error.name}: pip install 'ejkernel[lab]'")
    _app()()


def _app():
    import json

    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table

    app = typer.Typer(no_args_is_help=True, add_completion=False, help="Deep-learning kernels for JAX.")

    @app.callback()
    def root() -> None:
        """Deep-learning kernels for JAX, looked at."""

    @app.command()
    def report(
        quick: bool = typer.Option(False, "--quick", help="Short sequences only: under a minute on two cores."),
        as_json: bool = typer.Option(False, "--json", help="Print JSON instead of tables."),
    ) -> None:
        """Which kernels this machine can run, each checked against float64 and timed beside jax.nn.

        Example: ejkernel report --quick
        """
        from ejkernel.lab import report as lab

        console = Console(stderr=as_json)
        lengths = (512, 1024, 2048) if quick else (512, 1024, 2048, 4096)
        kernels = lab.kernels()
        platforms = list(dict.fromkeys(row["platform"] for row in kernels if row["runs"]))
        result = {"machine": lab.machine(), "kernels": kernels, "checks": [], "timings": []}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("checking", total=len(platforms) * (len(lab.CHECKS) + 2 * len(lengths)))
            for platform in platforms:
                for part, rows in (("checks", lab.checks(platform)), ("timings", lab.timings(platform, lengths))):
                    for row in rows:
                        result[part].append(row)
                        progress.update(task, advance=1, description=f"{part} on {platform}")
        if as_json:
            print(json.dumps(result, indent=1))
        else:
            _show(console, result, Table)
        failed = [row for row in result["checks"] if not row["passed"]]
        if failed:
            raise typer.Exit(1)

    return app


def _show(console, result: dict, table_class) -> None:
    from rich.markup import escape

    def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
        shown = table_class(title=title, title_justify="left", title_style="bold")
        for number, column in enumerate(columns):
            shown.add_column(column, justify="left" if number < 2 or column == "why" else "right")
        for row in rows:
            shown.add_row(*map(escape, row))  # a reason may name an extra in brackets
        console.print(shown)

    machine = result["machine"]
    console.print(
        f"[bold]{machine['device']}[/] × {machine['devices']} · jax {machine['jax']} · ejkernel {machine['ejkernel']}"
    )
    table(
        "Kernels",
        ["operation", "platform", "backend", "runs here", "why"],
        [
            [r["operation"], r["platform"], r["backend"], "yes" if r["runs"] else "no", "; ".join(r["reasons"])]
            for r in result["kernels"]
        ],
    )
    table(
        "Against float64",
        ["platform", "call", "largest error", ""],
        [
            [
                r["platform"],
                r["check"],
                "—" if r["error"] is None else f"{r['error']:.1e}",
                "[green]ok[/]" if r["passed"] else f"[red]{r['reason'] or 'too far'}[/]",
            ]
            for r in result["checks"]
        ],
    )
    table(
        "Causal attention, float32, 8 heads × 64, beside jax.nn (milliseconds)",
        ["platform", "what", "length", "ejkernel", "jax.nn", "faster"],
        [
            [
                r["platform"],
                r["what"],
                str(r["length"]),
                f"{r['ours_ms']:.1f}",
                f"{r['jax_nn_ms']:.1f}",
                f"{r['ratio']:.1f} ×",
            ]
            for r in result["timings"]
        ],
    )
