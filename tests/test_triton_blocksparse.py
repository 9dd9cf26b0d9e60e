"""Triton's block-sparse attention where there is no GPU: compiled for the chips we know; and on a GPU, at real sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples_blocksparse_attention import example
from tolerances import assert_close
from triton_launches import PICKED_WITH, Launch, kept_compilations, resources, triton

from ejkernel import blocksparse_attention
from ejkernel.callib.chips import CHIPS
from ejkernel.contracts.device import describe
from ejkernel.kernels._triton import blocksparse_attention as kernel
from ejkernel.kernels._triton import flash_attention as flash
from ejkernel.kernels._triton.call import interpreting
from ejkernel.ops.blocksparse_attention import OPERATION

if interpreting():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

LENGTH, HEADS, KV_HEADS = 1024, 4, 2
CAUSAL = {"causal": True}
EVERYTHING = {"causal": True, "sliding_window": (100, 0), "logits_soft_cap": 30.0}


def launches(monkeypatch, chip, block, dim, dtype, statics):
    """The kernels of a call with default parameters; with a cap also segments, sinks and a mask for each head."""
    everything = "logits_soft_cap" in statics

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    blocks = -(-LENGTH // block)
    arguments = {
        "query": array(1, LENGTH, HEADS, dim),
        "key": array(1, LENGTH, KV_HEADS, dim),
        "value": array(1, LENGTH, KV_HEADS, dim),
        "sparsity_mask": array(*([HEADS] if everything else []), blocks, blocks, dtype="bool"),
        "block_size": block,
        **statics,
    }
    if everything:
        ids = array(1, LENGTH, dtype="int32")
        arguments |= {"q_segment_ids": ids, "kv_segment_ids": ids, "softmax_aux": array(HEADS, 1, dtype="float32")}
    bound = OPERATION.signature.bind(**arguments)
    bound.apply_defaults()
    call, device, made = OPERATION.bound(dict(bound.arguments))[0], describe(chip), []

    def recorded(*args, **kwargs):
        made.append(Launch(*args, **kwargs))
        return [jnp.zeros(like.shape, like.dtype) for like in args[3]]

    monkeypatch.setattr(flash, "call", recorded)
    fwd, bwd = (
        kernel.TritonBlockSparseAttention.defaults(call.shapes, call.spec, device, direction)
        for direction in ("forward", "backward")
    )
    wanted = frozenset(OPERATION.gradients) & call.shapes.keys()
    out, lse = jax.eval_shape(lambda x: kernel.forward(x, call.spec, fwd, device=device), call.shapes)
    jax.eval_shape(
        lambda x, *rest: kernel.backward(x, call.spec, bwd, *rest, wanted, device), call.shapes, out, lse, out, lse
    )
    return made


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("chip", "dim", "block", "dtype", "statics"),
    [
        *[
            (chip, dim, block, "bfloat16", statics)
            for chip, dims, blocks in (
                ("nvidia-h200", (64, 128, 256), (16, 64, 128)),
                *[(chip, (128,), (64,)) for chip in ("nvidia-a100", "nvidia-b200", "amd-mi300x")],
            )
            for dim in dims
            for block in blocks
            for statics in (CAUSAL, EVERYTHING)
        ],
        *[(chip, dim, 64, "float32", CAUSAL) for chip in ("nvidia-a100", "nvidia-h200") for dim in (64, 128)],
    ],
    ids=lambda x: ("everything" if "logits_soft_cap" in x else "causal") if isinstance(x, dict) else None,
)
def test_default_tiles_fit_the_chip(monkeypatch, chip, dim, block, dtype, statics):
    kept_compilations()
    for launch in launches(monkeypatch, chip, block, dim, dtype, statics):
        spilled, shared = resources(launch.compiled(CHIPS[chip]))
        assert shared <= CHIPS[chip].shared_memory_per_block, launch.kernel.__name__
        if triton.__version__.startswith(PICKED_WITH):
            assert spilled == 0, (launch.kernel.__name__, launch.constants.bm, launch.constants.bn, launch.options)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("statics", [{}, CAUSAL], ids=["full", "causal"])
def test_copies_of_tiles_stay_under_way(monkeypatch, statics):
    """The forward waits for the oldest tiles alone: an address that comes from a list must not empty the pipeline."""
    kept_compilations()
    forward, *_ = launches(monkeypatch, "nvidia-h200", 64, 128, "bfloat16", statics)
    program = forward.compiled(CHIPS["nvidia-h200"]).asm["ttgir"]
    loops = program.split("scf.for")[1:]
    assert len(loops) == (2 if statics else 1)
    for loop in loops:
        first_wait = loop[loop.index("ttg.async_wait") :].splitlines()[0]
        assert "num = 2" in first_wait


GPU_CASES = [
    example(
        f"{blocks}", batch=2, q_len=1000, kv_len=1100, heads=4, dim=dim, value_dim=64, blocks=blocks, mask_heads=heads,
        density=0.4, return_lse=True, **statics,
    )
    for blocks, dim, heads, statics in (
        ((64, 64), 128, 0, {"causal": True}),
        ((128, 128), 64, 1, {"sliding_window": (300, 0)}),
        ((128, 64), 128, 2, {"causal": True, "segments": True, "sinks": 2}),
        ((64, 256), 256, 1, {"logits_soft_cap": 5.0}),
        ((32, 16), 64, 0, {"causal": True}),
        ((16, 32), 128, 2, {}),
        ((100, 96), 64, 1, {"causal": True}),
    )
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_values_and_gradients(case, dtype, traced):
    arrays = case.arrays(dtype)
    mask = arrays.pop("sparsity_mask")
    mask = mask if traced else np.asarray(mask)

    @jax.jit
    def both(floats, dout, *given):
        others = {name: x for name, x in arrays.items() if name not in floats}

        def run(floats):
            (own,) = given or (mask,)
            return case.run({**others, **floats, "sparsity_mask": own}, platform="triton")

        (out, lse), pull = jax.vjp(run, floats)
        return out, lse, pull((dout, jnp.ones_like(lse)))[0]

    floats = case.floats(arrays)
    dout = jnp.asarray(np.random.default_rng(1).standard_normal((2, 1000, 4, 64)), dtype)
    first, again = (both(floats, dout, *([mask] if traced else [])) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    out, lse, grads = first
    cotangents = (dout, jnp.ones_like(lse))
    (expected, expected_lse), expected_grads = case.expected({**arrays, "sparsity_mask": mask}, cotangents)
    assert_close(out, expected, dtype, what="out")
    assert_close(lse, expected_lse, dtype, what="lse")
    for name, grad in grads.items():
        assert_close(grad, expected_grads[name], dtype, gradient=True, what=name)


@pytest.mark.gpu
def test_one_kernel_serves_masks_with_values_and_traced_ones():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 2048, 4, 128)), jnp.bfloat16) for _ in range(3))
    mask = rng.random((32, 32)) < 0.2
    run = jax.jit(lambda mask: blocksparse_attention(q, k, v, mask, 64, causal=True, platform="triton"))
    expected = blocksparse_attention(q, k, v, mask, 64, causal=True, platform="triton")
    np.testing.assert_array_equal(run(jnp.asarray(mask)), expected)
