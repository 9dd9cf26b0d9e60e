"""What Pallas does not offer, in Mosaic GPU's own operations: products in flight as arrays, branches of a warp.

Every function has a second form for JAX's interpreter, which has none of Mosaic GPU's own operations: products then
wait at once, and left operands go through shared memory.

``requirements`` lists what is private or unstable of what this module uses: a name that is added here belongs there
too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, scf, vector

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import CHUNK, ROWS, KernelConfig

# The module; the package has a function of that name.
_wgmma = importlib.import_module("jax.experimental.mosaic.gpu.wgmma")

# The index that ``plgpu.load`` requires before jax 0.11, deprecates since, and no longer takes in 0.12.
_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
WHOLE = ((),) if _INDEX is not None and _INDEX.default is inspect.Parameter.empty else ()
# The layout of what there is one of in each row.
BY_ROW = plgpu.Layout.WGMMA.reduce(1)


def swizzle_of(width: int) -> int:
    """Bytes: the widest swizzle that divides a row of 16-bit elements."""
    return min(128, (width * 2) & -(width * 2))


def transforms(width: int) -> tuple[Any, ...]:
    swizzle = swizzle_of(width)
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def array_of(shape) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA)


def start_qk(c: KernelConfig, q, k):
    """``q · kᵀ`` in flight: an array that may be used only after ``wait_for_products``."""
    if c.interpreted:
        return _product(q, k.transpose((1, 0)), c.step)
    tiled = plgpu.RefType(transforms(c.dim))

    @plgpu.inline_mgpu(arg_types=(tiled, tiled), return_type=array_of((ROWS, c.step)))
    def start(_, q, k):
        zeros = mgpu.WGMMAAccumulator.zero(ROWS, c.step)
        acc = mgpu.wgmma(zeros, q, mgpu.memref_transpose(k, (1, 0, 3, 2)), swizzle=swizzle_of(c.dim))
        nvvm.wgmma_commit_group_sync_aligned()
        return acc.value

    return start(q, k)


def start_pv(c: KernelConfig, acc, p16, v, p_smem):
    """``acc + p16 · v`` in flight; ``p_smem``: for the interpreter."""
    if c.interpreted:
        p_smem[...] = p16
        plgpu.commit_smem()
        return acc + _product(p_smem, v, c.value_dim)
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, layout, plgpu.RefType(transforms(c.value_dim))), return_type=array_of(acc.shape)
    )
    def start(_, acc, p16, v):
        acc = _by_chunks(acc, p16, v, swizzle_of(c.value_dim))
        nvvm.wgmma_commit_group_sync_aligned()
        return acc

    return start(acc, p16, v)


def _product(a, b, columns: int):
    """``a · b`` in the interpreter."""

    def products(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(products, plgpu.ACC((ROWS, columns), jnp.float32))


def _by_chunks(acc, p16, v, swizzle: int):
    """``acc + p16 · v``, 16 keys an instruction. Mosaic GPU's own takes multiples of a swizzle's columns."""
    (first, (_, (stride,))), _, fastest = mma_utils.create_descriptor(
        v, swizzle=swizzle, group_size=(CHUNK, acc.shape[1]), logical_k_major=True
    )
    rights = [i * stride for i in range(p16.shape[1] // CHUNK)]
    return multiply(acc, p16, (first, rights), p16.mlir_dtype, transposed=fastest != mma_utils.Dim.K)


def multiply(acc, left, right, kind: ir.Type, transposed: bool, left_transposed: bool = False):
    """``acc + left · right`` in flight, 16 of what is summed over an instruction.

    An operand in shared memory is a pair: the descriptor of its first part, and for each instruction how many bytes behind
    that its part lies. ``left`` may be an array in registers. ``transposed``: whether the columns of ``right`` lie side by side;
    ``left_transposed``: whether the rows of ``left`` do.
    """
    in_registers = isinstance(left, mgpu.FragmentedArray)
    value = _wgmma.wgmma_fence(acc.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT))
    if in_registers:
        left = _wgmma.wgmma_fence(left)
    parameters = inspect.signature(_wgmma.wgmma_m64).parameters
    kinds = {name: kind for name in ("element_type", "a_element_type", "b_element_type") if name in parameters}
    registers = value.registers
    for i, place in enumerate(right[1]):
        registers = _wgmma.wgmma_m64(
            registers,
            left[:, i * CHUNK : (i + 1) * CHUNK] if in_registers else _behind(left[0], left[1][i]),
            _behind(right[0], place),
            a_transpose=None if in_registers else left_transposed,
            b_transpose=transposed,
            a_k_stride=None if in_registers else 2 * CHUNK,
            b_k_stride=2 * CHUNK,
            n=acc.shape[1],
            swizzle=2 * CHUNK,  # by which it counts the instructions: one
            **kinds,
        )
    return array_like(value, registers.flat).to_layout(acc.layout)


def _behind(descriptor: ir.Value, offset: int) -> ir.Value:
    """The descriptor of what lies so many bytes behind."""
    offset = arith.constant(ir.IntegerType.get_signless(64), mma_utils.encode_addr(offset))
    return llvm.add(descriptor, offset, overflow_flags=llvm.IntegerOverflowFlags.none)


def wait_for_products(c: KernelConfig, pending: int, *arrays):
    """``arrays`` once no more than ``pending`` products are in flight."""
    if c.interpreted:
        return arrays
    layouts = (plgpu.Layout.WGMMA,) * len(arrays)

    @plgpu.inline_mgpu(arg_types=layouts, return_type=tuple(array_of(x.shape) for x in arrays))
    def wait(_, *arrays):
        nvvm.wgmma_wait_group_sync_aligned(pending)
        held = fragmented_array.optimization_barrier(*arrays)
        return tuple(held) if len(arrays) > 1 else (held,)

    return wait(*arrays)


def reduce_rows(c: KernelConfig, x, how: str):
    """The "max" or the sum ("add") of each row. Pallas' own reduction takes shared memory, without need."""
    if c.interpreted:
        return x.max(axis=1) if how == "max" else x.sum(axis=1)
    rows = plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=BY_ROW)
    return plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=rows)(lambda _, x: x.reduce(how, 1))(x)


