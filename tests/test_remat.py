"""Under jax.checkpoint: the same gradients, and what is asked to be recomputed is."""

import jax
import jax.numpy as jnp
import pytest
from cases import SMALL_BLOCKS, named, taken
from examples import assert_trees_close, each_example
from subjects import each_subject, parameter
from tolerances import assert_same

from ejkernel import flash_attention
from ejkernel.ops.flash_attention import OPERATION

pytestmark = pytest.mark.typed

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def needs_no_effects(subject):
    if subject.in_pallas_interpreter:
        pytest.skip("jax.checkpoint refuses the effects of Mosaic's interpreter")


@pytest.mark.parametrize(
    ("subject", "case", "policy"),
    [
        parameter(subject, case, policy, slow=subject.interpreted)
        for policy in POLICIES
        for subject, case in taken(named("everything"))
    ],
)
def test_gradients_are_the_same(subject, case, policy):
    needs_no_effects(subject)
    arrays, statics = case.make(subject.dtype)
    floats = {name: arrays[name] for name in OPERATION.gradients if name in arrays}

    def loss(floats):
        found = flash_attention(**{**arrays, **floats}, **statics, **case.blocks, platform=subject.platform)
        return sum(jnp.sin(jnp.where(jnp.isfinite(x), x, 0)).astype(jnp.float32).sum() for x in jax.tree.leaves(found))

    expected = jax.jit(jax.grad(loss))(floats)
    actual = jax.jit(jax.grad(jax.checkpoint(loss, policy=POLICIES[policy])))(floats)
    for name in floats:
        assert_same(actual[name], expected[name], subject.dtype, what=name)


@each_subject("causal", interpreted="short")
def test_layers_under_scan(subject):
    """Remat inside a scan over layers, as models have it."""
    needs_no_effects(subject)
    dim = subject.dim(8)
    weights = jax.random.normal(jax.random.key(0), (2, dim, dim), subject.dtype) * dim**-0.5
    x = jax.random.normal(jax.random.key(1), (1, 21, 1, dim), subject.dtype)

    def layer(x, w):
        return flash_attention(x @ w, x, x, causal=True, **SMALL_BLOCKS, platform=subject.platform), None

    def loss(weights, wrap):
        return (jax.lax.scan(wrap(layer), x, weights)[0].astype(jnp.float32) ** 2).sum()

    expected = jax.grad(loss)(weights, lambda f: f)
    actual = jax.grad(loss)(weights, jax.checkpoint)
    assert_same(actual, expected, subject.dtype)
    assert jnp.abs(expected).max() > 1e-3


@each_example(main=True, differentiates=True, short="last")
def test_every_operation(subject, example):
    if subject.in_pallas_interpreter:
        pytest.skip("jax.checkpoint refuses the effects of Pallas' interpreters")
    arrays = example.arrays(subject.dtype)

    def loss(floats):
        return jnp.sin(jax.tree.leaves(example.run({**arrays, **floats}, platform=subject.platform))[0]).sum()

    floats = example.floats(arrays)
    expected = jax.jit(jax.grad(loss))(floats)
    actual = jax.jit(jax.grad(jax.checkpoint(loss)))(floats)
    assert_trees_close(actual, expected, subject.dtype, gradient=True)
