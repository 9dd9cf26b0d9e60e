"""Kernels to study: a tiled product of matrices, a matrix times a vector, and attention with all its logits in memory.

``gemm_tiled`` and ``gemv`` run in Triton on an NVIDIA or AMD GPU, in Triton's interpreter where ``TRITON_INTERPRET=1``
is set, and in tiles in XLA elsewhere. They accumulate in float32; Triton's add nothing atomically, so every run gives
the same bits.
"""

from __future__ import annotations

import functools
import importlib.util
import numbers
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.contracts.device import DeviceInfo, describe
from ejkernel.errors import how_to_install
from ejkernel.kernels._triton.call import interpreting
from ejkernel.kernels.common.varying import vary_over, varying_axes
from ejkernel.ops.config.context import surroundings
from ejkernel.ops.core.checks import Checker, is_array, is_concrete

__all__ = ["gemm_tiled", "gemv", "standard_attention"]

DTYPES = ("float32", "bfloat16", "float16")
# XLA's tile on a CPU: large enough for its own product to run at full speed, and for the copies of the tiles to be
# cheap.
XLA_TILE = (512, 1024, 1024)
# Below this many rows or columns every element is used too seldom for a tile to pay.
THIN = 64
# Triton compiles for NVIDIA GPUs from this compute capability on, in tenths.
OLDEST = 80


def gemm_tiled(a: Any, b: Any, *, block: tuple[int, int, int] | None = None) -> Array:
    """``a @ b`` for ``[M, K]`` and ``[K, N]``, tile by tile.

    The operands are both float32, bfloat16 or float16; sums are float32 (exact products, no TF32) and the result has
    the operands' dtype. Sizes may be anything, 0 included. Reverse-mode gradients run through the same kernel, with
    tiles of their own choice; ``vmap`` is a loop.

    Args:
        a: the left matrix.
        b: the right matrix.
        block: the tile's ``(m, n, k)``; None: the device and the sizes decide. Triton wants powers of two from 16 on
            that fit its device.

    Example:
        >>> import jax.numpy as jnp
        >>> out = gemm_tiled(jnp.ones((5, 7)), jnp.ones((7, 3)), block=(16, 16, 16))
        >>> out.shape, float(out[4, 2])
        ((5, 3), 7.0)
    """
    check = Checker("gemm_tiled")
    a, b = _operands(check, {"a": ("[M, K]", a), "b": ("[K, N]", b)})
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k:
        check.fail("b", b, f"[K, N] with K = {k}, the columns of a {list(a.shape)}")
    device = _triton_device(a)
    block = _checked_block(check, block, "(m, n, k)", a.dtype, device, least=16)
    if 0 in (m, n, k):
        return _zeros((m, n), a.dtype, a)
    return _gemm(a, b, block, device)


def gemv(a: Any, x: Any, *, block: tuple[int, int] | None = None) -> Array:
    """``a @ x`` for ``[M, K]`` and ``[K]``: every element of the matrix is read once, so memory sets the pace.

    Dtypes, sums, gradients and ``vmap`` are those of ``gemm_tiled``; the vector's gradient copies the matrix
    transposed.

    Args:
        a: the matrix.
        x: the vector.
        block: the tile's ``(m, k)``; None: the device and the sizes decide. Triton wants powers of two.

    Example:
        >>> import jax.numpy as jnp
        >>> gemv(jnp.arange(6.0).reshape(2, 3), jnp.ones(3)).tolist()
        [3.0, 12.0]
    """
    check = Checker("gemv")
    a, x = _operands(check, {"a": ("[M, K]", a), "x": ("[K]", x)})
    m, k = a.shape
    if x.shape[0] != k:
        check.fail("x", x, f"[K] with K = {k}, the columns of a {list(a.shape)}")
    device = _triton_device(a)
    block = _checked_block(check, block, "(m, k)", a.dtype, device, least=1)
    if 0 in (m, k):
        return _zeros((m,), a.dtype, a)
    return _gemv(a, x, block, device)


