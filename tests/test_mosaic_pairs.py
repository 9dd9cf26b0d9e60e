"""Bias, masks and dropout in flash attention for Hopper: interpreted, compiled for Hopper without one, and on a GPU."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_mosaic as forwards
import test_mosaic_backward as backwards
from lanes import crossed
from tolerances import assert_close

from ejkernel import explain, flash_attention
from ejkernel.kernels._pallas.gpu.flash_attention_sm90 import parameters
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.attention import PallasFlashAttention
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.backward_bias import _visits
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.pairs import packed_bits
from ejkernel.kernels.common.visibility import Ranges

RNG = np.random.default_rng(11)
# Odd, longer than a block and than a step; two entries, two heads that share keys.
SHAPE = {"batch": 2, "q_len": 150, "kv_len": 235}
FULL = (2, 2, 150, 235)
CAUSAL = {"causal": True}
DROPOUT = {"dropout_prob": 0.3, "dropout_seed": 5}


def bias(*owned, hidden=0.0, dtype="float32"):
    """Of these axes its own, shared along the others; a part of it is -inf."""
    shape = [size if axis in owned else 1 for axis, size in enumerate(FULL)]
    values = np.where(RNG.random(shape) < hidden, -np.inf, RNG.standard_normal(shape))
    return {"bias": np.asarray(jnp.asarray(values, dtype))}


def mask(*owned):
    shape = [size if axis in owned else 1 for axis, size in enumerate(FULL)]
    seen = RNG.random(shape) < 0.6
    seen[:, :, 70:75] = False  # rows that see nothing, where it has rows
    return {"attention_mask": seen}


CALLS = {
    "bias": bias(0, 1, 2, 3, hidden=0.3),
    "bias of heads": {**bias(1, 2, 3), **CAUSAL},
    "bias of pairs": bias(2, 3, hidden=0.1),
    "bias in bfloat16": bias(1, 2, 3, dtype="bfloat16"),
    "bias in float16": {**bias(0, 1, 3, dtype="float16"), **CAUSAL},
    "bias of keys": {**bias(1, 3, hidden=0.3), **CAUSAL},
    "bias of queries": bias(0, 2),
    "bias of a head": bias(1),
    "bias and cap": {**bias(1, 2, 3), **CAUSAL, "logits_soft_cap": 2.0, "softmax_scale": -0.2},
    "bias of keys and a window": {**bias(1, 3), "sliding_window": (40, 10)},
    "steep bias": {"bias": (np.arange(235) * np.array([[3.0], [-3.0]]))[None, :, None].astype(np.float32)},
    "mask": mask(0, 2, 3),
    "mask of keys": {**mask(0, 3), **CAUSAL},
    "mask of queries": mask(0, 1, 2),
    "mask and window": {**mask(1, 2, 3), **CAUSAL, "sliding_window": (60, 0)},
    "dropout": DROPOUT,
    "dropout and cap": {**DROPOUT, **CAUSAL, "logits_soft_cap": 2.0},
    "everything": {
        **bias(1, 2, 3, hidden=0.2),
        **mask(0, 3),
        **DROPOUT,
        **CAUSAL,
        "sliding_window": (100, 0),
        "softmax_aux": np.array([[0.5], [2.0]], np.float32),
    },
}
OF_OTHER_AXES = ("bias of pairs", "bias in float16", "bias of queries", "bias of a head", "mask of queries")
ONE_A_FEATURE = ("bias of heads", "bias of keys", "mask", "dropout", "everything")


retries = forwards.retries


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("hidden", [0, 130])
def test_masks_are_speculative(hidden, retries, capfd):
    """A block whose first keys are hidden from a row, which sees later ones, is computed again."""
    seen = RNG.random((2, 1, 150, 235)) < 0.8
    seen[:, :, 3, :hidden] = False
    options = {"attention_mask": seen}
    forwards.interpreted(forwards.inputs(**SHAPE), options, forwards.tile_of(128, 64, 8, 2), capfd)
    jax.effects_barrier()
    assert retries
    assert any(retries) == (hidden > 0)


# The short lane has the property tests of these features.
@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile", "name"),
    crossed(
        [(128, 64, 8, 2), (192, 48, 12, 3)],
        list(CALLS),
        again=lambda tile, name: tile == (192, 48, 12, 3) and name not in ONE_A_FEATURE,
    ),
)
def test_forward(name, tile, capfd):
    forwards.interpreted(forwards.inputs(**SHAPE), CALLS[name], forwards.tile_of(*tile), capfd)


@backwards.interpreted
@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "name"),
    crossed(
        [backwards.SINGLE, (128, 128), backwards.WIDE],
        list(CALLS),
        # One kernel has head dims 64 and 128, and the axes that a bias or a mask owns are the same code at all.
        again=lambda dims, name: (
            name != "steep bias" if dims == (128, 128) else dims == backwards.WIDE and name in OF_OTHER_AXES
        ),
    ),
)
def test_backward(name, dims, capfd, request):
    if (name, dims) == ("steep bias", (64, 64)):
        reason = "the bias's gradient is off by 2.1 % of its norm, beside a bound of 1 %; the cause is not established"
        request.applymarker(pytest.mark.xfail(reason=reason))
    backwards.check_interpreted({**SHAPE, "dims": dims}, CALLS[name], capfd)


@backwards.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", ["bias of heads", "mask of keys"])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.again)])
def test_unseen_keys_may_be_garbage(name, dtype, capfd):
    """Keys that a mask, or a bias of -inf, hides from all queries."""
    options = dict(CALLS[name])
    hidden = np.arange(235) % 7 == 3
    if "bias" in options:
        options["bias"] = np.where(hidden, -np.inf, options["bias"]).astype(np.float32)
    else:
        options["attention_mask"] = np.broadcast_to(~hidden, (2, 1, 1, 235)).copy()

    def spoil(arrays):
        query, *of_keys = arrays
        return [query, *(jnp.where(hidden[:, None, None], jnp.nan, x).astype(x.dtype) for x in of_keys)]

    shape = {**SHAPE, "dtype": dtype}
    clean = forwards.inputs(**shape)
    import jax.experimental.pallas.mosaic_gpu as plgpu

    found = forwards.run(spoil(clean), options, forwards.tile_of(128, 64, 8, 2), interpret=plgpu.InterpretGPUParams())
    forwards.check(clean, options, found)
    backwards.check_interpreted(shape, options, capfd, spoil=lambda arrays: [*spoil(arrays[:3]), *arrays[3:]])


@pytest.mark.parametrize("keys", [1, 5, 32, 70])
@pytest.mark.parametrize("word", [16, 32])
def test_bits(keys, word):
    flags = RNG.random((3, keys)) < 0.5
    words = np.asarray(packed_bits(jnp.asarray(flags), word))
    found = (words[..., None] >> np.arange(word, dtype=words.dtype)) & 1
    found = found.reshape(3, -1)
    expected = np.broadcast_to(flags, (3, word)) if keys == 1 else flags
    assert (found[:, : expected.shape[1]] == expected).all()
    assert (found[:, expected.shape[1] :] == 0).all()


@pytest.mark.parametrize("own", [(4, 5), (4, 1), (1, 5), (1, 1)])
def test_tiles_of_a_bias_are_visited_where_any_pair_counts(own):
    """Causal, 512 queries and 320 keys: a block of queries sees its own keys and those before."""
    begin, end = np.zeros((1, 4), np.int32), np.minimum(np.arange(1, 5) * 128, 320)[None].astype(np.int32)
    visits = np.asarray(_visits(Ranges(begin, end, begin, end), (2, 3, 4, 5), (2, 3, *own)))
    assert visits.shape == (*own, 4)
    seen = end[0][:, None] > np.arange(5) * 64
    visited = np.zeros((4, 5), int)
    for query0, queries, key0, keys in visits.reshape(-1, 4):
        visited[query0 : query0 + queries, key0 : key0 + keys] += 1
    assert (visited[seen] == 1).all()
    if own != (1, 1):
        assert (visited[~seen] == 0).all()


def test_tiles():
    """With a bias for every pair, or dropout, a forward has fewer keys a step."""
    x = jax.ShapeDtypeStruct((1, 512, 4, 128), jnp.bfloat16)
    of_keys, of_pairs = (jax.ShapeDtypeStruct((1, 4, n, 512), jnp.float32) for n in (1, 512))

    def chosen(**options):
        return explain("flash_attention", x, x, x, device="nvidia-h200", platform="pallas", **options).chosen.params

    assert chosen(bias=of_keys).kv_blocksize == parameters.SPACE[128, 128][0][1]
    for options in ({"bias": of_pairs}, {"dropout_prob": 0.1, "dropout_seed": 1}):
        assert chosen(**options).kv_blocksize == parameters.OF_PAIRS[128, 128][1]
    shapes = {"query": x, "key": x, "value": x, "bias": of_pairs}
    assert len(PallasFlashAttention.space(shapes, None, None, "forward")) == 1 + len(parameters.SPACE[128, 128])


# Compiled for Hopper, without one

COMPILED = """
import os, re, sys, glob
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
sys.path.insert(0, {tests!r})
import test_mosaic as forwards, test_mosaic_backward as backwards, test_mosaic_pairs as t
topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=forwards.HOPPER, topology="1x1x2")
sharding = SingleDeviceSharding(topology.devices[0])
for name in {names!r}:
    for direction in ("forward", "backward"):
        arrays = backwards.inputs(**t.SHAPE, dims=({dim}, {dim}))
        arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arrays]
        if direction == "forward":
            run = jax.jit(lambda *x: forwards.run(x[:3], t.CALLS[name]))
            run.lower(*arrays[:3]).compile()
        else:
            run = jax.jit(lambda *x: backwards.run(x[:5], x[5:], t.CALLS[name]))
            run.lower(*arrays, *arrays[3:]).compile()
        reports = glob.glob(os.path.join(os.environ["MOSAIC_GPU_DUMP_TO"], "*.ptxas"))
        text = "".join(open(path).read() for path in reports)
        print("SPILLS", direction, name, re.findall(r"([0-9]+) bytes spill", text))
        for path in reports:
            os.remove(path)
