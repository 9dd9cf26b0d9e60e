"""recurrent on a GPU: every implementation against float64, then its times beside a scan and torch's cuDNN.

    python benchmarks/recurrent_gpu.py --out FILE [--platforms cuda,triton,xla] [--parts errors,times] [--tiles]

Errors are by norm, of outputs, final states and all gradients, against the XLA kernel in float64. A rerun must give the same bits.
Times are of the forward and of the forward with all gradients; bursts of all implementations are timed in random order, each after a
pause, and the best of each counts. ``--tiles`` times what autotuning would try. What fails says why and stops nothing;
after ``--seconds`` no more is begun. Programs are compiled ahead, several at a time.
"""

import argparse
import functools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too

import jax
import jax.numpy as jnp
import numpy as np
from shared import environment, turn

import ejkernel
from ejkernel import explain, kernel_registry, recurrent
from ejkernel.contracts.device import describe
from ejkernel.contracts.params import params_class
from ejkernel.utils.bursts import time_bursts

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
# Cell, dtype, batch, steps, features, hidden; then how it is called.
ERRORS = [
    ("lstm", "bfloat16", 64, 24, 64, 1024, {}),
    ("lstm", "bfloat16", 7, 13, 24, 40, {"hidden": True, "lengths": True, "bidirectional": True}),
    ("lstm", "float32", 64, 12, 32, 1024, {"hidden": True, "lengths": True}),
    ("lstm", "float32", 5, 9, 3, 13, {"hidden": True, "reverse": True, "lengths": True}),
    ("lstm", "float16", 33, 11, 20, 264, {"reverse": True, "lengths": True}),
    ("lstm", "bfloat16", 256, 5, 32, 2048, {"hidden": True}),
    ("gru", "bfloat16", 64, 24, 64, 1024, {"hidden": True}),
    ("gru", "float32", 9, 17, 8, 96, {"hidden": True, "lengths": True, "bidirectional": True}),
    ("gru", "float16", 3, 10, 6, 24, {"lengths": True, "reverse": True}),
    ("rnn", "bfloat16", 17, 15, 16, 128, {"hidden": True, "lengths": True}),
    ("rnn", "float32", 20, 7, 12, 200, {"activation": "relu", "bidirectional": True, "hidden": True}),
]
TIMES = [
    ("lstm", "bfloat16", 64, 512, 1024, 1024),
    ("gru", "bfloat16", 64, 512, 1024, 1024),
    ("lstm", "bfloat16", 16, 1024, 512, 512),
    ("lstm", "float32", 64, 512, 1024, 1024),
    ("lstm", "bfloat16", 256, 256, 2048, 2048),
]


def made(cell, dtype, batch, steps, features, size, how):
    """The arrays of a call, the differentiable ones apart, and its other arguments."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    rows, both = GATES[cell] * size, how.get("bidirectional", False)
    shapes = {"weight_ih": (rows, features), "weight_hh": (rows, size), "bias_ih": (rows,), "bias_hh": (rows,)}
    weights = {
        name + suffix: normal(*shape) * jnp.asarray(size**-0.5, dtype)
        for suffix in ("", "_reverse")[: 1 + both]
        for name, shape in shapes.items()
    }
    floats = {"inputs": normal(batch, steps, features), "weights": weights}
    if how.get("hidden"):
        states = tuple(normal(*((2,) if both else ()), batch, size) for _ in range(2))
        floats["hidden"] = states if cell == "lstm" else states[0]
    integers = {"lengths": jnp.asarray(rng.integers(0, steps + 1, batch), jnp.int32)} if how.get("lengths") else {}
    rest = {name: value for name, value in how.items() if name not in ("hidden", "lengths")}
    return floats, integers, {"cell_type": cell, **rest}


def with_gradients(run):
    """A function of arrays and of the outputs' cotangents."""

    def both(floats, integers, cotangents):
        out, pull = jax.vjp(lambda floats: run(**floats, **integers), floats)
        return out, pull(cotangents)[0]

    return both


def cotangents(run, floats, integers):
    """Random ones, of scale 1."""
    like = jax.eval_shape(lambda floats: run(**floats, **integers), floats)
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32), x.dtype), like)


def widened(tree):
    """Its floats in float64."""

    def wide(x):
        return jnp.asarray(np.asarray(x, np.float64)) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(wide, tree)


def name_of(case):
    cell, dtype, batch, steps, _, size, *how = case
    words = [name if value is True else str(value) for name, value in (how[0] if how else {}).items()]
    return " ".join([f"{cell} {dtype} {batch}×{steps}×{size}", *words])


def reason(error):
    """The line of an error that says most."""
    lines = str(error).splitlines() or [""]
    told = next((line for line in lines if "error" in line.lower()), lines[0])
    return f"{type(error).__name__}: {told.strip()[:300]}"


