"""Triton's grouped matmul and mean pooling where there is no GPU: compiled for the chips we know."""

import re

import jax
import jax.numpy as jnp
import pytest
from triton_launches import PICKED_WITH, Launch, kept_compilations, resources, triton

from ejkernel import Platform, explain, grouped_matmul, mean_pooling
from ejkernel.callib.chips import CHIPS
from ejkernel.contracts.device import describe
from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels._triton import grouped_matmul as grouped
from ejkernel.kernels._triton import mean_pooling as pooling
from ejkernel.kernels._triton.call import interpreting
from ejkernel.ops.grouped_matmul import GroupedSpec
from ejkernel.ops.mean_pooling import MeanPoolingSpec

if interpreting():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

H200, A100, B200, MI300X, L4 = "nvidia-h200", "nvidia-a100", "nvidia-b200", "amd-mi300x", "nvidia-l4"
GROUPS, INNER, COLUMNS = 8, 2048, 1408


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def launched(module, kernel, shapes, spec, chip, fwd=None, bwd=None):
    """What a forward and a backward that wants every gradient launch, by default with default parameters."""
    device, made = describe(chip), []

    def recorded(*args, **kwargs):
        made.append(Launch(*args, **kwargs))
        return [jnp.zeros(like.shape, like.dtype) for like in args[3]]

    fwd = fwd or kernel.defaults(shapes, spec, device, "forward")
    bwd = bwd or kernel.defaults(shapes, spec, device, "backward")
    original, module.call = module.call, recorded
    try:
        out, _ = jax.eval_shape(lambda x: module.forward(x, spec, fwd, device=device), shapes)
        jax.eval_shape(lambda x, o: module.backward(x, spec, bwd, o, None, o, None, device=device), shapes, out)
    finally:
        module.call = original
    return made


def of_groups(chip, rows, dtype="bfloat16", result=None, *, transpose=False, k=INNER, n=COLUMNS, dense=False, **params):
    """Launches of a product with so many rows a group."""
    matrix = (n, k) if transpose else (k, n)
    if dense:
        shapes = {"a": array(2, GROUPS, rows, k, dtype=dtype), "b": array(2, GROUPS, *matrix, dtype=dtype)}
    else:
        shapes = {
            "a": array(1, GROUPS * rows, k, dtype=dtype),
            "b": array(1, GROUPS, *matrix, dtype=dtype),
            "bounds": array(1, GROUPS + 1, dtype="int32"),
        }
    spec = GroupedSpec(transpose, jnp.dtype(result or dtype), jnp.dtype("float32"))
    return launched(grouped, grouped.TritonGroupedMatmul, shapes, spec, chip, **params)


def of_means(chip, form, dtype="bfloat16", features=1024):
    """Launches of a mean."""
    if form == "packed":
        shapes = {"inputs": array(1, 2**16, features, dtype=dtype), "cu_seqlens": array(1, 17, dtype="int32")}
    else:
        shapes = {"inputs": array(4, 2**15, features, dtype=dtype)}
        shapes |= {"mask": array(4, 2**15, dtype="bool")} if form == "masked" else {}
    spec = MeanPoolingSpec(packed=form == "packed")
    return launched(pooling, pooling.TritonMeanPooling, shapes, spec, chip)


def too_much(chip, launches):
    """What spills, or asks for more shared memory than a block may have."""
    kept_compilations()
    assert launches
    found = []
    for launch in launches:
        spilled, shared = resources(launch.compiled(CHIPS[chip]))
        spilled *= triton.__version__.startswith(PICKED_WITH)
        if spilled or shared > CHIPS[chip].shared_memory_per_block:
            found.append(
                f"{launch.kernel.__name__} {launch.constants}: {spilled} spilled, {shared} bytes of shared memory"
            )
    return found


@pytest.mark.compiled
def test_a_product_fits_a_chip():
    assert too_much(H200, of_groups(H200, 256)) == []


