"""How long a function takes and how much memory it needs, whether it computes with JAX, with torch or with neither.

JAX and torch return before a device is done. Where a function computes is seen from the arrays that it takes and returns;
torch is looked at only if the caller has imported it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.callib.devices import resolve_device
from ejkernel.errors import InvalidInputError, UnsupportedError
from ejkernel.lab.extras import need
from ejkernel.ops.utils.fingerprint import get_device_platform
from ejkernel.utils.profiling import get_memory_usage

__all__ = ["Measurement", "measure"]

DEFAULT_SECONDS = 0.2
STABLE = 0.02  # the half-width of the median's 95 % confidence interval, relative to the median
FEWEST_SAMPLES = 5
# The shortest sample, in ms. A clock is read in 0.1 µs and a host's result is waited for in 1 µs; waiting for a device takes
# tens of µs.
HOST_SAMPLE_MS, DEVICE_SAMPLE_MS = 0.2, 5.0
LARGEST_BATCH = 4096
NOISY, SLOWING = 1.25, 1.1
FLUSH_BYTES = 256 * 1024**2  # more than the L2 cache of any GPU so far


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What `measure` found.

    Attributes:
        median_ms: the median time of a run, in milliseconds. Runs that are too short for the clock are timed in batches,
            and then a batch's mean counts as one time here and in the quantiles.
        mean_ms: the mean.
        min_ms: the least.
        p10_ms: the 10th percentile.
        p90_ms: the 90th percentile.
        runs: the timed runs.
        compile_ms: tracing and compiling a jitted function, with JAX's caches on disk as they were; None if this process had
            compiled it for these arguments before. Of any other function, by how much the first call took longer than the
            median.
        cold_ms: the time of a run that finds nothing of its input in the caches of a GPU; None elsewhere.
        peak_memory_bytes: the most memory that a run takes on top of what was in use before it: its results and temporaries.
            The compiler's plan for a jitted function; else what the device's allocator saw, or on a CPU the process.
            None where nobody knows.
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

    The function is measured as it is: pass `jax.jit(fn)` to measure the compiled one. After the first call, which compiles,
    runs are repeated for at least `min_seconds`, and until the median is known to 2 % or `max_seconds` have passed; one
    run is always timed. On a CPU each run waits for its result. A device works through its queue in order, so there the runs
    of a sample are queued and waited for once: what is timed is the device, or the host if it cannot fill the queue.

    Args:
        fn: a function of JAX arrays, of torch tensors, or of neither.
        *args: its arguments.
        vjp: time the backward too: the pullback alone, jitted for JAX. The floating-point arrays among the arguments (and a
            torch module's parameters) are differentiated, the floating-point results get a cotangent of ones.
        min_seconds: the least time to spend on timed runs: 0.2, or `max_seconds` if that is less.
        max_seconds: the most, as far as whole runs allow; the backward has the same budget again.
        **kwargs: more arguments.

    Raises:
        InvalidInputError: for a function that cannot be called, or cannot be called again because it donates its arguments,
            for an impossible budget, or `vjp` without a floating-point argument or result, which ends it before the timed
            runs. What the function raises comes through, with a note on the run.

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
    pullback, check = _pullback(fn, args, kwargs)
    forward = _measure(fn, args, kwargs, budget, "run", check)
    backward, operands = pullback()
    return dataclasses.replace(forward, backward=_measure(backward, operands, {}, budget, "backward run"))


def _budget(min_seconds: Any, max_seconds: Any) -> tuple[float, float]:
    """The least and the most time, in milliseconds."""
    given = [max_seconds] if min_seconds is None else [min_seconds, max_seconds]
    numbers = all(isinstance(seconds, Real) and not isinstance(seconds, bool) for seconds in given)
    least = min(DEFAULT_SECONDS, max_seconds) if numbers and min_seconds is None else min_seconds
    if not numbers or not (0 <= least <= max_seconds < math.inf and max_seconds > 0):
        raise InvalidInputError(
            f"min_seconds is {min_seconds!r} and max_seconds is {max_seconds!r}; expected numbers with "
            "0 <= min_seconds <= max_seconds and max_seconds > 0: change one of them."
        )
    return float(least) * 1e3, float(max_seconds) * 1e3


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
            lowered = run(lambda: fn.lower(*args, **kwargs), 1, "compilation", Places((), ()))
            check(lowered.out_info)
            program = run(lowered.compile, 1, "compilation", Places((), ()))
        if compiled:
            compile_ms = (time.perf_counter() - start) * 1e3
        peak = _planned_bytes(program)
    start = time.perf_counter()
    out = run(call, 1, f"the first {what},", None)
    first_ms = (time.perf_counter() - start) * 1e3
    where = places(args, kwargs, out)
    if not jitted:
        check(out)
    del out

    samples, batch = _samples(call, where, budget, what)
    flags = [*_doubts(samples, budget[1] / 1e3), *_throttled(where)]
    median = float(np.median(samples))
    cold_ms, problem = _cold_ms(call, where, median, what)
    if peak is None:
        peak = _observed_bytes(call, where, what)
    return Measurement(
        median_ms=median,
        mean_ms=float(np.mean(samples)),
        min_ms=float(np.min(samples)),
        p10_ms=float(np.percentile(samples, 10)),
        p90_ms=float(np.percentile(samples, 90)),
        runs=len(samples) * batch,
        compile_ms=compile_ms if jitted else max(first_ms - median, 0.0),
        cold_ms=cold_ms,
        peak_memory_bytes=peak,
        flags=(*flags, *problem),
    )


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
                    "fn cannot be repeated: an array among its arguments has been deleted, as fn donates it (donate_argnums "
                    "or donate_argnames of jax.jit) or as it was donated before; pass a function that does not donate."
                ) from error
            raise

    return call


# --- where a function computes, and waiting for it -------------------------------------------------------------------


_HOST = resolve_device("cpu")


class Places(NamedTuple):
    """Devices: torch's accelerators, and JAX's devices with the host among them."""

    torch: tuple[Any, ...]
    jax: tuple[Any, ...]

    @property
    def queued(self) -> bool:
        """Whether calls may be sent ahead: an accelerator runs them one by one. JAX's CPU client may overlap them."""
        return bool(self.torch or self.jax) and all(device.platform != "cpu" for device in self.jax)

    @property
    def gpu(self) -> Any:
        """The one GPU of either framework, None if there is none or more."""
        torch_gpus = [device for device in self.torch if device.type == "cuda"]
        gpus = torch_gpus + [device for device in self.jax if get_device_platform(device) == "gpu"]
        return gpus[0] if len(gpus) == len(self.torch) + len(self.jax) == 1 else None