def admitted(platforms, floats, integers, rest):
    """The platforms that can run a call; why not the others is printed."""
    for platform in platforms:
        try:
            told = explain(recurrent, **floats, **integers, **rest)
        except Exception as error:
            print(f"  {platform}: {reason(error)}")
            continue
        (candidate,) = [c for c in told.candidates if c.platform.value == platform] or [None]
        if candidate is None or candidate.verdict == "refused":
            print(f"  {platform}: {'; '.join(candidate.reasons) if candidate else 'not registered'}")
            continue
        yield platform


class Compiled:
    """Programs that are compiled by several threads before they are asked for."""

    def __init__(self):
        self.threads = ThreadPoolExecutor(8)

    def add(self, function, *arguments, wide=False):
        """Something to call for the program, or for the error."""

        def compile():
            begin = time.perf_counter()
            with jax.enable_x64(wide):
                program = jax.jit(function).lower(*(widened(arguments) if wide else arguments)).compile()
            return program, time.perf_counter() - begin

        return self.threads.submit(compile).result


# --- errors ---------------------------------------------------------------------------------------------------------------


def relative(actual, expected):
    """By norm, in float64; NaN anywhere is infinite."""
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    difference = np.linalg.norm(a - e) / max(np.linalg.norm(e), 1e-30)
    return float(difference) if np.isfinite(difference) else float("inf")


def named_errors(actual, expected):
    (outputs, final), grads = actual
    (wide, wide_final), wide_grads = expected
    found = {"outputs": relative(outputs, wide)}
    for i, (a, e) in enumerate(zip(jax.tree.leaves(final), jax.tree.leaves(wide_final), strict=True)):
        found[f"final {'hc'[i]}"] = relative(a, e)
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(wide_grads), strict=True):
        found[f"d {' '.join(str(getattr(key, 'key', getattr(key, 'idx', key))) for key in path)}"] = relative(a, e)
    return found


def errors(platforms, compiled, left, options):
    prepared = []
    for case in ERRORS:
        floats, integers, rest = made(*case)
        run = functools.partial(recurrent, **rest)
        cts = cotangents(run, floats, integers)
        arguments = (floats, integers, cts)
        programs = {
            platform: compiled.add(with_gradients(functools.partial(run, platform=platform)), *arguments)
            for platform in admitted(platforms, floats, integers, rest)
        }
        reference = compiled.add(with_gradients(functools.partial(run, platform="xla")), *arguments, wide=True)
        prepared.append((case, reference, arguments, programs))
    for case, reference, arguments, programs in prepared:
        if left() < 0:
            print(f"{name_of(case)}: no time left")
            continue
        with jax.enable_x64(True):
            expected = jax.tree.map(np.asarray, reference()[0](*widened(arguments)))
        for platform, program in programs.items():
            row = {"case": name_of(case), "implementation": platform}
            try:
                call, seconds = program()
                with turn(options.out):
                    first, second = (jax.tree.map(np.asarray, call(*arguments)) for _ in range(2))
                same = all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True))
                found = named_errors(first, expected)
                row |= {"errors": found, "repeats": same}
                worst = max(found, key=found.get)
                print(
                    f"{name_of(case):60} {platform:7} worst {found[worst]:.1e} ({worst}), outputs {found['outputs']:.1e}, "
                    f"{'same bits' if same else 'OTHER BITS'}, compiled in {seconds:.0f} s",
                    flush=True,
                )
            except Exception as error:
                row["failed"] = reason(error)
                print(f"{name_of(case):60} {platform:7} {row['failed']}", flush=True)
            yield row


# --- times ----------------------------------------------------------------------------------------------------------------


