"""Measure implementations and their parameters together, and keep the winners."""

from __future__ import annotations

import functools
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from ejkernel.errors import InvalidInputError
from ejkernel.ops.config import chain
from ejkernel.ops.core.context import surroundings, tuning
from ejkernel.ops.core.device import DeviceInfo, describe
from ejkernel.ops.core.registry import Implementation, kernel_registry
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams

if TYPE_CHECKING:
    from ejkernel.ops.core.operation import Call

R = TypeVar("R")

ROUNDS = 5
SECONDS_A_CANDIDATE = 0.5


def autotune(fn: Callable[..., R]) -> Callable[..., R]:
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
    def tuned(*args: Any, **kwargs: Any) -> R:
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
    results: dict[Implementation, chain.Record] = {}
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.update(_measure_here(call, device, here, entries, direction))
        except BaseException as error:
            failures.append(error)

    # A thread of its own: the caller may be in the middle of a trace, and that is a state of its thread.
    thread = threading.Thread(target=work, name="ejkernel-autotune")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results


def _device(device: DeviceInfo) -> jax.Device | None:
    """The device itself, if this process has it."""
    try:
        there = jax.local_devices(backend=device.kind)
    except RuntimeError:
        return None
    return next((d for d in there if replace(describe(d), shared_by=device.shared_by) == device), None)


def _measure_here(call, device, here, entries, direction) -> dict[Implementation, chain.Record]:
    operation = kernel_registry.operation(call.algorithm)
    candidates = [(entry, params) for entry in entries for params in _candidates(call, device, entry, direction)]
    best: dict[Implementation, chain.Record] = {}
    with jax.default_device(here), _Progress(f"tuning {call.operation}, {direction}", len(candidates)) as progress:
        arrays = operation.sample(call.shapes)
        for entry, params in candidates:
            progress.step(f"{entry} {_words(params)}")
            try:
                seconds = _time(_runner(entry, params, call, device, arrays, direction))
            except Exception as error:
                warnings.warn(
                    f"{call.operation} on {entry} with {_words(params)} failed while tuning: {error}", stacklevel=2
                )
                continue
            if entry not in best or seconds < best[entry].seconds:
                best[entry] = chain.Record(params, seconds, "autotune")
    for entry, record in best.items():
        chain.remember(call, device, entry, direction, record)
    return best


def _candidates(call: Call, device: DeviceInfo, entry: Implementation, direction: str) -> list[FwdParams | BwdParams]:
    defaults = chain.heuristic(call, device, entry, direction)
    space = getattr(entry.kernel, "space", None)
    proposed = space(call.shapes, call.spec, device, direction) if space else []
    return list(dict.fromkeys([defaults, *proposed]))


def _runner(
    entry: Implementation, params: Any, call: Call, device: DeviceInfo, arrays: dict[str, Any], direction: str
) -> Callable[[], Any]:
    operation = kernel_registry.operation(call.algorithm)
    if entry.plain:
        own = {n: x for n, x in call.arguments.items() if any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(x))}
        own = operation.sample(own)
        run = jax.jit(lambda own: operation.run_plain(entry, {**call.arguments, **own}))
        return lambda: run(own)
    fwd_params = params if direction == "forward" else chain.heuristic(call, device, entry, "forward")
    forward = jax.jit(lambda arrays: operation.run_forward(entry, arrays, call.spec, fwd_params))
    if direction == "forward":
        return lambda: forward(arrays)
    residuals = jax.eval_shape(forward, arrays)
    out, lse = (jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), r) for r in residuals)
    wanted = frozenset(name for name in operation.gradients if name in arrays)
    backward = jax.jit(lambda arrays, *rest: operation.run_backward(entry, wanted, arrays, call.spec, params, *rest))
    return lambda: backward(arrays, out, lse, out, lse)


def _time(run: Callable[[], Any]) -> float:
    """The best of a few runs, after one that compiles and one that warms up."""
    jax.block_until_ready(run())
    best, spent = float("inf"), 0.0
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds = time.perf_counter() - start
        best, spent = min(best, seconds), spent + seconds
        if spent > SECONDS_A_CANDIDATE:
            break
    return best


def _words(params: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in params.to_dict().items()) or "no parameters"


class _Progress:
    """A bar on standard error if that is a terminal, else nothing: tuning must not litter logs."""

    WIDTH = 24

    def __init__(self, title: str, total: int):
        self.title, self.total, self.done = title, total, 0
        self.visible = sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        return self

    def step(self, what: str) -> None:
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
