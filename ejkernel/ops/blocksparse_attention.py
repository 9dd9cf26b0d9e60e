"""``blocksparse_attention``: attention over chosen blocks of keys, at the cost of those blocks alone."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Integer, Num

from ejkernel.callib.integers import power_of_two
from ejkernel.contracts.call import Call, Cost
from ejkernel.contracts.registry import Implementation
from ejkernel.contracts.support import Backend, Platform
from ejkernel.kernels.common.block_lists import Blocks, list_blocks
from ejkernel.kernels.common.intervals import intervals
from ejkernel.ops.attention import (
    AttentionChecker,
    Side,
    Window,
    attention_axes,
    effective_window,
    from_data,
    joined_sinks,
    nbytes,
    segment_pair,
    statistics_dtype,
    window_intervals,
    window_words,
)
from ejkernel.ops.core.operation import AnyArray, Operation
from ejkernel.utils.values import concrete

_check = AttentionChecker("blocksparse_attention")

# Larger blocks are cut into parts of at most this many positions, so that logits stay a few blocks' worth.
LARGEST_BLOCK = 512


def blocksparse_attention(
    query: Float[AnyArray, "batch q_len heads head_dim"],
    key: Float[AnyArray, "batch kv_len kv_heads head_dim"],
    value: Float[AnyArray, "batch kv_len kv_heads value_dim"],
    sparsity_mask: Bool[AnyArray, "..."],
    block_size: int | np.integer | Sequence[int] = 64,
    *,
    causal: bool | np.bool_ = False,
    sliding_window: Side | Sequence[Side] = None,
    softmax_scale: float | int | np.number | Num[Array | np.ndarray, ""] | None = None,
    logits_soft_cap: float | int | np.number | None = None,
    softmax_aux: Float[AnyArray, "..."] | None = None,
    q_segment_ids: Integer[AnyArray, "batch q_len"] | None = None,
    kv_segment_ids: Integer[AnyArray, "batch kv_len"] | None = None,
    return_lse: bool = False,
    platform: Platform | str | None = None,
    backend: Backend | str | None = None,
) -> Float[Array, "batch q_len heads value_dim"] | tuple[Array, Array]:
    """Attention restricted to the blocks that a mask keeps; the others cost neither time nor memory.

    A query sees a key if the mask keeps their block and causality, the window and the segments allow the pair. All else
    is as in ``flash_attention``. A mask with values becomes a list of blocks before anything is compiled, and masks that keep
    about as many blocks share one compilation; a traced mask is listed on the device.

    Args:
        query: ``[B, Sq, H, D]``.
        key: ``[B, Sk, Hkv, D]``; query head ``h`` uses key head ``h // (H / Hkv)``.
        value: ``[B, Sk, Hkv, Dv]``.
        sparsity_mask: boolean, True = attend, in blocks: ``[nq, nk]``, ``[H, nq, nk]`` or ``[B, H, nq, nk]`` where
            ``nq = ceil(Sq / block_size)``, ``nk = ceil(Sk / block_size)``; see ``ejkernel.patterns``. May be traced.
        block_size: positions a block, or a pair for queries and keys; a last block may be partial.
        causal: query ``i`` sees keys ``j <= i + Sk - Sq``.
        sliding_window: ``(left, right)`` in positions, as in ``flash_attention``; a side may be an array, which may be traced.
            Then the device lists the blocks of a mask that has values too.
        softmax_scale: default ``D ** -0.5``; an array has a gradient, as in ``flash_attention``.
        logits_soft_cap: ``cap * tanh(logits / cap)``.
        softmax_aux: sink logits ``[num_sinks]``, ``[1, num_sinks]`` or ``[H, num_sinks]``.
        q_segment_ids, kv_segment_ids: a query sees the keys of its own id; ids <= 0 are padding.
        return_lse: also return the log-sum-exp of the logits, ``[B, H, Sq]``, float32, sinks included.
        platform, backend: run exactly this implementation, or raise.

    Returns:
        ``[B, Sq, H, Dv]``, or ``(out, lse)``. Query, key, value and softmax_aux have gradients, and so has the lse.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel import blocksparse_attention, patterns
        >>> x = jnp.ones((1, 256, 2, 8))
        >>> blocksparse_attention(x, x, x, patterns.local(1)(8, 8), block_size=32).shape
        (1, 256, 2, 8)
    """
    arguments = _check.scaled_query(locals())
    if callable(sparsity_mask):
        _check.fail(
            "sparsity_mask", sparsity_mask, "an array: call the pattern with the grid's size, as in causal()(nq, nk)"
        )
    if from_data(sliding_window):
        return OPERATION(_with_intervals(arguments))
    mask = _listed(query, key, value, sparsity_mask, block_size, causal, sliding_window)
    return OPERATION({**arguments, "sparsity_mask": mask})


def _with_intervals(a: dict[str, Any], abstract: bool = False) -> dict[str, Any]:
    """The arguments, with a window that came as arrays, and causality, as the interval of keys that each query sees."""
    _check.main_arrays(a["query"], a["key"], a["value"])
    window = _check.window_sides("sliding_window", a["sliding_window"], abstract)
    causal, lengths = _check.flag("causal", a["causal"]), (a["query"].shape[1], a["key"].shape[1])
    rows = jax.ShapeDtypeStruct((1, lengths[0]), jnp.int32)
    intervals = (rows, rows) if abstract else window_intervals(window, causal, lengths)
    return {
        **a,
        "causal": False,
        "sliding_window": None,
        **dict(zip(BlockSparseAttention.inside, intervals, strict=True)),
    }


def _listed(query: Any, key: Any, value: Any, mask: Any, block_size: Any, causal: Any, sliding_window: Any) -> Any:
    """A mask that has values with the list of its blocks; another as it is."""
    values = concrete(mask)
    if values is None:
        return mask
    grid = _check_grid(query, key, value, mask, block_size)
    return Listed(values, _list_on_host(values, grid, _window(causal, sliding_window, max(grid.lengths))))


def _window(causal: Any, sliding_window: Any, longest: int) -> Window:
    """All that causality and the window leave."""
    given = tuple(sliding_window) if isinstance(sliding_window, list) else sliding_window
    return effective_window(_check.window("sliding_window", given), _check.flag("causal", causal), longest)


class Listed(NamedTuple):
    """A mask that had values when the call was made, and its blocks."""

    mask: Any
    blocks: Blocks

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the mask."""
        return self.mask.shape

    @property
    def ndim(self) -> int:
        """Of the mask."""
        return self.mask.ndim

    @property
    def dtype(self) -> Any:
        """Of the mask."""
        return self.mask.dtype


