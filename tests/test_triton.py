"""Triton's flash attention where there is no GPU: compiled for the chips we know, lowered for one; and on a GPU."""

import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from conftest import bound
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tolerances import assert_close
from triton_launches import PICKED_WITH, Launch, kept_compilations, resources, triton

from ejkernel import BwdParams, FwdParams, Platform, explain, flash_attention, target
from ejkernel.callib.chips import CHIPS
from ejkernel.contracts.device import describe
from ejkernel.kernels._triton import cache, probe
from ejkernel.kernels._triton import flash_attention as flash
from ejkernel.kernels._triton.call import interpreting
from ejkernel.ops.flash_attention import OPERATION

if interpreting():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

H200, L4, MI300X = "nvidia-h200", "nvidia-l4", "amd-mi300x"


# Another Triton, another jax-triton


@pytest.fixture
def probed_anew():
    """What the installed packages were found to have is forgotten, before and after."""
    probes = (probe._changed_language, probe._changed_call, probe._lowers)
    for known in probes:
        known.cache_clear()
    yield
    for known in probes:
        known.cache_clear()


def refusal_of_triton(device, dtype="bfloat16"):
    """``(reasons, the platform that runs instead)`` of a plain call."""
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), dtype)
    told = explain(flash_attention, x, x, x, device=device)
    (own,) = (candidate for candidate in told.candidates if candidate.platform is Platform.TRITON)
    return own.reasons if own.verdict == "refused" else (), told.chosen.platform


def test_the_installed_packages_are_ones_that_we_know():
    assert probe.refusal(describe(H200), interpreted=False) is None
    assert {"dot", "load", "constexpr"} <= probe._names()


@pytest.mark.parametrize("name", ["dot", "inline_asm_elementwise"])
def test_a_triton_without_a_name_is_passed_over(monkeypatch, probed_anew, name):
    monkeypatch.delattr(triton.language, name)
    reason = f"Triton cannot be used (triton {triton.__version__} has no triton.language.{name})"
    assert refusal_of_triton("nvidia-a100") == ((reason,), Platform.CUDNN)
    assert refusal_of_triton("nvidia-a100", "float32") == ((reason,), Platform.XLA)


def without_capability(*args, kernel, grid, num_warps, num_stages, input_output_aliases, out_shape):
    """As ``triton_call``, of another version."""


def without_results(*args, kernel, grid, num_warps, num_stages, compute_capability, input_output_aliases, shapes):
    """As ``triton_call``, of another version."""


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (without_capability, "triton_call does not take compute_capability"),
        (without_results, "triton_call does not take out_type or out_shape"),
        (None, "AttributeError: .* has no attribute 'triton_call'"),
    ],
)
def test_another_jax_triton_is_passed_over(monkeypatch, probed_anew, call, expected):
    jax_triton = pytest.importorskip("jax_triton", reason="jax-triton is not installed")
    if call is None:
        monkeypatch.delattr(jax_triton, "triton_call")
    else:
        monkeypatch.setattr(jax_triton, "triton_call", call)
    (reason,), chosen = refusal_of_triton("nvidia-a100")
    assert re.search(rf"Triton cannot be used \(.*{expected}", reason)
    assert chosen is Platform.CUDNN


def test_a_plugin_without_triton_is_a_reason_on_a_device_of_this_process(monkeypatch, probed_anew):
    monkeypatch.setattr(probe, "LOWERING", "json")
    described = describe("nvidia-a100")
    present = dataclasses.replace(described, fingerprint="gpu|nvidia-a100|here")
    assert probe.refusal(described, interpreted=False) is None
    expected = "JAX's plugin for nvidia GPUs has no Triton: json has no TritonKernel"
    assert probe.refusal(present, interpreted=False) == expected
    reasons, chosen = refusal_of_triton(present)
    assert reasons == (expected,)
    assert chosen is not Platform.TRITON


# Compiled for the chips we know

LENGTH, HEADS, KV_HEADS = 1024, 4, 2


