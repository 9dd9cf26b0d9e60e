"""Grouped matmul in Pallas Mosaic GPU: in JAX's interpreter, its order of tiles, compiled for Hopper without one, and on a GPU."""

import functools
import itertools
import json
import os
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tries
from hypothesis import given
from hypothesis import strategies as st
from lanes import crossed, some
from test_mosaic import JAX, compiled, needs_plugin
from tolerances import assert_close

from ejkernel import UnsupportedError, explain, grouped_matmul, kernel_registry, target
from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels._pallas.gpu.grouped_matmul_sm90 import launch, parameters, state
from ejkernel.kernels._pallas.gpu.grouped_matmul_sm90.matmul import PallasGroupedMatmul
from ejkernel.kernels._pallas.gpu.grouped_matmul_sm90.parameters import Tiles

OPERATION = kernel_registry.operation("grouped_matmul")
SMALL = Tiles(64, 64, 2)
# Rows of a, sizes of groups, k and n, and the call's other arguments.
CALLS = {
    "odd": (150, [70, 3, 0, 61], 72, 136, {}),
    "one row each": (9, [1] * 9, 64, 64, {}),
    "empty groups": (81, [0, 0, 40, 0, 30, 0], 136, 8, {}),
    "inside of tiles": (260, [65, 63, 129, 1], 64, 72, {}),
    "whole tiles": (256, [128, 64, 0, 64], 128, 128, {}),
    "nothing": (20, [0, 0], 64, 72, {}),
    "all in one": (203, [0, 203, 0], 72, 64, {}),
    "transposed": (150, [70, 3, 0, 61], 72, 136, {"transpose_b": True}),
    "offset": (170, [20, 67, 30, 40, 9], 72, 136, {"group_offset": 1, "held": 2}),
    "offset and transposed": (150, [3, 70, 0, 61, 9], 72, 136, {"group_offset": 1, "held": 3, "transpose_b": True}),
    "offset of the last": (90, [30, 0, 33], 64, 64, {"group_offset": 2, "held": 1}),
}


def make(rows, sizes, k, n, options, dtype="bfloat16"):
    """``arguments, dout, (first, last row of each group)``; whatever belongs to no group that b holds is NaN."""
    options = dict(options)
    held, transpose = options.pop("held", len(sizes)), options.get("transpose_b", False)
    rng = np.random.default_rng(rows + k + n)
    first = options.get("group_offset", 0)
    bounds = np.cumsum([0, *sizes])[first : first + held + 1]
    a, dout = rng.normal(size=(rows, k)), rng.normal(size=(rows, n))
    for x in (a, dout):
        x[: bounds[0]] = x[bounds[-1] :] = np.nan
    b = rng.normal(size=(held, *((n, k) if transpose else (k, n))))
    a, b, dout = (jnp.asarray(x, dtype) for x in (a, b, dout))
    return {"a": a, "b": b, "group_sizes": jnp.asarray(sizes, jnp.int32), **options}, dout, bounds


def expected(arguments, dout, bounds):
    """The result and both gradients in float64, group by group."""
    a, b, dout = (np.asarray(x, np.float64) for x in (arguments["a"], arguments["b"], dout))
    transpose = arguments.get("transpose_b", False)
    out, da, db = np.zeros(dout.shape), np.zeros(a.shape), np.zeros(b.shape)
    for group, (first, stop) in enumerate(itertools.pairwise(bounds)):
        own, matrix = slice(first, stop), b[group].T if transpose else b[group]
        out[own], da[own] = a[own] @ matrix, dout[own] @ matrix.T
        product = a[own].T @ dout[own]
        db[group] = product.T if transpose else product
    return out, da, db


def check(arguments, dout, bounds, found):
    for name, actual, exact in zip(("out", "a", "b"), found, expected(arguments, dout, bounds), strict=True):
        assert_close(actual, exact, str(actual.dtype), gradient=name != "out", what=name)
        if name != "b":
            # The rows of no group are 0, exactly.
            assert not np.asarray(actual[: bounds[0]]).any()
            assert not np.asarray(actual[bounds[-1] :]).any()


