"""Grouped matrix products on the device: rows times the matrix of their group, and sums over the rows of each group.

Programs are persistent: each takes every ``tl.num_programs``-th tile, and the tiles that are under way at one time share rows
and matrices in the second-level cache. Tiles lie group after group, and within a group in bands of ``BAND`` tiles of rows.
How many a group has is counted on the device, from where its rows begin and end.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

# Tiles of rows whose columns are computed side by side: about as many as columns make the smallest sum of what is read.
BAND = tl.constexpr(8)


@dataclass(frozen=True)
class GroupedConstants:
    """What a kernel is compiled for. No length is among them, but for what they are multiples of.

    ``bm`` rows and ``bn`` columns make a tile of a result, of which a step sums ``bk`` products.
    ``inner_unit``, ``column_unit``: what both lengths are counted in; the compiler must know of 16 to load wide.
    ``even_inner``, ``even_columns``: whether steps and tiles divide them.
    ``wide``: whether offsets inside a tile take 64 bits. ``dense``: whether all groups have the same number of rows.
    ``gb`` groups are looked through at a time, ``many``: there are more. ``transposed``: matrices are ``[columns, inner]``.
    ``widen``: operands of two dtypes, which are multiplied in float32.
    """

    bm: int
    bn: int
    bk: int
    inner_unit: int
    column_unit: int
    even_inner: bool
    even_columns: bool
    wide: bool
    dense: bool
    gb: int
    many: bool
    transposed: bool
    widen: bool
    precision: str


@triton.jit
def span(size: tl.constexpr, C: tl.constexpr):
    """``0 … size - 1``, to be multiplied by a stride."""
    if C.wide:
        return tl.arange(0, size).to(tl.int64)
    else:
        return tl.arange(0, size)


@triton.jit
def tile_ends(bounds, chunk, rows, groups, column_tiles, C: tl.constexpr):
    """The tiles of ``gb`` groups and of all before them in the chunk. What lies before the first group and behind the last
    one counts as groups too, first and last.
    """
    group = chunk + tl.arange(0, C.gb)
    start = tl.load(bounds + group - 1, mask=(group >= 1) & (group < groups + 2), other=0)
    stop = tl.load(bounds + group, mask=group < groups + 1, other=rows)
    size = tl.where(group < groups + 2, stop - start, 0)
    return tl.cumsum(tl.cdiv(size, C.bm) * column_tiles, 0)


@triton.jit
def group_of(tile, known, bounds, rows, groups, column_tiles, C: tl.constexpr):
    """The group that a tile is of, and how many tiles there are before it; ``known``: where the tiles of groups end."""
    if C.many:
        group, before, total = 0, 0, 0
        for chunk in tl.range(0, groups + 2, C.gb):
            ends = total + tile_ends(bounds, chunk, rows, groups, column_tiles, C)
            passed = (ends <= tile) & (chunk + tl.arange(0, C.gb) < groups + 2)
            group += tl.sum(passed.to(tl.int32), 0)
            before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
            total = tl.max(ends, 0)
    else:
        passed = (known <= tile) & (tl.arange(0, C.gb) < groups + 2)
        group = tl.sum(passed.to(tl.int32), 0)
        before = tl.max(tl.where(passed, known, 0), 0)
    return group, before


@triton.jit
def place(local, row_tiles, column_tiles):
    """Row and column of a group's tile: down a band of rows first, then to the next column."""
    band = local // (BAND * column_tiles)
    inside = local % (BAND * column_tiles)
    high = tl.minimum(row_tiles - band * BAND, BAND)
    return band * BAND + inside % high, inside // high


