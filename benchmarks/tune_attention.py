"""Measure flash_attention or page_attention for real calls on this device, and write the table that the package ships.

    python benchmarks/tune_attention.py --out ejkernel/tuned/nvidia-h200/flash_attention.json --merge
    python benchmarks/tune_attention.py --out ejkernel/tuned/nvidia-h200/page_attention.json --platforms triton,pallas

Every implementation that runs here is timed with each of its parameters, forward and backward apart. The table is
written after each shape, so that a run that is cut short keeps what it has.
"""

import argparse
import json
import os
import re
import tempfile
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib

from ejkernel import UnsupportedError, autotune, flash_attention, kernel_registry, page_attention
from ejkernel.contracts.device import describe

FLASH, PAGED = "flash_attention", "page_attention"
FLOATS = ("query", "key", "value", "softmax_aux")


def shape(batch, length, heads, dim, kv_heads=None, *, value_dim=None, kv_len=None, window=None, cap=None, **rest):
    """One call. ``rest``: causal, sinks, segments, varlen (how many sequences), bias, mask, dropout, forward_only."""
    kv_heads, kv_len = kv_heads or heads, kv_len or length
    made = {
        "q": (batch, length, heads, dim),
        "k": (batch, kv_len, kv_heads, dim),
        "v": (batch, kv_len, kv_heads, value_dim or dim),
        **rest,
    }
    if window:
        made["sliding_window"] = (window - 1, 0)
    if cap:
        made["logits_soft_cap"] = cap
    return made


