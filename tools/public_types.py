"""Whether the public names are fully typed: strict pyright over the stub and over uses, then the completeness of each name.

    python tools/public_types.py

pyright comes as basedpyright, which brings its own node and downloads nothing when it runs; the settings are pyright's, in
pyproject.toml. Exit code: 0, all is well; 1, not.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import ejkernel

PYRIGHT = [sys.executable, "-m", "basedpyright"]
# What else lies in these is not public.
INSIDE = ("ejkernel.kernels.", "ejkernel.lab.", "ejkernel.ops.")
PUBLIC = ("ejkernel.ops.utils.", "ejkernel.ops.core.select.", *(f"{m}.{n}" for n, m in ejkernel._HOMES.items()))


def main() -> int:
    """Print what is wrong."""
    python = ["--pythonpath", sys.executable]
    strict = subprocess.run([*PYRIGHT, *python], cwd=ROOT).returncode
    # It looks for the package as Python does; an editable install can be of another tree.
    place = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    names = subprocess.run(
        [*PYRIGHT, "--verifytypes", "ejkernel", "--ignoreexternal", "--outputjson"],
        cwd=ROOT,
        env=place,
        capture_output=True,
        text=True,
    )
    symbols = json.loads(names.stdout)["typeCompleteness"]["symbols"]
    public = [s for s in symbols if s["name"].startswith("ejkernel.") and is_public(s["name"])]
    unknown = [s for s in public if not s["isTypeKnown"]]
    for symbol in unknown:
        print(f"{symbol['name']}: {'; '.join(d['message'] for d in symbol['diagnostics']) or 'is made of such'}")
    missing = {f"ejkernel.{name}" for name in ejkernel.__all__} - {s["name"] for s in public}
    if missing:
        print(f"Not found: {', '.join(sorted(missing))}")
    print(f"{len(public)} public symbols, {len(unknown)} of unknown type")
    return int(bool(strict or unknown or missing))


def is_public(name: str) -> bool:
    """Whether a symbol belongs to what users see."""
    return not name.startswith(INSIDE) or name.startswith(PUBLIC)


if __name__ == "__main__":
    sys.exit(main())
