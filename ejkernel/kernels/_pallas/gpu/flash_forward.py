"""The forward kernel: a producer feeds keys and values through shared memory, two or three warpgroups compute.

A program computes a block of queries of one head; each computing warpgroup owns 64 of its rows. The producer, a warp, walks
the keys that the block needs and copies them by TMA into a ring of ``stages`` slots. A consumer is half a step ahead of
itself, and a slot holds what it needs at once, a step's keys and the values of the one before:

    start S = Q·Kᵀ of this step, start O += P·V of the step before
    wait for S; P = softmax(S) in registers, while P·V runs
    wait for O; scale it where the softmax moved its reference

Every barrier has one meaning. ``ready``: a slot holds its keys and values. ``k_free`` and ``v_free``: all consumers have read
those. ``q_ready``: a consumer's queries are there. ``q_free``: it has read them. ``turn``: a consumer may start its products;
two that take turns do their softmax at different times, so that the tensor cores always have work. ``loaded``: values are
there of which some are padding, for the producer, which puts zeros in their place.

A program that ``persists`` computes one block after another, whichever is next when it is done: the producer is ahead with
the next block's queries and keys while consumers end the last. Which one is next is in ``Shared.item``, in turns in one of two.

A ``hopeful`` block keeps the reference of its first steps and takes no more maxima. A consumer whose sums then grew too large
says so in ``Shared.verdict`` before it arrives at ``q_free``; the producer then sends the same keys again instead of the next
block's, and all consumers compute it once more, with a reference that follows.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_plan import LOG2E, TILE_ROWS, Call
from ejkernel.kernels._pallas.gpu.terms import (
    BY_ROW,
    ROWS,
    WHOLE,
    by_rows,
    clear_rows,
    complain,
    cut,
    modulo,
    put,
    scaled,
    settled,
    start_mixed,
    start_scores,
    summed_by_threads,
    take_item,
    transforms,
    zero,
)
from ejkernel.kernels.common.varying import vary_as, varying_axes

# Where the reference starts. Finite, so that a row without a visible key meets no inf - inf.
LOWEST = -1e30
# A row's weights are 2**(logit - reference). The reference cancels in the output and the lse, so any will do that keeps
# weights in range: it follows the maximum only when that is more than this above. Then weights are at most 2**8, far under
# float16's 65504, and at least one was 1 when the reference was taken; sums are in float32. Most steps scale nothing.
GROWTH = 8.0
# A hopeful block takes no maxima after its first steps: weights are in range anyway, unless logits grow by tens. Beyond this
# sum it was too hopeful. Far from float32's 2**128, so that weights times values are in range as well.
LIMIT = 2.0**64
# Programs that persist, at most: the multiprocessors of the largest Hopper. On a smaller one some start late and find nothing left.
PROGRAMS = 132
# By consumers. Four warpgroups of 128 threads share 65536 registers.
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}
PRODUCER_REGISTERS = {1: 24, 2: 24, 3: 32}


@dataclass(frozen=True, kw_only=True)
class Forward(Call):
    """Everything static about a forward.

    Attributes:
        consumers: computing warpgroups of a program, each with 64 queries.
        step: keys of one step of the walk, a multiple of 16.
        stages: slots of the ring, two at least: a consumer waits for the next keys before it frees the last values.
        turn: whether consumers start their products in turns.
        sinks: whether there are any.
        persists: whether programs compute one block after another.
        hopeful: whether a block is computed with the reference of its first step, and once more, with one that follows, if a
            sum of weights exceeds ``LIMIT``. Only programs that persist are.
        clears: whether the producer puts zeros where values are padding: their weights are 0, but 0 times NaN is not.
        warps: whether the producer is a warp, or a warpgroup.
        head, full, tail: whether any walk has masked steps at first, unmasked ones, masked ones at last.

    The interpreter knows nothing of Mosaic GPU's own terms: products then wait at once, and P goes through shared memory.
    """

    consumers: int
    step: int
    stages: int
    turn: bool
    sinks: bool
    persists: bool
    head: bool
    full: bool
    tail: bool
    hopeful: bool = False
    clears: bool = False
    warps: bool = True

    @property
    def factor(self) -> float:
        """What is missing from ``_logits``, with log2(e). It is positive and keeps their order, so it may wait for the maximum."""
        return (self.cap or max(self.scale, 0.0) or 1.0) * LOG2E


class Shared(NamedTuple):
    """Shared memory and barriers of a program; unless it persists, the output takes the queries' place where it fits."""

    q: Any
    k: Any
    v: Any
    out: Any
    p: Any
    item: Any
    verdict: Any
    q_ready: Any
    q_free: Any
    ready: Any
    k_free: Any
    v_free: Any
    turn: Any
    loaded: Any