def rescale_rows(c: KernelConfig, acc, decay):
    """``acc`` times ``decay`` by rows. A warp whose rows all have a decay of 1 skips it."""
    if c.interpreted:
        return acc * lax.broadcast_in_dim(decay, acc.shape, [0])

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, BY_ROW), return_type=array_of(acc.shape))
    def warp_branch(_, acc, decay):
        i32 = ir.IntegerType.get_signless(32)
        changed = [
            arith.extui(i32, arith.cmpf(arith.CmpFPredicate.UNE, x, constant(1.0)))
            for register in decay.registers.flat
            for x in scalars(register)
        ]
        # The whole warp takes the branch or not: wgmma needs its threads converged.
        vote = "{ .reg .pred a, b; setp.ne.b32 a, $1, 0; vote.sync.any.pred b, a, 0xffffffff; selp.b32 $0, 1, 0, b; }"
        some = changed[0]
        for x in changed[1:]:
            some = arith.ori(some, x)
        some = llvm.inline_asm(i32, [some], vote, "=r,r", has_side_effects=True)
        some = arith.cmpi(arith.CmpIPredicate.ne, some, constant(0))
        branch = scf.IfOp(some, [x.type for x in acc.registers.flat], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_(list((acc * decay.broadcast_in_dim(acc.shape, (0,), acc.layout)).registers.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(list(acc.registers.flat))
        return array_like(acc, branch.results)

    return warp_branch(acc, decay)


def apply_mask(c: KernelConfig, s, stop, start, ids):
    """``s`` with -inf, by rows, at columns from ``stop`` on, before ``start``, and where ``ids`` of row and key differ.

    A lane's first column is subtracted from the bounds, so that every column is compared with a constant. A key's id is
    loaded where it is compared: together they would take as many registers as half of the scores.
    """
    if c.interpreted:
        column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
        seen = column < lax.broadcast_in_dim(stop, s.shape, [0])
        if start is not None:
            seen &= column >= lax.broadcast_in_dim(start, s.shape, [0])
        if ids is not None:
            theirs = plgpu.load(ids[1], *WHOLE, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            seen &= lax.broadcast_in_dim(ids[0], s.shape, [0]) == lax.broadcast_in_dim(theirs, s.shape, [1])
        return jnp.where(seen, s, -jnp.inf)
    given = {"stop": stop, "start": start, **dict(zip(("mine", "theirs"), ids or (), strict=False))}
    given = {name: x for name, x in given.items() if x is not None}
    names = tuple(given)  # JAX keeps the function below: it must not close over traced values
    types = [plgpu.RefType() if name == "theirs" else BY_ROW for name in names]

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, *types), return_type=array_of(s.shape))
    def compare(_, s, *values):
        # A lane has two neighbouring columns of every eight, and two rows: the fifth index of a register says which.
        lane_column = arith.muli(arith.remui(mgpu.thread_idx(), constant(4)), constant(2))
        values = dict(zip(names, values, strict=True))
        theirs = values.pop("theirs", None)
        by_rows = {
            name: [x for register in value.registers.flat for x in scalars(register)] for name, value in values.items()
        }
        mine = by_rows.pop("mine", None)
        bounds = {name: [arith.subi(x, lane_column) for x in of_rows] for name, of_rows in by_rows.items()}
        index, pair = ir.IndexType.get(), ir.VectorType.get((2,), ir.IntegerType.get_signless(32))
        loaded = {}

        def key_ids(eight):
            if eight not in loaded:
                where = arith.index_cast(index, arith.addi(lane_column, constant(8 * eight)))
                loaded[eight] = scalars(vector.load(pair, theirs, [where]))
            return loaded[eight]

        registers = []
        for at, register in np.ndenumerate(s.registers):
            eight, row, parts = at[1], at[4], []
            for i, x in enumerate(scalars(register)):
                column = constant(8 * eight + i)
                seen = arith.cmpi(arith.CmpIPredicate.sgt, bounds["stop"][row], column)
                if "start" in bounds:
                    seen = arith.andi(seen, arith.cmpi(arith.CmpIPredicate.sle, bounds["start"][row], column))
                if mine is not None:
                    same = arith.cmpi(arith.CmpIPredicate.eq, mine[row], key_ids(eight)[i])
                    seen = arith.andi(seen, same)
                parts.append(arith.select(seen, x, constant(-math.inf)))
            registers.append(vector.from_elements(register.type, parts))
        return array_like(s, registers)

    return compare(s, *given.values())


def partial_row_sums(c: KernelConfig, p):
    """``[ROWS, 8]``: sums of ``p`` by rows and by the column modulo 8, which each thread has in its own registers."""
    if c.interpreted:
        return functools.reduce(jnp.add, jnp.split(p, p.shape[1] // 8, axis=1))

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=array_of((ROWS, 8)))
    def add(_, p):
        sums = p.registers[:, :1]
        for i in range(1, p.registers.shape[1]):
            sums = np.vectorize(arith.addf, otypes=[object])(sums, p.registers[:, i : i + 1])
        return mgpu.FragmentedArray(_registers=sums, _layout=p.layout, _is_signed=None)

    return add(p)


def clear_rows(c: KernelConfig, tile, flags, panel: bool = False):
    """Zeros in the rows of ``tile``, of shared memory, that have a flag in global memory, by a warp; ``panel``: of a panel."""
    if c.interpreted:
        flagged = flags[...].reshape(*tile.shape[:-1], 1) != 0
        tile[...] = jnp.where(flagged, 0, tile[...])
        return
    shape = tile.shape
    how = transforms(shape[1])[1:] if panel else transforms(shape[1])

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(how), plgpu.RefType()))
    def clear(_, tile, flags):
        def flagged(row):
            place = arith.minui(row, constant(shape[0] - 1))
            flag = memref.load(flags, [arith.index_cast(ir.IndexType.get(), place)])
            return arith.cmpi(arith.CmpIPredicate.ne, flag, constant(0))

        _clear(tile, shape, flagged)

    clear(tile, flags)


def clear_outside(c: KernelConfig, tile, low, high, panel: bool = False):
    """Zeros in the rows of ``tile``, of shared memory, before ``low`` and from ``high`` on, by a warp; ``panel``: of a panel."""
    if c.interpreted:
        row = lax.broadcasted_iota(jnp.int32, tile.shape, 0)
        tile[...] = jnp.where((row < low) | (row >= high), 0, tile[...])
        return
    scalar = plgpu.Layout.WG_SPLAT(())
    how = transforms(tile.shape[1])[1:] if panel else transforms(tile.shape[1])

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(how), scalar, scalar))
    def clear(_, tile, low, high):
        [low], [high] = low.registers.flat, high.registers.flat

        def outside(row):
            before = arith.cmpi(arith.CmpIPredicate.slt, row, low)
            return arith.ori(before, arith.cmpi(arith.CmpIPredicate.sge, row, high))

        _clear(tile, shape, outside)

    shape = tile.shape
    clear(tile, low, high)


