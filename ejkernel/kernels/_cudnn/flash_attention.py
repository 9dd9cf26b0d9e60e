"""cuDNN's fused attention, forward and backward apart.

``jax.nn.dot_product_attention`` reaches the same kernels, but has no backward of its own and rounds the lse to the
output's dtype. So this module binds JAX's two primitives beneath it, which XLA turns into cuDNN's graphs.

What cuDNN's graphs mean, as XLA builds them:

- The diagonal of the causal mask starts at the top left: with as many queries as keys that is our mask, else not.
- A window of ``n`` keys is counted from the query's own position, which is one of them, to the left: ``(n - 1, 0)``.
- The statistics are ``max + log(sum(exp(logits - max)))`` of the scaled logits, float32: our lse.
- Whether the backward adds up in a fixed order is decided for a whole program, by XLA's flags
  ``xla_gpu_deterministic_ops`` and ``xla_gpu_exclude_nondeterministic_ops``, and not by a call.

Left out, for what happens to a row that sees nothing is not ours to say: masks, segments, packed sequences, and a bias,
which may be -inf and would be rounded to half precision.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.registry import kernel_registry
from ejkernel.contracts.support import HALF, Backend, Platform, Support, cuda, is_present, multiple_of

# What is private to JAX: the names from here to ``_cudnn_version``. ``changes`` compares them with the JAX that is
# installed; where it finds a difference the kernel is refused.

HOOK = "jax._src.cudnn.fused_attention_stablehlo"
NAMES = (
    "_dot_product_attention_fwd_p_wrapper.bind",
    "_dot_product_attention_bwd_p_wrapper.bind",
    "MaskType.NO_MASK",
    "MaskType.CAUSAL",
    "AttentionLayout.BTNH.value",
)
OPERANDS = (
    *("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets"),
    *("page_table_k", "page_table_v"),
)
RESIDUALS = ("activation", "fwd_output", "grad_output")
STATICS = ("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length")
PARAMETERS = {"fwd": (*OPERANDS, *STATICS, "is_training"), "bwd": (*OPERANDS, *RESIDUALS, *STATICS)}
# Since jax 0.12: a function of the logits and its arrays. There is none here.
ADDED = ("score_mod_args", "score_mod")


def _hook() -> ModuleType:
    return importlib.import_module(HOOK)


def _parameters(direction: str) -> tuple[str, ...]:
    """What the body of a primitive takes; the primitive is bound with the same, operands by position."""
    return tuple(inspect.signature(getattr(_hook(), f"_dot_product_attention_{direction}_impl")).parameters)


@functools.cache
def changes() -> str | None:
    """How the installed JAX differs from what this module knows of its private parts; None if it does not."""
    here = f"jax {jax.__version__}: {HOOK}"
    try:
        operator.attrgetter(*NAMES)(_hook())
        for direction, known in PARAMETERS.items():
            found = _parameters(direction)
            if tuple(name for name in found if name not in ADDED) != known:
                return f"{here} takes ({', '.join(found)}) for {direction}; known is ({', '.join(known)})"
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"{here} has changed: {error}"
    return None


def _bind(direction: str, operands: tuple[Array, ...], mask: str, **statics: Any) -> list[Array]:
    """Bind a primitive: query, key and value, then the residuals if it is the backward's."""
    hook = _hook()
    unused = [jnp.zeros(0, operands[0].dtype)] * (len(OPERANDS) - 3)
    if "score_mod" in _parameters(direction):
        statics["score_mod"] = None
    return getattr(hook, f"_dot_product_attention_{direction}_p_wrapper").bind(
        *operands[:3],
        *unused,
        *operands[3:],
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),  # no bias, no gradient of one
        mask_type=hook.MaskType[mask],
        layout=hook.AttentionLayout.BTNH.value,
        **statics,
    )


@functools.cache
def _cudnn_version() -> int:
    """91002 for 9.10.2; 0 where JAX has no cuDNN."""
    try:
        return importlib.import_module("jax._src.lib").cuda_versions.cudnn_get_version()
    except (ImportError, AttributeError, RuntimeError):
        return 0


# What follows is ours.

