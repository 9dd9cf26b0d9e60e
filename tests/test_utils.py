"""Arrays, numerics, testing and profiling."""

import builtins
import re
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from ejkernel import utils
from ejkernel.errors import InvalidInputError
from ejkernel.utils import (
    assert_allclose,
    chunk_array,
    generate_attention_inputs,
    get_memory_usage,
    log_sum_exp,
    safe_divide,
    timer,
    unchunk_array,
)

pytestmark = pytest.mark.typed

INF, NAN = np.inf, np.nan


def test_importing_touches_no_device():
    modules = "ejkernel.utils, ejkernel.xla_utils, ejkernel.callib, ejkernel.ops.utils.fingerprint"
    code = f"import sys, {modules}; from jax._src import xla_bridge; sys.exit(xla_bridge.backends_are_initialized())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names():
    assert all(hasattr(utils, name) for name in utils.__all__)


# --- chunks -------------------------------------------------------------------------------------------------


def test_chunks_by_hand():
    assert chunk_array(jnp.arange(10), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    assert chunk_array(jnp.arange(10), 4, pad_value=-1)[-1].tolist() == [8, 9, -1, -1]
    assert chunk_array(jnp.arange(4.0), 3, pad_value=-jnp.inf)[-1].tolist() == [3, -INF, -INF]
    assert chunk_array(jnp.array([True]), 2, pad_value=True).tolist() == [[True, True]]


@pytest.mark.parametrize("axis", range(-3, 3))
@pytest.mark.parametrize("chunk_size", [1, 3, 4, 100])
def test_chunks_of_any_axis_come_back(axis, chunk_size):
    array = jnp.arange(4 * 5 * 6).reshape(4, 5, 6)
    length, front = array.shape[axis], axis % 3
    chunked = chunk_array(array, chunk_size, axis)
    chunks = -(-length // chunk_size)
    assert chunked.shape == (*array.shape[:front], chunks, chunk_size, *array.shape[front + 1 :])
    assert chunked.dtype == array.dtype
    assert np.array_equal(unchunk_array(chunked, length, axis), array)
    first = np.take(np.take(np.asarray(chunked), 0, front), 0, front)
    assert np.array_equal(first, np.take(np.asarray(array), 0, axis))


def test_chunks_of_nothing_and_under_jit():
    assert chunk_array(jnp.zeros((0, 2)), 4).shape == (0, 4, 2)
    assert unchunk_array(jnp.zeros((0, 4, 2)), 0).shape == (0, 2)
    assert jax.jit(lambda x: unchunk_array(chunk_array(x, 4, -1), 5, -1))(jnp.arange(5)).tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_bad_chunks_are_named():
    array = jnp.ones((4, 4))
    with pytest.raises(InvalidInputError, match="chunk_size is 0"):
        chunk_array(array, 0)
    with pytest.raises(InvalidInputError, match="axis is 2"):
        chunk_array(array, 2, 2)
    with pytest.raises(InvalidInputError, match="axis is -2"):
        unchunk_array(array, 4, -2)
    with pytest.raises(InvalidInputError, match="original_length is 17"):
        unchunk_array(array, 17)
    with pytest.raises(InvalidInputError, match="arr has shape"):
        unchunk_array(jnp.ones(4), 2)


# --- log_sum_exp --------------------------------------------------------------------------------------------

HARD = [
    [1000.0, 1001.0, 1002.0], [-1000.0, -1001.0, -1002.0], [-INF, -INF, -INF], [INF, 0.0, 1.0], [INF, INF,
    -INF], [INF, -INF, 0.0], [-INF, 0.0, 1.0], [NAN, 0.0, 1.0], [NAN, INF, -INF], [0.0, 0.0, 0.0],
]  # fmt: skip


def reference(x, axis=None, keepdims=False):
    return np.asarray(
        pytest.importorskip("scipy.special").logsumexp(np.asarray(x, np.float64), axis=axis, keepdims=keepdims)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 1)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_log_sum_exp_is_scipys(axis, keepdims):
    found, expected = log_sum_exp(jnp.array(HARD), axis, keepdims), reference(HARD, axis, keepdims)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    finite = np.random.default_rng(0).normal(scale=30, size=(3, 4)).astype(np.float32)
    np.testing.assert_allclose(
        log_sum_exp(jnp.array(finite), axis, keepdims), reference(finite, axis, keepdims), rtol=1e-6
    )


def test_log_sum_exp_of_nothing_scalars_and_ints():
    assert float(log_sum_exp(jnp.zeros((0,)))) == -INF
    assert log_sum_exp(jnp.zeros((2, 0)), axis=1).tolist() == [-INF, -INF]
    assert float(log_sum_exp(jnp.array(3.0))) == 3.0
    assert log_sum_exp(jnp.array([1, 2])).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_log_sum_exp_of_many_halves(dtype):
    found = log_sum_exp(jnp.zeros(100_000, dtype))
    assert found.dtype == dtype
    np.testing.assert_allclose(float(found), np.log(1e5), rtol=1e-2)


def test_the_gradient_of_log_sum_exp_is_softmax_and_0_where_there_is_nothing():
    x = jnp.array([1.0, 2.0, -INF])
    np.testing.assert_allclose(jax.grad(log_sum_exp)(x), jax.nn.softmax(x), rtol=1e-6)
    assert jax.grad(log_sum_exp)(jnp.full(3, -INF)).tolist() == [0, 0, 0]


# --- safe_divide --------------------------------------------------------------------------------------------


def test_safe_divide_keeps_the_sign():
    found = safe_divide(jnp.ones(6), jnp.array([-2.0, 2.0, 0.0, -0.0, 1e-20, -1e-20]))
    np.testing.assert_allclose(found, [-0.5, 0.5, 1e10, -1e10, 1e10, -1e10], rtol=1e-6)


def test_the_smallest_magnitude_fits_the_dtype():
    smallest = 2.0**-14
    found = safe_divide(jnp.ones(3, jnp.float16), jnp.array([0.0, -1e-7, 1.0], jnp.float16))
    assert found.dtype == jnp.float16
    assert found.tolist() == [1 / smallest, -1 / smallest, 1.0]
    assert float(safe_divide(jnp.float16(1), jnp.float16(0), 1e-3)) == pytest.approx(1000, rel=1e-2)
    assert float(safe_divide(jnp.bfloat16(1), jnp.bfloat16(0))) == pytest.approx(1e10, rel=1e-2)
    assert float(safe_divide(jnp.float32(1e-30), jnp.float32(0), 1e-60)) == pytest.approx(1e-30 / 2.0**-126)


def test_safe_divide_of_ints_scalars_and_nan():
    assert safe_divide(jnp.array([1, 3]), jnp.array([2, -2])).tolist() == [0.5, -1.5]
    assert float(safe_divide(1.0, -2.0)) == -0.5
    assert np.isnan(safe_divide(1.0, NAN))
    assert float(safe_divide(1.0, -INF)) == 0


def test_safe_divide_has_a_finite_gradient_at_zero():
    gradients = jax.grad(lambda a, b: safe_divide(a, b), argnums=(0, 1))(1.0, 0.0)
    assert all(np.isfinite(gradient) for gradient in gradients)


@pytest.mark.parametrize("bound", [0.0, -1.0, NAN, INF])
def test_a_bad_bound_is_refused(bound):
    with pytest.raises(InvalidInputError, match="min_denominator"):
        safe_divide(1.0, 1.0, bound)


@settings(max_examples=100, deadline=None)
@given(st.floats(-1e6, 1e6, width=32), st.floats(-1e6, 1e6, width=32))
def test_safe_divide_divides(numerator, denominator):
    found = float(safe_divide(jnp.float32(numerator), jnp.float32(denominator)))
    if abs(denominator) > 1e-6:
        assert found == pytest.approx(numerator / denominator, rel=1e-5, abs=1e-30)
    assert np.isfinite(found)


# --- assert_allclose ----------------------------------------------------------------------------------------

CLOSE = [
    ([1.0, 2.0], jnp.array([1.0, 2.0 + 1e-6])),
    (jnp.array([True, False]), np.array([True, False])),
    (np.array([250], np.uint8), jnp.array([250], jnp.uint8)),
    (jnp.ones(3, jnp.bfloat16), np.ones(3)),
    (3, 3.0),
    (jnp.zeros((0, 3)), np.zeros((0, 3))),
    ([INF, -INF, NAN], [INF, -INF, NAN]),
    ([1 + 2j], jnp.array([1 + 2j])),
    (np.array([2**62]), np.array([2**62])),
    ((1, 2), [1, 2]),
]
FAR = [
    (jnp.array([True, False]), np.array([True, True])),
    (np.array([3], np.uint8), np.array([5], np.uint8)),  # 3 - 5 wraps to 254, and 5 - 3 does not
    (np.array([5], np.uint8), np.array([3], np.uint8)),
    ([1.0], [1.1]),
    ([1.0], [INF]),
    ([INF], [-INF]),
    ([INF], [1.0]),
    ([NAN], [1.0]),
    ([1.0], [NAN]),
    ([1.0, 2.0], [1.0]),
    ([[1.0]], [1.0]),
    ([1.0], 1.0),
    ([1 + 2j], [1 - 2j]),
    (jnp.array([1, 2]), jnp.array([1, 3])),
]


@pytest.mark.parametrize(("actual", "expected"), CLOSE)
def test_close(actual, expected):
    assert assert_allclose(actual, expected) is None


@pytest.mark.parametrize(("actual", "expected"), FAR)
def test_not_close(actual, expected):
    with pytest.raises(AssertionError):
        assert_allclose(actual, expected)


def test_large_integers_are_not_rounded():
    with pytest.raises(AssertionError):
        assert_allclose(np.array([2**53 + 1]), np.array([2**53]), rtol=0, atol=0.5)


def test_tolerances_and_nan():
    assert_allclose([1.0], [1.05], rtol=0.1)
    assert_allclose([0.0], [1e-3], rtol=0, atol=1e-2)
    with pytest.raises(AssertionError):
        assert_allclose([NAN], [NAN], equal_nan=False)


def test_the_message_names_the_worst_place():
    with pytest.raises(AssertionError) as error:
        assert_allclose(jnp.array([[1.0, 2.0], [3.0, 9.0]]), jnp.array([[1.0, 2.5], [3.0, 4.0]]))
    assert "2 of 4" in str(error.value)
    assert "5.0 at (1, 1)" in str(error.value)
    with pytest.raises(AssertionError, match=r"\(2,\).*\(3,\)"):
        assert_allclose(np.ones(2), np.ones(3))


# --- inputs -------------------------------------------------------------------------------------------------


def test_inputs_have_power():
    inputs = generate_attention_inputs(1, 256, 2, 64)
    assert list(inputs) == ["query", "key", "value"]
    for array in inputs.values():
        assert array.shape == (1, 256, 2, 64)
        assert array.dtype == jnp.float32
        assert 0.95 < float(array.std()) < 1.05
    logits = jnp.einsum("bqhd,bkhd->bhqk", inputs["query"], inputs["key"]) / 8
    weights = jax.nn.softmax(logits, axis=-1)
    assert float(weights.max(-1).mean()) > 5 / 256  # a flat softmax would give 1 / 256


def test_input_options():
    inputs = generate_attention_inputs(
        2, 8, 4, 16, jnp.bfloat16, jax.random.key(3), num_kv_heads=2, kv_seq_len=12, scale=0.5
    )
    assert [array.shape for array in inputs.values()] == [(2, 8, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16)]
    assert {array.dtype for array in inputs.values()} == {jnp.dtype(jnp.bfloat16)}
    assert 0.4 < float(inputs["key"].astype(jnp.float32).std()) < 0.6
    assert not np.array_equal(inputs["key"], inputs["value"])
    plain = generate_attention_inputs(1, 4, 1, 4, scale=1.0)["query"]
    assert np.array_equal(generate_attention_inputs(1, 4, 1, 4, scale=2.0)["query"], 2 * plain)
    assert np.array_equal(generate_attention_inputs(1, 4, 1, 4, key=jax.random.PRNGKey(0))["query"], plain)
    assert not np.array_equal(generate_attention_inputs(1, 4, 1, 4, key=jax.random.key(1))["query"], plain)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(InvalidInputError, match="num_kv_heads is 3"):
        generate_attention_inputs(num_heads=8, num_kv_heads=3)


# --- timer --------------------------------------------------------------------------------------------------


def test_timer_prints_and_measures(capsys):
    with timer("Nap") as handle:
        time.sleep(0.03)
        inside = handle.elapsed
    printed = capsys.readouterr().out
    assert re.fullmatch(r"Nap took \d+\.\d{3} seconds\n", printed)
    assert 0.03 <= inside <= handle.elapsed < 3
    assert handle.elapsed == handle.elapsed
    assert float(printed.split()[2]) == pytest.approx(handle.elapsed, abs=1e-3)
    with timer():
        pass
    assert capsys.readouterr().out.startswith("Operation took ")


def test_timer_waits_for_the_device(capsys):
    def slow(x):
        time.sleep(0.2)
        return x

    @jax.jit
    def dispatched(x):
        return jax.pure_callback(slow, jax.ShapeDtypeStruct((), jnp.float32), x)

    x = jnp.float32(1)
    jax.block_until_ready(dispatched(x))
    with timer("Work") as handle:
        out = handle({"a": dispatched(x), "b": 3})
    assert out["b"] == 3
    assert float(out["a"]) == 1
    assert handle.elapsed >= 0.2


def test_timer_waits_on_what_it_is_given(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", lambda out: waited.append(out) or out)
    with timer("Work") as handle:
        assert handle("out") == "out"
    assert waited == ["out"]


def test_timer_prints_when_the_block_fails(capsys):
    with pytest.raises(KeyError), timer("Fail") as handle:
        raise KeyError
    assert "Fail took" in capsys.readouterr().out
    assert handle.elapsed >= 0


# --- memory -------------------------------------------------------------------------------------------------


def check_host(usage):
    assert set(usage) == {"allocated", "reserved", "limit"}
    assert all(type(value) is int for value in usage.values())
    assert 10 * 2**20 < usage["allocated"] < usage["limit"]


def test_memory_of_the_cpu():
    check_host(get_memory_usage())
    check_host(get_memory_usage(jax.devices("cpu")[0]))


def test_memory_of_the_cpu_without_psutil(monkeypatch):
    actual_import = builtins.__import__

    def without_psutil(name, *args, **kwargs):
        if name == "psutil":
            raise ImportError(name)
        return actual_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_psutil)
    check_host(get_memory_usage())


def fake_gpu(stats):
    def memory_stats():
        if isinstance(stats, Exception):
            raise stats
        return stats

    return types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", memory_stats=memory_stats)


def test_memory_of_a_device_with_statistics():
    stats = {"bytes_in_use": 10, "bytes_reserved": 20, "bytes_limit": 30}
    assert get_memory_usage(fake_gpu(stats)) == {"allocated": 10, "reserved": 20, "limit": 30}
    pool = {"bytes_in_use": 0, "bytes_reserved": 0, "pool_bytes": 25, "bytes_limit": 30}
    assert get_memory_usage(fake_gpu(pool)) == {"allocated": 0, "reserved": 25, "limit": 30}


@pytest.mark.parametrize("stats", [None, {}, NotImplementedError(), RuntimeError(), {"num_allocs": 3}])
def test_memory_of_a_device_without_statistics(stats):
    usage = get_memory_usage(fake_gpu(stats))
    assert usage == {"allocated": 0, "reserved": 0, "limit": 141 * 2**30}


def test_live_arrays_count_where_nothing_else_is_known(monkeypatch):
    device = fake_gpu(None)
    shard = types.SimpleNamespace(device=device, data=np.zeros(100, np.int8))
    other = types.SimpleNamespace(device="another", data=np.zeros(7, np.int8))
    monkeypatch.setattr(jax, "live_arrays", lambda: [types.SimpleNamespace(addressable_shards=[shard, other])] * 2)
    assert get_memory_usage(device)["allocated"] == 200


def test_memory_of_a_described_device():
    assert get_memory_usage("nvidia-h200") == {"allocated": 0, "reserved": 0, "limit": 141 * 2**30}


# What a reader tried to break


@pytest.mark.parametrize(
    ("numerator", "denominator", "bound", "expected"),
    [
        (np.float16(1), np.float16(0), 1e-10, 0.0),
        (np.float16(0), np.float16(0), 1e-10, 0.0),
        (np.float32(1), np.float32(0), 1e-30, 0.0),
        (np.float32(1e30), np.float32(0), 1e-10, 0.0),
        (np.float32(1), np.float32(1e-10), 1e-10, -1e20),
        (np.float32(1), np.float32(2), 1e-10, -0.25),
    ],
)
def test_safe_divide_has_a_gradient_everywhere(numerator, denominator, bound, expected):
    grad = jax.grad(lambda d: safe_divide(numerator, d, bound))(jnp.asarray(denominator))
    np.testing.assert_allclose(grad, expected, rtol=1e-3)


def test_log_sum_exp_keeps_what_is_near_zero():
    for x in ([0.0, -20.0], [0.0, -15.0, -16.0], [0.0, 0.0, -18.0], [-3.0, -3.0]):
        expected = np.log1p(np.exp(np.array(x[1:], np.float64) - x[0]).sum()) + x[0]
        np.testing.assert_allclose(log_sum_exp(jnp.array(x)), expected, rtol=1e-6)
        weights = jax.grad(log_sum_exp)(jnp.array(x))
        np.testing.assert_allclose(weights, jax.nn.softmax(jnp.array(x)), rtol=1e-5)
    assert float(log_sum_exp(jnp.ones(2, jnp.float8_e4m3fn))) > 1


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: log_sum_exp(jnp.ones(3), axis=5), "axis"),
        (lambda: log_sum_exp(jnp.ones((3, 3)), axis=(0, 0)), "axis"),
        (lambda: log_sum_exp(jnp.ones(3), axis=1.5), "axis"),
        (lambda: log_sum_exp("ab"), "x"),
        (lambda: chunk_array(None, 2), "arr"),
        (lambda: safe_divide(1.0, 0.0, "a"), "min_denominator"),
        (lambda: safe_divide(jnp.ones(2), jnp.ones(3)), "denominator"),
        (lambda: generate_attention_inputs(batch_size=-1), "batch_size"),
        (lambda: generate_attention_inputs(num_heads=0), "num_heads"),
        (lambda: generate_attention_inputs(seq_len=1.5), "seq_len"),
        (lambda: generate_attention_inputs(dtype=jnp.int32), "dtype"),
        (lambda: generate_attention_inputs(dtype="foo"), "dtype"),
        (lambda: assert_allclose(None, None), "actual"),
    ],
)
def test_wrong_arguments_are_named(call, name):
    with pytest.raises((InvalidInputError, TypeCheckError), match=f"{name}"):
        call()


def test_assert_allclose_reports_whatever_the_tolerance():
    with pytest.raises(AssertionError, match="1 of 2 elements differ"):
        assert_allclose(np.array([1.0, 2.0]), np.array([1.0, 3.0]), rtol=np.float64(0.1))
    with pytest.raises(AssertionError, match="Largest difference: inf"), np.errstate(all="raise"):
        assert_allclose([1e308], [-1e308])


def test_memory_of_a_device_that_only_counts():
    class Counts:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_in_use": 5, "bytes_reserved": 7, "bytes_limit": 10}

    assert get_memory_usage(Counts()) == {"allocated": 5, "reserved": 7, "limit": 10}