def _clear(tile, shape: tuple[int, int], chosen: Callable):
    """Zeros in the rows that are ``chosen``, by a warp; a row is told by its number."""
    rows, width = shape
    across = swizzle_of(width)
    tiles = width * 2 // across
    base = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(tile))
    lane = arith.remui(mgpu.thread_idx(), constant(32))
    for first in range(0, rows, 32):
        row = arith.addi(lane, constant(first))
        inside = arith.cmpi(arith.CmpIPredicate.ult, row, constant(rows))
        some = scf.IfOp(arith.andi(inside, chosen(row)))
        with ir.InsertionPoint(some.then_block):
            high, low = arith.divui(row, constant(8)), arith.remui(row, constant(8))
            offset = arith.addi(arith.muli(high, constant(tiles * 8 * across)), arith.muli(low, constant(across)))
            address = arith.addi(base, offset)
            for at in range(tiles):
                for byte in range(0, across, 16):
                    code = f"st.shared.v4.b32 [$0 + {at * 8 * across + byte}], {{$1, $1, $1, $1}};"
                    llvm.inline_asm(None, [address, constant(0)], code, "r,r", has_side_effects=True)
            scf.yield_([])
    llvm.inline_asm(None, [], "fence.proxy.async.shared::cta;", "", has_side_effects=True)
    nvvm.bar_warp_sync(constant(-1))


