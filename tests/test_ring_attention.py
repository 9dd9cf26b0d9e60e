"""ring_attention: over 4 and 8 devices of one process; `test_ring_processes.py` has several processes."""

import functools
import itertools
import re
from collections import Counter

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import runnable
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tolerances import assert_close

import ejkernel
from ejkernel import (
    InvalidInputError,
    Support,
    UnsupportedError,
    flash_attention,
    kernel_registry,
    ring_attention,
    ring_shard,
    ring_unshard,
)

IMPLEMENTATIONS = runnable("ring_attention")
slow = pytest.mark.slow


def ring_of(n, name="ring"):
    return jax.make_mesh((n,), (name,), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


def make(
    dtype="float32", *, batch=1, length=32, heads=2, kv_heads=2, dim=8, value_dim=8, segments=False, sinks=False, seed=0
):
    rng = np.random.default_rng(seed)
    arrays = {
        "query": rng.standard_normal((batch, length, heads, dim)),
        "key": rng.standard_normal((batch, length, kv_heads, dim)),
        "value": rng.standard_normal((batch, length, kv_heads, value_dim)),
    }
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    if segments:
        ids = jnp.asarray(np.sort(rng.integers(0, 4, (batch, length)), -1), jnp.int32)
        arrays |= {"q_segment_ids": ids, "kv_segment_ids": ids}
    if sinks:
        arrays["softmax_aux"] = jnp.asarray(
            rng.standard_normal((heads, 2)), "float64" if dtype == "float64" else "float32"
        )
    return arrays


def whole(arrays, n, layout="contiguous", **statics):
    """The ring on arrays in their natural order."""
    spread = {name: x if name == "softmax_aux" else ring_shard(x, n, layout) for name, x in arrays.items()}
    return ring_unshard(ring_attention(**spread, layout=layout, mesh=ring_of(n), **statics), n, layout)


def check(entry, n, layout, dtype="float32", *, sizes=None, **statics):
    """Values and every gradient against float64."""
    arrays = make(dtype, **(sizes or {}))
    floats = {name: arrays[name] for name in ("query", "key", "value", "softmax_aux") if name in arrays}

    shape = (*arrays["query"].shape[:3], arrays["value"].shape[3])
    dout = jnp.asarray(np.random.default_rng(1).standard_normal(shape), dtype)

    @jax.jit
    def both(floats, dout):
        def run(floats):
            return whole({**arrays, **floats}, n, layout, platform=entry.platform, **statics)

        out, pull = jax.vjp(run, floats)
        return out, pull(dout)[0]

    out, grads = both(floats, dout)
    statics.setdefault("causal", True)
    known = {name: np.asarray(x) for name, x in arrays.items()}
    expected, _, expected_grads = oracle.attention(**known, **statics, dout=np.asarray(dout))
    assert out.dtype == dtype
    assert_close(out, expected, dtype)
    for name in floats:
        assert grads[name].dtype == arrays[name].dtype
        assert_close(grads[name], expected_grads[name], dtype, gradient=True, what=name)


CALLS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"sliding_window": (11, 0)},
    "two_sided_window": {"causal": False, "sliding_window": (3, 9)},
    "everything": {
        "sliding_window": (17, None),
        "logits_soft_cap": 2.0,
        "softmax_scale": 0.4,
        "sizes": {"heads": 4, "value_dim": 12, "batch": 2, "segments": True, "sinks": True},
    },
    "packed": {"sizes": {"segments": True, "sinks": True, "heads": 4}},
}


SHORT = {("causal", "contiguous"), ("causal", "zigzag"), ("full", "contiguous"), ("everything", "zigzag")}


@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("call", "layout"),
    [
        pytest.param(*which, marks=() if which in SHORT else slow)
        for which in itertools.product(CALLS, ("contiguous", "zigzag"))
    ],
)
def test_values_and_gradients(entry, layout, call):
    check(entry, 4, layout, **CALLS[call])


@slow
@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize(("n", "layout", "call"), [(8, "zigzag", "causal"), (8, "contiguous", "window"), (2, "zigzag", "everything"),
                                                  (1, "contiguous", "everything"), (3, "zigzag", "full")])  # fmt: skip
