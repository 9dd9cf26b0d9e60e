"""Calls of a user's own in `ejkernel bench` and `ejkernel tune`: how they are read, what they are given, what is said of them."""

import json
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("yaml")

from test_lab_cli import run as run  # the fixture

from ejkernel import kernel_registry
from ejkernel.contracts.registry import Choice
from ejkernel.lab import calls, peers, reference, speed, variants, workloads
from ejkernel.utils.bursts import BurstTimes

CALL = ["flash_attention", "query=f32[1,24,4,8]", "key=f32[1,32,2,8]", "causal=True", "sliding_window=[7, 0]"]


@pytest.fixture
def instant(monkeypatch):
    """Times without timing: 2 ms, for a variant of the blocks of 16 queries 1 ms; every implementation is called once."""

    def time_bursts(runners, **options):
        for call in runners.values():
            call()
        return {name: BurstTimes((0.001 if ": " in name and "=16" in name else 0.002,) * 6, 1) for name in runners}

    monkeypatch.setattr(speed, "time_bursts", time_bursts)


def test_words_become_operations_and_calls():
    named, (first, second) = calls.from_words(
        ["recurrent", *CALL, "mean_pooling", "inputs=bf16[2,8,4]", "mask=bool[2,8]"]
    )
    assert named == ["recurrent"]
    flash = first.workload
    assert {n: (x.shape, str(x.dtype)) for n, x in flash.arrays.items()} == {
        "query": ((1, 24, 4, 8), "float32"),
        "key": ((1, 32, 2, 8), "float32"),
        "value": ((1, 32, 2, 8), "float32"),  # the key's, where it is not given
    }
    assert flash.options == {"causal": True, "sliding_window": (7, 0)}
    assert flash.differentiable == ("query", "key", "value")
    assert flash.name.startswith("flash_attention(query f32[1,24,4,8], key f32[1,32,2,8], ")
    assert shlex.split(first.again) == CALL
    assert str(second.workload.arrays["inputs"].dtype) == "bfloat16"
    assert second.workload.cast("float32")["inputs"].dtype == "bfloat16"  # as given, whatever is timed here otherwise


def test_a_file_says_the_same(tmp_path):
    path = tmp_path / "calls.yaml"
    path.write_text("""
- operation: flash_attention
  name: a layer
  query: f32[1,24,4,8]
  causal: true
  sliding_window: [7, 0]
- {operation: grouped_matmul, <<: {a: "f32[12,4]"}, b: "f32[2,4,8]", group_sizes: [5, 7]}
- operation: recurrent
  inputs: f32[2,5,4]
  weights: {weight_ih: "f32[9,4]", weight_hh: "f32[9,3]"}
  cell_type: gru
""")
    first, second, third = calls.from_file(str(path))
    assert first.workload.name == "a layer"
    assert first.workload.options == {"causal": True, "sliding_window": (7, 0)}
    assert second.workload.arrays["group_sizes"].tolist() == [5, 7]
    assert third.workload.arrays["weights"]["weight_hh"].shape == (9, 3)
    assert third.workload.differentiable == ("inputs", "weights")
    assert shlex.split(first.again) == ["--file", str(path)]
    as_json = tmp_path / "calls.json"
    as_json.write_text(json.dumps([{"operation": "mean_pooling", "inputs": "f32[2,8,4]"}]))
    assert calls.from_file(str(as_json))[0].workload.arrays["inputs"].shape == (2, 8, 4)


@pytest.mark.parametrize("operation", workloads.OPERATIONS)
def test_the_examples_of_the_errors_are_calls(operation, monkeypatch):
    monkeypatch.setattr(
        calls, "_with_values", lambda abstract: jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), dict(abstract))
    )
    _, (call,) = calls.from_words([operation, *calls.EXAMPLES[operation].split()])
    assert call.workload.explained().chosen is not None
    assert calls.unchecked(call.workload) in ("", "the reference in float64 would be too large")


def test_the_page_shows_calls_that_can_be_read(tmp_path, monkeypatch):
    text = (Path(__file__).parents[1] / "docs" / "lab.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "calls.yaml").write_text(block)
    monkeypatch.setattr(
        calls, "_with_values", lambda abstract: jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), dict(abstract))
    )
    first, second = calls.from_file(str(tmp_path / "calls.yaml"))
    assert (first.workload.name, second.workload.operation) == ("a layer with a window", "recurrent")
    for line in re.findall(r"^ejkernel bench (\w+ .*)$", text, re.MULTILINE):
        assert calls.from_words(shlex.split(line))[1]


