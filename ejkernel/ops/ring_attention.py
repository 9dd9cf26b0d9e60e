"""``ring_attention``: exact attention over a sequence that is spread over devices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Float, Integer, Num

from ejkernel.callib.integers import power_of_two
from ejkernel.contracts.call import Call, Cost
from ejkernel.contracts.registry import Choice, kernel_registry
from ejkernel.contracts.support import Backend, Platform
from ejkernel.kernels.common import ring as kernel
from ejkernel.kernels.common.varying import vary_over
from ejkernel.ops.attention import (
    AttentionChecker,
    Side,
    from_data,
    joined_sinks,
    nbytes,
    segment_pair,
    window_words,
    within,
)
from ejkernel.ops.config import chain
from ejkernel.ops.core.checks import Checker, is_array
from ejkernel.ops.core.operation import AnyArray, Operation, types_of
from ejkernel.ops.flash_attention import FlashSpec

LAYOUTS = ("contiguous", "zigzag")
# What all devices have alike.
SHARED = frozenset({"softmax_aux", "window_sides"})
# Of a window that is data; positions less it, or more it, fit int32.
LONGEST_WINDOW = 2**30

_check = AttentionChecker("ring_attention")


def ring_attention(
    query: Float[AnyArray, "batch q_len heads head_dim"],
    key: Float[AnyArray, "batch q_len kv_heads head_dim"],
    value: Float[AnyArray, "batch q_len kv_heads value_dim"],
    axis_name: str | Sequence[str] = "ring",
    causal: bool | np.bool_ = True,
    *,
    softmax_scale: float | int | np.number | Num[Array | np.ndarray, ""] | None = None,
    sliding_window: Side | Sequence[Side] = None,
    logits_soft_cap: float | int | np.number | None = None,
    softmax_aux: Float[AnyArray, "..."] | None = None,
    q_segment_ids: Integer[AnyArray, "batch q_len"] | None = None,
    kv_segment_ids: Integer[AnyArray, "batch q_len"] | None = None,
    layout: str = "contiguous",
    mesh: Any = None,
    platform: Platform | str | None = None,
    backend: Backend | str | None = None,
) -> Float[Array, "batch q_len heads value_dim"]:
    """Attention inside ``shard_map`` where each device holds a part of the sequence; keys go round the ring of devices.

    One hop to the neighbour a step, sent before the step that it overlaps with; steps that causality or the window
    empties are not computed. A device never holds more than its own keys and one more shard of them, forward and backward.

    Args:
        query: this device's shard, ``[B, S / n, H, D]``.
        key: ``[B, S / n, Hkv, D]``.
        value: ``[B, S / n, Hkv, Dv]``.
        axis_name: the mesh axis over which the sequence is spread.
        causal: a query sees no key that comes after it in the whole sequence.
        softmax_scale: default ``D ** -0.5``; an array has a gradient, as in ``flash_attention``.
        sliding_window: ``(left, right)`` in positions of the whole sequence, as in ``flash_attention``. A side may be an array,
            which may be traced, the same on every device; the keys then go round the whole ring.
        logits_soft_cap: ``cap * tanh(logits / cap)``.
        softmax_aux: sink logits ``[num_sinks]``, ``[1, num_sinks]`` or ``[H, num_sinks]``, the same on every device of the ring.
        q_segment_ids, kv_segment_ids: this device's shards; a query sees the keys of its own id; ids <= 0 are padding.
        layout: ``"contiguous"``: device ``d`` holds the ``d``-th part. ``"zigzag"``: of ``2 n`` chunks it holds ``d`` and
            ``2 n - 1 - d``, so that causal work is the same on all; see ``ring_shard``.
        mesh: without a ``shard_map`` around the call: a mesh that has ``axis_name``. The arrays are then whole, laid out as
            ``layout`` says, and other axes of the mesh are left to the compiler.
        platform, backend: run the steps with exactly this implementation of ``flash_attention``, or raise.

    Returns:
        This device's shard of the output, ``[B, S / n, H, Dv]``. Query, key, value and softmax_aux have gradients.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from ejkernel import ring_attention
        >>> mesh = jax.make_mesh((1,), ("ring",))
        >>> x = jnp.ones((1, 64, 2, 8))
        >>> ring_attention(x, x, x, mesh=mesh).shape
        (1, 64, 2, 8)
    """
    arguments = _check.scaled_query(_with_window(locals()))
    arrays = tuple(arguments.get(name) for name in OPERATION.arrays)
    statics = tuple(arguments[name] for name in OPERATION.statics)
    statics = tuple(tuple(x) if isinstance(x, list) else x for x in statics)
    if mesh is not None:
        statics = OPERATION.check_whole(arrays, statics)
        _check_mesh(mesh, statics[0], query, layout)
        # What a kernel is chosen by is part of the key, as it is of a call's own.
        circumstances = (types_of(statics), kernel_registry.generation, chain.environment())
        if AxisType.Explicit in mesh.axis_types:
            axes = (None if name in SHARED else statics[0] for name in OPERATION.arrays)
            arrays = tuple(_placed(x, mesh, axis) for x, axis in zip(arrays, axes, strict=True))
        return _over_mesh(mesh, statics, tuple(x is not None for x in arrays), circumstances)(arrays)
    _axis_size(statics[0])
    return OPERATION.run(arrays, statics)


def _with_window(a: dict[str, Any], abstract: bool = False) -> dict[str, Any]:
    """The arguments, with a window that came as arrays as one array of both sides."""
    if not from_data(a["sliding_window"]):
        return a
    sides = _check.window_sides("sliding_window", a["sliding_window"], abstract)
    if abstract:
        window = jax.ShapeDtypeStruct((2,), jnp.int32)
    else:
        window = jnp.stack([within(LONGEST_WINDOW if side is None else side, 0, LONGEST_WINDOW) for side in sides])
    return {**a, "sliding_window": None, "window_sides": window}


@functools.lru_cache(maxsize=256)
def _over_mesh(mesh: Any, statics: tuple, given: tuple[bool, ...], circumstances: tuple) -> Any:
    """The operation under ``shard_map``, for arrays that are whole."""
    axis = statics[0]
    by_length = PartitionSpec(None, axis)
    specs = (PartitionSpec() if name in SHARED else by_length for name in OPERATION.arrays)
    specs = tuple(spec if there else None for spec, there in zip(specs, given, strict=True))
    names = {axis} if isinstance(axis, str) else set(axis)
    operation = functools.partial(OPERATION.run, statics=statics)

    def run(arrays):
        mapped = functools.partial(jax.shard_map, operation, in_specs=(specs,), out_specs=by_length, axis_names=names)
        if AxisType.Explicit not in mesh.axis_types:
            return mapped(mesh=mesh)(arrays)
        # Explicit axes become the compiler's business inside.
        result = NamedSharding(mesh, PartitionSpec(*jax.typeof(arrays[0]).sharding.spec[:3]))
        return jax.sharding.auto_axes(lambda arrays: mapped()(arrays), out_sharding=result)(arrays)

    return jax.jit(run)


def _placed(x: AnyArray, mesh: Any, axis: Any) -> Array:
    """An array on an explicit mesh, its length spread as the ring wants it (None: as it was) and all else as it was."""
    if x is None:
        return None
    here = jax.typeof(x).sharding
    own = tuple(here.spec) if here.mesh.axis_names == mesh.axis_names else ()
    wanted = [*own, *[None] * (x.ndim - len(own))]
    if axis is not None:
        wanted[1] = axis
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*wanted)))


def _check_mesh(mesh: Any, axis_name: Any, query: Any, layout: str) -> None:
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    known = getattr(mesh, "axis_names", None)
    if known is None:
        _check.fail("mesh", mesh, "a jax.sharding.Mesh, or None inside shard_map")
    if not isinstance(names, tuple) or not names or len(set(names)) < len(names) or not set(names) <= set(known):
        _check.fail("axis_name", axis_name, f"an axis of the mesh, which has {', '.join(map(repr, known))}")
    _check_parts(_check, "query", query, 1, _ring_size(mesh, names), layout)


def _ring_size(mesh: Any, names: tuple[str, ...]) -> int:
    return int(np.prod([mesh.shape[name] for name in names]))


def _axis_size(axis_name: Any) -> int:
    try:
        return jax.lax.axis_size(axis_name)
    except (NameError, TypeError):
        _check.fail("axis_name", axis_name, "the mesh axis of a shard_map around the call; without one, pass mesh=")


def ring_shard(x: AnyArray, n: int, layout: str = "contiguous", axis: int = 1) -> Array:
    """Bring a whole array into the order in which ``n`` devices hold it.

    Split the result into ``n`` equal parts: part ``d`` is what device ``d`` holds. Do it once, to tokens, positions and
    targets alike; everything between stays in that order.

    Example:
        >>> import jax.numpy as jnp
        >>> ring_shard(jnp.arange(8), 2, "zigzag", axis=0).tolist()  # device 0: chunks 0 and 3, device 1: chunks 1 and 2
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return _reorder("ring_shard", x, n, layout, axis, _zigzag)


