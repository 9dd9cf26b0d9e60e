"""flash_attention on a GPU beside its peers: TFLOP/s, the cost of features, errors against float64, compile times.

    python benchmarks/attention_gpu.py --out FILE [--peers DIR] [--fa4 DIR] [--parts cells,errors] [--only-dims 128]

bfloat16, 16,384 tokens, heads × head dim = 2048, as FlashAttention's papers have it. Forward operations are 4·B·H·D·S²,
half of that with a causal mask; the backward's are 2.5 times as many. Forward and backward of a job are timed by bursts
in random order, each after a pause, and the best of each counts. Backward times are those of forward and backward
together less the forward's; torch's are measured. Implementations run one after another, many in processes of their
own: to compare two that differ by less than a tenth, time them together, as hopper_gpu.py does.

Peers run in processes of their own with DIR as PYTHONPATH, for upstream has this package's name. Parts that are
measured again replace their rows in FILE, the others stay.
"""

import argparse
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from attention_tables import show

TOKENS, WIDTH = 16384, 2048
PARTS = ("cells", "window", "features", "errors", "peers", "compile")
CHILD = Path(__file__).with_name("attention_child.py")
RESTARTS = 6
FASTEST = "ejkernel nondeterministic"
LOST = 3  # a child's exit status when the device answers no more
CACHES = ("EJKERNEL_CACHE_DIR", "TRITON_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR")

FEATURES = {
    "plain": {},
    "sinks": {"sinks": True},
    "segments, one": {"segments": 1},
    "segments, 8 packed": {"segments": 8},
    "soft cap 50": {"options": {"logits_soft_cap": 50.0}},
    "dropout 0.1": {"options": {"dropout_prob": 0.1, "dropout_seed": 7}},
    "bias, fixed": {"bias": "fixed"},
    "bias, with gradient": {"bias": "trained"},
    "window 1024": {"options": {"sliding_window": [1023, 0]}},
    "GQA 16/4": {"kv_heads": 4},
    "varlen, same work": {"varlen": 2},
    "varlen, 1k packed": {"varlen": 16},
}


# What to measure


def case(batch, length, heads, dim, causal=True, **more):
    options = {"causal": causal, **more.pop("options", {})}
    return {"batch": batch, "length": length, "heads": heads, "head_dim": dim, "options": options, **more}


def job(part, implementation, key, case, **more):
    return {"part": part, "implementation": implementation, "key": key, "case": case, **more}


