"""Paged attention in Pallas Mosaic GPU: in JAX's interpreter, compiled for Hopper without one, and on a GPU."""

import dataclasses
import functools
import os
import re

import examples_page_attention as pages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tries
from hypothesis import given
from hypothesis import strategies as st
from lanes import some
from test_mosaic import JAX, compiled, needs_plugin, tile_of
from tolerances import assert_close

from ejkernel import FwdParams, UnsupportedError, explain, kernel_registry, page_attention, target
from ejkernel.kernels._pallas.gpu.flash_attention_sm90 import forward as launching
from ejkernel.kernels._pallas.gpu.page_attention_sm90 import block, parameters
from ejkernel.kernels._pallas.gpu.page_attention_sm90 import forward as host
from ejkernel.kernels.common.query_tiles import most_tiles, sequences, with_padding

OPERATION = kernel_registry.operation("page_attention")
LENS, CHUNKS = [200, 64, 0, 70], [20, 33, 0, 70]
WIDE = {"dim": 64, "max_blocks": 5, "size": 64}
# Arguments of ``examples_page_attention.make`` beside those, then those of the call.
CALLS = {
    "chunks": ({"group": 2, "padding": 5}, {}),
    "window": ({"group": 2, "size": 16, "max_blocks": 16}, {"sliding_window": (40, 0)}),
    "sinks and a cap": ({"group": 4, "sinks": "own"}, {"logits_soft_cap": 3.0}),
    "small pages": ({"size": 16, "max_blocks": 16}, {}),
    "pages of 48": ({"size": 48, "max_blocks": 6}, {"sliding_window": (100, 0)}),
    "large pages": ({"group": 3, "size": 256, "max_blocks": 1}, {}),
    "many heads for a key head": ({"group": 16, "kv_heads": 1, "sinks": "own"}, {}),
    "value dim": ({"group": 2, "value_dim": 32}, {"softmax_scale": 0.3}),
    "head dim 32": ({"dim": 32, "group": 2}, {"sliding_window": (40, 0)}),
    "head dim 96": ({"dim": 96, "group": 2}, {}),
    "head dim 128": ({"dim": 128, "group": 2}, {}),
    "decoding": ({"chunks": None, "group": 2}, {}),
    "no scale": ({}, {"softmax_scale": 0.0}),
    "negative scale": ({"group": 2}, {"softmax_scale": -0.2}),
}


def make(name, dtype="bfloat16", lens=LENS, **changed):
    """Everything that no query may see is NaN, and what the tables have for it is anything."""
    sizes, options = CALLS[name]
    sizes = {"chunks": CHUNKS, **WIDE, **sizes, **changed}
    arrays = pages.make(lens, **sizes)(np.random.default_rng(0))
    left = options.get("sliding_window", (max(lens), 0))[0]
    for b, (length, new) in enumerate(zip(lens, sizes["chunks"] or [1] * len(lens), strict=True)):
        for token in range(max(0, length - new - left)):
            for cache in ("key_cache", "value_cache"):
                arrays[cache][arrays["block_tables"][b, token // sizes["size"]], :, token % sizes["size"]] = np.nan
        before = max(0, length - new - left) // sizes["size"]
        arrays["block_tables"][b, :before] = [-9, 2**30] * (before // 2) + [-9] * (before % 2)
    kept = {"softmax_aux": "float32"}
    return {
        name: jnp.asarray(x, kept.get(name, dtype) if x.dtype == np.float64 else None) for name, x in arrays.items()
    }, options


def expected(arrays, options):
    with jax.enable_x64(True):
        wide = {
            name: jnp.asarray(np.asarray(x), None if np.issubdtype(x.dtype, np.integer) else "float64")
            for name, x in arrays.items()
        }
        return [np.asarray(x) for x in jax.jit(functools.partial(pages.reference, return_lse=True, **options))(**wide)]


def prepare(arrays, options):
    """What the operation gives an implementation."""
    bound = OPERATION.signature.bind(**arrays, **options)
    bound.apply_defaults()
    arguments = OPERATION.normalise(dict(bound.arguments))
    spec = OPERATION.bind(arguments).spec
    return OPERATION.prepare(arguments, spec), spec


def check(arrays, options, found):
    out, lse = expected(arrays, options)
    assert_close(found[0], out, str(found[0].dtype), what="out")
    assert_close(found[1], lse, "bfloat16", what="lse")


def interpreted(name, capfd, tile=(128, 64, 8, 2), dtype="bfloat16", **more):
    """In JAX's interpreter, with race detection, against float64."""
    if JAX < (0, 11):
        pytest.skip("jax has no interpreter of Mosaic GPU before 0.11")
    import jax.experimental.pallas.mosaic_gpu as plgpu

    arrays, options = make(name, dtype, **more)
    prepared, spec = prepare(arrays, options)
    found = host.forward(prepared, spec, tile_of(*tile), interpret=plgpu.InterpretGPUParams(detect_races=True))
    check(arrays, options, [x[0] for x in jax.block_until_ready(found)])
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(CALLS, "chunks", "window", "sinks and a cap"))
def test_interpreted(name, capfd):
    interpreted(name, capfd)


@pytest.mark.interpreted
@pytest.mark.parametrize("tile", some([(64, 64, 4, 3), (192, 128, 12, 2), (128, 32, 8, 2)], (192, 128, 12, 2)), ids=str)
@pytest.mark.parametrize("name", some(["chunks", "window", "small pages"], "small pages"))
def test_interpreted_with_other_tiles(name, tile, capfd):
    interpreted(name, capfd, tile)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(["chunks", "sinks and a cap"], "chunks"))
@pytest.mark.parametrize("lens", some([LENS, [33, 25, 7, 70]], [33, 25, 7, 70]), ids=str)
def test_a_persistent_cta_computes_several_blocks(name, lens, capfd, monkeypatch):
    """Two CTAs for all blocks. Some sequences have more queries than keys before them, one more than it has keys."""
    monkeypatch.setattr(launching, "CTAS", 2)
    interpreted(name, capfd, lens=lens)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(["chunks", "window"], "window"))
