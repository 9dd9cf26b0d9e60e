"""Sizes of the backward's blocks: as the forward's, in whole blocks of the mask."""

from __future__ import annotations

from typing import Any

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels._pallas.tpu.blocksparse_attention import parameters
from ejkernel.kernels._pallas.tpu.flash_attention.backward_parameters import READS

__all__ = ["READS", "effective", "space"]


def effective(shapes: dict[str, Any], spec: Any, params: BwdParams, device: Any) -> BwdParams:
    """What was asked for, as the forward takes it."""
    found = parameters.effective(shapes, spec, FwdParams(**{name: getattr(params, name) for name in READS}), device)
    return BwdParams(**{name: getattr(found, name) for name in READS})


def space(shapes: dict[str, Any], spec: Any, device: Any) -> list[BwdParams]:
    """Blocks worth timing."""
    found = parameters.space(shapes, spec, device)
    return list(dict.fromkeys(BwdParams(**{name: getattr(params, name) for name in READS}) for params in found))
