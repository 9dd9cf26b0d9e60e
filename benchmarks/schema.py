"""One schema for all results: `read` brings every file of benchmarks/results into it, and refuses what does not fit.

A file is a JSON object: `script`, which wrote it, `date` (in files from before scripts wrote it: that of the commit),
`device` (or `machine`), `versions`, more that describes the run (`ABOUT`), and parts. A part is a list of records, a record a flat object. What a
column is, its name says:

- `part`, `implementation` (or `platform`, `kernel`), `direction`, and the names of `CALL` say what was measured;
- a name that ends in a unit of `UNITS` is a figure: `ms`, `forward_ms`, `median_ms`, `tokens_per_second`. Before the
  unit stands what was measured or, in records without an implementation, whose figure it is (`torch_ms`). The median
  of the bursts, beside the best, has `median` in its name;
- ratios are named as in `RATIO`, errors as in `ERROR`, all else in `OTHERS`.

A part may also be nested objects of figures (`temporary_mib: {"forward": 14.5}`). An object with `how` is the log of a
development experiment: it says in words what its figures are, and they are compared with nothing else.
"""

import datetime
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
OURS = "ejkernel"

UNITS = {
    "ms": "ms", "us": "µs", "microseconds": "µs", "s": "s", "seconds": "s", "ns": "ns",
    "mib": "MiB", "mem_gb": "GB", "gb": "GB",
    "tflops": "TFLOP/s", "teraflops_per_second": "TFLOP/s", "flops_per_s": "FLOP/s", "flops_per_second": "FLOP/s",
    "terabytes_per_second": "TB/s", "gb_per_s": "GB/s", "bytes_per_s": "B/s", "tokens_per_second": "tokens/s",
    "ratio": "×", "kilocycles": "thousand cycles", "percent": "%",
}  # fmt: skip
RELATIVE, ABSOLUTE = "relative error", "absolute error"
RATIO = re.compile(r"faster.*|gain|time_over_.+|times_the_.+|.+ / .+|.+_slowest_over_fastest(_less_zeros)?")
ERROR = re.compile(r"errors?(_\w+)?|relative_error")
FIGURE = re.compile(
    r"(?:(?P<what>.+?)[_ ])??(?P<median>median_)?"
    rf"(?P<unit>{'|'.join(sorted(UNITS, key=len, reverse=True))})(?P<after>_median)?"
)
OTHERS = {
    "balance": ("most over mean work of a device", "×"),
    "sent_in_the_loop_over_a_shard": ("sent in the loop, over a shard", "×"),
    "gathers": ("gathers", "count"),
    "copies_in_the_program": ("copies in the program", "count"),
    "of_which_python": ("of which Python", "µs"),
    "roof": ("roof", "tokens/s"),
    "difference": ("largest difference", ABSOLUTE),
    "largest_error": ("largest difference", ABSOLUTE),
    "model_flops_utilisation": ("share of the chip's peak", "×"),
}
# What a figure may be of, in records without an implementation.
QUANTITIES = {"forward", "backward", "both", "temporary", "compile", "overhead", "weights"}
WORDS = {"both": "forward and backward", "temporary": "temporary memory", "compile": "compilation"}
CALL = {
    "case": "{}", "call": "{}", "model": "{}", "shape": "{}", "name": None, "feature": "{}", "tiles": "{} tiles",
    "head_dim": "head dim {}", "value_dim": "value dim {}", "length": "length {}", "seq_len": "length {}",
    "causal": {True: "causal", False: "full"}, "size": "{0} × {0}", "layers": "{} layers", "batch": "batch {}",
    "context": "context {}", "density": None,
}  # fmt: skip
# No figures: whether reruns are the same bits, which implementation an unpinned call ran; of a training, the loss of each step and
# what the model wrote.
REMARKS = ("repeats", "ran", "losses", "samples")
ABOUT = (
    "title", "command", "how", "runtime", "sizes", "dtype", "heads", "kv_heads", "head_dim", "batch", "causal",
    "note", "mesh", "load_average", "parameters",
)  # fmt: skip
# Of a training: libraries that are not there, and the sizes of the model.
PLAIN = ("failed", "recipe")
HEAD = ("script", "device", "machine", "python", "versions", "date")


