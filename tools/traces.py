"""Hashes of what calls become: the jaxpr of every operation on XLA, the GPU program of every Triton and Mosaic kernel.

A change that must not touch generated code is checked by running this before and after it and comparing the files:

    python tools/traces.py before.json
    python tools/traces.py after.json --compare before.json

Nothing is compiled by XLA and no accelerator is needed; Triton's programs need the jax-cuda13-plugin package.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
sys.path[:0] = [os.getcwd(), str(Path(__file__).parents[1] / "tests")]

import jax
import jax.numpy as jnp
from cases import COMBINED, Case, single_feature_cases
from examples import all_examples
from jaxlib.mlir import ir

import ejkernel
from ejkernel import flash_attention, target

GRADIENTS = ("query", "key", "value", "bias", "softmax_aux")
HOPPER_FEATURES = (
    "causal",
    "window",
    "soft_cap",
    "bias",
    "mask",
    "segments",
    "varlen",
    "sinks",
    "dropout",
    "gqa",
    "cross",
    "lse",
)


def of_jaxpr(run, *args) -> str:
    """A jaxpr's hash, free of addresses and of the names of Python functions."""
    text = str(jax.make_jaxpr(run)(*args))
    text = re.sub(r"0x[0-9a-f]+", "", text)
    return hash_of(re.sub(r"name=\w+|jaxpr=\w+|<function [^>]*>", "", text))


def of_program(run, *args) -> str:
    """The hash of a lowered module whose kernels are written out without locations."""
    text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return hash_of(re.sub(r'module = "([A-Za-z0-9+/=]+)"', _without_locations, text))


def _without_locations(match: re.Match) -> str:
    try:
        with ir.Context() as context:
            context.allow_unregistered_dialects = True
            return str(ir.Module.parse(base64.b64decode(match[1])))
    except Exception:
        return match[0]


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def both(run, floats):
    """The result and all gradients, with ones as cotangents."""
    out, pull = jax.vjp(run, floats)
    return out, pull(jax.tree.map(jnp.ones_like, out))


def on_xla():
    """Every example of every operation, and every case of flash_attention: forward, then with the backward."""
    for example in all_examples():
        arrays = example.arrays()
        for device in ("cpu", "nvidia-h200"):
            with target(device):
                name = f"xla {device} {example}"
                yield name, lambda e=example, a=arrays: of_jaxpr(lambda a: e.run(a, platform="xla"), a)
                if example.differentiable:
                    yield (
                        f"{name} gradients",
                        lambda e=example, a=arrays: of_jaxpr(
                            lambda f: both(lambda f: e.run({**a, **f}, platform="xla"), f), e.floats(a)
                        ),
                    )
    features = ejkernel.kernel_registry.operation("flash_attention").features
    for case in [*single_feature_cases(features), *COMBINED]:
        arrays, statics = case.make()
        yield f"xla cpu flash_attention-{case}", flash_of(of_jaxpr, arrays, {**statics, **case.blocks}, "xla")


def flash_of(hash_program, arrays, statics, platform):
    def run():
        floats = {name: arrays[name] for name in GRADIENTS if name in arrays}

        def program(floats):
            return both(lambda f: flash_attention(**{**arrays, **f}, **statics, platform=platform), floats)

        return hash_program(program, floats)

    return run


def on_gpus():
    """Features at 128, head dims plain and causal."""
    for platform, dims in (("pallas", (32, 64, 96, 128, 192, 256)), ("triton", (40, 64, 128, 256))):
        features = ejkernel.kernel_registry.operation("flash_attention").features
        supported = HOPPER_FEATURES if platform == "pallas" else tuple(features)
        cases = [Case(f"{name}", frozenset({name}), head_dim=128, value_dim=128) for name in supported]
        cases += [Case("all", frozenset(supported) - {"varlen", "cross", "gqa"}, head_dim=128, value_dim=128)]
        cases += [Case(f"dim {dim}", frozenset(), head_dim=dim, value_dim=dim) for dim in dims]
        cases += [Case(f"causal dim {dim}", frozenset({"causal"}), head_dim=dim, value_dim=dim) for dim in dims]
        cases += [Case("segments dim 256", frozenset({"segments"}), head_dim=256, value_dim=256)]
        cases += [Case("segments dim 64", frozenset({"segments", "causal"}), head_dim=64, value_dim=64)]
        cases += [Case("value dim", frozenset({"value_dim"}), head_dim=192, value_dim=128)]
        for case in cases:
            group = 2 if "gqa" in case.features else 1
            case = Case(case.name, case.features, 1, 300, 333 if "cross" in case.features else 300, 2, group,
                        case.head_dim, case.value_dim, (100, 20))  # fmt: skip
            arrays, statics = case.make("bfloat16")
            with target("nvidia-h200"):
                yield f"{platform} nvidia-h200 {case}", flash_of(of_program, arrays, statics, platform)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--compare", type=Path, help="an earlier file; exit with 1 where a hash differs")
    parser.add_argument("--only", default="", help="names that contain this")
    options = parser.parse_args()
    found = {}
    for name, run in (*on_xla(), *on_gpus()):
        if options.only not in name:
            continue
        device = name.split()[1]
        with target(device):
            found[name] = run()
        print(f"\r\033[K{len(found)} {name}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    options.file.write_text(json.dumps({"jax": jax.__version__, "hashes": found}, indent=1) + "\n")
    if options.compare is None:
        return 0
    before = json.loads(options.compare.read_text())["hashes"]
    changed = sorted(name for name in found if before.get(name) != found[name])
    print(f"{len(found) - len(changed)} of {len(found)} are the same")
    print(*changed, sep="\n")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
