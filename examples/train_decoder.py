"""Training a small decoder with ejkernel's attention: packed documents, windows, several devices.

Trains on the docstrings of Python's standard library, in some two minutes of two cores, prints what the model writes, and
draws the loss. More than one attention: the same run with each of them.

    python examples/train_decoder.py --attention ejkernel jax.nn --out lab-figures

On a GPU `--model 350m` trains a model of 360 million parameters on the library's sources, in bfloat16 and rows of 8192
tokens, and reports tokens a second and the share of the chip's peak that the model's operations make up:

    python examples/train_decoder.py --model 350m --steps 20 --attention ejkernel jax.nn tokamax --out lab-figures

All of the devices share a batch's rows; `--ring N` spreads each row over N of them. Without accelerators,
XLA_FLAGS=--xla_force_host_platform_device_count=4 simulates four devices.
"""

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import packed_text
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from small_decoder import Model, at_least, embedded, layer, logits_of, progress, weights_of

from ejkernel import EjkernelError, flash_attention, ring_attention, ring_shard
from ejkernel.callib.chips import identify
from ejkernel.lab.extras import need
from ejkernel.lab.files import can_write, picture, put

optax = need("optax", "training")


@dataclass(frozen=True)
class Recipe:
    """A model and how it is trained."""

    model: Model
    window: int  # how far back a token sees in every other layer, the first among them
    rows: int  # of a batch
    length: int  # of a row, in tokens
    steps: int
    rate: float
    documents: str
    tokens: int  # how many the tokenizer knows; the model may have room for more
    samples: bool = True  # whether so few steps leave something to read


RECIPES = {
    "small": Recipe(
        Model(vocabulary=1024, width=128, layers=4, heads=4, kv_heads=2, head_dim=32, hidden=384),
        window=64,
        rows=4,
        length=512,
        steps=600,
        rate=8e-3,
        documents="docstrings",
        tokens=1024,
    ),
    "350m": Recipe(
        Model(32768, width=1024, layers=24, heads=8, kv_heads=2, head_dim=128, hidden=3584, dtype="bfloat16"),
        window=1024,
        rows=8,
        length=8192,
        steps=50,
        rate=6e-4,
        documents="sources",
        tokens=1024,
        samples=False,
    ),
}
PROMPTS = ("Return the ", "Create a new ", "This module ", "Raise ")


# Attention: functions of a batch that return attend(query, key, value, window). Query is [rows, length, heads, head_dim], key
# and value have fewer heads; window is static, (left, 0) or None.


def packed(batch):
    """A row's documents are a batch of sequences of any length, one after the other: no padding, no mask."""

    def attend(q, k, v, window):
        def row(q, k, v, offsets):
            return flash_attention(
                q, k, v, causal=True, sliding_window=window, cum_seqlens_q=offsets, cum_seqlens_k=offsets
            )

        return jax.vmap(row)(q, k, v, batch["offsets"])

    return attend


def ring(batch, mesh):
    """Each device has a part of every row, and keys go round. Documents may cross devices, so they come as segment ids."""

    def attend(q, k, v, window):
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data", "ring"), out_specs=P("data", "ring"))
        def shard(q, k, v, document):
            return ring_attention(
                q, k, v, sliding_window=window, q_segment_ids=document, kv_segment_ids=document, layout="zigzag"
            )

        return shard(q, k, v, batch["document"])

    return attend


def masked(call, batch):
    """For libraries that do not know packed documents: they need a mask of length × length for each row."""
    same = batch["document"][:, None, :, None] == batch["document"][:, None, None, :]
    return lambda q, k, v, window: call(q, k, v, mask=same, is_causal=True, local_window_size=window)


def jax_nn(q, k, v, **arguments):
    # cuDNN has no float32.
    implementation = "cudnn" if jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16 else "xla"
    return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **arguments)


def tokamax(q, k, v, **arguments):
    from tokamax import dot_product_attention

    return dot_product_attention(q, k, v, **arguments)


def attention_of(name, batch, mesh):
    if name == "ejkernel":
        return ring(batch, mesh) if mesh.shape["ring"] > 1 else packed(batch)
    return masked({"jax.nn": jax_nn, "tokamax": tokamax}[name], batch)