def prepare(arguments):
    """What the operation gives an implementation."""
    bound = OPERATION.signature.bind(**arguments)
    bound.apply_defaults()
    normal = OPERATION.normalise(dict(bound.arguments))
    spec = OPERATION.bind(normal).spec
    return OPERATION.prepare(normal, spec), spec


def run(arguments, dout, tiles, **more):
    """The result and both gradients, from the kernels themselves."""
    arrays, spec = prepare(arguments)
    params = [kind(**dict(zip(parameters.READS, tiles, strict=True))) for kind in (FwdParams, BwdParams)]
    out, _ = PallasGroupedMatmul.forward(arrays, spec, params[0], **more)
    grads = PallasGroupedMatmul.backward(arrays, spec, params[1], out, None, dout[None], None, **more)
    return out[0], grads["a"][0], grads["b"][0]


def interpreted(call, capfd, tiles=SMALL, dtype="bfloat16"):
    """In JAX's interpreter, with race detection, against float64."""
    if JAX < (0, 11):
        pytest.skip("jax has no interpreter of Mosaic GPU before 0.11")
    import jax.experimental.pallas.mosaic_gpu as plgpu

    arguments, dout, bounds = make(*call, dtype)
    found = run(arguments, dout, tiles, interpret=plgpu.InterpretGPUParams(detect_races=True))
    check(arguments, dout, bounds, jax.block_until_ready(found))
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(CALLS, "offset and transposed"))
def test_interpreted(name, capfd):
    interpreted(CALLS[name], capfd)


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", ["odd", "offset"])
def test_float16(name, capfd):
    interpreted(CALLS[name], capfd, dtype="float16")


WORTH_TIMING = [parameters.tiles_of(params) for params in parameters.space("forward")]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("name", "tiles"),
    crossed(
        ["odd", "transposed"],
        [*WORTH_TIMING, Tiles(128, 64, 2), Tiles(128, 256, 3)],
        # How b lies in memory is a matter of columns alone.
        again=lambda name, tiles: name == "transposed",
    ),
)
def test_interpreted_with_other_tiles(name, tiles, capfd):
    """Of 256 columns one tile has 136 inside, more than half; of 128 the second one has 8, and half of it is computed."""
    interpreted(CALLS[name], capfd, tiles)


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("each", [3, 100])
def test_interpreted_with_default_tiles(each, capfd):
    call = (3 * each, [each] * 3, 72, 264, {})
    arrays, spec = prepare(make(*call)[0])
    interpreted(call, capfd, parameters.tiles_of(PallasGroupedMatmul.defaults(arrays, spec, None, "forward")))


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("ctas", "name"),
    crossed(
        [1, 2, 3],
        ["odd", "empty groups", "offset and transposed", "nothing"],
        short=lambda ctas, name: (ctas, name) == (2, "odd"),
        again=lambda ctas, name: ctas != 2 and name != "odd",
    ),
)
def test_a_persistent_cta_computes_several_tiles(name, ctas, capfd, monkeypatch):
    """There is one for each multiprocessor; of two, each has many tiles, and the ring goes round while groups change."""
    monkeypatch.setattr(launch, "CTAS", ctas)
    interpreted(CALLS[name], capfd)


@functools.cache
def in_one_program():
    import jax.experimental.pallas.mosaic_gpu as plgpu

    return jax.jit(lambda arguments, dout: run(arguments, dout, SMALL, interpret=plgpu.InterpretGPUParams()))


@pytest.mark.interpreted
@pytest.mark.slow
@given(st.data())
@tries(12, short=1)
def test_drawn_sizes_share_one_program(data):
    """Sizes of a traced call are values alone: nothing is compiled anew."""
    if JAX < (0, 11):
        pytest.skip("jax has no interpreter of Mosaic GPU before 0.11")
    cuts = sorted(data.draw(st.lists(st.integers(0, 150), min_size=6, max_size=6)))
    first = data.draw(st.integers(0, 2))
    call = (150, np.diff([0, *cuts]).tolist(), 72, 72, {"group_offset": first, "held": 4})
    arguments, dout, bounds = make(*call)
    found = in_one_program()({**arguments, "group_offset": jnp.int32(first)}, dout)
    check(arguments, dout, bounds, found)
    assert in_one_program()._cache_size() == 1


