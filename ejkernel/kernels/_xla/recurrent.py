"""Recurrent layers in plain XLA: one loop over time with nothing in it that can be done for all steps at once.

Forward, the products of inputs and weights are one matmul before the loop. Backward, the forward's states are all there,
so the gates of every step come back from two matmuls, and the loop keeps one product a step: that of the gates' gradients
with the recurrent weights. The weights' gradients are one matmul each after it. Arrays keep their layout ``[batch, time,
features]``: a step reads and writes rows, and a batch that is spread over devices stays where it is.

Dimension names: ``b`` batch, ``t`` time, ``g`` gates times hidden, ``h`` hidden. What each cell computes is in ``cells.py``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels._xla import cells
from ejkernel.kernels.varying import vary_over, varying_axes
from ejkernel.ops.core.registry import kernel_registry
from ejkernel.ops.core.support import ALL_FLOATS, Backend, Platform, Support, any_device


def forward(arrays: dict[str, Any], spec: Any, params: Any) -> tuple:
    """``((outputs [B, S, directions·H], final states each [B, directions, H]), cells [B, S, directions·H] or None)``."""
    runs = [_Direction(arrays, spec, index).forward() for index in range(len(spec.directions))]
    outputs, finals, kept = zip(*runs, strict=True)
    finals = tuple(jnp.stack(states, axis=1) for states in zip(*finals, strict=True))
    return (_join(outputs), finals), None if kept[0] is None else _join(kept)


def backward(
    arrays: dict[str, Any],
    spec: Any,
    params: Any,
    out: Any,
    residual: Any,
    dout: Any,
    dresidual: Any,
    wanted: frozenset[str],
) -> dict[str, Any]:
    """Gradients of inputs, hidden and weights, from the outputs and the LSTM's cells."""
    count = len(spec.directions)
    outputs, douts = _parts(out[0], count), _parts(dout[0], count)
    kept = [None] * count if residual is None else _parts(residual, count)
    dinputs, dhidden, dweights = None, [], {}
    for index in range(count):
        direction = _Direction(arrays, spec, index)
        dfinal = tuple(state[:, index] for state in dout[1])
        dx, dstates, dw = direction.backward(outputs[index], kept[index], douts[index], dfinal, wanted)
        dinputs = dx if dinputs is None else dinputs + dx
        dhidden.append(dstates)
        dweights.update(dw)
    grads: dict[str, Any] = {}
    if "inputs" in wanted:
        grads["inputs"] = dinputs.astype(arrays["inputs"].dtype)
    if "hidden" in wanted:
        stacked = (jnp.stack(states, axis=1) for states in zip(*dhidden, strict=True))
        grads["hidden"] = jax.tree.map(lambda new, like: new.astype(like.dtype), tuple(stacked), arrays["hidden"])
    if "weights" in wanted:
        grads["weights"] = {name: dweights[name][None].astype(w.dtype) for name, w in arrays["weights"].items()}
    return grads


