"""Compiled for accelerators that are not here, by their real compilers, and kept within linear memory."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from examples import all_examples

from ejkernel import flash_attention

TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
}

_SCRIPT = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from ejkernel import explain, flash_attention, target
device = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices[0]
where = SingleDeviceSharding(device)
x = jax.ShapeDtypeStruct((1, 1024, 4, 128), jnp.bfloat16, sharding=where)
ids = jax.ShapeDtypeStruct((1, 1024), jnp.int32, sharding=where)
sinks = jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=where)

def loss(q, k, v, sinks, ids):
    out = flash_attention(q, k, v, causal=True, sliding_window=(300, 0), logits_soft_cap=30.0, softmax_aux=sinks,
                          q_segment_ids=ids, kv_segment_ids=ids, dropout_prob=0.1, dropout_seed=1)
    return out.astype(jnp.float32).sum()

with target(device) as info:
    compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(x, x, x, sinks, ids).compile()
print(json.dumps({"name": info.name, "temporary": compiled.memory_analysis().temp_size_in_bytes}))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("topology", "name"), [("v5e:2x2", "tpu-v5e"), pytest.param("v6e:2x2", "tpu-v6e", marks=pytest.mark.slow)]
)
def test_xla_flash_attention_compiles_for_tpus(topology, name):
    environment = {**os.environ, **TPU_ENVIRONMENT, "XLA_FLAGS": ""}
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT, topology], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    seen = json.loads(result.stdout.splitlines()[-1])
    assert seen["name"] == name
    assert seen["temporary"] < 256 * 2**20


_EVERY_OPERATION = """
import json, sys
import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from ejkernel import target
import examples
device = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices[0]
where = SingleDeviceSharding(device)
compiled = []
for example in {e.operation: e for e in examples.all_examples()}.values():
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), example.arrays())
    names = [name for name in example.differentiable if name in arrays]

    def gradients(arrays):
        def loss(floats):
            return jax.tree.leaves(example.run({**arrays, **floats}))[0].sum()
        return jax.grad(loss)({name: arrays[name] for name in names})

    with target(device):
        jax.jit(gradients).lower(arrays).compile()
    compiled.append(example.operation)
print(json.dumps(compiled))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_every_operation_compiles_for_tpus():
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.path.dirname(here), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **TPU_ENVIRONMENT, "XLA_FLAGS": "", "PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, "-c", _EVERY_OPERATION, "v5e:2x2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert set(json.loads(result.stdout.splitlines()[-1])) == {example.operation for example in all_examples()}


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
def test_memory_grows_with_the_length_not_its_square(gradients):
    def temporary(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)

        def run(x):
            return flash_attention(x, x, x, causal=True).sum()

        return jax.jit(jax.grad(run) if gradients else run).lower(x).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(4096), temporary(16384)
    assert long < 6 * short
    assert long < 16384 * 16384
