"""Deep-learning kernels for JAX behind one API on every device.

Names are loaded when they are first used: importing the package touches no device and no optional dependency. Type checkers
read ``__init__.pyi``, which `make docs` writes.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Backend": "ejkernel.contracts.support",
    "BwdParams": "ejkernel.contracts.params",
    "EjkernelError": "ejkernel.errors",
    "FwdParams": "ejkernel.contracts.params",
    "InvalidInputError": "ejkernel.errors",
    "Platform": "ejkernel.contracts.support",
    "Support": "ejkernel.contracts.support",
    "UnsupportedError": "ejkernel.errors",
    "autotune": "ejkernel.ops.config.autotune",
    "blocksparse_attention": "ejkernel.ops.blocksparse_attention",
    "dot_product_attention": "ejkernel.ops.dot_product_attention",
    "explain": "ejkernel.ops.core.explain",
    "export_checks": "ejkernel.ops.core.export",
    "flash_attention": "ejkernel.ops.flash_attention",
    "grouped_matmul": "ejkernel.ops.grouped_matmul",
    "kernel_registry": "ejkernel.contracts.registry",
    "mean_pooling": "ejkernel.ops.mean_pooling",
    "merge_attention": "ejkernel.ops.merge_attention",
    "overlay": "ejkernel.ops.config.context",
    "page_attention": "ejkernel.ops.page_attention",
    "page_update": "ejkernel.ops.page_update",
    "recurrent": "ejkernel.ops.recurrent",
    "ring_attention": "ejkernel.ops.ring_attention",
    "ring_shard": "ejkernel.ops.ring_attention",
    "ring_unshard": "ejkernel.ops.ring_attention",
    "target": "ejkernel.ops.config.context",
}

_PACKAGES = ("callib", "errors", "integrations", "lab", "ops", "patterns", "utils", "xla_utils")

__all__ = sorted([*_HOMES, "patterns"])


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"ejkernel.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'ejkernel' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
