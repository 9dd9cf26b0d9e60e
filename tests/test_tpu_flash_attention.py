"""Flash attention's forward for TPUs: its plan, in Pallas' interpreter with race detection, compiled by libtpu."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import bound
from jax.experimental.pallas import tpu as pltpu
from lanes import some
from tolerances import assert_close

from ejkernel import FwdParams, kernel_registry
from ejkernel.kernels._pallas.tpu.flash_attention import forward as module
from ejkernel.kernels._pallas.tpu.flash_attention import parameters, plan
from ejkernel.ops.flash_attention import FlashSpec

pytestmark = pytest.mark.tpu

OPERATION = kernel_registry.operation("flash_attention")
SMALL = FwdParams(q_blocksize=128, kv_blocksize=256, blocksize_keys=128)


def spec_of(window=(None, None)):
    return FlashSpec(False, window, 1.0, None, 0.0)


def abstract(q_len, kv_len):
    shapes = {"query": (1, q_len, 2, 64), "key": (1, kv_len, 2, 64), "value": (1, kv_len, 2, 64)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}


def inputs(batch=1, q_len=160, kv_len=160, heads=2, kv_heads=1, dim=64, value_dim=None, dtype="float32"):
    rng = np.random.default_rng(q_len + kv_len + dim)
    shapes = (batch, q_len, heads, dim), (batch, kv_len, kv_heads, dim), (batch, kv_len, kv_heads, value_dim or dim)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


IDS = np.array([[1, 2, 0, 3]]).repeat([50, 130, 20, 100], 1).astype(np.int32)
LONELY = np.array([[7, 1]]).repeat([130, 170], 1).astype(np.int32)
CUTS = np.array([0, 70, 70, 250], np.int32)
LONG = {"q_len": 300, "kv_len": 300}
CALLS = {
    "plain": ({"q_len": 130, "kv_len": 200}, {}),
    "causal": (LONG, {"causal": True}),
    "more keys": ({"q_len": 90, "kv_len": 533, "batch": 2}, {"causal": True}),
    "more queries": ({"q_len": 333, "kv_len": 75}, {"causal": True}),
    "short": ({"q_len": 1, "kv_len": 9}, {}),
    "window": ({"q_len": 280, "kv_len": 700}, {"causal": True, "sliding_window": (40, 0)}),
    "two-sided window": (LONG, {"sliding_window": (20, 33)}),
    "soft cap": (LONG, {"causal": True, "logits_soft_cap": 2.0}),
    "negative scale": ({}, {"softmax_scale": -0.2}),
    "no scale": ({}, {"causal": True, "softmax_scale": 0.0}),
    "sinks": (LONG, {"causal": True, "softmax_aux": np.array([[0.5], [2.0]], np.float32)}),
    "high sinks": (
        {"q_len": 203, "kv_len": 75},
        {"causal": True, "softmax_aux": np.array([[60.0], [-60.0]], np.float32)},
    ),
    "segments": (LONG, {"causal": True, "q_segment_ids": IDS, "kv_segment_ids": IDS}),
    "large ids": (
        LONG,
        {"q_segment_ids": IDS.astype(np.uint32) * 2**30, "kv_segment_ids": IDS.astype(np.uint32) * 2**30},
    ),
    "segments without keys": (LONG, {"q_segment_ids": LONELY, "kv_segment_ids": np.ones_like(LONELY)}),
    "packed": (LONG, {"causal": True, "cum_seqlens_q": CUTS, "cum_seqlens_k": CUTS}),
    "bias": (LONG, {"causal": True, "bias": random(1, 2, 300, 300)}),
    "bias of keys": (LONG, {"bias": random(1, 1, 1, 300)}),
    "bias of queries, soft cap": (LONG, {"bias": random(1, 2, 300, 1), "logits_soft_cap": 2.0}),
    "bias of heads": (LONG, {"bias": random(1, 2, 1, 1)}),
    "bias of minus infinity": (LONG, {"bias": np.where(random(1, 1, 1, 300) > 0, -np.inf, 0).astype(np.float32)}),
    "mask": (LONG, {"attention_mask": random(1, 2, 300, 300) > 0}),
    "mask of keys": (LONG, {"attention_mask": random(1, 300) > 0, "causal": True}),
    "mask of queries": (LONG, {"attention_mask": random(1, 1, 300, 1) > 0}),
    "dropout": (LONG, {"causal": True, "dropout_prob": 0.3, "dropout_seed": 5}),
    "bfloat16": ({**LONG, "dtype": "bfloat16"}, {"causal": True}),
    "narrow dims": ({"dim": 8, "value_dim": 24}, {"causal": True}),
    "value dim": ({"dim": 192, "value_dim": 128}, {"causal": True}),
    "wide": ({"dim": 256, "dtype": "bfloat16"}, {"causal": True}),
}


def prepare(arrays, options):
    """What the operation gives an implementation."""
    options = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    call, _ = bound(*arrays, **options)
    arguments = OPERATION.signature.bind(*arrays, **options)
    arguments.apply_defaults()
    return OPERATION.prepare(OPERATION.normalise(dict(arguments.arguments)), call.spec), call.spec


def interpreted(arrays, options, params, capfd, **more):
    """In Pallas' interpreter, with race detection, against float64."""
    import jax._src.pallas.mosaic.interpret.interpret_pallas_call as interpreter

    prepared, spec = prepare(arrays, options)
    params = parameters.effective(prepared, spec, params, None)
    interpret = pltpu.InterpretParams(detect_races=True, **more)
    out, lse = jax.block_until_ready(module.forward(prepared, spec, params, interpret=interpret))
    assert not interpreter.races.races_found
    printed = "".join(capfd.readouterr())
    assert "RACE" not in printed
    assert "non-zero" not in printed
    expected, expected_lse = oracle.attention(*(np.asarray(x, np.float64) for x in arrays), **options)
    assert_close(out, expected, str(out.dtype), what="out")
    assert_close(lse, expected_lse, str(out.dtype), what="lse")
    return out


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(CALLS, "more keys", "segments", "bias", "dropout"))
def test_interpreted(name, capfd):
    shape, options = CALLS[name]
    interpreted(inputs(**shape), options, SMALL, capfd)


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("name", ["causal", "segments", "mask", "sinks"])
def test_two_cores_and_both_ways_to_copy(name, mode, capfd):
    shape, options = CALLS[name]
    interpreted(inputs(**shape), options, SMALL, capfd, dma_execution_mode=mode, num_cores_or_threads=2)


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("sizes", [(512, 512, 256), (384, 384, 384), (128, 640, 128), (1024, 1024, 512)])
def test_other_blocks(sizes, capfd):
    params = FwdParams(**dict(zip(parameters.READS, sizes, strict=True)))
    interpreted(inputs(q_len=600, kv_len=1100), {"causal": True, "sliding_window": (333, 0)}, params, capfd)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "name", some(["window", "segments", "segments without keys", "packed", "mask of keys"], "segments")
)
def test_what_no_query_sees_may_be_nan(name, capfd):
    shape, options = CALLS[name]
    query, key, value = inputs(**shape)
    masks = {
        "attention_mask",
        "causal",
        "sliding_window",
        "cum_seqlens_q",
        "cum_seqlens_k",
        "q_segment_ids",
        "kv_segment_ids",
    }
    masks = {n: options[n] for n in masks & options.keys()}
    seen = oracle.visible_pairs(1, 2, query.shape[1], key.shape[1], **masks).any((0, 1, 2))
    assert not seen.all()
    key, value = (jnp.where(seen[:, None, None], x, jnp.nan) for x in (key, value))
    out = interpreted((query, key, value), options, SMALL, capfd)
    assert jnp.isfinite(out).all()


