"""page_attention: what is its own. What all operations share is tested over `examples_page_attention.py`."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from page_calls import (
    EXAMPLES,
    IMPLEMENTATIONS,
    LENS,
    PACKED,
    TABLES,
    WALKS,
    C,
    Q,
    arrays_of,
    check,
    each,
    floats_of,
    slow,
)
from test_jit import count_traces
from tolerances import assert_close

from ejkernel import FwdParams, InvalidInputError, UnsupportedError, explain, overlay, page_attention
from ejkernel.contracts.device import describe
from ejkernel.kernels._xla import page_attention as kernel
from ejkernel.kernels._xla.page_walks import OneSequenceWalk
from ejkernel.ops.page_attention import OPERATION


@st.composite
def calls(draw):
    size, max_blocks = draw(st.sampled_from([(1, 6), (3, 4)]))
    lens = draw(st.lists(st.integers(0, size * max_blocks), min_size=3, max_size=3))
    made = {
        "size": size,
        "max_blocks": max_blocks,
        "kv_heads": draw(st.sampled_from([1, 2])),
        "group": draw(st.sampled_from([1, 3])),
        "value_dim": draw(st.sampled_from([None, 5])),
        "sinks": draw(st.sampled_from([None, "shared", "own"])),
        "scales": draw(st.sampled_from([None, "scalar", "own"])),
    }
    statics = {
        "sliding_window": draw(st.sampled_from([None, 0, (2, None), (5, 3), (None, 0), 100])),
        "logits_soft_cap": draw(st.sampled_from([None, 1.0])),
        "num_splits": draw(st.sampled_from([None, 1, 2, 7])),
    }
    return lens, made, statics, draw(st.sampled_from(sorted(WALKS)))


@slow
@settings(max_examples=12)
@given(calls())
def test_any_call_in_either_walk(call):
    lens, made, statics, walk = call
    with overlay(page_attention=WALKS[walk]):
        check(arrays_of(lens, **made), statics)


@pytest.mark.parametrize(
    ("name", "walk"),
    each(
        *[("everything", "one_by_one_4"), ("shared_prefix", "one_by_one_64"), ("everything", "all_at_once_4")],
        among=[(name, walk) for name in ("everything", "shared_prefix", "int8") for walk in WALKS],
    ),
)
def test_walks_and_steps_never_change_the_meaning(walk, name):
    example = EXAMPLES[name]
    with overlay(page_attention=WALKS[walk]):
        check(example.arrays(), example.statics, wrt=example.differentiable)


@slow
@pytest.mark.parametrize("walk", ["one_by_one_4", "all_at_once_4"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes_in_either_walk(walk, dtype, request):
    if dtype == "float64":
        request.getfixturevalue("x64")
    arrays = arrays_of([20, 7, 0], dtype=dtype, group=2, sinks="own", scales="own")
    with overlay(page_attention=WALKS[walk]):
        check(arrays, {}, dtype)


@pytest.mark.parametrize(
    ("dtype", "cache", "walk"),
    each(
        *[("bfloat16", "int8", "one_by_one_4"), ("float32", "float8_e5m2", "all_at_once_4")],
        among=[
            (dtype, cache, f"{walk}_4")
            for dtype in ("bfloat16", "float32")
            for cache in ("int8", "float8_e4m3fn", "float8_e5m2")
            for walk in ("one_by_one", "all_at_once")
        ],
    ),
)
def test_narrow_caches(walk, cache, dtype):
    arrays = arrays_of([20, 0, 9], dtype=dtype, group=2, cache=cache, scales="own")
    assert arrays["key_cache"].dtype == cache
    with overlay(page_attention=WALKS[walk]):
        check(arrays, {}, dtype, wrt=("query", "k_scale", "v_scale"))


def test_int8_without_scales_is_multiplied_by_one():
    arrays = arrays_of([20, 9], cache="int8")
    plain = page_attention(**arrays, softmax_scale=1e-3)
    ones = page_attention(**arrays, softmax_scale=1e-3, k_scale=1, v_scale=jnp.ones(2))
    np.testing.assert_array_equal(plain, ones)


def test_python_numbers_are_scales():
    arrays = arrays_of([20, 9])
    np.testing.assert_array_equal(
        page_attention(**arrays, k_scale=0.5, v_scale=2),
        page_attention(**arrays, k_scale=jnp.float32(0.5), v_scale=jnp.full(2, 2.0)),
    )


@pytest.mark.parametrize("walk", ["one_by_one_4", "all_at_once_4"])
@pytest.mark.parametrize("garbage", [np.nan, pytest.param(np.inf, marks=slow)])
def test_pages_that_nobody_owns_never_show(walk, garbage):
    """Also those that a window leaves out, and block 0, which garbage entries might be taken for."""
    lens, window = [17, 6, 0, 9], (4, 0)
    arrays = arrays_of(lens)
    seen = np.zeros(arrays["key_cache"].shape[:3], bool)
    tables = np.array(arrays["block_tables"])
    for b, length in enumerate(lens):
        for t in range(max(0, length - 5), length):
            seen[tables[b, t // 4], :, t % 4] = True
    for b, length in enumerate(lens):
        tables[b, : max(0, length - 5) // 4] = -9
    assert seen.any()
    assert not seen.all()
    arrays["block_tables"] = jnp.asarray(tables)
    caches = {n: jnp.where(jnp.asarray(seen)[..., None], arrays[n], 0) for n in ("key_cache", "value_cache")}
    dirty = {n: jnp.where(jnp.asarray(seen)[..., None], x, garbage) for n, x in caches.items()}

    def run(floats):
        out, lse = page_attention(**{**arrays, **floats}, sliding_window=window, return_lse=True)
        return (out**2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum(), out

    with overlay(page_attention=WALKS[walk]):
        gradients = jax.jit(jax.grad(run, has_aux=True))
        grads, out = gradients({**dirty, "query": arrays["query"]})
        expected_grads, expected = gradients({**caches, "query": arrays["query"]})
    np.testing.assert_array_equal(out, expected)
    for name in grads:
        np.testing.assert_array_equal(grads[name], expected_grads[name], err_msg=name)
        assert np.isfinite(grads[name]).all()
    for name in caches:
        assert (np.asarray(grads[name])[~seen] == 0).all()


@slow
@pytest.mark.parametrize("walk", ["one_by_one_64", "all_at_once_4"])
def test_a_nan_query_spoils_only_its_own(walk):
    arrays = arrays_of([8, 0, 5], shared=(), scales="own")
    arrays = {**arrays, "query": arrays["query"].at[0].set(jnp.nan), "key_cache": jnp.nan_to_num(arrays["key_cache"])}
    arrays["value_cache"] = jnp.nan_to_num(arrays["value_cache"])
    own = np.asarray(arrays["block_tables"])[0, :2]

    def run(floats):
        out = page_attention(**{**arrays, **floats})
        return out.sum(), out

    with overlay(page_attention=WALKS[walk]):
        grads, out = jax.jit(jax.grad(run, has_aux=True))({n: arrays[n] for n in ("key_cache", "value_cache", "query")})
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1:]).all()
    assert np.isfinite(grads["query"][1:]).all()
    for name in ("key_cache", "value_cache"):
        assert np.isfinite(np.delete(np.asarray(grads[name]), own, 0)).all()


@pytest.mark.parametrize("walk", each("one_by_one_4", among=WALKS))
def test_a_padded_slot_may_hold_anything(walk):
    """A length of 0 beside a query of NaN: the output and every gradient are as if it were not there."""
    arrays = arrays_of([0, 11], sinks="own", scales="own")
    arrays["query"] = arrays["query"].at[0].set(jnp.nan)

    def loss(floats):
        out, lse = page_attention(**{**arrays, **floats}, return_lse=True)
        return (out**2).sum() + lse.sum(), (out, lse)

    with overlay(page_attention=WALKS[walk]):
        grads, (out, lse) = jax.jit(jax.grad(loss, has_aux=True))(floats_of(arrays))
    assert (out[0] == 0).all()
    np.testing.assert_allclose(lse[0], jax.nn.logsumexp(arrays["softmax_aux"], -1), rtol=1e-6)
    assert (grads["query"][0] == 0).all()
    for name, grad in grads.items():
        assert np.isfinite(grad).all(), name


def test_length_zero():
    arrays = arrays_of([0, 3])
    out, lse = page_attention(**arrays, return_lse=True)
    assert (out[0] == 0).all()
    assert (lse[0] == -jnp.inf).all()
    assert np.isfinite(lse[1]).all()


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"max_blocks": 0}, {"blocks": 0}], ids=["no_sequences", "no_tables", "no_blocks"]
)
@pytest.mark.parametrize("sinks", [False, True])
def test_nothing_to_do(sizes, sinks):
    n = {"batch": 2, "max_blocks": 3, "blocks": 5, **sizes}
    query, cache = jnp.ones((n["batch"], 4, 8)), jnp.ones((n["blocks"], 2, 4, 8))
    lens, tables = jnp.zeros(n["batch"], jnp.int32), jnp.zeros((n["batch"], n["max_blocks"]), jnp.int32)
    more = {"softmax_aux": jnp.array([1.0, 2.0])} if sinks else {}
    values = jnp.ones((n["blocks"], 2, 4, 3))

    def run(query, cache):
        return page_attention(query, cache, values, lens, tables, return_lse=True, **more)

    out, lse = run(query, cache)
    np.testing.assert_array_equal(out, np.zeros((n["batch"], 4, 3)))
    assert lse.shape == (n["batch"], 4)
    np.testing.assert_allclose(lse, np.full_like(lse, np.log(np.exp([1, 2]).sum()) if sinks else -np.inf), rtol=1e-6)
    grads = jax.grad(lambda *a: run(*a)[0].sum(), (0, 1))(query, cache)
    assert all((g == 0).all() for g in grads)


def test_the_window_counts_from_the_last_token():
    """Values that are their token's index, keys that weigh all alike: the mean of what is seen."""
    cache = jnp.arange(16.0).reshape(4, 1, 4, 1)
    tables, lens = jnp.array([[0, 1, 2, 3], [0, 1, 2, 3]]), jnp.array([11, 2])
    query, keys = jnp.ones((2, 1, 1)), jnp.ones((4, 1, 4, 1))
    for window, seen in (((3, 0), ([7, 8, 9, 10], [0, 1])), (0, ([10], [1])), ((None, 2), (range(11), [0, 1]))):
        out = page_attention(query, keys, cache, lens, tables, sliding_window=window)
        np.testing.assert_allclose(out[:, 0, 0], [np.mean(s) for s in seen], rtol=1e-6)


