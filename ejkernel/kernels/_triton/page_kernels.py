"""Attention of few queries to many keys on the device: keys in pages, or in one array of a sequence's own.

A *row* is one query token with one query head; the rows of a sequence and a key head lie token after token, so that all
query heads which share keys are in one tile. A program takes an *item* (see ``page_plan.py``): a tile of rows and a range
of keys. Where a tile's keys are cut into several items, each leaves a partial result in a slot of its own, and ``combine``
joins them in order, so every rerun gives the same bits.

Logits are in units of log 2, for ``exp2`` is what the hardware has.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from ejkernel.kernels._triton.flash_pieces import LN2, LOG2E, tanh


@dataclass(frozen=True)
class PageConstants:
    """What a kernel is compiled for. No length is among them.

    ``bm`` rows, ``bn`` keys, ``bd`` and ``bv`` padded head dims make a tile. ``page``: tokens a page, 0 for keys that lie in one
    array ``[sequences, kv_len, k_heads, dim]``. ``left``: how many keys before its own a row sees, -1 for all. ``causal``: whether
    a token sees no keys after its own; without it all of a context. ``splits``: whether any tile is cut into several items.
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
    splits: bool
    precision: str
    fast_tanh: bool = False

    @property
    def k_heads(self) -> int:
        return self.heads // self.group

    @property
    def whole_pages(self) -> bool:
        """Whether a step's keys are all of one page."""
        return self.page > 0 and self.page % self.bn == 0


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
def load_keys(base, at, keep, DIM: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """A tile ``[bn, PADDED]`` of keys or values."""
    dims = tl.arange(0, PADDED)
    pointers = base + (at[:, None] * DIM + dims[None, :])
    if MASKED and PADDED > DIM:
        return tl.load(
            pointers, mask=keep[:, None] & (dims < DIM)[None, :], other=0 if base.dtype.element_ty == tl.int8 else 0.0
        )
    elif MASKED:
        return tl.load(pointers, mask=keep[:, None], other=0 if base.dtype.element_ty == tl.int8 else 0.0)
    elif PADDED > DIM:
        return tl.load(pointers, mask=(dims < DIM)[None, :], other=0 if base.dtype.element_ty == tl.int8 else 0.0)
    else:
        return tl.load(pointers)


@triton.jit
def step(top, total, acc, q_tile, first, caches, row_state, geometry, C: tl.constexpr, MASKED: tl.constexpr):
    """One block of keys: the statistics and the accumulator after it."""
    k, v, table, head, factor = caches
    start, stop, least, most = row_state
    cols = first + tl.arange(0, C.bn)
    at = first_of(cols, first, table, head, geometry, C)
    keep = (cols >= least) & (cols < most)
    k_tile = load_keys(k, at, keep, C.dim, C.bd, MASKED).to(q_tile.dtype)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.precision)
    v_tile = load_keys(v, at, keep, C.value_dim, C.bv, MASKED).to(q_tile.dtype)
    if C.cap > 0:
        s = tanh(s * factor, C) * (C.cap * LOG2E)
    else:
        s = s * factor
    if MASKED:
        s = tl.where((cols[None, :] >= start[:, None]) & (cols[None, :] < stop[:, None]), s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weights = tl.exp2(s - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision=C.precision)
    return new_top, total, acc


@triton.jit
def attend(
    q, k, v, tables, sinks, k_scales, v_scales, items, out_before, lse_before,
    max_blocks, blocks, kv_len, batch, sink_step, k_step, v_step,
    out, lse, part, part_lse,
    C: tl.constexpr,
):  # fmt: skip
    """One item for one key head: the result of its rows, or a part of it."""
    program = tl.program_id(0)
    head = program % C.k_heads
    item = items + (program // C.k_heads) * 8
    sequence = tl.load(item)
    first_row = tl.load(item + 1)
    row_stop = tl.load(item + 2)
    first_token = tl.load(item + 3)
    position = tl.load(item + 4)
    key_begin = tl.load(item + 5)
    key_stop = tl.load(item + 6)
    slot = tl.load(item + 7)
    rows = first_row + tl.arange(0, C.bm)
    inside = rows < row_stop
    of_token = rows // C.group
    # Which row of all tokens' heads.
    at = (first_token + of_token).to(tl.int64) * C.heads + head * C.group + rows % C.group
    dims = tl.arange(0, C.bd)
    q_tile = tl.load(q + at[:, None] * C.dim + dims[None, :], mask=inside[:, None] & (dims < C.dim)[None, :], other=0.0)
    if C.causal:
        stop = tl.where(inside, position + of_token + 1, 0)
        # Rows past the end repeat the last one, so that they do not widen what is masked.
        bound = tl.minimum(position + of_token + 1, position + (row_stop - 1) // C.group + 1)
    else:
        stop = tl.where(inside, position + 1, 0)
        bound = tl.zeros_like(rows) + position + 1
    start = tl.maximum(bound - 1 - C.left, 0) if C.left >= 0 else tl.zeros_like(rows)
    example = sequence // batch
    factor = C.scale / C.cap if C.cap > 0 else C.scale * LOG2E
    if C.k_scale:
        factor = factor * tl.load(k_scales + example * k_step + head)
    top = tl.full([C.bm], float("-inf"), tl.float32)
    total = tl.full([C.bm], 0.0, tl.float32)
    acc = tl.full([C.bm, C.bv], 0.0, tl.float32)
    least = tl.maximum(tl.min(start, 0), key_begin)
    most = tl.minimum(tl.max(bound, 0), key_stop)
    caches = (k, v, tables + sequence.to(tl.int64) * max_blocks, head, factor)
    geometry = (sequence, blocks, kv_len, key_stop)
    row_state = (start, stop, least, most)
    # Steps that every row sees whole are not masked; those before and after them are.
    steps = tl.cdiv(tl.maximum(key_stop - key_begin, 0), C.bn)
    full_from = tl.minimum(tl.cdiv(tl.maximum(tl.max(start, 0) - key_begin, 0), C.bn), steps)
    full_to = tl.maximum((tl.minimum(tl.min(bound, 0), key_stop) - key_begin) // C.bn, full_from)
    for t in tl.range(full_from, full_to):
        top, total, acc = step(top, total, acc, q_tile, key_begin + t * C.bn, caches, row_state, geometry, C, False)
    for t in tl.range(0, steps - (full_to - full_from)):
        first = key_begin + tl.where(t < full_from, t, t + full_to - full_from) * C.bn
        top, total, acc = step(top, total, acc, q_tile, first, caches, row_state, geometry, C, True)
    alone = slot < 0
    if C.sinks:
        sink = tl.load(sinks + example * sink_step + head * C.group + rows % C.group) * LOG2E
        sink = tl.where(alone, sink, float("-inf"))
        new_top = tl.maximum(top, sink)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay = tl.exp2(top - shift)
        total = total * decay + tl.exp2(sink - shift)
        acc = acc * decay[:, None]
        top = new_top
    nothing = total == 0
    inverse = tl.where(nothing, 0.0, 1 / tl.where(nothing, 1.0, total))
    row_lse = tl.where(nothing, float("-inf"), top + tl.log2(total))
    if C.v_scale:
        inverse = inverse * tl.load(v_scales + example * v_step + head)
    # A row that sees nothing gives 0, be the values of its tile's other rows NaN.
    acc = tl.where(nothing[:, None], 0.0, acc * inverse[:, None])
    columns = tl.arange(0, C.bv)
    keep = inside[:, None] & (columns < C.value_dim)[None, :]
    pointers = out + at[:, None] * C.value_dim + columns[None, :]
    if C.splits:
        tl.store(pointers, acc.to(out.dtype.element_ty), mask=keep & alone)
        tl.store(lse + at, row_lse * LN2, mask=inside & alone)
        own = (slot * C.k_heads + head).to(tl.int64) * C.bm + tl.arange(0, C.bm)
        tl.store(part + own[:, None] * C.value_dim + columns[None, :], acc, mask=keep & (slot >= 0))
        tl.store(part_lse + own, row_lse, mask=inside & (slot >= 0))
    else:
        tl.store(pointers, acc.to(out.dtype.element_ty), mask=keep)
        tl.store(lse + at, row_lse * LN2, mask=inside)


@triton.jit
def combine(
    part, part_lse, sinks, tiles, out_before, lse_before,
    rows_each, batch, sink_step,
    out, lse,
    C: tl.constexpr,
):  # fmt: skip
    """One row of a tile that was cut into several items."""
    program = tl.program_id(0)
    row = program % rows_each
    head = (program // rows_each) % C.k_heads
    tile = tiles + (program // rows_each // C.k_heads) * 6
    sequence = tl.load(tile)
    first_row = tl.load(tile + 1)
    row_stop = tl.load(tile + 2)
    first_token = tl.load(tile + 3)
    first_slot = tl.load(tile + 4)
    slots = tl.load(tile + 5)
    if first_row + row < row_stop:
        columns = tl.arange(0, C.bv)
        if C.sinks:
            at_sink = (sequence // batch) * sink_step + head * C.group + (first_row + row) % C.group
            top = tl.load(sinks + at_sink) * LOG2E
            total = tl.where(top == float("-inf"), 0.0, 1.0)
        else:
            top = tl.full([], float("-inf"), tl.float32)
            total = tl.full([], 0.0, tl.float32)
        acc = tl.full([C.bv], 0.0, tl.float32)
        for block in tl.range(0, tl.cdiv(slots, C.bn)):
            index = block * C.bn + tl.arange(0, C.bn)
            at = ((first_slot + index) * C.k_heads + head).to(tl.int64) * C.bm + row
            values = tl.load(part_lse + at, mask=index < slots, other=float("-inf"))
            new_top = tl.maximum(top, tl.max(values, 0))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(values - shift)
            decay = tl.exp2(top - shift)
            parts = tl.load(
                part + at[:, None] * C.value_dim + columns[None, :],
                mask=(index < slots)[:, None] & (columns < C.value_dim)[None, :],
                other=0.0,
            )
            acc = acc * decay + tl.sum(tl.where(weights[:, None] > 0, parts * weights[:, None], 0.0), 0)
            total = total * decay + tl.sum(weights, 0)
            top = new_top
        nothing = total == 0
        acc = acc / tl.where(nothing, 1.0, total)
        of = first_row + row
        at = (first_token + of // C.group).to(tl.int64) * C.heads + head * C.group + of % C.group
        tl.store(out + at * C.value_dim + columns, acc.to(out.dtype.element_ty), mask=columns < C.value_dim)
        tl.store(lse + at, tl.where(nothing, float("-inf"), top + tl.log2(total)) * LN2)
