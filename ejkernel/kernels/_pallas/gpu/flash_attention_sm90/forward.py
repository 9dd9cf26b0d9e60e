"""The forward on the host: the plan of a call, the launch of its kernel, and the roles of a CTA.

A CTA computes a block of queries of one head; each consumer warpgroup owns 64 of its rows. The producer, a warp, loops
over the keys that the block needs and copies them by TMA into a ring of ``stages`` slots. A consumer is half a step
ahead of itself, and a slot holds what it needs at once, a step's keys and the values of the one before:

    start S = Q·Kᵀ of this step, start O += P·V of the step before
    wait for S; P = softmax(S) in registers, while P·V runs
    wait for O; rescale it where the softmax reference was updated

Every barrier has one meaning. ``ready``: a slot holds its keys and values. ``k_free`` and ``v_free``: all consumers
have read those. ``q_ready``: a consumer's queries are there. ``q_free``: it has read them. ``ping_pong``: a consumer
may start its products; two consumers that alternate do their softmax at different times, so that the tensor cores
always have work. ``loaded``: values are there of which some are padding, for the producer, which puts zeros in their
place.

A persistent kernel has one CTA per multiprocessor, which takes blocks from a queue: the producer copies the next
block's queries and keys while consumers end the last. Which block is next is in ``Shared.item``.

A speculative block keeps the softmax reference of its first steps and takes no more maxima. A consumer whose sums then
exceed a limit sets its retry flag (``Shared.retry``) before it arrives at ``q_free``; the producer then copies the same
keys again instead of the next block's, and all consumers compute the block once more, with a lazily updated running
maximum, and so the CTA's later blocks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.contracts.params import FwdParams
from ejkernel.kernels._pallas.gpu.flash_attention_sm90 import forward_consumer, forward_producer
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.forward_state import (
    Context,
    ForwardConfig,
    QueryBlock,
    Shared,
    shared_memory,
    unit_of,
)
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.padding import without_padding
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.pairs import pair_arrays, word_size
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.parameters import forward_effective, narrow
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import (
    CORE_ROWS,
    ROWS,
    WARPS_PER_WARPGROUP,
    has_whole_rows,
    key_intervals,
    longest_first,
    mask_vectors,
    segment_ids,
    statics,
)
from ejkernel.kernels.common import visibility
from ejkernel.kernels.common.varying import vary_as, varying_axes

# CTAs of a persistent kernel, at most: the multiprocessors of the largest Hopper. On a smaller one the last of them
# start when others are done, and find the queue empty.
CTAS = 132
# Steps from which on blocks are computed speculatively. Until it is known whether a block must be repeated, the next one's
# first keys cannot be copied: short blocks would wait longer for those than they save.
SPECULATIVE_STEPS = 16
# By consumers. Four warpgroups of 128 threads share 65536 registers.
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}
PRODUCER_REGISTERS = {1: 24, 2: 24, 3: 32}


def forward(arrays: dict[str, Array], spec: Any, params: FwdParams, *, interpret: Any = False) -> tuple[Array, Array]:
    """Attention output ``[B, Sq, H, Dv]`` and the lse of its logits ``[B, H, Sq]``; ``interpret``: without a GPU."""
    small = narrow(arrays["query"].shape[3], arrays["value"].shape[3])
    # With wide heads the kernel has no registers left to put zeros where padding is.
    arrays, _ = without_padding(arrays, spec, backward=False, by_kernel=small)
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    q_len, kv_len = query.shape[1], key.shape[1]
    params = forward_effective(params, query.shape[3], value.shape[3])
    block, step = params.q_blocksize, params.kv_blocksize
    consumers = params.num_warps // WARPS_PER_WARPGROUP
    table, (head, full, tail), most_steps = _step_table(arrays, spec, block, step)
    # Vectors are read in whole blocks, past the last row too.
    ends = table.shape[1] * block, kv_len + step
    of_call = statics(arrays, spec)
    unit = unit_of(of_call["scale"], of_call["cap"])
    of_pairs = pair_arrays(arrays, *ends, word_size(step), copy=bool(interpret), unit=unit)
    optional = {**mask_vectors(arrays, *ends), **of_pairs}
    if "padding" in arrays:
        optional["padded"] = any_in_step(optional["padding"], step)
    if "softmax_aux" in arrays:
        optional["sinks"] = arrays["softmax_aux"]
    c = ForwardConfig(
        consumers=consumers,
        step=step,
        stages=params.num_stages,
        # Two consumers alternate between products and softmax. Three overlap without; so do two if one part is much
        # longer: the products of wide heads, the softmax with a cap.
        ping_pong=consumers == 2 and small and not spec.logits_soft_cap,
        **of_call,
        sinks="softmax_aux" in arrays,
        # What wide heads leave of registers is too little for a loop over blocks beside these.
        persistent=small or not {"q_segment_ids", "bias", "attention_mask", "dropout_key"} & arrays.keys(),
        clears="padding" in arrays,
        # Float16 weights above 1 may overflow. With a bias a row's first logits say little of the later ones.
        speculative=small and value.dtype == jnp.bfloat16 and "bias" not in arrays and most_steps >= SPECULATIVE_STEPS,
        head=head,
        full=full,
        tail=tail,
        whole_rows=has_whole_rows(q_len, kv_len),
        interpreted=bool(interpret),
    )
    out, lse = call(c, query, key, value, table, optional, interpret=interpret)
    return out, lse[..., :q_len]


def any_in_step(flags: Array, step: int) -> Array:
    """Whether there is a flag in the step that begins at every eighth key: ``[B, keys / 8]``."""
    eights = jnp.pad(flags, ((0, 0), (0, -flags.shape[1] % CORE_ROWS))).reshape(flags.shape[0], -1, CORE_ROWS).max(2)
    window = step // CORE_ROWS
    return lax.reduce_window(eights, np.int32(0), lax.max, (1, window), (1, 1), ((0, 0), (0, window - 1)))


def _step_table(arrays: dict[str, Array], spec: Any, block: int, step: int) -> tuple[Array, list[bool], int]:
    """The steps of all blocks of queries; whether any has masked steps at first, unmasked ones, masked ones at last.

    And how many steps a block has at most, as far as is known without data.
    """
    start, stop = key_intervals(arrays, spec)
    ranges = visibility.key_ranges(start, stop, segment_ids(arrays), block, arrays["key"].shape[1], shifted=False)
    # A step of a mask begins with a whole word of it.
    unit = word_size(step) if "attention_mask" in arrays else CORE_ROWS
    plan = visibility.plan_walk(ranges._replace(begin=ranges.begin // unit * unit), step, 1, False)
    plan = complete(plan)
    counts = plan.head, plan.full, plan.tail
    static = isinstance(plan.head, np.ndarray)
    most = int(sum(counts).max()) if static else -(-arrays["key"].shape[1] // step)
    return longest_first(plan), [not isinstance(x, np.ndarray) or bool(x.any()) for x in counts], most


def complete(plan: visibility.Walk) -> visibility.Walk:
    """A plan with what the kernel requires: a step for every block, and none unmasked before all rows have started."""
    # A block without a key has one step that it does not see: its rows are written like all others.
    none = plan.head + plan.full + plan.tail == 0
    plan = plan._replace(begin=plan.begin * ~none, tail=plan.tail + none)
    # A row may start at the very first key after the masked steps: with one more of them, all rows have started.
    more = (plan.head > 0) * 1
    full = more * (plan.full > 0)
    tail = (more - full) * (plan.tail > 0)
    return plan._replace(head=plan.head + full + tail, full=plan.full - full, tail=plan.tail - tail)


def call(c: ForwardConfig, query, key, value, table, optional: dict[str, Any], *, interpret: Any = False):
    """The output ``[B, Sq, H, Dv]``, and the lse ``[B, H, blocks · rows]`` of all rows that the blocks have.

    ``table``: see ``longest_first``; no block has fewer than one step.
    """
    batch, q_len, heads, _ = query.shape
    blocks = table.shape[1]
    results = (
        jax.ShapeDtypeStruct((batch, q_len, heads, c.value_dim), query.dtype),
        jax.ShapeDtypeStruct((batch, heads, blocks * c.consumers * ROWS), jnp.float32),
    )
    # The last axis is the fastest: blocks of a head, which read the same keys, are computed at the same time.
    grid = {"head": heads, "block": blocks, "batch": batch}
    return launch(c, (query, key, value, table), optional, results, grid, QueryBlock, interpret=interpret)


def launch(
    c: ForwardConfig,
    arrays: tuple[Array, ...],
    optional: dict[str, Any],
    results: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct],
    grid: dict[str, int],
    block_type: type[QueryBlock],
    *,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Output and lse from queries, keys, values and the table of all blocks.

    ``grid``: where there is no queue, the CTAs, one for each block.
    """
    # A kernel for warps cannot be traced where ``shard_map`` checks over which axes values vary, and blocks are taken
    # by a warp.
    warps = not c.interpreted and not varying_axes(*arrays[:3])
    persistent = c.persistent and (warps or c.interpreted)
    c = dataclasses.replace(c, warps=warps, persistent=persistent, speculative=c.speculative and persistent)
    items = math.prod(grid.values())
    if persistent:
        grid = {"cta": min(CTAS, items)}
    names = tuple(optional)
    inputs = len(arrays) + len(names)

    def entry(*refs):
        of_call = dict(zip(names, refs[len(arrays) : inputs], strict=True))
        out_ref, lse_ref, *scratch = refs[inputs:]
        _cta(Context(c, Shared(*scratch), *refs[: len(arrays)], of_call, out_ref, lse_ref, block_type, items))

    run = plgpu.kernel(
        entry,
        out_type=results,
        scratch_types=list(shared_memory(c, arrays[0].dtype)),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=c.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({"interpret": interpret} if interpret else {}),
    )
    return vary_as(run(*arrays, *optional.values()), arrays[0])


