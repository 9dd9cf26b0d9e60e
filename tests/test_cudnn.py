"""cuDNN's attention: what is asked of it, when it is refused, and, on a GPU, what it computes."""

import dataclasses
import json
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from conftest import bound
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tolerances import assert_close

from ejkernel import BwdParams, FwdParams, Platform, UnsupportedError, explain, flash_attention, kernel_registry, target
from ejkernel.contracts.device import describe
from ejkernel.kernels._cudnn import flash_attention as cudnn
from ejkernel.kernels._triton import probe
from ejkernel.ops.config import chain
from ejkernel.ops.core import select
from ejkernel.ops.flash_attention import OPERATION

H200 = "nvidia-h200"
FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"


def entry_of(platform):
    return next(e for e in kernel_registry.list_implementations("flash_attention") if e.platform is platform)


ENTRY = entry_of(Platform.CUDNN)


def arrays(q_len=64, kv_len=64, heads=4, kv_heads=4, dim=32, value_dim=None, dtype=jnp.bfloat16, batch=2):
    value_dim = dim if value_dim is None else value_dim
    shapes = ((q_len, heads, dim), (kv_len, kv_heads, dim), (kv_len, kv_heads, value_dim))
    return [jax.ShapeDtypeStruct((batch, *shape), dtype) for shape in shapes]


# What is asked of cuDNN


def lowered(function, *args, device=H200):
    with target(device):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def gradients(platform="cudnn", **options):
    def loss(q, k, v):
        return flash_attention(q, k, v, **options, platform=platform).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2))


def calls(text):
    """``(name, configuration)`` of cuDNN's custom calls in a lowered program."""
    found = re.findall(r'custom_call @(__cudnn\$\w+)\(.*?backend_config = "(.*?)"', text)
    return [(name, json.loads(config.replace(r"\22", '"'))["cudnn_fmha_backend_config"]) for name, config in found]


@pytest.mark.parametrize(
    ("sizes", "options", "mask", "window"),
    [
        ({}, {}, "NO_MASK", 0),
        ({}, {"causal": True}, "CAUSAL", 0),
        ({}, {"causal": True, "sliding_window": (7, 0)}, "CAUSAL", 8),
        ({}, {"causal": True, "sliding_window": 7}, "CAUSAL", 8),
        ({}, {"causal": True, "sliding_window": 0}, "CAUSAL", 1),
        ({}, {"causal": True, "sliding_window": (None, 3)}, "CAUSAL", 0),
        ({}, {"causal": True, "sliding_window": (500, 0)}, "CAUSAL", 0),
        ({"kv_heads": 2, "dtype": jnp.float16}, {"causal": True}, "CAUSAL", 0),
        ({"q_len": 37, "kv_len": 90}, {"softmax_scale": 0.25}, "NO_MASK", 0),
    ],
    ids=str,
)
def test_both_directions_are_told_the_same(sizes, options, mask, window):
    args = arrays(**sizes)
    query, key, _ = args
    (forward, configured), (backward, configured_back) = calls(lowered(gradients(**options), *args))
    assert (forward, backward) == (FORWARD, BACKWARD)
    for config in (configured, configured_back):
        assert config["mask_type"] == mask
        assert config["sliding_window_length"] == window
        assert config["fmha_scale"] == options.get("softmax_scale", query.shape[3] ** -0.5)
        assert config["dropout_rate"] == 0
        assert not config["is_paged_attention"]
        assert config["max_seg_per_batch"] == 1
        logits = [query.shape[0], query.shape[2], query.shape[1], key.shape[1]]
        assert config["intermediate_tensor_shape"]["dimensions"] == list(map(str, logits))
    with target(H200):
        shapes = jax.eval_shape(gradients(**options), *args)
    assert [(x.shape, x.dtype) for x in shapes] == [(x.shape, x.dtype) for x in args]


