"""page_update: new tokens are written where page_attention reads them, and nowhere else."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples_page_attention import make
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tolerances import assert_close, assert_same

from ejkernel import InvalidInputError, UnsupportedError, flash_attention, page_attention, page_update
from ejkernel.ops import page_update as module

slow = pytest.mark.slow
BLOCKS, HEADS, SIZE, DIM, VALUE_DIM = 9, 2, 4, 8, 5
NARROW = ("int8", "float8_e4m3fn", "float8_e5m2")
# Three contexts, one of them of length 0, and the entries past their last page.
LENS, TABLES = np.array([6, 0, 11]), np.array([[4, 1, -1], [77, -1, 5], [0, 8, 3]])
OFFSETS, TOKENS = np.array([0, 3, 3, 8]), 10


def numbers(shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def caches(dtype="float32", seed=0):
    """Numbers, NaN and infinities; of 8 bits every pattern."""
    made = []
    for i, dim in enumerate((DIM, VALUE_DIM)):
        shape = (BLOCKS, HEADS, SIZE, dim)
        if dtype in NARROW:
            bits = np.random.default_rng(seed + i).integers(0, 256, shape, np.uint8)
            made.append(jnp.asarray(bits.view(jnp.dtype(dtype))))
        else:
            made.append(numbers(shape, seed + i, dtype).at[2, 0, 1].set(jnp.nan).at[7].set(jnp.inf))
    return made


def tokens(count, dtype="float32", seed=5):
    return numbers((count, HEADS, DIM), seed, dtype), numbers((count, HEADS, VALUE_DIM), seed + 1, dtype)


def places(lens, tables, offsets=None):
    """``(token, block, slot)`` of all that is written, the obvious way."""
    offsets = np.arange(len(lens) + 1) if offsets is None else offsets
    found = []
    for b, length in enumerate(lens):
        n = offsets[b + 1] - offsets[b]
        for i in range(n):
            t = length - n + i
            if t >= 0 and 0 <= tables[b, t // SIZE] < BLOCKS:
                found.append((offsets[b] + i, tables[b, t // SIZE], t % SIZE))
    return found


def expected(cache, stored, where):
    """The cache's bits with the tokens' in their places."""
    cache, stored = np.array(cache), np.asarray(stored).astype(cache.dtype)
    for token, block, slot in where:
        cache[block, :, slot] = stored[token]
    return cache


def assert_bits(actual, expected):
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(*(np.asarray(x).view(f"u{x.dtype.itemsize}") for x in (actual, expected)))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=slow), "bfloat16"])
def test_tokens_land_in_their_slots_and_nothing_else_changes(dtype):
    for offsets, count in ((None, 3), (OFFSETS, TOKENS)):
        key, value = tokens(count, dtype)
        if offsets is not None:
            key = key.at[offsets[-1] :].set(jnp.nan)
        before = caches(dtype)
        more = {} if offsets is None else {"cum_seqlens_q": jnp.asarray(offsets)}
        after = page_update(*before, key, value, jnp.asarray(LENS), jnp.asarray(TABLES), **more)
        where = places(LENS, TABLES, offsets)
        assert len(where) == (2 if offsets is None else 8)
        for cache, new, stored in zip(before, after, (key, value), strict=True):
            assert_bits(new, expected(cache, stored, where))


def test_entries_below_0_write_nothing():
    tables = np.where(TABLES == 8, -3, TABLES)
    before, (key, value) = caches(), tokens(TOKENS)
    arguments = (*before, key, value, jnp.asarray(LENS), jnp.asarray(tables))
    after = page_update(*arguments, cum_seqlens_q=jnp.asarray(OFFSETS))
    where = places(LENS, tables, OFFSETS)
    assert len(where) == 6, "of the last context's five new tokens two would be in page 8"
    for cache, new, stored in zip(before, after, (key, value), strict=True):
        assert_bits(new, expected(cache, stored, where))


@pytest.mark.parametrize("dtype", ["float32", "float8_e5m2"])
@pytest.mark.parametrize(
    ("lens", "offsets"),
    [([200, 0, 131, 384], None), ([201, 202, 203, 200], None), ([200, 0, 260, 384], [0, 70, 70, 330, 331])],
    ids=["decode", "tokens of one page", "packed"],
)
def test_by_page_is_by_token(lens, offsets, dtype):
    """What a TPU runs where tokens are columns: no token is lost, and what is not written keeps its bits."""
    rng, count = np.random.default_rng(0), 335 if offsets else 4
    tables = rng.permutation(16)[:12].reshape(4, 3)
    tables[1] = tables[0]  # several tokens of a page beside each other
    bits = rng.integers(0, 256, (14, HEADS, 128, DIM * jnp.dtype(dtype).itemsize), np.uint8)
    cache, stored = jnp.asarray(bits.view(jnp.dtype(dtype))), numbers((count, HEADS, DIM)).astype(dtype)
    at = module._slots(cache, stored, *(x if x is None else jnp.asarray(x) for x in (lens, tables, offsets)))
    assert np.unique(np.asarray(at.blocks)[np.asarray(at.blocks) < 14]).size <= at.pages

    def written(write):
        after, pull = jax.vjp(lambda *pair: write(*pair, at), cache, stored)
        return [after] if dtype in NARROW else [after, *pull(jnp.cos(jnp.arange(after.size)).reshape(after.shape))]

    by_page, by_token = (jax.jit(written, static_argnums=0)(f) for f in (module._by_page, module._by_token))
    assert (np.asarray(by_token[0]) != np.asarray(cache)).any()
    for x, y in zip(by_page, by_token, strict=True):
        assert_bits(x, np.asarray(y))


@pytest.mark.parametrize(
    ("lens", "chunks"), [pytest.param([13, 0, 7], None, marks=slow), ([13, 0, 7], [5, 0, 7])], ids=["decode", "packed"]
)
def test_page_attention_reads_what_was_written(lens, chunks):
    """Pages without the new tokens, filled, are those that hold them."""
    arrays = make(lens, value_dim=VALUE_DIM, chunks=chunks, padding=2 if chunks else 0)(np.random.default_rng(0))
    arrays = {n: jnp.asarray(x, "float32" if x.dtype == np.float64 else None) for n, x in arrays.items()}
    filled = [arrays["key_cache"], arrays["value_cache"]]
    offsets = np.asarray(arrays.get("cum_seqlens_q", np.arange(len(lens) + 1)))
    count = arrays["query"].shape[0]
    new = [np.full((count, HEADS, cache.shape[3]), np.nan, np.float32) for cache in filled]
    emptied = [np.array(cache) for cache in filled]
    for b, length in enumerate(lens):
        for t in range(max(0, length - int(offsets[b + 1] - offsets[b])), length):
            at = (int(arrays["block_tables"][b, t // SIZE]), slice(None), t % SIZE)
            for token, cache in zip(new, emptied, strict=True):
                token[offsets[b + 1] - length + t] = cache[at]
                cache[at] = np.nan
    where = {n: arrays[n] for n in ("context_lens", "block_tables", "cum_seqlens_q") if n in arrays}
    after = page_update(*map(jnp.asarray, emptied), *map(jnp.asarray, new), **where)
    for cache, expected in zip(after, filled, strict=True):
        assert_bits(cache, np.asarray(expected))
    out = page_attention(**{**arrays, "key_cache": after[0], "value_cache": after[1]})
    np.testing.assert_array_equal(out, page_attention(**arrays))


def test_chunks_then_tokens_are_attention_over_all_of_them():
    """Prefill in two chunks, then decoding, each step its update and its attention; beside it causal attention."""
    length, heads = 11, 4
    query, key = numbers((1, length, heads, DIM)), numbers((1, length, HEADS, DIM), 1)
    value = numbers((1, length, HEADS, VALUE_DIM), 2)
    whole = flash_attention(query, key, value, causal=True)
    cache = tuple(jnp.full((BLOCKS, HEADS, SIZE, dim), jnp.nan) for dim in (DIM, VALUE_DIM))
    tables = jnp.array([[4, 1, 7]])

    @jax.jit
    def step(cache, query, key, value, lens, offsets):
        cache = page_update(*cache, key, value, lens, tables, cum_seqlens_q=offsets)
        return cache, page_attention(query, *cache, lens, tables, cum_seqlens_q=offsets)

    done = 0
    for n in (5, 4, 1, 1):
        piece = [jnp.pad(x[0, done : done + n], ((0, 5 - n), (0, 0), (0, 0))) for x in (query, key, value)]
        cache, out = step(cache, *piece, jnp.array([done + n]), jnp.array([0, n]))
        assert_close(out[:n], whole[0, done : done + n], "float32")
        done += n
    assert step._cache_size() == 1


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("scale", ["scalar", pytest.param("own", marks=slow)])
def test_narrow_caches_round_to_nearest_even_and_saturate(dtype, scale):
    """All that the dtype holds, what lies half way between, a little to either side, and beyond both ends."""
    held = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float64)
    held = np.unique(held[np.isfinite(held) & ((held != -128) | (dtype != "int8"))])
    half = (held[1:] + held[:-1]) / 2
    little = np.abs(half) * 2.0**-20
    beyond = [1.04, 1.5, 1e6, np.inf]
    x = np.concatenate([held, half, half - little, half + little, *(held[[0, -1]] * f for f in beyond)])
    # Even: of its two neighbours, the one whose last bit is 0.
    below = np.clip(np.searchsorted(held, x, side="right") - 1, 0, len(held) - 1)
    above = np.minimum(below + 1, len(held) - 1)
    with np.errstate(invalid="ignore"):
        nearer = np.sign((held[above] - x) - (x - held[below]))
    odd = held.astype(dtype).view(np.uint8)[below] & 1
    nearest = np.where((nearer > 0) | ((nearer == 0) & (odd == 0)), held[below], held[above])
    nearest = np.where(x >= held[-1], held[-1], np.where(x <= held[0], held[0], nearest))
    assert nearest.max() == held[-1] == {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}[dtype]
    assert nearest.min() == -held[-1]

    count = -(-x.size // (2 * DIM))
    padded = np.pad(x, (0, count * 2 * DIM - x.size)).reshape(count, 2, DIM)
    factor = np.float32(0.25) if scale == "scalar" else np.array([0.25, 2.0], np.float32)
    key = jnp.asarray(padded * np.reshape(factor, (-1, 1)), jnp.float32)
    cache = jnp.zeros((count, 2, 1, DIM), dtype)
    after, values = page_update(
        *(cache, cache, key, key, jnp.ones(count, jnp.int32), jnp.arange(count)[:, None]),
        k_scale=float(factor) if scale == "scalar" else jnp.asarray(factor),
        v_scale=jnp.asarray(factor),
    )
    assert after.dtype == dtype
    np.testing.assert_array_equal(np.asarray(after, np.float64).reshape(-1)[: x.size], nearest)
    assert_bits(after, np.asarray(values))


def test_ties_are_those_of_the_quotient():
    """Half-way numbers times a scale whose reciprocal is rounded: multiplied by that, a third of them would round up."""
    scale = np.float32(0.03)
    key = (np.arange(-110, 110, dtype=np.float32) + 0.5)[:, None, None] * scale
    cache = jnp.zeros((len(key), 1, 1, 1), jnp.int8)
    places = jnp.ones(len(key), jnp.int32), jnp.arange(len(key))[:, None]
    after, values = page_update(cache, cache, key, key, *places, k_scale=scale, v_scale=scale[None])
    np.testing.assert_array_equal(after[:, 0], np.round(key / scale).astype(np.int8))
    assert_bits(after, np.asarray(values))


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_caches_keep_the_bits_of_their_neighbours(dtype):
    """NaN of every kind among them; a padded token may hold NaN."""
    before, (key, value) = caches(dtype), tokens(TOKENS, "bfloat16")
    key, value = (x.at[OFFSETS[-1] :].set(jnp.nan) for x in (key, value))
    after = page_update(
        *before, key, value, jnp.asarray(LENS), jnp.asarray(TABLES), cum_seqlens_q=jnp.asarray(OFFSETS),
        k_scale=0.02, v_scale=jnp.array([0.02, 0.5]),
    )  # fmt: skip
    where = places(LENS, TABLES, OFFSETS)
    untouched = np.ones((BLOCKS, SIZE), bool)
    for _, block, slot in where:
        untouched[block, slot] = False
    for cache, new, stored, scale in zip(before, after, (key, value), (0.02, [[0.02], [0.5]]), strict=True):
        old, new = (np.asarray(x).swapaxes(1, 2) for x in (cache, new))
        assert_bits(new[untouched], old[untouched])
        wanted = np.asarray(stored, np.float32) / np.asarray(scale, np.float32)
        step = 0.5 if dtype == "int8" else np.abs(wanted) * (2.0**-4 if dtype == "float8_e4m3fn" else 2.0**-3)
        for token, block, slot in where:
            found = new[block, slot].astype(np.float32)
            error = np.abs(found - np.clip(wanted[token], -127, 127) if dtype == "int8" else found - wanted[token])
            assert (error <= (step if dtype == "int8" else step[token]) + 1e-2).all()


def test_int8_of_nan_is_0():
    cache = jnp.full((1, 1, 1, 2), 3, jnp.int8)
    key = jnp.array([[[jnp.nan, 1.0]]])
    after, _ = page_update(cache, cache, key, key, jnp.array([1]), jnp.array([[0]]), k_scale=0.5, v_scale=0.5)
    np.testing.assert_array_equal(after[0, 0, 0], [0, 2])


def test_what_was_quantised_is_read_with_the_same_scale():
    query, (key, value) = numbers((3, 4, DIM)), tokens(3)
    cache = [jnp.zeros((BLOCKS, HEADS, SIZE, dim), jnp.int8) for dim in (DIM, VALUE_DIM)]
    scales = {"k_scale": jnp.array([0.02, 0.03]), "v_scale": jnp.float32(0.025)}
    lens, tables = jnp.ones(3, jnp.int32), jnp.array([[4], [0], [2]])
    after = page_update(*cache, key, value, lens, tables, **scales)
    out = page_attention(query, *after, lens, tables, **scales)
    np.testing.assert_allclose(out, jnp.repeat(value, 2, 1), atol=0.0126)


def test_a_scale_of_a_float_cache_divides():
    key, value = tokens(3)
    after = page_update(
        *caches(), key, value, jnp.asarray(LENS), jnp.asarray(TABLES), k_scale=2.0, v_scale=jnp.array([4.0, 0.5])
    )
    for new, cache, stored in zip(after, caches(), (key / 2, value / jnp.array([[4.0], [0.5]])), strict=True):
        assert_bits(new, expected(cache, stored, places(LENS, TABLES)))


def dense(cache, stored, where):
    for token, block, slot in where:
        cache = cache.at[block, :, slot].set(stored[token])
    return cache


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=slow), pytest.param("float64", marks=slow)]
)
def test_gradients(dtype, request):
    """Of key, value, caches and scales: what was overwritten has none, and neither has what was not written."""
    if dtype == "float64":
        request.getfixturevalue("x64")
    floats = {
        "key_cache": numbers((BLOCKS, HEADS, SIZE, DIM), 0, dtype),
        "value_cache": numbers((BLOCKS, HEADS, SIZE, VALUE_DIM), 1, dtype),
        **dict(zip(("key", "value"), tokens(TOKENS, dtype), strict=True)),
        "k_scale": jnp.asarray([0.5, 2.0], "float64" if dtype == "float64" else "float32"),
    }
    where = places(LENS, TABLES, OFFSETS)

    def run(floats):
        return page_update(
            **floats,
            context_lens=jnp.asarray(LENS),
            block_tables=jnp.asarray(TABLES),
            cum_seqlens_q=jnp.asarray(OFFSETS),
        )

    def reference(floats):
        scaled = floats["key"] / floats["k_scale"][:, None]
        return dense(floats["key_cache"], scaled, where), dense(floats["value_cache"], floats["value"], where)

    results, pull = jax.vjp(run, floats)
    cotangents = tuple(numbers(x.shape, 9, x.dtype) for x in results)
    grads = pull(cotangents)[0]
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), "float64"), (floats, cotangents))
        wanted, pull = jax.vjp(reference, wide[0])
        wanted_grads = pull(wide[1])[0]
    for a, b in zip(results, wanted, strict=True):
        assert_close(a, b, dtype)
    for name, grad in grads.items():
        assert grad.dtype == floats[name].dtype
        assert_close(grad, wanted_grads[name], dtype, gradient=True, what=name)
    assert (grads["key"][OFFSETS[-1] :] == 0).all()


def test_gradients_through_narrow_caches_are_refused():
    lens, tables = jnp.ones(3, jnp.int32), jnp.array([[4], [0], [2]])
    key, value = tokens(3)

    def total(key, value, cache, scale=1.0):
        after = page_update(*cache, key, value, lens, tables, k_scale=scale, v_scale=0.5)
        return sum(x.astype(jnp.float32).sum() for x in after)

    for dtype in NARROW:
        cache = [jnp.zeros((BLOCKS, HEADS, SIZE, dim), dtype) for dim in (DIM, VALUE_DIM)]
        for arguments in ((0,), (1,), (3,), *([(2,)] if dtype != "int8" else [])):
            with pytest.raises(UnsupportedError, match=f"page_update: there is no gradient through a cache of {dtype}"):
                jax.grad(total, arguments)(key, value, cache, jnp.float32(1.0))
        # Nothing is asked of the cache: no gradient passes it.
        stopped = jax.grad(lambda k, v, cache=cache: total(jax.lax.stop_gradient(k), v, cache) + (k**2).sum())
        np.testing.assert_allclose(stopped(key, jax.lax.stop_gradient(value)), 2 * key, rtol=1e-6)


def test_gradients_of_attention_over_new_tokens():
    """Through both operations: the new tokens' keys and values, the query and what was cached."""
    length, n = 7, 3
    query, key, value = (
        numbers((1, n, 4, DIM)),
        numbers((1, length, HEADS, DIM), 1),
        numbers((1, length, HEADS, DIM), 2),
    )
    tables = jnp.array([[5, 2]])

    def paged(query, key, value):
        pages = [jnp.zeros((BLOCKS, HEADS, SIZE, DIM)) for _ in range(2)]
        for start, stop in ((0, length - n), (length - n, length)):
            where = (jnp.array([stop]), tables)
            offsets = jnp.array([0, stop - start])
            pages = page_update(*pages, key[0, start:stop], value[0, start:stop], *where, cum_seqlens_q=offsets)
        return (page_attention(query[0], *pages, *where, cum_seqlens_q=offsets) ** 2).sum()

    def plain(query, key, value):
        return (flash_attention(query, key, value, causal=True) ** 2).sum()

    actual = jax.jit(jax.grad(paged, (0, 1, 2)))(query, key, value)
    for a, b in zip(actual, jax.grad(plain, (0, 1, 2))(query, key, value), strict=True):
        assert_close(a, b, "float32", gradient=True)


