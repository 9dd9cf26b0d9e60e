"""The store of measurements: kept apart, kept whole, and never in the way."""

import json
import multiprocessing
import os
import stat
import threading
import warnings
from pathlib import Path

import filelock
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lanes import some

from ejkernel import (
    Backend,
    BwdParams,
    FwdParams,
    Platform,
    Support,
    autotune,
    explain,
    flash_attention,
    kernel_registry,
)
from ejkernel.contracts.params import params_class
from ejkernel.ops.config import autotune as tuner
from ejkernel.ops.config import chain, store
from ejkernel.utils.bursts import BurstTimes

X = jnp.ones((1, 32, 2, 16))
FLASH = "flash_attention"


def xla():
    """The implementation that runs everywhere."""
    return next(e for e in kernel_registry.list_implementations(FLASH) if e.platform is Platform.XLA)


def entries(directory):
    return sorted(Path(directory).rglob("*.json"))


def forget():
    """What a new process knows."""
    chain.forget()
    store._warned.clear()


@pytest.fixture
def timed(monkeypatch):
    """Every candidate that tuning times."""
    candidates = []
    original = tuner.time_bursts

    def time_bursts(runners, **options):
        candidates.extend(runners)
        return original(runners, rounds=1, **options)

    monkeypatch.setattr(tuner, "time_bursts", time_bursts)
    return candidates


@pytest.fixture
def two_parameters(monkeypatch):
    """A small space, for speed."""
    kernel = xla().kernel
    space = staticmethod(
        lambda shapes, spec, device, direction: [(FwdParams if direction == "forward" else BwdParams)(q_blocksize=16)]
    )
    monkeypatch.setattr(kernel, "space", space)


@pytest.mark.usefixtures("two_parameters")
def test_autotune_measures_once_and_keeps(own_store, timed):
    np.testing.assert_allclose(autotune(flash_attention)(X, X, X, causal=True), X, rtol=1e-6)
    assert len(timed) == 2
    assert len(entries(own_store)) == 1
    assert explain(FLASH, X, X, X, causal=True).chosen.source == "memory"
    forget()
    assert explain(FLASH, X, X, X, causal=True).chosen.source == "store"
    assert explain(FLASH, X, X, X, causal=False).chosen.source == "heuristic"
    autotune(flash_attention)(X, X, X, causal=True)
    assert len(timed) == 2


@pytest.mark.usefixtures("two_parameters")
def test_autotune_sees_through_jit_and_grad(own_store, timed):
    step = jax.jit(jax.grad(lambda x: flash_attention(x, x, x).sum()))
    expected = step(X)
    assert not timed
    np.testing.assert_allclose(autotune(step)(X), expected, rtol=1e-5, atol=1e-6)
    assert len(timed) == 4
    directions = {json.loads(path.read_text())["key"]["direction"] for path in entries(own_store)}
    assert directions == {"forward", "backward"}
    autotune(step)(X)
    assert len(timed) == 4


@pytest.mark.usefixtures("two_parameters")
def test_the_environment_asks_for_tuning_too(monkeypatch, timed):
    flash_attention(X, X, X)
    assert not timed
    monkeypatch.setenv("EJKERNEL_AUTOTUNE", "1")
    flash_attention(X, X, X)
    assert len(timed) == 2
    monkeypatch.setenv("EJKERNEL_AUTOTUNE", "0")
    flash_attention(X[:, :9], X[:, :9], X[:, :9])
    assert len(timed) == 2


@pytest.mark.usefixtures("two_parameters", "timed")
def test_calls_that_differ_are_kept_apart(own_store):
    calls = [X, X.astype(jnp.bfloat16), X[..., :8], X[:, :16], jnp.concatenate([X] * 2, 1)]
    for number, x in enumerate(calls, 1):
        autotune(flash_attention)(x, x, x)
        assert len(entries(own_store)) == number
    autotune(flash_attention)(X[:, :30], X[:, :30], X[:, :30])
    assert len(entries(own_store)) == len(calls), "30 and 32 share a bucket"