def test_the_forward_s_lse_is_float32():
    query, key, value = arrays(q_len=48, kv_len=80, kv_heads=2)
    call, _ = bound(query, key, value)
    prepared = {"query": query, "key": key, "value": value}
    out, lse = jax.eval_shape(lambda x: cudnn.forward(x, call.spec, FwdParams()), prepared)
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, 48), jnp.float32)


def test_a_negative_scale_is_taken_out_of_cudnn():
    text = lowered(gradients(softmax_scale=-0.5), *arrays())
    assert [config["fmha_scale"] for _, config in calls(text)] == [0.5, 0.5]
    assert text.count("stablehlo.negate") == 3  # the query forward and backward, and its gradient
    assert "stablehlo.negate" not in lowered(gradients(softmax_scale=0.5), *arrays())


@pytest.mark.parametrize(("direction", "expected"), [("forward", FORWARD), ("backward", BACKWARD)])
def test_each_direction_pairs_with_another_kernel(direction, expected, monkeypatch):
    """Where cuDNN was measured to be the fastest in one direction and XLA's kernel in the other."""
    monkeypatch.setenv("EJKERNEL_NONDETERMINISTIC", "1")
    args = arrays()
    fastest = {"forward": Platform.XLA, "backward": Platform.XLA, direction: Platform.CUDNN}
    with target(H200):
        call, _ = bound(*args)
        for each, params in (("forward", FwdParams()), ("backward", BwdParams())):
            record = chain.Record(params, 1e-3, "autotune")
            chain.remember(call, describe(H200), entry_of(fastest[each]), each, record)
        text = lowered(gradients(platform=None), *args)
    assert [name for name, _ in calls(text)] == [expected]


def test_its_backward_is_taken_only_if_it_is_asked_for():
    """Its gradients differ from run to run, and flash_attention's do not."""
    args = arrays()
    with target(H200):
        call, _ = bound(*args)
        for each, params in (("forward", FwdParams()), ("backward", BwdParams())):
            for platform, seconds in ((Platform.CUDNN, 1e-3), (Platform.XLA, 1.0)):
                chain.remember(
                    call, describe(H200), entry_of(platform), each, chain.Record(params, seconds, "autotune")
                )
        assert [name for name, _ in calls(lowered(gradients(platform=None), *args))] == [FORWARD]
        pins = select.Pins()
        wanted = frozenset({"query"})
        forward = select.decide(call, describe(H200), pins, wanted).require()
        text = str(select.decide(call, describe(H200), pins, wanted, "backward", forward))
    assert "differ from run to run" in text
    assert "EJKERNEL_NONDETERMINISTIC=1" in text


def test_vmap_is_part_of_the_batch():
    args = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in arrays()]
    found = calls(lowered(jax.vmap(gradients(causal=True)), *args))
    assert [name for name, _ in found] == [FORWARD, BACKWARD]
    assert all(config["intermediate_tensor_shape"]["dimensions"] == ["6", "4", "64", "64"] for _, config in found)


