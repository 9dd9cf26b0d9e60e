"""How large the tiles of the Triton kernels are: by default, and worth trying."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.callib.integers import power_of_two, power_of_two_below
from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import BwdParams, FwdParams
from ejkernel.kernels.common import visibility

# Which parameters the kernels read: the backward's kernel for a block of queries has blocks of its own, m and n.
READ_FORWARD = ("q_blocksize", "kv_blocksize", "num_warps", "num_stages")
READ_BACKWARD = (*READ_FORWARD, "blocksize_m", "blocksize_n")
# A tile's side is a power of two between these.
SMALLEST_SIDE, LARGEST_SIDE = 16, 256
# Of a program: 1024 threads, 32 or on AMD 64 a warp.
MOST_WARPS, MOST_WARPS_ON_AMD = 32, 16

# Tiles by generation and padded head dim. Forward and a block of keys: (queries, keys, warps, stages); a block of queries:
# (queries, keys), its warps and stages follow. In each, for calls with: masks known beforehand; a cap or dropout; one
# array that decides what is visible; several of these. They fit the chips' shared memory and spill no register, but for at
# most 16 bytes a thread with the widest heads on small chips.
Tiles = tuple[tuple[int, ...], ...]
FORWARD: dict[str, dict[int, Tiles]] = {
    "hopper": {
        64: ((128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 3), (64, 64, 8, 2)),
        128: ((64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 3), (128, 32, 8, 2)),
        256: ((128, 32, 8, 3), (128, 32, 8, 3), (128, 32, 8, 3), (64, 16, 8, 2)),
    },
    "blackwell": {
        64: ((128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 3)),
        128: ((128, 128, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2), (128, 32, 8, 2)),
        256: ((128, 32, 8, 2), (128, 32, 8, 2), (128, 32, 8, 2), (64, 64, 8, 2)),
    },
    "ampere": {
        64: ((128, 64, 8, 3), (128, 64, 8, 3), (64, 32, 4, 2), (32, 32, 4, 1)),
        128: ((64, 64, 4, 3), (64, 64, 4, 3), (32, 32, 4, 2), (16, 32, 4, 1)),
        256: ((64, 64, 8, 2), (64, 64, 8, 2), (32, 16, 4, 1), (16, 16, 8, 1)),
    },
    "small": {
        64: ((64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
        128: ((64, 32, 4, 2), (64, 32, 4, 2), (32, 16, 4, 1), (16, 16, 4, 1)),
        256: ((32, 32, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
    },
    "amd": {
        64: ((128, 64, 4, 1), (128, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
        128: ((128, 64, 4, 1), (64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
        256: ((64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
    },
}
KEYS: dict[str, dict[int, Tiles]] = {
    "hopper": {
        64: ((64, 64, 4, 3), (32, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2)),
        128: ((32, 128, 8, 2), (32, 64, 8, 2), (32, 128, 8, 2), (16, 32, 4, 1)),
        256: ((16, 128, 8, 3), (16, 128, 8, 3), (16, 128, 8, 3), (16, 16, 4, 1)),
    },
    "blackwell": {
        64: ((64, 64, 4, 3), (64, 64, 4, 3), (64, 128, 8, 2), (32, 32, 4, 2)),
        128: ((64, 128, 8, 3), (64, 128, 8, 3), (32, 128, 8, 2), (16, 32, 4, 1)),
        256: ((32, 128, 8, 2), (32, 128, 8, 2), (32, 64, 8, 2), (16, 32, 8, 1)),
    },
    "ampere": {
        64: ((32, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
        128: ((64, 64, 8, 2), (64, 64, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
        256: ((32, 64, 8, 2), (32, 64, 8, 2), (16, 32, 8, 1), (16, 16, 4, 1)),
    },
    "small": {
        64: ((32, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1)),
        128: ((32, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
        256: ((16, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1)),
    },
    "amd": {
        64: ((32, 64, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1)),
        128: ((32, 64, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1)),
        256: ((16, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
    },
}
QUERIES: dict[str, dict[int, Tiles]] = {
    "hopper": {
        64: ((64, 128), (64, 64), (64, 32), (64, 32)),
        128: ((128, 64), (128, 64), (64, 32), (32, 32)),
        256: ((128, 32), (128, 32), (128, 16), (32, 16)),
    },
    "blackwell": {
        64: ((64, 64), (64, 64), (64, 32), (64, 32)),
        128: ((64, 32), (64, 32), (64, 32), (32, 32)),
        256: ((128, 32), (128, 32), (128, 16), (32, 16)),
    },
    "ampere": {
        64: ((64, 64), (64, 32), (32, 32), (32, 16)),
        128: ((64, 32), (64, 32), (32, 32), (32, 16)),
        256: ((64, 16), (64, 16), (32, 16), (16, 16)),
    },
    "small": {
        64: ((64, 32), (64, 32), (32, 32), (32, 16)),
        128: ((32, 32), (32, 32), (32, 16), (16, 16)),
        256: ((32, 16), (32, 16), (16, 16), (16, 16)),
    },
    "amd": {
        64: ((64, 32), (64, 32), (32, 32), (32, 16)),
        128: ((64, 32), (64, 32), (32, 32), (32, 16)),
        256: ((32, 16), (32, 16), (16, 16), (16, 16)),
    },
}
# In float32 on NVIDIA's chips, by padded head dim: forward, a block of keys, a block of queries, which has as many warps and
# stages as that of keys; for calls with masks known beforehand, and for others. Operands of the tensor cores are held
# twice, as upper and lower halves.
FLOAT32: dict[int, tuple[Tiles, Tiles, Tiles]] = {
    64: (((32, 32, 4, 1), (16, 32, 4, 1)), ((32, 32, 8, 1), (16, 16, 4, 1)), ((32, 32), (16, 16))),
    128: (((16, 32, 8, 1), (16, 32, 8, 1)), ((16, 16, 8, 1), (16, 16, 8, 1)), ((16, 32), (16, 16))),
    256: (((16, 16, 8, 1), (16, 16, 8, 1)), ((16, 16, 16, 1), (16, 16, 16, 1)), ((16, 16), (16, 16))),
}
# Hopper's tensor cores read operands from shared memory, which leaves registers for larger tiles.
FLOAT32_ON_HOPPER: dict[int, tuple[Tiles, Tiles, Tiles]] = {
    **FLOAT32,
    64: (((128, 64, 8, 2), (16, 32, 4, 1)), ((32, 32, 4, 1), (16, 16, 4, 1)), ((64, 64), (16, 16))),
    128: (((32, 32, 4, 2), (16, 32, 8, 1)), ((32, 32, 8, 1), (16, 16, 8, 1)), ((32, 32), (16, 16))),
}
# Worth trying on Hopper beside the defaults; some spill a few registers and are fastest all the same.
FLOAT32_HOPPER_FORWARD = {
    64: ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2)),
    128: ((128, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
    256: ((32, 32, 8, 1),),
}
FLOAT32_HOPPER_KEYS = {
    64: ((32, 32, 4, 1), (32, 64, 4, 2), (16, 64, 8, 1)),
    128: ((16, 32, 8, 1), (32, 32, 8, 1)),
    256: ((16, 16, 16, 1),),
}
FLOAT32_HOPPER_QUERIES = {
    64: ((64, 32), (64, 16)),
    128: ((32, 32), (64, 16)),
    256: ((16, 32),),
}
HOPPER_FORWARD = {
    64: ((128, 64, 8, 3), (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3)),
    128: ((128, 128, 8, 3), (64, 64, 4, 3), (128, 64, 8, 3)),
    256: ((128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 3)),
}
HOPPER_KEYS = {
    64: ((128, 64, 4, 2), (64, 64, 4, 3), (32, 128, 4, 3)),
    128: ((32, 64, 4, 3), (64, 128, 8, 3), (64, 64, 4, 2)),
    256: ((32, 128, 8, 2), (64, 128, 8, 1)),
}
HOPPER_QUERIES = {
    64: ((64, 128), (128, 64), (64, 64)),
    128: ((128, 64), (64, 32), (64, 64)),
    256: ((128, 64), (128, 32)),
}


def generation(device: Any) -> str:
    """Which of the tables is a chip's."""
    if device.vendor == "amd":
        return "amd"
    # Of its generation the A100 alone has shared memory for large tiles; what is not known gets small ones.
    known = {9: "hopper", 10: "blackwell"}
    return known.get(device.capability // 10, "ampere" if device.capability == 80 else "small")


def padded(dim: int) -> int:
    """A head dim as tiles have it."""
    return max(SMALLEST_SIDE, power_of_two(dim))


def effective(params: FwdParams | BwdParams, device: DeviceInfo | None) -> FwdParams | BwdParams:
    """The parameters as the kernels use them."""
    most_warps = MOST_WARPS_ON_AMD if device is not None and device.vendor == "amd" else MOST_WARPS
    used = {
        "q_blocksize": _side(params.q_blocksize or 64),
        "kv_blocksize": _side(params.kv_blocksize or 64),
        "num_warps": min(most_warps, power_of_two_below(params.num_warps or 4)),
        "num_stages": params.num_stages or 2,
    }
    if isinstance(params, BwdParams):
        used["blocksize_m"] = _side(params.blocksize_m or used["q_blocksize"])
        used["blocksize_n"] = _side(params.blocksize_n or used["kv_blocksize"])
    return type(params)(**used)


def _side(size: int) -> int:
    return min(LARGEST_SIDE, max(SMALLEST_SIDE, power_of_two_below(size)))


def widest(shapes: dict[str, Any]) -> int:
    return max(64, padded(max(shapes["query"].shape[3], shapes["value"].shape[3])))


def _load(shapes: dict[str, Any], spec: Any) -> int:
    """Which of a generation's tiles: see the tables."""
    deciding = len(visibility.BY_DATA & shapes.keys())
    shaping = (spec.logits_soft_cap is not None) + bool(spec.dropout_prob)
    if deciding + shaping > 1 or (deciding and "softmax_aux" in shapes):
        return 3
    return 2 if deciding else 1 if shaping else 0


def default(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
    if shapes["query"].dtype == jnp.float32:
        return _in_float32(shapes, spec, device, direction)
    chips, width, load = generation(device), widest(shapes), _load(shapes, spec)
    if direction == "forward":
        return _forward_params(FORWARD[chips][width][load])
    return _backward_params(KEYS[chips][width][load], QUERIES[chips][width][load])


def _in_float32(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> FwdParams | BwdParams:
    """Products keep their operands in registers: small tiles."""
    if device.vendor == "nvidia":
        tables = FLOAT32_ON_HOPPER if generation(device) == "hopper" else FLOAT32
        forward, keys, queries = (tiles[min(1, _load(shapes, spec))] for tiles in tables[widest(shapes)])
        return _forward_params(forward) if direction == "forward" else _backward_params(keys, queries)
    side = 32 if widest(shapes) == 64 and not _load(shapes, spec) else 16
    if direction == "forward":
        return _forward_params((side, side, 8, 1))
    return _backward_params((side, side, 16 if widest(shapes) == 256 else 8, 1), (side, side))


def candidates(shapes: dict[str, Any], spec: Any, device: Any, direction: str) -> list[FwdParams | BwdParams]:
    if generation(device) != "hopper":
        return []
    forward, keys, queries = HOPPER_FORWARD, HOPPER_KEYS, HOPPER_QUERIES
    if shapes["query"].dtype == jnp.float32:
        forward, keys, queries = FLOAT32_HOPPER_FORWARD, FLOAT32_HOPPER_KEYS, FLOAT32_HOPPER_QUERIES
    width = widest(shapes)
    if direction == "forward":
        return [_forward_params(tiles) for tiles in forward[width]]
    return [_backward_params(k, q) for k in keys[width] for q in queries[width]]


def _forward_params(tiles: tuple[int, ...]) -> FwdParams:
    q, kv, warps, stages = tiles
    return FwdParams(q_blocksize=q, kv_blocksize=kv, num_warps=warps, num_stages=stages)


def _backward_params(keys: tuple[int, ...], queries: tuple[int, ...]) -> BwdParams:
    q, kv, warps, stages = keys
    return BwdParams(
        q_blocksize=q,
        kv_blocksize=kv,
        blocksize_m=queries[0],
        blocksize_n=queries[1],
        num_warps=warps,
        num_stages=stages,
    )
