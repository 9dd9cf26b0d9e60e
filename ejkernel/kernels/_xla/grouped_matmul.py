"""Grouped matrix products in XLA.

The ragged form walks over tiles of rows that each belong to one group, so that its work is that of one product
``[M, K] · [K, N]`` and a few rows a group. A tile near the end of the array is loaded shifted back; rows of other groups
that a tile holds are neither stored nor summed. There are two walks, and the compiler takes that of its device:

- A CPU has loops of any length for free. It goes over the groups that have rows and takes large tiles while they fit, then
  small ones.
- Elsewhere a loop whose length is data waits for the host at each step. There the tiles are of one size and as many as
  there may be at most, ``M / tile + G``; those past the last one change nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.registry import kernel_registry
from ejkernel.contracts.support import ALL_FLOATS, Backend, Platform, Support, any_device
from ejkernel.kernels.common.varying import full_beside

ROWS_PER_TILE = 256
# The fewest rows that a CPU multiplies at nearly the speed of many; more where a sum over the rows is written each time.
FEWEST, FEWEST_SUMMED = 16, 32


def effective(shapes: dict[str, Any], params: FwdParams | BwdParams) -> FwdParams | BwdParams:
    """The parameters as the kernel uses them: a tile has no more rows than there are; the batched form has no tiles."""
    if "bounds" not in shapes:
        return type(params)()
    return type(params)(blocksize_m=max(1, min(params.blocksize_m or ROWS_PER_TILE, shapes["a"].shape[1])))


def forward(arrays: dict[str, Array], spec: Any, params: FwdParams) -> tuple[Array, None]:
    """``out`` and nothing else: the gradients need the operands alone."""
    a, b = arrays["a"], arrays["b"]
    if "bounds" not in arrays:
        return _dot(a, b, -1, -1 if spec.transpose_b else -2, spec.accumulator).astype(spec.dtype), None
    large = effective(arrays, params).blocksize_m
    rows = _by_device(_rows, _rows_in_steps)
    out = rows(a[0], b[0], arrays["bounds"][0], spec.transpose_b, large, spec.accumulator, spec.dtype)
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
    bounds, large = arrays["bounds"][0], effective(arrays, params).blocksize_m
    if "a" in wanted:
        rows = _by_device(_rows, _rows_in_steps)
        grads["a"] = rows(dout[0], b[0], bounds, not spec.transpose_b, large, spec.accumulator, a.dtype)[None]
    if "b" in wanted:
        sums = _by_device(_sums, _sums_in_steps)
        grads["b"] = sums(left[0], right[0], bounds, large, spec.accumulator, b.dtype)[None]
    return grads


def _by_device(on_cpu: Callable, elsewhere: Callable) -> Callable:
    """A function of three arrays and of statics that is one of the two, by the device it is compiled for."""

    def run(x, y, z, *statics):
        cpu, default = (lambda *arrays, f=f: f(*arrays, *statics) for f in (on_cpu, elsewhere))
        return lax.platform_dependent(x, y, z, cpu=cpu, default=default)

    return run


def _rows(x: Array, groups: Array, bounds: Array, transposed: bool, large: int, accumulator: Any, dtype: Any) -> Array:
    """``[M, N]``: the rows of ``x`` times the matrix of their group, 0 in rows without one."""
    width = groups.shape[1 if transposed else 2]
    small = min(FEWEST, large)

    def one_group(group, start, stop, out):
        # Loaded once a group: without the barrier the copy would be made again for each tile.
        matrix = lax.optimization_barrier(lax.dynamic_index_in_dim(groups, group, keepdims=False))

        def whole(index, out):
            at = start + index * large
            block = _dot(lax.dynamic_slice_in_dim(x, at, large), matrix, -1, -1 if transposed else -2, accumulator)
            return lax.dynamic_update_slice_in_dim(out, block.astype(dtype), at, 0)

        def partial(index, out):
            first = rest + index * small
            at = jnp.minimum(first, x.shape[0] - small)
            block = lax.dynamic_slice_in_dim(x, at, small)
            if transposed:
                # A few rows times a transposed matrix take a CPU longer than that matrix times the rows, transposed; the
                # barrier keeps the compiler from swapping them back.
                block = lax.optimization_barrier(_dot(matrix, block, -1, -1, accumulator)).T
            else:
                block = _dot(block, matrix, -1, -2, accumulator)
            block = jnp.where(
                _own(at, small, first, stop), block.astype(dtype), lax.dynamic_slice_in_dim(out, at, small)
            )
            return lax.dynamic_update_slice_in_dim(out, block, at, 0)

        count = (stop - start) // large
        rest = start + count * large
        return _loop(-((rest - stop) // small), partial, _loop(count, whole, out))

    return _each_group(bounds, one_group, full_beside(x, (x.shape[0], width), 0, dtype))


def _sums(left: Array, right: Array, bounds: Array, large: int, accumulator: Any, dtype: Any) -> Array:
    """``[G, I, J]``: the transposed rows of each group in ``left`` times those in ``right``."""
    shape = (left.shape[1], right.shape[1])
    sizes = [size << i for i in range(31) for size in (FEWEST_SUMMED, FEWEST_SUMMED * 3 // 2) if size << i < large]
    sizes.append(large)

    def product(blocks):
        return _dot(_transposed(blocks[0]), blocks[1], -1, -2, accumulator)

    def load(at, size):
        return [lax.dynamic_slice_in_dim(x, at, size) for x in (left, right)]

    def one_group(group, start, stop, sums):
        # The first tile takes what whole ones leave, in the smallest of the sizes that holds it.
        rest = (stop - start - 1) % large + 1

        def partial(size):
            at = jnp.minimum(start, left.shape[0] - size)
            own = _own(at, size, start, start + rest)
            # Both, for a NaN in a row of another group would survive a product with 0.
            return product([jnp.where(own, block, 0) for block in load(at, size)])

        def whole(index, total):
            return total + product(load(start + rest + index * large, large))

        smaller = sum((rest > size).astype(jnp.int32) for size in sizes[:-1])
        total = lax.switch(smaller, [functools.partial(partial, size) for size in sizes])
        total = _loop((stop - start - rest) // large, whole, total)
        return lax.dynamic_update_index_in_dim(sums, total.astype(dtype), group, 0)

    return _each_group(bounds, one_group, full_beside(left, (bounds.shape[0] - 1, *shape), 0, dtype))


def _each_group(bounds: Array, body: Callable, carry: Any) -> Any:
    """``body(group, start, stop, carry)`` for the groups that have rows; the others cost nothing."""
    starts, stops = bounds[:-1], bounds[1:]
    (filled,) = jnp.nonzero(stops > starts, size=starts.shape[0], fill_value=0)
    filled = filled.astype(jnp.int32)

    def step(index, carry):
        group = filled[index]
        return body(group, starts[group], stops[group], carry)

    return _loop((stops > starts).sum(dtype=jnp.int32), step, carry)


class _Steps(NamedTuple):
    """The tiles of all groups in order, with as many steps as there may be: of each its group, first row and last row's
    successor, and whether it is the group's first. Steps past the last tile have no rows."""

    group: Array
    first: Array
    stop: Array
    opens: Array