class Walk:
    """A block to compute. Counts are read where they are used: over a loop they would take registers."""

    def __init__(self, c: Forward, ref, item=None, batches: int = 1):
        if item is None:
            self.batch, self.head, place = (lax.axis_index(name) for name in ("batch", "head", "block"))
        else:
            place, self.batch = _divided(item, batches)
            self.head, place = _divided(place, ref.shape[1])
        self._ref, self._where = ref, (self.batch if ref.shape[0] > 1 else 0, place)
        self._ever = c.head, c.full, c.tail
        self.begin, self.block = self._read(0), self._read(4)

    def _read(self, i: int):
        return self._ref[(*self._where, i)]

    def before(self, part: int):
        """Steps before the ``part``-th of: masked ones, unmasked ones, masked ones. What never happens is a constant."""
        return sum((self._read(1 + i) for i in range(part) if self._ever[i]), jnp.int32(0))


def _divided(x, by: int):
    return lax.div(x, jnp.int32(by)), lax.rem(x, jnp.int32(by))


def call(c: Forward, query, key, value, walks, optional: dict[str, Any], *, interpret: Any = False):
    """The output ``[B, Sq, H, Dv]``, and the lse ``[B, H, blocks · rows]`` of all rows that the blocks have.

    ``walks``: see ``longest_first``; no block has fewer than one step.
    """
    # A kernel for warps cannot be traced where ``shard_map`` checks over which axes values vary, and blocks are taken by a warp.
    warps = not c.interpreted and not varying_axes(query, key, value)
    persists = c.persists and (warps or c.interpreted)
    c = dataclasses.replace(c, warps=warps, persists=persists, hopeful=c.hopeful and persists)
    batch, q_len, heads, _ = query.shape
    blocks = walks.shape[1]
    items = heads * blocks * batch
    names = tuple(optional)
    inputs = 4 + len(names)

    def entry(*refs):
        q_ref, k_ref, v_ref, walks_ref, *more = refs[:inputs]
        out_ref, lse_ref, *scratch = refs[inputs:]
        shared = Shared(*scratch)
        work = Work(c, shared, q_ref, k_ref, v_ref, walks_ref, dict(zip(names, more, strict=True)), out_ref, lse_ref)
        warpgroup = lax.axis_index("warpgroup")
        counter = pl.get_global(plgpu.SemaphoreType.REGULAR) if c.persists and not c.interpreted else None

        @pl.when(warpgroup == c.consumers)
        def _():
            plgpu.set_max_registers(PRODUCER_REGISTERS[c.consumers], action="decrease")
            # Before jax 0.11 a warp does not know the grid.
            walk = None if c.persists else Walk(c, walks_ref)

            def produce():
                if c.persists:
                    _produce_all(work, items, counter)
                else:
                    _drain(work, _produce(work, walk, jnp.int32(0)))

            if c.warps:
                mesh = plgpu.WarpMesh(axis_name="warp")
                pl.kernel(lambda: pl.when(lax.axis_index("warp") == 0)(produce), mesh=mesh)()
            else:
                produce()

        @pl.when(warpgroup < c.consumers)
        def _():
            plgpu.set_max_registers(CONSUMER_REGISTERS[c.consumers], action="increase")
            if c.turn:
                pl.when(warpgroup == c.consumers - 1)(lambda: plgpu.barrier_arrive(shared.turn.at[0]))
            if c.persists:
                _consume_all(work, warpgroup, items)
            else:
                walk = Walk(c, walks_ref)
                _load_queries(work, walk, warpgroup)
                plgpu.barrier_wait(shared.q_ready.at[warpgroup])
                _consume(work, walk, warpgroup, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)
            if c.turn:
                pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(shared.turn.at[0]))  # the turn that nobody took

    run = plgpu.kernel(
        entry,
        out_type=(
            jax.ShapeDtypeStruct((batch, q_len, heads, c.value_dim), query.dtype),
            jax.ShapeDtypeStruct((batch, heads, blocks * c.consumers * ROWS), jnp.float32),
        ),
        scratch_types=list(_shared(c, query.dtype)),
        **_grid(c, heads, blocks, batch),
        num_threads=c.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({"interpret": interpret} if interpret else {}),
    )
    return vary_as(run(query, key, value, walks, *optional.values()), query)


