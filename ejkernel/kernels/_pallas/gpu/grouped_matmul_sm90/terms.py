"""Both kernels' pieces in Mosaic GPU's own operations, each with a second form for JAX's interpreter, which has none of those."""

from __future__ import annotations

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import CHUNK, CORE_ROWS, ROWS
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import constant, multiply
from ejkernel.kernels._pallas.gpu.grouped_matmul_sm90.state import PANEL, Config

SWIZZLE = 2 * PANEL
# Sums stay in the registers of the product from step to step: in another order they would be moved while products are in flight.
SUMS = plgpu.Layout._WGMMA_ACC_32BIT


def _panels():
    return plgpu.RefType((plgpu.SwizzleTransform(SWIZZLE),))


def _sums(width: int) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct((ROWS, width), jnp.float32, layout=SUMS)


def zeros(c: Config, width: int):
    """Of the sums of a consumer."""
    if c.interpreted:
        return jnp.zeros((ROWS, width), jnp.float32)

    @plgpu.inline_mgpu(return_type=_sums(width))
    def make(_):
        return mgpu.WGMMAAccumulator.zero(ROWS, width).value.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT)

    return make()


def add_product(c: Config, acc, left, right, by_rows: bool):
    """``acc`` and the product of a step, in flight.

    ``left`` is a panel ``[rows, inner]``, or ``[inner, rows]`` if a sum is ``by_rows``; ``right`` are panels ``[inner, columns]``, or
    if transposed one of ``[columns, inner]``. The columns of ``acc`` may be fewer.
    """
    if c.interpreted:
        x, y = left[...], right[...]
        y = y[0].T if c.transposed else y.transpose((1, 0, 2)).reshape(PANEL, c.columns)
        plgpu.commit_smem()  # its race detector wants a fence between a read and a later copy
        product = jnp.dot(x.T if by_rows else x, y[:, : acc.shape[1]], preferred_element_type=jnp.float32)
        return acc + product

    def operand(ref, side_by_side: bool, next_panel: int = 0):
        """The descriptor of the first instruction's part, and where those of all lie; ``side_by_side``: what is not summed over."""
        first = mma_utils.encode_descriptor(
            ref, leading_byte_offset=next_panel, stride_byte_offset=CORE_ROWS * SWIZZLE, swizzle=SWIZZLE
        )
        each = CHUNK * SWIZZLE if side_by_side else 2 * CHUNK
        return first, [each * i for i in range(PANEL // CHUNK)]

    @plgpu.inline_mgpu(arg_types=(SUMS, _panels(), _panels()), return_type=_sums(acc.shape[1]))
    def start(_, acc, left, right):
        acc = multiply(
            acc,
            operand(left, by_rows),
            operand(right, not c.transposed, PANEL * SWIZZLE),
            ir.MemRefType(left.type).element_type,
            transposed=not c.transposed,
            left_transposed=by_rows,
        )
        nvvm.wgmma_commit_group_sync_aligned()
        return acc

    return start(acc, left, right)


def finished(c: Config, acc):
    """The sums once all products are done."""
    if c.interpreted:
        return acc

    @plgpu.inline_mgpu(
        arg_types=(SUMS,), return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=plgpu.Layout.WGMMA)
    )
    def wait(_, acc):
        nvvm.wgmma_wait_group_sync_aligned(0)
        return fragmented_array.optimization_barrier(acc).to_layout(fragmented_array.WGMMA_LAYOUT)

    return wait(acc)


def store_info(c: Config, slot, values):
    """What consumers read of a tile, by a warp."""
    if c.interpreted:
        for i, value in enumerate(values):
            slot[i] = jnp.int32(value)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * len(values)))
    def store(_, slot, *values):
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARP):
            for i, value in enumerate(values):
                memref.store(value.registers.flat[0], slot, [arith.constant(ir.IndexType.get(), i)])
        nvvm.bar_warp_sync(constant(-1))

    store(slot, *values)


