"""Serving on a GPU: paged and dense decoding, chunks of prompts, mixed batches and cache updates beside the peers.

    python benchmarks/page_attention_gpu.py --out FILE [--fa4 DIR,DIR...] [--parts decode,dense,...]

`benchmarks/plot_pages.py` draws what it writes. What is reported of decoding is the bytes of keys and values over time.
Calls of JAX are chained in one program, eight of them, so that launching from Python is not measured; the time of an
eager call on the host is a part of its own. All implementations of a call are timed together (`ejkernel.utils.bursts`
says how). Errors are those of the first and the last sequence against float64, by norm.
"""

import itertools
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from shared import gpu_options, keep

from ejkernel import flash_attention, page_attention, page_update
from ejkernel.utils.bursts import time_bursts

CHAIN = 8
OURS, XLA, FA4, FA4_DENSE, JAX = "ejkernel", "ejkernel xla", "FlashAttention-4", "FlashAttention-4 dense", "jax Pallas"
HEADS = {"heads": 32, "kv_heads": 8, "dim": 128}
WIDE_GROUP = {"heads": 64, "kv_heads": 8, "dim": 64}
PARTS = ("decode", "long", "group", "random", "narrow", "dense", "prefill", "mixed", "update", "host")


def random_lens():
    return np.random.default_rng(0).integers(100, 16385, 128).tolist()


def calls(part):
    """The calls of a part: (name, sizes)."""
    equal = {"lens": [4096] * 64, **HEADS}
    chunks = {"lens": [4096] * 128, "new": [512] * 128, "page": 64, **HEADS}
    decodes = np.random.default_rng(1).integers(2048, 8193, 60).tolist()
    return {
        "decode": [(f"64 × 4k, pages of {page}", {**equal, "page": page}) for page in (16, 64, 128)],
        "long": [(f"{n} × {k}k, pages of 64", {"lens": [k * 1024] * n, "page": 64, **HEADS}) for n, k in ((1, 64), (4, 32))],
        "group": [("64 × 4k, 64/8 × 64, pages of 64", {**equal, "page": 64, **WIDE_GROUP})],
        "random": [("128 × 100–16k, pages of 64", {"lens": random_lens(), "page": 64, **HEADS})],
        "narrow": [
            (f"64 × 4k, {cache}, pages of 64", {**equal, "page": 64, "cache": cache})
            for cache in ("int8", "float8_e4m3fn", "float8_e5m2")
        ],
        "dense": [(f"dense 32 × {n} × 8k", {"dense": (32, n, 8192), **HEADS}) for n in (1, 4)],
        "prefill": [("chunks 128 × 512 on 4k, pages of 64", chunks)],
        "mixed": [
            ("60 decodes of 2–8k", {"lens": decodes, "new": [1] * 60, "page": 64, **HEADS}),
            ("4 chunks of 1024 on 4k", {"lens": [4096] * 4, "new": [1024] * 4, "page": 64, **HEADS}),
            ("both in one call", {"lens": decodes + [4096] * 4, "new": [1] * 60 + [1024] * 4, "page": 64, **HEADS}),
        ],
    }.get(part, [])  # fmt: skip


