"""jax.export: serialised, deserialised, and run with the same result; also for devices that are not here."""

import os
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMALL_BLOCKS, named
from examples import assert_trees_close, each_example
from subjects import each_subject
from test_mosaic import HOPPER, needs_plugin

from ejkernel import explain, export_checks, flash_attention, target


def round_trip(exported):
    return jax.export.deserialize(exported.serialize(vjp_order=1))


# JAX cannot serialise the callbacks of an interpreter.
@each_subject("bias", "sinks", interpreted="never")
@pytest.mark.parametrize("case", named("everything", "everything_packed"), ids=str)
def test_values_and_gradients_survive(subject, case):
    arrays, statics = case.make()
    floats = {n: arrays[n] for n in ("query", "key", "value", "bias", "softmax_aux")}
    rest = {n: x for n, x in arrays.items() if n not in floats}

    def run(floats):
        out, _ = flash_attention(**floats, **rest, **statics, **SMALL_BLOCKS, platform=subject.platform)
        return out

    restored = round_trip(jax.export.export(jax.jit(run))(floats))
    np.testing.assert_array_equal(restored.call(floats), jax.jit(run)(floats))
    restored_grads = jax.grad(lambda f: (restored.call(f) ** 2).sum())(floats)
    for grad, expected in zip(
        *map(jax.tree.leaves, (restored_grads, jax.grad(lambda f: (run(f) ** 2).sum())(floats))), strict=True
    ):
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("device", "platform"), [("nvidia-h200", "cuda"), ("tpu-v5e", "tpu"), ("amd-mi300x", "rocm"), ("cpu", "cpu")]
)
def test_exports_for_devices_that_are_not_here(device, platform):
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)
    with target(device):
        exported = jax.export.export(
            jax.jit(lambda x: flash_attention(x, x, x, causal=True, platform="xla")), platforms=[platform]
        )(x)
    assert exported.platforms == (platform,)
    assert exported.out_avals[0].shape == x.shape


@each_example(main=True, interpreted="never", short="last")
def test_every_operation(subject, example):
    arrays = example.arrays()
    floats = example.floats(arrays)

    def run(floats):
        return example.run({**arrays, **floats}, platform=subject.platform)

    def loss(run):
        return jax.grad(lambda f: (jax.tree.leaves(run(f))[0] ** 2).sum())(floats)

    restored = round_trip(jax.export.export(jax.jit(run))(floats))
    assert_trees_close(restored.call(floats), jax.jit(run)(floats), "float32")
    assert_trees_close(loss(restored.call), loss(run), "float32", gradient=True)


@pytest.mark.parametrize(("device", "platform"), [("nvidia-h200", "cuda"), ("tpu-v5e", "tpu")])
@each_example(main=True, interpreted="never")
def test_every_operation_exports_for_devices_that_are_not_here(subject, example, device, platform):
    arrays = example.arrays()

    def run(arrays):
        return jax.vjp(lambda f: example.run({**arrays, **f}, platform=subject.platform), example.floats(arrays))[1]

    with target(device):
        exported = jax.export.export(jax.jit(run), platforms=[platform])(arrays)
    assert exported.platforms == (platform,)


# Kernels of GPUs

X = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)


def for_hopper(platform, **options):
    """An exported call that runs the platform's kernel."""
    with target("nvidia-h100"):
        if explain("flash_attention", X, X, X, causal=True, platform=platform).chosen is None:
            pytest.skip(f"{platform} is not installed")
        call = jax.jit(lambda q, k, v: flash_attention(q, k, v, causal=True, platform=platform))
        return jax.export.export(call, platforms=["cuda"], **options)(X, X, X)


@pytest.mark.parametrize(
    "platform",
    ["cudnn", pytest.param("triton", marks=pytest.mark.slow), pytest.param("pallas", marks=pytest.mark.slow)],
)
def test_exports_kernels_of_gpus(platform, monkeypatch):
    """With one argument; without it JAX takes those alone for which it vouches."""
    monkeypatch.setenv("EJKERNEL_NONDETERMINISTIC", "1")
    with target("nvidia-h100"):
        restored = round_trip(for_hopper(platform, disabled_checks=export_checks()))
    assert restored.platforms == ("cuda",)
    assert restored.has_vjp()
    if platform != "pallas":
        with pytest.raises(ValueError, match="no compatibility guarantees"):
            for_hopper(platform)


RESTORED = """
import sys
import jax, jax.export, jax.experimental.pallas.mosaic_gpu
from jax.experimental import topologies
exported = jax.export.deserialize(open(sys.argv[1], "rb").read())
topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=sys.argv[2], topology="1x1x2")
sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in exported.in_avals]
gradients = jax.grad(lambda *arrays: exported.call(*arrays).astype("float32").sum(), (0, 1, 2))
print(jax.jit(gradients).lower(*arrays).compile().as_text())
assert "ejkernel" not in sys.modules
"""


@needs_plugin
@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize(("platform", "kernel"), [("triton", "triton_kernel_call"), ("pallas", "mosaic_gpu")])
def test_restored_where_the_package_is_not_loaded(platform, kernel, tmp_path):
    """Compiled for a Hopper in another process, both directions. cuDNN compiles on a GPU alone."""
    with target("nvidia-h100"):
        serialised = for_hopper(platform, disabled_checks=export_checks()).serialize(vjp_order=1)
    (tmp_path / "exported").write_bytes(serialised)
    result = subprocess.run(
        [sys.executable, "-c", RESTORED, str(tmp_path / "exported"), HOPPER],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"},
    )
    if "Unsupported .version" in result.stderr:
        pytest.skip("this Triton writes PTX that the plugin's assembler does not know")
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count(kernel) >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("platform", ["triton", "pallas", "cudnn"])
def test_restored_runs_on_a_gpu(platform, monkeypatch):
    """The same results and gradients as the call that was exported."""
    monkeypatch.setenv("EJKERNEL_NONDETERMINISTIC", "1")
    if explain("flash_attention", X, X, X, causal=True, platform=platform).chosen is None:
        pytest.skip(f"{platform} cannot run here")
    arrays = [jax.random.normal(key, X.shape, X.dtype) for key in jax.random.split(jax.random.key(0), 3)]

    def call(q, k, v):
        return flash_attention(q, k, v, causal=True, platform=platform)

    def gradients(call):
        return jax.jit(jax.grad(lambda *arrays: (call(*arrays).astype("float32") ** 2).sum(), (0, 1, 2)))(*arrays)

    restored = round_trip(jax.export.export(jax.jit(call), disabled_checks=export_checks())(*arrays))
    np.testing.assert_array_equal(restored.call(*arrays).astype("float32"), call(*arrays).astype("float32"))
    assert_trees_close(gradients(restored.call), gradients(call), "bfloat16", gradient=True)
