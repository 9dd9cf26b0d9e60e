"""``dot_product_attention`` beside ``jax.nn``'s own: the cases of jax's tests and the corners of each argument."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.extend.core import jaxprs_in_params
from subjects import each_subject
from tolerances import assert_close

from ejkernel import InvalidInputError, UnsupportedError, dot_product_attention, explain

slow = pytest.mark.slow
theirs = functools.partial(jax.nn.dot_product_attention, implementation="xla")


def make(batch=2, q_len=19, kv_len=19, heads=4, kv_heads=4, dim=8, dtype="float32", seed=0, **more):
    """``(floats, others)``: keyword arguments by whether they have gradients; ``more`` gives shapes and lengths."""
    rng = np.random.default_rng(seed)
    shapes = {
        "query": (batch, q_len, heads, dim),
        "key": (batch, kv_len, kv_heads, dim),
        "value": (batch, kv_len, kv_heads, dim),
    }
    floats = {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}
    if "bias" in more:
        floats["bias"] = jnp.asarray(rng.standard_normal(more.pop("bias")), dtype)
    if "mask" in more:
        mask = rng.random(more.pop("mask")) < 0.7
        mask[..., 0] = True  # every row sees a key: see test_rows_that_see_nothing
        more["mask"] = jnp.asarray(mask)
    lengths = {name: jnp.asarray(more[name], jnp.int32) for name in more if name.endswith("_seq_lengths")}
    return floats, {**more, **lengths}


def both(floats, others, vmapped=False, **ours):
    """Results and gradients of ours and of jax's, for one cotangent, each in one compilation."""
    query = floats["query"]
    dout = jnp.asarray(np.random.default_rng(9).standard_normal(query.shape), query.dtype)

    def run(attend, floats):
        def call(floats):
            return attend(**({"key": floats["query"], "value": floats["query"]} | floats), **others)

        out, pull = jax.vjp(jax.vmap(call) if vmapped else call, floats)
        return out, pull(dout.astype(out.dtype))[0]

    mine = functools.partial(dot_product_attention, **ours)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), floats)  # jax.nn rounds the weights of half precision
    return (jax.jit(functools.partial(run, attend))(x) for attend, x in ((mine, floats), (theirs, wide)))


def check(floats, others, **ours):
    dtype = floats["query"].dtype
    (out, grads), (expected, expected_grads) = both(floats, others, **ours)
    assert out.dtype == dtype
    assert_close(out, expected, dtype, what="out")
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert grad.dtype == floats[name].dtype
        assert_close(grad, expected_grads[name], dtype, gradient=True, what=name)


CASES = {
    "plain": {},
    "grouped, causal, a window": {"kv_heads": 2, "is_causal": True, "local_window_size": (3, 2)},
    "one key head, a bias of all heads": {"kv_heads": 1, "bias": (1, 4, 19, 19), "scale": 0.7},
    "causal, more keys": {"is_causal": True, "q_len": 11},
    "causal, fewer keys": {"is_causal": True, "kv_len": 11, "kv_heads": 2},
    "an int window, more keys": {"local_window_size": 4, "q_len": 11},
    "lengths": {"query_seq_lengths": (9, 4), "key_value_seq_lengths": (4, 9)},
    "lengths, causal, a window": {
        "query_seq_lengths": (17, 4), "key_value_seq_lengths": (19, 13), "is_causal": True, "local_window_size": (5, 0), "kv_len": 23, "kv_heads": 2,
    },
    "lengths of queries, a mask": {"query_seq_lengths": (0, 30), "mask": (19, 19)},
    "lengths of keys, a bias and a mask": {"key_value_seq_lengths": (30, 1), "bias": (19,), "mask": (2, 1, 1, 19), "scale": 1},
    "a mask of one entry, a bias by head": {"mask": (1, 1, 19, 1), "bias": (4, 1, 1), "q_len": 19},
    "windows that lie aside": {"local_window_size": (-1, 3), "kv_len": 23},
    "a window of its own and a bias": {"local_window_size": (0, 0), "bias": (2, 4, 1, 1), "is_causal": True},
}  # fmt: skip
SHORT = ("grouped, causal, a window", "causal, more keys", "causal, fewer keys", "lengths, causal, a window", "lengths of queries, a mask", "lengths of keys, a bias and a mask", "windows that lie aside")  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else slow) for n in CASES])
def test_as_jax(name):
    check(*make(**CASES[name]))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=slow)])
