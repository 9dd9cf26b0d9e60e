"""``flash_attention``: exact attention in linear memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Integer, Num

from ejkernel.callib.integers import power_of_two
from ejkernel.contracts.call import Call, Cost
from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.support import Backend, Platform
from ejkernel.kernels.common import dropout
from ejkernel.ops.attention import (
    AttentionChecker,
    Side,
    as_seed,
    attention_axes,
    effective_window,
    from_data,
    joined_sinks,
    key_intervals,
    nbytes,
    segment_pair,
    statistics_dtype,
    visible_pairs,
    window_intervals,
    window_words,
    within,
)
from ejkernel.ops.core.checks import is_array, is_data
from ejkernel.ops.core.operation import AnyArray, Operation
from ejkernel.utils.values import concrete
from ejkernel.xla_utils import prepare_sequence_ids

_check = AttentionChecker("flash_attention")


def flash_attention(
    query: Float[AnyArray, "*batch q_len heads head_dim"],
    key: Float[AnyArray, "*batch kv_len kv_heads head_dim"],
    value: Float[AnyArray, "*batch kv_len kv_heads value_dim"],
    attention_mask: Bool[AnyArray, "..."] | Integer[AnyArray, "..."] | None = None,
    bias: Float[AnyArray, "..."] | None = None,
    causal: bool | np.bool_ = False,
    softmax_scale: float | int | np.number | Num[Array | np.ndarray, ""] | None = None,
    dropout_prob: float | int | np.number = 0.0,
    dropout_seed: int | np.integer | Integer[AnyArray, ""] | None = None,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
    sliding_window: Side | Sequence[Side] = None,
    logits_soft_cap: float | int | np.number | None = None,
    cum_seqlens_q: Integer[AnyArray, " offsets"] | None = None,
    cum_seqlens_k: Integer[AnyArray, " offsets"] | None = None,
    softmax_aux: Float[AnyArray, "..."] | None = None,
    *,
    q_segment_ids: Integer[AnyArray, "batch q_len"] | None = None,
    kv_segment_ids: Integer[AnyArray, "batch kv_len"] | None = None,
    return_lse: bool = False,
    platform: Platform | str | None = None,
    backend: Backend | str | None = None,
) -> Float[Array, "*batch q_len heads value_dim"] | tuple[Array, Array]:
    """Exact attention whose memory grows with the length, not with its square.

    Logits are ``softmax_scale * query @ key``, then capped, then biased, then masked. A query that may attend to nothing
    gives 0. Half precision accumulates in float32; the output has the query's dtype.

    Args:
        query: ``[B, Sq, H, D]``; packed sequences may come without a batch, ``[T, H, D]``.
        key: ``[B, Sk, Hkv, D]``; ``H`` is a multiple of ``Hkv`` and query head ``h`` uses key head ``h // (H / Hkv)``.
        value: ``[B, Sk, Hkv, Dv]``.
        attention_mask: boolean or integer, non-zero = attend: ``[B, Sk]``, ``[B, Sq, Sk]`` or ``[B, H, Sq, Sk]``; any of
            these sizes may be 1.
        bias: added to the capped logits; broadcasts to ``[B, H, Sq, Sk]`` as in numpy.
        causal: query ``i`` sees keys ``j <= i + Sk - Sq``.
        softmax_scale: default ``D ** -0.5``. An array, which may be traced, has a gradient: it multiplies the query, which is
            then rounded to its dtype.
        dropout_prob: share of the attention weights to drop, in [0, 1); the others are scaled by ``1 / (1 - p)``.
        dropout_seed: decides, with the indices of batch, head, query and key, which; the same on every platform.
        fwd_params, bwd_params: block sizes and the like. They change the speed, never the result's meaning.
        sliding_window: ``(left, right)``: query ``i`` sees keys from ``p - left`` to ``p + right``, both included, where
            ``p = i + Sk - Sq``; an int is both sides, None is unbounded. A side may be an array, which may be traced: one
            compilation then serves all windows, and a traced side below 0 counts as 0.
        logits_soft_cap: ``cap * tanh(logits / cap)``.
        cum_seqlens_q, cum_seqlens_k: ``[N + 1]`` offsets of sequences packed into a batch of 1; causality and the window
            then count within a sequence, and tokens past the last offset are padding.
        softmax_aux: sink logits ``[num_sinks]``, ``[1, num_sinks]`` or ``[H, num_sinks]``: they join the softmax's
            denominator alone. One dimension of length H could mean either and is refused.
        q_segment_ids, kv_segment_ids: a query sees the keys of its own id; ids <= 0 are padding.
        return_lse: also return the log-sum-exp of the logits, ``[B, H, Sq]`` (``[H, T]``), float32, sinks included.
        platform, backend: run exactly this implementation, or raise.

    Returns:
        ``[B, Sq, H, Dv]`` (``[T, H, Dv]``), or ``(out, lse)``. Query, key, value, bias, softmax_aux and a softmax_scale that
        is an array have gradients, and so has the lse.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel import flash_attention
        >>> x = jnp.ones((1, 4, 2, 8))
        >>> flash_attention(x, x, x, causal=True, sliding_window=(1, 0)).shape
        (1, 4, 2, 8)
    """
    arguments = {**locals(), "dropout_seed": as_seed(dropout_seed)}
    if not _needs_rewriting(arguments):
        return OPERATION(arguments)
    result = OPERATION(_rewritten(arguments))
    return jax.tree.map(lambda x: x[0], result) if len(query.shape) == 3 else result


def _needs_rewriting(a: dict[str, Any]) -> bool:
    """Whether an argument has a form that the operation does not know."""
    return is_data(a["softmax_scale"]) or from_data(a["sliding_window"]) or _lacks_batch(a)


def _lacks_batch(a: dict[str, Any]) -> bool:
    """Whether packed sequences came as ``[T, H, D]``."""
    main = (a["query"], a["key"], a["value"])
    return a["cum_seqlens_q"] is not None and all(is_array(x) and len(x.shape) == 3 for x in main)


def _rewritten(a: dict[str, Any], abstract: bool = False) -> dict[str, Any]:
    """The call in the forms that the operation knows: a static scale, a batch, windows that are arrays as intervals."""
    if _lacks_batch(a):
        main = {name: a[name] for name in ("query", "key", "value")}
        a = {**a, **{n: jax.ShapeDtypeStruct((1, *x.shape), x.dtype) if abstract else x[None] for n, x in main.items()}}
    a = _check.scaled_query(a, abstract)
    if not from_data(a["sliding_window"]):
        return a
    _check.main_arrays(a["query"], a["key"], a["value"])
    _check_packing(a["cum_seqlens_q"], a["cum_seqlens_k"], a["query"].shape[0])
    window, causal = (
        _check.window_sides("sliding_window", a["sliding_window"], abstract),
        _check.flag("causal", a["causal"]),
    )
    lengths = (a["query"].shape[1], a["key"].shape[1])
    if abstract:
        rows = jax.ShapeDtypeStruct((1, lengths[0]), jnp.int32)
        intervals = (rows, rows)
    else:
        intervals = _intervals(window, a["cum_seqlens_q"], a["cum_seqlens_k"], causal, lengths)
    return {**a, "causal": False, "sliding_window": None, **dict(zip(FlashAttention.inside, intervals, strict=True))}


@functools.partial(jax.jit, static_argnames=("causal", "lengths"))
def _intervals(window: tuple, cum_q: Any, cum_k: Any, causal: bool, lengths: tuple[int, int]) -> tuple[Array, Array]:
    """As ``window_intervals``, of packed sequences too."""
    if cum_q is None:
        return window_intervals(window, causal, lengths)
    left, right = (None if side is None else within(side, 0, max(lengths)) for side in window)
    window = (left, 0 if causal else right)
    return _packed_intervals(cum_q.astype(jnp.int32), cum_k.astype(jnp.int32), lengths[0], window)


@dataclass(frozen=True)
class FlashSpec:
    """What to compute, beside the arrays.

    ``window`` is all that causality and the sliding window leave: with ``causal`` its right side is 0.
    """

    causal: bool
    window: tuple[int | None, int | None]
    softmax_scale: float
    logits_soft_cap: float | None
    dropout_prob: float


class FlashAttention(Operation):
    """Arrays for kernels, each with a batch axis in front (of size 1 only where it says so):

    ``query``, ``key``, ``value`` as passed; ``attention_mask`` boolean and ``bias``, both ``[B|1, H|1, Sq|1, Sk|1]``;
    ``softmax_aux`` float32 ``[B|1, H]``, the sinks' log-sum-exp; ``q_segment_ids``, ``kv_segment_ids`` ``[B, S]``;
    ``kv_start``, ``kv_stop`` int32 ``[B|1, Sq]`` for packed sequences and for windows and lengths that come as arrays, the
    interval of keys that each query may see with causality and the window counted in, neither ever decreasing;
    ``dropout_key`` uint32 ``[B]``.
    """

    name = "flash_attention"
    features: ClassVar[dict[str, str]] = {
        "causal": "causal masking, aligned bottom-right",
        "window": "a sliding window, bounded on one side or both",
        "soft_cap": "soft-capped logits",
        "bias": "an additive bias",
        "mask": "a boolean mask",
        "segments": "segment ids",
        "varlen": "packed sequences (cum_seqlens)",
        "sinks": "attention sinks (softmax_aux)",
        "dropout": "dropout of attention weights",
        "gqa": "fewer key heads than query heads",
        "value_dim": "values of another head dim than the keys",
        "cross": "queries and keys of different lengths",
        "lse": "the log-sum-exp as a result",
    }
    gradients = ("query", "key", "value", "bias", "softmax_aux")
    shareable = frozenset({"attention_mask", "bias", "softmax_aux", "kv_start", "kv_stop"})
    undemanding = frozenset({"causal", "window", "sinks", "gqa", "cross"})
    inside = ("kv_start", "kv_stop")

    def normalise(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Lists become tuples, Python seeds 32 bits; all arguments of a call that is only explained are brought in form."""
        arguments = super().normalise(arguments)
        if "query" not in arguments:
            return arguments
        arguments["dropout_seed"] = as_seed(arguments["dropout_seed"])
        return _rewritten(arguments, abstract=True) if _needs_rewriting(arguments) else arguments

    def bind(self, arguments: dict[str, Any]) -> Call:
        """Check every argument; see the base class."""
        a = arguments
        _check.main_arrays(a["query"], a["key"], a["value"])
        batch, q_len, heads, head_dim = a["query"].shape
        kv_len, kv_heads, value_dim = a["value"].shape[1:]
        full = (batch, heads, q_len, kv_len)
        self._check_mask(a["attention_mask"], full)
        self._check_bias(a["bias"], full)
        _check_packing(a["cum_seqlens_q"], a["cum_seqlens_k"], batch)
        _check.segments(a["q_segment_ids"], a["kv_segment_ids"], batch, q_len, kv_len)
        _check.sinks(a["softmax_aux"], heads)
        window = _check.window("sliding_window", a["sliding_window"])
        spec = self._spec(a, head_dim, window, max(q_len, kv_len))
        _check.flag("return_lse", a["return_lse"])
        by_data = a.get("kv_start") is not None
        used = {
            "causal": (spec.causal, "causal"),
            "window": (window != (None, None), "sliding_window"),
            "soft_cap": (spec.logits_soft_cap is not None, "logits_soft_cap"),
            "bias": (a["bias"] is not None, "bias"),
            "mask": (a["attention_mask"] is not None, "attention_mask"),
            "segments": (a["q_segment_ids"] is not None, "q_segment_ids"),
            "varlen": (
                by_data or a["cum_seqlens_q"] is not None,
                "keys of each query from data" if by_data else "cum_seqlens_q",
            ),
            "sinks": (a["softmax_aux"] is not None, "softmax_aux"),
            "dropout": (spec.dropout_prob > 0, "dropout_prob"),
            "gqa": (heads != kv_heads, f"{heads} query heads for {kv_heads} key heads"),
            "value_dim": (head_dim != value_dim, f"value head dim {value_dim} beside {head_dim}"),
            "cross": (q_len != kv_len, f"query length {q_len} beside key length {kv_len}"),
            "lse": (a["return_lse"], "return_lse"),
        }
        features = {name: phrase for name, (is_used, phrase) in used.items() if is_used}
        return Call(
            operation=self.name,
            # A plain function cannot be told of intervals.
            runs_on=self.name if by_data else "",
            arguments=self.given(a),
            spec=spec,
            dtype=jnp.dtype(a["query"].dtype).name,
            head_dims=(head_dim, value_dim),
            features=features,
            bucket=(
                ("dtype", jnp.dtype(a["query"].dtype).name),
                ("head_dim", head_dim),
                ("value_dim", value_dim),
                ("group", heads // kv_heads),
                ("heads", power_of_two(batch * kv_heads)),
                ("q_len", power_of_two(q_len)),
                ("kv_len", power_of_two(kv_len)),
                ("window", window_words(spec.window)),
                ("features", " ".join(sorted(features.keys() - {"lse"}))),
            ),
            fwd_params=a["fwd_params"],
            bwd_params=a["bwd_params"],
        )

    def _check_mask(self, mask: Any, full: tuple[int, ...]) -> None:
        if mask is None:
            return
        batch, _, q_len, kv_len = full
        layout = f"[{batch}, {kv_len}], [{batch}, {q_len}, {kv_len}] or four dimensions {list(full)}, each of them its own size or 1"
        if is_array(mask) and jnp.issubdtype(mask.dtype, jnp.floating):
            _check.fail("attention_mask", mask, f"{layout}, boolean or integer; a float to add to the logits is a bias")
        _check.array("attention_mask", mask, layout, ranks=(2, 3, 4), kinds=(jnp.bool_, jnp.integer))
        whole = {2: (batch, kv_len), 3: (batch, q_len, kv_len), 4: full}[len(mask.shape)]
        if not _broadcasts(mask.shape, whole):
            _check.fail("attention_mask", mask, layout)

    def _check_bias(self, bias: Any, full: tuple[int, ...]) -> None:
        if bias is None:
            return
        layout = f"a shape that broadcasts to {list(full)}"
        if not is_array(bias):
            _check.fail("bias", bias, f"an array of {layout}: pass jnp.asarray(bias)")
        _check.array("bias", bias, layout, ranks=(0, 1, 2, 3, 4), kinds=(jnp.floating,))
        if not _broadcasts(_four(bias.shape), full):
            _check.fail("bias", bias, layout)

    def _spec(self, a: dict[str, Any], head_dim: int, window: tuple[int | None, int | None], longest: int) -> FlashSpec:
        causal = _check.flag("causal", a["causal"])
        return FlashSpec(
            causal=causal,
            window=effective_window(window, causal, longest),
            softmax_scale=_check.scale(a["softmax_scale"], head_dim),
            logits_soft_cap=_check.soft_cap(a["logits_soft_cap"]),
            dropout_prob=_check.dropout("dropout_prob", a["dropout_prob"], a["dropout_seed"]),
        )

    def check_values(self, arguments: dict[str, Any]) -> None:
        """Offsets must start at 0 and never decrease."""
        for name, length_of in (("cum_seqlens_q", "query"), ("cum_seqlens_k", "key")):
            offsets, array = concrete(arguments[name]), arguments[length_of]
            if offsets is None or offsets.ndim != 1 or not offsets.size or not is_array(array) or len(array.shape) != 4:
                continue
            total = array.shape[1]
            if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any() or offsets[-1] > total:
                shown = np.array2string(offsets, threshold=8)
                _check.fail(
                    name,
                    arguments[name],
                    f"offsets that start at 0, never decrease and end by {total}; they are {shown}",
                )

    def prepare(self, arguments: dict[str, Any], spec: FlashSpec) -> dict[str, Array]:
        """The kernels' arrays; see the class."""
        a = arguments
        query, key, mask, bias = a["query"], a["key"], a["attention_mask"], a["bias"]
        arrays = {"query": query, "key": key, "value": a["value"]}
        if mask is not None:
            shape = {2: (0, None, None, 1), 3: (0, None, 1, 2), 4: (0, 1, 2, 3)}[mask.ndim]
            mask = mask if mask.dtype == bool else mask != 0
            arrays["attention_mask"] = mask.reshape([1 if axis is None else mask.shape[axis] for axis in shape])
        if bias is not None:
            arrays["bias"] = jnp.reshape(bias, _four(bias.shape))
        if a["q_segment_ids"] is not None:
            arrays["q_segment_ids"], arrays["kv_segment_ids"] = segment_pair(a["q_segment_ids"], a["kv_segment_ids"])
        if a.get("kv_start") is not None:
            arrays |= {name: a[name] for name in self.inside}
        elif a["cum_seqlens_q"] is not None:
            arrays["kv_start"], arrays["kv_stop"] = _packed_intervals(
                a["cum_seqlens_q"].astype(jnp.int32), a["cum_seqlens_k"].astype(jnp.int32), query.shape[1], spec.window
            )
        if a["softmax_aux"] is not None:
            arrays["softmax_aux"] = joined_sinks(a["softmax_aux"], query)
        if spec.dropout_prob:
            arrays["dropout_key"] = dropout.batch_keys(a["dropout_seed"], query.shape[0])
        return arrays

    def axes(self, arrays: dict[str, Any], spec: FlashSpec) -> tuple[dict[str, Any], tuple]:
        """Batch and heads; dropout hashes the index of a head, which a part of the heads would count from 0."""
        return attention_axes(spread_heads=not spec.dropout_prob)

    def empty(self, arguments: dict[str, Any]) -> Any:
        """Zeros for a batch of 0."""
        query, value = arguments["query"], arguments["value"]
        if query.shape[0]:
            return None
        _, q_len, heads, _ = query.shape
        out = jnp.zeros((0, q_len, heads, value.shape[3]), query.dtype)
        lse = jnp.zeros((0, heads, q_len), statistics_dtype(query))
        return self.finish(arguments, out, lse)

    def finish(self, arguments: dict[str, Any], out: Any, lse: Any) -> Any:
        """The output, with the lse if it was asked for."""
        return (out, lse) if arguments["return_lse"] else out

    def result_specs(self, arguments: dict[str, Any], spec: tuple) -> Any:
        """The output as the query is partitioned, but for the head dim."""
        batch, length, heads, _ = spec
        return self.finish(arguments, PartitionSpec(batch, length, heads), PartitionSpec(batch, heads, length))

    def work(self, call: Call) -> Cost:
        """Two products a visible pair forward, five backward; every array once. Masks that are data count as seen."""
        query, value = call.shapes["query"], call.shapes["value"]
        batch, q_len, heads, head_dim = query.shape
        kv_len, _, value_dim = value.shape[1:]
        pairs = batch * heads * visible_pairs(call.spec.window, q_len, kv_len)
        out_bytes = batch * q_len * heads * value_dim * query.dtype.itemsize
        read = sum(map(nbytes, call.shapes.values()))
        return Cost(
            flops=2 * pairs * (head_dim + value_dim),
            bytes=read + out_bytes,
            backward_flops=2 * pairs * (3 * head_dim + 2 * value_dim),
            backward_bytes=2 * read + 2 * out_bytes,
        )

    def sample(self, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        """Random numbers where numbers are multiplied, and masks that hide nothing."""
        keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))

        def make(name: str, like: jax.ShapeDtypeStruct) -> Array:
            if jnp.issubdtype(like.dtype, jnp.floating):
                return jax.random.normal(keys[name], like.shape, like.dtype)
            if name == "kv_stop":
                return jnp.full(like.shape, shapes["key"].shape[1], like.dtype)
            if name in ("cum_seqlens_q", "cum_seqlens_k"):
                length = shapes["query" if name.endswith("q") else "key"].shape[1]
                return jnp.linspace(0, length, like.shape[0]).astype(like.dtype)
            return jnp.zeros(like.shape, like.dtype) if name == "kv_start" else jnp.ones(like.shape, like.dtype)

        return {name: make(name, like) for name, like in shapes.items()}