class _Direction:
    """One pass over the sequence, from its start or from its end."""

    def __init__(self, arrays: dict[str, Any], spec: Any, index: int):
        inputs = arrays["inputs"]
        self.dtype = inputs.dtype
        self.acc = jnp.float64 if self.dtype == jnp.float64 else jnp.float32
        self.axes = varying_axes(inputs)
        self.batch, self.steps, _ = inputs.shape
        self.from_end = spec.directions[index]
        self.cell = cells.make(spec)
        self.lengths = arrays["lengths"] if "lengths" in arrays else None
        self.suffix = "_reverse" if index else ""
        self.weights = {
            name.removesuffix(self.suffix): w[0]
            for name, w in arrays["weights"].items()
            if name.endswith("_reverse") == bool(index)
        }
        self.hidden = self.weights["weight_hh"].shape[1]
        self.start = tuple(state[:, index].astype(self.acc) for state in arrays.get("hidden", ()))
        if not self.start:
            self.start = (self.zeros((self.batch, self.hidden)),) * self.cell.states
        # Padding may hold anything, NaN included.
        self.inputs = self.blank(inputs)

    def zeros(self, shape: tuple[int, ...], dtype: Any = None) -> Array:
        """Zeros that vary over the mesh axes the inputs vary over, as a loop's carry under ``shard_map`` must."""
        return vary_over(jnp.zeros(shape, dtype or self.acc), self.axes)

    def blank(self, array: Array) -> Array:
        """``[B, S, ...]`` with zeros past the end of each sequence."""
        if self.lengths is None:
            return array
        alive = jnp.arange(self.steps, dtype=jnp.int32) < self.lengths[:, None]
        return jnp.where(jnp.expand_dims(alive, tuple(range(2, array.ndim))), array, 0)

    def bias(self, name: str) -> Array | int:
        return self.weights[name].astype(self.acc) if name in self.weights else 0

    def gates(self, projected: Array, bias: str) -> Array:
        """A projection with its bias, one gate a row: ``[..., gates, H]``."""
        return (projected + self.bias(bias)).reshape(*projected.shape[:-1], self.cell.gates, self.hidden)

    def time(self, step: Array, *, backward: bool = False) -> Array:
        """The position that a step of the loop treats."""
        return self.steps - 1 - step if self.from_end != backward else step

    def only_alive(self, t: Array, new: tuple[Array, ...], old: tuple[Array, ...]) -> tuple[Array, ...]:
        """The new states of the sequences that have not ended at ``t``, the old ones of the others."""
        if self.lengths is None:
            return new
        alive = (t < self.lengths)[:, None]
        return tuple(jnp.where(alive, n, o) for n, o in zip(new, old, strict=True))

    def forward(self) -> tuple:
        """Outputs, final states and, for an LSTM, the cell of every step."""
        zx = _dot(self.inputs, self.weights["weight_ih"], -1, self.acc)
        # The transpose is made once: folded into the loop's product it costs a fifth of the time (CPU, jax 0.10).
        w_hh = lax.optimization_barrier(self.weights["weight_hh"].T)

        def step(i, carry):
            state, outputs, kept = carry
            t = self.time(i)
            zh = _dot(state[0].astype(self.dtype), w_hh, 0, self.acc)
            new = self.cell.step(self.gates(_at(zx, t), "bias_ih"), self.gates(zh, "bias_hh"), state)
            (shown,) = self.only_alive(t, new[:1], (jnp.zeros_like(new[0]),))
            new = self.only_alive(t, new, state)
            outputs = _put(outputs, shown.astype(self.dtype), t)
            return new, outputs, tuple(_put(k, s, t) for k, s in zip(kept, new[1:], strict=True))

        rows = (self.batch, self.steps, self.hidden)
        kept = tuple(self.zeros(rows) for _ in self.start[1:])
        state, outputs, kept = _loop(self.steps, step, (self.start, self.zeros(rows, self.dtype), kept))
        return outputs, tuple(s.astype(self.dtype) for s in state), kept[0] if kept else None

    def before(self, array: Array, start: Array) -> Array:
        """The states that each step started from, given those it ended with."""
        start = start.astype(array.dtype)[:, None]
        if not self.from_end:
            return jnp.concatenate([start, array[:, :-1]], axis=1)
        shifted = jnp.concatenate([array[:, 1:], start], axis=1)
        if self.lengths is None:
            return shifted
        last = jnp.arange(self.steps, dtype=jnp.int32) == self.lengths[:, None] - 1
        return jnp.where(last[..., None], start, shifted)

    def backward(
        self, outputs: Array, kept: Array | None, dout: Array, dfinal: tuple[Array, ...], wanted: frozenset[str]
    ) -> tuple:
        """Gradients of the inputs (None if not wanted), of the start states, and of the weights by their full names."""
        h_before = self.before(outputs, self.start[0])
        zx = self.gates(_dot(self.inputs, self.weights["weight_ih"], -1, self.acc), "bias_ih")
        zh = self.gates(_dot(h_before, self.weights["weight_hh"], -1, self.acc), "bias_hh")
        states = (h_before.astype(self.acc),) if kept is None else (self.before(kept, self.start[1]), kept)
        slopes = self.cell.slopes(zx, zh, *states)
        dout = self.blank(dout.astype(self.acc))

        def step(i, carry):
            dstate, stored = carry
            t = self.time(i, backward=True)
            now = jax.tree.map(lambda x: _at(x, t), slopes)
            given = (dstate[0] + _at(dout, t), *dstate[1:])
            dz, store, rest = self.cell.pull(now, given)
            through = _dot(dz.reshape(self.batch, -1).astype(self.dtype), self.weights["weight_hh"], 0, self.acc)
            before = (through if rest[0] is None else through + rest[0], *rest[1:])
            stored = tuple(_put(buffer, x, t) for buffer, x in zip(stored, store, strict=True))
            return self.only_alive(t, before, dstate), stored

        rows = (self.batch, self.steps, self.hidden)
        stored = tuple(self.zeros(rows) for _ in range(self.cell.stored))
        dfinal = tuple(d.astype(self.acc) for d in dfinal)
        dstart, stored = _loop(self.steps, step, (dfinal, stored))
        dzx, dzh = (
            self.blank(dz).reshape(self.batch * self.steps, -1) for dz in self.cell.gate_gradients(slopes, stored)
        )
        dinputs = self._input_gradient(dzx) if "inputs" in wanted else None
        return dinputs, dstart, self._weight_gradients(dzx, dzh, h_before) if "weights" in wanted else {}

    def _input_gradient(self, dzx: Array) -> Array:
        dx = _dot(dzx.astype(self.dtype), self.weights["weight_ih"], 0, self.acc)
        return self.blank(dx.reshape(self.inputs.shape))

    def _weight_gradients(self, dzx: Array, dzh: Array, h_before: Array) -> dict[str, Array]:
        grads = {"weight_ih": self._outer(dzx, self.inputs), "weight_hh": self._outer(dzh, h_before)}
        for name, dz in (("bias_ih", dzx), ("bias_hh", dzh)):
            if name in self.weights:
                grads[name] = dz.sum(0)
        return {name + self.suffix: grad for name, grad in grads.items()}

    def _outer(self, dz: Array, left: Array) -> Array:
        """``[g, features]``, summed over all steps.

        The smaller factor is transposed, and the result: barriers keep XLA from making one product of it that contracts the
        first axis of both, which a CPU runs at half speed.
        """
        flat = lax.optimization_barrier(left.reshape(self.batch * self.steps, -1).T)
        return lax.optimization_barrier(_dot(flat, dz.astype(self.dtype), 0, self.acc)).T


