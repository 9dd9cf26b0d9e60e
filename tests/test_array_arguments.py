"""Scales and windows that come as arrays, and packed sequences without a batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case, each_case, named
from jax.sharding import AxisType
from subjects import each_subject
from tolerances import assert_close

from ejkernel import (
    InvalidInputError,
    blocksparse_attention,
    explain,
    flash_attention,
    page_attention,
    patterns,
    ring_attention,
)

slow = pytest.mark.slow
FLOATS = ("query", "key", "value")


def run(arrays, statics, **numbers):
    """Output and gradients, the numbers' own too, of one jitted call in which all arrays are traced."""
    floats = {name: arrays[name] for name in FLOATS}
    rest = {name: x for name, x in arrays.items() if name not in FLOATS}
    learned = {name: x for name, x in numbers.items() if name == "softmax_scale"}
    others = {name: x for name, x in numbers.items() if name not in learned}
    dout = jnp.asarray(np.random.default_rng(5).standard_normal(_out_shape(arrays)), floats["query"].dtype)

    @jax.jit
    def both(floats, rest, others):
        out, pull = jax.vjp(lambda floats: flash_attention(**floats, **rest, **others, **statics), floats)
        return out, pull(dout)[0]

    return both({**floats, **learned}, rest, others), dout


def _out_shape(arrays):
    return (*arrays["query"].shape[:3], arrays["value"].shape[3])


def check(case, subject, sliding_window=None, **numbers):
    """A call with numbers from arrays against float64."""
    arrays, statics = case.make(subject.dtype)
    traced = {"sliding_window": jax.tree.map(jnp.int32, sliding_window)} if sliding_window else {}
    (out, grads), dout = run(arrays, {**statics, **case.blocks, "platform": subject.platform}, **traced, **numbers)
    known = case.as_oracle(arrays, statics) | {name: float(x) for name, x in numbers.items()}
    expected, _, wanted = oracle.attention(**known, sliding_window=sliding_window, dout=np.asarray(dout, np.float64))
    assert_close(out, expected, subject.dtype, what="out")
    for name in FLOATS:
        assert_close(grads[name], wanted[name], subject.dtype, gradient=True, what=name)
    if "softmax_scale" in numbers:
        # By the chain rule: the scale only ever stands beside the query.
        scale = float(numbers["softmax_scale"])
        slope = (wanted["query"] * np.asarray(arrays["query"], np.float64)).sum() / scale
        size = np.abs(wanted["query"] * np.asarray(arrays["query"], np.float64)).sum() / abs(scale)
        assert_close(grads["softmax_scale"] / size, slope / size, subject.dtype, gradient=True, what="softmax_scale")


WINDOWED = [
    Case("plain"),
    Case("causal", frozenset({"causal"}), q_len=29, kv_len=45, group=2),
    Case("segments", frozenset({"segments", "soft_cap"}), variant=1),
    Case("packed", frozenset({"varlen", "causal"}), q_len=61, kv_len=83),
    Case("short_keys", q_len=45, kv_len=11),
]


@pytest.mark.parametrize(
    "window", [pytest.param((5, 2), id="both"), pytest.param((7, None), id="left", marks=[slow, pytest.mark.again])]
)
@each_case(WINDOWED)
def test_windows_from_arrays(subject, case, window):
    if not subject.has("varlen"):
        pytest.skip("takes no intervals")
    check(case, subject, window)


@pytest.mark.parametrize("scale", [0.3, pytest.param(-0.3, marks=slow)])
@each_subject()
def test_scales_from_arrays(subject, scale):
    check(Case("causal", frozenset({"causal"}), group=2).at(subject), subject, softmax_scale=jnp.float32(scale))


@slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scales_in_half_precision(dtype):
    """Rounding the scaled query costs no more than the tolerance; a power of two costs nothing."""
    arrays, _ = named("mqa_causal")[0].make(dtype)
    static = flash_attention(**arrays, softmax_scale=0.25)
    np.testing.assert_array_equal(flash_attention(**arrays, softmax_scale=jnp.float32(0.25)), static)
    for scale in (0.3, 1.7, -0.3, 0.0):
        expected, _ = oracle.attention(**{n: np.asarray(x, np.float64) for n, x in arrays.items()}, softmax_scale=scale)
        assert_close(flash_attention(**arrays, softmax_scale=jnp.asarray(scale)), expected, dtype, what=str(scale))


def test_one_compilation_for_all_windows_and_scales():
    arrays, _ = Case("plain").make()
    count = 0

    @jax.jit
    def attend(left, scale):
        nonlocal count
        count += 1
        return flash_attention(**arrays, causal=True, sliding_window=(left, 0), softmax_scale=scale)

    for left, scale in ((0, 1.0), (5, 0.5), (2**31 - 1, 0.0)):
        known = {"causal": True, "sliding_window": (left, 0), "softmax_scale": scale}
        assert_close(attend(left, scale), oracle.attention(**arrays, **known)[0], "float32", what=str(known))
    assert_close(attend(-3, 1.0), oracle.attention(**arrays, causal=True, sliding_window=(0, 0), softmax_scale=1.0)[0], "float32")  # fmt: skip
    assert count == 1


