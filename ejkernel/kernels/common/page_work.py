"""What a call of paged attention must do at least: what its operation states is what its kernels tell the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True)
class PageWork:
    """``pairs`` of a query row and a key, operations of the two products, and bytes: of the pages, of everything else that is read,
    and of the output."""

    pairs: int
    flops: int
    page_bytes: int
    small_bytes: int
    out_bytes: int

    @property
    def bytes(self) -> int:
        """All of them."""
        return self.page_bytes + self.small_bytes + self.out_bytes


def forward_work(shapes: dict[str, Any], left: int | None) -> PageWork:
    """Of the forward, from prepared arrays. Two products a pair; the pages are read once. Lengths are data: the whole table counts."""
    query, keys, values = (shapes[name] for name in ("query", "key_cache", "value_cache"))
    examples, tokens, heads, head_dim = query.shape
    _, blocks, _, block_size, value_dim = values.shape
    _, batch, max_blocks = shapes["block_tables"].shape
    longest = max_blocks * block_size
    average = -(-tokens // batch)
    seen = longest if left is None else left + average
    read_blocks = examples * batch * min(max_blocks, -(-seen // block_size))
    # A token sees half of the tokens of its own chunk in the mean.
    pairs = examples * tokens * heads * max(1, (longest if left is None else left + 1) - (average - 1) // 2)
    return PageWork(
        pairs=pairs,
        flops=2 * pairs * (head_dim + value_dim),
        page_bytes=read_blocks * (_bytes(keys) + _bytes(values)) // blocks,
        small_bytes=sum(_bytes(array) for name, array in shapes.items() if not name.endswith("_cache")),
        out_bytes=examples * tokens * heads * value_dim * query.dtype.itemsize,
    )


def _bytes(array: Any) -> int:
    return array.size * jnp.dtype(array.dtype).itemsize
