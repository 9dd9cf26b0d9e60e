"""page_attention on XLA on a CPU: beside a gather of every page with dense attention, and beside reading the bytes.

    python benchmarks/page_attention_cpu.py [--out benchmarks/results/page_attention_cpu.json]

32 query heads, 8 key heads, head dim 128; pages in random order. ``read`` is a plain sum over as many bytes of cache as
the contexts hold, in order and on all cores: what memory allows. ``gather`` copies each sequence's table full of pages
side by side, then runs dense attention. Bursts of all three are timed in random order, each after a pause, and the best
of each counts.
"""

import jax
import jax.numpy as jnp
import numpy as np
from shared import best_of, jax_run, main

from ejkernel import page_attention

HEADS, KV_HEADS, DIM = 32, 8, 128


def inputs(sequences, context, page, dtype, uneven):
    """Arrays of a call; uneven lengths go from an eighth of the longest to all of it."""
    rng = np.random.default_rng(0)
    max_blocks = context // page
    blocks = sequences * max_blocks
    lens = np.linspace(context // 8, context, sequences).astype(np.int32) if uneven else np.full(sequences, context)
    shape = (blocks, KV_HEADS, page, DIM)
    if dtype == "int8":
        caches = [jnp.asarray(rng.integers(-127, 128, shape, np.int8)) for _ in range(2)]
        scales = {name: jnp.full(KV_HEADS, 1 / 64, jnp.float32) for name in ("k_scale", "v_scale")}
    else:
        caches, scales = [jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(2)], {}
    return {
        "query": jnp.asarray(rng.standard_normal((sequences, HEADS, DIM), np.float32)),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "context_lens": jnp.asarray(lens, jnp.int32),
        "block_tables": jnp.asarray(rng.permutation(blocks).reshape(sequences, max_blocks).astype(np.int32)),
        **scales,
    }


def gather(query, key_cache, value_cache, context_lens, block_tables, k_scale=None, v_scale=None):
    """Every page of every table, copied side by side, then dense attention."""
    batch, length = query.shape[0], block_tables.shape[1] * key_cache.shape[2]

    def dense(cache, factor):
        tokens = cache[block_tables].transpose(0, 2, 1, 3, 4).reshape(batch, KV_HEADS, length, DIM)
        return tokens if factor is None else tokens.astype(query.dtype) * factor[:, None, None]

    q = query.reshape(batch, KV_HEADS, -1, DIM)
    s = jnp.einsum("bhgd,bhtd->bhgt", q, dense(key_cache, k_scale)) * DIM**-0.5
    s = jnp.where(jnp.arange(length) < context_lens[:, None, None, None], s, -jnp.inf)
    out = jnp.einsum("bhgt,bhtd->bhgd", jax.nn.softmax(s), dense(value_cache, v_scale))
    return out.reshape(query.shape)


def words_of(cache, pages):
    """As many bytes of a cache as the contexts hold, as integers: the form that XLA sums fastest."""
    return jnp.asarray(np.asarray(cache[:pages]).reshape(-1).view(np.int32))


def read(keys, values):
    return keys.sum(), values.sum()


CASES = [
    (sequences, context, page, dtype, uneven)
    for dtype in ("float32", "int8")
    for sequences, context in ((8, 1024), (8, 4096), (32, 1024), (32, 4096))
    for page, uneven in ((16, False), (64, False), (128, False), (16, True))
]


def rows(cases, rounds):
    result = []
    for sequences, context, page, dtype, uneven in cases:
        arrays = inputs(sequences, context, page, dtype, uneven)
        pages = int(np.ceil(np.asarray(arrays["context_lens"]) / page).sum())
        held = 2 * pages * KV_HEADS * page * DIM * arrays["key_cache"].dtype.itemsize
        runs = {
            "ejkernel": jax_run(lambda a: page_attention(**a), arrays),
            "gather": jax_run(lambda a: gather(**a), arrays),
            "read": jax_run(read, *(words_of(arrays[name], pages) for name in ("key_cache", "value_cache"))),
        }
        error = float(jnp.abs(runs["ejkernel"]() - runs["gather"]()).max())
        times = best_of(runs, rounds)
        row = {
            "case": f"{sequences} x {context}{' uneven' if uneven else ''}, pages of {page}, {dtype}",
            **{f"{name}_ms": t * 1e3 for name, t in times.items()},
            "gb_per_s": held / times["ejkernel"] / 1e9,
            "read_gb_per_s": held / times["read"] / 1e9,
            "faster_than_gather": times["gather"] / times["ejkernel"],
            "time_over_read": times["ejkernel"] / times["read"],
            "difference": error,
        }
        result.append(row)
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if k != "difference"}, flush=True)
    return result


def gradient(f, arrays):
    return jax.grad(lambda floats: f(**floats, **arrays).sum())


def gradients(rounds):
    """Forward and backward of query and caches beside those of the gather."""
    result = []
    for sequences, context, page in ((8, 1024, 16), (8, 1024, 128)):
        arrays = inputs(sequences, context, page, "float32", False)
        floats = {name: arrays.pop(name) for name in ("query", "key_cache", "value_cache")}

        runs = {
            "ejkernel": jax_run(gradient(page_attention, arrays), floats),
            "gather": jax_run(gradient(gather, arrays), floats),
        }
        times = best_of(runs, rounds)
        row = {"case": f"{sequences} x {context}, pages of {page}, float32, forward+backward"}
        row |= {f"{name}_ms": t * 1e3 for name, t in times.items()}
        row["faster_than_gather"] = times["gather"] / times["ejkernel"]
        result.append(row)
        print(row, flush=True)
    return result


def memory():
    """Temporary MiB of the compiled forward, ours and the gather's, as the table grows."""
    result = []
    for context in (1024, 4096, 16384):
        arrays = jax.eval_shape(lambda context=context: jax.tree.map(jnp.asarray, _shapes(context)))
        row = {"case": f"8 x {context}, pages of 16, float32"}
        for name, f in (("ejkernel", page_attention), ("gather", gather)):
            analysis = jax.jit(lambda a, f=f: f(**a)).lower(arrays).compile().memory_analysis()
            row[f"{name}_mib"] = analysis.temp_size_in_bytes / 2**20
        result.append(row)
        print(row, flush=True)
    return result


def _shapes(context):
    blocks = 8 * context // 16
    cache = jnp.zeros((blocks, KV_HEADS, 16, DIM))
    return {
        "query": jnp.zeros((8, HEADS, DIM)),
        "key_cache": cache,
        "value_cache": cache,
        "context_lens": jnp.zeros(8, jnp.int32),
        "block_tables": jnp.zeros((8, context // 16), jnp.int32),
    }


def measure(rounds):
    return {"temporary_mib": memory(), "decoding": rows(CASES, rounds), "gradients": gradients(rounds)}


if __name__ == "__main__":
    main(__doc__, measure)
