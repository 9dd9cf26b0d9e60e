"""What the kernels need of JAX's Mosaic GPU, which is private or experimental and changes between versions.

``changes`` compares it with the JAX that is installed; where it finds a difference the kernel is refused with that reason,
and another one runs. A test compares these tables with the sources of the kernels.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ejkernel.contracts.device import DeviceInfo


class Signature(NamedTuple):
    """How a function is called: with so many positional arguments, and these keywords."""

    positional: int
    keywords: tuple[str, ...] = ()

    def fits(self, function: Callable) -> bool:
        """Whether the function can be called so."""
        # An enum's members carry the signature of the enum, not of their own call.
        call = function if inspect.isclass(function) or inspect.isroutine(function) else type(function).__call__
        more = [None] * (call is not function)
        try:
            inspect.signature(call).bind(*more, *[None] * self.positional, **dict.fromkeys(self.keywords))
        except TypeError:
            return False
        except ValueError:  # a builtin without a signature
            return True
        return True


def _call(positional: int, *keywords: str) -> tuple[Signature, ...]:
    return (Signature(positional, keywords),)


_WGMMA_M64 = ("a_transpose", "b_transpose", "a_k_stride", "b_k_stride", "n", "swizzle")

# By module: what is used without being called, and how functions are called (in one of several ways, where versions differ).
NAMES: dict[str, tuple[str, ...]] = {
    "jax.experimental.pallas.mosaic_gpu": (
        "Layout.WGMMA",
        "Layout._WGMMA_ACC_32BIT",
        "LoweringSemantics.Lane",
        "SemaphoreType.REGULAR",
    ),
    "jax.experimental.mosaic.gpu": (
        "ThreadSubset.WARP",
        "WGMMAAccumulator.value",
        *(f"FragmentedArray.{name}" for name in ("registers", "layout", "shape", "mlir_dtype")),
    ),
    "jax.experimental.mosaic.gpu.fragmented_array": ("WGMMA_LAYOUT", "WGMMA_LAYOUT_ACC_32BIT"),
    "jax.experimental.mosaic.gpu.mma_utils": ("Dim.K",),
    "jaxlib.mlir.ir": ("Type", "Value"),
    "jaxlib.mlir.dialects.arith": (
        *("CmpFPredicate.OEQ", "CmpFPredicate.UGT", "CmpFPredicate.UNE", "CmpIPredicate.eq", "CmpIPredicate.ne"),
        *("CmpIPredicate.sge", "CmpIPredicate.sgt", "CmpIPredicate.sle", "CmpIPredicate.slt"),
        *("CmpIPredicate.uge", "CmpIPredicate.ult"),
    ),
    "jaxlib.mlir.dialects.llvm": ("IntegerOverflowFlags.none",),
    "jaxlib.mlir.dialects.scf": ("IfOp.then_block", "IfOp.else_block"),
}
CALLS: dict[str, dict[str, tuple[Signature, ...]]] = {
    "jax.experimental.pallas": {
        "ds": _call(2),
        "get_global": _call(1),
        "kernel": _call(1, "mesh"),
        "run_scoped": _call(3),
        "when": _call(1),
    },
    "jax.experimental.pallas.mosaic_gpu": {
        "ACC": _call(2),
        "Barrier": _call(0, "num_arrivals", "num_barriers"),
        "CompilerParams": _call(0, "approx_math", "lowering_semantics", "unsafe_no_auto_barriers"),
        "Layout.WGMMA.reduce": _call(1),
        "Layout.WG_SPLAT": _call(1),
        "RefType": _call(1),
        "RefUnion": _call(2),
        "SMEM": _call(2, "transforms"),
        "SemaphoreType.REGULAR": _call(1),
        "ShapeDtypeStruct": _call(2, "layout"),
        "SwizzleTransform": _call(1),
        "TilingTransform": _call(1),
        "WarpMesh": _call(0, "axis_name"),
        "barrier_arrive": _call(1),
        "barrier_wait": _call(1),
        "broadcasted_iota": _call(3, "layout"),
        "commit_smem": _call(0),
        "copy_gmem_to_smem": _call(3),
        "copy_smem_to_gmem": _call(2, "reduction_op"),
        "inline_mgpu": _call(0, "arg_types", "return_type"),
        "kernel": _call(
            1, "out_type", "scratch_types", "grid", "grid_names", "num_threads", "thread_name", "compiler_params"
        ),
        "layout_cast": _call(2),
        # With an index before jax 0.11.
        "load": (Signature(1, ("layout", "optimized")), Signature(2, ("layout", "optimized"))),
        "semaphore_signal": _call(1, "memory_scope"),
        "semaphore_wait": _call(2, "decrement", "memory_scope"),
        "set_max_registers": _call(1, "action"),
        "wait_smem_to_gmem": _call(1, "wait_read_only"),
        "wgmma": _call(3),
        "wgmma_accumulator_load": _call(1, "wait_n"),
        "wgmma_wait": _call(1),
    },
    "jax.experimental.mosaic.gpu": {
        "FragmentedArray": _call(0, "_registers", "_layout", "_is_signed"),
        "FragmentedArray.__getitem__": _call(2),
        "FragmentedArray.__mul__": _call(2),
        "FragmentedArray.broadcast_in_dim": _call(4),
        "FragmentedArray.reduce": _call(3),
        "FragmentedArray.to_layout": _call(2),
        "WGMMAAccumulator.zero": _call(2),
        "memref_transpose": _call(2),
        "single_thread": _call(0, "scope"),
        "thread_idx": _call(0),
        "utils.memref_ptr": _call(1),
        "wgmma": _call(3, "swizzle"),
    },
    "jax.experimental.mosaic.gpu.fragmented_array": {
        "WGMMA_LAYOUT.registers_shape": _call(1),
        "optimization_barrier": _call(2),
    },
    "jax.experimental.mosaic.gpu.mma_utils": {
        "create_descriptor": _call(1, "swizzle", "group_size", "logical_k_major"),
        "encode_addr": _call(1),
        "encode_descriptor": _call(1, "leading_byte_offset", "stride_byte_offset", "swizzle"),
    },
    "jax.experimental.mosaic.gpu.wgmma": {
        "wgmma_fence": _call(1),
        # One type of elements before jax 0.11.
        "wgmma_m64": (
            Signature(3, (*_WGMMA_M64, "element_type")),
            Signature(3, (*_WGMMA_M64, "a_element_type", "b_element_type")),
        ),
    },
    "jaxlib.mlir.ir": {
        "DenseI64ArrayAttr.get": _call(1),
        "F16Type.get": _call(0),
        "F32Type.get": _call(0),
        "IndexType.get": _call(0),
        "InsertionPoint": _call(1),
        "IntegerType": _call(1),
        "IntegerType.get_signless": _call(1),
        "MemRefType": _call(1),
        "VectorType": _call(1),
        "VectorType.get": _call(2),
    },
    "jaxlib.mlir.dialects.arith": {
        **dict.fromkeys(("addf", "addi", "andi", "constant", "divui", "extsi", "extui"), _call(2)),
        **dict.fromkeys(("extf", "index_cast", "minsi", "minui", "muli", "ori", "remui"), _call(2)),
        **dict.fromkeys(("shli", "shrui", "subi", "xori"), _call(2)),
        "negf": _call(1),
        **dict.fromkeys(("cmpf", "cmpi", "select"), _call(3)),
    },
    "jaxlib.mlir.dialects.llvm": {
        "add": _call(2, "overflow_flags"),
        "bitcast": _call(2),
        "inline_asm": _call(4, "has_side_effects"),
        "ptrtoint": _call(2),
    },
    "jaxlib.mlir.dialects.math": {"fma": _call(3)},
    "jaxlib.mlir.dialects.memref": {"load": _call(2), "store": _call(3)},
    "jaxlib.mlir.dialects.nvvm": {
        "bar_warp_sync": _call(1),
        "wgmma_commit_group_sync_aligned": _call(0),
        "wgmma_wait_group_sync_aligned": _call(1),
    },
    "jaxlib.mlir.dialects.scf": {"IfOp": _call(2, "has_else"), "yield_": _call(1)},
    "jaxlib.mlir.dialects.vector": {
        "extract": _call(1, "dynamic_position", "static_position"),
        "from_elements": _call(2),
        "load": _call(3),
    },
}


def _module(name: str) -> Any:
    return importlib.import_module(name)


@functools.cache
def changes() -> str | None:
    """How the installed JAX differs from what the kernels need; None if it does not. Imports Mosaic GPU, compiles nothing."""
    for path in dict.fromkeys((*NAMES, *CALLS)):
        try:
            module = _module(path)
        except ImportError as error:
            return f"{path} cannot be imported: {error}"
        for name in (*NAMES.get(path, ()), *CALLS.get(path, ())):
            try:
                found = operator.attrgetter(name)(module)
            except AttributeError:
                return f"{path} has no {name}"
            ways = CALLS.get(path, {}).get(name, ())
            if ways and not any(way.fits(found) for way in ways):
                expected = " or ".join(", ".join((str(way.positional), *way.keywords)) for way in ways)
                return f"{path}.{name} cannot be called with ({expected})"
    return None


def refusal(device: DeviceInfo) -> str | None:
    """Why the kernel cannot run with this JAX; ``device`` is one that it is for."""
    changed = changes()
    return f"Mosaic GPU of jax {jax.__version__} is not the one known: {changed}" if changed else None
