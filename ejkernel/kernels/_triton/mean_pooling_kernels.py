"""Mean pooling on the device: sums of a sequence's own rows, in float32 and in a fixed order.

A row that does not count is not read. A program sums at most about ``2 · chunk`` rows of ``bd`` features, so that sequences of
any length keep all programs busy: long ones are summed in chunks, whose sums ``combine`` adds in order.
"""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class PoolingConstants:
    """What a kernel is compiled for; no length is among them.

    ``bs`` rows and ``bd`` features make a tile that is written; a sum takes ``loads`` tiles of ``rows`` at a time, of which a
    thread has one wide load each. ``chunk``: rows of a long sequence that are summed by one program.
    ``unit``: what features are counted in; the compiler must know of 16 to load wide. ``even``: whether tiles divide them.
    ``stages``: tiles whose loads are under way at once, through shared memory if there are several. ``single``: whether a sequence is one chunk. ``steps``: of a bisection through the offsets of packed sequences.
    """

    bs: int
    bd: int
    rows: int
    loads: int
    chunk: int
    unit: int
    even: bool
    mask: bool
    stages: int = 1
    single: bool = False
    steps: int = 0


@triton.jit
def feature_mask(column, features, C: tl.constexpr):
    """Which features of a tile there are."""
    return column + tl.arange(0, C.bd) < features


@triton.jit
def sum_of_rows(x, mask, gaps, row, start, stop, features, column, C: tl.constexpr, MASK: tl.constexpr):
    """``[bd]``: the sum of the rows from ``start`` to ``stop``, counted from ``row``; if there are ``gaps``, of those in the mask."""
    own = tl.arange(0, C.rows)
    offsets = own[:, None] * features + tl.arange(0, C.bd)[None, :]
    inside = feature_mask(column, features, C)[None, :]
    acc = tl.full([C.rows, C.bd], 0.0, tl.float32)
    stages: tl.constexpr = C.stages
    loads: tl.constexpr = C.loads
    if MASK:
        masked = tl.where(gaps, stop, start)
    for first in tl.range(start, stop, C.rows * loads, num_stages=stages):
        # All loads of a step are under way before the first sum, those of the mask before those of rows.
        keeps = ()
        for i in tl.static_range(loads):
            position = first + i * C.rows + own
            keep = position < stop
            if MASK:
                keep = keep & (tl.load(mask + row + position, mask=position < masked, other=1) != 0)
            keeps += (keep,)
        tiles = ()
        for i in tl.static_range(loads):
            at = x + (row + first + i * C.rows) * features + column
            if C.even:
                tiles += (tl.load(at + offsets, mask=keeps[i][:, None], other=0.0),)
            else:
                tiles += (tl.load(at + offsets, mask=keeps[i][:, None] & inside, other=0.0),)
        for i in tl.static_range(loads):
            acc += tiles[i].to(tl.float32)
    return tl.sum(acc, 0)


@triton.jit
def masked_sum(x, mask, row, start, stop, features, column, C: tl.constexpr):
    """The same sum, and how many rows count.

    The mask is read first, at once: most often the rows that count lie side by side, and then no load of them waits for it.
    """
    position = start + tl.arange(0, C.chunk)
    keep = tl.load(mask + row + position, mask=position < stop, other=0) != 0
    count = tl.sum(keep.to(tl.int32), 0)
    first = tl.min(tl.where(keep, position, stop), 0)
    last = tl.max(tl.where(keep, position + 1, first), 0)
    total = sum_of_rows(x, mask, last - first != count, row, first, last, features, column, C, True)
    return total, count


