"""merge_attention: results over parts of the keys are the result over all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples_page_attention import make
from tolerances import assert_close

from ejkernel import InvalidInputError, flash_attention, merge_attention, page_attention

slow = pytest.mark.slow
# Outputs and log-sum-exps in the layouts of flash_attention and page_attention.
LAYOUTS = {"flash": ((2, 5, 3, 4), (2, 3, 5)), "page": ((6, 3, 4), (6, 3))}
NAMES = ("out", "lse", "other_out", "other_lse")


def reference(out, lse, other_out, other_lse):
    """The obvious way, for log-sum-exps of which one at least is finite."""

    def beside(x):
        return (x.swapaxes(1, 2) if out.ndim == 4 else x)[..., None]

    whole = jnp.logaddexp(lse, other_lse)
    share, other_share = (beside(jnp.exp(x - whole)) for x in (lse, other_lse))
    return share * out + other_share * other_out, whole


def parts(layout, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    out, lse = LAYOUTS[layout]
    wide = "float64" if dtype == "float64" else "float32"
    return [
        jnp.asarray(rng.standard_normal(shape) * scale, kind)
        for shape, scale, kind in ((out, 1, dtype), (lse, 3, wide)) * 2
    ]


def gradients(function, arguments, cotangents):
    result, pull = jax.vjp(function, *arguments)
    return result, pull(tuple(jnp.asarray(np.asarray(c), r.dtype) for c, r in zip(cotangents, result, strict=True)))


def check(arguments, dtype="float32"):
    """Values and the gradients of all four against float64."""
    rng = np.random.default_rng(9)
    cotangents = [rng.standard_normal(x.shape) for x in arguments[:2]]
    results, grads = gradients(merge_attention, arguments, cotangents)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), "float64") for x in arguments]
        expected, expected_grads = gradients(reference, wide, cotangents)
    assert results[0].dtype == arguments[0].dtype
    assert results[1].dtype == ("float64" if dtype == "float64" else "float32")
    for actual, wanted in zip(results, expected, strict=True):
        assert_close(actual, wanted, dtype)
    for name, x, grad, wanted in zip(NAMES, arguments, grads, expected_grads, strict=True):
        assert grad.dtype == x.dtype
        assert_close(grad, wanted, dtype, gradient=True, what=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(d, marks=slow) for d in ("float16", "bfloat16", "float64"))]
)
def test_values_and_gradients(layout, dtype, request):
    if dtype == "float64":
        request.getfixturevalue("x64")
    check(parts(layout, dtype), dtype)


def test_log_sum_exps_far_apart():
    """Neither overflows, and the smaller one does not count."""
    out, lse, other_out, _ = parts("page")
    merged, whole = merge_attention(out, jnp.full_like(lse, 300.0), other_out, jnp.full_like(lse, -300.0))
    np.testing.assert_array_equal(merged, out)
    np.testing.assert_array_equal(whole, np.full_like(lse, 300.0))
    merged, whole = merge_attention(out, jnp.full_like(lse, -1e30), other_out, jnp.full_like(lse, -1e30))
    np.testing.assert_allclose(merged, (out + other_out) / 2, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["flash", pytest.param("page", marks=slow)])
def test_a_side_that_saw_nothing_has_no_part(layout):
    """Rows in turn: both see, one of them, the other, none; what saw nothing holds NaN, and gradients are still right."""
    arguments = parts(layout)
    kind = np.arange(arguments[1].size).reshape(arguments[1].shape) % 4

    def beside(rows):
        return (rows.swapaxes(1, 2) if arguments[0].ndim == 4 else rows)[..., None]

    def blinded(out, lse, rows, fill):
        return jnp.where(beside(rows), fill, out), jnp.where(rows, -jnp.inf, lse)

    sides = [(arguments[:2], (kind == 1) | (kind == 3)), (arguments[2:], (kind == 2) | (kind == 3))]
    dirty, clean = ([x for side, rows in sides for x in blinded(*side, rows, fill)] for fill in (jnp.nan, 0.0))
    rng = np.random.default_rng(3)
    cotangents = [rng.standard_normal(x.shape) for x in arguments[:2]]
    (merged, whole), grads = gradients(merge_attention, dirty, cotangents)
    none, first, second = (kind == 3), (kind == 2), (kind == 1)
    assert (np.asarray(whole)[none] == -np.inf).all()
    assert np.isfinite(np.asarray(whole)[~none]).all()
    np.testing.assert_array_equal(np.where(beside(none), merged, 0), np.zeros_like(merged))
    for only, (side, _) in zip((first, second), sides, strict=True):
        np.testing.assert_allclose(*(np.where(beside(only), x, 0) for x in (merged, side[0])), rtol=1e-6)
        np.testing.assert_allclose(np.asarray(whole)[only], np.asarray(side[1])[only], rtol=1e-6)
    for name, grad in zip(NAMES, grads, strict=True):
        assert np.isfinite(grad).all(), name
    for i, (_, rows) in enumerate(sides):
        assert (np.where(beside(rows), grads[2 * i], 0) == 0).all()
        assert (np.asarray(grads[2 * i + 1])[rows] == 0).all()
    # A very small weight instead of none: what the derivative tends to.
    near = [jnp.where(x == -jnp.inf, -1e4, x) if i % 2 else x for i, x in enumerate(clean)]
    _, wanted = gradients(reference, near, cotangents)
    for i, name in enumerate(NAMES):
        rows = ~none if i % 2 else beside(~none)
        np.testing.assert_allclose(*(np.where(rows, x, 0) for x in (grads[i], wanted[i])), atol=1e-5, err_msg=name)


def qkv(length=9, queries=6):
    rng = np.random.default_rng(0)
    shapes = {"query": (2, queries, 4, 8), "key": (2, length, 2, 8), "value": (2, length, 2, 5)}
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def with_gradients(function, arrays):
    results, pull = jax.vjp(function, arrays)
    rng = np.random.default_rng(1)
    cotangents = tuple(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in results)
    return results, pull(cotangents)[0]


def assert_same_call(merged, whole, arrays):
    """Values and gradients of two ways to attend."""
    (actual, grads), (expected, wanted) = (
        jax.jit(lambda a, f=f: with_gradients(f, a))(arrays) for f in (merged, whole)
    )
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, "float32")
    for name in arrays:
        assert np.isfinite(grads[name]).all(), name
        assert_close(grads[name], wanted[name], "float32", gradient=True, what=name)


def test_split_keys_of_flash_attention():
    """The second part is causal, of which the first queries see nothing; sinks join one part."""
    sinks = jnp.array([0.5, 1.5])

    def merged(a):
        first = flash_attention(a["query"], a["key"][:, :5], a["value"][:, :5], softmax_aux=sinks, return_lse=True)
        rest = flash_attention(a["query"], a["key"][:, 5:], a["value"][:, 5:], causal=True, return_lse=True)
        return merge_attention(*first, *rest)

    def whole(a):
        key = jnp.arange(9)
        mask = jnp.broadcast_to((key < 5) | (key <= jnp.arange(6)[:, None] + 3), (2, 6, 9))
        return flash_attention(**a, attention_mask=mask, softmax_aux=sinks, return_lse=True)

    assert_same_call(merged, whole, qkv())


def test_a_shared_prefix_and_the_rest_of_page_attention():
    """The first two pages of all sequences apart; one sequence has nothing behind them, one is empty."""
    made = make([14, 8, 0, 19], shared=[(1, 0, 2), (3, 0, 2)])(np.random.default_rng(0))
    arrays = {n: jnp.asarray(made[n], jnp.float32) for n in ("query", "key_cache", "value_cache")}
    lens, tables = jnp.asarray(made["context_lens"]), jnp.asarray(made["block_tables"])

    def merged(a):
        prefix = page_attention(**a, context_lens=jnp.minimum(lens, 8), block_tables=tables[:, :2], return_lse=True)
        rest = page_attention(**a, context_lens=jnp.maximum(lens - 8, 0), block_tables=tables[:, 2:], return_lse=True)
        return merge_attention(*prefix, *rest)

    def whole(a):
        return page_attention(**a, context_lens=lens, block_tables=tables, return_lse=True)

    assert_same_call(merged, whole, arrays)


@slow
def test_a_cache_and_what_is_new():
    """A chunk of one sequence: its cached keys in pages, its own keys beside them."""
    n, cached = 4, 7
    a = {name: x[:1] for name, x in qkv(cached + n, n).items()}
    pages = [jnp.pad(a[name][0, :cached], ((0, 1), (0, 0), (0, 0))) for name in ("key", "value")]
    pages = [x.reshape(2, 4, 2, -1).swapaxes(1, 2) for x in pages]
    lens, tables = jnp.full(n, cached), jnp.tile(jnp.arange(2), (n, 1))
    old = page_attention(a["query"][0], *pages, lens, tables, return_lse=True)
    new, new_lse = flash_attention(
        a["query"], a["key"][:, cached:], a["value"][:, cached:], causal=True, return_lse=True
    )
    out, lse = merge_attention(*old, new[0], new_lse[0].T)
    expected, expected_lse = flash_attention(**a, causal=True, return_lse=True)
    assert_close(out, expected[0], "float32")
    assert_close(lse, expected_lse[0].T, "float32")


def test_vmap_and_order():
    arguments = parts("page")
    batched = jax.vmap(merge_attention)(*(jnp.stack([x, x + 1]) for x in arguments))
    for i in range(2):
        alone = merge_attention(*(x + i for x in arguments))
        other = merge_attention(*(x + i for x in (*arguments[2:], *arguments[:2])))
        for a, b, c in zip(batched, alone, other, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(b, c, rtol=1e-6, atol=1e-6)


def test_strict_promotion_and_empty_arrays():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        out, lse = merge_attention(*parts("flash", "bfloat16"))
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    out, lse = merge_attention(jnp.ones((0, 3, 4)), jnp.ones((0, 3)), jnp.ones((0, 3, 4)), jnp.ones((0, 3)))
    assert (out.shape, lse.shape) == ((0, 3, 4), (0, 3))


OUT, LSE = jnp.ones((2, 5, 3, 4)), jnp.ones((2, 3, 5))
WRONG = [
    ("out", {"out": OUT[0, 0]}, ["2 dimensions", "[tokens, heads, value_dim]"]),
    ("out", {"out": OUT.astype(jnp.int32)}, ["int32", "floating"]),
    ("out", {"out": [1.0]}, ["a list"]),
    ("lse", {"lse": LSE.swapaxes(1, 2)}, ["[2, 5, 3]", "[2, 3, 5]"]),
    ("lse", {"lse": LSE[0]}, ["2 dimensions", "[2, 3, 5]"]),
    ("lse", {"lse": None}, ["None"]),
    ("other_out", {"other_out": OUT[:1]}, ["[1, 5, 3, 4]", "[2, 5, 3, 4]"]),
    ("other_out", {"other_out": OUT[0]}, ["3 dimensions"]),
    ("other_out", {"other_out": OUT.astype(jnp.bfloat16)}, ["bfloat16", "float32", "cast"]),
    ("other_lse", {"other_lse": LSE[:, :1]}, ["[2, 1, 5]", "[2, 3, 5]"]),
    ("other_lse", {"other_lse": LSE > 0}, ["bool"]),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "arguments", "words"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_arguments(argument, arguments, words):
    right = {"out": OUT, "lse": LSE, "other_out": OUT, "other_lse": LSE}
    with pytest.raises(InvalidInputError) as caught:
        merge_attention(**{**right, **arguments})
    assert str(caught.value).startswith(f"merge_attention: {argument} is "), caught.value
    for word in words:
        assert word in str(caught.value), caught.value
