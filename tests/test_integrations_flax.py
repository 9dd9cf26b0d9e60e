"""Flax's modules with our attention beside their own, and its recurrent cells beside ``recurrent``."""

import functools
import itertools

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.extend.core import jaxprs_in_params
from tolerances import assert_close

from ejkernel import InvalidInputError, UnsupportedError

nnx = pytest.importorskip("flax.nnx")
linen = pytest.importorskip("flax.linen")

from ejkernel.integrations.flax import (  # noqa: E402
    AttentionFn,
    attention_fn,
    recurrent_stack,
    weights_from,
    weights_to,
)

slow = pytest.mark.slow


def arrays(lead=(2,), q_len=7, kv_len=7, heads=4, kv_heads=4, dim=8, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((*lead, q_len, heads, dim), (*lead, kv_len, kv_heads, dim), (*lead, kv_len, kv_heads, dim))
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def random_mask(*shape):
    """Other than 0 = attend, in float32 as flax's own masks are; every row sees its first key."""
    mask = np.random.default_rng(1).random(shape) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask, jnp.float32)


def random_bias(*shape):
    return jnp.asarray(np.random.default_rng(2).standard_normal(shape), jnp.float32)


CASES = {
    "plain": ({}, {}),
    "a causal mask of flax": ({}, {"mask": nnx.make_causal_mask(jnp.ones((2, 7)))}),
    "padding, one row of batch sizes": ({"lead": (2, 3)}, {"mask": random_mask(2, 3, 1, 1, 7)}),
    "a mask by head, a bias of fewer dimensions": (
        {"lead": (2, 3)},
        {"mask": random_mask(1, 3, 4, 7, 7), "bias": random_bias(4, 1, 7)},
    ),
    "no batch": ({"lead": ()}, {"mask": random_mask(1, 7, 7), "bias": random_bias(4, 7, 7)}),
    "causal from the start, more keys": ({"q_len": 5}, {"is_causal": True}),
    "causal from the start, fewer keys, a mask": (
        {"kv_len": 5, "kv_heads": 2},
        {"is_causal": True, "mask": random_mask(2, 4, 7, 5)},
    ),
    "causal, grouped": ({"kv_heads": 2}, {"is_causal": True}),
}
SHORT = ("padding, one row of batch sizes", "a mask by head, a bias of fewer dimensions", "causal from the start, fewer keys, a mask")  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SHORT else slow) for name in CASES])
def test_as_flax(name):
    sizes, options = CASES[name]
    qkv = arrays(**sizes)
    dout = arrays(**sizes, seed=3)[0]

    def run(attend, qkv):
        # No dropout, whose path in flax knows what jax.nn does not: batches of several axes beside such a bias.
        out, pull = jax.vjp(lambda qkv: attend(*qkv, dropout_rate=0.5, deterministic=True, **options), qkv)
        return out, pull(dout)[0]

    out, grads = jax.jit(functools.partial(run, attention_fn))(qkv)
    expected, expected_grads = jax.jit(functools.partial(run, nnx.dot_product_attention))(qkv)
    assert_close(out, expected, "float32", what="out")
    for grad, wanted in zip(grads, expected_grads, strict=True):
        assert_close(grad, wanted, "float32", gradient=True)


def test_the_options():
    qkv = arrays(kv_heads=2)
    known = {"causal": True, "sliding_window": (2, 0), "logits_soft_cap": 1.5, "softmax_scale": 0.7}
    expected, _ = oracle.attention(*qkv, **known)
    assert_close(AttentionFn(**known)(*qkv), expected, "float32")
    assert AttentionFn(sliding_window=[2, 1]) == AttentionFn(sliding_window=(2, 1))
    assert hash(AttentionFn(sliding_window=3)) == hash(AttentionFn(sliding_window=(3, 3)))
    assert AttentionFn(platform="xla")(*qkv).shape == qkv[0].shape


def test_dtypes():
    query, key, value = arrays()
    assert attention_fn(query.astype(jnp.bfloat16), key, value).dtype == jnp.float32
    out = attention_fn(query, key, value, dtype=jnp.bfloat16, precision="highest")
    assert out.dtype == jnp.bfloat16
    assert_close(out, nnx.dot_product_attention(query, key, value), "bfloat16")


