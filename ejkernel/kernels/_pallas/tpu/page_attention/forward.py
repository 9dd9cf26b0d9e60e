"""The plan of a call, and its launch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.contracts.device import DeviceInfo
from ejkernel.contracts.params import FwdParams
from ejkernel.kernels._pallas.tpu.call import launch
from ejkernel.kernels._pallas.tpu.generations import LANES, generation_of
from ejkernel.kernels._pallas.tpu.page_attention import kernel as device_side
from ejkernel.kernels._pallas.tpu.page_attention.geometry import Geometry, geometry
from ejkernel.kernels._pallas.tpu.page_attention.kernel import LEAD, STATES, Config, kernel
from ejkernel.kernels.common.page_columns import tokens_are_columns
from ejkernel.kernels.common.page_work import forward_work
from ejkernel.kernels.common.query_tiles import QueryTiles, Sequences, most_tiles, query_tiles, sequences


def forward(
    arrays: dict[str, Array],
    spec: Any,
    params: FwdParams,
    *,
    device: DeviceInfo | None = None,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Attention output ``[N, T, H, Dv]`` and the lse of its logits ``[N, T, H]``; ``interpret``: without a TPU."""
    g = geometry(arrays, params, device)
    query, keys, values = (arrays[name] for name in ("query", "key_cache", "value_cache"))
    examples, tokens, heads, dim = query.shape
    _, blocks, kv_heads, _, value_dim = values.shape
    group, programs = heads // kv_heads, kv_heads // g.heads
    s = sequences(arrays)
    cut = query_tiles(s, g.tokens) if s.packed else None
    c = Config(
        geometry=g,
        group=group,
        value_dim=value_dim,
        blocks=blocks,
        kv_heads=kv_heads,
        scale=float(spec.softmax_scale),
        cap=spec.logits_soft_cap,
        left=spec.left,
        left_by_data="window_left" in arrays,
        sinks="softmax_aux" in arrays,
        k_scale=stride(arrays, "k_scale"),
        v_scale=stride(arrays, "v_scale"),
        columns=(tokens_are_columns(keys), tokens_are_columns(values)),
    )
    left = arrays["window_left"][0] if c.left_by_data else spec.left
    table, needed = plan(s, cut, g, arrays, left)
    if c.left_by_data:
        needed = jnp.concatenate([needed, left[None]])
    count = most_tiles(s.tokens, s.size, g.tokens) if cut else s.size

    def block(*shape):
        def index(program, tile, _, needed):
            # Past the last needed tile nothing is copied.
            return (jnp.clip(needed[0] - 1, 0, tile), program, *[0] * len(shape))

        return pl.BlockSpec((1, 1, *shape), index)

    def sink_block(own):
        def index(program, tile, tiles, _):
            return (tiles[tile * device_side.COLUMNS + device_side.EXAMPLE] if own else 0, program, 0, 0, 0)

        return pl.BlockSpec((1, 1, g.heads, g.rows, LANES), index)

    inputs = {
        "query": (rows_of(query, cut, g, kv_heads, programs), block(g.heads, g.rows, dim)),
        "entries": (chunks(s.tables), pl.BlockSpec(memory_space=pl.ANY)),
    }
    buffers = []
    for name, cache, columns in zip(("keys", "values"), (keys[0], values[0]), c.columns, strict=True):
        inputs[name] = (cache.swapaxes(2, 3) if columns else cache, pl.BlockSpec(memory_space=pl.ANY))
        page = (cache.shape[3], g.unit) if columns else (g.unit, cache.shape[3])
        buffers.append(pltpu.VMEM((g.stages, g.units, g.heads, *page), cache.dtype))
    if c.sinks:
        sinks = arrays["softmax_aux"]
        inputs["sinks"] = (sink_rows(sinks, g, kv_heads, programs), sink_block(sinks.shape[0] > 1))
    factors = {
        name: (arrays[name].astype(jnp.float32).reshape(-1), pl.BlockSpec(memory_space=pltpu.SMEM))
        for name in ("k_scale", "v_scale")
        if name in arrays
    }
    inputs = factors | inputs
    lanes = -(-g.rows // LANES) * LANES
    statistics = pltpu.VMEM((g.heads, g.rows, LANES), jnp.float32)
    work = forward_work(arrays, spec.left)
    out, lse = launch(
        functools.partial(kernel, c),
        (table.reshape(-1), needed, *(array for array, _ in inputs.values())),
        name="page_attention",
        out_shape=(
            jax.ShapeDtypeStruct((count, programs, g.heads, g.rows, value_dim), query.dtype),
            jax.ShapeDtypeStruct((count, programs, g.heads, lanes), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(programs, count),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=(block(g.heads, g.rows, value_dim), block(g.heads, lanes)),
            scratch_shapes=[
                pltpu.SMEM((STATES,), jnp.int32),
                pltpu.SMEM((LEAD + 1, 1, LANES), jnp.int32),
                *buffers,
                statistics,
                statistics,
                pltpu.VMEM((g.heads, g.rows, value_dim), jnp.float32),
                pltpu.SemaphoreType.DMA((g.stages,)),
                pltpu.SemaphoreType.DMA((LEAD + 1,)),
            ],
        ),
        semantics=("parallel", "arbitrary"),
        generation=generation_of(device),
        flops=work.flops,
        transcendentals=work.pairs,
        bytes_accessed=work.bytes,
        bounds_checks=False,
        interpret=interpret,
    )
    out = tokens_of(out.reshape(count, kv_heads, g.rows, value_dim), cut, g, group, 0)
    lse = tokens_of(lse.reshape(count, kv_heads, lanes, 1), cut, g, group, -jnp.inf)
    out, lse = out.reshape(examples, tokens, heads, value_dim), lse.reshape(examples, tokens, heads)
    if cut is not None and c.sinks:
        # Padding sees nothing but the sinks.
        owned = cut.owned.reshape(examples, tokens, 1)
        lse = jnp.where(owned, lse, arrays["softmax_aux"][:, None].astype(lse.dtype))
    return out, lse


def plan(s: Sequences, cut: QueryTiles | None, g: Geometry, arrays: dict[str, Array], left: Any) -> tuple[Array, Array]:
    """What each tile is, ``[n, COLUMNS]``, and how many are needed, ``[1]``; see ``kernel.py``."""
    if cut is None:
        owner = jnp.arange(s.size, dtype=jnp.int32)
        count, place = jnp.ones_like(owner), s.lens - 1
        needed = jnp.full((1,), s.size, jnp.int32)
    else:
        owner = cut.sequence
        place = s.lens[owner] - s.count[owner] + cut.token[:, 0] - s.begin[owner]
        count = cut.real.sum(1, dtype=jnp.int32)
        needed = (count > 0).sum(dtype=jnp.int32)[None]
    stop = jnp.maximum(place + count, 0)
    start = jnp.zeros_like(stop) if left is None else jnp.clip(place - left, 0, stop)
    first, last = start // g.unit, -(-stop // g.unit)
    base = first // g.units * g.units
    steps = jnp.maximum(-(-(last - base) // g.units), 1)
    each = -(-s.tables.shape[1] // LANES)
    columns = {
        device_side.CHUNK: s.row[owner] * each,
        device_side.PLACE: place,
        device_side.COUNT: count,
        device_side.BASE: base,
        device_side.STEPS: steps,
        device_side.FIRST: first,
        device_side.LAST: last,
        device_side.EXAMPLE: owner // (s.size // arrays["query"].shape[0]),
    }
    return jnp.stack([columns[i].astype(jnp.int32) for i in range(device_side.COLUMNS)], -1), needed


def stride(arrays: dict[str, Array], name: str) -> int | None:
    """From one example's factors to the next one's: 0 if all share them, None if there are none."""
    if name not in arrays:
        return None
    return arrays[name].shape[1] if arrays[name].shape[0] > 1 else 0


def chunks(tables: Array) -> Array:
    """Tables ``[S, max_blocks]`` in chunks that one copy takes, ``[S * n, 1, 128]``."""
    padded = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % LANES)))
    return padded.reshape(-1, 1, LANES)


def rows_of(query: Array, cut: QueryTiles | None, g: Geometry, kv_heads: int, programs: int) -> Array:
    """``[N, T, H, D]`` as ``[n, programs, heads, rows, D]``: rows are tokens with the query heads that share a key head."""
    dim, group = query.shape[3], query.shape[2] // kv_heads
    query = query.reshape(-1, kv_heads, group, dim)
    query = query[:, None] if cut is None else cut.rows(query)
    query = query.swapaxes(1, 2).reshape(-1, kv_heads, g.tokens * group, dim)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, g.rows - g.tokens * group), (0, 0)))
    return query.reshape(-1, programs, g.heads, g.rows, dim)


def tokens_of(rows: Array, cut: QueryTiles | None, g: Geometry, group: int, padding: float) -> Array:
    """``[n, kv_heads, rows, d]`` as ``[N * T, kv_heads, group, d]``."""
    count, kv_heads, _, last = rows.shape
    rows = rows[:, :, : g.tokens * group].reshape(count, kv_heads, g.tokens, group, last).swapaxes(1, 2)
    return rows[:, 0] if cut is None else cut.tokens(rows, padding)


def sink_rows(sinks: Array, g: Geometry, kv_heads: int, programs: int) -> Array:
    """``[N|1, H]`` as ``[N|1, programs, heads, rows, 128]``."""
    each = jnp.tile(sinks.astype(jnp.float32).reshape(-1, kv_heads, sinks.shape[1] // kv_heads), (1, 1, g.tokens))
    each = jnp.pad(each, ((0, 0), (0, 0), (0, g.rows - each.shape[2])))
    return jnp.broadcast_to(each[..., None], (*each.shape, LANES)).reshape(-1, programs, g.heads, g.rows, LANES)
