"""The backward for wide heads, as two kernels: one for a block of queries, one for a block of keys.

The accumulators of dK and dV leave a program no registers for dQ's, so the scores and their gradients are computed twice:
seven products a pair of blocks instead of five, nothing is added in global memory, and every run gives the same bits.

    queries:  S = Q·Kᵀ    dP = dO·Vᵀ    dS = P ∘ (dP - slope)    dQ += dS·K      two warpgroups, 64 queries each
    keys:     Sᵀ = K·Qᵀ   Pᵀ            dV += Pᵀ·dO                              one warpgroup
              dPᵀ = V·dOᵀ               dSᵀ = Pᵀ ∘ (dPᵀ - slope)  dK += dSᵀ·Q    another, with Pᵀ from the first

A tile of 64 rows is split into *parts* of up to 128 columns, and a ring has slots for parts: a slot is filled again as soon
as the products that read it are over, not when those of its whole tile are. A warpgroup's last product of a step and its
first ones of the next form one *burst*. In the kernel for keys the ``turn`` barriers let one warpgroup's burst run while the
other is busy with its exponentials; in that for queries both do the same, and are faster without. Every other barrier has one
meaning: ``ready`` says that a slot holds data, ``free`` that all have read it.

The second warpgroup's dS is rounded, so its Pᵀ should not be: it comes in float16, which has 3 bits more than bfloat16. The
smallest weights would be lost there; so all are 2**boost times as large, by an lse that is lower by that, up to the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_plan import LOG2E, SIDE, Call
from ejkernel.kernels._pallas.gpu.terms import WHOLE, transforms, zero
from ejkernel.kernels.common.varying import vary_as

CONSUMERS = 2
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
# What a program of Hopper may have, less what barriers take.
SHARED_MEMORY = 232448 - 1024


@dataclass(frozen=True, kw_only=True)
class Wide(Call):
    """Everything static about one of the two kernels.

    Attributes:
        unmasked, masked: whether any step is without a mask, whether any has one.
        boost: the power of two by which weights are larger than they are.
    """

    unmasked: bool
    masked: bool
    boost: int

    @property
    def part(self) -> int:
        """Columns of a part of a tile: those first that leave rows of shared memory with the widest swizzle."""
        return next(x for x in (128, 64, 96, 32) if self.dim % x == self.value_dim % x == 0)

    @property
    def parts(self) -> int:
        """Parts of a query or a key."""
        return self.dim // self.part

    @property
    def value_parts(self) -> int:
        """Parts of a value or of dO."""
        return self.value_dim // self.part

    @property
    def query_slots(self) -> tuple[int, int]:
        """Slots for keys and for values, beside a block's queries and dO. A step's keys are read until the next one's are scored."""
        own = CONSUMERS * (self.parts + self.value_parts) * self._part_size
        return self._slots(own, (2 * self.parts, self.value_parts))

    @property
    def key_slots(self) -> tuple[int, int]:
        """Slots for queries and for dO, beside a block's keys and values, two P and the vectors; both are read over two steps."""
        own = 2 * max(self.parts, self.value_parts) * self._part_size + 2 * 2 * SIDE * SIDE + 4 * 4 * SIDE
        return self._slots(own, (2 * self.parts, 2 * self.value_parts))

    @property
    def _part_size(self) -> int:
        return 2 * SIDE * self.part

    def _slots(self, own: int, least: tuple[int, int]) -> tuple[int, int]:
        """What the rings must have, and what fits beside ``own`` bytes, shared out evenly, up to two more tiles each."""
        spare = (SHARED_MEMORY - own) // self._part_size - sum(least)
        more = min(spare - spare // 2, 2 * self.parts)
        return least[0] + more, least[1] + min(spare - more, 2 * self.value_parts)


# ------------------------------------------------------------------------------------------------------ what both share


def _kernel(entry, inputs, optional: dict[str, Any], grid, out_type, scratch, interpret):
    """Run ``entry(inputs, optional, *outputs, *scratch)``."""
    optional = {**optional, "places": jnp.arange(2 * SIDE, dtype=jnp.int32)[None]}
    names = tuple(optional)
    count = len(inputs) + len(names)

    def program(*refs):
        entry(refs[: len(inputs)], dict(zip(names, refs[len(inputs) : count], strict=True)), *refs[count:])

    run = plgpu.kernel(
        program,
        out_type=out_type,
        scratch_types=scratch,
        grid=grid,
        grid_names=("head", "block", "batch"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({"interpret": interpret} if interpret else {}),
    )
    return vary_as(run(*inputs, *optional.values()), inputs[0])


def _tile(dtype, *shape):
    return plgpu.SMEM(shape, dtype, transforms=transforms(shape[-1]))


def _rem(i, n: int):
    return lax.rem(i, jnp.int32(n))


class Ring:
    """Slots for parts of tiles, their barriers, and how many parts a tile has."""

    def __init__(self, smem, ready, free, parts: int):
        self.smem, self.ready, self.free, self.parts, self.slots = smem, ready, free, parts, smem.shape[0]

    @staticmethod
    def scratch(c: Wide, slots: int, dtype) -> list[Any]:
        """Its shared memory and barriers."""
        return [
            _tile(dtype, slots, SIDE, c.part),
            plgpu.Barrier(num_arrivals=1, num_barriers=slots),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=slots),
        ]

    def slot(self, t, p: int):
        """Where part ``p`` of the tile of step ``t`` goes."""
        return _rem(t * self.parts + p, self.slots)

    def fill(self, t, source):
        """Copy all parts of step ``t`` from ``source(columns)``, each as soon as there is room."""
        part = self.smem.shape[2]
        for p in range(self.parts):
            slot = self.slot(t, p)
            pl.when(t * self.parts + p >= self.slots)(lambda slot=slot: plgpu.barrier_wait(self.free.at[slot]))
            plgpu.copy_gmem_to_smem(source(pl.ds(p * part, part)), self.smem.at[slot], self.ready.at[slot])

    def wait(self, t, p: int):
        """Part ``p`` of step ``t``, once it is there."""
        plgpu.barrier_wait(self.ready.at[self.slot(t, p)])
        return self.get(t, p)

    def get(self, t, p: int):
        """Part ``p`` of step ``t``, which was waited for."""
        return self.smem.at[self.slot(t, p)]

    def release(self, t, p: int):
        """Say that this warpgroup has read part ``p`` of step ``t``."""
        plgpu.barrier_arrive(self.free.at[self.slot(t, p)])

    def release_last(self, t, behind: int):
        """Release the tile of step ``t - 1`` as its last products end; ``behind`` groups of products came after them."""
        for p in range(self.parts):
            plgpu.wgmma_wait(self.parts - 1 - p + behind)
            pl.when(t > 0)(lambda p=p: self.release(t - 1, p))

    def drain(self, steps):
        """Wait until everything is read, so that no program ends with barriers in flight."""
        filled = steps * self.parts
        _drain(filled, self.slots, lambda i: self.free.at[_rem(i, self.slots)])


def _drain(filled, slots: int, free):
    def one(i, _):
        plgpu.barrier_wait(free(i))

    lax.fori_loop(jnp.maximum(filled - slots, 0), filled, one, None)


class Walk:
    """A program's block, where it begins and which steps it has; read where it is used, registers are scarce."""

    def __init__(self, c: Wide, ref, batch):
        self.c, self.ref, self.where = c, ref, (batch if ref.shape[0] > 1 else 0, lax.axis_index("block"))

    def _read(self, i: int):
        return self.ref[(*self.where, i)]

    @property
    def block(self):
        return self._read(4)

    @property
    def begin(self):
        return self._read(0)

    @property
    def steps(self):
        return self._read(1) + self._read(2) + self._read(3)

    def run(self, step):
        """Call ``step(i, masked)`` for all steps, and return how many there were; ``masked`` may be a constant."""
        masked_first, unmasked, masked_last = (self._read(i) for i in (1, 2, 3))
        masked_again = masked_first + unmasked

        def one(i, _):
            both = self.c.masked and self.c.unmasked
            step(i, (i < masked_first) | (i >= masked_again) if both else self.c.masked)

        lax.fori_loop(0, masked_again + masked_last, one, None)
        return masked_again + masked_last


def _score(acc, left, ring: Ring, t, after_first=lambda: None):
    """``acc += left · tileᵀ`` part by part, in flight."""
    # The compiler would keep all descriptors of an operand that stays where it is in registers over the loop.
    none = zero(t)
    for p in range(ring.parts):
        plgpu.wgmma(acc, left.at[none + p], ring.wait(t, p).transpose((1, 0)))
        if p == 0:
            after_first()


def _add(c: Wide, accs, left, part, left_smem):
    """``accs[p] += left · part(p)``, in flight."""
    if c.interpreted:
        left_smem[...] = left
        plgpu.commit_smem()
        left = left_smem
    for p, acc in enumerate(accs):
        plgpu.wgmma(acc, left, part(p))


def _accumulators(c: Wide, width: int):
    return [plgpu.ACC((SIDE, c.part), jnp.float32) for _ in range(width // c.part)]


SCORES = plgpu.ACC((SIDE, SIDE), jnp.float32)


def _weights(c: Wide, s, lse, masked):
    """The weights, and what (dP - slope) is multiplied by for the gradient of the logits; hidden scores are -inf."""
    capped = jnp.tanh(s * (c.scale / c.cap)) if c.cap else None
    p = jnp.exp2((capped * (c.cap * LOG2E) if c.cap else s * (c.scale * LOG2E)) - lse)
    if masked is not False and (c.cap or c.scale <= 0):
        p = jnp.where(s == -jnp.inf, 0.0, p)
    return p, p * (1.0 - capped * capped) if c.cap else p


def _hide(c: Wide, acc, masked, seen):
    """Start the scores at -inf where a pair does not count: products leave that, and registers are free then."""

    def hide():
        acc[...] = jnp.where(seen(), 0.0, -jnp.inf)

    if masked is not False and not c.interpreted:
        hide() if masked is True else pl.when(masked)(hide)


def _scores(c: Wide, acc, masked, seen):
    """The scores; the interpreter cannot write to accumulators and hides here."""
    s = plgpu.wgmma_accumulator_load(acc, wait_n=0)
    if masked is not False and c.interpreted:
        s = jnp.where(seen() | ~jnp.asarray(masked), s, -jnp.inf)
    return s


def _load(ref, axis: int):
    """A vector along ``axis`` of ``[64, 64]`` in the layout of products."""
    values = plgpu.load(ref, *WHOLE, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
    return lax.broadcast_in_dim(values, (SIDE, SIDE), [axis])


def _visible(c: Wide, optional, batch, t, query0, key0, query_axis: int):
    """``[64, 64]``: which pairs of step ``t`` count."""

    def vector(name, start, axis):
        ref = optional[name]
        return _load(ref.at[batch if ref.shape[0] > 1 else 0, pl.ds(start, SIDE)], axis)

    def position(start, axis):
        # Loaded: the compiler would keep what it computes in registers over the loop.
        return start + vector("places", zero(t), axis)

    key_axis = 1 - query_axis
    key = position(key0, key_axis)
    if c.packed:
        seen = (key >= vector("start", query0, query_axis)) & (key < vector("stop", query0, query_axis))
    else:
        seen = key < c.kv_len
        if c.left is not None or c.right is not None:
            query = position(query0, query_axis)
            if c.left is not None:
                seen &= key >= query + c.left
            if c.right is not None:
                seen &= key < query + c.right
    if c.segments:
        mine = vector("q_ids", query0, query_axis)
        seen &= (mine == vector("kv_ids", key0, key_axis)) & (mine > 0)
    return seen


def _columns(c: Wide, width: int):
    return [pl.ds(column, c.part) for column in range(0, width, c.part)]


def _store(c: Wide, accs, factor: float, smem, ref, where):
    """Accumulators times ``factor``, by way of ``smem``, to ``ref``."""
    for p, acc in enumerate(accs):
        smem.at[p][...] = (plgpu.wgmma_accumulator_load(acc, wait_n=0) * factor).astype(smem.dtype)
    plgpu.commit_smem()
    for p, columns in enumerate(_columns(c, ref.shape[3])):
        plgpu.copy_smem_to_gmem(smem.at[p], ref.at[(*where, columns)])
    plgpu.wait_smem_to_gmem(0)


# -------------------------------------------------------------------------------------------------------------- queries


def query_gradient(c: Wide, query, key, value, dout, rows, walks, optional: dict[str, Any], *, interpret: Any = False):
    """dQ ``[B, Sq, H, D]``; ``rows``: ``[B, H, 2, blocks · 128]``, the lse in base 2 and the slope; ``walks``: see ``longest_first``."""
    dtype = query.dtype
    keys, values = c.query_slots
    return _kernel(
        lambda *refs: _query_program(c, *refs),
        (query, key, value, dout, rows, walks),
        optional,
        grid=(query.shape[2], walks.shape[1], query.shape[0]),
        out_type=jax.ShapeDtypeStruct(query.shape, dtype),
        scratch=[
            _tile(dtype, CONSUMERS, c.parts, SIDE, c.part),
            _tile(dtype, CONSUMERS, c.value_parts, SIDE, c.part),
            plgpu.Barrier(num_arrivals=c.parts + c.value_parts, num_barriers=CONSUMERS),
            *Ring.scratch(c, keys, dtype),
            *Ring.scratch(c, values, dtype),
            _tile(dtype, CONSUMERS, SIDE, SIDE) if c.interpreted else None,
        ],
        interpret=interpret,
    )


def _query_program(c: Wide, inputs, optional, dq_ref, q_smem, do_smem, own_ready,
                   k_smem, k_ready, k_free, v_smem, v_ready, v_free, ds_smem):  # fmt: skip
    q_ref, k_ref, v_ref, do_ref, rows_ref, walks_ref = inputs
    head, batch, warpgroup = (lax.axis_index(name) for name in ("head", "batch", "warpgroup"))
    walk = Walk(c, walks_ref, batch)
    keys, values = Ring(k_smem, k_ready, k_free, c.parts), Ring(v_smem, v_ready, v_free, c.value_parts)

    @pl.when(warpgroup == CONSUMERS)
    def _produce():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        kv_head = lax.div(head, jnp.int32(c.group))
        begin, steps = walk.begin, walk.steps

        def load(t, _):
            some = pl.ds(begin + t * SIDE, SIDE)
            keys.fill(t, lambda columns: k_ref.at[batch, some, kv_head, columns])
            values.fill(t, lambda columns: v_ref.at[batch, some, kv_head, columns])

        lax.fori_loop(0, steps, load, None)
        keys.drain(steps)
        values.drain(steps)

    @pl.when(warpgroup < CONSUMERS)
    def _consume():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        row0 = walk.block * (CONSUMERS * SIDE) + warpgroup * SIDE
        own = pl.ds(row0, SIDE)
        q_own, do_own = q_smem.at[warpgroup], do_smem.at[warpgroup]
        for source, target in ((q_ref, q_own), (do_ref, do_own)):
            for p, columns in enumerate(_columns(c, source.shape[3])):
                plgpu.copy_gmem_to_smem(source.at[batch, own, head, columns], target.at[p], own_ready.at[warpgroup])

        def by_row(i):
            part = rows_ref.at[batch, head, i, own]
            return plgpu.load(part, *WHOLE, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

        def wide(vector):
            return lax.broadcast_in_dim(vector, (SIDE, SIDE), [0])

        lse, slope = by_row(0), by_row(1)
        plgpu.barrier_wait(own_ready.at[warpgroup])

        def gradient(*accs):
            def step(t, masked):
                def seen():
                    return _visible(c, optional, batch, t, row0, walk.begin + t * SIDE, 0)

                def products(s_acc):
                    _hide(c, s_acc, masked, seen)
                    _score(s_acc, q_own, keys, t, lambda: keys.release_last(t, 1))
                    # The registers of dP are taken only here, where those of the last dS are free again.
                    return pl.run_scoped(lambda dp_acc: more_products(s_acc, dp_acc), SCORES)

                def more_products(s_acc, dp_acc):
                    _score(dp_acc, do_own, values, t)
                    s = _scores(c, s_acc, masked, seen)
                    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=None)
                    for p in range(values.parts):
                        values.release(t, p)
                    _, factor = _weights(c, s, wide(lse), masked)
                    return (factor * (dp - wide(slope))).astype(q_smem.dtype)

                ds = pl.run_scoped(products, SCORES)
                _add(c, accs, ds, lambda p: keys.get(t, p), ds_smem.at[warpgroup] if c.interpreted else None)

            steps = walk.run(step)
            keys.release_last(steps, 0)
            _store(c, accs, c.scale * 2.0**-c.boost, q_own, dq_ref, (batch, own, head))

        pl.run_scoped(gradient, *_accumulators(c, c.dim))


# ----------------------------------------------------------------------------------------------------------------- keys


def key_gradients(c: Wide, query, key, value, dout, rows, walks, optional: dict[str, Any], *, interpret: Any = False):
    """dK ``[B, Sk, Hkv, D]`` and dV; ``rows`` as for ``query_gradient``, a step longer than the queries."""
    dtype = query.dtype
    queries, douts = c.key_slots
    pair = plgpu.Barrier(num_arrivals=1, num_barriers=2)
    of_vectors = plgpu.Barrier(num_arrivals=1, num_barriers=2 * CONSUMERS)
    # dV leaves through the keys' place, dK through the values': nobody else reads there.
    own = _tile(dtype, max(c.parts, c.value_parts), SIDE, c.part)
    return _kernel(
        lambda *refs: _key_program(c, *refs),
        (query, key, value, dout, rows, walks),
        optional,
        grid=(key.shape[2], walks.shape[1], key.shape[0]),
        out_type=(jax.ShapeDtypeStruct(key.shape, dtype), jax.ShapeDtypeStruct(value.shape, dtype)),
        scratch=[
            own,
            own,
            plgpu.Barrier(num_arrivals=c.parts),
            plgpu.Barrier(num_arrivals=c.value_parts),
            _tile(jnp.float16, 2, SIDE, SIDE),
            pair,
            pair,
            plgpu.SMEM((CONSUMERS, 2, SIDE), jnp.float32),
            of_vectors,
            of_vectors,
            *Ring.scratch(c, queries, dtype),
            *Ring.scratch(c, douts, dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS),
            _tile(dtype, CONSUMERS, SIDE, SIDE) if c.interpreted else None,
        ],
        interpret=interpret,
    )


def _key_program(c: Wide, inputs, optional, dk_ref, dv_ref, k_smem, v_smem, k_ready, v_ready, p_smem, p_ready, p_free,
                 vector_smem, vector_ready, vector_free, q_smem, q_ready, q_free, do_smem, do_ready, do_free,
                 turn, left_smem):  # fmt: skip
    q_ref, k_ref, v_ref, do_ref, rows_ref, walks_ref = inputs
    kv_head, batch, warpgroup = (lax.axis_index(name) for name in ("head", "batch", "warpgroup"))
    walk = Walk(c, walks_ref, batch)
    key0 = walk.block * SIDE
    own = (batch, pl.ds(key0, SIDE), kv_head)
    queries, douts = Ring(q_smem, q_ready, q_free, c.parts), Ring(do_smem, do_ready, do_free, c.value_parts)

    def vector_slot(t, which):
        return 2 * which + _rem(t, 2)

    @pl.when(warpgroup == CONSUMERS)
    def _produce():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        for source, target, ready in ((k_ref, k_smem, k_ready), (v_ref, v_smem, v_ready)):
            for p, columns in enumerate(_columns(c, source.shape[3])):
                plgpu.copy_gmem_to_smem(source.at[(*own, columns)], target.at[p], ready)
        begin, steps = walk.begin, walk.steps
        total = steps * c.group

        def vector(t, source, which):
            slot = vector_slot(t, which)
            pl.when(t >= 2)(lambda: plgpu.barrier_wait(vector_free.at[slot]))
            plgpu.copy_gmem_to_smem(source, vector_smem.at[which, _rem(t, 2)], vector_ready.at[slot])

        def load(t, _):
            head, i = (kv_head, t) if c.group == 1 else (kv_head * c.group + lax.div(t, steps), lax.rem(t, steps))
            some = pl.ds(begin + i * SIDE, SIDE)
            queries.fill(t, lambda columns: q_ref.at[batch, some, head, columns])
            vector(t, rows_ref.at[batch, head, 0, some], 0)
            douts.fill(t, lambda columns: do_ref.at[batch, some, head, columns])
            vector(t, rows_ref.at[batch, head, 1, some], 1)

        lax.fori_loop(0, total, load, None)
        queries.drain(total)
        douts.drain(total)
        for which in range(CONSUMERS):
            _drain(total, 2, lambda t, which=which: vector_free.at[vector_slot(t, which)])

    def consume(me: int):
        """The first warpgroup computes P and dV, the second dP and dK."""
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        left, ready, scored, mixed = (k_smem, k_ready, queries, douts) if me == 0 else (v_smem, v_ready, douts, queries)
        plgpu.barrier_wait(ready)

        def take_turn():
            plgpu.barrier_wait(turn.at[me])

        def give_turn():
            plgpu.barrier_arrive(turn.at[1 - me])

        def by_query(t):
            plgpu.barrier_wait(vector_ready.at[vector_slot(t, me)])
            return _load(vector_smem.at[me, _rem(t, 2)], 1)

        def weights(t, s, masked):
            p, factor = _weights(c, s, by_query(t), masked)
            slot = _rem(t, 2)
            pl.when(t >= 2)(lambda: plgpu.barrier_wait(p_free.at[slot]))
            p_smem.at[slot][...] = factor.astype(p_smem.dtype)
            plgpu.barrier_arrive(p_ready.at[slot])
            return p.astype(q_ref.dtype)

        def score_gradients(t, dp):
            dp = dp - by_query(t)
            slot = _rem(t, 2)
            plgpu.barrier_wait(p_ready.at[slot])
            factor = plgpu.load(p_smem.at[slot], *WHOLE, layout=plgpu.Layout.WGMMA, optimized=True)
            plgpu.barrier_arrive(p_free.at[slot])
            return (factor.astype(jnp.float32) * dp).astype(q_ref.dtype)

        def gradient(*accs):
            def step(t, i, masked):
                def seen():
                    return _visible(c, optional, batch, t, walk.begin + i * SIDE, key0, 1)

                def products(acc):
                    _hide(c, acc, masked, seen)
                    _score(acc, left, scored, t, lambda: mixed.release_last(t, 1))
                    give_turn()
                    s = _scores(c, acc, masked, seen)
                    for p in range(scored.parts):
                        scored.release(t, p)
                    mine = weights(t, s, masked) if me == 0 else score_gradients(t, s)
                    if c.interpreted:
                        plgpu.commit_smem()  # its race detector wants a fence between a read and a later copy
                    plgpu.barrier_arrive(vector_free.at[vector_slot(t, me)])
                    return mine

                mine = pl.run_scoped(products, SCORES)
                take_turn()
                _add(c, accs, mine, lambda p: mixed.wait(t, p), left_smem.at[me] if c.interpreted else None)

            if me == 1:
                give_turn()
            take_turn()
            if me == 1:
                # What is hidden has a P of 0.
                total = walk.steps * c.group
                lax.fori_loop(0, total, lambda t, _: step(t, t, False), None)
            elif c.group == 1:
                total = walk.run(lambda i, masked: step(i, i, masked))
            else:

                def one_head(_, first):
                    return first + walk.run(lambda i, masked: step(first + i, i, masked))

                total = lax.fori_loop(0, c.group, one_head, jnp.int32(0))
            give_turn()
            if me == 0:
                take_turn()
            mixed.release_last(total, 0)
            if me == 0:
                _drain(total, 2, lambda t: p_free.at[_rem(t, 2)])
                _store(c, accs, 2.0**-c.boost, left, dv_ref, own)
            else:
                _store(c, accs, c.scale * 2.0**-c.boost, left, dk_ref, own)

        pl.run_scoped(gradient, *_accumulators(c, c.value_dim if me == 0 else c.dim))

    for me in range(CONSUMERS):
        pl.when(warpgroup == me)(lambda me=me: consume(me))
