"""What the command line is asked for, read and checked, so that one clear line can be said about it."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel
from ejkernel import InvalidInputError, Platform, kernel_registry
from ejkernel.contracts.device import describe
from ejkernel.lab import arguments, workloads
from ejkernel.lab import calls as own
from ejkernel.lab.calls import Given
from ejkernel.lab.extras import need
from ejkernel.lab.files import can_write, picture, put
from ejkernel.lab.speed import BOTH, Job
from ejkernel.ops.config import chain

PICTURES = (".png", ".svg", ".pdf")


def operations(names: list[str] | None) -> list[str]:
    """The operations and layers of that name; all operations if none is given."""
    return [workloads.known(name, layers=True) for name in names] if names else list(workloads.OPERATIONS)


def calls(words: list[str] | None, file: str | None, lengths: list[int] | None) -> tuple[list[str], list[Given]]:
    """Operations to take as they are timed, and calls of the user's own; all operations if nothing is asked for."""
    named, given = own.from_words(words or [])
    if file is not None:
        given = [*given, *own.from_file(file)]
    named = named if named or given else list(workloads.OPERATIONS)
    if lengths and not named:
        raise InvalidInputError("--length is of operations that are only named; a call of your own has its shapes.")
    return named, given


def platform(name: str | None) -> str | None:
    """A platform's name, or an error that lists them."""
    if name is not None and name not in [p.value for p in Platform]:
        raise InvalidInputError(f"platform is {name!r}; expected one of {', '.join(p.value for p in Platform)}.")
    return name


def lengths(given: list[int] | None) -> tuple[int, ...]:
    """Positive lengths."""
    for length in given or ():
        if length < 1:
            raise InvalidInputError(f"--length is {length}; expected at least 1.")
    return tuple(given or ())


def can_draw(path: str | os.PathLike) -> None:
    """Raise, before any work, where a picture cannot be drawn or written."""
    need("matplotlib", "a picture")
    if Path(path).suffix.lower() not in PICTURES:
        raise InvalidInputError(
            f"--output is {os.fspath(path)!r}; expected a picture's name, ending in {', '.join(PICTURES)}."
        )
    can_write(path)


def explain(
    operation: str,
    shapes: list[str],
    dtype: str,
    causal: bool | None,
    options: list[str],
    pinned: str | None,
    device: str | None,
) -> Any:
    """The decision about a call that is described in words."""
    plain = workloads.checks(workloads.known(operation))[0]
    abstract = jax.eval_shape(lambda: plain.cast(arguments.dtype(dtype, "--dtype")))
    arrays: dict[str, Any] = {name: abstract[name] for name in plain.arrays}
    if operation == "blocksparse_attention":
        arrays["sparsity_mask"] = plain.arrays["sparsity_mask"]
    first = next(iter(arrays))
    parameters = [
        n for n in inspect.signature(getattr(ejkernel, operation)).parameters if n not in ("platform", "backend")
    ]
    statics = dict(plain.options)
    given = [_named(text, "--shape", first) for text in shapes]
    for name, text in sorted(given, key=lambda pair: pair[0] != first):
        if name not in arrays or isinstance(arrays[name], dict):
            wanted = ", ".join(n for n, x in arrays.items() if not isinstance(x, dict))
            raise InvalidInputError(
                f"--shape names {name!r}; expected one of {wanted}. Other arrays: --set NAME=dtype[shape]."
            )
        _reshape(arrays, name, arguments.sizes(text, f"--shape {name}"))
    for name, text in (_named(text, "--set", None) for text in options):
        if name not in parameters:
            raise InvalidInputError(
                f"--set names {name!r}; expected an argument of {operation}: {', '.join(parameters)}."
            )
        found = arguments.array(text, f"--set {name}")
        (arrays if found else statics)[name] = found or arguments.value(text)
    if causal is not None:
        if "causal" not in parameters:
            raise InvalidInputError(f"--causal: {operation} has no such argument.")
        statics["causal"] = causal
    return ejkernel.explain(operation, **arrays, **statics, platform=platform(pinned), device=device)


def decision(decided: Any) -> dict[str, Any]:
    """A decision as plain data."""
    chosen = decided.chosen
    return {
        "call": str(decided.call),
        "device": str(decided.device),
        "chosen": chosen and chosen.platform.value,
        "candidates": [
            {"platform": c.platform.value, "backend": c.backend.value, "verdict": c.verdict, "reasons": list(c.reasons)}
            for c in decided.candidates
        ],
    }


def tune(job: Job) -> list[dict[str, Any]]:
    """Tune a call; a row for each direction."""
    workload, backward = job.workload(), job.what == BOTH
    arrays = workload.cast(workloads.default_dtype())
    f = workload.function()

    def loss(floats: dict[str, Any], rest: dict[str, Any]) -> Any:
        return jax.tree.leaves(f({**floats, **rest}))[0].astype(jnp.float32).sum()

    floats = {name: arrays[name] for name in workload.differentiable}
    rest = {name: x for name, x in arrays.items() if name not in floats}
    ejkernel.autotune(lambda *args: jax.block_until_ready((jax.grad(loss) if backward else loss)(*args)))(floats, rest)
    call = workload.explained(workloads.default_dtype()).call
    rows = []
    for direction in ("forward", "backward") if backward else ("forward",):
        for entry in kernel_registry.list_implementations(call.algorithm):
            record = chain.lookup(call, describe(), entry, direction)
            if record:
                params = ", ".join(f"{n}={v}" for n, v in record.params.to_dict().items() if v is not None)
                row = {"operation": job.operation, "length": job.length, "name": job.name(), "direction": direction}
                row |= {"platform": entry.platform.value, "ms": record.seconds * 1e3, "params": params}
                rows.append(row)
    return rows


def draw_roofline(found: dict[str, Any], path: str) -> None:
    """A picture of measured points under the roofs."""
    from ejkernel.lab.visualization import plot_roofline

    roof, peak = found["ceilings"], found["peak"]
    top = peak or {"name": "measured", **roof}
    axes = plot_roofline(
        top["name"],
        top["tflops"],
        top["tb_per_s"],
        operations={p["name"]: (p["intensity"], p["tflops"]) for p in found["points"]} or None,
        ceilings=(roof["tflops"], roof["tb_per_s"]) if peak else None,
    )
    place = Path(path)
    try:
        put(place.absolute().parent, {place.name: picture(axes.figure, place.suffix.lower(), bbox_inches="tight")})
    finally:
        need("matplotlib.pyplot", "a picture").close(axes.figure)


def _named(text: str, option: str, default: str | None) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    if not equals and default is None:
        raise InvalidInputError(f"{option} is {text!r}; expected NAME=VALUE.")
    return (name.strip(), rest.strip()) if equals else (default, text)


def _reshape(arrays: dict[str, Any], name: str, shape: tuple[int, ...]) -> None:
    """Give an array a shape; a query's goes to key and value too, and a key's to the value."""
    followers = {"query": ("key", "value"), "key": ("value",)}.get(name, ())
    if len(shape) != len(arrays[name].shape):
        raise InvalidInputError(
            f"--shape {name} is {shape}; expected {len(arrays[name].shape)} sizes, as {tuple(arrays[name].shape)} has."
        )
    for one in (name, *(f for f in followers if f in arrays)):
        arrays[one] = jax.ShapeDtypeStruct(shape, arrays[one].dtype)