def standard_attention(query: Any, key: Any, value: Any, *, causal: bool = False) -> Array:
    """Attention with every logit in memory: what flash attention is compared with.

    Shapes are those of ``ejkernel.flash_attention``: query ``[B, Sq, H, D]``, key ``[B, Sk, Hkv, D]``, value
    ``[B, Sk, Hkv, Dv]``, with H a multiple of Hkv. Logits and their softmax are float32 (float64 for float64), the
    result has the query's dtype. ``causal`` aligns the last query with the last key; a row that sees nothing is 0.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.arange(3.0).reshape(1, 3, 1, 1)
        >>> standard_attention(x, 0 * x, x, causal=True).ravel().tolist()
        [0.0, 0.5, 1.0]
    """
    check = Checker("standard_attention")
    query, key, value = _operands(
        check,
        {
            "query": ("[B, Sq, H, D]", query),
            "key": ("[B, Sk, Hkv, D]", key),
            "value": ("[B, Sk, Hkv, Dv]", value),
        },
        (*DTYPES, "float64"),
    )
    batch, _, heads, dim = query.shape
    if key.shape[0] != batch or key.shape[3] != dim:
        check.fail("key", key, f"[B, Sk, Hkv, D] with B = {batch} and D = {dim} as query {list(query.shape)}")
    if key.shape[2] == 0 or heads % key.shape[2]:
        check.fail("key", key, f"a number of heads that divides the query's {heads}")
    if value.shape[:3] != key.shape[:3]:
        check.fail("value", value, f"[B, Sk, Hkv, Dv] with B, Sk and Hkv of key {list(key.shape)}")
    return _attention(query, key, value, check.flag("causal", causal))


def _operands(check: Checker, given: dict[str, tuple[str, Any]], dtypes: tuple[str, ...] = DTYPES) -> list[Array]:
    """The arguments as JAX arrays of one dtype that vary over the same mesh axes; ``given`` has the expected shapes."""
    arrays: list[Array] = []
    for name, (shape, value) in given.items():
        if is_array(value) and not isinstance(value, jax.Array) and not _is_numpy_dtype(value.dtype):
            check.fail(name, value, f"a JAX or numpy array {shape}: pass jnp.from_dlpack({name})")
        check.array(name, value, shape, ranks=(shape.count(",") + 1,), kinds=(jnp.floating,))
        array = value if isinstance(value, jax.Array) else jnp.asarray(value)
        if array.dtype.name not in dtypes:
            check.fail(name, array, f"{shape}, of dtype {', '.join(dtypes)}")
        if arrays and array.dtype != arrays[0].dtype:
            check.fail(name, array, f"the dtype of {next(iter(given))}, {arrays[0].dtype}")
        arrays.append(array)
    axes = varying_axes(*arrays)
    return [vary_over(array, axes) for array in arrays]


def _is_numpy_dtype(dtype: Any) -> bool:
    try:
        np.dtype(dtype)
    except TypeError:
        return False
    return True


def _checked_block(
    check: Checker, block: Any, sides: str, dtype: Any, device: DeviceInfo | None, *, least: int
) -> tuple | None:
    """A tile of positive sides; for Triton, of powers of two from ``least`` on that fit the device."""
    if block is None:
        return None
    count = sides.count(",") + 1
    if not isinstance(block, tuple | list) or len(block) != count or not all(map(_is_positive, block)):
        check.fail("block", block, f"{sides} of positive ints, or None")
    block = tuple(map(int, block))
    if device is not None:
        from ejkernel.lab import study_kernels

        if any(side < least or side & (side - 1) for side in block):
            check.fail("block", block, f"{sides} of powers of two from {least} on, for Triton on {device}")
        if expected := study_kernels.misfit(block, dtype, device):
            check.fail("block", block, expected)
    return block


def _is_positive(side: Any) -> bool:
    return isinstance(side, numbers.Integral) and not isinstance(side, bool) and side > 0


def _triton_device(array: Array) -> DeviceInfo | None:
    """The device that Triton's kernels run on, None where XLA's do."""
    device = surroundings().target or describe(next(iter(array.devices())) if is_concrete(array) else None)
    if not interpreting() and device.kind != "gpu":
        return None
    missing = _missing("triton") or (not interpreting() and _missing("jax_triton"))
    reason = f"{missing} is not installed ({how_to_install('gpu')})" if missing else None
    if device.vendor == "nvidia" and 0 < device.capability < OLDEST:
        reason = f"Triton needs compute capability {OLDEST / 10}, it has {device.capability / 10}"
    if reason is None:
        return device
    warnings.warn(f"gemm_tiled and gemv run in XLA on {device}: {reason}.", stacklevel=3)
    return None


@functools.cache
def _missing(package: str) -> str | None:
    return package if importlib.util.find_spec(package) is None else None


