"""Labels of points, where they overlap neither each other nor a curve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ejkernel.lab.visualization.style import GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def label_points(ax: Axes, labels: list[tuple[str, float, float]], curves: np.ndarray) -> None:
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

    line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4}
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
