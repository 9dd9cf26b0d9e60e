"""Packed sequences, segment ids and gradient dtypes, in plain JAX."""

from ejkernel.xla_utils.utils import *  # noqa: F403
from ejkernel.xla_utils.utils import __all__ as __all__
