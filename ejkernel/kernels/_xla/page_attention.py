"""Paged attention in plain XLA: online softmax over a context's own pages, read where they lie.

Query tokens are cut into tiles, each of one sequence. ``page_walks.py`` has two ways to go over their pages: tile after tile for
one CPU, all at once elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from ejkernel.callib.integers import power_of_two
from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.registry import kernel_registry
from ejkernel.contracts.support import ALL_FLOATS, Backend, Platform, Support, any_device
from ejkernel.kernels._xla import online_softmax
from ejkernel.kernels._xla.page_walks import AllSequencesWalk, OneSequenceWalk
from ejkernel.kernels._xla.pages import PageWalk
from ejkernel.kernels.common.query_tiles import QueryTiles, most_tiles, query_tiles, sequences
from ejkernel.kernels.common.softmax import sink_terms, softmax_slope, sum_shared

# One tile at a time: enough tokens a step to outweigh its overhead, few enough to stay in a CPU's caches. Pages are
# laid side by side by a loop that asks for each token which page it is of, so that many pages cost more than many steps.
TOKENS_PER_STEP = 256
PAGES_PER_STEP = 8
MOST_PAGES_PER_STEP = 32
# All at once: numbers in the pages of one step, by the kind of device. Longer steps gain at most a quarter on an H200.
HELD_PER_STEP = {"gpu": 2**23}
HELD_ELSEWHERE = 2**21
# A backward step's pages are compared with each other to find shared blocks: so many at most.
COMPARED_PER_STEP = 64

# Query tokens a tile at most: enough to share a step's pages, few enough for sequences that have one beside them.
TOKENS_PER_TILE = 16

READ = ("blocksize_m", "q_blocksize", "kv_blocksize")


def effective(shapes: dict[str, Any], params: FwdParams | BwdParams) -> FwdParams | BwdParams:
    """The parameters as the kernel uses them: 1 or all tiles a step, whole pages."""
    max_blocks, block_size = max(1, shapes["block_tables"].shape[2]), shapes["key_cache"].shape[3]
    tile = params.blocksize_m or TOKENS_PER_TILE
    tile = min(tile, power_of_two(shapes["query"].shape[1])) if "query_starts" in shapes else 1
    every = (params.q_blocksize or 1) > 1
    pages = max(1, min((params.kv_blocksize or TOKENS_PER_STEP) // block_size, max_blocks))
    used = {
        "blocksize_m": tile,
        "q_blocksize": max(2, _tiles(shapes, tile)) if every else 1,
        "kv_blocksize": block_size * (pages if every else min(pages, MOST_PAGES_PER_STEP)),
    }
    if isinstance(params, FwdParams):
        used["num_key_splits"] = min(params.num_key_splits or 1, max_blocks)
    return type(params)(**used)


def _tiles(shapes: dict[str, Any], size: int) -> int:
    examples, tokens = shapes["query"].shape[:2]
    return most_tiles(examples * tokens, math.prod(shapes["context_lens"].shape), size)


@dataclass(frozen=True)
class TiledCall:
    """A call's arrays in tiles of query tokens, the walk over their pages, and the way back.

    Tokens are ``[T, …]`` here, those of all vmapped examples side by side.
    """

    arrays: dict[str, Array]
    spec: Any
    params: FwdParams | BwdParams

    @cached_property
    def tiles(self) -> QueryTiles | None:
        """None if every sequence has one token."""
        s = sequences(self.arrays)
        return query_tiles(s, self.params.blocksize_m) if s.packed else None

    def rows(self, tokens: Array) -> Array:
        """``[N, T, …]`` as ``[b, m, …]``."""
        tokens = tokens.reshape(-1, *tokens.shape[2:])
        return tokens[:, None] if self.tiles is None else self.tiles.rows(tokens)

    def real_rows(self, tokens: Array, otherwise: float | int) -> Array:
        """The same, with something else in rows that are no token."""
        rows = self.rows(tokens)
        if self.tiles is None:
            return rows
        return jnp.where(self.tiles.real.reshape(*rows.shape[:2], *[1] * (rows.ndim - 2)), rows, otherwise)

    def tokens(self, rows: Array, padding: float | int = 0) -> Array:
        """``[b, m, …]`` as ``[N, T, …]``."""
        tokens = rows[:, 0] if self.tiles is None else self.tiles.tokens(rows, padding)
        return tokens.reshape(*self.arrays["query"].shape[:2], *tokens.shape[1:])

    def by_sequence(self, array: Array) -> Array:
        """``[N, B, …]`` as ``[b, …]``."""
        array = array.reshape(-1, *array.shape[2:])
        return array if self.tiles is None else array.at[self.tiles.sequence].get(mode="promise_in_bounds")

    def by_example(self, array: Array) -> Array:
        """``[N|1, …]`` as ``[b|1, …]``."""
        if array.shape[0] == 1:
            return array
        shape = (array.shape[0], self.arrays["context_lens"].shape[1], *array.shape[1:])
        return self.by_sequence(jnp.broadcast_to(array[:, None], shape))

    @cached_property
    def walk(self) -> PageWalk:
        """The walk that the parameters ask for: more than one tile a step is all of them."""
        a = self.arrays
        arrays = {
            "query": self.rows(a["query"]),
            "key_cache": a["key_cache"],
            "value_cache": a["value_cache"],
            "row_lens": a["context_lens"].reshape(-1, 1) if self.tiles is None else self.tiles.lens,
            "block_tables": self.by_sequence(a["block_tables"]),
        }
        arrays |= {name: self.by_example(a[name]) for name in ("softmax_aux", "k_scale", "v_scale") if name in a}
        if "window_left" in a:
            arrays["window_left"] = a["window_left"]
        walk = AllSequencesWalk if self.params.q_blocksize > 1 else OneSequenceWalk
        splits = self.params.num_key_splits if isinstance(self.params, FwdParams) else 1
        return walk(arrays, self.spec, splits, self.params.kv_blocksize // a["key_cache"].shape[3])


def forward(arrays: dict[str, Array], spec: Any, params: Any) -> tuple[Array, Array]:
    """Attention output ``[N, T, H, Dv]`` and the log-sum-exp of its logits ``[N, T, H]``."""
    call = TiledCall(arrays, spec, effective(arrays, params))
    p = call.walk
    top, total, acc = online_softmax.merge_splits(p.contexts(p.scaled_query()), p.sinks())
    out = online_softmax.output(total, acc, (total == 0)[..., None]) * p.factor("v_scale")
    out = call.tokens(p.by_token(out.astype(arrays["query"].dtype)))
    lse = call.tokens(p.by_token(online_softmax.log_sum_exp(top, total)), -jnp.inf)
    if call.tiles is not None and "softmax_aux" in arrays:
        # Padding sees nothing but the sinks.
        owned = call.tiles.owned.reshape(*lse.shape[:2], 1)
        lse = jnp.where(owned, lse, arrays["softmax_aux"][:, None].astype(lse.dtype))
    return out, lse


def backward(
    arrays: dict[str, Array],
    spec: Any,
    params: Any,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
    wanted: frozenset[str],
) -> dict[str, Array]:
    """The wanted gradients, from the residuals ``(out, lse)``."""
    call = TiledCall(arrays, spec, effective(arrays, params))
    p = call.walk
    nothing = lse == -jnp.inf
    finite_lse = jnp.where(nothing, 0, lse)
    slope = jnp.where(nothing, 0, softmax_slope(out, dout, dlse, lambda products: products.sum(-1)))
    # Rows that are no token have weights of 0.
    residuals = (call.real_rows(dout.astype(p.acc), 0), call.real_rows(finite_lse, jnp.inf), call.real_rows(slope, 0))
    dq, dv_scale, dk, dv = p.gradients(p.scaled_query(), *(p.by_head(x) for x in residuals), wanted)
    dq = call.tokens(p.by_token(dq))
    grads: dict[str, Array] = {}
    if "query" in wanted:
        factor = jnp.repeat(arrays["k_scale"], p.group // p.tile, -1)[:, None, :, None] if "k_scale" in arrays else 1.0
        grads["query"] = (dq * spec.softmax_scale * factor).astype(arrays["query"].dtype)
    if dk is not None:
        grads["key_cache"] = dk[None].astype(arrays["key_cache"].dtype)
    if dv is not None:
        grads["value_cache"] = dv[None].astype(arrays["value_cache"].dtype)
    if "k_scale" in wanted:
        # A token that sees nothing has no part in the scale, be its query NaN.
        seeing = call.tokens(jnp.broadcast_to((p.arrays["row_lens"] > 0)[..., None], p.arrays["query"].shape[:3]))
        products = jnp.where(seeing[..., None], arrays["query"].astype(p.acc), 0) * dq * spec.softmax_scale
        grads["k_scale"] = _like(arrays["k_scale"], _by_kv_head(products.sum((1, 3)), p.kv_heads))
    if dv_scale is not None:
        rows = call.tokens(p.by_token(dv_scale))
        grads["v_scale"] = _like(arrays["v_scale"], _by_kv_head(rows.sum(1), p.kv_heads))
    if "softmax_aux" in wanted:
        sinks = arrays["softmax_aux"]
        grads["softmax_aux"] = _like(sinks, -sink_terms(sinks[:, None], finite_lse, slope).sum(1))
    return grads


def _by_kv_head(array: Array, kv_heads: int) -> Array:
    """``[N, H]`` summed over the query heads of each key head."""
    return array.reshape(array.shape[0], kv_heads, -1).sum(2)


def _like(array: Array, gradient: Array) -> Array:
    """A gradient ``[N, …]`` summed over the examples if they share the array."""
    return sum_shared(array, gradient).astype(array.dtype)


class XlaPageAttention:
    """The implementation for every device."""

    name = "page-xla"
    version = 1
    reads: ClassVar = {"forward": (*READ, "num_key_splits"), "backward": READ}
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Tiles (``q_blocksize``) and tokens (``kv_blocksize``) a step where nothing was tuned, query tokens a tile."""
        cls = FwdParams if direction == "forward" else BwdParams
        _, _, kv_heads, block_size, dim = shapes["key_cache"].shape
        tile = 1
        if "query_starts" in shapes:
            average = -(-shapes["query"].shape[1] // max(1, shapes["context_lens"].shape[1]))
            tile = min(TOKENS_PER_TILE, power_of_two(average))
        if device.kind == "cpu" and device.shared_by == 1:
            tokens = max(block_size, min(TOKENS_PER_STEP, PAGES_PER_STEP * block_size))
            return cls(blocksize_m=tile, q_blocksize=1, kv_blocksize=tokens)
        tiles = _tiles(shapes, tile)
        held = HELD_PER_STEP.get(device.kind, HELD_ELSEWHERE) if direction == "forward" else HELD_ELSEWHERE
        tokens = held // (tiles * kv_heads * max(dim, tile))
        if direction == "backward":
            tokens = min(tokens, COMPARED_PER_STEP * block_size // tiles)
        longest = shapes["block_tables"].shape[2] * block_size
        return cls(blocksize_m=tile, q_blocksize=max(2, tiles), kv_blocksize=max(block_size, min(tokens, longest)))

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
        """Steps worth trying."""
        first = XlaPageAttention.defaults(shapes, spec, device, direction)
        block_size = shapes["key_cache"].shape[3]
        sizes = {max(block_size, first.kv_blocksize * times // 4) for times in (1, 2, 4, 8)}
        return [dataclasses.replace(first, kv_blocksize=size) for size in sorted(sizes)]

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The parameters as the kernel uses them."""
        return effective(shapes, params)


kernel_registry.register(
    "page_attention",
    Platform.XLA,
    Backend.ANY,
    support=Support(
        devices=any_device(),
        dtypes=ALL_FLOATS,
        features={
            "window",
            "traced_window",
            "soft_cap",
            "sinks",
            "int8_cache",
            "fp8_cache",
            "scales",
            "gqa",
            "value_dim",
            "lse",
            "varlen",
            "uneven_pages",
            "splits",
        },
        gradients={"query", "key_cache", "value_cache", "softmax_aux", "k_scale", "v_scale"},
    ),
)(XlaPageAttention)
