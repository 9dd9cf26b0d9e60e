"""Calibration: the table of chips, and heuristics that agree with each other and with it."""

import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from ejkernel import callib
from ejkernel.callib import (
    CHIPS,
    estimate_shared_memory_bytes,
    get_shared_memory_limit,
    identify,
    select_block_sizes,
    select_num_stages,
    select_num_warps,
)
from ejkernel.errors import InvalidInputError

pytestmark = pytest.mark.typed

# With the import hook of jaxtyping a wrong type never reaches the function.
REFUSED = (InvalidInputError, TypeCheckError)
KIB = 1024
LIMIT = "EJKERNEL_TRITON_SMEM_LIMIT"
GPUS = [slug for slug, chip in CHIPS.items() if chip.kind == "gpu"]
TPUS = [slug for slug, chip in CHIPS.items() if chip.kind == "tpu"]


@pytest.fixture(autouse=True)
def no_override(monkeypatch):
    monkeypatch.delenv(LIMIT, raising=False)


def fake_gpu(kind, **attributes):
    return types.SimpleNamespace(platform="gpu", device_kind=kind, **attributes)


# --- chips --------------------------------------------------------------------------------------------------

KINDS = {
    "NVIDIA H200": "nvidia-h200",
    "NVIDIA H100 80GB HBM3": "nvidia-h100",
    "NVIDIA H100 PCIe": "nvidia-h100-pcie",
    "NVIDIA GH200 480GB": "nvidia-gh200",
    "NVIDIA B200": "nvidia-b200",
    "NVIDIA A100-SXM4-40GB": "nvidia-a100",
    "NVIDIA A100-SXM4-80GB": "nvidia-a100",
    "NVIDIA A100 80GB PCIe": "nvidia-a100",
    "NVIDIA A10": "nvidia-a10",
    "NVIDIA A10G": "nvidia-a10g",
    "NVIDIA RTX A6000": "nvidia-rtx-a6000",
    "NVIDIA L4": "nvidia-l4",
    "NVIDIA L40": "nvidia-l40",
    "NVIDIA L40S": "nvidia-l40s",
    "NVIDIA GeForce RTX 4090": "nvidia-rtx-4090",
    "NVIDIA RTX 6000 Ada Generation": "nvidia-rtx-6000-ada",
    "Tesla V100-SXM2-16GB": "nvidia-v100",
    "Tesla V100-SXM2-32GB": "nvidia-v100",
    "Tesla T4": "nvidia-t4",
    "AMD Instinct MI300X": "amd-mi300x",
    "TPU v4": "tpu-v4",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5e": "tpu-v5e",
    "TPU v5": "tpu-v5p",
    "TPU v5p": "tpu-v5p",
    "TPU v6 lite": "tpu-v6e",
    "TPU v6e": "tpu-v6e",
    "TPU7x": "tpu-v7",
    "TPU v7x": "tpu-v7",
}


@pytest.mark.parametrize(("kind", "slug"), KINDS.items())
def test_device_kinds_are_identified(kind, slug):
    assert identify(kind) is CHIPS[slug]


@pytest.mark.parametrize("slug", CHIPS)
def test_slugs_identify_themselves(slug):
    assert identify(slug) is CHIPS[slug]
    assert CHIPS[slug].slug == slug


@pytest.mark.parametrize(
    "kind",
    [
        "NVIDIA H20",
        "NVIDIA A1000",
        "NVIDIA L400",
        "TPU v3",
        "TPU v4 lite",
        "TPU8t",
        "cpu",
        "",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
    ],
)
def test_other_models_stay_unknown(kind):
    assert identify(kind) is None


