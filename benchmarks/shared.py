"""What the benchmarks share: times of several runners, and files of results that say where they are from."""

import argparse
import contextlib
import datetime
import functools
import json
import os
import platform
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib

from ejkernel.lab.files import put
from ejkernel.utils.bursts import time_bursts

# Before a burst on a CPU: torch's threads spin for a while after their work, and would slow the next runner.
PAUSE = 0.3
ROOT = Path(__file__).parents[1]


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


def origin():
    """The script that runs, and the day: what every file of results begins with."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT).as_posix() if script.is_relative_to(ROOT) else script.name
    return {"script": name, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}


def environment(*packages):
    """The origin, the device, and the versions of those packages that are installed."""
    found = {}
    for name in ("jax", "jaxlib", *packages):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {
        **origin(),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "versions": found,
    }


@contextlib.contextmanager
def turn(path, seconds=120.0):
    """The device to this process alone, among those that take turns; what it needs compiled should be by then.

    They name one file: ``path``, or, for scripts that are started side by side, that of BENCHMARK_TURN. A kernel that hangs
    must not keep the others waiting: after so many seconds the process ends.
    """
    import filelock

    with filelock.FileLock(os.environ.get("BENCHMARK_TURN") or f"{path}.lock"):

        def end():
            print(f"{sys.argv[0]}: a turn took more than {seconds:.0f} s; the process ends", flush=True)
            os._exit(3)

        watch = threading.Timer(seconds, end)
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()


def gpu_options(doc):
    """A parser with the options of the scripts that `keep` rows."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    return parser


def keep(path, rows, *packages):
    """Prints each row as it comes, and writes all so far."""
    kept, begin = [], time.time()
    for row in rows:
        kept.append(row)
        words = "  ".join(value for value in row.values() if isinstance(value, str))
        figures = {name: float(f"{value:.3g}") for name, value in row.items() if isinstance(value, float | int)}
        print(f"{time.time() - begin:5.0f} s  {words}  {figures}", flush=True)
        put(path.parent, {path.name: (json.dumps({**environment(*packages), "rows": kept}, indent=1) + "\n").encode()})


def main(doc, measure):
    """On a CPU: ``--out`` and ``--rounds``; ``measure(rounds)`` returns what is kept beside versions and machine."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    jnp.zeros(1).block_until_ready()
    result = {
        **origin(),
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
        put(options.out.parent, {options.out.name: (json.dumps(result, indent=1) + "\n").encode()})


def _processor():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
