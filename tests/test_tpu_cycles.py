"""Cycles of a step of each TPU kernel, in the schedule that libtpu writes: a slower kernel is seen without a TPU."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# Of the version with which continuous integration compiles; others schedule otherwise.
LIBTPU = "0.0.42.1"
# A step with each of its parts once, v6e.
STEPS = {
    "flash_attention_forward": 2324,
    "flash_attention_backward": 3404,
    "page_attention": 2856,
    "grouped_matmul": 1021,
    "grouped_matmul_gradient_a": 1303,
    "grouped_matmul_gradient_b": 2513,
}

_COMPILE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import jax
import jax.numpy as jnp
import tpu_schedule
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from ejkernel import BwdParams, FwdParams, flash_attention, grouped_matmul, overlay, page_attention, target

device = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices[0]

def abstract(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

def flash(q, k, v):
    blocks = {"q_blocksize": 512, "kv_blocksize": 512}
    sizes = {"fwd_params": FwdParams(**blocks), "bwd_params": BwdParams(**blocks)}
    run = lambda q, k, v: flash_attention(q, k, v, causal=True, platform="pallas", **sizes)
    return jax.vjp(run, q, k, v)[1](q)

def grouped(a, b, sizes):
    tiles = {"blocksize_m": 256, "blocksize_k": 512, "blocksize_n": 512}
    with overlay(grouped_matmul=(FwdParams(**tiles), BwdParams(**tiles))):
        out, pull = jax.vjp(lambda a, b: grouped_matmul(a, b, sizes, platform="pallas"), a, b)
        return out, pull(out)

x, cache, one = abstract(1, 1024, 1, 128), abstract(8, 2, 128, 128), abstract(1, dtype=jnp.int32)
calls = {
    "flash": (flash, (x, x, x)),
    "pages": (lambda *arrays: page_attention(*arrays, platform="pallas"),
              (abstract(1, 8, 128), cache, cache, one, abstract(1, 8, dtype=jnp.int32))),
    "grouped": (grouped, (abstract(512, 512), abstract(2, 512, 512), abstract(2, dtype=jnp.int32))),
}
found = {}
for run, arrays in calls.values():
    with target(device), jax.default_device(device):
        lowered = jax.jit(run).lower(*arrays)
    _, schedules = tpu_schedule.with_schedules(sys.argv[2], lowered.compile)
    found |= {s.name.partition(".")[0]: s.step for s in schedules}
print(json.dumps(found))
"""


@pytest.mark.compiled
def test_a_step_takes_no_more_cycles(tmp_path, monkeypatch):
    try:
        version = metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        pytest.skip("libtpu is not installed")
    if version != LIBTPU:
        pytest.skip(f"libtpu {version} schedules otherwise than {LIBTPU}, whose cycles are known")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tpu_schedule

    result = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(BENCHMARKS), str(tmp_path)],
        env={**os.environ, **tpu_schedule.environment(tmp_path), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert STEPS.keys() <= found.keys()
    for name, cycles in STEPS.items():
        # Far fewer are news too: pin what the kernel takes now.
        assert found[name] == pytest.approx(cycles, rel=0.05), name
