"""What `tpu_cycles.py` compiles: the calls, ours and the peers', and how often each part of their kernels runs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

OURS = "ejkernel"
LENGTH, HEADS, KV_HEADS = 8192, 32, 8
DIMS = (64, 128, 256)


class Count(NamedTuple):
    """What a row says.

    Attributes:
        cycles: of a unit of work: a query head, some keys, a whole product.
        busy: the share of the cycles in which the matrix units are.
        units: in the call; None where the row is about a part that is no call.
        copied: bytes that the kernel copies for a unit, where they are counted.
        more: further columns.
    """

    cycles: float
    busy: float
    units: int | None = None
    copied: float | None = None
    more: dict[str, float] = {}  # noqa: RUF012 - never changed


@dataclass(frozen=True)
class Cell:
    """A call of one implementation.

    Attributes:
        part: the operation.
        build: from a generation, the function to compile and its arguments, abstract.
        count: from the schedules of its kernels and the generation, what the row says.
        asked: of ours, the operation, its arguments and its options, abstract.
        only: generations for which it is compiled, all if empty.
    """

    part: str
    call: str
    implementation: str
    direction: str
    build: Callable[[Any], tuple[Callable, tuple]]
    count: Callable[[list, Any], Count]
    asked: tuple[str, tuple, dict] | None = None
    only: tuple[str, ...] = ()


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


def weighed(schedule, steps, runs, units=None, copied=None, more=None):
    """Of so many steps of the grid in which each leaf runs so often; a pair says how often a leaf runs, and its loop in all."""
    leaves = schedule.leaves()
    if len(leaves) != len(runs):
        raise LookupError(
            f"{schedule.name} has parts of {[leaf.cycles for leaf in leaves]} cycles, {len(runs)} were expected"
        )
    cycles, busy = steps * schedule.overhead, 0.0
    for leaf, count in zip(leaves, runs, strict=True):
        once, rounds = count if isinstance(count, tuple) else (count, count)
        own = (leaf.cycles - leaf.loop) * once + leaf.loop * rounds
        cycles, busy = cycles + own, busy + leaf.busy.get("MXU", 0) * own
    return Count(cycles, busy / cycles, units, copied, more or {})


# Flash attention, ours


def qkv(dim, value_dim=None, length=LENGTH, heads=HEADS, kv_heads=KV_HEADS):
    return (
        abstract(1, length, heads, dim),
        abstract(1, length, kv_heads, dim),
        abstract(1, length, kv_heads, value_dim or dim),
    )


def steps_of(arrays, options, known, direction):
    """``(plan, kinds of blocks, patterns)`` of a call, as the kernels plan it; ``known``: arrays that decide which blocks meet."""
    import ejkernel
    from ejkernel.kernels._pallas.tpu.flash_attention import plan

    explained = ejkernel.explain(
        "flash_attention", *arrays, **options, gradients=direction == "backward", platform="pallas"
    )
    call = explained.call
    chosen = explained.chosen if direction == "forward" else explained.backward.chosen
    blocks = chosen.params.q_blocksize, chosen.params.kv_blocksize
    shapes = {**call.shapes, **known}
    kinds = plan.block_kinds(shapes, call.spec, *blocks, partial_rows=True)
    kinds, patterns = plan.with_patterns(kinds, shapes, call.spec, *blocks, partial_rows=True)
    return plan, np.asarray(kinds), patterns


def ours(direction, dim, value_dim=None, length=LENGTH, segments=None, **options):
    """The cell of a call of flash_attention. Arrays among the options are abstract; ``segments``: lengths of segments."""
    arrays = qkv(dim, value_dim, length)
    options = {"causal": True, **options}
    known = {}
    if segments:
        ids = np.repeat(np.arange(1, len(segments) + 1, dtype=np.int32), segments)[None]
        known = {"q_segment_ids": jnp.asarray(ids), "kv_segment_ids": jnp.asarray(ids)}
        options |= {name: abstract(*ids.shape, dtype=jnp.int32) for name in known}
    given = {name: x for name, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {name: x for name, x in options.items() if name not in given}

    def build(generation):
        from ejkernel import flash_attention

        def run(given, *arrays):
            return flash_attention(*arrays, **given, **static, platform="pallas")

        def gradients(given, *arrays):
            return gradients_of(functools.partial(run, given))(*arrays)

        return (run if direction == "forward" else gradients), (given, *arrays)

    def count(schedules, generation):
        import ejkernel

        with ejkernel.target(generation.name):
            plan, kinds, patterns = steps_of(arrays, options, known, direction)
        steps = plan.list_steps(kinds)
        found = np.asarray(steps.flags) >> plan.KIND_SHIFT
        each = [plan.WHOLE, plan.MASKED, *(plan.PATTERN + n for n in range(len(patterns)))]
        if known:  # what the device decides has code for all that may come
            each.remove(plan.MASKED)
        else:
            each = [kind for kind in each if (kinds == kind).any()]
        runs = [int((found == kind).sum()) for kind in each]
        majors = kinds.shape[2]
        schedule = named(schedules, f"flash_attention_{direction}")
        if direction == "forward":
            return weighed(schedule, steps.count, [majors, *runs, majors], HEADS)
        # The gradients of the keys are cleared and stored once a key head, in chunks.
        chunks = -(-length // 128)
        of_keys = KV_HEADS / HEADS, chunks * KV_HEADS / HEADS
        return weighed(schedule, steps.count, [of_keys, majors, *runs, majors, of_keys], HEADS)

    return build, count, ("flash_attention", arrays, options)


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
        return weighed(schedule, n * n, [n, n * (n + 1) // 2, n], HEADS)

    return build, count


def tokamax_splash(direction, dim):
    """With the blocks that a search over them found to be the best forward, where they fit; else, and backward, with those that fit."""

    def sizes(generation):
        wide = dim > 128 and generation.mxu == 128  # by default less vector memory may be used there
        return (1024, 1024, 512) if direction == "backward" or wide else (2048, 2048, 512)

    def build(generation):
        from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash
        from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

        layout = splash.QKVLayout
        q, kv, compute = blocks = sizes(generation)
        more = {}
        if direction == "backward":
            more = dict(zip(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), blocks, strict=True))
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
        n = LENGTH // sizes(generation)[0]
        schedule = named(schedules, "splash_mha_fwd" if direction == "forward" else "splash_mha_dkv")
        busy = [leaf for leaf in schedule.leaves() if leaf.busy.get("MXU")]
        small = [leaf for leaf in schedule.leaves() if not leaf.busy.get("MXU")]
        if len(busy) != 2:
            raise LookupError(f"{schedule.name} has {len(busy)} parts with products; two were expected")
        steps = n * (n + 1) // 2
        # Whole blocks, those on the diagonal, and once a block of queries (backward: of keys) its begin and its end. What the
        # partial gradients of queries take that are then summed is not counted.
        runs = {id(busy[0]): steps - n, id(busy[1]): n, **{id(leaf): n for leaf in small}}
        return weighed(schedule, steps, [runs[id(leaf)] for leaf in schedule.leaves()], HEADS)

    return build, count


# What a call may have beside the plain one, of 128 dims and 8192 tokens.
FEATURES = {
    "sinks": {"softmax_aux": abstract(HEADS, 1, dtype=jnp.float32)},
    "one segment": {"segments": (LENGTH,)},
    "segments of 2048": {"segments": (2048,) * 4},
    "soft cap": {"logits_soft_cap": 50.0},
    "dropout": {"dropout_prob": 0.1, "dropout_seed": 0},
    "bias of keys": {"bias": abstract(1, 1, 1, LENGTH)},
    "bias of pairs for all heads": {"bias": abstract(1, 1, LENGTH, LENGTH)},
}
# Their chips are those that calls of every kind are compiled for.
COMMON = ("tpu-v5e", "tpu-v6e")
ROOMY = ("tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7")


def flash_cells():
    """Forward and backward of the three head dims beside the peers, and ours with windows and features."""
    for dim in DIMS:
        for direction in ("forward", "backward"):
            for name, make in ((OURS, ours), ("jax splash", jax_splash), ("tokamax splash", tokamax_splash)):
                yield Cell("flash_attention", f"head dim {dim}", name, direction, *make(direction, dim))
    calls = {
        "head dims 192 and 128": {"dim": 192, "value_dim": 128},
        "head dim 128, length 16384": {"dim": 128, "length": 16384},
        "head dim 128, length 16384, window of 1024": {"dim": 128, "length": 16384, "sliding_window": (1023, 0)},
        **{f"head dim 128, {name}": {"dim": 128, **options} for name, options in FEATURES.items()},
    }
    for direction in ("forward", "backward"):
        for call, options in calls.items():
            yield Cell("flash_attention", call, OURS, direction, *ours(direction, **options), only=COMMON)


# Page attention: what 1024 keys and values of all heads take, while pages are read without a break

SEQUENCES, CONTEXT, KEYS, DIM = 64, 4096, 1024, 128


def paged_arrays(page, dtype, dim):
    """Query, caches with blocks first, lengths and tables of decoding."""
    pages = CONTEXT // page
    cache = abstract(SEQUENCES * pages, KV_HEADS, page, dim, dtype=dtype)
    tables = abstract(SEQUENCES, pages, dtype=jnp.int32)
    return abstract(SEQUENCES, HEADS, dim), cache, cache, abstract(SEQUENCES, dtype=jnp.int32), tables


def of_keys(cycles, keys, item, dim, busy=0.0):
    """The count of a step that takes so many keys of all heads."""
    copied = 2 * KEYS * KV_HEADS * dim * item
    return Count(cycles * KEYS / keys, busy, SEQUENCES * CONTEXT // KEYS, copied)


def inner_loop(schedule, least=0.6):
    """The innermost part that has most of a kernel's cycles."""
    (branch,) = (branch for branch in schedule.branches if branch.cycles > least * schedule.step)
    while inner := [part for part in branch.parts if part.cycles > least * branch.cycles]:
        (branch,) = inner
    return branch