def store_some_rows(c: KernelConfig, x, out, staging, row0, head0, low, high, pack: int):
    """Rows of ``x``, of 16 bits, straight to ``out [rows, heads, columns]``: of those that it has, ``[low, high)``.

    Row ``r`` of ``x`` is row ``row0 + r % span`` of head ``head0 + r // span``; ``span`` is a ``pack``-th of its rows.
    ``staging``: for the interpreter.
    """
    span = ROWS // pack
    if c.interpreted:
        staging[...] = x

        def one(r, _):
            row = row0 + lax.rem(r, span)

            @pl.when((row >= low) & (row < high))
            def _():
                out[row, head0 + lax.div(r, span)] = staging[r]

        lax.fori_loop(0, ROWS, one, None)
        return
    scalar = plgpu.Layout.WG_SPLAT(())
    _, heads, columns = out.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), *[scalar] * 4))
    def store(_, x, out, *scalars):
        row0, head0, low, high = (scalar.registers.flat[0] for scalar in scalars)
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(out))
        lane = arith.remui(mgpu.thread_idx(), constant(32))
        warp = arith.remui(arith.divui(mgpu.thread_idx(), constant(32)), constant(4))
        first = arith.addi(arith.muli(warp, constant(16)), arith.divui(lane, constant(4)))
        pair = arith.muli(arith.remui(lane, constant(4)), constant(2))
        for half in range(2):
            r = arith.addi(first, constant(8 * half))
            row = arith.addi(row0, arith.remui(r, constant(span)))
            head = arith.addi(head0, arith.divui(r, constant(span)))
            inside = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, row, low), arith.cmpi(arith.CmpIPredicate.slt, row, high)
            )
            some = scf.IfOp(inside)
            with ir.InsertionPoint(some.then_block):
                place = arith.muli(arith.extsi(i64, row), arith.constant(i64, heads * columns))
                within = arith.addi(arith.muli(head, constant(columns)), pair)
                place = arith.muli(arith.addi(place, arith.extsi(i64, within)), arith.constant(i64, 2))
                address = arith.addi(base, place)
                for at, register in np.ndenumerate(x.registers):
                    if at[4] == half:
                        code = f"st.global.b32 [$0 + {16 * at[1]}], $1;"
                        values = [address, llvm.bitcast(i32, register)]
                        llvm.inline_asm(None, values, code, "l,r", has_side_effects=True)
                scf.yield_([])

    store(x, out, *(jnp.int32(value) for value in (row0, head0, low, high)))


