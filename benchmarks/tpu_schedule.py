"""Cycles of TPU kernels, counted from the schedules that libtpu writes when it compiles. No TPU is needed.

A line of a schedule is one cycle, or more where hardware waits for memory: what is counted here is a lower bound that came
within 4 % of published times for kernels that compute more than they copy. Times that come from it are predicted, not
measured. Two versions of libtpu differ by a few percent, so compare within one.

    with_schedules(folder, compile) runs a function that compiles, and reads what libtpu wrote meanwhile. libtpu must be told
    of the folder before it is loaded: run the process with ``environment(folder)``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SCHEDULE = "-packed-bundles-post-ra.txt"
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:", re.MULTILINE)
_BRANCH = re.compile(r"sbr\.rel\s*(\([^)]*\))?\s*target bundleno = (\d+)")
_DELAY_SLOTS = 4  # cycles after a branch that run whether or not it is taken
_SMALLEST = 12  # branches of fewer cycles count as part of what surrounds them


def environment(folder: str | Path) -> dict[str, str]:
    """Of a process that compiles for TPUs which are not there, and writes schedules into a folder."""
    return {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_LOG_DIR": "disabled",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=(packed-bundles-post-ra|pre-delay.*)",
    }


@dataclass(frozen=True)
class Branch:
    """A conditional part of a kernel's step.

    Attributes:
        cycles: of the part, each instruction counted once.
        loop: of these, those of its longest loop, 0 if it has none.
        busy: by unit, the share of its slots that are taken.
        spills: registers stored because there are too few.
        parts: conditional parts inside, which its cycles include.
    """

    cycles: int
    loop: int
    busy: dict[str, float]
    spills: int
    parts: tuple[Branch, ...] = ()

    def leaves(self) -> tuple[Branch, ...]:
        """The innermost conditional parts, itself if it has none."""
        return tuple(leaf for part in self.parts for leaf in part.leaves()) if self.parts else (self,)


@dataclass(frozen=True)
class Schedule:
    """A kernel.

    Attributes:
        name: of the kernel.
        cycles: of the whole program, each instruction counted once.
        step: of its longest loop, which for a kernel with a grid is one step of the grid with every branch taken.
        branches: the conditional parts of that step, from the first to the last.
    """

    name: str
    cycles: int
    step: int
    branches: tuple[Branch, ...] = field(default=())

    def leaves(self) -> tuple[Branch, ...]:
        """The innermost conditional parts of a step, in program order."""
        return tuple(leaf for branch in self.branches for leaf in branch.leaves())

    @property
    def overhead(self) -> int:
        """Cycles of a step outside of its innermost conditional parts."""
        return self.step - sum(leaf.cycles for leaf in self.leaves())


def with_schedules(folder: str | Path, compile: Callable[[], Any]) -> tuple[Any, list[Schedule]]:
    """What ``compile`` returns, and the schedules of the kernels that it compiled."""
    before = set(Path(folder).glob(f"*{_SCHEDULE}"))
    result = compile()
    return result, [read(path) for path in sorted(set(Path(folder).glob(f"*{_SCHEDULE}")) - before) if _is_kernel(path)]


def _is_kernel(path: Path) -> bool:
    return not any(word in path.name for word in ("schedule-analysis", "<late", "-TLP-"))


def read(path: Path) -> Schedule:
    """The schedule in a file; the table of busy units lies beside it."""
    text = path.read_text(errors="replace")
    starts = [match.start() for match in _BUNDLE.finditer(text)]
    bundles = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    stem = re.sub(rf"-\d+{re.escape(_SCHEDULE)}$", "", path.name)
    (table,) = (p for p in path.parent.iterdir() if p.name.startswith(stem) and "pre-delay" in p.name)
    _, names, slots, _, *rows = table.read_text().splitlines()
    units = [name.strip() for name in names.split(",")]
    capacity = dict(zip(units, map(int, slots.split()), strict=False))
    use = [Counter(dict(zip(units, map(int, row.split()), strict=False))) for row in rows if row.strip()]
    loops, conditionals = _spans(bundles)
    first, end = max(loops, key=lambda span: span[1] - span[0], default=(0, len(bundles)))
    inside = [(a, b) for a, b in conditionals if first <= a and b <= end and b - a >= _SMALLEST]
    return Schedule(
        name=re.sub(r"^\d+-", "", stem),
        cycles=len(bundles),
        step=end - first,
        branches=_tree(inside, loops, use, capacity),
    )


def _spans(bundles: list[str]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Loops are branches back, conditional parts are what a branch forward leaves out."""
    loops, conditionals = set(), set()
    for i, bundle in enumerate(bundles):
        for condition, target in _BRANCH.findall(bundle):
            after = i + 1 + _DELAY_SLOTS
            if int(target) <= i:
                loops.add((int(target), min(len(bundles), after)))
            elif condition and int(target) > after:
                conditionals.add((after, int(target)))
    return sorted(loops), sorted(conditionals)


def _tree(
    spans: list[tuple[int, int]], loops: list[tuple[int, int]], use: list[Counter], capacity: dict[str, int]
) -> tuple[Branch, ...]:
    """Spans as nested branches; of two that cross, the later one is left out."""
    branches, at = [], 0
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        if begin < at:
            continue
        total: Counter = sum(use[begin:end], Counter())
        inner = [(a, b) for a, b in spans if begin <= a and b <= end and (a, b) != (begin, end)]
        branches.append(
            Branch(
                cycles=end - begin,
                loop=max((b - a for a, b in loops if begin <= a and b <= end), default=0),
                busy={unit: total[unit] / slots / (end - begin) for unit, slots in capacity.items() if total[unit]},
                spills=total["VSTORE:SPILL"],
                parts=_tree(inner, loops, use, capacity),
            )
        )
        at = end
    return tuple(branches)
