"""What is particular to recurrent; the properties of every operation are in the files of each."""

import functools
import importlib.util
import itertools
import warnings

import examples_recurrent
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples_recurrent import GATES, make, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from test_jit import count_traces

import ejkernel
from ejkernel import InvalidInputError, UnsupportedError, recurrent
from ejkernel.kernels._xla import recurrent as kernel

slow = pytest.mark.slow
CELLS = list(GATES)
BOTH = [False, True]


def cells(*short):
    """Parameters: every cell, these in the short lane too."""
    return pytest.mark.parametrize("cell", [pytest.param(cell, marks=() if cell in short else slow) for cell in CELLS])


def arguments(cell, seed=0, dtype="float32", **sizes):
    made = make(cell, **sizes)(np.random.default_rng(seed))
    return jax.tree.map(lambda x: jnp.asarray(x, dtype if jnp.issubdtype(x.dtype, jnp.floating) else None), made)


def states(final):
    return final if isinstance(final, tuple) else (final,)


def with_gradients(run, floats, seed=5):
    """The result and the gradients for random cotangents, in one program."""
    rng = np.random.default_rng(seed)
    cotangents = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), jax.eval_shape(run, floats))

    @jax.jit
    def both(floats, cotangents):
        out, pull = jax.vjp(run, floats)
        return out, pull(cotangents)[0]

    return both(floats, cotangents)


def assert_same(actual, expected, bound=1e-6):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=bound, atol=bound)


WITH_TORCH = [("lstm", True, [9, 1, 6]), ("gru", True, [9, 1, 6]), ("rnn_relu", False, None)]


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize(
    ("cell", "both", "lengths"),
    [
        pytest.param(
            *call,
            id=f"{call[0]}-{'both_ways' if call[1] else 'one_way'}-{'lengths' if call[2] else 'whole'}",
            marks=() if call in WITH_TORCH else slow,
        )
        for call in itertools.product([*CELLS, "rnn_relu"], BOTH, [None, [9, 1, 6]])
    ],
)
def test_equal_to_torch(cell, both, lengths):
    import torch

    batch, steps, features, size = 3, 9, 6, 5
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(cell, torch.nn.RNN)
    statics = {"nonlinearity": "relu"} if cell == "rnn_relu" else {}
    torch.manual_seed(0)
    layer = kind(features, size, batch_first=True, bidirectional=both, **statics)
    names = [name.replace("_l0", "") for name, _ in layer.named_parameters()]
    x = torch.randn(batch, steps, features, requires_grad=True)
    start = [torch.randn(1 + both, batch, size, requires_grad=True) for _ in range(2 if cell == "lstm" else 1)]
    packed = x
    if lengths:
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), True, enforce_sorted=False)
    out, final = layer(packed, tuple(start) if cell == "lstm" else start[0])
    if lengths:
        out, _ = torch.nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    results = [out, *states(final)]
    cotangents = [torch.randn_like(r) for r in results]
    grads = torch.autograd.grad(results, [x, *start, *layer.parameters()], cotangents)

    def to_jax(tensor, state=False):
        array = jnp.asarray(tensor.detach().numpy())
        return array[0] if state and not both else array

    def run(inputs, hidden, weights):
        outputs, final = recurrent(
            inputs,
            hidden if cell == "lstm" else hidden[0],
            weights,
            cell.removesuffix("_relu"),
            bidirectional=both,
            lengths=None if lengths is None else jnp.asarray(lengths),
            activation="relu" if cell == "rnn_relu" else "tanh",
        )
        return [outputs, *states(final)]

    weights = {name: to_jax(p) for name, p in zip(names, layer.parameters(), strict=True)}
    given = [to_jax(cotangents[0]), *(to_jax(c, True) for c in cotangents[1:])]

    @jax.jit
    def step(given, *floats):
        out, pull = jax.vjp(run, *floats)
        return out, pull(given)

    actual, (dx, dstart, dweights) = step(given, to_jax(x), tuple(to_jax(s, True) for s in start), weights)
    assert_same(actual, [to_jax(results[0]), *(to_jax(r, True) for r in results[1:])], 1e-5)
    actual_grads = [dx, *dstart, *(dweights[name] for name in names)]
    expected = [
        to_jax(grads[0]),
        *(to_jax(g, True) for g in grads[1 : 1 + len(start)]),
        *map(to_jax, grads[1 + len(start) :]),
    ]
    for a, e in zip(actual_grads, expected, strict=True):
        assert np.abs(a - e).max() <= 1e-5 * max(1, np.abs(e).max())