def layers(attention, **options):
    """A layer of each kind, as a function of the inputs and the arguments of a call."""
    old = linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=attention, **options)
    parameters = linen.MultiHeadDotProductAttention(num_heads=4, **options).init(
        jax.random.key(0), jnp.ones((2, 7, 16))
    )
    new = nnx.MultiHeadAttention(4, 16, decode=False, attention_fn=attention, rngs=nnx.Rngs(0), **options)
    return new, functools.partial(old.apply, parameters)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=slow)])
def test_modules(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 16)), jnp.float32)
    mask = nnx.combine_masks(nnx.make_causal_mask(x[..., 0]), random_mask(2, 1, 7, 7))
    options = {"dtype": dtype, "normalize_qk": True, "precision": jax.lax.Precision.HIGH}
    for ours, flax in zip(layers(attention_fn, **options), layers(nnx.dot_product_attention, **options), strict=True):
        assert_close(ours(x, mask=mask), flax(x, mask=mask), dtype)
    grouped = [
        nnx.MultiHeadAttention(
            4, 16, num_kv_heads=2, decode=False, attention_fn=attention, rngs=nnx.Rngs(1), dtype=dtype
        )
        for attention in (AttentionFn(causal=True), nnx.dot_product_attention)
    ]
    assert_close(grouped[0](x), grouped[1](x, is_causal=True), dtype)


WINDOWS = {"causal": (AttentionFn(causal=True), 7), "a window": (AttentionFn(causal=True, sliding_window=(2, 0)), 2)}


@pytest.mark.parametrize("name", [pytest.param("causal", marks=slow), "a window"])
def test_decoding_continues_what_training_sees(name):
    """Token by token with flax's caches, which are longer than what is in them, beside one call with a mask."""
    attention, left = WINDOWS[name]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 16)), jnp.float32)
    i, j = np.indices((6, 6))
    band = jnp.asarray((i >= j) & (i - j <= left))[None, None]

    new = nnx.MultiHeadAttention(2, 16, decode=False, attention_fn=attention, rngs=nnx.Rngs(0))
    theirs = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    expected = theirs(x, mask=band)
    assert_close(new(x), expected, "float32")
    new.init_cache((2, 9, 16))
    steps = [nnx.jit(lambda layer, x: layer(x, decode=True))(new, x[:, t : t + 1]) for t in range(6)]
    assert_close(jnp.concatenate(steps, 1), expected, "float32")

    old = linen.MultiHeadDotProductAttention(2, attention_fn=attention, decode=True)
    variables = old.init(jax.random.key(0), jnp.ones((2, 9, 16)))
    parameters, cache = variables["params"], variables["cache"]
    expected = linen.MultiHeadDotProductAttention(2).apply({"params": parameters}, x, mask=band)
    step = jax.jit(lambda cache, x: old.apply({"params": parameters, "cache": cache}, x, mutable=["cache"]))
    for t in range(6):
        out, changed = step(cache, x[:, t : t + 1])
        cache = changed["cache"]
        assert_close(out, expected[:, t : t + 1], "float32")


def test_a_query_is_at_the_last_key_that_its_mask_shows():
    query, key, value = arrays(q_len=1, kv_len=9, heads=2, kv_heads=1)
    mask = np.zeros((2, 2, 1, 9), bool)
    for index, last in {(0, 0): 4, (0, 1): 8, (1, 0): 1, (1, 1): 6}.items():
        mask[index][0, : last + 1] = True
    out = AttentionFn(sliding_window=(3, 0), causal=True)(query, key, value, mask=jnp.asarray(mask))
    for b, h in np.ndindex(2, 2):
        last = mask[b, h, 0].sum() - 1
        seen = slice(max(0, last - 3), last + 1)
        one, _ = oracle.attention(query[b : b + 1, :, h : h + 1], key[b : b + 1, seen], value[b : b + 1, seen])
        assert_close(out[b, 0, h], one[0, 0, 0], "float32")
    no_mask, _ = oracle.attention(query, key[:, 5:], value[:, 5:])
    assert_close(AttentionFn(sliding_window=3)(query, key, value), no_mask, "float32")


