"""The backward kernel: all three gradients in one pass over the pairs, five products a pair of blocks.

A program owns a block of keys; each computing warpgroup owns 64 of them and keeps their dK and dV in registers. The
producer walks the queries that see the block and copies Q and dO by TMA into a ring. Scores are held transposed, keys by
queries, so that P and dS are left operands in registers where keys are summed into:

    Sᵀ = K·Qᵀ    dPᵀ = V·dOᵀ - slope    P = exp2(S - lse)    dV += Pᵀ·dO    dS = P dP    dK += dSᵀ·Q    dQ = dS·K

Only dQ sums over keys of both warpgroups, so dS also goes through shared memory, one step behind: the product for the step
before runs while the other warpgroup may still be at this one. Writers, warps of their own, add dQ's blocks to float32 in
global memory by TMA. Programs add to a block of queries in the order in which they start, each waiting for a counter
of that block, so that a rerun gives the same bits; the first to come stores, and nothing must be zeroed before.

Every barrier has one meaning. ``kv_ready``: the program's keys and values are there. ``ready``: a slot of the ring holds its
queries. ``free``: all consumers have read those. ``ds_ready``: a slot of dS is complete. ``dq_ready``: dQ is there for its
writer. ``dq_free``: the writer has read it.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_plan import LOG2E, SIDE, Call
from ejkernel.kernels._pallas.gpu.terms import WHOLE, branch, modulo, put_square, zero
from ejkernel.kernels.common.varying import vary_as, varying_axes

SERVICE_REGISTERS = 24
# What weights, which are at most 1, are multiplied by as float16: the least with all its digits is then 2**-29, not 2**-14.
HALVES = 2.0**15


@dataclass(frozen=True, kw_only=True)
class Backward(Call):
    """Everything static about a backward.

    Attributes:
        consumers: computing warpgroups of a program, each with 64 keys.
        step: queries of one step of the walk.
        stages: slots of the ring.
        head, tail: whether any walk has masked steps at first, at last.
        upward: whether queries are walked from the first, and the last keys start; or the other way round.
        round: blocks of keys that start in reverse before those that follow, see ``started``.
        warps: whether producer and writers are warps of one warpgroup; JAX knows that not in its interpreter, and not
            where arrays vary over a mesh (``jax.shard_map``). Else they are warpgroups.

    The interpreter knows no sums in global memory: every program then has a dQ of its own.
    """

    consumers: int
    step: int
    stages: int
    head: bool
    tail: bool
    upward: bool
    round: int = 1
    warps: bool = True

    @property
    def masked(self) -> bool:
        return self.head or self.tail

    @property
    def apart(self) -> bool:
        """Whether masked and unmasked steps have loops of their own. With a cap at 64, registers are too short for that."""
        return not (self.cap and self.dim == SIDE)

    @property
    def writers(self) -> int:
        """How many write dQ, in turns: of warps a second costs nothing, a second warpgroup would cost registers."""
        return 2 if self.warps or self.interpreted else 1

    @property
    def eager(self) -> bool:
        """Whether dS and dQ are published as soon as they are there; or else both by one fence, when the next scores are on their way.

        Measured: at 64 and a hidden future the first is faster by 4 %, at 128 the other one by 1 to 5 %.
        """
        return self.dim == SIDE

    @property
    def slots(self) -> int:
        """Of dS: one is written and one read. If it is published at once, one may still be read by a warpgroup that is behind."""
        return 3 if self.eager else 2

    @property
    def buffers(self) -> int:
        """Of dQ: one for each writer where slots leave room."""
        return 1 if self.eager else self.writers

    @property
    def registers(self) -> int:
        """Of a thread that computes: what the other warpgroups leave."""
        return 240 if self.warps else 232

    @property
    def by_rows(self) -> bool:
        """Whether a warpgroup computes 64 rows of dQ, or else 64 of its columns: a square either way."""
        return self.step == SIDE * self.consumers


def call(
    c: Backward, query, key, value, dout, rows, walks, visitors, optional: dict[str, Any], *, interpret: Any = False
):
    """``dQ`` in float32, without the scale, ``dK`` and ``dV``.

    ``rows``: ``[B, H, 2, Sq]``, minus the lse in base 2, -inf where a row sees nothing, and minus the slope; ``walks``:
    ``[B|1, blocks of keys, 4]``; ``visitors``: for each step of queries the first and the last block of keys that visit it,
    ``[B|1, steps, 2]``. Steps are whole: begins are multiples of them.
    """
    batch, q_len, heads, _ = query.shape
    kv_heads, blocks = key.shape[2], walks.shape[1]
    warps = not c.interpreted and not varying_axes(query, key, value, dout)
    c = dataclasses.replace(c, warps=warps, round=_round(c, blocks))
    if c.masked:
        optional = {**optional, "places": jnp.asarray(np.arange(max(SIDE, c.step), dtype=np.int32)[None])}
    names = tuple(optional)
    inputs = 7 + len(names)

    def entry(*refs):
        _program(c, refs[:7], dict(zip(names, refs[7:inputs], strict=True)), *refs[inputs:])

    together = _together(c, batch * kv_heads, q_len * c.group * (4 * c.dim + 2 * c.dim + 2 * c.value_dim))
    dq_shape = (batch, q_len, heads, c.dim)
    run = plgpu.kernel(
        entry,
        out_type=(
            jax.ShapeDtypeStruct((blocks, *dq_shape) if c.interpreted else dq_shape, jnp.float32),
            jax.ShapeDtypeStruct(key.shape, key.dtype),
            jax.ShapeDtypeStruct(value.shape, value.dtype),
        ),
        scratch_types=_scratch(c, query.dtype),
        # The last is the fastest: blocks of keys start in order, each after all that it may wait for.
        grid=(batch * kv_heads // together, blocks, together),
        grid_names=("chains", "block", "chain"),
        num_threads=c.consumers + (1 if c.warps else 1 + c.writers),
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({"interpret": interpret} if interpret else {}),
    )
    return vary_as(run(query, key, value, dout, rows, walks, visitors, *optional.values()), query)


def _scratch(c: Backward, dtype) -> list[Any]:
    def tile(*shape, dtype=dtype):
        width = 128 // jnp.dtype(dtype).itemsize
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)))

    return [
        tile(c.consumers, c.dim // SIDE, SIDE, SIDE),  # K in squares: read by rows of keys and by columns
        tile(c.consumers, SIDE, c.value_dim),
        tile(c.stages, c.step, c.dim),
        tile(c.stages, c.step, c.value_dim),
        tile(c.slots, c.consumers, c.step // SIDE, SIDE, SIDE),
        tile(c.buffers, c.consumers, SIDE, SIDE, dtype=jnp.float32),
        plgpu.SMEM((c.stages, 2, c.step), jnp.float32),
        plgpu.Barrier(num_arrivals=c.consumers * (c.dim // SIDE + 1)),
        plgpu.Barrier(num_arrivals=3, num_barriers=c.stages),
        plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages),
        plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.slots),
        plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.writers),
        plgpu.Barrier(num_arrivals=1, num_barriers=c.buffers),
        tile(c.consumers, SIDE, c.step) if c.interpreted else None,
    ]


def _program(c: Backward, inputs, optional, dq_ref, dk_ref, dv_ref, k_smem, v_smem, q_smem, do_smem, ds_smem, dq_smem, row_smem,
             kv_ready, ready, free, ds_ready, dq_ready, dq_free, p_smem):  # fmt: skip
    q_ref, k_ref, v_ref, do_ref, rows_ref, walks_ref, visitors_ref = inputs
    nth, blocks = lax.axis_index("block"), walks_ref.shape[1]
    block = started(nth, c.round, blocks)
    chain = lax.axis_index("chains") * lax.axis_size("chain") + lax.axis_index("chain")
    batch, kv_head = lax.div(chain, jnp.int32(k_ref.shape[2])), lax.rem(chain, jnp.int32(k_ref.shape[2]))
    warpgroup = lax.axis_index("warpgroup")
    own = batch if walks_ref.shape[0] > 1 else 0
    key0 = block * (c.consumers * SIDE)

    counters = None if c.interpreted else pl.get_global(plgpu.SemaphoreType.REGULAR(_counters(c, q_ref)))

    def walk(none=0):
        """Where it begins, its first unmasked step, the masked one after those, how many there are.

        Every role reads it: what the roles share is in registers of them all. So is what is read before a loop and used after
        it, unless it is read again, at an address with a ``zero`` in it. What never happens is a constant.
        """
        begin, head, full, tail = (walks_ref[own, block + none, i] for i in range(4))
        first = head if c.head else jnp.int32(0)
        last = first + full
        return begin, first, last, last + (tail if c.tail else 0)

    group = jnp.int32(c.group)

    def order(t, steps):
        """Which step of the walk comes: from the last one down, or upwards, and each for all heads of the group.

        Walks that end alike then start alike, and no program is ahead of those that it waits for.
        """
        n = lax.div(t, group)
        return n if c.upward else steps - 1 - n

    def place(t, begin, steps):
        """The head and the first query."""
        return kv_head * c.group + lax.rem(t, group), begin + order(t, steps) * c.step

    def produce():
        begin, _, _, steps = walk()
        total = steps * c.group
        for r in range(c.consumers):
            keys = (batch, pl.ds(key0 + r * SIDE, SIDE), kv_head)
            for h in range(c.dim // SIDE):
                plgpu.copy_gmem_to_smem(k_ref.at[(*keys, pl.ds(h * SIDE, SIDE))], k_smem.at[r, h], kv_ready)
            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem.at[r], kv_ready)

        def load(t, wait):
            head, row0 = place(t, begin, steps)
            slot = modulo(t, c.stages)
            rows = (batch, pl.ds(row0, c.step), head)
            if wait:
                plgpu.barrier_wait(free.at[slot])
            plgpu.copy_gmem_to_smem(q_ref.at[rows], q_smem.at[slot], ready.at[slot])
            vectors = rows_ref.at[batch, head, pl.ds(0, 2), pl.ds(row0, c.step)]
            plgpu.copy_gmem_to_smem(vectors, row_smem.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(do_ref.at[rows], do_smem.at[slot], ready.at[slot])

        head_start = jnp.minimum(total, c.stages)
        lax.fori_loop(0, head_start, lambda t, _: load(t, wait=False), None)
        lax.fori_loop(head_start, total, lambda t, _: load(t, wait=True), None)

        # Every slot is waited for as often as it was filled, so that no program ends with barriers in flight.
        def drain(t, _):
            plgpu.barrier_wait(free.at[modulo(t, c.stages)])

        lax.fori_loop(total - head_start, total, drain, None)

    def write(writer):
        """Every ``writers``-th dQ, so that one may still be on its way when the next is ready."""
        begin, _, _, steps = walk()
        total = steps * c.group
        buffer = writer % c.buffers

        def add(n, _):
            turn = n * c.writers + writer

            @pl.when(turn == 0)
            def _nobodys():
                # What the consumers compute before there is any dS.
                plgpu.barrier_wait(dq_ready.at[writer])
                plgpu.barrier_arrive(dq_free.at[buffer])

            @pl.when(turn > 0)
            def _add():
                head, row0 = place(turn - 1, begin, steps)
                step = lax.div(row0, jnp.int32(c.step))
                visitors = (visitors_ref[own, step, i] for i in range(2))
                earlier = started_before(nth, c.round, blocks, *visitors)

                def copy(**how):
                    for part in range(c.consumers):
                        rows = pl.ds(row0 + part * SIDE, SIDE) if c.by_rows else pl.ds(row0, SIDE)
                        columns = pl.ds(0 if c.by_rows else part * SIDE, SIDE)
                        target = dq_ref.at[(*((block,) if c.interpreted else ()), batch, rows, head, columns)]
                        plgpu.copy_smem_to_gmem(dq_smem.at[buffer, part], target, **how)

                if c.interpreted:
                    plgpu.barrier_wait(dq_ready.at[writer])
                    copy()
                    plgpu.wait_smem_to_gmem(0)
                    plgpu.barrier_arrive(dq_free.at[buffer])
                else:
                    counter = counters.at[batch, head, step]
                    plgpu.semaphore_wait(counter, earlier, decrement=False, memory_scope="gpu")
                    plgpu.barrier_wait(dq_ready.at[writer])
                    pl.when(earlier == 0)(copy)
                    pl.when(earlier > 0)(lambda: copy(reduction_op="add"))
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(dq_free.at[buffer])
                    plgpu.wait_smem_to_gmem(0)
                    plgpu.semaphore_signal(counter, memory_scope="gpu")

        if writer < c.buffers:
            plgpu.barrier_arrive(dq_free.at[buffer])
        lax.fori_loop(0, lax.div(total + c.writers - writer, jnp.int32(c.writers)), add, None)

    services = [produce, *(functools.partial(write, i) for i in range(c.writers))]
    if c.warps:

        @pl.when(warpgroup == c.consumers)
        def _serve():
            plgpu.set_max_registers(SERVICE_REGISTERS, action="decrease")

            def warps():
                for i, work in enumerate(services):
                    pl.when(lax.axis_index("warp") == i)(work)

            pl.kernel(warps, mesh=plgpu.WarpMesh(axis_name="warp"))()

    else:
        for i, work in enumerate(services):

            @pl.when(warpgroup == c.consumers + i)
            def _serve(work=work):
                plgpu.set_max_registers(SERVICE_REGISTERS, action="decrease")
                work()

    @pl.when(warpgroup < c.consumers)
    def _consume():
        plgpu.set_max_registers(c.registers, action="increase")
        own_key0 = key0 + warpgroup * SIDE
        p_own = None if p_smem is None else p_smem.at[warpgroup]
        shape = (SIDE, c.step)

        def store_ds(t, ds):
            slot = modulo(t, c.slots)
            for i in range(c.step // SIDE):
                part = ds if c.step == SIDE else ds[:, i * SIDE : (i + 1) * SIDE]
                put_square(c, ds_smem.at[slot, warpgroup, i], part)

        def publish_ds(t):
            plgpu.barrier_arrive(ds_ready.at[modulo(t, c.slots)])

        def start_dq(acc, t):
            slot, none = modulo(t, c.slots), zero(t)
            for r in range(c.consumers):
                row, column = (warpgroup, 0) if c.by_rows else (0, warpgroup)
                plgpu.wgmma(acc, ds_smem.at[slot, r, row].transpose((1, 0)), k_smem.at[none + r, column])

        def store_dq(turn, dq_acc, pending):
            buffer = modulo(turn, c.buffers)
            plgpu.barrier_wait(dq_free.at[buffer])
            dq = lax.optimization_barrier(plgpu.wgmma_accumulator_load(dq_acc, wait_n=pending))
            dq_smem.at[buffer, warpgroup][...] = dq

        def publish_dq(turn):
            plgpu.barrier_arrive(dq_ready.at[modulo(turn, c.writers)])

        def publish_last(t):
            """What the step before ``t`` has stored. Before the first that is dS alone."""
            plgpu.commit_smem()
            publish_ds(t + c.slots - 1)
            pl.when(t > 0)(lambda: publish_dq(t + c.writers - 1))

        def step(t, masked, dk_acc, dv_acc):
            """``masked``: whether the step is, or what says so when it runs."""
            slot, none = modulo(t, c.stages), zero(t)
            q, do = q_smem.at[slot], do_smem.at[slot]

            def seen():
                begin, _, _, steps = walk(none)
                return _visible(c, optional, batch, t, own_key0 + none, begin + order(t, steps) * c.step)

            def by_query(which):
                part = row_smem.at[slot, which]
                return plgpu.load(part, *WHOLE, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)

            def spread(values):
                return lax.broadcast_in_dim(values, shape, [1])

            def softmax(s_acc, dp_acc):
                if masked is not False and not c.interpreted:
                    # Where a pair does not count the sum starts at -inf, and stays there.
                    def hide():
                        s_acc[...] = jnp.where(seen(), 0.0, -jnp.inf)

                    hide() if masked is True else pl.when(masked)(hide)

                for h in range(c.dim // SIDE):
                    part = q if c.dim == SIDE else q.at[:, h * SIDE : (h + 1) * SIDE]
                    plgpu.wgmma(s_acc, k_smem.at[none + warpgroup, h], part.transpose((1, 0)))
                if not c.eager:
                    publish_last(t)
                plgpu.wgmma_wait(c.dim // SIDE)
                release(t - 1)
                if not c.interpreted:
                    # The sum starts at minus the slope.
                    dp_acc[...] = spread(by_query(1))
                # Loaded together they are waited for once. Where a step has 128 queries, registers are short.
                reference = lax.optimization_barrier(by_query(0)) if c.step == SIDE else None
                plgpu.wgmma(dp_acc, v_smem.at[none + warpgroup], do.transpose((1, 0)))
                s = lax.optimization_barrier(plgpu.wgmma_accumulator_load(s_acc, wait_n=1))
                if masked is not False and c.interpreted:
                    s = jnp.where(seen() | jnp.logical_not(masked), s, -jnp.inf)
                bent = jnp.tanh(s * (c.scale / c.cap)) if c.cap else None
                p = jnp.exp2(
                    (bent * (c.cap * LOG2E) if c.cap else s * (c.scale * LOG2E))
                    + spread(by_query(0) if reference is None else reference)
                )
                if masked is not False and (c.cap or c.scale <= 0):
                    p = jnp.where(s == -jnp.inf, 0.0, p)
                halves = bool(c.cap) and c.dim == SIDE
                weight = p * (1 - bent * bent) if c.cap else None
                if halves:
                    # Two of these share a register; dS is rounded at least as much.
                    p, weight = p.astype(do_smem.dtype), (weight * HALVES).astype(jnp.float16)
                p, weight = lax.optimization_barrier((p, weight))
                # This wait is a branch: without one, the compiler would move the exponentials behind the wait for dP.
                plgpu.barrier_wait(ds_ready.at[modulo(t + c.slots - 1, c.slots)])
                dp = lax.optimization_barrier(plgpu.wgmma_accumulator_load(dp_acc))
                if halves:
                    weight = weight.astype(jnp.float32) * (1 / HALVES)
                ds = (weight if c.cap else p) * (dp + spread(by_query(1)) if c.interpreted else dp)
                return lax.optimization_barrier((p.astype(do_smem.dtype), ds.astype(q_smem.dtype)))

            # Before there are accumulators: the first product takes their zeros for nothing if no branch is between.
            plgpu.barrier_wait(ready.at[slot])
            p, ds = pl.run_scoped(softmax, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
            store_ds(t, ds)
            if c.eager:
                plgpu.commit_smem()
                publish_ds(t)
            # Else P would be rounded only after dQ's product has started, and take twice the registers beside it.
            branch(c)

            def products(dq_acc):
                start_dq(dq_acc, t + c.slots - 1)
                _add(c, dv_acc, p, do, p_own)
                _add(c, dk_acc, ds, q, p_own)
                store_dq(t, dq_acc, 2)
                if c.eager:
                    plgpu.commit_smem()
                    publish_dq(t)
                else:
                    # Else the compiler waits for all products before it takes dQ's registers for the next scores.
                    branch(c)

            pl.run_scoped(products, plgpu.ACC((SIDE, SIDE), jnp.float32))

        def release(t):
            """Of a step before, whose products are through with the slot."""
            pl.when(t >= 0)(lambda: plgpu.barrier_arrive(free.at[modulo(t + c.stages, c.stages)]))

        def steps_apart(dk_acc, dv_acc):
            """Masked steps, unmasked ones, masked ones. Products that a loop left in flight would take the next one's registers."""
            parts = [(0, c.head, True), (1, True, False), (2, c.tail, True)]
            done = jnp.int32(0)
            for part, ever, masked in parts if c.upward else reversed(parts):
                if ever:
                    cuts = jnp.int32(0), *walk(zero(done))[1:]
                    begin, end = cuts[part : part + 2] if c.upward else (cuts[3] - cuts[part + 1], cuts[3] - cuts[part])
                    done = end * c.group
                    body = functools.partial(step, masked=masked, dk_acc=dk_acc, dv_acc=dv_acc)
                    lax.fori_loop(begin * c.group, done, lambda t, _, body=body: body(t), None)
                    plgpu.wgmma_wait(0)
            return walk(zero(done))[3] * c.group if c.masked else done

        def steps_together(dk_acc, dv_acc):
            _, first, last, steps = walk()

            def one(t, _):
                i = order(t, steps)
                step(t, (i < first) | (i >= last) if c.masked else False, dk_acc, dv_acc)

            lax.fori_loop(0, steps * c.group, one, None)
            plgpu.wgmma_wait(0)
            return steps * c.group

        def all_steps(dk_acc, dv_acc):
            before = jnp.int32(c.slots - 1)
            store_ds(before, plgpu.layout_cast(jnp.zeros(shape, q_smem.dtype), plgpu.Layout.WGMMA))
            if c.eager:
                plgpu.commit_smem()
                publish_ds(before)
            plgpu.barrier_wait(kv_ready)
            total = steps_apart(dk_acc, dv_acc) if c.apart else steps_together(dk_acc, dv_acc)
            release(total - 1)
            if not c.eager:
                publish_last(total)

            def finish(dq_acc):
                plgpu.barrier_wait(ds_ready.at[modulo(total + c.slots - 1, c.slots)])
                start_dq(dq_acc, total + c.slots - 1)
                store_dq(total, dq_acc, 0)
                plgpu.commit_smem()
                publish_dq(total)

            pl.run_scoped(finish, plgpu.ACC((SIDE, SIDE), jnp.float32))
            # Both warpgroups are through with the keys when the writers are with dQ.
            for buffer in range(c.buffers):
                plgpu.barrier_wait(dq_free.at[buffer])
            v_smem.at[warpgroup][...] = dv_acc[...].astype(v_smem.dtype)
            dk = (dk_acc[...] * c.scale).astype(k_smem.dtype)
            for h in range(c.dim // SIDE):
                k_smem.at[warpgroup, h][...] = dk if c.dim == SIDE else dk[:, h * SIDE : (h + 1) * SIDE]
            plgpu.commit_smem()
            keys = (batch, pl.ds(own_key0, SIDE), kv_head)
            for h in range(c.dim // SIDE):
                plgpu.copy_smem_to_gmem(k_smem.at[warpgroup, h], dk_ref.at[(*keys, pl.ds(h * SIDE, SIDE))])
            plgpu.copy_smem_to_gmem(v_smem.at[warpgroup], dv_ref.at[keys])
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(all_steps, *(plgpu.ACC((SIDE, width), jnp.float32) for width in (c.dim, c.value_dim)))


# What the programs that run at the same time should read and write, to find it in the second-level cache.
CACHE = 40 * 2**20
# Where walks from the last query on end early. Blocks of one head that start together wait for each other at their first
# sums, so fewer do; what they read at a time is near to each other, and the cache holds more heads.
UNEVEN = 160 * 2**20
UNEVEN_HEADS = 16
# Blocks of a round there, where every head has keys of its own.
ROUND = 6


def _round(c: Backward, blocks: int) -> int:
    """Blocks of a round: all, where queries are walked upwards; one, where walks are of one length; else some.

    Blocks that start together start at the same queries, and each waits until those before it have added to them: soon they
    follow each other at a distance. The first of a round has the shortest walk, so they end in the same order, at a greater
    distance, and those that take their places need not wait. Were the first the longest, all would end together, and the next
    would wait again. With more blocks a round the distances grow, faster where heads share keys, until the cache no longer
    holds what lies between.
    """
    if c.upward:
        return blocks
    return max(1, ROUND // c.group) if c.right is not None and c.left is None else 1


def started(nth, size: int, blocks: int):
    """The block of keys that starts as the ``nth``: in rounds of ``size`` from the first, each from its last block to its first."""
    first = nth - modulo(nth, size)
    return first + jnp.minimum(first + size, blocks) - 1 - nth


def started_before(nth, size: int, blocks: int, first_visitor, last_visitor):
    """How many of the blocks between two, inclusive, start before the ``nth``, which is one of them."""
    first = nth - modulo(nth, size)
    in_round = jnp.minimum(jnp.minimum(first + size, blocks) - 1, last_visitor) - started(nth, size, blocks)
    return jnp.maximum(first - first_visitor, 0) + in_round


def _together(c: Backward, chains: int, size: int) -> int:
    """How many heads are worked on at the same time: all that fit, of those that divide their number."""
    uneven = c.right is not None and not c.upward
    room, most = (UNEVEN, UNEVEN_HEADS) if uneven else (CACHE, chains)
    return max(n for n in range(1, chains + 1) if chains % n == 0 and (n == 1 or (n <= most and n * size <= room)))


def _counters(c: Backward, q_ref) -> tuple[int, int, int]:
    batch, q_len, heads, _ = q_ref.shape
    return batch, heads, -(-q_len // c.step)


def _add(c: Backward, acc, left, right, left_smem):
    """``acc += left · right``, in flight."""
    if not c.interpreted:
        plgpu.wgmma(acc, left, right)
    else:
        left_smem[...] = left
        plgpu.commit_smem()
        plgpu.wgmma(acc, left_smem, right)


def _visible(c: Backward, optional, batch, t, key0, row0):
    """``[64, step]``: which pairs of keys and queries count."""
    shape = (SIDE, c.step)

    def vector(name, start, axis):
        ref = optional[name]
        part = ref.at[batch if ref.shape[0] > 1 else 0, pl.ds(start, shape[axis])]
        values = plgpu.load(part, *WHOLE, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
        return lax.broadcast_in_dim(values, shape, [axis])

    def position(start, axis):
        # Loaded: what the compiler computes it keeps in registers over the loop.
        return start + vector("places", zero(t), axis)

    key = position(key0, 0)
    if c.packed:
        seen = (key >= vector("start", row0, 1)) & (key < vector("stop", row0, 1))
    else:
        seen = key < c.kv_len
        if c.left is not None or c.right is not None:
            row = position(row0, 1)
            if c.left is not None:
                seen &= key >= row + c.left
            if c.right is not None:
                seen &= key < row + c.right
    if c.segments:
        mine = vector("q_ids", row0, 1)
        seen &= (mine == vector("kv_ids", key0, 0)) & (mine > 0)
    return seen
