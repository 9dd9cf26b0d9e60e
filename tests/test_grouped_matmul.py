"""grouped_matmul beyond what every operation is tested for: its forms, what its rows may hold, and its work."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples_grouped_matmul import EXAMPLES, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_jit import count_traces
from tolerances import assert_close

from ejkernel import BwdParams, FwdParams, InvalidInputError, UnsupportedError, explain, grouped_matmul, overlay
from ejkernel.kernels._xla import grouped_matmul as kernel
from ejkernel.ops import grouped_matmul as operation

slow = pytest.mark.slow
A4, B4 = jnp.ones((2, 3, 5, 4)), jnp.ones((2, 3, 4, 6))
A, B, SIZES = jnp.ones((10, 4)), jnp.ones((3, 4, 6)), jnp.asarray([2, 5, 3])
RAGGED = {"a": A, "b": B, "group_sizes": SIZES}

# argument in fault, arguments, words the message must hold
WRONG = [
    ("a", {"a": A4[0]}, ["3 dimensions", "[batch, groups, m, k]", "without group_sizes"]),
    ("a", {"a": A}, ["2 dimensions", "ragged"]),
    ("a", {"a": [1.0]}, ["jnp.asarray(a)"]),
    ("a", {"a": A4.astype(jnp.int32)}, ["int32", "floating"]),
    ("b", {"b": B4[0]}, ["3 dimensions", "[batch, groups, k, n]"]),
    ("b", {"b": B4.astype(jnp.bfloat16)}, ["bfloat16", "float32", "cast"]),
    ("b", {"b": B4[:1]}, ["batch and groups of a, [2, 3]"]),
    ("b", {"b": B4[:, :2]}, ["batch and groups of a, [2, 3]"]),
    ("b", {"b": B4[:, :, :3]}, ["k of a, 4", "transpose_b"]),
    ("b", {"transpose_b": True}, ["[batch, groups, n, k]", "k of a, 4"]),
    ("transpose_b", {"transpose_b": 1}, ["True or False"]),
    ("transpose_b", {"transpose_b": jnp.asarray(True)}, ["Python value"]),
    ("preferred_element_type", {"preferred_element_type": "flot"}, ["'flot'", "float32"]),
    ("preferred_element_type", {"preferred_element_type": jnp.int32}, ["int32", "float32"]),
    ("preferred_element_type", {"preferred_element_type": jnp.float8_e4m3fn}, ["float8", "bfloat16"]),
    ("preferred_element_type", {"preferred_element_type": jnp.float64}, ["jax_enable_x64"]),
    ("group_offset", {"group_offset": 0}, ["None without group_sizes"]),
    ("group_offset", {"group_offset": 2**70}, ["None without group_sizes"]),
    ("a", {**RAGGED, "a": A4}, ["4 dimensions", "[m, k]", "beside group_sizes"]),
    ("b", {**RAGGED, "b": B4}, ["4 dimensions", "[groups, k, n]"]),
    ("b", {**RAGGED, "b": B[:, :3]}, ["k of a, 4"]),
    ("b", {**RAGGED, "b": B.astype(jnp.float16)}, ["float16", "cast"]),
    ("group_sizes", {**RAGGED, "group_sizes": SIZES[None]}, ["2 dimensions"]),
    ("group_sizes", {**RAGGED, "group_sizes": SIZES * 1.0}, ["float32", "integer"]),
    ("group_sizes", {**RAGGED, "group_sizes": [2, 5, 3]}, ["a list", "jnp.asarray(group_sizes)"]),
    ("group_sizes", {**RAGGED, "group_sizes": SIZES[:2]}, ["[2]", "one size a group of b, 3"]),
    ("group_sizes", {**RAGGED, "group_sizes": jnp.asarray([2, 5, 4])}, ["at most the rows of a, 10", "[2 5 4]"]),
    ("group_sizes", {**RAGGED, "group_sizes": np.asarray([2**62, 2**62, 2**62])}, ["at most the rows of a, 10"]),
    ("group_sizes", {**RAGGED, "group_sizes": jnp.asarray([2, -1, 3])}, ["at least 0", "[ 2 -1  3]"]),
    ("group_sizes", {**RAGGED, "group_sizes": jnp.asarray([2, 5]), "group_offset": 0}, ["b alone holds 3"]),
    ("group_sizes", {**RAGGED, "group_sizes": jnp.asarray([9, 0, 0, 3]), "group_offset": 1}, ["at most the rows of a"]),
    ("group_offset", {**RAGGED, "group_offset": 1}, ["1 (int)", "from 0 to 0", "names 3 groups"]),
    ("group_offset", {**RAGGED, "group_offset": -1}, ["-1", "from 0"]),
    ("group_offset", {**RAGGED, "group_offset": jnp.asarray(2)}, ["2", "from 0 to 0"]),
    ("group_offset", {**RAGGED, "group_offset": 2**70}, ["from 0 to 0"]),
    ("group_offset", {**RAGGED, "group_offset": 0.0}, ["integer"]),
    ("group_offset", {**RAGGED, "group_offset": True}, ["integer"]),
    ("group_offset", {**RAGGED, "group_offset": jnp.zeros(1, jnp.int32)}, ["it has 1 dimension."]),
    ("platform", {"platform": "metal"}, ["'metal'", "'xla'"]),
    ("backend", {**RAGGED, "backend": "npu"}, ["'npu'", "'cpu'"]),
]


@pytest.mark.parametrize(("argument", "arguments", "words"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_arguments(argument, arguments, words):
    with pytest.raises(InvalidInputError) as caught:
        grouped_matmul(**{"a": A4, "b": B4, **arguments})
    message = str(caught.value)
    assert message.startswith(f"grouped_matmul: {argument} is ")
    for word in words:
        assert word in message, message


def test_concrete_sizes_are_checked_inside_jit_too():
    sizes = jnp.asarray([2, 5, 4])
    with pytest.raises(InvalidInputError, match="group_sizes"):
        jax.jit(lambda a: grouped_matmul(a, B, sizes))(A)


def test_unsupported_dtypes_and_platforms():
    with pytest.raises(UnsupportedError, match="float8_e4m3fn is not supported"):
        grouped_matmul(A.astype(jnp.float8_e4m3fn), B.astype(jnp.float8_e4m3fn), SIZES)
    with pytest.raises(UnsupportedError, match="triton"):
        grouped_matmul(A, B, SIZES, platform="triton")


def gradients(f, *args):
    """Of ``a`` and ``b`` under a fixed random cotangent, in one program."""

    @jax.jit
    def both(cotangent, *args):
        out, pull = jax.vjp(f, *args)
        return out, pull(cotangent)

    # Drawn outside of the program: inside, XLA may leave out its rounding to the result's dtype.
    like = jax.eval_shape(f, *args)
    return both(jax.random.normal(jax.random.key(7), like.shape, like.dtype), *args)


def random(shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("poison", [np.nan, *[pytest.param(x, marks=slow) for x in (np.inf, -np.inf)]])
@pytest.mark.parametrize("offset", [None, 1])
def test_rows_of_no_group_never_count(poison, offset):
    """NaN in them, in a or in the cotangent, reaches neither the result nor a gradient."""
    a, b, dout = random((50, 6)), random((2, 6, 5), 1), random((50, 5), 2)
    sizes = jnp.asarray([21, 12] if offset is None else [4, 21, 12, 6])
    lost = np.ones(50, bool)
    lost[slice(0, 33) if offset is None else slice(4, 37)] = False
    lost = jnp.asarray(lost)[:, None]

    def run(a, b):
        return grouped_matmul(a, b, sizes, group_offset=offset)

    @jax.jit
    def filled(fill):
        out, pull = jax.vjp(run, jnp.where(lost, fill, a), b)
        return out, pull(jnp.where(lost, fill, dout))

    (clean, expected), (out, actual) = filled(0.0), filled(poison)
    np.testing.assert_array_equal(out, clean)
    assert not out[lost[:, 0]].any()
    assert not actual[0][lost[:, 0]].any()
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("where", ["a", "b", "dout"])
def test_one_group_s_nan_stays_its_own(where):
    sizes = jnp.asarray([20, 0, 7, 13])
    arrays = {"a": random((40, 6)), "b": random((4, 6, 5), 1), "dout": random((40, 5), 2)}
    rows = slice(20, 27)
    poisoned = dict(arrays)
    poisoned[where] = arrays[where].at[2 if where == "b" else rows].set(jnp.nan)

    @jax.jit
    def run(arrays):
        out, pull = jax.vjp(lambda a, b: grouped_matmul(a, b, sizes), arrays["a"], arrays["b"])
        return out, *pull(arrays["dout"])

    for index, (clean, dirty) in enumerate(zip(run(arrays), run(poisoned), strict=True)):
        own = 2 if index == 2 else rows
        clean, dirty = np.array(clean), np.array(dirty)
        clean[own] = dirty[own] = 0
        np.testing.assert_array_equal(clean, dirty)


def test_the_matrix_of_an_empty_group_is_never_read():
    b = random((3, 4, 6)).at[1].set(jnp.nan)
    sizes = jnp.asarray([4, 0, 6])
    out, (da, db) = gradients(lambda a, b: grouped_matmul(a, b, sizes), A, b)
    assert np.isfinite(out).all()
    assert np.isfinite(da).all()
    np.testing.assert_array_equal(db[1], 0)


BAD_TRACED = {
    "above": [7, 9, 4],
    "far_above": [2**31 - 1, 2**31 - 1, 2**31 - 1],
    "negative": [3, -5, 4],
}


@pytest.mark.parametrize("name", BAD_TRACED)
def test_traced_sizes_out_of_range_are_clipped(name):
    """Groups end with the rows, and a negative size is none: nothing is read or written elsewhere."""
    sizes, a, b = jnp.asarray(BAD_TRACED[name], jnp.int32), random((10, 4)), random((3, 4, 6))
    meant = {"above": [7, 3, 0], "far_above": [10, 0, 0], "negative": [3, 0, 4]}[name]

    @jax.jit
    def run(a, b, sizes):
        return gradients(lambda a, b: grouped_matmul(a, b, sizes), a, b)

    expected = run(a, b, jnp.asarray(meant, jnp.int32))
    for x, y in zip(*map(jax.tree.leaves, (run(a, b, sizes), expected)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("groups", [1, 8, 9, 70, 512, 513])
def test_bounds_of_few_and_many_groups(groups):
    """In steps of a few sizes and by a scan: exact sums, which stop at the number of rows."""
    rng, rows = np.random.default_rng(groups), 1000
    few, too_many = rng.multinomial(rows - 7, np.ones(groups) / groups), rng.integers(-9, 40, groups)
    spec = operation.GroupedSpec(False, jnp.dtype("float32"), jnp.dtype("float32"))

    @jax.jit
    def bounds(sizes, offset):
        held = jnp.zeros((max(1, groups // 2), 1, 1))
        given = {"a": jnp.zeros((rows, 1)), "b": held, "group_sizes": sizes, "group_offset": offset}
        return operation.OPERATION.prepare(given, spec)["bounds"][0]

    for sizes in (few, too_many, np.full(groups, 2**31 - 1)):
        starts = np.minimum(np.cumsum([0, *np.maximum(sizes, 0)]), rows)
        for offset in (0, groups // 3, -2, groups + 5):
            named = np.clip(np.arange(max(1, groups // 2) + 1) + offset, 0, groups)
            np.testing.assert_array_equal(bounds(jnp.asarray(sizes, jnp.int32), offset), starts[named])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sizes_that_are_spread_over_devices(kind):
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(kind,), devices=jax.devices()[:4])
    sizes = jnp.asarray([3, 0, 2, 4])
    a, b = random((10, 4)), random((4, 4, 6))
    with jax.set_mesh(mesh):
        out = jax.jit(grouped_matmul)(a, b, jax.device_put(sizes, jax.NamedSharding(mesh, P("expert"))))
    np.testing.assert_allclose(out, grouped_matmul(a, b, sizes), rtol=1e-6)


@jax.jit
def of_offset(a, b, sizes, offset):
    return grouped_matmul(a, b, sizes, group_offset=offset)


@pytest.mark.parametrize("offset", [-3, -1, 2, 3, 4, 5, 100, -(2**31), 2**31 - 1])
def test_a_traced_offset_out_of_range_holds_only_what_is_named(offset):
    sizes, a, b = [3, 2, 4, 1], random((10, 4)), random((3, 4, 6))
    out = of_offset(a, b, jnp.asarray(sizes), jnp.int32(offset))
    expected, ends = np.zeros((10, 6)), np.cumsum([0, *sizes])
    for group in range(3):
        if 0 <= offset + group < 4:
            rows = slice(ends[offset + group], ends[offset + group + 1])
            expected[rows] = np.asarray(a[rows], np.float64) @ np.asarray(b[group], np.float64)
    assert_close(out, expected, "float32")


@pytest.mark.parametrize(
    "dtype", ["int8", *[pytest.param(x, marks=slow) for x in ("uint8", "int16", "uint16", "int32", "uint32")]]
)
def test_sizes_of_every_integer_dtype(dtype):
    a, b = random((300, 3)), random((3, 3, 2))
    sizes = jnp.asarray([100, 90, 110], dtype)
    expected = grouped_matmul(a, b, jnp.asarray([100, 90, 110]))
    np.testing.assert_array_equal(jax.jit(grouped_matmul)(a, b, sizes), expected)
    np.testing.assert_array_equal(grouped_matmul(a, b, np.asarray(sizes)), expected)
    offset = jnp.asarray(1, dtype)
    held = jax.jit(lambda sizes, offset: grouped_matmul(a, b[1:], sizes, group_offset=offset))(sizes, offset)
    np.testing.assert_array_equal(held, jnp.where(jnp.arange(300)[:, None] < 100, 0, expected))


def test_sizes_of_64_bits(x64):
    a, b = random((30, 3)), random((3, 3, 2))
    run = jax.jit(lambda sizes, offset: grouped_matmul(a, b, sizes, group_offset=offset))
    expected = grouped_matmul(a, b, jnp.asarray([10, 20, 0]))
    np.testing.assert_array_equal(run(jnp.asarray([10, 2**40, 2**62]), jnp.asarray(0)), expected)
    assert not run(jnp.asarray([10, 20, 0]), jnp.asarray(2**40)).any()


@st.composite
def ragged_calls(draw):
    groups = draw(st.integers(1, 7))
    sizes = draw(st.lists(st.integers(0, 70) | st.just(0), min_size=groups, max_size=groups))
    held = draw(st.integers(1, groups))
    return {
        "sizes": sizes,
        "tail": draw(st.integers(0, 20)),
        "k": draw(st.sampled_from([1, 7])),
        "n": draw(st.sampled_from([1, 6])),
        "held": held,
        "offset": draw(st.integers(0, groups - held)),
        "transpose_b": draw(st.booleans()),
        "rows": draw(st.sampled_from([1, 3, 8, 16, 40, 64, 4096])),
    }


@slow
@pytest.mark.parametrize("walk", ["cpu", "elsewhere"])
@settings(max_examples=12)
@given(ragged_calls())
def test_drawn_calls_on_every_walk(walk, call):
    """Values and gradients by the definition, with tiles of any size, for both kinds of device."""
    check_walk(walk, call)


@pytest.mark.parametrize("walk", ["cpu", "elsewhere"])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_either_walk(walk, transpose_b):
    """Groups of less than a tile, of more, of none, and rows of no group at either end."""
    call = {"sizes": [5, 0, 37, 3, 16], "tail": 4, "k": 7, "n": 6, "held": 3, "offset": 1, "rows": 16}
    check_walk(walk, {**call, "transpose_b": transpose_b})


def check_walk(walk, call):
    total = sum(call["sizes"]) + call["tail"]
    if not total:
        return
    matrix = (call["n"], call["k"]) if call["transpose_b"] else (call["k"], call["n"])
    a, b = random((total, call["k"])), random((call["held"], *matrix), 1)
    sizes, offset = jnp.asarray(call["sizes"]), call["offset"]
    spec = operation.GroupedSpec(call["transpose_b"], jnp.dtype("float32"), jnp.dtype("float32"))
    arrays = operation.OPERATION.prepare({"a": a, "b": b, "group_sizes": sizes, "group_offset": offset}, spec)
    rows, sums = {
        "cpu": (kernel._rows, kernel._sums),
        "elsewhere": (kernel._rows_in_steps, kernel._sums_in_steps),
    }[walk]
    bounds, large = arrays["bounds"][0], min(call["rows"], total)
    dout = random((total, call["n"]), 2)

    @jax.jit
    def run(a, b, dout, bounds):
        out = rows(a, b, bounds, call["transpose_b"], large, jnp.float32, jnp.float32)
        da = rows(dout, b, bounds, not call["transpose_b"], large, jnp.float32, jnp.float32)
        left, right = (dout, a) if call["transpose_b"] else (a, dout)
        return out, da, sums(left, right, bounds, large, jnp.float32, jnp.float32)

    out, da, db = run(a, b, dout, bounds)

    def plain(a, b):
        return reference(a, b, sizes, group_offset=offset, transpose_b=call["transpose_b"])

    @jax.jit
    def expect(a, b, dout):
        expected, pull = jax.vjp(plain, a, b)
        return expected, pull(dout)

    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), "float64") for x in (a, b, dout)]
        expected, (expected_da, expected_db) = expect(*wide)
    assert_close(out, expected, "float32")
    assert_close(da, expected_da, "float32", gradient=True, what="a")
    assert_close(db, expected_db, "float32", gradient=True, what="b")


@pytest.mark.parametrize("rows", [33, *[pytest.param(x, marks=slow) for x in (1, 7, 512)]])
def test_parameters_never_change_the_meaning(rows):
    example = next(e for e in EXAMPLES if e.name == "ragged_long")
    arrays = example.arrays()
    with overlay(grouped_matmul=(FwdParams(blocksize_m=rows), BwdParams(blocksize_m=rows))):
        out, (grads,) = gradients(lambda f: example.run({**arrays, **f}), example.floats(arrays))
    expected, expected_grads = example.expected(arrays, jax.random.normal(jax.random.key(7), out.shape))
    assert_close(out, expected, "float32")
    for name, grad in grads.items():
        assert_close(grad, expected_grads[name], "float32", gradient=True, what=name)


RESULTS = [("ragged_tail", "bfloat16", "float32")]


@pytest.mark.parametrize(
    ("name", "dtype", "result"),
    [
        pytest.param(*call, marks=() if call in RESULTS else slow)
        for call in itertools.product(
            ("batched", "ragged_tail"), ("float16", "bfloat16", "float32"), ("float16", "bfloat16", "float32", None)
        )
    ],
)
def test_dtypes_of_result_and_gradients(dtype, result, name):
    example = next(e for e in EXAMPLES if e.name == name)
    arrays = example.arrays(dtype)
    out, (grads,) = gradients(
        lambda f: example.run({**arrays, **f}, preferred_element_type=result), example.floats(arrays)
    )
    assert out.dtype == (result or dtype)
    expected, expected_grads = example.expected(arrays, jax.random.normal(jax.random.key(7), out.shape, out.dtype))
    # Inputs are exact in both, so the error is that of the result's own rounding.
    assert_close(out, expected, result or dtype)
    for key, grad in grads.items():
        assert grad.dtype == dtype
        assert_close(grad, expected_grads[key], dtype, gradient=True, what=key)


@pytest.mark.parametrize("ragged", [False, True])
def test_half_precision_is_summed_in_float32(ragged):
    """4096 ones and more: float16 and bfloat16 sums would stop growing long before."""
    a, b = jnp.ones((4, 4096), jnp.bfloat16), jnp.ones((1, 4096, 3), jnp.bfloat16)
    if ragged:
        out = grouped_matmul(a, b, jnp.asarray([4]), preferred_element_type=jnp.float32)
    else:
        out = grouped_matmul(a[None, None], b[None], preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(out, np.full(out.shape, 4096))


def test_the_gradient_of_b_is_summed_in_float32():
    a = jnp.ones((1000, 2), jnp.bfloat16)
    b = jnp.ones((2, 2, 3), jnp.bfloat16)
    sizes = jnp.asarray([1000, 0])
    db = jax.jit(jax.grad(lambda b: grouped_matmul(a, b, sizes).astype(jnp.float32).sum()))(b)
    np.testing.assert_array_equal(db[0].astype(jnp.float32), 1000)


@slow
def test_float64(x64):
    a, b = random((37, 5), dtype="float64"), random((3, 5, 4), 1, "float64")
    sizes = jnp.asarray([9, 0, 20])
    out, grads = gradients(lambda a, b: grouped_matmul(a, b, sizes), a, b)
    expected, expected_grads = gradients(lambda a, b: reference(a, b, sizes), a, b)
    assert_close(out, expected, "float64")
    for x, y in zip(grads, expected_grads, strict=True):
        assert_close(x, y, "float64", gradient=True)
    wide = grouped_matmul(a.astype("float32"), b.astype("float32"), sizes, preferred_element_type="float64")
    assert wide.dtype == jnp.float64


@pytest.mark.parametrize(
    ("a", "b", "sizes"),
    [
        ((0, 4), (3, 4, 6), [0, 0, 0]),
        ((5, 0), (2, 0, 6), [2, 3]),
        ((5, 4), (2, 4, 0), [2, 3]),
        ((5, 4), (0, 4, 6), []),
        ((0, 2, 5, 4), (0, 2, 4, 6), None),
        ((2, 0, 5, 4), (2, 0, 4, 6), None),
        ((2, 3, 0, 4), (2, 3, 4, 6), None),
        ((2, 3, 5, 0), (2, 3, 0, 6), None),
        ((2, 3, 5, 4), (2, 3, 4, 0), None),
    ],
)
@pytest.mark.parametrize("result", [pytest.param(None, marks=slow), "bfloat16"])
def test_nothing_to_multiply(a, b, sizes, result):
    a, b = jnp.ones(a), jnp.ones(b)
    sizes = None if sizes is None else jnp.asarray(sizes, jnp.int32)
    out, (da, db) = gradients(lambda a, b: grouped_matmul(a, b, sizes, preferred_element_type=result), a, b)
    assert out.shape == (*a.shape[:-1], b.shape[-1])
    assert out.dtype == (result or jnp.float32)
    assert not out.any()
    for grad, array in ((da, a), (db, b)):
        assert (grad.shape, grad.dtype) == (array.shape, array.dtype)
        assert not grad.any()


VMAPPED = [{"a"}, {"b"}, {"group_sizes"}, {"group_offset"}, {"a", "b"}, {"a", "group_sizes"}]
VMAPPED.append({"a", "b", "group_sizes", "group_offset"})


@slow
@pytest.mark.parametrize("vmapped", VMAPPED, ids=lambda names: "-".join(sorted(names)))
def test_vmap_of_the_ragged_form(vmapped):
    stacked = {
        "a": random((3, 20, 4)),
        "b": random((3, 2, 4, 5), 1),
        "group_sizes": jnp.asarray([[3, 9, 2, 4], [0, 5, 0, 15], [20, 0, 0, 0]]),
        "group_offset": jnp.asarray([1, 2, 0]),
    }
    arrays = {name: x if name in vmapped else x[0] for name, x in stacked.items()}
    axes = {name: 0 if name in vmapped else None for name in arrays}

    def run(arrays):
        rest = {name: arrays[name] for name in ("group_sizes", "group_offset")}
        return gradients(lambda a, b: grouped_matmul(a, b, **rest), arrays["a"], arrays["b"])

    result = jax.vmap(run, (axes,))(arrays)
    for i in range(3):
        expected = run({name: x[i] if name in vmapped else x for name, x in arrays.items()})
        for x, y in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-5, atol=1e-5)


@slow
@pytest.mark.parametrize("vmapped", ["a", "b", "ab"])
def test_vmap_of_the_batched_form(vmapped):
    a, b = random((3, 2, 3, 5, 4)), random((3, 2, 3, 4, 6), 1)
    a, b = a if "a" in vmapped else a[0], b if "b" in vmapped else b[0]
    axes = tuple(0 if name in vmapped else None for name in "ab")
    result = jax.vmap(lambda a, b: gradients(grouped_matmul, a, b), axes)(a, b)
    for i in range(3):
        expected = gradients(grouped_matmul, a[i] if "a" in vmapped else a, b[i] if "b" in vmapped else b)
        for x, y in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-5, atol=1e-5)


def test_one_trace_for_all_sizes_and_offsets(monkeypatch):
    a, b = random((23, 4)), random((2, 4, 5))
    traces = count_traces(monkeypatch)
    for offset in range(3):
        for sizes in ([5, 5, 5, 5], [0, 23, 0, 0], [1, 0, 2, 20]):
            grouped_matmul(a, b, jnp.asarray(sizes), group_offset=offset)
    assert len(traces) == 1


def test_expert_parallelism_inside_shard_map():
    """Each device holds some of the groups and the sum over the devices is the whole."""
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    a, b, sizes = random((60, 6)), random((8, 6, 5), 1), jnp.asarray([3, 0, 17, 5, 5, 0, 20, 6])

    @jax.shard_map(mesh=mesh, in_specs=(P(), P("expert"), P()), out_specs=P())
    def mapped(a, b, sizes):
        offset = jax.lax.axis_index("expert") * b.shape[0]
        return jax.lax.psum(grouped_matmul(a, b, sizes, group_offset=offset), "expert")

    actual = gradients(lambda a, b: jax.jit(mapped)(a, b, sizes), a, b)
    expected = gradients(lambda a, b: grouped_matmul(a, b, sizes), a, b)
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def both(a, b, sizes, dout):
    out, pull = jax.vjp(lambda a, b: grouped_matmul(a, b, sizes), a, b)
    return out, pull(dout)


def abstract(m, k, n, groups, dtype="float32"):
    shapes = (((m, k), dtype), ((groups, k, n), dtype), ((groups,), "int32"), ((m, n), dtype))
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


@slow
def test_temporary_memory_does_not_grow_with_rows_or_groups():
    """A tile of rows and one group's matrices, never a copy of an operand."""
    sizes = {}
    for m, groups in ((2048, 4), (4096, 4), (2048, 64)):
        compiled = jax.jit(both).lower(*abstract(m, 64, 48, groups)).compile()
        sizes[m, groups] = compiled.memory_analysis().temp_size_in_bytes
    assert max(sizes.values()) <= 1.05 * min(sizes.values()) + 8192
    assert max(sizes.values()) < 2**20


