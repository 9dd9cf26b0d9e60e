"""Flash attention against attention with all its logits in memory: latency and memory over sequence lengths, causal.

Checks that both agree, and writes `flash_vs_standard.png` and `.json`. Memory is what the compiled program takes beside
its arguments, by the compiler's own account; where the standard one does not fit, it has no numbers.

    python examples/flash_vs_standard.py --out lab-figures
"""

import argparse
import functools
import json
import math
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from ejkernel import flash_attention, lab
from ejkernel.errors import EjkernelError
from ejkernel.lab.extras import need
from ejkernel.lab.files import can_write, picture, put
from ejkernel.lab.report import machine
from ejkernel.utils import get_memory_usage

GPU = jax.default_backend() == "gpu"
# On a GPU heads and sizes of a large model.
DTYPE, HEADS, KV_HEADS, DIM = ("bfloat16", 32, 8, 128) if GPU else ("float32", 8, 2, 64)
LENGTHS = [2**i for i in range(9, 16)] if GPU else [128, 256, 512, 1024, 2048]
BOUND = 0.02 if GPU else 1e-5
GB = 1e9


def compiled(attention, arrays):
    """The program for these arrays, and the memory in GB that it takes beside them."""
    program = jax.jit(functools.partial(attention, causal=True)).lower(*arrays).compile()
    sizes = program.memory_analysis()
    return program, (sizes.temp_size_in_bytes + sizes.output_size_in_bytes) / GB


def measured(attention, arrays, room):
    """`(ms, GB, output)`; the output is None and the rest NaN if the program does not fit."""
    try:
        program, memory = compiled(attention, arrays)
        if memory > room:
            return math.nan, math.nan, None
        out = jax.block_until_ready(program(*arrays))
        return lab.measure(program, *arrays, max_seconds=1.5).median_ms, memory, out
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return math.nan, math.nan, None


def study(length):
    """Both at one sequence length."""
    keys = jax.random.split(jax.random.key(length), 3)
    arrays = [
        jax.random.normal(key, (1, length, heads, DIM), DTYPE)
        for key, heads in zip(keys, (HEADS, KV_HEADS, KV_HEADS), strict=True)
    ]
    usage = get_memory_usage()
    # On a machine that others use, half of it is enough.
    room = (usage["limit"] - usage["allocated"]) * (0.95 if GPU else 0.5) / GB
    flash_ms, flash_mem, flash_out = measured(flash_attention, arrays, room)
    std_ms, std_mem, std_out = measured(lab.standard_attention, arrays, room)
    row = {"seq_len": length, "std_ms": std_ms, "flash_ms": flash_ms, "std_mem_gb": std_mem, "flash_mem_gb": flash_mem}
    error = math.nan if std_out is None else float(jnp.max(jnp.abs((flash_out - std_out).astype(jnp.float32))))
    return {**row, "largest_error": error}


def main():
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("lab-figures"), help="folder for the figure and the numbers")
    out = parser.parse_args().out
    can_write(out / "flash_vs_standard.json", "--out")
    need("matplotlib", "drawing").use("agg")
    frame = need("pandas", "drawing").DataFrame
    began, rows = time.perf_counter(), []
    columns = {"std_ms": ".2f", "flash_ms": ".2f", "std_mem_gb": ".4f", "flash_mem_gb": ".4f", "largest_error": ".1e"}
    print(f"{'seq_len':>8}" + "".join(f"{name:>15}" for name in columns))
    for length in LENGTHS:
        print(f"{length:>8} … {time.perf_counter() - began:.0f} s", end="\r", file=sys.stderr, flush=True)
        rows.append(row := study(length))
        print(f"{length:>8}" + "".join(f"{row[name]:>15{kind}}" for name, kind in columns.items()))
    where = jax.devices()[0].device_kind if GPU else f"CPU, {os.cpu_count()} cores"
    here = machine()
    about = {"script": "examples/flash_vs_standard.py", "date": here["measured_at"][:10], "versions": here["versions"]}
    about |= {"device": where, "dtype": DTYPE, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "batch": 1}
    path = out / "flash_vs_standard"
    numbers = [{name: None if x != x else x for name, x in row.items()} for row in rows]  # JSON has no NaN
    result = json.dumps({**about, "causal": True, "rows": numbers}, indent=2) + "\n"
    title = f"Causal attention, {HEADS} heads ({KV_HEADS} of keys) of {DIM}, {DTYPE}, {where}"
    figure, _ = lab.plot_flash_attn_improvement(frame(rows), title=title)
    put(out, {f"{path.name}.json": result.encode(), f"{path.name}.png": picture(figure)})
    print(f"wrote {path}.png and .json in {time.perf_counter() - began:.0f} s")
    if any(row["largest_error"] > BOUND for row in rows):
        sys.exit(f"flash and standard attention differ by more than {BOUND}")


if __name__ == "__main__":
    try:
        main()
    except (EjkernelError, OSError) as error:
        sys.exit(f"error: {error}")
