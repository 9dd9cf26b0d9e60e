"""Sizes of the kernel's blocks, which hold several blocks of the mask."""

from __future__ import annotations

import math
from typing import Any

from ejkernel.contracts.params import FwdParams
from ejkernel.kernels._pallas.tpu.flash_attention import parameters as flash
from ejkernel.kernels._pallas.tpu.generations import LANES

READS = flash.READS
# Blocks of this side take as long a pair as larger ones, and a mask leaves few larger ones empty.
SIDE = 512
# Steps whose list scalar memory holds.
MOST_STEPS = 8192


def effective(shapes: dict[str, Any], spec: Any, params: FwdParams, device: Any) -> FwdParams:
    """What was asked for, in multiples of 128, and no more steps than their list has room for."""
    most = [-(-length // LANES) * LANES for length in spec.grid.lengths]
    asked = (params.q_blocksize or SIDE, params.kv_blocksize or SIDE)
    sides = [min(largest, max(LANES, side // LANES * LANES)) for side, largest in zip(asked, most, strict=True)]
    entries, heads, _ = shapes["blocks"].start.shape
    for name in ("q_segment_ids", "kv_start"):
        entries = max(entries, shapes[name].shape[0] if name in shapes else 1)
    lists = entries * heads

    def steps() -> int:
        return lists * math.prod(-(-length // side) for length, side in zip(spec.grid.lengths, sides, strict=True))

    while steps() > MOST_STEPS and sides != most:
        axis = 0 if sides[1] == most[1] or (sides[0] <= sides[1] and sides[0] < most[0]) else 1
        sides[axis] = min(most[axis], 2 * sides[axis])
    part = min(max(LANES, (params.blocksize_keys or SIDE) // LANES * LANES), sides[1])
    while sides[1] % part:
        part -= LANES
    return FwdParams(**dict(zip(READS, (*sides, part), strict=True)))


def space(shapes: dict[str, Any], spec: Any, device: Any) -> list[FwdParams]:
    """Blocks worth timing."""
    asked = [(SIDE, SIDE), (2 * SIDE, SIDE), (2 * SIDE, 2 * SIDE), (SIDE // 2, SIDE)]
    params = [FwdParams(q_blocksize=rows, kv_blocksize=keys) for rows, keys in asked]
    return list(dict.fromkeys(effective(shapes, spec, x, device) for x in params))
