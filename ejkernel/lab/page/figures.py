"""The report's plots: latency and memory against length, and the roofline, as files and as SVG that a page can hold."""

from __future__ import annotations

import io
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ejkernel.lab.extras import need
from ejkernel.lab.page.series import THEME, Look, Panel, device, looks, panels, points, roofs
from ejkernel.lab.page.words import number

_LIGHT = {role: light for role, (light, _) in THEME.items()}
_SVG = "http://www.w3.org/2000/svg"
_STYLE = {
    "axes.edgecolor": _LIGHT["rule"],
    "axes.labelcolor": _LIGHT["muted"],
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": _LIGHT["ink"],
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "figure.facecolor": _LIGHT["paper"],
    "font.size": 10,
    "grid.color": _LIGHT["rule"],
    "grid.linewidth": 0.7,
    "svg.fonttype": "none",
    "text.color": _LIGHT["ink"],
    "xtick.color": _LIGHT["rule"],
    "xtick.labelcolor": _LIGHT["muted"],
    "ytick.color": _LIGHT["rule"],
    "ytick.labelcolor": _LIGHT["muted"],
}


def render(result: Mapping[str, Any]) -> dict[str, bytes]:
    """Files by name: `latency`, `memory` and `roofline` as PNG and SVG, those that the result has rows for.

    Example:
        >>> render({"timings": []})
        {}
    """
    return {
        f"{kind}.{suffix}": content
        for kind, figure in _figures(result, together=True)
        for suffix, content in _saved(kind, figure, ("svg", "png")).items()
    }


def inline(result: Mapping[str, Any]) -> dict[str, list[str]]:
    """Every plot as pieces of SVG for a page: no ids in common, colours by the page's variables, one panel a piece.

    Example:
        >>> inline({"timings": []})
        {}
    """
    pieces: dict[str, list[str]] = {}
    for kind, figure in _figures(result, together=False):
        piece = pieces.setdefault(kind, [])
        name = f"{kind}{len(piece)}"
        piece.append(_for_page(_saved(name, figure, ("svg",))["svg"], name))
    return pieces


def _figures(result: Mapping[str, Any], together: bool) -> list[tuple[str, Callable[[], Any]]]:
    """Kind and maker of every plot; the panels of a kind together in one figure with a legend, or each alone."""
    look, makers = looks(result), []
    caption = device(result) if together else None
    for kind in ("latency", "memory"):
        found = panels(result, kind)
        for group in [found] if together and found else [[panel] for panel in found]:
            makers.append((kind, partial(_over_length, group, kind, look, caption)))
    if points(result) or roofs(result):
        makers.append(("roofline", partial(_roofline, result, caption)))
    return makers


def _saved(name: str, make: Callable[[], Any], suffixes: Iterable[str]) -> dict[str, bytes]:
    """A figure's files, the same for the same result: in a style of its own, not the user's, and without a date."""
    matplotlib = need("matplotlib", "drawing the report's plots")
    metadata = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE, **{"svg.hashsalt": name})
        figure, files = make(), {}
        for suffix in suffixes:
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix, metadata=metadata[suffix], dpi=200)
            files[suffix] = buffer.getvalue()
    return files


def _for_page(svg: bytes, name: str) -> str:
    """Matplotlib's SVG for a page that holds several and has a light and a dark theme."""
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(svg)
    for parent in root.iter():
        for child in list(parent):  # a style of its own would hold for the whole page
            if child.tag in (f"{{{_SVG}}}style", f"{{{_SVG}}}metadata"):
                parent.remove(child)
    roles = {light: f"var(--{role})" for role, light in _LIGHT.items()}
    for element in root.iter():
        for key, value in list(element.attrib.items()):
            if key == "id":
                element.set(key, f"{name}-{value}")
            elif key.endswith("href"):
                element.set(key, value.replace("#", f"#{name}-", 1))
            elif key == "clip-path":
                element.set(key, value.replace("url(#", f"url(#{name}-"))
            elif key == "style":
                value = re.sub("#[0-9a-f]{6}", lambda match: roles.get(match[0], match[0]), value)
                element.set(key, re.sub(r"(font: [^;]*?px) [^;]*", r"\1 var(--sans)", value))
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("aria-hidden", "true")  # the figure that holds it says what is in it
    return ElementTree.tostring(root, encoding="unicode")


def _plain(text: str) -> str:
    """Text as matplotlib shall show it: no formulas, nothing that XML cannot hold, not longer than a plot is wide."""
    text = "".join(c if c.isprintable() else " " for c in text).replace("$", r"\$")
    return text if len(text) <= 40 else text[:39] + "…"


def _axes(
    count: int, legend: tuple[list, list], caption: str | None, size: tuple[float, float] = (4.0, 3.0)
) -> tuple[Any, list[Any]]:
    """A figure and its axes, in rows of at most three; with a caption, the legend is below them."""
    figure_module = need("matplotlib.figure", "drawing the report's plots")
    columns = min(3, count)
    rows = math.ceil(count / columns)
    lines = math.ceil(len(legend[1]) / (2 * columns))
    below = 0.25 * lines + 0.1 if caption else 0
    height = size[1] * rows + below
    figure = figure_module.Figure(figsize=(size[0] * columns, height), layout="constrained")
    figure.get_layout_engine().set(
        rect=(0.008, below / height, 0.984, 1 - (below + 0.08) / height), wspace=0.06, hspace=0.08
    )
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in axes[count:]:
        unused.remove()
    if caption:
        figure.suptitle(_plain(caption), x=0.01, ha="left", color=_LIGHT["muted"], size=9.5)
        figure.legend(*legend, loc="lower center", ncols=2 * columns, frameon=False, handlelength=2.4)
    return figure, list(axes[:count])