class SchemaError(ValueError):
    """A file that does not fit; the message names it and what to change."""


@dataclass(frozen=True)
class Row:
    """One figure: of times `best` is the best burst's, `None` where `note` says what failed."""

    part: str
    call: str
    implementation: str
    quantity: str
    unit: str
    best: float | None
    median: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Results:
    """One file."""

    name: str
    script: str
    device: str
    versions: dict[str, str]
    date: str
    about: dict[str, str]
    rows: tuple[Row, ...]
    logs: dict[str, str]


def files():
    """Every committed file of results."""
    return sorted(RESULTS.rglob("*.json"))


def read(path):
    """A file in the schema."""
    name = path.relative_to(RESULTS).as_posix() if path.is_relative_to(RESULTS) else path.name
    try:
        return validated(normalised(name, json.loads(path.read_text())))
    except SchemaError as error:
        raise SchemaError(f"{name}: {error}") from None


def normalised(name, content):
    """The content of a file in the schema."""
    rows, logs = [], {}
    for part, value in content.items():
        if part in HEAD or part in ABOUT:
            continue
        if part in PLAIN:
            continue
        if isinstance(value, dict) and "how" in value:
            logs[part] = value["how"]
        elif part == "runs":  # one object an implementation
            for own, record in value.items():
                rows += record_rows(part, {"implementation": own, **record})
        elif isinstance(value, list):
            for record in value:
                rows += record_rows(part, record)
        else:
            rows += nested_rows(part, value)
    about = {key: words_of(content[key]) for key in ABOUT if key in content}
    return Results(
        name,
        content.get("script", ""),
        device_of(content),
        versions_of(content),
        content.get("date", ""),
        about,
        tuple(rows),
        logs,
    )


def validated(results):
    """The results, if they are complete."""
    try:
        datetime.date.fromisoformat(results.date)
    except ValueError:
        raise SchemaError(f"date is {results.date!r}; expected a day such as 2026-11-18.") from None
    if not results.device:
        raise SchemaError("there is neither device nor machine.")
    if not results.rows and not results.logs:
        raise SchemaError("there are no parts.")
    seen = set()
    for row in results.rows:
        key = (row.part, row.call, row.implementation, row.quantity, row.unit)
        if key in seen:
            raise SchemaError(f"two figures for {key}: their columns do not tell the calls apart.")
        seen.add(key)
        for figure in (row.best, row.median):
            if figure is not None and not math.isfinite(figure):
                raise SchemaError(f"{key} is {figure}.")
        if row.best is None and not row.note:
            raise SchemaError(f"{key} has neither a figure nor a note that says why.")
    return results


# What was measured


def words_of(value):
    """A description of the run, as text."""
    return ", ".join(f"{key} {x}" for key, x in value.items()) if isinstance(value, dict) else str(value)


def device_of(content):
    """The device, or the processor and its cores."""
    machine = content.get("machine")
    return content.get("device", "") or (f"{machine['processor']}, {machine['cores']} cores" if machine else "")


def versions_of(content):
    """Versions by package. Peers ran in processes of their own: what not all of them had is named with whose it was."""
    found, python = content.get("versions", {}), content.get("python")
    if not any(isinstance(value, dict) for value in found.values()):
        known = {"python": python, **found}
        return {package: version for package, version in known.items() if version is not None}
    owners = {}
    for group, versions in found.items():
        for package, version in versions.items():
            owners.setdefault((package, version), []).append(group)
    return {
        package if len(groups) == len(found) else f"{package} (processes of {', '.join(groups)})": version
        for (package, version), groups in owners.items()
    }


def call_of(record):
    """What was called, in words."""
    words = []
    for column, form in CALL.items():
        if form and column in record:
            words.append(form[record[column]] if isinstance(form, dict) else form.format(record[column]))
    return ", ".join(words)


# Figures


def figure_of(column):
    """``(what, unit, whether it is the median)`` of a column with a unit, else None."""
    match = FIGURE.fullmatch(column)
    if not match:
        return None
    return match["what"] or "", UNITS[match["unit"]], bool(match["median"] or match["after"])


