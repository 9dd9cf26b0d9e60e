"""Flash attention for TPUs: the declaration. Nothing here imports Pallas before a call needs it."""

from __future__ import annotations

from typing import Any, ClassVar

from jax import Array

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.support import HeadDims
from ejkernel.kernels._pallas.tpu.flash_attention import backward_parameters, parameters
from ejkernel.kernels._pallas.tpu.registering import register

WIDEST = 256  # head dim


class PallasFlashAttention:
    """The implementation for TPUs."""

    name = "flash-tpu"
    version = 1
    reads: ClassVar = {"forward": parameters.READS, "backward": backward_parameters.READS}

    @staticmethod
    def forward(arrays, spec, params, *, device: Any = None, interpret: Any = False) -> tuple[Array, Array]:
        """Output and lse; see ``forward``. ``interpret``: parameters of Pallas' interpreter, which needs no TPU."""
        from ejkernel.kernels._pallas.tpu.flash_attention.forward import forward

        return forward(arrays, spec, params, device=device, interpret=interpret)

    @staticmethod
    def backward(
        arrays, spec, params, out, lse, dout, dlse, wanted, *, device: Any = None, interpret: Any = False
    ) -> dict[str, Array]:
        """The wanted gradients; see ``gradients``."""
        from ejkernel.kernels._pallas.tpu.flash_attention.gradients import backward

        return backward(arrays, spec, params, out, lse, dout, dlse, wanted, device=device, interpret=interpret)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Blocks where nothing was tuned."""
        return _of(direction).defaults(shapes, spec, device)

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams] | list[BwdParams]:
        """Blocks worth timing."""
        return _of(direction).space(shapes, spec, device)

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The blocks that run if these parameters are asked for."""
        return _of(direction).effective(shapes, spec, params, device)


def _of(direction: str) -> Any:
    """The module of a direction's parameters."""
    return backward_parameters if direction == "backward" else parameters


register(
    "flash_attention",
    head_dims=HeadDims(at_most=WIDEST),
    features={
        *("causal", "window", "soft_cap", "bias", "mask", "segments", "varlen", "sinks", "dropout"),
        *("gqa", "value_dim", "cross", "lse"),
    },
    gradients={"query", "key", "value", "bias", "softmax_aux"},
)(PallasFlashAttention)