def weights_of(attend, query, key, **options):
    """The attention weights after dropout ``[B, H, Sq, Sk]``: values that are unit vectors show them."""
    batch, kv_len, kv_heads, _ = key.shape
    eye = jnp.broadcast_to(jnp.eye(kv_len)[None, :, None], (batch, kv_len, kv_heads, kv_len))
    return jnp.moveaxis(attend(query, key, eye, **options), 2, 1)


@pytest.mark.parametrize("kv_heads", [pytest.param(4, marks=slow), 2])
@pytest.mark.parametrize("together", [True, pytest.param(False, marks=slow)])
def test_dropout(together, kv_heads):
    query, key, value = arrays(q_len=40, kv_len=48, kv_heads=kv_heads)
    options = {
        "mask": jnp.ones((2, 1, 1, 48)).at[1, ..., 40:].set(0), "bias": random_bias(4, 1, 48), "dropout_rate": 0.25,
        "dropout_rng": jax.random.key(5), "broadcast_dropout": together,
    }  # fmt: skip
    dropped = weights_of(attention_fn, query, key, **options)
    whole = weights_of(attention_fn, query, key, **options, deterministic=True)
    keep = dropped != 0
    # What is kept is scaled, and what is dropped alike in all heads and entries, or everywhere anew.
    np.testing.assert_allclose(dropped, jnp.where(keep, whole / 0.75, 0), atol=1e-6)
    assert abs(float(keep[0].mean()) - 0.75) < 0.03
    pairs = [(keep[0, 0], keep[0, 1]), (keep[0, 0], keep[1, 0]), (keep[0, 1], keep[1, 3])]
    for one, other in pairs:
        agree = float((one == other)[:, :40].mean())
        assert agree == 1 if together else abs(agree - (0.75**2 + 0.25**2)) < 0.06
    other = weights_of(attention_fn, query, key, **{**options, "dropout_rng": jax.random.key(6)})
    assert abs(float(((other != 0) == keep)[0].mean()) - (0.75**2 + 0.25**2)) < 0.06

    def plain(query, key, value, bias):
        key, value = (jnp.repeat(x, 4 // kv_heads, axis=2) for x in (key, value))
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 8**0.5 + bias
        weights = jax.nn.softmax(jnp.where(options["mask"] != 0, logits, -jnp.inf))
        return jnp.einsum("bhqk,bkhd->bqhd", weights * keep / 0.75, value)

    def ours(query, key, value, bias):
        return attention_fn(query, key, value, **{**options, "bias": bias})

    values = [jax.value_and_grad(lambda x, f=f: (f(*x) ** 2).sum())((query, key, value, options["bias"])) for f in (ours, plain)]  # fmt: skip
    for mine, wanted in zip(*map(jax.tree.leaves, values), strict=True):
        assert_close(mine, wanted, "float32", gradient=True)


def test_dropout_in_modules():
    x = jnp.ones((2, 7, 16))
    new = nnx.MultiHeadAttention(4, 16, decode=False, attention_fn=attention_fn, dropout_rate=0.5, rngs=nnx.Rngs(0))
    one, two = new(x, deterministic=False), new(x, deterministic=False)
    assert (one != two).any()
    _, old = layers(attention_fn, dropout_rate=0.5, deterministic=False, broadcast_dropout=False)
    one, two = (old(x, rngs={"dropout": jax.random.key(n)}) for n in (0, 0))
    assert (one == two).all()
    assert (one != old(x, rngs={"dropout": jax.random.key(1)})).any()
    assert (new(x, deterministic=True) == new(x, deterministic=True)).all()


def _sizes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (np.prod(v.aval.shape) for v in equation.outvars if hasattr(v.aval, "shape"))
        for inner in jaxprs_in_params(equation.params):
            yield from _sizes(getattr(inner, "jaxpr", inner))


def test_nothing_is_quadratic():
    attend = AttentionFn(causal=True, sliding_window=(99, 0))
    layer = nnx.MultiHeadAttention(1, 8, decode=False, attention_fn=attend, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    x = jax.ShapeDtypeStruct((1, 4096, 8), jnp.float32)
    traced = jax.make_jaxpr(jax.grad(lambda state, x: nnx.merge(graph, state)(x).sum(), allow_int=True))(state, x)
    assert max(_sizes(traced.jaxpr)) < 4096 * 4096 / 8


X = jnp.ones((2, 7, 4, 8))
REFUSED = [
    ({"module": object()}, "sow_weights=True"),
    ({"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum is not"),
    ({"attn_weights_value_einsum": jnp.einsum}, "attn_weights_value_einsum is not"),
    ({"einsum_dot_general": jax.lax.dot_general}, "einsum_dot_general is not"),
    ({"input_positions": jnp.ones((2, 7))}, "input_positions is not"),
    ({"precision": jax.lax.DotAlgorithmPreset.BF16_BF16_F32}, "precision=.*Precision"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_what_is_refused(options, words):
    with pytest.raises(UnsupportedError, match=f"attention_fn: {words}"):
        attention_fn(X, X, X, **options)


def test_modules_tell_what_they_cannot_have():
    """linen leaves out what a function does not name, and so would hide these."""
    x = jnp.ones((2, 7, 16))
    new, old = layers(attention_fn)
    for layer in (new, old):
        with pytest.raises(UnsupportedError, match="sow_weights"):
            layer(x, sow_weights=True)
    einsums = dict.fromkeys(("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"), lambda: jnp.einsum)
    old = linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=attention_fn, **einsums)
    with pytest.raises(UnsupportedError, match="qk_attn_weights_einsum"):
        old.init(jax.random.key(0), x)


WRONG = [
    (lambda: attention_fn(X, X[:1], X), "key is .*the same sizes in front"),
    (lambda: attention_fn(X[0, 0], X[0, 0], X[0, 0]), "query is .*heads, head_dim"),
    (lambda: attention_fn(X, None, X), "key is None.*jnp.asarray"),
    (lambda: attention_fn(X, X, X.astype(int)[:, 1:]), "value is .*the key's length and heads"),
    (lambda: attention_fn(X, X, X, dtype="flot32"), "dtype is 'flot32'.*a floating dtype"),
    (lambda: attention_fn(X, X, X, mask=jnp.ones((3, 1, 7, 7))), "mask is .*broadcasts to"),
    (lambda: attention_fn(X, X, X, mask="causal"), "mask is 'causal'.*an array"),
    (lambda: attention_fn(X, X, X, bias=jnp.ones((7, 7), bool)), "bias is .*floats"),
    (lambda: attention_fn(X, X, X, bias=jnp.ones((1, 2, 4, 7, 7))), "bias is .*broadcasts to"),
    (lambda: attention_fn(X, X, X, dropout_rate=0.5), "dropout_rng is .*one key"),
    (lambda: attention_fn(X, X, X, dropout_rate=0.5, dropout_rng=nnx.Rngs(0)), "dropout_rng is .*one key"),
    (lambda: attention_fn(X, X, X, dropout_rate=0.5, dropout_rng=jax.random.split(jax.random.key(0))), "dropout_rng is .*one key"),
    (lambda: attention_fn(X, X, X, dropout_rate=1.0, dropout_rng=jax.random.key(0)), "dropout_rate is .*probability"),
    (lambda: attention_fn(X, X, X, dropout_rate=-0.1, dropout_rng=jax.random.key(0)), "dropout_rate is .*probability"),
    (lambda: attention_fn(X, X, X, deterministic="no"), "deterministic is .*True or False"),
    (lambda: attention_fn(X, X, X, is_causal=1), "is_causal is .*True or False"),
    (lambda: AttentionFn(causal=True)(X[:, :3], X, X), "causal is .*3 queries and 7 keys"),
    (lambda: AttentionFn(sliding_window=3)(X, X[:, :3], X[:, :3]), "sliding_window is .*7 queries and 3 keys"),
    (lambda: AttentionFn(causal=True)(X[:, :1], X, X, is_causal=True), "causal is .*is_causal=True"),
    (lambda: AttentionFn(causal=1), "causal is"),
    (lambda: AttentionFn(sliding_window=(1, -1)), "sliding_window is"),
    (lambda: AttentionFn(logits_soft_cap=0), "logits_soft_cap is"),
    (lambda: AttentionFn(softmax_scale="1"), "softmax_scale is"),
    (lambda: AttentionFn(platform="cuda13"), "platform"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments(call, words):
    with pytest.raises(InvalidInputError, match=words):
        call()


class NewBlock(nnx.Module):
    def __init__(self, attention, rngs):
        d = decoders
        self.attend = nnx.MultiHeadAttention(d.HEADS, d.WIDTH, decode=False, attention_fn=attention, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(d.WIDTH, rngs=rngs) for _ in range(2)])
        self.up, self.down = nnx.Linear(d.WIDTH, 32, rngs=rngs), nnx.Linear(32, d.WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attend(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class NewDecoder(nnx.Module):
    def __init__(self, attention, rngs):
        d = decoders
        self.tokens, self.places = (nnx.Embed(n, d.WIDTH, rngs=rngs) for n in (d.TOKENS, d.LENGTH))
        self.blocks = nnx.List([NewBlock(attention, rngs) for _ in range(2)])
        self.head = nnx.Linear(d.WIDTH, d.TOKENS, rngs=rngs)

    def __call__(self, tokens, mask):
        x = self.tokens(tokens) + self.places(jnp.arange(decoders.LENGTH))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


MASK = nnx.make_causal_mask(jnp.ones((1, decoders.LENGTH)))


def new_losses(attention, mask):
    graph, state = nnx.split(NewDecoder(attention, nnx.Rngs(0)))
    return decoders.losses(state, lambda state, tokens: nnx.merge(graph, state)(tokens, mask))


def test_training_with_nnx():
    decoders.assert_same_training(
        new_losses(AttentionFn(causal=True), None), new_losses(nnx.dot_product_attention, MASK)
    )


class OldDecoder(linen.Module):
    attention: object

    @linen.compact
    def __call__(self, tokens, mask):
        d = decoders
        x = linen.Embed(d.TOKENS, d.WIDTH)(tokens) + linen.Embed(d.LENGTH, d.WIDTH)(jnp.arange(d.LENGTH))
        for _ in range(2):
            attend = linen.MultiHeadDotProductAttention(num_heads=d.HEADS, attention_fn=self.attention)
            x = x + attend(linen.LayerNorm()(x), mask=mask)
            x = x + linen.Dense(d.WIDTH)(linen.gelu(linen.Dense(32)(linen.LayerNorm()(x))))
        return linen.Dense(d.TOKENS)(x)


@slow
def test_training_with_linen():
    def losses(attention, mask):
        model = OldDecoder(attention)
        parameters = model.init(jax.random.key(0), decoders.sequences()[:, :-1], MASK)
        return decoders.losses(parameters, functools.partial(model.apply, mask=mask))

    decoders.assert_same_training(losses(AttentionFn(causal=True), None), losses(linen.dot_product_attention, MASK))
    decoders.assert_same_training(losses(attention_fn, MASK), losses(linen.dot_product_attention, MASK))


CELLS = {"LSTMCell": "lstm", "OptimizedLSTMCell": "lstm", "GRUCell": "gru", "SimpleCell": "rnn"}


def cells(name, *sizes, seed=0):
    """Cells whose biases are not 0, as they are when flax makes them."""
    bias = nnx.initializers.normal(0.5)
    return [getattr(nnx, name)(a, b, bias_init=bias, rngs=nnx.Rngs(seed)) for a, b in itertools.pairwise(sizes)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "GRUCell" else slow) for n in CELLS])
def test_recurrent_cells(name):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 5)), jnp.float32)
    stack = nnx.List([nnx.RNN(cell) for cell in cells(name, 5, 4, 3)])

    def theirs(stack, x):
        for layer in stack:
            x = layer(x)
        return (x**2).sum(), x

    def ours(stack, x):
        out, _ = recurrent_stack(x, None, weights_from(stack), CELLS[name])
        return (out**2).sum(), out

    (_, expected), wanted = nnx.value_and_grad(theirs, has_aux=True)(stack, x)
    (_, out), grads = nnx.value_and_grad(ours, has_aux=True)(stack, x)
    assert_close(out, expected, "float32")
    for grad, want in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        assert_close(grad, want, "float32", gradient=True)

    weights = weights_from(stack)
    others = nnx.List(cells(name, 5, 4, 3, seed=1))
    weights_to(others, weights)
    back = weights_from(others)
    assert jax.tree.structure(back) == jax.tree.structure(weights)
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (back, weights)), strict=True))


