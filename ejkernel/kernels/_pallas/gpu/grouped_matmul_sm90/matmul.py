"""Grouped matmul for Hopper: the declaration. Nothing here imports Mosaic GPU before a call needs it."""

from __future__ import annotations

from typing import Any, ClassVar

from jax import Array

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.registry import kernel_registry
from ejkernel.contracts.support import HALF, Backend, Platform, Support, cuda
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.requirements import refusal
from ejkernel.kernels._pallas.gpu.grouped_matmul_sm90.parameters import (
    READS,
    defaults,
    effective,
    for_sums,
    space,
    tiles_of,
)
from ejkernel.kernels._pallas.gpu.registering import PRIORITY


class PallasGroupedMatmul:
    """The implementation for Hopper."""

    name = "grouped-matmul-sm90"
    version = 1
    reads: ClassVar = {"forward": READS, "backward": READS}

    @staticmethod
    def forward(arrays, spec, params, *, interpret: Any = False) -> tuple[Array, None]:
        """``out`` and nothing else: the gradients need the operands alone. ``interpret``: in JAX's interpreter."""
        from ejkernel.kernels._pallas.gpu.grouped_matmul_sm90.launch import rows_times_matrices

        a, b, bounds = (arrays[name] for name in ("a", "b", "bounds"))
        tiles = tiles_of(params)
        return rows_times_matrices(a, b, bounds, spec.transpose_b, spec.dtype, tiles, interpret=interpret), None

    @staticmethod
    def backward(
        arrays, spec, params, out, residual, dout, dresidual, wanted=frozenset({"a", "b"}), *, interpret: Any = False
    ) -> dict[str, Array]:
        """The gradients by name."""
        from ejkernel.kernels._pallas.gpu.grouped_matmul_sm90.launch import rows_times_matrices, sums_over_rows

        a, b, bounds = (arrays[name] for name in ("a", "b", "bounds"))
        tiles, grads = tiles_of(params), {}
        if "a" in wanted:
            grads["a"] = rows_times_matrices(dout, b, bounds, not spec.transpose_b, a.dtype, tiles, interpret=interpret)
        if "b" in wanted:
            left, right = (dout, a) if spec.transpose_b else (a, dout)
            grads["b"] = sums_over_rows(left, right, bounds, b.dtype, for_sums(tiles), interpret=interpret)
        return grads

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Tiles where nothing was tuned: of 64 rows where groups have fewer on average."""
        return defaults(shapes, direction)

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams] | list[BwdParams]:
        """Tiles worth timing."""
        return space(direction)

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The tile that runs if these parameters are asked for."""
        return effective(params)


kernel_registry.register(
    "grouped_matmul",
    Platform.PALLAS,
    Backend.GPU,
    priority=PRIORITY,
    support=Support(
        # The instructions that it is made of (wgmma) are Hopper's alone.
        devices=cuda(90, 90),
        dtypes=HALF,
        features={"ragged", "group_offset", "transpose_b"},
        gradients={"a", "b"},
        check=refusal,
    ),
)(PallasGroupedMatmul)