@pytest.mark.compiled
def test_a_mean_fits_a_chip():
    assert too_much(H200, of_means(H200, "packed")) == []


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("rows", [4, 32, 64, 256])
@pytest.mark.parametrize(
    ("dtype", "result"), [("bfloat16", None), ("float16", None), ("float32", None), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("chip", [H200, A100, B200, MI300X, L4])
def test_default_tiles_fit_the_chip(chip, dtype, result, rows):
    launches = [x for transpose in (False, True) for x in of_groups(chip, rows, dtype, result, transpose=transpose)]
    launches += of_groups(chip, rows, dtype, result, dense=True)
    # Lengths that nothing divides: every load is masked, and of one number.
    launches += of_groups(chip, rows, dtype, result, k=1001, n=1003)
    assert too_much(chip, launches) == []


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("form", ["plain", "masked", "packed"])
@pytest.mark.parametrize("chip", [H200, A100, B200, MI300X, L4])
def test_means_fit_the_chip(chip, form):
    launches = [
        x for dtype in ("bfloat16", "float32") for n in (64, 1024, 1001) for x in of_means(chip, form, dtype, n)
    ]
    assert too_much(chip, launches) == []


@pytest.mark.compiled
def test_large_groups_are_multiplied_by_wgmma_from_wide_copies():
    kept_compilations()
    (forward, *_) = of_groups(H200, 256)
    text = forward.compiled(CHIPS[H200]).asm["ptx"]
    assert "wgmma.mma_async" in text
    assert set(re.findall(r"cp\.async\.c\w\.[\w.:]+ \[[^\]]*\], \[[^\]]*\], (0x\w+)", text)) == {"0x10"}


@pytest.mark.compiled
def test_offsets_that_grow_with_an_array_have_64_bits():
    """No offset of 32 bits was made from a product with the rows, the groups or a first row."""
    kept_compilations()
    for launch in (*of_groups(H200, 256), *of_means(H200, "packed")):
        text = launch.compiled(CHIPS[H200]).asm["ttir"]
        whole = re.findall(
            r"%\w+ = tt\.addptr %(?:x|left|right|out|inputs|partial|dout)\w*, %[\w#]+ : !tt\.ptr<\w+>, (i\d+)", text
        )
        assert "i64" in whole or not whole, launch.kernel.__name__


@pytest.mark.parametrize("sizes", [(None,) * 5, (1, 5, 3, 4, 7), (1000, 100, 2**20, 64, 30)], ids=str)
@pytest.mark.parametrize("chip", [H200, MI300X])
def test_kernels_are_launched_with_the_effective_parameters(chip, sizes):
    params = dict(zip(grouped.READ, sizes, strict=True))
    device = describe(chip)
    rows, *_, sums = of_groups(chip, 256, fwd=FwdParams(**params), bwd=BwdParams(**params))
    shapes = {"a": array(1, GROUPS * 256, INNER), "b": array(1, GROUPS, INNER, COLUMNS), "bounds": array(1, 9)}
    spec = GroupedSpec(False, jnp.dtype("bfloat16"), jnp.dtype("float32"))
    for launch, given, side in ((rows, FwdParams(**params), 16), (sums, BwdParams(**params), 64)):
        used = grouped.effective(shapes, spec, given, device)
        tile = (launch.constants.bm, launch.constants.bn, launch.constants.bk)
        assert tile == (max(side, used.blocksize_m), used.blocksize_n, used.blocksize_k)
        assert launch.options == {"num_warps": used.num_warps, "num_stages": used.num_stages}
        assert grouped.effective(shapes, spec, used, device) == used
        room = CHIPS[chip].shared_memory_per_block
        assert (tile[0] + tile[1]) * tile[2] * 2 * used.num_stages <= room


def test_tiles_follow_the_rows_of_a_group():
    heights = {rows: of_groups(H200, rows)[0].constants.bm for rows in (4, 20, 64, 65, 4096)}
    assert heights == {4: 16, 20: 32, 64: 64, 65: 128, 4096: 128}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_is_worth_trying_is_little(direction):
    shapes = {"a": array(1, 2048, 512), "b": array(1, 8, 512, 512), "bounds": array(1, 9)}
    spec = GroupedSpec(False, jnp.dtype("bfloat16"), jnp.dtype("float32"))
    device = describe(H200)
    for kernel, given, meaning in (
        (grouped.TritonGroupedMatmul, shapes, spec),
        (pooling.TritonMeanPooling, {"inputs": array(8, 512, 512)}, MeanPoolingSpec(packed=False)),
    ):
        proposed = kernel.space(given, meaning, device, direction)
        assert 0 < len(proposed) <= 12
        assert {kernel.effective(given, meaning, x, device, direction) for x in proposed}


# What runs where nothing was measured, by chip; the batched form is a product of the vendor's library.
RAGGED, BATCHED = (array(64, 32), array(4, 32, 32), array(4, dtype="int32")), (array(1, 4, 64, 32), array(1, 4, 32, 32))
CHOSEN = [
    (grouped_matmul, RAGGED, {"nvidia-h200": "pallas", "nvidia-a100": "triton", "amd-mi300x": "triton"}),
    (grouped_matmul, BATCHED, {"nvidia-h200": "xla", "nvidia-a100": "xla"}),
    (mean_pooling, (array(4, 64, 32),), {"nvidia-h200": "triton", "nvidia-a100": "triton", "amd-mi300x": "triton"}),
]


@pytest.mark.parametrize(("function", "args", "chosen"), CHOSEN, ids=["ragged", "batched", "pooling"])
def test_what_runs_where_nothing_was_measured(function, args, chosen):
    for chip, platform in chosen.items():
        assert explain(function, *args, device=chip).chosen.platform is Platform(platform), chip


def test_a_result_in_float64_is_left_to_others(x64):
    args = (array(64, 32, dtype="float32"), array(4, 32, 32, dtype="float32"), array(4, dtype="int32"))
    told = explain(grouped_matmul, *args, preferred_element_type="float64", device=H200)
    (own,) = (c for c in told.candidates if c.platform is Platform.TRITON)
    assert own.reasons == ("a result in float64 of float32 is not supported",)
