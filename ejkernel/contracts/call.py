"""A bound call: what is asked, free of values; and what it must cost at least."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.contracts.params import BwdParams, FwdParams


@dataclass(frozen=True)
class Cost:
    """What a call must do at least: floating-point operations and bytes moved, forward and backward."""

    flops: int
    bytes: int
    backward_flops: int
    backward_bytes: int


@dataclass(frozen=True)
class Call:
    """A bound call: what is asked, free of values.

    Attributes:
        operation: its name.
        arguments: what the caller passed, by name, defaults left out; arrays may be abstract.
        spec: everything static that a kernel needs, frozen and hashable.
        dtype: of the main arrays.
        head_dims: for the head dims that an implementation may refuse.
        features: the features in use, each with the words that name it in a reason.
        bucket: what tells apart calls that deserve tuning apart: names with strings or ints. Shipped tables serve the
            nearest sizes, which are ``heads`` and what ends in ``_len``; all else must be equal.
        shapes: the prepared arrays (or trees of them), abstract.
        fwd_params, bwd_params: what the call itself asked for.
        runs_on: the algorithm whose kernels do the work, if not the operation's own.
    """

    operation: str
    arguments: dict[str, Any]
    spec: Any = None
    dtype: str = ""
    head_dims: tuple[int, ...] = ()
    features: dict[str, str] = field(default_factory=dict)
    bucket: tuple[tuple[str, str | int], ...] = ()
    shapes: dict[str, Any] = field(default_factory=dict)
    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None
    runs_on: str = ""

    @property
    def algorithm(self) -> str:
        """Whose kernels run the call."""
        return self.runs_on or self.operation

    def __str__(self) -> str:
        return f"{self.operation}({', '.join(_words(name, value) for name, value in self.arguments.items())})"


def _words(name: str, value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{name} {array_words(value)}"
    if isinstance(value, dict | tuple) and any(hasattr(x, "shape") for x in jax.tree.leaves(value)):
        inner = value if isinstance(value, dict) else {str(i): x for i, x in enumerate(value)}
        return f"{name} ({', '.join(_words(*item) for item in inner.items())})"
    return name if value is True else f"{name}={value!r}"


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "bool": "bool"}


def array_words(value: Any) -> str:
    """``bf16[2,8192,32,256]``."""
    name = jnp.dtype(value.dtype).name
    letters = name.rstrip("0123456789")
    return f"{_SHORT.get(letters, letters)}{name[len(letters) :]}[{','.join(map(str, value.shape))}]"