def _grid(c: Forward, heads: int, blocks: int, batch: int) -> dict[str, Any]:
    """The last axis is the fastest: blocks of a head, which read the same keys, are computed at the same time."""
    if c.persists:
        return {"grid": (min(PROGRAMS, heads * blocks * batch),), "grid_names": ("program",)}
    return {"grid": (heads, blocks, batch), "grid_names": ("head", "block", "batch")}


def _shared(c: Forward, dtype) -> Shared:
    def tile(*shape):
        return plgpu.SMEM(shape, dtype, transforms=transforms(shape[-1]))

    freed = plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages)
    one_each = plgpu.Barrier(num_arrivals=1, num_barriers=c.consumers)
    return Shared(
        q=tile(c.consumers, ROWS, c.dim),
        k=tile(c.stages, c.step, c.dim),
        v=tile(c.stages, c.step, c.value_dim),
        out=tile(c.consumers, ROWS, c.value_dim) if c.persists or c.value_dim != c.dim else None,
        p=tile(c.consumers, ROWS, c.step) if c.interpreted else None,
        item=plgpu.SMEM((2, 1), jnp.int32) if c.persists else None,
        verdict=plgpu.SMEM((2 * c.consumers, 1), jnp.int32) if c.hopeful else None,
        q_ready=one_each,
        q_free=one_each if c.persists else None,
        ready=plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
        k_free=freed,
        v_free=freed,
        turn=one_each if c.turn else None,
        loaded=plgpu.Barrier(num_arrivals=1) if c.clears else None,
    )


class Work(NamedTuple):
    """What a program works with."""

    c: Forward
    shared: Shared
    q_ref: Any
    k_ref: Any
    v_ref: Any
    walks_ref: Any
    optional: dict[str, Any]
    out_ref: Any
    lse_ref: Any

    def walk(self, item) -> Walk:
        return Walk(self.c, self.walks_ref, item, self.q_ref.shape[0])

    def slot(self, i):
        return modulo(i, self.c.stages)


def _load_queries(w: Work, walk: Walk, warpgroup):
    rows = pl.ds((walk.block * w.c.consumers + warpgroup) * ROWS, ROWS)
    source = w.q_ref.at[walk.batch, rows, walk.head]
    plgpu.copy_gmem_to_smem(source, w.shared.q.at[warpgroup], w.shared.q_ready.at[warpgroup])


def _produce_all(w: Work, items: int, counter):
    c, shared = w.c, w.shared

    def each(act):
        for i in range(c.consumers):
            act(i)

    def one(carry):
        item, unit, done, flip = carry
        walk = w.walk(item)
        each(lambda i: _load_queries(w, walk, i))
        done = _produce(w, walk, done)
        # All consumers have read what was there: they are through with the queries before these.
        upcoming = take_item(c, counter, shared.item.at[1 - flip], item)
        each(lambda i: plgpu.barrier_wait(shared.q_free.at[i]))
        if c.hopeful:
            again = _again(w, unit)

            @pl.when(again)
            def _():
                each(lambda i: plgpu.barrier_arrive(shared.q_ready.at[i]))
                _produce(w, walk, done)
                each(lambda i: plgpu.barrier_wait(shared.q_free.at[i]))

            again = again.astype(jnp.int32)
            done, unit = done + again * (walk.before(3) + 1), unit + again
        return upcoming, unit + 1, done, 1 - flip

    if c.hopeful:
        for i in range(2 * c.consumers):
            put(c, shared.verdict.at[i], -1)
    item = take_item(c, counter, shared.item.at[0], None)
    none = jnp.int32(0)
    _, _, done, _ = lax.while_loop(lambda carry: carry[0] < items, one, (item, none, none, none))
    each(lambda i: plgpu.barrier_arrive(shared.q_ready.at[i]))
    _drain(w, done)


