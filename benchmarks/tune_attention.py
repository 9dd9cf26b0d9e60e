"""Measure flash_attention for the shapes of real models on this device, and write the table that the package ships.

    python benchmarks/tune_attention.py --out ejkernel/tuned/nvidia-h200/flash_attention.json

Every implementation that runs here is timed with each of its parameters, forward and backward apart.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib

from ejkernel import autotune, flash_attention
from ejkernel.ops.core.device import describe


def llama(length, batch=1):
    return {"q": (batch, length, 32, 128), "kv": (batch, length, 8, 128), "causal": True}


SHAPES = {
    "Llama 3 8B, 4k": llama(4096, 2),
    "Llama 3 8B, 8k": llama(8192),
    "Gemma 2 9B, local layers": {
        "q": (1, 8192, 16, 256), "kv": (1, 8192, 8, 256), "causal": True, "sliding_window": (4095, 0), "logits_soft_cap": 50.0,
    },
    "GPT-OSS, local layers": {"q": (1, 8192, 64, 64), "kv": (1, 8192, 8, 64), "causal": True, "sliding_window": (127, 0), "sinks": True},
    "BERT, base": {"q": (32, 512, 12, 64), "kv": (32, 512, 12, 64)},
}  # fmt: skip


def tune(shape):
    shape = dict(shape)
    q_shape, kv_shape = shape.pop("q"), shape.pop("kv")
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, (q_shape, kv_shape, kv_shape), strict=True)
    )
    if shape.pop("sinks", False):
        shape["softmax_aux"] = jnp.zeros((q_shape[2], 1))

    def loss(q, k, v):
        return flash_attention(q, k, v, **shape).astype(jnp.float32).sum()

    jax.block_until_ready(autotune(jax.jit(jax.grad(loss, (0, 1, 2))))(q, k, v))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = jax.devices()[0]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EJKERNEL_CACHE_DIR"] = folder
        for name, shape in SHAPES.items():
            start = time.perf_counter()
            tune(shape)
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        entries = [json.loads(path.read_text()) for path in sorted(Path(folder).rglob("*.json"))]
    kept = ("direction", "implementation", "version", "call")
    table = {
        "device": describe(device).name,
        "measured": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "runtime": device.client.platform_version},
        "entries": [{**{name: e["key"][name] for name in kept}, **e["value"]} for e in entries],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(table, indent=1) + "\n")
    for entry in table["entries"]:
        print(entry["direction"], entry["call"]["features"], entry["params"], f"{entry['seconds'] * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
