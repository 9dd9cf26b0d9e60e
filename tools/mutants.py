"""Whether the tests bite: plants faults of one line, one at a time, and reports which of them ``make test`` catches.

    python tools/mutants.py                      # all of them, hours; the table goes to docs/mutants.md
    python tools/mutants.py "ring-*" store-lock  # some, by name or pattern
    python tools/mutants.py --likely-only        # only the test files that should catch each fault
    python tools/mutants.py --full NAME ...      # `make test-full` instead, for what `make test` misses
    python tools/mutants.py --check              # that every fault still fits the code; runs no test

A fault is planted in a copy of the tracked files, never in the working tree. The commands are those of the Makefile, as
``make -n`` prints them. Of a lane's tests the likely files run first, the others only if those pass. A test that fails
without the fault too catches nothing: it is left out, and named at the end.

Lanes: ``plain`` is the main process of ``make test``, ``triton`` the one with ``TRITON_INTERPRET=1``, ``mosaic`` the main
process on an environment with jax >= 0.11, whose interpreter runs Mosaic GPU kernels (``--mosaic-venv``).
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "mutants.md"
LANES = ("plain", "triton", "mosaic")
NOTHING_COLLECTED = 5


@dataclass(frozen=True)
class Fault:
    """A line that is changed, and what that breaks.

    ``old`` is in the file exactly once. ``likely`` are the test files that should notice, the likeliest first.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    likely: tuple[str, ...]
    lane: str

    def planted(self, text: str) -> str:
        return text.replace(self.old, self.new)


def faults(file: str, likely: str, *planted: tuple[str, ...], lane: str = "plain") -> list[Fault]:
    """Faults of one file as ``(name, old, new, what it breaks)``, or with likely files of their own as a fifth."""
    return [
        Fault(
            name,
            f"ejkernel/{file}",
            old,
            new,
            breaks,
            tuple(f"tests/test_{test}.py" for test in (own[0] if own else likely).split()),
            lane,
        )
        for name, old, new, breaks, *own in planted
    ]


XLA_FLASH = [
    *faults(
        "kernels/common/intervals.py",
        "values gradients",
        (
            "causal-off-by-one",
            "stop = np.full_like(position, kv_len) if right is None else position + right + 1",
            "stop = np.full_like(position, kv_len) if right is None else position + right",
            "a causal query does not see its own key",
        ),
        (
            "window-left-bound",
            "start = np.zeros_like(position) if left is None else position - left",
            "start = np.zeros_like(position) if left is None else position - left + 1",
            "the leftmost key of a window is hidden",
        ),
    ),
    *faults(
        "kernels/common/precision.py",
        "values gradients",
        (
            "float64-accumulated-in-float32",
            "return jnp.float64 if array.dtype == jnp.float64 else jnp.float32",
            "return jnp.float32",
            "float64 inputs are accumulated in float32",
        ),
    ),
    *faults(
        "kernels/common/visibility.py",
        "values gradients",
        (
            "scattered-segment-unmasked",
            "full = (least == high) & (high > 0) & (count == full_end - full_begin)",
            "full = (least == high) & (high > 0)",
            "between the keys of a segment that is not in one place, keys of others are seen",
        ),
        (
            "partial-keys-unmasked",
            "partial = first == first[-1]",
            "partial = first > first[-1]",
            "the keys that a last, partial block shares with its neighbour have their gradient twice",
            "gradients",
        ),
    ),
    *faults(
        "kernels/common/softmax.py",
        "gradients",
        (
            "sink-gradient-sign",
            "return sum_shared(sinks, -sink_terms(sinks, finite_lse, slope).sum(-1))",
            "return sum_shared(sinks, sink_terms(sinks, finite_lse, slope).sum(-1))",
            "the sinks' gradient has the wrong sign",
        ),
        (
            "lse-cotangent-sign",
            "return row_sum(out.astype(acc) * dout.astype(acc)) - dlse",
            "return row_sum(out.astype(acc) * dout.astype(acc)) + dlse",
            "the lse's cotangent has the wrong sign",
        ),
    ),
    *faults(
        "kernels/common/dropout.py",
        "values gradients",
        (
            "dropout-row-ignored",
            "return fold(mix(head_key ^ row.astype(jnp.uint32) * jnp.uint32(ROW_STRIDE)))",
            "return fold(mix(head_key ^ row.astype(jnp.uint32) * jnp.uint32(0)))",
            "every query drops the same keys",
        ),
    ),
    *faults(
        "kernels/_xla/tiles.py",
        "values gradients",
        (
            "half-precision-scale-dropped",
            "            s = s * self.spec.softmax_scale\n",
            "            pass\n",
            "half precision has unscaled logits",
        ),
        (
            "sink-left-out",
            "return top, (top > -jnp.inf).astype(self.acc)",
            "return top, jnp.zeros_like(top)",
            "sinks are not in the denominator",
        ),
    ),
    *faults(
        "kernels/_xla/online_softmax.py",
        "values gradients",
        (
            "soft-cap-slope",
            "return cap * bounded, 1 - bounded * bounded",
            "return cap * bounded, 1 - bounded",
            "the soft cap's derivative is wrong",
            "gradients",
        ),
        (
            "dropout-in-denominator",
            "total = total * decay + weights.sum(-1)",
            "total = total * decay + (weights if drop is None else drop(weights)).sum(-1)",
            "dropout changes the lse and the softmax's denominator",
        ),
        (
            "lse-without-maximum",
            "return jnp.where(total == 0, -jnp.inf, top + jnp.log(total))",
            "return jnp.where(total == 0, -jnp.inf, jnp.log(total))",
            "the lse lacks the running maximum",
        ),
        (
            "empty-row-shift",
            "shift = jnp.where(new_top == -jnp.inf, 0, new_top)",
            "shift = new_top",
            "a row whose first block shows it nothing is NaN",
        ),
        (
            "empty-row-divided",
            "return jnp.where(empty, 0, acc / total[..., None])",
            "return acc / total[..., None]",
            "a row that sees nothing is NaN instead of 0",
        ),
        (
            "unseeing-row-cotangent",
            "return finite_lse, jnp.where(lse == -jnp.inf, 0, slope)",
            "return finite_lse, slope",
            "a NaN cotangent of a row that sees nothing reaches gradients",
            "gradients",
        ),
        (
            "splits-merged-without-share",
            "total, acc = (total * share).sum(1), (acc * share[..., None]).sum(1)",
            "total, acc = (total * share).sum(1), acc.sum(1)",
            "splits of a context are added up with different maxima",
            "page_attention values",
        ),
    ),
    *faults(
        "kernels/_xla/flash_tiles.py",
        "values gradients",
        (
            "dropout-not-rescaled",
            "return jnp.where(kept, 1 / (1 - self.spec.dropout_prob), 0).astype(self.acc)",
            "return jnp.where(kept, 1, 0).astype(self.acc)",
            "kept weights are not scaled by 1 / (1 - p)",
        ),
        (
            "dropout-head-index",
            "head = (h0 * self.g + jnp.arange(self.h * self.g, dtype=jnp.int32)).reshape(self.h, self.g, 1)",
            "head = (h0 + jnp.arange(self.h * self.g, dtype=jnp.int32)).reshape(self.h, self.g, 1)",
            "with grouped heads, what is dropped depends on how many heads a step takes",
        ),
        (
            "segment-0-visible",
            "seen &= (q_ids == kv_ids) & (q_ids > 0)",
            "seen &= (q_ids == kv_ids) & (q_ids >= 0)",
            "padding (segment 0) attends to padding",
        ),
        (
            "bias-minus-infinity-visible",
            'seen &= self.tile(self.arrays["bias"], b0, h0, q0, k0) > -jnp.inf',
            'seen &= self.tile(self.arrays["bias"], b0, h0, q0, k0) >= -jnp.inf',
            "NaN in a key that a bias of -inf hides reaches the output",
        ),
        (
            "hidden-keys-kept",
            "return self._hide(blocks, jnp.broadcast_to(seen, (self.b, self.h, self.kv_block)))",
            "return blocks",
            "NaN in a key that no query sees reaches the output",
        ),
        (
            "partial-block-counted-twice",
            "seen = (column >= jnp.maximum(start, columns[0])) & (column < jnp.minimum(stop, columns[1]))",
            "seen = (column >= start) & (column < jnp.minimum(stop, columns[1]))",
            "the keys that a last, partial block shares with its neighbour count twice",
        ),
        (
            "bias-gradient-averaged",
            "block = ds.sum(tuple(axis for axis, kept in enumerate(keep) if not kept), keepdims=True)",
            "block = ds.mean(tuple(axis for axis, kept in enumerate(keep) if not kept), keepdims=True)",
            "a bias's gradient is not summed over the axes that it is broadcast along",
            "gradients",
        ),
    ),
    *faults(
        "kernels/_xla/flash_attention.py",
        "gradients",
        (
            "key-gradient-scaled-twice",
            '"key": (dk if p.prescaled else dk * spec.softmax_scale).astype(key.dtype),\n        "value": dv',
            '"key": (dk * spec.softmax_scale).astype(key.dtype),\n        "value": dv',
            "the keys' gradient has the scale twice in float32",
        ),
        (
            "dropped-weights-in-value-gradient",
            "dv = dv + dot(kept.astype(v.dtype), do, -1, -2, p.acc)",
            "dv = dv + dot(weights.astype(v.dtype), do, -1, -2, p.acc)",
            "the values' gradient ignores dropout",
        ),
    ),
    *faults(
        "ops/flash_attention.py",
        "values",
        (
            "packed-aligned-top-left",
            "position = jnp.arange(q_len, dtype=jnp.int32) - q_end + k_end",
            "position = jnp.arange(q_len, dtype=jnp.int32) - cum_q[sequence] + k_first",
            "causality in packed sequences is aligned top-left",
        ),
        (
            "integer-mask-of-ones",
            "mask = mask if mask.dtype == bool else mask != 0",
            "mask = mask if mask.dtype == bool else mask == 1",
            "an integer mask attends only where it is 1",
        ),
    ),
]

