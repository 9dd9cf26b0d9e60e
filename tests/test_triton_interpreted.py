"""Triton's flash attention in Triton's interpreter: the kernels that a GPU gets, on a CPU. ``make test`` starts it."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from tolerances import assert_close

from ejkernel import BwdParams, FwdParams, Platform, UnsupportedError, explain, flash_attention
from ejkernel.kernels._triton import call
from ejkernel.kernels._triton import flash_attention as flash
from ejkernel.ops.flash_attention import OPERATION

if not call.interpreting():
    pytest.skip("runs where TRITON_INTERPRET=1 is set before Triton is imported", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

pytestmark = pytest.mark.interpreted
slow = pytest.mark.slow

WIDE = {
    "fwd_params": FwdParams(q_blocksize=64, kv_blocksize=64),
    "bwd_params": BwdParams(q_blocksize=64, kv_blocksize=64),
}
NARROW = {
    "fwd_params": FwdParams(q_blocksize=16, kv_blocksize=16),
    "bwd_params": BwdParams(q_blocksize=16, kv_blocksize=16),
}


def outputs_and_gradients(arrays, platform="triton", seed=7, **options):
    """Both outputs and the gradients of every float, with random cotangents."""
    floats = {name: arrays[name] for name in OPERATION.gradients if name in arrays}

    def run(floats):
        return flash_attention(**{**arrays, **floats}, **options, return_lse=True, platform=platform)

    (out, lse), pull = jax.vjp(run, floats)
    rng = np.random.default_rng(seed)
    dout, dlse = (jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in (out, lse))
    return out, lse, pull((dout, dlse))[0], dout, dlse


def check(case, **blocks):
    """Values and gradients against float64; an output that the kernel does not write is NaN, and fails."""
    arrays, statics = case.make()
    statics = {k: v for k, v in statics.items() if k != "return_lse"}
    out, lse, grads, dout, dlse = outputs_and_gradients(arrays, **statics, **blocks)
    known = case.as_oracle(arrays, statics)
    expected, expected_lse, expected_grads = oracle.attention(**known, dout=np.asarray(dout), dlse=np.asarray(dlse))
    assert_close(out, expected, "float32", what="out")
    assert_close(lse, expected_lse, "float32", what="lse")
    for name, grad in grads.items():
        assert_close(grad, expected_grads[name], "float32", gradient=True, what=name)


def test_nothing_but_a_pin_makes_the_interpreter_run():
    x = jnp.ones((1, 8, 1, 8))
    assert explain(flash_attention, x, x, x).chosen.platform is Platform.XLA
    assert explain(flash_attention, x, x, x, platform="triton").chosen.platform is Platform.TRITON


# The interpreter runs programs one after another: few of them.
SMALL = {"batch": 1, "kv_heads": 1, "head_dim": 8, "value_dim": 8, "q_len": 21, "kv_len": 21}
FEATURES = sorted(OPERATION.features)
# The bias is one that batch and heads share; test_all_features_together has one that they do not.
SIZES = {
    "gqa": {"group": 2},
    "value_dim": {"value_dim": 20},
    "cross": {"q_len": 18, "kv_len": 35},
    "bias": {"variant": 2},
}


@pytest.mark.parametrize("feature", ["plain", *FEATURES])
def test_each_feature(feature):
    features = frozenset({feature} - {"plain"})
    check(Case(feature, features, **{**SMALL, "batch": 2, "kv_heads": 2, **SIZES.get(feature, {})}), **NARROW)


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_all_features_together(packed):
    features = frozenset(FEATURES) - (frozenset() if packed else {"varlen"})
    sizes = {"group": 2, "q_len": 20, "kv_len": 37, "value_dim": 20, "batch": 2}
    check(Case("all", features, **{**SMALL, **sizes}), **NARROW)


@pytest.mark.parametrize(
    ("dim", "value_dim"),
    [
        (1, 1),
        (40, 80),
        (192, 128),
        *[pytest.param(*dims, marks=slow) for dims in ((7, 7), (80, 40), (96, 96), (256, 256), (3, 256))],
    ],
)
def test_head_dims(dim, value_dim):
    case = Case(
        "dims",
        frozenset({"causal"}),
        batch=1,
        q_len=37,
        kv_len=37,
        kv_heads=1,
        group=2,
        head_dim=dim,
        value_dim=value_dim,
    )
    check(case, **WIDE)


@pytest.mark.parametrize("dims", [(264, 264), (64, 264), (512, 64)])
def test_wider_heads_are_refused(dims):
    q, v = (jnp.ones((1, 8, 1, dim)) for dim in dims)
    with pytest.raises(UnsupportedError, match=f"head dim {max(dims)} is above 256"):
        flash_attention(q, q, v, platform="triton")


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((1, 2, 16, 17, 33), id="few"),
        *[pytest.param(range(first, first + 10), id=f"from {first}", marks=slow) for first in range(1, 71, 10)],
    ],
)
def test_lengths(lengths):
    """Up to 70, of queries and of keys: every row of every output is written, and nothing past them."""
    for length in lengths:
        kv_len = length if length % 2 else 71 - length
        features = frozenset({"causal"} if length % 3 else ())
        case = Case("lengths", features, batch=1, q_len=length, kv_len=kv_len, kv_heads=1, head_dim=8, value_dim=8)
        check(case, **(WIDE if length % 4 else NARROW))


@pytest.mark.parametrize("blocks", [pytest.param(WIDE, marks=slow), NARROW], ids=["wide", "narrow"])
def test_dropout_drops_what_xla_drops(blocks):
    """With a value that is the identity the output is the weights: the zeros are at the same places."""
    length, batch, heads = 40, 2, 2
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((batch, length, heads, 16)), jnp.float32) for _ in range(2))
    v = jnp.broadcast_to(jnp.eye(length)[None, :, None], (batch, length, heads, length))

    def run(platform, blocks):
        options = {"dropout_prob": 0.4, "dropout_seed": 2**31 + 11, "platform": platform, **blocks}
        out, pull = jax.vjp(lambda v: flash_attention(q, k, v, **options), v)
        return np.asarray(out), np.asarray(pull(jnp.ones_like(out))[0])

    (actual, dv), (expected, expected_dv) = run("triton", blocks), run("xla", {})
    np.testing.assert_array_equal(actual == 0, expected == 0)
    assert 0.3 < (actual == 0).mean() < 0.5
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    np.testing.assert_allclose(dv, expected_dv, rtol=1e-5)


def hidden_by(how, hidden, q_len):
    """Arguments that hide some keys from every query."""
    if how == "mask":
        return {"attention_mask": ~hidden[None]}
    if how == "bias":
        return {"bias": jnp.where(hidden, -jnp.inf, 0.25)[None, None, None] * jnp.ones((1, 1, q_len, 1))}
    if how == "shared_bias":
        return {"bias": jnp.where(hidden, -jnp.inf, 0.25)[None, None, None]}
    if how == "segments":
        return {"q_segment_ids": jnp.ones((1, q_len), int), "kv_segment_ids": jnp.where(hidden, 0, 1)[None]}
    if how == "varlen":
        kept = int((~hidden).sum())
        return {"cum_seqlens_q": jnp.array([0, q_len]), "cum_seqlens_k": jnp.array([0, kept])}
    raise AssertionError(how)


def ways(*short, among):
    """Parameters ``how, sinks``: those of the short lane, and the others."""
    return pytest.mark.parametrize(
        ("how", "sinks"),
        [
            pytest.param(
                how, sinks, id=f"{how}-{'sinks' if sinks else ''}", marks=() if (how, sinks) in short else slow
            )
            for how in among
            for sinks in (False, True)
        ],
    )


@ways(
    *[("mask", True), ("bias", False), ("segments", False), ("varlen", False)],
    among=("mask", "bias", "shared_bias", "segments", "varlen"),
)
def test_garbage_in_hidden_keys_reaches_nothing(how, sinks):
    q_len, kv_len = 20, 44
    hidden = jnp.zeros(kv_len, bool).at[36:].set(True)
    if how != "varlen":
        hidden = hidden.at[jnp.array([3, 17, 18])].set(True)
    arrays, _ = Case("hidden", **{**SMALL, "q_len": q_len, "kv_len": kv_len, "group": 2}).make()
    more = hidden_by(how, hidden, q_len)
    if sinks:
        more["softmax_aux"] = jnp.array([0.5])
    keep = ~hidden[None, :, None, None]
    garbage = jnp.where(jnp.arange(kv_len) % 2, jnp.nan, jnp.inf)[None, :, None, None]
    clean = {n: jnp.where(keep, x, 0) if n != "query" else x for n, x in arrays.items()}
    dirty = {n: jnp.where(keep, x, garbage) if n != "query" else x for n, x in arrays.items()}
    expected = outputs_and_gradients({**clean, **more}, **NARROW)
    actual = outputs_and_gradients({**dirty, **more}, **NARROW)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.isfinite(a).all()
        np.testing.assert_array_equal(a, b)
    grads = actual[2]
    for name in ("key", "value"):
        assert (grads[name][:, hidden] == 0).all()


@ways(
    *[("mask", False), ("bias", True), ("segments", True), ("varlen", False)],
    among=("mask", "bias", "segments", "varlen"),
)
def test_garbage_in_queries_that_see_nothing_reaches_nothing(how, sinks):
    q_len, kv_len = 40, 24
    blind = jnp.zeros(q_len, bool).at[33:].set(True)
    if how != "varlen":
        blind = blind.at[jnp.array([2, 16])].set(True)
    arrays, _ = Case("blind", **{**SMALL, "q_len": q_len, "kv_len": kv_len, "group": 2}).make()
    if how == "mask":
        more = {"attention_mask": jnp.broadcast_to(~blind[None, :, None], (1, q_len, kv_len))}
    elif how == "bias":
        more = {"bias": jnp.broadcast_to(jnp.where(blind, -jnp.inf, 0.25)[None, None, :, None], (1, 1, q_len, kv_len))}
    elif how == "segments":
        more = {"q_segment_ids": jnp.where(blind, 0, 1)[None], "kv_segment_ids": jnp.ones((1, kv_len), int)}
    else:
        more = {"cum_seqlens_q": jnp.array([0, 33]), "cum_seqlens_k": jnp.array([0, kv_len])}
    if sinks:
        more["softmax_aux"] = jnp.array([0.5])
    keep = ~blind[None, :, None, None]

    def run(fill):
        query = jnp.where(keep, arrays["query"], fill)
        floats = {**arrays, "query": query, **{n: more[n] for n in OPERATION.gradients if n in more}}
        rest = {n: x for n, x in more.items() if n not in floats}
        out, pull = jax.vjp(lambda floats: flash_attention(**floats, **rest, **NARROW, platform="triton"), floats)
        # What a caller makes of such rows may be garbage too.
        return out, pull(jnp.where(keep, jnp.cos(out), fill))[0]

    garbage = jnp.where(jnp.arange(q_len) % 2, jnp.nan, jnp.inf)[None, :, None, None]
    (out, grads), (expected, expected_grads) = run(garbage), run(0.0)
    np.testing.assert_array_equal(out, expected)
    assert (out[:, blind] == 0).all()
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(grads[name], expected_grads[name], err_msg=name)
    assert (grads["query"][:, blind] == 0).all()


# Offsets past 2^31, in arrays of which only a few pages are ever touched


class Only:
    """Stands for ``call``: runs one program, the first, on numpy arrays where they are."""

    def __init__(self, monkeypatch):
        self.results = []
        monkeypatch.setattr(flash, "call", self)

    def __call__(self, kernel, arrays, scalars, outputs, *, programs, constants, **_):
        results = [np.zeros(like.shape, like.dtype) for like in outputs]
        tensors = [call._Tensor(x if isinstance(x, np.ndarray) else np.asarray(x)) for x in (*arrays, *results)]
        kernel[(1,)](*tensors[: len(arrays)], *scalars, *tensors[len(arrays) :], C=constants)
        self.results.append(results)
        return results


LONG, HEADS, DIM = 2**18 + 64, 32, 256  # a little more than 2^31 elements, 4 GiB of which the pages at the end are real
BLOCKS = {"q_blocksize": 16, "kv_blocksize": 16}


def spec_of(query, key, **options):
    arguments = OPERATION.signature.bind(
        **{n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in (("query", query), ("key", key), ("value", key))},
        **options,
    )
    arguments.apply_defaults()
    return OPERATION.bound(dict(arguments.arguments))[0].spec


def ending(rng, rows, count=64):
    """``[1, rows, HEADS, DIM]`` of float16 with random numbers in the last rows of the first head, and those."""
    array = np.zeros((1, rows, HEADS, DIM), np.float16)
    array[:, -count:, 0] = rng.standard_normal((1, count, DIM))
    return array, array[:, -count:, :1].astype(np.float64)


def test_a_key_of_more_than_2_to_the_31_elements(monkeypatch):
    rng = np.random.default_rng(0)
    query, query_end = ending(rng, 16, 16)
    (key, key_end), (value, value_end) = ending(rng, LONG), ending(rng, LONG)
    only = Only(monkeypatch)
    # Few queries over many keys have kernels of their own.
    monkeypatch.setattr(flash, "is_decoding", lambda *_: False)
    spec = spec_of(query, key, causal=True, sliding_window=(30, 0))
    arrays = {"query": query, "key": key, "value": value}
    flash.forward(arrays, spec, FwdParams(**BLOCKS))
    (out, _), *_ = only.results
    expected, lse = oracle.attention(query_end, key_end, value_end, causal=True, sliding_window=(30, 0))
    assert_close(out[:, :, :1], expected, "float16")

    dout = rng.standard_normal(expected.shape)
    full = np.zeros(query.shape, np.float16)
    full[:, :, :1] = dout
    wide_out, wide_lse = np.zeros(query.shape, np.float16), np.zeros((1, HEADS, 16), np.float32)
    wide_out[:, :, :1], wide_lse[:, :1] = expected, lse
    wanted = frozenset({"query"})
    flash.backward(arrays, spec, BwdParams(**BLOCKS), wide_out, wide_lse, full, np.zeros_like(wide_lse), wanted)
    _, _, grads = oracle.attention(query_end, key_end, value_end, causal=True, sliding_window=(30, 0), dout=dout)
    assert_close(only.results[-1][0][:, :, :1], grads["query"], "float16", gradient=True)


def test_a_query_of_more_than_2_to_the_31_elements(monkeypatch):
    """The first program has the last block of queries."""
    rng = np.random.default_rng(0)
    query, query_end = ending(rng, LONG)
    (key, key_end), (value, value_end) = ending(rng, 32, 32), ending(rng, 32, 32)
    only = Only(monkeypatch)
    flash.forward({"query": query, "key": key, "value": value}, spec_of(query, key), FwdParams(**BLOCKS))
    (out, lse), *_ = only.results
    expected, expected_lse = oracle.attention(query_end, key_end, value_end)
    assert_close(out[:, -16:, :1], expected[:, -16:], "float16")
    assert_close(lse[:, :1, -16:], expected_lse[:, :, -16:], "float16")
