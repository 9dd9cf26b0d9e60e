"""Flash attention in Pallas Mosaic GPU: in JAX's interpreter, compiled for Hopper without one, and on a GPU."""

import dataclasses
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import bound, tries
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from lanes import crossed, some
from tolerances import assert_close

from ejkernel import FwdParams, explain, flash_attention, kernel_registry
from ejkernel.kernels._pallas.gpu.flash_attention_sm90 import forward as mosaic
from ejkernel.kernels._pallas.gpu.flash_attention_sm90 import forward_consumer, parameters
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.attention import PallasFlashAttention
from ejkernel.kernels.common import unseen
from ejkernel.kernels.common.intervals import intervals

JAX = tuple(int(part) for part in jax.__version__.split(".")[:2])
OPERATION = kernel_registry.operation("flash_attention")
X = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
H200 = {"device": "nvidia-h200", "platform": "pallas"}


def inputs(batch=1, q_len=160, kv_len=160, heads=2, kv_heads=1, dim=64, value_dim=None, dtype="bfloat16", sharp=1.0):
    """``sharp``: by how much larger queries of the last head are."""
    rng = np.random.default_rng(q_len + kv_len + dim)
    shapes = (batch, q_len, heads, dim), (batch, kv_len, kv_heads, dim), (batch, kv_len, kv_heads, value_dim or dim)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    arrays[0][:, :, -1] *= sharp
    return [jnp.asarray(x, dtype) for x in arrays]


IDS = np.repeat([[1, 2, 0, 3]], 1, 0).repeat([50, 30, 20, 60], 1).astype(np.int32)
ONE_A_FEATURE = (
    "plain",
    "causal",
    "more keys",
    "window",
    "soft cap",
    "sinks",
    "segments",
    "packed",
    "float16",
    "value dim",
    "head dim 72",
)
LONELY = np.repeat([[7, 1]], 1, 0).repeat([130, 30], 1).astype(np.int32)
CUTS = np.array([0, 70, 70, 150], np.int32)
CALLS = {
    "plain": ({}, {}),
    "causal": ({}, {"causal": True}),
    "more keys": ({"q_len": 90, "kv_len": 333, "batch": 2}, {"causal": True}),
    "more queries": ({"q_len": 203, "kv_len": 75}, {"causal": True}),
    "short": ({"q_len": 1, "kv_len": 9}, {}),
    "window": ({"kv_heads": 2}, {"causal": True, "sliding_window": (40, 0)}),
    "two-sided window": ({}, {"sliding_window": (20, 33)}),
    "soft cap": ({}, {"causal": True, "logits_soft_cap": 2.0}),
    "negative scale": ({}, {"softmax_scale": -0.2}),
    "no scale": ({}, {"causal": True, "softmax_scale": 0.0}),
    "sinks": ({}, {"causal": True, "softmax_aux": np.array([[0.5], [2.0]], np.float32)}),
    "high sinks": (
        {"q_len": 203, "kv_len": 75},
        {"causal": True, "softmax_aux": np.array([[60.0], [-60.0]], np.float32)},
    ),
    "segments": ({}, {"causal": True, "q_segment_ids": IDS, "kv_segment_ids": IDS}),
    "segments without keys": ({}, {"q_segment_ids": LONELY, "kv_segment_ids": np.ones_like(LONELY)}),
    "packed": ({}, {"causal": True, "cum_seqlens_q": CUTS, "cum_seqlens_k": CUTS}),
    "sharp": ({"q_len": 200, "kv_len": 395, "sharp": 30.0}, {"causal": True}),
    "float16": ({"dtype": "float16"}, {"causal": True}),
    "head dim 32": ({"dim": 32}, {"causal": True}),
    "head dim 96": ({"dim": 96}, {"causal": True}),
    "head dim 224": ({"dim": 224}, {"causal": True}),
    "head dim 72": ({"dim": 72, "q_len": 203, "kv_len": 139}, {}),
    "head dim 80": ({"dim": 80}, {"causal": True, "q_segment_ids": IDS, "kv_segment_ids": IDS}),
    "head dim 248": ({"dim": 248}, {"causal": True}),
    "narrow dims": ({"dim": 8, "value_dim": 24}, {"causal": True}),
    "panels of keys alone": ({"dim": 72, "value_dim": 64}, {"causal": True, "logits_soft_cap": 2.0}),
    "panels of values alone": ({"dim": 64, "value_dim": 112, "dtype": "float16"}, {"causal": True}),
    "value dim": ({"dim": 192, "value_dim": 128}, {"causal": True}),
    "narrower value dim": ({"dim": 160, "value_dim": 32}, {"causal": True}),
    "wider value dim": ({"dim": 64, "value_dim": 128, "dtype": "float16"}, {"causal": True}),
}