def test_the_chips_of_the_issue_are_there():
    names = "v100 t4 a10 a100 l4 l40 rtx-4090 h100 h200 b200".split()
    assert {f"nvidia-{name}" for name in names} | {
        "amd-mi300x",
        "tpu-v4",
        "tpu-v5e",
        "tpu-v5p",
        "tpu-v6e",
        "tpu-v7",
    } <= set(CHIPS)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_the_table_is_plausible(chip):
    assert hash(chip) == hash(identify(chip.slug))
    assert chip.vendor in ("nvidia", "amd", "google")
    assert chip.kind in ("gpu", "tpu")
    assert 1 <= chip.sm_count <= 400
    assert 16 * KIB**3 <= chip.memory_bytes <= 300 * KIB**3
    assert 0.2e12 < chip.memory_bandwidth < 10e12
    peaks = dict(chip.peak_flops)
    assert all(1e12 < peak < 1e16 for peak in peaks.values())
    assert max(peaks.get("bfloat16", 0), peaks.get("float16", 0)) > peaks.get("float32", 0)
    # A missed factor of two for sparsity, or of 1000, would move a chip out of this band.
    assert 100 < (peaks.get("bfloat16") or peaks["float16"]) / chip.memory_bandwidth < 600
    assert (chip.shared_memory_per_block > 0) == (chip.kind == "gpu") == (chip.vmem_bytes == 0)
    assert chip.flops("float3") is None


def test_capabilities():
    expected = {
        "v100": 70,
        "t4": 75,
        "a100": 80,
        "a10": 86,
        "l4": 89,
        "rtx-4090": 89,
        "h100": 90,
        "h200": 90,
        "b200": 100,
    }
    assert {name: CHIPS[f"nvidia-{name}"].capability for name in expected} == expected
    assert CHIPS["amd-mi300x"].arch == "gfx942"
    assert [CHIPS[f"tpu-{name}"].capability for name in ("v4", "v5e", "v5p", "v6e", "v7")] == [4, 5, 5, 6, 7]


def test_the_table_needs_no_jax():
    code = "import sys, ejkernel.callib.chips; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- the limit ----------------------------------------------------------------------------------------------

LIMITS = {
    "NVIDIA A100-SXM4-40GB": 163,
    "NVIDIA H100 80GB HBM3": 227,
    "NVIDIA H200": 227,
    "NVIDIA B200": 227,
    "NVIDIA GeForce RTX 4090": 99,
    "NVIDIA L4": 99,
    "NVIDIA L40S": 99,
    "NVIDIA A10G": 99,
    "Tesla V100-SXM2-16GB": 96,
    "Tesla T4": 64,
    "AMD Instinct MI300X": 64,
    "NVIDIA GeForce GTX 970": 48,
    "TPU v4": 48,
}


@pytest.mark.parametrize(("kind", "kib"), LIMITS.items())
def test_the_limit_comes_from_the_model_not_from_str(kind, kib):
    assert get_shared_memory_limit(fake_gpu(kind)) == kib * KIB


def test_the_limit_of_slugs_chips_and_the_default_device():
    assert get_shared_memory_limit("nvidia-h200") == get_shared_memory_limit(CHIPS["nvidia-h200"]) == 227 * KIB
    assert get_shared_memory_limit() == 48 * KIB


def test_an_unknown_model_is_judged_by_its_capability():
    assert get_shared_memory_limit(fake_gpu("NVIDIA GeForce RTX 3090", compute_capability="8.6")) == 99 * KIB
    assert get_shared_memory_limit(fake_gpu("NVIDIA H20", compute_capability="9.0")) == 227 * KIB
    assert get_shared_memory_limit(fake_gpu("NVIDIA X", compute_capability="?")) == 48 * KIB


def test_the_variable_wins(monkeypatch):
    monkeypatch.setenv(LIMIT, "12345")
    assert get_shared_memory_limit("nvidia-h200") == get_shared_memory_limit() == 12345
    monkeypatch.setenv(LIMIT, "")
    assert get_shared_memory_limit("nvidia-h200") == 227 * KIB


@pytest.mark.parametrize("value", ["48k", "-1", "0", "1.5"])
def test_a_bad_variable_is_named(monkeypatch, value):
    monkeypatch.setenv(LIMIT, value)
    with pytest.raises(InvalidInputError, match=LIMIT):
        get_shared_memory_limit("nvidia-h200")


def test_an_unknown_slug_is_refused():
    with pytest.raises(InvalidInputError, match="nvidia-h200"):
        get_shared_memory_limit("nvidia-z1")


# --- the estimate -------------------------------------------------------------------------------------------


