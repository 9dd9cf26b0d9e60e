"""``page_attention``: one token a sequence against keys and values kept in pages."""

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
from ejkernel.ops.attention import AttentionChecker, joined_sinks, nbytes, statistics_dtype, window_words
from ejkernel.ops.core.checks import is_array
from ejkernel.ops.core.operation import AnyArray, Operation
from ejkernel.utils.values import concrete

# Cache dtypes that may stand beside a query of another dtype, and the feature each one asks of a kernel.
NARROW_CACHES = {"int8": "int8_cache", "float8_e4m3fn": "fp8_cache", "float8_e5m2": "fp8_cache"}

_check = AttentionChecker("page_attention")


def page_attention(
    query: Float[AnyArray, "batch heads head_dim"],
    key_cache: Num[AnyArray, "num_blocks kv_heads block_size head_dim"],
    value_cache: Num[AnyArray, "num_blocks kv_heads block_size value_dim"],
    context_lens: Integer[AnyArray, " batch"],
    block_tables: Integer[AnyArray, "batch max_blocks"],
    softmax_scale: float | int | None = None,
    block_size: int | np.integer | None = None,
    *,
    sliding_window: int | np.integer | Sequence[int | None] | None = None,
    logits_soft_cap: float | int | None = None,
    softmax_aux: Float[AnyArray, "..."] | None = None,
    k_scale: float | int | Float[AnyArray, "..."] | None = None,
    v_scale: float | int | Float[AnyArray, "..."] | None = None,
    num_splits: int | np.integer | None = None,
    return_lse: bool = False,
    platform: Platform | str | None = None,
    backend: Backend | str | None = None,
) -> Float[Array, "batch heads value_dim"] | tuple[Array, Array]:
    """Decoding: the newest token of each sequence attends to its context, which lies in pages of a shared cache.

    Token ``t`` of sequence ``b`` is at ``cache[block_tables[b, t // block_size], :, t % block_size]``. Pages that a sequence
    does not own are never read, and one compilation serves all lengths.

    Args:
        query: ``[B, H, D]``, the last token of each context.
        key_cache: ``[num_blocks, Hkv, block_size, D]``; ``H`` is a multiple of ``Hkv`` and query head ``h`` uses key head
            ``h // (H / Hkv)``. Of the query's dtype, or int8, float8_e4m3fn or float8_e5m2.
        value_cache: ``[num_blocks, Hkv, block_size, Dv]``, of the key cache's dtype.
        context_lens: ``[B]``, how many tokens each context has, the query's own included. 0 gives an output of 0.
        block_tables: ``[B, max_blocks]``: where each context's pages are. Entries past its last page may be anything, and so
            may those of pages that the window leaves out wholly.
        softmax_scale: default ``D ** -0.5``.
        block_size: the caches' own says the same; given, it must agree.
        sliding_window: ``(left, right)`` or an int for both: keys from ``len - 1 - left`` on are seen. Nothing lies to the
            right of the last token.
        logits_soft_cap: ``cap * tanh(logits / cap)``.
        softmax_aux: sink logits ``[num_sinks]`` or ``[H, num_sinks]``: they join the softmax's denominator alone.
        k_scale, v_scale: what stored keys and values are multiplied by, a scalar or ``[Hkv]``; default 1.
        num_splits: into how many ranges, computed apart and merged, a context is cut. It changes the speed alone.
        return_lse: also return the log-sum-exp of the logits, ``[B, H]``, float32, sinks included.
        platform, backend: run exactly this implementation, or raise.

    Returns:
        ``[B, H, Dv]`` in the query's dtype, or ``(out, lse)``. Query, caches of the query's dtype, softmax_aux, k_scale and
        v_scale have gradients, and so has the lse.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel import page_attention
        >>> cache = jnp.ones((6, 2, 16, 8))  # 6 pages of 16 tokens, 2 heads
        >>> tables = jnp.array([[4, 0, 5], [2, -1, -1]])
        >>> page_attention(jnp.ones((2, 4, 8)), cache, cache, jnp.array([40, 7]), tables).shape
        (2, 4, 8)
    """
    return OPERATION({**locals(), "k_scale": _factor(k_scale), "v_scale": _factor(v_scale)})


def _factor(scale: Any) -> Any:
    """A Python number as an array."""
    plain = isinstance(scale, numbers.Real) and not isinstance(scale, bool | np.generic)
    return np.float64(scale) if plain else scale


@dataclass(frozen=True)
class PageSpec:
    """What to compute, beside the arrays. ``left``: how many keys before the last one are seen, None for all."""

    left: int | None
    softmax_scale: float
    logits_soft_cap: float | None


