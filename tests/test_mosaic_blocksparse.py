"""Block-sparse attention in Pallas Mosaic GPU: in JAX's interpreter, compiled for Hopper without one, and on a GPU."""

import dataclasses
import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples_blocksparse_attention import example
from lanes import some
from test_mosaic import JAX, compiled, needs_plugin, tile_of
from tolerances import assert_close

from ejkernel import BwdParams, FwdParams, blocksparse_attention, explain, kernel_registry
from ejkernel.kernels._pallas.gpu.blocksparse_attention_sm90 import forward as host
from ejkernel.kernels._pallas.gpu.blocksparse_attention_sm90 import gradients, parameters
from ejkernel.kernels._pallas.gpu.flash_attention_sm90 import forward as launching

OPERATION = kernel_registry.operation("blocksparse_attention")
SIZES = {"batch": 1, "q_len": 200, "kv_len": 200, "kv_heads": 1, "dim": 64, "value_dim": 64, "blocks": (64, 64)}
# Arguments of ``example``.
CALLS = {
    "rows of 64": {},
    "rows of 128": {"blocks": (128, 128), "kv_len": 256, "q_len": 256},
    "causal": {"causal": True},
    "window": {"causal": True, "sliding_window": (100, 0), "density": 0.8},
    "two-sided window": {"sliding_window": (70, 33), "blocks": (64, 128), "q_len": 300, "kv_len": 400},
    "nothing": {"density": 0.0},
    "everything": {"density": 1.0, "causal": True},
    "odd": {"q_len": 203, "kv_len": 333, "blocks": (128, 64)},
    "large blocks": {"blocks": (256, 256), "q_len": 500, "kv_len": 700, "density": 0.7},
    "three rows": {"blocks": (192, 64)},
    "one block": {"q_len": 100, "kv_len": 75, "blocks": (128, 128), "density": 1.0, "causal": True},
    "head masks": {"heads": 4, "kv_heads": 2, "mask_heads": 1},
    "batch masks": {"batch": 2, "heads": 2, "mask_heads": 2, "causal": True},
    "segments": {"segments": True, "causal": True, "batch": 2},
    "sinks and a cap": {"sinks": 2, "logits_soft_cap": 2.0, "causal": True, "sliding_window": (150, 0)},
    "value dim": {"value_dim": 32, "softmax_scale": 0.3},
    "head dim 96": {"dim": 96, "value_dim": 96, "causal": True},
    "head dim 128": {"dim": 128, "value_dim": 128, "causal": True},
    "negative scale": {"softmax_scale": -0.2},
    "no scale": {"softmax_scale": 0.0, "causal": True},
    "all": {"batch": 2, "q_len": 130, "kv_len": 203, "heads": 2, "kv_heads": 1, "value_dim": 32, "blocks": (64, 128), "mask_heads": 2,
            "density": 0.6, "segments": True, "sinks": 3, "causal": True, "sliding_window": (140, 0), "logits_soft_cap": 2.0},
}  # fmt: skip


def make(name, dtype="bfloat16", **changed):
    """An example's call, and its arrays in the kernel's dtype."""
    case = example(name, **{**SIZES, **CALLS[name], **changed, "return_lse": True})
    arrays = {
        name: x if name == "sparsity_mask" or x.dtype != np.float64 else np.asarray(jnp.asarray(x, dtype))
        for name, x in case.make(np.random.default_rng(0)).items()
    }
    if "softmax_aux" in arrays:
        arrays["softmax_aux"] = arrays["softmax_aux"].astype(np.float32)
    return case, arrays


def visible(case, arrays):
    """``[B, H, Sq, Sk]``: the pairs that count, from attention itself: values are one key's, one after the other."""
    statics = {**case.statics, "return_lse": False, "logits_soft_cap": None, "softmax_scale": 0.0}
    query, key = np.zeros(arrays["query"].shape), np.zeros(arrays["key"].shape)
    batch, kv_len, kv_heads, _ = key.shape
    one_each = np.broadcast_to(np.eye(kv_len)[None, :, None], (batch, kv_len, kv_heads, kv_len))
    given = {**arrays, "query": query, "key": key, "value": one_each}
    given.pop("softmax_aux", None)
    return np.asarray(case.reference(**given, **statics)).swapaxes(1, 2) > 0


