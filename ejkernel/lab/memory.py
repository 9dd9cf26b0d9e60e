"""How much memory a function takes: on an accelerator by its allocator, on a CPU by the memory of the process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.errors import UnsupportedError
from ejkernel.lab.extras import need
from ejkernel.utils.bursts import Places, repeat
from ejkernel.utils.profiling import get_memory_usage

__all__ = ["Memory", "memory_of", "observed_bytes", "planned_bytes"]


class Memory(NamedTuple):
    """Bytes in use before, at the highest point of, and after some work."""

    before: int
    peak: int
    after: int


def memory_of(call: Callable[[], Any], count: int, what: str, where: Places) -> Memory:
    """The memory of the accelerators at `where`, summed, or the process's if there are none, while `call` is called.

    Raises:
        UnsupportedError: if a device keeps no statistics.
    """
    seen: list[Memory] = []
    watches = [_torch_memory(device, seen) for device in where.torch]
    watches += [_jax_memory(device, seen) for device in where.jax if device.platform != "cpu"]
    if not watches:
        watches = [_process_memory(seen)]
        if where.jax:
            call = functools.partial(_alone, call)
    with contextlib.ExitStack() as stack:
        for watch in watches:
            stack.enter_context(watch)
        repeat(call, count, what, None)
    before, peak, after = (sum(values) for values in zip(*seen, strict=True))
    return Memory(before, max(before, peak, after), after)


@contextlib.contextmanager
def _torch_memory(device: Any, seen: list[Memory]) -> Iterator[None]:
    allocator = getattr(sys.modules["torch"], device.type)
    if not hasattr(allocator, "max_memory_allocated"):
        raise UnsupportedError(f"torch keeps no statistics of the peak memory of {device}.")
    allocator.synchronize(device)
    allocator.reset_peak_memory_stats(device)
    before = allocator.memory_allocated(device)
    yield
    seen.append(Memory(before, allocator.max_memory_allocated(device), allocator.memory_allocated(device)))


@contextlib.contextmanager
def _jax_memory(device: Any, seen: list[Memory]) -> Iterator[None]:
    """JAX's highest mark cannot be reset, so memory is filled up to it: then whatever is allocated raises it.

    If that leaves no room for as much as has been in use so far, the mark is taken as it is: an upper bound.
    """
    start = _statistics(device)
    before, mark = start["bytes_in_use"], start["peak_bytes_in_use"]
    gap, ballast = mark - before, None
    if gap and mark + gap <= start.get("bytes_limit", 0):
        with contextlib.suppress(RuntimeError):  # fragmented
            ballast = jax.block_until_ready(jnp.zeros(gap, jnp.uint8, device=device))
    filled = _statistics(device)["bytes_in_use"] - before if ballast is not None else 0
    yield
    end = _statistics(device)
    seen.append(Memory(before, end["peak_bytes_in_use"] - filled, end["bytes_in_use"] - filled))


def _statistics(device: Any) -> dict[str, int]:
    stats = device.memory_stats() or {}
    if not {"bytes_in_use", "peak_bytes_in_use"} <= stats.keys():
        raise UnsupportedError(
            f"JAX keeps no statistics of the peak memory of {device}; with XLA_PYTHON_CLIENT_ALLOCATOR=default it may."
        )
    return stats


@contextlib.contextmanager
def _process_memory(seen: list[Memory]) -> Iterator[None]:
    """Linux keeps the highest mark and resets it on request; elsewhere a thread looks every millisecond."""
    before = _settled_bytes()
    if _reset_highest_mark():
        yield
        seen.append(Memory(before, _highest_mark(), _settled_bytes()))
        return
    highest, done = before, threading.Event()

    def look() -> None:
        nonlocal highest
        while not done.wait(1e-3):
            highest = max(highest, _resident_bytes())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    seen.append(Memory(before, highest, _settled_bytes()))


def _alone(call: Callable[[], Any]) -> Any:
    """Call when the temporaries of the call before are gone."""
    _settled_bytes()
    return call()


def _settled_bytes() -> int:
    """Resident memory when nothing more is freed.

    XLA drops a program's temporaries some time after its results are ready. Freed memory is given back to the system:
    a run that used it again would not show.
    """
    lowest, still = sys.maxsize, 0
    for _ in range(200):
        with contextlib.suppress(OSError, TypeError, AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
        now = _resident_bytes()
        still = still + 1 if now > lowest - 1024**2 else 0
        lowest = min(lowest, now)
        if still == 4:
            break
        time.sleep(0.003)
    return now


def _resident_bytes() -> int:
    # Where it is not known, only psutil can tell.
    return get_memory_usage("cpu")["allocated"] or need("psutil", "the memory of a process").Process().memory_info().rss


def _reset_highest_mark() -> bool:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
        return _highest_mark() > 0
    except OSError:
        return False


def _highest_mark() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        marks = [line.split()[1] for line in file if line.startswith("VmHWM:")]
    return int(marks[0]) * 1024 if marks else 0


def planned_bytes(program: jax.stages.Compiled) -> int | None:
    """What a compiled program allocates: results and temporaries, less the results that take an argument's place."""
    plan = program.memory_analysis()
    if plan is None:
        return None
    return max(plan.temp_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes, 0)


def observed_bytes(call: Callable[[], Any], where: Places, what: str) -> int | None:
    """What a call takes on top of what was in use before it; None where it is not known."""
    try:
        memory = memory_of(call, 1, f"{what} for memory", where)
    except UnsupportedError:
        return None
    return memory.peak - memory.before
