"""Which implementation runs, and what is said of the others; on this device and on described ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from conftest import bound

import ejkernel
from ejkernel import (
    Backend,
    BwdParams,
    FwdParams,
    InvalidInputError,
    Platform,
    Support,
    UnsupportedError,
    explain,
    flash_attention,
    kernel_registry,
    overlay,
    target,
)
from ejkernel.contracts import device as devices
from ejkernel.contracts.device import describe
from ejkernel.contracts.support import HALF, any_device, cpu, cuda, gpu, is_present, multiple_of, rocm, tpu
from ejkernel.ops.config import chain

X = jnp.ones((1, 8, 2, 16))
FLASH = "flash_attention"


def abstract(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture
def register(monkeypatch):
    """Registrations that end with the test, beside the XLA kernel alone: the package's others do not count here."""
    xla = [entry for entry in kernel_registry.list_implementations(FLASH) if entry.platform is Platform.XLA]
    monkeypatch.setitem(kernel_registry._entries, FLASH, xla)
    kernel_registry.generation += 1
    added = []

    def add(platform, backend, kernel, algorithm=FLASH, **options):
        options.setdefault("support", Support.everything())
        added.append(kernel)
        return kernel_registry.register(algorithm, platform, backend, **options)(kernel)

    yield add
    for kernel in added:
        kernel_registry.unregister(kernel)
    kernel_registry.generation += 1


class Contract:
    """An implementation under the residual contract that leaves a trace: it adds a constant to the output."""

    def __init__(self, shift=100.0):
        self.shift = shift

    def forward(self, arrays, spec, params):
        q = arrays["query"]
        out = jnp.zeros((*q.shape[:3], arrays["value"].shape[3]), q.dtype) + self.shift
        return out, jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)

    def backward(self, arrays, spec, params, out, lse, dout, dlse):
        return {name: jnp.full_like(arrays[name], self.shift) for name in ("query", "key", "value")}


def test_strings_and_members_pin_alike():
    for platform, backend in (
        ("xla", None),
        (Platform.XLA, Backend.ANY),
        ("xla", "cpu"),
        (None, Backend.CPU),
        (None, "any"),
    ):
        np.testing.assert_array_equal(flash_attention(X, X, X, platform=platform, backend=backend), X)
        assert kernel_registry.get(FLASH, platform, backend)(X, X, X).shape == X.shape


def test_a_pin_is_never_replaced(register):
    with pytest.raises(UnsupportedError, match="no implementation is registered for platform='cuda'"):
        flash_attention(X, X, X, platform="cuda")
    with pytest.raises(UnsupportedError, match="backend='gpu' was asked for, the device is a CPU"):
        flash_attention(X, X, X, backend="gpu")
    register(Platform.CUDA, Backend.GPU, Contract(), support=Support.everything(devices=cuda(90)))
    with pytest.raises(
        UnsupportedError, match=r"(?s)platform='cuda' cannot run this call.*needs a GPU, the device is a CPU"
    ) as error:
        flash_attention(X, X, X, platform="cuda")
    assert str(explain(FLASH, X, X, X, platform="cuda")) in str(error.value)


def test_priority_decides_where_nothing_was_measured(register):
    register(Platform.CUDA, Backend.CPU, Contract(), priority=5)
    assert (flash_attention(X, X, X) == 100).all()
    explanation = explain(flash_attention, X, X, X)
    assert explanation.chosen.platform is Platform.CUDA
    assert explanation.chosen.backend is Backend.CPU
    assert explanation.chosen.source == "heuristic"
    verdicts = {c.platform: (c.verdict, c.reasons) for c in explanation.candidates}
    assert verdicts[Platform.XLA] == ("slower", ("priority 0 < 5",))
    np.testing.assert_array_equal(flash_attention(X, X, X, platform="xla"), X)


def test_the_fastest_measured_goes_before_priority(register):
    kernel = register(Platform.CUDA, Backend.CPU, Contract(), priority=5)
    assert (flash_attention(X, X, X) == 100).all()
    call, _ = bound(X, X, X)
    device = describe(X.device)
    for entry, seconds in zip(kernel_registry.list_implementations(FLASH), (3.0, 1.5), strict=True):
        chain.remember(call, device, entry, "forward", chain.Record(FwdParams(q_blocksize=4), seconds, "autotune"))
    np.testing.assert_array_equal(flash_attention(X, X, X), X)
    explanation = explain(flash_attention, X, X, X)
    assert explanation.chosen.source == "memory"
    assert explanation.chosen.params.q_blocksize == 4
    assert "2 x, measured" in str(explanation)
    assert flash_attention(X, X, X, platform="cuda")[0, 0, 0, 0] == kernel.shift


