"""Every implementation's values against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import COMBINED, SMALL_BLOCKS, Case, any_case, single_feature_cases
from conftest import SLOWER, runnable
from examples import assert_trees_close, every_example, main_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close

from ejkernel import FwdParams, flash_attention
from ejkernel.ops.flash_attention import OPERATION

IMPLEMENTATIONS = runnable("flash_attention")


def supported(entry, case):
    return case.features <= entry.support.features


def check(entry, case, dtype="float32", **more):
    arrays, statics = case.make(dtype)
    statics = {**statics, "return_lse": True, **case.blocks, **more}
    out, lse = flash_attention(**arrays, **statics, platform=entry.platform)
    assert out.dtype == dtype
    assert lse.dtype == ("float64" if dtype == "float64" else "float32")
    expected_out, expected_lse = oracle.attention(
        **case.as_oracle(arrays, {k: v for k, v in statics.items() if k not in more})
    )
    assert_close(out, expected_out, dtype, what=f"{case} out")
    assert_close(lse, expected_lse, dtype, what=f"{case} lse")


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [*single_feature_cases(OPERATION.features), *COMBINED], ids=str)
def test_values(entry, case):
    if not supported(entry, case):
        pytest.skip(f"{entry} does not support {sorted(case.features - entry.support.features)}")
    check(entry, case)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["plain", "everything", "everything_packed"])
def test_dtypes(entry, dtype, name, request):
    if dtype not in entry.support.dtypes:
        pytest.skip(f"{entry} does not take {dtype}")
    if dtype == "float64":
        request.getfixturevalue("x64")
    check(entry, next(c for c in [Case("plain"), *COMBINED] if c.name == name), dtype)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@settings(max_examples=30 // SLOWER)
@given(data=st.data())
def test_feature_combinations(entry, data):
    check(entry, data.draw(any_case(entry.support.features)))


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize("blocks", [None, FwdParams(), FwdParams(q_blocksize=1), FwdParams(kv_blocksize=10_000), FwdParams(num_warps=4),
                                    FwdParams(blocksize_heads=3), FwdParams(blocksize_heads=64, q_blocksize=16)], ids=str)  # fmt: skip
def test_parameters_never_change_the_meaning(entry, blocks):
    case = Case("blocks", frozenset({"causal", "segments"}), batch=4, group=2, blocks={"fwd_params": blocks})
    check(entry, case)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("how", ["segments", "mask", "varlen", "window", "bias"])
def test_garbage_that_nobody_sees_never_shows(entry, garbage, how):
    q_len, kv_len = 30, 44
    rng = np.random.default_rng(1)
    arrays = {n: rng.standard_normal((1, s, 2, 8)).astype("float32")
              for n, s in (("query", q_len), ("key", kv_len), ("value", kv_len))}  # fmt: skip
    hidden = np.zeros(kv_len, bool)
    more = {}
    if how == "window":
        hidden[:10] = True
        more["sliding_window"] = (4, 0)
    else:
        hidden[[3, 17, 18, *range(36, kv_len)]] = True
    if how == "segments":
        more = {"q_segment_ids": np.ones((1, q_len), int), "kv_segment_ids": np.where(hidden, 0, 1)[None]}
    elif how == "mask":
        more = {"attention_mask": ~hidden[None]}
    elif how == "bias":
        more = {"bias": np.where(hidden, -np.inf, 0).astype("float32")}
    elif how == "varlen":
        hidden[:] = False
        hidden[36:] = True
        more = {"cum_seqlens_q": np.array([0, q_len]), "cum_seqlens_k": np.array([0, 36])}
    assert hidden.any()
    clean = {n: np.where(hidden[None, :, None, None], 0, x) if n != "query" else x for n, x in arrays.items()}
    dirty = {n: np.where(hidden[None, :, None, None], garbage, x) if n != "query" else x for n, x in arrays.items()}
    expected, _ = oracle.attention(**clean, **({} if how == "bias" else more), bias=more.get("bias"))
    actual = flash_attention(
        **{k: jnp.asarray(v) for k, v in {**dirty, **{k: v for k, v in more.items() if k != "sliding_window"}}.items()},
        **{k: v for k, v in more.items() if k == "sliding_window"}, **SMALL_BLOCKS, platform=entry.platform,
    )  # fmt: skip
    assert_close(actual, expected, "float32")


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
def test_rows_with_nothing_to_see(entry):
    x = jnp.ones((1, 8, 2, 4))
    mask = jnp.zeros((1, 8), bool)
    out, lse = flash_attention(x, x, x, attention_mask=mask, return_lse=True, platform=entry.platform)
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()
    sinks = jnp.array([0.5, 1.5])
    out, lse = flash_attention(
        x, x, x, attention_mask=mask, softmax_aux=sinks, return_lse=True, platform=entry.platform
    )
    assert (out == 0).all()
    np.testing.assert_allclose(lse, np.log(np.exp(0.5) + np.exp(1.5)), rtol=1e-6)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
def test_sinks_of_minus_infinity_are_no_sinks(entry):
    arrays, _ = Case("plain").make()
    plain = flash_attention(**arrays, platform=entry.platform)
    sunk = flash_attention(**arrays, softmax_aux=jnp.full((4,), -jnp.inf), platform=entry.platform)
    np.testing.assert_array_equal(plain, sunk)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
def test_dropout_keeps_the_stated_share(entry):
    x = jnp.zeros((1, 256, 4, 8))
    values = jnp.ones((1, 256, 4, 8))
    kept = flash_attention(x, x, values, dropout_prob=0.25, dropout_seed=2**31 + 5, platform=entry.platform)
    np.testing.assert_allclose(kept.mean(), 1.0, atol=0.01)
    assert kept.std() > 0.01
    other = flash_attention(x, x, values, dropout_prob=0.25, dropout_seed=6, platform=entry.platform)
    assert (kept != other).mean() > 0.9
    again = flash_attention(
        x, x, values, dropout_prob=0.25, dropout_seed=jnp.uint32(2**31 + 5), platform=entry.platform
    )
    np.testing.assert_array_equal(kept, again)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
def test_large_logits(entry):
    """Where a softmax without a running maximum overflows."""
    case = Case("causal", frozenset({"causal"}))
    arrays, statics = case.make()
    arrays["query"] = arrays["query"] * 60
    out = flash_attention(**arrays, **statics, **SMALL_BLOCKS, platform=entry.platform)
    assert_close(out, oracle.attention(**case.as_oracle(arrays, statics))[0], "float32")


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [(None, 2**31 - 1), (2**31, 0), (2**40, 2**40), 37])
@pytest.mark.parametrize("packed", [False, True])
def test_windows_wider_than_everything(entry, window, packed):
    case = Case("window", frozenset({"window", "varlen"} if packed else {"window"}), window=window)
    check(entry, case)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
def test_wide_segment_ids_stay_apart(entry):
    def run(ids, dtype):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 1, 8)), jnp.float32)
        ids = jnp.asarray(ids, dtype)[None]
        return flash_attention(x, x, x, q_segment_ids=ids, kv_segment_ids=ids, platform=entry.platform)

    expected = run([1, 1, 2, 2, 3, 3], jnp.int32)
    np.testing.assert_array_equal(run([1, 1, 2, 2, 2**31 + 5, 2**31 + 5], jnp.uint32), expected)
    np.testing.assert_array_equal(run([1, 1, 2, 2, 3, 3], jnp.int8), expected)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 1, 8)), jnp.float32)
    q_ids, kv_ids = (
        jnp.asarray([[-1, 1, 2, 2, 3, 0]], jnp.int32),
        jnp.asarray([[2**32 - 1, 1, 2, 2, 2**31 + 3, 0]], jnp.uint32),
    )
    mixed = flash_attention(x, x, x, q_segment_ids=q_ids, kv_segment_ids=kv_ids, platform=entry.platform)
    ids = jnp.asarray([[0, 1, 2, 2, 4, 0]], jnp.int32)
    other = flash_attention(x, x, x, q_segment_ids=ids, kv_segment_ids=ids.at[0, 4].set(5), platform=entry.platform)
    np.testing.assert_array_equal(mixed, other)
    with jax.enable_x64(True):
        wide = run([1, 1, 2**32 + 1, 2**32 + 1, 2**33, 2**33], jnp.int64)
    np.testing.assert_allclose(wide, expected, rtol=1e-6)


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_nan_that_is_seen_shows(entry, name, sinks):
    arrays, _ = Case("plain", frozenset({"sinks"} if sinks else ())).make()
    arrays[name] = arrays[name].at[0, 7].set(jnp.nan)
    out, lse = flash_attention(**arrays, **SMALL_BLOCKS, return_lse=True, platform=entry.platform)
    rows = out[0, 7:8] if name == "query" else out[0]
    assert jnp.isnan(rows).all()
    assert not jnp.isnan(out[1]).any()
    if name != "value":
        assert jnp.isnan(lse[0, :, 7]).all()


@every_example()
def test_every_operation(entry, example):
    arrays = example.arrays()
    assert_trees_close(example.run(arrays, platform=entry.platform), example.expected(arrays), "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@main_examples()
def test_every_operation_in_every_dtype(entry, example, dtype, request):
    if dtype not in entry.support.dtypes:
        pytest.skip(f"{entry} does not take {dtype}")
    if dtype == "float64":
        request.getfixturevalue("x64")
    arrays = example.arrays(dtype)
    out = example.run(arrays, platform=entry.platform)
    given = example.statics.get("preferred_element_type", dtype)
    assert jax.tree.leaves(out)[0].dtype == given
    coarser = max((dtype, given), key=lambda name: jnp.finfo(name).eps)
    assert_trees_close(out, example.expected(arrays), coarser)