def compiled(dtype):
    shape = jax.ShapeDtypeStruct
    key = "bfloat16" if dtype in NARROW else dtype

    def step(keys, values, key, value, lens, tables, offsets):
        more = {"k_scale": 0.02, "v_scale": 0.02} if dtype in NARROW else {}
        return page_update(keys, values, key, value, lens, tables, cum_seqlens_q=offsets, **more)

    return (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(
            *[shape((64, 2, 16, 32), dtype)] * 2,
            *[shape((6, 2, 32), key)] * 2,
            *(shape((3,), jnp.int32), shape((3, 8), jnp.int32), shape((4,), jnp.int32)),
        )
        .compile()
    )


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=slow), "int8"])
def test_donated_caches_are_not_copied(dtype):
    """On a CPU caches of float8 are, and until jax 0.10 those of bfloat16: its compiler has no scatter for them."""
    found = compiled(dtype)
    text = found.as_text()
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text)[1]
    assert re.search(r"\{0\}: \(0, .*\{1\}: \(1, ", aliases), aliases
    copies = [line for line in text.splitlines() if re.search(r"= \w+\[64,2,16,32\]\S* (copy|convert|select)\(", line)]
    assert not copies
    assert found.memory_analysis().temp_size_in_bytes < 64 * 2 * 16 * 32 // 4


