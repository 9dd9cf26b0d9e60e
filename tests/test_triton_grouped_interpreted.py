"""Triton's grouped matmul and mean pooling in Triton's interpreter: the kernels that a GPU gets, on a CPU."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tries
from hypothesis import given
from hypothesis import strategies as st
from lanes import some
from tolerances import assert_close

from ejkernel import BwdParams, FwdParams, Platform, explain, grouped_matmul, mean_pooling, overlay
from ejkernel.kernels._triton import call
from ejkernel.kernels._triton import grouped_matmul as grouped
from ejkernel.kernels._triton import mean_pooling as pooling
from ejkernel.ops.grouped_matmul import GroupedSpec

if not call.interpreting():
    pytest.skip("runs where TRITON_INTERPRET=1 is set before Triton is imported", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

pytestmark = pytest.mark.interpreted


# Grouped matmul


def product(a, b, bounds, transpose):
    """In float64, a group at a time: ``bounds`` say where the rows of each begin and where the last one's end."""
    out = np.zeros((a.shape[0], b.shape[1 if transpose else 2]))
    for g, matrix in enumerate(b):
        own = slice(bounds[g], bounds[g + 1])
        out[own] = a[own] @ (matrix.T if transpose else matrix)
    return out


def gradients(a, b, dout, bounds, transpose):
    da, db = product(dout, b, bounds, not transpose), np.zeros(b.shape)
    for g in range(b.shape[0]):
        own = slice(bounds[g], bounds[g + 1])
        db[g] = (dout[own].T @ a[own]) if transpose else (a[own].T @ dout[own])
    return da, db


def check_ragged(sizes, before, after, k, n, transpose, params, dtype="float32", result=None):
    """Values and gradients, with NaN in every row and every cotangent that belongs to no group."""
    rng = np.random.default_rng(0)
    bounds = before + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    rows = int(bounds[-1]) + after
    if not rows:
        return
    a = rng.standard_normal((rows, k)).astype(dtype)
    b = rng.standard_normal((len(sizes), n, k) if transpose else (len(sizes), k, n)).astype(dtype)
    spec = GroupedSpec(transpose, jnp.dtype(result or dtype), jnp.dtype("float32"))
    dout = rng.standard_normal((rows, n)).astype(spec.dtype)
    for x in (a, dout):
        x[: bounds[0]], x[bounds[-1] :] = np.nan, np.inf
    arrays = {"a": jnp.asarray(a)[None], "b": jnp.asarray(b)[None], "bounds": jnp.asarray(bounds)[None]}

    @jax.jit
    def run(arrays, dout):
        out, _ = grouped.forward(arrays, spec, FwdParams(**params))
        return out, grouped.backward(arrays, spec, BwdParams(**params), out, None, dout, None)

    out, grads = run(arrays, jnp.asarray(dout)[None])
    a, b, dout = (x.astype(np.float64) for x in (a, b, dout))
    assert_close(out[0], product(a, b, bounds, transpose), spec.dtype, what="out")
    da, db = gradients(a, b, dout, bounds, transpose)
    assert_close(grads["a"][0], da, dtype, gradient=True, what="a")
    assert_close(grads["b"][0], db, dtype, gradient=True, what="b")
    nobody = np.r_[: bounds[0], bounds[-1] : rows]
    assert not np.asarray(out[0])[nobody].any()
    assert not np.asarray(grads["a"][0])[nobody].any()
    assert not np.asarray(grads["b"][0])[np.diff(bounds) == 0].any()


@st.composite
def ragged_calls(draw):
    return {
        "sizes": draw(st.lists(st.integers(0, 40) | st.just(0), min_size=1, max_size=6)),
        "before": draw(st.integers(0, 9)),
        "after": draw(st.integers(0, 20)),
        "k": draw(st.sampled_from([1, 7, 16, 33])),
        "n": draw(st.sampled_from([1, 6, 17, 32])),
        "transpose": draw(st.booleans()),
        "params": {
            "blocksize_m": draw(st.sampled_from([16, 32])),
            "blocksize_n": draw(st.sampled_from([16, 32])),
            "blocksize_k": draw(st.sampled_from([16, 32])),
        },
        "dtype": draw(st.sampled_from(["float32", "float16"])),
        "result": draw(st.sampled_from([None, "float32"])),
    }


