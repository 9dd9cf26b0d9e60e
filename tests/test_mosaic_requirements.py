"""What flash attention for Hopper needs of JAX's Mosaic GPU is listed whole, and is not imported where it is not asked for."""

import ast
import functools
import importlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from ejkernel.kernels._pallas.gpu.flash_attention_sm90 import requirements

SOURCES = [
    path
    for folder in ("flash_attention_sm90", "page_attention_sm90", "blocksparse_attention_sm90", "grouped_matmul_sm90")
    for path in sorted((Path(requirements.__file__).parent.parent / folder).glob("*.py"))
]
UNSTABLE = ("jax.experimental.pallas", "jax.experimental.mosaic", "jaxlib.mlir")


def aliases(tree):
    """Names that stand for modules of JAX that are not stable."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("importlib.import_module("):
            found[node.targets[0].id] = node.value.args[0].value
    return {name: module for name, module in found.items() if module.startswith(UNSTABLE)}


def dotted(node, known):
    """``(module, name)`` of an attribute of a known module."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if parts and isinstance(node, ast.Name) and node.id in known:
        return known[node.id], ".".join(reversed(parts))
    return None


@functools.cache
def uses():
    """Every name of those modules in the sources, and how each is called."""
    names, calls = defaultdict(set), defaultdict(list)
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        known = aliases(tree)
        for node in ast.walk(tree):
            if (name := dotted(node, known)) is not None:
                names[name[0]].add(name[1])
            if isinstance(node, ast.Call) and (name := dotted(node.func, known)) is not None:
                positional = sum(not isinstance(a, ast.Starred) for a in node.args)
                calls[name].append((positional, {k.arg for k in node.keywords if k.arg}))
    return names, calls


def test_every_name_is_listed():
    names, _ = uses()
    assert len(names) > 8
    for module, used in names.items():
        listed = {*requirements.NAMES.get(module, ()), *requirements.CALLS.get(module, ())}
        # A name that leads to a listed one is looked up on the way.
        missing = {name for name in used if not any(known == name or known.startswith(f"{name}.") for known in listed)}
        assert not missing, (module, missing)


def test_every_call_is_listed():
    _, calls = uses()
    assert len(calls) > 50
    for (module, name), found in calls.items():
        ways = requirements.CALLS[module][name]
        for positional, keywords in found:
            assert any(positional <= way.positional and keywords <= set(way.keywords) for way in ways), (module, name)


def test_nothing_is_listed_that_is_not_used():
    """But for methods of arrays, whose type the sources do not tell."""
    names, _ = uses()
    methods = ("FragmentedArray.", "WGMMAAccumulator.", "IfOp.")
    for table in (requirements.NAMES, requirements.CALLS):
        for module, listed in table.items():
            assert {name for name in listed if not name.startswith(methods)} <= names[module], module


def test_nothing_is_imported_from_jax_src():
    for path in SOURCES:
        assert "jax._src" not in path.read_text(), path


SCRIPT = """
import json, sys
import jax, jax.numpy as jnp
import ejkernel
x = jnp.ones((1, 16, 2, 32), jnp.bfloat16)
explained = str(ejkernel.explain("flash_attention", x, x, x).chosen.platform)
import ejkernel.kernels._pallas.gpu.flash_attention_sm90.attention
ejkernel.flash_attention(x, x, x)
print(json.dumps([explained, sorted(sys.modules)]))
"""


def test_a_call_on_a_cpu_does_not_import_mosaic():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr[-2000:]
    explained, modules = json.loads(result.stdout.splitlines()[-1])
    assert explained == "Platform.XLA"
    assert [m for m in modules if m.startswith(("jax.experimental.mosaic", "jax.experimental.pallas"))] == []
    assert "ejkernel.kernels._pallas.gpu.flash_attention_sm90.attention" in modules


def test_the_probe_is_asked_once(monkeypatch):
    requirements.changes.cache_clear()
    asked = []
    monkeypatch.setattr(requirements, "_module", lambda name: asked.append(name) or importlib.import_module(name))
    assert [requirements.changes() for _ in range(3)] == [None] * 3
    assert sorted(asked) == sorted({*requirements.NAMES, *requirements.CALLS})
