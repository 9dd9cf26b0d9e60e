"""Kernels that the compiler cannot look into, over several devices by jit alone: each device runs its own part.

What stands for them on a CPU reverses every axis of its arrays twice, which the compiler can only do across devices where
an axis is spread over them. It is registered for these tests alone; interpreters' callbacks cannot be partitioned.
"""

import contextlib
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from examples import all_examples, assert_trees_close, cotangents_like
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_mosaic import needs_plugin
from tolerances import assert_close

from ejkernel import Backend, Platform, Support, explain, flash_attention, kernel_registry
from ejkernel.contracts.registry import Choice
from ejkernel.kernels.common import dropout
from ejkernel.ops.core import partition


def turned(tree):
    """The same, by a way that crosses devices where an axis is spread over them."""
    return jax.tree.map(lambda x: jnp.flip(jax.lax.optimization_barrier(jnp.flip(x))), tree)


class Dense:
    """Flash attention's contract by a matrix of all logits."""

    name = "dense"

    def __init__(self):
        self.seen = []

    def forward(self, arrays, spec, params):
        self.seen.append(jax.tree.map(jnp.shape, arrays))
        return self.attend(turned(arrays), spec)

    def backward(self, arrays, spec, params, out, lse, dout, dlse, wanted):
        arrays, cotangents = turned(arrays), turned((dout, dlse))
        floats = {name: arrays[name] for name in wanted}
        return jax.vjp(lambda floats: self.attend({**arrays, **floats}, spec), floats)[1](cotangents)[0]

    def attend(self, a, spec):
        query, key, value = a["query"], a["key"], a["value"]
        batch, q_len, heads, _ = query.shape
        group = heads // key.shape[2]
        key, value = (jnp.repeat(x, group, 2) for x in (key, value))
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) * spec.softmax_scale + a.get("bias", 0.0)
        seen = jnp.tril(jnp.ones(logits.shape[2:], bool)) if spec.causal else True
        seen &= a.get("attention_mask", True)
        if "q_segment_ids" in a:
            seen &= (a["q_segment_ids"][:, None, :, None] == a["kv_segment_ids"][:, None, None]) & (
                a["q_segment_ids"][:, None, :, None] > 0
            )
        sinks = jnp.broadcast_to(a["softmax_aux"][:, :, None, None], (batch, heads, q_len, 1))
        lse = jax.nn.logsumexp(jnp.concatenate([jnp.where(seen, logits, -jnp.inf), sinks], -1), -1)
        weights = jnp.where(seen, jnp.exp(jnp.where(seen, logits, 0) - lse[..., None]), 0)
        if spec.dropout_prob:
            index = [jnp.arange(n) for n in weights.shape[1:]]
            rows = dropout.row_keys(a["dropout_key"][:, None, None], index[0][:, None], index[1])
            kept = dropout.keep(rows[..., None], index[2], spec.dropout_prob)
            weights = jnp.where(kept, weights / (1 - spec.dropout_prob), 0)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value), lse


class Reversing:
    """An XLA kernel behind reversals."""

    name = "reversing"

    def __init__(self, implementation):
        self.implementation = implementation

    def forward(self, arrays, spec, params, device):
        return Choice(self.implementation, params, "", device).forward(turned(arrays), spec)

    def backward(self, arrays, spec, params, *rest, wanted, device):
        return Choice(self.implementation, params, "", device).backward(wanted, turned(arrays), spec, *turned(rest))


@contextlib.contextmanager
def registered(operation, kernel):
    kernel_registry.register(operation, Platform.PALLAS, Backend.CPU, support=Support.everything())(kernel)
    try:
        yield kernel
    finally:
        kernel_registry.unregister(kernel)


@pytest.fixture
def dense():
    with registered("flash_attention", Dense()) as kernel:
        yield kernel


def mesh_of(*sizes, kind=AxisType.Auto):
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, ("data", "model")[: len(sizes)], axis_types=(kind,) * len(sizes), devices=devices)


def spread_over(mesh, arrays, specs):
    """Arrays laid out by specs, those left out on every device."""
    return {
        name: jax.tree.map(lambda x, name=name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))), tree)
        for name, tree in arrays.items()
    }