def tile_of(*sizes):
    names = "q_blocksize", "kv_blocksize", "num_warps", "num_stages"
    return FwdParams(**dict(zip(names, sizes, strict=True)))


def prepare(query, key, value, options):
    """What the operation gives an implementation."""
    options = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    call, _ = bound(query, key, value, **options)
    arguments = OPERATION.signature.bind(query, key, value, **options)
    arguments.apply_defaults()
    return OPERATION.prepare(OPERATION.normalise(dict(arguments.arguments)), call.spec), call.spec


def run(arrays, options, params=None, **more):
    """The kernel itself."""
    prepared, spec = prepare(*arrays, options)
    params = params or PallasFlashAttention.defaults(prepared, spec, None, "forward")
    return mosaic.forward(prepared, spec, params, **more)


def check(arrays, options, found):
    out, lse = found
    exact = [np.asarray(x, np.float64) for x in arrays]
    expected, expected_lse = oracle.attention(*exact, **options)
    assert_close(out, expected, str(out.dtype), what="out")
    assert_close(lse, expected_lse, "bfloat16", what="lse")


def interpreted(arrays, options, params, capfd):
    """In JAX's interpreter, with race detection, against float64."""
    if JAX < (0, 11):
        pytest.skip("jax has no interpreter of Mosaic GPU before 0.11")
    import jax.experimental.pallas.mosaic_gpu as plgpu

    found = run(arrays, options, params, interpret=plgpu.InterpretGPUParams(detect_races=True))
    check(arrays, options, jax.block_until_ready(found))
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(CALLS, *ONE_A_FEATURE))
def test_interpreted(name, capfd):
    shape, options = CALLS[name]
    interpreted(inputs(**shape), options, FwdParams(q_blocksize=128, kv_blocksize=64, num_warps=8, num_stages=2), capfd)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "tile",
    some([(64, 64, 4, 3), (192, 64, 12, 3), (192, 16, 12, 2), (128, 80, 8, 2), (128, 160, 8, 2)], (192, 64, 12, 3)),
)
def test_interpreted_with_other_tiles(tile, capfd):
    interpreted(inputs(q_len=200, kv_len=395), {"causal": True}, tile_of(*tile), capfd)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("tile", "name"),
    crossed(
        [(128, 64, 8, 2), (192, 48, 12, 3)],
        ["plain", "causal", "more keys", "window", "soft cap", "high sinks", "segments", "packed"],
        short=lambda tile, name: tile == (128, 64, 8, 2) and name in ("causal", "segments"),
        again=lambda tile, name: tile == (192, 48, 12, 3) and name not in ("causal", "segments"),
    ),
)
@pytest.mark.parametrize("speculative", some([False, True], False))
def test_a_persistent_cta_computes_several_blocks(name, tile, speculative, capfd, monkeypatch):
    """There is one for each multiprocessor; of two, each has several blocks."""
    monkeypatch.setattr(mosaic, "CTAS", 2)
    monkeypatch.setattr(mosaic, "SPECULATIVE_STEPS", 0 if speculative else 1000)
    shape, options = CALLS[name]
    interpreted(inputs(**shape), options, tile_of(*tile), capfd)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(["plain", "causal", "window", "packed"], "causal"))