PLANS = [
    (1024, 1024, (None, 0), 256, 128),
    (1000, 900, (None, 0), 256, 128),
    (700, 1000, (130, 0), 128, 256),
    (700, 1000, (50, 20), 128, 256),
    (300, 1000, (None, None), 128, 256),
    (75, 300, (100, 0), 128, 128),
]


@pytest.mark.parametrize("case", PLANS, ids=str)
@pytest.mark.parametrize("partial_rows", [True, False])
def test_a_table_of_blocks_says_what_they_hold(case, partial_rows):
    q_len, kv_len, window, q_block, kv_block = case
    arrays, spec = abstract(q_len, kv_len), spec_of(window)
    sizes = (arrays, spec, q_block, kv_block, partial_rows)
    table, patterns = plan.with_patterns(plan.block_kinds(*sizes), *sizes)
    seen = oracle.visible_pairs(1, 1, q_len, kv_len, sliding_window=window)[0, 0]
    row, column = np.arange(q_block)[:, None], np.arange(kv_block)
    for (i, j), kind in np.ndenumerate(table[0, 0]):
        part = seen[i * q_block : (i + 1) * q_block, j * kv_block : (j + 1) * kv_block]
        full = np.zeros((q_block, kv_block), bool)
        full[: part.shape[0], : part.shape[1]] = part
        rows = part.shape[0] if partial_rows else q_block
        assert full.any() == (kind != plan.HIDDEN)
        assert full[:rows].all() == (kind == plan.WHOLE)
        if kind < plan.PATTERN:
            continue
        pattern = patterns[kind - plan.PATTERN]
        found = np.ones((q_block, kv_block), bool)
        found &= True if pattern.low is None else column >= row + pattern.low
        found &= True if pattern.high is None else column < row + pattern.high
        found &= True if pattern.keys is None else column < pattern.keys
        found &= True if pattern.queries is None else row < pattern.queries
        np.testing.assert_array_equal(found[:rows], full[:rows])
        for q in range(0, q_block, 64):
            for k in range(0, kv_block, 64):
                told = pattern.sees(slice(q, q + 64), slice(k, k + 64))
                there = found[q : q + 64, k : k + 64]
                assert told is None or (there.all() if told else not there.any())


