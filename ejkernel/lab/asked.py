"""What the command line is asked for, read and checked, so that one clear line can be said about it."""

from __future__ import annotations

import inspect
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel
from ejkernel import InvalidInputError, Platform, kernel_registry
from ejkernel.contracts.device import describe
from ejkernel.lab import workloads
from ejkernel.lab.extras import need
from ejkernel.ops.config import chain

PICTURES = (".png", ".svg", ".pdf")
_ARRAY = re.compile(r"^(?P<dtype>[a-z]+[0-9a-z_]*)\[(?P<shape>[0-9, ]*)\]$")


def operations(names: list[str] | None) -> list[str]:
    """The operations of that name; all if none is given."""
    return [workloads.known(name) for name in names] if names else list(workloads.OPERATIONS)


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


def can_write(path: str | os.PathLike) -> None:
    """Raise, before any work, where a file cannot be written."""
    folder = Path(path).absolute().parent
    there = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        if Path(path).is_dir():
            raise IsADirectoryError("it is a folder")
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise InvalidInputError(
            f"--output is {os.fspath(path)!r}: no file can be written there ({error.strerror or error}). "
            "Name another place with -o."
        ) from error


def can_draw(path: str | os.PathLike) -> None:
    """The same for a picture, and the folder that it is in is made."""
    need("matplotlib", "a picture")
    if Path(path).suffix.lower() not in PICTURES:
        raise InvalidInputError(
            f"--output is {os.fspath(path)!r}; expected a picture's name, ending in {', '.join(PICTURES)}."
        )
    can_write(path)
    Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)


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
    abstract = jax.eval_shape(lambda: plain.cast(_dtype(dtype)))
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
        _reshape(arrays, name, _sizes(text, f"--shape {name}"))
    for name, text in (_named(text, "--set", None) for text in options):
        if name not in parameters:
            raise InvalidInputError(
                f"--set names {name!r}; expected an argument of {operation}: {', '.join(parameters)}."
            )
        found = _ARRAY.match(text)
        (arrays if found else statics)[name] = (
            jax.ShapeDtypeStruct(_sizes(found["shape"], f"--set {name}"), _dtype(found["dtype"]))
            if found
            else _value(text)
        )
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


def tune(operation: str, length: int, backward: bool) -> list[dict[str, Any]]:
    """Tune the call that is timed at a length; a row for each direction."""
    workload = workloads.timed(operation, length, describe().kind != "cpu")
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
                row = {"operation": operation, "length": length, "direction": direction}
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
    try:
        axes.figure.savefig(path, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"--output is {path!r}: {error}") from error
    finally:
        need("matplotlib.pyplot", "a picture").close(axes.figure)


def _named(text: str, option: str, default: str | None) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    if not equals and default is None:
        raise InvalidInputError(f"{option} is {text!r}; expected NAME=VALUE.")
    return (name.strip(), rest.strip()) if equals else (default, text)


def _sizes(text: str, option: str) -> tuple[int, ...]:
    words = [word for word in re.split(r"[,\s]+", text.strip()) if word]
    if not words or not all(word.isdecimal() for word in words):
        raise InvalidInputError(f"{option} is {text!r}; expected sizes such as 2,1024,8,64.")
    return tuple(map(int, words))


def _dtype(name: str) -> str:
    try:
        return str(jnp.dtype({"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(name, name)))
    except TypeError:
        raise InvalidInputError(f"--dtype is {name!r}; expected a dtype such as bfloat16 or float32.") from None


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return tuple(value) if isinstance(value, list) else value


def _reshape(arrays: dict[str, Any], name: str, shape: tuple[int, ...]) -> None:
    """Give an array a shape; a query's goes to key and value too, and a key's to the value."""
    followers = {"query": ("key", "value"), "key": ("value",)}.get(name, ())
    if len(shape) != len(arrays[name].shape):
        raise InvalidInputError(
            f"--shape {name} is {shape}; expected {len(arrays[name].shape)} sizes, as {tuple(arrays[name].shape)} has."
        )
    for one in (name, *(f for f in followers if f in arrays)):
        arrays[one] = jax.ShapeDtypeStruct(shape, arrays[one].dtype)
