"""Mean pooling in Triton: each row that counts is read once, no other is; the gradient is written in one pass.

Sequences are summed in chunks, by as many programs as keep a chip busy; the sums of chunks are added in order, so every
rerun gives the same bits. Packed sequences that hold no whole chunk have one program each, and nothing to add.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.callib.integers import power_of_two, power_of_two_below
from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import BwdParams, FwdParams, params_class
from ejkernel.contracts.support import HeadDims
from ejkernel.kernels._triton.call import call, cores, interpreting, passes_twice
from ejkernel.kernels._triton.registering import register

READ: dict[str, tuple[str, ...]] = {
    "forward": ("blocksize_m", "blocksize_n", "num_warps", "num_stages"),
    "backward": ("blocksize_m", "blocksize_n", "num_warps"),
}
# Features a tile, and bytes of it: every thread of four warps has eight wide loads under way.
FEWEST_FEATURES, MOST_FEATURES, TILE_BYTES = 16, 1024, 2**14
# Where rows are not aligned: addresses of numbers that are loaded one by one fill registers.
UNALIGNED_TILE_BYTES = 2**12
LOADS, UNALIGNED_LOADS, LOADS_COMBINED = 8, 2, 4
# Rows a chunk, and programs a multiprocessor that the default chunks make; rows of a sequence that one program writes.
FEWEST_ROWS, MOST_ROWS, PROGRAMS_PER_CORE, WRITTEN_ROWS = 128, 4096, 4, 128
# A packed sequence without a whole chunk has one program.
MOST_PACKED_ROWS = 256
# Narrow tiles: of padded sequences, so that a program has all rows of one and nothing is left to add; of what adds the sums of
# chunks, so that few sequences do not mean few programs.
NARROW = 128
MOST_WARPS, MOST_STAGES, DEFAULT_STAGES = 8, 4, 3
ALIGNED = 16


def forward(
    arrays: dict[str, Array], spec: Any, params: FwdParams, *, device: DeviceInfo | None = None
) -> tuple[Array, None]:
    """``[B, D]``, or packed ``[B, N, D]``."""
    params = effective(arrays, params, device)
    run = _packed if spec.packed else _padded
    return run(arrays, params, device), None


def _padded(arrays: dict[str, Array], params: FwdParams, device: DeviceInfo | None) -> Array:
    from ejkernel.kernels._triton import mean_pooling_kernels as kernels

    inputs = arrays["inputs"]
    batch, length, features = inputs.shape
    chunks = -(-length // params.blocksize_m)
    single = chunks == 1
    c = _constants(arrays, params, single=single)
    columns = -(-features // c.bd)
    launch = {"num_warps": params.num_warps, "num_stages": 1, "device": device}
    nothing = jax.ShapeDtypeStruct((1,), jnp.float32)
    out = jax.ShapeDtypeStruct((batch, features), inputs.dtype)
    partial = jax.ShapeDtypeStruct((batch, chunks, features), jnp.float32)
    counts = jax.ShapeDtypeStruct((batch, chunks), jnp.int32)
    mean, partial, counts = call(
        kernels.padded_sums,
        [inputs, _mask(arrays, inputs)],
        [length, features // c.unit, chunks],
        [out, nothing, nothing] if single else [nothing, partial, counts],
        programs=batch * chunks * columns,
        constants=c,
        **launch,
    )
    if single:
        return mean
    narrow = _combined(c, features, params.num_warps)
    (mean,) = call(
        kernels.combine_padded,
        [partial, counts],
        [length, features // c.unit, chunks],
        [out],
        programs=batch * -(-features // narrow.bd),
        constants=narrow,
        **launch,
    )
    return mean


def _packed(arrays: dict[str, Array], params: FwdParams, device: DeviceInfo | None) -> Array:
    from ejkernel.kernels._triton import mean_pooling_kernels as kernels

    inputs, offsets = arrays["inputs"], arrays["cu_seqlens"]
    batch, tokens, features = inputs.shape
    sequences = offsets.shape[1] - 1
    # Those that are whole: only they are ever inside of a sequence.
    chunks = tokens // params.blocksize_m
    c = _constants(arrays, params)
    columns = -(-features // c.bd)
    launch = {"num_warps": params.num_warps, "num_stages": 1, "device": device}
    shape = (batch, sequences, features)
    means, partial, rest = call(
        kernels.packed_sums,
        [inputs, offsets],
        [tokens, sequences, features // c.unit, chunks, batch],
        [
            jax.ShapeDtypeStruct(shape, inputs.dtype),
            jax.ShapeDtypeStruct((batch, max(1, chunks), features), jnp.float32),
            jax.ShapeDtypeStruct(shape if chunks else (1,), jnp.float32),
        ],
        programs=batch * (chunks + sequences) * columns,
        constants=c,
        **launch,
    )
    if not chunks:
        return means
    narrow = _combined(c, features, params.num_warps)
    (means,) = call(
        kernels.combine_packed_into if passes_twice() else kernels.combine_packed,
        [partial, rest, offsets, means],
        [sequences, features // c.unit, chunks],
        [jax.ShapeDtypeStruct(shape, inputs.dtype)],
        programs=batch * sequences * -(-features // narrow.bd),
        constants=narrow,
        in_place={3: 0},
        **launch,
    )
    return means


def backward(
    arrays: dict[str, Array],
    spec: Any,
    params: BwdParams,
    out: Array,
    residual: None,
    dout: Array,
    dresidual: None,
    device: DeviceInfo | None = None,
) -> dict[str, Array]:
    """The inputs' gradient: a sequence's, divided by its count, at each token that counts, and 0 at the others."""
    from ejkernel.kernels._triton import mean_pooling_kernels as kernels

    params = effective(arrays, params, device)
    inputs, mask = arrays["inputs"], arrays.get("mask")
    batch, length, features = inputs.shape
    c = _constants(arrays, params)
    if spec.packed:
        offsets = arrays["cu_seqlens"]
        sequences, chunks = offsets.shape[1] - 1, length // params.blocksize_m
        kernel, operands = kernels.spread_packed, [dout, offsets]
        scalars = [length, sequences, features // c.unit, chunks, batch]
        # The tokens behind the last sequence are one more.
        pieces = chunks + sequences + 1
    else:
        counts = dout if mask is None else mask.sum(1, dtype=jnp.int32)
        kernel, operands = kernels.spread_padded, [dout, _mask(arrays, dout), counts]
        scalars = [length, features // c.unit]
        pieces = -(-length // c.bs)
    (grad,) = call(
        kernel,
        operands,
        scalars,
        [jax.ShapeDtypeStruct(inputs.shape, inputs.dtype)],
        programs=batch * pieces * -(-features // c.bd),
        constants=c,
        num_warps=params.num_warps,
        num_stages=1,
        device=device,
    )
    return {"inputs": grad}


def _mask(arrays: dict[str, Array], other: Array) -> Array:
    """The mask, whose truth values are bytes; without one another operand, which is not read for it."""
    mask = arrays.get("mask")
    if mask is None:
        return other
    return mask.astype(jnp.uint8) if interpreting() else mask


def _constants(arrays: dict[str, Array], params: FwdParams | BwdParams, *, single: bool = False) -> Any:
    from ejkernel.kernels._triton.mean_pooling_kernels import PoolingConstants

    inputs = arrays["inputs"]
    features, bd = inputs.shape[2], params.blocksize_n
    return PoolingConstants(
        bs=_rows(features, bd, inputs.dtype.itemsize),
        bd=bd,
        rows=_rows_a_load(bd, inputs.dtype.itemsize, params.num_warps),
        loads=LOADS if _aligned(features, inputs.dtype.itemsize) else UNALIGNED_LOADS,
        chunk=params.blocksize_m or 1,
        unit=math.gcd(features, ALIGNED),
        even=features % bd == 0,
        mask="mask" in arrays,
        stages=getattr(params, "num_stages", None) or 1,
        single=single,
        steps=int(arrays["cu_seqlens"].shape[1]).bit_length() if "cu_seqlens" in arrays else 0,
    )


def _combined(c: Any, features: int, warps: int) -> Any:
    """The constants of what adds the sums of chunks, which are float32."""
    bd = min(c.bd, NARROW)
    return replace(c, bd=bd, rows=_rows_a_load(bd, 4, warps), loads=LOADS_COMBINED, even=features % bd == 0, stages=1)


def _rows(features: int, bd: int, itemsize: int) -> int:
    """Rows a tile."""
    return max(1, (TILE_BYTES if _aligned(features, itemsize) else UNALIGNED_TILE_BYTES) // itemsize // bd)


def _aligned(features: int, itemsize: int) -> bool:
    return math.gcd(features, ALIGNED) * itemsize >= ALIGNED


def _rows_a_load(bd: int, itemsize: int, warps: int) -> int:
    """Rows of which each thread loads 16 bytes."""
    return max(1, ALIGNED // itemsize * 32 * warps // bd)


def effective(
    shapes: dict[str, Any], params: FwdParams | BwdParams, device: DeviceInfo | None
) -> FwdParams | BwdParams:
    """The parameters as the kernels use them: powers of two, no larger than the arrays."""
    features = shapes["inputs"].shape[2]
    widest = max(FEWEST_FEATURES, min(MOST_FEATURES, power_of_two(features)))
    # Not much narrower than it may be: a narrow tile has many rows, whose offsets have 32 bits.
    narrowest = max(FEWEST_FEATURES, widest // 8)
    aligned = _aligned(features, shapes["inputs"].dtype.itemsize)
    narrow = aligned and isinstance(params, FwdParams) and "cu_seqlens" not in shapes
    bd = max(narrowest, min(widest, power_of_two_below(params.blocksize_n or (NARROW if narrow else widest))))
    used = {"blocksize_n": bd, "num_warps": min(MOST_WARPS, power_of_two_below(params.num_warps or 4))}
    longest = power_of_two(max(1, shapes["inputs"].shape[1]))
    if isinstance(params, FwdParams):
        chunk = power_of_two_below(params.blocksize_m) if params.blocksize_m else _chunk(shapes, bd, device)
        used["blocksize_m"] = min(chunk, longest)
        used["num_stages"] = min(MOST_STAGES, params.num_stages or (DEFAULT_STAGES if aligned else 1))
    elif "cu_seqlens" in shapes:
        used["blocksize_m"] = min(power_of_two_below(params.blocksize_m or WRITTEN_ROWS), longest)
    return type(params)(**used)


def _chunk(shapes: dict[str, Any], bd: int, device: DeviceInfo | None) -> int:
    """Rows that make about as many programs as a chip holds."""
    batch, length, features = shapes["inputs"].shape
    share = -(-batch * length * -(-features // bd) // (cores(device) * PROGRAMS_PER_CORE))
    most = MOST_PACKED_ROWS if "cu_seqlens" in shapes else MOST_ROWS
    return max(FEWEST_ROWS, min(most, power_of_two(share)))


class TritonMeanPooling:
    """The implementation for GPUs."""

    name = "mean-pooling-triton"
    version = 1
    reads: ClassVar = READ
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    @staticmethod
    def defaults(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """Tiles where nothing was tuned: few features of all rows of a padded sequence, else all features of a few rows."""
        return effective(shapes, params_class(direction)(), device)

    @staticmethod
    def space(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
        """Tiles worth trying."""
        if direction == "backward":
            rows = (64, 128, 256) if "cu_seqlens" in shapes else (None,)
            return [
                BwdParams(blocksize_m=m, blocksize_n=n, num_warps=w) for m in rows for n in (256, 1024) for w in (4, 8)
            ]
        chunk = _chunk(shapes, effective(shapes, FwdParams(), device).blocksize_n, device)
        return [
            FwdParams(blocksize_m=rows, blocksize_n=n, num_warps=warps, num_stages=stages)
            for rows in (chunk, chunk * 4)
            for n, warps, stages in ((128, 4, 3), (256, 4, 3), (512, 4, 3), (1024, 4, 1), (1024, 4, 3), (1024, 8, 1))
        ]

    @staticmethod
    def effective(shapes: dict[str, Any], spec: Any, params: Any, device: Any, direction: str) -> FwdParams | BwdParams:
        """The parameters as the kernels use them."""
        return effective(shapes, params, device)


register(
    "mean_pooling",
    features={"mask", "varlen"},
    gradients={"inputs"},
    head_dims=HeadDims(),
)(TritonMeanPooling)
