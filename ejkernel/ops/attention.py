"""What the attention operations share: checks of their arguments, and the forms in which kernels get them."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Integer

from ejkernel.callib.integers import power_of_two
from ejkernel.kernels.common.intervals import intervals
from ejkernel.ops.core.checks import Checker, is_data
from ejkernel.utils import log_sum_exp
from ejkernel.utils.values import concrete

Window = tuple[int | None, int | None]
# One side of a window: static, or an array that may be traced.
Side = int | np.integer | Integer[Array | np.ndarray, ""] | None


class AttentionChecker(Checker):
    """The checks of arguments that several attention operations take."""

    def main_arrays(self, query: Any, key: Any, value: Any) -> None:
        """``[B, Sq, H, D]``, ``[B, Sk, Hkv, D]`` and ``[B, Sk, Hkv, Dv]`` of one dtype."""
        names = {
            "query": "[batch, q_len, heads, head_dim]",
            "key": "[batch, kv_len, kv_heads, head_dim]",
            "value": "[batch, kv_len, kv_heads, value_dim]",
        }
        for (name, layout), array in zip(names.items(), (query, key, value), strict=True):
            self.array(name, array, layout, ranks=(4,), kinds=(jnp.floating,))
            if 0 in array.shape[1:]:
                self.fail(name, array, f"{layout} with every size but the batch at least 1")
        for name, array in (("key", key), ("value", value)):
            if array.dtype != query.dtype:
                self.fail(name, array, f"the query's dtype, {query.dtype}: cast one of them")
            if array.shape[0] != query.shape[0]:
                self.fail(name, array, f"the query's batch, {query.shape[0]}")
        if key.shape[3] != query.shape[3]:
            self.fail("key", key, f"the query's head dim, {query.shape[3]}")
        if value.shape[1:3] != key.shape[1:3]:
            self.fail("value", value, f"the key's length and heads, {list(key.shape[1:3])}")
        if query.shape[2] % key.shape[2]:
            self.fail("query", query, f"a number of heads that is a multiple of the key's {key.shape[2]}")

    def segments(self, q_ids: Any, kv_ids: Any, batch: int, q_len: int, kv_len: int) -> None:
        """A pair of segment ids, or neither."""
        if q_ids is None and kv_ids is None:
            return
        for name, ids, length in (("q_segment_ids", q_ids, q_len), ("kv_segment_ids", kv_ids, kv_len)):
            layout = f"[{batch}, {length}] integers, beside its pair"
            if ids is None:
                self.fail(name, ids, f"{layout}: pass both or neither")
            self.array(name, ids, layout, ranks=(2,), kinds=(jnp.integer,))
            if ids.shape != (batch, length):
                self.fail(name, ids, layout)

    def sinks(self, sinks: Any, heads: int) -> None:
        """Sink logits, for all heads or for each."""
        if sinks is None:
            return
        layout = f"[num_sinks], [1, num_sinks] or [{heads}, num_sinks]"
        self.array("softmax_aux", sinks, layout, ranks=(1, 2), kinds=(jnp.floating,))
        if sinks.shape[-1] == 0 or (len(sinks.shape) == 2 and sinks.shape[0] not in (1, heads)):
            self.fail("softmax_aux", sinks, f"{layout} with at least one sink")
        if heads > 1 and sinks.shape == (heads,):
            self.fail(
                "softmax_aux",
                sinks,
                f"two dimensions, since {heads} numbers for {heads} heads could mean either: softmax_aux[:, None] is "
                f"one sink a head, softmax_aux[None, :] is {heads} sinks that all heads share",
            )

    def scale(self, scale: Any, head_dim: int, name: str = "softmax_scale") -> float:
        """The softmax scale or its default."""
        return head_dim**-0.5 if scale is None else self.number(name, scale, "a number")

    def soft_cap(self, cap: Any) -> float | None:
        """A cap above 0, or none."""
        if cap is None:
            return None
        if self.number("logits_soft_cap", cap, "a number above 0") <= 0:
            self.fail("logits_soft_cap", cap, "a number above 0, or None")
        return float(cap)

    def dropout(self, probability_name: str, probability: Any, seed: Any) -> float:
        """A probability, and a seed if it is above 0."""
        share = self.probability(probability_name, probability)
        if share and seed is None:
            self.fail("dropout_seed", seed, f"an integer, since {probability_name} is above 0")
        if seed is not None:
            seed = np.asarray(seed) if isinstance(seed, int) else seed
            self.array("dropout_seed", seed, "one integer", ranks=(0,), kinds=(jnp.integer,))
        return share

    def probability(self, name: str, value: Any) -> float:
        """A share of what may be dropped; not all of it."""
        share = self.number(name, value, "a probability in [0, 1)")
        if not 0 <= share < 1:
            self.fail(name, value, "a probability in [0, 1)")
        return share

    def data(self, name: str, value: Any, expected: str, kinds: tuple[Any, ...], abstract: bool) -> None:
        """A number that came as an array; only ``explain`` takes ``abstract`` ones."""
        self.array(name, value, expected, ranks=(0,), kinds=kinds)
        if isinstance(value, jax.ShapeDtypeStruct) and not abstract:
            self.fail(name, value, f"{expected} (only explain takes abstract arrays)")

    def window_sides(self, name: str, window: Any, abstract: bool = False) -> tuple[Any, Any]:
        """A window's sides of which one at least is an array; what is wrong with one is known only if it is concrete."""
        sides = tuple(window) if isinstance(window, tuple | list) else (window, window)
        # What is static is checked as ever, with arrays as if they were 0.
        self.window(name, tuple(0 if is_data(side) else side for side in sides))
        for side in filter(is_data, sides):
            self.data(name, side, "whole numbers ≥ 0, each a scalar", (jnp.integer,), abstract)
            values = concrete(side)
            if values is not None and values < 0:
                self.fail(name, side, f"whole numbers ≥ 0; a side is {values}")
        return sides

    def scaled_query(
        self, arguments: dict[str, Any], abstract: bool = False, name: str = "softmax_scale"
    ) -> dict[str, Any]:
        """The arguments, with a scale that came as an array multiplied into the query.

        JAX then differentiates the product, and kernels have a scale of 1.
        """
        query, scale = arguments["query"], arguments["softmax_scale"]
        if not is_data(scale):
            return arguments
        self.data(name, scale, "a number", (jnp.floating, jnp.integer), abstract)
        self.array("query", query, "floats", ranks=(3, 4), kinds=(jnp.floating,))
        return {**arguments, "query": query if abstract else _scaled(query, scale), "softmax_scale": 1.0}


