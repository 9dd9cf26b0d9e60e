"""The table of implementations."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.support import EVERYTHING, Backend, Platform, Support, as_member
from ejkernel.errors import InvalidInputError, UnsupportedError

T = TypeVar("T")
Params = TypeVar("Params", FwdParams, BwdParams)

# Our own kernels register when their module is imported, and that waits until somebody asks for the operation.
BUILTIN = {
    "blocksparse_attention": (
        "ejkernel.ops.blocksparse_attention",
        (
            "ejkernel.kernels._xla.blocksparse_attention",
            "ejkernel.kernels._triton.blocksparse_attention",
            "ejkernel.kernels._pallas.gpu.blocksparse_attention_sm90.attention",
            "ejkernel.kernels._pallas.tpu.blocksparse_attention.attention",
        ),
    ),
    "flash_attention": (
        "ejkernel.ops.flash_attention",
        (
            "ejkernel.kernels._xla.flash_attention",
            "ejkernel.kernels._triton.flash_attention",
            "ejkernel.kernels._cudnn.flash_attention",
            "ejkernel.kernels._pallas.gpu.flash_attention_sm90.attention",
            "ejkernel.kernels._pallas.tpu.flash_attention.attention",
        ),
    ),
    "grouped_matmul": (
        "ejkernel.ops.grouped_matmul",
        (
            "ejkernel.kernels._xla.grouped_matmul",
            "ejkernel.kernels._triton.grouped_matmul",
            "ejkernel.kernels._pallas.gpu.grouped_matmul_sm90.matmul",
            "ejkernel.kernels._pallas.tpu.grouped_matmul.matmul",
        ),
    ),
    "mean_pooling": (
        "ejkernel.ops.mean_pooling",
        ("ejkernel.kernels._xla.mean_pooling", "ejkernel.kernels._triton.mean_pooling"),
    ),
    "page_attention": (
        "ejkernel.ops.page_attention",
        (
            "ejkernel.kernels._xla.page_attention",
            "ejkernel.kernels._triton.page_attention",
            "ejkernel.kernels._pallas.gpu.page_attention_sm90.attention",
            "ejkernel.kernels._pallas.tpu.page_attention.attention",
        ),
    ),
    "recurrent": (
        "ejkernel.ops.recurrent",
        ("ejkernel.kernels._xla.recurrent", "ejkernel.kernels._triton.recurrent", "ejkernel.kernels._cuda.recurrent"),
    ),
    "ring_attention": ("ejkernel.ops.ring_attention", ()),
}

# Runs what users register for an algorithm that is not in ``BUILTIN``; named, like the operations, and loaded when asked for.
CUSTOM = "ejkernel.ops.core.custom"


@dataclass(frozen=True, eq=False)
class Implementation:
    """One entry of the registry; two are equal only if they are the same.

    ``kernel`` is what was registered: a plain function, or an object with ``forward`` and perhaps ``backward``.
    """

    algorithm: str
    platform: Platform
    backend: Backend
    support: Support
    priority: int
    kernel: Any

    @property
    def name(self) -> str:
        """What tells implementations of one platform and backend apart: the kernel's ``name``, else its qualified name."""
        own = getattr(self.kernel, "name", None)
        if isinstance(own, str):
            return own
        named = self.kernel if hasattr(self.kernel, "__qualname__") else type(self.kernel)
        return f"{named.__module__}.{named.__qualname__}"

    @property
    def version(self) -> int:
        """Raised by the kernel's author when timings of older versions no longer hold."""
        return getattr(self.kernel, "version", 1)

    @property
    def plain(self) -> bool:
        """Whether this is a function with the operation's own signature, differentiated by JAX."""
        return not hasattr(self.kernel, "forward")

    @property
    def whole(self) -> bool:
        """Whether JAX differentiates the forward itself: there is no backward under the residual contract.

        A kernel whose ``residuals`` are under that contract needs none: another implementation's takes its result.
        """
        own = getattr(self.kernel, "backward", None) is not None
        return self.plain or not (own or getattr(self.kernel, "residuals", False))

    def priority_for(self, shapes: dict[str, Any], spec: Any, device: DeviceInfo, direction: str) -> int:
        """The priority, less what the kernel itself takes off for a call."""
        handicap = getattr(self.kernel, "handicap", None)
        return self.priority - (handicap(shapes, spec, device, direction) if handicap is not None and shapes else 0)

    def reads(self, direction: str) -> frozenset[str] | None:
        """The parameters that the kernel reads; None if it does not say."""
        if self.plain:
            argument = "fwd_params" if direction == "forward" else "bwd_params"
            return None if argument in inspect.signature(self.kernel).parameters else frozenset()
        if direction == "backward" and self.whole:
            return frozenset()
        declared = getattr(self.kernel, "reads", None)
        return None if declared is None else frozenset(declared[direction])

    def effective(
        self, shapes: dict[str, Any], spec: Any, params: Params, device: DeviceInfo, direction: str
    ) -> Params:
        """The parameters that the kernel will use if it is given these."""
        clip = getattr(self.kernel, "effective", None)
        if clip is not None and shapes:
            return clip(shapes, spec, params, device, direction)
        reads = self.reads(direction)
        if reads is None:
            return params
        return type(params)(**{name: value for name, value in params.to_dict().items() if name in reads})

    def __str__(self) -> str:
        return f"{self.platform.value} {self.backend.value}"


