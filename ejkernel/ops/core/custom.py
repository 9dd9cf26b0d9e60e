"""Algorithms that the library has no operation for: users' plain functions, reached through ``kernel_registry.get``."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ejkernel.contracts import device as devices
from ejkernel.contracts.call import Call
from ejkernel.contracts.support import Backend, Platform
from ejkernel.ops.config.context import surroundings
from ejkernel.ops.core import select
from ejkernel.ops.core.checks import is_concrete


def pinned(algorithm: str, platform: Platform | None, backend: Backend | None) -> Callable:
    """A function that runs the implementation that is decided for its arguments."""

    def run_pinned(*args, **kwargs):
        arrays = [x for x in jax.tree.leaves((args, kwargs)) if hasattr(x, "shape")]
        device = next((next(iter(x.devices())) for x in arrays if is_concrete(x)), None)
        info = surroundings().target or devices.describe(device)
        floats = [jnp.dtype(x.dtype).name for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
        call = Call(algorithm, {**{f"{i}": x for i, x in enumerate(args)}, **kwargs}, dtype=floats[0] if floats else "")
        chosen = select.decide(call, info, select.Pins(platform, backend)).require()
        return chosen.implementation.kernel(*args, **kwargs)

    run_pinned.__name__ = run_pinned.__qualname__ = algorithm
    return run_pinned
