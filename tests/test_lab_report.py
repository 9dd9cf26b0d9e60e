"""The lab's references, workloads, checks and timings."""

import dataclasses
import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from examples import all_examples

from ejkernel import kernel_registry
from ejkernel.lab import accuracy, peers, reference, report, speed, workloads
from ejkernel.lab.speed import Job
from ejkernel.utils.bursts import BurstTimes


@pytest.fixture
def instant(monkeypatch):
    """Times without timing: every implementation is called once and has 2 ms at best, 3 ms mostly, 9 ms sometimes."""

    def time_bursts(runners, **options):
        for call in runners.values():
            call()
        return dict.fromkeys(runners, BurstTimes((0.003, 0.002, 0.003, 0.003, 0.009, 0.009), 1))

    monkeypatch.setattr(speed, "time_bursts", time_bursts)


def test_the_reference_agrees_with_the_oracle():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, h, 8)) for n, h in ((9, 4), (13, 2), (13, 2)))
    bias = rng.standard_normal((1, 4, 9, 13))
    q_ids, kv_ids = np.repeat([[1, 2]], 2, 0).repeat([4, 5], 1), np.repeat([[1, 2]], 2, 0).repeat([5, 8], 1)
    calls = [
        {"causal": True, "sliding_window": (5, 1), "logits_soft_cap": 2.0, "softmax_aux": np.array([0.3, -1.0])},
        {"softmax_aux": rng.standard_normal((4, 2)), "bias": bias},
        {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids, "bias": bias},
    ]
    with jax.enable_x64(True):
        for options in calls:
            arrays = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
            statics = {n: x for n, x in arrays.items() if not isinstance(x, jax.Array)}
            traced = {n: x for n, x in arrays.items() if isinstance(x, jax.Array)}
            found = jax.jit(functools.partial(reference.attention, **statics))(*map(jnp.asarray, (q, k, v)), **traced)
            np.testing.assert_allclose(found, oracle.attention(q, k, v, **options)[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "recurrent"))  # its reference is a long unrolled loop
        for name in workloads.OPERATIONS
        if name not in ("flash_attention", "ring_attention")
    ],
)
def test_references_agree_with_the_test_suite_s(operation):
    """Two references, written apart, on the lab's own workloads."""
    theirs = next(x.reference for x in all_examples() if x.operation == operation)
    for workload in workloads.checks(operation):
        with jax.enable_x64(True):
            arrays = jax.tree.map(
                lambda x: jnp.asarray(x, "float64" if x.dtype == np.float32 else None), workload.arrays
            )
            ours = jax.jit(workload.reference)(arrays)
            other = jax.jit(lambda arrays, workload=workload: theirs(**arrays, **workload.options))(arrays)
            for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(other), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_every_operation_has_workloads():
    operations = {name for name in kernel_registry.list_algorithms() if kernel_registry.operation(name)}
    assert set(workloads.OPERATIONS) == operations == set(reference.REFERENCES)
    for name in operations:
        assert workloads.timed(name, 512, False).length == 512
        assert workloads.timed(name, 512, False).cost("float32").flops > 0
    with pytest.raises(ValueError, match="operation is 'flush'; expected one of flash_attention"):
        workloads.checks("flush")


CHECKS = [
    (operation, number) for operation in workloads.OPERATIONS for number in range(len(workloads.checks(operation)))
]
SHORT_CHECKS = [(operation, 0) for operation in ("flash_attention", "mean_pooling", "grouped_matmul")]


@pytest.mark.parametrize(("operation", "number"), [
    pytest.param(*case, marks=[pytest.mark.slow] * (case not in SHORT_CHECKS), id="{}-{}".format(*case))
    for case in CHECKS
])  # fmt: skip
def test_checks_pass(operation, number):
    plan = accuracy.check_plan([operation], "xla")
    assert [(job[0].name, *job[1:]) for job in plan] == [
        (workload.name, "xla", "float32") for workload in workloads.checks(operation)
    ]
    row = accuracy.check(*plan[number])
    assert row["passed"], row
    assert 0 < row["error"] < row["bound"]


def test_checks_can_fail(monkeypatch):
    exact = reference.REFERENCES["mean_pooling"]
    monkeypatch.setitem(
        reference.REFERENCES, "mean_pooling", lambda *a, **k: jax.tree.map(lambda x: 1.001 * x, exact(*a, **k))
    )
    row = accuracy.check(*accuracy.check_plan(["mean_pooling"])[0])
    assert not row["passed"]
    assert not row["refused"]
    assert row["reason"].startswith("too far: ")
    assert row["error"] == pytest.approx(0.001, rel=0.05)


