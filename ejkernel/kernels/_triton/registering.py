"""Registering a Triton kernel: for GPUs, or for Triton's interpreter where that is what runs in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.registry import kernel_registry
from ejkernel.contracts.support import FLOATS, Backend, HeadDims, Platform, Support, any_device, cuda, gpu, multiple_of
from ejkernel.kernels._triton import probe
from ejkernel.kernels._triton.call import interpreting

LARGEST_HEAD_DIM = 256
OLDEST = 80
# Above XLA's 0.
PRIORITY = 10

T = TypeVar("T")


def refusal(device: DeviceInfo) -> str | None:
    """Triton compiles for compute capability 8.0 and later (AMD's chips have none), if it is one that we know."""
    if device.vendor == "nvidia" and 0 < device.capability < OLDEST:
        return cuda(OLDEST).refusal(device)
    return probe.refusal(device, interpreting())


def register(
    algorithm: str,
    *,
    features: Iterable[str],
    gradients: Iterable[str] = (),
    head_dims: HeadDims | None = None,
    priority: int = PRIORITY,
) -> Callable[[T], T]:
    """Decorate an implementation; without ``head_dims`` it takes those of attention, up to ``LARGEST_HEAD_DIM``.

    The interpreter is for proving kernels: nothing but a pin makes it run.
    """
    interpreted = interpreting()
    return kernel_registry.register(
        algorithm,
        Platform.TRITON,
        Backend.CPU if interpreted else Backend.GPU,
        support=Support(
            devices=any_device() if interpreted else gpu(),
            dtypes={"float16", "float32"} if interpreted else FLOATS,
            head_dims=head_dims or multiple_of(1, at_most=LARGEST_HEAD_DIM),
            features=frozenset(features),
            gradients=frozenset(gradients),
            check=refusal,
            requires=(("triton", "gpu"),) if interpreted else (("triton", "gpu"), ("jax_triton", "gpu")),
        ),
        priority=-1 if interpreted else priority,
    )