def with_garbage(case, arrays):
    """NaN for keys and values that no query sees: their weight is 0, and 0 times NaN is not."""
    seen = visible(case, arrays)
    batch, heads, _, kv_len = seen.shape
    kv_heads = arrays["key"].shape[2]
    hidden = ~seen.any(2).reshape(batch, kv_heads, heads // kv_heads, kv_len).any(2).swapaxes(1, 2)[..., None]
    return {**arrays, **{n: np.where(hidden, np.nan, arrays[n]).astype(arrays[n].dtype) for n in ("key", "value")}}


def prepare(case, arrays, traced=False):
    """What the operation gives an implementation."""

    def prepared(mask):
        given = {name: jnp.asarray(x) for name, x in arrays.items() if name != "sparsity_mask"}
        bound = OPERATION.signature.bind(**given, sparsity_mask=mask, **case.statics)
        bound.apply_defaults()
        arguments = OPERATION.normalise(dict(bound.arguments))
        spec = OPERATION.bind(arguments).spec
        specs.append(spec)
        return OPERATION.prepare(arguments, spec)

    specs = []
    found = jax.jit(prepared)(arrays["sparsity_mask"]) if traced else prepared(arrays["sparsity_mask"])
    return found, specs[0]


def check(case, arrays, found):
    with jax.enable_x64(True):
        out, lse = (np.asarray(x) for x in jax.jit(functools.partial(case.reference, **case.statics))(**wide(arrays)))
    assert_close(found[0], out, str(found[0].dtype), what="out")
    assert_close(found[1], lse, "bfloat16", what="lse")


def interpreted(name, capfd, tile=(128, 64, 8, 2), dtype="bfloat16", traced=False):
    """In JAX's interpreter, with race detection, against float64."""
    if JAX < (0, 11):
        pytest.skip("jax has no interpreter of Mosaic GPU before 0.11")
    import jax.experimental.pallas.mosaic_gpu as plgpu

    case, arrays = make(name, dtype)
    prepared, spec = prepare(case, with_garbage(case, arrays), traced)
    found = host.forward(prepared, spec, tile_of(*tile), interpret=plgpu.InterpretGPUParams(detect_races=True))
    check(case, arrays, jax.block_until_ready(found))
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(CALLS, "window", "all"))
def test_interpreted(name, capfd):
    interpreted(name, capfd)


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("tile", [(64, 64, 4, 3), (192, 64, 12, 3), (128, 32, 8, 2)], ids=str)
@pytest.mark.parametrize("name", ["rows of 64", "two-sided window"])
def test_interpreted_with_other_tiles(name, tile, capfd):
    interpreted(name, capfd, tile)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(["rows of 128", "batch masks"], "rows of 128"))
def test_a_traced_mask_and_a_persistent_cta(name, capfd, monkeypatch):
    """Two CTAs for all blocks."""
    monkeypatch.setattr(launching, "CTAS", 2)
    interpreted(name, capfd, traced=True)


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows of 64", "window"])
def test_one_cta_per_block(name, capfd, monkeypatch):
    """As under ``shard_map`` with its check of varying axes."""
    launch = host.launch
    monkeypatch.setattr(host, "launch", lambda c, *a, **k: launch(dataclasses.replace(c, persistent=False), *a, **k))
    interpreted(name, capfd)


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows of 64", "window"])
def test_float16(name, capfd):
    interpreted(name, capfd, dtype="float16")


# Gradients


def wide(arrays):
    return {name: jnp.asarray(x if x.dtype in (bool, np.int32) else x.astype(np.float64)) for name, x in arrays.items()}


def expected_gradients(case, arrays, cotangents):
    """Output, lse and gradients in float64."""
    with jax.enable_x64(True):
        exact = wide(arrays)
        floats = {name: exact[name] for name in case.differentiable if name in exact}

        @jax.jit
        def both(floats, cotangents):
            found, pull = jax.vjp(lambda floats: case.reference(**{**exact, **floats}, **case.statics), floats)
            return found, pull(cotangents)[0]

        return jax.tree.map(np.asarray, both(floats, tuple(x.astype(np.float64) for x in cotangents)))


def interpreted_gradients(name, capfd, **changed):
    """With race detection, from exact residuals, against float64."""
    if JAX < (0, 11):
        pytest.skip("jax has no interpreter of Mosaic GPU before 0.11")
    import jax.experimental.pallas.mosaic_gpu as plgpu

    case, arrays = make(name, **changed)
    rng = np.random.default_rng(1)
    dtype = arrays["query"].dtype
    batch, q_len, heads, _ = arrays["query"].shape
    dout = rng.standard_normal((batch, q_len, heads, arrays["value"].shape[3])).astype(dtype)
    dlse = rng.standard_normal((batch, heads, q_len)).astype(np.float32)
    (out, lse), grads = expected_gradients(case, arrays, (dout, dlse))
    prepared, spec = prepare(case, with_garbage(case, arrays))
    residuals = jnp.asarray(out, dtype), jnp.asarray(lse, jnp.float32)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    found = gradients.backward(
        prepared,
        spec,
        BwdParams(),
        *residuals,
        jnp.asarray(dout),
        jnp.asarray(dlse),
        frozenset(grads),
        interpret=interpret,
    )
    if "softmax_aux" in grads:
        # The operation hands on one sink a head: what its own gradient becomes of those is not the kernel's.
        assert found.pop("softmax_aux").shape == (1, heads)
        grads.pop("softmax_aux")
    for what, exact in grads.items():
        assert_close(found[what], exact, str(dtype), gradient=True, what=what)
        norms = [np.linalg.norm(np.asarray(x, np.float64)) for x in (found[what] - exact, exact)]
        assert norms[0] <= 0.01 * norms[1] + 1e-6, (what, norms)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(CALLS, "two-sided window"))
