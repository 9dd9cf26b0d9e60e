"""Calls of recurrent, and the layer in float64: a Python loop over the steps."""

import jax
import jax.numpy as jnp
from examples import Example

GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def cell(cell_type, activation, weights, x, state):
    """One step of one direction."""
    h = state[0]
    zx = x @ weights["weight_ih"].T + weights.get("bias_ih", 0)
    zh = h @ weights["weight_hh"].T + weights.get("bias_hh", 0)
    if cell_type == "rnn":
        return ({"tanh": jnp.tanh, "relu": jax.nn.relu}.get(activation, activation)(zx + zh),)
    if cell_type == "gru":
        (xr, xz, xn), (hr, hz, hn) = jnp.split(zx, 3, -1), jnp.split(zh, 3, -1)
        z = jax.nn.sigmoid(xz + hz)
        return ((1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h,)
    i, f, g, o = jnp.split(zx + zh, 4, -1)
    c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def direction(inputs, state, weights, lengths, cell_type, activation, reverse):
    steps = inputs.shape[1]
    outputs = [None] * steps
    for t in reversed(range(steps)) if reverse else range(steps):
        new = cell(cell_type, activation, weights, inputs[:, t], state)
        alive = jnp.ones((inputs.shape[0], 1), bool) if lengths is None else (t < lengths)[:, None]
        outputs[t] = jnp.where(alive, new[0], 0)
        state = tuple(jnp.where(alive, n, o) for n, o in zip(new, state, strict=True))
    return jnp.stack(outputs, axis=1), state


def reference(
    inputs,
    weights,
    hidden=None,
    cell_type="lstm",
    lengths=None,
    bidirectional=False,
    reverse=False,
    activation="tanh",
):
    size, states = weights["weight_hh"].shape[1], 2 if cell_type == "lstm" else 1
    if hidden is None:
        hidden = (jnp.zeros((2, inputs.shape[0], size), inputs.dtype),) * states
        hidden = hidden if bidirectional else tuple(h[0] for h in hidden)
    else:
        hidden = hidden if cell_type == "lstm" else (hidden,)
    if not bidirectional:
        outputs, final = direction(inputs, hidden, weights, lengths, cell_type, activation, reverse)
        return outputs, final if cell_type == "lstm" else final[0]
    results = []
    for index, suffix in enumerate(("", "_reverse")):
        own = {k.removesuffix("_reverse"): w for k, w in weights.items() if k.endswith("_reverse") == bool(suffix)}
        start = tuple(h[index] for h in hidden)
        results.append(direction(inputs, start, own, lengths, cell_type, activation, bool(suffix)))
    outputs = jnp.concatenate([r[0] for r in results], axis=-1)
    final = tuple(jnp.stack(states) for states in zip(*(r[1] for r in results), strict=True))
    return outputs, final if cell_type == "lstm" else final[0]


def make(cell_type, *, batch=2, steps=5, features=3, size=4, both=False, biases=True, hidden=False, lengths=None):
    """Weights as large as an initialisation makes them, inputs and states of scale 1."""

    def arrays(rng):
        rows = GATES[cell_type] * size
        shapes = {"weight_ih": (rows, features), "weight_hh": (rows, size)}
        shapes |= {name: (rows,) for name in {True: ("bias_ih", "bias_hh"), False: (), "hh": ("bias_hh",)}[biases]}
        weights = {
            name + suffix: rng.uniform(-1, 1, shape) * size**-0.5
            for suffix in ("", "_reverse")[: 1 + both]
            for name, shape in shapes.items()
        }
        made = {"inputs": rng.standard_normal((batch, steps, features)), "weights": weights}
        if hidden:
            states = [rng.standard_normal((2, batch, size) if both else (batch, size)) for _ in range(2)]
            made["hidden"] = tuple(states) if cell_type == "lstm" else states[0]
        if lengths is not None:
            made["lengths"] = jnp.asarray(lengths, jnp.int32)
        return made

    return arrays


def example(name, made, both=False, **statics):
    if both:
        statics["bidirectional"] = True
    cell_type = statics.get("cell_type", "lstm")
    arrays = make(cell_type, both=both, **made)
    used = {
        cell_type: True,
        "hidden": made.get("hidden"),
        "lengths": made.get("lengths"),
        "bidirectional": both,
        "reverse": statics.get("reverse"),
        "activation": statics.get("activation"),
        "function": callable(statics.get("activation")),
    }
    batch = {"inputs": 0, "hidden": 1 if both else 0, "lengths": 0} if made.get("batch", 2) % 2 == 0 else {}
    given = {"inputs", *(name for name in ("hidden", "lengths") if made.get(name))}
    return Example(
        "recurrent",
        name,
        arrays,
        reference,
        statics,
        ("inputs", "hidden", "weights") if made.get("hidden") else ("inputs", "weights"),
        frozenset(feature for feature, is_used in used.items() if is_used),
        {name: axis for name, axis in batch.items() if name in given},
    )


def softsign(x):
    return x / (1 + jnp.abs(x))


EXAMPLES = [
    example("lstm", {"batch": 4, "hidden": True}),
    example("lstm_plain", {"batch": 1, "steps": 1, "biases": False}),
    example("lstm_lengths", {"batch": 3, "steps": 6, "lengths": [6, 0, 3], "features": 1, "size": 5}),
    example("lstm_reverse", {"hidden": True, "lengths": [2, 5]}, reverse=True),
    example("gru", {"hidden": True}, cell_type="gru"),
    example("gru_one_bias", {"biases": "hh", "steps": 7, "size": 1}, cell_type="gru"),
    example("gru_both", {"hidden": True, "lengths": [4, 1]}, both=True, cell_type="gru"),
    example("rnn", {"hidden": True}, cell_type="rnn"),
    example("rnn_relu", {"biases": False, "features": 6}, cell_type="rnn", activation="relu"),
    example("rnn_function", {"lengths": [5, 3]}, cell_type="rnn", activation=softsign),
    example("rnn_both", {"steps": 4, "lengths": [0, 4]}, both=True, cell_type="rnn", activation="relu"),
    example("lstm_both", {"batch": 4, "hidden": True, "lengths": [5, 2, 0, 4], "features": 7}, both=True),
]
