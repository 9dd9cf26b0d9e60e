"""The roofs that a device reaches in practice, measured once and kept in the user's store."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.callib.devices import resolve_device
from ejkernel.contracts.device import DeviceInfo, describe
from ejkernel.ops.config import store
from ejkernel.ops.utils.fingerprint import short_hash
from ejkernel.utils.bursts import time_bursts
from ejkernel.utils.directories import cache_directory

__all__ = ["Ceilings", "measure_ceilings"]

FORMAT = 1
BURSTS = 20  # the best of them counts
SECONDS_EACH = 0.6  # what the timed runs of one ceiling may take
REASONABLE = 0.25  # a dtype below this share of float32's rate is emulated
PARTS = 4  # XLA sums one array on one core of a CPU, and several on several


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What `measure_ceilings` found.

    Attributes:
        device: the device's name in this library, such as `nvidia-h200`.
        fingerprint: what the numbers hold for; see `ejkernel.ops.utils.device_fingerprint`.
        copy_bytes_per_s: bytes read and bytes written a second, added, by an update in place.
        read_bytes_per_s: bytes read a second by a reduction.
        matmul_flops_per_s: operations a second of a large square product, by the name of its dtype. On an NVIDIA GPU
            with tensor cores, `float32` has full precision and `tensorfloat32` is what JAX does by default.

    Example:
        >>> ceilings = Ceilings("cpu", "cpu|x86_64", 5e10, 4e10, {"float32": 1e11})
        >>> ceilings.to_json()["matmul_flops_per_s"]
        {'float32': 100000000000.0}
    """

    device: str
    fingerprint: str
    copy_bytes_per_s: float
    read_bytes_per_s: float
    matmul_flops_per_s: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Every field, in types that JSON has."""
        return dataclasses.asdict(self)


def measure_ceilings(*, refresh: bool = False) -> Ceilings:
    """The copy, read and matmul rates of JAX's default device.

    They are measured in a few seconds, best of several, and kept in `EJKERNEL_CACHE_DIR` (else the user's cache folder)
    by the device's fingerprint and JAX's version. A store that cannot be read or written costs a warning.

    Args:
        refresh: measure again, and replace what was kept.

    Example:
        >>> measure_ceilings().matmul_flops_per_s["float32"] / 1e12  # doctest: +SKIP
        0.1
    """
    device = resolve_device(None)
    info = describe(device)
    path = _path(info)
    kept = None if refresh else _read(path, info)
    if kept is None:
        kept = _measure(device, info)
        _write(path, kept)
    return kept


# --- the store ------------------------------------------------------------------------------------------------------


def _path(info: DeviceInfo) -> Path:
    key = {"format": FORMAT, "fingerprint": info.fingerprint, "jax": jax.__version__}
    if info.kind == "cpu":  # the fingerprint tells the model, not how many cores this process may use
        key["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cache_directory() / "ceilings" / f"{info.name}-{short_hash(key)}.json"


def _read(path: Path, info: DeviceInfo) -> Ceilings | None:
    try:
        return _checked(json.loads(path.read_text(encoding="utf-8")), info)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        _warn(f"ejkernel's ceilings {path} cannot be used ({error}), so they are measured again.")
        return None


def _checked(entry: Any, info: DeviceInfo) -> Ceilings:
    found = Ceilings(**entry)
    rates = [found.copy_bytes_per_s, found.read_bytes_per_s, *found.matmul_flops_per_s.values()]
    if not all(isinstance(rate, float) and 0 < rate < math.inf for rate in rates) or not found.matmul_flops_per_s:
        raise ValueError("a rate is missing or is no positive number")
    if (found.device, found.fingerprint) != (info.name, info.fingerprint):
        raise ValueError("they are another device's")
    return found


def _write(path: Path, ceilings: Ceilings) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        store._replace(path, json.dumps(ceilings.to_json(), indent=1))
    except OSError as error:
        _warn(f"ejkernel's ceilings {path} cannot be written ({error}), so they will be measured again.")


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)  # measure_ceilings' caller


# --- the measurements -----------------------------------------------------------------------------------------------


def _measure(device: Any, info: DeviceInfo) -> Ceilings:
    # Larger than the caches; a CPU's products are large enough at 1024 and take a second at 2048.
    elements, size = (2**25, 1024) if info.kind == "cpu" else (2**28, 8192)
    return Ceilings(
        device=info.name,
        fingerprint=info.fingerprint,
        copy_bytes_per_s=_copy(device, elements),
        read_bytes_per_s=_read_rate(device, elements),
        matmul_flops_per_s=_products(device, info, size),
    )


def _copy(device: Any, elements: int) -> float:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: fresh pages would be timed too, and they cost more
    x = jnp.zeros(elements, jnp.float32, device=device)

    def call() -> jax.Array:
        nonlocal x
        x = step(x)
        return x

    return 2 * 4 * elements / _best_seconds(call)


def _read_rate(device: Any, elements: int) -> float:
    parts = [jnp.zeros(elements // PARTS, jnp.float32, device=device) for _ in range(PARTS)]
    largest = jax.jit(lambda parts: [jnp.max(part) for part in parts])
    return 4 * elements / _best_seconds(lambda: largest(parts))


def _products(device: Any, info: DeviceInfo, size: int) -> dict[str, float]:
    """Rates by dtype; a small product is tried first, and what the device only emulates is left out."""
    ways = {"float32": (jnp.float32, "highest"), "bfloat16": (jnp.bfloat16, "default")}
    if info.kind != "tpu":
        ways["float16"] = (jnp.float16, "default")
    if info.vendor == "nvidia" and info.capability >= 80:
        ways["tensorfloat32"] = (jnp.float32, "default")
    rates: dict[str, float] = {}
    least = 0.0
    for name, way in ways.items():
        tried = _product(device, *way, size // 4)
        least = least or tried * REASONABLE  # float32 comes first
        if tried >= least:
            rates[name] = _product(device, *way, size)
    return rates


def _product(device: Any, dtype: Any, precision: str, size: int) -> float:
    keys = jax.random.split(jax.random.key(0), 2)  # zeros would draw less power, and clock higher, than real data
    a, b = (jax.device_put(jax.random.normal(key, (size, size), dtype), device) for key in keys)
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
    return 2 * size**3 / _best_seconds(lambda: multiply(a, b))


def _best_seconds(call: Callable[[], Any]) -> float:
    return time_bursts({"run": call}, rounds=BURSTS, seconds=SECONDS_EACH)["run"].best
