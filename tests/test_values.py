"""Every implementation's values against float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import COMBINED, SMALL_BLOCKS, Case, any_case, each_case, named, single_feature_cases
from conftest import tries
from examples import assert_trees_close, each_example
from hypothesis import given
from hypothesis import strategies as st
from subjects import MOSAIC_INTERPRETER, each_subject, parameter, subjects
from tolerances import assert_close

from ejkernel import FwdParams, Platform, flash_attention
from ejkernel.ops.flash_attention import OPERATION

pytestmark = pytest.mark.typed


def check(subject, case, **more):
    arrays, statics = case.make(subject.dtype)
    statics = {**statics, "return_lse": subject.has("lse"), **case.blocks, **more}
    result = flash_attention(**arrays, **statics, platform=subject.platform)
    expected = oracle.attention(**case.as_oracle(arrays, {k: v for k, v in statics.items() if k not in more}))
    out, *lse = jax.tree.leaves(result)
    assert out.dtype == subject.dtype
    assert_close(out, expected[0], subject.dtype, what=f"{case} out")
    for found in lse:
        assert found.dtype == ("float64" if subject.dtype == "float64" else "float32")
        assert_close(found, expected[1], subject.dtype, what=f"{case} lse")


# test_gradients.py looks at values too, of the same cases: `make test` leaves most to it, and CI those of interpreted kernels;
# of other operations those that are neither first nor last.
@each_case(
    [*single_feature_cases(OPERATION.features), *COMBINED],
    compiled=("plain", "everything", "everything_packed"),
    again=lambda subject, case: True,
)
def test_values(subject, case):
    check(subject, case)


@each_case(
    named("plain", "everything", "everything_packed"),
    dtypes="others",
    again=lambda subject, case: case.name != "everything_packed",
)
def test_dtypes(subject, case):
    with jax.enable_x64(subject.dtype == "float64"):
        check(subject, case)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only a CPU interprets")
def test_every_platform_is_met_where_it_can_be():
    """No kernel leaves these tests unseen: XLA's run anywhere, Pallas's in JAX's interpreter."""
    platforms = {subject.platform for subject in subjects()}
    assert platforms >= ({Platform.XLA, Platform.PALLAS} if MOSAIC_INTERPRETER else {Platform.XLA})


@each_subject(again=True)  # test_gradients.py draws cases too
@tries(30, short=8)
@given(data=st.data())
def test_feature_combinations(subject, data):
    check(subject, data.draw(any_case(OPERATION.features)).at(subject))


@each_subject("causal", "segments", "gqa")
@pytest.mark.parametrize("blocks", [None, FwdParams(), FwdParams(q_blocksize=1), FwdParams(kv_blocksize=10_000), FwdParams(num_warps=4),
                                    FwdParams(blocksize_heads=3), FwdParams(blocksize_heads=64, q_blocksize=16)], ids=str)  # fmt: skip
def test_parameters_never_change_the_meaning(subject, blocks):
    case = Case("blocks", frozenset({"causal", "segments"}), batch=4, group=2).at(subject)
    check(subject, replace(case, blocks={"fwd_params": blocks}))


def again(value):
    """A value that interpreted kernels see as one of the others: CI leaves it to plain XLA."""
    return pytest.param(value, marks=pytest.mark.again)


def hidden_in(how):
    """Parameters of a test: implementations that can hide keys in one of these ways."""
    return pytest.mark.parametrize(
        ("subject", "how"),
        [
            parameter(subject, name, slow=subject.interpreted)
            for name in how
            for subject in subjects()
            if subject.has("segments" if name == "lonely segment" else name)
        ],
    )