def cell_jobs(implementation, options, only=None):
    for dim in options.only_dims:
        for length in (4096, 16384):
            for causal in (False, True):
                if only and (dim, length, causal) not in only:
                    continue
                key = {"head_dim": dim, "length": length, "causal": causal}
                made = case(TOKENS // length, length // options.shrink, WIDTH // dim, dim, causal)
                yield job("cells", implementation, key, made)


def window_jobs(implementation, options):
    if 128 in options.only_dims:
        made = case(
            1, 16384 // options.shrink, 16, 128, options={"sliding_window": [max(1, 1024 // options.shrink) - 1, 0]}
        )
        yield job("window", implementation, {}, made, forward_only=True)


def feature_jobs(implementation, options):
    for name, feature in FEATURES.items() if 128 in options.only_dims else ():
        batch, length = (1, 16384) if "varlen" in feature else (2, 8192)
        key = {"feature": name}
        yield job("features", implementation, key, case(batch, length // options.shrink, 16, 128, **feature))


def error_jobs(implementation, options, features_at=()):
    """A small problem for each head dim, full and causal; with each feature at some."""
    length = max(64, 1024 // options.shrink)
    small = {**FEATURES, "window": {"options": {"sliding_window": [length // 8 - 1, 0]}}, "GQA 4/2": {"kv_heads": 2}}
    for name in ("plain", "window 1024", "GQA 16/4"):
        del small[name]
    for dim in options.only_dims:
        cases = {"full": case(1, length, 4, dim, causal=False), "causal": case(1, length, 4, dim)}
        if dim in features_at:
            cases |= {name: case(1, length, 4, dim, **feature) for name, feature in small.items()}
        for name, made in cases.items():
            yield job("errors", implementation, {"head_dim": dim, "feature": name}, made)


def compile_jobs(implementation, options):
    for dim in options.only_dims:
        made = case(4, 4096 // options.shrink, WIDTH // dim, dim)
        yield job("compile", implementation, {"head_dim": dim}, made)


def our_platforms():
    """What the registry lists, but for XLA where there is anything else."""
    from ejkernel import kernel_registry

    listed = dict.fromkeys(e.platform.value for e in kernel_registry.list_implementations("flash_attention"))
    return [platform for platform in listed if platform != "xla"] or list(listed)


def our_jobs(options):
    pinned = [f"ejkernel {platform}" for platform in options.platforms]
    nn = "jax.nn cudnn" if not options.cpu else "jax.nn xla"
    for implementation in ("ejkernel", *pinned, nn):
        if "cells" in options.parts:
            yield from cell_jobs(implementation, options)
        if "window" in options.parts:
            yield from window_jobs(implementation, options)
        if "features" in options.parts and implementation not in (nn, "ejkernel cudnn"):
            yield from feature_jobs(implementation, options)
        if "errors" in options.parts:
            features_at = {"ejkernel": [128], nn: []}.get(implementation, options.only_dims)
            yield from error_jobs(implementation, options, features_at)


def peer_jobs(implementation, options):
    flex = implementation == "torch flex"
    if "peers" in options.parts:
        yield from cell_jobs(implementation, options, only=[(128, 16384, True)] if flex else None)
    if "window" in options.parts and implementation != "torch FA2":
        yield from window_jobs(implementation, options)
    if "errors" in options.parts and not flex:
        yield from error_jobs(implementation, options)


def groups(options):
    """Jobs that share a process: (kind, environment, jobs, patient)."""
    yield "jax", {}, list(our_jobs(options)), True
    # What is chosen where gradients need not be the same bits in every run.
    yield (
        "jax",
        {"EJKERNEL_NONDETERMINISTIC": "1"},
        list(cell_jobs(FASTEST, options)) * ("cells" in options.parts),
        True,
    )
    if options.peers:
        path = {"PYTHONPATH": str(options.peers)}
        for names in (("tokamax mosaic_gpu", "tokamax triton"), ("upstream triton",)):
            yield "jax", path, [made for name in names for made in peer_jobs(name, options)], False
    if options.torch:
        yield "torch", {}, [made for name in ("torch FA2", "torch flex") for made in peer_jobs(name, options)], False
    if options.fa4:
        folders = [options.fa4, options.fa4 / "nvidia_cutlass_dsl" / "dsl_packages", options.peers]
        path = {"PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder)}
        yield "torch", path, list(peer_jobs("FlashAttention-4", options)), False


# Processes


class Child:
    """A process that answers jobs; its lines come through a queue, so that waiting has an end."""

    def __init__(self, kind, environment, jobs, threads, patient):
        self.stderr = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env={**os.environ, **environment},
            text=True,
            start_new_session=True,
        )
        self.lines, self.silent = queue.Queue(), False
        threading.Thread(target=self._read, daemon=True).start()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"kind": kind, "jobs": jobs, "threads": threads, "patient": patient}))
            self.process.stdin.close()

    def _read(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    self.lines.put(json.loads(line))
        self.lines.put(None)

    def answers(self, patience):
        """Its lines; ends when it does, or when it says nothing for too long."""
        while True:
            try:
                line = self.lines.get(timeout=max(0.1, patience()))
            except queue.Empty:
                self.silent = True
                return
            if line is None:
                return
            yield line

    def end(self):
        """Stop it if it still runs; the last line of its standard error."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self.stderr.seek(0)
        errors = [line.strip() for line in self.stderr.read().splitlines() if line.strip()]
        self.stderr.close()
        if self.silent:
            return "it said nothing for too long"
        return f"exit status {code}: {errors[-1][:200] if errors else ''}"


def answer(kind, environment, jobs, patient, options, keep, threads=None):
    """Have jobs answered, over as many processes as that takes; ``keep(job, row)`` gets each row."""
    left = {number: {**made, "number": number} for number, made in enumerate(jobs)}
    threads = options.threads if threads is None else threads
    about = {}
    for attempt in range(RESTARTS):
        if not left or options.deadline < time.monotonic():
            break
        child, greeted = Child(kind, environment, list(left.values()), threads, patient), False
        try:
            for line in child.answers(lambda: min(options.patience, options.deadline - time.monotonic())):
                if "hello" in line:
                    greeted, about = True, line
                elif "row" in line:
                    keep(left.pop(line["number"]), line["row"])
        finally:
            reason = child.end()
        if not left or options.deadline < time.monotonic():
            break
        print(f"the process of {next(iter(left.values()))['implementation']} ended: {reason}", flush=True)
        if not greeted or attempt == RESTARTS - 1:
            for number in list(left):
                keep(left.pop(number), {"failed": f"the process ended: {reason}"})
        elif child.process.returncode != LOST:
            # Threads may be to blame, so they go first; then it is the job that was not answered.
            if threads == 1:
                keep(left.pop(next(iter(left))), {"failed": f"the process ended: {reason}"})
            threads = 1
    if left:
        print(f"out of time: {len(left)} jobs are left, from {next(iter(left.values()))['key']}", flush=True)
    return about


# Results


class Results:
    """Rows by part, in a file that is written after each."""

    def __init__(self, path):
        self.path = path
        self.content = json.loads(path.read_text()) if path and path.exists() else {}
        self.content.setdefault("versions", {})
        self.content.pop("rows", None)  # an older layout

    def rows(self, part):
        return self.content.setdefault(part, [])

    def keep(self, job, row):
        row = {"implementation": job["implementation"], **job["key"], **_rounded(row)}
        same = {"implementation": job["implementation"], **job["key"]}
        rows = self.rows(job["part"])
        rows[:] = [r for r in rows if any(r.get(name) != value for name, value in same.items())]
        rows.append(row)
        self.write()
        print(progress_line(job, row), flush=True)

    def about(self, group, line):
        """Script, date and versions, and the device that ours ran on."""
        from shared import origin

        if line:
            self.content |= origin()
            self.content["versions"][group] = line["hello"]
            if group == "ejkernel" or "device" not in self.content:
                self.content["device"], self.content["runtime"] = line["device"], line.get("runtime")

    def write(self):
        if self.path:
            self.path.write_text(json.dumps(self.content, indent=1) + "\n")


def _rounded(x):
    if isinstance(x, dict):
        return {name: _rounded(value) for name, value in x.items()}
    return float(f"{x:.5g}") if isinstance(x, float) else x


def progress_line(job, row):
    words = " ".join(str(value) for value in job["key"].values())
    if "failed" in row:
        said = row["failed"][:110]
    elif "errors" in row:
        said = " ".join(f"{name} {value:.1e}" for name, value in row["errors"].items())
    elif "forward_ms" in row:
        said = f"{row['forward_ms']:.3f}" + (f" + {row['backward_ms']:.3f} ms" if "backward_ms" in row else " ms")
        said += f"  backward: {row['backward_failed'][:90]}" if "backward_failed" in row else ""
    else:
        said = json.dumps({name: value for name, value in row.items() if name not in ("implementation", *job["key"])})
    return f"{job['part']} | {job['implementation']} | {words} | {said}"


def measure_compile(options, results):
    """Each kernel compiled in a process with empty caches, then in another that finds them filled."""
    names = [f"ejkernel {platform}" for platform in options.platforms]
    jobs = [made for name in names if re.search(options.only, name) for made in compile_jobs(name, options)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: os.path.join(folder, name) for name in CACHES}
        environment |= {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        rounds = []
        for _ in ("cold", "warm"):
            rows = {}
            answer(
                "jax",
                environment,
                jobs,
                True,
                options,
                lambda job, row, rows=rows: rows.update({job["number"]: row}),
                1,
            )
            rounds.append(rows)
    for number, made in enumerate(jobs):
        if any(number not in rows for rows in rounds):
            continue
        cold, warm = (rows[number] for rows in rounds)
        row = cold if "failed" in cold else {f"cold_{name}_s": s for name, s in cold["compile_s"].items()}
        row |= {f"warm_{name}_s": s for name, s in warm.get("compile_s", {}).items()}
        results.keep(made, row)


def add_ratios(results):
    """What a feature costs, as a multiple of the plain call's time."""
    rows = results.rows("features")
    plain = {row["implementation"]: row for row in rows if row["feature"] == "plain"}
    for row in rows:
        for name in ("forward", "both"):
            base = plain.get(row["implementation"], {}).get(f"{name}_ms")
            if base and f"{name}_ms" in row:
                row[f"{name}_ratio"] = round(row[f"{name}_ms"] / base, 3)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", type=lambda s: s.split(","), default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--only-dims", type=lambda s: [int(x) for x in s.split(",")], default=[64, 128, 256])
    parser.add_argument(
        "--only", type=re.compile, default="", metavar="REGEX", help="implementations whose name matches"
    )
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where tokamax and upstream ejkernel are")
    parser.add_argument("--fa4", type=Path, metavar="DIR", help="where FlashAttention-4 is")
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--platforms", type=lambda s: s.split(","), help="of ours; default: what the registry lists")
    parser.add_argument("--budget", type=float, default=480.0, metavar="SECONDS", help="stop then, with what there is")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds of silence that end a process")
    parser.add_argument(
        "--threads", type=int, default=min(16, os.cpu_count() or 1), help="that compile; 1 if they crash"
    )
    parser.add_argument("--table", action="store_true", help="show FILE and measure nothing")
    parser.add_argument("--shrink", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    results = Results(options.out)
    if options.table:
        return show(results, PARTS, FEATURES)
    start = time.monotonic()
    options.deadline = start + options.budget
    options.platforms = options.platforms or our_platforms()
    options.cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    for kind, environment, jobs, patient in groups(options):
        jobs = [made for made in jobs if re.search(options.only, made["implementation"])]
        if jobs:
            before = time.monotonic()
            about = answer(kind, environment, jobs, patient, options, results.keep)
            results.about(jobs[0]["implementation"].split(" ")[0], about)
            print(f"-- {len(jobs)} jobs, {time.monotonic() - before:.0f} s", flush=True)
    if "compile" in options.parts:
        measure_compile(options, results)
    add_ratios(results)
    results.write()
    show(results, PARTS, FEATURES)
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