PAGE_ATTENTION = [
    *faults(
        "kernels/_xla/pages.py",
        "page_attention values",
        (
            "page-window-first-key",
            "jnp.maximum(lens - 1 - self.spec.left, 0)",
            "jnp.maximum(lens - self.spec.left, 0)",
            "the leftmost token of a window is hidden",
        ),
        (
            "page-key-garbage-in-gradient",
            "keys, values = self.hidden(place, self.keys(place)), self.values(place)",
            "keys, values = self.keys(place), self.values(place)",
            "NaN in a page's unused tail reaches the query's gradient",
            "page_attention gradients",
        ),
    ),
    *faults(
        "kernels/_xla/page_walks.py",
        "page_attention",
        (
            "page-tail-garbage",
            "return jnp.where(place.seen[:, None], tokens, 0)",
            "return tokens",
            "NaN in a last page's unused tail reaches the output",
        ),
        (
            "page-beyond-its-split",
            'end = jnp.minimum(_row(self.arrays["context_lens"], b), stop * self.block_size)',
            'end = _row(self.arrays["context_lens"], b)',
            "a split reads block 0 in place of pages that the next split has",
        ),
        (
            "page-shared-gradient-lost",
            "tokens = lax.cond((owned & ~first).any(), joined, lambda tokens: tokens, tokens)",
            "tokens = lax.cond((first & ~owned).any(), joined, lambda tokens: tokens, tokens)",
            "of the sequences that share a block only one adds to its gradient",
            "page_attention gradients",
        ),
    ),
    *faults(
        "kernels/_xla/page_attention.py",
        "page_attention gradients",
        (
            "page-v-scale-dropped",
            'out = online_softmax.output(total, acc, (total == 0)[..., None]) * p.factor("v_scale")',
            "out = online_softmax.output(total, acc, (total == 0)[..., None])",
            "v_scale is ignored",
            "page_attention values",
        ),
        (
            "page-v-scale-gradient-of-one-head",
            'grads["v_scale"] = _like(arrays["v_scale"], dv_scale.sum(2))',
            'grads["v_scale"] = _like(arrays["v_scale"], dv_scale[:, :, 0])',
            "v_scale's gradient is not summed over the query heads of a group",
        ),
        (
            "page-length-0-in-k-scale-gradient",
            'products = jnp.where(bare, 0, p.by_head(arrays["query"])) * dq',
            'products = p.by_head(arrays["query"]) * dq',
            "a NaN query of a context of length 0 reaches k_scale's gradient",
        ),
    ),
]

