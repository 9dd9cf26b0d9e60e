"""Flash attention on the device: a forward, three backward kernels, and the pieces they share.

Tiles of logits are ``[queries, keys]`` in every kernel but ``backward_keys``, where they are transposed; helpers take
positions that are already expanded, so they serve both. Shaped logits are in units of log 2, for ``exp2`` is what the
hardware has.

A *walk* is planned for each block by ``visibility.py``: the first position, then how many masked, unmasked and masked
steps follow each other. Unmasked steps test nothing. ``C`` holds all that is known when a kernel is compiled
(``Constants``); where it says that the call does without a feature, the feature's pointer is never read.

Offsets that grow with a tensor are 64-bit scalars, offsets within a tile 32-bit.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class Constants:
    """What a kernel is compiled for. No length is among them, so that one kernel serves all lengths.

    ``bm`` queries, ``bn`` keys, ``bd`` and ``bv`` padded head dims make a tile. ``factor`` is what shaped logits are still to
    be multiplied by: the scale, where nothing stands between it and the exponential, else 1. ``mask_q`` and the like tell
    whether an array has that dimension or is shared along it; strides of mask and bias come in units of ``mask_unit`` and
    ``bias_unit``, so that the compiler knows of rows that are aligned. ``full`` and ``partial`` tell whether any step is unmasked or
    masked, ``threshold`` is dropout's smallest hash kept (0: no dropout) and ``keep`` the factor of what it keeps. ``dk`` and
    ``dv`` tell ``backward_keys`` which of its two gradients to compute.
    """

    heads: int
    group: int
    dim: int
    value_dim: int
    bd: int
    bv: int
    bm: int
    bn: int
    scale: float
    cap: float
    factor: float
    left: bool
    right: bool
    packed: bool
    segments: bool
    mask: bool
    mask_q: bool
    mask_k: bool
    mask_unit: int
    bias: bool
    bias_q: bool
    bias_k: bool
    bias_unit: int
    sinks: bool
    threshold: int
    keep: float
    full: bool
    partial: bool
    precision: str
    fast_tanh: bool = False
    dk: bool = True
    dv: bool = True

    @property
    def k_heads(self) -> int:
        return self.heads // self.group

    @property
    def hide_columns(self) -> bool:
        """Whether masked steps zero the keys that no row sees. With a mask or a bias every step is masked, and the caller
        has seen to it once.
        """
        return (self.packed or self.segments) and not (self.mask or self.bias)

    @property
    def hide_rows(self) -> bool:
        """Whether rows that see nothing are told only by looking: without sinks their log-sum-exp does."""
        return self.sinks and (self.packed or self.segments or self.mask or self.bias)


@triton.jit
def fold(x):
    """A part of the hash of ``kernels/dropout.py``, and so are the next three."""
    return x ^ (x >> 16)


@triton.jit
def finish(x):
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    return x * 0x846CA68B


@triton.jit
def row_keys(seeds, batch, head, rows):
    """Dropout's keys of query rows."""
    head_key = fold(finish(fold(tl.load(seeds + batch) ^ ((head + 1).to(tl.uint32) * 0x85EBCA77))))
    return fold(fold(finish(fold(head_key ^ (rows.to(tl.uint32) * 0xC2B2AE3D)))))


@triton.jit
def kept(row_key, cols, C: tl.constexpr):
    """Where dropout keeps a weight."""
    return finish(row_key ^ fold(cols.to(tl.uint32) * 0x27D4EB2F)) >= C.threshold


@triton.jit
def interval(packing, batch, rows, geometry, C: tl.constexpr):
    """The keys ``[start, stop)`` that each row may see; none for rows past the end."""
    q_len, kv_len, lo, hi = geometry
    inside = rows < q_len
    if C.packed:
        starts, stops, per_batch = packing
        at = batch * per_batch + rows
        start = tl.load(starts + at, mask=inside, other=kv_len)
        stop = tl.load(stops + at, mask=inside, other=0)
    else:
        start = tl.maximum(rows + lo, 0) if C.left else tl.zeros_like(rows)
        stop = tl.minimum(rows + hi, kv_len) if C.right else tl.zeros_like(rows) + kv_len
        start = tl.where(inside, start, kv_len)
        stop = tl.where(inside, stop, 0)
    return start, stop