def test_a_check_that_is_refused_or_crashes_is_a_row(monkeypatch):
    workload = workloads.checks("flash_attention")[0]
    row = accuracy.check(workload, "cudnn", "bfloat16")
    assert (row["passed"], row["refused"], row["error"]) == (False, True, None)
    assert "needs a GPU" in row["reason"]
    monkeypatch.setattr(workloads.Workload, "function", lambda self, platform=None: lambda arrays: 1 / 0)
    row = accuracy.check(workload, "xla", "float32")
    assert (row["passed"], row["refused"]) == (False, False)
    assert row["reason"] == "ZeroDivisionError: division by zero"


def test_relative_errors_see_what_is_not_finite():
    exact = {"out": (np.ones(3), np.zeros(2))}
    assert accuracy.relative_errors({"out": (np.ones(3), np.zeros(2))}, exact) == {"out": 0.0}
    assert accuracy.relative_errors({"out": (np.array([1, np.nan, 1]), np.zeros(2))}, exact) == {"out": math.inf}
    assert accuracy.relative_errors({"out": (np.ones(3), np.array([0, 3.0]))}, exact)["out"] == pytest.approx(3**0.5)


def test_kernels_are_listed_with_reasons():
    rows = report.kernels()
    assert {row["operation"] for row in rows} == set(workloads.OPERATIONS)
    assert all(row["reasons"] for row in rows)
    here = {(r["operation"], r["platform"]): r["runs"] for r in rows}
    assert here["flash_attention", "xla"]
    rows = report.kernels("nvidia-h200")
    on_h200 = {(r["operation"], r["platform"], r["backend"]): r for r in rows}
    assert len(on_h200) == len(rows)
    triton = on_h200["flash_attention", "triton", "gpu"]
    assert triton["runs"] or "install" in str(triton["reasons"])
    assert not on_h200["flash_attention", "pallas", "tpu"]["runs"]


def test_the_plan_of_timings():
    names = ("ejkernel", *peers.names("flash_attention"))
    plan = speed.bench_plan(["flash_attention", "mean_pooling"], (64, 128))
    assert plan[:4] == [
        Job("flash_attention", length, what, names) for length in (64, 128) for what in (speed.FORWARD, speed.BOTH)
    ]
    assert {job.operation for job in plan[4:]} == {"mean_pooling"}
    assert speed.bench_plan(["recurrent"], (8,), with_peers=False, pinned=True, backward=False) == [
        Job("recurrent", 8, speed.FORWARD, ("ejkernel", "ejkernel xla"))
    ]


SHORT_BENCHES = [("flash_attention", speed.FORWARD), *(("mean_pooling", what) for what in (speed.FORWARD, speed.BOTH))]


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize(("operation", "what"), [
    pytest.param(name, what, marks=[pytest.mark.slow] * ((name, what) not in SHORT_BENCHES), id=f"{name}, {what}")
    for name in workloads.OPERATIONS
    for what in (speed.FORWARD, speed.BOTH)
])  # fmt: skip
def test_timings_hold_the_error_of_every_peer_that_is_here(operation, what):
    cost = workloads.timed(operation, 128, False).cost("float32")
    flops = cost.flops + (cost.backward_flops if what == speed.BOTH else 0)
    names = ("ejkernel", *peers.names(operation))
    rows = speed.bench(Job(operation, 128, what, names))
    assert [row["implementation"] for row in rows] == [*names]
    for row in rows:
        assert bool(row["reason"]) == (row["ms"] is None), row
        if row["ms"] is None:
            assert row["implementation"] != "ejkernel"
            assert "installed" in row["reason"] or "needs a GPU" in row["reason"]
        else:
            assert row["tflops"] == pytest.approx(flops / 2e-3 / 1e12)
            assert (row["error"] is None) == (what == speed.BOTH)
            assert row["error"] is None or row["error"] < 1e-5
            assert (row["ms"], row["median_ms"], row["high_ms"]) == (2, 3, 9)
            assert "noisy: p90 is 3.0 × the median" in row["flags"]


