"""How the recurrent product is divided over a chip: which CTA has which units and entries of the batch, and where weights lie.

All CTAs run at once, so there are never more than multiprocessors, with one on each. Their weights stay where a step finds them
soonest: in registers, then in shared memory, and what fits in neither is read from the second-level cache in every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from ejkernel.errors import UnsupportedError
from ejkernel.kernels._cuda.call import Capacity

WARPS = 8
BLOCK_UNITS, BLOCK_BATCH = 16, 8
# The tiles of a CTA, in such blocks.
UNIT_BLOCKS, BATCH_BLOCKS = (1, 2, 4, 8, 16), (1, 2, 4)
# Rows of a row block and a batch block are a product of the tensor cores; results of more would not leave registers for weights.
MOST_RESULTS = 16
# Of a thread: those for results, weights, rows on their way and where they come from. The compiler needs the rest, and more where
# numbers are split, where several planes wait for a step, and where weights are on their way too.
REGISTERS, FOR_SPLITTING, FOR_PLANES, FOR_STREAMING = 228, 40, 8, 16
LANE_BYTES, FRAGMENT_BYTES = 16, 1024
PARTIAL_BYTES = 512  # of a warp's product of a row block and a batch block
WATCHDOG = 1 << 25  # polls of a barrier, each of at least 0.3 µs

# Rough rates, to compare plans: bytes a second from the second-level cache of a chip, multiplications a second of a multiprocessor in
# half precision, bytes a second of its shared memory; and the seconds of latencies in a pass.
CACHE_RATE, PRODUCT_RATE, SHARED_RATE, PASS_SECONDS = 5e12, 2e12, 2e11, 1e-6


@dataclass(frozen=True)
class Problem:
    """A product of a step: ``gates`` rows of weights for each of ``hidden`` units, each of ``length`` numbers, and the batch's rows."""

    gates: int
    hidden: int
    length: int
    batch: int
    itemsize: int


@dataclass(frozen=True)
class Plan:
    """The division; ``kept``, ``shared`` and ``streamed`` are pieces of a warp's weights, by where they lie."""

    problem: Problem
    unit_blocks: int
    batch_blocks: int
    groups: int
    tiles: int
    passes: int
    kept: int
    shared: int
    streamed: int
    ahead: int
    shared_memory: int

    @property
    def grid(self) -> int:
        """CTAs: the groups of units of each tile of the batch."""
        return self.groups * self.tiles

    @property
    def pieces(self) -> int:
        """Of a warp."""
        return self.kept + self.shared + self.streamed

    def macros(self) -> dict[str, object]:
        """What the sources are compiled with, beside what the problem does not know."""
        return {
            "WARPS": WARPS,
            "HIDDEN": self.problem.hidden,
            "UNIT_BLOCKS": self.unit_blocks,
            "BATCH_BLOCKS": self.batch_blocks,
            "KEPT": self.kept,
            "SHARED": self.shared,
            "AHEAD": self.ahead,
            "WATCHDOG": WATCHDOG,
        }

    def seconds(self) -> float:
        """A step's time, as far as plans differ in it."""
        p = self.problem
        row_blocks = self.unit_blocks * p.gates
        streamed = WARPS * self.streamed * row_blocks * FRAGMENT_BYTES
        rows = self.batch_blocks * BLOCK_BATCH * WARPS * self.pieces * 4 * LANE_BYTES
        products = row_blocks * 16 * self.batch_blocks * 8 * WARPS * self.pieces * 4 * LANE_BYTES / p.itemsize
        products *= 6 if p.itemsize == 4 else 1
        shared = WARPS * (
            self.shared * row_blocks * FRAGMENT_BYTES + 2 * row_blocks * self.batch_blocks * PARTIAL_BYTES
        )
        cached = self.grid * (rows + streamed) / CACHE_RATE
        return self.passes * (PASS_SECONDS + cached + products / PRODUCT_RATE + shared / SHARED_RATE)


