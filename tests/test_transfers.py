"""Eager calls copy nothing from a device: values are read only where that costs no copy."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import named
from examples import firsts_and_lasts
from jax.sharding import AxisType

from ejkernel import flash_attention, merge_attention, page_update, ring_attention
from ejkernel.utils import values


class OnAccelerator(jax.Array):
    """An array whose values are not on the host; reading them counts."""

    shape, dtype = (3,), np.dtype("int32")
    is_fully_addressable = True

    def __init__(self, platform):
        self.platform = platform
        self.reads = 0

    def devices(self):
        return (self,)

    def __array__(self, dtype=None, copy=None):
        self.reads += 1
        return np.arange(3, dtype=dtype)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("setting", ["", "0", "off"])
def test_values_on_an_accelerator_are_not_read(platform, setting, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CHECK_VALUES", setting)
    array = OnAccelerator(platform)
    assert values.concrete(array) is None
    assert not array.reads


def test_values_on_an_accelerator_are_read_on_demand(monkeypatch):
    monkeypatch.setenv("EJKERNEL_CHECK_VALUES", "1")
    np.testing.assert_array_equal(values.concrete(OnAccelerator("gpu")), [0, 1, 2])


@pytest.mark.parametrize("array", [np.arange(3), jnp.arange(3)], ids=["numpy", "jax"])
def test_values_on_the_host_are_read(array, monkeypatch):
    monkeypatch.delenv("EJKERNEL_CHECK_VALUES", raising=False)
    if isinstance(array, jax.Array):
        array = jax.device_put(array, jax.devices("cpu")[0])
    np.testing.assert_array_equal(values.concrete(array), [0, 1, 2])


def test_an_array_of_which_other_processes_hold_a_part_is_not_read(monkeypatch):
    monkeypatch.setenv("EJKERNEL_CHECK_VALUES", "1")
    array = OnAccelerator("cpu")
    array.is_fully_addressable = False
    assert values.concrete(array) is None
    assert not array.reads


@pytest.fixture
def eager_calls():
    """Functions without arguments by name; their arrays are there, with lengths, tables and offsets among them."""
    calls = {}
    for case in named("everything", "everything_packed"):
        arrays, statics = case.make()
        calls[f"flash_attention-{case}"] = functools.partial(flash_attention, **arrays, **statics)
    for example in firsts_and_lasts():
        calls[str(example)] = functools.partial(example.run, example.arrays())
    cache, new, out = jnp.zeros((4, 2, 4, 8), jnp.int8), jnp.ones((3, 2, 8)), jnp.ones((3, 2, 8))
    where = (jnp.array([5, 3]), jnp.array([[0, 1], [2, -1]]))
    calls["page_update"] = functools.partial(
        *(page_update, cache, cache, new, new, *where), cum_seqlens_q=jnp.array([0, 2, 3]), k_scale=0.1, v_scale=0.1
    )
    calls["merge_attention"] = functools.partial(merge_attention, out, out[..., 0], out, out[..., 1])
    return calls


@pytest.fixture
def reads(eager_calls, monkeypatch):
    """The places in ejkernel that read an array's values while a call is made, `concrete` apart, which finds none."""
    found = []

    def watched(function):
        def call(value, *args, **kwargs):
            caller = sys._getframe(1)
            if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
                if caller.f_globals.get("__name__", "").startswith("ejkernel"):
                    found.append(f"{caller.f_globals['__name__']}:{caller.f_lineno}")
            return function(value, *args, **kwargs)

        return call

    concrete = values.concrete
    for module in [module for name, module in sys.modules.items() if name.startswith("ejkernel")]:
        if getattr(module, "concrete", None) is concrete:
            monkeypatch.setattr(module, "concrete", lambda value: None)
    for name in ("asarray", "array"):
        monkeypatch.setattr(np, name, watched(getattr(np, name)))
    # What int(), bool(), item() and tolist() of an array read.
    of_array = type(jnp.ones(1))
    monkeypatch.setattr(of_array, "_value", property(lambda self: pytest.fail("an array's values were read")))
    return found


def test_eager_calls_read_no_values(eager_calls, reads):
    """As on an accelerator: no value is read but through `concrete`."""
    for name, call in eager_calls.items():
        call()
        assert not reads, name


def test_this_notices_a_read(reads):
    """A function of a module of ejkernel that reads."""
    scope = {"__name__": "ejkernel.reader", "np": np}
    exec("def read(x):\n    return np.asarray(x)", scope)
    scope["read"](jnp.arange(3))
    assert reads == ["ejkernel.reader:2"]


@pytest.mark.gpu
def test_eager_calls_on_a_gpu_copy_nothing_to_the_host(eager_calls):
    for call in eager_calls.values():
        with jax.transfer_guard_device_to_host("disallow"):
            jax.block_until_ready(call())
    mesh = jax.make_mesh((1,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    x = jnp.ones((1, 64, 2, 8))
    with jax.transfer_guard_device_to_host("disallow"):
        jax.block_until_ready(ring_attention(x, x, x, mesh=mesh))
