"""Under jit: the same bits, no recompilation that shapes do not ask for, and little overhead outside of it."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import each_case, named
from conftest import SHORT
from examples import each_example

from ejkernel import FwdParams, flash_attention, overlay, page_attention, page_update
from ejkernel.ops.core import operation

pytestmark = pytest.mark.typed


@each_case(named("everything", "everything_packed", "varlen_cross"), short={"everything_packed"})
def test_jit_equals_eager(subject, case):
    arrays, statics = case.make(subject.dtype)
    call = {**statics, **case.blocks, "platform": subject.platform}
    eager = flash_attention(**arrays, **call)
    jitted = jax.jit(lambda arrays: flash_attention(**arrays, **call))(arrays)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
        np.testing.assert_array_equal(a, b)


def count_traces(monkeypatch):
    traces = []
    original = operation.Operation._trace
    monkeypatch.setattr(operation.Operation, "_trace", lambda self, *a: traces.append(1) or original(self, *a))
    return traces


def test_one_trace_for_all_values(monkeypatch):
    traces = count_traces(monkeypatch)
    x = jnp.ones((1, 19, 2, 8))
    for seed in range(3):
        for ends in ([0, 4, 19], [0, 0, 7], [0, 19, 19]):
            offsets = jnp.asarray(ends)
            flash_attention(
                x, x + seed, x, cum_seqlens_q=offsets, cum_seqlens_k=offsets, dropout_prob=0.1, dropout_seed=seed
            )
    assert len(traces) == 1


def test_an_overlay_reaches_functions_jitted_before(monkeypatch):
    traces = count_traces(monkeypatch)
    x = jnp.ones((1, 23, 2, 8))
    jitted = jax.jit(lambda x: flash_attention(x, x, x))
    jitted(x)
    with overlay(flash_attention=FwdParams(q_blocksize=8)):
        jitted(x)
        jitted(x)
    jitted(x)
    assert len(traces) == 2


def test_numpy_arrays_and_weak_types():
    x = np.ones((1, 4, 2, 8), np.float32)
    np.testing.assert_allclose(flash_attention(x, x, x), x, rtol=1e-6)


def test_numbers_of_numpy_are_numbers():
    """Static ones, as Python's are: of no type that is not annotated."""
    x = np.linspace(-1, 1, 1 * 4 * 2 * 8, dtype=np.float32).reshape(1, 4, 2, 8)
    numbers = {"softmax_scale": 0.5, "logits_soft_cap": 2.0, "dropout_prob": 0.25, "dropout_seed": 7}
    of_numpy = {n: np.int32(v) if isinstance(v, int) else np.float32(v) for n, v in numbers.items()}
    np.testing.assert_array_equal(flash_attention(x, x, x, **of_numpy), flash_attention(x, x, x, **numbers))
    cache, where = jnp.ones((2, 2, 4, 8), jnp.int8), (jnp.array([3]), jnp.array([[1]]))
    token = x[0, :1]
    outs = []
    for scales in ({"k_scale": 0.5, "v_scale": 3.0}, {"k_scale": np.float32(0.5), "v_scale": np.float32(3)}):
        written = page_update(cache, cache, token, token, *where, **scales)
        outs.append(page_attention(token, *written, *where, **scales))
    np.testing.assert_array_equal(*outs)


def test_forward_mode_is_refused_by_jax_not_wrong():
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: flash_attention(x, x, x), (x,), (x,))


@each_example(main=True)
def test_every_operation(subject, example):
    arrays = example.arrays(subject.dtype)
    eager = example.run(arrays, platform=subject.platform)
    jitted = jax.jit(lambda arrays: example.run(arrays, platform=subject.platform))(arrays)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_threads_may_differentiate_at_once():
    """One with a trained bias, one with a fixed one: the same call, but not the same gradients."""
    x = jax.ShapeDtypeStruct((1, 20, 2, 8), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 2, 20, 20), jnp.float32)

    def lower(trained):
        def both(floats, rest, dout):
            def attend(floats):
                return flash_attention(**floats, **rest, causal=True)

            return jax.vjp(attend, floats)[1](dout)

        floats, rest = {"query": x, "key": x, "value": x}, {}
        (floats if trained else rest)["bias"] = bias
        return len(jax.tree.leaves(jax.jit(both).lower(floats, rest, x).out_info))

    for _ in range(2 if SHORT else 8):
        jax.clear_caches()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lower, [True, False] * 2)) == [4, 3] * 2
