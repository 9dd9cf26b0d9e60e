"""Whether the tests bite: plants faults of one line, one at a time, and reports which of them ``make test`` catches.

    python tools/mutants.py                      # all of them, hours; the table goes to docs/mutants.md
    python tools/mutants.py "ring-*" store-lock  # some, by name or pattern
    python tools/mutants.py --likely-only        # only the test files that should catch each fault
    python tools/mutants.py --full NAME ...      # `make test-full` instead, for what `make test` misses
    python tools/mutants.py --check              # that every fault still fits the code; runs no test

A fault is planted in a copy of the tracked files, never in the working tree. The marker expressions are those of the
Makefile. Of a lane's tests the likely files run first, the others only if those pass. A test that fails
without the fault too catches nothing: it is left out, and named at the end.

Lanes: ``plain`` is the main process of ``make test``, ``triton`` the one with ``TRITON_INTERPRET=1``, ``mosaic`` the main
process on an environment with jax >= 0.11, whose interpreter runs Mosaic GPU kernels (``--mosaic-venv``).
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "mutants.md"
LANES = ("plain", "triton", "mosaic")
NOTHING_COLLECTED = 5


@dataclass(frozen=True)
class Fault:
    """A line that is changed, and what that breaks.

    ``old`` is in the file exactly once. ``likely`` are the test files that should notice, the likeliest first.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    likely: tuple[str, ...]
    lane: str

    def planted(self, text: str) -> str:
        return text.replace(self.old, self.new)


def read_faults(path: Path) -> list[Fault]:
    """The faults of a file, with paths from the root."""
    rows = tomllib.loads(path.read_text())["fault"]
    return [
        Fault(
            row["name"],
            f"ejkernel/{row['file']}",
            row["old"],
            row["new"],
            row["breaks"],
            tuple(f"tests/test_{test}.py" for test in row["likely"].split()),
            row.get("lane", "plain"),
        )
        for row in rows
    ]


FAULTS = read_faults(Path(__file__).with_suffix(".toml"))


# Whether the faults fit the code


def problems(fault: Fault, root: Path = ROOT) -> list[str]:
    """Why a fault cannot be planted."""
    path = root / fault.file
    if not path.is_file():
        return [f"{fault.name}: there is no {fault.file}"]
    text = path.read_text()
    found = [f"{fault.name}: there is no {test}" for test in fault.likely if not (root / test).is_file()]
    if fault.old == fault.new:
        found.append(f"{fault.name}: it changes nothing")
    if (count := text.count(fault.old)) != 1:
        return [*found, f"{fault.name}: {fault.old!r} is {count} times in {fault.file}, expected once"]
    try:
        compile(fault.planted(text), fault.file, "exec")
    except SyntaxError as error:
        found.append(f"{fault.name}: {fault.file} does not compile with it ({error})")
    return found


def all_problems(chosen: list[Fault]) -> list[str]:
    """Those of the chosen faults, and names that are not unique."""
    names = [fault.name for fault in FAULTS]
    twice = sorted({name for name in names if names.count(name) > 1})
    return [f"{name}: another fault has that name" for name in twice] + [p for f in chosen for p in problems(f)]


# What make runs


@dataclass(frozen=True)
class Command:
    """A run of pytest as the Makefile has it: variables, options, and which files."""

    variables: dict[str, str]
    options: tuple[str, ...]
    files: tuple[str, ...]

    def has(self, test: str) -> bool:
        """Whether a test file is among those that run."""
        return not self.files or any(Path(test).is_relative_to(file) for file in self.files)


def commands(target: str, interpreted: bool) -> list[Command]:
    """The run of pytest in ``make test`` or ``make test-full``, with Triton's interpreter or without."""
    variables = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"} if interpreted else {}
    return [Command(variables, ("-m", "not slow") if target == "test" else (), ("tests",))]


# Running


@dataclass(frozen=True)
class Outcome:
    """What a run of pytest said: its exit code (None: it took too long) and the first test that failed, if it names one."""

    code: int | None
    failed: str

    @property
    def passed(self) -> bool:
        return self.code in (0, NOTHING_COLLECTED)


@dataclass(frozen=True)
class Result:
    """What became of a fault; ``caught_by`` is a make target, or why there is none."""

    fault: Fault
    caught_by: str
    test: str
    seconds: float