BLOCKSPARSE_ATTENTION = [
    *faults(
        "ops/blocksparse_attention.py",
        "blocksparse_attention values",
        (
            "blocksparse-partial-keys-unmasked",
            "every &= columns + kv_size <= kv_len",
            "every &= columns < kv_len",
            "the keys that a partial block shares with its neighbour count twice",
        ),
        (
            "blocksparse-masked-block-as-full",
            'order = np.argsort(~(kept & full)[entry], axis=-1, kind="stable")',
            'order = np.argsort(~kept[entry], axis=-1, kind="stable")',
            "blocks that need a mask are listed among those that need none",
        ),
        (
            "blocksparse-parts-of-a-block",
            "mask = xp.repeat(xp.repeat(mask, self.parts[0], 2), self.parts[1], 3)",
            "mask = xp.repeat(xp.repeat(mask, self.parts[1], 2), self.parts[0], 3)",
            "a block that a kernel cuts into parts is cut by the other axis' number",
        ),
    ),
    *faults(
        "kernels/_xla/blocksparse_attention.py",
        "blocksparse_attention values gradients",
        (
            "blocksparse-head-mask-index",
            'lists, head = self.arrays["blocks"], q_head if self.own_heads else 0',
            'lists, head = self.arrays["blocks"], h0 if self.own_heads else 0',
            "with grouped heads a query head uses another head's mask",
        ),
        (
            "blocksparse-shifted-queries-unmasked",
            "full = jnp.where(tile.q0 == tile.first_row, full, 0)",
            "full = jnp.where(tile.q0 <= tile.first_row, full, 0)",
            "queries that a last, partial block shares with its neighbour have their gradient twice",
            "gradients blocksparse_attention",
        ),
    ),
    *faults(
        "patterns.py",
        "blocksparse_attention docs",
        (
            "pattern-local",
            "abs(behind) <= n",
            "abs(behind) < n",
            "local(n) lacks the n-th block on either side",
        ),
    ),
]

RING_ATTENTION = [
    *faults(
        "kernels/common/ring.py",
        "ring_attention",
        (
            "ring-hop-direction",
            "pairs = [(d, (d + distance) % self.size) for d in range(self.size)]",
            "pairs = [(d, (d - distance) % self.size) for d in range(self.size)]",
            "keys go round the other way, so a step has another device's than it masks for",
        ),
        (
            "ring-causal-step",
            "return lax.cond(source < own, lambda c: compute(_Part(), c), lambda c: c, carry)",
            "return lax.cond(source > own, lambda c: compute(_Part(), c), lambda c: c, carry)",
            "a causal ring attends to later shards instead of earlier ones",
        ),
        (
            "ring-zigzag-chunk",
            "earlier, later = _Part(keys=slice(half)), _Part(queries=slice(half, None))",
            "earlier, later = _Part(keys=slice(half, None)), _Part(queries=slice(half, None))",
            "of an earlier device's two chunks the later one is used",
        ),
        (
            "ring-zigzag-position",
            "(2 * self.size - 1 - own) * half + i - half)",
            "(2 * self.size - own) * half + i - half)",
            "a window in the zigzag layout is a chunk off for the second half",
        ),
        (
            "ring-ends-early",
            "return min(self.size - 1, -(-left // self.length))",
            "return min(self.size - 1, left // self.length)",
            "the shard in which a window begins is not visited",
        ),
        (
            "ring-gradients-not-home",
            "home = ring.hop({name: grads[name] for name in names[1:]}, -ring.last_step)",
            "home = ring.hop({name: grads[name] for name in names[1:]}, ring.last_step)",
            "the keys' gradients end on another device",
        ),
    ),
]

RECURRENT = [
    *faults(
        "kernels/_xla/cells.py",
        "recurrent values",
        (
            "lstm-gate-order",
            "i, f, g, o = jnp.split(",
            "f, i, g, o = jnp.split(",
            "input and forget gate are swapped",
        ),
        (
            "gru-reset-gate",
            "n = jnp.tanh(zx[2] + r * zh[2])",
            "n = jnp.tanh(r * (zx[2] + zh[2]))",
            "the reset gate acts on the inputs too, which is not PyTorch's GRU",
        ),
    ),
    *faults(
        "kernels/_xla/recurrent.py",
        "recurrent values gradients",
        (
            "recurrent-length-off-by-one",
            "alive = (t < self.lengths)[:, None]",
            "alive = (t <= self.lengths)[:, None]",
            "the first step after a sequence's end changes its state",
        ),
        (
            "recurrent-output-past-the-end",
            "(shown,) = self.only_alive(t, new[:1], (jnp.zeros_like(new[0]),))",
            "(shown,) = self.only_alive(t, new[:1], state[:1])",
            "outputs past the end repeat the last state instead of 0",
        ),
        (
            "recurrent-reverse-start",
            "last = jnp.arange(self.steps, dtype=jnp.int32) == self.lengths[:, None] - 1",
            "last = jnp.arange(self.steps, dtype=jnp.int32) == self.lengths[:, None]",
            "in reverse with lengths, the first step's gradient does not know the initial state",
            "recurrent gradients",
        ),
        (
            "recurrent-bidirectional-state",
            "self.start = tuple(state[:, index].astype(self.acc)",
            "self.start = tuple(state[:, 0].astype(self.acc)",
            "the reverse direction starts from the forward direction's state",
        ),
    ),
]

MEAN_POOLING = [
    *faults(
        "kernels/_xla/mean_pooling.py",
        "mean_pooling values",
        (
            "pooling-mask-leak",
            "kept = inputs if mask is None else jnp.where(mask[..., None], inputs, 0)",
            "kept = inputs if mask is None else inputs * mask[..., None]",
            "NaN in a masked token reaches the mean",
        ),
        (
            "pooling-empty",
            "return jnp.maximum(mask.sum(1, dtype=jnp.int32), 1).astype(acc)[:, None]",
            "return mask.sum(1, dtype=jnp.int32).astype(acc)[:, None]",
            "an empty sequence gives NaN instead of 0",
        ),
        (
            "pooling-last-sequence",
            "return lax.fori_loop(jnp.int32(0), jnp.int32(sequences), one, means)",
            "return lax.fori_loop(jnp.int32(0), jnp.int32(sequences - 1), one, means)",
            "the last packed sequence gives 0",
        ),
        (
            "pooling-boundary-token",
            'jnp.searchsorted(ends, token, side="right")',
            'jnp.searchsorted(ends, token, side="left")',
            "a sequence's first token gets the gradient of the sequence before",
            "mean_pooling gradients",
        ),
    ),
]

