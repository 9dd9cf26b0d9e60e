"""Recurrent layers on the device: all steps of one direction in a launch.

A program owns ``units`` hidden units of ``rows`` sequences and keeps their states in registers. What all programs of these
sequences need from each other, hidden states forward and gradients of gates backward, goes through an array in global
memory with two halves: a step reads one and writes the other, and then the programs wait for each other once.

Arrays of a step have the shape ``[units, rows]``, and the product is that of a program's rows of the weights with the
transposed states: so the weights, which stay where they are, are the left operand.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

# Ints between counters of two barriers, which are in cache lines of their own.
APART = tl.constexpr(32)
# Looks at a counter before a launch is given up: some ten seconds.
MOST_LOOKS = tl.constexpr(1 << 24)


@dataclass(frozen=True)
class RecurrentConstants:
    """What a kernel is compiled for; no length of the call but the sizes of a layer.

    ``planes`` of gates, of which the product with the state gives or takes ``state_planes``. ``unit``: what the hidden size
    is counted in; the compiler must know of 16 to load wide. ``hidden``: the padded size.
    ``units``, ``rows``: of a program. ``parts``: how many parts the sum of a product has, each some warps' own; ``chunk``:
    numbers of each part that are multiplied at a time, ``chunks``: how often.
    ``resident``: whether weights are loaded once. ``stages``: of the loads of a product.
    ``barrier``: ``ptx``, ``atomics``, or ``none`` where a program is alone.
    """

    cell: str
    relu: bool
    planes: int
    state_planes: int
    unit: int
    hidden: int
    units: int
    rows: int
    parts: int
    halves: tuple
    chunk: int
    chunks: int
    resident: bool
    stages: int
    lengths: bool
    from_end: bool
    barrier: str
    precision: str


@triton.jit
def tanh(x):
    """Of float32, through an exponential that may overflow."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def arrive(counter, C: tl.constexpr):
    """Say that everything this program has written can be read."""
    if C.barrier == "ptx":
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred first;
                .reg .u32 thread;
                bar.sync 0;
                mov.u32 thread, %tid.x;
                setp.eq.u32 first, thread, 0;
                @first red.release.gpu.global.add.u32 [$1], 1;
                mov.u32 $0, 0;
            }
            """,
            "=r,l,~{memory}",
            [counter],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    elif C.barrier == "atomics":
        # AMD's barrier orders the local memory alone, and the release waits for the stores of its own wave.
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)", "=v,s,~{memory}", [counter], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
        tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait(counter, arrivals, C: tl.constexpr):
    """Wait until so many programs have arrived. A barrier that nobody reaches is an error after ``MOST_LOOKS``, not a hang."""
    if C.barrier == "ptx":
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred other, early, given_up;
                .reg .u32 thread, looks, seen;
                mov.u32 thread, %tid.x;
                setp.ne.u32 other, thread, 0;
                mov.u32 looks, 0;
                @other bra ARRIVED;
            LOOK:
                ld.acquire.gpu.global.u32 seen, [$1];
                setp.ge.u32 early, seen, $2;
                @early bra ARRIVED;
                add.u32 looks, looks, 1;
                setp.gt.u32 given_up, looks, $3;
                @given_up trap;
                bra LOOK;
            ARRIVED:
                bar.sync 0;
                mov.u32 $0, 0;
            }
            """,
            "=r,l,r,r,~{memory}",
            [counter, arrivals, MOST_LOOKS],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    elif C.barrier == "atomics":
        looks = 0
        while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < arrivals:
            looks += 1
            if looks > MOST_LOOKS:
                tl.inline_asm_elementwise("s_trap 2", "=v,v", [looks], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()


@triton.jit
def weight_tile(weights, chunk, C: tl.constexpr, HEIGHT: tl.constexpr):
    """``[HEIGHT, chunk]``, or with parts ``[parts, HEIGHT, chunk]``."""
    row, k = tl.arange(0, HEIGHT), tl.arange(0, C.chunk)
    inner: tl.constexpr = C.parts * C.chunks * C.chunk
    if C.parts == 1:
        return tl.load(weights + chunk * C.chunk + row[:, None] * inner + k[None, :])
    else:
        part = tl.arange(0, C.parts) * (C.chunks * C.chunk)
        at = weights + chunk * C.chunk
        return tl.load(at + part[:, None, None] + row[None, :, None] * inner + k[None, None, :])


@triton.jit
def shared_tile(shared, chunk, C: tl.constexpr):
    """What others wrote: ``[chunk, rows]``, or with parts ``[parts, chunk, rows]``. Never from the first-level cache."""
    row, k = tl.arange(0, C.rows), tl.arange(0, C.chunk)
    inner: tl.constexpr = C.parts * C.chunks * C.chunk
    if C.parts == 1:
        return tl.load(shared + chunk * C.chunk + k[:, None] + row[None, :] * inner, cache_modifier=".cg")
    else:
        part = tl.arange(0, C.parts) * (C.chunks * C.chunk)
        at = shared + chunk * C.chunk
        return tl.load(at + part[:, None, None] + k[None, :, None] + row[None, None, :] * inner, cache_modifier=".cg")


@triton.jit
def resident_tiles(weights, C: tl.constexpr, HEIGHT: tl.constexpr):
    """A program's weights, loaded once; none if they are loaded in every step."""
    chunks: tl.constexpr = C.chunks
    tiles = ()
    if C.resident:
        for chunk in tl.static_range(chunks):
            tiles += (weight_tile(weights, chunk, C, HEIGHT),)
    return tiles


@triton.jit
def arrived(tile, C: tl.constexpr):
    """The same tile, not to be stored for the tensor cores before here: by then the loads of others are under way too."""
    if C.barrier == "ptx" and tile.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2)
    else:
        return tile


