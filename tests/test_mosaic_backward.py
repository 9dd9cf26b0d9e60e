"""Flash attention's gradients in Pallas Mosaic GPU: interpreted, compiled for Hopper without one, and on a GPU."""

import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import bound
from lanes import crossed, some
from test_mosaic import PADDED, _plugin, compiled
from tolerances import assert_close

from ejkernel import BwdParams, explain, flash_attention, kernel_registry, target
from ejkernel.kernels._pallas.gpu.flash_attention_sm90 import (
    backward,
    backward_order,
    backward_wide,
    backward_wide_keys,
    backward_wide_queries,
)
from ejkernel.kernels._pallas.gpu.flash_attention_sm90 import gradients as host
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.backward_order import started, started_before

JAX = tuple(int(part) for part in jax.__version__.split(".")[:2])
OPERATION = kernel_registry.operation("flash_attention")
ALL = frozenset({"query", "key", "value"})
# The narrowest head dims that take each kernel.
SINGLE, WIDE = (64, 64), (64, 128)
PANELS = (72, 72)
interpreted = pytest.mark.skipif(JAX < (0, 11), reason="jax has no interpreter of Mosaic GPU before 0.11")


def inputs(q_len=160, kv_len=160, batch=1, heads=2, kv_heads=1, dims=SINGLE, dtype="bfloat16"):
    """Query, key, value, and the cotangents of the output and of its lse."""
    rng = np.random.default_rng(q_len + kv_len + sum(dims))
    dim, value_dim = dims
    of_query, of_key = (batch, q_len, heads), (batch, kv_len, kv_heads)
    shapes = (*of_query, dim), (*of_key, dim), (*of_key, value_dim), (*of_query, value_dim)
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    return [*arrays, jnp.asarray(rng.standard_normal((batch, heads, q_len)), jnp.float32)]


def ids(*lengths):
    """Segments of these lengths, alternately 0 for padding and a new id."""
    each = [0 if i % 2 == 0 else i for i in range(len(lengths))]
    return np.repeat(each, lengths)[None].astype(np.int32)


IDS, CUTS = ids(9, 60, 20, 71), np.array([0, 70, 70, 150], np.int32)
# Of the queries' ids one is no key's.
Q_IDS, KV_IDS = np.random.default_rng(5).integers(0, [[[4]], [[3]]], (2, 1, 160)).astype(np.int32)
ONE_A_FEATURE = ("causal", "window", "soft cap", "sinks", "segments", "packed", "two groups")
CALLS = {
    "plain": ({}, {}),
    "whole blocks": ({"q_len": 256, "kv_len": 256}, {}),
    "causal": ({"batch": 2}, {"causal": True}),
    "more keys": ({"q_len": 90, "kv_len": 235}, {"causal": True}),
    "more queries": ({"q_len": 203, "kv_len": 75}, {"causal": True}),
    "short": ({"q_len": 1, "kv_len": 9}, {}),
    "window": ({"kv_heads": 2}, {"causal": True, "sliding_window": (40, 0)}),
    "two-sided window": ({"q_len": 150}, {"sliding_window": (20, 33)}),
    "soft cap": ({}, {"causal": True, "logits_soft_cap": 2.0}),
    "negative scale": ({}, {"causal": True, "softmax_scale": -0.2}),
    "no scale": ({}, {"causal": True, "softmax_scale": 0.0, "logits_soft_cap": 2.0}),
    "sinks": ({"q_len": 203, "kv_len": 75}, {"causal": True, "softmax_aux": np.array([[0.5], [2.0]], np.float32)}),
    "segments": ({}, {"causal": True, "q_segment_ids": IDS, "kv_segment_ids": IDS}),
    "scattered segments": ({}, {"q_segment_ids": Q_IDS, "kv_segment_ids": KV_IDS}),
    "packed": ({}, {"causal": True, "cum_seqlens_q": CUTS, "cum_seqlens_k": CUTS}),
    "float16": ({"dtype": "float16"}, {"causal": True}),
    "two groups": ({"heads": 4, "kv_heads": 2}, {"causal": True}),
    # So many queries that several CTAs share a block of keys, each with some of the heads.
    "divided heads": ({"q_len": 2100, "kv_len": 300, "heads": 8}, {}),
}