GROUPED_MATMUL = [
    *faults(
        "ops/grouped_matmul.py",
        "grouped_matmul values",
        (
            "grouped-offset-ignored",
            "bounds = bounds.at[first + jnp.arange(b.shape[0] + 1, dtype=jnp.int32)].get(",
            "bounds = bounds.at[jnp.arange(b.shape[0] + 1, dtype=jnp.int32)].get(",
            "group_offset is ignored",
        ),
    ),
    *faults(
        "kernels/_xla/grouped_matmul.py",
        "grouped_matmul values gradients",
        (
            "grouped-rows-past-the-sum",
            "return (rows >= first) & (rows < stop)",
            "return rows >= first",
            "rows past sum(group_sizes) are not 0",
        ),
        (
            "grouped-transpose-in-backward",
            'grads["a"] = rows(dout[0], b[0], bounds, not spec.transpose_b, large',
            'grads["a"] = rows(dout[0], b[0], bounds, spec.transpose_b, large',
            "the gradient of a multiplies by b instead of its transpose",
            "gradients grouped_matmul",
        ),
        (
            "grouped-sum-not-reset",
            "total = jnp.where(opens, 0, total) + _dot(x.T, y, -1, -2, accumulator)",
            "total = total + _dot(x.T, y, -1, -2, accumulator)",
            "on accelerators the gradient of b holds the sums of the groups before",
            "grouped_matmul",
        ),
    ),
]

TRITON = [
    *faults(
        "kernels/_triton/flash_pieces.py",
        "values gradients triton_interpreted",
        (
            "triton-mask-bound",
            "seen = cols < stop\n",
            "seen = cols <= stop\n",
            "a query sees the first key after its interval",
        ),
        (
            "triton-packed-start",
            "if C.left or C.packed:",
            "if C.left:",
            "packed queries see keys of the sequences before",
        ),
        (
            "triton-packed-batch",
            "at = batch * per_batch + rows",
            "at = rows",
            "vmapped packed calls all use the first one's sequences",
            "vmap",
        ),
        (
            "triton-dropout-key",
            "((head + 1).to(tl.uint32) * 0x85EBCA77)",
            "(head.to(tl.uint32) * 0x85EBCA77)",
            "Triton drops other weights than the other platforms",
            "triton_interpreted values",
        ),
        (
            "triton-segment-garbage",
            "return (self.packed or self.segments) and not (self.mask or self.bias)",
            "return self.packed and not (self.mask or self.bias)",
            "NaN in padding between segments reaches the output",
            "triton_interpreted values",
        ),
        lane="triton",
    ),
    *faults(
        "kernels/_triton/flash_kernels.py",
        "gradients triton_interpreted",
        (
            "triton-key-gradient-scale",
            "store_rows(dk + k_base, k_first, dk_acc * C.scale, in_k,",
            "store_rows(dk + k_base, k_first, dk_acc, in_k,",
            "the keys' gradient lacks the scale",
        ),
        (
            "triton-gradient-of-one-head",
            "for t in tl.range(0, C.group * full):",
            "for t in tl.range(0, full):",
            "key gradients of unmasked steps are not summed over the group",
        ),
        (
            "triton-head-of-a-group",
            "return k_head * C.group + t // steps, t % steps",
            "return k_head + t // steps, t % steps",
            "a key's gradient comes from the query heads of another key",
        ),
        (
            "triton-bias-gradient-of-one-entry",
            "for step in range(batches_each * heads_each * q_each * k_each):",
            "for step in range(heads_each * q_each * k_each):",
            "a bias's gradient is not summed over the batch that shares it",
        ),
        (
            "triton-sink-units",
            "tl.load(sinks + batch * sink_batch + head) * LOG2E",
            "tl.load(sinks + batch * sink_batch + head)",
            "sinks are taken as logits of base 2",
            "values triton_interpreted",
        ),
        lane="triton",
    ),
    *faults(
        "kernels/_triton/flash_attention.py",
        "gradients triton_interpreted",
        (
            "triton-lse-units",
            "residuals = [dout, finite_lse * LOG2E, slope]",
            "residuals = [dout, finite_lse, slope]",
            "the backward takes the natural lse for one of base 2",
        ),
        lane="triton",
    ),
    *faults(
        "kernels/_triton/flash_pieces.py",
        "triton",
        (
            "triton-32-bit-offset",
            "base += first_row.to(tl.int64) * row_stride",
            "base += first_row * row_stride",
            "a mask or a bias of more than 2**31 elements is read at wrong places",
        ),
    ),
    *faults(
        "kernels/_triton/flash_blocks.py",
        "triton",
        (
            "triton-blocks-of-small-chips",
            "256: ((32, 32, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),",
            "256: ((128, 64, 4, 2), (32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),",
            "the default blocks do not fit the shared memory of small chips",
        ),
    ),
    *faults(
        "kernels/_triton/cache.py",
        "triton",
        (
            "triton-cache-key",
            "path = _path(str(ttir), str(options), *map(str, rest))",
            "path = _path(str(ttir), *map(str, rest))",
            "a kernel that was compiled with other options is taken from the cache",
        ),
    ),
]

SM90 = "kernels/_pallas/gpu/flash_attention_sm90"
MOSAIC = [
    *faults(
        f"{SM90}/plan.py",
        "mosaic mosaic_backward",
        (
            "sm90-causal-bound",
            '"right": None if right is None else shift + right + 1,',
            '"right": None if right is None else shift + right,',
            "a causal query does not see its own key",
        ),
        (
            "sm90-padding-kept",
            'seen += [arrays["kv_segment_ids"] > 0]',
            'seen += [arrays["kv_segment_ids"] >= 0]',
            "NaN in padding (segment 0) reaches the output",
        ),
        lane="mosaic",
    ),
    *faults(
        f"{SM90}/forward_consumer.py",
        "mosaic",
        (
            "sm90-column-bound",
            "end = c.step if c.segments else c.kv_len - column0",
            "end = c.step",
            "what lies past the last key counts as keys",
        ),
        (
            "sm90-sink-left-out",
            "total, top = total * decay + jnp.exp2(sink - new_top), new_top",
            "total, top = total * decay, new_top",
            "sinks are not in the denominator",
        ),
        (
            "sm90-segment-0-visible",
            "stop = jnp.where(mine > 0, stop, 0)",
            "stop = jnp.where(mine >= 0, stop, 0)",
            "padding (segment 0) attends to padding",
        ),
        (
            "sm90-lse-units",
            "jnp.where(some, top * (1 / LOG2E) + jnp.log(total), -jnp.inf)",
            "jnp.where(some, top + jnp.log(total), -jnp.inf)",
            "the lse adds a maximum of base 2 to a natural logarithm",
        ),
        lane="mosaic",
    ),
    *faults(
        f"{SM90}/forward_producer.py",
        "mosaic",
        (
            "sm90-gqa-head",
            "kv_head = lax.div(block.head, jnp.int32(c.group))",
            "kv_head = lax.rem(block.head, jnp.int32(c.group))",
            "a query head uses another group's keys",
        ),
        lane="mosaic",
    ),
    *faults(
        f"{SM90}/forward_state.py",
        "mosaic",
        (
            "sm90-retry-flag-never-seen",
            "[flags[first + i, 0] == nth for i in range(self.c.consumers)]",
            "[flags[first + i, 0] > nth for i in range(self.c.consumers)]",
            "a speculative block whose sums overflow is not computed again",
        ),
        lane="mosaic",
    ),
    *faults(
        f"{SM90}/gradients.py",
        "mosaic_backward",
        (
            "sm90-query-gradient-scale",
            '"query": jnp.where(seen, dq * c.scale, 0).astype(dk.dtype)',
            '"query": jnp.where(seen, dq, 0).astype(dk.dtype)',
            "the queries' gradient lacks the scale",
        ),
        lane="mosaic",
    ),
    *faults(
        f"{SM90}/backward_consumer.py",
        "mosaic_backward",
        (
            "sm90-backward-window-bound",
            "seen &= key >= row + c.left",
            "seen &= key > row + c.left",
            "the leftmost key of a window has no gradient",
        ),
        lane="mosaic",
    ),
    *faults(
        f"{SM90}/backward_state.py",
        "mosaic_backward",
        (
            "sm90-backward-gqa-head",
            "self.kv_head * self.c.group + lax.rem(t, jnp.int32(self.c.group)),",
            "self.kv_head + lax.rem(t, jnp.int32(self.c.group)),",
            "a key's gradient comes from the query heads of another key",
        ),
        lane="mosaic",
    ),
    *faults(
        f"{SM90}/backward_wide_keys.py",
        "mosaic_backward",
        (
            "sm90-wide-gqa-head",
            "(kv_head * c.group + lax.div(t, steps), lax.rem(t, steps))",
            "(kv_head + lax.div(t, steps), lax.rem(t, steps))",
            "with wide heads a key's gradient comes from the query heads of another key",
        ),
        lane="mosaic",
    ),
]

