"""Draw what benchmarks/page_attention_gpu.py measured.

python benchmarks/plot_pages.py benchmarks/results/page_attention_h200.json

Beside the file: page_attention_h200.png, decoding in bytes of keys and values over time, and prompts in milliseconds.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Ours strong, peers muted.
COLOURS = {
    "ejkernel": "#c2410c",
    "FlashAttention-4": "#475569",
    "FlashAttention-4 dense": "#a8b3c5",
    "jax Pallas": "#84a59d",
    "ejkernel xla": "#e7b9a5",
}
LABELS = {
    "FlashAttention-4": "FlashAttention-4 (torch), same pages",
    "FlashAttention-4 dense": "FlashAttention-4 (torch), dense cache",
    "jax Pallas": "jax Pallas, same pages",
    "ejkernel xla": "ejkernel, XLA",
}
DECODING = ("decode", "long", "group", "random", "narrow", "dense")
PROMPTS = ("prefill", "mixed")


def bars(axis, rows, figure, form):
    """One group of bars a call, one bar an implementation."""
    calls = list(dict.fromkeys(row["call"] for row in rows))
    y, middles = 0.0, []
    for call in calls:
        own = {row["implementation"]: row[figure] for row in rows if row["call"] == call}
        names = [name for name in COLOURS if name in own]
        middles.append(y + (len(names) - 1) / 2)
        for name in names:
            axis.barh(y, own[name], 0.9, color=COLOURS[name])
            axis.text(own[name], y, f" {own[name]:{form}}", va="center", fontsize=6.5, color="#334155")
            y += 1
        y += 0.8
    axis.set_yticks(middles, calls, fontsize=8)
    axis.set_ylim(y - 0.8, -1)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="x", labelsize=8)
    axis.margins(x=0.08)


def main(path):
    result = json.loads(path.read_text())
    decoding, prompts = (
        [row for row in result["rows"] if row["part"] in parts] for parts in (DECODING, PROMPTS)
    )  # fmt: skip
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 11), height_ratios=(11, 4), layout="constrained")
    bars(above, decoding, "terabytes_per_second", ".2f")
    above.set_title(
        f"Decoding on an {result['device']}, bfloat16 unless said, 32/8 heads × 128", fontsize=10, loc="left"
    )
    above.set_xlabel("keys and values read, TB/s (more is better)", fontsize=8)
    bars(below, prompts, "ms", ".2f")
    below.set_xscale("log")
    below.set_xticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
    below.minorticks_off()
    below.set_xlim(left=0.2)
    below.set_title("Prompts in chunks, alone and beside decoding", fontsize=10, loc="left")
    below.set_xlabel("ms (less is better)", fontsize=8)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(
        handles, [LABELS.get(n, n) for n in COLOURS], loc="outside lower center", ncols=3, fontsize=7.5, frameon=False
    )
    figure.savefig(path.with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