@pytest.mark.parametrize(
    ("splits", "walk"),
    each(
        # A step takes more pages than its split has: the rest are the next split's.
        (2, "one_by_one_64"),
        among=[(splits, walk) for splits in (2, 3, 50) for walk in ("one_by_one_4", "one_by_one_64", "all_at_once_4")],
    ),
)
def test_splits_are_honoured_and_merged(walk, splits):
    arrays = arrays_of([20, 1, 13, 0], group=2, sinks="own")
    call = explain(page_attention, **arrays, num_splits=splits)
    # At most one a page, which the table has five of.
    assert call.chosen.params.num_key_splits == min(splits, 5)
    assert call.chosen.source == "argument"
    with overlay(page_attention=WALKS[walk]):
        whole = page_attention(**arrays, return_lse=True)
        parts = page_attention(**arrays, num_splits=splits, return_lse=True)
        texts = {
            s: jax.jit(lambda a, s=s: page_attention(**a, num_splits=s)).lower(arrays).as_text() for s in (None, splits)
        }
    for a, b in zip(parts, whole, strict=True):
        assert_close(a, b, "float32")
    # The states of all splits are there to be merged.
    state = (
        f"tensor<{4 * min(splits, 5)}x2x2x8xf32>" if walk.startswith("one") else f"tensor<4x{min(splits, 5)}x2x2x8xf32>"
    )
    assert state in texts[splits]
    assert state not in texts[None]


