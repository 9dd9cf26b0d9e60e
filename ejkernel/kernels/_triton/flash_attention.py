"""Flash attention in Triton: which kernels run, with which blocks.

Loops visit only blocks that hold a visible pair, and test nothing where every pair is visible; the plan comes from
``visibility.py``: a constant for causality and windows, computed on the device for packed sequences and segments. The
backward is two kernels, one a block of keys and one a block of queries, so nothing is added atomically and every rerun
gives the same bits; a bias that wants a gradient takes a third.

Forwards of few queries over many keys run on the kernels of paged attention: see ``decoding.py``.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels._triton import decoding
from ejkernel.kernels._triton.call import call, on_nvidia, product_precision
from ejkernel.kernels._triton.flash_blocks import (
    READ_BACKWARD,
    READ_FORWARD,
    candidates,
    default,
    effective,
    padded,
    widest,
)
from ejkernel.kernels._triton.registering import register
from ejkernel.kernels.common import dropout, visibility
from ejkernel.kernels.common.decoding import is_decoding
from ejkernel.kernels.common.intervals import intervals
from ejkernel.kernels.common.softmax import LOG2E, sink_gradient, softmax_residuals
from ejkernel.kernels.common.unseen import without_unseen

ALIGNED = 16
# The head dim up to which the gradients of keys and values are accumulated together.
WIDEST_PAIR = 128


def forward(
    arrays: dict[str, Array], spec: Any, params: FwdParams, *, device: DeviceInfo | None = None
) -> tuple[Array, Array]:
    """Attention output ``[B, Sq, H, Dv]`` and the log-sum-exp of its logits ``[B, H, Sq]``."""
    if is_decoding(arrays, spec):
        return decoding.forward(arrays, spec, params, device)
    return run_forward(FlashOperands, without_unseen(arrays, spec), spec, effective(params, device), device)


def run_forward(operands: type[FlashOperands], arrays: dict[str, Any], spec: Any, params: FwdParams, device: Any):
    """Output and log-sum-exp, over what the operands walk; the parameters are those that are used."""
    from ejkernel.kernels._triton import flash_kernels

    p = operands(arrays, spec, params.q_blocksize, params.kv_blocksize, device)
    sinks = arrays.get("softmax_aux", p.nothing)
    walks = p.key_walks()
    batch, q_len, heads, _ = p.query.shape
    outputs = (
        jax.ShapeDtypeStruct((batch, q_len, heads, p.value_dim), p.query.dtype),
        jax.ShapeDtypeStruct((batch, heads, q_len), jnp.float32),
    )
    out, lse = call(
        flash_kernels.forward,
        [*p.pointers, walks.array, sinks],
        [*p.lengths, p.q_blocks, *p.strides(walks.each), 0 if sinks.shape[0] == 1 else heads],
        outputs,
        programs=p.q_blocks * heads * batch,
        constants=p.constants(walks.unmasked, walks.masked),
        num_warps=params.num_warps,
        num_stages=params.num_stages,
        device=device,
    )
    return out, lse


def backward(
    arrays: dict[str, Array],
    spec: Any,
    params: BwdParams,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
    wanted: frozenset[str],
    device: DeviceInfo | None = None,
) -> dict[str, Array]:
    """The wanted gradients, from the residuals ``(out, lse)``."""
    dout, finite_lse, slope, arrays = softmax_residuals(arrays, out, lse, dout, dlse)
    arrays = without_unseen(arrays, spec)
    return run_backward(
        FlashOperands, arrays, spec, effective(params, device), (dout, finite_lse, slope), wanted, device
    )


def run_backward(
    operands: type[FlashOperands],
    arrays: dict[str, Any],
    spec: Any,
    params: BwdParams,
    statistics: tuple[Array, Array, Array],
    wanted: frozenset[str],
    device: DeviceInfo | None,
) -> dict[str, Array]:
    """The wanted gradients, from what ``softmax_residuals`` gives; the parameters are those that are used."""
    dout, finite_lse, slope = statistics
    residuals = [dout, finite_lse * LOG2E, slope]
    grads = _key_gradients(operands, arrays, spec, params, residuals, wanted & {"key", "value"}, device)
    if "query" in wanted:
        grads["query"] = _query_gradient(operands, arrays, spec, params, residuals, device)
    if "bias" in wanted:
        grads["bias"] = _bias_gradient(arrays, spec, residuals, device)
    if "softmax_aux" in wanted:
        grads["softmax_aux"] = sink_gradient(arrays["softmax_aux"], finite_lse, slope)
    return grads


def _key_gradients(
    operands, arrays, spec, params: BwdParams, residuals, wanted: frozenset[str], device
) -> dict[str, Array]:
    """Both in one pass over the queries, unless the accumulators of both are too wide for the registers."""
    if len(wanted) == 2 and max(padded(arrays[name].shape[3]) for name in wanted) > WIDEST_PAIR:
        return {
            name: gradient
            for one in sorted(wanted)
            for name, gradient in _key_gradients(
                operands, arrays, spec, params, residuals, frozenset({one}), device
            ).items()
        }
    if not wanted:
        return {}
    from ejkernel.kernels._triton import flash_kernels

    p = operands(arrays, spec, params.q_blocksize, params.kv_blocksize, device)
    walks = p.query_walks()
    key = arrays["key"]
    shapes = {name: arrays[name].shape if name in wanted else (1,) for name in ("key", "value")}
    gradients = call(
        flash_kernels.backward_keys,
        [*p.pointers, walks.array, *residuals],
        [*p.lengths, p.kv_blocks, *p.strides(walks.each)],
        [jax.ShapeDtypeStruct(shape, key.dtype) for shape in shapes.values()],
        programs=p.kv_blocks * key.shape[2] * key.shape[0],
        constants=p.constants(walks.unmasked, walks.masked, dk="key" in wanted, dv="value" in wanted),
        num_warps=params.num_warps,
        # Without the keys' gradient the values stay out of shared memory, which leaves room for a stage.
        num_stages=params.num_stages + ("key" not in wanted),
        device=device,
    )
    return {name: gradient for name, gradient in zip(shapes, gradients, strict=True) if name in wanted}


def _query_gradient(operands, arrays, spec, params: BwdParams, residuals, device) -> Array:
    from ejkernel.kernels._triton import flash_kernels

    p = operands(arrays, spec, params.blocksize_m, params.blocksize_n, device)
    walks = p.key_walks()
    batch, _, heads, _ = p.query.shape
    (dq,) = call(
        flash_kernels.backward_queries,
        [*p.pointers, walks.array, *residuals],
        [*p.lengths, p.q_blocks, *p.strides(walks.each)],
        (jax.ShapeDtypeStruct(p.query.shape, p.query.dtype),),
        programs=p.q_blocks * heads * batch,
        constants=p.constants(walks.unmasked, walks.masked),
        **_launch_of_queries(p, params),
        device=device,
    )
    return dq


def _launch_of_queries(p: FlashOperands, params: BwdParams) -> dict[str, int]:
    """Warps and stages of the kernel for a block of queries, from its blocks: ``params`` has those of a block of keys."""
    if product_precision(p.query.dtype, p.device) == "tf32x3":
        return {"num_warps": params.num_warps, "num_stages": params.num_stages}
    wide = max(padded(p.query.shape[3]), padded(p.value_dim)) > WIDEST_PAIR
    stages = (1 if p.bn >= 64 else 2) if wide else 3
    warps = 8 if p.bm >= 128 and p.query.shape[3] > 64 else 4
    return {"num_warps": warps, "num_stages": min(stages, params.num_stages + 1)}


def _bias_gradient(arrays, spec, residuals, device) -> Array:
    from ejkernel.kernels._triton import flash_kernels

    half = arrays["query"].dtype != jnp.float32
    sides = {64: (32, 64), 128: (32, 32), 256: (16, 32)} if half else {64: (32, 32), 128: (16, 32), 256: (16, 16)}
    p = FlashOperands(arrays, spec, *sides[widest(arrays)], device)
    bias = arrays["bias"]
    whole = (p.query.shape[0], p.query.shape[2], p.q_blocks, p.kv_blocks)
    own = [size if shared > 1 else 1 for size, shared in zip(whole, bias.shape, strict=True)]
    batches_each, heads_each, q_each, k_each = (size // part for size, part in zip(whole, own, strict=True))
    (dbias,) = call(
        flash_kernels.backward_bias,
        [*p.pointers, *residuals],
        [*p.lengths, *p.strides()[1:], batches_each, heads_each, own[2], q_each, own[3], k_each],
        (jax.ShapeDtypeStruct(bias.shape, bias.dtype),),
        programs=math.prod(own),
        constants=p.constants(False, True),
        num_warps=8,
        num_stages=1,
        device=device,
    )
    return dbias


class Walks(NamedTuple):
    """What the kernels' loops visit: the array, how many walks each batch entry has of its own (0: all share them), whether
    any step is unmasked, whether any is masked.
    """

    array: Array
    each: int
    unmasked: bool
    masked: bool


class FlashOperands:
    """One call's geometry, in the form in which the kernels take it."""

    def __init__(self, arrays: dict[str, Array], spec: Any, q_block: int, kv_block: int, device: DeviceInfo | None):
        self.arrays, self.spec, self.device = arrays, spec, device
        self.query = arrays["query"]
        self.q_len, self.kv_len = self.query.shape[1], arrays["key"].shape[1]
        self.value_dim = arrays["value"].shape[3]
        self.bm, self.bn = q_block, kv_block
        self.q_blocks, self.kv_blocks = -(-self.q_len // self.bm), -(-self.kv_len // self.bn)

    @property
    def nothing(self) -> Array:
        """What stands in for an array that the call does without: any will do, it is not read."""
        return self.query

    @property
    def pointers(self) -> list[Array]:
        a = self.arrays
        mask = a.get("attention_mask")
        names = ("bias", "q_segment_ids", "kv_segment_ids", "kv_start", "kv_stop", "dropout_key")
        mask = self.nothing if mask is None else mask.astype(jnp.uint8)
        return [a["query"], a["key"], a["value"], mask, *(a.get(name, self.nothing) for name in names)]

    @property
    def lengths(self) -> list[int]:
        """The lengths, and what turns a row into the first key it sees and the first it does not."""
        left, right = self.spec.window
        shift = self.kv_len - self.q_len
        return [self.q_len, self.kv_len, shift - (left or 0), shift + (right or 0) + 1]

    def strides(self, walks_each: int = 0) -> list[int]:
        """By batch entry of walks and intervals; by batch entry, head and row of mask and bias; 0 along what is shared."""
        starts = self.arrays.get("kv_start")
        strides = [walks_each, 0 if starts is None or starts.shape[0] == 1 else self.q_len]
        for name in ("attention_mask", "bias"):
            batch, heads, rows, columns = shape = self._shape(name)
            own = [heads * rows * columns * (batch > 1), rows * columns * (heads > 1), columns * (rows > 1)]
            strides += [stride // _unit(shape) for stride in own]
        return strides

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape if name in self.arrays else (1, 1, 1, 1)

    def _intervals(self):
        if "kv_start" in self.arrays:
            return self.arrays["kv_start"], self.arrays["kv_stop"]
        return intervals(self.spec.window, self.q_len, self.kv_len)

    @property
    def _segments(self):
        ids = self.arrays.get("q_segment_ids")
        return None if ids is None else (ids, self.arrays["kv_segment_ids"])

    def key_walks(self) -> Walks:
        """For each block of queries its walk over keys."""
        ranges = visibility.key_ranges(*self._intervals(), self._segments, self.bm, self.kv_len, shifted=False)
        return self._walks(ranges, self.bn)

    def query_walks(self) -> Walks:
        """For each block of keys its walk over queries."""
        ranges = visibility.query_ranges(*self._intervals(), self._segments, self.bn, self.kv_len)
        return self._walks(ranges, self.bm)

    def _walks(self, ranges: visibility.Ranges, step: int) -> Walks:
        always_masked = "attention_mask" in self.arrays or "bias" in self.arrays
        if always_masked:
            # Wide loads of a mask's or a bias's rows want aligned columns.
            ranges = ranges._replace(begin=ranges.begin // ALIGNED * ALIGNED)
        table, unmasked, masked = visibility.table(visibility.plan_walk(ranges, step, 1, always_masked), always_masked)
        return Walks(table, 0 if table.shape[0] == 1 else table.shape[1], unmasked, masked)

    def constants(self, full: bool, partial: bool, **more: Any) -> Any:
        from ejkernel.kernels._triton.flash_pieces import Constants

        a, spec = self.arrays, self.spec
        heads, dim = self.query.shape[2:]
        left, right = spec.window
        mask, bias = self._shape("attention_mask"), self._shape("bias")
        folded = spec.softmax_scale > 0 and spec.logits_soft_cap is None and "bias" not in a
        return Constants(
            heads=heads,
            group=heads // a["key"].shape[2],
            dim=dim,
            value_dim=self.value_dim,
            bd=padded(dim),
            bv=padded(self.value_dim),
            bm=self.bm,
            bn=self.bn,
            scale=float(spec.softmax_scale),
            cap=float(spec.logits_soft_cap or 0.0),
            factor=float(spec.softmax_scale * LOG2E) if folded else 1.0,
            left=left is not None,
            right=right is not None,
            packed="kv_start" in a,
            segments="q_segment_ids" in a,
            mask="attention_mask" in a,
            mask_q=mask[2] > 1,
            mask_k=mask[3] > 1,
            mask_unit=_unit(mask),
            bias="bias" in a,
            bias_q=bias[2] > 1,
            bias_k=bias[3] > 1,
            bias_unit=_unit(bias),
            sinks="softmax_aux" in a,
            threshold=dropout.threshold(spec.dropout_prob) if spec.dropout_prob else 0,
            keep=1 / (1 - spec.dropout_prob),
            full=full,
            partial=partial,
            precision=product_precision(self.query.dtype, self.device),
            fast_tanh=spec.logits_soft_cap is not None and self.query.dtype != jnp.float32 and on_nvidia(self.device),
            **more,
        )


def _unit(shape: tuple[int, ...]) -> int:
    """What every stride of a mask or a bias is a multiple of."""
    return ALIGNED if shape[3] % ALIGNED == 0 else 1


class TritonFlashAttention:
    """The implementation for GPUs."""

    name = "flash-triton"
    version = 1
    reads: ClassVar = {"forward": (*READ_FORWARD, "num_key_splits"), "backward": READ_BACKWARD}
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Blocks where nothing was tuned: they fit the shared memory of every chip we know, and spill nothing."""
        if direction == "forward" and is_decoding(shapes, spec):
            return decoding.defaults(shapes, device)
        return default(shapes, spec, device, direction)

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
        """Blocks worth trying."""
        if direction == "forward" and is_decoding(shapes, spec):
            return decoding.candidates(shapes, device)
        return candidates(shapes, spec, device, direction)

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The parameters as the kernels use them."""
        if direction == "forward" and is_decoding(shapes, spec):
            return decoding.effective(shapes, params, device)
        return effective(params, device)


register(
    "flash_attention",
    features={
        "causal",
        "window",
        "soft_cap",
        "bias",
        "mask",
        "segments",
        "varlen",
        "sinks",
        "dropout",
        "gqa",
        "value_dim",
        "cross",
        "lse",
    },
    gradients={"query", "key", "value", "bias", "softmax_aux"},
)(TritonFlashAttention)
