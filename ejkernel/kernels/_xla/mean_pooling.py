"""Mean pooling in plain XLA: one pass over the tokens, whatever their mask or packing.

A sequence is cut into lanes of equal length that are summed side by side, a few positions a step: each step is one fused
read of rows with a choice of which count, so nothing of the inputs' size is ever written, and NaN that does not count
meets no arithmetic. (As a reduction of a masked array, XLA's CPU code writes the masked array first, at ten times the time.)
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.registry import kernel_registry
from ejkernel.contracts.support import ALL_FLOATS, Backend, Platform, Support, any_device
from ejkernel.kernels._xla.bits import from_bits, to_bits
from ejkernel.kernels.common.precision import accumulator_dtype
from ejkernel.kernels.common.varying import full_beside, vary_over, varying_axes

# Positions of a lane a step. More of them spill registers, fewer leave the loop's own cost to show (CPU, jax 0.10).
UNROLL = 16
# Rows a step, over all sequences of the batch.
ROWS_PER_STEP = 1024


def rows_per_step(shapes: dict[str, Any], spec: Any, params: FwdParams) -> int:
    """Rows of each sequence a step: all of them, or whole lanes; of packed sequences not many more than they have."""
    rows, tokens = params.blocksize_m or ROWS_PER_STEP, shapes["inputs"].shape[1]
    if not spec.packed and rows >= tokens:
        return max(1, tokens)
    if spec.packed:
        # So the work is that of the tokens, not of sequences times rows.
        sequences = max(1, shapes["cu_seqlens"].shape[1] - 1)
        rows = min(rows, max(1, tokens // sequences))
    return rows if rows < UNROLL else rows // UNROLL * UNROLL


def forward(arrays: dict[str, Array], spec: Any, params: Any) -> tuple[Array, None]:
    """``[B, D]``, or packed ``[B, N, D]``."""
    inputs = arrays["inputs"]
    rows = rows_per_step(arrays, spec, params)
    if spec.packed:
        return _packed(inputs, arrays["cu_seqlens"], rows).astype(inputs.dtype), None
    mask, length = arrays.get("mask"), inputs.shape[1]
    if rows >= length:
        kept = inputs if mask is None else jnp.where(mask[..., None], inputs, 0)
        total = kept.sum(1, dtype=accumulator_dtype(inputs))
    else:
        start = jnp.zeros(inputs.shape[0], jnp.int32)
        total = _sum(inputs, start, start + length, rows, mask)
    return (total / _counts(inputs, mask)).astype(inputs.dtype), None


def backward(
    arrays: dict[str, Array], spec: Any, params: Any, out: Array, residual: None, dout: Array, dresidual: None
) -> dict[str, Array]:
    """The inputs' gradient: a sequence's, divided by its count, at each token that counts, and 0 at the others."""
    inputs = arrays["inputs"]
    dout = dout.astype(accumulator_dtype(inputs))
    if not spec.packed:
        mask = arrays.get("mask")
        share = to_bits((dout / _counts(inputs, mask)).astype(inputs.dtype))[:, None]
        grad = jnp.broadcast_to(share, inputs.shape) if mask is None else jnp.where(mask[..., None], share, 0)
        return {"inputs": from_bits(grad, inputs.dtype)}
    offsets, tokens = arrays["cu_seqlens"], inputs.shape[1]
    lengths = jnp.maximum(offsets[:, 1:] - offsets[:, :-1], 1)
    share = to_bits((dout / lengths[..., None]).astype(inputs.dtype))
    owner = _owners(offsets, tokens)
    ours = jnp.take_along_axis(share, jnp.minimum(owner, share.shape[1] - 1)[..., None], axis=1)
    return {"inputs": from_bits(jnp.where((owner < share.shape[1])[..., None], ours, 0), inputs.dtype)}


def _packed(inputs: Array, offsets: Array, rows: int) -> Array:
    """``[B, N, D]``, a sequence at a time."""
    batch, _, features = inputs.shape
    sequences = offsets.shape[1] - 1

    def one(n, means):
        start, stop = (lax.dynamic_index_in_dim(offsets, n + i, axis=1, keepdims=False) for i in (0, 1))
        mean = _sum(inputs, start, stop, rows) / jnp.maximum(stop - start, 1)[:, None]
        return lax.dynamic_update_index_in_dim(means, mean, n, axis=1)

    means = _zeros(inputs, (batch, sequences, features))
    return lax.fori_loop(jnp.int32(0), jnp.int32(sequences), one, means)


def _sum(inputs: Array, start: Array, stop: Array, rows: int, mask: Array | None = None) -> Array:
    """``[B, D]``: the sum of each batch entry's tokens from ``start`` to ``stop``, about ``rows`` of them a step."""
    batch, tokens, features = inputs.shape
    positions = min(UNROLL, rows)
    lanes = max(1, rows // positions)
    each = -(-(stop - start) // lanes)
    first = start[:, None] + jnp.arange(lanes, dtype=jnp.int32) * each[:, None]
    last = jnp.minimum(first + each[:, None], stop[:, None])

    def step(i, total):
        for j in range(positions):
            position = first + i * positions + j
            counts = position < last
            position = jnp.minimum(position, tokens - 1)
            if mask is not None:
                counts &= jnp.take_along_axis(mask, position, axis=1, mode="promise_in_bounds")
            row = jnp.take_along_axis(inputs, position[..., None], axis=1, mode="promise_in_bounds")
            total = total + jnp.where(counts[..., None], row, 0).astype(total.dtype)
        return total

    steps = -(-jnp.max(each) // positions)
    return lax.fori_loop(jnp.int32(0), steps, step, _zeros(inputs, (batch, lanes, features))).sum(1)


def _owners(offsets: Array, tokens: int) -> Array:
    """``[B, T]``: the sequence that each token belongs to, the number of sequences for padding."""
    token = vary_over(jnp.arange(tokens, dtype=jnp.int32), varying_axes(offsets))
    return jax.vmap(lambda ends: jnp.searchsorted(ends, token, side="right"))(offsets[:, 1:])


def _counts(inputs: Array, mask: Array | None) -> Array:
    """What to divide by: ``[B, 1]``, at least 1."""
    acc = accumulator_dtype(inputs)
    if mask is None:
        return jnp.full((1, 1), inputs.shape[1], acc)
    return jnp.maximum(mask.sum(1, dtype=jnp.int32), 1).astype(acc)[:, None]


def _zeros(inputs: Array, shape: tuple[int, ...]) -> Array:
    return full_beside(inputs, shape, 0, accumulator_dtype(inputs))


class XlaMeanPooling:
    """The implementation for every device."""

    name = "mean-pooling-xla"
    version = 1
    reads: ClassVar = {"forward": ("blocksize_m",), "backward": ()}
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Rows a step and sequence: few on a CPU; all of them on an accelerator, and where devices may share the rows."""
        batch, tokens, _ = shapes["inputs"].shape
        if direction == "backward":
            return BwdParams()
        if device.kind == "cpu" and device.shared_by == 1:
            return FwdParams(blocksize_m=max(1, min(ROWS_PER_STEP // max(1, batch), tokens // 2)))
        return FwdParams(blocksize_m=max(1, tokens))

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
        """Steps worth trying."""
        if direction == "backward":
            return []
        tokens = shapes["inputs"].shape[1]
        return [FwdParams(blocksize_m=rows) for rows in (64, 256, 1024, 4096) if rows < tokens]

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The parameters as the kernel uses them."""
        if direction == "backward":
            return BwdParams()
        return FwdParams(blocksize_m=rows_per_step(shapes, spec, params))


kernel_registry.register(
    "mean_pooling",
    Platform.XLA,
    Backend.ANY,
    support=Support(
        devices=any_device(),
        dtypes=ALL_FLOATS,
        features={"mask", "varlen"},
        gradients={"inputs"},
    ),
)(XlaMeanPooling)
