"""Over several devices: by the compiler's own partitioning, and inside shard_map."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from examples import assert_trees_close, each_example
from examples import gradients as example_gradients
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from subjects import each_subject

from ejkernel import flash_attention

CASE = Case("sharded", frozenset({"causal", "segments", "sinks", "bias"}), batch=4, kv_heads=4, group=2, variant=4)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])


SPECS = {
    "query": P("data", None, "model"),
    "key": P("data", None, "model"),
    "value": P("data", None, "model"),
    "bias": P(None, "model"),
    "softmax_aux": P(),
    "q_segment_ids": P("data"),
    "kv_segment_ids": P("data"),
}


def loss(arrays, subject, statics):
    out, lse = flash_attention(**arrays, **statics, return_lse=True, platform=subject.platform)
    return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()


def gradients(arrays, subject, statics):
    floats = {n: arrays[n] for n in ("query", "key", "value", "bias", "softmax_aux")}
    return jax.value_and_grad(lambda f: loss({**arrays, **f}, subject, statics))(floats)


def collectives(compiled):
    return set(re.findall(r"\b(all-gather|all-to-all|collective-permute|reduce-scatter)\b", compiled.as_text()))


@each_subject("bias", "sinks", interpreted="never")
def test_partitioned_by_the_compiler(subject, mesh):
    """Batch and heads spread over devices: the right result without gathering any array."""
    arrays, statics = CASE.make()
    spread = {n: jax.device_put(x, NamedSharding(mesh, SPECS[n])) for n, x in arrays.items()}
    step = jax.jit(lambda a: gradients(a, subject, statics))
    for actual, expected in zip(
        *map(jax.tree.leaves, (step(spread), gradients(arrays, subject, statics))), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4)
    assert not collectives(step.lower(spread).compile())


@each_subject("bias", "sinks", interpreted="never")
def test_inside_shard_map(subject, mesh):
    """With the default check_vma: arrays that are shared by the devices get their gradients summed."""
    arrays, statics = CASE.make()
    specs = {n: SPECS[n] for n in arrays}
    expected = gradients(arrays, subject, statics)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(specs,), out_specs=P())
    def mapped(arrays):
        arrays = {**arrays, "softmax_aux": arrays["softmax_aux"]}
        return jax.lax.psum(loss(arrays, subject, statics), ("data", "model"))

    floats = {n: arrays[n] for n in ("query", "key", "value", "bias", "softmax_aux")}
    value, grads = jax.value_and_grad(lambda f: mapped({**arrays, **f}))(floats)
    np.testing.assert_allclose(value, expected[0], rtol=1e-4)
    for name in floats:
        np.testing.assert_allclose(grads[name], expected[1][name], rtol=2e-4, atol=2e-4, err_msg=name)


@each_subject("bias", "sinks", interpreted="never")
def test_replicated_keys_inside_shard_map(subject, mesh):
    """Queries that vary beside keys that do not."""
    q = jax.random.normal(jax.random.key(0), (4, 16, 2, 8))
    k = jax.random.normal(jax.random.key(1), (1, 20, 2, 8))

    @jax.shard_map(mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    def mapped(q, k):
        keys = jnp.broadcast_to(k, (q.shape[0], *k.shape[1:]))
        return flash_attention(q, keys, keys, platform=subject.platform)

    def plain(q, k):
        keys = jnp.broadcast_to(k, (q.shape[0], *k.shape[1:]))
        return flash_attention(q, keys, keys, platform=subject.platform)

    for wrt in (0, 1):
        actual = jax.grad(lambda *a: (mapped(*a) ** 2).sum(), wrt)(q, k)
        expected = jax.grad(lambda *a: (plain(*a) ** 2).sum(), wrt)(q, k)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@each_subject("bias", "sinks", interpreted="never")
@pytest.mark.parametrize("in_context", [True, False])
def test_explicit_meshes(subject, in_context):
    """Where array types say how they are partitioned, as `jax.make_mesh` has it by default."""
    explicit = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    arrays, statics = CASE.make()
    spread = {n: jax.device_put(x, NamedSharding(explicit, SPECS[n])) for n, x in arrays.items()}

    def run(arrays):
        return flash_attention(**arrays, **statics, return_lse=True, platform=subject.platform)

    with jax.set_mesh(explicit) if in_context else contextlib.nullcontext():
        out, lse = jax.jit(run)(spread)
        assert out.sharding.spec[:3] == P("data", None, "model")[:3]
        grads = jax.jit(jax.grad(lambda q: (run({**spread, "query": q})[0] ** 2).sum()))(spread["query"])
    expected, expected_lse = run(arrays)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-4, atol=1e-5)
    expected_grads = jax.grad(lambda q: (run({**arrays, "query": q})[0] ** 2).sum())(arrays["query"])
    np.testing.assert_allclose(grads, expected_grads, rtol=2e-4, atol=2e-4)


def batch_specs(example, arrays, axis):
    """Partition specs that split the batch axes."""
    return {
        name: jax.tree.map(lambda x: P(*[None] * example.batch[name], axis) if name in example.batch else P(), tree)  # noqa: B023
        for name, tree in arrays.items()
    }


@each_example(main=True, interpreted="never", short="last")
def test_every_operation_partitioned_by_the_compiler(subject, example, mesh):
    if not example.batch:
        pytest.skip("the call has no batch")
    arrays = example.arrays()
    expected = example_gradients(example, arrays, platform=subject.platform)[:2]
    specs = batch_specs(example, arrays, "data")
    spread = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), arrays, specs)
    actual = jax.jit(lambda arrays: example_gradients(example, arrays, platform=subject.platform)[:2])(spread)
    assert_trees_close(actual, expected, "float32", gradient=True)


@each_example(main=True, interpreted="never", short="last")
def test_every_operation_inside_shard_map(subject, example, mesh):
    """With the default check_vma: what the devices share gets its gradients summed."""
    if not example.batch:
        pytest.skip("the call has no batch")
    arrays = example.arrays()

    def loss(arrays):
        return sum(
            (jnp.where(jnp.isfinite(x), x, 0) ** 2).sum()
            for x in jax.tree.leaves(example.run(arrays, platform=subject.platform))
        )

    specs = batch_specs(example, arrays, "data")
    mapped = jax.shard_map(lambda a: jax.lax.psum(loss(a), "data"), mesh=mesh, in_specs=(specs,), out_specs=P())
    floats = example.floats(arrays)
    actual = jax.value_and_grad(lambda f: mapped({**arrays, **f}))(floats)
    expected = jax.value_and_grad(lambda f: loss({**arrays, **f}))(floats)
    assert_trees_close(actual, expected, "float32", gradient=True)


@each_example(main=True, interpreted="never")
def test_every_operation_on_explicit_meshes(subject, example):
    if not example.batch:
        pytest.skip("the call has no batch")
    explicit = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    arrays = example.arrays()
    specs = batch_specs(example, arrays, "data")
    spread = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(explicit, spec)), arrays, specs)
    with jax.set_mesh(explicit):
        actual = jax.jit(lambda arrays: example.run(arrays, platform=subject.platform))(spread)
    assert_trees_close(actual, example.run(arrays, platform=subject.platform), "float32")