def test_implementations_of_a_call_are_timed_together(monkeypatch):
    """And one that fails while it is timed is a row with the reason."""
    asked = {}

    def time_bursts(runners, **options):
        asked.update(options, names=[*runners])
        return {name: BurstTimes((0.002,), 1, MemoryError("full") if name == "jax.nn" else None) for name in runners}

    monkeypatch.setattr(speed, "time_bursts", time_bursts)
    names = ("ejkernel", "ejkernel xla", "jax.nn", "jax.nn cuDNN")
    rows = speed.bench(Job("flash_attention", 64, speed.FORWARD, names), seconds=0.5)
    assert asked["names"] == [*names[:3]]  # cuDNN needs a GPU
    assert asked["where"].keys() == {*names[:3]}  # each has been called for its error
    assert [row["ms"] for row in rows] == [2, 2, None, None]
    assert rows[2]["reason"] == "MemoryError: full"
    assert not asked["enough"]([0.1] * 4, 0.5)
    assert not asked["enough"]([0.1] * 5, 0.4)
    assert asked["enough"]([0.1] * 5, 0.5)


@pytest.mark.usefixtures("instant")
def test_a_peer_that_is_wrong_shows(monkeypatch):
    wrong = lambda workload: lambda x: x["query"]  # noqa: E731
    monkeypatch.setitem(peers._PEERS["flash_attention"], "jax.nn", (wrong, "jax"))
    (row,) = speed.bench(Job("flash_attention", 64, speed.FORWARD, ("jax.nn",)))
    assert row["error"] > 0.1


def test_a_call_that_fails_is_a_row(monkeypatch):
    def broken(workload):
        raise RuntimeError("no such luck\nand more")

    monkeypatch.setitem(peers._PEERS["flash_attention"], "jax.nn", (broken, "jax"))
    (row,) = speed.bench(Job("flash_attention", 64, speed.FORWARD, ("jax.nn",)))
    assert (row["ms"], row["reason"]) == (None, "RuntimeError: no such luck")


def test_roofline_points(monkeypatch):
    from ejkernel.lab.ceilings import Ceilings

    ceilings = Ceilings("cpu", "f", 2e10, 3e10, {"float32": 1e11})
    row = {"operation": "flash_attention", "what": speed.FORWARD, "length": 256, "implementation": "ejkernel",
           "ms": 1.0, "tflops": 0.05, "dtype": "float32"}  # fmt: skip
    longer = {**row, "length": 512, "tflops": 0.06}
    found = report.roofline([row, longer, {**row, "implementation": "jax.nn"}, {**row, "what": speed.BOTH}], ceilings)
    cost = workloads.timed("flash_attention", 512, False).cost("float32")
    assert found["points"] == [{"name": "flash_attention, 512", "intensity": cost.flops / cost.bytes, "tflops": 0.06}]
    assert found["ceilings"] == {
        "dtype": "float32",
        "tflops": 0.1,
        "tb_per_s": 0.03,
        "copy_tb_per_s": 0.02,
        "read_tb_per_s": 0.03,
    }
    assert found["peak"] is None
    # A point above the roof: that was measured on a busy machine, and is measured again.
    better = Ceilings("cpu", "f", 2e10, 3e10, {"float32": 2e11})
    monkeypatch.setattr(report, "measure_ceilings", lambda refresh=False: better if refresh else 1 / 0)
    assert report.roofline([{**row, "tflops": 0.15}], ceilings)["ceilings"]["tflops"] == 0.2


def test_collect_says_how_far_it_is(monkeypatch):
    monkeypatch.setattr(accuracy, "check", lambda *job: {"passed": True})
    monkeypatch.setattr(report, "bench", lambda job, seconds: [{"job": job, "seconds": seconds}])
    monkeypatch.setattr(report, "roofline", lambda timings: {"points": []})
    told = []
    result = report.collect(True, lambda *step: told.append(step))
    assert {"report_version", "machine", "kernels", "checks", "timings", "roofline"} == set(result)
    total = len(result["checks"]) + len(result["timings"]) + 1
    assert [done for _, done, _ in told] == list(range(total + 1))
    assert {t for *_, t in told} == {total}
    lengths = {row["job"].length for row in result["timings"] if row["job"].operation == "flash_attention"}
    assert lengths == {512, 1024, 2048}


def test_torch_is_not_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (row,) = speed.bench(Job("flash_attention", 64, speed.FORWARD, ("torch SDPA",)))
    assert row["reason"] == "torch is not installed"


def test_a_workload_says_little():
    text = repr(workloads.checks("flash_attention")[0])
    assert len(text) < 300
    assert dataclasses.is_dataclass(workloads.Workload)
