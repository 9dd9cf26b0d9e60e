"""The calls of flash_attention that published models make, for benchmarks/models_gpu.py.

Heads, head dims, windows, caps and sinks are those of the models' configurations; a batch is so large that a forward
takes about 0.1 to 5 ms on an H200. Dims, lengths and offsets are the model's own, also where they are odd. Values are
random and logits have the default scale.
"""

import numpy as np
from attention_gpu import case


def window(keys):
    """Options: each query sees itself and the keys before it, `keys` in all."""
    return {"sliding_window": [keys - 1, 0]}


def documents(tokens, count):
    """Lengths of documents that fill a row of tokens: log-normal, as in text corpora."""
    drawn = np.random.default_rng(count).lognormal(size=count)
    ends = np.round(np.cumsum(drawn) / drawn.sum() * (tokens - count)).astype(int)
    return (1 + np.diff([0, *ends])).tolist()


def padded(batch, longest):
    """Lengths of the rows of a padded batch; one of them is full."""
    return [longest, *np.random.default_rng(batch).integers(longest // 8, longest + 1, batch - 1).tolist()]


def _cap(**more):
    return {"logits_soft_cap": 50.0, **more}


CALLS = {
    "qwen3-14b-4k": ("Qwen3 14B", case(2, 4096, 40, 128, kv_heads=8)),
    "qwen3-32b-8k": ("Qwen3 32B", case(1, 8192, 64, 128, kv_heads=8)),
    "llama3-8b-8k": ("Llama 3 8B", case(1, 8192, 32, 128, kv_heads=8)),
    "llama3-405b-8k": ("Llama 3 405B", case(1, 8192, 128, 128, kv_heads=8)),
    "gpt-oss-4k": ("GPT-OSS 20B, 120B, full layers", case(2, 4096, 64, 64, kv_heads=8, sinks=True)),
    "gpt-oss-window-4k": ("GPT-OSS, window layers", case(8, 4096, 64, 64, kv_heads=8, sinks=True, options=window(128))),
    "gemma2-9b-8k": ("Gemma 2 9B, full layers", case(1, 8192, 16, 256, kv_heads=8, options=_cap())),
    "gemma2-9b-window-8k": ("Gemma 2 9B, window layers", case(1, 8192, 16, 256, kv_heads=8, options=_cap(**window(4096)))),
    "gemma3-1b-window-8k": ("Gemma 3 1B, window layers", case(8, 8192, 4, 256, kv_heads=1, options=window(512))),
    "gemma3-12b-window-32k": ("Gemma 3 12B, window layers", case(1, 32768, 16, 256, kv_heads=8, options=window(1024))),
    "deepseek-v3-4k": ("DeepSeek-V3, prefill", case(1, 4096, 128, 192, value_dim=128)),
    "mixtral-8x22b-8k": ("Mixtral 8x22B", case(1, 8192, 48, 128, kv_heads=8)),
    "phi3-mini-4k": ("Phi-3 mini 4k", case(2, 4096, 32, 96, options=window(2047))),
    "siglip-256": ("SigLIP so400m/16, 256 px", case(256, 256, 16, 72, causal=False)),
    "siglip-729": ("SigLIP so400m/14, 384 px", case(64, 729, 16, 72, causal=False)),
    "vit-h-257": ("ViT-H/14, 224 px", case(256, 257, 16, 80, causal=False)),
    "whisper-1500": ("Whisper large v3, encoder", case(16, 1500, 20, 64, causal=False)),
    "whisper-cross": ("Whisper large v3, cross", case(32, 448, 20, 64, causal=False, kv_length=1500)),
    "packed-8k": ("packed, 20 documents", case(1, 8192, 32, 128, kv_heads=8, documents=documents(8192, 20))),
    "packed-32k": ("packed, 50 documents", case(1, 32768, 32, 128, kv_heads=8, documents=documents(32768, 50))),
    "t5-1024": ("T5 XL, bias", case(16, 1024, 32, 64, causal=False, bias="trained")),
    "alibi-2k": ("BLOOM 7B, ALiBi", case(4, 2048, 32, 128, bias="trained", bias_rows=1)),
    "bert-512": ("BERT large, padding mask", case(128, 512, 16, 64, causal=False, padded=padded(128, 512))),
    # Other lengths of the same models.
    "qwen3-14b-16k": ("Qwen3 14B", case(1, 16384, 40, 128, kv_heads=8)),
    "llama3-8b-2k": ("Llama 3 8B", case(8, 2048, 32, 128, kv_heads=8)),
    "llama3-70b-16k": ("Llama 3 70B", case(1, 16384, 64, 128, kv_heads=8)),
    "gpt-oss-16k": ("GPT-OSS 20B, 120B, full layers", case(1, 16384, 64, 64, kv_heads=8, sinks=True)),
    "gpt-oss-window-32k": ("GPT-OSS, window layers", case(1, 32768, 64, 64, kv_heads=8, sinks=True, options=window(128))),
    "gemma2-27b-4k": ("Gemma 2 27B, full layers", case(2, 4096, 32, 128, kv_heads=16, options=_cap())),
    "gemma3-27b-window-16k": ("Gemma 3 27B, window layers", case(1, 16384, 32, 128, kv_heads=16, options=window(1024))),
    "deepseek-v3-8k": ("DeepSeek-V3, prefill", case(1, 8192, 128, 192, value_dim=128)),
    "phi3-mini-8k": ("Phi-3 mini 128k", case(1, 8192, 32, 96)),
    "siglip-1024": ("SigLIP so400m/16, 512 px", case(64, 1024, 16, 72, causal=False)),
    "vit-h-577": ("ViT-H/14, 336 px", case(64, 577, 16, 80, causal=False)),
    "packed-64k": ("packed, 100 documents", case(1, 65536, 32, 128, kv_heads=8, documents=documents(65536, 100))),
    "t5-2048": ("T5 XL, bias", case(4, 2048, 32, 64, causal=False, bias="trained")),
    "alibi-8k": ("BLOOM 7B, ALiBi", case(1, 8192, 32, 128, bias="trained", bias_rows=1)),
    "bge-2k": ("BGE-M3, padding mask", case(16, 2048, 16, 64, causal=False, padded=padded(16, 2048))),
}  # fmt: skip


def words(case):
    """What is asked, in a line: batch × length, heads × dims, and the features."""
    keys, value_dim, options = case.get("kv_length"), case.get("value_dim"), case["options"]
    lengths = f"{case['batch']} × {case['length']}" + (f" × {keys} keys" if keys else "")
    heads = f"{case['heads']}/{case['kv_heads']}" if "kv_heads" in case else f"{case['heads']}"
    said = [lengths, f"{heads} × {case['head_dim']}" + (f"/{value_dim}" if value_dim else "")]
    said.append("causal" if options.get("causal") else "full")
    if reach := options.get("sliding_window"):
        said[-1] = f"window {reach[0] + 1}"
    said += [f"cap {options['logits_soft_cap']:g}"] if "logits_soft_cap" in options else []
    said += ["sinks"] if case.get("sinks") else []
    said += [f"bias [1,H,{'Sq' if 'bias_rows' not in case else case['bias_rows']},Sk]"] if case.get("bias") else []
    said += ["mask [B,1,1,Sk]"] if case.get("padded") else []
    said += [f"{len(case['documents'])} packed"] if case.get("documents") else []
    return ", ".join(said)
