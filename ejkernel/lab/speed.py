"""How fast ours and the peers are: implementations of one call are timed together, in bursts, and become rows."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import kernel_registry
from ejkernel.contracts.device import describe
from ejkernel.lab import calls, peers, variants, workloads
from ejkernel.lab.accuracy import relative_errors
from ejkernel.lab.gpu import throttled
from ejkernel.lab.memory import observed_bytes
from ejkernel.lab.page.comparison import LEVEL
from ejkernel.lab.timing import FEWEST_SAMPLES, doubts
from ejkernel.lab.variants import OURS, Variant
from ejkernel.lab.workloads import Workload, kernels_of
from ejkernel.utils.bursts import BurstTimes, Places, places, time_bursts

FORWARD, BOTH = "forward", "forward + backward"
MOST_BURSTS = 100  # of one implementation


class Job(NamedTuple):
    """One call, and the implementations to time on it together.

    Attributes:
        operation: its name.
        length: of the call that stands for the operation; None for a call of the user's own.
        what: ``FORWARD`` or ``BOTH``.
        implementations: names of ours and of peers.
        given: a call of the user's own.
        search: every parameter set of ours too, and say if one is faster than what is selected.
    """

    operation: str
    length: int | None
    what: str
    implementations: tuple[str, ...]
    given: calls.Given | None = None
    search: bool = False

    def __str__(self) -> str:
        return f"{self.name()}, {self.what}"

    def name(self) -> str:
        """The call in words."""
        return self.given.workload.name if self.given else f"{self.operation}, {self.length}"

    def workload(self) -> Workload:
        """The call, with its arrays."""
        return self.given.workload if self.given else workloads.timed(self.operation, self.length, _accelerator())

    def again(self) -> str:
        """The arguments of a command that name the call again."""
        return self.given.again if self.given else f"{self.operation} --length {self.length}"


class Prepared(NamedTuple):
    """An implementation that has run once: its call, where it computes, its result, what its compiler says of it."""

    call: Callable[[], Any]
    where: Places
    outcome: Any
    memory_bytes: int | None
    compile_ms: float | None


def bench_plan(
    operations: list[str],
    lengths: tuple[int, ...],
    *,
    with_peers: bool = True,
    pinned: bool = False,
    backward: bool = True,
    search: bool = False,
) -> list[Job]:
    """What is to be timed, in the order in which it is."""
    return [
        Job(operation, length, what, _names(operation, with_peers, pinned), None, search)
        for operation in operations
        for length in lengths
        for what in (FORWARD, *[BOTH] * backward)
    ]


def own_plan(
    given: list[calls.Given],
    *,
    with_peers: bool = True,
    pinned: bool = False,
    backward: bool = True,
    search: bool = True,
) -> list[Job]:
    """The same for calls of the user's own; one without gradients has a forward only."""
    return [
        Job(call.workload.operation, None, what, _names(call.workload.operation, with_peers, pinned), call, search)
        for call in given
        for what in (FORWARD, *[BOTH] * (backward and bool(call.workload.differentiable)))
    ]


def _names(operation: str, with_peers: bool, pinned: bool) -> tuple[str, ...]:
    names = [OURS]
    if pinned:
        entries = kernel_registry.list_implementations(kernels_of(operation))
        names += [f"{OURS} {e.platform.value}" for e in entries if e.support.devices.refusal(describe()) is None]
    return (*names, *(peers.names(operation) if with_peers else ()))


def _accelerator() -> bool:
    return describe().kind != "cpu"


def bench(job: Job, *, seconds: float = 0.3) -> list[dict[str, Any]]:
    """A row for each implementation of a job, timed for about so many seconds each.

    A peer that is not here, or a call that fails, is a row with the reason and no time.
    """
    dtype = workloads.default_dtype()
    workload = job.workload()
    decision = variants.decided(workload, dtype, job.what == BOTH)
    dtype = decision.call.dtype if job.given else dtype
    beside: dict[str, Variant | None] = dict.fromkeys(job.implementations)
    if job.search:
        able = [f"{OURS} {platform}" for platform in variants.platforms(decision)]
        others = [name for name in able if name != f"{OURS} {decision.chosen.platform.value}"]
        beside = {**beside, **dict.fromkeys(others), **{str(v): v for v in variants.variants(decision)}}
    unchecked = calls.unchecked(workload)
    arrays = functools.cache(lambda: workload.cast(dtype))  # one copy for all
    expected = functools.cache(lambda: _expected(workload, dtype))
    rows, prepared = {}, {}
    for name, variant in beside.items():
        row = rows[name] = {
            "operation": job.operation,
            "what": job.what,
            "length": job.length,
            "name": job.name(),
            "call": str(decision.call),
            "implementation": name,
            "params": variant and variant.params.to_dict(),
            "chosen": variants.chosen(decision) if name == OURS else {},
            "dtype": dtype,
            **dict.fromkeys(("ms", "median_ms", "high_ms", "compile_ms", "tflops", "memory_bytes", "error")),
            "flags": [],
            "reason": "",
        }
        try:
            found = _prepared(workload, variant or name, job.what, dtype, arrays)
            row["compile_ms"] = found.compile_ms
            if job.what == FORWARD and not unchecked:
                row["error"] = _error_of(workload, found.outcome, expected())
        except peers.Absent as error:
            row["reason"] = str(error)
        except Exception as error:  # one that fails becomes a row, the others are still timed
            row["reason"] = _reason(error)
        else:
            prepared[name] = found._replace(outcome=None)
    times = _together(prepared, seconds)
    cost = workload.cost(dtype)
    flops = cost.flops + (cost.backward_flops if job.what == BOTH else 0)
    for name, found in prepared.items():
        rows[name] |= _timed(found, times[name], flops, seconds)
    if OURS in rows:
        rows[OURS]["unchecked"] = unchecked
        able = {f"{OURS} {platform}" for platform in variants.platforms(decision)}
        rivals = [name for name in prepared if name in able or beside[name] is not None]
        faster = _faster(rows, rivals, prepared, seconds)
        rows[OURS]["faster"] = faster and {**faster, "tune": job.again()}
    return list(rows.values())


