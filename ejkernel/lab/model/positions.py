"""Positions of tokens, and the embeddings that belong to them: read once, and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ejkernel.errors import InvalidInputError
from ejkernel.lab.arguments import integer
from ejkernel.lab.model.arguments import need_tensor, short
from ejkernel.lab.model.notes import notes_of


def first_position(torch, position_ids, batch, length):
    """The first position."""
    need_tensor(torch, "position_ids", position_ids, f"[{batch}, {length}]")
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
        raise InvalidInputError(
            f"position_ids has the shape {tuple(position_ids.shape)}; expected [{batch}, {length}], one for each token "
            "(without the cache: also for those before the new one)."
        )
    start = first_of_consecutive(torch, "position_ids", position_ids)
    if start is None or start < 0:
        raise InvalidInputError(
            f"position_ids is {short(position_ids.tolist())}; expected consecutive ones, alike in all rows."
        )
    return start


def check_cache_positions(torch, cache_positions, start, batch, length):
    """Refuse other positions than the tokens': in one row, in the same row for each of the batch, or the only one."""
    given, shape = None if isinstance(cache_positions, torch.Tensor) else integer(cache_positions), ()
    first = given
    if given is None:
        need_tensor(torch, "cache_positions", cache_positions, f"[{length}], or an int")
        shape = tuple(cache_positions.shape)
        first = first_of_consecutive(torch, "cache_positions", cache_positions)
    shapes = [(length,), (1, length), (batch, length)] + [()] * (length == 1)
    if shape not in shapes or first != start:
        raise InvalidInputError(
            f"cache_positions is {short(cache_positions.tolist() if given is None else given)}; expected the new "
            f"token's position as in position_ids, {short([*range(start, start + length)])}."
        )


def first_of_consecutive(torch, name, positions):
    """The first of consecutive positions, alike in all rows; None if they are not."""
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise InvalidInputError(f"{name} is of {positions.dtype}; expected integers, as of torch.int64.")
    if positions.device.type == "cpu":
        return _read_first(torch, positions)
    notes = notes_of(positions)
    if "first" not in notes:
        notes["first"] = _read_first(torch, positions.cpu())
    return notes["first"]


def _read_first(torch, positions):
    first = next(iter(positions.reshape(-1)[:1].tolist()), None)
    if positions.numel() > 1:
        consecutive = torch.arange(first, first + positions.shape[-1]).expand_as(positions)
        return first if torch.equal(positions.long(), consecutive) else None
    return first


def embeddings_of(torch, embeddings, attention, batch, length):
    """The pair for the layer's type."""
    if isinstance(embeddings, Mapping):
        layer_type = "sliding_attention" if attention.is_sliding else "full_attention"
        if layer_type not in embeddings:
            raise InvalidInputError(f"position_embeddings has {sorted(embeddings)}; the layer needs {layer_type!r}.")
        embeddings = embeddings[layer_type]
    if not isinstance(embeddings, Sequence) or len(embeddings) != 2:
        raise InvalidInputError(f"position_embeddings is {short(embeddings)}; expected (cos, sin), or a dict of them.")
    for name, array in zip(("cos", "sin"), embeddings, strict=True):
        need_tensor(torch, f"{name} of position_embeddings", array, f"[{batch}, {length}, {attention.head_dim}]")
        if tuple(array.shape) not in ((batch, length, attention.head_dim), (1, length, attention.head_dim)):
            raise InvalidInputError(
                f"{name} of position_embeddings has the shape {tuple(array.shape)}; expected "
                f"[{batch}, {length}, {attention.head_dim}], one row for each of position_ids."
            )
    return tuple(embeddings)
