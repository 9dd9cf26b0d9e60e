"""What a kernel is: the methods that operations, selection and the tuner call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import BwdParams, FwdParams


class Kernel(Protocol):
    """An implementation under the residual contract; only ``forward`` is required.

    ``arrays`` are the operation's prepared arrays, each with a batch axis in front; its class lists them. ``spec`` is the
    operation's frozen value of everything static. ``shapes`` are the same arrays, abstract.

    Attributes:
        name: stable, and unique among the implementations of a platform and backend: measurements are kept under it.
        version: raised when measurements of older versions no longer hold.
        reads: by direction, the parameters that the kernel reads. One that no implementation of an operation reads is
            refused when a caller sets it. Left out, the kernel may read any.
        residuals: True for a kernel without a ``backward`` whose forward's pair is one that other implementations' backwards
            take. Without it a forward that has no backward is differentiated by JAX, or makes way for one that can be.
    """

    name: str
    version: int
    reads: Mapping[str, tuple[str, ...]]

    def forward(self, arrays: dict[str, Any], spec: Any, params: FwdParams) -> tuple[Any, Any]:
        """The output and what the backward needs beside it: for attention ``(out, lse)``.

        A keyword parameter ``device`` is given the ``DeviceInfo`` that the call was decided for.
        """
        ...

    def backward(
        self, arrays: dict[str, Any], spec: Any, params: BwdParams, out: Any, lse: Any, dout: Any, dlse: Any
    ) -> dict[str, Any]:
        """Gradients by name, from any implementation's forward. Without this method JAX differentiates ``forward``.

        A keyword parameter ``wanted`` is given the names of the gradients that are wanted; ``device`` as above.
        """
        ...

    def defaults(self, shapes: dict[str, Any], spec: Any, device: DeviceInfo, direction: str) -> FwdParams | BwdParams:
        """Parameters where nothing was measured or asked for."""
        ...

    def space(
        self, shapes: dict[str, Any], spec: Any, device: DeviceInfo, direction: str
    ) -> list[FwdParams] | list[BwdParams]:
        """The parameters worth timing."""
        ...

    def effective(
        self, shapes: dict[str, Any], spec: Any, params: Any, device: DeviceInfo, direction: str
    ) -> FwdParams | BwdParams:
        """The parameters that the kernel will use if it is given these: clipped, and no others than it reads. Idempotent."""
        ...

    def handicap(self, shapes: dict[str, Any], spec: Any, device: DeviceInfo, direction: str) -> int:
        """What to take off the kernel's priority for a call that a kernel of lower priority is known to serve better."""
        ...
