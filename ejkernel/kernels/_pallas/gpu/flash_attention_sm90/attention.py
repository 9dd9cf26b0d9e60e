"""Flash attention for Hopper: the declaration. Nothing here imports Mosaic GPU before a call needs it."""

from __future__ import annotations

from typing import Any, ClassVar

from jax import Array

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.parameters import (
    READS,
    backward_effective,
    forward_defaults,
    forward_effective,
    forward_space,
)
from ejkernel.kernels._pallas.gpu.registering import BELOW_TRITON, register
from ejkernel.kernels.common.decoding import is_decoding


class PallasFlashAttention:
    """The implementation for Hopper."""

    name = "flash-sm90"
    version = 6
    reads: ClassVar = {"forward": READS, "backward": READS}

    @staticmethod
    def handicap(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> int:
        """Below Triton's for decoding: tiles of 128 queries read keys once for each query head, and nothing cuts them."""
        return BELOW_TRITON if direction == "forward" and is_decoding(shapes, spec) else 0

    @staticmethod
    def forward(arrays, spec, params, *, interpret: Any = False) -> tuple[Array, Array]:
        """Output and lse; see ``forward``. ``interpret``: in JAX's interpreter, without a GPU."""
        from ejkernel.kernels._pallas.gpu.flash_attention_sm90.forward import forward

        return forward(arrays, spec, params, interpret=interpret)

    @staticmethod
    def backward(arrays, spec, params, out, lse, dout, dlse, wanted, *, interpret: Any = False) -> dict[str, Array]:
        """The wanted gradients; see ``gradients``."""
        from ejkernel.kernels._pallas.gpu.flash_attention_sm90.gradients import backward

        return backward(arrays, spec, params, out, lse, dout, dlse, wanted, interpret=interpret)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Tiles where nothing was tuned."""
        dims = _head_dims(shapes)
        if direction == "backward":
            return backward_effective(*dims)
        return forward_defaults(*dims, of_pairs=_of_pairs(shapes))

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams] | list[BwdParams]:
        """Tiles worth timing."""
        dims = _head_dims(shapes)
        if direction == "backward":
            return [backward_effective(*dims)]
        return forward_space(*dims, of_pairs=_of_pairs(shapes))

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The tile that runs if these parameters are asked for."""
        dims = _head_dims(shapes)
        return backward_effective(*dims) if direction == "backward" else forward_effective(params, *dims)


def _head_dims(shapes: dict[str, Any]) -> tuple[int, int]:
    return shapes["query"].shape[3], shapes["value"].shape[3]


def _of_pairs(shapes: dict[str, Any]) -> bool:
    """Whether every pair has a bias, or a chance, of its own."""
    return "dropout_key" in shapes or ("bias" in shapes and min(shapes["bias"].shape[2:]) > 1)


register(
    "flash_attention",
    step=8,
    widest=256,
    features={
        *("causal", "window", "soft_cap", "bias", "mask", "segments", "varlen", "sinks", "dropout"),
        *("gqa", "value_dim", "cross", "lse"),
    },
    gradients={"query", "key", "value", "bias", "softmax_aux"},
)(PallasFlashAttention)
