"""What this machine can run, how right and how fast: collected as rows, for tables and pages.

Everything that takes time is a generator of rows, so that progress can be shown.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import itertools
import os
import platform as host
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import ejkernel
from ejkernel import UnsupportedError, kernel_registry
from ejkernel.callib.chips import identify
from ejkernel.contracts.device import describe
from ejkernel.lab import peers, workloads
from ejkernel.lab.ceilings import Ceilings, measure_ceilings
from ejkernel.lab.timing import measure
from ejkernel.lab.workloads import BOUNDS, OPERATIONS, Workload

Prepared = tuple[Callable, tuple, Any, int | None, float | None]
FORWARD, BOTH = "forward", "forward + backward"
OURS = "ejkernel"


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    device = jax.local_devices()[0]
    return {
        "device": device.device_kind,
        "fingerprint": describe(device).fingerprint,
        "devices": len(jax.local_devices()),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": host.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "ejkernel": ejkernel.__version__,
        "versions": {"ejkernel": ejkernel.__version__, "python": host.python_version(), **_versions()},
        "runtime": str(device.client.platform_version).splitlines()[0],
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def kernels(device: Any = None) -> list[dict[str, Any]]:
    """Every implementation, whether it can run a plain call here (or on a described device), and if not, why."""
    rows = []
    for operation in OPERATIONS:
        plain = workloads.checks(operation)[0]
        full, half = (
            {c.implementation: c for c in plain.explained(d, device).candidates} for d in ("float32", "bfloat16")
        )
        for implementation in full:
            # A kernel that takes half precision only is asked for that: the dtype is not what is in question here.
            candidate = (full if "float32" in implementation.support.dtypes else half)[implementation]
            rows.append(
                {
                    "operation": operation,
                    "platform": candidate.platform.value,
                    "backend": candidate.backend.value,
                    "runs": candidate.verdict != "refused",
                    "reasons": list(candidate.reasons),
                }
            )
    return rows


def check_plan(operations: list[str] | None = None, platform: str | None = None) -> list[tuple[Workload, str, str]]:
    """The checks that concern this machine: a workload, a platform that runs here, and the dtype to check in."""
    device = describe()
    return [
        (workload, entry.platform.value, "float32" if "float32" in entry.support.dtypes else "bfloat16")
        for operation in operations or OPERATIONS
        for workload in workloads.checks(operation)
        for entry in kernel_registry.list_implementations(_kernels_of(operation))
        if entry.support.devices.refusal(device) is None and platform in (None, entry.platform.value)
    ]


def run_checks(plan: list[tuple[Workload, str, str]], done: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows of a plan; ``done(words)`` is called after each. An accelerator's are compiled side by side."""
    workers = 1 if describe().kind == "cpu" else min(8, os.cpu_count() or 1)

    def one(job: tuple[Workload, str, str]) -> dict[str, Any]:
        row = check(*job)
        done(f"checked {job[0].operation}: {job[0].name}")
        return row

    with ThreadPoolExecutor(workers) as pool:
        try:
            return list(pool.map(one, plan))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def check(workload: Workload, platform: str, dtype: str) -> dict[str, Any]:
    """The largest relative error of the output and of every gradient against float64."""
    row = {
        "operation": workload.operation,
        "platform": platform,
        "check": workload.name,
        "dtype": dtype,
        "error": None,
        "bound": BOUNDS[dtype],
        "passed": False,
        "refused": False,
        "reason": "",
    }
    arrays = workload.cast(dtype)
    try:
        found = _with_gradients(workload.function(platform), arrays, workload.differentiable)
    except UnsupportedError as error:
        refusals = [line.split(None, 3) for line in str(error).splitlines() if " refused " in line]
        reasons = [words[3] for words in refusals if words[0] == platform and len(words) == 4]
        return {**row, "refused": True, "reason": (reasons or str(error).splitlines())[0]}
    except Exception as error:  # a kernel that crashes is a row of the table, not its end
        return {**row, "reason": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
    errors = relative_errors(found, _exact(workload, arrays))
    row["error"] = max(errors.values())
    row["passed"] = row["error"] <= row["bound"]
    if not row["passed"]:
        row["reason"] = "too far: " + ", ".join(name for name, e in errors.items() if not e <= row["bound"])
    return row


def relative_errors(found: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    """‖found − exact‖ / ‖exact‖ of each entry; infinite where something is not finite.

    Example:
        >>> relative_errors({"out": np.array([1.0, 2.5])}, {"out": np.array([1.0, 2.0])})
        {'out': 0.22360679774997896}
    """

    def one(x: Any, e: Any) -> float:
        pairs = list(zip(jax.tree.leaves(x), jax.tree.leaves(e), strict=True))
        error, size = (np.sqrt(sum(np.sum(np.square(d)) for d in ds)) for ds in (
            [np.asarray(x, np.float64) - np.asarray(e) for x, e in pairs], [np.asarray(e) for _, e in pairs]))  # fmt: skip
        return float(error / max(size, 1e-30)) if np.isfinite(error) else float("inf")

    return {name: one(x, exact[name]) for name, x in found.items()}


def _with_gradients(f: Callable, arrays: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, Any]:
    """The output, and the gradient of each wanted argument for a fixed cotangent."""

    @jax.jit
    def run(floats: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
        out, pull = jax.vjp(lambda floats: f({**floats, **rest}), floats)
        cotangent = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), out)
        (grads,) = pull(jax.tree.map(lambda c, x: c.astype(x.dtype), cotangent, out))
        return {"out": out, **{f"d{name}": grad for name, grad in grads.items()}}

    return run({n: arrays[n] for n in wanted}, {n: x for n, x in arrays.items() if n not in wanted})


def _exact(workload: Workload, arrays: dict[str, Any]) -> dict[str, Any]:
    return _in_float64(lambda exact: _with_gradients(workload.reference, exact, workload.differentiable), arrays)


def _in_float64(f: Callable[[dict[str, Any]], Any], arrays: dict[str, Any]) -> Any:
    """``f`` of the arrays in float64; on the CPU where JAX has it beside an accelerator, for which that takes long to compile."""

    def exact(x: Any) -> np.ndarray:
        return np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else None)

    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        cpu = None
    with jax.enable_x64(True), jax.default_device(cpu):
        return jax.tree.map(np.asarray, f(jax.tree.map(exact, arrays)))