def expected(arrays, options):
    """``(out, lse, gradients)`` in float64."""
    *exact, dout, dlse = (np.asarray(x, np.float64) for x in arrays)
    return oracle.attention(*exact, dout=dout, dlse=dlse, **options)


def prepare(tensors, options):
    """What the operation prepares for the kernels."""
    options = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    call, _ = bound(*tensors, **options)
    arguments = OPERATION.signature.bind(*tensors, **options)
    arguments.apply_defaults()
    return OPERATION.prepare(OPERATION.normalise(dict(arguments.arguments)), call.spec), call.spec


def run(arrays, residuals, options, wanted=ALL, params=None, **more):
    """The kernels themselves."""
    *tensors, dout, dlse = arrays
    prepared, spec = prepare(tensors, options)
    return host.backward(prepared, spec, params or BwdParams(), *residuals, dout, dlse, wanted, **more)


def check_interpreted(shape, options, capfd, *, params=None, spoil=lambda arrays: arrays):
    import jax.experimental.pallas.mosaic_gpu as plgpu

    arrays = inputs(**shape)
    out, lse, grads = expected(arrays, options)
    residuals = jnp.asarray(out, arrays[0].dtype), jnp.asarray(lse, jnp.float32)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    found = run(spoil(arrays), residuals, options, frozenset(grads), params, interpret=interpret)
    assert found.keys() == grads.keys()
    for name, exact in grads.items():
        actual = np.asarray(found[name], np.float64).reshape(exact.shape)
        assert_close(actual, exact, str(arrays[0].dtype), gradient=True, what=name)
        # A wrong tile among right ones hides below the largest gradient: their norms tell.
        assert np.linalg.norm(actual - exact) <= 1e-2 * np.linalg.norm(exact) + 1e-6, name
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@interpreted
@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("dims", "name"),
    crossed(
        {"single": SINGLE, "single at 128": (128, 128), "panels": PANELS, "wide": WIDE},
        [name for name in CALLS if name != "divided heads"],
        short=lambda dims, name: dims in ((128, 128), WIDE) and name in ONE_A_FEATURE,
        # One kernel has both: the features of the short lane there, the others at 64.
        again=lambda dims, name: dims == (SINGLE if name in ONE_A_FEATURE else (128, 128)),
    ),
)
def test_interpreted(name, dims, capfd):
    shape, options = CALLS[name]
    check_interpreted({**shape, "dims": dims}, options, capfd)


@interpreted
@pytest.mark.parametrize(
    "dims",
    some(
        [(24, 56), (32, 32), PANELS, (80, 64), (96, 96), (96, 64), (104, 104), (128, 128), (128, 64), (160, 32),
         (192, 128), (224, 224), (256, 256)],
        PANELS,
    ),
    ids=str,
)  # fmt: skip
def test_interpreted_at_other_head_dims(dims, capfd):
    check_interpreted({"q_len": 130, "kv_len": 200, "dims": dims}, {"causal": True}, capfd)


@interpreted
@pytest.mark.interpreted
@pytest.mark.parametrize("dims", some([SINGLE, (128, 128), (128, 64)], SINGLE), ids=str)
def test_heads_of_a_group_divided_among_ctas(dims, monkeypatch, capfd):
    monkeypatch.setattr(backward_order, "ENOUGH_QUERIES", 0)
    monkeypatch.setattr(backward_order, "MOST_HEADS", {64: 2, 128: 2})
    shape = {"q_len": 150, "kv_len": 200, "batch": 2, "heads": 8, "kv_heads": 2, "dims": dims}
    check_interpreted(shape, {"causal": True}, capfd)


@interpreted
@pytest.mark.parametrize("dims", [SINGLE, WIDE], ids=["single", "wide"])
def test_rows_that_see_nothing_may_be_nan(dims, capfd):
    def spoil(arrays):
        query, key, value, dout, dlse = arrays
        gone = IDS[..., None, None] == 0
        return [jnp.where(gone, jnp.nan, query), key, value, jnp.where(gone, jnp.nan, dout), dlse]

    check_interpreted({"dims": dims}, {"q_segment_ids": IDS, "kv_segment_ids": IDS}, capfd, spoil=spoil)


