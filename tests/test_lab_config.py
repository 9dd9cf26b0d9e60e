"""The lab's GPUs and model configurations."""

import copy
import inspect
import pickle
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.callib.chips import CHIPS
from ejkernel.errors import InvalidInputError
from ejkernel.lab import config
from ejkernel.lab.config import (
    GEMMA3_270M_CONFIG,
    GEMMA3_PESUDO_CONFIG,
    GEMMA3_PSEUDO_CONFIG,
    GPU_SPECS,
    get_ridge_point,
)

FIELDS = {
    "fp16_tflops",
    "bf16_tflops",
    "fp32_tflops",
    "memory_bandwidth_tb_s",
    "memory_gb",
    "sram_kb",
    "num_sms",
}
COMMON = {
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA3_270M = COMMON | {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_hidden_layers": 18,
}
PSEUDO = COMMON | {
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 26,
}


# --- GPUs ---------------------------------------------------------------------------------------------------


def test_specifications():
    assert set(GPU_SPECS) == {"A6000", "A10", "A100", "H100", "H200", "4090"}
    for specification in GPU_SPECS.values():
        assert type(specification) is dict
        assert set(specification) == FIELDS
        assert all(type(value) in (int, float) and value > 0 for value in specification.values())


def test_the_documented_example():
    specification = GPU_SPECS["A100"]
    assert specification["fp32_tflops"] == 19.5
    assert specification["memory_bandwidth_tb_s"] == 2.0
    assert specification["num_sms"] == 108


def test_specifications_are_the_chips():
    slugs = {
        "A6000": "nvidia-rtx-a6000",
        "A10": "nvidia-a10",
        "A100": "nvidia-a100",
        "H100": "nvidia-h100",
        "H200": "nvidia-h200",
        "4090": "nvidia-rtx-4090",
    }
    for name, slug in slugs.items():
        chip, specification = CHIPS[slug], GPU_SPECS[name]
        assert specification["fp16_tflops"] == pytest.approx(chip.flops("float16") / 1e12)
        assert specification["bf16_tflops"] == pytest.approx(chip.flops("bfloat16") / 1e12)
        assert specification["fp32_tflops"] == pytest.approx(chip.flops("float32") / 1e12)
        assert specification["memory_bandwidth_tb_s"] == pytest.approx(chip.memory_bandwidth / 1e12, rel=0.02)
        assert specification["num_sms"] == chip.sm_count
        assert specification["sram_kb"] * 1024 > chip.shared_memory_per_block
    assert {name: spec["memory_gb"] for name, spec in GPU_SPECS.items()} == {
        "A6000": 48,
        "A10": 24,
        "A100": 80,
        "H100": 80,
        "H200": 141,
        "4090": 24,
    }
    assert {name: spec["sram_kb"] for name, spec in GPU_SPECS.items()} == {
        "A6000": 128,
        "A10": 128,
        "A100": 192,
        "H100": 256,
        "H200": 256,
        "4090": 128,
    }


def test_ridge_points():
    assert get_ridge_point("A100") == get_ridge_point("A100", dtype="fp16") == 156.0
    assert get_ridge_point("A100", "fp32") == 9.75
    assert get_ridge_point("H200", "bf16") == pytest.approx(989.4 / 4.8)
    assert str(inspect.signature(get_ridge_point)) == "(gpu_name: 'str', dtype: 'str' = 'fp16') -> 'float'"
    for name, specification in GPU_SPECS.items():
        for dtype in ("fp16", "bf16", "fp32"):
            expected = specification[f"{dtype}_tflops"] / specification["memory_bandwidth_tb_s"]
            assert get_ridge_point(name, dtype) == expected
            assert type(get_ridge_point(name, dtype)) is float


@pytest.mark.parametrize(
    ("dtype", "short"),
    [
        ("float16", "fp16"),
        ("bfloat16", "bf16"),
        ("float32", "fp32"),
        (np.float32, "fp32"),
        (np.dtype("float16"), "fp16"),
        (jnp.bfloat16, "bf16"),
        (jnp.dtype("bfloat16"), "bf16"),
        (jnp.float32, "fp32"),
    ],
)
def test_dtypes_of_ridge_points(dtype, short):
    assert get_ridge_point("A100", dtype) == get_ridge_point("A100", short)


@pytest.mark.torch
def test_torch_dtypes_of_ridge_points():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    assert get_ridge_point("A100", torch.float16) == get_ridge_point("A100", torch.bfloat16) == 156.0
    assert get_ridge_point("A100", torch.float32) == 9.75
    with pytest.raises(InvalidInputError, match=r"^dtype is torch.float64; pass one of fp16 \(float16\), bf16"):
        get_ridge_point("A100", torch.float64)


@pytest.mark.parametrize("name", ["V100", "a100", "", 4090, None, ["A100"]])
def test_an_unknown_gpu(name):
    with pytest.raises(InvalidInputError) as error:
        get_ridge_point(name)
    assert str(error.value) == f"gpu_name is {name!r}; pass one of A6000, A10, A100, H100, H200, 4090"


@pytest.mark.parametrize("dtype", ["fp8", "float64", "", np.float64, np.int8, int, None, object(), ["fp16"]])
def test_an_unknown_dtype(dtype):
    with pytest.raises(InvalidInputError) as error:
        get_ridge_point("A100", dtype)
    assert str(error.value) == f"dtype is {dtype!r}; pass one of fp16 (float16), bf16 (bfloat16), fp32 (float32)"


# --- configurations -----------------------------------------------------------------------------------------


def fresh(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_importing_loads_neither_transformers_nor_torch():
    result = fresh(
        "import doctest, inspect, sys\n"
        "from ejkernel.lab.config import *\n"
        "from ejkernel.lab import config\n"
        "doctest.testmod(config); inspect.getmembers(config, inspect.isclass)\n"
        "isinstance(GEMMA3_270M_CONFIG, dict), GEMMA3_PESUDO_CONFIG is GEMMA3_PSEUDO_CONFIG\n"
        "print(sorted({'torch', 'transformers', 'matplotlib', 'pandas'} & set(sys.modules)))"
    )
    assert result.stdout == "[]\n", result.stderr


@pytest.mark.parametrize(
    "use",
    [
        "config.hidden_size",
        "config.to_dict()",
        "config.hidden_size = 1",
        "repr(config)",
        "config == config",
        "copy.deepcopy(config)",
        "pickle.dumps(config)",
        "vars(config)",
        "list(config)",
    ],
)
def test_without_transformers(monkeypatch, use):
    monkeypatch.setitem(sys.modules, "transformers", None)
    unbuilt = config._Unbuilt(hidden_size=640)
    with pytest.raises(ImportError) as error:
        exec(use, {"config": unbuilt, "copy": copy, "pickle": pickle})
    assert str(error.value) == "a Gemma3TextConfig needs transformers: pip install '.[torch]' in a clone of ejkernel"
    assert not isinstance(unbuilt, dict)


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed")


def unbuilt(**settings):
    return config._Unbuilt(**(GEMMA3_270M | {"rope_theta": 1e6, "rope_local_base_freq": 1e4} | settings))


@pytest.mark.parametrize(("built", "expected"), [(GEMMA3_270M_CONFIG, GEMMA3_270M), (GEMMA3_PSEUDO_CONFIG, PSEUDO)])
def test_values(transformers, built, expected):
    assert {name: getattr(built, name) for name in expected} == expected
    layers = range(1, expected["num_hidden_layers"] + 1)
    assert built.layer_types == ["sliding_attention" if layer % 6 else "full_attention" for layer in layers]
    assert built.rope_parameters["full_attention"]["rope_theta"] == 1_000_000
    assert built.rope_parameters["sliding_attention"]["rope_theta"] == 10_000


def test_both_spellings_are_one_object():
    assert GEMMA3_PESUDO_CONFIG is GEMMA3_PSEUDO_CONFIG


def test_a_config_becomes_the_real_one(transformers):
    real = transformers.Gemma3TextConfig(**GEMMA3_270M)
    assert isinstance(unbuilt(), transformers.Gemma3TextConfig)
    assert unbuilt().__class__ is transformers.Gemma3TextConfig
    assert unbuilt() == real
    assert real == unbuilt()
    assert unbuilt() == unbuilt()
    assert unbuilt() != unbuilt(hidden_size=1152)
    assert unbuilt() != "a config"
    assert repr(unbuilt()) == str(unbuilt()) == repr(real)
    assert unbuilt().to_dict() == real.to_dict()
    assert vars(unbuilt()) == vars(real)
    assert set(unbuilt()) == set(real)
    assert dir(unbuilt()) == dir(real)
    with pytest.raises(TypeError, match="unhashable"):
        hash(unbuilt())
    with pytest.raises(AttributeError, match="hidden_sise"):
        unbuilt().hidden_sise  # noqa: B018


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_are_real_and_apart(transformers, copied):
    original = unbuilt()
    other = copied(original)
    assert type(other) is transformers.Gemma3TextConfig
    assert other == original
    other.num_hidden_layers = 3
    assert original.num_hidden_layers == 18


def test_attributes_can_be_set_and_deleted(transformers):
    changed = unbuilt()
    changed.num_hidden_layers = 2
    assert changed.num_hidden_layers == changed.to_dict()["num_hidden_layers"] == 2
    assert changed.hidden_size == 640
    changed = unbuilt()
    del changed.layer_types
    assert "layer_types" not in vars(changed)


def test_threads_build_once(transformers):
    shared, gate = unbuilt(), threading.Barrier(8)

    def change(index):
        gate.wait()
        setattr(shared, f"mark_{index}", index)

    threads = [threading.Thread(target=change, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [getattr(shared, f"mark_{index}") for index in range(8)] == list(range(8))


@pytest.mark.torch
def test_transformers_takes_a_config_that_was_never_used(transformers):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3RotaryEmbedding, Gemma3TextModel

    layer = Gemma3DecoderLayer(unbuilt(), layer_idx=0)
    assert layer.self_attn.q_proj.weight.shape == (4 * 256, 640)
    assert layer.self_attn.k_proj.weight.shape == (256, 640)
    assert layer.self_attn.scaling == 256**-0.5
    assert layer.self_attn.sliding_window == 512
    assert Gemma3DecoderLayer(unbuilt(), layer_idx=5).self_attn.sliding_window is None

    rotary, states = Gemma3RotaryEmbedding(unbuilt()), torch.zeros(1, 3, 640)
    for layer_type, theta in (("full_attention", 1e6), ("sliding_attention", 1e4)):
        cos, _ = rotary(states, torch.arange(3)[None], layer_type)
        frequencies = theta ** -(np.arange(128) / 128)
        np.testing.assert_allclose(cos[0, 2, :128], np.cos(2 * frequencies), rtol=1e-5, atol=1e-6)

    cache = transformers.StaticCache(config=unbuilt(), max_cache_len=600)
    assert [cache.layers[index].max_cache_len for index in (0, 5)] == [512, 600]

    few = unbuilt(num_hidden_layers=2, vocab_size=32)
    model = Gemma3TextModel(few).eval()
    cache = transformers.StaticCache(config=few, max_cache_len=8)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        whole = model(input_ids=tokens, use_cache=False).last_hidden_state
        model(input_ids=tokens[:, :4], past_key_values=cache, use_cache=True)
        last = model(input_ids=tokens[:, 4:], past_key_values=cache, use_cache=True).last_hidden_state
    assert whole.shape == (1, 5, 640)
    torch.testing.assert_close(last[:, -1], whole[:, -1], rtol=1e-4, atol=1e-4)
