"""Calls of every operation that the lab checks and times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel import explain, kernel_registry, patterns
from ejkernel.contracts.call import Cost
from ejkernel.contracts.device import describe
from ejkernel.errors import InvalidInputError
from ejkernel.lab import moe
from ejkernel.lab.reference import REFERENCES, in_float64

# Largest relative error that passes: a few units of the dtype's rounding, after sums of some hundred terms.
BOUNDS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
# In half precision only the arrays that are multiplied are rounded.
_KEPT = ("softmax_aux",)


@dataclass(frozen=True)
class Workload:
    """One call.

    Attributes:
        operation: its name.
        name: what is special about it.
        arrays: the arguments that are arrays, or dicts of them, by name; floats as float32.
        options: the other arguments.
        differentiable: the arguments whose gradients are taken.
        length: what the call is plotted over; 0 if it is not.
        last_rows: compare only so many of the last rows, for the reference is slow or holds all logits. 0: all.
        as_given: the arrays have the dtypes that they are to have, whatever is asked for.
        rows_of: the array whose rows, along the second axis, the result's rows are of.
    """

    operation: str
    name: str
    arrays: dict[str, Any] = field(repr=False)
    options: dict[str, Any] = field(default_factory=dict)
    differentiable: tuple[str, ...] = ("query", "key", "value")
    length: int = 0
    last_rows: int = 0
    as_given: bool = False
    rows_of: str = "query"

    def cast(self, dtype: str) -> dict[str, Any]:
        """The arrays on the device."""

        def one(name: str, x: np.ndarray) -> jax.Array:
            rounded = x.dtype == np.float32 and name not in _KEPT and not self.as_given
            return jnp.asarray(x, dtype if rounded else x.dtype)

        return {name: jax.tree.map(partial(one, name), x) for name, x in self.arrays.items()}

    def function(self, platform: str | None = None) -> Callable[[dict[str, Any]], Any]:
        """The call as a function of its arrays."""
        operation = getattr(ejkernel, self.operation)
        options = self.options if platform is None else {**self.options, "platform": platform}
        if self.operation != "ring_attention":
            return lambda arrays: operation(**arrays, **options)
        mesh = jax.make_mesh((len(jax.devices()),), ("ring",), (jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec(None, "ring")

        def ring(arrays: dict[str, Any]) -> Any:
            call = lambda shards: operation(**shards, **options)  # noqa: E731
            return jax.shard_map(call, mesh=mesh, in_specs=(spec,), out_specs=spec)(arrays)

        return ring

    def reference(self, arrays: dict[str, Any]) -> Any:
        """The same in plain ``jnp``."""
        return REFERENCES[self.operation](**arrays, **self.options)

    def exact(self, arrays: dict[str, Any]) -> Any:
        """The reference in float64."""
        return in_float64(jax.jit(self.reference), arrays)

    def explained(self, dtype: str = "float32", device: Any = None, gradients: Sequence[str] = ()) -> Any:
        """What would run it, and its backward for these gradients."""
        abstract = jax.eval_shape(lambda: self.cast(dtype))
        known = {name: x for name, x in self.arrays.items() if isinstance(x, np.ndarray) and not is_float(x)}
        return explain(self.operation, **{**abstract, **known}, **self.options, device=device, gradients=gradients)

    def cost(self, dtype: str) -> Any:
        """The floating-point operations and bytes that the operation states."""
        return kernel_registry.operation(self.operation).cost(self.explained(dtype).call)


@dataclass(frozen=True)
class LayerWorkload(Workload):
    """A whole layer around an operation; its arrays are abstract, and drawn where they are used, for they are large."""

    sizes: moe.MoE = moe.MIXTRAL_8X7B

    @classmethod
    def of(cls, name: str, sizes: moe.MoE, tokens: int) -> LayerWorkload:
        """The layer of these sizes with so many tokens."""
        shapes = sizes.shapes(tokens)
        return cls(
            operation=name,
            name=f"{sizes.chosen} of {sizes.experts} experts",
            arrays={name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()},
            options={"chosen": sizes.chosen},
            differentiable=tuple(shapes),
            last_rows=16,
            rows_of="tokens",
            sizes=sizes,
        )

    def cast(self, dtype: str) -> dict[str, Any]:
        """The arrays on the device."""
        return self.sizes.arrays(self.arrays["tokens"].shape[1], dtype)

    def function(self, platform: str | None = None) -> Callable[[dict[str, Any]], Any]:
        """The layer as a function of its arrays."""
        product = partial(ejkernel.grouped_matmul, platform=platform)
        return lambda arrays: moe.moe_layer(**arrays, **self.options, product=product)

    def reference(self, arrays: dict[str, Any]) -> Any:
        """The same in plain ``jnp``."""
        return moe.dense(**arrays, **self.options)

    def exact(self, arrays: dict[str, Any]) -> Any:
        """The reference in float64; of half precision in float32, where the weights are, which is as exact beside it."""
        if arrays["tokens"].dtype.itemsize > 2:
            return super().exact(arrays)
        with jax.default_matmul_precision("highest"):
            wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
            return np.asarray(jax.jit(self.reference)(wide))

    def explained(self, dtype: str = "float32", device: Any = None, gradients: Sequence[str] = ()) -> Any:
        """What would run its larger product, and the product's backward if gradients are asked for."""
        rows = self.arrays["tokens"].shape[1] * self.sizes.chosen
        a = jax.ShapeDtypeStruct((rows, self.sizes.width), dtype)
        b = jax.ShapeDtypeStruct(self.arrays["gate_up"].shape, dtype)
        sizes = jax.ShapeDtypeStruct((self.sizes.experts,), jnp.int32)
        wanted = ("a", "b") if gradients else ()
        return explain("grouped_matmul", a, b, sizes, device=device, gradients=wanted)

    def cost(self, dtype: str) -> Cost:
        """The operations of its products; weights, tokens and their results once each."""
        flops = self.sizes.flops(self.arrays["tokens"].shape[1])
        sizes = [x.size for x in self.arrays.values()]
        moved = (sum(sizes) + self.arrays["tokens"].size) * jnp.dtype(dtype).itemsize
        return Cost(flops, moved, 2 * flops, 2 * moved)