def test_rings_of_other_sizes(entry, n, layout, call):
    sizes = {"length": 48, **CALLS[call].get("sizes", {})}
    check(entry, n, layout, **{**CALLS[call], "sizes": sizes})


@slow
@pytest.mark.parametrize("entry", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(entry, dtype, request):
    if dtype == "float64":
        request.getfixturevalue("x64")
    check(entry, 4, "zigzag", dtype, sizes={"sinks": True, "heads": 4})


@slow
@settings(max_examples=6)
@given(
    n=st.sampled_from([2, 4]),
    layout=st.sampled_from(["contiguous", "zigzag"]),
    causal=st.booleans(),
    window=st.tuples(st.none() | st.integers(0, 30), st.none() | st.integers(0, 30)),
    segments=st.booleans(),
)
def test_any_call(n, layout, causal, window, segments):
    arrays = make(length=24, segments=segments)
    actual = whole(arrays, n, layout, causal=causal, sliding_window=window)
    known = {name: np.asarray(x) for name, x in arrays.items()}
    assert_close(actual, oracle.attention(**known, causal=causal, sliding_window=window)[0], "float32")


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=slow)])
def test_inside_shard_map(check_vma):
    """As a model calls it, beside a second axis of the mesh, with and without the check of varying axes."""
    mesh = jax.make_mesh((2, 4), ("data", "ring"), axis_types=(AxisType.Auto,) * 2)
    arrays = make(batch=2, sinks=True)
    spec = P("data", "ring")
    specs = {name: P() if name == "softmax_aux" else spec for name in arrays}

    def loss(arrays):
        run = jax.shard_map(
            lambda a: ring_attention(**a), mesh=mesh, in_specs=(specs,), out_specs=spec, check_vma=check_vma
        )
        return (run(arrays) ** 2).sum()

    expected = gradients_of_flash(arrays)
    grads = jax.jit(jax.grad(loss))(arrays)
    for name in arrays:
        assert_close(grads[name], expected[name], "float32", gradient=True, what=name)


@jax.jit
def gradients_of_flash(arrays):
    return jax.grad(lambda arrays: (flash_attention(**arrays, causal=True) ** 2).sum())(arrays)


