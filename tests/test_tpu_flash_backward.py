"""Flash attention's backward for TPUs: in Pallas' interpreter with race detection, its steps, compiled by libtpu."""

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
import test_tpu_blocksparse as blocksparse
from conftest import bound
from jax.experimental.pallas import tpu as pltpu
from lanes import some
from test_tpu_flash_attention import CALLS, HEAD_DIMS, LONG, TPU_ENVIRONMENT, inputs, large, prepare, random
from tolerances import assert_close

from ejkernel import BwdParams, FwdParams, kernel_registry
from ejkernel.kernels._pallas.tpu.blocksparse_attention import gradients as blocksparse_module
from ejkernel.kernels._pallas.tpu.flash_attention import backward_parameters as parameters
from ejkernel.kernels._pallas.tpu.flash_attention import backward_steps as steps
from ejkernel.kernels._pallas.tpu.flash_attention import gradients as module
from ejkernel.kernels._pallas.tpu.flash_attention import plan
from ejkernel.kernels._xla import flash_attention as xla

pytestmark = pytest.mark.tpu

OPERATION = kernel_registry.operation("flash_attention")
SMALL = BwdParams(q_blocksize=128, kv_blocksize=256)
IDS_OF_TWO = np.array([[1, 2, 3], [4, 4, 0]]).repeat(100, 1).astype(np.int32)
TWO = {**LONG, "batch": 2, "heads": 4, "kv_heads": 2}
# Beside the forward's: which axes a bias has decides what its gradient sums.
MORE = {
    "two lists": (TWO, {"causal": True, "q_segment_ids": IDS_OF_TWO, "kv_segment_ids": IDS_OF_TWO}),
    "bias of pairs, two lists": (
        TWO,
        {"bias": random(2, 1, 300, 300), "q_segment_ids": IDS_OF_TWO, "kv_segment_ids": IDS_OF_TWO},
    ),
    "bias of keys, two lists": (
        TWO,
        {"bias": random(1, 4, 1, 300), "q_segment_ids": IDS_OF_TWO, "kv_segment_ids": IDS_OF_TWO},
    ),
    "one bias": (TWO, {"bias": random(1, 1, 1, 1), "causal": True, "logits_soft_cap": 2.0}),
    "bias with dropout": (TWO, {"bias": random(1, 4, 300, 300), "dropout_prob": 0.3, "dropout_seed": 5}),
    "bias with a mask": (
        {**TWO, "dtype": "bfloat16"},
        {"bias": random(1, 4, 300, 1), "attention_mask": random(2, 4, 300, 300) > 0},
    ),
    "bias with a mask of keys": (LONG, {"bias": random(1, 2, 300, 300), "attention_mask": random(1, 300) > 0}),
}
EVERY = {**CALLS, **MORE}


@pytest.fixture(autouse=True)
def small_blocks_of_a_bias(monkeypatch):
    monkeypatch.setattr(module, "BIAS_BLOCK", 128)


def given(arrays, options):
    """Prepared arrays, the spec, and what a backward takes beside them: residuals of another platform, cotangents."""
    prepared, spec = prepare(arrays, options)
    out, lse = xla.forward(prepared, spec, FwdParams())
    rng = np.random.default_rng(1)
    dout = jnp.asarray(rng.standard_normal(out.shape), out.dtype)
    dlse = jnp.asarray(rng.standard_normal(lse.shape), lse.dtype)
    return prepared, spec, (out, lse, dout, dlse)


def wanted_of(prepared):
    return frozenset(OPERATION.gradients) & prepared.keys()


def interpreted(arrays, options, params, capfd, cotangents=None, **more):
    """In Pallas' interpreter, with race detection, against float64."""
    import jax._src.pallas.mosaic.interpret.interpret_pallas_call as interpreter

    prepared, spec, rest = given(arrays, options)
    if cotangents is not None:
        rest = (*rest[:2], *cotangents(*rest[1:]))
    interpret = pltpu.InterpretParams(detect_races=True, **more)
    # One compilation, where each kernel alone would be compiled by itself.
    run = jax.jit(
        lambda prepared, rest: module.backward(prepared, spec, params, *rest, wanted_of(prepared), interpret=interpret)
    )
    grads = jax.block_until_ready(run(prepared, rest))
    assert not interpreter.races.races_found
    printed = "".join(capfd.readouterr())
    assert "RACE" not in printed
    assert "non-zero" not in printed
    return prepared, grads, rest