@pytest.mark.parametrize("garbage", [np.nan, np.inf, again(-np.inf)])
@hidden_in(("segments", "lonely segment", "mask", "varlen", "window", "bias"))
def test_garbage_that_nobody_sees_never_shows(subject, garbage, how):
    q_len, kv_len = 30, 44
    rng = np.random.default_rng(1)
    dtype, dim = subject.dtype, subject.dim(8)
    arrays = {
        name: jnp.asarray(rng.standard_normal((1, length, 2, dim)), dtype)
        for name, length in (("query", q_len), ("key", kv_len), ("value", kv_len))
    }
    hidden = np.zeros(kv_len, bool)
    if how == "window":
        hidden[:10] = True
    elif how == "varlen":
        hidden[36:] = True
    else:
        hidden[[3, 17, 18, *range(36, kv_len)]] = True
    more = {
        "segments": {"q_segment_ids": np.ones((1, q_len), int), "kv_segment_ids": np.where(hidden, 0, 1)[None]},
        # An id that no query has.
        "lonely segment": {"q_segment_ids": np.ones((1, q_len), int), "kv_segment_ids": np.where(hidden, 7, 1)[None]},
        "mask": {"attention_mask": ~hidden[None]},
        "bias": {"bias": np.where(hidden, -np.inf, 0).astype("float32")},
        "varlen": {"cum_seqlens_q": np.array([0, q_len]), "cum_seqlens_k": np.array([0, 36])},
        "window": {"sliding_window": (4, 0)},
    }[how]

    def filled(value):
        rows = hidden[None, :, None, None]
        return {name: x if name == "query" else jnp.where(rows, value, x).astype(dtype) for name, x in arrays.items()}

    expected, _ = oracle.attention(**filled(0), **more)
    traced = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in more.items()}
    actual = flash_attention(**filled(garbage), **traced, **SMALL_BLOCKS, platform=subject.platform)
    assert_close(actual, expected, dtype)


@each_subject("mask", "sinks", "lse")
def test_rows_with_nothing_to_see(subject):
    x = jnp.ones((1, 8, 2, subject.dim(4)), subject.dtype)
    mask = jnp.zeros((1, 8), bool)
    out, lse = flash_attention(x, x, x, attention_mask=mask, return_lse=True, platform=subject.platform)
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()
    sinks = jnp.array([[0.5, 1.5]])
    out, lse = flash_attention(
        x, x, x, attention_mask=mask, softmax_aux=sinks, return_lse=True, platform=subject.platform
    )
    assert (out == 0).all()
    np.testing.assert_allclose(lse, np.log(np.exp(0.5) + np.exp(1.5)), rtol=1e-6)


@each_subject("sinks")
def test_sinks_of_minus_infinity_are_no_sinks(subject):
    arrays, _ = Case("plain").at(subject).make(subject.dtype)
    plain = flash_attention(**arrays, platform=subject.platform)
    sunk = flash_attention(**arrays, softmax_aux=jnp.full((1, 4), -jnp.inf), platform=subject.platform)
    np.testing.assert_array_equal(plain, sunk)


@each_subject("dropout")
def test_dropout_keeps_the_stated_share(subject):
    x = jnp.zeros((1, 256, 4, subject.dim(8)), subject.dtype)
    values = jnp.ones_like(x)
    kept = flash_attention(x, x, values, dropout_prob=0.25, dropout_seed=2**31 + 5, platform=subject.platform)
    np.testing.assert_allclose(kept.mean(), 1.0, atol=0.01)
    assert kept.std() > 0.01
    other = flash_attention(x, x, values, dropout_prob=0.25, dropout_seed=6, platform=subject.platform)
    assert (kept != other).mean() > 0.9
    again = flash_attention(
        x, x, values, dropout_prob=0.25, dropout_seed=jnp.uint32(2**31 + 5), platform=subject.platform
    )
    np.testing.assert_array_equal(kept, again)


@each_subject("causal")
def test_large_logits(subject):
    """Where a softmax without a running maximum overflows."""
    case = Case("causal", frozenset({"causal"})).at(subject)
    arrays, statics = case.make(subject.dtype)
    arrays["query"] = arrays["query"] * 60
    out = flash_attention(**arrays, **statics, **case.blocks, platform=subject.platform)
    assert_close(out, oracle.attention(**case.as_oracle(arrays, statics))[0], subject.dtype)


