"""Tensors among the arguments of the model helpers, and how an error tells what an argument is."""

from __future__ import annotations

from typing import Any

from ejkernel.errors import InvalidInputError


def need_tensor(torch: Any, name: str, value: Any, shape: str) -> None:
    """Refuse what is no tensor of torch; `shape` is what to expect, in words."""
    if not isinstance(value, torch.Tensor):
        advice = f": pass torch.as_tensor({name})" if hasattr(value, "__array__") else ""
        raise InvalidInputError(f"{name} is {short(value)}; expected a torch tensor {shape}{advice}.")


def short(value: Any) -> str:
    """A value in an error: what is simple as it is written, as far as 80 characters go, else its type.

    Example:
        >>> short([1, 2]), short({})
        ('[1, 2]', 'of type dict')
    """
    text = repr(value) if isinstance(value, (list, str, int, float, type(None))) else f"of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