@pytest.mark.usefixtures("two_parameters")
def test_a_call_s_own_parameters_are_never_kept(own_store):
    autotune(flash_attention)(X, X, X, fwd_params=FwdParams(q_blocksize=5))
    (path,) = entries(own_store)
    assert json.loads(path.read_text())["value"]["params"].get("q_blocksize") != 5
    flash_attention(X, X, X, fwd_params=FwdParams(q_blocksize=6))
    assert entries(own_store) == [path]


def test_tuning_picks_the_implementation_with_its_parameters(own_store):
    """A kernel of higher priority that is slower loses once both are measured."""

    class Slow:
        version = 1

        def forward(self, arrays, spec, params):
            x = arrays["query"]
            wasted = jax.lax.fori_loop(0, 30, lambda i, y: jnp.sin(y @ y), jnp.ones((400, 400)))
            return x + 0 * wasted[0, 0], jnp.zeros((x.shape[0], x.shape[2], x.shape[1]))

    slow = kernel_registry.register(FLASH, Platform.CUDA, Backend.CPU, support=Support.everything(), priority=50)(
        Slow()
    )
    try:
        assert explain(FLASH, X, X, X).chosen.platform is Platform.CUDA
        autotune(flash_attention)(X, X, X)
        explanation = explain(FLASH, X, X, X)
        assert explanation.chosen.platform is Platform.XLA
        assert "x, measured" in str(explanation)
        assert len(entries(own_store)) == 2
        Slow.version = 2
        forget()
        assert explain(FLASH, X, X, X).chosen.platform is Platform.XLA
    finally:
        kernel_registry.unregister(slow)


def test_a_candidate_that_fails_is_passed_over():
    class Broken:
        def forward(self, arrays, spec, params):
            raise RuntimeError("out of shared memory")

    broken = kernel_registry.register(FLASH, Platform.CUDA, Backend.CPU, support=Support.everything(), priority=50)(
        Broken()
    )
    try:
        with pytest.warns(UserWarning, match="cuda cpu .* failed while tuning: out of shared memory"):
            out = autotune(flash_attention)(X, X, X)
        np.testing.assert_allclose(out, X, rtol=1e-6)
    finally:
        kernel_registry.unregister(broken)


def test_candidates_are_compiled_side_by_side_and_timed_alone(monkeypatch):
    """Each waits for the other to be traced; those that fail are warned of in order."""
    monkeypatch.setattr(tuner.os, "cpu_count", lambda: 4)
    both, compiling = threading.Barrier(2, timeout=60), []
    original = tuner.time_bursts

    def alone(runners, **options):
        compiling.extend(t for t in threading.enumerate() if t.name.startswith("ejkernel-compile"))
        return original(runners, **options)

    class Pair:
        @staticmethod
        def space(shapes, spec, device, direction):
            return [FwdParams(q_blocksize=16), FwdParams(q_blocksize=32)]

        @staticmethod
        def defaults(shapes, spec, device, direction):
            return FwdParams(q_blocksize=16)

        def forward(self, arrays, spec, params):
            if threading.current_thread().name.startswith("ejkernel-compile"):
                both.wait()
            if params.q_blocksize == 32:
                raise RuntimeError("out of shared memory")
            q = arrays["query"]
            return q, jnp.zeros((q.shape[0], q.shape[2], q.shape[1]))

    monkeypatch.setattr(tuner, "time_bursts", alone)
    pair = kernel_registry.register(FLASH, Platform.CUDA, Backend.CPU, support=Support.everything(), priority=50)(
        Pair()
    )
    try:
        with pytest.warns(UserWarning, match="with q_blocksize=32 failed while tuning: out of shared memory"):
            autotune(flash_attention)(X, X, X, platform="cuda")
        chosen = explain(FLASH, X, X, X, platform="cuda").chosen
        assert (chosen.source, chosen.params.q_blocksize) == ("memory", 16)
        assert not compiling
    finally:
        kernel_registry.unregister(pair)


# Damage