def _together(prepared: dict[str, Prepared], seconds: float) -> dict[str, BurstTimes]:
    return time_bursts(
        {name: found.call for name, found in prepared.items()},
        where={name: found.where for name, found in prepared.items()},
        rounds=MOST_BURSTS,
        seconds=3 * seconds,
        enough=lambda samples, spent: spent >= seconds and len(samples) >= FEWEST_SAMPLES,
    )


def _faster(
    rows: dict[str, dict[str, Any]], rivals: list[str], prepared: dict[str, Prepared], seconds: float
) -> dict[str, Any] | None:
    """The fastest of the rivals where it is faster than ours, both timed again: the best of many is partly luck."""
    timed = [name for name in rivals if rows[name]["ms"]]
    if not rows[OURS]["ms"] or not timed:
        return None
    best = min(timed, key=lambda name: rows[name]["ms"])
    if rows[OURS]["ms"] < LEVEL * rows[best]["ms"]:
        return None
    again = _together({name: prepared[name] for name in (OURS, best)}, seconds)
    if any(times.error is not None for times in again.values()):
        return None
    ours, other = again[OURS].best, again[best].best
    if ours < LEVEL * other:
        return None
    found = {"implementation": best, "params": rows[best]["params"]}
    return {**found, "ours_ms": ours * 1e3, "ms": other * 1e3, "ratio": ours / other}


def _timed(prepared: Prepared, times: BurstTimes, flops: float, seconds: float) -> dict[str, Any]:
    """What the bursts of one implementation add to its row."""
    if times.error is not None:
        return {"reason": _reason(times.error)}
    memory = prepared.memory_bytes
    return {
        "ms": times.best * 1e3,
        "median_ms": times.median * 1e3,
        "high_ms": float(np.percentile(times.seconds, 90)) * 1e3,
        "memory_bytes": observed_bytes(prepared.call, prepared.where, "run") if memory is None else memory,
        "tflops": flops / times.best / 1e12,
        "flags": [*doubts(times.seconds, 3 * seconds, "--seconds"), *throttled(prepared.where)],
    }


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _prepared(
    workload: Workload, implementation: str | Variant, what: str, dtype: str, arrays: Callable[[], dict[str, Any]]
) -> Prepared:
    framework, settings = "jax", contextlib.nullcontext
    if isinstance(implementation, Variant):
        f, settings = workload.function(implementation.platform), implementation.used
    elif implementation.startswith(OURS):
        f = workload.function(implementation.removeprefix(OURS).strip() or None)
    else:
        f, framework = peers.function(implementation, workload)
    if framework == "torch":
        return _prepared_torch(f, workload, what, arrays())
    if what == FORWARD:
        run, args = f, (arrays(),)
    else:
        floats = {name: arrays()[name] for name in workload.differentiable}
        rest = {name: x for name, x in arrays().items() if name not in floats}

        def run(floats: dict[str, Any], rest: dict[str, Any]) -> Any:
            def loss(floats: dict[str, Any]) -> Any:
                out = jax.tree.leaves(f({**floats, **rest}))[0]
                return (out * out).astype(jnp.float32).sum()

            return jax.value_and_grad(loss)(floats)

        args = (floats, rest)

    def traced(*args: Any) -> Any:
        with settings():  # inside: where it is called, and maybe traced again, nothing is set
            return run(*args)

    jitted = jax.jit(traced)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a peer's own code
        start = time.perf_counter()
        memory = jitted.lower(*args).compile().memory_analysis()
        compile_ms = (time.perf_counter() - start) * 1e3
        outcome = jitted(*args)
    needed = memory.temp_size_in_bytes + memory.output_size_in_bytes if memory else None
    return Prepared(functools.partial(jitted, *args), places(args, outcome), outcome, needed, compile_ms)


def _prepared_torch(f: Callable, workload: Workload, what: str, given: dict[str, Any]) -> Prepared:
    import torch

    arrays = peers.as_torch(given)
    if what == FORWARD:

        def run(arrays: dict[str, Any]) -> Any:
            with torch.no_grad():
                return f(arrays)

    else:
        wanted = [leaf.requires_grad_() for name in workload.differentiable for leaf in jax.tree.leaves(arrays[name])]

        def run(arrays: dict[str, Any]) -> Any:
            out = jax.tree.leaves(f(arrays))[0]
            return torch.autograd.grad((out * out).float().sum(), wanted)

    outcome = jax.tree.map(lambda x: x.detach().float().cpu().numpy(), run(arrays))
    memory = None
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(arrays)
        memory = torch.cuda.max_memory_allocated() - before
    return Prepared(functools.partial(run, arrays), places(arrays), outcome, memory, None)


def _expected(workload: Workload, dtype: str) -> Any:
    """The output in float64; of a long attention only for the last queries, which see all keys, of a layer for the last tokens."""
    arrays = workload.cast(dtype)
    if workload.last_rows:
        arrays[workload.rows_of] = arrays[workload.rows_of][:, -workload.last_rows :]
    return workload.exact(arrays)


def _error_of(workload: Workload, outcome: Any, expected: Any) -> float | None:
    """None where the reference has rows that see nothing: it has no number for them."""
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(expected)):
        return None
    if workload.last_rows:
        outcome = outcome[:, -workload.last_rows :]
    return relative_errors({"out": outcome}, {"out": expected})["out"]
