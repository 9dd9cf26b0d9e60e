"""Block-sparse attention on a GPU: a causal window as blocks beside flash attention's, random blocks beside dense attention.

    python benchmarks/blocksparse_attention_gpu.py --out FILE [--parts errors,window,random,traced] [--flex] [--xla]

Calls are of 16 heads × 128 in bfloat16 at 16k, forward and forward with backward. ``times_the_peer`` is the time over that
of the first of these that a call has: flash attention with the same window, a tenth of dense flash attention, the same call
with a mask that has values. All implementations of a call are timed together (`ejkernel.utils.bursts` says how). ``--flex``
adds torch's flex_attention with the same blocks, compiled; ``--xla`` the XLA kernel, of which a call takes 0.1 s and more.
Errors are by norm, against dense attention in float64 over 2048 positions.
"""

import itertools
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from shared import gpu_options, keep

from ejkernel import blocksparse_attention, flash_attention, kernel_registry
from ejkernel.utils.bursts import time_bursts

LENGTH, HEADS, DIM, WINDOW, DENSITY = 16384, 16, 128, 1024, 0.1
BLOCKS = (64, 128)
PARTS = ("errors", "window", "random", "traced")
FLASH, DENSE, FLEX = "flash_attention", "dense flash_attention", "torch flex_attention"


def window_mask(length, block):
    """The blocks of which a causal window holds anything."""
    first = np.arange(0, length, block)
    last = first + block - 1
    return (first[None, :] <= last[:, None]) & (last[None, :] >= first[:, None] - WINDOW)


def random_mask(length, block, density=DENSITY):
    """In each row as many blocks: the work is the density's share of all."""
    count = length // block
    scores = np.random.default_rng(0).random((count, count))
    kept = np.sort(scores, axis=-1)[:, round(density * count), None]
    return scores < kept


def arrays_of(length=LENGTH, heads=HEADS, kv_heads=HEADS, count=4):
    """Query, key, value and the output's cotangent."""
    shapes = [(1, length, n, DIM) for n in (heads, kv_heads, kv_heads, heads)]
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)][:count]


def both(attention):
    """A program of the forward and all gradients."""

    def run(q, k, v, do, *mask):
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, *mask), q, k, v)
        return out, *pull(do)

    return run


def compiled(function, *arrays):
    program = jax.jit(function).lower(*arrays).compile()
    return lambda: program(*arrays)


def platforms(options):
    found = {entry.platform.value for entry in kernel_registry.list_implementations("blocksparse_attention")}
    return [name for name in ("pallas", "triton", "xla") if name in found and (name != "xla" or options.xla)]


def sparse(mask, block, statics, name):
    return lambda q, k, v: blocksparse_attention(q, k, v, mask, block, **statics, platform=name)


def attempt(found, name, make):
    """A runner under its name, or why there is none."""
    try:
        found[name] = make()
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {str(error)[:160]}", flush=True)


def calls(part, options):
    """``(call, backward?, runners, the peer that times are compared with, what its time is divided by)``."""
    for block in BLOCKS:
        for backward in (False, True):
            arrays = arrays_of(count=4 if backward else 3)
            program = both if backward else lambda attention: attention
            found = {}
            if part == "window":
                mask, statics = window_mask(LENGTH, block), {"causal": True, "sliding_window": (WINDOW, 0)}
                name, peer, share = f"window {WINDOW} as blocks of {block}", FLASH, 1
                attempt(found, FLASH, lambda: compiled(program(lambda *x: flash_attention(*x, **statics)), *arrays))  # noqa: B023
            else:
                mask, statics = random_mask(LENGTH, block), {}
                name, peer, share = f"random {DENSITY:.0%} of blocks of {block}", DENSE, 10
                if part == "random":
                    attempt(found, DENSE, lambda: compiled(program(flash_attention), *arrays))  # noqa: B023
            if part == "traced":
                name, peer, share = f"traced, {name}", "", 1
            for platform_name in platforms(options):
                attempt(
                    found,
                    platform_name,
                    lambda: compiled(program(sparse(mask, block, statics, platform_name)), *arrays),  # noqa: B023
                )
                if part == "traced":
                    run = lambda q, k, v, mask: sparse(mask, block, statics, platform_name)(q, k, v)  # noqa: B023, E731
                    attempt(
                        found,
                        f"{platform_name}, traced",
                        lambda: compiled(program(run), *arrays, jnp.asarray(mask)),  # noqa: B023
                    )
            if options.flex and part != "traced":
                attempt(found, FLEX, lambda: flex(arrays, mask, block, part == "window", backward))  # noqa: B023
            yield name, backward, found, peer, share


