"""The kernels' tile sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

from ejkernel.contracts.params import BwdParams, FwdParams, params_class
from ejkernel.kernels._pallas.gpu.flash_attention_sm90.plan import ROWS, SHARED_MEMORY

READS = ("blocksize_m", "blocksize_n", "num_stages")
COLUMNS = (64, 128, 256)
LARGEST_ROWS = 128
INNER = 64  # of a step
MOST_STAGES = 16
# What barriers take, and where a tile is.
BESIDE_TILES = 2048
# Rows that a group has on average from which on tiles have 128 of them.
MANY_ROWS = 64


class Tiles(NamedTuple):
    """Rows and columns of a tile of the result, and slots of the ring."""

    rows: int
    columns: int
    stages: int


def fitting(rows: int, columns: int, stages: int) -> Tiles:
    """The tile that is taken if this one is asked for."""
    rows = ROWS if rows <= ROWS else LARGEST_ROWS
    columns = max((size for size in COLUMNS if size <= columns), default=COLUMNS[0])
    most = (SHARED_MEMORY - BESIDE_TILES) // (2 * INNER * (rows + columns))
    return Tiles(rows, columns, max(2, min(stages, most, MOST_STAGES)))


def tiles_of(params: FwdParams | BwdParams) -> Tiles:
    """Those of parameters, whatever they leave open."""
    return fitting(
        params.blocksize_m or LARGEST_ROWS, params.blocksize_n or COLUMNS[-1], params.num_stages or MOST_STAGES
    )


def for_sums(tiles: Tiles) -> Tiles:
    """The tile of a gradient of ``b``: how few rows the groups have does not matter there."""
    return fitting(LARGEST_ROWS, tiles.columns, MOST_STAGES)


def effective(params: FwdParams | BwdParams) -> FwdParams | BwdParams:
    """The parameters as the kernels use them."""
    return _params(type(params), tiles_of(params))


def defaults(shapes: dict[str, Any], direction: str) -> FwdParams | BwdParams:
    """The tile where nothing was tuned.

    Of few rows a program has little to multiply while a matrix is copied: narrow tiles are more programs. The gradient of ``b``,
    whose tiles are as wide, has as much to multiply as ever.
    """
    few = shapes["a"].shape[-2] / max(1, shapes["b"].shape[1]) < MANY_ROWS
    columns = 128 if few and direction == "forward" else 256
    return _params(params_class(direction), fitting(ROWS if few else LARGEST_ROWS, columns, MOST_STAGES))


def space(direction: str) -> list[FwdParams] | list[BwdParams]:
    """Tiles worth timing."""
    every = [fitting(rows, columns, MOST_STAGES) for rows in (128, 64) for columns in (256, 128, 64)]
    return [_params(params_class(direction), tiles) for tiles in every]


def _params(kind: type, tiles: Tiles) -> Any:
    return kind(blocksize_m=tiles.rows, blocksize_n=tiles.columns, num_stages=tiles.stages)