def test_one_cta_per_block(name, capfd, monkeypatch):
    """As under ``shard_map`` with its check of varying axes: consumers alternate, and no CTA has a second block."""
    call = mosaic.call

    def once(c, *arrays, **more):
        assert c.persistent
        assert c.ping_pong
        return call(dataclasses.replace(c, persistent=False), *arrays, **more)

    monkeypatch.setattr(mosaic, "call", once)
    shape, options = CALLS[name]
    interpreted(inputs(**shape), options, tile_of(128, 64, 8, 2), capfd)


@pytest.fixture
def retries(monkeypatch):
    """For each warpgroup and speculative block, whether the retry flag was set."""
    found, request_retry = [], forward_consumer.request_retry

    def recorded(c, slot, x, limit, number):
        request_retry(c, slot, x, limit, number)
        jax.debug.callback(lambda mine, now: found.append(bool(mine == now)), slot[0], number)

    monkeypatch.setattr(forward_consumer, "request_retry", recorded)
    monkeypatch.setattr(mosaic, "CTAS", 2)
    monkeypatch.setattr(mosaic, "SPECULATIVE_STEPS", 0)
    return found


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "name", some(["plain", "more queries", "window", "two-sided window", "segments", "packed"], "more queries")
)
def test_ordinary_blocks_need_no_retry(name, retries, capfd):
    """Rows past the last query, or that see nothing, do not have their block computed again."""
    shape, options = CALLS[name]
    interpreted(inputs(**shape), options, tile_of(128, 64, 8, 2), capfd)
    jax.effects_barrier()
    assert retries
    assert not any(retries)


@pytest.mark.interpreted
@pytest.mark.parametrize("tile", some([(128, 64, 8, 2), (192, 48, 12, 3)], (128, 64, 8, 2)), ids=str)
def test_blocks_with_steep_logits_are_computed_again(tile, retries, capfd):
    """Those of the head with large queries, in between those of the other."""
    interpreted(inputs(q_len=500, kv_len=395, sharp=300.0), {}, tile_of(*tile), capfd)
    jax.effects_barrier()
    assert any(retries)
    assert not all(retries)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "name", some(["plain", "causal", "window", "soft cap", "high sinks", "segments", "packed"], "causal", "segments")
)
def test_after_a_repeated_block_nothing_is_speculative(name, retries, capfd, monkeypatch):
    """Each of the two CTAs repeats its first block alone; the others are computed once, with a running maximum."""
    monkeypatch.setattr(forward_consumer, "LIMIT", -1.0)
    shape, options = CALLS[name]
    interpreted(inputs(**shape), options, tile_of(128, 64, 8, 2), capfd)
    jax.effects_barrier()
    ctas, warpgroups = 2, 2
    assert retries == [True] * ctas * warpgroups


@pytest.mark.skipif(JAX < (0, 11), reason="jax has no interpreter of Mosaic GPU before 0.11")
@pytest.mark.parametrize("where", ["query", "key"])
def test_nan_is_kept(where):
    """The one of a query in its row, the one of a key in the rows that see it, and nowhere else."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    arrays = dict(zip(("query", "key", "value"), inputs(q_len=300, kv_len=300), strict=True))
    arrays[where] = arrays[where].at[0, 200, 0, 3].set(jnp.nan)
    out, lse = run(arrays.values(), {"causal": True}, tile_of(128, 64, 8, 2), interpret=plgpu.InterpretGPUParams())
    rows = np.isnan(np.asarray(lse))[0]
    expected = np.zeros((2, 300), bool)
    expected[0, 200] = where == "query"
    expected[:, 200:] |= where == "key"
    assert (rows == expected).all()
    assert (np.isnan(np.asarray(out, np.float32)).all(-1)[0].T == expected).all()
    assert (np.isnan(np.asarray(out, np.float32)).any(-1)[0].T == expected).all()


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", some(["bfloat16", "float16"], "bfloat16"))
@pytest.mark.parametrize("direction", some(["rising", "falling", "alternating"], "alternating"))
def test_maxima_far_apart(direction, dtype, capfd):
    """Logits of a row range over hundreds: the reference is updated often, never, or for some rows of a warp only."""
    query, key, value = inputs(kv_len=400, dtype=dtype)
    place = np.linspace(0.1, 12, 400)
    place = {"rising": place, "falling": place[::-1], "alternating": place * (-1) ** (np.arange(400) // 40)}[direction]
    arrays = query, key * jnp.asarray(place[:, None, None], dtype), value
    interpreted(arrays, {"causal": True}, tile_of(128, 48, 8, 2), capfd)


@pytest.mark.skipif(JAX < (0, 11), reason="jax has no interpreter of Mosaic GPU before 0.11")
def test_a_warpgroup_leaves_out_what_only_others_see():
    """What the second half of a block sees is never multiplied with the first half's zero weights: NaN stays away."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    query, key, value = inputs(q_len=128, kv_len=128)
    broken = value.at[:, 64:].set(jnp.nan)
    params = tile_of(128, 64, 8, 2)
    out, lse = run((query, key, broken), {"causal": True}, params, interpret=plgpu.InterpretGPUParams())
    check((query[:, :64], key[:, :64], value[:, :64]), {"causal": True}, (out[:, :64], lse[..., :64]))
    assert bool(jnp.isnan(out[:, 64:]).all())


