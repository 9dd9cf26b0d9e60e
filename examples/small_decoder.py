"""What `serve_paged.py` and `train_decoder.py` share: the decoder, a line that shows progress, an option that counts.

RMSNorm, rotary positions, attention whose query heads share key heads, a gated MLP, one matrix for embedding and logits. The
attention itself is a function that the caller passes.
"""

import argparse
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder; hashable, so that it can be static."""

    vocabulary: int = 256
    width: int = 192
    layers: int = 3
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 512
    dtype: str = "float32"


def weights_of(model, key):
    """Random weights, a dictionary a layer."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = {
        "query": (model.width, q),
        "key": (model.width, kv),
        "value": (model.width, kv),
        "out": (q, model.width),
        "gate": (model.width, model.hidden),
        "up": (model.width, model.hidden),
        "down": (model.hidden, model.width),
    }
    keys = iter(jax.random.split(key, model.layers * len(shapes) + 1))

    def normal(shape, fan_in):
        return (jax.random.normal(next(keys), shape) * fan_in**-0.5).astype(model.dtype)

    def layer():
        norms = {name: jnp.ones(model.width, model.dtype) for name in ("norm", "norm_hidden")}
        # What a layer adds is small at first: a sum of all of them is as large as the embedding.
        smaller = {"out": 2 * model.layers, "down": 2 * model.layers}
        return norms | {name: normal(shape, shape[0] * smaller.get(name, 1)) for name, shape in shapes.items()}

    layers = [layer() for _ in range(model.layers)]
    return {"embedding": normal((model.vocabulary, model.width), model.width), "layers": layers}


def normed(x, scale):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def rotated(x, positions):
    """Rotary embedding of ``[…, tokens, heads, dim]`` at positions ``[…, tokens]``."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * 10000.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def embedded(model, weights, tokens):
    """``[…, tokens, width]`` with entries of scale 1."""
    return weights["embedding"][tokens] * model.width**0.5


def layer(model, own, x, positions, attend):
    """One layer's output and what else ``attend(q, k, v)`` returns. Queries are ``[…, tokens, heads, head_dim]``."""
    y = normed(x, own["norm"])
    q, k, v = ((y @ own[name]).reshape(*y.shape[:-1], -1, model.head_dim) for name in ("query", "key", "value"))
    mixed, state = attend(rotated(q, positions), rotated(k, positions), v)
    x = x + mixed.reshape(*x.shape[:-1], -1) @ own["out"]
    y = normed(x, own["norm_hidden"])
    return x + (jax.nn.silu(y @ own["gate"]) * (y @ own["up"])) @ own["down"], state


def logits_of(weights, x):
    """``[…, tokens, vocabulary]``, float32."""
    return (normed(x, 1.0) @ weights["embedding"].T).astype(jnp.float32)


def progress(line):
    """One line that is written over."""
    print(f"\r{line:78s}", end="", flush=True)


def at_least(least):
    """Of an option on the command line: whole numbers from ``least`` on."""

    def read(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return read
