"""Resolves devices, chips and their names to objects with a `platform` and a `device_kind`."""

from dataclasses import dataclass
from typing import Any

from ejkernel.callib.chips import CHIPS, Chip, identify
from ejkernel.errors import InvalidInputError

__all__ = ["DescribedDevice", "compute_capability", "resolve_device"]


@dataclass(frozen=True)
class DescribedDevice:
    """A device that is not present, described by the slug of its chip, such as `nvidia-h200`.

    Example:
        >>> resolve_device("nvidia-h200")
        DescribedDevice(platform='gpu', device_kind='nvidia-h200')
    """

    platform: str
    device_kind: str


def resolve_device(device: Any = None) -> Any:
    """The device for a `jax.Device`, a topology's device, a chip or its slug, or None for JAX's default.

    `"cpu"` is the host. Only None queries JAX for its devices.

    Example:
        >>> resolve_device("tpu-v6e").platform, resolve_device("cpu").platform
        ('tpu', 'cpu')
    """
    if device is None:
        return _default_device()
    if isinstance(device, Chip):
        return DescribedDevice(device.kind, device.slug)
    if isinstance(device, str):
        if device.lower() == "cpu":
            return DescribedDevice("cpu", "cpu")
        if (chip := identify(device)) is not None:
            return DescribedDevice(chip.kind, chip.slug)
    elif hasattr(device, "platform") or hasattr(device, "device_kind"):
        return device
    raise InvalidInputError(
        f"device is {device!r} ({type(device).__name__}); expected a jax.Device, a topology's device, or "
        f"one of these names: cpu, {', '.join(CHIPS)}."
    )


def compute_capability(device: Any) -> int:
    """Compute capability times ten, 90 for "9.0"; 0 if the device has none.

    Example:
        >>> compute_capability(DescribedDevice("gpu", "nvidia-h200"))
        0
    """
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return int(major) * 10 + int(minor or 0) if major.isdecimal() and (minor or "0").isdecimal() else 0


def _default_device() -> Any:
    import jax  # here, so that describing a device does not import JAX

    default = jax.config.jax_default_device
    # Local devices only: those of another process can be neither timed nor asked for memory statistics.
    return jax.local_devices(backend=default)[0] if default is None or isinstance(default, str) else default
