"""Packages that only parts of the lab need."""

from __future__ import annotations

import importlib
from types import ModuleType

from ejkernel.errors import MissingPackageError, how_to_install

_EXTRA_OF = {
    "torch": "torch",
    "transformers": "torch",
    "triton": "gpu",
    "jax_triton": "gpu",
    "optax": "examples",
}  # all others are in the extra "lab"


def need(module: str, what: str) -> ModuleType:
    """Import a module, or say in one line which extra brings it.

    Example:
        >>> need("json", "this example").__name__
        'json'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = (error.name or module).partition(".")[0]
        extra = _EXTRA_OF.get(module.partition(".")[0], "lab")
        raise MissingPackageError(f"{what} needs {package}: {how_to_install(extra)}", name=package) from error
