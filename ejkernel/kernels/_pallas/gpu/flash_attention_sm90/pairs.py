"""What a bias, a mask or dropout says of every pair of a query and a key: on the host, and in a tile of logits.

A tile has queries by keys, in the layout of a product: a lane has two neighbouring columns of every eight, in two rows.
Values go straight from global memory to the registers that need them; shared memory has no room for a tile of them. A
mask comes as bits: a word of it has 16 or 32 neighbouring keys of a query, so that a lane loads few of them, and rows
and columns past the end are padded at little cost. A bias with a row for each query may be as large as all else
together and is read as it is: there, places past the last row and key are those of the last.

``requirements`` lists what is private or unstable of what this module uses.
"""

from __future__ import annotations

import math
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import ROWS, KernelConfig, padded
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import BY_ROW, array_like, constant, of_product, scalars
from ejkernel.kernels.common import dropout

_SCALAR = plgpu.Layout.WG_SPLAT(())


# On the host


def pair_arrays(arrays: dict[str, Array], rows: int, keys: int, word: int, copy: bool) -> dict[str, Array]:
    """A bias, the bits of a mask and the keys of dropout as kernels read them, in blocks up to ``rows`` and ``keys``.

    ``word``: see ``word_size``. ``copy``: a bias with a row for each query is padded too, for the interpreter.
    """
    found = {}
    if "bias" in arrays:
        bias = arrays["bias"]
        if bias.dtype.name not in ("float32", "bfloat16", "float16"):
            bias = bias.astype(jnp.float32)
        if copy or bias.shape[2] == 1:
            bias = _padded(bias, rows, keys)
        found["bias"] = bias
    if "attention_mask" in arrays:
        found["bits"] = _padded(packed_bits(arrays["attention_mask"], word), rows, -(-keys // word))
    if "dropout_key" in arrays:
        found["dropout_key"] = arrays["dropout_key"]
    return found


def word_size(step: int) -> int:
    """Keys of a word of a mask: a step begins with a whole one."""
    return 32 if step % 32 == 0 else 16


def packed_bits(mask: Array, word: int) -> Array:
    """``[..., Sk|1]`` booleans as words of so many bits, ``[..., words]``, the first key in the lowest.

    Example:
        >>> packed_bits(jnp.array([[True, False, True]]), 16).tolist(), packed_bits(jnp.array([[True]]), 16).tolist()
        ([[5]], [[65535]])
    """
    *others, keys = mask.shape
    if keys == 1:
        mask = jnp.broadcast_to(mask, (*others, word))
    mask = padded(mask, -(-mask.shape[-1] // word) * word).reshape(*others, -1, word)
    kind = {16: jnp.uint16, 32: jnp.uint32}[word]
    return (mask.astype(kind) << jnp.arange(word, dtype=kind)).sum(-1, dtype=kind)


def _padded(x: Array, rows: int, columns: int) -> Array:
    """``[.., .., Sq|1, Sk|1]`` to as many rows and columns, along what is not shared."""
    more = [(0, size - now if now > 1 else 0) for now, size in zip(x.shape[2:], (rows, columns), strict=True)]
    return jnp.pad(x, [(0, 0), (0, 0), *more])


# In a tile


def add_bias(c: KernelConfig, s, bias, row0, column0, may_end: bool):
    """``s + bias``, and -inf where that is: ``s`` may be NaN there.

    ``bias``: ``[Sq|1, Sk|1]``. ``may_end``: whether columns may lie past the last.
    """
    if c.interpreted:
        value = _tile(bias, row0, column0, s.shape).astype(jnp.float32)
        return jnp.where(value == -jnp.inf, -jnp.inf, s + value)
    rows, columns = bias.shape
    kind = bias.dtype.name
    # Of a row for all queries there are more columns than any step reads.
    clamps = may_end and rows > 1

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), _SCALAR, _SCALAR), return_type=of_product(s.shape)
    )
    def add(_, s, bias, row0, column0):
        place = _Place(bias, rows, columns, row0, column0)
        loaded = {}

        def values(eight, half):
            at = eight if columns > 1 else 0, half if rows > 1 else 0
            if at not in loaded:
                loaded[at] = _pair(place, kind, *at, columns, clamps)
            return loaded[at]

        def one(x, value):
            hidden = arith.cmpf(arith.CmpFPredicate.OEQ, value, constant(-math.inf))
            return arith.select(hidden, constant(-math.inf), arith.addf(x, value))

        return _by_pairs(s, values, one)

    return add(s, bias, jnp.int32(row0), jnp.int32(column0))


def hide(c: KernelConfig, s, bits, row0, column0, word: int):
    """``s`` with -inf where a bit is 0. ``bits``: ``[Sq|1, words|1]``; a step begins with a whole word."""
    rows, words = bits.shape
    if c.interpreted:
        first, count = (lax.div(column0, jnp.int32(word)), s.shape[1] // word) if words > 1 else (0, 1)
        part = bits[pl.ds(row0, ROWS) if rows > 1 else pl.ds(0, 1), pl.ds(first, count)].astype(jnp.uint32)
        seen = (part[..., None] >> jnp.arange(word, dtype=jnp.uint32)) & 1
        seen = seen.reshape(seen.shape[0], -1)[:, : s.shape[1]]
        seen = jnp.broadcast_to(seen if words > 1 else seen[:, :1], s.shape)
        return jnp.where(seen != 0, s, -jnp.inf)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), _SCALAR, _SCALAR), return_type=of_product(s.shape)
    )
    def select(_, s, bits, row0, column0):
        [first] = column0.registers.flat
        i32 = ir.IntegerType.get_signless(32)
        place = _Place(bits, rows, words, row0, None)
        first = arith.divui(first, constant(word)) if words > 1 else constant(0)
        loaded = {}

        def values(eight, half):
            nth, low = divmod(8 * eight, word)
            at = nth if words > 1 else 0, half if rows > 1 else 0
            if at not in loaded:
                column = arith.addi(first, constant(at[0]))
                loaded_word = _load(place.address(at[1], column, word // 8), word)
                if word < 32:
                    loaded_word = arith.extui(i32, loaded_word)
                loaded[at] = arith.shrui(loaded_word, place.lane_column)
            found = [arith.andi(loaded[at], constant(1 << (low + i))) for i in range(2)]
            return [arith.cmpi(arith.CmpIPredicate.ne, x, constant(0)) for x in found]

        return _by_pairs(s, values, lambda x, seen: arith.select(seen, x, constant(-math.inf)))

    return select(s, bits, jnp.int32(row0), jnp.int32(column0))


def drop(c: KernelConfig, p, row_key, column0):
    """``p`` with zeros where dropout has them, by the rows' keys. (What it keeps is scaled with the output.)"""
    if c.interpreted:
        column = column0 + lax.broadcasted_iota(jnp.int32, p.shape, 1)
        return jnp.where(dropout.keep(lax.broadcast_in_dim(row_key, p.shape, [0]), column, c.dropout), p, 0.0)
    threshold = dropout.threshold(c.dropout)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, BY_ROW, _SCALAR), return_type=of_product(p.shape))
    def select(_, p, row_key, column0):
        """As ``dropout.keep``."""
        row_keys = [x for register in row_key.registers.flat for x in scalars(register)]
        [column0] = column0.registers.flat
        lane_column = arith.muli(arith.remui(mgpu.thread_idx(), constant(4)), constant(2))
        first = arith.muli(arith.addi(column0, lane_column), unsigned(dropout.COLUMN_STRIDE))
        # What the columns' products have in common is not to be known: the compiler would keep every one in a register.
        first = llvm.inline_asm(first.type, [first], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        first_multiplier, second_multiplier = map(unsigned, dropout.MULTIPLIERS)

        def values(eight, half):
            found = []
            for i in range(2):
                column = arith.addi(first, unsigned((8 * eight + i) * dropout.COLUMN_STRIDE % 2**32))
                x = arith.xori(row_keys[half], arith.xori(column, arith.shrui(column, constant(16))))
                x = arith.muli(x, first_multiplier)
                x = arith.muli(arith.xori(x, arith.shrui(x, constant(15))), second_multiplier)
                found.append(arith.cmpi(arith.CmpIPredicate.uge, x, unsigned(threshold)))
            return found

        return _by_pairs(p, values, lambda x, kept: arith.select(kept, x, constant(0.0)))

    return select(p, row_key, jnp.int32(column0))


def dropout_rows(batch_key, head, row0):
    """Dropout's keys of a tile's rows."""
    row = row0 + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_ROW)
    return dropout.row_keys(batch_key, head, row)