@slow
@settings(max_examples=12)
@given(st.data())
def test_any_call(data):
    """Values and gradients of a call drawn at random, against float64."""
    cell = data.draw(st.sampled_from(CELLS))
    both = data.draw(st.booleans())
    batch, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    lengths = data.draw(st.none() | st.lists(st.integers(0, steps), min_size=batch, max_size=batch))
    sizes = {
        "features": data.draw(st.integers(1, 4)),
        "size": data.draw(st.integers(1, 4)),
        "biases": data.draw(st.sampled_from([True, False, "hh"])),
        "hidden": data.draw(st.booleans()),
    }
    statics = {"cell_type": cell, "bidirectional": both}
    if not both:
        statics["reverse"] = data.draw(st.booleans())
    if cell == "rnn":
        statics["activation"] = data.draw(st.sampled_from(["tanh", "relu"]))
    arrays = arguments(cell, batch=batch, steps=steps, both=both, lengths=lengths, **sizes)
    floats = {name: arrays[name] for name in ("inputs", "hidden", "weights") if name in arrays}
    rest = {name: arrays[name] for name in arrays if name not in floats}
    actual = with_gradients(lambda f: recurrent(**f, **rest, **statics), floats)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), "float64"), floats)
        expected = with_gradients(lambda f: reference(**f, **rest, **statics), wide)
    assert_same(actual, jax.tree.map(np.asarray, expected), 2e-5)


@pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=slow)])
@cells("lstm", "gru")
def test_what_padding_holds_does_not_matter(cell, reverse):
    lengths = np.array([5, 0, 2])
    arrays = arguments(cell, batch=3, steps=5, hidden=True, lengths=lengths)
    padding = np.arange(5) >= lengths[:, None]
    poisoned = {**arrays, "inputs": jnp.where(padding[..., None], jnp.nan, arrays["inputs"])}

    def run(floats, lengths):
        return recurrent(**floats, lengths=lengths, cell_type=cell, reverse=reverse)

    def everything(arrays, poison):
        floats = {n: x for n, x in arrays.items() if n != "lengths"}

        @jax.jit
        def both(floats, poison):
            out, pull = jax.vjp(lambda f: run(f, arrays["lengths"]), floats)
            cotangent = jax.tree.map(jnp.ones_like, out)
            cotangent = (jnp.where(padding[..., None], poison, cotangent[0]), cotangent[1])
            return out, pull(cotangent)[0]

        return both(floats, poison)

    expected, actual = everything(arrays, 0.0), everything(poisoned, jnp.nan)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, e)
    (outputs, final), grads = actual
    np.testing.assert_array_equal(np.asarray(outputs)[padding], 0)
    np.testing.assert_array_equal(np.asarray(grads["inputs"])[padding], 0)
    for last, start in zip(states(final), states(arrays["hidden"]), strict=True):
        np.testing.assert_array_equal(last[1], start[1])


@cells("lstm")
def test_a_length_is_a_shorter_sequence(cell):
    arrays = arguments(cell, batch=3, steps=6, hidden=True)
    for reverse in (False, True):
        outputs, final = recurrent(**arrays, cell_type=cell, lengths=jnp.array([4, 4, 4]), reverse=reverse)
        short = {**arrays, "inputs": arrays["inputs"][:, :4]}
        expected, expected_final = recurrent(**short, cell_type=cell, reverse=reverse)
        assert_same((outputs[:, :4], final), (expected, expected_final))
        if not reverse:
            assert_same(states(final)[0], outputs[:, 3])


@cells("gru")
def test_reverse_is_forward_on_flipped_inputs(cell):
    arrays = arguments(cell, steps=6, hidden=True)
    outputs, final = recurrent(**arrays, cell_type=cell, reverse=True)
    flipped = {**arrays, "inputs": arrays["inputs"][:, ::-1]}
    expected, expected_final = recurrent(**flipped, cell_type=cell)
    assert_same((outputs, final), (expected[:, ::-1], expected_final))


