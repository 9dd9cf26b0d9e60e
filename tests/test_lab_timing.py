"""`measure` and `measure_ceilings`: what they do with time, shown with clocks and devices that the tests hold."""

import dataclasses
import inspect
import itertools
import json
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.contracts.device import describe
from ejkernel.errors import InvalidInputError
from ejkernel.lab import (
    Ceilings,
    Measurement,
    benchmark_latency,
    ceilings,
    gpu,
    measure,
    measure_ceilings,
    timing,
    warmup,
)
from ejkernel.lab.pullback import pullback
from ejkernel.utils import bursts
from ejkernel.utils.bursts import Places
from ejkernel.utils.directories import cache_directory

SHORT = {"min_seconds": 0.0, "max_seconds": 0.02}


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when a test moves it, and no look at the process's memory, which takes time."""
    now = types.SimpleNamespace(seconds=0.0, calls=0)
    for module in (timing, bursts):
        clock = types.SimpleNamespace(perf_counter=lambda: now.seconds, sleep=lambda _: None)
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(timing, "observed_bytes", lambda *args: 7)
    return now


def taking(clock, milliseconds):
    """A function whose calls take these times, then the last of them for ever."""
    milliseconds = list(milliseconds)

    def fn():
        clock.seconds += milliseconds[min(clock.calls, len(milliseconds) - 1)] / 1e3
        clock.calls += 1

    return fn


# --- the result -----------------------------------------------------------------------------------------------------


