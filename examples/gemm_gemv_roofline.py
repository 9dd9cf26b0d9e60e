"""GEMM and GEMV: latency over the matrix's size, beside the vendor's product, and under the roofline of this machine.

Measures `gemm_tiled`, `gemv`, `jnp.dot` and, where torch sees the same kind of device, `torch.matmul`; checks the
results; writes four figures (latency, latency split, beside the peer, roofline) and `gemm_gemv_roofline.json`:

    python examples/gemm_gemv_roofline.py --out lab-figures
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import lab
from ejkernel.callib.chips import identify
from ejkernel.errors import EjkernelError
from ejkernel.lab.extras import need
from ejkernel.lab.files import can_write, picture, put
from ejkernel.lab.report import machine

GPU = jax.default_backend() == "gpu"
DTYPE, SIZES = ("bfloat16", [2**i for i in range(9, 15)]) if GPU else ("float32", [128, 256, 512, 1024, 2048, 4096])
BYTES = jnp.dtype(DTYPE).itemsize


def torch_product():
    """What turns two arrays into a call of `torch.matmul`, or None; and why there is none."""
    if importlib.util.find_spec("torch") is None:
        return None, "torch is not installed"
    torch = need("torch", "torch.matmul")
    if GPU and not torch.cuda.is_available():
        return None, "torch sees no GPU"
    torch.set_num_threads(os.cpu_count())
    where = {"device": "cuda" if GPU else "cpu", "dtype": getattr(torch, DTYPE)}
    return lambda *arrays: (torch.matmul, [torch.tensor(np.asarray(x, np.float32)).to(**where) for x in arrays]), None


def study(size, torch_matmul):
    """Milliseconds of each product at one size, and how far ours are from XLA's, by the norm."""
    a, b = (jax.random.normal(key, (size, size), DTYPE) for key in jax.random.split(jax.random.key(size)))
    x, gemm, gemv, dot = b[:, 0], jax.jit(lab.gemm_tiled), jax.jit(lab.gemv), jax.jit(jnp.dot)
    calls = {"gemm_tiled": (gemm, (a, b)), "jnp_dot": (dot, (a, b)), "gemv": (gemv, (a, x))}
    pairs = [[z.astype(jnp.float32) for z in pair] for pair in ((gemm(a, b), dot(a, b)), (gemv(a, x), dot(a, x)))]
    error = max(float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs)) for ours, theirs in pairs)
    if torch_matmul:
        calls["torch_matmul"] = torch_matmul(a, b)
    times = {f"{name}_ms": lab.measure(f, *args, max_seconds=1.0).median_ms for name, (f, args) in calls.items()}
    return {"size": size, **times, "relative_error": error}


def points(rows):
    """Intensity and achieved TFLOPS: a small GEMV is left out, for it reads the caches and not the memory."""
    found = {}
    for row in rows[len(rows) // 2], rows[-1]:
        n = row["size"]
        found[f"gemm_{n}"] = (2 * n / (3 * BYTES), 2e-9 * n**3 / row["gemm_tiled_ms"])
    return {**found, f"gemv_{n}": (2 * n / ((n + 2) * BYTES), 2e-9 * n**2 / row["gemv_ms"])}


def relabel(ax, old, new):
    """Other words in a legend."""
    for text in ax.get_legend().get_texts():
        text.set_text(text.get_text().replace(old, new))


def drawn(rows, peer, where, ceilings):
    """The four figures, as files."""
    size, ours, gemv = ([row[name] for row in rows] for name in ("size", "gemm_tiled_ms", "gemv_ms"))
    theirs = [row[f"{peer.replace('.', '_')}_ms"] for row in rows]
    figures = {"latency": lab.plot_gemm_gemv_latency(size, ours, gemv, title=f"GEMM vs GEMV, {where}").figure}
    figures["latency_split"], _ = lab.plot_gemm_gemv_latency_split(size, ours, gemv, title=f"GEMM vs GEMV, {where}")
    beside = lab.plot_gemm_torch_matmul_latency(size, ours, theirs, title=f"gemm_tiled vs {peer}, {where}")
    relabel(beside, "torch.matmul", peer)
    bandwidth = max(ceilings.copy_bytes_per_s, ceilings.read_bytes_per_s) / 1e12
    measured = ceilings.matmul_flops_per_s[DTYPE] / 1e12, bandwidth
    chip = identify(jax.devices()[0].device_kind)
    peaks = (chip.flops(DTYPE) / 1e12, chip.memory_bandwidth / 1e12) if chip else measured
    ax = lab.plot_roofline(where, *peaks, points(rows), ceilings=measured if chip else None)
    if not chip:
        relabel(ax, "data sheet", "measured")
    figures |= {"peer": beside.figure, "roofline": ax.figure}
    return {f"gemm_gemv_{name}.png": picture(figure) for name, figure in figures.items()}


def main():
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("lab-figures"), help="folder for the figures and the numbers")
    out, began, rows = parser.parse_args().out, time.perf_counter(), []
    can_write(out / "gemm_gemv_roofline.json", "--out")
    need("matplotlib", "drawing").use("agg")
    torch_matmul, missing = torch_product()
    if missing:
        print(f"{missing}: gemm_tiled is drawn beside jnp.dot instead of torch.matmul")
    columns = ["gemm_tiled_ms", "jnp_dot_ms", *([] if missing else ["torch_matmul_ms"]), "gemv_ms"]
    print(f"{'N':>6}" + "".join(f"{name:>17}" for name in columns) + f"{'rel. error':>12}")
    for size in SIZES:
        print(f"{size:>6} … {time.perf_counter() - began:.0f} s", end="\r", file=sys.stderr, flush=True)
        rows.append(row := study(size, torch_matmul))
        print(f"{size:>6}" + "".join(f"{row[name]:>17.4f}" for name in columns) + f"{row['relative_error']:>12.1e}")
    ceilings = lab.measure_ceilings()
    where = f"{jax.devices()[0].device_kind if GPU else f'CPU, {os.cpu_count()} cores'}, {DTYPE}"
    here = machine()
    result = {
        "script": "examples/gemm_gemv_roofline.py",
        "date": here["measured_at"][:10],
        "versions": here["versions"],
    }
    result |= {"device": where, "dtype": DTYPE, "rows": rows, "points": points(rows), "ceilings": ceilings.to_json()}
    figures = drawn(rows, "jnp.dot" if missing else "torch.matmul", where, ceilings)
    put(out, {"gemm_gemv_roofline.json": (json.dumps(result, indent=2) + "\n").encode(), **figures})
    print(f"wrote four figures and gemm_gemv_roofline.json to {out} in {time.perf_counter() - began:.0f} s")
    if not max(row["relative_error"] for row in rows) < (0.02 if GPU else 1e-5):
        sys.exit("gemm_tiled or gemv differs from jnp.dot")


if __name__ == "__main__":
    try:
        main()
    except (EjkernelError, OSError) as error:
        sys.exit(f"error: {error}")
