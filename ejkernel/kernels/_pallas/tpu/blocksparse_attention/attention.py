"""Block-sparse attention for TPUs: the declaration. Nothing here imports Pallas before a call needs it."""

from __future__ import annotations

from typing import Any, ClassVar

from jax import Array

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.support import HeadDims
from ejkernel.kernels._pallas.tpu.blocksparse_attention import backward_parameters, parameters
from ejkernel.kernels._pallas.tpu.registering import register


class PallasBlockSparseAttention:
    """The implementation for TPUs."""

    name = "blocksparse-tpu"
    version = 1
    reads: ClassVar = {"forward": parameters.READS, "backward": backward_parameters.READS}

    @staticmethod
    def forward(arrays, spec, params, *, device: Any = None, interpret: Any = False) -> tuple[Array, Array]:
        """Output and lse; see ``forward``. ``interpret``: parameters of Pallas' interpreter, which needs no TPU."""
        from ejkernel.kernels._pallas.tpu.blocksparse_attention.forward import forward

        return forward(arrays, spec, params, device=device, interpret=interpret)

    @staticmethod
    def backward(
        arrays, spec, params, out, lse, dout, dlse, wanted, *, device: Any = None, interpret: Any = False
    ) -> dict[str, Array]:
        """The wanted gradients; see ``gradients``."""
        from ejkernel.kernels._pallas.tpu.blocksparse_attention.gradients import backward

        return backward(arrays, spec, params, out, lse, dout, dlse, wanted, device=device, interpret=interpret)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Blocks where nothing was tuned."""
        if direction == "backward":
            return backward_parameters.effective(shapes, spec, BwdParams(), device)
        return parameters.effective(shapes, spec, FwdParams(), device)

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams] | list[BwdParams]:
        """Blocks worth timing."""
        return (backward_parameters if direction == "backward" else parameters).space(shapes, spec, device)

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The blocks that run if these parameters are asked for."""
        of = backward_parameters if direction == "backward" else parameters
        return of.effective(shapes, spec, params, device)


register(
    "blocksparse_attention",
    head_dims=HeadDims(at_most=256),
    features={
        *("causal", "window", "traced_window", "soft_cap", "segments", "sinks", "gqa", "value_dim", "cross"),
        *("head_masks", "uneven_blocks", "lse"),
    },
    gradients={"query", "key", "value", "softmax_aux"},
)(PallasBlockSparseAttention)