def compared(arrays, options, params, capfd, **more):
    prepared, grads, (_, _, dout, dlse) = interpreted(arrays, options, params, capfd, **more)
    wide = (np.asarray(x, np.float64) for x in arrays)
    _, _, expected = oracle.attention(*wide, **options, dout=dout, dlse=np.where(np.isfinite(dlse), dlse, 0))
    assert grads.keys() == wanted_of(prepared)
    for name, grad in grads.items():
        if name == "softmax_aux":
            # Kernels have the sum of a head's sinks, of which there is one here.
            grad = grad.reshape(expected[name].shape)
        assert_close(grad, expected[name], str(arrays[0].dtype), gradient=True, what=name)
    return grads


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(EVERY, "bias of pairs, two lists"))
def test_interpreted(name, capfd):
    shape, options = EVERY[name]
    compared(inputs(**shape), options, SMALL, capfd)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(["causal", "two lists", "bias of pairs, two lists", "sinks"], "two lists"))
def test_keys_in_spans(name, monkeypatch, capfd):
    monkeypatch.setattr(module, "spans", lambda *_: 2)
    shape, options = EVERY[name]
    compared(inputs(**shape), options, BwdParams(q_blocksize=128, kv_blocksize=128), capfd)


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("spans", [1, 2])
@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("name", ["causal", "two lists", "mask", "one bias"])
def test_two_cores_and_both_ways_to_copy(name, mode, spans, monkeypatch, capfd):
    monkeypatch.setattr(module, "spans", lambda *_: spans)
    shape, options = EVERY[name]
    compared(inputs(**shape), options, SMALL, capfd, dma_execution_mode=mode, num_cores_or_threads=2)


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("sizes", [(512, 512), (384, 640), (256, 128), (1024, 1024)])
def test_other_blocks(sizes, capfd):
    params = BwdParams(**dict(zip(parameters.READS, sizes, strict=True)))
    compared(inputs(q_len=600, kv_len=1100), {"causal": True, "sliding_window": (333, 0)}, params, capfd)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(["window", "segments", "packed", "mask of keys", "bias of minus infinity"]))