class Runner:
    """Runs faults one at a time or side by side; knows which tests pass without any."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.folder = options, folder
        self.target = "test-full" if options.full else "test"
        self.clean = self.copy("clean")
        self._commands: dict[str, list[Command]] = {}
        self._passing: dict[tuple[str, tuple[str, ...]], bool] = {}
        self._lock = threading.Lock()

    def copy(self, name: str) -> Path:
        """The tracked files of the working tree, as they are now."""
        tree = self.folder / name
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        for file in filter(None, listed.stdout.split("\0")):
            if (ROOT / file).is_file():
                (tree / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, tree / file)
        return tree

    def venv(self, lane: str) -> Path:
        return (ROOT / (self.options.mosaic_venv if lane == "mosaic" else self.options.venv)).absolute()

    def commands(self, lane: str) -> list[Command]:
        """Those of a lane; asked of make once."""
        with self._lock:
            if lane not in self._commands:
                self._commands[lane] = commands(self.target, lane == "triton")
            return self._commands[lane]

    def environment(self, tree: Path, command: Command) -> dict[str, str]:
        """The copy goes before an installed ejkernel; compiled programs are shared, for their keys hold the program."""
        shared = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax")}
        return {**shared, **os.environ, **command.variables, "PYTHONPATH": str(tree)}

    def pytest(self, lane: str, tree: Path, command: Command, *arguments: str) -> Outcome:
        """Stops at the first failure."""
        call = [str(self.venv(lane) / "bin" / "python"), "-m", "pytest", "-x", "-p", "no:cacheprovider"]
        process = subprocess.Popen(
            [*call, *command.options, *arguments],
            cwd=tree,
            env=self.environment(tree, command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=self.options.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Outcome(None, "")
        # A name ends where the message begins, or the line.
        failures = re.findall(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.*?)?)(?: - |$)", text, re.MULTILINE)
        return Outcome(process.returncode, failures[0] if failures else "")

    def require_own_tree(self, lane: str) -> None:
        """Stop if tests in a copy would import another ejkernel: every fault would seem to be missed."""
        command = self.commands(lane)[0]
        python = str(self.venv(lane) / "bin" / "python")
        found = subprocess.run(
            [python, "-c", "import ejkernel; print(ejkernel.__file__)"],
            cwd=self.clean,
            env=self.environment(self.clean, command),
            capture_output=True,
            text=True,
        )
        if not found.stdout.startswith(str(self.clean)):
            sys.exit(f"{python} imports {found.stdout.strip() or found.stderr} instead of the copy in {self.clean}")

    def run(self, fault: Fault) -> Result:
        tree = self.copy(fault.name)
        path = tree / fault.file
        path.write_text(fault.planted(path.read_text()))
        start = time.monotonic()
        caught_by, test = "not by these" if self.options.likely_only else "missed", ""
        for command, arguments in self.stages(fault):
            outcome = self.first_failure(fault.lane, tree, command, arguments)
            if not outcome.passed:
                caught_by, test = self.judged(fault, outcome, command)
                break
        shutil.rmtree(tree)
        return Result(fault, caught_by, test, time.monotonic() - start)

    def stages(self, fault: Fault) -> Iterator[tuple[Command, list[str]]]:
        """The likely files, then the rest of the lane if that was asked for."""
        for command in self.commands(fault.lane):
            likely = [test for test in fault.likely if command.has(test)]
            if likely:
                yield command, ["-n", "0", *likely]
        for command in () if self.options.likely_only else self.commands(fault.lane):
            others = [f"--ignore={test}" for test in fault.likely]
            files = [file for file in command.files if file not in fault.likely]
            yield command, ["-n", str(self.options.workers), *others, *files]

    def first_failure(self, lane: str, tree: Path, command: Command, arguments: list[str]) -> Outcome:
        """As pytest, but for tests that fail without a fault too: those are left out, here and from now on."""
        while True:
            left_out = [f"--deselect={test}" for test in self.broken(lane)]
            outcome = self.pytest(lane, tree, command, *left_out, *arguments)
            again = f"--deselect={outcome.failed}" in left_out
            if again or "::" not in outcome.failed or self.passes_without(lane, command, outcome.failed):
                return outcome

    def judged(self, fault: Fault, outcome: Outcome, command: Command) -> tuple[str, str]:
        """What caught a fault, or why that is not known; and the test, or else how pytest ended."""
        if outcome.code is None:
            return "timed out", ""
        # Where no test is named, nothing could be collected or the process died.
        alone = (outcome.failed,) if "::" in outcome.failed else ("--collect-only", *fault.likely)
        caught = self.passes_without(fault.lane, command, *alone)
        ended = outcome.failed or f"pytest ended with {outcome.code}"
        return (f"make {self.target}" if caught else "fails without it"), ended

    def passes_without(self, lane: str, command: Command, *arguments: str) -> bool:
        """Whether a test, or the collection of files, is in order without a fault; each is tried once."""
        with self._lock:
            if (lane, arguments) in self._passing:
                return self._passing[lane, arguments]
        passing = self.pytest(lane, self.clean, command, "-n", "0", *arguments).passed
        with self._lock:
            self._passing[lane, arguments] = passing
        return passing

    def broken(self, lane: str) -> list[str]:
        """The tests of a lane that are known to fail without a fault."""
        with self._lock:
            return [arguments[0] for (own, arguments), passing in self._passing.items() if own == lane and not passing]


# The table

HEADER = """# Planted faults