# The order of tiles


ROWS, GROUPS = 700, 6


def context(kind, bounds, rows, columns, tiles, band, ctas=7):
    """What the walk of a CTA reads of its context."""
    c = state.Config(
        transposed=False, consumers=tiles.rows // 64, columns=tiles.columns, stages=2, band=band, ctas=ctas
    )
    left, right = SimpleNamespace(shape=(1, ROWS, rows)), None
    height = GROUPS * rows if kind.sums else ROWS
    return kind(c, None, left, right, bounds, SimpleNamespace(shape=(height, columns)))


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4, 5, 6))
def walked(kind, bounds, rows, columns, tiles, band, count):
    """Of each number whether there is that tile, the tile, and whether the walk of a CTA comes to it from its last one."""
    ctx = context(kind, bounds, rows, columns, tiles, band)

    def one(item):
        walk = ctx.start(item)
        before = ctx.start(jnp.maximum(item - ctx.c.ctas, 0))
        onward = ctx.advance(item, before)
        same = [jnp.array_equal(x, y) for x, y in zip(walk, onward, strict=True)]
        return ctx.more(item, walk), ctx.tile(item, walk), jnp.all(jnp.asarray([True, *same]))

    return jax.vmap(one)(jnp.arange(count, dtype=jnp.int32))


SHAPES = [
    (100, Tiles(64, 64, 2), 1),
    (136, Tiles(128, 64, 2), 2),
    (300, Tiles(64, 128, 2), 3),
    (60, Tiles(128, 256, 2), 9),
]