def test_what_is_not_stated_is_refused(register):
    register(
        Platform.TRITON,
        Backend.CPU,
        Contract(),
        priority=9,
        support=Support(
            devices=cpu(), dtypes=HALF | {"float32"}, head_dims=multiple_of(8, at_most=64), features={"causal"}
        ),
    )

    def reasons(*args, **kwargs):
        explanation = explain(FLASH, *args, **kwargs)
        return next(c for c in explanation.candidates if c.platform is Platform.TRITON).reasons

    assert explain(FLASH, X, X, X, causal=True).chosen.platform is Platform.TRITON
    assert reasons(X, X, X, sliding_window=3, logits_soft_cap=2.0) == (
        "sliding_window is not supported",
        "logits_soft_cap is not supported",
    )
    assert reasons(X[..., :12], X[..., :12], X) == (
        "head dim 12 is not a multiple of 8",
        "value head dim 16 beside 12 is not supported",
    )
    wide = abstract(1, 8, 2, 128)
    assert reasons(wide, wide, wide) == ("head dim 128 is above 64",)
    with jax.enable_x64(True):
        double = abstract(1, 8, 2, 16, dtype=jnp.float64)
        assert reasons(double, double, double) == ("dtype float64 is not supported",)
    for feature in ejkernel.kernel_registry.operation(FLASH).features:
        arrays, statics = Case(feature, frozenset({feature}), **SIZES.get(feature, {})).make()
        chosen = explain(FLASH, **arrays, **statics).chosen.platform
        assert (chosen is Platform.TRITON) == (feature == "causal"), feature


SIZES = {"gqa": {"group": 2}, "value_dim": {"value_dim": 8}, "cross": {"kv_len": 50}}


def test_gradients_are_part_of_what_is_asked(register):
    """A kernel without a bias gradient runs the forward, another one the backward; as a whole it is out."""
    partial = Support(devices=cpu(), dtypes=HALF | {"float32"}, features={"bias"}, gradients={"query", "key", "value"})
    register(Platform.CUDA, Backend.CPU, Contract(7.0), priority=5, support=partial)
    bias = jnp.zeros((8, 8))

    def loss(q, bias):
        return flash_attention(q, X, X, bias=bias).sum()

    assert loss(X, bias) == 7 * X.size
    np.testing.assert_array_equal(jax.grad(loss)(X, bias), 7)
    assert jnp.isfinite(jax.grad(loss, 1)(X, bias)).all()
    assert (jax.grad(loss, 1)(X, bias) != 7).all()
    with pytest.raises(UnsupportedError, match="no gradient for bias"):
        jax.grad(lambda bias: flash_attention(X, X, X, bias=bias, platform="cuda").sum())(bias)


def test_a_kernel_that_differentiates_as_a_whole(register):
    class Whole:
        def forward(self, arrays, spec, params):
            return 3 * arrays["query"] + 0 * arrays["value"], None

    register(
        Platform.CUDNN,
        Backend.CPU,
        Whole(),
        priority=5,
        support=Support(devices=cpu(), gradients={"query", "key", "value"}),
    )
    np.testing.assert_array_equal(flash_attention(X, X, X), 3 * X)
    np.testing.assert_array_equal(jax.grad(lambda q: flash_attention(q, X, X).sum())(X), 3)
    out = jax.vmap(lambda q: flash_attention(q, X, X))(jnp.stack([X, 2 * X]))
    np.testing.assert_array_equal(out[1], 6 * X)
    assert explain(FLASH, X, X, X, return_lse=True).chosen.platform is Platform.XLA


def test_a_plain_function_gets_the_callers_own_arguments(register):
    seen = {}

    def mine(query, key, value, *, sliding_window=None, **rest):
        seen.update(rest, window=sliding_window)
        return query * 2 + key * 0

    register(Platform.XLA, Backend.CPU, mine, priority=5)
    np.testing.assert_array_equal(
        flash_attention(X, X, X, sliding_window=3, softmax_scale=0.5, fwd_params=FwdParams()), 2 * X
    )
    assert seen == {"window": 3, "softmax_scale": 0.5}
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda q: flash_attention(q, X, X).sum()))(X), 2)
    np.testing.assert_array_equal(jax.vmap(lambda q: flash_attention(q, X, X))(X[None])[0], 2 * X)


