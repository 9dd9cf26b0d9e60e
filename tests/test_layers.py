"""Who imports whom: the contracts of pyproject.toml, which import-linter checks."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ejkernel.contracts.registry import BUILTIN

CONFIG = Path(__file__).parents[1] / "pyproject.toml"


def test_every_operation_is_in_its_layer():
    contracts = tomllib.loads(CONFIG.read_text())["tool"]["importlinter"]["contracts"]
    assert set(contracts[0]["layers"][2].split(" : ")) == {module for module, _ in BUILTIN.values()}


def test_layers():
    pytest.importorskip("importlinter", reason="import-linter is not installed")
    code = "from importlinter.cli import lint_imports_command as run; run()"
    command = [sys.executable, "-c", code, "--no-cache", "--config", str(CONFIG)]
    result = subprocess.run(command, cwd=CONFIG.parent, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 kept, 0 broken" in result.stdout
