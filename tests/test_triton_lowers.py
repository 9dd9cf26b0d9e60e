"""Every operation that has a Triton kernel compiles for a GPU, forward and backward: the interpreter accepts more than it."""

import jax
import pytest
from cases import Case
from examples import all_examples, gradients

from ejkernel import Platform, flash_attention, kernel_registry, target

pytest.importorskip("jax_triton")
pytest.importorskip("jax_cuda13_plugin", reason="jax-cuda13-plugin lowers Triton kernels, and is not installed")

FLASH = Case("flash_attention", frozenset({"causal", "segments", "bias"}))


def in_triton(example):
    """The implementation that has the example's features, if there is one."""
    entries = kernel_registry.list_implementations(example.operation)
    return next((e for e in entries if e.platform is Platform.TRITON and example.features <= e.support.features), None)


def of_flash(arrays):
    floats = {name: arrays[name] for name in ("query", "key", "value", "bias")}
    out, pull = jax.vjp(lambda f: flash_attention(**{**arrays, **f}, causal=True, platform="triton"), floats)
    return out, pull(out)


def lowered(run, arrays):
    with target("nvidia-h200"):
        return jax.jit(run).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()


def examples():
    """As parameters, all but the last of an operation slow."""
    found = list(filter(in_triton, all_examples()))
    last = {example.operation: example for example in found}
    return [pytest.param(e, marks=() if e is last[e.operation] else pytest.mark.slow, id=str(e)) for e in found]


@pytest.mark.compiled
@pytest.mark.parametrize("example", [pytest.param(FLASH, id=str(FLASH)), *examples()])
def test_lowers(example):
    if example is FLASH:
        text = lowered(of_flash, FLASH.make("bfloat16")[0])
    else:
        # A kernel without a backward leaves that to another, and is not pinned.
        pin = {"platform": "triton"} if set(example.differentiable) <= in_triton(example).support.gradients else {}
        run = lambda arrays: gradients(example, arrays, **pin)[:2]  # noqa: E731
        text = lowered(run, example.arrays())
    assert "triton" in text
