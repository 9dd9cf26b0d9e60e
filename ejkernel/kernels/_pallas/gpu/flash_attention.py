"""Flash attention for Hopper in Pallas Mosaic GPU: the plan of a call, and what the kernel cannot do.

The backward is in ``flash_gradients``: ``(out, lse)`` is all that a forward leaves it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.registry import kernel_registry
from ejkernel.contracts.support import HALF, Backend, Platform, Support, cuda, multiple_of
from ejkernel.kernels._pallas.gpu.flash_plan import (
    SIDE,
    TILE_ROWS,
    WARPS_A_GROUP,
    in_eights,
    key_intervals,
    longest_first,
    mask_vectors,
    segment_ids,
    statics,
    whole_tiles,
    without_padding,
)
from ejkernel.kernels.common import visibility

# Keys of one instruction of the second product.
CHUNK = 16
# What a program of Hopper may have, less what barriers and reductions take.
SHARED_MEMORY = 232448 - 3072
# By the wider of the two head dims: queries of a program, keys a step, warps that compute, slots of the ring. Nothing spills.
DEFAULTS = {
    64: FwdParams(q_blocksize=192, kv_blocksize=128, num_warps=12, num_stages=4),
    128: FwdParams(q_blocksize=128, kv_blocksize=128, num_warps=8, num_stages=2),
    256: FwdParams(q_blocksize=128, kv_blocksize=80, num_warps=8, num_stages=2),
}
SPACE = {
    64: [(192, 128, 12, 4), (192, 112, 12, 4), (128, 192, 8, 3)],
    128: [(128, 128, 8, 2), (128, 160, 8, 2)],
    256: [(128, 80, 8, 2)],
}


def forward(arrays: dict[str, Array], spec: Any, params: FwdParams, *, interpret: Any = False) -> tuple[Array, Array]:
    """Attention output ``[B, Sq, H, Dv]`` and the log-sum-exp of its logits ``[B, H, Sq]``; ``interpret``: without a GPU."""
    from ejkernel.kernels._pallas.gpu import flash_forward

    small = narrow(arrays["query"].shape[3], arrays["value"].shape[3])
    # With wide heads the kernel has no registers left to put zeros where padding is.
    arrays, _ = without_padding(arrays, spec, backward=False, by_kernel=small)
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    q_len, kv_len = query.shape[1], key.shape[1]
    consumers, step, stages = tiles(params, query.shape[3], value.shape[3])
    walks, (head, full, tail) = _walks(arrays, spec, SIDE * consumers, step)
    # Vectors are read in whole blocks, past the last row too.
    optional = mask_vectors(arrays, walks.shape[1] * SIDE * consumers, kv_len + step)
    if "padding" in arrays:
        optional["padded"] = _any_in_step(optional["padding"], step)
    if "softmax_aux" in arrays:
        optional["sinks"] = arrays["softmax_aux"]
    c = flash_forward.Forward(
        consumers=consumers,
        step=step,
        stages=stages,
        # Two alternate between products and softmax. Three overlap without; so do two if one part is much longer: the products
        # of wide heads, the softmax with a cap.
        turn=consumers == 2 and small and not spec.logits_soft_cap,
        **statics(arrays, spec),
        sinks="softmax_aux" in arrays,
        persists=small,
        clears="padding" in arrays,
        # The weights of float16 have no room above 1.
        hopeful=small and value.dtype == jnp.bfloat16,
        head=head,
        full=full,
        tail=tail,
        interpreted=bool(interpret),
    )
    out, lse = flash_forward.call(c, *map(in_eights, (query, key, value)), walks, optional, interpret=interpret)
    return out[:, :q_len], lse[..., :q_len]


def narrow(dim: int, value_dim: int) -> bool:
    """Whether shared memory has room for a block's output beside the next one's queries."""
    return max(dim, value_dim) <= 128


def tiles(params: FwdParams, dim: int, value_dim: int) -> tuple[int, int, int]:
    """Warpgroups, keys a step and slots: what was asked for, clipped to what the kernel and the chip take.

    Each warpgroup has 64 queries, so the number of warps decides. The output takes the queries' place where it must and can.

    Example:
        >>> tiles(FwdParams(kv_blocksize=10_000, num_warps=64), 128, 128)
        (3, 128, 2)
    """
    consumers = min(3, max(1, (params.num_warps or 8) // WARPS_A_GROUP))
    step = min(4 * SIDE, max(CHUNK, (params.kv_blocksize or SIDE) // CHUNK * CHUNK))
    stages = max(2, params.num_stages or 2)
    own = dim + value_dim if value_dim != dim or narrow(dim, value_dim) else dim

    def fits() -> bool:
        return 2 * (consumers * SIDE * own + stages * step * (dim + value_dim)) <= SHARED_MEMORY

    while not fits() and stages > 2:
        stages -= 1
    while not fits():  # Three warpgroups do with a step of 16, at 256.
        step -= CHUNK
    return consumers, step, stages


def _any_in_step(flags: Array, step: int) -> Array:
    """Whether there is a flag in the step that begins at every eighth key: ``[B, keys / 8]``."""
    eights = jnp.pad(flags, ((0, 0), (0, -flags.shape[1] % TILE_ROWS))).reshape(flags.shape[0], -1, TILE_ROWS).max(2)
    window = step // TILE_ROWS
    return lax.reduce_window(eights, 0, lax.max, (1, window), (1, 1), ((0, 0), (0, window - 1)))


def _walks(arrays: dict[str, Array], spec: Any, block: int, step: int) -> tuple[Array, list[bool]]:
    """The walks of all blocks of queries, and whether any has masked steps at first, unmasked ones, masked ones at last."""
    start, stop = key_intervals(arrays, spec)
    ranges = visibility.key_ranges(start, stop, segment_ids(arrays), block, arrays["key"].shape[1], shifted=False)
    plan = visibility.plan_walk(ranges._replace(begin=whole_tiles(ranges.begin)), step, 1, False)
    # A block without a key walks one step that it does not see: its rows are written like all others.
    none = plan.head + plan.full + plan.tail == 0
    plan = plan._replace(begin=plan.begin * ~none, tail=plan.tail + none)
    # A row may begin at the very first key after the masked steps: one more of them, and all have begun.
    more = (plan.head > 0) * 1
    full = more * (plan.full > 0)
    tail = (more - full) * (plan.tail > 0)
    plan = plan._replace(head=plan.head + full + tail, full=plan.full - full, tail=plan.tail - tail)
    counts = plan.head, plan.full, plan.tail
    return longest_first(plan), [not isinstance(x, np.ndarray) or bool(x.any()) for x in counts]


def _wider(shapes: dict[str, Any]) -> int:
    dim = max(shapes["query"].shape[3], shapes["value"].shape[3])
    return next(size for size in DEFAULTS if dim <= size)


class PallasFlashAttention:
    """The implementation for Hopper."""

    name = "flash-sm90"
    version = 6
    forward = staticmethod(forward)

    @staticmethod
    def backward(arrays, spec, params, out, lse, dout, dlse, wanted) -> dict[str, Array]:
        """The wanted gradients; see ``flash_gradients``."""
        from ejkernel.kernels._pallas.gpu import flash_gradients

        return flash_gradients.backward(arrays, spec, params, out, lse, dout, dlse, wanted)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Blocks where nothing was tuned."""
        if direction == "backward":
            from ejkernel.kernels._pallas.gpu import flash_gradients

            return flash_gradients.defaults(shapes)
        return DEFAULTS[_wider(shapes)]

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
        """Blocks worth trying."""
        if direction == "backward":
            return [PallasFlashAttention.defaults(shapes, spec, device, direction)]
        names = ("q_blocksize", "kv_blocksize", "num_warps", "num_stages")
        return [FwdParams(**dict(zip(names, sizes, strict=True))) for sizes in SPACE[_wider(shapes)]]


kernel_registry.register(
    "flash_attention",
    Platform.PALLAS,
    Backend.GPU,
    priority=20,
    support=Support(
        # The instructions that it is made of (wgmma) are Hopper's alone.
        devices=cuda(90, 90),
        dtypes=HALF,
        head_dims=multiple_of(32, at_most=256),
        features={"causal", "window", "soft_cap", "segments", "varlen", "sinks", "gqa", "value_dim", "cross", "lse"},
        gradients={"query", "key", "value", "softmax_aux"},
    ),
)(PallasFlashAttention)