def test_undonated_caches_stay_as_they_are():
    before = caches()
    kept = [np.array(x) for x in before]
    page_update(*before, *tokens(3), jnp.asarray(LENS), jnp.asarray(TABLES))
    for a, b in zip(before, kept, strict=True):
        assert_bits(a, b)


@pytest.mark.parametrize("packed", [pytest.param(False, marks=slow), True])
def test_vmap(packed):
    """Over tokens, lengths, tables and offsets; the caches shared by the examples, and one each."""
    count = TOKENS if packed else 3
    key, value = (jnp.stack(x) for x in zip(*(tokens(count, seed=s) for s in (1, 3, 7)), strict=True))
    lens = jnp.array([[6, 0, 11], [5, 12, 2], [0, 0, 1]])
    tables = jnp.array(
        [[[4, 1, -1], [7, -1, 5], [0, 8, 3]], [[1, 2, 3], [0, 4, 5], [6, -1, 8]], [[-1] * 3] * 2 + [[3] * 3]]
    )
    offsets = jnp.array([[0, 3, 3, 8], [0, 5, 9, 10], [0, 0, 0, 1]]) if packed else None
    each = [jnp.stack(x) for x in zip(*(caches(seed=s) for s in (1, 3, 7)), strict=True)]

    def run(keys, values, key, value, lens, tables, offsets):
        return page_update(keys, values, key, value, lens, tables, cum_seqlens_q=offsets)

    for cache, axis in ((caches(), None), (each, 0)):
        after = jax.vmap(run, (axis, axis, 0, 0, 0, 0, 0))(*cache, key, value, lens, tables, offsets)
        for i in range(3):
            one = cache if axis is None else [x[i] for x in cache]
            alone = run(*one, key[i], value[i], lens[i], tables[i], offsets[i] if packed else None)
            for a, b in zip(after, alone, strict=True):
                assert_bits(np.asarray(a[i]), np.asarray(b))


