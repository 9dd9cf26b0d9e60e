"""What a type checker sees of the public names."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("basedpyright") is None, reason="basedpyright is not installed: pip install -e '.[test]'"
)


def run(*command):
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_uses_of_the_public_names_have_no_errors():
    result = run("-m", "basedpyright", "--pythonpath", sys.executable)
    assert result.returncode == 0, result.stdout
    assert "0 errors, 0 warnings" in result.stdout


@pytest.mark.slow
def test_the_type_of_every_public_name_is_known():
    result = run("tools/public_types.py")
    assert result.returncode == 0, result.stdout
    assert "public symbols, 0 of unknown type" in result.stdout
