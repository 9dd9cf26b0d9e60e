"""recurrent on XLA beside torch, on a CPU: ratios within one process.

    python benchmarks/recurrent_cpu.py [--out benchmarks/results/recurrent_cpu.json]

float32, batch 16, 256 steps, 256 features, hidden size 256. torch is measured if it is installed (2.13.0 in the
committed results): its forward without gradients, and with them the forward that keeps what its backward needs.
``scan`` is the same layer as a ``lax.scan`` that JAX differentiates. Bursts of all implementations are timed in random
order, each after a pause, and the best of each counts.
"""

import jax
import jax.numpy as jnp
import numpy as np
from shared import best_of, jax_run, main, torch_version

from ejkernel import recurrent

BATCH, STEPS, FEATURES, HIDDEN = 16, 256, 256, 256
GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def arguments(cell):
    """Inputs and weights as torch initialises them."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    bound = HIDDEN**-0.5
    shapes = {"weight_ih": (FEATURES,), "weight_hh": (HIDDEN,), "bias_ih": (), "bias_hh": ()}
    rows = GATES[cell] * HIDDEN
    weights = {
        name: jax.random.uniform(next(keys), (rows, *rest), minval=-bound, maxval=bound)
        for name, rest in shapes.items()
    }
    return jax.random.normal(next(keys), (BATCH, STEPS, FEATURES)), weights


def ours(cell):
    return lambda x, w: recurrent(x, None, w, cell)[0]


def scan(cell):
    """The layer in a few lines."""

    def step(weights, state, zx):
        h, c = state
        zh = h @ weights["weight_hh"].T + weights["bias_hh"]
        if cell == "rnn":
            return (jnp.tanh(zx + zh), c), None
        if cell == "gru":
            (xr, xz, xn), (hr, hz, hn) = jnp.split(zx, 3, -1), jnp.split(zh, 3, -1)
            r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
            n = jnp.tanh(xn + r * hn)
            return ((1 - z) * n + z * h, c), None
        i, f, g, o = jnp.split(zx + zh, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    def run(x, weights):
        zx = x.swapaxes(0, 1) @ weights["weight_ih"].T + weights["bias_ih"]
        start = (jnp.zeros((BATCH, HIDDEN)),) * 2

        def body(state, zx):
            state, _ = step(weights, state, zx)
            return state, state[0]

        return jax.lax.scan(body, start, zx)[1].swapaxes(0, 1)

    return run


def gradients(f):
    return jax.grad(lambda x, w: f(x, w).sum(), (0, 1))


def torch_runs(cell, args):
    if not torch_version():
        return {}
    import torch

    inputs, weights = args
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}[cell](FEATURES, HIDDEN, batch_first=True)
    layer.load_state_dict({f"{name}_l0": torch.tensor(np.asarray(w)) for name, w in weights.items()})
    x = torch.tensor(np.asarray(inputs)).requires_grad_()

    def forward():
        with torch.no_grad():
            layer(x)

    def both():
        torch.autograd.grad(layer(x)[0].sum(), [x, *layer.parameters()])

    return {"forward": forward, "forward+backward": both}


def peers(rounds):
    """Ours beside torch and a scan."""
    rows = []
    for cell in GATES:
        args = arguments(cell)
        theirs = torch_runs(cell, args)
        for what, wrap in (("forward", lambda f: f), ("forward+backward", gradients)):
            runs = {"ejkernel": jax_run(wrap(ours(cell)), *args), "scan": jax_run(wrap(scan(cell)), *args)}
            if theirs:
                runs["torch"] = theirs[what]
            times = best_of(runs, rounds)
            row = {"case": f"{cell} {what}", **{f"{name}_ms": t * 1e3 for name, t in times.items()}}
            row["faster_than_scan"] = times["scan"] / times["ejkernel"]
            if theirs:
                row["time_over_torch"] = times["ejkernel"] / times["torch"]
            rows.append(row)
            print(row, flush=True)
    return rows


def memory():
    """Temporary memory of the compiled functions, MiB."""
    result = {}
    for cell in GATES:
        args = arguments(cell)

        def temporary(f, args=args):
            return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes / 2**20

        result[cell] = {
            "forward": temporary(ours(cell)),
            "forward+backward": temporary(gradients(ours(cell))),
            "scan forward+backward": temporary(gradients(scan(cell))),
        }
    print("temporary MiB:", result, flush=True)
    return result


def measure(rounds):
    sizes = {"batch": BATCH, "steps": STEPS, "features": FEATURES, "hidden": HIDDEN}
    return {"sizes": sizes, "temporary_mib": memory(), "peers": peers(rounds)}


if __name__ == "__main__":
    main(__doc__, measure)
