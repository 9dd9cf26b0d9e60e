"""Recurrent layers in CUDA: the loop over time is one launch, whose CTAs meet at a barrier in every step.

Each CTA owns units for a part of the batch and keeps their recurrent weights on its multiprocessor for all steps. A step reads the
hidden states of all units (backward: the gradients of all gates) that the step before left in the second-level cache. Weights are in the
inputs' dtype, sums and states in float32. All that is not the loop is in ``kernels/common/recurrent.py``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import BwdParams, FwdParams, params_class
from ejkernel.contracts.registry import kernel_registry
from ejkernel.contracts.support import FLOATS, Backend, Platform, Support, cuda
from ejkernel.errors import UnsupportedError
from ejkernel.kernels._cuda import call
from ejkernel.kernels._cuda.recurrent_plan import (
    BLOCK_BATCH,
    BLOCK_UNITS,
    WARPS,
    Plan,
    Problem,
    host_nans,
    packed,
    plan,
)
from ejkernel.kernels.common import recurrent as common
from ejkernel.kernels.common.recurrent import GATES, PLANES

READ: dict[str, tuple[str, ...]] = {
    "forward": ("blocksize_m", "blocksize_n"),
    "backward": ("blocksize_m", "blocksize_n"),
}
ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2}
CELLS = {("lstm", "tanh"): 0, ("gru", "tanh"): 1, ("rnn", "tanh"): 2, ("rnn", "relu"): 3}
# Rows of states are read in 16 bytes.
ALIGNED = 8


def forward(arrays: dict[str, Any], spec: Any, params: FwdParams, *, device: DeviceInfo | None = None) -> tuple:
    """``((outputs [B, S, directions·H], final states each [B, directions, H]), cells [B, S, directions·H] or None)``."""
    return common.forward(spec, lambda index: _Direction(arrays, spec, index, params, device))


def backward(
    arrays: dict[str, Any],
    spec: Any,
    params: BwdParams,
    out: Any,
    residual: Any,
    dout: Any,
    dresidual: Any,
    wanted: frozenset[str],
    device: DeviceInfo | None = None,
) -> dict[str, Any]:
    """Gradients of inputs, hidden and weights, from the outputs and the LSTM's cells."""
    return common.backward(
        arrays, spec, lambda index: _Direction(arrays, spec, index, params, device), out, residual, dout, wanted
    )