def moved(compiled):
    """The collectives of a program by which arrays go from device to device; sums are none."""
    kinds = "all-gather|all-to-all|collective-permute|reduce-scatter"
    return {f"{kind} {shape}" for shape, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", compiled.as_text())}


def both_ways(call, arrays, differentiable):
    """The result and the gradients, for random cotangents."""
    out, pull = jax.vjp(
        lambda floats: call(**{**arrays, **floats}), {n: arrays[n] for n in differentiable if n in arrays}
    )
    return out, pull(cotangents_like(out))[0]


# Batch, heads and key heads over a mesh

SMALL = {"batch": 4, "q_len": 5, "kv_len": 5, "head_dim": 8, "value_dim": 8}
EVERYTHING = frozenset({"causal", "segments", "sinks", "bias", "mask"})
BIASES = {0: P("data", "model"), 1: P("model"), 2: P(), 3: P("data"), 4: P(None, "model"), 5: P()}
MASKS = {0: P("data", "model"), 1: P("data"), 2: P("data"), 3: P(None, "model"), 4: P("data"), 5: P()}
HEADS = P("data", None, "model")


def flash_specs(variant=0):
    return {
        **dict.fromkeys(("query", "key", "value"), HEADS),
        **dict.fromkeys(("q_segment_ids", "kv_segment_ids"), P("data")),
        "bias": BIASES[variant],
        "attention_mask": MASKS[variant],
    }


def flash(arrays, statics):
    """The result and every gradient, with random cotangents."""

    def call(**arrays):
        return flash_attention(**arrays, **statics, return_lse=True, platform="pallas")

    return both_ways(call, arrays, ("query", "key", "value", "bias", "softmax_aux"))


def check_flash(found, arrays, statics):
    (out, lse), grads = found
    dout, dlse = cotangents_like((out, lse))
    arrays = {name: int(x) if name == "dropout_seed" else x for name, x in arrays.items()}
    expected_out, expected_lse, expected = oracle.attention(**arrays, **statics, dout=dout, dlse=dlse)
    assert_close(out, expected_out, "float32")
    assert_close(lse, expected_lse, "float32")
    for name, grad in grads.items():
        assert_close(grad, expected[name], "float32", gradient=True, what=name)


def spread_flash(mesh, case, specs):
    """Checked against the oracle; the program."""
    arrays, statics = case.make()
    spread = spread_over(mesh, arrays, specs)
    compiled = jax.jit(lambda arrays: flash(arrays, statics)).lower(spread).compile()
    check_flash(compiled(spread), arrays, statics)
    return compiled


@pytest.mark.parametrize(
    ("sizes", "variant"),
    [((2, 2), 0), ((4, 2), 4), *(pytest.param((2, 2), variant, marks=pytest.mark.slow) for variant in (1, 2, 3, 5))],
)
def test_batch_and_heads(dense, sizes, variant):
    """Bias and mask of every shape: what devices share gets the sum of their gradients, and nothing else is sent."""
    case = Case("", EVERYTHING, **SMALL, kv_heads=4, group=2, variant=variant)
    assert not moved(spread_flash(mesh_of(*sizes), case, flash_specs(variant)))
    assert dense.seen[-1]["query"] == (4 // sizes[0], 5, 8 // sizes[1], 8)


def test_without_a_declaration_arrays_are_gathered(dense, monkeypatch):
    """What the kernel of these tests is for."""
    monkeypatch.setattr(partition, "applies", lambda *_: False)
    assert moved(spread_flash(mesh_of(2, 2), Case("", EVERYTHING, **SMALL, kv_heads=4), flash_specs()))


@pytest.mark.parametrize(("kv_heads", "group", "part"), [(2, 4, 8), (1, 8, 2)], ids=["two key heads", "one key head"])
def test_key_heads_over_four_devices(dense, kv_heads, group, part):
    """Two do not divide by four, so all heads are everywhere; of one, the query heads are spread."""
    specs = {"query": HEADS, **dict.fromkeys(("key", "value"), P("data"))}
    case = Case("", EVERYTHING, **SMALL, kv_heads=kv_heads, group=group)
    assert bool(moved(spread_flash(mesh_of(2, 4), case, specs))) == (kv_heads == 2)
    assert dense.seen[-1]["query"] == (2, 5, part, 8)


def test_dropout_hashes_the_index_of_a_head_which_is_the_callers(dense):
    spread_flash(mesh_of(2, 2), Case("", EVERYTHING | {"dropout"}, **SMALL, kv_heads=4), flash_specs())
    assert dense.seen[-1]["query"] == (2, 5, 4, 8)


@pytest.mark.slow
def test_sequences_are_gathered(dense):
    specs = {**flash_specs(), **dict.fromkeys(("query", "key", "value"), P("data", "model"))}
    case = Case("", EVERYTHING, **{**SMALL, "q_len": 6, "kv_len": 6}, kv_heads=4)
    assert moved(spread_flash(mesh_of(2, 2), case, specs))


@pytest.mark.slow
def test_by_the_older_partitioner(dense):
    """GSPMD instead of Shardy."""
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        case = Case("", EVERYTHING, **SMALL, kv_heads=4, group=2)
        assert not moved(spread_flash(mesh_of(2, 2), case, flash_specs()))
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert dense.seen[-1]["query"] == (2, 5, 4, 8)


@pytest.mark.slow
def test_three_batch_entries_over_two_devices(dense):
    arrays, statics = Case("", EVERYTHING, **{**SMALL, "batch": 3}, kv_heads=4, group=2).make()
    mesh = mesh_of(2, 2)

    def step(arrays):
        query = jax.lax.with_sharding_constraint(arrays["query"], NamedSharding(mesh, HEADS))
        return flash({**arrays, "query": query}, statics)

    check_flash(jax.jit(step)(spread_over(mesh, arrays, {})), arrays, statics)
    assert dense.seen[-1]["query"] == (3, 5, 4, 8)


@pytest.mark.slow
def test_spread_because_the_result_is(dense):
    arrays, statics = Case("", EVERYTHING, **SMALL, kv_heads=4, group=2).make()
    mesh = mesh_of(2, 2)
    step = jax.jit(lambda arrays: flash(arrays, statics)[0][0], out_shardings=NamedSharding(mesh, HEADS))
    assert_close(step(spread_over(mesh, arrays, {})), oracle.attention(**arrays, **statics)[0], "float32")
    assert dense.seen[-1]["query"] == (2, 5, 4, 8)


def test_on_an_explicit_mesh(dense):
    arrays, statics = Case("", EVERYTHING, **SMALL, kv_heads=4, group=2).make()
    mesh = mesh_of(2, 2, kind=AxisType.Explicit)
    spread = spread_over(mesh, arrays, flash_specs())
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda arrays: flash(arrays, statics)).lower(spread).compile()
        check_flash(compiled(spread), arrays, statics)
    assert not moved(compiled)
    assert dense.seen[-1]["query"] == (2, 5, 4, 8)


def attend(query, key):
    return flash_attention(query, key, key, softmax_aux=jnp.zeros(1), causal=True, platform="pallas")


def layers(query, key):
    """Two in a loop, their results computed again for the gradients."""

    @jax.checkpoint
    def layer(x, _):
        return attend(x, key), None

    return (jax.lax.scan(layer, query, None, length=2)[0] ** 2).sum()


def test_in_a_loop_with_checkpoints(dense):
    arrays, _ = Case("", **SMALL, kv_heads=4, group=2).make()
    step = jax.jit(jax.value_and_grad(layers, (0, 1)))
    spread = spread_over(mesh_of(2, 2), arrays, flash_specs())
    compiled = step.lower(spread["query"], spread["key"]).compile()
    expected = step(arrays["query"], arrays["key"])
    assert_trees_close(compiled(spread["query"], spread["key"]), expected, "float32", gradient=True)
    assert not moved(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P("data", None, None, "model"), P(None, "data", None, "model")], ids=str)