def test_inside_shard_map_each_device_has_its_part():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    function = jax.shard_map(gradients(causal=True), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    found = calls(lowered(function, *arrays()))
    assert [name for name, _ in found] == [FORWARD, BACKWARD]
    assert all(config["intermediate_tensor_shape"]["dimensions"] == ["1", "4", "64", "64"] for _, config in found)


def test_parameters_are_no_obstacle():
    params = FwdParams(q_blocksize=32)
    text = lowered(lambda q, k, v: flash_attention(q, k, v, fwd_params=params, platform="cudnn"), *arrays())
    assert [name for name, _ in calls(text)] == [FORWARD]


# When it is refused


def reasons(*args, device=H200, operation="flash_attention", **options):
    """Why cuDNN is refused; empty if it is not."""
    explanation = explain(operation, *args, device=device, **options)
    candidate = next(c for c in explanation.candidates if c.platform is Platform.CUDNN)
    return candidate.reasons if candidate.verdict == "refused" else ()


SIZES = {"gqa": {"group": 2}, "value_dim": {"value_dim": 8}, "cross": {"kv_len": 50}}


@pytest.mark.parametrize("feature", OPERATION.features)
def test_every_feature_is_run_or_refused(feature):
    case = Case(feature, frozenset({feature}), **SIZES.get(feature, {}))
    made, statics = case.make("bfloat16")
    options = {**made, **statics}
    phrase = bound(**options)[0].features[feature]
    if feature == "window":
        assert reasons(**options) == ("sliding_window is supported only with causal",)
    elif feature in ENTRY.support.features:
        assert reasons(**options) == ()
    else:
        assert reasons(**options) == (f"{phrase} is not supported",)
        with pytest.raises(UnsupportedError, match=re.escape(f"{phrase} is not supported")), target(H200):
            flash_attention(**options, platform="cudnn")


def test_what_it_claims():
    """A feature more is a promise more: values and gradients below, on a GPU, are what it rests on."""
    assert ENTRY.support.features == {"causal", "window", "gqa", "cross"}
    assert ENTRY.support.gradients == {"query", "key", "value"}
    assert ENTRY.support.dtypes == {"float16", "bfloat16"}
    assert ENTRY.priority == 5
    assert not ENTRY.whole


def test_combinations():
    longer = "causal with query length 64 beside key length 80 is not supported"
    assert reasons(*arrays(kv_len=80), causal=True) == (longer,)
    assert reasons(*arrays(kv_len=80), causal=True, sliding_window=(3, 0)) == (longer,)
    assert reasons(*arrays(), sliding_window=(3, 0)) == ("sliding_window is supported only with causal",)
    assert reasons(*arrays(), causal=True, logits_soft_cap=5.0) == ("logits_soft_cap is not supported",)
    assert reasons(*arrays(kv_len=80)) == ()
    assert reasons(*arrays(kv_heads=1), causal=True, sliding_window=(3, 2)) == ()


@pytest.mark.parametrize(
    ("device", "dim", "expected"),
    [
        (H200, 256, ()),
        (H200, 264, ("head dim 264 is above 256, the most on nvidia-h200",)),
        (H200, 20, ("head dim 20 is not a multiple of 8",)),
        ("nvidia-a100", 128, ()),
        ("nvidia-a100", 136, ("head dim 136 is above 128, the most on nvidia-a100",)),
        ("nvidia-b200", 128, ()),
        ("nvidia-b200", 256, ("head dim 256 is above 128, the most on nvidia-b200",)),
        ("nvidia-t4", 64, ("needs capability ≥ 8.0, nvidia-t4 has 7.5",)),
        ("amd-mi300x", 64, ("needs a device of nvidia, this is amd-mi300x",)),
        ("tpu-v6e", 64, ("needs a GPU, the device is a TPU",)),
        ("cpu", 64, ("needs a GPU, the device is a CPU",)),
    ],
)
def test_devices_and_head_dims(device, dim, expected):
    assert reasons(*arrays(dim=dim), device=device) == expected


def test_single_precision_is_refused():
    assert reasons(*arrays(dtype=jnp.float32)) == ("dtype float32 is not supported",)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"sliding_window": 8}], ids=str)
def test_the_ring_never_runs_on_it(options):
    mesh = jax.make_mesh((2,), ("ring",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        found = reasons(*arrays(), operation="ring_attention", **options)
    assert "the log-sum-exp (steps are merged by it) is not supported" in found


# The library


def present(name):
    """A device described by name, as one of this process would look."""
    return dataclasses.replace(describe(name), fingerprint="gpu|NVIDIA|cuda 13000")


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        (H200, 0, "needs cuDNN >= 9.8.0, which is not there (or JAX's CUDA plugin is not)"),
        (H200, 90702, "needs cuDNN >= 9.8.0, found 9.7.2"),
        (H200, 90800, None),
        (H200, 91000, "needs cuDNN >= 9.10.2, found 9.10.0"),
        (H200, 91001, "needs cuDNN >= 9.10.2, found 9.10.1"),
        (H200, 91002, None),
        (H200, 92300, None),
    ],
)
def test_the_version_of_a_device_that_is_here(monkeypatch, name, version, expected):
    monkeypatch.setattr(cudnn, "_cudnn_version", lambda: version)
    assert cudnn.refusal(present(name)) == expected
    assert reasons(*arrays(), device=present(name)) == ((expected,) if expected else ())
    assert cudnn.refusal(describe(name)) is None
    assert reasons(*arrays(), device=name) == ()


