"""What this machine can run: every kernel checked against float64 and timed beside ``jax.nn``."""

from __future__ import annotations

import platform as host
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import ejkernel
from ejkernel import EjkernelError, explain, flash_attention
from ejkernel.lab import reference
from ejkernel.ops.core.device import describe

HEADS, HEAD_DIM = 8, 64
BOUND = 2e-5

CHECKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, 4 query heads a key head": {"causal": True, "group": 4},
    "window, soft cap, sinks": {"causal": True, "sliding_window": (40, 0), "logits_soft_cap": 5.0, "sinks": 2},
}


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    device = jax.local_devices()[0]
    return {
        "device": device.device_kind,
        "fingerprint": describe(device).fingerprint,
        "devices": len(jax.local_devices()),
        "python": host.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "ejkernel": ejkernel.__version__,
    }


def _plain_calls() -> dict[str, dict[str, Any]]:
    """A plain call of each operation, abstract."""

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    x, cache = array(1, 128, HEADS, HEAD_DIM), array(32, HEADS, 16, HEAD_DIM)
    attention = {"query": x, "key": x, "value": x}
    place = {"context_lens": array(4, dtype=jnp.int32), "block_tables": array(4, 8, dtype=jnp.int32)}
    return {
        "flash_attention": attention,
        "page_attention": {"query": array(4, HEADS, HEAD_DIM), "key_cache": cache, "value_cache": cache, **place},
        "ring_attention": attention,
        "blocksparse_attention": {**attention, "sparsity_mask": array(2, 2, dtype=jnp.bool_)},
        "recurrent": {
            "inputs": array(2, 16, 32),
            "weights": {"weight_ih": array(4 * 64, 32), "weight_hh": array(4 * 64, 64)},
        },
        "mean_pooling": {"inputs": array(2, 128, 64)},
        "grouped_matmul": {
            "a": array(256, 64),
            "b": array(4, 64, 64),
            "group_sizes": array(4, dtype=jnp.int32),
        },
    }


def kernels() -> list[dict[str, Any]]:
    """Every implementation, whether it can run a plain call here, and if not, why."""
    rows = []
    for algorithm, arguments in _plain_calls().items():
        for candidate in explain(algorithm, **arguments).candidates:
            rows.append(
                {
                    "operation": algorithm,
                    "platform": candidate.platform.value,
                    "backend": candidate.backend.value,
                    "runs": candidate.verdict != "refused",
                    "reasons": list(candidate.reasons),
                }
            )
    return rows


def checks(platform: str) -> Iterator[dict[str, Any]]:
    """An implementation's largest error against float64, for a few calls; a generator, for progress bars."""
    for name, options in CHECKS.items():
        options = dict(options)
        rng = np.random.default_rng(0)
        kv_heads = HEADS // options.pop("group", 1)
        shapes = {"query": HEADS, "key": kv_heads, "value": kv_heads}
        arrays = {n: rng.standard_normal((2, 150, heads, 32)).astype(np.float32) for n, heads in shapes.items()}
        if sinks := options.pop("sinks", 0):
            arrays["softmax_aux"] = rng.standard_normal((sinks,)).astype(np.float32)
        row = {"platform": platform, "check": name, "error": None, "passed": False, "reason": ""}
        try:
            out = flash_attention(**arrays, **options, platform=platform)
            row["error"] = float(np.abs(np.asarray(out, np.float64) - reference.attention(**arrays, **options)).max())
            row["passed"] = row["error"] <= BOUND
        except EjkernelError as error:
            row["reason"] = str(error).splitlines()[0]
        yield row


def timings(platform: str, lengths: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Causal attention, float32, beside ``jax.nn``: milliseconds, the best of a few; a generator, for progress bars."""
    for length in lengths:
        x = tuple(jax.random.normal(k, (1, length, HEADS, HEAD_DIM)) for k in jax.random.split(jax.random.key(0), 3))

        def ours(q, k, v):
            return flash_attention(q, k, v, causal=True, platform=platform)

        def theirs(q, k, v):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")

        for what, wrap in (("forward", lambda f: f), ("forward + backward", _with_gradients)):
            own, other = (best_time(jax.jit(wrap(f)), *x) for f in (ours, theirs))
            yield {
                "platform": platform,
                "length": length,
                "what": what,
                "ours_ms": own * 1e3,
                "jax_nn_ms": other * 1e3,
                "ratio": other / own,
            }


def _with_gradients(f: Callable) -> Callable:
    return jax.value_and_grad(lambda *a: f(*a).sum(), (0, 1, 2))


def best_time(run: Callable, *args: Any, rounds: int = 4) -> float:
    """Seconds of the fastest of a few runs, after one that compiles."""
    jax.block_until_ready(run(*args))
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        best = min(best, time.perf_counter() - start)
    return best
