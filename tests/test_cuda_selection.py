"""Where CUDA's recurrent kernels are chosen, who is refused and why, and what a call becomes."""

import re

import jax
import jax.numpy as jnp
import pytest
from cuda_compilers import H200, NVIDIA

from ejkernel import Platform, UnsupportedError, explain, recurrent, target
from ejkernel.callib.chips import CHIPS
from ejkernel.contracts.device import describe
from ejkernel.kernels._cuda import build, call, toolchain
from ejkernel.kernels._cuda.call import Capacity
from ejkernel.kernels._cuda.toolchain import BuildError
from ejkernel.kernels.common.recurrent import GATES

LSTM = {
    "inputs": jax.ShapeDtypeStruct((64, 32, 1024), jnp.bfloat16),
    "weights": {name: jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16) for name in ("weight_ih", "weight_hh")},
}


def told(chip, **more):
    """``(the chosen platform, why CUDA was not chosen)``; nothing is measured of these calls."""
    explanation = explain(recurrent, **LSTM, device=chip, **more)
    reasons = {c.platform: "; ".join(c.reasons) for c in explanation.candidates}
    return explanation.chosen.platform, reasons[Platform.CUDA]


def next_best():
    import importlib.util

    both = importlib.util.find_spec("triton") and importlib.util.find_spec("jax_triton")
    return Platform.TRITON if both else Platform.XLA


def test_with_compilers_cuda_is_chosen(compilers):
    compilers()
    for chip in ("nvidia-h100", H200, "nvidia-b200"):
        explanation = explain(recurrent, **LSTM, device=chip, gradients=True)
        assert explanation.chosen.platform is explanation.backward.chosen.platform is Platform.CUDA, chip


def test_where_a_step_goes_over_the_batch_several_times_another_is_chosen(compilers):
    compilers()
    wide = {**LSTM, "inputs": jax.ShapeDtypeStruct((512, 32, 1024), jnp.bfloat16)}
    assert explain(recurrent, **wide, device=H200).chosen.platform is next_best()
    assert explain(recurrent, **wide, device=H200, platform="cuda").chosen.platform is Platform.CUDA


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({"host": False}, ["needs a C++ compiler", "install g++ or clang++"]),
        ({"device": None}, ["needs nvcc", f"pip install {call.NVRTC_PACKAGE}", "jax[cuda13]"]),
        ({"device": (80,)}, ["nvcc 1.2 does not compile for capability 90", "install a newer one"]),
    ],
    ids=["no host compiler", "no device compiler", "an old one"],
)
def test_without_a_compiler_another_runs_and_says_what_to_install(compilers, installed, words):
    compilers(**installed)
    chosen, reason = told(H200)
    assert chosen is next_best()
    for word in words:
        assert word in reason
    assert "and more" not in reason
    with pytest.raises(UnsupportedError, match=re.escape(words[0])):
        explain(recurrent, **LSTM, device=H200, platform="cuda").require()


def test_a_compiler_that_tells_nothing_is_the_reason(compilers, monkeypatch):
    compilers()

    def fails():
        raise BuildError("nvcc --list-gpu-arch failed:\nno more words\nan error at last")

    monkeypatch.setattr(toolchain.device_compiler(), "architectures", fails)
    call._compilers.cache_clear()
    assert told(H200)[1] == "an error at last"


def test_what_does_not_build_is_refused_where_it_would_run(monkeypatch, fresh):
    def broken(*_):
        raise BuildError("nvcc failed:\nIn file included from x\nx.h(1): error: nothing works")

    monkeypatch.setattr(build, "cubin", broken)
    monkeypatch.setattr(call, "_register", lambda: None)
    assert call._probe("sm_90a") == "cannot be built (x.h(1): error: nothing works)"


@pytest.mark.parametrize("chip", ["nvidia-v100", "nvidia-t4"])
def test_chips_that_are_too_old(compilers, chip):
    compilers(device=(70, 75, 80))
    chosen, reason = told(chip)
    assert chosen is Platform.XLA
    assert f"needs capability ≥ {call.OLDEST / 10}" in reason
    assert f"needs capability ≥ {call.OLDEST / 10}" in call.refusal(describe(chip))