def test_signatures_and_fields():
    parameters = inspect.signature(measure).parameters
    assert [*parameters] == ["fn", "args", "vjp", "min_seconds", "max_seconds", "kwargs"]
    assert [parameters[name].default for name in ("vjp", "min_seconds", "max_seconds")] == [False, None, 2.0]
    assert [field.name for field in dataclasses.fields(Measurement)] == [
        *("median_ms", "mean_ms", "min_ms", "p10_ms", "p90_ms", "runs", "compile_ms", "cold_ms", "peak_memory_bytes"),
        *("flags", "backward"),
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Measurement(1.0, 1.0, 1.0, 1.0, 1.0, 1, None, None, None).runs = 2


def test_json_holds_all_and_comes_back():
    inner = Measurement(1.0, 2.0, 0.5, 0.6, 1.9, 10, None, None, 3, ("noisy",))
    outer = dataclasses.replace(inner, compile_ms=4.0, backward=inner)
    written = outer.to_json()
    assert json.loads(json.dumps(written)) == written
    assert written["flags"] == ["noisy"]
    assert written["backward"] == inner.to_json()
    assert written["backward"]["backward"] is None
    assert [*written] == [field.name for field in dataclasses.fields(Measurement)]


# --- bad input ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_called_is_refused():
    with pytest.raises(InvalidInputError, match=r"fn is 'sin' \(str\); expected a function"):
        measure("sin")


@pytest.mark.parametrize(
    ("least", "most"),
    [
        *((1.0, 0.5), (-1.0, 1.0), (0.0, 0.0), (0.0, float("inf")), (float("nan"), 1.0), (0.2, 0.1), (None, 0.0)),
        *(
            ("1", 2.0),
            (0.1, "2"),
            (0.1, None),
            (None, None),
            (True, 2.0),
            (0.0, True),
            (1j, 2.0),
            ("", 2.0),
            (False, 2.0),
        ),
    ],
)
def test_an_impossible_budget_is_refused(least, most):
    with pytest.raises(InvalidInputError, match=r"min_seconds is .* and max_seconds is .*expected"):
        measure(len, "a", min_seconds=least, max_seconds=most)


def test_the_least_time_is_no_more_than_the_most(clock):
    assert measure(taking(clock, [2.0]), max_seconds=0.1).runs == 50
    clock.calls = 0
    assert measure(taking(clock, [2.0]), max_seconds=1.0).runs == 100
    assert timing._budget(None, np.float32(3)) == (0.2, 3)


@pytest.mark.parametrize(
    ("fn", "args", "missing"),
    [
        (lambda: jnp.ones(3), (), "argument"),
        (lambda x: x * 1.0, (jnp.arange(3),), "argument"),
        (lambda x: x * 1.0, (2.0,), "argument"),
        (lambda x: jnp.argmax(x), (jnp.ones(3),), "result"),
        (lambda x: None, (jnp.ones(3),), "result"),
    ],
)
def test_a_backward_needs_floats(fn, args, missing):
    with pytest.raises(InvalidInputError, match=f"no floating-point {missing} to differentiate"):
        measure(fn, *args, vjp=True, **SHORT)


@pytest.mark.parametrize("jitted", [False, True])
def test_a_result_without_floats_is_refused_before_the_timed_runs(monkeypatch, jitted):
    monkeypatch.setattr(timing, "time_bursts", lambda *_, **__: pytest.fail("a timed run"))
    calls = []

    def fn(x):
        jax.debug.callback(calls.append, 1)
        return {"index": jnp.argmax(x), "text": None if jitted else "a"}

    with pytest.raises(InvalidInputError, match="no floating-point result to differentiate"):
        measure(jax.jit(fn) if jitted else fn, jnp.ones(3), vjp=True)
    jax.effects_barrier()
    assert len(calls) == (0 if jitted else 1)


def test_a_function_that_needs_values_has_a_backward():
    found = measure(lambda x: x * 2 if x.sum() > 0 else x, jnp.ones(3), vjp=True, **SHORT)
    assert found.backward.runs >= 1


@pytest.mark.parametrize("jitted", [False, True])
def test_a_function_that_donates_is_explained(jitted):
    step = jax.jit(lambda state, x: {"w": state["w"] + x}, donate_argnums=0)
    fn = step if jitted else lambda state, x: step(state, x)
    state = {"w": jnp.ones(3)}
    for _ in range(2):  # the second time it is deleted before
        with pytest.raises(InvalidInputError, match=r"cannot be repeated: an array .* has been deleted, as fn donates"):
            measure(fn, state, 2.0, **SHORT)
    assert state["w"].is_deleted()
    with pytest.raises(InvalidInputError, match="cannot be repeated"):
        benchmark_latency(step, {"w": jnp.ones(3)}, 2.0)
    warmup(step, {"w": jnp.ones(3)}, 2.0, n_warmup=1)  # once is no repetition
    ignored = jax.jit(lambda x: x.sum(), donate_argnums=0)  # a donation without use does not delete
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert measure(ignored, jnp.ones(3), **SHORT).runs >= 1
    assert measure(step, {"w": np.ones(3, np.float32)}, 2.0, **SHORT).runs >= 1  # copied to the device each time

    def failing(x):
        raise ValueError("deleted, but no array")

    with pytest.raises(ValueError, match="deleted, but no array") as caught:
        measure(failing, jnp.ones(3))
    assert type(caught.value) is ValueError


def test_exceptions_come_through_with_a_note():
    error = RuntimeError("mine")

    def failing(x):
        raise error

    with pytest.raises(RuntimeError) as caught:
        measure(failing, 1)
    assert caught.value is error
    assert error.__notes__ == ["raised in the first run, 1 of 1"]
    with pytest.raises(TypeError) as caught:
        measure(jax.jit(lambda x: x + 1))
    assert any("compilation" in note for note in caught.value.__notes__)
    calls = itertools.count(1)
    with pytest.raises(ZeroDivisionError) as caught:
        measure(lambda: 1 / (3 - next(calls)))
    assert caught.value.__notes__[0].startswith("raised in run ")


# --- samples --------------------------------------------------------------------------------------------------------


def test_a_steady_function(clock):
    found = measure(taking(clock, [50.0, 2.0]), min_seconds=0.05, max_seconds=1.0)
    assert found.median_ms == found.mean_ms == found.min_ms == found.p10_ms == found.p90_ms == pytest.approx(2.0)
    assert found.compile_ms == pytest.approx(48.0)
    assert found.runs == 25
    assert (found.cold_ms, found.peak_memory_bytes, found.flags, found.backward) == (None, 7, (), None)


def test_quantiles_are_those_of_the_runs(clock):
    times = [*range(1, 11)]
    found = measure(taking(clock, [1.0, 1.0, *times, 1e9]), min_seconds=0.055, max_seconds=0.055)
    assert found.runs == 10
    assert (found.min_ms, found.median_ms, found.mean_ms) == pytest.approx((1.0, 5.5, 5.5))
    assert (found.p10_ms, found.p90_ms) == pytest.approx((np.percentile(times, 10), np.percentile(times, 90)))


def test_short_runs_are_batched(clock):
    found = measure(taking(clock, [0.001]), min_seconds=0.01, max_seconds=0.1)
    assert found.median_ms == pytest.approx(0.001)
    assert found.runs >= 200 * timing.FEWEST_SAMPLES  # a burst takes 0.2 ms at least


def test_a_noisy_function_is_run_until_the_median_is_stable_or_time_is_up(clock):
    noisy = taking(clock, [1.0 + (index * 7919 % 100) / 100 for index in range(4000)])
    found = measure(noisy, min_seconds=0.05, max_seconds=3.0)
    assert 0.05 < found.mean_ms * found.runs / 1e3 < 3.0
    assert found.median_ms == pytest.approx(1.5, rel=0.05)
    assert found.flags == ("noisy: p90 is 1.3 × the median",)
    clock.calls = 0
    stopped = measure(noisy, min_seconds=0.01, max_seconds=0.02)
    assert stopped.runs < found.runs
    assert any(flag.startswith("unstable: the median is known to ±") for flag in stopped.flags)


def test_a_slow_function_is_run_once_and_flagged(clock):
    found = measure(taking(clock, [9000.0]))
    assert (found.runs, found.median_ms) == (1, pytest.approx(9000.0))
    assert clock.calls == 3  # the first, one to see how long it takes, and the timed one
    assert found.flags == ("few runs: 1 in 2 s; raise max_seconds",)


def test_a_clock_that_stands_still_ends(clock):
    found = measure(taking(clock, [0.0]), min_seconds=0.0, max_seconds=0.001)
    assert found.median_ms == 0


def test_doubts():
    steady = [1.0] * 30
    assert timing.doubts(steady, 2.0, "max_seconds") == []
    assert timing.doubts([1.0] * 26 + [1.6] * 4, 2.0, "max_seconds") == ["noisy: p90 is 1.6 × the median"]
    drift = timing.doubts([1.0] * 40 + [1.2] * 20, 2.0, "max_seconds")
    assert drift == ["slowing down: the last third of the runs took 1.20 × the first third"]
    assert timing.doubts([1.2] * 20 + [1.0] * 40, 2.0, "max_seconds") == []  # getting faster is warming up


def test_uncertainty_shrinks_with_the_runs():
    spread = [1.0, 1.1] * 5
    assert timing._uncertainty(spread) == pytest.approx(0.05 / 1.05)
    few = timing._uncertainty([float(x) for x in range(100, 110)])
    many = timing._uncertainty([float(x) for x in np.linspace(100, 109, 1000)])
    assert many < few / 5
    assert timing._uncertainty([0.0, 0.0]) == 0


# --- JAX ------------------------------------------------------------------------------------------------------------


def test_a_jitted_function():
    traced = []

    @jax.jit
    def fn(x, y=None):
        traced.append(x)
        return jnp.outer(x, x) + y

    found = measure(fn, jnp.ones(256), y=2.0, **SHORT)
    assert len(traced) == 1  # compiled once, though compiling is timed apart
    assert found.compile_ms > 0
    assert found.runs >= 1
    assert found.peak_memory_bytes == 256 * 256 * 4
    assert found.cold_ms is None
    assert found.backward is None
    assert 0 < found.min_ms <= found.p10_ms <= found.median_ms <= found.p90_ms


@pytest.mark.parametrize("how", ["called", "compiled", "measured"])
def test_compiling_is_not_timed_if_it_was_done_before(how):
    fn = jax.jit(lambda x: jnp.outer(x, x) + 3)
    x, longer = jnp.ones(16), jnp.ones(17)
    if how == "called":
        fn(x)
    elif how == "compiled":
        fn.lower(x).compile()
    else:
        assert measure(fn, x, **SHORT).compile_ms > 0
    again = measure(fn, x, **SHORT)
    assert again.compile_ms is None
    assert again.to_json()["compile_ms"] is None
    assert again.peak_memory_bytes == 16 * 16 * 4
    assert measure(fn, longer, **SHORT).compile_ms > 0  # for this shape it is compiled


def test_listening_to_compilations_ends():
    with timing._compilations() as seen:
        pass
    with pytest.raises(ZeroDivisionError), timing._compilations() as failed:
        raise ZeroDivisionError
    jax.jit(lambda x: x - 5)(jnp.ones(5))
    assert seen == failed == []


def test_a_plain_function_of_jax_is_measured_as_it_is():
    calls = []
    found = measure(lambda x: calls.append(x) or jnp.sin(x), jnp.ones(8), **SHORT)
    assert len(calls) > found.runs >= 1
    assert found.compile_ms >= 0
    assert found.peak_memory_bytes >= 0


def test_the_backward_of_jax_is_the_pullback_of_the_floats():
    x, index = jnp.arange(1.0, 5.0), jnp.arange(4)
    options = {"scale": np.float32([2.0]), "name": "a", "none": None}

    def fn(x, index, *, options, power):
        assert options["name"] == "a"
        assert options["none"] is None
        return {"y": x[index] ** power * options["scale"], "largest": jnp.argmax(x)}

    keywords = {"options": options, "power": 3}
    backward, operands = pullback(fn, (x, index), keywords).prepare()
    ((scale_grad, x_grad),) = ([g for g in sorted(grads, key=lambda g: g.size)] for grads in backward(*operands))
    np.testing.assert_allclose(x_grad, 3 * x**2 * 2)
    np.testing.assert_allclose(scale_grad, [np.sum(x**3)])
    found = measure(fn, x, index, vjp=True, **SHORT, **keywords)
    assert found.backward.runs >= 1
    assert found.backward.compile_ms > 0
    assert found.backward.backward is None


def test_the_backward_of_a_jitted_function_with_static_arguments():
    fn = jax.jit(lambda x, mode: jnp.tanh(x) if mode == "tanh" else x, static_argnames="mode")
    found = measure(fn, jnp.ones((4, 4)), mode="tanh", vjp=True, **SHORT)
    assert found.backward.peak_memory_bytes >= 4 * 4 * 4


# --- torch ----------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_torch_on_a_cpu_forward_and_backward():
    torch = pytest.importorskip("torch")
    x, index = torch.arange(1.0, 5.0), torch.arange(4)
    backward, operands = pullback(lambda x, index: {"y": x[index] ** 3, "i": index}, (x, index), {}).prepare()
    (gradient,) = backward(*operands)
    assert torch.equal(gradient, 3 * x**2)
    assert not x.requires_grad
    found = measure(lambda x, index: x[index] ** 3, x, index, vjp=True, **SHORT)
    assert found.runs >= 1
    assert found.backward.runs >= 1
    assert found.cold_ms is None


@pytest.mark.torch
def test_a_torch_modules_parameters_take_part():
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(2, 3)
    backward, operands = pullback(layer, (torch.ones(1, 2),), {}).prepare()
    assert [tuple(g.shape) for g in backward(*operands)] == [(1, 2), (3, 2), (3,)]
    assert layer.weight.grad is None


@pytest.mark.torch
@pytest.mark.parametrize("missing", ["argument", "result"])
def test_a_torch_backward_needs_floats(missing):
    torch = pytest.importorskip("torch")
    x = torch.arange(3) if missing == "argument" else torch.ones(3)
    with pytest.raises(InvalidInputError, match=f"no floating-point {missing}"):
        measure(lambda x: x.argmax(), x, vjp=True, **SHORT)
    calls = []
    if missing == "result":  # nor does a result that is cut off, and that is seen before the timed runs
        with pytest.raises(InvalidInputError, match="no floating-point result"):
            measure(lambda x: calls.append(1) or x.detach() * 2, x, vjp=True)
        assert len(calls) == 2


# --- GPUs -----------------------------------------------------------------------------------------------------------

GPU = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", id=0, local_hardware_id=1)


def test_cold_is_what_a_run_adds_to_a_flush(monkeypatch, clock):
    flushed = []

    def flush():
        flushed.append(clock.calls)
        clock.seconds += 0.003

    monkeypatch.setattr(gpu, "_flusher", lambda where, device: flush)
    monkeypatch.setattr(bursts, "wait", lambda out, where: None)
    where = Places((), (GPU,))
    cold, problem = gpu.cold_ms(taking(clock, [4.0]), where, "run")
    assert (cold, problem) == (pytest.approx(4.0), ())
    assert len(flushed) > clock.calls > 0

    def full(where, device):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")

    monkeypatch.setattr(gpu, "_flusher", full)
    assert gpu.cold_ms(print, where, "run") == (None, ("cold caches not measured: RESOURCE_EXHAUSTED: out of memory",))
    assert gpu.cold_ms(print, Places((), (jax.devices()[0],)), "run") == (None, ())


def test_the_flush_writes_a_buffer(monkeypatch):
    monkeypatch.setattr(gpu, "FLUSH_BYTES", 32)
    device = jax.devices()[0]
    flush = gpu._flusher(Places((), (device,)), device)
    assert flush().tolist() == [2] * 8  # once when it was made


def nvml(bits, seen):
    module = types.ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetHandleByIndex = lambda index: seen.append(index)
    module.nvmlDeviceGetHandleByUUID = lambda name: seen.append(name)

    def reasons(handle):
        if bits is None:
            raise module.NVMLError
        return bits

    module.nvmlDeviceGetCurrentClocksThrottleReasons = reasons
    return module


@pytest.mark.parametrize(
    ("bits", "flags"),
    [(0, []), (0x1, []), (0x4 | 0x20, ["throttled: power cap, heat"]), (None, [])],
)
def test_throttling_is_flagged(monkeypatch, bits, flags):
    seen = []
    monkeypatch.setitem(sys.modules, "pynvml", nvml(bits, seen))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu.throttled(Places((), (GPU,))) == flags
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-1234")
    gpu.throttled(Places((), (GPU,)))
    gpu.throttled(Places((types.SimpleNamespace(type="cuda", index=0),), ()))
    assert seen == [1, "GPU-1234", 3]
    assert gpu.throttled(Places((), (jax.devices()[0],))) == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu.throttled(Places((), (GPU,))) == []


# --- ceilings -------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch):
    """Counts the measurements, and makes them instant."""
    count = itertools.count(1)

    def instant(device, info):
        return Ceilings(info.name, info.fingerprint, 1e9 * next(count), 2e9, {"float32": 3e9})

    monkeypatch.setattr(ceilings, "_measure", instant)
    return lambda: next(count) - 1


def kept():
    (path,) = (cache_directory() / "ceilings").iterdir()
    return path


def test_ceilings_are_measured_once_and_kept(measured, own_store):
    first = measure_ceilings()
    assert first == measure_ceilings()
    assert measured() == 1
    assert kept().parent == own_store / "ceilings"
    assert json.loads(kept().read_text()) == first.to_json()
    assert first.fingerprint == describe().fingerprint
    assert first.device == describe().name


def test_refresh_measures_again_and_replaces(measured):
    first, second = measure_ceilings(), measure_ceilings(refresh=True)
    assert (first.copy_bytes_per_s, second.copy_bytes_per_s) == (1e9, 2e9)
    assert measure_ceilings() == second
    with pytest.raises(TypeError):
        measure_ceilings(True)


def test_another_version_of_jax_is_another_entry(measured, monkeypatch):
    measure_ceilings()
    monkeypatch.setattr(jax, "__version__", "99")
    assert measure_ceilings().copy_bytes_per_s == 2e9


GOOD = {"copy_bytes_per_s": 1e9, "read_bytes_per_s": 2e9, "matmul_flops_per_s": {"float32": 3e9}}


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        "null",
        "\xff",
        "[" * 100_000,
        {"read_bytes_per_s": -1.0},
        {"copy_bytes_per_s": "fast"},
        {"matmul_flops_per_s": {}},
        {"matmul_flops_per_s": [1.0]},
        {"fingerprint": "another"},
        {"more": 1},
    ],
    ids=lambda damage: str(damage)[:30],
)
def test_a_damaged_entry_is_one_warning_and_measured_again(measured, damage):
    first = measure_ceilings()
    if isinstance(damage, dict):
        damage = json.dumps({"device": first.device, "fingerprint": first.fingerprint} | GOOD | damage)
    kept().write_text(damage, encoding="latin-1")
    with pytest.warns(UserWarning, match="cannot be used .* so they are measured again") as caught:
        again = measure_ceilings()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert again.copy_bytes_per_s == 2e9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measure_ceilings() == again  # it was replaced


