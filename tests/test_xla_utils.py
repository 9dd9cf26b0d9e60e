"""Packed sequences and segment ids against plain loops, with empty sequences anywhere, eager and jitted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError, jaxtyped

import ejkernel.xla_utils as package
import ejkernel.xla_utils.utils as module
from ejkernel.errors import InvalidInputError
from ejkernel.xla_utils import (
    cdiv,
    cu_seqlens_from_lens,
    identity_dtype_convert,
    mask_to_segment_ids,
    pack,
    packing,
    prepare_chunk_indices,
    prepare_chunk_offsets,
    prepare_cu_seqlens_from_mask,
    prepare_lens,
    prepare_lens_from_mask,
    prepare_position_ids,
    prepare_sequence_ids,
    prepare_token_indices,
    segment_ids_from_cu_seqlens,
    segment_ids_to_mask,
    unpack,
)

pytestmark = pytest.mark.typed

# With the import hook of jaxtyping a wrong rank never reaches the function.
REFUSED = (InvalidInputError, TypeCheckError)


def offsets_of(lens, dtype=np.int32):
    return jnp.asarray(np.concatenate([[0], np.cumsum(lens)]), dtype)


def token_loop(lens):
    return [(sequence, place) for sequence, length in enumerate(lens) for place in range(length)]


def chunk_loop(lens, size):
    return [(sequence, chunk) for sequence, length in enumerate(lens) for chunk in range(-(-length // size))]


def padded_to(rows, total):
    return [*rows, *[(-1, -1)] * (total - len(rows))]


EDGES = [[], [0], [0, 0, 0], [3], [0, 3], [3, 0], [0, 0, 2, 0, 0, 1, 0], [1, 1, 1]]


def test_the_two_module_paths_agree():
    assert package.__all__ == module.__all__
    assert all(getattr(package, name) is getattr(module, name) for name in module.__all__)


def test_the_annotations_match_what_goes_in_and_out():
    beartype = pytest.importorskip("beartype").beartype
    lens, offsets, mask = jnp.array([2, 0, 3]), np.array([0, 2, 2, 5], np.int32), jnp.ones((3, 4), bool)
    checked = jaxtyped(typechecker=beartype)
    assert checked(prepare_lens)(offsets).shape == (3,)
    assert checked(cu_seqlens_from_lens)(lens).shape == (4,)
    assert checked(prepare_cu_seqlens_from_mask)(mask).shape == (4,)
    assert checked(prepare_chunk_offsets)(offsets, 2).shape == (4,)
    assert checked(pack)(jnp.ones((3, 4, 2)), lens)[1].shape == (4,)
    assert checked(unpack)(jnp.ones((5, 2)), offsets).shape == (3, 3, 2)
    with pytest.raises(TypeCheckError):
        checked(prepare_lens)(offsets[None])


# --- small things -------------------------------------------------------------------------------------------


@given(st.integers(-1000, 1000), st.integers(1, 50))
def test_cdiv_of_ints(a, b):
    assert type(cdiv(a, b)) is int
    assert (cdiv(a, b) - 1) * b < a <= cdiv(a, b) * b


def test_cdiv_of_arrays_neither_overflows_nor_changes_dtype():
    for dtype in (jnp.int8, jnp.int32, jnp.uint8):
        top = jnp.array([0, 1, jnp.iinfo(dtype).max], dtype)
        result = jax.jit(partial(cdiv, b=2))(top)
        assert result.dtype == dtype
        assert result.tolist() == [0, 1, int(top[2]) // 2 + 1]


def test_lens_both_ways():
    assert prepare_lens(jnp.array([0, 5, 12, 18])).tolist() == [5, 7, 6]
    assert cu_seqlens_from_lens(jnp.array([5, 7, 6])).tolist() == [0, 5, 12, 18]
    assert cu_seqlens_from_lens(jnp.array([], jnp.int32)).tolist() == [0]
    assert cu_seqlens_from_lens(jnp.array([100, 100], jnp.int8), jnp.int32).tolist() == [0, 100, 200]


@pytest.mark.parametrize("dtype", [bool, np.int32, np.uint8, np.float32])
def test_masks_of_any_dtype_count_what_is_not_zero(dtype):
    mask = jnp.asarray(np.array([[3, 1, 1, 0], [0, 0, 0, 0], [0, 2, 0, 1]]).astype(dtype))
    assert prepare_lens_from_mask(mask).tolist() == [3, 0, 2]
    result = prepare_cu_seqlens_from_mask(mask)
    assert result.tolist() == [0, 3, 3, 5]
    assert result.dtype == jnp.int32


def test_out_dtype():
    assert prepare_cu_seqlens_from_mask(jnp.ones((2, 200), bool), jnp.int16).dtype == jnp.int16
    assert prepare_cu_seqlens_from_mask(jnp.ones((2, 200), jnp.int8), out_dtype=jnp.int32).tolist() == [
        0,
        200,
        400,
    ]


# --- packed sequences ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lens", EDGES, ids=str)
def test_empty_sequences_anywhere(lens):
    offsets, tokens, chunks = offsets_of(lens), token_loop(lens), chunk_loop(lens, 2)
    assert prepare_sequence_ids(offsets).tolist() == [sequence for sequence, _ in tokens]
    assert prepare_position_ids(offsets).tolist() == [place for _, place in tokens]
    assert prepare_token_indices(offsets).tolist() == [list(row) for row in tokens]
    assert prepare_chunk_indices(offsets, 2).tolist() == [list(row) for row in chunks]
    assert segment_ids_from_cu_seqlens(offsets).tolist() == [sequence + 1 for sequence, _ in tokens]


@pytest.mark.parametrize("count", [packing.FEW, packing.FEW + 1, 3 * packing.FEW])
def test_many_sequences(count):
    """Few sequences and many are found in two ways."""
    lens = np.random.default_rng(count).integers(0, 4, count)
    assert prepare_sequence_ids(offsets_of(lens)).tolist() == [sequence for sequence, _ in token_loop(lens)]
    beyond = prepare_sequence_ids(offsets_of(lens), int(lens.sum()) + 3)
    assert beyond.tolist()[-4:] == [int(np.flatnonzero(lens)[-1]), -1, -1, -1]


@partial(jax.jit, static_argnums=(1, 2))
def all_helpers(offsets, chunk, total):
    return (
        prepare_sequence_ids(offsets, total),
        prepare_position_ids(offsets, total),
        prepare_token_indices(offsets, total),
        segment_ids_from_cu_seqlens(offsets, total),
        prepare_chunk_indices(offsets, chunk, total),
        prepare_chunk_offsets(offsets, chunk),
    )


# The number of sequences and the total are fixed, so that one compilation serves every example.
eight_lengths = st.lists(st.integers(0, 6), min_size=8, max_size=8)


@settings(max_examples=150, deadline=None)
@given(eight_lengths, st.sampled_from([1, 2, 3, 7]))
def test_helpers_against_a_loop(lens, chunk):
    found = [array.tolist() for array in all_helpers(offsets_of(lens), chunk, 50)]
    tokens, chunks = padded_to(token_loop(lens), 50), padded_to(chunk_loop(lens, chunk), 50)
    assert found[0] == [sequence for sequence, _ in tokens]
    assert found[1] == [place for _, place in tokens]
    assert found[2] == [list(row) for row in tokens]
    assert found[3] == [sequence + 1 if sequence >= 0 else -1 for sequence, _ in tokens]
    assert found[4] == [list(row) for row in chunks]
    assert found[5] == [len(chunk_loop(lens[:count], chunk)) for count in range(9)]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int16, jnp.int32])
def test_results_have_the_dtype_of_the_offsets(dtype):
    offsets = jnp.array([0, 60, 60, 120], dtype)
    total = 300  # more than int8 can count
    results = [
        prepare_lens(offsets),
        prepare_sequence_ids(offsets, total),
        prepare_position_ids(offsets, total),
        prepare_token_indices(offsets, total),
        prepare_chunk_indices(offsets, 7, total),
        prepare_chunk_offsets(offsets, 1000),
        segment_ids_from_cu_seqlens(offsets, total),
    ]
    assert {result.dtype for result in results} == {jnp.dtype(dtype)}
    assert results[1].tolist() == [0] * 60 + [2] * 60 + [-1] * 180
    assert results[2].tolist() == [*range(60), *range(60), *[-1] * 180]
    assert results[5].tolist() == [0, 1, 1, 2]


def test_int64_offsets():
    with jax.enable_x64(True):
        offsets = jnp.array([0, 2, 5], jnp.int64)
        assert prepare_token_indices(offsets).dtype == prepare_chunk_indices(offsets, 2).dtype == jnp.int64
        assert prepare_position_ids(offsets, 6).tolist() == [0, 1, 0, 1, 2, -1]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (prepare_position_ids, "total_length"),
        (prepare_sequence_ids, "total_length"),
        (prepare_token_indices, "total_length"),
        (segment_ids_from_cu_seqlens, "total_length"),
        (partial(prepare_chunk_indices, chunk_size=2), "total_chunks"),
        (lambda offsets: unpack(jnp.ones(5), offsets), "max_length"),
        (lambda offsets: pack(jnp.ones((2, 5)), offsets[1:]), "total_length"),
    ],
)
def test_under_jit_the_total_is_asked_for(function, name):
    with pytest.raises(InvalidInputError, match=f"{name}.*jit.*pass {name}="):
        jax.jit(function)(jnp.array([0, 2, 5]))


def test_constant_offsets_need_no_total_under_jit():
    offsets = np.array([0, 2, 5], np.int32)
    lens = np.array([1, 0, 2], np.int32)
    found = jax.jit(
        lambda: (prepare_position_ids(offsets), prepare_chunk_indices(offsets, 2), pack(np.eye(3), lens)[0])
    )()
    assert found[0].tolist() == [0, 1, 0, 1, 2]
    assert found[1].tolist() == [[0, 0], [1, 0], [1, 1]]
    assert found[2].tolist() == [1.0, 0.0, 0.0]


def test_vmap_over_offsets():
    batch = jnp.array([[0, 2, 5], [0, 0, 4]])
    found = jax.vmap(partial(prepare_sequence_ids, total_length=5))(batch)
    assert found.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, -1]]


def test_a_hundred_thousand_sequences_take_linear_memory():
    lens = np.random.default_rng(0).integers(0, 4, 100_000)
    offsets, total = offsets_of(lens), int(lens.sum())
    run = jax.jit(partial(prepare_token_indices, total_length=total))
    expected = np.repeat(np.arange(lens.size), lens)
    assert np.array_equal(run(offsets)[:, 0], expected)
    # A few numbers a token: nothing is compared with every sequence.
    assert run.lower(offsets).compile().memory_analysis().temp_size_in_bytes < 64 * (total + lens.size)


@pytest.mark.parametrize(
    "offsets",
    [
        jnp.array([1, 3]),
        jnp.array([0, 3, 2]),
        jnp.array([0.0, 1.0]),
        jnp.array([[0, 1]]),
        jnp.array([], jnp.int32),
        jnp.array([0, 1], jnp.uint32),
    ],
    ids=["not from 0", "falling", "float", "2-D", "empty", "unsigned"],
)
def test_bad_offsets_are_refused(offsets):
    with pytest.raises(REFUSED, match="cu_seqlens"):
        prepare_position_ids(offsets)


def test_bad_sizes_are_refused():
    offsets = jnp.array([0, 2, 5])
    with pytest.raises(InvalidInputError, match="total_length is 4; expected at least 5"):
        prepare_position_ids(offsets, 4)
    with pytest.raises(REFUSED, match="total_length"):
        prepare_position_ids(offsets, -1)
    with pytest.raises(InvalidInputError, match="chunk_size is 0"):
        prepare_chunk_offsets(offsets, 0)
    with pytest.raises(InvalidInputError, match="total_chunks is 2; expected at least 3"):
        prepare_chunk_indices(offsets, 2, 2)
    with pytest.raises(REFUSED, match="total_length"):
        jax.jit(prepare_position_ids)(offsets, 5)


# --- pack and unpack ----------------------------------------------------------------------------------------


def pack_loop(padded, lens):
    rows = [row[:length] for row, length in zip(padded, lens, strict=True)]
    return np.concatenate([np.zeros((0, *padded.shape[2:]), padded.dtype), *rows])


def pad_loop(packed, lens, width):
    rows = np.zeros((len(lens), width, *packed.shape[1:]), packed.dtype)
    for sequence, place in token_loop(lens):
        rows[sequence, place] = packed[sum(lens[:sequence]) + place]
    return rows


@pytest.mark.parametrize("lens", EDGES, ids=str)
def test_pack_and_unpack_every_shape(lens):
    width = max(lens, default=0) + 1
    padded = np.random.default_rng(0).normal(size=(len(lens), width, 2)).astype(np.float32)
    packed, offsets = pack(padded, jnp.asarray(lens, jnp.int32))
    assert np.array_equal(packed, pack_loop(padded, lens))
    assert np.array_equal(offsets, offsets_of(lens))
    assert np.array_equal(unpack(packed, offsets), pad_loop(np.asarray(packed), lens, width - 1))


jitted_pack, jitted_unpack = jax.jit(pack, static_argnums=2), jax.jit(unpack, static_argnums=2)


@settings(max_examples=60, deadline=None)
@given(eight_lengths, st.sampled_from([(), (3,), (2, 2)]))
def test_pack_and_unpack_against_a_loop(lens, features):
    padded = np.random.default_rng(0).normal(size=(8, 7, *features)).astype(np.float32)
    expected = pack_loop(padded, lens)
    packed, offsets = jitted_pack(padded, jnp.asarray(lens, jnp.int32), 50)
    assert np.array_equal(packed[: len(expected)], expected)
    assert not np.any(packed[len(expected) :])
    assert np.array_equal(offsets, offsets_of(lens))
    assert np.array_equal(jitted_unpack(packed, offsets, 7), pad_loop(expected, lens, 7))


def test_padding_is_not_read_and_gets_no_gradient():
    padded = jnp.array([[1.0, jnp.nan], [2.0, 3.0], [jnp.nan, jnp.nan]])
    lens = jnp.array([1, 2, 0])
    loss = lambda x: jnp.sum(pack(x, lens, total_length=5)[0] ** 2)  # noqa: E731
    assert float(loss(padded)) == 14.0
    assert jax.grad(loss)(padded).tolist() == [[2.0, 0.0], [4.0, 6.0], [0.0, 0.0]]


def test_bad_packing_is_refused():
    with pytest.raises(InvalidInputError, match=r"lens is .*3"):
        pack(jnp.ones((2, 2)), jnp.array([1, 3]))
    with pytest.raises(REFUSED, match="lens"):
        pack(jnp.ones((2, 2)), jnp.array([1, 2, 1]))
    with pytest.raises(InvalidInputError, match="cu_seqlens ends at 5"):
        unpack(jnp.ones(4), jnp.array([0, 2, 5]))
    with pytest.raises(InvalidInputError, match="max_length is 2"):
        unpack(jnp.ones(5), jnp.array([0, 2, 5]), 2)


# --- segment ids --------------------------------------------------------------------------------------------


def test_segment_ids_to_mask_by_hand():
    mask = segment_ids_to_mask(jnp.array([[1, 1, 2, 0], [5, -1, 5, -1]]))
    assert mask.dtype == bool
    assert mask.shape == (2, 4, 4)
    assert mask[0].astype(int).tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert mask[1].astype(int).tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]


def test_cross_attention_and_separate_masks():
    q_ids, kv_ids = jnp.array([[1, 2, 0]]), jnp.array([[2, 2, -1, 1]])
    q_mask, kv_mask, mask = segment_ids_to_mask((q_ids, kv_ids), jnp.float32, return_separate_masks=True)
    assert q_mask.tolist() == [[1, 1, 0]]
    assert kv_mask.tolist() == [[1, 1, 0, 1]]
    assert mask.tolist() == [[[0, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]]]
    assert {array.dtype for array in (q_mask, kv_mask, mask)} == {jnp.dtype(jnp.float32)}


def test_bad_segment_ids_are_refused():
    with pytest.raises(REFUSED, match="segment_ids"):
        segment_ids_to_mask(jnp.array([[1.0, 2.0]]))
    with pytest.raises(REFUSED, match="segment_ids"):
        segment_ids_to_mask((jnp.ones((3, 2), int), jnp.ones((2, 2), int)))


def loop_ids(mask):
    """Ids by comparing rows one by one; the mask must be expressible."""
    ids, seen = [], []
    for row in mask:
        if not row.any():
            ids.append(-1)
            continue
        if not any(np.array_equal(row, other) for other in seen):
            seen.append(row)
        ids.append(1 + next(index for index, other in enumerate(seen) if np.array_equal(row, other)))
    keys = [next((ids[query] for query in range(len(ids)) if mask[query, key]), -1) for key in range(mask.shape[1])]
    return ids, keys


def expressible(mask):
    rows = [row for row in mask if row.any()]
    return all(np.array_equal(a, b) or not (a & b).any() for a in rows for b in rows)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-1, 4), min_size=6, max_size=6), st.lists(st.integers(-1, 4), min_size=5, max_size=5))
def test_ids_are_linked_and_in_order_of_appearance(q_ids, kv_ids):
    mask = np.asarray(segment_ids_to_mask((jnp.array(q_ids), jnp.array(kv_ids))))
    found = mask_to_segment_ids(jnp.asarray(mask))
    assert (found[0].tolist(), found[1].tolist()) == loop_ids(mask)
    assert np.array_equal(segment_ids_to_mask(found), mask)
    jitted = jax.jit(mask_to_segment_ids)(mask)
    assert all(np.array_equal(a, b) for a, b in zip(found, jitted, strict=True))
    assert found[0].dtype == found[1].dtype == jnp.int32


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**12 - 1))
def test_refused_exactly_when_segments_cannot_express_it(bits):
    mask = (bits >> np.arange(12) & 1).astype(bool).reshape(4, 3)
    if expressible(mask):
        assert np.array_equal(segment_ids_to_mask(mask_to_segment_ids(mask)), mask)
    else:
        with pytest.raises(InvalidInputError, match="segment ids"):
            mask_to_segment_ids(mask)


BAND = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]])


@pytest.mark.parametrize(
    "mask", [np.tril(np.ones((4, 4), bool)), BAND, BAND[None]], ids=["causal", "documents", "batched"]
)
def test_the_documents_example_is_refused(mask):
    with pytest.raises(InvalidInputError, match="causal"):
        mask_to_segment_ids(mask)
    assert mask_to_segment_ids(mask, check=False)[0].shape == mask.shape[:-1]
    assert jax.jit(mask_to_segment_ids)(mask)[0].shape == mask.shape[:-1]


def test_a_constant_mask_is_checked_inside_jit_too():
    with pytest.raises(InvalidInputError, match="causal"):
        jax.jit(lambda: mask_to_segment_ids(BAND))()
    assert jax.jit(lambda: mask_to_segment_ids(np.eye(2)))()[0].tolist() == [1, 2]


def test_masks_that_the_documents_invert():
    mask = np.array([[0, 1], [1, 0]], bool)  # numbering queries and keys apart would give the identity
    q_ids, kv_ids = mask_to_segment_ids(mask)
    assert (q_ids.tolist(), kv_ids.tolist()) == ([1, 2], [2, 1])


def test_shapes_and_heads():
    ids = jnp.array([[[1, 1, 2], [3, -1, 3]], [[1, 2, 3], [1, 2, 3]]])  # [batch, heads, length]
    mask = segment_ids_to_mask(ids)
    assert mask.shape == (2, 2, 3, 3)
    q_ids, kv_ids = mask_to_segment_ids(mask, per_head=True)
    assert q_ids.shape == kv_ids.shape == (2, 2, 3)
    assert np.array_equal(segment_ids_to_mask((q_ids, kv_ids)), mask)
    with pytest.raises(InvalidInputError, match="per_head=True"):
        mask_to_segment_ids(mask)
    equal = jnp.repeat(mask[:, :1], 4, axis=1)
    q_ids, kv_ids = mask_to_segment_ids(equal)
    assert q_ids.shape == kv_ids.shape == (2, 3)
    assert np.array_equal(segment_ids_to_mask((q_ids, kv_ids)), equal[:, 0])
    assert jax.jit(mask_to_segment_ids)(equal)[0].shape == (2, 3)
    assert [ids.shape for ids in mask_to_segment_ids(mask[:, 0])] == [(2, 3), (2, 3)]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3), (0, 2, 2)])
def test_empty_masks(shape):
    q_ids, kv_ids = mask_to_segment_ids(jnp.ones(shape, bool))
    assert q_ids.shape == shape[:-1]
    assert kv_ids.shape == (*shape[:-2], shape[-1])
    assert np.all(np.asarray(q_ids) == -1)
    assert np.all(np.asarray(kv_ids) == -1)


def test_mask_dtypes():
    ids = jnp.array([1, 2, 2])
    for dtype in (jnp.int32, jnp.uint8, jnp.float32, jnp.bfloat16):
        assert mask_to_segment_ids(segment_ids_to_mask(ids, dtype))[0].tolist() == [1, 2, 2]
    assert mask_to_segment_ids(7 * segment_ids_to_mask(ids, jnp.int32))[0].tolist() == [1, 2, 2]
    additive = jnp.where(segment_ids_to_mask(ids), 0.0, -jnp.inf)
    with pytest.raises(InvalidInputError, match="boolean"):
        mask_to_segment_ids(additive)
    with pytest.raises(InvalidInputError, match="shape"):
        mask_to_segment_ids(jnp.ones(3))


@pytest.mark.slow
def test_a_mask_of_8192_squared():
    ids = jnp.asarray(np.random.default_rng(0).integers(-1, 50, (2, 8192)))
    mask = segment_ids_to_mask((ids[0], ids[1]))
    found = mask_to_segment_ids(mask)
    present = np.unique(np.asarray(ids[0]))
    assert int(found[0].max()) == np.sum(present > 0)
    with pytest.raises(InvalidInputError):
        mask_to_segment_ids(mask.at[8191, 8191].set(~mask[8191, 8191]))


# --- gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [lambda function: function, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_gradient_is_rounded_and_keeps_its_dtype(run, dtype):
    factor = jnp.asarray(np.linspace(0.1, 3, 50), jnp.float32)
    convert = identity_dtype_convert(dtype)
    gradient = run(jax.grad(lambda x: jnp.sum(convert(x) * factor)))(jnp.ones(50))
    assert gradient.dtype == jnp.float32
    assert np.array_equal(gradient, np.asarray(factor).astype(dtype).astype(np.float32))
    assert not np.array_equal(gradient, factor)


def test_forward_is_the_identity():
    x = jnp.array([1.0001, jnp.nan, jnp.inf])
    assert np.array_equal(identity_dtype_convert(jnp.bfloat16)(x), x, equal_nan=True)


def test_the_operations_before_it_still_differentiate():
    convert = identity_dtype_convert(jnp.float32)
    gradient = jax.grad(lambda x: jnp.sum(convert(jnp.sin(x.astype(jnp.bfloat16))).astype(jnp.float32)))(jnp.ones(3))
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, np.cos(1.0), rtol=1e-2)


def test_identity_under_vmap_and_on_trees():
    convert = identity_dtype_convert(jnp.bfloat16)
    assert convert is identity_dtype_convert("bfloat16")
    gradient = jax.vmap(jax.grad(lambda tree: 1.001 * convert(tree)["a"]))({"a": jnp.ones(3), "n": jnp.ones(3)})
    assert gradient["a"].tolist() == [1, 1, 1]
    assert gradient["n"].tolist() == [0, 0, 0]
    mixed = jax.grad(lambda tree: convert(tree)["a"], allow_int=True)({"a": 1.0, "n": 3})
    assert float(mixed["a"]) == 1.0


def test_a_dtype_without_gradients_is_refused():
    with pytest.raises(InvalidInputError, match="int32"):
        identity_dtype_convert(jnp.int32)


# What a reader tried to break


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: prepare_lens(None), "cu_seqlens"),
        (lambda: prepare_lens("abc"), "cu_seqlens"),
        (lambda: prepare_lens([[1], [2, 3]]), "cu_seqlens"),
        (lambda: prepare_lens_from_mask(None), "mask"),
        (lambda: mask_to_segment_ids(None), "mask"),
        (lambda: prepare_cu_seqlens_from_mask(np.ones((2, 100), bool), jnp.int8), "lens"),
        (lambda: prepare_cu_seqlens_from_mask(np.ones((2, 3), bool), jnp.float32), "out_dtype"),
        (lambda: prepare_sequence_ids(np.array([0] * 200 + [3], np.int8)), "cu_seqlens"),
        (lambda: segment_ids_to_mask(jnp.ones((1, 2), int), dtype="foo"), "dtype"),
        (lambda: identity_dtype_convert("foo"), "dtype"),
    ],
)
def test_wrong_arguments_are_named(call, name):
    with pytest.raises((InvalidInputError, TypeCheckError), match=name):
        call()


def test_heads_are_compared_by_what_they_let_through():
    q_ids, kv_ids = mask_to_segment_ids(jnp.array([[[[1, 0], [0, 1]], [[2, 0], [0, 3]]]]))
    assert (q_ids.tolist(), kv_ids.tolist()) == ([[1, 2]], [[1, 2]])


def test_ids_of_one_batch_entry_serve_all():
    q_ids, kv_ids = jnp.array([[1, 2], [2, 2]]), jnp.array([[1, 2, 0]])
    expected = [[[True, False, False], [False, True, False]], [[False, True, False], [False, True, False]]]
    assert segment_ids_to_mask((q_ids, kv_ids)).tolist() == expected
