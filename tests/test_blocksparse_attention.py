"""blocksparse_attention and its patterns: what is its own; the files that are one a property run its examples too."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples_blocksparse_attention import EXAMPLES, example, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from subjects import parameter, subjects
from test_jit import count_traces
from tolerances import assert_close

from ejkernel import (
    BwdParams,
    FwdParams,
    InvalidInputError,
    Support,
    blocksparse_attention,
    explain,
    flash_attention,
    kernel_registry,
    overlay,
    patterns,
)
from ejkernel.ops.blocksparse_attention import OPERATION

slow = pytest.mark.slow


def implementations(*, interpreted):
    """Parameter ``subject`` of a test; ``interpreted``: the lane of those that an interpreter runs, slow, short, only or never."""
    found = [s for s in subjects("blocksparse_attention") if s.dtype == "float32"]
    if interpreted in ("only", "never"):
        found = [s for s in found if s.interpreted == (interpreted == "only")]
    return pytest.mark.parametrize(
        "subject", [parameter(s, slow=s.interpreted and interpreted == "slow") for s in found]
    )


each_implementation = implementations(interpreted="slow")


def inputs(length=48, heads=2, dim=8, kv_len=None, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(
        jnp.asarray(rng.standard_normal((1, n, heads, dim)), jnp.float32)
        for n in (length, kv_len or length, kv_len or length)
    )


def test_patterns_are_what_they_say():
    for nq, nk, n in itertools.product((1, 4, 7), (1, 4, 9), (0, 1, 3)):
        d = np.arange(nq)[:, None] + nk - nq - np.arange(nk)[None, :]
        np.testing.assert_array_equal(patterns.local(n)(nq, nk), abs(d) <= n)
        np.testing.assert_array_equal(patterns.strided(n + 1)(nq, nk), d % (n + 1) == 0)
        np.testing.assert_array_equal(patterns.causal()(nq, nk), d >= 0)
        rows = (np.arange(nq) < n)[:, None] | (np.arange(nk) < n)[None, :]
        np.testing.assert_array_equal(patterns.global_tokens(n)(nq, nk), rows)
        either = patterns.local(n) | patterns.global_tokens(1)
        both = either & patterns.causal()
        np.testing.assert_array_equal(either(nq, nk), (abs(d) <= n) | patterns.global_tokens(1)(nq, nk))
        np.testing.assert_array_equal(both(nq, nk), either(nq, nk) & (d >= 0))
    assert repr(both) == "((local(3) | global_tokens(1)) & causal())"
    assert patterns.local(1)(3, 4).dtype == bool


@pytest.mark.parametrize(
    "call",
    [
        lambda: patterns.local(-1),
        lambda: patterns.strided(0),
        lambda: patterns.global_tokens(1.5),
        lambda: patterns.causal()(-1, 2),
        lambda: patterns.local(True),
    ],
)
def test_patterns_refuse_what_is_no_size(call):
    with pytest.raises(InvalidInputError, match=r"patterns: \w+ is .*; expected an int"):
        call()


def test_patterns_combine_with_patterns_alone():
    with pytest.raises(TypeError):
        patterns.causal() | np.ones((2, 2), bool)


@each_implementation
@pytest.mark.parametrize(
    "statics",
    [
        # Wide enough for a block that needs no mask between two that do, which the list has first.
        {"causal": True, "sliding_window": (37, 0)},
        *[
            pytest.param(x, marks=slow)
            for x in ({}, {"causal": True}, {"sliding_window": (None, 2)}, {"causal": True, "sliding_window": (13, 0)})
        ],
    ],
)
def test_a_full_mask_is_flash_attention(subject, statics):
    q, k, v = inputs(50, kv_len=70)
    mask = np.ones((4, 5), bool)
    sparse = blocksparse_attention(q, k, v, mask, 16, **statics, platform=subject.platform)
    assert_close(sparse, flash_attention(q, k, v, **statics), "float32")


@each_implementation
@pytest.mark.parametrize("keys", [16, 1000])
def test_parameters_never_change_the_meaning(subject, keys):
    """One block of keys a step, and as many as there are; one head a step, and all."""
    case = EXAMPLES[-1]
    arrays = case.arrays()
    heads = 1 if keys == 16 else 64
    params = (cls(kv_blocksize=keys, blocksize_heads=heads) for cls in (FwdParams, BwdParams))
    with overlay(blocksparse_attention=tuple(params)):
        check(subject, case, arrays)


def check(subject, case, arrays):
    """Values and gradients against float64."""

    def run(arrays):
        return case.run(arrays, platform=subject.platform)

    rng = np.random.default_rng(3)
    cotangents = tuple(jnp.asarray(rng.standard_normal(x.shape), jnp.float32) for x in jax.eval_shape(run, arrays))

    @jax.jit
    def both(floats, cotangents):
        result, pull = jax.vjp(lambda floats: run({**arrays, **floats}), floats)
        return result, pull(cotangents)[0]

    (out, lse), grads = both(case.floats(arrays), cotangents)
    (expected_out, expected_lse), expected = case.expected(arrays, cotangents)
    assert_close(out, expected_out, "float32")
    assert_close(lse, expected_lse, "float32")
    for name, grad in grads.items():
        assert_close(grad, expected[name], "float32", gradient=True, what=name)


@slow
@each_implementation
@pytest.mark.parametrize(
    ("blocks", "tiles"), [((64, 32), (16, 16)), ((32, 64), (32, 16)), ((48, 40), (64, 64))], ids=str
)
@pytest.mark.parametrize("mask_heads", [0, 1])
def test_several_tiles_a_block(subject, blocks, tiles, mask_heads):
    """Blocks that are several tiles of a kernel's, and blocks that end within one."""
    case = example(
        "tiles", batch=1, q_len=90, kv_len=100, heads=2, kv_heads=1, blocks=blocks, mask_heads=mask_heads, causal=True, return_lse=True
    )  # fmt: skip
    sides = {"q_blocksize": tiles[0], "kv_blocksize": tiles[1]}
    more = {"blocksize_m": tiles[1], "blocksize_n": tiles[0]}
    with overlay(blocksparse_attention=(FwdParams(**sides), BwdParams(**sides, **more))):
        check(subject, case, case.arrays())