def test_what_no_query_sees_may_be_nan(name, capfd):
    shape, options = CALLS[name]
    query, key, value = inputs(**shape)
    masks = {n: x for n, x in options.items() if n not in ("bias",)}
    seen = oracle.visible_pairs(1, 2, query.shape[1], key.shape[1], **masks)
    if "bias" in options:
        seen &= options["bias"] > -np.inf
    seen = seen.any((0, 1, 2))
    assert not seen.all()
    key, value = (jnp.where(seen[:, None, None], x, jnp.nan) for x in (key, value))
    _, grads, _ = interpreted((query, key, value), options, SMALL, capfd)
    for name, grad in grads.items():
        assert jnp.isfinite(grad).all(), name


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["more queries", "segments", "segments without keys", "packed", "mask of queries"])
def test_rows_that_see_nothing_have_no_gradients_whatever_their_cotangents(name, capfd):
    shape, options = CALLS[name]

    def cotangents(lse, dout, dlse):
        unseeing = lse == -jnp.inf
        assert unseeing.any()
        return jnp.where(unseeing.swapaxes(1, 2)[..., None], jnp.nan, dout), jnp.where(unseeing, jnp.nan, dlse)

    _, grads, (_, lse, _, _) = interpreted(inputs(**shape), options, SMALL, capfd, cotangents=cotangents)
    for name, grad in grads.items():
        assert jnp.isfinite(grad).all(), name
    assert not jnp.any(jnp.where((lse == -jnp.inf).swapaxes(1, 2)[..., None], grads["query"], 0))


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("wanted", [{"query"}, {"key"}, {"value", "query"}])
def test_the_wanted_gradients_alone(wanted):
    prepared, spec, rest = given(inputs(**LONG), {"causal": True})

    def run(wanted):
        return module.backward(prepared, spec, SMALL, *rest, frozenset(wanted), interpret=pltpu.InterpretParams())

    grads, every = run(wanted), run({"query", "key", "value"})
    assert grads.keys() == wanted
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad, every[name])


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("name", blocksparse.CALLS)
def test_blocksparse_attention(name, capfd):
    import jax._src.pallas.mosaic.interpret.interpret_pallas_call as interpreter

    shape, mask, side, options, sizes = blocksparse.CALLS[name]
    arrays = inputs(**{"q_len": 600, "kv_len": 600, **shape})
    prepared, spec = blocksparse.prepare(arrays, mask, side, options)
    out, lse = blocksparse.expected(arrays, mask, side, options)
    rng = np.random.default_rng(1)
    dout = jnp.asarray(rng.standard_normal(out.shape), arrays[0].dtype)
    dlse = jnp.asarray(rng.standard_normal(lse.shape), jnp.float32)
    wanted = frozenset({"query", "key", "value", "softmax_aux"} & prepared.keys())
    params = BwdParams(**dict(zip(parameters.READS, sizes, strict=True)))
    interpret = pltpu.InterpretParams(detect_races=True)

    @jax.jit
    def run(prepared, *rest):
        return blocksparse_module.backward(prepared, spec, params, *rest, wanted, interpret=interpret)

    residuals = jnp.asarray(out, arrays[0].dtype), jnp.asarray(lse, jnp.float32)
    grads = jax.block_until_ready(run(prepared, *residuals, dout, dlse))
    assert not interpreter.races.races_found
    assert "non-zero" not in "".join(capfd.readouterr())
    (*_, exact) = blocksparse.expected(arrays, mask, side, {**options, "dout": dout, "dlse": dlse})
    assert all(np.any(x) for x in exact.values())
    for key, grad in grads.items():
        assert_close(np.reshape(grad, exact[key].shape), exact[key], str(arrays[0].dtype), gradient=True, what=key)


