"""The backward of wide heads, what its two kernels share: one has a block of queries, one a block of keys.

The accumulators of dK and dV leave a CTA no registers for dQ's, so the scores and their gradients are computed twice:
seven products a pair of blocks instead of five, nothing is added in global memory, and every run gives the same bits.

    queries:  S = Q·Kᵀ    dP = dO·Vᵀ    dS = P ∘ (dP - slope)    dQ += dS·K      two warpgroups, 64 queries each
    keys:     Sᵀ = K·Qᵀ   Pᵀ            dV += Pᵀ·dO                              one warpgroup
              dPᵀ = V·dOᵀ               dSᵀ = Pᵀ ∘ (dPᵀ - slope)  dK += dSᵀ·Q    another, with Pᵀ from the first

A tile of 64 rows is split into *parts* of up to 128 columns, and a ring has slots for parts: a slot is filled again as
soon as the products that read it are over, not when those of its whole tile are. A warpgroup's last product of a step
and its first ones of the next form one *burst*. In the kernel for keys the ``ping_pong`` barriers let one warpgroup's
burst run while the other computes its exponentials; in that for queries both do the same, and are faster without. Every
other barrier has one meaning: ``ready`` says that a slot holds data, ``free`` that all have read it.

The second warpgroup's dS is rounded, so its Pᵀ should not be: it comes in float16, which has 3 bits more than bfloat16.
The smallest weights would be lost there; so all are 2**weight_exponent times as large, by an lse that is lower by that;
the results are divided by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.pairs import Tile
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import (
    BACKWARD_CONSUMERS,
    ROWS,
    SHARED_MEMORY,
    KernelConfig,
)
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import WHOLE, opaque_zero, transforms
from ejkernel.kernels.common.softmax import LOG2E
from ejkernel.kernels.common.varying import vary_as

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
# Bytes that barriers take.
RESERVED = 1024


@dataclass(frozen=True, kw_only=True)
class WideConfig(KernelConfig):
    """Everything static about one of the two kernels.

    Attributes:
        unmasked, masked: whether any step is without a mask, whether any has one.
        weight_exponent: weights are multiplied by two to this power.
    """

    unmasked: bool
    masked: bool
    weight_exponent: int

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
        """Slots for keys and for values, beside a block's queries and dO; keys are read over two steps."""
        own = BACKWARD_CONSUMERS * (self.parts + self.value_parts) * self._part_size
        return self._slots(own, (2 * self.parts, self.value_parts))

    @property
    def key_slots(self) -> tuple[int, int]:
        """Slots for queries and for dO, beside a block's keys and values, two P, vectors; both read over two steps."""
        own = 2 * max(self.parts, self.value_parts) * self._part_size + 2 * 2 * ROWS * ROWS + 4 * 4 * ROWS
        return self._slots(own, (2 * self.parts, 2 * self.value_parts))

    @property
    def _part_size(self) -> int:
        return 2 * ROWS * self.part

    def _slots(self, own: int, least: tuple[int, int]) -> tuple[int, int]:
        """What the rings need, and what fits beside ``own`` bytes, divided evenly, up to two more tiles each."""
        spare = (SHARED_MEMORY - RESERVED - own) // self._part_size - sum(least)
        more = min(spare - spare // 2, 2 * self.parts)
        return least[0] + more, least[1] + min(spare - more, 2 * self.value_parts)


def launch(entry, inputs, optional: dict[str, Any], grid, out_type, scratch, interpret):
    """Run ``entry(inputs, optional, *outputs, *scratch)``."""
    optional = {**optional, "places": jnp.arange(2 * ROWS, dtype=jnp.int32)[None]}
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
        num_threads=BACKWARD_CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({"interpret": interpret} if interpret else {}),
    )
    return vary_as(run(*inputs, *optional.values()), inputs[0])


def tile(dtype, *shape):
    """A type of shared memory."""
    return plgpu.SMEM(shape, dtype, transforms=transforms(shape[-1]))


def rem(i, n: int):
    """``i`` modulo ``n``."""
    return lax.rem(i, jnp.int32(n))


class Ring:
    """Slots for parts of tiles, their barriers, and how many parts a tile has."""

    def __init__(self, smem, ready, free, parts: int):
        self.smem, self.ready, self.free, self.parts, self.slots = smem, ready, free, parts, smem.shape[0]

    @staticmethod
    def scratch(c: WideConfig, slots: int, dtype) -> list[Any]:
        """Its shared memory and barriers."""
        return [
            tile(dtype, slots, ROWS, c.part),
            plgpu.Barrier(num_arrivals=1, num_barriers=slots),
            plgpu.Barrier(num_arrivals=BACKWARD_CONSUMERS, num_barriers=slots),
        ]

    def slot(self, t, p: int):
        """Where part ``p`` of the tile of step ``t`` goes."""
        return rem(t * self.parts + p, self.slots)

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
        """Release the tile of step ``t - 1`` as its products end; ``behind`` groups were started after them."""
        for p in range(self.parts):
            plgpu.wgmma_wait(self.parts - 1 - p + behind)
            pl.when(t > 0)(lambda p=p: self.release(t - 1, p))

    def drain(self, steps):
        """Wait until everything is read, so that no CTA ends with barriers in flight."""
        filled = steps * self.parts
        drain(filled, self.slots, lambda i: self.free.at[rem(i, self.slots)])