def leaves(tree: Any) -> Iterator[Any]:
    """What a value holds: JAX's pytrees are opened, and mappings of any kind, such as the results of torch's models."""
    if isinstance(tree, Mapping):
        children = tree.values()
    elif isinstance(tree, list | tuple | set | frozenset):
        children = tree
    else:
        children = jax.tree.leaves(tree)
        if len(children) == 1 and children[0] is tree:
            yield tree
            return
    for child in children:
        yield from leaves(child)


def places(*trees: Any) -> Places:
    """Where the arrays and tensors in some values live.

    A torch function may hide its tensors: if nothing is seen and CUDA has been started, torch's current GPU is meant.
    """
    torch = sys.modules.get("torch")
    on_torch, on_jax = {}, {}  # dicts keep the order
    for leaf in leaves(trees):
        if isinstance(leaf, jax.Array):
            # A deleted array, which a function has donated, still has its sharding.
            on_jax |= dict.fromkeys(sorted(leaf.sharding.device_set, key=lambda device: device.id))
        elif hasattr(leaf, "block_until_ready"):  # an array that JAX can wait for, but of which it knows no more
            on_jax[_HOST] = None
        elif torch and isinstance(leaf, torch.Tensor) and leaf.device.type not in ("cpu", "meta"):
            on_torch[leaf.device] = None
    if torch and not on_torch and not on_jax and torch.cuda.is_initialized():
        on_torch[torch.device("cuda", torch.cuda.current_device())] = None
    return Places(tuple(on_torch), tuple(on_jax))


def wait(out: Any, where: Places | None) -> None:
    """Wait until a result is there; without a place, wherever it lives."""
    if where is None:
        where = places(out)
    if where.jax:
        jax.block_until_ready(out if isinstance(out, jax.Array) else list(leaves(out)))
    for device in where.torch:
        framework = getattr(sys.modules["torch"], device.type)
        # Only CUDA's takes a device in every version; the others have one device, or wait for the current one.
        framework.synchronize(device) if device.type == "cuda" else framework.synchronize()


def run(
    call: Callable[[], Any],
    count: int,
    what: str,
    where: Places | None,
    *,
    ahead: bool = False,
    finish: Callable[[Any], None] | None = None,
) -> Any:
    """Call `count` times, wait after each call, or if they are sent `ahead` once at the end, and return the last result."""
    out, calls = None, 0
    try:
        for _ in range(count):
            calls += 1
            out = None  # a result is gone before the next one is made
            out = call()
            if not ahead:
                wait(out, where)
        if finish:
            finish(out)
        elif ahead:
            wait(out, where)
    except Exception as error:
        error.add_note(f"raised in {what} {calls} of {count}")
        raise
    return out


