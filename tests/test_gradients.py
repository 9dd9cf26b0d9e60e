"""Every gradient of every implementation against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import COMBINED, Case, any_case, single_feature_cases
from conftest import SLOWER, runnable
from examples import assert_trees_close, every_example, gradients, main_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close

from ejkernel import BwdParams, FwdParams, flash_attention
from ejkernel.ops.flash_attention import OPERATION

IMPLEMENTATIONS = runnable("flash_attention")


def check(entry, case, dtype="float32", wanted=None):
    """All gradients (or the wanted ones) of both outputs, with random cotangents."""
    arrays, statics = case.make(dtype)
    wanted = [name for name in OPERATION.gradients if name in arrays and (wanted is None or name in wanted)]
    assert set(wanted) <= set(entry.support.gradients)
    call = {**statics, **case.blocks, "return_lse": True, "platform": entry.platform}

    def run(differentiated):
        return flash_attention(**{**arrays, **differentiated}, **call)

    (out, lse), pull = jax.vjp(run, {name: arrays[name] for name in wanted})
    rng = np.random.default_rng(7)
    dout = jnp.asarray(rng.standard_normal(out.shape), dtype)
    # The lse of a row that sees nothing is −inf and constant: its cotangent must not matter.
    dlse = jnp.asarray(rng.standard_normal(lse.shape), lse.dtype)
    (grads,) = pull((dout, dlse))
    known = case.as_oracle(arrays, statics)
    _, _, expected = oracle.attention(**known, dout=np.asarray(dout), dlse=np.asarray(dlse))
    for name in wanted:
        assert grads[name].dtype == arrays[name].dtype
        assert_close(grads[name], expected[name], dtype, gradient=True, what=f"{case} d{name}")


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [*single_feature_cases(OPERATION.features), *COMBINED], ids=str)
def test_gradients(entry, case):
    if not case.features <= entry.support.features:
        pytest.skip(f"{entry} does not support {sorted(case.features - entry.support.features)}")
    check(entry, case)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_dtypes(entry, dtype, name, request):
    if dtype not in entry.support.dtypes:
        pytest.skip(f"{entry} does not take {dtype}")
    if dtype == "float64":
        request.getfixturevalue("x64")
    check(entry, next(c for c in [Case("plain"), *COMBINED] if c.name == name), dtype)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@settings(max_examples=20 // SLOWER)
@given(data=st.data())
def test_feature_combinations(entry, data):
    check(entry, data.draw(any_case(entry.support.features)))


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "wanted", [("query",), ("key", "value"), ("bias",), ("softmax_aux",), ("value", "softmax_aux")], ids=str
)
def test_some_gradients_alone(entry, wanted):
    case = next(c for c in COMBINED if c.name == "everything")
    check(entry, case, wanted=wanted)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_in_padding_reaches_no_gradient(entry, garbage):
    length, real = 40, 27
    ids = jnp.asarray(np.where(np.arange(length) < real, 1, 0)[None])
    rng = np.random.default_rng(3)
    clean = {n: jnp.asarray(rng.standard_normal((1, length, 2, 8)), "float32") for n in ("query", "key", "value")}
    padding = (ids == 0)[:, :, None, None]
    blocks = {
        "fwd_params": FwdParams(q_blocksize=16, kv_blocksize=16),
        "bwd_params": BwdParams(q_blocksize=16, kv_blocksize=16),
    }

    def loss(arrays):
        out = flash_attention(**arrays, q_segment_ids=ids, kv_segment_ids=ids, platform=entry.platform, **blocks)
        return (out[:, :real] ** 2).sum()

    expected = jax.grad(loss)(clean)
    grads = jax.grad(loss)({n: jnp.where(padding, garbage, x) for n, x in clean.items()})
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad, expected[name], err_msg=name)
        assert (grad[:, real:] == 0).all()


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
def test_rows_with_nothing_to_see_have_no_gradient(entry):
    x = jnp.ones((1, 8, 2, 4))
    bias = jnp.full((8, 8), -jnp.inf)

    def loss(q, k, v, bias):
        return flash_attention(q, k, v, bias=bias, platform=entry.platform).sum()

    for grad in jax.grad(loss, (0, 1, 2, 3))(x, x, x, bias):
        np.testing.assert_array_equal(grad, 0)


def test_unused_bias_gradient_costs_no_memory():
    """A bias that is only added must not cost its square once more."""
    length = 2048
    x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 2, length, length), jnp.float32)
    blocks = {
        "fwd_params": FwdParams(q_blocksize=128, kv_blocksize=128),
        "bwd_params": BwdParams(q_blocksize=128, kv_blocksize=128),
    }

    def loss(q, k, v, bias):
        return flash_attention(q, k, v, bias=bias, **blocks).sum()

    def temporary(wanted):
        return jax.jit(jax.grad(loss, wanted)).lower(x, x, x, bias).compile().memory_analysis().temp_size_in_bytes

    assert temporary((0, 1, 2)) < 2 * length * length * 4 / 2


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize("sinks", [False, True])
def test_cotangents_of_rows_with_nothing_to_see_do_not_matter(entry, sinks):
    """The lse of such a row is −inf, so what a caller does with it easily has a cotangent of NaN."""
    case = Case("masked", frozenset({"mask", "sinks"} if sinks else {"mask"}), variant=2, group=2)
    arrays, _ = case.make()
    arrays["attention_mask"] = arrays["attention_mask"].at[:, 5].set(False)
    floats = {n: arrays[n] for n in OPERATION.gradients if n in arrays}

    def run(floats):
        return flash_attention(**{**arrays, **floats}, **case.blocks, return_lse=True, platform=entry.platform)

    (out, lse), pull = jax.vjp(run, floats)
    (expected,) = pull((jnp.ones_like(out).at[:, 5].set(0), jnp.ones_like(lse).at[:, :, 5].set(0)))
    dlse = jnp.ones_like(lse).at[:, :, 5].set(0 if sinks else jnp.nan)
    (grads,) = pull((jnp.ones_like(out).at[:, 5].set(jnp.nan), dlse))
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(grads[name], expected[name], err_msg=name)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
def test_second_derivatives_are_refused_by_name(entry):
    from ejkernel import UnsupportedError

    x = jnp.ones((1, 4, 1, 4))

    def loss(x):
        return flash_attention(x, x, x, platform=entry.platform).sum()

    for second in (jax.grad(lambda x: jax.grad(loss)(x).sum()), jax.jit(jax.hessian(loss))):
        with pytest.raises(UnsupportedError, match="second derivatives are not supported"):
            second(x)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
def test_strict_promotion(entry):
    """Whatever JAX is told about mixing dtypes and ranks, our own code does not do it."""
    case = next(c for c in COMBINED if c.name == "everything")
    half = "bfloat16" if "bfloat16" in entry.support.dtypes else "float16"
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        arrays, statics = case.make(half)
        floats = {n: arrays[n] for n in OPERATION.gradients if n in arrays}

        def run(floats):
            return flash_attention(**{**arrays, **floats}, **statics, **case.blocks, platform=entry.platform)

        result, pull = jax.vjp(run, floats)
        pull(result)


@every_example()
def test_every_operation(entry, example):
    arrays = example.arrays()
    _, grads, cotangents = gradients(example, arrays, platform=entry.platform)
    _, expected = example.expected(arrays, cotangents)
    assert_trees_close(grads, expected, "float32", gradient=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@main_examples()
def test_every_operation_in_every_dtype(entry, example, dtype, request):
    if dtype not in entry.support.dtypes:
        pytest.skip(f"{entry} does not take {dtype}")
    if dtype == "float64":
        request.getfixturevalue("x64")
    arrays = example.arrays(dtype)
    _, grads, cotangents = gradients(example, arrays, platform=entry.platform)
    assert jax.tree.map(lambda x: x.dtype, grads) == jax.tree.map(lambda x: x.dtype, example.floats(arrays))
    _, expected = example.expected(arrays, cotangents)
    assert_trees_close(grads, expected, dtype, gradient=True)


@main_examples()
def test_every_gradient_alone(entry, example):
    """What a backward leaves out, because nobody wants it, must not change the others."""
    arrays = example.arrays()
    _, together, cotangents = gradients(example, arrays, platform=entry.platform)
    for name, value in example.floats(arrays).items():
        _, pull = jax.vjp(lambda x, name=name: example.run({**arrays, name: x}, platform=entry.platform), value)
        assert_trees_close(pull(cotangents)[0], together[name], "float32", gradient=True, what=name)