def test_a_plain_function_that_lacks_a_gradient_makes_way(register):
    """Where the gradient that it drops is wanted, another implementation runs; pinned, it is an error."""

    def mine(query, key, value, causal=False):
        return query + 0 * jax.lax.stop_gradient(key)

    support = Support(devices=cpu(), features={"causal"}, gradients={"query"})
    register(Platform.CUDA, Backend.CPU, mine, priority=5, support=support)
    np.testing.assert_array_equal(jax.grad(lambda q: flash_attention(q, X, X).sum())(X), 1)
    y = X.at[:, 3].set(2.0)

    def loss(key, **pin):
        return (flash_attention(X, key, y, causal=True, **pin) ** 2).sum()

    expected = jax.grad(lambda key: loss(key, platform="xla"))(y)
    assert jnp.abs(expected).max() > 0
    for run in (jax.grad(loss), jax.jit(jax.grad(loss))):
        np.testing.assert_array_equal(run(y), expected)
    with pytest.raises(UnsupportedError, match="no gradient for key"):
        jax.grad(lambda key: loss(key, platform="cuda"))(y)


def test_an_algorithm_of_the_users_own(register):
    def double(x, times=2):
        return times * x

    register(Platform.XLA, Backend.ANY, double, algorithm="double", support=Support.everything())
    register(
        Platform.CUDA,
        Backend.GPU,
        lambda x: 0 * x,
        algorithm="double",
        priority=9,
        support=Support.everything(devices=cuda()),
    )
    assert "double" in kernel_registry.list_algorithms()
    run = kernel_registry.get("double")
    np.testing.assert_array_equal(run(X, times=3), 3 * X)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: run(x).sum()))(X), 2)
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        kernel_registry.get("double", "cuda")(X)
    with pytest.raises(UnsupportedError, match="double has no implementation for platform='triton'"):
        kernel_registry.get("double", "triton")
    assert [str(e) for e in kernel_registry.list_implementations("double")] == ["cuda gpu", "xla any"]


def test_registering_again_replaces():
    """As a notebook's cell does that is run twice."""
    count = len(kernel_registry.list_implementations(FLASH))
    for times in (2, 3):

        @kernel_registry.register(FLASH, Platform.XLA, Backend.CPU, support=Support.everything(), priority=5)
        def mine(query, key, value, times=times):
            return query * times

        assert len(kernel_registry.list_implementations(FLASH)) == count + 1
        np.testing.assert_array_equal(flash_attention(X, X, X), times * X)
    kernel_registry.unregister(mine)
    np.testing.assert_array_equal(flash_attention(X, X, X), X)


def test_wrong_registrations_are_refused():
    with pytest.raises(InvalidInputError, match=r"support is \{'causal'\}"):
        kernel_registry.register(FLASH, Platform.XLA, Backend.ANY, support={"causal"})
    with pytest.raises(InvalidInputError, match="platform is 'mps'"):
        kernel_registry.register(FLASH, "mps", Backend.ANY, support=Support.everything())
    with pytest.raises(InvalidInputError, match="neither a function nor an object"):
        kernel_registry.register(FLASH, "xla", "any", support=Support.everything())(3)
    with pytest.raises(InvalidInputError, match="register a plain function"):
        kernel_registry.register("new", "xla", "any", support=Support.everything())(Contract())
    with pytest.raises(InvalidInputError, match="algorithm is 'nothing'"):
        kernel_registry.list_implementations("nothing")
    with pytest.raises(InvalidInputError, match="is not registered"):
        kernel_registry.unregister(test_wrong_registrations_are_refused)
    with pytest.raises(InvalidInputError, match="expected a set of names"):
        Support(features="causal")


def test_a_package_that_is_missing_is_a_reason(register):
    support = Support(requires=(("no_such_package", "gpu"),))
    register(Platform.TRITON, Backend.ANY, Contract(), priority=9, support=support)
    candidate = next(c for c in explain(FLASH, X, X, X).candidates if c.platform is Platform.TRITON)
    assert candidate.reasons == ("needs the package no_such_package (pip install '.[gpu]' in a clone of ejkernel)",)


