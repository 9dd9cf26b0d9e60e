"""``dot_product_attention`` beside ``jax.nn``'s own: the cases of jax's tests and the corners of each argument."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from subjects import each_subject
from tolerances import assert_close

from ejkernel import InvalidInputError, UnsupportedError, dot_product_attention
from ejkernel.ops import flash_attention as flash

slow = pytest.mark.slow
theirs = functools.partial(jax.nn.dot_product_attention, implementation="xla")


def make(batch=2, q_len=19, kv_len=19, heads=4, kv_heads=4, dim=8, dtype="float32", seed=0, **more):
    """``(floats, others)``: keyword arguments by whether they have gradients; ``more`` gives shapes and lengths."""
    rng = np.random.default_rng(seed)
    shapes = {"query": (batch, q_len, heads, dim), "key": (batch, kv_len, kv_heads, dim), "value": (batch, kv_len, kv_heads, dim)}
    floats = {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}
    if "bias" in more:
        floats["bias"] = jnp.asarray(rng.standard_normal(more.pop("bias")), dtype)
    if "mask" in more:
        mask = rng.random(more.pop("mask")) < 0.7
        mask[..., 0] = True  # every row sees a key: see test_rows_that_see_nothing
        more["mask"] = jnp.asarray(mask)
    lengths = {name: jnp.asarray(more[name], jnp.int32) for name in more if name.endswith("_seq_lengths")}
    return floats, {**more, **lengths}


def both(floats, others, **ours):
    """Results and gradients of ours and of jax's, for one cotangent, each in one compilation."""
    dout = jnp.asarray(np.random.default_rng(9).standard_normal(floats["query"].shape), floats["query"].dtype)

    def run(attend, floats):
        out, pull = jax.vjp(lambda floats: attend(**floats, **others), floats)
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


@each_subject("varlen", "gqa", "cross")
def test_lengths_and_alignment_on_each_kernel(subject):
    stretch = 8 if subject.in_mosaic_interpreter else 1
    case = {
        "q_len": 23 * stretch, "kv_len": 19 * stretch, "heads": 2, "kv_heads": 1, "dim": subject.dim(16), "dtype": subject.dtype,
        "query_seq_lengths": (21 * stretch, 7), "key_value_seq_lengths": (18 * stretch, 11 * stretch),
    }  # fmt: skip
    check(*make(**case, is_causal=True, local_window_size=(9 * stretch, 0)), implementation=subject.platform)
