"""Triton's recurrent layers where there is no GPU: planned and compiled for the chips we know."""

import jax
import jax.numpy as jnp
import pytest
from conftest import tries
from hypothesis import given
from hypothesis import strategies as st
from triton_launches import PICKED_WITH, Launch, kept_compilations, resources, triton

from ejkernel import Platform, explain
from ejkernel import recurrent as operation
from ejkernel.callib.chips import CHIPS
from ejkernel.contracts.device import describe
from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels._triton import recurrent
from ejkernel.kernels._triton.call import interpreting
from ejkernel.kernels.common.recurrent import GATES
from ejkernel.ops.recurrent import RecurrentSpec

if interpreting():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

H200, A100, B200, MI300X, L4 = "nvidia-h200", "nvidia-a100", "nvidia-b200", "amd-mi300x", "nvidia-l4"
GPUS = sorted(
    name for name, chip in CHIPS.items() if chip.kind == "gpu" and (chip.capability >= 80 or not chip.capability)
)
KERNEL = recurrent.TritonRecurrent
DIRECTIONS = {"forward": FwdParams, "backward": BwdParams}


def shapes_of(cell, dtype, batch, size, steps=512, features=64, lengths=False):
    gates = GATES[cell]
    made = {
        "inputs": jax.ShapeDtypeStruct((batch, steps, features), dtype),
        "weights": {
            "weight_ih": jax.ShapeDtypeStruct((1, gates * size, features), dtype),
            "weight_hh": jax.ShapeDtypeStruct((1, gates * size, size), dtype),
        },
    }
    return made | ({"lengths": jax.ShapeDtypeStruct((batch,), jnp.int32)} if lengths else {})


def launched(chip, shapes, cell, activation="tanh", from_end=False, both=False):
    """What a forward and a backward that wants every gradient launch with default parameters."""
    device, made = describe(chip), []
    spec = RecurrentSpec(cell, activation, (False, True) if both else (from_end,))
    if both:
        weights = shapes["weights"]
        shapes = {**shapes, "weights": weights | {f"{name}_reverse": w for name, w in weights.items()}}
    fwd, bwd = (KERNEL.defaults(shapes, spec, device, direction) for direction in DIRECTIONS)

    def recorded(*args, **kwargs):
        made.append((args, kwargs))
        return [jnp.zeros(like.shape, like.dtype) for like in args[3]]

    original, recurrent.call = recurrent.call, recorded
    wanted = frozenset({"inputs", "hidden", "weights"})
    shapes = shapes | {"hidden": states(shapes, cell, len(spec.directions))}
    try:
        out, kept = jax.eval_shape(lambda x: recurrent.forward(x, spec, fwd, device=device), shapes)
        jax.eval_shape(
            lambda x, o, k: recurrent.backward(x, spec, bwd, o, k, o, None, wanted, device=device), shapes, out, kept
        )
    finally:
        recurrent.call = original
    return [(Launch(*args, **kwargs), kwargs["programs"], args[3]) for args, kwargs in made]


def states(shapes, cell, directions):
    inputs, size = shapes["inputs"], shapes["weights"]["weight_hh"].shape[2]
    state = jax.ShapeDtypeStruct((inputs.shape[0], directions, size), inputs.dtype)
    return (state,) * (2 if cell == "lstm" else 1)


# --- the plan ------------------------------------------------------------------------------------------------------------

CALLS = st.tuples(
    st.sampled_from(list(GATES)),
    st.sampled_from(["bfloat16", "float32"]),
    st.integers(1, 700),
    st.integers(1, 3000),
)
GIVEN = st.fixed_dictionaries(
    {},
    optional={
        "blocksize_m": st.integers(1, 1000),
        "blocksize_n": st.integers(1, 5000),
        "blocksize_k": st.integers(1, 1000),
        "num_warps": st.integers(1, 64),
        "num_stages": st.integers(1, 20),
    },
)


