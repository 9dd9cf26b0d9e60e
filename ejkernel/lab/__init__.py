"""The lab: measure kernels, draw them, study models with them.

Every name is loaded when it is first used, so that importing the lab is cheap: matplotlib, pandas, torch and
transformers are needed only by what uses them, and what is missing is named with the extra to install.

Example:
    >>> from ejkernel.lab import GPU_SPECS, get_ridge_point
    >>> round(get_ridge_point("H200", "bf16"))
    206
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "config": ("GEMMA3_270M_CONFIG", "GEMMA3_PESUDO_CONFIG", "GEMMA3_PSEUDO_CONFIG", "GPU_SPECS", "get_ridge_point"),
    "benchmark": ("benchmark_latency", "benchmark_memory", "count_cuda_kernels", "default_schedule", "warmup"),
    "timing": ("Measurement", "measure"),
    "ceilings": ("Ceilings", "measure_ceilings"),
    "visualization": (
        "plot_flash_attn_improvement",
        "plot_gemm_gemv_latency",
        "plot_gemm_gemv_latency_split",
        "plot_gemm_torch_matmul_latency",
        "plot_roofline",
        "set_style",
    ),
    "model": (
        "create_decode_inputs_with_cache",
        "create_decode_inputs_without_cache",
        "create_prefill_inputs",
        "decode_forward",
        "get_position_embeddings",
        "initialize_kv_cache",
        "multi_layer_decode_forward",
        "multi_layer_prefill_forward",
        "prefill_forward",
    ),
    "study": ("gemm_tiled", "gemv", "standard_attention"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
