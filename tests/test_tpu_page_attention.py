"""Paged attention in Pallas for TPUs: in its interpreter, and compiled for TPUs without one."""

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys

import examples_page_attention as pages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from lanes import some
from test_compilation import TPU_ENVIRONMENT
from tolerances import assert_close

from ejkernel import FwdParams, explain, kernel_registry
from ejkernel.contracts.device import describe
from ejkernel.kernels._pallas.tpu.generations import generation_of
from ejkernel.kernels._pallas.tpu.page_attention.forward import forward
from ejkernel.kernels._pallas.tpu.page_attention.geometry import candidates, defaults, geometry, page_bytes

pytestmark = pytest.mark.tpu

OPERATION = kernel_registry.operation("page_attention")
LENS, CHUNKS = [300, 0, 33, 40], [20, 0, 1, 40]
# Arguments of ``examples_page_attention.make`` beside those below, then those of the call.
WIDE = {"dim": 32, "max_blocks": 20, "size": 16, "kv_heads": 2}
WHOLE = {"size": 128, "max_blocks": 3}
CALLS = {
    "decoding": ({"chunks": None, "group": 4}, {}),
    "chunks": ({"group": 4, "padding": 5}, {}),
    "window": ({"chunks": None, "group": 2}, {"sliding_window": (40, 0)}),
    "chunks in a window": ({"group": 3}, {"sliding_window": (40, 0)}),
    "only itself": ({"chunks": None}, {"sliding_window": 0}),
    "sinks and a cap": ({"group": 4, "sinks": "own", "padding": 3}, {"logits_soft_cap": 3.0}),
    "value dim": ({"chunks": None, "value_dim": 160}, {"softmax_scale": 0.3}),
    "pages of 48": ({"size": 48, "max_blocks": 7, "group": 6}, {"sliding_window": (100, 0)}),
    "parts of pages": ({"size": 384, "max_blocks": 1, "group": 2, "dim": 128}, {}),
    "traced window": ({"chunks": None, "group": 2, "traced_window": 40}, {}),
    "chunks in a traced window": ({"group": 3, "traced_window": 40, "padding": 2}, {}),
    # Pages of so many tokens have them as columns if the head dim fills no lanes.
    "columns": ({"chunks": None, "group": 4, **WHOLE}, {}),
    "columns of chunks in a window": ({"group": 3, **WHOLE}, {"sliding_window": (40, 0)}),
    "columns of keys": ({"chunks": None, "dim": 192, "value_dim": 128, **WHOLE}, {}),
    "columns of values": ({"dim": 128, "value_dim": 24, **WHOLE}, {"logits_soft_cap": 3.0}),
    "columns of parts of pages": ({"size": 384, "max_blocks": 1, "group": 2, "dim": 40}, {}),
    "columns of int8": ({"chunks": None, "cache": "int8", "scales": "own", "group": 2, **WHOLE}, {}),
    "columns of e4m3": ({"cache": "float8_e4m3fn", "scales": "own", "dim": 80, "group": 2, **WHOLE}, {}),
    "int8": ({"chunks": None, "cache": "int8", "scales": "own", "size": 32, "max_blocks": 10, "group": 2}, {}),
    "e4m3": ({"cache": "float8_e4m3fn", "scales": "scalar", "group": 2}, {}),
    "e4m3 decoding": ({"chunks": None, "cache": "float8_e4m3fn", "scales": "own", "group": 2}, {"sliding_window": 200}),
    "e5m2": ({"chunks": None, "cache": "float8_e5m2", "scales": "own"}, {}),
    "many rows": ({"kv_heads": 1, "group": 16}, {}),
    "negative scale": ({"chunks": None}, {"softmax_scale": -0.2}),
}
# Two steps of 128 keys for some contexts, one for others; each head a program of its own.
SMALL = FwdParams(blocksize_m=8, kv_blocksize=128, blocksize_heads=1, num_stages=2)


