"""The cells of recurrent layers, each as a step and as the slopes that its backward needs.

Gates come as two arrays ``[..., gates, H]``: ``zx``, what the inputs give, and ``zh``, what the state gives. States are tuples,
the hidden state first.

Backward, whatever does not depend on the gradient that arrives is computed for all steps at once (``slopes``), so that the
loop (``pull``) is left with a few multiplications. ``pull`` returns the gradients of ``zh``, what ``gate_gradients`` needs of
this step for those of all gates after the loop, and the gradients of the states before the step, but for the part that goes
through ``zh``.

A gate's sigmoid is ``tanh(z / 2) / 2 + 1 / 2``: so all gates are one tanh over one array, which XLA's CPU code runs four times as
fast as a gate at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

States = tuple[Array, ...]


def make(spec: Any) -> Any:
    """The cell that a call asks for."""
    return {"lstm": Lstm, "gru": Gru}[spec.cell]() if spec.cell != "rnn" else Rnn(spec.activation)


class Lstm:
    """Gates i, f, g, o: ``c = f·c + i·g``, ``h = o·tanh(c)``."""

    gates, states, stored = 4, 2, 2

    def step(self, zx: Array, zh: Array, state: States) -> States:
        i, f, g, o = _gate_values(_lstm_tanh(zx + zh))
        c = f * state[1] + i * g
        return o * jnp.tanh(c), c

    def slopes(self, zx: Array, zh: Array, c_before: Array, c: Array) -> dict[str, Array]:
        v = lax.optimization_barrier(_lstm_tanh(zx + zh))
        i, f, g, o = _gate_values(v)
        tanh_c = lax.optimization_barrier(jnp.tanh(c))
        # Each gate's derivative times what the gate is multiplied with.
        partner = _rows(g, c_before, i, tanh_c)
        own = (1 - v * v) * _column(0.25, 0.25, 1, 0.25, like=v)
        return {"gates": own * partner, "cell": o * (1 - tanh_c * tanh_c), "forget": f}

    def pull(self, slopes: dict[str, Array], dstate: States) -> tuple:
        dh, dc = dstate
        dc = dc + dh * slopes["cell"]
        # Materialised: the gates' product, the store and the next step all read it.
        dh, dc = lax.optimization_barrier((dh, dc))
        return slopes["gates"] * _rows(dc, dc, dc, dh), (dh, dc), (None, dc * slopes["forget"])

    def gate_gradients(self, slopes: dict[str, Array], stored: States) -> tuple[Array, Array]:
        dh, dc = stored
        dz = slopes["gates"] * _rows(dc, dc, dc, dh)
        return dz, dz


class Gru:
    """Gates r, z, n: ``n = tanh(zx_n + r·zh_n)``, ``h = (1 - z)·n + z·h``."""

    gates, states, stored = 3, 1, 1

    def step(self, zx: Array, zh: Array, state: States) -> States:
        (h,) = state
        r, z, n = self._gate_values(zx, zh)
        return (n + z * (h - n),)

    def _gate_values(self, zx: Array, zh: Array) -> tuple[Array, Array, Array]:
        v = lax.optimization_barrier(jnp.tanh((zx[..., :2, :] + zh[..., :2, :]) * 0.5))
        r, z = (v[..., k, :] * 0.5 + 0.5 for k in range(2))
        return r, z, lax.optimization_barrier(jnp.tanh(zx[..., 2, :] + r * zh[..., 2, :]))

    def slopes(self, zx: Array, zh: Array, h_before: Array) -> dict[str, Array]:
        r, z, n = self._gate_values(zx, zh)
        candidate = (1 - z) * (1 - n * n)
        gates = _rows(candidate * zh[..., 2, :] * r * (1 - r), (h_before - n) * z * (1 - z), candidate * r)
        return {"gates": gates, "candidate": candidate, "update": z}

    def pull(self, slopes: dict[str, Array], dstate: States) -> tuple:
        (dh,) = lax.optimization_barrier(dstate)
        return slopes["gates"] * dh[..., None, :], (dh,), (dh * slopes["update"],)

    def gate_gradients(self, slopes: dict[str, Array], stored: States) -> tuple[Array, Array]:
        (dh,) = stored
        dzh = slopes["gates"] * dh[..., None, :]
        is_candidate = jnp.arange(3, dtype=jnp.int32)[:, None] == 2
        return jnp.where(is_candidate, (slopes["candidate"] * dh)[..., None, :], dzh), dzh


class Rnn:
    """One gate: ``h = activation(zx + zh)``."""

    gates, states, stored = 1, 1, 1

    def __init__(self, activation: str | Callable[[Array], Array]):
        named = {"tanh": jnp.tanh, "relu": jax.nn.relu}
        self.activation = named[activation] if isinstance(activation, str) else activation

    def _apply(self, z: Array) -> Array:
        return self.activation(z).astype(z.dtype)

    def step(self, zx: Array, zh: Array, state: States) -> States:
        return (self._apply((zx + zh)[..., 0, :]),)

    def slopes(self, zx: Array, zh: Array, h_before: Array) -> dict[str, Array]:
        return {"z": (zx + zh)[..., 0, :]}

    def pull(self, slopes: dict[str, Array], dstate: States) -> tuple:
        _, pull = jax.vjp(self._apply, slopes["z"])
        (dz,) = lax.optimization_barrier(pull(dstate[0]))
        return dz, (dz,), (None,)

    def gate_gradients(self, slopes: dict[str, Array], stored: States) -> tuple[Array, Array]:
        return stored[0], stored[0]


def _lstm_tanh(z: Array) -> Array:
    return jnp.tanh(z * _column(0.5, 0.5, 1, 0.5, like=z))


def _gate_values(v: Array) -> tuple[Array, Array, Array, Array]:
    i, f, g, o = (v[..., k, :] for k in range(4))
    return i * 0.5 + 0.5, f * 0.5 + 0.5, g, o * 0.5 + 0.5


def _column(*factors: float, like: Array) -> Array:
    return jnp.asarray(factors, like.dtype)[:, None]


def _rows(*rows: Array) -> Array:
    """``[..., len(rows), H]``. A choice by index, because XLA's CPU code runs it in vectors, and a concatenation not."""
    index = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
    result = rows[-1][..., None, :]
    for k in reversed(range(len(rows) - 1)):
        result = jnp.where(index == k, rows[k][..., None, :], result)
    return result
