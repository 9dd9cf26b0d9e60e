"""How accurate the kernels are: their outputs and gradients against a reference in float64, as rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import UnsupportedError, kernel_registry
from ejkernel.contracts.device import describe
from ejkernel.lab import workloads
from ejkernel.lab.reference import in_float64
from ejkernel.lab.workloads import BOUNDS, OPERATIONS, Workload, kernels_of


def check_plan(operations: list[str] | None = None, platform: str | None = None) -> list[tuple[Workload, str, str]]:
    """The checks that concern this machine: a workload, a platform that runs here, and the dtype to check in."""
    device = describe()
    return [
        (workload, entry.platform.value, "float32" if "float32" in entry.support.dtypes else "bfloat16")
        for operation in operations or OPERATIONS
        for workload in workloads.checks(operation)
        for entry in kernel_registry.list_implementations(kernels_of(operation))
        if entry.support.devices.refusal(device) is None and platform in (None, entry.platform.value)
    ]


def run_checks(plan: list[tuple[Workload, str, str]], done: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows of a plan; ``done(words)`` is called after each. An accelerator's are compiled side by side."""
    workers = 1 if describe().kind == "cpu" else min(8, os.cpu_count() or 1)

    def one(job: tuple[Workload, str, str]) -> dict[str, Any]:
        row = check(*job)
        done(f"checked {job[0].operation}: {job[0].name}")
        return row

    with ThreadPoolExecutor(workers) as pool:
        try:
            return list(pool.map(one, plan))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def check(workload: Workload, platform: str, dtype: str) -> dict[str, Any]:
    """The largest relative error of the output and of every gradient against float64."""
    row = {
        "operation": workload.operation,
        "platform": platform,
        "check": workload.name,
        "dtype": dtype,
        "error": None,
        "bound": BOUNDS[dtype],
        "passed": False,
        "refused": False,
        "reason": "",
    }
    arrays = workload.cast(dtype)
    try:
        found = _with_gradients(workload.function(platform), arrays, workload.differentiable)
    except UnsupportedError as error:
        refusals = [line.split(None, 3) for line in str(error).splitlines() if " refused " in line]
        reasons = [words[3] for words in refusals if words[0] == platform and len(words) == 4]
        return {**row, "refused": True, "reason": (reasons or str(error).splitlines())[0]}
    except Exception as error:  # a kernel that crashes becomes a row, the others are still checked
        return {**row, "reason": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
    errors = relative_errors(found, _exact(workload, arrays))
    row["error"] = max(errors.values())
    row["passed"] = row["error"] <= row["bound"]
    if not row["passed"]:
        row["reason"] = "too far: " + ", ".join(name for name, e in errors.items() if not e <= row["bound"])
    return row


def relative_errors(found: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    """‖found − exact‖ / ‖exact‖ of each entry; infinite where something is not finite.

    Example:
        >>> relative_errors({"out": np.array([1.0, 2.5])}, {"out": np.array([1.0, 2.0])})
        {'out': 0.22360679774997896}
    """

    def one(x: Any, e: Any) -> float:
        pairs = list(zip(jax.tree.leaves(x), jax.tree.leaves(e), strict=True))
        error = np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64) - np.asarray(e))) for x, e in pairs))
        size = np.sqrt(sum(np.sum(np.square(np.asarray(e))) for _, e in pairs))
        return float(error / max(size, 1e-30)) if np.isfinite(error) else float("inf")

    return {name: one(x, exact[name]) for name, x in found.items()}


def _with_gradients(f: Callable, arrays: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, Any]:
    """The output, and the gradient of each wanted argument for a fixed cotangent."""

    @jax.jit
    def run(floats: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
        out, pull = jax.vjp(lambda floats: f({**floats, **rest}), floats)
        cotangent = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), out)
        (grads,) = pull(jax.tree.map(lambda c, x: c.astype(x.dtype), cotangent, out))
        return {"out": out, **{f"d{name}": grad for name, grad in grads.items()}}

    return run({n: arrays[n] for n in wanted}, {n: x for n, x in arrays.items() if n not in wanted})


def _exact(workload: Workload, arrays: dict[str, Any]) -> dict[str, Any]:
    return in_float64(lambda exact: _with_gradients(workload.reference, exact, workload.differentiable), arrays)