def make(name, dtype="float32", lens=LENS, **changed):
    """Everything that no query may see is NaN, and what the tables have for it is anything."""
    sizes, options = CALLS[name]
    sizes = {"chunks": CHUNKS, **WIDE, **sizes, **changed}
    arrays = pages.make(lens, **sizes)(np.random.default_rng(0))
    left = options.get("sliding_window", sizes.get("traced_window", max(lens)))
    left = left[0] if isinstance(left, tuple) else left
    floating = sizes.get("cache") != "int8"
    arrays |= {name: np.array(arrays[name]) for name in ("key_cache", "value_cache")}
    for b, (length, new) in enumerate(zip(lens, sizes["chunks"] or [1] * len(lens), strict=True)):
        hidden = max(0, length - new - left)
        for token in range(hidden if floating else 0):
            for cache in ("key_cache", "value_cache"):
                arrays[cache][arrays["block_tables"][b, token // sizes["size"]], :, token % sizes["size"]] = np.nan
        arrays["block_tables"][b, : hidden // sizes["size"]] = -9
    kept = {"softmax_aux": "float32", "k_scale": "float32", "v_scale": "float32"}
    return {
        name: jnp.asarray(x, kept.get(name, dtype) if x.dtype == np.float64 else None) for name, x in arrays.items()
    }, options


def prepare(arrays, options):
    """What the operation gives an implementation."""
    bound = OPERATION.signature.bind(**arrays, **options)
    bound.apply_defaults()
    arguments = OPERATION.normalise(dict(bound.arguments))
    spec = OPERATION.bind(arguments).spec
    if "sliding_window" in arrays:
        arguments["window_left"] = arrays["sliding_window"]  # abstract in what selection reads
    return OPERATION.prepare(arguments, spec), spec


def expected(arrays, options):
    with jax.enable_x64(True):
        wide = {
            name: jnp.asarray(np.asarray(x), "float64" if jnp.issubdtype(x.dtype, jnp.floating) else None)
            for name, x in arrays.items()
        }
        return [np.asarray(x) for x in jax.jit(functools.partial(pages.reference, return_lse=True, **options))(**wide)]


def interpreted(arrays, options, capfd, params=SMALL, *, cores=1, mode="on_wait"):
    """In Pallas' interpreter, with race detection, against float64. Memory that nothing was written to is NaN."""
    prepared, spec = prepare(arrays, options)
    interpret = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode, num_cores_or_threads=cores)
    found = [x[0] for x in jax.block_until_ready(forward(prepared, spec, params, interpret=interpret))]
    races = interpret_pallas_call.races
    assert races is None or not races.races_found
    printed = "".join(capfd.readouterr())
    assert "non-zero" not in printed
    assert "RACE" not in printed
    dtype = str(found[0].dtype)
    for what, x, e in zip(("out", "lse"), found, expected(arrays, options), strict=True):
        assert_close(x, e, dtype, what=what)
    return found


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(CALLS, "chunks", "e4m3 decoding"))
def test_values(name, capfd):
    interpreted(*make(name), capfd)


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_bfloat16(name, capfd):
    interpreted(*make(name, "bfloat16"), capfd)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(["decoding", "chunks", "columns"], "decoding"))
def test_copies_that_happen_at_once_on_two_cores(name, capfd):
    """A copy may finish when it is asked for or when it is waited for: what overwrites a buffer too early shows in the first."""
    interpreted(*make(name), capfd, cores=2, mode="eager")


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    "params", [{"num_stages": 4}, {"kv_blocksize": 256}, {"blocksize_heads": 2, "num_stages": 3}], ids=str
)
@pytest.mark.parametrize("name", ["decoding", "chunks in a window", "columns of chunks in a window"])
def test_other_sizes(name, params, capfd):
    interpreted(*make(name), capfd, dataclasses.replace(SMALL, **params), cores=2)