def test_vmap(dense, spec):
    """The examples may be spread, or the batch of each."""
    arrays, _ = Case("", **SMALL, kv_heads=4, group=2).make()
    examples = [jnp.stack([arrays[name], 2 * arrays[name]]) for name in ("query", "key")]
    step = jax.jit(jax.vmap(jax.value_and_grad(layers, (0, 1))))
    spread = [jax.device_put(x, NamedSharding(mesh_of(2, 2), spec)) for x in examples]
    assert_trees_close(step(*spread), step(*examples), "float32", gradient=True)


def test_inside_shard_map_over_one_of_two_axes(dense):
    """There nothing is declared: the axes that are left over are gathered."""
    arrays, _ = Case("", **SMALL, kv_heads=4, group=2).make()
    mesh = mesh_of(2, 2)
    spread = spread_over(mesh, arrays, flash_specs())
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    assert_close(jax.jit(mapped)(spread["query"], spread["key"]), attend(arrays["query"], arrays["key"]), "float32")


def test_explained(dense):
    """Where the arrays say how they are spread, so does ``explain`` what is gathered."""

    def notes(kv_heads, spec, **more):
        sharding = NamedSharding(mesh_of(2, 4), spec)
        query = jax.ShapeDtypeStruct((4, 8, 8, 16), jnp.float32, sharding=sharding)
        key = jax.ShapeDtypeStruct((4, 8, kv_heads, 16), jnp.float32)
        return explain(flash_attention, query, key, key, platform="pallas", **more).candidates[0].reasons[1:]

    assert notes(4, HEADS) == ()
    assert notes(2, HEADS) == ("axis 2 of query is gathered from 4 devices: 2 key heads do not divide by 4",)
    whole = "axis 2 of query is gathered from 4 devices: it stays whole"
    assert notes(4, HEADS, dropout_prob=0.5, dropout_seed=1) == (whole,)
    assert notes(4, P("data", "model")) == (whole.replace("axis 2", "axis 1"),)