def unsigned(x: int) -> ir.Value:
    """A constant of 32 bits."""
    return constant(x - 2**32 if x >= 2**31 else x)


def _tile(ref, row0, column0, shape):
    """A part of ``ref`` in the interpreter, broadcast to ``shape``."""
    at = [pl.ds(first, size) if all_ > 1 else pl.ds(0, 1)
          for first, size, all_ in zip((row0, column0), shape, ref.shape, strict=True)]  # fmt: skip
    return jnp.broadcast_to(ref[tuple(at)], shape)


class _Place:
    """Where a lane's part of a tile is in an array of global memory ``[rows, columns]``.

    ``row0``, ``column0``: the tile's first; a row past the last counts as the last.
    """

    def __init__(self, ref, rows: int, columns: int, row0, column0):
        self.rows, self.columns = rows, columns
        self._i64 = ir.IntegerType.get_signless(64)
        self._base = llvm.ptrtoint(self._i64, mgpu.utils.memref_ptr(ref))
        lane = arith.remui(mgpu.thread_idx(), constant(32))
        warp = arith.remui(arith.divui(mgpu.thread_idx(), constant(32)), constant(4))
        self.lane_column = arith.muli(arith.remui(lane, constant(4)), constant(2))
        lane_row = arith.addi(arith.muli(warp, constant(16)), arith.divui(lane, constant(4)))
        [row0] = row0.registers.flat
        self._row = arith.addi(row0, lane_row)
        if column0 is not None:
            [column0] = column0.registers.flat
            self.first_column = arith.addi(column0, self.lane_column)

    def address(self, half: int, column, size: int):
        """The address of an element of so many bytes in a lane's first or second row."""
        element = arith.extsi(self._i64, column)
        if self.rows > 1:
            row = arith.minsi(arith.addi(self._row, constant(8 * half)), constant(self.rows - 1))
            row = arith.muli(arith.extsi(self._i64, row), arith.constant(self._i64, self.columns))
            element = arith.addi(element, row)
        return arith.addi(self._base, arith.muli(element, arith.constant(self._i64, size)))


