"""What else computes the same: each peer as a function of a workload's arrays, or the reason why it is not here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.contracts.device import describe
from ejkernel.lab.extras import need
from ejkernel.lab.workloads import Workload


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
    return made(workload), framework


def as_torch(arrays: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A workload's arrays as tensors, on torch's GPU if it has one."""
    torch = need("torch", "a comparison with torch")
    place = "cuda" if torch.cuda.is_available() else "cpu"

    def one(x: Any) -> Any:
        tensor = torch.from_numpy(x).to(place)
        return tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor

    return jax.tree.map(one, arrays)


def _installed(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise Absent(f"{module} is not installed")


def _gpu(wanted: str) -> None:
    if describe().kind != "gpu":
        raise Absent(f"{wanted} needs a GPU")


def _jax_nn(implementation: str) -> Callable:
    def made(workload: Workload) -> Callable:
        if implementation == "cudnn":
            _gpu("cuDNN")
        return lambda x: jax.nn.dot_product_attention(
            x["query"], x["key"], x["value"], is_causal=workload.options["causal"], implementation=implementation
        )

    return made


def _tokamax(workload: Workload) -> Callable:
    _installed("tokamax")
    from tokamax import dot_product_attention

    return lambda x: dot_product_attention(
        x["query"], x["key"], x["value"], is_causal=workload.options["causal"], implementation=None
    )


def _torch_sdpa(workload: Workload) -> Callable:
    _installed("torch")
    import torch.nn.functional as F

    def attend(x: dict[str, Any]) -> Any:
        q, k, v = (x[name].transpose(1, 2) for name in ("query", "key", "value"))
        return F.scaled_dot_product_attention(q, k, v, is_causal=workload.options["causal"]).transpose(1, 2)

    return attend


def _flash_attention_4(workload: Workload) -> Callable:
    _gpu("FlashAttention-4")
    _installed("flash_attn")
    _installed("flash_attn.cute")
    from flash_attn.cute import flash_attn_func

    def attend(x: dict[str, Any]) -> Any:
        out = flash_attn_func(x["query"], x["key"], x["value"], causal=workload.options["causal"])
        return out[0] if isinstance(out, tuple) else out

    return attend


def _gathered(workload: Workload) -> Callable:
    return workload.reference


def _masked(workload: Workload) -> Callable:
    size, causal = workload.options["block_size"], workload.options["causal"]

    def attend(x: dict[str, Any]) -> Any:
        mask = jnp.repeat(jnp.repeat(x["sparsity_mask"], size, 0), size, 1)
        mask = mask[None, None, : x["query"].shape[1], : x["key"].shape[1]]
        return jax.nn.dot_product_attention(x["query"], x["key"], x["value"], mask=mask, is_causal=causal)

    return attend


def _torch_recurrent(workload: Workload) -> Callable:
    _installed("torch")
    import torch

    cell = workload.options["cell_type"]
    width, hidden = workload.arrays["inputs"].shape[-1], workload.arrays["weights"]["weight_hh"].shape[-1]
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}[cell]
    module = kind(width, hidden, batch_first=True, bias=False)

    def run(x: dict[str, Any]) -> Any:
        weights = {f"{name}_l0": value for name, value in x["weights"].items()}
        out, state = torch.func.functional_call(module, weights, (x["inputs"],))
        return out, tuple(s[0] for s in state) if cell == "lstm" else state[0]

    return run


def _ragged_dot(workload: Workload) -> Callable:
    return lambda x: jax.lax.ragged_dot(x["a"], x["b"], x["group_sizes"])


def _masked_mean(workload: Workload) -> Callable:
    return lambda x: jnp.mean(x["inputs"], axis=1, where=x["mask"][..., None])


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
}
