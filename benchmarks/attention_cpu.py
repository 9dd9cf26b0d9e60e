"""flash_attention on XLA beside torch and jax.nn, on a CPU: ratios within one process.

    python benchmarks/attention_cpu.py [--out benchmarks/results/attention_cpu.json]

float32, 8 heads × 64, causal, batch 1. torch is measured if it is installed (2.13.0 in the committed results).
Bursts of all implementations are timed in random order, each after a pause, and the best of each counts.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from shared import best_of, jax_run, main, torch_version

from ejkernel import flash_attention

HEADS, DIM = 8, 64


def inputs(length):
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(k, (1, length, HEADS, DIM)) for k in keys)


def gradients(f):
    return jax.grad(lambda *a: f(*a).sum(), (0, 1, 2))


def torch_runs(args):
    if torch_version() is None:
        return {}
    import torch

    q, k, v = (torch.tensor(np.asarray(x)).transpose(1, 2).contiguous() for x in args)

    def forward():
        with torch.no_grad():
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def both():
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        torch.autograd.grad(out.sum(), leaves)

    return {"forward": forward, "forward+backward": both}


def causal(q, k, v):
    return flash_attention(q, k, v, causal=True)


def jax_nn(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def peers(rounds):
    """Ours beside torch and jax.nn."""
    rows = []
    for length in (2048, 4096):
        args = inputs(length)
        theirs = torch_runs(args)
        for what, wrap in (("forward", lambda f: f), ("forward+backward", gradients)):
            runs = {"ejkernel": jax_run(wrap(causal), *args), "jax.nn": jax_run(wrap(jax_nn), *args)}
            if theirs:
                runs["torch"] = theirs[what]
            times = best_of(runs, rounds)
            row = {"case": f"{length} {what}", **{f"{name}_ms": t * 1e3 for name, t in times.items()}}
            row["faster_than_jax.nn"] = times["jax.nn"] / times["ejkernel"]
            if theirs:
                row["time_over_torch"] = times["ejkernel"] / times["torch"]
            rows.append(row)
            print(row, flush=True)
    return rows


def window(rounds):
    """A causal window of 512 keys beside all keys, at 8192."""
    args = inputs(8192)

    def windowed(q, k, v):
        return flash_attention(q, k, v, causal=True, sliding_window=(511, 0))

    rows = []
    for what, wrap in (("forward", lambda f: f), ("forward+backward", gradients)):
        times = best_of({"window": jax_run(wrap(windowed), *args), "causal": jax_run(wrap(causal), *args)}, rounds)
        rows.append(
            {
                "case": f"8192 {what}",
                **{f"{n}_ms": t * 1e3 for n, t in times.items()},
                "faster": times["causal"] / times["window"],
            }
        )
        print(rows[-1], flush=True)
    return rows


def memory():
    """Temporary memory of the compiled functions at 8192."""
    x = jax.ShapeDtypeStruct((1, 8192, HEADS, DIM), jnp.float32)
    result = {}
    for what, f in (("forward", causal), ("forward+backward", gradients(causal))):
        analysis = jax.jit(f).lower(x, x, x).compile().memory_analysis()
        result[what] = analysis.temp_size_in_bytes / 2**20
    print("temporary MiB at 8192:", result, flush=True)
    return result


def overhead():
    """An eager call on tiny arrays beside a call of a jitted function with the same arrays."""
    x = jnp.ones((1, 4, 1, 4))
    jitted = jax.jit(lambda q, k, v: q + k + v)
    calls = 2000

    def many(run):
        def loop():
            for _ in range(calls):
                run()

        return loop

    runs = {
        "jit": many(lambda: jitted(x, x, x)),
        "eager": many(lambda: flash_attention(x, x, x)),
        "eager_with_options": many(
            lambda: flash_attention(x, x, x, causal=True, sliding_window=(2, 0), logits_soft_cap=3.0)
        ),
    }
    times = {name: t / calls * 1e6 for name, t in best_of(runs, 7).items()}
    times["ratio"] = times["eager"] / times["jit"]
    print("µs a call:", times, flush=True)
    return times


def compile_time():
    """Cold compilation of forward and backward at 2048."""
    x = jax.ShapeDtypeStruct((1, 2048, HEADS, DIM), jnp.float32)
    start = time.perf_counter()
    jax.jit(gradients(lambda q, k, v: flash_attention(q, k, v, causal=True, softmax_scale=0.125001))).lower(
        x, x, x
    ).compile()
    seconds = time.perf_counter() - start
    print(f"trace, lower and compile forward+backward at 2048: {seconds:.2f} s", flush=True)
    return seconds


def measure(rounds):
    return {
        "compile_seconds": compile_time(),
        "overhead_us": overhead(),
        "temporary_mib": memory(),
        "peers": peers(rounds),
        "window": window(max(3, rounds // 2)),
    }


if __name__ == "__main__":
    main(__doc__, measure)