def test_the_estimate_by_hand():
    assert estimate_shared_memory_bytes(128, 256, 64) == 82_944  # the documents' own example
    assert estimate_shared_memory_bytes(128, 256, 64, include_softmax=False) == 82_944 - 1024
    assert estimate_shared_memory_bytes(128, 256, 64, jnp.float32, False) == 2 * (82_944 - 1024)
    assert estimate_shared_memory_bytes(128, 256, 64, "bfloat16") == 82_944
    assert estimate_shared_memory_bytes(1, 1, 1) == 128


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_every_stage_holds_its_own_keys_and_values(stages):
    tiles = 64 * 64 * 2
    assert estimate_shared_memory_bytes(64, 64, 64, include_softmax=False, num_stages=stages) == tiles * (
        1 + 2 * stages
    )


@pytest.mark.parametrize("name", ["q_block", "kv_block", "head_dim", "num_stages"])
@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_the_estimate_refuses_by_name(name, value):
    arguments = {"q_block": 64, "kv_block": 64, "head_dim": 64, "num_stages": 1, name: value}
    with pytest.raises(REFUSED, match=name):
        estimate_shared_memory_bytes(**arguments)


# --- selections ---------------------------------------------------------------------------------------------

sides = st.integers(0, 10).map(lambda power: 2**power)


@given(sides, sides, st.integers(16, 512), st.sampled_from([np.float16, jnp.bfloat16, np.float32, np.float64]))
def test_warps_are_4_8_or_16_and_grow_with_everything(q_block, kv_block, head_dim, dtype):
    warps = select_num_warps(q_block, kv_block, head_dim, dtype)
    assert warps in (4, 8, 16)
    assert select_num_warps(2 * q_block, kv_block, head_dim, dtype) >= warps
    assert select_num_warps(q_block, 2 * kv_block, head_dim, dtype) >= warps
    assert select_num_warps(q_block, kv_block, 2 * head_dim, dtype) >= warps


def test_warps_take_all_their_values():
    assert [select_num_warps(128, 64, head_dim) for head_dim in (64, 128, 256)] == [4, 8, 16]


def test_stages_of_the_default_limit():
    assert [select_num_stages(kib * KIB) for kib in (8, 15, 20, 30, 48)] == [3, 3, 2, 1, 1]


def test_a_tile_over_the_limit_is_refused():
    with pytest.raises(InvalidInputError, match=r"smem_bytes is 49153.*49152"):
        select_num_stages(48 * KIB + 1)
    assert select_num_stages(48 * KIB + 1, device="nvidia-t4") == 1


def test_the_documents_own_choice_does_not_fit_and_is_not_made():
    smem = estimate_shared_memory_bytes(128, 256, 64)
    assert smem > get_shared_memory_limit()
    assert estimate_shared_memory_bytes(*select_block_sizes(4096, 64, "gpu"), 64) <= get_shared_memory_limit()


@settings(max_examples=300, deadline=None)
@given(
    device=st.sampled_from([*GPUS, *TPUS, "cpu"]),
    seq_len=st.integers(1, 1 << 20),
    head_dim=st.integers(16, 512),
    dtype=st.sampled_from([np.float16, jnp.bfloat16, np.float32]),
)
def test_everything_picked_fits(device, seq_len, head_dim, dtype):
    limit = get_shared_memory_limit(device)
    q_block, kv_block = select_block_sizes(seq_len, head_dim, "gpu", dtype=dtype, device=device)
    smem = estimate_shared_memory_bytes(q_block, kv_block, head_dim, dtype)
    assert smem <= limit
    stages = select_num_stages(smem, device=device)
    assert 1 <= stages <= 3
    assert estimate_shared_memory_bytes(q_block, kv_block, head_dim, dtype, num_stages=stages) <= limit
    assert select_num_warps(q_block, kv_block, head_dim, dtype) in (4, 8, 16)
    for block in (q_block, kv_block):
        assert block & (block - 1) == 0
        assert block <= max(16, 2 * seq_len - 1)