@triton.jit
def ids_at(ids, batch, positions, length, C: tl.constexpr):
    """Segment ids, padding past the end; without segments anything of the right shape."""
    if C.segments:
        return tl.load(ids + batch * length + positions, mask=positions < length, other=0)
    else:
        return positions


@triton.jit
def keys_at(seeds, batch, head, rows, C: tl.constexpr):
    """Dropout's keys of rows; without dropout anything of the right shape."""
    if C.threshold > 0:
        return row_keys(seeds, batch, head, rows)
    else:
        return rows


@triton.jit
def tanh(x, C: tl.constexpr):
    """The hardware's (NVIDIA, error 2^-11) where half precision hides the difference, else from the exponential."""
    if C.fast_tanh:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        # 1 - 2 / (1 + exp(2 x)): right for every x; where x is small its error is still small beside the cap.
        return 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E)))


@triton.jit
def shaped(s, C: tl.constexpr):
    """Logits that are still to be multiplied by ``C.factor``, and the slope of their cap."""
    if C.cap > 0:
        bounded = tanh(s * (C.scale / C.cap), C)
        return bounded * (C.cap * LOG2E), 1 - bounded * bounded
    elif C.factor == 1.0:
        return s * (C.scale * LOG2E), s
    else:
        return s, s


@triton.jit
def tile_of(array, rows, cols, first_row, first_col, geometry, HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr):
    """A tile of a mask or a bias, 0 outside; of size 1 along a dimension that is shared."""
    base, row_stride = array
    q_len, kv_len, _, _ = geometry
    if HAS_ROWS:
        base += first_row.to(tl.int64) * row_stride
    if HAS_COLUMNS:
        base += first_col
    if HAS_ROWS and HAS_COLUMNS:
        return tl.load(
            base + ((rows - first_row) * row_stride + (cols - first_col)),
            mask=(rows < q_len) & (cols < kv_len),
            other=0,
        )
    elif HAS_ROWS:
        return tl.load(base + (rows - first_row) * row_stride, mask=rows < q_len, other=0)
    elif HAS_COLUMNS:
        return tl.load(base + (cols - first_col), mask=cols < kv_len, other=0)
    else:
        return tl.load(base + (rows - rows), mask=rows < q_len, other=0)


@triton.jit
def load_tiles(tiles, rows, cols, first_row, first_col, geometry, C: tl.constexpr):
    """What mask and bias say of a tile. Loaded before the product, which hides the wait."""
    mask, bias = tiles
    allowed, added = rows, rows
    if C.mask:
        allowed = tile_of(mask, rows, cols, first_row, first_col, geometry, C.mask_q, C.mask_k)
    if C.bias:
        added = tile_of(bias, rows, cols, first_row, first_col, geometry, C.bias_q, C.bias_k)
    return allowed, added


@triton.jit
def masked(s, rows, cols, interval, ids, said, geometry, C: tl.constexpr, BY_POSITION: tl.constexpr):
    """Logits with the bias added and -inf where they are hidden, and what is visible.

    ``interval`` holds the first key that each row sees and the first it does not, ``ids`` the segments of rows and keys,
    ``said`` what ``load_tiles`` gave.
    ``BY_POSITION`` is for a tile that has rows along its second axis: the ends of their intervals would fill registers.
    """
    start, stop = interval
    q_id, kv_id = ids
    allowed, added = said
    q_len, kv_len, lo, hi = geometry
    if BY_POSITION and not C.packed:
        seen = (rows < q_len) & (cols < kv_len)
        if C.left:
            seen = seen & (cols - rows >= lo)
        if C.right:
            seen = seen & (cols - rows < hi)
    else:
        seen = cols < stop
        if C.left or C.packed:
            seen = seen & (cols >= start)
    if C.segments:
        seen = seen & (q_id == kv_id) & (q_id > 0)
    if C.mask:
        seen = seen & (allowed != 0)
    if C.bias:
        added = added.to(tl.float32)
        seen = seen & (added > float("-inf"))
        s = s + added * LOG2E
    return tl.where(seen, s, float("-inf")), seen