@given(ragged_calls())
@tries(60, short=3)
def test_drawn_calls(drawn):
    check_ragged(**drawn)


SMALL = {"blocksize_m": 16, "blocksize_n": 16, "blocksize_k": 16}


def test_more_groups_than_a_program_looks_through_at_once(monkeypatch):
    """Tiles that begin and end in later chunks of groups, among them empty ones at a chunk's end."""
    monkeypatch.setattr(grouped, "MOST_GROUPS_AT_ONCE", 4)
    check_ragged([3, 0, 20, 0, 0, 17, 1, 0, 5, 0], 2, 3, 5, 18, False, SMALL)


@pytest.mark.parametrize("sizes", some([(70, 0), (0, 0, 0), (1,) * 20, (16, 32, 16)], (70, 0)))
def test_sizes_at_the_edges(sizes):
    check_ragged(sizes, 0, 0, 16, 48, True, SMALL)


def test_bands_of_tiles_cover_all_of_them():
    """More tiles of rows than a band has, and a last band that is not full; with even lengths nothing is masked."""
    check_ragged([16 * 11 - 3, 16 * 3], 0, 0, 16, 48, False, SMALL)


def test_offsets_inside_of_wide_tiles(monkeypatch):
    """The kernel with 64-bit offsets computes the same."""
    made = grouped._constants

    def wide(*args, **known):
        constants, lengths = made(*args, **known)
        return dataclasses.replace(constants, wide=True), lengths

    monkeypatch.setattr(grouped, "_constants", wide)
    check_ragged([5, 0, 20], 1, 2, 7, 18, True, SMALL)


def first_program_alone(kernel, arrays, scalars, outputs, *, programs, constants, **_):
    """Stands for ``call``: one program computes all tiles, on numpy arrays where they are."""
    results = [np.zeros(like.shape, like.dtype) for like in outputs]
    tensors = [call._Tensor(np.asarray(x)) for x in (*arrays, *results)]
    kernel[(1,)](*tensors[: len(arrays)], *scalars, *tensors[len(arrays) :], C=constants)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
def test_operands_of_more_than_2_to_the_31_elements(monkeypatch, transpose):
    """Of which only the last rows and the last matrix are of a group with rows, and only their pages are real."""
    monkeypatch.setattr(grouped, "call", first_program_alone)
    rng = np.random.default_rng(0)
    k, n, groups = 2**15, 16, 2**12 + 1
    rows = 2**16 + 8
    a = np.zeros((1, rows, k), np.float16)
    a[0, -8:] = rng.standard_normal((8, k))
    b = np.zeros((1, groups, n, k) if transpose else (1, groups, k, n), np.float16)
    b[0, -1] = rng.standard_normal(b.shape[2:]) / 128
    # The other rows are of nobody, and too many to be written here: the call begins behind them.
    bounds = np.full((1, groups + 1), rows - 8, np.int32)
    bounds[0, -1] = rows
    spec = GroupedSpec(transpose, jnp.dtype("float32"), jnp.dtype("float32"))
    monkeypatch.setattr(grouped, "MOST_GROUPS_AT_ONCE", 2**13)
    params = FwdParams(blocksize_m=256, blocksize_n=16, blocksize_k=256)
    out, _ = grouped.forward({"a": a, "b": b, "bounds": bounds}, spec, params)
    matrix = b[0, -1].astype(np.float64)
    expected = a[0, -8:].astype(np.float64) @ (matrix.T if transpose else matrix)
    assert_close(out[0, -8:], expected, "float32")
    assert not out[0, :-8].any()


def test_reruns_are_bit_identical():
    rng = np.random.default_rng(0)
    a, b = (
        jnp.asarray(rng.standard_normal((40, 24)), "float32"),
        jnp.asarray(rng.standard_normal((3, 24, 20)), "float32"),
    )
    run = jax.jit(
        jax.value_and_grad(lambda a, b: jnp.sin(grouped_matmul(a, b, SIZES, platform="triton")).sum(), (0, 1))
    )
    for x, y in zip(jax.tree.leaves(run(a, b)), jax.tree.leaves(run(a, b)), strict=True):
        np.testing.assert_array_equal(x, y)


SIZES = jnp.asarray([7, 0, 30])