def described(features, dim, dtype, value_dim=None):
    """Arguments of a causal call of these features, without data."""

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    ids = array(1, LENGTH, dtype="int32")
    cuts = array(5, dtype="int32")
    of_feature = {
        "mask": {"attention_mask": array(1, HEADS, LENGTH, LENGTH, dtype="bool")},
        "bias": {"bias": array(1, HEADS, LENGTH, LENGTH)},
        "segments": {"q_segment_ids": ids, "kv_segment_ids": ids},
        "varlen": {"cum_seqlens_q": cuts, "cum_seqlens_k": cuts},
        "sinks": {"softmax_aux": array(HEADS, 1, dtype="float32")},
        "dropout": {"dropout_prob": 0.1, "dropout_seed": array(dtype="int32")},
        "window": {"sliding_window": (300, 0)},
        "soft_cap": {"logits_soft_cap": 30.0},
    }
    options = {
        "query": array(1, LENGTH, HEADS, dim),
        "key": array(1, LENGTH, KV_HEADS, dim),
        "value": array(1, LENGTH, KV_HEADS, value_dim or dim),
        "causal": True,
    }
    for feature in features:
        options |= of_feature[feature]
    return options


def launches(chip, options, fwd=None, bwd=None):
    """``{kernel: [launch]}`` of the forward and of the backward that wants every gradient, by default with default parameters."""
    call, device = bound(**options)[0], describe(chip)
    made = []

    def recorded(*args, **kwargs):
        made.append(Launch(*args, **kwargs))
        return [jnp.zeros(like.shape, like.dtype) for like in args[3]]

    fwd, bwd = (
        given or flash.TritonFlashAttention.defaults(call.shapes, call.spec, device, direction)
        for direction, given in (("forward", fwd), ("backward", bwd))
    )
    wanted = frozenset(OPERATION.gradients) & call.shapes.keys()
    original, flash.call = flash.call, recorded
    try:
        out, lse = jax.eval_shape(lambda x: flash.forward(x, call.spec, fwd, device=device), call.shapes)
        jax.eval_shape(
            lambda x, *rest: flash.backward(x, call.spec, bwd, *rest, wanted, device), call.shapes, out, lse, out, lse
        )
    finally:
        flash.call = original
    kernels = {}
    for launch in made:
        kernels.setdefault(launch.kernel.__name__, []).append(launch)
    return kernels


EVERYTHING = ("mask", "bias", "segments", "sinks", "dropout", "window", "soft_cap")
EVERYTHING_PACKED = ("mask", "bias", "segments", "varlen", "sinks", "dropout", "window", "soft_cap")
ALONE = ((), ("soft_cap",), ("dropout",), ("mask",), ("bias",), ("segments",), ("varlen",), ("sinks", "window"))
FEW = ((), ("dropout",), ("bias",), EVERYTHING_PACKED)
KERNELS = ("forward", "backward_keys", "backward_queries", "backward_bias")
# Every kernel once a vendor, as little and as much as it may be asked for; and the widest heads where there is least room.
SHORT_GRID = [
    *[(chip, *rest) for chip in (H200, MI300X) for rest in ((128, None, ((),)), (64, None, (EVERYTHING_PACKED,)))],
    (L4, 256, None, ((),)),
]
HALF_GRID = [
    *[(H200, dim, None, (*ALONE, EVERYTHING, EVERYTHING_PACKED)) for dim in (64, 128, 256)],
    (H200, 192, 128, FEW),
    *[(chip, dim, None, FEW) for chip in ("nvidia-a100", "nvidia-b200", MI300X) for dim in (64, 128, 256)],
    *[(L4, dim, None, FEW) for dim in (64, 128, 256)],
]
# At 256 the products outside of the tensor cores hold more than the registers, whatever the tile.
FULL_GRID = [
    (chip, dim, None, ((), EVERYTHING)) for chip in ("nvidia-a100", L4, H200, "nvidia-b200") for dim in (64, 128)
]


