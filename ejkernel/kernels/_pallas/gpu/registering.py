"""Registering a kernel for Hopper."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ejkernel.contracts.registry import kernel_registry
from ejkernel.contracts.support import HALF, Backend, Platform, Support, cuda, multiple_of
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.requirements import refusal

PRIORITY = 20
# Taken off it where Triton's kernels are faster, which leaves those for Hopper before cuDNN's.
BELOW_TRITON = 11

T = TypeVar("T")


def register(
    algorithm: str, *, step: int, widest: int, features: Iterable[str], gradients: Iterable[str] = ()
) -> Callable[[T], T]:
    """Decorate an implementation; ``step``, ``widest``: its head dims are multiples of one, up to the other."""
    return kernel_registry.register(
        algorithm,
        Platform.PALLAS,
        Backend.GPU,
        priority=PRIORITY,
        support=Support(
            # The instructions that it is made of (wgmma) are Hopper's alone.
            devices=cuda(90, 90),
            dtypes=HALF,
            head_dims=multiple_of(step, at_most=widest),
            features=frozenset(features),
            gradients=frozenset(gradients),
            check=refusal,
        ),
    )