# Combinations, limits that differ from device to device, and libraries


def test_features_that_do_not_go_together(register):
    support = Support(
        devices=cpu(),
        features={"causal", "window", "soft_cap", "cross"},
        excludes=({"causal", "cross"},),
        needs=(("window", "causal"),),
    )
    register(Platform.CUDA, Backend.CPU, Contract(), priority=9, support=support)

    def reasons(*args, **kwargs):
        return explain(FLASH, *args, **kwargs, platform="cuda").candidates[0].reasons

    assert explain(FLASH, X, X, X, causal=True, sliding_window=2).chosen.platform is Platform.CUDA
    assert explain(FLASH, X, X[:, :5], X[:, :5]).chosen.platform is Platform.CUDA
    lengths = "query length 8 beside key length 5"
    assert reasons(X, X[:, :5], X[:, :5], causal=True) == (f"causal with {lengths} is not supported",)
    assert reasons(X, X, X, sliding_window=2) == ("sliding_window is supported only with causal",)
    assert reasons(X, X[:, :5], X[:, :5], sliding_window=2, bias=jnp.zeros(5)) == (
        "bias is not supported",
        "sliding_window is supported only with causal",
    )
    with pytest.raises(InvalidInputError, match=r"Support\(excludes=…\) has .*casual"):
        Support(features={"causal"}, excludes=({"casual", "causal"},))
    with pytest.raises(InvalidInputError, match=r"Support\(needs=…\) has \('window', 'causal'\)"):
        Support(features={"window"}, needs=(("window", "causal"),))
    with pytest.raises(InvalidInputError, match=r"Support\(excludes=…\) has 'causal'"):
        Support(features={"causal"}, excludes=("causal",))


def test_head_dims_may_differ_from_device_to_device(register):
    dims = multiple_of(8, at_most=128, exceptions=((cuda(90, 90), 256),))
    support = Support(dtypes=HALF, devices=cuda(80), head_dims=dims)
    register(Platform.CUDA, Backend.GPU, Contract(), priority=9, support=support)

    def reasons(dim, device):
        x = abstract(1, 8, 2, dim)
        return explain(FLASH, x, x, x, platform="cuda", device=device).candidates[0].reasons

    assert reasons(256, "nvidia-h200") == ("heuristic",)
    assert reasons(264, "nvidia-h200") == ("head dim 264 is above 256, the most on nvidia-h200",)
    assert reasons(136, "nvidia-a100") == ("head dim 136 is above 128, the most on nvidia-a100",)
    assert str(dims) == "multiples of 8, up to 128, up to 256 on NVIDIA GPU of capability 9.0"
    named = {
        cuda(80): "NVIDIA GPU of capability ≥ 8.0",
        cuda(80, 90): "NVIDIA GPU of capability 8.0–9.0",
        cuda(): "NVIDIA GPU",
    }
    named |= {tpu(4): "TPU of generation ≥ 4", rocm(): "AMD GPU", gpu(): "GPU", any_device(): "any"}
    assert {devices: str(devices) for devices in named} == named


def test_a_check_is_asked_on_its_own_devices_alone(register):
    asked = []

    def check(device):
        asked.append((device.name, is_present(device)))
        return "needs libfast >= 2" if is_present(device) else None

    register(Platform.CUDA, Backend.ANY, Contract(), priority=9, support=Support(check=check))
    assert "cuda  any  refused  needs libfast >= 2" in str(explain(FLASH, X, X, X))
    assert explain(FLASH, X, X, X, device="nvidia-h200").chosen.platform is Platform.CUDA
    assert asked == [("cpu", True), ("nvidia-h200", False)]
    register(Platform.TRITON, Backend.GPU, Contract(), priority=9, support=Support(devices=cuda(), check=check))
    explain(FLASH, X, X, X, platform="triton")
    assert len(asked) == 2


# Described devices


@pytest.fixture
def fleet(register):
    """What a full installation would hold: one kernel for each kind of chip."""
    register(Platform.PALLAS, Backend.GPU, Contract(1), priority=30, support=Support.everything(devices=cuda(90, 90)))
    register(Platform.TRITON, Backend.GPU, Contract(2), priority=20, support=Support.everything(devices=cuda(80)))
    register(Platform.PALLAS, Backend.TPU, Contract(3), priority=30, support=Support.everything(devices=tpu(4)))


