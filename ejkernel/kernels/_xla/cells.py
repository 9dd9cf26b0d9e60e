"""The cells of recurrent layers: what one step computes.

Gates come as tuples of ``[..., H]``, before their activation: ``z`` or, where a cell is not ``additive``, two of them, ``zx``, what the
inputs give, and ``zh``, what the state gives. States are tuples too, the hidden state first. A step is elementwise, so its
derivative is JAX's business.
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

    gates, states = 4, 2
    # Whether only the sum counts of what inputs and state give to the gates.
    additive = True

    def step(self, z: Gates, state: States) -> States:
        """The states after a step."""
        i, f, g, o = z
        c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c


class Gru:
    """Gates r, z, n: ``n = tanh(zx_n + r·zh_n)``, ``h = (1 - z)·n + z·h``."""

    gates, states = 3, 1
    additive = False

    def step(self, zx: Gates, zh: Gates, state: States) -> States:
        """The state after a step."""
        r, z = (jax.nn.sigmoid(x + h) for x, h in zip(zx[:2], zh[:2], strict=True))
        n = jnp.tanh(zx[2] + r * zh[2])
        return (n + z * (state[0] - n),)


class Rnn:
    """One gate: ``h = activation(zx + zh)``."""

    gates, states = 1, 1
    additive = True

    def __init__(self, activation: str | Callable[[Array], Array]):
        named = {"tanh": jnp.tanh, "relu": jax.nn.relu}
        self.activation = named[activation] if isinstance(activation, str) else activation

    def step(self, z: Gates, state: States) -> States:
        """The state after a step."""
        return (self.activation(z[0]).astype(z[0].dtype),)
