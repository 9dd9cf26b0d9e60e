"""A rerun gives the same bits, forward and backward, in this process and in the next."""

import hashlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, named, taken
from examples import each_example, gradients
from subjects import parameter

from ejkernel import FwdParams, flash_attention
from ejkernel.ops.flash_attention import OPERATION

LONG = Case("long", frozenset({"causal"}), q_len=600, kv_len=600, group=2)
SHORTER = Case("long", frozenset({"causal"}), batch=1, q_len=33, kv_len=33, kv_heads=1, group=2)
PACKED = named("everything_packed")[0]


def deterministic(cases, short=""):
    """``subject, case`` of implementations that say they are; ``short``: what interpreters run in ``make test``."""
    return [
        parameter(subject, case, slow=subject.interpreted and case.name != short, again=case is PACKED)
        for subject, case in taken(cases)
        if subject.support.deterministic
    ]


def run(subject, case):
    arrays, statics = case.make(subject.dtype)
    floats = {name: arrays[name] for name in OPERATION.gradients if name in arrays}

    def loss(floats):
        out = flash_attention(**{**arrays, **floats}, **{**statics, "return_lse": False}, platform=subject.platform)
        return (out.astype(jnp.float32) ** 2).sum(), out

    grads, out = jax.grad(loss, has_aux=True)(floats)
    return [np.asarray(x) for x in jax.tree.leaves((out, grads))]


@pytest.mark.parametrize(
    ("subject", "case"), deterministic((LONG, *named("everything", "everything_packed")), LONG.name)
)
def test_reruns_are_bit_identical(subject, case):
    if subject.interpreted and case.name == LONG.name:
        case = SHORTER.at(subject)
    first = run(subject, case)
    for _ in range(1 if subject.interpreted else 3):
        for a, b in zip(first, run(subject, case), strict=True):
            np.testing.assert_array_equal(a, b)


_SCRIPT = """
import sys
import conftest, test_determinism as t
from subjects import subjects
subject = next(s for s in subjects() if str(s) == sys.argv[1])
with subject.registered():
    print(t.digest(t.run(subject, t.PACKED.at(subject))))
"""


def digest(arrays):
    return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()


@pytest.mark.parametrize(("subject", "case"), deterministic([PACKED]))
def test_another_process_gives_the_same_bits(subject, case):
    here = os.path.dirname(__file__)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([here, os.path.dirname(here), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(subject)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == digest(run(subject, case))


def test_dropout_does_not_depend_on_blocks():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 50, 2, 8)), jnp.float32)
    outs = [
        flash_attention(x, x, x, dropout_prob=0.5, dropout_seed=1, fwd_params=FwdParams(q_blocksize=b, kv_blocksize=b))
        for b in (7, 50)
    ]
    np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-5)


@each_example(main=True)
def test_every_operation(subject, example):
    if not subject.support.deterministic:
        pytest.skip(f"{subject} says it is not")
    arrays = example.arrays(subject.dtype)
    first = gradients(example, arrays, platform=subject.platform)
    for _ in range(2):
        again = gradients(example, arrays, platform=subject.platform)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a, b)