def timed(call: Callable[[], Any], count: int, what: str, where: Places | None) -> float:
    """Milliseconds that `count` calls take together, by CUDA's events if they only use torch on one GPU."""
    ahead = where is not None and where.queued
    if ahead and not where.jax and where.gpu is not None:
        cuda = sys.modules["torch"].cuda
        stream = cuda.current_stream(where.gpu)
        start, stop = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)

        def finish(_: Any) -> None:
            stop.record(stream)
            stop.synchronize()

        start.record(stream)
        run(call, count, what, where, ahead=True, finish=finish)
        return start.elapsed_time(stop)
    begin = time.perf_counter()
    run(call, count, what, where, ahead=ahead)
    return (time.perf_counter() - begin) * 1e3


# --- samples and what they tell ------------------------------------------------------------------------------------------


def _samples(call: Callable[[], Any], where: Places, budget: tuple[float, float], what: str) -> tuple[list[float], int]:
    """Milliseconds a run, sample by sample, and the runs of a sample."""
    least, most = budget
    long_enough = DEVICE_SAMPLE_MS if where.queued else HOST_SAMPLE_MS
    batch = 1
    while (ms := timed(call, batch, what, where)) < min(long_enough, most) and batch < LARGEST_BATCH:
        batch *= 2
    samples, spent, look_at = [ms / batch], ms, FEWEST_SAMPLES
    while spent < most:
        if spent >= least and len(samples) >= look_at:
            if _uncertainty(samples) <= STABLE:
                break
            look_at = len(samples) * 5 // 4 + 1  # not each time: it sorts
        ms = timed(call, batch, what, where)
        samples.append(ms / batch)
        # A clock that stands still, as a mocked one does, must not keep us here.
        spent += max(ms, 1e-3)
    return samples, batch


def _uncertainty(samples: list[float]) -> float:
    """Half the 95 % confidence interval of the median, relative to it; from ranks, so whatever the distribution is."""
    ordered, n = sorted(samples), len(samples)
    reach = 0.98 * math.sqrt(n)
    low, high = max(math.floor(n / 2 - reach), 0), min(math.ceil(n / 2 + reach), n) - 1
    median = float(np.median(ordered))
    return (ordered[high] - ordered[low]) / 2 / median if median else 0.0


def _doubts(samples: list[float], max_seconds: float) -> list[str]:
    median = float(np.median(samples))
    doubts = []
    if len(samples) < FEWEST_SAMPLES:
        doubts.append(f"few runs: {len(samples)} in {max_seconds:g} s; raise max_seconds")
    elif (uncertainty := _uncertainty(samples)) > STABLE:
        doubts.append(f"unstable: the median is known to ±{uncertainty:.0%} only")
    if median and (noise := float(np.percentile(samples, 90)) / median) > NOISY:
        doubts.append(f"noisy: p90 is {noise:.1f} × the median")
    third = len(samples) // 3
    if third >= FEWEST_SAMPLES - 1 and (early := float(np.median(samples[:third]))):
        slower = float(np.median(samples[-third:])) / early
        if slower > SLOWING:
            doubts.append(f"slowing down: the last third of the runs took {slower:.2f} × the first third")
    return doubts


# Bits of NVML's clock event reasons that mean less than full speed under load.
_THROTTLES = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}


def _throttled(where: Places) -> list[str]:
    """Why an NVIDIA GPU does not run at full clock right now, if NVML can tell."""
    if where.gpu is None:
        return []
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        try:
            bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(_nvml_handle(pynvml, where.gpu))
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


def _cold_ms(call: Callable[[], Any], where: Places, warm_ms: float, what: str) -> tuple[float | None, tuple[str, ...]]:
    """A run's time after the caches were overwritten: with the overwriting, less the overwriting alone."""
    if where.gpu is None:
        return None, ()
    try:
        flush = _flusher(where)
    except RuntimeError as error:  # out of memory, in either framework
        return None, (f"cold caches not measured: {str(error).partition(chr(10))[0]}",)

    def cold() -> Any:
        flush()
        return call()

    count = max(1, min(16, int(50 / max(warm_ms, 1e-3))))
    with_flush = np.median([timed(cold, count, f"cold {what}", where) for _ in range(3)])
    alone = np.median([timed(flush, count, "flush", where) for _ in range(3)])
    return max(float(with_flush - alone) / count, 0.0), ()


