"""Flash attention for TPUs: the declaration. Nothing here imports Pallas before a call needs it."""

from __future__ import annotations

from typing import Any, ClassVar

from jax import Array

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.support import HeadDims
from ejkernel.kernels._pallas.tpu.flash_attention import backward_parameters, parameters
from ejkernel.kernels._pallas.tpu.registering import PRIORITY, register
from ejkernel.kernels.common.decoding import is_decoding

WIDEST = 256  # head dim
# Of a list of steps that data decides, in the scalar memory of a core.
MOST_LISTED = 1 << 15


class PallasFlashAttention:
    """The implementation for TPUs."""

    name = "flash-tpu"
    version = 1
    reads: ClassVar = {"forward": parameters.READS, "backward": backward_parameters.READS}

    @staticmethod
    def handicap(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> int:
        """Below XLA's for decoding, where keys would be read for each query head, and where scalar memory has no room for the steps."""
        decoding = direction == "forward" and is_decoding(shapes, spec)
        return PRIORITY + 1 if decoding or _most_steps(shapes) > MOST_LISTED else 0

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


def _most_steps(shapes: dict[str, Any]) -> int:
    """As many steps as the lists of a call may have, with blocks of 1024."""
    query, key = shapes["query"], shapes["key"]
    by_data = "q_segment_ids" in shapes or ("kv_start" in shapes and shapes["kv_start"].shape[0] > 1)
    batch = query.shape[0] if by_data else 1
    return batch * -(-query.shape[1] // 1024) * -(-key.shape[1] // 1024)


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
