"""Attention masks: causal, within a window, over the keys that a cache layer shows."""

from __future__ import annotations

from ejkernel.lab.model.notes import notes_of

LARGEST_KEPT = 2**26
"""Bytes of the largest mask that outlives its call: a larger one costs more in memory than in time."""


def masks_of(position_ids, start):
    """The masks that calls with this tensor have made: those of one step live as long as its positions."""
    notes = notes_of(position_ids)
    if notes.get("start") != start:  # a tensor may share its memory with something else that writes
        notes |= {"start": start, "masks": {}}
    return notes["masks"]


def mask_for(torch, made, start, length, first, keys, window, states, implementation):
    """Which keys each query sees; None where SDPA's own causal path says the same, as only that has fused kernels."""
    if implementation == "sdpa" and start == first and length > 1 and (window is None or length <= window):
        return None
    name = first, keys, window, implementation, states.dtype, states.device
    mask = made.get(name)
    if mask is None:
        with torch.inference_mode(False):  # autograd takes it then in a later call, too
            mask = _new_mask(torch, start, length, first, keys, window, states, implementation)
        if mask.nbytes <= LARGEST_KEPT:
            made[name] = mask
    return mask


def _new_mask(torch, start, length, first, keys, window, states, implementation):
    query = torch.arange(start, start + length, device=states.device)[:, None]
    key = torch.arange(first, first + keys, device=states.device)
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    seen = seen[None, None]
    if implementation == "sdpa":
        return seen
    return torch.zeros(seen.shape, dtype=states.dtype, device=states.device).masked_fill_(
        ~seen, torch.finfo(states.dtype).min
    )
