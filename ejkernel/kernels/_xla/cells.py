"""The cells of recurrent layers: what one step computes.

Gates come before their activation, as a tuple of ``parts`` arrays that hold all gates together, ``[..., gates·H / parts]``: ``z`` or, where
a cell is not ``additive``, two such tuples, ``zx``, what the inputs give, and ``zh``, what the state gives. States are tuples too, the
hidden state first. A step multiplies no matrices, so its derivative is JAX's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

States = tuple[Array, ...]
Gates = tuple[Array, ...]


def make(spec: Any) -> Lstm | Gru | Rnn:
    """The cell that a call asks for."""
    return {"lstm": Lstm, "gru": Gru}[spec.cell]() if spec.cell != "rnn" else Rnn(spec.activation)


class Lstm:
    """Gates i, f, g, o: ``c = f·c + i·g``, ``h = o·tanh(c)``."""

    gates, states, parts = 4, 2, 1
    # Whether only the sum counts of what inputs and state give to the gates.
    additive = True

    def step(self, z: Gates, state: States) -> States:
        """The states after a step."""
        # All gates are one tanh: sigmoid(x) is tanh(x / 2) / 2 + 1 / 2. A gate at a time, XLA's CPU code computes some of
        # them once for each of their uses.
        size = state[0].shape[-1]
        scale = jnp.repeat(jnp.asarray([0.5, 0.5, 1, 0.5], z[0].dtype), size)
        i, f, g, o = jnp.split(jnp.tanh(z[0] * scale), 4, axis=-1)
        c = (f * 0.5 + 0.5) * state[1] + (i * 0.5 + 0.5) * g
        return (o * 0.5 + 0.5) * jnp.tanh(c), c


class Gru:
    """Gates r, z, n: ``n = tanh(zx_n + r·zh_n)``, ``h = (1 - z)·n + z·h``."""

    gates, states, parts = 3, 1, 3
    additive = False

    def step(self, zx: Gates, zh: Gates, state: States) -> States:
        """The state after a step."""
        r, z = (jax.nn.sigmoid(x + h) for x, h in zip(zx[:2], zh[:2], strict=True))
        n = jnp.tanh(zx[2] + r * zh[2])
        return (n + z * (state[0] - n),)


class Rnn:
    """One gate: ``h = activation(zx + zh)``."""

    gates, states, parts = 1, 1, 1
    additive = True

    def __init__(self, activation: str | Callable[[Array], Array]):
        named = {"tanh": jnp.tanh, "relu": jax.nn.relu}
        self.activation = named[activation] if isinstance(activation, str) else activation

    def step(self, z: Gates, state: States) -> States:
        """The state after a step."""
        return (self.activation(z[0]).astype(z[0].dtype),)