def over_the_limits(chip, kernel, dim, value_dim, dtype, feature_sets):
    """What spills, or asks for more shared memory than a block may have."""
    kept_compilations()
    spills_count = triton.__version__.startswith(PICKED_WITH) and (chip, dim) != (L4, 256)
    chip = CHIPS[chip]
    found, count = [], 0
    for features in feature_sets:
        for launch in launches(chip.slug, described(features, dim, dtype, value_dim)).get(kernel, []):
            spilled, shared = resources(launch.compiled(chip))
            count += 1
            if (spilled and spills_count) or shared > chip.shared_memory_per_block:
                tile = (launch.constants.bm, launch.constants.bn, *launch.options.values())
                found.append(
                    f"{'+'.join(features) or 'causal'} {tile}: {spilled} spilled, {shared} bytes of shared memory"
                )
    assert count
    return found


def compilations_of(*grid):
    """Parameters of a test: each kernel that a row of the grid launches."""
    rows = [
        (*row, kernel) for row in grid for kernel in KERNELS if kernel != "backward_bias" or any(map(has_bias, row[3]))
    ]
    ids = ["-".join(str(part) for part in (*row[:3], row[4]) if part is not None) for row in rows]
    return pytest.mark.parametrize(("chip", "dim", "value_dim", "feature_sets", "kernel"), rows, ids=ids)


def has_bias(features):
    return "bias" in features


@pytest.mark.compiled
@compilations_of(*SHORT_GRID)
def test_every_kernel_fits_a_chip(chip, kernel, dim, value_dim, feature_sets):
    assert over_the_limits(chip, kernel, dim, value_dim, "bfloat16", feature_sets) == []


@pytest.mark.slow
@pytest.mark.compiled
@compilations_of(*HALF_GRID)
def test_default_blocks_fit_the_chip(chip, kernel, dim, value_dim, feature_sets):
    assert over_the_limits(chip, kernel, dim, value_dim, "bfloat16", feature_sets) == []


@pytest.mark.slow
@pytest.mark.compiled
@compilations_of(*FULL_GRID)
def test_default_blocks_fit_the_chip_in_float32(chip, kernel, dim, value_dim, feature_sets):
    assert over_the_limits(chip, kernel, dim, value_dim, "float32", feature_sets) == []


@pytest.mark.parametrize(("chip", "precision"), [(L4, "tf32x3"), (H200, "tf32x3"), (MI300X, "ieee")])
def test_float32_is_multiplied_on_tensor_cores_where_three_products_are_exact_enough(chip, precision):
    for kernel in launches(chip, described((), 64, "float32")).values():
        assert {launch.constants.precision for launch in kernel} == {precision}


@pytest.mark.compiled
@pytest.mark.parametrize("kernel", KERNELS)
def test_offsets_that_grow_with_a_tensor_have_64_bits(kernel):
    """No offset of a whole tile that has 32 bits was made from a length or a stride."""
    kept_compilations()
    (launch,) = launches(H200, described(EVERYTHING_PACKED, 64, "bfloat16"))[kernel]
    text = launch.compiled(CHIPS[H200]).asm["ttir"]
    origins = {
        name: re.findall(r"%[\w#]+", rest) for name, rest in re.findall(r"(%\w+) = (?!tt\.load)(.*?) loc\(", text)
    }

    def sources(name):
        return {name}.union(*map(sources, origins.get(name, ())))

    narrow, wide = (
        re.findall(rf"tt\.addptr %\w+, (%[\w#]+) : !tt\.ptr<\w+>, {width}", text) for width in ("i32", "i64")
    )
    growing = {f"%{name}" for name in launch.kernel.arg_names if name.endswith(("_len", "_batch", "_head", "_row"))}
    assert len(wide) > 5
    assert any(sources(offset) & growing for offset in wide)
    for offset in narrow:
        assert not sources(offset) & growing, offset