CUDNN = [
    *faults(
        "kernels/_cudnn/flash_attention.py",
        "cudnn",
        (
            "cudnn-window",
            '"sliding_window_length": None if left is None else left + 1,',
            '"sliding_window_length": None if left is None else left,',
            "the leftmost key of a window is hidden",
        ),
        (
            "cudnn-negative-scale",
            "return -query if spec.softmax_scale < 0 else jnp.zeros_like(query)",
            "return query if spec.softmax_scale < 0 else jnp.zeros_like(query)",
            "a negative scale is taken for a positive one",
        ),
        (
            "cudnn-one-token-gradient-of-one-head",
            "dv = dout.astype(jnp.float32).reshape(*key.shape[:3], -1, key.shape[3]).sum(3)",
            "dv = dout.astype(jnp.float32).reshape(*key.shape[:3], -1, key.shape[3])[:, :, :, 0]",
            "of one query and one key, the value's gradient is not summed over the group",
        ),
    ),
]

CORE = [
    *faults(
        "ops/core/operation.py",
        "selection store jit",
        (
            "key-without-registry",
            "device, kernel_registry.generation, chain.environment(), thread)",
            "device, chain.environment(), thread)",
            "a call that was made before goes on with the old choice after a kernel was registered or measured",
        ),
        (
            "key-without-environment",
            "device, kernel_registry.generation, chain.environment(), thread)",
            "device, kernel_registry.generation, thread)",
            "a call that was made before ignores EJKERNEL_AUTOTUNE and the like",
            "store selection",
        ),
        (
            "key-without-types",
            "key = (statics, types_of(statics), device,",
            "key = (statics, device,",
            "a wrong value that equals a right one (causal=1) is taken once the right one was",
            "bad_input ring_attention",
        ),
        (
            "tracers-kept",
            "return replace(call, arguments=arguments), pins",
            "return call, pins",
            "a call keeps tracers after its trace has ended",
            "jit explain",
        ),
    ),
    *faults(
        "ops/core/run.py",
        "vmap gradients",
        (
            "vmap-shared-array",
            "if name in shareable and array.shape[0] == 1:",
            "if name in shareable:",
            "an array that is not vmapped but has a batch keeps the small batch",
        ),
        (
            "vmap-gradient-of-one-entry",
            "return grad.sum(1, keepdims=True) if batch == 1 else grad",
            "return grad[:, :1] if batch == 1 else grad",
            "under vmap the gradient of an array that the batch shares is not summed over it",
        ),
        (
            "lse-cotangent-dropped",
            "rest = (*result, *cotangents)",
            "rest = (*result, cotangents[0], jax.tree.map(jnp.zeros_like, cotangents[1]))",
            "the lse's cotangent is ignored",
            "gradients",
        ),
        (
            "unwanted-gradients",
            "wanted = _perturbed(differentiable)",
            "wanted = frozenset(differentiable)",
            "gradients that nobody asked for are computed, and the call is refused where a kernel lacks them",
            "gradients selection",
        ),
    ),
    *faults(
        "ops/core/select.py",
        "selection explain",
        (
            "pin-ignored",
            "if not matches(entry, self.platform, self.backend):",
            "if not matches(entry, None, self.backend):",
            "platform= is silently replaced by another",
        ),
        (
            "priority-reversed",
            "return (record is None, record.seconds if record else 0.0, -entry.priority, not same)",
            "return (record is None, record.seconds if record else 0.0, entry.priority, not same)",
            "the lowest priority is chosen",
        ),
        (
            "gradients-not-asked",
            "entry.support.refusals(request if alone else without_gradients)",
            "entry.support.refusals(without_gradients)",
            "a kernel without a gradient is chosen for it",
        ),
        (
            "determinism-gate-open",
            "accepted = entry.support.deterministic or pins.platform is entry.platform or chain.nondeterminism_allowed()",
            "accepted = True",
            "gradients may differ from run to run without being asked for",
            "cudnn explain selection",
        ),
    ),
    *faults(
        "contracts/registry.py",
        "selection ring_attention",
        (
            "registering-unnoticed",
            "                self.generation += 1\n",
            "                self.generation += 0\n",
            "a kernel that is registered after a call never takes its turn",
        ),
    ),
    *faults(
        "contracts/support.py",
        "selection explain cudnn",
        (
            "unstated-feature-accepted",
            "for name, phrase in request.features.items() if name not in self.features",
            "for name, phrase in request.features.items() if not self.features",
            "a feature that a kernel does not state is ignored instead of refused",
        ),
        (
            "excluded-by-one-feature",
            "if all(name in used for name in group)",
            "if any(name in used for name in group)",
            "a feature is refused because it does not go with another that is not used",
        ),
    ),
    *faults(
        "contracts/params.py",
        "datacarrier selection",
        (
            "params-merge-order",
            'for name, params in (("base", base), ("override", override)):',
            'for name, params in (("override", override), ("base", base)):',
            "merge(base, override) prefers the base",
        ),
        (
            "backward-block-floor",
            "scaled = max(int(min(value * scale, 2.0**62)), _SMALLEST_BLOCK)",
            "scaled = max(int(min(value * scale, 2.0**62)), 1)",
            "from_fwd_params gives blocks below 16",
        ),
    ),
]

