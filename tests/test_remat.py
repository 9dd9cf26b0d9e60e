"""Under jax.checkpoint: the same gradients, and what is asked to be recomputed is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import COMBINED, SMALL_BLOCKS
from conftest import runnable
from examples import assert_trees_close, main_examples

from ejkernel import flash_attention

IMPLEMENTATIONS = runnable("flash_attention")
POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_the_same(entry, policy):
    arrays, statics = next(c for c in COMBINED if c.name == "everything").make()
    floats = {name: arrays[name] for name in ("query", "key", "value", "bias", "softmax_aux")}

    def loss(floats):
        out, lse = flash_attention(**{**arrays, **floats}, **statics, **SMALL_BLOCKS, platform=entry.platform)
        return jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    expected = jax.jit(jax.grad(loss))(floats)
    actual = jax.jit(jax.grad(jax.checkpoint(loss, policy=POLICIES[policy])))(floats)
    for name in floats:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
def test_layers_under_scan(entry):
    """Remat inside a scan over layers, as models have it."""
    weights = jax.random.normal(jax.random.key(0), (3, 8, 8)) * 0.3
    x = jax.random.normal(jax.random.key(1), (2, 21, 2, 8))

    def layer(x, w):
        return flash_attention(x @ w, x, x, causal=True, **SMALL_BLOCKS, platform=entry.platform), None

    def loss(weights, wrap):
        return (jax.lax.scan(wrap(layer), x, weights)[0] ** 2).sum()

    expected = jax.grad(loss)(weights, lambda f: f)
    actual = jax.grad(loss)(weights, jax.checkpoint)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert jnp.abs(expected).max() > 1e-3


@main_examples()
def test_every_operation(entry, example):
    arrays = example.arrays()

    def loss(floats):
        out = jax.tree.leaves(example.run({**arrays, **floats}, platform=entry.platform))
        return sum(jnp.sin(x).sum() for x in out[:1])

    floats = example.floats(arrays)
    expected = jax.jit(jax.grad(loss))(floats)
    actual = jax.jit(jax.grad(jax.checkpoint(loss)))(floats)
    assert_trees_close(actual, expected, "float32", gradient=True)
