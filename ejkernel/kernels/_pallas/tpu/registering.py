"""Registering a kernel for TPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ejkernel.contracts.registry import kernel_registry
from ejkernel.contracts.support import Backend, HeadDims, Platform, Support, tpu
from ejkernel.kernels._pallas.tpu.requirements import refusal

OLDEST = 4  # generation
PRIORITY = 20

T = TypeVar("T")


def register(
    algorithm: str, *, features: Iterable[str], gradients: Iterable[str] = (), head_dims: HeadDims | None = None
) -> Callable[[T], T]:
    """Decorate an implementation. A TPU's matrix unit has no float16."""
    return kernel_registry.register(
        algorithm,
        Platform.PALLAS,
        Backend.TPU,
        priority=PRIORITY,
        support=Support(
            devices=tpu(OLDEST),
            dtypes={"bfloat16", "float32"},
            head_dims=head_dims or HeadDims(),
            features=frozenset(features),
            gradients=frozenset(gradients),
            check=refusal,
        ),
    )
