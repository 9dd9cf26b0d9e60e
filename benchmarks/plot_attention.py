"""Draw what benchmarks/attention_gpu.py measured.

python benchmarks/plot_attention.py benchmarks/results/attention_h200.json

Beside the file: attention_h200.png, TFLOP/s of each cell, and attention_h200_features.png, what features cost.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Ours strong, peers muted; a name that is not here gets a grey.
COLOURS = {
    "ejkernel": "#c2410c",
    "ejkernel nondeterministic": "#ea9a7a",
    "ejkernel triton": "#f59e0b",
    "ejkernel pallas": "#15803d",
    "ejkernel cudnn": "#7c3aed",
    "ejkernel xla": "#db2777",
    "FlashAttention-4": "#475569",
    "jax.nn cudnn": "#64748b",
    "tokamax mosaic_gpu": "#84a59d",
    "tokamax triton": "#b7c9c3",
    "torch FA2": "#a8b3c5",
    "torch flex": "#cbb9a8",
    "upstream triton": "#d9dde3",
}
LABELS = {
    "ejkernel": "ejkernel",
    "ejkernel nondeterministic": "ejkernel, bits may differ",
    "jax.nn cudnn": "jax.nn (cuDNN)",
    "tokamax mosaic_gpu": "tokamax (Mosaic)",
    "tokamax triton": "tokamax (Triton)",
    "ejkernel triton": "ejkernel, Triton",
    "ejkernel pallas": "ejkernel, Pallas",
    "ejkernel cudnn": "ejkernel, cuDNN",
    "ejkernel xla": "ejkernel, XLA",
    "torch FA2": "FlashAttention-2 (torch)",
    "torch flex": "flex_attention (torch)",
    "upstream triton": "upstream ejkernel (Triton)",
}


def ordered(names):
    """As the colours are listed, the unknown last."""
    known = list(COLOURS)
    return sorted(dict.fromkeys(names), key=lambda name: known.index(name) if name in known else len(known))


def title(figure, result, words):
    jax_version = result["versions"].get("ejkernel", {}).get("jax", "")
    figure.suptitle(f"{words}: {result.get('device', '')}, jax {jax_version}", x=0.01, ha="left", fontweight="bold")


def tidy(axis):
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axis.set_axisbelow(True)


def groups(axis, places, names, heights, label, rotation=90):
    """Bars side by side at each place, only as many as there are; ``heights(name, place)`` may be None."""
    for number, place in enumerate(places):
        here = [(name, heights(name, place)) for name in names]
        here = [(name, height) for name, height in here if height is not None]
        width = 0.86 / max(1, len(names))
        for i, (name, height) in enumerate(here):
            x = number + (i - (len(here) - 1) / 2) * width
            ours = name.startswith("ejkernel")
            axis.bar(x, height, width * 0.94, color=COLOURS.get(name, "#9ca3af"))
            axis.annotate(
                label(height), (x, height), (0, 2), textcoords="offset points", ha="center", va="bottom", rotation=rotation,
                fontsize=8, color="#111827" if ours else "#6b7280", fontweight="bold" if ours else "normal",
            )  # fmt: skip


def legend(axis, names, columns):
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS.get(name, "#9ca3af")) for name in names]
    labels = [LABELS.get(name, name) for name in names]
    axis.legend(handles, labels, frameon=False, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1.08), fontsize=10)


def draw_cells(result, path):
    rows = [row for row in result.get("cells", []) if "forward_tflops" in row]
    if not rows:
        return
    cells = sorted({(row["head_dim"], row["length"], row["causal"]) for row in rows})
    names = ordered(row["implementation"] for row in rows)
    found = {(row["implementation"], row["head_dim"], row["length"], row["causal"]): row for row in rows}
    width = 3 + max(8, 0.155 * len(names) * len(cells))
    figure, axes = plt.subplots(2, 1, figsize=(width, 10), sharex=True, constrained_layout=True)
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        key = f"{direction}_tflops"
        groups(axis, cells, names, lambda n, c, key=key: found.get((n, *c), {}).get(key), lambda h: f"{h:.0f}")
        axis.set_ylabel("TFLOP/s")
        axis.set_title(direction, loc="left", fontsize=12)
        axis.set_ylim(0, 1.12 * max(row.get(key, 0) for row in rows) or 1)
        tidy(axis)
    legend(axes[0], names, min(6, len(names)))
    words = [f"{dim}, {length // 1024}k\n{'causal' if causal else 'full'}" for dim, length, causal in cells]
    axes[1].set_xticks(range(len(cells)), words, fontsize=11)
    axes[1].set_xlim(-0.5, len(cells) - 0.5)
    axes[1].set_xlabel("head dim, length, mask (16,384 tokens, heads × head dim = 2048, bfloat16)")
    title(figure, result, "Attention")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_features(result, path):
    rows = [row for row in result.get("features", []) if "both_ratio" in row]
    if not rows:
        return
    features = list(dict.fromkeys(row["feature"] for row in rows))
    names = ordered(row["implementation"] for row in rows)
    found = {(row["implementation"], row["feature"]): row["both_ratio"] for row in rows}
    figure, axis = plt.subplots(figsize=(11, 4.6), constrained_layout=True)
    groups(axis, features, names, lambda n, f: found.get((n, f)), lambda h: f"{h:.2f}", rotation=0)
    axis.axhline(1, color="#374151", linewidth=1, linestyle="--")
    axis.set_ylabel("× the plain call's time")
    axis.set_ylim(0, 1.15 * max(found.values()))
    axis.set_xticks(range(len(features)), [f.replace(", ", ",\n") for f in features], fontsize=9)
    tidy(axis)
    legend(axis, names, len(names))
    plain = [
        f"{LABELS.get(r['implementation'], r['implementation'])} {r['both_ms']:.2f} ms"
        for r in rows
        if r["feature"] == "plain"
    ]
    axis.set_xlabel(
        f"forward and backward, batch 2 × 8192, 16 heads × 128, causal, bfloat16; plain: {', '.join(plain)}"
    )
    title(figure, result, "What features cost")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(path):
    result = json.loads(path.read_text())
    draw_cells(result, path.with_suffix(".png"))
    draw_features(result, path.with_name(f"{path.stem}_features.png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