def test_a_store_that_cannot_be_written_is_a_warning(measured, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be written") as caught:
        assert measure_ceilings().copy_bytes_per_s == 1e9
    assert len(caught) == 1


def test_ceilings_measured_for_real_at_a_small_size(monkeypatch):
    monkeypatch.setattr(ceilings, "SECONDS_EACH", 0.0)
    device = jax.devices()[0]
    assert ceilings._copy(device, 2**12) > 0
    assert ceilings._read_rate(device, 2**12) > 0
    assert ceilings._product(device, jnp.float32, "highest", 16) > 0


@pytest.mark.slow
def test_products_of_every_dtype_measured_for_real_at_a_small_size(monkeypatch):
    monkeypatch.setattr(ceilings, "SECONDS_EACH", 0.0)
    rates = ceilings._products(jax.devices()[0], describe(jax.devices()[0]), 64)
    assert set(rates) <= {"float32", "bfloat16", "float16"}
    assert rates["float32"] > 0
    assert jax.tree.all(jax.tree.map(lambda rate: isinstance(rate, float), rates))


def test_the_rates_count_what_is_moved_and_computed(monkeypatch):
    monkeypatch.setattr(ceilings, "_best_seconds", lambda call: jax.block_until_ready(call()) is not None and 2.0)
    device = jax.devices()[0]
    assert ceilings._copy(device, 1024) == 2 * 4 * 1024 / 2
    assert ceilings._read_rate(device, 1024) == 4 * 1024 / 2
    assert ceilings._product(device, jnp.float32, "highest", 16) == 2 * 16**3 / 2


def test_the_best_run_counts(clock):
    assert ceilings._best_seconds(taking(clock, [500.0, 500.0, 4.0, 2.0, 3.0])) == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("device", "names"),
    [
        ("nvidia-h200", {"float32", "bfloat16", "float16", "tensorfloat32"}),
        ("nvidia-t4", {"float32", "float16"}),
        ("tpu-v5e", {"float32", "bfloat16"}),
    ],
)
def test_dtypes_that_a_device_has(monkeypatch, device, names):
    def product(_, dtype, precision, size):
        slow = device == "nvidia-t4" and dtype is jnp.bfloat16
        return {"highest": 4e12, "default": 3e13}[precision] / (50 if slow else 1)

    monkeypatch.setattr(ceilings, "_product", product)
    rates = ceilings._products(None, describe(device), 1024)
    assert set(rates) == names
    assert rates["float32"] == 4e12
