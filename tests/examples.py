"""Calls of every operation but flash_attention (which has `cases.py`), each with a reference in float64.

A module ``examples_<operation>.py`` holds a list ``EXAMPLES``; the files that are one a property run over all of them.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from subjects import parameter, subjects
from tolerances import assert_close

import ejkernel

# What `make test` leaves out on XLA: an operation's last example has all of it, or it is about tiles of GPU kernels.
REPEATED = {
    *(f"page_attention-{name}" for name in ("window", "soft_cap", "sinks", "value_dim", "only_itself")),
    *(f"page_attention-{name}" for name in ("splits_and_sinks", "chunks_in_even_pages")),
    *(f"blocksparse_attention-{name}" for name in ("gqa", "sinks", "everything_kept")),
    *(f"grouped_matmul-{name}" for name in ("ragged_even", "ragged_long")),
}


@dataclass(frozen=True)
class Example:
    """One call.

    Attributes:
        operation: its name.
        name: of the example.
        make: from a numpy generator, the arguments that are arrays (or trees of them), by name; floats as float64.
        reference: the same call in plain jnp, written the obvious way, without a batch of tricks: it is run and
            differentiated by JAX in float64. Takes the arrays and the statics by name.
        statics: the other arguments.
        differentiable: the arguments whose gradients are checked.
        features: what an implementation must support.
        batch: for each argument that has one, its batch axis: to shard over.
        keep: arguments whose dtype never changes with the call's, such as sinks and scales in float32.
        slow_interpreted: left out of ``make test`` where an interpreter would run it.
    """

    operation: str
    name: str
    make: Callable[[np.random.Generator], dict[str, Any]]
    reference: Callable[..., Any]
    statics: dict[str, Any] = field(default_factory=dict)
    differentiable: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()
    batch: dict[str, int] = field(default_factory=dict)
    keep: frozenset[str] = frozenset()
    slow_interpreted: bool = False

    def __str__(self):
        return f"{self.operation}-{self.name}"

    def arrays(self, dtype="float32", seed=0):
        """The arguments in a dtype."""

        def cast(name):
            def one(x):
                floating = np.issubdtype(np.asarray(x).dtype, np.floating) and name not in self.keep
                if np.asarray(x).dtype == np.float64:
                    return jnp.asarray(x, dtype if floating else ("float64" if dtype == "float64" else "float32"))
                return jnp.asarray(x)

            return one

        made = self.make(np.random.default_rng(seed))
        return {name: jax.tree.map(cast(name), tree) for name, tree in made.items()}

    def at(self, subject):
        """The example with the gradients that an implementation has."""
        own = tuple(name for name in self.differentiable if name in subject.support.gradients)
        return self if own == self.differentiable else replace(self, differentiable=own)

    def run(self, arrays, **more):
        """The operation's result."""
        return getattr(ejkernel, self.operation)(**arrays, **self.statics, **more)

    def expected(self, arrays, cotangents=None):
        """The reference's result in float64 and, given cotangents of it, the gradients by name."""
        with jax.enable_x64(True):
            wide = jax.tree.map(_wide, jax.tree.map(np.asarray, arrays))

            def run(floats, others):
                return self.reference(**{**others, **floats}, **self.statics)

            def both(floats, others, cotangents):
                out, pull = jax.vjp(lambda floats: run(floats, others), floats)
                given = jax.tree.map(lambda c, o: jnp.asarray(c, o.dtype), cotangents, out)
                return out, pull(given)[0]

            # Jitted, and no array is a constant: one compilation serves the example in all dtypes.
            floats = self.floats(wide)
            others = {name: x for name, x in wide.items() if name not in floats}
            if cotangents is None:
                return jax.tree.map(np.asarray, jax.jit(run)(floats, others))
            cotangents = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), "float64"), cotangents)
            return jax.tree.map(np.asarray, jax.jit(both)(floats, others, cotangents))

    def floats(self, arrays):
        return {name: arrays[name] for name in self.differentiable if name in arrays}


def _wide(x):
    return jnp.asarray(x, "float64") if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(x)


def all_examples():
    """Every operation's."""
    modules = [importlib.import_module(path.stem) for path in sorted(Path(__file__).parent.glob("examples_*.py"))]
    return [example for module in modules for example in module.EXAMPLES]


def by_operation():
    """The examples of each operation."""
    found = {}
    for example in all_examples():
        found.setdefault(example.operation, []).append(example)
    return found


def firsts_and_lasts():
    """Two of every operation: its first, and its last, which has the most features."""
    return [example for examples in by_operation().values() for example in (examples[0], examples[-1])]


def each_example(*, main=False, dtypes="main", interpreted="slow", short="all", differentiates=False, again=False):
    """Parameters ``subject, example`` of a test: each example on each implementation that this machine can run.

    With ``main`` two examples an operation: its first, and its last, which has the most features. ``short`` says which
    ``make test`` runs: ``"all"``, ``"main"`` or the ``"last"``; ``interpreted`` as in ``subjects.each_subject``.

    With ``again``, interpreters run the examples between an operation's first and last in ``make test-full`` alone, where
    ``differentiates`` does not leave them out: the test of gradients looks at their values.

    An implementation without a gradient gets examples that do not ask for it; a test that only ``differentiates`` leaves
    out those that have none to ask for.
    """

    def slow(subject, example, examples):
        kept = {"all": examples, "main": (examples[0], examples[-1]), "last": examples[-1:]}[short]
        # Where there is bfloat16 too, float16 goes the same way.
        half = dtypes == "others" and subject.dtype == "float16" and "bfloat16" in subject.support.dtypes
        repeated = str(example) in REPEATED and not subject.interpreted
        return (
            example not in kept
            or half
            or repeated
            or (subject.interpreted and (interpreted == "slow" or example.slow_interpreted))
        )

    def has_gradients(subject, example):
        return bool(example.at(subject).differentiable or not example.differentiable)

    return pytest.mark.parametrize(
        ("subject", "example"),
        [
            parameter(
                subject,
                example.at(subject),
                slow=slow(subject, example, examples),
                again=again and example not in (examples[0], examples[-1]) and has_gradients(subject, example),
            )
            for operation, examples in by_operation().items()
            for example in ((examples[0], examples[-1]) if main else examples)
            for subject in subjects(operation, dtypes=dtypes)
            if subject.has(*example.features) and not (subject.interpreted and interpreted == "never")
            if has_gradients(subject, example) or not differentiates
        ],
    )


def assert_trees_close(actual, expected, dtype, *, gradient=False, what=""):
    """Every leaf, by the suite's tolerances."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected), what
    for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert_close(a, e, dtype, gradient=gradient, what=f"{what}{jax.tree_util.keystr(path)}")


def cotangents_like(tree, seed=7):
    """Random cotangents of a result."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)


def gradients(example, arrays, **more):
    """The result and the gradients by name, with random cotangents of everything that is finite."""
    out, pull = jax.vjp(lambda floats: example.run({**arrays, **floats}, **more), example.floats(arrays))
    cotangents = cotangents_like(out)
    return out, pull(cotangents)[0], cotangents
