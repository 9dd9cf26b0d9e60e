"""Which calls of ``flash_attention`` are decoding: few queries over many keys."""

from __future__ import annotations

from typing import Any

# Rows (queries with the query heads that share a key head) of one tile at most.
MOST_ROWS = 64
# Keys from which on cutting them is worth a second launch.
FEWEST_KEYS = 512
PLAIN = frozenset({"query", "key", "value", "softmax_aux"})


def is_decoding(shapes: dict[str, Any], spec: Any) -> bool:
    """Whether a forward has few queries and many keys, and nothing but causality, a window, a cap or sinks."""
    query, key = shapes["query"], shapes["key"]
    left, right = spec.window
    q_len, group = query.shape[1], query.shape[2] // key.shape[2]
    return (
        not (shapes.keys() - PLAIN or spec.dropout_prob)
        and q_len * group <= MOST_ROWS
        and key.shape[1] >= FEWEST_KEYS
        # Every query sees as far as its own position, or all see everything.
        and (right == 0 or q_len == 1 or (left is None and right is None))
    )