def test_one_cta_per_block(name, capfd, monkeypatch):
    """As under ``shard_map`` with its check of varying axes, where blocks that nobody needs run too."""
    launch = host.launch
    monkeypatch.setattr(host, "launch", lambda c, *a, **k: launch(dataclasses.replace(c, persistent=False), *a, **k))
    interpreted(name, capfd)


@pytest.mark.interpreted
def test_examples_of_a_vmap(capfd):
    """Two examples share the caches; each has tokens, contexts, tables, offsets and sinks of its own."""
    if JAX < (0, 11):
        pytest.skip("jax has no interpreter of Mosaic GPU before 0.11")
    import jax.experimental.pallas.mosaic_gpu as plgpu

    arrays, options = make("sinks and a cap")
    order = np.array([1, 3, 0, 2])
    other = {
        **arrays,
        "query": arrays["query"][::-1],
        "context_lens": arrays["context_lens"][order],
        "block_tables": arrays["block_tables"][order],
        "cum_seqlens_q": jnp.asarray(np.cumsum([0, *np.array(CHUNKS)[order]]), jnp.int32),
        "softmax_aux": arrays["softmax_aux"] + 1,
    }
    prepared = [prepare(x, options) for x in (arrays, other)]
    shared = {"key_cache", "value_cache"}
    both = {
        name: x if name in shared else jnp.concatenate([x, prepared[1][0][name]]) for name, x in prepared[0][0].items()
    }
    found = host.forward(both, prepared[0][1], tile_of(128, 64, 8, 2), interpret=plgpu.InterpretGPUParams())
    for i, example in enumerate((arrays, other)):
        check(example, options, [x[i] for x in found])


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", ["chunks", "window"])
def test_float16(name, capfd):
    interpreted(name, capfd, dtype="float16")


# The plan


TOKENS, SEQUENCES = 600, 6


@st.composite
def batches(draw):
    """Sequences with queries before, after and without each other, and tokens that nobody owns."""
    lens = draw(st.lists(st.integers(0, 300), min_size=SEQUENCES, max_size=SEQUENCES))
    new = draw(st.lists(st.integers(0, 90), min_size=SEQUENCES, max_size=SEQUENCES))
    starts = np.cumsum([draw(st.integers(0, 20)), *new]).astype(np.int32)
    examples = draw(st.integers(1, 2))
    return jnp.asarray([lens] * examples, jnp.int32), jnp.asarray([starts] * examples)


def batch_sequences(lens, starts):
    examples = lens.shape[0]
    arrays = {
        "query": np.zeros((examples, TOKENS, 4, 32)),
        "context_lens": lens,
        "block_tables": jnp.zeros((examples, SEQUENCES, 5), jnp.int32),
        "query_starts": starts,
    }
    return with_padding(sequences(arrays), starts, TOKENS)


@functools.partial(jax.jit, static_argnums=(2, 3))
def planned(lens, starts, sizes, left):
    s = batch_sequences(lens, starts)
    table, first_tile = host.plan(s, *sizes, left, SEQUENCES + 2)
    of_sequences = {"owner": s.owner()[0], "row": s.row, "lens": s.lens, "begin": s.begin}
    return table, host.place_of_tokens(s, first_tile, sizes[0]), of_sequences