STORE = [
    *faults(
        "ops/config/store.py",
        "store",
        (
            "store-lock",
            'with filelock.FileLock(path.parent / ".lock", timeout=LOCK_SECONDS):',
            "with contextlib.nullcontext():",
            "entries are written without the file lock",
        ),
        (
            "store-entry-of-another-call",
            'if entry.get("key") != json.loads(stable_json(key)):',
            'if entry.get("key") is None:',
            "an entry that was written for another call is used",
        ),
    ),
    *faults(
        "ops/config/chain.py",
        "store selection explain",
        (
            "key-without-direction",
            '"direction": direction,\n        "implementation": entry.name,',
            '"direction": "forward",\n        "implementation": entry.name,',
            "a backward's measurement replaces the forward's",
        ),
        (
            "key-without-version",
            '"version": entry.version,\n        "compilers"',
            '"version": 1,\n        "compilers"',
            "measurements of an older version of a kernel are used",
        ),
        (
            "shipped-rows-of-another-version",
            'named = {"direction": direction, "implementation": entry.name, "version": entry.version}',
            'named = {"direction": direction, "implementation": entry.name}',
            "shipped rows of another version of a kernel are used",
        ),
        (
            "nearest-row-without-magnitude",
            "distance += abs(math.log2(int(ours) / int(theirs))) if ours else 0.0",
            "distance += math.log2(int(ours) / int(theirs)) if ours else 0.0",
            "the longest call of a table counts as the nearest",
        ),
        (
            "memory-of-another-store",
            'return f"{cache_directory()}\\n{stable_json(key)}"',
            "return stable_json(key)",
            "another EJKERNEL_CACHE_DIR serves what the first one remembered",
        ),
        (
            "overlay-ignored",
            "for name in dict.fromkeys((call.algorithm, call.operation))),",
            "for name in ()),",
            "parameters of an overlay reach no call",
            "selection jit",
        ),
        (
            "parameters-not-effective",
            "return effective(call, device, entry, direction, params), source",
            "return params, source",
            "explain shows parameters that the kernel will not use",
            "explain",
        ),
        (
            "times-of-different-calls-compared",
            'if record.source != "shipped" or record.bucket == nearest}',
            "if record is not None}",
            "an implementation loses because it was measured at a longer call",
            "selection_gpu",
        ),
    ),
    *faults(
        "ops/config/autotune.py",
        "store",
        (
            "slowest-kept",
            "elif entry not in best or found.best < best[entry].seconds:",
            "elif entry not in best or found.best > best[entry].seconds:",
            "autotune keeps the slowest parameters",
        ),
    ),
]

UTILITIES = [
    *faults(
        "xla_utils/packing.py",
        "xla_utils",
        (
            "position-of-padding",
            "return jnp.where(sequences >= 0, places, -1).astype(offsets.dtype)",
            "return places.astype(offsets.dtype)",
            "prepare_position_ids does not give -1 past the end",
        ),
        (
            "sequence-of-first-token",
            "before = (ends[:, None] <= place).sum(0, dtype=jnp.int32)",
            "before = (ends[:, None] < place).sum(0, dtype=jnp.int32)",
            "a sequence's first token is numbered with the sequence before",
        ),
    ),
    *faults(
        "xla_utils/segments.py",
        "xla_utils",
        (
            "segment-mask-of-padding",
            "(q_ids[..., :, None] == kv_ids[..., None, :]) & (q_ids > 0)[..., :, None]",
            "q_ids[..., :, None] == kv_ids[..., None, :]",
            "segment_ids_to_mask lets padding attend to padding",
        ),
    ),
    *faults(
        "ops/utils/fingerprint.py",
        "fingerprint",
        (
            "fingerprint-without-version",
            "return f\"{platform}|{_one_part(getattr(device, 'device_kind', ''))}|{_runtime_version(device)}\"",
            "return f\"{platform}|{_one_part(getattr(device, 'device_kind', ''))}\"",
            "devices with different runtimes share measurements",
        ),
    ),
    *faults(
        "ops/utils/canonical.py",
        "fingerprint",
        (
            "tuple-as-list",
            'tuple: lambda value, above: {"$tuple": _encode_items(value, above)},',
            "tuple: _encode_items,",
            "stable_json gives a tuple and a list the same text",
        ),
    ),
    *faults(
        "utils/numerics.py",
        "utils",
        (
            "safe-divide-sign",
            "moved = jax.lax.stop_gradient(jnp.copysign(bound, denominator))",
            "moved = jax.lax.stop_gradient(bound)",
            "safe_divide loses the sign of a small denominator",
        ),
    ),
    *faults(
        "callib/calibration.py",
        "callib",
        (
            "shared-memory-of-one-stage",
            "total = q_block * row + 2 * kv_block * row * num_stages + statistics",
            "total = q_block * row + 2 * kv_block * row + statistics",
            "estimate_shared_memory_bytes ignores num_stages",
        ),
    ),
]

FAULTS = [
    *XLA_FLASH,
    *PAGE_ATTENTION,
    *BLOCKSPARSE_ATTENTION,
    *RING_ATTENTION,
    *RECURRENT,
    *MEAN_POOLING,
    *GROUPED_MATMUL,
    *TRITON,
    *MOSAIC,
    *CUDNN,
    *CORE,
    *STORE,
    *UTILITIES,
]


# Whether the faults fit the code


def problems(fault: Fault, root: Path = ROOT) -> list[str]:
    """Why a fault cannot be planted."""
    path = root / fault.file
    if not path.is_file():
        return [f"{fault.name}: there is no {fault.file}"]
    text = path.read_text()
    found = [f"{fault.name}: there is no {test}" for test in fault.likely if not (root / test).is_file()]
    if fault.old == fault.new:
        found.append(f"{fault.name}: it changes nothing")
    if (count := text.count(fault.old)) != 1:
        return [*found, f"{fault.name}: {fault.old!r} is {count} times in {fault.file}, expected once"]
    try:
        compile(fault.planted(text), fault.file, "exec")
    except SyntaxError as error:
        found.append(f"{fault.name}: {fault.file} does not compile with it ({error})")
    return found


