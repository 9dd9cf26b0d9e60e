"""Write the parts of the docs that come from the code: tables of features and devices, read from each kernel's Support.

`features.md` is written whole; a page in `operations/` gets its table after a line `<!-- features: NAME -->`, and the README
its table of devices between `<!-- devices -->` and `<!-- /devices -->`. `models.md` gets what was measured, between
`<!-- models -->` and `<!-- /models -->`, from the files of `benchmarks/models_gpu.py`; `tpu.md` in the same
way what `benchmarks/tpu_cycles.py` predicted. `benchmarks.md` is written whole, from all files of results;
`ejkernel/__init__.pyi` comes from the signatures, see `stub.py`.

python docs/generate.py            write
python docs/generate.py --check    fail if a file is not current
"""

import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "benchmarks")]  # this tree, whatever is installed

import models_tables
import results_page
import stub
import tpu_tables

from ejkernel import Platform, kernel_registry
from ejkernel.callib import CHIPS
from ejkernel.contracts.device import describe

README = HERE.parent / "README.md"
STUB = HERE.parent / "ejkernel" / "__init__.pyi"
# By marker of models.md: fewer calls beside more peers, and more calls beside cuDNN.
MODELS = {
    name: HERE.parent / "benchmarks" / "results" / f"{name.replace('-', '_')}_h200.json"
    for name in ("models", "models-cudnn")
}

NAMES = {
    Platform.XLA: "XLA",
    Platform.TRITON: "Triton",
    Platform.PALLAS: "Pallas",
    Platform.CUDNN: "cuDNN",
    Platform.CUDA: "CUDA",
}
FAMILIES = {
    "CPU": ["cpu"],
    "NVIDIA Ampere, Ada, Blackwell": [
        chip.slug for chip in CHIPS.values() if chip.vendor == "nvidia" and chip.capability in (80, 86, 89, 100)
    ],
    "NVIDIA Hopper": [chip.slug for chip in CHIPS.values() if chip.vendor == "nvidia" and chip.capability == 90],
    "AMD": [chip.slug for chip in CHIPS.values() if chip.vendor == "amd"],
    "TPU": [chip.slug for chip in CHIPS.values() if chip.kind == "tpu"],
}


def row(label: str, cells: list[str]) -> str:
    """A line of a table."""
    return f"| {label} | " + " | ".join(cells) + " |"


def algorithms() -> list[str]:
    """The operations of the library."""
    return [name for name in kernel_registry.list_algorithms() if kernel_registry.operation(name)]


def platforms(algorithm: str, chips: list[str]) -> str:
    """What implements an operation on a family of chips, the preferred one first."""
    entries = sorted(kernel_registry.list_implementations(algorithm), key=lambda entry: -entry.priority)
    if kernel_registry.operation(algorithm).runs_on:  # merges partial results by their log-sum-exp
        entries = [entry for entry in entries if "lse" in entry.support.features]
    runs = {
        tuple(NAMES[e.platform] for e in entries if e.support.devices.refusal(describe(chip)) is None) for chip in chips
    }
    if len(runs) != 1:
        raise ValueError(f"{algorithm} has different implementations on {chips}: split their column of FAMILIES.")
    return ", ".join(*runs)


def device_table() -> str:
    """One column a family of devices; operations that have the same implementations everywhere share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in algorithms():
        below = kernel_registry.operation(name).runs_on
        label = f"`{name}` (on the kernels of `{below}`)" if below else f"`{name}`"
        rows.setdefault(tuple(platforms(name, chips) for chips in FAMILIES.values()), []).append(label)
    lines = [row("", list(FAMILIES)), row("---", ["---"] * len(FAMILIES))]
    lines += [
        row(", ".join(labels), list(cells)) for cells, labels in sorted(rows.items(), key=lambda item: len(item[1]))
    ]
    return "\n".join(lines)


def feature_table(algorithm: str) -> str:
    """One column an implementation, one row a feature; for an operation without kernels, those that it runs on."""
    operation = kernel_registry.operation(algorithm)
    gradients = ("query", "key", "value") if operation.runs_on else operation.gradients
    entries = kernel_registry.list_implementations(algorithm)
    lines = [
        row("", [f"{e.platform.value}, {e.backend.value}" for e in entries]),
        row("---", ["---"] * len(entries)),
        row("devices", [str(e.support.devices) for e in entries]),
        row("dtypes", [", ".join(sorted(e.support.dtypes)) for e in entries]),
        row("head dims", [str(e.support.head_dims) for e in entries]),
    ]
    for feature, words in operation.features.items():
        lines.append(row(f"`{feature}`: {words}", ["yes" if feature in e.support.features else "no" for e in entries]))
    for argument in gradients:
        lines.append(
            row(f"gradient of `{argument}`", ["yes" if argument in e.support.gradients else "no" for e in entries])
        )
    lines.append(row("bit-identical reruns", ["yes" if e.support.deterministic else "no" for e in entries]))
    return "\n".join(lines)


def features() -> str:
    """The whole page."""
    head = (
        "# What each kernel can do\n\n"
        "Generated by `make docs` from the kernels' `Support` declarations, which selection reads too.\n"
        "A kernel refuses what it does not list; nothing is ignored.\n"
    )
    tables = [
        f"## {name}\n\n{feature_table(name)}" for name in algorithms() if not kernel_registry.operation(name).runs_on
    ]
    return "\n\n".join([head.rstrip(), *tables]) + "\n"


def operation_page(text: str) -> str:
    """A page of an operation with its table filled in, up to the next blank line."""

    def fill(match: re.Match) -> str:
        return f"{match[0].splitlines()[0]}\n{feature_table(match[1])}\n"

    return re.sub(r"^<!-- features: (\w+) -->\n(?:\|.*\n)*", fill, text, flags=re.MULTILINE)


def readme(text: str) -> str:
    """The README with its table of devices filled in."""
    return between("devices", f"{device_table()}\n", text)


def between(name: str, part: str, text: str) -> str:
    """A page with what stands between the markers of a name replaced."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}{part}{end}", text, flags=re.DOTALL)


def models(text: str) -> str:
    """The page of models' calls with what was measured."""
    for name, path in MODELS.items():
        image = f"\n![speed over the best peer's](../{path.with_suffix('.png').relative_to(HERE.parent)})\n"
        text = between(name, f"{models_tables.markdown(json.loads(path.read_text()))}\n{image}", text)
    return text


def tpu(text: str) -> str:
    """The page of TPU kernels with their predicted cycles."""
    return between("tpu", tpu_tables.markdown(json.loads(tpu_tables.RESULTS.read_text())), text)


def pages() -> dict[Path, str]:
    """Every page that has a part written here, as it should be."""
    operations = sorted((HERE / "operations").glob("*.md"))
    return {
        README: readme(README.read_text()),
        STUB: stub.text(),
        HERE / "features.md": features(),
        HERE / "benchmarks.md": results_page.markdown(),
        HERE / "models.md": models((HERE / "models.md").read_text()),
        HERE / "tpu.md": tpu((HERE / "tpu.md").read_text()),
        **{path: operation_page(path.read_text()) for path in operations},
    }


def main() -> int:
    """Write, or check."""
    stale = []
    for path, text in pages().items():
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(HERE.parent)))
    if stale:
        print(f"{', '.join(stale)} not current: run `make docs`", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
