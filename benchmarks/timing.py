"""What the benchmarks share: turns, ratios in one process, and where a result was measured."""

import argparse
import json
import os
import platform
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import jaxlib

# Between runs: torch's threads spin for a while after their work, and would slow whoever comes next.
PAUSE = 0.3


def best_of(runs, rounds):
    """Seconds of each run's best, the runs taking turns, three runs a turn: a noisy moment hits all of them."""
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(PAUSE)
            for _ in range(3):
                start = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def jax_run(f, *args):
    """A function that runs ``f`` compiled, and waits."""
    jitted = jax.jit(f)
    return lambda: jax.block_until_ready(jitted(*args))


def torch_version():
    """None if torch is not installed; else it uses every core from here on."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(os.cpu_count())
    return torch.__version__


def main(doc, measure):
    """``--out`` and ``--rounds``; ``measure(rounds)`` returns what is to be kept beside versions and machine."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    jnp.zeros(1).block_until_ready()
    result = {
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "torch": torch_version(),
        },
        "machine": {"cpu": jax.devices()[0].device_kind, "processor": _processor(), "cores": os.cpu_count()},
        **measure(options.rounds),
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def _processor():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
