"""Prefill and decode through Gemma 3's decoder layers, with a KV cache and without.

The layers, rotary embeddings and caches are transformers' own. What a bare layer leaves to its caller is done here: the
attention mask (causal, within the window of a sliding layer, nothing of the cache that is not written yet) and where in
the cache the keys go. Prefill, decode with a cache, decode without one and the forward over all tokens therefore agree.

Positions decide what the cache holds: a call that starts at position 0 starts it anew, and one that starts at an earlier
position than the next writes that position again, so that a call can be repeated to time it. Time under
`torch.no_grad()`: the grad mode is the caller's.

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

import inspect
import operator
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
    cache_positions: torch.Tensor | None,
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
        cache_positions: `[1]`, where in the cache the new token goes; needed with the cache.
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
    cache_positions: torch.Tensor | None,
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
    if states.ndim != 3 or states.shape[1] < 1 or states.shape[2] != layer.hidden_size:
        raise InvalidInputError(
            f"hidden_states has the shape {tuple(states.shape)}; expected [batch, length ≥ 1, {layer.hidden_size}]."
        )
    batch, length = states.shape[:2]
    start = _start(torch, position_ids, batch, length)
    if cache_positions is not None and cache_positions.tolist() != list(range(start, start + length)):
        raise InvalidInputError(
            f"cache_positions is {_short(cache_positions.tolist())}; expected the new token's position as in position_ids, "
            f"[{start}]."
        )
    embeddings = _embeddings(embeddings, attention, batch, length)
    indices = [attention.layer_idx] if num_layers is None else range(num_layers)

    window = attention.sliding_window
    if cache is None:
        spans = [(start, length)] * len(indices)
    else:
        _prepare(cache, indices, window, start, states)
        spans = [_keys_seen(cache.layers[index], start, length) for index in indices]
    masks = {span: _mask(torch, start, length, *span, window, states, implementation) for span in set(spans)}

    accepted = inspect.signature(layer.forward).parameters
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
    finally:
        attention.layer_idx = own_index
    return states


def _start(torch, position_ids, batch, length):
    """The first position."""
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
        raise InvalidInputError(
            f"position_ids has the shape {tuple(position_ids.shape)}; expected [{batch}, {length}], one for each token "
            "(without the cache: also for those before the new one)."
        )
    ids = position_ids.cpu()
    start = int(ids[0, 0])
    if start < 0 or not torch.equal(ids, torch.arange(start, start + length, dtype=ids.dtype).expand_as(ids)):
        raise InvalidInputError(
            f"position_ids is {_short(ids.tolist())}; expected consecutive ones, alike in all rows."
        )
    return start


def _embeddings(embeddings, attention, batch, length):
    """The pair for the layer's type."""
    if isinstance(embeddings, Mapping):
        layer_type = "sliding_attention" if attention.is_sliding else "full_attention"
        if layer_type not in embeddings:
            raise InvalidInputError(f"position_embeddings has {sorted(embeddings)}; the layer needs {layer_type!r}.")
        embeddings = embeddings[layer_type]
    if not isinstance(embeddings, Sequence) or len(embeddings) != 2:
        raise InvalidInputError(f"position_embeddings is {_short(embeddings)}; expected (cos, sin), or a dict of them.")
    for name, array in zip(("cos", "sin"), embeddings, strict=True):
        if tuple(array.shape) not in ((batch, length, attention.head_dim), (1, length, attention.head_dim)):
            raise InvalidInputError(
                f"{name} of position_embeddings has the shape {tuple(array.shape)}; expected "
                f"[{batch}, {length}, {attention.head_dim}], one row for each of position_ids."
            )
    return tuple(embeddings)


def _prepare(cache, indices, window, start, states):
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
                f"hidden_states has {given}, and cache layer {index} began with {began}: use a new cache."
            )
        held = int(each.get_seq_length()) if start else 0
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
        plan.append((index, widen, rolled and start == held - 1))
    for index, widen, roll_back in plan:
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
        _set_length(each, start)


def _kind(array):
    return f"batch {array.shape[0]} of {array.dtype} on {array.device}"


def _set_length(cache_layer, length):
    """Transformers counts what a cache layer holds in a tensor, in an int, in both, or (full layers in 4.x) not at all."""
    for name in ("cumulative_length", "cumulative_length_int"):
        count = getattr(cache_layer, name, None)
        if isinstance(count, int):
            setattr(cache_layer, name, length)
        elif count is not None:
            count.fill_(length)


def _keys_seen(cache_layer, start, length):
    """What attention gets from a cache layer's update: the first key's position, and how many keys."""
    room = cache_layer.max_cache_len
    if not cache_layer.is_sliding or start + length <= room:
        return 0, room
    if start < room:
        return 0, start + length
    return start - room + 1, room - 1 + length


def _mask(torch, start, length, first, keys, window, states, implementation):
    """Which keys each query sees; None where SDPA's own causal path says the same, as only that has fused kernels."""
    if implementation == "sdpa" and start == first and length > 1 and (window is None or length <= window):
        return None
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
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool) or count < least:
        raise InvalidInputError(f"{name} is {value!r}; expected an integer of at least {least}.")
    return count


def _short(value):
    text = repr(value) if isinstance(value, (list, str, int, float, type(None))) else f"of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