def store_square(c: KernelConfig, square, x):
    """``x``, 64 by 64, of 16 bits, in ``square``, of shared memory.

    Registers go in the groups in which a product takes them: Mosaic GPU's own store takes others, and copies of all.
    """
    if c.interpreted:
        square[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms(ROWS)), plgpu.Layout.WGMMA))
    def store(_, square, x):
        i32 = ir.IntegerType.get_signless(32)
        registers = {(at[1], at[4]): llvm.bitcast(i32, y) for at, y in np.ndenumerate(x.registers)}
        # A lane has the address of 16 bytes: of a row of one of four squares of 8 by 8, two by two.
        lane = arith.remui(mgpu.thread_idx(), constant(32))
        low, right = arith.remui(lane, constant(8)), arith.divui(lane, constant(16))
        row = arith.remui(arith.divui(mgpu.thread_idx(), constant(32)), constant(4))
        row = arith.addi(arith.muli(row, constant(16)), arith.remui(lane, constant(16)))
        place = arith.addi(arith.muli(row, constant(128)), arith.muli(arith.xori(low, right), constant(16)))
        base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(square))
        for i in range(ROWS // CHUNK):
            address = arith.addi(base, arith.xori(place, constant(2 * CHUNK * i)))
            values = [registers[2 * i + column, row] for column in range(2) for row in range(2)]
            code = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
            llvm.inline_asm(None, [address, *values], code, "r,r,r,r,r", has_side_effects=True)

    store(square, x)


def store_scalar(c: KernelConfig, slot, value: int):
    """``value`` in ``slot``, of shared memory, by a warp."""
    if c.interpreted:
        slot[0] = jnp.int32(value)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def store(_, slot):
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARP):
            memref.store(constant(value), slot, [arith.constant(ir.IndexType.get(), 0)])
        nvvm.bar_warp_sync(constant(-1))

    store(slot)


def request_retry(c: KernelConfig, slot, x, limit: float, number):
    """Set a retry flag, ``number`` in ``slot`` of shared memory, if any of ``x`` exceeds ``limit`` or is NaN."""
    if c.interpreted:
        slot[0] = jnp.where(jnp.all(x <= limit), slot[0], number)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT(())))
    def store(_, slot, x, number):
        values = [y for register in x.registers.flat for y in scalars(register)]
        above = [arith.cmpf(arith.CmpFPredicate.UGT, y, constant(limit)) for y in values]
        some = scf.IfOp(functools.reduce(arith.ori, above))
        with ir.InsertionPoint(some.then_block):
            [number] = number.registers.flat
            memref.store(number, slot, [arith.constant(ir.IndexType.get(), 0)])
            scf.yield_([])

    store(slot, x, number)


def take_item(c: KernelConfig, counter, slot, last):
    """The next item of the queue of all CTAs, for a warp, and in ``slot`` of shared memory; ``last``: that before."""
    if c.interpreted:
        slot[0] = lax.axis_index("cta") if last is None else last + lax.axis_size("cta")
        return slot[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def take(_, counter, slot):
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARP):
            i32, pointer = ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(counter)
            add = "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;"
            item = llvm.inline_asm(i32, [pointer], add, "=r,l", has_side_effects=True)
            memref.store(item, slot, [arith.constant(ir.IndexType.get(), 0)])
        nvvm.bar_warp_sync(constant(-1))

    take(counter, slot)
    return slot[0]


def never_taken_branch(c: KernelConfig):
    """A branch that is never taken: ptxas moves nothing across it."""
    if not c.interpreted:

        @plgpu.inline_mgpu()
        def never(_):
            take = "{ .reg .pred p; .reg .b32 r; mov.u32 r, %nctaid.x; setp.ne.u32 p, r, 0; @p bra.uni ON;"
            stop = "STOP: nanosleep.u32 99; bra.uni STOP; ON: }"
            llvm.inline_asm(None, [], take + stop, "", has_side_effects=True)

        never()


def modulo(i, n: int):
    """``i`` modulo ``n``. Neither is negative: by a power of two it is one instruction."""
    return lax.rem(i.astype(jnp.uint32), jnp.uint32(n)).astype(jnp.int32)


def opaque_zero(count):
    """Zero, which ptxas cannot know: what does not change from step to step it would keep in registers."""
    return lax.shift_right_logical(count, jnp.int32(30))


def constant(x: int | float) -> ir.Value:
    kind = ir.F32Type.get() if isinstance(x, float) else ir.IntegerType.get_signless(32)
    return arith.constant(kind, x)


def scalars(register: ir.Value) -> list[ir.Value]:
    [size] = ir.VectorType(register.type).shape
    positions = [ir.DenseI64ArrayAttr.get([i]) for i in range(size)]
    return [vector.extract(register, dynamic_position=[], static_position=position) for position in positions]


def array_like(array, registers) -> Any:
    """An array of the same layout with other registers."""
    new = np.empty(array.registers.shape, dtype=object)
    new.flat = list(registers)
    return mgpu.FragmentedArray(_registers=new, _layout=array.layout, _is_signed=None)
