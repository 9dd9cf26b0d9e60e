"""Flash attention on the device: a forward, and three backward kernels.

Tiles of logits are ``[queries, keys]`` in every kernel but ``backward_keys``, where they are transposed.

A *walk* is planned for each block by ``visibility.py``: the first position, then how many masked, unmasked and masked
steps follow each other. Unmasked steps test nothing. A *step* takes one block of the other side. For block-sparse
attention a list takes the place of a walk: first the blocks that need no mask, then the others. What steps share is
passed in tuples: ``geometry`` (both lengths, what turns a row into the first key it sees and the first it does not, and
where rows and keys end that belong to the tile),
``row_state`` (a block of queries: where it begins, positions, intervals and their hull, segments, dropout's keys), ``tiles``
(mask and bias of a head), ``keys``, ``queries``.
"""

import triton
import triton.language as tl

from ejkernel.kernels._triton.flash_pieces import (
    LN2,
    LOG2E,
    array_of,
    block_end,
    entry_at,
    hidden_as_zero,
    ids_at,
    interval,
    kept,
    keys_at,
    keys_of,
    load_rows,
    load_tiles,
    load_walk,
    masked,
    query_side,
    row_keys,
    shaped,
    step_at,
    store_rows,
    tile_at,
    walk_of,
)


