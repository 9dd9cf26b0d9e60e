"""Gemma-3-270m with random weights: what prefill costs, and a decoded token with a KV cache and without.

Measures latency and memory over sequence lengths, checks that both ways of decoding agree, and writes
`gemma3_prefill_decode.png` and `.json`. On a CPU it takes the first 6 of the 18 layers, one of them with full
attention.
"""

import argparse
import copy
import json
import sys
import time
from pathlib import Path

from ejkernel import lab
from ejkernel.errors import EjkernelError
from ejkernel.lab.extras import need
from ejkernel.lab.files import can_write, picture, put
from ejkernel.lab.report import machine


class Gemma:
    """The first decoder layers of Gemma-3-270m."""

    def __init__(self, layers, dtype, device):
        gemma3 = need("transformers.models.gemma3.modeling_gemma3", "Gemma 3")
        self.config = copy.deepcopy(lab.GEMMA3_270M_CONFIG)
        self.config._attn_implementation = "sdpa"
        self.like = self.config.hidden_size, dtype, device
        self.layers = [gemma3.Gemma3DecoderLayer(self.config, i).to(device, dtype).eval() for i in range(layers)]
        self.rotary_emb = gemma3.Gemma3RotaryEmbedding(self.config).to(device)

    def run(self, forward, states, positions, *rest):
        """`forward` through all layers."""
        types = set(self.config.layer_types)
        embeddings = {kind: lab.get_position_embeddings(states, positions, self.rotary_emb, kind) for kind in types}
        positions = positions.cpu()  # every layer looks at them: once is enough to wait for the device
        for layer in self.layers:
            states = forward(layer, states, positions, embeddings, *rest)
        return states[:, -1:]


def study(torch, model, length, repeats):
    """Time, memory and agreement at one sequence length."""
    token, positions, before = lab.create_decode_inputs_without_cache(1, length, *model.like)
    cache = lab.initialize_kv_cache(model.config, length + repeats + 4)

    def decode():
        at = torch.tensor([cache.get_seq_length()])  # the next one at each call, as in generation
        return model.run(lab.decode_forward, token, at[None].to(token.device), True, cache, at, None)

    def again(layer, states, *rest):  # all tokens go from layer to layer, the last of them the new one
        return lab.decode_forward(layer, states[:, -1:], *rest, False, None, None, states[:, :-1])

    calls = {
        "with": decode,
        "without": lambda: model.run(again, torch.cat([before, token], 1), positions),
        "prefill": lambda: model.run(lab.prefill_forward, before, positions[:, :-1], cache),
    }
    calls["prefill"]()
    expected = calls["without"]()
    row = {"seq_len": length, "error": float((decode() - expected).norm() / expected.norm())}
    for way, call in calls.items():
        row[f"{way}_ms"] = lab.benchmark_latency(call, n_warmup=1, n_repeat=repeats)
        row[f"{way}_gb"] = lab.benchmark_memory(call, n_warmup=1, n_repeat=1)[0]
    return row | {"gain": row["without_ms"] / row["with_ms"]}


def drawn(rows, title, weights):
    """A figure: latency and memory over the lengths."""
    need("matplotlib", "the figure").use("agg")
    lab.set_style()
    plt, lengths = need("matplotlib.pyplot", "the figure"), [row["seq_len"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    ways = {"prefill": "prefill, all tokens", "without": "decode without cache", "with": "decode with KV cache"}
    for (way, label), marker in zip(ways.items(), "so^", strict=True):
        left.plot(lengths, [row[f"{way}_ms"] for row in rows], marker=marker, label=label)
        right.plot(lengths, [1024 * (row[f"{way}_gb"] - weights) for row in rows], marker=marker, label=label)
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set(xlabel="Tokens before", xticks=lengths, xticklabels=lengths)
        ax.grid()
    left.set(title="Latency", ylabel="ms", yscale="log")
    for which in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
        which("{x:g}")
    right.set(title="Peak memory beside the weights", ylabel="MB", ylim=(0, None))
    right.legend()
    gain, at = f"×{rows[-1]['gain']:.0f} faster", (lengths[-1], rows[-1]["with_ms"])
    left.annotate(gain, at, (0, -18), textcoords="offset points", ha="right")
    figure.suptitle(title)
    return figure


def main():
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("lab-figures"), help="folder for the figure and the numbers")
    path, torch = parser.parse_args().out / "gemma3_prefill_decode", need("torch", "this example")
    can_write(path.with_suffix(".json"), "--out")
    gpu, began, rows = torch.cuda.is_available(), time.perf_counter(), []
    device, dtype, bound = ("cuda", torch.bfloat16, 0.05) if gpu else ("cpu", torch.float32, 1e-4)
    layers, lengths, repeats = (18, range(8, 15), 20) if gpu else (6, range(6, 11), 3)
    model = Gemma(layers, dtype, device)
    weights = lab.benchmark_memory(torch.empty(1, device=device).clone, n_warmup=1, n_repeat=1)[1]
    where = torch.cuda.get_device_name() if gpu else f"CPU with {torch.get_num_threads()} threads"
    title = f"Gemma-3-270m, {layers} of 18 layers, batch 1, {dtype}, {where}".replace("torch.", "")
    columns = {"seq_len": "", "prefill_ms": ".2f", "without_ms": ".2f", "with_ms": ".2f", "gain": ".1f", "error": ".1e"}
    print(title, "".join(f"{name:>12}" for name in columns), sep="\n")
    for length in (2**exponent for exponent in lengths):
        print(f"{length:>12} … after {time.perf_counter() - began:.0f} s", end="\r", file=sys.stderr, flush=True)
        with torch.no_grad():
            rows.append(study(torch, model, length, repeats))
        print("".join(f"{rows[-1][name]:>12{form}}" for name, form in columns.items()), flush=True)
    here = machine()
    about = {"script": "examples/gemma3_prefill_decode.py", "date": here["measured_at"][:10], "device": where}
    about |= {"versions": here["versions"], "title": title}
    result = json.dumps({**about, "weights_gb": weights, "rows": rows}, indent=2)
    picture_of = picture(drawn(rows, title, weights))
    put(path.parent, {f"{path.name}.json": result.encode(), f"{path.name}.png": picture_of})
    print(f"wrote {path}.png and .json after {time.perf_counter() - began:.0f} s")
    if not all(row["error"] < bound for row in rows):
        sys.exit(f"error: decoding with and without the cache differ by more than {bound}")


if __name__ == "__main__":
    try:
        main()
    except (EjkernelError, OSError) as error:
        sys.exit(f"error: {error}")