@slow
@implementations(interpreted="never")
@settings(max_examples=15)
@given(data=st.data())
def test_any_call(subject, data):
    any_call(subject, data.draw)


@slow
@implementations(interpreted="only")
@settings(max_examples=3)
@given(data=st.data())
def test_any_call_in_an_interpreter(subject, data):
    any_call(subject, data.draw)


def any_call(subject, draw):
    """Values and gradients; the mask traced and not."""
    q_len, kv_len = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    side = st.none() | st.integers(0, 40)
    kv_heads = draw(st.sampled_from([1, 2]))
    case = example(
        "drawn",
        batch=draw(st.integers(1, 2)),
        q_len=q_len,
        kv_len=kv_len,
        kv_heads=kv_heads,
        heads=kv_heads * draw(st.integers(1, 2)),
        blocks=(draw(st.sampled_from([1, 5, 16, 64])), draw(st.sampled_from([3, 8, 16]))),
        mask_heads=draw(st.integers(0, 2)),
        density=draw(st.sampled_from([0.0, 0.3, 1.0])),
        segments=draw(st.booleans()),
        sinks=draw(st.integers(0, 2)),
        causal=draw(st.booleans()),
        sliding_window=(draw(side), draw(side)),
        return_lse=True,
    )
    arrays = case.arrays(seed=draw(st.integers(0, 5)))
    params = (
        FwdParams(kv_blocksize=draw(st.sampled_from([8, 32, 500]))),
        BwdParams(kv_blocksize=draw(st.sampled_from([8, 64]))),
    )
    with overlay(blocksparse_attention=params):
        check(subject, case, arrays)
        traced = jax.jit(lambda arrays: case.run(arrays, platform=subject.platform))(arrays)
    assert_close(traced[0], case.expected(arrays)[0], "float32")