@pytest.mark.parametrize("spans", some([1, 2, 3], 2))
def test_lists_made_on_the_device_are_those_made_on_the_host(spans):
    kinds = np.random.default_rng(0).choice([0, 0, 1, 2], (2, 3, 4, 5)).astype(np.int8)
    kinds[0, 0, 2] = kinds[1, 1, :, 3] = 0
    host, device = (steps.make_span_lists(table, spans) for table in (kinds, jnp.asarray(kinds)))
    np.testing.assert_array_equal(host.count, device.count)
    width = -(-kinds.shape[3] // spans)
    for lists in (host, device):
        major, minor, flags = (np.asarray(x).reshape(spans, 6, -1) for x in lists[:3])
        for span, n in np.ndindex(spans, 6):
            table = kinds.reshape(6, 4, 5)[n][:, span * width : (span + 1) * width]
            assert major[span, n].min() >= 0 <= minor[span, n].min()
            assert minor[span, n].max() < max(table.shape[1], 1)
            at = list(zip(major[span, n], minor[span, n], flags[span, n] >> plan.KIND_SHIFT, strict=True))
            assert [x for x in at if x[2]] == [(i, j, kind) for (i, j), kind in np.ndenumerate(table) if kind]
            # Each block of queries begins and ends once, and behind the end nothing is done where the last step was.
            for edge in (plan.FIRST, plan.LAST):
                assert major[span, n][(flags[span, n] & edge) > 0].tolist() == [0, 1, 2, 3]
            idle = flags[span, n] == 0
            assert (major[span, n][idle] == 3).all()


@pytest.mark.parametrize("name", ["plain", "causal", "window"])
def test_the_compiler_is_told_the_operations_work(name):
    shape, options = CALLS[name]
    arrays = inputs(**shape)
    call, _ = bound(*arrays, **options)
    work = OPERATION.work(call)
    prepared, spec, (_, _, dout, _) = given(arrays, options)
    told = module.costs(prepared, spec, dout, 3 * arrays[0].shape[3] + 2 * arrays[2].shape[3])
    assert (told["flops"], told["bytes_accessed"]) == (work.backward_flops, work.backward_bytes)


@pytest.mark.parametrize(
    "asked", [BwdParams(), BwdParams(q_blocksize=1), BwdParams(q_blocksize=10_000, kv_blocksize=3000)], ids=str
)
@pytest.mark.parametrize("lengths", [(8192, 8192), (1, 100), (1000, 77), (10**6, 10**6)], ids=str)
def test_parameters_are_clipped_to_what_fits(asked, lengths):
    q_len, kv_len = lengths
    shapes = {"query": (1, q_len, 2, 64), "key": (1, kv_len, 2, 64), "value": (1, kv_len, 2, 64)}
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    found = parameters.effective(shapes, None, asked, None)
    assert parameters.effective(shapes, None, found, None) == found
    assert all(size % 128 == 0 for size in found.to_dict().values())
    count = parameters.spans(shapes, found.q_blocksize, found.kv_blocksize, None)
    assert 1 <= count <= -(-kv_len // found.kv_blocksize)


_COMPILE = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
import test_tpu_flash_backward as t
from ejkernel.contracts.device import describe
results = []
for topology in json.loads(sys.argv[1]):
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    where, info = SingleDeviceSharding(device), describe(device)
    for name, length in json.loads(sys.argv[2]):
        shapes, spec, rest = t.compiled_call(name, length)
        shapes, rest = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), (shapes, rest))
        params = t.parameters.defaults(shapes, spec, info)
        with jax.default_device(device):
            run = jax.jit(lambda a, rest: t.module.backward(a, spec, params, *rest, t.wanted_of(a), device=info))
            memory = run.lower(shapes, rest).compile().memory_analysis()
        results.append(memory.temp_size_in_bytes / memory.argument_size_in_bytes)
print(json.dumps(results))
"""


def compiled_call(name, length):
    """Abstract: prepared arrays, the spec, residuals and cotangents."""
    dims = HEAD_DIMS.get(name, (128, 128))
    dtype = jnp.float32 if name == "plain" else jnp.bfloat16
    shapes = (1, length, 4, dims[0]), (1, length, 2, dims[0]), (1, length, 2, dims[1])
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    options = large(name)
    abstract = {key: x for key, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)}
    prepared = jax.eval_shape(lambda arrays, x: prepare(arrays, {**options, **x})[0], arrays, abstract)
    spec = bound(*arrays, **options)[0].spec
    out = jax.ShapeDtypeStruct((1, length, 4, dims[1]), dtype)
    lse = jax.ShapeDtypeStruct((1, 4, length), jnp.float32)
    return prepared, spec, (out, lse, out, lse)


def compile_by_libtpu(topologies, calls):
    """Temporary memory beside that of the arguments, of each call for each topology."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.path.dirname(here), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", _COMPILE, json.dumps(topologies), json.dumps(calls)],
        env={**os.environ, **TPU_ENVIRONMENT, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.compiled
def test_compiles():
    # Rows of a head that is not a multiple of 128 dims wide, and keys in spans: the temporaries are linear in the lengths.
    assert max(compile_by_libtpu(["v4:2x2x1"], [("causal", 2048)])) < 3


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_every_default_compiles(topology):
    names = ["plain", "causal", "segments", "packed", "sinks", "dropout", "value dim", "narrow dims", "wide"]
    calls = [(name, 2048) for name in names] + [(name, 32768) for name in ("plain", "causal", "wide")]
    assert max(compile_by_libtpu([topology], calls)) < 5
    of_pairs = ("bias", "wide, bias of pairs", "wide, mask of pairs")
    assert max(compile_by_libtpu([topology], [(name, 2048) for name in (*of_pairs, "soft cap")])) < 2
