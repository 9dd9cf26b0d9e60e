"""What Triton compiled, kept on disk: jax-triton compiles again in every process.

The compiler's input (Triton's IR) is the key, with everything else the compiler is given and its version, so an entry is
never stale. Nothing that is wrong with the directory stops a call: the kernel is then compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ejkernel.utils.directories import cache_directory

COMPILE = "compile_ttir_to_ptx_inplace"
RESULT = "CompilationResult"


@functools.cache
def install() -> bool:
    """Put the cache in front of jax-triton's compiler; False if this jax-triton has no such function."""
    from jax_triton import triton_lib

    compile, result = getattr(triton_lib, COMPILE, None), getattr(triton_lib, RESULT, None)
    if compile is None or not dataclasses.is_dataclass(result):
        return False
    setattr(triton_lib, COMPILE, kept(compile, result))
    return True


def kept(compile: Callable[..., Any], result: type) -> Callable[..., Any]:
    """A compiler that looks on disk first. Its first argument is Triton's IR, its result a dataclass of plain values."""

    @functools.wraps(compile)
    def compiled(ttir: Any, backend: Any, options: Any, *rest: Any) -> Any:
        path = _path(str(ttir), str(options), *map(str, rest))
        fields = _read(path)
        with contextlib.suppress(TypeError):  # fields of another version
            if fields is not None:
                return result(**fields)
        made = compile(ttir, backend, options, *rest)
        _write(path, dataclasses.asdict(made))
        return made

    return compiled


def _path(*parts: str) -> Path:
    versions = [str(getattr(sys.modules.get(name), "__version__", "")) for name in ("triton", "jax_triton")]
    digest = hashlib.sha256("\n".join([*versions, *parts]).encode()).hexdigest()
    return cache_directory() / "triton" / f"{digest}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return fields if isinstance(fields, dict) else None


def _write(path: Path, fields: dict[str, Any]) -> None:
    with contextlib.suppress(OSError, TypeError):
        text = json.dumps(fields)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
