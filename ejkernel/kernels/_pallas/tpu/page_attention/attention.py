"""Paged attention for TPUs: the declaration. Nothing here imports Pallas before a call needs it."""

from __future__ import annotations

from typing import Any, ClassVar

from jax import Array

from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels._pallas.tpu.page_attention.geometry import candidates, defaults, geometry
from ejkernel.kernels._pallas.tpu.registering import register

READ = ("blocksize_m", "kv_blocksize", "blocksize_heads", "num_stages")


class TpuPageAttention:
    """The implementation for TPUs: forward alone, its residuals serve any other implementation's backward."""

    name = "page-tpu"
    version = 1
    residuals = True
    reads: ClassVar = {"forward": READ, "backward": ()}

    @staticmethod
    def forward(
        arrays: dict[str, Array],
        spec: Any,
        params: FwdParams,
        *,
        device: DeviceInfo | None = None,
        interpret: Any = False,
    ) -> tuple[Array, Array]:
        """Output and lse; see ``forward``. ``interpret``: in Pallas' interpreter, without a TPU."""
        from ejkernel.kernels._pallas.tpu.page_attention.forward import forward

        return forward(arrays, spec, params, device=device, interpret=interpret)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Sizes where nothing was tuned."""
        return defaults(shapes, device) if direction == "forward" else BwdParams()

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams]:
        """Sizes worth timing."""
        return candidates(shapes, device) if direction == "forward" else []

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The sizes that the kernel will use."""
        return geometry(shapes, params, device).params if direction == "forward" else BwdParams()


register(
    "page_attention",
    features={
        *("varlen", "window", "traced_window", "soft_cap", "sinks", "int8_cache", "fp8_cache", "scales", "gqa"),
        *("value_dim", "lse"),
    },
)(TpuPageAttention)
