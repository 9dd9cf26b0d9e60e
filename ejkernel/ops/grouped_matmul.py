"""``grouped_matmul``: one matrix product a group, in a batch or over rows sorted by group."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float, Integer

from ejkernel.callib.integers import power_of_two
from ejkernel.contracts.call import Call, Cost
from ejkernel.contracts.support import ALL_FLOATS, Backend, Platform
from ejkernel.ops.core.checks import Checker, is_array
from ejkernel.ops.core.operation import AnyArray, Operation
from ejkernel.utils.values import concrete

_check = Checker("grouped_matmul")

# What tensor copies take whole rows of.
ROW_BYTES = 16
# So many at most that the rows before each one are summed by themselves, and sizes summed at a time: a GPU's compiler does not
# make a program of its own of so few.
FEW_GROUPS = 512
TERMS = 8
# Features that a call's dtypes, its lengths or the lack of another feature tell in a key of tuned parameters.
TOLD_BY_OTHERS = {"preferred_element_type", "float64_result", "batched", "uneven_rows"}


def grouped_matmul(
    a: Float[AnyArray, "..."],
    b: Float[AnyArray, "..."],
    group_sizes: Integer[AnyArray, " all_groups"] | None = None,
    *,
    group_offset: int | np.integer | Integer[AnyArray, ""] | None = None,
    transpose_b: bool | np.bool_ = False,
    preferred_element_type: Any = None,
    platform: Platform | str | None = None,
    backend: Backend | str | None = None,
) -> Float[Array, "..."]:
    """One matrix product a group.

    Without ``group_sizes`` the product of two batches of matrices. With them the ragged product of a mixture of experts:
    the first ``group_sizes[0]`` rows of ``a`` are multiplied by ``b[0]``, the next ``group_sizes[1]`` by ``b[1]``, and so
    on. Its work is that of one product ``[M, K] · [K, N]``, however many groups there are. Products are summed in float32
    at least.

    Args:
        a: ``[B, G, M, K]``; ragged: ``[M, K]``.
        b: ``[B, G, K, N]``; ragged: ``[G, K, N]``. The dtype of ``a``.
        group_sizes: the rows of each group, integers that sum to at most ``M``; the values may be traced. Rows past the
            sum give 0, whatever they hold.
        group_offset: with ``group_sizes``: ``b`` holds the groups from this index on, ``group_sizes`` names all groups,
            and the rows of groups that ``b`` does not hold give 0. An int, or an integer array that may be traced.
        transpose_b: the last two axes of ``b`` are swapped: ``[…, N, K]``.
        preferred_element_type: the result's dtype; default: that of ``a``.
        platform, backend: run exactly this implementation, or raise.

    Returns:
        ``[B, G, M, N]``; ragged: ``[M, N]``. ``a`` and ``b`` have gradients, each in its own dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel import grouped_matmul
        >>> rows, experts = jnp.ones((5, 2)), jnp.asarray([1.0, 10.0])[:, None, None] * jnp.ones((2, 2, 3))
        >>> print(grouped_matmul(rows, experts, jnp.asarray([1, 3]))[:, 0])
        [ 2. 20. 20. 20.  0.]
    """
    arguments = locals()
    operation = OPERATION if group_sizes is None else _RAGGED
    return operation(arguments)


@dataclass(frozen=True)
class GroupedSpec:
    """What to compute, beside the arrays: whether ``b`` is transposed, the result's dtype, and that of the sums."""

    transpose_b: bool
    dtype: np.dtype
    accumulator: np.dtype