KINDS = [pytest.param(AxisType.Auto, marks=slow), AxisType.Explicit]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_with_other_axes(kind):
    arrays = make(batch=2)
    mesh = jax.make_mesh((2, 4), ("data", "ring"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        grads = jax.jit(jax.grad(lambda a: (ring_attention(**a, mesh=mesh) ** 2).sum()))(arrays)
    assert_close(grads["key"], gradients_of_flash(arrays)["key"], "float32", gradient=True)


@slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_spread_over_a_mesh_or_not(kind):
    arrays = make(batch=2)
    expected = flash_attention(**arrays, causal=True)
    mesh = jax.make_mesh((2, 4), ("data", "ring"), axis_types=(kind,) * 2)
    spread = {n: jax.device_put(x, NamedSharding(mesh, P("data", "ring"))) for n, x in arrays.items()}
    with jax.set_mesh(mesh):
        assert_close(ring_attention(**spread, mesh=mesh), expected, "float32")
        assert_close(jax.jit(lambda a: ring_attention(**a, mesh=mesh))(spread), expected, "float32")
    assert_close(ring_attention(**arrays, mesh=mesh), expected, "float32")


@slow
def test_a_ring_over_two_axes():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    arrays = make()
    out = ring_attention(**arrays, axis_name=("a", "b"), mesh=mesh, sliding_window=(9, 0))
    assert_close(out, flash_attention(**arrays, causal=True, sliding_window=(9, 0)), "float32")


def test_vmap():
    many = jax.tree.map(lambda *x: jnp.stack(x), *(make(seed=seed) for seed in range(2)))

    def gradients(run):
        def one(arrays):
            return jax.grad(lambda a: (run(a) ** 2).sum())(arrays)

        return jax.jit(jax.vmap(one))(many)

    actual = gradients(lambda a: ring_attention(**a, mesh=ring_of(2)))
    expected = gradients(lambda a: flash_attention(**a, causal=True))
    for name in many:
        assert_close(actual[name], expected[name], "float32", gradient=True, what=name)


@slow
def test_remat_and_scan_over_layers():
    x = make()["query"]
    weights = jax.random.normal(jax.random.key(0), (2, 8, 8)) * 0.3

    def loss(weights, attend, wrap):
        def layer(x, w):
            return attend(x @ w, x, x), None

        return (jax.lax.scan(wrap(layer), x, weights)[0] ** 2).sum()

    ring = functools.partial(ring_attention, mesh=ring_of(4))
    flash = functools.partial(flash_attention, causal=True)
    expected = jax.grad(loss)(weights, flash, lambda f: f)
    actual = jax.jit(jax.grad(loss), static_argnums=(1, 2))(weights, ring, jax.checkpoint)
    assert_close(actual, expected, "float32", gradient=True)


def test_export():
    arrays = make()
    run = jax.jit(lambda a: ring_attention(**a, mesh=ring_of(4)))
    spread = {n: jax.device_put(x, NamedSharding(ring_of(4), P(None, "ring"))) for n, x in arrays.items()}
    restored = jax.export.deserialize(jax.export.export(run)(spread).serialize(vjp_order=1))
    assert_close(jax.jit(restored.call)(spread), run(spread), "float32")


@slow
def test_reruns_are_bit_identical():
    arrays = make(sinks=True)
    run = jax.jit(jax.value_and_grad(lambda a: (whole(a, 4, "zigzag") ** 2).sum()))
    first = run(arrays)
    for _ in range(2):
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(run(arrays)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_garbage_in_padding_never_shows():
    arrays = make(segments=True)
    padding = (arrays["q_segment_ids"] == 0)[:, :, None, None]
    assert padding.any()
    dirty = {n: jnp.where(padding, jnp.nan, x) if n in ("key", "value") else x for n, x in arrays.items()}

    @jax.jit
    def both(floats):
        out, pull = jax.vjp(lambda floats: whole({**arrays, **floats}, 2), floats)
        return out, pull(out)[0]

    names = ("query", "key", "value")
    (out, grads), (expected, _) = (both({name: x[name] for name in names}) for x in (dirty, arrays))
    np.testing.assert_array_equal(out, expected)
    assert all(jnp.isfinite(grad).all() for grad in grads.values())


def test_a_nan_that_is_seen_shows():
    arrays = make()
    arrays["key"] = arrays["key"].at[:, 9].set(jnp.nan)
    out = whole(arrays, 4)
    assert jnp.isnan(out[:, 16:]).all()
    assert not jnp.isnan(out[:, :8]).any()


def compiled(n, length, gradients, **statics):
    mesh = ring_of(n)
    x = jax.ShapeDtypeStruct((1, n * length, 2, 16), jnp.float32, sharding=NamedSharding(mesh, P(None, "ring")))

    def run(q, k, v):
        return ring_attention(q, k, v, mesh=mesh, **statics)

    if gradients:
        run = jax.grad(lambda *a: ring_attention(*a, mesh=mesh, **statics).sum(), (0, 1, 2))
    return jax.jit(run).lower(x, x, x).compile()


@pytest.mark.parametrize(
    ("gradients", "layout"),
    [
        pytest.param(False, "contiguous", id="forward-contiguous"),
        pytest.param(True, "contiguous", id="backward-contiguous"),
        pytest.param(False, "zigzag", id="forward-zigzag", marks=slow),
        pytest.param(True, "zigzag", id="backward-zigzag", marks=slow),
    ],
)
def test_what_is_sent(gradients, layout):
    """One shard of keys and values a step (and of their gradients backward) to the neighbour, and nothing else."""
    n, length = 8, 64
    text = compiled(n, length, gradients, layout=layout).as_text()
    assert not re.findall(r"\b(all-gather|all-to-all|all-reduce|reduce-scatter)\b", text)
    sent = re.findall(
        r"= (\w+)\[([\d,]*)\]\S* collective-permute(?:-start)?\(.*source_target_pairs=\{\{(\d+),(\d+)\}", text
    )
    assert sent
    shard = f"1,{length},2,16"
    assert {(dtype, shape) for dtype, shape, *_ in sent} == {("f32", shard)}
    neighbours = {(int(b) - int(a)) % n for *_, a, b in sent}
    assert neighbours <= {1}
    # Forward: key and value once to begin with, once in the loop's body. Backward: the same, and their gradients in the
    # body, at the last step and on the way home; the compiler may share the first hop of both passes.
    assert len(sent) in ((12, 14) if gradients else (4,))


@slow
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
def test_memory_does_not_grow_with_the_ring(gradients):
    few, many = (compiled(n, 256, gradients).memory_analysis().temp_size_in_bytes for n in (2, 8))
    assert many <= 1.1 * few


def test_the_next_keys_are_sent_before_they_are_needed():
    """In the program, each step's hop comes before the step's products."""
    mesh, x = ring_of(4), make()["query"]
    jaxpr = str(jax.make_jaxpr(lambda x: ring_attention(x, x, x, causal=False, mesh=mesh))(x))
    body = jaxpr[jaxpr.index("while[", jaxpr.index("ppermute")) :]
    assert 0 < body.index("ppermute") < body.index("dot_general")


@pytest.fixture
def counted():
    """A kernel that counts, for each device, the pairs that it is given to compute; a causal square counts half."""
    implementations = kernel_registry.list_implementations("flash_attention")
    inner = next(e.kernel for e in implementations if e.platform is ejkernel.Platform.XLA)
    work = Counter()

    class Counting:
        name = "counting"

        @staticmethod
        def note(arrays, spec):
            pairs = arrays["query"].shape[1] * arrays["key"].shape[1]
            share = 0.5 if spec.causal else 1.0
            if "kv_start" in arrays:
                share = (arrays["kv_stop"] - arrays["kv_start"]).sum() / pairs
            jax.debug.callback(lambda d, s: work.update({int(d): float(s) * pairs}), jax.lax.axis_index("ring"), share)

        def forward(self, arrays, spec, params):
            self.note(arrays, spec)
            return inner.forward(arrays, spec, params)

        def backward(self, arrays, spec, params, *rest):
            self.note(arrays, spec)
            return inner.backward(arrays, spec, params, *rest, wanted=frozenset({"query", "key", "value"}))

    kernel = Counting()
    kernel_registry.register("flash_attention", "pallas", "any", support=Support.everything(), priority=50)(kernel)
    yield work
    kernel_registry.unregister(kernel)


def work_of(counted, layout, n=8, gradients=False, **statics):
    counted.clear()
    x = make(length=16 * n)["query"]
    run = functools.partial(whole, n=n, layout=layout, platform="pallas", **statics)

    def call(x):
        return run({"query": x, "key": x, "value": x}).sum()

    jax.block_until_ready(jax.grad(call)(x) if gradients else call(x))
    jax.effects_barrier()
    return np.array([counted[d] for d in range(n)])


@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=slow)], ids=["forward", "backward"])
def test_zigzag_balances_causal_work(counted, gradients):
    zigzag, contiguous = (work_of(counted, layout, gradients=gradients) for layout in ("zigzag", "contiguous"))
    assert zigzag.max() / zigzag.mean() <= 1.1
    assert contiguous.max() / contiguous.mean() > 1.7
    # Nothing that causality hides is computed, and all that it leaves is: half a square for each pass.
    passes = 2 if gradients else 1
    np.testing.assert_allclose(zigzag.sum(), passes * (16 * 8) ** 2 / 2)
    np.testing.assert_allclose(contiguous.sum(), zigzag.sum())