def test_values_are_plausible():
    """Offsets fill the tokens, tables name pages that are there, sizes add up."""
    page = "query=f32[24,4,8] key_cache=i8[40,2,4,8] context_lens=i32[3] block_tables=i32[3,9] cum_seqlens_q=i32[4] k_scale=0.1"
    _, (paged,) = calls.from_words(["page_attention", *page.split()])
    arrays = paged.workload.arrays
    assert arrays["cum_seqlens_q"].tolist() == [0, 8, 16, 24]
    assert len(set(arrays["block_tables"].ravel())) == 27
    assert arrays["block_tables"].max() < 40
    assert 18 <= arrays["context_lens"].min()
    assert arrays["context_lens"].max() <= 36
    assert np.abs(arrays["key_cache"]).max() <= 127
    assert len(np.unique(arrays["value_cache"])) > 100
    assert paged.workload.differentiable == ("query",)
    _, (ragged,) = calls.from_words("grouped_matmul a=f32[50,4] b=f32[3,4,8] group_sizes=i32[3]".split())
    assert ragged.workload.arrays["group_sizes"].sum() == 50
    segments = "query=f32[1,16,2,8] q_segment_ids=i32[1,16] kv_segment_ids=i32[1,16]"
    _, (attention,) = calls.from_words(["flash_attention", *segments.split()])
    assert set(attention.workload.arrays["q_segment_ids"].ravel()) == {1, 2, 3, 4}


def test_every_argument_that_counts_has_values():
    """An integer or a boolean argument of any operation; all else is normal numbers."""
    for operation in workloads.OPERATIONS:
        known = kernel_registry.operation(operation)
        for name in set(known.arrays) - set(known.inside):
            annotation = str(known.signature.parameters[name].annotation)
            if any(kind in annotation for kind in ("Integer[", "Bool[", "Shaped[")):
                assert name in calls._VALUES, (operation, name)


