"""Serving a small decoder from a paged KV cache: continuous batching, chunked prefill and decoding in one call.

Trains a byte-level decoder on this repository's own pages (about a minute on two cores), then serves requests that arrive
and leave at different times. Every step takes at most `BUDGET` tokens: one for each sequence that is being decoded, the rest
from prompts that wait. Pages are allocated when a sequence grows and freed when it ends. At the end every generated token is
compared with the most likely one of a forward pass over the whole text. Writes `serve_paged.png` and `.json`:

    python examples/serve_paged.py --out lab-figures

On a GPU, `--llama` serves instead a stack of layers of Llama 3 8B's shape with random weights: tokens a second at batch 64,
beside what reading weights and cache once for each step allows.
"""

import argparse
import collections
import functools
import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from small_decoder import Model, at_least, embedded, layer, logits_of, progress, weights_of

from ejkernel import EjkernelError, flash_attention, page_attention, page_update
from ejkernel.lab.extras import need
from ejkernel.lab.files import can_write, picture, put

ROOT = Path(__file__).resolve().parents[1]


LLAMA = Model(128256, 4096, 32, 32, 8, 128, 14336, "bfloat16")


def empty_caches(model, pages, page):
    """Keys and values of all layers, donated to every step, which updates them in place."""
    shape = (pages, model.kv_heads, page, model.head_dim)
    return [(jnp.zeros(shape, model.dtype), jnp.zeros(shape, model.dtype)) for _ in range(model.layers)]


def decoder(model, weights, tokens, positions, attend, caches=None):
    """Logits of tokens ``[…, T]``. ``attend(q, k, v, cache)`` gives the attention's output and the layer's cache."""
    x, updated = embedded(model, weights, tokens), []
    # A loop over layers, not a scan: stacked weights would be copied on a GPU.
    for own, cache in zip(weights["layers"], caches or [None] * model.layers, strict=True):
        x, cache = layer(model, own, x, positions, functools.partial(attend, cache=cache))
        updated.append(cache)
    return logits_of(weights, x), updated


def dense(q, k, v, cache):
    """Attention over a whole text: for training, and to check what was served."""
    return flash_attention(q, k, v, causal=True), cache


# Training


def text_of_the_repository():
    pages = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
    kept = [
        line for page in pages for line in page.read_text(encoding="utf-8").splitlines() if not line.startswith("|")
    ]
    return np.frombuffer("\n".join(kept).encode(), np.uint8)


def trained(model, seconds, length=192, batch=8):
    """Weights after training for so long, and the loss at the end."""
    text, rng = text_of_the_repository(), np.random.default_rng(0)
    weights = weights_of(model, jax.random.key(0))
    moments = (jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights))

    def loss(weights, rows):
        positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
        logits, _ = decoder(model, weights, rows[:, :-1], positions, dense)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], -1).mean()

    @jax.jit
    def step(weights, moments, rows, count, rate):
        """Adam, with the rate given."""
        value, grads = jax.value_and_grad(loss)(weights, rows)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
        second = jax.tree.map(lambda m, g: 0.98 * m + 0.02 * g * g, moments[1], grads)
        scale = rate * jnp.sqrt(1 - 0.98**count) / (1 - 0.9**count)
        weights = jax.tree.map(lambda w, m, s: w - scale * m / (jnp.sqrt(s) + 1e-8), weights, first, second)
        return weights, (first, second), value

    begin, count, smooth = time.time(), 0, math.log(model.vocabulary)
    while (spent := time.time() - begin) < seconds or count < 20:
        starts = rng.integers(0, text.size - length - 1, batch)
        rows = jnp.asarray(np.stack([text[s : s + length + 1] for s in starts]), jnp.int32)
        count += 1
        rate = 3e-3 * min(1.0, count / 30) * max(0.05, 1 - spent / max(seconds, 1e-3))
        weights, moments, value = step(weights, moments, rows, float(count), rate)
        smooth += (float(value) - smooth) * min(1.0, 0.05 + 1 / count)
        progress(f"training: step {count}, {spent:.0f} of {seconds:.0f} s, {smooth:.2f} nats a byte")
    print()
    return weights, smooth


# Serving


@dataclass
class Request:
    """A prompt that arrives at a step, and how many tokens it wants."""

    prompt: list[int]
    wanted: int
    arrives: int
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def text(self):
        return [*self.prompt, *self.tokens]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def serve_step(model, weights, caches, tokens, positions, offsets, lens, tables):
    """One step for all sequences: the most likely next token after each sequence's last one, and the caches."""

    def attend(q, k, v, cache):
        cache = page_update(*cache, k, v, lens, tables, cum_seqlens_q=offsets)
        return page_attention(q, *cache, lens, tables, cum_seqlens_q=offsets), cache

    logits, caches = decoder(model, weights, tokens, positions, attend, caches)
    last = jnp.clip(offsets[1:] - 1, 0, tokens.shape[0] - 1)
    return jnp.argmax(logits[last], -1), caches


