"""Calls of page_attention for its own tests, and their comparison with float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import runnable
from examples import all_examples
from examples_page_attention import make, reference
from tolerances import assert_close

from ejkernel import BwdParams, FwdParams, page_attention

IMPLEMENTATIONS = runnable("page_attention")
FLOATS = ("query", "key_cache", "value_cache", "softmax_aux", "k_scale", "v_scale")
EXAMPLES = {e.name: e for e in all_examples() if e.operation == "page_attention"}
slow = pytest.mark.slow
# The two walks of the XLA kernel, with one page a step and with more pages than a context has. The property files run the
# second: with several devices it is the default.
WALKS = {
    f"{'one_by_one' if q == 1 else 'all_at_once'}_{kv}": (
        FwdParams(q_blocksize=q, kv_blocksize=kv),
        BwdParams(q_blocksize=q, kv_blocksize=kv),
    )
    for q, kv in ((1, 4), (1, 64), (2, 4), (2, 64))
}
# The same with tiles of so many query tokens, for calls that have several a sequence.
TILES = (1, 2, 16)


def tiled(walk, tile):
    return tuple(dataclasses.replace(params, blocksize_m=tile) for params in WALKS[walk])


def each(*names, among):
    """The cases of a test as parameters, all but these slow."""
    assert set(names) <= set(among)
    return [pytest.param(*((x,) if isinstance(x, str) else x), marks=() if x in names else slow) for x in among]


def arrays_of(lens, seed=0, dtype="float32", **more):
    made = make(lens, **more)(np.random.default_rng(seed))
    return {name: jnp.asarray(x, dtype if x.dtype == np.float64 else None) for name, x in made.items()}


def floats_of(arrays):
    return {n: arrays[n] for n in FLOATS if n in arrays and jnp.issubdtype(arrays[n].dtype, jnp.floating)}


def check(arrays, statics, dtype="float32", wrt=None):
    """Values and gradients against float64, everything that is not owned being NaN."""
    floats = {n: arrays[n] for n in (wrt or floats_of(arrays))}
    statics = {**statics, "return_lse": True}

    def run(floats):
        return page_attention(**{**arrays, **floats}, **statics)

    rng = np.random.default_rng(1)
    cotangents = tuple(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in jax.eval_shape(run, floats))

    @jax.jit
    def both(floats, cotangents):
        result, pull = jax.vjp(run, floats)
        return result, pull(cotangents)[0]

    (out, lse), grads = both(floats, cotangents)
    with jax.enable_x64(True):
        wide = {
            n: jnp.asarray(np.asarray(x), "float64" if jnp.issubdtype(x.dtype, jnp.floating) else None)
            for n, x in arrays.items()
        }
        given = tuple(jnp.asarray(np.asarray(c), jnp.float64) for c in cotangents)

        @jax.jit
        def expect(wide, given):
            result, pull = jax.vjp(lambda f: reference(**{**wide, **f}, **statics), {n: wide[n] for n in floats})
            return result, pull(given)[0]

        expected, expected_grads = expect(wide, given)
    assert out.dtype == arrays["query"].dtype
    assert_close(out, expected[0], dtype, what="out")
    assert_close(lse, expected[1], dtype, what="lse")
    for name, grad in grads.items():
        assert grad.dtype == arrays[name].dtype
        assert_close(grad, expected_grads[name], dtype, gradient=True, what=name)


Q, C = jnp.ones((2, 4, 8)), jnp.ones((6, 2, 4, 8))
LENS, TABLES = jnp.array([5, 8]), jnp.array([[0, 1, -1], [2, 3, 99]])
PACKED = {
    "query": jnp.ones((6, 4, 8)),
    "key_cache": C,
    "value_cache": C,
    "context_lens": LENS,
    "block_tables": TABLES,
    "cum_seqlens_q": jnp.array([0, 2, 5]),
}
