"""Recurrent weights from PyTorch and back."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close

from ejkernel import InvalidInputError

torch = pytest.importorskip("torch")

from ejkernel.integrations.torch import recurrent_stack, weights_from, weights_to  # noqa: E402

pytestmark = pytest.mark.torch
slow = pytest.mark.slow

KINDS = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU, "RNN": torch.nn.RNN}
MODULES = list(itertools.product(KINDS, (False, True), (False, True)))
SHORT = [("LSTM", True, True), ("GRU", True, False), ("RNN", False, True)]


def made(kind, both=False, bias=True, layers=2, seed=0, **options):
    torch.manual_seed(seed)
    return KINDS[kind](5, 4, layers, bidirectional=both, bias=bias, batch_first=True, **options)


@pytest.mark.parametrize(
    ("kind", "both", "bias"), [pytest.param(*case, marks=() if case in SHORT else slow) for case in MODULES]
)
def test_as_torch(kind, both, bias):
    options = {"nonlinearity": "relu"} if kind == "RNN" else {}
    module = made(kind, both, bias, **options)
    x = np.random.default_rng(0).standard_normal((3, 6, 5)).astype(np.float32)
    expected, state = module(torch.tensor(x))
    (expected**2).sum().backward()
    weights = weights_from(module)
    activation = {"activation": module.nonlinearity} if kind == "RNN" else {}

    def loss(weights):
        out, final = recurrent_stack(jnp.asarray(x), None, weights, kind.lower(), **activation)
        return (out**2).sum(), (out, final)

    (_, (out, final)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
    assert_close(out, expected.detach(), "float32")
    # torch puts the layers' and directions' states into one array; here each layer has its own.
    for index, part in enumerate(state if kind == "LSTM" else (state,)):
        mine = [layer[index] if kind == "LSTM" else layer for layer in final]
        mine = jnp.concatenate([x if both else x[None] for x in mine])
        assert_close(mine, part.detach(), "float32")
    for index, layer in enumerate(grads):
        assert len(layer) == (4 if bias else 2) * (2 if both else 1)
        for name, grad in layer.items():
            stem, reverse, _ = name.partition("_reverse")
            wanted = getattr(module, f"{stem}_l{index}{reverse}").grad
            assert_close(grad, wanted, "float32", gradient=True, what=name)

    other = made(kind, both, bias, seed=1)
    weights_to(other, weights)
    for (name, one), (_, two) in zip(module.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, two), name


def test_states_to_start_from():
    module = made("LSTM", both=True)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 6, 5)).astype(np.float32)
    h, c = rng.standard_normal((2, 4, 3, 4)).astype(np.float32)
    expected, _ = module(torch.tensor(x), (torch.tensor(h), torch.tensor(c)))
    hidden = [(h[2 * layer : 2 * layer + 2], c[2 * layer : 2 * layer + 2]) for layer in range(2)]
    out, _ = recurrent_stack(jnp.asarray(x), jax.tree.map(jnp.asarray, hidden), weights_from(module), "lstm")
    assert_close(out, expected.detach(), "float32")


def test_dtypes():
    module = made("GRU").to(torch.bfloat16)
    weights = weights_from(module)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(weights))
    assert_close(weights[0]["weight_ih"], module.weight_ih_l0.detach().float(), "float64")
    other = made("GRU", seed=1).to(torch.bfloat16)
    weights_to(other, weights)
    assert torch.equal(other.weight_hh_l1, module.weight_hh_l1)
    with pytest.raises(
        InvalidInputError, match=r"module.weight_ih_l0 is float64\[12, 5\]; expected float32: module.float"
    ):
        weights_from(made("GRU").double())


def test_wide_weights(x64):
    module = made("GRU").double()
    assert_close(weights_from(module)[1]["weight_hh"], module.weight_hh_l1.detach(), "float64")


def test_the_copies_are_apart():
    module = made("LSTM")
    weights = weights_from(module)
    before = np.array(weights[0]["weight_ih"])
    with torch.no_grad():
        module.weight_ih_l0.zero_()
    assert (np.asarray(weights[0]["weight_ih"]) == before).all()
    bare = [{name: x for name, x in layer.items() if "bias" not in name} for layer in weights]
    weights_to(module, bare)
    assert (module.bias_hh_l1 == 0).all()
    np.testing.assert_array_equal(module.weight_ih_l0.detach(), before)


def altered(**arrays):
    weights = weights_from(made("LSTM"))
    return [weights[0], {**weights[1], **arrays}]


WRONG = [
    (lambda: weights_from(torch.nn.Linear(2, 2)), r"weights_from: module is of type torch.*\.Linear; .*torch.nn.LSTM"),
    (lambda: weights_from(torch.nn.LSTMCell(2, 2)), r"module is of type .*\.LSTMCell"),
    (lambda: weights_from(torch.nn.LSTM(5, 4, device="meta")), "module.weight_ih_l0 is .*meta.*holds values"),
    (lambda: weights_from(torch.nn.LSTM(5, 4, proj_size=2)), "module.proj_size is 2 .*expected 0"),
    (lambda: weights_to(made("LSTM"), altered()[:1]), "weights_to: weights is .*2 dicts"),
    (lambda: weights_to(made("LSTM", both=True), altered()), r"weights\[0\] is .*weight_ih_reverse"),
    (lambda: weights_to(made("LSTM", bias=False), altered()), "no 'bias_ih' in layer 0.*bias=False"),
    (lambda: weights_to(made("LSTM"), altered(weight_hh=jnp.ones((16, 5)))), r"weights\[1\]\['weight_hh'\] is .*\[16, 4\]"),
    (lambda: weights_to(made("LSTM"), altered(bias_hh=jnp.ones(16, jnp.bfloat16))), r"bias_hh'\] is .*float32\[16\]"),
    (lambda: jax.jit(lambda w: weights_to(made("LSTM"), w))(altered()), r"\['weight_ih'\] is .*outside of jit"),
    (lambda: weights_to(made("LSTM"), altered(gain=jnp.ones(4))), r"weights\[1\] is .*gain"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments(call, words):
    with pytest.raises(InvalidInputError, match=words):
        call()


def test_wrong_weights_change_nothing():
    module = made("LSTM")
    before = weights_from(module)
    zeros = jax.tree.map(jnp.zeros_like, before)
    with pytest.raises(InvalidInputError):
        weights_to(module, [zeros[0], {**zeros[1], "bias_ih": jnp.ones(3)}])
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), weights_from(module), before))