@triton.jit
def padded_sums(inputs, mask, length, features, chunks, out, partial, counts, C: tl.constexpr):
    """The sums of each sequence's chunks, or if ``single`` its mean."""
    features = features * C.unit
    columns = tl.cdiv(features, C.bd)
    program = tl.program_id(0)
    column = program % columns * C.bd
    chunk = program // columns % chunks
    sequence = (program // columns // chunks).to(tl.int64)
    start = chunk * C.chunk
    stop = tl.minimum(start + C.chunk, length)
    if C.mask:
        total, count = masked_sum(inputs, mask, sequence * length, start, stop, features, column, C)
    else:
        total = sum_of_rows(inputs, mask, False, sequence * length, start, stop, features, column, C, False)
        count = stop - start
    inside = feature_mask(column, features, C)
    feature = column + tl.arange(0, C.bd)
    if C.single:
        mean = total / tl.maximum(count, 1).to(tl.float32)
        tl.store(out + sequence * features + feature, mean.to(out.dtype.element_ty), mask=inside)
    else:
        slot = sequence * chunks + chunk
        tl.store(partial + slot * features + feature, total, mask=inside)
        if C.mask:
            # Every column's program stores the same.
            tl.store(counts + slot, count)


@triton.jit
def combine_padded(partial, counts, length, features, chunks, out, C: tl.constexpr):
    """The mean of each sequence, from the sums of its chunks."""
    features = features * C.unit
    columns = tl.cdiv(features, C.bd)
    program = tl.program_id(0)
    column = program % columns * C.bd
    sequence = (program // columns).to(tl.int64)
    inside = feature_mask(column, features, C)
    feature = column + tl.arange(0, C.bd)
    total = sum_of_rows(partial, partial, False, sequence * chunks, 0, chunks, features, column, C, False)
    count = tl.full([1], 0, tl.int32)
    if C.mask:
        for first in tl.range(0, chunks, C.bs):
            slot = first + tl.arange(0, C.bs)
            count += tl.sum(tl.load(counts + sequence * chunks + slot, mask=slot < chunks, other=0), 0)
    else:
        count += length
    mean = total / tl.maximum(count, 1).to(tl.float32)
    tl.store(out + sequence * features + feature, mean.to(out.dtype.element_ty), mask=inside)


@triton.jit
def whole_chunks(start, stop, C: tl.constexpr):
    """The chunks of ``chunk`` tokens, counted from the first token, that lie inside of a sequence: first, and first not."""
    first = tl.cdiv(start, C.chunk)
    return first, tl.maximum(stop // C.chunk, first)


@triton.jit
def owner_of(token, offsets, sequences, C: tl.constexpr):
    """The last sequence that begins at or before a token, -1 if none does: empty ones before it are passed over."""
    low, high = token * 0, token * 0 + sequences + 1
    for _ in tl.range(0, C.steps):
        middle = (low + high) // 2
        begun = (low < high) & (tl.load(offsets + tl.minimum(middle, sequences)) <= token)
        high = tl.where((low < high) & ~begun, middle, high)
        low = tl.where(begun, middle + 1, low)
    return low - 1


@triton.jit
def packed_sums(inputs, offsets, tokens, sequences, features, chunks, batch, out, partial, rest, C: tl.constexpr):
    """The means of sequences that hold no whole chunk; of the others the sums of all whole chunks, and of what is left.

    First come the programs of chunks, then those of sequences.
    """
    features = features * C.unit
    columns = tl.cdiv(features, C.bd)
    program = tl.program_id(0)
    column = program % columns * C.bd
    inside = feature_mask(column, features, C)
    feature = column + tl.arange(0, C.bd)
    index = program // columns
    if index < batch * chunks:
        entry = (index // chunks).to(tl.int64)
        chunk = index % chunks
        offsets += entry * (sequences + 1)
        first = chunk * C.chunk
        owner = owner_of(first, offsets, sequences, C)
        stop = tl.load(offsets + owner + 1, mask=(owner >= 0) & (owner < sequences), other=0)
        if stop >= first + C.chunk:
            end = first + C.chunk
            total = sum_of_rows(inputs, inputs, False, entry * tokens, first, end, features, column, C, False)
            tl.store(partial + (entry * chunks + chunk) * features + feature, total, mask=inside)
    else:
        index -= batch * chunks
        entry = (index // sequences).to(tl.int64)
        sequence = index % sequences
        offsets += entry * (sequences + 1)
        start, stop = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
        first, last = whole_chunks(start, stop, C)
        # Without a whole chunk both ranges are one.
        long = last > first
        middle = tl.where(long, first * C.chunk, stop)
        total = sum_of_rows(inputs, inputs, False, entry * tokens, start, middle, features, column, C, False)
        after = tl.where(long, last * C.chunk, stop)
        more = sum_of_rows(inputs, inputs, False, entry * tokens, after, stop, features, column, C, False)
        total += more
        at = (entry * sequences + sequence) * features + feature
        if long:
            tl.store(rest + at, total, mask=inside)
        else:
            mean = total / tl.maximum(stop - start, 1).to(tl.float32)
            tl.store(out + at, mean.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine_packed(partial, rest, offsets, out, sequences, features, chunks, C: tl.constexpr):
    """The means of sequences that hold whole chunks; the others stay as they are."""
    features = features * C.unit
    columns = tl.cdiv(features, C.bd)
    program = tl.program_id(0)
    column = program % columns * C.bd
    index = program // columns
    entry = (index // sequences).to(tl.int64)
    offsets += entry * (sequences + 1) + index % sequences
    start, stop = tl.load(offsets), tl.load(offsets + 1)
    first, last = whole_chunks(start, stop, C)
    if last > first:
        total = sum_of_rows(partial, partial, False, entry * chunks, first, last, features, column, C, False)
        inside = feature_mask(column, features, C)
        at = index.to(tl.int64) * features + column + tl.arange(0, C.bd)
        total += tl.load(rest + at, mask=inside, other=0.0)
        mean = total / (stop - start).to(tl.float32)
        tl.store(out + at, mean.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine_packed_into(
    partial, rest, offsets, out_before, sequences, features, chunks, out, C: tl.constexpr
):  # fmt: skip
    """The same where a launch passes an array that is changed in place twice, before the scalars and after them."""
    combine_packed(partial, rest, offsets, out, sequences, features, chunks, C)


@triton.jit
def spread_padded(dout, mask, counts, length, features, out, C: tl.constexpr):
    """The gradient of a tile of rows: the mean's, divided by the count, in rows that count, 0 in the others."""
    features = features * C.unit
    columns, tiles = tl.cdiv(features, C.bd), tl.cdiv(length, C.bs)
    program = tl.program_id(0)
    column = program % columns * C.bd
    row = program // columns % tiles * C.bs + tl.arange(0, C.bs)
    sequence = (program // columns // tiles).to(tl.int64)
    inside = feature_mask(column, features, C)
    feature = column + tl.arange(0, C.bd)
    cotangent = tl.load(dout + sequence * features + feature, mask=inside, other=0.0).to(tl.float32)
    count = tl.full([1], 0, tl.int32) + (tl.load(counts + sequence) if C.mask else length)
    share = (cotangent / tl.maximum(count, 1).to(tl.float32)).to(out.dtype.element_ty)
    tile = tl.full([C.bs, C.bd], 0.0, out.dtype.element_ty) + share[None, :]
    if C.mask:
        keep = tl.load(mask + sequence * length + row, mask=row < length, other=0) != 0
        tile = tl.where(keep[:, None], tile, 0.0).to(out.dtype.element_ty)
    at = out + sequence * length * features + row.to(tl.int64)[:, None] * features + feature[None, :]
    tl.store(at, tile, mask=(row < length)[:, None] & inside[None, :])


@triton.jit
def write_rows(share, out, base, start, stop, features, column, C: tl.constexpr):
    """Store ``[bd]`` in each row from ``start`` to ``stop``, counted from ``base``."""
    row = tl.arange(0, C.bs)
    inside = feature_mask(column, features, C)[None, :]
    offsets = row[:, None] * features + tl.arange(0, C.bd)[None, :]
    tile = tl.full([C.bs, C.bd], 0.0, out.dtype.element_ty) + share.to(out.dtype.element_ty)[None, :]
    for first in tl.range(start, stop, C.bs):
        at = out + (base + first) * features + column
        tl.store(at + offsets, tile, mask=(first + row < stop)[:, None] & inside)


@triton.jit
def share_of(dout, offsets, owner, entry, sequences, features, column, C: tl.constexpr):
    """``[bd]``: what each token of a sequence gets, and 0 for tokens of none, whose ``owner`` is no sequence."""
    owned = (owner >= 0) & (owner < sequences)
    start = tl.load(offsets + owner, mask=owned, other=0)
    stop = tl.load(offsets + owner + 1, mask=owned, other=0)
    inside = feature_mask(column, tl.where(owned, features, 0), C)
    at = dout + (entry * sequences + owner) * features + column + tl.arange(0, C.bd)
    cotangent = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return cotangent / tl.maximum(stop - start, 1).to(tl.float32)


@triton.jit
def spread_packed(dout, offsets, tokens, sequences, features, chunks, batch, out, C: tl.constexpr):
    """The same of packed sequences, divided as in ``packed_sums``; tokens behind the last sequence are one more, of zeros."""
    features = features * C.unit
    columns = tl.cdiv(features, C.bd)
    program = tl.program_id(0)
    column = program % columns * C.bd
    index = program // columns
    if index < batch * chunks:
        entry = (index // chunks).to(tl.int64)
        first = index % chunks * C.chunk
        offsets += entry * (sequences + 1)
        owner = owner_of(first, offsets, sequences, C)
        stop = tl.load(offsets + owner + 1, mask=(owner >= 0) & (owner < sequences), other=tokens)
        if stop >= first + C.chunk:
            share = share_of(dout, offsets, owner, entry, sequences, features, column, C)
            write_rows(share, out, entry * tokens, first, first + C.chunk, features, column, C)
    else:
        index -= batch * chunks
        entry = (index // (sequences + 1)).to(tl.int64)
        owner = index % (sequences + 1)
        offsets += entry * (sequences + 1)
        start = tl.load(offsets + owner)
        stop = tl.load(offsets + owner + 1, mask=owner < sequences, other=tokens)
        first, last = whole_chunks(start, stop, C)
        # Without a whole chunk both ranges are one.
        middle = tl.where(last > first, first * C.chunk, stop)
        after = tl.where(last > first, last * C.chunk, stop)
        share = share_of(dout, offsets, owner, entry, sequences, features, column, C)
        write_rows(share, out, entry * tokens, start, middle, features, column, C)
        write_rows(share, out, entry * tokens, after, stop, features, column, C)