def test_products_are_of_tiles_not_of_all_rows():
    """No product of all rows with each group's matrix, as a dense formulation would have."""
    m, k, n = 4096, 64, 48
    text = jax.jit(both).lower(*abstract(m, k, n, 16)).as_text()
    dots = re.findall(r"stablehlo\.dot_general.*?: \((tensor<\S+>), (tensor<\S+>)\)", text)
    assert dots
    for operands in dots:
        assert not any(str(m) in operand for operand in operands), operands


@slow
def test_reruns_are_bit_identical():
    a, b, sizes = random((500, 32)), random((5, 32, 24), 1), jnp.asarray([100, 3, 280, 0, 90])
    first, second = (jax.jit(both)(a, b, sizes, random((500, 24), 2)) for _ in range(2))
    for x, y in zip(*map(jax.tree.leaves, (first, second)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_one_gradient_alone():
    """The other's products are not made."""
    args = abstract(512, 64, 48, 4)
    counts = {}
    for name, wrt in (("a", (0,)), ("b", (1,)), ("both", (0, 1))):
        grad = jax.grad(lambda a, b, sizes: (grouped_matmul(a, b, sizes) * 2).sum(), wrt)
        counts[name] = jax.jit(grad).lower(*args[:3]).as_text().count("stablehlo.dot_general")
    forward = jax.jit(grouped_matmul).lower(*args[:3]).as_text().count("stablehlo.dot_general")
    assert counts["both"] - forward == (counts["a"] - forward) + (counts["b"] - forward)
    assert min(counts.values()) > forward


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_one_walk_is_compiled(platform):
    """A loop of known length for accelerators alone; the other walk is not in the program."""
    traced = jax.jit(lambda *args: grouped_matmul(*args)).trace(*abstract(512, 8, 8, 4)[:3])
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.dot_general") == (2 if platform == "cpu" else 1)


def test_defaults_by_device():
    def rows(m, groups, device):
        told = explain(grouped_matmul, *abstract(m, 8, 8, groups)[:3], device=device, platform="xla")
        return told.chosen.params.blocksize_m

    assert rows(8192, 8, "cpu") == 256
    assert rows(8192, 8, "nvidia-h200") == 512
    assert rows(8192, 64, "nvidia-h200") == 256
    assert explain(grouped_matmul, A4, B4).chosen.params.to_dict() == {}


def test_cost_is_that_of_one_product():
    for groups in (4, 64):
        call, _ = operation.OPERATION.bound(
            {**operation.OPERATION.defaults, "a": random((128, 16)), "b": random((groups, 16, 8)),
             "group_sizes": jnp.full(groups, 2)}
        )  # fmt: skip
        cost = operation.OPERATION.cost(call)
        assert cost.flops == 2 * 128 * 16 * 8
        assert cost.backward_flops == 2 * cost.flops
        assert cost.bytes == 4 * (128 * 16 + groups * 16 * 8 + 128 * 8)


def test_explain_takes_a_python_offset():
    explained = explain("grouped_matmul", *abstract(64, 8, 8, 4)[:2], jnp.full(6, 5), group_offset=2)
    assert "group_offset=2" in str(explained)
    assert set(explained.call.features) == {"ragged", "group_offset"}


@slow
def test_samples_are_calls_that_can_be_timed():
    call, _ = operation.OPERATION.bound(
        {**operation.OPERATION.defaults, **RAGGED, "group_sizes": jnp.asarray([1, 2, 3, 4]), "group_offset": 1}
    )
    sample = operation.OPERATION.sample(call.shapes)
    assert {name: x.shape for name, x in sample.items()} == {name: x.shape for name, x in call.shapes.items()}
    np.testing.assert_array_equal(sample["bounds"], [[0, 3, 6, 10]])
    given = operation.OPERATION.sample({name: x for name, x in call.arguments.items() if hasattr(x, "shape")})
    assert given["group_sizes"].sum() <= A.shape[0]
