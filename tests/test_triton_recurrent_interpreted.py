"""Triton's recurrent layers in Triton's interpreter: the kernels that a GPU gets, on a CPU.

The property tests run small layers of every feature. Here are what they do not reach: sizes past a tile, several tiles of the
batch in one program and in several, weights in parts, in pieces and loaded in every step.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tries
from examples_recurrent import GATES, make, reference
from hypothesis import given
from hypothesis import strategies as st
from lanes import some
from tolerances import assert_close

from ejkernel import BwdParams, FwdParams, Platform, explain, overlay, recurrent
from ejkernel.kernels._triton import call
from ejkernel.kernels._triton import recurrent as kernel
from ejkernel.ops.recurrent import RecurrentSpec

if not call.interpreting():
    pytest.skip("runs where TRITON_INTERPRET=1 is set before Triton is imported", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

pytestmark = pytest.mark.interpreted

# Effective sizes are these and more: a program is alone here, so it has all units of a layer.
SMALL = {"blocksize_m": 16, "blocksize_n": 16, "blocksize_k": 32, "num_warps": 4, "num_stages": 2}


def check(cell, dtype="float32", params=SMALL, **call):
    """Values and all gradients for random cotangents, against the loop over steps in float64."""
    sizes = {
        name: call.pop(name)
        for name in ("batch", "steps", "features", "size", "biases", "hidden", "lengths")
        if name in call
    }
    both = call.get("bidirectional", False)
    made = make(cell, both=both, **sizes)(np.random.default_rng(0))
    arrays = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else jnp.asarray(x, dtype), made)
    floats = {name: arrays[name] for name in ("inputs", "hidden", "weights") if name in arrays}
    rest = {name: arrays[name] for name in arrays if name not in floats} | {"cell_type": cell} | call
    rng = np.random.default_rng(1)

    def both_ways(run, floats, cotangents=None):
        out, pull = jax.vjp(run, floats)
        if cotangents is None:
            cotangents = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), out)
        return out, pull(cotangents)[0], cotangents

    with overlay(recurrent=(FwdParams(**params), BwdParams(**params))):
        out, grads, cotangents = both_ways(lambda f: recurrent(**f, **rest, platform="triton"), floats)
    with jax.enable_x64(True):
        wide, cotangents = (
            jax.tree.map(lambda x: jnp.asarray(np.asarray(x), "float64"), tree) for tree in (floats, cotangents)
        )
        exact = jax.jit(lambda f, c: both_ways(lambda f: reference(**f, **rest), f, c)[:2])(wide, cotangents)
    compare(out, exact[0], dtype, gradient=False)
    compare(grads, exact[1], dtype, gradient=True)


def compare(found, exact, dtype, *, gradient):
    assert jax.tree.structure(found) == jax.tree.structure(exact)
    paths = jax.tree_util.tree_leaves_with_path(found)
    for (path, x), expected in zip(paths, jax.tree.leaves(exact), strict=True):
        assert_close(x, expected, dtype, gradient=gradient, what=jax.tree_util.keystr(path))


@st.composite
def drawn_calls(draw):
    cell = draw(st.sampled_from(["lstm", "gru", "rnn"]))
    batch, steps = draw(st.sampled_from([1, 5, 17, 33])), draw(st.integers(1, 6))
    made = {
        "cell": cell,
        "batch": batch,
        "steps": steps,
        "features": draw(st.integers(1, 5)),
        "size": draw(st.sampled_from([1, 16, 31, 128, 130])),
        "biases": draw(st.sampled_from([True, False, "hh"])),
        "hidden": draw(st.booleans()),
        "lengths": draw(st.none() | st.lists(st.integers(0, steps), min_size=batch, max_size=batch)),
        "dtype": draw(st.sampled_from(["float32", "float16"])),
        "params": {
            "blocksize_m": draw(st.sampled_from([16, 32])),
            "blocksize_n": draw(st.sampled_from([16, 256])),
            "blocksize_k": draw(st.sampled_from([16, 64])),
            "num_warps": draw(st.sampled_from([4, 8])),
            "num_stages": draw(st.integers(1, 4)),
        },
    }
    direction = draw(st.sampled_from([{}, {"bidirectional": True}, {"reverse": True}]))
    activation = {"activation": draw(st.sampled_from(["tanh", "relu"]))} if cell == "rnn" else {}
    return made | direction | activation


@given(drawn_calls())
@tries(16, short=2)
def test_drawn_calls(drawn):
    check(**drawn)


@pytest.mark.parametrize("cell", some(["lstm", "gru", "rnn"], "lstm"))
@pytest.mark.parametrize("dtype", some(["float16", "float32"], "float16"))
def test_several_tiles_of_the_batch_in_one_program(cell, dtype):
    check(cell, dtype, batch=35, steps=3, size=20, hidden=True, lengths=[3, 0, 2, 1, 3] * 7)


@pytest.mark.parametrize("programs", [2, 3])
def test_tiles_of_the_batch_in_several_programs(monkeypatch, programs):
    """None of them waits for another where each has all units of a layer."""
    monkeypatch.setattr(kernel, "resident_programs", lambda _: programs)
    launched = []
    original = kernel.call

    def recorded(*args, **known):
        launched.append((known["programs"], known["constants"].barrier))
        return original(*args, **known)

    monkeypatch.setattr(kernel, "call", recorded)
    check("gru", batch=83, steps=2, size=9, lengths=[2, 1, 0] * 27 + [2, 2], params=SMALL | {"blocksize_n": 128})
    assert set(launched) == {(programs, "none")}


def hold(monkeypatch, where):
    """Have weights lie in registers, in parts of which each is a warp's, or as a whole in shared memory, or be loaded in every step."""
    if where == "whole":
        original = kernel._problem
        monkeypatch.setattr(kernel, "_problem", lambda *args: replace(original(*args), warpgroups=True, room=2**24))
    monkeypatch.setattr(kernel, "MOST_REGISTERS", 2**20 if where == "parts" else 0)