def ring_unshard(x: AnyArray, n: int, layout: str = "contiguous", axis: int = 1) -> Array:
    """Undo ``ring_shard``.

    Example:
        >>> import jax.numpy as jnp
        >>> ring_unshard(jnp.array([0, 1, 6, 7, 2, 3, 4, 5]), 2, "zigzag", axis=0).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return _reorder("ring_unshard", x, n, layout, axis, lambda n: np.argsort(_zigzag(n)))


def _zigzag(n: int) -> np.ndarray:
    """The chunks in the order of the devices that hold them."""
    return np.stack([np.arange(n), 2 * n - 1 - np.arange(n)], axis=1).reshape(-1)


def _reorder(function: str, x: Any, n: int, layout: str, axis: int, order: Any) -> Array:
    check = Checker(function)
    if not is_array(x) or not x.shape or isinstance(x, jax.ShapeDtypeStruct):
        check.fail("x", x, "an array with the axis to spread")
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        check.fail("n", n, "the number of devices, an int ≥ 1")
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer) or not -x.ndim <= axis < x.ndim:
        check.fail("axis", axis, f"an axis of x, from {-x.ndim} to {x.ndim - 1}")
    axis = int(axis) % x.ndim
    _check_parts(check, "x", x, axis, n, layout)
    x = jnp.asarray(x)
    if layout == "contiguous":
        return x
    chunks = x.reshape(*x.shape[:axis], 2 * n, x.shape[axis] // (2 * n), *x.shape[axis + 1 :])
    return jnp.take(chunks, order(n), axis=axis).reshape(x.shape)


def _check_parts(check: Checker, name: str, x: Any, axis: int, n: int, layout: str) -> None:
    """A known layout, and a length that it divides."""
    if layout not in LAYOUTS:
        check.fail("layout", layout, " or ".join(map(repr, LAYOUTS)))
    parts = n if layout == "contiguous" else 2 * n
    if x.shape[axis] % parts:
        what = f"{n} devices" if parts == n else f"{n} devices of two chunks"
        check.fail(name, x, f"a length along axis {axis} that is a multiple of {parts}, for {what}: pad it")


@dataclass(frozen=True)
class RingSpec(FlashSpec):
    """What to compute. ``window`` is that of a device's own step, in which the sliding window has no part.

    ``sliding_window`` counts in positions of the whole sequence; a step gets it as intervals. ``by_data``: the array
    ``window_sides`` is the window.
    """

    axis_name: str | tuple[str, ...]
    sliding_window: tuple[int | None, int | None]
    layout: str
    by_data: bool

    @property
    def windowed(self) -> bool:
        """Whether steps get intervals."""
        return self.by_data or self.sliding_window != (None, None)

    def ring(self, arrays: dict[str, Array]) -> kernel.Ring:
        """The ring that surrounds the trace."""
        size, length = jax.lax.axis_size(self.axis_name), arrays["query"].shape[1]
        if self.by_data:
            left, right = arrays["window_sides"][:, 0], arrays["window_sides"][:, 1]
        else:
            left, right = (None if side is None else min(side, size * length) for side in self.sliding_window)
        return kernel.Ring(self.axis_name, size, length, self.causal, (left, right), self.layout == "zigzag")

    def step(self, causal: bool) -> FlashSpec:
        """Of one call of a flash kernel."""
        window = (None, 0 if causal else None)
        return FlashSpec(causal, window, self.softmax_scale, self.logits_soft_cap, dropout_prob=0.0)


class RingAttention(Operation):
    """The ring itself is the same everywhere; its steps run on the kernels of ``flash_attention``, chosen for the step.

    Arrays: ``query``, ``key``, ``value``; ``softmax_aux`` float32 ``[B|1, H]``; ``q_segment_ids``, ``kv_segment_ids``;
    ``window_sides`` int32 ``[B|1, 2]``. The sinks join after the last step, and the window becomes intervals, so a step
    never has them.
    """

    name = "ring_attention"
    runs_on = "flash_attention"
    outside = frozenset({"mesh"})
    # What steps ask of a kernel.
    features: ClassVar[dict[str, str]] = {
        "causal": "a causal ring",
        "soft_cap": "soft-capped logits",
        "segments": "segment ids",
        "varlen": "a sliding window, which steps get as intervals",
        "gqa": "fewer key heads than query heads",
        "value_dim": "values of another head dim than the keys",
        "cross": "the zigzag layout, causal",
        "lse": "the log-sum-exp, by which steps are merged",
    }
    gradients = ("query", "key", "value", "softmax_aux")
    shareable = SHARED
    inside = ("window_sides",)

    def normalise(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Lists become tuples; beside a mesh, whole arrays become a device's."""
        arguments = super().normalise(arguments)
        if "query" in arguments:
            arguments = _check.scaled_query(_with_window(arguments, abstract=True), abstract=True)
        mesh, axis = arguments.pop("mesh", None), arguments.get("axis_name")
        if mesh is None:
            return arguments
        whole = {name: x for name, x in arguments.items() if name in self.arrays and name not in SHARED and is_array(x)}
        size = _ring_size(mesh, (axis,) if isinstance(axis, str) else axis)
        for name, x in whole.items():
            shape = (x.shape[0], x.shape[1] // size, *x.shape[2:]) if len(x.shape) > 1 else x.shape
            arguments[name] = jax.ShapeDtypeStruct(shape, x.dtype)
        return arguments

    def check_whole(self, arrays: tuple, statics: tuple) -> tuple:
        """The checks of ``bind`` for arrays that are not spread yet; the statics, hashable."""
        self._check_arrays(arrays)
        statics = self._hashable(statics)
        self._bound(self._named(arrays, statics))
        return statics

    def bind(self, arguments: dict[str, Any]) -> Call:
        """Check every argument; what is asked of a kernel is what a step needs."""
        a = arguments
        query, key, value = a["query"], a["key"], a["value"]
        _check.main_arrays(query, key, value)
        batch, length, heads, head_dim = query.shape
        kv_heads, value_dim = value.shape[2:]
        if key.shape[1] != length:
            _check.fail("key", key, f"the query's length, {length}: every device holds as many keys as queries")
        _check.segments(a["q_segment_ids"], a["kv_segment_ids"], batch, length, length)
        _check.sinks(a["softmax_aux"], heads)
        if a["layout"] not in LAYOUTS:
            _check.fail("layout", a["layout"], " or ".join(map(repr, LAYOUTS)))
        zigzag = a["layout"] == "zigzag"
        if zigzag and length % 2:
            _check.fail("query", query, "an even length, for a device holds two chunks in the zigzag layout: pad it")
        causal = _check.flag("causal", a["causal"])
        window = _check.window("sliding_window", a["sliding_window"])
        by_data = a.get("window_sides") is not None
        windowed = by_data or window != (None, None)
        spec = RingSpec(
            causal=causal,
            window=(None, 0 if causal and not windowed else None),
            softmax_scale=_check.scale(a["softmax_scale"], head_dim),
            logits_soft_cap=_check.soft_cap(a["logits_soft_cap"]),
            dropout_prob=0.0,
            axis_name=a["axis_name"],
            sliding_window=window,
            layout=a["layout"],
            by_data=by_data,
        )
        used = {
            "causal": (causal and not windowed, "causal"),
            "soft_cap": (spec.logits_soft_cap is not None, "logits_soft_cap"),
            "segments": (a["q_segment_ids"] is not None, "q_segment_ids"),
            "varlen": (windowed, "sliding_window (a step sees it as intervals of keys)"),
            "gqa": (heads != kv_heads, f"{heads} query heads for {kv_heads} key heads"),
            "value_dim": (head_dim != value_dim, f"value head dim {value_dim} beside {head_dim}"),
            "cross": (causal and zigzag and not windowed, "layout='zigzag' (a step has half of the queries or keys)"),
            "lse": (True, "the log-sum-exp (steps are merged by it)"),
        }
        features = {name: phrase for name, (is_used, phrase) in used.items() if is_used}
        dtype = jnp.dtype(query.dtype).name
        return Call(
            operation=self.name,
            runs_on=self.runs_on,
            arguments=self.given(a),
            spec=spec,
            dtype=dtype,
            head_dims=(head_dim, value_dim),
            features=features,
            bucket=(
                ("dtype", dtype),
                ("head_dim", head_dim),
                ("value_dim", value_dim),
                ("group", heads // kv_heads),
                ("heads", power_of_two(batch * kv_heads)),
                ("q_len", power_of_two(length)),
                ("kv_len", power_of_two(length)),
                ("window", window_words(spec.window)),
                ("features", " ".join(sorted(features.keys() - {"lse", "cross"}))),
            ),
        )

    def abstract(self, arguments: dict[str, Any], spec: RingSpec) -> dict[str, Any] | None:
        """As the base class; ``prepare`` needs the mesh axis of a ``shard_map``, which ``explain`` does without."""
        if not arguments["query"].shape[0]:
            return None
        given = {name: arguments[name] for name in self.arrays if arguments.get(name) is not None}
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in given.items()}

    def shapes(self, arrays: dict[str, Any], spec: RingSpec) -> dict[str, Any]:
        """Of a step's arrays: the sinks join after the last one, and a window comes as intervals."""
        shapes = super().shapes({name: x for name, x in arrays.items() if name not in SHARED}, spec)
        if spec.windowed:
            rows = jax.ShapeDtypeStruct((1, arrays["query"].shape[1]), jnp.int32)
            shapes |= {"kv_start": rows, "kv_stop": rows}
        return shapes

    def prepare(self, arguments: dict[str, Any], spec: RingSpec) -> dict[str, Array]:
        """The kernels' arrays; see the class."""
        a = arguments
        arrays = {name: a[name] for name in ("query", "key", "value")}
        if a["q_segment_ids"] is not None:
            arrays["q_segment_ids"], arrays["kv_segment_ids"] = segment_pair(a["q_segment_ids"], a["kv_segment_ids"])
        if a["softmax_aux"] is not None:
            arrays["softmax_aux"] = joined_sinks(a["softmax_aux"], a["query"])
        if spec.by_data:
            arrays["window_sides"] = a["window_sides"][None]
        # What the devices share gets its gradient summed over them.
        axes = frozenset({spec.axis_name} if isinstance(spec.axis_name, str) else spec.axis_name)
        return {name: vary_over(array, axes) for name, array in arrays.items()}

    def run_forward(self, chosen: Choice, arrays: dict[str, Any], spec: RingSpec) -> tuple:
        """Round the ring, with the implementation's forward at each step."""

        def step(arrays, causal):
            return chosen.forward(arrays, spec.step(causal))

        return kernel.forward(_of_steps(arrays), spec.ring(arrays), step)

    def run_backward(
        self, chosen: Choice, wanted: frozenset[str], arrays: dict[str, Any], spec: RingSpec, *rest: Any
    ) -> dict[str, Any]:
        """Round the ring again, with the implementation's backward at each step."""
        of_a_step = frozenset({"query", "key", "value"})

        def pull_step(arrays, causal, *rest):
            return chosen.backward(of_a_step, arrays, spec.step(causal), *rest)

        return kernel.backward(_of_steps(arrays), spec.ring(arrays), pull_step, *rest)

    def empty(self, arguments: dict[str, Any]) -> Any:
        """Zeros for a batch of 0."""
        query, value = arguments["query"], arguments["value"]
        return None if query.shape[0] else jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)

    def finish(self, arguments: dict[str, Any], out: Any, lse: Any) -> Any:
        """The output."""
        return out

    def result_specs(self, arguments: dict[str, Any], spec: tuple) -> Any:
        """The output as the query is partitioned, but for the head dim."""
        return PartitionSpec(*spec[:3])

    def work(self, call: Call) -> Cost:
        """Of one step with every pair visible: a device's queries beside one shard of keys. There are as many as devices."""
        query, value = call.shapes["query"], call.shapes["value"]
        batch, length, heads, head_dim = query.shape
        value_dim = value.shape[3]
        pairs = batch * heads * length * length
        read = sum(map(nbytes, call.shapes.values()))
        out_bytes = batch * length * heads * value_dim * query.dtype.itemsize
        return Cost(
            flops=2 * pairs * (head_dim + value_dim),
            bytes=read + out_bytes,
            backward_flops=2 * pairs * (3 * head_dim + 2 * value_dim),
            backward_bytes=2 * read + 2 * out_bytes,
        )


def _of_steps(arrays: dict[str, Any]) -> dict[str, Any]:
    """Without the window, which the ring knows."""
    return {name: array for name, array in arrays.items() if name != "window_sides"}


OPERATION = RingAttention(ring_attention)
