"""Calling a CUDA kernel from JAX."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax import Array

from ejkernel.callib.chips import CHIPS
from ejkernel.contracts.device import DeviceInfo, describe
from ejkernel.contracts.support import cuda, is_present
from ejkernel.kernels._cuda import build, toolchain
from ejkernel.kernels._cuda.toolchain import BuildError
from ejkernel.kernels.common.varying import vary_as

TARGET = "ejkernel_cuda_launch"
OLDEST = 80
# Above Triton's 10; what is taken off where that is faster.
PRIORITY, BELOW_TRITON = 20, 11
KIB = 1024
# Of chips that are not in the table: what every one of capability 8.0 and later has.
LEAST_SHARED_MEMORY = 99 * KIB
NVRTC_PACKAGE = "nvidia-cuda-nvrtc"


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
        grid: CTAs.
        threads: of a CTA.
        shared_memory: bytes of a CTA.
        cooperative: whether all CTAs run at once; the driver refuses what does not fit.
    """

    grid: int
    threads: int
    shared_memory: int
    cooperative: bool = False


def launch(
    source: str,
    entry: str,
    macros: Mapping[str, object],
    operands: Sequence[Array],
    results: Sequence[jax.ShapeDtypeStruct],
    scalars: Sequence[int],
    how: Launch,
    *,
    zeroed: int = 0,
    device: DeviceInfo | None = None,
) -> list[Array]:
    """Run a kernel whose parameters are pointers to the operands and to the results, then the scalars as ``int``.

    ``zeroed``: how many of the last results are zeros when the kernel starts; the others hold anything.
    """
    code = build.cubin(source, architecture(device), tuple(sorted(macros.items())))
    _register()
    run = jax.ffi.ffi_call(TARGET, list(results))
    made = run(
        *operands,
        key=hashlib.sha256(code).hexdigest(),
        entry=entry,
        cubin=np.frombuffer(code, np.uint8),
        grid=np.int32(how.grid),
        threads=np.int32(how.threads),
        shared_memory=np.int32(how.shared_memory),
        cooperative=np.int32(how.cooperative),
        zeroed=np.int32(zeroed),
        scalars=np.asarray(scalars, np.int32),
    )
    return vary_as(list(made), *operands)


@functools.cache
def _register() -> ctypes.CDLL:
    """Make the launcher known to XLA; it is returned because it must stay loaded."""
    library = ctypes.CDLL(str(build.launcher()))
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library[TARGET]), platform="CUDA")
    return library


def architecture(device: DeviceInfo | None) -> str:
    """The compiler's name of a device's architecture; Hopper's has instructions that no other has."""
    capability = (device or describe()).capability
    return "sm_90a" if capability == 90 else f"sm_{capability}"


@dataclass(frozen=True)
class Capacity:
    """What a cooperative launch may take: CTAs at one a multiprocessor, and bytes of shared memory of each."""

    multiprocessors: int
    shared_memory: int


def capacity(device: DeviceInfo | None) -> Capacity:
    """A device's; of a chip that is not in the table as little as any has."""
    device = device or describe()
    chip = CHIPS.get(device.name)
    shared = chip.shared_memory_per_block if chip else LEAST_SHARED_MEMORY
    counted = _multiprocessors_here() if is_present(device) and device.kind == "gpu" else None
    return Capacity(counted or (chip.sm_count if chip else 1), shared)


@functools.cache
def _multiprocessors_here() -> int | None:
    """Of the GPU of this process, which may be a part of its chip."""
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    return min((getattr(device, "core_count", 0) for device in gpus), default=0) or None


def refusal(device: DeviceInfo) -> str | None:
    """Why kernels in CUDA cannot be built for a device, or not be run on it."""
    if device.capability < OLDEST:
        return cuda(OLDEST).refusal(device)
    return _compilers(device.capability) or (_probe(architecture(device)) if is_present(device) else None)


@functools.cache
def _compilers(capability: int) -> str | None:
    if toolchain.host_compiler() is None:
        return "needs a C++ compiler: install g++ or clang++"
    compiler = toolchain.device_compiler()
    if compiler is None:
        return f"needs nvcc of a CUDA toolkit, or NVRTC: pip install {NVRTC_PACKAGE}, which jax[cuda13] brings"
    try:
        known = compiler.architectures()
    except BuildError as error:
        return _first_line(error)
    if capability not in known:
        return f"{compiler.identity.splitlines()[0]} does not compile for capability {capability}: install a newer one"
    return None


@functools.cache
def _probe(architecture: str) -> str | None:
    """What the compilers say to the launcher and to an empty kernel: that they are there does not mean that they work."""
    try:
        _register()
        build.cubin("probe.cu", architecture, ())
    except (BuildError, OSError, AttributeError) as error:
        return f"cannot be built ({_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if "error" in line.lower()] or str(error).splitlines() or [""]
    return lines[0].strip()
