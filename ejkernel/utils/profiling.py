"""Timing of a block, and memory in use on a device."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax

from ejkernel.callib.chips import identify
from ejkernel.callib.devices import resolve_device

__all__ = ["Timing", "get_memory_usage", "timer"]

Result = TypeVar("Result")


class Timing:
    """What `timer` yields: call it with a result to wait for the device, read `elapsed` at any time.

    Example:
        >>> timing = Timing()
        >>> timing.stop()
        >>> timing.elapsed == timing.elapsed >= 0
        True
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._stop: float | None = None

    def __call__(self, out: Result) -> Result:
        """Wait until every array in `out` has been computed, and return it."""
        return jax.block_until_ready(out)

    def stop(self) -> None:
        """Stop the clock: `elapsed` no longer changes."""
        self._stop = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds from the start to the end of the block, or to now inside it."""
        return (time.perf_counter() if self._stop is None else self._stop) - self._start


@contextmanager
def timer(name: str = "Operation") -> Iterator[Timing]:
    """Time a block and print `NAME took S seconds`.

    JAX returns before the device has finished: pass the result through the handle, or only the dispatch is timed.

    Example:
        >>> import jax.numpy as jnp
        >>> with timer("Matmul") as handle:  # doctest: +ELLIPSIS
        ...     out = handle(jnp.ones((8, 8)) @ jnp.ones((8, 8)))
        Matmul took ... seconds
        >>> handle.elapsed > 0
        True
    """
    timing = Timing()
    try:
        yield timing
    finally:
        timing.stop()
        print(f"{name} took {timing.elapsed:.3f} seconds")


def get_memory_usage(device: Any = None) -> dict[str, int]:
    """Memory in bytes: `allocated` to arrays, `reserved` by the allocator, and the `limit`.

    On a CPU these are the resident memory of the process and the memory of the machine. For an accelerator without
    memory statistics they are the size of its live arrays and the memory of its data sheet; unknown values are 0.

    Args:
        device: a `jax.Device`; None is JAX's default device.

    Example:
        >>> usage = get_memory_usage()
        >>> sorted(usage), 0 < usage["allocated"] < usage["limit"]
        (['allocated', 'limit', 'reserved'], True)
    """
    device = resolve_device(device)
    stats = _statistics(device)
    if stats is None and getattr(device, "platform", "") == "cpu":
        return {"allocated": _resident_bytes(), "reserved": 0, "limit": _machine_bytes()}
    stats = stats or {}
    chip = identify(str(getattr(device, "device_kind", "")))
    allocated = stats.get("bytes_in_use")
    return {
        "allocated": int(_live_bytes(device) if allocated is None else allocated),
        "reserved": int(stats.get("bytes_reserved") or stats.get("pool_bytes") or 0),
        "limit": int(stats.get("bytes_limit") or (chip.memory_bytes if chip else 0)),
    }


def _statistics(device: Any) -> dict[str, Any] | None:
    try:
        return device.memory_stats() or None
    except (
        AttributeError,
        NotImplementedError,
        RuntimeError,
    ):  # a described device, or a plugin without them
        return None


def _live_bytes(device: Any) -> int:
    shards = (shard for array in jax.live_arrays() for shard in array.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def _resident_bytes() -> int:
    try:
        import psutil  # optional; the only portable source of the current rather than the peak size
    except ImportError:
        return _resident_bytes_from_proc()
    return psutil.Process().memory_info().rss


def _resident_bytes_from_proc() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0


def _machine_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # Windows has neither
        return 0
