"""What is particular to mean_pooling; the properties of every operation are in the files of each."""

import dataclasses
import itertools

import examples_mean_pooling
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples_mean_pooling import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_jit import count_traces
from tolerances import assert_close

import ejkernel
from ejkernel import FwdParams, InvalidInputError, UnsupportedError, mean_pooling, overlay
from ejkernel.contracts.device import describe
from ejkernel.kernels._xla import mean_pooling as kernel
from ejkernel.kernels._xla.mean_pooling import XlaMeanPooling
from ejkernel.ops.mean_pooling import MeanPoolingSpec

slow = pytest.mark.slow
DTYPES = [pytest.param("float16", marks=slow), "bfloat16", "float32"]


def numbers(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def with_gradient(x, **rest):
    """The means and the gradient for cotangents 1, 2, 3, …"""
    return _with_gradient(x, rest)


@jax.jit
def _with_gradient(x, rest):
    out, pull = jax.vjp(lambda x: mean_pooling(x, **rest), x)
    return out, pull(jnp.arange(1, out.size + 1, dtype=out.dtype).reshape(out.shape))[0]


def expected(x, keeps):
    """The same in numpy, for sequences that are each a boolean choice of all tokens."""
    x = np.asarray(x, np.float64)
    counts = np.maximum([keep.sum() for keep in keeps], 1)
    means = np.stack([x[keep].sum(0) / count for keep, count in zip(keeps, counts, strict=True)])
    cotangents = np.arange(1.0, means.size + 1).reshape(means.shape)
    grad = np.zeros_like(x)
    for keep, count, cotangent in zip(keeps, counts, cotangents, strict=True):
        grad[keep] = cotangent / count
    return means, grad


LANES = st.sampled_from([1, 5, 16, 50, 200])


@settings(max_examples=15)
@given(st.data())
def test_any_mask(data):
    """With any number of rows a step: parameters never change what a mean is."""
    batch, length = 3, data.draw(st.sampled_from([1, 17, 40]))
    x = numbers(batch, length, 4, seed=data.draw(st.integers(0, 9)))
    flags = st.lists(st.sampled_from([0, 1, 1, 2]), min_size=batch * length, max_size=batch * length)
    mask = np.array(data.draw(flags)).reshape(batch, length) > data.draw(st.integers(-1, 2))
    with overlay(mean_pooling=FwdParams(blocksize_m=data.draw(LANES))):
        means, grad = with_gradient(x, mask=jnp.asarray(mask))
    keeps = [np.arange(batch)[:, None] == i for i in range(batch)] & mask
    expected_means, expected_grad = expected(x, keeps)
    assert_close(means, expected_means, "float32")
    assert_close(grad, expected_grad, "float32")


@settings(max_examples=15)
@given(st.data())
def test_any_packing(data):
    tokens, sequences = 60, data.draw(st.sampled_from([1, 4, 70]))
    ends = sorted(data.draw(st.lists(st.integers(0, tokens), min_size=sequences, max_size=sequences)))
    x = numbers(tokens, 3)
    with overlay(mean_pooling=FwdParams(blocksize_m=data.draw(LANES))):
        means, grad = with_gradient(x, cu_seqlens=jnp.asarray([0, *ends]))
    token = np.arange(tokens)
    keeps = [(token >= start) & (token < stop) for start, stop in itertools.pairwise([0, *ends])]
    expected_means, expected_grad = expected(x, keeps)
    assert_close(means, expected_means, "float32")
    assert_close(grad, expected_grad, "float32")


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [4, pytest.param(1000, marks=slow)])
def test_what_does_not_count_never_leaks(dtype, poison, rows):
    mask = np.random.default_rng(1).random((3, 25)) < 0.5
    mask[1] = False
    x = numbers(3, 25, 4, dtype=dtype)
    clean, poisoned = (jnp.where(mask[..., None], x, fill).astype(dtype) for fill in (0, poison))
    with overlay(mean_pooling=FwdParams(blocksize_m=rows)):
        means, grad = with_gradient(poisoned, mask=jnp.asarray(mask))
        np.testing.assert_array_equal(means, with_gradient(clean, mask=jnp.asarray(mask))[0])
    np.testing.assert_array_equal(np.asarray(means)[1], 0)
    np.testing.assert_array_equal(np.asarray(grad)[~mask], 0)
    assert (np.asarray(grad)[mask] != 0).all()


