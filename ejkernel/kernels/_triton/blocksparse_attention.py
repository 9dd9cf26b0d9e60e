"""Block-sparse attention in Triton: the kernels of flash attention, with lists of blocks in the place of walks.

A tile lies within a block of the mask: as large as flash attention's where the block is, else as the block. Where blocks
are of no power of two, a tile may end early; then every step is masked.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.callib.integers import power_of_two
from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels._triton import flash_blocks
from ejkernel.kernels._triton.flash_attention import WIDEST_PAIR, FlashOperands, Walks, run_backward, run_forward
from ejkernel.kernels._triton.flash_blocks import READ_BACKWARD, READ_FORWARD, SMALLEST_SIDE
from ejkernel.kernels._triton.registering import register
from ejkernel.kernels.common.block_lists import Blocks, transposed
from ejkernel.kernels.common.intervals import intervals
from ejkernel.kernels.common.softmax import softmax_residuals


class ListedSpec(NamedTuple):
    """What flash attention's kernels ask of a spec, and the sides of the mask's blocks."""

    window: tuple[int | None, int | None]
    softmax_scale: float
    logits_soft_cap: float | None
    sizes: tuple[int, int]
    dropout_prob: float = 0.0

    @classmethod
    def of(cls, spec: Any) -> ListedSpec:
        """From the operation's."""
        return cls(spec.window, spec.softmax_scale, spec.logits_soft_cap, spec.grid.sizes)


def forward(
    arrays: dict[str, Any], spec: Any, params: FwdParams, *, device: DeviceInfo | None = None
) -> tuple[Array, Array]:
    """Attention output ``[B, Sq, H, Dv]`` and the log-sum-exp of its logits ``[B, H, Sq]``."""
    return run_forward(ListedOperands, arrays, ListedSpec.of(spec), _effective(params, spec, device), device)


