"""Who imports whom: the contracts of pyproject.toml, which import-linter checks."""

from pathlib import Path

import pytest


def test_layers(capsys):
    cli = pytest.importorskip("importlinter.cli", reason="import-linter is not installed")
    config = Path(__file__).parents[1] / "pyproject.toml"
    failed = cli.lint_imports(config_filename=str(config), no_cache=True)
    printed = capsys.readouterr().out
    assert not failed, printed
    assert "3 kept, 0 broken" in printed