def test_one_trace_for_all_lengths_and_tables(monkeypatch):
    traces = count_traces(monkeypatch)
    rng = np.random.default_rng(0)
    cache, query = jnp.ones((12, 2, 4, 8)), jnp.ones((3, 2, 8))
    jitted = jax.jit(lambda lens, tables: page_attention(query, cache, cache, lens, tables, sliding_window=6))
    for lens in ([0, 0, 0], [12, 1, 5], [3, 12, 12]):
        tables = jnp.asarray(rng.permutation(12).reshape(3, 4)[:, :3])
        page_attention(query, cache, cache, jnp.asarray(lens), tables, sliding_window=6)
        jitted(jnp.asarray(lens), tables)
    assert len(traces) == 2, "once eagerly, once under jit"
    assert jitted._cache_size() == 1


def temporary(max_blocks, walk, wrt=(), size=16, batch=4):
    shape = jax.ShapeDtypeStruct
    cache = shape((batch * 64, 2, size, 32), jnp.float32)
    arrays = {
        "query": shape((batch, 4, 32), jnp.float32),
        "key_cache": cache,
        "value_cache": cache,
        "context_lens": shape((batch,), jnp.int32),
        "block_tables": shape((batch, max_blocks), jnp.int32),
    }

    def run(floats, arrays):
        return page_attention(**{**arrays, **floats}).sum()

    floats = {name: arrays.pop(name) for name in wrt or ("query",)}
    with overlay(page_attention=WALKS[walk]):
        compiled = jax.jit(jax.grad(run) if wrt else run).lower(floats, arrays).compile()
    gathered = 2 * batch * max_blocks * 2 * size * 32 * 4
    return compiled.memory_analysis().temp_size_in_bytes, gathered, cache.size * 4


