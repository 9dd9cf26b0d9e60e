"""grouped_matmul on XLA beside jax.lax.ragged_dot and one dense product of the same work, on a GPU.

    python benchmarks/grouped_matmul_gpu.py [--out benchmarks/results/grouped_matmul_gpu.json]

Random group sizes; bursts of all three are timed in random order, each after a pause, and the best of each counts.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from shared import environment

from ejkernel import grouped_matmul
from ejkernel.utils.bursts import time_bursts

# dtype, M, K, N, groups
CASES = [
    ("bfloat16", 8192, 2048, 2048, 8),
    ("bfloat16", 8192, 2048, 2048, 64),
    ("bfloat16", 16384, 4096, 1536, 128),
    ("bfloat16", 64, 4096, 1536, 64),
    ("float32", 8192, 2048, 2048, 8),
    ("float32", 8192, 2048, 2048, 64),
]


def measure(dtype, m, k, n, groups, rounds):
    keys = jax.random.split(jax.random.key(0), 3)
    a, b, dout = (
        jax.random.normal(key, s, dtype) for key, s in zip(keys, ((m, k), (groups, k, n), (m, n)), strict=True)
    )
    sizes = jnp.asarray(np.random.default_rng(0).multinomial(m, np.ones(groups) / groups), jnp.int32)
    precision = None if a.dtype.itemsize == 2 else jax.lax.Precision.HIGHEST
    products = {
        "ejkernel": (grouped_matmul, b, sizes),
        "ragged_dot": (lambda a, b, sizes: jax.lax.ragged_dot(a, b, sizes, precision=precision), b, sizes),
        "dense": (lambda a, b: jnp.dot(a, b, precision=precision), b[0]),
    }

    def forward(f, *rest):
        jitted = jax.jit(f)
        return lambda: jitted(a, *rest)

    def backward(f, b, *rest):
        jitted = jax.jit(lambda a, b, dout, *rest: jax.vjp(lambda a, b: f(a, b, *rest), a, b)[1](dout))
        return lambda: jitted(a, b, dout, *rest)

    for direction, wrap in (("forward", forward), ("backward", backward)):
        bursts = time_bursts({name: wrap(*product) for name, product in products.items()}, rounds=rounds)
        times = {name: found.best for name, found in bursts.items()}
        row = {"case": f"{dtype} M={m} K={k} N={n}, {groups} groups, {direction}"}
        row |= {f"{name}_ms": seconds * 1e3 for name, seconds in times.items()}
        row["faster_than_ragged_dot"] = times["ragged_dot"] / times["ejkernel"]
        row["time_over_dense"] = times["ejkernel"] / times["dense"]
        print(row, flush=True)
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    result = {
        **environment(),
        "cases": [row for case in CASES for row in measure(*case, options.rounds)],
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