@pytest.mark.parametrize("by_keys", [False, True])
def test_lists_made_on_the_device_are_those_made_on_the_host(by_keys):
    kinds = np.random.default_rng(0).choice([0, 0, 1, 2], (2, 3, 4, 5)).astype(np.int8)
    kinds[0, 0, 2] = kinds[1, 1, :, 3] = 0
    host, device = plan.list_steps(kinds, by_keys), plan.list_steps(jnp.asarray(kinds), by_keys)
    assert host.count == device.count
    for x, y in zip(host[:5], device[:5], strict=True):
        np.testing.assert_array_equal(x, np.asarray(y)[: host.count])
    seen = {}
    for b, h, major, minor, flags in zip(*host[:5], strict=True):
        seen.setdefault((b, h, major), []).append((minor, flags))
    table = kinds.swapaxes(2, 3) if by_keys else kinds
    assert list(seen) == list(np.ndindex(table.shape[:3]))
    for index, steps in seen.items():
        listed = np.flatnonzero(table[index]).tolist() or [0]
        assert [minor for minor, _ in steps] == listed
        assert [flags >> plan.KIND_SHIFT for _, flags in steps] == table[index][listed].tolist()
        edges = [flags & 3 for _, flags in steps]
        assert edges == [
            (plan.FIRST if n == 0 else 0) | (plan.LAST if n == len(steps) - 1 else 0) for n in range(len(steps))
        ]


@pytest.mark.parametrize("name", ["plain", "causal", "window"])
def test_the_compiler_is_told_the_operations_work(name):
    shape, options = CALLS[name]
    arrays = inputs(**shape)
    call, _ = bound(*arrays, **options)
    work, told = OPERATION.work(call), module.costs(*prepare(arrays, options))
    assert (told["flops"], told["bytes_accessed"]) == (work.flops, work.bytes)


@pytest.mark.parametrize(
    "asked", [FwdParams(), FwdParams(q_blocksize=1), FwdParams(q_blocksize=10_000, kv_blocksize=3000)], ids=str
)
@pytest.mark.parametrize("lengths", [(8192, 8192), (1, 100), (1000, 77)], ids=str)
def test_parameters_are_clipped_to_what_fits(asked, lengths):
    shapes = abstract(*lengths)
    found = parameters.effective(shapes, spec_of(), asked, None)
    assert parameters.effective(shapes, spec_of(), found, None) == found
    assert found.kv_blocksize % found.blocksize_keys == 0
    assert all(size % 128 == 0 for size in found.to_dict().values())