@implementations(interpreted="never")
@pytest.mark.parametrize("size", [521, *[pytest.param(size, marks=slow) for size in (600, 1030)]])
def test_blocks_larger_than_a_kernels(subject, size):
    """Cut into parts where they divide: the mask's meaning stays."""
    q, k, v = inputs(1100, heads=1)
    n = -(-1100 // size)
    mask = np.random.default_rng(1).random((n, n)) < 0.6
    mask[0, 0] = True
    for statics in ({}, {"causal": True}):
        actual = blocksparse_attention(q, k, v, mask, size, **statics, platform=subject.platform)
        with jax.enable_x64(True):
            expected = reference(*(x.astype("float64") for x in (q, k, v)), mask, block_size=size, **statics)
        assert_close(actual, expected, "float32")


@implementations(interpreted="short")
@pytest.mark.parametrize("garbage", [np.nan, pytest.param(np.inf, marks=slow)])
@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=slow)])
def test_garbage_in_hidden_blocks_never_shows(subject, garbage, traced):
    q, k, v = inputs(60)
    mask = np.random.default_rng(2).random((4, 4)) < 0.5
    mask[:, 1] = False
    mask[:, 3] = [True, False, True, False]
    hidden = jnp.asarray(np.repeat(~mask.any(0), 16)[:60])[None, :, None, None]

    def run(q, k, v, mask):
        return blocksparse_attention(q, k, v, mask, 16, platform=subject.platform)

    if not traced:
        run = functools.partial(run, mask=mask)

    @jax.jit
    def gradients(q, k, v, *mask):
        out, pull = jax.vjp(lambda *a: run(*a, *mask), q, k, v)
        return out, *pull(2 * out)

    clean = jnp.where(hidden, 0, k), jnp.where(hidden, 0, v)
    dirty = jnp.where(hidden, garbage, k), jnp.where(hidden, garbage, v)
    given = (mask,) if traced else ()
    for a, b in zip(*(gradients(q, *kv, *given) for kv in (dirty, clean)), strict=True):
        np.testing.assert_array_equal(a, b)