@triton.jit
def product(tiles, weights, shared, C: tl.constexpr, HEIGHT: tl.constexpr):
    """``[HEIGHT, rows]``: the program's weights times the transpose of what is shared."""
    if C.parts == 1:
        acc = tl.full([HEIGHT, C.rows], 0.0, tl.float32)
    else:
        acc = tl.full([C.parts, HEIGHT, C.rows], 0.0, tl.float32)
    chunks: tl.constexpr = C.chunks
    stages: tl.constexpr = C.stages
    if C.resident:
        under_way = ()
        for chunk in tl.static_range(stages):
            under_way += (shared_tile(shared, chunk, C),)
        for chunk in tl.static_range(chunks):
            acc = tl.dot(tiles[chunk], arrived(under_way[chunk], C), acc, input_precision=C.precision)
            if chunk + stages < chunks:
                under_way += (shared_tile(shared, chunk + stages, C),)
    else:
        for chunk in tl.range(0, chunks, num_stages=stages):
            left, right = weight_tile(weights, chunk, C, HEIGHT), shared_tile(shared, chunk, C)
            acc = tl.dot(left, right, acc, input_precision=C.precision)
    if C.parts > 1:
        # Halves are added until one part is left: a sum over warps by ``tl.sum`` would leave every warp with all of it.
        acc = tl.reshape(tl.permute(acc, (1, 2, 0)), (HEIGHT, C.rows) + C.halves)  # noqa: RUF005
        levels: tl.constexpr = len(C.halves)
        for _ in tl.static_range(levels):
            left, right = tl.split(acc)
            acc = left + right
    return acc


@triton.jit
def split_planes(x, C: tl.constexpr):
    """The four planes of ``[4 * units, rows]``."""
    pairs = tl.permute(tl.reshape(x, (2, 2, C.units, C.rows)), (2, 3, 1, 0))
    low, high = tl.split(pairs)
    first, second = tl.split(low)
    third, fourth = tl.split(high)
    return first, second, third, fourth


@triton.jit
def position(step, steps, BACKWARDS: tl.constexpr):
    """The position in time that a step treats."""
    if BACKWARDS:
        return steps - 1 - step
    else:
        return step