def all_problems(chosen: list[Fault]) -> list[str]:
    """Those of the chosen faults, and names that are not unique."""
    names = [fault.name for fault in FAULTS]
    twice = sorted({name for name in names if names.count(name) > 1})
    return [f"{name}: another fault has that name" for name in twice] + [p for f in chosen for p in problems(f)]


# What make runs


@dataclass(frozen=True)
class Command:
    """A run of pytest as the Makefile has it: variables, options, and which files."""

    variables: dict[str, str]
    options: tuple[str, ...]
    files: tuple[str, ...]

    def has(self, test: str) -> bool:
        """Whether a test file is among those that run."""
        return not self.files or any(Path(test).is_relative_to(file) for file in self.files)


def commands(target: str, venv: str, interpreted: bool) -> list[Command]:
    """The runs of pytest in a target of the Makefile, with Triton's interpreter or without."""
    printed = subprocess.run(
        ["make", "--no-print-directory", "-n", target, f"VENV={venv}"], cwd=ROOT, capture_output=True, text=True
    )
    if printed.returncode:
        sys.exit(f"make -n {target} failed:\n{printed.stderr}")
    found = []
    for line in printed.stdout.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        for at in (i for i, word in enumerate(words) if word == "pytest" and words[i - 1] == "-m"):
            first = next((i for i in range(at - 3, -1, -1) if not re.match(r"\w+=", words[i])), -1) + 1
            stop = next((i for i in range(at, len(words)) if set(words[i]) <= set(";&|()")), len(words))
            found.append(_command(dict(word.split("=", 1) for word in words[first : at - 2]), words[at + 1 : stop]))
    found = [command for command in found if ("TRITON_INTERPRET" in command.variables) == interpreted]
    if not found:
        sys.exit(f"make -n {target} prints no pytest {'with' if interpreted else 'without'} TRITON_INTERPRET")
    return found


def _command(variables: dict[str, str], arguments: list[str]) -> Command:
    """Without the number of processes, which is ours to say."""
    options, files, words = [], [], iter(arguments)
    for word in words:
        if word in ("-n", "--numprocesses"):
            next(words)
        elif word in ("-m", "-k"):
            options += [word, next(words)]
        elif word.startswith("-"):
            options.append(word)
        else:
            files.append(word)
    return Command(variables, tuple(options), tuple(files))


# Running


@dataclass(frozen=True)
class Outcome:
    """What a run of pytest said: its exit code (None: it took too long) and the first test that failed, if it names one."""

    code: int | None
    failed: str

    @property
    def passed(self) -> bool:
        return self.code in (0, NOTHING_COLLECTED)


@dataclass(frozen=True)
class Result:
    """What became of a fault; ``caught_by`` is a make target, or why there is none."""

    fault: Fault
    caught_by: str
    test: str
    seconds: float


class Runner:
    """Runs faults one at a time or side by side; knows which tests pass without any."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.folder = options, folder
        self.target = "test-full" if options.full else "test"
        self.clean = self.copy("clean")
        self._commands: dict[str, list[Command]] = {}
        self._passing: dict[tuple[str, tuple[str, ...]], bool] = {}
        self._lock = threading.Lock()

    def copy(self, name: str) -> Path:
        """The tracked files of the working tree, as they are now."""
        tree = self.folder / name
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        for file in filter(None, listed.stdout.split("\0")):
            if (ROOT / file).is_file():
                (tree / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, tree / file)
        return tree

    def venv(self, lane: str) -> Path:
        return (ROOT / (self.options.mosaic_venv if lane == "mosaic" else self.options.venv)).absolute()

    def commands(self, lane: str) -> list[Command]:
        """Those of a lane; asked of make once."""
        with self._lock:
            if lane not in self._commands:
                self._commands[lane] = commands(self.target, str(self.venv(lane)), lane == "triton")
            return self._commands[lane]

    def environment(self, tree: Path, command: Command) -> dict[str, str]:
        """The copy goes before an installed ejkernel; compiled programs are shared, for their keys hold the program."""
        shared = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax")}
        return {**shared, **os.environ, **command.variables, "PYTHONPATH": str(tree)}

    def pytest(self, lane: str, tree: Path, command: Command, *arguments: str) -> Outcome:
        """Stops at the first failure."""
        call = [str(self.venv(lane) / "bin" / "python"), "-m", "pytest", "-x", "-p", "no:cacheprovider"]
        process = subprocess.Popen(
            [*call, *command.options, *arguments],
            cwd=tree,
            env=self.environment(tree, command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=self.options.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Outcome(None, "")
        # A name ends where the message begins, or the line.
        failures = re.findall(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.*?)?)(?: - |$)", text, re.MULTILINE)
        return Outcome(process.returncode, failures[0] if failures else "")

    def require_own_tree(self, lane: str) -> None:
        """Stop if tests in a copy would import another ejkernel: every fault would seem to be missed."""
        command = self.commands(lane)[0]
        python = str(self.venv(lane) / "bin" / "python")
        found = subprocess.run(
            [python, "-c", "import ejkernel; print(ejkernel.__file__)"],
            cwd=self.clean,
            env=self.environment(self.clean, command),
            capture_output=True,
            text=True,
        )
        if not found.stdout.startswith(str(self.clean)):
            sys.exit(f"{python} imports {found.stdout.strip() or found.stderr} instead of the copy in {self.clean}")

    def run(self, fault: Fault) -> Result:
        tree = self.copy(fault.name)
        path = tree / fault.file
        path.write_text(fault.planted(path.read_text()))
        start = time.monotonic()
        caught_by, test = "not by these" if self.options.likely_only else "missed", ""
        for command, arguments in self.stages(fault):
            outcome = self.first_failure(fault.lane, tree, command, arguments)
            if not outcome.passed:
                caught_by, test = self.judged(fault, outcome, command)
                break
        shutil.rmtree(tree)
        return Result(fault, caught_by, test, time.monotonic() - start)

    def stages(self, fault: Fault) -> Iterator[tuple[Command, list[str]]]:
        """The likely files, then the rest of the lane if that was asked for."""
        for command in self.commands(fault.lane):
            likely = [test for test in fault.likely if command.has(test)]
            if likely:
                yield command, ["-n", "0", *likely]
        for command in () if self.options.likely_only else self.commands(fault.lane):
            others = [f"--ignore={test}" for test in fault.likely]
            files = [file for file in command.files if file not in fault.likely]
            yield command, ["-n", str(self.options.workers), *others, *files]

    def first_failure(self, lane: str, tree: Path, command: Command, arguments: list[str]) -> Outcome:
        """As pytest, but for tests that fail without a fault too: those are left out, here and from now on."""
        while True:
            left_out = [f"--deselect={test}" for test in self.broken(lane)]
            outcome = self.pytest(lane, tree, command, *left_out, *arguments)
            again = f"--deselect={outcome.failed}" in left_out
            if again or "::" not in outcome.failed or self.passes_without(lane, command, outcome.failed):
                return outcome

    def judged(self, fault: Fault, outcome: Outcome, command: Command) -> tuple[str, str]:
        """What caught a fault, or why that is not known; and the test, or else how pytest ended."""
        if outcome.code is None:
            return "timed out", ""
        # Where no test is named, nothing could be collected or the process died.
        alone = (outcome.failed,) if "::" in outcome.failed else ("--collect-only", *fault.likely)
        caught = self.passes_without(fault.lane, command, *alone)
        ended = outcome.failed or f"pytest ended with {outcome.code}"
        return (f"make {self.target}" if caught else "fails without it"), ended

    def passes_without(self, lane: str, command: Command, *arguments: str) -> bool:
        """Whether a test, or the collection of files, is in order without a fault; each is tried once."""
        with self._lock:
            if (lane, arguments) in self._passing:
                return self._passing[lane, arguments]
        passing = self.pytest(lane, self.clean, command, "-n", "0", *arguments).passed
        with self._lock:
            self._passing[lane, arguments] = passing
        return passing

    def broken(self, lane: str) -> list[str]:
        """The tests of a lane that are known to fail without a fault."""
        with self._lock:
            return [arguments[0] for (own, arguments), passing in self._passing.items() if own == lane and not passing]


# The table

HEADER = """# Planted faults

