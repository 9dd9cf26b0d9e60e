"""Kernel parameters are values: frozen, hashable, checked, and mergeable."""

import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from ejkernel.errors import InvalidInputError
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams

pytestmark = pytest.mark.typed

FWD_FIELDS = (
    "blocksize_m blocksize_k blocksize_n q_blocksize kv_blocksize blocksize_heads blocksize_keys "
    "num_key_splits num_warps num_stages"
).split()
BWD_FIELDS = "blocksize_m blocksize_k blocksize_n q_blocksize kv_blocksize num_warps num_stages".split()
# With the import hook of jaxtyping a wrong type never reaches the class.
REFUSED = (InvalidInputError, TypeCheckError)
BOTH = pytest.mark.parametrize("cls", [FwdParams, BwdParams])


@pytest.mark.parametrize(("cls", "names"), [(FwdParams, FWD_FIELDS), (BwdParams, BWD_FIELDS)])
def test_fields_and_their_order(cls, names):
    assert [field.name for field in dataclasses.fields(cls) if not field.kw_only] == names
    assert [field.name for field in dataclasses.fields(BwdParams) if field.kw_only] == ["blocksize_heads"]
    positional = cls(*range(1, len(names) + 1))
    assert positional.to_dict() == dict(zip(names, range(1, len(names) + 1), strict=True))


@BOTH
def test_a_key_cannot_be_lost_by_mutation(cls):
    params = cls(q_blocksize=64)
    cache = {params: "tuned"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.q_blocksize = 128
    assert cache[cls(q_blocksize=64)] == "tuned"
    assert cls(q_blocksize=32) not in cache


@BOTH
def test_equality_hash_and_pickle(cls):
    params = cls(q_blocksize=64, num_warps=4)
    assert params == cls(q_blocksize=64, num_warps=4) != cls(q_blocksize=64)
    assert hash(params) == hash(cls(q_blocksize=64, num_warps=4))
    assert pickle.loads(pickle.dumps(params)) == params
    assert FwdParams(q_blocksize=64) != BwdParams(q_blocksize=64)


@BOTH
def test_to_dict_leaves_out_none(cls):
    assert cls().to_dict() == {}
    assert cls(kv_blocksize=32, num_stages=2).to_dict() == {"kv_blocksize": 32, "num_stages": 2}


@BOTH
@pytest.mark.parametrize(
    "value", [0, -16, True, False, 1.5, 64.0, "64", [64], np.int32(0), np.float32(16), np.bool_(True)]
)
def test_what_is_no_positive_int_is_refused_by_name(cls, value):
    with pytest.raises(REFUSED, match="num_warps"):
        cls(q_blocksize=64, num_warps=value)


@BOTH
@pytest.mark.parametrize("scalar", [np.int32, np.int64, np.uint8])
def test_numpy_ints_become_ints(cls, scalar):
    params = cls(q_blocksize=scalar(64))
    assert type(params.q_blocksize) is int
    assert params == cls(q_blocksize=64)


@BOTH
def test_merge(cls):
    base, override = cls(q_blocksize=64, num_warps=4), cls(num_warps=8, num_stages=2)
    assert cls.merge(base, override) == cls(q_blocksize=64, num_warps=8, num_stages=2)
    assert cls.merge(base, None) == cls.merge(None, base) == base
    assert cls.merge(None, None) == cls()
    assert type(cls.merge(base, override)) is cls


@BOTH
def test_merge_refuses_the_other_kind(cls):
    other = BwdParams if cls is FwdParams else FwdParams
    with pytest.raises(REFUSED, match="override"):
        cls.merge(cls(), other(q_blocksize=64))


def test_backward_from_forward():
    fwd = FwdParams(128, 64, 256, 128, 96, 8, 32, 4, 8, 3)
    assert BwdParams.from_fwd_params(fwd) == BwdParams(64, 32, 128, 64, 32, 8, 3)
    assert BwdParams.from_fwd_params(fwd, scale=2) == BwdParams(256, 128, 512, 256, 128, 8, 3)


@pytest.mark.parametrize(("block", "scale", "expected"), [(16, 0.5, 16), (96, 0.5, 32), (1, 0.5, 16), (128, 1.0, 128)])
def test_backward_blocks_that_the_documents_get_wrong(block, scale, expected):
    assert BwdParams.from_fwd_params(FwdParams(q_blocksize=block), scale).q_blocksize == expected


def test_backward_keeps_none_as_none():
    assert BwdParams.from_fwd_params(FwdParams()) == BwdParams()


@given(
    st.builds(FwdParams, *[st.none() | st.integers(1, 4096)] * len(FWD_FIELDS)),
    st.floats(0.01, 8, allow_nan=False),
)
def test_backward_blocks_are_powers_of_two_of_at_least_16(fwd, scale):
    bwd = BwdParams.from_fwd_params(fwd, scale)
    for name in BWD_FIELDS:
        before, after = getattr(fwd, name), getattr(bwd, name)
        if before is None or name.startswith("num_"):
            assert after == before
        else:
            assert after >= 16
            assert after & (after - 1) == 0
            assert after == 16 or before * scale / 2 < after <= before * scale


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf"), True])
def test_a_bad_scale_is_refused(scale):
    with pytest.raises(InvalidInputError, match="scale"):
        BwdParams.from_fwd_params(FwdParams(q_blocksize=64), scale)


def test_the_module_needs_no_jax():
    code = "import sys, ejkernel.ops.utils.datacarrier, ejkernel.callib.chips; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_scale_beyond_all_floats():
    assert BwdParams.from_fwd_params(FwdParams(q_blocksize=64), 1e308).q_blocksize == 2**62


def test_heads_are_left_to_the_library():
    assert BwdParams.from_fwd_params(FwdParams(blocksize_heads=8, q_blocksize=64)).to_dict() == {"q_blocksize": 32}
