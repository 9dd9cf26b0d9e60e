"""Two ways to go over the pages of all contexts, with the same steps; dimension names as in ``pages.py``.

- ``OneSequenceWalk``: tile after tile, several pages a step, copied side by side and multiplied by matrix products.
  The work is that of the sum of lengths. For one CPU.
- ``AllSequencesWalk``: every tile in each step. Products with one token a tile are multiplications and sums: a CPU's compiler fuses the gather
  of the pages into them, others may store a step's pages, so a step is kept small. The work is that of the longest context.
  For accelerators, and for arrays that are spread over devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels._xla.pages import PageWalk, Place
from ejkernel.kernels._xla.primitives import dot, load, store


class OneSequenceWalk(PageWalk):
    """One tile at a time; see the module."""

    def place(self, b, page, stop) -> Place:
        """The pages from ``page`` on that belong to tile ``b``."""
        slots = [page + j for j in range(self.n)]
        last = self.arrays["block_tables"].shape[1] - 1
        entries = [load(self.arrays["block_tables"], (b, jnp.minimum(i, last)), (1, 1))[0, 0] for i in slots]
        owned = [i < stop for i in slots]
        blocks = [self.safe_blocks(*pair) for pair in zip(entries, owned, strict=True)]
        key = page * self.block_size + jnp.arange(self.n * self.block_size, dtype=jnp.int32)
        low = _row(self.first_keys(), b)[:, None]
        high = jnp.minimum(_row(self.row_stops(), b), stop * self.block_size)[:, None]
        return Place(blocks, owned, (key >= low) & (key < high), (key >= low.min()) & (key < high.max()))

    def read(self, cache: Array, place: Place) -> Array:
        """``[h, t, d]``."""
        shape = (1, 1, *cache.shape[2:])
        pages = [load(cache, (0, block, 0, 0, 0), shape)[0, 0] for block in place.blocks]
        return jnp.concatenate(pages, 1).astype(self.acc)

    def hidden(self, place: Place, tokens: Array) -> Array:
        return jnp.where(place.used[:, None], tokens, 0)

    def scores(self, rows: Array, tokens: Array) -> Array:
        """``[h, g, d] · [h, t, d]`` → ``[h, g, t]``."""
        return dot(rows, tokens, -1, -1, rows.dtype)

    def mix(self, weights: Array, tokens: Array) -> Array:
        """``[h, g, t] · [h, t, d]`` → ``[h, g, d]``."""
        return dot(weights, tokens, -1, -2, weights.dtype)

    def spread(self, weights: Array, rows: Array) -> Array:
        """``[h, g, t] · [h, g, d]`` → ``[h, t, d]``."""
        return dot(weights.swapaxes(1, 2), rows, -1, -2, weights.dtype)

    def steps(self, start, stop, step, state):
        """Run ``step(page, state)`` for every ``n`` pages of a range."""
        count = -(-jnp.maximum(stop - start, 0) // self.n)
        return lax.fori_loop(jnp.int32(0), count, lambda i, state: step(start + i * self.n, state), state)

    def contexts(self, query: Array) -> tuple[Array, ...]:
        """The softmax's state after each split of each context, ``[b, s, h, g, …]``."""
        starts, stops = self.ranges()
        rows = (self.batch * self.splits, self.kv_heads, self.group)
        dim = self.arrays["value_cache"].shape[4]
        single = (rows[1:], rows[1:], (*rows[1:], dim))

        def row(r, states):
            b = r // self.splits
            start, stop = _row(starts.reshape(-1), r), _row(stops.reshape(-1), r)
            own = _row(query, b)

            def step(page, state):
                return self.attend(self.place(b, page, stop), own, state)

            fresh = tuple(self.full(shape, fill) for shape, fill in zip(single, (-jnp.inf, 0, 0), strict=True))
            done = self.steps(start, stop, step, fresh)
            return tuple(_put(all_, one, r) for all_, one in zip(states, done, strict=True))

        states = tuple(self.full((rows[0], *shape), 0) for shape in single)
        states = lax.fori_loop(jnp.int32(0), jnp.int32(rows[0]), row, states)
        return tuple(x.reshape(self.batch, self.splits, *x.shape[1:]) for x in states)

    def gradients(self, query: Array, dout: Array, lse: Array, slope: Array, wanted: frozenset[str]) -> tuple:
        """As ``blank_gradients``, filled; the value scale's are one a row."""
        starts, stops = self.ranges()
        scale = jnp.broadcast_to(jnp.asarray(self.factor("v_scale"), self.acc), (self.batch, self.kv_heads, 1, 1))

        def row(b, carry):
            dq, dscale, dk, dv = carry
            start, stop, own, do, row_lse, row_slope, v_scale = (
                _row(x, b) for x in (starts[:, 0], stops[:, 0], query, dout, lse, slope, scale)
            )

            def step(page, carry):
                dq, dscale, dk, dv = carry
                place = self.place(b, page, stop)
                weights, dweights, ds, keys = self.logit_gradients(place, own, do, row_lse, row_slope, v_scale)
                dq = dq + self.mix(ds, keys)
                if dscale is not None:
                    dscale = dscale + (weights * dweights).sum(-1)
                if dk is not None:
                    dk = self.add_pages(dk, place, self.spread(ds, own))
                if dv is not None:
                    dv = self.add_pages(dv, place, self.spread(weights, do * v_scale))
                return dq, dscale, dk, dv

            zero = self.full(own.shape[:2], 0) if dscale is not None else None
            dq_row, dscale_row, dk, dv = self.steps(start, stop, step, (self.full(own.shape, 0), zero, dk, dv))
            dscale = None if dscale is None else _put(dscale, dscale_row, b)
            return _put(dq, dq_row, b), dscale, dk, dv

        start = self.blank_gradients(query, wanted)
        return lax.fori_loop(jnp.int32(0), jnp.int32(self.batch), row, start)

    def add_pages(self, total: Array, place: Place, tokens: Array) -> Array:
        """A cache's gradient with a step's tokens added, one page after another; garbage entries add nothing."""
        tokens = self.hidden(place, tokens)
        for j, block in enumerate(place.blocks):
            page = tokens[:, j * self.block_size : (j + 1) * self.block_size]
            at = (block, 0, 0, 0)
            total = store(total, load(total, at, (1, *page.shape)) + page[None], at)
        return total


