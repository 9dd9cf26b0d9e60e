"""What a bias, a mask or dropout says of every pair of a query and a key: on the host, and in a tile of logits.

A tile has queries by keys, or the other way round in some kernels of the backward, in the layout of a product: a lane
has two neighbouring columns of every eight, in two rows. Values go straight from global memory to the registers that
need them; shared memory has no room for a tile of them. A mask comes as bits: a word of it has 16 or 32 neighbouring
columns of a row, so that a lane loads few of them, and rows and columns past the end are padded at little cost. A bias
with a row for each query may be as large as all else together and is read as it is: there, places past the last row
and key are those of the last.

``requirements`` lists what is private or unstable of what this module uses.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import CORE_ROWS, ROWS, KernelConfig, padded
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import array_like, array_of, constant, scalars
from ejkernel.kernels.common import dropout

SCALAR = plgpu.Layout.WG_SPLAT(())


# On the host


def pair_arrays(
    arrays: dict[str, Array], rows: int, keys: int, word: int, *, copy: bool, by_keys: bool = False, unit: float = 1.0
) -> dict[str, Array]:
    """A bias, the bits of a mask and dropout's keys of queries as kernels read them, up to so many ``rows`` and ``keys``.

    ``word``: see ``word_size``. ``copy``: a bias with a row for each query is padded too, for the interpreter.
    ``by_keys``: tiles have keys by queries, and so have the words of a mask, ``[B|1, H|1, Sk|1, words|1]``. ``unit``: what
    the kernel multiplies logits by later; a bias that is copied in any case is divided by it.
    """
    found = {}
    keys = -(-keys // CORE_ROWS) * CORE_ROWS
    if "bias" in arrays:
        bias = arrays["bias"]
        of_keys = bias.shape[2] == 1
        if bias.dtype.name not in ("float32", "bfloat16", "float16"):
            bias = bias.astype(jnp.float32)
        if of_keys and unit != 1.0:
            bias = bias.astype(jnp.float32) / unit
        found["bias"] = _padded(bias, rows, keys) if copy or of_keys else bias
    if "attention_mask" in arrays:
        mask, sizes = arrays["attention_mask"], (rows, keys)
        if by_keys:
            mask, sizes = mask.swapaxes(2, 3), (keys, rows)
        found["bits"] = _padded(packed_bits(mask, word), sizes[0], -(-sizes[1] // word))
    if "dropout_key" in arrays:
        heads = jnp.arange(arrays["query"].shape[2], dtype=jnp.int32)[:, None]
        row = jnp.arange(rows, dtype=jnp.int32)
        found["row_keys"] = dropout.row_keys(arrays["dropout_key"][:, None, None], heads, row)
    return found


def word_size(step: int) -> int:
    """Columns of a word of a mask: a step begins with a whole one."""
    return 32 if step % 32 == 0 else 16


def packed_bits(mask: Array, word: int) -> Array:
    """``[..., n|1]`` booleans as words of so many bits, ``[..., words|1]``, the first in the lowest.

    Example:
        >>> packed_bits(jnp.array([[True, False, True]]), 16).tolist(), packed_bits(jnp.array([[True]]), 16).tolist()
        ([[5]], [[65535]])
    """
    *others, columns = mask.shape
    if columns == 1:
        mask = jnp.broadcast_to(mask, (*others, word))
    mask = padded(mask, -(-mask.shape[-1] // word) * word).reshape(*others, -1, word)
    kind = {16: jnp.uint16, 32: jnp.uint32}[word]
    return (mask.astype(kind) << jnp.arange(word, dtype=kind)).sum(-1, dtype=kind)


def _padded(x: Array, rows: int, columns: int) -> Array:
    """``[.., .., Sq|1, Sk|1]`` to as many rows and columns, along what is not shared."""
    more = [(0, size - now if now > 1 else 0) for now, size in zip(x.shape[2:], (rows, columns), strict=True)]
    return jnp.pad(x, [(0, 0), (0, 0), *more])


# In a tile


class Tile(NamedTuple):
    """A tile's place: its first row and column, of one head; ``by_keys``: it has keys by queries.

    ``optional``: in global memory, what ``pair_arrays`` made.
    """

    c: KernelConfig
    optional: dict[str, Any]
    batch: Any
    head: Any
    row0: Any
    column0: Any
    by_keys: bool = False

    def biased(self, s, *, may_end: bool = True):
        """``s`` with the bias, and -inf where it or the mask hides a pair; ``may_end``: columns may lie past the last."""
        at = self.row0, self.column0
        if self.c.bias:
            s = add_bias(self.c, s, self.part("bias"), *at, may_end=may_end, by_keys=self.by_keys)
        return hide(self.c, s, self.part("bits"), *at) if self.c.mask else s

    def dropped(self, p, *, mark: bool = False):
        """``p`` with zeros where dropout has them, or marked: see ``drop``."""
        return drop(self.c, p, self.part("row_keys"), self.row0, self.column0, mark=mark, by_keys=self.by_keys)

    def part(self, name: str):
        """Of one of the arrays, what is of its head."""
        ref = self.optional[name]
        return ref.at[self.batch if ref.shape[0] > 1 else 0, self.head if ref.shape[1] > 1 else 0]


def add_bias(c: KernelConfig, s, bias, row0, column0, *, may_end: bool, by_keys: bool = False):
    """``s + bias``, and -inf where the bias is: ``s`` may be NaN there.

    ``bias``: ``[Sq|1, Sk|1]``. ``row0``, ``column0``: the tile's first. ``may_end``: whether columns may lie past the last.
    ``by_keys``: the tile has keys by queries.
    """
    if c.interpreted:
        first = (column0, row0) if by_keys else (row0, column0)
        sizes = s.shape[::-1] if by_keys else s.shape
        at = [
            pl.ds(*x) if n > 1 else pl.ds(0, 1) for n, x in zip(bias.shape, zip(first, sizes, strict=True), strict=True)
        ]
        value = bias[tuple(at)].astype(jnp.float32)
        value = jnp.broadcast_to(value.T if by_keys else value, s.shape)
        return jnp.where(value == -jnp.inf, -jnp.inf, s + value)
    queries, keys = bias.shape
    # Of a row for all queries there are more columns than any step reads.
    padded_keys = queries == 1
    place = {
        "sizes": (keys, queries) if by_keys else (queries, keys),
        "strides": (1, keys) if by_keys else (keys, 1),
        "row_ends": not (by_keys and padded_keys),
        "column_ends": may_end and (by_keys or not padded_keys),
        "kind": bias.dtype.name,
    }

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), SCALAR, SCALAR), return_type=array_of(s.shape))
    def add(_, s, bias, *first):
        values = Values(bias, [x.registers.flat[0] for x in first], **place)

        def one(x, value):
            hidden = arith.cmpf(arith.CmpFPredicate.OEQ, value, constant(-math.inf))
            return arith.select(hidden, constant(-math.inf), arith.addf(x, value))

        return by_pairs(s, values.pair, one)

    return add(s, bias, jnp.int32(row0), jnp.int32(column0))


def hide(c: KernelConfig, s, bits, row0, column0):
    """``s`` with -inf where a bit is 0. ``bits``: ``[rows|1, words|1]``; a step begins with a whole word."""
    rows, words = bits.shape
    word = 8 * bits.dtype.itemsize
    if c.interpreted:
        first, count = (lax.div(column0, jnp.int32(word)), s.shape[1] // word) if words > 1 else (0, 1)
        part = bits[pl.ds(row0, ROWS) if rows > 1 else pl.ds(0, 1), pl.ds(first, count)].astype(jnp.uint32)
        seen = (part[..., None] >> jnp.arange(word, dtype=jnp.uint32)) & 1
        # A single word is of few keys, or of all, and then its bits are the same.
        seen = jnp.tile(seen.reshape(part.shape[0], -1), (1, -(-s.shape[1] // (count * word))))[:, : s.shape[1]]
        return jnp.where(jnp.broadcast_to(seen, s.shape) != 0, s, -jnp.inf)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), SCALAR, SCALAR), return_type=array_of(s.shape))
    def select(_, s, bits, *first):
        row0, column0 = (x.registers.flat[0] for x in first)
        lane_row, lane_column = lane_place()
        base, i32 = address_of(bits), ir.IntegerType.get_signless(32)
        first_word = arith.divui(column0, constant(word)) if words > 1 else constant(0)
        loaded = {}

        def seen(eight, half):
            nth, low = divmod(8 * eight, word)
            at = nth if words > 1 else 0, half if rows > 1 else 0
            if at not in loaded:
                row = arith.addi(arith.addi(row0, lane_row), constant(8 * half)) if rows > 1 else constant(0)
                address = element(base, row, words, first_word, 1, word // 8)
                x = load(address, word, at[0] * word // 8)
                loaded[at] = arith.shrui(x if word == 32 else arith.extui(i32, x), lane_column)
            found = [arith.andi(loaded[at], constant(1 << (low + i))) for i in range(2)]
            return [arith.cmpi(arith.CmpIPredicate.ne, x, constant(0)) for x in found]

        return by_pairs(s, seen, lambda x, seen: arith.select(seen, x, constant(-math.inf)))

    return select(s, bits, jnp.int32(row0), jnp.int32(column0))


def drop(c: KernelConfig, p, row_keys, row0, column0, *, mark: bool = False, by_keys: bool = False):
    """``p``, which is not negative, with zeros where dropout has them; or if ``mark``, with its sign changed there.

    A sign takes no registers. ``row_keys``: dropout's keys of all queries, ``[Sq]``. ``by_keys``: the tile has keys by
    queries.
    """
    if c.interpreted:
        query0, key0 = (column0, row0) if by_keys else (row0, column0)
        query_axis = 1 if by_keys else 0
        row_key = lax.broadcast_in_dim(row_keys[pl.ds(query0, p.shape[query_axis])], p.shape, [query_axis])
        key = key0 + lax.broadcasted_iota(jnp.int32, p.shape, 1 - query_axis)
        return jnp.where(dropout.keep(row_key, key, c.dropout), p, -p if mark else 0.0)
    threshold = dropout.threshold(c.dropout)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), SCALAR, SCALAR), return_type=array_of(p.shape))
    def select(_, p, row_keys, *first):
        """As ``dropout.keep``."""
        row0, column0 = (x.registers.flat[0] for x in first)
        lane_row, lane_column = lane_place()
        row, column, base = arith.addi(row0, lane_row), arith.addi(column0, lane_column), address_of(row_keys)

        def of_key(product):
            return arith.xori(product, arith.shrui(product, constant(16)))

        def of_query(query, offset, bits):
            return load(element(base, constant(0), 0, query, 1, 4), bits, 4 * offset)

        if by_keys:
            stride = unsigned(dropout.COLUMN_STRIDE)
            by_row = [of_key(arith.muli(arith.addi(row, constant(8 * half)), stride)) for half in range(2)]
        else:
            by_row = [of_query(row, 8 * half, 32) for half in range(2)]
            product = arith.muli(column, unsigned(dropout.COLUMN_STRIDE))
            # What columns' products have in common is not to be known: the compiler would keep each in a register.
            product = llvm.inline_asm(product.type, [product], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        multipliers = [unsigned(x) for x in dropout.MULTIPLIERS]
        loaded = {}

        def by_column(eight):
            if eight not in loaded and by_keys:
                pair = ir.VectorType.get((2,), ir.IntegerType.get_signless(32))
                loaded[eight] = scalars(llvm.bitcast(pair, of_query(column, 8 * eight, 64)))
            elif eight not in loaded:
                more = [(8 * eight + i) * dropout.COLUMN_STRIDE % 2**32 for i in range(2)]
                loaded[eight] = [of_key(arith.addi(product, unsigned(x))) for x in more]
            return loaded[eight]

        def kept(eight, half):
            found = []
            for other in by_column(eight):
                x = arith.muli(arith.xori(by_row[half], other), multipliers[0])
                x = arith.muli(arith.xori(x, arith.shrui(x, constant(15))), multipliers[1])
                found.append(arith.cmpi(arith.CmpIPredicate.uge, x, unsigned(threshold)))
            return found

        def one(x, kept):
            return arith.select(kept, x, arith.negf(x) if mark else constant(0.0))

        return by_pairs(p, kept, one)

    return select(p, row_keys, jnp.int32(row0), jnp.int32(column0))


def kept_weights(c: KernelConfig, p):
    """Of weights that ``drop`` marked, those that dropout keeps; the others are zeros."""
    return jnp.maximum(p, 0.0) if c.dropout else p


def score_gradient(c: KernelConfig, weight, dp, slope):
    """``weight · (dP - slope)``, where dP counts only for weights that dropout keeps, which ``drop`` marked."""
    if not c.dropout:
        return weight * (dp - slope)
    dp = jnp.where(weight > 0, dp * (1 / (1 - c.dropout)), 0.0)
    return jnp.abs(weight) * (dp - slope)


def lane_place() -> tuple[ir.Value, ir.Value]:
    """A lane's first row, and the first of its columns."""
    lane = arith.remui(mgpu.thread_idx(), constant(32))
    warp = arith.remui(arith.divui(mgpu.thread_idx(), constant(32)), constant(4))
    row = arith.addi(arith.muli(warp, constant(16)), arith.divui(lane, constant(4)))
    return row, arith.muli(arith.remui(lane, constant(4)), constant(2))