@triton.jit
def place(size, batch, tile, slice, C: tl.constexpr):
    """Of a program's states: offsets of its units, its rows, which of both there are, and where they lie in what is shared."""
    unit = slice * C.units + tl.arange(0, C.units)
    row = tile * C.rows + tl.arange(0, C.rows)
    inside = (unit < size)[:, None] & (row < batch)[None, :]
    return unit[:, None], row.to(tl.int64)[None, :], inside


@triton.jit
def gates_at(gates, at, size, inside, C: tl.constexpr):
    """The planes of a step, as many as there are and zeros for the others."""
    first = tl.load(gates + at, mask=inside, other=0.0).to(tl.float32)
    second, third, fourth = first, first, first
    if C.planes > 1:
        second = tl.load(gates + at + size, mask=inside, other=0.0).to(tl.float32)
        third = tl.load(gates + at + 2 * size, mask=inside, other=0.0).to(tl.float32)
    if C.planes > 3:
        fourth = tl.load(gates + at + 3 * size, mask=inside, other=0.0).to(tl.float32)
    return first, second, third, fourth


@triton.jit
def new_state(z, x, bias, h, c, C: tl.constexpr):
    """Hidden state and cell after a step, from the product with the state and the gates that the inputs gave."""
    if C.cell == "rnn":
        z += x[0]
        h = tl.maximum(z, 0.0) if C.relu else tanh(z)
    else:
        first, second, third, fourth = split_planes(z, C)
        if C.cell == "lstm":
            c = tl.sigmoid(second + x[1]) * c + tl.sigmoid(first + x[0]) * tanh(third + x[2])
            h = tl.sigmoid(fourth + x[3]) * tanh(c)
        else:
            n = tanh(x[2] + tl.sigmoid(first + x[0]) * (third + bias))
            h = n + tl.sigmoid(second + x[1]) * (h - n)
    return h, c


@triton.jit
def forward_steps(
    gates, weights, start_h, start_c, bias, lengths, counters, steps, batch, units, slices, groups,
    shared, outputs, cells, final_h, final_c, C: tl.constexpr,
):  # fmt: skip
    """All steps of a direction. ``gates`` ``[B, S, planes·H]`` are what the inputs give; ``shared`` is ``[2, rows, hidden]``.

    A group of ``slices`` programs has the rows of a tile, and then those of the tile ``groups`` further on.
    """
    size = units * C.unit
    HEIGHT: tl.constexpr = (4 if C.planes > 1 else 1) * C.units
    slice, group = tl.program_id(0) % slices, tl.program_id(0) // slices
    weights += slice * HEIGHT * C.hidden
    tiles = resident_tiles(weights, C, HEIGHT)
    count = tl.cdiv(batch, C.rows)
    half = count.to(tl.int64) * C.rows * C.hidden
    own_bias = 0.0
    if C.cell == "gru":
        unit = slice * C.units + tl.arange(0, C.units)[:, None]
        own_bias = tl.load(bias + unit, mask=unit < size, other=0.0)
    # A loop that the compiler neither pipelines, for its loads must stay behind the barrier, nor moves the weights into.
    tile = group
    while tile < count:
        unit, row, inside = place(size, batch, tile, slice, C)
        counter = counters + tile * APART
        h = tl.load(start_h + row * size + unit, mask=inside, other=0.0)
        c = h
        if C.cell == "lstm":
            c = tl.load(start_c + row * size + unit, mask=inside, other=0.0)
        length = tl.full([1, C.rows], 0, tl.int32) + steps
        if C.lengths:
            length = tl.load(lengths + row, mask=row < batch, other=0)
        mine = shared + row * C.hidden + unit
        everyones = shared + tile.to(tl.int64) * C.rows * C.hidden
        tl.store(mine, h.to(shared.dtype.element_ty))
        arrive(counter, C)
        t = position(0, steps, C.from_end)
        x = gates_at(gates, (row * steps + t) * (C.planes * size) + unit, size, inside, C)
        wait(counter, slices, C)
        step = 0
        while step < steps:
            z = product(tiles, weights, everyones + (step % 2) * half, C, HEIGHT)
            new_h, new_c = new_state(z, x, own_bias, h, c, C)
            alive = t < length
            shown = new_h
            if C.lengths:
                shown = tl.where(alive, new_h, 0.0)
                new_h = tl.where(alive, new_h, h)
                new_c = tl.where(alive, new_c, c)
            h, c = new_h, new_c
            tl.store(mine + (1 - step % 2) * half, h.to(shared.dtype.element_ty))
            arrive(counter, C)
            # What nobody waits for is done while others arrive.
            at = (row * steps + t) * size + unit
            tl.store(outputs + at, shown.to(outputs.dtype.element_ty), mask=inside)
            if C.cell == "lstm":
                tl.store(cells + at, c, mask=inside)
            step += 1
            t = position(tl.minimum(step, steps - 1), steps, C.from_end)
            x = gates_at(gates, (row * steps + t) * (C.planes * size) + unit, size, inside, C)
            wait(counter, (step + 1) * slices, C)
        tl.store(final_h + row * size + unit, h.to(final_h.dtype.element_ty), mask=inside)
        if C.cell == "lstm":
            tl.store(final_c + row * size + unit, c.to(final_c.dtype.element_ty), mask=inside)
        tile += groups


