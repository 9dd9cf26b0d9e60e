"""Draw what benchmarks/models_gpu.py measured.

python benchmarks/plot_models.py benchmarks/results/models_h200.json

Beside the file: models_h200.png, our speed over the best peer's in each call, forward and forward + backward.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from models_tables import DIRECTIONS, best_peer, by_family, speed

COLOURS = {"forward": "#ea9a7a", "both": "#c2410c"}


def draw(result, path):
    rows = [row for row in by_family(result) if any(speed(row, direction) for direction in DIRECTIONS)]
    figure, axis = plt.subplots(figsize=(11, 1.6 + 0.4 * len(rows)), layout="constrained")
    for number, row in enumerate(rows):
        for offset, direction in zip((-0.2, 0.2), DIRECTIONS, strict=True):
            ratio = speed(row, direction)
            if ratio is None:
                continue
            peer, _ = best_peer(row, direction)
            axis.barh(number + offset, ratio, 0.36, color=COLOURS[direction])
            style = {"color": "#b91c1c", "fontweight": "bold"} if ratio < 1 else {"color": "#374151"}
            style["bbox"] = {"facecolor": "white", "linewidth": 0, "pad": 0.4}  # over the line at 1
            axis.annotate(
                f"{ratio:.2f} × {peer}", (ratio, number + offset), (3, 0), textcoords="offset points", va="center",
                fontsize=7, **style,
            )  # fmt: skip
    axis.axvline(1, color="#111827", linewidth=1)
    axis.set_yticks(range(len(rows)), [f"{row['model']}\n{row['shape']}" for row in rows], fontsize=7)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(0, 1.18 * max(speed(row, d) or 0 for row in rows for d in DIRECTIONS))
    axis.set_xlabel("speed over the best peer's (more is better)", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", color="#e5e7eb", linewidth=0.8)
    axis.set_axisbelow(True)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, list(DIRECTIONS.values()), loc="outside upper right", ncols=2, fontsize=9, frameon=False)
    versions = result["versions"]
    about = ", ".join(f"{name} {versions[name]}" for name in ("jax", "flash-attn-4", "tokamax") if name in versions)
    figure.suptitle(
        f"Attention calls of models: {result['device']}, {about}", x=0.01, ha="left", fontweight="bold", fontsize=10
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    draw(json.loads(file.read_text()), file.with_suffix(".png"))