def written(tmp_path, text):
    path = tmp_path / "calls.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return ["-f", str(path)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("flush query=f32[2]", "operation is 'flush'; expected one of flash_attention, "),
        ("query=f32[2]", "'query=f32[2]' stands before any operation"),
        ("flash_attention quer=f32[2]", "flash_attention: there is no 'quer'; expected an argument of flash_attention: query, "),
        ("flash_attention query=f32[2", "flash_attention: query is 'f32[2'; expected a dtype and a shape, such as bf16[2,1024,8,64]"),
        ("flash_attention query=[2,8,4,16]", "flash_attention: query is [2, 8, 4, 16], all of them integers; expected a shape behind a dtype, bf16[2,8,4,16], or floats."),
        ("flash_attention query=f33[2,8,4,16]", "query's dtype is 'f33'; expected a dtype"),
        ("flash_attention query=f32[2,x]", "query's shape is '2,x'; expected sizes"),
        ("flash_attention query=f32[1,8,4,8] query=f32[1,8,4,8]", "flash_attention: query is given twice."),
        ("flash_attention causal=True", "flash_attention: query, key, value: missing; expected a call such as: ejkernel bench"),
        ("flash_attention query=f32[1,8,4,8] key=f32[1,8,3,8]", "flash_attention: query is float32[1, 8, 4, 8]; expected a number of heads"),
        ("flash_attention query=f32[1,8,4,8] sliding_window=-3", "flash_attention: sliding_window is -3"),
        ("flash_attention query=f32[1,8,4,8] fwd_params=3", "fwd_params cannot be given here: parameters are what is looked for"),
        ("flash_attention query=f32[2,8]", "flash_attention: query is float32[2, 8]; expected"),
        ("page_attention query=f32[2,4,8] key_cache=f32[9,2,4,8] context_lens=i32[2] block_tables=i32[4]",
         "page_attention: block_tables is int32[4]; expected"),
        ("recurrent inputs=f32[2,5,4] weights=3", "recurrent: weights"),
        ("flash_attention query=f64[1,8,4,8]", "query is float64; 64 bits need JAX_ENABLE_X64=1."),
        ("flash_attention query=f32[1,8,4,8] platform=cudnn", "platform='cudnn' cannot run this call"),
        ("flash_attention query=f32[1,8,4,8] --length 8", "--length is of operations that are only named"),
        ("grouped_matmul a=f32[8,4] b=f32[2,4,4] group_sizes=[5,9]", "grouped_matmul: group_sizes"),
        ("recurrent inputs=f32[2,5,4]", "recurrent: weights: missing"),
        ("ring_attention query=f32[1,8,2,8] axis_name=x", "axis_name cannot be given here: the ring is all devices"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_is_one_clear_error(run, given, words):
    code, out, err = run("bench", *shlex.split(given))
    assert (code, out) == (2, "")
    assert err.startswith("ejkernel: ")
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "calls.yaml holds nothing; expected a list of calls"),
        ("operation: mean_pooling", "calls.yaml holds dict"),
        ("- mean_pooling", "calls.yaml, entry 1 is str 'mean_pooling'; expected an operation and its arguments by name."),
        ("- {inputs: 3}", "calls.yaml, entry 1 has no operation; expected one of flash_attention, "),
        ("- operation: flush", "calls.yaml, entry 1: operation is 'flush'; expected one of"),
        ("- operation: mean_pooling\n  inputs: f32[2,4,8]\n- operation: mean_pooling\n  inputs: f32[2,4]\n  msk: 1",
         "calls.yaml, entry 2 (mean_pooling): there is no 'msk'; expected an argument of mean_pooling: inputs, mask, "),
        ("- operation: mean_pooling\n  inputs: f32[2,4]", "calls.yaml, entry 1 (mean_pooling): inputs is float32[2, 4]; expected"),
        ("- operation: mean_pooling\n  inputs: f32[2,4,8]\n  inputs: f32[2,4,9]", "calls.yaml, line 3: inputs is given twice; expected"),
        ("- {operation: mean_pooling, inputs: f32[2,4,8]}", 'shapes need quotes: {query: "bf16[2,8192,32,128]"}.'),
        ("- operation: mean_pooling\n\tinputs: f32[2,4,8]", "calls.yaml, line 2: no YAML (found character '\\t' that cannot start any token).\n"),
        ("- operation: [mean_pooling]", "calls.yaml, entry 1: operation is ['mean_pooling']; expected one of"),
        ("- operation: mean_pooling\n  inputs: [2, 4, 8]", "inputs is [2, 4, 8], all of them integers; expected a shape behind a dtype, bf16[2,4,8], or floats."),
        ("- operation: mean_pooling\n  inputs: f32[2,4,8]\n  3: 4", "calls.yaml, entry 1: 3 is no name; expected arguments by name"),
        ("- operation: mean_pooling\n  inputs: f32[2,4,8]\n  name: [x]", "calls.yaml, entry 1: name is ['x']; expected a text"),
        ("- operation: mean_pooling\n  inputs: [1\n", "calls.yaml, line 3: no YAML"),
        ("- operation: mean_pooling\n  inputs: !!python/object/apply:os.getcwd []", "calls.yaml, line 2: could not determine a constructor"),
        (b"\xff\xfe\xff", "it cannot be read (it is no text)"),
        (None, "none.yaml': it cannot be read (No such file or directory)."),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_is_one_clear_error(run, tmp_path, text, words):
    given = ["-f", str(tmp_path / "none.yaml")] if text is None else written(tmp_path, text)
    code, out, err = run("bench", *given)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.usefixtures("instant")
