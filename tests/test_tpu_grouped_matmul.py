"""grouped_matmul's kernels for TPUs: their steps, tiles and races, and what libtpu makes of them."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples_grouped_matmul import reference
from test_compilation import TPU_ENVIRONMENT
from tolerances import assert_close

from ejkernel import BwdParams, FwdParams, explain, target
from ejkernel.kernels._pallas.tpu.generations import GENERATIONS
from ejkernel.kernels._pallas.tpu.grouped_matmul.matmul import TpuGroupedMatmul
from ejkernel.kernels._pallas.tpu.grouped_matmul.steps import by_group, by_tile
from ejkernel.kernels._pallas.tpu.grouped_matmul.tiles import Rows, Sums, Tiles
from ejkernel.ops import grouped_matmul as operation

pytestmark = pytest.mark.tpu

slow = pytest.mark.slow

BOUNDS = {
    "aligned": [0, 32, 64, 96],
    "cut": [0, 5, 40, 41, 96],
    "empty": [0, 0, 20, 20, 20, 96, 96],
    "offset_and_tail": [40, 40, 45, 70],
    "nothing": [50, 50, 50],
    "one_row": [95, 96],
    "short_last_tile": [0, 61, 90],
}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("rows", [96, 90])
def test_steps_follow_the_rows(name, rows):
    """Each tile meets each group that has rows in it once, tiles in order, and there are no other products."""
    size = 16
    bounds = np.minimum(BOUNDS[name], rows)
    held = jnp.asarray(bounds, jnp.int32)
    tiles = -(-rows // size)
    pairs = [
        (tile, group)
        for tile in range(tiles)
        for group in range(len(bounds) - 1)
        if max(bounds[group], tile * size) < min(bounds[group + 1], tile * size + size)
    ]

    steps = jax.jit(lambda held: by_tile(held, rows, size))(held)
    count = int(steps.count)
    tile, group = (np.asarray(x)[:count] for x in (steps.tile, steps.group))
    own = (group > 0) & (group < len(bounds))
    assert list(zip(tile[own], group[own] - 1, strict=True)) == pairs
    assert list(np.unique(tile)) == list(range(tiles)), "every tile of the result is written"
    assert (np.diff(tile) >= 0).all()
    assert count <= steps.tile.shape[0]
    first_group, last_group, first_tile, last_tile = np.asarray(steps.loads)
    if pairs:
        assert (first_tile, first_group) == pairs[0]
        assert (last_tile, last_group) == pairs[-1]

    steps = jax.jit(lambda held: by_group(held, rows, size))(held)
    count = int(steps.count)
    tile, group = (np.asarray(x)[:count] for x in (steps.tile, steps.group))
    assert sorted(set(group)) == list(range(len(bounds) - 1)), "every group's sum is written"
    assert (np.diff(group) >= 0).all()
    filled = bounds[group] < bounds[group + 1]
    assert sorted(zip(tile[filled], group[filled], strict=True)) == pairs
    assert count <= steps.tile.shape[0]
    assert (tile < tiles).all()


SHAPES = [(8192, 4096, 14336, 8), (8192, 14336, 4096, 8), (4096, 2048, 768, 128), (37, 6, 4, 3), (1000, 20000, 100, 4)]


@pytest.mark.parametrize("generation", GENERATIONS.values(), ids=GENERATIONS)
@pytest.mark.parametrize("item", [2, 4])
def test_tiles_fit(generation, item):
    for m, k, n, groups in SHAPES:
        numbers = (1, groups, m, k, n, item, item, item, 1 if item == 2 else 6)
        for kind in (Rows, Sums):
            shape = kind(*numbers)
            found = shape.best(generation) if kind is Rows else shape.all(generation)
            for tiles in (
                *found,
                shape.fit(Tiles(1, 1, 1), generation),
                shape.fit(Tiles(9999, 9999, 9999), generation),
            ):
                assert shape.vmem(tiles, generation) <= generation.vmem_bytes
                assert shape.fit(tiles, generation) == tiles
                assert tiles.m == m or tiles.m % 16 == 0
                for tile, size in ((tiles.k, k), (tiles.n, n)):
                    assert tile == size or (tile < size and tile % 128 == 0)
            if kind is Rows:
                for size in shape.strips(found[0], generation):
                    assert found[0].m % size == 0


# The tail, and what lies before the offset, are NaN; groups are cut by tiles, some are empty.
SIZES, OFFSET, HELD = [11, 40, 0, 3, 75, 9], 1, 4
M, K, N = 150, 200, 136


def call(dtype, transpose):
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(M, K)), rng.normal(size=(HELD, *((N, K) if transpose else (K, N))))
    dout = rng.normal(size=(M, N))
    own = np.zeros(M, bool)
    own[sum(SIZES[:OFFSET]) : sum(SIZES[: OFFSET + HELD])] = True
    a[~own] = dout[~own] = np.nan
    return *(jnp.asarray(x, dtype) for x in (a, b, dout)), own


RACES = [
    ("float32", "on_wait", False, (32, 128, 128)),
    pytest.param("float32", "eager", True, (64, 128, 128), marks=slow),
    pytest.param("bfloat16", "eager", False, (32, 128, 128), marks=slow),
    pytest.param("bfloat16", "on_wait", True, (128, 256, 256), marks=slow),
]


@pytest.mark.interpreted
@pytest.mark.parametrize(("dtype", "mode", "transpose", "sizes"), RACES)
def test_values_and_races(dtype, mode, transpose, sizes, capfd):
    """Two cores; uninitialised memory is NaN, and so are the rows of no group."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    from jax.experimental.pallas import tpu as pltpu

    interpret = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode, num_cores_or_threads=2)
    a, b, dout, own = call(dtype, transpose)
    spec = operation.GroupedSpec(transpose, jnp.dtype(dtype), jnp.dtype("float32"))
    given = {"a": a, "b": b, "group_sizes": jnp.asarray(SIZES), "group_offset": jnp.asarray(OFFSET)}
    arrays = operation.OPERATION.prepare(given, spec)
    kernel, blocks = TpuGroupedMatmul(), dict(zip(("blocksize_m", "blocksize_k", "blocksize_n"), sizes, strict=True))

    @jax.jit
    def run(arrays, dout):
        out, _ = kernel.forward(arrays, spec, FwdParams(**blocks), interpret=interpret)
        return out[0], kernel.backward(arrays, spec, BwdParams(**blocks), None, None, dout, None, interpret=interpret)

    out, grads = jax.block_until_ready(run(arrays, dout[None]))
    assert not interpret_pallas_call.races.races_found
    printed = "".join(capfd.readouterr())
    assert "RACE" not in printed
    assert "non-zero" not in printed

    a, b, dout = (np.asarray(x, np.float64) for x in (a, b, dout))
    a, dout = (np.where(own[:, None], x, 0) for x in (a, dout))
    with jax.enable_x64(True):
        expected, pull = jax.vjp(
            lambda a, b: reference(a, b, jnp.asarray(SIZES), group_offset=OFFSET, transpose_b=transpose),
            jnp.asarray(a),
            jnp.asarray(b),
        )
        da, db = pull(jnp.asarray(dout))
    assert_close(out, expected, dtype)
    assert not np.asarray(out)[~own].any()
    assert_close(grads["a"][0], da, dtype, gradient=True, what="a")
    assert_close(grads["b"][0], db, dtype, gradient=True, what="b")
    assert not np.asarray(grads["b"][0][1]).any()


