"""Block-sparse attention for Hopper: the declaration. Nothing here imports Mosaic GPU before a call needs it."""

from __future__ import annotations

from typing import Any, ClassVar

from jax import Array

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels._pallas.gpu.blocksparse_attention_sm90.parameters import (
    backward_dims,
    backward_tile,
    defaults,
    effective,
    head_dims,
    space,
)
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.parameters import READS
from ejkernel.kernels._pallas.gpu.registering import BELOW_TRITON, register


class PallasBlockSparseAttention:
    """The implementation for Hopper."""

    name = "blocksparse-sm90"
    version = 1
    reads: ClassVar = {"forward": READS, "backward": READS}

    @staticmethod
    def handicap(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> int:
        """Below Triton's for gradients of head dims that have to be padded."""
        dims = head_dims(shapes)
        return BELOW_TRITON if direction == "backward" and backward_dims(*dims) != dims else 0

    @staticmethod
    def forward(arrays, spec, params, *, interpret: Any = False) -> tuple[Array, Array]:
        """Output and lse; see ``forward``. ``interpret``: in JAX's interpreter, without a GPU."""
        from ejkernel.kernels._pallas.gpu.blocksparse_attention_sm90.forward import forward

        return forward(arrays, spec, params, interpret=interpret)

    @staticmethod
    def backward(arrays, spec, params, out, lse, dout, dlse, wanted, *, interpret: Any = False) -> dict[str, Array]:
        """The wanted gradients; see ``gradients``."""
        from ejkernel.kernels._pallas.gpu.blocksparse_attention_sm90.gradients import backward

        return backward(arrays, spec, params, out, lse, dout, dlse, wanted, interpret=interpret)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Tiles where nothing was tuned."""
        return defaults(shapes, spec) if direction == "forward" else backward_tile(shapes)

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams] | list[BwdParams]:
        """Tiles worth timing."""
        return space(shapes, spec) if direction == "forward" else [backward_tile(shapes)]

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The tile that runs if these parameters are asked for."""
        return effective(shapes, spec, params) if direction == "forward" else backward_tile(shapes)


register(
    "blocksparse_attention",
    step=32,
    widest=128,
    features={"causal", "window", "soft_cap", "segments", "sinks", "gqa", "value_dim", "cross", "head_masks", "lse"},
    gradients={"query", "key", "value", "softmax_aux"},
)(PallasBlockSparseAttention)
