"""``explain`` says what will run: both directions, with the parameters that the kernel will use."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from conftest import bound

import ejkernel
from ejkernel import (
    Backend,
    BwdParams,
    FwdParams,
    InvalidInputError,
    Platform,
    Support,
    explain,
    flash_attention,
    grouped_matmul,
    kernel_registry,
    mean_pooling,
    overlay,
    page_attention,
)
from ejkernel.contracts.device import describe
from ejkernel.contracts.params import params_class
from ejkernel.ops.core import select

HALF = jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)


def verdicts(explanation):
    return {(c.platform.value, c.backend.value): (c.verdict, "; ".join(c.reasons)) for c in explanation.candidates}


def test_without_gradients_there_is_no_backward():
    explanation = explain(flash_attention, HALF, HALF, HALF, device="nvidia-h200")
    assert explanation.backward is None
    assert "gradients" not in str(explanation)


def test_both_directions_are_decided():
    explanation = explain(flash_attention, HALF, HALF, HALF, causal=True, device="nvidia-h200", gradients=True)
    backward = explanation.backward
    assert explanation.chosen.platform is backward.chosen.platform is Platform.PALLAS
    assert isinstance(explanation.chosen.params, FwdParams)
    assert isinstance(backward.chosen.params, BwdParams)
    assert backward.gradients == {"query", "key", "value"}
    assert verdicts(explanation)["cudnn", "gpu"][0] == "slower"
    verdict, reasons = verdicts(backward)["cudnn", "gpu"]
    assert verdict == "refused"
    assert "differ from run to run" in reasons
    text = str(explanation)
    assert text.startswith("flash_attention(query bf16[1,4096,16,128]")
    assert text.count("chosen") == 2
    assert "gradients of key, query, value" in text


def test_another_platform_may_take_the_backward():
    """A forward without the head dims of its backward, say: here one that has no gradient for a key."""
    name = "forward_only_queries"

    class Forward:
        version = 1

        def forward(self, arrays, spec, params): ...

        def backward(self, arrays, spec, params, *rest): ...

    Forward.name = name
    support = Support.everything()
    narrow = Support(devices=support.devices, dtypes=support.dtypes, features=support.features, gradients={"query"})
    kernel = kernel_registry.register("flash_attention", Platform.CUDA, Backend.ANY, support=narrow, priority=90)(
        Forward
    )
    try:
        x = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)
        explanation = explain(flash_attention, x, x, x, device="cpu", gradients=True)
        assert explanation.chosen.platform is Platform.CUDA
        assert explanation.backward.chosen.platform is Platform.XLA
        assert verdicts(explanation.backward)["cuda", "any"] == (
            "refused",
            "no gradient for key; no gradient for value",
        )
        alone = explain(flash_attention, x, x, x, device="cpu", gradients=("query",))
        assert alone.backward.chosen.platform is Platform.CUDA
    finally:
        kernel_registry.unregister(kernel)


def test_a_plain_function_is_differentiated_as_a_whole():
    @kernel_registry.register("mean_pooling", Platform.CUDA, Backend.ANY, support=Support.everything(), priority=90)
    def plain(inputs, **options): ...

    try:
        x = jax.ShapeDtypeStruct((2, 8, 4), jnp.float32)
        explanation = explain(mean_pooling, x, gradients=True, device="cpu")
        assert explanation.backward.chosen.implementation.kernel is plain
        assert verdicts(explanation.backward)["cuda", "any"] == ("chosen", "differentiated by JAX as a whole")
        assert verdicts(explanation.backward)["xla", "any"][0] == "refused"
    finally:
        kernel_registry.unregister(plain)


def test_names_of_gradients_are_checked():
    with pytest.raises(InvalidInputError, match=r"gradients is \('bias',\).*key, query, value"):
        explain(flash_attention, HALF, HALF, HALF, gradients=("bias",))
    with pytest.raises(InvalidInputError, match="attention_mask"):
        explain(flash_attention, HALF, HALF, HALF, gradients="attention_mask")
    cache = jax.ShapeDtypeStruct((4, 2, 16, 32), jnp.int8)
    query, lens = jax.ShapeDtypeStruct((2, 4, 32), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.int32)
    tables = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    explanation = explain(page_attention, query, cache, cache, lens, tables, device="cpu", gradients=True)
    assert explanation.backward.gradients == {"query"}


def test_parameters_are_shown_as_the_kernel_will_use_them():
    x = jax.ShapeDtypeStruct((1, 100, 2, 16), jnp.float32)
    asked = {"fwd_params": FwdParams(q_blocksize=10_000, num_warps=4), "bwd_params": BwdParams(kv_blocksize=10_000)}
    explanation = explain(flash_attention, x, x, x, **asked, device="cpu", gradients=True)
    assert explanation.chosen.params.to_dict().items() >= {"q_blocksize": 100}.items()
    assert explanation.chosen.params.num_warps is None
    assert explanation.backward.chosen.params.kv_blocksize == 100
    assert explanation.chosen.source == explanation.backward.chosen.source == "argument"
    hopper = explain(flash_attention, HALF, HALF, HALF, **asked, device="nvidia-h200", gradients=True)
    assert hopper.chosen.params.to_dict() == {"q_blocksize": 64, "kv_blocksize": 128, "num_warps": 4, "num_stages": 2}
    assert hopper.backward.chosen.params.kv_blocksize == 128


def test_a_parameter_that_nobody_reads_is_refused():
    x = jnp.ones((1, 8, 2, 16))
    with pytest.raises(
        InvalidInputError, match=r"fwd_params sets blocksize_k=64, which no implementation of flash_attent"
    ):
        flash_attention(x, x, x, fwd_params=FwdParams(blocksize_k=64))
    with pytest.raises(InvalidInputError, match=r"bwd_params sets blocksize_k=32.*expected one of .*kv_blocksize"):
        explain(flash_attention, x, x, x, bwd_params=BwdParams(blocksize_k=32))
    with pytest.raises(InvalidInputError, match=r"overlay\(mean_pooling=FwdParams\(…\)\) sets kv_blocksize=64"):
        with overlay(mean_pooling=FwdParams(kv_blocksize=64)):
            pass
    # One that another implementation reads is no error: it is left out of what this one uses.
    assert flash_attention(x, x, x, fwd_params=FwdParams(num_stages=3), platform="xla").shape == x.shape


@pytest.mark.parametrize("path", sorted(Path(ejkernel.__file__).parent.glob("tuned/*/*.json")), ids=lambda p: p.stem)
def test_every_shipped_row_resolves(path):
    """To a kernel of that name and version, to parameters that it uses as they are, and to a bucket of that operation."""
    device = describe(path.parent.name)
    kernels = {(e.name, e.version): e for e in kernel_registry.list_implementations(path.stem)}
    calls = {}
    for row in json.loads(path.read_text())["entries"]:
        entry = kernels[row["implementation"], row["version"]]
        params = params_class(row["direction"])(**row["params"])
        features, size = set(row["call"]["features"].split()), row["call"]
        key = json.dumps(size, sort_keys=True)
        if key not in calls:
            calls[key] = MAKERS[path.stem](size, features)
        call = calls[key]
        assert dict(call.bucket).keys() == size.keys()
        assert {name: value for name, value in call.bucket if name not in ("window",)} == {
            name: value for name, value in size.items() if name not in ("window",)
        }
        # Predicted rows leave the sizes to the kernel, which has them from the same counts.
        assert not row["params"] or entry.effective(call.shapes, call.spec, params, device, row["direction"]) == params
        assert row["seconds"] > 0


def recurrent_call(size, features):
    """A call of recurrent that falls into a bucket."""
    gates = {"lstm": 4, "gru": 3}[next(iter(features))] * size["hidden_size"]
    weights = {"weight_ih": (gates, size["input_size"]), "weight_hh": (gates, size["hidden_size"])}
    inputs = jax.ShapeDtypeStruct((size["batch"], size["seq_len"], size["input_size"]), size["dtype"])
    weights = {name: jax.ShapeDtypeStruct(shape, size["dtype"]) for name, shape in weights.items()}
    return explain("recurrent", inputs, None, weights, *features).call


def pooling_call(size, features):
    """A call of mean_pooling that falls into a bucket."""
    count, shape = size["sequences"], (size["seq_len"], size["features_len"])
    if features == {"varlen"}:
        offsets = jax.ShapeDtypeStruct((count + 1,), jnp.int32)
        return explain(mean_pooling, jax.ShapeDtypeStruct(shape, size["dtype"]), cu_seqlens=offsets).call
    inputs, mask = jax.ShapeDtypeStruct((count, *shape), size["dtype"]), jax.ShapeDtypeStruct((count, shape[0]), bool)
    return explain(mean_pooling, inputs, mask).call


def grouped_call(size, features):
    """A ragged call of grouped_matmul that falls into a bucket."""
    a = jax.ShapeDtypeStruct((size["m_len"], size["k"]), size["dtype"])
    b = jax.ShapeDtypeStruct((size["groups_len"], size["k"], size["n"]), size["dtype"])
    return explain(grouped_matmul, a, b, jax.ShapeDtypeStruct((size["groups_len"],), jnp.int32)).call


def page_call(size, features):
    """A call of page_attention that falls into a bucket, of one key head."""
    batch, shape = size["heads"], jax.ShapeDtypeStruct
    pages = size["kv_len"] // size["block_size"]
    caches = [
        shape((pages, 1, size["block_size"], size[name]), size["cache_dtype"]) for name in ("head_dim", "value_dim")
    ]
    query = shape((batch * size["q_len"], size["group"], size["head_dim"]), size["dtype"])
    options = {
        "varlen": {"cum_seqlens_q": shape((batch + 1,), jnp.int32)},
        "sinks": {"softmax_aux": shape((size["group"], 1), jnp.float32)},
        "scales": {"k_scale": shape((), jnp.float32)},
    }
    given = {name: value for feature in features for name, value in options.get(feature, {}).items()}
    tables = shape((batch, pages), jnp.int32)
    return explain(page_attention, query, *caches, shape((batch,), jnp.int32), tables, **given).call


def flash_call(size, features):
    """A call of flash_attention that falls into a bucket."""
    kv_heads, dtype = size["heads"], size["dtype"]
    q = jax.ShapeDtypeStruct((1, size["q_len"], kv_heads * size["group"], size["head_dim"]), dtype)
    k, v = (jax.ShapeDtypeStruct((1, size["kv_len"], kv_heads, size[n]), dtype) for n in ("head_dim", "value_dim"))
    ids = [jax.ShapeDtypeStruct((1, x.shape[1]), jnp.int32) for x in (q, k)]
    offsets = jax.ShapeDtypeStruct((5,), jnp.int32)
    bias = jax.ShapeDtypeStruct((1, q.shape[2], q.shape[1], k.shape[1]), dtype)
    options = {
        "causal": {"causal": True},
        "window": {"sliding_window": window_of(size["window"])},
        "soft_cap": {"logits_soft_cap": 30.0},
        "bias": {"bias": bias},
        "mask": {"attention_mask": jax.ShapeDtypeStruct(bias.shape, bool)},
        "segments": {"q_segment_ids": ids[0], "kv_segment_ids": ids[1]},
        "varlen": {"cum_seqlens_q": offsets, "cum_seqlens_k": offsets},
        "sinks": {"softmax_aux": jax.ShapeDtypeStruct((1, 2), jnp.float32)},
        "dropout": {"dropout_prob": 0.1, "dropout_seed": 0},
    }
    given = {}
    for feature in features:
        given |= options.get(feature, {})
    if "sinks" in features:
        given["softmax_aux"] = jax.ShapeDtypeStruct((q.shape[2], 2), jnp.float32)
    return bound(q, k, v, **given)[0]


MAKERS = {
    "flash_attention": flash_call,
    "page_attention": page_call,
    "grouped_matmul": grouped_call,
    "recurrent": recurrent_call,
    "mean_pooling": pooling_call,
}


def window_of(words):
    return tuple(int(side) - 1 if side else None for side in words.split(":"))


@pytest.mark.parametrize("differentiated", [False, True])
def test_a_call_is_selected_once_a_direction_and_prepared_once(monkeypatch, differentiated):
    operation = kernel_registry.operation("flash_attention")
    decided, prepared = [], []
    decide, prepare = select.decide, type(operation).prepare
    monkeypatch.setattr(select, "decide", lambda *a, **k: decided.append(a[4:5]) or decide(*a, **k))
    monkeypatch.setattr(type(operation), "prepare", lambda *a: prepared.append(1) or prepare(*a))
    x = jnp.ones((1, 27 + differentiated, 2, 8))

    def loss(x):
        return flash_attention(x, x, x, causal=True).sum()

    jax.jit(jax.grad(loss) if differentiated else loss)(x)
    assert decided == ([("forward",), ("backward",)] if differentiated else [("forward",)])
    assert len(prepared) == 1
