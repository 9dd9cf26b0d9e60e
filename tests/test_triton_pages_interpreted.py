"""Paged attention and dense decoding in Triton's interpreter: what the property files do not say of every implementation."""

import functools
import inspect
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ptx import Assembler

from ejkernel import BwdParams, FwdParams, flash_attention, overlay, page_attention
from ejkernel.kernels._triton import call, few_queries
from ejkernel.kernels._triton import page_attention as pages
from ejkernel.kernels._xla import page_attention as xla
from ejkernel.kernels.common.query_tiles import Sequences
from ejkernel.ops.page_attention import OPERATION

if not call.interpreting():
    pytest.skip("runs where TRITON_INTERPRET=1 is set before Triton is imported", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

pytestmark = pytest.mark.interpreted
slow = pytest.mark.slow


@pytest.mark.parametrize("sizes", [(1, 4), (37, 8), (5, 40)])
@pytest.mark.parametrize("left", [None, 50])
def test_the_device_plans_as_the_host_does(sizes, left):
    count, group = sizes
    lens = np.random.default_rng(count).integers(0, 3000, count).astype(np.int32)
    index = np.arange(count, dtype=np.int32)
    host = Sequences(index, np.ones(count, np.int32), lens, index, None, count, False)
    device = Sequences(*(jnp.asarray(x) for x in (index, host.count, lens, index)), None, count, False)
    params = FwdParams(q_blocksize=16, kv_blocksize=32)
    tiles = few_queries.tile_count(count, count, group, 16, False)
    for programs, pieces in ((11, None), (64, None), (tiles * 2 * 3, 3)):
        rows = few_queries.Rows(
            **dict.fromkeys(["key", "value", "tables", "sinks", "k_scale", "v_scale", "cap"]),
            query=np.zeros((count, 2 * group, 8)), kv_heads=2, page=16, blocks=1, kv_len=0, batch=count, scale=1.0,
            left=left, causal=True,
        )  # fmt: skip
        asked = replace(params, num_key_splits=pieces)
        made = few_queries._planned(rows, device, asked, tiles, programs, None)
        expected = few_queries._planned(rows, host, asked, tiles, programs, None)
        np.testing.assert_array_equal(made.header, expected.header)
        np.testing.assert_array_equal(made.tiles, expected.tiles)
        inside = np.arange(programs) * expected.header[0] < expected.header[1]
        np.testing.assert_array_equal(np.asarray(made.starts)[inside], expected.starts[inside])


@pytest.mark.parametrize("cache", ["int8", pytest.param("float8_e5m2", marks=slow), "float8_e4m3fn"])
def test_every_number_of_8_bits_is_widened_exactly(cache):
    """One key a context: the output is the stored value."""
    bits = np.arange(256, dtype=np.uint8)
    stored = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.dtype(cache))
    values = stored.reshape(1, 1, 1, 256).repeat(2, 0)
    query = jnp.ones((2, 1, 256), jnp.float32)
    out = page_attention(
        query, jnp.zeros_like(values), values, jnp.array([1, 0]), jnp.array([[0], [1]]), platform="triton"
    )
    np.testing.assert_array_equal(out[0, 0], np.asarray(stored.astype(jnp.float32)))
    assert (out[1] == 0).all()


@pytest.fixture
def assembler(monkeypatch):
    """Kernels run with the instructions that an NVIDIA GPU gets."""
    monkeypatch.setattr(few_queries, "_converts", lambda narrow, device: bool(narrow))
    jax.clear_caches()
    yield Assembler(monkeypatch)
    jax.clear_caches()


NARROW = ["int8", "float8_e5m2", "float8_e4m3fn"]


@pytest.mark.parametrize("cache", NARROW)
def test_every_number_of_8_bits_is_widened_exactly_by_instructions(cache, assembler):
    """Every byte is once in an even dim and once in an odd one."""
    bits = np.stack([np.arange(256, dtype=np.uint8), np.roll(np.arange(256, dtype=np.uint8), 1)])
    stored = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.dtype(cache))
    values = stored.reshape(2, 1, 1, 256)
    query = jnp.ones((2, 1, 256), jnp.float16)
    out = page_attention(
        query, jnp.zeros_like(values), values, jnp.array([1, 1]), jnp.array([[0], [1]]), platform="triton"
    )
    np.testing.assert_array_equal(out[:, 0], np.asarray(stored.astype(jnp.float16)))
    # Four keys or two words at once.
    assert assembler.packs == {4, 2}


@pytest.mark.parametrize("value_dim", [64, 90, 91])
@pytest.mark.parametrize("cache", NARROW)
def test_values_in_words(cache, value_dim, assembler):
    """Dims that are padded or cannot be paired, and steps that are masked; what nobody owns is large, or NaN."""
    rng = np.random.default_rng(value_dim)
    lens, tables = np.array([37, 90, 0, 16]), rng.permutation(24).reshape(4, 6)
    owned = np.zeros((24, 16), bool)
    for row, length in zip(tables, lens, strict=True):
        owned[row] = np.arange(96).reshape(6, 16) < length

    def stored(dim):
        numbers = (
            rng.integers(-100, 100, (24, 2, 16, dim)) if cache == "int8" else rng.standard_normal((24, 2, 16, dim))
        )
        return jnp.asarray(np.where(owned[:, None, :, None], numbers, 127 if cache == "int8" else np.nan)).astype(cache)

    query = jnp.asarray(rng.standard_normal((4, 6, 64)), jnp.float16)
    arguments = (query, stored(64), stored(value_dim), jnp.asarray(lens), jnp.asarray(tables))
    scales = jnp.array([0.01, 0.02]) if cache == "int8" else jnp.array([0.5, 2.0])
    run = functools.partial(page_attention, *arguments, k_scale=scales, v_scale=scales)
    with overlay(page_attention=FwdParams(q_blocksize=16, kv_blocksize=32)):
        found = run(platform="triton")
    np.testing.assert_allclose(found, run(platform="xla"), rtol=4e-3, atol=4e-3)
    assert assembler.packs == ({4} if value_dim % 2 else {4, 2})


