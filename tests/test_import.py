"""Importing the package does nothing else."""

import importlib
import json
import os
import subprocess
import sys

import pytest

from ejkernel.errors import MissingPackageError

OPTIONAL = [
    "triton",
    "jax_triton",
    "torch",
    "transformers",
    "flax",
    "equinox",
    "matplotlib",
    "pandas",
    "jinja2",
    "rich",
    "typer",
    "psutil",
    "pynvml",
    "pydantic",
]

_SCRIPT = """
import json, os, sys, tempfile
import jax
before = dict(os.environ), dict(jax.config.values), set(sys.modules)
import ejkernel
names = sys.argv[1:]
for name in names:
    getattr(ejkernel, name)
after = dict(os.environ), dict(jax.config.values)
from jax._src import xla_bridge
print(json.dumps({
    "environment": before[0] == after[0],
    "config": before[1] == after[1],
    "devices": bool(xla_bridge._backends),
    "modules": sorted(m for m in set(sys.modules) - before[2]),
    "files": os.listdir(os.environ["HOME"]),
}))
"""


def fresh(tmp_path, *names):
    environment = {k: v for k, v in os.environ.items() if k not in ("EJKERNEL_CACHE_DIR",)}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / ".cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *names], env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def every_name():
    import ejkernel

    return ejkernel.__all__


@pytest.mark.parametrize("names", ["none", "all"])
def test_import_touches_nothing(tmp_path, names):
    seen = fresh(tmp_path, *(every_name() if names == "all" else ()))
    assert seen["environment"]
    assert seen["config"]
    assert not seen["devices"]
    assert not seen["files"]
    assert not set(OPTIONAL) & {module.split(".")[0] for module in seen["modules"]}


def test_import_is_light(tmp_path):
    assert [m for m in fresh(tmp_path)["modules"] if m.startswith("ejkernel")] == ["ejkernel"]


@pytest.mark.parametrize("package", ["flax", "equinox", "torch"])
def test_an_integration_without_its_package_says_what_to_install(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"ejkernel.integrations.{package}", raising=False)
    words = rf"^ejkernel.integrations.{package} needs {package}: pip install '\.\[{package}\]' in a clone of ejkernel$"
    with pytest.raises(MissingPackageError, match=words):
        importlib.import_module(f"ejkernel.integrations.{package}")


def test_every_name_is_public():
    import ejkernel

    promised = {
        "flash_attention", "Platform", "Backend", "Support", "kernel_registry", "explain", "target", "overlay", "autotune",
        "FwdParams", "BwdParams", "EjkernelError", "UnsupportedError", "InvalidInputError",
    }  # fmt: skip
    assert promised <= set(ejkernel.__all__) <= set(dir(ejkernel))
    with pytest.raises(AttributeError, match="no attribute 'flash_atention'"):
        _ = ejkernel.flash_atention
