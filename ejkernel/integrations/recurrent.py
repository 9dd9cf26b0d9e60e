"""Recurrent layers on top of each other, as other packages' modules hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array

from ejkernel.contracts.support import Backend, Platform
from ejkernel.ops.core.checks import Checker
from ejkernel.ops.recurrent import BIASES, MATRICES, recurrent

__all__ = ["recurrent_stack"]

_check = Checker("recurrent_stack")


def recurrent_stack(
    inputs: Array,
    hidden: Sequence[Any] | None = None,
    weights: Sequence[Mapping[str, Any]] = (),
    cell_type: str = "lstm",
    *,
    lengths: Array | np.ndarray | None = None,
    reverse: bool = False,
    activation: str | Callable[[Array], Array] = "tanh",
    platform: Platform | str | None = None,
    backend: Backend | str | None = None,
) -> tuple[Array, list[Any]]:
    """``recurrent``, layer after layer; each layer's outputs are the next one's inputs.

    Args:
        inputs: ``[B, S, I]``.
        hidden: the state to start from, one a layer, each as ``recurrent`` takes it; None is zeros.
        weights: a list of dicts, one a layer, as ``weights_from`` gives them. A layer with the names that end in ``_reverse``
            runs in both directions.
        cell_type, lengths, reverse, activation, platform, backend: as in ``recurrent``, for all layers.

    Returns:
        ``(outputs, final)``: the last layer's outputs, and the final state of each layer.

    Example:
        >>> import jax.numpy as jnp
        >>> layers = [{"weight_ih": jnp.ones((3, n)), "weight_hh": jnp.ones((3, 3))} for n in (5, 3)]
        >>> outputs, final = recurrent_stack(jnp.ones((2, 7, 5)), None, layers, "rnn")
        >>> outputs.shape, len(final)
        ((2, 7, 3), 2)
    """
    if not isinstance(weights, list | tuple) or not weights:
        _check.fail("weights", weights, "a list of dicts, one a layer")
    if hidden is not None and (not isinstance(hidden, list | tuple) or len(hidden) != len(weights)):
        _check.fail("hidden", hidden, f"a list of {len(weights)} states, one a layer, or None")
    final = []
    for index, layer in enumerate(weights):
        if not isinstance(layer, Mapping):
            _check.fail(f"weights[{index}]", layer, f"a dict with {', '.join(MATRICES)}")
        inputs, state = recurrent(
            inputs, None if hidden is None else hidden[index], layer, cell_type, lengths=lengths,
            bidirectional="weight_ih_reverse" in layer, reverse=reverse, activation=activation, platform=platform,
            backend=backend,
        )  # fmt: skip
        final.append(state)
    return inputs, final


def check_stack(check: Checker, weights: Any, directions: Sequence[int]) -> None:
    """Refuse weights that are not those of as many layers, each with one direction or two."""
    if not isinstance(weights, list | tuple) or len(weights) != len(directions):
        check.fail("weights", weights, f"a list of {len(directions)} dicts, one a layer")
    for index, (layer, count) in enumerate(zip(weights, directions, strict=True)):
        suffixes = ("", "_reverse")[:count]
        required = {name + suffix for name in MATRICES for suffix in suffixes}
        allowed = required | {name + suffix for name in BIASES for suffix in suffixes}
        given = {name for name, array in layer.items() if array is not None} if isinstance(layer, Mapping) else set()
        if not required <= given <= allowed:
            found = ", ".join(sorted(given)) or "none"
            expected = (
                f"{', '.join(sorted(required))} and, if wanted, {', '.join(sorted(allowed - required))}; it has {found}"
            )
            check.fail(f"weights[{index}]", layer, expected)
