"""What `tpu_cycles.py` compiles: the calls, ours and the peers', and how often each part of their kernels runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

OURS = "ejkernel"
LENGTH, HEADS, KV_HEADS = 8192, 32, 8
DIMS = (64, 128, 256)


@dataclass(frozen=True)
class Cell:
    """A call of one implementation.

    Attributes:
        part: the operation.
        build: from a generation, the function to compile and its arguments, abstract.
        count: from the schedules of its kernels and the generation, cycles of what the row counts (attention: of one query head)
            and the share of them in which the matrix units are busy.
    """

    part: str
    call: str
    implementation: str
    direction: str
    build: Callable[[Any], tuple[Callable, tuple]]
    count: Callable[[list, Any], tuple[float, float]]


def abstract(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def gradients_of(run):
    """All gradients of the sum of a result."""

    def both(*arrays):
        return jax.grad(lambda *arrays: run(*arrays).astype(jnp.float32).sum(), tuple(range(len(arrays))))(*arrays)

    return both


def named(schedules, name):
    """The schedule of the kernel that was compiled last."""
    found = [schedule for schedule in schedules if name in schedule.name]
    if not found:
        raise LookupError(f"no kernel is named {name!r}: {[schedule.name for schedule in schedules]}")
    return found[-1]


def weighed(schedule, steps, runs):
    """Cycles of so many steps of the grid in which each leaf runs so often, and the matrix units' share of them."""
    leaves = schedule.leaves()
    if len(leaves) != len(runs):
        raise LookupError(
            f"{schedule.name} has parts of {[leaf.cycles for leaf in leaves]} cycles, {len(runs)} were expected"
        )
    cycles = steps * schedule.overhead + sum(leaf.cycles * count for leaf, count in zip(leaves, runs, strict=True))
    busy = sum(leaf.busy.get("MXU", 0) * leaf.cycles * count for leaf, count in zip(leaves, runs, strict=True))
    return cycles, busy / cycles


# Flash attention, ours


def qkv(dim, value_dim=None, length=LENGTH, heads=HEADS, kv_heads=KV_HEADS):
    return (
        abstract(1, length, heads, dim),
        abstract(1, length, kv_heads, dim),
        abstract(1, length, kv_heads, value_dim or dim),
    )


def steps_of(arrays, options, direction):
    """``(kinds of blocks, patterns)`` of a call that is known from shapes and the window, as the kernels plan it."""
    import ejkernel
    from ejkernel.kernels._pallas.tpu.flash_attention import plan

    explained = ejkernel.explain(
        "flash_attention", *arrays, **options, gradients=direction == "backward", platform="pallas"
    )
    call = explained.call
    chosen = explained.chosen if direction == "forward" else explained.backward.chosen
    blocks = chosen.params.q_blocksize, chosen.params.kv_blocksize
    kinds = plan.block_kinds(call.shapes, call.spec, *blocks, partial_rows=True)
    return plan, *plan.with_patterns(kinds, call.shapes, call.spec, *blocks, partial_rows=True)


