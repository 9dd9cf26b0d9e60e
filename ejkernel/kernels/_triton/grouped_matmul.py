"""Grouped matrix products in Triton: which tiles, and what is launched.

Forward and the gradient of ``a`` are one kernel, rows times the matrix of their group, whose matrices are read as they are or
transposed; the gradient of ``b`` is another, a sum over the rows of each group. Both forms run on both: a batch is groups
that all have as many rows. Where rows begin and end is read on the device, so one compilation serves all sizes.

Default tiles are those that fit the chips and spill nothing; they have been timed on an H200 alone.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.callib.chips import CHIPS
from ejkernel.callib.integers import power_of_two, power_of_two_below
from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import BwdParams, FwdParams, params_class
from ejkernel.contracts.support import HeadDims
from ejkernel.kernels._triton.call import call, cores, product_precision
from ejkernel.kernels._triton.flash_blocks import generation
from ejkernel.kernels._triton.registering import PRIORITY, register

READ = ("blocksize_m", "blocksize_n", "blocksize_k", "num_warps", "num_stages")
SMALLEST_SIDE, LARGEST_SIDE = 16, 256
# A matrix' gradient has tiles of at least so many rows: how few rows the groups have does not matter there.
SMALLEST_SIDE_OF_SUMS = 64
MOST_WARPS, MOST_WARPS_ON_AMD = 32, 16
ALIGNED = 16
# Groups that one program looks through at once.
MOST_GROUPS_AT_ONCE = 1024
# Warps of the persistent programs of a multiprocessor. Tiles of few rows wait for memory: more of them are under way.
WARPS_PER_CORE, WARPS_PER_CORE_OF_FEW_ROWS, FEW_ROWS = 8, 16, 32
# Of a chip that is not in the table.
SHARED_MEMORY = 99 * 1024

# (rows, columns, products a step, warps, stages), by the rows that a group has on average, up to the number in front. They fit the
# chips' shared memory and spill nothing.
Tiles = dict[int | None, tuple[int, int, int, int, int]]
FEW: Tiles = {16: (16, 128, 64, 4, 4), 32: (32, 128, 64, 4, 4), 64: (64, 128, 64, 4, 3)}
HALF: dict[str, Tiles] = {
    "hopper": {**FEW, None: (128, 256, 64, 8, 3)},
    "blackwell": {**FEW, None: (128, 128, 64, 8, 4)},
    "ampere": {**FEW, None: (128, 128, 64, 8, 3)},
    "small": {16: (16, 128, 64, 4, 3), 32: (32, 128, 64, 4, 3), 64: (64, 128, 32, 4, 3), None: (128, 128, 32, 8, 3)},
    "amd": {16: (16, 128, 64, 4, 2), 32: (32, 128, 64, 4, 2), 64: (64, 128, 64, 4, 2), None: (128, 128, 64, 8, 2)},
}
FLOAT32: Tiles = {16: (16, 64, 32, 8, 3), 32: (32, 64, 32, 8, 3), None: (64, 64, 32, 8, 3)}
FULL: dict[str, Tiles] = {
    "hopper": {**FLOAT32, None: (128, 64, 32, 8, 2)},
    "blackwell": FLOAT32,
    "ampere": FLOAT32,
    "small": FLOAT32,
    "amd": {16: (16, 64, 32, 4, 2), 32: (32, 64, 32, 4, 2), None: (64, 64, 32, 4, 2)},
}
# Where rows are not aligned: addresses of numbers that are loaded one by one fill registers.
UNALIGNED_HALF: Tiles = {16: (16, 64, 32, 4, 2), 32: (32, 64, 32, 4, 2), None: (64, 64, 32, 8, 2)}
UNALIGNED_FULL: Tiles = {16: (16, 64, 16, 8, 2), 32: (32, 64, 16, 8, 2), None: (64, 64, 16, 8, 2)}
# Worth trying beside them.
MORE_HALF = (
    *((16, 128, 128, 4, 4), (16, 256, 64, 4, 4), (32, 256, 64, 8, 4), (64, 128, 64, 4, 4), (64, 256, 64, 4, 3)),
    *((64, 256, 64, 8, 4), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4)),
    (256, 128, 64, 8, 3),
)
MORE_FULL = (
    *((16, 128, 32, 4, 4), (32, 128, 32, 4, 3), (64, 64, 32, 4, 2), (64, 128, 32, 4, 2), (64, 128, 32, 8, 2)),
    *((128, 64, 32, 4, 2), (128, 128, 32, 8, 2), (128, 128, 16, 8, 3)),
)


def forward(
    arrays: dict[str, Array], spec: Any, params: FwdParams, *, device: DeviceInfo | None = None
) -> tuple[Array, None]:
    """``out`` and nothing else: the gradients need the operands alone."""
    params = effective(arrays, spec, params, device)
    return _rows(arrays["a"], arrays["b"], arrays, spec.transpose_b, spec.dtype, params, device), None


def backward(
    arrays: dict[str, Array],
    spec: Any,
    params: BwdParams,
    out: Array,
    residual: None,
    dout: Array,
    dresidual: None,
    wanted: frozenset[str] = frozenset({"a", "b"}),
    device: DeviceInfo | None = None,
) -> dict[str, Array]:
    """The gradients by name."""
    a, b = arrays["a"], arrays["b"]
    params = effective(arrays, spec, params, device)
    grads = {}
    if "a" in wanted:
        grads["a"] = _rows(dout, b, arrays, not spec.transpose_b, a.dtype, params, device)
    if "b" in wanted:
        left, right = (dout, a) if spec.transpose_b else (a, dout)
        grads["b"] = _sums(left, right, arrays, params, device)
    return grads


def _rows(
    x: Array,
    matrices: Array,
    arrays: dict[str, Array],
    transposed: bool,
    dtype: Any,
    params: FwdParams | BwdParams,
    device: DeviceInfo | None,
) -> Array:
    """Rows times the matrix of their group."""
    from ejkernel.kernels._triton import grouped_matmul_kernels as kernels

    *lead, rows, inner = x.shape
    columns, groups = matrices.shape[-2 if transposed else -1], _groups(matrices)
    bm, bn, bk = params.blocksize_m, params.blocksize_n, params.blocksize_k
    row_tiles = -(-rows // bm)
    # What lies before the first group and behind the last one has tiles of its own.
    row_tiles = row_tiles + groups + 1 if "bounds" in arrays else row_tiles * groups
    constants, lengths = _constants(
        (x, matrices), (inner, columns), (bk, bn), device, bm=bm, bn=bn, bk=bk, transposed=transposed, **_form(arrays)
    )
    (out,) = call(
        kernels.rows_times_matrices,
        [x, matrices, arrays.get("bounds", x)],
        [rows, *lengths, groups],
        [jax.ShapeDtypeStruct((*lead, rows, columns), dtype)],
        programs=min(_most_programs(bm, params.num_warps, device), row_tiles * -(-columns // bn)),
        constants=constants,
        num_warps=params.num_warps,
        num_stages=params.num_stages,
        device=device,
    )
    return out


def _sums(
    left: Array,
    right: Array,
    arrays: dict[str, Array],
    params: BwdParams,
    device: DeviceInfo | None,
) -> Array:
    """The gradient of ``b``: of each group the transposed rows of ``left`` times those of ``right``."""
    from ejkernel.kernels._triton import grouped_matmul_kernels as kernels

    b = arrays["b"]
    inner, columns, groups = left.shape[-1], right.shape[-1], _groups(b)
    bm, bn, bk = _side_of_sums(params), params.blocksize_n, params.blocksize_k
    constants, lengths = _constants(
        (left, right), (inner, columns), (bm, bn), device, bm=bm, bn=bn, bk=bk, transposed=False, **_form(arrays)
    )
    (sums,) = call(
        kernels.sums_over_rows,
        [left, right, arrays.get("bounds", left)],
        [left.shape[-2], *lengths, groups],
        [jax.ShapeDtypeStruct(b.shape, b.dtype)],
        programs=min(_most_programs(bm, params.num_warps, device), groups * -(-inner // bm) * -(-columns // bn)),
        constants=constants,
        num_warps=params.num_warps,
        num_stages=params.num_stages,
        device=device,
    )
    return sums


def _form(arrays: dict[str, Array]) -> dict[str, Any]:
    """What a kernel must know of the groups; those before the first one and behind the last one count too."""
    if "bounds" not in arrays:
        return {"dense": True, "gb": 1, "many": False}
    entries = arrays["bounds"].shape[1] + 1
    at_once = min(MOST_GROUPS_AT_ONCE, power_of_two(entries))
    return {"dense": False, "gb": at_once, "many": entries > at_once}


def _constants(
    operands: tuple[Array, Array], lengths: tuple[int, int], tiles: tuple[int, int], device: Any, **known: Any
) -> tuple[Any, list[int]]:
    """What a kernel is compiled for, and the lengths of both operands' last axes in units."""
    from ejkernel.kernels._triton.grouped_matmul_kernels import GroupedConstants

    units = [_unit(length) for length in lengths]
    even = [length % tile == 0 for length, tile in zip(lengths, tiles, strict=True)]
    constants = GroupedConstants(
        inner_unit=units[0],
        column_unit=units[1],
        even_inner=even[0],
        even_columns=even[1],
        wide=max(lengths) * LARGEST_SIDE >= 2**31,
        widen=operands[0].dtype != operands[1].dtype,
        precision=product_precision(jnp.promote_types(*(x.dtype for x in operands)), device),
        **known,
    )
    return constants, [length // unit for length, unit in zip(lengths, units, strict=True)]


def _unit(length: int) -> int:
    """The power of two that a length is counted in: the compiler must know of it to load wide."""
    return math.gcd(length, ALIGNED)


def _groups(matrices: Any) -> int:
    return math.prod(matrices.shape[:-2])


def _side_of_sums(params: FwdParams | BwdParams) -> int:
    return max(SMALLEST_SIDE_OF_SUMS, params.blocksize_m)


def _most_programs(bm: int, warps: int, device: DeviceInfo | None) -> int:
    """Programs that share the tiles: those that a multiprocessor holds at once, on each."""
    resident = WARPS_PER_CORE_OF_FEW_ROWS if bm <= FEW_ROWS else WARPS_PER_CORE
    return cores(device) * max(1, resident // warps)


def _operands(shapes: dict[str, Any], spec: Any, params: type) -> Any:
    """The dtype that is multiplied."""
    dtype = shapes["a"].dtype
    return dtype if params is FwdParams else jnp.promote_types(dtype, spec.dtype)


def effective(
    shapes: dict[str, Any], spec: Any, params: FwdParams | BwdParams, device: DeviceInfo | None
) -> FwdParams | BwdParams:
    """The parameters as the kernels use them: tiles of powers of two, no larger than the arrays, that fit shared memory."""
    a, b = shapes["a"].shape, shapes["b"].shape
    longest = max(*b[-2:])
    bm = _side(params.blocksize_m or 64, a[-2])
    bn, bk = _side(params.blocksize_n or 128, longest), _side(params.blocksize_k or 32, longest)
    backward = isinstance(params, BwdParams)
    side = max(bm, SMALLEST_SIDE_OF_SUMS) if backward else bm
    size = _operands(shapes, spec, type(params)).itemsize
    chip = CHIPS.get(device.name) if device is not None else None
    room = chip.shared_memory_per_block if chip else SHARED_MEMORY
    while (side + bn) * bk * size > room and bk > SMALLEST_SIDE:
        bk //= 2
    most_warps = MOST_WARPS_ON_AMD if device is not None and device.vendor == "amd" else MOST_WARPS
    return type(params)(
        blocksize_m=bm,
        blocksize_n=bn,
        blocksize_k=bk,
        num_warps=min(most_warps, power_of_two_below(params.num_warps or 4)),
        num_stages=max(1, min(params.num_stages or 2, room // ((side + bn) * bk * size))),
    )


def _side(size: int, length: int) -> int:
    return max(SMALLEST_SIDE, min(LARGEST_SIDE, power_of_two_below(size), power_of_two(length)))


def _tiles(params: type, tiles: tuple[int, int, int, int, int]) -> FwdParams | BwdParams:
    bm, bn, bk, warps, stages = tiles
    return params(blocksize_m=bm, blocksize_n=bn, blocksize_k=bk, num_warps=warps, num_stages=stages)


class TritonGroupedMatmul:
    """The implementation for GPUs."""

    name = "grouped-matmul-triton"
    version = 1
    reads: ClassVar = {"forward": READ, "backward": READ}
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Tiles where nothing was tuned: about as high as a group has rows on average."""
        params = params_class(direction)
        half = _operands(shapes, spec, params).itemsize == 2
        tables, unaligned = (HALF, UNALIGNED_HALF) if half else (FULL, UNALIGNED_FULL)
        aligned = min(map(_unit, shapes["b"].shape[-2:])) * shapes["a"].dtype.itemsize >= ALIGNED
        rows = shapes["a"].shape[-2]
        each = -(-rows // max(1, _groups(shapes["b"]))) if "bounds" in shapes else rows
        tiles = tables[generation(device)] if aligned else unaligned
        return _tiles(params, next(tiles[most] for most in tiles if most is None or each <= most))

    @staticmethod
    def handicap(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> int:
        """The batched form is left to XLA, which has its vendors' products for it."""
        return 0 if "bounds" in shapes else PRIORITY + 1

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
        """Tiles worth trying."""
        params = params_class(direction)
        return [_tiles(params, x) for x in (MORE_HALF if _operands(shapes, spec, params).itemsize == 2 else MORE_FULL)]

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The parameters as the kernels use them."""
        return effective(shapes, spec, params, device)


register(
    "grouped_matmul",
    features={"ragged", "group_offset", "transpose_b", "preferred_element_type", "batched", "uneven_rows"},
    gradients={"a", "b"},
    head_dims=HeadDims(),
)(TritonGroupedMatmul)
