"""Predicted cycles of the TPU kernels beside their peers, from the schedules that libtpu writes. No TPU is needed.

    python benchmarks/tpu_cycles.py --out FILE [--peers DIR] [--only REGEX] [--topologies v5e:2x2 …]

Every cell of `tpu_cells.py` is compiled for every generation, ours and the peers' with one libtpu, in a process for each
generation. A kernel's cycles are those of its branches, times how often each runs, and those of the grid's steps: of one query
head for flash attention, of 1024 keys of all heads for paged attention, of a whole product for grouped_matmul. Waits for memory are
in no schedule: of paged attention and grouped products the cycles that copies take at the chip's bandwidth stand beside, and
predicted times are those of the longer. Clocks are inferred from the chips' peaks. Times are of a whole call on one device; two
cores that are one device share it. Seconds of compiling are those of all processors. Nothing here was measured on a TPU.

--peers: a folder with tokamax and what it imports. FILE is written after every row; the other rows in it stay.
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
TWO_CORES = ("tpu-v4", "tpu-v5p")  # that are one device


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
        named = f"{cell.part} {cell.call} {cell.implementation} {cell.direction}"
        if not re.search(pattern, named) or generation.name not in (cell.only or (generation.name,)):
            continue
        row = {
            "part": cell.part,
            "call": f"{generation.name.removeprefix('tpu-')}, {cell.call}",
            "implementation": cell.implementation,
            "direction": cell.direction,
        }
        begin = time.process_time()
        try:
            run, arguments = cell.build(generation)
            arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
            with target(device), jax.default_device(device):
                lowered = jax.jit(run).lower(*arguments)
            compiled, schedules = tpu_schedule.with_schedules(folder, lowered.compile)
            found = cell.count(schedules, generation)
        except Exception as error:
            row["note"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        else:
            row["kilocycles"] = round(found.cycles / 1000, 3)
            cycles = found.cycles
            if found.copied is not None:
                copies = found.copied / generation.hbm * generation.clock
                row["copies_kilocycles"] = round(copies / 1000, 3)
                cycles = max(cycles, copies)
            if found.units is not None:
                seconds = cycles * found.units / generation.clock / (2 if generation.name in TWO_CORES else 1)
                row["predicted_ms"] = round(seconds * 1e3, 4)
            if found.busy:
                row["mxu_percent"] = round(100 * found.busy, 1)
            row |= found.more
            if found.units is not None:
                row["temporary_mib"] = round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1)
            row["compile_s"] = round(time.process_time() - begin, 1)
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
        # Behind this tree: the folder may hold another version of this library, as what a peer needs.
        paths = [Path(__file__).parents[1], os.environ.get("PYTHONPATH"), options.peers]
        environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if path)
        command = [sys.executable, __file__, "--child", topology, "--folder", folder, "--only", options.only]
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for line in child.stdout:
            if line.startswith("ROW "):
                yield json.loads(line[4:])
        if child.wait():
            print(f"{topology}: the process ended with {child.returncode}", file=sys.stderr)


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
            print({name: value for name, value in row.items() if name != "part"}, flush=True)
            known = parts.setdefault(row.pop("part"), [])
            key = {name: row[name] for name in ("call", "implementation", "direction")}
            known[:] = [other for other in known if not key.items() <= other.items()] + [row]
            options.out.write_text(json.dumps({**head, **parts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
