"""Draw what benchmarks/attention_gpu.py measured.

python benchmarks/plot_attention.py benchmarks/results/attention_h200.json     # writes attention_h200.png beside it
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

COLOURS = {"ejkernel": "#2b6cb0", "jax.nn xla": "#cbd5e0", "jax.nn cudnn": "#a0aec0"}


def colour(name):
    return next((c for prefix, c in COLOURS.items() if name.startswith(prefix)), "#718096")


def main(path):
    result = json.loads(path.read_text())
    rows = [row for row in result["rows"] if "failed" not in row]
    cells = list(dict.fromkeys((r["head_dim"], r["length"], r["causal"]) for r in rows))
    names = list(dict.fromkeys(r["implementation"] for r in rows))
    figure, axes = plt.subplots(2, 1, figsize=(12, 7), sharex=True, constrained_layout=True)
    for axis, key, title in ((axes[0], "forward_tflops", "forward"), (axes[1], "backward_tflops", "backward")):
        for number, name in enumerate(names):
            heights = {(r["head_dim"], r["length"], r["causal"]): r[key] for r in rows if r["implementation"] == name}
            places = [i + (number - (len(names) - 1) / 2) * 0.8 / len(names) for i in range(len(cells))]
            values = [heights.get(cell, 0) for cell in cells]
            bars = axis.bar(places, values, 0.8 / len(names), label=name, color=colour(name))
            axis.bar_label(bars, [f"{v:.0f}" if v else "" for v in values], fontsize=7, padding=1)
        axis.set_ylabel("TFLOP/s")
        axis.set_title(title, loc="left", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, ncols=len(names), loc="lower right", bbox_to_anchor=(1, 1))
    labels = [f"{dim}\n{length // 1024}k\n{'causal' if causal else 'full'}" for dim, length, causal in cells]
    axes[1].set_xticks(range(len(cells)), labels)
    axes[1].set_xlabel("head dim, length, mask (16,384 tokens, heads × head dim = 2048, bfloat16)")
    figure.suptitle(f"{result['device']}, jax {result['versions']['jax']}", x=0.01, ha="left", fontweight="bold")
    figure.savefig(path.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
