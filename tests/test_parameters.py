"""Parameters: what a kernel makes of those that it is asked for, and that it runs with nothing else."""

import functools
import re
from dataclasses import fields

import jax
import jax.numpy as jnp
import pytest
from cases import COMBINED, Case
from examples import all_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel import BwdParams, FwdParams, Platform, explain, flash_attention, kernel_registry
from ejkernel.contracts.device import describe
from ejkernel.contracts.registry import Choice

DIRECTIONS = ("forward", "backward")
CLASSES = {"forward": FwdParams, "backward": BwdParams}
DEVICES = ("cpu", "nvidia-h200", "amd-mi300x")
ALGORITHMS = [name for name in kernel_registry.list_algorithms() if not kernel_registry.operation(name).runs_on]
FLASH = (Case("plain"), *COMBINED[-2:], *(case for case in COMBINED if case.name in ("one_query", "mqa_causal")))

sizes = st.none() | st.integers(1, 4) | st.sampled_from([5, 16, 24, 100, 128, 512, 4096, 2**40])


def any_params(direction):
    """Any parameters, sensible or not."""
    cls = CLASSES[direction]
    return st.builds(cls, **{field.name: sizes for field in fields(cls)})


@functools.cache
def calls_of(algorithm):
    """Bound calls of an operation: all of its examples."""
    if algorithm == "flash_attention":
        made = [{**arrays, **statics} for arrays, statics in (case.make() for case in FLASH)]
    else:
        examples = [example for example in all_examples() if example.operation == algorithm]
        made = [{**example.arrays(), **example.statics} for example in examples]
    operation = kernel_registry.operation(algorithm)

    def bound(options):
        arguments = operation.signature.bind(**options)
        arguments.apply_defaults()
        return operation.bound(operation.normalise(dict(arguments.arguments)))[0]

    return [call for call in map(bound, made) if call.shapes]


def entries(*platforms):
    return [
        pytest.param(entry, id=f"{algorithm}-{entry.name}")
        for algorithm in ALGORITHMS
        for entry in kernel_registry.list_implementations(algorithm)
        if not platforms or entry.platform in platforms
    ]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("entry", entries())
def test_effective_parameters(entry, direction):
    """They are those that the kernel reads, and as parameters they stay what they are."""
    calls = calls_of(entry.algorithm)
    reads = entry.reads(direction)
    assert reads is not None
    assert reads <= {field.name for field in fields(CLASSES[direction])}

    @given(params=any_params(direction), call=st.sampled_from(calls), device=st.sampled_from(DEVICES))
    @settings(max_examples=100)
    def check(params, call, device):
        device = describe(device)
        used = entry.effective(call.shapes, call.spec, params, device, direction)
        assert type(used) is CLASSES[direction]
        assert used.to_dict().keys() <= reads
        assert entry.effective(call.shapes, call.spec, used, device, direction) == used
        # What is not read changes nothing.
        read = type(params)(**{name: value for name, value in params.to_dict().items() if name in reads})
        assert entry.effective(call.shapes, call.spec, read, device, direction) == used

    check()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("entry", entries())
def test_defaults_and_the_space_are_of_parameters_that_are_read(entry, direction):
    for call in calls_of(entry.algorithm):
        for device in map(describe, DEVICES):
            if entry.support.devices.refusal(device) is not None:
                continue
            arguments = (call.shapes, call.spec, device, direction)
            proposed = getattr(entry.kernel, "space", lambda *_: [])(*arguments)
            if hasattr(entry.kernel, "defaults"):
                proposed = [entry.kernel.defaults(*arguments), *proposed]
            for params in proposed:
                assert params.to_dict().keys() <= entry.reads(direction)


def traced(entry, params, direction, call, device):
    """The jaxpr of one direction, free of addresses."""
    forward = Choice(entry, params if direction == "forward" else FwdParams(), "argument", device)

    def run_forward(arrays):
        return forward.forward(arrays, call.spec)

    if direction == "forward":
        jaxpr = jax.make_jaxpr(run_forward)(call.shapes)
    else:
        backward = Choice(entry, params, "argument", device)
        pair = jax.eval_shape(run_forward, call.shapes)
        wanted = entry.support.gradients & call.shapes.keys()
        jaxpr = jax.make_jaxpr(lambda arrays, *rest: backward.backward(wanted, arrays, call.spec, *rest))(
            call.shapes, *pair, *pair
        )
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("entry", entries(Platform.XLA))
def test_a_kernel_runs_with_its_effective_parameters(entry, direction):
    """Given those that were asked for or the effective ones, it is the same program."""
    calls = calls_of(entry.algorithm)
    if not entry.reads(direction):
        pytest.skip(f"{entry.name} has no parameters")
    device = describe("cpu")
    asked = [
        CLASSES[direction](**{name: size for name in entry.reads(direction)}) for size in (None, 1, 3, 24, 100, 2**40)
    ]
    for i, params in enumerate(asked):
        call = calls[i % len(calls)]
        used = entry.effective(call.shapes, call.spec, params, device, direction)
        assert traced(entry, params, direction, call, device) == traced(entry, used, direction, call, device), params


def test_effective_parameters_are_what_explain_shows():
    x = jax.ShapeDtypeStruct((2, 300, 4, 64), jnp.float32)
    told = explain(
        flash_attention, x, x, x, fwd_params=FwdParams(q_blocksize=1000, kv_blocksize=64, num_warps=3), device="cpu"
    )
    assert told.chosen.params == FwdParams(q_blocksize=300, kv_blocksize=64)
    half = jax.ShapeDtypeStruct((2, 300, 4, 64), jnp.bfloat16)
    told = explain(
        flash_attention, half, half, half, fwd_params=FwdParams(q_blocksize=100, num_warps=3), device="nvidia-a100"
    )
    assert (told.chosen.params.q_blocksize, told.chosen.params.num_warps) == (64, 2)
