"""Calls spread over a mesh by ``jit`` alone: each device runs the kernel on its own part of the arrays.

The compiler cannot look into a kernel, and would gather what it reads. An operation says along which axes of its prepared
arrays parts are independent, or add up (``Operation.axes``); that is enough to partition any kernel of it, in both
directions. ``jax.experimental.custom_partitioning`` takes it from here, for Shardy and for GSPMD.

An axis is named by letters, ``"b . kg ."``: a batch, an axis that stays whole, heads made of key heads and the query heads
of each, another whole one. A result that lacks a letter which some argument has is the sum over it: that is how gradients
of shared arrays get theirs. An axis of size 1 where others have more is broadcast, and lacks the letters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ejkernel.contracts.call import Call
from ejkernel.contracts.registry import Choice
from ejkernel.contracts.support import Platform, is_present

if TYPE_CHECKING:
    from ejkernel.ops.core.operation import Operation

# Of each axis of an array its letters, and the mesh axes that cut it.
Words = tuple[str, ...]
Spec = Sequence[tuple[str, ...]]
WHOLE = "."
MEANINGS = {
    "b": "batch",
    "e": "examples",
    "k": "key heads",
    "g": "query heads",
    "m": "rows",
    "n": "columns",
    "d": "features",
}


def applies(operation: Operation, chosen: Choice, arrays: dict[str, Any], direction: str) -> bool:
    """Whether arrays may be spread over devices here, and the compiler must be told how to run a kernel on their parts."""
    alone = chosen.device.shared_by == 1 and is_present(chosen.device)
    inside_shard_map = bool(jax.sharding.get_abstract_mesh().manual_axes)
    looked_into = chosen.platform is Platform.XLA and operation.left_to_the_compiler(arrays, direction)
    return not (alone or inside_shard_map or looked_into)


def words(names: Any, arrays: Any) -> list[Words]:
    """Of each array in a tree the letters of each axis, from a tree of ``"b . kg ."``, which may end above the arrays."""
    leaves = jax.tree.leaves(jax.tree.broadcast(names, arrays))
    return [
        (*text.split(), *[WHOLE] * x.ndim)[: x.ndim] for text, x in zip(leaves, jax.tree.leaves(arrays), strict=True)
    ]


@dataclass(frozen=True)
class Axes:
    """The axes of a call, flat: the letters of every axis of every argument and result, and how long each letter's is."""

    arguments: tuple[Words, ...]
    results: tuple[Words, ...]
    sizes: dict[str, int]

    @classmethod
    def of(
        cls, arguments: Sequence[Words], results: Sequence[Words], given: Sequence[Any], made: Sequence[Any]
    ) -> Axes:
        """From the axes as they are declared, and arrays."""
        sizes: dict[str, int] = {}
        pairs = [
            (word, size)
            for names, x in zip(arguments, given, strict=True)
            for word, size in zip(names, x.shape, strict=True)
        ]
        for word, size in sorted(pairs, key=lambda pair: len(pair[0])):
            if word != WHOLE:
                # Of two letters the first is known: key heads have an array of their own.
                own = word[-1]
                sizes[own] = max(sizes.get(own, 1), size // math.prod(sizes[letter] for letter in word[:-1]))

        def named(names: Words, shape: tuple[int, ...]) -> Words:
            return tuple(
                _spreadable(word, sizes) if size > 1 else WHOLE for word, size in zip(names, shape, strict=True)
            )

        return cls(
            tuple(named(names, x.shape) for names, x in zip(arguments, given, strict=True)),
            tuple(named(names, x.shape) for names, x in zip(results, made, strict=True)),
            sizes,
        )

    def rule(self) -> tuple[str, dict[str, Any]]:
        """Shardy's: a whole axis is a factor of its own that must be replicated, and so are all letters of a word but the first."""
        factors = {word for names in (*self.arguments, *self.results) for word in names}
        # In the order of their first use, as Shardy wants them.
        replicated: dict[str, None] = {}

        def one(word: str) -> str:
            if word == WHOLE:
                word = f"whole{len(replicated)}"
                replicated[word] = None
                return word
            replicated.update(dict.fromkeys(word[1:]))
            return word if len(word) == 1 else f"({' '.join(word)})"

        sides = [", ".join(" ".join(map(one, names)) for names in side) for side in (self.arguments, self.results)]
        only_in_words = {letter for word in factors for letter in word if len(word) > 1} - factors
        sizes = {letter: self.sizes[letter] for letter in only_in_words}
        return " -> ".join(sides), {"need_replication_factors": tuple(replicated), **sizes}

    def assign(self, mesh: Any, arrays: Iterable[tuple[Words, Any, Spec]]) -> Assignment:
        """Which mesh axes each letter is spread over, from arrays and their specs: the largest that fits decides."""
        found: dict[str, tuple[str, ...]] = {}
        for names, _, spec in sorted(arrays, key=lambda array: -math.prod(array[1].shape)):
            for word, asked in zip(names, spec, strict=False):
                taken = {axis for axes in found.values() for axis in axes}
                if word == WHOLE or word[0] in found or taken & set(asked):
                    continue
                # Of several mesh axes as many as divide.
                fitting = [asked[:n] for n in range(1, len(asked) + 1)]
                fitting = [axes for axes in fitting if self.sizes[word[0]] % _count(mesh, axes) == 0]
                if fitting:
                    found[word[0]] = fitting[-1]
        return Assignment(mesh, found)


@dataclass(frozen=True)
class Assignment:
    """The mesh axes that each letter is spread over."""

    mesh: Any
    axes: Mapping[str, tuple[str, ...]]

    def sharding(self, names: Words) -> NamedSharding:
        """Of an array."""
        return NamedSharding(self.mesh, PartitionSpec(*(self.axes.get(word[0]) for word in names)))

    def missing(self, names: Words) -> tuple[str, ...]:
        """The mesh axes over which parts of an array without these letters add up."""
        present = {word[0] for word in names}
        return tuple(axis for letter, axes in self.axes.items() if letter not in present for axis in axes)


def _spreadable(word: str, sizes: dict[str, int]) -> str:
    """Without letters of size 1: of a single key head, the query heads can be spread."""
    kept = "".join(letter for letter in word if letter == WHOLE or sizes[letter] > 1)
    return kept or WHOLE


def _count(mesh: Any, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def gathered(operation: Operation, arguments: dict[str, Any], call: Call) -> tuple[str, ...]:
    """Why axes of arguments that are spread over a mesh stay whole in a kernel, for ``explain``."""
    shapes = {name: x for name, x in call.shapes.items() if isinstance(x, jax.ShapeDtypeStruct)}
    named, _ = operation.axes(call.shapes, call.spec)
    names = words({name: named.get(name, "b") for name in shapes}, shapes)
    axes = Axes.of(names, (), jax.tree.leaves(shapes), ())
    arrays = {}
    for name, names in zip(sorted(shapes), axes.arguments, strict=True):
        given = arguments.get(name)
        if isinstance(getattr(given, "sharding", None), NamedSharding):
            # Axes that ``prepare`` puts in front are no concern of the caller's.
            arrays[name] = (names[len(names) - given.ndim :], given, [_tupled(entry) for entry in given.sharding.spec])
    if not arrays:
        return ()
    mesh = next(iter(arrays.values()))[1].sharding.mesh
    found = axes.assign(mesh, arrays.values())
    reasons: dict[str, str] = {}
    for name, (names, _, spec) in arrays.items():
        for axis, (word, asked) in enumerate(zip(names, spec, strict=False)):
            if not asked or found.axes.get(word[0]) == asked:
                continue
            count = _count(mesh, asked)
            cause = "it stays whole" if word == WHOLE else "a larger array is spread in another way"
            if word != WHOLE and axes.sizes[word[0]] % count:
                cause = f"{axes.sizes[word[0]]} {MEANINGS[word[0]]} do not divide by {count}"
            reasons.setdefault(cause, f"axis {axis} of {name} is gathered from {count} devices: {cause}")
    return tuple(reasons.values())


def _tupled(entry: Any) -> tuple[str, ...]:
    """An entry of a partition spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def partitioned(run: Callable, local: Callable, arguments: Any, names: Any, result_names: Any) -> Any:
    """``run(arguments)``, which over several devices becomes ``local(arguments, index)`` on each one's part of them.

    ``names`` are the arguments' axes, ``result_names`` those of the result; ``index(letter)`` is which part of an axis a
    device has.
    """
    flat, tree = jax.tree.flatten(arguments)
    # Its own jit, for custom_partitioning takes no function with constants.
    whole = jax.jit(lambda *flat: run(tree.unflatten(flat)))
    traced, result = jax.make_jaxpr(whole, return_shape=True)(*flat)
    if traced.effects:
        # Those of Mosaic's interpreter: custom_partitioning would lose them.
        return run(arguments)
    axes = Axes.of(words(names, arguments), words(result_names, result), flat, jax.tree.leaves(result))

    def spread(mesh: Mesh, *sides: tuple[Sequence[Words], Sequence[Any]]) -> Assignment:
        arrays = [(names, x) for side, shapes in sides for names, x in zip(side, shapes, strict=True)]
        return axes.assign(mesh, [(names, x, _spec(mesh, x)) for names, x in arrays])

    def infer(mesh, given, made):
        found = spread(mesh, (axes.arguments, given))
        return jax.tree.unflatten(jax.tree.structure(made), [found.sharding(names) for names in axes.results])

    def partition(mesh, given, made):
        found = spread(mesh, (axes.arguments, given), (axes.results, jax.tree.leaves(made)))

        def index(letter: str) -> Any:
            own = found.axes.get(letter, ())
            return jax.lax.axis_index(own) if own else jnp.int32(0)

        def lowered(*flat):
            with _untyped(flat) as flat:
                results, out_tree = jax.tree.flatten(local(tree.unflatten(flat), index))
                summed = [
                    jax.lax.psum(x, missing) if (missing := found.missing(names)) else x
                    for x, names in zip(results, axes.results, strict=True)
                ]
                return out_tree.unflatten(summed)

        shardings = jax.tree.unflatten(jax.tree.structure(made), [found.sharding(names) for names in axes.results])
        return mesh, lowered, shardings, tuple(found.sharding(names) for names in axes.arguments)

    call = custom_partitioning(whole)
    call.def_partition(
        partition, infer_sharding_from_operands=infer, decode_shardings=False, sharding_rule=lambda *_: axes.rule()
    )
    return call(*flat)


@contextlib.contextmanager
def _untyped(flat: Sequence[Array]) -> Iterator[Sequence[Array]]:
    """Where the caller has set an explicit mesh, arrays whose types say nothing of it: a device's part is not spread."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in (mesh.axis_types or ()):
        yield flat
        return
    automatic = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    with jax.sharding.use_abstract_mesh(automatic):
        yield [jax.sharding.reshard(x, PartitionSpec()) for x in flat]


def _spec(mesh: Mesh, array: Any) -> Spec:
    """By axis of an array the mesh axes that cut it, the first the coarsest; none where it is whole.

    None too where it is cut across part of a mesh axis only, as Shardy does with two key heads on an axis of four devices.
    JAX's own way to a partition spec raises there.
    """
    if array.sharding is None or array.sharding.is_fully_replicated:
        return []
    # Of an array that any sharding divides: which part each device has.
    rank = len(array.shape)
    places = array.sharding.devices_indices_map((mesh.size,) * rank)
    starts = np.array([[part.start or 0 for part in places[device]] for device in mesh.devices.flat])
    starts = starts.reshape(*mesh.devices.shape, rank)
    spec = []
    for first in np.moveaxis(starts, -1, 0):
        steps = [0 if n == 1 else np.take(first, 1, axis).flat[0] - first.flat[0] for axis, n in enumerate(first.shape)]
        cuts = np.flatnonzero(steps)
        even = sum(steps[axis] * np.indices(first.shape)[axis] for axis in cuts)
        coarsest_first = sorted(cuts, key=lambda axis: -steps[axis]) if np.all(first == even) else ()
        spec.append(tuple(mesh.axis_names[axis] for axis in coarsest_first))
    return spec