@each_implementation
@pytest.mark.parametrize("sinks", [False, pytest.param(True, marks=slow)])
def test_garbage_in_rows_that_see_nothing_never_shows(subject, sinks):
    """Neither that of a block that has no list, nor that of rows whose window misses what their block lists."""
    q, k, v = inputs(60)
    mask = np.zeros((4, 4), bool)
    mask[1, 0] = mask[2, 2] = mask[3, :2] = True
    options = {"causal": True, "sliding_window": (21, 0), "platform": subject.platform}
    if sinks:
        options["softmax_aux"] = jnp.array([0.5])
    row, column = np.arange(60)[:, None], np.arange(60)[None, :]
    seen = np.kron(mask, np.ones((16, 16), bool))[:60, :60] & (column <= row) & (column >= row - 21)
    blind = jnp.asarray(~seen.any(1))[None, :, None, None]
    assert 16 < blind.sum() < 60 - 16
    assert (~seen.any(1))[16:].any()

    def gradients(garbage):
        out, pull = jax.vjp(
            lambda *a: blocksparse_attention(*a, mask, 16, **options), jnp.where(blind, garbage, q), k, v
        )
        return out, *pull(jnp.where(blind, garbage, jnp.cos(out)))

    (out, dq, *rest), expected = gradients(jnp.nan), gradients(0.0)
    for a, b in zip((out, dq, *rest), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not jnp.where(blind, out, 0).any()
    assert not jnp.where(blind, dq, 0).any()


@each_implementation
def test_a_nan_that_is_seen_shows(subject):
    q, k, v = inputs(48)
    mask = np.eye(3, dtype=bool)
    out = blocksparse_attention(q, k.at[0, 20].set(jnp.nan), v, mask, 16, platform=subject.platform)
    assert jnp.isnan(out[:, 16:32]).all()
    assert not jnp.isnan(out[:, :16]).any()


def test_masks_that_keep_about_as_many_blocks_share_a_compilation(monkeypatch):
    traces = count_traces(monkeypatch)
    q, k, v = inputs(64)
    rng = np.random.default_rng(0)
    for _ in range(4):
        mask = np.zeros(16, bool)
        mask[rng.permutation(16)[: rng.integers(5, 9)]] = True
        blocksparse_attention(q, k, v, mask.reshape(4, 4), 16)
    assert len(traces) == 1


@pytest.fixture
def multiplied(monkeypatch):
    """How many blocks of keys the kernel loads, one number a load."""
    from ejkernel.kernels._xla import blocksparse_attention as kernel

    seen = []
    original = kernel.ListedTiles.keys

    def keys(self, array, tile, starts):
        if array is self.arrays["key"]:
            jax.debug.callback(lambda n: seen.append(int(n)), jnp.int32(len(starts)))
        return original(self, array, tile, starts)

    monkeypatch.setattr(kernel.ListedTiles, "keys", keys)
    return seen


@pytest.mark.parametrize(
    ("causal", "density", "traced"),
    [
        (False, 0.2, False),
        (True, 0.5, True),
        *[pytest.param(*rest, marks=slow) for rest in ((False, 0.2, True), (True, 0.5, False), (True, 1.0, False))],
        *[pytest.param(*rest, marks=slow) for rest in ((True, 1.0, True), (False, 0.0, False), (False, 0.0, True))],
    ],
)
def test_work_is_the_blocks_kept(multiplied, traced, causal, density):
    """Masked blocks cost nothing, nor do those that causality empties."""
    q, k, v = inputs(128, heads=1)
    mask = np.random.default_rng(5).random((8, 8)) < density
    scale = 0.3 + density  # a call of its own, which no other test has traced

    def run(mask):
        return blocksparse_attention(q, k, v, mask, 16, causal=causal, softmax_scale=scale)

    jax.block_until_ready((jax.jit(run) if traced else run)(mask))
    jax.effects_barrier()
    assert sum(multiplied) == (mask & (patterns.causal()(8, 8) | (not causal))).sum()


def test_memory_does_not_grow_with_the_square():
    length = 8192
    x = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)
    mask = patterns.local(1)(length // 64, length // 64)
    run = jax.grad(lambda x: blocksparse_attention(x, x, x, mask).sum())
    temporary = jax.jit(run).lower(x).compile().memory_analysis().temp_size_in_bytes
    # The gradients and a few arrays of the inputs' size; the logits of one head would be 64 of them.
    assert temporary < 16 * x.size * x.dtype.itemsize


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"sparsity_mask": np.ones((3, 4), bool)},
            "sparsity_mask is bool[3, 4]; expected [3, 3], [2, 3, 3] or [1, 2, 3, 3]",
        ),
        ({"sparsity_mask": np.ones((3, 3, 3), bool)}, "sparsity_mask is bool[3, 3, 3]"),
        ({"sparsity_mask": np.ones((3, 3), np.float32)}, "sparsity_mask is float32[3, 3]"),
        ({"sparsity_mask": jnp.ones((3, 3), jnp.int32)}, "sparsity_mask is int32[3, 3]"),
        ({"sparsity_mask": np.ones(3, bool)}, "sparsity_mask is bool[3]"),
        ({"sparsity_mask": [[True]]}, "sparsity_mask is a list"),
        ({"sparsity_mask": None}, "sparsity_mask is None"),
        ({"sparsity_mask": patterns.causal()}, "causal() (Pattern); expected an array: call the pattern"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": (16, 16, 16)}, "block_size is (16, 16, 16)"),
        ({"block_size": 16.0}, "block_size is 16.0"),
        ({"block_size": True}, "block_size is True"),
        ({"query": jnp.ones((1, 48, 3, 8))}, "query is float32[1, 48, 3, 8]; expected a number of heads"),
        ({"key": jnp.ones((1, 48, 2, 8), jnp.bfloat16)}, "key is bfloat16"),
        ({"sliding_window": (1, -1)}, "sliding_window is (1, -1)"),
        ({"causal": 1}, "causal is 1"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap is -1.0"),
        ({"softmax_aux": jnp.ones((3, 1))}, "softmax_aux is float32[3, 1]"),
        ({"q_segment_ids": jnp.ones((1, 48), int)}, "kv_segment_ids is None"),
        ({"return_lse": None}, "return_lse is None"),
        ({"backend": "npu"}, "backend is 'npu'"),
    ],
)
def test_bad_input(change, words):
    q, k, v = inputs(48)
    call = {"query": q, "key": k, "value": v, "sparsity_mask": np.ones((3, 3), bool), "block_size": 16, **change}
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        blocksparse_attention(**call)
    if isinstance(call["sparsity_mask"], np.ndarray):
        with pytest.raises(InvalidInputError, match=re.escape(words)):
            jax.jit(lambda mask: blocksparse_attention(**{**call, "sparsity_mask": mask}))(call["sparsity_mask"])