@pytest.mark.parametrize("rows", [pytest.param(1, marks=slow), 5, pytest.param(64, marks=slow)])
def test_one_sequence_s_nan_stays_its_own(rows):
    """Packed neighbours, and the padding behind them."""
    x = numbers(30, 3)
    offsets = jnp.array([0, 7, 7, 15, 26])
    poisoned = x.at[7:15].set(jnp.nan).at[26:].set(jnp.inf)
    with overlay(mean_pooling=FwdParams(blocksize_m=rows)):
        means, grad = with_gradient(poisoned, cu_seqlens=offsets)
        clean, clean_grad = with_gradient(x, cu_seqlens=offsets)
    assert np.isnan(means[2]).all()
    np.testing.assert_array_equal(np.delete(means, 2, 0), np.delete(clean, 2, 0))
    np.testing.assert_array_equal(grad, clean_grad)
    np.testing.assert_array_equal(grad[26:], 0)


def test_cotangents_of_empty_sequences_go_nowhere():
    x = numbers(2, 6, 3)
    mask = jnp.array([[1, 0, 1, 0, 0, 0], [0] * 6])
    _, pull = jax.vjp(lambda x: mean_pooling(x, mask), x)
    (grad,) = pull(jnp.ones((2, 3)).at[1].set(jnp.nan))
    np.testing.assert_array_equal(grad[1], 0)
    np.testing.assert_array_equal(grad[0], np.asarray(mask[0])[:, None] * np.full((1, 3), 0.5))


@pytest.mark.parametrize(
    "mask_dtype", [bool, "uint8", "float32", *[pytest.param(x, marks=slow) for x in ("int8", "int32", "bfloat16")]]
)
def test_masks_of_every_dtype(mask_dtype):
    x = numbers(2, 9, 3)
    mask = np.random.default_rng(0).integers(0, 2, (2, 9))
    actual = mean_pooling(x, jnp.asarray(mask * (1 if mask_dtype is bool else 3)).astype(mask_dtype))
    assert_close(actual, reference(x, mask), "float32")
    assert_close(mean_pooling(x, np.asarray(mask)), reference(x, mask), "float32")


def test_a_mask_of_ones_is_no_mask():
    x = numbers(3, 21, 4)
    assert_close(mean_pooling(x, jnp.ones((3, 21))), mean_pooling(x), "float32")
    assert_close(mean_pooling(x), jnp.mean(x, axis=1), "float32")


def test_packed_is_padded_without_padding():
    x = numbers(3, 8, 4)
    lengths = np.array([8, 0, 5])
    flat = jnp.concatenate([x[i, :n] for i, n in enumerate(lengths)])
    offsets = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]))
    mask = jnp.arange(8) < lengths[:, None]
    assert_close(mean_pooling(flat, cu_seqlens=offsets), mean_pooling(x, mask), "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_packed", [False, True])
def test_half_precision_accumulates_in_float32(dtype, is_packed):
    """A sum that overflows float16, of terms that bfloat16 would lose beside it."""
    x = jnp.full((1, 3000, 2), 100.0, dtype)
    means = mean_pooling(x[0], cu_seqlens=jnp.array([0, 3000])) if is_packed else mean_pooling(x)
    assert means.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(np.asarray(means, np.float32), 100)


@slow
def test_float64(x64):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 50, 3)))
    assert x.dtype == jnp.float64
    assert_close(mean_pooling(x), np.mean(np.asarray(x), axis=1), "float64")
    assert_close(mean_pooling(x[0], cu_seqlens=jnp.array([0, 20, 50]))[1], np.mean(np.asarray(x)[0, 20:], axis=0), "float64")  # fmt: skip


