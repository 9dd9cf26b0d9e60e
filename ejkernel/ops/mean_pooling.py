"""``mean_pooling``: the mean over each sequence's own tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float, Integer, Shaped

from ejkernel.callib.integers import power_of_two
from ejkernel.contracts.call import Call, Cost
from ejkernel.contracts.support import Backend, Platform
from ejkernel.ops.core.checks import Checker, is_array
from ejkernel.ops.core.operation import AnyArray, Operation
from ejkernel.utils.values import concrete

_check = Checker("mean_pooling")


def mean_pooling(
    inputs: Float[AnyArray, "batch seq_len features"] | Float[AnyArray, "tokens features"],
    mask: Shaped[AnyArray, "batch seq_len"] | None = None,
    *,
    cu_seqlens: Integer[AnyArray, " offsets"] | None = None,
    platform: Platform | str | None = None,
    backend: Backend | str | None = None,
) -> Float[Array, "sequences features"]:
    """The mean of each sequence over the tokens that count; 0 where none does.

    What other places hold does not matter, NaN and infinities included. Half precision accumulates in float32; the output
    has the inputs' dtype.

    Args:
        inputs: ``[B, S, D]``; with ``cu_seqlens`` ``[T, D]``, the sequences one after the other.
        mask: ``[B, S]`` of any dtype, non-zero = counts. None counts all.
        cu_seqlens: ``[N + 1]`` offsets of packed sequences, from 0; tokens past the last one are padding.
        platform, backend: run exactly this implementation, or raise.

    Returns:
        ``[B, D]`` or, packed, ``[N, D]``. Inputs have a gradient.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel import mean_pooling
        >>> x = jnp.arange(6.0).reshape(6, 1)
        >>> print(mean_pooling(x, cu_seqlens=jnp.array([0, 2, 2, 5])))
        [[0.5]
         [0. ]
         [3. ]]
    """
    return OPERATION(locals())


@dataclass(frozen=True)
class MeanPoolingSpec:
    """What to compute, beside the arrays: whether the sequences are packed."""

    packed: bool


class MeanPooling(Operation):
    """Arrays for kernels:

    ``inputs`` ``[B, S, D]`` and, if given, ``mask`` boolean ``[B, S]``; or packed, with a batch axis of 1 that only a vmap makes
    larger: ``inputs`` ``[B, T, D]`` and ``cu_seqlens`` int32 ``[B, N + 1]``, which never decrease and lie from 0 to ``T``.
    Tokens before the first offset and after the last belong to no sequence; their gradient is 0.

    A kernel's output is ``[B, D]`` or ``[B, N, D]``; there is no residual.
    """

    name = "mean_pooling"
    features: ClassVar[dict[str, str]] = {
        "mask": "a mask of the tokens that count",
        "varlen": "packed sequences (cu_seqlens)",
    }
    gradients = ("inputs",)

    def bind(self, arguments: dict[str, Any]) -> Call:
        """Check every argument; see the base class."""
        a = arguments
        inputs, mask, offsets = a["inputs"], a["mask"], a["cu_seqlens"]
        spec = MeanPoolingSpec(packed=offsets is not None)
        if spec.packed:
            _check.array("inputs", inputs, "[tokens, features], with cu_seqlens", ranks=(2,), kinds=(jnp.floating,))
            if mask is not None:
                _check.fail("mask", mask, "None with cu_seqlens: packed sequences have no padding to mask")
            _check.array("cu_seqlens", offsets, "[sequences + 1]", ranks=(1,), kinds=(jnp.integer,))
            if offsets.shape[0] < 2:
                _check.fail("cu_seqlens", offsets, "at least two offsets: [0, length]")
        else:
            layout = "[batch, seq_len, features], or [tokens, features] with cu_seqlens"
            _check.array("inputs", inputs, layout, ranks=(3,), kinds=(jnp.floating,))
            self._check_mask(mask, inputs)
        used = {"mask": (mask is not None, "mask"), "varlen": (spec.packed, "cu_seqlens")}
        features = {name: phrase for name, (is_used, phrase) in used.items() if is_used}
        dtype = jnp.dtype(inputs.dtype).name
        sequences = offsets.shape[0] - 1 if spec.packed else inputs.shape[0]
        return Call(
            operation=self.name,
            arguments=self.given(a),
            spec=spec,
            dtype=dtype,
            features=features,
            bucket=(
                ("dtype", dtype),
                ("sequences", power_of_two(sequences)),
                ("seq_len", power_of_two(inputs.shape[-2])),
                ("features_len", power_of_two(inputs.shape[-1])),
                ("features", " ".join(sorted(features))),
            ),
        )

    def _check_mask(self, mask: Any, inputs: Any) -> None:
        if mask is None:
            return
        layout = f"[{inputs.shape[0]}, {inputs.shape[1]}], one for each token"
        _check.array("mask", mask, layout, ranks=(2,), kinds=(jnp.bool_, jnp.number))
        if mask.shape != inputs.shape[:2]:
            _check.fail("mask", mask, layout)

    def check_values(self, arguments: dict[str, Any]) -> None:
        """Offsets must start at 0, never decrease and end within the inputs."""
        offsets, inputs = concrete(arguments["cu_seqlens"]), arguments["inputs"]
        if offsets is None or offsets.ndim != 1 or not offsets.size or not is_array(inputs) or len(inputs.shape) != 2:
            return
        total = inputs.shape[0]
        if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any() or offsets[-1] > total:
            shown = np.array2string(offsets, threshold=8)
            _check.fail(
                "cu_seqlens",
                arguments["cu_seqlens"],
                f"offsets that start at 0, never decrease and end by {total}; they are {shown}",
            )

    def prepare(self, arguments: dict[str, Any], spec: MeanPoolingSpec) -> dict[str, Array]:
        """The kernels' arrays; see the class."""
        inputs, mask, offsets = arguments["inputs"], arguments["mask"], arguments["cu_seqlens"]
        if spec.packed:
            # Of traced offsets nothing is known: these bounds keep every read inside, and do nothing to right ones.
            bounded = jax.lax.cummax(jnp.clip(offsets, 0, inputs.shape[0]).astype(jnp.int32))
            return {"inputs": inputs[None], "cu_seqlens": bounded[None]}
        arrays = {"inputs": inputs}
        if mask is not None:
            arrays["mask"] = mask if mask.dtype == bool else mask != 0
        return arrays

    def axes(self, arrays: dict[str, Any], spec: MeanPoolingSpec) -> tuple[dict[str, Any], tuple]:
        """Batch and features."""
        return {"inputs": "b . d"}, ("b . d" if spec.packed else "b d", "b")

    def empty(self, arguments: dict[str, Any]) -> Any:
        """Zeros where there is no token or no feature."""
        inputs, offsets = arguments["inputs"], arguments["cu_seqlens"]
        if math.prod(inputs.shape):
            return None
        sequences = inputs.shape[0] if offsets is None else offsets.shape[0] - 1
        return jnp.zeros((sequences, inputs.shape[-1]), inputs.dtype)

    def finish(self, arguments: dict[str, Any], out: Any, residual: Any) -> Any:
        """Packed, without the batch axis."""
        return out if arguments["cu_seqlens"] is None else out[0]

    def result_specs(self, arguments: dict[str, Any], spec: tuple) -> Any:
        """Partitioned as the inputs are, but for the tokens."""
        return PartitionSpec(None if arguments["cu_seqlens"] is not None else spec[0], spec[-1])

    def work(self, call: Call) -> Cost:
        """An addition an element; every array once."""
        inputs = call.shapes["inputs"]
        batch, tokens, features = inputs.shape
        rows = call.shapes["cu_seqlens"].shape[1] - 1 if call.spec.packed else 1
        out = batch * rows * features * inputs.dtype.itemsize
        read = sum(math.prod(x.shape) * x.dtype.itemsize for x in call.shapes.values())
        elements = batch * tokens * features
        return Cost(flops=elements, bytes=read + out, backward_flops=batch * rows * features, backward_bytes=read + out)

    def sample(self, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        """Random numbers that all count, in sequences of equal length."""

        def make(name: str, like: jax.ShapeDtypeStruct) -> Array:
            if name == "cu_seqlens":
                total = shapes["inputs"].shape[-2]
                ends = np.linspace(0, total, like.shape[-1]).astype(like.dtype)
                return jnp.broadcast_to(ends, like.shape)
            if name == "mask":
                return jnp.ones(like.shape, like.dtype)
            return jax.random.normal(jax.random.key(0), like.shape, like.dtype)

        return {name: make(name, like) for name, like in shapes.items()}


OPERATION = MeanPooling(mean_pooling)