def ours(direction, dim, value_dim=None, length=LENGTH, **options):
    """The cell of a call of flash_attention whose masks are static."""
    arrays = qkv(dim, value_dim, length)
    options = {"causal": True, **options}

    def build(generation):
        from ejkernel import flash_attention

        run = functools.partial(flash_attention, **options, platform="pallas")
        return (run if direction == "forward" else gradients_of(run)), arrays

    def count(schedules, generation):
        import ejkernel

        with ejkernel.target(generation.name):
            plan, kinds, patterns = steps_of(arrays, options, direction)
        steps = plan.list_steps(kinds)
        found = np.asarray(steps.flags) >> plan.KIND_SHIFT
        each = [
            k
            for k in (plan.WHOLE, plan.MASKED, *(plan.PATTERN + n for n in range(len(patterns))))
            if (kinds == k).any()
        ]
        runs = [int((found == kind).sum()) for kind in each]
        majors = kinds.shape[2]
        schedule = named(schedules, f"flash_attention_{direction}")
        if direction == "forward":
            return weighed(schedule, steps.count, [majors, *runs, majors])
        # The gradients of the keys are cleared and stored once a key head, in chunks.
        of_keys = -(-length // 128) * KV_HEADS / HEADS
        return weighed(schedule, steps.count, [of_keys, majors, *runs, majors, of_keys])

    return build, count


# Their peers


def jax_splash(direction, dim):
    block = 1024

    def build(generation):
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        sizes = splash.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=512,
            block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block, use_fused_bwd_kernel=True,
        )  # fmt: skip
        with jax.ensure_compile_time_eval():
            mask = masks.MultiHeadMask([masks.CausalMask((LENGTH, LENGTH))] * HEADS)
            kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
        arrays = abstract(HEADS, LENGTH, dim), abstract(KV_HEADS, LENGTH, dim), abstract(KV_HEADS, LENGTH, dim)

        def run(*arrays):
            return kernel(*arrays)

        return (run if direction == "forward" else gradients_of(run)), arrays

    def count(schedules, generation):
        n = LENGTH // block
        schedule = named(schedules, "splash_mha_fwd" if direction == "forward" else "splash_mha_dkv")
        # Steps above the diagonal are visited too.
        return weighed(schedule, n * n, [n, n * (n + 1) // 2, n])

    return build, count


def tokamax_splash(direction, dim):
    """With the blocks that a search over them found to be the best forward; backward with those that fit."""
    blocks = {"forward": (2048, 2048, 512), "backward": (1024, 1024, 512)}

    def build(generation):
        from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash
        from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

        layout = splash.QKVLayout
        q, kv, compute = blocks["forward"] if direction == "forward" else (1024, 1024, 512)
        more = {}
        if direction == "backward":
            more = dict(zip(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), blocks["backward"], strict=True))
        config = splash.SplashConfig(
            block_q=q, block_kv=kv, block_kv_compute=compute, q_layout=layout(2), k_layout=layout(1), v_layout=layout(1),
            use_experimental_scheduler=True, **more,
        )  # fmt: skip
        kernel = splash.make_splash_mha_single_device(masks.CausalMask((LENGTH, LENGTH)), config=config)
        arrays = abstract(HEADS, LENGTH, dim), abstract(KV_HEADS, LENGTH, dim), abstract(KV_HEADS, LENGTH, dim)

        def run(*arrays):
            return kernel(*arrays)

        return (run if direction == "forward" else gradients_of(run)), arrays

    def count(schedules, generation):
        n = LENGTH // blocks[direction][0]
        schedule = named(schedules, "splash_mha_fwd" if direction == "forward" else "splash_mha_dkv")
        busy = [leaf for leaf in schedule.leaves() if leaf.busy.get("MXU")]
        small = [leaf for leaf in schedule.leaves() if not leaf.busy.get("MXU")]
        if len(busy) != 2:
            raise LookupError(f"{schedule.name} has {len(busy)} parts with products; two were expected")
        steps = n * (n + 1) // 2
        # Whole blocks, those on the diagonal, and once a block of queries (backward: of keys) its begin and its end. What the
        # partial gradients of queries take that are then summed is not counted.
        runs = {id(busy[0]): steps - n, id(busy[1]): n, **{id(leaf): n for leaf in small}}
        return weighed(schedule, steps, [runs[id(leaf)] for leaf in schedule.leaves()])

    return build, count


def flash_cells():
    """Forward and backward of the three head dims beside the peers, and ours with windows and features."""
    for dim in DIMS:
        for direction in ("forward", "backward"):
            for name, make in ((OURS, ours), ("jax splash", jax_splash), ("tokamax splash", tokamax_splash)):
                yield Cell("flash_attention", f"head dim {dim}", name, direction, *make(direction, dim))
    for direction in ("forward", "backward"):
        yield Cell("flash_attention", "head dims 192 and 128", OURS, direction, *ours(direction, 192, 128))
        yield Cell(
            "flash_attention", "head dim 128, soft cap", OURS, direction, *ours(direction, 128, logits_soft_cap=50.0)
        )
        long = {"length": 16384, "sliding_window": (1023, 0)}
        yield Cell(
            "flash_attention",
            "head dim 128, length 16384, window of 1024",
            OURS,
            direction,
            *ours(direction, 128, **long),
        )
        yield Cell(
            "flash_attention", "head dim 128, length 16384", OURS, direction, *ours(direction, 128, length=16384)
        )


# Grouped matmul: the step that adds to a tile of the result, all with the same tiles

GROUPED = (8192, 4096, 14336)
GROUPS = 8
MAIN_STEP = (512, 1024, 1024)


def grouped(direction):
    m, k, n = GROUPED
    arrays = abstract(m, k), abstract(GROUPS, k, n), abstract(GROUPS, dtype=jnp.int32)
    tiles = dict(zip(("blocksize_m", "blocksize_k", "blocksize_n"), MAIN_STEP, strict=True))

    def build(generation):
        from ejkernel import BwdParams, FwdParams, grouped_matmul, overlay

        def forward(a, b, sizes):
            with overlay(grouped_matmul=(FwdParams(**tiles), BwdParams(**tiles))):
                return grouped_matmul(a, b, sizes, platform="pallas")

        def weights(a, b, sizes, cotangent):
            return jax.vjp(lambda b: forward(a, b, sizes), b)[1](cotangent)

        return (forward, arrays) if direction == "forward" else (weights, (*arrays, abstract(m, n)))

    return build, main_step("grouped_matmul" if direction == "forward" else "grouped_matmul_gradient_b")


def megablox(direction):
    m, k, n = GROUPED

    def build(generation):
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

        common = {"preferred_element_type": jnp.bfloat16, "tiling": MAIN_STEP}
        sizes = abstract(GROUPS, dtype=jnp.int32)
        if direction == "forward":
            return functools.partial(gmm, **common), (abstract(m, k), abstract(GROUPS, k, n), sizes)
        return functools.partial(tgmm, **common), (abstract(k, m), abstract(m, n), sizes)

    return build, main_step("gmm")


def main_step(name):
    """Of the part with the most of its time in products: its cycles and the matrix units' share of them."""

    def count(schedules, generation):
        products = [leaf for leaf in named(schedules, name).leaves() if leaf.busy.get("MXU", 0) > 0.5]
        if not products:
            raise LookupError(f"no part of {name} is made of products")
        best = max(products, key=lambda leaf: leaf.busy["MXU"])
        return best.cycles, best.busy["MXU"]

    return count


def grouped_cells():
    for direction in ("forward", "gradient of b"):
        for name, make in ((OURS, grouped), ("megablox", megablox)):
            call = "main step of 512 x 1024 x 1024"
            yield Cell("grouped_matmul", call, name, direction, *make(direction))


CELLS = [*flash_cells(), *grouped_cells()]
