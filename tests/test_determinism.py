"""A rerun gives the same bits, forward and backward, in this process and in the next."""

import hashlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import COMBINED, Case
from conftest import SLOWER, runnable
from examples import gradients, main_examples

from ejkernel import flash_attention

LONG = Case("long", frozenset({"causal"}), q_len=600 // SLOWER, kv_len=600 // SLOWER, group=2)
IMPLEMENTATIONS = [p for p in runnable("flash_attention") if p.values[0].support.deterministic]


def run(entry, case, seed=0):
    arrays, statics = case.make(seed=seed)
    floats = {n: arrays[n] for n in ("query", "key", "value", "bias", "softmax_aux") if n in arrays}

    def loss(floats):
        out = flash_attention(**{**arrays, **floats}, **{**statics, "return_lse": False}, platform=entry.platform)
        return (out**2).sum(), out

    grads, out = jax.grad(loss, has_aux=True)(floats)
    return [np.asarray(x) for x in jax.tree.leaves((out, grads))]


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [LONG, COMBINED[-1], COMBINED[-2]], ids=str)
def test_reruns_are_bit_identical(entry, case):
    first = run(entry, case)
    for _ in range(3):
        for a, b in zip(first, run(entry, case), strict=True):
            np.testing.assert_array_equal(a, b)


_SCRIPT = """
import hashlib, sys
import cases, test_determinism as t
from conftest import runnable
entry = next(p.values[0] for p in runnable("flash_attention") if str(p.values[0]) == sys.argv[1])
print(t.digest(t.run(entry, cases.COMBINED[-1])))
"""


def digest(arrays):
    return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
def test_another_process_gives_the_same_bits(entry):
    here = os.path.dirname(__file__)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([here, os.path.dirname(here), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(entry)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == digest(run(entry, COMBINED[-1]))


def test_dropout_does_not_depend_on_blocks():
    from ejkernel import FwdParams

    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 50, 2, 8)), jnp.float32)
    outs = [
        flash_attention(x, x, x, dropout_prob=0.5, dropout_seed=1, fwd_params=FwdParams(q_blocksize=b, kv_blocksize=b))
        for b in (7, 50)
    ]
    np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-5)


@main_examples()
def test_every_operation(entry, example):
    if not entry.support.deterministic:
        pytest.skip(f"{entry} says it is not")
    arrays = example.arrays()
    first = gradients(example, arrays, platform=entry.platform)
    for _ in range(2):
        again = gradients(example, arrays, platform=entry.platform)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a, b)
