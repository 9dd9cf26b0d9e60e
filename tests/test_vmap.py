"""vmap, in every position, equals a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMALL_BLOCKS, Case
from conftest import runnable
from examples import assert_trees_close, gradients, main_examples
from tolerances import assert_close

from ejkernel import flash_attention

IMPLEMENTATIONS = runnable("flash_attention")
CASES = [
    Case("plain"),
    Case("masked", frozenset({"causal", "bias", "mask", "sinks"}), variant=4, group=2),
    Case("shared_bias", frozenset({"bias", "window"}), variant=2),
    Case("packed", frozenset({"varlen", "causal", "segments"})),
    Case("dropout", frozenset({"dropout", "sinks", "causal"}), variant=1),
]


def stacked(case, count=3):
    made = [case.make(seed=seed) for seed in range(count)]
    return {name: jnp.stack([arrays[name] for arrays, _ in made]) for name in made[0][0]}, made[0][1]


def pick(arrays, axes, index):
    return {name: x[index] if axes[name] == 0 else x for name, x in arrays.items()}


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("batched", ["all", "query", "not_query", "last"])
def test_vmap_equals_a_loop(entry, case, batched):
    arrays, statics = stacked(case)
    chosen = {"all": set(arrays), "query": {"query"}, "not_query": set(arrays) - {"query"}, "last": {list(arrays)[-1]}}[
        batched
    ]
    axes = {name: 0 if name in chosen else None for name in arrays}
    arrays = {name: x if name in chosen else x[0] for name, x in arrays.items()}
    floats = [name for name in ("query", "key", "value", "bias", "softmax_aux") if name in arrays]

    def loss(arrays):
        out, lse = flash_attention(**arrays, **statics, **SMALL_BLOCKS, return_lse=True, platform=entry.platform)
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), out

    def gradients(arrays):
        def of_floats(some):
            return loss({**arrays, **some})

        return jax.grad(of_floats, has_aux=True)({name: arrays[name] for name in floats})

    grads, out = jax.vmap(gradients, (axes,))(arrays)
    for i in range(3):
        expected, expected_out = gradients(pick(arrays, axes, i))
        assert_close(out[i], expected_out, "float32")
        for name in floats:
            assert_close(grads[name][i], expected[name], "float32", gradient=True, what=name)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
def test_gradient_of_vmap_with_shared_arrays(entry):
    """The cotangents of an array that is not vmapped are summed."""
    arrays, _ = stacked(Case("bias", frozenset({"bias"}), variant=2))
    shared = {name: arrays[name][0] for name in ("key", "value", "bias")}

    def loss(shared, run):
        def one(query):
            return flash_attention(query, **shared, **SMALL_BLOCKS, platform=entry.platform)

        return (run(one) ** 2).sum()

    vmapped = jax.grad(loss)(shared, lambda one: jax.vmap(one)(arrays["query"]))
    looped = jax.grad(loss)(shared, lambda one: jnp.stack([one(q) for q in arrays["query"]]))
    for name in shared:
        assert_close(vmapped[name], looped[name], "float32", gradient=True, what=name)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
def test_two_vmaps_and_another_axis(entry):
    arrays, _ = stacked(Case("plain"))
    q = jnp.stack([arrays["query"], arrays["query"] + 1], axis=-1)

    def one(q, k, v):
        return flash_attention(q, k, v, causal=True, platform=entry.platform)

    twice = jax.vmap(jax.vmap(one), (-1, None, None), -1)(q, arrays["key"], arrays["value"])
    for i in range(3):
        for j in range(2):
            expected = one(q[i, ..., j], arrays["key"][i], arrays["value"][i])
            np.testing.assert_allclose(twice[i, ..., j], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
def test_vmap_over_nothing(entry):
    x = jnp.ones((0, 2, 5, 2, 8))
    run = jax.vmap(jax.value_and_grad(lambda x: flash_attention(x, x, x, platform=entry.platform).sum()))
    value, grad = run(x)
    assert (value.shape, grad.shape) == ((0,), x.shape)


@pytest.mark.parametrize("batched", ["all", "first", "not_first"])
@main_examples()
def test_every_operation(entry, example, batched):
    seeds = [example.arrays(seed=seed) for seed in range(3)]
    names = list(seeds[0])
    chosen = {"all": names, "first": names[:1], "not_first": names[1:]}[batched]
    axes = {name: jax.tree.map(lambda _: 0 if name in chosen else None, seeds[0][name]) for name in names}  # noqa: B023
    arrays = {
        n: jax.tree.map(lambda *x: jnp.stack(x), *(s[n] for s in seeds)) if n in chosen else seeds[0][n] for n in names
    }

    def run(arrays):
        return gradients(example, arrays, platform=entry.platform)[:2]

    actual = jax.jit(jax.vmap(run, (axes,)))(arrays)
    for i, own in enumerate(seeds):
        expected = jax.jit(run)({**seeds[0], **{name: own[name] for name in chosen}})
        picked = jax.tree.map(lambda x: x[i], actual)  # noqa: B023
        assert_trees_close(picked, expected, "float32", gradient=True, what=str(i))