@pytest.mark.parametrize("slug", GPUS)
def test_every_chip_and_head_dim_keeps_tensor_cores(slug):
    for head_dim in range(16, 513):
        q_block, kv_block = select_block_sizes(8192, head_dim, "gpu", device=slug)
        assert min(q_block, kv_block) >= 16
        assert estimate_shared_memory_bytes(q_block, kv_block, head_dim) <= get_shared_memory_limit(slug)


@pytest.mark.parametrize("limit_kib", [16, 48, 64, 99, 227])
def test_the_variable_bounds_the_blocks(monkeypatch, limit_kib):
    monkeypatch.setenv(LIMIT, str(limit_kib * KIB))
    for head_dim in (16, 64, 80, 128, 256, 512):
        smem = estimate_shared_memory_bytes(*select_block_sizes(4096, head_dim, "gpu"), head_dim)
        assert smem <= limit_kib * KIB
        assert select_num_stages(smem) >= 1


@pytest.mark.parametrize("platform", ["gpu", "tpu", "cpu"])
def test_the_length_counts(platform):
    long = select_block_sizes(8192, 64, platform, device="nvidia-h200")
    short = select_block_sizes(10, 64, platform, device="nvidia-h200")
    assert short == (16, 16)
    assert long[0] > 16
    assert long[1] > 16


@pytest.mark.parametrize("slug", TPUS)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_tpu_blocks_fit_in_vector_memory(slug, head_dim):
    q_block, kv_block = select_block_sizes(8192, head_dim, "tpu")
    tiles = (2 * q_block + 2 * kv_block) * head_dim * 4 * 2 + 2 * q_block * kv_block * 4
    assert tiles <= CHIPS[slug].vmem_bytes
    assert kv_block % 128 == 0


@pytest.mark.parametrize("name", ["GPU", "cuda", "triton"])
def test_platform_names(name):
    assert select_block_sizes(4096, 64, name, device="nvidia-h200") == select_block_sizes(
        4096, 64, "gpu", device="nvidia-h200"
    )


def test_bad_selections_are_named(monkeypatch):
    with pytest.raises(InvalidInputError, match="platform is 'metal'"):
        select_block_sizes(64, 64, "metal")
    with pytest.raises(InvalidInputError, match="seq_len is 0"):
        select_block_sizes(0, 64, "gpu")
    with pytest.raises(InvalidInputError, match="head_dim is -1"):
        select_num_warps(64, 64, -1)
    with pytest.raises(InvalidInputError, match="smem_bytes is 0"):
        select_num_stages(0)
    monkeypatch.setenv(LIMIT, "256")
    with pytest.raises(InvalidInputError, match="head_dim is 512"):
        select_block_sizes(64, 512, "gpu")


def test_public_names():
    assert all(hasattr(callib, name) for name in callib.__all__)


# What a reader tried to break


def test_narrow_numpy_integers_do_not_overflow():
    bytes_ = estimate_shared_memory_bytes(np.int8(100), np.int8(100), np.int8(100))
    assert bytes_ == estimate_shared_memory_bytes(100, 100, 100)
    assert type(bytes_) is int
    assert select_num_warps(np.int8(100), np.int8(100), np.int8(100)) == select_num_warps(100, 100, 100)


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4080", "NVIDIA RTX 4000 Ada Generation", "NVIDIA GeForce RTX 4090 Laptop GPU"]
)
def test_ada_is_told_by_its_name(name, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.delenv("EJKERNEL_TRITON_SMEM_LIMIT", raising=False)
    assert get_shared_memory_limit(SimpleNamespace(device_kind=name)) == 99 * 1024


def test_pallas_is_what_its_device_is():
    assert select_block_sizes(4096, 128, "pallas", device="tpu-v5e") == select_block_sizes(4096, 128, "tpu")
    on_gpu = select_block_sizes(4096, 128, "gpu", device="nvidia-h200")
    assert select_block_sizes(4096, 128, "pallas", device="nvidia-h200") == on_gpu


def test_an_unknown_dtype_is_named():
    from jaxtyping import TypeCheckError

    for call in (lambda: estimate_shared_memory_bytes(16, 16, 16, "foo"), lambda: select_num_warps(16, 16, 16, "foo")):
        with pytest.raises((InvalidInputError, TypeCheckError), match="dtype"):
            call()
