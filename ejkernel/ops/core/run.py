"""Running a decided call: one custom gradient for the operation, vmap folded into the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from ejkernel.contracts.call import Call
from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.registry import Choice
from ejkernel.errors import UnsupportedError
from ejkernel.kernels.common.varying import vary_over, varying_axes
from ejkernel.ops.config import chain
from ejkernel.ops.core import partition, select

if TYPE_CHECKING:
    from ejkernel.ops.core.operation import Operation


@contextlib.contextmanager
def usual_promotion() -> Iterator[None]:
    """Kernels mix ranks and dtypes as numpy does, whatever the caller has forbidden in their own code."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@dataclass(frozen=True)
class Decision:
    """Everything that a choice depends on but the gradients, which JAX tells later. Holds no tracers: it outlives a trace."""

    operation: Operation
    call: Call
    device: DeviceInfo
    pins: select.Pins

    def choose(self, gradients: frozenset[str] = frozenset(), forward: Choice | None = None) -> Choice:
        """The implementation for a forward; for a backward if the forward's is given."""
        direction = "forward" if forward is None else "backward"
        return select.decide(self.call, self.device, self.pins, gradients, direction, forward).require()

    def prepared(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The kernels' arrays, all varying over the same axes of a mesh, as a custom gradient needs them."""
        prepared = self.operation.prepare(arguments, self.call.spec)
        axes = varying_axes(*jax.tree.leaves(prepared))
        return jax.tree.map(lambda array: vary_over(array, axes), prepared)


def execute(decision: Decision, others: dict[str, Any], traced: dict[str, Any]) -> Any:
    """Prepare the arrays, choose an implementation and run it; ``traced`` and ``others`` are the call's arguments."""
    operation, arguments = decision.operation, {**others, **traced}
    prepared = decision.prepared(arguments)
    decision = replace(decision, call=replace(decision.call, shapes=operation.shapes(prepared, decision.call.spec)))
    chosen = decision.choose()
    implementation = chosen.implementation
    if not implementation.whole:
        return operation.finish(arguments, *_run(decision, chosen, prepared))
    floats = {name: traced[name] for name in operation.gradients if name in traced}
    if all(name in implementation.support.gradients for name in floats):
        return _run_whole(decision, chosen, arguments, prepared)
    rest = {name: array for name, array in traced.items() if name not in floats}
    return _run_guarded(decision, chosen, others, floats, rest)


def _run_whole(
    decision: Decision, chosen: Choice, arguments: dict[str, Any], prepared: dict[str, Any] | None = None
) -> Any:
    """A plain function, or an object without a backward: JAX differentiates and vmaps it."""
    operation, implementation = decision.operation, chosen.implementation
    if implementation.plain:
        return operation.run_plain(implementation, operation.given(arguments))
    prepared = decision.prepared(arguments) if prepared is None else prepared
    return operation.finish(arguments, *operation.run_forward(chosen, prepared, decision.call.spec))


def _run_guarded(
    decision: Decision, chosen: Choice, others: dict[str, Any], floats: dict[str, Any], rest: dict[str, Any]
) -> Any:
    """A whole implementation that lacks gradients makes way where one of those is wanted."""

    @jax.custom_vjp
    def run(floats, rest):
        return _run_whole(decision, chosen, {**others, **floats, **rest})

    def forward(floats, rest):
        wanted = _perturbed(floats)
        floats, rest = _values(floats), _values(rest)
        able = decision.choose(wanted)

        def again(floats):
            arguments = {**others, **floats, **rest}
            if able.implementation.whole:
                return _run_whole(decision, able, arguments)
            return decision.operation.finish(arguments, *_run(decision, able, decision.prepared(arguments)))

        return jax.vjp(again, floats)

    def backward(pull, cotangents):
        return *pull(jax.tree.map(_materialised, cotangents, is_leaf=_is_symbolic_zero)), None

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(floats, rest)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Backward:
    """What the backward pass needs to know, beside arrays."""

    chosen: Choice
    wanted: frozenset[str]


def _run(decision: Decision, chosen: Choice, arrays: dict[str, Any]) -> tuple:
    """Forward and backward under the residual contract."""
    gradients = decision.operation.gradients
    differentiable = {name: array for name, array in arrays.items() if name in gradients}
    others = {name: array for name, array in arrays.items() if name not in gradients}
    # JAX keeps the functions below for as long as what they are traced into: they close over names, never over arrays.
    names = tuple(differentiable)

    @jax.custom_vjp
    def run(differentiable, others):
        return _forward(decision, chosen, {**differentiable, **others})

    def forward(differentiable, others):
        wanted = _perturbed(differentiable)
        arrays = {**_values(differentiable), **_values(others)}
        back = _Backward(decision.choose(wanted, forward=chosen), wanted)
        result = _once(decision, lambda arrays: _forward(decision, chosen, arrays))(arrays)
        return result, (arrays, result, back)

    def backward(residuals, cotangents):
        arrays, result, back = residuals
        cotangents = jax.tree.map(_materialised, cotangents, result, is_leaf=_is_symbolic_zero)
        rest = (*result, *cotangents)
        grads = _once(decision, lambda arrays, rest: _backward(decision, back, arrays, rest))(arrays, rest)
        return {name: grads.get(name) for name in names}, None

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


def _forward(decision: Decision, chosen: Choice, arrays: dict[str, Any]) -> tuple:
    operation = decision.operation

    def run(chosen, arrays):
        return operation.run_forward(chosen, arrays, decision.call.spec)

    @custom_vmap
    def forward(arrays):
        return _partitioned(decision, chosen, None, run, arrays)

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

    def run(chosen, arrays, *rest):
        grads = operation.run_backward(chosen, back.wanted, arrays, decision.call.spec, *rest)
        missing = back.wanted - grads.keys()
        if missing:
            raise UnsupportedError(
                f"{decision.call.operation}: {implementation} declares gradients for "
                f"{', '.join(sorted(missing))} in its Support, but its backward returned none."
            )
        return {name: grads[name] for name in back.wanted}

    @custom_vmap
    def backward(everything):
        return _partitioned(decision, back.chosen, back.wanted, run, everything["arrays"], *everything["rest"])

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


def _partitioned(
    decision: Decision, chosen: Choice, wanted: frozenset[str] | None, run: Callable, arrays: dict[str, Any], *rest: Any
) -> Any:
    """``run(chosen, arrays, *rest)``, by each device on its own part where a mesh spreads arrays; ``wanted``: in a backward."""
    operation, call = decision.operation, decision.call
    direction = "forward" if wanted is None else "backward"
    if not partition.applies(operation, chosen, arrays, direction):
        with usual_promotion():
            return run(chosen, arrays, *rest)
    named, pair = operation.axes(arrays, call.spec)
    named = {name: named.get(name, "b") for name in arrays}
    names = (named, *pair, *pair) if rest else (named,)
    # The compiler may come for a device's part when the caller's settings no longer hold.
    precision = jax.config.jax_default_matmul_precision

    def whole(everything):
        with usual_promotion():
            return run(chosen, *everything)

    def part(everything, index):
        with usual_promotion(), jax.default_matmul_precision(precision):
            arrays = operation.localise(everything[0], call.spec, index)
            own = replace(call, shapes=operation.shapes(arrays, call.spec))
            return run(chain.for_part(own, chosen, direction), arrays, *everything[1:])

    results = pair if wanted is None else {name: named[name] for name in wanted}
    return partition.partitioned(whole, part, (arrays, *rest), names, results)


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
