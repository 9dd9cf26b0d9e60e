"""How long a function takes, whether it computes with JAX, with torch or with neither.

JAX and torch return before a device is done. Where a function computes is seen from the arrays that it takes and
returns; torch is looked at only if the caller has imported it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any

import jax
import numpy as np

from ejkernel.errors import InvalidInputError
from ejkernel.lab.gpu import cold_ms, throttled
from ejkernel.lab.memory import observed_bytes, planned_bytes
from ejkernel.lab.pullback import pullback
from ejkernel.utils.bursts import Places, leaves, places, repeat, time_bursts

__all__ = ["Measurement", "measure"]

DEFAULT_SECONDS = 0.2
STABLE = 0.02  # the half-width of the median's 95 % confidence interval, relative to the median
FEWEST_SAMPLES = 5
NOISY, SLOWING = 1.25, 1.1


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What `measure` found.

    Attributes:
        median_ms: the median time of a run, in milliseconds. Runs are timed in bursts, and the mean of a burst counts
            as one time here and in the quantiles.
        mean_ms: the mean.
        min_ms: the least: what to compare functions by, as noise only adds time.
        p10_ms: the 10th percentile.
        p90_ms: the 90th percentile.
        runs: the timed runs.
        compile_ms: tracing and compiling a jitted function, with JAX's caches on disk as they were; None if this
            process had compiled it for these arguments before. Of any other function, by how much the first call took
            longer than the median.
        cold_ms: the time of a run that finds nothing of its input in the caches of a GPU; None elsewhere.
        peak_memory_bytes: the most memory that a run takes on top of what was in use before it: its results and
            temporaries. The compiler's plan for a jitted function; else what the device's allocator saw, or on a CPU
            the process. None where it is not known.
        flags: reasons to doubt the times, each a sentence; empty if there is none.
        backward: the same of the pullback alone, if `vjp=True` asked for it.

    Example:
        >>> fast = Measurement(2.0, 2.1, 1.9, 1.9, 2.4, 100, None, None, None)
        >>> fast.to_json()["median_ms"], fast.to_json()["backward"]
        (2.0, None)
    """

    median_ms: float
    mean_ms: float
    min_ms: float
    p10_ms: float
    p90_ms: float
    runs: int
    compile_ms: float | None
    cold_ms: float | None
    peak_memory_bytes: int | None
    flags: tuple[str, ...] = ()
    backward: Measurement | None = None

    def to_json(self) -> dict[str, Any]:
        """Every field, in types that JSON has."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        backward = self.backward.to_json() if self.backward else None
        return fields | {"flags": list(self.flags), "backward": backward}


def measure(
    fn: Callable[..., Any],
    *args: Any,
    vjp: bool = False,
    min_seconds: float | None = None,
    max_seconds: float = 2.0,
    **kwargs: Any,
) -> Measurement:
    """Time `fn(*args, **kwargs)` until the median is stable.

    The function is measured as it is: pass `jax.jit(fn)` to measure the compiled one. After the first call, which
    compiles, bursts of runs are timed for at least `min_seconds`, and until the median is known to 2 % or `max_seconds`
    have passed; one burst is always timed. On a CPU each run waits for its result. An accelerator runs its queue in
    order, so there the runs of a burst are queued and waited for once, after a pause: what is timed is the device, or
    the host if it cannot fill the queue. To compare functions, time them together: `ejkernel.utils.bursts.time_bursts`.

    Args:
        fn: a function of JAX arrays, of torch tensors, or of neither.
        *args: its arguments.
        vjp: time the backward too: the pullback alone, jitted for JAX. The floating-point arrays among the arguments
            (and a torch module's parameters) are differentiated, the floating-point results get a cotangent of ones.
        min_seconds: the least time to spend on timed runs: 0.2, or `max_seconds` if that is less.
        max_seconds: the most, as far as whole runs allow; the backward has the same budget again.
        **kwargs: more arguments.

    Raises:
        InvalidInputError: for a function that cannot be called, or cannot be called again because it donates its
            arguments, for an impossible budget, or `vjp` without a floating-point argument or result, which ends it
            before the timed runs. What the function raises comes through, with a note on the run.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> found = measure(jax.jit(lambda x: jnp.sin(x)), jnp.ones(8), vjp=True, min_seconds=0.001, max_seconds=0.01)
        >>> found.min_ms <= found.median_ms <= found.p90_ms, found.compile_ms > 0, found.backward.runs > 0
        (True, True, True)
    """
    check_callable(fn)
    budget = _budget(min_seconds, max_seconds)
    if not vjp:
        return _measure(fn, args, kwargs, budget, "run")
    prepare, check = pullback(fn, args, kwargs)
    forward = _measure(fn, args, kwargs, budget, "run", check)
    backward, operands = prepare()
    return dataclasses.replace(forward, backward=_measure(backward, operands, {}, budget, "backward run"))


def _budget(min_seconds: Any, max_seconds: Any) -> tuple[float, float]:
    """The least and the most time."""
    given = [max_seconds] if min_seconds is None else [min_seconds, max_seconds]
    numbers = all(isinstance(seconds, Real) and not isinstance(seconds, bool) for seconds in given)
    least = min(DEFAULT_SECONDS, max_seconds) if numbers and min_seconds is None else min_seconds
    if not numbers or not (0 <= least <= max_seconds < math.inf and max_seconds > 0):
        raise InvalidInputError(
            f"min_seconds is {min_seconds!r} and max_seconds is {max_seconds!r}; expected numbers with "
            "0 <= min_seconds <= max_seconds and max_seconds > 0: change one of them."
        )
    return float(least), float(max_seconds)


def _measure(
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    budget: tuple[float, float],
    what: str,
    check: Callable[[Any], None] = lambda out: None,
) -> Measurement:
    """`check` is shown what `fn` returns, or for a jitted function the shapes of it, as soon as that is known."""
    call = caller(fn, args, kwargs)
    jitted = isinstance(fn, jax.stages.Wrapped)
    compile_ms = peak = None
    if jitted:
        start = time.perf_counter()
        with _compilations() as compiled:
            lowered = repeat(lambda: fn.lower(*args, **kwargs), 1, "compilation", Places((), ()))
            check(lowered.out_info)
            program = repeat(lowered.compile, 1, "compilation", Places((), ()))
        if compiled:
            compile_ms = (time.perf_counter() - start) * 1e3
        peak = planned_bytes(program)
    start = time.perf_counter()
    out = repeat(call, 1, f"the first {what},", None)
    first_ms = (time.perf_counter() - start) * 1e3
    where = places(args, kwargs, out)
    if not jitted:
        check(out)
    del out

    least, most = budget
    times = time_bursts({what: call}, rounds=sys.maxsize, seconds=most, enough=_steady(least), where={what: where})[
        what
    ]
    if times.error is not None:
        raise times.error
    samples = [seconds * 1e3 for seconds in times.seconds]
    flags = [*doubts(samples, most, "max_seconds"), *throttled(where)]
    median = float(np.median(samples))
    cold, problem = cold_ms(call, where, what)
    if peak is None:
        peak = observed_bytes(call, where, what)
    return Measurement(
        median_ms=median,
        mean_ms=float(np.mean(samples)),
        min_ms=float(np.min(samples)),
        p10_ms=float(np.percentile(samples, 10)),
        p90_ms=float(np.percentile(samples, 90)),
        runs=len(samples) * times.calls,
        compile_ms=compile_ms if jitted else max(first_ms - median, 0.0),
        cold_ms=cold,
        peak_memory_bytes=peak,
        flags=(*flags, *problem),
    )


def _steady(least: float) -> Callable[[list[float], float], bool]:
    """Whether bursts of at least so many seconds tell the median well enough."""
    look_at = FEWEST_SAMPLES

    def enough(times: list[float], spent: float) -> bool:
        nonlocal look_at
        if spent < least or len(times) < look_at:
            return False
        look_at = len(times) * 5 // 4 + 1  # not each time: it sorts
        return _uncertainty(times) <= STABLE

    return enough


@contextlib.contextmanager
def _compilations() -> Iterator[list[str]]:
    """Collects an item for each program that XLA is asked for: none if JAX has it in memory."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **details: Any) -> None:
        if "backend_compile" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def check_callable(fn: Any) -> None:
    """Refuse what cannot be called."""
    if not callable(fn):
        raise InvalidInputError(f"fn is {fn!r} ({type(fn).__name__}); expected a function: pass it without calling it.")


def caller(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """`fn` with its arguments, to be called again and again; a failure because one has been deleted is explained."""

    def call() -> Any:
        try:
            return fn(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            arrays = (leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, jax.Array))
            if "deleted" in str(error) and any(array.is_deleted() for array in arrays):
                raise InvalidInputError(
                    "fn cannot be repeated: an array among its arguments has been deleted, as fn donates it "
                    "(donate_argnums or donate_argnames of jax.jit) or as it was donated before; pass a function that does not donate."
                ) from error
            raise

    return call


def _uncertainty(samples: Sequence[float]) -> float:
    """Half the 95 % confidence interval of the median, relative to it; from ranks, so whatever the distribution is."""
    ordered, n = sorted(samples), len(samples)
    reach = 0.98 * math.sqrt(n)
    low, high = max(math.floor(n / 2 - reach), 0), min(math.ceil(n / 2 + reach), n) - 1
    median = float(np.median(ordered))
    return (ordered[high] - ordered[low]) / 2 / median if median else 0.0


def doubts(samples: Sequence[float], seconds: float, setting: str) -> list[str]:
    """Reasons not to trust times that were taken for `seconds`; `setting` is what to raise where that was too short."""
    median = float(np.median(samples))
    found = []
    if len(samples) < FEWEST_SAMPLES:
        found.append(f"few runs: {len(samples)} in {seconds:g} s; raise {setting}")
    elif (uncertainty := _uncertainty(samples)) > STABLE:
        found.append(f"unstable: the median is known to ±{uncertainty:.0%} only")
    if median and (noise := float(np.percentile(samples, 90)) / median) > NOISY:
        found.append(f"noisy: p90 is {noise:.1f} × the median")
    third = len(samples) // 3
    if third >= FEWEST_SAMPLES - 1 and (early := float(np.median(samples[:third]))):
        slower = float(np.median(samples[-third:])) / early
        if slower > SLOWING:
            found.append(f"slowing down: the last third of the runs took {slower:.2f} × the first third")
    return found
