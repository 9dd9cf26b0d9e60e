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
from ejkernel.errors import MissingPackageError

ROOT = Path(__file__).parents[1]
MODULES = [
    m.name for m in pkgutil.walk_packages(ejkernel.__path__, "ejkernel.") if not m.name.startswith("ejkernel.lab.cli")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    try:
        module = importlib.import_module(name)
    except MissingPackageError as error:
        pytest.skip(str(error))
    result = doctest.testmod(module, extraglobs={"jnp": jnp}, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Above a block that cannot run here, for readers to see.
NOT_RUN = re.compile(r"^\*Not run by the tests: .{10,}\.\*$")
# Run by tests of their own, which look at what they print or leave behind, or skip what is not installed.
LOOKED_AT = {
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("custom_kernels", "devices", "integrations", "migration", "serving", "training", "tuning")
    ),
}
# Their blocks measure, for seconds, what other tests measure too.
SLOW = {"docs/lab.md"}


def python_blocks(path):
    """The blocks that run; those of a page share their names unless it says otherwise."""
    text, blocks = path.read_text(), []
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        above = text[: match.start()].rstrip().rpartition("\n")[2]
        if not NOT_RUN.match(above):
            blocks.append(match[1])
    return blocks


def own_name(page):
    return page.relative_to(ROOT).as_posix()


def runnable():
    for page in PAGES:
        if python_blocks(page) and own_name(page) not in LOOKED_AT:
            slow = [pytest.mark.slow] * (own_name(page) in SLOW)
            yield pytest.param(page, id=own_name(page), marks=slow)


@pytest.mark.parametrize("page", list(runnable()))
def test_blocks_run(page):
    scope = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for number, block in enumerate(python_blocks(page), 1):
            try:
                exec(compile(block, f"{own_name(page)}, block {number}", "exec"), scope)
            except ImportError as error:
                if (error.name or "ejkernel").partition(".")[0] in ("ejkernel", "jax"):
                    raise
                pytest.skip(f"block {number} needs {error.name}, which is not installed")


def test_no_python_is_hidden_from_the_tests():
    """Every fence of Python is written as `python_blocks` reads it, and a block that is not run says why."""
    for page in PAGES:
        fences = re.findall(r"^\s*(?:```+|~~~+) *(\S*)", page.read_text(), re.MULTILINE)
        odd = {word for word in fences if word.lower().startswith(("py", "{")) and word != "python"}
        assert not odd, f"{own_name(page)}: {odd}"
        whole = re.findall(r"^```python$", page.read_text(), re.MULTILINE)
        reasons = [line for line in page.read_text().splitlines() if NOT_RUN.match(line)]
        assert len(whole) == fences.count("python") == len(python_blocks(page)) + len(reasons), own_name(page)
        named = Path(__file__).read_text().count(page.stem)
        assert own_name(page) not in LOOKED_AT or named > 1, f"no test runs the blocks of {own_name(page)}"


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


PAGES_WITH_PACKAGES = [
    pytest.param(block, id=f"{page}-{number}", marks=pytest.mark.slow if number else ())
    for page in ("integrations", "migration")
    for number, block in enumerate(python_blocks(ROOT / "docs" / f"{page}.md"))
]


@pytest.mark.parametrize("block", PAGES_WITH_PACKAGES)
def test_pages_about_other_packages(block, monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    for package in set(re.findall(r"^(?:import|from) (flax|equinox|torch|keras)\b", block, re.MULTILINE)):
        pytest.importorskip(package)
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
    assert python_blocks(page)
    assert (f"<!-- features: {name} -->\n|" in page.read_text()) == (name in OPERATIONS)


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
    from_index = re.compile(
        r"pip install(?: -\S+)* ['\"]?ejkernel(?![-\w/])|\bejkernel\[(?:gpu|tpu|lab|torch|flax|equinox|test)\b"
    )
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
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            assert len(line) <= 120 or line.startswith("|"), f"{page.name}:{number} has {len(line)} characters"


def anchors(page):
    """Those of a page's headings, as git hosts and the site make them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            if not path.startswith("http"):
                there = page.parent / path if path else page
                assert there.exists(), f"{own_name(page)}: {target}"
                assert not anchor or anchor in anchors(there), f"{own_name(page)}: {target}"
