"""A mixture-of-experts layer on `grouped_matmul`: like Mixtral 8x7B's, and like Qwen3-30B-A3B's with 128 experts.

Times the layer of `ejkernel.lab.moe` forward and with the backward, beside torch where torch is installed, and checks it and
its gradients against one that computes every expert for every token. `--fusing` also times the layer without each of the three
things that it does at once:

- Gate and up projection are one product of twice the width, so an expert's rows are read once. Store them side by side.
- The token's shares are multiplied into the activation, not into the second product's result. Each expert is linear in them, so
  this is the same; the activation is read and written anyway, and the result need not be kept for the shares' gradient.
- Rows come to their experts and back by reading alone: `order` says which token a row is, `places` where a token's rows are.
  JAX would transpose either read into sums at random places, which a GPU does slowly; a `custom_vjp` makes each the other's
  transpose.

What is left for the compiler to fuse: the softmax of the chosen logits, the activation between the products with its float32
inside, and the read of `places` with the sum over a token's rows.

    python examples/moe_layer.py --out moe_layer.json

On a GPU the layers have the models' own sizes, in bfloat16; on a CPU small ones.
"""

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import itertools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from ejkernel import EjkernelError, grouped_matmul
from ejkernel.contracts.device import describe
from ejkernel.lab import moe, workloads
from ejkernel.lab.accuracy import relative_errors
from ejkernel.lab.files import can_write, put
from ejkernel.lab.speed import BOTH, FORWARD, Job, bench
from ejkernel.utils.bursts import time_bursts

NAMES = {"moe_mixtral": "like Mixtral 8x7B", "moe_qwen3": "like Qwen3-30B-A3B"}
APART = ("gate and up apart", "shares after the second product", "sums at random places")


def layer(tokens, router, gate_up, down, *, chosen, apart=None):
    """`moe.moe_layer` step by step for ``[T, width]`` tokens, with one of the three things not fused."""
    shares, order, places, sizes = moe.routed(tokens, router, chosen)
    own = order // chosen
    if apart == APART[2]:
        rows, share = tokens[own], shares.reshape(-1)[order, None]
    else:
        rows = moe.spread(tokens, order, places)
        share = moe.spread(shares.reshape(-1, 1), order, places.reshape(-1, 1))  # as if each choice were a token
    if apart == APART[0]:  # gate_up is a pair
        gate, up = (grouped_matmul(rows, matrices, sizes) for matrices in gate_up)
    else:
        gate, up = jnp.split(grouped_matmul(rows, gate_up, sizes), 2, axis=-1)
    hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    if apart == APART[1]:
        out = (grouped_matmul(hidden.astype(tokens.dtype), down, sizes) * share).astype(tokens.dtype)
    else:
        out = grouped_matmul((hidden * share).astype(tokens.dtype), down, sizes)
    return jnp.zeros_like(tokens).at[own].add(out) if apart == APART[2] else moe.collect(out, order, places)


def with_gradients(f):
    """The result and every gradient of a function of arrays by name."""

    def run(arrays):
        def loss(arrays):
            out = f(**arrays)
            return (out * out).astype(jnp.float32).sum(), out

        grads, out = jax.grad(loss, has_aux=True)(arrays)
        return {"out": out, **grads}

    return jax.jit(run)


def errors_of(sizes, tokens=64):
    """The largest relative error of the result and of each gradient, in float32 against every expert for every token."""
    arrays = sizes.arrays(tokens, "float32")
    with jax.default_matmul_precision("highest"):
        found, expected = (
            with_gradients(functools.partial(f, chosen=sizes.chosen))(arrays) for f in (moe.moe_layer, moe.dense)
        )
    return relative_errors(found, expected)


def beside(name, tokens, peers):
    """Rows of times and errors of the layer, forward and with the backward, beside the peers that are here."""
    for what in (FORWARD, BOTH):
        for row in bench(Job(name, tokens, what, ("ejkernel", *peers))):
            kept = {key: row[key] for key in ("implementation", "ms", "tflops", "error") if row[key] is not None}
            if row["ms"]:
                kept["ms_median"] = row["median_ms"]
            yield {"direction": what, **kept} | ({"note": row["reason"]} if row["reason"] else {})


def apart(sizes, tokens, dtype):
    """Rows of times without each fusion, beside the layer that has them."""
    arrays = sizes.arrays(tokens, dtype)
    arrays["tokens"] = arrays["tokens"][0]
    halves = {**arrays, "gate_up": jnp.split(arrays["gate_up"], 2, axis=-1)}
    runners = {}
    for kind in (None, *APART):
        f, given = functools.partial(layer, chosen=sizes.chosen, apart=kind), halves if kind == APART[0] else arrays
        runners[kind, FORWARD] = functools.partial(jax.jit(lambda arrays, f=f: f(**arrays)), given)
        runners[kind, BOTH] = functools.partial(with_gradients(f), given)
    for (kind, what), times in time_bursts(runners, seconds=1.0).items():
        name = f"ejkernel, {kind}" if kind else "ejkernel, fused"
        yield {"direction": what, "implementation": name, "ms": times.best * 1e3, "ms_median": times.median * 1e3}


def shown(key, x):
    """A figure, with what it is."""
    return f"{x:.4g} {key.replace('_', ' ')}" if isinstance(x, float) else str(x)


def origin():
    """What was run, where and when."""
    versions = {}
    for package in ("jax", "jaxlib", "triton", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        "script": "examples/moe_layer.py",
        "date": date,
        "device": jax.devices()[0].device_kind,
        "versions": versions,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="default: 8192, on a CPU 256")
    parser.add_argument("--peers", nargs="*", default=["torch"], help="of torch and jax.lax.ragged_dot")
    parser.add_argument("--fusing", action="store_true", help="time the layer without each fusion too")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    if options.out:
        can_write(options.out, "--out")
    accelerator = describe().kind != "cpu"
    tokens, dtype = options.tokens or (8192 if accelerator else 256), workloads.default_dtype()
    result = {**origin(), "dtype": dtype, "layers": []}
    for name, model in NAMES.items():
        sizes = workloads.timed(name, tokens, accelerator).sizes
        call = f"{model}: {sizes.chosen} of {sizes.experts} experts, {sizes.width} × {sizes.hidden}, {tokens} tokens"
        rows = [beside(name, tokens, options.peers), *[apart(sizes, tokens, dtype)] * options.fusing]
        for row in itertools.chain(*rows):
            print(f"{call}: " + ", ".join(shown(key, x) for key, x in row.items()), flush=True)
            result["layers"].append({"call": call, **row})
            if options.out:
                put(options.out.parent, {options.out.name: (json.dumps(result, indent=1) + "\n").encode()})
    errors = {name: errors_of(workloads.LAYERS[name][1]) for name in NAMES}
    for name, model in NAMES.items():
        print(f"{model}, small, relative errors: " + ", ".join(f"{x} {e:.1e}" for x, e in errors[name].items()))
    return max(max(found.values()) for found in errors.values()) > 1e-5


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EjkernelError as error:
        sys.exit(f"error: {error}")