def test_one_trace_for_all_lengths():
    """Of a number of tokens that no other test has."""
    traced = module._update._cache_size()
    before, (key, value), tables = caches(), tokens(TOKENS + 7), jnp.asarray(TABLES.clip(-1, 8))
    for lens, offsets in (([6, 0, 11], [0, 3, 3, 8]), ([1, 2, 3], [0, 1, 3, 6]), ([0, 0, 0], [0, 0, 0, 0])):
        page_update(*before, key, value, jnp.array(lens), tables, cum_seqlens_q=jnp.array(offsets))
    assert module._update._cache_size() == traced + 1


@pytest.mark.parametrize("tables", [pytest.param("int32", marks=slow), "int64"])
def test_x64(tables, x64):
    """Lengths, tables and offsets of 64 bits; an entry that would be a block in 32 bits writes nothing."""
    wide = TABLES.astype(tables)
    if tables == "int64":
        wide[2, 2] += 2**32
        wide[0, 0] -= 2**32
    before, (key, value) = caches("float64"), tokens(TOKENS, "float64")
    step = jax.jit(page_update)
    after = step(*before, key, value, jnp.asarray(LENS), jnp.asarray(wide), cum_seqlens_q=jnp.asarray(OFFSETS))
    where = places(LENS, wide, OFFSETS)
    for cache, new, stored in zip(before, after, (key, value), strict=True):
        assert_bits(new, expected(cache, stored, where))


