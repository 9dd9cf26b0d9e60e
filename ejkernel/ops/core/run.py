"""Running a decided call: one custom gradient for the operation, vmap folded into the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from ejkernel.errors import UnsupportedError
from ejkernel.kernels.varying import vary_over, varying_axes
from ejkernel.ops.core import select
from ejkernel.ops.core.device import DeviceInfo

if TYPE_CHECKING:
    from ejkernel.ops.core.operation import Call, Operation

_REST = ("out", "lse", "dout", "dlse")


@contextlib.contextmanager
def usual_promotion() -> Iterator[None]:
    """Kernels mix ranks and dtypes as numpy does, whatever the caller has forbidden in their own code."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@dataclass(frozen=True)
class Decision:
    """Everything that a choice depends on but the gradients, which JAX tells later."""

    operation: Operation
    call: Call
    device: DeviceInfo
    pins: select.Pins

    def choose(self, gradients: frozenset[str] = frozenset(), forward: select.Choice | None = None) -> select.Choice:
        """The implementation for a forward; for a backward if the forward's is given."""
        direction = "forward" if forward is None else "backward"
        return select.decide(self.call, self.device, self.pins, gradients, direction, forward).require()


def execute(decision: Decision, chosen: select.Choice, arguments: dict[str, Any]) -> Any:
    """Run a call with the chosen implementation, or with another one where that lacks a gradient that is wanted."""
    operation, implementation = decision.operation, chosen.implementation
    if not implementation.whole:
        return operation.finish(arguments, *_run(decision, _prepare(decision, arguments)))
    floats = {name: arguments[name] for name in operation.gradients if arguments[name] is not None}
    if all(name in implementation.support.gradients for name in floats):
        return _run_whole(decision, chosen, arguments)
    return _run_guarded(decision, chosen, arguments, floats)


def _prepare(decision: Decision, arguments: dict[str, Any]) -> dict[str, Array]:
    """The kernels' arrays, all varying over the same axes of a mesh, as a custom gradient needs them."""
    prepared = decision.operation.prepare(arguments, decision.call.spec)
    axes = varying_axes(*prepared.values())
    return {name: vary_over(array, axes) for name, array in prepared.items()}


def _run_whole(decision: Decision, chosen: select.Choice, arguments: dict[str, Any]) -> Any:
    """A plain function, or an object without a backward: JAX differentiates and vmaps it."""
    operation, implementation = decision.operation, chosen.implementation
    if implementation.plain:
        return operation.run_plain(implementation, operation.given(arguments))
    result = implementation.kernel.forward(_prepare(decision, arguments), decision.call.spec, chosen.params)
    return operation.finish(arguments, *result)


def _run_guarded(decision: Decision, chosen: select.Choice, arguments: dict[str, Any], floats: dict[str, Array]) -> Any:
    """A whole implementation that lacks gradients makes way where one of those is wanted."""
    others = {name: arguments[name] for name in decision.operation.arrays if name not in floats}

    @jax.custom_vjp
    def run(floats, others):
        return _run_whole(decision, chosen, {**arguments, **floats, **others})

    def forward(floats, others):
        wanted = _perturbed(floats)
        floats, others = _values(floats), _values(others)
        able = decision.choose(wanted)
        runner = _run_whole if able.implementation.whole else execute
        return jax.vjp(lambda floats: runner(decision, able, {**arguments, **floats, **others}), floats)

    def backward(pull, cotangents):
        return *pull(jax.tree.map(_materialised, cotangents, is_leaf=_is_symbolic_zero)), None

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(floats, others)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Backward:
    """What the backward pass needs to know, beside arrays."""

    chosen: select.Choice
    wanted: frozenset[str]


def _run(decision: Decision, arrays: dict[str, Array]) -> tuple:
    """Forward and backward under the residual contract."""
    gradients = decision.operation.gradients
    differentiable = {name: array for name, array in arrays.items() if name in gradients}
    others = {name: array for name, array in arrays.items() if name not in gradients}

    @jax.custom_vjp
    def run(differentiable, others):
        return _forward(decision, decision.choose(), {**differentiable, **others})

    def forward(differentiable, others):
        wanted = _perturbed(differentiable)
        arrays = {**_values(differentiable), **_values(others)}
        chosen = decision.choose(wanted)
        back = _Backward(decision.choose(wanted, forward=chosen), wanted)
        result = _once(decision, lambda arrays: _forward(decision, chosen, arrays))(arrays)
        return result, (arrays, result, back)

    def backward(residuals, cotangents):
        arrays, result, back = residuals
        cotangents = jax.tree.map(_materialised, cotangents, result, is_leaf=_is_symbolic_zero)
        rest = (*result, *cotangents)
        grads = _once(decision, lambda arrays, rest: _backward(decision, back, arrays, rest))(arrays, rest)
        return {name: grads[name] if name in back.wanted else None for name in differentiable}, None

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(differentiable, others)


