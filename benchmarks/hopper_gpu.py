"""The Pallas kernels of flash_attention on a Hopper GPU and their peers: TFLOP/s, features, errors, a Llama-like layer.

    python benchmarks/hopper_gpu.py --out FILE [--peers DIR] [--fa4 DIR] [--parts cells,window,features,llama,errors]

All implementations of a cell are timed together: bursts in random order, each after a pause, the best of each counts
(`ejkernel.utils.bursts` says why). The backward is measured by itself, from the residuals of a forward. Cells, features
and errors are those of attention_gpu.py.
"""

import argparse
import functools
import itertools
import json
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attention_child as child
import attention_gpu as cells

PARTS = ("cells", "window", "features", "llama", "errors")
OURS, CUDNN, TOKAMAX, FA4 = "ejkernel pallas", "jax.nn cudnn", "tokamax mosaic_gpu", "FlashAttention-4"
LLAMA = cells.case(1, 8192, 32, 128, kv_heads=8)
DIRECTIONS = ("forward", "backward")
# Forward, backward, both in terms of the forward's operations.
WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}


def jobs_of(part, names, options):
    if part == "llama":
        for name in ("ejkernel", *names):
            yield cells.job(part, name, {}, LLAMA, directions=["both"])
    elif part == "features":
        yield from cells.feature_jobs(OURS, options)
    elif part == "errors":
        jobs = [*cells.error_jobs(OURS, options, options.only_dims), *cells.error_jobs(CUDNN, options)]
        # What both can do comes first: features take minutes to compile.
        yield from sorted(jobs, key=lambda job: job["key"]["feature"] not in ("full", "causal"))
    else:
        for name in names:
            yield from {"cells": cells.cell_jobs, "window": cells.window_jobs}[part](name, options)


class Jax:
    """A job's programs."""

    def __init__(self, job):
        import jax

        work = child.JaxJob(job)
        self.work = work

        def forward(floats, rest):
            given = {**floats, **rest, **work.options}
            attend = child.attention_of(job["implementation"])
            return attend(given.pop("query"), given.pop("key"), given.pop("value"), **given)

        def residuals(floats, rest):
            return jax.vjp(lambda floats: forward(floats, rest), floats)

        abstract = work.abstract("forward")
        dout = abstract[0]["query"]
        self.lowered = {}
        if "forward" in directions(job):
            self.lowered["forward"] = jax.jit(forward).lower(*abstract)
        if "backward" in directions(job):
            self.lowered["residuals"] = jax.jit(residuals).lower(*abstract)
            back = jax.jit(lambda vjp, dout: vjp(dout)[0])
            self.lowered["backward"] = back.lower(jax.eval_shape(residuals, *abstract)[1], dout)
        if "both" in directions(job):
            both = jax.jit(lambda floats, rest, dout: residuals(floats, rest)[1](dout)[0])
            self.lowered["both"] = both.lower(*abstract, dout)

    def compile(self):
        self.programs = {name: program.compile() for name, program in self.lowered.items()}
        return self

    def start(self):
        """Calls by direction, on random data."""
        floats, rest, dout = self.work.arrays()
        calls = {}
        for name, program in self.programs.items():
            if name == "residuals":
                vjp = program(floats, rest)[1]
            elif name == "backward":
                calls[name] = functools.partial(program, vjp, dout)
            else:
                calls[name] = functools.partial(program, floats, rest, *([dout] if name == "both" else []))
        return calls


class Torch:
    """FlashAttention-4's."""

    def __init__(self, job):
        self.work = child.TorchJob(job)
        self.job = job

    def compile(self):
        return self

    def start(self):
        import torch

        inputs, dout = self.work.arrays()
        attend = child.torch_attention(FA4, self.job["case"])

        def forward():
            with torch.no_grad():
                return attend(*inputs)

        calls = {"forward": forward}
        if "backward" in directions(self.job):
            out = attend(*inputs)
            calls["backward"] = lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
        return calls


def directions(job):
    return job.get("directions") or (DIRECTIONS[:1] if job.get("forward_only") else DIRECTIONS)


def measured(works):
    """A row for each of ``works``, pairs of a job and its programs, that share a cell."""
    from ejkernel.utils.bursts import time_bursts

    calls, rows = {}, []
    for number, (job, work) in enumerate(works):
        rows.append({"implementation": job["implementation"], **job["key"]})
        try:
            if isinstance(work, Exception):
                raise work
            calls |= {(number, name): call for name, call in work.start().items()}
        except Exception as error:
            rows[-1]["failed"] = child.words_of(error)
    for (number, name), times in time_bursts(calls).items():
        job, work = works[number]
        row = rows[number]
        if times.error is not None:
            row["failed"] = child.words_of(times.error)
            continue
        row[f"{name}_ms"] = round(times.best * 1e3, 4)
        row[f"{name}_ms_median"] = round(times.median * 1e3, 4)
        row[f"{name}_tflops"] = round(WORK[name] * child.flops(job["case"]) / times.best / 1e12, 1)
        if name != "forward" and isinstance(work, Jax):
            call = calls[number, name]
            row["repeats"] = bool(child._same_bits(call(), call()))
    return rows


def checked(works):
    """A row for each of ``works``, as they come: errors against float64."""
    for job, work in works:
        row = {"implementation": job["implementation"], **job["key"]}
        try:
            row |= work.answer()
        except Exception as error:
            row["failed"] = child.words_of(error)
        yield row


def ready(job):
    """The job's programs, or what went wrong."""
    try:
        if job["part"] == "errors":
            return child.JaxJob(job).build()
        return (Torch if job["implementation"] == FA4 else Jax)(job).compile()
    except Exception as error:
        return error


def in_cells(works):
    """The rows of ``works``: those of a cell are timed together, of another part all."""

    def cell_of(work):
        job, _ = work
        return json.dumps(job["key"]) if job["part"] == "cells" else ""

    for _, cell in itertools.groupby(sorted(works, key=cell_of), cell_of):
        yield from measured(list(cell))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", type=Path, help="a folder with tokamax")
    parser.add_argument("--fa4", type=Path, help="a folder with FlashAttention-4")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths, to try this")
    parser.add_argument("--threads", type=int, default=14, help="that compile")
    arguments = parser.parse_args()
    parts = [part for part in PARTS if part in arguments.parts.split(",")]
    options = types.SimpleNamespace(only_dims=[int(x) for x in arguments.dims.split(",")], shrink=arguments.shrink)
    child.add_peers(arguments.peers, arguments.fa4)
    names = [OURS, CUDNN] + [TOKAMAX] * bool(arguments.peers) + [FA4] * bool(arguments.fa4)

    import jax
    from shared import origin

    begin, result = time.time(), {}
    if arguments.out.exists():
        result = json.loads(arguments.out.read_text())
    versions = {name: version for name, version in child.versions().items() if name != "ejkernel"}
    result |= {**origin(), "device": jax.devices()[0].device_kind, "versions": {"ejkernel": versions}}
    for part in parts:
        jobs = [job for job in jobs_of(part, names, options) if part != "llama" or job["implementation"] != FA4]
        result[part] = []
        with ThreadPoolExecutor(arguments.threads) as pool:
            works = zip(jobs, pool.map(ready, jobs), strict=True)
            for row in checked(works) if part == "errors" else in_cells(list(works)):
                result[part].append(row)
                print(*(f"{name}={x}" for name, x in row.items() if not name.endswith("median")), flush=True)
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{part}: {len(jobs)} programs, {time.time() - begin:.0f} s", flush=True)
    print(f"{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
