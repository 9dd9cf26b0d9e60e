"""Paged attention and dense decoding in Triton, compiled for the chips we know; what runs where, and who differentiates."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import bound
from triton_launches import PICKED_WITH, Launch, kept_compilations, resources, triton

from ejkernel import Platform, explain, flash_attention, page_attention
from ejkernel.callib.chips import CHIPS
from ejkernel.contracts.device import describe
from ejkernel.kernels._triton import decoding, few_queries
from ejkernel.kernels._triton import page_attention as pages
from ejkernel.kernels._triton.call import interpreting
from ejkernel.kernels._triton.page_plan import plan
from ejkernel.kernels.common.decoding import is_decoding
from ejkernel.kernels.common.query_tiles import Sequences
from ejkernel.ops.page_attention import OPERATION

if interpreting():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

slow = pytest.mark.slow
H200 = "nvidia-h200"
# ptxas puts a pointer or two on the stack rather than lose a resident program: 168 registers where three fit.
TOLERATED = 16
EVERYTHING = {"sliding_window": (300, 0), "logits_soft_cap": 30.0, "sinks": True, "scales": True}


def described(
    page=64, heads=32, kv_heads=8, dim=128, value_dim=None, cache="bfloat16", new=0, dtype="bfloat16", **more
):
    """All arguments of a call of 64 sequences, without data; ``new``: query tokens a sequence if they are packed."""

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    given = {
        "query": array(64 * max(1, new), heads, dim),
        "key_cache": array(4096, kv_heads, page, dim, dtype=cache),
        "value_cache": array(4096, kv_heads, page, value_dim or dim, dtype=cache),
        "context_lens": array(64, dtype="int32"),
        "block_tables": array(64, 64, dtype="int32"),
    }
    if new:
        given["cum_seqlens_q"] = array(65, dtype="int32")
    if more.pop("sinks", False):
        given["softmax_aux"] = array(heads, 1, dtype="float32")
    if more.pop("scales", False):
        given |= {name: array(kv_heads, dtype="float32") for name in ("k_scale", "v_scale")}
    defaults = {n: None if p is inspect.Parameter.empty else p for n, p in OPERATION.defaults.items()}
    return {**defaults, **given, **more}


def recorded(run, *args, **kwargs):
    """The launches that tracing a function makes."""
    made = []

    def record(*args, **kwargs):
        made.append(Launch(*args, **kwargs))
        return [jnp.zeros(like.shape, like.dtype) for like in args[3]]

    original, few_queries.call = few_queries.call, record
    try:
        jax.eval_shape(functools.partial(run, **kwargs), *args)
    finally:
        few_queries.call = original
    return made


def launches(chip, **call):
    """Those of a call with default parameters."""
    bound_call, _ = OPERATION.bound(described(**call))
    device = describe(chip)
    params = pages.TritonPageAttention.defaults(bound_call.shapes, bound_call.spec, device, "forward")
    return recorded(lambda x: pages.forward(x, bound_call.spec, params, device=device), bound_call.shapes)


def too_much(chip, made):
    """What spills, or asks for more shared memory than a block may have."""
    kept_compilations()
    assert made
    found = []
    for launch in made:
        spilled, shared = resources(launch.compiled(CHIPS[chip]))
        spilled = spilled if triton.__version__.startswith(PICKED_WITH) else 0
        if spilled > TOLERATED or shared > CHIPS[chip].shared_memory_per_block:
            tile = (launch.constants.bm, launch.constants.bn, *launch.options.values())
            found.append(f"{launch.kernel.__name__} {tile}: {spilled} spilled, {shared} bytes of shared memory")
    return found


CALLS = {
    "pages of 64": {},
    "chunks": {"new": 512},
    "int8, everything": {"cache": "int8", **EVERYTHING},
}
MORE_CALLS = {
    "pages of 16": {"page": 16},
    "pages of 7": {"page": 7},
    "everything": EVERYTHING,
    "chunks, everything": {"new": 512, **EVERYTHING},
    "few tokens": {"new": 4},
    "64": {"dim": 64, "heads": 64},
    "256": {"dim": 256},
    "256, chunks": {"dim": 256, "new": 512},
    "192/128": {"dim": 192, "value_dim": 128},
    "e4m3": {"cache": "float8_e4m3fn", "scales": True},
    "e5m2": {"cache": "float8_e5m2", "scales": True},
    "int8, 256": {"cache": "int8", "dim": 256},
    "many heads": {"heads": 128, "kv_heads": 1, "dim": 64},
}


@pytest.mark.compiled
@pytest.mark.parametrize("chip", [H200, pytest.param("amd-mi300x", marks=slow)])
@pytest.mark.parametrize("call", [*CALLS, *(pytest.param(name, marks=slow) for name in MORE_CALLS)])
def test_default_tiles_fit(chip, call):
    assert too_much(chip, launches(chip, **{**CALLS, **MORE_CALLS}[call])) == []


@slow
@pytest.mark.compiled
@pytest.mark.parametrize("chip", ["nvidia-a100", "nvidia-b200"])
@pytest.mark.parametrize("call", [*CALLS, "256", "e4m3"])
def test_default_tiles_fit_other_chips(chip, call):
    assert too_much(chip, launches(chip, **{**CALLS, **MORE_CALLS}[call])) == []


@pytest.mark.compiled
@pytest.mark.parametrize(
    "cache", ["int8", pytest.param("float8_e4m3fn", marks=slow), pytest.param("float8_e5m2", marks=slow)]
)
def test_narrow_values_are_widened_in_registers(cache):
    """No step stores widened values into shared memory: what it reads from there are words."""
    kept_compilations()
    (made,) = (launch for launch in launches(H200, cache=cache) if launch.kernel.__name__ == "attend")
    assert made.constants.pairs
    text = made.compiled(CHIPS[H200]).asm["ttgir"]
    keys, words = made.constants.bn, made.constants.bv // 2
    assert re.search(rf"local_load .*memdesc<{keys}x{words}xi16,.*dot_op<{{opIdx = 1", text)
    assert not re.search(rf"local_alloc %\S+ : \(tensor<{keys}x", text)


@pytest.mark.compiled
@pytest.mark.parametrize("tokens", [1, pytest.param(4, marks=slow)])
def test_dense_decoding_fits(tokens):
    call, _ = bound(
        query=jax.ShapeDtypeStruct((32, tokens, 32, 128), "bfloat16"),
        key=jax.ShapeDtypeStruct((32, 8192, 8, 128), "bfloat16"),
        value=jax.ShapeDtypeStruct((32, 8192, 8, 128), "bfloat16"),
        causal=True,
    )
    device = describe(H200)
    assert is_decoding(call.shapes, call.spec)
    params = decoding.defaults(call.shapes, device)
    made = recorded(lambda x: decoding.forward(x, call.spec, params, device), call.shapes)
    # The lengths are known, so nothing plans them on the device.
    assert kernels_of(made) == ["attend", "combine"]
    assert too_much(H200, made) == []


def kernels_of(made):
    return [launch.kernel.__name__.removesuffix("_into") for launch in made]


def test_launches():
    """Decoding plans, computes and joins; chunks have tiles enough for all programs, so none is cut."""
    assert kernels_of(launches(H200)) == ["schedule", "attend", "combine"]
    assert kernels_of(launches(H200, new=4)) == ["attend", "combine"]
    (made,) = launches(H200, new=512)
    assert made.constants.whole
    assert made.constants.bm == 64


def test_what_runs_on_a_gpu():
    arguments = {n: x for n, x in described().items() if hasattr(x, "shape")}
    told = explain(page_attention, **arguments, device=H200, gradients=True)
    assert told.chosen.platform is Platform.TRITON
    (own,) = (c for c in told.backward.candidates if c.platform is Platform.TRITON)
    assert own.verdict == "refused"
    assert "no gradient for query" in "; ".join(own.reasons)
    assert told.backward.chosen.platform is Platform.XLA


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": (100, 0)}, {"logits_soft_cap": 5.0}, {"heads": 8}, {"dim": 256}], ids=str
)
def test_dense_decoding_runs_on_triton_where_pallas_could(options):
    """Also where no table has a row for the call; the backward is still Pallas'."""
    options = dict(options)
    heads, dim = options.pop("heads", 32), options.pop("dim", 128)
    query, key = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((4, 1, heads, dim), (4, 4096, 8, dim)))
    told = explain(flash_attention, query, key, key, device=H200, gradients=True, **options)
    assert told.chosen.platform is Platform.TRITON
    assert told.backward.chosen.platform is Platform.PALLAS
    long = jax.ShapeDtypeStruct((4, 4096, heads, dim), "bfloat16")
    assert explain(flash_attention, long, key, key, device=H200, **options).chosen.platform is Platform.PALLAS


