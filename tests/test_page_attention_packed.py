"""page_attention of several query tokens a sequence: what is its own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples_page_attention import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from page_calls import (
    EXAMPLES,
    FLOATS,
    PACKED,
    TABLES,
    TILES,
    WALKS,
    arrays_of,
    check,
    each,
    floats_of,
    slow,
    tiled,
)
from test_jit import count_traces
from tolerances import assert_close, assert_same

from ejkernel import InvalidInputError, overlay, page_attention
from ejkernel.kernels._xla.page_walks import OneSequenceWalk


def decoded(arrays):
    """A packed call as one that decodes: each token of a sequence is the last of a context of its own."""
    offsets, lens = np.asarray(arrays["cum_seqlens_q"]), np.asarray(arrays["context_lens"])
    counts = np.diff(offsets)
    owner = np.repeat(np.arange(len(lens)), counts)
    index = np.arange(offsets[-1]) - offsets[owner]
    rest = {n: x for n, x in arrays.items() if n != "cum_seqlens_q"}
    return {
        **rest,
        "query": arrays["query"][: offsets[-1]],
        "context_lens": jnp.asarray(lens[owner] - counts[owner] + index + 1),
        "block_tables": arrays["block_tables"][owner],
    }


@st.composite
def packed_calls(draw):
    size, max_blocks = draw(st.sampled_from([(1, 6), (3, 4)]))
    lens = draw(st.lists(st.integers(0, size * max_blocks), min_size=3, max_size=3))
    made = {
        "chunks": [draw(st.integers(0, length)) for length in lens],
        "padding": draw(st.sampled_from([0, 1, 5])),
        "size": size,
        "max_blocks": max_blocks,
        "kv_heads": draw(st.sampled_from([1, 2])),
        "group": draw(st.sampled_from([1, 3])),
        "value_dim": draw(st.sampled_from([None, 5])),
        "sinks": draw(st.sampled_from([None, "shared", "own"])),
        "scales": draw(st.sampled_from([None, "scalar", "own"])),
    }
    made["padding"] += sum(made["chunks"]) == 0
    statics = {
        "sliding_window": draw(st.sampled_from([None, 0, (2, None), (5, 3), 100])),
        "logits_soft_cap": draw(st.sampled_from([None, 1.0])),
        "num_splits": draw(st.sampled_from([None, 2, 7])),
    }
    return lens, made, statics, tiled(draw(st.sampled_from(sorted(WALKS))), draw(st.sampled_from(TILES)))


@slow
@settings(max_examples=16)
@given(packed_calls())
def test_any_packed_call_in_either_walk_and_any_tile(call):
    lens, made, statics, params = call
    with overlay(page_attention=params):
        check(arrays_of(lens, **made), statics)


@pytest.mark.parametrize(
    ("name", "walk", "tile"),
    each(
        ("chunks_and_everything", "one_by_one_4", 2),
        among=[
            (name, walk, tile)
            for name in ("chunks", "chunks_int8", "chunks_and_everything")
            for walk in WALKS
            for tile in TILES
        ],
    ),
)
def test_tiles_never_change_the_meaning(name, walk, tile):
    example = EXAMPLES[name]
    with overlay(page_attention=tiled(walk, tile)):
        check(example.arrays(), example.statics, wrt=example.differentiable)


@slow
@pytest.mark.parametrize("walk", ["one_by_one_4", "all_at_once_4"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_packed_dtypes_in_either_walk(walk, dtype, request):
    if dtype == "float64":
        request.getfixturevalue("x64")
    arrays = arrays_of([20, 7, 0], dtype=dtype, group=2, sinks="own", scales="own", chunks=[5, 7, 0], padding=2)
    with overlay(page_attention=tiled(walk, 4)):
        check(arrays, {}, dtype)


@pytest.mark.parametrize(
    ("chunks", "walk"),
    each(
        ((5, 2, 4), "one_by_one_4"),
        among=[(chunks, f"{walk}_4") for chunks in ((1, 1, 1), (5, 2, 4)) for walk in ("one_by_one", "all_at_once")],
    ),
)
def test_a_chunk_is_as_many_decoding_calls(chunks, walk):
    """One token each is decoding, also where the tile has room for more."""
    packed = arrays_of([13, 7, 4], group=2, sinks="own", chunks=chunks)
    statics = {"sliding_window": (6, 0), "return_lse": True}
    with overlay(page_attention=tiled(walk, 4)):
        results = page_attention(**packed, **statics)
        expected = page_attention(**decoded(packed), **statics)
    for a, b in zip(results, expected, strict=True):
        assert_same(a, b, "float32")


def test_offsets_of_one_token_each_give_what_no_offsets_give():
    packed = arrays_of([13, 7, 4], chunks=[1, 1, 1])
    plain = {n: x for n, x in packed.items() if n != "cum_seqlens_q"}
    np.testing.assert_array_equal(page_attention(**packed), page_attention(**plain))


def test_every_token_of_a_chunk_has_its_own_window():
    """Values that are their token's index, keys that weigh all alike: the mean of what is seen."""
    keys, values = jnp.ones((4, 1, 4, 1)), jnp.arange(16.0).reshape(4, 1, 4, 1)
    tables, lens, offsets = jnp.array([[0, 1, 2, 3]] * 2), jnp.array([11, 2]), jnp.array([0, 3, 5])
    for window, seen in (
        ((3, 0), ([5, 6, 7, 8], [6, 7, 8, 9], [7, 8, 9, 10], [0], [0, 1])),
        (None, (range(9), range(10), range(11), [0], [0, 1])),
    ):
        out = page_attention(
            jnp.ones((5, 1, 1)), keys, values, lens, tables, cum_seqlens_q=offsets, sliding_window=window
        )
        np.testing.assert_allclose(out[:, 0, 0], [np.mean(s) for s in seen], rtol=1e-6)