@triton.jit
def before_step(gates, douts, before, cells, first_c, row, unit, inside, t, steps, size, C: tl.constexpr):
    """What a step's gradients need: gates, cotangents of the output, and the states that it started from."""
    at = (row * steps + t) * size + unit
    x = gates_at(gates, (row * steps + t) * (C.planes * size) + unit, size, inside, C)
    dout = tl.load(douts + at, mask=inside, other=0.0).to(tl.float32)
    h, c = dout, dout
    if C.cell == "gru":
        h = tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
    if C.cell == "lstm":
        earlier: tl.constexpr = 1 if C.from_end else -1
        first = t == position(0, steps, C.from_end)
        # Of the first step it is its own cell that is read, and not used.
        kept = tl.load(cells + at + tl.where(first, 0, earlier * size), mask=inside, other=0.0)
        c = tl.where(first, first_c, kept)
    return x, dout, h, c


@triton.jit
def gate_gradients(x, dh, dc, h, c, C: tl.constexpr):
    """The gradients of the planes, and of the state before the step without what goes through the planes.

    ``h`` and ``c``: from before the step.
    """
    if C.cell == "lstm":
        i, f, g, o = tl.sigmoid(x[0]), tl.sigmoid(x[1]), tanh(x[2]), tl.sigmoid(x[3])
        shown = tanh(f * c + i * g)
        dc += dh * o * (1 - shown * shown)
        first, second = dc * g * i * (1 - i), dc * c * f * (1 - f)
        third, fourth = dc * i * (1 - g * g), dh * shown * o * (1 - o)
        return first, second, third, fourth, 0.0 * dh, dc * f
    elif C.cell == "gru":
        r, z = tl.sigmoid(x[0]), tl.sigmoid(x[1])
        n = tanh(x[3] + r * x[2])
        fourth = dh * (1 - z) * (1 - n * n)
        return fourth * x[2] * r * (1 - r), dh * (h - n) * z * (1 - z), fourth * r, fourth, dh * z, dc
    else:
        if C.relu:
            first = tl.where(x[0] > 0, dh, 0.0)
        else:
            y = tanh(x[0])
            first = dh * (1 - y * y)
        return first, first, first, first, 0.0 * dh, dc


