"""How fast ours and the peers are: implementations of one call are timed together, in bursts, and become rows."""

from __future__ import annotations

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
from ejkernel.lab import peers, workloads
from ejkernel.lab.accuracy import in_float64, relative_errors
from ejkernel.lab.gpu import throttled
from ejkernel.lab.memory import observed_bytes
from ejkernel.lab.timing import FEWEST_SAMPLES, doubts
from ejkernel.lab.workloads import Workload, kernels_of
from ejkernel.utils.bursts import BurstTimes, Places, places, time_bursts

FORWARD, BOTH = "forward", "forward + backward"
OURS = "ejkernel"
MOST_BURSTS = 100  # of one implementation


class Job(NamedTuple):
    """One call, and the implementations to time on it together."""

    operation: str
    length: int
    what: str
    implementations: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.operation}, {self.length}, {self.what}"


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
) -> list[Job]:
    """What is to be timed, in the order in which it is."""
    plan = []
    device = describe()
    for operation in operations:
        names = [OURS]
        if pinned:
            entries = kernel_registry.list_implementations(kernels_of(operation))
            names += [f"{OURS} {e.platform.value}" for e in entries if e.support.devices.refusal(device) is None]
        names += peers.names(operation) if with_peers else []
        for length in lengths:
            plan += [Job(operation, length, what, tuple(names)) for what in (FORWARD, *[BOTH] * backward)]
    return plan


def bench(job: Job, *, seconds: float = 0.3) -> list[dict[str, Any]]:
    """A row for each implementation of a job, timed for about so many seconds each.

    A peer that is not here, or a call that fails, is a row with the reason and no time.
    """
    dtype = workloads.default_dtype()
    workload = workloads.timed(job.operation, job.length, describe().kind != "cpu")
    expected = functools.cache(lambda: _expected(workload, dtype))
    rows, prepared = {}, {}
    for name in job.implementations:
        row = rows[name] = {
            "operation": job.operation,
            "what": job.what,
            "length": job.length,
            "implementation": name,
            "dtype": dtype,
            **dict.fromkeys(("ms", "median_ms", "high_ms", "compile_ms", "tflops", "memory_bytes", "error")),
            "flags": [],
            "reason": "",
        }
        try:
            found = _prepared(workload, name, job.what, dtype)
            row["compile_ms"] = found.compile_ms
            if job.what == FORWARD:
                row["error"] = _error_of(workload, found.outcome, expected())
        except peers.Absent as error:
            row["reason"] = str(error)
        except Exception as error:  # one that fails becomes a row, the others are still timed
            row["reason"] = _reason(error)
        else:
            prepared[name] = found._replace(outcome=None)
    times = time_bursts(
        {name: found.call for name, found in prepared.items()},
        where={name: found.where for name, found in prepared.items()},
        rounds=MOST_BURSTS,
        seconds=3 * seconds,
        enough=lambda samples, spent: spent >= seconds and len(samples) >= FEWEST_SAMPLES,
    )
    cost = workload.cost(dtype)
    flops = cost.flops + (cost.backward_flops if job.what == BOTH else 0)
    for name, found in prepared.items():
        rows[name] |= _timed(found, times[name], flops, seconds)
    return list(rows.values())


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


def _prepared(workload: Workload, implementation: str, what: str, dtype: str) -> Prepared:
    framework = "jax"
    if implementation.startswith(OURS):
        f = workload.function(implementation.removeprefix(OURS).strip() or None)
    else:
        f, framework = peers.function(implementation, workload)
    if framework == "torch":
        return _prepared_torch(f, workload, what, dtype)
    arrays = workload.cast(dtype)
    if what == FORWARD:
        run, args = f, (arrays,)
    else:
        floats = {name: arrays[name] for name in workload.differentiable}
        rest = {name: x for name, x in arrays.items() if name not in floats}

        def run(floats: dict[str, Any], rest: dict[str, Any]) -> Any:
            def loss(floats: dict[str, Any]) -> Any:
                out = jax.tree.leaves(f({**floats, **rest}))[0]
                return (out * out).astype(jnp.float32).sum()

            return jax.value_and_grad(loss)(floats)

        args = (floats, rest)
    jitted = jax.jit(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a peer's own code
        start = time.perf_counter()
        memory = jitted.lower(*args).compile().memory_analysis()
        compile_ms = (time.perf_counter() - start) * 1e3
        outcome = jitted(*args)
    needed = memory.temp_size_in_bytes + memory.output_size_in_bytes if memory else None
    return Prepared(functools.partial(jitted, *args), places(args, outcome), outcome, needed, compile_ms)


def _prepared_torch(f: Callable, workload: Workload, what: str, dtype: str) -> Prepared:
    import torch

    arrays = peers.as_torch(workload.arrays, dtype)
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
    """The output in float64; of a long attention only for the last queries, which see all keys."""
    arrays = workload.cast(dtype)
    if workload.last_rows:
        arrays["query"] = arrays["query"][:, -workload.last_rows :]
    return in_float64(jax.jit(workload.reference), arrays)


def _error_of(workload: Workload, outcome: Any, expected: Any) -> float:
    if workload.last_rows:
        outcome = outcome[:, -workload.last_rows :]
    return relative_errors({"out": outcome}, {"out": expected})["out"]