`tools/mutants.py` plants a fault of one line in a copy of the tree and runs the tests of `make test` on it, one fault
at a time. This page is what it wrote: the fault, what it breaks, and the first test that failed. The script has the
lines themselves. Lanes: `plain` is the main process of `make test`, `triton` the one in Triton's interpreter, `mosaic`
the main process with jax 0.11 or later, whose interpreter runs the Hopper kernels.

A fault is caught if a test fails with it that passes without. What `make test` misses must be caught by
`make test-full`, and becomes a test.

"""
COLUMNS = ("fault", "file", "what it breaks", "lane", "caught by", "first failing test", "seconds")


def row_of(result: Result) -> str:
    fault, test = result.fault, result.test.replace("|", "\\|")
    cells = [f"`{fault.name}`", f"`{fault.file.removeprefix('ejkernel/')}`", fault.breaks, fault.lane]
    cells += [f"`{result.caught_by}`" if result.caught_by.startswith("make") else result.caught_by]
    cells += [f"`{test.removeprefix('tests/')}`" if test else "", f"{result.seconds:.0f}"]
    return f"| {' | '.join(cells)} |"


def known_rows(page: Path) -> dict[str, str]:
    """The rows that a page has, by fault."""
    lines = page.read_text().splitlines() if page.is_file() else []
    return {match[1]: line for line in lines if (match := re.match(r"\| `([\w-]+)` \|", line))}


def write_page(page: Path, results: list[Result]) -> None:
    """All faults in their order, those that did not run now as the page has them."""
    rows = {**known_rows(page), **{result.fault.name: row_of(result) for result in results}}
    for fault in FAULTS:
        rows.setdefault(fault.name, row_of(Result(fault, "not run", "", 0)))
    rows = {fault.name: rows[fault.name] for fault in FAULTS}
    counts = {what: sum(f"| {what} |" in row for row in rows.values()) for what in ("`make test`", "`make test-full`")}
    summary = f"Of {len(rows)} faults, {' and '.join(f'{n} are caught by {what}' for what, n in counts.items() if n)}"
    summary = summary if any(counts.values()) else f"{len(rows)} faults"
    table = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", *rows.values()]
    page.write_text(f"{HEADER}{summary}.\n\n" + "\n".join(table) + "\n")


# The command line


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults to plant, by name or pattern; default: all")
    parser.add_argument("--lane", choices=LANES, action="append", help="only faults of this lane; may be repeated")
    parser.add_argument("--list", action="store_true", help="name the faults and stop")
    parser.add_argument("--check", action="store_true", help="check that every fault fits the code and stop")
    parser.add_argument("--likely-only", action="store_true", help="run only the files that should catch a fault")
    parser.add_argument("--full", action="store_true", help="run make test-full's tests instead of make test's")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--workers", type=int, default=2, help="processes of a run over the rest of a lane")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one run of pytest")
    parser.add_argument("--venv", default=".venv", help="environment of the lanes plain and triton")
    parser.add_argument("--mosaic-venv", default=".venv-312", help="environment of the lane mosaic: jax >= 0.11")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table goes; rows of other faults stay")
    return parser.parse_args()


def chosen_faults(options: argparse.Namespace) -> list[Fault]:
    unknown = [name for name in options.names if not fnmatch.filter([f.name for f in FAULTS], name)]
    if unknown:
        sys.exit(f"no fault is named {', '.join(unknown)}; see --list")
    chosen = [f for f in FAULTS if not options.names or any(fnmatch.fnmatch(f.name, name) for name in options.names)]
    return [fault for fault in chosen if not options.lane or fault.lane in options.lane]


def main() -> None:
    options = parse()
    chosen = chosen_faults(options)
    if options.list:
        for fault in chosen:
            print(f"{fault.name:40} {fault.lane:7} {fault.file.removeprefix('ejkernel/')}: {fault.breaks}")
        return
    found = all_problems(chosen)
    if found:
        sys.exit("\n".join(found))
    if options.check:
        print(f"{len(chosen)} faults fit the code")
        return
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        runner = Runner(options, Path(folder).resolve())
        for lane in dict.fromkeys(fault.lane for fault in chosen):
            runner.require_own_tree(lane)
        for done in as_completed([pool.submit(runner.run, fault) for fault in chosen]):
            result = done.result()
            results.append(result)
            print(f"{result.fault.name:40} {result.caught_by:16} {result.seconds:5.0f} s  {result.test}", flush=True)
            write_page(options.page, results)
        for lane in LANES:
            for test in runner.broken(lane):
                print(f"fails without a fault, left out of {lane}: {test}")
    uncaught = [result.fault.name for result in results if not result.caught_by.startswith("make")]
    print(
        f"{len(results) - len(uncaught)} of {len(results)} caught"
        + (f"; not: {' '.join(uncaught)}" if uncaught else "")
    )
    sys.exit(bool(uncaught))


if __name__ == "__main__":
    main()
