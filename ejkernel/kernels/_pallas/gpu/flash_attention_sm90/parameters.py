"""The kernels' tile sizes: defaults, those worth timing, and the clipping of parameters that do not fit."""

from __future__ import annotations

from typing import Any

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import (
    BACKWARD_CONSUMERS,
    CHUNK,
    ROWS,
    SHARED_MEMORY,
    WARPS_PER_WARPGROUP,
)

# Bytes that the forward's barriers and reductions take.
RESERVED = 3072
# Keys of a CTA of the single backward kernel, queries of a CTA of the wide kernel for queries: the rows of both
# warpgroups.
BACKWARD_BLOCK = ROWS * BACKWARD_CONSUMERS
# Slots of the single kernel's ring: as many as fit into shared memory.
BACKWARD_STAGES = 2


def _params(*sizes: int) -> FwdParams:
    names = ("q_blocksize", "kv_blocksize", "num_warps", "num_stages")
    return FwdParams(**dict(zip(names, sizes, strict=True)))


# By the wider of the two head dims: queries of a CTA, keys a step, warps of its consumers, slots of the ring. Nothing
# spills.
DEFAULTS = {
    64: _params(192, 128, 12, 4),
    128: _params(128, 128, 8, 2),
    256: _params(128, 80, 8, 2),
}
SPACE = {
    64: [(192, 128, 12, 4), (192, 112, 12, 4), (128, 192, 8, 3)],
    128: [(128, 128, 8, 2), (128, 160, 8, 2)],
    256: [(128, 80, 8, 2)],
}


def narrow(dim: int, value_dim: int) -> bool:
    """Whether shared memory has room for a block's output beside the next one's queries."""
    return max(dim, value_dim) <= 128


def tiles(params: FwdParams, dim: int, value_dim: int) -> tuple[int, int, int]:
    """Warpgroups, keys a step and slots: what was asked for, clipped to what the kernel and the chip take.

    Each warpgroup has 64 queries, so the number of warps decides. The output takes the queries' place where it must and
    can.

    Example:
        >>> tiles(FwdParams(kv_blocksize=10_000, num_warps=64), 128, 128)
        (3, 128, 2)
    """
    consumers = min(3, max(1, (params.num_warps or 8) // WARPS_PER_WARPGROUP))
    step = min(4 * ROWS, max(CHUNK, (params.kv_blocksize or ROWS) // CHUNK * CHUNK))
    stages = max(2, params.num_stages or 2)
    own = dim + value_dim if value_dim != dim or narrow(dim, value_dim) else dim

    def fits() -> bool:
        return 2 * (consumers * ROWS * own + stages * step * (dim + value_dim)) <= SHARED_MEMORY - RESERVED

    while not fits() and stages > 2:
        stages -= 1
    while not fits():  # Three warpgroups do with a step of 16, at 256.
        step -= CHUNK
    return consumers, step, stages


def _wider(shapes: dict[str, Any]) -> int:
    dim = max(shapes["query"].shape[3], shapes["value"].shape[3])
    return next(size for size in DEFAULTS if dim <= size)


def forward_defaults(shapes: dict[str, Any]) -> FwdParams:
    """The forward's tile where nothing was tuned."""
    return DEFAULTS[_wider(shapes)]


def forward_space(shapes: dict[str, Any]) -> list[FwdParams]:
    """The forward's tiles that are worth timing."""
    return [_params(*sizes) for sizes in SPACE[_wider(shapes)]]


def single(dim: int, value_dim: int) -> bool:
    """Whether one kernel computes all gradients. (Queries of 64 beside values of 128 exceed its shared memory.)"""
    return value_dim <= dim <= 2 * ROWS and dim % ROWS == value_dim % ROWS == 0


def step_of(dim: int) -> int:
    """Queries a step of the single kernel, whose two warpgroups share dQ: by rows at head dim 64, by columns at 128."""
    return BACKWARD_BLOCK * ROWS // dim


def backward_defaults(shapes: dict[str, Any]) -> BwdParams:
    """Queries a step, keys of a CTA, warps of its consumers: what always runs, whatever is asked for.

    Registers and shared memory leave one set at each head dim.
    """
    dim, value_dim = shapes["query"].shape[3], shapes["value"].shape[3]
    warps = BACKWARD_CONSUMERS * WARPS_PER_WARPGROUP
    if single(dim, value_dim):
        return BwdParams(
            q_blocksize=step_of(dim), kv_blocksize=BACKWARD_BLOCK, num_warps=warps, num_stages=BACKWARD_STAGES
        )
    return BwdParams(q_blocksize=ROWS, kv_blocksize=ROWS, num_warps=warps)
