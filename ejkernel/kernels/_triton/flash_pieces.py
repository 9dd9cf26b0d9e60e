"""What the kernels of flash attention on the device share: what they are compiled for, loads, masks, dropout.

Helpers take positions that are already expanded, so they serve tiles ``[queries, keys]`` and transposed ones alike. Shaped
logits are in units of log 2, for ``exp2`` is what the hardware has. ``C`` holds all that is known when a kernel is compiled
(``Constants``); where it says that the call does without a feature, the feature's pointer is never read.

Offsets that grow with a tensor are 64-bit scalars, offsets within a tile 32-bit.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from ejkernel.kernels.common import softmax

LOG2E = tl.constexpr(softmax.LOG2E)
LN2 = tl.constexpr(1 / softmax.LOG2E)


@dataclass(frozen=True)
class Constants:
    """What a kernel is compiled for. No length is among them, so that one kernel serves all lengths.

    ``bm`` queries, ``bn`` keys, ``bd`` and ``bv`` padded head dims make a tile. ``factor`` is what shaped logits are still to
    be multiplied by: the scale, where nothing stands between it and the exponential, else 1. ``mask_q`` and the like tell
    whether an array has that dimension or is shared along it; strides of mask and bias come in units of ``mask_unit`` and
    ``bias_unit``, so that the compiler knows of rows that are aligned. ``full`` and ``partial`` tell whether any step is unmasked or
    masked, ``threshold`` is dropout's smallest hash kept (0: no dropout) and ``keep`` the factor of what it keeps. ``dk`` and
    ``dv`` tell ``backward_keys`` which of its two gradients to compute. ``q_size`` and ``kv_size`` are the sides of a mask's
    blocks where lists of these take the place of walks, else 0; ``own_lists``: each query head has lists of its own.
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
    q_size: int = 0
    kv_size: int = 0
    own_lists: bool = False

    @property
    def k_heads(self) -> int:
        return self.heads // self.group

    @property
    def rounds(self) -> int:
        """How often a block of keys goes through its steps: a list of its own names the heads of a group itself."""
        return 1 if self.own_lists else self.group

    @property
    def cut_rows(self) -> bool:
        """Whether a mask's blocks of queries end within a tile."""
        return self.q_size % self.bm != 0

    @property
    def cut_columns(self) -> bool:
        """Whether a mask's blocks of keys end within a tile."""
        return self.kv_size % self.bn != 0

    @property
    def hide_columns(self) -> bool:
        """Whether masked steps zero the keys that no row sees. With a mask or a bias every step is masked, and the caller
        has seen to it once.
        """
        return (self.packed or self.segments) and not (self.mask or self.bias)

    @property
    def hide_rows(self) -> bool:
        """Whether rows that see nothing are told only by looking: without sinks their log-sum-exp does."""
        return self.sinks and (self.packed or self.segments or self.mask or self.bias or self.q_size > 0)


@triton.jit
def fold(x):
    """A part of the hash of ``kernels/common/dropout.py``, and so are the next three."""
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
    _, kv_len, lo, hi, q_end, _ = geometry
    inside = rows < q_end
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
    q_len, kv_len, _, _, _, _ = geometry
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
    _, _, lo, hi, q_end, kv_end = geometry
    if BY_POSITION and not C.packed:
        seen = (rows < q_end) & (cols < kv_end)
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
def tile_at(tile, length, SIZE: tl.constexpr, SIDE: tl.constexpr):
    """Where a tile begins and where it ends at the latest; tiles never reach from one block of a mask into the next."""
    if SIZE == 0:
        return tile * SIDE, length
    elif SIZE % SIDE == 0:
        return tile * SIDE, length
    else:
        parts: tl.constexpr = (SIZE + SIDE - 1) // SIDE
        first = tile // parts * SIZE + tile % parts * SIDE
        return first, tl.minimum(block_end(first, SIZE), length)


@triton.jit
def block_end(first, SIZE: tl.constexpr):
    """Where the mask's block ends that a position lies in."""
    return first // SIZE * SIZE + SIZE


@triton.jit
def walk_of(tile, first, head, length, SIZE: tl.constexpr, C: tl.constexpr):
    """Which of a batch entry's walks is a tile's: its own, or the list of its block."""
    if SIZE == 0:
        return tile
    elif C.own_lists:
        return head * tl.cdiv(length, SIZE) + first // SIZE
    else:
        return first // SIZE


@triton.jit
def entry_at(walks, begin, step, SIZE: tl.constexpr, SIDE: tl.constexpr):
    """What a list names for a step; without lists nothing is read.

    Loops load it a step ahead. Where the address of a tile came from a load of the same step, the compiler would wait for
    all copies that are under way.
    """
    if SIZE == 0:
        return begin
    else:
        return tl.load(walks + begin + step // ((SIZE + SIDE - 1) // SIDE))


@triton.jit
def step_at(begin, entry, step, SIZE: tl.constexpr, SIDE: tl.constexpr):
    """Where a step begins: so far into a walk, or in the block that a list names."""
    if SIZE == 0:
        return begin + step * SIDE
    else:
        return entry * SIZE + step % ((SIZE + SIDE - 1) // SIDE) * SIDE


@triton.jit
def load_walk(walks, index, C: tl.constexpr):
    """The first position, and the masked, unmasked and masked steps from there; of a list: where it lies in ``walks``."""
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
    return load_tile(pointers, keep, DIM, PADDED, MASKED)


@triton.jit
def load_tile(pointers, keep, DIM: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """What pointers ``[rows, PADDED]`` point to, 0 from ``DIM`` on; if ``MASKED``, in rows that ``keep`` leaves out too."""
    dims = tl.arange(0, PADDED)
    if MASKED and PADDED > DIM:
        return tl.load(pointers, mask=keep[:, None] & (dims < DIM)[None, :], other=0)
    elif MASKED:
        return tl.load(pointers, mask=keep[:, None], other=0)
    elif PADDED > DIM:
        return tl.load(pointers, mask=(dims < DIM)[None, :], other=0)
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
