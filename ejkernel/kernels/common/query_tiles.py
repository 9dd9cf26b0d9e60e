"""Packed queries of paged attention as tiles of equal size, each of one sequence.

A call has ``S`` sequences and ``T`` query tokens; a vmapped call has as many of both as all its examples together. Sequence
``s`` owns ``count[s]`` tokens from ``begin[s]`` on, the last ones of its context. Tokens of no sequence are padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True)
class Sequences:
    """Where the queries, the keys and the shared arrays of each sequence are.

    ``begin``, ``count``, ``lens`` ``[S]``: first token, number of tokens, context length; ``row``: which row of ``tables``
    ``[…, max_blocks]``.
    ``tokens``: how many there are, padding included. ``packed``: False if token ``s`` is all that sequence ``s`` has.
    """

    begin: Array
    count: Array
    lens: Array
    row: Array
    tables: Array
    tokens: int
    packed: bool

    @property
    def size(self) -> int:
        """How many sequences there are."""
        return self.lens.shape[0]

    def owner(self) -> tuple[Array, Array]:
        """``[T]``: whose each token is, and whether it is anybody's."""
        token = jnp.arange(self.tokens, dtype=jnp.int32)
        owner = ((self.begin + self.count)[None, :] <= token[:, None]).sum(1, dtype=jnp.int32)
        inside = jnp.minimum(owner, self.size - 1)
        return inside, (owner < self.size) & (token >= self.begin[inside])


def sequences(arrays: dict[str, Array]) -> Sequences:
    """Those of a call's prepared arrays, ``query [N, T, H, D]``, ``context_lens [N, B]`` and so on."""
    examples, tokens = arrays["query"].shape[:2]
    lens, tables = arrays["context_lens"], arrays["block_tables"]
    starts = arrays.get("query_starts")
    if starts is None:
        begin = jnp.arange(lens.size, dtype=jnp.int32)
        count = jnp.ones(lens.size, jnp.int32)
    else:
        begin = (starts[:, :-1] + tokens * jnp.arange(examples, dtype=jnp.int32)[:, None]).reshape(-1)
        count = (starts[:, 1:] - starts[:, :-1]).reshape(-1)
    return Sequences(
        begin=begin,
        count=count,
        lens=lens.reshape(-1),
        row=jnp.arange(lens.size, dtype=jnp.int32),
        tables=tables.reshape(-1, tables.shape[2]),
        tokens=examples * tokens,
        packed=starts is not None,
    )


def with_padding(s: Sequences, starts: Array, tokens: int) -> Sequences:
    """Tokens of no sequence, before the first and past the last of each example, as two more sequences without a context.

    ``starts [N, B + 1]`` and ``tokens`` are those of one example.
    """
    examples, batch = starts.shape[0], starts.shape[1] - 1
    base = tokens * jnp.arange(examples, dtype=jnp.int32)[:, None]
    first, last = starts[:, :1], starts[:, -1:]
    nothing = jnp.zeros_like(first)

    def join(array, before, after):
        return jnp.concatenate([before, array.reshape(examples, batch), after], 1).reshape(-1)

    return replace(
        s,
        begin=join(s.begin, base, base + last),
        count=join(s.count, first, tokens - last),
        lens=join(s.lens, nothing, nothing),
        row=join(s.row, batch * base // tokens, batch * base // tokens),
    )


def most_tiles(tokens: int, sequences: int, size: int) -> int:
    """How many tiles of ``size`` tokens there are at most, whatever the lengths."""
    owners = min(tokens, sequences)
    return (tokens + owners * (size - 1)) // size


def owners(counts: Array, items: int | Array) -> tuple[Array, Array]:
    """Items laid side by side, ``counts[s]`` of them for each ``s``: the ``s`` of some items, and where each ``s`` begins.

    ``items``: which, or how many of the first. Past the last one ``s`` is ``len(counts)``. In numpy if the counts are.
    """
    np_ = np if isinstance(counts, np.ndarray) else jnp
    ends = np_.cumsum(counts, dtype=np.int32)
    items = np_.arange(items, dtype=np.int32) if isinstance(items, int) else items
    # All comparisons at once: a search would be a loop of small steps on an accelerator.
    return (ends[None, :] <= items[:, None]).sum(1, dtype=np.int32), ends - counts


@dataclass(frozen=True)
class QueryTiles:
    """Tokens in ``n`` tiles of ``size``, as arrays ``[n, size]``.

    ``sequence [n]``: whose they are. ``token``: which token a row is; rows that a tile has too many repeat its last token and
    are not ``real``. ``lens``: how many keys a row sees, before the window: 0 in tiles that nobody needs. ``place [T]``: where
    each token is, in all rows side by side; ``owned [T]``: whether it is anywhere.
    """

    sequence: Array
    token: Array
    real: Array
    lens: Array
    place: Array
    owned: Array

    def rows(self, tokens: Array) -> Array:
        """``[T, …]`` as ``[n, size, …]``."""
        return tokens.at[self.token].get(mode="promise_in_bounds")

    def tokens(self, rows: Array, padding: float | int) -> Array:
        """``[n, size, …]`` as ``[T, …]``."""
        flat = rows.reshape(-1, *rows.shape[2:]).at[self.place].get(mode="promise_in_bounds")
        return jnp.where(self.owned.reshape(-1, *[1] * (flat.ndim - 1)), flat, padding)


def query_tiles(s: Sequences, size: int) -> QueryTiles:
    """The tokens of a packed call in tiles."""
    n = most_tiles(s.tokens, s.size, size)
    tile = jnp.arange(n, dtype=jnp.int32)
    owner, first_tile = owners(-(-s.count // size), n)
    used = owner < s.size
    owner = jnp.minimum(owner, s.size - 1)
    first = (tile - first_tile[owner]) * size
    index = first[:, None] + jnp.arange(size, dtype=jnp.int32)
    count = s.count[owner][:, None]
    real = used[:, None] & (index < count)
    index = jnp.minimum(index, count - 1)
    lens = jnp.maximum(s.lens[owner][:, None] - count + index + 1, 0)
    token = jnp.clip(s.begin[owner][:, None] + index, 0, s.tokens - 1)
    of_token, owned = s.owner()
    within = jnp.arange(s.tokens, dtype=jnp.int32) - s.begin[of_token]
    place = jnp.clip(first_tile[of_token] * size + within, 0, n * size - 1)
    return QueryTiles(owner, token, real, jnp.where(used[:, None], lens, 0), place, owned)
