"""An operation: bind the arguments, select an implementation, run it.

Everything that can be decided without values is decided while JAX traces, and JAX's own cache holds the result: an eager
call is one dictionary look-up and one call of a jitted function.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

from ejkernel.contracts import device as devices
from ejkernel.contracts.call import Call, Cost
from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.contracts.registry import Choice, Implementation, kernel_registry
from ejkernel.contracts.support import Backend, Platform, as_member
from ejkernel.errors import InvalidInputError
from ejkernel.kernels.common.varying import vary_over, varying_axes
from ejkernel.ops.config import chain
from ejkernel.ops.config.context import surroundings
from ejkernel.ops.core import run, select
from ejkernel.ops.core.checks import device_of, words

CACHED_CALLS = 4096

# An argument of an operation whose annotation names this may be traced.
AnyArray = jax.Array | np.ndarray


class Operation:
    """What an operation's file declares; see ``ejkernel.ops.flash_attention`` for one in full.

    Subclasses set the class attributes and implement ``bind``, ``prepare``, ``finish`` and ``work``.

    Attributes:
        name: of the algorithm in the registry.
        features: every feature that an implementation may have, with a sentence for the docs.
        gradients: the arguments that can have gradients.
        shareable: the prepared arrays that may have a batch axis of size 1 beside a larger batch.
        runs_on: the operation whose kernels do the work, for one that has none of its own.
        outside: arguments that the operation's function deals with itself.
        inside: arrays that the operation's function adds to its arguments.
        undemanding: features that ask no more of a kernel's registers and memory: parameters measured with and without
            them serve each other.
        farthest: how far a call may be, in powers of two of its sizes, from one whose shipped times count for it.

    A prepared array may be a tree of arrays; its name then stands for all of them.

    The function's signature is the only list of arguments: those annotated with ``AnyArray`` may be traced (``arrays``), the
    others are static (``statics``).
    """

    name: str
    features: ClassVar[dict[str, str]]
    gradients: tuple[str, ...]
    shareable: frozenset[str] = frozenset()
    undemanding: frozenset[str] = frozenset()
    farthest: float = math.inf
    runs_on: str = ""
    outside: frozenset[str] = frozenset()
    inside: tuple[str, ...] = ()

    def __init__(self, function: Callable):
        self.function = function
        signature = inspect.signature(function)
        self.defaults = {name: p.default for name, p in signature.parameters.items()}
        self.signature = signature
        own = {name: p for name, p in signature.parameters.items() if name not in self.outside}
        self.arrays = (*(name for name, p in own.items() if "AnyArray" in str(p.annotation)), *self.inside)
        self.statics = tuple(name for name in own if name not in self.arrays)
        self._jitted: dict[Any, Callable] = {}

    def bind(self, arguments: dict[str, Any]) -> Call:
        """Check every argument and say what is asked, all but the kernels' shapes. Uses shapes and dtypes alone."""
        raise NotImplementedError

    def normalise(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Bring arguments that have several forms into one, before they become part of a key."""
        return {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}

    def check_values(self, arguments: dict[str, Any]) -> None:
        """Refuse wrong values of arrays that are concrete, from all arguments by name; most operations have none to check."""

    def prepare(self, arguments: dict[str, Any], spec: Any) -> dict[str, Any]:
        """The arrays as kernels get them: canonical shapes, a batch axis (whole, or of size 1) in front of each."""
        raise NotImplementedError

    def shapes(self, arrays: dict[str, Any], spec: Any) -> dict[str, Any]:
        """What a kernel's parameters are chosen by: the prepared arrays, abstract."""
        return jax.tree.map(_abstract, arrays)

    def differentiable(self, arguments: dict[str, Any]) -> frozenset[str]:
        """The arguments of a call that have gradients."""
        return frozenset(name for name in self.gradients if arguments[name] is not None)

    def empty(self, arguments: dict[str, Any]) -> Any:
        """The result if the call has no work at all, else None."""

    def finish(self, arguments: dict[str, Any], out: Any, lse: Any) -> Any:
        """The caller's result from a kernel's."""
        raise NotImplementedError

    def result_specs(self, arguments: dict[str, Any], spec: tuple) -> Any:
        """Partition specs of the result, for a first array partitioned by ``spec``; used on explicit meshes alone."""
        raise NotImplementedError

    def run_forward(self, chosen: Choice, arrays: dict[str, Any], spec: Any) -> tuple:
        """The kernel's pair: the output and what the backward needs beside it. Each is a tree of arrays with a batch axis."""
        return chosen.forward(arrays, spec)

    def run_backward(
        self, chosen: Choice, wanted: frozenset[str], arrays: dict[str, Any], spec: Any, *rest: Any
    ) -> dict[str, Any]:
        """The gradients by name, from the forward's pair and its cotangents."""
        return chosen.backward(wanted, arrays, spec, *rest)

    def axes(self, arrays: dict[str, Any], spec: Any) -> tuple[dict[str, Any], tuple]:
        """The axes of prepared arrays, by name, and of a kernel's pair, along which a mesh may cut them; see ``partition``.

        Arrays that are not named can be cut along their batch, ``"b"``.
        """
        return {}, ("b", "b")

    def left_to_the_compiler(self, arrays: dict[str, Any], direction: str) -> bool:
        """Whether it partitions the XLA kernel along these axes by itself, without gathering arrays."""
        return True

    def localise(self, arrays: dict[str, Any], spec: Any, index: Callable[[str], Any]) -> dict[str, Any]:
        """A device's part of the arrays, where what they hold depends on which part it is; ``index``: which, by letter."""
        return arrays

    def folds(self, names: frozenset[str]) -> bool:
        """Whether a vmap folds into the batch axis when these arrays are vmapped, or have gradients; else it is a loop."""
        return True

    def cost(self, call: Call) -> Cost:
        """Operations and bytes that the call needs at least; none if it is empty."""
        return self.work(call) if call.shapes else Cost(0, 0, 0, 0)

    def work(self, call: Call) -> Cost:
        """The same for a call that is not empty."""
        raise NotImplementedError

    def sample(self, shapes: dict[str, Any]) -> dict[str, Any]:
        """Prepared arrays with plausible values, for timing."""
        raise NotImplementedError

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """Run a call, given all arguments of the function by name."""
        arrays = tuple([arguments.get(name) for name in self.arrays])
        statics = tuple([arguments[name] for name in self.statics])
        return self.run(arrays, statics)

    def run(self, arrays: tuple, statics: tuple) -> Any:
        """Run a call; ``arrays`` and ``statics`` in the order of the signature."""
        device = device_of(arrays if hasattr(arrays[0], "devices") else jax.tree.leaves(arrays))
        # JAX's rules for a custom gradient inside a jitted function write into it: threads that trace have one each.
        thread = threading.get_ident() if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays)) else None
        key = (statics, types_of(statics), device, kernel_registry.generation, chain.environment(), thread)
        try:
            jitted = self._jitted.get(key)
        except TypeError:  # an unhashable static
            return self.run(arrays, self._hashable(statics))
        if jitted is None:
            jitted = self._jitted[key] = self._make(statics, device)
        self.check_values(self._named(arrays, statics))
        try:
            return jitted(arrays)
        except TypeError:
            self._check_arrays(arrays)
            raise

    def _named(self, arrays: tuple, statics: tuple) -> dict[str, Any]:
        return dict(zip((*self.arrays, *self.statics), (*arrays, *statics), strict=True))

    def _make(self, statics: tuple, device: Any) -> Callable:
        if len(self._jitted) >= CACHED_CALLS:
            self._jitted.clear()

        def traced(arrays):
            with run.usual_promotion():
                return self._trace(arrays, statics, device)

        traced.__name__ = traced.__qualname__ = self.name
        return jax.jit(traced)

    def _check_arrays(self, arrays: tuple) -> None:
        """Name the argument that JAX could not take."""
        known = jax.Array | np.ndarray | np.generic | int | float | list | tuple | dict | None
        for name, value in zip(self.arrays, arrays, strict=True):
            if not isinstance(value, known):
                abstract = isinstance(value, jax.ShapeDtypeStruct)
                what_to_do = "only explain takes abstract ones" if abstract else f"pass jnp.asarray({name})"
                raise InvalidInputError(f"{self.name}: {name} is {words(value)}; expected an array: {what_to_do}.")

    def _check_params(self, arguments: dict[str, Any]) -> None:
        for name, cls in (("fwd_params", FwdParams), ("bwd_params", BwdParams)):
            given = arguments.get(name)
            if given is None:
                continue
            if not isinstance(given, cls):
                raise InvalidInputError(f"{self.name}: {name} is {given!r}; expected {cls.__name__}(…) or None.")
            kernel_registry.check_params(self.name, given, f"{self.name}: {name}")

    def _hashable(self, statics: tuple) -> tuple:
        arguments = self.normalise(dict(zip(self.statics, statics, strict=True)))
        self._check_params(arguments)
        for name, value in arguments.items():
            try:
                hash(value)
            except TypeError:
                raise InvalidInputError(
                    f"{self.name}: {name} is {words(value)}; expected a plain Python value, known when the call is traced."
                ) from None
        return tuple(arguments.values())

    def _trace(self, arrays: tuple, statics: tuple, device: Any) -> Any:
        arguments = self._named(arrays, statics)
        call, pins = self._bound(arguments)
        info = devices.seen_from_here(surroundings().target or devices.describe(device))
        decision = run.Decision(self, call, info, pins)
        empty = self.empty(arguments)
        if empty is not None:
            decision.choose()
            axes = varying_axes(*(x for x in jax.tree.leaves(arrays) if hasattr(x, "shape")))
            return jax.tree.map(lambda x: vary_over(x, axes), empty)
        traced = {name: x for name, x in zip(self.arrays, arrays, strict=True) if x is not None}
        others = {name: x for name, x in arguments.items() if name not in traced}

        def execute(traced):
            return run.execute(decision, others, traced)

        mesh = _explicit_mesh(arrays[0])
        if mesh is not None:
            # The compiler partitions as it does elsewhere; the result is laid out as the first array is.
            spec = (*jax.typeof(arrays[0]).sharding.spec, *[None] * arrays[0].ndim)[: arrays[0].ndim]
            specs = self.result_specs(arguments, spec)
            shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, jax.P))
            explicit = tuple(n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t is AxisType.Explicit)
            execute = jax.sharding.auto_axes(execute, axes=explicit, out_sharding=shardings)
        return execute(traced)

    def bound(self, arguments: dict[str, Any]) -> tuple[Call, select.Pins]:
        """The call, with the kernels' shapes, and the implementation it is pinned to, from all arguments by name."""
        call, pins = self._bound(arguments)
        prepared = self.abstract(arguments, call.spec)
        return replace(call, shapes=self.shapes(prepared, call.spec) if prepared else {}), pins

    def abstract(self, arguments: dict[str, Any], spec: Any) -> dict[str, Any] | None:
        """The prepared arrays without values; None if the call has no work."""

        def prepared(arrays):
            everything = {**arguments, **arrays}
            return None if self.empty(everything) is not None else self.prepare(everything, spec)

        given = {name: arguments.get(name) for name in self.arrays}
        return jax.eval_shape(prepared, {name: array for name, array in given.items() if array is not None})

    def _bound(self, arguments: dict[str, Any]) -> tuple[Call, select.Pins]:
        pins = select.Pins(
            as_member(arguments["platform"], Platform, f"{self.name}: platform"),
            as_member(arguments["backend"], Backend, f"{self.name}: backend"),
        )
        self._check_params(arguments)
        call = self.bind(arguments)
        # A call outlives its trace, so it must not hold tracers.
        arguments = {name: jax.tree.map(_untraced, value) for name, value in call.arguments.items()}
        return replace(call, arguments=arguments), pins

    def run_plain(self, implementation: Implementation, given: dict[str, Any]) -> Any:
        """Call a function that has the operation's own signature with what the caller gave."""
        own = {name: value for name, value in given.items() if name not in ("platform", "backend")}
        accepted = inspect.signature(implementation.kernel).parameters
        for name in ("fwd_params", "bwd_params"):
            if name not in accepted:
                own.pop(name, None)
        required = [own.pop(name) for name, default in self.defaults.items() if default is inspect.Parameter.empty]
        return implementation.kernel(*required, **own)

    def given(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments that differ from their defaults, in the order of the signature."""
        return {
            name: arguments[name]
            for name, default in self.defaults.items()
            if arguments.get(name) is not None and (hasattr(arguments[name], "shape") or arguments[name] != default)
        }


def _abstract(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _untraced(value: Any) -> Any:
    return _abstract(value) if isinstance(value, jax.core.Tracer) else value


def types_of(statics: tuple) -> tuple:
    """Part of a key beside the values, for 1 == True: what one is refused for must not be held against the other."""
    return tuple([tuple(map(type, s)) if type(s) is tuple else type(s) for s in statics])


def _explicit_mesh(array: Any) -> Any:
    """The mesh over which an array's type says how it is partitioned, if it says so."""
    sharding = getattr(jax.typeof(array), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return mesh if mesh is not None and AxisType.Explicit in (mesh.axis_types or ()) else None