@interpreted
@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(PADDED, "ids", "an id without queries"))
@pytest.mark.parametrize("dims", some([SINGLE, WIDE], WIDE), ids=["single", "wide"])
def test_padding_may_be_garbage(name, dims, capfd):
    """It has no gradient either."""
    shape, options, hidden = PADDED[name]

    def spoil(arrays):
        query, key, value, *rest = arrays
        garbage = np.where(np.arange(hidden.shape[-1]) % 2, np.nan, np.inf)[:, None, None]
        return [query, *(jnp.where(hidden[..., None, None], garbage, x).astype(x.dtype) for x in (key, value)), *rest]

    check_interpreted({**shape, "dims": dims}, options, capfd, spoil=spoil)


@interpreted
@pytest.mark.parametrize("dims", [SINGLE, WIDE], ids=["single", "wide"])
def test_small_weights_keep_their_digits(dims):
    """A sink far above leaves the pairs weights of some 1e-7: they are as exact as any, with a soft cap too."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    options = {"causal": True, "logits_soft_cap": 2.0, "softmax_aux": np.full((2, 1), 16.0, np.float32)}
    *arrays, dlse = inputs(dims=dims)
    arrays = [*arrays, jnp.zeros_like(dlse)]
    out, lse, grads = expected(arrays, options)
    residuals = jnp.asarray(out, arrays[0].dtype), jnp.asarray(lse, jnp.float32)
    found = run(arrays, residuals, options, interpret=plgpu.InterpretGPUParams())
    for name, actual in found.items():
        exact = grads[name]
        assert np.linalg.norm(np.asarray(actual, np.float64) - exact) <= 1e-2 * np.linalg.norm(exact), name


@interpreted
def test_weights_reach_dk_with_more_digits_than_it_has():
    """dS is rounded for dQ and for dK: were P rounded to bfloat16 before, dK would be less exact by a fifth."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    arrays = inputs(q_len=300, kv_len=300, dims=WIDE)
    out, lse, grads = expected(arrays, {"causal": True})
    residuals = jnp.asarray(out, arrays[0].dtype), jnp.asarray(lse, jnp.float32)
    found = run(arrays, residuals, {"causal": True}, frozenset(grads), interpret=plgpu.InterpretGPUParams())
    of_query, of_key = (
        np.linalg.norm(np.asarray(found[name], np.float64) - grads[name]) / np.linalg.norm(grads[name])
        for name in ("query", "key")
    )
    assert of_key < 1.1 * of_query


@interpreted
def test_rings_are_filled_again(capfd, monkeypatch):
    """With as few slots as the kernels for wide heads take."""
    monkeypatch.setattr(backward_wide.WideConfig, "_slots", lambda self, own, least: least)
    check_interpreted({"q_len": 270, "kv_len": 270, "heads": 1, "dims": WIDE}, {"causal": True}, capfd)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", some([1, 2, 3, 100], 2, 100))
