"""Paged attention in Pallas for TPUs: in its interpreter, and compiled for TPUs without one."""

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys

import examples_page_attention as pages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from lanes import some
from test_compilation import TPU_ENVIRONMENT
from tolerances import assert_close

from ejkernel import FwdParams, explain, kernel_registry
from ejkernel.contracts.device import describe
from ejkernel.kernels._pallas.tpu.page_attention.forward import forward
from ejkernel.kernels._pallas.tpu.page_attention.geometry import candidates, defaults, geometry

OPERATION = kernel_registry.operation("page_attention")
LENS, CHUNKS = [300, 0, 33, 128, 70], [20, 0, 1, 9, 70]
# Arguments of ``examples_page_attention.make`` beside those below, then those of the call.
WIDE = {"dim": 32, "max_blocks": 20, "size": 16, "kv_heads": 2}
CALLS = {
    "decoding": ({"chunks": None, "group": 4}, {}),
    "chunks": ({"group": 4, "padding": 5}, {}),
    "window": ({"chunks": None, "group": 2}, {"sliding_window": (40, 0)}),
    "chunks in a window": ({"group": 3}, {"sliding_window": (40, 0)}),
    "only itself": ({"chunks": None}, {"sliding_window": 0}),
    "sinks and a cap": ({"group": 4, "sinks": "own", "padding": 3}, {"logits_soft_cap": 3.0}),
    "value dim": ({"chunks": None, "value_dim": 160}, {"softmax_scale": 0.3}),
    "pages of 48": ({"size": 48, "max_blocks": 7, "group": 6}, {"sliding_window": (100, 0)}),
    "parts of pages": ({"size": 384, "max_blocks": 1, "group": 2}, {}),
    "int8": ({"chunks": None, "cache": "int8", "scales": "own", "size": 32, "max_blocks": 10, "group": 2}, {}),
    "e4m3": ({"cache": "float8_e4m3fn", "scales": "scalar", "group": 2}, {}),
    "e5m2": ({"chunks": None, "cache": "float8_e5m2", "scales": "own"}, {}),
    "many rows": ({"kv_heads": 1, "group": 16}, {}),
    "negative scale": ({"chunks": None}, {"softmax_scale": -0.2}),
}
# Two steps of 128 keys for some contexts, one for others; each head a program of its own.
SMALL = FwdParams(blocksize_m=8, kv_blocksize=128, blocksize_heads=1, num_stages=2)


def make(name, dtype="float32", lens=LENS, **changed):
    """Everything that no query may see is NaN, and what the tables have for it is anything."""
    sizes, options = CALLS[name]
    sizes = {"chunks": CHUNKS, **WIDE, **sizes, **changed}
    arrays = pages.make(lens, **sizes)(np.random.default_rng(0))
    left = options.get("sliding_window", max(lens))
    left = left[0] if isinstance(left, tuple) else left
    floating = sizes.get("cache") != "int8"
    for b, (length, new) in enumerate(zip(lens, sizes["chunks"] or [1] * len(lens), strict=True)):
        hidden = max(0, length - new - left)
        for token in range(hidden if floating else 0):
            for cache in ("key_cache", "value_cache"):
                arrays[cache][arrays["block_tables"][b, token // sizes["size"]], :, token % sizes["size"]] = np.nan
        arrays["block_tables"][b, : hidden // sizes["size"]] = -9
    kept = {"softmax_aux": "float32", "k_scale": "float32", "v_scale": "float32"}
    return {
        name: jnp.asarray(x, kept.get(name, dtype) if x.dtype == np.float64 else None) for name, x in arrays.items()
    }, options


def prepare(arrays, options):
    """What the operation gives an implementation."""
    bound = OPERATION.signature.bind(**arrays, **options)
    bound.apply_defaults()
    arguments = OPERATION.normalise(dict(bound.arguments))
    spec = OPERATION.bind(arguments).spec
    return OPERATION.prepare(arguments, spec), spec


def expected(arrays, options):
    with jax.enable_x64(True):
        wide = {
            name: jnp.asarray(np.asarray(x), "float64" if jnp.issubdtype(x.dtype, jnp.floating) else None)
            for name, x in arrays.items()
        }
        return [np.asarray(x) for x in jax.jit(functools.partial(pages.reference, return_lse=True, **options))(**wide)]


def interpreted(arrays, options, capfd, params=SMALL, *, cores=1, mode="on_wait"):
    """In Pallas' interpreter, with race detection, against float64. Memory that nothing was written to is NaN."""
    prepared, spec = prepare(arrays, options)
    interpret = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode, num_cores_or_threads=cores)
    found = [x[0] for x in jax.block_until_ready(forward(prepared, spec, params, interpret=interpret))]
    races = interpret_pallas_call.races
    assert races is None or not races.races_found
    printed = "".join(capfd.readouterr())
    assert "non-zero" not in printed
    assert "RACE" not in printed
    dtype = str(found[0].dtype)
    for what, x, e in zip(("out", "lse"), found, expected(arrays, options), strict=True):
        assert_close(x, e, dtype, what=what)
    return found


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(CALLS, "chunks in a window", "sinks and a cap", "e4m3"))
def test_values(name, capfd):
    interpreted(*make(name), capfd)
