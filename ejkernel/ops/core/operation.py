"""An operation: bind the arguments, select an implementation, run it under one custom gradient.

Everything that can be decided without values is decided while JAX traces, and JAX's own cache holds the result: an eager
call is one dictionary look-up and one call of a jitted function.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from ejkernel.errors import InvalidInputError
from ejkernel.kernels.varying import vary_over, varying_axes
from ejkernel.ops.core import device as devices
from ejkernel.ops.core import select
from ejkernel.ops.core.context import surroundings
from ejkernel.ops.core.registry import Implementation, kernel_registry
from ejkernel.ops.core.support import Backend, Platform, as_member
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams

CACHED_CALLS = 4096
_REST = ("out", "lse", "dout", "dlse")


@dataclass(frozen=True)
class Cost:
    """What a call must do at least: floating-point operations and bytes moved, forward and backward."""

    flops: int
    bytes: int
    backward_flops: int
    backward_bytes: int


@dataclass(frozen=True)
class Call:
    """A bound call: what is asked, free of values.

    Attributes:
        operation: its name.
        arguments: what the caller passed, by name, defaults left out; arrays may be abstract.
        spec: everything static that a kernel needs, frozen and hashable.
        dtype: of the main arrays.
        head_dims: for the head dims that an implementation may refuse.
        features: the features in use, each with the words that name it in a reason.
        bucket: what tells apart calls that deserve tuning apart.
        shapes: the prepared arrays, abstract.
        fwd_params, bwd_params: what the call itself asked for.
    """

    operation: str
    arguments: dict[str, Any]
    spec: Any = None
    dtype: str = ""
    head_dims: tuple[int, ...] = ()
    features: dict[str, str] = field(default_factory=dict)
    bucket: tuple[tuple[str, Any], ...] = ()
    shapes: dict[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None

    def __str__(self) -> str:
        return f"{self.operation}({', '.join(_words(name, value) for name, value in self.arguments.items())})"


def _words(name: str, value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{name} {array_words(value)}"
    return name if value is True else f"{name}={value!r}"


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "bool": "bool"}


def array_words(value: Any) -> str:
    """``bf16[2,8192,32,256]``."""
    name = jnp.dtype(value.dtype).name
    letters = name.rstrip("0123456789")
    return f"{_SHORT.get(letters, letters)}{name[len(letters) :]}[{','.join(map(str, value.shape))}]"


class Operation:
    """What an operation's file declares; see ``ejkernel.ops.flash_attention`` for one in full.

    Subclasses set the class attributes and implement ``bind``, ``prepare``, ``finish`` and ``cost``.

    Attributes:
        name: of the algorithm in the registry.
        arrays: the arguments that may be traced, in the order in which ``__call__`` gets them.
        statics: the others.
        features: every feature that an implementation may have, with a sentence for the docs.
        gradients: the arguments that can have gradients.
        shareable: the prepared arrays that may have a batch axis of size 1 beside a larger batch.
    """

    name: str
    arrays: tuple[str, ...]
    statics: tuple[str, ...]
    features: ClassVar[dict[str, str]]
    gradients: tuple[str, ...]
    shareable: frozenset[str] = frozenset()

    def __init__(self, function: Callable):
        self.function = function
        signature = inspect.signature(function)
        self.defaults = {name: p.default for name, p in signature.parameters.items()}
        self.signature = signature
        self._jitted: dict[Any, Callable] = {}

    def bind(self, arguments: dict[str, Any]) -> Call:
        """Check every argument and say what is asked. Uses shapes and dtypes alone."""
        raise NotImplementedError

    def check_values(self, arguments: dict[str, Any]) -> None:
        """Refuse wrong values of arrays that are concrete; most operations have none to check."""

    def prepare(self, arguments: dict[str, Any], spec: Any) -> dict[str, Array]:
        """The arrays as kernels get them: canonical shapes, a batch axis (whole, or of size 1) in front of each."""
        raise NotImplementedError

    def empty(self, arguments: dict[str, Any]) -> Any:
        """The result if the call has no work at all, else None."""

    def finish(self, arguments: dict[str, Any], out: Any, lse: Any) -> Any:
        """The caller's result from a kernel's."""
        raise NotImplementedError

    def cost(self, call: Call) -> Cost:
        """Operations and bytes that the call needs at least."""
        raise NotImplementedError

    def sample(self, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        """Prepared arrays with plausible values, for timing."""
        raise NotImplementedError

    def __call__(self, arrays: tuple, statics: tuple) -> Any:
        """Run a call; ``arrays`` and ``statics`` in the order of the class attributes."""
        first = arrays[0]
        device = None
        if isinstance(first, jax.Array) and not isinstance(first, jax.core.Tracer):
            device = next(iter(first.devices()))
        try:
            jitted = self._jitted.get((statics, device, kernel_registry.generation, _autotune_asked()))
        except TypeError:  # an unhashable static: bind says which
            return self(arrays, self._hashable(statics))
        if jitted is None:
            jitted = self._make(statics, device)
        self.check_values(dict(zip(self.arrays, arrays, strict=True)))
        return jitted(arrays)

    def _make(self, statics: tuple, device: Any) -> Callable:
        if len(self._jitted) >= CACHED_CALLS:
            self._jitted.clear()

        def traced(arrays):
            return self._trace(arrays, statics, device)

        traced.__name__ = traced.__qualname__ = self.name
        key = (statics, device, kernel_registry.generation, _autotune_asked())
        jitted = self._jitted[key] = jax.jit(traced)
        return jitted

    def _check_params(self, arguments: dict[str, Any]) -> None:
        for name, cls in (("fwd_params", FwdParams), ("bwd_params", BwdParams)):
            given = arguments.get(name)
            if given is not None and not isinstance(given, cls):
                raise InvalidInputError(f"{self.name}: {name} is {given!r}; expected {cls.__name__}(…) or None.")

    def _hashable(self, statics: tuple) -> tuple:
        self._check_params(dict(zip(self.statics, statics, strict=True)))
        fixed = tuple(tuple(s) if isinstance(s, list) else s for s in statics)
        for name, value in zip(self.statics, fixed, strict=True):
            try:
                hash(value)
            except TypeError:
                raise InvalidInputError(
                    f"{self.name}: {name} is {_words('', value).strip('= ')}; expected a plain Python value, "
                    "known when the call is traced."
                ) from None
        return fixed

    def _trace(self, arrays: tuple, statics: tuple, device: Any) -> Any:
        arguments = dict(zip((*self.arrays, *self.statics), (*arrays, *statics), strict=True))
        call, pins = self.bound(arguments)
        empty = self.empty(arguments)
        if empty is not None:
            return empty
        info = surroundings().target or devices.describe(device)
        return self._run_chosen(select.decide(call, info, pins).require(), call, info, pins, arguments)

    def _run_chosen(
        self, chosen: select.Choice, call: Call, device: devices.DeviceInfo, pins: select.Pins, arguments
    ) -> Any:
        implementation = chosen.implementation
        if not implementation.plain:
            prepared = self.prepare(arguments, call.spec)
            axes = varying_axes(*prepared.values())
            prepared = {name: vary_over(array, axes) for name, array in prepared.items()}
            return self.finish(arguments, *_run(self, call, device, pins, prepared))
        floats = {name: call.arguments[name] for name in self.gradients if name in call.arguments}
        if all(name in implementation.support.gradients for name in floats):
            return self.run_plain(implementation, call.arguments)
        return self._run_guarded(implementation, call, device, pins, arguments, floats)

    def _run_guarded(self, implementation, call, device, pins, arguments, floats: dict[str, Array]) -> Any:
        """A plain function that lacks gradients: where one of those is wanted, another implementation takes the call."""
        rest = {name: x for name, x in arguments.items() if name not in floats and isinstance(x, Array)}

        @jax.custom_vjp
        def run(floats, rest):
            return self.run_plain(implementation, {**call.arguments, **floats, **rest})

        def forward(floats, rest):
            wanted = frozenset(name for name, primal in floats.items() if primal.perturbed)
            floats, rest = ({name: primal.value for name, primal in part.items()} for part in (floats, rest))
            chosen = select.decide(call, device, pins, gradients=wanted).require()
            inner = {**arguments, **rest}
            asked = dataclasses.replace(call, arguments={**call.arguments, **rest})
            if chosen.implementation == implementation:
                return jax.vjp(lambda f: self.run_plain(implementation, {**asked.arguments, **f}), floats)
            return jax.vjp(lambda f: self._run_chosen(chosen, asked, device, pins, {**inner, **f}), floats)

        def backward(pull, cotangents):
            return *pull(jax.tree.map(_materialised, cotangents, is_leaf=_is_symbolic_zero)), None

        run.defvjp(forward, backward, symbolic_zeros=True)
        return run(floats, rest)

    def bound(self, arguments: dict[str, Any]) -> tuple[Call, select.Pins]:
        """The call and the implementation it is pinned to, from all arguments by name."""
        pins = select.Pins(
            as_member(arguments["platform"], Platform, f"{self.name}: platform"),
            as_member(arguments["backend"], Backend, f"{self.name}: backend"),
        )
        self._check_params(arguments)
        return self.bind(arguments), pins

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
            if arguments[name] is not None and (hasattr(arguments[name], "shape") or arguments[name] != default)
        }


def _autotune_asked() -> bool:
    return os.environ.get("EJKERNEL_AUTOTUNE", "") not in ("", "0")


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Backward:
    """What the backward pass needs to know, beside arrays."""

    chosen: select.Choice
    wanted: frozenset[str]


def _run(op: Operation, call: Call, device: devices.DeviceInfo, pins: select.Pins, arrays: dict[str, Array]) -> tuple:
    """Forward under the operation's custom gradient; the implementations may depend on which gradients are wanted."""
    differentiable = {name: array for name, array in arrays.items() if name in op.gradients}
    others = {name: array for name, array in arrays.items() if name not in op.gradients}

    @jax.custom_vjp
    def run(differentiable, others):
        chosen = select.decide(call, device, pins).require()
        return _forward(op, chosen, call.spec, {**differentiable, **others})

    def forward(differentiable, others):
        wanted = frozenset(name for name, primal in differentiable.items() if primal.perturbed)
        arrays = {name: primal.value for name, primal in differentiable.items()}
        others = {name: primal.value for name, primal in others.items()}
        chosen = select.decide(call, device, pins, gradients=wanted).require()
        if chosen.implementation.whole:
            result, pull = jax.vjp(
                lambda a: chosen.implementation.kernel.forward({**a, **others}, call.spec, chosen.params), arrays
            )
            return result, (pull, result, None)
        back = select.decide(call, device, pins, gradients=wanted, direction="backward", forward=chosen).require()
        result = _forward(op, chosen, call.spec, {**arrays, **others})
        return result, ({**arrays, **others}, result, _Backward(back, wanted))

    def backward(residuals, cotangents):
        saved, result, back = residuals
        dout, dlse = jax.tree.map(_materialised, cotangents, result, is_leaf=_is_symbolic_zero)
        if back is None:
            return *saved((dout, dlse)), None
        grads = _backward(back.chosen, call.spec, back.wanted, saved, (*result, dout, dlse))
        return {name: grads.get(name) if name in back.wanted else None for name in differentiable}, None

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(differentiable, others)