def check_plan(problem, params):
    """All programs run at once, and each unit, entry of the batch and number of a product is somebody's, once."""
    plan = problem.plan(params)
    assert 1 <= plan.slices * plan.groups <= problem.most
    assert plan.slices * plan.units == plan.hidden >= problem.size
    assert plan.hidden % recurrent.HIDDEN_STEP == 0
    assert 1 <= plan.groups <= -(-problem.batch // plan.rows)
    assert plan.parts * plan.chunk * plan.chunks == problem.inner_planes * plan.hidden
    assert 1 <= plan.stages <= plan.chunks
    for side in (plan.units, plan.rows, plan.chunk):
        assert side >= recurrent.SMALLEST_SIDE
        assert side & (side - 1) == 0
    if plan.resident:
        # A few more where no larger tile divides the length.
        assert plan.chunks <= recurrent.MOST_PIECES or (plan.chunks % 2 and plan.chunks <= 2 * recurrent.MOST_PIECES)
    elif plan.chunk > recurrent.SMALLEST_SIDE:
        height = problem.planes * plan.units
        assert (height + plan.rows) * plan.chunk * problem.itemsize * plan.stages <= problem.room


@pytest.mark.parametrize("chip", [*GPUS, "gpu"])
@given(CALLS, GIVEN)
@tries(100, short=8)
def test_every_chip_holds_all_programs_of_a_launch(chip, drawn, given_params):
    """Also of one that is not in the table."""
    device = describe(chip) if chip in CHIPS else describe("nvidia-h200")
    if chip not in CHIPS:
        from dataclasses import replace

        device = replace(device, name="gpu-of-tomorrow")
        assert recurrent.resident_programs(device) == recurrent.FEWEST_CORES
    cell, dtype, batch, size = drawn
    shapes, spec = shapes_of(cell, dtype, batch, size), RecurrentSpec(cell, "tanh", (False,))
    for direction, made in DIRECTIONS.items():
        used = recurrent.effective(shapes, spec, made(**given_params), device)
        assert recurrent.effective(shapes, spec, used, device) == used
        check_plan(recurrent._problem(shapes, spec, device, direction), used)


def test_as_many_programs_as_the_smallest_chip_has():
    assert recurrent.FEWEST_CORES <= min(CHIPS[chip].sm_count for chip in GPUS)
    for chip in GPUS:
        assert recurrent.resident_programs(describe(chip)) == CHIPS[chip].sm_count


def test_a_part_of_a_chip_has_its_own_multiprocessors(monkeypatch):
    """MIG: the device has the chip's name."""

    class Part:
        core_count = 16

    monkeypatch.setattr(recurrent, "is_present", lambda _: True)
    monkeypatch.setattr(jax, "local_devices", lambda: [Part(), Part()])
    assert recurrent.resident_programs(describe(H200)) == 16


@pytest.mark.parametrize("direction", list(DIRECTIONS))
def test_what_is_worth_trying_is_little(direction):
    spec, device = RecurrentSpec("lstm", "tanh", (False,)), describe(H200)
    for batch, size in ((64, 1024), (3, 100)):
        shapes = shapes_of("lstm", "bfloat16", batch, size)
        proposed = KERNEL.space(shapes, spec, device, direction)
        assert 0 < len(proposed) <= 12
        assert {KERNEL.effective(shapes, spec, x, device, direction) for x in proposed} == set(proposed)
        assert KERNEL.defaults(shapes, spec, device, direction) == proposed[0]


def test_launches_have_no_more_programs_than_run_at_once():
    """The grid, not the plan; and directions that could wait for each other follow one another."""
    for chip in (H200, L4, MI300X):
        for batch, size in ((700, 1024), (3, 2048), (1, 7)):
            made = launched(chip, shapes_of("lstm", "bfloat16", batch, size), "lstm", both=True)
            assert len(made) == 4
            for _, programs, _ in made:
                assert programs <= CHIPS[chip].sm_count


# --- compiled --------------------------------------------------------------------------------------------------------------

# Bytes of a thread. Of some small kernels ptxas stops at 48 registers and spills two. Where weights fill the registers, it
# spills more of one kernel in one run than in the next.
OF_ITS_OWN, MOST_SPILLED = 16, 96


def too_much(chip, launches, most=OF_ITS_OWN):
    """What spills more, or asks for more shared memory than a block may have."""
    kept_compilations()
    found = []
    for launch, _, _ in launches:
        spilled, shared = resources(launch.compiled(CHIPS[chip]))
        spilled *= triton.__version__.startswith(PICKED_WITH)
        if spilled > most or shared > CHIPS[chip].shared_memory_per_block:
            found.append(f"{launch.kernel.__name__} {launch.constants}: {spilled} spilled, {shared} bytes")
    return found


@pytest.mark.compiled
def test_a_layer_fits_a_chip():
    assert too_much(H200, launched(H200, shapes_of("lstm", "bfloat16", 16, 512, lengths=True), "lstm")) == []


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("cell", list(GATES))
@pytest.mark.parametrize("chip", [H200, A100, B200, MI300X, L4])
def test_default_tiles_fit_the_chip(chip, cell, dtype):
    for batch, size in ((16, 512), (3, 100)):
        launches = launched(chip, shapes_of(cell, dtype, batch, size), cell)
        launches += launched(chip, shapes_of(cell, dtype, batch, size, lengths=True), cell, from_end=True)
        if cell == "rnn":
            launches += launched(chip, shapes_of(cell, dtype, batch, size), cell, activation="relu")
        assert too_much(chip, launches) == []


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("cell", list(GATES))
@pytest.mark.parametrize("chip", [H200, A100, B200, MI300X])
def test_large_layers_fit_the_chip(chip, cell):
    launches = launched(chip, shapes_of(cell, "bfloat16", 64, 1024, lengths=True), cell)
    assert too_much(chip, launches, MOST_SPILLED) == []


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("from_end", [False, True])
def test_one_step_and_one_sequence_compile(from_end):
    """Scalars of 1 are constants to the compiler."""
    for cell in GATES:
        shapes = shapes_of(cell, "bfloat16", 1, 100, steps=1, lengths=True)
        assert too_much(H200, launched(H200, shapes, cell, from_end=from_end)) == []


@pytest.mark.compiled
def test_programs_meet_once_a_step_and_a_barrier_that_nobody_reaches_traps():
    kept_compilations()
    for launch, _, _ in launched(H200, shapes_of("gru", "bfloat16", 16, 256), "gru"):
        text = launch.compiled(CHIPS[H200]).asm["ptx"]
        forward = launch.kernel.__name__.startswith("forward")
        # Forward once more, before the first step.
        assert text.count("red.release.gpu.global.add.u32") == (2 if forward else 1)
        assert text.count("ld.acquire.gpu.global.u32") == (2 if forward else 1)
        assert text.count("trap;") >= (2 if forward else 1)
        # What others wrote never comes from the first-level cache.
        assert ".cg" in text


# --- what runs where nothing was measured ------------------------------------------------------------------------------------


def test_amd_s_gpus_run_it_where_it_is_pinned():
    pytest.importorskip("jax_triton", reason="jax-triton is not installed")
    arrays = {
        "inputs": jax.ShapeDtypeStruct((4, 8, 16), jnp.bfloat16),
        "weights": {
            "weight_ih": jax.ShapeDtypeStruct((64, 16), jnp.bfloat16),
            "weight_hh": jax.ShapeDtypeStruct((64, 16), jnp.bfloat16),
        },
    }
    assert explain(operation, **arrays, device=MI300X).chosen.platform is Platform.XLA
    assert explain(operation, **arrays, device=MI300X, platform="triton").chosen.platform is Platform.TRITON
    callable_activation = explain(operation, **rnn(arrays), cell_type="rnn", activation=jax.nn.gelu, device=H200)
    assert callable_activation.chosen.platform is Platform.XLA


def rnn(arrays):
    return {**arrays, "weights": {n: jax.ShapeDtypeStruct((16, 16), jnp.bfloat16) for n in arrays["weights"]}}
