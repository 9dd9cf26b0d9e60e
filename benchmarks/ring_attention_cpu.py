"""ring_attention over devices that this machine only pretends to have: what is sent, held and computed.

    python benchmarks/ring_attention_cpu.py [--out benchmarks/results/ring_attention_cpu.json]

No times: the devices share two cores. Bytes and memory are the compiler's own, for 1 × 1024 positions a device, 8 heads
× 64, float32; the balance is counted from the steps that each device computes.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from shared import main

from ejkernel import Support, kernel_registry, ring_attention

LENGTH, HEADS, DIM = 1024, 8, 64
SHARD = 2 * LENGTH * HEADS * DIM * 4


def ring(n):
    return jax.make_mesh((n,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


def compiled(n, gradients, layout):
    mesh = ring(n)
    x = jax.ShapeDtypeStruct((1, n * LENGTH, HEADS, DIM), jnp.float32, sharding=NamedSharding(mesh, P(None, "ring")))

    def run(*a):
        return ring_attention(*a, mesh=mesh, layout=layout)

    if gradients:
        run = jax.grad(lambda *a: ring_attention(*a, mesh=mesh, layout=layout).sum(), (0, 1, 2))
    return jax.jit(run).lower(x, x, x).compile()


def sent_a_step(text):
    """Bytes of the permutes in the body of the loop round the ring: the computation that has most of them."""
    bodies = {}
    for computation in re.split(r"\n(?=%|ENTRY)", text):
        found = re.findall(r"= f32\[([\d,]+)\]\S* collective-permute(?:-start)?\(", computation)
        if found and not computation.startswith("ENTRY"):
            bodies[computation.split(" ", 1)[0]] = sum(4 * math.prod(map(int, s.split(","))) for s in found)
    return max(bodies.values(), default=0)


class Counting:
    """The XLA kernel, noting which device computes how many pairs; a causal square counts half."""

    name = "counting"

    def __init__(self):
        self.inner = kernel_registry.list_implementations("flash_attention")[0].kernel
        self.work = Counter()

    def forward(self, arrays, spec, params):
        pairs = arrays["query"].shape[1] * arrays["key"].shape[1] * (0.5 if spec.causal else 1)
        jax.debug.callback(lambda device: self.work.update({int(device): pairs}), jax.lax.axis_index("ring"))
        return self.inner.forward(arrays, spec, params)

    def backward(self, *_):
        raise NotImplementedError("only the forward is counted")


def balance(n, layout):
    """The most pairs that a device computes, over the mean."""
    kernel = Counting()
    kernel_registry.register("flash_attention", "pallas", "any", support=Support.everything())(kernel)
    try:
        x = jnp.ones((1, 16 * n, 1, 8))
        jax.block_until_ready(ring_attention(x, x, x, mesh=ring(n), layout=layout, platform="pallas"))
        jax.effects_barrier()
    finally:
        kernel_registry.unregister(kernel)
    work = np.array([kernel.work[d] for d in range(n)])
    return float(work.max() / work.mean())


def measure(_rounds):
    rows = []
    for layout in ("contiguous", "zigzag"):
        for gradients in (False, True):
            for n in (2, 4, 8):
                program = compiled(n, gradients, layout)
                text = program.as_text()
                row = {
                    "case": f"{layout}, {n} devices, {'forward+backward' if gradients else 'forward'}",
                    "temporary_mib": program.memory_analysis().temp_size_in_bytes / 2**20,
                    "sent_in_the_loop_over_a_shard": sent_a_step(text) / SHARD,
                    "gathers": len(re.findall(r" (?:all-gather|all-to-all|all-reduce)(?:-start)?\(", text)),
                    "balance": balance(n, layout),
                }
                rows.append(row)
                print(row, flush=True)
    return {"rows": rows}


if __name__ == "__main__":
    main(__doc__, measure)
