"""Measure implementations and their parameters together, and keep the winners."""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from ejkernel.contracts.call import Call
from ejkernel.contracts.device import DeviceInfo, describe
from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.registry import Choice, Implementation, kernel_registry
from ejkernel.errors import InvalidInputError
from ejkernel.ops.config import chain
from ejkernel.ops.config.context import surroundings, tuning
from ejkernel.utils.bursts import ROUNDS, time_bursts

P = ParamSpec("P")
R = TypeVar("R")

SECONDS_A_CANDIDATE = 0.5
COMPILERS = 16


def autotune(fn: Callable[P, R]) -> Callable[P, R]:
    """A function that measures what has not been measured of the operations in ``fn``, then runs it.

    Each operation that ``fn`` calls, forward and (where ``fn`` differentiates) backward, is timed on random arrays of the
    same shapes, with every implementation that can run it and the parameters each proposes. The fastest of each are kept
    in the store; what the store holds is not timed again. ``fn`` may be jitted.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel import autotune, flash_attention
        >>> x = jnp.ones((1, 16, 2, 8))
        >>> out = autotune(flash_attention)(x, x, x, causal=True)  # doctest: +SKIP
    """
    if not callable(fn):
        raise InvalidInputError(f"autotune takes a function and returns one, got {fn!r}: write autotune(fn)(*args).")

    @functools.wraps(fn)
    def tuned(*args: P.args, **kwargs: P.kwargs) -> R:
        with tuning():
            return fn(*args, **kwargs)

    return tuned


def measure(
    call: Call, device: DeviceInfo, entries: list[Implementation], direction: str
) -> dict[Implementation, chain.Record]:
    """Time every implementation with each of its parameters; keep and return the best of each."""
    here = _device(device)
    if here is None and not surroundings().tuning:
        return {}  # the environment asks for tuning in general, not for tuning what is not here
    if here is None:
        raise InvalidInputError(
            f"autotune cannot measure for {device}: no such device is here. Leave the block of ejkernel.target, or tune there."
        )
    stopped = threading.Event()
    # A thread of its own: the caller may be in the middle of a trace, and that is a state of its thread.
    with ThreadPoolExecutor(1, "ejkernel-autotune") as pool:
        measuring = pool.submit(_measure_here, call, device, here, entries, direction, stopped)
        try:
            return measuring.result()
        except (
            BaseException
        ):  # Ctrl-C, say: the worker is waited for, so that no process ends in the middle of a compilation
            stopped.set()
            raise


def _device(device: DeviceInfo) -> jax.Device | None:
    """The device itself, if this process has it."""
    try:
        there = jax.local_devices(backend=device.kind)
    except RuntimeError:
        return None
    return next((d for d in there if replace(describe(d), shared_by=device.shared_by) == device), None)


def _measure_here(call, device, here, entries, direction, stopped) -> dict[Implementation, chain.Record]:
    candidates = [(entry, params) for entry in entries for params in proposals(call, device, entry, direction)]
    best: dict[Implementation, chain.Record] = {}
    with (
        jax.default_device(here),
        _Progress(f"tuning {call.operation}, {direction}", (1 + ROUNDS) * len(candidates), stopped) as progress,
    ):
        arrays = kernel_registry.operation(call.algorithm).sample(call.shapes)
        compiled = _compile_all(call, device, here, candidates, arrays, direction, progress)
        times = time_bursts(
            dict(zip(candidates, compiled, strict=True)),
            seconds=SECONDS_A_CANDIDATE,
            before=lambda candidate: progress.step(f"timing {candidate[0]} {_words(candidate[1])}"),
        )
    for (entry, params), found in times.items():
        if found.error is not None:
            warnings.warn(
                f"{call.operation} on {entry} with {_words(params)} failed while tuning: {found.error}", stacklevel=2
            )
        elif entry not in best or found.best < best[entry].seconds:
            best[entry] = chain.Record(params, found.best, "autotune")
    for entry, record in best.items():
        chain.remember(call, device, entry, direction, record)
    return best


