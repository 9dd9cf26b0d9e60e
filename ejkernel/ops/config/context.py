"""What surrounds a call and changes what runs: ``target``, ``overlay``, tuning.

The state lives in one of JAX's own contexts, so entering a block retraces functions that were jitted outside of it:
nothing is served from a cache that was filled under other circumstances.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from ejkernel.contracts import device as devices
from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.registry import kernel_registry
from ejkernel.errors import InvalidInputError


@dataclass(frozen=True)
class Surroundings:
    """The state of all ``with`` blocks around a call, innermost last."""

    target: devices.DeviceInfo | None = None
    overlays: tuple[tuple[str, FwdParams | BwdParams], ...] = ()
    tuning: bool = False

    def overlaid(self, operation: str, cls: type) -> FwdParams | BwdParams | None:
        """The innermost overlay of that kind for an operation, merged over the ones around it."""
        merged = None
        for name, params in self.overlays:
            if name == operation and isinstance(params, cls):
                merged = cls.merge(merged, params)
        return merged


_context = jax.make_user_context(default_value=Surroundings())


def surroundings() -> Surroundings:
    """The state in force here."""
    return _context.value


@contextlib.contextmanager
def _entered(**changes: Any) -> Iterator[None]:
    with _context(replace(surroundings(), **changes)):
        yield


@contextlib.contextmanager
def target(device: Any) -> Iterator[devices.DeviceInfo]:
    """Decide and trace for a device that need not be here.

    Takes a chip's name, a ``jax.Device`` or a topology's device: for ahead-of-time compilation, ``jax.export`` and
    questions such as "what would run on an H200?".

    Example:
        >>> with target("nvidia-h200") as device:
        ...     device.capability
        90
    """
    info = devices.describe(device)
    with _entered(target=info):
        yield info


@contextlib.contextmanager
def overlay(**operations: Any) -> Iterator[None]:
    """Give parameters to every call of an operation in the block, without touching the calls or the store.

    An operation's name takes ``FwdParams``, ``BwdParams`` or a pair of both.

    Example:
        >>> from ejkernel import FwdParams, overlay
        >>> with overlay(flash_attention=FwdParams(q_blocksize=64)):
        ...     pass  # calls of flash_attention in here use blocks of 64 queries
    """
    known = kernel_registry.list_algorithms()
    added = []
    for name, given in operations.items():
        if name not in known:
            raise InvalidInputError(
                f"overlay({name}=…): there is no operation of that name; expected one of {', '.join(known)}."
            )
        pair = isinstance(given, tuple) and len(given) == 2 and type(given[0]) is not type(given[1])
        for params in given if pair else (given,):
            if not isinstance(params, FwdParams | BwdParams):
                raise InvalidInputError(
                    f"overlay({name}={params!r}): expected FwdParams, BwdParams or a pair of them, as in "
                    f"overlay({name}=FwdParams(q_blocksize=128))."
                )
            kernel_registry.check_params(name, params, f"overlay({name}={type(params).__name__}(…))")
            added.append((name, params))
    with _entered(overlays=(*surroundings().overlays, *added)):
        yield


def tuning() -> contextlib.AbstractContextManager[None]:
    """Measure what has not been measured, for the calls in the block."""
    return _entered(tuning=True)