# The model


def initial_weights(model, key):
    """As of `small_decoder`, in float32, the layers stacked in pairs: one with a window, one without."""
    weights = weights_of(replace(model, dtype="float32"), key)
    layers = weights["layers"]
    stacked = [jax.tree.map(lambda *x: jnp.stack(x), *layers[first::2]) for first in (0, 1)]
    return {"embedding": weights["embedding"], "layers": {"windowed": stacked[0], "full": stacked[1]}}


def forward(recipe, weights, batch, attend):
    """Logits ``[rows, length, vocabulary]``."""
    model = recipe.model
    weights = jax.tree.map(lambda w: w.astype(model.dtype), weights)

    # A scan over pairs keeps the windows static. A scan over layers works too, for flash_attention takes windows that are
    # traced; the ring and the other libraries do not.
    @functools.partial(jax.checkpoint, prevent_cse=False)  # a scan does not need the barriers
    def pair(x, own):
        for kind, window in (("windowed", (recipe.window, 0)), ("full", None)):
            x, _ = layer(model, own[kind], x, batch["positions"], lambda q, k, v, w=window: (attend(q, k, v, w), None))
        return x, None

    x, _ = jax.lax.scan(pair, embedded(model, weights, batch["tokens"]), weights["layers"])
    return logits_of(weights, x)


def loss_of(weights, recipe, batch, attend):
    """Nats a token."""
    logits = forward(recipe, weights, batch, attend)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def flops_of(recipe, offsets):
    """What has to be computed for rows with these documents: 2 operations for each weight and token, and 4 × head_dim for
    each head's pair of a query and a key that it sees; three times, for the gradients of both factors are as much again. What
    checkpointing repeats does not count."""
    model, sizes = recipe.model, np.diff(offsets).astype(np.int64)
    weights = jax.eval_shape(functools.partial(initial_weights, model), jax.random.key(0))
    matrices = sum(w.size for path, w in jax.tree.leaves_with_path(weights) if "norm" not in jax.tree_util.keystr(path))
    near = np.minimum(sizes, recipe.window + 1)
    pairs = (sizes * (sizes + 1) // 2).sum() + (near * (near + 1) // 2 + (sizes - near) * near).sum()
    attention = 4 * model.heads * model.head_dim * model.layers // 2 * int(pairs)
    return 3 * (2 * matrices * len(offsets) * recipe.length + attention)


# Training

# Steps before the time is taken: the first compiles, and in the second some libraries prepare more.
UNTIMED = 2


def optimizer_of(recipe):
    warm = min(40, recipe.steps // 4)
    rate = optax.warmup_cosine_decay_schedule(0.0, recipe.rate, warm, recipe.steps, recipe.rate / 20)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.05))


def mesh_of(devices, n):
    """Rows over the first axis, a row over the second."""
    if len(devices) % n:
        raise SystemExit(f"--ring {n}: {len(devices)} devices do not divide into rings of {n}")
    return Mesh(np.array(devices).reshape(-1, n), ("data", "ring"))


def spread(batch, mesh):
    """A batch on the devices. A ring holds a row in zigzag order, so that causality leaves all of them as much to do."""
    n = mesh.shape["ring"]
    arrays = {name: x if name == "offsets" else ring_shard(x, n, "zigzag") for name, x in batch.items()}
    by_row = {name: P("data") if name == "offsets" else P("data", "ring") for name in arrays}
    return {name: jax.device_put(x, NamedSharding(mesh, by_row[name])) for name, x in arrays.items()}


def step_of(recipe, attention, mesh):
    """``step((weights, moments), batch)`` → the same after a step of the optimizer, and the loss before it."""
    optimizer = optimizer_of(recipe)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=NamedSharding(mesh, P()))
    def step(state, batch):
        weights, moments = state
        attend = attention_of(attention, batch, mesh)
        loss, grads = jax.value_and_grad(loss_of)(weights, recipe, batch, attend)
        updates, moments = optimizer.update(grads, moments, weights)
        return (optax.apply_updates(weights, updates), moments), loss

    return step


def initial_state(recipe):
    weights = initial_weights(recipe.model, jax.random.key(0))
    return weights, optimizer_of(recipe).init(weights)


