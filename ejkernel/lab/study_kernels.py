"""The study's Triton kernels, a product of matrices and of a matrix with a vector, and with which tiles they run.

Arrays are row-major and whole. Sizes along which memory is contiguous come in units (``k_unit``, ``n_unit``), so that
the compiler knows of rows that are aligned, and loads wide. Offsets that grow with a matrix have 64 bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from ejkernel.callib.calibration import get_shared_memory_limit
from ejkernel.callib.chips import CHIPS
from ejkernel.contracts.device import DeviceInfo
from ejkernel.kernels._triton.call import call, interpreting

# Tiles of the product, (m, n, k, warps, stages), the largest first; none spills on the chips that the tests compile
# for.
HALF = ((128, 256, 64, 8, 4), (128, 128, 64, 8, 3), (64, 64, 64, 4, 3))
HALF_THIN = ((16, 128, 128, 4, 3),)
FULL = ((128, 128, 16, 8, 3), (64, 64, 16, 4, 3))
FULL_THIN = ((16, 64, 32, 4, 3),)
# Rows that are not aligned are loaded one element at a time, which takes registers.
HALF_UNALIGNED = ((128, 64, 32, 8, 2),)
HALF_UNALIGNED_THIN = ((16, 64, 32, 4, 2),)
# Hopper and later keep the widest tile's accumulator where it does not crowd out the rest.
WIDE_FROM = 90
ALIGNED = 16
# Rows of tiles that programs side by side work on.
GROUP = 8
# How many programs keep a large GPU busy; those that only wait for memory come in fours.
PROGRAMS = 128
# Elements of a gemv's tile, 32 for each thread of four warps.
GEMV_TILE = 4096
MOST_ROWS = 64
# Elements of the largest tile that a block of threads has registers for.
LARGEST_TILE = 2**16


@dataclass(frozen=True)
class GemmConstants:
    """What ``gemm`` is compiled for: tiles, rows of tiles in a group, units; no size, so one kernel serves them all.

    ``tail`` tells whether the last step over ``k`` is not a whole one.
    """

    bm: int
    bn: int
    bk: int
    group: int
    n_unit: int
    k_unit: int
    tail: bool
    precision: str


@dataclass(frozen=True)
class GemvConstants:
    """What ``gemv`` is compiled for: its tile and the unit of its rows."""

    bm: int
    bk: int
    k_unit: int


@triton.jit
def gemm(a, b, m, n, k, out, C: tl.constexpr):
    """One tile ``[bm, bn]`` of the product."""
    n = n * C.n_unit
    k = k * C.k_unit
    program = tl.program_id(0)
    # Programs that run side by side take a few rows of tiles and go along the columns: the operands' tiles that they
    # have in common are still in the L2 cache.
    across = tl.cdiv(n, C.bn)
    first = program // (C.group * across) * C.group
    height = tl.minimum(tl.cdiv(m, C.bm) - first, C.group)
    within = program % (C.group * across)
    rows = (first + within % height) * C.bm + tl.arange(0, C.bm)
    cols = within // height * C.bn + tl.arange(0, C.bn)
    depth = tl.arange(0, C.bk)
    row_inside, col_inside = (rows < m)[:, None], (cols < n)[None, :]
    a_tile = (a + rows.to(tl.int64) * k)[:, None] + depth[None, :]
    b_tile = (b + depth.to(tl.int64) * n)[:, None] + cols[None, :]
    b_step = tl.full([], C.bk, tl.int64) * n
    acc = tl.full([C.bm, C.bn], 0.0, tl.float32)
    for _ in tl.range(0, k // C.bk):
        x = tl.load(a_tile, mask=row_inside, other=0.0)
        y = tl.load(b_tile, mask=col_inside, other=0.0)
        acc = tl.dot(x, y, acc, input_precision=C.precision)
        a_tile += C.bk
        b_tile += b_step
    if C.tail:
        left = k % C.bk // C.k_unit * C.k_unit  # for the compiler's eyes: a multiple of the unit
        x = tl.load(a_tile, mask=row_inside & (depth < left)[None, :], other=0.0)
        y = tl.load(b_tile, mask=col_inside & (depth < left)[:, None], other=0.0)
        acc = tl.dot(x, y, acc, input_precision=C.precision)
    out_tile = (out + rows.to(tl.int64) * n)[:, None] + cols[None, :]
    tl.store(out_tile, acc.to(out.dtype.element_ty), mask=row_inside & col_inside)


@triton.jit
def gemv(a, x, m, k, steps, out, C: tl.constexpr):
    """``bm`` rows times ``steps`` blocks of the vector: one part of the sums, in ``out[part, rows]``."""
    k = k * C.k_unit
    program = tl.program_id(0)
    blocks = tl.cdiv(m, C.bm)
    part = (program // blocks).to(tl.int64)
    rows = program % blocks * C.bm + tl.arange(0, C.bm)
    row_inside = rows < m
    starts = (a + rows.to(tl.int64) * k)[:, None]
    # Lanes sum for themselves, and meet once at the end.
    acc = tl.full([C.bm, C.bk], 0.0, tl.float32)
    for t in tl.range(0, steps):
        cols = (program // blocks * steps + t) * C.bk + tl.arange(0, C.bk)
        col_inside = cols < k
        values = tl.load(x + cols, mask=col_inside, other=0.0).to(tl.float32)
        # Of the matrix nothing is read twice.
        tile = tl.load(
            starts + cols[None, :],
            mask=row_inside[:, None] & col_inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        acc += tile.to(tl.float32) * values[None, :]
    tl.store(out + part * m + rows, tl.sum(acc, 1).to(out.dtype.element_ty), mask=row_inside)


def run_gemm(a: Array, b: Array, block: tuple[int, int, int] | None, device: DeviceInfo) -> Array:
    """``a @ b`` for sizes above 0."""
    (m, k), n = a.shape, b.shape[1]
    n_unit, k_unit = _unit(n), _unit(k)
    bm, bn, bk, warps, stages = (
        _own_tile(block, a.dtype, device) if block else _tile(m, n, a.dtype, n_unit == k_unit == ALIGNED, device)
    )
    constants = GemmConstants(
        bm, bn, bk, GROUP, n_unit, k_unit, k % bk > 0, "ieee" if a.dtype == jnp.float32 else "tf32"
    )

    @jax.custom_batching.sequential_vmap
    def run(a, b):
        (out,) = call(
            gemm,
            [a, b],
            [m, n // n_unit, k // k_unit],
            [jax.ShapeDtypeStruct((m, n), a.dtype)],
            programs=triton.cdiv(m, bm) * triton.cdiv(n, bn),
            constants=constants,
            num_warps=warps,
            num_stages=stages,
            device=device,
        )
        return out

    return _as_interpretable(run, a, b)


def run_gemv(a: Array, x: Array, block: tuple[int, int] | None, device: DeviceInfo) -> Array:
    """``a @ x`` for sizes above 0. Where the rows are few, several programs share a sum and XLA adds their parts."""
    m, k = a.shape
    bm, bk = block or _gemv_tile(m, k, a.dtype)
    blocks, steps = triton.cdiv(m, bm), triton.cdiv(k, bk)
    steps = triton.cdiv(steps, min(steps, triton.cdiv(4 * PROGRAMS, blocks)))
    parts = triton.cdiv(k, bk * steps)

    @jax.custom_batching.sequential_vmap
    def run(a, x):
        (sums,) = call(
            gemv,
            [a, x],
            [m, k // _unit(k), steps],
            [jax.ShapeDtypeStruct((parts, m), jnp.float32 if parts > 1 else a.dtype)],
            programs=blocks * parts,
            constants=GemvConstants(bm, bk, _unit(k)),
            num_warps=4,
            num_stages=2,
            device=device,
        )
        return jnp.sum(sums, 0).astype(a.dtype) if parts > 1 else sums[0]

    return _as_interpretable(run, a, x)


def misfit(block: tuple[int, ...], dtype: Any, device: DeviceInfo) -> str | None:
    """What is expected of a tile that asks for more registers or shared memory than there are, else None."""
    m, n, k = block if len(block) == 3 else (*block, 0)
    if m * n > LARGEST_TILE:
        return f"a tile of at most {LARGEST_TILE} sums"
    if device.kind == "gpu" and k and not _stages(block, dtype, device):
        return f"operands' tiles that fit in the {_shared_memory(device)} bytes of shared memory of {device}"
    return None


def _tile(m: int, n: int, dtype: Any, aligned: bool, device: DeviceInfo) -> tuple[int, ...]:
    """The largest tile of which there are enough to keep the device busy."""
    half, thin = jnp.dtype(dtype).itemsize == 2, m <= 16
    if not aligned:
        tiles = (HALF_UNALIGNED_THIN if thin else HALF_UNALIGNED) if half else FULL_THIN if thin else FULL[1:]
    elif thin:
        tiles = HALF_THIN if half else FULL_THIN
    else:
        tiles = FULL if not half else HALF if device.capability >= WIDE_FROM else HALF[1:]
    tile = next((t for t in tiles if triton.cdiv(m, t[0]) * triton.cdiv(n, t[1]) >= PROGRAMS), tiles[-1])
    return *tile[:4], _stages(tile[:3], dtype, device, tile[4])


def _own_tile(block: tuple[int, int, int], dtype: Any, device: DeviceInfo) -> tuple[int, ...]:
    return *block, 8 if block[0] * block[1] >= 8192 else 4, _stages(block, dtype, device)


def _stages(block: tuple[int, ...], dtype: Any, device: DeviceInfo, most: int = 3) -> int:
    """How many steps' operands fit in shared memory at once."""
    m, n, k = block
    if device.kind != "gpu":
        return most
    return min(most, _shared_memory(device) // ((m + n) * k * jnp.dtype(dtype).itemsize))


def _shared_memory(device: DeviceInfo) -> int:
    return get_shared_memory_limit(device.name if device.name in CHIPS else None)


def _gemv_tile(m: int, k: int, dtype: Any) -> tuple[int, int]:
    """Rows as long as four warps load at once, 16 bytes a thread, and as many of them as there are registers for."""
    bk = min(triton.next_power_of_2(k), 2048 // jnp.dtype(dtype).itemsize)
    return min(triton.next_power_of_2(m), max(GEMV_TILE // bk, 1), MOST_ROWS), bk


def _unit(size: int) -> int:
    return ALIGNED if size % ALIGNED == 0 else 1


def _as_interpretable(run: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    """Triton's interpreter knows no bfloat16: its numbers are float32 numbers, and so are its products."""
    if interpreting() and a.dtype == jnp.bfloat16:
        return run(a.astype(jnp.float32), b.astype(jnp.float32)).astype(a.dtype)
    return run(a, b)
