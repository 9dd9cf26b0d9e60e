"""The static KV cache: made ready for positions, and what it holds."""

from __future__ import annotations

from ejkernel.errors import InvalidInputError
from ejkernel.lab.extras import need
from ejkernel.lab.model.arguments import short
from ejkernel.lab.model.notes import notes_of


def prepare(torch, cache, indices, window, start, states):
    """Make the cache layers ready to take the keys from `start` on, or say why they cannot."""
    cache_utils = need("transformers.cache_utils", "prefill_forward")
    if not isinstance(cache, cache_utils.StaticCache):
        raise InvalidInputError(
            f"past_key_values is {short(cache)}; expected the StaticCache of initialize_kv_cache, or None."
        )
    if indices[-1] >= len(cache.layers):
        raise InvalidInputError(
            f"The passes need cache layer {indices[-1]}, and past_key_values has {len(cache.layers)}; expected a cache "
            "of a config with num_hidden_layers of at least as many."
        )
    stop = start + states.shape[1]
    # The length that was asked for: sliding layers keep the window only, and tell it only where it is shorter.
    full_length = max((each.max_cache_len for each in cache.layers if not each.is_sliding), default=None)
    plan = []
    for index in indices:
        each = cache.layers[index]
        too_narrow = each.is_sliding and (window is None or window > each.max_cache_len)
        widen = too_narrow and start == 0 and (full_length or 0) > each.max_cache_len
        room = each.max_cache_len if too_narrow and not widen else full_length
        if room is not None and stop > room:
            raise InvalidInputError(
                f"position_ids reach {stop - 1}, and cache layer {index} has room for {room} positions; expected a "
                + (
                    f"cache that this layer has filled from position 0, as what was made for sliding layers keeps "
                    f"{room} only."
                    if full_length is not None and stop <= full_length
                    else f"cache of initialize_kv_cache(config, {stop}) or more, and a config that has layers of this type."
                )
            )
        given, began = _kind(states), _kind(each.keys) if each.is_initialized else None
        if began not in (None, given) and not widen:
            raise InvalidInputError(
                "hidden_states has batch {} of {} on {}, ".format(*given)
                + "and cache layer {} began with batch {} of {} on {}: use a new cache.".format(index, *began)
            )
        held = _length(each) if start else 0
        if start > held:
            raise InvalidInputError(
                f"position_ids start at {start}, and cache layer {index} holds {held} positions; run prefill_forward "
                "over those before with this cache first."
            )
        rolled = each.is_sliding and held > each.max_cache_len
        if rolled and start < held - 1:
            raise InvalidInputError(
                f"position_ids start at {start}, and cache layer {index} keeps only the last {each.max_cache_len} of "
                f"{held} positions; expected {held}, {held - 1} or 0."
            )
        plan.append((index, widen, rolled and start == held - 1, start == held > 0))
    stale = []
    for index, widen, roll_back, ready in plan:
        if widen:
            cache.layers[index] = cache_utils.StaticLayer(max_cache_len=full_length)
            continue
        each = cache.layers[index]
        for array in (each.keys, each.values) if each.is_initialized else ():
            if start == 0:
                array.detach_()  # what is forgotten must not stay alive in autograd's graph
            elif roll_back:
                # The newest is to be written again: with it in front, the next update rolls it out instead of the
                # oldest.
                array.copy_(array.roll(1, dims=-2))
        if not ready:
            stale += _set_length(each, start)
    for count in stale[:1]:
        count.fill_(start)
    if stale[1:]:  # in one kernel for all of them
        torch._foreach_copy_(stale[1:], stale[:1] * len(stale[1:]))


def _kind(array):
    return array.shape[0], array.dtype, array.device


# Transformers counts what a cache layer holds in a tensor, in an int, in both, or (full layers in 4.x) not at all: then
# it looks which keys are not 0.


def _counts(cache_layer):
    names = ("cumulative_length_int", "cumulative_length")
    return {name: getattr(cache_layer, name) for name in names if hasattr(cache_layer, name)}


def _length(cache_layer):
    """How many positions a cache layer holds."""
    if not cache_layer.is_initialized:
        return 0
    counts = _counts(cache_layer)
    for count in counts.values():
        if isinstance(count, int):
            return count
    notes = notes_of(counts.get("cumulative_length", cache_layer.keys))
    if "length" not in notes:
        notes["length"] = int(cache_layer.get_seq_length())
    return notes["length"]


def note_length(cache_layer, length):
    """Remember what was written, as reading the tensor that counts it would wait for the device."""
    counts = _counts(cache_layer)
    if not any(isinstance(count, int) for count in counts.values()):
        notes_of(counts.get("cumulative_length", cache_layer.keys))["length"] = length


def _set_length(cache_layer, length):
    """Set the count where it is an int; returns the tensors that are to be set as well."""
    tensors = []
    for name, count in _counts(cache_layer).items():
        if isinstance(count, int):
            setattr(cache_layer, name, length)
        elif cache_layer.is_initialized:
            tensors.append(count)
    return tensors


def keys_seen(cache_layer, start, length):
    """What attention gets from a cache layer's update: the first key's position, and how many keys."""
    room = cache_layer.max_cache_len
    if not cache_layer.is_sliding or start + length <= room:
        return 0, room
    if start < room:
        return 0, start + length
    return start - room + 1, room - 1 + length
