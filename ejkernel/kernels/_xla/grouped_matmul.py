"""Grouped matrix products in XLA.

The ragged form walks over the groups that have rows and, within one, over tiles of its rows: large ones while they fit,
then small ones, of which only the last is partly filled. So the work is that of one product ``[M, K] · [K, N]`` and a few
rows a group. A tile near the end of the array is loaded shifted back; rows of other groups that a tile holds are neither
stored nor summed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels.varying import vary_over, varying_axes
from ejkernel.ops.core.registry import kernel_registry
from ejkernel.ops.core.support import ALL_FLOATS, Backend, Platform, Support, any_device
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams

ROWS = 256
# Below this many multiplications a product takes no longer than the step of the loop around it.
SMALLEST_PRODUCT = 2**20
FEWEST_ROWS = 16
# A step of a gradient of b also reads and writes the whole gradient of its group.
FEWEST_ROWS_SUMMED = 32


def forward(arrays: dict[str, Array], spec: Any, params: FwdParams) -> tuple[Array, None]:
    """``out`` and nothing else: the gradients need the operands alone."""
    a, b = arrays["a"], arrays["b"]
    if "bounds" not in arrays:
        return _dot(a, b, -1, -1 if spec.transpose_b else -2, spec.accumulator).astype(spec.dtype), None
    tiles = _tiles(params.blocksize_m, a.shape[1], FEWEST_ROWS, b.shape[2] * b.shape[3])
    out = _rows(a[0], b[0], arrays["bounds"][0], spec.transpose_b, tiles, spec.accumulator, spec.dtype)
    return out[None], None


def backward(
    arrays: dict[str, Array],
    spec: Any,
    params: BwdParams,
    out: Array,
    residual: None,
    dout: Array,
    dresidual: None,
    wanted: frozenset[str] = frozenset({"a", "b"}),
) -> dict[str, Array]:
    """The gradients by name."""
    a, b = arrays["a"], arrays["b"]
    left, right = (dout, a) if spec.transpose_b else (a, dout)
    grads = {}
    if "bounds" not in arrays:
        if "a" in wanted:
            grads["a"] = _dot(dout, b, -1, -2 if spec.transpose_b else -1, spec.accumulator).astype(a.dtype)
        if "b" in wanted:
            grads["b"] = _dot(_transposed(left), right, -1, -2, spec.accumulator).astype(b.dtype)
        return grads
    bounds, (rows, *_), area = arrays["bounds"][0], a.shape[1:], b.shape[2] * b.shape[3]
    if "a" in wanted:
        tiles = _tiles(params.blocksize_m, rows, FEWEST_ROWS, area)
        grads["a"] = _rows(dout[0], b[0], bounds, not spec.transpose_b, tiles, spec.accumulator, a.dtype)[None]
    if "b" in wanted:
        tiles = _tiles(params.blocksize_m, rows, FEWEST_ROWS_SUMMED, area)
        grads["b"] = _sums(left[0], right[0], bounds, tiles, spec.accumulator, b.dtype)[None]
    return grads


def _rows(
    x: Array, groups: Array, bounds: Array, transposed: bool, tiles: tuple[int, ...], accumulator: Any, dtype: Any
) -> Array:
    """``[M, N]``: the rows of ``x`` times the matrix of their group, 0 in rows without one."""
    width = groups.shape[1 if transposed else 2]

    def one_group(group, start, stop, out):
        # Loaded once a group: without the barrier the copy would be made again for each tile.
        matrix = lax.optimization_barrier(lax.dynamic_index_in_dim(groups, group, keepdims=False))

        def tile(first, size, full, out):
            at = first if full else jnp.minimum(first, x.shape[0] - size)
            block = lax.dynamic_slice_in_dim(x, at, size)
            block = _dot(block, matrix, -1, -1 if transposed else -2, accumulator).astype(dtype)
            if not full:
                own = _own(at, size, first, stop)
                block = jnp.where(own, block, lax.dynamic_slice_in_dim(out, at, size))
            return lax.dynamic_update_slice_in_dim(out, block, at, 0)

        return _walk(start, stop, tiles, tile, out)

    return _each_group(bounds, one_group, _zeros((x.shape[0], width), dtype, x))


def _sums(left: Array, right: Array, bounds: Array, tiles: tuple[int, ...], accumulator: Any, dtype: Any) -> Array:
    """``[G, I, J]``: the transposed rows of each group in ``left`` times those in ``right``."""
    shape = (left.shape[1], right.shape[1])

    def one_group(group, start, stop, sums):
        def tile(first, size, full, total):
            at = first if full else jnp.minimum(first, left.shape[0] - size)
            blocks = [lax.dynamic_slice_in_dim(x, at, size) for x in (left, right)]
            if not full:
                # Both, for a NaN in a row of another group would survive a product with 0.
                own = _own(at, size, first, stop)
                blocks = [jnp.where(own, block, 0) for block in blocks]
            return total + _dot(_transposed(blocks[0]), blocks[1], -1, -2, accumulator)

        total = _walk(start, stop, tiles, tile, _zeros(shape, accumulator, left))
        return lax.dynamic_update_index_in_dim(sums, total.astype(dtype), group, 0)

    return _each_group(bounds, one_group, _zeros((bounds.shape[0] - 1, *shape), dtype, left))


def _each_group(bounds: Array, body: Callable, carry: Any) -> Any:
    """``body(group, start, stop, carry)`` for the groups that have rows; the others cost nothing."""
    starts, stops = bounds[:-1], bounds[1:]
    (filled,) = jnp.nonzero(stops > starts, size=starts.shape[0], fill_value=0)
    filled = filled.astype(jnp.int32)

    def step(index, carry):
        group = filled[index]
        return body(group, starts[group], stops[group], carry)

    return _loop((stops > starts).sum(dtype=jnp.int32), step, carry)


def _walk(start: Array, stop: Array, tiles: tuple[int, ...], body: Callable, carry: Any) -> Any:
    """``body(first row, size, whether all rows are the group's, carry)`` for tiles that cover the rows, largest first."""
    for size in tiles:
        rows, last = stop - start, size == tiles[-1]

        def step(index, carry, start=start, size=size, last=last):
            return body(start + index * size, size, not last, carry)

        count = (rows + size - 1 if last else rows) // size
        carry = _loop(count, step, carry)
        start = start + count * size
    return carry


def _own(at: Array, size: int, first: Array, stop: Array) -> Array:
    """``[size, 1]``: which rows of a tile loaded at ``at`` are from ``first`` on and before ``stop``."""
    rows = at + jnp.arange(size, dtype=jnp.int32)[:, None]
    return (rows >= first) & (rows < stop)


def _tiles(large: int | None, rows: int, fewest: int, area: int) -> tuple[int, ...]:
    """The sizes of tiles, descending, for matrices of ``area`` elements."""
    large = min(large or ROWS, rows)
    small = max(fewest, -(-SMALLEST_PRODUCT // area) // 8 * 8)
    return (large, small) if small < large else (large,)


def _dot(a: Array, b: Array, contract_a: int, contract_b: int, dtype: Any) -> Array:
    operands = jnp.promote_types(a.dtype, b.dtype)
    precision = lax.Precision.HIGHEST if operands.itemsize >= 4 else None
    lead = tuple(range(a.ndim - 2))
    dims = (((a.ndim + contract_a,), (b.ndim + contract_b,)), (lead, lead))
    return lax.dot_general(
        a.astype(operands), b.astype(operands), dims, precision=precision, preferred_element_type=dtype
    )


def _transposed(x: Array) -> Array:
    """Behind a barrier: folded into a product, a transposed left operand takes a CPU twice as long."""
    return lax.optimization_barrier(x.swapaxes(-1, -2))


def _zeros(shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
    return vary_over(jnp.zeros(shape, dtype), varying_axes(like))


def _loop(steps: Array, body: Callable, carry: Any) -> Any:
    return lax.fori_loop(jnp.int32(0), steps, body, carry)


class XlaGroupedMatmul:
    """The implementation for every device."""

    version = 1
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Tiles where nothing was tuned."""
        cls = FwdParams if direction == "forward" else BwdParams
        return cls(blocksize_m=ROWS) if "bounds" in shapes else cls()

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
        """Tiles worth trying."""
        cls = FwdParams if direction == "forward" else BwdParams
        return [cls(blocksize_m=rows) for rows in (64, 128, 256, 512, 1024)] if "bounds" in shapes else []


kernel_registry.register(
    "grouped_matmul",
    Platform.XLA,
    Backend.ANY,
    support=Support(
        devices=any_device(),
        dtypes=ALL_FLOATS,
        features={"ragged", "group_offset", "transpose_b", "preferred_element_type"},
        gradients={"a", "b"},
    ),
)(XlaGroupedMatmul)