def _again(w: Work, unit):
    """Whether a consumer was not content with the ``unit``-th block that the program computed."""
    first = modulo(unit, 2) * w.c.consumers
    return functools.reduce(jnp.logical_or, [w.shared.verdict[first + i, 0] == unit for i in range(w.c.consumers)])


def _produce(w: Work, walk: Walk, done):
    """Copies a block's keys and values; ``done``: how many slots were filled, before and after."""
    c, shared = w.c, w.shared
    kv_head = lax.div(walk.head, jnp.int32(c.group))
    steps = walk.before(3)

    def of_batch(name):
        ref = w.optional[name]
        return ref.at[walk.batch if ref.shape[0] > 1 else 0]

    def load(i, wait):
        slot = w.slot(done + i)
        keys = w.k_ref, shared.k, shared.k_free, i
        values = w.v_ref, shared.v, shared.v_free, i - 1
        if c.clears:
            # Read before a wait, not after it.
            eighth = lax.div(jnp.maximum(walk.begin + (i - 1) * c.step, 0), jnp.int32(TILE_ROWS))
            padded = of_batch("padded")[eighth] > 0
        for source, target, free, step in (keys, values):
            if wait:
                plgpu.barrier_wait(free.at[slot])
            some = (step >= 0) & (step < steps)

            @pl.when(some)
            def _(source=source, target=target, step=step):
                rows = pl.ds(walk.begin + step * c.step, c.step)

                def copy(barrier):
                    plgpu.copy_gmem_to_smem(source.at[walk.batch, rows, kv_head], target.at[slot], barrier)

                if source is not w.v_ref or not c.clears:
                    copy(shared.ready.at[slot])
                    return
                pl.when(~padded)(lambda: copy(shared.ready.at[slot]))

                @pl.when(padded)
                def _some_are_padding():
                    copy(shared.loaded)
                    plgpu.barrier_wait(shared.loaded)
                    clear_rows(c, target.at[slot], of_batch("padding").at[rows])
                    plgpu.barrier_arrive(shared.ready.at[slot])

            @pl.when(~some)
            def _():
                plgpu.barrier_arrive(shared.ready.at[slot])

    def first(i, _):
        load(i, wait=False)

    def later(i, _):
        load(i, wait=True)

    head_start = jnp.clip(c.stages - done, 0, steps + 1)
    lax.fori_loop(0, head_start, first, None)
    lax.fori_loop(head_start, steps + 1, later, None)
    return done + steps + 1


def _drain(w: Work, done):
    """Every slot is waited for as often as it was filled, so that no program ends with barriers in flight."""

    def drain(i, _):
        plgpu.barrier_wait(w.shared.k_free.at[w.slot(i)])
        plgpu.barrier_wait(w.shared.v_free.at[w.slot(i)])

    lax.fori_loop(done - jnp.minimum(done, w.c.stages), done, drain, None)


def _consume_all(w: Work, warpgroup, items: int):
    c = w.c

    def arrived():
        plgpu.barrier_wait(w.shared.q_ready.at[warpgroup])

    def one(carry):
        item, unit, done, flip = carry
        walk = w.walk(item)
        done = _consume(w, walk, warpgroup, done, unit if c.hopeful else None)
        arrived()
        if c.hopeful:
            again = _again(w, unit)

            @pl.when(again)
            def _():
                _consume(w, walk, warpgroup, done)
                arrived()

            again = again.astype(jnp.int32)
            done, unit = w.slot(done + again * (walk.before(3) + 1)), unit + again
        return w.shared.item[1 - flip, 0], unit + 1, done, 1 - flip

    arrived()
    none = jnp.int32(0)
    lax.while_loop(lambda carry: carry[0] < items, one, (w.shared.item[0, 0], none, none, none))


