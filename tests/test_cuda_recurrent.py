"""CUDA's recurrent kernels without a GPU: they compile, a chip holds every plan, and packed weights give the product."""

import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tries
from cuda_compilers import H200, NVIDIA, needs_capability
from hypothesis import given
from hypothesis import strategies as st

from ejkernel import BwdParams, FwdParams, UnsupportedError
from ejkernel.contracts.device import describe
from ejkernel.kernels._cuda import build, call, recurrent_plan, toolchain
from ejkernel.kernels._cuda import recurrent as kernel
from ejkernel.kernels._cuda.call import Capacity
from ejkernel.kernels._cuda.recurrent_plan import BLOCK_BATCH, BLOCK_UNITS, WARPS, packed, plan
from ejkernel.kernels.common.recurrent import GATES, PLANES

slow = pytest.mark.slow


@functools.cache
def cuobjdump():
    beside = toolchain.device_compiler()
    places = [Path(beside.path).parent] if isinstance(beside, toolchain.Nvcc) else []
    try:
        import triton

        places.append(Path(triton.__file__).parent / "backends" / "nvidia" / "bin")
    except ImportError:
        pass
    return next((found for place in places if (found := shutil.which("cuobjdump", path=str(place)))), None)


def compiled(chip, cell, direction, dtype, batch, size, activation="tanh", lengths=None):
    """``(registers, bytes spilled)`` of a loop's kernel as a call on the chip has it."""
    device = describe(chip)
    needs_capability(device.capability)
    if cuobjdump() is None:
        pytest.skip("there is no cuobjdump: neither of a toolkit nor of Triton")
    problem = kernel._problem(cell, direction, -(-size // kernel.ALIGNED) * kernel.ALIGNED, batch, dtype_size(dtype))
    chosen = plan(problem, call.capacity(device))
    macros = {**chosen.macros(), "ELEMENT": kernel.ELEMENTS[dtype], "CELL": kernel.CELLS[cell, activation]}
    macros["GATES"] = problem.gates
    if direction == "backward":
        macros |= {"PLANES": PLANES[cell], "LENGTH": problem.length}
    code = build.cubin(f"recurrent_{direction}.cu", call.architecture(device), tuple(sorted(macros.items())))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [cuobjdump(), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text).groups())
    return registers, stack + local


def dtype_size(dtype):
    return jnp.dtype(dtype).itemsize


@pytest.fixture
def between_runs(monkeypatch):
    """What was built stays between runs of the suite."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "ejkernel"))


@pytest.mark.compiled
def test_a_loop_compiles_and_spills_nothing(between_runs):
    registers, spilled = compiled(H200, "lstm", "forward", "bfloat16", 64, 1024)
    assert spilled == 0
    assert registers > 200  # most hold weights


@pytest.mark.compiled
@pytest.mark.parametrize("chip", ["nvidia-a100", "nvidia-b200"])
def test_a_loop_compiles_for_other_architectures(between_runs, chip):
    assert compiled(chip, "lstm", "forward", "bfloat16", 3, 100)[1] == 0


# Bytes of a thread, where weights fill the registers: how many the compiler needs itself differs from version to version.
MOST_SPILLED = {"bfloat16": 256, "float16": 256, "float32": 640}


@slow
@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("cell", list(GATES))
@pytest.mark.parametrize("chip", ["nvidia-a100", H200, "nvidia-b200"])
def test_loops_compile_for_the_chips(between_runs, chip, cell, dtype):
    for direction in ("forward", "backward"):
        assert compiled(chip, cell, direction, dtype, 3, 100)[1] == 0
        assert compiled(chip, cell, direction, dtype, 64, 1024)[1] <= MOST_SPILLED[dtype]


@slow
@pytest.mark.compiled
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("chip", ["nvidia-a100", H200, "nvidia-b200"])
def test_loops_that_stream_weights_compile(between_runs, chip, direction):
    assert compiled(chip, "lstm", direction, "bfloat16", 256, 2048)[1] <= MOST_SPILLED["bfloat16"]
    assert compiled(chip, "rnn", direction, "bfloat16", 3, 100, "relu")[1] == 0


# --- the plan ------------------------------------------------------------------------------------------------------------


def problems():
    return st.builds(
        lambda cell, direction, eighths, batch, itemsize: kernel._problem(
            cell, direction, 8 * eighths, batch, itemsize
        ),
        st.sampled_from(list(GATES)),
        st.sampled_from(["forward", "backward"]),
        st.integers(1, 320),
        st.integers(1, 600) | st.sampled_from([1, 8, 9, 64, 4096]),
        st.sampled_from([2, 4]),
    )


def owned_units(chosen):
    """How often a unit is computed, over all CTAs of a tile, and where within a CTA each is, as ``Item`` in recurrent.cuh has it."""
    number = np.arange(chosen.unit_blocks * chosen.batch_blocks * 64)
    lane, half = number % 32, number // 32 % 2
    block, unit_block = number // 64 % chosen.batch_blocks, number // 64 // chosen.batch_blocks
    unit = unit_block * BLOCK_UNITS + half * 8 + lane // 4
    entry = block * BLOCK_BATCH + lane % 4 * 2
    # An item is two entries.
    return np.concatenate([unit, unit]), np.concatenate([entry, entry + 1])


def check_plan(chosen, capacity):
    problem = chosen.problem
    rows, items = chosen.unit_blocks * problem.gates, chosen.unit_blocks * chosen.batch_blocks * 64
    threads, fragment = 32 * WARPS, 1024
    # All CTAs run at once, one on a multiprocessor.
    assert 1 <= chosen.grid <= capacity.multiprocessors
    # What the kernels address behind each other in shared memory.
    weights = WARPS * chosen.shared * rows * fragment
    partial = WARPS * rows * chosen.batch_blocks * 64 * 8
    states = chosen.passes * 2 * -(-items // threads) * threads * 8
    assert chosen.shared_memory == weights + partial + states <= capacity.shared_memory
    # Weights cover the length, and are in one place each.
    numbers = WARPS * 4 * (16 // problem.itemsize)
    assert min(chosen.kept, chosen.shared, chosen.streamed) >= 0
    assert (chosen.pieces - 1) * numbers < problem.length <= chosen.pieces * numbers
    assert 1 <= chosen.ahead <= chosen.pieces
    assert chosen.kept * rows * 8 + 4 * chosen.batch_blocks * rows < 255
    # Every pair of a unit and an entry of the batch has one owner.
    units, entries = owned_units(chosen)
    tall, wide = chosen.unit_blocks * BLOCK_UNITS, chosen.batch_blocks * BLOCK_BATCH
    assert len(set(zip(units.tolist(), entries.tolist(), strict=True))) == tall * wide == 2 * items
    assert (units.min(), units.max(), entries.min(), entries.max()) == (0, tall - 1, 0, wide - 1)
    ctas = np.arange(chosen.grid)
    group, tile = ctas % chosen.groups, ctas // chosen.groups
    first_units = np.unique(group) * tall
    begins = ((np.unique(tile) * chosen.passes)[:, None] + np.arange(chosen.passes)).ravel() * wide
    unit_owners = np.bincount((first_units[:, None] + np.arange(tall)).ravel())
    entry_owners = np.bincount((begins[:, None] + np.arange(wide)).ravel())
    assert len(unit_owners) >= problem.hidden
    assert len(entry_owners) >= problem.batch
    assert (unit_owners == 1).all()
    assert (entry_owners == 1).all()
    assert len({*zip(group.tolist(), tile.tolist(), strict=True)}) == chosen.groups * chosen.tiles
    # No CTA has nothing but padding: others would wait for it at no use.
    assert first_units.max() < problem.hidden
    assert (chosen.tiles - 1) * chosen.passes * wide < problem.batch


def planned(problem, capacity, **asked):
    """None where no division fits, which is only where a chip does not hold the states, or sums of one unit block too many."""
    try:
        return plan(problem, capacity, **asked)
    except UnsupportedError:
        # What even tiles of half the size would need.
        states = problem.hidden * problem.batch * 8
        sums = WARPS * problem.gates * 512 * -(-problem.hidden // BLOCK_UNITS)
        assert 4 * (states + sums) > capacity.multiprocessors * capacity.shared_memory
        return None


@pytest.mark.parametrize("chip", NVIDIA)
@given(problems(), st.none() | st.integers(1, 256), st.none() | st.integers(1, 64))
@tries(200, short=20)
def test_every_chip_holds_all_programs_of_a_plan(chip, problem, units, entries):
    capacity = call.capacity(describe(chip))
    if (chosen := planned(problem, capacity, units=units, entries=entries)) is not None:
        check_plan(chosen, capacity)


@given(problems(), st.integers(1, 160), st.integers(99, 227))
@tries(400, short=40)
def test_plans_for_any_part_of_a_chip(problem, multiprocessors, kib):
    capacity = Capacity(multiprocessors, kib * 1024)
    if (chosen := planned(problem, capacity)) is not None:
        check_plan(chosen, capacity)


@pytest.mark.parametrize("size", [100, 1024, 3000])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_parameters_are_those_of_the_plan(direction, size):
    shapes = {
        "inputs": jax.ShapeDtypeStruct((48, 10, size), jnp.bfloat16),
        "weights": {"weight_hh": jax.ShapeDtypeStruct((1, 4 * size, size), jnp.bfloat16)},
    }
    spec = kernel_spec("lstm")
    made = {"forward": FwdParams, "backward": BwdParams}[direction]
    own = kernel.CudaRecurrent
    for chip in NVIDIA:
        device = describe(chip)
        proposed = own.space(shapes, spec, device, direction)
        assert 0 < len(proposed) <= 6
        for params in (own.defaults(shapes, spec, device, direction), *proposed, made(blocksize_m=7, blocksize_n=1)):
            used = own.effective(shapes, spec, params, device, direction)
            assert own.effective(shapes, spec, used, device, direction) == used
            assert used.blocksize_m in (8, 16, 32)
            assert used.blocksize_n in (16, 32, 64, 128, 256)


def kernel_spec(cell, activation="tanh", directions=(False,)):
    from ejkernel.ops.recurrent import RecurrentSpec

    return RecurrentSpec(cell, activation, directions)


# --- packed weights --------------------------------------------------------------------------------------------------------


def tensor_core(a, b, each):
    """``mma.sync`` of a row-major 16 × K and a column-major K × 8 fragment, both as lanes hold them: PTX, "mma.m16n8k16" and k8.

    ``a`` is ``[..., lane, 4 registers, numbers]``, ``b`` ``[..., lane, 2 registers, numbers]``; the result is ``[..., 16, 8]``.
    """
    lane = np.arange(32)
    of_a = np.zeros((*a.shape[:-3], 16, 8 * each))
    of_b = np.zeros((*b.shape[:-3], 8 * each, 8))
    for number in range(each):
        for register in range(4):
            k = lane % 4 * each + number + register // 2 * 4 * each
            of_a[..., lane // 4 + register % 2 * 8, k] = a[..., lane, register, number]
        for register in range(2):
            of_b[..., lane % 4 * each + number + register * 4 * each, lane // 4] = b[..., lane, register, number]
    return of_a @ of_b


def product(weights, rows, chosen):
    """What ``multiply`` in recurrent.cuh adds up for a batch block of 8: ``[groups, unit blocks, gates, 16, 8]``."""
    problem = chosen.problem
    each = 4 // problem.itemsize
    chunk, piece_size, lane = 4 * each, 16 * each, np.arange(32)
    flat = np.asarray(packed(weights, chosen)).astype(np.float64).reshape(-1, 4, each)  # uint4s
    sums = np.zeros((chosen.groups, chosen.unit_blocks, problem.gates, 16, 8))
    row_blocks = chosen.unit_blocks * problem.gates
    for group in range(chosen.groups):
        for warp in range(WARPS):
            own = (group * WARPS + warp) * chosen.pieces * row_blocks * 64
            for piece in range(chosen.pieces):
                # Rows::load: 16 bytes of an entry of the batch; past the length zeros.
                at = (piece * WARPS + warp) * piece_size + lane % 4 * chunk
                padded = np.concatenate([rows, np.zeros((8, WARPS * chosen.pieces * piece_size))], axis=1)
                row = padded[(lane // 4)[:, None], at[:, None] + np.arange(chunk)].reshape(32, 4, each)
                for unit_block in range(chosen.unit_blocks):
                    for gate in range(problem.gates):
                        r = unit_block * problem.gates + gate
                        for which in range(2):
                            a = flat[own + ((piece * row_blocks + r) * 2 + which) * 32 + lane]
                            b = row[:, 2 * which : 2 * which + 2]
                            sums[group, unit_block, gate] += tensor_core(a, b, each)
    return sums


PACKED = [
    ("lstm", "forward", 40, "float32"),
    ("gru", "forward", 136, "bfloat16"),
    ("lstm", "backward", 24, "bfloat16"),
    ("rnn", "backward", 72, "float32"),
]


@pytest.mark.parametrize(("cell", "direction", "size", "dtype"), PACKED)
@pytest.mark.parametrize("units", [16, 32])
def test_packed_weights_give_the_product(cell, direction, size, dtype, units):
    """As the tensor cores would, from where lanes read them; small integers, so that every sum is exact."""
    problem = kernel._problem(cell, direction, size, 8, dtype_size(dtype))
    chosen = plan(problem, Capacity(132, 227 * 1024), units=units)
    assert chosen.unit_blocks == units // BLOCK_UNITS
    rng = np.random.default_rng(0)
    weights = rng.integers(-9, 10, (problem.gates, problem.hidden, problem.length))
    rows = rng.integers(-9, 10, (8, problem.length))
    found = product(jnp.asarray(weights, dtype), rows, chosen)
    # To [gates, units, entries].
    found = found.transpose(2, 0, 1, 3, 4).reshape(problem.gates, -1, 8)
    np.testing.assert_array_equal(found[:, : problem.hidden], weights @ rows.T)
    assert not found[:, problem.hidden :].any()


@pytest.mark.parametrize(("cell", "direction", "size", "dtype"), PACKED)
def test_each_weight_is_packed_once(cell, direction, size, dtype):
    problem = kernel._problem(cell, direction, size, 8, dtype_size(dtype))
    chosen = plan(problem, Capacity(132, 227 * 1024))
    count = problem.gates * problem.hidden * problem.length
    # The dtype's numbers need not be exact: their order is asked for.
    weights = jnp.arange(1, count + 1, dtype=jnp.float32).reshape(problem.gates, problem.hidden, problem.length)
    found = np.asarray(packed(weights, chosen))
    assert found.size == chosen.groups * WARPS * chosen.pieces * chosen.unit_blocks * problem.gates * 256 * (
        4 // problem.itemsize
    )
    np.testing.assert_array_equal(np.sort(found[found != 0]), np.arange(1, count + 1))


def test_nans_keep_the_host_s_bits():
    """The kernels round float32 in integers: of the hardware's NaN, all of whose bits are set, that would make zeros."""
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFFC00001, 0x3F800000], np.uint32)
    kept_bits = np.asarray(recurrent_plan.host_nans(jnp.asarray(bits.view(np.float32)))).view(np.uint32)
    rounded = ((kept_bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    np.testing.assert_array_equal(np.isnan(rounded), [True] * 4 + [False])
