"""Calls of grouped_matmul. The reference names each row's group and multiplies the row by that group's matrix."""

import jax.numpy as jnp
from examples import Example


def reference(a, b, group_sizes=None, *, group_offset=None, transpose_b=False, preferred_element_type=None):
    b = jnp.swapaxes(b, -1, -2) if transpose_b else b
    if group_sizes is None:
        return jnp.einsum("bgmk,bgkn->bgmn", a, b)
    ends = jnp.cumsum(group_sizes)
    group = jnp.searchsorted(ends, jnp.arange(a.shape[0]), side="right") - (0 if group_offset is None else group_offset)
    belongs = (group >= 0) & (group < b.shape[0]) & (jnp.arange(a.shape[0]) < ends[-1])
    rows = jnp.where(belongs[:, None], a, 0)
    matrices = b[jnp.where(belongs, group, 0)]
    return jnp.einsum("mk,mkn->mn", rows, matrices)


def batched(batch, groups, m, k, n, *, transpose_b=False):
    def make(rng):
        matrix = (n, k) if transpose_b else (k, n)
        return {"a": rng.normal(size=(batch, groups, m, k)), "b": rng.normal(size=(batch, groups, *matrix))}

    return make


def ragged(m, k, n, sizes, *, transpose_b=False, held=None, **more):
    def make(rng):
        matrix = (n, k) if transpose_b else (k, n)
        return {
            "a": rng.normal(size=(m, k)),
            "b": rng.normal(size=(len(sizes) if held is None else held, *matrix)),
            "group_sizes": jnp.asarray(sizes, jnp.int32),
            **more,
        }

    return make


# What an interpreter runs in ``make test``: tests/test_triton_grouped_interpreted.py draws more.
SHORT_INTERPRETED = {"batched", "ragged_odd", "ragged_offset_transposed_wide"}


def example(name, make, features=(), batch=None, uneven=True, **statics):
    return Example(
        operation="grouped_matmul",
        name=name,
        make=make,
        reference=reference,
        statics=statics,
        differentiable=("a", "b"),
        # Few numbers make few whole rows of 16 bytes.
        features=frozenset(features) | ({"uneven_rows"} if uneven else set()),
        batch=batch or {},
        slow_interpreted=name not in SHORT_INTERPRETED,
    )


BATCH = {"a": 0, "b": 0}
WIDE = {"preferred_element_type": "float32"}

EXAMPLES = [
    example("batched", batched(4, 3, 5, 8, 6), {"batched"}, batch=BATCH),
    example(
        "batched_transposed",
        batched(4, 2, 7, 5, 3, transpose_b=True),
        {"batched", "transpose_b"},
        batch=BATCH,
        transpose_b=True,
    ),
    example("batched_one_group", batched(2, 1, 1, 9, 1), {"batched"}, batch=BATCH),
    example("ragged", ragged(40, 8, 6, [3, 17, 20]), {"ragged"}),
    example("ragged_odd", ragged(53, 7, 5, [21, 0, 0, 19, 2]), {"ragged"}),
    example(
        "ragged_transposed",
        ragged(41, 9, 5, [0, 33, 8], transpose_b=True),
        {"ragged", "transpose_b"},
        transpose_b=True,
    ),
    example("ragged_tail", ragged(37, 6, 4, [5, 0, 11, 1]), {"ragged"}),
    example("ragged_all_in_one", ragged(35, 4, 8, [0, 35, 0]), {"ragged"}),
    example("ragged_nothing", ragged(9, 4, 3, [0, 0]), {"ragged"}),
    example("ragged_one_row_each", ragged(6, 3, 5, [1, 1, 1, 1, 1, 1]), {"ragged"}),
    example("ragged_even", ragged(40, 8, 16, [3, 17, 20]), {"ragged"}, uneven=False),
    # More rows than the largest tile.
    example("ragged_long", ragged(700, 5, 3, [290, 3, 0, 390]), {"ragged"}),
    example(
        "ragged_offset",
        ragged(45, 6, 7, [4, 20, 0, 9, 10], held=2, group_offset=jnp.asarray(1)),
        {"ragged", "group_offset"},
    ),
    example(
        "ragged_offset_transposed_wide",
        ragged(45, 6, 7, [4, 11, 3, 9, 10], held=2, transpose_b=True, group_offset=jnp.asarray(3)),
        {"ragged", "group_offset", "transpose_b", "preferred_element_type"},
        transpose_b=True,
        **WIDE,
    ),
]