@slow
@pytest.mark.parametrize("name", ["OptimizedLSTMCell", "GRUCell"])
def test_both_directions(name):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 5)), jnp.float32)
    lengths = jnp.array([6, 4])
    forward, backward = (nnx.RNN(cells(name, 5, 4, seed=seed)[0]) for seed in (0, 1))
    layer = nnx.Bidirectional(forward, backward)
    expected = layer(x, seq_lengths=lengths)
    out, _ = recurrent_stack(x, None, weights_from(layer), CELLS[name], lengths=lengths)
    inside = np.arange(6) < np.array(lengths)[:, None]
    assert_close(out[inside], expected[inside], "float32")
    weights_to(nnx.Bidirectional(backward, forward), weights_from(layer))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, *(weights_from(cell) for cell in (forward, backward)))) is False


def test_two_biases_become_one():
    for name, cell_type in (("LSTMCell", "lstm"), ("GRUCell", "gru"), ("SimpleCell", "rnn")):
        (cell,) = cells(name, 5, 4)
        (weights,) = weights_from(cell)
        rng = np.random.default_rng(0)
        size = weights["weight_ih"].shape[0]
        weights |= {n: jnp.asarray(rng.standard_normal(size), jnp.float32) for n in ("bias_ih", "bias_hh")}
        if name == "GRUCell":
            with pytest.raises(InvalidInputError, match=r"weights\[0\]\['bias_hh'\] is .*zeros from 8 on"):
                weights_to(cell, [weights])
            weights["bias_hh"] = weights["bias_hh"].at[8:].set(0)
        weights_to(cell, [weights])
        x = jnp.ones((2, 3, 5))
        assert_close(nnx.RNN(cell)(x), recurrent_stack(x, None, [weights], cell_type)[0], "float32")
    weights_to(cell, [{"weight_ih": weights["weight_ih"], "weight_hh": weights["weight_hh"]}])
    assert (cell.dense_i.bias[...] == 0).all()


