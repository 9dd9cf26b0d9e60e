"""What the forward adds to a tile of logits, in registers before the logits are there.

While its products run a warpgroup has nothing to do: it loads a bias or the bits of a mask, and computes which weights dropout
keeps, a bit each. An array holds these words, as many as a lane has. `pairs` says where the numbers come from.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from ejkernel.kernels._pallas.gpu.flash_attention_sm90 import pairs
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import CORE_ROWS, ROWS, KernelConfig
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import array_of, constant, scalars
from ejkernel.kernels.common import dropout

# Words of a lane for every 8 columns of an array.
_WORDS = 4
# Weights of which a word says whether they are kept: two for every eight columns.
_KEPT = 32


class Ahead(NamedTuple):
    """Of one tile; None: what a call does not have. ``unit``: what logits are multiplied by later, unless the bias is divided."""

    c: KernelConfig
    tile: pairs.Tile
    unit: float
    bias: Any
    bits: Any
    kept: Any

    def biased(self, s):
        """``s`` with the bias, and -inf where the mask hides a pair."""
        if self.bias is not None:
            s = _add_bias(self.c, s, self.bias, self.tile.part("bias"), self.unit)
        return s if self.bits is None else _hide(self.c, s, self.bits, self.tile.part("bits"))

    def dropped(self, p):
        """``p`` with zeros where dropout has them."""
        return p if self.kept is None else _drop(self.c, p, self.kept)


def ahead_of(tile: pairs.Tile, columns: int, *, may_end: bool, unit: float) -> Ahead:
    """Of a tile with so many columns; ``may_end``: some may lie past the last."""
    c, at = tile.c, (tile.row0, tile.column0)
    bias = _load_bias(c, columns, tile.part("bias"), *at, may_end) if c.bias else None
    bits = _load_bits(c, columns, tile.part("bits"), *at) if c.mask else None
    kept = _keep(c, columns, tile.part("row_keys"), *at) if c.dropout and dropout.threshold(c.dropout) else None
    # A row that all queries share was divided beforehand.
    unit = 1.0 if not c.bias or tile.part("bias").shape[0] == 1 else unit
    return Ahead(c, tile, unit, bias, bits, kept)


# A bias


def _load_bias(c: KernelConfig, columns: int, bias, row0, column0, may_end: bool):
    if c.interpreted:
        place = [
            pl.ds(first, size) if n > 1 else pl.ds(0, 1)
            for n, first, size in zip(bias.shape, (row0, column0), (ROWS, columns), strict=True)
        ]
        return jnp.broadcast_to(bias[tuple(place)].astype(jnp.float32), (ROWS, columns))
    queries, keys = bias.shape
    of_pair, kind = _words_of_pair(bias), bias.dtype.name
    places = _places(columns, bias)

    def load(bias, first):
        ends = {"row_ends": True, "column_ends": may_end and queries > 1}
        values = pairs.Values(bias, first, (queries, keys), (keys, 1), **ends, kind=kind)
        return [word for at in places for word in _words(values.raw(*at))]

    return _by_lane(load, len(places) * of_pair, bias, row0, column0)


def _words_of_pair(bias) -> int:
    return 2 if bias.dtype.name == "float32" and bias.shape[1] > 1 else 1


def _places(columns: int, ref) -> list[tuple[int, int]]:
    """Which eights and rows of a lane have numbers of their own."""
    queries, keys = ref.shape
    return list(itertools.product(range(columns // CORE_ROWS if keys > 1 else 1), range(2 if queries > 1 else 1)))


def _words(loaded: list[ir.Value]) -> list[ir.Value]:
    """Integers of any size as words, two halves of a word in one."""
    i32 = ir.IntegerType.get_signless(32)
    bits = ir.IntegerType(loaded[0].type).width
    if bits == 64:
        return scalars(llvm.bitcast(ir.VectorType.get((2,), i32), loaded[0]))
    if bits == 32:
        return loaded
    low, *high = [arith.extui(i32, x) for x in loaded]
    return [arith.ori(low, arith.shli(high[0], constant(16))) if high else low]


def _add_bias(c: KernelConfig, s, words, bias, unit: float):
    """``s + bias / unit``."""
    if c.interpreted:
        return s + words * (1 / unit)
    of_pair, kind, (queries, keys) = _words_of_pair(bias), bias.dtype.name, bias.shape
    places = _places(s.shape[1], bias)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,) * 2, return_type=array_of(s.shape))
    def add(_, s, words):
        given = iter(_of_lane(words))
        own = {at: [next(given) for _ in range(of_pair)] for at in places}

        def pair(eight, half):
            found = own[eight if keys > 1 else 0, half if queries > 1 else 0]
            if kind == "float32":
                numbers = [llvm.bitcast(ir.F32Type.get(), word) for word in found]
            else:
                numbers = pairs.floats_of(found[0], kind)
            return numbers if keys > 1 else numbers[:1] * 2

        def one(x, value):
            return arith.addf(x, value) if unit == 1.0 else math.fma(value, constant(1 / unit), x)

        return pairs.by_pairs(s, pair, one)

    return add(s, words)


# A mask


def _load_bits(c: KernelConfig, columns: int, bits, row0, column0):
    rows, count = bits.shape
    word = 8 * bits.dtype.itemsize
    if c.interpreted:
        first, count = (lax.div(column0, jnp.int32(word)), columns // word) if count > 1 else (0, 1)
        part = bits[pl.ds(row0, ROWS) if rows > 1 else pl.ds(0, 1), pl.ds(first, count)].astype(jnp.uint32)
        seen = ((part[..., None] >> jnp.arange(word, dtype=jnp.uint32)) & 1).reshape(part.shape[0], -1)
        # A single word is of few keys, or of all, and then its bits are the same.
        seen = jnp.tile(seen, (1, -(-columns // seen.shape[1])))[:, :columns]
        return jnp.broadcast_to(seen, (ROWS, columns))
    places = _word_places(columns, bits)

    def load(bits, first):
        row0, column0 = first
        lane_row, lane_column = pairs.lane_place()
        base, i32 = pairs.address_of(bits), ir.IntegerType.get_signless(32)
        first_word = arith.divui(column0, constant(word)) if count > 1 else constant(0)
        found = []
        for nth, half in places:
            row = arith.addi(arith.addi(row0, lane_row), constant(8 * half)) if rows > 1 else constant(0)
            x = pairs.load(pairs.element(base, row, count, first_word, 1, word // 8), word, nth * word // 8)
            found.append(arith.shrui(x if word == 32 else arith.extui(i32, x), lane_column))
        return found

    return _by_lane(load, len(places), bits, row0, column0)


def _word_places(columns: int, bits) -> list[tuple[int, int]]:
    """Which words of a row, and of which of a lane's rows, a tile has."""
    rows, count = bits.shape
    word = 8 * bits.dtype.itemsize
    return list(itertools.product(range(columns // word if count > 1 else 1), range(2 if rows > 1 else 1)))


def _hide(c: KernelConfig, s, words, bits):
    """``s`` with -inf where a bit is 0."""
    if c.interpreted:
        return jnp.where(words != 0, s, -jnp.inf)
    rows, count = bits.shape
    word = 8 * bits.dtype.itemsize
    places = _word_places(s.shape[1], bits)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,) * 2, return_type=array_of(s.shape))
    def select(_, s, words):
        own = dict(zip(places, _of_lane(words), strict=False))

        def seen(eight, half):
            nth, low = divmod(CORE_ROWS * eight, word)
            x = own[nth if count > 1 else 0, half if rows > 1 else 0]
            return [_bit(x, low + i) for i in range(2)]

        return pairs.by_pairs(s, seen, lambda x, seen: arith.select(seen, x, constant(-np.inf)))

    return select(s, words)


def _bit(word: ir.Value, place: int) -> ir.Value:
    found = arith.andi(word, pairs.unsigned(1 << place))
    return arith.cmpi(arith.CmpIPredicate.ne, found, constant(0))


# Dropout


def _keep(c: KernelConfig, columns: int, row_keys, row0, column0):
    """Whether weights are kept, as ``dropout.keep``: for each of a lane's rows words of bits, the last in the lowest."""
    if c.interpreted:
        row_key = lax.broadcast_in_dim(row_keys[pl.ds(row0, ROWS)], (ROWS, columns), [0])
        key = column0 + lax.broadcasted_iota(jnp.int32, (ROWS, columns), 1)
        return dropout.keep(row_key, key, c.dropout)
    # A sum with it carries if the other summand reaches the threshold.
    complement = 2**32 - dropout.threshold(c.dropout)
    count = len(_kept_words(columns))

    def keep(row_keys, first):
        row0, column0 = first
        lane_row, lane_column = pairs.lane_place()
        column, base = arith.addi(column0, lane_column), pairs.address_of(row_keys)
        place = pairs.element(base, constant(0), 0, arith.addi(row0, lane_row), 1, 4)
        by_row = [pairs.load(place, 32, 4 * 8 * half) for half in range(2)]
        product = arith.muli(column, pairs.unsigned(dropout.COLUMN_STRIDE))
        # What columns' products have in common is not to be known: the compiler would keep each in a register.
        product = llvm.inline_asm(product.type, [product], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        multipliers = [pairs.unsigned(x) for x in dropout.MULTIPLIERS]
        add = f"{{ .reg .u32 t; add.cc.u32 t, $2, {complement}; addc.u32 $0, $1, $1; }}"
        found = [constant(0)] * (2 * count)
        for n in range(columns // 4):
            key = arith.addi(product, pairs.unsigned((n // 2 * 8 + n % 2) * dropout.COLUMN_STRIDE % 2**32))
            key = arith.xori(key, arith.shrui(key, constant(16)))
            for half in range(2):
                x = arith.muli(arith.xori(by_row[half], key), multipliers[0])
                x = arith.muli(arith.xori(x, arith.shrui(x, constant(15))), multipliers[1])
                at = half * count + n // _KEPT
                found[at] = llvm.inline_asm(x.type, [found[at], x], add, "=r,r,r", has_side_effects=False)
        return found

    return _by_lane(keep, 2 * count, row_keys, row0, column0)


def _kept_words(columns: int) -> list[int]:
    """How many bits each word has that a lane has for a row of so many columns."""
    bits = columns // 4
    return [min(_KEPT, bits - first) for first in range(0, bits, _KEPT)]


def _drop(c: KernelConfig, p, words):
    if c.interpreted:
        return jnp.where(words, p, 0.0)
    sizes = _kept_words(p.shape[1])

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,) * 2, return_type=array_of(p.shape))
    def select(_, p, words):
        own = _of_lane(words)

        def kept(eight, half):
            nth, first = divmod(2 * eight, _KEPT)
            return [_bit(own[half * len(sizes) + nth], sizes[nth] - 1 - first - i) for i in range(2)]

        return pairs.by_pairs(p, kept, lambda x, kept: arith.select(kept, x, constant(0.0)))

    return select(p, words)


# Words of a lane


def _by_lane(make, count: int, ref, row0, column0):
    """An array of the words that ``make`` returns, from a reference and the tile's first row and column."""
    shape = ROWS, CORE_ROWS * -(-count // _WORDS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), pairs.SCALAR, pairs.SCALAR), return_type=array_of(shape))
    def load(_, ref, *first):
        words = make(ref, [x.registers.flat[0] for x in first])
        words += [constant(0)] * (-len(words) % _WORDS)
        f32, layout = ir.F32Type.get(), fragmented_array.WGMMA_LAYOUT
        halves = [llvm.bitcast(f32, word) for word in words]
        registers = np.empty(fragmented_array.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        pair = ir.VectorType.get((2,), f32)
        registers.flat = [vector.from_elements(pair, halves[i : i + 2]) for i in range(0, len(halves), 2)]
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref, jnp.int32(row0), jnp.int32(column0))


def _of_lane(array) -> list[ir.Value]:
    """The words of such an array, and zeros."""
    i32 = ir.IntegerType.get_signless(32)
    return [llvm.bitcast(i32, x) for register in array.registers.flat for x in scalars(register)]
