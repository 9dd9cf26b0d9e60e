"""flash_attention on a GPU beside jax.nn (cuDNN and XLA): TFLOP/s, errors against float64, temporary memory.

    python benchmarks/attention_gpu.py --out FILE

bfloat16, 16,384 tokens, heads × head dim = 2048, as FlashAttention's papers have it. Every implementation that runs here is
measured in turn, in one process; a time is the median of the runs' device-synchronised wall-clock.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from ejkernel import EjkernelError, explain, flash_attention, kernel_registry
from ejkernel.lab import reference

TOKENS, WIDTH = 16384, 2048


def median_time(run, *args, seconds=0.3):
    for _ in range(3):
        jax.block_until_ready(run(*args))
    times = []
    while sum(times) < seconds or len(times) < 5:
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def gradients(f):
    def run(q, k, v, dout):
        _, pull = jax.vjp(f, q, k, v)
        return pull(dout)

    return run


def implementations():
    for entry in kernel_registry.list_implementations("flash_attention"):
        yield (
            f"ejkernel {entry}",
            lambda q, k, v, causal, p=entry.platform: flash_attention(q, k, v, causal=causal, platform=p),
        )
    for name in ("cudnn", "xla"):
        yield (
            f"jax.nn {name}",
            lambda q, k, v, causal, n=name: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=n),
        )


def relative_error(f, dim):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 640, 4, dim)), jnp.bfloat16) for _ in range(3))
    expected = reference.attention(q, k, v, causal=True)
    actual = np.asarray(f(q, k, v, True), np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = jax.devices()[0]
    rows = []
    for dim in (64, 128, 256):
        for length in (4096, 16384):
            for causal in (False, True):
                batch, heads = TOKENS // length, WIDTH // dim
                args = [
                    jax.random.normal(k, (batch, length, heads, dim), jnp.bfloat16)
                    for k in jax.random.split(jax.random.key(0), 4)
                ]
                flops = 4 * batch * heads * dim * length * length / (2 if causal else 1)
                for name, f in implementations():
                    if name == "jax.nn xla" and length > 4096:
                        continue  # its logits alone are tens of gigabytes
                    row = {"implementation": name, "head_dim": dim, "length": length, "causal": causal}
                    try:
                        forward = jax.jit(lambda q, k, v, f=f, causal=causal: f(q, k, v, causal))
                        seconds = median_time(forward, *args[:3])
                        both = median_time(
                            jax.jit(gradients(lambda q, k, v, f=f, causal=causal: f(q, k, v, causal))), *args
                        )
                        row |= {"forward_ms": seconds * 1e3, "forward_tflops": flops / seconds / 1e12}
                        row |= {"both_ms": both * 1e3, "backward_tflops": 2.5 * flops / (both - seconds) / 1e12}
                        row["error"] = relative_error(f, dim)
                    except (EjkernelError, RuntimeError, ValueError, NotImplementedError) as error:
                        row["failed"] = str(error).splitlines()[0][:200]
                    rows.append(row)
                    print(row, flush=True)
    x = jax.ShapeDtypeStruct((1, 16384, 16, 128), jnp.bfloat16)
    compiled = (
        jax.jit(jax.grad(lambda q: flash_attention(q, q, q, causal=True).astype(jnp.float32).sum())).lower(x).compile()
    )
    print(explain(flash_attention, x, x, x, causal=True))
    result = {
        "device": device.device_kind,
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "platform": device.client.platform_version},
        "temporary_mib_16384": compiled.memory_analysis().temp_size_in_bytes / 2**20,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
