"""Where the tokens of paged sequences are: what ``page_attention`` and ``page_update`` share."""

from __future__ import annotations

import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.ops.core.checks import Checker, is_array
from ejkernel.utils.values import concrete

# Cache dtypes that may stand beside a query of another dtype, and the feature each one asks of a kernel.
NARROW_CACHES = {"int8": "int8_cache", "float8_e4m3fn": "fp8_cache", "float8_e5m2": "fp8_cache"}


def as_factor(scale: Any) -> Any:
    """A scale that is a Python number as an array."""
    plain = isinstance(scale, numbers.Real) and not isinstance(scale, bool | np.generic)
    return np.float64(scale) if plain else scale


def check_factor(check: Checker, name: str, scale: Any, kv_heads: int) -> None:
    """A scale for all key heads, or one each, or none."""
    if scale is None:
        return
    layout = f"a scalar or [{kv_heads}], one a key head"
    check.array(name, scale, layout, ranks=(0, 1), kinds=(jnp.floating,))
    if scale.shape not in ((), (kv_heads,)):
        check.fail(name, scale, layout)


def check_caches(check: Checker, keys: Any, values: Any, dtype: Any = None) -> None:
    """Two caches of the same blocks, heads, block size and dtype: the query's, if it is given, or one of 8 bits."""
    for name, array, last in (("key_cache", keys, "head_dim"), ("value_cache", values, "value_dim")):
        layout = f"[num_blocks, kv_heads, block_size, {last}]"
        check.array(name, array, layout, ranks=(4,), kinds=(jnp.floating, jnp.integer))
        if 0 in array.shape[1:]:
            check.fail(name, array, f"{layout} with every size but the number of blocks at least 1")
    own = jnp.dtype(keys.dtype)
    if own.name not in NARROW_CACHES:
        if dtype is not None and own != dtype:
            check.fail("key_cache", keys, f"the query's dtype, {dtype}, or one of {', '.join(NARROW_CACHES)}")
        if own.itemsize == 1 or not jnp.issubdtype(own, jnp.floating):
            check.fail("key_cache", keys, f"a float dtype, or one of {', '.join(NARROW_CACHES)}")
    if values.dtype != keys.dtype:
        check.fail("value_cache", values, f"the key cache's dtype, {keys.dtype}: cast one of them")
    if values.shape[:3] != keys.shape[:3]:
        check.fail("value_cache", values, f"the key cache's blocks, heads and block size, {list(keys.shape[:3])}")


def check_placement(check: Checker, lens: Any, tables: Any, offsets: Any, tokens: int) -> int:
    """Check the shapes of lengths, tables and offsets beside so many tokens; how many sequences there are."""
    if offsets is None:
        batch = tokens
        expected = "as the batch is, for each sequence has one token without cum_seqlens_q"
    else:
        check.array("cum_seqlens_q", offsets, "[batch + 1] integers", ranks=(1,), kinds=(jnp.integer,))
        if offsets.shape[0] < 1:
            check.fail("cum_seqlens_q", offsets, "[batch + 1] offsets, the first of them 0")
        batch = offsets.shape[0] - 1
        expected = "one less than cum_seqlens_q has offsets"
    for name, array, layout, ranks in (
        ("context_lens", lens, f"[{batch}] integers", (1,)),
        ("block_tables", tables, f"[{batch}, max_blocks] integers", (2,)),
    ):
        check.array(name, array, layout, ranks=ranks, kinds=(jnp.integer,))
        if array.shape[0] != batch:
            check.fail(name, array, f"{layout}, {expected}")
    return batch


