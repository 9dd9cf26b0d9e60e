import gc
import itertools
import os

# Before JAX is imported: CPU unless JAX_PLATFORMS says otherwise, eight devices to shard over, and compilations kept
# between runs of the suite.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(os.path.dirname(__file__), "..", ".cache", "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import pytest
from hypothesis import HealthCheck, settings

from ejkernel import kernel_registry
from ejkernel.contracts.device import describe
from ejkernel.ops.config import chain, store

settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("suite")
# By how much examples and sizes shrink: Triton's interpreter runs a program's instances one after another.
SLOWER = 4 if os.environ.get("TRITON_INTERPRET") == "1" else 1


def runnable(algorithm):
    """The implementations that this machine can run on float32, which is what the tests compute in, as parameters of one.

    Those that take less have tests of their own.
    """
    device = describe(jax.local_devices()[0])
    return [
        pytest.param(entry, id=str(entry).replace(" ", "-"))
        for entry in kernel_registry.list_implementations(algorithm)
        if entry.support.devices.refusal(device) is None and "float32" in entry.support.dtypes
    ]


def bound(*args, **kwargs):
    """``(call, pins)`` of flash_attention's arguments."""
    operation = kernel_registry.operation("flash_attention")
    arguments = operation.signature.bind(*args, **kwargs)
    arguments.apply_defaults()
    return operation.bound(dict(arguments.arguments))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU; JAX runs on {jax.default_backend()} here")


def pytest_collection_modifyitems(items):
    """A set is written in another order in every process; parallel runs compare the names of tests."""
    for item in items:
        for name, value in getattr(getattr(item, "callspec", None), "params", {}).items():
            if isinstance(value, (set, frozenset)) and str(value) in item.name:
                raise pytest.UsageError(
                    f"{item.nodeid} is named after a set, {name}: expected a tuple, or ids of its own"
                )


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    """Every test has an empty store and remembers nothing of others."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("EJKERNEL_AUTOTUNE", raising=False)
    chain.forget()
    store._warned.clear()
    yield tmp_path / "cache"
    chain.forget()


_since_cleared = itertools.count(1)


@pytest.fixture(autouse=True)
def few_executables():
    """A process that holds thousands of compiled programs runs out of memory mappings, and crashes."""
    yield
    if next(_since_cleared) % 150 == 0:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