def trained(recipe, attention, documents, mesh):
    """Weights after all steps, and what the run was like."""
    batches = packed_text.batches_of(documents, recipe.rows, recipe.length)
    state = jax.jit(initial_state, static_argnums=0, out_shardings=NamedSharding(mesh, P()))(recipe)
    losses, offsets, begin = [], [], time.perf_counter()
    step = step_of(recipe, attention, mesh)
    progress(f"{attention}: compiling")
    for count in range(recipe.steps):
        batch = next(batches)
        state, loss = step(state, spread(batch, mesh))
        losses.append(loss)
        offsets.append(batch["offsets"])
        if count < UNTIMED:
            loss.block_until_ready()
            compiled, busy = time.perf_counter(), time.process_time()
            continue
        # Waiting for the loss of the step before leaves the devices with one to do, which does not count yet.
        last = float(losses[-2])
        rate = (count - UNTIMED) * recipe.rows * recipe.length / (time.perf_counter() - compiled)
        progress(f"{attention}: step {count + 1} of {recipe.steps}, {last:.2f} nats a token, {rate:,.0f} tokens/s")
    losses = [round(float(loss), 5) for loss in losses]
    seconds, busy = time.perf_counter() - compiled, time.process_time() - busy
    print()
    timed = recipe.steps - UNTIMED
    flops = flops_of(recipe, np.concatenate(offsets)) * timed / recipe.steps
    chip = identify(mesh.devices.flat[0].device_kind)
    peak = chip and chip.flops(recipe.model.dtype)
    return state[0], {
        "losses": losses,
        "compile_seconds": compiled - begin,
        "seconds": seconds,  # without the first two steps, and so what follows
        "cpu_seconds": busy,  # of all cores; on a CPU that others use too, this is what can be compared
        "tokens_per_second": timed * recipe.rows * recipe.length / seconds,
        "model_flops_per_second": flops / seconds,
        "model_flops_utilisation": flops / seconds / (peak * mesh.size) if peak else None,
    }


# What the model writes


@functools.partial(jax.jit, static_argnums=0)
def continued(recipe, weights, tokens, sizes, key):
    """Rows ``[N, T]`` of which ``sizes`` tokens are given, and the rest is drawn."""
    rows, length = tokens.shape
    batch = {
        "positions": jnp.broadcast_to(jnp.arange(length), tokens.shape),
        "offsets": jnp.broadcast_to(jnp.array([0, length]), (rows, 2)),
    }

    def draw(at, tokens):
        logits = forward(recipe, weights, {"tokens": tokens, **batch}, packed(batch))[:, at - 1]
        drawn = jax.random.categorical(jax.random.fold_in(key, at), logits / 0.7)
        return tokens.at[:, at].set(jnp.where(at < sizes, tokens[:, at], drawn))

    return jax.lax.fori_loop(1, length, draw, tokens)


def samples_of(recipe, weights, tokenizer, length=96):
    """The prompts with what follows them, up to a document's end."""
    prompts = [[packed_text.START, *tokenizer.encode(prompt)] for prompt in PROMPTS]
    tokens = np.array([prompt + [0] * (length - len(prompt)) for prompt in prompts])
    rows = continued(recipe, weights, tokens, np.array([*map(len, prompts)]), jax.random.key(1))
    texts = [tokenizer.decode([t for t in row[1:].tolist() if t < recipe.tokens]) for row in np.asarray(rows)]
    return [text.partition("\0")[0] for text in texts]


# One command for all