DAMAGE = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "binary": lambda text: b"\xff\xfe\x00",
    "another format": lambda text: json.dumps({**json.loads(text), "format": 99}),
    "a list": lambda text: "[1, 2]",
    "no value": lambda text: json.dumps({**json.loads(text), "value": None}),
    "unknown parameter": lambda text: json.dumps(
        {**json.loads(text), "value": {"params": {"blocks": 3}, "seconds": 1.0}}
    ),
    "negative parameter": lambda text: json.dumps(
        {**json.loads(text), "value": {"params": {"q_blocksize": -3}, "seconds": 1.0}}
    ),
    "no time": lambda text: json.dumps({**json.loads(text), "value": {"params": {}, "seconds": None}}),
    "infinite time": lambda text: text.replace('"seconds": ', '"seconds": Infinity, "old": '),
    "another call's": lambda text: text.replace("float32", "float64"),
}


@pytest.mark.usefixtures("two_parameters")
@pytest.mark.parametrize("damage", some(DAMAGE, "truncated", "binary", "negative parameter", "another call's"))
def test_a_damaged_entry_costs_one_warning(own_store, damage):
    autotune(flash_attention)(X, X, X)
    (path,) = entries(own_store)
    damaged = DAMAGE[damage](path.read_text())
    path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    forget()
    with pytest.warns(UserWarning, match=path.name) as caught:
        np.testing.assert_allclose(flash_attention(X, X, X), X, rtol=1e-6)
        flash_attention(X, X, X)
        assert explain(FLASH, X, X, X).chosen.source == "heuristic"
    assert len(caught) == 1
    autotune(flash_attention)(X, X, X)
    forget()
    assert explain(FLASH, X, X, X).chosen.source == "store", "tuning mends it"


@pytest.mark.usefixtures("two_parameters")
@pytest.mark.parametrize("trouble", ["a file in its place", "read-only", "full"])
def test_a_store_that_cannot_be_written_costs_a_warning(own_store, trouble, monkeypatch, timed):
    if trouble == "a file in its place":
        own_store.write_text("not a directory")
    elif trouble == "read-only":
        own_store.mkdir()
        own_store.chmod(stat.S_IRUSR | stat.S_IXUSR)
        if os.access(own_store, os.W_OK):  # the superuser may write anywhere
            monkeypatch.setattr(
                store.tempfile, "mkstemp", lambda **_: (_ for _ in ()).throw(PermissionError("read-only"))
            )
    else:
        monkeypatch.setattr(store.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.warns(UserWarning, match="cannot be written") as caught:
        np.testing.assert_allclose(autotune(flash_attention)(X, X, X), X, rtol=1e-6)
        autotune(jax.grad(lambda x: flash_attention(x, x, x).sum()))(X)
    assert len([w for w in caught if "written" in str(w.message)]) == 1
    assert explain(FLASH, X, X, X).chosen.source == "memory"
    measured = len(timed)
    autotune(flash_attention)(X, X, X)
    assert len(timed) == measured
    if own_store.is_dir():
        own_store.chmod(stat.S_IRWXU)
        assert not list(own_store.rglob("*.part")), "nothing half-written stays"


# Concurrency


def _tune(directory, number, barrier):
    os.environ["EJKERNEL_CACHE_DIR"] = directory
    key = {"operation": FLASH, "direction": "forward", "call": {"q_len": 32}, "device": "test"}
    barrier.wait()
    for round_ in range(20):
        value = {"params": {"q_blocksize": 16 + number}, "seconds": 1.0 + round_}
        assert store.write(key, value)
        read = store.read(key)
        assert read is not None
        assert read["params"]["q_blocksize"] in range(16, 24)


def test_eight_processes_leave_valid_entries(own_store):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(8)
    workers = [context.Process(target=_tune, args=(str(own_store), i, barrier)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 8
    (path,) = entries(own_store)
    assert json.loads(path.read_text())["value"]["seconds"] == 20.0
    assert not list(Path(own_store).rglob("*.part"))


@pytest.mark.usefixtures("two_parameters")
def test_threads_share_what_was_measured(own_store, timed):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: autotune(flash_attention)(X, X, X), range(4)))
    for result in results:
        np.testing.assert_allclose(result, X, rtol=1e-6)
    assert len(entries(own_store)) == 1


def test_a_writer_waits_for_the_lock(own_store, monkeypatch):
    """And gives up with a warning, so that no call waits for ever for a process that hangs."""
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.05)
    key = {"operation": FLASH, "direction": "forward", "call": {"q_len": 32}, "device": "test"}
    value = {"params": {"q_blocksize": 16}, "seconds": 1.0}
    assert store.write(key, value)
    (lock,) = own_store.rglob(".lock")
    with filelock.FileLock(lock), pytest.warns(UserWarning, match="cannot be written"):
        assert not store.write(key, {**value, "seconds": 2.0})
    assert store.read(key)["seconds"] == 1.0