def _zeros(shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
    return vary_over(jnp.zeros(shape, dtype), varying_axes(like))


# Products of matrices. Gradients are products too, with tiles of their own.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _gemm_rule(a, b, block, device):
    if device is None:
        return _in_tiles(a, b, block or _xla_tile(*a.shape, b.shape[1]), _dot)
    from ejkernel.lab import study_kernels

    return study_kernels.run_gemm(a, b, block, device)


def _gemm_forward(a, b, block, device):
    return _gemm_rule(a, b, block, device), (a, b)


def _gemm_backward(block, device, residuals, g):
    a, b = residuals
    return _gemm_rule(g, b.T, None, device), _gemm_rule(a.T, g, None, device)


_gemm_rule.defvjp(_gemm_forward, _gemm_backward)
_gemm = jax.jit(_gemm_rule, static_argnums=(2, 3))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _gemv_rule(a, x, block, device):
    if device is None:
        rows, columns = block or a.shape
        return _in_tiles(a, x[:, None], (rows, 1, columns), _multiply_and_sum)[:, 0]
    from ejkernel.lab import study_kernels

    return study_kernels.run_gemv(a, x, block, device)


def _gemv_forward(a, x, block, device):
    return _gemv_rule(a, x, block, device), (a, x)


def _gemv_backward(block, device, residuals, g):
    a, x = residuals
    return g[:, None] * x, _gemv_rule(a.T, g, None, device)


_gemv_rule.defvjp(_gemv_forward, _gemv_backward)
_gemv = jax.jit(_gemv_rule, static_argnums=(2, 3))


def _xla_tile(m: int, k: int, n: int) -> tuple[int, int, int]:
    return (m, n, k) if min(m, n) < THIN else XLA_TILE


def _in_tiles(a: Array, b: Array, block: tuple[int, int, int], product: Callable[[Array, Array], Array]) -> Array:
    """The product of two matrices, a tile of the result at a time.

    A last tile that sticks out is moved back to end at the edge, so that all are alike and nothing is padded: what two
    tiles have in common both compute. Along k, where that would count twice, what is left is a step of its own.
    """
    # XLA on a CPU cannot run the product of bfloat16 matrices that it makes of a transposed one.
    a, b = lax.optimization_barrier((a, b))
    (m, k), n = a.shape, b.shape[1]
    bm, bn, bk = (min(side, size) for side, size in zip(block, (m, n, k), strict=True))
    across = -(-n // bn)
    steps, left = divmod(k, bk)

    def tile(t, out):
        row, column = jnp.minimum(t // across * bm, m - bm), jnp.minimum(t % across * bn, n - bn)

        def step(at, depth, acc):
            x = lax.dynamic_slice(a, (row, at), (bm, depth))
            y = lax.dynamic_slice(b, (at, column), (depth, bn))
            return acc + product(x, y)

        acc = lax.fori_loop(0, steps, lambda s, acc: step(s * bk, bk, acc), _zeros((bm, bn), jnp.float32, a))
        if left:
            acc = step(steps * bk, left, acc)
        return lax.dynamic_update_slice(out, acc.astype(out.dtype), (row, column))

    return lax.fori_loop(0, -(-m // bm) * across, tile, _zeros((m, n), a.dtype, a))


def _dot(x: Array, y: Array) -> Array:
    return lax.dot(x, y, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _multiply_and_sum(x: Array, y: Array) -> Array:
    """A matrix times a column, in one pass: of bfloat16, XLA's own product on a CPU takes several times as long."""
    if x.dtype != jnp.bfloat16:
        return _dot(x, y)
    return jnp.sum(x.astype(jnp.float32) * y[:, 0].astype(jnp.float32), 1, keepdims=True)


@functools.partial(jax.jit, static_argnums=3)
def _attention(query, key, value, causal):
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    accurate = jnp.promote_types(query.dtype, jnp.float32)
    options = {"precision": lax.Precision.HIGHEST, "preferred_element_type": accurate}
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, **options) * query.shape[3] ** -0.5
    if causal:
        rows, columns = logits.shape[2:]
        seen = jnp.tri(rows, columns, columns - rows, dtype=bool)
        logits = jnp.where(seen, logits, -jnp.inf)
    top = lax.stop_gradient(jnp.max(logits, -1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(logits - jnp.where(top == -jnp.inf, 0, top))
    total = jnp.sum(weights, -1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value, **options).astype(query.dtype)
