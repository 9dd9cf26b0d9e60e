"""Parameters: call argument → overlay → memory → the user's store → shipped tables → autotune → heuristic."""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from ejkernel.ops.config import store
from ejkernel.ops.config.store import params_class
from ejkernel.ops.core.context import surroundings
from ejkernel.ops.core.device import DeviceInfo
from ejkernel.ops.core.registry import Implementation, kernel_registry
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams
from ejkernel.ops.utils.fingerprint import stable_json

if TYPE_CHECKING:
    from ejkernel.ops.core.operation import Call


@dataclass(frozen=True)
class Record:
    """What was measured of one implementation: its best parameters and their time."""

    params: FwdParams | BwdParams
    seconds: float
    source: str


_memory: dict[str, Record] = {}
_absent: set[str] = set()


def environment() -> tuple[str | None, str | None]:
    """The variables that change what is chosen; part of the key of everything that is cached."""
    return os.environ.get("EJKERNEL_AUTOTUNE"), os.environ.get("EJKERNEL_CACHE_DIR")


def tuning_asked() -> bool:
    """Whether calls are to be measured: in a block of ``autotune``, or by ``EJKERNEL_AUTOTUNE``."""
    asked = (environment()[0] or "").lower()
    return surroundings().tuning or asked not in ("", "0", "false", "no", "off")


def entry_key(call: Call, device: DeviceInfo, entry: Implementation, direction: str) -> dict[str, Any]:
    """All that a measurement depends on."""
    import jax
    import jaxlib

    return {
        "device": device.fingerprint,
        "operation": call.algorithm,
        "direction": direction,
        "implementation": entry.name,
        "version": entry.version,
        "compilers": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "call": dict(call.bucket),
    }


def records(
    call: Call, device: DeviceInfo, entries: list[Implementation], direction: str
) -> dict[Implementation, Record]:
    """What is known of the implementations for this call, measuring first if that was asked for."""
    if not call.bucket:
        return {}
    found = {entry: lookup(call, device, entry, direction) for entry in entries}
    missing = [entry for entry, record in found.items() if record is None or record.source == "shipped"]
    if missing and tuning_asked():
        from ejkernel.ops.config import autotune

        found |= autotune.measure(call, device, missing, direction)
    return {entry: record for entry, record in found.items() if record is not None}


def lookup(call: Call, device: DeviceInfo, entry: Implementation, direction: str) -> Record | None:
    """Memory, then the store, then the tables of the package."""
    key = entry_key(call, device, entry, direction)
    text = _memory_key(key)
    if text in _memory:
        return _memory[text]
    if text not in _absent:
        value = store.read(key)
        if value is not None:
            record = _memory[text] = Record(params_class(direction)(**value["params"]), value["seconds"], "store")
            return record
        _absent.add(text)
    return _shipped(call, device, entry, direction)


def _memory_key(key: dict[str, Any]) -> str:
    return f"{store.directory()}\n{stable_json(key)}"


def remember(call: Call, device: DeviceInfo, entry: Implementation, direction: str, record: Record) -> None:
    """Keep a measurement, here and in the store."""
    key = entry_key(call, device, entry, direction)
    _memory[_memory_key(key)] = Record(record.params, record.seconds, "memory")
    store.write(key, {"params": record.params.to_dict(), "seconds": record.seconds})
    kernel_registry.generation += 1


def forget() -> None:
    """Drop what this process remembers; the store stays."""
    _memory.clear()
    _absent.clear()
    _table.cache_clear()
    kernel_registry.generation += 1


def heuristic(call: Call, device: DeviceInfo, entry: Implementation, direction: str) -> FwdParams | BwdParams:
    """What a kernel proposes where nothing was measured or asked for."""
    defaults = getattr(entry.kernel, "defaults", None)
    return (
        defaults(call.shapes, call.spec, device, direction) if defaults and call.shapes else params_class(direction)()
    )


def resolve(
    call: Call, device: DeviceInfo, entry: Implementation, direction: str, record: Record | None
) -> tuple[FwdParams | BwdParams, str]:
    """The parameters to run with, and the first link of the chain that had a say."""
    cls = params_class(direction)
    params, source = heuristic(call, device, entry, direction), "heuristic"
    given = call.fwd_params if direction == "forward" else call.bwd_params
    for link, layer in (
        (record.source if record else "", record.params if record else None),
        *(("overlay", surroundings().overlaid(name, cls)) for name in dict.fromkeys((call.algorithm, call.operation))),
        ("argument", given),
    ):
        if layer is not None and (layer.to_dict() or link not in ("overlay", "argument")):
            params, source = cls.merge(params, layer), link
    return params, source


def _shipped(call: Call, device: DeviceInfo, entry: Implementation, direction: str) -> Record | None:
    """The entry measured for the nearest sizes, all else being equal."""
    wanted = dict(call.bucket)
    sizes = [name for name in wanted if name.endswith("_len") or name == "heads"]
    best = None
    for row in _table(device.name, call.algorithm):
        same = row["direction"] == direction and row["implementation"] == entry.name and row["version"] == entry.version
        if not same or any(row["call"].get(name) != value for name, value in wanted.items() if name not in sizes):
            continue
        distance = sum(abs(math.log2(row["call"][name] / wanted[name])) for name in sizes)
        if best is None or distance < best[0]:
            best = (distance, row)
    if best is None:
        return None
    return Record(params_class(direction)(**best[1]["params"]), best[1]["seconds"], "shipped")


@functools.cache
def _table(device: str, operation: str) -> tuple[dict[str, Any], ...]:
    path = resources.files("ejkernel") / "tuned" / device / f"{operation}.json"
    if not path.is_file():
        return ()
    return tuple(json.loads(path.read_text())["entries"])
