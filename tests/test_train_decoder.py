"""examples/train_decoder.py: the attentions, a ring and several devices agree, and packed documents do not see each other."""

import functools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import packed_text
import pytest
import train_decoder as example
from lanes import some
from small_decoder import Model
from test_mosaic import compiled, needs_plugin

from ejkernel import InvalidInputError, target
from ejkernel.callib.chips import CHIPS

slow = pytest.mark.slow
TINY = example.Recipe(Model(40, 16, 4, 4, 2, 4, 24), 8, 4, 96, 4, 1e-2, "docstrings", 40)


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    return [rng.integers(1, 40, size).tolist() for size in rng.integers(packed_text.SHORTEST, 40, 30)]


@pytest.fixture
def batch(documents):
    return next(packed_text.batches_of(documents, TINY.rows, TINY.length))


@pytest.fixture(scope="module")
def weights():
    return example.initial_weights(TINY.model, jax.random.key(0))


def loss_and_gradients(weights, batch, attention="ejkernel", devices=1, ring=1, of=jax.value_and_grad):
    mesh = example.mesh_of(jax.devices()[:devices], ring)

    @jax.jit
    def run(weights, batch):
        return of(example.loss_of)(weights, TINY, batch, example.attention_of(attention, batch, mesh))

    return run(weights, example.spread(batch, mesh))


def assert_close(actual, expected):
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def expected(documents, weights):
    """By jax.nn's attention, on one device."""
    batch = next(packed_text.batches_of(documents, TINY.rows, TINY.length))
    loss, grads = loss_and_gradients(weights, batch, "jax.nn")
    assert all(jnp.abs(grad).max() > 1e-5 for grad in jax.tree.leaves(grads))
    return loss, grads


@pytest.mark.parametrize(
    ("devices", "ring"),
    [(1, 1), (4, 1), *(pytest.param(*sizes, marks=slow) for sizes in [(2, 2), (4, 4), (4, 2)])],
    ids=["one device", "four devices", "ring of 2", "ring of 4", "two rings of 2"],
)
def test_loss_and_gradients_are_those_of_jax_nn(weights, batch, expected, devices, ring):
    assert_close(loss_and_gradients(weights, batch, devices=devices, ring=ring), expected)


@pytest.mark.parametrize("ring", some([2, 4], 2))
def test_a_ring_has_the_same_loss(weights, batch, expected, ring):
    assert_close(loss_and_gradients(weights, batch, devices=ring, ring=ring, of=lambda f: f), expected[0])


@slow
def test_training_is_the_same_with_jax_nn_and_over_devices(documents):
    def losses(attention, devices):
        mesh = example.mesh_of(jax.devices()[:devices], 1)
        return example.trained(TINY, attention, documents, mesh)[1]["losses"]

    alone = losses("ejkernel", 1)
    assert alone[-1] < alone[0]
    np.testing.assert_allclose(losses("jax.nn", 1), alone, rtol=1e-4)
    np.testing.assert_allclose(losses("ejkernel", 4), alone, rtol=1e-4)


@pytest.mark.parametrize("attention", some(["ejkernel", "jax.nn"], "ejkernel"))
def test_a_document_does_not_see_the_others(weights, batch, attention):
    @jax.jit
    def logits(tokens):
        attend = example.attention_of(attention, batch, example.mesh_of(jax.devices()[:1], 1))
        return example.forward(TINY, weights, {**batch, "tokens": tokens}, attend)

    row = batch["document"][0]
    assert row.max() > 2
    inside = np.zeros((TINY.rows, TINY.length), bool)
    inside[0] = row == 2
    before, after = (np.asarray(logits(jnp.where(inside, tokens, batch["tokens"]))) for tokens in (batch["tokens"], 7))
    np.testing.assert_array_equal(after[~inside], before[~inside])
    assert (np.abs(after - before)[inside].max(-1) > 0).all()