def plan(problem: Problem, capacity: Capacity, *, units: int | None = None, entries: int | None = None) -> Plan:
    """The fastest division by ``Plan.seconds``; with tiles of so many units and entries of the batch if they are given and fit."""
    possible = [
        found
        for unit_blocks in UNIT_BLOCKS
        for batch_blocks in BATCH_BLOCKS
        if (found := _divided(problem, capacity, unit_blocks, batch_blocks)) is not None
    ]
    if not possible:
        raise UnsupportedError(
            f"{capacity.multiprocessors} multiprocessors do not hold a hidden size of {problem.hidden} with a batch of {problem.batch} "
            "at once: pass platform='xla', or a part of the batch at a time"
        )
    asked = [
        found
        for found in possible
        if units in (None, found.unit_blocks * BLOCK_UNITS) and entries in (None, found.batch_blocks * BLOCK_BATCH)
    ]
    return min(asked or possible, key=Plan.seconds)


def _divided(problem: Problem, capacity: Capacity, unit_blocks: int, batch_blocks: int) -> Plan | None:
    """With tiles of these sizes; None if that is not possible."""
    row_blocks = unit_blocks * problem.gates
    groups = -(-problem.hidden // (unit_blocks * BLOCK_UNITS))
    at_once = capacity.multiprocessors // groups
    if not at_once or (row_blocks * batch_blocks > MOST_RESULTS and batch_blocks > 1):
        return None
    needed = -(-problem.batch // (batch_blocks * BLOCK_BATCH))
    passes = -(-needed // min(needed, at_once))
    tiles = -(-needed // passes)

    numbers = WARPS * 4 * LANE_BYTES // problem.itemsize
    pieces = -(-problem.length // numbers)
    ahead = min(pieces, 8 // batch_blocks)
    free = REGISTERS - 2 * batch_blocks - 4 * batch_blocks * (row_blocks + ahead)
    free -= FOR_SPLITTING * (problem.itemsize == 4) + FOR_PLANES * (problem.gates == 1)

    items = -(-unit_blocks * batch_blocks * 64 // (32 * WARPS)) * 32 * WARPS
    used = WARPS * row_blocks * batch_blocks * PARTIAL_BYTES + passes * 2 * items * 8
    if used > capacity.shared_memory:
        return None
    of_piece = WARPS * row_blocks * FRAGMENT_BYTES
    room = (capacity.shared_memory - used) // of_piece
    kept = max(0, min(pieces, free // (8 * row_blocks)))
    if kept + room < pieces:
        kept = max(0, (free - FOR_STREAMING) // (8 * row_blocks))
    shared = min(pieces - kept, room)
    return Plan(
        problem,
        unit_blocks,
        batch_blocks,
        groups,
        tiles,
        passes,
        kept,
        shared,
        pieces - kept - shared,
        ahead,
        used + shared * of_piece,
    )


def host_nans(array: Array) -> Array:
    """With NaNs as ``upper`` in primitives.cuh keeps them: it would carry the hardware's own over into the sign."""
    return jnp.where(jnp.isnan(array), jnp.nan, array) if array.dtype == jnp.float32 else array


def packed(weights: Array, plan: Plan) -> Array:
    """Weights ``[gates, hidden, length]`` in the order in which lanes hold them, as 32-bit numbers.

    The axes are: group, warp, piece, unit block, gate, product of two in a piece, lane, register. Register r of lane l holds row
    l / 4 + 8 · (r mod 2) of a row block, and numbers of a row as ``multiply`` in recurrent.cuh pairs them.
    """
    weights = host_nans(weights)
    p = plan.problem
    each = 4 // p.itemsize  # numbers of a register
    lengths = (plan.pieces, WARPS, 4, 2, 2, each)
    units = (plan.groups, plan.unit_blocks, 2, 8)
    pads = ((0, 0), (0, math.prod(units) - p.hidden), (0, math.prod(lengths) - p.length))
    whole = jnp.pad(weights, pads).reshape(p.gates, *units, *lengths)
    # 0 gate, 1 group, 2 unit block, 3 upper or lower rows, 4 row, 5 piece, 6 warp, 7 lane of four, 8 product, 9 half, 10 number
    ordered = whole.transpose(1, 6, 5, 2, 0, 8, 4, 7, 9, 3, 10)
    return ordered.reshape(-1)