@cells("gru")
def test_bidirectional_is_both_directions(cell):
    arrays = arguments(cell, both=True, hidden=True, lengths=[5, 2])
    outputs, final = recurrent(**arrays, cell_type=cell, bidirectional=True)
    for index, suffix in enumerate(("", "_reverse")):
        weights = {n + "": arrays["weights"][n + suffix] for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
        start = jax.tree.map(lambda h: h[index], arrays["hidden"])  # noqa: B023
        own = recurrent(arrays["inputs"], start, weights, cell, lengths=arrays["lengths"], reverse=bool(index))
        part = outputs[..., index * 4 : (index + 1) * 4]
        assert_same((part, jax.tree.map(lambda h: h[index], final)), own)  # noqa: B023


@cells("lstm")
def test_the_final_state_goes_on(cell):
    arrays = arguments(cell, steps=7, hidden=True)
    whole, final = recurrent(**arrays, cell_type=cell)
    first, middle = recurrent(**{**arrays, "inputs": arrays["inputs"][:, :3]}, cell_type=cell)
    second, last = recurrent(**{**arrays, "inputs": arrays["inputs"][:, 3:], "hidden": middle}, cell_type=cell)
    assert_same((jnp.concatenate([first, second], axis=1), last), (whole, final))


@pytest.mark.parametrize("both", [pytest.param(False, marks=slow), True], ids=["one_way", "both_ways"])
def test_no_state_is_zeros(both):
    arrays = arguments("lstm", both=both, hidden=True)
    zeros = jax.tree.map(jnp.zeros_like, arrays["hidden"])
    assert_same(
        recurrent(**{**arrays, "hidden": None}, bidirectional=both),
        recurrent(**{**arrays, "hidden": zeros}, bidirectional=both),
    )


def test_forms_of_arguments():
    """A list is a pair, None is no bias, and numpy arrays are arrays."""
    arrays = arguments("lstm", hidden=True)
    expected = recurrent(**arrays)
    assert_same(recurrent(**{**arrays, "hidden": list(arrays["hidden"])}), expected)
    assert_same(recurrent(**jax.tree.map(np.asarray, arrays)), expected)
    assert_same(recurrent(arrays["inputs"], arrays["hidden"], arrays["weights"], "lstm"), expected)
    plain = {n: w for n, w in arrays["weights"].items() if n.startswith("weight")}
    none = {**plain, "bias_ih": None, "bias_hh": None}
    assert_same(recurrent(arrays["inputs"], weights=none), recurrent(arrays["inputs"], weights=plain))


def test_results_have_the_inputs_dtype_and_the_form_of_hidden():
    for cell in CELLS:
        for dtype in ("float16", "bfloat16", "float32"):
            for both in BOTH:
                arrays = arguments(cell, dtype=dtype, both=both, hidden=True)
                run = functools.partial(recurrent, cell_type=cell, bidirectional=both)
                outputs, final = jax.eval_shape(lambda arrays: run(**arrays), arrays)  # noqa: B023
                assert jax.tree.map(jnp.shape, final) == jax.tree.map(jnp.shape, arrays["hidden"])
                assert {x.dtype for x in jax.tree.leaves((outputs, final))} == {jnp.dtype(dtype)}
                assert outputs.shape == (2, 5, 8 if both else 4)


def test_half_precision_keeps_its_state_in_float32():
    """Steps that are each lost beside 1 in bfloat16 add up."""
    steps, gain = 400, 2.0**-9
    weights = {
        "weight_ih": jnp.zeros((4, 1), jnp.bfloat16),
        "weight_hh": jnp.zeros((4, 1), jnp.bfloat16),
        # The input and forget gates are open, the candidate is the gain.
        "bias_ih": jnp.array([40, 40, gain, 40], jnp.bfloat16),
    }
    start = jnp.ones((1, 1), jnp.bfloat16)
    _, (_, c) = recurrent(jnp.zeros((1, steps, 1), jnp.bfloat16), (start, start), weights)
    np.testing.assert_allclose(np.asarray(c, np.float32), 1 + steps * np.tanh(gain), rtol=2**-7)


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


@slow
def test_an_activation_may_mix_features():
    arrays = arguments("rnn", hidden=True)
    actual = with_gradients(lambda f: recurrent(**f, cell_type="rnn", activation=softmax), arrays)
    expected = with_gradients(lambda f: reference(**f, cell_type="rnn", activation=softmax), arrays)
    assert_same(actual, expected, 1e-5)


@slow
@pytest.mark.parametrize("batched", [("inputs",), ("hidden",), ("weights",), ("lengths",), ("hidden", "weights")])
@pytest.mark.parametrize("both", BOTH, ids=["one_way", "both_ways"])
def test_vmap_over_some_arguments(both, batched):
    made = [arguments("lstm", seed, both=both, hidden=True, lengths=[5 - seed, seed + 1]) for seed in range(3)]
    axes = {name: jax.tree.map(lambda _: 0 if name in batched else None, made[0][name]) for name in made[0]}  # noqa: B023
    stacked = {n: jax.tree.map(lambda *x: jnp.stack(x), *(m[n] for m in made)) if n in batched else made[0][n] for n in made[0]}  # fmt: skip

    def run(arrays):
        floats = {name: arrays[name] for name in ("inputs", "hidden", "weights")}
        return with_gradients(lambda f: recurrent(**f, lengths=arrays["lengths"], bidirectional=both), floats)

    actual = jax.vmap(run, (axes,))(stacked)
    for index, own in enumerate(made):
        expected = run({**made[0], **{name: own[name] for name in batched}})
        assert_same(jax.tree.map(lambda x: x[index], actual), expected, 1e-5)  # noqa: B023


def test_one_trace_for_all_lengths_and_weights(monkeypatch):
    traces = count_traces(monkeypatch)
    for seed in range(3):
        recurrent(**arguments("gru", seed, steps=8, lengths=[seed, 8]), cell_type="gru")
    assert len(traces) == 1


def test_lengths_may_be_traced_and_are_clipped_then():
    arrays = arguments("lstm", steps=5)
    run = jax.jit(lambda lengths: recurrent(**arrays, lengths=lengths))
    assert_same(run(jnp.array([9, 2])), recurrent(**arrays, lengths=jnp.array([5, 2])))
    assert_same(run(jnp.array([-3, 2])), recurrent(**arrays, lengths=jnp.array([0, 2])))
    unsigned = jnp.array([5, 2], jnp.uint8)
    assert_same(recurrent(**arrays, lengths=unsigned), recurrent(**arrays, lengths=jnp.array([5, 2])))


def products(jaxpr, depth=0):
    """How many matrix products there are outside of loops, in loops, and in loops in loops."""
    counts = np.zeros(3, int)
    for eqn in jaxpr.eqns:
        counts[depth] += eqn.primitive.name == "dot_general"
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    counts += products(inner, depth + (eqn.primitive.name in ("while", "scan")))
    return counts.tolist()


@pytest.mark.parametrize(("cell", "a_chunk"), [("lstm", 4), ("rnn", 4), ("gru", 5)])
def test_one_product_a_step(cell, a_chunk):
    """Forward one before the loop. Backward, beside the steps', a few for each chunk of many steps: gates, inputs, weights."""
    arrays = arguments(cell)

    def loss(floats):
        return recurrent(**floats, cell_type=cell)[0].sum()

    assert products(jax.make_jaxpr(lambda f: recurrent(**f, cell_type=cell))(arrays).jaxpr) == [1, 1, 0]
    assert products(jax.make_jaxpr(jax.grad(loss))(arrays).jaxpr) == [1, 1 + a_chunk, 1]


@pytest.mark.parametrize(
    ("rows", "cell"),
    [
        (7, "lstm"),
        *[pytest.param(*rest, marks=slow) for rest in ((7, "gru"), (7, "rnn"), (1, "lstm"), (1, "gru"), (1, "rnn"))],
    ],
)
def test_chunks_of_the_backward(cell, rows, monkeypatch):
    """Of one step, and of four with a shorter one at the end."""
    arrays = arguments(cell, steps=10, both=True, hidden=True, lengths=[10, 5])
    rest = {"cell_type": cell, "bidirectional": True, "lengths": arrays.pop("lengths")}
    expected = with_gradients(lambda f: recurrent(**f, **rest), arrays)
    monkeypatch.setattr(kernel, "ROWS_PER_CHUNK", rows)
    ejkernel.kernel_registry.operation("recurrent")._jitted.clear()
    assert_same(with_gradients(lambda f: recurrent(**f, **rest), arrays), expected, 1e-5)
    ejkernel.kernel_registry.operation("recurrent")._jitted.clear()


@cells("lstm")
def test_the_backward_has_no_gates_of_all_steps(cell):
    """Its temporary memory is that of the inputs' projection, of a few states a step, and of one chunk."""
    batch, steps, size = 8, 2048, 16
    arrays = arguments(cell, batch=batch, steps=steps, features=16, size=size)
    pull = jax.eval_shape(lambda f: jax.vjp(lambda f: recurrent(**f, cell_type=cell), f)[1], arrays)
    cotangents = jax.eval_shape(lambda f: recurrent(**f, cell_type=cell), arrays)
    compiled = jax.jit(lambda pull, cotangents: pull(cotangents)).lower(pull, cotangents).compile()
    one_state = 4 * batch * steps * size
    assert compiled.memory_analysis().temp_size_in_bytes < 3.5 * one_state


@pytest.mark.parametrize("cell", CELLS)
def test_the_backward_keeps_states_and_no_gates(cell):
    batch, steps, features, size = 3, 50, 2, 8
    arrays = arguments(cell, batch=batch, steps=steps, features=features, size=size)
    pull = jax.eval_shape(lambda f: jax.vjp(lambda f: recurrent(**f, cell_type=cell), f)[1], arrays)
    kept = sum(np.prod(x.shape) for x in jax.tree.leaves(pull))
    given = sum(x.size for x in jax.tree.leaves(arrays))
    count = 2 if cell == "lstm" else 1
    assert kept <= given + count * batch * steps * size + 2 * count * batch * size


def test_without_gradients_no_cells_are_kept():
    batch, steps, size = 4, 512, 32
    arrays = arguments("lstm", batch=batch, steps=steps, features=4, size=size)
    compiled = jax.jit(lambda f: recurrent(**f)[0]).lower(arrays).compile()
    projection, states_of_all_steps = 4 * batch * steps * size * 4, batch * steps * size * 4
    assert compiled.memory_analysis().temp_size_in_bytes < projection + states_of_all_steps / 2


@slow  # looks at a program that was optimised, as those of the short lane are not
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_touches_its_own_rows_alone(dtype):
    """No loop converts or copies arrays of all steps: that would be quadratic in the length."""
    steps = 96
    arrays = arguments("lstm", dtype=dtype, steps=steps, size=8)
    text = jax.jit(jax.grad(lambda f: recurrent(**f)[0].sum().astype("float32"))).lower(arrays).compile().as_text()
    bodies = [block for block in text.split("\n\n") if "dynamic-update-slice" in block and "wrapped_add" in block]
    assert len(bodies) >= 2
    for body in bodies:
        for line in body.splitlines():
            whole = f",{steps}," in line.split("(")[0]
            allowed = ("get-tuple-element(", "dynamic-update-slice", "while(", "parameter(", "ROOT %tuple")
            assert not whole or any(word in line for word in allowed), line
            assert "convert" not in line.split("(")[0] or not whole, line


@cells("lstm")
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_nothing_to_do(cell, shape):
    for both in BOTH:
        arrays = arguments(cell, batch=shape[0], steps=shape[1], both=both, hidden=True)
        (outputs, final), grads = with_gradients(lambda f: recurrent(**f, cell_type=cell, bidirectional=both), arrays)  # noqa: B023
        assert outputs.shape == (*shape, 8 if both else 4)
        assert_same(final, arrays["hidden"])
        assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, arrays)
        without = recurrent(arrays["inputs"], None, arrays["weights"], cell, bidirectional=both)[1]
        assert_same(without, jax.tree.map(jnp.zeros_like, arrays["hidden"]))


