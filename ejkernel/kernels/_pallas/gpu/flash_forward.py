"""The forward kernel: one producer warpgroup feeds keys and values through shared memory, the others compute.

A program owns a block of queries of one head; each computing warpgroup owns an equal part of its rows. The producer walks
the keys that the block needs and copies them by TMA into a ring of ``stages`` slots. A consumer step is

    S = Q·Kᵀ (wgmma)  →  softmax in registers  →  O += P·V (wgmma, P from registers)

Two consumers take turns at the tensor cores: the ``turn`` barrier lets one's products run while the other is busy with its
softmax. Every barrier has one meaning: ``ready`` says that a slot holds data, ``free`` that everybody has read it.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)
# The index that ``plgpu.load`` wants before jax 0.11, and warns of since.
_WHOLE = ((),) if inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty else ()
# Where the running maximum starts. Finite, so that a row without a visible key meets no inf - inf.
LOWEST = -1e30
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}
PRODUCER_REGISTERS = {1: 24, 2: 24, 3: 32}


@dataclass(frozen=True)
class Forward:
    """Everything static about a forward.

    Attributes:
        rows: queries of one consumer warpgroup.
        consumers: how many of those a program has.
        step: keys of one step of the walk.
        stages: slots of the ring.
        heads, group: query heads, and how many of them share a key head.
        dim, value_dim: of a head.
        scale, cap: of the logits; a cap of 0 is none.
        left, right: what is added to a row for the first key that it sees, and the first that it no longer sees; or None.
        kv_len: the number of keys.
        packed, segments, sinks: which optional arrays there are.
        full, partial: whether any step is without a mask, whether any has one.
        interpreted: run in JAX's interpreter, which knows no products with a left operand in registers.
    """

    rows: int
    consumers: int
    step: int
    stages: int
    heads: int
    group: int
    dim: int
    value_dim: int
    scale: float
    cap: float
    left: int | None
    right: int | None
    kv_len: int
    packed: bool
    segments: bool
    sinks: bool
    full: bool
    partial: bool
    interpreted: bool = False

    @property
    def folds(self) -> bool:
        """Whether the scale may wait until after the maximum: it keeps the order of logits."""
        return self.scale > 0 and not self.cap


def call(c: Forward, query, key, value, walks, optional: dict[str, Any], *, interpret: Any = False):
    """The output ``[B, Sq, H, Dv]``, and the lse ``[B, H, blocks · rows]`` of all rows that the blocks have."""
    batch, q_len, heads, _ = query.shape
    blocks = walks.shape[1]
    names = tuple(optional)

    def entry(*refs):
        inputs, (out_ref, lse_ref, *scratch) = refs[: 4 + len(names)], refs[4 + len(names) :]
        _program(c, blocks, *inputs[:4], dict(zip(names, inputs[4:], strict=True)), out_ref, lse_ref, *scratch)

    run = plgpu.kernel(
        entry,
        out_type=(
            jax.ShapeDtypeStruct((batch, q_len, heads, c.value_dim), query.dtype),
            jax.ShapeDtypeStruct((batch, heads, blocks * c.consumers * c.rows), jnp.float32),
        ),
        scratch_types=_scratch(c, query.dtype),
        grid=(heads, blocks, batch),
        grid_names=("head", "block", "batch"),
        num_threads=c.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({"interpret": interpret} if interpret else {}),
    )
    return run(query, key, value, walks, *optional.values())


def _scratch(c: Forward, dtype) -> list[Any]:
    def tile(*shape):
        swizzle = min(128, (shape[-1] * 2) & -(shape[-1] * 2))  # the widest that divides a row
        transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    ring = plgpu.Barrier(num_arrivals=1, num_barriers=c.stages)
    freed = plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages)
    return [
        tile(c.consumers, c.rows, c.dim),
        tile(c.stages, c.step, c.dim),
        tile(c.stages, c.step, c.value_dim),
        tile(c.consumers, c.rows, c.value_dim) if c.value_dim != c.dim else None,
        plgpu.SMEM((c.consumers, c.rows), jnp.float32),
        plgpu.Barrier(num_arrivals=1, num_barriers=c.consumers),
        ring,
        ring,
        freed,
        freed,
        plgpu.Barrier(num_arrivals=c.consumers, num_barriers=1),
        tile(c.consumers, c.rows, c.step) if c.interpreted else None,
    ]


def _program(c: Forward, blocks, q_ref, k_ref, v_ref, walks_ref, optional, out_ref, lse_ref,
             q_smem, k_smem, v_smem, out_smem, lse_smem, q_ready, k_ready, v_ready, k_free, v_free, turn, p_smem):  # fmt: skip
    head, batch = lax.axis_index("head"), lax.axis_index("batch")
    # The last blocks see the most keys where the future is hidden: they go first.
    block = blocks - 1 - lax.axis_index("block")
    warpgroup = lax.axis_index("warpgroup")
    own = batch if walks_ref.shape[0] > 1 else 0
    begin, masked_first, unmasked, masked_last = (walks_ref[own, block, i] for i in range(4))
    steps = masked_first + unmasked + masked_last

    @pl.when(warpgroup == c.consumers)
    def _produce():
        plgpu.set_max_registers(PRODUCER_REGISTERS[c.consumers], action="decrease")
        kv_head = lax.div(head, jnp.int32(c.group))

        def load(i, wait):
            slot = lax.rem(i, jnp.int32(c.stages))
            keys = (batch, pl.ds(begin + i * c.step, c.step), kv_head)
            for source, target, ready, free in ((k_ref, k_smem, k_ready, k_free), (v_ref, v_smem, v_ready, v_free)):
                if wait:
                    plgpu.barrier_wait(free.at[slot])
                plgpu.copy_gmem_to_smem(source.at[keys], target.at[slot], ready.at[slot])

        def first(i, _):
            load(i, wait=False)

        def later(i, _):
            load(i, wait=True)

        head_start = jnp.minimum(steps, c.stages)
        lax.fori_loop(0, head_start, first, None)
        lax.fori_loop(head_start, steps, later, None)

        # Every slot is waited for as often as it was filled, so that no program ends with barriers in flight.
        def drain(i, _):
            slot = lax.rem(i, jnp.int32(c.stages))
            plgpu.barrier_wait(k_free.at[slot])
            plgpu.barrier_wait(v_free.at[slot])

        lax.fori_loop(steps - head_start, steps, drain, None)

    @pl.when(warpgroup < c.consumers)
    def _consume():
        plgpu.set_max_registers(CONSUMER_REGISTERS[c.consumers], action="increase")
        row0 = block * (c.consumers * c.rows) + warpgroup * c.rows
        q_own = q_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[batch, pl.ds(row0, c.rows), head], q_own, q_ready.at[warpgroup])
        plgpu.barrier_wait(q_ready.at[warpgroup])

        by_row = plgpu.Layout.WGMMA.reduce(1)
        top = plgpu.layout_cast(jnp.full((c.rows,), LOWEST, jnp.float32), by_row)
        total = plgpu.layout_cast(jnp.zeros((c.rows,), jnp.float32), by_row)
        acc = plgpu.layout_cast(jnp.zeros((c.rows, c.value_dim), jnp.float32), plgpu.Layout.WGMMA)

        take_turns = c.consumers == 2

        def swap():
            """Let the other have the tensor cores, and wait until they are ours."""
            if take_turns:
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

        def step(i, carry, *, masked: bool):
            acc, top, total = carry
            slot = lax.rem(i, jnp.int32(c.stages))
            plgpu.barrier_wait(k_ready.at[slot])
            s = _scores(c, q_own, k_smem.at[slot], swap)
            plgpu.barrier_arrive(k_free.at[slot])
            s = _logits(c, s)
            if masked:
                s = jnp.where(_visible(c, optional, batch, row0, begin + i * c.step), s, -jnp.inf)
            factor = c.scale * LOG2E if c.folds else 1.0
            new_top = jnp.maximum(top, s.max(axis=1) * factor)
            decay = jnp.exp2(top - new_top)
            p = jnp.exp2(s * factor - lax.broadcast_in_dim(new_top, s.shape, [0]))
            total = total * decay + p.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
            p16 = p.astype(v_smem.dtype)
            acc, total, new_top, p16 = lax.optimization_barrier((acc, total, new_top, p16))
            if take_turns:
                plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_ready.at[slot])
            if take_turns:
                plgpu.barrier_wait(turn)
            acc = _mixed(c, acc, p16, v_smem.at[slot], p_smem if p_smem is None else p_smem.at[warpgroup])
            plgpu.barrier_arrive(v_free.at[slot])
            return acc, new_top, total

        pl.when(warpgroup == 1)(swap)
        carry = acc, top, total
        for count, first, masked, ever in (
            (masked_first, 0, True, c.partial),
            (unmasked, masked_first, False, c.full),
            (masked_last, masked_first + unmasked, True, c.partial),
        ):
            if ever:
                carry = lax.fori_loop(
                    first, first + count, lambda i, x, masked=masked: step(i, x, masked=masked), carry
                )
        pl.when(warpgroup == 0)(swap)
        acc, top, total = carry

        if c.sinks:
            sinks = optional["sinks"]
            sink = sinks[batch if sinks.shape[0] > 1 else 0, head] * LOG2E
            new_top = jnp.maximum(top, sink)
            decay = jnp.exp2(top - new_top)
            acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
            total, top = total * decay + jnp.exp2(sink - new_top), new_top
        some = total > 0
        inverse = jnp.where(some, 1.0 / total, 0.0)
        lse_smem.at[warpgroup][...] = jnp.where(some, top * (1 / LOG2E) + jnp.log(total), -jnp.inf)
        target = (q_smem if out_smem is None else out_smem).at[warpgroup]
        target[...] = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(q_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(target, out_ref.at[batch, pl.ds(row0, c.rows), head])
        plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_ref.at[batch, head, pl.ds(row0, c.rows)])
        plgpu.wait_smem_to_gmem(0)


def _scores(c: Forward, q, k, swap):
    """``[rows, step]``: products of queries and keys."""

    def products(acc):
        plgpu.wgmma(acc, q, k.transpose((1, 0)))
        swap()
        return acc[...]

    return pl.run_scoped(products, plgpu.ACC((c.rows, c.step), jnp.float32))


def _mixed(c: Forward, acc, p16, v, p_smem):
    """``acc + p16 · v``."""
    if not c.interpreted:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, p16, v))(plgpu.ACC.init(acc))
    p_smem[...] = p16
    plgpu.commit_smem()

    def products(ref):
        plgpu.wgmma(ref, p_smem, v)
        return ref[...]

    return acc + pl.run_scoped(products, plgpu.ACC((c.rows, c.value_dim), jnp.float32))


def _logits(c: Forward, s):
    """Logits times log2(e), unless the scale is folded in later."""
    if c.cap:
        return jnp.tanh(s * (c.scale / c.cap)) * (c.cap * LOG2E)
    return s if c.folds else s * (c.scale * LOG2E)


def _visible(c: Forward, optional, batch, row0, column0):
    """``[rows, step]``: which pairs of a step count."""
    shape = (c.rows, c.step)
    column = column0 + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)

    def vector(name, start, size, axis):
        ref = optional[name]
        part = ref.at[batch if ref.shape[0] > 1 else 0, pl.ds(start, size)]
        values = plgpu.load(part, *_WHOLE, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
        return lax.broadcast_in_dim(values, shape, [axis])

    if c.packed:
        seen = (column >= vector("start", row0, c.rows, 0)) & (column < vector("stop", row0, c.rows, 0))
    else:
        seen = column < c.kv_len
        if c.left is not None or c.right is not None:
            row = row0 + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
            if c.left is not None:
                seen &= column >= row + c.left
            if c.right is not None:
                seen &= column < row + c.right
    if c.segments:
        mine = vector("q_ids", row0, c.rows, 0)
        seen &= (mine == vector("kv_ids", column0, c.step, 1)) & (mine > 0)
    return seen
