"""Sizes of the kernel's tiles, steps and buffers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ejkernel.callib.chips import MIB
from ejkernel.callib.integers import power_of_two, power_of_two_below
from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import FwdParams
from ejkernel.kernels._pallas.tpu.generations import LANES, SUBLANES, generation_of
from ejkernel.kernels.common.page_columns import tokens_are_columns

# Generations whose two cores are one device: each takes half of the key heads.
TWO_CORES = ("tpu-v4", "tpu-v5p")
# Keys and values a step, and keys: enough for what a step costs beside its products, few enough to stay in registers.
BYTES_PER_STEP, KEYS_PER_STEP = 2 * MIB, 1024
MOST_UNITS = LANES  # entries of the tables that one copy brings
# Three buffers: one is computed on while two are filled, so the memory is never without a request.
STAGES, MOST_STAGES = 3, 8
ROWS_PER_TILE, MOST_ROWS = 256, 512
# Of the vector memory, for pages. The rest holds queries, results and what the compiler keeps of a step.
PAGES_SHARE = 0.5


@dataclass(frozen=True)
class Geometry:
    """A tile has ``tokens`` of one sequence, and for each of ``heads`` key heads ``rows``: tokens with the query heads that share it.

    A step takes ``units`` copies of ``unit`` keys, each a page or one of its ``parts``; ``stages`` buffers hold a step each.
    """

    tokens: int
    rows: int
    heads: int
    unit: int
    units: int
    parts: int
    stages: int

    @property
    def keys(self) -> int:
        """Of a step."""
        return self.unit * self.units

    @property
    def params(self) -> FwdParams:
        """The same as parameters."""
        return FwdParams(
            blocksize_m=self.tokens, kv_blocksize=self.keys, blocksize_heads=self.heads, num_stages=self.stages
        )


def defaults(shapes: dict[str, Any], device: DeviceInfo | None) -> FwdParams:
    """Parameters where nothing was tuned."""
    query, kv_heads = shapes["query"], shapes["key_cache"].shape[2]
    average = -(-query.shape[1] // max(1, shapes["context_lens"].shape[1]))
    tokens = min(power_of_two(average), power_of_two_below(max(1, ROWS_PER_TILE * kv_heads // query.shape[2])))
    halved = device is not None and device.name in TWO_CORES and kv_heads % 2 == 0
    program_heads = kv_heads // 2 if halved else kv_heads
    keys = power_of_two_below(max(LANES, BYTES_PER_STEP // (program_heads * _key_bytes(shapes))))
    # Of several heads, so that a step's latency is not what takes longest where a key has few bytes.
    most = KEYS_PER_STEP * (2 if program_heads >= SUBLANES // 2 else 1)
    asked = FwdParams(
        blocksize_m=tokens,
        kv_blocksize=min(keys, most),
        blocksize_heads=program_heads,
        num_stages=STAGES,
    )
    return geometry(shapes, asked, device).params


def candidates(shapes: dict[str, Any], device: DeviceInfo | None) -> list[FwdParams]:
    """Parameters worth timing."""
    first = defaults(shapes, device)
    asked = [
        dataclasses.replace(first, kv_blocksize=first.kv_blocksize * times // 2, num_stages=stages)
        for times in (1, 2, 4)
        for stages in (STAGES, STAGES + 1)
    ]
    return list(dict.fromkeys(geometry(shapes, params, device).params for params in asked))


def geometry(shapes: dict[str, Any], params: FwdParams, device: DeviceInfo | None) -> Geometry:
    """What was asked for, clipped to what there is and to what fits the vector memory; steps of whole copies."""
    _, tokens, heads, _ = shapes["query"].shape
    _, _, kv_heads, page, _ = shapes["key_cache"].shape
    group = heads // kv_heads
    tile = 1
    if "query_starts" in shapes:
        tile = power_of_two_below(min(params.blocksize_m or ROWS_PER_TILE, max(1, MOST_ROWS // group)))
        tile = min(tile, power_of_two(tokens))
    asked = params.kv_blocksize or KEYS_PER_STEP
    unit = _part(page, max(asked, LANES))
    longest = power_of_two(-(-shapes["block_tables"].shape[2] * page // unit))
    units = min(power_of_two_below(max(1, asked // unit)), longest, MOST_UNITS) if unit == page else 1
    found = Geometry(
        tokens=tile,
        rows=-(-tile * group // SUBLANES) * SUBLANES,
        heads=_divisor(kv_heads, params.blocksize_heads or kv_heads),
        unit=unit,
        units=units,
        parts=page // unit,
        stages=min(max(2, params.num_stages or STAGES), MOST_STAGES),
    )
    most = PAGES_SHARE * generation_of(device).vmem_bytes
    while page_bytes(shapes, found) > most:
        smaller = _smaller(found, page, kv_heads)
        if smaller == found:
            break
        found = smaller
    return found


def _smaller(g: Geometry, page: int, kv_heads: int) -> Geometry:
    """One that holds less, where anything is left to give up."""
    part = _part(page, max(LANES, g.unit // 2))
    if g.stages > 2:
        return dataclasses.replace(g, stages=g.stages - 1)
    if g.keys > LANES and g.units > 1:
        return dataclasses.replace(g, units=g.units // 2)
    if part < g.unit:
        return dataclasses.replace(g, unit=part, units=1, parts=page // part)
    return dataclasses.replace(g, heads=_divisor(kv_heads, max(1, g.heads - 1)))


def page_bytes(shapes: dict[str, Any], g: Geometry) -> int:
    """Of all buffers for keys and values."""
    return g.stages * g.keys * g.heads * _key_bytes(shapes)


def _key_bytes(shapes: dict[str, Any]) -> int:
    """Of a key and its value in vector memory."""
    caches = shapes["key_cache"], shapes["value_cache"]
    numbers = sum(x.shape[4] if tokens_are_columns(x) else -(-x.shape[4] // LANES) * LANES for x in caches)
    return numbers * jnp.dtype(caches[0].dtype).itemsize


def _part(page: int, most: int) -> int:
    """The largest part of a page with so many keys at most that copies can take."""
    sizes = (page // parts for parts in range(1, page // LANES + 1) if page % (parts * LANES) == 0)
    return page if page <= most else next((size for size in sizes if size <= most), page)


def _divisor(number: int, most: int) -> int:
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)
