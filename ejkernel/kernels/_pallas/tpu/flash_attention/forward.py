"""The forward on the host: the plan of a call, its arrays as the kernel reads them, the launch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.contracts.params import FwdParams
from ejkernel.kernels._pallas.tpu.flash_attention.forward_kernel import Config, call
from ejkernel.kernels._pallas.tpu.flash_attention.parameters import query_part
from ejkernel.kernels._pallas.tpu.flash_attention.plan import (
    MASKED,
    MOST_PATTERNS,
    WHOLE,
    block_kinds,
    key_intervals,
    list_steps,
    segment_ids,
    with_patterns,
)
from ejkernel.kernels._pallas.tpu.flash_attention.terms import inputs, terms_of
from ejkernel.kernels._pallas.tpu.generations import generation_of
from ejkernel.kernels.common.intervals import intervals
from ejkernel.kernels.common.unseen import seen_keys, without_unseen


def forward(
    arrays: dict[str, Array], spec: Any, params: FwdParams, *, device: Any = None, interpret: Any = False
) -> tuple[Array, Array]:
    """Output ``[B, Sq, H, Dv]`` and lse ``[B, H, Sq]``; ``interpret``: parameters of Pallas' interpreter."""
    arrays = _without_unseen_values(arrays, spec)
    kinds = block_kinds(arrays, spec, params.q_blocksize, params.kv_blocksize, partial_rows=True)
    kinds, patterns = with_patterns(kinds, arrays, spec, params.q_blocksize, params.kv_blocksize, partial_rows=True)
    return run(arrays, spec, params, kinds, patterns, device=device, interpret=interpret)


def run(
    arrays: dict[str, Array], spec: Any, params: FwdParams, kinds: Any, patterns: tuple, *, device: Any, interpret: Any
) -> tuple[Array, Array]:
    """The same from a table of kinds of blocks."""
    terms = terms_of(arrays, spec)
    query, value = arrays["query"], arrays["value"]
    known = isinstance(kinds, np.ndarray)
    c = Config(
        terms=terms,
        group=query.shape[2] // value.shape[2],
        q_block=params.q_blocksize,
        kv_block=params.kv_blocksize,
        q_part=query_part(params.q_blocksize),
        kv_part=params.blocksize_keys,
        masked=bool((kinds == MASKED).any()) if known else len(patterns) in (0, MOST_PATTERNS),
        whole=not known or bool((kinds == WHOLE).any()),
        patterns=patterns,
        sinks="softmax_aux" in arrays,
    )
    tensors = [arrays[name].swapaxes(1, 2) for name in ("query", "key", "value")]
    optional = inputs(terms, arrays, spec, c.q_block, c.kv_block)
    sinks = [arrays["softmax_aux"].astype(jnp.float32)] if c.sinks else []
    out, lse = call(
        c,
        list_steps(kinds),
        tensors,
        sinks,
        optional,
        generation=generation_of(device),
        costs=costs(arrays, spec),
        interpret=interpret,
    )
    return out.transpose(0, 3, 1, 2), lse[:, :, 0]


def _without_unseen_values(arrays: dict[str, Array], spec: Any) -> dict[str, Array]:
    """Zeros for values that no query sees: they may be NaN, which a weight of 0 does not hide. Keys are masked themselves."""
    arrays = without_unseen(arrays, spec)
    (start, stop), segments = key_intervals(arrays, spec), segment_ids(arrays)
    value = arrays["value"]
    if segments is None and isinstance(start, np.ndarray):
        covered = np.zeros(value.shape[1] + 1, np.int64)
        np.add.at(covered, start[0], 1)
        np.add.at(covered, stop[0], -1)
        if (np.cumsum(covered)[:-1] > 0).all():
            return arrays
    seen = seen_keys(start, stop, segments, value.shape[1])
    return {**arrays, "value": jnp.where(seen[..., None, None], value, 0)}


def costs(arrays: dict[str, Array], spec: Any) -> dict[str, int]:
    """What the compiler is told: two products a pair that causality and the window leave, every array once."""
    query, value = arrays["query"], arrays["value"]
    start, stop = intervals(spec.window, query.shape[1], value.shape[1])
    batch, q_len, heads, dim = query.shape
    pairs = batch * heads * int((stop - start).sum(dtype=np.int64))
    out = batch * q_len * heads * value.shape[3] * query.dtype.itemsize
    return {
        "flops": 2 * pairs * (dim + value.shape[3]),
        "transcendentals": pairs,
        "bytes_accessed": out + sum(x.size * x.dtype.itemsize for x in arrays.values()),
    }