def _flusher(where: Places) -> Callable[[], Any]:
    """A function that writes more than a GPU's caches hold, warmed up."""
    if where.torch:
        torch = sys.modules["torch"]
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=where.gpu).zero_
    else:
        step = jax.jit(lambda x: x + 1, donate_argnums=0)
        buffer = jnp.zeros(FLUSH_BYTES // 4, jnp.int32, device=where.gpu)

        def flush() -> jax.Array:
            nonlocal buffer
            buffer = step(buffer)
            return buffer

    wait(flush(), where)
    return flush


# --- memory ----------------------------------------------------------------------------------------------------------------


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
        run(call, count, what, None)
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
    """Resident memory when nothing more is freed: XLA drops a program's temporaries some time after its results are ready.

    Freed memory is given back to the system, or a run could use it again without being seen to.
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


def _planned_bytes(program: jax.stages.Compiled) -> int | None:
    """What a compiled program allocates: results and temporaries, less the results that take an argument's place."""
    plan = program.memory_analysis()
    if plan is None:
        return None
    return max(plan.temp_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes, 0)


def _observed_bytes(call: Callable[[], Any], where: Places, what: str) -> int | None:
    try:
        memory = memory_of(call, 1, f"{what} for memory", where)
    except UnsupportedError:
        return None
    return memory.peak - memory.before


# --- the backward ------------------------------------------------------------------------------------------------------------


class Pullback(NamedTuple):
    """`prepare` runs the forward once and gives the pullback and its operands; `check` refuses a result without floats."""

    prepare: Callable[[], tuple[Callable[..., Any], tuple]]
    check: Callable[[Any], None]


def _pullback(fn: Callable[..., Any], args: tuple, kwargs: dict) -> Pullback:
    """Checks the arguments."""
    torch = sys.modules.get("torch")
    if torch and (isinstance(fn, torch.nn.Module) or any(isinstance(x, torch.Tensor) for x in leaves((args, kwargs)))):
        return _torch_pullback(torch, fn, args, kwargs)
    values, structure = jax.tree.flatten((args, kwargs))
    chosen = [index for index, value in enumerate(values) if _is_float_array(value)]
    if not chosen:
        raise _nothing_to_differentiate("argument", "pass a floating-point array")
    no_result = _nothing_to_differentiate("result", "time it with vjp=False")

    def floats(inputs: list[jax.Array]) -> list[jax.Array]:
        merged = list(values)
        for index, value in zip(chosen, inputs, strict=True):
            merged[index] = value
        new_args, new_kwargs = jax.tree.unflatten(structure, merged)
        return [leaf for leaf in jax.tree.leaves(fn(*new_args, **new_kwargs)) if _is_float_array(leaf)]

    def prepare() -> tuple[Callable[..., Any], tuple]:
        outputs, pull = jax.vjp(floats, [values[index] for index in chosen])
        if not outputs:
            raise no_result
        return jax.jit(lambda pull, cotangents: pull(cotangents)), (pull, [jnp.ones_like(x) for x in outputs])

    def check(out: Any) -> None:
        dtypes = (getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(out))
        if not any(isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
            raise no_result

    return Pullback(prepare, check)


def _torch_pullback(torch: Any, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Pullback:
    inputs: list[Any] = []

    def differentiable(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        inputs.append(leaf.detach().requires_grad_())
        return inputs[-1]

    new_args, new_kwargs = jax.tree.map(differentiable, (args, kwargs))
    if isinstance(fn, torch.nn.Module):
        inputs += [parameter for parameter in fn.parameters() if parameter.requires_grad]
    if not inputs:
        raise _nothing_to_differentiate("argument", "pass a floating-point tensor")

    def prepare() -> tuple[Callable[..., Any], tuple]:
        with torch.enable_grad():
            found = leaves(fn(*new_args, **new_kwargs))
        outputs = [leaf for leaf in found if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not outputs:
            raise _nothing_to_differentiate("result", "time it with vjp=False")
        cotangents = [torch.ones_like(output) for output in outputs]
        pull = functools.partial(torch.autograd.grad, retain_graph=True, allow_unused=True)
        return pull, (outputs, inputs, cotangents)

    def check(out: Any) -> None:
        prepare()  # a tensor made without gradients does not show whether it could be differentiated

    return Pullback(prepare, check)


def _is_float_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray) and jnp.issubdtype(value.dtype, jnp.inexact)


def _nothing_to_differentiate(what: str, advice: str) -> InvalidInputError:
    return InvalidInputError(f"vjp is True, but fn has no floating-point {what} to differentiate: {advice}.")
