"""Paged attention for Hopper: the declaration. Nothing here imports Mosaic GPU before a call needs it."""

from __future__ import annotations

from typing import Any, ClassVar

from jax import Array

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.parameters import READS
from ejkernel.kernels._pallas.gpu.page_attention_sm90.parameters import defaults, effective, space
from ejkernel.kernels._pallas.gpu.registering import BELOW_TRITON, register

# Rows (tokens with the query heads that share a key head) of a sequence, on the average, and blocks of all sequences, from
# which on this kernel is faster than Triton's on an H200, which cuts long contexts.
ENOUGH_ROWS, ENOUGH_BLOCKS = 32, 64


class PallasPageAttention:
    """The implementation for Hopper: forward alone, its residuals serve any other implementation's backward."""

    name = "page-sm90"
    version = 1
    residuals = True
    reads: ClassVar = {"forward": READS, "backward": ()}

    @staticmethod
    def handicap(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> int:
        """Below Triton's where sequences have few queries, or blocks do not fill the chip: nothing cuts a long context."""
        (_, tokens, heads, _), kv_heads = shapes["query"].shape, shapes["key_cache"].shape[2]
        sequences = max(1, shapes["context_lens"].shape[1])
        rows = tokens * (heads // kv_heads) // sequences
        blocks = sequences * -(-rows // defaults(shapes).q_blocksize) * kv_heads
        return BELOW_TRITON if rows < ENOUGH_ROWS or blocks < ENOUGH_BLOCKS else 0

    @staticmethod
    def forward(arrays, spec, params, *, interpret: Any = False) -> tuple[Array, Array]:
        """Output and lse; see ``forward``. ``interpret``: in JAX's interpreter, without a GPU."""
        from ejkernel.kernels._pallas.gpu.page_attention_sm90.forward import forward

        return forward(arrays, spec, params, interpret=interpret)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Tiles where nothing was tuned."""
        return defaults(shapes) if direction == "forward" else BwdParams()

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams]:
        """Tiles worth timing."""
        return space(shapes) if direction == "forward" else []

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The tile that runs if these parameters are asked for."""
        return effective(shapes, params) if direction == "forward" else BwdParams()


register(
    "page_attention",
    step=32,
    widest=128,
    features={"varlen", "window", "soft_cap", "sinks", "gqa", "value_dim", "lse"},
)(PallasPageAttention)
