"""Launching the kernels for few queries and many keys, in pages or in one array: what paged attention and dense decoding share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.callib.integers import power_of_two, power_of_two_below
from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import FwdParams
from ejkernel.kernels._triton.call import call, cores, on_nvidia, passes_twice
from ejkernel.kernels._triton.flash_blocks import padded
from ejkernel.kernels._triton.page_plan import ROUNDING, Plan, plan, tile_count
from ejkernel.kernels.common.decoding import MOST_ROWS
from ejkernel.kernels.common.query_tiles import Sequences

# Rows a tile: tensor cores take 16 at least, and 64 are enough for chunks of prompts, measured on an H200.
FEWEST_ROWS = 16
# Keys a tile.
FEWEST_KEYS, MOST_KEYS = 16, 256
MOST_WARPS = 8
# Warps of all programs of a multiprocessor: so many are resident however many registers a kernel takes.
WARPS_PER_CORE = 8
# So many tiles for each program are balanced well enough: they are not cut, and those that share keys run together.
ENOUGH_TILES = 4
# Tiles that one launch plans, and comparisons of a program of it.
MOST_SCHEDULED, COMPARED = 4096, 2**13
# Caches of 8 bits, by dtype.
NARROW = {"int8": "int8", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
OLDEST_WITH_E4M3 = 89
# Slots that one program of ``combine`` joins at once.
JOINED = 64


@dataclass(frozen=True)
class Rows:
    """What the kernels are given beside a plan: ``query [T, H, D]`` and keys and values, in pages or not."""

    query: Array
    key: Array
    value: Array
    tables: Array
    kv_heads: int
    page: int
    blocks: int
    kv_len: int
    batch: int
    scale: float
    cap: float | None
    left: int | Array | None
    causal: bool
    sinks: Array | None
    k_scale: Array | None
    v_scale: Array | None

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.kv_heads

    @property
    def by_data(self) -> bool:
        """Whether only the device knows the window."""
        return isinstance(self.left, Array)


def attend(
    r: Rows,
    s: Sequences,
    params: FwdParams,
    device: DeviceInfo | None,
) -> tuple[Array, Array]:
    """Output ``[T, H, Dv]`` and log-sum-exp ``[T, H]`` of all tokens, each of which is of a sequence."""
    from ejkernel.kernels._triton import page_kernels

    tokens, heads, dim = r.query.shape
    value_dim, bm, bn = r.value.shape[-1], params.q_blocksize, params.kv_blocksize
    tiles = tile_count(s.tokens, s.size, r.group, bm, s.packed)
    pieces = params.num_key_splits
    programs = cores(device) * max(1, WARPS_PER_CORE // params.num_warps)
    programs = tiles * r.kv_heads * pieces if pieces else programs
    whole = not pieces and tiles * r.kv_heads >= ENOUGH_TILES * programs
    p = _planned(r, s, params, tiles, programs, device)
    narrow = NARROW.get(r.key.dtype.name, "")
    constants = page_kernels.PageConstants(
        heads=heads,
        group=r.group,
        dim=dim,
        value_dim=value_dim,
        bd=padded(dim),
        bv=padded(value_dim),
        bm=bm,
        bn=bn,
        page=r.page,
        scale=float(r.scale),
        cap=float(r.cap or 0.0),
        left=-1 if r.left is None or r.by_data else r.left,
        left_by_data=r.by_data,
        causal=r.causal,
        sinks=r.sinks is not None,
        k_scale=r.k_scale is not None,
        v_scale=r.v_scale is not None,
        precision="ieee" if r.query.dtype == jnp.float32 else "tf32",
        whole=whole,
        fast_tanh=r.cap is not None and r.query.dtype != jnp.float32 and on_nvidia(device),
        cache=narrow,
        converts=_converts(narrow, device),
    )
    results = (
        jax.ShapeDtypeStruct((tokens, heads, value_dim), r.query.dtype),
        jax.ShapeDtypeStruct((tokens, heads), jnp.float32),
    )
    slots = 1 if whole else 2 * programs
    parts = (
        jax.ShapeDtypeStruct((slots, bm, value_dim), jnp.float32),
        jax.ShapeDtypeStruct((slots, bm), jnp.float32),
    )
    nothing = r.query
    # Triton knows fewer float types of 8 bits on some chips than JAX does: kernels get bits.
    keys, values = (
        lax.bitcast_convert_type(x, jnp.uint8) if narrow in ("e4m3", "e5m2") else x for x in (r.key, r.value)
    )
    sinks, k_scale, v_scale = (nothing if x is None else x for x in (r.sinks, r.k_scale, r.v_scale))
    steps = [0 if x is None or x.shape[0] == 1 else x.shape[1] for x in (r.sinks, r.k_scale, r.v_scale)]
    work = [jnp.asarray(x) for x in (p.tiles, p.starts, p.header)]
    inputs = [r.query, keys, values, r.tables, sinks, k_scale, v_scale, *work]
    out, lse, part, part_lse = call(
        page_kernels.attend,
        inputs,
        [r.tables.shape[-1], r.blocks, r.kv_len, r.batch, *steps, tiles],
        (*results, *parts),
        programs=tiles * r.kv_heads if whole else programs,
        constants=constants,
        num_warps=params.num_warps,
        num_stages=params.num_stages,
        device=device,
    )
    if whole or programs == 1:
        return out, lse
    rows_each = bm if s.packed else min(bm, s.tokens // s.size * r.group)
    out, lse = call(
        page_kernels.combine_into if passes_twice() else page_kernels.combine,
        [part, part_lse, sinks, *work, out, lse],
        [rows_each, r.batch, steps[0]],
        results,
        programs=(programs - 1) * rows_each,
        constants=replace(constants, bn=JOINED),
        num_warps=4,
        num_stages=1,
        device=device,
        in_place={6: 0, 7: 1},
    )
    return out, lse


def defaults(rows: int, width: int, page: int, dtype: Any, cache: Any, device: DeviceInfo | None) -> FwdParams:
    """Tiles where nothing was tuned.

    ``rows`` of a sequence and key head (on the average), ``width`` is the wider head dim, ``page`` tokens a page (0: none).
    """
    rows = min(MOST_ROWS, max(FEWEST_ROWS, power_of_two(rows)))
    wide, narrow = padded(width) > 128, padded(width) <= 64
    if dtype == jnp.float32:
        return FwdParams(q_blocksize=min(rows, 32), kv_blocksize=16 if wide else 32, num_warps=4, num_stages=1)
    if device is not None and device.vendor == "amd":
        return FwdParams(q_blocksize=min(rows, 64), kv_blocksize=32 if wide else 64, num_warps=4, num_stages=1)
    if jnp.dtype(cache).name in NARROW:
        keys, warps, stages = (32 if wide else 64), 2, 5
    elif wide:
        keys, warps, stages = 32, 4, 5
    elif narrow:
        keys, warps, stages = 128, 2, 3
    else:
        # Pages that take a whole step are addressed by one entry of the table.
        keys, warps, stages = (64, 4, 5) if page >= 64 and page % 64 == 0 else (128, 4, 3)
        if page >= 128 and page % 64 == 0:
            warps, stages = 2, 3
    if rows > 32:
        spread = wide or (device is not None and device.capability >= 100)
        keys, warps, stages = min(keys, 64), 8 if spread else 4, 3 if wide else 5
    return FwdParams(q_blocksize=rows, kv_blocksize=keys, num_warps=warps, num_stages=stages)


def candidates(first: FwdParams, dtype: Any) -> list[FwdParams]:
    """Tiles worth trying."""
    if dtype == jnp.float32:
        return []
    return [
        replace(first, kv_blocksize=keys, num_warps=warps, num_stages=stages)
        for keys, stages in ((64, 3), (64, 5), (128, 3))
        for warps in (2, 4)
    ]


def effective(params: FwdParams, first: FwdParams) -> FwdParams:
    """The parameters as the kernels use them; ``first`` are the defaults."""
    rows = power_of_two_below(params.q_blocksize or first.q_blocksize)
    keys = power_of_two_below(params.kv_blocksize or first.kv_blocksize)
    return FwdParams(
        q_blocksize=min(MOST_ROWS, max(FEWEST_ROWS, rows)),
        kv_blocksize=min(MOST_KEYS, max(FEWEST_KEYS, keys)),
        num_key_splits=params.num_key_splits,
        num_warps=min(MOST_WARPS, power_of_two_below(params.num_warps or first.num_warps)),
        num_stages=params.num_stages or first.num_stages,
    )


def _planned(r: Rows, s: Sequences, params: FwdParams, tiles: int, programs: int, device: DeviceInfo | None) -> Plan:
    """The plan of a call: by one launch where lengths are data and each sequence has as many tiles as the others."""
    from ejkernel.kernels._triton import page_kernels

    sizes = {"k_heads": r.kv_heads, "group": r.group, "bm": params.q_blocksize, "bn": params.kv_blocksize}
    if isinstance(s.lens, np.ndarray) or s.packed or r.by_data or tiles > MOST_SCHEDULED:
        pieces = params.num_key_splits
        return plan(s, tiles, programs, **sizes, left=r.left, causal=r.causal, pieces=pieces)
    size = power_of_two(tiles)
    block = max(4, min(64, COMPARED // size))
    shapes = ((tiles, 8), (programs, 2), (2,))
    made = call(
        page_kernels.schedule,
        [s.lens, s.begin, s.count, s.row],
        [s.size, programs],
        [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        programs=-(-programs // block),
        constants=page_kernels.ScheduleConstants(
            size=size,
            each=tiles // s.size,
            block=block,
            left=-1 if r.left is None else r.left,
            pieces=params.num_key_splits or 0,
            rounding=ROUNDING,
            **sizes,
        ),
        num_warps=4,
        num_stages=1,
        device=device,
    )
    return Plan(*made)


def _converts(narrow: str, device: DeviceInfo | None) -> bool:
    """Whether there are instructions for a cache of 8 bits: those for e4m3 came with capability 8.9."""
    if not narrow or not on_nvidia(device):
        return False
    return narrow != "e4m3" or (device is not None and device.capability >= OLDEST_WITH_E4M3)
