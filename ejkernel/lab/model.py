"""Prefill and decode through Gemma 3's decoder layers, with a KV cache and without.

The layers, rotary embeddings and caches are transformers' own. What a bare layer leaves to its caller is done here: the
attention mask (causal, within the window of a sliding layer, nothing of the cache that is not written yet) and where in
the cache the keys go. Prefill, decode with a cache, decode without one and the forward over all tokens therefore agree.

Positions decide what the cache holds: a call that starts at position 0 starts it anew, and one that starts at an earlier
position than the next writes that position again, so that a call can be repeated to time it. Time under
`torch.no_grad()`: the grad mode is the caller's. On an accelerator positions are read, which waits for the device, once
for each tensor that holds them and again only when it was written to; inference tensors, which do not tell, every time.

Example::

    import torch
    from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3RotaryEmbedding

    from ejkernel import lab

    config, like = lab.GEMMA3_270M_CONFIG, (640, torch.float32, "cpu")
    layer, rotary_emb = Gemma3DecoderLayer(config, layer_idx=0), Gemma3RotaryEmbedding(config)
    cache = lab.initialize_kv_cache(config, max_cache_len=17)

    states, positions = lab.create_prefill_inputs(1, 16, *like)
    embeddings = lab.get_position_embeddings(states, positions, rotary_emb, "sliding_attention")
    prefilled = lab.prefill_forward(layer, states, positions, embeddings, cache)

    token, positions, cache_positions = lab.create_decode_inputs_with_cache(1, 16, *like)
    embeddings = lab.get_position_embeddings(token, positions, rotary_emb, "sliding_attention")
    decoded = lab.decode_forward(layer, token, positions, embeddings, True, cache, cache_positions, None)
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ejkernel.errors import InvalidInputError
from ejkernel.lab.extras import need

if TYPE_CHECKING:
    import torch
    from transformers import StaticCache

    Embeddings = tuple[torch.Tensor, torch.Tensor] | Mapping[str, tuple[torch.Tensor, torch.Tensor]]

__all__ = [
    "create_decode_inputs_with_cache",
    "create_decode_inputs_without_cache",
    "create_prefill_inputs",
    "decode_forward",
    "get_position_embeddings",
    "initialize_kv_cache",
    "multi_layer_decode_forward",
    "multi_layer_prefill_forward",
    "prefill_forward",
]


def create_prefill_inputs(
    batch_size: int, seq_len: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs of a prefill.

    Returns:
        `(hidden_states [batch_size, seq_len, hidden_size], position_ids [batch_size, seq_len])`, the positions from 0.
    """
    batch_size, seq_len = _count("batch_size", batch_size), _count("seq_len", seq_len)
    states = _random_states(batch_size, seq_len, hidden_size, dtype, device)
    return states, _positions(0, seq_len, batch_size, device)