def record_rows(part, record):
    """The figures of one record."""
    if "implementations" in record:  # one object an implementation, in place of one record each
        shared = {key: value for key, value in record.items() if key not in ("implementations", *REMARKS)}
        return [
            row
            for name, own in record["implementations"].items()
            for row in record_rows(part, {**shared, "implementation": name, **own})
        ]
    record = dict(record)
    part = record.pop("part", part)
    named = next((record.pop(key) for key in ("implementation", "platform", "kernel") if key in record), None)
    direction = record.pop("direction", "")
    note = "; ".join(str(record.pop(key)) for key in ("note", "failed", "backward_failed") if key in record)
    call, found = call_of(record), {}
    ours = OURS if any(column.startswith(f"{OURS}_") for column in record) else ""
    for column, value in record.items():
        if column in CALL or column in REMARKS:
            continue
        for whose, quantity, unit, median, figure in figures(column, value, named, ours):
            best, middle = found.get((whose, quantity, unit), (None, None))
            found[whose, quantity, unit] = (best, figure) if median else (figure, middle)
    rows = []
    for (whose, quantity, unit), (best, median) in found.items():
        said = note if best is not None else note or "not measured"
        rows.append(Row(part, call, whose, of_direction(quantity, unit, direction), unit, best, median, said))
    return rows or [Row(part, call, named or ours, direction or "time", "ms", None, None, note)]


def figures(column, value, named, ours):
    """``(whose, quantity, unit, whether it is the median, figure)`` of one column."""
    whose = ours if named is None else named
    if column in OTHERS:
        yield whose, *OTHERS[column], False, value
    elif ERROR.fullmatch(column):
        of = column.removeprefix("error_") if column.startswith("error_") else ""
        for which, figure in value.items() if isinstance(value, dict) else [(of, value)]:
            yield whose, f"error of {which}" if which else "error", RELATIVE, False, figure
    elif known := figure_of(column):
        what, unit, median = known
        if named is None and what and what not in QUANTITIES:
            whose, what = what, ""
        yield whose, quantity_of(what, unit), unit, median, value
    elif RATIO.fullmatch(column):
        yield whose, column.replace("_", " "), "×", False, value
    else:
        raise SchemaError(f"the column {column!r} is neither part of a call nor a figure with a unit; see schema.py.")


def quantity_of(what, unit):
    """What was measured, in words."""
    return WORDS.get(what, what.replace("_", " ")) or DEFAULT.get(unit, unit)


def of_direction(quantity, unit, direction):
    """A quantity of one direction; the time of a direction is that direction's alone."""
    if not direction or unit == RELATIVE:
        return quantity
    return direction if quantity == DEFAULT.get(unit) else f"{quantity}, {direction}"


# What a figure without a name is, by its unit.
DEFAULT = {
    "ms": "time", "µs": "time", "s": "time", "MiB": "memory", "GB": "memory", "TB/s": "keys and values read",
    "GB/s": "keys and values read", "TFLOP/s": "rate", "tokens/s": "rate", "×": "ratio",
}  # fmt: skip


def nested_rows(part, value, path=()):
    """The figures of an object of objects: one key on the way names the unit, the others the call."""
    path = (*path, part)
    if isinstance(value, dict):
        return [row for key, below in value.items() for row in nested_rows(key, below, path)]
    if isinstance(value, list):  # a point under a roofline: operations a byte, and a rate
        intensity, rate = value
        call = path[-1].replace("_", " ")
        return [
            Row(path[0], call, "", "intensity", "FLOP/B", intensity),
            Row(path[0], call, "", "rate", "TFLOP/s", rate),
        ]
    if isinstance(value, str):  # of which device
        return []
    at = next((i for i in reversed(range(len(path))) if figure_of(path[i])), None)
    if at is None:
        raise SchemaError(f"{'.'.join(path)} names no unit; see schema.py.")
    what, unit, _ = figure_of(path[at])
    call = ", ".join(key.replace("_", " ") for key in (*path[1:at], *path[max(1, at + 1) :]))
    return [Row(path[0], call, "", quantity_of(what, unit), unit, value)]
