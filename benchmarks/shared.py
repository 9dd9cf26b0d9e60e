"""What the benchmarks share: times of several runners, and where a result was measured."""

import argparse
import functools
import json
import os
import platform
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import jaxlib

from ejkernel.utils.bursts import time_bursts

# Before a burst on a CPU: torch's threads spin for a while after their work, and would slow the next runner.
PAUSE = 0.3


def best_of(runs, rounds):
    """Seconds of a call in each runner's best burst; what a runner raises comes through."""
    times = time_bursts(runs, rounds=rounds, pause=PAUSE if jax.default_backend() == "cpu" else None)
    return {name: found.best for name, found in times.items()}


def jax_run(f, *args):
    """A function that runs ``f`` compiled."""
    return functools.partial(jax.jit(f), *args)


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
    parser.add_argument("--rounds", type=int, default=12)
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