@pytest.mark.parametrize("scale", [1e6, pytest.param(1e-6, marks=slow)])
def test_queries_beyond_float16_beside_narrow_keys(scale):
    rng = np.random.default_rng(0)
    keys = jnp.asarray(rng.integers(-127, 128, (2, 1, 16, 16)), jnp.int8)
    query = jnp.asarray(rng.standard_normal((1, 2, 16)) * scale, jnp.float32)
    arguments = (query, keys, keys, jnp.array([25]), jnp.array([[1, 0]]))
    run = functools.partial(page_attention, *arguments, softmax_scale=1e-3 / scale)
    np.testing.assert_allclose(run(platform="triton"), run(platform="xla"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("new", [[1, 40, 0, 7, 1, 33], pytest.param([90, 1, 1, 1, 1, 1], marks=slow)])
def test_chunks_beside_decoding(new):
    """Tiles of one size for all sequences, whole or cut; padding and tokens that nobody owns hold NaN."""
    rng = np.random.default_rng(0)
    lens = np.array(new) + rng.integers(0, 60, len(new))
    tables = rng.permutation(len(new) * 10).reshape(len(new), 10)
    owned = np.zeros((len(new) * 10, 16), bool)
    for row, length in zip(tables, lens, strict=True):
        owned[row] = np.arange(160).reshape(10, 16) < length
    shape = (len(new) * 10, 1, 16, 16)
    cache = [
        jnp.asarray(np.where(owned[:, None, :, None], rng.standard_normal(shape), np.nan), jnp.float32)
        for _ in range(2)
    ]
    query = jnp.asarray(rng.standard_normal((sum(new) + 5, 4, 16)), jnp.float32).at[sum(new) :].set(jnp.nan)
    arguments = (query, *cache, jnp.asarray(lens), jnp.asarray(tables))
    more = {"cum_seqlens_q": jnp.asarray(np.cumsum([0, *new])), "return_lse": True}
    expected = page_attention(*arguments, **more, platform="xla")
    for rows in (16, 64):
        with overlay(page_attention=FwdParams(q_blocksize=rows, kv_blocksize=32)):
            found = page_attention(*arguments, **more, platform="triton")
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_garbage_in_lengths_and_tables_stays_inside():
    """Traced lengths, offsets and entries that lead anywhere: nothing is read or written out of bounds."""
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((6, 2, 16)), jnp.float32)
    cache = jnp.asarray(rng.standard_normal((3, 1, 16, 16)), jnp.float32)
    tables = jnp.asarray([[2**31 - 1, -5], [-(2**31), 7], [1, 2]])

    @jax.jit
    def run(lens, tables, offsets):
        return page_attention(query, cache, cache, lens, tables, cum_seqlens_q=offsets, platform="triton")

    for lens, offsets in (([-7, 10**6, 32], [0, 9, 3, 6]), ([5, 2, 2**31 - 1], [-4, 2, 2, 100])):
        assert np.isfinite(run(jnp.asarray(lens), tables, jnp.asarray(offsets))).all()


def test_the_backward_of_another_takes_the_result():
    """The residual contract: Triton's output and log-sum-exp give XLA's backward the gradients of XLA's own."""
    rng = np.random.default_rng(0)
    arrays = {
        "query": rng.standard_normal((5, 4, 16)),
        "key_cache": rng.standard_normal((6, 2, 16, 16)),
        "value_cache": rng.standard_normal((6, 2, 16, 16)),
    }
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    arrays |= {"context_lens": jnp.array([30, 9]), "block_tables": jnp.array([[0, 3], [5, 1]])}
    defaults = {n: None if p is inspect.Parameter.empty else p for n, p in OPERATION.defaults.items()}
    arguments = {**defaults, **arrays, "cum_seqlens_q": jnp.array([0, 4, 5])}
    call, _ = OPERATION.bound(arguments)
    prepared = OPERATION.prepare(arguments, call.spec)
    params = FwdParams()
    grads = []
    for forward in (pages.forward, xla.forward):
        out, lse = forward(prepared, call.spec, params)
        rest = (out, lse, jnp.cos(out), jnp.sin(lse))
        grads.append(xla.backward(prepared, call.spec, BwdParams(), *rest, frozenset({"query", "key_cache"})))
    for name in grads[0]:
        np.testing.assert_allclose(grads[0][name], grads[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (1, {}),
        (3, {"causal": True, "sliding_window": (90, 0), "logits_soft_cap": 2.0, "sinks": True}),
        pytest.param(5, {}, marks=slow),
        pytest.param(1, {"sliding_window": (100, 3)}, marks=slow),
    ],
)
def test_dense_decoding(tokens, options):
    rng = np.random.default_rng(0)
    options = dict(options)
    query, key, value = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((2, tokens, 6, 16), (2, 700, 2, 16), (2, 700, 2, 24))
    )
    if options.pop("sinks", False):
        options["softmax_aux"] = jnp.asarray(rng.standard_normal((6, 2)), jnp.float32)
    run = functools.partial(flash_attention, query, key, value, return_lse=True, **options)
    for a, b in zip(run(platform="triton"), run(platform="xla"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