class Server:
    """Continuous batching: slots for sequences, a pool of pages, a budget of tokens a step."""

    def __init__(self, model, weights, *, slots=8, budget=64, page=16, longest=256, pages=None):
        self.model, self.weights = model, weights
        self.slots: list[Request | None] = [None] * slots
        self.budget, self.page, self.per_sequence = budget, page, -(-longest // page)
        count = pages or slots * self.per_sequence * 3 // 4
        self.free = collections.deque(range(count))
        self.caches = empty_caches(model, count, page)
        self.waiting: collections.deque[Request] = collections.deque()
        self.history: list[dict] = []

    def pages_for(self, tokens):
        return -(-tokens // self.page)

    def admit(self):
        """Waiting requests take empty slots while the pages that all may need are there."""
        promised = sum(self.pages_for(len(r.prompt) + r.wanted) - len(r.pages) for r in self.slots if r)
        for index, occupant in enumerate(self.slots):
            if occupant is None and self.waiting:
                need_ = self.pages_for(len(self.waiting[0].prompt) + self.waiting[0].wanted)
                if promised + need_ > len(self.free):
                    return
                promised += need_
                self.slots[index] = self.waiting.popleft()

    def plan(self):
        """How many tokens of each slot are computed: decoding first, then prompts, as far as the budget goes."""
        left = [len(r.text) - r.cached if r else 0 for r in self.slots]
        counts = [min(n, 1) if n == 1 else 0 for n in left]
        room = self.budget - sum(counts)
        for index, n in enumerate(left):
            if n > 1:
                counts[index] = min(n, room)
                room -= counts[index]
        return counts

    def step(self):
        """One call of the model; what ends gives its pages back."""
        begin = time.perf_counter()
        self.admit()
        counts = self.plan()
        tokens, positions = np.zeros(self.budget, np.int32), np.zeros(self.budget, np.int32)
        offsets = np.cumsum([0, *counts]).astype(np.int32)
        lens = np.zeros(len(self.slots), np.int32)
        tables = np.full((len(self.slots), self.per_sequence), -1, np.int32)
        for index, (request, n) in enumerate(zip(self.slots, counts, strict=True)):
            if request is None or n == 0:
                continue
            end = request.cached + n
            while len(request.pages) < self.pages_for(end):
                request.pages.append(self.free.popleft())
            at = slice(offsets[index], offsets[index + 1])
            tokens[at], positions[at] = request.text[request.cached : end], np.arange(request.cached, end)
            lens[index], tables[index, : len(request.pages)] = end, request.pages
        chosen, self.caches = serve_step(
            self.model, self.weights, self.caches, *map(jnp.asarray, (tokens, positions, offsets, lens, tables))
        )
        chosen = np.asarray(chosen)
        decoded = 0
        for index, (request, n) in enumerate(zip(self.slots, counts, strict=True)):
            if request is None or n == 0:
                continue
            request.cached += n
            if request.cached == len(request.text):
                request.tokens.append(int(chosen[index]))
                decoded += 1
                if len(request.tokens) == request.wanted:
                    self.free.extend(request.pages)
                    request.pages = []
                    self.slots[index] = None
        self.history.append(
            {
                "sequences": sum(n > 0 for n in counts),
                "tokens": sum(counts),
                "decoded": decoded,
                "free_pages": len(self.free),
                "seconds": time.perf_counter() - begin,
            }
        )


def requests_from(text, count, seed=1):
    """Beginnings of paragraphs of different lengths, arriving a few steps apart."""
    rng = np.random.default_rng(seed)
    found, step = [], 0
    for _ in range(count):
        start = int(rng.integers(0, text.size - 400))
        start += int(np.argmax(text[start : start + 200] == 10)) + 1
        length = int(rng.integers(12, 120))
        found.append(Request(text[start : start + length].tolist(), int(rng.integers(24, 80)), step))
        step += int(rng.poisson(4))
    return found


def serve(server, requests):
    """Until all requests are done."""
    todo, step = collections.deque(requests), 0
    while todo or server.waiting or any(server.slots):
        while todo and todo[0].arrives <= step:
            server.waiting.append(todo.popleft())
        if server.waiting or any(server.slots):
            server.step()
            recent = server.history[-20:]
            rate = sum(h["tokens"] for h in recent) / sum(h["seconds"] for h in recent)
            done = sum(len(r.tokens) == r.wanted for r in requests)
            progress(f"serving: {done} of {len(requests)} requests done, step {step}, {rate:.0f} tokens/s")
        step += 1
    print()


def check(model, weights, requests):
    """Every generated token is the most likely one of a forward pass over all that precedes it."""
    longest = max(len(r.text) for r in requests)
    forward = jax.jit(lambda row: decoder(model, weights, row[None], jnp.arange(longest)[None], dense)[0][0])
    for request in requests:
        row = np.zeros(longest, np.int32)
        row[: len(request.text)] = request.text
        expected = np.asarray(forward(jnp.asarray(row))).argmax(-1)
        first = len(request.prompt) - 1
        if (found := expected[first : first + request.wanted].tolist()) != request.tokens:
            wrong = next(i for i, (a, b) in enumerate(zip(found, request.tokens, strict=True)) if a != b)
            raise SystemExit(f"token {wrong} of a request is {request.tokens[wrong]}, recomputed it is {found[wrong]}")


def drawn(history, slots):
    """A figure: occupancy and throughput over steps."""
    plt = need("matplotlib.pyplot", "the plot of a served batch")
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
    steps = np.arange(len(history))
    decoded = np.array([h["decoded"] for h in history])
    total = np.array([h["tokens"] for h in history])
    above.fill_between(steps, [h["sequences"] for h in history], step="mid", color="#cbd5e1", linewidth=0)
    above.set_ylabel(f"sequences of {slots}")
    above.set_title(
        "A batch over its life: sequences come and go, prompts fill the rest of each step", loc="left", fontsize=10
    )
    below.bar(steps, decoded, 1.0, color="#c2410c", label="decoded")
    below.bar(steps, total - decoded, 1.0, bottom=decoded, color="#f5c9b0", label="of prompts")
    below.set_ylabel("tokens a step")
    below.set_xlabel("step")
    below.legend(frameon=False, fontsize=8)
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    return figure


# A large stack


def llama(layers, batch, context, steps, page=64):
    """Tokens a second of decoding with layers of Llama 3 8B's shape, beside the roof of its memory."""
    from ejkernel.callib.chips import identify

    model = Model(**{**LLAMA.__dict__, "layers": layers})
    weights = weights_of(model, jax.random.key(0))
    pages = batch * -(-(context + 1) // page)
    caches = empty_caches(model, pages, page)
    tables = jnp.asarray(np.random.default_rng(0).permutation(pages).reshape(batch, -1), jnp.int32)
    lens = jnp.full(batch, context, jnp.int32)
    tokens, offsets = jnp.zeros(batch, jnp.int32), jnp.arange(batch + 1, dtype=jnp.int32)
    tokens, caches = serve_step(model, weights, caches, tokens, lens - 1, offsets, lens, tables)
    begin = time.perf_counter()
    for _ in range(steps):
        tokens, caches = serve_step(model, weights, caches, tokens, lens - 1, offsets, lens, tables)
    tokens.block_until_ready()
    seconds = (time.perf_counter() - begin) / steps
    token_bytes = 2 * layers * model.kv_heads * model.head_dim * jnp.dtype(model.dtype).itemsize
    read = sum(x.nbytes for x in jax.tree.leaves(weights)) + batch * context * token_bytes
    chip = identify(jax.devices()[0].device_kind)
    roof = batch / (read / chip.memory_bandwidth) if chip else float("nan")
    return {"tokens_per_second": batch / seconds, "roof": roof, "layers": layers, "batch": batch, "context": context}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("lab-figures"))
    parser.add_argument("--train-seconds", type=float, default=75)
    parser.add_argument("--requests", type=at_least(1), default=16)
    parser.add_argument("--llama", type=at_least(1), metavar="LAYERS", help="on a GPU: 32 for all of Llama 3 8B")
    parser.add_argument("--context", type=at_least(1), default=4096, help="of --llama")
    options = parser.parse_args()
    can_write(options.out / "serve_paged.json", "--out")
    written = {}
    if options.llama:
        result = llama(options.llama, 64, options.context, 20)
        print(json.dumps(result))
    else:
        model = Model()
        weights, loss = trained(model, options.train_seconds)
        server = Server(model, weights)
        requests = requests_from(text_of_the_repository(), options.requests)
        begin = time.perf_counter()
        serve(server, requests)
        seconds = time.perf_counter() - begin
        check(model, weights, requests)
        tokens = sum(len(r.text) - 1 for r in requests)
        for request in requests[:3]:
            print(
                f"\n{bytes(request.prompt).decode(errors='replace')}⟶{bytes(request.tokens).decode(errors='replace')}"
            )
        print(f"\n{tokens} tokens in {seconds:.1f} s, {len(server.history)} steps; all equal to full recomputation")
        result = {
            "loss": loss,
            "requests": len(requests),
            "tokens": tokens,
            "seconds": seconds,
            "steps": len(server.history),
            "history": server.history,
        }
        written["serve_paged.png"] = picture(drawn(server.history, len(server.slots)), dpi=130)
    put(options.out, {**written, "serve_paged.json": json.dumps(result, indent=1).encode()})


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EjkernelError as error:
        sys.exit(f"error: {error}")
