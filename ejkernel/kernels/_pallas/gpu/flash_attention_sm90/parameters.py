"""The kernels' tile sizes: defaults, those worth timing, and the clipping of parameters that do not fit."""

from __future__ import annotations

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import (
    BACKWARD_CONSUMERS,
    CHUNK,
    ROWS,
    SHARED_MEMORY,
    WARPS_PER_WARPGROUP,
    WHOLE_COLUMNS,
    panel_of,
    shared_columns,
    tail_of,
)

# The parameters that say how the kernels run, in both directions.
READS = ("q_blocksize", "kv_blocksize", "num_warps", "num_stages")
# Consumers of the forward, at most.
MOST_CONSUMERS = 3
# Bytes that the forward's barriers and reductions take.
RESERVED = 3072
# Keys of a CTA of the single backward kernel, queries of a CTA of the wide kernel for queries: the rows of both
# warpgroups.
BACKWARD_BLOCK = ROWS * BACKWARD_CONSUMERS
# Slots of the single kernel's ring: as many as fit into shared memory.
BACKWARD_STAGES = 2

# Keys a step, at most, by consumers: the compiler fails on longer ones, whose logits leave three of them too few registers.
LARGEST_STEP = {1: 4 * ROWS, 2: 4 * ROWS, 3: 3 * ROWS}


def _params(*sizes: int) -> FwdParams:
    return FwdParams(**dict(zip(READS, sizes, strict=True)))


# By the largest head dims, of queries and of values: queries of a CTA, keys a step, warps of its consumers, slots of the
# ring. The first is the default, the others are worth timing. Nothing spills.
SPACE = {
    (64, 64): [(192, 128, 12, 4), (192, 112, 12, 4), (128, 192, 8, 3)],
    (88, 88): [(192, 112, 12, 4), (192, 96, 12, 3), (128, 128, 8, 3)],
    (128, 128): [(128, 128, 8, 2), (128, 160, 8, 2)],
    (192, 128): [(128, 112, 8, 2), (128, 96, 8, 2), (128, 64, 8, 3)],
    (256, 256): [(128, 80, 8, 2)],
}


# The default with dropout, or a bias for every pair: what a lane knows of its pairs takes registers too.
OF_PAIRS = {
    (64, 64): (192, 96, 12, 4),
    (128, 128): (128, 112, 8, 2),
    (192, 128): (128, 80, 8, 2),
    (256, 256): (128, 48, 8, 2),
}


def narrow(dim: int, value_dim: int) -> bool:
    """Whether shared memory has room for a block's output beside the next one's queries, and registers for its sums."""
    return dim <= 192 and value_dim <= 128


def forward_defaults(dim: int, value_dim: int, of_pairs: bool = False) -> FwdParams:
    """The forward's tile where nothing was tuned; ``of_pairs``: with dropout, or a bias for every pair."""
    return forward_space(dim, value_dim, of_pairs)[0]


def forward_space(dim: int, value_dim: int, of_pairs: bool = False) -> list[FwdParams]:
    """The forward's tiles that are worth timing."""

    def at(table):
        return next(sizes for largest, sizes in table.items() if dim <= largest[0] and value_dim <= largest[1])

    return [_params(*x) for x in ([at(OF_PAIRS)] if of_pairs else []) + at(SPACE)]


def forward_effective(params: FwdParams, dim: int, value_dim: int) -> FwdParams:
    """What was asked for, clipped to what the kernel and the chip take.

    A warpgroup has four warps and 64 queries: where queries and warps differ, the fewer warpgroups run. The output takes the
    queries' place in shared memory where it must and can.

    Example:
        >>> forward_effective(FwdParams(kv_blocksize=10_000, num_warps=64), 128, 128).to_dict()
        {'q_blocksize': 192, 'kv_blocksize': 128, 'num_warps': 12, 'num_stages': 2}
    """
    asked = [
        params.q_blocksize and params.q_blocksize // ROWS,
        params.num_warps and params.num_warps // WARPS_PER_WARPGROUP,
    ]
    consumers = min(MOST_CONSUMERS, max(1, min((x for x in asked if x is not None), default=2)))
    step = min(LARGEST_STEP[consumers], max(CHUNK, (params.kv_blocksize or ROWS) // CHUNK * CHUNK))
    width, value_width = shared_columns(dim), shared_columns(value_dim)
    staged = panel_of(value_dim) is None and (value_dim != dim or narrow(dim, value_dim))
    own = width + value_width if staged else width
    # Elements of 16 bits. Of three warpgroups at 256, two slots of 16 keys still fit.
    room = (SHARED_MEMORY - RESERVED) // 2 - consumers * ROWS * own
    stages = max(2, min(params.num_stages or 2, room // (step * (width + value_width))))
    step = min(step, room // (stages * (width + value_width)) // CHUNK * CHUNK)
    return _params(ROWS * consumers, step, WARPS_PER_WARPGROUP * consumers, stages)


def single(dim: int, value_dim: int) -> bool:
    """Whether one kernel computes all gradients. (Queries of 64 beside values of 128 exceed its shared memory.)"""
    if in_panels(dim, value_dim):
        return True
    dim, value_dim = whole_columns(dim), whole_columns(value_dim)
    return value_dim <= dim <= 2 * ROWS and dim % ROWS == value_dim % ROWS == 0


def in_panels(dim: int, value_dim: int) -> bool:
    """Whether it takes heads in two panels."""
    return dim == value_dim and tail_of(dim) is not None


def whole_columns(dim: int) -> int:
    """The head dim that the backward's kernels compute where they have no panels."""
    return dim + -dim % WHOLE_COLUMNS


def backward_effective(dim: int, value_dim: int) -> BwdParams:
    """Queries a step, keys of a CTA, warps of its consumers: what runs, whatever is asked for.

    Registers and shared memory leave one set at each head dim. The two warpgroups of the single kernel share a step's dQ, 64
    by 64 each: by rows at head dim 64, by columns at 128. The kernels for wide heads have as many slots as fit.
    """
    warps = BACKWARD_CONSUMERS * WARPS_PER_WARPGROUP
    if single(dim, value_dim):
        step = BACKWARD_BLOCK * ROWS // (dim + -dim % ROWS)
        return BwdParams(q_blocksize=step, kv_blocksize=BACKWARD_BLOCK, num_warps=warps, num_stages=BACKWARD_STAGES)
    return BwdParams(q_blocksize=ROWS, kv_blocksize=ROWS, num_warps=warps)
