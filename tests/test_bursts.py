"""The timing policy, with runners, devices and a clock that the tests hold."""

import random
import subprocess
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from ejkernel.utils import bursts
from ejkernel.utils.bursts import BurstTimes, Places, places, repeat, time_bursts


class Device(NamedTuple):
    platform: str
    id: int = 0


GPU, CPU = Device("gpu"), Device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """Time that only runners and pauses spend; ``log`` tells of calls, waits and pauses."""
    clock = types.SimpleNamespace(seconds=0.0, log=[])

    def sleep(seconds):
        clock.log.append(f"pause {seconds}")
        clock.seconds += seconds

    monkeypatch.setattr(bursts, "time", types.SimpleNamespace(perf_counter=lambda: clock.seconds, sleep=sleep))
    return clock


class Output:
    """An array on a device, computed at once, that tells when it is waited for."""

    def __init__(self, clock, name, device):
        self.clock, self.name = clock, name
        self.sharding = types.SimpleNamespace(device_set={device})

    def block_until_ready(self):
        self.clock.log.append(f"wait {self.name}")
        return self


def runner(clock, name, *durations, device=CPU):
    """A runner whose calls take these seconds, the last of them for ever."""
    left = list(durations)

    def call():
        clock.log.append(name)
        clock.seconds += left.pop(0) if len(left) > 1 else left[0]
        return Output(clock, name, device)

    return call


# --- order and pauses -----------------------------------------------------------------------------------------------


def order_of(clock, seed, rounds=8):
    """In which order runners of 1 s had their bursts."""
    names = ["a", "b", "c", "d"]
    order = []
    time_bursts({name: runner(clock, name, 1.0) for name in names}, rounds=rounds, seed=seed, before=order.append)
    assert [sorted(order[i : i + 4]) for i in range(0, len(order), 4)] == [names] * rounds
    return order


def test_the_order_is_random_but_seeded(clock):
    order = order_of(clock, 0)
    assert order == order_of(clock, 0)
    assert order != order_of(clock, 1)
    assert len({tuple(order[i : i + 4]) for i in range(0, len(order), 4)}) > 1  # another in other rounds
    state = random.getstate()
    order_of(clock, 2)
    assert random.getstate() == state  # the process's own random numbers are not touched


def test_a_burst_on_an_accelerator_comes_after_a_pause_and_an_uncounted_call(clock):
    calls = {name: runner(clock, name, 0.005, device=GPU) for name in "ab"}
    times = time_bursts(calls, rounds=2, before=lambda name: clock.log.clear())
    assert [times[name].calls for name in "ab"] == [4, 4]  # 15 ms, and a tenth
    last = "a" if clock.log[1] == "a" else "b"
    assert clock.log == [f"pause {bursts.PAUSE}", last, f"wait {last}", last, last, last, last, f"wait {last}"]
    assert all(times[name].seconds == pytest.approx((0.005, 0.005)) for name in "ab")


def test_on_a_cpu_there_is_no_pause_and_each_call_is_waited_for(clock):
    times = time_bursts({name: runner(clock, name, 0.00005) for name in "ab"}, rounds=3)
    assert not [line for line in clock.log if line.startswith("pause")]
    assert times["a"].calls == 5  # 0.2 ms, and a tenth
    assert all(clock.log[i + 1] == f"wait {name}" for i, name in enumerate(clock.log) if name in ("a", "b"))
    assert len(clock.log) == 2 * (clock.log.count("a") + clock.log.count("b"))


def test_a_pause_can_be_asked_for_on_a_cpu(clock):
    time_bursts({"a": runner(clock, "a", 1.0)}, rounds=2, pause=0.3)
    assert clock.log == ["a", "wait a"] * 2 + ["pause 0.3", "a", "wait a", "a", "wait a"] * 2


def test_a_runner_by_itself_on_a_cpu_has_no_uncounted_calls(clock):
    time_bursts({"a": runner(clock, "a", 1.0)}, rounds=3)
    assert clock.log.count("a") == 1 + 1 + 3  # warming up, finding the size of a burst, and the bursts


def test_a_runner_that_has_been_called_is_not_warmed_up_again(clock):
    time_bursts({"a": runner(clock, "a", 1.0)}, rounds=1, where={"a": Places((), (CPU,))})
    assert clock.log.count("a") == 1 + 1


# --- the size of a burst --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "seconds", "calls"),
    [(GPU, 0.0001, 165), (GPU, 0.02, 1), (GPU, 0.0, 4096), (CPU, 0.00001, 22), (CPU, 0.0003, 1), (CPU, 0.0, 4096)],
)
def test_a_burst_is_long_enough(clock, device, seconds, calls):
    found = time_bursts({"a": runner(clock, "a", 9.0, seconds, device=device)}, rounds=1)["a"]
    assert found.calls == pytest.approx(calls, abs=1)
    assert found.seconds == pytest.approx((seconds,))