@pytest.mark.parametrize("sizes", [(None,) * 6, (1, 5, 3, 4, 7, 9), (100, 300, 2**20, 1, 17, 4096)], ids=str)
@pytest.mark.parametrize("chip", [H200, MI300X])
def test_kernels_are_launched_with_the_effective_parameters(chip, sizes):
    q, kv, warps, stages, m, n = sizes
    fwd = FwdParams(q_blocksize=q, kv_blocksize=kv, num_warps=warps, num_stages=stages)
    bwd = BwdParams(**fwd.to_dict(), blocksize_m=m, blocksize_n=n)
    options = described((), 64, "bfloat16")
    call, made = bound(**options)[0], launches(chip, options, fwd, bwd)
    fwd, bwd = (
        flash.TritonFlashAttention.effective(call.shapes, call.spec, params, describe(chip), direction)
        for params, direction in ((fwd, "forward"), (bwd, "backward"))
    )
    for kernel, params in (("forward", fwd), ("backward_keys", bwd)):
        (launch,) = made[kernel]
        assert (launch.constants.bm, launch.constants.bn) == (params.q_blocksize, params.kv_blocksize)
        assert launch.options == {"num_warps": params.num_warps, "num_stages": params.num_stages}
    (launch,) = made["backward_queries"]
    assert (launch.constants.bm, launch.constants.bn) == (bwd.blocksize_m, bwd.blocksize_n)
    assert launch.options["num_warps"] <= (16 if chip.startswith("amd") else 32)


# Lowered for a GPU

try:
    from jax._src.lib import gpu_triton
except ImportError:
    gpu_triton = None
calls = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="needs jax-triton")
lowers = pytest.mark.skipif(
    not hasattr(gpu_triton, "TritonKernel") or importlib.util.find_spec("jax_triton") is None,
    reason="needs jax-triton, and jax-cuda13-plugin for its module _triton",
)


def lowered(function, *args, device=H200):
    with target(device):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernel_calls(text):
    return text.count("@triton_kernel_call")


def traced_calls(function, *args, device=H200):
    """The types of each Triton call's operands; nothing is compiled."""
    with target(device):
        jaxpr = jax.make_jaxpr(function)(*args)
    calls = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if "triton" in eqn.primitive.name:
                calls.append([x.aval for x in eqn.invars])
            for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(jaxpr.jaxpr)
    return calls


def gradients(names=("query", "key", "value"), **options):
    def loss(some, rest):
        out = flash_attention(**some, **rest, **options, platform="triton")
        return out.astype(jnp.float32).sum()

    def run(arrays):
        return jax.grad(loss)({n: arrays[n] for n in names}, {n: x for n, x in arrays.items() if n not in names})

    return run


def split(options):
    """Arrays and the rest."""
    arrays = {name: x for name, x in options.items() if hasattr(x, "shape")}
    return arrays, {name: x for name, x in options.items() if name not in arrays}


@calls
@pytest.mark.parametrize("features", [(), ("mask",), ("varlen",), ("sinks", "dropout"), EVERYTHING], ids="+".join)
def test_one_kernel_forward_and_two_backward(features):
    arrays, statics = split(described(features, 64, "bfloat16"))
    assert len(traced_calls(lambda arrays: flash_attention(**arrays, **statics, platform="triton"), arrays)) == 1
    assert len(traced_calls(gradients(**statics), arrays)) == 3


@calls
@pytest.mark.parametrize(
    ("names", "dim", "count"),
    [
        (("query",), 64, 2),
        (("key",), 64, 2),
        (("key", "value"), 64, 2),
        (("bias",), 64, 2),
        (("query", "key", "value", "bias"), 64, 4),
        (("query", "key", "value"), 256, 4),  # keys and values each for themselves: both are too wide for the registers
    ],
)
def test_only_wanted_gradients_are_computed(names, dim, count):
    arrays, statics = split(described(("bias",), dim, "bfloat16"))
    assert len(traced_calls(gradients(names, **statics), arrays)) == count


@lowers
@pytest.mark.compiled
def test_one_compilation_serves_all_lengths(own_store):
    def files(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 24), jnp.bfloat16)
        lowered(gradients(causal=True), {"query": x, "key": x, "value": x})
        return {path.name for path in (own_store / "triton").iterdir()}

    first = files(1024)
    assert len(first) == 3
    for length in (2048, 1000, 5000):
        assert files(length) == first


@calls
def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    function = jax.shard_map(gradients(causal=True), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    x = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)
    found = traced_calls(function, {"query": x, "key": x, "value": x})
    assert [operands[0].shape for operands in found] == [(1, 256, 2, 64)] * 3


@calls
def test_under_vmap_it_is_one_call():
    x = jax.ShapeDtypeStruct((3, 2, 256, 2, 64), jnp.bfloat16)
    found = traced_calls(jax.vmap(gradients(causal=True)), {"query": x, "key": x, "value": x})
    assert [operands[0].shape for operands in found] == [(6, 256, 2, 64)] * 3