@pytest.mark.parametrize(
    ("device", "platform", "backend"),
    [
        ("nvidia-h200", Platform.PALLAS, Backend.GPU),
        ("nvidia-h100", Platform.PALLAS, Backend.GPU),
        ("nvidia-b200", Platform.TRITON, Backend.GPU),
        ("nvidia-a100", Platform.TRITON, Backend.GPU),
        ("nvidia-t4", Platform.XLA, Backend.ANY),
        ("amd-mi300x", Platform.XLA, Backend.ANY),
        ("tpu-v6e", Platform.PALLAS, Backend.TPU),
        ("cpu", Platform.XLA, Backend.ANY),
    ],
)
def test_described_devices(fleet, device, platform, backend):
    x = abstract(2, 8192, 32, 128)
    explanation = explain(flash_attention, x, x, x, causal=True, device=device)
    assert (explanation.chosen.platform, explanation.chosen.backend) == (platform, backend)
    with target(device):
        assert explain(flash_attention, x, x, x, causal=True).chosen == explanation.chosen
        with target("cpu"):
            assert explain(FLASH, x, x, x).device.kind == "cpu"
        assert explain(FLASH, x, x, x).device.name == device
    assert explain(FLASH, x, x, x).device.kind == "cpu"


def test_the_table_reads_as_documented(fleet):
    q, kv = abstract(2, 8192, 32, 256), abstract(2, 8192, 8, 256)
    text = str(explain(flash_attention, q, kv, kv, causal=True, logits_soft_cap=50.0, device="nvidia-h200"))
    assert text.splitlines() == [
        "flash_attention(query bf16[2,8192,32,256], key bf16[2,8192,8,256], value bf16[2,8192,8,256], causal, "
        "logits_soft_cap=50.0) on nvidia-h200",
        "  pallas  gpu  chosen   heuristic",
        "  triton  gpu  slower   priority 20 < 30",
        "  xla     any  slower   priority 0 < 30",
        "  pallas  tpu  refused  needs a TPU, the device is a GPU",
    ]


def test_a_target_reaches_traced_functions(fleet):
    jitted = jax.jit(lambda x: flash_attention(x, x, x))
    assert (jitted(X) == X).all()
    with target("nvidia-h200"):
        assert (jitted(X) == 1).all()
    assert (jitted(X) == X).all()
    with pytest.raises(InvalidInputError, match="nvidia-h200"), target("nvidia-h9000"):
        pass


def test_explain_takes_real_devices_and_refuses_nonsense():
    assert explain(FLASH, X, X, X, device=jax.devices()[1]).device.kind == "cpu"
    for wrong in ("matmul", max, None):
        with pytest.raises(InvalidInputError, match=r"operation is .* expected one of .*flash_attention"):
            explain(wrong, X)
    with pytest.raises(InvalidInputError, match="query is"):
        explain(FLASH, X[0], X, X)


def test_the_device_is_that_of_the_arrays_that_have_one(monkeypatch):
    """numpy's are on none."""
    asked = []
    monkeypatch.setattr(devices, "describe", lambda device=None: asked.append(device) or describe(device))
    second = jax.devices()[1]
    there, host = jax.device_put(X, second), np.asarray(X)
    explain(FLASH, host, there, there)
    explain(FLASH, abstract(*X.shape, dtype=X.dtype), there, there)
    flash_attention(host, there, there, sliding_window=(3, 5))
    explain(FLASH, host, host, host)
    assert asked == [second, second, second, None]


# Parameters


def params_of(**kwargs):
    chosen = explain(FLASH, X, X, X, **kwargs).chosen
    return chosen.params, chosen.source


def test_the_chain_of_parameters():
    heuristic, source = params_of()
    assert source == "heuristic"
    assert heuristic.q_blocksize == 8
    with overlay(flash_attention=FwdParams(q_blocksize=4)):
        assert params_of() == (FwdParams.merge(heuristic, FwdParams(q_blocksize=4)), "overlay")
        with overlay(flash_attention=(FwdParams(kv_blocksize=2), BwdParams(q_blocksize=2))):
            assert params_of() == (FwdParams.merge(heuristic, FwdParams(q_blocksize=4, kv_blocksize=2)), "overlay")
        own = FwdParams(q_blocksize=3)
        assert params_of(fwd_params=own) == (FwdParams.merge(heuristic, own), "argument")
    assert params_of() == (heuristic, "heuristic")