def lstm(**options):
    return nnx.LSTMCell(5, 4, rngs=nnx.Rngs(0), **options)


WRONG_WEIGHTS = [
    (lambda: weights_from(nnx.Linear(5, 4, rngs=nnx.Rngs(0))), r"module is of type flax.*\.Linear;.*GRUCell"),
    (lambda: weights_from([]), "module is .*at least one layer"),
    (lambda: weights_from(lstm(gate_fn=nnx.hard_sigmoid)), "gate_fn is sigmoid"),
    (lambda: weights_from(lstm(activation_fn=nnx.relu)), "activation_fn is tanh"),
    (lambda: weights_from(nnx.SimpleCell(4, 4, residual=True, rngs=nnx.Rngs(0))), "without residual"),
    (lambda: weights_from(nnx.RNN(lstm(), reverse=True)), "without reverse"),
    (lambda: weights_from(nnx.Bidirectional(nnx.RNN(lstm()), nnx.RNN(lstm()), merge_fn=jnp.add)), "merge_fn"),
    (lambda: weights_to(lstm(), weights_from([lstm(), lstm()])), "weights is .*1 dicts"),
    (lambda: weights_to(lstm(), [{"weight_ih": jnp.ones((16, 5))}]), r"weights\[0\] is .*weight_hh.*it has weight_ih"),
    (lambda: weights_to(lstm(), [{**weights_from(lstm())[0], "bias_ih": jnp.ones(4)}]), r"'bias_ih'\] is .*\[16\]"),
    (lambda: recurrent_stack(X[0], None, {}), "recurrent_stack: weights is"),
    (lambda: recurrent_stack(X[0], None, [3]), r"recurrent_stack: weights\[0\] is"),
    (lambda: recurrent_stack(X[0], X[0], weights_from(lstm())), "recurrent_stack: hidden is .*1 states"),
]


@pytest.mark.parametrize(("call", "words"), WRONG_WEIGHTS, ids=range(len(WRONG_WEIGHTS)))
def test_wrong_weights(call, words):
    with pytest.raises(InvalidInputError, match=words):
        call()


def test_wrong_weights_change_nothing():
    module = [lstm(), nnx.LSTMCell(4, 4, rngs=nnx.Rngs(0))]
    before = weights_from(module)
    bad = [jax.tree.map(jnp.zeros_like, before[0]), {**before[1], "weight_hh": jnp.ones((16, 3))}]
    with pytest.raises(InvalidInputError, match=r"weights\[1\]\['weight_hh'\]"):
        weights_to(module, bad)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), weights_from(module), before))
