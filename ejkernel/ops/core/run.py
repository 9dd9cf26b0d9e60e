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

from ejkernel.contracts.call import Call
from ejkernel.contracts.device import DeviceInfo
from ejkernel.errors import UnsupportedError
from ejkernel.kernels.common.varying import vary_over, varying_axes
from ejkernel.ops.core import select

if TYPE_CHECKING:
    from ejkernel.ops.core.operation import Operation


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


def _prepare(decision: Decision, arguments: dict[str, Any]) -> dict[str, Any]:
    """The kernels' arrays, all varying over the same axes of a mesh, as a custom gradient needs them."""
    prepared = decision.operation.prepare(arguments, decision.call.spec)
    axes = varying_axes(*jax.tree.leaves(prepared))
    return jax.tree.map(lambda array: vary_over(array, axes), prepared)


def _run_whole(decision: Decision, chosen: select.Choice, arguments: dict[str, Any]) -> Any:
    """A plain function, or an object without a backward: JAX differentiates and vmaps it."""
    operation, implementation = decision.operation, chosen.implementation
    if implementation.plain:
        return operation.run_plain(implementation, operation.given(arguments))
    result = operation.run_forward(implementation, _prepare(decision, arguments), decision.call.spec, chosen.params)
    return operation.finish(arguments, *result)


def _run_guarded(decision: Decision, chosen: select.Choice, arguments: dict[str, Any], floats: dict[str, Any]) -> Any:
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


def _run(decision: Decision, arrays: dict[str, Any]) -> tuple:
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
        return {name: grads.get(name) for name in differentiable}, None

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(differentiable, others)


def _perturbed(primals: dict[str, Any]) -> frozenset[str]:
    return frozenset(name for name, tree in primals.items() if any(leaf.perturbed for leaf in jax.tree.leaves(tree)))


def _values(primals: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda primal: primal.value, primals)


def _is_symbolic_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, SymbolicZero)


def _materialised(cotangent: Any, primal: Array | None = None) -> Array:
    if not _is_symbolic_zero(cotangent):
        return cotangent
    zeros = jnp.zeros(cotangent.shape, cotangent.dtype)
    return zeros if primal is None else vary_over(zeros, varying_axes(primal))


def _forward(decision: Decision, chosen: select.Choice, arrays: dict[str, Any]) -> tuple:
    operation = decision.operation

    @custom_vmap
    def forward(arrays):
        with usual_promotion():
            return operation.run_forward(chosen.implementation, arrays, decision.call.spec, chosen.params)

    @forward.def_vmap
    def vmapped(axis_size, batched, arrays):
        (batched,) = batched
        if axis_size == 0:
            result = _empty(forward, batched, arrays)
        elif operation.folds(frozenset(name for name in arrays if any(jax.tree.leaves(batched[name])))):
            result = forward(fold(axis_size, batched, arrays, operation.shareable))
            result = jax.tree.map(lambda x: unfold(axis_size, x), result)
        else:
            result = _loop(forward, batched, arrays)
        return result, jax.tree.map(lambda _: True, result)

    return forward(arrays)


def _backward(decision: Decision, back: _Backward, arrays: dict[str, Any], rest: tuple) -> dict[str, Any]:
    """The wanted gradients, from the arrays and ``rest``: the forward's pair and its cotangents."""
    operation, implementation = decision.operation, back.chosen.implementation

    @custom_vmap
    def backward(everything):
        arrays, rest = everything["arrays"], everything["rest"]
        with usual_promotion():
            grads = operation.run_backward(
                implementation, back.wanted, arrays, decision.call.spec, back.chosen.params, *rest
            )
        missing = back.wanted - grads.keys()
        if missing:
            raise UnsupportedError(
                f"{decision.call.operation}: {implementation} declares gradients for "
                f"{', '.join(sorted(missing))} in its Support, but its backward returned none."
            )
        return {name: grads[name] for name in back.wanted}

    @backward.def_vmap
    def vmapped(axis_size, batched, everything):
        (batched,) = batched
        arrays, rest = everything["arrays"], everything["rest"]
        involved = {name for name in arrays if any(jax.tree.leaves(batched["arrays"][name]))} | back.wanted
        if axis_size == 0:
            grads = _empty(backward, batched, everything)
        elif not operation.folds(frozenset(involved)):
            grads = _loop(backward, batched, everything)
        else:
            # What has a gradient becomes one an example, so that each example's gradients come back apart.
            flags = {**batched["arrays"], "": batched["rest"]}
            merged = fold(axis_size, flags, {**arrays, "": rest}, operation.shareable - back.wanted)
            merged_rest = merged.pop("")
            grads = backward({"arrays": merged, "rest": merged_rest})
            grads = {
                name: jax.tree.map(
                    lambda grad, array, flag: _per_example(axis_size, grad, array.shape[int(flag)]),
                    grad,
                    arrays[name],
                    batched["arrays"][name],
                )
                for name, grad in grads.items()
            }
        return grads, jax.tree.map(lambda _: True, grads)

    return backward({"arrays": arrays, "rest": rest})


def _per_example(axis_size: int, grad: Array, batch: int) -> Array:
    """A gradient with the vmapped axis in front, summed over the batch entries that shared the array."""
    grad = unfold(axis_size, grad)
    return grad.sum(1, keepdims=True) if batch == 1 else grad


def _once(decision: Decision, run: Callable) -> Callable:
    """What may not be differentiated again, with an error that says so."""
    once = jax.custom_jvp(run)

    @once.defjvp
    def refuse(*_):
        raise UnsupportedError(
            f"{decision.call.operation}: second derivatives are not supported; differentiate a plain formula instead."
        )

    return once


def _empty(run: Callable, batched: Any, arrays: Any) -> Any:
    """The result of vmapping over nothing."""
    one = jax.tree.map(lambda x, flag: jax.ShapeDtypeStruct(x.shape[int(flag) :], x.dtype), arrays, batched)
    return jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), jax.eval_shape(run, one))


def _loop(run: Callable, batched: Any, arrays: Any) -> Any:
    """Vmapping as a loop, for what does not fold into a batch."""
    leaves, tree = jax.tree.flatten(arrays)
    flags = jax.tree.leaves(batched)

    def one(mapped):
        mapped = iter(mapped)
        return run(
            jax.tree.unflatten(tree, [next(mapped) if flag else x for x, flag in zip(leaves, flags, strict=True)])
        )

    return jax.lax.map(one, [x for x, flag in zip(leaves, flags, strict=True) if flag])


def fold(
    axis_size: int, batched: dict[str, Any], arrays: dict[str, Any], shareable: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Merge a vmapped axis into the batch axis of every array.

    A shareable array that is neither vmapped nor different from one batch entry to the next stays as it is.
    """
    batch = max(jax.tree.leaves(jax.tree.map(lambda x, flag: x.shape[int(flag)], arrays, batched)))

    def merge(name: str, array: Array, flag: bool) -> Array:
        if not flag:
            if name in shareable and array.shape[0] == 1:
                return array
            array = jnp.broadcast_to(array[None], (axis_size, *array.shape))
        if array.shape[1] != batch:
            array = jnp.broadcast_to(array, (axis_size, batch, *array.shape[2:]))
        return array.reshape(axis_size * batch, *array.shape[2:])

    return {
        name: jax.tree.map(lambda array, flag, name=name: merge(name, array, flag), tree, batched[name])
        for name, tree in arrays.items()
    }


def unfold(axis_size: int, array: Array) -> Array:
    """The vmapped axis back in front."""
    return array.reshape(axis_size, array.shape[0] // axis_size, *array.shape[1:])
