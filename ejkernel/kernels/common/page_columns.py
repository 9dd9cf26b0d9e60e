"""Pages whose tokens a TPU keeps as columns, along the lanes of its vectors."""

from __future__ import annotations

from typing import Any

LANES, SUBLANES = 128, 8


def tokens_are_columns(cache: Any) -> bool:
    """Whether XLA lays out a cache ``[…, page, head dim]`` for a TPU with tokens behind dims.

    It takes the order that needs no padding: where a page fills lanes and the head dim does not, ``[…, head dim, page]``. Seen so,
    with the last two axes exchanged, a kernel takes the array as it lies, and pages are written in place.

    Example:
        >>> import jax
        >>> shapes = (512, 8, 128, 64), (512, 8, 128, 128), (512, 8, 32, 64)
        >>> [tokens_are_columns(jax.ShapeDtypeStruct(shape, "bfloat16")) for shape in shapes]
        [True, False, False]
    """
    page, dim = cache.shape[-2:]
    return page % LANES == 0 and dim % LANES > 0 and dim % SUBLANES == 0