def test_wrong_overlays_are_refused():
    with pytest.raises(InvalidInputError, match=r"overlay\(flash_atention=…\)"), overlay(flash_atention=FwdParams()):
        pass
    with (
        pytest.raises(InvalidInputError, match="expected FwdParams, BwdParams or a pair"),
        overlay(flash_attention={"q": 1}),
    ):
        pass
    for no_pair in ((), (FwdParams(q_blocksize=4), FwdParams(q_blocksize=8))):
        with pytest.raises(InvalidInputError, match="or a pair of them"), overlay(flash_attention=no_pair):
            pass


def test_every_block_s_parameters_reach_the_kernel(register):
    used = []

    class Spy(Contract):
        def forward(self, arrays, spec, params):
            used.append(params)
            return super().forward(arrays, spec, params)

        def backward(self, arrays, spec, params, *rest):
            used.append(params)
            return super().backward(arrays, spec, params, *rest)

    register(Platform.CUDA, Backend.CPU, Spy(), priority=5)
    with overlay(flash_attention=(FwdParams(q_blocksize=4), BwdParams(q_blocksize=2))):
        jax.grad(lambda x: flash_attention(x, X, X, bwd_params=BwdParams(kv_blocksize=6)).sum())(X)
    assert used[-2:] == [FwdParams(q_blocksize=4), BwdParams(q_blocksize=2, kv_blocksize=6)]


# What a reader tried to break


def test_a_whole_kernel_makes_way_for_a_plain_one(register):
    class Whole:
        def forward(self, arrays, spec, params):
            return arrays["query"], None

    register(Platform.CUDNN, Backend.CPU, Whole(), priority=20, support=Support(devices=cpu()))

    def plain(query, key, value):
        return 5 * query

    register(Platform.PALLAS, Backend.CPU, plain, priority=10, support=Support.everything())
    np.testing.assert_array_equal(flash_attention(X, X, X), X)
    np.testing.assert_array_equal(jax.grad(lambda q: flash_attention(q, X, X).sum())(X), 5)


def test_a_missing_gradient_is_not_a_zero(register):
    class Forgetful(Contract):
        def backward(self, *args):
            grads = super().backward(*args)
            del grads["value"]
            return grads

    register(Platform.CUDA, Backend.CPU, Forgetful(), priority=5)
    assert jax.grad(lambda q: flash_attention(q, X, X).sum())(X).shape == X.shape
    with pytest.raises(UnsupportedError, match=r"declares gradients for value .* returned none"):
        jax.grad(lambda v: flash_attention(X, X, v).sum())(X)


def test_all_kinds_of_objects_are_kernels(register):
    import dataclasses
    import types

    contract = Contract(3.0)

    @dataclasses.dataclass
    class Unhashable:
        shift: float = 4.0

        def forward(self, arrays, spec, params):
            return Contract(self.shift).forward(arrays, spec, params)

        backward = Contract.backward

    class Functions:
        forward = staticmethod(contract.forward)
        backward = staticmethod(contract.backward)

    class Methods(Contract):
        pass

    namespace = types.SimpleNamespace(forward=contract.forward, backward=contract.backward)
    for kernel, value in ((namespace, 3), (Unhashable(), 4), (Functions, 3), (Methods, 100)):
        register(Platform.CUDA, Backend.CPU, kernel, priority=5)
        assert (flash_attention(X, X, X) == value).all()
        assert jax.grad(lambda q: flash_attention(q, X, X).sum())(X).shape == X.shape
        kernel_registry.unregister(kernel)
        kernel_registry.register(FLASH, Platform.CUDA, Backend.GPU, support=Support.everything(devices=cuda()))(kernel)

    named = [types.SimpleNamespace(forward=contract.forward, name=name) for name in ("one", "two")]
    before = len(kernel_registry.list_implementations(FLASH))
    for kernel in named:
        register(Platform.CUDA, Backend.CPU, kernel)
    assert len(kernel_registry.list_implementations(FLASH)) == before + 2


