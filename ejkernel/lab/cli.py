"""The command line: ``ejkernel info | explain | check | bench | tune | roofline | report``.

Exit codes: 0, all is well; 1, a check failed; 2, the command was asked for something that cannot be; 130, interrupted.
"""

import os
import sys
from contextlib import contextmanager
from typing import Annotated, Any

from ejkernel.errors import EjkernelError, how_to_install

FAILED, WRONG, INTERRUPTED = 1, 2, 130


def main() -> None:
    """Entry point of ``ejkernel``: runs a command, and says in one line what is wrong."""
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as error:
        _stop(f"the command line needs {error.name}: {how_to_install('lab')}", WRONG)
    app = _app()
    try:
        code = app(arguments, standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except typer.Exit as error:
        code = error.exit_code
    except Exception as error:
        if debug:
            raise
        if hasattr(error, "format_message"):  # a mistake in the arguments; without words, the help was shown
            if not error.format_message():
                sys.exit(WRONG)
            context = getattr(error, "ctx", None)
            usage = f" (see: {context.command_path} --help)" if context else ""
            _stop(f"{error.format_message()}{usage}", WRONG)
        lines = [line for line in str(error).splitlines() if line.strip()]
        if isinstance(error, EjkernelError):
            _stop("\n".join(lines), WRONG)
        _stop(f"{type(error).__name__}: {lines[0] if lines else ''} (--debug shows where)", FAILED)
    if code == INTERRUPTED:
        _stop("interrupted", INTERRUPTED)
    sys.exit(code or 0)


def _stop(words: str, code: int) -> None:
    print(f"ejkernel: {words}", file=sys.stderr)
    sys.exit(code)


def _app() -> Any:
    import typer

    from ejkernel.lab import page, tables

    app = typer.Typer(
        no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False
    )
    Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables; progress goes to stderr.")]
    Operations = Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Operations; default: all.")]
    Calls = Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OP [NAME=VALUE]...]...",
            help="Operations, or calls of your own: an operation and its arguments; default: all operations.",
        ),
    ]
    File = Annotated[
        str | None, typer.Option("-f", "--file", metavar="YAML", help="Calls of your own: a list, see docs/lab.md.")
    ]

    def show(result: Any, as_json: bool, draw: Any) -> None:
        try:
            if as_json:
                print(page.as_json(result), flush=True)
            else:
                tables.to_terminal(draw, result)
        except BrokenPipeError:  # its reader, such as head, has ended: that is no failure
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    @app.callback()
    def root(
        debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
    ) -> None:
        """Deep-learning kernels for JAX: what runs here, how right, how fast."""

    @app.command()
    def info(
        device: Annotated[str | None, typer.Option(help="A chip to decide for, such as nvidia-h200.")] = None,
        as_json: Json = False,
    ) -> None:
        """Devices, versions, and which kernels can run, with the reasons of those that cannot.

        [bold]Examples[/]: ejkernel info · ejkernel info --device nvidia-h200 · ejkernel info --json
        """
        from ejkernel.lab import report

        show({"machine": report.machine(), "kernels": report.kernels(device)}, as_json, tables.info)

    @app.command()
    def explain(
        op: Annotated[str, typer.Argument(help="The operation.")] = "flash_attention",
        shape: Annotated[
            list[str] | None,
            typer.Option(
                "--shape", help="Of the first array, 2,1024,8,64, or of any: key=2,1024,2,64. May be repeated."
            ),
        ] = None,
        dtype: Annotated[str, typer.Option(help="Of the arrays.")] = "bfloat16",
        causal: Annotated[bool | None, typer.Option("--causal/--no-causal", help="Mask the future.")] = None,
        options: Annotated[
            list[str] | None,
            typer.Option("--set", help="Any other argument: sliding_window=[255,0], bias=float32[1,8,1024,1024]."),
        ] = None,
        platform: Annotated[str | None, typer.Option(help="Pin this one.")] = None,
        device: Annotated[str | None, typer.Option(help="A chip to decide for, such as nvidia-h200.")] = None,
        as_json: Json = False,
    ) -> None:
        """What would run a call, and why not something else. Exit code 1 if nothing can.

        [bold]Examples[/]: ejkernel explain flash_attention --shape 2,4096,32,128 --shape key=2,4096,8,128 --causal
        --device nvidia-h200
        """
        from ejkernel.lab import asked

        decided = asked.explain(op, shape or [], dtype, causal, options or [], platform, device)
        show(
            asked.decision(decided),
            as_json,
            lambda console, _: console.print(str(decided), markup=False, soft_wrap=True),
        )
        if decided.chosen is None:
            raise typer.Exit(FAILED)

    @app.command()
    def check(
        op: Operations = None,
        platform: Annotated[str | None, typer.Option(help="This one only.")] = None,
        as_json: Json = False,
    ) -> None:
        """Every implementation that runs here against float64: values and gradients. Exit code 1 if one is too far off.

        [bold]Examples[/]: ejkernel check · ejkernel check flash_attention --platform xla
        """
        from ejkernel.lab import accuracy, asked, report

        plan = accuracy.check_plan(asked.operations(op), asked.platform(platform))
        if not plan:
            raise EjkernelError(
                f"platform is {platform!r}: none of its kernels runs on this machine; see: ejkernel info"
            )
        with _progress(len(plan)) as step:
            rows = accuracy.run_checks(plan, step.tick)
        show({"machine": report.machine(), "checks": rows}, as_json, tables.checks)
        if not all(row["passed"] or row["refused"] for row in rows):
            raise typer.Exit(FAILED)

    @app.command()
    def bench(
        op: Calls = None,
        file: File = None,
        with_peers: Annotated[
            bool, typer.Option("--peers/--no-peers", help="Beside jax.nn, cuDNN, tokamax, torch, …")
        ] = True,
        pinned: Annotated[bool, typer.Option("--pinned", help="Each of our implementations too.")] = False,
        search: Annotated[
            bool | None,
            typer.Option(
                "--search/--no-search",
                help="Every implementation and parameter set too, to warn where one is faster than what is selected; "
                "default: for calls of your own.",
                show_default=False,
            ),
        ] = None,
        length: Annotated[list[int] | None, typer.Option(help="Sequence length; may be repeated.")] = None,
        backward: Annotated[bool, typer.Option("--backward/--forward", help="Time gradients too.")] = True,
        seconds: Annotated[float, typer.Option(min=0.01, help="About how long to time each.")] = 0.3,
        as_json: Json = False,
    ) -> None:
        """Times of ours beside the peers that are installed, with the error of each against float64.

        [bold]Examples[/]: ejkernel bench flash_attention --length 2048 · ejkernel bench --no-peers --forward --json ·
        ejkernel bench flash_attention query=bf16[2,8192,32,128] key=bf16[2,8192,8,128] causal=True ·
        ejkernel bench -f calls.yaml
        """
        from ejkernel.lab import asked, report, speed, variants

        lengths = asked.lengths(length)
        operations, given = asked.calls(op, file, length)
        options = {"with_peers": with_peers, "pinned": pinned, "backward": backward}
        plan = [
            job
            for name in operations
            for job in speed.bench_plan(
                [name], lengths or report.default_lengths(True)[name], search=bool(search), **options
            )
        ]
        plan += speed.own_plan(given, search=search is not False, **options)
        with _progress(len(plan)) as step:
            rows = [row for job in plan for row in step(str(job), speed.bench, job, seconds=seconds)]
        advice = [line for line in map(variants.advice, rows) if line]
        show({"machine": report.machine(), "timings": rows, "advice": advice}, as_json, tables.timings)
        ours = [row for row in rows if row["implementation"].startswith(speed.OURS) and row["params"] is None]
        if not all(row["ms"] for row in ours):
            raise typer.Exit(FAILED)

    @app.command()
    def tune(
        op: Calls = None,
        file: File = None,
        length: Annotated[list[int] | None, typer.Option(help="Sequence length; may be repeated.")] = None,
        backward: Annotated[bool, typer.Option("--backward/--forward", help="Gradients too.")] = True,
        as_json: Json = False,
    ) -> None:
        """Measure implementations and their parameters here, and keep the fastest for this device.

        Without arguments, what is tuned are the calls that [bold]bench[/] times. In a program: ejkernel.autotune, or
        EJKERNEL_AUTOTUNE=1.

        [bold]Examples[/]: ejkernel tune flash_attention --length 4096 ·
        ejkernel tune flash_attention query=bf16[2,8192,32,128] causal=True · ejkernel tune -f calls.yaml
        """
        from ejkernel.lab import asked, report, speed

        lengths = asked.lengths(length)
        operations, given = asked.calls(op, file, length)
        timed = report.default_lengths(True)
        plan = [
            job for name in operations for job in speed.bench_plan([name], lengths or timed[name], backward=backward)
        ]
        plan += speed.own_plan(given, backward=backward)
        # A backward is tuned with its forward.
        plan = list({job.name(): job for job in plan}.values())
        with _progress(len(plan)) as step:
            rows = [row for job in plan for row in step(job.name(), asked.tune, job)]
        show({"machine": report.machine(), "tuned": rows}, as_json, tables.tuned)

    @app.command()
    def roofline(
        output: Annotated[
            str, typer.Option("-o", "--output", help="The picture to write: .png, .svg or .pdf.")
        ] = "roofline.png",
        refresh: Annotated[bool, typer.Option("--refresh", help="Measure the machine's roofs again.")] = False,
        as_json: Json = False,
    ) -> None:
        """Where each operation stands under this machine's measured roofs, as a picture and a table.

        [bold]Examples[/]: ejkernel roofline -o roofline.svg
        """
        from ejkernel.lab import asked, report, speed
        from ejkernel.lab.ceilings import measure_ceilings

        asked.can_draw(output)
        plan = [job._replace(implementations=(speed.OURS,)) for job in report.plan(True) if job.what == speed.FORWARD]
        with _progress(len(plan) + 1) as step:
            ceilings = step("the machine's roofs", measure_ceilings, refresh=refresh)
            rows = [row for job in plan for row in step(str(job), speed.bench, job)]
        found = report.roofline(rows, ceilings)
        asked.draw_roofline(found, output)
        show({"machine": report.machine(), "roofline": found, "picture": output}, as_json, tables.roofline)

    @app.command()
    def report(
        quick: Annotated[
            bool, typer.Option("--quick", help="Fewer and shorter calls: under two minutes on two cores.")
        ] = False,
        output: Annotated[
            str | None,
            typer.Option(
                "-o",
                "--output",
                metavar="DIR",
                help="Where to write; default: ejkernel-report, or ejkernel-comparison.",
                show_default=False,
            ),
        ] = None,
        compare: Annotated[
            tuple[str, str] | None,
            typer.Option(
                "--compare",
                metavar="A B",
                help="Two saved report.json, or their folders: side by side.",
                show_default=False,
            ),
        ] = None,
        as_json: Json = False,
    ) -> None:
        """One page about this machine: kernels with reasons, correctness, speed beside the peers, roofline.

        Writes index.html (self-contained), report.json and the plots as PNG and SVG. Exit code 1 if a check failed.
        With --compare nothing is measured: two saved reports stand side by side, of two machines or two versions, in
        index.html and comparison.json.

        [bold]Examples[/]: ejkernel report --quick · ejkernel report -o my-report ·
        ejkernel report --compare a/report.json b/report.json
        """
        from ejkernel.lab import asked, files, side_by_side
        from ejkernel.lab import report as lab

        if compare is not None:
            if quick:
                raise EjkernelError("--quick is about measuring, and --compare measures nothing: leave one out.")
            output = output or "ejkernel-comparison"
            files.can_write(os.path.join(output, "index.html"))
            found = side_by_side.beside(*map(side_by_side.load, compare))
            path = page.write_comparison(found, output)
            show(found, as_json, tables.comparison)
            print(f"The page: {path.resolve().as_uri()}", file=sys.stderr)
            return
        output = output or "ejkernel-report"
        asked.can_draw(os.path.join(output, "roofline.png"))
        with _progress(1) as step:
            result = lab.collect(quick, step.at)
        path = page.write(result, output)
        show(result, as_json, tables.report)
        print(f"The page: {path.resolve().as_uri()}", file=sys.stderr)
        if not all(row["passed"] or row["refused"] for row in result["checks"]):
            raise typer.Exit(FAILED)

    return app


@contextmanager
def _progress(total: int) -> Any:
    """``step(words, f, *args)`` runs something with a bar that says so; on stderr, so that stdout can be piped."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def step(words: str, f: Any, *args: Any, **kwargs: Any) -> Any:
            progress.update(task, description=words)
            result = f(*args, **kwargs)
            progress.advance(task)
            return result

        step.tick = lambda words: progress.update(task, description=words, advance=1)
        step.at = lambda words, done, total: progress.update(task, description=words, completed=done, total=total)
        yield step
