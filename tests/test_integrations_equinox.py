"""Our ``MultiheadAttention`` beside Equinox's."""

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close

from ejkernel import InvalidInputError

eqx = pytest.importorskip("equinox")

from ejkernel.integrations.equinox import MultiheadAttention  # noqa: E402

slow = pytest.mark.slow
FULL = {
    "num_heads": 3, "query_size": 10, "key_size": 6, "value_size": 7, "output_size": 9, "qk_size": 8, "vo_size": 4,
    "use_query_bias": True, "use_key_bias": True, "use_value_bias": True, "use_output_bias": True,
}  # fmt: skip


def inputs(layer, q_len=7, kv_len=9, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((q_len, layer.query_size), (kv_len, layer.key_size), (kv_len, layer.value_size))
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def random_mask(*shape):
    mask = np.random.default_rng(1).random(shape) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask)


def value_and_grads(layer, qkv, **options):
    def loss(layer_and_inputs):
        layer, qkv = layer_and_inputs
        out = layer(*qkv, **options)
        return (out**2).sum(), out

    (_, out), grads = eqx.filter_value_and_grad(loss, has_aux=True)((layer, qkv))
    return out, jax.tree.leaves(grads)


def halved(query, key, value):
    return query / 2, key, value[::-1]


CASES = {
    "plain": ({"num_heads": 2, "query_size": 8}, {}),
    "every option, a mask": (FULL, {"mask": random_mask(7, 9)}),
    "a mask by head": (FULL, {"mask": random_mask(3, 7, 9), "process_heads": halved}),
}


@pytest.mark.parametrize("name", [pytest.param("plain", marks=slow), "every option, a mask", "a mask by head"])
def test_as_equinox(name):
    arguments, options = CASES[name]
    theirs = eqx.nn.MultiheadAttention(**arguments, key=jax.random.key(0))
    ours = MultiheadAttention(**arguments, key=jax.random.key(0))
    assert all(
        (a == b).all() for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True) if hasattr(a, "shape")
    )
    qkv = inputs(theirs)
    out, grads = value_and_grads(ours, qkv, **options)
    expected, wanted = value_and_grads(theirs, qkv, **options)
    assert_close(out, expected, "float32")
    for grad, want in zip(grads, wanted, strict=True):
        assert_close(grad, want, "float32", gradient=True)


def test_of_takes_a_module_over():
    theirs = eqx.nn.MultiheadAttention(**FULL, dropout_p=0.25, dtype=jnp.bfloat16, key=jax.random.key(0))
    ours = MultiheadAttention.of(theirs, causal=True, sliding_window=(2, 0))
    leaves = [jax.tree.leaves(module) for module in (ours, theirs)]
    assert all(a is b for a, b in zip(*leaves, strict=True))
    assert (ours.options.causal, ours.options.sliding_window, ours.dropout.p) == (True, (2, 0), 0.25)
    qkv = tuple(x.astype(jnp.bfloat16) for x in inputs(theirs, 9))
    i, j = np.indices((9, 9))
    expected = theirs(*qkv, mask=jnp.asarray((i >= j) & (i - j <= 2)), inference=True)
    out = ours(*qkv, inference=True)
    assert out.dtype == expected.dtype
    assert_close(out, expected, "bfloat16")


def test_under_jit_and_vmap():
    ours = MultiheadAttention(2, 8, causal=True, dropout_p=0.5, key=jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 6, 8)), jnp.float32)
    keys = jax.random.split(jax.random.key(1), 3)
    batched = eqx.filter_jit(lambda layer, x, keys: jax.vmap(lambda x, key: layer(x, x, x, key=key))(x, keys))
    out = batched(ours, x, keys)
    for b in range(3):
        assert_close(out[b], ours(x[b], x[b], x[b], key=keys[b]), "float32")
    assert (batched(ours, x, keys[::-1]) != out).any()
    still = eqx.nn.inference_mode(ours)
    assert_close(still(x[0], x[0], x[0]), ours(x[0], x[0], x[0], inference=True), "float32")


def test_dropout():
    """Identities as weights, and unit vectors as values: the output is the attention weights."""
    size = 48
    layer = MultiheadAttention(2, 2 * size, qk_size=size, vo_size=size, dropout_p=0.25, key=jax.random.key(0))
    layer = eqx.tree_at(lambda m: (m.value_proj.weight, m.output_proj.weight), layer, (jnp.eye(2 * size),) * 2)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((size, 2 * size)), jnp.float32)
    units = jnp.concatenate([jnp.eye(size)] * 2, axis=1)

    def weights(**options):
        return layer(x, x, units, **options).reshape(size, 2, size)

    dropped, whole = weights(key=jax.random.key(1)), weights(inference=True)
    keep = dropped != 0
    np.testing.assert_allclose(dropped, jnp.where(keep, whole / 0.75, 0), atol=1e-6)
    assert abs(float(keep.mean()) - 0.75) < 0.03
    for other in (keep[:, 1], weights(key=jax.random.key(2))[:, 0] != 0):
        assert abs(float((keep[:, 0] == other).mean()) - (0.75**2 + 0.25**2)) < 0.04