def store_rows(c: Config, acc, out, staging, row, stop, column):
    """``acc`` to the rows ``[row, stop)`` of ``out`` that it has, and the columns from ``column`` on; ``staging``: for the interpreter.

    From registers: a copy by TMA would write the rows of the next group too.
    """
    x = acc.astype(out.dtype)
    width = out.shape[1]
    if c.interpreted:
        _store_interpreted(c, x, out, staging, row, stop, column)
        return
    scalar = plgpu.Layout.WG_SPLAT(())
    half = out.dtype.itemsize == 2

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), scalar, scalar, scalar))
    def store(_, x, out, *scalars):
        row, stop, column = (scalar.registers.flat[0] for scalar in scalars)
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(out))
        lane = arith.remui(mgpu.thread_idx(), constant(32))
        warp = arith.remui(arith.divui(mgpu.thread_idx(), constant(32)), constant(4))
        quad = arith.remui(lane, constant(4))
        first = arith.addi(row, arith.addi(arith.muli(warp, constant(16)), arith.divui(lane, constant(4))))
        # In 16 bits a lane stores 8 columns of every 32, else 2 of every 8.
        column = arith.addi(column, arith.muli(quad, constant(8 if half else 2)))
        span, size = (32, 2) if half else (8, 4)
        for below in range(2):
            words = {at[1]: register for at, register in np.ndenumerate(x.registers) if at[4] == below}
            at = arith.addi(first, constant(8 * below))
            place = arith.addi(arith.muli(arith.extsi(i64, at), arith.constant(i64, width)), arith.extsi(i64, column))
            address = arith.addi(base, arith.muli(place, arith.constant(i64, size)))
            inside = arith.cmpi(arith.CmpIPredicate.slt, at, stop)
            for i in range(x.shape[1] // span):
                some = inside
                if width % c.columns:
                    right = arith.cmpi(arith.CmpIPredicate.slt, arith.addi(column, constant(span * i)), constant(width))
                    some = arith.andi(some, right)
                if half:
                    values = _gathered([llvm.bitcast(i32, words[4 * i + j]) for j in range(4)], quad)
                else:
                    values = [llvm.bitcast(i32, y) for y in scalars_of(words[i])]
                names = ", ".join(f"${1 + j}" for j in range(len(values)))
                flag = f"{{ .reg .pred p; setp.ne.b32 p, ${1 + len(values)}, 0; "
                code = f"{flag}@p st.global.v{len(values)}.b32 [$0 + {span * size * i}], {{{names}}}; }}"
                llvm.inline_asm(
                    None,
                    [address, *values, arith.extui(i32, some)],
                    code,
                    ",".join(["l", *["r"] * (len(values) + 1)]),
                    has_side_effects=True,
                )

    store(x, out, *(jnp.int32(value) for value in (row, stop, column)))


def scalars_of(register: ir.Value) -> list[ir.Value]:
    from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import scalars

    return scalars(register)


def _gathered(words, quad):
    """Of four words of each of four lanes the lane's number of every lane: a lane then has what lies side by side.

    Two exchanges: of pairs of words with the lane two away, of single ones with its neighbour.
    """
    i32 = ir.IntegerType.get_signless(32)
    words = list(words)
    for distance in (2, 1):
        upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(quad, constant(distance)), constant(0))
        for j in range(4):
            if j & distance:
                continue
            low, high = words[j], words[j + distance]
            code = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
            sent = arith.select(upper, low, high)
            got = llvm.inline_asm(i32, [sent], code, "=r,r", has_side_effects=True)
            words[j], words[j + distance] = arith.select(upper, got, low), arith.select(upper, high, got)
    return words


def _store_interpreted(c: Config, x, out, staging, row, stop, column):
    """A tile that lies inside at once, else row by row; how much of the last tile of columns is inside is static."""
    width, edge = x.shape[1], out.shape[1] % c.columns
    last = column + width > out.shape[1]
    whole = (row + ROWS <= stop) & ~last

    @pl.when(whole)
    def _():
        out[pl.ds(row, ROWS), pl.ds(column, width)] = x

    @pl.when(~whole)
    def _():
        staging[:, :width] = x

        def rows(inside: int):
            def one(r, _):
                out[row + r, pl.ds(column, inside)] = staging[r, pl.ds(0, inside)]

            lax.fori_loop(0, jnp.clip(stop - row, 0, ROWS), one, None)

        pl.when(~last)(lambda: rows(width))
        if edge % width:
            pl.when(last)(lambda: rows(min(edge, width)))
