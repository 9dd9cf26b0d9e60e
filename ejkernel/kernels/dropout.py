"""Which attention weights dropout keeps: one counter-based hash, the same on every platform.

The hash is ``lowbias32`` (two 32-bit multiplications, three xor-shifts: cheap in Triton, on a TPU and in XLA alike),
applied in three steps so that the inner loop pays for one application an element:

    batch key   = mix(mix(seed) ^ (batch + 1) * B)        once a batch entry, by the operation
    row key     = mix(mix(batch key ^ (head + 1) * H) ^ row * R)
    hash        = mix(row key ^ column * C)               once an element

with odd constants, so that distinct counters stay distinct. An element is kept where ``hash >= p * 2**32``.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

BATCH_STRIDE = 0x9E3779B1
HEAD_STRIDE = 0x85EBCA77
ROW_STRIDE = 0xC2B2AE3D
COLUMN_STRIDE = 0x27D4EB2F


def mix(x: Array) -> Array:
    """``lowbias32``: a bijection of uint32 in which every input bit flips every output bit half the time."""
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def batch_keys(seed: Array, batch: int) -> Array:
    """One uint32 key for each batch entry."""
    counters = jnp.arange(1, batch + 1, dtype=jnp.uint32) * jnp.uint32(BATCH_STRIDE)
    return mix(mix(jnp.asarray(seed).astype(jnp.uint32)) ^ counters)


def row_keys(batch_key: Array, head: Array, row: Array) -> Array:
    """Keys of query rows; the three arguments broadcast against each other."""
    head_key = mix(batch_key ^ (head.astype(jnp.uint32) + jnp.uint32(1)) * jnp.uint32(HEAD_STRIDE))
    return mix(head_key ^ row.astype(jnp.uint32) * jnp.uint32(ROW_STRIDE))


def keep(row_key: Array, column: Array, probability: float) -> Array:
    """True where the weight of (row, column) survives dropout with that probability."""
    return mix(row_key ^ column.astype(jnp.uint32) * jnp.uint32(COLUMN_STRIDE)) >= jnp.uint32(threshold(probability))


def threshold(probability: float) -> int:
    """The smallest hash that is kept."""
    return min(round(probability * 2**32), 2**32 - 1)