def test_bench_warns_where_something_is_faster(run, monkeypatch):
    """A set of parameters, and a platform."""
    from ejkernel.contracts.params import FwdParams

    proposed = [FwdParams(blocksize_m=n) for n in (16, 32, 256)]
    monkeypatch.setattr(
        variants, "proposals", lambda call, device, entry, direction: proposed if direction == "forward" else []
    )
    code, out, _ = run("bench", "mean_pooling", "inputs=f32[2,40,8]", "--json")
    assert code == 0
    result = json.loads(out)
    rows = {row["implementation"]: row for row in result["timings"] if row["what"] == speed.FORWARD}
    assert list(rows) == ["ejkernel", "jnp.mean", *(f"ejkernel xla: blocksize_m={n}" for n in (16, 32, 256))]
    faster = rows["ejkernel"]["faster"]
    assert (faster["params"], faster["ratio"], faster["ms"]) == (
        {"blocksize_m": 16},
        pytest.approx(2),
        pytest.approx(1),
    )
    assert rows["ejkernel"]["error"] < 1e-6
    (line,) = result["advice"]
    assert line.startswith("mean_pooling(inputs f32[2,40,8]), forward: xla (heuristic, blocksize_m=")
    assert line.endswith("was chosen and takes 2 ms; xla: blocksize_m=16 takes 1 ms, 2.00 × as fast. To measure here and keep "
                         "the fastest: ejkernel tune mean_pooling 'inputs=f32[2,40,8]'")  # fmt: skip
    code, out, _ = run("bench", "mean_pooling", "inputs=f32[2,40,8]", "--no-peers", "--forward")
    assert line in out
    assert "blocksize_m=16" in out.partition("Faster: ")[0]  # the fastest set has a row
    assert "blocksize_m=32" not in out
    assert "--length 64" in run("bench", "mean_pooling", "--length", "64", "--search", "--forward")[1]
    # Nothing is searched where it is not wanted.
    for words in (("inputs=f32[2,40,8]", "--no-search"), ("--length", "64")):
        result = json.loads(run("bench", "mean_pooling", *words, "--forward", "--json")[1])
        assert [row["implementation"] for row in result["timings"]] == ["ejkernel", "jnp.mean"]
        assert result["advice"] == []


def test_the_best_of_many_is_timed_again(monkeypatch):
    """Beside ours alone: luck does not last."""
    rounds = []

    def time_bursts(runners, **options):
        rounds.append([*runners])
        lucky = len(rounds) == 1
        return {name: BurstTimes((0.001 if lucky and name != "ejkernel" else 0.002,) * 6, 1) for name in runners}

    monkeypatch.setattr(speed, "time_bursts", time_bursts)
    _, given = calls.from_words(["mean_pooling", "inputs=f32[2,80,8]"])
    (job,) = speed.own_plan(given, with_peers=False, backward=False)
    rows = speed.bench(job)
    assert len(rounds[0]) > 1
    assert rounds[1] == ["ejkernel", rounds[0][1]]
    assert rows[0]["faster"] is None
    assert variants.advice(rows[0]) == ""


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize("what", [speed.FORWARD, pytest.param(speed.BOTH, marks=pytest.mark.slow)])
def test_variants_run_with_their_parameters(monkeypatch, what):
    """Traced with them, forward and backward; where they are called later, nothing is traced again."""
    seen = {"forward": set(), "backward": set()}

    def spy(direction):
        run = getattr(Choice, direction)

        def spied(self, *args):
            seen[direction].add(self.params.q_blocksize)
            return run(self, *args)

        monkeypatch.setattr(Choice, direction, spied)

    for direction in seen:
        spy(direction)
    _, given = calls.from_words(["flash_attention", "query=f32[1,520,1,8]"])
    for job in [job for job in speed.own_plan(given, with_peers=False) if job.what == what]:
        decision = variants.decided(job.workload(), "float32", job.what == speed.BOTH)
        wanted = {v.params.q_blocksize for v in variants.variants(decision)}
        assert len(wanted) > 1
        rows = speed.bench(job)
        assert [row["reason"] for row in rows] == [""] * len(rows)
        assert wanted <= seen["backward" if job.what == speed.BOTH else "forward"]


@pytest.mark.usefixtures("instant")
def test_errors_are_those_of_the_call_as_given(monkeypatch):
    _, given = calls.from_words([*CALL, "grouped_matmul", "a=bf16[20,8]", "b=bf16[2,8,4]", "group_sizes=[3,17]"])
    flash, ragged = (
        speed.bench(job)[0] for job in speed.own_plan(given, with_peers=False, backward=False, search=False)
    )
    assert flash["error"] < 1e-6
    assert (ragged["dtype"], ragged["chosen"]["forward"]["platform"]) == ("bfloat16", "xla")
    assert 1e-4 < ragged["error"] < 1e-2
    _, (ring,) = calls.from_words(["ring_attention", "query=f32[1,16,2,8]"])  # causal by itself
    assert speed.bench(speed.own_plan([ring], with_peers=False, backward=False)[0])[0]["error"] < 1e-6
    _, (masked,) = calls.from_words(["flash_attention", "query=f32[1,8,2,8]", "attention_mask=bool[1,8]"])
    (row,) = speed.bench(speed.own_plan([masked], with_peers=False, backward=False, search=False)[0])
    assert (row["error"], row["unchecked"]) == (None, "the reference in float64 has no attention_mask")


