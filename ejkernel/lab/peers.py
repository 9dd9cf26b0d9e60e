"""What else computes the same: each peer as a function of a workload's arrays, or the reason why it is not here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.contracts.device import describe
from ejkernel.lab import moe
from ejkernel.lab.extras import need
from ejkernel.lab.workloads import LAYERS, Workload


class Absent(Exception):
    """This peer cannot run this workload here; the message says why."""


def names(operation: str) -> list[str]:
    """The peers of an operation, whether they are here or not."""
    return list(_PEERS.get(operation, {}))


def function(name: str, workload: Workload) -> tuple[Callable[[dict[str, Any]], Any], str]:
    """A peer's function of the arrays, and the framework whose arrays it takes, ``jax`` or ``torch``.

    Raises:
        Absent: with the reason.
    """
    made, framework = _PEERS[workload.operation][name]
    given = {*workload.arrays, *(n for n, v in workload.options.items() if v is not None and v is not False)}
    others = sorted(given - _KNOWN[workload.operation] - _MORE.get(name, set()) - {"platform", "backend"})
    if others:
        raise Absent(f"is compared only without {', '.join(others)}")
    return made(workload), framework


def as_torch(arrays: dict[str, Any]) -> dict[str, Any]:
    """A workload's arrays as tensors, on torch's GPU if it has one; not copied if they are there."""
    torch = need("torch", "a comparison with torch")
    place = "cuda" if torch.cuda.is_available() else "cpu"
    return jax.tree.map(lambda x: torch.from_dlpack(x).to(place), arrays)


def _installed(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise Absent(f"{module} is not installed")


def _gpu(wanted: str) -> None:
    if describe().kind != "gpu":
        raise Absent(f"{wanted} needs a GPU")


def _causal(workload: Workload, aligned: str) -> bool:
    """Whether a call is causal, for a peer that aligns the diagonal in this way."""
    causal = workload.options.get("causal", False)
    lengths = {workload.arrays[name].shape[1] for name in ("query", "key")}
    bounded = causal or workload.options.get("sliding_window") is not None
    if bounded and aligned == "top-left" and len(lengths) > 1:
        raise Absent("aligns causality and windows top-left, which differs where there are more keys than queries")
    return causal


def _window(workload: Workload) -> tuple[int, int] | None:
    """A static window with two bounds, for a peer that knows no others."""
    if "sliding_window" in workload.arrays:
        raise Absent("is compared only with windows that are no arrays")
    window = workload.options.get("sliding_window")
    sides = window if isinstance(window, tuple) else (window, window)
    longest = max(workload.arrays[name].shape[1] for name in ("query", "key"))
    return None if window is None else tuple(longest if side is None else side for side in sides)


def _jax_nn(implementation: str) -> Callable:
    def made(workload: Workload) -> Callable:
        if implementation == "cudnn":
            _gpu("cuDNN")
        causal, window, scale = _causal(workload, "top-left"), _window(workload), workload.options.get("softmax_scale")
        return lambda x: jax.nn.dot_product_attention(
            x["query"], x["key"], x["value"], is_causal=causal, local_window_size=window,
            scale=x.get("softmax_scale", scale), implementation=implementation,
        )  # fmt: skip

    return made


def _tokamax(workload: Workload) -> Callable:
    _installed("tokamax")
    from tokamax import dot_product_attention

    causal = _causal(workload, "top-left")
    return lambda x: dot_product_attention(x["query"], x["key"], x["value"], is_causal=causal, implementation=None)


def _torch_sdpa(workload: Workload) -> Callable:
    _installed("torch")
    import torch.nn.functional as F

    causal = _causal(workload, "top-left")
    grouped = {"enable_gqa": True} if workload.arrays["query"].shape[2] != workload.arrays["key"].shape[2] else {}

    def attend(x: dict[str, Any]) -> Any:
        q, k, v = (x[name].transpose(1, 2) for name in ("query", "key", "value"))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, **grouped).transpose(1, 2)

    return attend


def _flash_attention_4(workload: Workload) -> Callable:
    _gpu("FlashAttention-4")
    _installed("flash_attn")
    _installed("flash_attn.cute")
    from flash_attn.cute import flash_attn_func

    causal = _causal(workload, "bottom-right")

    def attend(x: dict[str, Any]) -> Any:
        out = flash_attn_func(x["query"], x["key"], x["value"], causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return attend


def _gathered(workload: Workload) -> Callable:
    return workload.reference


def _masked(workload: Workload) -> Callable:
    size, causal = workload.options.get("block_size", 64), _causal(workload, "top-left")
    if not isinstance(size, int) or workload.arrays["sparsity_mask"].ndim != 2:
        raise Absent("is compared only with square blocks and one mask for all heads")

    def attend(x: dict[str, Any]) -> Any:
        mask = jnp.repeat(jnp.repeat(x["sparsity_mask"], size, 0), size, 1)
        mask = mask[None, None, : x["query"].shape[1], : x["key"].shape[1]]
        return jax.nn.dot_product_attention(x["query"], x["key"], x["value"], mask=mask, is_causal=causal)

    return attend


def _torch_recurrent(workload: Workload) -> Callable:
    _installed("torch")
    import torch

    if set(workload.arrays["weights"]) != {"weight_ih", "weight_hh"}:
        raise Absent("is compared only without biases, in one direction")
    cell = workload.options.get("cell_type", "lstm")
    width, hidden = workload.arrays["inputs"].shape[-1], workload.arrays["weights"]["weight_hh"].shape[-1]
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}[cell]
    module = kind(width, hidden, batch_first=True, bias=False)

    def run(x: dict[str, Any]) -> Any:
        weights = {f"{name}_l0": value for name, value in x["weights"].items()}
        out, state = torch.func.functional_call(module, weights, (x["inputs"],))
        return out, tuple(s[0] for s in state) if cell == "lstm" else state[0]

    return run


def _torch_moe(workload: Workload) -> Callable:
    _installed("torch")
    return lambda x: moe.torch_layer(**x, **workload.options)


def _moe_ragged_dot(workload: Workload) -> Callable:
    return lambda x: moe.moe_layer(**x, **workload.options, product=jax.lax.ragged_dot)


def _ragged_dot(workload: Workload) -> Callable:
    if "group_sizes" not in workload.arrays:
        raise Absent("is compared only with group_sizes")
    return lambda x: jax.lax.ragged_dot(x["a"], x["b"], x["group_sizes"])


def _masked_mean(workload: Workload) -> Callable:
    if "mask" not in workload.arrays:
        return lambda x: jnp.mean(x["inputs"], axis=1)
    return lambda x: jnp.mean(x["inputs"], axis=1, where=x["mask"][..., None] != 0)


_PEERS: dict[str, dict[str, tuple[Callable[[Workload], Callable], str]]] = {
    "flash_attention": {
        "jax.nn": (_jax_nn("xla"), "jax"),
        "jax.nn cuDNN": (_jax_nn("cudnn"), "jax"),
        "tokamax": (_tokamax, "jax"),
        "torch SDPA": (_torch_sdpa, "torch"),
        "FlashAttention-4": (_flash_attention_4, "torch"),
    },
    "page_attention": {"gathered pages": (_gathered, "jax")},
    "blocksparse_attention": {"jax.nn, masked": (_masked, "jax")},
    "recurrent": {"torch": (_torch_recurrent, "torch")},
    "mean_pooling": {"jnp.mean": (_masked_mean, "jax")},
    "grouped_matmul": {"jax.lax.ragged_dot": (_ragged_dot, "jax")},
    **{name: {"jax.lax.ragged_dot": (_moe_ragged_dot, "jax"), "torch": (_torch_moe, "torch")} for name in LAYERS},
}

# The arguments that the peers of an operation are called with; a call that has others is not compared.
_KNOWN: dict[str, set[str]] = {
    "flash_attention": {"query", "key", "value", "causal"},
    "page_attention": {"query", "key_cache", "value_cache", "context_lens", "block_tables"},
    "blocksparse_attention": {"query", "key", "value", "sparsity_mask", "block_size", "causal"},
    "recurrent": {"inputs", "weights", "cell_type"},
    "mean_pooling": {"inputs", "mask"},
    "grouped_matmul": {"a", "b", "group_sizes"},
    **{name: {"tokens", "router", "gate_up", "down", "chosen"} for name in LAYERS},
}
# And what a peer of that name knows beside them.
_MORE: dict[str, set[str]] = {name: {"sliding_window", "softmax_scale"} for name in ("jax.nn", "jax.nn cuDNN")}
