"""What decides a tile's logits beside the product: scale, cap, bias, masks; and which weights dropout keeps.

Tiles are transposed, ``[keys, queries]``: what belongs to a query is a row ``[1, queries]`` along the lanes, so that maxima and
sums over keys need nothing across lanes. Logits are in units of log 2. A tile is a part of a pair of blocks: static slices
of queries and keys within them, and the indices, known to the device, at which the blocks begin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu.flash_attention.plan import Pattern, key_intervals, segment_ids
from ejkernel.kernels._pallas.tpu.generations import LANES
from ejkernel.kernels.common import dropout
from ejkernel.kernels.common.softmax import LOG2E
from ejkernel.kernels.common.unseen import with_ranked_ids

# Of a word of a mask of blocks.
BITS = 32
# Among the references by name: vector memory, float32 ``[keys, queries]``, through which what is transposed goes. libtpu takes
# transposed registers for operands of products where it can, and for v5e and v5p failed to compile (RET_CHECK in
# mxu_lmr_transform.cc) when those of a bias or a mask were beside those of values of 256 dims.
TURNED = "turned"


class Place(NamedTuple):
    """Where a pair of blocks lies: batch entry, query head, and the indices of its first query and key, all traced."""

    batch: Any
    head: Any
    query: Any
    key: Any


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What is static about a call's logits.

    Attributes:
        scale: of the logits, natural units.
        cap: of the logits, or None.
        left, right: what is added to a query's index for the first key that it sees, and for the first that it no longer
            sees; None is unbounded, and so are both where intervals come from data.
        q_len, kv_len: of the arrays.
        dropout: the probability with which a weight is dropped.
        names: the optional arrays that kernels read, in their order.
        bias, mask: which of their axes, batch, head, query, key, are there; None without.
        shared_intervals: whether all batch entries have the same ones.
        bits: whether batch entries, and heads, have masks of blocks of their own; None without.
        bit_words: words of bits that a query has for a block of keys.
        bit_keys: the keys of a block of the mask.
    """

    scale: float
    cap: float | None
    left: int | None
    right: int | None
    q_len: int
    kv_len: int
    dropout: float
    names: tuple[str, ...]
    bias: tuple[bool, ...] | None
    mask: tuple[bool, ...] | None
    shared_intervals: bool
    bits: tuple[bool, ...] | None = None
    bit_words: int = 0
    bit_keys: int = 0

    @property
    def of_pairs(self) -> bool:
        """Whether the bias or the mask has a value for every pair of a query and a key."""
        return any(axes is not None and axes[2] and axes[3] for axes in (self.bias, self.mask))

    @property
    def by_data(self) -> bool:
        """Whether anything but the window masks."""
        return any(name in self.names for name in ("start", "q_ids", "mask", "bits"))


def terms_of(arrays: dict[str, Array], spec: Any) -> Terms:
    """Of a call of ``flash_attention``, or of ``blocksparse_attention``, whose ``block_bits`` are its mask.

    ``block_bits``: int32 ``[B|1, H|1, blocks of keys, words, queries]``. Of a query and the kernel's block of keys, the first
    bit says whether it sees the block of the mask that holds the first of these keys, and so on.
    """
    q_len, kv_len = arrays["query"].shape[1], arrays["key"].shape[1]
    packed, dropped = "kv_start" in arrays, "dropout_key" in arrays
    left, right = (None, None) if packed else spec.window

    def axes(name: str) -> tuple[bool, ...] | None:
        return tuple(size > 1 for size in arrays[name].shape) if name in arrays else None

    present = {
        "start": packed,
        "stop": packed,
        "q_ids": "q_segment_ids" in arrays,
        "kv_ids": "q_segment_ids" in arrays,
        "bias": "bias" in arrays,
        "mask": "attention_mask" in arrays,
        "bits": "block_bits" in arrays,
        "dropout_key": dropped,
    }
    return Terms(
        scale=float(spec.softmax_scale),
        # Logits that are all 0 need no cap.
        cap=spec.logits_soft_cap if spec.softmax_scale else None,
        left=None if left is None else kv_len - q_len - left,
        right=None if right is None else kv_len - q_len + right + 1,
        q_len=q_len,
        kv_len=kv_len,
        dropout=spec.dropout_prob if dropped else 0.0,
        names=tuple(name for name, there in present.items() if there),
        bias=axes("bias"),
        mask=axes("attention_mask"),
        shared_intervals=packed and arrays["kv_start"].shape[0] == 1,
        bits=axes("block_bits")[:2] if "block_bits" in arrays else None,
        bit_words=arrays["block_bits"].shape[3] if "block_bits" in arrays else 0,
        bit_keys=spec.grid.sizes[1] if "block_bits" in arrays else 0,
    )


