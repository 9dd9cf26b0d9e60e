"""Block-sparse attention's forward for TPUs, in Pallas' interpreter with race detection."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.experimental.pallas import tpu as pltpu
from lanes import some
from tolerances import assert_close

from ejkernel import FwdParams, kernel_registry
from ejkernel.kernels._pallas.tpu.blocksparse_attention import forward as module
from ejkernel.kernels._pallas.tpu.blocksparse_attention import parameters
from ejkernel.ops.attention import window_intervals

pytestmark = pytest.mark.tpu

OPERATION = kernel_registry.operation("blocksparse_attention")
LEFT = np.int32(100)
IDS = np.array([[1, 2, 0, 3]]).repeat([150, 130, 120, 200], 1).astype(np.int32)


def inputs(batch=1, q_len=600, kv_len=600, heads=2, kv_heads=1, dim=64, value_dim=None, dtype="float32"):
    rng = np.random.default_rng(q_len + kv_len + dim)
    shapes = (batch, q_len, heads, dim), (batch, kv_len, kv_heads, dim), (batch, kv_len, kv_heads, value_dim or dim)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def masks(*shape, density=0.3):
    kept = np.random.default_rng(1).random(shape) < density
    kept[..., shape[-2] // 2, :] = False
    return kept


# Shapes, the mask, the side of its blocks, options, the kernel's blocks.
CALLS = {
    "one for all": ({}, masks(10, 10), 64, {"causal": True}, (128, 128)),
    "of heads": ({"batch": 2}, masks(2, 5, 5), 128, {}, (256, 256)),
    "of batch entries": ({"batch": 2, "kv_len": 500}, masks(2, 2, 10, 8), 64, {"causal": True}, (256, 256)),
    "large blocks": ({}, masks(2, 3, 3, density=0.6), 256, {"sliding_window": (100, 50)}, (256, 256)),
    "segments": ({}, masks(10, 10), 64, {"q_segment_ids": IDS, "kv_segment_ids": IDS}, (128, 256)),
    "traced window": ({}, masks(2, 10, 10), 64, {"causal": True, "sliding_window": LEFT}, (128, 256)),
    "traced window, segments": (
        {"kv_len": 500},
        masks(10, 8, density=0.7),
        64,
        {"sliding_window": (LEFT, 30), "q_segment_ids": IDS, "kv_segment_ids": IDS[:, :500]},
        (256, 128),
    ),
    "one block": ({"q_len": 70, "kv_len": 333}, np.ones((1, 1), bool), 400, {"causal": True}, (128, 128)),
    "uneven blocks": ({}, masks(13, 13), 48, {"causal": True}, (128, 256)),
    "small blocks": ({"q_len": 40, "kv_len": 200}, masks(10, 50), 4, {}, (128, 256)),
    "sinks, soft cap": (
        {"dtype": "bfloat16", "value_dim": 32},
        masks(10, 10),
        64,
        {"softmax_aux": np.array([[0.5], [2.0]], np.float32), "logits_soft_cap": 2.0},
        (512, 512),
    ),
    "blocks that are no powers of two": ({}, masks(4, 4, density=0.7), 192, {"causal": True}, (384, 384)),
}


TRACED = ("traced window", "traced window, segments")


def prepare(arrays, mask, side, options):
    """What the operation gives an implementation."""
    options = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray | np.int32) else x, options)
    arguments = OPERATION.signature.bind(*arrays, mask, side, **options)
    arguments.apply_defaults()
    arguments = OPERATION.normalise(dict(arguments.arguments))
    spec = OPERATION.bind(arguments).spec
    if arguments.get("kv_start") is not None:
        # Abstract in what selection reads.
        given, lengths = options["sliding_window"], tuple(x.shape[1] for x in arrays[:2])
        window = given if isinstance(given, tuple) else (given, given)
        found = window_intervals(window, options.get("causal", False), lengths)
        arguments |= dict(zip(("kv_start", "kv_stop"), found, strict=True))
    return OPERATION.prepare(arguments, spec), spec


def expected(arrays, mask, side, options):
    q_len, kv_len = arrays[0].shape[1], arrays[1].shape[1]
    wide = mask.reshape((1,) * (4 - mask.ndim) + mask.shape).repeat(side, 2).repeat(side, 3)[:, :, :q_len, :kv_len]
    return oracle.attention(*(np.asarray(x, np.float64) for x in arrays), attention_mask=wide, **options)


def interpreted(arrays, prepared, spec, sizes, capfd):
    import jax._src.pallas.mosaic.interpret.interpret_pallas_call as interpreter

    params = FwdParams(q_blocksize=sizes[0], kv_blocksize=sizes[1], blocksize_keys=128)
    params = parameters.effective(prepared, spec, params, None)
    assert (params.q_blocksize, params.kv_blocksize) == sizes
    found = module.forward(prepared, spec, params, interpret=pltpu.InterpretParams(detect_races=True))
    found = jax.block_until_ready(found)
    assert not interpreter.races.races_found
    printed = "".join(capfd.readouterr())
    assert "RACE" not in printed
    assert "non-zero" not in printed
    return found


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(CALLS, "of heads"))
def test_interpreted(name, capfd):
    shape, mask, side, options, sizes = CALLS[name]
    arrays = inputs(**shape)
    prepared, spec = prepare(arrays, mask, side, options)
    out, lse = interpreted(arrays, prepared, spec, sizes, capfd)
    exact, exact_lse = expected(arrays, mask, side, options)
    assert_close(out, exact, str(out.dtype), what="out")
    assert_close(lse, exact_lse, str(out.dtype), what="lse")


@pytest.mark.slow
@pytest.mark.interpreted
def test_a_traced_mask(capfd):
    shape, mask, side, options, sizes = CALLS["of batch entries"]
    arrays = inputs(**shape)
    _, spec = prepare(arrays, jax.ShapeDtypeStruct(mask.shape, bool), side, options)
    prepared = jax.jit(lambda mask: prepare(arrays, mask, side, options)[0])(mask)
    out, lse = interpreted(arrays, prepared, spec, sizes, capfd)
    exact, exact_lse = expected(arrays, mask, side, options)
    assert_close(out, exact, "float32")
    assert_close(lse, exact_lse, "float32")


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(["one for all", "large blocks", "segments", *TRACED], "large blocks"))
def test_what_no_query_sees_may_be_nan(name, capfd):
    shape, mask, side, options, sizes = CALLS[name]
    query, key, value = inputs(**shape)
    lengths = query.shape[1], key.shape[1]
    wide = mask.reshape((1,) * (4 - mask.ndim) + mask.shape).repeat(side, 2).repeat(side, 3)
    wide = wide[:, :, : lengths[0], : lengths[1]]
    seen = oracle.visible_pairs(1, 2, *lengths, attention_mask=wide, **options).any((0, 1, 2))
    assert not seen.all()
    key, value = (jnp.where(seen[:, None, None], x, jnp.nan) for x in (key, value))
    prepared, spec = prepare((query, key, value), mask, side, options)
    out, _ = interpreted((query, key, value), prepared, spec, sizes, capfd)
    exact, _ = expected((query, key, value), mask, side, options)
    assert_close(out, exact, "float32")


@pytest.mark.parametrize("lengths", [(600, 600), (16384, 16384)], ids=str)
@pytest.mark.parametrize("heads", [1, 32])
def test_a_list_of_steps_fits_scalar_memory(lengths, heads):
    blocks = [-(-length // 64) for length in lengths]
    arrays = [
        jax.ShapeDtypeStruct((1, length, 32, 64), jnp.bfloat16) for length in (lengths[0], lengths[1], lengths[1])
    ]
    mask = jax.ShapeDtypeStruct((heads, *blocks), bool)
    call = OPERATION.bind(
        {**_defaults(), **dict(zip(("query", "key", "value"), arrays, strict=True)), "sparsity_mask": mask}
    )
    start = jax.ShapeDtypeStruct((1, heads, blocks[0]), jnp.int32)
    shapes = {"query": arrays[0], "blocks": type("Blocks", (), {"start": start})}
    found = parameters.effective(shapes, call.spec, FwdParams(), None)
    assert (
        heads * (-(-lengths[0] // found.q_blocksize)) * (-(-lengths[1] // found.kv_blocksize)) <= parameters.MOST_STEPS
    )
    assert parameters.effective(shapes, call.spec, found, None) == found


def _defaults():
    names = OPERATION.signature.parameters
    return {name: None if p.default is p.empty else p.default for name, p in names.items()}
