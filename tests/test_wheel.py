"""The wheel holds what the package needs and nothing else, and runs where the repository is not."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command, **options):
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # From a copy: a build leaves folders in its tree, and takes files that an earlier build left there.
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "ejkernel", folder / "tree" / "ejkernel", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "tree")
    # Beside the package, as in the repository: finding packages must leave them out.
    for name in ("tests", "benchmarks", "tools"):
        (folder / "tree" / name).mkdir()
        (folder / "tree" / name / "__init__.py").touch()
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation",
        "--wheel-dir", folder, folder / "tree")  # fmt: skip
    (built,) = folder.glob("*.whl")
    return built


def test_every_file_of_the_package_is_inside_and_no_other(wheel):
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ejkernel").rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == expected
    assert "ejkernel/py.typed" in inside
    assert any(name.startswith("ejkernel/tuned/") and name.endswith(".json") for name in inside)
    assert any(name.startswith("ejkernel/lab/") and name.endswith(".html") for name in inside)


def test_the_metadata_lead_to_the_extras_and_the_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
        (commands,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/entry_points.txt"))
    for extra in ("gpu", "tpu", "lab", "docs", "examples", "torch", "flax", "equinox", "test"):
        assert f"Provides-Extra: {extra}\n" in metadata
    assert "ejkernel = ejkernel.lab.cli:main" in commands


@pytest.mark.slow
def test_it_runs_from_an_empty_environment(wheel, tmp_path):
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    # The packages that it needs come from the environment of this suite, whose .pth files (an editable ejkernel) do not
    # count in a path that a .pth file names.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    script = """
import jax, jax.numpy as jnp, ejkernel
x = jax.random.normal(jax.random.key(0), (1, 32, 2, 16))
out = ejkernel.flash_attention(x, x, x, causal=True)
expected = jax.nn.dot_product_attention(x, x, x, is_causal=True)
assert jnp.allclose(out, expected, atol=1e-5)
shape = jax.ShapeDtypeStruct((2, 4096, 16, 128), jnp.bfloat16)
assert ejkernel.explain("flash_attention", shape, shape, shape, device="nvidia-h200").chosen.source == "shipped"
print(ejkernel.__file__)
"""
    loaded = Path(run(python, "-I", "-c", script, cwd=tmp_path).strip())
    assert loaded.parent == site / "ejkernel"
