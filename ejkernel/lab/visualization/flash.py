"""FlashAttention beside standard attention: latency and memory as pairs of bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ejkernel.errors import InvalidInputError
from ejkernel.lab.visualization.arguments import column_pair, need_columns, numbers, positive_number
from ejkernel.lab.visualization.axes import finish, new_figure, spans_decades, two_axes, value_scale
from ejkernel.lab.visualization.style import BLUE, GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_flash_attn_improvement(
    df: Any,
    latency_cols: tuple[str, str] = ("std_ms", "flash_ms"),
    memory_cols: tuple[str, str] = ("std_mem_gb", "flash_mem_gb"),
    seq_len_col: str = "seq_len",
    title: str | None = None,
    annotate_speedup: bool = True,
    annotate_mem_reduction: bool = True,
    bar_width: float = 0.38,
    ax: Sequence[Axes] | None = None,
) -> tuple[Figure, np.ndarray]:
    """Draw the latency and the memory of FlashAttention beside those of standard attention.

    Args:
        df: a DataFrame with a row for each sequence length. NaN in a column of standard attention says that it ran out
            of memory there.
        latency_cols: the columns of milliseconds: standard, flash.
        memory_cols: the columns of GB: standard, flash.
        seq_len_col: the column of sequence lengths.
        title: the figure's title, none by default.
        annotate_speedup: write over the latencies by how much FlashAttention is faster.
        annotate_mem_reduction: write over the memory by how much FlashAttention needs less.
        bar_width: of one bar, where 1 is the distance between sequence lengths.
        ax: the two Axes to draw on, latency and memory; None makes a figure.

    Returns:
        The figure and an array of the two Axes.

    Example:
        >>> df = pandas.DataFrame({"seq_len": [1024], "std_ms": [2.0], "flash_ms": [0.8],
        ...                        "std_mem_gb": [0.5], "flash_mem_gb": [0.1]})  # doctest: +SKIP
        >>> fig, axes = plot_flash_attn_improvement(df)  # doctest: +SKIP
    """
    pairs = [column_pair("latency_cols", latency_cols), column_pair("memory_cols", memory_cols)]
    need_columns(df, [seq_len_col, *pairs[0], *pairs[1]])
    lengths = numbers(f"df[{seq_len_col!r}]", df[seq_len_col])
    charts = []
    for (standard, flash), zero in zip(pairs, (False, True), strict=True):  # there may be nothing to allocate
        charts.append(
            (
                numbers(f"df[{standard!r}]", df[standard], missing=True, zero=zero),
                numbers(f"df[{flash!r}]", df[flash], zero=zero),
            )
        )
    if not positive_number("bar_width", bar_width) <= 0.5:
        raise InvalidInputError(f"bar_width is {bar_width!r}; two bars share 1: pass at most 0.5")

    fig, axes = new_figure(1, 2, figsize=(9.6, 4)) if ax is None else two_axes(ax)
    ylabels, annotated = ("Latency (ms)", "Peak memory (GB)"), (annotate_speedup, annotate_mem_reduction)
    for one, (standard, flash), ylabel, annotate in zip(axes, charts, ylabels, annotated, strict=True):
        _bar_pairs(one, lengths, standard, flash, bar_width, annotate)
        one.set_xlabel("Sequence length")
        one.set_ylabel(ylabel)
    axes[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.3)
    if title is not None:
        fig.suptitle(title)
    return fig, axes


def _bar_pairs(
    ax: Axes, lengths: np.ndarray, standard: np.ndarray, flash: np.ndarray, width: float, annotate: bool
) -> None:
    places = np.arange(len(lengths))
    ax.bar(places - width / 2, standard, width, color=GREY, label="Standard")
    ax.bar(places + width / 2, flash, width, color=BLUE, label="FlashAttention")
    values = np.concatenate([standard, flash])
    value_scale(ax, values, spans_decades(values), headroom=0.1)
    finish(ax, grid="y")
    ax.set_xticks(places, [f"{length:.10g}" for length in lengths], rotation=45 if len(lengths) > 8 else 0)
    ax.tick_params(axis="x", length=0)
    small = 8.5 if len(lengths) <= 8 else 7
    for place, slow, fast in zip(places, standard, flash, strict=True):
        if math.isnan(slow):
            ax.text(
                place - width / 2,
                0.02,
                "OOM",
                transform=ax.get_xaxis_transform(),
                rotation=90,
                ha="center",
                va="bottom",
                color=GREY,
                fontsize=small,
                fontweight="bold",
            )
        elif annotate and slow > 0 and fast > 0:
            ax.annotate(
                f"{slow / fast:.1f}×",
                (place, max(slow, fast)),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                va="bottom",
                color=BLUE,
                fontsize=small,
                fontweight="bold",
            )
