"""What the forward and the backward share on the host: the plan of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels.common.intervals import intervals
from ejkernel.kernels.common.visibility import Walk

WARPS_PER_WARPGROUP = 4
# Rows of a warpgroup's product (wgmma): blocks of queries and keys are multiples of it.
ROWS = 64
# Rows of a tile in shared memory (a core matrix): TMA copies whole ones.
CORE_ROWS = 8
# Keys of one instruction of P·V.
CHUNK = 16
# Bytes of shared memory that a CTA may have.
SHARED_MEMORY = 232448
# Computing warpgroups in every kernel of the backward.
BACKWARD_CONSUMERS = 2


# Head dims that are multiples of it fill whole tiles of shared memory.
WHOLE_COLUMNS = 32


def panel_of(dim: int, whole_rows: bool = True) -> int | None:
    """Columns of the panels in which a head lies in shared memory; None where it fills whole tiles, which is one copy.

    Few panels are few copies, but what is missing in the last one takes shared memory, and time to fill. ``whole_rows``:
    whether all lengths are multiples of 8; if not, rows fill no whole tiles either.

    Example:
        >>> [panel_of(dim) for dim in (40, 72, 80, 96, 112)]
        [64, 32, 32, None, 64]
        >>> [panel_of(dim, whole_rows=False) for dim in (64, 96, 128)]
        [64, 32, 64]
    """
    if dim % WHOLE_COLUMNS == 0 and whole_rows:
        return None
    return 2 * WHOLE_COLUMNS if -dim % (2 * WHOLE_COLUMNS) < WHOLE_COLUMNS else WHOLE_COLUMNS


def shared_columns(dim: int) -> int:
    """How many columns a head takes in shared memory."""
    return dim + -dim % (panel_of(dim) or 1)


def tail_of(dim: int, whole_rows: bool = True) -> int | None:
    """Columns of the second panel, behind the first 64, in which the single backward kernel has a head; None: there is none.

    Example:
        >>> [tail_of(dim) for dim in (64, 72, 80, 96, 112, 128)]
        [None, 16, 16, 32, 64, None]
        >>> [tail_of(dim, whole_rows=False) for dim in (64, 128)]
        [None, 64]
    """
    largest = 2 * ROWS - whole_rows
    return next(x for x in (CHUNK, 2 * CHUNK, ROWS) if dim <= ROWS + x) if ROWS < dim <= largest else None


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """What every kernel is told of a call.

    Attributes:
        group: query heads that share a key head.
        dim, value_dim: of a head.
        scale, cap: of the logits; a cap of 0 is none.
        left, right: what is added to a row for the first key that it sees, and the first that it no longer sees; or
            None.
        kv_len: the number of keys.
        packed, segments: which of the arrays that decide which pairs count there are.
        bias, mask: whether there is an array that says something of every pair.
        dropout: the probability with which a weight is dropped.
        whole_rows: whether all lengths are multiples of 8, the height of a tile in shared memory. If not, heads lie in panels,
            see ``panels``.
        interpreted: run in JAX's interpreter, which has no products with a left operand in registers.
    """

    group: int
    dim: int
    value_dim: int
    scale: float
    cap: float
    left: int | None
    right: int | None
    kv_len: int
    packed: bool
    segments: bool
    bias: bool = False
    mask: bool = False
    dropout: float = 0.0
    whole_rows: bool = True
    interpreted: bool = False

    @property
    def head_panel(self) -> int | None:
        """Columns of the panels of queries and keys, if they lie in panels."""
        return panel_of(self.dim, self.whole_rows)

    @property
    def value_panel(self) -> int | None:
        """Of values."""
        return panel_of(self.value_dim, self.whole_rows)


def has_whole_rows(*lengths: int) -> bool:
    """Whether tiles of 8 rows end where arrays of these lengths end."""
    return all(length % CORE_ROWS == 0 for length in lengths)


def pad_rows(x: Array) -> Array:
    """Rows to a multiple of 8, the height of a tile in shared memory; copies only where there are others."""
    missing = -x.shape[1] % CORE_ROWS
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x


def pad_columns(x: Array, dim: int) -> Array:
    """Zeros after the last of a head's dims; copies only where some are missing."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, dim - x.shape[3]))) if x.shape[3] < dim else x


def whole_tiles(row):
    """The row where a loop may begin: TMA copies whole tiles, and silently drops the remainder of a row."""
    return row // CORE_ROWS * CORE_ROWS


def key_intervals(arrays: dict[str, Array], spec: Any):
    if "kv_start" in arrays:
        return arrays["kv_start"], arrays["kv_stop"]
    return intervals(spec.window, arrays["query"].shape[1], arrays["key"].shape[1])


def segment_ids(arrays: dict[str, Array]):
    ids = arrays.get("q_segment_ids")
    return None if ids is None else (ids, arrays["kv_segment_ids"])


def statics(arrays: dict[str, Array], spec: Any) -> dict[str, Any]:
    """The fields of ``KernelConfig``, but for how it runs."""
    q_len, heads, dim = arrays["query"].shape[1:]
    kv_len, kv_heads, value_dim = arrays["value"].shape[1:]
    left, right = spec.window
    shift = kv_len - q_len
    return {
        "group": heads // kv_heads,
        "dim": dim,
        "value_dim": value_dim,
        "scale": float(spec.softmax_scale),
        # Logits that are all 0 need no cap.
        "cap": float(spec.logits_soft_cap or 0.0) if spec.softmax_scale else 0.0,
        "left": None if left is None else shift - left,
        "right": None if right is None else shift + right + 1,
        "kv_len": kv_len,
        "packed": "kv_start" in arrays,
        "segments": "q_segment_ids" in arrays,
        "bias": "bias" in arrays,
        "mask": "attention_mask" in arrays,
        "dropout": spec.dropout_prob if "dropout_key" in arrays else 0.0,
    }


def longest_first(plan: Walk) -> Array:
    """``[B|1, blocks, 5]``: where a block begins, its masked, unmasked and masked steps, its index.

    Blocks with most steps come first: what starts last should be short, or one CTA still runs when all others are done.
    Of equals the last comes first.

    Example:
        >>> longest_first(Walk(*np.array([[[0, 0]], [[8, 16]], [[1, 1]], [[0, 1]], [[0, 0]]]))).tolist()
        [[[0, 1, 1, 0, 1], [0, 1, 0, 0, 0]]]
    """
    xp = np if isinstance(plan.begin, np.ndarray) else jnp
    steps = plan.head + plan.full + plan.tail
    block = np.broadcast_to(np.arange(steps.shape[1], dtype=np.int32), steps.shape)
    order = xp.argsort(-(steps * steps.shape[1] + block), axis=1)
    columns = (plan.begin, plan.head, plan.full, plan.tail, block)
    return jnp.asarray(xp.stack([xp.take_along_axis(x, order, 1) for x in columns], -1), jnp.int32)


def mask_vectors(arrays: dict[str, Array], rows: int, keys: int) -> dict[str, Array]:
    """The arrays that decide which pairs count, padded: kernels read whole blocks, past the last row and key too."""
    names = {
        "start": ("kv_start", rows),
        "stop": ("kv_stop", rows),
        "q_ids": ("q_segment_ids", rows),
        "kv_ids": ("kv_segment_ids", keys),
        "padding": ("padding", keys),
    }
    return {name: padded(arrays[source], size) for name, (source, size) in names.items() if source in arrays}


def padded(x: Array, size: int, value: float = 0) -> Array:
    """The last axis as long as ``size``."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])], constant_values=value)