@pytest.mark.parametrize("walk", each("one_by_one_64", among=["one_by_one_64", "all_at_once_4"]))
def test_memory_is_never_that_of_the_pages_of_all_contexts(walk):
    many, gathered, _ = temporary(2048, walk, ("query",))
    assert many < gathered / 16


@slow
@pytest.mark.parametrize("walk", ["one_by_one_4", "one_by_one_64", "all_at_once_4"])
@pytest.mark.parametrize("wrt", [(), ("query",)], ids=["forward", "backward"])
def test_memory_does_not_grow_with_the_table(walk, wrt):
    few, many = (temporary(max_blocks, walk, wrt)[0] for max_blocks in (128, 2048))
    # The entries themselves are integers that a loop may keep by its side.
    assert many <= few + 2 * 4 * 4 * 2048


@slow
@pytest.mark.parametrize("walk", ["one_by_one_4", "all_at_once_4"])
def test_memory_of_cache_gradients_is_that_of_the_caches(walk):
    wrt = ("query", "key_cache", "value_cache")
    few, _, cache = temporary(128, walk, wrt)
    many, gathered, _ = temporary(2048, walk, wrt)
    assert many <= few + 2 * 4 * 4 * 2048
    assert many < 3 * cache < gathered


def test_a_cpu_stores_no_pages_of_all_sequences():
    """The gather of a step's pages is fused into the products."""
    shape = jax.ShapeDtypeStruct
    cache = shape((64, 2, 16, 32), jnp.float32)
    args = shape((4, 4, 32), jnp.float32), cache, cache, shape((4,), jnp.int32), shape((4, 64), jnp.int32)
    with overlay(page_attention=FwdParams(q_blocksize=4, kv_blocksize=128)):
        text = jax.jit(page_attention).lower(*args).compile().as_text()
    pages = 4 * 8 * 2 * 16 * 32
    fused = False
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            fused = "fused_computation" in line or "reduce" in line
        for result in re.findall(r"= f32\[([\d,]+)\]", line):
            size = np.prod([int(n) for n in result.split(",")])
            assert fused or size < pages or "parameter" in line or "get-tuple-element" in line or "bitcast" in line, (
                line
            )