def _dot(a: Array, b: Array, contract_b: int, dtype: Any) -> Array:
    """The product over the last axis of ``a``."""
    precision = lax.Precision.HIGHEST if a.dtype.itemsize >= 4 else None
    dims = (((a.ndim - 1,), (contract_b % b.ndim,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=dtype)


def _at(array: Array, t: Array) -> Array:
    return lax.dynamic_index_in_dim(array, t, axis=1, keepdims=False)


def _put(array: Array, row: Array, t: Array) -> Array:
    return lax.dynamic_update_index_in_dim(array, row, t, axis=1)


def _join(parts: Any) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _parts(array: Array, count: int) -> list[Array]:
    return [array] if count == 1 else jnp.split(array, count, axis=-1)


def _loop(steps: int, body, carry):
    return lax.fori_loop(jnp.int32(0), jnp.int32(steps), body, carry)


class XlaRecurrent:
    """The implementation for every device."""

    version = 1
    forward = staticmethod(forward)
    backward = staticmethod(backward)


kernel_registry.register(
    "recurrent",
    Platform.XLA,
    Backend.ANY,
    support=Support(
        devices=any_device(),
        dtypes=ALL_FLOATS,
        features={"lstm", "gru", "rnn", "hidden", "lengths", "bidirectional", "reverse", "activation"},
        gradients={"inputs", "hidden", "weights"},
    ),
)(XlaRecurrent)
