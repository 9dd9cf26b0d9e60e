"""Block-sparse attention for Hopper: the declaration. Nothing here imports Mosaic GPU before a call needs it."""

from __future__ import annotations

from typing import Any, ClassVar

from jax import Array

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels._pallas.gpu.blocksparse_attention_sm90.parameters import defaults, effective, space
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.parameters import READS
from ejkernel.kernels._pallas.gpu.registering import register


class PallasBlockSparseAttention:
    """The implementation for Hopper: forward alone, its residuals serve any other implementation's backward."""

    name = "blocksparse-sm90"
    version = 1
    residuals = True
    reads: ClassVar = {"forward": READS, "backward": ()}

    @staticmethod
    def forward(arrays, spec, params, *, interpret: Any = False) -> tuple[Array, Array]:
        """Output and lse; see ``forward``. ``interpret``: in JAX's interpreter, without a GPU."""
        from ejkernel.kernels._pallas.gpu.blocksparse_attention_sm90.forward import forward

        return forward(arrays, spec, params, interpret=interpret)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Tiles where nothing was tuned."""
        return defaults(shapes, spec) if direction == "forward" else BwdParams()

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams]:
        """Tiles worth timing."""
        return space(shapes, spec) if direction == "forward" else []

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The tile that runs if these parameters are asked for."""
        return effective(shapes, spec, params) if direction == "forward" else BwdParams()


register(
    "blocksparse_attention",
    widest=128,
    features={"causal", "window", "soft_cap", "segments", "sinks", "gqa", "value_dim", "cross", "head_masks", "lse"},
)(PallasBlockSparseAttention)
