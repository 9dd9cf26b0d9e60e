"""The docs run: docstrings' examples, the pages' examples, and the parts that are written from the code."""

import contextlib
import doctest
import importlib
import io
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel import kernel_registry

ROOT = Path(__file__).parents[1]
MODULES = [
    m.name for m in pkgutil.walk_packages(ejkernel.__path__, "ejkernel.") if not m.name.startswith("ejkernel.lab.cli")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"jnp": jnp}, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def python_blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def test_custom_kernels_page():
    before = kernel_registry.list_algorithms(), len(kernel_registry.list_implementations("flash_attention"))
    scope, output = {}, io.StringIO()
    with contextlib.redirect_stdout(output):
        for block in python_blocks(ROOT / "docs" / "custom_kernels.md"):
            exec(block, scope)
    assert "slower" not in output.getvalue()
    assert "refused  logits_soft_cap is not supported" in output.getvalue()
    expected = ejkernel.flash_attention(scope["x"], scope["x"], scope["x"])
    assert jnp.allclose(scope["plain"], expected, atol=1e-5)
    assert jnp.allclose(scope["small_blocks"], expected, atol=1e-5)
    assert scope["grads"].shape == scope["x"].shape
    assert before == (kernel_registry.list_algorithms(), len(kernel_registry.list_implementations("flash_attention")))


def test_tuning_page():
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        scope = {}
        for block in python_blocks(ROOT / "docs" / "tuning.md"):
            exec(block, scope)
    assert "gradients of key, query, value" in output.getvalue()


def test_devices_page():
    for block in python_blocks(ROOT / "docs" / "devices.md"):
        exec(block, {})


def test_serving_page():
    (block,) = python_blocks(ROOT / "docs" / "serving.md")
    exec(block, {})


def test_training_page():
    (block,) = python_blocks(ROOT / "docs" / "training.md")
    exec(block, {})


def test_readme():
    scope, output = {}, io.StringIO()
    text = (ROOT / "README.md").read_text()
    with contextlib.redirect_stdout(output):
        for block in python_blocks(ROOT / "README.md"):
            exec(block.replace("autotune(flash_attention)(q, k, v)", "pass"), scope)
    shown = re.search(r"```\n(flash_attention\(query.*?)```", text, re.DOTALL)[1]
    # Several devices are simulated in the suite, and then the heuristic names the heads a step too.
    assert re.sub(r", blocksize_heads=\d+", "", output.getvalue()) == shown
    for command in ("make demo", "make test"):
        assert command in text
    assert "<!-- devices -->\n|" in text


OPERATIONS = [n for n in kernel_registry.list_algorithms() if kernel_registry.operation(n)]


@pytest.mark.parametrize("name", [*OPERATIONS, "dot_product_attention"])
def test_operation_pages(name):
    page = ROOT / "docs" / "operations" / f"{name}.md"
    blocks = python_blocks(page)
    assert blocks
    assert (f"<!-- features: {name} -->\n|" in page.read_text()) == (name in OPERATIONS)
    scope = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in blocks:
            exec(block, scope)


def test_the_log_of_the_hopper_kernels_names_what_is_recorded():
    """Every key in backticks is one of the results; warnings of ptxas, such as `C7517`, are none."""
    recorded = set()
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        results = json.loads(path.read_text())
        recorded |= set(results) if isinstance(results, dict) else set()
    named = set(re.findall(r"`([^`]+)`", (ROOT / "docs" / "notes" / "hopper-log.md").read_text()))
    keys = {name for name in named if not re.fullmatch(r"C\d{4}", name)}
    assert len(keys) > 10
    assert keys <= recorded


def test_the_page_of_the_hopper_kernels_names_their_files():
    text = (ROOT / "docs" / "hopper.md").read_text()
    folder = ROOT / re.search(r"`(ejkernel/\S+/flash_attention_sm90)/`", text)[1]
    named = set(re.findall(r"`(\w+\.py)`", text))
    assert named == {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    assert len(text.splitlines()) <= 150


def test_generated_pages_are_current():
    result = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_nothing_installs_from_the_package_index():
    """There the name belongs to another project."""
    from_index = re.compile(r"pip install(?: -\S+)* ['\"]?ejkernel(?![-\w/])|\bejkernel\[(?:gpu|tpu|lab|torch|test)\b")
    assert from_index.search("pip install -U 'ejkernel'")
    assert not from_index.search("pip install dist/ejkernel-0.1.0-py3-none-any.whl")
    folders = [ROOT / name for name in (".ci", "benchmarks", "docs", "ejkernel", "examples", "tests", "tools")]
    files = [path for folder in folders for path in folder.rglob("*")] + list(ROOT.iterdir())
    texts = [
        path for path in files if path.is_file() and path.suffix not in (".png", ".pyc") and path != Path(__file__)
    ]
    assert ROOT / "README.md" in texts
    assert [str(path.relative_to(ROOT)) for path in texts if from_index.search(path.read_text(errors="ignore"))] == []


def test_lines_are_short():
    """Tables excepted: a row cannot be wrapped."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            assert len(line) <= 120 or line.startswith("|"), f"{page.name}:{number} has {len(line)} characters"


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
