"""Parameters: call argument → overlay → memory → the user's store → shipped tables → autotune → heuristic."""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from ejkernel.callib.chips import CHIPS
from ejkernel.callib.integers import power_of_two
from ejkernel.contracts.call import Call
from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import BwdParams, FwdParams, params_class
from ejkernel.contracts.registry import Choice, Implementation, kernel_registry
from ejkernel.ops.config import store
from ejkernel.ops.config.context import surroundings
from ejkernel.ops.utils.fingerprint import stable_json
from ejkernel.utils.directories import cache_directory
from ejkernel.utils.values import is_set

# How far a call may be, in powers of two of its sizes, from one whose time was predicted: a kernel that is the fastest for a long
# sequence need not be it for one token, and no other times say so.
FARTHEST_PREDICTED = 2.0


@dataclass(frozen=True)
class Record:
    """What was measured of one implementation: its best parameters and their time.

    ``bucket`` is the call that a shipped table measured, which need not be quite the one that is asked about. A table of a
    device that nobody measured holds times that are ``predicted`` from the compiler's schedule.
    """

    params: FwdParams | BwdParams
    seconds: float
    source: str
    bucket: str = ""
    distance: float = 0.0
    predicted: bool = False


_memory: dict[str, Record] = {}
_absent: set[str] = set()


def environment() -> tuple[str | None, ...]:
    """The variables that change what is chosen; part of the key of everything that is cached."""
    names = ("EJKERNEL_AUTOTUNE", "EJKERNEL_CACHE_DIR", "EJKERNEL_NONDETERMINISTIC")
    return tuple(os.environ.get(name) for name in names)


def tuning_asked() -> bool:
    """Whether calls are to be measured: in a block of ``autotune``, or by ``EJKERNEL_AUTOTUNE``."""
    return surroundings().tuning or is_set("EJKERNEL_AUTOTUNE")


def nondeterminism_allowed() -> bool:
    """Whether gradients may differ in their last bits from run to run: ``EJKERNEL_NONDETERMINISTIC``."""
    return is_set("EJKERNEL_NONDETERMINISTIC")


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
    known = {entry: record for entry, record in found.items() if record is not None}
    if not all(record.predicted for record in known.values()):
        known = {entry: record for entry, record in known.items() if not record.predicted}
    # Times of different calls say nothing about each other: of what is shipped, only what the nearest call took counts.
    shipped = [record for record in known.values() if record.source == "shipped"]
    nearest = min(shipped, key=lambda record: record.distance).bucket if shipped else ""
    return {entry: record for entry, record in known.items() if record.source != "shipped" or record.bucket == nearest}


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
    return f"{cache_directory()}\n{stable_json(key)}"


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
    _rows.cache_clear()
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
    """The parameters that the kernel will use, and the link of the chain that set any of them last."""
    cls = params_class(direction)
    params, source = heuristic(call, device, entry, direction), "heuristic"
    similar = _similar(call, device, entry, direction) if record is None else None
    if similar is not None:
        params, source = cls.merge(params, similar), "shipped for a similar call"
    given = call.fwd_params if direction == "forward" else call.bwd_params
    for link, layer in (
        (record.source if record else "", record.params if record else None),
        *(("overlay", surroundings().overlaid(name, cls)) for name in dict.fromkeys((call.algorithm, call.operation))),
        ("argument", given),
    ):
        if layer is not None and (layer.to_dict() or link not in ("overlay", "argument")):
            params, source = cls.merge(params, layer), link
    return effective(call, device, entry, direction, params), source


def effective(
    call: Call, device: DeviceInfo, entry: Implementation, direction: str, params: FwdParams | BwdParams
) -> FwdParams | BwdParams:
    """The parameters that a kernel will use if it is given these."""
    return entry.effective(call.shapes, call.spec, params, device, direction)


def for_part(call: Call, chosen: Choice, direction: str) -> Choice:
    """A choice that was made for whole arrays, for one device's part of them, which are the call's."""
    device, entry = replace(chosen.device, shared_by=1), chosen.implementation
    params = heuristic(call, device, entry, direction) if chosen.source == "heuristic" else chosen.params
    return replace(chosen, params=effective(call, device, entry, direction, params), device=device)