@pytest.mark.parametrize(
    ("sinks", "walk"),
    each((None, "one_by_one_4"), ("own", "all_at_once_4"), among=[(s, w) for s in (None, "own") for w in WALKS]),
)
def test_padding_may_hold_anything(sinks, walk):
    """Queries of NaN past the last offset: the output and every gradient are as if they were not there."""
    arrays = arrays_of([9, 6, 4], sinks=sinks, scales="own", chunks=[4, 0, 1], padding=3)
    assert np.isnan(arrays["query"][5:]).all()

    def loss(floats):
        out, lse = page_attention(**{**arrays, **floats}, return_lse=True)
        return (out**2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum(), (out, lse)

    with overlay(page_attention=tiled(walk, 2)):
        grads, (out, lse) = jax.jit(jax.grad(loss, has_aux=True))(floats_of(arrays))
    assert (out[5:] == 0).all()
    expected = jax.nn.logsumexp(arrays["softmax_aux"], -1) if sinks else jnp.full(2, -jnp.inf)
    np.testing.assert_allclose(lse[5:], jnp.broadcast_to(expected, (3, 2)), rtol=1e-6)
    assert np.isfinite(lse[:5]).all()
    assert (grads["query"][5:] == 0).all()
    for name, grad in grads.items():
        assert np.isfinite(grad).all(), name


@pytest.mark.parametrize("walk", each("one_by_one_4", among=["one_by_one_4", "all_at_once_64"]))
def test_pages_that_no_chunk_sees_never_show(walk):
    """Those left of the first token's window, those of sequences without a token, and what follows a context."""
    lens, chunks, left = [17, 6, 11, 9], [3, 6, 0, 1], 4
    arrays = arrays_of(lens, chunks=chunks)
    seen = np.zeros(arrays["key_cache"].shape[:3], bool)
    tables = np.array(arrays["block_tables"])
    for b, (length, n) in enumerate(zip(lens, chunks, strict=True)):
        first = max(0, length - n - left) if n else length
        for t in range(first, length):
            seen[tables[b, t // 4], :, t % 4] = True
        tables[b, : first // 4] = -9
    arrays["block_tables"] = jnp.asarray(tables)
    visible = jnp.asarray(seen)[..., None]
    clean = {n: jnp.where(visible, arrays[n], 0) for n in ("key_cache", "value_cache")}
    dirty = {n: jnp.where(visible, x, jnp.nan) for n, x in clean.items()}

    def run(floats):
        out, lse = page_attention(**{**arrays, **floats}, sliding_window=(left, 0), return_lse=True)
        return (out**2).sum() + lse.sum(), out

    with overlay(page_attention=tiled(walk, 4)):
        gradients = jax.jit(jax.grad(run, has_aux=True))
        actual = gradients({**dirty, "query": arrays["query"]})
        expected = gradients({**clean, "query": arrays["query"]})
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


def test_one_trace_for_all_chunks(monkeypatch):
    traces = count_traces(monkeypatch)
    cache, query = jnp.ones((12, 2, 4, 8)), jnp.ones((7, 2, 8))
    tables = jnp.arange(9).reshape(3, 3)
    jitted = jax.jit(lambda lens, offsets: page_attention(query, cache, cache, lens, tables, cum_seqlens_q=offsets))
    for lens, chunks in (([0, 0, 0], [0, 0, 0]), ([12, 1, 5], [4, 1, 2]), ([3, 12, 12], [0, 7, 0])):
        offsets = jnp.cumsum(jnp.array([0, *chunks]))
        page_attention(query, cache, cache, jnp.asarray(lens), tables, cum_seqlens_q=offsets)
        jitted(jnp.asarray(lens), offsets)
    assert len(traces) == 2, "once eagerly, once under jit"
    assert jitted._cache_size() == 1


def test_tokens_of_a_tile_share_the_pages_they_read(monkeypatch):
    """The pages that steps begin with, as they run: four tokens of one tile and one of another."""
    begun = []
    original = OneSequenceWalk.steps

    def watched(self, start, stop, step, state):
        def watched_step(page, state):
            jax.debug.callback(lambda page: begun.append(int(page)), page)
            return step(page, state)

        return original(self, start, stop, watched_step, state)

    monkeypatch.setattr(OneSequenceWalk, "steps", watched)
    arrays = arrays_of([20, 1, 9], chunks=[4, 1, 0])
    with overlay(page_attention=tiled("one_by_one_4", 4)):
        jax.block_until_ready(page_attention(**arrays, softmax_scale=0.123))
        jax.effects_barrier()
    assert sorted(begun) == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("query",), marks=slow),
        pytest.param(("context_lens", "block_tables"), marks=slow),
        ("query", "context_lens", "block_tables", "cum_seqlens_q", "softmax_aux", "k_scale"),
        pytest.param(("cum_seqlens_q",), marks=slow),
        pytest.param(("key_cache", "value_cache"), marks=slow),
    ],
    ids="-".join,
)
@pytest.mark.parametrize(
    "wrt", [("query", "softmax_aux", "k_scale", "v_scale"), pytest.param(FLOATS, marks=slow)], ids=["folds", "loops"]
)
def test_vmap_over_packed_queries(names, wrt):
    """Each example with its own offsets, and padding of its own between those of the others."""
    packed = [([20, 7, 3], [4, 2, 0]), ([5, 0, 12], [0, 0, 3]), ([8, 8, 8], [1, 6, 1])]
    made = [
        arrays_of(lens, seed, group=2, sinks="own", scales="own", chunks=chunks, padding=8 - sum(chunks))
        for seed, (lens, chunks) in enumerate(packed)
    ]
    # Examples share caches: all blocks hold numbers, and every entry names one.
    for m in made:
        m["block_tables"] = m["block_tables"].clip(0, 17)
        for name in ("key_cache", "value_cache"):
            m[name] = jnp.where(jnp.isnan(m[name]), 0.5, m[name])
    shared = {**made[0], "context_lens": jnp.array([20, 9, 12])}
    axes = {n: 0 if n in names else None for n in shared}
    arrays = {n: jnp.stack([m[n] for m in made]) if n in names else x for n, x in shared.items()}
    if "query" not in names:
        arrays["query"] = jnp.nan_to_num(shared["query"])

    def gradients(arrays):
        def loss(floats):
            out, lse = page_attention(**{**arrays, **floats}, return_lse=True)
            return (out**2).sum() + lse.sum(), (out, lse)

        return jax.grad(loss, has_aux=True)({n: arrays[n] for n in wrt})

    grads, results = jax.jit(jax.vmap(gradients, (axes,)))(arrays)
    gradients = jax.jit(gradients)
    for i in range(3):
        expected, expected_results = gradients({n: x[i] if axes[n] == 0 else x for n, x in arrays.items()})
        for a, b in zip(results, expected_results, strict=True):
            assert_close(a[i], b, "float32")
        for name in expected:
            assert_close(grads[name][i], expected[name], "float32", gradient=True, what=name)


@slow
def test_packed_queries_with_heads_over_a_mesh():
    """By the compiler, which has nothing to gather, and inside shard_map."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    arrays = arrays_of([20, 7, 9], group=2, sinks="own", scales="own", chunks=[4, 2, 0], padding=2)
    by_head = P(None, "model")
    specs = {"query": by_head, "key_cache": by_head, "value_cache": by_head}
    specs = {n: specs.get(n, P("model") if n in FLOATS else P()) for n in arrays}

    def run(arrays):
        return page_attention(**arrays, return_lse=True)

    def gradients(arrays):
        return jax.grad(lambda f: (run({**arrays, **f})[0] ** 2).sum())(floats_of(arrays))

    spread = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()}
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=(by_head, by_head))
    for function, expected in ((run, run), (gradients, gradients), (mapped, run)):
        step = jax.jit(function)
        for a, b in zip(*map(jax.tree.leaves, (step(spread), expected(arrays))), strict=True):
            assert_close(a, b, "float32", gradient=True)
        assert not re.search(r"all-gather|all-to-all|collective-permute", step.lower(spread).compile().as_text())


WRONG_PACKED = [
    ("cum_seqlens_q", {"cum_seqlens_q": jnp.array([1, 2, 5])}, ["begin at 0", "[1 2 5]"]),
    ("cum_seqlens_q", {"cum_seqlens_q": jnp.array([-1, 2, 5])}, ["begin at 0", "[-1  2  5]"]),
    ("cum_seqlens_q", {"cum_seqlens_q": np.array([0, 4, 2])}, ["never decrease", "[0 4 2]"]),
    ("cum_seqlens_q", {"cum_seqlens_q": np.array([0, 4, 2], np.uint8)}, ["never decrease", "[0 4 2]"]),
    ("cum_seqlens_q", {"cum_seqlens_q": jnp.array([0, 2, 7])}, ["end at 6", "[0 2 7]"]),
    ("cum_seqlens_q", {"cum_seqlens_q": jnp.array([0, 6, 6])}, ["context", "sequence 0 has 6 and a context of 5"]),
    ("cum_seqlens_q", {"context_lens": jnp.array([5, 0])}, ["sequence 1 has 3 and a context of 0"]),
    ("cum_seqlens_q", {"cum_seqlens_q": jnp.array([[0, 2, 5]])}, ["2 dimensions"]),
    ("cum_seqlens_q", {"cum_seqlens_q": jnp.array([0.0, 2.0, 5.0])}, ["integer"]),
    ("cum_seqlens_q", {"cum_seqlens_q": jnp.zeros(0, jnp.int32)}, ["[batch + 1]"]),
    ("cum_seqlens_q", {"cum_seqlens_q": [0, 2, 5]}, ["a list", "jnp.asarray"]),
    ("context_lens", {"cum_seqlens_q": jnp.array([0, 2, 5, 5])}, ["[3] integers", "cum_seqlens_q"]),
    ("context_lens", {"context_lens": jnp.array([5, 13])}, ["12", "[ 5 13]"]),
    ("block_tables", {"block_tables": TABLES[:1]}, ["[2, max_blocks]", "cum_seqlens_q"]),
    ("block_tables", {"block_tables": jnp.array([[0, -1, 2], [2, 3, 0]])}, ["[0, 1] is -1", "5 tokens"]),
    ("block_tables", {"block_tables": jnp.array([[-1, 1, 2], [2, 3, 0]]), "sliding_window": 0}, ["[0, 0] is -1"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "arguments", "words"), WRONG_PACKED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_wrong_packed_arguments(argument, arguments, words):
    with pytest.raises(InvalidInputError) as caught:
        page_attention(**{**PACKED, **arguments})
    assert str(caught.value).startswith(f"page_attention: {argument} is "), caught.value
    for word in words:
        assert word in str(caught.value), caught.value


def test_without_offsets_a_packed_query_is_refused():
    with pytest.raises(
        InvalidInputError, match=r"context_lens .* \[6\] integers, as the batch is.* without cum_seqlens_q"
    ):
        page_attention(**{n: x for n, x in PACKED.items() if n != "cum_seqlens_q"})


def test_entries_of_sequences_without_a_token_are_not_needed():
    tables = jnp.array([[-1, 77, -1], [2, 3, 99]])
    assert page_attention(**{**PACKED, "block_tables": tables, "cum_seqlens_q": jnp.array([0, 0, 5])}).shape == (
        6,
        4,
        8,
    )


NONSENSE = {
    "offsets_that_do_not_begin_at_0": {"cum_seqlens_q": [3, 4, 6]},
    "offsets_below_0": {"cum_seqlens_q": [-5, -2, 4]},
    "offsets_that_decrease": {"cum_seqlens_q": [0, 5, 2]},
    "offsets_past_the_tokens": {"cum_seqlens_q": [0, 2, 2**31 - 1]},
    "more_tokens_than_a_context_has": {"cum_seqlens_q": [0, 6, 6], "context_lens": [2, 0]},
    "lengths_past_the_table": {"context_lens": [1000, 2**31 - 1]},
    "lengths_below_0": {"context_lens": [-7, -(2**31)]},
    "entries_past_the_cache": {"block_tables": [[6, 2**31 - 1, 100], [3, 77, 2]]},
    "entries_below_0": {"block_tables": [[-1, -(2**31), -6], [3, -2, 2]]},
    "all_of_it": {
        "cum_seqlens_q": [99, -4, 3],
        "context_lens": [2**31 - 1, -1],
        "block_tables": [[-(2**31), 2**31 - 1, 6], [-1, 6, 7]],
    },
}


def test_traced_nonsense_in_a_packed_call_stays_within_bounds():
    """What cannot be refused is as if offsets were cut to the tokens and never fell, lengths cut to the table, and blocks to the
    cache. NaN surrounds what may be read."""
    rng = np.random.default_rng(0)
    cache = np.full((6, 2, 4, 8), np.nan, np.float32)
    cache[[0, 2, 3, 5]] = rng.standard_normal((4, 2, 4, 8))
    given = {n: x for n, x in PACKED.items() if n not in ("query", "key_cache", "value_cache")}
    given["block_tables"] = jnp.array([[0, 2, 5], [2, 3, 0]])
    query = jnp.asarray(rng.standard_normal((6, 4, 8)), jnp.float32)

    @jax.jit
    def run(query, cache, given):
        def loss(query):
            out, lse = page_attention(query, cache, cache, **given, return_lse=True)
            return (out**2).sum(), (out, lse)

        return jax.grad(loss, has_aux=True)(query)

    expect = jax.jit(lambda query, cache, given: reference(query, cache, cache, **given, return_lse=True))
    for name, wrong in NONSENSE.items():
        now = {**given, **{n: jnp.asarray(x, jnp.int32) for n, x in wrong.items()}}
        dq, results = run(query, jnp.asarray(cache), now)
        cut = {
            "cum_seqlens_q": np.maximum.accumulate(np.clip(now["cum_seqlens_q"], 0, 6)),
            "context_lens": np.clip(now["context_lens"], 0, 12),
            "block_tables": now["block_tables"],
        }
        for actual, expected in zip(results, expect(query, jnp.asarray(cache), cut), strict=True):
            assert_close(actual, expected, "float32", what=name)
        assert np.isfinite(results[0]).all(), name
        assert np.isfinite(dq).all(), name