@pytest.mark.parametrize("step", some([64, 128], 128))
def test_sums_have_an_order(name, size, step):
    """Every block of keys starts once, and knows how many that visit a step start before it."""
    shape, options = CALLS[name]
    times = 1 if any(isinstance(x, np.ndarray) for x in options.values()) else 5
    lengths = {length: times * shape.get(length, 160) for length in ("q_len", "kv_len")}
    prepared, spec = prepare(inputs(**{**shape, **lengths})[:3], options)
    table, masked, visitors, visited = (np.asarray(x) for x in host._visits(prepared, spec, 128, step))
    begin, *counts = np.moveaxis(table, -1, 0)
    at = np.arange(visited.shape[-1]) * step
    assert (visited == (begin[..., None] <= at) & (at < (begin + sum(counts) * step)[..., None])).all()
    assert masked[0] >= counts[0].any()
    assert masked[1] >= counts[2].any()
    blocks = visited.shape[1]
    nth = np.arange(blocks)
    order = np.asarray(started(nth, size, blocks))
    assert sorted(order) == list(nth)
    visits = visited[:, order]
    before = np.cumsum(visits, 1) - visits
    found = np.asarray(started_before(nth[:, None], size, blocks, *np.moveaxis(visitors[:, None], -1, 0)))
    assert (np.where(visits, found, 0) == np.where(visits, before, 0)).all()


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("check_vma", some([True, False], True))
@pytest.mark.parametrize("dims", [SINGLE, PANELS, WIDE], ids=["single", "panels", "wide"])
def test_traces_in_shard_map(dims, check_vma, segments):
    """JAX refuses warps of different roles where arrays vary over mesh axes: roles are then warpgroups."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.PartitionSpec("x")

    def gradients(query, key, value, ids):
        options = {"q_segment_ids": ids, "kv_segment_ids": ids} if segments else {}

        def loss(query, key, value):
            out = flash_attention(query, key, value, causal=True, platform="pallas", **options)
            return out.astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    arrays = inputs(batch=2, dims=dims)[:3]
    ids = jnp.ones(arrays[0].shape[:2], jnp.int32)
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=split, out_specs=split, check_vma=check_vma)
    with target("nvidia-h200"):
        traced = jax.make_jaxpr(mapped)(*arrays, ids)
    assert [x.shape for x in traced.out_avals] == [x.shape for x in arrays]
    assert ("WarpMesh" in str(traced)) is not check_vma


@pytest.mark.parametrize("dim", range(32, 257, 32))
@pytest.mark.parametrize("value_dim", range(32, 257, 32))
def test_rings_fit(dim, value_dim):
    of_call = dict.fromkeys(
        ("scale", "cap", "left", "right", "kv_len", "packed", "segments", "unmasked", "masked", "weight_exponent")
    )
    c = backward_wide.WideConfig(group=1, dim=dim, value_dim=value_dim, **of_call)
    part, rings = 2 * 64 * c.part, (c.query_slots, c.key_slots)
    assert all(first >= 2 * c.parts and second >= c.value_parts for first, second in rings)
    assert 2 * 2 * 64 * (dim + value_dim) + sum(c.query_slots) * part < 232448
    assert 2 * 2 * 64 * max(dim, value_dim) + 2 * 8192 + 1024 + sum(c.key_slots) * part < 232448


@pytest.mark.parametrize("wanted", [("query",), ("key",), ("value", "softmax_aux"), ("softmax_aux",), ()], ids=str)
def test_only_what_is_wanted(wanted, monkeypatch):
    """Of the kernels for wide heads those run whose gradients are wanted; the single one has them all."""
    wanted, ran = frozenset(wanted), []
    for module, name in (
        (backward, "call"),
        (backward_wide_queries, "query_gradient"),
        (backward_wide_keys, "key_gradients"),
    ):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x, n=name, k=kernel, **more: ran.append(n) or k(*x, **more))
    for dims, kernels in (
        (SINGLE, ["call"] * bool(wanted & ALL)),
        (WIDE, ["query_gradient"] * ("query" in wanted) + ["key_gradients"] * bool(wanted & {"key", "value"})),
    ):
        ran.clear()
        arrays = inputs(dims=dims)
        options = {"softmax_aux": np.zeros((2, 1), np.float32)}
        found = jax.eval_shape(lambda *x, o=options: run(x[:5], x[5:], o, wanted), *arrays, *arrays[3:])
        assert found.keys() == wanted
        assert ran == kernels


# Compiled for Hopper, without one

COMPILED = """
import os, re, sys, glob
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
sys.path.insert(0, {tests!r})
import test_mosaic_backward as t
from test_mosaic import HOPPER
topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=HOPPER, topology="1x1x2")
sharding = SingleDeviceSharding(topology.devices[0])
for name in {names!r}:
    shape, options = t.CALLS[name]
    arrays = t.inputs(**{{**shape, "dims": {dims!r}}})
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arrays]
    residuals = arrays[3:]
    text = jax.jit(lambda *x: t.run(x[:5], x[5:], options)).lower(*arrays, *residuals).compile().as_text()
    fused = re.findall(r"^%fused.*?^}}", text, re.DOTALL | re.MULTILINE)
    print("FUSED", name, len(fused), sum(" concatenate(" in x and " reduce(" in x for x in fused))
    reports = glob.glob(os.path.join(os.environ["MOSAIC_GPU_DUMP_TO"], "*.ptxas"))
    text = "".join(open(path).read() for path in reports)
    print("SPILLS", name, re.findall(r"([0-9]+) bytes spill", text), "serialized" in text)
    print("INJECTED", name, text.count("C7517"))
    for path in reports:
        os.remove(path)