@dataclass(frozen=True)
class Choice:
    """An implementation and how it will run; ``source`` is where the parameters came from."""

    implementation: Implementation
    params: FwdParams | BwdParams
    source: str
    device: DeviceInfo

    @property
    def platform(self) -> Platform:
        """What the kernel is written in."""
        return self.implementation.platform

    @property
    def backend(self) -> Backend:
        """What the kernel runs on."""
        return self.implementation.backend

    def forward(self, arrays: dict[str, Any], spec: Any) -> tuple[Any, Any]:
        """Run the kernel's forward."""
        run = self.implementation.kernel.forward
        return run(arrays, spec, self.params, **_accepted(run, device=self.device))

    def backward(self, wanted: frozenset[str], arrays: dict[str, Any], spec: Any, *rest: Any) -> dict[str, Any]:
        """Run the kernel's backward; ``rest`` is the forward's pair and its cotangents."""
        run = self.implementation.kernel.backward
        return run(arrays, spec, self.params, *rest, **_accepted(run, wanted=wanted, device=self.device))


def _accepted(function: Callable, **offered: Any) -> dict[str, Any]:
    """What a function has a parameter for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in parameters}


class KernelRegistry:
    """Implementations by algorithm; see ``kernel_registry``."""

    def __init__(self) -> None:
        self._entries: dict[str, list[Implementation]] = {}
        self._loaded: set[str] = set()
        self._loading: set[str] = set()
        self._lock = threading.RLock()
        # Part of the key of every cached decision: a new kernel is considered from the next call on.
        self.generation: int = 0

    def register(
        self,
        algorithm: str,
        platform: Platform | str,
        backend: Backend | str,
        *,
        support: Support,
        priority: int = 0,
    ) -> Callable[[T], T]:
        """Decorate an implementation; it is returned unchanged.

        Registering a kernel of the same name (an attribute ``name``, else the qualified name of the function or class)
        for the same algorithm, platform and backend again replaces it, as a notebook's cell does that is run twice.

        Example:
            >>> import jax.numpy as jnp
            >>> from ejkernel import Backend, Platform, Support, kernel_registry
            >>> @kernel_registry.register("double", Platform.XLA, Backend.ANY, support=Support.everything())
            ... def double(x):
            ...     return 2 * x
            >>> print(kernel_registry.get("double")(jnp.ones(2)))
            [2. 2.]
            >>> kernel_registry.unregister(double)
        """
        if not isinstance(support, Support):
            raise InvalidInputError(
                f"support is {support!r}; expected a Support value. Support.everything() is for a kernel that does all "
                "that its operation can be asked."
            )
        platform, backend = as_member(platform, Platform, "platform"), as_member(backend, Backend, "backend")
        if platform is None or backend is None:
            raise InvalidInputError("register needs a platform and a backend; got None.")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidInputError(f"priority is {priority!r}; expected an int.")

        def add(kernel: T) -> T:
            if isinstance(kernel, type) and not hasattr(kernel, "forward"):
                raise InvalidInputError(f"{kernel!r} is a class without a forward.")
            if not callable(kernel) and not hasattr(kernel, "forward"):
                raise InvalidInputError(f"{kernel!r} is neither a function nor an object with a forward.")
            if hasattr(kernel, "forward") and algorithm not in BUILTIN:
                raise InvalidInputError(
                    f"{algorithm!r} is not an operation of ejkernel, so nothing prepares arrays for a forward: register a "
                    "plain function."
                )
            runs_on = self._runs_on(algorithm)
            if runs_on != algorithm:
                raise InvalidInputError(f"{algorithm} runs on the kernels of {runs_on}: register a kernel for that.")
            if algorithm in BUILTIN:
                self._load(algorithm)
            stated = self._stated(algorithm, backend, support)
            entry = Implementation(algorithm, platform, backend, stated, priority, _instance(kernel))
            with self._lock:
                kept = [e for e in self._entries.get(algorithm, []) if (e.name, str(e)) != (entry.name, str(entry))]
                self._entries[algorithm] = [*kept, entry]
                self.generation += 1
            return kernel

        return add

    def _stated(self, algorithm: str, backend: Backend, support: Support) -> Support:
        """The support on its backend alone, "everything" spelled out, its names checked against the operation's."""
        if backend is not Backend.ANY:
            kinds = support.devices.kinds & {backend.value}
            if not kinds:
                raise InvalidInputError(
                    f"backend is {backend.value!r}, but support.devices is {support.devices}: no device is in both."
                )
            support = dataclasses.replace(support, devices=dataclasses.replace(support.devices, kinds=kinds))
        operation = self.operation(algorithm)
        if operation is None:
            return support
        for field, known in (("features", operation.features), ("gradients", operation.gradients)):
            stated = getattr(support, field)
            if stated is EVERYTHING:
                support = dataclasses.replace(support, **{field: frozenset(known)})
            elif stated - set(known):
                unknown = ", ".join(sorted(stated - set(known)))
                raise InvalidInputError(f"Support({field}=…) names {unknown}; {algorithm} knows {', '.join(known)}.")
        return support

    def unregister(self, kernel: Any) -> None:
        """Forget a kernel that was registered."""
        found = False
        for algorithm, entries in list(self._entries.items()):
            kept = [e for e in entries if e.kernel is not kernel and type(e.kernel) is not kernel]
            found |= len(kept) < len(entries)
            self._entries[algorithm] = kept
            if not kept and algorithm not in BUILTIN:
                del self._entries[algorithm]
        if not found:
            raise InvalidInputError(f"{kernel!r} is not registered.")
        self.generation += 1

    def get(
        self, algorithm: str, platform: Platform | str | None = None, backend: Backend | str | None = None
    ) -> Callable[..., Any]:
        """The operation, pinned to an implementation and callable with the operation's own signature."""
        platform, backend = as_member(platform, Platform, "platform"), as_member(backend, Backend, "backend")
        entries = self.list_implementations(algorithm)
        if not any(matches(entry, platform, backend) for entry in entries):
            asked = ", ".join(f"{k}={v.value!r}" for k, v in (("platform", platform), ("backend", backend)) if v)
            known = ", ".join(str(entry) for entry in entries)
            raise UnsupportedError(f"{algorithm} has no implementation for {asked}; there are: {known}.")
        operation = self.operation(algorithm)
        if operation is None:
            return importlib.import_module(CUSTOM).pinned(algorithm, platform, backend)
        pinned = functools.partial(operation.function, platform=platform, backend=backend)
        return functools.update_wrapper(pinned, operation.function)

    def list_algorithms(self) -> list[str]:
        """The names of everything that has an implementation."""
        return sorted(set(BUILTIN) | set(self._entries))

    def list_implementations(self, algorithm: str) -> list[Implementation]:
        """Every implementation of an algorithm, the first choice first."""
        if algorithm not in self.list_algorithms():
            raise InvalidInputError(f"algorithm is {algorithm!r}; expected one of {', '.join(self.list_algorithms())}.")
        algorithm = self._runs_on(algorithm)
        if algorithm in BUILTIN:
            self._load(algorithm)
        # Kernels of one priority in the order of registration, but TPUs' last, whichever module was imported first.
        return sorted(
            self._entries.get(algorithm, []), key=lambda entry: (-entry.priority, entry.backend is Backend.TPU)
        )

    def _runs_on(self, algorithm: str) -> str:
        """The algorithm whose kernels an operation runs on: its own, for most."""
        operation = self.operation(algorithm)
        return (operation.runs_on if operation else "") or algorithm

    def check_params(self, algorithm: str, params: FwdParams | BwdParams, asked: str) -> None:
        """Refuse a parameter that no implementation of an algorithm reads; ``asked``: where it was set, for the error."""
        direction = "forward" if isinstance(params, FwdParams) else "backward"
        reads = [entry.reads(direction) for entry in self.list_implementations(algorithm)]
        if None in reads:
            return
        known = sorted(frozenset().union(*reads))
        for name, value in params.to_dict().items():
            if name not in known:
                expected = f"one of {', '.join(known)}" if known else "none: it has no parameters to set"
                raise InvalidInputError(
                    f"{asked} sets {name}={value}, which no implementation of {algorithm} reads in its {direction}; "
                    f"expected {expected}."
                )

    def operation(self, algorithm: str) -> Any:
        """The operation of that name, None for an algorithm that only users' kernels implement."""
        if algorithm not in BUILTIN:
            return None
        module = importlib.import_module(BUILTIN[algorithm][0])
        return module.OPERATION

    def _load(self, algorithm: str) -> None:
        if algorithm in self._loaded:
            return
        # Another thread must wait until all are there; the modules themselves register through here.
        with self._lock:
            if algorithm in self._loading:
                return
            self._loading.add(algorithm)
            for module in BUILTIN[algorithm][1]:
                importlib.import_module(module)
            self._loaded.add(algorithm)


def _instance(kernel: Any) -> Any:
    """A class whose forward is a method stands for an instance of it; one that merely holds functions for itself."""
    if not isinstance(kernel, type):
        return kernel
    first = next(iter(inspect.signature(kernel.forward).parameters), "")
    if first != "self":
        return kernel
    try:
        return kernel()
    except TypeError as error:
        raise InvalidInputError(
            f"{kernel!r} cannot be made without arguments ({error}): register an instance."
        ) from None


def matches(entry: Implementation, platform: Platform | None, backend: Backend | None) -> bool:
    """Whether an implementation is the one asked for; one for any backend answers to each of them."""
    return (platform is None or entry.platform is platform) and (
        backend is None or entry.backend is backend or entry.backend is Backend.ANY
    )


kernel_registry: KernelRegistry = KernelRegistry()