def _is_symbolic_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, SymbolicZero)


def _materialised(cotangent: Any, primal: Array | None = None) -> Array:
    if not _is_symbolic_zero(cotangent):
        return cotangent
    zeros = jnp.zeros(cotangent.shape, cotangent.dtype)
    return zeros if primal is None else vary_over(zeros, varying_axes(primal))


def _forward(op: Operation, chosen: select.Choice, spec: Any, arrays: dict[str, Array]) -> tuple:
    kernel = chosen.implementation.kernel
    if chosen.implementation.whole:
        return kernel.forward(arrays, spec, chosen.params)

    @custom_vmap
    def forward(arrays):
        return kernel.forward(arrays, spec, chosen.params)

    @forward.def_vmap
    def folded(axis_size, batched, arrays):
        arrays = fold(axis_size, batched[0], arrays, op.shareable)
        result = forward(arrays)
        return jax.tree.map(lambda x: unfold(axis_size, x), result), jax.tree.map(lambda _: True, result)

    return forward(arrays)


def _backward(
    chosen: select.Choice, spec: Any, wanted: frozenset[str], arrays: dict[str, Array], rest: tuple
) -> dict[str, Array]:
    run = chosen.implementation.backward(wanted)

    @custom_vmap
    def backward(arrays, rest):
        return run(arrays, spec, chosen.params, *rest)

    @backward.def_vmap
    def folded(axis_size, batched, arrays, rest):
        # Every array becomes one an example, so that each example's gradients come back apart.
        shared = {name for name, array in arrays.items() if array.shape[int(batched[0][name])] == 1}
        names = dict(zip(_REST, rest, strict=True)), dict(zip(_REST, batched[1], strict=True))
        folded = fold(axis_size, {**batched[0], **names[1]}, {**arrays, **names[0]})
        arrays, rest = {name: folded[name] for name in arrays}, tuple(folded[name] for name in _REST)
        grads = {name: unfold(axis_size, grad) for name, grad in backward(arrays, rest).items()}
        grads = {name: g.sum(1, keepdims=True) if name in shared else g for name, g in grads.items()}
        return grads, jax.tree.map(lambda _: True, grads)

    return backward(arrays, rest)


