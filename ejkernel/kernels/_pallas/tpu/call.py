"""Launching a TPU kernel: what every ``pallas_call`` of the package states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu.generations import Generation
from ejkernel.kernels.common.varying import vary_over, varying_axes


def launch(
    kernel: Callable[..., None],
    arrays: Sequence[Array],
    *,
    name: str,
    out_shape: Any,
    grid_spec: Any,
    semantics: Sequence[str],
    generation: Generation,
    flops: int,
    transcendentals: int,
    bytes_accessed: int,
    aliases: dict[int, int] | None = None,
    bounds_checks: bool = True,
    interpret: Any = False,
) -> Any:
    """The results of a kernel, varying over mesh axes as its arrays do.

    Args:
        semantics: ``"parallel"`` or ``"arbitrary"`` for each axis of the grid.
        flops, transcendentals, bytes_accessed: what the compiler's scheduler is told.
        aliases: from the index of an array, those prefetched to scalar memory counted, to that of the result in its place.
        bounds_checks: whether the compiler checks every copy's address: some 20 cycles of scalar work each, which only a kernel of many
            small copies feels, and may leave out where it clips all that comes from data.
        interpret: False, or parameters of Pallas' interpreter for TPUs, which runs on a CPU.
    """
    axes = varying_axes(*arrays)
    if axes:
        # Inside `shard_map` results have to say over what they vary, and all arrays have to agree.
        arrays = [vary_over(array, axes) for array in arrays]
        varying = jax.typeof(arrays[0]).manual_axis_type
        out_shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying), out_shape)
    call = pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=grid_spec,
        name=name,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=tuple(semantics),
            vmem_limit_bytes=generation.vmem_bytes,
            disable_bounds_checks=not bounds_checks,
        ),
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=transcendentals, bytes_accessed=bytes_accessed),
        input_output_aliases=aliases or {},
        **({"interpret": interpret} if interpret else {}),
    )
    # Python's ints are of 32 bits in a kernel, which has no others.
    with jax.enable_x64(False):
        return call(*arrays)