_PROCESS = """
import json, sys
import jax, jax.numpy as jnp
from jax_triton import triton_lib
from ejkernel import flash_attention, target
from ejkernel.kernels._triton import cache
compiled, original = [], getattr(triton_lib, cache.COMPILE)
def counted(*args):
    compiled.append(1)
    return original(*args)
setattr(triton_lib, cache.COMPILE, counted)
x = jax.ShapeDtypeStruct((1, 512, 2, 40), jnp.bfloat16)
with target("nvidia-h200"):
    run = jax.grad(lambda *x: flash_attention(*x, platform="triton").astype(jnp.float32).sum(), (0, 1, 2))
    text = jax.jit(run).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
print(json.dumps([len(compiled), text.count("@triton_kernel_call")]))
"""


def compilations(directory):
    """Of a training step's kernels, in a process of its own."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "EJKERNEL_CACHE_DIR": str(directory), "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", _PROCESS], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    count, calls = json.loads(result.stdout.splitlines()[-1])
    assert calls == 3
    return count


@lowers
@pytest.mark.slow
@pytest.mark.compiled
def test_another_process_compiles_nothing(tmp_path):
    assert compilations(tmp_path) == 3
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "triton").iterdir()}
    assert len(files) == 3
    assert compilations(tmp_path) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "triton").iterdir()} == files


@lowers
@pytest.mark.slow
@pytest.mark.compiled
def test_a_damaged_cache_is_written_anew(tmp_path):
    compilations(tmp_path)
    damage = ("", "{", '{"nothing": 1}')
    for path, text in zip(sorted((tmp_path / "triton").iterdir()), damage, strict=True):
        path.write_text(text)
    assert compilations(tmp_path) == 3
    assert compilations(tmp_path) == 0


@lowers
@pytest.mark.slow
@pytest.mark.compiled
def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    assert compilations(tmp_path / "file") == 3


@dataclasses.dataclass
class Result:
    """Stands for what jax-triton's compiler gives."""

    binary: str


def kept_compiler():
    """``(a compiler behind the cache, what it was asked for)``."""
    asked = []

    def compile(ttir, backend, options, capability):
        asked.append((ttir, options, capability))
        return Result(f"{ttir} {options} {capability}")

    return cache.kept(compile, Result), asked


def test_the_compiler_s_other_arguments_are_part_of_the_key():
    compiled, asked = kept_compiler()
    for arguments in (("a", "x", 90), ("b", "x", 90), ("a", "y", 90), ("a", "x", 80)):
        ttir, options, capability = arguments
        for _ in range(2):
            assert compiled(ttir, None, options, capability).binary == f"{ttir} {options} {capability}"
    assert len(asked) == 4


@pytest.mark.parametrize("damage", ["", "{", '{"nothing": 1}'])
def test_a_damaged_entry_is_compiled_and_written_anew(own_store, damage):
    compiled, asked = kept_compiler()
    compiled("a", None, "x", 90)
    (path,) = (own_store / "triton").iterdir()
    path.write_text(damage)
    for _ in range(2):
        assert compiled("a", None, "x", 90) == Result("a x 90")
    assert len(asked) == 2
    assert json.loads(path.read_text()) == {"binary": "a x 90"}


def test_a_cache_that_cannot_be_written_compiles_every_time(own_store, monkeypatch):
    own_store.write_text("a file, not a directory")
    compiled, asked = kept_compiler()
    for _ in range(2):
        assert compiled("a", None, "x", 90) == Result("a x 90")
    assert len(asked) == 2


# On a GPU

GPU_CASES = [
    Case(f"{name}_{dim}", features, batch=1, q_len=1000, kv_len=1000, head_dim=dim, value_dim=dim, group=group)
    for dim in (64, 128, 256)
    for name, features, group in (
        ("plain", frozenset(), 1),
        ("causal", frozenset({"causal"}), 1),
        ("gqa", frozenset({"causal"}), 4),
    )
]


