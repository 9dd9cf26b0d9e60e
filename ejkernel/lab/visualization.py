"""The lab's figures: rooflines, latencies over sizes, and FlashAttention beside standard attention.

Every function calls `set_style()` when it draws; importing this module changes nothing.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ejkernel.errors import InvalidInputError
from ejkernel.lab.extras import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "plot_flash_attn_improvement",
    "plot_gemm_gemv_latency",
    "plot_gemm_gemv_latency_split",
    "plot_gemm_torch_matmul_latency",
    "plot_roofline",
    "set_style",
]

# Blue and vermilion of Okabe and Ito's palette, which the colour-blind tell apart; the baseline is grey.
_BLUE, _ORANGE, _GREY, _INK = "#0072B2", "#D55E00", "#8A919B", "#24292F"

_STYLE = {
    "figure.figsize": (6.4, 4.2),
    "figure.dpi": 120,
    "figure.facecolor": "white",
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "savefig.dpi": 200,
    "font.size": 10,
    "text.color": _INK,
    "axes.facecolor": "none",
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "axes.labelsize": 10,
    "axes.axisbelow": True,
    "axes.prop_cycle": f"cycler('color', ['{_BLUE}', '{_ORANGE}', '#009E73', '#CC79A7', '{_GREY}'])",
    "figure.titlesize": 12.5,
    "figure.titleweight": "bold",
    "grid.color": _GREY,
    "grid.alpha": 0.22,
    "grid.linewidth": 0.7,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
}


def set_style() -> None:
    """Set one plot style, for every figure made after it, in matplotlib's `rcParams`."""
    need("matplotlib", "a plot").rcParams.update(_STYLE)