def test_a_window_ends_the_ring_early(counted):
    work = work_of(counted, "contiguous", sliding_window=(16, 0))
    assert work.max() < 2.2 * 16 * 16
    # One hop of key and value, and no loop that goes on.
    text = compiled(8, 64, False, sliding_window=(64, 0)).as_text()
    assert len(re.findall(r" collective-permute(?:-start)?\(", text)) == 2


def test_a_kernel_registered_later_takes_its_turn():
    arrays, mesh = make(length=24), ring_of(2)
    before = ring_attention(**arrays, mesh=mesh)

    class Zero:
        def forward(self, arrays, spec, params):
            query = arrays["query"]
            return jnp.zeros_like(query), jnp.zeros((query.shape[0], query.shape[2], query.shape[1]), jnp.float32)

        def backward(self, *_):
            raise NotImplementedError

    kernel = Zero()
    kernel_registry.register("flash_attention", "cuda", "any", support=Support.everything(), priority=99)(kernel)
    try:
        assert (ring_attention(**arrays, mesh=mesh) == 0).all()
    finally:
        kernel_registry.unregister(kernel)
    np.testing.assert_array_equal(ring_attention(**arrays, mesh=mesh), before)


def test_ring_shard_round_trip():
    x = np.arange(2 * 24 * 3).reshape(2, 24, 3)
    for layout in ("contiguous", "zigzag"):
        for n in (1, 2, 3, 4):
            there = ring_shard(x, n, layout)
            np.testing.assert_array_equal(ring_unshard(there, n, layout), x)
            np.testing.assert_array_equal(ring_shard(x.swapaxes(1, 2), n, layout, axis=-1), there.swapaxes(1, 2))
    np.testing.assert_array_equal(ring_shard(x, 4), x)
    parts = np.split(np.asarray(ring_shard(np.arange(24), 3, "zigzag", axis=0)), 3)
    chunks = np.split(np.arange(24), 6)
    for d, part in enumerate(parts):
        np.testing.assert_array_equal(part, np.concatenate([chunks[d], chunks[5 - d]]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ring_shard(jnp.ones((1, 10, 2)), 4), "x is float32[1, 10, 2]; expected a length along axis 1 that is a multiple of 4"),
        (lambda: ring_unshard(jnp.ones((1, 12, 2)), 4, "zigzag"), "a multiple of 8"),
        (lambda: ring_shard(jnp.ones((1, 8)), 4, "spiral"), "layout is 'spiral'"),
        (lambda: ring_shard(jnp.ones((1, 8)), 0), "n is 0"),
        (lambda: ring_shard(jnp.ones((1, 8)), 2, axis=2), "axis is 2"),
        (lambda: ring_shard([1, 2], 2, axis=0), "x is a list"),
        (lambda: ring_attention(**make()), "axis_name is 'ring' (str); expected the mesh axis of a shard_map"),
        (lambda: ring_attention(**make(), mesh=ring_of(4, "other")), "axis_name is 'ring'"),
        (lambda: ring_attention(**make(), mesh=4), "mesh is 4"),
        (lambda: ring_attention(**make(length=30), mesh=ring_of(4)), "query is float32[1, 30, 2, 8]; expected a length"),
        (lambda: ring_attention(**make(length=36), mesh=ring_of(4), layout="zigzag"), "a multiple of 8"),
        (lambda: ring_attention(**make(), mesh=ring_of(4), layout="spiral"), "layout is 'spiral'"),
        (lambda: ring_attention(**make(), mesh=ring_of(4), sliding_window=(-1, 0)), "sliding_window"),
        (lambda: ring_attention(**make(), mesh=ring_of(4), logits_soft_cap=0), "logits_soft_cap"),
        (lambda: ring_attention(**make(), mesh=ring_of(4), causal=None), "causal is None"),
        (lambda: ring_attention(**make(), mesh=ring_of(4), q_segment_ids=jnp.ones((1, 32), int)), "kv_segment_ids is None"),
        (lambda: ring_attention(**{**make(), "key": jnp.ones((1, 64, 2, 8))}, mesh=ring_of(4)), "value is float32"),
        (lambda: ring_attention(**make(), mesh=ring_of(4), platform="mosaic"), "platform is 'mosaic'"),
        (lambda: ring_attention(**make(), mesh=ring_of(4), softmax_scale={}), "softmax_scale is a dict"),
        (lambda: ring_attention(**make(), mesh=ring_of(4), axis_name=("ring", "ring")), "axis_name is ('ring', 'ring')"),
        (lambda: ring_attention(**make(), mesh=ring_of(4), axis_name=()), "axis_name is ()"),
        (lambda: ring_attention(**{**make(), "query": "x"}, mesh=ring_of(4)), "query is 'x'"),
        (lambda: ring_attention(**{**make(), "query": jax.ShapeDtypeStruct((1, 32, 2, 8), "float32")}, mesh=ring_of(4)), "query is ShapeDtypeStruct"),
        (lambda: ring_shard(jax.ShapeDtypeStruct((1, 8), "float32"), 2), "x is ShapeDtypeStruct"),
    ],
)  # fmt: skip
def test_bad_input(call, words):
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        call()