def test_newer_chips_need_a_newer_version(monkeypatch):
    monkeypatch.setattr(cudnn, "_cudnn_version", lambda: 91002)
    chip = dataclasses.replace(present("nvidia-b200"), capability=103)
    assert cudnn.refusal(chip) == "needs cuDNN >= 9.11.0, found 9.10.2"


def test_a_cpu_is_never_asked_for_cudnn(monkeypatch):
    def asked():
        raise AssertionError("asked")

    monkeypatch.setattr(cudnn, "_cudnn_version", asked)
    x = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    assert explain("flash_attention", x, x, x).chosen.platform is Platform.XLA


def test_importing_the_package_does_not_import_the_kernel():
    code = "import sys, ejkernel; assert not [m for m in sys.modules if '_cudnn.flash_attention' in m]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# What is private to JAX


def test_the_private_hook_is_the_one_we_know():
    """If this fails, JAX changed: read the difference below, then adapt ``_bind`` and the names above it."""
    assert cudnn.changes() is None, cudnn.changes()
    import jax._src.lib

    assert hasattr(jax._src.lib, "cuda_versions"), f"jax {jax.__version__}: jax._src.lib has no cuda_versions any more"
    directions = [set(cudnn._parameters(direction)) & set(cudnn.ADDED) for direction in ("fwd", "bwd")]
    assert directions[0] == directions[1] in (set(), set(cudnn.ADDED))