def test_a_window_that_leaves_blocks_without_keys(capfd):
    """The windows of the first 225 of 300 queries end before the first key."""
    options = {"sliding_window": (10, 0)}
    interpreted(inputs(q_len=300, kv_len=75), options, tile_of(128, 64, 8, 2), capfd)


# Calls with keys that no query sees, and which those are.
LONG_IDS = np.where(np.arange(333) % 70 < 5, 0, 1)[None].astype(np.int32)
PLACE = np.arange(160, dtype=np.int32)[None]
AT_BOTH_ENDS = np.array([[0] * 75 + [1] * 85, [1] * 100 + [0] * 60], np.int32)
PADDED = {
    "ids": (*CALLS["segments"], IDS[0] == 0),
    "sequences": (*CALLS["packed"], np.arange(160) >= CUTS[-1]),
    "before the window": ({"q_len": 90, "kv_len": 333}, {"sliding_window": (40, 0)}, np.arange(333) < 203),
    "whole tiles before the window": ({"q_len": 90, "kv_len": 330}, {"sliding_window": (40, 0)}, np.arange(330) < 200),
    "ids and a window": (
        {"q_len": 90, "kv_len": 333},
        {"sliding_window": (40, 0), "q_segment_ids": np.ones((1, 90), np.int32), "kv_segment_ids": LONG_IDS},
        (np.arange(333) < 203) | (LONG_IDS[0] == 0),
    ),
    "at both ends": (
        {"batch": 2},
        {"causal": True, "q_segment_ids": AT_BOTH_ENDS, "kv_segment_ids": AT_BOTH_ENDS},
        AT_BOTH_ENDS == 0,
    ),
    "an id without queries": (
        {"batch": 2},
        {"q_segment_ids": np.ones((2, 160), np.int32), "kv_segment_ids": np.where(AT_BOTH_ENDS == 0, 5, 1)},
        AT_BOTH_ENDS == 0,
    ),
    "an id whose queries are before": (
        {},
        {"causal": True, "q_segment_ids": np.where(PLACE < 70, 2, 1), "kv_segment_ids": np.where(PLACE < 100, 1, 2)},
        PLACE[0] >= 100,
    ),
    "a sequence without queries": (
        {},
        {
            "causal": True,
            "cum_seqlens_q": np.array([0, 60, 60, 160], np.int32),
            "cum_seqlens_k": np.array([0, 50, 83, 160], np.int32),
        },
        (PLACE[0] >= 50) & (PLACE[0] < 83),
    ),
    "an id of another sequence": (
        {},
        {
            "cum_seqlens_q": np.array([0, 60, 160], np.int32),
            "cum_seqlens_k": np.array([0, 80, 160], np.int32),
            "q_segment_ids": np.where(PLACE < 60, 1, 2),
            "kv_segment_ids": np.where(PLACE % 16 < 9, 1, 2),
        },
        (PLACE[0] < 80) == (PLACE[0] % 16 >= 9),
    ),
}