def test_only_a_pin_makes_it_run():
    a, b = jnp.ones((8, 4)), jnp.ones((1, 4, 4))
    assert explain(grouped_matmul, a, b, jnp.asarray([8])).chosen.platform is Platform.XLA
    assert explain(grouped_matmul, a, b, jnp.asarray([8]), platform="triton").chosen.platform is Platform.TRITON
    assert explain(mean_pooling, a[None], platform="triton").chosen.platform is Platform.TRITON


# Mean pooling


def expected_means(x, sequences):
    """Of each sequence's rows, in float64, and how much of a mean's gradient each row gets."""
    return np.stack([x[rows].mean(0) if len(rows) else np.zeros(x.shape[1]) for rows in sequences])


def check_packed(lengths, padding, features, rows, columns=None, dtype="float32"):
    """Tokens behind the last sequence are NaN, and so is the gradient of none."""
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    x = rng.standard_normal((int(offsets[-1]) + padding, features)).astype(dtype)
    x[offsets[-1] :] = np.nan
    if not x.size:
        return
    dout = rng.standard_normal((len(lengths), features)).astype(dtype)
    tiles = {"blocksize_m": rows, "blocksize_n": columns}
    with overlay(mean_pooling=(FwdParams(**tiles), BwdParams(**tiles))):
        out, pull = jax.vjp(
            lambda x: mean_pooling(x, cu_seqlens=jnp.asarray(offsets), platform="triton"), jnp.asarray(x)
        )
        (grad,) = pull(jnp.asarray(dout))
    own = [range(start, stop) for start, stop in itertools.pairwise(offsets)]
    assert_close(out, expected_means(x.astype(np.float64), own), dtype)
    expected = np.zeros(x.shape)
    for rows_of, cotangent in zip(own, dout.astype(np.float64), strict=True):
        expected[list(rows_of)] = cotangent / max(1, len(rows_of))
    assert_close(grad, expected, dtype, gradient=True)


@given(
    st.lists(st.integers(0, 70) | st.sampled_from([0, 16, 32]), min_size=1, max_size=7),
    st.integers(0, 40),
    st.sampled_from([1, 5, 16, 33]),
    st.sampled_from([1, 4, 16, 64, 256]),
    st.sampled_from([None, 16]),
    st.sampled_from(["float32", "float16"]),
)
@tries(60, short=4)
def test_drawn_packed_means(lengths, padding, features, rows, columns, dtype):
    check_packed(lengths, padding, features, rows, columns, dtype)


@pytest.mark.parametrize("lengths", some([(16, 16), (0, 15, 17, 0), (64, 0, 3), (3, 61)], (0, 15, 17, 0)))
def test_sequences_that_begin_or_end_where_chunks_do(lengths):
    check_packed(lengths, 5, 20, 16, 16)


@pytest.mark.parametrize("rows", some([8, 16, 64], 16))
@pytest.mark.parametrize("masked", [False, True])
def test_padded_means_in_chunks(rows, masked):
    """Chunks without a row that counts among them; masked rows are NaN."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 53, 21)).astype(np.float32)
    mask = rng.random((3, 53)) < 0.5
    mask[0, 16:40], mask[2] = False, False
    if not masked:
        mask[:] = True
    x[~mask] = np.nan
    given_mask = jnp.asarray(mask) if masked else None
    with overlay(mean_pooling=(FwdParams(blocksize_m=rows, blocksize_n=16), BwdParams(blocksize_n=16))):
        out, pull = jax.vjp(lambda x: mean_pooling(x, given_mask, platform="triton"), jnp.asarray(x))
        (grad,) = pull(jnp.ones_like(out))
    expected = [expected_means(x[b].astype(np.float64), [np.flatnonzero(mask[b])])[0] for b in range(3)]
    assert_close(out, np.stack(expected), "float32")
    share = mask / np.maximum(mask.sum(1), 1)[:, None]
    assert_close(grad, np.broadcast_to(share[..., None], x.shape), "float32", gradient=True)


def test_chunks_follow_the_size_of_the_chip():
    shapes = {"inputs": jax.ShapeDtypeStruct((64, 4096, 1024), "bfloat16")}
    assert pooling._chunk(shapes, 1024, None) == pooling.MOST_ROWS
    assert pooling._chunk({"inputs": jax.ShapeDtypeStruct((1, 10, 8), "float32")}, 16, None) == pooling.FEWEST_ROWS
