"""What runs on GPUs that are not here: reasons of Triton and Pallas, and the tables of a chip's family."""

import functools
import importlib.util
import sys

import jax
import jax.numpy as jnp
import pytest
from conftest import bound

from ejkernel import FwdParams, Platform, UnsupportedError, explain, flash_attention, kernel_registry, target
from ejkernel.contracts.device import DeviceInfo, describe
from ejkernel.kernels._pallas.gpu.flash_attention_sm90 import requirements
from ejkernel.ops.config import chain

FLASH = "flash_attention"


def abstract(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


# Triton's flash attention, on described devices


def triton_of(*args, **options):
    """What became of Triton's kernel: its candidate."""
    return next(c for c in explain(FLASH, *args, **options).candidates if c.platform is Platform.TRITON)


@pytest.fixture
def installed(monkeypatch):
    """Says that packages are there (or not, which a test adds), whatever this machine has."""
    absent = set()
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in absent else found(name, *rest) or found("json")
    )
    kernel_registry.generation += 1
    yield absent
    kernel_registry.generation += 1


HALF_X = abstract(1, 256, 4, 64)
# Of a generation, but not in the table of chips.
UNKNOWN_HOPPER = DeviceInfo("gpu", "gpu-nvidia-h20", "nvidia", 90, "gpu|NVIDIA H20|described")


def test_an_amd_gpu_runs_triton(installed):
    explanation = explain(FLASH, HALF_X, HALF_X, HALF_X, causal=True, device="amd-mi300x")
    assert explanation.chosen.platform is Platform.TRITON
    assert explanation.chosen.source == "heuristic"


@pytest.mark.parametrize("device", ["cpu", "tpu-v5e"])
def test_only_gpus_run_triton(installed, device):
    candidate = triton_of(HALF_X, HALF_X, HALF_X, device=device)
    assert candidate.verdict == "refused"
    assert candidate.reasons[0] == f"needs a GPU, the device is a {device[:3].upper()}"
    assert explain(FLASH, HALF_X, HALF_X, HALF_X, device=device).chosen.platform is not Platform.TRITON


@pytest.mark.parametrize("missing", ["triton", "jax_triton"])
def test_what_triton_needs_is_named_where_it_is_missing(installed, missing):
    assert triton_of(HALF_X, HALF_X, HALF_X, device="nvidia-h200").verdict != "refused"
    installed.add(missing)
    candidate = triton_of(HALF_X, HALF_X, HALF_X, device="nvidia-h200")
    assert candidate.reasons == (f"needs the package {missing} (pip install '.[gpu]' in a clone of ejkernel)",)
    with pytest.raises(UnsupportedError, match=f"needs the package {missing}"), target("nvidia-h200"):
        jax.eval_shape(lambda x: flash_attention(x, x, x, platform="triton"), HALF_X)


@pytest.mark.parametrize(
    ("dims", "reason"),
    [
        ((264, 264), "head dim 264 is above 256"),
        ((64, 320), "head dim 320 is above 256"),
        ((256, 256), None),
        ((7, 5), None),
    ],
)
def test_head_dims_of_triton(installed, dims, reason):
    q, v = (abstract(1, 64, 2, dim) for dim in dims)
    candidate = triton_of(q, q, v, device="nvidia-h200")
    assert candidate.reasons == (reason,) if reason else candidate.verdict != "refused"


# Pallas' flash attention beside a JAX whose Mosaic GPU differs


@pytest.fixture
def other_jax(installed, monkeypatch):
    """Changes to JAX are noticed, and forgotten after the test."""
    requirements.changes.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    requirements.changes.cache_clear()


def pallas_refused(reason):
    """On Hopper, Pallas is refused with that reason alone, and Triton runs instead."""
    explanation = explain(FLASH, HALF_X, HALF_X, HALF_X, causal=True, device="nvidia-h200")
    candidate = next(c for c in explanation.candidates if c.platform is Platform.PALLAS)
    assert candidate.verdict == "refused"
    assert candidate.reasons == (f"Mosaic GPU of jax {jax.__version__} is not the one known: {reason}",)
    assert explanation.chosen.platform is Platform.TRITON
    with pytest.raises(UnsupportedError, match="Mosaic GPU of jax"), target("nvidia-h200"):
        jax.eval_shape(lambda x: flash_attention(x, x, x, platform="pallas"), HALF_X)


def test_pallas_runs_with_this_jax(other_jax):
    explanation = explain(FLASH, HALF_X, HALF_X, HALF_X, causal=True, device="nvidia-h200", platform="pallas")
    assert explanation.chosen.platform is Platform.PALLAS