def our_pages(page, dtype, dim):
    arrays = paged_arrays(page, dtype, dim)

    def build(generation):
        from ejkernel import page_attention

        return functools.partial(page_attention, platform="pallas"), arrays

    def count(schedules, generation):
        import ejkernel

        with ejkernel.target(generation.name):
            params = ejkernel.explain("page_attention", *arrays, platform="pallas").chosen.params
        loop = inner_loop(named(schedules, "page_attention"))
        # A step that asks for the next one's pages beside its work, one that does not, and one that is masked.
        products = [part for part in loop.parts if part.busy.get("MXU", 0) > 0.02]
        if len(products) != 3:
            raise LookupError(f"page_attention has {len(products)} parts with products; three were expected")
        cycles = loop.cycles - sum(part.cycles for part in products[1:])
        busy = products[0].busy["MXU"] * products[0].cycles / cycles
        # Where two cores share the heads, each takes a step for its own.
        steps = KV_HEADS // params.blocksize_heads
        return of_keys(cycles * steps, params.kv_blocksize, jnp.dtype(dtype).itemsize, dim, busy)

    return build, count, ("page_attention", arrays, {})


def jax_paged(page, dtype, dim):
    """jax's paged_attention, whose grid has an axis of key heads."""
    block = 2048

    def build(generation):
        from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

        query, cache, _, lengths, tables = paged_arrays(page, dtype, dim)
        cache = abstract(KV_HEADS, cache.shape[0], page, dim, dtype=dtype)
        run = functools.partial(paged_attention, pages_per_compute_block=block // page)
        return run, (query, cache, cache, lengths, tables)

    def count(schedules, generation):
        schedule = named(schedules, "paged_attention")
        # Of the parts one asks for the next block's pages; the others are for the first block.
        cycles = schedule.overhead + max(leaf.cycles for leaf in schedule.leaves())
        return of_keys(cycles * KV_HEADS, block, jnp.dtype(dtype).itemsize, dim)

    return build, count


def jax_ragged_paged(page, dtype, dim):
    """jax's ragged_paged_attention, with the blocks that took the fewest cycles of some that were tried."""
    block, queries = 512, 8

    def build(generation):
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

        query, cache, _, lengths, tables = paged_arrays(page, dtype, dim)
        cache = abstract(cache.shape[0], page, 2 * KV_HEADS, dim, dtype=dtype)
        starts = abstract(SEQUENCES + 1, dtype=jnp.int32)
        run = functools.partial(
            ragged_paged_attention, sm_scale=dim**-0.5, num_kv_pages_per_block=block // page,
            num_queries_per_block=queries, vmem_limit_bytes=64 * 2**20,
        )  # fmt: skip
        return run, (query, cache, lengths, tables, starts, abstract(1, dtype=jnp.int32))

    def count(schedules, generation):
        loop = inner_loop(named(schedules, "ragged_paged_attention"))
        return of_keys(loop.cycles, block, jnp.dtype(dtype).itemsize, dim)

    return build, count


PAGES = (
    *((page, "bfloat16", 128) for page in (16, 32, 128)),
    (64, "int8", 128), (64, "float8_e4m3fn", 128),
    # Tokens as columns: XLA lays these caches out so, and no other kernel takes them as they lie.
    (128, "bfloat16", 64), (128, "bfloat16", 80), (128, "int8", 64), (128, "float8_e4m3fn", 64),
)  # fmt: skip


def page_cells():
    peers = (("jax paged_attention", jax_paged), ("jax ragged_paged_attention", jax_ragged_paged))
    for page, dtype, dim in PAGES:
        dims = "" if dim == DIM else f"head dim {dim}, "
        call = f"decoding, pages of {page}, {dtype}, {dims}1024 keys of 8 heads"
        asked = dtype == "bfloat16" and page > 16 and dim == DIM
        for name, make in ((OURS, our_pages), *(peers if asked else ())):
            yield Cell("page_attention", call, name, "forward", *make(page, jnp.dtype(dtype), dim))


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
        return Count(best.cycles, best.busy["MXU"])

    return count


# Grouped matmul: the whole product, its rows drawn at random from groups that are equally likely

# Rows, contraction, columns, groups.
PRODUCTS = ((8192, 4096, 14336, 8), (32768, 2048, 1536, 64), (32768, 2048, 1536, 128))


def rows_of_groups(m, groups):
    """Bounds of the groups, uneven, at no multiples of anything."""
    sizes = np.random.default_rng(0).multinomial(m, [1 / groups] * groups)
    return np.concatenate([[0], np.cumsum(sizes)])


def visits(bounds, m, size):
    """``(tile's rows, first, end)`` of each pair of a tile and a group with rows in it; the latter two count from its first row."""
    found = []
    for start, stop in itertools.pairwise(bounds):
        for tile in range(start // size, -(-stop // size) if stop > start else 0):
            top = tile * size
            found.append((min(size, m - top), max(start - top, 0), min(stop - top, size)))
    return found


def whole_product(m, k, n, groups):
    arrays = abstract(m, k), abstract(groups, k, n), abstract(groups, dtype=jnp.int32)

    def build(generation):
        from ejkernel import grouped_matmul

        return functools.partial(grouped_matmul, platform="pallas"), arrays

    def count(schedules, generation):
        import ejkernel
        from ejkernel.kernels._pallas.tpu.grouped_matmul.matmul import _Call, _tiles

        with ejkernel.target(generation.name):
            explained = ejkernel.explain("grouped_matmul", *arrays, platform="pallas")
        tiles = _tiles(explained.chosen.params)
        if tiles.k < k:
            raise LookupError(f"the contraction is in parts of {tiles.k}; one was expected")
        strip, fewest = _Call(explained.call.shapes, explained.call.spec).product().strips(tiles, generation)
        met = visits(rows_of_groups(m, groups), m, tiles.m)
        columns = -(-n // tiles.n)
        whole = [visit for visit in met if visit[1:] == (0, visit[0])]
        parted = [visit for visit in met if visit[1:] != (0, visit[0])]
        opened = sum(start == 0 for _, start, _ in parted)
        pieces = sum(-(-end // fewest) - start // fewest for _, start, end in parted)
        runs = [(len(whole), len(whole) * (tiles.m // strip)), opened, (len(parted), pieces)]
        schedule = named(schedules, "grouped_matmul")
        copied = 2 * (columns * m * k + groups * k * n + m * n)
        runs = [tuple(x * columns for x in pair(run)) for run in runs]
        found = weighed(schedule, columns * len(met), runs, 1, copied)
        # What one product of the same sizes would take, and what each tile that is visited once more adds to that.
        leaf = schedule.leaves()[0]
        tile = schedule.overhead + leaf.cycles + leaf.loop * (tiles.m // strip - 1)
        dense, extra = columns * tile * -(-m // tiles.m), columns * tile * (len(met) - -(-m // tiles.m))
        ratios = {"times_the_dense_product": dense, "times_the_dense_product_and_partial_tiles": dense + extra}
        return found._replace(more={name: round(found.cycles / cycles, 3) for name, cycles in ratios.items()})

    return build, count, ("grouped_matmul", arrays, {})


def pair(count):
    return count if isinstance(count, tuple) else (count, count)


def whole_peer(gmm, kernel, m, k, n, groups):
    """Of a kernel with the steps of megablox: a tile of rows and a group, then parts of the contraction."""
    rows, depth, width = MAIN_STEP
    arrays = abstract(m, k), abstract(groups, k, n), abstract(groups, dtype=jnp.int32)

    def count(schedules, generation):
        schedule = named(schedules, kernel)
        met, parts, columns = len(visits(rows_of_groups(m, groups), m, rows)), k // depth, -(-n // width)
        leaves = schedule.leaves()
        products = [leaf for leaf in leaves if leaf.busy.get("MXU")]
        if len(products) != 2:
            raise LookupError(f"{kernel} has {len(products)} parts with products; two were expected")
        # The last part of a contraction, and the ones before it; what clears and stores runs once a visit.
        runs = {id(products[0]): 1, id(products[1]): parts - 1}
        copied = 2 * (met * columns * (rows * k + k * width) + m * n)
        each = [runs.get(id(leaf), 1) * met * columns for leaf in leaves]
        return weighed(schedule, met * columns * parts, each, 1, copied)

    return lambda generation: (gmm(), arrays), count


def whole_megablox(*sizes):
    def gmm():
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

        return functools.partial(gmm, preferred_element_type=jnp.bfloat16, tiling=MAIN_STEP)

    return whole_peer(gmm, "gmm", *sizes)


def whole_tokamax(*sizes):
    def gmm():
        from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu_kernel as kernel

        def run(a, b, sizes):
            return kernel.gmm(a, b, sizes, jax.lax.Precision.DEFAULT, jnp.bfloat16, tiling=MAIN_STEP)

        return run

    return whole_peer(gmm, "ragged_dot_gmm", *sizes)


def grouped_cells():
    for direction in ("forward", "gradient of b"):
        for name, make in ((OURS, grouped), ("megablox", megablox)):
            call = "main step of 512 x 1024 x 1024"
            # v4's vector memory does not hold these tiles: the step would be of smaller ones.
            yield Cell("grouped_matmul", call, name, direction, *make(direction), only=ROOMY)
    for sizes in PRODUCTS:
        call = "{} x {} x {}, {} groups".format(*sizes)
        peers = (OURS, whole_product), ("megablox", whole_megablox), ("tokamax gmm", whole_tokamax)
        for name, make in peers:
            yield Cell("grouped_matmul", call, name, "forward", *make(*sizes))


CELLS = [*flash_cells(), *page_cells(), *grouped_cells()]
