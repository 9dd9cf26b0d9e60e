"""Calls of mean_pooling, and the mean in float64: a Python loop over the sequences."""

import itertools

import jax.numpy as jnp
import numpy as np
from examples import Example


def reference(inputs, mask=None, cu_seqlens=None):
    if cu_seqlens is None:
        keep = jnp.ones(inputs.shape[:2], bool) if mask is None else mask != 0
        count = keep.sum(1)[:, None]
        return jnp.where(count > 0, jnp.where(keep[..., None], inputs, 0).sum(1) / jnp.maximum(count, 1), 0)
    token = jnp.arange(inputs.shape[0])
    means = []
    for start, stop in itertools.pairwise(cu_seqlens):
        inside = ((token >= start) & (token < stop))[:, None]
        means.append(jnp.where(inside, inputs, 0).sum(0) / jnp.maximum(stop - start, 1))
    return jnp.stack(means)


def padded(batch, length, features, mask=None):
    def make(rng):
        arrays = {"inputs": rng.standard_normal((batch, length, features))}
        if mask is not None:
            arrays["mask"] = mask(rng, (batch, length))
        return arrays

    return make


def packed(lengths, features, padding=0):
    def make(rng):
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return {"inputs": rng.standard_normal((offsets[-1] + padding, features)), "cu_seqlens": offsets}

    return make


def some(rng, shape):
    return rng.random(shape) < 0.6


def up_to_a_length(rng, shape):
    """The first sequence whole, the last one empty."""
    lengths = np.linspace(shape[1], 0, shape[0]).astype(int)
    return (np.arange(shape[1]) < lengths[:, None]).astype(np.int32)


def weights(rng, shape):
    """Only whether a mask is zero counts."""
    return np.where(rng.random(shape) < 0.5, rng.standard_normal(shape), 0).astype(np.float32)


# What an interpreter runs in ``make test``: tests/test_triton_grouped_interpreted.py draws more.
SHORT_INTERPRETED = {"packed_padding", "masked"}


def example(name, make, features=(), batch=("inputs",)):
    return Example(
        "mean_pooling",
        name,
        make,
        reference,
        {},
        ("inputs",),
        frozenset(features),
        dict.fromkeys(batch, 0),
        frozenset({"mask"}),
        name not in SHORT_INTERPRETED,
    )


BATCHED = ("inputs", "mask")

EXAMPLES = [
    example("packed_padding", packed([20, 0, 64, 7], 5, padding=30), {"varlen"}, ()),
    example("plain", padded(4, 37, 5)),
    example("one_token", padded(2, 1, 3)),
    example("one_feature", padded(2, 50, 1, some), {"mask"}, BATCHED),
    example("integer_mask", padded(4, 19, 6, up_to_a_length), {"mask"}, BATCHED),
    example("float_mask", padded(2, 33, 4, weights), {"mask"}, BATCHED),
    example("long", padded(1, 700, 3, some), {"mask"}, ()),
    example("packed", packed([5, 1, 0, 40, 3], 4), {"varlen"}, ()),
    example("packed_one", packed([90], 3), {"varlen"}, ()),
    example("packed_short", packed([1, 0, 2, 0, 0, 1, 1], 2, padding=3), {"varlen"}, ()),
    example("packed_empty", packed([0, 0], 3, padding=4), {"varlen"}, ()),
    example("masked", padded(4, 45, 7, some), {"mask"}, BATCHED),
]
