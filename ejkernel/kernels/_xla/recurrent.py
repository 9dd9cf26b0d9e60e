"""Recurrent layers in plain XLA: a loop over time with nothing in it that can be done for many steps at once.

Forward, the products of inputs and weights are one matmul before the loop. Backward, the forward's states are all there: so
the gates of many steps come back from one matmul, and a step keeps one product, that of the gates' gradients with the
recurrent weights. What those gradients give to the inputs and to the weights is one matmul each for as many steps. They
are as many as make ``ROWS_PER_CHUNK`` rows with the batch, all of a short sequence, so that gates and their gradients stay in a CPU's
caches and never take memory for the whole sequence.

Arrays keep their layout ``[batch, time, features]``: a step reads and writes rows, and a batch that is spread over devices
stays where it is. Dimension names: ``g`` is gates times hidden, ``h`` hidden. What each cell computes is in ``cells.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.contracts.registry import kernel_registry
from ejkernel.contracts.support import ALL_FLOATS, Backend, Platform, Support, any_device
from ejkernel.kernels._xla import cells
from ejkernel.kernels._xla.bits import from_bits, to_bits
from ejkernel.kernels._xla.primitives import loop
from ejkernel.kernels.common import recurrent as common
from ejkernel.kernels.common.recurrent import dot

# Rows of a product over many steps in the backward: enough to use every core, few enough to stay in the caches.
ROWS_PER_CHUNK = 1024


def forward(arrays: dict[str, Any], spec: Any, params: Any) -> tuple:
    """``((outputs [B, S, directions·H], final states each [B, directions, H]), cells [B, S, directions·H] or None)``."""
    return common.forward(spec, lambda index: _Direction(arrays, spec, index))


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
    return common.backward(arrays, spec, lambda index: _Direction(arrays, spec, index), out, residual, dout, wanted)


class _Direction(common.Direction):
    """A pass whose loop is XLA's."""

    def __init__(self, arrays: dict[str, Any], spec: Any, index: int):
        super().__init__(arrays, spec, index)
        self.cell = cells.make(spec)

    def gates(self, projected: Array, bias: Array | None, t: Array | None = None) -> tuple[Array, ...]:
        """The gates of a projection ``[..., g]`` with its bias, each ``[..., H]``; given ``t``, of that step alone.

        Each is sliced out on its own: XLA's CPU code for slices of one step's slice takes five times as long (jax 0.10).
        """
        size, result = self.cell.gates * self.hidden // self.cell.parts, []
        for first in range(0, self.cell.parts * size, size):
            if t is None:
                gate = projected[..., first : first + size]
            else:
                at = (jnp.int32(0), t, jnp.int32(first))
                gate = lax.dynamic_slice(projected, at, (self.batch, 1, size))[:, 0]
            result.append(gate if bias is None else gate + bias[first : first + size].astype(self.acc))
        return tuple(result)

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
        zx = dot(self.inputs, self.weights["weight_ih"], -1, self.acc)
        # The transpose is made once: folded into the loop's product it costs a fifth of the time (CPU, jax 0.10).
        w_hh = lax.optimization_barrier(self.weights["weight_hh"].T)

        def step(i, carry):
            state, outputs, kept = carry
            t = self.time(i)
            zh = dot(state[0].astype(self.dtype), w_hh, 0, self.acc)
            gates = self.gates(zx, self.weights.get("bias_ih"), t), self.gates(zh, self.weights.get("bias_hh"))
            if self.cell.additive:
                gates = (tuple(x + h for x, h in zip(*gates, strict=True)),)
            new = self.cell.step(*gates, state)
            (shown,) = self.only_alive(t, new[:1], (jnp.zeros_like(new[0]),))
            new = self.only_alive(t, new, state)
            outputs = _put(outputs, to_bits(shown.astype(self.dtype)), t)
            return new, outputs, tuple(_put(k, s, t) for k, s in zip(kept, new[1:], strict=True))

        rows = (self.batch, self.steps, self.hidden)
        kept = tuple(self.zeros(rows) for _ in self.start[1:])
        start = (self.start, to_bits(self.zeros(rows, self.dtype)), kept)
        state, outputs, kept = loop(self.steps, step, start)
        return from_bits(outputs, self.dtype), tuple(s.astype(self.dtype) for s in state), kept[0] if kept else None

    def cell_before(self, kept: Array, t: Array) -> Array:
        """The cell that step ``t`` started from."""
        earlier, first = (t + 1, self.steps - 1) if self.from_end else (t - 1, 0)
        return jnp.where(t == first, self.start[1], _at(kept, jnp.clip(earlier, 0, self.steps - 1)))

    def backward(
        self, outputs: Array, kept: Array | None, dout: Array, dfinal: tuple[Array, ...], wanted: frozenset[str]
    ) -> tuple:
        """Gradients of the inputs (None if not wanted), of the start states, and of the weights by their full names.

        In chunks of steps, last to first: the gates of a chunk again, then its steps, then what its gates give to the gradients.
        """
        h_before = self.before(outputs, self.start[0])
        dout = self.blank(dout)
        project, biases = self._gates_again(h_before)
        size = min(self.steps, -(-ROWS_PER_CHUNK // self.batch))

        def chunk(k, carry):
            dstate, grads = carry
            first = k * size
            last = jnp.minimum(first + size, self.steps)
            # The last chunk reaches back to have all of its rows; those that were treated before stay 0.
            begin = jnp.clip(first if self.from_end else self.steps - first - size, 0, self.steps - size)
            zs = project(begin, size)

            def step(i, carry):
                dstate, dzs = carry
                t = self.time(i, backward=True)
                before = (_at(h_before, t).astype(self.acc),)
                if kept is not None:
                    before += (self.cell_before(kept, t),)
                gates = (self.gates(z, bias, t - begin) for z, bias in zip(zs, biases, strict=True))
                _, pull = jax.vjp(self.cell.step, *gates, before)
                *dgates, rest = pull((dstate[0] + _at(dout, t).astype(self.acc), *dstate[1:]))
                new = tuple(jnp.concatenate(dz, axis=-1) for dz in dgates)
                through = dot(new[-1].astype(self.dtype), self.weights["weight_hh"], 0, self.acc)
                new = self.only_alive(t, new, tuple(jnp.zeros_like(dz) for dz in new))
                dzs = tuple(_put(buffer, dz, t - begin) for buffer, dz in zip(dzs, new, strict=True))
                return self.only_alive(t, (rest[0] + through, *rest[1:]), dstate), dzs

            start = (dstate, tuple(self.zeros(z.shape) for z in zs))
            dstate, dzs = lax.fori_loop(first, last, step, start)
            return dstate, self._add_chunk(grads, dzs, h_before, begin)

        grads = {name: self.zeros(shape) for name, shape in self._gradient_shapes(wanted).items()}
        dfinal = tuple(d.astype(self.acc) for d in dfinal)
        dstart, grads = loop(-(-self.steps // size), chunk, (dfinal, grads))
        dinputs = grads.pop("inputs", None)
        return dinputs, dstart, {name + self.suffix: grad for name, grad in grads.items()}

    def _gradient_shapes(self, wanted: frozenset[str]) -> dict[str, tuple[int, ...]]:
        shapes = {name: w.shape for name, w in self.weights.items()} if "weights" in wanted else {}
        return {**shapes, "inputs": self.inputs.shape} if "inputs" in wanted else shapes

    def _add_chunk(
        self, grads: dict[str, Array], dzs: tuple[Array, ...], h_before: Array, begin: Array
    ) -> dict[str, Array]:
        """The gradients with those of a chunk of steps, from its gates' gradients."""
        size = dzs[0].shape[1]
        flat = [dz.reshape(self.batch * size, -1) for dz in dzs]
        halves = [dz.astype(self.dtype) for dz in flat]
        grads = dict(grads)
        if "inputs" in grads:
            dx = dot(halves[0], self.weights["weight_ih"], 0, self.acc).reshape(self.batch, size, -1)
            old = lax.dynamic_slice_in_dim(grads["inputs"], begin, size, axis=1)
            grads["inputs"] = lax.dynamic_update_slice_in_dim(grads["inputs"], old + dx, begin, axis=1)
        for name, index, factor in (("ih", 0, self.inputs), ("hh", -1, h_before)):
            if f"weight_{name}" in grads:
                left = lax.dynamic_slice_in_dim(factor, begin, size, axis=1).reshape(self.batch * size, -1)
                grads[f"weight_{name}"] += _outer(halves[index], left, self.acc)
            if f"bias_{name}" in grads:
                grads[f"bias_{name}"] += flat[index].sum(0)
        return grads

    def _gates_again(self, h_before: Array) -> tuple[Callable, list[Array | None]]:
        """A function that gives the gates of some steps, without their biases, and these: one product if only the sum counts."""
        factors = [self.inputs, h_before]
        matrices, biases = (
            [self.weights.get(name) for name in group] for group in (("weight_ih", "weight_hh"), ("bias_ih", "bias_hh"))
        )
        if self.cell.additive:
            matrices = [jnp.concatenate(matrices, axis=-1)]
            given = [bias.astype(self.acc) for bias in biases if bias is not None]
            biases = [sum(given) if given else None]

        def project(begin, size):
            rows = [lax.dynamic_slice_in_dim(factor, begin, size, axis=1) for factor in factors]
            if self.cell.additive:
                rows = [jnp.concatenate(rows, axis=-1)]
            return [dot(row, matrix, -1, self.acc) for row, matrix in zip(rows, matrices, strict=True)]

        return project, biases


def _outer(dz: Array, left: Array, dtype: Any) -> Array:
    """``[g, features]``, summed over the rows of both.

    The smaller factor is transposed, and the result: barriers keep XLA from making one product of it that contracts the
    first axis of both, which a CPU runs at half speed.
    """
    return lax.optimization_barrier(dot(lax.optimization_barrier(left.T), dz, 0, dtype)).T


def _at(array: Array, t: Array) -> Array:
    return lax.dynamic_index_in_dim(array, t, axis=1, keepdims=False)


def _put(array: Array, row: Array, t: Array) -> Array:
    return lax.dynamic_update_index_in_dim(array, row, t, axis=1)


class XlaRecurrent:
    """The implementation for every device."""

    name = "recurrent-xla"
    version = 1
    reads: ClassVar = {"forward": (), "backward": ()}
    forward = staticmethod(forward)
    backward = staticmethod(backward)


kernel_registry.register(
    "recurrent",
    Platform.XLA,
    Backend.ANY,
    support=Support(
        devices=any_device(),
        dtypes=ALL_FLOATS,
        features={"lstm", "gru", "rnn", "hidden", "lengths", "bidirectional", "reverse", "activation", "function"},
        gradients={"inputs", "hidden", "weights"},
    ),
)(XlaRecurrent)