def test_an_empty_batch():
    x = jnp.ones((0, 32, 2, 8))
    out, lse = blocksparse_attention(x, x, x, np.ones((1, 1), bool), return_lse=True)
    assert (out.shape, lse.shape) == ((0, 32, 2, 8), (0, 2, 32))
    assert blocksparse_attention(x, x, x, np.ones((0, 2, 1, 1), bool)).shape == x.shape


def test_the_cost_counts_the_blocks_kept():
    x = jax.ShapeDtypeStruct((1, 256, 2, 8), jnp.float32)

    def flops(mask, **statics):
        return OPERATION.cost(explain(blocksparse_attention, x, x, x, mask, 64, **statics).call).flops

    assert flops(np.eye(4, dtype=bool)) * 4 == flops(np.ones((4, 4), bool))
    assert flops(np.eye(4, dtype=bool)) == 4 * 64 * 64 * 2 * 2 * 16
    assert flops(np.ones((4, 4), bool), causal=True) == 10 * 64 * 64 * 2 * 2 * 16
    assert flops(jax.ShapeDtypeStruct((4, 4), bool)) == flops(np.ones((4, 4), bool))


def test_a_plain_function_gets_the_mask():
    @kernel_registry.register("blocksparse_attention", "cuda", "any", support=Support.everything())
    def plain(query, key, value, sparsity_mask, **_):
        assert sparsity_mask.shape == (3, 3)
        return value * sparsity_mask.sum()

    try:
        q, k, v = inputs(48)
        out = blocksparse_attention(q, k, v, np.eye(3, dtype=bool), 16, platform="cuda")
        np.testing.assert_allclose(out, 3 * v)
    finally:
        kernel_registry.unregister(plain)


@slow
def test_tuning_a_call(own_store):
    from ejkernel import autotune

    q, k, v = inputs(64)
    mask = np.eye(4, dtype=bool)
    out = autotune(blocksparse_attention)(q, k, v, mask, 16)
    assert_close(out, blocksparse_attention(q, k, v, mask, 16), "float32")
    assert explain(blocksparse_attention, q, k, v, mask, 16).chosen.source == "memory"


def test_examples_cover_every_feature():
    assert set().union(*(e.features for e in EXAMPLES)) == set(OPERATION.features)


def test_blocks_that_kernels_cut_into_unequal_parts():
    """A block of 1024 queries is two of a kernel's, one of 512 keys is one."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 2048, 1, 8)), jnp.float32) for _ in range(3))
    mask = np.array([[True, False, True, False], [False, True, True, True]])
    expected = blocksparse_attention(q, k, v, np.repeat(mask, 2, 0), 512)
    np.testing.assert_array_equal(blocksparse_attention(q, k, v, mask, (1024, 512)), expected)
    np.testing.assert_allclose(
        blocksparse_attention(q, k, v, jnp.asarray(mask), (1024, 512))[0, :, 0],
        flash_attention(q, k, v, attention_mask=np.kron(mask, np.ones((1024, 512), bool))[None])[0, :, 0],
        rtol=1e-4,
        atol=1e-5,
    )
