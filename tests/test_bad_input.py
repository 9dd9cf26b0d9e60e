"""Wrong arguments: one clear error that names the argument, what it was and what was expected."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import EjkernelError, InvalidInputError, UnsupportedError, flash_attention

X = jnp.ones((2, 8, 4, 16))
IDS = jnp.ones((2, 8), jnp.int32)
ONE = jnp.ones((1, 8, 4, 16))
OFFSETS = jnp.asarray([0, 3, 8])

# argument in fault, arguments, words the message must hold
WRONG = [
    ("query", {"query": X[0]}, ["3 dimensions", "[8, 4, 16]", "head_dim"]),
    ("query", {"query": [1.0]}, ["jnp.asarray(query)"]),
    ("query", {"query": "x"}, ["'x'", "jnp.asarray(query)"]),
    ("query", {"query": jax.ShapeDtypeStruct(X.shape, X.dtype)}, ["only explain"]),
    ("query", {"query": X.astype(jnp.int32)}, ["int32", "floating"]),
    ("key", {"key": X[:, :, :, :8]}, ["head dim, 16"]),
    ("key", {"key": X[:1]}, ["batch, 2"]),
    ("key", {"key": X.astype(jnp.bfloat16)}, ["bfloat16", "float32", "cast"]),
    ("value", {"value": X.astype(jnp.float16)}, ["float16", "cast"]),
    ("value", {"value": X[:, :7]}, ["length and heads, [8, 4]"]),
    ("value", {"value": X[:, :, :2]}, ["length and heads, [8, 4]"]),
    ("query", {"query": X[:, :, :3], "key": X[:, :, :2], "value": X[:, :, :2]}, ["multiple of the key's 2"]),
    ("query", {"query": X[:, :0]}, ["at least 1"]),
    ("key", {"key": X[:, :0], "value": X[:, :0]}, ["at least 1"]),
    ("query", {"query": X[:, :, :, :0], "key": X[:, :, :, :0]}, ["at least 1"]),
    ("attention_mask", {"attention_mask": jnp.ones((8, 8), bool)}, ["[2, 8]", "[2, 8, 8]"]),
    ("attention_mask", {"attention_mask": jnp.ones((4, 8, 8), bool)}, ["[2, 8, 8]"]),
    ("attention_mask", {"attention_mask": jnp.ones((2, 3, 8, 8), bool)}, ["[2, 4, 8, 8]"]),
    ("attention_mask", {"attention_mask": jnp.ones((2, 8))}, ["float32", "bias"]),
    ("attention_mask", {"attention_mask": True}, ["0 dimensions"]),
    ("bias", {"bias": jnp.ones((3, 8, 8))}, ["[3, 8, 8]", "broadcasts to [2, 4, 8, 8]"]),
    ("bias", {"bias": jnp.ones((1, 2, 4, 8, 8))}, ["5 dimensions"]),
    ("bias", {"bias": jnp.ones((8, 8), jnp.int32)}, ["int32"]),
    ("causal", {"causal": 1.0}, ["True or False"]),
    ("causal", {"causal": jnp.asarray(True)}, ["Python value"]),
    ("softmax_scale", {"softmax_scale": "big"}, ["'big'", "Python number"]),
    ("softmax_scale", {"softmax_scale": float("nan")}, ["nan", "finite"]),
    ("softmax_scale", {"softmax_scale": jnp.ones(4)}, ["float32[4]", "a number"]),
    ("softmax_scale", {"softmax_scale": jnp.asarray(True)}, ["bool"]),
    ("softmax_scale", {"softmax_scale": jax.ShapeDtypeStruct((), jnp.float32)}, ["only explain"]),
    ("dropout_prob", {"dropout_prob": 1.0, "dropout_seed": 0}, ["1.0", "[0, 1)"]),
    ("dropout_prob", {"dropout_prob": -0.1, "dropout_seed": 0}, ["[0, 1)"]),
    ("dropout_prob", {"dropout_prob": None, "dropout_seed": 0}, ["None"]),
    ("dropout_seed", {"dropout_prob": 0.1}, ["None", "integer"]),
    ("dropout_seed", {"dropout_prob": 0.1, "dropout_seed": 1.5}, ["float32", "integer"]),
    ("dropout_seed", {"dropout_prob": 0.1, "dropout_seed": jnp.zeros(2, jnp.int32)}, ["[2]"]),
    ("sliding_window", {"sliding_window": -1}, ["-1", "≥ 0"]),
    ("sliding_window", {"sliding_window": (3, -2)}, ["(3, -2)"]),
    ("sliding_window", {"sliding_window": (1, 2, 3)}, ["pair"]),
    ("sliding_window", {"sliding_window": 2.5}, ["2.5"]),
    ("sliding_window", {"sliding_window": True}, ["True"]),
    ("sliding_window", {"sliding_window": (3, jnp.int32(-1))}, ["≥ 0", "a side is -1"]),
    ("sliding_window", {"sliding_window": (jnp.int32(3), -1)}, ["≥ 0"]),
    ("sliding_window", {"sliding_window": jnp.ones(2, jnp.int32)}, ["int32[2]", "scalar"]),
    ("sliding_window", {"sliding_window": (jnp.float32(3), 0)}, ["float32", "integer"]),
    ("sliding_window", {"sliding_window": (jax.ShapeDtypeStruct((), jnp.int32), 0)}, ["only explain"]),
    ("logits_soft_cap", {"logits_soft_cap": 0.0}, ["above 0"]),
    ("logits_soft_cap", {"logits_soft_cap": -5}, ["-5"]),
    ("cum_seqlens_k", {"query": ONE, "key": ONE, "value": ONE, "cum_seqlens_q": OFFSETS}, ["None", "pair", "both or neither."]),
    ("cum_seqlens_q", {"cum_seqlens_q": OFFSETS, "cum_seqlens_k": OFFSETS}, ["batch of 1", "the batch is 2"]),
    ("cum_seqlens_k", {"query": ONE, "key": ONE, "value": ONE, "cum_seqlens_q": OFFSETS, "cum_seqlens_k": OFFSETS[1:]}, ["3"]),
    ("cum_seqlens_q", {"query": ONE, "key": ONE, "value": ONE, "cum_seqlens_q": OFFSETS + 1, "cum_seqlens_k": OFFSETS}, ["start at 0", "1 4 9"]),
    ("cum_seqlens_k", {"query": ONE, "key": ONE, "value": ONE, "cum_seqlens_q": OFFSETS, "cum_seqlens_k": OFFSETS * 2}, ["end by 8"]),
    ("cum_seqlens_q", {"query": ONE, "key": ONE, "value": ONE, "cum_seqlens_q": OFFSETS[::-1], "cum_seqlens_k": OFFSETS}, ["never decrease"]),
    ("cum_seqlens_q", {"query": ONE, "key": ONE, "value": ONE, "cum_seqlens_q": OFFSETS * 1.0, "cum_seqlens_k": OFFSETS}, ["integer"]),
    ("kv_segment_ids", {"q_segment_ids": IDS}, ["None", "pair", "both or neither."]),
    ("q_segment_ids", {"kv_segment_ids": IDS}, ["None", "pair", "both or neither."]),
    ("q_segment_ids", {"q_segment_ids": IDS[:, :5], "kv_segment_ids": IDS}, ["[2, 5]", "[2, 8]"]),
    ("kv_segment_ids", {"q_segment_ids": IDS, "kv_segment_ids": IDS * 1.0}, ["float32"]),
    ("softmax_aux", {"softmax_aux": jnp.ones((3, 2))}, ["[4, num_sinks]"]),
    ("softmax_aux", {"softmax_aux": jnp.ones((4, 0))}, ["at least one sink"]),
    ("softmax_aux", {"softmax_aux": jnp.ones(4)}, ["softmax_aux[:, None]", "softmax_aux[None, :]"]),
    ("softmax_aux", {"softmax_aux": jnp.ones(4, jnp.int32)}, ["int32"]),
    ("fwd_params", {"fwd_params": {"q_blocksize": 8}}, ["FwdParams"]),
    ("bwd_params", {"bwd_params": 128}, ["BwdParams"]),
    ("return_lse", {"return_lse": 1}, ["True or False"]),
    ("platform", {"platform": "metal"}, ["'metal'", "'xla'", "'triton'"]),
    ("backend", {"backend": "npu"}, ["'npu'", "'cpu'"]),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "arguments", "words"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_arguments(argument, arguments, words):
    call = {"query": X, "key": X, "value": X, **arguments}
    with pytest.raises(InvalidInputError) as caught:
        flash_attention(**call)
    message = str(caught.value)
    assert message.startswith(f"flash_attention: {argument} is ")
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("argument", ["query", "sliding_window", "platform"])
def test_the_same_errors_under_jit_and_grad(argument):
    wrong = {"query": {"query": X[0]}, "sliding_window": {"sliding_window": -1}, "platform": {"platform": "metal"}}[
        argument
    ]
    call = {"query": X, "key": X, "value": X, **wrong}

    def loss(query):
        return flash_attention(**{**call, "query": query}).sum()

    for run, query in (
        (jax.jit(loss), call["query"]),
        (jax.grad(loss), call["query"]),
        (jax.vmap(loss), call["query"][None]),
    ):
        with pytest.raises(InvalidInputError, match=f"flash_attention: {argument} is "):
            run(query)


def test_an_error_leaves_nothing_behind():
    with pytest.raises(InvalidInputError):
        flash_attention(X, X, X, sliding_window=-1)
    np.testing.assert_allclose(flash_attention(X, X, X), X, rtol=1e-6)
    with pytest.raises(InvalidInputError):
        flash_attention(X, X, X, sliding_window=-1)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_float8_is_refused_by_name(dtype):
    x = X.astype(dtype)
    with pytest.raises(UnsupportedError, match=f"dtype {jnp.dtype(dtype).name} is not supported") as caught:
        flash_attention(x, x, x)
    assert re.search(r"xla +any +refused", str(caught.value))


def test_errors_are_of_python_s_kinds_too():
    assert issubclass(InvalidInputError, ValueError)
    assert issubclass(UnsupportedError, NotImplementedError)
    assert issubclass(InvalidInputError, EjkernelError)
    assert issubclass(UnsupportedError, EjkernelError)


@pytest.mark.parametrize("return_lse", [False, True])
def test_an_empty_batch_gives_an_empty_result(return_lse):
    q, k, v = jnp.ones((0, 5, 4, 8)), jnp.ones((0, 7, 2, 8)), jnp.ones((0, 7, 2, 3))
    result = flash_attention(q, k, v, causal=True, softmax_aux=jnp.ones(2), return_lse=return_lse)
    shapes = [x.shape for x in jax.tree.leaves(result)]
    assert shapes == [(0, 5, 4, 3), (0, 4, 5)][: 1 + return_lse]
    assert jax.grad(lambda q: jax.tree.leaves(flash_attention(q, k, v))[0].sum())(q).shape == q.shape


def test_lists_are_windows_too():
    np.testing.assert_array_equal(
        flash_attention(X, X, X, sliding_window=[2, 0]), flash_attention(X, X, X, sliding_window=(2, 0))
    )
    np.testing.assert_array_equal(
        flash_attention(X, X, X, sliding_window=np.int64(2)), flash_attention(X, X, X, sliding_window=2)
    )


def test_a_refused_value_is_not_held_against_its_equal():
    """1 == True and 0.0 == False, but only one of each is a right argument."""
    for wrong, right in (({"causal": 1}, {"causal": True}), ({"dropout_prob": False}, {"dropout_prob": 0.0}), ({"softmax_scale": True}, {"softmax_scale": 1.0}), ({"sliding_window": (True, 0)}, {"sliding_window": (1, 0)})):  # fmt: skip
        for _ in range(2):
            with pytest.raises(InvalidInputError):
                flash_attention(X, X, X, **wrong)
            assert flash_attention(X, X, X, **right).shape == X.shape


@pytest.mark.parametrize(
    ("argument", "arguments", "words"),
    [
        ("query", {"query": jax.ShapeDtypeStruct(X.shape, X.dtype)}, "ShapeDtypeStruct"),
        ("attention_mask", {"attention_mask": "causal"}, "'causal'"),
        ("dropout_seed", {"dropout_prob": 0.1, "dropout_seed": "a"}, "'a'"),
        ("dropout_seed", {"dropout_prob": 0.1, "dropout_seed": jax.random.key(0)}, "key<fry>"),
        ("query", {"query": [[1.0, 2.0]]}, "a list"),
        ("query", {"query": X[0, 0, 0], "cum_seqlens_q": OFFSETS, "cum_seqlens_k": OFFSETS}, "1 dimension"),
        ("cum_seqlens_q", {"query": ONE, "key": ONE, "value": ONE, "cum_seqlens_q": jnp.array([0, 5, 3], jnp.uint32), "cum_seqlens_k": OFFSETS}, "never decrease"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_things_that_jax_itself_would_trip_over(argument, arguments, words):
    with pytest.raises(InvalidInputError, match=f"flash_attention: {argument} is .*{words}"):
        flash_attention(**{"query": X, "key": X, "value": X, **arguments})


def test_an_empty_batch_does_not_excuse_a_pin():
    x = jnp.ones((0, 5, 4, 8))
    with pytest.raises(UnsupportedError, match="platform='triton'"):
        flash_attention(x, x, x, platform="triton")
    x = x.astype(jnp.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="float8"):
        flash_attention(x, x, x)


def test_symbolic_shapes_are_refused_by_name():
    (length,) = jax.export.symbolic_shape("s")
    x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    with pytest.raises(InvalidInputError, match=r"query is .*symbolic shapes are not supported"):
        jax.export.export(jax.jit(lambda x: flash_attention(x, x, x)))(x)
