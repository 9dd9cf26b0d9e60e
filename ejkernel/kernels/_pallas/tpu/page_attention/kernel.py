"""The device's side: one program goes over the steps of all tiles, each a few pages of one sequence.

Three things run ahead of each other, so that the memory always has requests: entries of the tables come to scalar memory
``LEAD`` steps before the pages that they name are asked for, and pages come ``stages - 1`` steps before they are computed on,
whatever tile and sequence they are of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu.generations import LANES, SUBLANES
from ejkernel.kernels._pallas.tpu.page_attention.geometry import Geometry
from ejkernel.kernels.common.softmax import LOG2E

LEAD = 3
# Columns of the tiles' table: the first chunk of the sequence's table, the place of the tile's first token in the context, its
# tokens, the first unit of its first step, its steps, the first unit that it reads and the one past the last, its example.
CHUNK, PLACE, COUNT, BASE, STEPS, FIRST, LAST, EXAMPLE, COLUMNS = range(9)
# Places in the state: tile, step and buffer of what is asked for next, by what runs ahead; then the buffer computed on.
ENTRY_TILE, ENTRY_STEP, ENTRY_SLOT, PAGE_TILE, PAGE_STEP, PAGE_SLOT, ENTRY_READ, SLOT, STATES = range(9)

# The running maximum of a row that has seen nothing; finite, so that no difference is NaN.
NOTHING = -1e30
# What e4m3 is multiplied by once it is unpacked as e4m3b11fnuz, whose exponents are 4 less.
STORED_UNIT = 16.0
LN2 = math.log(2.0)
_SIGNS = -0x7F7F7F80  # the upper bit of each byte, as an int32


@dataclass(frozen=True)
class Config:
    """What a kernel is compiled for.

    Attributes:
        left: how many keys before its own a token sees, None for all; ``left_by_data``: it lies behind the tiles' number.
        k_scale, v_scale: from one example's factors to the next one's; None without.
        columns: whether pages of keys, and of values, have tokens as columns; see ``page_columns``.
    """

    geometry: Geometry
    group: int
    value_dim: int
    blocks: int
    kv_heads: int
    scale: float
    cap: float | None
    left: int | None
    left_by_data: bool
    sinks: bool
    k_scale: int | None
    v_scale: int | None
    columns: tuple[bool, bool]


def kernel(c: Config, tiles: Any, needed: Any, *refs: Any) -> None:
    """One tile of one group of heads; see ``forward.py`` for the arrays."""
    refs = list(refs)
    k_scale = refs.pop(0) if c.k_scale is not None else None
    v_scale = refs.pop(0) if c.v_scale is not None else None
    query, entries, keys, values = (refs.pop(0) for _ in range(4))
    sinks = refs.pop(0) if c.sinks else None
    out, lse, state, names, k_pages, v_pages, tops, totals, sums, arrived, named = refs
    g = c.geometry
    program, tile = pl.program_id(0), pl.program_id(1)
    heads = pl.ds(program * g.heads, g.heads)
    # e4m3 is unpacked as another format; see `_widened`.
    mends = k_pages.dtype == jnp.float8_e4m3fn
    stored_unit = STORED_UNIT if mends else 1.0
    left = needed[1] if c.left_by_data else c.left
    key_columns, value_columns = c.columns

    def column(tile, name):
        return tiles[tile * COLUMNS + name]

    def advance(tile_at, step_at, slot_at, slots):
        at, step = state[tile_at], state[step_at] + 1
        ended = step == column(at, STEPS)
        state[tile_at] = jnp.where(ended, at + 1, at)
        state[step_at] = jnp.where(ended, 0, step)
        state[slot_at] = following(state[slot_at], slots)

    def following(slot, slots):
        return jnp.where(slot == slots - 1, 0, slot + 1)

    def factor_of(factors, stride, head):
        return factors[column(tile, EXAMPLE) * stride + program * g.heads + head]

    def entry_copy(chunk, slot):
        return pltpu.make_async_copy(entries.at[chunk], names.at[slot], named.at[slot])

    def page_copies(page, part, slot, unit):
        """Of all heads' keys, and of their values."""
        tokens = pl.ds(part * g.unit, g.unit)
        for pages, buffer, columns in ((keys, k_pages, key_columns), (values, v_pages, value_columns)):
            own = [] if g.parts == 1 else [slice(None), tokens] if columns else [tokens]
            source = pages.at[page, heads, *own]
            yield pltpu.make_async_copy(source, buffer.at[slot, unit], arrived.at[slot])

    def bounds(tile, step):
        """The first unit of a step, and which of its units are read."""
        base = column(tile, BASE) + step * g.units
        first = jnp.maximum(column(tile, FIRST) - base, 0)
        return base, first, jnp.minimum(column(tile, LAST) - base, g.units)

    def entry_of(unit):
        return unit if g.parts == 1 else lax.div(unit, jnp.int32(g.parts))

    def ask_for_entries():
        at = state[ENTRY_TILE]

        @pl.when(at < needed[0])
        def _():
            base, _, _ = bounds(at, state[ENTRY_STEP])
            chunk = column(at, CHUNK) + lax.shift_right_logical(entry_of(base), 7)
            entry_copy(chunk, state[ENTRY_SLOT]).start()
            advance(ENTRY_TILE, ENTRY_STEP, ENTRY_SLOT, LEAD + 1)

    def next_pages():
        """The step whose pages are asked for next: whether there is one, its first unit, which of its units are read."""
        at = state[PAGE_TILE]
        pending = at < needed[0]
        return pending, *bounds(jnp.where(pending, at, 0), state[PAGE_STEP])

    def ask(base, unit):
        """Ask for the pages of a unit of that step."""
        slot, read = state[PAGE_SLOT], state[ENTRY_READ]
        entry = jnp.bitwise_and(entry_of(base), LANES - 1)
        page = jnp.clip(names[read, 0, entry + unit], 0, c.blocks - 1)
        for copy in page_copies(page, base - entry_of(base) * g.parts, slot, unit):
            copy.start()

    def ask_for_pages(base, first, last):
        lax.fori_loop(first, last, lambda unit, _: ask(base, unit), None)

    def asked():
        state[ENTRY_READ] = following(state[ENTRY_READ], LEAD + 1)
        advance(PAGE_TILE, PAGE_STEP, PAGE_SLOT, g.stages)

    def wait_for_pages(slot, first, last):
        whole = last - first == g.units

        @pl.when(whole)
        def _():
            for buffer in (k_pages, v_pages):
                pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], arrived.at[slot]).wait()

        @pl.when(jnp.logical_not(whole))
        def _():
            def wait(unit, _):
                for copy in page_copies(0, 0, slot, unit):
                    copy.wait()

            lax.fori_loop(first, last, wait, None)

    @pl.when(tile == 0)
    def _():
        for i in range(STATES):
            state[i] = 0
        for i in range(LEAD + g.stages - 1):
            ask_for_entries()
            if i >= LEAD:
                pending, *units = next_pages()

                @pl.when(pending)
                def _(units=units):
                    entry_copy(0, state[ENTRY_READ]).wait()
                    ask_for_pages(*units)
                    asked()

    @pl.when(tile < needed[0])
    def _():
        place, count = column(tile, PLACE), column(tile, COUNT)
        few = -(-c.group // SUBLANES) * SUBLANES  # rows of one token
        start = 0 if left is None else jnp.maximum(place - left, 0)
        stop = jnp.maximum(place + count, 0)
        # What the last token does not see begins before `full_start`, what the first one does not see ends past `full_stop`.
        full_start = 0 if left is None else jnp.maximum(place + count - 1 - left, 0)
        full_stop = place + 1

        if c.sinks:
            top = sinks[0, 0] * LOG2E
            seen = top > NOTHING
            first_lane = lax.broadcasted_iota(jnp.int32, top.shape, 2) == 0
            tops[...] = jnp.where(seen, top, NOTHING)
            totals[...] = jnp.where(seen & first_lane, 1.0, 0.0)
        else:
            tops[...] = jnp.full(tops.shape, NOTHING, jnp.float32)
            totals[...] = jnp.zeros(totals.shape, jnp.float32)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

        def clear(slot, base):
            """Zeros in place of what no token of the tile sees: a weight of 0 times NaN is NaN."""
            if jnp.issubdtype(v_pages.dtype, jnp.integer):
                return

            def unit_of(unit, _):
                begin = (base + unit) * g.unit

                @pl.when((begin < start) | (begin + g.unit > stop))
                def _():
                    for pages, columns in ((v_pages, value_columns), (k_pages, key_columns))[: 1 + mends]:
                        page = pages[slot, unit].astype(jnp.float32)
                        at = begin + lax.broadcasted_iota(jnp.int32, page.shape, 2 if columns else 1)
                        pages[slot, unit] = jnp.where((at >= start) & (at < stop), page, 0).astype(pages.dtype)

            lax.fori_loop(jnp.int32(0), jnp.int32(g.units), unit_of, None)

        def attend(slot, base, rows, masked=False, asks=None):
            """A step of the running softmax. The heads' work lies side by side, or each would wait for its own latencies.

            ``asks``: the first unit of a step of which every unit is asked for beside this work, in scalar slots.
            """
            visible = _visible(c, rows, place, base * g.unit, left) if masked else None
            apart = masked and g.tokens > 1 and rows == g.rows  # rows see different keys
            heads, logits, spoilt = range(g.heads), [], []
            for head in heads:
                if asks is not None:
                    for unit in range(head * g.units // g.heads, (head + 1) * g.units // g.heads):
                        ask(asks, unit)
                factor = stored_unit * c.scale
                factor = factor if k_scale is None else factor * factor_of(k_scale, c.k_scale, head)
                key = _of_head(k_pages, slot, head, key_columns)
                key, nan = _widened(key, query.dtype, apart or key_columns)
                axes = (1, 0 if key_columns else 1)
                logits.append(_logits(c, _dot(query[0, 0, head, :rows], key, axes), factor, visible))
                spoilt.append(nan)
            before = [tops[head, :rows] for head in heads]
            top = [jnp.maximum(before[head], jnp.max(logits[head], 1, keepdims=True)) for head in heads]
            weights = [jnp.exp2(logits[head] - _over(top[head], g.keys)) for head in heads]
            products = []
            for head in heads:
                value = _of_head(v_pages, slot, head, value_columns)
                value, nan = _widened(value, query.dtype, apart or value_columns)
                product = _dot(weights[head].astype(value.dtype), value, (1, 1 if value_columns else 0))
                products.append(product if nan is None else product + nan)
            for head in heads:
                decay = jnp.exp2(before[head] - top[head])
                total = totals[head, :rows] * decay + _by_lane(weights[head])
                tops[head, :rows] = top[head]
                totals[head, :rows] = total if spoilt[head] is None else total + _in_lanes(spoilt[head])
                sums[head, :rows] = sums[head, :rows] * _over(decay, c.value_dim) + products[head]

        def step_of(step, _):
            ask_for_entries()
            slot = state[SLOT]
            base, first, last = bounds(tile, step)
            full = (base * g.unit >= full_start) & (base * g.unit + g.keys <= full_stop)
            # One token, alone or beside others' chunks.
            alone = True if few == g.rows else count == 1
            pending, next_base, next_first, next_last = next_pages()
            beside = full & alone & pending & (next_last - next_first == g.units)

            @pl.when(pending)
            def _():
                entry_copy(0, state[ENTRY_READ]).wait()

            @pl.when(pending & jnp.logical_not(beside))
            def _():
                ask_for_pages(next_base, next_first, next_last)

            wait_for_pages(slot, first, last)

            @pl.when(beside)
            def _():
                attend(slot, base, few, asks=next_base)

            @pl.when(full & alone & jnp.logical_not(beside))
            def _():
                attend(slot, base, few)

            @pl.when(jnp.logical_not(full))
            def _():
                clear(slot, base)

            @pl.when(alone & jnp.logical_not(full))
            def _():
                attend(slot, base, few, masked=True)

            if few < g.rows:
                pl.when(full & (count > 1))(lambda: attend(slot, base, g.rows))
                pl.when(jnp.logical_not(full) & (count > 1))(lambda: attend(slot, base, g.rows, masked=True))
            pl.when(pending)(asked)
            state[SLOT] = following(slot, g.stages)

        lax.fori_loop(jnp.int32(0), column(tile, STEPS), step_of, None)

        for head in range(g.heads):
            total = jnp.sum(totals[head], 1, keepdims=True)
            share = jnp.where(total == 0, 0, 1 / total)
            share = share * stored_unit
            if v_scale is not None:
                share = share * factor_of(v_scale, c.v_scale, head)
            out[0, 0, head] = (sums[head] * share).astype(out.dtype)
            row_lse = jnp.where(total == 0, -jnp.inf, tops[head] * LN2 + jnp.log(total))
            _store_as_lanes(lse.at[0, 0], head, row_lse)


def _of_head(pages: Any, slot: Any, head: int, columns: bool) -> Any:
    """A head's keys, or values, of a step: ``[keys, dim]``, ``[dim, keys]`` where tokens are columns."""
    if columns:
        return jnp.concatenate([pages[slot, unit, head] for unit in range(pages.shape[1])], 1)
    return pages[slot, :, head].reshape(-1, pages.shape[-1])


def _visible(c: Config, rows: int, place: Any, begin: Any, left: Any) -> Any:
    """Which keys of a step each row sees, ``[rows, keys]``."""
    key = begin + lax.broadcasted_iota(jnp.int32, (rows, c.geometry.keys), 1)
    own = place
    if c.geometry.tokens > 1:
        row = lax.broadcasted_iota(jnp.int32, key.shape, 0)
        # The quotient by the group, exact for these rows: the vector unit has no division.
        bits = 18
        own = place + lax.shift_right_logical(row * -(-(2**bits) // c.group), bits)
    visible = key <= own
    return visible if left is None else visible & (key >= own - left)


def _logits(c: Config, products: Any, factor: Any, visible: Any) -> Any:
    """In units of log 2, ``[rows, keys]``; -inf where a row does not see a key."""
    logits = products
    if c.cap is None:
        logits = logits * (factor * LOG2E)
    else:
        logits = jnp.tanh(logits * (factor / c.cap)) * (c.cap * LOG2E)
    return logits if visible is None else jnp.where(visible, logits, -jnp.inf)


def _dot(x: Any, y: Any, axes: tuple[int, int]) -> Any:
    """A product over one axis of each; of float32 in float32."""
    return lax.dot_general(
        x,
        y,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _widened(array: Any, dtype: Any, apart: bool) -> tuple[Any, Any]:
    """Stored numbers of 8 bits, those of e4m3 divided by ``STORED_UNIT``, in the query's dtype, which holds them exactly.

    And NaN, ``[1, columns]``, to be added to what comes of a column with NaN in it, for e4m3; None where NaN is NaN already, as it
    must be where some rows see it and others do not, or columns are tokens: ``apart``.
    """
    if array.dtype == dtype:
        return array, None
    if array.dtype != jnp.float8_e4m3fn:
        return array.astype(jnp.float32).astype(dtype), None
    # Hardware unpacks e4m3 of another bias, whose one NaN is this one's -0. Both are mended in four numbers at once; doing it after
    # the conversion, as the compiler does, took twice as long.
    words = pltpu.bitcast(array, jnp.int32)
    sizes = jnp.bitwise_and(words, 0x7F7F7F7F)
    # The upper bit of a byte is set where the size is not 0.
    mended = jnp.bitwise_and(words, jnp.bitwise_or(sizes + 0x7F7F7F7F, 0x7F7F7F7F))
    # Of NaN, whose bits below the sign are all set, adding one sets the sign's.
    found, nan = sizes + 0x01010101, None
    if apart:
        signs = jnp.bitwise_and(found, _SIGNS)
        bytes_of_nan = lax.shift_left(signs, 1) - lax.shift_right_logical(signs, 7)
        mended = jnp.bitwise_or(jnp.bitwise_and(mended, jnp.bitwise_not(bytes_of_nan)), signs)
    else:
        found = jnp.bitwise_and(lax.shift_right_logical(_any(found), 7), 0x01010101)
        nan = jnp.where(jnp.sum(found, 0, keepdims=True, dtype=jnp.int32) > 0, jnp.nan, 0.0)
    return pltpu.bitcast(mended, jnp.float8_e4m3b11fnuz).astype(jnp.float32).astype(dtype), nan


def _any(words: Any) -> Any:
    """The bits that any row has, ``[8, columns]``."""
    rows = words.shape[0] // SUBLANES
    parts = [words[i * SUBLANES : (i + 1) * SUBLANES] for i in range(rows)]
    while len(parts) > 1:
        parts = [*(x | y for x, y in zip(parts[::2], parts[1::2], strict=False)), *parts[len(parts) // 2 * 2 :]]
    return parts[0]


def _over(lanes: Any, width: int) -> Any:
    """A value that is the same in all lanes, for so many columns."""
    return lanes[:, :width] if width <= LANES else jnp.tile(lanes, (1, -(-width // LANES)))[:, :width]


def _in_lanes(row: Any) -> Any:
    """A row ``[1, columns]`` whose sum is NaN if any of it is, in one row of lanes."""
    return (
        jnp.sum(row, 1, keepdims=True)
        if row.shape[1] % LANES
        else sum(row[:, i : i + LANES] for i in range(0, row.shape[1], LANES))
    )


def _by_lane(weights: Any) -> Any:
    """Sums of every 128th column: what is left of a row's sum is done once, at the end."""
    whole = weights.shape[1] // LANES * LANES
    parts = [weights[:, i : i + LANES] for i in range(0, whole, LANES)]
    if whole < weights.shape[1]:
        rest = jnp.sum(weights[:, whole:], 1, keepdims=True)
        lane = lax.broadcasted_iota(jnp.int32, (weights.shape[0], LANES), 1)
        parts.append(jnp.where(lane == 0, rest, 0))
    return sum(parts[1:], parts[0])


def _store_as_lanes(ref: Any, head: int, column: Any) -> None:
    """Rows' values, the same in all lanes, as lanes of one row."""
    rows = column.shape[0]
    lane = lax.broadcasted_iota(jnp.int32, (min(rows, LANES), LANES), 1)
    row = lax.broadcasted_iota(jnp.int32, lane.shape, 0)
    for i in range(0, rows, LANES):
        part = column[i : i + LANES]
        diagonal = jnp.where((lane == row)[: part.shape[0]], part, 0)
        ref[head : head + 1, i : i + LANES] = jnp.sum(diagonal, 0, keepdims=True)