def is_float(array: Any) -> bool:
    """Whether an array holds floating-point numbers, of whatever width."""
    return jnp.issubdtype(array.dtype, jnp.floating)


def checks(operation: str) -> list[Workload]:
    """Small calls that between them use an operation's main features."""
    if operation in LAYERS:
        return [LayerWorkload.of(operation, LAYERS[operation][1], 24)]
    made = {"ring_attention": _ring_checks, "flash_attention": _flash_checks}.get(operation)
    return made() if made else [replace(w, length=0) for w in _OTHERS[known(operation)](24)]


def timed(operation: str, length: int, accelerator: bool) -> Workload:
    """The call of an operation that is timed at a length; larger heads, more tokens and whole layers on an accelerator."""
    if operation in LAYERS:
        full, small = LAYERS[operation]
        return replace(LayerWorkload.of(operation, full if accelerator else small, length), length=length)
    if operation in ("flash_attention", "ring_attention"):
        heads, dim, batch = (16, 128, max(1, 16384 // length)) if accelerator else (8, 64, 1)
        made = _attention(operation, "causal", (batch, length, heads, dim), options={"causal": True}, last_rows=64)
        return replace(made, length=length)
    return replace(_OTHERS[known(operation)](length)[0], length=length)


def known(operation: str, layers: bool = False) -> str:
    """The name of an operation, or of a layer where they are asked for too; or an error that lists them."""
    names = (*OPERATIONS, *LAYERS) if layers else OPERATIONS
    if operation not in names:
        raise InvalidInputError(f"operation is {operation!r}; expected one of {', '.join(names)}.")
    return operation


def kernels_of(operation: str) -> str:
    """The algorithm whose kernels an operation or a layer runs on."""
    if operation in LAYERS:
        return "grouped_matmul"
    return "flash_attention" if operation == "ring_attention" else operation


def default_dtype() -> str:
    """What is timed here: bfloat16 where there are units for it."""
    return "float32" if describe().kind == "cpu" else "bfloat16"


def _normal(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def _attention(operation, name, shape, *, group=1, kv_len=None, options=None, last_rows=0, **more) -> Workload:
    batch, length, heads, dim = shape
    kv_shape = (batch, kv_len or length, heads // group, dim)
    arrays = {"query": _normal(0, *shape), "key": _normal(1, *kv_shape), "value": _normal(2, *kv_shape), **more}
    wanted = ("query", "key", "value", *(n for n in ("bias", "softmax_aux") if n in more))
    return Workload(operation, name, arrays, options or {}, wanted, last_rows=last_rows)


def _flash_checks() -> list[Workload]:
    make = partial(_attention, "flash_attention")
    shape = (2, 150, 8, 32)
    ids = np.repeat(np.arange(1, 4, dtype=np.int32), 50)[None].repeat(2, 0)
    window = {"causal": True, "sliding_window": (40, 0), "logits_soft_cap": 5.0}
    return [
        make("plain", shape),
        make("causal, 4 query heads a key head", shape, group=4, options={"causal": True}),
        make("more keys than queries", shape, kv_len=203, options={"causal": True}),
        make("window, soft cap, sinks", shape, options=window, softmax_aux=_normal(3, 8, 2)),
        make("segments, bias", shape, bias=_normal(3, 1, 8, 150, 150), q_segment_ids=ids, kv_segment_ids=ids),
    ]


def _ring_checks() -> list[Workload]:
    length = 24 * len(jax.devices())
    options = {"causal": True}
    return [
        _attention("ring_attention", "causal", (2, length, 4, 16), options=options),
        _attention("ring_attention", "window, soft cap", (2, length, 4, 16), group=2,
                   options={**options, "sliding_window": (30, 0), "logits_soft_cap": 5.0}),
    ]  # fmt: skip


def _page(length: int) -> list[Workload]:
    batch, heads, kv_heads, size, dim = 8, 8, 4, 16, 64
    blocks = -(-length // size)
    rng = np.random.default_rng(0)
    arrays = {
        "query": _normal(0, batch, heads, dim),
        "key_cache": _normal(1, batch * blocks, kv_heads, size, dim),
        "value_cache": _normal(2, batch * blocks, kv_heads, size, dim),
        "context_lens": rng.integers(max(1, length // 2), length + 1, batch).astype(np.int32),
        "block_tables": rng.permutation(batch * blocks).reshape(batch, blocks).astype(np.int32),
    }
    wanted = ("query", "key_cache", "value_cache")
    return [Workload("page_attention", "contexts of several lengths", arrays, differentiable=wanted)]


def _blocksparse(length: int) -> list[Workload]:
    size = 16 if length < 512 else 64
    blocks = -(-length // size)
    mask = patterns.local(2)(blocks, blocks) | patterns.global_tokens(1)(blocks, blocks)
    made = _attention(
        "blocksparse_attention",
        "local and global blocks, causal",
        (1, length, 8, 64),
        options={"block_size": size, "causal": True},
        sparsity_mask=np.asarray(mask),
    )
    return [made]


def _recurrent(length: int) -> list[Workload]:
    batch, width, hidden = 8, 64, 128
    made = []
    for cell, gates in (("lstm", 4), ("gru", 3), ("rnn", 1)):
        weights = {
            "weight_ih": _normal(1, gates * hidden, width, scale=0.1),
            "weight_hh": _normal(2, gates * hidden, hidden, scale=0.08),
        }
        arrays = {"inputs": _normal(0, batch, length, width), "weights": weights}
        made.append(Workload("recurrent", cell, arrays, {"cell_type": cell}, ("inputs", "weights")))
    return made


def _mean_pooling(length: int) -> list[Workload]:
    batch, width = 8, 512
    rng = np.random.default_rng(0)
    mask = np.arange(length) < rng.integers(1, length + 1, batch)[:, None]
    offsets = np.array([0, length, length, length + length // 3, 2 * length], np.int32)
    calls = {
        "masked": {"inputs": _normal(0, batch, length, width), "mask": mask},
        "packed": {"inputs": _normal(0, 2 * length, width), "cu_seqlens": offsets},
    }
    return [Workload("mean_pooling", name, arrays, {}, ("inputs",)) for name, arrays in calls.items()]


def _grouped_matmul(length: int) -> list[Workload]:
    groups, inner, width = 8, 256, 256
    sizes = np.random.default_rng(0).multinomial(length, [1 / groups] * groups).astype(np.int32)
    ragged = {"a": _normal(0, length, inner), "b": _normal(1, groups, inner, width, scale=0.1), "group_sizes": sizes}
    batched = {"a": _normal(0, 2, 3, length, 32), "b": _normal(1, 2, 3, 32, 16)}
    return [
        Workload("grouped_matmul", "ragged", ragged, differentiable=("a", "b")),
        Workload("grouped_matmul", "batched", batched, differentiable=("a", "b")),
    ]


_OTHERS: dict[str, Callable[[int], list[Workload]]] = {
    "page_attention": _page,
    "blocksparse_attention": _blocksparse,
    "recurrent": _recurrent,
    "mean_pooling": _mean_pooling,
    "grouped_matmul": _grouped_matmul,
}
OPERATIONS = ("flash_attention", "page_attention", "ring_attention", *[n for n in _OTHERS if n != "page_attention"])
# Layers by name: the model's own size for accelerators, and a small one.
LAYERS = {
    "moe_mixtral": (moe.MIXTRAL_8X7B, moe.MoE(experts=8, chosen=2, width=256, hidden=512)),
    "moe_qwen3": (moe.QWEN3_30B_A3B, moe.MoE(experts=32, chosen=8, width=128, hidden=64)),
}
