"""No operation leaves a tracer behind: under ``jax.checking_leaks()``, every way to call it, forward and gradients."""

import gc

import jax
import jax.numpy as jnp
import pytest
from cases import each_case, named
from examples import each_example
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel import Platform, flash_attention, kernel_registry, ring_attention
from ejkernel.ops.flash_attention import OPERATION

HOW = ("eager", "jit", "vmap", "shard_map")


@pytest.fixture(autouse=True)
def only_new_objects():
    """JAX looks for what refers to a trace among all objects, after each; what was there before cannot hold its tracers."""
    gc.freeze()
    yield
    gc.unfreeze()


def forward_and_gradients(run, floats):
    """Functions of the differentiable arguments: the outputs, and their gradients."""

    def outputs(floats):
        return jax.tree.leaves(run(floats))

    def gradients(floats):
        return jax.grad(lambda floats: sum(x.astype(jnp.float32).sum() for x in outputs(floats)))(floats)

    return outputs, gradients


def check(run, floats, how):
    """Tracers are made while JAX traces, so nothing is compiled but what an eager call needs."""
    mesh = jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    for function in forward_and_gradients(run, floats):
        with jax.checking_leaks():
            if how == "eager":
                function(floats)
            elif how == "jit":
                jax.jit(function).lower(floats)
            elif how == "vmap":
                jax.jit(jax.vmap(function)).lower(jax.tree.map(lambda x: jnp.stack([x, x]), floats))
            else:
                mapped = jax.shard_map(function, mesh=mesh, in_specs=(P(),), out_specs=P())
                jax.jit(mapped).lower(floats)


@pytest.mark.parametrize("how", HOW)
@each_case(named("everything", "everything_packed"))
def test_flash_attention(subject, case, how):
    if subject.platform in (Platform.PALLAS, Platform.CUDNN):
        pytest.skip("JAX's own Pallas Mosaic GPU and custom partitioning, which cuDNN is reached by, keep tracers")
    arrays, statics = case.make(subject.dtype)
    floats = {name: arrays[name] for name in OPERATION.gradients if name in arrays}

    def run(floats):
        return flash_attention(**{**arrays, **floats}, **statics, **case.blocks, platform=subject.platform)

    check(run, floats, how)


@pytest.mark.parametrize("how", HOW)
@each_example(main=True, interpreted="never", short="last")
def test_every_operation(subject, example, how):
    arrays = example.arrays(subject.dtype)

    def run(floats):
        return example.run({**arrays, **floats}, platform=subject.platform)

    check(run, example.floats(arrays), how)


@pytest.mark.parametrize("how", HOW)
def test_ring_attention(how):
    mesh = jax.make_mesh((2,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = jnp.ones((1, 16, 2, 8))

    def whole(floats):
        return ring_attention(**floats, mesh=mesh)

    @jax.shard_map(mesh=mesh, in_specs=(P(None, "ring"),), out_specs=P(None, "ring"))
    def inside(floats):
        return ring_attention(**floats)

    run, how = (inside, "jit") if how == "shard_map" else (whole, how)
    check(run, {"query": x, "key": x, "value": x}, how)


def test_all_operations_are_here():
    """Those with examples, and the two that have tests of their own above."""
    (parameters,) = (mark for mark in test_every_operation.pytestmark if "example" in mark.args[0])
    covered = {parameter.values[1].operation for parameter in parameters.args[1]}
    operations = {name for name in kernel_registry.list_algorithms() if kernel_registry.operation(name)}
    assert covered | {"flash_attention", "ring_attention"} == operations