@slow
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("batched", [("inputs",), ("rest",), ("inputs", "rest")])
def test_vmap_over_some_arguments(is_packed, batched):
    x = numbers(3, 12, 2) if is_packed else numbers(3, 4, 12, 2)
    if is_packed:
        rest = jnp.array([[0, 4, 12], [0, 0, 7], [0, 12, 12]])
    else:
        rest = jnp.asarray(np.random.default_rng(0).random((3, 4, 12)) < 0.5)
    name = "cu_seqlens" if is_packed else "mask"
    axes = [0 if part in batched else None for part in ("inputs", "rest")]
    given = [a if axis == 0 else a[0] for a, axis in zip((x, rest), axes, strict=True)]

    def run(x, rest):
        return with_gradient(x, **{name: rest})

    actual = jax.vmap(run, axes)(*given)
    for i in range(3):
        own = run(x[i] if axes[0] == 0 else x[0], rest[i] if axes[1] == 0 else rest[0])
        for a, e in zip(actual, own, strict=True):
            assert_close(a[i], e, "float32")


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=slow)])
def test_packed_inside_shard_map(shared):
    """Each device has its own sequences, or its own tokens beside offsets that are shared."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, offsets = numbers(2, 12, 3), jnp.array([[0, 4, 12], [0, 4, 12] if shared else [0, 0, 7]])

    def loss(x, ends):
        out = mean_pooling(x[0], cu_seqlens=ends if shared else ends[0])
        return jax.lax.psum((out**2).sum(), "data")

    specs = (P("data"), P() if shared else P("data"))
    mapped = jax.jit(jax.value_and_grad(jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())))

    def plain(x):
        return sum((mean_pooling(x[i], cu_seqlens=offsets[i]) ** 2).sum() for i in range(2))

    value, grad = mapped(x, offsets[0] if shared else offsets)
    expected_value, expected_grad = jax.value_and_grad(plain)(x)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-6)


def test_one_trace_for_all_values(monkeypatch):
    traces = count_traces(monkeypatch)
    x = numbers(2, 11, 3)
    for seed in range(3):
        mean_pooling(x, jnp.asarray(np.random.default_rng(seed).random((2, 11)) < 0.5))
    assert len(traces) == 1
    for ends in ([0, 4, 22], [0, 0, 7], [0, 22, 22]):
        mean_pooling(x.reshape(22, 3), cu_seqlens=jnp.array(ends))
    assert len(traces) == 2


def test_traced_offsets_never_read_outside():
    x = numbers(10, 2)
    run = jax.jit(lambda offsets: mean_pooling(x, cu_seqlens=offsets))
    assert_close(run(jnp.array([0, 4, 99])), mean_pooling(x, cu_seqlens=jnp.array([0, 4, 10])), "float32")
    assert np.isfinite(run(jnp.array([5, 2, -7]))).all()


@pytest.mark.parametrize("is_packed", [False, True])
def test_nothing_of_the_inputs_size_is_written(is_packed):
    """One pass: the forward's temporary memory is a small part of the inputs'."""
    x = jnp.ones((1 << 15, 64))
    rest = {"cu_seqlens": jnp.arange(17, dtype=jnp.int32) << 11}
    if not is_packed:
        x, rest = x.reshape(16, 1 << 11, 64), {"mask": jnp.ones((16, 1 << 11), bool)}
    with overlay(mean_pooling=FwdParams(blocksize_m=64)):
        compiled = jax.jit(lambda x, rest: mean_pooling(x, **rest)).lower(x, rest).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < x.nbytes / 10


def test_one_cpu_takes_lanes_and_several_devices_whole_sequences():
    shapes = {"inputs": jax.ShapeDtypeStruct((16, 2048, 512), jnp.float32)}
    here = describe(jax.devices()[0])
    spec = MeanPoolingSpec(packed=False)
    one, several = (dataclasses.replace(here, shared_by=count) for count in (1, 8))
    assert XlaMeanPooling.defaults(shapes, spec, one, "forward").blocksize_m == 64
    assert XlaMeanPooling.defaults(shapes, spec, several, "forward").blocksize_m == 2048


@pytest.mark.parametrize("sequences", [1, 64, 1000, 9000])
def test_packed_work_is_that_of_the_tokens(sequences, monkeypatch):
    """A step's rows times the sequences are no more than the tokens, but for a row a sequence."""
    tokens, asked = 4096, []
    original = kernel._sum
    monkeypatch.setattr(kernel, "_sum", lambda *a: asked.append(a[3]) or original(*a))
    arrays = {"inputs": jnp.ones((1, tokens, 1)), "cu_seqlens": jnp.zeros((1, sequences + 1), jnp.int32)}
    jax.eval_shape(lambda a: kernel.forward(a, MeanPoolingSpec(packed=True), FwdParams(blocksize_m=tokens)), arrays)
    assert len(asked) == 1
    assert asked[0] * sequences <= max(tokens, sequences)


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_nothing_to_pool(shape):
    x = jnp.ones(shape)
    means, grad = with_gradient(x)
    assert means.shape == (shape[0], shape[2])
    np.testing.assert_array_equal(means, 0)
    assert grad.shape == shape
    assert mean_pooling(x, jnp.ones(shape[:2])).shape == means.shape
    offsets = jnp.array([0, 0, 0])
    np.testing.assert_array_equal(mean_pooling(x[0] if shape[0] else x.reshape(-1, 3), cu_seqlens=offsets), np.zeros((2, shape[2])))  # fmt: skip


X = numbers(2, 6, 3)
FLAT = numbers(12, 3)