_COMPILE = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
import test_tpu_flash_attention as t
from ejkernel.contracts.device import describe
from ejkernel.kernels._pallas.tpu.flash_attention import parameters
results = []
for topology in json.loads(sys.argv[1]):
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    where, info = SingleDeviceSharding(device), describe(device)
    for arrays, options in t.compiled_calls(json.loads(sys.argv[2])):
        prepared, spec = t.abstract_call(arrays, options)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), prepared)
        params = parameters.defaults(shapes, spec, info)
        with jax.default_device(device):
            run = jax.jit(lambda arrays: t.module.forward(arrays, spec, params, device=info))
            memory = run.lower(shapes).compile().memory_analysis()
        results.append(memory.temp_size_in_bytes / memory.argument_size_in_bytes)
print(json.dumps(results))
"""

TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
}


def abstract_call(arrays, options):
    """Prepared arrays, abstract, and the spec."""
    given = {name: x for name, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)}
    prepared = jax.eval_shape(lambda arrays, given: prepare(arrays, {**options, **given})[0], arrays, given)
    return prepared, bound(*arrays, **options)[0].spec


def compiled_calls(names):
    """Of the calls, lengths apart: their features with 2048 queries and keys of 128 dims."""
    for name in names:
        dims = HEAD_DIMS.get(name, (128, 128))
        dtype = jnp.float32 if name == "plain" else jnp.bfloat16
        q, k, v = ((1, 2048, 4, dims[0]), (1, 2048, 2, dims[0]), (1, 2048, 2, dims[1]))
        yield [jax.ShapeDtypeStruct(shape, dtype) for shape in (q, k, v)], large(name)


def large(name):
    """The options of a call of 2048 queries and keys."""
    return LARGE[name] if name in LARGE else CALLS[name][1]


# Of the calls that are compiled, where not 128.
HEAD_DIMS = {
    "value dim": (192, 128),
    "narrow dims": (64, 64),
    **dict.fromkeys(("wide", "wide, bias of pairs", "wide, mask of pairs"), (256, 256)),
}
LARGE = {
    "segments": {
        "causal": True,
        "q_segment_ids": np.ones((1, 2048), np.int32),
        "kv_segment_ids": np.ones((1, 2048), np.int32),
    },
    "packed": {"cum_seqlens_q": np.array([0, 2048]), "cum_seqlens_k": np.array([0, 2048])},
    "sinks": {"causal": True, "softmax_aux": np.ones((4, 1), np.float32)},
    "bias": {"causal": True, "bias": jax.ShapeDtypeStruct((1, 4, 2048, 2048), jnp.float32)},
    "wide, bias of pairs": {"causal": True, "bias": jax.ShapeDtypeStruct((1, 1, 2048, 2048), jnp.bfloat16)},
    "wide, mask of pairs": {"causal": True, "attention_mask": jax.ShapeDtypeStruct((1, 1, 2048, 2048), jnp.bool_)},
}


def compile_by_libtpu(topologies, names):
    """Temporary memory beside that of the arguments, of each call for each topology."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.path.dirname(here), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", _COMPILE, json.dumps(topologies), json.dumps(names)],
        env={**os.environ, **TPU_ENVIRONMENT, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.compiled
def test_compiles_for_a_tpu():
    # The copies of the arguments and of the result with heads before positions, and nothing that grows with the square.
    assert max(compile_by_libtpu(["v5e:2x2"], ["causal"])) < 3


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_compiles_for_every_tpu(topology):
    names = [
        "plain",
        "causal",
        "window",
        "soft cap",
        "segments",
        "packed",
        "sinks",
        "dropout",
        "value dim",
        "narrow dims",
        "wide",
        "bias",
        "wide, bias of pairs",
        "wide, mask of pairs",
    ]
    assert max(compile_by_libtpu([topology], names)) < 3