def plot_roofline(
    gpu_name: str,
    peak_flops: float,
    peak_bandwidth: float,
    operations: Mapping[str, float | tuple[float, float]] | None = None,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    title: str | None = None,
    ax: Axes | None = None,
    *,
    ceilings: tuple[float, float] | None = None,
) -> Axes:
    """Draw what a GPU can attain at each arithmetic intensity, and where operations stand.

    Args:
        gpu_name: the GPU, for the title.
        peak_flops: its peak in TFLOPS, of the dtype that the operations compute in.
        peak_bandwidth: its memory bandwidth in TB/s.
        operations: names to arithmetic intensities in FLOPs/Byte, drawn on the roof, or to pairs of intensity and
            achieved TFLOPS, drawn where they are with their share of the roof; a dict or a pandas Series.
        x_range: limits of the intensities.
        y_range: limits of the TFLOPS.
        title: instead of the GPU's name.
        ax: the Axes to draw on; None makes a figure.
        ceilings: measured TFLOPS and TB/s; their roof is drawn too, and shares are of it.

    Example:
        >>> plot_roofline("A100", 19.5, 2.0, operations={"gemm_1024": 341.3, "gemv_1024": 1.0})  # doctest: +SKIP
    """
    roofs = [(_positive("peak_flops", peak_flops), _positive("peak_bandwidth", peak_bandwidth))]
    if ceilings is not None:
        roofs.append(_pair("ceilings", ceilings, "(TFLOPS, TB/s)"))
    points = _operation_points(operations)
    measured = any(achieved is not None for _, _, achieved in points)
    left, right = _limits("x_range", x_range) or _roofline_x_range(roofs, points)
    limits = _limits("y_range", y_range)

    ax = _axes_of(ax)
    legend_lines = 1 + measured + (ceilings is not None)
    room = 26 + 14 * legend_lines if legend_lines > 1 else 26  # above the roof, in points
    bottom, top = limits or _roofline_y_range(roofs, points, left, room * ax.figure.dpi / 72 / ax.bbox.height)
    ax.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top))
    ax.set_xlabel("Arithmetic intensity (FLOPs/Byte)")
    ax.set_ylabel("Performance (TFLOPS)")
    ax.set_title(f"{gpu_name} roofline" if title is None else title)
    _plain_ticks(ax.xaxis, left, right)
    _plain_ticks(ax.yaxis, bottom, top)
    _finish(ax)

    curves = _draw_roofs(ax, roofs)
    _draw_regions(ax, curves[0], roofs[0])
    _annotate_roof(ax, *roofs[0], [intensity for _, intensity, _ in points])
    labels = _draw_operations(ax, roofs, points)
    if measured:
        roof = "data sheet" if ceilings is None else "measured"
        ax.plot([], [], "D", color=_GREY, label=f"operation (% of the {roof} roof)")
    if legend_lines > 1:
        ax.legend(loc="upper left", borderaxespad=0.2, fontsize=8.5)
    _label_points(ax, labels, np.concatenate(curves))
    return ax


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
    columns = _columns(sizes=sizes, gemm_latency_ms=gemm_latency_ms, gemv_latency_ms=gemv_latency_ms)
    return _compare_latencies(ax, columns, ("GEMM", "GEMV"), (_BLUE, _ORANGE), title, xlabel, ylabel)


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
    columns = _columns(sizes=sizes, gemm_latency_ms=gemm_latency_ms, gemv_latency_ms=gemv_latency_ms)
    fig, axes = _figure(2, 1, figsize=(6.4, 5.6), sharex=True)
    logarithmic = any(map(_wide, columns[1:]))
    for ax, latencies, name, colour in zip(axes, columns[1:], ("GEMM", "GEMV"), (_BLUE, _ORANGE), strict=True):
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
    columns = _columns(
        sizes=sizes, gemm_tiled_latency_ms=gemm_tiled_latency_ms, torch_matmul_latency_ms=torch_matmul_latency_ms
    )
    return _compare_latencies(ax, columns, ("gemm_tiled", "torch.matmul"), (_BLUE, _GREY), title, xlabel, ylabel)


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
    pairs = [_column_pair("latency_cols", latency_cols), _column_pair("memory_cols", memory_cols)]
    _need_columns(df, [seq_len_col, *pairs[0], *pairs[1]])
    lengths = _numbers(f"df[{seq_len_col!r}]", df[seq_len_col])
    charts = []
    for (standard, flash), zero in zip(pairs, (False, True), strict=True):  # there may be nothing to allocate
        charts.append(
            (
                _numbers(f"df[{standard!r}]", df[standard], missing=True, zero=zero),
                _numbers(f"df[{flash!r}]", df[flash], zero=zero),
            )
        )
    if not _positive("bar_width", bar_width) <= 0.5:
        raise InvalidInputError(f"bar_width is {bar_width!r}; two bars share 1: pass at most 0.5")

    fig, axes = _figure(1, 2, figsize=(9.6, 4)) if ax is None else _two_axes(ax)
    ylabels, annotated = ("Latency (ms)", "Peak memory (GB)"), (annotate_speedup, annotate_mem_reduction)
    for one, (standard, flash), ylabel, annotate in zip(axes, charts, ylabels, annotated, strict=True):
        _bar_pairs(one, lengths, standard, flash, bar_width, annotate)
        one.set_xlabel("Sequence length")
        one.set_ylabel(ylabel)
    axes[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.3)
    if title is not None:
        fig.suptitle(title)
    return fig, axes


# --- arguments ----------------------------------------------------------------------------------------------


def _brief(value: Any) -> str:
    """A value in an error: in one line, whatever it is."""
    return " ".join(reprlib.repr(value).split())


