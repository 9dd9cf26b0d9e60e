"""Compilers for the tests of CUDA kernels: those of this machine, or none, or ones that only say what they know."""

import pytest

from ejkernel.callib.chips import CHIPS
from ejkernel.kernels._cuda import build, call, toolchain

NVIDIA = sorted(name for name, chip in CHIPS.items() if chip.vendor == "nvidia" and chip.capability >= call.OLDEST)
H200 = "nvidia-h200"

REMEMBERED = (
    build.cubin,
    build.launcher,
    toolchain.device_compiler,
    toolchain.host_compiler,
    call._compilers,
    call._probe,
)


def forget():
    for remembered in REMEMBERED:
        remembered.cache_clear()


@pytest.fixture
def fresh():
    """Nothing is remembered of compilers and of what they made."""
    forget()
    yield
    forget()


class FakeCompiler:
    identity = "nvcc 1.2\nand more"

    def __init__(self, *capabilities):
        self.known = frozenset(capabilities)

    def architectures(self):
        return self.known


@pytest.fixture
def compilers(monkeypatch, fresh):
    """Sets what is installed."""

    def install(*, host=True, device=(80, 86, 89, 90, 100)):
        monkeypatch.setattr(toolchain, "host_compiler", lambda: object() if host else None)
        found = None if device is None else FakeCompiler(*device)
        monkeypatch.setattr(toolchain, "device_compiler", lambda: found)
        call._compilers.cache_clear()

    return install


def needs(compiler):
    """A device's compiler that is there and knows the architectures, or a host's; else the test is skipped, and says why."""
    found = toolchain.device_compiler() if compiler == "device" else toolchain.host_compiler()
    if found is None:
        pytest.skip(f"needs {'nvcc or NVRTC' if compiler == 'device' else 'a C++ compiler'}, which is not here")
    return found


def needs_capability(capability):
    if capability not in needs("device").architectures():
        pytest.skip(f"{toolchain.device_compiler().identity.splitlines()[0]} knows no capability {capability}")
