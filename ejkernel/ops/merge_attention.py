"""``merge_attention``: attention over two sets of keys, from the results over each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from ejkernel.kernels.common.precision import accumulator_dtype
from ejkernel.kernels.common.softmax import merge
from ejkernel.ops.core.checks import Checker
from ejkernel.ops.core.operation import AnyArray
from ejkernel.ops.core.run import usual_promotion

_check = Checker("merge_attention")


def merge_attention(
    out: Float[AnyArray, "..."],
    lse: Float[AnyArray, "..."],
    other_out: Float[AnyArray, "..."],
    other_lse: Float[AnyArray, "..."],
) -> tuple[Array, Array]:
    """Two results over disjoint keys as the one over all of them: a shared prefix and the rest, a cache and what is new.

    Sinks may be in one of the two, not in both.

    Args:
        out, other_out: ``[B, S, H, D]``, or ``[N, H, D]``, as the operations return them.
        lse, other_lse: their log-sum-exps, ``[B, H, S]`` or ``[N, H]``. -inf means that nothing was seen: that side has no part,
            whatever its output holds.

    Returns:
        ``(out, lse)``, the first in ``out``'s dtype. Differentiable in all four arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel import flash_attention, merge_attention
        >>> q, k = jnp.ones((1, 4, 2, 8)), jnp.arange(96.0).reshape(1, 6, 2, 8) / 96
        >>> parts = [flash_attention(q, x, x, return_lse=True) for x in (k[:, :2], k[:, 2:])]
        >>> out, lse = merge_attention(*parts[0], *parts[1])
        >>> bool(jnp.allclose(out, flash_attention(q, k, k), atol=1e-6))
        True
    """
    _check.array(
        "out",
        out,
        "[batch, q_len, heads, value_dim] or [tokens, heads, value_dim]",
        ranks=(3, 4),
        kinds=(jnp.floating,),
    )
    shape = (out.shape[0], out.shape[2], out.shape[1]) if out.ndim == 4 else out.shape[:2]
    _check.array("other_out", other_out, f"{list(out.shape)}, as out is", ranks=(out.ndim,), kinds=(jnp.floating,))
    if other_out.shape != out.shape:
        _check.fail("other_out", other_out, f"{list(out.shape)}, as out is")
    if other_out.dtype != out.dtype:
        _check.fail("other_out", other_out, f"out's dtype, {out.dtype}: cast one of them")
    for name, array in (("lse", lse), ("other_lse", other_lse)):
        expected = f"{list(shape)}, as the operations return it beside such an output"
        _check.array(name, array, expected, ranks=(len(shape),), kinds=(jnp.floating,))
        if array.shape != shape:
            _check.fail(name, array, expected)
    return _merge(out, lse, other_out, other_lse)


@jax.jit
def _merge(out: Array, lse: Array, other_out: Array, other_lse: Array) -> tuple[Array, Array]:
    with usual_promotion():
        dtype = accumulator_dtype(out)
        merged, merged_lse = merge(*(x.astype(dtype) for x in (out, lse, other_out, other_lse)))
        return merged.astype(out.dtype), merged_lse