@pytest.mark.parametrize("cell", some(["lstm", "gru", "rnn"], "lstm"))
@pytest.mark.parametrize("where", ["parts", "whole", "streamed"])
def test_weights_wherever_they_lie(monkeypatch, where, cell):
    hold(monkeypatch, where)
    plan = planned(cell, "float16", 4, 100)
    assert (plan.resident, plan.parts) == {"parts": (True, 4), "whole": (True, 1), "streamed": (False, 1)}[where]
    check(cell, "float16", batch=4, steps=3, size=100, hidden=True, lengths=[3, 1, 0, 2])


@pytest.mark.parametrize("cell", some(["lstm", "gru", "rnn"], "gru"))
def test_layers_past_a_tile_of_units(monkeypatch, cell):
    """The last units of the padded size are nobody's; products have more pieces than are on their way."""
    hold(monkeypatch, "parts")
    plan = planned(cell, "float16", 5, 150, blocksize_k=16)
    assert plan.hidden == 256
    assert plan.chunks > plan.stages
    check(cell, "float16", SMALL | {"blocksize_k": 16}, batch=5, steps=2, size=150, hidden=True)


def planned(cell, dtype, batch, size, **changed):
    """The plan of a forward."""
    shapes = {
        "inputs": jax.ShapeDtypeStruct((batch, 3, 3), dtype),
        "weights": {"weight_hh": jax.ShapeDtypeStruct((1, GATES[cell] * size, size), dtype)},
    }
    spec = RecurrentSpec(cell, "tanh", (False,))
    params = kernel.effective(shapes, spec, FwdParams(**SMALL | changed), None)
    return kernel._problem(shapes, spec, None, "forward").plan(params)


def test_garbage_past_the_end_of_sequences():
    arrays = make("lstm", batch=3, steps=4, size=6, hidden=True, lengths=[4, 0, 2])(np.random.default_rng(0))
    lengths = arrays.pop("lengths")
    arrays = jax.tree.map(lambda x: jnp.asarray(x, "float32"), arrays)
    padding = np.arange(4) >= np.asarray(lengths)[:, None]
    poisoned = {**arrays, "inputs": jnp.where(padding[..., None], jnp.nan, arrays["inputs"])}

    def both(floats, garbage):
        out, pull = jax.vjp(lambda f: recurrent(**f, lengths=lengths, platform="triton"), floats)
        cotangent = jnp.where(padding[..., None], garbage, jnp.ones_like(out[0]))
        return out, pull((cotangent, jax.tree.map(jnp.ones_like, out[1])))[0]

    for x, y in zip(jax.tree.leaves(both(poisoned, jnp.nan)), jax.tree.leaves(both(arrays, 0.0)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_only_a_pin_makes_it_run():
    arrays = jax.tree.map(lambda x: jnp.asarray(x, "float32"), make("rnn")(np.random.default_rng(0)))
    assert explain(recurrent, **arrays, cell_type="rnn").chosen.platform is Platform.XLA
    assert explain(recurrent, **arrays, cell_type="rnn", platform="triton").chosen.platform is Platform.TRITON