def scan(cell):
    """The layer in a few lines, products in the inputs' dtype, the state in float32."""

    def step(weights, state, zx):
        h, c = state
        zh = h.astype(weights.dtype) @ weights.T
        if cell == "gru":
            (xr, xz, xn), (hr, hz, hn) = jnp.split(zx, 3, -1), jnp.split(zh, 3, -1)
            r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
            n = jnp.tanh(xn + r * hn)
            return (1 - z) * n + z * h, c
        i, f, g, o = jnp.split((zx + zh).astype(jnp.float32), 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    def run(inputs, weights):
        zx = inputs.swapaxes(0, 1) @ weights["weight_ih"].T + weights["bias_ih"] + weights["bias_hh"]
        zeros = jnp.zeros((inputs.shape[0], weights["weight_hh"].shape[1]), jnp.float32)

        def body(state, zx):
            state = tuple(x.astype(jnp.float32) for x in step(weights["weight_hh"], state, zx))
            return state, state[0].astype(inputs.dtype)

        return jax.lax.scan(body, (zeros, zeros), zx)[1].swapaxes(0, 1)

    return run


def torch_runs(cell, floats):
    """torch's layer, which runs on cuDNN: its forward without gradients, and with all of them."""
    import torch

    inputs, weights = floats["inputs"], floats["weights"]
    dtype = getattr(torch, inputs.dtype.name)
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[cell](
        inputs.shape[2], weights["weight_hh"].shape[1], batch_first=True, device="cuda", dtype=dtype
    )
    layer.load_state_dict({f"{n}_l0": torch.tensor(np.asarray(w, np.float32)).to(dtype) for n, w in weights.items()})
    x = torch.tensor(np.asarray(inputs, np.float32), device="cuda").to(dtype).requires_grad_()
    dout = torch.ones(*inputs.shape[:2], weights["weight_hh"].shape[1], device="cuda", dtype=dtype)

    def forward():
        with torch.no_grad():
            return layer(x)[0]

    def both():
        return torch.autograd.grad(layer(x)[0], [x, *layer.parameters()], dout)

    return {"forward": forward, "forward and backward": both}


def layers(case, platforms, tiles):
    """Functions of inputs and weights by name, and by direction those that are of that direction alone."""
    cell = case[0]
    floats, _, rest = made(*case, {})
    admitted_here = list(admitted(platforms, floats, {}, rest))
    found = {name: (functools.partial(recurrent, **rest, platform=name), None) for name in admitted_here}
    found["scan"] = (lambda inputs, weights: (scan(cell)(inputs, weights), None), None)
    if not tiles:
        return floats, found
    for platform in admitted_here:
        told = explain(recurrent, **floats, **rest, platform=platform)
        (entry,) = (e for e in kernel_registry.list_implementations("recurrent") if e.platform.value == platform)
        for direction in ("forward", "backward") if hasattr(entry.kernel, "space") else ():
            for params in entry.kernel.space(told.call.shapes, told.call.spec, describe(), direction):
                assert isinstance(params, params_class(direction))
                label = " ".join(f"{key}={value}" for key, value in params.to_dict().items())

                def run(inputs, weights, platform=platform, params=params):
                    with ejkernel.overlay(recurrent=params):
                        return recurrent(inputs, None, weights, **rest, platform=platform)

                only = "forward" if direction == "forward" else "forward and backward"
                found[f"{platform} {direction} {label}"] = (run, only)
    return floats, found


def directions(run):
    def forward(floats):
        return run(floats["inputs"], weights=floats["weights"])[0]

    def both(floats):
        out, pull = jax.vjp(forward, floats)
        return pull(jnp.ones_like(out))

    return {"forward": forward, "forward and backward": both}


def times(platforms, compiled, left, options):
    prepared = []
    for case in TIMES:
        floats, found = layers(case, platforms, options.tiles)
        programs = {
            (direction, name): compiled.add(function, floats)
            for name, (run, only) in found.items()
            for direction, function in directions(run).items()
            if only in (None, direction)
        }
        prepared.append((case, floats, programs))
    for case, floats, programs in prepared:
        try:
            peers = torch_runs(case[0], floats)
        except Exception as error:
            print(f"torch: {reason(error)}")
            peers = {}
        for direction in ("forward", "forward and backward"):
            if left() < 0:
                print(f"{name_of(case)}, {direction}: no time left")
                continue
            runners, failed = {}, {}
            for (own, name), program in programs.items():
                if own != direction:
                    continue
                try:
                    runners[name] = functools.partial(program()[0], floats)
                except Exception as error:
                    failed[name] = reason(error)
            if direction in peers:
                runners["torch"] = peers[direction]
            row = {"case": name_of(case), "direction": direction, "implementations": {}}
            with turn(options.out):
                found = time_bursts(runners, rounds=options.rounds, seconds=0.5)
            for name, bursts in found.items():
                if bursts.error is not None:
                    failed[name] = reason(bursts.error)
                else:
                    row["implementations"][name] = {"ms": bursts.best * 1e3, "median_ms": bursts.median * 1e3}
            row["implementations"] |= {name: {"failed": why} for name, why in failed.items()}
            told = "  ".join(f"{name} {own['ms']:.2f}" for name, own in row["implementations"].items() if "ms" in own)
            print(f"{name_of(case):28} {direction:21} ms: {told}", flush=True)
            for name, why in failed.items():
                print(f"  {name}: {why}", flush=True)
            yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--platforms", help="instead of all that are registered, and of all but XLA for errors")
    parser.add_argument("--parts", default="errors,times")
    parser.add_argument("--cases", default="", help="only those whose name has this in it")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--seconds", type=float, default=110)
    options = parser.parse_args()
    begin = time.perf_counter()
    known = [entry.platform.value for entry in kernel_registry.list_implementations("recurrent")]
    platforms = options.platforms.split(",") if options.platforms else known
    for cases in (ERRORS, TIMES):
        cases[:] = [case for case in cases if options.cases in name_of(case)]

    def left():
        return options.seconds - (time.perf_counter() - begin)

    compiled, result = Compiled(), {**environment("triton", "jax-triton", "torch")}
    parts = {
        "errors": lambda: errors(
            platforms if options.platforms else [p for p in known if p != "xla"], compiled, left, options
        ),
        "times": lambda: times(platforms, compiled, left, options),
    }
    for part in options.parts.split(","):
        result[part] = []
        for row in parts[part]():
            result[part].append(row)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s")
    os._exit(0)  # without waiting for what is still being compiled


if __name__ == "__main__":
    main()