def check(case, dtype, **params):
    """Values and gradients against float64."""
    made, statics = case.make(dtype)
    rng = np.random.default_rng(1)
    out, pull = jax.vjp(lambda *x: flash_attention(*x, **statics, **params, platform="triton"), *made.values())
    dout = jnp.asarray(rng.standard_normal(out.shape), dtype)
    expected, _, grads = oracle.attention(**case.as_oracle(made, statics), dout=np.asarray(dout))
    assert_close(out, expected, dtype, what=f"{case} out")
    for name, grad in zip(("query", "key", "value"), pull(dout), strict=True):
        assert_close(grad, grads[name], dtype, gradient=True, what=f"{case} {name}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_values_and_gradients(case, dtype):
    check(case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_proposed_block_gives_the_same_result(dim, direction):
    case = Case("tuned", frozenset({"causal"}), batch=1, q_len=1000, kv_len=1000, head_dim=dim, value_dim=dim, group=2)
    made, statics = case.make("bfloat16")
    call, _ = bound(**made, **statics)
    space = flash.TritonFlashAttention.space(call.shapes, call.spec, describe(), direction)
    default = flash.TritonFlashAttention.defaults(call.shapes, call.spec, describe(), direction)
    for params in [default, *space]:
        check(case, "bfloat16", **{"fwd_params" if direction == "forward" else "bwd_params": params})


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_reruns_of_the_backward_are_bit_identical(dim):
    case = Case("reruns", frozenset({"causal"}), q_len=2048, kv_len=2048, head_dim=dim, value_dim=dim, group=4)
    made, _ = case.make("bfloat16")

    @jax.jit
    def step(*args):
        out, pull = jax.vjp(lambda *x: flash_attention(*x, causal=True, platform="triton"), *args)
        return out, *pull(out)

    first, *others = [jax.tree.map(np.asarray, step(*made.values())) for _ in range(5)]
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """A key of 4 GiB, and a window that sees only its end: values and gradients of the same end alone."""
    rows, heads, dim, q_len, seen = 2**19 + 64, 32, 128, 64, 256
    assert math.prod((rows, heads, dim)) > 2**31
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (1, q_len, heads, dim), jnp.bfloat16)
    end = [jax.random.normal(key, (1, seen, heads, dim), jnp.bfloat16) for key in keys[1:]]
    key, value = (jnp.zeros((1, rows, heads, dim), jnp.bfloat16).at[:, -seen:].set(x) for x in end)

    def run(query, key, value, platform):
        options = {"causal": True, "sliding_window": (seen - q_len - 1, 0), "platform": platform}
        out, pull = jax.vjp(lambda *x: flash_attention(*x, **options), query, key, value)
        dq, dk, dv = pull(out)
        return out, dq, dk[:, -seen:], dv[:, -seen:]

    actual = jax.jit(run, static_argnums=3)(query, key, value, "triton")
    expected = jax.jit(run, static_argnums=3)(query, *end, "xla")
    for name, a, b in zip(("out", "query", "key", "value"), actual, expected, strict=True):
        assert_close(a, np.asarray(b, np.float64), "bfloat16", gradient=name != "out", what=name)


@pytest.mark.gpu
def test_a_query_of_more_than_2_to_the_31_elements():
    rows, heads, dim, kv_len = 2**19 + 64, 32, 128, 64
    keys = jax.random.split(jax.random.key(0), 3)
    key, value = (jax.random.normal(k, (1, kv_len, heads, dim), jnp.bfloat16) for k in keys[:2])
    end = jax.random.normal(keys[2], (1, 256, heads, dim), jnp.bfloat16)
    query = jnp.zeros((1, rows, heads, dim), jnp.bfloat16).at[:, -256:].set(end)
    run = jax.jit(lambda *x: flash_attention(*x, platform="triton")[:, -256:])
    expected = flash_attention(end, key, value, platform="xla")
    assert_close(run(query, key, value), np.asarray(expected, np.float64), "bfloat16")


@pytest.mark.gpu
def test_it_is_what_runs_here():
    made, statics = GPU_CASES[1].make("bfloat16")
    assert explain(flash_attention, **made, **statics, platform="triton").chosen.platform is Platform.TRITON
