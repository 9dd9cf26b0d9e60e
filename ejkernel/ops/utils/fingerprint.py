"""Names for devices and values that hold in every process: the keys of what was measured once."""

import functools
import hashlib
import platform as host
from typing import Any

import jax
import numpy as np

from ejkernel.callib.chips import identify
from ejkernel.callib.devices import resolve_device
from ejkernel.ops.utils.canonical import short_hash, stable_json

__all__ = ["abstractify", "device_fingerprint", "get_device_platform", "short_hash", "stable_json"]


def device_fingerprint(dev: Any = None) -> str:
    """What a measurement depends on: the platform, the device's model, and the version of its runtime.

    The host's CPU is told by its architecture, model and instruction sets. A described device has no runtime.

    Args:
        dev: a `jax.Device`, a topology's device, a chip's slug such as `"nvidia-h200"`, `"cpu"`, or anything
            with `platform` and `device_kind`; None is JAX's default device.

    Returns:
        Parts joined by `|`, such as `gpu|NVIDIA H200|cuda 13000` or `cpu|x86_64|AMD EPYC|5f2d0c8a`.

    Example:
        >>> device_fingerprint("nvidia-h200")
        'gpu|nvidia-h200|described'
        >>> device_fingerprint().split("|")[0]
        'cpu'
    """
    device = resolve_device(dev)
    platform = get_device_platform(device)
    if platform == "cpu":
        kind = _one_part(getattr(device, "device_kind", "cpu"))
        parts = ["cpu", host.machine(), _host_cpu(), *([] if kind.lower() == "cpu" else [kind])]
        return "|".join(parts)
    if platform == "unknown":
        platform = str(getattr(device, "platform", "unknown")).lower()
    return f"{platform}|{_one_part(getattr(device, 'device_kind', ''))}|{_runtime_version(device)}"


def get_device_platform(dev: Any = None) -> str:
    """`gpu`, `tpu` or `cpu`, else `unknown`. Takes what `device_fingerprint` takes.

    Example:
        >>> get_device_platform("tpu-v5e"), get_device_platform("amd-mi300x"), get_device_platform()
        ('tpu', 'gpu', 'cpu')
    """
    device = resolve_device(dev)
    chip = identify(str(getattr(device, "device_kind", "")))
    name = str(getattr(device, "platform", chip.kind if chip else "")).lower()
    for platform, words in (("gpu", ("gpu", "cuda", "rocm")), ("tpu", ("tpu",)), ("cpu", ("cpu",))):
        if any(word in name for word in words):
            return platform
    return "unknown"


def abstractify(pytree: Any) -> Any:
    """The same tree with every array, traced ones included, replaced by its `jax.ShapeDtypeStruct`.

    Example:
        >>> abstractify({"x": np.ones((2, 3), np.float32), "causal": True})
        {'causal': True, 'x': ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """

    def abstract(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array | np.ndarray) else leaf

    return jax.tree.map(abstract, pytree)


def _one_part(text: Any) -> str:
    return " ".join(str(text).replace("|", "/").split())


def _runtime_version(device: Any) -> str:
    """`cuda 13000`, libtpu's build, …: what the client says, without the words that every plugin repeats."""
    version = getattr(getattr(device, "client", None), "platform_version", None)
    return "described" if version is None else _one_part(str(version).replace("PJRT C API", ""))


# What identifies a core in /proc/cpuinfo on x86, Arm, Power, s390x and RISC-V. Clock, microcode and numbering
# are left out: they differ from boot to boot or from core to core.
_MODEL_KEYS = {
    *("vendor_id", "cpu family", "model", "model name", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
    *("cpu", "machine", "features", "isa", "uarch"),
}


@functools.cache
def _host_cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:  # not Linux
        return ""
    return _cpu_model(text)


def _cpu_model(cpuinfo: str) -> str:
    """Model name and a digest of everything that identifies the cores, whatever their number and order."""
    pairs = (line.partition(":") for line in cpuinfo.splitlines())
    facts = {(key.strip(), " ".join(sorted(value.split()))) for key, _, value in pairs if key.strip() in _MODEL_KEYS}
    names = (line.partition(":")[2] for line in cpuinfo.splitlines() if line.startswith("model name"))
    digest = hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:8]
    return f"{_one_part(next(names, ''))}|{digest}"
