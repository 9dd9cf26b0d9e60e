"""GPUs as their data sheets describe them, and the model configurations that the lab studies.

Example:
    >>> gpu_spec = GPU_SPECS["A100"]
    >>> gpu_spec["fp32_tflops"], gpu_spec["memory_bandwidth_tb_s"], gpu_spec["num_sms"]
    (19.5, 2.0, 108)
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from ejkernel.callib.chips import CHIPS, GIB, TERA
from ejkernel.errors import InvalidInputError
from ejkernel.lab.extras import need

if TYPE_CHECKING:
    from transformers import Gemma3TextConfig

__all__ = ["GEMMA3_270M_CONFIG", "GEMMA3_PESUDO_CONFIG", "GEMMA3_PSEUDO_CONFIG", "GPU_SPECS", "get_ridge_point"]

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def _specification(slug: str, sram_kb: int) -> dict[str, float | int]:
    chip = CHIPS[slug]
    return {
        **{f"{short}_tflops": chip.flops(dtype) / TERA for short, dtype in _DTYPES.items()},
        "memory_bandwidth_tb_s": chip.memory_bandwidth / TERA,
        "memory_gb": chip.memory_bytes // GIB,
        "sram_kb": sram_kb,
        "num_sms": chip.sm_count,
    }


GPU_SPECS: dict[str, dict[str, float | int]] = {
    "A6000": _specification("nvidia-rtx-a6000", sram_kb=128),
    "A10": _specification("nvidia-a10", sram_kb=128),
    # Roofs are drawn with the round number; the data sheets say 1.935 (PCIe) and 2.039 (SXM).
    "A100": _specification("nvidia-a100", sram_kb=192) | {"memory_bandwidth_tb_s": 2.0},
    "H100": _specification("nvidia-h100", sram_kb=256),
    "H200": _specification("nvidia-h200", sram_kb=256),
    "4090": _specification("nvidia-rtx-4090", sram_kb=128),
}
"""What the data sheets say of each GPU: dense peaks in TFLOPS (`fp32_tflops` outside tensor cores), memory bandwidth in
TB/s, memory in GB, and the SRAM (L1 and shared memory) of one of its `num_sms` streaming multiprocessors in KB."""


def get_ridge_point(gpu_name: str, dtype: str = "fp16") -> float:
    """The arithmetic intensity, in FLOPs a byte, from which a GPU computes for longer than it loads.

    Args:
        gpu_name: a key of `GPU_SPECS`.
        dtype: `fp16`, `bf16` or `fp32`, their long names, or a numpy, JAX or torch dtype.

    Example:
        >>> get_ridge_point("A100"), get_ridge_point("A100", "fp32")
        (156.0, 9.75)
    """
    if not isinstance(gpu_name, str) or gpu_name not in GPU_SPECS:
        raise InvalidInputError(f"gpu_name is {gpu_name!r}; pass one of {', '.join(GPU_SPECS)}")
    specification = GPU_SPECS[gpu_name]
    return specification[f"{_short_dtype(dtype)}_tflops"] / specification["memory_bandwidth_tb_s"]


def _short_dtype(dtype: Any) -> str:
    if isinstance(dtype, str) and dtype in _DTYPES:
        return dtype
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype).removeprefix("torch.")
    for short, long in _DTYPES.items():
        if name == long:
            return short
    known = ", ".join(f"{short} ({long})" for short, long in _DTYPES.items())
    raise InvalidInputError(f"dtype is {dtype!r}; pass one of {known}")


_building = threading.RLock()


class _Unbuilt:
    """A `Gemma3TextConfig` that has not been used yet.

    The first use imports transformers and turns this very object into the real thing, class and all, so that every
    reference to it has the config from then on.
    """

    def __init__(self, **settings: Any) -> None:
        object.__getattribute__(self, "__dict__").update(settings)

    def __getattribute__(self, name: str) -> Any:
        # What Python and its tools ask of any object does not load transformers; nor can anybody ask whether this is
        # a Gemma3TextConfig without having loaded it.
        if name.startswith("__") and name != "__dict__" and sys.modules.get("transformers") is None:
            return object.__getattribute__(self, name)
        if name == "__class__":  # `isinstance` takes the answer only while it differs from the type
            return _real_class()
        return getattr(_build(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_build(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_build(self), name)

    def __eq__(self, other: object) -> bool:
        return _build(self) == other

    __hash__ = None

    def __iter__(self) -> Any:
        return iter(_build(self))

    def __repr__(self) -> str:
        return repr(_build(self))

    def __dir__(self) -> list[str]:
        return dir(_build(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _build(self).__reduce_ex__(protocol)


def _real_class() -> type[Gemma3TextConfig]:
    return need("transformers", "a Gemma3TextConfig").Gemma3TextConfig


def _build(config: Any) -> Gemma3TextConfig:
    with _building:
        if type(config) is _Unbuilt:
            settings = object.__getattribute__(config, "__dict__")
            built = _real_class()(**settings)
            object.__setattr__(config, "__dict__", built.__dict__)
            object.__setattr__(config, "__class__", type(built))
        return config


_GEMMA3 = {
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    # transformers 5 turns these two into `rope_parameters`, which 4 does not know.
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}

GEMMA3_270M_CONFIG: Gemma3TextConfig = _Unbuilt(
    **_GEMMA3,
    hidden_size=640,
    intermediate_size=2048,
    num_attention_heads=4,
    num_key_value_heads=1,
    num_hidden_layers=18,
)
"""Gemma-3-270m-it."""

GEMMA3_PSEUDO_CONFIG: Gemma3TextConfig = _Unbuilt(
    **_GEMMA3,
    hidden_size=1152,
    intermediate_size=6912,
    num_attention_heads=8,
    num_key_value_heads=8,
    num_hidden_layers=26,
)
"""A larger model of the same kind, with as many key and value heads as query heads."""

GEMMA3_PESUDO_CONFIG = GEMMA3_PSEUDO_CONFIG