OLDEST = 90800  # that JAX 0.10 is made for
OLDEST_BY_CAPABILITY = {103: 91100}
FAULTY = {91000: 91002, 91001: 91002}  # known faults in attention of half precision, and the version without them


def _words(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def refusal(device: DeviceInfo) -> str | None:
    """Why cuDNN cannot be used: by this JAX, or on a device of this process with the version that is there."""
    changed = changes()
    if changed:
        return f"cuDNN's attention cannot be reached ({changed})"
    if not is_present(device):
        return None
    version = _cudnn_version()
    oldest = FAULTY.get(version, OLDEST_BY_CAPABILITY.get(device.capability, OLDEST))
    if not version:
        return f"needs cuDNN >= {_words(oldest)}, which is not there (or JAX's CUDA plugin is not)"
    if version < oldest:
        return f"needs cuDNN >= {_words(oldest)}, found {_words(version)}"
    return None


def _meaning(spec: Any) -> dict[str, Any]:
    """What both directions are told of a call. The scale is always positive: see ``_signed``."""
    left, right = spec.window
    return {
        "scale": abs(float(spec.softmax_scale)) or 1.0,
        "mask": "CAUSAL" if right == 0 else "NO_MASK",
        "sliding_window_length": None if left is None else left + 1,
    }


def _signed(query: Array, spec: Any) -> Array:
    """The query (or its gradient) times the scale's sign: a fused softmax may take the largest logit before it scales."""
    if spec.softmax_scale > 0:
        return query
    return -query if spec.softmax_scale < 0 else jnp.zeros_like(query)


def forward(arrays: dict[str, Array], spec: Any, params: Any) -> tuple[Array, Array]:
    """Attention output ``[B, Sq, H, D]`` and the log-sum-exp of its logits ``[B, H, Sq]``."""
    if _single(arrays):
        return _forward_of_one(arrays, spec)
    operands = (_signed(arrays["query"], spec), arrays["key"], arrays["value"])
    out, lse = _bind("fwd", operands, is_training=True, **_meaning(spec))
    return out, lse


def backward(
    arrays: dict[str, Array],
    spec: Any,
    params: Any,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
) -> dict[str, Array]:
    """Gradients of query, key and value. ``dlse`` is 0: calls that return the lse are not taken."""
    if _single(arrays):
        key = arrays["key"]
        dv = dout.astype(jnp.float32).reshape(*key.shape[:3], -1, key.shape[3]).sum(3)
        return {"query": jnp.zeros_like(dout), "key": jnp.zeros_like(key), "value": dv.astype(key.dtype)}
    operands = (_signed(arrays["query"], spec), arrays["key"], arrays["value"], lse, out, dout)
    dq, dk, dv = _bind("bwd", operands, **_meaning(spec))
    return {"query": _signed(dq, spec), "key": dk, "value": dv}


def _single(arrays: dict[str, Array]) -> bool:
    """Whether there is one query and one key: cuDNN refuses that, and its answer is the value."""
    return arrays["query"].shape[1] == arrays["key"].shape[1] == 1


def _forward_of_one(arrays: dict[str, Array], spec: Any) -> tuple[Array, Array]:
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], 2) for x in (key, value))
    logits = (query.astype(jnp.float32) * key.astype(jnp.float32)).sum(-1) * spec.softmax_scale
    return value, logits.swapaxes(1, 2)


class CudnnFlashAttention:
    """The implementation by NVIDIA's library."""

    name = "flash-cudnn"
    version = 1
    reads: ClassVar = {"forward": (), "backward": ()}
    forward = staticmethod(forward)
    backward = staticmethod(backward)


kernel_registry.register(
    "flash_attention",
    Platform.CUDNN,
    Backend.GPU,
    priority=5,
    support=Support(
        devices=cuda(min_capability=80),
        dtypes=HALF,
        # The backward's limits: 256 is Hopper's alone.
        head_dims=multiple_of(8, at_most=128, exceptions=((cuda(90, 90), 256),)),
        features={"causal", "window", "gqa", "cross"},
        gradients={"query", "key", "value"},
        deterministic=False,
        excludes=({"causal", "cross"},),
        needs=(("window", "causal"),),
        check=refusal,
    ),
)(CudnnFlashAttention)
