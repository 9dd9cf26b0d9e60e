"""Every gradient of every implementation against float64, and the values beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import COMBINED, Case, any_case, each_case, named, single_feature_cases
from conftest import tries
from examples import assert_trees_close, each_example, gradients
from hypothesis import given
from hypothesis import strategies as st
from subjects import MOSAIC_INTERPRETER, each_subject
from tolerances import assert_close

from ejkernel import BwdParams, FwdParams, flash_attention
from ejkernel.kernels._triton.call import interpreting
from ejkernel.ops.flash_attention import OPERATION

ALONE = single_feature_cases(OPERATION.features)
OF_PAIRS = [f"bias_{i}" for i in (0, 1, 2, 3, 5)] + [f"mask_{i}" for i in (0, 2, 3, 4, 5, 6, 7)]
EVERYTHING = named("everything", "everything_packed")
# What interpreters run in `make test`: each feature alone in those of Pallas where jax has both, as one of CI's lanes does.
# test_triton_interpreted.py has each feature in Triton's.
SHORT = {"plain", *(case.name for case in EVERYTHING)}
if MOSAIC_INTERPRETER:
    SHORT |= {case.name for case in ALONE if case.name != "lse" and not interpreting()}


def check(subject, case, wanted=None):
    """The outputs and all gradients (or the wanted ones) of them, with random cotangents."""
    dtype = subject.dtype
    arrays, statics = case.make(dtype)
    wanted = [name for name in OPERATION.gradients if name in arrays and (wanted is None or name in wanted)]
    assert set(wanted) <= set(subject.support.gradients)
    call = {**statics, **case.blocks, "return_lse": subject.has("lse"), "platform": subject.platform}

    def run(differentiated):
        return tuple(jax.tree.leaves(flash_attention(**{**arrays, **differentiated}, **call)))

    found, pull = jax.vjp(run, {name: arrays[name] for name in wanted})
    rng = np.random.default_rng(7)
    # The lse of a row that sees nothing is −inf and constant: its cotangent must not matter.
    cotangents = tuple(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in found)
    (grads,) = pull(cotangents)
    known = case.as_oracle(arrays, statics)
    dout, dlse = (*map(np.asarray, cotangents), None)[:2]
    *outputs, expected = oracle.attention(**known, dout=dout, dlse=dlse)
    for name, actual, exact in zip(("out", "lse"), found, outputs, strict=False):
        assert_close(actual, exact, dtype, what=f"{case} {name}")
    for name in wanted:
        assert grads[name].dtype == arrays[name].dtype
        assert_close(grads[name], expected[name], dtype, gradient=True, what=f"{case} d{name}")


# The lse is looked at wherever there is one: alone it is the plain call.
@each_case(
    [*ALONE, *COMBINED],
    short=SHORT,
    # test_mosaic_pairs.py has its kernels' biases and masks of every shape, with race detection.
    again=lambda subject, case: subject.in_pallas_interpreter and case.name in OF_PAIRS,
)
def test_gradients(subject, case):
    check(subject, case)


@each_case(
    named("plain", "everything"),
    dtypes="others",
    short={"plain"},
    again=lambda subject, case: subject.in_pallas_interpreter and case.name == "everything",
)
def test_dtypes(subject, case):
    with jax.enable_x64(subject.dtype == "float64"):
        check(subject, case)


@each_subject()
@tries(20, short=5)
@given(data=st.data())
def test_feature_combinations(subject, data):
    check(subject, data.draw(any_case(OPERATION.features)).at(subject))


@each_subject("bias", "sinks")
@pytest.mark.parametrize(
    "wanted", [("query",), ("key", "value"), ("bias",), ("softmax_aux",), ("value", "softmax_aux")], ids=str
)
def test_some_gradients_alone(subject, wanted):
    check(subject, EVERYTHING[0].at(subject), wanted)


@each_subject("segments")
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_in_padding_reaches_no_gradient(subject, garbage):
    length, real = 40, 27
    ids = jnp.asarray(np.where(np.arange(length) < real, 1, 0)[None])
    rng = np.random.default_rng(3)
    shape = (1, length, 2, subject.dim(8))
    clean = {n: jnp.asarray(rng.standard_normal(shape), subject.dtype) for n in ("query", "key", "value")}
    padding = (ids == 0)[:, :, None, None]
    blocks = {
        "fwd_params": FwdParams(q_blocksize=16, kv_blocksize=16),
        "bwd_params": BwdParams(q_blocksize=16, kv_blocksize=16),
    }

    def loss(arrays):
        out = flash_attention(**arrays, q_segment_ids=ids, kv_segment_ids=ids, platform=subject.platform, **blocks)
        return (out[:, :real] ** 2).sum()

    expected = jax.grad(loss)(clean)
    grads = jax.grad(loss)({n: jnp.where(padding, garbage, x).astype(x.dtype) for n, x in clean.items()})
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad, expected[name], err_msg=name)
        assert (grad[:, real:] == 0).all()


@each_subject("bias")
def test_rows_with_nothing_to_see_have_no_gradient(subject):
    x = jnp.ones((1, 8, 2, subject.dim(4)), subject.dtype)
    bias = jnp.full((8, 8), -jnp.inf)

    def loss(q, k, v, bias):
        return flash_attention(q, k, v, bias=bias, platform=subject.platform).sum()

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


@each_subject("mask", "sinks", "lse")
@pytest.mark.parametrize("sinks", [False, True])
def test_cotangents_of_rows_with_nothing_to_see_do_not_matter(subject, sinks):
    """The lse of such a row is −inf, so what a caller does with it easily has a cotangent of NaN."""
    if "float32" not in subject.support.dtypes:
        pytest.skip("the arrays of this test are float32")
    case = Case("masked", frozenset({"mask", "sinks"} if sinks else {"mask"}), variant=2, group=2)
    arrays, _ = case.make()
    arrays["attention_mask"] = arrays["attention_mask"].at[:, 5].set(False)
    floats = {n: arrays[n] for n in OPERATION.gradients if n in arrays}

    def run(floats):
        return flash_attention(**{**arrays, **floats}, **case.blocks, return_lse=True, platform=subject.platform)

    (out, lse), pull = jax.vjp(run, floats)
    (expected,) = pull((jnp.ones_like(out).at[:, 5].set(0), jnp.ones_like(lse).at[:, :, 5].set(0)))
    dlse = jnp.ones_like(lse).at[:, :, 5].set(0 if sinks else jnp.nan)
    (grads,) = pull((jnp.ones_like(out).at[:, 5].set(jnp.nan), dlse))
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(grads[name], expected[name], err_msg=name)


@each_subject()
def test_second_derivatives_are_refused_by_name(subject):
    from ejkernel import UnsupportedError

    x = jnp.ones((1, 4, 1, subject.dim(4)), subject.dtype)

    def loss(x):
        return flash_attention(x, x, x, platform=subject.platform).sum()

    for second in (jax.grad(lambda x: jax.grad(loss)(x).sum()), jax.jit(jax.hessian(loss))):
        with pytest.raises(UnsupportedError, match="second derivatives are not supported"):
            second(x)


@each_subject()
def test_strict_promotion(subject):
    """Whatever JAX is told about mixing dtypes and ranks, our own code does not do it."""
    case = EVERYTHING[0].at(subject)
    half = "bfloat16" if "bfloat16" in subject.support.dtypes else "float16"
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        arrays, statics = case.make(half)
        floats = {n: arrays[n] for n in OPERATION.gradients if n in arrays}

        def run(floats):
            return flash_attention(**{**arrays, **floats}, **statics, **case.blocks, platform=subject.platform)

        result, pull = jax.vjp(run, floats)
        pull(result)


@each_example(interpreted="short", differentiates=True)
def test_every_operation(subject, example):
    arrays = example.arrays(subject.dtype)
    out, grads, cotangents = gradients(example, arrays, platform=subject.platform)
    expected_out, expected = example.expected(arrays, cotangents)
    assert_trees_close(out, expected_out, subject.dtype, what="out")
    assert_trees_close(grads, expected, subject.dtype, gradient=True)


@each_example(main=True, dtypes="others", short="last", differentiates=True)
def test_every_operation_in_every_dtype(subject, example):
    with jax.enable_x64(subject.dtype == "float64"):
        arrays = example.arrays(subject.dtype)
        _, grads, cotangents = gradients(example, arrays, platform=subject.platform)
    assert jax.tree.map(lambda x: x.dtype, grads) == jax.tree.map(lambda x: x.dtype, example.floats(arrays))
    _, expected = example.expected(arrays, cotangents)
    assert_trees_close(grads, expected, subject.dtype, gradient=True)


@each_example(main=True, short="last", differentiates=True)
def test_every_gradient_alone(subject, example):
    """What a backward leaves out, because nobody wants it, must not change the others."""
    arrays = example.arrays(subject.dtype)
    _, together, cotangents = gradients(example, arrays, platform=subject.platform)
    for name, value in example.floats(arrays).items():
        _, pull = jax.vjp(lambda x, name=name: example.run({**arrays, name: x}, platform=subject.platform), value)
        assert_trees_close(pull(cotangents)[0], together[name], subject.dtype, gradient=True, what=name)
