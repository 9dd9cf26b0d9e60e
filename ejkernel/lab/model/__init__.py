"""Prefill and decode through Gemma 3's decoder layers, with a KV cache and without.

The layers, rotary embeddings and caches are transformers' own. What a bare layer leaves to its caller is done here: the
attention mask (causal, within the window of a sliding layer, nothing of the cache that is not written yet) and where in
the cache the keys go. Prefill, decode with a cache, decode without one and the forward over all tokens therefore agree.

Positions decide what the cache holds: a call that starts at position 0 starts it anew, and one that starts at an
earlier position than the next writes that position again, so that a call can be repeated to time it. Time under
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

from ejkernel.lab.model.forward import (
    decode_forward,
    multi_layer_decode_forward,
    multi_layer_prefill_forward,
    prefill_forward,
)
from ejkernel.lab.model.inputs import (
    create_decode_inputs_with_cache,
    create_decode_inputs_without_cache,
    create_prefill_inputs,
    get_position_embeddings,
    initialize_kv_cache,
)

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
