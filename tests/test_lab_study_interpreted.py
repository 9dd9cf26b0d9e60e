"""The lab's Triton kernels in Triton's interpreter: what a GPU gets, on a CPU. ``make test`` starts it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._triton import call

if not call.interpreting():
    pytest.skip("runs where TRITON_INTERPRET=1 is set before Triton is imported", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from test_lab_study import EMPTY, SIZES, X, check_gemm, check_gemv, first, random

from ejkernel import InvalidInputError
from ejkernel.lab import gemm_tiled, gemv, study_kernels

pytestmark = pytest.mark.interpreted


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch):
    """Which Triton kernels ran, so that nothing passes without them."""
    ran = []

    def recorded(kernel, *args, **kwargs):
        ran.append((kernel.__name__, kwargs))
        return call.call(kernel, *args, **kwargs)

    monkeypatch.setattr(study_kernels, "call", recorded)
    jax.clear_caches()
    return ran


@pytest.mark.parametrize("dtype", first("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("size", first((33, 65, 130), *(s for s in SIZES + EMPTY if s != (33, 65, 130))), ids=str)
def test_gemm_tiled(size, dtype, kernels_run):
    check_gemm(*size, dtype)
    assert {name for name, _ in kernels_run} == (set() if size in EMPTY else {"gemm"})


@pytest.mark.parametrize("block", first((16, 32, 16), (64, 16, 128)), ids=str)
@pytest.mark.parametrize("dtype", first("bfloat16", "float32", "float16"))
def test_blocks_of_gemm_tiled(block, dtype):
    check_gemm(45, 77, 101, dtype, block)


@pytest.mark.parametrize("rows", first(9, 1, 7, 8, 17))
def test_groups_of_rows_cover_the_product(rows):
    """Fewer rows of tiles than a group has, as many, and more: every element is written, for what is not is NaN."""
    a, b = random(rows * 16 - 3, 5), random(5, 16 * 3 + 1)
    np.testing.assert_allclose(gemm_tiled(a, b, block=(16, 16, 16)), a @ b, 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", first("bfloat16", "float32", "float16"))
@pytest.mark.parametrize("size", first((130, 257), (1, 1), (7, 5), (1, 3000), (3000, 1), (0, 3), (3, 0)), ids=str)
def test_gemv(size, dtype):
    check_gemv(*size, dtype)


@pytest.mark.parametrize("block", first((4, 16), (1, 1), (64, 64)), ids=str)
def test_blocks_of_gemv(block):
    check_gemv(19, 37, "float32", block)


def test_parts_of_sums_are_added(kernels_run):
    a, x = random(3, 5000), random(5000)
    np.testing.assert_allclose(gemv(a, x), np.asarray(a, np.float64) @ np.asarray(x, np.float64), 1e-4, 1e-4)
    ((_, options),) = kernels_run
    assert options["programs"] == 10  # of one step each: all three rows times 512 columns


def test_nothing_past_the_edges_is_read():
    """What a tile sticks out over is another row, full of NaN."""
    a = jnp.full((40, 24), jnp.nan).at[:33, :21].set(1.0)
    assert (gemm_tiled(a[:33, :21], a[:21, :21]) == 21).all()
    assert (gemv(a[:33, :21], jnp.ones(21)) == 21).all()


def test_vmap_is_a_loop():
    a, b = random(3, 20, 17), random(3, 17, 9)
    np.testing.assert_allclose(jax.vmap(gemm_tiled)(a, b), a @ b, 1e-5, 1e-5)
    np.testing.assert_allclose(jax.vmap(gemv, (0, None))(a, b[0, :, 0]), a @ b[0, :, 0], 1e-5, 1e-5)


@pytest.mark.parametrize("block", [(16, 48, 16), (8, 16, 16), (512, 256, 16)], ids=str)
def test_blocks_that_triton_cannot_take(block):
    with pytest.raises(InvalidInputError, match="block is"):
        gemm_tiled(X, X.T, block=block)