def _positive(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidInputError(f"{name} is {_brief(value)}; pass a positive, finite number")
    return number


def _pair(name: str, value: Any, what: str) -> tuple[float, float]:
    try:
        first, second = value
    except (TypeError, ValueError):
        raise InvalidInputError(f"{name} is {_brief(value)}; pass a pair {what}") from None
    return _positive(f"{name}[0]", first), _positive(f"{name}[1]", second)


def _limits(name: str, value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    low, high = _pair(name, value, "(min, max)")
    if not low < high:
        raise InvalidInputError(f"{name} is {_brief(value)}; pass the smaller limit first")
    return low, high


def _operation_points(operations: Any) -> list[tuple[str, float, float | None]]:
    if operations is None:
        return []
    if not callable(getattr(operations, "items", None)):  # a Mapping or a pandas Series
        raise InvalidInputError(f"operations is {_brief(operations)}; pass a dict of names to FLOPs/Byte, or None")
    named = list(operations.items())
    if not named:
        raise InvalidInputError("operations is empty; pass at least one, or None to draw none")
    points = []
    for name, value in named:
        where = f"operations[{name!r}]"
        if isinstance(value, tuple | list) or getattr(value, "ndim", 0):
            points.append((str(name), *_pair(where, value, "(FLOPs/Byte, achieved TFLOPS)")))
        else:
            points.append((str(name), _positive(where, value), None))
    return points


def _numbers(name: str, values: Any, *, missing: bool = False, zero: bool = False) -> np.ndarray:
    """One axis of numbers: positive, or also 0 with `zero` and NaN with `missing`."""
    try:
        array = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        array = np.array(math.nan)
    if array.ndim != 1:
        raise InvalidInputError(f"{name} is {_brief(values)}; pass a list of numbers")
    if not array.size:
        raise InvalidInputError(f"{name} is empty; pass at least one number")
    good = np.isfinite(array) & ((array >= 0) if zero else (array > 0)) | (missing & np.isnan(array))
    if not good.all():
        kind = "zero or positive" if zero else "positive"
        raise InvalidInputError(f"{name} holds {array[~good][0]:g}; pass {kind}, finite numbers")
    return array


def _columns(**columns: Any) -> list[np.ndarray]:
    """The first column in ascending order, and the others with it."""
    arrays = [_numbers(name, values) for name, values in columns.items()]
    first = next(iter(columns))
    for name, array in zip(columns, arrays, strict=True):
        if len(array) != len(arrays[0]):
            raise InvalidInputError(
                f"{name} has {len(array)} values and {first} has {len(arrays[0])}; pass one for each of {first}"
            )
    order = np.argsort(arrays[0], kind="stable")
    return [array[order] for array in arrays]


def _column_pair(name: str, value: Any) -> tuple[str, str]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidInputError(f"{name} is {_brief(value)}; pass two column names: standard, flash")
    return tuple(value)


def _need_columns(df: Any, names: list[str]) -> None:
    if not hasattr(df, "columns"):
        raise InvalidInputError(f"df is a {type(df).__name__}; pass a DataFrame with the columns {', '.join(names)}")
    missing = [str(name) for name in names if name not in df.columns]
    if missing:
        raise InvalidInputError(
            f"df has no column {', '.join(missing)} but {', '.join(map(str, df.columns)) or 'none at all'}; "
            "name its columns in seq_len_col, latency_cols and memory_cols"
        )


def _axes_of(ax: Any) -> Axes:
    if ax is None:
        return _figure(1, 1)[1]
    if not isinstance(ax, need("matplotlib.axes", "a plot").Axes):
        raise InvalidInputError(f"ax is {_brief(ax)}; pass one matplotlib Axes, or None for a new figure")
    set_style()
    return ax


def _two_axes(ax: Any) -> tuple[Figure, np.ndarray]:
    axes = np.asarray(ax, dtype=object).ravel()
    kind = need("matplotlib.axes", "a plot").Axes
    if len(axes) != 2 or not all(isinstance(one, kind) for one in axes) or axes[0].figure is not axes[1].figure:
        raise InvalidInputError(
            f"ax is {_brief(ax)}; pass two matplotlib Axes of one figure, [latency_ax, memory_ax], "
            "or None for a new figure"
        )
    set_style()
    return axes[0].figure, axes


def _figure(rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    set_style()
    return need("matplotlib.pyplot", "a plot").subplots(rows, columns, layout="constrained", **options)


# --- axes ---------------------------------------------------------------------------------------------------


def _finish(ax: Axes, grid: str = "both") -> None:
    """What the style says of new Axes, for those that were made before it was set."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_facecolor("none")
    ax.set_axisbelow(True)
    ax.grid(True, axis=grid)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _plain_ticks(axis: Any, low: float, high: float) -> None:
    """Numbers, not powers, on a logarithmic axis; 1, 2 and 5 of each decade where there are few decades."""
    ticker = need("matplotlib.ticker", "a plot")
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.10g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _size_ticks(ax: Axes, sizes: np.ndarray) -> None:
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


def _wide(values: np.ndarray) -> bool:
    """Whether values differ so much that a scale from 0 would flatten the small ones."""
    values = values[values > 0]
    return bool(values.size) and values.max() > 20 * values.min()


def _value_scale(ax: Axes, values: np.ndarray, logarithmic: bool, headroom: float) -> None:
    """A logarithmic scale, or one from 0; `headroom` is a share of the height."""
    values = values[values > 0]
    high = values.max() if values.size else 1.0
    if logarithmic:
        low = values.min() / 1.6
        ax.set_yscale("log")
        ax.set_ylim(low, _with_headroom(low, high, headroom))
        _plain_ticks(ax.yaxis, low, high)
    else:
        ax.set_ylim(0, high / (1 - headroom))


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
    _size_ticks(ax, sizes)
    _value_scale(ax, np.concatenate(latencies), logarithmic, headroom=0.06)
    _finish(ax)
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
    ax = _axes_of(ax)
    _latency_lines(ax, columns, names, colours, _wide(np.concatenate(columns[1:])), ylabel)
    ax.set_xlabel(xlabel)
    if title is not None:
        ax.set_title(title)
    ax.legend()
    return ax


def _bar_pairs(
    ax: Axes, lengths: np.ndarray, standard: np.ndarray, flash: np.ndarray, width: float, annotate: bool
) -> None:
    places = np.arange(len(lengths))
    ax.bar(places - width / 2, standard, width, color=_GREY, label="Standard")
    ax.bar(places + width / 2, flash, width, color=_BLUE, label="FlashAttention")
    values = np.concatenate([standard, flash])
    _value_scale(ax, values, _wide(values), headroom=0.1)
    _finish(ax, grid="y")
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
                color=_GREY,
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
                color=_BLUE,
                fontsize=small,
                fontweight="bold",
            )


def _draw_roofs(ax: Axes, roofs: list[tuple[float, float]]) -> list[np.ndarray]:
    """The data sheet's roof and the measured one, if there is one; returns the points of each."""
    curves = []
    for flops, bandwidth in roofs:
        x = np.unique(np.append(np.geomspace(*ax.get_xlim(), 128), flops / bandwidth))
        curves.append(np.column_stack([x, np.minimum(flops, bandwidth * x)]))
    ax.plot(*curves[0].T, color=_INK, label="data sheet")  # its numbers are written along it
    for (flops, bandwidth), curve in zip(roofs[1:], curves[1:], strict=True):
        label = f"measured: {_short(flops)} TFLOPS, {_short(bandwidth)} TB/s"
        ax.plot(*curve.T, color=_INK, linestyle=(0, (4, 2)), linewidth=1.3, label=label)
    return curves


def _draw_regions(ax: Axes, curve: np.ndarray, roof: tuple[float, float]) -> None:
    """Tell memory-bound from compute-bound below the roof."""
    (x, y), ridge, limits = curve.T, roof[0] / roof[1], ax.get_xlim()
    for region, colour, name in ((x <= ridge, _BLUE, "memory-bound"), (x >= ridge, _ORANGE, "compute-bound")):
        ax.fill_between(x[region], min(ax.get_ylim()[0], y.min()), y[region], color=colour, alpha=0.08, linewidth=0)
        start, end = np.clip(x[region][[0, -1]], *limits)
        if math.log(end / start) > 0.15 * math.log(limits[1] / limits[0]):  # room for the word
            place = start * (end / start) ** 0.58
            transform = ax.get_xaxis_transform()
            ax.text(place, 0.03, name, transform=transform, ha="center", color=colour, fontsize=9)


def _draw_operations(ax: Axes, roofs: list[tuple[float, float]], points: list[tuple]) -> list[tuple[str, float, float]]:
    """Mark operations on the data sheet's roof, or where they were measured; returns their labels."""
    labels = []
    for name, intensity, achieved in points:
        flops, bandwidth = roofs[0] if achieved is None else roofs[-1]
        roof = min(flops, bandwidth * intensity)
        colour = _BLUE if intensity < flops / bandwidth else _ORANGE
        if achieved is None:
            height, marker, label = roof, "o", name
        else:
            share = achieved / roof
            height, marker, label = achieved, "D", f"{name} ({share:.0%})" if share >= 0.005 else f"{name} (<1%)"
        ax.plot([intensity], [height], marker, color=colour, markeredgecolor="white", zorder=4)
        labels.append((label, intensity, height))
    return labels


def _annotate_roof(ax: Axes, flops: float, bandwidth: float, intensities: list[float]) -> None:
    """The ridge point, the peak along the flat and the bandwidth along the slope, away from the intensities."""
    ridge, (left, right), (bottom, top) = flops / bandwidth, ax.get_xlim(), ax.get_ylim()
    above = {"textcoords": "offset points", "ha": "right", "va": "bottom", "fontsize": 9}
    if left < ridge < right and bottom < flops < top:
        ax.plot([ridge, ridge], [bottom, flops], color=_INK, linewidth=0.8, linestyle=(0, (1, 2)))
        ax.plot([ridge], [flops], "o", color=_INK, zorder=4)
        text = f"ridge point: {_short(ridge)} FLOPs/Byte"
        label = ax.annotate(text, (ridge, flops), xytext=(-2, 5), **above, in_layout=False)
        root = ax.figure.canvas.figure
        root.draw_without_rendering()  # the layout moves the axes, and only then is it known what sticks out
        outside = (ax.get_window_extent().x0 - label.get_window_extent().x0) * 72 / root.dpi
        label.xyann = (max(-2, outside), 5)
    if ridge < right and bottom < flops < top:
        ax.annotate(f"{_short(flops)} TFLOPS", (right, flops), xytext=(-2, 4), **above, color=_GREY)
    start, end = max(left, bottom / bandwidth), min(right, ridge, top / bandwidth)
    if start < end:
        x = max(
            (start * (end / start) ** share for share in (0.5, 0.35, 0.65)),
            key=lambda x: min((abs(math.log(x / intensity)) for intensity in intensities), default=0),
        )
        ax.text(
            x,
            1.1 * bandwidth * x,
            f"{_short(bandwidth)} TB/s",
            ha="center",
            va="bottom",
            fontsize=9,
            color=_GREY,
            rotation=math.degrees(math.atan(bandwidth)),  # the slope in the data's units
            rotation_mode="anchor",
            transform_rotates_text=True,
        )


def _roofline_x_range(roofs: list[tuple[float, float]], points: list[tuple]) -> tuple[float, float]:
    ridges = [flops / bandwidth for flops, bandwidth in roofs]
    intensities = [intensity for _, intensity, _ in points]
    low = min(min(ridges) / 20, *(intensity / 2 for intensity in intensities), math.inf)
    high = max(max(ridges) * 20, *(intensity * 2 for intensity in intensities), 0)
    return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))


def _roofline_y_range(
    roofs: list[tuple[float, float]], points: list[tuple], left: float, headroom: float
) -> tuple[float, float]:
    achieved = [value for _, _, value in points if value is not None]
    low = min(*(min(bandwidth * left, flops / 10) for flops, bandwidth in roofs), *(v / 4 for v in achieved), math.inf)
    high = max(*(flops for flops, _ in roofs), *achieved, 0)
    return low, _with_headroom(low, high, min(headroom, 0.5))


def _with_headroom(low: float, high: float, share: float) -> float:
    """The upper limit of a logarithmic axis from `low` whose topmost share is above `high`."""
    return high * (high / low) ** (share / (1 - share))


def _label_points(ax: Axes, labels: list[tuple[str, float, float]], curves: np.ndarray) -> None:
    """Write each text beside its point where it covers no other text, point or curve, with a line to it from afar."""
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    labels = [label for label in labels if left <= label[1] <= right and bottom <= label[2] <= top]
    if not labels:
        return
    root = ax.figure.canvas.figure
    root.draw_without_rendering()  # the layout moves the axes, and only then is it known what covers what
    pixel = root.dpi / 72
    points = ax.transData.transform([(x, y) for _, x, y in labels])
    markers = np.concatenate([points - 4 * pixel, points + 4 * pixel], axis=1)
    roofs = np.tile(ax.transData.transform(curves), 2)
    texts = np.array([text.get_window_extent().extents for text in [*ax.texts, ax.get_legend()] if text is not None])
    frame = ax.get_window_extent().extents

    angles = np.radians([-35, 0, -90, 145, 180, 90, *range(-165, 180, 15)])  # the first are the nicest
    reach = pixel * np.array([6, 12, 20, 30, 42, 56, 72, 90, 110])
    distances, angles = (grid.ravel() for grid in np.meshgrid(reach, angles, indexing="ij"))
    rays = np.column_stack([np.cos(angles), np.sin(angles)])
    far = distances > 15 * pixel
    halves = [_text_size(ax, text, fontsize=9) / 2 for text, _, _ in labels]
    offsets = np.zeros_like(points)
    boxes, leaders = {}, {}
    for index in 3 * [*range(len(labels))]:  # again and again, because a place depends on those that are taken later
        point, half = points[index], halves[index]
        boxes.pop(index, None)
        leaders.pop(index, None)
        written = np.array([*texts, *boxes.values()])
        centres = point + rays * (distances[:, None] + half)
        places = np.concatenate([centres - half - 2 * pixel, centres + half + 2 * pixel], axis=1)
        lines = np.tile(point + np.linspace(0, 1, 16)[:, None, None] * (centres - rays * half - point), 2)
        gaps = np.linalg.norm(np.maximum(abs(centres[:, None] - points) - half, 0), axis=2)
        apart = markers[(abs(points - point) > 4 * pixel).any(axis=1)]
        cost = (
            1000 * ((places[:, :2] < frame[:2]) | (places[:, 2:] > frame[2:])).any(axis=1)
            + 100 * _overlaps(places, np.concatenate([written, markers, roofs, *leaders.values()]))
            + 20 * far * np.any([_overlaps(step, np.concatenate([written, apart])) for step in lines], axis=0)
            + 20 * ~far * (gaps[:, index] > gaps.min(axis=1) + pixel)  # a text without a line is the nearest point's
        )
        chosen = np.argmin(cost)
        boxes[index] = places[chosen]
        if far[chosen]:
            leaders[index] = lines[:, chosen]
        offsets[index] = (centres[chosen] - point) / pixel

    line = {"arrowstyle": "-", "color": _GREY, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4}
    for index, (text, x, y) in enumerate(labels):
        ax.annotate(
            text,
            (x, y),
            xytext=offsets[index],
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=9,
            arrowprops=line if index in leaders else None,
        )


def _overlaps(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """How many of the others each box overlaps; boxes are (left, bottom, right, top)."""
    return ((boxes[:, None, :2] < others[:, 2:]) & (others[:, :2] < boxes[:, None, 2:])).all(axis=2).sum(axis=1)


def _text_size(ax: Axes, text: str, fontsize: float) -> np.ndarray:
    probe = ax.text(0.5, 0.5, text, transform=ax.transAxes, fontsize=fontsize)
    size = np.array(probe.get_window_extent().size)
    probe.remove()
    return size