def check_placement_values(
    check: Checker, a: dict[str, Any], queries: Any, left: int | None, *, written: bool = False
) -> None:
    """Refuse concrete offsets, lengths and table entries that lead out of the arrays.

    Entries that are needed must name a block: all of a context's, or those that a window of ``left`` keys leaves. Where
    tokens are ``written``, only their own are needed, and those below 0 write nothing.
    """
    cache, tables, lens, offsets = a["key_cache"], a["block_tables"], a["context_lens"], a["cum_seqlens_q"]
    if all(concrete(x) is None for x in (lens, tables, offsets) if x is not None):
        return
    ranks = [len(x.shape) if is_array(x) else 0 for x in (lens, tables, cache, queries)]
    if ranks != [1, 2, 4, 3] or 0 in cache.shape[1:]:
        return  # what the shapes are wrong for is said by the checks of shapes
    starts, counts = _check_offsets(check, offsets, lens, queries)
    known = _integers(lens)
    if known is None:
        return
    blocks, _, block_size, _ = cache.shape
    longest = tables.shape[1] * block_size
    if known.min() < 0 or known.max() > longest:
        check.fail(
            "context_lens",
            lens,
            f"lengths from 0 to {longest}, which is max_blocks × block_size; they are {shown(known)}",
        )
    if starts is not None and (counts > known).any():
        worst = int(np.argmax(counts - known))
        check.fail(
            "cum_seqlens_q",
            offsets,
            f"no more tokens a sequence than its context has, for context_lens counts them too; sequence {worst} has "
            f"{counts[worst]} and a context of {known[worst]}",
        )
    entries = _integers(tables)
    if entries is None or entries.shape[0] != known.size:
        return
    new = np.ones(known.size, np.int64) if counts is None else counts
    before = 0 if written else left
    first = 0 if before is None else np.maximum(known - np.maximum(new, 1) - before, 0)[:, None] // block_size
    slot = np.arange(entries.shape[1])
    needed = (slot >= first) & (slot * block_size < known[:, None]) & (new > 0)[:, None]
    wrong = needed & ((entries >= blocks) | ((entries < 0) & (not written)))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        check.fail(
            "block_tables",
            tables,
            f"blocks from 0 to {blocks - 1} wherever a context has tokens; [{row}, {column}] is {entries[row, column]} "
            f"and context {row} has {known[row]} tokens",
        )


def _check_offsets(check: Checker, offsets: Any, lens: Any, queries: Any) -> tuple[Any, Any]:
    """Concrete offsets, and the number of tokens of each sequence; None for both if they cannot be read."""
    known = None if offsets is None or not is_array(offsets) or len(offsets.shape) != 1 else _integers(offsets)
    if known is None or known.size != lens.shape[0] + 1:
        return None, None
    tokens, counts = queries.shape[0], np.diff(known)
    if known[0] != 0 or (counts < 0).any() or known[-1] > tokens:
        check.fail(
            "cum_seqlens_q",
            offsets,
            f"offsets that begin at 0, never decrease and end at {tokens}, the number of tokens, at most; they are "
            f"{shown(known)}",
        )
    return known, counts


def _integers(array: Any) -> np.ndarray | None:
    """The values as int64 if they can be read without a copy from a device, and there are any."""
    known = concrete(array)
    if known is None or not known.size or known.dtype.kind not in "iu":
        return None
    return known.astype(np.int64)


def shown(values: np.ndarray) -> str:
    """A few of the values, for an error."""
    return np.array2string(values, threshold=8)


def placement(lens: Any, tables: Any, offsets: Any, tokens: int, block_size: int) -> dict[str, Array]:
    """Lengths ``[B]``, tables ``[B, max_blocks]`` and starts ``[B + 1]`` (if packed) as int32.

    Traced values cannot be refused; they must still not lead out of the table or the tokens.
    """
    lens, tables = jnp.asarray(lens), jnp.asarray(tables)
    found = {
        "context_lens": _clipped(lens, tables.shape[1] * block_size),
        "block_tables": _entries(tables),
    }
    if offsets is not None:
        found["query_starts"] = lax.cummax(_clipped(jnp.asarray(offsets), tokens))
    return found


def _entries(tables: Array) -> Array:
    """As int32; an entry that is too wide for it must not become that of a block."""
    if tables.dtype.itemsize < 4 or tables.dtype == jnp.int32:
        return tables.astype(jnp.int32)
    least = 0 if jnp.issubdtype(tables.dtype, jnp.unsignedinteger) else -1
    return jnp.clip(tables, least, np.iinfo(np.int32).max).astype(jnp.int32)


def _clipped(values: Array, most: int) -> Array:
    wide = values if values.dtype.itemsize >= 4 else values.astype(jnp.int32)
    return jnp.clip(wide, 0, most).astype(jnp.int32)