def test_what_one_call_is_refused_for_is_not_held_against_another():
    arrays, mesh = make(length=40), ring_of(4)
    with pytest.raises(InvalidInputError, match="causal is 1"):
        ring_attention(**arrays, causal=1, mesh=mesh)
    assert ring_attention(**arrays, causal=True, mesh=mesh).shape == (1, 40, 2, 8)


@slow
def test_tuning_reaches_the_steps(own_store):
    arrays, mesh = make(length=16), ring_of(2)
    out = ejkernel.autotune(ring_attention)(**arrays, mesh=mesh)
    assert_close(out, flash_attention(**arrays, causal=True), "float32")
    assert list(own_store.rglob("*.json"))
    inside = jax.shard_map(lambda q, k, v: flash_attention(q, k, v), mesh=mesh, in_specs=P("ring"), out_specs=P("ring"))
    many = {name: jnp.concatenate([x, x]) for name, x in arrays.items()}
    assert ejkernel.autotune(jax.jit(inside))(*many.values()).shape == (2, 16, 2, 8)


@slow
def test_cotangents_of_rows_with_nothing_to_see_do_not_matter():
    arrays = make(segments=True, sinks=True)
    alive = (arrays["q_segment_ids"] > 0)[:, :, None, None]
    floats = {name: arrays[name] for name in ("query", "key", "value")}
    out, pull = jax.vjp(lambda f: whole({**arrays, **f}, 4), floats)
    (expected,) = pull(jnp.where(alive, 1.0, 0.0) * jnp.ones_like(out))
    (grads,) = pull(jnp.where(alive, 1.0, jnp.nan) * jnp.ones_like(out))
    for name in floats:
        np.testing.assert_array_equal(grads[name], expected[name], err_msg=name)