# On the host: the optional arrays as kernels read them


def inputs(c: Terms, arrays: dict[str, Array], spec: Any, q_block: int, kv_block: int) -> list[Array]:
    """The optional arrays, in the order of ``c.names``, with rows for whole blocks where padding has a meaning.

    Past the last query an interval is empty and an id matches no key's. Ids of queries that are padding match none either.
    """
    rows, keys = -c.q_len % q_block, -c.kv_len % kv_block
    made: dict[str, Array] = {}
    if "start" in c.names:
        made["start"], made["stop"] = (_row(x, rows, 0) for x in key_intervals(arrays, spec))
    if "q_ids" in c.names:
        # The values that stand for padding are no ids of int32 alone.
        narrow = arrays["q_segment_ids"].dtype == jnp.int32
        q_ids, kv_ids = segment_ids(arrays if narrow else with_ranked_ids(arrays))
        made["q_ids"] = _row(jnp.where(q_ids > 0, q_ids, -1), rows, -1)
        made["kv_ids"] = _row(jnp.where(kv_ids > 0, kv_ids, 0), keys, 0)
    if "bias" in c.names:
        made["bias"] = _by_query_row(arrays["bias"])
    if "mask" in c.names:
        made["mask"] = _by_query_row(arrays["attention_mask"].astype(jnp.int8))
    if "bits" in c.names:
        made["bits"] = arrays["block_bits"]
    if "dropout_key" in c.names:
        made["dropout_key"] = lax.bitcast_convert_type(arrays["dropout_key"], jnp.int32)
    return [made[name] for name in c.names]


def _row(x: Array, missing: int, fill: int) -> Array:
    """``[B, S]`` as ``[B, 1, S + missing]``."""
    return jnp.pad(jnp.asarray(x, jnp.int32), ((0, 0), (0, missing)), constant_values=fill)[:, None]


def _by_query_row(x: Array) -> Array:
    """One value a query, ``[B, H, Sq, 1]``, along the lanes: ``[B, H, 1, Sq]``."""
    return x.swapaxes(2, 3) if x.shape[3] == 1 else x


def block_specs(
    c: Terms, q_block: int, kv_block: int, at: Callable[..., tuple[Any, Any, Any, Any]]
) -> list[pl.BlockSpec]:
    """For ``inputs``; ``at`` takes the arguments of an index map to batch entry, query head, block of queries, block of keys."""

    def row(of_queries: bool, shared: bool = False) -> pl.BlockSpec:
        def index(*grid):
            b, _, i, j = at(*grid)
            return 0 if shared else b, 0, i if of_queries else j

        return pl.BlockSpec((1, 1, q_block if of_queries else kv_block), index)

    def pairs(axes: tuple[bool, ...]) -> pl.BlockSpec:
        by_batch, by_head, by_query, by_key = axes

        def index(*grid):
            b, h, i, j = at(*grid)
            i, j = (i if by_query else 0), (j if by_key else 0)
            return b if by_batch else 0, h if by_head else 0, *((i, j) if by_key else (0, i))

        sides = (q_block if by_query else 1), (kv_block if by_key else 1)
        return pl.BlockSpec((1, 1, *(sides if by_key else (1, sides[0]))), index)

    def of_bits(*grid):
        b, h, i, j = at(*grid)
        by_batch, by_head = c.bits
        return b if by_batch else 0, h if by_head else 0, j, 0, i

    made = {
        "start": lambda: row(True, c.shared_intervals),
        "stop": lambda: row(True, c.shared_intervals),
        "q_ids": lambda: row(True),
        "kv_ids": lambda: row(False),
        "bias": lambda: pairs(c.bias),
        "mask": lambda: pairs(c.mask),
        "bits": lambda: pl.BlockSpec((1, 1, 1, c.bit_words, q_block), of_bits),
        "dropout_key": lambda: pl.BlockSpec(memory_space=pltpu.SMEM),
    }
    return [made[name]() for name in c.names]


