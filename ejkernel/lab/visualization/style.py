"""One style for all plots."""

from __future__ import annotations

from ejkernel.lab.extras import need

# Blue and vermilion of Okabe and Ito's palette, which the colour-blind tell apart; the baseline is grey.
BLUE, ORANGE, GREY, INK = "#0072B2", "#D55E00", "#8A919B", "#24292F"

_STYLE = {
    "figure.figsize": (6.4, 4.2),
    "figure.dpi": 120,
    "figure.facecolor": "white",
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "savefig.dpi": 200,
    "font.size": 10,
    "text.color": INK,
    "axes.facecolor": "none",
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "axes.labelsize": 10,
    "axes.axisbelow": True,
    "axes.prop_cycle": f"cycler('color', ['{BLUE}', '{ORANGE}', '#009E73', '#CC79A7', '{GREY}'])",
    "figure.titlesize": 12.5,
    "figure.titleweight": "bold",
    "grid.color": GREY,
    "grid.alpha": 0.22,
    "grid.linewidth": 0.7,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
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