def test_layers_under_scan_and_examples_under_vmap():
    arrays, _ = Case("plain").make()
    windows = jnp.array([0, 3, 50], jnp.int32)
    scales = jnp.array([0.5, -1.0, 0.25])

    def layer(window, scale):
        return flash_attention(**arrays, sliding_window=(window, 1), softmax_scale=scale)

    expected = [
        oracle.attention(**arrays, sliding_window=(int(w), 1), softmax_scale=float(s))[0]
        for w, s in zip(windows, scales, strict=True)
    ]
    _, scanned = jax.lax.scan(lambda carry, x: (carry, layer(*x)), None, (windows, scales))
    assert_close(scanned, expected, "float32")
    assert_close(jax.vmap(layer)(windows, scales), expected, "float32")


@pytest.mark.parametrize("dtype", ["int8", "uint32"])
def test_sides_of_any_integer_dtype(dtype):
    arrays, _ = Case("plain", q_len=150, kv_len=150, batch=1, kv_heads=1).make()
    side = jnp.asarray(np.iinfo(dtype).max, dtype)
    out = flash_attention(**arrays, sliding_window=(side, 0))
    assert_close(out, oracle.attention(**arrays, sliding_window=(int(side), 0))[0], "float32")


def test_in_code_that_forbids_promotion(x64):
    arrays, _ = Case("plain").make()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        out = flash_attention(**arrays, sliding_window=(jnp.int32(4), 0), softmax_scale=jnp.float64(0.3))
    assert_close(out, oracle.attention(**arrays, sliding_window=(4, 0), softmax_scale=0.3)[0], "float32")


def test_explained_without_values():
    x = jax.ShapeDtypeStruct((2, 4096, 8, 128), jnp.bfloat16)
    number, side = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    found = explain(
        flash_attention, x, x, x, softmax_scale=number, sliding_window=(side, 0), device="nvidia-h200", gradients=True
    )
    assert found.chosen.platform.value == "pallas"
    assert found.backward.chosen.platform.value == "pallas"
    packed = jax.ShapeDtypeStruct((4096, 8, 128), jnp.bfloat16)
    offsets = jax.ShapeDtypeStruct((4,), jnp.int32)
    found = explain(flash_attention, packed, packed, packed, cum_seqlens_q=offsets, cum_seqlens_k=offsets)
    assert "query bf16[1,4096,8,128]" in str(found)


@pytest.mark.parametrize("window", [None, (jnp.int32(4), 0)], ids=["", "window"])
def test_packed_sequences_without_a_batch(window):
    arrays, statics = Case("packed", frozenset({"varlen", "causal", "lse"}), q_len=61, kv_len=83, value_dim=8).make()
    bare = {name: x[0] if name in FLOATS else x for name, x in arrays.items()}
    out, lse = flash_attention(**arrays, **statics, sliding_window=window)
    bare_out, bare_lse = flash_attention(**bare, **statics, sliding_window=window)
    assert (bare_out.shape, bare_lse.shape) == ((61, 2, 8), (2, 61))
    np.testing.assert_array_equal(bare_out, out[0])
    np.testing.assert_array_equal(bare_lse, lse[0])
    with pytest.raises(InvalidInputError, match="cum_seqlens_q"):
        flash_attention(**{**bare, "cum_seqlens_q": jnp.array([0, 62])}, **statics)


X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 64, 2, 8)), jnp.float32)
PAGES = {
    "key_cache": jnp.ones((4, 2, 16, 8)) * jnp.arange(16.0)[:, None] / 16,
    "value_cache": jnp.asarray(np.random.default_rng(1).standard_normal((4, 2, 16, 8)), jnp.float32),
    "context_lens": jnp.array([20, 9]),
    "block_tables": jnp.array([[1, 3], [2, -1]]),
}
MESH = jax.make_mesh((2,), ("ring",), axis_types=(AxisType.Auto,))
OTHERS = {
    "page": lambda **more: page_attention(X[:, 0], **PAGES, **more),
    "blocksparse": lambda **more: blocksparse_attention(X, X, X, patterns.local(1)(4, 4), block_size=16, **more),
    "ring": lambda **more: ring_attention(X, X, X, mesh=MESH, **more),
}


_long, _cache = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 4096, 8, 128), (2048, 8, 64, 128)))
ABSTRACT = {
    "page": (
        jax.ShapeDtypeStruct((64, 64, 128), jnp.bfloat16), _cache, _cache, jax.ShapeDtypeStruct((64,), jnp.int32),
        jax.ShapeDtypeStruct((64, 32), jnp.int32),
    ),
    "blocksparse": (_long, _long, _long, jax.ShapeDtypeStruct((64, 64), jnp.bool_)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_scales_of_the_other_operations(name):
    attend = OTHERS[name]
    run = jax.jit(jax.value_and_grad(lambda scale: (attend(softmax_scale=scale) ** 2).sum()))
    (value, slope), (above, _), (below, _) = (run(jnp.float32(scale)) for scale in (0.5, 0.51, 0.49))
    np.testing.assert_allclose(value, (attend(softmax_scale=0.5) ** 2).sum(), rtol=1e-5)
    np.testing.assert_allclose(slope, (above - below) / 0.02, rtol=1e-2)


OTHERS_TOO = {
    **OTHERS,
    "page, packed": lambda **more: page_attention(X[0, :9], **PAGES, cum_seqlens_q=jnp.array([0, 5, 8]), **more),
    "ring, zigzag": lambda **more: ring_attention(X, X, X, mesh=MESH, layout="zigzag", causal=False, **more),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OTHERS else slow) for n in OTHERS_TOO])
