"""Calls of page_attention, and attention over pages written the obvious way."""

import jax.numpy as jnp
import numpy as np
from examples import Example


def reference(
    query,
    key_cache,
    value_cache,
    context_lens,
    block_tables,
    softmax_scale=None,
    block_size=None,
    *,
    cum_seqlens_q=None,
    sliding_window=None,
    logits_soft_cap=None,
    softmax_aux=None,
    k_scale=None,
    v_scale=None,
    num_splits=None,
    return_lse=False,
):
    """All pages side by side, then dense attention over what a sequence owns and its window shows.

    Packed tokens are sequences of their own: each sees as much of its sequence's context as if it were the last token.
    """
    if cum_seqlens_q is not None:
        token = jnp.arange(query.shape[0])[:, None]
        mine = (token >= cum_seqlens_q[:-1]) & (token < cum_seqlens_q[1:])
        padding, owner = ~mine.any(1), mine.argmax(1)
        query = jnp.where(padding[:, None, None], 0, query)
        after = cum_seqlens_q[1:][owner] - token[:, 0]
        context_lens = jnp.where(padding, 0, context_lens[owner] - after + 1)
        block_tables = block_tables[owner]
    batch, heads, dim = query.shape
    blocks, kv_heads, size, _ = value_cache.shape
    group, length = heads // kv_heads, block_tables.shape[1] * size
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    left = sliding_window[0] if isinstance(sliding_window, tuple) else sliding_window
    position, end = jnp.arange(length), context_lens[:, None]
    seen = (position < end) & (True if left is None else position >= end - 1 - left)

    def dense(cache, factor):
        pages = cache[jnp.clip(block_tables, 0, blocks - 1)].astype(query.dtype)
        tokens = pages.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, length, -1)
        tokens = jnp.where(seen[:, None, :, None], tokens, 0)
        tokens = tokens * jnp.broadcast_to(1.0 if factor is None else factor, (kv_heads,))[:, None, None]
        return jnp.repeat(tokens, group, 1)

    logits = scale * jnp.einsum("bhd,bhtd->bht", query, dense(key_cache, k_scale))
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    logits = jnp.where(seen[:, None], logits, -jnp.inf)
    if softmax_aux is not None:
        sinks = softmax_aux if softmax_aux.ndim == 2 else jnp.broadcast_to(softmax_aux, (heads, *softmax_aux.shape))
        logits = jnp.concatenate([logits, jnp.broadcast_to(sinks, (batch, *sinks.shape))], -1)
    top = logits.max(-1)
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(logits - top[..., None])
    total = weights.sum(-1)
    some = jnp.where(total > 0, total, 1)
    out = jnp.einsum("bht,bhtd->bhd", weights[..., :length] / some[..., None], dense(value_cache, v_scale))
    return (out, jnp.where(total > 0, top + jnp.log(some), -jnp.inf)) if return_lse else out