def test_half_precision(dtype):
    check(*make(**CASES["lengths, causal, a window"], dtype=dtype, dim=16))


# What jax tests of its own function (tests/nn_test.py), at its sizes; the rest of its cases compare implementations.
OF_JAX = {
    f"{dtype}, groups of {group}{', vmap' * vmapped}": (dtype, {"kv_heads": 4 // group}, vmapped)
    for dtype in ("bfloat16", "float16")
    for group in (1, 2, 4)
    for vmapped in (False, True)
}
PADDED = {"query_seq_lengths": (64, 32), "key_value_seq_lengths": (32, 64)}
OF_JAX |= {
    name: ("bfloat16", case, False)
    for name, case in {
        "a bias": {"bias": (1, 4, 128, 128)},
        "causal": {"is_causal": True},
        "padding": PADDED,
        "a mask": {"mask": None},
        "causal, padding": {"is_causal": True, **PADDED},
        "a mask, padding": {"mask": None, **PADDED},
        "a bias, causal": {"bias": (1, 4, 128, 128), "is_causal": True},
        "causal, a window": {"is_causal": True, "local_window_size": (3, 2)},
    }.items()
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "bfloat16, groups of 2, vmap" else slow) for n in OF_JAX]
)
def test_the_cases_of_jax_s_tests(name):
    dtype, case, vmapped = OF_JAX[name]
    floats, others = make(q_len=128, kv_len=128, dim=32, dtype=dtype, **{n: x for n, x in case.items() if n != "mask"})
    if "mask" in case:
        others["mask"] = jnp.tril(jnp.ones((128, 128), bool))[None, None]
    check(floats, others, vmapped=vmapped)


@slow
@pytest.mark.parametrize("vmapped", [False, True])
@pytest.mark.parametrize("batch", [1, 16])
def test_the_gradient_of_a_bias_as_in_jax_s_tests(batch, vmapped):
    """One array is query, key and value, beside a bias for each example and a mask that hides nothing."""
    floats, _ = make(batch, 128, dim=32, dtype="bfloat16", bias=(batch, 4, 128, 128))
    floats = {name: floats[name] for name in ("query", "bias")}
    check(floats, {"mask": jnp.ones((1, 1, 128), bool)}, vmapped=vmapped)


@each_subject("varlen", "gqa", "cross")
def test_lengths_and_alignment_on_each_kernel(subject):
    stretch = 8 if subject.in_pallas_interpreter else 1
    case = {
        "q_len": 23 * stretch, "kv_len": 19 * stretch, "heads": 2, "kv_heads": 1, "dim": subject.dim(16), "dtype": subject.dtype,
        "query_seq_lengths": (21 * stretch, 7), "key_value_seq_lengths": (18 * stretch, 11 * stretch),
    }  # fmt: skip
    check(*make(**case, is_causal=True, local_window_size=(9 * stretch, 0)), implementation=subject.platform)


def test_the_signature_is_jax_s_with_more_at_the_end():
    own, of_jax = (list(inspect.signature(f).parameters) for f in (dot_product_attention, jax.nn.dot_product_attention))
    assert set(of_jax) <= set(own)
    assert own[-3:] == ["dropout_rate", "dropout_seed", "logits_soft_cap"]
    for name, parameter in inspect.signature(jax.nn.dot_product_attention).parameters.items():
        mine = inspect.signature(dot_product_attention).parameters[name]
        assert (mine.kind, mine.default) == (parameter.kind, parameter.default)