def proposals(call: Call, device: DeviceInfo, entry: Implementation, direction: str) -> list[FwdParams | BwdParams]:
    """The parameters worth timing: what the kernel would use by itself, and what it proposes beside that."""
    defaults = chain.heuristic(call, device, entry, direction)
    space = getattr(entry.kernel, "space", None)
    proposed = space(call.shapes, call.spec, device, direction) if space else []
    return list(dict.fromkeys(chain.effective(call, device, entry, direction, x) for x in (defaults, *proposed)))


def _compile_all(call, device, here, candidates, arrays, direction, progress) -> list[Callable[[], Any]]:
    """A runner of every candidate, which raises what its compilation raised. Several are compiled at a time, all before timing."""
    ones = functools.cache(jnp.ones)  # all runners are kept until the end, so they share what is not theirs

    def build(candidate: tuple[Implementation, Any]) -> Callable[[], Any]:
        try:
            with jax.default_device(here):  # a setting of each thread
                work, args = _work(*candidate, call, device, arrays, direction)
                return functools.partial(work.lower(*args).compile(), *_concrete(args, ones))
        except Exception as error:
            return functools.partial(_reraise, error)

    workers = max(1, min(COMPILERS, os.cpu_count() or 1, len(candidates)))
    built = []
    with ThreadPoolExecutor(workers, "ejkernel-compile") as pool:
        try:
            for (entry, params), run in zip(candidates, pool.map(build, candidates), strict=True):
                progress.step(f"compiling {entry} {_words(params)}")
                built.append(run)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return built


def _reraise(error: Exception) -> None:
    raise error


def _work(
    entry: Implementation, params: Any, call: Call, device: DeviceInfo, arrays: dict[str, Any], direction: str
) -> tuple[Any, tuple]:
    """A jitted function to time, and its arguments, of which some may be abstract."""
    operation = kernel_registry.operation(call.algorithm)
    if entry.plain:
        own = {n: x for n, x in call.arguments.items() if any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(x))}
        return jax.jit(lambda own: operation.run_plain(entry, {**call.arguments, **own})), (operation.sample(own),)
    fwd_params = params if direction == "forward" else chain.heuristic(call, device, entry, "forward")
    fwd_params = chain.effective(call, device, entry, "forward", fwd_params)
    first = Choice(entry, fwd_params, "autotune", device)
    forward = jax.jit(lambda arrays: operation.run_forward(first, arrays, call.spec))
    if direction == "forward":
        return forward, (arrays,)
    residuals = jax.eval_shape(forward, arrays)
    wanted = frozenset(name for name in operation.gradients if name in arrays)
    second = Choice(entry, params, "autotune", device)
    backward = jax.jit(lambda arrays, *rest: operation.run_backward(second, wanted, arrays, call.spec, *rest))
    return backward, (arrays, *residuals, *residuals)


def _concrete(args: tuple, ones: Callable[[tuple[int, ...], Any], jax.Array]) -> tuple:
    """Ones in the place of what is abstract."""
    return jax.tree.map(
        lambda x: ones(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x,
        args,
    )


def _words(params: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in params.to_dict().items()) or "no parameters"


class _Stopped(Exception):
    """Whoever asked for the measurement no longer waits for it."""


class _Progress:
    """A bar on standard error if that is a terminal, else nothing: tuning must not litter logs."""

    WIDTH = 24

    def __init__(self, title: str, total: int, stopped: threading.Event):
        self.title, self.total, self.done, self.stopped = title, total, 0, stopped
        self.visible = sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        return self

    def step(self, what: str) -> None:
        if self.stopped.is_set():
            raise _Stopped
        if self.visible:
            filled = self.WIDTH * self.done // max(1, self.total)
            bar = "█" * filled + "░" * (self.WIDTH - filled)
            print(
                f"\r\033[K{self.title} {bar} {self.done + 1}/{self.total} {what}", end="", file=sys.stderr, flush=True
            )
        self.done += 1

    def __exit__(self, *_: object) -> None:
        if self.visible:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