# In the kernel: parts of tiles


def logits(
    c: Terms,
    refs: dict[str, Any],
    place: Place,
    queries: slice,
    keys: slice,
    product: Array,
    mask: bool | Pattern,
) -> Array:
    """Logits ``[keys, queries]`` in units of log 2, from the product of keys and queries, float32.

    ``mask``: False where every query sees every key, True for whatever decides, a pattern in place of the window and lengths.
    """
    return finished_logits(c, refs, place, queries, keys, base_logits(c, product), mask)


def finished_logits(
    c: Terms, refs: dict[str, Any], place: Place, queries: slice, keys: slice, base: Array, mask: bool | Pattern
) -> Array:
    """The same from ``base_logits``."""
    s = base
    if "bias" in c.names:
        s = s + _of_pairs(refs["bias"], c.bias, queries, keys, refs.get(TURNED)) * LOG2E
    seen = seen_pairs(c, refs, place, queries, keys, mask)
    return s if seen is None else jnp.where(seen, s, -jnp.inf)


def base_logits(c: Terms, product: Array) -> Array:
    """Scaled and capped, in units of log 2."""
    if c.cap is None:
        return product * (c.scale * LOG2E)
    return jnp.tanh(product * (c.scale / c.cap)) * (c.cap * LOG2E)


def seen_pairs(
    c: Terms, refs: dict[str, Any], place: Place, queries: slice, keys: slice, mask: bool | Pattern
) -> Array | None:
    """Booleans ``[keys, queries]``; None where every query sees every key."""
    if mask is False:
        return None
    found = _in_window(c, place, queries, keys, mask)
    width = queries.stop - queries.start
    if "start" in c.names:
        key = lax.broadcasted_iota(jnp.int32, (keys.stop - keys.start, width), 0)
        start, stop = (refs[name][0, :, queries] - (place.key + keys.start) for name in ("start", "stop"))
        found += [key >= start, key < stop]
    if "q_ids" in c.names:
        found.append(column(refs["kv_ids"][0, :, keys], width) == refs["q_ids"][0, :, queries])
    if "mask" in c.names:
        found.append(_of_pairs(refs["mask"], c.mask, queries, keys, refs.get(TURNED)) != 0)
    if "bits" in c.names:
        bits = refs["bits"][0, 0, 0, :, queries]
        words = [bits[n : n + 1] & _bit_of_key(c, place, keys, width, n) for n in range(c.bit_words)]
        found.append(functools.reduce(jnp.bitwise_or, words) != 0)
    return _every(found)


def _bit_of_key(c: Terms, place: Place, keys: slice, width: int, word: int) -> Array:
    """``[keys, width]``: the bit of a word that stands for a key, 0 where it is in another word."""
    before = lax.rem(jnp.asarray(place.key, jnp.int32), jnp.int32(c.bit_keys)) + keys.start
    key = lax.broadcasted_iota(jnp.int32, (keys.stop - keys.start, LANES), 0) + before
    # A vector unit does not divide integers; half a key keeps the quotient away from whole numbers.
    n = ((key.astype(jnp.float32) + 0.5) * (1 / c.bit_keys)).astype(jnp.int32) - BITS * word
    bit = jnp.int32(1) << (n & (BITS - 1))
    return _across(jnp.where((n >= 0) & (n < BITS), bit, 0) if c.bit_words > 1 else bit, width)


