"""ring_attention over several processes: JAX's own distributed runtime, gloo on this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT = 180  # seconds, for everything that a test starts

_WORKER = """
import os, sys, time
import jax
port, count, rank, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
jax.distributed.initialize(f"localhost:{port}", count, rank, initialization_timeout=60, heartbeat_timeout_seconds=10)
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from ejkernel import flash_attention, ring_attention, ring_shard

assert len(jax.devices()) == count and len(jax.local_devices()) == 1
mesh = jax.make_mesh((count,), ("ring",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
shapes = {"query": (1, 16 * count, 4, 8), "key": (1, 16 * count, 2, 8), "value": (1, 16 * count, 2, 8)}
plain = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}

def spread(x):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(None, "ring")), lambda index: x[index])

def gradients(attend, arrays):
    def loss(arrays):
        out = attend(arrays)
        return (out ** 2).sum(), out
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)

for layout in ("contiguous", "zigzag"):
    ordered = {name: np.asarray(ring_shard(x, count, layout)) for name, x in plain.items()}
    (_, out), grads = gradients(lambda a: ring_attention(**a, layout=layout, mesh=mesh, sliding_window=(20, 0)),
                                {name: spread(x) for name, x in ordered.items()})
    (_, expected_out), expected = gradients(lambda a: flash_attention(**a, causal=True, sliding_window=(20, 0)), plain)
    for name, ours, theirs in [("out", out, expected_out), *((n, grads[n], expected[n]) for n in grads)]:
        (shard,) = ours.addressable_shards
        wanted = np.asarray(ring_shard(theirs, count, layout))[shard.index]
        error = np.abs(np.asarray(shard.data) - wanted).max()
        assert error < 5e-5, (layout, name, error)

if mode == "forever":
    step = jax.jit(lambda a: ring_attention(**a, mesh=mesh))
    arrays = {name: spread(x) for name, x in plain.items()}
    jax.block_until_ready(step(arrays))
    print("running", flush=True)
    while True:
        jax.block_until_ready(step(arrays))
        time.sleep(0.01)
print("done", flush=True)
"""


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@pytest.fixture
def ring(tmp_path):
    """Starts processes, and leaves none behind."""
    started = []

    def start(count, mode):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        port = str(free_port())
        for rank in range(count):
            log = (tmp_path / f"{rank}.log").open("w+")
            command = [sys.executable, "-c", _WORKER, port, str(count), str(rank), mode]
            started.append((subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT), log))
        return [process for process, _ in started]

    start.text = lambda rank: Path(started[rank][1].name).read_text()
    yield start
    for process, log in started:
        process.kill()
        process.wait()
        log.close()


def wait(processes, until):
    for process in processes:
        process.wait(timeout=max(1, until - time.monotonic()))


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_values_and_gradients(ring, count):
    processes = ring(count, "once")
    wait(processes, time.monotonic() + LIMIT)
    for rank, process in enumerate(processes):
        assert process.returncode == 0, ring.text(rank)[-2000:]
        assert "done" in ring.text(rank)


@pytest.mark.slow
def test_a_killed_process_fails_the_others(ring):
    """They end with an error, soon, instead of waiting for keys that never come."""
    processes = ring(3, "forever")
    end = time.monotonic() + LIMIT
    while not all("running" in ring.text(rank) for rank in range(3)):
        assert time.monotonic() < end, ring.text(0)[-2000:]
        assert all(process.poll() is None for process in processes), [ring.text(rank)[-1000:] for rank in range(3)]
        time.sleep(0.2)
    processes[1].send_signal(signal.SIGKILL)
    wait(processes, time.monotonic() + 90)
    for rank in (0, 2):
        assert processes[rank].returncode != 0
        assert "done" not in ring.text(rank)
