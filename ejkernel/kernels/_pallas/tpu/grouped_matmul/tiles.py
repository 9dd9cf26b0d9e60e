"""Tiles by generation and shape, from cycles counted in libtpu's schedules: nothing here was timed on a TPU."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from ejkernel.callib.chips import CHIPS, MIB
from ejkernel.callib.integers import power_of_two_below
from ejkernel.kernels._pallas.tpu.generations import LANES, Generation

STEP = 110  # cycles that a step of the grid costs beside its product
# Straight code of more cycles than this takes libtpu long to schedule. A group's sum is compiled four times.
LONGEST, LONGEST_SUM = 16900, 9000
SPILLED = MIB  # registers that the compiler keeps in vector memory, at most
SMALLEST_ROWS = 16  # of bfloat16 in a register
TWO_CORES = ("tpu-v4", "tpu-v5p")  # that share a kernel's grid


def _whole_or(size: int, tile: int) -> int:
    """The axis in one tile, or in multiples of a register's lanes."""
    tile = tile if tile >= size else max(LANES, tile // LANES * LANES)
    return min(tile, size)


@dataclass(frozen=True)
class Tiles:
    """Rows, columns of ``x``, and columns of the other operand."""

    m: int
    k: int
    n: int


@dataclass(frozen=True)
class Shape(ABC):
    """A product of ``x [lead, m, k]``; ``groups`` of each lead share its ``m`` rows.

    Attributes:
        x_bytes, y_bytes, out_bytes: of one number.
        passes: of the matrix unit over the operands.
    """

    lead: int
    groups: int
    m: int
    k: int
    n: int
    x_bytes: int
    y_bytes: int
    out_bytes: int
    passes: int

    @abstractmethod
    def vmem(self, tiles: Tiles, generation: Generation) -> int:
        """Bytes of vector memory: blocks twice, since the next ones are copied meanwhile, and what the product takes."""

    @abstractmethod
    def overhead(self, tiles: Tiles) -> int:
        """Cycles of a product beside its multiplications, as counted: within 300 of 30 schedules of all generations."""

    @abstractmethod
    def seconds(self, tiles: Tiles, generation: Generation) -> float:
        """Predicted, for groups of one size."""

    @abstractmethod
    def smaller(self, tiles: Tiles) -> Tiles:
        """With less of what should be given up first."""

    def fit(self, tiles: Tiles, generation: Generation) -> Tiles:
        """Tiles that the hardware takes and that fit into memory."""
        rows = max(SMALLEST_ROWS, power_of_two_below(min(tiles.m, self.m)))
        if rows >= self.m or self.m <= min(tiles.m, LANES):
            rows = self.m
        tiles = Tiles(rows, _whole_or(self.k, tiles.k), _whole_or(self.n, tiles.n))
        while self.vmem(tiles, generation) > generation.vmem_bytes:
            less = self.smaller(tiles)
            if less == tiles:
                break
            tiles = less
        return tiles

    def fitting(self, sizes: tuple, generation: Generation) -> list[Tiles]:
        """Tiles of these sizes, or the largest below that fit."""
        return list(dict.fromkeys(self.fit(Tiles(*tiles), generation) for tiles in itertools.product(*sizes)))

    def cycles(self, rows: int, fewest: int, tiles: Tiles, generation: Generation) -> float:
        """Of a product over so many of a tile's rows."""
        chip = CHIPS[generation.name]
        rate = chip.flops("bfloat16") / chip.sm_count / generation.clock / 2
        return max(rows, fewest) * tiles.k * tiles.n * self.passes / rate + self.overhead(tiles)

    def slower_of(self, cycles: float, moved: float, units: int, first: int, generation: Generation) -> float:
        """``units`` times the longer of computing and copying, after the copy of the first blocks."""
        rounds = -(-units // 2) if generation.name in TWO_CORES else units
        return first / generation.hbm + rounds * max(cycles / generation.clock, moved / generation.hbm)


@dataclass(frozen=True)
class Rows(Shape):
    """``[lead, m, n]``, contracted over ``k``; ``transposed``: the matrices are ``[n, k]``."""

    transposed: bool = False

    def strips(self, tiles: Tiles, generation: Generation) -> tuple[int, int]:
        """How many rows are multiplied at once in a tile of one group, and in a tile of several.

        Fewer than the second take a matrix unit no less time: it is loading its weights meanwhile. Where it is 256 wide,
        transposed weights take it twice as long.
        """
        slow = self.transposed and generation.mxu == 256
        fewest = min(tiles.m, generation.mxu if slow else generation.mxu // 2)
        if tiles.m % fewest:
            return tiles.m, tiles.m
        strip = tiles.m
        while strip > fewest and self.cycles(strip, fewest, tiles, generation) > LONGEST:
            strip //= 2
        return strip, fewest

    def overhead(self, tiles: Tiles) -> int:
        """See the base class."""
        return 100 + tiles.n // 4

    def vmem(self, tiles: Tiles, generation: Generation) -> int:
        """See the base class."""
        m, k, n = tiles.m, tiles.k, tiles.n
        strip, _ = self.strips(tiles, generation)
        blocks = m * k * self.x_bytes + k * n * self.y_bytes + m * n * self.out_bytes
        summed = m * n * 4 if k < self.k else 0
        split = 0 if self.passes == 1 else 6 * (strip * k + k * n)
        return 2 * blocks + summed + 2 * strip * n * 4 + split + SPILLED

    def seconds(self, tiles: Tiles, generation: Generation) -> float:
        """See the base class."""
        strip, fewest = self.strips(tiles, generation)
        count, parts = -(-self.m // tiles.m), -(-self.k // tiles.k)
        cuts = self.groups - 1
        split, steps = min(count, cuts), count + cuts
        cycles = (count - split) * (tiles.m // strip) * self.cycles(strip, fewest, tiles, generation)
        pieces = min(split * tiles.m, self.m) / fewest + cuts
        cycles += pieces * self.cycles(fewest, fewest, tiles, generation)
        cycles = parts * (cycles + steps * STEP)
        rows_read = self.m if parts == 1 else steps * tiles.m
        matrices_read = min(self.groups, self.m) if parts == 1 else steps
        moved = (
            rows_read * self.k * self.x_bytes
            + matrices_read * self.k * tiles.n * self.y_bytes
            + self.m * tiles.n * self.out_bytes
        )
        first = tiles.k * (tiles.m * self.x_bytes + tiles.n * self.y_bytes)
        return self.slower_of(cycles, moved, self.lead * -(-self.n // tiles.n), first, generation)

    def smaller(self, tiles: Tiles) -> Tiles:
        """A narrower contraction last: its sums would leave the matrix unit."""
        if tiles.n > 4 * LANES:
            return replace(tiles, n=_whole_or(self.n, tiles.n // 2))
        if tiles.m > 2 * LANES:
            return replace(tiles, m=tiles.m // 2)
        if tiles.k > 4 * LANES:
            return replace(tiles, k=_whole_or(self.k, tiles.k // 2))
        return replace(tiles, n=_whole_or(self.n, tiles.n // 2), m=max(min(tiles.m, SMALLEST_ROWS), tiles.m // 2))

    def best(self, generation: Generation) -> list[Tiles]:
        """Those worth timing, the ones predicted to be fastest first."""
        depths = [self.k, *(1 << e for e in range(13, 8, -1) if 1 << e < self.k)]
        found = self.fitting(((1024, 512, 256, 128), depths, (2048, 1024, 512, 256)), generation)
        return sorted(found, key=lambda tiles: self.seconds(tiles, generation))


class Sums(Shape):
    """``[groups of all leads, k, n]``, contracted over the rows of each group in ``x`` and in ``y [lead, m, n]``."""

    def overhead(self, tiles: Tiles) -> int:
        """See the base class."""
        return 350

    def vmem(self, tiles: Tiles, generation: Generation) -> int:
        """See the base class."""
        m, k, n = tiles.m, tiles.k, tiles.n
        blocks = m * (k * self.x_bytes + n * self.y_bytes) + k * n * self.out_bytes
        split = m * (k * self.x_bytes + n * self.y_bytes) if self.passes == 1 else 8 * m * (k + n)
        return 2 * blocks + 2 * 4 * k * n + split + SPILLED

    def seconds(self, tiles: Tiles, generation: Generation) -> float:
        """See the base class."""
        steps = -(-self.m // tiles.m) + self.groups - 1
        cycles = self.cycles(tiles.m, generation.mxu, tiles, generation)
        if cycles > LONGEST_SUM:
            return math.inf
        moved = steps * tiles.m * (tiles.k * self.x_bytes + tiles.n * self.y_bytes)
        moved += self.groups * tiles.k * tiles.n * self.out_bytes
        units = self.lead * -(-self.k // tiles.k) * -(-self.n // tiles.n)
        first = tiles.m * (tiles.k * self.x_bytes + tiles.n * self.y_bytes)
        return self.slower_of(steps * (cycles + STEP), moved, units, first, generation)

    def smaller(self, tiles: Tiles) -> Tiles:
        """Less of the longer side of the result, then fewer rows."""
        if max(tiles.k, tiles.n) > 4 * LANES:
            k, n = (tiles.k // 2, tiles.n) if tiles.k >= tiles.n else (tiles.k, tiles.n // 2)
            return Tiles(tiles.m, _whole_or(self.k, k), _whole_or(self.n, n))
        if tiles.m > 2 * LANES:
            return replace(tiles, m=tiles.m // 2)
        k, n = _whole_or(self.k, tiles.k // 2), _whole_or(self.n, tiles.n // 2)
        return Tiles(max(min(tiles.m, SMALLEST_ROWS), tiles.m // 2), k, n)

    def all(self, generation: Generation) -> list[Tiles]:
        """Those worth comparing."""
        sides = (2048, 1024, 512, 256)
        return self.fitting(((1024, 512, 256, 128), sides, sides), generation)