def test_sums_in_float64_are_refused(x64):
    a, b = jnp.ones((4, 2), "float32"), jnp.ones((1, 2, 3), "float32")
    with target("tpu-v6e"):
        explained = explain("grouped_matmul", a, b, jnp.asarray([4]), preferred_element_type="float64")
        assert explained.chosen.platform.value == "xla"
        assert "a result in float64 of float32 is not supported" in str(explained)


def test_what_is_left_to_xla():
    """The batched form, unless the kernel is asked for by name."""
    a, b = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 3, 8, 5))
    with target("tpu-v6e"):
        assert explain("grouped_matmul", a, b).chosen.platform.value == "xla"
        assert explain("grouped_matmul", a, b, platform="pallas").chosen.platform.value == "pallas"
        ragged = explain("grouped_matmul", a[0, 0], b[0], jnp.asarray([1, 2, 1]), gradients=True)
        assert ragged.chosen.platform.value == ragged.backward.chosen.platform.value == "pallas"


_COMPILE = """
import json, sys, time
import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from ejkernel import explain, grouped_matmul, kernel_registry, target

for topology, dtype, result, m, k, n, groups, transpose, batched in json.loads(sys.argv[1]):
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    where = SingleDeviceSharding(device)
    def abstract(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    lead = (1, groups) if batched else ()
    a, dout = abstract(*lead, m, k), abstract(*lead, m, n, dtype=result)
    b = abstract(*lead, *(() if batched else (groups,)), *((n, k) if transpose else (k, n)))
    sizes = None if batched else abstract(groups, dtype="int32")
    options = {"transpose_b": transpose, "preferred_element_type": result}
    if batched:
        options["platform"] = "pallas"

    def forward(a, b, sizes):
        return grouped_matmul(a, b, sizes, **options)

    def backward(a, b, sizes, dout):
        return jax.vjp(lambda a, b: forward(a, b, sizes), a, b)[1](dout)

    with target(device):
        explained = explain(grouped_matmul, a, b, sizes, **options, gradients=True)
        work = kernel_registry.operation("grouped_matmul").cost(explained.call)
        start = time.process_time()
        compiled = [
            jax.jit(forward).lower(a, b, sizes).compile(), jax.jit(backward).lower(a, b, sizes, dout).compile()
        ]
    print(json.dumps({
        "platforms": [explained.chosen.platform.value, explained.backward.chosen.platform.value],
        "flops": [x.cost_analysis()["flops"] for x in compiled],
        "temporary": [x.memory_analysis().temp_size_in_bytes for x in compiled],
        "kernels": [[name for name in ("grouped_matmul", "gradient_a", "gradient_b")
                     if f"%{name}." in x.as_text() or f"grouped_matmul_{name}" in x.as_text()] for x in compiled],
        "work": [work.flops, work.backward_flops],
        "seconds": time.process_time() - start,
    }), flush=True)
"""

TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
SMALL = [("v5e:2x2", "bfloat16", "bfloat16", 1000, 384, 256, 5, False, False)]
DEFAULTS = [
    (topology, dtype, result, *sizes, transpose, batched)
    for topology in TOPOLOGIES
    for dtype, result, sizes, transpose, batched in (
        ("bfloat16", "bfloat16", (8192, 4096, 14336, 8), False, False),
        ("bfloat16", "float32", (4096, 2048, 768, 128), True, False),
        ("float32", "float32", (8192, 4096, 14336, 8), False, False),
        ("bfloat16", "bfloat16", (1024, 1024, 512, 8), True, True),
        ("bfloat16", "bfloat16", (37, 6, 4, 3), False, False),
    )
]


@pytest.mark.compiled
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("calls", [SMALL, pytest.param(DEFAULTS, marks=slow)], ids=["one", "defaults"])
def test_compiled_by_libtpu(calls):
    """Nothing but the steps' list lies in temporary memory, and the compiler is told of the operation's own work."""
    path = os.pathsep.join([os.path.dirname(os.path.dirname(__file__)), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", _COMPILE, json.dumps(calls)],
        env={**os.environ, **TPU_ENVIRONMENT, "XLA_FLAGS": "", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    seen = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(seen) == len(calls)
    for given, one in zip(calls, seen, strict=True):
        assert one["platforms"] == ["pallas", "pallas"], given
        assert one["kernels"][1][-2:] == ["gradient_a", "gradient_b"], given
        for told, work in zip(one["flops"], one["work"], strict=True):
            assert work <= told <= 1.01 * work + 1e6, given
        assert max(one["temporary"]) < 2 * 2**20, given
