"""What is predicted of the TPU kernels: committed tables are those of the committed figures, and rank until something is measured."""

import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from ejkernel import FwdParams, explain, kernel_registry
from ejkernel.contracts.device import describe
from ejkernel.ops.config import chain

ROOT = Path(__file__).parents[1]
CHIP = "tpu-v6e"


def attention(length, q_len=None, heads=8):
    q, kv = ((1, n, h, 128) for n, h in ((q_len or length, 4 * heads), (length, heads)))
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (q, kv, kv)]


def grouped(groups=64):
    shapes = (32768, 2048), (groups, 2048, 1536)
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    return a, b, jax.ShapeDtypeStruct((groups,), jnp.int32)


def decoding(page=32):
    pages = 4096 // page
    cache = jax.ShapeDtypeStruct((64 * pages, 8, page, 128), jnp.bfloat16)
    lens, tables = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((64,), (64, pages)))
    return jax.ShapeDtypeStruct((64, 32, 128), jnp.bfloat16), cache, cache, lens, tables


def test_shipped_tables_are_the_committed_figures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module("tpu_tables")
    made = tables.shipped(json.loads(tables.RESULTS.read_text()))
    committed = {path.parent.name: {} for path in tables.TUNED.glob("tpu-*/*.json")}
    for path in tables.TUNED.glob("tpu-*/*.json"):
        committed[path.parent.name][path.stem] = json.loads(path.read_text())
    assert committed == made, "run benchmarks/tpu_tables.py"


def test_explain_names_the_kernels_and_says_that_times_are_predicted():
    for operation, arrays, options, kernel in (
        ("flash_attention", attention(8192), {"causal": True}, "flash-tpu"),
        ("page_attention", decoding(), {}, "page-tpu"),
        ("grouped_matmul", grouped(), {}, "grouped-matmul-tpu"),
    ):
        explanation = explain(operation, *arrays, **options, device=CHIP)
        assert explanation.chosen.implementation.name == kernel
        assert "shipped (predicted): " in str(explanation)


def test_a_prediction_says_nothing_of_a_call_far_from_it():
    """One token: keys would be read for each query head, so XLA's kernel runs."""
    explanation = explain("flash_attention", *attention(8192, q_len=1), causal=True, device=CHIP)
    assert explanation.chosen.platform.value == "xla"
    assert explain("flash_attention", *attention(1 << 16), causal=True, device=CHIP).chosen.source == "heuristic"


def test_a_measurement_takes_its_place():
    arrays, device = attention(8192), describe(CHIP)
    call = explain("flash_attention", *arrays, causal=True, device=CHIP).call
    xla = next(e for e in kernel_registry.list_implementations("flash_attention") if e.platform.value == "xla")
    chain.remember(call, device, xla, "forward", chain.Record(FwdParams(), 1.0, "autotune"))
    explanation = explain("flash_attention", *arrays, causal=True, device=CHIP)
    assert explanation.chosen.platform.value == "xla"
    assert "predicted" not in str(explanation)