def cells():
    """What benchmarks/attention_gpu.py measures: 16,384 tokens, heads × head dim = 2048."""
    for dim in (64, 128, 256):
        for length in (4096, 16384):
            for causal in (False, True):
                name = f"cell {dim}, {length // 1024}k, {'causal' if causal else 'full'}"
                yield name, shape(16384 // length, length, 2048 // dim, dim, causal=causal)
    yield "cell 128, 16k, causal, window 1024", shape(1, 16384, 16, 128, causal=True, window=1024)


def paged(sequences, length, new=None, page=64, heads=32, kv_heads=8, dim=128, cache="bfloat16", **rest):
    """One call of page_attention: contexts of one length, each with so many new tokens. ``rest``: sinks, sliding_window."""
    return {
        "paged": (sequences, length, new, page, heads, kv_heads, dim, cache),
        "forward_only": True,
        **rest,
    }


PAGES = {
    "chunks, 128 of 512 on 4k": paged(128, 4096, 512),
    "chunks, 16 of 512 on 4k": paged(16, 4096, 512),
    "chunks, 4 of 1024 on 4k": paged(4, 4096, 1024),
    "a chunk of 2048 on 8k": paged(1, 8192, 2048),
    # Fewer tokens than chunks have: speculation, and what a batch of decoding and chunks has on the average.
    **{f"64 of 4k with {new} new each": paged(64, 4096, new) for new in (1, 8, 64)},
    **{f"decode, 64 of 4k, pages of {page}": paged(64, 4096, page=page) for page in (16, 64, 128)},
    "decode, 1 of 64k": paged(1, 65536),
    "decode, 128 of 16k": paged(128, 16384),
    "decode, GPT-OSS, full layers": paged(64, 4096, heads=64, dim=64, sinks=True),
    **{
        f"decode, 64 of 4k, {cache}": paged(64, 4096, cache=cache) for cache in ("int8", "float8_e4m3fn", "float8_e5m2")
    },
}
SHAPES = {
    **dict(cells()),
    "Llama 3 8B, 4k": shape(2, 4096, 32, 128, 8, causal=True),
    "Llama 3 8B, 8k": shape(1, 8192, 32, 128, 8, causal=True),
    "Llama 3 8B, 16k": shape(1, 16384, 32, 128, 8, causal=True),
    "Llama 3 70B, 4k": shape(1, 4096, 64, 128, 8, causal=True),
    "Llama 3 70B, 8k": shape(1, 8192, 64, 128, 8, causal=True),
    "Qwen 3 8B, 4k": shape(2, 4096, 32, 128, 8, causal=True),
    "Qwen 3 8B, 16k": shape(1, 16384, 32, 128, 8, causal=True),
    "Gemma 2 9B, local layers": shape(1, 8192, 16, 256, 8, causal=True, window=4096, cap=50.0),
    "Gemma 2 9B, global layers": shape(1, 8192, 16, 256, 8, causal=True, cap=50.0),
    "Gemma 3 12B, local layers": shape(1, 8192, 16, 256, 8, causal=True, window=1024),
    "Gemma 3 12B, global layers": shape(1, 8192, 16, 256, 8, causal=True),
    "GPT-OSS, local layers": shape(1, 8192, 64, 64, 8, causal=True, window=128, sinks=True),
    "GPT-OSS, global layers": shape(1, 8192, 64, 64, 8, causal=True, sinks=True),
    "DeepSeek V3, 4k": shape(1, 4096, 128, 192, value_dim=128, causal=True),
    "BERT, base": shape(32, 512, 12, 64),
    "BERT, large": shape(32, 512, 16, 64),
    "packed 8k, segments": shape(1, 8192, 32, 128, 8, causal=True, segments=True),
    "packed 8k, varlen": shape(1, 8192, 32, 128, 8, causal=True, varlen=8),
    "soft cap, 8k": shape(2, 8192, 16, 128, causal=True, cap=50.0),
    "dropout, 8k": shape(2, 8192, 16, 128, causal=True, dropout=0.1),
    "bias, 8k": shape(2, 8192, 16, 128, causal=True, bias=True),
    "padding mask, 8k": shape(2, 8192, 16, 128, mask=True),
    "chunked prefill, 512 of 8k": shape(1, 512, 32, 128, 8, kv_len=8192, causal=True, forward_only=True),
    "decode, 8k": shape(8, 1, 32, 128, 8, kv_len=8192, causal=True, forward_only=True),
    "decode, 32 of 8k": shape(32, 1, 32, 128, 8, kv_len=8192, causal=True, forward_only=True),
    "decode, 32 of 8k, 4 tokens": shape(32, 4, 32, 128, 8, kv_len=8192, causal=True, forward_only=True),
    "decode, 1 of 64k": shape(1, 1, 32, 128, 8, kv_len=65536, causal=True, forward_only=True),
    "decode, GPT-OSS, 64 of 4k": shape(64, 1, 64, 64, 8, kv_len=4096, causal=True, sinks=True, forward_only=True),
}


def arguments_of(shape):
    """The abstract arrays of a call, and what is static."""
    shape = {name: value for name, value in shape.items() if name != "forward_only"}
    if "paged" in shape:
        return _paged_arguments(shape)
    query, key, value = (jax.ShapeDtypeStruct(shape.pop(name), jnp.bfloat16) for name in "qkv")
    arrays = {"query": query, "key": key, "value": value}
    if shape.pop("sinks", False):
        arrays["softmax_aux"] = jax.ShapeDtypeStruct((query.shape[2], 1), jnp.float32)
    if shape.pop("bias", False):
        arrays["bias"] = jax.ShapeDtypeStruct((1, query.shape[2], query.shape[1], key.shape[1]), jnp.bfloat16)
    if shape.pop("mask", False):
        arrays["attention_mask"] = jax.ShapeDtypeStruct(key.shape[:2], jnp.bool_)
    if probability := shape.pop("dropout", 0):
        shape["dropout_prob"] = probability
        arrays["dropout_seed"] = jax.ShapeDtypeStruct((), jnp.int32)
    if shape.pop("segments", False):
        for name, like in (("q_segment_ids", query), ("kv_segment_ids", key)):
            arrays[name] = jax.ShapeDtypeStruct(like.shape[:2], jnp.int32)
    if sequences := shape.pop("varlen", 0):
        offsets = jax.ShapeDtypeStruct((sequences + 1,), jnp.int32)
        arrays |= {"cum_seqlens_q": offsets, "cum_seqlens_k": offsets}
    return arrays, shape


def _paged_arguments(shape):
    sequences, length, new, page, heads, kv_heads, dim, cache = shape.pop("paged")
    entries = -(-length // page)
    caches = jax.ShapeDtypeStruct((sequences * entries, kv_heads, page, dim), cache)
    arrays = {
        "query": jax.ShapeDtypeStruct((sequences * (new or 1), heads, dim), jnp.bfloat16),
        "key_cache": caches,
        "value_cache": caches,
        "context_lens": jax.ShapeDtypeStruct((sequences,), jnp.int32),
        "block_tables": jax.ShapeDtypeStruct((sequences, entries), jnp.int32),
    }
    if new is not None:
        arrays["cum_seqlens_q"] = jax.ShapeDtypeStruct((sequences + 1,), jnp.int32)
    if shape.pop("sinks", False):
        arrays["softmax_aux"] = jax.ShapeDtypeStruct((heads, 1), jnp.float32)
    if cache == "int8":
        arrays |= dict.fromkeys(("k_scale", "v_scale"), jax.ShapeDtypeStruct((), jnp.float32))
    return arrays, shape


def bucket_of(shape):
    """What the table tells calls apart by."""
    operation = kernel_registry.operation(PAGED if "paged" in shape else FLASH)
    arrays, statics = arguments_of(shape)
    bound = operation.signature.bind(**arrays, **statics)
    bound.apply_defaults()
    return operation.bound(bound.arguments)[0].bucket, bool(shape.get("forward_only"))


def tune(shape, platform):
    """Measure a call on one platform. Tracing is what tunes, so nothing is computed beside the candidates."""
    attention = page_attention if "paged" in shape else flash_attention
    arrays, statics = arguments_of(shape)
    wanted = [name for name in FLOATS if name in arrays]

    def loss(floats, rest):
        return attention(**floats, **rest, **statics, platform=platform).astype(jnp.float32).sum()

    rest = {name: array for name, array in arrays.items() if name not in wanted}
    function = loss if shape.get("forward_only") else jax.grad(loss)
    autotune(lambda *args: jax.eval_shape(function, *args))({name: arrays[name] for name in wanted}, rest)


def entries_in(folder):
    """The table's rows, from a store."""
    kept = ("direction", "implementation", "version", "call")
    for path in sorted((Path(folder) / "tuned").glob("*.json")):
        entry = json.loads(path.read_text())
        yield {**{name: entry["key"][name] for name in kept}, **entry["value"]}


def identity(entry):
    """What a row replaces: an older version of a kernel gives way too."""
    return json.dumps([entry["implementation"], entry["direction"], entry["call"]], sort_keys=True)


def write(path, old, measured):
    device = jax.devices()[0]
    rows = {identity(entry): entry for entry in [*old, *measured]}
    table = {
        "device": describe(device).name,
        "measured": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "runtime": device.client.platform_version},
        "entries": [rows[key] for key in sorted(rows)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")


def show(entries):
    for entry in entries:
        params = " ".join(f"{name}={value}" for name, value in entry["params"].items())
        name = entry["implementation"].rsplit(".", 1)[-1]
        print(f"    {name} {entry['direction']}: {entry['seconds'] * 1e3:.3f} ms  {params}", flush=True)


def measure(name, platform, shape):
    """Tune one shape on one platform and say how that went in one line."""
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            tune(shape, platform)
            outcome = "measured"
        except UnsupportedError as error:
            reasons = [line.strip() for line in str(error).splitlines() if line.strip().startswith(platform)]
            outcome = f"refused: {(reasons or str(error).splitlines())[0][:120]}"
        except Exception as error:
            outcome = f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    failures = [str(w.message) for w in caught if "failed while tuning" in str(w.message)]
    if failures:
        words = failures[0].partition(" with ")[2].splitlines()[0][:160]
        outcome += f", {len(failures)} candidates failed (with {words})"
    print(f"{name} [{platform}]: {outcome}, {time.perf_counter() - start:.1f} s", flush=True)


def main():
    platforms = list(dict.fromkeys(entry.platform.value for entry in kernel_registry.list_implementations(FLASH)))
    tables = {FLASH: SHAPES, PAGED: PAGES}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help=" or ".join(f"{name}.json" for name in tables))
    parser.add_argument("--only", type=re.compile, default="", metavar="REGEX", help="shapes whose name matches")
    parser.add_argument("--platforms", default=",".join(platforms), help="default: %(default)s")
    parser.add_argument("--merge", action="store_true", help="keep the rows of the table that are not measured again")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="SECONDS", help="start no shape after that"
    )
    parser.add_argument("--list", action="store_true", help="name the shapes and stop")
    options = parser.parse_args()
    chosen = {name: shape for name, shape in tables[options.out.stem].items() if re.search(options.only, name)}
    if options.list:
        print("\n".join(chosen))
        return
    old = json.loads(options.out.read_text())["entries"] if options.merge and options.out.exists() else []
    start, seen, measured = time.perf_counter(), {}, []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EJKERNEL_CACHE_DIR"] = folder
        for number, (name, shape) in enumerate(chosen.items()):
            twin = seen.setdefault(bucket_of(shape), name)
            if twin != name:
                print(f"{name}: as {twin}", flush=True)
                continue
            for platform in options.platforms.split(","):
                if time.perf_counter() - start > options.budget:
                    break
                measure(name, platform, shape)
            known, measured = {identity(entry) for entry in measured}, list(entries_in(folder))
            show(entry for entry in measured if identity(entry) not in known)
            write(options.out, old, measured)
            if time.perf_counter() - start > options.budget:
                print(
                    f"out of time: {len(chosen) - number - 1} shapes are left, from the one after {name!r}", flush=True
                )
                break
    print(f"{len(measured)} rows measured in {time.perf_counter() - start:.0f} s, {options.out} written", flush=True)


if __name__ == "__main__":
    main()
