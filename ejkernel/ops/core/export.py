"""``jax.export`` of calls whose kernels are custom calls."""

from __future__ import annotations

import jax.export

# Of jax-triton up to 0.3 and from 0.4 on, and of cuDNN. JAX itself vouches for Pallas.
TARGETS = ("triton_kernel_call", "triton_kernel_call_ffi", "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What to tell ``jax.export`` so that it takes Triton's and cuDNN's kernels: ``disabled_checks=export_checks()``.

    JAX guarantees for few custom calls that later versions run them. What is exported with these checks disabled is for the
    versions of jax, of Triton and of cuDNN that it was exported with, and for the GPU that it was compiled for.

    Example:
        >>> import jax, jax.export, jax.numpy as jnp
        >>> from ejkernel import export_checks, flash_attention
        >>> x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.float32)
        >>> f = jax.jit(lambda x: flash_attention(x, x, x, causal=True))
        >>> jax.export.export(f, disabled_checks=export_checks())(x).out_avals[0].shape
        (1, 128, 2, 64)
    """
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]
