"""Write the parts of the docs that come from the code: the feature tables, read from each kernel's Support.

python docs/generate.py            write
python docs/generate.py --check    fail if a file is not current
"""

import sys
from pathlib import Path

from ejkernel import kernel_registry

HERE = Path(__file__).parent


def feature_table(algorithm: str) -> str:
    """One column an implementation, one row a feature."""
    operation = kernel_registry.operation(algorithm)
    entries = kernel_registry.list_implementations(algorithm)

    def row(label: str, cells: list[str]) -> str:
        return f"| {label} | " + " | ".join(cells) + " |"

    lines = [
        f"## {algorithm}",
        "",
        row("", [f"{e.platform.value}, {e.backend.value}" for e in entries]),
        row("---", ["---"] * len(entries)),
        row("devices", [str(e.support.devices) for e in entries]),
        row("dtypes", [", ".join(sorted(e.support.dtypes)) for e in entries]),
        row("head dims", [str(e.support.head_dims) for e in entries]),
    ]
    for feature, words in operation.features.items():
        lines.append(row(f"`{feature}`: {words}", ["yes" if feature in e.support.features else "no" for e in entries]))
    for argument in operation.gradients:
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
    return "\n\n".join([head.rstrip(), *map(feature_table, algorithms)]) + "\n"


PAGES = {"features.md": features}


def main() -> int:
    """Write, or check."""
    stale = []
    for name, make in PAGES.items():
        path, text = HERE / name, make()
        if "--check" in sys.argv[1:]:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            path.write_text(text)
    if stale:
        print(f"docs/{', docs/'.join(stale)} not current: run `make docs`", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