`tools/mutants.py` plants a fault of one line in a copy of the tree and runs the tests of `make test` on it, one fault
at a time. This page is what it wrote: the fault, what it breaks, and the first test that failed. The script has the
lines themselves. Lanes: `plain` is the main process of `make test`, `triton` the one in Triton's interpreter, `mosaic`
the main process with jax 0.11 or later, whose interpreter runs the Hopper kernels.

A fault is caught if a test fails with it that passes without. What `make test` misses must be caught by
`make test-full`, and becomes a test.

"""
COLUMNS = ("fault", "file", "what it breaks", "lane", "caught by", "first failing test", "seconds")


def row_of(result: Result) -> str:
    fault, test = result.fault, result.test.replace("|", "\\|")
    cells = [f"`{fault.name}`", f"`{fault.file.removeprefix('ejkernel/')}`", fault.breaks, fault.lane]
    cells += [f"`{result.caught_by}`" if result.caught_by.startswith("make") else result.caught_by]
    cells += [f"`{test.removeprefix('tests/')}`" if test else "", f"{result.seconds:.0f}"]
    return f"| {' | '.join(cells)} |"


def known_rows(page: Path) -> dict[str, str]:
    """The rows that a page has, by fault."""
    lines = page.read_text().splitlines() if page.is_file() else []
    return {match[1]: line for line in lines if (match := re.match(r"\| `([\w-]+)` \|", line))}


def write_page(page: Path, results: list[Result]) -> None:
    """All faults in their order, those that did not run now as the page has them."""
    rows = {**known_rows(page), **{result.fault.name: row_of(result) for result in results}}
    for fault in FAULTS:
        rows.setdefault(fault.name, row_of(Result(fault, "not run", "", 0)))
    rows = {fault.name: rows[fault.name] for fault in FAULTS}
    counts = {what: sum(f"| {what} |" in row for row in rows.values()) for what in ("`make test`", "`make test-full`")}
    summary = f"Of {len(rows)} faults, {' and '.join(f'{n} are caught by {what}' for what, n in counts.items() if n)}"
    summary = summary if any(counts.values()) else f"{len(rows)} faults"
    table = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", *rows.values()]
    page.write_text(f"{HEADER}{summary}.\n\n" + "\n".join(table) + "\n")


# The command line


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults to plant, by name or pattern; default: all")
    parser.add_argument("--lane", choices=LANES, action="append", help="only faults of this lane; may be repeated")
    parser.add_argument("--list", action="store_true", help="name the faults and stop")
    parser.add_argument("--check", action="store_true", help="check that every fault fits the code and stop")
    parser.add_argument("--likely-only", action="store_true", help="run only the files that should catch a fault")
    parser.add_argument("--full", action="store_true", help="run make test-full's tests instead of make test's")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--workers", type=int, default=2, help="processes of a run over the rest of a lane")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one run of pytest")
    parser.add_argument("--venv", default=".venv", help="environment of the lanes plain and triton")
    parser.add_argument("--mosaic-venv", default=".venv-312", help="environment of the lane mosaic: jax >= 0.11")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table goes; rows of other faults stay")
    return parser.parse_args()


def chosen_faults(options: argparse.Namespace) -> list[Fault]:
    unknown = [name for name in options.names if not fnmatch.filter([f.name for f in FAULTS], name)]
    if unknown:
        sys.exit(f"no fault is named {', '.join(unknown)}; see --list")
    chosen = [f for f in FAULTS if not options.names or any(fnmatch.fnmatch(f.name, name) for name in options.names)]
    return [fault for fault in chosen if not options.lane or fault.lane in options.lane]


def main() -> None:
    options = parse()
    chosen = chosen_faults(options)
    if options.list:
        for fault in chosen:
            print(f"{fault.name:40} {fault.lane:7} {fault.file.removeprefix('ejkernel/')}: {fault.breaks}")
        return
    found = all_problems(chosen)
    if found:
        sys.exit("\n".join(found))
    if options.check:
        print(f"{len(chosen)} faults fit the code")
        return
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        runner = Runner(options, Path(folder).resolve())
        for lane in dict.fromkeys(fault.lane for fault in chosen):
            runner.require_own_tree(lane)
        for done in as_completed([pool.submit(runner.run, fault) for fault in chosen]):
            result = done.result()
            results.append(result)
            print(f"{result.fault.name:40} {result.caught_by:16} {result.seconds:5.0f} s  {result.test}", flush=True)
            write_page(options.page, results)
        for lane in LANES:
            for test in runner.broken(lane):
                print(f"fails without a fault, left out of {lane}: {test}")
    uncaught = [result.fault.name for result in results if not result.caught_by.startswith("make")]
    print(
        f"{len(results) - len(uncaught)} of {len(results)} caught"
        + (f"; not: {' '.join(uncaught)}" if uncaught else "")
    )
    sys.exit(bool(uncaught))


if __name__ == "__main__":
    main()
