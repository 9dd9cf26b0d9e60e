"""What implementations of recurrent layers share: all that is not the loop over time.

A direction is one pass over the sequence. Its products with many steps are here: that of the inputs and weights before the
loop, and after a backward loop those that gates' gradients give to the inputs and to the weights. A kernel whose loop runs on
the device as a whole subclasses ``Direction`` and has nothing to add but that loop.

Such kernels see gates as *planes*, arrays of ``[batch, time, planes·H]`` before their activation: i, f, g, o of an LSTM; r, z and n
of a GRU, in the backward with n in two planes, what the state gives and then what the inputs give, for r multiplies the first
alone; one plane of a plain cell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels.common.precision import accumulator_dtype
from ejkernel.kernels.common.varying import full_beside

# By cell: the gates, and the states from step to step.
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
STATES = {"lstm": 2, "gru": 1, "rnn": 1}
# Planes of gates in a backward: a GRU's last gate has two parts.
PLANES = {"lstm": 4, "gru": 4, "rnn": 1}


def forward(spec: Any, direction: Callable[[int], Any]) -> tuple:
    """``((outputs [B, S, directions·H], final states each [B, directions, H]), cells [B, S, directions·H] or None)``.

    ``direction`` makes the one of an index; its ``forward`` returns outputs, final states and cells or None.
    """
    runs = [direction(index).forward() for index in range(len(spec.directions))]
    outputs, finals, kept = zip(*runs, strict=True)
    finals = tuple(jnp.stack(states, axis=1) for states in zip(*finals, strict=True))
    return (_join(outputs), finals), None if kept[0] is None else _join(kept)


def backward(
    arrays: dict[str, Any],
    spec: Any,
    direction: Callable[[int], Any],
    out: Any,
    residual: Any,
    dout: Any,
    wanted: frozenset[str],
) -> dict[str, Any]:
    """Gradients of inputs, hidden and weights.

    A direction's ``backward`` gets outputs, cells or None, their cotangents, those of the final states, and what is wanted. It returns
    the gradients of the inputs (None if not wanted), of the start states, and of the weights by their full names.
    """
    count = len(spec.directions)
    outputs, douts = _parts(out[0], count), _parts(dout[0], count)
    kept = [None] * count if residual is None else _parts(residual, count)
    dinputs, dhidden, dweights = None, [], {}
    for index in range(count):
        dfinal = tuple(state[:, index] for state in dout[1])
        dx, dstates, dw = direction(index).backward(outputs[index], kept[index], douts[index], dfinal, wanted)
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


class Direction:
    """One pass over the sequence, from its start or from its end.

    Attributes:
        inputs: ``[B, S, I]``, zeros past the end of each sequence: padding may hold anything, NaN included.
        weights: without the axis in front, by the names of the first direction.
        start: the states to start from, each ``[B, H]`` in the accumulators' dtype.
        lengths: int32 ``[B]``, or None.
        from_end: whether the pass runs from the end.
        precision: of the products of many steps. Float32 itself, unless a kernel says what its device has for it.
    """

    precision: lax.PrecisionLike = lax.Precision.HIGHEST

    def __init__(self, arrays: dict[str, Any], spec: Any, index: int):
        inputs = arrays["inputs"]
        self.like, self.dtype = inputs, inputs.dtype
        self.acc = accumulator_dtype(inputs)
        self.batch, self.steps, _ = inputs.shape
        self.spec, self.from_end = spec, spec.directions[index]
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
            self.start = (self.zeros((self.batch, self.hidden)),) * STATES[spec.cell]
        self.inputs = self.blank(inputs)

    def zeros(self, shape: tuple[int, ...], dtype: Any = None) -> Array:
        """Zeros in the accumulators' dtype, to be a loop's carry."""
        return full_beside(self.like, shape, 0, dtype or self.acc)

    def blank(self, array: Array) -> Array:
        """``[B, S, ...]`` with zeros past the end of each sequence."""
        if self.lengths is None:
            return array
        alive = jnp.arange(self.steps, dtype=jnp.int32) < self.lengths[:, None]
        return jnp.where(jnp.expand_dims(alive, tuple(range(2, array.ndim))), array, 0)

    def before(self, array: Array, start: Array) -> Array:
        """The states that each step started from, ``[B, S, H]``, given those it ended with."""
        start = start.astype(array.dtype)[:, None]
        if not self.from_end:
            return jnp.concatenate([start, array[:, :-1]], axis=1)
        shifted = jnp.concatenate([array[:, 1:], start], axis=1)
        if self.lengths is None:
            return shifted
        last = jnp.arange(self.steps, dtype=jnp.int32) == self.lengths[:, None] - 1
        return jnp.where(last[..., None], start, shifted)

    def projected(self) -> Array:
        """What the inputs and every bias give to the gates, ``[B, S, gates·H]``; a GRU's n without ``state_bias``."""
        bias = self._bias("bias_ih")
        from_state = self._bias("bias_hh")
        if self.spec.cell == "gru":
            from_state = from_state.at[2 * self.hidden :].set(0)
        return self._dot(self.inputs, self.weights["weight_ih"], -1) + (bias + from_state)

    def state_bias(self) -> Array:
        """A GRU's bias of what the state gives to n, ``[H]``."""
        return self._bias("bias_hh")[2 * self.hidden :]

    def planes(self, h_before: Array) -> Array:
        """The gates again, ``[B, S, planes·H]``, from the hidden states that steps started from."""
        if self.spec.cell != "gru":
            rows = jnp.concatenate([self.inputs, h_before], axis=-1)
            matrix = jnp.concatenate([self.weights["weight_ih"], self.weights["weight_hh"]], axis=-1)
            return self._dot(rows, matrix, -1) + (self._bias("bias_ih") + self._bias("bias_hh"))
        two = 2 * self.hidden
        zx = self._dot(self.inputs, self.weights["weight_ih"], -1) + self._bias("bias_ih")
        zh = self._dot(h_before, self.weights["weight_hh"], -1) + self._bias("bias_hh")
        return jnp.concatenate([zx[..., :two] + zh[..., :two], zh[..., two:], zx[..., two:]], axis=-1)

    def through_planes(self, dplanes: Array, h_before: Array, wanted: frozenset[str]) -> tuple:
        """The gradients of the inputs (None if not wanted) and of the weights by their full names.

        Args:
            dplanes: gradients of ``planes``, ``[B, S, planes·H]``, zeros past the end of each sequence.
            h_before: the hidden states that steps started from, ``[B, S, H]``.
            wanted: names of arguments.
        """
        two, three = 2 * self.hidden, 3 * self.hidden
        gru = self.spec.cell == "gru"
        from_inputs = jnp.concatenate([dplanes[..., :two], dplanes[..., three:]], axis=-1) if gru else dplanes
        from_state = dplanes[..., :three] if gru else dplanes
        dinputs = None
        if "inputs" in wanted:
            dinputs = self._dot(from_inputs.astype(self.dtype), self.weights["weight_ih"], 0)
        grads = {}
        for name, dz, factor in (("ih", from_inputs, self.inputs), ("hh", from_state, h_before)):
            if "weights" in wanted:
                grads[f"weight_{name}{self.suffix}"] = self._over_rows(dz.astype(self.dtype), factor)
                if f"bias_{name}" in self.weights:
                    grads[f"bias_{name}{self.suffix}"] = dz.sum((0, 1), dtype=self.acc)
        return dinputs, grads

    def _dot(self, a: Array, b: Array, contract_b: int) -> Array:
        return dot(a, b, contract_b, self.acc, self.precision)

    def _over_rows(self, a: Array, b: Array) -> Array:
        """``[features of a, features of b]``, summed over batch and time of both."""
        return _product(a, b, (((0, 1), (0, 1)), ((), ())), self.acc, self.precision)

    def _bias(self, name: str) -> Array:
        """A bias in the accumulators' dtype, zeros where there is none."""
        if name in self.weights:
            return self.weights[name].astype(self.acc)
        return self.zeros((GATES[self.spec.cell] * self.hidden,))


def dot(a: Array, b: Array, contract_b: int, dtype: Any, precision: lax.PrecisionLike = lax.Precision.HIGHEST) -> Array:
    """The product over the last axis of ``a``; half precision needs no ``precision``."""
    dims = (((a.ndim - 1,), (contract_b % b.ndim,)), ((), ()))
    return _product(a, b, dims, dtype, precision)


def _product(a: Array, b: Array, dims: Any, dtype: Any, precision: lax.PrecisionLike) -> Array:
    wide = a.dtype.itemsize >= 4
    return lax.dot_general(a, b, dims, precision=precision if wide else None, preferred_element_type=dtype)


def _join(parts: Any) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _parts(array: Array, count: int) -> list[Array]:
    return [array] if count == 1 else jnp.split(array, count, axis=-1)