@pytest.mark.parametrize("faster", [0, 1])
@pytest.mark.usefixtures("two_parameters")
def test_the_fastest_parameters_are_kept(monkeypatch, faster):
    def time_bursts(runners, **_):
        return {name: BurstTimes((1.0 - 0.5 * (i == faster),), calls=1) for i, name in enumerate(runners)}

    monkeypatch.setattr(tuner, "time_bursts", time_bursts)
    autotune(flash_attention)(X, X, X)
    chosen = explain(FLASH, X, X, X).chosen
    assert (chosen.source, chosen.params.q_blocksize) == ("memory", 16 if faster else 32)


def bucket_of(*args, **kwargs):
    operation = kernel_registry.operation(FLASH)
    arguments = operation.signature.bind(*args, **kwargs)
    arguments.apply_defaults()
    return json.loads(json.dumps(dict(operation.bound(dict(arguments.arguments))[0].bucket)))


@pytest.fixture
def ship(tmp_path, monkeypatch):
    """Puts a table of (implementation, bucket, parameters, seconds) in the place of the package's."""

    def put(rows):
        rows = [
            {"direction": "forward", "implementation": entry.name, "version": entry.version, "call": bucket,
             "params": params, "seconds": seconds}
            for entry, bucket, params, seconds in rows
        ]  # fmt: skip
        folder = tmp_path / "ejkernel" / "tuned" / "nvidia-h200"
        folder.mkdir(parents=True)
        (folder / f"{FLASH}.json").write_text(json.dumps({"entries": rows}))
        found = chain.resources.files
        # Others look for files of theirs, once, and keep what they find.
        monkeypatch.setattr(
            chain.resources, "files", lambda package: tmp_path / package if package == "ejkernel" else found(package)
        )
        chain.forget()

    return put


def test_shipped_tables_serve_the_nearest_length(ship):
    x = jax.ShapeDtypeStruct((1, 1000, 2, 16), jnp.float32)
    bucket = bucket_of(x, x, x)
    ship(
        (xla(), {**bucket, "q_len": length, "kv_len": length}, {"q_blocksize": block}, 1.0)
        for length, block in ((256, 32), (2048, 64), (8192, 96))
    )
    chosen = explain(FLASH, x, x, x, platform="xla", device="nvidia-h200").chosen
    assert (chosen.source, chosen.params.q_blocksize) == ("shipped", 64)
    assert explain(FLASH, x, x, x, platform="xla", device="nvidia-h100").chosen.source == "shipped"
    assert explain(FLASH, x, x, x, platform="xla", device="nvidia-a100").chosen.source == "heuristic"
    half = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    assert explain(FLASH, half, half, half, platform="xla", device="nvidia-h200").chosen.source == "heuristic"


def test_shipped_rows_of_another_version_are_not_used(ship, monkeypatch):
    x = jax.ShapeDtypeStruct((1, 1024, 2, 16), jnp.float32)
    ship([(xla(), bucket_of(x, x, x), {"q_blocksize": 64}, 1.0)])
    assert explain(FLASH, x, x, x, platform="xla", device="nvidia-h200").chosen.source == "shipped"
    monkeypatch.setattr(xla().kernel, "version", xla().version + 1)
    chain.forget()
    assert explain(FLASH, x, x, x, platform="xla", device="nvidia-h200").chosen.source == "heuristic"