@pytest.mark.interpreted
@pytest.mark.slow
def test_examples_of_a_vmap(capfd):
    """Two examples share the caches; each has tokens, contexts, tables, offsets, sinks and factors of its own."""
    arrays, options = make("sinks and a cap", scales="own", padding=0)
    order = np.array([1, 3, 0, 2])
    other = {
        **arrays,
        "query": arrays["query"][::-1],
        "context_lens": arrays["context_lens"][order],
        "block_tables": arrays["block_tables"][order],
        "cum_seqlens_q": jnp.asarray(np.cumsum([0, *np.array(CHUNKS)[order]]), jnp.int32),
        "softmax_aux": arrays["softmax_aux"] + 1,
        "k_scale": arrays["k_scale"] * 2,
    }
    prepared = [prepare(x, options) for x in (arrays, other)]
    both = {
        name: x if name.endswith("_cache") else jnp.concatenate([x, prepared[1][0][name]])
        for name, x in prepared[0][0].items()
    }
    found = forward(both, prepared[0][1], SMALL, interpret=pltpu.InterpretParams())
    for i, example in enumerate((arrays, other)):
        for x, e in zip(found, expected(example, options), strict=True):
            assert_close(x[i], e, "float32")


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("cache", ["key_cache", "value_cache"])
@pytest.mark.parametrize("token", [5, 299], ids=["in a full step", "in the last step"])
@pytest.mark.parametrize("sizes", [{}, {**WHOLE, "dim": 80}], ids=["rows", "columns"])
def test_a_nan_of_e4m3_that_is_seen_shows(cache, token, sizes):
    """Its bits are another number's in the form that hardware unpacks. -0, which is NaN there, is 0."""
    arrays, _ = make("e4m3", chunks=None, **sizes)
    size = arrays[cache].shape[2]
    page = int(arrays["block_tables"][0, token // size])
    stored = np.array(arrays[cache]).view(np.uint8)
    stored[page, 0, token % size, 3] = 0xFF
    stored[page, 1, token % size, 4] = 0x80
    arrays[cache] = jnp.asarray(stored.view(np.asarray(arrays[cache]).dtype))
    prepared, spec = prepare(arrays, {})
    out, lse = (np.asarray(x[0]) for x in forward(prepared, spec, SMALL, interpret=pltpu.InterpretParams()))
    if cache == "key_cache":
        assert np.isnan(out[0, :2]).all()
        assert np.isnan(lse[0, :2]).all()
    else:
        assert np.isnan(out[0, :2, 3]).all()
        assert np.isfinite(np.delete(out[0, :2], 3, 1)).all()
    assert np.isfinite(out[0, 2:]).all()
    assert np.isfinite(out[1:]).all()


def shapes(batch=64, heads=32, kv_heads=8, dim=128, page=32, max_blocks=64, dtype="bfloat16", cache=None, tokens=None):
    cache = jax.ShapeDtypeStruct((1, batch * max_blocks, kv_heads, page, dim), cache or dtype)
    found = {
        "query": jax.ShapeDtypeStruct((1, tokens or batch, heads, dim), dtype),
        "key_cache": cache,
        "value_cache": cache,
        "context_lens": jax.ShapeDtypeStruct((1, batch), jnp.int32),
        "block_tables": jax.ShapeDtypeStruct((1, batch, max_blocks), jnp.int32),
    }
    if tokens:
        found["query_starts"] = jax.ShapeDtypeStruct((1, batch + 1), jnp.int32)
    return found


@pytest.mark.parametrize("chip", ["tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7"])
@pytest.mark.parametrize("kv_heads", [1, 3, 8, 32])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("page", [16, 48, 128, 2048])
def test_sizes_fit_the_vector_memory(chip, kv_heads, dim, page):
    device = describe(chip)
    for more in ({}, {"tokens": 4096}, {"cache": "int8"}, {"dtype": "float32"}):
        call = shapes(heads=4 * kv_heads, kv_heads=kv_heads, dim=dim, page=page, **more)
        for params in (defaults(call, device), *candidates(call, device)):
            g = geometry(call, params, device)
            assert g.params == params
            assert kv_heads % g.heads == 0
            assert g.units * g.unit == g.keys
            assert g.parts * g.unit == page
            assert g.rows % 8 == 0
            assert 2 <= g.stages <= 8
            assert page_bytes(call, g) <= generation_of(device).vmem_bytes / 2


def test_cores_that_are_one_device_share_the_heads():
    assert [defaults(shapes(), describe(chip)).blocksize_heads for chip in ("tpu-v5e", "tpu-v5p", "tpu-v4")] == [
        8,
        4,
        4,
    ]


def explained(**more):
    arrays = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in shapes(**more).items()}
    return explain("page_attention", **arrays, device="tpu-v6e")


@pytest.mark.parametrize(
    ("sizes", "platform"),
    [({}, "pallas"), ({"cache": "int8"}, "pallas"), ({"dim": 64}, "pallas"), ({"page": 24}, "xla")],
    ids=str,
)
def test_what_runs_on_a_tpu(sizes, platform):
    assert explained(**sizes).chosen.platform.value == platform


# Compiled for TPUs, without one

COMPILED = """
import json, sys
sys.path[:0] = [{tests!r}]
import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
import test_tpu_page_attention as t
from ejkernel import page_attention, page_update, target
for topology in {topologies!r}:
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    where = SingleDeviceSharding(device)
    for name in {names!r}:
        arrays, options = t.compiled_call(name)
        arrays = {{k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for k, x in arrays.items()}}
        with target(device):
            compiled = jax.jit(lambda a: page_attention(**a, **options, platform="pallas", return_lse=True)).lower(arrays).compile()
        told = compiled.memory_analysis()
        print("TOLD", json.dumps([topology, name, told.temp_size_in_bytes, compiled.cost_analysis()["flops"]]), flush=True)
    for update in {updates!r}:
        arrays, scales = t.update_call(*update)
        arrays = {{k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for k, x in arrays.items()}}
        caches = {{k: arrays.pop(k) for k in ("key_cache", "value_cache")}}
        with target(device):
            run = jax.jit(lambda caches, a: page_update(**caches, **a, **scales), donate_argnums=0)
            told = run.lower(caches, arrays).compile().memory_analysis()
        print("WROTE", json.dumps([update, told.temp_size_in_bytes, told.alias_size_in_bytes]), flush=True)
"""
COMPILED_CALLS = {
    "decoding": ({}, {}),
    "small pages": ({"page": 16}, {"sliding_window": 1000}),
    "large pages": ({"page": 2048, "max_blocks": 2}, {}),
    "features": ({"sinks": True, "scales": True}, {"logits_soft_cap": 30.0, "sliding_window": 1000}),
    "chunks": ({"tokens": 2048}, {}),
    "chunks and features": (
        {"tokens": 2048, "sinks": True, "scales": True},
        {"logits_soft_cap": 30.0, "sliding_window": 1000},
    ),
    "int8": ({"cache": "int8", "scales": True}, {}),
    "e4m3": ({"cache": "float8_e4m3fn", "scales": True}, {}),
    "e4m3 chunks": ({"cache": "float8_e4m3fn", "scales": True, "tokens": 2048}, {}),
    "e5m2": ({"cache": "float8_e5m2"}, {}),
    "float32": ({"dtype": "float32"}, {}),
    "many heads": ({"kv_heads": 32}, {}),
    "one head": ({"kv_heads": 1}, {}),
    "head dim 256": ({"dim": 256, "heads": 16}, {}),
    "head dim 64": ({"dim": 64}, {}),
    "traced window": ({"traced_window": True, "tokens": 2048}, {}),
    "columns": ({"dim": 64, "page": 128}, {}),
    "columns of chunks": ({"dim": 80, "page": 256, "tokens": 2048, "sinks": True}, {"logits_soft_cap": 30.0}),
    "columns of int8": ({"dim": 96, "page": 128, "cache": "int8", "scales": True}, {}),
    "columns of e4m3": ({"dim": 64, "page": 512, "cache": "float8_e4m3fn", "scales": True}, {"sliding_window": 1000}),
    "columns of float32": ({"dim": 192, "page": 128, "dtype": "float32"}, {}),
    "long tables": ({"max_blocks": 8192, "batch": 256, "blocks": 64}, {}),
}


def compiled_call(name):
    sizes, options = COMPILED_CALLS[name]
    sizes = dict(sizes)
    sinks, scales, window = (sizes.pop(name, False) for name in ("sinks", "scales", "traced_window"))
    blocks = sizes.pop("blocks", None)
    arrays = {k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in shapes(**sizes).items()}
    if "query_starts" in arrays:
        arrays["cum_seqlens_q"] = arrays.pop("query_starts")
    if blocks:
        arrays |= {
            k: jax.ShapeDtypeStruct((blocks, *x.shape[1:]), x.dtype) for k, x in arrays.items() if k.endswith("_cache")
        }
    heads, kv_heads = arrays["query"].shape[1], arrays["key_cache"].shape[1]
    if window:
        arrays["sliding_window"] = jax.ShapeDtypeStruct((), jnp.int32)
    if sinks:
        arrays["softmax_aux"] = jax.ShapeDtypeStruct((heads, 2), jnp.float32)
    if scales:
        arrays |= dict.fromkeys(("k_scale", "v_scale"), jax.ShapeDtypeStruct((kv_heads,), jnp.float32))
    return arrays, options


def update_call(dtype, packed, page=32, dim=128):
    """Arguments of ``page_update``: caches of 1 GiB each at least, which no vector memory holds a copy of."""
    tokens, kind = 1024 if packed else 64, "bfloat16" if jnp.dtype(dtype).itemsize == 1 else dtype
    arrays = {
        name: jax.ShapeDtypeStruct((2**30 // (8 * page * dim), 8, page, dim), dtype)
        for name in ("key_cache", "value_cache")
    }
    arrays |= {name: jax.ShapeDtypeStruct((tokens, 8, dim), kind) for name in ("key", "value")}
    arrays |= {
        "context_lens": jax.ShapeDtypeStruct((64,), jnp.int32),
        "block_tables": jax.ShapeDtypeStruct((64, 32), jnp.int32),
    }
    if packed:
        arrays["cum_seqlens_q"] = jax.ShapeDtypeStruct((65,), jnp.int32)
    return arrays, {"k_scale": 0.1, "v_scale": 0.1} if kind != dtype else {}


UPDATES = [
    (dtype, packed, *sizes)
    for dtype in ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
    for packed in (False, True)
    for sizes in ((32, 128), (128, 64))
]


def compiled(topologies, names, updates=()):
    """For each topology and call, the bytes of temporary arrays and the operations that the compiler was told of."""
    environment = {**os.environ, **TPU_ENVIRONMENT, "XLA_FLAGS": ""}
    script = COMPILED.format(tests=os.path.dirname(__file__), topologies=topologies, names=names, updates=updates)
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stderr[-3000:]
    told = [json.loads(line[5:]) for line in result.stdout.splitlines() if line.startswith("TOLD")]
    assert len(told) == len(topologies) * len(names)
    wrote = [json.loads(line[6:]) for line in result.stdout.splitlines() if line.startswith("WROTE")]
    assert len(wrote) == len(topologies) * len(updates)
    for update, temporary, alias in wrote:
        # Tokens, pages that they are in, and indices, never a cache.
        assert temporary < (2**24 if update[2] == 32 else 2**28), (update, temporary)
        assert alias >= 2**31, (update, alias)
    return told


def check_compiled(told):
    for topology, name, temporary, flops in told:
        arrays, options = compiled_call(name)
        call = explain("page_attention", **arrays, **options, device="tpu-v6e").call
        # Queries and results in the kernel's order, with what a tile has too many; never the caches.
        small = sum(x.size * x.dtype.itemsize for k, x in arrays.items() if not k.endswith("_cache"))
        assert name == "head dim 64" or temporary < 16 * small + 2**22, (topology, name, temporary)
        # Beside the kernel's, the compiler counts those of the plan.
        work = OPERATION.cost(call)
        assert work.flops <= flops <= 1.05 * work.flops + 2**26, (topology, name)


needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@needs_libtpu
@pytest.mark.compiled
def test_it_compiles():
    """The kernel, and ``page_update``, which writes to the caches in place."""
    check_compiled(compiled(["v5e:2x2"], ["decoding", "columns"], [("int8", True, 128, 64)]))


@needs_libtpu
@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_everything_compiles_for_every_generation(topology):
    check_compiled(compiled([topology], list(COMPILED_CALLS), UPDATES))


SHARDED = """
import re, sys
sys.path[:0] = [{tests!r}]
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import test_tpu_page_attention as t
from ejkernel import page_attention, target
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = Mesh(np.array(devices).reshape(2, 2), ("b", "h"))
for name in ("features", "chunks and features"):
    arrays, options = t.compiled_call(name)
    b = None if "cum_seqlens_q" in arrays else "b"
    heads = {{"key_cache": P(None, "h"), "value_cache": P(None, "h"), "softmax_aux": P("h"), "k_scale": P("h"), "v_scale": P("h")}}
    specs = {{"query": P(b, "h"), "context_lens": P(b), "block_tables": P(b), "cum_seqlens_q": P(), **heads}}
    specs = {{k: specs[k] for k in arrays}}
    given = {{k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[k])) for k, x in arrays.items()}}
    run = lambda a: page_attention(**a, **options, platform="pallas")
    with target(devices[0]):
        mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=P(b, "h")))
        text = mapped.lower(given).compile().as_text()
    assert "tpu_custom_call" in text
    assert not re.findall("all-gather|all-to-all|collective-permute|all-reduce", text), name
"""


@needs_libtpu
@pytest.mark.compiled
@pytest.mark.slow
def test_it_compiles_inside_shard_map():
    """With the default check_vma, without a word between devices."""
    environment = {**os.environ, **TPU_ENVIRONMENT, "XLA_FLAGS": ""}
    script = SHARDED.format(tests=os.path.dirname(__file__))
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-3000:]