def test_without_a_batch():
    floats, others = make(batch=1, key_value_seq_lengths=(13,), is_causal=True, kv_heads=2, mask=(1, 19))
    floats = {name: x[0] for name, x in floats.items()}
    out, residual = dot_product_attention(**floats, **others, return_residual=True)
    expected, expected_residual = theirs(**floats, **others, return_residual=True)
    assert (out.shape, residual.shape) == ((19, 4, 8), (19, 4))
    assert_close(out, expected, "float32")
    assert_close(residual, expected_residual, "float32")


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=slow), "bfloat16"])
def test_the_residual(dtype):
    floats, others = make(dtype=dtype, kv_len=23, is_causal=True)

    def loss(floats, attend):
        out, residual = attend(**floats, **others, return_residual=True)
        return residual.astype(jnp.float32).sum(), (out, residual)

    (_, (_, residual)), grads = jax.value_and_grad(functools.partial(loss, attend=dot_product_attention), has_aux=True)(
        floats
    )
    _, (_, expected) = loss(floats, theirs)
    assert (residual.dtype, residual.shape) == (expected.dtype, expected.shape)
    assert_close(residual, expected, dtype)
    assert all((grad == 0).all() for grad in grads.values())


def test_vmap():
    floats, others = make(batch=3, kv_len=23, query_seq_lengths=(9, 0, 19), key_value_seq_lengths=(23, 5, 12))
    whole = dot_product_attention(**floats, **others, is_causal=True)

    def one(floats, lengths):
        return dot_product_attention(**floats, **{n: x[None] for n, x in lengths.items()}, is_causal=True)

    np.testing.assert_allclose(jax.vmap(one)(floats, others), whole, atol=2e-6)
    floats = jax.tree.map(lambda x: x[:, None], floats)
    np.testing.assert_allclose(jax.vmap(one)(floats, others)[:, 0], whole, atol=2e-6)


@slow
def test_vmap_with_a_bias_for_each_example():
    """Inputs without a batch, a bias each, and a mask of three dimensions for all."""
    floats, _ = make(bias=(2, 4, 19, 19))
    mask = jnp.asarray(np.arange(19) != 5)[None, None]

    def run(attend, floats):
        def loss(floats):
            return (jax.vmap(lambda one: attend(**one, mask=mask))(floats) ** 2).sum()

        return jax.jit(jax.grad(loss))(floats)

    grads, expected = run(dot_product_attention, floats), run(theirs, floats)
    for name, grad in grads.items():
        assert_close(grad, expected[name], "float32", gradient=True, what=name)


def test_rows_that_see_nothing():
    """jax.nn gives them the mean of all values, and takes gradients to those; see the page."""
    floats, others = make(kv_len=5, local_window_size=(2, 0))
    out, residual = dot_product_attention(**floats, **others, return_residual=True)
    assert (out[:, 7:] == 0).all()
    assert (residual[:, 7:] == -jnp.inf).all()
    assert_close(out[:, :7], theirs(**floats, **others)[:, :7], "float32")
    nan = {**floats, "value": floats["value"].at[1, 3:].set(jnp.nan), "key": floats["key"].at[1, 3:].set(jnp.nan)}
    lengths = jnp.array([5, 3], jnp.int32)
    assert jnp.isfinite(dot_product_attention(**nan, key_value_seq_lengths=lengths)).all()


def test_what_jax_does_not_have():
    floats, _ = make(kv_len=11)
    options = {"dropout_rate": 0.3, "dropout_seed": -7, "logits_soft_cap": 1.5}
    out = dot_product_attention(**floats, **options, is_causal=True)
    mask = np.tril(np.ones((19, 11), bool))[None, None]
    expected, _ = oracle.attention(
        **floats, attention_mask=mask, dropout_prob=0.3, dropout_seed=-7, logits_soft_cap=1.5
    )
    assert_close(out, expected, "float32")


def test_numbers_from_arrays():
    floats, _ = make(kv_len=23)
    scale = jnp.float32(0.4)

    def of(attend, scale, floats, *window):
        return (attend(**floats, scale=scale, local_window_size=window, is_causal=True) ** 2).sum()

    slope = jax.jit(jax.grad(functools.partial(of, dot_product_attention)))(scale, floats, jnp.int32(4), jnp.int32(2))
    np.testing.assert_allclose(slope, jax.grad(functools.partial(of, theirs))(scale, floats, 4, 2), rtol=1e-4)


def _sizes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (np.prod(v.aval.shape) for v in equation.outvars if hasattr(v.aval, "shape"))
        for inner in jaxprs_in_params(equation.params):
            yield from _sizes(getattr(inner, "jaxpr", inner))


