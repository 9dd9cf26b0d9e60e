"""The device a call is decided for: real, or described by name."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax

from ejkernel.callib.chips import identify
from ejkernel.callib.devices import compute_capability, resolve_device
from ejkernel.ops.utils.fingerprint import device_fingerprint, get_device_platform


@dataclass(frozen=True)
class DeviceInfo:
    """What selection needs to know of a device.

    ``capability`` is the compute capability times ten on NVIDIA GPUs and the generation on TPUs, 0 where unknown.
    ``shared_by`` is how many devices of this kind the process sees: arrays may be spread over them.
    """

    kind: str
    name: str
    vendor: str
    capability: int
    fingerprint: str
    shared_by: int = 1

    def __str__(self) -> str:
        return self.name


def describe(device: Any = None) -> DeviceInfo:
    """A ``jax.Device``, a topology's device, a chip's name such as ``"nvidia-h200"``, ``"cpu"``; None: JAX's default."""
    return device if isinstance(device, DeviceInfo) else _describe(resolve_device(device))


def seen_from_here(device: DeviceInfo) -> DeviceInfo:
    """The device as a call sees it: inside ``shard_map`` over a whole mesh, arrays are spread no further."""
    return replace(device, shared_by=1) if jax.sharding.get_abstract_mesh().are_all_axes_manual else device


@functools.lru_cache(maxsize=256)
def _describe(device: Any) -> DeviceInfo:
    model = str(getattr(device, "device_kind", ""))
    chip = identify(model)
    kind = get_device_platform(device)
    client = getattr(device, "client", None)
    return DeviceInfo(
        kind=kind,
        name=chip.slug if chip else _name(kind, model),
        vendor=chip.vendor if chip else _vendor(kind, model, device),
        capability=chip.capability if chip else compute_capability(device),
        fingerprint=device_fingerprint(device),
        shared_by=client.device_count() if client is not None else 1,
    )


def _name(kind: str, device_kind: str) -> str:
    words = "".join(c if c.isalnum() else " " for c in device_kind.lower()).split()
    return "-".join(dict.fromkeys([kind, *words]))


def _vendor(kind: str, model: str, device: Any) -> str:
    version = str(getattr(getattr(device, "client", None), "platform_version", "")).lower()
    if kind == "gpu":
        return "amd" if "rocm" in version or "amd" in model.lower() else "nvidia"
    return "google" if kind == "tpu" else ""