def _in_window(c: Terms, place: Place, queries: slice, keys: slice, mask: bool | Pattern) -> list[Array]:
    """What causality, the window and the lengths leave, if anything is hidden."""
    shape = keys.stop - keys.start, queries.stop - queries.start
    found: list[Array] = []
    if isinstance(mask, Pattern):
        of = mask.bounding(queries, keys)
        if not any(bound is not None for bound in of):
            return found
        key, query = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        apart = key - query
        offset = queries.start - keys.start
        if of.low is not None:
            found.append(apart >= of.low + offset)
        if of.high is not None:
            found.append(apart < of.high + offset)
        if of.keys is not None:
            found.append(key < of.keys - keys.start)
        if of.queries is not None:
            found.append(query < of.queries - queries.start)
        return found
    if "start" in c.names:
        return found
    # A row of a bound is compared with an index that no tile need be made of.
    key = lax.broadcasted_iota(jnp.int32, shape, 0)
    row = lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1)
    first_key = place.key + keys.start
    shift = place.query + queries.start - first_key
    if c.left is not None:
        found.append(key >= row + (shift + c.left))
    end = c.kv_len - first_key
    stop = jnp.full_like(row, end) if c.right is None else jnp.minimum(row + (shift + c.right), end)
    found.append(key < stop)
    return found


def kept_pairs(c: Terms, refs: dict[str, Any], place: Place, queries: slice, keys: slice) -> Array:
    """Booleans ``[keys, queries]``: the weights that dropout keeps, which are then to be divided by ``1 - c.dropout``."""
    shape = keys.stop - keys.start, queries.stop - queries.start
    key = lax.bitcast_convert_type(refs["dropout_key"][place.batch], jnp.uint32)
    row = lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1) + (place.query + queries.start)
    row_key = dropout.row_keys(jnp.full((1, shape[1]), key), jnp.asarray(place.head), row)
    index = lax.broadcasted_iota(jnp.int32, (shape[0], LANES), 0) + (place.key + keys.start)
    hashed = dropout.finish(row_key ^ _across(dropout.column_keys(index), shape[1]))
    return hashed >= jnp.uint32(dropout.threshold(c.dropout))


def column(row: Array, width: int) -> Array:
    """``[1, n]`` as ``[n, width]``."""
    return _across(jnp.broadcast_to(row, (LANES, row.shape[1])).T, width)


def _across(x: Array, width: int) -> Array:
    """``[n, 128]``, the same in every lane, as ``[n, width]``."""
    return x[:, :width] if width <= LANES else jnp.tile(x, (1, -(-width // LANES)))[:, :width]


def _every(found: list[Array]) -> Array | None:
    return None if not found else found[0] if len(found) == 1 else found[0] & _every(found[1:])


def _of_pairs(ref: Any, axes: tuple[bool, ...], queries: slice, keys: slice, turned: Any) -> Array:
    """A bias's or a mask's part, float32 or int32, that broadcasts to ``[keys, queries]``; ``turned``: see ``TURNED``."""
    _, _, by_query, by_key = axes

    def wide(x: Array) -> Array:
        return x.astype(jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32)

    if by_query and by_key:
        x = ref[0, 0, queries, keys]
        # A float that is transposed before it is widened takes half the registers, and none are packed for it and unpacked again.
        turned[...] = x.T.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32).T
        return turned[...]
    if by_key:
        return column(wide(ref[0, 0, :, keys]), queries.stop - queries.start)
    return wide(ref[0, 0, :, queries] if by_query else ref[0, 0])


def of_names(c: Terms, refs: Any) -> dict[str, Any]:
    """The references that a kernel is given for ``inputs``, by name."""
    return dict(zip(c.names, refs, strict=True))
