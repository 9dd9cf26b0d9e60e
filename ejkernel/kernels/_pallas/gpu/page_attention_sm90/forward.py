"""The plan of a call on the host, and its launch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.contracts.params import FwdParams
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.forward import complete, launch
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.forward_state import ForwardConfig
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import CORE_ROWS, ROWS, WARPS_PER_WARPGROUP
from ejkernel.kernels._pallas.gpu.page_attention_sm90.block import PagedBlock
from ejkernel.kernels._pallas.gpu.page_attention_sm90.parameters import effective, pack_of
from ejkernel.kernels.common import visibility
from ejkernel.kernels.common.query_tiles import Sequences, owners, sequences, with_padding


def forward(arrays: dict[str, Array], spec: Any, params: FwdParams, *, interpret: Any = False) -> tuple[Array, Array]:
    """Attention output ``[N, T, H, Dv]`` and the lse of its logits ``[N, T, H]``; ``interpret``: without a GPU."""
    params = effective(arrays, params)
    examples, tokens, heads, dim = arrays["query"].shape
    _, blocks, kv_heads, page, value_dim = arrays["value_cache"].shape
    s = sequences(arrays)
    if s.packed:
        s = with_padding(s, arrays["query_starts"], tokens)
    step, consumers = params.kv_blocksize, params.num_warps // WARPS_PER_WARPGROUP
    pack = pack_of(heads // kv_heads)
    c = ForwardConfig(
        group=heads // kv_heads,
        dim=dim,
        value_dim=value_dim,
        scale=float(spec.softmax_scale),
        cap=float(spec.logits_soft_cap or 0.0) if spec.softmax_scale else 0.0,
        left=spec.left,
        right=0,
        kv_len=0,
        packed=False,
        segments=False,
        interpreted=bool(interpret),
        consumers=consumers,
        step=step,
        stages=params.num_stages,
        ping_pong=consumers == 2 and not spec.logits_soft_cap,
        sinks="softmax_aux" in arrays,
        persistent=True,
        head=spec.left is not None,
        full=True,
        tail=True,
        speculative=arrays["query"].dtype == jnp.bfloat16,
        clears=True,
        pack=pack,
        copies=max(1, step // page),
    )
    size = consumers * ROWS // pack
    table, first_tile = plan(s, size, step, min(page, step), spec.left, s.size // examples)
    count = table.shape[0]
    query = arrays["query"].reshape(-1, heads, dim)
    query = jnp.pad(query, ((0, -query.shape[0] % CORE_ROWS), (0, 0), (0, 0)))
    optional = {"tables": s.tables}
    if c.sinks:
        optional["sinks"] = arrays["softmax_aux"]
    results = (
        jax.ShapeDtypeStruct((query.shape[0], heads, value_dim), query.dtype),
        jax.ShapeDtypeStruct((heads // pack, count * consumers * ROWS), jnp.float32),
    )
    keys, values = (arrays[name].reshape(blocks * kv_heads, page, -1) for name in ("key_cache", "value_cache"))
    grid = {"block": count * (heads // pack)}
    out, lse = launch(c, (query, keys, values, table), optional, results, grid, PagedBlock, interpret=interpret)
    lse = lse.reshape(-1, count, consumers, pack, ROWS // pack).transpose(1, 2, 4, 0, 3).reshape(-1, heads)
    lse = lse.at[place_of_tokens(s, first_tile, size)].get(mode="promise_in_bounds")
    return out[: s.tokens].reshape(examples, tokens, heads, -1), lse.reshape(examples, tokens, heads)


def plan(s: Sequences, size: int, step: int, unit: int, left: int | None, each: int) -> tuple[Array, Array]:
    """The blocks of ``size`` tokens ``[n, 14]``, and the first of each sequence ``[S]``.

    Loops begin at multiples of ``unit`` keys; an example has ``each`` sequences. Columns of the table: see ``QueryBlock``; then
    the row of ``tables``, the example, the block's first token, which is a multiple of 8, where the sequence's tokens begin and
    end, what is added to a token for its place in the context, the length of the context, the first key that any of the
    sequence's queries sees, and how many blocks are needed. The others come last and store nothing.
    """
    skew = s.begin % CORE_ROWS
    tiles = jnp.where(s.count > 0, -(-(skew + s.count) // size), 0)
    owner, first_tile = owners(tiles, most_blocks(s, size))
    index = jnp.arange(owner.shape[0], dtype=jnp.int32)
    needed = owner < s.size
    owner = jnp.minimum(owner, s.size - 1)
    first, count = s.begin[owner], jnp.where(needed, s.count[owner], 0)
    length = jnp.where(needed, s.lens[owner], 0)
    token = jnp.where(needed, first - skew[owner] + (index - first_tile[owner]) * size, 0)
    end, shift = first + count, length - count - first
    # Places of the block's first and last own token, and of the sequence's first.
    low, high = jnp.maximum(token, first) + shift, jnp.minimum(token + size, end) - 1 + shift
    back = length if left is None else jnp.int32(left)
    start, last_start, seen_from = (jnp.clip(x - back, 0, length) for x in (low, high, first + shift))
    stop, first_stop = (jnp.clip(x + 1, 0, length) for x in (high, low))
    ranges = visibility.Ranges(start // unit * unit, stop, last_start, first_stop)
    walk = complete(visibility.plan_walk(visibility.Ranges(*(x[None] for x in ranges)), step, 1, False))
    of_walk = (x[0] for x in (walk.begin, walk.head, walk.full, walk.tail))
    total = jnp.broadcast_to(tiles.sum(), index.shape)
    columns = (*of_walk, index, s.row[owner], owner // each, token, first, end, shift, length, seen_from, total)
    return jnp.stack([x.astype(jnp.int32) for x in columns], -1), first_tile


def most_blocks(s: Sequences, size: int) -> int:
    """How many blocks there are at most: tokens before a sequence's first may make one more."""
    return (s.tokens + min(s.tokens, s.size) * (CORE_ROWS - 1 + size - 1)) // size


def place_of_tokens(s: Sequences, first_tile: Array, size: int) -> Array:
    """``[T]``: where each token is in all blocks side by side."""
    owner, _ = s.owner()
    first = s.begin - s.begin % CORE_ROWS
    return first_tile[owner] * size + jnp.arange(s.tokens, dtype=jnp.int32) - first[owner]