class GroupedMatmul(Operation):
    """Arrays for kernels: ``a`` and ``b`` as passed, with a batch axis in front of each.

    In the ragged form that axis has size 1, always, and a third array comes with them: ``bounds``, int32 ``[1, G + 1]``.
    The rows of the matrix ``b[0, g]`` are those from ``bounds[0, g]`` on and before ``bounds[0, g + 1]``; bounds are from 0
    to M and never decrease, whatever the caller's sizes are. All other rows belong to no group.
    """

    name = "grouped_matmul"
    features: ClassVar[dict[str, str]] = {
        "ragged": "rows sorted by group (group_sizes)",
        "group_offset": "some of the groups alone (group_offset)",
        "transpose_b": "transposed matrices in b",
        "preferred_element_type": "a result of another dtype than the operands",
        "float64_result": "a result in float64 of narrower operands",
        "batched": "two batches of matrices (no group_sizes)",
        "uneven_rows": "k or n whose rows are no multiple of 16 bytes",
    }
    gradients = ("a", "b")

    def bind(self, arguments: dict[str, Any]) -> Call:
        """Check every argument; see the base class."""
        a = arguments
        transpose = _check.flag("transpose_b", a["transpose_b"])
        ragged = a["group_sizes"] is not None
        self._check_operands(a["a"], a["b"], ragged, transpose)
        self._check_groups(a["b"], a["group_sizes"], a["group_offset"])
        dtype = jnp.dtype(a["a"].dtype)
        spec = self._spec(dtype, transpose, a["preferred_element_type"])
        rows, inner = a["a"].shape[-2:]
        columns = self._shape(a)[-1]
        used = {
            "ragged": (ragged, "group_sizes"),
            "group_offset": (a["group_offset"] is not None, "group_offset"),
            "transpose_b": (transpose, "transpose_b"),
            "preferred_element_type": (spec.dtype != dtype, f"a result in {spec.dtype} of {dtype}"),
            "float64_result": (spec.dtype == jnp.float64 != dtype, f"a result in float64 of {dtype}"),
            "batched": (not ragged, "the form without group_sizes"),
            "uneven_rows": (
                any(length * dtype.itemsize % ROW_BYTES for length in (inner, columns)),
                f"k {inner} with n {columns}, not both multiples of {max(1, ROW_BYTES // dtype.itemsize)},",
            ),
        }
        features = {name: phrase for name, (is_used, phrase) in used.items() if is_used}
        batch, groups = (1, a["b"].shape[0]) if ragged else a["b"].shape[:2]
        return Call(
            operation=self.name,
            arguments=self.given(a),
            spec=spec,
            dtype=dtype.name,
            features=features,
            bucket=(
                ("dtype", dtype.name),
                ("result", spec.dtype.name),
                ("k", inner),
                ("n", columns),
                ("batch_len", power_of_two(batch)),
                ("groups_len", power_of_two(groups)),
                ("m_len", power_of_two(rows)),
                ("features", " ".join(sorted(features.keys() - TOLD_BY_OTHERS))),
            ),
        )

    def _check_operands(self, a: Any, b: Any, ragged: bool, transpose: bool) -> None:
        lead, matrix = ("", "groups") if ragged else ("batch, groups, ", "batch, groups")
        layouts = {"a": f"[{lead}m, k]", "b": f"[{matrix}, {'n, k' if transpose else 'k, n'}]"}
        ranks = (2, 3) if ragged else (4, 4)
        form = "beside group_sizes" if ragged else "without group_sizes, which the ragged form needs"
        for (name, layout), array, rank in zip(layouts.items(), (a, b), ranks, strict=True):
            _check.array(name, array, f"{layout} {form}", ranks=(rank,), kinds=(jnp.floating,))
        if a.dtype != b.dtype:
            _check.fail("b", b, f"the dtype of a, {a.dtype}: cast one of them")
        if not ragged and a.shape[:2] != b.shape[:2]:
            _check.fail("b", b, f"the batch and groups of a, {list(a.shape[:2])}")
        if b.shape[-1 if transpose else -2] != a.shape[-1]:
            _check.fail("b", b, f"{layouts['b']} with the k of a, {a.shape[-1]} (see transpose_b)")

    def _check_groups(self, b: Any, sizes: Any, offset: Any) -> None:
        if sizes is None:
            if offset is not None:
                _check.fail("group_offset", offset, "None without group_sizes: it says which of those b holds")
            return
        _check.array("group_sizes", sizes, "[groups] integers", ranks=(1,), kinds=(jnp.integer,))
        held, named = b.shape[0], sizes.shape[0]
        if offset is None:
            if named != held:
                _check.fail(
                    "group_sizes", sizes, f"one size a group of b, {held}; with group_offset it names all groups"
                )
            return
        offset = np.asarray(offset) if isinstance(offset, int) else offset
        _check.array("group_offset", offset, "one integer", ranks=(0,), kinds=(jnp.integer,))
        if named < held:
            _check.fail("group_sizes", sizes, f"a size for each of all groups, of which b alone holds {held}")

    def _spec(self, dtype: np.dtype, transpose: bool, preferred: Any) -> GroupedSpec:
        result = dtype
        if preferred is not None:
            known = f"a dtype, one of {', '.join(sorted(ALL_FLOATS))}, or None for that of a"
            try:
                result = jnp.dtype(preferred)
            except TypeError:
                _check.fail("preferred_element_type", preferred, known)
            if result.name not in ALL_FLOATS:
                _check.fail("preferred_element_type", preferred, known)
            if jax.dtypes.canonicalize_dtype(result) != result:
                _check.fail("preferred_element_type", preferred, "at most 32 bits: jax_enable_x64 is off")
        accumulator = jnp.dtype("float64" if "float64" in (dtype.name, result.name) else "float32")
        return GroupedSpec(transpose, result, accumulator)

    def check_values(self, arguments: dict[str, Any]) -> None:
        """Sizes are at least 0 and fit the rows; the groups of b are among those that have sizes."""
        a, b, given, offset = (arguments[name] for name in self.arrays)
        if given is None:
            self._check_groups(b, given, offset)
        sizes = concrete(given)
        if sizes is not None and sizes.ndim == 1 and np.issubdtype(sizes.dtype, np.integer):
            shown = f"they are {np.array2string(sizes, threshold=8)}"
            if (sizes < 0).any():
                _check.fail("group_sizes", given, f"sizes of at least 0; {shown}")
            rows = a.shape[0] if is_array(a) and len(a.shape) == 2 else None
            # Each by itself too: their sum might not fit its integer.
            if rows is not None and sizes.size and (sizes.max() > rows or sizes.sum(dtype=np.int64) > rows):
                _check.fail("group_sizes", given, f"sizes that sum to at most the rows of a, {rows}; {shown}")
        first = _index(offset)
        if first is None or not is_array(given) or len(given.shape) != 1 or not is_array(b) or len(b.shape) != 3:
            return
        named, held = given.shape[0], b.shape[0]
        if not 0 <= first <= max(0, named - held):
            _check.fail(
                "group_offset",
                first,
                f"an index from 0 to {max(0, named - held)}: group_sizes names {named} groups, of which b holds {held}",
            )

    def prepare(self, arguments: dict[str, Any], spec: GroupedSpec) -> dict[str, Array]:
        """The kernels' arrays; see the class."""
        a, b, sizes, offset = (arguments[name] for name in self.arrays)
        if sizes is None:
            return {"a": a, "b": b}
        groups = jnp.arange(b.shape[0] + 1, dtype=jnp.int32)
        if offset is not None:
            groups += _clipped(jnp.asarray(offset), -b.shape[0], sizes.shape[0])
        bounds = _starts(groups, sizes, a.shape[0])
        return {"a": a[None], "b": b[None], "bounds": bounds[None]}

    def axes(self, arrays: dict[str, Any], spec: GroupedSpec) -> tuple[dict[str, Any], tuple]:
        """Batch, groups, rows and columns; the groups of a ragged product stay together, for each row must find its own."""
        if "bounds" in arrays:
            return {"a": "b m", "b": "b . n" if spec.transpose_b else "b . . n"}, ("b m n", "b")
        return {"a": "b g m", "b": "b g n" if spec.transpose_b else "b g . n"}, ("b g m n", "b")

    def left_to_the_compiler(self, arrays: dict[str, Any], direction: str) -> bool:
        """Not where groups begin at any row."""
        return "bounds" not in arrays

    def localise(self, arrays: dict[str, Any], spec: GroupedSpec, index: Callable[[str], Any]) -> dict[str, Any]:
        """Bounds count from the first row that a device has."""
        if "bounds" not in arrays:
            return arrays
        rows = arrays["a"].shape[1]
        bounds = jnp.clip(arrays["bounds"] - jnp.asarray(index("m"), jnp.int32) * rows, 0, rows)
        return {**arrays, "bounds": bounds}

    def _shape(self, arguments: dict[str, Any]) -> tuple[int, ...]:
        """The result's."""
        a, b = arguments["a"], arguments["b"]
        return (*a.shape[:-1], b.shape[-2 if arguments["transpose_b"] else -1])

    def empty(self, arguments: dict[str, Any]) -> Any:
        """Zeros where there is nothing to multiply."""
        a, b = arguments["a"], arguments["b"]
        if 0 not in a.shape and 0 not in b.shape:
            return None
        preferred = arguments["preferred_element_type"]
        return jnp.zeros(self._shape(arguments), a.dtype if preferred is None else preferred)

    def finish(self, arguments: dict[str, Any], out: Any, lse: Any) -> Any:
        """The output, in the ragged form without its batch axis."""
        return out if arguments["group_sizes"] is None else out[0]

    def result_specs(self, arguments: dict[str, Any], spec: tuple) -> Any:
        """As a is partitioned, but for the axis that is summed."""
        return PartitionSpec(*spec[:-1])

    def work(self, call: Call) -> Cost:
        """One product forward, two backward, for rows that all belong to a group; every array once."""
        a, b = call.shapes["a"], call.shapes["b"]
        inner = a.shape[-1]
        result = math.prod(a.shape[:-1]) * dict(call.bucket)["n"]
        read = sum(math.prod(x.shape) * x.dtype.itemsize for x in (a, b))
        written = result * call.spec.dtype.itemsize
        return Cost(
            flops=2 * result * inner,
            bytes=read + written,
            backward_flops=4 * result * inner,
            backward_bytes=2 * read + written,
        )

    def sample(self, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        """Random numbers, and rows spread evenly over the groups."""
        keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
        rows = shapes["a"].shape[-2]

        def make(name: str, like: jax.ShapeDtypeStruct) -> Array:
            if name == "bounds":
                return jnp.linspace(0, rows, like.shape[-1]).astype(like.dtype)[None]
            if name == "group_sizes":
                return jnp.full(like.shape, rows // like.shape[0], like.dtype)
            if name == "group_offset":
                return jnp.zeros(like.shape, like.dtype)
            return jax.random.normal(keys[name], like.shape, like.dtype)

        return {name: make(name, like) for name, like in shapes.items()}


class RaggedMatmul(GroupedMatmul):
    """The ragged form. Bounds differ from one example to the next, so a vmap of it is a loop."""

    def folds(self, names: frozenset[str]) -> bool:
        """Never."""
        return False


def _index(offset: Any) -> int | None:
    """The value of an integer that has one."""
    if isinstance(offset, int):
        return None if isinstance(offset, bool) else offset
    value = concrete(offset)
    return int(value) if value is not None and value.ndim == 0 and np.issubdtype(value.dtype, np.integer) else None


def _starts(groups: Array, sizes: Array, rows: int) -> Array:
    """Where these groups start, int32, from 0 to ``rows``. Of what nobody named, the first row or the end of the last group.

    Every kernel waits for this. The sums of all sizes before each group, a few sizes at a time, are one program of a GPU up to 64
    groups and two up to 512; a scan is three and more.
    """
    sizes, named = _clipped(sizes, 0, rows), sizes.shape[0]
    # All sums stop at the number of rows, for that of many traced sizes may not fit its integer.
    if named <= FEW_GROUPS and rows * TERMS < 2**31:
        sums = jnp.where(jnp.arange(named, dtype=jnp.int32)[:, None] < groups, sizes[:, None], 0)
        while len(sums) != 1:
            count = max(1, -(-len(sums) // TERMS))
            sums = jnp.pad(sums, ((0, count * TERMS - len(sums)), (0, 0)))
            sums = jnp.minimum(sums.reshape(count, TERMS, -1).sum(axis=1, dtype=jnp.int32), rows)
        return sums[0]
    ends = lax.associative_scan(lambda x, y: y + jnp.minimum(x, rows - y), sizes)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    return starts.at[groups].get(mode="clip", wrap_negative_indices=False)


def _clipped(x: Array, low: int, high: int) -> Array:
    """As int32, clipped first where that would not hold its values, and widened first where its dtype lacks the limits."""
    if x.dtype.itemsize < 4:
        x = x.astype(jnp.int32)
    unsigned = jnp.issubdtype(x.dtype, jnp.unsignedinteger)
    return jnp.clip(x, max(low, 0) if unsigned else low, high).astype(jnp.int32)


OPERATION = GroupedMatmul(grouped_matmul)
_RAGGED = RaggedMatmul(grouped_matmul)