def _load(address, bits: int, offset: int = 0) -> ir.Value:
    """An integer of so many bits, from memory that nothing writes while the kernel runs."""
    kind = ir.IntegerType.get_signless(bits)
    code = f"ld.global.nc.b{bits} $0, [$1 + {offset}];"
    register = {16: "=h", 32: "=r", 64: "=l"}[bits]
    return llvm.inline_asm(kind, [address], code, f"{register},l", has_side_effects=False)


def _pair(place: _Place, kind: str, eight: int, half: int, columns: int, clamps: bool) -> list[ir.Value]:
    """A lane's two values of eight columns, as float32."""
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[kind]
    if columns == 1:
        return [_float(_load(place.address(half, constant(0), size), 8 * size), kind)[0]] * 2
    # Two at once where rows are aligned: a step begins with a whole eight.
    pairs = columns % 2 == 0
    found = []
    for i in (0,) if pairs else (0, 1):
        at = 8 * eight + i
        if clamps:
            last = constant(columns - 2 if pairs else columns - 1)
            address = place.address(half, arith.minsi(arith.addi(place.first_column, constant(at)), last), size)
            found += _float(_load(address, 8 * size * (1 + pairs)), kind)
        else:
            found += _float(_load(place.address(half, place.first_column, size), 8 * size * (1 + pairs), at * size), kind)
    return found


def _float(loaded: ir.Value, kind: str) -> list[ir.Value]:
    """One or two numbers that were loaded as an integer, as float32."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    bits = ir.IntegerType(loaded.type).width
    if kind == "float32":
        return scalars(llvm.bitcast(ir.VectorType.get((2,), f32), loaded)) if bits == 64 else [llvm.bitcast(f32, loaded)]
    if kind == "float16":
        f16 = ir.F16Type.get()
        found = scalars(llvm.bitcast(ir.VectorType.get((2,), f16), loaded)) if bits == 32 else [llvm.bitcast(f16, loaded)]
        return [arith.extf(f32, x) for x in found]
    # A bfloat16 is the upper half of a float32.
    low = arith.shli(loaded if bits == 32 else arith.extui(i32, loaded), constant(16))
    high = [arith.andi(loaded, constant(-65536))] if bits == 32 else []
    return [llvm.bitcast(f32, x) for x in (low, *high)]


def _by_pairs(s, values, one) -> Any:
    """``one(element, value)`` of every element; ``values`` gives those of a lane's eight and row."""
    registers = []
    for at, register in np.ndenumerate(s.registers):
        parts = [one(x, y) for x, y in zip(scalars(register), values(at[1], at[4]), strict=True)]
        registers.append(vector.from_elements(register.type, parts))
    return array_like(s, registers)
