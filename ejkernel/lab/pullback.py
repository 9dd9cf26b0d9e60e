"""The backward of a function by itself, for timing: of JAX or of torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import InvalidInputError
from ejkernel.utils.bursts import leaves

__all__ = ["Pullback", "pullback"]


class Pullback(NamedTuple):
    """`prepare` runs the forward and gives the pullback and its operands; `check` refuses a result without floats."""

    prepare: Callable[[], tuple[Callable[..., Any], tuple]]
    check: Callable[[Any], None]


def pullback(fn: Callable[..., Any], args: tuple, kwargs: dict) -> Pullback:
    """The pullback of `fn` at its arguments, which are checked at once.

    Raises:
        InvalidInputError: if no argument has a floating-point dtype.
    """
    torch = sys.modules.get("torch")
    if torch and (isinstance(fn, torch.nn.Module) or any(isinstance(x, torch.Tensor) for x in leaves((args, kwargs)))):
        return _torch_pullback(torch, fn, args, kwargs)
    values, structure = jax.tree.flatten((args, kwargs))
    chosen = [index for index, value in enumerate(values) if _is_float_array(value)]
    if not chosen:
        raise _nothing_to_differentiate("argument", "pass a floating-point array")
    no_result = _nothing_to_differentiate("result", "time it with vjp=False")

    def floats(inputs: list[jax.Array]) -> list[jax.Array]:
        merged = list(values)
        for index, value in zip(chosen, inputs, strict=True):
            merged[index] = value
        new_args, new_kwargs = jax.tree.unflatten(structure, merged)
        return [leaf for leaf in jax.tree.leaves(fn(*new_args, **new_kwargs)) if _is_float_array(leaf)]

    def prepare() -> tuple[Callable[..., Any], tuple]:
        outputs, pull = jax.vjp(floats, [values[index] for index in chosen])
        if not outputs:
            raise no_result
        return jax.jit(lambda pull, cotangents: pull(cotangents)), (pull, [jnp.ones_like(x) for x in outputs])

    def check(out: Any) -> None:
        dtypes = (getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(out))
        if not any(isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
            raise no_result

    return Pullback(prepare, check)


def _torch_pullback(torch: Any, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Pullback:
    inputs: list[Any] = []

    def differentiable(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        inputs.append(leaf.detach().requires_grad_())
        return inputs[-1]

    new_args, new_kwargs = jax.tree.map(differentiable, (args, kwargs))
    if isinstance(fn, torch.nn.Module):
        inputs += [parameter for parameter in fn.parameters() if parameter.requires_grad]
    if not inputs:
        raise _nothing_to_differentiate("argument", "pass a floating-point tensor")

    def prepare() -> tuple[Callable[..., Any], tuple]:
        with torch.enable_grad():
            found = leaves(fn(*new_args, **new_kwargs))
        outputs = [leaf for leaf in found if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not outputs:
            raise _nothing_to_differentiate("result", "time it with vjp=False")
        cotangents = [torch.ones_like(output) for output in outputs]
        pull = functools.partial(torch.autograd.grad, retain_graph=True, allow_unused=True)
        return pull, (outputs, inputs, cotangents)

    def check(out: Any) -> None:
        prepare()  # a tensor made without gradients does not show whether it could be differentiated

    return Pullback(prepare, check)


def _is_float_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray) and jnp.issubdtype(value.dtype, jnp.inexact)


def _nothing_to_differentiate(what: str, advice: str) -> InvalidInputError:
    return InvalidInputError(f"vjp is True, but fn has no floating-point {what} to differentiate: {advice}.")