class Data:
    """The arrays of a call: pages in no order, none of them shared."""

    def __init__(self, lens=(), page=0, heads=32, kv_heads=8, dim=128, cache="bfloat16", new=None, dense=None):
        self.lens, self.page, self.cache, self.dense = lens, page, cache, dense
        self.heads, self.kv_heads, self.dim, self.new = heads, kv_heads, dim, new
        key = jax.random.key(0)
        if dense:
            batch, queries, keys = dense
            shapes = ((batch, queries, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim))
            self.arrays = tuple(_normal(key, i, shape) for i, shape in enumerate(shapes))
            self.bytes = sum(x.nbytes for x in self.arrays[1:])
            return
        counts = [-(-length // page) for length in lens]
        order = np.random.default_rng(0).permutation(sum(counts))
        tables = np.full((len(lens), max(counts)), -1, np.int32)
        for row, (count, begin) in enumerate(zip(counts, np.cumsum([0, *counts]), strict=False)):
            tables[row, :count] = order[begin : begin + count]
        tokens = len(lens) if new is None else sum(new)
        caches = [self.stored(_normal(key, i, (sum(counts), kv_heads, page, dim))) for i in (1, 2)]
        query = _normal(key, 0, (tokens, heads, dim))
        self.arrays = (query, *caches, jnp.asarray(lens, jnp.int32), jnp.asarray(tables))
        self.more = {"k_scale": 1 / 32, "v_scale": 1 / 32} if cache == "int8" else {}
        if new is not None:
            self.more["cum_seqlens_q"] = jnp.asarray(np.cumsum([0, *new]), jnp.int32)
        self.bytes = 2 * sum(lens) * kv_heads * dim * caches[0].dtype.itemsize

    def stored(self, x):
        if self.cache == "int8":
            return jnp.clip(jnp.round(x.astype(jnp.float32) * 32), -127, 127).astype(jnp.int8)
        return x.astype(self.cache)

    @property
    def flops(self):
        """Of the products, forward."""
        new = self.new or [1] * len(self.lens)
        pairs = sum(n * length - n * (n - 1) // 2 for n, length in zip(new, self.lens, strict=True))
        return 4 * pairs * self.heads * self.dim

    def error(self, out):
        """Of the last tokens of the first and the last sequence."""
        query, keys, values, _, tables = self.arrays
        factor = 1 / 32 if self.cache == "int8" else 1
        ends = np.cumsum(self.new or [1] * len(self.lens)) - 1
        found, expected = [], []
        for b in {0, len(self.lens) - 1}:
            pages = np.asarray(tables)[b, : -(-self.lens[b] // self.page)]
            k, v = (
                np.asarray(x[pages].astype(jnp.float32), np.float64).swapaxes(0, 1).reshape(self.kv_heads, -1, self.dim)
                for x in (keys, values)
            )
            k, v = (x[:, : self.lens[b]] * factor for x in (k, v))
            q = np.asarray(query[ends[b]].astype(jnp.float32), np.float64).reshape(self.kv_heads, -1, self.dim)
            s = np.einsum("hgd,htd->hgt", q, k) * self.dim**-0.5
            weights = np.exp(s - s.max(-1, keepdims=True))
            expected.append(np.einsum("hgt,htd->hgd", weights / weights.sum(-1, keepdims=True), v).reshape(-1))
            found.append(np.asarray(out[ends[b]].astype(jnp.float32), np.float64).reshape(-1))
        return float(np.linalg.norm(np.subtract(found, expected)) / np.linalg.norm(expected))


def _normal(key, index, shape):
    return jax.random.normal(jax.random.fold_in(key, index), shape, jnp.bfloat16)


def chained(one, arrays, count):
    """A program of several calls, each taking the result of the one before as its query."""

    def many(query, *rest):
        for _ in range(count):
            query = one(query, *rest)
        return query

    compiled = jax.jit(many).lower(*arrays).compile()
    return lambda: compiled(*arrays)


def runners(data, fa4, count):
    """Functions without arguments by implementation; each makes ``count`` calls."""
    found = {}
    if data.dense:
        found[OURS] = chained(lambda q, k, v: flash_attention(q, k, v, causal=True), data.arrays, count)
    else:
        found[OURS] = chained(lambda *a: page_attention(*a, **data.more), data.arrays, count)
        if data.new is None and data.cache == "bfloat16":
            found[XLA] = chained(lambda *a: page_attention(*a, platform="xla"), data.arrays, 1)
            found[JAX] = jax_pallas(data, count)
    if fa4 and data.cache == "bfloat16":
        found |= of_torch(data, count)
    return {name: run for name, run in found.items() if run is not None}


def jax_pallas(data, count):
    """jax's kernel, which takes heads first; the best of a few of its parameters would be longer to find than to say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
        except ImportError:
            return None
    query, keys, values, lens, tables = data.arrays
    arrays = (query, keys.swapaxes(0, 1), values.swapaxes(0, 1), jnp.maximum(tables, 0), lens)
    pages = max(1, 64 // data.page)
    splits = max(1, min(16, tables.shape[1] // pages))
    try:
        return chained(
            lambda q, *rest: paged_attention(q, *rest, k_splits=splits, pages_per_compute_block=pages), arrays, count
        )
    except Exception as error:
        print(f"{JAX}: {type(error).__name__}: {str(error)[:80]}")
        return None


def of_torch(data, count):
    """FlashAttention-4 on a dense cache and, where it takes the pages, on a paged one."""
    import torch
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    def tensor(array):
        return torch.from_dlpack(array)

    def repeated(call):
        def run():
            with torch.no_grad():
                for _ in range(count):
                    out = call()
            return out

        try:
            run()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"FlashAttention-4: {type(error).__name__}: {str(error)[:80]}")
            return None
        return run

    if data.dense:
        q, k, v = map(tensor, data.arrays)
        return {FA4_DENSE: repeated(lambda: flash_attn_func(q, k, v, causal=True))}
    query, keys, values, lens, tables = data.arrays
    found = {}
    q, k, v = (tensor(x) for x in (query, keys.swapaxes(1, 2).copy(), values.swapaxes(1, 2).copy()))
    used, table = tensor(lens), tensor(jnp.maximum(tables, 0))
    new = data.new or [1] * len(data.lens)
    cumulative = torch.tensor(np.cumsum([0, *new]), dtype=torch.int32, device="cuda")
    found[FA4] = repeated(
        lambda: flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cumulative, max_seqlen_q=max(new), seqused_k=used, page_table=table, causal=True
        )
    )
    if len(set(data.lens)) == 1 and len(set(new)) == 1:
        shape = (len(data.lens), data.lens[0], data.kv_heads, data.dim)
        dense = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        dense_q = q.reshape(len(data.lens), new[0], data.heads, data.dim)
        found[FA4_DENSE] = repeated(lambda: flash_attn_func(dense_q, *dense, causal=True))
    return found


def measure(part, options):
    for name, sizes in calls(part):
        data = Data(**sizes)
        count = 1 if data.new and max(data.new) > 1 else CHAIN
        timed = runners(data, options.fa4, count)
        times = time_bursts(timed, rounds=options.rounds)
        error = None
        if not data.dense:
            error = data.error(page_attention(*data.arrays, **data.more))
        for implementation, run in times.items():
            if run.error is not None:
                print(f"{name}: {implementation}: {run.error}")
                continue
            calls_each = 1 if implementation == XLA else count
            seconds = run.best / calls_each
            row = {
                "part": part,
                "call": name,
                "implementation": implementation,
                "ms": seconds * 1e3,
                "median_ms": run.median / calls_each * 1e3,
                "terabytes_per_second": data.bytes / seconds / 1e12,
            }
            if not data.dense:
                row["teraflops_per_second"] = data.flops / seconds / 1e12
            if implementation == OURS and error is not None:
                row["error"] = error
            yield row


def update(options):
    """4096 tokens into donated caches, beside a copy of as many bytes."""
    blocks, kv_heads, page, dim, tokens = 8192, 8, 64, 128, 4096
    key = jax.random.key(0)
    caches = [_normal(key, i, (blocks, kv_heads, page, dim)) for i in (1, 2)]
    new = [_normal(key, i, (tokens, kv_heads, dim)) for i in (3, 4)]
    lens = jnp.full(64, 4096, jnp.int32)
    tables = jnp.asarray(np.random.default_rng(0).permutation(blocks)[: 64 * 64].reshape(64, 64), jnp.int32)
    offsets = jnp.arange(65, dtype=jnp.int32) * (tokens // 64)

    def many(keys, values):
        for _ in range(CHAIN):
            keys, values = page_update(keys, values, *new, lens, tables, cum_seqlens_q=offsets)
        return keys, values

    compiled = jax.jit(many, donate_argnums=(0, 1)).lower(*caches).compile()
    state = [tuple(caches)]

    def run():
        state[0] = compiled(*state[0])
        return state[0]

    moved = 2 * sum(x.nbytes for x in new)
    copied = jax.jit(lambda *x: tuple(a + 1 for a in x)).lower(*[jnp.zeros(2**28, jnp.bfloat16)] * 2).compile()
    big = [jnp.zeros(2**28, jnp.bfloat16)] * 2
    times = time_bursts({"update": run, "copy": lambda: copied(*big)}, rounds=options.rounds)
    seconds, roof = times["update"].best / CHAIN, 2 * sum(x.nbytes for x in big) / times["copy"].best
    yield {
        "part": "update",
        "call": "4096 tokens, donated caches",
        "implementation": OURS,
        "ms": seconds * 1e3,
        "times_the_roof": seconds * roof / moved,
        "copies_in_the_program": compiled.as_text().count(" copy("),
    }


def host(options):
    """What an eager decoding call takes on the host, and how much of it JAX takes to launch the same program."""
    data = Data(lens=[64] * 8, page=16, **HEADS)
    jitted = jax.jit(page_attention)
    found = {}
    for name, run in (("eager", page_attention), ("jitted", jitted)):
        run(*data.arrays).block_until_ready()
        best = float("inf")
        for _ in range(30):
            begin = time.perf_counter()
            out = [run(*data.arrays) for _ in range(10)]
            best = min(best, (time.perf_counter() - begin) / 10)
            jax.block_until_ready(out)
        found[name] = best * 1e6
    with jax.transfer_guard_device_to_host("disallow"):
        page_attention(*data.arrays).block_until_ready()
    yield {
        "part": "host",
        "call": "an eager decoding call",
        "implementation": OURS,
        "microseconds": found["eager"],
        "of_which_python": found["eager"] - found["jitted"],
    }


def main():
    parser = gpu_options(__doc__)
    parser.add_argument("--fa4", default="")
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args()
    sys.path.extend(filter(None, options.fa4.split(",")))
    own = {"update": update, "host": host}
    parts = (own[part](options) if part in own else measure(part, options) for part in options.parts.split(","))
    keep(options.out, itertools.chain.from_iterable(parts), "triton", "jax-triton", "torch", "flash-attn-4")


if __name__ == "__main__":
    main()