def backward(
    arrays: dict[str, Any],
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
    *statistics, arrays = softmax_residuals(
        arrays, out, lse, dout, dlse, rows_may_see_nothing="kv_start" in arrays or not _each_row_sees_each_block(spec)
    )
    params = _effective(params, spec, device)
    return run_backward(ListedOperands, arrays, ListedSpec.of(spec), params, tuple(statistics), wanted, device)


def _each_row_sees_each_block(spec: Any) -> bool:
    """Whether a block of keys of which a block of queries sees anything is seen in part by all its rows, whatever the mask."""
    (q_len, kv_len), (q_size, kv_size) = spec.grid.lengths, spec.grid.sizes
    start, stop = (x[0] for x in intervals(spec.window, q_len, kv_len))
    first = np.arange(q_len) // q_size * q_size
    ends = start // kv_size, (stop - 1) // kv_size
    return bool((start < stop).all() and all((end == end[first]).all() for end in ends))


class ListedOperands(FlashOperands):
    """Walks are lists. One array holds both the table that has four numbers a block, as of a walk, and the lists: the first
    of the four is where in the array a list begins.
    """

    def __init__(self, arrays: dict[str, Any], spec: ListedSpec, q_block: int, kv_block: int, device: Any):
        super().__init__(arrays, spec, q_block, kv_block, device)
        self.q_size, self.kv_size = spec.sizes
        self.q_blocks = _tiles(self.q_len, self.q_size, self.bm)
        self.kv_blocks = _tiles(self.kv_len, self.kv_size, self.bn)
        self.lists: Blocks = arrays["blocks"]

    def key_walks(self) -> Walks:
        """For each block of queries its list of blocks of keys."""
        blocks = -(-self.kv_len // self.kv_size)
        return self._listed(self.lists, blocks, self.kv_size, self.bn, self.kv_len % self.kv_size > 0)

    def query_walks(self) -> Walks:
        """For each block of keys its list of blocks of queries."""
        kv_heads = self.arrays["key"].shape[2]
        lists = transposed(self.lists, -(-self.kv_len // self.kv_size), kv_heads, self.q_len // self.q_size)
        blocks = -(-self.q_len // self.q_size)
        if self.own_lists:
            blocks *= self.query.shape[2] // kv_heads
        cut = self.q_len % self.q_size > 0 or self.kv_len % self.kv_size > 0
        return self._listed(lists, blocks, self.q_size, self.bm, cut)

    @property
    def own_lists(self) -> bool:
        """Whether each query head has lists of its own."""
        return self.lists.start.shape[1] > 1

    def _listed(self, lists: Blocks, blocks: int, size: int, side: int, cut: bool) -> Walks:
        """A table and its lists, of numbers below ``blocks``; ``cut``: some block lies partly past the end of an axis."""
        segments = "q_segment_ids" in self.arrays
        unmasked = not segments and size % side == 0
        masked = not unmasked or cut or self.spec.window != (None, None) or "kv_start" in self.arrays
        parts = -(-size // side)
        start, full, count, index = lists
        batch, length = max(x.shape[0] for x in lists), index.shape[1]
        full = (full if masked else count) if unmasked else jnp.zeros_like(full)
        entries = batch * math.prod(start.shape[1:])
        start = start + jnp.arange(index.shape[0], dtype=jnp.int32)[:, None, None] * length + 4 * entries
        columns = (start, jnp.zeros_like(start), full * parts, (count - full) * parts)
        shape = (batch, *start.shape[1:])
        table = jnp.stack([jnp.broadcast_to(x, shape) for x in columns], -1)
        # A loop reads an entry further than its list goes.
        walks = jnp.concatenate([table.reshape(-1), jnp.minimum(index, blocks - 1).reshape(-1), start[0, 0, :1]])
        return Walks(walks, entries // batch if batch > 1 else 0, unmasked, masked)

    def constants(self, full: bool, partial: bool, **more: Any) -> Any:
        """What the kernels are compiled for."""
        sides = {"q_size": self.q_size, "kv_size": self.kv_size, "own_lists": self.own_lists}
        return super().constants(full, partial, **sides, **more)


def _tiles(length: int, size: int, side: int) -> int:
    """How many tiles the blocks of an axis are cut into; the last block may take fewer than others."""
    whole = (length - 1) // size
    return whole * -(-size // side) + -(-(length - whole * size) // side)


def _side(wanted: int, size: int) -> int:
    """A tile's side in a block: it divides the block if a power of two from 16 on does."""
    side = math.gcd(wanted, size)
    return side if side >= SMALLEST_SIDE else min(wanted, max(SMALLEST_SIDE, power_of_two(size)))


def _effective(params: FwdParams | BwdParams, spec: Any, device: DeviceInfo | None) -> FwdParams | BwdParams:
    used = flash_blocks.effective(params, device).to_dict()
    for names, size in zip(
        (("q_blocksize", "blocksize_m"), ("kv_blocksize", "blocksize_n")), spec.grid.sizes, strict=True
    ):
        used |= {name: _side(used[name], size) for name in names if used.get(name)}
    return type(params)(**used)


class TritonBlockSparseAttention:
    """The implementation for GPUs."""

    name = "blocksparse-triton"
    version = 1
    reads: ClassVar = {"forward": READ_FORWARD, "backward": READ_BACKWARD}
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Tiles of flash attention, as far as the mask's blocks hold them."""
        if device.vendor == "nvidia" and device.capability // 10 == 10:
            # A list takes registers: Blackwell's larger tiles would spill.
            device = dataclasses.replace(device, capability=90)
        wanted = flash_blocks.default(shapes, ListedSpec.of(spec), device, direction)
        used = _effective(wanted, spec, device)
        if flash_blocks.widest(shapes) <= WIDEST_PAIR:
            # Warps share the rows of what a program owns.
            own = "q_blocksize" if direction == "forward" else "kv_blocksize"
            fewer = max(4, wanted.num_warps * getattr(used, own) // getattr(wanted, own))
            used = dataclasses.replace(used, num_warps=min(fewer, wanted.num_warps))
        elif direction == "backward" and used.blocksize_m < wanted.blocksize_m:
            # The kernel for fewer queries has half as many warps, whose registers hold no 64 of such rows.
            used = dataclasses.replace(used, blocksize_m=min(used.blocksize_m, 32))
        return used

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
        """Tiles worth trying."""
        found = flash_blocks.candidates(shapes, ListedSpec.of(spec), device, direction)
        return list(dict.fromkeys(_effective(params, spec, device) for params in found))

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The parameters as the kernels use them."""
        return _effective(params, spec, device)


register(
    "blocksparse_attention",
    features={
        "causal",
        "window",
        "traced_window",
        "soft_cap",
        "segments",
        "sinks",
        "gqa",
        "value_dim",
        "cross",
        "head_masks",
        "uneven_blocks",
        "lse",
    },
    gradients={"query", "key", "value", "softmax_aux"},
)(TritonBlockSparseAttention)