def _cta(ctx: Context):
    """The roles of one CTA."""
    c, shared = ctx.c, ctx.shared
    warpgroup = lax.axis_index("warpgroup")
    counter = pl.get_global(plgpu.SemaphoreType.REGULAR) if c.persistent and not c.interpreted else None

    @pl.when(warpgroup == c.consumers)
    def _producer():
        plgpu.set_max_registers(PRODUCER_REGISTERS[c.consumers], action="decrease")
        # Before jax 0.11 a warp does not know the grid.
        block = None if c.persistent else ctx.block()

        def produce():
            if c.persistent:
                forward_producer.produce_all(ctx, counter)
            else:
                forward_producer.drain(ctx, forward_producer.produce(ctx, block, jnp.int32(0)))

        if c.warps:
            mesh = plgpu.WarpMesh(axis_name="warp")
            pl.kernel(lambda: pl.when(lax.axis_index("warp") == 0)(produce), mesh=mesh)()
        else:
            produce()

    @pl.when(warpgroup < c.consumers)
    def _consumer():
        plgpu.set_max_registers(CONSUMER_REGISTERS[c.consumers], action="increase")
        if c.ping_pong:
            pl.when(warpgroup == c.consumers - 1)(lambda: plgpu.barrier_arrive(shared.ping_pong.at[0]))
        if c.persistent:
            forward_consumer.consume_all(ctx, warpgroup)
        else:
            block = ctx.block()
            forward_producer.load_queries(ctx, block, warpgroup)
            plgpu.barrier_wait(shared.q_ready.at[warpgroup])
            forward_consumer.consume(ctx, block, warpgroup, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
        if c.ping_pong:
            # The last consumer's last arrival, which no product waits for.
            pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(shared.ping_pong.at[0]))