def _over_length(group: list[Panel], kind: str, look: Mapping[str, Look], caption: str | None) -> Any:
    """Panels of latency or memory against length, both logarithmic."""
    lines = need("matplotlib.lines", "drawing the report's plots")
    names = [name for name in look if any(name in panel.series for panel in group)]

    def style(name: str) -> dict[str, Any]:
        return {
            "color": _LIGHT[look[name].role],
            "marker": look[name].marker,
            "linestyle": "--" if look[name].dashed else "-",
            "linewidth": 2.4 if name == "ejkernel" else 1.5,
            "markersize": 5 + 0.9 * list(look).index(name),  # those below others show around them
            "markeredgecolor": _LIGHT["paper"],
            "markeredgewidth": 0.8,
        }

    keys = ([lines.Line2D([], [], **style(name)) for name in names], [_plain(name) for name in names])
    figure, axes = _axes(len(group), keys, caption)
    unit, divisor = "ms", 1.0
    if kind == "memory":
        most = max(high for panel in group for series in panel.series.values() for *_, high in series)
        unit, divisor = ("GiB", 2**30) if most >= 2**32 else ("MiB", 2**20) if most >= 2**20 else ("KiB", 2**10)
    for ax, panel in zip(axes, group, strict=True):
        everything = [row for series in panel.series.values() for row in series]
        for name in reversed(panel.series):  # ours on top
            x, y, high = zip(*panel.series[name], strict=True)
            y, high = ([value / divisor for value in values] for values in (y, high))
            ax.fill_between(x, y, high, color=_LIGHT[look[name].role], alpha=0.16, linewidth=0)
            ax.plot(x, y, **style(name))
        ax.set_title(_plain(panel.operation), pad=22)
        ax.text(0, 1.045, _plain(panel.what), transform=ax.transAxes, color=_LIGHT["muted"], size=9.5)
        ax.set_ylabel({"latency": "time", "memory": "peak memory"}[kind] + f" ({unit})")
        ax.set_xlabel("length")
        _log_axis(ax, "y", [value / divisor for row in everything for value in row[1:]])
        _log_axis(ax, "x", [row[0] for row in everything], ticks=sorted({row[0] for row in everything}))
        ax.grid(axis="y")
    return figure


def _log_axis(ax: Any, which: str, values: list[float], ticks: list[float] | None = None) -> None:
    """A logarithmic axis about the values, with numbers one can read; few values still get a tick or two."""
    ticker = need("matplotlib.ticker", "drawing the report's plots")
    low, high = min(values), max(values)
    margin = max((high / low) ** 0.07, 1.12, (4 * low / high) ** 0.5 if ticks is None else 1)
    low, high = low / margin, high * margin
    ax.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    axis = getattr(ax, f"{which}axis")
    if ticks is not None:
        # Every doubling has a label of its own only while there is room for it.
        axis.set_major_locator(ticker.FixedLocator(ticks[:: math.ceil(len(ticks) / 7)]))
    else:
        subs = (1, 2, 5) if high / low < 200 else (1,)
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_locator(ticker.NullLocator())


def _roofline(result: Mapping[str, Any], caption: str | None) -> Any:
    """Roofs as lines; points by number, since names would cover each other."""
    lines = need("matplotlib.lines", "drawing the report's plots")
    known, measured = roofs(result), points(result)
    styles = {name: "-" if n == 0 else (0, (5, 3)) for n, name in enumerate(known)}
    handles = [lines.Line2D([], [], color=_LIGHT["ink"], linestyle=style, linewidth=1.8) for style in styles.values()]
    for n in range(1, len(measured) + 1):
        handles.append(lines.Line2D([], [], color=_LIGHT["c0"], marker=f"${n}$", linestyle="none", markersize=7))
    labels = [f"roof: {_plain(name)}" for name in known]
    labels += [_plain(name) for name, *_ in measured]
    figure, (ax,) = _axes(1, (handles, labels), caption, size=(5.0, 3.5))
    ridges = [tflops / bandwidth for tflops, bandwidth in known.values()]
    intensities = [intensity for _, intensity, _ in measured] + ridges
    left, right = min(intensities) / 3, max(intensities) * 3
    heights = [tflops for _, _, tflops in measured]
    for name, (tflops, bandwidth) in known.items():
        ridge = min(max(tflops / bandwidth, left), right)
        x = [left, ridge, right]
        y = [min(tflops, bandwidth * value) for value in x]
        ax.plot(x, y, color=_LIGHT["ink"], linestyle=styles[name], linewidth=1.8, solid_joinstyle="round")
        if name == next(iter(known)):
            ax.fill_between(x, y, min(*heights, *y) / 10, color=_LIGHT["c0"], alpha=0.06, linewidth=0)
        heights += y
    for n, (_, intensity, tflops) in enumerate(measured, 1):
        ax.plot([intensity], [tflops], "o", color=_LIGHT["c0"], markersize=15, markeredgecolor=_LIGHT["paper"])
        ax.text(intensity, tflops, str(n), color=_LIGHT["paper"], ha="center", va="center_baseline", weight="bold")
    ax.set_xlabel("arithmetic intensity (FLOP/byte)")
    ax.set_ylabel("TFLOP/s")
    _log_axis(ax, "x", [left, right])
    _log_axis(ax, "y", heights)
    ax.set_xlim(left, right)
    ax.grid()
    return figure
