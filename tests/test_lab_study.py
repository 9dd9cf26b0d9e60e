"""The lab's kernels to study: in XLA here, compiled by Triton for the chips we know; and on a GPU."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tolerances import assert_close

from ejkernel import InvalidInputError, flash_attention, target
from ejkernel.callib.chips import CHIPS
from ejkernel.kernels._triton.call import interpreting
from ejkernel.lab import gemm_tiled, gemv, standard_attention, study

slow = pytest.mark.slow
DTYPES = ("float32", "bfloat16", "float16")


def first(*values):
    """Values of a parameter: the first in the short lane, the others slow."""
    return [values[0], *[pytest.param(value, marks=slow) for value in values[1:]]]


# All sides 1; odd; one step and less; the edges of tiles; long and thin both ways; aligned.
SIZES = [(1, 1, 1), (5, 7, 3), (33, 65, 130), (1, 300, 70), (300, 1, 70), (70, 90, 1), (128, 96, 64)]
EMPTY = [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)]


def random(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed + sum(shape)).standard_normal(shape), dtype)


def double(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


def check_gemm(m, n, k, dtype, block=None):
    """Values and gradients against float64."""
    a, b, g = random(m, k, dtype=dtype), random(k, n, dtype=dtype, seed=1), random(m, n, dtype=dtype, seed=2)
    out, pull = jax.vjp(lambda a, b: gemm_tiled(a, b, block=block), a, b)
    assert out.dtype == dtype
    da, db = pull(g)
    assert da.dtype == db.dtype == dtype
    a, b, g = double(a, b, g)
    assert_close(out, a @ b, dtype, what="out")
    assert_close(da, g @ b.T, dtype, gradient=True, what="a")
    assert_close(db, a.T @ g, dtype, gradient=True, what="b")


def check_gemv(m, k, dtype, block=None):
    a, x, g = random(m, k, dtype=dtype), random(k, dtype=dtype, seed=1), random(m, dtype=dtype, seed=2)
    out, pull = jax.vjp(lambda a, x: gemv(a, x, block=block), a, x)
    assert out.dtype == dtype
    da, dx = pull(g)
    a, x, g = double(a, x, g)
    assert_close(out, a @ x, dtype, what="out")
    assert_close(da, np.outer(g, x), dtype, gradient=True, what="a")
    assert_close(dx, g @ a, dtype, gradient=True, what="x")


@pytest.mark.parametrize("dtype", first("float32", "bfloat16", "float16"))
@pytest.mark.parametrize(
    "size",
    [*SIZES[1:4], *EMPTY[:2], *[pytest.param(s, marks=slow) for s in SIZES[:1] + SIZES[4:] + EMPTY[2:]]],
    ids=str,
)
def test_gemm_tiled(size, dtype):
    check_gemm(*size, dtype)


@pytest.mark.parametrize("dtype", first("float16", "float32", "bfloat16"))
@pytest.mark.parametrize("block", first((16, 32, 16), (64, 16, 128), (16, 16, 16)), ids=str)
def test_blocks_of_gemm_tiled(block, dtype):
    check_gemm(45, 77, 101, dtype, block)
    check_gemm(16, 32, 16, dtype, block)


@pytest.mark.parametrize("dtype", first("bfloat16", "float32", "float16"))
@pytest.mark.parametrize(
    "size",
    [
        (7, 5),
        (1, 3000),
        (130, 257),
        *[pytest.param(s, marks=slow) for s in ((1, 1), (3000, 1), (64, 4096), (0, 3), (3, 0))],
    ],
    ids=str,
)
def test_gemv(size, dtype):
    check_gemv(*size, dtype)


@pytest.mark.parametrize("block", [(1, 1), (8, 16), (64, 1024)], ids=str)
def test_blocks_of_gemv(block):
    check_gemv(19, 37, "float32", block)


def test_sums_are_float32():
    """2048 ones and a half: float16 sums would stand still at 2048."""
    a = jnp.ones((64, 4096), jnp.float16)
    assert (gemm_tiled(a, a.T) == 4096).all()
    assert (gemv(a, a[0]) == 4096).all()


def test_numpy_arrays_are_taken_as_jax_takes_them():
    a, x = np.arange(6.0).reshape(2, 3), np.ones(3)
    out = gemv(a, x)
    assert isinstance(out, jax.Array)
    assert out.dtype == jnp.asarray(a).dtype == jnp.float32
    assert out.tolist() == [3, 12]
    assert gemm_tiled(a, x[:, None]).tolist() == [[3], [12]]


@pytest.mark.skipif(interpreting(), reason="XLA's tiles")
def test_the_product_in_xla_is_tiled():
    """No product in the program is larger than a tile."""
    a = jax.ShapeDtypeStruct((1024, 2048), jnp.float32)
    b = jax.ShapeDtypeStruct((2048, 4096), jnp.float32)
    text = jax.jit(gemm_tiled).lower(a, b).as_text()
    assert re.findall(r"dot_general.*-> tensor<(\w+)xf32>", text) == ["512x1024"]
    text = jax.jit(lambda a, b: gemm_tiled(a, b, block=(100, 200, 300))).lower(a, b).as_text()
    assert set(re.findall(r"dot_general.*\(tensor<(\w+)xf32>", text)) == {"100x300", "100x248"}  # what is left of k


def test_vmap_equals_a_loop():
    a, b = random(3, 20, 17), random(3, 17, 9)
    np.testing.assert_allclose(
        jax.vmap(gemm_tiled)(a, b), np.stack([x @ y for x, y in zip(a, b, strict=True)]), 1e-5, 1e-5
    )
    out = jax.vmap(gemv, (None, 0))(a[0], b[..., 0])
    np.testing.assert_allclose(out, b[..., 0] @ a[0].T, 1e-5, 1e-5)
    grad = jax.vmap(jax.grad(lambda a, x: gemv(a, x).sum(), 1))(a, b[..., 0])
    np.testing.assert_allclose(grad, a.sum(1), 1e-5, 1e-5)


@pytest.mark.skipif(interpreting(), reason="the interpreter's callback is no part of a manual mesh")
def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    a, b = random(8, 6), random(6, 4)

    def loss(a, b):
        run = jax.shard_map(gemm_tiled, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
        return (run(a, b) ** 2).sum()

    actual = jax.jit(jax.grad(loss, (0, 1)))(a, b)
    for x, y in zip(actual, jax.grad(lambda a, b: ((a @ b) ** 2).sum(), (0, 1))(a, b), strict=True):
        np.testing.assert_allclose(x, y, 1e-4, 1e-4)


X = np.ones((4, 6), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gemm_tiled(X[0], X.T), r"gemm_tiled: a is float32\[6\]; expected \[M, K\]; it has 1 dimension\."),
        (lambda: gemm_tiled(X, X.T[None]), r"gemm_tiled: b is float32\[1, 6, 4\]; expected \[K, N\]"),
        (lambda: gemm_tiled(X, X), r"b is float32\[4, 6\]; expected \[K, N\] with K = 6, the columns of a \[4, 6\]"),
        (lambda: gemm_tiled(X, [[1.0]]), r"b is a list; expected an array \[K, N\]: pass jnp.asarray\(b\)"),
        (lambda: gemm_tiled(X, None), "b is None"),
        (lambda: gemm_tiled(X.astype(int), X.T), r"a is int64\[4, 6\]; expected \[M, K\], of dtype floating"),
        (lambda: gemm_tiled(X.astype(complex), X.T), "a is complex128"),
        (lambda: gemm_tiled(X.astype(np.float16), X.T), "b is float32.*; expected the dtype of a, float16"),
        (lambda: gemm_tiled(jnp.asarray(X, jnp.float8_e4m3fn), X.T), "of dtype float32, bfloat16, float16"),
        (lambda: gemm_tiled(X, X.T, block=(16, 16)), r"block is \(16, 16\).*; expected \(m, n, k\) of positive ints"),
        (lambda: gemm_tiled(X, X.T, block=(16, 0, 16)), "block is"),
        (lambda: gemm_tiled(X, X.T, block=(16, -16, 16)), "block is"),
        (lambda: gemm_tiled(X, X.T, block=(16, 16.0, 16)), "block is"),
        (lambda: gemm_tiled(X, X.T, block=(16, True, 16)), "block is"),
        (lambda: gemm_tiled(X, X.T, block=16), r"block is 16 \(int\)"),
        (lambda: gemv(X, X), r"gemv: x is float32\[4, 6\]; expected \[K\]"),
        (lambda: gemv(X[0], X[0]), r"gemv: a is float32\[6\]"),
        (lambda: gemv(X, X[:, 0]), r"x is float32\[4\]; expected \[K\] with K = 6"),
        (lambda: gemv(X, X[0], block=(4, 4, 4)), r"expected \(m, k\) of positive ints"),
        (lambda: standard_attention(X, X, X), r"query is float32\[4, 6\]; expected \[B, Sq, H, D\]"),
        (
            lambda: standard_attention(*qkv(heads=3, kv_heads=2)),
            "key is .*; expected a number of heads that divides .* 3",
        ),
        (lambda: standard_attention(qkv()[0], qkv(dim=4)[1], qkv()[2]), "key is .*D = 8"),
        (lambda: standard_attention(*qkv()[:2], qkv(kv_len=5)[2]), "value is"),
        (lambda: standard_attention(*qkv(), causal=1), r"causal is 1 \(int\); expected True or False"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(InvalidInputError, match=message):
        call()


class Foreign:
    """An array of another library, with dtypes that numpy cannot read."""

    def __init__(self, *shape):
        self.shape = shape

    dtype = type("dtype", (), {"__repr__": lambda self: "torch.float32"})()


@pytest.mark.parametrize(
    ("call", "name", "shape"),
    [
        (
            lambda: gemm_tiled(Foreign(4, 6), X.T),
            "gemm_tiled: a is torch.float32[4, 6]",
            "[M, K]: pass jnp.from_dlpack(a)",
        ),
        (
            lambda: gemm_tiled(X, Foreign(6, 4)),
            "gemm_tiled: b is torch.float32[6, 4]",
            "[K, N]: pass jnp.from_dlpack(b)",
        ),
        (lambda: gemv(X, Foreign(6)), "gemv: x is torch.float32[6]", "[K]: pass jnp.from_dlpack(x)"),
        (
            lambda: standard_attention(*qkv()[:2], Foreign(2, 9, 2, 8)),
            "standard_attention: value is torch.float32[2, 9, 2, 8]",
            "[B, Sk, Hkv, Dv]: pass jnp.from_dlpack(value)",
        ),
    ],
)
def test_arrays_of_other_libraries(call, name, shape):
    with pytest.raises(InvalidInputError) as error:
        call()
    assert str(error.value) == f"{name}; expected a JAX or numpy array {shape}."


@pytest.mark.torch
def test_torch_tensors():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    a = torch.arange(6.0).reshape(2, 3)
    with pytest.raises(InvalidInputError, match=r"a is torch.float32\[2, 3\]; expected a JAX or numpy array \[M, K\]"):
        gemm_tiled(a, a.T)
    assert gemm_tiled(jnp.from_dlpack(a), np.ones((3, 1), np.float32)).tolist() == [[3.0], [12.0]]


# Standard attention


def qkv(q_len=9, kv_len=9, heads=4, kv_heads=2, dim=8, value_dim=8, dtype="float32"):
    return (
        random(2, q_len, heads, dim, dtype=dtype),
        random(2, kv_len, kv_heads, dim, dtype=dtype, seed=1),
        random(2, kv_len, kv_heads, value_dim, dtype=dtype, seed=2),
    )


ATTENTION = [*itertools.product([(9, 9), (5, 12), (12, 5), (1, 7)], [False, True], DTYPES)]
SHORT_ATTENTION = [((9, 9), True, "bfloat16"), ((5, 12), False, "float32"), ((12, 5), True, "float32")]


@pytest.mark.parametrize(
    ("q_len", "kv_len", "causal", "dtype"),
    [
        pytest.param(*case[0], *case[1:], marks=[slow] * (case not in SHORT_ATTENTION), id=str(case))
        for case in ATTENTION
    ],
)
def test_standard_attention(q_len, kv_len, causal, dtype):
    arrays = qkv(q_len, kv_len, value_dim=5, dtype=dtype)
    out, pull = jax.vjp(lambda *x: standard_attention(*x, causal=causal), *arrays)
    assert out.dtype == dtype
    dout = random(*out.shape, dtype=dtype, seed=3)
    expected, _, grads = oracle.attention(*double(*arrays), causal=causal, dout=double(dout)[0])
    assert_close(out, expected, dtype)
    for name, actual in zip(("query", "key", "value"), pull(dout), strict=True):
        assert_close(actual, grads[name], dtype, gradient=True, what=name)
    assert_close(out, np.asarray(flash_attention(*arrays, causal=causal), np.float64), dtype)


def test_standard_attention_of_nothing_is_zero():
    assert (standard_attention(*qkv(q_len=3, kv_len=0)) == 0).all()
    assert standard_attention(*qkv(q_len=0)).shape == (2, 0, 4, 8)
    assert (standard_attention(*qkv(q_len=9, kv_len=4), causal=True)[:, :5] == 0).all()


def test_standard_attention_holds_all_logits():
    arrays = qkv(1024, 1024, heads=4, dim=8)

    def bytes_of(attention):
        return jax.jit(attention).lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    logits = 2 * 4 * 1024 * 1024 * 4
    assert bytes_of(standard_attention) >= logits > 2 * bytes_of(flash_attention)


# Where Triton runs


def test_xla_steps_in_where_triton_is_not_installed(monkeypatch):
    monkeypatch.setattr(study, "interpreting", lambda: False)
    monkeypatch.setattr(study, "_missing", lambda package: package if package == "jax_triton" else None)
    with (
        target("nvidia-h200"),
        pytest.warns(UserWarning, match=r"XLA on nvidia-h200: jax_triton is not .*pip install .*\[gpu\]"),
    ):
        assert gemv(X, X[0]).tolist() == [6.0] * 4
    with target("nvidia-v100"), pytest.warns(UserWarning, match="compute capability 8.0, it has 7.0"):
        assert gemv(X, X[0]).tolist() == [6.0] * 4


# Compiled for the chips we know

try:
    import triton
except ImportError:
    triton = None
missing = pytest.mark.skipif(triton is None or interpreting(), reason="needs triton, and not its interpreter")
COMPILED_FOR = ("nvidia-h200", "nvidia-a100", "nvidia-b200", "nvidia-l4", "amd-mi300x")


def compiles(test):
    return pytest.mark.compiled(missing(test))


def launches(chip, function, *shapes, dtype, **options):
    """What ``call`` is asked for on a chip."""
    from test_triton import Launch

    from ejkernel.lab import study_kernels

    made = []

    def recorded(*args, **kwargs):
        made.append(Launch(*args, **kwargs))
        return [jnp.zeros(like.shape, like.dtype) for like in args[3]]

    study._gemm.clear_cache()
    study._gemv.clear_cache()
    with pytest.MonkeyPatch.context() as patch, target(chip):
        patch.setattr(study_kernels, "call", recorded)
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        jax.eval_shape(lambda *x: function(*x, **options), *arrays)
    return made


@slow
@compiles
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("chip", COMPILED_FOR)
def test_tiles_fit_the_chip_and_spill_nothing(chip, dtype):
    from test_triton import PICKED_WITH, kept_compilations, resources

    kept_compilations()
    counts = triton.__version__.startswith(PICKED_WITH)
    asked = [((m, k), (k, n)) for m, n, k in ((8192, 8192, 8192), (2048, 2048, 512), (100, 160, 48), (9, 4096, 4096))]
    asked += [((m, k), (k, n)) for m, n, k in ((4097, 4099, 4095), (9, 4099, 4095))]
    asked += [((m, k), (k,)) for m, k in ((4096, 4096), (1, 65536), (999, 1001), (3, 1), (5000, 24))]
    tiles = set()
    for shapes in asked:
        function = gemv if len(shapes[1]) == 1 else gemm_tiled
        (launch,) = launches(chip, function, *shapes, dtype=dtype)
        tiles.add(launch.constants)
        spilled, shared = resources(launch.compiled(CHIPS[chip]))
        assert not (spilled and counts), (shapes, launch.constants)
        assert shared <= CHIPS[chip].shared_memory_per_block, (shapes, launch.constants)
    assert len(tiles) >= 9


@compiles
def test_aligned_rows_are_loaded_wide_into_the_tensor_cores():
    from test_triton import kept_compilations

    kept_compilations()
    (launch,) = launches("nvidia-h200", gemm_tiled, (4096, 4096), (4096, 4096), dtype="bfloat16")
    text = launch.compiled(CHIPS["nvidia-h200"]).asm["ptx"]
    assert "wgmma.mma_async" in text
    assert "cp.async.cg.shared.global" in text
    assert not re.search(r"ld\.global\S*\.b16", text)
    (launch,) = launches("nvidia-h200", gemv, (4096, 4096), (4096,), dtype="bfloat16")
    text = launch.compiled(CHIPS["nvidia-h200"]).asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32", text)
    assert not re.search(r"\s(ld\.global\S*\.b16|atom\.|red\.)", text)


@compiles
def test_one_compilation_serves_all_aligned_sizes():
    made = [launches("nvidia-h200", gemm_tiled, (n, n), (n, n), dtype="bfloat16")[0] for n in (4096, 4160, 8192)]
    assert len({launch.constants for launch in made}) == 1


@compiles
@pytest.mark.parametrize(
    ("function", "block", "message"),
    [
        (gemm_tiled, (16, 48, 16), "powers of two from 16 on, for Triton on nvidia-h200"),
        (gemm_tiled, (8, 16, 16), "powers of two from 16 on"),
        (gemm_tiled, (512, 256, 16), "at most 65536 sums"),
        (gemm_tiled, (256, 256, 512), "the 232448 bytes of shared memory of nvidia-h200"),
        (gemv, (3, 16), "powers of two from 1 on"),
        (gemv, (128, 1024), "at most 65536"),
    ],
)
def test_blocks_that_triton_cannot_take(function, block, message):
    shapes = ((64, 64), (64,)) if function is gemv else ((64, 64), (64, 64))
    with pytest.raises(InvalidInputError, match=message):
        launches("nvidia-h200", function, *shapes, dtype="bfloat16", block=block)


@compiles
def test_few_rows_are_shared_by_many_programs():
    (launch,) = launches("nvidia-h200", gemv, (4, 65536), (65536,), dtype="bfloat16")
    m, _, steps = launch.scalars
    assert (m, steps) == (4, 1)
    assert launch.dtypes[1] == [jnp.float32]  # parts of sums
    (launch,) = launches("nvidia-h200", gemv, (65536, 64), (64,), dtype="bfloat16")
    assert launch.dtypes[1] == [jnp.bfloat16]


@compiles
def test_lowered_for_a_gpu():
    """One kernel forward; three with the gradients of a product, two with those of a matrix and a vector."""
    import test_triton

    if test_triton.lowers.args[0]:
        pytest.skip(test_triton.lowers.kwargs["reason"])
    a, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 256), (256,)))
    for function, args, count in ((gemm_tiled, (a, a), 3), (gemv, (a, x), 2)):

        def step(*args, function=function):
            out, pull = jax.vjp(function, *args)
            return pull(out)

        assert test_triton.kernel_calls(test_triton.lowered(function, *args)) == 1
        assert test_triton.kernel_calls(test_triton.lowered(step, *args)) == count
        batched = [jax.ShapeDtypeStruct((3, *arg.shape), arg.dtype) for arg in args]
        assert test_triton.kernel_calls(test_triton.lowered(jax.vmap(function), *batched)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1024, 2048, 512), (1000, 2001, 515), (8, 4096, 4096)], ids=str)
def test_on_a_gpu(size, dtype):
    check_gemm(*size, dtype)
    check_gemv(size[0], size[2], dtype)


@pytest.mark.gpu
def test_reruns_on_a_gpu_are_bit_identical():
    a, b = random(512, 65536, dtype="bfloat16"), random(65536, 512, dtype="bfloat16")
    for function, args in ((gemm_tiled, (a, b)), (gemv, (a[:3], b[:, 0]))):
        first, *others = [np.asarray(function(*args)) for _ in range(5)]
        for other in others:
            np.testing.assert_array_equal(first, other)