def test_work_is_that_of_the_sum_of_lengths(monkeypatch):
    """Each sequence's loop ends with that sequence: the pages that steps begin with, as they run."""
    begun = []
    original = OneSequenceWalk.steps

    def watched(self, start, stop, step, state):
        def watched_step(page, state):
            jax.debug.callback(lambda page: begun.append(int(page)), page)
            return step(page, state)

        return original(self, start, stop, watched_step, state)

    monkeypatch.setattr(OneSequenceWalk, "steps", watched)
    with overlay(page_attention=WALKS["one_by_one_4"]):
        jax.block_until_ready(page_attention(**arrays_of([20, 1]), softmax_scale=0.123))
        jax.effects_barrier()
    assert sorted(begun) == [0, 0, 1, 2, 3, 4]


@slow
@pytest.mark.parametrize("walk", WALKS)
def test_reruns_are_bit_identical(walk):
    example = EXAMPLES["shared_prefix"]
    arrays = example.arrays()

    def run():
        grads = jax.grad(lambda f: (page_attention(**{**arrays, **f}) ** 2).sum())(floats_of(arrays))
        return jax.tree.map(np.asarray, (page_attention(**arrays), grads))

    with overlay(page_attention=WALKS[walk]):
        first = run()
        for _ in range(3):
            for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(run()), strict=True):
                np.testing.assert_array_equal(a, b)


VMAPPED = ["query", "key_cache", "context_lens", "block_tables", "softmax_aux", "k_scale", "all"]


