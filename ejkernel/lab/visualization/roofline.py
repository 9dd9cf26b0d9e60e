"""Rooflines: what a GPU can attain at each arithmetic intensity, and where operations stand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ejkernel.lab.visualization.arguments import limits_of, operation_points, pair, positive_number
from ejkernel.lab.visualization.axes import axes_of, finish, plain_ticks, short_number, with_headroom
from ejkernel.lab.visualization.labels import label_points
from ejkernel.lab.visualization.style import BLUE, GREY, INK, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    roofs = [(positive_number("peak_flops", peak_flops), positive_number("peak_bandwidth", peak_bandwidth))]
    if ceilings is not None:
        roofs.append(pair("ceilings", ceilings, "(TFLOPS, TB/s)"))
    points = operation_points(operations)
    measured = any(achieved is not None for _, _, achieved in points)
    left, right = limits_of("x_range", x_range) or _roofline_x_range(roofs, points)
    limits = limits_of("y_range", y_range)

    ax = axes_of(ax)
    legend_lines = 1 + measured + (ceilings is not None)
    room = 26 + 14 * legend_lines if legend_lines > 1 else 26  # above the roof, in points
    bottom, top = limits or _roofline_y_range(roofs, points, left, room * ax.figure.dpi / 72 / ax.bbox.height)
    ax.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top))
    ax.set_xlabel("Arithmetic intensity (FLOPs/Byte)")
    ax.set_ylabel("Performance (TFLOPS)")
    ax.set_title(f"{gpu_name} roofline" if title is None else title)
    plain_ticks(ax.xaxis, left, right)
    plain_ticks(ax.yaxis, bottom, top)
    finish(ax)

    curves = _draw_roofs(ax, roofs)
    _draw_regions(ax, curves[0], roofs[0])
    _annotate_roof(ax, *roofs[0], [intensity for _, intensity, _ in points])
    labels = _draw_operations(ax, roofs, points)
    if measured:
        roof = "data sheet" if ceilings is None else "measured"
        ax.plot([], [], "D", color=GREY, label=f"operation (% of the {roof} roof)")
    if legend_lines > 1:
        ax.legend(loc="upper left", borderaxespad=0.2, fontsize=8.5)
    label_points(ax, labels, np.concatenate(curves))
    return ax


def _draw_roofs(ax: Axes, roofs: list[tuple[float, float]]) -> list[np.ndarray]:
    """The data sheet's roof and the measured one, if there is one; returns the points of each."""
    curves = []
    for flops, bandwidth in roofs:
        x = np.unique(np.append(np.geomspace(*ax.get_xlim(), 128), flops / bandwidth))
        curves.append(np.column_stack([x, np.minimum(flops, bandwidth * x)]))
    ax.plot(*curves[0].T, color=INK, label="data sheet")  # its numbers are written along it
    for (flops, bandwidth), curve in zip(roofs[1:], curves[1:], strict=True):
        label = f"measured: {short_number(flops)} TFLOPS, {short_number(bandwidth)} TB/s"
        ax.plot(*curve.T, color=INK, linestyle=(0, (4, 2)), linewidth=1.3, label=label)
    return curves


def _draw_regions(ax: Axes, curve: np.ndarray, roof: tuple[float, float]) -> None:
    """Tell memory-bound from compute-bound below the roof."""
    (x, y), ridge, limits = curve.T, roof[0] / roof[1], ax.get_xlim()
    for region, colour, name in ((x <= ridge, BLUE, "memory-bound"), (x >= ridge, ORANGE, "compute-bound")):
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
        colour = BLUE if intensity < flops / bandwidth else ORANGE
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
        ax.plot([ridge, ridge], [bottom, flops], color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
        ax.plot([ridge], [flops], "o", color=INK, zorder=4)
        text = f"ridge point: {short_number(ridge)} FLOPs/Byte"
        label = ax.annotate(text, (ridge, flops), xytext=(-2, 5), **above, in_layout=False)
        root = ax.figure.canvas.figure
        root.draw_without_rendering()  # the layout moves the axes, and only then is it known what sticks out
        outside = (ax.get_window_extent().x0 - label.get_window_extent().x0) * 72 / root.dpi
        label.xyann = (max(-2, outside), 5)
    if ridge < right and bottom < flops < top:
        ax.annotate(f"{short_number(flops)} TFLOPS", (right, flops), xytext=(-2, 4), **above, color=GREY)
    start, end = max(left, bottom / bandwidth), min(right, ridge, top / bandwidth)
    if start < end:
        x = max(
            (start * (end / start) ** share for share in (0.5, 0.35, 0.65)),
            key=lambda x: min((abs(math.log(x / intensity)) for intensity in intensities), default=0),
        )
        ax.text(
            x,
            1.1 * bandwidth * x,
            f"{short_number(bandwidth)} TB/s",
            ha="center",
            va="bottom",
            fontsize=9,
            color=GREY,
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
    return low, with_headroom(low, high, min(headroom, 0.5))
