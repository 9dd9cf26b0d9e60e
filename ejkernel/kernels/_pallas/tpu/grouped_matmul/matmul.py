"""What the kernels for grouped_matmul on TPUs are asked, and how they are launched."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels._pallas.tpu.generations import Generation, generation_of
from ejkernel.kernels._pallas.tpu.grouped_matmul.product import passes
from ejkernel.kernels._pallas.tpu.grouped_matmul.tiles import Rows, Sums, Tiles
from ejkernel.kernels._pallas.tpu.registering import PRIORITY, register

READS = ("blocksize_m", "blocksize_k", "blocksize_n")
CANDIDATES = 8  # of tiles that a tuner times


class _Call:
    """Sizes of a call; ``b`` counts as ``[k, n]``, transposed or not."""

    def __init__(self, shapes: dict[str, Any], spec: Any) -> None:
        a, b = shapes["a"], shapes["b"]
        ragged = "bounds" in shapes
        self.transposed = spec.transpose_b
        self.lead = 1 if ragged else a.shape[0] * a.shape[1]
        self.groups = b.shape[1] if ragged else 1
        self.m, self.k = a.shape[-2:]
        self.n = b.shape[-2 if spec.transpose_b else -1]
        self.dtype = jnp.dtype(a.dtype)
        # A TPU's vectors have no float16: such results leave a kernel in float32.
        self.result = jnp.dtype("float32") if spec.dtype == jnp.float16 else jnp.dtype(spec.dtype)

    def product(self) -> Rows:
        own, result = self.dtype.itemsize, self.result.itemsize
        count = passes(self.dtype, self.dtype, self.dtype)
        return Rows(self.lead, self.groups, self.m, self.k, self.n, own, own, result, count, self.transposed)

    def gradient_a(self) -> Rows:
        own, result = self.dtype.itemsize, self.result.itemsize
        count = passes(self.result, self.dtype, self.dtype)
        return Rows(self.lead, self.groups, self.m, self.n, self.k, result, own, own, count, not self.transposed)

    def gradient_b(self) -> Sums:
        own, result = self.dtype.itemsize, self.result.itemsize
        count = passes(self.result, self.dtype, self.dtype)
        return Sums(self.lead, self.groups, self.m, self.k, self.n, own, result, own, count)

    def tiles_a(self, tiles: Tiles, generation: Generation) -> Tiles:
        """Of the gradient of ``a``, which has the tiles of that of ``b``, and what fits of the axis it is contracted over."""
        return self.gradient_a().fit(Tiles(tiles.m, self.n, tiles.k), generation)

    def candidates(self, generation: Generation, direction: str) -> list[Tiles]:
        """Tiles by predicted time."""
        if direction == "forward":
            return self.product().best(generation)
        a, b = self.gradient_a(), self.gradient_b()

        def seconds(tiles: Tiles) -> float:
            return a.seconds(self.tiles_a(tiles, generation), generation) + b.seconds(tiles, generation)

        return sorted(b.all(generation), key=seconds)


@register(
    "grouped_matmul",
    features={"ragged", "group_offset", "transpose_b", "preferred_element_type", "batched", "uneven_rows"},
    gradients={"a", "b"},
)
class TpuGroupedMatmul:
    """Products on the matrix units; steps follow the rows that there are."""

    name = "grouped-matmul-tpu"
    version = 1
    reads: ClassVar = {"forward": READS, "backward": READS}

    def forward(self, arrays, spec, params, *, device=None, interpret: Any = False):
        """``out`` and nothing else."""
        from ejkernel.kernels._pallas.tpu.grouped_matmul.rows import multiply

        call, generation = _Call(arrays, spec), generation_of(device)
        x, matrices, bounds = _stacked(arrays)
        out = multiply(
            x,
            matrices,
            bounds,
            call.product(),
            call.product().fit(_tiles(params), generation),
            operands=call.dtype,
            dtype=call.result,
            name="grouped_matmul",
            generation=generation,
            interpret=interpret,
        )
        return out.astype(spec.dtype).reshape(*arrays["a"].shape[:-1], call.n), None

    def backward(
        self,
        arrays,
        spec,
        params,
        out,
        residual,
        dout: Array,
        dresidual,
        wanted: frozenset[str] = frozenset({"a", "b"}),
        *,
        device=None,
        interpret: Any = False,
    ):
        """The gradients by name."""
        from ejkernel.kernels._pallas.tpu.grouped_matmul.rows import multiply
        from ejkernel.kernels._pallas.tpu.grouped_matmul.sums import sum_groups

        call, generation = _Call(arrays, spec), generation_of(device)
        x, matrices, bounds = _stacked(arrays)
        dout = dout.reshape(*x.shape[:-1], call.n).astype(call.result)
        tiles = call.gradient_b().fit(_tiles(params), generation)
        common = {"operands": call.dtype, "dtype": call.dtype, "generation": generation, "interpret": interpret}
        grads = {}
        if "a" in wanted:
            shape, name = call.gradient_a(), "grouped_matmul_gradient_a"
            tiles_a = call.tiles_a(tiles, generation)
            grad = multiply(dout, matrices, bounds, shape, tiles_a, name=name, **common)
            grads["a"] = grad.reshape(arrays["a"].shape)
        if "b" in wanted:
            if spec.transpose_b:
                x, dout, tiles = dout, x, Tiles(tiles.m, tiles.n, tiles.k)
            grad = sum_groups(x, dout, bounds, tiles, name="grouped_matmul_gradient_b", **common)
            grads["b"] = grad.reshape(arrays["b"].shape)
        return grads

    def defaults(self, shapes, spec, device: DeviceInfo, direction: str):
        """The tiles that are predicted to be the fastest."""
        return self.space(shapes, spec, device, direction)[0]

    @staticmethod
    def handicap(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> int:
        """The batched form is left to XLA: its own product keeps the matrix units as busy, and takes what follows into it."""
        return 0 if "bounds" in shapes else PRIORITY + 1

    def space(self, shapes, spec, device: DeviceInfo, direction: str):
        """Those predicted to be nearly so."""
        found = _Call(shapes, spec).candidates(generation_of(device), direction)
        return [_params(tiles, direction) for tiles in found[:CANDIDATES]]

    def effective(self, shapes, spec, params, device: DeviceInfo, direction: str):
        """Sizes that the hardware takes and that fit into its memory."""
        call, generation = _Call(shapes, spec), generation_of(device)
        shape = call.product() if direction == "forward" else call.gradient_b()
        if None in (params.blocksize_m, params.blocksize_k, params.blocksize_n):
            chosen = self.defaults(shapes, spec, device, direction)
            params = type(params).merge(chosen, type(params)(**{name: getattr(params, name) for name in READS}))
        return _params(shape.fit(_tiles(params), generation), direction)


def _stacked(arrays: dict[str, Array]) -> tuple[Array, Array, Array | None]:
    """One axis in front of rows and of matrices, and the bounds of the ragged form."""
    a, b = arrays["a"], arrays["b"]
    if "bounds" in arrays:
        return a, b[0], arrays["bounds"][0]
    return a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:]), None


def _tiles(params: FwdParams | BwdParams) -> Tiles:
    return Tiles(params.blocksize_m, params.blocksize_k, params.blocksize_n)


def _params(tiles: Tiles, direction: str) -> FwdParams | BwdParams:
    cls = FwdParams if direction == "forward" else BwdParams
    return cls(blocksize_m=tiles.m, blocksize_k=tiles.k, blocksize_n=tiles.n)