def test_a_peer_runs_only_the_very_call():
    """Or another one would be compared."""
    _, given = calls.from_words(
        [*CALL, "flash_attention", "query=f32[1,8,2,8]", "key=f32[1,9,2,8]", "causal=True", "mean_pooling", "inputs=f32[6,4]", "cu_seqlens=i32[3]"]
    )  # fmt: skip
    windowed, longer, packed = (call.workload for call in given)
    with pytest.raises(peers.Absent, match="is compared only without sliding_window"):
        peers.function("torch SDPA", windowed)
    with pytest.raises(peers.Absent, match="aligns causality and windows top-left"):
        peers.function("jax.nn", windowed)
    with pytest.raises(peers.Absent, match="top-left"):
        peers.function("jax.nn", longer)
    with pytest.raises(peers.Absent, match="is compared only without cu_seqlens"):
        peers.function("jnp.mean", packed)
    _, (grouped,) = calls.from_words(["flash_attention", "query=f32[1,8,4,8]", "key=f32[1,8,2,8]", "causal=True"])
    arrays = grouped.workload.cast("float32")
    out = peers.function("jax.nn", grouped.workload)[0](arrays)
    np.testing.assert_allclose(out, reference.attention(**arrays, causal=True), atol=1e-5)
    for window, scale in {"[2, 0]": "0.5", "[None, 3]": "f32[]", "1": "None"}.items():
        call = ["flash_attention", "query=f32[1,8,2,8]", f"sliding_window={window}", f"softmax_scale={scale}"]
        _, (windowed,) = calls.from_words(call)
        arrays = windowed.workload.cast("float32")
        expected = reference.attention(**{**arrays, **windowed.workload.options})
        np.testing.assert_allclose(peers.function("jax.nn", windowed.workload)[0](arrays), expected, atol=1e-5)


@pytest.mark.torch
def test_torch_takes_grouped_heads_in_bfloat16():
    pytest.importorskip("torch")
    _, (call,) = calls.from_words(["flash_attention", "query=bf16[1,8,4,8]", "key=bf16[1,8,2,8]", "causal=True"])
    (row,) = speed.bench(
        speed.own_plan([call], backward=False, search=False)[0]._replace(implementations=("torch SDPA",)), seconds=0.01
    )
    assert row["reason"] == ""
    assert row["error"] < 1e-2


def test_tune_takes_calls_too(run, own_store, tmp_path):
    code, out, _ = run("tune", "mean_pooling", "inputs=f32[2,40,8]", "--forward", "--json")
    assert code == 0
    (row,) = json.loads(out)["tuned"]
    assert (row["name"], row["direction"], row["platform"]) == ("mean_pooling(inputs f32[2,40,8])", "forward", "xla")
    assert len(list((own_store / "tuned").glob("mean_pooling-*.json"))) == 1
    code, out, _ = run(
        "tune", *written(tmp_path, "- {operation: mean_pooling, name: mine, inputs: 'f32[2,40,8]'}"), "--forward"
    )
    assert code == 0
    assert "mine" in out


def test_the_reference_knows_scales_and_open_windows():
    rng = np.random.default_rng(0)
    x = {name: rng.standard_normal((1, 6, 2, 4)) for name in ("query", "key", "value")}
    whole = reference.attention(**x, causal=True)
    np.testing.assert_allclose(reference.attention(**x, sliding_window=(None, 0)), whole, atol=1e-6)
    np.testing.assert_allclose(
        reference.attention(**x, sliding_window=2), reference.attention(**x, sliding_window=(2, 2)), atol=1e-6
    )
    np.testing.assert_allclose(reference.attention(**x, softmax_scale=4**-0.5), reference.attention(**x), atol=1e-6)
    mask = np.array([[True, False, True], [False, True, True]])
    blocks = reference.blocksparse_attention(**x, sparsity_mask=mask, block_size=(3, 2))
    seen = np.repeat(np.repeat(mask, 3, 0), 2, 1)
    np.testing.assert_allclose(blocks, reference.attention(**x, seen=seen), atol=1e-6)
    assert jax.tree.leaves(blocks)[0].shape == (1, 6, 2, 4)