# The other operations

EXAMPLES = {str(example): example for example in all_examples()}
PAGES = dict.fromkeys(("key_cache", "value_cache"), P(None, "model"))
SPREAD = {
    "grouped_matmul-batched": {"a": P("data"), "b": P("data", None, None, "model")},
    "grouped_matmul-batched_transposed": {"a": P("data", "model"), "b": P("data", "model")},
    "grouped_matmul-ragged": {"a": P("data"), "b": P(None, None, "model")},
    "grouped_matmul-ragged_one_row_each": {"a": P("data")},
    "mean_pooling-integer_mask": {"inputs": P("data", None, "model"), "mask": P("data")},
    "mean_pooling-packed": {"inputs": P(None, "model")},
    "recurrent-lstm": {"inputs": P("data"), "hidden": P("data")},
    "recurrent-lstm_both": {"inputs": P("data"), "hidden": P(None, "data"), "lengths": P("data")},
    "page_attention-everything": {
        **PAGES,
        "query": P("data", "model"),
        **dict.fromkeys(("context_lens", "block_tables"), P("data")),
        **dict.fromkeys(("k_scale", "v_scale", "softmax_aux"), P("model")),
    },
    "page_attention-chunks": {**PAGES, "query": P(None, "model")},
    "blocksparse_attention-head_masks_gqa": dict.fromkeys(("query", "key", "value"), HEADS),
    "blocksparse_attention-everything": {
        **dict.fromkeys(("query", "key", "value"), HEADS),
        **dict.fromkeys(("sparsity_mask", "q_segment_ids", "kv_segment_ids"), P("data")),
    },
}
IN_SHORT = ("grouped_matmul-ragged", "recurrent-lstm")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.slow) for name in SPREAD]
)
def test_other_operations(name):
    """Both directions, over a mesh as on one device: the XLA kernel behind reversals beside itself."""
    example, mesh = EXAMPLES[name], mesh_of(2, 2)
    arrays = example.arrays()
    spread = spread_over(mesh, arrays, SPREAD[name])
    (entry,) = [e for e in kernel_registry.list_implementations(example.operation) if e.platform is Platform.XLA]

    def step(platform):
        return jax.jit(lambda a: both_ways(lambda **a: example.run(a, platform=platform), a, example.differentiable))

    with registered(example.operation, Reversing(entry)):
        compiled = step("pallas").lower(spread).compile()
    assert_trees_close(compiled(spread), step("xla")(arrays), "float32", gradient=True)
    assert not moved(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPREAD)