class _Grid(NamedTuple):
    """Two axes cut into blocks: their lengths, the blocks of kernels, and how many of those make one of the mask's."""

    lengths: tuple[int, int]
    sizes: tuple[int, int]
    parts: tuple[int, int]

    @property
    def uneven(self) -> bool:
        """Whether an axis has several blocks that are no multiples of 64 positions, the rows of a GPU's products."""
        return any(size < length and size % 64 > 0 for length, size in zip(self.lengths, self.sizes, strict=True))

    def visibility(self, mask: Any, window: Window, by_data: tuple[Array, Array] | None = None) -> tuple[Any, Any]:
        """Of the kernels' blocks: which are kept and may hold visible pairs, ``[B|1, H|1, nq, nk]``; which hold no others.

        ``by_data``: the first key that each query sees and the first after those, where only the device knows the window.
        """
        (q_len, kv_len), (q_size, kv_size) = self.lengths, self.sizes
        rows, columns = np.arange(0, q_len, q_size), np.arange(0, kv_len, kv_size)
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        xp = np if isinstance(mask, np.ndarray) else jnp
        mask = xp.repeat(xp.repeat(mask, self.parts[0], 2), self.parts[1], 3)[:, :, : len(rows), : len(columns)]
        start, stop = (x[0] for x in by_data or intervals(window, q_len, kv_len))
        last_row = np.minimum(rows + q_size, q_len) - 1
        last_column = np.minimum(columns + kv_size, kv_len) - 1
        some = (start[rows][:, None] <= last_column) & (stop[last_row][:, None] > columns)
        every = (start[last_row][:, None] <= columns) & (stop[rows][:, None] > last_column)
        # A partial block of keys overlaps its neighbour when it is loaded, so it is never full.
        every = every & (columns + kv_size <= kv_len)
        return mask & some, every


@dataclass(frozen=True)
class BlockSparseSpec:
    """What to compute, beside the arrays; ``window`` and the rest as in ``FlashSpec``.

    Kernels work with the blocks of ``grid.sizes``, at most ``LARGEST_BLOCK`` positions where the mask's blocks divide.
    ``roomy``: each list has room for all blocks, as those of a traced mask have, so that lists begin at equal distances.
    """

    grid: _Grid
    window: Window
    softmax_scale: float
    logits_soft_cap: float | None
    roomy: bool


