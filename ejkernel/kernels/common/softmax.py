"""Statistics of an attention softmax that kernels of every platform share: its backward's residuals, sinks, merging.

A row is one query of one head. Its log-sum-exp (lse) is -inf if it sees no key and has no sink.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels.common import visibility
from ejkernel.kernels.common.precision import accumulator_dtype

# Kernels with a hardware base-2 exponential keep logits and lse in units of log 2.
LOG2E = math.log2(math.e)


def softmax_slope(out: Array, dout: Array, dlse: Array, row_sum: Callable[[Array], Array]) -> Array:
    """What the softmax's normalisation and the lse's cotangent take off: d logits = weights * (d weights - slope).

    ``row_sum`` sums over the last axis and brings the rows into the layout of ``dlse``.
    """
    acc = accumulator_dtype(out)
    return row_sum(out.astype(acc) * dout.astype(acc)) - dlse


def softmax_residuals(
    arrays: dict[str, Array], out: Array, lse: Array, dout: Array, dlse: Array, *, rows_may_see_nothing: bool = False
):
    """What a GPU kernel's backward needs of each row: its cotangent, finite lse and slope; and the arrays.

    A row that sees nothing has no gradient, whatever its cotangents are. Where data decides which rows those are, be it of
    these arrays or of others, they are zeros in what is returned: they may hold NaN, and kernels sum over rows.
    """

    def row_sum(products):
        # Behind a barrier: XLA would fuse the sum into whatever packs it for a kernel. That cost 0.2 ms of 1.5 on an H200.
        return lax.optimization_barrier(jnp.sum(products, -1)).swapaxes(1, 2)

    unseeing = lse == -jnp.inf
    slope = softmax_slope(out, dout, dlse, row_sum)
    if "softmax_aux" not in arrays and (rows_may_see_nothing or visibility.BY_DATA & arrays.keys()):
        rows = unseeing.swapaxes(1, 2)[..., None]
        arrays = {**arrays, "query": jnp.where(rows, 0, arrays["query"])}
        dout = jnp.where(rows, 0, dout)
    return dout, jnp.where(unseeing, 0, lse), jnp.where(unseeing, 0, slope), arrays


def sink_gradient(sinks: Array, finite_lse: Array, slope: Array) -> Array:
    """The gradient of the sinks' log-sum-exp ``[B|1, H]``, from rows ``[B, H, Sq]``."""
    return sum_shared(sinks, -sink_terms(sinks, finite_lse, slope).sum(-1))


def sink_terms(sinks: Array, finite_lse: Array, slope: Array) -> Array:
    """What each row, shaped as ``slope``, takes off its sink's gradient; the sinks may lack the rows' trailing axes."""

    def by_row():
        return jnp.expand_dims(sinks, tuple(range(sinks.ndim, slope.ndim)))

    return jnp.where(by_row() == -jnp.inf, 0, jnp.exp(by_row() - finite_lse)) * slope


def sum_shared(array: Array, gradient: Array) -> Array:
    """A gradient ``[B, …]``, summed over the batch if its array ``[B|1, …]`` is shared by the batch."""
    return gradient if array.shape[0] > 1 else gradient.sum(0, keepdims=True)


def merge(out: Array, lse: Array, other: Array, other_lse: Array) -> tuple[Array, Array]:
    """Attention over the keys of both, in the accumulators' dtype.

    ``out [B, S, H, Dv]`` with ``lse [B, H, S]``, or ``out [N, H, Dv]`` with ``lse [N, H]``. Differentiable in all four; what has an
    lse of -inf has no part, be it NaN.
    """
    top = lax.stop_gradient(jnp.maximum(lse, other_lse))
    shift = jnp.where(top == -jnp.inf, 0, top)
    weight, other_weight = jnp.exp(lse - shift), jnp.exp(other_lse - shift)
    nothing = (lse == -jnp.inf) & (other_lse == -jnp.inf)
    total = jnp.where(nothing, 1, weight + other_weight)

    def part(out, lse, share):
        share, unseeing = (x.swapaxes(1, 2) if out.ndim == 4 else x for x in (share, lse == -jnp.inf))
        return jnp.where(unseeing[..., None], 0, out) * share[..., None]

    merged = part(out, lse, weight / total) + part(other, other_lse, other_weight / total)
    return merged, jnp.where(nothing, -jnp.inf, shift + jnp.log(total))


def merge_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """Attention with sinks ``[B|1, H]``, from ``out`` and ``lse`` without: they add to the denominator alone."""
    with_sinks = jnp.logaddexp(lse, sinks[..., None].astype(lse.dtype))
    share = jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - with_sinks))
    return out * share.swapaxes(1, 2)[..., None], with_sinks


def sum_last(x: Array) -> Array:
    """A sum over the last, short axis, as a product with ones: XLA's CPU reduction takes 30 times as long (jax 0.10)."""
    return jnp.dot(x, jnp.ones(x.shape[-1], x.dtype), precision=lax.Precision.HIGHEST)
