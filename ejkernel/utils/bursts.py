"""How a call is timed everywhere in this package: in bursts, in random order, each after a pause.

Timed one after another, the same program was seen to differ by a tenth with its place in the order: the clock of a GPU
follows its power and its temperature, and those follow what ran before. Therefore:

- Runners that are to be compared are timed together. Every round times one burst of each, in an order drawn from a
  seed.
- On an accelerator a burst comes after a pause, so that every burst finds the device in the same state. A first call,
  which brings back clocks and caches, is not counted.
- An accelerator runs its queue in order, so the calls of a burst are queued and waited for once, and a burst is long
  enough for one launch and one wait not to matter. On a CPU, where JAX may run several calls at once, each call is
  waited for.
- The best burst is what to compare by, since noise only adds time; the median is what to expect.

Nothing else of this package is imported, so that a benchmark can load this file in a process where ``ejkernel`` is
another release.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

__all__ = ["BurstTimes", "Places", "clocked", "leaves", "places", "repeat", "time_bursts", "wait"]

ROUNDS = 6
# Seconds before a burst on an accelerator.
PAUSE = 0.02
# The least seconds of a burst. Launching on and waiting for a device takes tens of microseconds; on a CPU the clock is
# read in a tenth of one, and a result is waited for in one.
DEVICE_BURST, HOST_BURST = 0.015, 0.0002
LARGEST_BURST = 4096  # calls

Name = TypeVar("Name", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class BurstTimes:
    """What `time_bursts` found for one runner.

    Attributes:
        seconds: of a call, the mean of each burst, in the order of the rounds.
        calls: how many calls made a burst.
        error: what the runner raised, None if it did not fail. What was measured before is kept in `seconds`.

    Example:
        >>> times = BurstTimes((3.0, 1.0, 2.0), calls=10)
        >>> times.best, times.median
        (1.0, 2.0)
    """

    seconds: tuple[float, ...]
    calls: int
    error: Exception | None = None

    @property
    def best(self) -> float:
        """Seconds of a call in the fastest burst. Raises the error of a runner that failed."""
        return min(self._checked())

    @property
    def median(self) -> float:
        """The median over the bursts. Raises the error of a runner that failed."""
        return statistics.median(self._checked())

    def _checked(self) -> tuple[float, ...]:
        if self.error is not None:
            raise self.error
        return self.seconds


def time_bursts(
    runners: Mapping[Name, Callable[[], Any]],
    *,
    rounds: int = ROUNDS,
    seconds: float = math.inf,
    enough: Callable[[list[float], float], bool] = lambda times, spent: False,
    pause: float | None = None,
    seed: int = 0,
    where: Mapping[Name, Places] | None = None,
    before: Callable[[Name], None] = lambda name: None,
) -> dict[Name, BurstTimes]:
    """Time several runners against each other.

    Each is called once to warm up (which compiles), and then a few times to find how many calls make a burst. After
    that come rounds of one burst of each, in random order. A runner that raises has no more bursts; the others go on.

    Args:
        runners: functions of no arguments by name, of JAX, of torch or of neither.
        rounds: the most bursts of each.
        seconds: how long the timed calls of a runner may take together. A runner that has reached it has no more
            bursts, but every runner has one.
        enough: asked after a burst whether its runner needs no more, with its times so far and the seconds that its
            bursts took.
        pause: seconds before each burst; None: 0.02 for a runner on an accelerator, and none on a CPU.
        seed: of the order.
        where: where runners compute that have been called before; the others are called once to see.
        before: called with a runner's name before each of its bursts. What it raises ends the measurement.

    Returns:
        The times of every runner, in the order of `runners`.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones(8)
        >>> times = time_bursts({"sine": lambda: jnp.sin(x), "broken": lambda: 1 / 0}, rounds=3)
        >>> len(times["sine"].seconds), 0 < times["sine"].best <= times["sine"].median, times["broken"].error
        (3, True, ZeroDivisionError('division by zero'))
    """
    where = where or {}
    every = [_Runner(name, call, pause) for name, call in runners.items()]
    for runner in every:
        runner.warm_up(where.get(runner.name))
    order = random.Random(seed)
    previous = every[-1] if every else None
    for _ in range(rounds):
        left = [
            r
            for r in every
            if r.error is None and not (r.seconds and (r.spent >= seconds or enough(r.seconds, r.spent)))
        ]
        if not left:
            break
        for runner in order.sample(left, len(left)):
            before(runner.name)
            runner.burst(follows_itself=previous is runner)
            previous = runner
    return {r.name: BurstTimes(tuple(r.seconds), r.calls, r.error) for r in every}


class _Runner:
    """One of the runners of a measurement, and its times so far."""

    def __init__(self, name: Any, call: Callable[[], Any], pause: float | None) -> None:
        self.name, self.call, self.pause = name, call, pause
        self.where, self.calls = Places((), ()), 1
        self.seconds: list[float] = []
        self.spent = 0.0
        self.error: Exception | None = None

    def warm_up(self, where: Places | None) -> None:
        """Find where it computes, and how many calls make a burst."""
        try:
            if where is None:
                out = repeat(self.call, 1, "warm-up run", None)
                where, out = places(out), None
            self.where = where
            if self.pause is None:
                self.pause = PAUSE if where.queued else 0.0
            least = DEVICE_BURST if where.queued else HOST_BURST
            while (took := self._clocked(self.calls)) < least and self.calls < LARGEST_BURST:
                # A tenth more than the last one needed: the next is as likely to be faster as slower.
                wanted = math.ceil(1.1 * self.calls * least / took) if took > 0 else LARGEST_BURST
                self.calls = min(max(wanted, 2 * self.calls), LARGEST_BURST)
        except Exception as error:
            self.error = error

    def burst(self, follows_itself: bool) -> None:
        """Time a burst: after a pause, and after an uncounted call unless the last call was its own a moment ago."""
        try:
            if self.pause:
                time.sleep(self.pause)
            if self.pause or not follows_itself:
                repeat(self.call, 1, self.name, self.where)
            took = self._clocked(self.calls)
        except Exception as error:
            self.error = error
            return
        self.seconds.append(took / self.calls)
        self.spent += max(took, 1e-6)  # a clock that does not move, as a mocked one, must not make this endless

    def _clocked(self, calls: int) -> float:
        return clocked(self.call, calls, self.name, self.where)


def clocked(call: Callable[[], Any], count: int, what: Any, where: Places | None) -> float:
    """Seconds of one burst of `count` calls; see `repeat`."""
    start = time.perf_counter()
    repeat(call, count, what, where)
    return time.perf_counter() - start


def repeat(call: Callable[[], Any], count: int, what: Any, where: Places | None) -> Any:
    """Call `count` times and return the last result, waited for.

    Calls of an accelerator are queued and waited for once, others one by one; so they are without a place. What a call
    raises gets a note that says in which of them, by the name `what`.

    Example:
        >>> calls = []
        >>> repeat(lambda: calls.append("called"), 3, "run", None), calls
        (None, ['called', 'called', 'called'])
    """
    queued = where is not None and where.queued
    out, calls = None, 0
    try:
        for _ in range(count):
            calls += 1
            out = None  # a result is freed before the next one is made
            out = call()
            if not queued:
                wait(out, where)
        if queued:
            wait(out, where)
    except Exception as error:
        error.add_note(f"raised in {what} {calls} of {count}")
        raise
    return out


# --- where a function computes, and waiting for it ------------------------------------------------------------------


class Places(NamedTuple):
    """Where arrays live: accelerators of torch, devices of JAX (or its CPU), or something else that can be waited for."""

    torch: tuple[Any, ...]
    jax: tuple[Any, ...]
    unknown: bool = False

    @property
    def queued(self) -> bool:
        """Whether calls may be queued: accelerators run them one by one. JAX's CPU client may run several at once."""
        return (
            bool(self.torch or self.jax) and not self.unknown and all(device.platform != "cpu" for device in self.jax)
        )