def test_empty_batches():
    x = jnp.ones((0, 32, 2, 8))
    assert ring_attention(x, x, x, mesh=ring_of(4)).shape == x.shape
    assert ring_shard(x, 4, "zigzag").shape == x.shape


def test_explain_beside_a_mesh_tells_of_a_devices_part():
    x = jax.ShapeDtypeStruct((1, 128, 2, 8), jnp.float32)
    assert "query f32[1,32,2,8]" in str(ejkernel.explain(ring_attention, x, x, x, mesh=ring_of(4)))


def test_steps_are_selected_as_flash_attention_is():
    assert kernel_registry.list_implementations("ring_attention") == kernel_registry.list_implementations(
        "flash_attention"
    )
    assert "ring_attention" in kernel_registry.list_algorithms()
    x = jax.ShapeDtypeStruct((1, 128, 2, 8), jnp.float32)
    told = ejkernel.explain(ring_attention, x, x, x)
    assert told.chosen.platform.value == "xla"
    assert str(told).startswith("ring_attention(query f32[1,128,2,8]")
    with pytest.raises(UnsupportedError, match="platform='cudnn'"):
        ring_attention(**make(), mesh=ring_of(2), platform="cudnn")
    with pytest.raises(InvalidInputError, match="runs on the kernels of flash_attention"):
        kernel_registry.register("ring_attention", "xla", "any", support=Support.everything())(lambda q, k, v: q)


def test_a_plain_function_cannot_do_steps():
    @kernel_registry.register("flash_attention", "cuda", "any", support=Support.everything(), priority=90)
    def plain(query, key, value, **_):
        return value

    try:
        x = jax.ShapeDtypeStruct((1, 128, 2, 8), jnp.float32)
        told = ejkernel.explain(ring_attention, x, x, x)
        assert told.chosen.platform.value == "xla"
        assert "which ring_attention is made of" in str(told)
    finally:
        kernel_registry.unregister(plain)


def test_a_window_that_begins_inside_a_shard():
    """20 keys back from a shard of 16 reach into the one before the last."""
    mesh = jax.make_mesh((4,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 64, 2, 8)) for i in range(3))
    found = ring_attention(q, k, v, sliding_window=(20, 0), mesh=mesh)
    expected = flash_attention(q, k, v, causal=True, sliding_window=(20, 0))
    assert_close(found, expected, "float32")