def drawn(runs, recipe):
    """A figure: loss over steps, a line for each attention; where the chip's peak is known, how fast each was too."""
    plt = need("matplotlib.pyplot", "the plot of the loss")
    shares = {name: run["model_flops_utilisation"] for name, run in runs.items()}
    fast = all(shares.values())
    figure, axes = plt.subplots(
        ncols=1 + fast, squeeze=False, figsize=(8, 3.6), layout="constrained", width_ratios=[2, 1][: 1 + fast]
    )
    axis = axes[0, 0]
    looks = {"ejkernel": ("#f5b08a", "-", 3), "jax.nn": ("#1e293b", "--", 1), "tokamax": ("#84a59d", ":", 1.6)}
    if fast:
        rates = [run["tokens_per_second"] / 1e3 for run in runs.values()]
        bars = axes[0, 1].bar([*runs], rates, color=[looks[name][0] for name in runs])
        labels = [f"{rate:,.0f}\n{shares[name]:.0%} of peak" for name, rate in zip(runs, rates, strict=True)]
        axes[0, 1].bar_label(bars, labels, fontsize=8)
        axes[0, 1].set_ylabel("thousand tokens a second")
        axes[0, 1].margins(y=0.2)
        axes[0, 1].spines[["top", "right"]].set_visible(False)
    for name, run in runs.items():
        color, style, width = looks[name]
        axis.plot(range(1, recipe.steps + 1), run["losses"], style, color=color, linewidth=width, label=name)
    axis.set_xlabel(f"steps of {recipe.rows} × {recipe.length} tokens")
    axis.set_ylabel("loss, nats a token")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def about(recipe, mesh):
    """What was run, where and when."""
    versions = {}
    for package in ("jax", "jaxlib", "numpy", "optax", "tokamax"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    weights = jax.eval_shape(functools.partial(initial_weights, recipe.model), jax.random.key(0))
    return {
        "script": "examples/train_decoder.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), **versions},
        "device": mesh.devices.flat[0].device_kind,
        "mesh": dict(mesh.shape),
        "load_average": os.getloadavg()[0],
        "recipe": asdict(recipe),
        "parameters": sum(w.size for w in jax.tree.leaves(weights)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("lab-figures"))
    parser.add_argument("--model", choices=RECIPES, default="small")
    parser.add_argument("--attention", nargs="+", choices=("ejkernel", "jax.nn", "tokamax"), default=["ejkernel"])
    parser.add_argument("--ring", type=at_least(1), default=1, metavar="N", help="how many devices share a row")
    parser.add_argument(
        "--steps", type=at_least(UNTIMED + 1), metavar="N", help=f"instead of the recipe's; {UNTIMED} are not timed"
    )
    options = parser.parse_args()
    recipe = RECIPES[options.model]
    recipe = replace(recipe, steps=options.steps or recipe.steps)
    if options.ring > 1 and options.attention != ["ejkernel"]:
        raise SystemExit("--ring is ejkernel's alone: leave out --attention")
    mesh = mesh_of(jax.local_devices(), options.ring)
    if recipe.rows % mesh.shape["data"]:
        raise SystemExit(
            f"{recipe.rows} rows do not divide over {mesh.shape['data']} devices: --ring gives each row several"
        )
    name = "train_decoder" if options.model == "small" else f"train_decoder_{options.model}"
    can_write(options.out / f"{name}.json", "--out")
    texts = getattr(packed_text, recipe.documents)()
    tokenizer = packed_text.Tokenizer(texts, recipe.tokens)
    documents = [tokenizer.encode(text) for text in texts]
    result, failed = {**about(recipe, mesh), "runs": {}}, {}
    for attention in options.attention:
        try:
            weights, run = trained(recipe, attention, documents, mesh)
            if recipe.samples:
                run["samples"] = samples_of(recipe, jax.device_get(weights), tokenizer)
            del weights  # room for the next
        except Exception as error:  # a library that is missing, or cannot do this, leaves the others to be measured
            failed[attention] = f"{type(error).__name__}: {error}"
            print(f"\n{attention} failed: {failed[attention]}")
        else:
            result["runs"][attention] = run
            share = run["model_flops_utilisation"]
            rates = f"{run['tokens_per_second']:,.0f} tokens/s, {run['model_flops_per_second'] / 1e9:,.0f} GFLOP/s"
            print(rates + (f", {share:.1%} of the peak" if share else ""))
            print(*run.get("samples", ()), sep="\n" + "-" * 40 + "\n", end="\n\n")
        # After each, so that one that takes too long does not cost what was measured before.
        written = {f"{name}.json": json.dumps({**result, "failed": failed}, indent=1).encode()}
        if result["runs"]:
            written[f"{name}.png"] = picture(drawn(result["runs"], recipe), dpi=130)
        put(options.out, written)
    return bool(failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EjkernelError as error:
        sys.exit(f"error: {error}")