def test_chips_of_others(compilers):
    compilers()
    chosen, reason = told("amd-mi300x")
    assert chosen is Platform.XLA
    assert "nvidia" in reason


def test_names_of_architectures():
    assert [call.architecture(describe(chip)) for chip in ("nvidia-a100", H200, "nvidia-b200")] == [
        "sm_80",
        "sm_90a",
        "sm_100",
    ]


def test_what_a_launch_may_take():
    for chip in NVIDIA:
        assert call.capacity(describe(chip)) == Capacity(CHIPS[chip].sm_count, CHIPS[chip].shared_memory_per_block)
    least = min(CHIPS[chip].shared_memory_per_block for chip in NVIDIA)
    assert call.LEAST_SHARED_MEMORY <= least


def test_a_part_of_a_chip_has_its_own_multiprocessors(monkeypatch):
    device = describe(H200)
    monkeypatch.setattr(call, "is_present", lambda _: True)
    monkeypatch.setattr(call, "_multiprocessors_here", lambda: 16)
    assert call.capacity(device).multiprocessors == 16


@pytest.mark.parametrize(("chip", "batch", "size"), [("nvidia-l4", 4, 8192), (H200, 4096, 1024)])
def test_what_a_chip_does_not_hold_is_left_to_others(compilers, chip, batch, size):
    compilers()
    arrays = {
        "inputs": jax.ShapeDtypeStruct((batch, 8, 16), jnp.bfloat16),
        "weights": {
            "weight_ih": jax.ShapeDtypeStruct((4 * size, 16), jnp.bfloat16),
            "weight_hh": jax.ShapeDtypeStruct((4 * size, size), jnp.bfloat16),
        },
    }
    explanation = explain(recurrent, **arrays, device=chip)
    assert explanation.chosen.platform is next_best()
    with pytest.raises(UnsupportedError, match=f"do not hold a hidden size of {size} with a batch of {batch} at once"):
        explain(recurrent, **arrays, device=chip, platform="cuda")


@pytest.fixture
def recorded(monkeypatch):
    """Launches as they are asked for, instead of compilers and a registration."""
    made = []

    def cubin(source, architecture, macros):
        made.append({"source": source, "architecture": architecture, "macros": dict(macros)})
        return b"machine code"

    monkeypatch.setattr(build, "cubin", cubin)
    monkeypatch.setattr(call, "_register", lambda: None)
    return made


@pytest.mark.parametrize(
    ("cell", "lengths", "both"), [("lstm", True, False), ("gru", False, True), ("rnn", True, False)]
)
def test_a_call_is_one_launch_for_each_direction(recorded, compilers, cell, lengths, both):
    pytest.importorskip("jax_cuda13_plugin", reason="jax-cuda13-plugin lowers for GPUs, and is not installed")
    compilers()
    size = 20  # which is padded
    names = [name + suffix for suffix in ("", "_reverse")[: 1 + both] for name in ("weight_ih", "weight_hh")]
    weights = {name: jnp.zeros((GATES[cell] * size, 6 if "ih" in name else size)) for name in names}
    more = {"lengths": jnp.array([3, 0])} if lengths else {}

    def run(x, weights):
        out, pull = jax.vjp(
            lambda x, w: recurrent(x, None, w, cell, bidirectional=both, platform="cuda", **more)[0], x, weights
        )
        return out, pull(out)

    with target(H200):
        text = jax.jit(run).trace(jnp.ones((2, 5, 6)), weights).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"@{call.TARGET}(") == 2 * (1 + both)
    assert text.count("cooperative = 1 : i32") == 2 * (1 + both)
    assert {made["architecture"] for made in recorded} == {"sm_90a"}
    for made in recorded:
        # Every macro that a source reads without a default is there.
        text = (toolchain.SOURCES / made["source"]).read_text() + (toolchain.SOURCES / "recurrent.cuh").read_text()
        used = {name for name in ("HIDDEN", "GATES", "PLANES", "CELL", "KEPT", "SHARED", "AHEAD") if name in text}
        assert used <= {*made["macros"]}
        assert made["macros"]["HIDDEN"] == 24