def test_operations_are_counted(batch):
    """Against every pair of tokens, one by one."""
    pairs = 0
    for document in batch["document"]:
        for i, j in zip(*np.tril_indices(TINY.length), strict=True):
            pairs += (document[i] == document[j]) * (1 + (i - j <= TINY.window))
    model, tokens = TINY.model, TINY.rows * TINY.length
    layer = 16 * 16 * 2 + 16 * 8 * 2 + 16 * 24 * 3
    matrices = 40 * 16 + model.layers * layer
    assert (
        example.flops_of(TINY, batch["offsets"]) == 6 * matrices * tokens + 3 * 4 * 4 * 4 * (model.layers // 2) * pairs
    )


def test_rows_are_cut_from_the_documents(documents):
    batches = packed_text.batches_of(documents, 2, 32, seed=3)
    rows = [next(batches) for _ in range(8)]
    stream = np.concatenate([batch["tokens"].ravel() for batch in rows])
    targets = np.concatenate([batch["targets"].ravel() for batch in rows])
    np.testing.assert_array_equal(targets[:-1], stream[1:])
    assert stream[0] == packed_text.START
    pieces = np.split(stream, np.flatnonzero(stream == packed_text.START)[1:])
    assert {tuple(piece[1:].tolist()) for piece in pieces[:-1]} <= set(map(tuple, documents))
    for batch in rows:
        for tokens, document, offsets in zip(batch["tokens"], batch["document"], batch["offsets"], strict=True):
            begins = offsets[offsets < 32]
            assert begins[0] == 0
            assert set(np.flatnonzero(tokens == packed_text.START)) <= set(begins.tolist())
            assert (np.diff(document, prepend=0)[begins] == 1).all()
            assert document[-1] == len(begins)


def test_the_tokenizer_gives_text_back():
    texts = ["the other theatre, then the aaaaaaa and aaaa", "  naïve\n\n    x = [1, 22]\t…", "the the the"]
    tokenizer = packed_text.Tokenizer(texts, 280)
    assert len(tokenizer.pieces) == 280
    assert b" the" in tokenizer.pieces
    assert b"aaaa" in tokenizer.pieces
    assert not any(b" " in piece.strip() for piece in tokenizer.pieces)
    for text in [*texts, "words that the texts lack: 7 ∑"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(texts[0])) < len(texts[0]) / 2
    small = packed_text.Tokenizer(["ab ab"], 300)  # runs out of pairs
    assert small.pieces[256:] == [b"ab", b" ab"]


def abstract_step(recipe, devices):
    """The shapes of a step's arguments."""
    mesh = example.mesh_of(devices, 1)
    state = jax.eval_shape(functools.partial(example.initial_state, recipe))
    row = jax.ShapeDtypeStruct((recipe.rows, recipe.length), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "positions", "document"), row)
    batch["offsets"] = jax.ShapeDtypeStruct((recipe.rows, recipe.length // packed_text.SHORTEST + 3), jnp.int32)
    return example.step_of(recipe, "ejkernel", mesh), state, batch


@pytest.mark.compiled
@slow
def test_the_large_model_lowers_for_an_h200():
    """With the Mosaic kernels in both directions, of windowed and of full layers."""
    step, state, batch = abstract_step(example.RECIPES["350m"], jax.devices()[:1])
    with target("nvidia-h200"):
        lowered = step.trace(state, batch).lower(lowering_platforms=("cuda",))
    assert lowered.out_info[1].shape == ()
    assert lowered.as_text().count("custom_call @mosaic_gpu") >= 4


COMPILED = """
import sys
import jax
from jax.experimental import topologies
sys.path[:0] = {folders!r}
from test_mosaic import HOPPER
from test_train_decoder import abstract_step, example
import ejkernel
topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=HOPPER, topology="1x1x2")
step, state, batch = abstract_step(example.RECIPES["350m"], topology.devices[:1])
with ejkernel.target("nvidia-h200"):
    compiled = step.lower(state, batch).compile()
memory = compiled.memory_analysis()
print("BYTES", memory.temp_size_in_bytes + memory.argument_size_in_bytes)
"""


@needs_plugin
@pytest.mark.compiled
@slow
def test_the_large_model_compiles_for_hopper_and_fits_an_h200(tmp_path):
    folders = [str(Path(module.__file__).parent) for module in (sys.modules[__name__], example)]
    printed = compiled(COMPILED.format(folders=folders), tmp_path)
    assert int(re.search(r"BYTES (\d+)", printed)[1]) < CHIPS["nvidia-h200"].memory_bytes * 0.75  # what JAX takes of it


def test_the_large_model_is_as_large_as_it_says():
    weights = jax.eval_shape(functools.partial(example.initial_state, example.RECIPES["350m"]))[0]
    assert 355e6 < sum(w.size for w in jax.tree.leaves(weights)) < 365e6


@slow
def test_the_command(monkeypatch, tmp_path):
    """What it writes, with a library that fails after another has been measured."""

    def missing(*arrays, **options):
        assert "ejkernel" in json.loads((tmp_path / "train_decoder.json").read_text())["runs"]
        raise ImportError("not here")

    monkeypatch.setattr(example, "tokamax", missing)
    small = replace(TINY, model=replace(TINY.model, vocabulary=300), tokens=300)
    monkeypatch.setitem(example.RECIPES, "small", small)
    monkeypatch.setattr(packed_text, "docstrings", lambda: packed_text.sources()[:3])
    monkeypatch.setattr(example, "PROMPTS", ("Return ", "The "))
    arguments = ["train_decoder.py", "--attention", "ejkernel", "tokamax", "--steps", "3", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="4 rows do not divide over 8 devices"):
        example.main()
    monkeypatch.setitem(example.RECIPES, "small", replace(small, rows=8))
    assert example.main() == 1
    result = json.loads((tmp_path / "train_decoder.json").read_text())
    assert len(result["runs"]["ejkernel"]["losses"]) == 3
    assert result["runs"]["ejkernel"]["model_flops_utilisation"] is None  # no data sheet of this CPU
    assert result["failed"] == {"tokamax": "ImportError: not here"}
    for prompt, text in zip(example.PROMPTS, result["runs"]["ejkernel"]["samples"], strict=True):
        assert text.startswith(prompt)
    assert (tmp_path / "train_decoder.png").stat().st_size > 5000
    with pytest.raises(SystemExit, match="do not divide"):
        example.mesh_of(jax.devices()[:3], 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "2"], "argument --steps: '2' is not a whole number of at least 3"),
        (["--ring", "0"], "argument --ring: '0' is not a whole number of at least 1"),
        (["--ring", "2", "--attention", "jax.nn"], "--ring is ejkernel's alone: leave out --attention"),
        (["--out", "file/figures"], "--out is 'file/figures/train_decoder.json': no file can be written there"),
    ],
)
def test_a_command_that_cannot_be_is_one_line_before_any_work(monkeypatch, tmp_path, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(packed_text, "docstrings", lambda: 1 / 0)
    monkeypatch.setitem(example.RECIPES, "small", replace(TINY, rows=8))
    monkeypatch.setattr(sys, "argv", ["train_decoder.py", *arguments])
    with pytest.raises((SystemExit, InvalidInputError)) as stopped:
        example.main()
    assert said in f"{stopped.value}{capsys.readouterr().err}"


@slow
def test_speed_is_drawn_where_the_peak_is_known():
    run = {"losses": [3.0, 2.0, 1.5, 1.2], "tokens_per_second": 1e5}
    sizes = []
    for share in (None, 0.4):
        runs = {name: {**run, "model_flops_utilisation": share} for name in ("ejkernel", "jax.nn", "tokamax")}
        text = example.picture(example.drawn(runs, TINY), "svg").decode()
        sizes.append((text.count('id="axes_'), "40% of peak" in text))
    assert sizes == [(1, False), (2, True)]
