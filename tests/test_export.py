"""jax.export: serialised, deserialised, and run with the same result; also for devices that are not here."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMALL_BLOCKS, named
from examples import assert_trees_close, each_example
from subjects import each_subject

from ejkernel import flash_attention, target


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


@each_example(main=True, interpreted="never")
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