@each_subject("window", "varlen")
@pytest.mark.parametrize("window", [(None, 2**31 - 1), again((2**31, 0)), again((2**40, 2**40)), 37])
@pytest.mark.parametrize("packed", [False, True])
def test_windows_wider_than_everything(subject, window, packed):
    case = Case("window", frozenset({"window", "varlen"} if packed else {"window"}), window=window)
    check(subject, case.at(subject))


@each_subject("segments")
def test_wide_segment_ids_stay_apart(subject):
    values = np.random.default_rng(0).standard_normal((1, 6, 1, subject.dim(8)))
    x = jnp.asarray(values, subject.dtype)

    def run(q_ids, kv_ids):
        return flash_attention(x, x, x, q_segment_ids=q_ids, kv_segment_ids=kv_ids, platform=subject.platform)

    def ids(values, dtype):
        return jnp.asarray([values], dtype)

    narrow = ids([1, 1, 2, 2, 3, 3], jnp.int32)
    expected = run(narrow, narrow)
    for own in (ids([1, 1, 2, 2, 2**31 + 5, 2**31 + 5], jnp.uint32), ids([1, 1, 2, 2, 3, 3], jnp.int8)):
        np.testing.assert_array_equal(run(own, own), expected)
    mixed = run(ids([-1, 1, 2, 2, 3, 0], jnp.int32), ids([2**32 - 1, 1, 2, 2, 2**31 + 3, 0], jnp.uint32))
    other = run(ids([0, 1, 2, 2, 4, 0], jnp.int32), ids([0, 1, 2, 2, 5, 0], jnp.int32))
    np.testing.assert_array_equal(mixed, other)


@each_subject("segments")
def test_segment_ids_of_64_bits_stay_apart(subject):
    if subject.in_pallas_interpreter:
        pytest.skip(
            "with x64, jax lowers a loop of Mosaic's interpreter with a carry of two types; a GPU has no such loop"
        )
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 1, subject.dim(8))), subject.dtype)

    def run(ids):
        return flash_attention(x, x, x, q_segment_ids=ids, kv_segment_ids=ids, platform=subject.platform)

    expected = run(jnp.asarray([[1, 1, 2, 2, 3, 3]], jnp.int32))
    with jax.enable_x64(True):
        wide = run(jnp.asarray([[1, 1, 2**32 + 1, 2**32 + 1, 2**33, 2**33]], jnp.int64))
    assert_close(wide, expected, subject.dtype)


@each_subject("sinks", "lse")
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_nan_that_is_seen_shows(subject, name, sinks):
    case = replace(Case("plain", frozenset({"sinks"} if sinks else ())).at(subject), batch=2)
    arrays, _ = case.make(subject.dtype)
    arrays[name] = arrays[name].at[0, 7].set(jnp.nan)
    out, lse = flash_attention(**arrays, **case.blocks, return_lse=True, platform=subject.platform)
    rows = out[0, 7:8] if name == "query" else out[0]
    assert jnp.isnan(rows).all()
    assert not jnp.isnan(out[1]).any()
    if name != "value":
        assert jnp.isnan(lse[0, :, 7]).all()


@each_example(short="main", again=True)
def test_every_operation(subject, example):
    arrays = example.arrays(subject.dtype)
    assert_trees_close(example.run(arrays, platform=subject.platform), example.expected(arrays), subject.dtype)


@each_example(main=True, dtypes="others", short="last")
def test_every_operation_in_every_dtype(subject, example):
    with jax.enable_x64(subject.dtype == "float64"):
        arrays = example.arrays(subject.dtype)
        out = example.run(arrays, platform=subject.platform)
    given = example.statics.get("preferred_element_type", subject.dtype)
    assert jax.tree.leaves(out)[0].dtype == given
    coarser = max((subject.dtype, given), key=lambda name: jnp.finfo(name).eps)
    assert_trees_close(out, example.expected(arrays), coarser)
