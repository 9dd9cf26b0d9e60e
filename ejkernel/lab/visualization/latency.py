"""Latencies over sizes: GEMM, GEMV and torch's product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ejkernel.lab.visualization.arguments import columns_of
from ejkernel.lab.visualization.axes import axes_of, finish, new_figure, size_ticks, spans_decades, value_scale
from ejkernel.lab.visualization.style import BLUE, GREY, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_gemm_gemv_latency(
    sizes: Sequence[int],
    gemm_latency_ms: Sequence[float],
    gemv_latency_ms: Sequence[float],
    title: str | None = None,
    xlabel: str = "Matrix dimension (N)",
    ylabel: str = "Latency (ms)",
    ax: Axes | None = None,
) -> Axes:
    """Draw the latencies of GEMM and GEMV over the matrix dimension.

    Args:
        sizes: matrix dimensions.
        gemm_latency_ms: a latency for each.
        gemv_latency_ms: a latency for each.
        title: none by default.
        xlabel: label of the dimensions.
        ylabel: label of the latencies.
        ax: the Axes to draw on; None makes a figure.

    Example:
        >>> plot_gemm_gemv_latency([256, 512, 1024], [0.02, 0.1, 0.7], [0.01, 0.01, 0.03])  # doctest: +SKIP
    """
    columns = columns_of(sizes=sizes, gemm_latency_ms=gemm_latency_ms, gemv_latency_ms=gemv_latency_ms)
    return _compare_latencies(ax, columns, ("GEMM", "GEMV"), (BLUE, ORANGE), title, xlabel, ylabel)


def plot_gemm_gemv_latency_split(
    sizes: Sequence[int],
    gemm_latency_ms: Sequence[float],
    gemv_latency_ms: Sequence[float],
    title: str | None = "GEMM vs GEMV Latency",
    xlabel: str = "Matrix dimension (N)",
    ylabel: str = "Latency (ms)",
) -> tuple[Figure, np.ndarray]:
    """Draw the latencies of GEMM and, below them, those of GEMV, each on a scale of its own.

    Args:
        sizes: matrix dimensions.
        gemm_latency_ms: a latency for each.
        gemv_latency_ms: a latency for each.
        title: the figure's title.
        xlabel: label of the dimensions.
        ylabel: label of the latencies.

    Returns:
        The figure and an array of its two Axes.

    Example:
        >>> fig, axes = plot_gemm_gemv_latency_split([256, 512], [0.02, 0.1], [0.01, 0.01])  # doctest: +SKIP
    """
    columns = columns_of(sizes=sizes, gemm_latency_ms=gemm_latency_ms, gemv_latency_ms=gemv_latency_ms)
    fig, axes = new_figure(2, 1, figsize=(6.4, 5.6), sharex=True)
    logarithmic = any(map(spans_decades, columns[1:]))
    for ax, latencies, name, colour in zip(axes, columns[1:], ("GEMM", "GEMV"), (BLUE, ORANGE), strict=True):
        _latency_lines(ax, (columns[0], latencies), (name,), (colour,), logarithmic, ylabel)
        ax.set_title(name, color=colour)
    axes[1].set_xlabel(xlabel)
    if title is not None:
        fig.suptitle(title)
    return fig, axes


def plot_gemm_torch_matmul_latency(
    sizes: Sequence[int],
    gemm_tiled_latency_ms: Sequence[float],
    torch_matmul_latency_ms: Sequence[float],
    title: str | None = None,
    xlabel: str = "Matrix dimension (N)",
    ylabel: str = "Latency (ms)",
    ax: Axes | None = None,
) -> Axes:
    """Draw the latencies of `gemm_tiled` and of `torch.matmul` over the matrix dimension.

    Args:
        sizes: matrix dimensions.
        gemm_tiled_latency_ms: a latency for each.
        torch_matmul_latency_ms: a latency for each.
        title: none by default.
        xlabel: label of the dimensions.
        ylabel: label of the latencies.
        ax: the Axes to draw on; None makes a figure.

    Example:
        >>> plot_gemm_torch_matmul_latency([256, 512], [0.02, 0.1], [0.02, 0.08])  # doctest: +SKIP
    """
    columns = columns_of(
        sizes=sizes, gemm_tiled_latency_ms=gemm_tiled_latency_ms, torch_matmul_latency_ms=torch_matmul_latency_ms
    )
    return _compare_latencies(ax, columns, ("gemm_tiled", "torch.matmul"), (BLUE, GREY), title, xlabel, ylabel)


def _latency_lines(
    ax: Axes,
    columns: Sequence[np.ndarray],
    names: Sequence[str],
    colours: Sequence[str],
    logarithmic: bool,
    ylabel: str,
) -> None:
    sizes, *latencies = columns
    few = len(sizes) <= 16
    for values, name, colour, marker in zip(latencies, names, colours, "os", strict=False):
        ax.plot(sizes, values, marker=marker if few else "", color=colour, label=name, markeredgecolor="white")
    size_ticks(ax, sizes)
    value_scale(ax, np.concatenate(latencies), logarithmic, headroom=0.06)
    finish(ax)
    ax.set_ylabel(ylabel)


def _compare_latencies(
    ax: Any,
    columns: Sequence[np.ndarray],
    names: Sequence[str],
    colours: Sequence[str],
    title: str | None,
    xlabel: str,
    ylabel: str,
) -> Axes:
    ax = axes_of(ax)
    _latency_lines(ax, columns, names, colours, spans_decades(np.concatenate(columns[1:])), ylabel)
    ax.set_xlabel(xlabel)
    if title is not None:
        ax.set_title(title)
    ax.legend()
    return ax
