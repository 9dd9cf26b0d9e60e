"""What features of attention cost on a Hopper GPU, each beside the plain call, cuDNN where it takes the call, and other tiles.

    python benchmarks/hopper_features_gpu.py --out FILE [--only PART;…] [--processes N] [--budget SECONDS] [--shrink N]

Every part has a process of its own, which compiles its programs; one part at a time is measured, and then written to FILE.
The programs of a part are timed together (`ejkernel.utils.bursts` says how): forward, and forward with all gradients, that
of a bias where the name says so. ``times_the_plain`` is the time over that of the part's first call in that direction, times
``share`` where a call does less. Errors are norms relative to attention in float64, of the first head.
Without a GPU, ``--shrink 64`` shows that the calls are made.
"""

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from blocksparse_attention_gpu import random_mask
from shared import environment, turn

import ejkernel
from ejkernel import FwdParams
from ejkernel.kernels.common import dropout
from ejkernel.utils.bursts import time_bursts

PALLAS, TRITON, CUDNN = "ejkernel pallas", "ejkernel triton", "jax.nn cudnn"
DROPOUT = {"dropout_prob": 0.1, "dropout_seed": 1}
# Keys whose logits are tens above those of the first.
OUTLIERS = slice(135, None, 128), 30.0
DENSITY = 0.1
TILE = ("q_blocksize", "kv_blocksize", "num_warps", "num_stages")
THREADS = 4  # of a part, that compile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One program in each direction: ``name`` says what is computed, the same for all of that name in a part."""

    name: str
    shape: tuple[int, ...]
    value_dim: int | None = None
    options: dict = dataclasses.field(default_factory=dict)
    more: dict = dataclasses.field(default_factory=dict)  # the shapes of bias and mask
    trained: bool = False
    outliers: bool = False
    dtype: str = "bfloat16"
    blocks: int = 0  # of a sparsity mask
    traced: bool = False
    implementation: str = PALLAS
    tile: tuple[int, ...] | None = None
    directions: tuple[str, ...] = ("forward", "both")

    @property
    def operation(self):
        return "blocksparse_attention" if self.blocks else "flash_attention"

    def attention(self, pinned, arrays, sparsity=None):
        """The output; ``pinned``: by the implementation that it names."""
        given, platform = dict(arrays), self.implementation.split(" ")[1] if pinned else None
        if self.implementation == CUDNN:
            options = {"is_causal": self.options.get("causal", False)}
            if "sliding_window" in self.options:
                options["local_window_size"] = self.options["sliding_window"]
            names = {"bias": "bias", "attention_mask": "mask"}
            options |= {names[name]: given.pop(name) for name in names if name in given}
            return jax.nn.dot_product_attention(**given, **options, implementation=platform)
        options = {**self.options, "platform": platform}
        params = FwdParams(**dict(zip(TILE, self.tile or (), strict=False)))
        with ejkernel.overlay(**({self.operation: params} if self.tile else {})):
            if not self.blocks:
                return ejkernel.flash_attention(**given, **options)
            mask = sparsity if self.traced else random_mask(self.shape[1], self.blocks, DENSITY)
            return ejkernel.blocksparse_attention(**given, sparsity_mask=mask, block_size=self.blocks, **options)

    def variants(self, *tiles, **changes):
        """The same with other tiles, forward alone."""
        return [dataclasses.replace(self, tile=tile, directions=("forward",), **changes) for tile in tiles]


# What is measured