# argument in fault, arguments, words the message must hold
WRONG = [
    ("inputs", {"inputs": FLAT}, ["2 dimensions", "with cu_seqlens"]),
    ("inputs", {"inputs": X, "cu_seqlens": jnp.array([0, 6])}, ["3 dimensions", "[tokens, features]"]),
    ("inputs", {"inputs": X.astype(int)}, ["int32", "floating"]),
    ("inputs", {"inputs": FLAT.astype(int), "cu_seqlens": jnp.array([0, 6])}, ["int32", "floating"]),
    ("inputs", {"inputs": None}, ["jnp.asarray(inputs)"]),
    ("inputs", {"inputs": [1.0]}, ["jnp.asarray(inputs)"]),
    ("mask", {"inputs": X, "mask": jnp.ones((2, 5))}, ["[2, 5]", "[2, 6]"]),
    ("mask", {"inputs": X, "mask": jnp.ones(6)}, ["it has 1 dimension.", "[2, 6]"]),
    ("mask", {"inputs": X, "mask": jnp.ones((2, 6, 1))}, ["3 dimensions"]),
    ("mask", {"inputs": X, "mask": True}, ["0 dimensions"]),
    ("mask", {"inputs": X, "mask": [[1] * 6] * 2}, ["jnp.asarray(mask)"]),
    ("mask", {"inputs": FLAT, "mask": jnp.ones((1, 12)), "cu_seqlens": jnp.array([0, 12])}, ["None with cu_seqlens"]),
    ("cu_seqlens", {"inputs": FLAT, "cu_seqlens": jnp.array([0.0, 12.0])}, ["integer"]),
    ("cu_seqlens", {"inputs": FLAT, "cu_seqlens": jnp.array([[0, 12]])}, ["2 dimensions"]),
    ("cu_seqlens", {"inputs": FLAT, "cu_seqlens": jnp.array([0])}, ["at least two offsets"]),
    ("cu_seqlens", {"inputs": FLAT, "cu_seqlens": jnp.array([1, 12])}, ["start at 0", "1 12"]),
    ("cu_seqlens", {"inputs": FLAT, "cu_seqlens": jnp.array([0, 7, 5])}, ["never decrease"]),
    ("cu_seqlens", {"inputs": FLAT, "cu_seqlens": jnp.array([0, 7, 5], jnp.uint8)}, ["never decrease"]),
    ("cu_seqlens", {"inputs": FLAT, "cu_seqlens": jnp.array([0, 13])}, ["end by 12"]),
    ("platform", {"inputs": X, "platform": "metal"}, ["'metal'"]),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "given", "words"), WRONG, ids=[f"{i}-{w[0]}" for i, w in enumerate(WRONG)])
def test_wrong_arguments(argument, given, words):
    with pytest.raises(InvalidInputError) as caught:
        mean_pooling(**given)
    message = str(caught.value)
    assert message.startswith(f"mean_pooling: {argument} is ")
    for word in words:
        assert word in message, message


def test_other_dtypes_and_platforms_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="dtype float8_e4m3fn is not supported"):
        mean_pooling(X.astype(jnp.float8_e4m3fn))
    with pytest.raises(UnsupportedError, match="platform='triton'"):
        mean_pooling(X, platform="triton")


def test_explanation_and_cost():
    explanation = ejkernel.explain(mean_pooling, X, jnp.ones((2, 6), bool))
    assert explanation.chosen.platform is ejkernel.Platform.XLA
    operation = ejkernel.kernel_registry.operation("mean_pooling")
    cost = operation.cost(explanation.call)
    assert (cost.flops, cost.bytes) == (36, 4 * 36 + 12 + 4 * 6)
    packed = ejkernel.explain(mean_pooling, FLAT, cu_seqlens=jnp.array([0, 5, 9, 12], jnp.int32))
    assert operation.cost(packed.call).bytes == 4 * 36 + 4 * 4 + 4 * 9


@slow
@pytest.mark.parametrize("is_packed", [False, True])
def test_tuning(is_packed):
    x = numbers(300, 3) if is_packed else numbers(2, 150, 3)
    rest = {"cu_seqlens": jnp.array([0, 100, 300])} if is_packed else {"mask": jnp.ones((2, 150))}
    assert_close(ejkernel.autotune(mean_pooling)(x, **rest), mean_pooling(x, **rest), "float32")
    assert ejkernel.explain(mean_pooling, x, **rest).chosen.source != "heuristic"


def test_every_feature_has_an_example():
    used = {feature for example in examples_mean_pooling.EXAMPLES for feature in example.features}
    assert used == set(ejkernel.kernel_registry.operation("mean_pooling").features)


def test_nan_in_masked_tokens_reaches_neither_means_nor_gradients():
    mask = np.array([[1, 1, 0, 0], [1, 0, 1, 0]], bool)
    x = jnp.where(mask[..., None], jax.random.normal(jax.random.key(0), (2, 4, 3)), jnp.nan)
    clean = jnp.where(mask[..., None], x, 0)
    found, grads = jax.value_and_grad(lambda x: mean_pooling(x, mask).sum())(x)
    expected, clean_grads = jax.value_and_grad(lambda x: mean_pooling(x, mask).sum())(clean)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(grads, clean_grads)