def test_shipped_tables_give_way_to_kernels_they_do_not_know(ship):
    q, kv = (jax.ShapeDtypeStruct((1, 8192, heads, 128), jnp.bfloat16) for heads in (32, 8))
    bucket = bucket_of(q, kv, kv, causal=True)
    ship((entry, bucket, {}, 1.0 + (entry != xla())) for entry in kernel_registry.list_implementations(FLASH))
    explanation = explain(FLASH, q, kv, kv, causal=True, device="nvidia-h200")
    assert (explanation.chosen.platform, explanation.chosen.source) == (Platform.XLA, "shipped")

    def mine(query, key, value, **options):
        return query

    for priority, platform in ((-1, Platform.XLA), (50, Platform.CUDA)):
        kernel_registry.register(FLASH, Platform.CUDA, Backend.GPU, support=Support.everything(), priority=priority)(
            mine
        )
        assert explain(FLASH, q, kv, kv, causal=True, device="nvidia-h200").chosen.platform is platform
    kernel_registry.unregister(mine)


def test_what_is_shipped_is_valid():
    shipped = entries(Path(chain.__file__).parents[2] / "tuned")
    assert shipped
    for path in shipped:
        for row in json.loads(path.read_text())["entries"]:
            assert row["seconds"] > 0
            params_class(row["direction"])(**row["params"])


def test_autotune_takes_a_function():
    from ejkernel import InvalidInputError, target

    with pytest.raises(InvalidInputError, match="autotune takes a function"):
        autotune(X)
    with target("nvidia-h200"), pytest.raises(InvalidInputError, match="cannot measure for nvidia-h200"):
        autotune(flash_attention)(X, X, X)


def test_no_warning_without_a_cause(recwarn):
    warnings.simplefilter("always")
    flash_attention(X, X, X)
    assert not [w for w in recwarn if "ejkernel" in str(w.message)]


@pytest.mark.usefixtures("two_parameters")
def test_another_directory_is_another_store(own_store, monkeypatch, timed):
    autotune(flash_attention)(X, X, X)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(own_store.parent / "second"))
    assert explain(FLASH, X, X, X).chosen.source == "heuristic"
    autotune(flash_attention)(X, X, X)
    assert len(timed) == 4
    assert len(entries(own_store.parent / "second")) == 1


def test_neither_arguments_nor_overlays_are_kept(own_store):
    """Also of a kernel that proposes nothing itself."""
    from ejkernel import overlay

    class Bare:
        def forward(self, arrays, spec, params):
            q = arrays["query"]
            return q, jnp.zeros((q.shape[0], q.shape[2], q.shape[1])) + (params.num_key_splits or 0)

        def backward(self, arrays, spec, params, *rest):
            return {name: arrays[name] for name in ("query", "key", "value")}

    bare = kernel_registry.register(FLASH, Platform.CUDA, Backend.CPU, support=Support.everything(), priority=50)(
        Bare()
    )
    try:
        with overlay(flash_attention=FwdParams(kv_blocksize=11)):
            autotune(jax.grad(lambda x: flash_attention(x, x, x, fwd_params=FwdParams(q_blocksize=13)).sum()))(X)
        kept = [json.loads(path.read_text()) for path in entries(own_store)]
        bares = [e for e in kept if "Bare" in e["key"]["implementation"]]
        assert {e["key"]["direction"] for e in bares} == {"forward", "backward"}
        assert all(e["value"]["params"] == {} for e in bares)
        assert all(11 not in e["value"]["params"].values() and 13 not in e["value"]["params"].values() for e in kept)
    finally:
        kernel_registry.unregister(bare)


def test_the_environment_does_not_tune_what_is_not_here(monkeypatch):
    from ejkernel import target

    monkeypatch.setenv("EJKERNEL_AUTOTUNE", "1")
    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert explain(FLASH, x, x, x, device="nvidia-h200").chosen.source == "heuristic"
    with target("tpu-v5e"):
        assert explain(FLASH, x, x, x).chosen.source == "heuristic"


@pytest.mark.usefixtures("two_parameters", "timed")
def test_a_new_version_of_a_kernel_is_not_measured_yet(monkeypatch):
    autotune(flash_attention)(X, X, X)
    assert explain(FLASH, X, X, X).chosen.source == "memory"
    monkeypatch.setattr(xla().kernel, "version", xla().version + 1)
    chain.forget()
    assert explain(FLASH, X, X, X).chosen.source == "heuristic"