def create_decode_inputs_with_cache(
    batch_size: int, current_seq_len: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random inputs of one decode step after `current_seq_len` cached tokens.

    Returns:
        `(hidden_states [batch_size, 1, hidden_size], position_ids [batch_size, 1], cache_positions [1])`, where both
        kinds of position are `current_seq_len`.
    """
    batch_size, length = _count("batch_size", batch_size), _count("current_seq_len", current_seq_len, least=0)
    states = _random_states(batch_size, 1, hidden_size, dtype, device)
    position_ids = _positions(length, length + 1, batch_size, device)
    return states, position_ids, position_ids[0].clone()


def create_decode_inputs_without_cache(
    batch_size: int, current_seq_len: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random inputs of one decode step that computes all `current_seq_len` tokens before it again.

    Returns:
        `(hidden_states [batch_size, 1, hidden_size], position_ids [batch_size, current_seq_len + 1],
        prefill_hidden_states [batch_size, current_seq_len, hidden_size])`: the positions are those of all tokens.
    """
    batch_size, length = _count("batch_size", batch_size), _count("current_seq_len", current_seq_len, least=0)
    states = _random_states(batch_size, 1, hidden_size, dtype, device)
    before = _random_states(batch_size, length, hidden_size, dtype, device)
    return states, _positions(0, length + 1, batch_size, device), before


def get_position_embeddings(
    hidden_states: torch.Tensor, position_ids: torch.Tensor, rotary_emb: Any, layer_type: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotary embedding of a layer type at some positions.

    Args:
        hidden_states: the embeddings get their dtype and device; their length does not matter.
        position_ids: `[batch, length]` or `[1, length]`.
        rotary_emb: transformers' `Gemma3RotaryEmbedding`. Since transformers 5 one module serves all layer types; before,
            it is the one of the type: the model's `rotary_emb` for full and its `rotary_emb_local` for sliding attention.
        layer_type: `"sliding_attention"` or `"full_attention"`.

    Returns:
        `(cos, sin)`, both `[batch, length, head_dim]`.
    """
    known = getattr(rotary_emb, "layer_types", None)
    takes_type = known is not None
    if known is None:
        config = getattr(rotary_emb, "config", None)
        if not hasattr(config, "rope_local_base_freq"):
            raise InvalidInputError(f"rotary_emb is {_short(rotary_emb)}; expected a Gemma3RotaryEmbedding.")
        known = ["sliding_attention" if config.rope_theta == config.rope_local_base_freq else "full_attention"]
    if layer_type not in known:
        raise InvalidInputError(f"layer_type is {layer_type!r}; this rotary_emb knows {', '.join(sorted(known))}.")
    torch = need("torch", "get_position_embeddings")
    _need_tensor(torch, "hidden_states", hidden_states, "[batch, length, hidden_size]")
    _need_tensor(torch, "position_ids", position_ids, "[batch, length]")
    if position_ids.ndim != 2:
        raise InvalidInputError(f"position_ids has the shape {tuple(position_ids.shape)}; expected [batch, length].")
    return rotary_emb(hidden_states, position_ids, *([layer_type] if takes_type else []))


def initialize_kv_cache(config: Any, max_cache_len: int) -> StaticCache:
    """An empty static cache, one layer for each of the model's.

    Batch size, dtype and device are those of the first states it sees. The cache layers of sliding layers keep the last
    `config.sliding_window` positions only.

    Args:
        config: the model's `Gemma3TextConfig`.
        max_cache_len: how many positions it can hold.
    """
    length = _count("max_cache_len", max_cache_len)
    need("torch", "initialize_kv_cache")  # without it transformers imports, and has no cache
    transformers = need("transformers", "initialize_kv_cache")
    if not hasattr(config, "get_text_config"):
        raise InvalidInputError(f"config is {_short(config)}; expected a transformers config such as Gemma3TextConfig.")
    return transformers.StaticCache(config=config, max_cache_len=length)


def prefill_forward(
    layer: Any,
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    position_embeddings: Embeddings,
    past_key_values: StaticCache | None,
) -> torch.Tensor:
    """Run a decoder layer over a sequence and keep its keys and values in the cache.

    Args:
        layer: a `Gemma3DecoderLayer`.
        hidden_states: `[batch, length, hidden_size]`.
        position_ids: `[batch, length]` or `[1, length]`, consecutive. From 0 the cache starts anew; from later on they
            continue what it holds.
        position_embeddings: `(cos, sin)` of these positions for the layer's type, or a dict of them by layer type.
        past_key_values: the cache, written at the layer's index; None keeps nothing. A full-attention layer that starts
            a cache layer made for a sliding one makes it a full one, as it must not lose keys.

    Returns:
        The layer's output, `[batch, length, hidden_size]`.
    """
    return _forward(None, layer, hidden_states, position_ids, position_embeddings, past_key_values)


def decode_forward(
    layer: Any,
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    position_embeddings: Embeddings,
    use_kv_cache: bool,
    past_key_values: StaticCache | None,
    cache_positions: torch.Tensor | int | None,
    prefill_hidden_states: torch.Tensor | None,
) -> torch.Tensor:
    """Run a decoder layer over a new token.

    Args:
        layer: a `Gemma3DecoderLayer`.
        hidden_states: the new token's, `[batch, 1, hidden_size]`; with a cache it may be several.
        position_ids: with the cache the new token's; without it those of all S + 1 tokens.
        position_embeddings: `(cos, sin)` of these positions for the layer's type, or a dict of them by layer type.
        use_kv_cache: whether the tokens before are in the cache or are computed again.
        past_key_values: the cache; not touched without `use_kv_cache`.
        cache_positions: `[1]`, where in the cache the new token goes; needed with the cache. An int and the shapes `[]`
            and `[batch, 1]` will do.
        prefill_hidden_states: the layer's input for the S tokens before, `[batch, S, hidden_size]`; needed without it.

    Returns:
        With the cache the output for the new token, `[batch, 1, hidden_size]`; without it those of all tokens,
        `[batch, S + 1, hidden_size]`, of which the last is the new token's.
    """
    states, cache, cache_positions = _decode_inputs(
        hidden_states, use_kv_cache, past_key_values, cache_positions, prefill_hidden_states
    )
    return _forward(None, layer, states, position_ids, position_embeddings, cache, cache_positions)


def multi_layer_prefill_forward(
    num_layers: int,
    layer: Any,
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    position_embeddings: Embeddings,
    past_key_values: StaticCache | None,
) -> torch.Tensor:
    """`prefill_forward` `num_layers` times, each pass on the output of the one before and with a cache layer of its own.

    The layer is the same in all passes, and so is its type: sliding or full attention, whichever it was made as. Pass i
    keeps its keys and values in cache layer i.
    """
    num_layers = _count("num_layers", num_layers)
    return _forward(num_layers, layer, hidden_states, position_ids, position_embeddings, past_key_values)


def multi_layer_decode_forward(
    num_layers: int,
    layer: Any,
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    position_embeddings: Embeddings,
    use_kv_cache: bool,
    past_key_values: StaticCache | None,
    cache_positions: torch.Tensor | int | None,
    prefill_hidden_states: torch.Tensor | None,
) -> torch.Tensor:
    """`decode_forward` `num_layers` times, each pass on the output of the one before and with a cache layer of its own.

    Without the cache every pass computes all tokens, as the next one needs the outputs for the tokens before, too.
    """
    num_layers = _count("num_layers", num_layers)
    states, cache, cache_positions = _decode_inputs(
        hidden_states, use_kv_cache, past_key_values, cache_positions, prefill_hidden_states
    )
    return _forward(num_layers, layer, states, position_ids, position_embeddings, cache, cache_positions)


def _decode_inputs(states, use_kv_cache, cache, cache_positions, before):
    """What to run over, the cache and the positions in it: the new token with them, or all tokens without."""
    torch = need("torch", "decode_forward")
    if not use_kv_cache:
        if before is None:
            raise InvalidInputError("prefill_hidden_states is None; without the cache it must be the tokens before.")
        for name, value in (("hidden_states", states), ("prefill_hidden_states", before)):
            _need_tensor(torch, name, value, "[batch, length, hidden_size]")
        if before.ndim != 3 or states.ndim != 3 or before.shape[::2] != states.shape[::2]:
            raise InvalidInputError(
                f"prefill_hidden_states has the shape {tuple(before.shape)} and hidden_states {tuple(states.shape)}; "
                "expected [batch, length, hidden_size] of one batch and hidden_size."
            )
        return torch.cat([before, states], dim=1), None, None
    for name, value in (("past_key_values", cache), ("cache_positions", cache_positions)):
        if value is None:
            raise InvalidInputError(f"{name} is None; it is needed with use_kv_cache=True.")
    return states, cache, cache_positions


def _forward(num_layers, layer, states, position_ids, embeddings, cache, cache_positions=None):
    """Run a layer once with its own cache layer, or `num_layers` times with the first ones.

    Everything is checked, and the cache prepared, before the first pass runs.
    """
    torch = need("torch", "prefill_forward")
    attention = getattr(layer, "self_attn", None)
    if not hasattr(attention, "sliding_window"):
        raise InvalidInputError(f"layer is {_short(layer)}; expected a Gemma3DecoderLayer.")
    implementation = attention.config._attn_implementation
    if implementation not in (None, "eager", "sdpa"):
        raise InvalidInputError(
            f"The layer's attention is {implementation!r}; expected 'eager' or 'sdpa' in its config."
        )
    if not attention.is_causal:
        raise InvalidInputError("The layer's attention is bidirectional; prefill and decode need a causal one.")
    _need_tensor(torch, "hidden_states", states, f"[batch, length, {layer.hidden_size}]")
    if states.ndim != 3 or 0 in states.shape or states.shape[2] != layer.hidden_size:
        raise InvalidInputError(
            f"hidden_states has the shape {tuple(states.shape)}; expected [batch ≥ 1, length ≥ 1, {layer.hidden_size}]."
        )
    batch, length = states.shape[:2]
    start = _start(torch, position_ids, batch, length)
    if cache_positions is not None:
        _check_cache_positions(torch, cache_positions, start, batch, length)
    embeddings = _embeddings(torch, embeddings, attention, batch, length)
    indices = [attention.layer_idx] if num_layers is None else range(num_layers)

    window = attention.sliding_window
    if cache is None:
        spans = [(start, length)] * len(indices)
    else:
        _prepare(torch, cache, indices, window, start, states)
        spans = [_keys_seen(cache.layers[index], start, length) for index in indices]
    made = _masks_of(position_ids, start)
    masks = {span: _mask(torch, made, start, length, *span, window, states, implementation) for span in set(spans)}

    accepted = _parameters(getattr(layer.forward, "__func__", layer.forward))
    arguments = {"position_ids": position_ids, "past_key_values": cache}
    # transformers 4 takes the embeddings of both types and picks by its own, and tells the cache where to write.
    for name in ("position_embeddings", "position_embeddings_global", "position_embeddings_local"):
        if name in accepted:
            arguments[name] = embeddings
    if "cache_position" in accepted:
        arguments["cache_position"] = torch.arange(start, start + length, device=states.device)

    own_index = attention.layer_idx
    try:
        for index, span in zip(indices, spans, strict=True):
            attention.layer_idx = index
            states = layer(states, attention_mask=masks[span], **arguments)
            states = states[0] if isinstance(states, tuple) else states
            if cache is not None:
                _note_length(cache.layers[index], start + length)
    finally:
        attention.layer_idx = own_index
    return states


@functools.lru_cache(maxsize=8)
def _parameters(function):
    return frozenset(inspect.signature(function).parameters)


def _start(torch, position_ids, batch, length):
    """The first position."""
    _need_tensor(torch, "position_ids", position_ids, f"[{batch}, {length}]")
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
        raise InvalidInputError(
            f"position_ids has the shape {tuple(position_ids.shape)}; expected [{batch}, {length}], one for each token "
            "(without the cache: also for those before the new one)."
        )
    start = _first_of_consecutive(torch, "position_ids", position_ids)
    if start is None or start < 0:
        raise InvalidInputError(
            f"position_ids is {_short(position_ids.tolist())}; expected consecutive ones, alike in all rows."
        )
    return start


def _check_cache_positions(torch, cache_positions, start, batch, length):
    """That they are the tokens' positions: a row of them, the same row for each of the batch, or the only one by itself."""
    given, shape = None if isinstance(cache_positions, torch.Tensor) else _integer(cache_positions), ()
    first = given
    if given is None:
        _need_tensor(torch, "cache_positions", cache_positions, f"[{length}], or an int")
        shape = tuple(cache_positions.shape)
        first = _first_of_consecutive(torch, "cache_positions", cache_positions)
    shapes = [(length,), (1, length), (batch, length)] + [()] * (length == 1)
    if shape not in shapes or first != start:
        raise InvalidInputError(
            f"cache_positions is {_short(cache_positions.tolist() if given is None else given)}; expected the new token's "
            f"position as in position_ids, {_short([*range(start, start + length)])}."
        )


def _first_of_consecutive(torch, name, positions):
    """The first of consecutive positions, alike in all rows; None if they are not."""
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise InvalidInputError(f"{name} is of {positions.dtype}; expected integers, as of torch.int64.")
    if positions.device.type == "cpu":
        return _read_first(torch, positions)
    notes = _notes(positions)
    if "first" not in notes:
        notes["first"] = _read_first(torch, positions.cpu())
    return notes["first"]


def _read_first(torch, positions):
    first = next(iter(positions.reshape(-1)[:1].tolist()), None)
    if positions.numel() > 1:
        consecutive = torch.arange(first, first + positions.shape[-1]).expand_as(positions)
        return first if torch.equal(positions.long(), consecutive) else None
    return first


_noted: dict[int, tuple[weakref.ref, int, dict]] = {}


def _notes(tensor):
    """What is known of a tensor: a dict to read and to fill, empty once the tensor is written to, gone when it is."""
    if tensor.is_inference():  # such tensors do not count the writes
        return {}
    key, version = id(tensor), tensor._version
    reference, noted_version, notes = _noted.get(key, (None, None, None))
    if noted_version != version or reference() is not tensor:
        notes = {}
        _noted[key] = weakref.ref(tensor, lambda _: _noted.pop(key, None)), version, notes
    return notes


def _need_tensor(torch, name, value, shape):
    if not isinstance(value, torch.Tensor):
        advice = f": pass torch.as_tensor({name})" if hasattr(value, "__array__") else ""
        raise InvalidInputError(f"{name} is {_short(value)}; expected a torch tensor {shape}{advice}.")


def _embeddings(torch, embeddings, attention, batch, length):
    """The pair for the layer's type."""
    if isinstance(embeddings, Mapping):
        layer_type = "sliding_attention" if attention.is_sliding else "full_attention"
        if layer_type not in embeddings:
            raise InvalidInputError(f"position_embeddings has {sorted(embeddings)}; the layer needs {layer_type!r}.")
        embeddings = embeddings[layer_type]
    if not isinstance(embeddings, Sequence) or len(embeddings) != 2:
        raise InvalidInputError(f"position_embeddings is {_short(embeddings)}; expected (cos, sin), or a dict of them.")
    for name, array in zip(("cos", "sin"), embeddings, strict=True):
        _need_tensor(torch, f"{name} of position_embeddings", array, f"[{batch}, {length}, {attention.head_dim}]")
        if tuple(array.shape) not in ((batch, length, attention.head_dim), (1, length, attention.head_dim)):
            raise InvalidInputError(
                f"{name} of position_embeddings has the shape {tuple(array.shape)}; expected "
                f"[{batch}, {length}, {attention.head_dim}], one row for each of position_ids."
            )
    return tuple(embeddings)


def _prepare(torch, cache, indices, window, start, states):
    """Make the cache layers ready to take the keys from `start` on, or say why they cannot."""
    cache_utils = need("transformers.cache_utils", "prefill_forward")
    if not isinstance(cache, cache_utils.StaticCache):
        raise InvalidInputError(
            f"past_key_values is {_short(cache)}; expected the StaticCache of initialize_kv_cache, or None."
        )
    if indices[-1] >= len(cache.layers):
        raise InvalidInputError(
            f"The passes need cache layer {indices[-1]}, and past_key_values has {len(cache.layers)}; expected a cache of "
            "a config with num_hidden_layers of at least as many."
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
                f"position_ids reach {stop - 1}, and cache layer {index} has room for {room} positions; expected a cache "
                + (
                    f"that this layer has filled from position 0, as what was made for sliding layers keeps {room} only."
                    if full_length is not None and stop <= full_length
                    else f"of initialize_kv_cache(config, {stop}) or more, and a config that has layers of this type."
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
                f"position_ids start at {start}, and cache layer {index} holds {held} positions; run prefill_forward over "
                "those before with this cache first."
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
                # The newest is to be written again: with it in front, the next update rolls it out instead of the oldest.
                array.copy_(array.roll(1, dims=-2))
        if not ready:
            stale += _set_length(each, start)
    for count in stale[:1]:
        count.fill_(start)
    if stale[1:]:  # in one kernel for all of them
        torch._foreach_copy_(stale[1:], stale[:1] * len(stale[1:]))


def _kind(array):
    return array.shape[0], array.dtype, array.device


# Transformers counts what a cache layer holds in a tensor, in an int, in both, or (full layers in 4.x) not at all: then it
# looks which keys are not 0.


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
    notes = _notes(counts.get("cumulative_length", cache_layer.keys))
    if "length" not in notes:
        notes["length"] = int(cache_layer.get_seq_length())
    return notes["length"]


def _note_length(cache_layer, length):
    """Remember what was written, as reading the tensor that counts it would wait for the device."""
    counts = _counts(cache_layer)
    if not any(isinstance(count, int) for count in counts.values()):
        _notes(counts.get("cumulative_length", cache_layer.keys))["length"] = length


def _set_length(cache_layer, length):
    """Set the count where it is an int; returns the tensors that are to be set as well."""
    tensors = []
    for name, count in _counts(cache_layer).items():
        if isinstance(count, int):
            setattr(cache_layer, name, length)
        elif cache_layer.is_initialized:
            tensors.append(count)
    return tensors


def _keys_seen(cache_layer, start, length):
    """What attention gets from a cache layer's update: the first key's position, and how many keys."""
    room = cache_layer.max_cache_len
    if not cache_layer.is_sliding or start + length <= room:
        return 0, room
    if start < room:
        return 0, start + length
    return start - room + 1, room - 1 + length


_KEPT_MASK = 2**26
"""Bytes of the largest mask that outlives its call: a larger one costs more in memory than in time."""


def _masks_of(position_ids, start):
    """The masks that calls with this tensor have made: those of one step live as long as its positions."""
    notes = _notes(position_ids)
    if notes.get("start") != start:  # a tensor may share its memory with something else that writes
        notes |= {"start": start, "masks": {}}
    return notes["masks"]


def _mask(torch, made, start, length, first, keys, window, states, implementation):
    """Which keys each query sees; None where SDPA's own causal path says the same, as only that has fused kernels."""
    if implementation == "sdpa" and start == first and length > 1 and (window is None or length <= window):
        return None
    name = first, keys, window, implementation, states.dtype, states.device
    mask = made.get(name)
    if mask is None:
        with torch.inference_mode(False):  # autograd takes it then in a later call, too
            mask = _new_mask(torch, start, length, first, keys, window, states, implementation)
        if mask.nbytes <= _KEPT_MASK:
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


def _random_states(batch_size, length, hidden_size, dtype, device):
    torch = need("torch", "creating inputs")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidInputError(
            f"dtype is {dtype!r}; expected a floating-point dtype of torch, such as torch.bfloat16."
        )
    return torch.randn(batch_size, length, _count("hidden_size", hidden_size), dtype=dtype, device=device)


def _positions(start, stop, batch_size, device):
    torch = need("torch", "creating inputs")
    return torch.arange(start, stop, device=device).repeat(batch_size, 1)


def _count(name, value, least=1):
    count = _integer(value)
    if count is None or count < least:
        raise InvalidInputError(f"{name} is {value!r}; expected an integer of at least {least}.")
    return count


def _integer(value):
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _short(value):
    text = repr(value) if isinstance(value, (list, str, int, float, type(None))) else f"of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