@slow
@pytest.mark.parametrize("which", VMAPPED)
def test_vmap_over_each_argument(which):
    made = [arrays_of([20, 7], seed, group=2, sinks="own", scales="own") for seed in range(3)]
    first = {**made[0], **{n: jnp.nan_to_num(made[0][n]) for n in ("key_cache", "value_cache")}}
    other = {
        "query": [m["query"] for m in made],
        "key_cache": [jnp.nan_to_num(m["key_cache"]) for m in made],
        "context_lens": [jnp.asarray(x) for x in ([20, 7], [3, 0], [1, 8])],
        "block_tables": [jnp.where((x := m["block_tables"]) >= x.max(), 0, x).clip(0, 12) for m in made],
        "softmax_aux": [m["softmax_aux"] for m in made],
        "k_scale": [m["k_scale"] for m in made],
    }
    first["block_tables"] = other["block_tables"][0]
    names = list(other) if which == "all" else [which]
    axes = {n: 0 if n in names else None for n in first}
    arrays = {n: jnp.stack(other[n]) if n in names else x for n, x in first.items()}

    def gradients(arrays):
        def loss(floats):
            out, lse = page_attention(**{**arrays, **floats}, return_lse=True)
            return (out**2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum(), out

        return jax.grad(loss, has_aux=True)(floats_of(arrays))

    def query_gradient(arrays):
        return jax.grad(lambda q: (page_attention(**{**arrays, "query": q}) ** 2).sum())(arrays["query"])

    grads, out = jax.jit(jax.vmap(gradients, (axes,)))(arrays)
    dq = jax.jit(jax.vmap(query_gradient, (axes,)))(arrays)
    gradients, query_gradient = jax.jit(gradients), jax.jit(query_gradient)
    for i in range(3):
        one = {n: x[i] if axes[n] == 0 else x for n, x in arrays.items()}
        expected, expected_out = gradients(one)
        assert_close(out[i], expected_out, "float32")
        assert_close(dq[i], query_gradient(one), "float32", gradient=True)
        for name in expected:
            assert_close(grads[name][i], expected[name], "float32", gradient=True, what=name)


def test_vmap_over_queries_folds_into_the_batch():
    """One loop over pages for all, and the cache is not repeated; over caches it is a loop."""
    arrays = arrays_of([20, 7])
    queries = jnp.stack([arrays.pop("query")] * 3)
    text = jax.jit(jax.vmap(lambda q: page_attention(q, **arrays))).lower(queries).as_text()
    assert "tensor<6x2x8xf32>" in text
    assert OPERATION.folds(frozenset({"query", "context_lens", "block_tables", "k_scale", "softmax_aux"}))
    assert not OPERATION.folds(frozenset({"query", "value_cache"}))


@slow
@pytest.mark.parametrize("walk", ["one_by_one_4", "all_at_once_4"])
def test_inside_shard_map(walk):
    """Sequences over one axis, heads over another; pages that devices share get the gradients of all."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    arrays = arrays_of([20, 7, 9, 0], group=2, sinks="own", scales="own", shared=[(2, 0, 2)])
    specs = {
        "query": P("data", "model"),
        "key_cache": P(None, "model"),
        "value_cache": P(None, "model"),
        "context_lens": P("data"),
        "block_tables": P("data"),
        "softmax_aux": P("model"),
        "k_scale": P("model"),
        "v_scale": P("model"),
    }

    def loss(arrays):
        out, lse = page_attention(**arrays, return_lse=True)
        return (out**2).sum() + lse.sum()

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(specs,), out_specs=P())
    def mapped(arrays):
        return jax.lax.psum(loss(arrays), ("data", "model"))

    def gradients(f):
        return jax.value_and_grad(lambda floats: f({**arrays, **floats}))(floats_of(arrays))

    with overlay(page_attention=WALKS[walk]):
        value, grads = gradients(mapped)
        expected, expected_grads = gradients(loss)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name in grads:
        assert_close(grads[name], expected_grads[name], "float32", gradient=True, what=name)


WRONG = [
    ("query", {"query": Q[0]}, ["2 dimensions", "head_dim"]),
    ("query", {"query": [1.0]}, ["an array"]),
    ("query", {"query": Q.astype(jnp.int32)}, ["int32", "floating"]),
    ("query", {"query": jnp.ones((2, 3, 8))}, ["multiple of the key cache's 2"]),
    ("query", {"query": jnp.ones((2, 0, 8))}, ["at least 1"]),
    ("key_cache", {"key_cache": C[0]}, ["3 dimensions", "num_blocks"]),
    ("key_cache", {"key_cache": C[..., :7]}, ["head dim, 8"]),
    ("key_cache", {"key_cache": C.astype(jnp.bfloat16)}, ["bfloat16", "float32", "int8"]),
    ("key_cache", {"key_cache": C.astype(jnp.int32)}, ["int32", "int8"]),
    ("key_cache", {"key_cache": C[:, :, :0], "value_cache": C[:, :, :0]}, ["at least 1"]),
    ("key_cache", {"key_cache": C > 0}, ["bool"]),
    ("value_cache", {"value_cache": C.astype(jnp.int8)}, ["int8", "float32", "cast"]),
    ("value_cache", {"value_cache": C[:5]}, ["[6, 2, 4]"]),
    ("value_cache", {"value_cache": C[:, :1]}, ["[6, 2, 4]"]),
    ("value_cache", {"value_cache": C[:, :, :3]}, ["[6, 2, 4]"]),
    ("context_lens", {"context_lens": LENS[None]}, ["2 dimensions"]),
    ("context_lens", {"context_lens": LENS[:1]}, ["[2] integers", "batch"]),
    ("context_lens", {"context_lens": LENS * 1.0}, ["float32", "integer"]),
    ("context_lens", {"context_lens": jnp.array([5, 13])}, ["12", "[ 5 13]"]),
    ("context_lens", {"context_lens": np.array([-1, 3])}, ["from 0", "-1"]),
    ("block_tables", {"block_tables": TABLES[0]}, ["it has 1 dimension."]),
    ("block_tables", {"block_tables": TABLES[:1]}, ["[2, max_blocks]", "batch"]),
    ("block_tables", {"block_tables": TABLES * 1.0}, ["integer"]),
    ("block_tables", {"block_tables": jnp.array([[0, -1, 2], [2, 3, 0]])}, ["[0, 1] is -1", "0 to 5", "5 tokens"]),
    ("block_tables", {"block_tables": np.array([[0, 1, 2], [6, 3, 0]])}, ["[1, 0] is 6", "8 tokens"]),
    ("softmax_scale", {"softmax_scale": "big"}, ["'big'"]),
    ("softmax_scale", {"softmax_scale": float("inf")}, ["inf"]),
    ("block_size", {"block_size": 8}, ["8", "caches' own, 4"]),
    ("block_size", {"block_size": 4.0}, ["4.0"]),
    ("block_size", {"block_size": True}, ["True"]),
    ("sliding_window", {"sliding_window": -1}, ["-1"]),
    ("sliding_window", {"sliding_window": (3, -2)}, ["(3, -2)"]),
    ("sliding_window", {"sliding_window": (1, 2, 3)}, ["pair"]),
    ("sliding_window", {"sliding_window": 2.5}, ["2.5"]),
    ("logits_soft_cap", {"logits_soft_cap": 0.0}, ["above 0"]),
    ("logits_soft_cap", {"logits_soft_cap": -3}, ["-3"]),
    ("softmax_aux", {"softmax_aux": jnp.ones((3, 2))}, ["[4, num_sinks]"]),
    ("softmax_aux", {"softmax_aux": jnp.ones((4, 0))}, ["at least one sink"]),
    ("k_scale", {"k_scale": jnp.ones(3)}, ["[2]", "scalar"]),
    ("k_scale", {"k_scale": jnp.ones((1, 2))}, ["2 dimensions"]),
    ("v_scale", {"v_scale": jnp.ones(4)}, ["[2]"]),
    ("v_scale", {"v_scale": jnp.ones(2, jnp.int32)}, ["int32", "floating"]),
    ("v_scale", {"v_scale": "one"}, ["'one'"]),
    ("num_splits", {"num_splits": 0}, ["0", "≥ 1"]),
    ("num_splits", {"num_splits": 2.0}, ["2.0"]),
    ("num_splits", {"num_splits": True}, ["True"]),
    ("return_lse", {"return_lse": 1}, ["True or False"]),
    ("platform", {"platform": "metal"}, ["'metal'"]),
    ("backend", {"backend": "npu"}, ["'npu'"]),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "arguments", "words"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_arguments(argument, arguments, words):
    right = {"query": Q, "key_cache": C, "value_cache": C, "context_lens": LENS, "block_tables": TABLES}
    assert page_attention(**right).shape == Q.shape
    with pytest.raises(InvalidInputError) as caught:
        page_attention(**{**right, **arguments})
    assert str(caught.value).startswith(f"page_attention: {argument} is "), caught.value
    for word in words:
        assert word in str(caught.value), caught.value


def test_entries_left_of_the_window_are_not_needed():
    tables = jnp.array([[-1, 1, -1], [-5, 3, 99]])
    with pytest.raises(InvalidInputError, match="block_tables"):
        page_attention(Q, C, C, LENS, tables, sliding_window=(4, 0))
    for window in ((0, 0), [0, None], 0):
        assert np.isfinite(page_attention(Q, C, C, LENS, tables, sliding_window=window)).all()


def test_traced_nonsense_stays_within_bounds():
    """What cannot be refused must not read outside: lengths are cut to the table, blocks to the cache."""
    run = jax.jit(page_attention)
    same = run(Q, C, C, jnp.array([12, 0]), jnp.array([[0, 5, 5], [0, 0, 0]]))
    np.testing.assert_array_equal(run(Q, C, C, jnp.array([1000, -7]), jnp.array([[-3, 77, 5], [0, 0, 0]])), same)


@pytest.mark.parametrize("dtype", each("int8", among=["int8", "uint8", "int16", "uint32"]))
def test_integers_of_any_width(dtype):
    expected = page_attention(Q, C, C, LENS, TABLES)
    tables = jnp.where(TABLES < 0, 0, TABLES).astype(dtype)
    np.testing.assert_array_equal(page_attention(Q, C, C, LENS.astype(dtype), tables), expected)


def test_gradients_of_narrow_caches_are_refused():
    arrays = arrays_of([20, 7], cache="float8_e4m3fn")
    with pytest.raises(UnsupportedError, match=r"key_cache is float8_e4m3fn; there is no gradient"):
        jax.grad(lambda k: page_attention(**{**arrays, "key_cache": k}).sum())(arrays["key_cache"])


def test_a_float8_query_is_refused_by_name():
    narrow = jnp.float8_e4m3fn
    with pytest.raises(UnsupportedError, match="dtype float8_e4m3fn is not supported"):
        page_attention(Q.astype(narrow), C.astype(narrow), C.astype(narrow), LENS, TABLES)


def test_features_are_named_in_the_explanation():
    shape = jax.ShapeDtypeStruct
    caches = (shape((6, 2, 4, 8), jnp.int8), shape((6, 2, 4, 5), jnp.int8))
    text = explain(
        page_attention, shape((2, 4, 8), jnp.bfloat16), *caches, shape((2,), jnp.int32), shape((2, 3), jnp.int32),
        k_scale=0.1, sliding_window=3,
    )  # fmt: skip
    assert set(text.call.features) == {"int8_cache", "scales", "gqa", "value_dim", "window", "uneven_pages"}
    packed = explain(page_attention, **{n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in PACKED.items()})
    assert set(packed.call.features) == {"varlen", "gqa", "uneven_pages"}


def test_cost_counts_the_pages_of_the_table():
    shape = jax.ShapeDtypeStruct
    cache = shape((1000, 2, 16, 32), jnp.int8)

    def cost(**more):
        return OPERATION.cost(
            explain(page_attention, shape((3, 4, 32), jnp.float32), cache, cache, shape((3,), jnp.int32),
                    shape((3, 10), jnp.int32), **more).call
        )  # fmt: skip

    whole, window = cost(), cost(sliding_window=31)
    assert whole.flops == 2 * 3 * 4 * 160 * 64
    pages, small = 3 * 10 * 2 * 16 * 64, 3 * 4 * 32 * 4 * 2 + 3 * 4 + 3 * 10 * 4
    assert whole.bytes == pages + small
    assert window.flops == whole.flops // 5
    assert window.bytes == pages // 5 + small


@slow
@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
def test_samples_run(entry):
    shape = jax.ShapeDtypeStruct
    call = explain(
        page_attention, shape((3, 4, 8), jnp.float32), shape((4, 2, 4, 8), jnp.int8), shape((4, 2, 4, 8), jnp.int8),
        shape((3,), jnp.int32), shape((3, 5), jnp.int32), k_scale=0.1, softmax_aux=shape((2,), jnp.float32),
        platform=entry.platform,
    )  # fmt: skip
    sample = OPERATION.sample(call.call.shapes)
    assert {n: (x.shape, x.dtype) for n, x in sample.items()} == {
        n: (x.shape, x.dtype) for n, x in call.call.shapes.items()
    }
    out, lse = jax.jit(lambda sample: entry.kernel.forward(sample, call.call.spec, call.chosen.params))(sample)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()


def test_one_cpu_walks_sequence_by_sequence_and_accelerators_all_at_once():
    arrays = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in arrays_of([20, 7]).items()}
    xla = kernel.XlaPageAttention
    call = explain(page_attention, **arrays, device="nvidia-h200", platform="xla")
    assert call.chosen.params.q_blocksize == 2
    alone = dataclasses.replace(describe(jax.devices()[0]), shared_by=1)
    for direction in ("forward", "backward"):
        assert xla.defaults(call.call.shapes, call.call.spec, alone, direction).q_blocksize == 1
        for params in xla.space(call.call.shapes, call.call.spec, alone, direction):
            assert params.q_blocksize == 1
