"""Rows times the matrix of their group: the product itself, and the gradient of ``a``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu.call import launch
from ejkernel.kernels._pallas.tpu.generations import Generation
from ejkernel.kernels._pallas.tpu.grouped_matmul.product import dot
from ejkernel.kernels._pallas.tpu.grouped_matmul.steps import by_tile, even
from ejkernel.kernels._pallas.tpu.grouped_matmul.tiles import Rows, Tiles


def multiply(
    x: Array,
    matrices: Array,
    bounds: Array | None,
    shape: Rows,
    tiles: Tiles,
    *,
    operands: Any,
    dtype: Any,
    name: str,
    generation: Generation,
    interpret: Any,
) -> Array:
    """``[L, M, N]``: the rows of ``x [L, M, K]`` times their group's of ``matrices [G, K, N]``, 0 in rows without one.

    With ``bounds`` L is 1 and groups are rows from one bound to the next; without, each matrix of ``x`` is a group.

    The grid goes over tiles of columns, then over the steps of ``by_tile``, then over parts of the contracted axis. It is
    one part where that fits in memory: then a group's matrix is copied once a tile of columns, and products are summed
    where the matrix unit leaves them. A tile with rows of one group is multiplied whole. One with several is
    multiplied in each group's step, in strips of few rows, of which only those with rows of the group count.
    """
    lead, rows, inner = x.shape
    columns = shape.n
    transposed = shape.transposed
    groups = 1 if bounds is None else bounds.shape[0] - 1
    steps = even(rows, tiles.m, 1) if bounds is None else by_tile(bounds, rows, tiles.m)
    parts = -(-inner // tiles.k)
    strip, fewest = shape.strips(tiles, generation)

    def kernel(tile, group, bounds, loads, x, matrix, out, *sums):
        step, part = pl.program_id(2), pl.program_id(3)
        top = tile[step] * tiles.m
        start, stop = bounds[group[step]] - top, bounds[group[step] + 1] - top
        filled = (group[step] > 0) & (group[step] <= groups)
        whole = filled & (start <= 0) & (stop >= jnp.minimum(tiles.m, rows - top))

        def one_strip(index, size, depth, is_last, masked):
            at = pl.ds(index * size if isinstance(index, int) else pl.multiple_of(index * size, size), size)
            weights = matrix[:, :depth] if transposed else matrix[:depth, :]
            total = dot(x[at, :depth], weights, 1, 1 if transposed else 0, operands)
            if parts > 1:
                # A select, for memory that nothing was written to may hold NaN.
                total += jnp.where(part == 0, 0.0, sums[0][at, :])
            if not is_last:
                sums[0][at, :] = total
                return
            if masked:
                row = lax.broadcasted_iota(jnp.int32, (size, 1), 0) + index * size
                total = jnp.where((row >= start) & (row < stop), total, out[at, :].astype(jnp.float32))
            out[at, :] = total.astype(out.dtype)

        def strips(size, first, end, masked):
            for is_last in (True,) if parts == 1 else (False, True):
                depth = inner - (parts - 1) * tiles.k if is_last else tiles.k

                @pl.when((part == parts - 1) == is_last)
                def _(is_last=is_last, depth=depth):
                    if size == tiles.m:
                        one_strip(0, size, depth, is_last, masked)
                        return

                    def body(index, carry):
                        one_strip(index, size, depth, is_last, masked)
                        return carry

                    lax.fori_loop(first, end, body, 0)

        @pl.when(whole)
        def _():
            strips(strip, 0, tiles.m // strip, False)

        # Every row belongs to a group of bounds, so the first that has rows in a tile has its first row.
        @pl.when(~whole & (start <= 0) & (part == 0))
        def _():
            out[...] = jnp.zeros_like(out)

        @pl.when(~whole & filled)
        def _():
            shift = fewest.bit_length() - 1
            first, end = jnp.maximum(start, 0), jnp.minimum(stop, tiles.m)
            if fewest == tiles.m:
                strips(fewest, 0, 1, True)
            else:
                strips(fewest, first >> shift, (end + fewest - 1) >> shift, True)

    def part_of(part, group, loads):
        """Steps without a matrix keep the last part that was copied, or have the first."""
        return jnp.where(group - 1 < loads[0], 0, jnp.where(group - 1 > loads[1], parts - 1, part))

    def x_block(n, i, s, part, tile, group, bounds, loads):
        return i, jnp.clip(tile[s], loads[2], loads[3]), part_of(part, group[s], loads)

    def matrix_block(n, i, s, part, tile, group, bounds, loads):
        part = part_of(part, group[s], loads)
        return i + jnp.clip(group[s] - 1, loads[0], loads[1]), *((n, part) if transposed else (part, n))

    def out_block(n, i, s, part, tile, group, bounds, loads):
        return i, tile[s], n

    item = jnp.dtype(dtype).itemsize
    return launch(
        kernel,
        (*steps.scalars, x, matrices),
        name=name,
        out_shape=jax.ShapeDtypeStruct((lead, rows, columns), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(steps.scalars),
            grid=(-(-columns // tiles.n), lead, steps.count, parts),
            in_specs=[
                pl.BlockSpec((None, tiles.m, tiles.k), x_block),
                pl.BlockSpec((None, *((tiles.n, tiles.k) if transposed else (tiles.k, tiles.n))), matrix_block),
            ],
            out_specs=pl.BlockSpec((None, tiles.m, tiles.n), out_block),
            scratch_shapes=[pltpu.VMEM((tiles.m, tiles.n), jnp.float32)] if parts > 1 else [],
        ),
        semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        generation=generation,
        flops=2 * lead * rows * inner * columns,
        transcendentals=0,
        bytes_accessed=x.size * x.dtype.itemsize
        + matrices.size * matrices.dtype.itemsize
        + lead * rows * columns * item,
        interpret=interpret,
    )
