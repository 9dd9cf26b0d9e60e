"""Write the parts of the docs that come from the code: the feature tables, read from each kernel's Support.

`features.md` is written whole; a page in `operations/` gets its table after a line `<!-- features: NAME -->`.

python docs/generate.py            write
python docs/generate.py --check    fail if a file is not current
"""

import re
import sys
from pathlib import Path

from ejkernel import kernel_registry

HERE = Path(__file__).parent


def feature_table(algorithm: str) -> str:
    """One column an implementation, one row a feature; for an operation without kernels, those that it runs on."""
    operation = kernel_registry.operation(algorithm)
    gradients = ("query", "key", "value") if operation.runs_on else operation.gradients
    entries = kernel_registry.list_implementations(algorithm)

    def row(label: str, cells: list[str]) -> str:
        return f"| {label} | " + " | ".join(cells) + " |"

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
    algorithms = [name for name in kernel_registry.list_algorithms() if kernel_registry.operation(name)]
    head = (
        "# What each kernel can do\n\n"
        "Written by `make docs` from the kernels' own `Support` values, the same that selection reads."
        " What is not listed as a yes is refused, never ignored.\n"
    )
    tables = [
        f"## {name}\n\n{feature_table(name)}" for name in algorithms if not kernel_registry.operation(name).runs_on
    ]
    return "\n\n".join([head.rstrip(), *tables]) + "\n"


def operation_page(text: str) -> str:
    """A page of an operation with its table filled in, up to the next blank line."""

    def fill(match: re.Match) -> str:
        return f"{match[0].splitlines()[0]}\n{feature_table(match[1])}\n"

    return re.sub(r"^<!-- features: (\w+) -->\n(?:\|.*\n)*", fill, text, flags=re.MULTILINE)


def pages() -> dict[Path, str]:
    """Every page that has a part written here, as it should be."""
    operations = sorted((HERE / "operations").glob("*.md"))
    return {HERE / "features.md": features(), **{path: operation_page(path.read_text()) for path in operations}}


def main() -> int:
    """Write, or check."""
    stale = []
    for path, text in pages().items():
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(HERE)))
    if stale:
        print(f"docs/{', docs/'.join(stale)} not current: run `make docs`", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