def make(
    lens,
    kv_heads=2,
    group=1,
    dim=8,
    value_dim=None,
    size=4,
    max_blocks=5,
    cache=None,
    sinks=None,
    scales=None,
    shared=(),
    chunks=None,
    padding=0,
    traced_window=None,
):
    """Pages in no order, and every entry and token that is not owned poisoned.

    ``shared``: triples (sequence, other, pages): the first pages of one are those of the other. ``chunks``: how many query tokens
    each sequence has, packed, with so many tokens of ``padding`` behind them; without any, a context is not read.
    """
    read = [length if n else 0 for length, n in zip(lens, chunks or [1] * len(lens), strict=True)]

    def build(rng):
        batch = len(lens)
        blocks = batch * max_blocks + 3
        order = rng.permutation(blocks)
        tables = np.full((batch, max_blocks), -1, np.int32)
        used = np.zeros((blocks, size), bool)
        for b, length in enumerate(read):
            count = -(-length // size)
            tables[b, :count] = order[b * max_blocks : b * max_blocks + count]
            tables[b, count:] = rng.choice([-1, blocks + 7, np.iinfo(np.int32).max, order[-1]], max_blocks - count)
        for b, other, pages in shared:
            tables[b, :pages] = tables[other, :pages]
        for b, length in enumerate(read):
            for t in range(length):
                used[tables[b, t // size], t % size] = True
        hidden = ~used[:, None, :, None]

        def pages(last):
            shape = (blocks, kv_heads, size, last)
            if cache == "int8":
                return np.where(hidden, np.int8(77), rng.integers(-127, 128, shape, np.int8))
            values = np.where(hidden, np.nan, rng.standard_normal(shape))
            return values if cache is None else np.asarray(jnp.asarray(values, jnp.float32).astype(cache))

        tokens = batch if chunks is None else sum(chunks)
        query = rng.standard_normal((tokens, kv_heads * group, dim))
        arrays = {
            "query": np.concatenate([query, np.full((padding, *query.shape[1:]), np.nan)]),
            "key_cache": pages(dim),
            "value_cache": pages(value_dim or dim),
            "context_lens": np.asarray(lens, np.int32),
            "block_tables": tables,
        }
        if chunks is not None:
            arrays["cum_seqlens_q"] = np.cumsum([0, *chunks]).astype(np.int32)
        if sinks is not None:
            shape = (2,) if sinks == "shared" else (kv_heads * group, 3)
            arrays["softmax_aux"] = rng.standard_normal(shape)
        if traced_window is not None:
            arrays["sliding_window"] = np.asarray(traced_window, np.int32)
        if scales is not None:
            shape = () if scales == "scalar" else (kv_heads,)
            level = 1 / 64 if cache == "int8" else 1.0
            arrays["k_scale"] = level * np.asarray(0.5 + rng.random(shape))
            arrays["v_scale"] = level * np.asarray(0.5 + rng.random(shape))
        return arrays

    build.page = size
    return build


BATCH = {"query": 0, "context_lens": 0, "block_tables": 0}
FLOATS = ("query", "key_cache", "value_cache")


def example(name, make, statics=None, differentiable=FLOATS, features=(), keep=("softmax_aux", "k_scale", "v_scale")):
    used = {"uneven_pages": make.page % 16 != 0, "splits": "num_splits" in (statics or {})}
    features = {*features, *(feature for feature, is_used in used.items() if is_used)}
    return Example(
        "page_attention",
        name,
        make,
        reference,
        statics or {},
        differentiable,
        frozenset(features),
        {} if "varlen" in features else BATCH,
        frozenset(keep),
    )


EXAMPLES = [
    example("plain", make([20, 7])),
    example("one_token_and_none", make([1, 0, 4, 5]), {"return_lse": True}, features={"lse"}),
    example("nothing_at_all", make([0, 0]), {"return_lse": True}, features={"lse"}),
    example("gqa_odd_sizes", make([9, 16], kv_heads=3, group=2, dim=5, size=3, max_blocks=6), features={"gqa"}),
    # Sizes at which the CPU compiler of jax 0.10 wrote past a buffer, with several devices and a gradient for the keys.
    example(
        "many_tokens",
        make([20, 13, 24, 12, 17, 22, 24, 15], kv_heads=4, group=2, dim=64, size=16, max_blocks=2),
        features={"gqa"},
    ),
    example("value_dim", make([13, 6], group=3, value_dim=3), {"softmax_scale": 0.3}, features={"gqa", "value_dim"}),
    example(
        "window", make([19, 3, 8, 0], group=2), {"sliding_window": (4, 0), "block_size": 4}, features={"gqa", "window"}
    ),
    example(
        "traced_window",
        make([19, 3, 8, 0], group=2, sinks="own", chunks=[6, 1, 0, 0], padding=2, traced_window=5),
        {"return_lse": True},
        (*FLOATS, "softmax_aux"),
        {"varlen", "gqa", "window", "traced_window", "sinks", "lse"},
    ),
    example("only_itself", make([17, 4]), {"sliding_window": 0}, features={"window"}),
    example("soft_cap", make([18, 11]), {"logits_soft_cap": 0.7, "num_splits": 2}, features={"soft_cap"}),
    example(
        "sinks",
        make([10, 0, 20, 3], group=2, sinks="shared"),
        {"return_lse": True},
        (*FLOATS, "softmax_aux"),
        {"gqa", "sinks", "lse"},
    ),
    example(
        "splits_and_sinks",
        make([20, 5], sinks="own"),
        {"num_splits": 3, "return_lse": True},
        (*FLOATS, "softmax_aux"),
        {"sinks", "lse"},
    ),
    example("shared_prefix", make([18, 15, 9, 12], shared=[(1, 0, 3), (2, 0, 2), (3, 1, 2)])),
    example(
        "float_scales",
        make([12, 20], group=2, scales="scalar"),
        {"return_lse": True},
        (*FLOATS, "k_scale", "v_scale"),
        {"gqa", "scales", "lse"},
    ),
    example(
        "int8",
        make([20, 0, 6, 11], group=2, cache="int8", scales="own"),
        {"return_lse": True},
        ("query", "k_scale", "v_scale"),
        {"gqa", "scales", "int8_cache", "lse"},
    ),
    example(
        "fp8",
        make([20, 6], cache="float8_e4m3fn", scales="own"),
        {"logits_soft_cap": 2.0},
        ("query", "k_scale", "v_scale"),
        {"scales", "fp8_cache", "soft_cap"},
        keep=("key_cache", "value_cache", "k_scale", "v_scale"),
    ),
    example(
        "chunks",
        make([9, 0, 20, 6, 5], chunks=[3, 0, 1, 0, 5], padding=2),
        {"return_lse": True},
        features={"varlen", "lse"},
    ),
    example(
        "chunks_in_even_pages",
        make(
            [40, 0, 70, 33],
            **{"group": 2, "dim": 32, "size": 16, "sinks": "own"},
            chunks=[20, 0, 1, 33],
            padding=5,
        ),
        {"sliding_window": (24, 0), "logits_soft_cap": 1.5, "return_lse": True},
        (*FLOATS, "softmax_aux"),
        {"varlen", "gqa", "window", "soft_cap", "sinks", "lse"},
    ),
    example(
        "chunks_int8",
        make([13, 4, 20], kv_heads=1, group=3, cache="int8", scales="own", chunks=[2, 4, 3], padding=1),
        {"sliding_window": (6, 0)},
        ("query", "k_scale", "v_scale"),
        {"varlen", "gqa", "scales", "int8_cache", "window"},
    ),
    example(
        "chunks_and_everything",
        make(
            [20, 0, 7, 13],
            **{"group": 2, "dim": 6, "value_dim": 5, "sinks": "own", "scales": "own", "shared": [(3, 0, 2)]},
            chunks=[5, 0, 1, 6],
            padding=3,
        ),
        {"sliding_window": (9, 1), "logits_soft_cap": 1.5, "num_splits": 2, "return_lse": True, "softmax_scale": 0.4},
        (*FLOATS, "softmax_aux", "k_scale", "v_scale"),
        {"varlen", "gqa", "value_dim", "window", "soft_cap", "sinks", "scales", "lse"},
    ),
    # The last one is also that of the files which spread a batch over devices: it has one.
    example(
        "everything",
        make([20, 0, 7, 13], group=2, dim=6, value_dim=5, sinks="own", scales="own", shared=[(3, 0, 2)]),
        {"sliding_window": (9, 1), "logits_soft_cap": 1.5, "num_splits": 2, "return_lse": True, "softmax_scale": 0.4},
        (*FLOATS, "softmax_aux", "k_scale", "v_scale"),
        {"gqa", "value_dim", "window", "soft_cap", "sinks", "scales", "lse"},
    ),
]