LSTM = arguments("lstm", hidden=True)
RNN = arguments("rnn", hidden=True)
WEIGHTS = LSTM["weights"]
H, C = LSTM["hidden"]
TWO = arguments("lstm", both=True)["weights"]


class Unhashable:
    __hash__ = None

    def __call__(self, x):
        return x


# argument in fault, arguments, words the message must hold
WRONG = [
    ("inputs", {"inputs": LSTM["inputs"][0]}, ["2 dimensions", "[batch, seq_len, features]"]),
    ("inputs", {"inputs": None}, ["None", "jnp.asarray(inputs)"]),
    ("inputs", {"inputs": LSTM["inputs"].astype(int)}, ["int32", "floating"]),
    ("inputs", {"inputs": LSTM["inputs"][..., :0]}, ["at least one feature"]),
    ("weights", {"weights": None}, ["None", "a dict with weight_ih, weight_hh"]),
    ("weights", {"weights": (H, C)}, ["a dict"]),
    ("weights", {"weights": {"weight_ih": WEIGHTS["weight_ih"]}}, ["weight_hh in it", "beside weight_ih"]),
    ("weights", {"weights": {}}, ["weight_ih in it", "nothing else"]),
    ("weights", {"weights": {**WEIGHTS, "weight_ih_l0": H}}, ["no 'weight_ih_l0'", "bias_hh"]),
    ("weights", {"weights": TWO}, ["no 'bias_hh_reverse'", "bidirectional=True"]),
    ("weights", {"bidirectional": True, "hidden": None}, ["weight_ih_reverse in it"]),
    ("weights['weight_ih']", {"weights": {**WEIGHTS, "weight_ih": WEIGHTS["weight_ih"].T}}, ["[3, 16]", "[16, 3]"]),
    ("weights['weight_ih']", {"inputs": jnp.ones((2, 5, 9))}, ["[16, 9]"]),
    ("weights['weight_hh']", {"weights": {**WEIGHTS, "weight_hh": WEIGHTS["weight_hh"][:12]}}, ["[16, 4]", "4 gates of hidden size 4"]),
    ("weights['weight_hh']", {"weights": {**WEIGHTS, "weight_hh": WEIGHTS["weight_hh"][:, 0]}}, ["it has 1 dimension."]),
    ("weights['weight_hh']", {"weights": {**WEIGHTS, "weight_hh": jnp.ones((0, 0))}}, ["at least 1"]),
    ("weights['weight_hh']", {"cell_type": "gru", "hidden": H}, ["[12, 4]", "3 gates"]),
    ("weights['bias_ih']", {"weights": {**WEIGHTS, "bias_ih": H}}, ["[16]", "2 dimensions"]),
    ("weights['bias_hh']", {"weights": {**WEIGHTS, "bias_hh": H[0]}}, ["[16]"]),
    ("weights['bias_hh']", {"weights": {**WEIGHTS, "bias_hh": WEIGHTS["bias_hh"].astype("bfloat16")}}, ["bfloat16", "cast"]),
    ("weights['bias_hh']", {"weights": {**WEIGHTS, "bias_hh": "none"}}, ["'none'", "an array"]),
    ("hidden", {"hidden": H}, ["a pair (h, c)", "[2, 4]"]),
    ("hidden", {"hidden": (H,)}, ["a pair (h, c)"]),
    ("hidden", {"hidden": {"h": H, "c": C}}, ["a dict", "a pair (h, c)"]),
    ("hidden[0]", {"hidden": (H[0], C)}, ["it has 1 dimension."]),
    ("hidden[1]", {"hidden": (H, C[:1])}, ["[1, 4]", "[2, 4]"]),
    ("hidden[1]", {"hidden": (H, None)}, ["None"]),
    ("hidden[1]", {"hidden": (H, C.astype("float16"))}, ["float16", "cast"]),
    ("hidden[0]", {"hidden": (H, C), "weights": TWO, "bidirectional": True}, ["2 dimensions", "[2, 2, 4]"]),
    ("hidden", {**RNN, "hidden": (H,), "cell_type": "rnn"}, ["[2, 4]"]),
    ("hidden", {**RNN, "hidden": H.astype(int), "cell_type": "rnn"}, ["int32"]),
    ("cell_type", {"cell_type": "LSTM"}, ["'LSTM'", "'lstm', 'gru' or 'rnn'"]),
    ("cell_type", {"cell_type": None}, ["None"]),
    ("lengths", {"lengths": jnp.array([1, 2, 3])}, ["[3]", "[2]"]),
    ("lengths", {"lengths": jnp.array([[1, 2]])}, ["2 dimensions"]),
    ("lengths", {"lengths": jnp.array([1.0, 2.0])}, ["integer"]),
    ("lengths", {"lengths": jnp.array([1, 6])}, ["0 to 5", "1 6"]),
    ("lengths", {"lengths": jnp.array([-1, 5])}, ["0 to 5", "-1"]),
    ("lengths", {"lengths": [1, 2]}, ["a list", "jnp.asarray(lengths)"]),
    ("bidirectional", {"bidirectional": 1}, ["True or False"]),
    ("reverse", {"reverse": "yes"}, ["True or False"]),
    ("reverse", {"reverse": True, "bidirectional": True, "weights": TWO}, ["bidirectional=True"]),
    ("activation", {"activation": "relu"}, ["'relu'", "only 'rnn'"]),
    ("activation", {"activation": jnp.tanh}, ["only 'rnn'"]),
    ("activation", {**RNN, "cell_type": "rnn", "activation": "gelu"}, ["'gelu'", "'relu'"]),
    ("activation", {**RNN, "cell_type": "rnn", "activation": None}, ["None"]),
    ("activation", {**RNN, "cell_type": "rnn", "activation": jnp.sum}, ["keeps the shape [2, 4]"]),
    ("activation", {**RNN, "cell_type": "rnn", "activation": Unhashable()}, ["Python value"]),
    ("platform", {"platform": "metal"}, ["'metal'"]),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "given", "words"), WRONG, ids=[f"{i}-{w[0]}" for i, w in enumerate(WRONG)])
