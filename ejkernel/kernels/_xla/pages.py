"""The geometry of paged attention in XLA: which pages a step reads and what it makes of them.

Dimension names: ``b`` tiles of query tokens, each of one sequence, ``s`` splits of a context, ``n`` pages a step, ``h`` key heads,
``g`` rows a key head: its query heads, for each query token of a tile; ``t`` stored tokens (of a page, or of all pages of a
step).

Keys and values are converted to the dtype of the accumulators as they are read. Their scales are applied to the query and to
the output, never to a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._xla import online_softmax
from ejkernel.kernels._xla.tiles import AttentionCall


@dataclass(frozen=True)
class Place:
    """A step's pages, ``[n]`` or ``[b, s, n]``: their blocks, and which of them are owned.

    ``seen``: which of their tokens each row sees, ``[g, t]`` or ``[b, s, 1, g, t]``; ``used``: which any row sees, without ``g``.
    """

    blocks: Any
    owned: Any
    seen: Array
    used: Array


@dataclass(frozen=True)
class PageWalk(AttentionCall):
    """One call's geometry, and what both walks share: contexts in ``splits``, ``n`` pages a step.

    ``arrays`` are in tiles: ``query [b, m, H, D]``, ``row_lens [b, m]`` (how many keys a token sees before the window),
    ``block_tables [b, max_blocks]``, ``softmax_aux [b|1, H]``, ``k_scale``, ``v_scale`` ``[b|1, h]``, ``window_left [1]``.
    """

    splits: int
    n: int

    @property
    def batch(self) -> int:
        return self.arrays["query"].shape[0]

    @property
    def tile(self) -> int:
        """Query tokens a tile."""
        return self.arrays["query"].shape[1]

    @property
    def kv_heads(self) -> int:
        return self.arrays["key_cache"].shape[2]

    @property
    def group(self) -> int:
        return self.tile * self.arrays["query"].shape[2] // self.kv_heads

    @property
    def block_size(self) -> int:
        return self.arrays["key_cache"].shape[3]

    def by_head(self, array: Array) -> Array:
        """``[b, m, H, …]`` as ``[b, h, g, …]``."""
        split = array.reshape(self.batch, self.tile, self.kv_heads, -1, *array.shape[3:])
        return split.swapaxes(1, 2).reshape(self.batch, self.kv_heads, self.group, *array.shape[3:])

    def by_token(self, rows: Array) -> Array:
        """``[b, h, g, …]`` as ``[b, m, H, …]``."""
        split = rows.reshape(self.batch, self.kv_heads, self.tile, -1, *rows.shape[3:])
        return split.swapaxes(1, 2).reshape(self.batch, self.tile, -1, *rows.shape[3:])

    def sinks(self) -> Array | None:
        """``[b|1, h, g]``."""
        if "softmax_aux" not in self.arrays:
            return None
        sinks = self.arrays["softmax_aux"].reshape(-1, self.kv_heads, self.group // self.tile)
        return jnp.tile(sinks, (1, 1, self.tile))

    def factor(self, name: str) -> Array | float:
        """A scale as ``[B|1, h, 1, 1]``, or 1."""
        return self.arrays[name][:, :, None, None] if name in self.arrays else 1.0

    def scaled_query(self) -> Array:
        """``[B, h, g, d]``: its product with stored keys is the logits."""
        return self.by_head(self.arrays["query"]).astype(self.acc) * self.spec.softmax_scale * self.factor("k_scale")

    def row_stops(self) -> Array:
        """``[b, g]``: the first key that each row does not see."""
        return jnp.repeat(self.arrays["row_lens"], self.group // self.tile, 1)

    def first_keys(self) -> Array:
        """``[b, g]``: the first key that each row sees."""
        stops, left = self.row_stops(), self.spec.left
        if "window_left" in self.arrays:
            left = self.arrays["window_left"][0]
        return jnp.zeros_like(stops) if left is None else jnp.maximum(stops - 1 - left, 0)

    def ranges(self) -> tuple[Array, Array]:
        """``[b, s]``: the first page of each split, and where it ends."""
        first = self.first_keys().min(1) // self.block_size
        stop = -(-self.row_stops().max(1) // self.block_size)
        size = -(-jnp.maximum(stop - first, 0) // self.splits)
        start = first[:, None] + size[:, None] * jnp.arange(self.splits, dtype=jnp.int32)
        return start, jnp.minimum(start + size[:, None], stop[:, None])

    def safe_blocks(self, blocks: Array, owned: Array) -> Array:
        """Blocks to read: garbage in a table becomes block 0, whose values are then hidden."""
        return jnp.where(owned, jnp.clip(blocks, 0, self.arrays["key_cache"].shape[1] - 1), 0)

    def cap(self, s: Array) -> tuple[Array, Array | float]:
        """Capped logits and the cap's slope."""
        capped, slope = online_softmax.soft_cap(s, self.spec.logits_soft_cap)
        return capped, 1.0 if slope is None else slope

    def attend(self, place: Any, query: Array, state: online_softmax.State) -> online_softmax.State:
        """One step of the online softmax: maximum, denominator and weighted values of the pages so far."""
        values = self.values(place)
        s = jnp.where(place.seen, self.cap(self.scores(query, self.keys(place)))[0], -jnp.inf)
        return online_softmax.update(state, s, lambda weights: self.mix(weights, values))

    def logit_gradients(
        self, place: Any, query: Array, dout: Array, lse: Array, slope: Array, v_scale: Any
    ) -> tuple[Array, ...]:
        """Weights, gradients of the weights by stored values, gradients of the logits before the cap; keys."""
        keys, values = self.hidden(place, self.keys(place)), self.values(place)
        s, cap_slope = self.cap(self.scores(query, keys))
        weights = jnp.exp(jnp.where(place.seen, s, -jnp.inf) - lse[..., None])
        dweights = self.scores(dout, values)
        ds = weights * (dweights * v_scale - slope[..., None]) * cap_slope
        return weights, dweights, jnp.where(place.seen, ds, 0), keys

    def blank_gradients(self, query: Array, wanted: frozenset[str]) -> tuple[Array | None, ...]:
        """Zeros to add to: for the scaled query, the value scale, the keys and the values; None where not wanted."""
        shapes = (
            query.shape,
            query.shape[:3] if "v_scale" in wanted else None,
            self.arrays["key_cache"].shape[1:] if "key_cache" in wanted else None,
            self.arrays["value_cache"].shape[1:] if "value_cache" in wanted else None,
        )
        return tuple(None if shape is None else self.full(shape, 0) for shape in shapes)

    def values(self, place: Any) -> Array:
        """A step's values, those that are not seen 0: their weight of 0 does not make a NaN 0."""
        return self.hidden(place, self.read(self.arrays["value_cache"], place))

    def keys(self, place: Any) -> Array:
        """A step's keys, garbage included."""
        return self.read(self.arrays["key_cache"], place)
