"""Attention of few queries to many keys on the device: keys in pages, or in one array of a sequence's own.

A *row* is one query token with one query head; the rows of a sequence and a key head lie token after token, so that all
query heads which share keys are in one tile. A tile goes over its keys in steps, once for each key head. The steps of all
tiles and heads lie side by side, and every program takes an equal share of them (see ``page_plan.py``), which may begin and
end inside of a tile. Such a tile's programs leave partial results in slots of their own, and ``combine`` joins them in order,
so every rerun gives the same bits.

Logits are in units of log 2, for ``exp2`` is what the hardware has.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from ejkernel.kernels._triton.flash_pieces import LN2, LOG2E, load_tile, tanh


@dataclass(frozen=True)
class PageConstants:
    """What a kernel is compiled for. No length is among them.

    ``bm`` rows, ``bn`` keys, ``bd`` and ``bv`` padded head dims make a tile. ``page``: tokens a page, 0 for keys that lie in one
    array ``[sequences, kv_len, k_heads, dim]``. ``left``: how many keys before its own a row sees, -1 for all; ``left_by_data``: the plan's
    header says it. ``causal``: whether a token sees no keys after its own; without it all of a context. ``whole``: a program has one tile with one head, and no
    tile is shared.
    ``cache``: how keys are stored, if not in the query's dtype; ``converts``: whether the chip converts them by itself.
    """

    heads: int
    group: int
    dim: int
    value_dim: int
    bd: int
    bv: int
    bm: int
    bn: int
    page: int
    scale: float
    cap: float
    left: int
    causal: bool
    sinks: bool
    k_scale: bool
    v_scale: bool
    precision: str
    whole: bool = False
    fast_tanh: bool = False
    cache: str = ""
    converts: bool = False
    left_by_data: bool = False

    @property
    def k_heads(self) -> int:
        return self.heads // self.group

    @property
    def whole_pages(self) -> bool:
        """Whether a step's keys are all of one page."""
        return self.page > 0 and self.page % self.bn == 0

    @property
    def pairs(self) -> bool:
        """Whether values of 8 bits are read as words of 16, each of which holds two neighbouring dims.

        That spares a way through shared memory where tensor cores take values from registers: not for float32, nor
        for 64 rows. A tile of half the dims must still be wider than high: otherwise all warps get the same dims.
        """
        spares = self.precision != "ieee" and self.bm < min(64, self.bv // 2)
        return self.converts and spares and self.value_dim % 2 == 0


@dataclass(frozen=True)
class ScheduleConstants:
    """What ``schedule`` is compiled for: ``size`` tiles, padded, of which a sequence has ``each``; ``block`` programs a program.

    ``pieces``: into how many parts the longest tile is cut, 0 for as many as make the shares of all programs equal.
    """

    size: int
    each: int
    block: int
    k_heads: int
    group: int
    bm: int
    bn: int
    left: int
    pieces: int
    rounding: int


@triton.jit
def schedule(
    lens, begins, counts, rows,
    sequences, programs,
    tiles, starts, header,
    C: tl.constexpr,
):  # fmt: skip
    """A part of a plan: ``page_plan.plan`` in one launch, where each sequence has as many tiles as the others."""
    tile = tl.arange(0, C.size)
    sequence = tile // C.each
    inside = sequence < sequences
    row = tile % C.each * C.bm
    context = tl.load(lens + sequence, mask=inside, other=0)
    count = tl.load(counts + sequence, mask=inside, other=0)
    last = tl.minimum(row + C.bm, count * C.group) - 1
    needed = inside & (row <= last)
    stop = tl.minimum(tl.maximum(context - count + last // C.group + 1, 0), context)
    start = tl.maximum(context - count + row // C.group - C.left, 0) if C.left >= 0 else tl.zeros_like(row)
    first_step = start // C.bn
    # A tile that sees nothing has one step too: it writes zeros.
    steps = tl.where(needed, tl.maximum(tl.cdiv(stop, C.bn) - first_step, 1), 0)
    ends = tl.cumsum(steps, 0) * C.k_heads
    total = tl.sum(steps, 0) * C.k_heads
    longest = tl.maximum(tl.max(steps, 0), 1)
    if C.pieces > 0:
        share = tl.cdiv(longest, C.pieces)
    else:
        share = tl.maximum(tl.cdiv(total, programs), 1)
        # As ``page_plan.even_share``.
        part = tl.cdiv(longest, tl.maximum(longest // share, 1))
        rounded = tl.where(share > longest, tl.cdiv(share, longest) * longest, part)
        share = tl.where(rounded * C.rounding <= share * (C.rounding + 1), rounded, share)
    program = tl.program_id(0) * C.block + tl.arange(0, C.block)
    position = program * share
    before = ends[None, :] <= position[:, None]
    at = tl.sum((before & inside[None, :]).to(tl.int32), 1)
    offset = position - tl.sum(tl.where(before, (steps * C.k_heads)[None, :], 0), 1)
    keep = program < programs
    tl.store(starts + program * 2, at, mask=keep)
    tl.store(starts + program * 2 + 1, offset, mask=keep)
    if tl.program_id(0) == 0:
        tl.store(header, share)
        tl.store(header + 1, total)
        record = tiles + tile * 8
        tl.store(record, tl.load(rows + sequence, mask=inside, other=0), mask=inside)
        tl.store(record + 1, row, mask=inside)
        tl.store(record + 2, count * C.group, mask=inside)
        tl.store(record + 3, tl.load(begins + sequence, mask=inside, other=0), mask=inside)
        tl.store(record + 4, context - count, mask=inside)
        tl.store(record + 5, first_step * C.bn, mask=inside)
        tl.store(record + 6, stop, mask=inside)
        tl.store(record + 7, steps, mask=inside)


@triton.jit
def first_of(cols, first, table, head, geometry, C: tl.constexpr):
    """Where the keys of a step are: rows of the cache seen as ``[keys, dim]``, ``[bn]`` or those from a scalar on."""
    sequence, blocks, kv_len, limit = geometry
    if C.page == 0:
        return (sequence.to(tl.int64) * kv_len + cols) * C.k_heads + head
    elif C.whole_pages:
        entry = tl.load(table + first // C.page)
        entry = tl.minimum(tl.maximum(entry, 0), blocks - 1).to(tl.int64)
        return (entry * C.k_heads + head) * C.page + first % C.page + tl.arange(0, C.bn)
    else:
        entry = tl.load(table + cols // C.page, mask=cols < limit, other=0)
        entry = tl.minimum(tl.maximum(entry, 0), blocks - 1).to(tl.int64)
        return (entry * C.k_heads + head) * C.page + cols % C.page


@triton.jit
def widened(x, dtype: tl.constexpr, PURE: tl.constexpr, C: tl.constexpr):
    """Stored keys or values of 8 bits as float16, which holds every one of them, and then in ``dtype``."""
    if C.cache == "int8" and C.converts:
        # 1024 + 128 + x has x + 128 as its last bits in float16.
        wide = tl.inline_asm_elementwise(
            """{ .reg .b32 t, c;
            xor.b32 t, $2, 0x80808080;
            mov.b32 c, 0x64806480;
            prmt.b32 $0, t, 0x64646464, 0x4140;
            prmt.b32 $1, t, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, c;
            sub.f16x2 $1, $1, c; }""",
            "=r,=r,r", [x], dtype=tl.float16, is_pure=PURE, pack=4,
        )  # fmt: skip
    elif C.cache == "int8":
        wide = x.to(tl.float16)
    elif C.cache == "e5m2" and C.converts:
        # The upper byte of a float16.
        wide = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;",
            "=r,=r,r", [x], dtype=tl.float16, is_pure=PURE, pack=4,
        )  # fmt: skip
    elif C.cache == "e5m2":
        wide = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif C.converts:
        wide = tl.inline_asm_elementwise(
            """{ .reg .b16 a, b;
            mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b; }""",
            "=r,=r,r", [x], dtype=tl.float16, is_pure=PURE, pack=4,
        )  # fmt: skip
    else:
        # The exponent's bias is 7 there and 15 here.
        bits = x.to(tl.uint16)
        magnitude = (((bits & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0).to(tl.float16)
        magnitude = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude).to(tl.float16)
        wide = tl.where((bits & 0x80) != 0, -magnitude, magnitude)
    return wide.to(dtype)


@triton.jit
def split(x, C: tl.constexpr):
    """The even and the odd dims of stored values, as float16; a word has two dims, and a register two words.

    Words are transposed on their way from shared memory to the tensor cores, bytes are not. So they are split then.
    """
    if C.cache == "int8":
        # As in ``widened``.
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, c;
            xor.b32 t, $2, 0x80808080;
            mov.b32 c, 0x64806480;
            prmt.b32 $0, t, 0x64646464, 0x4240;
            prmt.b32 $1, t, 0x64646464, 0x4341;
            sub.f16x2 $0, $0, c;
            sub.f16x2 $1, $1, c; }""",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif C.cache == "e5m2":
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t; .reg .b16 a, b;
            prmt.b32 t, $2, 0, 0x3120;
            mov.b32 {a, b}, t;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b; }""",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def load_keys(base, at, keep, DIM: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """A tile ``[bn, PADDED]`` of keys or values."""
    pointers = base + (at[:, None] * DIM + tl.arange(0, PADDED)[None, :])
    return load_tile(pointers, keep, DIM, PADDED, MASKED)


@triton.jit
def scaled(accs, factor, C: tl.constexpr):
    """The accumulators, each row times its factor."""
    if C.pairs:
        return (accs[0] * factor[:, None], accs[1] * factor[:, None])
    else:
        return (accs[0] * factor[:, None],)


@triton.jit
def step(top, total, accs, q_tile, first, caches, row_state, geometry, C: tl.constexpr, MASKED: tl.constexpr):
    """One block of keys: the statistics and the accumulators after it."""
    k, v, table, head, factor = caches
    start, stop, least, most = row_state
    cols = first + tl.arange(0, C.bn)
    at = first_of(cols, first, table, head, geometry, C)
    keep = (cols >= least) & (cols < most)
    k_tile = load_keys(k, at, keep, C.dim, C.bd, MASKED)
    if C.cache != "":
        k_tile = widened(k_tile, q_tile.dtype, True, C)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.precision)
    if C.pairs:
        words = load_keys(v.to(tl.pointer_type(tl.int16)), at, keep, C.value_dim // 2, C.bv // 2, MASKED)
        v_tiles = split(words, C)
    elif C.cache != "":
        v_tiles = (widened(load_keys(v, at, keep, C.value_dim, C.bv, MASKED), q_tile.dtype, False, C),)
    else:
        v_tiles = (load_keys(v, at, keep, C.value_dim, C.bv, MASKED),)
    if C.cache != "":
        s = s * factor[:, None]
    else:
        s = s * factor
    if C.cap > 0:
        s = tanh(s, C) * (C.cap * LOG2E)
    if MASKED:
        s = tl.where((cols[None, :] >= start[:, None]) & (cols[None, :] < stop[:, None]), s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weights = tl.exp2(s - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(weights, 1)
    weights = weights.to(v_tiles[0].dtype)
    accs = scaled(accs, decay, C)
    acc = tl.dot(weights, v_tiles[0], accs[0], input_precision=C.precision)
    if C.pairs:
        odd = tl.dot(weights, v_tiles[1], accs[1], input_precision=C.precision)
        return new_top, total, (acc, odd)
    else:
        return new_top, total, (acc,)


@triton.jit
def attend(
    q, k, v, tables, sinks, k_scales, v_scales, tiles, starts, header,
    max_blocks, blocks, kv_len, batch, sink_step, k_step, v_step, tile_count,
    out, lse, part, part_lse,
    C: tl.constexpr,
):  # fmt: skip
    """A program's share of the steps: the results of its tiles, and parts of those that it shares with other programs."""
    program = tl.program_id(0)
    if C.whole:
        # One tile with one head; programs that run together have the same head, and share keys in the second-level cache.
        tile = program % tile_count
        done = 0
        end = tl.load(tiles + tile * 8 + 7)
        offset = program // tile_count * end
    else:
        share = tl.load(header)
        done = program * share
        end = tl.minimum(done + share, tl.load(header + 1))
        tile = tl.load(starts + program * 2)
        offset = tl.load(starts + program * 2 + 1)
    while done < end:
        record = tiles + tile * 8
        sequence = tl.load(record)
        first_row = tl.load(record + 1)
        row_stop = tl.load(record + 2)
        first_token = tl.load(record + 3)
        position = tl.load(record + 4)
        first_key = tl.load(record + 5)
        last_key = tl.load(record + 6)
        tile_steps = tl.load(record + 7)
        head = offset // tile_steps
        first_step = offset % tile_steps
        steps = tl.minimum(tile_steps - first_step, end - done)
        key_begin = first_key + first_step * C.bn
        key_stop = tl.minimum(key_begin + steps * C.bn, last_key)

        rows = first_row + tl.arange(0, C.bm)
        inside = rows < row_stop
        of_token = rows // C.group
        # Which row of all tokens' heads.
        at = (first_token + of_token).to(tl.int64) * C.heads + head * C.group + rows % C.group
        dims = tl.arange(0, C.bd)
        q_tile = tl.load(
            q + at[:, None] * C.dim + dims[None, :], mask=inside[:, None] & (dims < C.dim)[None, :], other=0.0
        )
        if C.causal:
            stop = tl.where(inside, position + of_token + 1, 0)
            # Rows past the end repeat the last one, so that they do not widen what is masked.
            bound = tl.minimum(position + of_token + 1, position + (row_stop - 1) // C.group + 1)
        else:
            stop = tl.where(inside, last_key, 0)
            bound = tl.zeros_like(rows) + last_key
        if C.left_by_data:
            start = tl.maximum(bound - 1 - tl.load(header + 2), 0)
        elif C.left >= 0:
            start = tl.maximum(bound - 1 - C.left, 0)
        else:
            start = tl.zeros_like(rows)
        example = sequence // batch
        factor = C.scale / C.cap if C.cap > 0 else C.scale * LOG2E
        if C.k_scale:
            factor = factor * tl.load(k_scales + example * k_step + head)
        if C.cache != "":
            # Beside keys of 8 bits queries are float16, each row divided by a power of two so that it fits.
            largest = tl.max(tl.abs(q_tile.to(tl.float32)), 1)
            unit = tl.where((largest > 0) & (largest < float("inf")), tl.exp2(tl.floor(tl.log2(largest))), 1.0)
            factor = factor * unit
            if q.dtype.element_ty != tl.float32:
                q_tile = (q_tile.to(tl.float32) / unit[:, None]).to(tl.float16)
            else:
                q_tile = q_tile / unit[:, None]
        top = tl.full([C.bm], float("-inf"), tl.float32)
        total = tl.full([C.bm], 0.0, tl.float32)
        if C.pairs:
            # One for the even dims, one for the odd ones.
            accs = (tl.full([C.bm, C.bv // 2], 0.0, tl.float32), tl.full([C.bm, C.bv // 2], 0.0, tl.float32))
        else:
            accs = (tl.full([C.bm, C.bv], 0.0, tl.float32),)
        least = tl.maximum(tl.min(start, 0), key_begin)
        most = tl.minimum(tl.max(bound, 0), key_stop)
        caches = (k, v, tables + sequence.to(tl.int64) * max_blocks, head, factor)
        geometry = (sequence, blocks, kv_len, key_stop)
        row_state = (start, stop, least, most)
        # Steps that every row sees whole are not masked; those before and after them are.
        full_from = tl.minimum(tl.cdiv(tl.maximum(tl.max(start, 0) - key_begin, 0), C.bn), steps)
        full_to = tl.maximum((tl.minimum(tl.min(bound, 0), key_stop) - key_begin) // C.bn, full_from)
        for t in tl.range(full_from, full_to):
            first = key_begin + t * C.bn
            top, total, accs = step(top, total, accs, q_tile, first, caches, row_state, geometry, C, False)
        for t in tl.range(0, steps - (full_to - full_from)):
            first = key_begin + tl.where(t < full_from, t, t + full_to - full_from) * C.bn
            top, total, accs = step(top, total, accs, q_tile, first, caches, row_state, geometry, C, True)

        whole = steps == tile_steps
        if C.sinks:
            sink = tl.load(sinks + example * sink_step + head * C.group + rows % C.group) * LOG2E
            sink = tl.where(whole, sink, float("-inf"))
            new_top = tl.maximum(top, sink)
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            decay = tl.exp2(top - shift)
            total = total * decay + tl.exp2(sink - shift)
            accs = scaled(accs, decay, C)
            top = new_top
        nothing = total == 0
        inverse = tl.where(nothing, 0.0, 1 / tl.where(nothing, 1.0, total))
        row_lse = tl.where(nothing, float("-inf"), top + tl.log2(total))
        if C.v_scale:
            inverse = inverse * tl.load(v_scales + example * v_step + head)
        accs = scaled(accs, inverse, C)
        # A row that sees nothing gives 0, be the values of its tile's other rows NaN.
        acc = tl.where(nothing[:, None], 0.0, accs[0])
        if C.pairs:
            acc = tl.interleave(acc, tl.where(nothing[:, None], 0.0, accs[1]))
        columns = tl.arange(0, C.bv)
        keep = inside[:, None] & (columns < C.value_dim)[None, :]
        if whole:
            pointers = out + at[:, None] * C.value_dim + columns[None, :]
            tl.store(pointers, acc.to(out.dtype.element_ty), mask=keep)
            tl.store(lse + at, row_lse * LN2, mask=inside)
        else:
            slot = 2 * program + (first_step == 0).to(tl.int32)
            own = slot.to(tl.int64) * C.bm + tl.arange(0, C.bm)
            tl.store(part + own[:, None] * C.value_dim + columns[None, :], acc, mask=keep)
            tl.store(part_lse + own, row_lse, mask=inside)
        done += steps
        offset += steps
        ended = offset == tile_steps * C.k_heads
        tile = tl.where(ended, tile + 1, tile)
        offset = tl.where(ended, 0, offset)


@triton.jit
def combine(
    part, part_lse, sinks, tiles, starts, header, out, lse,
    rows_each, batch, sink_step,
    C: tl.constexpr,
):  # fmt: skip
    """One row of a tile that several programs shared, by the first program that did not begin it; all others stay."""
    row = tl.program_id(0) % rows_each
    program = tl.program_id(0) // rows_each + 1
    share = tl.load(header)
    position = program * share
    if position < tl.load(header + 1):
        tile = tl.load(starts + program * 2)
        offset = tl.load(starts + program * 2 + 1)
        record = tiles + tile * 8
        tile_steps = tl.load(record + 7)
        head = offset // tile_steps
        first_step = offset % tile_steps
        of = tl.load(record + 1) + row
        begun = position - first_step
        if (first_step > 0) & (begun >= position - share) & (of < tl.load(record + 2)):
            programs = tl.cdiv(begun + tile_steps, share) - (program - 1)
            columns = tl.arange(0, C.bv)
            if C.sinks:
                at_sink = (tl.load(record) // batch) * sink_step + head * C.group + of % C.group
                top = tl.load(sinks + at_sink) * LOG2E
                total = tl.where(top == float("-inf"), 0.0, 1.0)
            else:
                top = tl.full([], float("-inf"), tl.float32)
                total = tl.full([], 0.0, tl.float32)
            acc = tl.full([C.bv], 0.0, tl.float32)
            for block in tl.range(0, tl.cdiv(programs, C.bn)):
                index = block * C.bn + tl.arange(0, C.bn)
                slot = 2 * (program - 1 + index) + (index == 0).to(tl.int32)
                at = slot.to(tl.int64) * C.bm + row
                values = tl.load(part_lse + at, mask=index < programs, other=float("-inf"))
                new_top = tl.maximum(top, tl.max(values, 0))
                shift = tl.where(new_top == float("-inf"), 0.0, new_top)
                weights = tl.exp2(values - shift)
                decay = tl.exp2(top - shift)
                parts = tl.load(
                    part + at[:, None] * C.value_dim + columns[None, :],
                    mask=(index < programs)[:, None] & (columns < C.value_dim)[None, :],
                    other=0.0,
                )
                acc = acc * decay + tl.sum(tl.where(weights[:, None] == 0, 0.0, parts * weights[:, None]), 0)
                total = total * decay + tl.sum(weights, 0)
                top = new_top
            nothing = total == 0
            acc = acc / tl.where(nothing, 1.0, total)
            at = (tl.load(record + 3) + of // C.group).to(tl.int64) * C.heads + head * C.group + of % C.group
            tl.store(out + at * C.value_dim + columns, acc.to(out.dtype.element_ty), mask=columns < C.value_dim)
            tl.store(lse + at, tl.where(nothing, float("-inf"), top + tl.log2(total)) * LN2)


@triton.jit
def combine_into(
    part, part_lse, sinks, tiles, starts, header, out_before, lse_before,
    rows_each, batch, sink_step,
    out, lse,
    C: tl.constexpr,
):  # fmt: skip
    """The same where a launch passes arrays that are changed in place twice, before the scalars and after them."""
    combine(part, part_lse, sinks, tiles, starts, header, out, lse, rows_each, batch, sink_step, C)