def _list_on_host(mask: np.ndarray, grid: _Grid, window: Window) -> Blocks:
    """A list whose length is rounded up, so that similar masks share a compilation."""
    kept, full = grid.visibility(mask, window)
    count, n_full = kept.sum(-1), (kept & full).sum(-1)
    batch, heads, nq, _ = kept.shape
    ends = np.cumsum(count.reshape(batch, heads * nq), axis=1)
    index = np.zeros((batch, power_of_two(max(1, int(ends[:, -1].max(initial=0))))), np.int32)
    for entry in range(batch):
        # The full ones first, each kind in ascending order.
        order = np.argsort(~(kept & full)[entry], axis=-1, kind="stable")
        chosen = np.take_along_axis(kept[entry], order, -1)
        index[entry, : ends[entry, -1]] = order[chosen]
    start = ends.reshape(count.shape) - count
    return Blocks(*(x.astype(np.int32) for x in (start, n_full, count)), index)


def _list_on_device(mask: Array, grid: _Grid, window: Window, by_data: tuple[Array, Array] | None) -> Blocks:
    """A list that has room for every block."""
    return list_blocks(*grid.visibility(mask, window, by_data))


def _check_grid(query: Any, key: Any, value: Any, mask: Any, block_size: Any) -> _Grid:
    """The main arrays, the mask and the block size."""
    _check.main_arrays(query, key, value)
    given = (block_size, block_size) if isinstance(block_size, numbers.Integral) else block_size
    pair = isinstance(given, tuple | list) and len(given) == 2
    if not pair or not all(isinstance(s, numbers.Integral) and not isinstance(s, bool) and s > 0 for s in given):
        _check.fail("block_size", block_size, "an int ≥ 1 or a pair of them, for queries and keys")
    lengths = (query.shape[1], key.shape[1])
    given = tuple(min(int(size), length) for size, length in zip(given, lengths, strict=True))
    counts = tuple(-(-length // size) for length, size in zip(lengths, given, strict=True))
    batch, heads = query.shape[0], query.shape[2]
    layout = f"[{counts[0]}, {counts[1]}], [{heads}, {counts[0]}, {counts[1]}] or [{batch}, {heads}, {counts[0]}, {counts[1]}]"
    _check.array("sparsity_mask", mask, layout, ranks=(2, 3, 4), kinds=(jnp.bool_,))
    shared = ((batch, 1), (heads, 1))[4 - mask.ndim :]
    if mask.shape[-2:] != counts or not all(n in fits for n, fits in zip(mask.shape[:-2], shared, strict=True)):
        _check.fail("sparsity_mask", mask, f"{layout}: the blocks of {lengths[0]} queries and {lengths[1]} keys")
    sizes = tuple(map(_kernel_block, given))
    return _Grid(lengths, sizes, tuple(g // s for g, s in zip(given, sizes, strict=True)))


def _kernel_block(size: int) -> int:
    """The largest divisor of a block that is no larger than a kernel's."""
    return next((d for d in range(min(size, LARGEST_BLOCK), 15, -1) if size % d == 0), size)


class BlockSparseAttention(Operation):
    """Arrays for kernels: ``query``, ``key``, ``value`` as passed; ``blocks``, a ``Blocks``; ``softmax_aux`` float32
    ``[B|1, H]``, the sinks' log-sum-exp; ``q_segment_ids``, ``kv_segment_ids`` ``[B, S]``; ``kv_start``, ``kv_stop`` int32
    ``[B|1, Sq]``, as in flash attention, for a window that comes as an array.
    """

    name = "blocksparse_attention"
    features: ClassVar[dict[str, str]] = {
        "causal": "causal masking, aligned bottom-right",
        "window": "a sliding window, bounded on one side or both",
        "traced_window": "a sliding window that is an array",
        "soft_cap": "soft-capped logits",
        "segments": "segment ids",
        "sinks": "attention sinks (softmax_aux)",
        "gqa": "fewer key heads than query heads",
        "value_dim": "values of another head dim than the keys",
        "cross": "queries and keys of different lengths",
        "head_masks": "a mask of its own for each head",
        "uneven_blocks": "several blocks that are no multiples of 64 positions",
        "lse": "the log-sum-exp as a result",
    }
    gradients = ("query", "key", "value", "softmax_aux")
    shareable = frozenset({"blocks", "softmax_aux", "kv_start", "kv_stop"})
    inside = ("kv_start", "kv_stop")

    def normalise(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Lists become tuples, and a mask that has values gets its list of blocks."""
        arguments = super().normalise(arguments)
        if "sparsity_mask" in arguments and from_data(arguments["sliding_window"]):
            arguments = _check.scaled_query(_with_intervals(arguments, abstract=True), abstract=True)
        elif "sparsity_mask" in arguments:
            names = ("query", "key", "value", "sparsity_mask", "block_size", "causal", "sliding_window")
            arguments["sparsity_mask"] = _listed(*(arguments[name] for name in names))
            arguments = _check.scaled_query(arguments, abstract=True)
        return arguments

    def bind(self, arguments: dict[str, Any]) -> Call:
        """Check every argument; see the base class."""
        a = arguments
        query, value, mask = a["query"], a["value"], a["sparsity_mask"]
        grid = _check_grid(query, a["key"], value, mask, a["block_size"])
        batch, q_len, heads, head_dim = query.shape
        kv_len, kv_heads, value_dim = value.shape[1:]
        _check.segments(a["q_segment_ids"], a["kv_segment_ids"], batch, q_len, kv_len)
        _check.sinks(a["softmax_aux"], heads)
        _check.flag("return_lse", a["return_lse"])
        spec = BlockSparseSpec(
            grid=grid,
            window=_window(a["causal"], a["sliding_window"], max(q_len, kv_len)),
            softmax_scale=_check.scale(a["softmax_scale"], head_dim),
            logits_soft_cap=_check.soft_cap(a["logits_soft_cap"]),
            roomy=not isinstance(mask, Listed),
        )
        by_data = a.get("kv_start") is not None
        used = {
            "causal": (a["causal"], "causal"),
            "window": (by_data or a["sliding_window"] not in (None, (None, None)), "sliding_window"),
            "traced_window": (by_data, "a sliding_window that is an array"),
            "soft_cap": (spec.logits_soft_cap is not None, "logits_soft_cap"),
            "segments": (a["q_segment_ids"] is not None, "q_segment_ids"),
            "sinks": (a["softmax_aux"] is not None, "softmax_aux"),
            "gqa": (heads != kv_heads, f"{heads} query heads for {kv_heads} key heads"),
            "value_dim": (head_dim != value_dim, f"value head dim {value_dim} beside {head_dim}"),
            "cross": (q_len != kv_len, f"query length {q_len} beside key length {kv_len}"),
            "head_masks": (mask.ndim > 2, f"a mask of shape {list(mask.shape)}"),
            "uneven_blocks": (grid.uneven, f"blocks of {' × '.join(map(str, grid.sizes))}"),
            "lse": (a["return_lse"], "return_lse"),
        }
        features = {name: phrase for name, (is_used, phrase) in used.items() if is_used}
        dtype = jnp.dtype(query.dtype).name
        return Call(
            operation=self.name,
            # A plain function cannot be told of intervals.
            runs_on=self.name if by_data else "",
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
                ("blocks", f"{grid.sizes[0]}x{grid.sizes[1]}"),
                ("heads", power_of_two(batch * kv_heads)),
                ("q_len", power_of_two(q_len)),
                ("kv_len", power_of_two(kv_len)),
                ("listed_len", _room(mask)),
                ("window", window_words(spec.window)),
                ("features", " ".join(sorted(features.keys() - {"lse", "uneven_blocks"}))),
            ),
        )

    def prepare(self, arguments: dict[str, Any], spec: BlockSparseSpec) -> dict[str, Any]:
        """The kernels' arrays; see the class."""
        a = arguments
        query, mask = a["query"], a["sparsity_mask"]
        listed = isinstance(mask, Listed)
        inside = {name: a[name] for name in self.inside if a.get(name) is not None}
        by_data = tuple(inside.values()) or None
        blocks = mask.blocks if listed else _list_on_device(jnp.asarray(mask), spec.grid, spec.window, by_data)
        arrays = {"query": query, "key": a["key"], "value": a["value"], "blocks": blocks, **inside}
        if a["q_segment_ids"] is not None:
            arrays["q_segment_ids"], arrays["kv_segment_ids"] = segment_pair(a["q_segment_ids"], a["kv_segment_ids"])
        if a["softmax_aux"] is not None:
            arrays["softmax_aux"] = joined_sinks(a["softmax_aux"], query)
        return arrays

    def axes(self, arrays: dict[str, Any], spec: BlockSparseSpec) -> tuple[dict[str, Any], tuple]:
        """Batch and heads, and lists that have room for every block of each head."""
        named, results = attention_axes()
        lists = "kgr" if spec.roomy and arrays["blocks"].start.shape[1] > 1 else "."
        return {**named, "blocks": Blocks("b kg", "b kg", "b kg", f"b {lists}")}, results

    def left_to_the_compiler(self, arrays: dict[str, Any], direction: str) -> bool:
        """Not where lists differ between heads: the kernel is a loop over them then, for which the heads are gathered."""
        return arrays["blocks"].start.shape[1] == 1

    def localise(self, arrays: dict[str, Any], spec: BlockSparseSpec, index: Any) -> dict[str, Any]:
        """The lists of a device's first head begin where its part does."""
        blocks = arrays["blocks"]
        if not spec.roomy:
            return arrays
        return {**arrays, "blocks": blocks._replace(start=blocks.start - blocks.start[:, :1, :1])}

    def run_plain(self, implementation: Implementation, given: dict[str, Any]) -> Any:
        """A plain function gets the mask itself."""
        mask = given["sparsity_mask"]
        return super().run_plain(
            implementation, {**given, "sparsity_mask": mask.mask if isinstance(mask, Listed) else mask}
        )

    def empty(self, arguments: dict[str, Any]) -> Any:
        """Zeros for a batch of 0."""
        query, value = arguments["query"], arguments["value"]
        if query.shape[0]:
            return None
        _, q_len, heads, _ = query.shape
        out = jnp.zeros((0, q_len, heads, value.shape[3]), query.dtype)
        return self.finish(arguments, out, jnp.zeros((0, heads, q_len), statistics_dtype(query)))

    def finish(self, arguments: dict[str, Any], out: Any, lse: Any) -> Any:
        """The output, with the lse if it was asked for."""
        return (out, lse) if arguments["return_lse"] else out

    def result_specs(self, arguments: dict[str, Any], spec: tuple) -> Any:
        """The output as the query is partitioned, but for the head dim."""
        batch, length, heads, _ = spec
        return self.finish(arguments, PartitionSpec(batch, length, heads), PartitionSpec(batch, heads, length))

    def work(self, call: Call) -> Cost:
        """Of whole blocks: two products a pair of a listed block forward, five backward; every array once. A traced mask counts as full."""
        query, value, blocks = call.shapes["query"], call.shapes["value"], call.shapes["blocks"]
        batch, q_len, heads, head_dim = query.shape
        value_dim = value.shape[3]
        mask = call.arguments["sparsity_mask"]
        values = concrete(mask.mask if isinstance(mask, Listed) else mask)
        values = np.ones(mask.shape, bool) if values is None else values
        kept, _ = call.spec.grid.visibility(values, call.spec.window)
        pairs = int(kept.sum()) * math.prod(call.spec.grid.sizes)
        pairs *= (batch // blocks.start.shape[0]) * (heads // blocks.start.shape[1])
        out_bytes = batch * q_len * heads * value_dim * query.dtype.itemsize
        read = sum(map(nbytes, jax.tree.leaves(call.shapes)))
        return Cost(
            flops=2 * pairs * (head_dim + value_dim),
            bytes=read + out_bytes,
            backward_flops=2 * pairs * (3 * head_dim + 2 * value_dim),
            backward_bytes=2 * read + 2 * out_bytes,
        )

    def sample(self, shapes: dict[str, Any]) -> dict[str, Any]:
        """Random numbers, and lists as full as they can be."""
        keys = iter(jax.random.split(jax.random.key(0), 8))

        def make(name: str, like: Any) -> Any:
            if name in self.inside:  # a window that hides nothing
                return jnp.full(like.shape, shapes["key"].shape[1] if name == "kv_stop" else 0, like.dtype)
            if isinstance(like, Blocks):
                q_block = -(-shapes["query"].shape[1] // like.start.shape[2])
                return _full_lists(like, -(-shapes["key"].shape[1] // q_block))
            if jnp.issubdtype(like.dtype, jnp.floating):
                return jax.random.normal(next(keys), like.shape, like.dtype)
            return jnp.ones(like.shape, like.dtype)

        return {name: make(name, like) for name, like in shapes.items()}


def _room(mask: Any) -> int:
    """How many blocks a list may hold, rounded up."""
    return mask.blocks.index.shape[1] if isinstance(mask, Listed) else power_of_two(math.prod(mask.shape[-3:]))


def _full_lists(like: Blocks, kv_blocks: int) -> Blocks:
    """As many blocks a row as the list has room for, from the diagonal on."""
    _, heads, nq = like.start.shape
    room = max(1, like.index.shape[1] // (heads * nq))
    start = jnp.broadcast_to(jnp.arange(heads * nq, dtype=jnp.int32).reshape(heads, nq) * room, like.start.shape)
    start = jnp.minimum(start, like.index.shape[1] - 1)
    count = jnp.full(start.shape, room, jnp.int32)
    place = jnp.arange(like.index.shape[1], dtype=jnp.int32)
    index = jnp.broadcast_to((place // room + place % room) % kv_blocks, like.index.shape)
    return Blocks(start, jnp.zeros_like(count), count, index)


OPERATION = BlockSparseAttention(blocksparse_attention)
