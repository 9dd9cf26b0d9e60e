"""The table of implementations."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ejkernel.errors import InvalidInputError, UnsupportedError
from ejkernel.ops.core.support import Backend, Platform, Support, as_member

T = TypeVar("T")

# Our own kernels register when their module is imported, and that waits until somebody asks for the operation.
BUILTIN = {
    "flash_attention": ("ejkernel.ops.flash_attention", ("ejkernel.kernels._xla.flash_attention",)),
}


@dataclass(frozen=True)
class Implementation:
    """One entry of the registry.

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
        """What tells two implementations of one platform and backend apart."""
        return f"{self.kernel.__module__}.{getattr(self.kernel, '__qualname__', type(self.kernel).__qualname__)}"

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
        """Whether JAX must differentiate the forward itself: there is no backward under the residual contract."""
        return self.plain or getattr(self.kernel, "backward", None) is None

    def backward(self, wanted: frozenset[str]) -> Callable:
        """The kernel's backward; one with a parameter ``wanted`` is told for which arguments, and may skip the others."""
        backward = self.kernel.backward
        if "wanted" in inspect.signature(backward).parameters:
            return functools.partial(backward, wanted=wanted)
        return backward

    def __str__(self) -> str:
        return f"{self.platform.value} {self.backend.value}"


class KernelRegistry:
    """Implementations by algorithm; see ``kernel_registry``."""

    def __init__(self) -> None:
        self._entries: dict[str, list[Implementation]] = {}
        self._loaded: set[str] = set()
        # Part of the key of every cached decision: a new kernel is considered from the next call on.
        self.generation = 0

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

        Registering a kernel of the same name for the same algorithm, platform and backend again replaces it.

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

        def add(kernel: T) -> T:
            if not callable(kernel) and not hasattr(kernel, "forward"):
                raise InvalidInputError(f"{kernel!r} is neither a function nor an object with a forward.")
            if hasattr(kernel, "forward") and algorithm not in BUILTIN:
                raise InvalidInputError(
                    f"{algorithm!r} is not an operation of ejkernel, so nothing prepares arrays for a forward: register a "
                    "plain function."
                )
            if algorithm in BUILTIN:
                self._load(algorithm)
            entry = Implementation(algorithm, platform, backend, support, priority, _instance(kernel))
            entries = self._entries.setdefault(algorithm, [])
            entries[:] = [e for e in entries if (e.name, str(e)) != (entry.name, str(entry))]
            entries.append(entry)
            self.generation += 1
            return kernel

        return add

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
    ) -> Callable:
        """The operation, pinned to an implementation and callable with the operation's own signature."""
        from ejkernel.ops.core.operation import pinned

        platform, backend = as_member(platform, Platform, "platform"), as_member(backend, Backend, "backend")
        entries = self.list_implementations(algorithm)
        if not any(matches(entry, platform, backend) for entry in entries):
            asked = ", ".join(f"{k}={v.value!r}" for k, v in (("platform", platform), ("backend", backend)) if v)
            known = ", ".join(str(entry) for entry in entries)
            raise UnsupportedError(f"{algorithm} has no implementation for {asked}; there are: {known}.")
        return pinned(algorithm, platform, backend)

    def list_algorithms(self) -> list[str]:
        """The names of everything that has an implementation."""
        return sorted(set(BUILTIN) | set(self._entries))

    def list_implementations(self, algorithm: str) -> list[Implementation]:
        """Every implementation of an algorithm, the first choice first."""
        if algorithm not in self.list_algorithms():
            raise InvalidInputError(f"algorithm is {algorithm!r}; expected one of {', '.join(self.list_algorithms())}.")
        if algorithm in BUILTIN:
            self._load(algorithm)
        return sorted(self._entries.get(algorithm, []), key=lambda entry: -entry.priority)

    def operation(self, algorithm: str) -> Any:
        """The operation of that name, None for an algorithm that only users' kernels implement."""
        if algorithm not in BUILTIN:
            return None
        module = importlib.import_module(BUILTIN[algorithm][0])
        return module.OPERATION

    def _load(self, algorithm: str) -> None:
        if algorithm in self._loaded:
            return
        self._loaded.add(algorithm)
        for module in BUILTIN[algorithm][1]:
            importlib.import_module(module)


def _instance(kernel: Any) -> Any:
    """A class whose forward is a method stands for an instance of it; one that merely holds functions for itself."""
    if not isinstance(kernel, type):
        return kernel
    first = next(iter(inspect.signature(kernel.forward).parameters), "")
    return kernel() if first == "self" else kernel


def matches(entry: Implementation, platform: Platform | None, backend: Backend | None) -> bool:
    """Whether an implementation is the one asked for; one for any backend answers to each of them."""
    return (platform is None or entry.platform is platform) and (
        backend is None or entry.backend is backend or entry.backend is Backend.ANY
    )


kernel_registry = KernelRegistry()
