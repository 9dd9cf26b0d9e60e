"""flash_attention in float32 on a GPU: time and error of the Triton kernels, with default tiles and others.

    python benchmarks/float32_gpu.py --out FILE [--platforms triton,xla] [--tiles]

Causal calls of 2 × 2048 with 16 heads × 64 and 8 × 128, forward and forward with backward. Rates count the visible half of
the products: two forward, five backward. Errors are by norm, against float64. ``--tiles`` times what autotuning would try.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from shared import gpu_options, keep

from ejkernel import BwdParams, FwdParams, explain, flash_attention, kernel_registry
from ejkernel.contracts.device import describe
from ejkernel.utils.bursts import time_bursts

BATCH, LENGTH = 2, 2048
CALLS = ((16, 64), (8, 128))


def both(attention):
    """A program of the forward and all gradients."""

    def run(q, k, v, do):
        out, pull = jax.vjp(attention, q, k, v)
        return out, *pull(do)

    return run


def dense(q, k, v):
    """The same in plain jnp."""
    length = q.shape[1]
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    logits = jnp.where(jnp.tri(length, dtype=bool), logits, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, axis=-1), v)


def candidates(arrays, options):
    """``(name, parameters of a call)``: the default, and with ``--tiles`` all that tuning would try."""
    yield "default", {}
    if not options.tiles:
        return
    told = explain(flash_attention, *arrays[:3], causal=True, platform="triton")
    (entry,) = (e for e in kernel_registry.list_implementations("flash_attention") if e.platform.value == "triton")
    for direction, kind in (("forward", "fwd_params"), ("backward", "bwd_params")):
        for params in entry.kernel.space(told.call.shapes, told.call.spec, describe(), direction):
            yield f"{direction} {tuple(params.to_dict().values())}", {kind: params}


def measure(heads, dim, options):
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (BATCH, LENGTH, heads, dim), jnp.float32) for key in keys]
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in arrays]
        expected = [np.asarray(x) for x in jax.jit(both(dense))(*wide)]
    flops = 2 * 2 * BATCH * heads * dim * LENGTH * (LENGTH + 1) // 2
    programs, errors = {}, {}
    for name in options.platforms.split(","):
        for tiles, params in candidates(arrays, options) if name == "triton" else [("default", {})]:
            kinds = set(map(type, params.values()))

            def attention(q, k, v, name=name, params=params):
                return flash_attention(q, k, v, causal=True, platform=name, **params)

            try:
                if not kinds or FwdParams in kinds:
                    forward = jax.jit(attention).lower(*arrays[:3]).compile()
                    programs[name, tiles, "forward"] = lambda run=forward: run(*arrays[:3])
                if not kinds or BwdParams in kinds:
                    backward = jax.jit(both(attention)).lower(*arrays).compile()
                    programs[name, tiles, "forward and backward"] = lambda run=backward: run(*arrays)
                    found = backward(*arrays)
                    errors[name, tiles, "forward and backward"] = {
                        f"error_{what}": float(np.linalg.norm(np.asarray(a, np.float64) - e) / np.linalg.norm(e))
                        for what, a, e in zip(("out", "dquery", "dkey", "dvalue"), found, expected, strict=True)
                    }
            except Exception as error:
                print(f"{name} {tiles}: {type(error).__name__}: {str(error)[:160]}", flush=True)
    for (name, tiles, direction), run in time_bursts(programs, rounds=options.rounds).items():
        if run.error is not None:
            print(f"{name} {tiles}: {run.error}")
            continue
        work = flops if direction == "forward" else flops * 7 // 2
        yield {
            "call": f"{BATCH} × {LENGTH}, {heads} × {dim}, causal",
            "direction": direction,
            "platform": name,
            "tiles": tiles,
            "ms": run.best * 1e3,
            "median_ms": run.median * 1e3,
            "teraflops_per_second": work / run.best / 1e12,
            **errors.get((name, tiles, direction), {}),
        }


def main():
    parser = gpu_options(__doc__)
    parser.add_argument("--platforms", default="triton,xla")
    parser.add_argument("--tiles", action="store_true")
    options = parser.parse_args()
    rows = itertools.chain.from_iterable(measure(heads, dim, options) for heads, dim in CALLS)
    keep(options.out, rows, "triton", "jax-triton")


if __name__ == "__main__":
    main()
