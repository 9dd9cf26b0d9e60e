"""examples/moe_layer.py and the lab's mixture-of-experts layer: the result, its gradients, torch, the rows that are written."""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import moe_layer as example
import numpy as np
import pytest
from lanes import some

from ejkernel.lab import calls, moe, speed, workloads
from ejkernel.lab.accuracy import check, check_plan, relative_errors
from ejkernel.lab.speed import Job
from ejkernel.utils.bursts import BurstTimes

SMALL = moe.MoE(experts=5, chosen=2, width=16, hidden=8)
IDLE = moe.MoE(experts=40, chosen=3, width=8, hidden=4)  # most experts have no token


@functools.cache
def expected(sizes):
    """Arrays, and the result and the gradients by every expert for every token, in float64."""
    arrays = sizes.arrays(21 if sizes is SMALL else 6, "float32")
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), "float64"), arrays)
        found = example.with_gradients(functools.partial(moe.dense, chosen=sizes.chosen))(exact)
    return arrays, jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("sizes", some([SMALL, IDLE], SMALL), ids=["few experts", "idle experts"])
def test_the_layer_and_its_gradients(sizes):
    arrays, exact = expected(sizes)
    found = example.with_gradients(functools.partial(moe.moe_layer, chosen=sizes.chosen))(arrays)
    assert max(relative_errors(found, exact).values()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("apart", [None, *example.APART])
def test_the_layer_without_a_fusion_is_the_same(apart):
    arrays, exact = expected(SMALL)
    given = {**arrays, "tokens": arrays["tokens"][0]}
    if apart == example.APART[0]:
        given["gate_up"] = jnp.split(given["gate_up"], 2, axis=-1)
    found = example.with_gradients(functools.partial(example.layer, chosen=SMALL.chosen, apart=apart))(given)
    if apart == example.APART[0]:
        found["gate_up"] = jnp.concatenate(found["gate_up"], -1)
    found = {name: x.reshape(exact[name].shape) for name, x in found.items()}
    assert max(relative_errors(found, exact).values()) < 1e-5


def test_tokens_go_to_their_experts_and_back():
    tokens = jax.random.normal(jax.random.key(0), (30, 4))
    router = jax.random.normal(jax.random.key(1), (4, 6))
    shares, order, places, sizes = jax.jit(moe.routed, static_argnums=2)(tokens, router, 2)
    experts = np.argsort(-np.asarray(tokens @ router, np.float64), axis=-1)[:, :2]
    np.testing.assert_array_equal(sizes, np.bincount(experts.ravel(), minlength=6))
    by_expert = experts.ravel()[order]
    assert (np.diff(by_expert) >= 0).all()
    np.testing.assert_array_equal(by_expert[np.asarray(places)], experts)
    np.testing.assert_allclose(shares.sum(-1), 1, rtol=1e-6)
    rows = moe.spread(tokens, order, places)
    np.testing.assert_array_equal(rows[places], jnp.stack([tokens, tokens], 1))
    np.testing.assert_allclose(moe.collect(rows, order, places), 2 * tokens)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_s_layer_is_the_same(dtype):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    sizes, (arrays, exact) = SMALL, expected(SMALL)
    given = {name: torch.from_dlpack(x.astype(dtype)).requires_grad_() for name, x in arrays.items()}
    out = moe.torch_layer(**given, chosen=sizes.chosen)
    grads = torch.autograd.grad((out * out).float().sum(), list(given.values()))
    found = {"out": out.detach(), **dict(zip(given, grads, strict=True))}
    errors = relative_errors({name: x.float().numpy() for name, x in found.items()}, exact)
    assert max(errors.values()) < {"float32": 1e-5, "bfloat16": 3e-2}[dtype]


def test_the_lab_knows_the_layers():
    for name, rate in (("moe_mixtral", 2 * 3 * 2 * 4096 * 14336), ("moe_qwen3", 2 * 3 * 8 * 2048 * 768)):
        layer = workloads.timed(name, 8192, True)
        assert layer.cost("bfloat16").flops == pytest.approx(8192 * rate, rel=0.01)
        assert layer.explained("bfloat16", "nvidia-h200", ("tokens",)).backward.chosen is not None
    with pytest.raises(ValueError, match="'moe_qwen3'; expected one of flash_attention"):
        calls.from_words(["moe_qwen3", "tokens=f32[4,8]"])
    assert calls.from_words(["moe_qwen3"]) == (["moe_qwen3"], [])


@pytest.mark.slow
def test_the_lab_checks_and_times_them(monkeypatch):
    small = workloads.LayerWorkload.of("moe_qwen3", SMALL, 12)
    assert check(small, "xla", "float32")["passed"]
    assert [job[1] for job in check_plan(["moe_mixtral"], "xla")] == ["xla"]
    monkeypatch.setattr(workloads, "timed", lambda *arguments: small)
    monkeypatch.setattr(speed, "time_bursts", lambda runners, **_: {n: BurstTimes((0.002,), 1) for n in runners})
    (row,) = speed.bench(Job("moe_qwen3", 12, speed.FORWARD, ("ejkernel",)))
    assert row["error"] < 1e-6
    assert row["tflops"] == pytest.approx(small.cost("float32").flops / 2e-3 / 1e12)


@pytest.mark.slow
def test_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(workloads, "LAYERS", {name: (SMALL, SMALL) for name in workloads.LAYERS})
    path = tmp_path / "moe.json"
    arguments = ["moe_layer.py", "--tokens", "32", "--fusing", "--peers", "jax.lax.ragged_dot", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert not example.main()
    names = {row["implementation"] for row in json.loads(path.read_text())["layers"]}
    assert names == {"ejkernel", "jax.lax.ragged_dot", "ejkernel, fused", *(f"ejkernel, {x}" for x in example.APART)}
    monkeypatch.syspath_prepend(Path(example.__file__).parents[1] / "benchmarks")
    import schema

    assert {row.quantity for row in schema.read(path).rows} >= {"forward", "forward + backward", "error"}