def test_the_wrapper_is_bound_as_jax_binds_it():
    """The same program, but for names, as JAX's own function of the same call, which looks for a GPU first."""
    hook = cudnn._hook()
    q, k, v = arrays()

    def theirs(q, k, v):
        unused = jnp.zeros(0, q.dtype)
        rest = {"score_mod": None} if "score_mod" in cudnn._parameters("fwd") else {}
        body = hook._dot_product_attention_fwd_impl
        args = {"score_mod_args": ()} if rest else {}
        options = dict(scale=32**-0.5, seed=0, dropout_rate=0.0, variadic_args=(False, False), is_training=True)
        layout = {"layout": hook.AttentionLayout.BTNH.value, "mask_type": hook.MaskType.CAUSAL}
        return body(q, k, v, *[unused] * 7, **args, **options, **layout, sliding_window_length=8, **rest)

    options = {"causal": True, "sliding_window": 7, "platform": "cudnn"}
    ours = lowered(lambda q, k, v: flash_attention(q, k, v, **options), q, k, v)
    assert calls(ours) == calls(jax.jit(theirs).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize("how", ["parameter", "mask", "gone"])
def test_a_changed_hook_is_a_reason(monkeypatch, how):
    real = cudnn._hook()
    fake = types.SimpleNamespace(**vars(real))
    if how == "parameter":
        fake._dot_product_attention_bwd_impl = lambda query, key, paint: None
        expected = r"takes \(query, key, paint\) for bwd; known is \(query, key, value, bias, "
    elif how == "mask":
        fake.MaskType = types.SimpleNamespace(NO_MASK=0)
        expected = "has changed: .*CAUSAL"
    else:
        del fake._dot_product_attention_fwd_p_wrapper
        expected = "has changed: .*_dot_product_attention_fwd_p_wrapper"
    # Beside a Triton that cannot run, cuDNN is what runs; then XLA is.
    monkeypatch.setattr(probe, "_changed_language", lambda: "taken away")
    assert explain("flash_attention", *arrays(), device="nvidia-a100").chosen.platform is Platform.CUDNN
    monkeypatch.setattr(cudnn, "_hook", lambda: fake)
    cudnn.changes.cache_clear()
    try:
        assert explain("flash_attention", *arrays(), device="nvidia-a100").chosen.platform is Platform.XLA
        (found,) = reasons(*arrays())
        assert re.search(
            rf"cuDNN's attention cannot be reached \(jax {re.escape(jax.__version__)}: .*{expected}", found
        )
    finally:
        cudnn.changes.cache_clear()


# On a GPU

GPU_CASES = [
    Case("plain", q_len=128, kv_len=128, head_dim=64, value_dim=64),
    Case("odd", q_len=37, kv_len=37),
    Case("causal", frozenset({"causal"}), q_len=200, kv_len=200, head_dim=128, value_dim=128, group=2),
    Case("mqa", frozenset({"causal"}), q_len=130, kv_len=130, kv_heads=1, group=4, head_dim=64, value_dim=64),
    Case("window", frozenset({"causal", "window"}), q_len=300, kv_len=300, window=(70, 0), head_dim=64, value_dim=64),
    Case("narrow", frozenset({"causal", "window"}), q_len=90, kv_len=90, window=2),
    Case("own", frozenset({"causal", "window"}), q_len=64, kv_len=64, window=0),
    Case("cross", q_len=29, kv_len=145, group=3),
    Case("fewer_keys", q_len=145, kv_len=29),
    Case("one_query", q_len=1, kv_len=300, head_dim=64, value_dim=64, group=4),
    Case("one_key", q_len=20, kv_len=1),
    Case("one_of_each", frozenset({"causal"}), q_len=1, kv_len=1, head_dim=8, value_dim=8),
    Case("wide", frozenset({"causal"}), q_len=100, kv_len=100, head_dim=256, value_dim=256),
    Case("forty", frozenset({"causal"}), q_len=100, kv_len=100, head_dim=40, value_dim=40),
    Case("long", frozenset({"causal"}), q_len=1500, kv_len=1500, batch=1, head_dim=64, value_dim=64),
]


def runs_here(case):
    """Skip what this GPU's cuDNN does not claim."""
    made, statics = case.make("bfloat16")
    why = reasons(**made, **statics, device=None)
    if why:
        pytest.skip("; ".join(why))


def check(case, dtype, platform="cudnn", **more):
    """Values and gradients against float64."""
    made, statics = case.make(dtype)
    known = case.as_oracle(made, statics)
    rng = np.random.default_rng(1)
    out, pull = jax.vjp(lambda *x: flash_attention(*x, **statics, **more, platform=platform), *made.values())
    dout = jnp.asarray(rng.standard_normal(out.shape), dtype)
    expected, _, grads = oracle.attention(**known, **more, dout=np.asarray(dout))
    assert out.dtype == dtype
    assert_close(out, expected, dtype, what=f"{case} out")
    for name, grad in zip(("query", "key", "value"), pull(dout), strict=True):
        assert grad.dtype == dtype
        assert_close(grad, grads[name], dtype, gradient=True, what=f"{case} {name}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_values_and_gradients(case, dtype):
    runs_here(case)
    check(case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.5, 1.5, -0.5, 0.0])
def test_scales(scale):
    check(GPU_CASES[2], "bfloat16", softmax_scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_the_pair_that_other_kernels_get(case):
    """The lse against float64, and each direction of cuDNN with the other one of XLA."""
    runs_here(case)
    made, statics = case.make("bfloat16")
    call, _ = bound(**made, **statics)
    expected, expected_lse = oracle.attention(**case.as_oracle(made, statics))
    kernels = [cudnn.CudnnFlashAttention, entry_of(Platform.XLA).kernel]
    device = describe()

    def forward(kernel):
        defaults = getattr(kernel, "defaults", lambda *_: FwdParams())
        params = defaults(call.shapes, call.spec, device, "forward")
        return jax.jit(lambda arrays: kernel.forward(arrays, call.spec, params))(made)

    def backward(kernel, out, lse):
        defaults = getattr(kernel, "defaults", lambda *_: BwdParams())
        params = defaults(call.shapes, call.spec, device, "backward")
        wanted = {} if kernel is kernels[0] else {"wanted": frozenset({"query", "key", "value"})}
        rest = (out, lse, jnp.ones_like(out), jnp.zeros_like(lse))
        return jax.jit(lambda arrays, *rest: kernel.backward(arrays, call.spec, params, *rest, **wanted))(made, *rest)

    pairs = [forward(kernel) for kernel in kernels]
    for out, lse in pairs:
        assert lse.dtype == jnp.float32
        assert_close(out, expected, "bfloat16", what=f"{case} out")
        assert_close(lse, expected_lse, "bfloat16", what=f"{case} lse")
    _, _, grads = oracle.attention(**case.as_oracle(made, statics), dout=np.ones(expected.shape))
    for kernel, pair in zip(kernels, reversed(pairs), strict=True):
        for name, grad in backward(kernel, *pair).items():
            assert_close(grad, grads[name], "bfloat16", gradient=True, what=f"{case} {name}")


LONG = Case("reruns", frozenset({"causal"}), q_len=4096, kv_len=4096, batch=2, kv_heads=8, head_dim=128, value_dim=128)


def reruns(function, *args, times=5):
    first, *others = [jax.tree.map(np.asarray, function(*args)) for _ in range(times)]
    return [all(np.array_equal(a, b) for a, b in zip(first, other, strict=True)) for other in others]


def training_step(*args):
    out, pull = jax.vjp(lambda *x: flash_attention(*x, causal=True, platform="cudnn"), *args)
    return out, *pull(out)


@pytest.mark.gpu
def test_reruns_of_the_forward_are_bit_identical():
    made, _ = LONG.make("bfloat16")
    run = jax.jit(lambda *x: (flash_attention(*x, causal=True, platform="cudnn"),))
    assert all(reruns(run, *made.values()))


@pytest.mark.gpu
def test_reruns_of_the_backward_are_bit_identical_where_xla_is_told_so():
    made, _ = LONG.make("bfloat16")
    run = jax.jit(training_step, compiler_options={"xla_gpu_exclude_nondeterministic_ops": True})
    assert all(reruns(run, *made.values()))


@pytest.mark.gpu
def test_reruns_of_the_backward():
    if not ENTRY.support.deterministic:
        pytest.skip(f"{ENTRY} does not claim them")
    made, _ = LONG.make("bfloat16")
    assert all(reruns(jax.jit(training_step), *made.values()))


@pytest.mark.gpu
def test_it_is_what_runs_here():
    made, statics = GPU_CASES[2].make("bfloat16")
    assert explain(flash_attention, **made, **statics, platform="cudnn").chosen.platform is Platform.CUDNN


def test_one_query_and_one_key():
    """cuDNN refuses it; its answer is the value, its gradient the cotangents' sum over the group."""
    made, _ = Case("one", kv_heads=2, group=3, q_len=1, kv_len=1, head_dim=8, value_dim=8).make("bfloat16")
    call, _ = bound(**made)
    kernel = cudnn.CudnnFlashAttention
    out, lse = kernel.forward(made, call.spec, FwdParams())
    dout = jax.random.normal(jax.random.key(0), out.shape, out.dtype)
    grads = kernel.backward(made, call.spec, BwdParams(), out, lse, dout, jnp.zeros_like(lse))
    exact, exact_lse, expected = oracle.attention(
        **{name: np.asarray(x) for name, x in made.items()}, dout=np.asarray(dout), dlse=np.zeros(lse.shape)
    )
    assert_close(out, exact, "bfloat16")
    assert_close(lse, exact_lse, "bfloat16")
    for name in ("query", "key", "value"):
        assert_close(grads[name], expected[name], "bfloat16", gradient=True, what=name)