class AllSequencesWalk(PageWalk):
    """Every tile in each step; see the module. Arrays have axes ``[b, s]`` in front."""

    def place(self, page, stop) -> Place:
        """The pages from ``page [b, s]`` on."""
        tables = self.arrays["block_tables"]
        slot = page[..., None] + jnp.arange(self.n, dtype=jnp.int32)
        owned = slot < stop[..., None]
        within = jnp.minimum(slot, tables.shape[1] - 1)
        entries = jnp.take_along_axis(tables, within.reshape(self.batch, -1), 1).reshape(slot.shape)
        key = (slot * self.block_size)[..., None] + jnp.arange(self.block_size, dtype=jnp.int32)
        low, high = self.first_keys(), self.row_stops()

        def between(low, high):
            return (owned[..., None] & (key >= low) & (key < high)).reshape(*page.shape, -1)

        used = between(*(x[:, None, None, None] for x in (low.min(1), high.max(1))))
        if self.tile == 1:
            seen = used[:, :, None, None]
        else:
            rows = [x.T[:, :, None, None, None] for x in (low, high)]
            seen = jnp.moveaxis(jax.vmap(between)(*rows), 0, 2)[:, :, None]
        return Place(self.safe_blocks(entries, owned), owned, seen, used)

    def read(self, cache: Array, place: Place) -> Array:
        """``[b, s, n, h, t, d]``."""
        pages = cache[0].at[place.blocks].get(mode="promise_in_bounds")
        return pages.astype(self.acc)

    def hidden(self, place: Place, tokens: Array) -> Array:
        used = place.used.reshape(*tokens.shape[:3], 1, self.block_size, 1)
        return jnp.where(used, tokens, 0)

    def scores(self, rows: Array, tokens: Array) -> Array:
        """``[b, s, h, g, t]`` of all the step's tokens."""
        if self.tile > 1:
            s = jnp.einsum("bzhgd,bsnhtd->bshgnt", rows, tokens, precision=lax.Precision.HIGHEST)
            return s.reshape(*s.shape[:4], -1)
        products = rows[:, :, None, :, :, None] * tokens[:, :, :, :, None]
        s = jnp.moveaxis(products.sum(-1), 2, 4)
        return s.reshape(*s.shape[:4], -1)

    def mix(self, weights: Array, tokens: Array) -> Array:
        """``[b, s, h, g, d]``."""
        if self.tile > 1:
            return jnp.einsum("bsnhgt,bsnhtd->bshgd", self.by_page(weights), tokens, precision=lax.Precision.HIGHEST)
        return (self.by_page(weights)[..., None] * tokens[:, :, :, :, None]).sum((2, 5))

    def spread(self, weights: Array, rows: Array) -> Array:
        """``[b, s, n, h, t, d]``."""
        # Not a product and a sum like its neighbours: the CPU compiler of jax 0.10 turns those into a call that writes past
        # its buffer when this one is in a loop.
        return jnp.einsum("bsnhgt,bzhgd->bsnhtd", self.by_page(weights), rows, precision=lax.Precision.HIGHEST)

    def by_page(self, weights: Array) -> Array:
        """``[b, s, h, g, n*t]`` as ``[b, s, n, h, g, t]``."""
        return jnp.moveaxis(weights.reshape(*weights.shape[:4], self.n, self.block_size), 4, 2)

    def steps(self, step, state):
        """Run ``step(place, state)`` until the longest split ends."""
        start, stop = self.ranges()
        count = -(-jnp.maximum(stop - start, 0).max() // self.n)
        return lax.fori_loop(
            jnp.int32(0), count, lambda i, state: step(self.place(start + i * self.n, stop), state), state
        )

    def contexts(self, query: Array) -> tuple[Array, ...]:
        """The softmax's state after each split of each context, ``[b, s, h, g, …]``."""
        rows = (self.batch, self.splits, self.kv_heads, self.group)
        state = self.full(rows, -jnp.inf), self.full(rows, 0)
        state = (*state, self.full((*rows, self.arrays["value_cache"].shape[4]), 0))
        return self.steps(lambda place, state: self.attend(place, query[:, None], state), state)

    def gradients(self, query: Array, dout: Array, lse: Array, slope: Array, wanted: frozenset[str]) -> tuple:
        """As ``blank_gradients``, filled; the value scale's are one a row."""
        query, dout, lse, slope = (x[:, None] for x in (query, dout, lse, slope))
        factor = self.factor("v_scale")
        v_scale = factor[:, None] if isinstance(factor, Array) else factor

        def step(place, carry):
            dq, dscale, dk, dv = carry
            weights, dweights, ds, keys = self.logit_gradients(place, query, dout, lse, slope, v_scale)
            dq = dq + self.mix(ds, keys)[:, 0]
            if dscale is not None:
                dscale = dscale + (weights * dweights).sum(-1)[:, 0]
            if dk is not None:
                dk = self.add_pages(dk, place, self.spread(ds, query))
            if dv is not None:
                dv = self.add_pages(dv, place, self.spread(weights, dout * v_scale))
            return dq, dscale, dk, dv

        return self.steps(step, self.blank_gradients(query[:, 0], wanted))

    def add_pages(self, total: Array, place: Place, tokens: Array) -> Array:
        """A cache's gradient with a step's tokens added; garbage entries add nothing.

        Sequences may share blocks. Those are summed in order before they are added, so that each block is written once:
        a device need not make its writes atomic, and a rerun gives the same bits.
        """
        owned, blocks = place.owned.reshape(-1), place.blocks.reshape(-1)
        tokens = self.hidden(place, tokens).reshape(-1, *total.shape[1:])
        rows = jnp.arange(blocks.size, dtype=jnp.int32)
        same = (blocks[:, None] == blocks) & owned
        first = owned & (jnp.argmax(same, 1) == rows)

        def joined(tokens):
            return jnp.where(same[..., None, None, None], tokens, 0).sum(1)

        tokens = lax.cond((owned & ~first).any(), joined, lambda tokens: tokens, tokens)
        # Rows without a block of their own point past the end, each elsewhere, and are dropped.
        at = jnp.where(first, blocks, total.shape[0] + rows)
        return total.at[at].add(tokens, mode="drop", unique_indices=True)


def _row(array: Array, index) -> Array:
    return load(array, (index, *[0] * (array.ndim - 1)), (1, *array.shape[1:]))[0]


def _put(array: Array, row: Array, index) -> Array:
    return store(array, row[None], (index, *[0] * row.ndim))