# Speed


def bench_plan(
    operations: list[str],
    lengths: tuple[int, ...],
    *,
    with_peers: bool = True,
    pinned: bool = False,
    backward: bool = True,
) -> list[tuple[str, int, str, str]]:
    """What is to be timed: operation, length, implementation and direction, in the order in which it is."""
    plan = []
    device = describe()
    for operation in operations:
        ours = [OURS]
        if pinned:
            entries = kernel_registry.list_implementations(_kernels_of(operation))
            ours += [f"{OURS} {e.platform.value}" for e in entries if e.support.devices.refusal(device) is None]
        others = peers.names(operation) if with_peers else []
        for length in lengths:
            for implementation in (*ours, *others):
                for what in (FORWARD, BOTH) if backward else (FORWARD,):
                    plan.append((operation, length, implementation, what))
    return plan


def bench(operation: str, length: int, implementation: str, what: str, *, seconds: float = 0.3) -> dict[str, Any]:
    """One timing; a peer that is not here, or a call that fails, is a row with the reason and no time."""
    dtype = workloads.default_dtype()
    workload = workloads.timed(operation, length, describe().kind != "cpu")
    row = {
        "operation": operation,
        "what": what,
        "length": length,
        "implementation": implementation,
        "dtype": dtype,
        **dict.fromkeys(("ms", "low_ms", "high_ms", "compile_ms", "tflops", "memory_bytes", "error")),
        "flags": [],
        "reason": "",
    }
    try:
        run, args, outcome, memory, row["compile_ms"] = _prepared(workload, implementation, what, dtype)
        if what == FORWARD:
            row["error"] = _error_of(workload, dtype, outcome)
        timed = measure(run, *args, min_seconds=seconds / 3, max_seconds=seconds * 3)
    except peers.Absent as error:
        return {**row, "reason": str(error)}
    except Exception as error:  # one that fails is a row of the table, not its end
        return {**row, "reason": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
    cost = workload.cost(dtype)
    flops = cost.flops + (cost.backward_flops if what == BOTH else 0)
    return {
        **row,
        "ms": timed.median_ms,
        "low_ms": timed.p10_ms,
        "high_ms": timed.p90_ms,
        "memory_bytes": timed.peak_memory_bytes if memory is None else memory,
        "tflops": flops / timed.median_ms / 1e9,
        "flags": list(timed.flags),
    }


def _prepared(
    workload: Workload, implementation: str, what: str, dtype: str
) -> tuple[Callable, tuple, Any, int | None]:
    """What to time, its arguments, its first result, the memory that its compiler says it needs, and how long that took."""
    framework = "jax"
    if implementation.startswith(OURS):
        f = workload.function(implementation.removeprefix(OURS).strip() or None)
    else:
        f, framework = peers.function(implementation, workload)
    if framework == "torch":
        return _prepared_torch(f, workload, what, dtype)
    arrays = workload.cast(dtype)
    if what == FORWARD:
        run, args = f, (arrays,)
    else:
        floats = {name: arrays[name] for name in workload.differentiable}
        rest = {name: x for name, x in arrays.items() if name not in floats}

        def run(floats: dict[str, Any], rest: dict[str, Any]) -> Any:
            def loss(floats: dict[str, Any]) -> Any:
                out = jax.tree.leaves(f({**floats, **rest}))[0]
                return (out * out).astype(jnp.float32).sum()

            return jax.value_and_grad(loss)(floats)

        args = (floats, rest)
    jitted = jax.jit(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a peer's own affair
        start = time.perf_counter()
        memory = jitted.lower(*args).compile().memory_analysis()
        compile_ms = (time.perf_counter() - start) * 1e3
        outcome = jitted(*args)
    needed = memory.temp_size_in_bytes + memory.output_size_in_bytes if memory else None
    return jitted, args, outcome, needed, compile_ms


def _prepared_torch(f: Callable, workload: Workload, what: str, dtype: str) -> Prepared:
    import torch

    arrays = peers.as_torch(workload.arrays, dtype)
    if what == FORWARD:

        def run(arrays: dict[str, Any]) -> Any:
            with torch.no_grad():
                return f(arrays)

    else:
        wanted = [leaf.requires_grad_() for name in workload.differentiable for leaf in jax.tree.leaves(arrays[name])]

        def run(arrays: dict[str, Any]) -> Any:
            out = jax.tree.leaves(f(arrays))[0]
            return torch.autograd.grad((out * out).float().sum(), wanted)

    outcome = jax.tree.map(lambda x: x.detach().float().cpu().numpy(), run(arrays))
    memory = None
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(arrays)
        memory = torch.cuda.max_memory_allocated() - before
    return run, (arrays,), outcome, memory, None


def _error_of(workload: Workload, dtype: str, outcome: Any) -> float:
    """Against float64; of a long attention only the last queries are compared, which see all keys."""
    arrays = workload.cast(dtype)
    if workload.last_rows:
        arrays["query"] = arrays["query"][:, -workload.last_rows :]
        outcome = outcome[:, -workload.last_rows :]
    expected = _in_float64(jax.jit(workload.reference), arrays)
    return relative_errors({"out": outcome}, {"out": expected})["out"]


# Where that stands


def roofline(timings: list[dict[str, Any]], ceilings: Ceilings | None = None) -> dict[str, Any]:
    """The data sheet's roof, the measured one, and each operation's longest forward as a point under them."""
    dtype = workloads.default_dtype()
    points = {}
    for row in timings:
        if row["implementation"] == OURS and row["what"] == FORWARD and row["ms"]:
            workload = workloads.timed(row["operation"], row["length"], describe().kind != "cpu")
            cost = workload.cost(row["dtype"])
            points[row["operation"]] = {
                "name": f"{row['operation']}, {row['length']}",
                "intensity": cost.flops / cost.bytes,
                "tflops": row["tflops"],
            }
    roof = _roof(ceilings or measure_ceilings(), dtype)
    if any(point["tflops"] > 1.02 * _under(roof, point) for point in points.values()):
        roof = _roof(measure_ceilings(refresh=True), dtype)  # what was kept was measured on a busy machine
    chip = identify(jax.local_devices()[0].device_kind)
    peak = chip and chip.flops(dtype)
    return {
        "peak": {"name": chip.slug, "tflops": peak / 1e12, "tb_per_s": chip.memory_bandwidth / 1e12} if peak else None,
        "ceilings": roof,
        "points": list(points.values()),
    }


def _roof(ceilings: Ceilings, dtype: str) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "tflops": ceilings.matmul_flops_per_s[dtype] / 1e12,
        "tb_per_s": max(ceilings.copy_bytes_per_s, ceilings.read_bytes_per_s) / 1e12,
        "copy_tb_per_s": ceilings.copy_bytes_per_s / 1e12,
        "read_tb_per_s": ceilings.read_bytes_per_s / 1e12,
    }


def _under(roof: dict[str, Any], point: dict[str, Any]) -> float:
    return min(roof["tflops"], point["intensity"] * roof["tb_per_s"])


def lengths(quick: bool) -> dict[str, tuple[int, ...]]:
    """At which lengths each operation is timed."""
    on_cpu = describe().kind == "cpu"
    attention = (512, 1024, 2048, 4096) if on_cpu else (2048, 4096, 8192, 16384)
    others = (512, 2048) if on_cpu else (2048, 8192)
    if quick:
        attention = attention[:3]
    return {name: attention if name == "flash_attention" else others for name in OPERATIONS}


def plan(quick: bool) -> list[tuple[str, int, str, str]]:
    """The timings of a report. Over one device a ring is flash attention with a detour, so it is left out there."""
    timed = lengths(quick)
    wanted = [name for name in OPERATIONS if name != "ring_attention" or len(jax.devices()) > 1]
    return [
        job
        for name in wanted
        for job in bench_plan([name], timed[name], pinned=False, backward=not quick or name == "flash_attention")
    ]


def collect(quick: bool, progress: Callable[[str, int, int], None] = lambda *_: None) -> dict[str, Any]:
    """Everything that a report shows; ``progress(what, done, total)`` is called as it goes."""
    to_check, to_time = check_plan(), plan(quick)
    total = len(to_check) + len(to_time) + 1
    result: dict[str, Any] = {"machine": machine(), "kernels": kernels(), "checks": [], "timings": []}
    count = itertools.count(1)
    progress("checking", 0, total)
    result["checks"] = run_checks(to_check, lambda words: progress(words, next(count), total))
    for job in to_time:
        result["timings"].append(bench(*job, seconds=0.15 if quick else 0.5))
        progress(f"timed {job[0]}: {job[2]}", next(count), total)
    result["roofline"] = roofline(result["timings"])
    progress("done", next(count), total)
    return result


def _kernels_of(operation: str) -> str:
    """The algorithm whose kernels an operation runs on."""
    return "flash_attention" if operation == "ring_attention" else operation


def _versions() -> dict[str, str]:
    """Of the packages that decide what runs, as far as they are installed."""
    found = {}
    for name in ("jax", "jaxlib", "numpy", "triton", "jax-triton", "nvidia-cudnn-cu13", "libtpu", "torch", "tokamax"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), host.processor())
