"""Calibration: the shared memory of a chip, and the block sizes, warps and stages that fit into it."""

from ejkernel.callib.calibration import (
    estimate_shared_memory_bytes,
    get_shared_memory_limit,
    select_block_sizes,
    select_num_stages,
    select_num_warps,
)
from ejkernel.callib.chips import CHIPS, Chip, identify

__all__ = [
    "CHIPS",
    "Chip",
    "estimate_shared_memory_bytes",
    "get_shared_memory_limit",
    "identify",
    "select_block_sizes",
    "select_num_stages",
    "select_num_warps",
]