def _four(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * (4 - len(shape)) + tuple(shape)


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    return all(size in (1, whole) for size, whole in zip(shape, full, strict=True))


def _check_packing(cum_q: Any, cum_k: Any, batch: int) -> None:
    if cum_q is None and cum_k is None:
        return
    pair = {"cum_seqlens_q": cum_q, "cum_seqlens_k": cum_k}
    for name, offsets in pair.items():
        layout = "[sequences + 1], beside its pair"
        if offsets is None:
            _check.fail(name, offsets, f"{layout}: pass both or neither")
        _check.array(name, offsets, layout, ranks=(1,), kinds=(jnp.integer,))
        if offsets.shape[0] < 2:
            _check.fail(name, offsets, "at least two offsets: [0, length]")
    if cum_q.shape != cum_k.shape:
        _check.fail("cum_seqlens_k", cum_k, f"as many offsets as cum_seqlens_q has, {cum_q.shape[0]}")
    if batch > 1:
        _check.fail("cum_seqlens_q", cum_q, f"a batch of 1 with packed sequences; the batch is {batch}")


def _packed_intervals(cum_q: Array, cum_k: Array, q_len: int, window: tuple[Any, Any]) -> tuple[Array, Array]:
    """``[1, Sq]`` starts and stops of the keys that each packed query may see."""
    sequence = prepare_sequence_ids(cum_q, q_len)
    padding = sequence < 0
    q_end, k_first, k_end = cum_q[sequence + 1], cum_k[sequence], cum_k[sequence + 1]
    position = jnp.arange(q_len, dtype=jnp.int32) - q_end + k_end
    start, stop = key_intervals(position, k_first, k_end, *window)
    return jnp.where(padding, cum_k[-1], start)[None], jnp.where(padding, cum_k[-1], stop)[None]


OPERATION = FlashAttention(flash_attention)