@pytest.mark.parametrize(("batch", "blocks", "pages"), [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_nothing_to_write(batch, blocks, pages):
    cache = jnp.ones((blocks, 2, 4, 8))
    key, lens = jnp.full((batch, 2, 8), 3.0), jnp.zeros(batch, jnp.int32)
    tables = jnp.zeros((batch, pages), jnp.int32)
    for more in ({}, {"cum_seqlens_q": jnp.zeros(batch + 1, jnp.int32)}, {"cum_seqlens_q": jnp.zeros(1, jnp.int32)}):
        rows = more["cum_seqlens_q"].shape[0] - 1 if more else batch
        for new in page_update(cache, cache, key, key, lens[:rows], tables[:rows], **more):
            np.testing.assert_array_equal(new, cache)


def test_inside_shard_map():
    """Heads over a mesh, with tokens' places that the devices share."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    before, (key, value) = caches(), tokens(TOKENS)
    where = (jnp.asarray(LENS), jnp.asarray(TABLES), jnp.asarray(OFFSETS))
    by_head = (P(None, "model"),) * 4

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(*by_head, P(), P(), P()), out_specs=by_head[:2])
    def mapped(keys, values, key, value, lens, tables, offsets):
        return page_update(keys, values, key, value, lens, tables, cum_seqlens_q=offsets)

    alone = page_update(*before, key, value, *where[:2], cum_seqlens_q=where[2])
    for a, b in zip(mapped(*before, key, value, *where), alone, strict=True):
        assert_same(a, b, "float32")


NONSENSE = {
    "entries_past_the_cache": {"tables": [[9, 2**31 - 1, 100], [0, 1, 2], [77, 9, 10]]},
    "entries_below_0": {"tables": [[-1, -(2**31), -9], [0, 1, 2], [-1, -2, -3]]},
    "lengths_below_0": {"lens": [-7, -(2**31), -1]},
    "more_tokens_than_a_context_has": {"lens": [1, 0, 2]},
    "offsets_that_do_not_begin_at_0": {"offsets": [4, 6, 6, 9]},
    "offsets_that_decrease": {"offsets": [0, 7, 2, 8]},
    "offsets_past_the_tokens": {"offsets": [0, 2, 2, 2**31 - 1], "lens": [6, 0, 12]},
    "offsets_below_0": {"offsets": [-5, -2, 1, 3]},
    "lengths_past_the_table": {"lens": [1000, 0, 2**31 - 1]},
}


def test_traced_nonsense_writes_only_where_it_leads():
    """Entries past the cache write nothing; offsets are cut to the tokens and never fall, lengths are cut to the table."""
    step = jax.jit(lambda *a: page_update(*a[:6], cum_seqlens_q=a[6]))
    before, (key, value) = caches(), tokens(TOKENS)
    right = {"lens": LENS, "tables": TABLES.clip(-1, 8), "offsets": OFFSETS}
    for name, wrong in NONSENSE.items():
        given = {n: np.asarray(wrong.get(n, x), np.int32) for n, x in right.items()}
        after = step(*before, key, value, *(jnp.asarray(given[n]) for n in ("lens", "tables", "offsets")))
        offsets = np.maximum.accumulate(np.clip(given["offsets"], 0, TOKENS))
        where = places(np.clip(given["lens"], 0, 3 * SIZE), given["tables"], offsets)
        for cache, new, stored in zip(before, after, (key, value), strict=True):
            np.testing.assert_array_equal(new, expected(cache, stored, where), err_msg=name)


C, X = jnp.ones((6, 2, 4, 8)), jnp.ones((5, 2, 8))
RIGHT = {
    "key_cache": C,
    "value_cache": C,
    "key": X,
    "value": X,
    "context_lens": jnp.array([5, 8]),
    "block_tables": jnp.array([[0, 1, -1], [2, 3, 99]]),
    "cum_seqlens_q": jnp.array([0, 2, 5]),
}
INT8 = {"key_cache": C.astype(jnp.int8), "value_cache": C.astype(jnp.int8)}
WRONG = [
    ("key_cache", {"key_cache": C[0]}, ["3 dimensions", "num_blocks"]),
    ("key_cache", {"key_cache": C.astype(jnp.int32)}, ["int32", "int8"]),
    ("key_cache", {"key_cache": [1.0]}, ["a list"]),
    ("value_cache", {"value_cache": C[:5]}, ["[6, 2, 4]"]),
    ("value_cache", {"value_cache": C.astype(jnp.float16)}, ["float16", "float32"]),
    ("key", {"key": X[0]}, ["2 dimensions", "[tokens, 2, 8]"]),
    ("key", {"key": X[..., :7]}, ["[tokens, 2, 8]"]),
    ("key", {"key": X[:, :1]}, ["[tokens, 2, 8]"]),
    ("key", {"key": X.astype(jnp.bfloat16)}, ["bfloat16", "float32", "cast"]),
    ("key", {"key": X.astype(jnp.int8), **INT8}, ["int8", "floating"]),
    ("key", {"key": 1.0}, ["1.0"]),
    ("value", {"value": X[:, :, :5]}, ["[tokens, 2, 8]"]),
    ("value", {"value": X[:4]}, ["as many tokens as key, 5"]),
    ("k_scale", {**INT8, "v_scale": 1.0}, ["None", "int8", "127"]),
    ("v_scale", {**INT8, "k_scale": 1.0}, ["None", "int8", "127"]),
    ("k_scale", {"k_scale": jnp.ones(3)}, ["[2]", "scalar"]),
    ("v_scale", {"v_scale": jnp.ones((1, 2))}, ["2 dimensions"]),
    ("v_scale", {"v_scale": "one"}, ["'one'"]),
    ("context_lens", {"context_lens": jnp.array([5])}, ["[2] integers"]),
    ("context_lens", {"context_lens": jnp.array([5, 13])}, ["12", "[ 5 13]"]),
    ("context_lens", {"context_lens": np.array([-1, 8])}, ["from 0", "-1"]),
    ("context_lens", {"cum_seqlens_q": None}, ["[5] integers", "without cum_seqlens_q"]),
    ("block_tables", {"block_tables": RIGHT["block_tables"] * 1.0}, ["integer"]),
    ("block_tables", {"block_tables": jnp.array([[0, 6, -1], [2, 3, 99]])}, ["[0, 1] is 6", "0 to 5"]),
    ("cum_seqlens_q", {"cum_seqlens_q": jnp.array([1, 2, 5])}, ["begin at 0"]),
    ("cum_seqlens_q", {"cum_seqlens_q": jnp.array([0, 3, 2])}, ["never decrease"]),
    ("cum_seqlens_q", {"cum_seqlens_q": jnp.array([0, 3, 6])}, ["end at 5"]),
    ("cum_seqlens_q", {"context_lens": jnp.array([5, 2])}, ["sequence 1 has 3 and a context of 2"]),
    ("cum_seqlens_q", {"cum_seqlens_q": jnp.array([0.0, 2.0, 5.0])}, ["integer"]),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "arguments", "words"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_arguments(argument, arguments, words):
    with pytest.raises(InvalidInputError) as caught:
        page_update(**{**RIGHT, **arguments})
    assert str(caught.value).startswith(f"page_update: {argument} is "), caught.value
    for word in words:
        assert word in str(caught.value), caught.value


def test_entries_of_pages_without_a_new_token_are_not_needed():
    tables = jnp.array([[77, 1, 99], [2, 3, 99]])
    with pytest.raises(InvalidInputError, match=r"\[0, 0\] is 77"):
        page_update(**{**RIGHT, "block_tables": tables})
    page_update(**{**RIGHT, "block_tables": tables, "cum_seqlens_q": jnp.array([0, 1, 4])})
