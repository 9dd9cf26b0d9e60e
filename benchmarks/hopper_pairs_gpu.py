"""Bias, masks and dropout of flash_attention on a Hopper GPU: the Pallas kernels beside Triton's, and the plain call.

    python benchmarks/hopper_pairs_gpu.py [--out FILE] [--only NAME] [--shrink N]

All programs of a call are timed together (`ejkernel.utils.bursts` says why): forward, and forward with all gradients,
that of the bias included where the name says so. Without a GPU, `--shrink 64` shows that the calls are made.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
from shared import environment

import ejkernel
from ejkernel.utils.bursts import time_bursts

PLATFORMS = ("pallas", "triton")


def cases(shrink):
    """By name: shape, static options, the shapes of bias and mask, whether the bias wants a gradient."""
    b, s, h, d = 2, 8192 // shrink, 16, 128
    long = (b, s, h, d), {"causal": True}
    t5 = (2, 2048 // shrink, 16, 64), {}
    t = t5[0][1]
    dropout = {"dropout_prob": 0.1, "dropout_seed": 1}
    return {
        "8k: plain": (*long, {}, False),
        "8k: bias of keys (ALiBi)": (*long, {"bias": (1, h, 1, s)}, False),
        "8k: bias of keys, dbias": (*long, {"bias": (1, h, 1, s)}, True),
        "8k: padding mask": (*long, {"attention_mask": (b, 1, 1, s)}, False),
        "8k: mask of pairs": (*long, {"attention_mask": (b, 1, s, s)}, False),
        "8k: bias of pairs": (*long, {"bias": (1, h, s, s)}, False),
        "8k: bias of pairs, dbias": (*long, {"bias": (1, h, s, s)}, True),
        "8k: dropout": (long[0], {**long[1], **dropout}, {}, False),
        "T5: plain": (*t5, {}, False),
        "T5: bias of pairs": (*t5, {"bias": (1, 16, t, t)}, False),
        "T5: bias of pairs, dbias": (*t5, {"bias": (1, 16, t, t)}, True),
        "T5: padding mask": (*t5, {"attention_mask": (2, 1, 1, t)}, False),
        "T5: dropout": (t5[0], {**t5[1], **dropout}, {}, False),
    }


def programs(shape, options, more, wants_bias, platform):
    """Forward, and forward with gradients; their arguments."""
    keys = jax.random.split(jax.random.key(0), 5)
    arrays = {
        n: jax.random.normal(k, shape, jnp.bfloat16) for n, k in zip(("query", "key", "value"), keys, strict=False)
    }
    if "bias" in more:
        arrays["bias"] = jax.random.normal(keys[3], more["bias"], jnp.float32)
    if "attention_mask" in more:
        arrays["attention_mask"] = jax.random.uniform(keys[4], more["attention_mask"]) < 0.9
    floats = {n for n in arrays if n in ("query", "key", "value") or (n == "bias" and wants_bias)}

    def forward(arrays):
        return ejkernel.flash_attention(**arrays, **options, platform=platform)

    def both(arrays):
        rest = {n: x for n, x in arrays.items() if n not in floats}
        out, pull = jax.vjp(lambda f: forward({**f, **rest}), {n: arrays[n] for n in floats})
        return out, pull(out)

    return {"forward": jax.jit(forward), "both": jax.jit(both)}, arrays


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--shrink", type=int, default=1, help="divide lengths; kernels are then chosen by the library")
    options = parser.parse_args()
    platforms = PLATFORMS if options.shrink == 1 else (None,)
    results = {}
    for name, case in cases(options.shrink).items():
        if options.only not in name:
            continue
        made = {platform: programs(*case, platform) for platform in platforms}
        runners = {
            f"{platform} {direction}": lambda f=f, arrays=arrays: f(arrays)
            for platform, (functions, arrays) in made.items()
            for direction, f in functions.items()
        }
        found = time_bursts(runners)
        results[name] = {which: times.best for which, times in found.items() if times.error is None}
        for which, times in found.items():
            print(f"{name:28} {which:16}", times.error or f"{times.best * 1e3:.3f} ms", flush=True)
    if options.out:
        options.out.write_text(json.dumps({**environment("triton", "jax-triton"), "seconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