@triton.jit
def load_walk(walks, index, C: tl.constexpr):
    """The first position, and the masked, unmasked and masked steps from there."""
    walk = walks + index * 4
    begin = tl.load(walk)
    if C.mask or C.bias:
        # It is a multiple of 16 already; said so that rows of a mask or a bias are loaded in wide pieces.
        begin = begin // 16 * 16
    return begin, tl.load(walk + 1), tl.load(walk + 2), tl.load(walk + 3)


@triton.jit
def load_rows(
    base,
    first,
    keep,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A tile ``[ROWS, PADDED]`` from row ``first`` on; if ``MASKED``, rows that ``keep`` leaves out are 0."""
    dims = tl.arange(0, PADDED)
    pointers = base + first.to(tl.int64) * STRIDE + (tl.arange(0, ROWS)[:, None] * STRIDE + dims[None, :])
    if MASKED and PADDED > DIM:
        return tl.load(pointers, mask=keep[:, None] & (dims < DIM)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=keep[:, None], other=0.0)
    elif PADDED > DIM:
        return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(
    base, first, value, keep, STRIDE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr
):
    """The reverse of ``load_rows``, in the array's dtype."""
    dims = tl.arange(0, PADDED)
    pointers = base + first.to(tl.int64) * STRIDE + (tl.arange(0, ROWS)[:, None] * STRIDE + dims[None, :])
    tl.store(pointers, value.to(base.dtype.element_ty), mask=keep[:, None] & (dims < DIM)[None, :])


@triton.jit
def hidden_as_zero(x, seen, AXIS: tl.constexpr):
    """Rows of ``x`` that nothing along the axis of ``seen`` sees: they may be NaN, and 0 * NaN is not 0."""
    return tl.where((tl.max(seen.to(tl.int32), AXIS) > 0)[:, None], x, 0.0).to(x.dtype)


@triton.jit
def array_of(base, by_batch, by_head, row_stride, batch, head, UNIT: tl.constexpr):
    """Where a mask or a bias of one head begins, and the stride of its rows."""
    return base + (batch * by_batch + head.to(tl.int64) * by_head) * UNIT, row_stride * UNIT


@triton.jit
def keys_of(k, v, kv_ids, batch, k_head, kv_len, C: tl.constexpr):
    """The keys and values of one head, and what their ids are found by."""
    k += batch * kv_len * (C.k_heads * C.dim) + k_head * C.dim
    v += batch * kv_len * (C.k_heads * C.value_dim) + k_head * C.value_dim
    return k, v, kv_ids, batch


@triton.jit
def query_side(q, do, lse, slope, batch, head, first, rows, q_len, C: tl.constexpr):
    """What the backward knows of a block of queries: their tile, the output's cotangent, the statistics."""
    inside = rows < q_len
    q += batch * q_len * (C.heads * C.dim) + head * C.dim
    do += batch * q_len * (C.heads * C.value_dim) + head * C.value_dim
    at = (batch * C.heads + head) * q_len + rows
    q_tile = load_rows(q, first, inside, C.heads * C.dim, C.bm, C.dim, C.bd, True)
    do_tile = load_rows(do, first, inside, C.heads * C.value_dim, C.bm, C.value_dim, C.bv, True)
    return q_tile, do_tile, tl.load(lse + at, mask=inside, other=0.0), tl.load(slope + at, mask=inside, other=0.0)


@triton.jit
def forward_step(
    top, total, acc, q, first, keys, row_state, tiles, geometry, C: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """One block of keys: the statistics and the accumulator after it."""
    k, v, kv_ids, batch = keys
    first_row, rows, start, stop, least, most, q_id, row_key = row_state
    cols = first + tl.arange(0, C.bn)
    keep = (cols >= least) & (cols < most) if MASKED else cols
    k_tile = load_rows(k, first, keep, C.k_heads * C.dim, C.bn, C.dim, C.bd, MASKED)
    if MASKED:
        said = load_tiles(tiles, rows[:, None], cols[None, :], first_row, first, geometry, C)
    s = tl.dot(q, tl.trans(k_tile), input_precision=C.precision)
    v_tile = load_rows(v, first, keep, C.k_heads * C.value_dim, C.bn, C.value_dim, C.bv, MASKED)
    s, _ = shaped(s, C)
    if MASKED:
        ids = (q_id[:, None], ids_at(kv_ids, batch, cols, geometry[1], C)[None, :])
        ends = (start[:, None], stop[:, None])
        s, seen = masked(s, rows[:, None], cols[None, :], ends, ids, said, geometry, C, False)
        if C.hide_columns:
            v_tile = hidden_as_zero(v_tile, seen, 0)
    new_top = tl.maximum(top, tl.max(s, 1) * C.factor)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weights = tl.exp2(s * C.factor - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(weights, 1)
    if C.threshold > 0:
        weights = tl.where(kept(row_key[:, None], cols[None, :], C), weights, 0.0)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision=C.precision)
    return new_top, total, acc


@triton.jit
def forward(
    q, k, v, mask, bias, q_ids, kv_ids, starts, stops, seeds, walks, sinks,
    q_len, kv_len, lo, hi, blocks, walk_batch, packed_batch,
    mask_batch, mask_head, mask_row, bias_batch, bias_head, bias_row, sink_batch,
    out, lse,
    C: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one block of queries of one head."""
    program = tl.program_id(0)
    # The last blocks see the most keys under causality: they start first.
    block = blocks - 1 - program % blocks
    head = (program // blocks) % C.heads
    batch = (program // blocks // C.heads).to(tl.int64)
    geometry = (q_len, kv_len, lo, hi)
    q_first = block * C.bm
    rows = q_first + tl.arange(0, C.bm)
    start, stop = interval((starts, stops, packed_batch), batch, rows, geometry, C)
    q += batch * q_len * (C.heads * C.dim) + head * C.dim
    q_tile = load_rows(q, q_first, rows < q_len, C.heads * C.dim, C.bm, C.dim, C.bd, True)
    keys = keys_of(k, v, kv_ids, batch, head // C.group, kv_len, C)
    row_state = (
        q_first, rows, start, stop, tl.min(start, 0), tl.max(stop, 0),
        ids_at(q_ids, batch, rows, q_len, C), keys_at(seeds, batch, head, rows, C),
    )  # fmt: skip
    tiles = (
        array_of(mask, mask_batch, mask_head, mask_row, batch, head, C.mask_unit),
        array_of(bias, bias_batch, bias_head, bias_row, batch, head, C.bias_unit),
    )
    if C.sinks:
        top = tl.full([C.bm], 0.0, tl.float32) + tl.load(sinks + batch * sink_batch + head) * LOG2E
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    else:
        top = tl.full([C.bm], float("-inf"), tl.float32)
        total = tl.full([C.bm], 0.0, tl.float32)
    acc = tl.full([C.bm, C.bv], 0.0, tl.float32)
    begin, before, full, after = load_walk(walks, batch * walk_batch + block, C)
    if C.full:
        for t in tl.range(before, before + full):
            first = begin + t * C.bn
            top, total, acc = forward_step(top, total, acc, q_tile, first, keys, row_state, tiles, geometry, C, False)
    if C.partial:
        for t in tl.range(0, before + after):
            first = begin + tl.where(t < before, t, t + full) * C.bn
            top, total, acc = forward_step(top, total, acc, q_tile, first, keys, row_state, tiles, geometry, C, True)
    nothing = total == 0
    acc = acc * tl.where(nothing, 0.0, C.keep / tl.where(nothing, 1.0, total))[:, None]
    row_lse = tl.where(nothing, float("-inf"), (top + tl.log2(total)) * LN2)
    out += batch * q_len * (C.heads * C.value_dim) + head * C.value_dim
    store_rows(out, q_first, acc, rows < q_len, C.heads * C.value_dim, C.bm, C.value_dim, C.bv)
    tl.store(lse + (batch * C.heads + head) * q_len + rows, row_lse, mask=rows < q_len)


@triton.jit
def head_and_step(k_head, t, steps, C: tl.constexpr):
    """The query head and its step of a loop over all that share a key head."""
    if C.group == 1:
        return k_head, t
    else:
        return k_head * C.group + t // steps, t % steps


@triton.jit
def queries_of(refs, mask_of, bias_of, head, q_len, C: tl.constexpr):
    """What one query head has for a block of keys: its arrays, and its mask and bias."""
    q, do, lse, slope, q_ids, seeds, packing, batch = refs
    mask, mask_batch, mask_head, mask_row = mask_of
    bias, bias_batch, bias_head, bias_row = bias_of
    statistics = (batch * C.heads + head) * q_len
    queries = (
        q + batch * q_len * (C.heads * C.dim) + head * C.dim,
        do + batch * q_len * (C.heads * C.value_dim) + head * C.value_dim,
        lse + statistics, slope + statistics, q_ids, seeds, packing, batch, head,
    )  # fmt: skip
    tiles = (
        array_of(mask, mask_batch, mask_head, mask_row, batch, head, C.mask_unit),
        array_of(bias, bias_batch, bias_head, bias_row, batch, head, C.bias_unit),
    )
    return queries, tiles


@triton.jit
def keys_step(dk, dv, first, k_tile, v_tile, columns, queries, tiles, geometry, C: tl.constexpr, MASKED: tl.constexpr):
    """One block of queries: the gradients of a block of keys and values after it."""
    first_col, kv_id = columns
    q, do, lse, slope, q_ids, seeds, packing, batch, head = queries
    rows, cols = first + tl.arange(0, C.bm), first_col + tl.arange(0, C.bn)
    q_len = geometry[0]
    if MASKED:
        start, stop = interval(packing, batch, rows, geometry, C)
        # A row that sees nothing may hold NaN.
        keep = rows < q_len if C.packed else start < stop
    else:
        keep = rows
    q_tile = load_rows(q, first, keep, C.heads * C.dim, C.bm, C.dim, C.bd, MASKED)
    if MASKED:
        said = load_tiles(tiles, rows[None, :], cols[:, None], first, first_col, geometry, C)
    s = tl.dot(k_tile, tl.trans(q_tile), input_precision=C.precision)
    row_lse = tl.load(lse + rows, mask=rows < q_len, other=0.0) if MASKED else tl.load(lse + rows)
    do_tile = load_rows(do, first, keep, C.heads * C.value_dim, C.bm, C.value_dim, C.bv, MASKED)
    s, cap_slope = shaped(s, C)
    if MASKED:
        ids = (ids_at(q_ids, batch, rows, q_len, C)[None, :], kv_id[:, None])
        ends = (start[None, :], stop[None, :])
        s, seen = masked(s, rows[None, :], cols[:, None], ends, ids, said, geometry, C, True)
        if C.hide_rows:
            q_tile, do_tile = hidden_as_zero(q_tile, seen, 0), hidden_as_zero(do_tile, seen, 0)
    weights = tl.exp2(s * C.factor - row_lse[None, :])
    if C.threshold > 0:
        keeps = kept(row_keys(seeds, batch, head, rows)[None, :], cols[:, None], C)
    if C.dv:
        used = tl.where(keeps, weights, 0.0) if C.threshold > 0 else weights
        dv = tl.dot(used.to(do_tile.dtype), do_tile, dv, input_precision=C.precision)
    if C.dk:
        dweights = tl.dot(v_tile, tl.trans(do_tile), input_precision=C.precision)
        # Loaded late, for it fills registers.
        row_slope = tl.load(slope + rows, mask=rows < q_len, other=0.0) if MASKED else tl.load(slope + rows)
        if C.threshold > 0:
            dweights = tl.where(keeps, dweights * C.keep, 0.0)
        ds = weights * (dweights - row_slope[None, :])
        if C.cap > 0:
            ds = ds * cap_slope
        if MASKED:
            ds = tl.where(seen, ds, 0.0)
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=C.precision)
    return dk, dv


@triton.jit
def backward_keys(
    q, k, v, mask, bias, q_ids, kv_ids, starts, stops, seeds, walks, do, lse, slope,
    q_len, kv_len, lo, hi, blocks, walk_batch, packed_batch,
    mask_batch, mask_head, mask_row, bias_batch, bias_head, bias_row,
    dk, dv,
    C: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values of one key head, over all the query heads that share it."""
    program = tl.program_id(0)
    block = program % blocks
    k_head = (program // blocks) % C.k_heads
    batch = (program // blocks // C.k_heads).to(tl.int64)
    geometry = (q_len, kv_len, lo, hi)
    k_first = block * C.bn
    cols = k_first + tl.arange(0, C.bn)
    in_k = cols < kv_len
    k_base = batch * kv_len * (C.k_heads * C.dim) + k_head * C.dim
    v_base = batch * kv_len * (C.k_heads * C.value_dim) + k_head * C.value_dim
    k_tile = load_rows(k + k_base, k_first, in_k, C.k_heads * C.dim, C.bn, C.dim, C.bd, True)
    v_tile = load_rows(v + v_base, k_first, in_k, C.k_heads * C.value_dim, C.bn, C.value_dim, C.bv, True)
    columns = (k_first, ids_at(kv_ids, batch, cols, kv_len, C))
    begin, before, full, after = load_walk(walks, batch * walk_batch + block, C)
    # A gradient that is not wanted takes a tile of the smallest size along.
    dk_acc = tl.full([C.bn, C.bd] if C.dk else [16, 16], 0.0, tl.float32)
    dv_acc = tl.full([C.bn, C.bv] if C.dv else [16, 16], 0.0, tl.float32)
    refs = (q, do, lse, slope, q_ids, seeds, (starts, stops, packed_batch), batch)
    mask_of, bias_of = (mask, mask_batch, mask_head, mask_row), (bias, bias_batch, bias_head, bias_row)
    # One loop over the heads of a group and the steps of each, so that loads are under way across heads.
    if C.full:
        for t in tl.range(0, C.group * full):
            head, step = head_and_step(k_head, t, full, C)
            queries, tiles = queries_of(refs, mask_of, bias_of, head, q_len, C)
            first = begin + (before + step) * C.bm
            dk_acc, dv_acc = keys_step(
                dk_acc, dv_acc, first, k_tile, v_tile, columns, queries, tiles, geometry, C, False
            )
    if C.partial:
        for t in tl.range(0, C.group * (before + after)):
            head, step = head_and_step(k_head, t, before + after, C)
            queries, tiles = queries_of(refs, mask_of, bias_of, head, q_len, C)
            first = begin + tl.where(step < before, step, step + full) * C.bm
            dk_acc, dv_acc = keys_step(
                dk_acc, dv_acc, first, k_tile, v_tile, columns, queries, tiles, geometry, C, True
            )
    if C.dk:
        store_rows(dk + k_base, k_first, dk_acc * C.scale, in_k, C.k_heads * C.dim, C.bn, C.dim, C.bd)
    if C.dv:
        store_rows(dv + v_base, k_first, dv_acc * C.keep, in_k, C.k_heads * C.value_dim, C.bn, C.value_dim, C.bv)


@triton.jit
def logit_gradient(
    q_side, k_tile, v_tile, first, kv_ids, batch, row_state, tiles, geometry, C: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """What a tile's logits have as gradient before the cap, the cap's slope, and what is visible."""
    q_tile, do_tile, row_lse, row_slope = q_side
    first_row, rows, start, stop, _, _, q_id, row_key = row_state
    cols = first + tl.arange(0, C.bn)
    if MASKED:
        said = load_tiles(tiles, rows[:, None], cols[None, :], first_row, first, geometry, C)
    s, cap_slope = shaped(tl.dot(q_tile, tl.trans(k_tile), input_precision=C.precision), C)
    dweights = tl.dot(do_tile, tl.trans(v_tile), input_precision=C.precision)
    if MASKED:
        ids = (q_id[:, None], ids_at(kv_ids, batch, cols, geometry[1], C)[None, :])
        ends = (start[:, None], stop[:, None])
        s, seen = masked(s, rows[:, None], cols[None, :], ends, ids, said, geometry, C, False)
    else:
        seen = s
    weights = tl.exp2(s * C.factor - row_lse[:, None])
    if C.threshold > 0:
        dweights = tl.where(kept(row_key[:, None], cols[None, :], C), dweights * C.keep, 0.0)
    ds = weights * (dweights - row_slope[:, None])
    if MASKED:
        ds = tl.where(seen, ds, 0.0)
    return ds, cap_slope, seen


@triton.jit
def queries_step(dq, q_side, first, keys, row_state, tiles, geometry, C: tl.constexpr, MASKED: tl.constexpr):
    """One block of keys: the gradient of a block of queries after it."""
    k, v, kv_ids, batch = keys
    cols = first + tl.arange(0, C.bn)
    keep = (cols >= row_state[4]) & (cols < row_state[5]) if MASKED else cols
    k_tile = load_rows(k, first, keep, C.k_heads * C.dim, C.bn, C.dim, C.bd, MASKED)
    v_tile = load_rows(v, first, keep, C.k_heads * C.value_dim, C.bn, C.value_dim, C.bv, MASKED)
    ds, cap_slope, seen = logit_gradient(
        q_side, k_tile, v_tile, first, kv_ids, batch, row_state, tiles, geometry, C, MASKED
    )
    if C.cap > 0:
        ds = ds * cap_slope
    if MASKED and C.hide_columns:
        k_tile = hidden_as_zero(k_tile, seen, 0)
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=C.precision)


@triton.jit
def backward_queries(
    q, k, v, mask, bias, q_ids, kv_ids, starts, stops, seeds, walks, do, lse, slope,
    q_len, kv_len, lo, hi, blocks, walk_batch, packed_batch,
    mask_batch, mask_head, mask_row, bias_batch, bias_head, bias_row,
    dq,
    C: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of queries of one head."""
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks
    head = (program // blocks) % C.heads
    batch = (program // blocks // C.heads).to(tl.int64)
    geometry = (q_len, kv_len, lo, hi)
    q_first = block * C.bm
    rows = q_first + tl.arange(0, C.bm)
    in_q = rows < q_len
    start, stop = interval((starts, stops, packed_batch), batch, rows, geometry, C)
    q_base = batch * q_len * (C.heads * C.dim) + head * C.dim
    q_side = query_side(q, do, lse, slope, batch, head, q_first, rows, q_len, C)
    keys = keys_of(k, v, kv_ids, batch, head // C.group, kv_len, C)
    row_state = (
        q_first, rows, start, stop, tl.min(start, 0), tl.max(stop, 0),
        ids_at(q_ids, batch, rows, q_len, C), keys_at(seeds, batch, head, rows, C),
    )  # fmt: skip
    tiles = (
        array_of(mask, mask_batch, mask_head, mask_row, batch, head, C.mask_unit),
        array_of(bias, bias_batch, bias_head, bias_row, batch, head, C.bias_unit),
    )
    begin, before, full, after = load_walk(walks, batch * walk_batch + block, C)
    acc = tl.full([C.bm, C.bd], 0.0, tl.float32)
    if C.full:
        for t in tl.range(before, before + full):
            acc = queries_step(acc, q_side, begin + t * C.bn, keys, row_state, tiles, geometry, C, False)
    if C.partial:
        for t in tl.range(0, before + after):
            first = begin + tl.where(t < before, t, t + full) * C.bn
            acc = queries_step(acc, q_side, first, keys, row_state, tiles, geometry, C, True)
    store_rows(dq + q_base, q_first, acc * C.scale, in_q, C.heads * C.dim, C.bm, C.dim, C.bd)


@triton.jit
def backward_bias(
    q, k, v, mask, bias, q_ids, kv_ids, starts, stops, seeds, do, lse, slope,
    q_len, kv_len, lo, hi, packed_batch,
    mask_batch, mask_head, mask_row, bias_batch, bias_head, bias_row,
    batches_each, heads_each, q_blocks, q_each, k_blocks, k_each,
    dbias,
    C: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of the bias: a program takes every batch entry, head and block that shares it, in order.

    ``q_blocks`` and ``k_blocks`` count what the bias has of each, ``*_each`` how many of the logits' share one.
    """
    program = tl.program_id(0)
    k_place = program % k_blocks
    q_place = (program // k_blocks) % q_blocks
    bias_heads = C.heads // heads_each
    head_place = (program // k_blocks // q_blocks) % bias_heads
    batch_place = program // k_blocks // q_blocks // bias_heads
    geometry = (q_len, kv_len, lo, hi)
    total = tl.full([C.bm, C.bn], 0.0, tl.float32)
    for step in range(batches_each * heads_each * q_each * k_each):
        first = (k_place * k_each + step % k_each) * C.bn
        q_first = (q_place * q_each + (step // k_each) % q_each) * C.bm
        head = head_place * heads_each + (step // k_each // q_each) % heads_each
        batch = (batch_place * batches_each + step // k_each // q_each // heads_each).to(tl.int64)
        rows, cols = q_first + tl.arange(0, C.bm), first + tl.arange(0, C.bn)
        start, stop = interval((starts, stops, packed_batch), batch, rows, geometry, C)
        least, most = tl.min(start, 0), tl.max(stop, 0)
        if (first < most) & (first + C.bn > least):
            k_at, v_at, _, _ = keys_of(k, v, kv_ids, batch, head // C.group, kv_len, C)
            row_state = (
                q_first, rows, start, stop, least, most,
                ids_at(q_ids, batch, rows, q_len, C), keys_at(seeds, batch, head, rows, C),
            )  # fmt: skip
            tiles = (
                array_of(mask, mask_batch, mask_head, mask_row, batch, head, C.mask_unit),
                array_of(bias, bias_batch, bias_head, bias_row, batch, head, C.bias_unit),
            )
            ds, _, _ = logit_gradient(
                query_side(q, do, lse, slope, batch, head, q_first, rows, q_len, C),
                load_rows(k_at, first, cols < kv_len, C.k_heads * C.dim, C.bn, C.dim, C.bd, True),
                load_rows(v_at, first, cols < kv_len, C.k_heads * C.value_dim, C.bn, C.value_dim, C.bv, True),
                first, kv_ids, batch, row_state, tiles, geometry, C, True,
            )  # fmt: skip
            total += ds
    rows, cols = q_place * C.bm + tl.arange(0, C.bm), k_place * C.bn + tl.arange(0, C.bn)
    at, row_stride = array_of(dbias, bias_batch, bias_head, bias_row, batch_place.to(tl.int64), head_place, C.bias_unit)
    kind: tl.constexpr = dbias.dtype.element_ty
    if C.bias_q and C.bias_k:
        inside = (rows < q_len)[:, None] & (cols < kv_len)[None, :]
        tl.store(at + rows[:, None].to(tl.int64) * row_stride + cols[None, :], total.to(kind), mask=inside)
    elif C.bias_q:
        tl.store(at + rows.to(tl.int64) * row_stride, tl.sum(total, 1).to(kind), mask=rows < q_len)
    elif C.bias_k:
        tl.store(at + cols, tl.sum(total, 0).to(kind), mask=cols < kv_len)
    else:
        tl.store(at, tl.sum(tl.sum(total, 1), 0).to(kind))
