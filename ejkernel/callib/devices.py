"""From whatever names a device to something with a `platform` and a `device_kind`."""

from dataclasses import dataclass
from typing import Any

from ejkernel.callib.chips import CHIPS, Chip, identify
from ejkernel.errors import InvalidInputError

__all__ = ["DescribedDevice", "compute_capability", "resolve_device"]


@dataclass(frozen=True)
class DescribedDevice:
    """A device that is not there: what a slug such as `nvidia-h200` stands for.

    Example:
        >>> resolve_device("nvidia-h200")
        DescribedDevice(platform='gpu', device_kind='nvidia-h200')
    """

    platform: str
    device_kind: str


def resolve_device(device: Any = None) -> Any:
    """The device meant by a `jax.Device`, a topology's device, a chip or its slug, or None for JAX's default.

    `"cpu"` is the host. Only None asks JAX for its devices.

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
    """90 for a device that says "9.0"; 0 where it says nothing.

    Example:
        >>> compute_capability(DescribedDevice("gpu", "nvidia-h200"))
        0
    """
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return int(major) * 10 + int(minor or 0) if major.isdecimal() and (minor or "0").isdecimal() else 0


def _default_device() -> Any:
    import jax  # not above: describing a device must not need JAX

    default = jax.config.jax_default_device
    # Local: what another process holds can be neither measured nor asked for its memory.
    return jax.local_devices(backend=default)[0] if default is None or isinstance(default, str) else default
