"""``page_attention``: the newest tokens of sequences against keys and values kept in pages."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float, Integer, Num

from ejkernel.callib.integers import power_of_two
from ejkernel.contracts.call import Call, Cost
from ejkernel.contracts.params import FwdParams
from ejkernel.contracts.support import Backend, Platform
from ejkernel.errors import UnsupportedError
from ejkernel.kernels.common.page_work import forward_work
from ejkernel.ops.attention import (
    AttentionChecker,
    Side,
    from_data,
    joined_sinks,
    statistics_dtype,
    window_words,
    within,
)
from ejkernel.ops.core.operation import AnyArray, Operation
from ejkernel.ops.paging import (
    NARROW_CACHES,
    as_factor,
    check_caches,
    check_factor,
    check_placement,
    check_placement_values,
    placement,
)
from ejkernel.utils.values import concrete

_check = AttentionChecker("page_attention")

# Of a window that is data: positions less it fit int32.
LONGEST_WINDOW = 2**30


def page_attention(
    query: Float[AnyArray, "tokens heads head_dim"],
    key_cache: Num[AnyArray, "num_blocks kv_heads block_size head_dim"],
    value_cache: Num[AnyArray, "num_blocks kv_heads block_size value_dim"],
    context_lens: Integer[AnyArray, " batch"],
    block_tables: Integer[AnyArray, "batch max_blocks"],
    softmax_scale: float | int | np.number | Num[Array | np.ndarray, ""] | None = None,
    block_size: int | np.integer | None = None,
    *,
    cum_seqlens_q: Integer[AnyArray, " offsets"] | None = None,
    sliding_window: Side | Sequence[Side] = None,
    logits_soft_cap: float | int | np.number | None = None,
    softmax_aux: Float[AnyArray, "..."] | None = None,
    k_scale: float | int | np.number | Float[AnyArray, "..."] | None = None,
    v_scale: float | int | np.number | Float[AnyArray, "..."] | None = None,
    num_splits: int | np.integer | None = None,
    return_lse: bool = False,
    platform: Platform | str | None = None,
    backend: Backend | str | None = None,
) -> Float[Array, "tokens heads value_dim"] | tuple[Array, Array]:
    """Serving: the newest tokens of each sequence attend to its context, which lies in pages of a shared cache.

    One token a sequence is decoding; with ``cum_seqlens_q`` each sequence has as many as it likes: chunked prefill,
    speculation, and batches that mix them with decoding.

    Token ``t`` of sequence ``b`` is at ``cache[block_tables[b, t // block_size], :, t % block_size]``. Pages that a sequence
    does not own are never read, and one compilation serves all lengths.

    Args:
        query: ``[B, H, D]``, the last token of each context; with ``cum_seqlens_q`` ``[T, H, D]``.
        key_cache: ``[num_blocks, Hkv, block_size, D]``; ``H`` is a multiple of ``Hkv`` and query head ``h`` uses key head
            ``h // (H / Hkv)``. Of the query's dtype, or int8, float8_e4m3fn or float8_e5m2.
        value_cache: ``[num_blocks, Hkv, block_size, Dv]``, of the key cache's dtype.
        context_lens: ``[B]``, how many tokens each context has, the query's own included. 0 gives an output of 0.
        block_tables: ``[B, max_blocks]``: where each context's pages are. Entries past its last page may be anything, and so
            may those of pages that the window leaves out wholly.
        softmax_scale: default ``D ** -0.5``; an array has a gradient, as in ``flash_attention``.
        block_size: the caches' own says the same; given, it must agree.
        cum_seqlens_q: ``[B + 1]`` offsets into a packed query: sequence ``b`` has the tokens from ``cum_seqlens_q[b]`` to
            ``cum_seqlens_q[b + 1]``, the last ``n`` of its context. Token ``i`` of them sees keys up to
            ``len - n + i``. Tokens past the last offset are padding and give 0.
        sliding_window: ``(left, right)`` or an int for both: a token at position ``p`` sees keys from ``p - left`` on, and none
            to its right. A side may be an array, which may be traced, as in ``flash_attention``.
        logits_soft_cap: ``cap * tanh(logits / cap)``.
        softmax_aux: sink logits ``[num_sinks]``, ``[1, num_sinks]`` or ``[H, num_sinks]``: they join the softmax's denominator alone.
        k_scale, v_scale: what stored keys and values are multiplied by, a scalar or ``[Hkv]``; default 1.
        num_splits: into how many ranges, computed apart and merged, a context is cut. It changes the speed alone.
        return_lse: also return the log-sum-exp of the logits, ``[B, H]`` (``[T, H]``), float32, sinks included.
        platform, backend: run exactly this implementation, or raise.

    Returns:
        ``[B, H, Dv]`` (``[T, H, Dv]``) in the query's dtype, or ``(out, lse)``. Query, caches of the query's dtype, softmax_aux, k_scale and
        v_scale have gradients, and so has the lse.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel import page_attention
        >>> cache = jnp.ones((6, 2, 16, 8))  # 6 pages of 16 tokens, 2 heads
        >>> tables = jnp.array([[4, 0, 5], [2, -1, -1]])
        >>> page_attention(jnp.ones((2, 4, 8)), cache, cache, jnp.array([40, 7]), tables).shape
        (2, 4, 8)
    """
    arguments = _check.scaled_query(_with_window(locals()))
    return OPERATION({**arguments, "k_scale": as_factor(k_scale), "v_scale": as_factor(v_scale)})


def _with_window(a: dict[str, Any], abstract: bool = False) -> dict[str, Any]:
    """The arguments, with a window that came as arrays as the one that matters: its left side, int32."""
    if not from_data(a["sliding_window"]):
        return a
    left, _ = _check.window_sides("sliding_window", a["sliding_window"], abstract)
    if left is not None:
        left = jax.ShapeDtypeStruct((), jnp.int32) if abstract else within(left, 0, LONGEST_WINDOW)
    return {**a, "sliding_window": None, "window_left": left}


@dataclass(frozen=True)
class PageSpec:
    """What to compute, beside the arrays. ``left``: how many keys before its own a token sees, None for all."""

    left: int | None
    softmax_scale: float
    logits_soft_cap: float | None


class PageAttention(Operation):
    """Arrays for kernels, each with an axis in front for the examples of a vmap, ``N``, which is 1 without one:

    ``query`` ``[N, T, H, D]``; ``key_cache``, ``value_cache`` ``[1, num_blocks, Hkv, block_size, D]``, always shared;
    ``context_lens`` int32 ``[N, B]``, from 0 to the table's end; ``block_tables`` int32 ``[N, B, max_blocks]`` as passed, garbage
    included; ``query_starts`` int32 ``[N, B + 1]``: where the tokens of each sequence begin, never less than the one before, at
    most ``T`` (tokens before the first and past the last are padding); without it ``T`` is ``B`` and token ``b`` is that of
    sequence ``b``; ``softmax_aux`` ``[N|1, H]``, the sinks' log-sum-exp; ``k_scale``, ``v_scale`` ``[N|1, Hkv]``, these three of the
    lse's dtype; ``window_left`` int32 ``[1]``: what ``PageSpec.left`` is, where it is data. Output ``[N, T, H, Dv]``, lse ``[N, T, H]``.
    """

    name = "page_attention"
    features: ClassVar[dict[str, str]] = {
        "varlen": "several query tokens a sequence (cum_seqlens_q)",
        "window": "a sliding window; pages wholly outside of it are not read",
        "traced_window": "a sliding window that is an array",
        "soft_cap": "soft-capped logits",
        "sinks": "attention sinks (softmax_aux)",
        "int8_cache": "caches of int8",
        "fp8_cache": "caches of float8_e4m3fn or float8_e5m2",
        "scales": "factors of stored keys and values (k_scale, v_scale)",
        "gqa": "fewer key heads than query heads",
        "value_dim": "values of another head dim than the keys",
        "uneven_pages": "pages that are no multiple of 16 tokens",
        "splits": "a number of splits that the caller sets (num_splits)",
        "lse": "the log-sum-exp as a result",
    }
    gradients = ("query", "key_cache", "value_cache", "softmax_aux", "k_scale", "v_scale")
    # Which kernel is faster depends on whether sequences fill the chip: shipped times tell nothing of far smaller batches.
    farthest = 2.0
    shareable = frozenset({"key_cache", "value_cache", "softmax_aux", "k_scale", "v_scale", "window_left"})
    inside = ("window_left",)

    def normalise(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Lists become tuples, Python numbers arrays where arrays are meant."""
        arguments = super().normalise(arguments)
        arguments = {name: as_factor(x) if name in ("k_scale", "v_scale") else x for name, x in arguments.items()}
        if "query" not in arguments:
            return arguments
        return _check.scaled_query(_with_window(arguments, abstract=True), abstract=True)

    def bind(self, arguments: dict[str, Any]) -> Call:
        """Check every argument; see the base class."""
        a = arguments
        query, keys, values, tables = a["query"], a["key_cache"], a["value_cache"], a["block_tables"]
        self._check_main_arrays(query, keys, values)
        tokens, heads, head_dim = query.shape
        _, kv_heads, block_size, value_dim = values.shape
        batch = check_placement(_check, a["context_lens"], tables, a["cum_seqlens_q"], tokens)
        self._check_counts(a["block_size"], a["num_splits"], block_size)
        _check.sinks(a["softmax_aux"], heads)
        for name in ("k_scale", "v_scale"):
            check_factor(_check, name, a[name], kv_heads)
        window = _check.window("sliding_window", a["sliding_window"])
        _check.flag("return_lse", a["return_lse"])
        capacity = tables.shape[1] * block_size
        spec = PageSpec(
            left=None if window[0] is None or window[0] >= capacity else window[0],
            softmax_scale=_check.scale(a["softmax_scale"], head_dim),
            logits_soft_cap=_check.soft_cap(a["logits_soft_cap"]),
        )
        cache_dtype = jnp.dtype(keys.dtype).name
        packed, by_data = a["cum_seqlens_q"] is not None, a.get("window_left") is not None
        used = {
            "varlen": (packed, "cum_seqlens_q"),
            "window": (window[0] is not None or by_data, "sliding_window"),
            "traced_window": (by_data, "a sliding_window that is an array"),
            "soft_cap": (spec.logits_soft_cap is not None, "logits_soft_cap"),
            "sinks": (a["softmax_aux"] is not None, "softmax_aux"),
            "int8_cache": (NARROW_CACHES.get(cache_dtype) == "int8_cache", f"a cache of {cache_dtype}"),
            "fp8_cache": (NARROW_CACHES.get(cache_dtype) == "fp8_cache", f"a cache of {cache_dtype}"),
            "scales": (a["k_scale"] is not None or a["v_scale"] is not None, "k_scale or v_scale"),
            "gqa": (heads != kv_heads, f"{heads} query heads for {kv_heads} key heads"),
            "value_dim": (head_dim != value_dim, f"value head dim {value_dim} beside {head_dim}"),
            "splits": (a["num_splits"] is not None, "num_splits"),
            "uneven_pages": (block_size % 16 != 0, f"pages of {block_size} tokens"),
            "lse": (a["return_lse"], "return_lse"),
        }
        features = {name: phrase for name, (is_used, phrase) in used.items() if is_used}
        splits = a["num_splits"]
        return Call(
            operation=self.name,
            # A plain function cannot be told of it.
            runs_on=self.name if by_data else "",
            arguments=self.given(a),
            spec=spec,
            dtype=jnp.dtype(query.dtype).name,
            head_dims=(head_dim, value_dim),
            features=features,
            bucket=(
                ("dtype", jnp.dtype(query.dtype).name),
                ("cache_dtype", cache_dtype),
                ("head_dim", head_dim),
                ("value_dim", value_dim),
                ("block_size", block_size),
                ("group", heads // kv_heads),
                ("q_len", power_of_two(-(-tokens // max(1, batch))) if packed else 1),
                ("heads", power_of_two(batch * kv_heads)),
                ("kv_len", power_of_two(capacity)),
                ("window", window_words((spec.left, 0))),
                ("features", " ".join(sorted(features.keys() - {"lse", "splits", "uneven_pages"}))),
            ),
            fwd_params=None if splits is None else FwdParams(num_key_splits=splits),
        )

    def _check_main_arrays(self, query: Any, keys: Any, values: Any) -> None:
        _check.array("query", query, "[batch, heads, head_dim]", ranks=(3,), kinds=(jnp.floating,))
        if 0 in query.shape[1:]:
            _check.fail("query", query, "[batch, heads, head_dim] with every size but the batch at least 1")
        check_caches(_check, keys, values, query.dtype)
        if keys.shape[3] != query.shape[2]:
            _check.fail("key_cache", keys, f"the query's head dim, {query.shape[2]}, as its last size")
        if query.shape[1] % keys.shape[1]:
            _check.fail("query", query, f"a number of heads that is a multiple of the key cache's {keys.shape[1]}")

    def _check_counts(self, block_size: Any, splits: Any, actual: int) -> None:
        if block_size is not None and (not _is_whole(block_size) or block_size != actual):
            _check.fail("block_size", block_size, f"the caches' own, {actual}, or None")
        if splits is not None and (not _is_whole(splits) or splits < 1):
            _check.fail("num_splits", splits, "an int ≥ 1, or None to leave the choice to the library")

    def check_values(self, a: dict[str, Any]) -> None:
        """Concrete offsets, lengths and table entries must lie where they may."""
        window, left = a["sliding_window"], None
        if window is not None:
            left, _ = _check.window("sliding_window", tuple(window) if isinstance(window, list) else window)
        if a.get("window_left") is not None:
            # Of a window that is not known here, the token's own key is certain alone.
            known = concrete(a["window_left"])
            left = 0 if known is None else int(known)
        check_placement_values(_check, a, a["query"], left)

    def prepare(self, arguments: dict[str, Any], spec: PageSpec) -> dict[str, Array]:
        """The kernels' arrays; see the class."""
        a = arguments
        query = a["query"]
        kv_heads, block_size = a["key_cache"].shape[1:3]
        where = placement(a["context_lens"], a["block_tables"], a["cum_seqlens_q"], query.shape[0], block_size)
        arrays = {name: a[name][None] for name in ("query", "key_cache", "value_cache")}
        arrays |= {name: array[None] for name, array in where.items()}
        if a["softmax_aux"] is not None:
            arrays["softmax_aux"] = joined_sinks(a["softmax_aux"], query)
        if a.get("window_left") is not None:
            arrays["window_left"] = a["window_left"][None]
        for name in ("k_scale", "v_scale"):
            if a[name] is not None:
                factor = jnp.asarray(a[name]).astype(statistics_dtype(query))
                arrays[name] = jnp.broadcast_to(factor, (1, kv_heads))
        return arrays

    def axes(self, arrays: dict[str, Any], spec: PageSpec) -> tuple[dict[str, Any], tuple]:
        """Heads, and sequences where each has one token; the pages are the sequences' together."""
        sequences = "." if "query_starts" in arrays else "b"
        tokens = f"e {sequences}"
        named = {"query": f"{tokens} kg", "query_starts": "e", "softmax_aux": "e kg", "window_left": "."}
        named |= dict.fromkeys(("context_lens", "block_tables"), tokens)
        named |= dict.fromkeys(("key_cache", "value_cache"), ". . k") | dict.fromkeys(("k_scale", "v_scale"), "e k")
        return named, (f"{tokens} kg", f"{tokens} kg")

    def left_to_the_compiler(self, arrays: dict[str, Any], direction: str) -> bool:
        """Not where gradients are added to the pages that all sequences share."""
        return direction == "forward"

    def empty(self, arguments: dict[str, Any]) -> Any:
        """Zeros where there is no sequence, no page or no room in the table."""
        if _has_work(arguments):
            return None
        query, sinks = arguments["query"], arguments["softmax_aux"]
        batch, heads, _ = query.shape
        out = jnp.zeros((batch, heads, arguments["value_cache"].shape[3]), query.dtype)
        if sinks is None:
            return self._result(arguments, out, jnp.full((batch, heads), -jnp.inf, statistics_dtype(query)))
        return self._result(arguments, out, jnp.broadcast_to(joined_sinks(sinks, query), (batch, heads)))

    def finish(self, arguments: dict[str, Any], out: Any, lse: Any) -> Any:
        """The output of the only example, with the lse if it was asked for."""
        return self._result(arguments, out[0], lse[0])

    def _result(self, arguments: dict[str, Any], out: Any, lse: Any) -> Any:
        return (out, lse) if arguments["return_lse"] else out

    def result_specs(self, arguments: dict[str, Any], spec: tuple) -> Any:
        """Output and lse as the query is partitioned, but for the head dim."""
        batch, heads, _ = spec
        return self._result(arguments, PartitionSpec(batch, heads), PartitionSpec(batch, heads))

    def run_backward(self, chosen: Any, wanted: frozenset[str], arrays: dict[str, Any], *rest: Any) -> dict:
        """As the base class; a cache of 8 bits has no gradient worth its rounding."""
        for name in sorted(wanted & {"key_cache", "value_cache"}):
            dtype = jnp.dtype(arrays[name].dtype).name
            if dtype in NARROW_CACHES:
                raise UnsupportedError(
                    f"page_attention: {name} is {dtype}; there is no gradient for a cache of 8 bits: differentiate with "
                    "respect to a cache of the query's dtype, or stop the gradient."
                )
        return super().run_backward(chosen, wanted, arrays, *rest)

    def differentiable(self, arguments: dict[str, Any]) -> frozenset[str]:
        """As the base class, without caches of 8 bits."""
        names = super().differentiable(arguments)
        return frozenset(name for name in names if jnp.dtype(arguments[name].dtype).name not in NARROW_CACHES)

    def folds(self, names: frozenset[str]) -> bool:
        """A cache and a window serve all examples, so one an example cannot be part of them."""
        return not names & {"key_cache", "value_cache", "window_left"}

    def work(self, call: Call) -> Cost:
        """Two products a pair forward, five backward; the pages are read once. Lengths are data: the whole table counts."""
        work = forward_work(call.shapes, call.spec.left)
        head_dim, value_dim = (call.shapes[name].shape[4] for name in ("key_cache", "value_cache"))
        return Cost(
            flops=work.flops,
            bytes=work.bytes,
            backward_flops=2 * work.pairs * (3 * head_dim + 2 * value_dim),
            backward_bytes=2 * work.bytes,
        )

    def sample(self, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        """Random numbers, contexts from a quarter of their room to all of it with equally many queries, pages in no order."""
        keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
        blocks, _, block_size = shapes["key_cache"].shape[1:4]

        def make(name: str, like: jax.ShapeDtypeStruct) -> Array:
            if name == "context_lens":
                most = shapes["block_tables"].shape[2] * block_size
                queries = -(-shapes["query"].shape[1] // max(1, like.shape[1]))
                spread = jnp.linspace(most // 4, most, like.shape[1]) if like.shape[1] > 1 else jnp.full(1, most)
                lens = jax.random.permutation(keys[name], jnp.maximum(spread.astype(like.dtype), min(queries, most)))
                return jnp.broadcast_to(lens, like.shape)
            if name == "query_starts":
                tokens, batch = shapes["query"].shape[1], like.shape[1] - 1
                return jnp.broadcast_to(jnp.arange(batch + 1) * tokens // max(1, batch), like.shape).astype(like.dtype)
            if name == "block_tables":
                count = math.prod(like.shape)
                order = jax.random.permutation(keys[name], max(count, blocks))[:count]
                return (order % blocks).astype(like.dtype).reshape(like.shape)
            if name == "window_left":  # it hides nothing
                return jnp.full(like.shape, LONGEST_WINDOW, like.dtype)
            if name in ("k_scale", "v_scale"):
                return jnp.ones(like.shape, like.dtype)
            if like.dtype == jnp.int8:
                return jax.random.randint(keys[name], like.shape, -127, 128, jnp.int8)
            return jax.random.normal(keys[name], like.shape, jnp.float32).astype(like.dtype)

        return {name: make(name, like) for name, like in shapes.items()}


def _has_work(arguments: dict[str, Any]) -> bool:
    """Whether there are tokens, sequences, entries in their tables, and pages."""
    sizes = (*arguments["block_tables"].shape, arguments["key_cache"].shape[0], arguments["query"].shape[0])
    return bool(math.prod(sizes))


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool | np.bool_)


OPERATION = PageAttention(page_attention)