def test_wrong_arguments(argument, given, words):
    with pytest.raises(InvalidInputError) as caught:
        recurrent(**{**LSTM, **given})
    message = str(caught.value)
    assert message.startswith(f"recurrent: {argument} is ")
    for word in words:
        assert word in message, message


def test_wrong_arguments_under_jit():
    with pytest.raises(InvalidInputError, match=r"recurrent: weights\['weight_hh'\] is "):
        jax.jit(lambda w: recurrent(LSTM["inputs"], None, {**w, "weight_hh": w["weight_hh"].T}))(WEIGHTS)


def test_other_dtypes_and_platforms_are_refused_by_name():
    tiny = jax.tree.map(lambda x: x.astype(jnp.float8_e4m3fn), LSTM)
    with pytest.raises(UnsupportedError, match="dtype float8_e4m3fn is not supported"):
        recurrent(**tiny)
    with pytest.raises(UnsupportedError, match="platform='triton'"):
        recurrent(**LSTM, platform="triton")


def test_explanation_and_cost():
    explanation = ejkernel.explain(recurrent, **LSTM, reverse=True)
    assert explanation.chosen.platform is ejkernel.Platform.XLA
    assert "weights (" in str(explanation)
    cost = ejkernel.kernel_registry.operation("recurrent").cost(explanation.call)
    batch, steps, features = LSTM["inputs"].shape
    assert cost.flops == 2 * batch * steps * 16 * (features + 4)
    assert cost.backward_flops == 3 * cost.flops
    floats = sum(x.size for x in jax.tree.leaves(LSTM))
    assert cost.bytes == 4 * (floats + batch * steps * 4 + 2 * batch * 4)


