"""Prefill and decode through one decoder layer, once or several times."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ejkernel.errors import InvalidInputError
from ejkernel.lab.arguments import counted
from ejkernel.lab.extras import need
from ejkernel.lab.model.arguments import need_tensor, short
from ejkernel.lab.model.cache import keys_seen, note_length, prepare
from ejkernel.lab.model.masks import mask_for, masks_of
from ejkernel.lab.model.positions import check_cache_positions, embeddings_of, first_position

if TYPE_CHECKING:
    import torch
    from transformers import StaticCache

    Embeddings = tuple[torch.Tensor, torch.Tensor] | Mapping[str, tuple[torch.Tensor, torch.Tensor]]


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
    """`prefill_forward` `num_layers` times, each pass on the output of the one before, with its own cache layer.

    The layer is the same in all passes, and so is its type: sliding or full attention, whichever it was made as. Pass i
    keeps its keys and values in cache layer i.
    """
    num_layers = counted("num_layers", num_layers)
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
    """`decode_forward` `num_layers` times, each pass on the output of the one before, with its own cache layer.

    Without the cache every pass computes all tokens, as the next one needs the outputs for the tokens before, too.
    """
    num_layers = counted("num_layers", num_layers)
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
            need_tensor(torch, name, value, "[batch, length, hidden_size]")
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
        raise InvalidInputError(f"layer is {short(layer)}; expected a Gemma3DecoderLayer.")
    implementation = attention.config._attn_implementation
    if implementation not in (None, "eager", "sdpa"):
        raise InvalidInputError(
            f"The layer's attention is {implementation!r}; expected 'eager' or 'sdpa' in its config."
        )
    if not attention.is_causal:
        raise InvalidInputError("The layer's attention is bidirectional; prefill and decode need a causal one.")
    need_tensor(torch, "hidden_states", states, f"[batch, length, {layer.hidden_size}]")
    if states.ndim != 3 or 0 in states.shape or states.shape[2] != layer.hidden_size:
        raise InvalidInputError(
            f"hidden_states has the shape {tuple(states.shape)}; expected [batch ≥ 1, length ≥ 1, {layer.hidden_size}]."
        )
    batch, length = states.shape[:2]
    start = first_position(torch, position_ids, batch, length)
    if cache_positions is not None:
        check_cache_positions(torch, cache_positions, start, batch, length)
    embeddings = embeddings_of(torch, embeddings, attention, batch, length)
    indices = [attention.layer_idx] if num_layers is None else range(num_layers)

    window = attention.sliding_window
    if cache is None:
        spans = [(start, length)] * len(indices)
    else:
        prepare(torch, cache, indices, window, start, states)
        spans = [keys_seen(cache.layers[index], start, length) for index in indices]
    made = masks_of(position_ids, start)
    masks = {span: mask_for(torch, made, start, length, *span, window, states, implementation) for span in set(spans)}

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
                note_length(cache.layers[index], start + length)
    finally:
        attention.layer_idx = own_index
    return states


@functools.lru_cache(maxsize=8)
def _parameters(function):
    return frozenset(inspect.signature(function).parameters)