@pytest.mark.parametrize("path", dict.fromkeys((*requirements.NAMES, *requirements.CALLS)))
def test_a_jax_without_a_name_is_refused(other_jax, path):
    names = *requirements.NAMES.get(path, ()), *requirements.CALLS.get(path, ())
    missing = names[-1]
    owner, _, attribute = missing.rpartition(".")
    holder = functools.reduce(getattr, filter(None, owner.split(".")), importlib.import_module(path))
    other_jax.delattr(holder, attribute)
    pallas_refused(f"{path} has no {missing}")


@pytest.mark.parametrize("path", dict.fromkeys((*requirements.NAMES, *requirements.CALLS)))
def test_a_jax_without_a_module_is_refused(other_jax, path):
    importlib.import_module(path)
    other_jax.setitem(sys.modules, path, None)
    pallas_refused(f"{path} cannot be imported: import of {path} halted; None in sys.modules")


@pytest.mark.parametrize(
    ("path", "name", "replacement", "expected"),
    [
        (
            "jax.experimental.mosaic.gpu.mma_utils",
            "create_descriptor",
            lambda ref, swizzle, group_size: None,
            "1, swizzle, group_size, logical_k_major",
        ),
        ("jax.experimental.pallas.mosaic_gpu", "wgmma_wait", lambda n, warpgroup: None, "1"),
        (
            "jax.experimental.pallas.mosaic_gpu",
            "load",
            lambda src, idx, more, *, layout=None, optimized=True: None,
            "1, layout, optimized or 2, layout, optimized",
        ),
    ],
    ids=["a parameter is gone", "a new one is required", "of two ways none"],
)
def test_a_jax_with_other_parameters_is_refused(other_jax, path, name, replacement, expected):
    other_jax.setattr(importlib.import_module(path), name, replacement)
    pallas_refused(f"{path}.{name} cannot be called with ({expected})")


# Tables of a chip's family


@pytest.fixture
def tables(monkeypatch):
    """Shipped tables of the test's own: ``{chip: rows}``."""
    made = {}
    monkeypatch.setattr(chain, "_rows", functools.cache(lambda chip, operation: tuple(made.get(chip, ()))))
    return made


def row(platform, seconds, params, *args, predicted=False, **options):
    """What a shipped table has of one implementation and the call's forward."""
    call, _ = bound(*args, **options)
    entry = next(e for e in kernel_registry.list_implementations(FLASH) if e.platform is platform)
    return {
        "direction": "forward",
        "implementation": entry.name,
        "version": entry.version,
        "call": dict(call.bucket),
        "params": params,
        "seconds": seconds,
        "predicted": predicted,
    }


def rows(fastest, q_blocksize=64, predicted=False):
    """Of every implementation, one the fastest."""
    platforms = {e.platform for e in kernel_registry.list_implementations(FLASH)}
    args = (HALF_X, HALF_X, HALF_X)
    params = {"q_blocksize": q_blocksize}
    return [row(p, 1e-4 if p is fastest else 1e-3, params, *args, predicted=predicted, causal=True) for p in platforms]


def chosen_on(device):
    return explain(FLASH, HALF_X, HALF_X, HALF_X, causal=True, device=device).chosen


@pytest.mark.parametrize("fastest", [Platform.TRITON, Platform.XLA])
@pytest.mark.parametrize(
    "device", ["nvidia-h200", "nvidia-h100", "nvidia-gh200", "nvidia-h100-pcie", UNKNOWN_HOPPER], ids=str
)
def test_hoppers_choose_by_the_table_of_the_h200(installed, tables, device, fastest):
    tables["nvidia-h200"] = rows(fastest, 32)
    chosen = chosen_on(device)
    assert (chosen.platform, chosen.source) == (fastest, "shipped")
    assert chosen.params.q_blocksize == 32


@pytest.mark.parametrize("device", ["nvidia-a100", "nvidia-b200", "amd-mi300x", "tpu-v5e", "cpu"])
def test_other_families_do_not(installed, tables, device):
    tables["nvidia-h200"] = tables["tpu-v6e"] = rows(Platform.XLA)
    assert chosen_on(device).source == "heuristic"


def test_a_chip_s_own_table_goes_first(installed, tables):
    tables["nvidia-h200"] = rows(Platform.XLA)
    tables["nvidia-h100"] = rows(Platform.TRITON)
    assert chosen_on("nvidia-h100").platform is Platform.TRITON
    assert chosen_on("nvidia-h200").platform is Platform.XLA


def test_the_nearest_capability_lends_its_table(installed, tables):
    tables["nvidia-a100"] = rows(Platform.TRITON, 64)
    tables["nvidia-l40s"] = rows(Platform.TRITON, 32)
    assert chosen_on("nvidia-rtx-4090").params.q_blocksize == 32
    assert chosen_on("nvidia-a10").params.q_blocksize == 32