def address_of(ref) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(ref))


def element(base, row, row_stride: int, column, column_stride: int, size: int) -> ir.Value:
    """The address of an element of so many bytes."""
    i64 = ir.IntegerType.get_signless(64)

    def times(x, stride):
        return arith.muli(arith.extsi(i64, x), arith.constant(i64, stride * size))

    return arith.addi(base, arith.addi(times(row, row_stride), times(column, column_stride)))


def load(address, bits: int, offset: int) -> ir.Value:
    """An integer of so many bits, from memory that nothing writes while the kernel runs."""
    kind = ir.IntegerType.get_signless(bits)
    code = f"ld.global.nc.b{bits} $0, [$1 + {offset}];"
    register = {16: "=h", 32: "=r", 64: "=l"}[bits]
    return llvm.inline_asm(kind, [address], code, f"{register},l", has_side_effects=False)


class Values:
    """A lane's numbers of an array in global memory, as float32.

    Attributes:
        first: the tile's first row and column.
        sizes, strides: the array's rows and columns; along an axis of size 1 it is shared.
        row_ends, column_ends: whether rows or columns may lie past the last, which then stands for them.
    """

    def __init__(self, ref, first, sizes, strides, row_ends: bool, column_ends: bool, kind: str):
        self.sizes, self.strides, self.row_ends, self.column_ends, self.kind = (
            sizes,
            strides,
            row_ends,
            column_ends,
            kind,
        )
        self._base = address_of(ref)
        self._row, self._column = (arith.addi(*x) for x in zip(first, lane_place(), strict=True))
        self._size = 4 if kind == "float32" else 2
        # Two at once where they are neighbours and rows are aligned: a step begins with a whole eight.
        self._at_once = 2 if sizes[1] > 1 and strides[1] == 1 and strides[0] % 2 == 0 else 1
        self._loaded: dict[tuple[int, int], list[ir.Value]] = {}

    def pair(self, eight: int, half: int) -> list[ir.Value]:
        """Of two neighbouring columns in one of the lane's rows."""
        rows, columns = self.sizes
        at = eight if columns > 1 else 0, half if rows > 1 else 0
        if at not in self._loaded:
            found = [x for loaded in self.raw(eight, half) for x in floats_of(loaded, self.kind)]
            self._loaded[at] = found if columns > 1 else found * 2
        return self._loaded[at]

    def raw(self, eight: int, half: int) -> list[ir.Value]:
        """The same as it is loaded: in one integer, or in two."""
        rows, columns = self.sizes
        row = self._place(self._row, 8 * half, rows, self.row_ends)
        return [self._integer(row, 8 * eight + i) for i in range(0, 2 if columns > 1 else 1, self._at_once)]

    def _integer(self, row, more: int) -> ir.Value:
        bits = 8 * self._size * self._at_once
        columns, offset = self.sizes[1], 0
        if columns > 1 and not self.column_ends:
            # A constant that needs no instruction.
            offset, more = more * self.strides[1] * self._size, 0
        last = columns - self._at_once + 1
        column = self._place(self._column, more, last, self.column_ends) if columns > 1 else constant(0)
        return load(element(self._base, row, self.strides[0], column, self.strides[1], self._size), bits, offset)

    @staticmethod
    def _place(first, more: int, size: int, ends: bool) -> ir.Value:
        if size == 1:
            return constant(0)
        place = arith.addi(first, constant(more))
        return arith.minsi(place, constant(size - 1)) if ends else place


