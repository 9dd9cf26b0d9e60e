"""Kernels for TPUs on several devices, and exported: compiled by libtpu for four chips, none of which is here.

Not what ``jit`` partitions by itself: the compiler asks JAX how by a callback that the runtime of present devices registers.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from test_tpu_flash_attention import TPU_ENVIRONMENT

_COMPILE = """
import json, re, sys
import jax, jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from ejkernel import flash_attention, grouped_matmul, ring_attention, target

devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices
mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "model"))
ring = Mesh(np.array(devices), ("ring",))

def abstract(*shape, mesh=mesh, spec=P(), dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

def gradients(run, arrays):
    return lambda *arrays: jax.grad(lambda *x: run(*x).astype(jnp.float32).sum(), tuple(range(len(arrays))))(*arrays)

def attention(q, k, v):
    return flash_attention(q, k, v, causal=True, platform="pallas")

def products(a, b, sizes):
    return grouped_matmul(a, b, sizes, platform="pallas")

def around(q, k, v):
    return ring_attention(q, k, v, causal=True, mesh=ring, platform="pallas")

heads = P("data", None, "model")
qkv = [abstract(2, 512, n, 128, spec=heads) for n in (4, 2, 2)]
mapped = jax.shard_map(attention, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads)
turns = [abstract(1, 2048, n, 128, mesh=ring, spec=P(None, "ring")) for n in (2, 2, 2)]
ab = abstract(512, 256, spec=P()), abstract(4, 256, 512, spec=P(None, None, "model"))
sizes = abstract(4, dtype=jnp.int32)
columns = jax.shard_map(products, mesh=mesh, in_specs=(P(), P(None, None, "model"), P()), out_specs=P(None, "model"))
calls = {
    "shard_map": gradients(mapped, qkv),
    "ring": gradients(around, turns),
}
given = {"shard_map": qkv, "ring": turns, "grouped": (*ab, sizes)}
calls["grouped"] = columns
found = {}
for name, run in calls.items():
    with target(devices[0]), jax.default_device(devices[0]):
        text = jax.jit(run).lower(*given[name]).compile().as_text()
    kernels = set(re.findall("flash_attention_forward|flash_attention_backward|grouped_matmul", text))
    moved = set(re.findall(r"\\b(all-gather|all-to-all|collective-permute|reduce-scatter)\\b", text))
    found[name] = sorted(kernels), sorted(moved)
with target("tpu-v6e"):
    x = jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.bfloat16)
    with jax.default_device(devices[0]):
        exported = jax.export.export(jax.jit(gradients(attention, (x, x, x))), platforms=["tpu"])(x, x, x)
restored = jax.export.deserialize(exported.serialize())
found["exported"] = [n for n in ("flash_attention_forward", "flash_attention_backward") if n in restored.mlir_module()], []
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_on_several_devices_and_exported():
    here = os.path.dirname(__file__)
    path = os.pathsep.join([os.path.dirname(here), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        env={**os.environ, **TPU_ENVIRONMENT, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    both = ["flash_attention_backward", "flash_attention_forward"]
    assert json.loads(result.stdout.splitlines()[-1]) == {
        "shard_map": [both, []],
        "ring": [both, ["collective-permute"]],
        "grouped": [["grouped_matmul"], []],
        "exported": [both[::-1], []],
    }