def drain(filled, slots: int, free):
    """Wait for the last arrivals at ``free(i)``, of slots that were filled ``filled`` times in turn."""

    def one(i, _):
        plgpu.barrier_wait(free(i))

    lax.fori_loop(jnp.maximum(filled - slots, 0), filled, one, None)


class BlockLoop:
    """A CTA's block and its loop over steps; what it reads is read where it is used, for registers are scarce."""

    def __init__(self, c: WideConfig, table, batch):
        self.c, self._table = c, table
        self._at = (batch if table.shape[0] > 1 else 0, lax.axis_index("block"))

    def _read(self, i: int):
        return self._table[(*self._at, i)]

    @property
    def index(self):
        """Which block it is."""
        return self._read(4)

    @property
    def begin(self):
        """The first row of its first step."""
        return self._read(0)

    @property
    def steps(self):
        """How many there are."""
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


def score(acc, left, ring: Ring, t, after_first=lambda: None):
    """``acc += left · tileᵀ`` part by part, in flight."""
    # Without the zero ptxas would keep all descriptors of an operand that stays where it is in registers over the loop.
    zero = opaque_zero(t)
    for p in range(ring.parts):
        plgpu.wgmma(acc, left.at[zero + p], ring.wait(t, p).transpose((1, 0)))
        if p == 0:
            after_first()


def add(c: WideConfig, accs, left, part, left_smem):
    """``accs[p] += left · part(p)``, in flight."""
    if c.interpreted:
        left_smem[...] = left
        plgpu.commit_smem()
        left = left_smem
    for p, acc in enumerate(accs):
        plgpu.wgmma(acc, left, part(p))


def accumulators(c: WideConfig, width: int):
    """The types of a row of parts, ``width`` columns in all."""
    return [plgpu.ACC((ROWS, c.part), jnp.float32) for _ in range(width // c.part)]


SCORES = plgpu.ACC((ROWS, ROWS), jnp.float32)


def softmax_weights(c: WideConfig, s, lse, masked, where: Tile):
    """The weights, and what (dP - slope) is multiplied by for the gradient of the logits; masked scores are -inf.

    Both are marked where dropout has zeros, see ``pairs.drop``.
    """
    capped = jnp.tanh(s * (c.scale / c.cap)) if c.cap else None
    if c.bias or c.mask:
        logits = where.biased(capped * c.cap if c.cap else s * c.scale) * LOG2E
    else:
        logits = capped * (c.cap * LOG2E) if c.cap else s * (c.scale * LOG2E)
    p = jnp.exp2(logits - lse)
    if masked is not False and (c.cap or c.scale <= 0):
        p = jnp.where(s == -jnp.inf, 0.0, p)
    if c.dropout:
        p = where.dropped(p, mark=True)
    return p, p * (1.0 - capped * capped) if c.cap else p


def mask_accumulator(c: WideConfig, acc, masked, seen):
    """Start the scores at -inf where a pair does not count: products leave that, and registers are free then."""

    def mask():
        acc[...] = jnp.where(seen(), np.float32(0), np.float32(-np.inf))

    if masked is not False and not c.interpreted:
        mask() if masked is True else pl.when(masked)(mask)


def scores(c: WideConfig, acc, masked, seen):
    """The scores; the interpreter cannot write to accumulators and masks here."""
    s = plgpu.wgmma_accumulator_load(acc, wait_n=0)
    if masked is not False and c.interpreted:
        s = jnp.where(seen() | ~jnp.asarray(masked), s, -jnp.inf)
    return s


def load_vector(ref, axis: int):
    """A vector along ``axis`` of ``[64, 64]`` in the layout of products."""
    values = plgpu.load(ref, *WHOLE, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
    return lax.broadcast_in_dim(values, (ROWS, ROWS), [axis])


def visible(c: WideConfig, optional, batch, t, query0, key0, query_axis: int):
    """``[64, 64]``: which pairs of step ``t`` count."""

    def vector(name, start, axis):
        ref = optional[name]
        return load_vector(ref.at[batch if ref.shape[0] > 1 else 0, pl.ds(start, ROWS)], axis)

    def position(start, axis):
        # Loaded: what ptxas computes it keeps in registers over the loop.
        return start + vector("places", opaque_zero(t), axis)

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


def part_columns(c: WideConfig, width: int):
    """The columns of each part."""
    return [pl.ds(column, c.part) for column in range(0, width, c.part)]


def store(c: WideConfig, accs, factor: float, smem, ref, where):
    """Accumulators times ``factor``, by way of ``smem``, to ``ref``."""
    for p, acc in enumerate(accs):
        smem.at[p][...] = (plgpu.wgmma_accumulator_load(acc, wait_n=0) * factor).astype(smem.dtype)
    plgpu.commit_smem()
    for p, columns in enumerate(part_columns(c, ref.shape[3])):
        plgpu.copy_smem_to_gmem(smem.at[p], ref.at[(*where, columns)])
    plgpu.wait_smem_to_gmem(0)