def floats_of(loaded: ir.Value, kind: str) -> list[ir.Value]:
    """One or two numbers that were loaded as an integer, as float32."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    bits = ir.IntegerType(loaded.type).width
    if kind == "bfloat16":  # the upper half of a float32
        low = arith.shli(loaded if bits == 32 else arith.extui(i32, loaded), constant(16))
        high = [arith.andi(loaded, constant(-(2**16)))] if bits == 32 else []
        return [llvm.bitcast(f32, x) for x in (low, *high)]
    own = f32 if kind == "float32" else ir.F16Type.get()
    both = bits == (64 if kind == "float32" else 32)
    found = scalars(llvm.bitcast(ir.VectorType.get((2,), own), loaded)) if both else [llvm.bitcast(own, loaded)]
    return found if kind == "float32" else [arith.extf(f32, x) for x in found]


def unsigned(x: int) -> ir.Value:
    """A constant of 32 bits."""
    return constant(x - 2**32 if x >= 2**31 else x)


def by_pairs(s, values, one) -> Any:
    """``one(element, value)`` of every element; ``values`` gives those of a lane's eight and row."""
    registers = []
    for at, register in np.ndenumerate(s.registers):
        parts = [one(x, y) for x, y in zip(scalars(register), values(at[1], at[4]), strict=True)]
        registers.append(vector.from_elements(register.type, parts))
    return array_like(s, registers)