def flex(arrays, mask, block, window, backward):
    """torch's, compiled, with the mask's blocks; it takes heads before positions."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    kept = torch.from_numpy(mask).cuda()

    def visible(b, h, q, k):
        inside = kept[q // block, k // block]
        return inside & (k <= q) & (q - k <= WINDOW) if window else inside

    blocks = create_block_mask(visible, None, None, LENGTH, LENGTH, device="cuda", BLOCK_SIZE=block)
    attention = torch.compile(flex_attention)
    tensors = [torch.from_dlpack(x).transpose(1, 2).contiguous() for x in arrays]

    def run():
        q, k, v = (x.detach().requires_grad_(backward) for x in tensors[:3])
        out = attention(q, k, v, block_mask=blocks)
        return torch.autograd.grad(out, (q, k, v), tensors[3]) if backward else out

    run()
    torch.cuda.synchronize()
    return run


def measure(part, options):
    for name, backward, found, peer, share in calls(part, options):
        times = time_bursts(found, rounds=options.rounds)
        for implementation, run in times.items():
            if run.error is not None:
                print(f"{name}: {implementation}: {run.error}")
                continue
            base = peer or implementation.removesuffix(", traced")
            against = times.get(base)
            row = {
                "part": part,
                "call": name,
                "direction": "forward and backward" if backward else "forward",
                "implementation": implementation,
                "ms": run.best * 1e3,
                "median_ms": run.median * 1e3,
            }
            if against is not None and against.error is None:
                row["times_the_peer"] = run.best / against.best * (share if implementation != base else 1)
            yield row


def errors(options):
    """Of outputs and gradients, in both kinds of masks, with fewer key heads than query heads."""
    length, heads, kv_heads = 2048, 4, 2
    arrays = arrays_of(length, heads, kv_heads)
    for block in BLOCKS:
        masks = (
            ("window", window_mask(length, block), {"causal": True, "sliding_window": (WINDOW, 0)}),
            ("random", random_mask(length, block, 0.3), {}),
        )
        for kind, mask, statics in masks:
            with jax.enable_x64(True):
                wide = [jnp.asarray(np.asarray(x.astype(jnp.float32)), jnp.float64) for x in arrays]
                expected = jax.jit(both(lambda q, k, v: dense(q, k, v, mask, block, kind == "window")))(*wide)  # noqa: B023
                expected = [np.asarray(x) for x in expected]
            for name in platforms(options):
                try:
                    actual = jax.jit(both(sparse(mask, block, statics, name)))(*arrays)
                except Exception as error:
                    print(f"{name}: {type(error).__name__}: {str(error)[:160]}", flush=True)
                    continue
                row = {"part": "errors", "call": f"{kind}, blocks of {block}", "implementation": name, "direction": ""}
                for what, a, e in zip(("out", "dquery", "dkey", "dvalue"), actual, expected, strict=True):
                    a = np.asarray(a.astype(jnp.float32), np.float64)
                    row[f"error_{what}"] = float(np.linalg.norm(a - e) / np.linalg.norm(e))
                yield row


def dense(q, k, v, mask, block, window):
    """The same in plain jnp."""
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    row, column = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    seen = jnp.asarray(mask)[row // block, column // block]
    if window:
        seen &= (column <= row) & (row - column <= WINDOW)
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    logits = jnp.where(seen, jnp.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, axis=-1), v)


def main():
    parser = gpu_options(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--xla", action="store_true")
    options = parser.parse_args()
    parts = (errors(options) if part == "errors" else measure(part, options) for part in options.parts.split(","))
    keep(options.out, itertools.chain.from_iterable(parts), "triton", "jax-triton", "torch")


if __name__ == "__main__":
    main()