def _shipped(call: Call, device: DeviceInfo, entry: Implementation, direction: str) -> Record | None:
    """The entry measured for the nearest sizes, all else being equal."""
    wanted = dict(call.bucket)
    row = _nearest(call, device, entry, direction, lambda bucket: _apart(bucket, wanted))
    if row is None:
        return None
    params = params_class(direction)(**row["params"])
    distance = _apart(row["call"], wanted) or 0.0
    farthest = kernel_registry.operation(call.algorithm).farthest
    if distance > (min(farthest, FARTHEST_PREDICTED) if row["predicted"] else farthest):
        return None
    bucket = json.dumps(row["call"], sort_keys=True)
    return Record(params, row["seconds"], "shipped", bucket, distance, row["predicted"])


def _similar(call: Call, device: DeviceInfo, entry: Implementation, direction: str) -> FwdParams | BwdParams | None:
    """Parameters measured for a call that asks as much of a kernel; its time says nothing of this one."""
    wanted = dict(call.bucket)
    free = getattr(kernel_registry.operation(call.algorithm), "undemanding", frozenset())
    if not free or not wanted:
        return None

    def apart(bucket: dict[str, Any]) -> float | None:
        features = [set(b["features"].split()) for b in (bucket, wanted)]
        if (features[0] ^ features[1]) - free:
            return None
        dims = [[power_of_two(b[name]) for name in ("head_dim", "value_dim")] for b in (bucket, wanted)]
        alike = {**bucket, "features": wanted["features"], "window": wanted["window"]}
        alike |= {name: wanted[name] for name in ("head_dim", "value_dim")}
        distance = _apart(alike, wanted)
        return None if distance is None or dims[0] != dims[1] else distance + 4 * len(features[0] ^ features[1])

    row = _nearest(call, device, entry, direction, apart)
    return params_class(direction)(**row["params"]) if row and row["params"] else None


def _nearest(
    call: Call, device: DeviceInfo, entry: Implementation, direction: str, apart: Any
) -> dict[str, Any] | None:
    """The row of an implementation that is least apart from a call, None if all are too far."""
    named = {"direction": direction, "implementation": entry.name, "version": entry.version}
    rows = [row for row in _table(device, call.algorithm) if all(row[name] == value for name, value in named.items())]
    distances = [(distance, row) for row in rows if (distance := apart(row["call"])) is not None]
    return min(distances, key=lambda pair: pair[0])[1] if distances else None


def _apart(bucket: dict[str, Any], wanted: dict[str, Any]) -> float | None:
    """How far the sizes of two calls are from each other, in powers of two; None if more than sizes differs."""
    distance = 0.0
    for name, value in wanted.items():
        other = bucket.get(name)
        if name == "window" and other is not None:
            sides = list(zip(value.split(":"), other.split(":"), strict=True))
        elif name.endswith("_len") or name in ("heads", "group"):
            sides = [(value, other)]
        elif other == value:
            continue
        else:
            return None
        for ours, theirs in sides:
            if bool(ours) != bool(theirs):
                return None
            distance += abs(math.log2(int(ours) / int(theirs))) if ours else 0.0
    return distance


def _table(device: DeviceInfo, operation: str) -> tuple[dict[str, Any], ...]:
    """The chip's own, else that of a chip of its family: the same vendor, the same major capability."""
    family = device.capability // 10  # 0 where it says nothing: TPUs, AMD, unknown chips
    relatives = [
        chip for chip in CHIPS.values() if family and (chip.vendor, chip.capability // 10) == (device.vendor, family)
    ]
    relatives.sort(key=lambda chip: abs(chip.capability - device.capability))
    names = dict.fromkeys([device.name, *(chip.slug for chip in relatives)])
    return next(filter(None, (_rows(name, operation) for name in names)), ())


@functools.cache
def _rows(chip: str, operation: str) -> tuple[dict[str, Any], ...]:
    path = resources.files("ejkernel") / "tuned" / chip / f"{operation}.json"
    if not path.is_file():
        return ()
    table = json.loads(path.read_text())
    return tuple({**row, "predicted": "predicted" in table} for row in table["entries"])