def featured(dim, heads, shrink, tiles):
    """Bias, masks, dropout and outliers at 2 × 8k, causal; ``tiles``: other tiles by what is asked of a forward."""
    b, s = 2, 8192 // shrink
    call = functools.partial(Call, shape=(b, s, heads, dim))
    plain = call(name="plain", options={"causal": True})
    change = functools.partial(dataclasses.replace, plain)
    mask, trained = "attention_mask", {"trained": True, "directions": ("both",)}
    one = {
        "keys": change(name="bias [1,H,1,Sk]", more={"bias": (1, heads, 1, s)}),
        "trained keys": change(name="bias [1,H,1,Sk], dbias", more={"bias": (1, heads, 1, s)}, **trained),
        "pairs": change(name="bias [1,H,Sq,Sk]", more={"bias": (1, heads, s, s)}, directions=("forward",)),
        "trained pairs": change(name="bias [1,H,Sq,Sk], dbias", more={"bias": (1, heads, s, s)}, **trained),
        "mask": change(name="mask [B,1,1,Sk]", more={mask: (b, 1, 1, s)}),
        "mask of pairs": change(name="mask [B,1,Sq,Sk]", more={mask: (b, 1, s, s)}),
        "dropout": change(name="dropout", options={"causal": True, **DROPOUT}),
        "outliers": change(name="outliers in every block", outliers=True),
    }
    if dim == 256:
        del one["trained pairs"], one["mask of pairs"], one["outliers"]

    def of(*names):
        own = [one[name] for name in names if name in one]
        peers = [dataclasses.replace(one[x], implementation=CUDNN) for x in names if "pairs" in x and x in one]
        others = [variant for name in names if name in one for variant in one[name].variants(*tiles.get(name, ()))]
        return [plain, change(implementation=CUDNN), *own, *peers, *others]

    biases = of(*(name for name in one if "keys" in name or name.endswith(" pairs") or name == "pairs"))
    return {f"{dim}, bias": biases, f"{dim}, masks": of("mask", "mask of pairs", "dropout", "outliers")}


