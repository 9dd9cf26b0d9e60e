"""Flash attention for Hopper in Pallas Mosaic GPU: the plan of a call, and what the kernel cannot do.

There is a forward so far: a differentiated call takes another implementation's backward, for which ``(out, lse)`` is all that
a forward must leave.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels import visibility
from ejkernel.kernels.intervals import intervals
from ejkernel.ops.core.registry import kernel_registry
from ejkernel.ops.core.support import HALF, Backend, Platform, Support, cuda, multiple_of
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams

WARPS_A_GROUP = 4
TILE_ROWS = 8
# Blocks are multiples of this, the rows of a warpgroup's product and the keys that the second product reads at once.
SIDE = 64
# What a program of Hopper may have, less what barriers and reductions take.
SHARED_MEMORY = 232448 - 3072
# By the wider of the two head dims: queries of a program, keys a step, warps that compute, slots of the ring. Nothing spills.
DEFAULTS = {
    64: FwdParams(q_blocksize=192, kv_blocksize=128, num_warps=12, num_stages=4),
    128: FwdParams(q_blocksize=128, kv_blocksize=128, num_warps=8, num_stages=2),
    256: FwdParams(q_blocksize=128, kv_blocksize=64, num_warps=8, num_stages=2),
}
# Where masks are data: a step's vectors need registers too.
DEFAULTS_BY_DATA = {**DEFAULTS, 128: FwdParams(q_blocksize=128, kv_blocksize=64, num_warps=8, num_stages=4)}
SPACE = {
    64: [(192, 128, 12, 4), (128, 256, 8, 2), (128, 128, 8, 4)],
    128: [(192, 128, 12, 2), (128, 128, 8, 2), (128, 64, 8, 4)],
    256: [(128, 64, 8, 2)],
}


def forward(arrays: dict[str, Array], spec: Any, params: FwdParams, *, interpret: Any = False) -> tuple[Array, Array]:
    """Attention output ``[B, Sq, H, Dv]`` and the log-sum-exp of its logits ``[B, H, Sq]``; ``interpret``: without a GPU."""
    from ejkernel.kernels._pallas.gpu import flash_forward

    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    q_len, kv_len, heads = query.shape[1], key.shape[1], query.shape[2]
    rows, consumers, step, stages = tiles(params, query.shape[3], value.shape[3])
    walks, full, partial = _walks(arrays, spec, rows * consumers, step)
    left, right = spec.window
    shift = kv_len - q_len
    blocks = walks.shape[1]
    optional = {}
    if "softmax_aux" in arrays:
        optional["sinks"] = arrays["softmax_aux"]
    # Vectors are read in whole blocks, past the last row too.
    for name, source, size in (
        ("start", "kv_start", blocks * rows * consumers),
        ("stop", "kv_stop", blocks * rows * consumers),
        ("q_ids", "q_segment_ids", blocks * rows * consumers),
        ("kv_ids", "kv_segment_ids", kv_len + step),
    ):
        if source in arrays:
            optional[name] = jnp.pad(arrays[source], ((0, 0), (0, size - arrays[source].shape[1])))
    c = flash_forward.Forward(
        rows=rows,
        consumers=consumers,
        step=step,
        stages=stages,
        heads=heads,
        group=heads // key.shape[2],
        dim=query.shape[3],
        value_dim=value.shape[3],
        scale=float(spec.softmax_scale),
        cap=float(spec.logits_soft_cap or 0.0),
        left=None if left is None else shift - left,
        right=None if right is None else shift + right + 1,
        kv_len=kv_len,
        packed="kv_start" in arrays,
        segments="q_segment_ids" in arrays,
        sinks="softmax_aux" in arrays,
        full=full,
        partial=partial,
        interpreted=bool(interpret),
    )
    out, lse = flash_forward.call(c, *map(_in_eights, (query, key, value)), walks, optional, interpret=interpret)
    return out[:, :q_len], lse[..., :q_len]


def tiles(params: FwdParams, dim: int, value_dim: int) -> tuple[int, int, int, int]:
    """Rows of a warpgroup, warpgroups, keys a step and slots: what was asked for, clipped to what the kernel and the chip take.

    Example:
        >>> tiles(FwdParams(q_blocksize=1, kv_blocksize=10_000, num_warps=64), 128, 128)
        (64, 3, 256, 1)
    """
    consumers = min(3, max(1, (params.num_warps or 8) // WARPS_A_GROUP))
    rows = SIDE * (1 + ((params.q_blocksize or 0) >= 2 * SIDE * consumers))
    step = min(4 * SIDE, max(SIDE, (params.kv_blocksize or SIDE) // SIDE * SIDE))
    stages = max(1, params.num_stages or 2)

    def fits() -> bool:
        own = dim if value_dim == dim else dim + value_dim  # the output takes the query's place if it can
        halves = consumers * rows * own + stages * step * (dim + value_dim)
        return 2 * halves + 4 * consumers * rows <= SHARED_MEMORY

    while not fits() and stages > 1:
        stages -= 1
    while not fits() and step > SIDE:
        step -= SIDE
    if not fits():
        rows = SIDE
    while not fits():
        consumers -= 1
    return rows, consumers, step, stages


def _in_eights(x: Array) -> Array:
    """Rows to a multiple of 8, the height of a tile in shared memory; copies only where there are others."""
    missing = -x.shape[1] % TILE_ROWS
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x


def _walks(arrays: dict[str, Array], spec: Any, block: int, step: int) -> tuple[Array, bool, bool]:
    """``[B|1, blocks, 4]``: where each block of queries begins among the keys, and its masked, unmasked and masked steps."""
    q_len, kv_len = arrays["query"].shape[1], arrays["key"].shape[1]
    packed = "kv_start" in arrays
    start, stop = (arrays["kv_start"], arrays["kv_stop"]) if packed else intervals(spec.window, q_len, kv_len)
    ids = arrays.get("q_segment_ids")
    segments = None if ids is None else (ids, arrays["kv_segment_ids"])
    ranges = visibility.key_ranges(start, stop, segments, block, kv_len, shifted=False)
    if segments:
        # A step's ids are loaded a few at a time, from aligned addresses.
        ranges = ranges._replace(begin=ranges.begin // TILE_ROWS * TILE_ROWS)
    return visibility.table(visibility.plan_walk(ranges, step, 1, False))


def _wider(shapes: dict[str, Any]) -> int:
    dim = max(shapes["query"].shape[3], shapes["value"].shape[3])
    return next(size for size in DEFAULTS if dim <= size)


class PallasFlashAttention:
    """The implementation for Hopper."""

    version = 1
    forward = staticmethod(forward)

    @staticmethod
    def backward(arrays, spec, params, out, lse, dout, dlse):
        """Never called: no gradient is declared."""
        raise NotImplementedError

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Blocks where nothing was tuned."""
        if direction == "backward":
            return BwdParams()
        by_data = "kv_start" in shapes or "q_segment_ids" in shapes
        return (DEFAULTS_BY_DATA if by_data else DEFAULTS)[_wider(shapes)]

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
        """Blocks worth trying."""
        names = ("q_blocksize", "kv_blocksize", "num_warps", "num_stages")
        return [FwdParams(**dict(zip(names, sizes, strict=True))) for sizes in SPACE[_wider(shapes)]]


kernel_registry.register(
    "flash_attention",
    Platform.PALLAS,
    Backend.GPU,
    # Below all others: it runs where it is pinned or was measured to be faster.
    priority=-1,
    support=Support(
        # The instructions that it is made of (wgmma) are Hopper's alone.
        devices=cuda(90, 90),
        dtypes=HALF,
        # The kernel compiles for multiples of 16; these are the ones whose swizzle has run on a GPU.
        head_dims=multiple_of(64, at_most=256),
        features={"causal", "window", "soft_cap", "segments", "varlen", "sinks", "gqa", "value_dim", "cross", "lse"},
        gradients=set(),
    ),
)(PallasFlashAttention)
