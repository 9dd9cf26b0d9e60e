"""mean_pooling on a GPU: errors against float64, then times of Triton and XLA beside a copy, in several tiles.

    python benchmarks/mean_pooling_gpu.py --out FILE [--seconds 60]

Bytes are those that a direction cannot do without: rows that count are read, and the gradient of every row is written. A
case has the tiles of `space` timed together, with XLA's and the copy: bursts in random order, the best of each counts.
"""

import argparse
import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from shared import environment, turn

from ejkernel import BwdParams, FwdParams, mean_pooling, overlay
from ejkernel.utils.bursts import time_bursts

MILLION = 1e6
# Rows a chunk, features a tile, warps, stages; None: the defaults.
FORWARD = (
    None, (64, 1024, 4, 1), (128, 1024, 4, 1), (256, 1024, 4, 1), (64, 1024, 4, 3), (128, 1024, 4, 3), (256, 1024, 8, 1),
    (128, 512, 4, 1), (128, 512, 4, 3), (512, 256, 4, 1), (512, 256, 4, 3), (1024, 128, 4, 2), (4096, 128, 4, 3),
)  # fmt: skip
BACKWARD = (None, (256, 4), (512, 4), (1024, 4), (1024, 8), (1024, 2))


def masked(batch, length, features, rng, dtype="bfloat16"):
    """A case with lengths drawn at random: the call's arrays, and the rows that count."""
    lengths = rng.integers(1, length + 1, batch)
    mask = np.arange(length) < lengths[:, None]
    return {"inputs": (batch, length, features), "dtype": dtype, "mask": mask}


def packed(tokens, sequences, features, rng, dtype="bfloat16", even=False):
    """A case of packed sequences, of equal or of random lengths."""
    cuts = np.linspace(0, tokens, sequences + 1) if even else rng.integers(0, tokens + 1, sequences + 1)
    offsets = np.sort(cuts).astype(np.int32)
    offsets[0], offsets[-1] = 0, tokens
    return {"inputs": (tokens, features), "dtype": dtype, "cu_seqlens": offsets}


def cases(rng):
    """By name."""
    yield "64x4096x1024, masked", masked(64, 4096, 1024, rng)
    for sequences in (16, 256, 4096):
        yield f"packed 65536x1024, {sequences} sequences", packed(65536, sequences, 1024, rng)
    yield "packed 65536x1024, 8 tokens each", packed(65536, 8192, 1024, rng, even=True)
    yield "64x4096x1024, whole", {"inputs": (64, 4096, 1024), "dtype": "bfloat16"}


def small_cases(rng):
    """For errors: odd sizes, empty sequences, a mask with holes."""
    holes = rng.random((5, 300)) < 0.5
    holes[2] = False
    yield "holes", {"inputs": (5, 300, 200), "dtype": "float32", "mask": holes}
    yield "masked", masked(7, 1000, 1024, rng)
    yield "whole, odd", {"inputs": (3, 77, 33), "dtype": "float16"}
    offsets = np.asarray([0, 0, 5, 5, 300, 301, 1500], np.int32)
    yield "packed, empty, padded", {"inputs": (1600, 520), "dtype": "bfloat16", "cu_seqlens": offsets}
    yield "packed", packed(4096, 50, 1024, rng, "float32")


def counted(case):
    """Rows that count, all rows, and sequences."""
    if "mask" in case:
        return int(case["mask"].sum()), case["mask"].size, len(case["mask"])
    if "cu_seqlens" in case:
        return int(case["cu_seqlens"][-1]), case["inputs"][0], len(case["cu_seqlens"]) - 1
    return int(np.prod(case["inputs"][:2])), int(np.prod(case["inputs"][:2])), case["inputs"][0]


def call(case, platform):
    """``inputs → means``."""
    mask = jnp.asarray(case["mask"]) if "mask" in case else None
    offsets = jnp.asarray(case["cu_seqlens"]) if "cu_seqlens" in case else None
    return lambda x: mean_pooling(x, mask, cu_seqlens=offsets, platform=platform)


def expected(x, cotangent, case):
    """Means and gradients in float64."""
    x, cotangent, grad = x.astype(np.float64), cotangent.astype(np.float64), np.zeros(x.shape)
    means = np.zeros(cotangent.shape)
    for index in range(len(means)):
        if "cu_seqlens" in case:
            rows = np.s_[case["cu_seqlens"][index] : case["cu_seqlens"][index + 1]]
            own, back = x[rows], grad[rows]
            means[index] = own.mean(0) if len(own) else 0
            back[:] = cotangent[index] / max(1, len(own))
        else:
            keep = case["mask"][index] if "mask" in case else np.ones(x.shape[1], bool)
            means[index] = x[index][keep].mean(0) if keep.any() else 0
            grad[index][keep] = cotangent[index] / max(1, keep.sum())
    return means, grad


def hidden(case):
    """Rows that no mean may read, as an index."""
    if "cu_seqlens" in case:
        return np.arange(case["inputs"][0]) >= case["cu_seqlens"][-1]
    return ~case["mask"] if "mask" in case else np.zeros(case["inputs"][:2], bool)


