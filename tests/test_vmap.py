"""vmap, in every position, equals a loop."""

import jax
import jax.numpy as jnp
import pytest
from cases import Case, taken
from examples import assert_trees_close, each_example, gradients
from subjects import each_subject, parameter
from tolerances import assert_close, assert_same

from ejkernel import flash_attention

pytestmark = pytest.mark.typed

# A few blocks of keys: each call is made several times, and other files have longer ones.
LENGTHS = {"q_len": 26, "kv_len": 26}
CASES = [
    Case("plain", **LENGTHS),
    Case("masked", frozenset({"causal", "bias", "mask", "sinks"}), variant=4, group=2, shrinks=True, **LENGTHS),
    Case("shared_bias", frozenset({"bias", "window"}), variant=2, **LENGTHS),
    Case("packed", frozenset({"varlen", "causal", "segments"}), **LENGTHS),
    Case("dropout", frozenset({"dropout", "sinks", "causal"}), variant=1, **LENGTHS),
]
# For each part of the arguments that may be batched, the cases that `make test` runs; interpreters run those of INTERPRETED.
BATCHED = {
    "all": ("shared_bias", "masked", "plain"),
    "query": ("plain", "packed"),
    "not_query": ("packed", "shared_bias"),
    "last": ("dropout", "masked"),
}
INTERPRETED = {"query": "plain", "not_query": "packed"}


def count(subject):
    """How many calls are batched: two where an interpreter takes seconds for each."""
    return 2 if subject.interpreted else 3


def stacked(subject, case):
    made = [case.make(subject.dtype, seed) for seed in range(count(subject))]
    return {name: jnp.stack([arrays[name] for arrays, _ in made]) for name in made[0][0]}, made[0][1]


def pick(arrays, axes, index):
    return {name: x[index] if axes[name] == 0 else x for name, x in arrays.items()}


@pytest.mark.parametrize(
    ("subject", "case", "batched"),
    [
        parameter(
            subject,
            case,
            batched,
            slow=case.name not in ((INTERPRETED.get(batched),) if subject.interpreted else short),
        )
        for batched, short in BATCHED.items()
        for subject, case in taken(CASES)
    ],
)
def test_vmap_equals_a_loop(subject, case, batched):
    arrays, statics = stacked(subject, case)
    chosen = {"all": set(arrays), "query": {"query"}, "not_query": set(arrays) - {"query"}, "last": {list(arrays)[-1]}}[
        batched
    ]
    axes = {name: 0 if name in chosen else None for name in arrays}
    arrays = {name: x if name in chosen else x[0] for name, x in arrays.items()}
    floats = [name for name in ("query", "key", "value", "bias", "softmax_aux") if name in arrays]

    def loss(arrays):
        call = {**statics, **case.blocks, "return_lse": subject.has("lse"), "platform": subject.platform}
        found = jax.tree.leaves(flash_attention(**arrays, **call))
        return sum((jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32) ** 2).sum() for x in found), found[0]

    def gradients(arrays):
        def of_floats(some):
            return loss({**arrays, **some})

        return jax.grad(of_floats, has_aux=True)({name: arrays[name] for name in floats})

    grads, out = jax.vmap(gradients, (axes,))(arrays)
    for i in range(count(subject)):
        expected, expected_out = gradients(pick(arrays, axes, i))
        assert_close(out[i], expected_out, subject.dtype)
        for name in floats:
            assert_close(grads[name][i], expected[name], subject.dtype, gradient=True, what=name)


@each_subject()
def test_gradient_of_vmap_with_shared_arrays(subject):
    """The cotangents of an array that is not vmapped are summed."""
    case = Case("bias", frozenset({"bias"}), variant=2, shrinks=True).at(subject)
    arrays, _ = stacked(subject, case)
    shared = {name: x[0] for name, x in arrays.items() if name != "query"}

    def loss(shared, run):
        def one(query):
            return flash_attention(query, **shared, **case.blocks, platform=subject.platform)

        return (run(one).astype(jnp.float32) ** 2).sum()

    vmapped = jax.grad(loss)(shared, lambda one: jax.vmap(one)(arrays["query"]))
    looped = jax.grad(loss)(shared, lambda one: jnp.stack([one(q) for q in arrays["query"]]))
    for name in shared:
        assert_close(vmapped[name], looped[name], subject.dtype, gradient=True, what=name)


@each_subject()
def test_two_vmaps_and_another_axis(subject):
    arrays, _ = stacked(subject, Case("plain").at(subject))
    q = jnp.stack([arrays["query"], arrays["query"] + 1], axis=-1)

    def one(q, k, v):
        return flash_attention(q, k, v, causal=True, platform=subject.platform)

    twice = jax.vmap(jax.vmap(one), (-1, None, None), -1)(q, arrays["key"], arrays["value"])
    for i in range(count(subject)):
        for j in range(2):
            expected = one(q[i, ..., j], arrays["key"][i], arrays["value"][i])
            assert_same(twice[i, ..., j], expected, subject.dtype)


@each_subject()
def test_vmap_over_nothing(subject):
    x = jnp.ones((0, 2, 5, 2, subject.dim(8)), subject.dtype)
    run = jax.vmap(jax.value_and_grad(lambda x: flash_attention(x, x, x, platform=subject.platform).sum()))
    value, grad = run(x)
    assert (value.shape, grad.shape) == ((0,), x.shape)


@pytest.mark.parametrize("batched", ["all", pytest.param("first", marks=pytest.mark.slow), "not_first"])
@each_example(main=True, short="last")
def test_every_operation(subject, example, batched):
    seeds = [example.arrays(subject.dtype, seed) for seed in range(count(subject))]
    names = list(seeds[0])
    chosen = {"all": names, "first": names[:1], "not_first": names[1:]}[batched]
    axes = {name: jax.tree.map(lambda _: 0 if name in chosen else None, seeds[0][name]) for name in names}  # noqa: B023
    arrays = {
        n: jax.tree.map(lambda *x: jnp.stack(x), *(s[n] for s in seeds)) if n in chosen else seeds[0][n] for n in names
    }

    def run(arrays):
        return gradients(example, arrays, platform=subject.platform)[:2]

    actual = jax.jit(jax.vmap(run, (axes,)))(arrays)
    alone = jax.jit(run)
    for i, own in enumerate(seeds):
        expected = alone({**seeds[0], **{name: own[name] for name in chosen}})
        picked = jax.tree.map(lambda x: x[i], actual)  # noqa: B023
        assert_trees_close(picked, expected, subject.dtype, gradient=True, what=str(i))
