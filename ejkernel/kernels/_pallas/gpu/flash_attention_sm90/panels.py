"""Heads in panels: head dims that are no multiple of 32, and lengths that are no multiple of 8.

A tile of shared memory is 8 rows by 16, 32 or 64 columns, and Mosaic GPU cuts an array into whole tiles. A panel is as wide as
a tile, so its tiles lie one below the other, as rows do: its copy needs no cut. It is a slice of rows and columns which may
exceed the array. TMA fills what is missing with zeros, and leaves it out where it stores. Products leave missing columns out
but for what completes the 16 of an instruction.
"""

from __future__ import annotations

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import mma_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm

from ejkernel.kernels._pallas.gpu.flash_attention_sm90 import terms
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import CHUNK, CORE_ROWS, ROWS, KernelConfig
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.terms import array_of, multiply, opaque_zero, swizzle_of


def copies_of(dim: int, panel: int | None) -> int:
    """How many copies a head takes."""
    return -(-dim // (panel or dim))


def panels(dtype, panel: int, *shape: int):
    """Shared memory for ``[..., rows, columns]``: ``[..., panels, rows, panel]``."""
    *leading, rows, columns = shape
    return plgpu.SMEM((*leading, copies_of(columns, panel), rows, panel), dtype, transforms=_transforms(panel))


def _transforms(panel: int) -> tuple[plgpu.SwizzleTransform]:
    return (plgpu.SwizzleTransform(swizzle_of(panel)),)


def head_copies(source, target, batch, row, rows: int, head) -> list:
    """What is copied for rows of a head, from where and to where: one pair, or one for each panel."""
    if len(target.shape) == 2:
        return [(source.at[batch, pl.ds(row, rows), head], target)]
    count, _, panel = target.shape
    return [(columns_of(source, batch, row, rows, head, i * panel, panel), target.at[i]) for i in range(count)]


def columns_of(ref, batch, row, rows: int, head, column: int, count: int):
    """A panel of rows of a head."""
    # JAX refuses a slice that it knows to exceed an array.
    return ref.at[batch, pl.ds(row, rows), head, pl.ds(opaque_zero(row) + column, count)]


def aliased(dtype, *shape: int):
    """Shared memory for one panel ``[..., rows, panel]``: in tiles, for products, and the same bytes by rows, for copies."""
    panel = shape[-1]
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=terms.transforms(panel)),
        plgpu.SMEM(shape, dtype, transforms=_transforms(panel)),
    )


def start_qk(c: KernelConfig, q, k):
    """``terms.start_qk``, of panels where a head lies in them."""
    if c.head_panel is None:
        return terms.start_qk(c, q, k)
    if c.interpreted:
        return jnp.dot(_columns(q), _columns(k).T, preferred_element_type=jnp.float32)
    panel, step, places = c.head_panel, c.step, range(0, c.dim, CHUNK)
    of_panels = plgpu.RefType(_transforms(panel))

    @plgpu.inline_mgpu(arg_types=(of_panels, of_panels), return_type=array_of((ROWS, step)))
    def start(_, q, k):
        def operand(x, rows):
            return _descriptor(x, panel), [2 * (i // panel * rows * panel + i % panel) for i in places]

        acc = mgpu.WGMMAAccumulator.zero(ROWS, step).value
        kind = ir.MemRefType(q.type).element_type
        acc = multiply(acc, operand(q, ROWS), operand(k, step), kind, transposed=False)
        nvvm.wgmma_commit_group_sync_aligned()
        return acc

    return start(q, k)


def start_pv(c: KernelConfig, acc, p16, v, p_smem):
    """``terms.start_pv``, of panels where values lie in them."""
    if c.value_panel is None:
        return terms.start_pv(c, acc, p16, v, p_smem)
    if c.interpreted:
        values = _columns(v)[:, : c.value_dim]
        return acc + jnp.dot(p16, values, preferred_element_type=jnp.float32)
    layout, panel, step = plgpu.Layout.WGMMA, c.value_panel, c.step

    @plgpu.inline_mgpu(arg_types=(layout, layout, plgpu.RefType(_transforms(panel))), return_type=array_of(acc.shape))
    def start(_, acc, p16, v):
        right = _descriptor(v, panel, next_panel=2 * step * panel), [2 * i * panel for i in range(0, step, CHUNK)]
        acc = multiply(acc, p16, right, p16.mlir_dtype, transposed=True)
        nvvm.wgmma_commit_group_sync_aligned()
        return acc

    return start(acc, p16, v)


def _columns(ref):
    """``[rows, columns]`` of panels, in the interpreter."""
    count, rows, panel = ref.shape
    values = ref[...].transpose((1, 0, 2)).reshape(rows, count * panel)
    plgpu.commit_smem()  # its race detector wants a fence between a read and a later copy
    return values


def _descriptor(ref, panel: int, next_panel: int = 0) -> ir.Value:
    """Of the first instruction's operand; ``next_panel``: bytes from panel to panel, where it extends over several."""
    swizzle = swizzle_of(panel)
    return mma_utils.encode_descriptor(
        ref, leading_byte_offset=next_panel, stride_byte_offset=CORE_ROWS * swizzle, swizzle=swizzle
    )
