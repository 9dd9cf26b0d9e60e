"""What is built on first use, and kept in the user's cache: the launcher, and the cubins of kernels.

An entry's name is a digest of all that it was made from, so none is ever stale. It ends with a digest of itself, so one that is damaged is made
again; it is moved into its place when it is whole, so a build that is killed leaves nothing that is read. A lock keeps processes from
building the same at once; one that cannot have it builds all the same.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import jaxlib
import jaxlib.version

from ejkernel.kernels._cuda import toolchain
from ejkernel.kernels._cuda.toolchain import BuildError
from ejkernel.utils.directories import cache_directory

LAUNCHER = "launcher.cc"
PARTIAL = ".part"
DIGEST_BYTES = 32
LOCK_SECONDS = 120.0


@functools.lru_cache(maxsize=256)
def cubin(source: str, architecture: str, macros: tuple[tuple[str, object], ...]) -> bytes:
    """The machine code of a source beside this file, compiled with macros for ``sm_90a`` or another architecture."""
    compiler = toolchain.device_compiler()
    if compiler is None:
        raise BuildError("there is neither nvcc nor NVRTC")
    path = toolchain.SOURCES / source
    parts = [compiler.identity, architecture, repr(macros), path.read_text(encoding="utf-8")]
    parts += [header.read_text(encoding="utf-8") for header in sorted(toolchain.SOURCES.glob("*.cuh"))]
    made = functools.partial(compiler.cubin, path, architecture, dict(macros))
    return _kept(f"{path.stem}-{architecture}", ".cubin", parts, made)[0]


@functools.cache
def launcher() -> Path:
    """The shared library with the FFI handler, made with the headers of the jaxlib that runs."""
    import jax

    compiler = toolchain.host_compiler()
    if compiler is None:
        raise BuildError(f"there is no C++ compiler: none of {', '.join(toolchain.HOST_COMPILERS)}")
    source, include = toolchain.SOURCES / LAUNCHER, jax.ffi.include_dir()
    interface = (Path(include) / "xla/ffi/api/c_api.h").read_text(encoding="utf-8")
    parts = [compiler.identity, jaxlib.version.__version__, interface, source.read_text(encoding="utf-8")]
    path = _kept("launcher", ".so", parts, lambda: compiler.library(source, include))[1]
    if path is None:
        raise BuildError(f"{cache_directory()} cannot be written")
    return path


def _kept(name: str, suffix: str, parts: list[str], make: Callable[[], bytes]) -> tuple[bytes, Path | None]:
    """An entry's content and place, made if it is not there; the place is None if it cannot be written."""
    # Options of compilers are in the toolchain's text.
    options = Path(toolchain.__file__).read_text(encoding="utf-8")
    key = hashlib.sha256("\0".join([options, *parts]).encode()).hexdigest()[:32]
    path = cache_directory() / "cuda" / f"{name}-{key}{suffix}"
    found = _read(path)
    if found is not None:
        return found, path
    with _locked(path):
        found = _read(path)
        if found is not None:
            return found, path
        content = make()
        return content, path if _write(path, content) else None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, filelock.Timeout):
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(filelock.FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS))
            for left in path.parent.glob(f"{path.stem}.*{PARTIAL}"):  # by a process that was killed
                left.unlink(missing_ok=True)
        yield


def _read(path: Path) -> bytes | None:
    """An entry's content without the digest at its end; None if it is not there, or damaged."""
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    content, digest = whole[:-DIGEST_BYTES], whole[-DIGEST_BYTES:]
    return content if content and hashlib.sha256(content).digest() == digest else None


def _write(path: Path, content: bytes) -> bool:
    """Put an entry into its place; loaders of shared libraries do not mind what follows the last section."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=PARTIAL)
        with os.fdopen(handle, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True
