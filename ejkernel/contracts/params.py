"""How a kernel runs: block sizes, warps, stages. Never what it computes."""

import math
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

from ejkernel.callib.integers import power_of_two_below
from ejkernel.errors import InvalidInputError

__all__ = ["BwdParams", "FwdParams"]

_SMALLEST_BLOCK = 16  # the smallest tile side that tensor cores multiply


Size = int | np.integer | None  # an int or None, once it is in
AnyParams = TypeVar("AnyParams", bound="_Params")


class _Params:
    """What both sets share. They are keys of caches, so a wrong value is refused before it becomes one."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value <= 0:
                raise InvalidInputError(
                    f"{type(self).__name__}.{f.name} is {value!r} ({type(value).__name__}); expected a "
                    "positive int, or None to leave the choice to the library."
                )
            object.__setattr__(self, f.name, int(value))

    def to_dict(self) -> dict[str, int]:
        """The fields that are set.

        Example:
            >>> FwdParams(q_blocksize=64, num_warps=4).to_dict()
            {'q_blocksize': 64, 'num_warps': 4}
        """
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if value is not None}

    @classmethod
    def merge(cls: type[AnyParams], base: AnyParams | None, override: AnyParams | None) -> AnyParams:
        """Both sets in one; where both set a field, `override` wins.

        Example:
            >>> FwdParams.merge(FwdParams(q_blocksize=64, num_warps=4), FwdParams(num_warps=8)).to_dict()
            {'q_blocksize': 64, 'num_warps': 8}
        """
        merged: dict[str, int] = {}
        for name, params in (("base", base), ("override", override)):
            if params is None:
                continue
            _require(params, cls, name)
            merged.update(params.to_dict())
        return cls(**merged)


@dataclass(frozen=True)
class FwdParams(_Params):
    """Parameters of a forward pass. None leaves the choice to the library.

    Example:
        >>> FwdParams(q_blocksize=128, kv_blocksize=64) == FwdParams(q_blocksize=128, kv_blocksize=64)
        True
    """

    blocksize_m: Size = None
    blocksize_k: Size = None
    blocksize_n: Size = None
    q_blocksize: Size = None
    kv_blocksize: Size = None
    blocksize_heads: Size = None
    blocksize_keys: Size = None
    num_key_splits: Size = None
    num_warps: Size = None
    num_stages: Size = None


@dataclass(frozen=True)
class BwdParams(_Params):
    """Parameters of a backward pass. None leaves the choice to the library.

    Example:
        >>> BwdParams(q_blocksize=64, num_stages=2).to_dict()
        {'q_blocksize': 64, 'num_stages': 2}
    """

    blocksize_m: Size = None
    blocksize_k: Size = None
    blocksize_n: Size = None
    q_blocksize: Size = None
    kv_blocksize: Size = None
    num_warps: Size = None
    num_stages: Size = None
    blocksize_heads: Size = field(default=None, kw_only=True)

    @classmethod
    def from_fwd_params(cls, fwd: FwdParams, scale: float | int = 0.5) -> "BwdParams":
        """Backward parameters with every block of `fwd` scaled, down to a power of two of at least 16.

        Warps and stages are kept, heads a block are left to the library, and what `fwd` leaves open stays open.

        Example:
            >>> BwdParams.from_fwd_params(FwdParams(q_blocksize=128, kv_blocksize=96, num_warps=4)).to_dict()
            {'q_blocksize': 64, 'kv_blocksize': 32, 'num_warps': 4}
        """
        _require(fwd, FwdParams, "fwd")
        if isinstance(scale, bool) or not isinstance(scale, Real) or not 0 < scale < math.inf:
            raise InvalidInputError(f"scale is {scale!r}; expected a positive, finite number such as 0.5.")

        def carry(name: str) -> int | None:
            value = getattr(fwd, name)
            if value is None or "blocksize" not in name:
                return value
            # A product past the largest float is no block either; 2**62 stands for it.
            scaled = max(int(min(value * scale, 2.0**62)), _SMALLEST_BLOCK)
            return power_of_two_below(scaled)

        return cls(**{f.name: carry(f.name) for f in fields(cls) if f.name != "blocksize_heads"})


def params_class(direction: str) -> type[FwdParams] | type[BwdParams]:
    """What the parameters of a "forward" or a "backward" are."""
    return FwdParams if direction == "forward" else BwdParams


def _require(params: Any, cls: type, name: str) -> None:
    if not isinstance(params, cls):
        raise InvalidInputError(f"{name} is {params!r} ({type(params).__name__}); expected {cls.__name__}.")
