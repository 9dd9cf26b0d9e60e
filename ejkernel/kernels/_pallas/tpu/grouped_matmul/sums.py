"""The gradient of ``b``: for each group the product over its rows."""

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
from ejkernel.kernels._pallas.tpu.grouped_matmul.steps import by_group, even
from ejkernel.kernels._pallas.tpu.grouped_matmul.tiles import Tiles


def sum_groups(
    x: Array,
    y: Array,
    bounds: Array | None,
    tiles: Tiles,
    *,
    operands: Any,
    dtype: Any,
    name: str,
    generation: Generation,
    interpret: Any,
) -> Array:
    """``[G, K, N]``: the transposed rows of each group in ``x [L, M, K]`` times those in ``y [L, M, N]``.

    Without ``bounds`` each matrix of ``x`` is a group. The grid goes over tiles of the result, then over the steps of
    ``by_group``, so that a group's sum stays in memory until its last step. The matrix unit takes ``x`` transposed tile by
    tile; no transposed copy is made. Rows of other groups are zeroed in both operands, for 0 times NaN is NaN.
    """
    lead, rows, height = x.shape
    width = y.shape[2]
    groups = 1 if bounds is None else bounds.shape[0] - 1
    steps = even(rows, tiles.m, 0) if bounds is None else by_group(bounds, rows, tiles.m)

    def kernel(tile, group, bounds, loads, x, y, out, sums):
        step = pl.program_id(3)
        top = tile[step] * tiles.m
        start, stop = bounds[group[step]] - top, bounds[group[step] + 1] - top
        opens, closes = start >= 0, stop <= tiles.m
        whole = (start <= 0) & (stop >= tiles.m)

        def add(masked, is_last):
            left, right = x[...], y[...]
            if masked:
                row = lax.broadcasted_iota(jnp.int32, (tiles.m, 1), 0)
                own = (row >= start) & (row < stop)
                left, right = (jnp.where(own, z, jnp.zeros_like(z)) for z in (left, right))
            # A select, for memory that nothing was written to may hold NaN.
            total = jnp.where(opens, 0.0, sums[...]) + dot(left, right, 0, 0, operands)
            if is_last:
                out[...] = total.astype(out.dtype)
            else:
                sums[...] = total

        for masked in (False, True):
            for is_last in (False, True):
                pl.when((stop > start) & (whole != masked) & (closes == is_last))(
                    lambda masked=masked, is_last=is_last: add(masked, is_last)
                )

        @pl.when(stop == start)
        def _():
            out[...] = jnp.zeros_like(out)

    def x_block(k, n, i, s, tile, group, bounds, loads):
        return i, tile[s], k

    def y_block(k, n, i, s, tile, group, bounds, loads):
        return i, tile[s], n

    def out_block(k, n, i, s, tile, group, bounds, loads):
        return i + group[s], k, n

    item = jnp.dtype(dtype).itemsize
    return launch(
        kernel,
        (*steps.scalars, x, y),
        name=name,
        out_shape=jax.ShapeDtypeStruct((lead * groups, height, width), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(steps.scalars),
            grid=(-(-height // tiles.k), -(-width // tiles.n), lead, steps.count),
            in_specs=[
                pl.BlockSpec((None, tiles.m, tiles.k), x_block),
                pl.BlockSpec((None, tiles.m, tiles.n), y_block),
            ],
            out_specs=pl.BlockSpec((None, tiles.k, tiles.n), out_block),
            scratch_shapes=[pltpu.VMEM((tiles.k, tiles.n), jnp.float32)],
        ),
        semantics=("parallel", "parallel", "parallel", "arbitrary"),
        generation=generation,
        flops=2 * lead * rows * height * width,
        transcendentals=0,
        bytes_accessed=x.size * x.dtype.itemsize + y.size * y.dtype.itemsize + lead * groups * height * width * item,
        interpret=interpret,
    )