@triton.jit
def forward_step(
    top, total, acc, q, first, keys, row_state, tiles, geometry, C: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """One block of keys: the statistics and the accumulator after it."""
    k, v, kv_ids, batch = keys
    first_row, rows, start, stop, least, most, q_id, row_key = row_state
    cols = first + tl.arange(0, C.bn)
    if C.cut_columns:
        most = tl.minimum(most, block_end(first, C.kv_size))
        stop = tl.minimum(stop, most)
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
    q_first, q_end = tile_at(block, q_len, C.q_size, C.bm)
    geometry = (q_len, kv_len, lo, hi, q_end, kv_len)
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
    walk = walk_of(block, q_first, head, q_len, C.q_size, C)
    begin, before, full, after = load_walk(walks, batch * walk_batch + walk, C)
    if C.full:
        entry = entry_at(walks, begin, before, C.kv_size, C.bn)
        for t in tl.range(before, before + full):
            first = step_at(begin, entry, t, C.kv_size, C.bn)
            if C.kv_size > 0:
                entry = entry_at(walks, begin, t + 1, C.kv_size, C.bn)
            top, total, acc = forward_step(top, total, acc, q_tile, first, keys, row_state, tiles, geometry, C, False)
    if C.partial:
        entry = entry_at(walks, begin, full, C.kv_size, C.bn)
        for t in tl.range(0, before + after):
            first = step_at(begin, entry, tl.where(t < before, t, t + full), C.kv_size, C.bn)
            if C.kv_size > 0:
                entry = entry_at(walks, begin, t + full + 1, C.kv_size, C.bn)
            top, total, acc = forward_step(top, total, acc, q_tile, first, keys, row_state, tiles, geometry, C, True)
    nothing = total == 0
    acc = acc * tl.where(nothing, 0.0, C.keep / tl.where(nothing, 1.0, total))[:, None]
    row_lse = tl.where(nothing, float("-inf"), (top + tl.log2(total)) * LN2)
    out += batch * q_len * (C.heads * C.value_dim) + head * C.value_dim
    store_rows(out, q_first, acc, rows < q_end, C.heads * C.value_dim, C.bm, C.value_dim, C.bv)
    tl.store(lse + (batch * C.heads + head) * q_len + rows, row_lse, mask=rows < q_end)


@triton.jit
def head_and_step(k_head, t, steps, C: tl.constexpr):
    """The query head and its step of a loop over all that share a key head; of lists of their own, the first of the heads."""
    if C.group == 1:
        return k_head, t
    elif C.own_lists:
        return k_head * C.group, t
    else:
        return k_head * C.group + t // steps, t % steps


@triton.jit
def head_and_block(head, entry, q_len, C: tl.constexpr):
    """What an entry says: the query head and the block of queries. Lists of their own count through the heads of a group."""
    if C.own_lists:
        blocks = tl.cdiv(q_len, C.q_size)
        return head + entry // blocks, entry % blocks
    else:
        return head, entry


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
    q_len, kv_len, lo, hi, _, kv_end = geometry
    if C.cut_rows:
        geometry = (q_len, kv_len, lo, hi, tl.minimum(block_end(first, C.q_size), q_len), kv_end)
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
    k_first, kv_end = tile_at(block, kv_len, C.kv_size, C.bn)
    geometry = (q_len, kv_len, lo, hi, q_len, kv_end)
    cols = k_first + tl.arange(0, C.bn)
    in_k = cols < kv_end
    k_base = batch * kv_len * (C.k_heads * C.dim) + k_head * C.dim
    v_base = batch * kv_len * (C.k_heads * C.value_dim) + k_head * C.value_dim
    k_tile = load_rows(k + k_base, k_first, in_k, C.k_heads * C.dim, C.bn, C.dim, C.bd, True)
    v_tile = load_rows(v + v_base, k_first, in_k, C.k_heads * C.value_dim, C.bn, C.value_dim, C.bv, True)
    columns = (k_first, ids_at(kv_ids, batch, cols, kv_len, C))
    walk = walk_of(block, k_first, k_head, kv_len, C.kv_size, C)
    begin, before, full, after = load_walk(walks, batch * walk_batch + walk, C)
    # A gradient that is not wanted takes a tile of the smallest size along.
    dk_acc = tl.full([C.bn, C.bd] if C.dk else [16, 16], 0.0, tl.float32)
    dv_acc = tl.full([C.bn, C.bv] if C.dv else [16, 16], 0.0, tl.float32)
    refs = (q, do, lse, slope, q_ids, seeds, (starts, stops, packed_batch), batch)
    mask_of, bias_of = (mask, mask_batch, mask_head, mask_row), (bias, bias_batch, bias_head, bias_row)
    # One loop over the heads of a group and the steps of each, so that loads are under way across heads.
    if C.full:
        entry = entry_at(walks, begin, before, C.q_size, C.bm)
        for t in tl.range(0, C.rounds * full):
            head, step = head_and_step(k_head, t, full, C)
            head, listed = head_and_block(head, entry, q_len, C)
            queries, tiles = queries_of(refs, mask_of, bias_of, head, q_len, C)
            first = step_at(begin, listed, before + step, C.q_size, C.bm)
            if C.q_size > 0:
                entry = entry_at(walks, begin, head_and_step(k_head, t + 1, full, C)[1], C.q_size, C.bm)
            dk_acc, dv_acc = keys_step(
                dk_acc, dv_acc, first, k_tile, v_tile, columns, queries, tiles, geometry, C, False
            )
    if C.partial:
        entry = entry_at(walks, begin, full, C.q_size, C.bm)
        for t in tl.range(0, C.rounds * (before + after)):
            head, step = head_and_step(k_head, t, before + after, C)
            head, listed = head_and_block(head, entry, q_len, C)
            queries, tiles = queries_of(refs, mask_of, bias_of, head, q_len, C)
            first = step_at(begin, listed, tl.where(step < before, step, step + full), C.q_size, C.bm)
            if C.q_size > 0:
                entry = entry_at(walks, begin, full + head_and_step(k_head, t + 1, after, C)[1], C.q_size, C.bm)
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
    if C.cut_columns:
        stop = tl.minimum(stop, block_end(first, C.kv_size))
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
    least, most = row_state[4], row_state[5]
    if C.cut_columns:
        most = tl.minimum(most, block_end(first, C.kv_size))
    keep = (cols >= least) & (cols < most) if MASKED else cols
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
    q_first, q_end = tile_at(block, q_len, C.q_size, C.bm)
    geometry = (q_len, kv_len, lo, hi, q_end, kv_len)
    rows = q_first + tl.arange(0, C.bm)
    in_q = rows < q_end
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
    walk = walk_of(block, q_first, head, q_len, C.q_size, C)
    begin, before, full, after = load_walk(walks, batch * walk_batch + walk, C)
    acc = tl.full([C.bm, C.bd], 0.0, tl.float32)
    if C.full:
        entry = entry_at(walks, begin, before, C.kv_size, C.bn)
        for t in tl.range(before, before + full):
            first = step_at(begin, entry, t, C.kv_size, C.bn)
            if C.kv_size > 0:
                entry = entry_at(walks, begin, t + 1, C.kv_size, C.bn)
            acc = queries_step(acc, q_side, first, keys, row_state, tiles, geometry, C, False)
    if C.partial:
        entry = entry_at(walks, begin, full, C.kv_size, C.bn)
        for t in tl.range(0, before + after):
            first = step_at(begin, entry, tl.where(t < before, t, t + full), C.kv_size, C.bn)
            if C.kv_size > 0:
                entry = entry_at(walks, begin, t + full + 1, C.kv_size, C.bn)
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
    geometry = (q_len, kv_len, lo, hi, q_len, kv_len)
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