def fold(
    axis_size: int, batched: dict[str, bool], arrays: dict[str, Array], shareable: frozenset[str] = frozenset()
) -> dict[str, Array]:
    """Merge a vmapped axis into the batch axis of every array.

    A shareable array that is neither vmapped nor different from one batch entry to the next stays as it is.
    """
    batch = max(array.shape[int(batched[name])] for name, array in arrays.items())

    def merge(name: str, array: Array) -> Array:
        if not batched[name]:
            if name in shareable and array.shape[0] == 1:
                return array
            array = jnp.broadcast_to(array[None], (axis_size, *array.shape))
        if array.shape[1] != batch:
            array = jnp.broadcast_to(array, (axis_size, batch, *array.shape[2:]))
        return array.reshape(axis_size * batch, *array.shape[2:])

    return {name: merge(name, array) for name, array in arrays.items()}


def unfold(axis_size: int, array: Array) -> Array:
    """The vmapped axis back in front."""
    return array.reshape(axis_size, array.shape[0] // axis_size, *array.shape[1:])


def pinned(algorithm: str, platform: Platform | None, backend: Backend | None) -> Callable:
    """An operation with ``platform`` and ``backend`` filled in, or a user's algorithm."""
    operation = kernel_registry.operation(algorithm)
    if operation is not None:
        return functools.wraps(operation.function)(
            functools.partial(operation.function, platform=platform, backend=backend)
        )

    def run(*args, **kwargs):
        arrays = [x for x in jax.tree.leaves((args, kwargs)) if hasattr(x, "shape")]
        device = next((next(iter(x.devices())) for x in arrays if _is_concrete(x)), None)
        info = surroundings().target or devices.describe(device)
        floats = [jnp.dtype(x.dtype).name for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
        call = Call(algorithm, {**{f"{i}": x for i, x in enumerate(args)}, **kwargs}, dtype=floats[0] if floats else "")
        return (
            select.decide(call, info, select.Pins(platform, backend)).require().implementation.kernel(*args, **kwargs)
        )

    run.__name__ = run.__qualname__ = algorithm
    return run


def _is_concrete(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
