"""What an implementation can do, as data.

A ``Support`` stands beside each kernel. Selection, the reasons in ``explain`` and in errors, the feature table of the
docs and the case lists of the tests are all read from it. What it does not state is refused, never ignored.
"""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from ejkernel.contracts.device import DeviceInfo
from ejkernel.errors import InvalidInputError, how_to_install


class Platform(enum.Enum):
    """What a kernel is written in: ``XLA``, ``TRITON``, ``PALLAS``, ``CUDNN`` or ``CUDA``.

    Arguments take the lower-case names too.
    """

    XLA = "xla"
    TRITON = "triton"
    PALLAS = "pallas"
    CUDNN = "cudnn"
    CUDA = "cuda"


class Backend(enum.Enum):
    """What a kernel runs on: ``CPU``, ``GPU``, ``TPU``, or ``ANY`` of them. Arguments take the lower-case names too."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"
    ANY = "any"


def as_member(value: Any, kind: type[enum.Enum], argument: str) -> Any:
    """An enum member from itself or its lower-case string; None stays None."""
    if value is None or isinstance(value, kind):
        return value
    if isinstance(value, str) and value in [member.value for member in kind]:
        return kind(value)
    names = ", ".join(repr(member.value) for member in kind)
    raise InvalidInputError(f"{argument} is {value!r}; expected one of {names}, a {kind.__name__} member or None.")


_NAMES = {"cpu": "a CPU", "gpu": "a GPU", "tpu": "a TPU"}
_VENDORS = {"amd": "AMD", "google": "", "nvidia": "NVIDIA"}  # all TPUs are Google's


@dataclass(frozen=True)
class Devices:
    """A set of devices: some kinds, perhaps one vendor, perhaps a range of capabilities."""

    kinds: frozenset[str]
    vendor: str = ""
    min_capability: int = 0
    max_capability: int | None = None

    def refusal(self, device: DeviceInfo) -> str | None:
        """Why a device is not in the set."""
        if device.kind not in self.kinds:
            wanted = " or ".join(_NAMES.get(kind, kind) for kind in sorted(self.kinds))
            return f"needs {wanted}, the device is {_NAMES.get(device.kind, device.kind)}"
        if self.vendor and device.vendor != self.vendor:
            return f"needs a device of {self.vendor}, this is {device}"
        too_old = device.capability < self.min_capability
        too_new = self.max_capability is not None and device.capability > self.max_capability
        if too_old or too_new:
            return f"needs {self._generations()}, {device} has {self._generation(device.capability)}"
        return None

    def __str__(self) -> str:
        if self == any_device():
            return "any"
        kinds = "/".join(sorted(self.kinds)).upper()
        name = " ".join(filter(None, [_VENDORS.get(self.vendor, self.vendor), kinds]))
        return f"{name} of {self._generations()}" if self.min_capability else name

    def _generations(self) -> str:
        least, most = (number and self._generation(number) for number in (self.min_capability, self.max_capability))
        numbers = f"≥ {least}" if most is None else least if most == least else f"{least}–{most}"
        return f"{'generation' if self.kinds == {'tpu'} else 'capability'} {numbers}"

    def _generation(self, capability: int) -> str:
        """A capability as the vendor writes it: 90 of NVIDIA is 9.0."""
        return f"{capability / 10:.1f}" if self.vendor == "nvidia" else str(capability)


def any_device() -> Devices:
    """Every device."""
    return Devices(frozenset({"cpu", "gpu", "tpu"}))


def cpu() -> Devices:
    """Every CPU."""
    return Devices(frozenset({"cpu"}))


def cuda(min_capability: int = 0, max_capability: int | None = None) -> Devices:
    """NVIDIA GPUs, by compute capability times ten: 90 is Hopper."""
    return Devices(frozenset({"gpu"}), "nvidia", min_capability, max_capability)


def rocm() -> Devices:
    """AMD GPUs."""
    return Devices(frozenset({"gpu"}), "amd")


def gpu() -> Devices:
    """GPUs of every maker."""
    return Devices(frozenset({"gpu"}))


def tpu(min_generation: int = 0) -> Devices:
    """TPUs, by generation."""
    return Devices(frozenset({"tpu"}), "google", min_generation)


@dataclass(frozen=True)
class HeadDims:
    """Which head dims a kernel takes; a query's and a value's are each asked for.

    ``exceptions`` are sets of devices with another ``at_most``; the first that holds the device counts.
    """

    step: int = 1
    at_most: int | None = None
    exceptions: tuple[tuple[Devices, int], ...] = ()

    def refusal(self, dim: int, device: DeviceInfo) -> str | None:
        """Why a head dim is not among them."""
        if dim % self.step:
            return f"head dim {dim} is not a multiple of {self.step}"
        limits = (limit for devices, limit in self.exceptions if devices.refusal(device) is None)
        at_most = next(limits, self.at_most)
        if at_most is not None and dim > at_most:
            return f"head dim {dim} is above {at_most}" + (f", the most on {device}" if self.exceptions else "")
        return None

    def __str__(self) -> str:
        parts = [f"multiples of {self.step}"] if self.step > 1 else []
        parts += [f"up to {self.at_most}"] if self.at_most is not None else []
        parts += [f"up to {limit} on {devices}" for devices, limit in self.exceptions]
        return ", ".join(parts) or "any"


def multiple_of(step: int, at_most: int | None = None, *, exceptions: tuple[tuple[Devices, int], ...] = ()) -> HeadDims:
    """Head dims that are multiples of ``step``; ``exceptions`` are pairs of devices and the most there.

    Example:
        >>> print(multiple_of(8, at_most=128, exceptions=((cuda(90, 90), 256),)))
        multiples of 8, up to 128, up to 256 on NVIDIA GPU of capability 9.0
    """
    return HeadDims(step, at_most, exceptions)


HALF = frozenset({"float16", "bfloat16"})
FLOATS = HALF | {"float32"}
ALL_FLOATS = FLOATS | {"float64"}


class _Everything(frozenset[str]):
    """A set that holds whatever it is asked for."""

    def __contains__(self, item: object) -> bool:
        return True

    def __repr__(self) -> str:
        return "EVERYTHING"


EVERYTHING = _Everything()


def _dtype_name(dtype: Any) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        raise InvalidInputError(
            f"Support(dtypes={{{dtype!r}}}): expected names of dtypes, such as 'float32'."
        ) from None


@dataclass(frozen=True)
class Support:
    """What an implementation can do.

    Attributes:
        devices: where it runs.
        dtypes: names of the dtypes it takes.
        head_dims: which head dims it takes.
        features: which of the operation's features it has; the operation lists their names.
        gradients: for which arguments it returns gradients.
        deterministic: whether a rerun gives the same bits.
        requires: modules that must be installed, and the extra of ejkernel that installs them.
        excludes: sets of features that it has, but not all together.
        needs: pairs of features: it has the first only beside the second.
        check: asked, on the devices above, for a reason why it cannot run: a library that is missing or too old.
            ``is_present`` tells a device of this process from a described one, of which no library is known.
    """

    devices: Devices = field(default_factory=any_device)
    dtypes: Set[Any] = FLOATS
    head_dims: HeadDims = field(default_factory=HeadDims)
    features: Set[str] = frozenset()
    gradients: Set[str] = frozenset()
    deterministic: bool = True
    requires: tuple[tuple[str, str], ...] = ()
    excludes: tuple[Set[str], ...] = ()
    needs: tuple[tuple[str, str], ...] = ()
    check: Callable[[DeviceInfo], str | None] | None = None

    def __post_init__(self) -> None:
        for name in ("dtypes", "features", "gradients"):
            value = getattr(self, name)
            if not isinstance(value, Set | list | tuple):
                raise InvalidInputError(f"Support({name}={value!r}): expected a set of names, such as {{{value!r}}}.")
            if value is not EVERYTHING:
                plain = map(_dtype_name, value) if name == "dtypes" else value
                object.__setattr__(self, name, frozenset(plain))
        for name in ("excludes", "needs"):
            for together in getattr(self, name):
                unknown = sorted(feature for feature in together if feature not in self.features)
                if isinstance(together, str) or unknown:
                    raise InvalidInputError(
                        f"Support({name}=…) has {together!r}: expected names out of features={sorted(self.features)}."
                    )

    @classmethod
    def everything(cls, *, devices: Devices | None = None) -> Support:
        """For a kernel that does all that its operation can be asked.

        Example:
            >>> "bias" in Support.everything().features
            True
        """
        return cls(devices or any_device(), EVERYTHING, HeadDims(), EVERYTHING, EVERYTHING)

    def refusals(self, request: Request) -> list[str]:
        """Every reason why this implementation cannot do what is asked; empty if it can."""
        absent = self.devices.refusal(request.device)
        reasons = [absent]
        if request.dtype and request.dtype not in self.dtypes:
            reasons.append(f"dtype {request.dtype} is not supported")
        reasons += [self.head_dims.refusal(dim, request.device) for dim in dict.fromkeys(request.head_dims)]
        reasons += [
            f"{phrase} is not supported" for name, phrase in request.features.items() if name not in self.features
        ]
        reasons += self._combinations(request.features)
        reasons += [f"no gradient for {name}" for name in sorted(request.gradients) if name not in self.gradients]
        for module, extra in self.requires if absent is None else ():
            if importlib.util.find_spec(module) is None:
                reasons.append(f"needs the package {module} ({how_to_install(extra)})")
        if self.check is not None and absent is None:
            reasons.append(self.check(request.device))
        return [reason for reason in reasons if reason]

    def _combinations(self, used: Mapping[str, str]) -> list[str]:
        """The reasons that lie in features which do not go together, or not alone."""
        reasons = [
            f"{' with '.join(phrase for name, phrase in used.items() if name in group)} is not supported"
            for group in self.excludes
            if all(name in used for name in group)
        ]
        reasons += [
            f"{used[name]} is supported only with {other}"
            for name, other in self.needs
            if name in used and other not in used
        ]
        return reasons


def is_present(device: DeviceInfo) -> bool:
    """Whether a device is one of this process, not one described by its name."""
    return not device.fingerprint.endswith("|described")


@dataclass(frozen=True)
class Request:
    """What one call asks of an implementation.

    ``features`` maps each feature that the call uses to the words that name it in a reason.
    """

    device: DeviceInfo
    dtype: str = ""
    head_dims: tuple[int, ...] = ()
    features: Any = field(default_factory=dict)
    gradients: frozenset[str] = frozenset()