@triton.jit
def backward_steps(
    gates, weights, before, start_c, cells, douts, final_dh, final_dc, lengths, counters,
    steps, batch, units, slices, groups, shared, dgates, start_dh, start_dc, C: tl.constexpr,
):  # fmt: skip
    """All steps of a direction, last to first. ``gates`` and ``dgates`` are ``[B, S, planes·H]``, ``before`` the hidden states
    that steps started from, ``shared`` ``[2, rows, state_planes · hidden]``.
    """
    size = units * C.unit
    INNER: tl.constexpr = C.state_planes * C.hidden
    slice, group = tl.program_id(0) % slices, tl.program_id(0) // slices
    weights += slice * C.units * INNER
    tiles = resident_tiles(weights, C, C.units)
    count = tl.cdiv(batch, C.rows)
    half = count.to(tl.int64) * C.rows * INNER
    tile = group
    while tile < count:
        unit, row, inside = place(size, batch, tile, slice, C)
        counter = counters + tile * APART
        dh = tl.load(final_dh + row * size + unit, mask=inside, other=0.0)
        dc, first_c = dh, dh
        if C.cell == "lstm":
            dc = tl.load(final_dc + row * size + unit, mask=inside, other=0.0)
            first_c = tl.load(start_c + row * size + unit, mask=inside, other=0.0)
        length = tl.full([1, C.rows], 0, tl.int32) + steps
        if C.lengths:
            length = tl.load(lengths + row, mask=row < batch, other=0)
        mine = shared + row * INNER + unit
        everyones = shared + tile.to(tl.int64) * C.rows * INNER
        step = 0
        t = position(step, steps, not C.from_end)
        x, dout, h, c = before_step(gates, douts, before, cells, first_c, row, unit, inside, t, steps, size, C)
        while step < steps:
            alive = t < length
            if C.lengths:
                dout = tl.where(alive, dout, 0.0)
            first, second, third, fourth, rest, new_dc = gate_gradients(x, dh + dout, dc, h, c, C)
            if C.lengths:
                first, second = tl.where(alive, first, 0.0), tl.where(alive, second, 0.0)
                third, fourth = tl.where(alive, third, 0.0), tl.where(alive, fourth, 0.0)
                new_dc = tl.where(alive, new_dc, dc)
            dc = new_dc
            first, second = first.to(dgates.dtype.element_ty), second.to(dgates.dtype.element_ty)
            third, fourth = third.to(dgates.dtype.element_ty), fourth.to(dgates.dtype.element_ty)
            now = mine + (step % 2) * half
            tl.store(now, first)
            if C.state_planes > 1:
                tl.store(now + C.hidden, second)
                tl.store(now + 2 * C.hidden, third)
            if C.state_planes > 3:
                tl.store(now + 3 * C.hidden, fourth)
            arrive(counter, C)
            # What nobody waits for is done while others arrive.
            own = dgates + (row * steps + t) * (C.planes * size) + unit
            tl.store(own, first, mask=inside)
            if C.planes > 1:
                tl.store(own + size, second, mask=inside)
                tl.store(own + 2 * size, third, mask=inside)
                tl.store(own + 3 * size, fourth, mask=inside)
            theirs = everyones + (step % 2) * half
            step += 1
            t = position(tl.minimum(step, steps - 1), steps, not C.from_end)
            x, dout, h, c = before_step(gates, douts, before, cells, first_c, row, unit, inside, t, steps, size, C)
            wait(counter, step * slices, C)
            new_dh = rest + product(tiles, weights, theirs, C, C.units)
            dh = tl.where(alive, new_dh, dh) if C.lengths else new_dh
        tl.store(start_dh + row * size + unit, dh, mask=inside)
        if C.cell == "lstm":
            tl.store(start_dc + row * size + unit, dc, mask=inside)
        tile += groups


@triton.jit
def forward_steps_again(
    gates, weights, start_h, start_c, bias, lengths, counters_before, steps, batch, units, slices, groups,
    counters, shared, outputs, cells, final_h, final_c, C: tl.constexpr,
):  # fmt: skip
    """The same where a launch passes an array that is changed in place twice, before the scalars and after them."""
    forward_steps(
        gates, weights, start_h, start_c, bias, lengths, counters, steps, batch, units, slices, groups,
        shared, outputs, cells, final_h, final_c, C,
    )  # fmt: skip


@triton.jit
def backward_steps_again(
    gates, weights, before, start_c, cells, douts, final_dh, final_dc, lengths, counters_before,
    steps, batch, units, slices, groups, counters, shared, dgates, start_dh, start_dc, C: tl.constexpr,
):  # fmt: skip
    """The same where a launch passes an array that is changed in place twice, before the scalars and after them."""
    backward_steps(
        gates, weights, before, start_c, cells, douts, final_dh, final_dc, lengths, counters,
        steps, batch, units, slices, groups, shared, dgates, start_dh, start_dc, C,
    )  # fmt: skip
