"""Block-sparse attention for TPUs: the declaration. Nothing here imports Pallas before a call needs it."""

from __future__ import annotations

from typing import Any, ClassVar

from jax import Array

from ejkernel.contracts.params import FwdParams
from ejkernel.contracts.support import HeadDims
from ejkernel.kernels._pallas.tpu.blocksparse_attention import parameters
from ejkernel.kernels._pallas.tpu.registering import register


class PallasBlockSparseAttention:
    """The implementation for TPUs: a forward, whose residuals any backward takes."""

    name = "blocksparse-tpu"
    version = 1
    residuals = True
    reads: ClassVar = {"forward": parameters.READS}

    @staticmethod
    def forward(arrays, spec, params, *, device: Any = None, interpret: Any = False) -> tuple[Array, Array]:
        """Output and lse; see ``forward``. ``interpret``: parameters of Pallas' interpreter, which needs no TPU."""
        from ejkernel.kernels._pallas.tpu.blocksparse_attention.forward import forward

        return forward(arrays, spec, params, device=device, interpret=interpret)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams:
        """Blocks where nothing was tuned."""
        return parameters.effective(shapes, spec, FwdParams(), device)

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams]:
        """Blocks worth timing."""
        return parameters.space(shapes, spec, device)

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams:
        """The blocks that run if these parameters are asked for."""
        return parameters.effective(shapes, spec, params, device)


register(
    "blocksparse_attention",
    head_dims=HeadDims(at_most=256),
    features={"causal", "window", "soft_cap", "segments", "sinks", "gqa", "value_dim", "cross", "head_masks", "lse"},
)(PallasBlockSparseAttention)
