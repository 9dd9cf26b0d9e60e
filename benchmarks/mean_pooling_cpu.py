"""mean_pooling on XLA beside jnp.mean over the same array, on a CPU: ratios within one process.

    python benchmarks/mean_pooling_cpu.py [--out benchmarks/results/mean_pooling_cpu.json]

float32, 32768 tokens × 512: as [16, 2048, 512] with masks, and packed as 16 to 4096 sequences. ``jnp.mean`` is the mean
over the second axis of [16, 2048, 512], which knows no mask; ``jnp.where`` is the usual masked mean. torch is measured
if it is installed: its mean of the same array. Bursts of all implementations are timed in random order, each after a
pause, and the best of each counts.
"""

import jax
import jax.numpy as jnp
import numpy as np
from shared import best_of, jax_run, main, torch_version

from ejkernel import mean_pooling

BATCH, LENGTH, FEATURES = 16, 2048, 512


def gradient(f):
    """Forward and backward: the loss needs the means' values."""
    return jax.grad(lambda x, *rest: (f(x, *rest) ** 2).sum())


def where_mean(x, mask):
    return jnp.where(mask[..., None], x, 0).sum(1) / jnp.maximum(mask.sum(1), 1)[:, None]


def packed(x, offsets):
    return mean_pooling(x, cu_seqlens=offsets)


def torch_runs(x):
    if not torch_version():
        return {}
    import torch

    tensor = torch.tensor(np.asarray(x)).requires_grad_()

    def forward():
        with torch.no_grad():
            tensor.mean(1)

    def both():
        torch.autograd.grad((tensor.mean(1) ** 2).sum(), tensor)

    return {"forward": forward, "forward+backward": both}


def cases():
    """Ours, by name: a function and its arguments."""
    x = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, FEATURES))
    flat = x.reshape(-1, FEATURES)
    random = jax.random.bernoulli(jax.random.key(1), 0.8, (BATCH, LENGTH))
    half = jnp.arange(LENGTH) < jnp.linspace(1, LENGTH, BATCH).astype(jnp.int32)[:, None]
    runs = {
        "no mask": (mean_pooling, x),
        "random mask": (mean_pooling, x, random),
        "padding mask": (mean_pooling, x, half),
        "jnp.where": (where_mean, x, random),
    }
    for sequences in (16, 256, 4096):
        offsets = jnp.linspace(0, BATCH * LENGTH, sequences + 1).astype(jnp.int32)
        runs[f"packed {sequences}"] = (packed, flat, offsets)
    # One sequence of half the tokens, the others ever shorter.
    uneven = jnp.asarray([0, *(BATCH * LENGTH * (1 - 0.5 ** np.arange(1, BATCH + 1))).astype(int)], jnp.int32)
    runs["packed 16 uneven"] = (packed, flat, uneven)
    return x, runs


def compare(rounds):
    x, ours = cases()
    theirs = torch_runs(x)
    rows = []
    for what, wrap in (("forward", lambda f: f), ("forward+backward", gradient)):
        runs = {name: jax_run(wrap(f), *args) for name, (f, *args) in ours.items()}
        runs["jnp.mean"] = jax_run(wrap(lambda x: jnp.mean(x, axis=1)), x)
        if theirs:
            runs["torch"] = theirs[what]
        times = best_of(runs, rounds)
        for name in ours:
            row = {
                "case": f"{name} {what}",
                "ms": times[name] * 1e3,
                "jnp.mean_ms": times["jnp.mean"] * 1e3,
                "time_over_jnp.mean": times[name] / times["jnp.mean"],
            }
            if theirs:
                row["time_over_torch.mean"] = times[name] / times["torch"]
            rows.append(row)
            print(row, flush=True)
    return rows


def measure(rounds):
    return {"sizes": {"batch": BATCH, "length": LENGTH, "features": FEATURES}, "results": compare(rounds)}


if __name__ == "__main__":
    main(__doc__, measure)
