"""Predicted cycles of the TPU kernels beside their peers, from the schedules that libtpu writes. No TPU is needed.

    python benchmarks/tpu_cycles.py --out FILE [--peers DIR] [--only REGEX] [--topologies v5e:2x2 …]

Every cell of `tpu_cells.py` is compiled for every generation, ours and the peers' with one libtpu, in a process for each
generation. A kernel's cycles are those of its branches, times how often each runs, and those of the grid's steps. Waits for
memory are in no schedule, so a kernel that copies more than it computes is predicted too low; the bytes it copies at least,
over the bandwidth, stand beside. Clocks are inferred from the chips' peaks. Nothing here was measured on a TPU.

--peers: a folder with tokamax and what it imports. FILE is written after every generation; with --only the other rows stay.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tpu_schedule

TOPOLOGIES = {
    "v4:2x2x1": "tpu-v4",
    "v5e:2x2": "tpu-v5e",
    "v5p:2x2x1": "tpu-v5p",
    "v6e:2x2": "tpu-v6e",
    "tpu7x:2x2x1": "tpu-v7",
}


def rows_of(topology, folder, pattern):
    """Compiles the cells for a generation; prints a row of JSON each."""
    import jax
    from jax.experimental import topologies
    from tpu_cells import CELLS

    from ejkernel import target
    from ejkernel.kernels._pallas.tpu.generations import GENERATIONS

    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    generation = GENERATIONS[TOPOLOGIES[topology]]
    sharding = jax.sharding.SingleDeviceSharding(device)
    for cell in CELLS:
        if not re.search(pattern, f"{cell.part} {cell.call} {cell.implementation} {cell.direction}"):
            continue
        row = {
            "part": cell.part,
            "call": f"{generation.name.removeprefix('tpu-')}, {cell.call}",
            "implementation": cell.implementation,
            "direction": cell.direction,
        }
        begin = time.monotonic()
        try:
            run, arguments = cell.build(generation)
            arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
            with target(device), jax.default_device(device):
                lowered = jax.jit(run).lower(*arguments)
            compiled, schedules = tpu_schedule.with_schedules(folder, lowered.compile)
            cycles, busy = cell.count(schedules, generation)
        except Exception as error:
            row["note"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        else:
            row |= {
                "kilocycles": round(cycles / 1000, 3),
                "predicted_ms": round(cycles / generation.clock * 1e3, 5),
                "mxu_percent": round(100 * busy, 1),
                "temporary_mib": round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
                "compile_s": round(time.monotonic() - begin, 1),
            }
        print("ROW " + json.dumps(row), flush=True)


def versions(peers):
    """Of what compiled, and of the peers."""
    from importlib import metadata

    sys.path[:0] = [str(peers)] if peers else []
    found = {}
    for name in ("jax", "jaxlib", "libtpu", "tokamax"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found


def compile_on(topology, options):
    """Rows of a generation, compiled in a process of its own, for libtpu is told once where schedules go."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **tpu_schedule.environment(folder)}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(options.peers or ""), os.environ.get("PYTHONPATH")])
        )
        command = [sys.executable, __file__, "--child", topology, "--folder", folder, "--only", options.only]
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        rows = []
        for line in child.stdout:
            if line.startswith("ROW "):
                rows.append(json.loads(line[4:]))
                print({name: value for name, value in rows[-1].items() if name != "part"}, flush=True)
        if child.wait():
            print(f"{topology}: the process ended with {child.returncode}", file=sys.stderr)
        return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--only", default="", metavar="REGEX", help="of part, call, implementation and direction")
    parser.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        rows_of(options.child, options.folder, options.only)
        return
    if options.out is None:
        parser.error("--out is missing")
    from shared import origin

    parts = {}
    if options.out.exists():
        parts = {part: rows for part, rows in json.loads(options.out.read_text()).items() if isinstance(rows, list)}
    head = {**origin(), "device": "TPUs, predicted from libtpu's schedules", "versions": versions(options.peers)}
    for topology in options.topologies:
        for row in compile_on(topology, options):
            known = parts.setdefault(row.pop("part"), [])
            key = {name: row[name] for name in ("call", "implementation", "direction")}
            known[:] = [other for other in known if not key.items() <= other.items()] + [row]
        options.out.write_text(json.dumps({**head, **parts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
