"""In which order the CTAs of the single backward kernel start, and how many heads are worked on at the same time.

CTAs add to a block of dQ in the order in which they start. So the order decides how long they wait for each other, and
whether the second-level cache still holds what they add to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import modulo

if TYPE_CHECKING:
    from ejkernel.kernels._pallas.gpu.flash_attention_sm90.backward_state import BackwardConfig

# Bytes that the CTAs that run at the same time should read and write, to find them in the second-level cache.
CACHE = 40 * 2**20
# The same for causal loops from the last query down, which end early. Blocks of one head that start together wait for
# each other at their first sums, so fewer of a head do; what they read at a time is close together, and the cache holds
# more heads.
CAUSAL_CACHE = 160 * 2**20
CAUSAL_HEADS = 16
# Blocks of a round there, where every head has keys of its own.
ROUND = 6
# Of packed sequences: 37 of 64 to 4000 tokens, 32 heads on 8, took 10.7 ms on an H200 with one head at a time, 9.8 with eight.
PACKED_HEADS = 8
# Query heads of a CTA, at most, by head dim; and from how many queries on. Measured on an H200, causal, 64 heads on 8: the sum
# over the CTAs that share a block of keys costs less than long loops, which wait for each other.
MOST_HEADS = {64: 2, 128: 5}
ENOUGH_QUERIES = 2048


def head_parts(dim: int, group: int, window: tuple[int | None, int | None], q_len: int) -> int:
    """Among how many CTAs the query heads of one key head are divided, each with as many.

    Windows leave loops short: there the sum would cost more than it gives. Heads in panels (``panels``) are not divided.

    Example:
        >>> [head_parts(128, group, (None, 0), 8192) for group in (1, 4, 5, 6, 8, 16)]
        [1, 1, 1, 2, 2, 4]
        >>> head_parts(96, 8, (None, 0), 8192)
        1
    """
    if dim not in MOST_HEADS or window[0] is not None or q_len < ENOUGH_QUERIES:
        return 1
    return next(n for n in range(1, group + 1) if group % n == 0 and group // n <= MOST_HEADS[dim])


def blocks_per_round(c: BackwardConfig, blocks: int) -> int:
    """Blocks of a round: all, where queries ascend; one, where all loops have the same length, or any; else some.

    Blocks that start together start at the same queries, and each waits until those before it have added to them: soon
    they follow each other at a distance. The first of a round has the shortest loop, so they end in the same order, at
    a greater distance, and those that take their places need not wait. Were the first the longest, all would end
    together, and the next would wait again. With more blocks a round the distances grow, faster where heads share keys,
    until the cache no longer holds what lies between.
    """
    if c.ascending:
        return blocks
    return max(1, ROUND // c.group) if c.right is not None and c.left is None and not c.listed else 1


def started(nth, size: int, blocks: int):
    """The block of keys that starts as the ``nth``: in rounds of ``size``, each from its last block to its first."""
    first = nth - modulo(nth, size)
    return first + jnp.minimum(first + size, blocks) - 1 - nth


def started_before(nth, size: int, blocks: int, first_visitor, last_visitor):
    """How many of the blocks between two, inclusive, start before the ``nth``, which is one of them."""
    first = nth - modulo(nth, size)
    in_round = jnp.minimum(jnp.minimum(first + size, blocks) - 1, last_visitor) - started(nth, size, blocks)
    return jnp.maximum(first - first_visitor, 0) + in_round


def heads_together(c: BackwardConfig, heads: int, size: int) -> int:
    """How many heads of ``size`` bytes are worked on at a time: all that fit, of those that divide their number."""
    if c.packed:
        # Blocks of one sequence wait for each other, and what they read at a time is a sequence's, not all.
        room, most = heads * size, PACKED_HEADS
    elif c.right is not None and not c.ascending:
        room, most = CAUSAL_CACHE, CAUSAL_HEADS
    else:
        room, most = CACHE, heads
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or (n <= most and n * size <= room)))
