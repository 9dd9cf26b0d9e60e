"""Helpers for arrays, numerics, testing and profiling that belong to no operation."""

from ejkernel.utils.arrays import chunk_array, unchunk_array
from ejkernel.utils.numerics import log_sum_exp, safe_divide
from ejkernel.utils.profiling import get_memory_usage, timer
from ejkernel.utils.testing import assert_allclose, generate_attention_inputs

__all__ = [
    "assert_allclose",
    "chunk_array",
    "generate_attention_inputs",
    "get_memory_usage",
    "log_sum_exp",
    "safe_divide",
    "timer",
    "unchunk_array",
]