def test_dense_decoding_is_for_few_queries_and_many_keys():
    def serves(q_len=1, kv_len=4096, heads=32, **options):
        arrays = {
            "query": jax.ShapeDtypeStruct((2, q_len, heads, 128), "bfloat16"),
            "key": jax.ShapeDtypeStruct((2, kv_len, 8, 128), "bfloat16"),
            "value": jax.ShapeDtypeStruct((2, kv_len, 8, 128), "bfloat16"),
        }
        call, _ = bound(**arrays, **options)
        return is_decoding(call.shapes, call.spec)

    assert serves()
    assert serves(causal=True)
    assert serves(q_len=16, causal=True)
    assert serves(q_len=4)
    assert serves(sliding_window=(100, 7))
    assert serves(logits_soft_cap=5.0, softmax_aux=jnp.ones((32, 1)))
    assert not serves(q_len=17, causal=True)
    assert not serves(kv_len=256)
    assert not serves(q_len=4, sliding_window=(100, 7))
    assert not serves(dropout_prob=0.1, dropout_seed=1)
    assert not serves(attention_mask=jnp.ones((2, 4096), bool))


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_gives_every_step_to_one_program(seed):
    """Every step of every tile and head exactly once, in shares that are equal but for rounding."""
    rng = np.random.default_rng(seed)
    group, bm, bn, k_heads = int(rng.choice([1, 4, 40])), 16, 32, int(rng.choice([1, 3]))
    counts = rng.integers(0, 30, 9).astype(np.int32)
    lens = (counts + rng.integers(0, 900, 9)).astype(np.int32) * (rng.random(9) < 0.8)
    s = Sequences(
        begin=np.cumsum(counts) - counts,
        count=counts,
        lens=lens.astype(np.int32),
        row=np.arange(9, dtype=np.int32),
        tables=None,
        tokens=int(counts.sum()) + 5,
        packed=True,
    )
    n = few_queries.tile_count(s.tokens, s.size, group, bm, True)
    left = None if seed % 2 else 70
    programs = 17
    made = plan(s, n, programs, k_heads=k_heads, group=group, bm=bm, bn=bn, left=left, causal=True)
    tiles, starts, (share, total) = made.tiles, made.starts, made.header
    steps = tiles[:, 7]
    assert total == steps.sum() * k_heads
    assert total <= share * programs <= total * 1.05 + programs * max(1, steps.max())
    position = np.repeat(np.arange(n), steps * k_heads)
    for program in range(programs):
        begin = program * share
        if begin < total:
            tile, offset = starts[program]
            assert position[begin] == tile
            assert offset == begin - (steps[:tile] * k_heads).sum()
    # Every row of every sequence is in one tile, and its keys are in the tile's steps.
    covered = np.zeros((9, int(counts.max()) * group), int)
    for owner, row, row_stop, _, before, key, key_stop, count in tiles[steps > 0]:
        for r in range(row, min(row + bm, row_stop)):
            covered[owner, r] += 1
            stop = max(0, before + r // group + 1) if lens[owner] else 0
            start = 0 if left is None else max(0, stop - 1 - left)
            assert stop <= start or (key <= start and stop <= min(key_stop, key + count * bn))
    for owner in range(9):
        assert (covered[owner, : counts[owner] * group] == 1).all()
        assert (covered[owner, counts[owner] * group :] == 0).all()
