"""``explain``: what would run, and why."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any

import jax

from ejkernel.contracts import device as devices
from ejkernel.contracts.registry import kernel_registry
from ejkernel.errors import InvalidInputError
from ejkernel.ops.config.context import surroundings
from ejkernel.ops.core import partition, select
from ejkernel.ops.core.checks import device_of

# Functions of another signature on an operation's kernels, and their modules.
REWRITTEN = {"dot_product_attention": "ejkernel.ops.dot_product_attention"}


def explain(
    operation: Any, /, *args: Any, device: Any = None, gradients: bool | Iterable[str] = False, **kwargs: Any
) -> select.Explanation:
    """What a call would run, and why not something else.

    Args:
        operation: the function, its name, or what ``kernel_registry.get`` returned.
        *args: the call's arguments; arrays may be ``jax.ShapeDtypeStruct``s.
        device: a ``jax.Device``, a topology's device or a chip's name such as ``"nvidia-h200"``: what to decide for.
            Default: the one of ``ejkernel.target``, else the device of the arrays, else JAX's default.
        gradients: the names of the arguments whose gradients are wanted, or True for all that have one: decide the
            backward too, as ``.backward``.
        **kwargs: the call's keyword arguments.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from ejkernel import explain
        >>> x = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.float32)
        >>> explain("flash_attention", x, x, x, causal=True, device="cpu").chosen.platform
        <Platform.XLA: 'xla'>
    """
    if isinstance(operation, functools.partial):
        kwargs = {**operation.keywords, **kwargs}
    found, arguments = _bound(operation, args, kwargs)
    call, pins = found.bound(arguments)
    if device is None:
        device = surroundings().target or device_of(jax.tree.leaves((args, kwargs)))
    info = devices.describe(device)
    wanted = _wanted(found, arguments, gradients)
    explanation = select.decide_both(call, info, pins, wanted) if wanted else select.decide(call, info, pins)
    chosen = explanation.chosen
    if chosen is None or chosen.implementation.whole or not call.shapes:
        return explanation
    if not partition.applies(found, chosen, call.shapes, "forward"):
        return explanation
    return explanation.noting(partition.gathered(found, arguments, call))


def _bound(operation: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The operation and all of its arguments by name."""
    if isinstance(operation, str) and operation in REWRITTEN:
        operation = getattr(importlib.import_module(REWRITTEN[operation]), operation)
    if hasattr(operation, "explained"):
        return operation.explained(*args, **kwargs)
    name = operation if isinstance(operation, str) else getattr(operation, "__name__", "")
    found = kernel_registry.operation(name) if name in kernel_registry.list_algorithms() else None
    if found is None:
        known = sorted([*REWRITTEN, *(n for n in kernel_registry.list_algorithms() if kernel_registry.operation(n))])
        raise InvalidInputError(f"operation is {operation!r}; expected one of {', '.join(known)}, or its name.")
    bound = found.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return found, found.normalise(dict(bound.arguments))


def _wanted(operation: Any, arguments: dict[str, Any], gradients: bool | Iterable[str]) -> frozenset[str]:
    """The names of the gradients that are asked for, each of an argument that is there and can have one."""
    able = operation.differentiable(arguments)
    if isinstance(gradients, bool):
        return able if gradients else frozenset()
    names = {gradients} if isinstance(gradients, str) else set(gradients)
    if names - able:
        raise InvalidInputError(
            f"explain: gradients is {gradients!r}; expected True, False or names out of {', '.join(sorted(able))}, the "
            f"arguments of this call of {operation.name} that have gradients."
        )
    return frozenset(names)
