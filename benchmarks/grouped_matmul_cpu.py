"""grouped_matmul on XLA beside jax.lax.ragged_dot, torch and one dense product, on a CPU: ratios within one process.

    python benchmarks/grouped_matmul_cpu.py [--out benchmarks/results/grouped_matmul_cpu.json]

float32, M = 4096, K = N = 512; random group sizes, so that no group starts at a multiple of a tile. torch is measured
if it is installed: a loop over the groups in Python, with sizes that it knows beforehand. The dense product is
``[M, K] · [K, N]``, the work of all groups together. Bursts of all of them are timed
in random order, each after a pause, and the best of each counts.
"""

import jax
import jax.numpy as jnp
import numpy as np
from shared import best_of, main, torch_version
from shared import jax_run as compiled

from ejkernel import grouped_matmul

M, K, N = 4096, 512, 512
DIRECTIONS = ("forward", "forward+backward")


def sizes(groups, kind, seed=0):
    """Random group sizes that sum to M: all alike in the mean, or falling as 1 / rank."""
    weights = np.ones(groups) if kind == "uniform" else 1 / np.arange(1, groups + 1)
    rng = np.random.default_rng(seed)
    return rng.permutation(rng.multinomial(M, weights / weights.sum())).astype(np.int32)


def inputs(groups):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((M, K), (groups, K, N), (M, N))
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


def jax_run(f, direction, a, b, dout, *rest):
    """A compiled call of ``f(a, b, *rest)``; the backward pulls a random cotangent back to a and b."""
    if direction == "forward":
        return compiled(f, a, b, *rest)

    def both(a, b, dout, *rest):
        out, pull = jax.vjp(lambda a, b: f(a, b, *rest), a, b)
        return out, pull(dout)

    return compiled(both, a, b, dout, *rest)


def ragged_dot(a, b, group_sizes):
    return jax.lax.ragged_dot(a, b, group_sizes, precision=jax.lax.Precision.HIGHEST)


def dense(a, b):
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)


def torch_run(direction, a, b, dout, group_sizes):
    if torch_version() is None:
        return None
    import torch

    a, b, dout = (torch.tensor(np.asarray(x)) for x in (a, b, dout))
    lengths = group_sizes.tolist()

    def product(a, b):
        return torch.cat([rows @ matrix for rows, matrix in zip(a.split(lengths), b, strict=True)])

    def forward():
        with torch.no_grad():
            product(a, b)

    leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    return forward if direction == "forward" else lambda: torch.autograd.grad(product(*leaves), leaves, dout)


def peers(rounds, groups=16):
    """Ours beside the others."""
    a, b, dout = inputs(groups)
    rows = []
    for kind in ("uniform", "skewed"):
        group_sizes = sizes(groups, kind)
        for direction in DIRECTIONS:
            runs = {
                "ejkernel": jax_run(grouped_matmul, direction, a, b, dout, group_sizes),
                "ragged_dot": jax_run(ragged_dot, direction, a, b, dout, group_sizes),
                "dense": jax_run(dense, direction, a, b[0], dout),
                "torch_loop": torch_run(direction, a, b, dout, group_sizes),
            }
            times = best_of({name: run for name, run in runs.items() if run}, rounds)
            row = {"case": f"{groups} groups, {kind}, {direction}", **{f"{n}_ms": t * 1e3 for n, t in times.items()}}
            row["faster_than_ragged_dot"] = times["ragged_dot"] / times["ejkernel"]
            row["time_over_dense"] = times["ejkernel"] / times["dense"]
            if "torch_loop" in times:
                row["time_over_torch_loop"] = times["ejkernel"] / times["torch_loop"]
            rows.append(row)
            print(row, flush=True)
    return rows


def by_groups(rounds, counts=(4, 16, 64)):
    """The time as the number of groups grows, ours and torch's.

    The gradient of b grows with it, to 64 MiB. Beside the whole stands the time that it takes to make an array of that
    size, whatever is in it: past 32 MiB the C library asks the system for fresh pages each time.
    """
    rows = []
    for kind in ("uniform", "skewed"):
        for direction in DIRECTIONS:
            runs = {}
            for groups in counts:
                a, b, dout = inputs(groups)
                group_sizes = sizes(groups, kind)
                runs["ejkernel", groups] = jax_run(grouped_matmul, direction, a, b, dout, group_sizes)
                runs["torch_loop", groups] = torch_run(direction, a, b, dout, group_sizes)
                runs["zeros_like_b", groups] = compiled(lambda shape=b.shape: jnp.zeros(shape))
            times = best_of({name: run for name, run in runs.items() if run}, rounds)
            row = {"case": f"{kind}, {direction}"}
            row |= {f"{name}_{groups}_groups_ms": seconds * 1e3 for (name, groups), seconds in times.items()}
            for name in ("ejkernel", "torch_loop"):
                own = [times[name, groups] for groups in counts if (name, groups) in times]
                if own:
                    row[f"{name}_slowest_over_fastest"] = max(own) / min(own)
            if direction != "forward":
                less = [times["ejkernel", groups] - times["zeros_like_b", groups] for groups in counts]
                row["ejkernel_slowest_over_fastest_less_zeros"] = max(less) / min(less)
            rows.append(row)
            print(row, flush=True)
    return rows


def measure(rounds):
    return {"peers": peers(rounds), "by_groups": by_groups(rounds)}


if __name__ == "__main__":
    main(__doc__, measure)