def test_the_way_to_a_device_and_back_does_not_count(clock):
    """Every wait takes 0.1 ms, a call 0.01 ms."""

    class Distant(Output):
        def block_until_ready(self):
            clock.seconds += 1e-4
            return self

    def call():
        clock.seconds += 1e-5
        return Distant(clock, "a", GPU)

    assert time_bursts({"a": call}, rounds=1)["a"].best == pytest.approx(1e-5, rel=0.02)


# --- how many bursts ------------------------------------------------------------------------------------------------


def test_best_and_median_are_those_of_the_bursts(clock):
    found = time_bursts({"a": runner(clock, "a", 100.0, 50.0, 4.0, 9.0, 2.0, 3.0, 8.0)}, rounds=5)["a"]
    assert found.seconds == pytest.approx((4.0, 9.0, 2.0, 3.0, 8.0))  # without the first calls
    assert (found.best, found.median) == pytest.approx((2.0, 4.0))
    assert BurstTimes((1.0, 2.0), 1).median == 1.5


def test_a_slow_runner_has_fewer_bursts_but_one_at_least(clock):
    times = time_bursts(
        {
            "slow": runner(clock, "slow", 5.0),
            "middle": runner(clock, "middle", 0.4),
            "fast": runner(clock, "fast", 0.1),
        },
        rounds=6,
        seconds=1.0,
    )
    assert {name: len(found.seconds) for name, found in times.items()} == {"slow": 1, "middle": 3, "fast": 6}
    assert [*times] == ["slow", "middle", "fast"]


def test_a_runner_may_have_enough(clock):
    asked = []

    def enough(times, spent):
        asked.append((list(times), spent))
        return len(times) == 2

    times = time_bursts({"a": runner(clock, "a", 1.0)}, rounds=9, enough=enough)
    assert len(times["a"].seconds) == 2
    assert asked == [([1.0], 1.0), ([1.0, 1.0], 2.0)]


def test_nothing_to_time_is_nothing():
    assert time_bursts({}) == {}


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", [1, 2, 4])  # when warmed up, when sized, in a burst
def test_a_runner_that_fails_is_reported_and_the_others_go_on(clock, fails_at):
    error = RuntimeError("out of shared memory")
    calls = []

    def failing():
        calls.append(1)
        if len(calls) == fails_at:
            raise error
        clock.seconds += 1.0

    runners = {"good": runner(clock, "good", 1.0), "bad": failing, "also good": runner(clock, "also good", 2.0)}
    times = time_bursts(runners, rounds=4)
    assert len(calls) == fails_at  # never called again
    assert times["bad"].error is error
    assert error.__notes__[0].startswith("raised in ")
    assert [times[name].best for name in ("good", "also good")] == [1.0, 2.0]
    assert [len(times[name].seconds) for name in ("good", "also good")] == [4, 4]
    assert times["good"].error is None
    for ask in ("best", "median"):
        with pytest.raises(RuntimeError, match="out of shared memory"):
            getattr(times["bad"], ask)


def test_what_is_called_before_a_burst_may_end_it_all(clock):
    class Stopped(Exception):
        pass

    def stop(name):
        raise Stopped

    with pytest.raises(Stopped):
        time_bursts({"a": runner(clock, "a", 1.0)}, before=stop)


def test_a_repeated_call_that_fails_tells_which():
    counts = iter([1, 1, 0])
    with pytest.raises(ZeroDivisionError) as caught:
        repeat(lambda: 1 / next(counts), 5, "run", None)
    assert caught.value.__notes__ == ["raised in run 3 of 5"]


# --- places ---------------------------------------------------------------------------------------------------------


def test_calls_are_queued_on_accelerators_alone():
    assert Places((), (GPU,)).queued
    assert Places(("cuda:0",), ()).queued
    assert not Places((), (CPU, GPU)).queued
    assert not Places((), ()).queued
    assert not Places(("cuda:0",), (), unknown=True).queued


def test_where_values_live():
    assert places(jnp.ones(2), {"a": (jnp.ones(2), None)}) == Places((), (jax.devices()[0],))
    assert places(3, "a", None) == Places((), ())
    assert places(types.SimpleNamespace(block_until_ready=lambda: None)) == Places((), (), unknown=True)
    donated = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    assert donated.is_deleted()
    assert places(donated).jax == (jax.devices()[0],)


# --- the module -----------------------------------------------------------------------------------------------------


def test_the_file_can_be_loaded_without_the_package(tmp_path):
    """As the benchmarks do where `ejkernel` is another release."""
    (tmp_path / "ejkernel.py").write_text("raise ImportError('another release')")
    script = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("bursts", {bursts.__file__!r})
sys.modules["bursts"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.time_bursts({{"a": lambda: None}}, rounds=2)["a"].best >= 0, "torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout == "True False\n", result.stderr
