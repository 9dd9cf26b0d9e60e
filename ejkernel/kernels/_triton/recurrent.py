"""Recurrent layers in Triton: all steps of a direction in one launch, whose programs meet at a barrier after each.

What inputs give to the gates is one product before the launch, and after a backward launch gradients of the gates give
those of inputs and weights in one product each (``common.Direction``). Each program has some hidden units of some
sequences, and keeps its part of the recurrent weights on its multiprocessor for all steps if that fits.

Programs that wait for each other must all run at once. So there are never more than multiprocessors
(``resident_programs``), of which each can hold one; more sequences than these serve at once are served in turn.

On AMD's GPUs the kernel has only been compiled: programs that wait for each other run there where they are pinned or tuned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.callib.chips import CHIPS
from ejkernel.callib.integers import power_of_two, power_of_two_below
from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import BwdParams, FwdParams, params_class
from ejkernel.contracts.support import HeadDims, is_present
from ejkernel.kernels._triton.call import call, interpreting, on_nvidia, passes_twice, product_precision
from ejkernel.kernels._triton.registering import PRIORITY, register
from ejkernel.kernels.common import recurrent as common
from ejkernel.kernels.common.recurrent import GATES, PLANES

READ = ("blocksize_m", "blocksize_n", "blocksize_k", "num_warps", "num_stages")
# Multiprocessors of a chip that is not in the table and not here: as few as any has that is.
FEWEST_CORES = 40
SMALLEST_SIDE, MOST_ROWS, MOST_WARPS = 16, 128, 8
# The tile of weights from which on Hopper's and later tensor cores multiply from shared memory.
WARPGROUP_HEIGHT = 64
# Registers of a thread for weights that stay there and the sums that they give; it has 255.
MOST_REGISTERS = 160
# Numbers of a product's sum for each thread.
MOST_SUMS = 64
SHARED_MEMORY = 99 * 2**10
WARPGROUPS_FROM, ALIGNED = 90, 16
# What the padded hidden size is a multiple of; each part of a product then has whole tiles.
HIDDEN_STEP, LONGEST_CHUNK, MOST_STAGES, FEWEST_WARPS = 128, 256, 8, 4
# Numbers multiplied at a time, warps and stages: where many warps hold weights in registers, where a warpgroup multiplies from
# shared memory, and where weights are loaded in every step.
FROM_REGISTERS, FROM_SHARED, STREAMED = (32, 8, 3), (128, 4, 4), (64, 8, 4)
# Pieces that a resident program's weights may be in: each is a tile of its own in the compiled code.
MOST_PIECES = 32


def resident_programs(device: DeviceInfo | None) -> int:
    """How many programs certainly run at once: as many as there are multiprocessors, of which each holds one at least.

    A part of a chip (MIG) has the chip's name but fewer; JAX knows of those that are here.
    """
    if interpreting():
        return 1
    chip = CHIPS.get(device.name) if device is not None else None
    known = [chip.sm_count] if chip else []
    if device is None or is_present(device):
        known += [int(core) for d in jax.local_devices() if (core := getattr(d, "core_count", None))]
    return min(known, default=FEWEST_CORES)


@dataclass(frozen=True)
class Plan:
    """How a launch is cut: ``slices`` programs share ``rows`` of the batch, and there are ``groups`` of those.

    ``hidden``: the padded size; the rest is described in ``RecurrentConstants``.
    """

    hidden: int
    rows: int
    units: int
    slices: int
    groups: int
    parts: int
    chunk: int
    chunks: int
    resident: bool
    stages: int


@dataclass(frozen=True)
class Problem:
    """What plans depend on, beside the parameters; ``planes`` of weights a unit, ``inner_planes`` of what they multiply."""

    batch: int
    size: int
    itemsize: int
    planes: int
    inner_planes: int
    nvidia: bool
    warpgroups: bool
    room: int
    most: int

    def padded(self, units: int) -> int:
        """The hidden size that programs and tiles divide."""
        step = max(units, HIDDEN_STEP)
        return -(-self.size // step) * step

    def plan(self, params: FwdParams | BwdParams) -> Plan:
        """Of effective parameters."""
        rows, units, chunk, stages = params.blocksize_m, params.blocksize_n, params.blocksize_k, params.num_stages
        hidden, height = self.padded(units), self.planes * units
        inner = self.inner_planes * hidden
        parts = 1 if self.warpgroups and height >= WARPGROUP_HEIGHT else params.num_warps
        resident = self.resident(height, rows, inner, parts, params.num_warps)
        if not resident:
            parts = 1
        longest = inner // parts
        chunk = min(chunk, longest & -longest)
        while resident and longest // chunk > MOST_PIECES and longest % (2 * chunk) == 0:
            chunk *= 2
        while not resident and (height + rows) * chunk * self.itemsize * stages > self.room and chunk > SMALLEST_SIDE:
            chunk //= 2
        if not resident:
            stages = max(1, min(stages, self.room // ((height + rows) * chunk * self.itemsize)))
        chunks, tiles, slices = longest // chunk, -(-self.batch // rows), hidden // units
        groups = max(1, min(tiles, self.most // slices))
        return Plan(hidden, rows, units, slices, groups, parts, chunk, chunks, resident, min(stages, chunks))

    def resident(self, height: int, rows: int, inner: int, parts: int, warps: int) -> bool:
        """Whether a program's weights stay on its multiprocessor: in shared memory, or if in parts in registers."""
        if self.itemsize > 2 or not self.nvidia:
            return False
        if parts == 1:
            return (height + rows) * inner * self.itemsize <= self.room
        # Of each thread: its weights, two to a register, and its warp's part of the sums.
        return height * inner // (64 * warps) + height * rows // 32 <= MOST_REGISTERS

    def cycles(self, params: FwdParams | BwdParams) -> float:
        """About how long a step takes: the barrier, what is read from the second-level cache, and products."""
        plan = self.plan(params)
        inner, height = self.inner_planes * plan.hidden, self.planes * plan.units
        read = plan.rows * inner + (0 if plan.resident else height * inner)
        rate = 1000 if self.itemsize == 2 else 150
        passes = -(-self.batch // (plan.rows * plan.groups))
        return passes * (2500 + read * self.itemsize / 48 + height * plan.rows * inner / rate)


def _problem(shapes: dict[str, Any], spec: Any, device: DeviceInfo | None, direction: str) -> Problem:
    inputs = shapes["inputs"]
    gates = GATES[spec.cell]
    chip = CHIPS.get(device.name) if device is not None else None
    nvidia = interpreting() or on_nvidia(device)
    return Problem(
        batch=inputs.shape[0],
        size=shapes["weights"]["weight_hh"].shape[2],
        itemsize=inputs.dtype.itemsize,
        planes=_heights(gates) if direction == "forward" else 1,
        inner_planes=1 if direction == "forward" else gates,
        nvidia=nvidia,
        warpgroups=nvidia and bool(chip and chip.capability >= WARPGROUPS_FROM),
        room=chip.shared_memory_per_block if chip else SHARED_MEMORY,
        most=resident_programs(device),
    )


def _heights(gates: int) -> int:
    """Planes of a program's weights in the forward: a power of two."""
    return power_of_two(gates)


def effective(
    shapes: dict[str, Any], spec: Any, params: FwdParams | BwdParams, device: DeviceInfo | None
) -> FwdParams | BwdParams:
    """The parameters as the kernels use them: powers of two, and never more programs than run at once."""
    direction = "forward" if isinstance(params, FwdParams) else "backward"
    problem = _problem(shapes, spec, device, direction)
    warps = max(FEWEST_WARPS, min(MOST_WARPS, power_of_two_below(params.num_warps or MOST_WARPS)))
    longest = max(HIDDEN_STEP, power_of_two(problem.size))
    units = max(SMALLEST_SIDE, min(longest, power_of_two_below(params.blocksize_n or SMALLEST_SIDE)))
    while problem.padded(units) // units > problem.most:
        units *= 2
    most_rows = max(SMALLEST_SIDE, MOST_SUMS * 32 * warps // (problem.planes * units))
    rows = min(
        MOST_ROWS, most_rows, power_of_two(problem.batch), power_of_two_below(params.blocksize_m or SMALLEST_SIDE)
    )
    return type(params)(
        blocksize_m=max(SMALLEST_SIDE, rows),
        blocksize_n=units,
        blocksize_k=max(SMALLEST_SIDE, min(LONGEST_CHUNK, power_of_two_below(params.blocksize_k or 64))),
        num_warps=warps,
        num_stages=min(MOST_STAGES, params.num_stages or 3),
    )


class _Direction(common.Direction):
    """A pass whose loop is one launch. ``order``: what an earlier launch returned, for two must never wait at once."""

    def __init__(self, arrays: dict[str, Any], spec: Any, index: int, params: Any, device: Any, order: list[Array]):
        super().__init__(arrays, spec, index)
        direction = "forward" if isinstance(params, FwdParams) else "backward"
        if product_precision(jnp.float32, device) == "tf32x3":
            self.precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        problem = _problem(arrays, spec, device, direction)
        self.params, self.device, self.order = effective(arrays, spec, params, device), device, order
        self.plan = problem.plan(self.params)
        self.matrix = self.weights["weight_hh"].reshape(GATES[spec.cell], self.hidden, self.hidden)

    def forward(self) -> tuple:
        """Outputs, final states and, for an LSTM, the cell of every step."""
        from ejkernel.kernels._triton import recurrent_kernels as kernels

        plan, heights = self.plan, _heights(GATES[self.spec.cell])
        more = plan.hidden - self.hidden
        weights = jnp.pad(self.matrix, ((0, heights - len(self.matrix)), (0, more), (0, more)))
        weights = weights.reshape(heights, plan.slices, plan.units, plan.hidden).swapaxes(0, 1)
        rows, state = (self.batch, self.steps, self.hidden), (self.batch, self.hidden)
        lstm, nothing = self.spec.cell == "lstm", jax.ShapeDtypeStruct((1,), jnp.float32)
        outputs, cells, final_h, final_c = self._launch(
            kernels.forward_steps_again if passes_twice() else kernels.forward_steps,
            [
                self.projected(),
                weights,
                self.start[0],
                self.start[-1],
                self.state_bias() if self.spec.cell == "gru" else self.start[0],
                self.start[0] if self.lengths is None else self.lengths,
            ],
            [
                jax.ShapeDtypeStruct(rows, self.dtype),
                jax.ShapeDtypeStruct(rows, self.acc) if lstm else nothing,
                jax.ShapeDtypeStruct(state, self.dtype),
                jax.ShapeDtypeStruct(state, self.dtype) if lstm else nothing,
            ],
            planes=GATES[self.spec.cell],
            state_planes=1,
        )
        return outputs, (final_h, final_c) if lstm else (final_h,), cells if lstm else None

    def backward(
        self, outputs: Array, kept: Array | None, dout: Array, dfinal: tuple[Array, ...], wanted: frozenset[str]
    ) -> tuple:
        """Gradients of the inputs (None if not wanted), of the start states, and of the weights by their full names."""
        from ejkernel.kernels._triton import recurrent_kernels as kernels

        plan, gates, planes = self.plan, GATES[self.spec.cell], PLANES[self.spec.cell]
        more = plan.hidden - self.hidden
        weights = jnp.pad(self.matrix.transpose(2, 0, 1), ((0, more), (0, 0), (0, more)))
        before = self.before(outputs, self.start[0])
        dfinal = tuple(d.astype(self.acc) for d in dfinal)
        state = jax.ShapeDtypeStruct((self.batch, self.hidden), self.acc)
        lstm, nothing = self.spec.cell == "lstm", jax.ShapeDtypeStruct((1,), jnp.float32)
        dplanes, *dstart = self._launch(
            kernels.backward_steps_again if passes_twice() else kernels.backward_steps,
            [
                self.planes(before),
                weights,
                before,
                self.start[-1],
                dout if kept is None else kept,
                dout,
                dfinal[0],
                dfinal[-1],
                dfinal[0] if self.lengths is None else self.lengths,
            ],
            [
                jax.ShapeDtypeStruct((self.batch, self.steps, planes * self.hidden), self.dtype),
                state,
                state if lstm else nothing,
            ],
            planes=planes,
            state_planes=gates,
        )
        dinputs, grads = self.through_planes(dplanes, before, wanted)
        return dinputs, tuple(dstart[: len(self.start)]), grads

    def _launch(self, kernel: Any, arrays: list[Array], outputs: list[Any], *, planes: int, state_planes: int) -> list:
        """The outputs of a kernel; the array that its programs share is made here."""
        from ejkernel.kernels._triton.recurrent_kernels import APART, RecurrentConstants

        plan = self.plan
        tiles = -(-self.batch // plan.rows)
        counters = self.zeros((tiles * APART.value,), jnp.int32)
        shared = jax.ShapeDtypeStruct((2, tiles * plan.rows, state_planes * plan.hidden), self.dtype)
        if self.order:
            counters, _ = lax.optimization_barrier((counters, self.order[-1]))
        unit = math.gcd(self.hidden, ALIGNED)
        constants = RecurrentConstants(
            cell=self.spec.cell,
            relu=self.spec.activation == "relu",
            planes=planes,
            state_planes=state_planes,
            unit=unit,
            hidden=plan.hidden,
            units=plan.units,
            rows=plan.rows,
            parts=plan.parts,
            halves=(2,) * (plan.parts.bit_length() - 1),
            chunk=plan.chunk,
            chunks=plan.chunks,
            resident=plan.resident,
            stages=plan.stages,
            lengths=self.lengths is not None,
            from_end=self.from_end,
            barrier="none" if plan.slices == 1 else "ptx" if on_nvidia(self.device) else "atomics",
            precision=product_precision(self.dtype, self.device),
        )
        counters, _, *results = call(
            kernel,
            [*arrays, counters],
            [self.steps, self.batch, self.hidden // unit, plan.slices, plan.groups],
            [jax.ShapeDtypeStruct(counters.shape, jnp.int32), shared, *outputs],
            programs=plan.slices * plan.groups,
            constants=constants,
            num_warps=self.params.num_warps,
            num_stages=1,
            device=self.device,
            in_place={len(arrays): 0},
        )
        self.order.append(counters)
        return results


def forward(
    arrays: dict[str, Any], spec: Any, params: FwdParams, *, device: DeviceInfo | None = None
) -> tuple[Any, Array | None]:
    """``((outputs [B, S, directions·H], final states each [B, directions, H]), cells [B, S, directions·H] or None)``."""
    order: list[Array] = []
    return common.forward(spec, lambda index: _Direction(arrays, spec, index, params, device, order))


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
    order: list[Array] = []

    def direction(index: int) -> _Direction:
        return _Direction(arrays, spec, index, params, device, order)

    return common.backward(arrays, spec, direction, out, residual, dout, wanted)


def _proposals(
    shapes: dict[str, Any], spec: Any, device: DeviceInfo | None, direction: str
) -> list[FwdParams | BwdParams]:
    """Different parameters, the fastest by a simple count first."""
    problem, made = _problem(shapes, spec, device, direction), params_class(direction)
    found = {
        effective(
            shapes,
            spec,
            made(blocksize_m=rows, blocksize_k=chunk, blocksize_n=units, num_warps=warps, num_stages=stages),
            device,
        )
        for rows in (16, 32, 64, 128)
        for units in (16, 32, 64)
        for chunk, warps, stages in (FROM_REGISTERS, FROM_SHARED, STREAMED)
    }

    def rank(params: FwdParams | BwdParams) -> tuple:
        plan = problem.plan(params)
        fit = FROM_SHARED if plan.parts == 1 else FROM_REGISTERS
        own = (params.blocksize_k, params.num_warps, params.num_stages)
        return problem.cycles(params), own != (fit if plan.resident else STREAMED), repr(params)

    return sorted(found, key=rank)


class TritonRecurrent:
    """The implementation for GPUs."""

    name = "recurrent-triton"
    version = 1
    reads: ClassVar = {"forward": READ, "backward": READ}
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Where nothing was tuned: what reads least, with as few turns as possible."""
        return _proposals(shapes, spec, device, direction)[0]

    @staticmethod
    def handicap(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> int:
        """Below XLA's on GPUs on which nobody has seen the programs meet."""
        return 0 if device.vendor == "nvidia" else PRIORITY + 1

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
        """What is worth trying."""
        return _proposals(shapes, spec, device, direction)[:12]

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The parameters as the kernels use them."""
        return effective(shapes, spec, params, device)


register(
    "recurrent",
    features={"lstm", "gru", "rnn", "hidden", "lengths", "bidirectional", "reverse", "activation"},
    gradients={"inputs", "hidden", "weights"},
    head_dims=HeadDims(),
)(TritonRecurrent)