"""


@forwards.needs_plugin
@pytest.mark.skipif(forwards.JAX < (0, 11), reason="before jax 0.11 the program is another one")
@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_spills(dim, tmp_path):
    """No more than these bytes; what is not named spills nothing."""
    names = ["bias of keys", "bias of heads", "mask", "mask of keys", "dropout"]
    known = {
        64: {"backward dropout": 36, "backward bias of heads": 108},
        128: {"backward dropout": 4},
        256: {"forward bias of keys": 8, "backward bias of heads": 28},
    }[dim]
    script = COMPILED.format(tests=os.path.dirname(__file__), names=names, dim=dim)
    told = re.findall(r"SPILLS (.*?) \[(.*)\]", forwards.compiled(script, tmp_path))
    assert len(told) == 2 * len(names)
    for what, spills in told:
        assert spills, f"no report of {what}"
        assert max(map(int, re.findall(r"\d+", spills))) <= known.get(what, 0), (what, spills)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dim", [64, 72, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_gpu(name, dim, dtype):
    """Values and all gradients against float64, twice with the same bits."""
    if explain("flash_attention", forwards.X, forwards.X, forwards.X, platform="pallas").chosen is None:
        pytest.skip("needs a Hopper GPU")
    *arrays, dout, dlse = backwards.inputs(**SHAPE, dims=(dim, dim), dtype=dtype)
    options = dict(CALLS[name])
    floats = [name for name in ("bias", "softmax_aux") if name in options]
    more = [jnp.asarray(options.pop(name)) for name in floats]

    def run(*differentiated):
        given = dict(zip(floats, differentiated[3:], strict=True))
        return flash_attention(*differentiated[:3], **given, **options, return_lse=True, platform="pallas")

    def once():
        results, pull = jax.vjp(run, *arrays, *more)
        return [*results, *pull((dout, dlse))]

    found, again = jax.jit(once)(), jax.jit(once)()
    exact = [np.asarray(x, np.float64) for x in (*arrays, dout, dlse)]
    *outputs, grads = oracle.attention(*exact[:3], dout=exact[3], dlse=exact[4], **CALLS[name])
    names = ["out", "lse", "query", "key", "value", *floats]
    expected = [*outputs, *(grads[name] for name in names[2:])]
    for what, actual, wanted, other in zip(names, found, expected, again, strict=True):
        kind = "bfloat16" if what == "lse" else dtype
        assert_close(actual, wanted.reshape(actual.shape), kind, gradient=what not in ("out", "lse"), what=what)
        assert bool(((actual == other) | jnp.isnan(actual)).all()), what
