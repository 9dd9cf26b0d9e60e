"""Reading values of arrays for checks, only where that costs no copy from a device."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np


def is_set(name: str) -> bool:
    """Whether an environment variable is set to something that means yes."""
    return os.environ.get(name, "").lower() not in ("", "0", "false", "no", "off")


def concrete(value: Any) -> np.ndarray | None:
    """The values of a numpy array or of an array on a CPU; None for all others.

    With ``EJKERNEL_CHECK_VALUES=1`` also those of an array on an accelerator, which are copied to the host.

    Example:
        >>> concrete(np.arange(3)), jax.jit(lambda x: x if concrete(x) is None else None)(1)
        (array([0, 1, 2]), Array(1, dtype=int32, weak_type=True))
    """
    if isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct) or not hasattr(value, "dtype"):
        return None
    if isinstance(value, jax.Array):
        on_host = all(device.platform == "cpu" for device in value.devices())
        if not value.is_fully_addressable or not (on_host or is_set("EJKERNEL_CHECK_VALUES")):
            return None
    return np.asarray(value)