@given(st.lists(st.integers(0, ROWS) | st.just(0), min_size=GROUPS + 1, max_size=GROUPS + 1), st.sampled_from(SHAPES))
@tries(200, short=40)
def test_each_tile_of_each_group_is_computed_once(cuts, shape):
    """What lies before the first group and behind the last one too, with no steps: nothing is multiplied there."""
    bounds, (columns, tiles, band) = np.sort(np.asarray(cuts, np.int32)), shape
    most = (-(-ROWS // tiles.rows) + GROUPS + 1) * -(-columns // tiles.columns)
    more, tile, same = jax.tree.map(np.asarray, walked(state.Rows, bounds[None], 200, columns, tiles, band, most + 9))
    # As many as the launch reckons with, at most, and none after the last one.
    assert not more[most:].any()
    assert (np.sort(more)[::-1] == more).all()
    assert same.all()
    stored = np.zeros((ROWS, columns), int)
    group_of = np.searchsorted(bounds[1:], np.arange(ROWS), side="right")
    held = (np.arange(ROWS) >= bounds[0]) & (np.arange(ROWS) < bounds[-1])
    for i in np.flatnonzero(more):
        own = slice(tile.row[i], min(tile.row[i] + tiles.rows, tile.stop[i]))
        assert own.start < own.stop <= ROWS
        assert tile.column[i] < columns
        stored[own, tile.column[i] : tile.column[i] + tiles.columns] += 1
        assert (held[own] == (tile.steps[i] > 0)).all()
        if tile.steps[i]:
            assert tile.steps[i] == -(-200 // state.PANEL)
            assert (group_of[own] == tile.group[i]).all()
    assert (stored == 1).all()


@given(st.lists(st.integers(0, ROWS) | st.just(0), min_size=GROUPS + 1, max_size=GROUPS + 1), st.sampled_from(SHAPES))
@tries(100, short=20)
def test_each_tile_of_each_sum_is_computed_once(cuts, shape):
    bounds, (columns, tiles, band), side = np.sort(np.asarray(cuts, np.int32)), shape, 200
    count = GROUPS * -(-side // tiles.rows) * -(-columns // tiles.columns)
    more, tile, _ = jax.tree.map(np.asarray, walked(state.Sums, bounds[None], side, columns, tiles, band, count + 9))
    assert more[:count].all()
    assert not more[count:].any()
    stored = np.zeros((GROUPS * side, columns), int)
    for i in range(count):
        group = tile.group[i]
        stored[
            tile.row[i] : min(tile.row[i] + tiles.rows, tile.stop[i]), tile.column[i] : tile.column[i] + tiles.columns
        ] += 1
        assert tile.row[i] == group * side + tile.side[i]
        assert tile.stop[i] == (group + 1) * side
        assert (tile.first[i], tile.count[i]) == (bounds[group], bounds[group + 1] - bounds[group])
        assert tile.steps[i] == -(-tile.count[i] // state.PANEL)
    assert (stored == 1).all()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tiles_that_are_asked_for(direction):
    """What runs is told, is what would run if it were asked for, and fits."""
    kind = {"forward": FwdParams, "backward": BwdParams}[direction]
    proposed = parameters.space(direction)
    assert len(set(proposed)) == len(proposed) <= 12
    asked = [
        kind(),
        kind(blocksize_m=1, blocksize_n=1, num_stages=1),
        kind(blocksize_m=999, blocksize_n=999, num_stages=99),
    ]
    for each in (8, 64, 4096):
        shapes = {"a": np.empty((1, 8 * each, 64)), "b": np.empty((1, 8, 64, 64))}
        asked.append(parameters.defaults(shapes, direction))
    for params in (*proposed, *asked):
        used = parameters.effective(params)
        assert parameters.effective(used) == used
        tiles = parameters.tiles_of(used)
        assert tiles.stages >= 2
        assert 2 * parameters.INNER * (tiles.rows + tiles.columns) * tiles.stages <= parameters.SHARED_MEMORY
    assert all(parameters.effective(params) == params for params in (*proposed, *asked[3:]))


# Selection


def shapes(rows=512, k=64, n=128, groups=8, dtype="bfloat16", named=None):
    like = jax.ShapeDtypeStruct
    return like((rows, k), dtype), like((groups, k, n), dtype), like((named or groups,), jnp.int32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("more", [{}, {"group_offset": 2}, {"transpose_b": True}], ids=str)
def test_ragged_products_run_on_hopper(dtype, more):
    a, b, sizes = shapes(dtype=dtype, named=16 if "group_offset" in more else None)
    b = jax.ShapeDtypeStruct((8, 128, 64), dtype) if "transpose_b" in more else b
    found = explain(grouped_matmul, a, b, sizes, **more, gradients=True, device="nvidia-h200")
    assert (found.chosen.platform.value, found.backward.chosen.platform.value) == ("pallas", "pallas")


BATCHED = [jax.ShapeDtypeStruct((2, 8, *matrix), jnp.bfloat16) for matrix in ((64, 64), (64, 128))]


@pytest.mark.parametrize(
    ("args", "options", "device", "reason"),
    [
        (shapes(dtype="float32"), {}, "nvidia-h200", "dtype float32 is not supported"),
        (shapes(k=60), {}, "nvidia-h200", "k 60 with n 128, not both multiples of 8, is not supported"),
        (shapes(n=60), {}, "nvidia-h200", "k 64 with n 60, not both multiples of 8, is not supported"),
        (BATCHED, {}, "nvidia-h200", "the form without group_sizes is not supported"),
        (
            shapes(),
            {"preferred_element_type": "float32"},
            "nvidia-h200",
            "a result in float32 of bfloat16 is not supported",
        ),
        (shapes(), {}, "nvidia-a100", "needs capability 9.0, nvidia-a100 has 8.0"),
        (shapes(), {}, "nvidia-b200", "needs capability 9.0, nvidia-b200 has 10.0"),
    ],
    ids=["float32", "uneven k", "uneven n", "batched", "wide result", "A100", "B200"],
)
def test_what_it_refuses(args, options, device, reason):
    found = explain(grouped_matmul, *args, **options, device=device)
    assert found.chosen.platform.value != "pallas"
    [told] = [c for c in found.candidates if (c.platform.value, c.backend.value) == ("pallas", "gpu")]
    assert told.reasons == (reason,)
    asked = functools.partial(grouped_matmul, platform="pallas", **options)
    with target(device), pytest.raises(UnsupportedError, match=re.escape(reason)):
        jax.eval_shape(asked, *args)


# Compiled for Hopper, without one

COMPILED = """
import collections, glob, json, os, re, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
sys.path.insert(0, {tests!r})
import test_mosaic
from ejkernel import grouped_matmul, target
topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=test_mosaic.HOPPER, topology="1x1x2")
sharding = SingleDeviceSharding(topology.devices[0])

def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

def both(run):
    def gradients(a, b, sizes, dout):
        return jax.vjp(lambda a, b: run(a, b, sizes), a, b)[1](dout)
    return gradients

for rows, groups, k, n, transpose, direction in {jobs!r}:
    run = lambda a, b, sizes: grouped_matmul(a, b, sizes, transpose_b=transpose, platform="pallas")
    args = [array(rows, k), array(groups, *((n, k) if transpose else (k, n))), array(groups, dtype="int32")]
    if direction == "backward":
        run, args = both(run), [*args, array(rows, n)]
    with target("nvidia-h200"):
        program = jax.jit(run).lower(*args).compile()
    entry = program.as_text().split("ENTRY", 1)[1]
    made = collections.Counter(re.findall(r"= (?:\\([^)]*\\)|\\S+) ([a-z-]+)\\(", entry))
    reports = glob.glob(os.path.join(os.environ["MOSAIC_GPU_DUMP_TO"], "*.ptxas"))
    text = "".join(open(path).read() for path in reports)
    told = dict(
        spills=[int(x) for x in re.findall("([0-9]+) bytes spill", text)],
        temporary=program.memory_analysis().temp_size_in_bytes,
        programs={{name: count for name, count in made.items()
                  if name not in ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")}},
    )
    print("TOLD", json.dumps(told))
    for path in reports:
        os.remove(path)
"""
# Rows, groups, k and n.
MODELS = [(16384, 8, 4096, 14336), (16384, 64, 2048, 1408), (4096, 128, 2048, 768), (256, 64, 2048, 1408)]


@needs_plugin
@pytest.mark.compiled
@pytest.mark.parametrize("model", some(MODELS, MODELS[1]), ids=str)
@pytest.mark.parametrize("transpose", some([False, True], False))
def test_nothing_spills_and_nothing_is_copied(model, transpose, tmp_path):
    """One program makes bounds of sizes, two of more than 64; the others are the kernels, which read b as it is."""
    jobs = [(*model, transpose, direction) for direction in ("forward", "backward")]
    printed = compiled(COMPILED.format(tests=os.path.dirname(__file__), jobs=jobs), tmp_path)
    told = [json.loads(line) for line in re.findall("TOLD (.*)", printed)]
    assert len(told) == len(jobs)
    for kernels, found in zip((1, 2), told, strict=True):
        assert found["spills"], "no report"
        assert max(found["spills"]) == 0
        assert found["programs"] == {"fusion": 1 if model[1] <= 64 else 2, "custom-call": kernels}
        assert found["temporary"] < 4096


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_gpu(name, dtype):
    arguments, dout, bounds = make(*CALLS[name], dtype)
    if explain(grouped_matmul, **arguments, platform="pallas").chosen is None:
        pytest.skip("needs a Hopper GPU")
    static = {"transpose_b": arguments.pop("transpose_b", False), "platform": "pallas"}

    @jax.jit
    def both(arguments, dout):
        rest = {name: x for name, x in arguments.items() if name not in ("a", "b")}
        out, pull = jax.vjp(lambda a, b: grouped_matmul(a, b, **rest, **static), arguments["a"], arguments["b"])
        return out, *pull(dout)

    found = [both(arguments, dout) for _ in range(2)]
    check({**arguments, **static}, dout, bounds, found[0])
    assert all(bool((x == y).all()) for x, y in zip(*found, strict=True))