@triton.jit
def rows_times_matrices(x, matrices, bounds, rows, inner, columns, groups, out, C: tl.constexpr):
    """``[M, columns]``: the rows of ``x`` ``[M, inner]`` times the matrix of their group, 0 in rows without one.

    ``rows`` are M, or if ``dense`` those of each group.
    """
    inner, columns = inner * C.inner_unit, columns * C.column_unit
    column_tiles = tl.cdiv(columns, C.bn)
    if C.dense:
        row_tiles = tl.cdiv(rows, C.bm)
        known = bounds
        total = groups * row_tiles * column_tiles
    elif C.many:
        known = bounds
        total = 0
        for chunk in tl.range(0, groups + 2, C.gb):
            total += tl.max(tile_ends(bounds, chunk, rows, groups, column_tiles, C), 0)
    else:
        known = tile_ends(bounds, 0, rows, groups, column_tiles, C)
        total = tl.max(known, 0)
    k = tl.arange(0, C.bk)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        if C.dense:
            group = tile // (row_tiles * column_tiles)
            row_tile, column_tile = place(tile % (row_tiles * column_tiles), row_tiles, column_tiles)
            first = row_tile * C.bm
            count = tl.minimum(rows - first, C.bm)
            row = group.to(tl.int64) * rows + first
            steps = tl.cdiv(inner, C.bk)
        else:
            entry, before = group_of(tile, known, bounds, rows, groups, column_tiles, C)
            group = tl.minimum(tl.maximum(entry - 1, 0), groups - 1)
            start = tl.load(bounds + entry - 1, mask=entry > 0, other=0)
            stop = tl.load(bounds + entry, mask=entry <= groups, other=rows)
            row_tile, column_tile = place(tile - before, tl.cdiv(stop - start, C.bm), column_tiles)
            first = start + row_tile * C.bm
            count = tl.minimum(stop - first, C.bm)
            row = first.to(tl.int64)
            # Rows of no group are not read: the sum of nothing is their 0.
            steps = tl.where((entry > 0) & (entry <= groups), tl.cdiv(inner, C.bk), 0)
        column = column_tile * C.bn
        in_columns = column + tl.arange(0, C.bn) < columns
        # In the place of rows that are not the group's, its last one, which is not stored there.
        own = tl.minimum(span(C.bm, C), count - 1)
        x_at = x + row * inner
        x_offsets = own[:, None] * inner + k[None, :]
        matrix = matrices + group.to(tl.int64) * inner * columns
        if C.transposed:
            b_at = matrix + column.to(tl.int64) * inner
            b_offsets = k[:, None] + (span(C.bn, C) * inner)[None, :]
        else:
            b_at = matrix + column
            b_offsets = (span(C.bk, C) * columns)[:, None] + tl.arange(0, C.bn)[None, :]
        acc = tl.full([C.bm, C.bn], 0.0, tl.float32)
        for step in tl.range(0, steps):
            if C.even_inner:
                left = tl.load(x_at + x_offsets)
            else:
                inside = k < inner - step * C.bk
                left = tl.load(x_at + x_offsets, mask=inside[None, :], other=0.0)
            if C.even_inner and C.even_columns:
                right = tl.load(b_at + b_offsets)
            elif C.even_inner:
                right = tl.load(b_at + b_offsets, mask=in_columns[None, :], other=0.0)
            else:
                right = tl.load(b_at + b_offsets, mask=inside[:, None] & in_columns[None, :], other=0.0)
            if C.widen:
                left, right = left.to(tl.float32), right.to(tl.float32)
            acc = tl.dot(left, right, acc, input_precision=C.precision)
            x_at += C.bk
            if C.transposed:
                b_at += C.bk
            else:
                b_at += tl.full([], C.bk, tl.int64) * columns
        stored = tl.arange(0, C.bm) < count
        out_offsets = (span(C.bm, C) * columns)[:, None] + tl.arange(0, C.bn)[None, :]
        out_at = out + row * columns + column
        tl.store(out_at + out_offsets, acc.to(out.dtype.element_ty), mask=stored[:, None] & in_columns[None, :])


@triton.jit
def sums_over_rows(left, right, bounds, rows, inner, columns, groups, out, C: tl.constexpr):
    """``[groups, inner, columns]``: the transposed rows of each group in ``left`` times those in ``right``, 0 without rows.

    A tile has ``bm`` of ``inner`` and ``bn`` of ``columns``, a step ``bk`` rows.
    """
    inner, columns = inner * C.inner_unit, columns * C.column_unit
    inner_tiles, column_tiles = tl.cdiv(inner, C.bm), tl.cdiv(columns, C.bn)
    each = inner_tiles * column_tiles
    k = tl.arange(0, C.bk)
    for tile in tl.range(tl.program_id(0), groups * each, tl.num_programs(0)):
        group = tile // each
        inner_tile, column_tile = place(tile % each, inner_tiles, column_tiles)
        i, j = inner_tile * C.bm, column_tile * C.bn
        if C.dense:
            row = group.to(tl.int64) * rows
            count = rows
        else:
            start = tl.load(bounds + group)
            row = start.to(tl.int64)
            count = tl.load(bounds + group + 1) - start
        in_inner = i + tl.arange(0, C.bm) < inner
        in_columns = j + tl.arange(0, C.bn) < columns
        left_at = left + row * inner + i
        right_at = right + row * columns + j
        left_offsets = (span(C.bk, C) * inner)[:, None] + tl.arange(0, C.bm)[None, :]
        right_offsets = (span(C.bk, C) * columns)[:, None] + tl.arange(0, C.bn)[None, :]
        acc = tl.full([C.bm, C.bn], 0.0, tl.float32)
        for at in tl.range(0, count, C.bk):
            # Both, for a NaN in a row of another group would survive a product with 0.
            own = k < count - at
            if C.even_inner:
                x = tl.load(left_at + left_offsets, mask=own[:, None], other=0.0)
            else:
                x = tl.load(left_at + left_offsets, mask=own[:, None] & in_inner[None, :], other=0.0)
            if C.even_columns:
                y = tl.load(right_at + right_offsets, mask=own[:, None], other=0.0)
            else:
                y = tl.load(right_at + right_offsets, mask=own[:, None] & in_columns[None, :], other=0.0)
            if C.widen:
                x, y = x.to(tl.float32), y.to(tl.float32)
            acc = tl.dot(tl.trans(x), y, acc, input_precision=C.precision)
            left_at += tl.full([], C.bk, tl.int64) * inner
            right_at += tl.full([], C.bk, tl.int64) * columns
        out_offsets = (span(C.bm, C) * columns)[:, None] + tl.arange(0, C.bn)[None, :]
        out_at = out + group.to(tl.int64) * inner * columns + i.to(tl.int64) * columns + j
        tl.store(out_at + out_offsets, acc.to(out.dtype.element_ty), mask=in_inner[:, None] & in_columns[None, :])