def check(name, case, rng):
    """Errors of a case whose hidden rows are NaN, and whether reruns have the same bits."""
    run = call(case, "triton")
    x = np.array(jnp.asarray(rng.standard_normal(case["inputs"]), case["dtype"]))
    x[hidden(case)] = np.nan
    both = jax.jit(lambda x, d: (lambda out, pull: (out, pull(d)[0]))(*jax.vjp(run, x)))
    shape = jax.eval_shape(run, x).shape
    cotangent = jnp.asarray(rng.standard_normal(shape), case["dtype"])
    found = jax.tree.map(np.asarray, both(x, cotangent))
    again = jax.tree.map(np.asarray, both(x, cotangent))
    repeats = all(a.tobytes() == b.tobytes() for a, b in zip(found, again, strict=True))
    wanted = expected(x, np.asarray(cotangent), case)
    errors = [np.abs(f.astype(np.float64) - w).max() / np.abs(w).max() for f, w in zip(found, wanted, strict=True)]
    row = {"case": f"{name}, {case['dtype']}", "implementation": "triton"}
    return {**row, "error_output": float(errors[0]), "error_inputs": float(errors[1]), "repeats": repeats}


def timed(name, case, deadline, options):
    """A row for each implementation and tile of a case."""
    x = jax.random.normal(jax.random.key(0), case["inputs"], case["dtype"])
    valid, rows, sequences = counted(case)
    row = x.shape[-1] * x.dtype.itemsize
    for direction in ("forward", "backward"):
        if time.time() > deadline:
            return
        runs, moved = {}, (valid if direction == "forward" else rows) * row + sequences * row
        tiles = (FORWARD if direction == "forward" else BACKWARD)[: 1 if options.few else None]
        for label, platform, params in [("xla", "xla", None), *((of(t), "triton", t) for t in tiles)]:
            run = call(case, platform)
            if direction == "forward":
                argument, function = x, run
            else:
                argument = jax.random.normal(jax.random.key(1), jax.eval_shape(run, x).shape, case["dtype"])
                function = functools.partial(pull_of, run, jax.ShapeDtypeStruct(x.shape, x.dtype))
            with overlay(mean_pooling=parameters(direction, params)):
                try:
                    runs[label] = functools.partial(jax.jit(function).lower(argument).compile(), argument)
                except Exception as error:
                    yield {"case": name, "implementation": label, "direction": direction, "failed": str(error)[:200]}
        with turn(options.out):
            found = time_bursts(runs, rounds=5, seconds=0.2, pause=0.003)
        for label, times in found.items():
            own = {"case": name, "implementation": label, "direction": direction}
            if times.error is not None:
                yield {**own, "failed": str(times.error)[:200]}
            else:
                yield {**own, "us": times.best * MILLION, "terabytes_per_second": moved / times.best / 1e12}


def pull_of(run, like, cotangent):
    """The gradient alone: of zeros, which the compiler drops, for a mean's gradient does not depend on what is averaged."""
    return jax.vjp(run, jnp.zeros(like.shape, like.dtype))[1](cotangent)[0]


def of(tiles):
    """What an implementation in such tiles is called."""
    return "triton" if tiles is None else f"triton {' '.join(map(str, tiles))}"


def parameters(direction, tiles):
    """For ``overlay``; the other direction has its defaults."""
    if tiles is None:
        return FwdParams(), BwdParams()
    if direction == "backward":
        return FwdParams(), BwdParams(blocksize_n=tiles[0], num_warps=tiles[1])
    rows, features, warps, stages = tiles
    return FwdParams(blocksize_m=rows, blocksize_n=features, num_warps=warps, num_stages=stages), BwdParams()


def copies(sizes=(128, 512)):
    """A plain copy, of so many MiB: the roof."""
    for mebibytes in sizes:
        x = jnp.zeros(mebibytes * 2**19, jnp.bfloat16)
        times = time_bursts({"copy": functools.partial(jax.jit(lambda x: -x), x)}, rounds=3, seconds=0.1)["copy"]
        bandwidth = 2 * x.nbytes / times.best / 1e12
        own = {"case": f"copy of {mebibytes} MiB", "implementation": "copy", "direction": "forward"}
        yield {**own, "us": times.best * MILLION, "terabytes_per_second": bandwidth}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--errors-only", action="store_true")
    parser.add_argument("--few", action="store_true", help="the default tiles alone")
    options = parser.parse_args()
    deadline = time.time() + options.seconds
    rng = np.random.default_rng(0)
    result = {**environment("triton", "jax-triton"), "errors": [], "times": []}

    def kept(part, row):
        result[part].append(row)
        print("  ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()), flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    for name, case in small_cases(rng):
        try:
            with turn(options.out):
                kept("errors", check(name, case, rng))
        except Exception as error:
            kept("errors", {"case": name, "implementation": "triton", "failed": str(error)[:300]})
    if options.errors_only:
        return
    with turn(options.out):
        roofs = list(copies())
    for row in roofs:
        kept("times", row)
    for name, case in cases(rng):
        try:
            for row in timed(name, case, deadline, options):
                kept("times", row)
        except Exception as error:
            kept("times", {"case": name, "implementation": "triton", "failed": str(error)[:300]})


if __name__ == "__main__":
    main()