def windows(shrink):
    found = []
    for keys, batch, length, heads in ((1024, 1, 32768, 16), (512, 8, 8192, 4)):
        own = Call(
            name=f"window {keys}",
            shape=(batch, length // shrink, heads, 256),
            options={"causal": True, "sliding_window": (max(1, keys // shrink) - 1, 0)},
        )
        found += [own, dataclasses.replace(own, implementation=CUDNN)]
    return found


def mla(shrink):
    found = []
    for length in (4096, 8192):
        own = Call(
            name=f"192/128, {length}",
            shape=(1, length // shrink, 128, 192),
            value_dim=128,
            options={"causal": True},
        )
        found += [own, *own.variants((128, 112, 8, 2), (128, 96, 8, 2), (128, 80, 8, 2))]
    return found


def odd_dims(shrink):
    found = []
    for name, batch, length, dim, causal in (
        ("SigLIP", 64, 729, 72, False),
        ("ViT-H", 256, 257, 80, False),
        ("ViT-H", 64, 577, 80, False),
        ("Phi-3", 1, 8192, 96, True),
    ):
        heads = 32 if dim == 96 else 16
        own = Call(name=f"{name} {length} × {dim}", shape=(batch, length, heads, dim), options={"causal": causal})
        if shrink > 1:
            own = dataclasses.replace(own, shape=(1, min(length, 300), 2, dim))
        tiles = {
            72: [(192, 128, 12, 3), (192, 112, 12, 3), (192, 96, 12, 3), (128, 128, 8, 3), (128, 192, 8, 2)],
            80: [(192, 96, 12, 3), (128, 96, 8, 3), (128, 144, 8, 3)],
            96: [(192, 96, 12, 2), (128, 160, 8, 2), (128, 192, 8, 2)],
        }[dim]
        found += [own, dataclasses.replace(own, implementation=CUDNN), *own.variants(*tiles)]
    return found


def blocks(shrink, size):
    dense = Call(name="dense", shape=(1, 16384 // shrink, 16, 128))
    own = dataclasses.replace(dense, name=f"random 10% of blocks of {size}", blocks=size)
    tiles = [(128, 64, 8, 4), (192, 64, 12, 4)] if size == 64 else [(128, 128, 8, 3), (128, 64, 8, 4)]
    return [
        dense,
        own,
        dataclasses.replace(own, implementation=TRITON),
        dataclasses.replace(own, traced=True),
        *own.variants(*tiles),
    ]


def float32(shrink):
    found = []
    for heads, dim in ((16, 64), (8, 128)):
        own = Call(
            name=f"float32, {heads} × {dim}",
            shape=(2, 2048 // shrink, heads, dim),
            options={"causal": True},
            dtype="float32",
            implementation=TRITON,
        )
        found.append(own)
        for sizes in ((64, 32, 4, 2), (128, 32, 8, 2), (64, 64, 8, 2)):
            found += own.variants(sizes)
    return found


def triton(shrink):
    call = Call(
        name="16k, 16 × 128, causal",
        shape=(1, 16384 // shrink, 16, 128),
        options={"causal": True},
        implementation=TRITON,
    )
    return [call, dataclasses.replace(call, implementation=PALLAS), dataclasses.replace(call, implementation=CUDNN)]


def parts(shrink):
    """Calls by the name of their part, the slowest to compile first."""
    tiles = {
        128: {
            "keys": [(128, 112, 8, 2), (128, 96, 8, 2)],
            "mask": [(128, 112, 8, 2)],
            "mask of pairs": [(128, 112, 8, 2), (128, 96, 8, 2)],
            "pairs": [(128, 128, 8, 2), (128, 96, 8, 2)],
            "dropout": [(128, 128, 8, 2), (128, 96, 8, 2)],
        },
        64: {
            "keys": [(192, 112, 12, 4), (192, 96, 12, 4), (128, 128, 8, 4)],
            "mask": [(192, 112, 12, 4), (192, 96, 12, 4), (128, 128, 8, 4)],
            "mask of pairs": [(192, 96, 12, 4), (128, 128, 8, 4)],
            "pairs": [(192, 64, 12, 4), (128, 128, 8, 4)],
            "dropout": [(192, 64, 12, 4), (128, 128, 8, 4), (128, 96, 8, 4)],
        },
        256: {"keys": [(128, 64, 8, 2)], "mask": [(128, 64, 8, 2)], "dropout": [(128, 64, 8, 2)]},
    }
    return {
        **featured(128, 16, shrink, tiles[128]),
        **featured(64, 32, shrink, tiles[64]),
        **featured(256, 8, shrink, tiles[256]),
        "odd dims": odd_dims(shrink),
        "blocks of 64": blocks(shrink, 64),
        "blocks of 128": blocks(shrink, 128),
        "192/128": mla(shrink),
        "windows": windows(shrink),
        "float32": float32(shrink),
        "Triton": triton(shrink),
    }


# Programs


def arrays_of(call):
    """A function that makes query, key, value, bias and mask, and the output's cotangent."""
    *leading, dim = call.shape
    width = call.value_dim or dim
    kind = jnp.dtype(call.dtype)

    def make():
        keys = jax.random.split(jax.random.key(0, impl="rbg"), 6)
        shapes = {"query": call.shape, "key": call.shape, "value": (*leading, width), "dout": (*leading, width)}
        arrays = {
            name: jax.random.normal(key, shape, kind) for key, (name, shape) in zip(keys, shapes.items(), strict=False)
        }
        if call.outliers:
            arrays["key"] = arrays["key"].at[:, OUTLIERS[0]].multiply(OUTLIERS[1])
        if "bias" in call.more:
            # What all queries share is small: it may be float32.
            wide = jnp.float32 if call.more["bias"][2] == 1 else kind
            arrays["bias"] = jax.random.normal(keys[4], call.more["bias"], wide)
        if "attention_mask" in call.more:
            seen = jax.random.uniform(keys[5], call.more["attention_mask"]) < 0.9
            # With a causal mask too, every row sees a key.
            arrays["attention_mask"] = seen.at[..., 0].set(True)
        return arrays

    return make


def wanted(call, arrays):
    """The names of the arrays that get a gradient."""
    return [n for n in ("query", "key", "value", *(["bias"] if call.trained else [])) if n in arrays]


def program(call, direction, attention):
    """A function of the arrays, and of a traced mask."""

    def forward(arrays, *mask):
        return attention({n: x for n, x in arrays.items() if n != "dout"}, *mask)

    def both(arrays, *mask):
        floats = {n: arrays[n] for n in wanted(call, arrays)}
        out, pull = jax.vjp(lambda floats: forward({**arrays, **floats}, *mask), floats)
        return out, pull(arrays["dout"])[0]

    return jax.jit({"forward": forward, "both": both}[direction])


def traced_mask(call):
    return (jnp.asarray(random_mask(call.shape[1], call.blocks, DENSITY)),) if call.traced else ()


def first_head(arrays):
    """Of each array: heads are the second axis of a bias or a mask, else the third."""
    return {n: x[:, :1] if n in ("bias", "attention_mask") else x[:, :, :1] for n, x in arrays.items()}


def reference(call):
    """Output and gradients of the first head, in float64 from the definition: a function of the arrays."""
    length = call.shape[1]

    def dense(arrays):
        q, k, v = (arrays[name][:, :, 0] for name in ("query", "key", "value"))
        logits = jnp.einsum("bqd,bkd->bqk", q, k) * q.shape[-1] ** -0.5
        if "bias" in arrays:
            logits += arrays["bias"][:, 0]
        row, column = jnp.arange(length)[:, None], jnp.arange(length)
        seen = jnp.ones((length, length), bool)
        if call.options.get("causal"):
            seen &= column <= row
        if "sliding_window" in call.options:
            seen &= row - column <= call.options["sliding_window"][0]
        if call.blocks:
            mask = jnp.asarray(random_mask(length, call.blocks, DENSITY))
            seen &= mask[row // call.blocks, column // call.blocks]
        if "attention_mask" in arrays:
            seen = seen & arrays["attention_mask"][:, 0]
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
        if "dropout_prob" in call.options:
            keys = dropout.batch_keys(jnp.uint32(call.options["dropout_seed"]), call.shape[0])
            rows = dropout.row_keys(keys[:, None], jnp.int32(0), jnp.arange(length, dtype=jnp.int32))
            kept = dropout.keep(rows[..., None], column.astype(jnp.int32), call.options["dropout_prob"])
            weights = jnp.where(kept, weights / (1 - call.options["dropout_prob"]), 0)
        return jnp.einsum("bqk,bkd->bqd", weights, v)[:, :, None]

    def run(arrays):
        wide = {n: x if x.dtype == bool else x.astype(jnp.float64) for n, x in first_head(arrays).items()}
        return program(call, "both", dense)(wide)

    return jax.jit(run)


def compiled(calls, pinned):
    """By call: its programs by direction. By name: what makes its arrays, and the reference. Or what they raised."""

    def ready(make):
        try:
            return make()
        except Exception as error:
            return error

    def shapes(call):
        return jax.eval_shape(arrays_of(call)), *traced_mask(call)

    def reference_of(call):
        with jax.enable_x64(True):
            return reference(call).lower(shapes(call)[0]).compile()

    with ThreadPoolExecutor(THREADS) as pool:
        programs = {
            (i, direction): pool.submit(
                ready,
                lambda call=call, direction=direction: (
                    program(call, direction, functools.partial(call.attention, pinned)).lower(*shapes(call)).compile()
                ),
            )
            for i, call in enumerate(calls)
            for direction in call.directions
        }
        names = {call.name: call for call in calls}
        makers = {n: pool.submit(ready, lambda c=c: jax.jit(arrays_of(c)).lower().compile()) for n, c in names.items()}
        references = {
            n: pool.submit(ready, lambda c=c: reference_of(c))
            for n, c in names.items()
            if c.name != "dense" and c.shape[1] < 2**15
        }
        return [{key: work.result() for key, work in works.items()} for works in (programs, makers, references)]


def errors(found, expected):
    """Norms of the first head's output, or of it and its gradients, relative to the expected ones."""
    out, grads = found if isinstance(found, tuple) else (found, {})
    pairs = {"out": (out[:, :, :1], expected[0])}
    pairs |= {f"d{n}": (x, expected[1][n]) for n, x in first_head(grads).items()}
    with jax.enable_x64(True):
        wide = {n: (np.asarray(a, np.float64), np.asarray(e)) for n, (a, e) in pairs.items()}
    return {f"error_{n}": float(f"{np.linalg.norm(a - e) / np.linalg.norm(e):.3g}") for n, (a, e) in wide.items()}


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(bool((x == y).all()) for x, y in pairs)


def rows_of(part, calls, works, options):
    """A row for each direction of each call."""
    programs, makers, references = works
    arrays, expected, runners, failed = {}, {}, {}, {}
    for name, maker in makers.items():
        arrays[name] = maker()
    for (i, direction), run in programs.items():
        call = calls[i]
        if isinstance(run, Exception):
            failed[i, direction] = run
        else:
            runners[i, direction] = functools.partial(run, arrays[call.name], *traced_mask(call))
    times = time_bursts(runners, rounds=options.rounds, seconds=0.3)
    failed |= {key: one.error for key, one in times.items() if one.error is not None}
    for name, run in references.items():
        if not isinstance(run, Exception):
            with jax.enable_x64(True):
                expected[name] = run(arrays[name])
    for (i, direction), _ in programs.items():
        call = calls[i]
        row = {"part": part, "call": call.name, "implementation": call.implementation, "direction": direction}
        if call.tile or call.traced:
            row["tiles"] = "-".join(map(str, call.tile)) if call.tile else "default, traced mask:"
        if (i, direction) in failed:
            error = failed[i, direction]
            yield {**row, "failed": f"{type(error).__name__}: {str(error)[:160]}"}
            continue
        found = times[i, direction]
        row |= {"ms": found.best * 1e3, "median_ms": found.median * 1e3}
        # The first call of the part, or of that name: parts without one plain call.
        plain = times.get(
            (0 if calls[0].name in ("plain", "dense") else calls.index(call_of_name(calls, call)), direction)
        )
        if plain is not None and plain.error is None and plain is not found:
            row["times_the_plain"] = found.best / plain.best / (DENSITY if call.blocks else 1)
        if not call.blocks and "sliding_window" not in call.options:
            batch, length, heads, dim = call.shape
            work = 2 * batch * heads * length**2 * (dim + (call.value_dim or dim))
            work *= (0.5 if call.options.get("causal") else 1) * (3.5 if direction == "both" else 1)
            row["tflops"] = work / found.best / 1e12
        if call.name in expected and (direction == "both" or len(call.directions) == 1):
            try:
                result = runners[i, direction]()
                row |= errors(result, expected[call.name])
                if call.implementation != CUDNN:
                    row["repeats"] = same(result, runners[i, direction]())
            except Exception as error:
                row["failed"] = f"errors: {type(error).__name__}: {str(error)[:160]}"
        yield row


def call_of_name(calls, call):
    return next(other for other in calls if other.name == call.name)


def told(row):
    worst = max((x for n, x in row.items() if n.startswith("error_")), default=None)
    said = [f"{row['part']:14} {row['call']:30.30} {row['implementation'][:15]:15} {row['direction']:7}"]
    said.append(f"{row.get('tiles', '').removesuffix(' mask:'):16}")
    said.append(f"{row['ms']:8.3f} ms" if "ms" in row else "")
    said.append(f"{row['times_the_plain']:5.2f} x" if "times_the_plain" in row else " " * 7)
    said.append(f"{row['tflops']:6.0f} T" if "tflops" in row else " " * 8)
    said.append(f"{worst:.1e}" if worst is not None else "")
    said += ["BITS DIFFER"] * (row.get("repeats") is False) + [row.get("failed", "")[:100]]
    return " ".join(said)


def measure(part, options):
    """Of one part, in this process."""
    begin = time.monotonic()
    calls = parts(options.shrink)[part]
    works = compiled(calls, options.shrink == 1)
    spent = time.monotonic() - begin
    with turn(options.out):
        begin = time.monotonic()
        for row in rows_of(part, calls, works, options):
            kept = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
            content = {**environment("triton", "jax-triton"), "rows": [*kept, row]}
            options.out.write_text(json.dumps(content, indent=1) + "\n")
            print(told(row), flush=True)
        print(f"{part}: compiled in {spent:.0f} s, measured in {time.monotonic() - begin:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", type=lambda s: s.split(";"), default=list(parts(1)), help="names of parts, by ;")
    parser.add_argument("--processes", type=int, default=13, help="that compile, one part each")
    parser.add_argument("--budget", type=float, default=195.0, help="seconds after which what still runs is ended")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shrink", type=int, default=1, help="divide lengths; kernels are then chosen by the library")
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    if options.here:
        for part in options.only:
            measure(part, options)
        return
    options.out.unlink(missing_ok=True)
    begin = time.monotonic()
    flags = ["--out", str(options.out), "--rounds", str(options.rounds), "--shrink", str(options.shrink), "--here"]

    def run(part):
        try:
            left = options.budget - (time.monotonic() - begin)
            subprocess.run([sys.executable, __file__, *flags, "--only", part], timeout=max(1.0, left), check=False)
        except subprocess.TimeoutExpired:
            print(f"{part}: not measured to the end", flush=True)

    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(run, options.only))
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
