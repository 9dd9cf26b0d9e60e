"""Random inputs of prefill and decode, position embeddings, and an empty cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ejkernel.errors import InvalidInputError
from ejkernel.lab.arguments import counted
from ejkernel.lab.extras import need
from ejkernel.lab.model.arguments import need_tensor, short

if TYPE_CHECKING:
    import torch
    from transformers import StaticCache


def create_prefill_inputs(
    batch_size: int, seq_len: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs of a prefill.

    Returns:
        `(hidden_states [batch_size, seq_len, hidden_size], position_ids [batch_size, seq_len])`, the positions from 0.
    """
    batch_size, seq_len = counted("batch_size", batch_size), counted("seq_len", seq_len)
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
    batch_size, length = counted("batch_size", batch_size), counted("current_seq_len", current_seq_len, least=0)
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
    batch_size, length = counted("batch_size", batch_size), counted("current_seq_len", current_seq_len, least=0)
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
        rotary_emb: transformers' `Gemma3RotaryEmbedding`. Since transformers 5 one module serves all layer types;
            before, it is the one of the type: the model's `rotary_emb` for full and its `rotary_emb_local` for sliding
                attention.
        layer_type: `"sliding_attention"` or `"full_attention"`.

    Returns:
        `(cos, sin)`, both `[batch, length, head_dim]`.
    """
    known = getattr(rotary_emb, "layer_types", None)
    takes_type = known is not None
    if known is None:
        config = getattr(rotary_emb, "config", None)
        if not hasattr(config, "rope_local_base_freq"):
            raise InvalidInputError(f"rotary_emb is {short(rotary_emb)}; expected a Gemma3RotaryEmbedding.")
        known = ["sliding_attention" if config.rope_theta == config.rope_local_base_freq else "full_attention"]
    if layer_type not in known:
        raise InvalidInputError(f"layer_type is {layer_type!r}; this rotary_emb knows {', '.join(sorted(known))}.")
    torch = need("torch", "get_position_embeddings")
    need_tensor(torch, "hidden_states", hidden_states, "[batch, length, hidden_size]")
    need_tensor(torch, "position_ids", position_ids, "[batch, length]")
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
    length = counted("max_cache_len", max_cache_len)
    need("torch", "initialize_kv_cache")  # without it transformers imports, and has no cache
    transformers = need("transformers", "initialize_kv_cache")
    if not hasattr(config, "get_text_config"):
        raise InvalidInputError(f"config is {short(config)}; expected a transformers config such as Gemma3TextConfig.")
    return transformers.StaticCache(config=config, max_cache_len=length)


def _random_states(batch_size, length, hidden_size, dtype, device):
    torch = need("torch", "creating inputs")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidInputError(
            f"dtype is {dtype!r}; expected a floating-point dtype of torch, such as torch.bfloat16."
        )
    return torch.randn(batch_size, length, counted("hidden_size", hidden_size), dtype=dtype, device=device)


def _positions(start, stop, batch_size, device):
    torch = need("torch", "creating inputs")
    return torch.arange(start, stop, device=device).repeat(batch_size, 1)
