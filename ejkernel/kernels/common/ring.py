"""Ring attention: each device keeps its queries, the keys go round, and a flash kernel does each step.

Device ``d`` of ``n`` meets the keys of device ``d - t`` at step ``t``. The keys for the next step are sent before the step that
they overlap with is computed. ``(out, lse)`` of the steps are merged in float32. The backward sends the keys round again
and their gradients with them, one step behind, so that sending overlaps with computing there too.

Which pairs of a step count follows from where the shards lie:

- without a window a step is whole, causal or empty; in the zigzag layout a causal step is whole too, for half of the
  keys or half of the queries, so plain flash calls without masks do all of it;
- with a window each query sees an interval of the keys that passed by, the form that flash kernels have for packed sequences.

``step`` and ``pull`` are the forward and the backward of the flash kernel: ``step(arrays, causal) -> (out, lse)`` and
``pull(arrays, causal, out, lse, dout, dlse) -> grads``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels.common.precision import accumulator_dtype
from ejkernel.kernels.common.softmax import merge, merge_sinks, sink_gradient, softmax_slope, sum_last
from ejkernel.kernels.common.varying import full_beside, vary_over

KEYS = ("key", "value", "kv_segment_ids")


@dataclass(frozen=True)
class Ring:
    """The ring and what each device holds of the sequence.

    Attributes:
        axis: the mesh axis, or axes.
        size: devices in the ring.
        length: of a device's queries and of its keys.
        causal: whether a query sees no key after it.
        window: ``(left, right)`` in positions of the whole sequence; ``[B|1]`` each where they are data.
        zigzag: whether device ``d`` holds the chunks ``d`` and ``2 * size - 1 - d``, else it holds chunk ``d``.
    """

    axis: Any
    size: int
    length: int
    causal: bool
    window: tuple[int | Array | None, int | Array | None]
    zigzag: bool

    @property
    def windowed(self) -> bool:
        """Whether a sliding window bounds what a query sees."""
        return any(side is not None for side in self.window)

    @property
    def last_step(self) -> int:
        """The last step at which any device has work."""
        left, _ = self.window
        if self.causal and isinstance(left, int) and not self.zigzag:
            return min(self.size - 1, -(-left // self.length))
        return self.size - 1

    def source(self, step) -> Array:
        """Whose keys a device has at a step."""
        return (lax.axis_index(self.axis) - step) % self.size

    def hop(self, tree: Any, distance: int = 1) -> Any:
        """Send to the device that far ahead."""
        pairs = [(d, (d + distance) % self.size) for d in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, pairs), tree)

    def positions(self) -> Array:
        """Where a device's queries lie in the whole sequence."""
        own, i = lax.axis_index(self.axis), jnp.arange(self.length, dtype=jnp.int32)
        if not self.zigzag:
            return own * self.length + i
        half = self.length // 2
        return jnp.where(i < half, own * half + i, (2 * self.size - 1 - own) * half + i - half)

    def index_of(self, position: Array, source: Array) -> Array:
        """How many of a device's keys lie before a position of the whole sequence."""
        if not self.zigzag:
            return jnp.clip(position - source * self.length, 0, self.length)
        half = self.length // 2
        before = jnp.clip(position - source * half, 0, half)
        return before + jnp.clip(position - (2 * self.size - 1 - source) * half, 0, half)

    def intervals(self, source: Array) -> dict[str, Array]:
        """The keys of a device that each query sees, ``[B|1, length]`` starts and stops."""
        position = self.positions()[None]
        left, right = (side[:, None] if isinstance(side, Array) else side for side in self.window)
        right = 0 if self.causal else right
        start = jnp.zeros_like(position) if left is None else self.index_of(position - left, source)
        stop = jnp.full_like(position, self.length) if right is None else self.index_of(position + right + 1, source)
        start, stop = jnp.broadcast_arrays(start, stop)
        return {"kv_start": start, "kv_stop": jnp.maximum(start, stop)}


