"""Which tiles flash attention for Hopper runs with: what it is asked for, clipped, and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from conftest import bound
from hypothesis import given
from hypothesis import strategies as st

from ejkernel import BwdParams, FwdParams, explain, kernel_registry
from ejkernel.kernels._pallas.gpu.flash_attention_sm90 import backward, backward_wide, forward, gradients, parameters
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.attention import PallasFlashAttention

NAMES = ("q_blocksize", "kv_blocksize", "num_warps", "num_stages")
SHARED_MEMORY = 232448
sizes = st.none() | st.integers(1, 1000) | st.integers(1, 2**40)
head_dims = st.sampled_from(range(8, 257, 8))


def any_params(cls):
    return st.builds(cls, **{field.name: sizes for field in dataclasses.fields(cls)})


def shapes_of(dim, value_dim):
    widths = {"query": dim, "key": dim, "value": value_dim}
    return {name: jax.ShapeDtypeStruct((1, 160, 2, width), jnp.bfloat16) for name, width in widths.items()}


def effective(params, dims, direction):
    return PallasFlashAttention.effective(shapes_of(*dims), None, params, None, direction)


def tile_of(*sizes):
    return FwdParams(**dict(zip(NAMES, sizes, strict=True)))


@given(params=any_params(FwdParams), dims=st.tuples(head_dims, head_dims))
def test_forward_is_clipped(params, dims):
    """To what the kernel takes and shared memory holds; again it is the same, and nothing else is set."""
    clipped = effective(params, dims, "forward")
    assert effective(clipped, dims, "forward") == clipped
    assert tuple(clipped.to_dict()) == NAMES == PallasFlashAttention.reads["forward"]
    consumers, rest = divmod(clipped.num_warps, 4)
    assert rest == 0
    assert consumers in (1, 2, 3)
    assert clipped.q_blocksize == 64 * consumers
    assert clipped.kv_blocksize in range(16, 257, 16)
    assert clipped.num_stages >= 2
    widths = [dim if dim % 32 == 0 else parameters.shared_columns(dim) for dim in dims]
    output = 0 if dims[0] == dims[1] > 128 or dims[1] % 32 else dims[1]
    own, slot = 64 * consumers * (widths[0] + output), clipped.kv_blocksize * sum(widths)
    assert 2 * (own + clipped.num_stages * slot) < SHARED_MEMORY


@given(params=any_params(BwdParams), dims=st.tuples(head_dims, head_dims))
def test_backward_has_one_set(params, dims):
    """At each head dim, in which every other ends."""
    only = effective(params, dims, "backward")
    assert only == effective(BwdParams(), dims, "backward") == effective(only, dims, "backward")
    assert set(only.to_dict()) <= set(PallasFlashAttention.reads["backward"])


def test_sets_of_the_backward():
    for dims, only in {
        **dict.fromkeys([(64, 64), (40, 56)], (128, 128, 8, 2)),
        **dict.fromkeys([(128, 128), (128, 64), (72, 72), (80, 80), (96, 96), (120, 120)], (64, 128, 8, 2)),
    }.items():
        assert effective(BwdParams(), dims, "backward") == BwdParams(**dict(zip(NAMES, only, strict=True)))
    for dims in ((32, 32), (80, 72), (96, 64), (128, 96), (64, 128), (192, 128), (256, 256)):
        assert effective(BwdParams(), dims, "backward") == BwdParams(q_blocksize=64, kv_blocksize=64, num_warps=8)


@pytest.mark.parametrize("dims", parameters.SPACE, ids=str)
def test_what_is_shipped_is_not_clipped(dims):
    shapes = shapes_of(*dims)
    for direction in ("forward", "backward"):
        default = PallasFlashAttention.defaults(shapes, None, None, direction)
        space = PallasFlashAttention.space(shapes, None, None, direction)
        assert default in space
        assert [effective(params, dims, direction) for params in space] == space


@pytest.mark.parametrize(
    ("asked", "consumers"),
    [({}, 2), ({"q_blocksize": 64}, 1), ({"num_warps": 4}, 1), ({"num_warps": 12}, 3), ({"q_blocksize": 1}, 1),
     ({"q_blocksize": 192, "num_warps": 8}, 2), ({"q_blocksize": 128, "num_warps": 12}, 2),
     ({"q_blocksize": 10_000, "num_warps": 64}, 3)],
    ids=str,
)  # fmt: skip
def test_queries_and_warps_are_both_read(asked, consumers):
    assert effective(FwdParams(**asked), (64, 64), "forward").num_warps == 4 * consumers


# What the kernels are built with


def prepared(dims):
    call, _ = bound(*(jnp.zeros(x.shape, x.dtype) for x in shapes_of(*dims).values()), causal=True)
    return {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes_of(*dims).items()}, call.spec


@pytest.fixture
def built(monkeypatch):
    """The configurations of the kernels that would be launched, and how many slots of dS and rows the plan has."""
    found = []
    for module, name in (
        (forward, "call"),
        (backward, "call"),
        (gradients.backward_wide_queries, "query_gradient"),
        (gradients.backward_wide_keys, "key_gradients"),
    ):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda c, *x, k=kernel, **more: found.append((c, x)) or k(c, *x, **more))
    return found


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("asked", [(), (64, 64, 4, 3), (10_000, 10_000, 64, 9), (1, 1, 1, 1)], ids=str)
def test_the_forward_runs_with_its_effective_parameters(dims, asked, built):
    arrays, spec = prepared(dims)
    params = tile_of(*asked) if asked else FwdParams()
    jax.eval_shape(lambda arrays: forward.forward(arrays, spec, params), arrays)
    [(c, (*_, table, _))] = built
    consumers, step, stages = c.consumers, c.step, c.stages
    assert tile_of(64 * consumers, step, 4 * consumers, stages) == effective(params, dims, "forward")
    assert table.shape[1] == -(-160 // (64 * consumers))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("asked", [{}, {"q_blocksize": 1, "num_warps": 1}, dict.fromkeys(NAMES, 10_000)], ids=str)
def test_the_backward_runs_with_its_effective_parameters(dims, asked, built):
    arrays, spec = prepared(dims)
    out, lse = jnp.zeros((1, 160, 2, dims[1]), jnp.bfloat16), jnp.zeros((1, 2, 160))
    wanted = frozenset({"query", "key", "value"})
    jax.eval_shape(
        lambda arrays: gradients.backward(arrays, spec, BwdParams(**asked), out, lse, out, lse, wanted), arrays
    )
    only = effective(BwdParams(**asked), dims, "backward")
    if parameters.single(*dims):
        [(c, (*_, table, _, _))] = built
        assert (c.step, 4 * c.consumers, c.stages) == (only.q_blocksize, only.num_warps, only.num_stages)
        assert table.shape[1] == -(-160 // only.kv_blocksize)
    else:
        (_, (*_, of_queries, _)), (_, (*_, of_keys, _)) = built
        # Two warpgroups: 64 queries each in the kernel for queries, one for dV and one for dK in that for keys.
        assert only.num_warps == 4 * backward_wide.BACKWARD_CONSUMERS
        assert of_queries.shape[1] == -(-160 // (2 * only.q_blocksize))
        assert of_keys.shape[1] == -(-160 // only.kv_blocksize)


def test_explain_prints_what_runs():
    x = jax.ShapeDtypeStruct((1, 256, 4, 128), jnp.bfloat16)
    asked = FwdParams(q_blocksize=10_000, kv_blocksize=10_000, num_warps=8)
    chosen = explain("flash_attention", x, x, x, fwd_params=asked, device="nvidia-h200", platform="pallas").chosen
    entry = next(e for e in kernel_registry.list_implementations("flash_attention") if e.platform.value == "pallas")
    assert entry.name == "flash-sm90"
    assert (chosen.params.q_blocksize, chosen.params.kv_blocksize, chosen.params.num_warps) == (128, 160, 8)
