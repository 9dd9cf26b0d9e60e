"""Who imports whom: the contracts of pyproject.toml, which import-linter checks."""

import tomllib
from pathlib import Path

import pytest

from ejkernel.contracts.registry import BUILTIN

CONFIG = Path(__file__).parents[1] / "pyproject.toml"


def test_every_operation_is_in_its_layer():
    contracts = tomllib.loads(CONFIG.read_text())["tool"]["importlinter"]["contracts"]
    assert set(contracts[0]["layers"][1].split(" : ")) == {module for module, _ in BUILTIN.values()}


def test_layers(capsys):
    cli = pytest.importorskip("importlinter.cli", reason="import-linter is not installed")
    failed = cli.lint_imports(config_filename=str(CONFIG), no_cache=True)
    printed = capsys.readouterr().out
    assert not failed, printed
    assert "3 kept, 0 broken" in printed