def _steps(bounds: Array, rows: int, size: int) -> _Steps:
    starts, stops = bounds[:-1], bounds[1:]
    groups = starts.shape[0]
    ends = jnp.cumsum((stops - starts + size - 1) // size, dtype=jnp.int32)
    step = jnp.arange(-(-rows // size) + groups, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(ends, step, side="right").astype(jnp.int32), groups - 1)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])[group]
    first = jnp.minimum(starts[group] + (step - before) * size, rows)
    opens = group != jnp.concatenate([jnp.full(1, -1, jnp.int32), group[:-1]])
    return _Steps(group, first, stops[group], opens)


def _rows_in_steps(
    x: Array, groups: Array, bounds: Array, transposed: bool, size: int, accumulator: Any, dtype: Any
) -> Array:
    """As ``_rows``, in a number of steps that is known."""
    steps = _steps(bounds, x.shape[0], size)

    def step(index, out):
        group, first, stop, _ = (values[index] for values in steps)
        at = jnp.minimum(first, x.shape[0] - size)
        matrix = lax.dynamic_index_in_dim(groups, group, keepdims=False)
        block = _dot(lax.dynamic_slice_in_dim(x, at, size), matrix, -1, -1 if transposed else -2, accumulator)
        old = lax.dynamic_slice_in_dim(out, at, size)
        block = jnp.where(_own(at, size, first, stop), block.astype(dtype), old)
        return lax.dynamic_update_slice_in_dim(out, block, at, 0)

    width = groups.shape[1 if transposed else 2]
    return lax.fori_loop(0, steps.group.shape[0], step, full_beside(x, (x.shape[0], width), 0, dtype))


def _sums_in_steps(left: Array, right: Array, bounds: Array, size: int, accumulator: Any, dtype: Any) -> Array:
    """As ``_sums``, in a number of steps that is known."""
    steps = _steps(bounds, left.shape[0], size)
    shape = (left.shape[1], right.shape[1])

    def step(index, carry):
        total, sums = carry
        group, first, stop, opens = (values[index] for values in steps)
        at = jnp.minimum(first, left.shape[0] - size)
        own = _own(at, size, first, stop)
        x, y = (jnp.where(own, lax.dynamic_slice_in_dim(z, at, size), 0) for z in (left, right))
        total = jnp.where(opens, 0, total) + _dot(x.T, y, -1, -2, accumulator)
        # A step without rows repeats the last group's sum, or opens a last group that has none.
        return total, lax.dynamic_update_index_in_dim(sums, total.astype(dtype), group, 0)

    start = full_beside(left, shape, 0, accumulator), full_beside(left, (bounds.shape[0] - 1, *shape), 0, dtype)
    return lax.fori_loop(0, steps.group.shape[0], step, start)[1]


def _own(at: Array, size: int, first: Array, stop: Array) -> Array:
    """``[size, 1]``: which rows of a tile loaded at ``at`` are from ``first`` on and before ``stop``."""
    rows = at + jnp.arange(size, dtype=jnp.int32)[:, None]
    return (rows >= first) & (rows < stop)


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


def _loop(steps: Array, body: Callable, carry: Any) -> Any:
    return lax.fori_loop(jnp.int32(0), steps, body, carry)


class XlaGroupedMatmul:
    """The implementation for every device."""

    name = "grouped-matmul-xla"
    version = 1
    reads: ClassVar = {"forward": ("blocksize_m",), "backward": ("blocksize_m",)}
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Tiles where nothing was tuned; where all tiles are of one size, smaller ones for small groups."""
        cls = FwdParams if direction == "forward" else BwdParams
        if "bounds" not in shapes:
            return cls()
        rows = ROWS_PER_TILE
        if device.kind != "cpu" and shapes["a"].shape[1] >= 2 * ROWS_PER_TILE * shapes["b"].shape[1]:
            rows = 2 * ROWS_PER_TILE
        return cls(blocksize_m=rows)

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
        """Tiles worth trying."""
        cls = FwdParams if direction == "forward" else BwdParams
        return [cls(blocksize_m=rows) for rows in (64, 128, 256, 512, 1024)] if "bounds" in shapes else []

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The parameters as the kernel uses them."""
        return effective(shapes, params)


kernel_registry.register(
    "grouped_matmul",
    Platform.XLA,
    Backend.ANY,
    support=Support(
        devices=any_device(),
        dtypes=ALL_FLOATS,
        features={
            *("ragged", "group_offset", "transpose_b", "preferred_element_type", "float64_result"),
            *("batched", "uneven_rows"),
        },
        gradients={"a", "b"},
    ),
)(XlaGroupedMatmul)