def test_the_compiler_moves_nothing_for_xla(name):
    """Some kernels it partitions by itself, the others are declared to it."""
    example = EXAMPLES[name]
    arrays = example.arrays()
    spread = spread_over(mesh_of(2, 2), arrays, SPREAD[name])
    step = jax.jit(lambda a: both_ways(lambda **a: example.run(a, platform="xla"), a, example.differentiable))
    compiled = step.lower(spread).compile()
    assert_trees_close(compiled(spread), step(arrays), "float32", gradient=True)
    assert not moved(compiled)


# Compiled for Hopper, without one

COMPILED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
sys.path.insert(0, {tests!r})
from test_mosaic import HOPPER
from test_partition import both_ways, moved
import ejkernel
topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=HOPPER, topology="1x1x2")
mesh = Mesh(np.array(topology.devices[:2]), ("x",))

def array(shape, *spec, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

platform, kernel = {platform!r}, {kernel!r}
QKV = ("query", "key", "value")
PAGES = ("query", "key_cache", "value_cache") if platform == "xla" else ()
calls = {{}}
for name, spec in dict(batch=("x",), heads=(None, None, "x")).items():
    query, key = array((2, 256, 4, 64), *spec), array((2, 256, 2, 64), *spec)
    arrays = dict(query=query, key=key, value=key)
    calls["flash_attention " + name] = (arrays, QKV, dict(causal=True))
    mask = array((2, 4, 4, 4), *spec[:1], *spec[2:], dtype=bool)
    calls["blocksparse_attention " + name] = (dict(arrays, sparsity_mask=mask), QKV, dict(causal=True))
    batch, heads = (spec + (None, None))[0], (spec + (None, None))[2]
    cache = array((16, 2, 16, 64), None, heads)
    arrays = dict(query=array((4, 4, 64), batch, heads), key_cache=cache, value_cache=cache)
    arrays |= dict(context_lens=array((4,), batch, dtype=jnp.int32), block_tables=array((4, 4), batch, dtype=jnp.int32))
    calls["page_attention " + name] = (arrays, PAGES, {{}})
if platform == "xla":
    sizes = array((4,), dtype=jnp.int32)
    experts = array((4, 64, 64))
    calls["grouped_matmul rows"] = (dict(a=array((256, 64), "x"), b=experts, group_sizes=sizes), ("a", "b"), {{}})
    experts = array((4, 64, 64), None, None, "x")
    calls["grouped_matmul columns"] = (dict(a=array((256, 64)), b=experts, group_sizes=sizes), ("a", "b"), {{}})
    weights = dict(weight_ih=array((128, 16)), weight_hh=array((128, 32)))
    calls["recurrent batch"] = (dict(inputs=array((4, 8, 16), "x"), weights=weights), ("inputs", "weights"), {{}})
    calls["mean_pooling batch"] = (dict(inputs=array((4, 8, 16), "x")), ("inputs",), {{}})
with ejkernel.target("nvidia-h100"):
    for name, (arrays, floats, statics) in calls.items():
        operation = getattr(ejkernel, name.split()[0])
        call = lambda **a: operation(**a, **statics, platform=platform)
        step = (lambda **a: both_ways(call, a, floats)) if floats else call
        compiled = jax.jit(step).lower(**arrays).compile()
        print("CALL", name, "moves", moved(compiled) or "nothing", "there" if kernel in compiled.as_text() else "not there")
"""


@needs_plugin
@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "kernel"), [("xla", ""), ("triton", "triton_kernel_call"), ("pallas", "mosaic_gpu")]
)
def test_compiled_for_two_hoppers(platform, kernel):
    """Kernels on both devices, and nothing is moved between them, in either direction."""
    script = COMPILED.format(tests=os.path.dirname(__file__), platform=platform, kernel=kernel)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    if "Unsupported .version" in result.stderr:
        pytest.skip("this Triton writes PTX that the plugin's assembler does not know")
    assert result.returncode == 0, result.stderr[-2000:]
    told = re.findall("CALL (.*)", result.stdout)
    assert len(told) == (10 if platform == "xla" else 6)
    for call in told:
        assert call.endswith("moves nothing there"), call