def spoiled(shape, hidden, garbage):
    """Arrays with ``garbage`` for keys that are ``hidden``, and with zeros."""
    query, *of_keys = inputs(**shape)
    return [[query, *(jnp.where(hidden[..., None, None], y, x).astype(x.dtype) for x in of_keys)] for y in (garbage, 0)]


@pytest.mark.interpreted
@pytest.mark.parametrize("garbage", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", some(PADDED, "ids", "sequences", "before the window", "an id without queries"))
def test_padding_may_be_garbage(name, garbage, capfd):
    """Its weight is 0, and 0 times NaN is not."""
    if JAX < (0, 11):
        pytest.skip("jax has no interpreter of Mosaic GPU before 0.11")
    import jax.experimental.pallas.mosaic_gpu as plgpu

    shape, options, hidden = PADDED[name]
    arrays, cleared = spoiled(shape, hidden, garbage)
    found = run(arrays, options, tile_of(128, 64, 8, 2), interpret=plgpu.InterpretGPUParams())
    check(cleared, options, found)


@pytest.mark.skipif(JAX < (0, 11), reason="jax has no interpreter of Mosaic GPU before 0.11")
def test_rows_that_see_nothing_are_zero_beside_a_nan():
    import jax.experimental.pallas.mosaic_gpu as plgpu

    query, key, value = inputs(q_len=100, kv_len=60)
    out, lse = run((query, key, value.at[:, 0].set(jnp.nan)), {"causal": True}, tile_of(128, 64, 8, 2),
                   interpret=plgpu.InterpretGPUParams())  # fmt: skip
    assert bool((out[:, :40] == 0).all())
    assert bool((lse[..., :40] == -jnp.inf).all())
    assert bool(jnp.isnan(out[:, 40:]).all())


@given(data=st.data())
@tries(60, short=20)
def test_keys_that_no_query_sees_are_found(data):
    """All of them and no others, beside every pair."""
    rows, keys, batch = (
        data.draw(st.integers(1, most), name) for name, most in (("rows", 40), ("keys", 40), ("batch", 2))
    )

    def drawn(low, high, shape):
        values = data.draw(st.lists(st.integers(low, high), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        return np.array(values, np.int32).reshape(shape)

    if data.draw(st.booleans(), "static"):
        side = st.none() | st.integers(0, 20)
        start, stop = intervals((data.draw(side), data.draw(side)), rows, keys)
    else:
        start, stop = (np.sort(drawn(0, keys, (1, rows)), 1) for _ in range(2))
        start, stop = jnp.asarray(start), jnp.asarray(np.maximum(start, stop))
    ids = (drawn(-1, 4, (batch, rows)), drawn(-1, 5, (batch, keys))) if data.draw(st.booleans(), "ids") else None
    place = np.arange(keys)
    seen = (np.asarray(start)[..., None] <= place) & (place < np.asarray(stop)[..., None])
    if ids is not None:
        seen = seen & (ids[0][:, :, None] == ids[1][:, None]) & (ids[0][:, :, None] > 0)
    for few in (unseen.FEW_PAIRS, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(unseen, "FEW_PAIRS", few)
            found = unseen.seen_keys(start, stop, None if ids is None else tuple(map(jnp.asarray, ids)), keys)
        np.testing.assert_array_equal(found, seen.any(1))


@pytest.mark.parametrize("step", [16, 48, 128])
def test_steps_with_padding_are_known(step):
    """A step that is not known for it is copied whole, and its NaN with it; one that is waits for its copy."""
    flags = np.random.default_rng(0).random((3, 333)) < 0.02
    flags[1] = False
    told = np.asarray(mosaic.any_in_step(jnp.asarray(flags, jnp.int32), step))
    assert told.shape == (3, 42)
    expected = [[flags[b, 8 * i : 8 * i + step].any() for i in range(42)] for b in range(3)]
    np.testing.assert_array_equal(told > 0, expected)


@pytest.mark.parametrize("name", ["two-sided window", "segments", "packed"])
def test_loops_begin_at_whole_tiles(name):
    """TMA drops the remainder of a row, which the interpreter does not: such a loop would read keys before its own."""
    shape, options = CALLS[name]
    query, key, value = inputs(**{**shape, "dim": 128})
    prepared, spec = prepare(query, key, value, options)
    table = np.asarray(mosaic._step_table(prepared, spec, 64, 48)[0])
    assert (table[..., 0] % 8 == 0).all()
    assert table[..., 0].any()


def test_parameters_never_change_the_meaning(capfd):
    params = FwdParams(q_blocksize=1, kv_blocksize=10_000, num_stages=9)
    assert parameters.forward_effective(params, 256, 256) == tile_of(64, 96, 4, 2)
    interpreted(inputs(dim=256), {"causal": True}, params, capfd)


# What it refuses


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cpu", "needs a GPU, the device is a CPU"),
        ("nvidia-a100", "needs capability 9.0, nvidia-a100 has 8.0"),
        ("nvidia-b200", "needs capability 9.0, nvidia-b200 has 10.0"),
        ("amd-mi300x", "needs a device of nvidia, this is amd-mi300x"),
        ("tpu-v6e", "needs a GPU, the device is a TPU"),
    ],
)
def test_only_hopper(device, reason):
    candidates = explain("flash_attention", X, X, X, device=device).candidates
    [told] = [c for c in candidates if (c.platform.value, c.backend.value) == ("pallas", "gpu")]
    assert told.reasons == (reason,)


@pytest.mark.parametrize(
    ("dim", "dtype", "reason"),
    [
        (64, "float32", "dtype float32 is not supported"),
        (76, "bfloat16", "head dim 76 is not a multiple of 8"),
        (320, "bfloat16", "head dim 320 is above 256"),
    ],
)  # fmt: skip
def test_refusals(dim, dtype, reason):
    x = jax.ShapeDtypeStruct((1, 256, 4, dim), dtype)
    explained = explain("flash_attention", x, x, x, **H200)
    assert explained.chosen is None
    assert any(reason in r for c in explained.candidates if c.platform.value == "pallas" for r in c.reasons)


def test_gradients_are_its_own():
    """Pinned, a call is differentiated by its own backward, the bias too."""
    from ejkernel import target

    def loss(x, bias):
        return flash_attention(x, x, x, bias=bias, platform="pallas").astype(jnp.float32).sum()

    with target("nvidia-h200"):
        assert jax.eval_shape(jax.grad(lambda x: loss(x, None)), X).shape == X.shape
        for shape in ((1, 1, 256, 256), (4, 1, 1), (256,)):
            assert jax.eval_shape(jax.grad(loss, 1), X, jnp.zeros(shape)).shape == shape


# Compiled for Hopper, without one


def compiled(script, folder):
    """What a script prints, in a process of its own: Mosaic GPU reads where to dump reports when it is loaded."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_TO": str(folder),
    }
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=600
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


COMPILED = """
import os, re, sys, glob, json
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
sys.path.insert(0, {tests!r})
import test_mosaic as t
topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=t.HOPPER, topology="1x1x2")
sharding = SingleDeviceSharding(topology.devices[0])
for dims, name, tile in {jobs!r}:
    shape, options = t.CALLS[name]
    # Masked and unmasked steps; the plain call has whole steps only.
    whole = 8 * (tile or (0, t.parameters.forward_defaults(*dims).kv_blocksize))[1] if name == "plain" else 1000
    long = {{}} if name in ("segments", "packed") else {{"q_len": whole, "kv_len": whole}}
    arrays = t.inputs(**{{**shape, **long, "dim": dims[0], "value_dim": dims[1], "dtype": "bfloat16"}})
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arrays]
    params = tile and t.tile_of(*tile)
    jax.jit(lambda q, k, v: t.run((q, k, v), options, params)).lower(*shapes).compile()
    reports = glob.glob(os.path.join(os.environ["MOSAIC_GPU_DUMP_TO"], "*.ptxas"))
    text = "".join(open(path).read() for path in reports)
    print("SPILLS", dims, name, tile, re.findall(r"([0-9]+) bytes spill", text))
    for path in reports:
        os.remove(path)
