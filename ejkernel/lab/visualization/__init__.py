"""The lab's figures: rooflines, latencies over sizes, and FlashAttention beside standard attention.

Every function calls `set_style()` when it draws; importing this module changes nothing.
"""

from ejkernel.lab.visualization.flash import plot_flash_attn_improvement
from ejkernel.lab.visualization.latency import (
    plot_gemm_gemv_latency,
    plot_gemm_gemv_latency_split,
    plot_gemm_torch_matmul_latency,
)
from ejkernel.lab.visualization.roofline import plot_roofline
from ejkernel.lab.visualization.style import set_style

__all__ = [
    "plot_flash_attn_improvement",
    "plot_gemm_gemv_latency",
    "plot_gemm_gemv_latency_split",
    "plot_gemm_torch_matmul_latency",
    "plot_roofline",
    "set_style",
]