@slow
def test_tuning_runs_every_direction():
    lengths = jnp.array([5, 3])
    expected = recurrent(**LSTM, lengths=lengths)
    actual = ejkernel.autotune(lambda f: recurrent(**f, lengths=lengths))(LSTM)
    assert_same(actual, expected)
    grads = ejkernel.autotune(jax.grad(lambda f: recurrent(**f, lengths=lengths)[0].sum()))(LSTM)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, LSTM)


def test_every_feature_has_an_example():
    used = {feature for example in examples_recurrent.EXAMPLES for feature in example.features}
    assert used == set(ejkernel.kernel_registry.operation("recurrent").features)


@slow
def test_tuning_beside_a_plain_function(own_store):
    """Weights are a tree, and all of it must become arrays to be timed."""
    from ejkernel import Support, autotune, kernel_registry

    @kernel_registry.register("recurrent", "cuda", "any", support=Support.everything())
    def plain(inputs, hidden=None, weights=None, **_):
        return inputs @ weights["weight_ih"][:2].T, None

    try:
        inputs = jnp.ones((1, 3, 4))
        weights = {"weight_ih": jnp.ones((8, 4)), "weight_hh": jnp.ones((8, 2))}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outputs, _ = autotune(recurrent)(inputs, None, weights, platform="cuda")
        np.testing.assert_allclose(outputs, 4.0)
    finally:
        kernel_registry.unregister(plain)
