"""What this machine can run, how right and how fast: collected as rows, for tables and pages."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import itertools
import os
import platform as host
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib

import ejkernel
from ejkernel.callib.chips import identify
from ejkernel.contracts.device import describe
from ejkernel.lab import workloads
from ejkernel.lab.accuracy import check_plan, run_checks
from ejkernel.lab.ceilings import Ceilings, measure_ceilings
from ejkernel.lab.speed import FORWARD, OURS, Job, bench, bench_plan
from ejkernel.lab.workloads import OPERATIONS

VERSION = 1  # of what a report holds: another one cannot be compared with it


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
                    "chosen": candidate.verdict == "chosen",
                    "reasons": list(candidate.reasons),
                }
            )
    return rows


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


def default_lengths(quick: bool) -> dict[str, tuple[int, ...]]:
    """At which lengths each operation, and each layer, is timed."""
    on_cpu = describe().kind == "cpu"
    attention = (512, 1024, 2048, 4096) if on_cpu else (2048, 4096, 8192, 16384)
    others = (512, 2048) if on_cpu else (2048, 8192)
    if quick:
        attention = attention[:3]
    return {name: attention if name == "flash_attention" else others for name in (*OPERATIONS, *workloads.LAYERS)}


def plan(quick: bool) -> list[Job]:
    """The timings of a report. Over one device a ring is flash attention with a detour, so it is left out there."""
    timed = default_lengths(quick)
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
    result: dict[str, Any] = {"report_version": VERSION, "machine": machine(), "kernels": kernels()}
    result |= {"checks": [], "timings": []}
    count = itertools.count(1)
    progress("checking", 0, total)
    result["checks"] = run_checks(to_check, lambda words: progress(words, next(count), total))
    for job in to_time:
        result["timings"] += bench(job, seconds=0.15 if quick else 0.5)
        progress(f"timed {job}", next(count), total)
    result["roofline"] = roofline(result["timings"])
    progress("done", next(count), total)
    return result


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