def test_nothing_is_quadratic():
    x = jax.ShapeDtypeStruct((1, 4096, 1, 8), jnp.float32)
    key = jax.ShapeDtypeStruct((1, 4097, 1, 8), jnp.float32)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)

    def loss(query, key, value, lengths):
        return dot_product_attention(
            query, key, value, query_seq_lengths=lengths, key_value_seq_lengths=lengths, local_window_size=(99, 3),
            is_causal=True,
        ).sum()  # fmt: skip

    assert max(_sizes(jax.make_jaxpr(jax.grad(loss))(x, key, key, lengths).jaxpr)) < 4096 * 4097 / 8


def test_equal_lengths_are_a_plain_call():
    """So that every kernel can take them, cuDNN's too."""
    x = jnp.ones((1, 5, 2, 8))
    _, plain = dot_product_attention.explained(x, x, x, is_causal=True, local_window_size=(2, 1))
    assert (plain["causal"], plain["sliding_window"], plain.get("kv_start")) == (True, (2, 1), None)
    for options in ({"query_seq_lengths": [5]}, {"local_window_size": -1}, {"local_window_size": jnp.int32(2)}):
        _, by_data = dot_product_attention.explained(x, x, x, **options)
        assert (by_data["causal"], by_data["sliding_window"], by_data["kv_start"].shape) == (False, None, (1, 5))
    assert str(explain("dot_product_attention", x, x, x)) == str(explain(dot_product_attention, x, x, x))


X = jnp.ones((2, 8, 4, 16))
WRONG = [
    ("query", {"query": X[None]}, "at most four dimensions"),
    ("query", {"query": X[:, :, :3], "key": X[:, :, :2], "value": X[:, :, :2]}, "multiple of the key's 2"),
    ("key", {"key": X[:1], "value": X[:1]}, "batch, 2"),
    ("value", {"value": X[..., :8]}, "the key's shape"),
    ("value", {"value": X.astype(jnp.bfloat16)}, "cast"),
    ("mask", {"mask": jnp.ones((8, 8))}, "booleans"),
    ("mask", {"mask": jnp.ones((3, 8, 8), bool)}, "broadcasts to"),
    ("bias", {"bias": jnp.ones((1, 1, 1, 1, 8))}, "at most four"),
    ("bias", {"bias": jnp.ones((7, 8))}, "broadcasts to"),
    ("bias", {"bias": "alibi"}, "an array"),
    ("query_seq_lengths", {"query_seq_lengths": jnp.ones(3, jnp.int32)}, r"int32\[2\]"),
    ("key_value_seq_lengths", {"key_value_seq_lengths": jnp.ones(2)}, r"int32\[2\]"),
    ("local_window_size", {"local_window_size": (1, 2, 3)}, "a pair"),
    ("local_window_size", {"local_window_size": 2.5}, "an int"),
    ("is_causal", {"is_causal": 1}, "True or False"),
    ("scale", {"scale": float("nan")}, "a number"),
    ("scale", {"scale": jnp.ones(2)}, "a number"),
    ("implementation", {"implementation": "flash"}, "'xla'"),
    ("return_residual", {"return_residual": None}, "True or False"),
    ("dropout_rate", {"dropout_rate": 1.0}, "probability"),
    ("dropout_seed", {"dropout_rate": 0.5}, "dropout_rate is above 0"),
    ("logits_soft_cap", {"logits_soft_cap": 0}, "above 0"),
]


@pytest.mark.parametrize(("argument", "arguments", "words"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_arguments(argument, arguments, words):
    with pytest.raises(InvalidInputError, match=f"dot_product_attention: {argument} is .*{words}"):
        dot_product_attention(**{"query": X, "key": X, "value": X, **arguments})


def test_explained():
    x, lengths = jax.ShapeDtypeStruct((2, 4096, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.int32)

    def platforms(**options):
        found = explain(dot_product_attention, x, key=x, value=x, device="nvidia-h200", gradients=True, **options)
        return found.chosen.platform.value, found.backward.chosen.platform.value

    assert platforms(is_causal=True, query_seq_lengths=lengths, scale=jnp.float32(1)) == ("pallas", "pallas")
    assert platforms(is_causal=True, local_window_size=(1023, 0), implementation="cudnn")[0] == "cudnn"


def test_a_kernel_that_cannot_run_here():
    with pytest.raises(UnsupportedError, match="platform='cudnn'"):
        dot_product_attention(X, X, X, implementation="cudnn")
