import contextlib
import gc
import importlib.util
import itertools
import os
import shutil

# Before JAX is imported: CPU unless JAX_PLATFORMS says otherwise, eight devices to shard over, and compilations that take
# long kept between runs of the suite (to keep a short one takes as long as to make it).
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(os.path.dirname(__file__), "..", ".cache", "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
# The plugin that compiles for GPUs is there without CUDA's libraries, which only a GPU needs.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import psutil
import pytest
from cuda_compilers import compilers, fresh  # noqa: F401 (fixtures)
from hypothesis import HealthCheck, settings
from subjects import MOSAIC_INTERPRETER

from ejkernel import Platform, kernel_registry
from ejkernel.contracts.device import describe
from ejkernel.kernels._triton.call import interpreting
from ejkernel.ops.config import chain, store

settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("suite")
# Whether slow tests are left out, as `make test` does, and whether those are that repeat others, as CI's slow lane does.
SHORT = CI = False


def pytest_configure(config):
    global SHORT, CI
    SHORT, CI = ("not " + marker in config.getoption("markexpr") for marker in ("slow", "again"))
    if SHORT and jax.config.jax_platforms == "cpu":
        # XLA takes a fifth of the time to compile; `make test-full` compiles as users do. Unknown extra options are ignored.
        os.environ["XLA_FLAGS"] += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for processes that tests start
        jax.config.update("jax_disable_most_optimizations", True)


def tries(full, *, short):
    """Settings of hypothesis: how many examples ``make test-full`` tries, and how many ``make test``; CI's slow lane a third."""
    return settings(max_examples=short if SHORT else max(short, full // 3) if CI else full)


def runnable(algorithm):
    """The implementations that this machine can run on float32, as parameters of a test; for all dtypes see subjects.py."""
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


def _missing(marker):
    """What a test with this marker needs and this machine does not have."""
    if marker == "gpu" and jax.default_backend() != "gpu":
        return f"a GPU; JAX runs on {jax.default_backend()} here"
    if marker == "torch" and importlib.util.find_spec("torch") is None:
        return "torch, which is not installed"
    if marker == "browser" and importlib.util.find_spec("playwright") is None:
        return "playwright, which is not installed"
    if marker == "browser" and not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        return "chromium, which is not installed"
    return None


def pytest_runtest_setup(item):
    for marker in ("gpu", "torch", "browser"):
        if item.get_closest_marker(marker) and (missing := _missing(marker)):
            pytest.skip(f"needs {missing}")


def _subject(item):
    return getattr(getattr(item, "callspec", None), "params", {}).get("subject")


def for_triton_interpreter(item):
    """Whether a test runs in the process whose Triton is the interpreter: its own files, and Triton's property tests."""
    subject = _subject(item)
    return item.path.stem.endswith("_interpreted") or (subject is not None and subject.platform is Platform.TRITON)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Before markers select: which tests this process runs at all, and what a GPU runs.

    With the oldest jax the property tests interpret TPU kernels; those in files of their own are slow then, and CI has them
    with a newer jax.
    """
    for item in items:
        if not MOSAIC_INTERPRETER and item.path.name.startswith("test_tpu_") and item.get_closest_marker("interpreted"):
            item.add_marker("slow")
        for name, value in getattr(getattr(item, "callspec", None), "params", {}).items():
            # A set is written in another order in every process; parallel runs compare the names of tests.
            if isinstance(value, (set, frozenset)) and str(value) in item.name:
                raise pytest.UsageError(
                    f"{item.nodeid} is named after a set, {name}: expected a tuple, or ids of its own"
                )
        if _subject(item) is not None and jax.default_backend() == "gpu":
            item.add_marker("gpu")
    if interpreting():
        others = [item for item in items if not for_triton_interpreter(item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if for_triton_interpreter(item)]


@pytest.fixture(autouse=True)
def registered(request):
    """An implementation that runs in an interpreter of Pallas is registered for its tests alone."""
    subject = _subject(request.node)
    with contextlib.nullcontext() if subject is None else subject.registered():
        yield


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
MORE_BYTES = 2 * 2**30
_most = {"bytes": MORE_BYTES}


@pytest.fixture(autouse=True)
def few_executables():
    """A process that holds thousands of compiled programs runs out of memory mappings, and crashes; interpreters' take gigabytes."""
    yield
    memory = psutil.Process().memory_info
    if next(_since_cleared) % 300 == 0 or memory().rss > _most["bytes"]:
        jax.clear_caches()
        gc.collect()
        _most["bytes"] = memory().rss + MORE_BYTES


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
