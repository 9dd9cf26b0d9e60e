"""PyTorch: the weights of its recurrent layers for ``recurrent``, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.errors import MissingPackageError, how_to_install
from ejkernel.integrations.recurrent import check_stack, recurrent_stack
from ejkernel.ops.core.checks import Checker
from ejkernel.ops.recurrent import BIASES, MATRICES

try:
    import torch
except ImportError as _error:
    raise MissingPackageError(
        f"ejkernel.integrations.torch needs torch: {how_to_install('torch')}", name="torch"
    ) from _error

__all__ = ["recurrent_stack", "weights_from", "weights_to"]

_check = Checker("weights_from")
_check_given = Checker("weights_to")


def weights_from(module: torch.nn.RNNBase) -> list[dict[str, Array]]:
    """The weights of a ``torch.nn.LSTM``, ``GRU`` or ``RNN`` in the form of ``recurrent``, a dict for each layer.

    They are copies. What else the module was made with is for the call to say: ``activation`` for an RNN's ``nonlinearity``,
    and ``batch_first``, since inputs here are always ``[B, S, I]``. Dropout between layers is training's affair, and not done.

    Example:
        >>> import torch
        >>> from ejkernel.integrations.torch import recurrent_stack, weights_from
        >>> module = torch.nn.LSTM(5, 8, num_layers=2, bidirectional=True, batch_first=True)
        >>> outputs, final = recurrent_stack(jnp.ones((2, 7, 5)), None, weights_from(module), "lstm")
        >>> outputs.shape
        (2, 7, 16)
    """
    return [
        {name: _array(label, tensor) for name, (label, tensor) in layer.items()} for layer in _layers(module, _check)
    ]


def weights_to(module: torch.nn.RNNBase, weights: Sequence[Mapping[str, Any]]) -> None:
    """Put weights in the form of ``recurrent`` into a module of ``torch.nn``, what ``weights_from`` undoes.

    A bias that the weights do not have becomes 0; one that the module does not have raises.

    Args:
        module: its parameters are overwritten, on the device where they are.
        weights: a dict for each layer.
    """
    layers = _layers(module, _check_given)
    check_stack(_check_given, weights, [2 if module.bidirectional else 1] * len(layers))
    new = []
    for index, (layer, given) in enumerate(zip(layers, weights, strict=True)):
        for name in given:
            if given[name] is not None and name not in layer:
                _check_given.fail(
                    "weights", weights, f"no {name!r} in layer {index}: the module was made with bias=False"
                )
        for name, (_, tensor) in layer.items():
            array = given.get(name)
            new.append((tensor, None if array is None else _tensor(f"weights[{index}][{name!r}]", array, tensor)))
    # Only now, so that an error leaves the module as it was.
    with torch.no_grad():
        for tensor, values in new:
            tensor.zero_() if values is None else tensor.copy_(values)


def _layers(module: Any, check: Checker) -> list[dict[str, tuple[str, torch.Tensor]]]:
    """The module's parameters, and their names there, by layer and by their names here."""
    if not isinstance(module, torch.nn.LSTM | torch.nn.GRU | torch.nn.RNN):
        check.fail("module", type(module), "a torch.nn.LSTM, GRU or RNN")
    if module.proj_size:
        check.fail("module.proj_size", module.proj_size, "0: recurrent has no projections")
    suffixes = ("", "_reverse") if module.bidirectional else ("",)
    names = (*MATRICES, *BIASES) if module.bias else MATRICES
    return [
        {
            name + suffix: (f"{name}_l{index}{suffix}", getattr(module, f"{name}_l{index}{suffix}"))
            for suffix in suffixes
            for name in names
        }
        for index in range(module.num_layers)
    ]


def _array(name: str, tensor: torch.Tensor) -> Array:
    if tensor.is_meta:
        _check.fail(f"module.{name}", tensor.device, "a device that holds values")
    values = tensor.detach().cpu()
    if values.dtype == torch.bfloat16:  # numpy does not know it; float32 holds each of its values
        return jnp.asarray(values.float().numpy(), jnp.bfloat16)
    values = values.numpy()
    array = jnp.asarray(values.copy())
    if array.dtype != values.dtype:
        _check.fail(f"module.{name}", values, f"{array.dtype}: module.float(), or jax_enable_x64")
    return array


def _tensor(name: str, array: Any, like: torch.Tensor) -> torch.Tensor:
    dtype = str(like.dtype).removeprefix("torch.")
    if jnp.shape(array) != tuple(like.shape) or jnp.result_type(array).name != dtype:
        _check_given.fail(name, array, f"the module's {dtype}{list(like.shape)}")
    if isinstance(array, jax.core.Tracer):
        _check_given.fail(name, array, "values: it is traced, so call weights_to outside of jit and grad")
    values = np.asarray(array)
    return torch.tensor(values.astype(np.float32) if dtype == "bfloat16" else values)