class PageAttention(Operation):
    """Arrays for kernels, each with a batch axis in front:

    ``query`` ``[B, H, D]``; ``key_cache``, ``value_cache`` ``[1, num_blocks, Hkv, block_size, D]``, always of batch 1;
    ``context_lens`` int32 ``[B]``, from 0 to the table's end; ``block_tables`` int32 ``[B, max_blocks]`` as passed, garbage
    included; ``softmax_aux`` ``[B|1, H]``, the sinks' log-sum-exp; ``k_scale``, ``v_scale`` ``[B|1, Hkv]``. The last three
    are of the lse's dtype.
    """

    name = "page_attention"
    features: ClassVar[dict[str, str]] = {
        "window": "a sliding window; pages wholly outside of it are not read",
        "soft_cap": "soft-capped logits",
        "sinks": "attention sinks (softmax_aux)",
        "int8_cache": "caches of int8",
        "fp8_cache": "caches of float8_e4m3fn or float8_e5m2",
        "scales": "factors of stored keys and values (k_scale, v_scale)",
        "gqa": "fewer key heads than query heads",
        "value_dim": "values of another head dim than the keys",
        "lse": "the log-sum-exp as a result",
    }
    gradients = ("query", "key_cache", "value_cache", "softmax_aux", "k_scale", "v_scale")
    shareable = frozenset({"key_cache", "value_cache", "softmax_aux", "k_scale", "v_scale"})

    def normalise(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Lists become tuples, Python numbers arrays where arrays are meant."""
        arguments = super().normalise(arguments)
        return {name: _factor(x) if name in ("k_scale", "v_scale") else x for name, x in arguments.items()}

    def bind(self, arguments: dict[str, Any]) -> Call:
        """Check every argument; see the base class."""
        a = arguments
        query, keys, values, tables = a["query"], a["key_cache"], a["value_cache"], a["block_tables"]
        self._check_main_arrays(query, keys, values)
        batch, heads, head_dim = query.shape
        _, kv_heads, block_size, value_dim = values.shape
        self._check_placement(a["context_lens"], tables, batch)
        self._check_counts(a["block_size"], a["num_splits"], block_size)
        _check.sinks(a["softmax_aux"], heads)
        for name in ("k_scale", "v_scale"):
            self._check_factor(name, a[name], kv_heads)
        window = _check.window("sliding_window", a["sliding_window"])
        _check.flag("return_lse", a["return_lse"])
        capacity = tables.shape[1] * block_size
        spec = PageSpec(
            left=None if window[0] is None or window[0] >= capacity else window[0],
            softmax_scale=_check.scale(a["softmax_scale"], head_dim),
            logits_soft_cap=_check.soft_cap(a["logits_soft_cap"]),
        )
        cache_dtype = jnp.dtype(keys.dtype).name
        used = {
            "window": (window[0] is not None, "sliding_window"),
            "soft_cap": (spec.logits_soft_cap is not None, "logits_soft_cap"),
            "sinks": (a["softmax_aux"] is not None, "softmax_aux"),
            "int8_cache": (NARROW_CACHES.get(cache_dtype) == "int8_cache", f"a cache of {cache_dtype}"),
            "fp8_cache": (NARROW_CACHES.get(cache_dtype) == "fp8_cache", f"a cache of {cache_dtype}"),
            "scales": (a["k_scale"] is not None or a["v_scale"] is not None, "k_scale or v_scale"),
            "gqa": (heads != kv_heads, f"{heads} query heads for {kv_heads} key heads"),
            "value_dim": (head_dim != value_dim, f"value head dim {value_dim} beside {head_dim}"),
            "lse": (a["return_lse"], "return_lse"),
        }
        features = {name: phrase for name, (is_used, phrase) in used.items() if is_used}
        splits = a["num_splits"]
        return Call(
            operation=self.name,
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
                ("heads", power_of_two(batch * kv_heads)),
                ("kv_len", power_of_two(capacity)),
                ("window", window_words((spec.left, 0))),
                ("features", " ".join(sorted(features.keys() - {"lse"}))),
            ),
            fwd_params=None if splits is None else FwdParams(num_key_splits=splits),
        )

    def _check_main_arrays(self, query: Any, keys: Any, values: Any) -> None:
        _check.array("query", query, "[batch, heads, head_dim]", ranks=(3,), kinds=(jnp.floating,))
        if 0 in query.shape[1:]:
            _check.fail("query", query, "[batch, heads, head_dim] with every size but the batch at least 1")
        for name, array, last in (("key_cache", keys, "head_dim"), ("value_cache", values, "value_dim")):
            layout = f"[num_blocks, kv_heads, block_size, {last}]"
            _check.array(name, array, layout, ranks=(4,), kinds=(jnp.floating, jnp.integer))
            if 0 in array.shape[1:]:
                _check.fail(name, array, f"{layout} with every size but the number of blocks at least 1")
        if keys.dtype != query.dtype and jnp.dtype(keys.dtype).name not in NARROW_CACHES:
            _check.fail("key_cache", keys, f"the query's dtype, {query.dtype}, or one of {', '.join(NARROW_CACHES)}")
        if values.dtype != keys.dtype:
            _check.fail("value_cache", values, f"the key cache's dtype, {keys.dtype}: cast one of them")
        if keys.shape[3] != query.shape[2]:
            _check.fail("key_cache", keys, f"the query's head dim, {query.shape[2]}, as its last size")
        if values.shape[:3] != keys.shape[:3]:
            _check.fail("value_cache", values, f"the key cache's blocks, heads and block size, {list(keys.shape[:3])}")
        if query.shape[1] % keys.shape[1]:
            _check.fail("query", query, f"a number of heads that is a multiple of the key cache's {keys.shape[1]}")

    def _check_placement(self, lens: Any, tables: Any, batch: int) -> None:
        for name, array, layout, ranks in (
            ("context_lens", lens, f"[{batch}] integers", (1,)),
            ("block_tables", tables, f"[{batch}, max_blocks] integers", (2,)),
        ):
            _check.array(name, array, layout, ranks=ranks, kinds=(jnp.integer,))
            if array.shape[0] != batch:
                _check.fail(name, array, f"{layout}, as the query's batch is")

    def _check_counts(self, block_size: Any, splits: Any, actual: int) -> None:
        if block_size is not None and (not _is_whole(block_size) or block_size != actual):
            _check.fail("block_size", block_size, f"the caches' own, {actual}, or None")
        if splits is not None and (not _is_whole(splits) or splits < 1):
            _check.fail("num_splits", splits, "an int ≥ 1, or None to leave the choice to the library")

    def _check_factor(self, name: str, scale: Any, kv_heads: int) -> None:
        if scale is None:
            return
        layout = f"a scalar or [{kv_heads}], one a key head"
        _check.array(name, scale, layout, ranks=(0, 1), kinds=(jnp.floating,))
        if scale.shape not in ((), (kv_heads,)):
            _check.fail(name, scale, layout)

    def check_values(self, a: dict[str, Any]) -> None:
        """Concrete lengths must fit the table, and concrete entries that are needed must name a block."""
        lens, tables, cache = concrete(a["context_lens"]), concrete(a["block_tables"]), a["key_cache"]
        shapes = [len(x.shape) if is_array(x) else 0 for x in (a["context_lens"], a["block_tables"], cache)]
        if lens is None or shapes != [1, 2, 4] or not lens.size or lens.dtype.kind not in "iu" or 0 in cache.shape[1:]:
            return
        blocks, _, block_size, _ = cache.shape
        longest = a["block_tables"].shape[1] * block_size
        if lens.min() < 0 or lens.max() > longest:
            _check.fail(
                "context_lens",
                a["context_lens"],
                f"lengths from 0 to {longest}, which is max_blocks × block_size; they are {_shown(lens)}",
            )
        if tables is None or tables.shape[0] != lens.size or tables.dtype.kind not in "iu":
            return
        window = a["sliding_window"]
        left, _ = _check.window("sliding_window", tuple(window) if isinstance(window, list) else window)
        lens = lens.astype(np.int64)[:, None]
        first = np.zeros_like(lens) if left is None else np.maximum(lens - 1 - left, 0) // block_size
        slot = np.arange(tables.shape[1])
        wrong = (slot >= first) & (slot * block_size < lens) & ((tables < 0) | (tables >= blocks))
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            _check.fail(
                "block_tables",
                a["block_tables"],
                f"blocks from 0 to {blocks - 1} wherever a context has tokens; [{row}, {column}] is {tables[row, column]} "
                f"and context {row} has {lens[row, 0]} tokens",
            )

    def prepare(self, arguments: dict[str, Any], spec: PageSpec) -> dict[str, Array]:
        """The kernels' arrays; see the class."""
        a = arguments
        query, tables, lens = a["query"], jnp.asarray(a["block_tables"]), jnp.asarray(a["context_lens"])
        kv_heads, block_size = a["key_cache"].shape[1:3]
        # A traced length cannot be refused; it must still not lead out of the table.
        lens = lens if lens.dtype.itemsize >= 4 else lens.astype(jnp.int32)
        arrays = {
            "query": query,
            "key_cache": a["key_cache"][None],
            "value_cache": a["value_cache"][None],
            "context_lens": jnp.clip(lens, 0, tables.shape[1] * block_size).astype(jnp.int32),
            "block_tables": tables.astype(jnp.int32),
        }
        if a["softmax_aux"] is not None:
            arrays["softmax_aux"] = joined_sinks(a["softmax_aux"], query)
        for name in ("k_scale", "v_scale"):
            if a[name] is not None:
                factor = jnp.asarray(a[name]).astype(statistics_dtype(query))
                arrays[name] = jnp.broadcast_to(factor, (1, kv_heads))
        return arrays

    def empty(self, arguments: dict[str, Any]) -> Any:
        """Zeros where there is no sequence, no page or no room in the table."""
        if _has_work(arguments):
            return None
        query, sinks = arguments["query"], arguments["softmax_aux"]
        batch, heads, _ = query.shape
        out = jnp.zeros((batch, heads, arguments["value_cache"].shape[3]), query.dtype)
        if sinks is None:
            return self.finish(arguments, out, jnp.full((batch, heads), -jnp.inf, statistics_dtype(query)))
        return self.finish(arguments, out, jnp.broadcast_to(joined_sinks(sinks, query), (batch, heads)))

    def finish(self, arguments: dict[str, Any], out: Any, lse: Any) -> Any:
        """The output, with the lse if it was asked for."""
        return (out, lse) if arguments["return_lse"] else out

    def result_specs(self, arguments: dict[str, Any], spec: tuple) -> Any:
        """Output and lse as the query is partitioned, but for the head dim."""
        batch, heads, _ = spec
        return self.finish(arguments, PartitionSpec(batch, heads), PartitionSpec(batch, heads))

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
        """A cache serves the whole batch, so one an example cannot be part of it."""
        return not names & {"key_cache", "value_cache"}

    def work(self, call: Call) -> Cost:
        """Two products a pair forward, five backward; the pages are read once. Lengths are data: the whole table counts."""
        query, keys, values = (call.shapes[name] for name in ("query", "key_cache", "value_cache"))
        batch, heads, head_dim = query.shape
        _, blocks, _, block_size, value_dim = values.shape
        max_blocks = call.shapes["block_tables"].shape[1]
        left = call.spec.left
        seen = max_blocks * block_size if left is None else left + 1
        read_blocks = batch * min(max_blocks, -(-seen // block_size))
        pages = read_blocks * (nbytes(keys) + nbytes(values)) // blocks
        small = sum(nbytes(array) for name, array in call.shapes.items() if not name.endswith("_cache"))
        out_bytes = batch * heads * value_dim * query.dtype.itemsize
        pairs = batch * heads * seen
        return Cost(
            flops=2 * pairs * (head_dim + value_dim),
            bytes=pages + small + out_bytes,
            backward_flops=2 * pairs * (3 * head_dim + 2 * value_dim),
            backward_bytes=2 * pages + 2 * small + 2 * out_bytes,
        )

    def sample(self, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        """Random numbers, full contexts, pages in no order."""
        keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
        blocks, _, block_size = shapes["key_cache"].shape[1:4]

        def make(name: str, like: jax.ShapeDtypeStruct) -> Array:
            if name == "context_lens":
                return jnp.full(like.shape, shapes["block_tables"].shape[1] * block_size, like.dtype)
            if name == "block_tables":
                count = math.prod(like.shape)
                order = jax.random.permutation(keys[name], max(count, blocks))[:count]
                return (order % blocks).astype(like.dtype).reshape(like.shape)
            if name in ("k_scale", "v_scale"):
                return jnp.ones(like.shape, like.dtype)
            if like.dtype == jnp.int8:
                return jax.random.randint(keys[name], like.shape, -127, 128, jnp.int8)
            return jax.random.normal(keys[name], like.shape, jnp.float32).astype(like.dtype)

        return {name: make(name, like) for name, like in shapes.items()}


def _has_work(arguments: dict[str, Any]) -> bool:
    """Whether there are sequences, entries in their tables, and pages."""
    return bool(math.prod(arguments["block_tables"].shape) and arguments["key_cache"].shape[0])


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool | np.bool_)


def _shown(values: np.ndarray) -> str:
    return np.array2string(values, threshold=8)


OPERATION = PageAttention(page_attention)