"""


# With the most bytes that may spill before jax 0.11, there where heads share keys.
SPILLS = [
    (
        (64, 64),
        [
            *("plain", "whole blocks", "causal", "window", "two-sided window", "segments", "packed", "soft cap"),
            "divided heads",
        ],
        112,
    ),
    (
        (128, 128),
        [
            *("plain", "whole blocks", "causal", "more keys", "window", "segments", "packed", "soft cap"),
            "divided heads",
        ],
        64,
    ),
    ((128, 64), ["causal"], 0),
    ((72, 72), ["plain", "causal", "window", "segments", "packed", "soft cap"], 0),
    ((96, 96), ["causal", "segments"], 0),
    ((112, 112), ["causal"], 0),
    ((192, 128), ["causal"], 0),
    ((256, 256), ["causal", "segments"], 0),
]


@pytest.mark.compiled
@pytest.mark.skipif(not _plugin(), reason="compiling for a GPU needs jax-cuda13-plugin of jax's version")
@pytest.mark.parametrize(
    ("dims", "names", "before"),
    [
        *[(dims, ["causal"], before) for dims, _, before in SPILLS if dims[0] in (64, 256)],
        *[pytest.param(*job, marks=pytest.mark.slow) for job in SPILLS],
    ],
    ids=str,
)
def test_spills(dims, names, before, tmp_path):
    """None; before jax 0.11 a few of the single kernel where heads share keys.

    No product waits for another one because registers are short.
    """
    most = before if JAX < (0, 11) else 0
    printed = compiled(COMPILED.format(tests=os.path.dirname(__file__), dims=dims, names=names), tmp_path)
    told = re.findall(r"SPILLS (.*?) \[(.*)\] (True|False)", printed)
    assert [name for name, _, _ in told] == names
    for name, spills, serialized in told:
        assert serialized == "False", name
        assert max(map(int, re.findall(r"\d+", spills))) <= most, (name, spills)


@pytest.mark.skipif(not _plugin(), reason="compiling for a GPU needs jax-cuda13-plugin of jax's version")
@pytest.mark.skipif(JAX < (0, 11), reason="before jax 0.11 the program is another one")
@pytest.mark.compiled
@pytest.mark.slow
def test_no_wait_is_added(tmp_path):
    """C7517: a wgmma wait inserted by ptxas, which makes dV and dK end before the next scores start."""
    names = ["whole blocks", "causal"]
    printed = compiled(COMPILED.format(tests=os.path.dirname(__file__), dims=(128, 128), names=names), tmp_path)
    assert re.findall(r"INJECTED (.*) (\d+)", printed) == [(name, "0") for name in names]


@pytest.mark.skipif(not _plugin(), reason="compiling for a GPU needs jax-cuda13-plugin of jax's version")
@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("dims", [SINGLE, WIDE], ids=["single", "wide"])
def test_the_slope_is_not_summed_where_it_is_packed(dims, tmp_path):
    """There XLA took 0.2 ms longer on an H200, of 1.5."""
    printed = compiled(COMPILED.format(tests=os.path.dirname(__file__), dims=dims, names=["causal"]), tmp_path)
    [(fused, both)] = re.findall(r"FUSED causal (\d+) (\d+)", printed)
    assert int(fused) > 0
    assert int(both) == 0


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "dims", [(32, 32), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str
)
def test_on_a_gpu(name, dims):
    x = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    if explain("flash_attention", x, x, x, platform="pallas").chosen is None:
        pytest.skip("needs a Hopper GPU")
    shape, options = CALLS[name]
    *tensors, dout, dlse = inputs(**{**shape, "dims": dims})
    options = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    sinks = [options.pop("softmax_aux")] if "softmax_aux" in options else []

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(platform, arrays, cotangents):
        def call(query, key, value, *sinks):
            more = dict(zip(["softmax_aux"], sinks, strict=False))
            return flash_attention(query, key, value, **options, **more, return_lse=True, platform=platform)

        return jax.vjp(call, *arrays)[1](cotangents)

    found = [gradients("pallas", [*tensors, *sinks], (dout, dlse)) for _ in range(2)]
    tensors, dout = jax.tree.map(lambda x: x.astype(jnp.float32), (tensors, dout))
    exact = gradients("xla", [*tensors, *sinks], (dout, dlse))
    dtype = str(found[0][0].dtype)
    for what, first, again, wanted in zip(["query", "key", "value", "sinks"], *found, exact, strict=False):
        assert_close(first, wanted, dtype, gradient=True, what=what)
        assert bool((first == again).all())