@given(batches(), st.sampled_from([((16, 64, 64), None), ((32, 96, 48), 50), ((64, 128, 16), 3), ((16, 64, 16), 0)]))
@tries(60, short=20)
def test_every_token_is_stored_once_and_sees_all_that_it_may(batch, how):
    (size, step, unit), left = how
    table, place, s = jax.tree.map(np.asarray, planned(*batch, *how))
    begin, head, full, tail = table[:, :4].T
    row, example, token, first, end, shift, length, seen_from, needed = (
        table[:, getattr(block, name)]
        for name in ("TABLE_ROW", "EXAMPLE", "TOKEN", "FIRST", "END", "SHIFT", "LENGTH", "SEEN_FROM", "NEEDED")
    )
    assert (table[:, 4] == np.arange(len(table))).all()
    assert (begin % unit == 0).all()
    assert (token % 8 == 0).all()
    assert (head + full + tail >= 1).all()
    assert (needed == needed[0]).all()
    # Past the blocks that are needed nothing is stored.
    assert (first == end)[needed[0] :].all()
    stored, owner = np.zeros(len(place), int), s["owner"]
    for tile in range(needed[0]):
        own = np.arange(max(token[tile], first[tile]), min(token[tile] + size, end[tile]))
        stored[own] += 1
        assert (place[own] == tile * size + own - token[tile]).all()
        assert (owner[own] == owner[own[0]]).all()
        sequence = owner[own[0]]
        assert (row[tile], example[tile]) == (s["row"][sequence], sequence // (SEQUENCES + 2))
        assert (length[tile], first[tile]) == (s["lens"][sequence], s["begin"][sequence])
        at = own + shift[tile]
        # The last token is the context's last.
        assert end[tile] + shift[tile] == length[tile]
        stop = np.clip(at + 1, 0, length[tile])
        start = np.zeros_like(at) if left is None else np.clip(at - left, 0, length[tile])
        seen = start < stop
        steps = head[tile] + full[tile] + tail[tile]
        if seen.any():
            assert begin[tile] <= start[seen].min()
            assert stop.max() <= begin[tile] + steps * step
            assert seen_from[tile] <= start[seen].min()
        if full[tile]:
            # All rows see every key of an unmasked step, and have seen one before.
            begins = begin[tile] + head[tile] * step
            assert (start <= begins).all()
            assert (stop >= begins + full[tile] * step).all()
    assert (stored == 1).all()


@given(batches(), st.sampled_from([16, 64]))
@tries(40, short=20)
def test_there_are_never_more_blocks_than_planned(batch, size):
    s = batch_sequences(*batch)
    begin, count = np.asarray(s.begin), np.asarray(s.count)
    exact = sum(-(-(b % 8 + n) // size) for b, n in zip(begin, count, strict=True) if n)
    assert exact <= host.most_blocks(s, size) < most_tiles(s.tokens, s.size, size) + s.size + 1


def test_tiles_follow_the_pages():
    shapes = {
        "query": jax.ShapeDtypeStruct((1, 64, 8, 128), jnp.bfloat16),
        "value_cache": jax.ShapeDtypeStruct((1, 9, 2, 48, 128), jnp.bfloat16),
        "key_cache": jax.ShapeDtypeStruct((1, 9, 2, 48, 128), jnp.bfloat16),
    }
    assert parameters.defaults(shapes) == tile_of(192, 48, 12, 3)
    asked = FwdParams(q_blocksize=1000, kv_blocksize=1, num_stages=99)
    assert parameters.effective(shapes, asked) == tile_of(192, 16, 12, 16)
    for params in (*parameters.space(shapes), parameters.effective(shapes, asked)):
        assert parameters.effective(shapes, params) == params
        assert 48 % params.kv_blocksize == 0 or params.kv_blocksize % 48 == 0


# Selection


def shapes(tokens=65536, sequences=128, page=64, heads=32, dim=128, dtype="bfloat16", cache=None):
    cache = jax.ShapeDtypeStruct((8192, 8, page, dim), cache or dtype)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((sequences,), (sequences, 64))]
    return (jax.ShapeDtypeStruct((tokens, heads, dim), dtype), cache, cache, *ints)


def explained(*arrays, **options):
    offsets = jax.ShapeDtypeStruct((arrays[3].shape[0] + 1,), jnp.int32)
    return explain("page_attention", *arrays, cum_seqlens_q=offsets, device="nvidia-h200", **options)


@pytest.mark.parametrize(
    ("sizes", "platform"),
    [
        ({}, "pallas"),
        ({"page": 16}, "pallas"),
        # Decoding beside chunks.
        ({"tokens": 4156, "sequences": 64}, "pallas"),
        # Few queries of long contexts, which have to be cut.
        ({"tokens": 8, "sequences": 1}, "triton"),
        ({"tokens": 16, "sequences": 4}, "triton"),
    ],
)
def test_chunks_run_on_hopper_and_few_queries_on_triton(sizes, platform):
    assert explained(*shapes(**sizes)).chosen.platform.value == platform


def test_decoding_runs_on_triton():
    found = explain("page_attention", *shapes(tokens=128), device="nvidia-h200")
    assert found.chosen.platform.value == "triton"


@pytest.mark.parametrize(
    ("sizes", "options", "reason"),
    [
        ({"page": 24}, {}, "pages of 24 tokens is not supported"),
        ({"cache": "int8"}, {}, "a cache of int8 is not supported"),
        ({"cache": "float8_e4m3fn"}, {}, "a cache of float8_e4m3fn is not supported"),
        ({}, {"k_scale": 2.0}, "k_scale or v_scale is not supported"),
        ({"dim": 256}, {}, "head dim 256 is above 128"),
        ({"dim": 80}, {}, "head dim 80 is not a multiple of 32"),
        ({"dtype": "float32"}, {}, "dtype float32 is not supported"),
        ({}, {"num_splits": 2}, "num_splits is not supported"),
    ],
    ids=str,
)
def test_what_it_refuses(sizes, options, reason):
    found = explained(*shapes(**sizes), **options)
    assert found.chosen.platform.value == "triton"
    [told] = [c for c in found.candidates if (c.platform.value, c.backend.value) == ("pallas", "gpu")]
    assert reason in " ".join(told.reasons)
    run = functools.partial(page_attention, platform="pallas", **options)
    with target("nvidia-h200"), pytest.raises(UnsupportedError, match=re.escape(reason)):
        jax.eval_shape(run, *shapes(tokens=128, **sizes))


def test_gradients_are_of_xla():
    found = explained(*shapes(), gradients=True)
    assert found.chosen.platform.value == "pallas"
    assert found.backward.chosen.platform.value == "xla"


# Compiled for Hopper, without one

COMPILED = """
import glob, os, re, sys
import jax
sys.path.insert(0, {tests!r})
import test_mosaic, test_mosaic_pages as t
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
target = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=test_mosaic.HOPPER, topology="1x1x2")
sharding = SingleDeviceSharding(target.devices[0])
for name, dim in {jobs!r}:
    arrays, options = t.make(name, dim=dim)
    shapes = {{k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for k, x in arrays.items()}}

    def run(arrays):
        prepared, spec = t.prepare(arrays, options)
        return t.host.forward(prepared, spec, t.parameters.defaults(prepared))

    jax.jit(run).lower(shapes).compile()
    reports = glob.glob(os.path.join(os.environ["MOSAIC_GPU_DUMP_TO"], "*.ptxas"))
    text = "".join(open(path).read() for path in reports)
    print("SPILLS", name, dim, re.findall(r"([0-9]+) bytes spill", text))
    for path in reports:
        os.remove(path)
"""


@needs_plugin
@pytest.mark.compiled
@pytest.mark.parametrize("what", some(["chunks", "features"], "chunks"))
@pytest.mark.parametrize("dim", some([64, 128], 128))
def test_nothing_spills(what, dim, tmp_path):
    """With jax 0.10, whose compiler is older, a window, a cap and small pages leave a few registers too many."""
    most = 68 if what == "features" and JAX < (0, 11) else 0
    names = ["chunks"] if what == "chunks" else ["window", "sinks and a cap", "small pages", "large pages"]
    jobs = [(name, dim) for name in names]
    printed = compiled(COMPILED.format(tests=os.path.dirname(__file__), jobs=jobs), tmp_path)
    told = re.findall(r"SPILLS (.*?) \[(.*)\]", printed)
    assert len(told) == len(jobs)
    for name, spills in told:
        assert spills, f"no report of {name}"
        assert max(map(int, re.findall(r"\d+", spills))) <= most, (name, spills)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_gpu(name, dtype):
    arrays, options = make(name, dtype)
    if explain("page_attention", **arrays, **options, platform="pallas").chosen is None:
        pytest.skip("needs a Hopper GPU")
    run = jax.jit(functools.partial(page_attention, **options, return_lse=True, platform="pallas"))
    found = [run(**arrays) for _ in range(2)]
    check(arrays, options, found[0])
    assert all(bool((a == b).all()) for a, b in zip(*found, strict=True))
