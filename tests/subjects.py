"""What the property tests run: every implementation that this machine can run, with a dtype that it takes.

Pallas kernels run on a CPU too, in JAX's interpreters: those for TPUs with every jax, those for GPUs from jax 0.11 on. They are
registered for the test alone, so that calls, gradients and vmap reach them as they do on an accelerator.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import pytest

from ejkernel import Backend, Platform, kernel_registry
from ejkernel.contracts.device import describe
from ejkernel.contracts.registry import Implementation
from ejkernel.contracts.support import Request, Support, cpu
from ejkernel.kernels._triton.call import interpreting

# The first that an implementation takes is the dtype of most of its tests.
DTYPES = ("float32", "bfloat16", "float16", "float64")
MOSAIC_INTERPRETER = tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 11)


class InPallasInterpreter:
    """A Pallas kernel that runs in JAX's interpreter of its backend, wherever it is called from."""

    def __init__(self, kernel: Any, backend: Backend) -> None:
        self.kernel, self.interpreter = kernel, INTERPRETERS[backend]
        self.name = f"{kernel.name}-interpreted"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def forward(self, arrays, spec, params):
        return self.kernel.forward(arrays, spec, params, interpret=self.interpreter())

    def backward(self, arrays, spec, params, *rest, wanted):
        return self.kernel.backward(arrays, spec, params, *rest, wanted, interpret=self.interpreter())


def _gpu_interpreter() -> Any:
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu.InterpretGPUParams()


def _tpu_interpreter() -> Any:
    from jax.experimental.pallas import tpu

    return tpu.InterpretParams()  # memory that nothing was written to is NaN


INTERPRETERS = {Backend.TPU: _tpu_interpreter}
if MOSAIC_INTERPRETER:
    INTERPRETERS[Backend.GPU] = _gpu_interpreter


@dataclass(frozen=True)
class Subject:
    """An implementation and a dtype; ``interpreted_for``: registered for its tests alone, in the interpreter of that backend."""

    implementation: Implementation
    dtype: str
    interpreted_for: Backend | None = None

    @property
    def in_pallas_interpreter(self) -> bool:
        return self.interpreted_for is not None

    @property
    def platform(self) -> Platform:
        return self.implementation.platform

    @property
    def support(self) -> Support:
        return self.implementation.support

    @property
    def interpreted(self) -> bool:
        return self.in_pallas_interpreter or (self.platform is Platform.TRITON and interpreting())

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        for_tpu = [pytest.mark.tpu] if self.interpreted_for is Backend.TPU else []
        return [*for_tpu, pytest.mark.interpreted] if self.interpreted else []

    def __str__(self) -> str:
        backend = self.interpreted_for or self.implementation.backend
        return f"{self.platform.value}-{backend.value}-{self.dtype}"

    def has(self, *features: str) -> bool:
        """Whether the implementation has all of these features, and together."""
        request = Request(describe(jax.local_devices()[0]), features=dict.fromkeys(features, ""))
        return not self.support.refusals(request)

    @property
    def step(self) -> int:
        """Of the head dims of most tests: Hopper's kernels take others, but compute most calls in whole tiles."""
        return 32 if self.platform is Platform.PALLAS else self.support.head_dims.step

    def dim(self, at_least: int) -> int:
        """The smallest head dim of most tests, of at least so many."""
        return -(-at_least // self.step) * self.step

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """While the implementation is in the registry."""
        if not self.in_pallas_interpreter:
            yield
            return
        entry = self.implementation
        kernel_registry.register(entry.algorithm, entry.platform, entry.backend, support=entry.support)(entry.kernel)
        try:
            yield
        finally:
            kernel_registry.unregister(entry.kernel)


@functools.cache
def implementations(algorithm: str) -> tuple[tuple[Implementation, Backend | None], ...]:
    """Those that this machine can run, each with the backend whose interpreter is needed for that."""
    device = describe(jax.local_devices()[0])
    found = []
    for entry in kernel_registry.list_implementations(algorithm):
        if entry.support.devices.refusal(device) is None:
            found.append((entry, None))
        elif device.kind == "cpu" and _takes_interpret(entry):
            support = dataclasses.replace(entry.support, devices=cpu())
            found.append(
                (
                    dataclasses.replace(
                        entry,
                        backend=Backend.CPU,
                        support=support,
                        kernel=InPallasInterpreter(entry.kernel, entry.backend),
                    ),
                    entry.backend,
                )
            )
    return tuple(found)


def _takes_interpret(entry: Implementation) -> bool:
    if entry.platform is not Platform.PALLAS or entry.backend not in INTERPRETERS:
        return False
    backward = getattr(entry.kernel, "backward", entry.kernel.forward)
    return all("interpret" in inspect.signature(run).parameters for run in (entry.kernel.forward, backward))


def subjects(algorithm: str = "flash_attention", *, dtypes: str = "main") -> list[Subject]:
    """Every implementation in its main dtype; with ``dtypes="others"`` in each of the others that it takes."""
    found = []
    for entry, interpreted_for in implementations(algorithm):
        main, *others = (dtype for dtype in DTYPES if dtype in entry.support.dtypes)
        chosen = {"main": [main], "others": others}[dtypes]
        found += [Subject(entry, dtype, interpreted_for) for dtype in chosen]
    return found


def each_subject(*needs: str, interpreted: str = "slow", again: bool = False) -> pytest.MarkDecorator:
    """Parameter ``subject`` of a test of flash_attention: the implementations that have these features.

    Interpreters are slow, so most such tests run with them in ``make test-full`` alone; ``interpreted="short"`` keeps one
    in ``make test``, ``"never"`` is for what no interpreter can run. ``again`` as in ``parameter``.
    """
    chosen = [s for s in subjects() if s.has(*needs) and not (s.interpreted and interpreted == "never")]
    return pytest.mark.parametrize(
        "subject", [parameter(s, slow=s.interpreted and interpreted == "slow", again=again) for s in chosen]
    )


def parameter(subject: Subject, *values: Any, slow: bool = False, again: bool = False) -> Any:
    """``subject, *values`` as one parameter of a test; ``again``: CI has no interpreter run it."""
    marks = [*subject.marks, *([pytest.mark.slow] if slow else [])]
    if again and subject.interpreted:
        marks.append(pytest.mark.again)
    return pytest.param(subject, *values, id="-".join(map(str, (*values, subject))), marks=marks)
