"""Which attention weights dropout keeps: one counter-based hash, the same on every platform.

The hash is ``lowbias32`` (two 32-bit multiplications, three xor-shifts: cheap in Triton, on a TPU and in XLA alike),
applied in three steps so that the inner loop pays for less than one application an element:

    batch key   = mix(mix(seed) ^ (batch + 1) * B)        once a batch entry, by the operation
    row key     = fold(mix(mix(batch key ^ (head + 1) * H) ^ row * R))
    hash        = finish(row key ^ fold(column * C))      once an element

with odd constants, so that distinct counters stay distinct. An element is kept where ``hash >= p * 2**32``. ``mix`` begins
with ``fold``, which distributes over xor and so is paid once a row and once a column; the xor-shift that ends it changes
the low half alone, which no comparison with a probability notices, and is left out.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

BATCH_STRIDE = 0x9E3779B1
HEAD_STRIDE = 0x85EBCA77
ROW_STRIDE = 0xC2B2AE3D
COLUMN_STRIDE = 0x27D4EB2F
MULTIPLIERS = 0x7FEB352D, 0x846CA68B


def mix(x: Array) -> Array:
    """``lowbias32``: a bijection of uint32 in which every input bit flips every output bit half the time."""
    return fold(finish(fold(x)))


def fold(x: Array) -> Array:
    """The high half into the low half."""
    return x ^ (x >> 16)


def finish(x: Array) -> Array:
    """Two rounds of multiplication."""
    x = x * jnp.uint32(MULTIPLIERS[0])
    x = x ^ (x >> 15)
    return x * jnp.uint32(MULTIPLIERS[1])


def batch_keys(seed: Array, batch: int) -> Array:
    """One uint32 key for each batch entry."""
    counters = jnp.arange(1, batch + 1, dtype=jnp.uint32) * jnp.uint32(BATCH_STRIDE)
    return mix(mix(jnp.asarray(seed).astype(jnp.uint32)) ^ counters)


def row_keys(batch_key: Array, head: Array, row: Array) -> Array:
    """Keys of query rows; the three arguments broadcast against each other."""
    head_key = mix(batch_key ^ (head.astype(jnp.uint32) + jnp.uint32(1)) * jnp.uint32(HEAD_STRIDE))
    return fold(mix(head_key ^ row.astype(jnp.uint32) * jnp.uint32(ROW_STRIDE)))


def column_keys(column: Array) -> Array:
    """Keys of columns."""
    return fold(column.astype(jnp.uint32) * jnp.uint32(COLUMN_STRIDE))


def keep(row_key: Array, column: Array, probability: float) -> Array:
    """True where the weight of (row, column) survives dropout with that probability."""
    return finish(row_key ^ column_keys(column)) >= jnp.uint32(threshold(probability))


def threshold(probability: float) -> int:
    """The smallest hash that is kept."""
    return min(round(probability * 2**32), 2**32 - 1)
