"""Paged attention in plain XLA: online softmax over a context's own pages, read where they lie.

Dimension names: ``b`` sequences, ``s`` splits of a context, ``n`` pages a step, ``h`` key heads, ``g`` query heads a key head,
``t`` tokens (of a page, or of all pages of a step). Two ways of walking the pages have the same steps:

- ``OneByOne``: sequence after sequence, several pages a step, copied side by side and multiplied by matrix products. The
  work is that of the sum of lengths. For one CPU.
- ``AllAtOnce``: every sequence in each step. Products are multiplications and sums: a CPU's compiler fuses the gather of the
  pages into them, others may store a step's pages, so a step is kept small. The work is that of the longest context. For
  accelerators, and for arrays that are spread over devices.

Keys and values are converted to the dtype of the accumulators as they are read. Their scales are applied to the query and to
the output, never to a page.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.registry import kernel_registry
from ejkernel.contracts.support import ALL_FLOATS, Backend, Platform, Support, any_device
from ejkernel.kernels._xla.problem import load, store
from ejkernel.kernels.common.softmax import sink_terms, softmax_slope, sum_shared
from ejkernel.kernels.common.varying import vary_over, varying_axes

# One sequence at a time: enough tokens a step to outweigh its overhead, few enough to stay in a CPU's caches. Pages are
# laid side by side by a loop that asks for each token which page it is of, so that many pages cost more than many steps.
TOKENS_PER_STEP = 256
PAGES_PER_STEP = 8
MOST_PAGES_PER_STEP = 32
# All at once: numbers in the pages of one step, by the kind of device. Longer steps gain at most a quarter on an H200.
HELD_PER_STEP = {"gpu": 2**23}
HELD_ELSEWHERE = 2**21
# A backward step's pages are compared with each other to find shared blocks: so many at most.
COMPARED_PER_STEP = 64


@dataclass(frozen=True)
class Pages:
    """One call's geometry, and what both walks share."""

    arrays: dict[str, Array]
    spec: Any
    splits: int
    n: int

    @classmethod
    def make(cls, arrays: dict[str, Array], spec: Any, params: Any) -> Pages:
        """The walk that the parameters ask for: more than one query a step is all of them."""
        max_blocks, block_size = arrays["block_tables"].shape[1], arrays["key_cache"].shape[3]
        n = max(1, min((params.kv_blocksize or TOKENS_PER_STEP) // block_size, max_blocks))
        splits = min(getattr(params, "num_key_splits", None) or 1, max_blocks)
        if (params.q_blocksize or 1) > 1:
            return AllAtOnce(arrays, spec, splits, n)
        return OneByOne(arrays, spec, splits, min(n, MOST_PAGES_PER_STEP))

    @property
    def batch(self) -> int:
        return self.arrays["query"].shape[0]

    @property
    def kv_heads(self) -> int:
        return self.arrays["key_cache"].shape[2]

    @property
    def group(self) -> int:
        return self.arrays["query"].shape[1] // self.kv_heads

    @property
    def block_size(self) -> int:
        return self.arrays["key_cache"].shape[3]

    @property
    def acc(self):
        """The dtype of logits, statistics and accumulators."""
        return jnp.float64 if self.arrays["query"].dtype == jnp.float64 else jnp.float32

    def full(self, shape, fill, dtype=None) -> Array:
        """A constant that varies over the mesh axes the inputs vary over, as a loop's carry under ``shard_map`` must."""
        return vary_over(jnp.full(shape, fill, dtype or self.acc), varying_axes(self.arrays["query"]))

    def by_head(self, array: Array) -> Array:
        """``[B, H, d]`` in the accumulators' dtype as ``[B, h, g, d]``."""
        return array.astype(self.acc).reshape(self.batch, self.kv_heads, self.group, -1)

    def factor(self, name: str) -> Array | float:
        """A scale as ``[B|1, h, 1, 1]``, or 1."""
        return self.arrays[name][:, :, None, None] if name in self.arrays else 1.0

    def scaled_query(self) -> Array:
        """``[B, h, g, d]``: its product with stored keys is the logits."""
        return self.by_head(self.arrays["query"]) * self.spec.softmax_scale * self.factor("k_scale")

    def first_keys(self) -> Array:
        """``[B]``: the first key that each sequence sees."""
        lens = self.arrays["context_lens"]
        return jnp.zeros_like(lens) if self.spec.left is None else jnp.maximum(lens - 1 - self.spec.left, 0)

    def ranges(self) -> tuple[Array, Array]:
        """``[B, s]``: the first page of each split, and where it ends."""
        first = self.first_keys() // self.block_size
        stop = -(-self.arrays["context_lens"] // self.block_size)
        size = -(-jnp.maximum(stop - first, 0) // self.splits)
        start = first[:, None] + size[:, None] * jnp.arange(self.splits, dtype=jnp.int32)
        return start, jnp.minimum(start + size[:, None], stop[:, None])

    def safe_blocks(self, blocks: Array, owned: Array) -> Array:
        """Blocks to read: garbage in a table becomes block 0, whose values are then hidden."""
        return jnp.where(owned, jnp.clip(blocks, 0, self.arrays["key_cache"].shape[1] - 1), 0)

    def cap(self, s: Array) -> tuple[Array, Array | float]:
        """Capped logits and the cap's slope."""
        cap = self.spec.logits_soft_cap
        if cap is None:
            return s, 1.0
        bounded = jnp.tanh(s / cap)
        return cap * bounded, 1 - bounded * bounded

    def attend(self, place: Any, query: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        """One step of the online softmax: maximum, denominator and weighted values of the pages so far."""
        top, total, acc = state
        values = self.values(place)
        s = jnp.where(place.seen, self.cap(self.scores(query, self.keys(place)))[0], -jnp.inf)
        new_top = jnp.maximum(top, s.max(-1))
        shift = jnp.where(new_top == -jnp.inf, 0, new_top)
        weights = jnp.exp(s - shift[..., None])
        decay = jnp.exp(top - shift)
        total = total * decay + weights.sum(-1)
        return new_top, total, acc * decay[..., None] + self.mix(weights, values)

    def logit_gradients(
        self, place: Any, query: Array, dout: Array, lse: Array, slope: Array, v_scale: Any
    ) -> tuple[Array, ...]:
        """Weights, gradients of the weights by stored values, gradients of the logits before the cap; keys."""
        keys, values = self.hidden(place, self.keys(place)), self.values(place)
        s, cap_slope = self.cap(self.scores(query, keys))
        weights = jnp.exp(jnp.where(place.seen, s, -jnp.inf) - lse[..., None])
        dweights = self.scores(dout, values)
        ds = weights * (dweights * v_scale - slope[..., None]) * cap_slope
        return weights, dweights, jnp.where(place.seen, ds, 0), keys

    def blank_gradients(self, query: Array, wanted: frozenset[str]) -> tuple[Array | None, ...]:
        """Zeros to add to: for the scaled query, the value scale, the keys and the values; None where not wanted."""
        shapes = (
            query.shape,
            query.shape[:3] if "v_scale" in wanted else None,
            self.arrays["key_cache"].shape[1:] if "key_cache" in wanted else None,
            self.arrays["value_cache"].shape[1:] if "value_cache" in wanted else None,
        )
        return tuple(None if shape is None else self.full(shape, 0) for shape in shapes)

    def values(self, place: Any) -> Array:
        """A step's values, those that are not seen 0: their weight of 0 does not make a NaN 0."""
        return self.hidden(place, self.read(self.arrays["value_cache"], place))

    def keys(self, place: Any) -> Array:
        """A step's keys, garbage included."""
        return self.read(self.arrays["key_cache"], place)


@dataclass(frozen=True)
class Place:
    """A step's pages, ``[n]`` or ``[b, s, n]``: their blocks, which of them are owned, and which of their tokens are seen."""

    blocks: Any
    owned: Any
    seen: Array


class OneByOne(Pages):
    """One sequence at a time; see the module."""

    def place(self, b, page, stop) -> Place:
        """The pages from ``page`` on that belong to sequence ``b``."""
        slots = [page + j for j in range(self.n)]
        last = self.arrays["block_tables"].shape[1] - 1
        entries = [load(self.arrays["block_tables"], (b, jnp.minimum(i, last)), (1, 1))[0, 0] for i in slots]
        owned = [i < stop for i in slots]
        blocks = [self.safe_blocks(*pair) for pair in zip(entries, owned, strict=True)]
        key = page * self.block_size + jnp.arange(self.n * self.block_size, dtype=jnp.int32)
        end = jnp.minimum(_row(self.arrays["context_lens"], b), stop * self.block_size)
        return Place(blocks, owned, (key >= _row(self.first_keys(), b)) & (key < end))

    def read(self, cache: Array, place: Place) -> Array:
        """``[h, t, d]``."""
        shape = (1, 1, *cache.shape[2:])
        pages = [load(cache, (0, block, 0, 0, 0), shape)[0, 0] for block in place.blocks]
        return jnp.concatenate(pages, 1).astype(self.acc)

    def hidden(self, place: Place, tokens: Array) -> Array:
        return jnp.where(place.seen[:, None], tokens, 0)

    def scores(self, rows: Array, tokens: Array) -> Array:
        """``[h, g, d] · [h, t, d]`` → ``[h, g, t]``."""
        return _dot(rows, tokens, 2, 2)

    def mix(self, weights: Array, tokens: Array) -> Array:
        """``[h, g, t] · [h, t, d]`` → ``[h, g, d]``."""
        return _dot(weights, tokens, 2, 1)

    def spread(self, weights: Array, rows: Array) -> Array:
        """``[h, g, t] · [h, g, d]`` → ``[h, t, d]``."""
        return _dot(weights.swapaxes(1, 2), rows, 2, 1)

    def steps(self, start, stop, step, state):
        """Run ``step(page, state)`` for every ``n`` pages of a range."""
        count = -(-jnp.maximum(stop - start, 0) // self.n)
        return lax.fori_loop(jnp.int32(0), count, lambda i, state: step(start + i * self.n, state), state)

    def contexts(self, query: Array) -> tuple[Array, ...]:
        """The softmax's state after each split of each context, ``[B, s, h, g, …]``."""
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
        """As ``blank_gradients``, filled; the value scale's are one a sequence and head."""
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


class AllAtOnce(Pages):
    """Every sequence in each step; see the module. Arrays have axes ``[b, s]`` in front."""

    def place(self, page, stop) -> Place:
        """The pages from ``page [b, s]`` on."""
        tables, lens = self.arrays["block_tables"], self.arrays["context_lens"]
        slot = page[..., None] + jnp.arange(self.n, dtype=jnp.int32)
        owned = slot < stop[..., None]
        within = jnp.minimum(slot, tables.shape[1] - 1)
        entries = jnp.take_along_axis(tables, within.reshape(self.batch, -1), 1).reshape(slot.shape)
        key = (slot * self.block_size)[..., None] + jnp.arange(self.block_size, dtype=jnp.int32)
        low, high = (x[:, None, None, None] for x in (self.first_keys(), lens))
        seen = owned[..., None] & (key >= low) & (key < high)
        seen = seen.reshape(*page.shape, 1, 1, -1)
        return Place(self.safe_blocks(entries, owned), owned, seen)

    def read(self, cache: Array, place: Place) -> Array:
        """``[b, s, n, h, t, d]``."""
        pages = cache[0].at[place.blocks].get(mode="promise_in_bounds")
        return pages.astype(self.acc)

    def hidden(self, place: Place, tokens: Array) -> Array:
        seen = place.seen.reshape(*tokens.shape[:3], 1, self.block_size, 1)
        return jnp.where(seen, tokens, 0)

    def scores(self, rows: Array, tokens: Array) -> Array:
        """``[b, s, h, g, t]`` of all the step's tokens."""
        products = rows[:, :, None, :, :, None] * tokens[:, :, :, :, None]
        s = jnp.moveaxis(products.sum(-1), 2, 4)
        return s.reshape(*s.shape[:4], -1)

    def mix(self, weights: Array, tokens: Array) -> Array:
        """``[b, s, h, g, d]``."""
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
        """The softmax's state after each split of each context, ``[B, s, h, g, …]``."""
        rows = (self.batch, self.splits, self.kv_heads, self.group)
        state = self.full(rows, -jnp.inf), self.full(rows, 0)
        state = (*state, self.full((*rows, self.arrays["value_cache"].shape[4]), 0))
        return self.steps(lambda place, state: self.attend(place, query[:, None], state), state)

    def gradients(self, query: Array, dout: Array, lse: Array, slope: Array, wanted: frozenset[str]) -> tuple:
        """As ``blank_gradients``, filled; the value scale's are one a sequence and head."""
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


def forward(arrays: dict[str, Array], spec: Any, params: Any) -> tuple[Array, Array]:
    """Attention output ``[B, H, Dv]`` and the log-sum-exp of its logits ``[B, H]``."""
    p = Pages.make(arrays, spec, params)
    top, total, acc = _merged(*p.contexts(p.scaled_query()), p)
    out = jnp.where((total == 0)[..., None], 0, acc / total[..., None]) * p.factor("v_scale")
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(total))
    batch, heads, _ = arrays["query"].shape
    return out.reshape(batch, heads, -1).astype(arrays["query"].dtype), lse.reshape(batch, heads)


def _merged(top: Array, total: Array, acc: Array, p: Pages) -> tuple[Array, Array, Array]:
    """The splits of each context as one, and the sinks with them."""
    whole = top.max(1)
    sinks = p.arrays.get("softmax_aux")
    if sinks is not None:
        sinks = sinks.reshape(-1, p.kv_heads, p.group)
        whole = jnp.maximum(whole, sinks)
    shift = jnp.where(whole == -jnp.inf, 0, whole)
    share = jnp.exp(top - shift[:, None])
    total, acc = (total * share).sum(1), (acc * share[..., None]).sum(1)
    return whole, total if sinks is None else total + jnp.exp(sinks - shift), acc


def backward(
    arrays: dict[str, Array],
    spec: Any,
    params: Any,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
    wanted: frozenset[str],
) -> dict[str, Array]:
    """The wanted gradients, from the residuals ``(out, lse)``."""
    p = Pages.make(arrays, spec, params)
    rows = (p.batch, p.kv_heads, p.group)
    nothing = lse == -jnp.inf
    finite_lse = jnp.where(nothing, 0, lse).reshape(rows)
    slope = softmax_slope(out, dout, dlse, lambda products: products.sum(-1))
    slope = jnp.where(nothing, 0, slope).reshape(rows)
    dq, dv_scale, dk, dv = p.gradients(p.scaled_query(), p.by_head(dout), finite_lse, slope, wanted)
    grads: dict[str, Array] = {}
    if "query" in wanted:
        dquery = dq * spec.softmax_scale * p.factor("k_scale")
        grads["query"] = dquery.reshape(arrays["query"].shape).astype(arrays["query"].dtype)
    if dk is not None:
        grads["key_cache"] = dk[None].astype(arrays["key_cache"].dtype)
    if dv is not None:
        grads["value_cache"] = dv[None].astype(arrays["value_cache"].dtype)
    if "k_scale" in wanted:
        # A context without tokens has no part in the scale, be its query NaN.
        bare = arrays["context_lens"][:, None, None, None] == 0
        products = jnp.where(bare, 0, p.by_head(arrays["query"])) * dq
        grads["k_scale"] = _like(arrays["k_scale"], products.sum((2, 3)) * spec.softmax_scale)
    if dv_scale is not None:
        grads["v_scale"] = _like(arrays["v_scale"], dv_scale.sum(2))
    if "softmax_aux" in wanted:
        sinks = arrays["softmax_aux"]
        heads = sinks.reshape(-1, p.kv_heads, p.group)
        grads["softmax_aux"] = _like(sinks, -sink_terms(heads, finite_lse, slope).reshape(lse.shape))
    return grads


def _like(array: Array, gradient: Array) -> Array:
    """A gradient ``[B, …]`` summed over a batch that shares the array."""
    return sum_shared(array, gradient).astype(array.dtype)


def _row(array: Array, index) -> Array:
    return load(array, (index, *[0] * (array.ndim - 1)), (1, *array.shape[1:]))[0]


def _put(array: Array, row: Array, index) -> Array:
    return store(array, row[None], (index, *[0] * row.ndim))


def _dot(a: Array, b: Array, contract_a: int, contract_b: int) -> Array:
    dims = (((contract_a,), (contract_b,)), ((0,), (0,)))
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=a.dtype)


class XlaPageAttention:
    """The implementation for every device."""

    name = "page-xla"
    version = 1
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Sequences (``q_blocksize``) and tokens (``kv_blocksize``) a step where nothing was tuned."""
        cls = FwdParams if direction == "forward" else BwdParams
        batch = shapes["query"].shape[0]
        _, _, kv_heads, block_size, dim = shapes["key_cache"].shape
        if device.kind == "cpu" and device.shared_by == 1:
            return cls(q_blocksize=1, kv_blocksize=max(block_size, min(TOKENS_PER_STEP, PAGES_PER_STEP * block_size)))
        held = HELD_PER_STEP.get(device.kind, HELD_ELSEWHERE) if direction == "forward" else HELD_ELSEWHERE
        tokens = held // (batch * kv_heads * dim)
        if direction == "backward":
            tokens = min(tokens, COMPARED_PER_STEP * block_size // batch)
        longest = shapes["block_tables"].shape[1] * block_size
        return cls(q_blocksize=max(2, batch), kv_blocksize=max(block_size, min(tokens, longest)))

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
        """Steps worth trying."""
        first = XlaPageAttention.defaults(shapes, spec, device, direction)
        block_size = shapes["key_cache"].shape[3]
        sizes = {max(block_size, first.kv_blocksize * times // 4) for times in (1, 2, 4, 8)}
        return [dataclasses.replace(first, kv_blocksize=size) for size in sorted(sizes)]


kernel_registry.register(
    "page_attention",
    Platform.XLA,
    Backend.ANY,
    support=Support(
        devices=any_device(),
        dtypes=ALL_FLOATS,
        features={
            "window",
            "soft_cap",
            "sinks",
            "int8_cache",
            "fp8_cache",
            "scales",
            "gqa",
            "value_dim",
            "lse",
        },
        gradients={"query", "key_cache", "value_cache", "softmax_aux", "k_scale", "v_scale"},
    ),
)(XlaPageAttention)