LAYER = MultiheadAttention(2, 8, dropout_p=0.5, key=jax.random.key(0))
X = jnp.ones((5, 8))
WRONG = [
    (
        lambda: MultiheadAttention.of(eqx.nn.Linear(2, 2, key=jax.random.key(0))),
        r"module is of type equinox.*\.Linear;",
    ),
    (lambda: MultiheadAttention(2, 8, key=jax.random.key(0), logits_soft_cap=-1.0), "logits_soft_cap is"),
    (lambda: LAYER(X, X, X), "key is None.*one key"),
    (lambda: LAYER(X, X, X, key=3), "key is of type int.*one key"),
    (lambda: MultiheadAttention(2, 8, dropout_p=1.0, key=jax.random.key(0))(X, X, X), "dropout_p is 1.0.*probability"),
    (lambda: LAYER([1.0], X, X), "query is a list.*jnp.asarray"),
    (lambda: LAYER(X[None], X, X), r"query is .*\[length, 8\], without a batch, which jax.vmap adds"),
    (lambda: LAYER(X, X[:, :4], X), r"key_ is float32\[5, 4\].*\[length, 8\]"),
    (lambda: LAYER(X, X, X, inference="no"), "inference is 'no'.*True or False"),
    (lambda: LAYER(X, X, X, mask="causal", inference=True), "mask is 'causal'.*booleans"),
    (lambda: LAYER(X, X, X[:3], inference=True), "value is .*the key's length, 5"),
    (lambda: LAYER(X, X, X, mask=jnp.ones((5, 5)), inference=True), "mask is .*booleans"),
    (lambda: LAYER(X, X, X, mask=jnp.ones((4, 5, 5), bool), inference=True), r"mask is .*\[2, 5, 5\]"),
    (
        lambda: LAYER(X, X, X, process_heads=lambda q, k, v: (q[1:], k, v), inference=True),
        r"process_heads is .*returned \[4, 2, 4\], ",
    ),
    (lambda: LAYER(X, X, X, process_heads=lambda *heads: None, inference=True), "process_heads is .*returned NoneType"),
    (lambda: LAYER(X, X, X, process_heads=3, inference=True), "process_heads is 3.*a function"),
    (
        lambda: MultiheadAttention.of(LAYER, causal=True)(X[:3], X, X, inference=True),
        "causal is .*3 queries and 5 keys",
    ),
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments(call, words):
    with pytest.raises(InvalidInputError, match=words):
        call()


def test_the_old_name_of_inference():
    with pytest.warns(UserWarning, match="pass inference"):
        out = LAYER(X, X, X, deterministic=True)
    assert (out == LAYER(X, X, X, inference=True)).all()


def normed(x):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)


class Decoder(eqx.Module):
    tokens: jax.Array
    places: jax.Array
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, key):
        d = decoders
        keys = iter(jax.random.split(key, 9))
        self.tokens, self.places = (jax.random.normal(next(keys), (n, d.WIDTH)) for n in (d.TOKENS, d.LENGTH))
        self.blocks = [
            (
                eqx.nn.MultiheadAttention(d.HEADS, d.WIDTH, key=next(keys)),
                eqx.nn.MLP(d.WIDTH, d.WIDTH, 32, 1, key=next(keys)),
            )
            for _ in range(2)
        ]
        self.head = eqx.nn.Linear(d.WIDTH, d.TOKENS, key=next(keys))

    def __call__(self, tokens, mask):
        x = self.tokens[tokens] + self.places
        for attend, mlp in self.blocks:
            y = normed(x)
            x = x + attend(y, y, y, mask=mask)
            x = x + jax.vmap(mlp)(normed(x))
        return jax.vmap(self.head)(x)


@slow
def test_training():
    theirs = Decoder(jax.random.key(0))

    def replaced(module):
        is_attention = lambda x: isinstance(x, eqx.nn.MultiheadAttention)  # noqa: E731
        return jax.tree.map(
            lambda x: MultiheadAttention.of(x, causal=True) if is_attention(x) else x, module, is_leaf=is_attention
        )

    def losses(model, mask):
        parameters, rest = eqx.partition(model, eqx.is_inexact_array)

        def logits(parameters, tokens):
            model = eqx.combine(parameters, rest)
            return jax.vmap(lambda tokens: model(tokens, mask))(tokens)

        return decoders.losses(parameters, logits)

    causal = jnp.tril(jnp.ones((decoders.LENGTH, decoders.LENGTH), bool))
    decoders.assert_same_training(losses(replaced(theirs), None), losses(theirs, causal))