"""
HOPPER = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def _plugin():
    try:
        return version("jax-cuda13-plugin") == jax.__version__
    except PackageNotFoundError:
        return False


needs_plugin = pytest.mark.skipif(not _plugin(), reason="compiling for a GPU needs jax-cuda13-plugin of jax's version")


def spill_jobs(dims, what):
    """Calls to compile: head dims, the call, and perhaps a tile."""
    others = {
        (64, 64): (40, 24),
        (88, 88): (72, 72),
        (128, 128): (64, 128),
        (192, 128): (160, 32),
        (256, 256): (192, 192),
    }
    return {
        "default": [(dims, "causal")],
        "defaults": [(dims, "plain"), (dims, "causal")],
        "masks that are data": [(dims, "segments"), (dims, "packed")],
        "space": [(dims, name, sizes) for sizes in parameters.SPACE[dims][1:] for name in ("plain", "causal")],
        "others": [(dims, "soft cap"), (dims, "sinks"), (dims, "two-sided window"), (others[dims], "causal")],
    }[what]


@needs_plugin
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("what", "dims"),
    [
        pytest.param(
            what, dims, marks=() if what == "default" and dims in ((128, 128), (256, 256)) else pytest.mark.slow
        )
        for what in ("default", "defaults", "masks that are data", "space", "others")
        for dims in parameters.SPACE
        if spill_jobs(dims, what)
    ],
    ids=str,
)
def test_nothing_spills(dims, what, tmp_path):
    jobs = [(x, name, *(tile or (None,))) for x, name, *tile in spill_jobs(dims, what)]
    printed = compiled(COMPILED.format(tests=os.path.dirname(__file__), jobs=jobs), tmp_path)
    told = re.findall(r"SPILLS (.*?) \[(.*)\]", printed)
    assert len(told) == len(jobs)
    for what, spills in told:
        assert spills, f"no report of {what}"
        most = 4 if JAX < (0, 11) and "(192, 128) segments" in what else 0
        assert max(map(int, re.findall(r"\d+", spills))) <= most, (what, spills)


@needs_plugin
@pytest.mark.parametrize("few", some([2**28, 0], 0), ids=["compared", "searched"])
def test_searching_for_unseen_keys_takes_no_quadratic_memory(few, monkeypatch):
    """Of two long sequences: their ids take 128 KiB, a flag for each pair would take 256 MiB."""
    monkeypatch.setattr(unseen, "FEW_PAIRS", few)
    length = 2**14
    window = intervals((None, 0), length, length)
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=HOPPER, topology="1x1x2")
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=SingleDeviceSharding(topology.devices[0]))
    found = jax.jit(lambda q, k: unseen.seen_keys(*window, (q, k), length)).lower(ids, ids).compile()
    assert found.memory_analysis().temp_size_in_bytes < 2**20


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dim", [64, 72, 80, 128, 256])
def test_on_a_gpu(name, dim):
    refused = explain("flash_attention", X, X, X, platform="pallas").chosen is None
    if refused:
        pytest.skip("needs a Hopper GPU")
    shape, options = CALLS[name]
    arrays = inputs(**{"dim": dim, **shape})
    found = [flash_attention(*arrays, **options, return_lse=True, platform="pallas") for _ in range(2)]
    check(arrays, options, found[0])
    assert all(bool((a == b).all()) for a, b in zip(*found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("dim", [64, 72, 96, 128, 256])
def test_padding_may_be_garbage_on_a_gpu(name, garbage, dim):
    if explain("flash_attention", X, X, X, platform="pallas").chosen is None:
        pytest.skip("needs a Hopper GPU")
    shape, options, hidden = PADDED[name]
    arrays, cleared = spoiled({"dim": dim, **shape}, hidden, garbage)
    check(cleared, options, flash_attention(*arrays, **options, return_lse=True, platform="pallas"))