def test_more_wrong_registrations():
    class NoForward:
        pass

    class NeedsArguments:
        def __init__(self, size):
            self.size = size

        def forward(self, arrays, spec, params):
            return arrays["query"], None

    register = kernel_registry.register
    with pytest.raises(InvalidInputError, match="class without a forward"):
        register(FLASH, "xla", "any", support=Support.everything())(NoForward)
    with pytest.raises(InvalidInputError, match="register an instance"):
        register(FLASH, "xla", "any", support=Support.everything())(NeedsArguments)
    with pytest.raises(InvalidInputError, match="priority is 'high'"):
        register(FLASH, "xla", "any", support=Support.everything(), priority="high")
    with pytest.raises(InvalidInputError, match="names casual; flash_attention knows causal"):
        register(FLASH, "xla", "any", support=Support(features={"casual"}))(max)
    with pytest.raises(InvalidInputError, match="expected names of dtypes"):
        Support(dtypes={"float33"})
    assert Support(dtypes={jnp.float32, np.float16}).dtypes == {"float32", "float16"}


def test_everything_is_spelled_out(register):
    register(Platform.CUDA, Backend.CPU, Contract())
    entry = next(e for e in kernel_registry.list_implementations(FLASH) if e.platform is Platform.CUDA)
    assert {"bias", "sinks"} <= entry.support.features
    assert entry.support.gradients == {"query", "key", "value", "bias", "softmax_aux"}
    assert "priority 0 too, registered later" in str(explain(FLASH, X, X, X))


def test_explain_takes_what_the_operation_takes(register):
    for options in (
        {"dropout_seed": 2**31 + 5},
        {"dropout_seed": 2**70, "dropout_prob": 0.1},
        {"sliding_window": [2, 0]},
    ):
        flash_attention(X, X, X, **options)
        assert explain(FLASH, X, X, X, **options).chosen.platform is Platform.XLA
    register(Platform.CUDA, Backend.CPU, Contract(), priority=5)
    assert explain(kernel_registry.get(FLASH, "xla"), X, X, X).chosen.platform is Platform.XLA


def test_empty_parameters_say_nothing():
    assert params_of(fwd_params=FwdParams())[1] == "heuristic"


_THREADS = """
import threading, jax.numpy as jnp
from ejkernel import flash_attention
x, errors = jnp.ones((1, 4, 1, 4)), []
barrier = threading.Barrier(8)
def run():
    barrier.wait()
    try:
        flash_attention(x, x, x)
    except Exception as error:
        errors.append(error)
threads = [threading.Thread(target=run) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not errors, errors
"""


def test_first_calls_from_several_threads():
    import subprocess
    import sys

    result = subprocess.run([sys.executable, "-c", _THREADS], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_a_kernel_runs_on_its_backend_alone(register):
    """Whatever its support says of devices: a GPU's kernel is not asked on a CPU."""

    def mine(query, key, value):
        return query * 0

    register(Platform.TRITON, Backend.GPU, mine, priority=99)
    np.testing.assert_array_equal(flash_attention(X, X, X), X)
    assert "triton  gpu  refused  needs a GPU, the device is a CPU" in str(explain(FLASH, X, X, X))
    assert explain(FLASH, X, X, X, device="nvidia-h200").chosen.platform is Platform.TRITON
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        flash_attention(X, X, X, platform="triton")
    register(Platform.XLA, Backend.TPU, lambda x: x, algorithm="mine_alone")
    with pytest.raises(UnsupportedError, match="needs a TPU"):
        kernel_registry.get("mine_alone")(X)
    with pytest.raises(InvalidInputError, match="no device is in both"):
        kernel_registry.register(FLASH, "cuda", "gpu", support=Support.everything(devices=cpu()))(max)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"sliding_window": (3, 1)}, {"causal": True, "sliding_window": (2, None)}],
    ids=str,
)
def test_cost_counts_what_is_visible(options):
    """Operations and bytes, against a count of the oracle's mask."""
    import oracle

    q, k, v = abstract(2, 9, 6, 8), abstract(2, 13, 3, 8), abstract(2, 13, 3, 5)
    operation = kernel_registry.operation(FLASH)
    call, _ = bound(q, k, v, **options)
    pairs = int(oracle.visible_pairs(2, 6, 9, 13, **options).sum())
    cost = operation.cost(call)
    assert cost.flops == 2 * pairs * (8 + 5)
    assert cost.backward_flops == 2 * pairs * (3 * 8 + 2 * 5)
    read = 2 * (2 * 9 * 6 * 8 + 2 * 13 * 3 * 8 + 2 * 13 * 3 * 5)
    assert cost.bytes == read + 2 * (2 * 9 * 6 * 5)
    assert cost.backward_bytes == 2 * cost.bytes
