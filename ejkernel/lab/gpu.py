"""The state of a GPU while it is timed: reasons for lower clocks, and the time of a run with cold caches."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.utils.fingerprint import get_device_platform
from ejkernel.utils.bursts import Places, time_bursts, wait

__all__ = ["cold_ms", "the_gpu", "throttled"]

FLUSH_BYTES = 256 * 1024**2  # more than the L2 cache of any GPU so far


def the_gpu(where: Places) -> Any:
    """The one GPU of either framework, None if there is none or more."""
    gpus = [device for device in where.torch if device.type == "cuda"]
    gpus += [device for device in where.jax if get_device_platform(device) == "gpu"]
    return gpus[0] if len(gpus) == len(where.torch) + len(where.jax) == 1 else None


# Bits of NVML's clock event reasons that mean less than full speed under load.
_THROTTLES = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}


def throttled(where: Places) -> list[str]:
    """Why an NVIDIA GPU does not run at full clock right now, if NVML can tell."""
    if (gpu := the_gpu(where)) is None:
        return []
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        try:
            bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(_nvml_handle(pynvml, gpu))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # no driver, another vendor's GPU, or one that does not tell
        return []
    reasons = [reason for bit, reason in _THROTTLES.items() if bits & bit]
    return [f"throttled: {', '.join(reasons)}"] if reasons else []


def _nvml_handle(pynvml: Any, gpu: Any) -> Any:
    index = getattr(gpu, "index", None)  # torch's
    if index is None:
        index = getattr(gpu, "local_hardware_id", None) or 0
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    name = visible[index] if index < len(visible) and visible[index] else str(index)
    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)


def cold_ms(call: Callable[[], Any], where: Places, what: str) -> tuple[float | None, tuple[str, ...]]:
    """A run's time after the caches were overwritten, and what went wrong.

    It is the time with the overwriting less that of the overwriting alone. None where there is no single GPU.
    """
    gpu = the_gpu(where)
    if gpu is None:
        return None, ()
    try:
        flush = _flusher(where, gpu)
    except RuntimeError as error:  # out of memory, in either framework
        return None, (f"cold caches not measured: {str(error).partition(chr(10))[0]}",)

    def cold() -> Any:
        flush()
        return call()

    cold_run = f"cold {what}"
    times = time_bursts({cold_run: cold, "flush": flush}, where={cold_run: where, "flush": where})
    return max(times[cold_run].best - times["flush"].best, 0.0) * 1e3, ()


def _flusher(where: Places, gpu: Any) -> Callable[[], Any]:
    """A function that writes more than a GPU's caches hold, warmed up."""
    if where.torch:
        torch = sys.modules["torch"]
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=gpu).zero_
    else:
        step = jax.jit(lambda x: x + 1, donate_argnums=0)
        buffer = jnp.zeros(FLUSH_BYTES // 4, jnp.int32, device=gpu)

        def flush() -> jax.Array:
            nonlocal buffer
            buffer = step(buffer)
            return buffer

    wait(flush(), where)
    return flush