class _Direction(common.Direction):
    """A pass whose loop is a launch. Hidden sizes that are no multiples of 8 are padded with units that stay 0."""

    def __init__(self, arrays: dict[str, Any], spec: Any, index: int, params: Any, device: DeviceInfo | None):
        super().__init__(arrays, spec, index)
        self.params, self.device = params, device
        # Float32 as in the loop: three products of the tensor cores.
        self.precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        self.padded = -(-self.hidden // ALIGNED) * ALIGNED
        self.alive = self.lengths
        if self.alive is None:
            self.alive = jnp.full((self.batch,), self.steps, jnp.int32)

    def forward(self) -> tuple:
        """Outputs, final states and, for an LSTM, the cell of every step."""
        gates, lstm = GATES[self.spec.cell], self.spec.cell == "lstm"
        nothing = self.zeros((1,))
        rows, kept = (self.batch, self.steps, self.padded), jnp.float32
        outputs, cells, exchange, _ = self._launch(
            "forward",
            [
                self._wide(self.projected(), gates),
                self._wide(self.state_bias()) if self.spec.cell == "gru" else nothing,
                self._weights("forward"),
                self._wide(host_nans(self.start[0].astype(self.dtype))),
                self._wide(self.start[1]) if lstm else nothing,
                self.alive,
            ],
            [
                jax.ShapeDtypeStruct(rows, self.dtype),
                jax.ShapeDtypeStruct(rows if lstm else (1,), kept),
                jax.ShapeDtypeStruct((2, self.batch, self.padded), self.dtype),
            ],
        )
        last = 0 if self.from_end else self.steps - 1
        finals = (self._narrow(exchange[(self.steps - 1) % 2]),)
        if not lstm:
            return self._narrow(outputs), finals, None
        cells = self._narrow(cells)
        return self._narrow(outputs), (*finals, cells[:, last].astype(self.dtype)), cells

    def backward(
        self, outputs: Array, kept: Array | None, dout: Array, dfinal: tuple[Array, ...], wanted: frozenset[str]
    ) -> tuple:
        """Gradients of the inputs (None if not wanted), of the start states, and of the weights by their full names."""
        cell, planes = self.spec.cell, PLANES[self.spec.cell]
        nothing = self.zeros((1,))
        h_before = self.before(outputs, self.start[0])
        before = {"lstm": lambda: self.before(kept, self.start[1]), "gru": lambda: h_before}.get(cell)
        state = jax.ShapeDtypeStruct((self.batch, self.padded), jnp.float32)
        dplanes, dh, dc, _ = self._launch(
            "backward",
            [
                self._wide(self.planes(h_before), planes),
                self._wide(before()) if before else nothing.astype(self.dtype),
                self._weights("backward"),
                self._wide(dout),
                self._wide(dfinal[0].astype(jnp.float32)),
                self._wide(dfinal[1].astype(jnp.float32)) if cell == "lstm" else nothing,
                self.alive,
            ],
            [
                jax.ShapeDtypeStruct((self.batch, self.steps, planes * self.padded), self.dtype),
                state,
                state if cell == "lstm" else jax.ShapeDtypeStruct((1,), jnp.float32),
            ],
        )
        dinputs, grads = self.through_planes(self._narrow(dplanes, planes), h_before, wanted)
        dstart = (self._narrow(dh), self._narrow(dc)) if cell == "lstm" else (self._narrow(dh),)
        return dinputs, dstart, grads

    def _launch(self, direction: str, operands: list[Array], results: list[jax.ShapeDtypeStruct]) -> list[Array]:
        """Run the loop; what counts arrivals at the barriers is behind the results."""
        chosen = self._plan(direction)
        macros = {
            **chosen.macros(),
            "ELEMENT": ELEMENTS[self.dtype.name],
            "CELL": CELLS[self.spec.cell, self.spec.activation],
            "GATES": chosen.problem.gates,
        }
        if direction == "backward":
            macros |= {"PLANES": PLANES[self.spec.cell], "LENGTH": chosen.problem.length}
        return call.launch(
            f"recurrent_{direction}.cu",
            f"recurrent_{direction}",
            macros,
            operands,
            [*results, jax.ShapeDtypeStruct((chosen.tiles,), jnp.uint32)],
            [self.batch, self.steps, self.from_end, chosen.groups, chosen.passes, chosen.groups],
            call.Launch(chosen.grid, 32 * WARPS, chosen.shared_memory, cooperative=True),
            zeroed=1,
            device=self.device,
        )

    def _weights(self, direction: str) -> Array:
        gates = GATES[self.spec.cell]
        missing = self.padded - self.hidden
        weights = self.weights["weight_hh"].reshape(gates, self.hidden, self.hidden)
        weights = jnp.pad(weights, ((0, 0), (0, missing), (0, missing)))
        if direction == "backward":
            weights = weights.reshape(gates * self.padded, self.padded).T[None]
        return packed(weights, self._plan(direction))

    def _plan(self, direction: str) -> Plan:
        problem = _problem(self.spec.cell, direction, self.padded, self.batch, self.dtype.itemsize)
        return plan(problem, call.capacity(self.device), **_tile(self.params))

    def _wide(self, array: Array, planes: int = 1) -> Array:
        """With each plane padded to whole 16 bytes."""
        if self.padded == self.hidden:
            return array
        apart = array.reshape(*array.shape[:-1], planes, self.hidden)
        pads = [(0, 0)] * (apart.ndim - 1) + [(0, self.padded - self.hidden)]
        return jnp.pad(apart, pads).reshape(*array.shape[:-1], planes * self.padded)

    def _narrow(self, array: Array, planes: int = 1) -> Array:
        """Without the padding."""
        if self.padded == self.hidden:
            return array
        apart = array.reshape(*array.shape[:-1], planes, self.padded)[..., : self.hidden]
        return apart.reshape(*array.shape[:-1], planes * self.hidden)


def _problem(cell: str, direction: str, hidden: int, batch: int, itemsize: int) -> Problem:
    gates = GATES[cell]
    if direction == "forward":
        return Problem(gates, hidden, hidden, batch, itemsize)
    # The gradients of a state's units, from those of all gates: the transposed weights.
    return Problem(1, hidden, gates * hidden, batch, itemsize)


def _tile(params: Any) -> dict[str, int | None]:
    return {"units": params.blocksize_n or None, "entries": params.blocksize_m or None}


def _planned(shapes: dict[str, Any], spec: Any, params: Any, device: DeviceInfo | None, direction: str) -> Plan:
    inputs, weights = shapes["inputs"], shapes["weights"]["weight_hh"]
    hidden = -(-weights.shape[-1] // ALIGNED) * ALIGNED
    problem = _problem(spec.cell, direction, hidden, inputs.shape[0], inputs.dtype.itemsize)
    return plan(problem, call.capacity(device), **_tile(params))


class CudaRecurrent:
    """The implementation for NVIDIA GPUs. ``blocksize_m`` is a CTA's tile of the batch, ``blocksize_n`` its units."""

    name = "recurrent-cuda"
    version = 1
    reads: ClassVar = READ
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Tiles where nothing was tuned: those of the plan."""
        return CudaRecurrent.effective(shapes, spec, params_class(direction)(), device, direction)

    @staticmethod
    def handicap(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> int:
        """Below Triton's where a CTA goes over the batch several times a step; that has larger tiles in half precision."""
        if device.vendor != "nvidia":
            return 0
        try:
            passes = _planned(shapes, spec, params_class(direction)(), device, direction).passes
        except UnsupportedError:
            return call.PRIORITY + 1
        return call.BELOW_TRITON if passes > 1 and shapes["inputs"].dtype.itemsize == 2 else 0

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
        """Tiles worth trying."""
        make = params_class(direction)
        asked = [make(blocksize_m=m, blocksize_n=n) for m in (8, 16, 32) for n in (16, 32)]
        return list(dict.fromkeys(CudaRecurrent.effective(shapes, spec, p, device, direction) for p in asked))

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The parameters as the plan has them."""
        chosen = _planned(shapes, spec, params, device, direction)
        return type(params)(blocksize_m=chosen.batch_blocks * BLOCK_BATCH, blocksize_n=chosen.unit_blocks * BLOCK_UNITS)


kernel_registry.register(
    "recurrent",
    Platform.CUDA,
    Backend.GPU,
    support=Support(
        devices=cuda(min_capability=call.OLDEST),
        dtypes=FLOATS,
        features={"lstm", "gru", "rnn", "hidden", "lengths", "bidirectional", "reverse", "activation"},
        gradients={"inputs", "hidden", "weights"},
        check=call.refusal,
    ),
    priority=call.PRIORITY,
)(CudaRecurrent)