def test_windows_of_the_other_operations(name):
    """As static ones, by one compilation."""
    attend, count = OTHERS_TOO[name], 0

    @jax.jit
    def traced(left, right):
        nonlocal count
        count += 1
        return attend(sliding_window=(left, right))

    for window, static in (((5, 0), {"sliding_window": (5, 0)}), ((2**31 - 1, 2**31 - 1), {})):
        np.testing.assert_allclose(traced(*map(jnp.int32, window)), attend(**static), atol=1e-6)
    assert count == 1


@slow
@pytest.mark.parametrize("name", OTHERS_TOO)
def test_windows_that_differ_from_layer_to_layer(name):
    attend, windows = OTHERS_TOO[name], [(0, 3), (5, 0), (20, 20)]
    expected = jnp.stack([attend(sliding_window=window) for window in windows])
    for over_layers in (jax.vmap, lambda one: functools.partial(jax.lax.map, one)):
        layers = over_layers(lambda window: attend(sliding_window=(window[0], window[1])))(jnp.array(windows))
        np.testing.assert_allclose(layers, expected, atol=1e-6)
    half = jax.jit(lambda left: attend(sliding_window=(left, None)))(jnp.int32(5))
    np.testing.assert_allclose(half, attend(sliding_window=(5, None)), atol=1e-6)
    np.testing.assert_allclose(attend(sliding_window=jnp.int32(4)), attend(sliding_window=4), atol=1e-6)


@slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_gradients_of_a_ring_whose_window_is_from_data(layout):
    def gradients(window):
        attend = functools.partial(ring_attention, mesh=MESH, layout=layout, sliding_window=window)
        return jax.grad(lambda x: (attend(x, x[:, :, :1], x[:, :, :1]) ** 2).sum())(X)

    np.testing.assert_allclose(jax.jit(gradients)((jnp.int32(9), 0)), gradients((9, 0)), atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_other_operations_refuse(name):
    attend = OTHERS[name]
    for window, words in ((jnp.int32(-1), "a side is -1"), (jnp.float32(2), "whole"), ((jnp.int32(1), -1), "≥ 0")):
        with pytest.raises(InvalidInputError, match=f"{name}_attention: sliding_window is .*{words}"):
            attend(sliding_window=window)
    with pytest.raises(InvalidInputError, match=f"{name}_attention: softmax_scale is "):
        attend(softmax_scale=jnp.ones(2))
    with pytest.raises(InvalidInputError, match=rf"{name}_attention: softmax_aux is .*\[:, None\]"):
        attend(softmax_aux=jnp.ones(2))


def test_tables_behind_a_window_from_data():
    """Entries of pages that a window leaves out may be anything, so what is refused depends on what is known of it."""
    garbage = {**PAGES, "block_tables": jnp.array([[-1, 3], [2, -1]])}
    out = page_attention(X[:, 0], **garbage, sliding_window=(jnp.int32(3), 0))
    np.testing.assert_array_equal(out, page_attention(X[:, 0], **garbage, sliding_window=(3, 0)))
    with pytest.raises(InvalidInputError, match=r"block_tables is .*\[0, 0\] is -1"):
        page_attention(X[:, 0], **garbage, sliding_window=(jnp.int32(4), 0))
    np.testing.assert_array_equal(jax.jit(lambda w: page_attention(X[:, 0], **garbage, sliding_window=w))(3), out)


@pytest.mark.parametrize("name", ["page", "blocksparse"])
def test_kernels_that_know_no_window_from_data_are_refused(name):
    def explained(window):
        return explain(f"{name}_attention", *ABSTRACT[name], sliding_window=window, device="nvidia-h200")

    static, traced = explained((64, 0)), explained((jax.ShapeDtypeStruct((), jnp.int32), 0))
    kernel = ("pallas", "gpu")
    [before], [after] = (
        [c for c in e.candidates if (c.platform.value, c.backend.value) == kernel] for e in (static, traced)
    )
    assert before.verdict != "refused"
    assert after.reasons == ("a sliding_window that is an array is not supported",)
    assert traced.chosen.platform.value == "triton"


@slow
@pytest.mark.parametrize("name", OTHERS)
def test_sinks_that_heads_share(name):
    attend, sinks = OTHERS[name], jnp.array([[0.5, 1.5]])
    np.testing.assert_allclose(attend(softmax_aux=sinks), attend(softmax_aux=jnp.tile(sinks, (2, 1))), atol=1e-6)
