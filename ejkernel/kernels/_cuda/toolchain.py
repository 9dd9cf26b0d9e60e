"""The compilers at hand: one for the host's C++, and nvcc or NVRTC for the device's.

Each says what it is in ``identity``, which is part of the key of what it made. NVRTC is a library that ``jax[cuda13]`` brings
with the package ``nvidia-cuda-nvrtc``: with it no toolkit is needed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from ejkernel.errors import EjkernelError

SOURCES = Path(__file__).parent
HOST_COMPILERS = ("c++", "g++", "clang++", "nvcc")
# Longer than any of our sources takes on a busy machine.
SECONDS = 300


class BuildError(EjkernelError, RuntimeError):
    """A source could not be compiled; the message holds what the compiler said."""


@runtime_checkable
class DeviceCompiler(Protocol):
    """Makes cubins."""

    identity: str

    def architectures(self) -> frozenset[int]:
        """The compute capabilities, times ten, that it compiles for."""

    def cubin(self, source: Path, architecture: str, macros: Mapping[str, object]) -> bytes:
        """The machine code of a source for one architecture, such as ``sm_90a``."""


@dataclass(frozen=True)
class HostCompiler:
    """Makes shared libraries."""

    path: str
    identity: str

    def library(self, source: Path, include: str) -> bytes:
        """A shared library of a source that needs nothing but one folder of headers and the C++ library."""
        # nvcc hands to its host compiler what it does not know itself.
        code = "-Xcompiler=-fPIC" if Path(self.path).name == "nvcc" else "-fPIC"
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "library.so"
            options = ["-std=c++17", "-O1", "-shared", code, "-isystem", include]
            _run([self.path, *options, str(source), "-o", str(result), "-ldl"])
            return result.read_bytes()


@dataclass(frozen=True)
class Nvcc:
    """The toolkit's compiler."""

    path: str
    identity: str

    def architectures(self) -> frozenset[int]:
        """See the protocol."""
        return frozenset(int(found) for found in re.findall(r"compute_(\d+)", _run([self.path, "--list-gpu-arch"])))

    def cubin(self, source: Path, architecture: str, macros: Mapping[str, object]) -> bytes:
        """See the protocol."""
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "kernel.cubin"
            code = f"-gencode=arch=compute_{architecture.removeprefix('sm_')},code={architecture}"
            _run([self.path, "-std=c++17", "-O3", "-cubin", code, *_defined(macros), str(source), "-o", str(result)])
            return result.read_bytes()


class Nvrtc:
    """The compiler as a library."""

    def __init__(self, path: Path):
        # What it loads itself lies beside it.
        for builtins in sorted(path.parent.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.identity = f"NVRTC {major.value}.{minor.value} {path}"

    def architectures(self) -> frozenset[int]:
        """See the protocol."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return frozenset(found)

    def cubin(self, source: Path, architecture: str, macros: Mapping[str, object]) -> bytes:
        """See the protocol."""
        program = ctypes.c_void_p()
        text, name = source.read_bytes(), source.name.encode()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text, name, 0, None, None)
        try:
            options = [f"-arch={architecture}", "-std=c++17", f"-I{source.parent}", *_defined(macros)]
            passed = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            if self._library.nvrtcCompileProgram(program, len(options), passed):
                log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise BuildError(f"{self.identity} cannot compile {source.name}:\n{log}")
            return self._text(program, "CUBIN")
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise BuildError(f"{function}: {self._library.nvrtcGetErrorString(status).decode()}")


@functools.cache
def host_compiler() -> HostCompiler | None:
    """``CXX``, else the first that is on the path."""
    for name in (os.environ.get("CXX", ""), *HOST_COMPILERS):
        path = shutil.which(name) if name else None
        if path and (version := _version(path)):
            return HostCompiler(path, f"{path} {version}")
    return None


@functools.cache
def device_compiler() -> DeviceCompiler | None:
    """nvcc, else NVRTC."""
    homes = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for folder in (None, *homes, Path("/usr/local/cuda/bin")):
        path = shutil.which("nvcc", path=None if folder is None else str(folder))
        if path and (version := _version(path)):
            return Nvcc(path, f"{path} {version}")
    for path in _nvrtc_libraries():
        try:
            return Nvrtc(path)
        except (OSError, AttributeError, BuildError):
            continue
    return None


def _nvrtc_libraries() -> list[Path]:
    """Those that packages of NVIDIA brought, the newest first."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [path for folder in folders for path in Path(folder).glob("*/lib/libnvrtc.so.*")]
    return sorted((path for path in found if "alt" not in path.name), key=lambda path: path.name, reverse=True)


def _defined(macros: Mapping[str, object]) -> list[str]:
    return [f"-D{name}={value}" for name, value in macros.items()]


def _version(path: str) -> str:
    """What a compiler says that it is; empty if it cannot be run."""
    try:
        return _run([path, "--version"]).strip()
    except BuildError:
        return ""


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from None
    if result.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")
    return result.stdout
