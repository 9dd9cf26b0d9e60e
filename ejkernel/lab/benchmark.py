"""Latency, memory and kernel counts of functions of JAX or torch.

Where a function computes is seen from the arrays that it takes and returns, so nothing has to be said about it. With
`n_warmup=0` nothing has been returned yet when the clock starts: then `benchmark_memory` goes by the arguments alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ejkernel.lab.arguments import counted
from ejkernel.lab.memory import memory_of
from ejkernel.lab.profiles import count_cuda_kernels, default_schedule
from ejkernel.lab.timing import caller, check_callable
from ejkernel.utils.bursts import PAUSE, Places, clocked, places, repeat

__all__ = ["benchmark_latency", "benchmark_memory", "count_cuda_kernels", "default_schedule", "warmup"]

GB = 1024**3


def warmup(fn: Callable[..., Any], *args: Any, n_warmup: int = 10, **kwargs: Any) -> None:
    """Call `fn(*args, **kwargs)` and wait for its device, `n_warmup` times, so that later calls compile nothing.

    What `fn` raises comes through, here and in the benchmarks, with a note on which run it was.

    Example:
        >>> calls = []
        >>> warmup(calls.append, "called", n_warmup=3)
        >>> calls
        ['called', 'called', 'called']
    """
    _warm(fn, args, kwargs, n_warmup)


def benchmark_latency(
    fn: Callable[..., Any], *args: Any, n_warmup: int = 10, n_repeat: int = 100, **kwargs: Any
) -> float:
    """The mean time of `fn(*args, **kwargs)` over `n_repeat` calls, in milliseconds.

    The timed calls are one burst of `ejkernel.utils.bursts`, after the warm-up: an accelerator is sent all of them and
    waited for once, as it runs them in order, so the mean is that of the device, or of the host if it cannot send them
    fast enough. On a CPU each call is waited for, since JAX could run several at once.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> benchmark_latency(jax.jit(jnp.sin), jnp.ones(8), n_warmup=2, n_repeat=3) > 0
        True
    """
    n_repeat = counted("n_repeat", n_repeat, least=1)
    call, where = _warm(fn, args, kwargs, n_warmup)
    return clocked(call, n_repeat, "timed run", where) / n_repeat * 1e3


def benchmark_memory(
    fn: Callable[..., Any], *args: Any, n_warmup: int = 10, n_repeat: int = 100, **kwargs: Any
) -> tuple[float, float]:
    """The highest memory in use during `n_repeat` calls of `fn(*args, **kwargs)`, and the memory in use after them.

    On an accelerator it is what the framework has allocated there, the arguments included. JAX cannot reset its highest
    mark, so memory is filled up to the mark for the time of the calls; if that does not leave enough room, the mark is
    an upper bound. On a CPU it is the resident memory of the whole process. Results are dropped, so they count in the
    peak only.

    Returns:
        `(peak_memory_gb, allocated_memory_gb)`, with a GB of 1024**3 bytes, as torch's own tables count. The peak is
        never the smaller one.

    Example:
        >>> peak, allocated = benchmark_memory(sorted, [2, 1], n_warmup=1, n_repeat=2)
        >>> peak >= allocated > 0
        True
    """
    n_repeat = counted("n_repeat", n_repeat, least=1)
    call, where = _warm(fn, args, kwargs, n_warmup)
    memory = memory_of(call, n_repeat, "measured run", where or places(args, kwargs))
    return memory.peak / GB, memory.after / GB


def _warm(fn: Any, args: tuple, kwargs: dict, n_warmup: Any) -> tuple[Callable[[], Any], Places | None]:
    """The call, and where it computes if it has been called."""
    check_callable(fn)
    n_warmup = counted("n_warmup", n_warmup, least=0)
    call = caller(fn, args, kwargs)
    if n_warmup == 0:
        return call, None
    if places(args, kwargs).queued:
        time.sleep(PAUSE)  # an accelerator in the state in which every burst finds it, whatever ran before
    return call, places(args, kwargs, repeat(call, n_warmup, "warm-up run", None))