def places(*trees: Any) -> Places:
    """Where the arrays and tensors in some values live.

    A torch function may hide its tensors: if nothing is seen and CUDA has been started, torch's current GPU is meant.

    Example:
        >>> import jax.numpy as jnp
        >>> [device.id for device in places({"x": jnp.ones(2)}, 3).jax]
        [0]
    """
    torch = sys.modules.get("torch")
    on_torch, on_jax, unknown = {}, {}, False  # dicts keep the order
    for leaf in leaves(trees):
        if hasattr(leaf, "block_until_ready"):
            # An array that a function has donated is deleted, but still has its sharding.
            devices: Collection[Any] = getattr(getattr(leaf, "sharding", None), "device_set", ())
            on_jax |= dict.fromkeys(sorted(devices, key=lambda device: device.id))
            unknown |= not devices
        elif torch and isinstance(leaf, torch.Tensor) and leaf.device.type not in ("cpu", "meta"):
            on_torch[leaf.device] = None
    if torch and not on_torch and not on_jax and not unknown and torch.cuda.is_initialized():
        on_torch[torch.device("cuda", torch.cuda.current_device())] = None
    return Places(tuple(on_torch), tuple(on_jax), unknown)


def leaves(tree: Any) -> Iterator[Any]:
    """What a value holds: JAX's pytrees are opened, and mappings of any kind, such as the results of torch's models.

    Example:
        >>> list(leaves({"a": [1, (2, None)], "b": {3}}))
        [1, 2, 3]
    """
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


def wait(out: Any, where: Places | None) -> None:
    """Wait until a result has been computed; without a place, wherever it lives."""
    if where is None:
        where = places(out)
    if where.jax or where.unknown:
        jax.block_until_ready(out if isinstance(out, jax.Array) else list(leaves(out)))
    for device in where.torch:
        framework = getattr(sys.modules["torch"], device.type)
        # Only CUDA's takes a device in every version; the others have one device, or wait for the current one.
        framework.synchronize(device) if device.type == "cuda" else framework.synchronize()