class _Part(NamedTuple):
    """A part of a step: some of the queries beside some of the keys, whole, causal or by intervals."""

    queries: slice = slice(None)
    keys: slice = slice(None)
    causal: bool = False
    intervals: dict[str, Array] | None = None

    def of(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """The flash kernel's arrays."""
        cut = {name: array[:, self.keys if name in KEYS else self.queries] for name, array in arrays.items()}
        return {**cut, **(self.intervals or {})}


def _at_step(ring: Ring, step, compute: Callable[[_Part, Any], Any], carry: Any) -> Any:
    """Do what a step has to do, if anything: ``compute(part, carry)``."""
    source, own = ring.source(step), lax.axis_index(ring.axis)
    half = ring.length // 2
    if ring.windowed:
        intervals = ring.intervals(source)
        live = (intervals["kv_stop"] > intervals["kv_start"]).any()
        return lax.cond(live, lambda c: compute(_Part(intervals=intervals), c), lambda c: c, carry)
    if not ring.causal:
        return compute(_Part(), carry)
    if not ring.zigzag:
        return lax.cond(source < own, lambda c: compute(_Part(), c), lambda c: c, carry)
    # All queries come after the first half of earlier keys, the second half of the queries after all later keys.
    earlier, later = _Part(keys=slice(half)), _Part(queries=slice(half, None))
    return lax.cond(source < own, lambda c: compute(earlier, c), lambda c: compute(later, c), carry)


def _own_part(ring: Ring) -> _Part:
    """A device's queries beside its own keys, which lie in the same order."""
    return _Part(intervals=ring.intervals(ring.source(0))) if ring.windowed else _Part(causal=ring.causal)


def _split(arrays: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """What stays and what goes round."""
    keys = {name: array for name, array in arrays.items() if name in KEYS}
    return {name: array for name, array in arrays.items() if name not in KEYS}, keys


def forward(arrays: dict[str, Array], ring: Ring, step: Callable) -> tuple[Array, Array]:
    """Output and log-sum-exp of a device's queries over the whole sequence."""
    arrays = {name: vary_over(array, _axes(ring)) for name, array in arrays.items()}
    sinks = arrays.pop("softmax_aux", None)
    queries, keys = _split(arrays)
    dtype, acc = queries["query"].dtype, accumulator_dtype(queries["query"])

    def add(keys):
        def compute(part, carry):
            out, lse = carry
            new, new_lse = step(part.of({**queries, **keys}), part.causal)
            rows = part.queries
            merged, merged_lse = merge(out[:, rows], lse[:, :, rows], new.astype(acc), new_lse)
            return _replace(out, rows, merged, 1), _replace(lse, rows, merged_lse, 2)

        return compute

    sent = ring.hop(keys) if ring.last_step else None
    own = _own_part(ring)
    out, lse = step(own.of({**queries, **keys}), own.causal)
    state = (out.astype(acc), lse)

    def body(t, carry):
        keys, state = carry
        sent = ring.hop(keys)
        return sent, _at_step(ring, t, add(keys), state)

    if ring.last_step:
        keys, state = lax.fori_loop(jnp.int32(1), jnp.int32(ring.last_step), body, (sent, state))
        state = _at_step(ring, ring.last_step, add(keys), state)
    out, lse = state
    if sinks is not None:
        out, lse = merge_sinks(out, lse, sinks)
    return out.astype(dtype), lse


def backward(
    arrays: dict[str, Array], ring: Ring, pull: Callable, out: Array, lse: Array, dout: Array, dlse: Array
) -> dict[str, Array]:
    """The gradients of a device's queries and keys, and its share of the sinks'."""
    arrays = {name: vary_over(array, _axes(ring)) for name, array in arrays.items()}
    sinks = arrays.pop("softmax_aux", None)
    queries, keys = _split(arrays)
    acc = accumulator_dtype(queries["query"])
    if sinks is not None:
        # A row whose weight is all the sinks' sees nothing: its cotangents must not matter to queries and keys.
        nothing = lse == sinks[..., None].astype(lse.dtype)
        whole_dout, dout = dout, jnp.where(nothing.swapaxes(1, 2)[..., None], 0, dout)
        whole_dlse, dlse = dlse, jnp.where(nothing, 0, dlse)

    def add(keys):
        def compute(part, carry):
            rows, columns = part.queries, part.keys
            cut = (out[:, rows], lse[:, :, rows], dout[:, rows], dlse[:, :, rows])
            new = pull(part.of({**queries, **keys}), part.causal, *cut)

            def added(name, total):
                where = rows if name == "query" else columns
                return _replace(total, where, total[:, where] + new[name].astype(acc), 1)

            return {name: added(name, total) for name, total in carry.items()}

        return compute

    sent = ring.hop(keys) if ring.last_step else None
    names = ("query", "key", "value")
    zeros = {name: full_beside(arrays[name], arrays[name].shape, 0, acc) for name in names}
    grads = add(keys)(_own_part(ring), zeros)

    def at_step(t, keys, grads):
        # The gradients of the keys that are here now come from the device that had them, while this one computes.
        moved = ring.hop({name: grads[name] for name in names[1:]})
        new = _at_step(ring, t, add(keys), {"query": grads["query"], **{name: zeros[name] for name in names[1:]}})
        return {"query": new["query"], **{name: moved[name] + new[name] for name in names[1:]}}

    def body(t, carry):
        keys, grads = carry
        sent = ring.hop(keys)
        return sent, at_step(t, keys, grads)

    if ring.last_step:
        keys, grads = lax.fori_loop(jnp.int32(1), jnp.int32(ring.last_step), body, (sent, grads))
        grads = at_step(ring.last_step, keys, grads)
        home = ring.hop({name: grads[name] for name in names[1:]}, -ring.last_step)
        grads = {**grads, **home}
    grads = {name: grads[name].astype(arrays[name].dtype) for name in names}
    if sinks is not None:
        slope = softmax_slope(out, whole_dout, whole_dlse, lambda products: sum_last(products).swapaxes(1, 2))
        grads["softmax_aux"] = sink_gradient(sinks, jnp.where(lse == -jnp.inf, 0, lse), slope)
    return grads


def _replace(array: Array, where: slice, new: Array, axis: int) -> Array:
    """An array with a slice of one axis replaced. (`array.at` makes a scatter, at which jax 0.11's partitioner crashes.)"""
    return new if where == slice(None) else lax.dynamic_update_slice_in_dim(array, new, where.start or 0, axis)


def _axes(ring: Ring) -> frozenset[str]:
    return frozenset({ring.axis} if isinstance(ring.axis, str) else ring.axis)