def _consume(w: Work, walk: Walk, warpgroup, done, unit=None):
    """Computes a block; ``done``: in which slot of the ring it begins, and the next one does.

    With a ``unit`` it is hopeful, and says so under that number if it should not have been.
    """
    c, shared, optional, out_ref, lse_ref = w.c, w.shared, w.optional, w.out_ref, w.lse_ref
    batch, head = walk.batch, walk.head
    row0 = (walk.block * c.consumers + warpgroup) * ROWS
    q = shared.q.at[warpgroup]
    p_smem = shared.p.at[warpgroup] if c.interpreted else None
    other = lax.rem(warpgroup + 1, jnp.int32(c.consumers))

    def slot(i):
        return w.slot(done + i)

    # The far end of a static mask is known for every row: each warpgroup has its own, and leaves out what only others see.
    own_end = c.tail and c.right is not None and not (c.packed or c.segments)

    def before(part):
        if not own_end or part < 2 or (part == 2 and not c.full):
            return walk.before(part)
        row = row0 if part == 2 else row0 + (ROWS - 1)
        keys = jnp.maximum(jnp.minimum(row + c.right, c.kv_len) - walk.begin, 0)
        steps = lax.div(keys if part == 2 else keys + (c.step - 1), jnp.int32(c.step))
        least = walk.before(1) if part == 2 else jnp.maximum(walk.before(1), 1)
        return jnp.clip(steps, least, walk.before(3))

    steps = before(3)

    def my_turn():
        if c.turn:
            plgpu.barrier_wait(shared.turn.at[warpgroup])

    def your_turn():
        if c.turn:
            plgpu.barrier_arrive(shared.turn.at[other])

    def next_pair(i):
        """Wait for the next step's keys and this one's values.

        It stands between the exponentials and the wait for P·V: ptxas moves that wait to the front of its block of
        instructions, and would have the exponentials wait too, were there no branch between.
        """
        plgpu.barrier_wait(shared.ready.at[slot(i + 1)])

    def summed(p):
        return summed_by_threads(c, p) if c.hopeful else by_rows(c, p, "add")

    def softmax(s, i, top, total, masked: bool, begun: bool = False):
        """Weights of a step, their sum so far, and the reference with the factor by which it changes earlier terms, if it moves.

        A row that has seen nothing keeps ``LOWEST``: its logits are -inf, which is not above, and its weights 0. Its
        first visible key takes the reference from there, and what was summed before, zeros, is multiplied by 0.
        """
        s = _logits(c, s)
        if masked:
            s = _masked(c, s, optional, batch, row0, walk.begin + i * c.step, begun)
        moved = ()
        if unit is None or not begun:
            high = by_rows(c, s, "max") * c.factor
            new_top = jnp.where(high > top + GROWTH, high, top)
            decay = jnp.exp2(top - new_top)
            total, top = total * (lax.broadcast_in_dim(decay, total.shape, [0]) if c.hopeful else decay), new_top
            moved = top, decay
        p = jnp.exp2(s * c.factor - lax.broadcast_in_dim(top, s.shape, [0]))
        return p, total + summed(p), moved

    def step(i, carry, masked: bool, begun: bool):
        acc, top, total, p16 = carry
        now = slot(i)
        my_turn()
        s = start_scores(c, q, shared.k.at[now])
        acc = start_mixed(c, acc, p16, shared.v.at[now], p_smem)
        your_turn()
        (s,) = settled(c, 1, s)
        plgpu.barrier_arrive(shared.k_free.at[now])
        p, total, moved = lax.optimization_barrier(softmax(s, i, top, total, masked, begun))
        next_pair(i)
        acc, p = settled(c, 0, acc, p)
        plgpu.barrier_arrive(shared.v_free.at[now])
        if moved:
            top, decay = moved
            acc = scaled(c, acc, decay)
        return acc, top, total, p.astype(shared.v.dtype)

    top = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), BY_ROW)
    # The sums of a hopeful block are a thread's own, and added up at the end.
    if c.hopeful:
        total = plgpu.layout_cast(jnp.zeros((ROWS, 8), jnp.float32), plgpu.Layout.WGMMA)
    else:
        total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), BY_ROW)
    acc = plgpu.layout_cast(jnp.zeros((ROWS, c.value_dim), jnp.float32), plgpu.Layout.WGMMA)

    # The first step has no product before it, the last none after it.
    plgpu.barrier_wait(shared.ready.at[slot(0)])
    my_turn()
    s = start_scores(c, q, shared.k.at[slot(0)])
    your_turn()
    (s,) = settled(c, 0, s)
    for free in (shared.k_free, shared.v_free):
        plgpu.barrier_arrive(free.at[slot(0)])
    p, total, (top, _) = softmax(s, jnp.int32(0), top, total, masked=c.head or c.tail)
    next_pair(0)
    carry = acc, top, total, p.astype(shared.v.dtype)
    # Where all rows have begun is the walk's first unmasked step, or would be: its last ones are masked at the other end.
    parts = (True, False, c.head), (False, True, c.full), (True, True, c.tail)
    for part, (masked, begun, ever) in enumerate(parts):
        if ever:
            body = functools.partial(step, masked=masked, begun=begun)
            carry = lax.fori_loop(jnp.maximum(before(part), 1), before(part + 1), body, carry)
    acc, top, total, p16 = carry
    if unit is not None:
        complain(c, shared.verdict.at[modulo(unit, 2) * c.consumers + warpgroup], total, LIMIT, unit)
    if c.persists:
        plgpu.barrier_arrive(shared.q_free.at[warpgroup])
    (acc,) = settled(c, 0, start_mixed(c, acc, p16, shared.v.at[slot(steps)], p_smem))
    for free in (shared.k_free, shared.v_free):
        plgpu.barrier_arrive(free.at[slot(steps)])

    def skip(i, _):
        my_turn()
        your_turn()
        plgpu.barrier_wait(shared.ready.at[slot(i)])
        for free in (shared.k_free, shared.v_free):
            plgpu.barrier_arrive(free.at[slot(i)])

    if own_end:
        lax.fori_loop(steps + 1, walk.before(3) + 1, skip, None)
    if c.hopeful:
        total = by_rows(c, total, "add")
    if c.sinks:
        # A sink may be far above the reference: here it becomes the maximum.
        sinks = optional["sinks"]
        sink = sinks[batch if sinks.shape[0] > 1 else 0, head] * LOG2E
        new_top = jnp.maximum(top, sink)
        decay = jnp.exp2(top - new_top)
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
        total, top = total * decay + jnp.exp2(sink - new_top), new_top
    # An address that is used at the end alone is computed there, from a number that the compiler does not have before.
    row0 = row0 + zero(steps)
    some = total != 0  # or NaN, which stays
    inverse = jnp.where(some, 1.0 / total, 0.0)
    lse_ref.at[batch, head, pl.ds(row0, ROWS)][...] = jnp.where(some, top * (1 / LOG2E) + jnp.log(total), -jnp.inf)
    target = (shared.q if shared.out is None else shared.out).at[warpgroup]
    if c.persists:
        # What is computed again is not overtaken by what was there before.
        plgpu.wait_smem_to_gmem(0, wait_read_only=unit is not None or not c.hopeful)
    # Beside a NaN that other rows see, a row that sees nothing has 0 · NaN.
    acc = acc * lax.broadcast_in_dim(inverse, acc.shape, [0])
    target[...] = jnp.where(lax.broadcast_in_dim(some, acc.shape, [0]), acc, 0.0).astype(target.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(target, out_ref.at[batch, pl.ds(row0, ROWS), head])
    return w.slot(done + walk.before(3) + 1)


def _logits(c: Forward, s):
    """Logits, but for ``c.factor``."""
    if c.cap:
        return jnp.tanh(s * (c.scale / c.cap))
    return s if c.scale > 0 else s * c.scale


def _masked(c: Forward, s, optional, batch, row0, column0, begun: bool):
    """``s`` with -inf where a row does not see a key. A row sees ``[start, stop)``, counted from the step's first key.

    ``begun``: no row has a start after the step's first key.
    """

    def part(name, start, size):
        ref = optional[name]
        return ref.at[batch if ref.shape[0] > 1 else 0, pl.ds(start, size)]

    def of_rows(name):
        return plgpu.load(part(name, row0, ROWS), *WHOLE, layout=BY_ROW, optimized=False)

    start = ids = None
    if c.packed:
        stop = of_rows("stop") - column0
        if not begun:
            start = of_rows("start") - column0
    else:
        row = row0 - column0 + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_ROW)
        # Where there are segments, keys past the last have none.
        end = c.step if c.segments else c.kv_len - column0
        stop = plgpu.layout_cast(jnp.full((ROWS,), end, jnp.int32), BY_ROW)
        if c.right is not None:
            stop = row + c.right if c.segments else jnp.minimum(stop, row + c.right)
        if c.left is not None and not begun:
            start = row + c.left
    if c.segments:
        mine = of_rows("q_ids")
        stop = jnp.where(mine > 0, stop, 0)
        ids = mine, part("kv_ids", column0, c.step)
    return cut(c, s, stop, start, ids)