@jax.jit
def _scaled(query: Array, scale: Array) -> Array:
    wide = statistics_dtype(query)
    return (query.astype(wide) * scale.astype(wide)).astype(query.dtype)


def from_data(window: Any) -> bool:
    """Whether a side of a window came as an array."""
    return any(map(is_data, window)) if isinstance(window, tuple | list) else is_data(window)


def effective_window(window: Window, causal: bool, longest: int) -> Window:
    """All that causality and the sliding window leave; a side as long as the arrays hides nothing."""
    # Sides that hide nothing go, for longer ones need not fit the kernels' integers.
    left, right = (None if side is not None and side >= longest else side for side in window)
    return left, 0 if causal else right


def key_intervals(position: Any, first: Any, end: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """Starts and stops of the keys that queries at these positions see, out of those from ``first`` to before ``end``."""
    start = first if left is None else jnp.clip(position - left, first, end)
    return start, end if right is None else jnp.clip(position + right + 1, start, end)


@functools.partial(jax.jit, static_argnames=("causal", "lengths"))
def window_intervals(window: tuple, causal: bool, lengths: tuple[int, int]) -> tuple[Array, Array]:
    """``[1, Sq]`` starts and stops of the keys that each query sees through a window that is known only to the device."""
    left, right = (None if side is None else within(side, 0, max(lengths)) for side in window)
    position = jnp.arange(lengths[0], dtype=jnp.int32) + (lengths[1] - lengths[0])
    ends = jnp.zeros_like(position), jnp.full_like(position, lengths[1])
    start, stop = key_intervals(position, *ends, left, 0 if causal else right)
    return start[None], stop[None]


def within(side: Any, low: int, high: int) -> Array:
    """A window's side, of any integer dtype, as int32 between two bounds that fit."""
    side = jnp.asarray(side)
    side = side.astype(jnp.int32) if side.dtype.itemsize < 4 else side
    return jnp.clip(side, max(low, jnp.iinfo(side.dtype).min), high).astype(jnp.int32)


def window_words(window: Window) -> str:
    """A window in a tuning bucket."""
    return ":".join("" if side is None else str(power_of_two(side + 1)) for side in window)


def statistics_dtype(query: Any) -> Any:
    """Of the lse and the sinks."""
    return jnp.float64 if query.dtype == jnp.float64 else jnp.float32


def joined_sinks(sinks: Array, query: Array) -> Array:
    """``[1, H]``: the log-sum-exp of each head's sinks."""
    joined = log_sum_exp(sinks.astype(statistics_dtype(query)), axis=-1)
    return jnp.broadcast_to(joined, (1, query.shape[-2]))


def as_seed(seed: Any) -> Any:
    """A Python int may not fit the int32 that JAX would make of it."""
    return np.uint32(seed & 0xFFFFFFFF) if type(seed) is int else seed


def segment_pair(q_ids: Array, kv_ids: Array) -> tuple[Array, Array]:
    """Both of one dtype of at least 32 bits, never narrower than they came: two ids must not become one."""
    wide = np.promote_types(q_ids.dtype, kv_ids.dtype)
    wide = np.dtype(np.int32) if wide.itemsize < 4 else wide
    if wide.itemsize > 4 and max(q_ids.dtype.itemsize, kv_ids.dtype.itemsize) <= 4:
        # int32 beside uint32, for which JAX may have no wider type; below 0 is padding, as 0 is.
        return tuple(jnp.maximum(ids, 0).astype(jnp.uint32) for ids in (q_ids, kv_ids))
    return q_ids.astype(wide), kv_ids.astype(wide)


def attention_axes(*, spread_heads: bool = True) -> tuple[dict[str, str], tuple[str, str]]:
    """How arrays ``[B, S, H, D]``, and what has one value a head or ``[B, H, …]``, are cut over a mesh: by batch and key heads."""
    query, key = ("kg", "k") if spread_heads else (".", ".")
    arrays = {"query": f"b . {query}", "key": f"b . {key}", "value": f"b . {key}"}
    arrays |= dict.fromkeys(("attention_mask", "bias", "softmax_aux"), f"b {query}")
    return arrays, (f"b . {query}", f"b {query}")


def nbytes(array: Any) -> int:
    """Of an array, which may be abstract."""
    return math.prod(array.shape) * jnp.dtype(array.dtype).itemsize


def visible_pairs(window: Window, q_len: int, kv_len: int) -> int:
    """How many (query, key) pairs causality and the window leave in one head."""
    start, stop = intervals(window, q_len, kv_len)
    return int((stop - start).sum(dtype=np.int64))