def _perturbed(primals: dict[str, Any]) -> frozenset[str]:
    return frozenset(name for name, primal in primals.items() if primal is not None and primal.perturbed)


def _values(primals: dict[str, Any]) -> dict[str, Any]:
    return {name: None if primal is None else primal.value for name, primal in primals.items()}


def _is_symbolic_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, SymbolicZero)


def _materialised(cotangent: Any, primal: Array | None = None) -> Array:
    if not _is_symbolic_zero(cotangent):
        return cotangent
    zeros = jnp.zeros(cotangent.shape, cotangent.dtype)
    return zeros if primal is None else vary_over(zeros, varying_axes(primal))


def _forward(decision: Decision, chosen: select.Choice, arrays: dict[str, Array]) -> tuple:
    @custom_vmap
    def forward(arrays):
        with usual_promotion():
            return chosen.implementation.kernel.forward(arrays, decision.call.spec, chosen.params)

    @forward.def_vmap
    def folded(axis_size, batched, arrays):
        (batched,) = batched
        if axis_size == 0:
            result = _empty(forward, batched, arrays)
        else:
            result = forward(fold(axis_size, batched, arrays, decision.operation.shareable))
            result = jax.tree.map(lambda x: unfold(axis_size, x), result)
        return result, jax.tree.map(lambda _: True, result)

    return forward(arrays)


def _backward(decision: Decision, back: _Backward, arrays: dict[str, Array], rest: tuple) -> dict[str, Array]:
    kernel_backward = back.chosen.implementation.backward(back.wanted)

    @custom_vmap
    def backward(arrays, rest):
        with usual_promotion():
            grads = kernel_backward(arrays, decision.call.spec, back.chosen.params, *rest)
        missing = back.wanted - grads.keys()
        if missing:
            raise UnsupportedError(
                f"{decision.call.operation}: {back.chosen.implementation} declares gradients for "
                f"{', '.join(sorted(missing))} in its Support, but its backward returned none."
            )
        return grads

    @backward.def_vmap
    def folded(axis_size, batched, arrays, rest):
        names, flags = dict(zip(_REST, rest, strict=True)), dict(zip(_REST, batched[1], strict=True))
        if axis_size == 0:
            grads = _empty(lambda a: backward(*_split(a, arrays)), {**batched[0], **flags}, {**arrays, **names})
            return grads, jax.tree.map(lambda _: True, grads)
        # Every array becomes one an example, so that each example's gradients come back apart.
        shared = {name for name, array in arrays.items() if array.shape[int(batched[0][name])] == 1}
        merged = fold(axis_size, {**batched[0], **flags}, {**arrays, **names})
        grads = {name: unfold(axis_size, grad) for name, grad in backward(*_split(merged, arrays)).items()}
        grads = {name: g.sum(1, keepdims=True) if name in shared else g for name, g in grads.items()}
        return grads, jax.tree.map(lambda _: True, grads)

    return backward(arrays, rest)


def _once(decision: Decision, run: Callable) -> Callable:
    """What may not be differentiated again, with an error that says so."""
    once = jax.custom_jvp(run)

    @once.defjvp
    def refuse(*_):
        raise UnsupportedError(
            f"{decision.call.operation}: second derivatives are not supported; differentiate a plain formula instead."
        )

    return once


def _split(merged: dict[str, Array], arrays: dict[str, Array]) -> tuple[dict[str, Array], tuple]:
    return {name: merged[name] for name in arrays}, tuple(merged[name] for name in _REST)


def _empty(run: Callable, batched: dict[str, bool], arrays: dict[str, Array]) -> Any:
    """The result of vmapping over nothing."""
    one = {n: jax.ShapeDtypeStruct(x.shape[int(batched[n]) :], x.dtype) for n, x in arrays.items()}
    return jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), jax.eval_shape(run, one))


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