def test_interpreted_gradients(name, capfd):
    interpreted_gradients(name, capfd)


# The plan


@pytest.mark.parametrize(
    "name",
    some(["rows of 64", "head masks", "batch masks", "two-sided window", "large blocks", "nothing"], "head masks"),
)
@pytest.mark.parametrize("step", some([64, 128], 128))
def test_lists_of_keys_have_every_pair_once_and_ranks_in_order(name, step):
    case, arrays = make(name, segments=False)
    prepared, spec = prepare(case, arrays)
    seen = visible(case, arrays)
    batch, heads, q_len, kv_len = seen.shape
    group = heads // arrays["key"].shape[2]
    lists = jax.jit(lambda arrays: gradients.step_lists(arrays, spec, step, group))(prepared)
    counts, steps, visits = map(np.asarray, lists)
    blocks, q_steps = counts.shape[1], -(-q_len // step)
    padded = np.zeros((batch, heads, q_steps * step, blocks * 128), bool)
    padded[:, :, :q_len, :kv_len] = seen
    squares = padded.reshape(batch, heads, q_steps, step // 64, 64, blocks, 2, 64).any((4, 7))
    for b, kv_head in np.ndindex(batch, heads // group):
        places = [min(i, n - 1) for i, n in zip((b, kv_head), steps.shape[:2], strict=True)]
        ranks = {}
        for block in range(blocks):
            count, used = divmod(int(counts[places[0], block, min(kv_head, counts.shape[2] - 1)]), 4)
            entries = steps[(*places, block)][:count]
            number, bits, masked = entries[:, 0] >> 5, entries[:, 0] & 15, (entries[:, 0] >> 4) & 1
            at = list(zip(number // group, kv_head * group + number % group, strict=True))
            assert sorted(at, key=lambda x: (-x[0], x[1])) == at
            assert len(set(at)) == len(at)
            needed = squares[b, kv_head * group : (kv_head + 1) * group, :, :, block]
            listed = np.zeros_like(needed)
            for (q, head), told, rank, is_masked in zip(at, bits, entries[:, 1], masked, strict=True):
                listed[head - kv_head * group, q] = [
                    [told >> (2 * i + w) & 1 for w in range(2)] for i in range(step // 64)
                ]
                # Blocks of keys start in order: each finds as many sums as it expects.
                assert ranks.setdefault((q, head), 0) == rank
                ranks[q, head] += 1
                assert visits[places[0], block, q, min(head, visits.shape[3] - 1)]
                whole = padded[b, head, q * step : min((q + 1) * step, q_len), block * 128 : (block + 1) * 128].all()
                assert is_masked or whole
            assert (listed == needed).all()
            assert used == sum(needed[..., w].any() << w for w in range(2))
        assert visits[places[0]].sum() * (heads // visits.shape[3]) >= len(ranks)


# Parameters and selection


def shapes(block=64, length=16384, dim=128, dtype="bfloat16", causal=True):
    x = jax.ShapeDtypeStruct((1, length, 16, dim), dtype)
    blocks = length // block
    return {"query": x, "key": x, "value": x, "sparsity_mask": jax.ShapeDtypeStruct((blocks, blocks), bool),
            "block_size": block, "causal": causal, "device": "nvidia-h200"}  # fmt: skip


@pytest.mark.parametrize(
    ("block", "tile"), [(64, (64, 8, 4)), (128, (128, 8, 2)), (192, (96, 8, 3)), (512, (128, 8, 2))]
)
def test_steps_divide_the_blocks_of_keys(block, tile):
    call = explain("blocksparse_attention", **shapes(block, 1536)).call
    asked = FwdParams(q_blocksize=1000, kv_blocksize=1000, num_stages=99)
    tiles = parameters.space(call.shapes, call.spec)
    for params in (*tiles, parameters.effective(call.shapes, call.spec, asked)):
        assert parameters.effective(call.shapes, call.spec, params) == params
        assert block % params.kv_blocksize == 0
    assert parameters.defaults(call.shapes, call.spec) == tile_of(128, *tile)


@pytest.mark.parametrize("block", [64, 128, 256])
def test_blocks_of_64_and_more_run_on_hopper(block):
    found = explain("blocksparse_attention", **shapes(block), gradients=True)
    assert found.chosen.platform.value == found.backward.chosen.platform.value == "pallas"


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"block": 32}, "blocks of 32 × 32 is not supported"),
        ({"dim": 256}, "head dim 256 is above 128"),
        ({"dim": 80}, "head dim 80 is not a multiple of 32"),
        ({"dtype": "float32"}, "dtype float32 is not supported"),
    ],
)
def test_what_it_refuses(sizes, reason):
    found = explain("blocksparse_attention", **shapes(**sizes))
    [told] = [c for c in found.candidates if (c.platform.value, c.backend.value) == ("pallas", "gpu")]
    assert reason in " ".join(told.reasons)
    assert found.chosen is not told


# Compiled for Hopper, without one

COMPILED = """
import glob, os, re, sys
import jax
sys.path.insert(0, {tests!r})
import test_mosaic, test_mosaic_blocksparse as t
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
target = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=test_mosaic.HOPPER, topology="1x1x2")
sharding = SingleDeviceSharding(target.devices[0])
for name, dim, direction in {jobs!r}:
    case, arrays = t.make(name, dim=dim, value_dim=dim)
    prepared, spec = t.prepare(case, arrays)

    def run(arrays, out, lse):
        if direction == "forward":
            return t.host.forward(arrays, spec, t.parameters.defaults(arrays, spec))
        wanted = frozenset({{"query", "key", "value"}})
        return t.gradients.backward(arrays, spec, t.BwdParams(), out, lse, out, lse, wanted)

    out = arrays["query"]
    lse = jax.ShapeDtypeStruct((out.shape[0], out.shape[2], out.shape[1]), "float32")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (prepared, out, lse))
    jax.jit(run).lower(*shapes).compile()
    reports = glob.glob(os.path.join(os.environ["MOSAIC_GPU_DUMP_TO"], "*.ptxas"))
    text = "".join(open(path).read() for path in reports)
    print("SPILLS", name, dim, direction, re.findall(r"([0-9]+) bytes spill", text))
    for path in reports:
        os.remove(path)
"""


@needs_plugin
@pytest.mark.compiled
@pytest.mark.parametrize(
    "names",
    some([("window",), ("rows of 64", "rows of 128", "causal"), ("segments", "sinks and a cap")], ("window",)),
    ids=str,
)
@pytest.mark.parametrize("dim", some([64, 128], 128))
@pytest.mark.parametrize("direction", some(["forward", "backward"], "backward"))
def test_nothing_spills(names, dim, direction, tmp_path):
    """A cap at head dim 64 leaves the backward two registers too few."""
    jobs = [(name, dim, direction) for name in names]
    printed = compiled(COMPILED.format(tests=os.path.dirname(__file__), jobs=jobs), tmp_path)
    told = re.findall(r"SPILLS (.*?) \[(.*)\]", printed)
    assert len(told) == len(jobs)
    for name, spills in told:
        assert spills, f"no report of {name}"
        most = 8 if name == "sinks and a cap 64 backward" else 0
        assert max(map(int, re.findall(r"\d+", spills))) <= most, (name, spills)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_gpu(name, dtype):
    """Results and gradients, the same bits with a traced mask and in a second run."""
    case, arrays = make(name, dtype)
    if explain("blocksparse_attention", **arrays, **case.statics, platform="pallas").chosen is None:
        pytest.skip("needs a Hopper GPU")
    given = {name: jnp.asarray(x) for name, x in with_garbage(case, arrays).items()}
    rng = np.random.default_rng(1)
    shape = (*arrays["query"].shape[:3], arrays["value"].shape[3])
    cotangents = (
        rng.standard_normal(shape).astype(arrays["query"].dtype),
        rng.standard_normal((shape[0], shape[2], shape[1])).astype(np.float32),
    )
    mask = arrays["sparsity_mask"]

    def both(floats, mask):
        def run(floats):
            return blocksparse_attention(
                **{**given, **floats, "sparsity_mask": mask}, **case.statics, platform="pallas"
            )

        found, pull = jax.vjp(run, floats)
        return found, pull(tuple(map(jnp.asarray, cotangents)))[0]

    floats = {name: given[name] for name in case.differentiable if name in given}
    concrete, traced = jax.jit(lambda floats: both(floats, mask)), jax.jit(both)
    found = [concrete(floats), concrete(floats), traced(floats, mask)]
    check(case, arrays, found[0][0])
    _, exact = expected_gradients(case, arrays, cotangents)
    for what, gradient in exact.items():
        assert_close(found[0][1][what], gradient, dtype, gradient=True, what=what)
    for other in found[1:]:
        same = jax.tree.map(lambda a, b: bool((a == b).all()), found[0], other)
        assert all(jax.tree.leaves(same)), same
