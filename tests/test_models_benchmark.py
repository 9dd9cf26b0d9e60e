"""The benchmark of models' calls: each has a GPU kernel, its reference is right, and what it writes can be shown."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from ejkernel import Platform, explain

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_every_call_has_a_gpu_kernel_in_both_directions(load):
    child, calls = load("attention_child"), load("models_calls").CALLS
    assert len(calls) >= 24
    for name, (_, case) in calls.items():
        work = child.JaxJob({"implementation": "ejkernel", "case": case})
        floats, rest = work.abstract("forward")
        given = {**floats, **rest, **work.options}
        found = explain("flash_attention", **given, device="nvidia-h200", gradients=list(floats))
        assert Platform.XLA not in (found.chosen.platform, found.backward.chosen.platform), name


def test_packed_documents_fill_their_tokens(load):
    documents = load("models_calls").documents
    for tokens, count in ((8192, 20), (65536, 100), (24, 20)):
        lengths = documents(tokens, count)
        assert (sum(lengths), len(lengths)) == (tokens, count)
        assert min(lengths) > 0


def test_the_reference_in_blocks_is_the_reference(load, monkeypatch):
    """All features at once, in blocks of some rows, beside plain numpy."""
    float64, child = load("attention_float64"), load("attention_child")
    monkeypatch.setattr(float64, "MOST_LOGITS", 2 * 2 * 24 * 7)  # at most 7 rows: 6
    case = load("attention_gpu").case(
        2, 24, 2, 8, kv_heads=1, sinks=True, bias="trained", documents=[10, 0, 9, 5],
        options={"logits_soft_cap": 2.0, "sliding_window": [5, 0]},
    )  # fmt: skip
    random, integers = np.random.default_rng(0), child.integers_of(case)
    floats = {name: random.normal(size=shape) for name, shape in child.floats_of(case).items()}
    dout = random.normal(size=floats["query"].shape)
    import jax

    with jax.enable_x64(True):
        found = float64.in_blocks(case, child.floats_of(case))(floats, integers, dout)
    errors = float64.relative_errors(float64.reference(case, floats, integers, dout), found)
    assert set(errors) == {"out", *(f"d{name}" for name in floats)}
    assert max(errors.values()) < 1e-12


def _row(name, **milliseconds):
    times = {who: {"forward_ms": f, "both_ms": b} for who, (f, b) in milliseconds.items()}
    return {"name": name, "model": name, "shape": "1 × 8", "implementations": times}


def test_the_table_names_the_best_peer_of_each_direction(load):
    tables = load("models_tables")
    calls = [_row("a-1", ejkernel=(1, 4), tokamax=(2, 3), cudnn=(3, 5)), _row("b", ejkernel=(1, 1)), _row("a-2", ejkernel=(1, 1))]  # fmt: skip
    text = tables.markdown({"device": "H", "date": "D", "versions": {"jax": "0"}, "calls": calls})
    assert "| a-1 | 1 × 8 | 1.000 | 2.000 tokamax | 2.00 | 4.000 | 3.000 tokamax | 0.75 |" in text
    assert "forward: at least as fast as the best peer in 1 of 1 calls" in text
    assert "forward + backward: at least as fast as the best peer in 0 of 1 calls" in text
    assert text.index("| a-2 |") < text.index("| b |")


@pytest.mark.parametrize(("error", "forward", "both"), [(0.003, "fast", "fast"), (0.5, "fast", "slow"), (np.nan, "fast", "slow")])  # fmt: skip
def test_a_peer_with_wrong_gradients_is_no_peer(load, error, forward, both):
    tables, row = load("models_tables"), _row("a", ejkernel=(1, 1), fast=(1, 2), slow=(2, 3))
    row["implementations"]["fast"]["error"] = {"out": 0.002, "dkey": error}
    assert [tables.best_peer(row, direction)[0] for direction in tables.DIRECTIONS] == [forward, both]


@pytest.mark.slow
def test_a_run_on_this_machine(load, monkeypatch, tmp_path):
    """Small calls on the CPU: errors are those of bfloat16, a peer that fails is noted, and a run can be continued."""
    calls, case = load("models_calls"), load("attention_gpu").case
    tiny = {
        "packed": ("a", case(1, 48, 4, 24, kv_heads=2, value_dim=16, sinks=True, documents=calls.documents(48, 5))),
        "padded": ("b", case(3, 20, 4, 16, causal=False, kv_length=33, padded=calls.padded(3, 33))),
    }
    gpu = load("models_gpu")
    monkeypatch.setattr(gpu, "CALLS", tiny)
    out = tmp_path / "models.json"

    def run(*arguments):
        monkeypatch.setattr(
            sys, "argv", ["models_gpu.py", "--out", str(out), "--rounds", "1", "--threads", "1", *arguments]
        )
        gpu.main()
        return {row["name"]: row for row in json.loads(out.read_text())["calls"]}

    assert set(run("--only", "packed")) == {"packed"}
    before = out.read_text()
    assert set(run("--missing", "--budget", "0")) == {"packed"}
    assert out.read_text() == before
    rows = run("--missing")
    assert list(rows) == list(tiny)
    for row in rows.values():
        ours = row["implementations"]["ejkernel"]
        assert ours["repeats"]
        assert max(ours["error"].values()) < 0.01
        assert row["ran"]["backward"]["platform"] == "xla"
    assert rows["packed"]["implementations"]["jax.nn cudnn"] == {"note": "no sinks, no packed sequences"}
    assert "Error" in rows["padded"]["implementations"]["jax.nn cudnn"]["note"]

    pytest.importorskip("matplotlib")
    for row in rows.values():  # there was no peer to draw
        row["implementations"]["peer"] = {"forward_ms": 1.0, "both_ms": 2.0}
    load("plot_models").draw({**json.loads(out.read_text()), "calls": list(rows.values())}, tmp_path / "models.png")
    assert (tmp_path / "models.png").stat().st_size > 10000
