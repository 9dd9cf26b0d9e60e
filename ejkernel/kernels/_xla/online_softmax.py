"""The online softmax of the XLA attention kernels: a state of three arrays that takes in block after block of logits.

The state of rows ``[…]`` is their running maximum ``top``, the sum ``total`` of weights relative to it, and the weighted values
``acc [..., d]``.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels.common.softmax import softmax_slope, sum_last

State = tuple[Array, Array, Array]


def soft_cap(s: Array, cap: float | None) -> tuple[Array, Array | None]:
    """Capped logits and the cap's slope, None without a cap."""
    if cap is None:
        return s, None
    bounded = jnp.tanh(s / cap)
    return cap * bounded, 1 - bounded * bounded


def update(
    state: State, s: Array, mix: Callable[[Array], Array], drop: Callable[[Array], Array] | None = None
) -> State:
    """The state after logits ``s [..., k]``.

    ``mix`` multiplies weights ``[..., k]`` with the block's values; ``drop`` is dropout, which leaves the denominator alone.
    """
    top, total, acc = state
    new_top = jnp.maximum(top, s.max(-1))
    # A row without a visible key so far has a maximum of -inf, and -inf - -inf is NaN.
    shift = jnp.where(new_top == -jnp.inf, 0, new_top)
    weights = jnp.exp(s - shift[..., None])
    decay = jnp.exp(top - shift)
    total = total * decay + weights.sum(-1)
    if drop is not None:
        weights = drop(weights)
    return new_top, total, acc * decay[..., None] + mix(weights)


def merge_splits(state: State, sinks: Array | None) -> State:
    """States of disjoint keys, along axis 1, as one; sinks ``[B|1, H]`` join the denominator."""
    top, total, acc = state
    whole = top.max(1)
    if sinks is not None:
        sinks = sinks.reshape(-1, *whole.shape[1:])
        whole = jnp.maximum(whole, sinks)
    shift = jnp.where(whole == -jnp.inf, 0, whole)
    share = jnp.exp(top - shift[:, None])
    total, acc = (total * share).sum(1), (acc * share[..., None]).sum(1)
    return whole, total if sinks is None else total + jnp.exp(sinks - shift), acc


def output(total: Array, acc: Array, empty: Array) -> Array:
    """The attention output; 0 in rows that are ``empty [..., 1]``: their total is 0."""
    return jnp.where(empty, 0, acc / total[..., None])


def log_sum_exp(top: Array, total: Array) -> Array:
    """Of all logits taken in, -inf in rows without any."""
    return jnp.where(total == 0, -jnp.inf, top + jnp.log(total))


def backward_statistics(out: Array, lse: Array, dout: Array, dlse: Array) -> tuple[Array, Array]:
    """The finite lse and the slope ``[B, H, Sq]`` of rows whose output is ``[B, Sq, H, d]``.

    A row that sees nothing has no gradient, whatever its cotangents are.
    """
    finite_lse = jnp.where(lse == -jnp.inf, 0, lse)
    slope = softmax_slope(out, dout, dlse, lambda products: sum_last(products).swapaxes(1, 2))
    return finite_lse, jnp.where(lse == -jnp.inf, 0, slope)