def test_the_shipped_table_of_the_h200_serves_hoppers(installed):
    """As it is in the package."""
    shipped = [r for r in chain._rows("nvidia-h200", FLASH) if r["direction"] == "forward"]
    call = next(r["call"] for r in shipped if r["call"]["features"] == "causal gqa")
    q = abstract(1, call["q_len"], call["heads"] * call["group"], call["head_dim"])
    k = abstract(1, call["kv_len"], call["heads"], call["head_dim"])
    fastest = min((r for r in shipped if r["call"] == call), key=lambda r: r["seconds"])
    pin = next(e.platform for e in kernel_registry.list_implementations(FLASH) if e.name == fastest["implementation"])
    for device in ("nvidia-h200", "nvidia-h100", UNKNOWN_HOPPER):
        chosen = explain(FLASH, q, k, k, causal=True, device=device, platform=pin).chosen
        assert chosen.source == "shipped"
        assert chosen.params.to_dict().items() >= fastest["params"].items()


def test_triton_leaves_chips_that_it_does_not_compile_for():
    x = jax.ShapeDtypeStruct((1, 512, 4, 64), jnp.float16)
    explanation = explain("flash_attention", x, x, x, device="nvidia-t4")
    assert explanation.chosen.platform is Platform.XLA
    assert "needs capability ≥ 8.0, nvidia-t4 has 7.5" in str(explanation)


# Calls that no table has


def test_times_of_different_calls_are_not_compared(installed, tables):
    """cuDNN was measured at a length four times as long: that it took longer says nothing."""
    long = abstract(1, 1024, 4, 64)
    tables["nvidia-a100"] = [
        row(Platform.TRITON, 1e-4, {"q_blocksize": 64}, HALF_X, HALF_X, HALF_X, causal=True),
        row(Platform.CUDNN, 1e-3, {}, long, long, long, causal=True),
    ]
    explanation = explain(FLASH, HALF_X, HALF_X, HALF_X, causal=True, device="nvidia-a100")
    assert explanation.chosen.platform is Platform.TRITON
    assert "10 x, measured" not in str(explanation)


def test_sizes_may_differ_and_so_may_the_group(installed, tables):
    q, kv = abstract(2, 500, 28, 64), abstract(2, 500, 4, 64)
    tables["nvidia-a100"] = [row(Platform.TRITON, 1e-4, {"q_blocksize": 32}, q, kv, kv, causal=True)]
    more, fewer = abstract(2, 500, 32, 64), abstract(2, 500, 8, 64)
    chosen = explain(FLASH, more, fewer, fewer, causal=True, device="nvidia-a100").chosen
    assert (chosen.source, chosen.params.q_blocksize) == ("shipped", 32)


def test_parameters_of_a_call_that_asks_as_much_serve(installed, tables):
    tables["nvidia-h200"] = [row(Platform.TRITON, 1e-4, {"q_blocksize": 32}, HALF_X, HALF_X, HALF_X, causal=True)]

    def source(x=HALF_X, **options):
        chosen = explain(FLASH, x, x, x, device="nvidia-h200", platform="triton", **options).chosen
        return chosen.source, chosen.params.q_blocksize == 32

    sinks = abstract(4, 1, dtype=jnp.float32)
    assert source(causal=True, softmax_aux=sinks) == ("shipped for a similar call", True)
    assert source(sliding_window=(9, 9)) == ("shipped for a similar call", True)
    assert source(abstract(1, 256, 4, 48), causal=True) == ("shipped for a similar call", True)
    assert source(abstract(1, 256, 4, 96), causal=True)[0] == "heuristic"
    assert source(causal=True, logits_soft_cap=5.0)[0] == "heuristic"


def test_predicted_times_rank_and_give_way_to_measured_ones(installed, tables):
    tables["nvidia-h200"] = rows(Platform.XLA, predicted=True)
    explanation = explain(FLASH, HALF_X, HALF_X, HALF_X, causal=True, device="nvidia-h200")
    assert (explanation.chosen.platform, explanation.chosen.source) == (Platform.XLA, "shipped")
    assert "shipped (predicted): q_blocksize=64" in str(explanation)
    assert "10 x, predicted" in str(explanation)
    call, _ = bound(HALF_X, HALF_X, HALF_X, causal=True)
    entry = next(e for e in kernel_registry.list_implementations(FLASH) if e.platform is Platform.TRITON)
    chain.remember(call, describe("nvidia-h200"), entry, "forward", chain.Record(FwdParams(), 1.0, "autotune"))
    explanation = explain(FLASH, HALF_X, HALF_X, HALF_X, causal=True, device="nvidia-h200")
    assert (explanation.chosen.platform, explanation.chosen.source) == (Platform.TRITON, "memory")
    assert "predicted" not in str(explanation)
