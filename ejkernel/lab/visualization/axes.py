"""Axes to draw on, their scales and their ticks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ejkernel.errors import InvalidInputError
from ejkernel.lab.extras import need
from ejkernel.lab.visualization.arguments import brief
from ejkernel.lab.visualization.style import set_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def axes_of(ax: Any) -> Axes:
    """The Axes that the caller gave, or those of a new figure, in our style."""
    if ax is None:
        return new_figure(1, 1)[1]
    if not isinstance(ax, need("matplotlib.axes", "a plot").Axes):
        raise InvalidInputError(f"ax is {brief(ax)}; pass one matplotlib Axes, or None for a new figure")
    set_style()
    return ax


def two_axes(ax: Any) -> tuple[Figure, np.ndarray]:
    """The figure and its two Axes that the caller gave, in our style."""
    axes = np.asarray(ax, dtype=object).ravel()
    kind = need("matplotlib.axes", "a plot").Axes
    if len(axes) != 2 or not all(isinstance(one, kind) for one in axes) or axes[0].figure is not axes[1].figure:
        raise InvalidInputError(
            f"ax is {brief(ax)}; pass two matplotlib Axes of one figure, [latency_ax, memory_ax], "
            "or None for a new figure"
        )
    set_style()
    return axes[0].figure, axes


def new_figure(rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    """A figure and its Axes, in our style."""
    set_style()
    return need("matplotlib.pyplot", "a plot").subplots(rows, columns, layout="constrained", **options)


def finish(ax: Axes, grid: str = "both") -> None:
    """What the style says of new Axes, for those that were made before it was set."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_facecolor("none")
    ax.set_axisbelow(True)
    ax.grid(True, axis=grid)


def short_number(number: float) -> str:
    """A number with three digits that count, or with all before the decimal point."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def plain_ticks(axis: Any, low: float, high: float) -> None:
    """Numbers, not powers, on a logarithmic axis; 1, 2 and 5 of each decade where there are few decades."""
    ticker = need("matplotlib.ticker", "a plot")
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.10g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def size_ticks(ax: Axes, sizes: np.ndarray) -> None:
    """Sizes on a scale of powers of two if they span two of them, with a tick at each while there is room."""
    ticker = need("matplotlib.ticker", "a plot")
    distinct = np.unique(sizes)
    if distinct[-1] >= 4 * distinct[0]:
        ax.set_xscale("log", base=2)
        roomy = len(distinct) <= 9 and (distinct[1:] / distinct[:-1]).min() > 1.4
    else:
        roomy = len(distinct) <= 6 and np.allclose(np.diff(distinct), np.diff(distinct)[:1])
    if roomy:
        ax.xaxis.set_major_locator(ticker.FixedLocator(distinct))
    ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.10g}"))
    ax.xaxis.set_minor_locator(ticker.NullLocator())


def spans_decades(values: np.ndarray) -> bool:
    """Whether values differ so much that a scale from 0 would flatten the small ones."""
    values = values[values > 0]
    return bool(values.size) and values.max() > 20 * values.min()


def value_scale(ax: Axes, values: np.ndarray, logarithmic: bool, headroom: float) -> None:
    """A logarithmic scale, or one from 0; `headroom` is a share of the height."""
    values = values[values > 0]
    high = values.max() if values.size else 1.0
    if logarithmic:
        low = values.min() / 1.6
        ax.set_yscale("log")
        ax.set_ylim(low, with_headroom(low, high, headroom))
        plain_ticks(ax.yaxis, low, high)
    else:
        ax.set_ylim(0, high / (1 - headroom))


def with_headroom(low: float, high: float, share: float) -> float:
    """The upper limit of a logarithmic axis from `low` whose topmost share is above `high`."""
    return high * (high / low) ** (share / (1 - share))
