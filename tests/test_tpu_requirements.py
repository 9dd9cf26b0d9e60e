"""What the TPU kernels need of Pallas is listed whole; what is missing is a reason, not an exception."""

import ast
from pathlib import Path

import jax.numpy as jnp
import pytest
from test_mosaic_requirements import aliases, dotted

import ejkernel
from ejkernel.callib import CHIPS
from ejkernel.contracts.device import describe
from ejkernel.kernels._pallas.tpu import requirements
from ejkernel.kernels._pallas.tpu.generations import GENERATIONS, generation_of

SOURCES = sorted(path for path in Path(requirements.__file__).parent.rglob("*.py") if path.name != "requirements.py")
MODULES = tuple(requirements.NAMES)


def uses():
    found = {module: set() for module in MODULES}
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        known = {name: module for name, module in aliases(tree).items() if module in MODULES}
        for node in ast.walk(tree):
            if (name := dotted(node, known)) is not None:
                found[name[0]].add(name[1])
    return found


def test_every_name_is_listed_and_nothing_else():
    for module, names in uses().items():
        listed = set(requirements.NAMES[module])
        # A name that leads to a listed one is looked up on the way.
        assert {n for n in names if not any(known.startswith(f"{n}.") for known in listed)} == listed, module


def test_nothing_is_imported_from_jax_src():
    assert [path for path in SOURCES if "jax._src" in path.read_text()] == []


def test_what_is_missing_is_the_reason(monkeypatch):
    monkeypatch.setitem(requirements.NAMES, "jax.experimental.pallas.tpu", ("CompilerParams.nothing",))
    requirements.changes.cache_clear()
    x = jnp.ones((1, 256, 2, 128), jnp.bfloat16)
    try:
        explanation = ejkernel.explain("flash_attention", x, x, x, device="tpu-v6e")
    finally:
        requirements.changes.cache_clear()
    assert explanation.chosen.platform is ejkernel.Platform.XLA
    assert "jax.experimental.pallas.tpu has no CompilerParams.nothing" in str(explanation)


@pytest.mark.parametrize("name", [chip.slug for chip in CHIPS.values() if chip.kind == "tpu"])
def test_every_tpu_has_a_generation(name):
    generation = generation_of(describe(name))
    assert generation is GENERATIONS[name]
    assert 0.8 * CHIPS[name].vmem_bytes <= generation.vmem_bytes <= 0.9 * CHIPS[name].vmem_bytes


def test_a_device_that_is_no_tpu_has_the_least_memory():
    assert generation_of(describe("cpu")).vmem_bytes == min(g.vmem_bytes for g in GENERATIONS.values())
