"""The calls of attention that models make, on a GPU, beside the best peers: forward, and forward + backward.

    python benchmarks/models_gpu.py --out FILE [--peers DIR] [--fa4 DIR] [--only NAME,…] [--missing] [--processes N]

`models_calls.py` lists the calls; `plot_models.py` draws what this writes, and `docs/generate.py` makes a table of it.
bfloat16. All implementations of a call get the same arrays and are timed together: bursts in random order, each after a
pause, the best of each counts (`ejkernel.utils.bursts` says why). Forward + backward is one program that makes every
gradient, those of biases and sinks too. Errors are norms relative to float64's, over one key head and its query heads,
of the last batch entry or, where a gradient sums over the batch, of all.

A peer that cannot do a call, or one direction of it, is noted with its reason; one whose result is wrong does not
count. tokamax is its Mosaic kernel or, where that refuses, its Triton kernel; FlashAttention-4 gets lengths in place of
a padding mask, which it does not take. FILE is written after every call. With --only or --missing the other calls in it
stay. Most of the time goes into compiling: --processes divides the calls among processes, of which one at a time measures. For all
calls in a few minutes: cuDNN as the one peer (neither --peers nor --fa4), --processes 12 --threads 24 and no autotuning of
XLA's own products (XLA_FLAGS=--xla_gpu_autotune_level=0).
"""

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attention_child as child
import numpy as np
from attention_float64 import in_blocks, relative_errors
from models_calls import CALLS, words
from models_tables import DIRECTIONS, OURS, best_peer, speed, wrong

FA4, TOKAMAX, CUDNN = "FlashAttention-4", "tokamax", "jax.nn cudnn"
VARIANTS = {TOKAMAX: ("tokamax mosaic_gpu", "tokamax triton")}
GROUP = 6  # calls that are compiled side by side, before they are timed
SECONDS = 0.3  # of all bursts of a program
# XLA would search for the best product in float64, which is run once.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def refusal(name, case):
    """What a peer lacks for a call, or None."""
    lacks = {FA4: ["bias"], TOKAMAX: ["sinks", "documents"], CUDNN: ["sinks", "documents", "logits_soft_cap"]}
    said = {"documents": "packed sequences", "logits_soft_cap": "soft cap"}
    used = [word for word in lacks.get(name, ()) if case.get(word) or word in case["options"]]
    return ", ".join(f"no {said.get(word, word)}" for word in used) or None


# Programs


class Jax:
    """Compiled programs by direction, of the first variant of an implementation that has each."""

    def __init__(self, name, case):
        self.compiled, self.notes = {}, []
        for variant in VARIANTS.get(name, (name,)):
            work = child.JaxJob({"implementation": variant, "case": case})
            work.programs = {d: program for d, program in work.programs.items() if d not in self.compiled}
            work.build()
            self.compiled |= work.compiled
            short = variant.split(" ")[-1]
            self.notes += [f"{direction}: {short}" for direction in work.compiled if name in VARIANTS]
            self.notes += [f"{direction}: {short}: {child.words_of(e)}" for direction, e in work.failures.items()]

    def calls(self, floats, rest, dout):
        """Functions without arguments by direction."""
        given = {"forward": (floats, rest), "both": (floats, rest, dout)}
        return {d: functools.partial(program, *given[d]) for d, program in self.compiled.items()}

    def results(self, calls, part):
        """The part of the output and of the gradients that is checked, as numpy arrays by name."""
        import jax

        found = {"out": calls["forward"]()}
        if "both" in calls:
            found |= {f"d{name}": x for name, x in calls["both"]().items()}
        cut = jax.jit(lambda found: {name: part(name, x) for name, x in found.items()})
        return {name: np.asarray(x) for name, x in cut(found).items()}


class Torch:
    """FlashAttention-4's, which is compiled by its first call."""

    def __init__(self, case):
        self.case = case
        self.notes = ["lengths in place of the mask"] * bool(case.get("padded"))
        arrays = child.JaxJob({"implementation": OURS, "case": case}).arrays()
        for call in self.calls(*arrays).values():
            with contextlib.suppress(Exception):  # it fails again where it is timed
                child.timing().repeat(call, 1, "warm-up run", None)

    def calls(self, floats, rest, dout):
        import torch

        attend = child.flash_attention_4(self.case)
        packed = bool(self.case.get("documents"))

        def tensor(x):
            x = torch.from_dlpack(x)
            return x[0] if packed and x.ndim == 4 else x

        self.names = list(floats)
        inputs = [tensor(x).detach() for x in floats.values()]
        inputs = [(x[:, 0] if name == "softmax_aux" else x) for name, x in zip(self.names, inputs, strict=True)]
        inputs, dout = [x.requires_grad_() for x in inputs], tensor(dout)

        def forward():
            with torch.no_grad():
                return attend(*inputs)

        return {"forward": forward, "both": lambda: torch.autograd.grad(attend(*inputs), inputs, dout)}

    def results(self, calls, part):
        found = {"out": calls["forward"]()}
        if "both" in calls:
            found |= {f"d{name}": x for name, x in zip(self.names, calls["both"](), strict=True)}

        def whole(x):
            return x[:, None] if x.ndim == 1 else x[None] if x.ndim == 3 else x

        return {name: part(name, whole(x)).float().cpu().numpy() for name, x in found.items()}


class Reference:
    """The slice of a call that is checked, and what it should be."""

    def __init__(self, case):
        import jax

        work = child.JaxJob({"implementation": OURS, "case": case})
        heads, kv_heads = case["heads"], case.get("kv_heads", case["heads"])
        self.entries = slice(None) if case.get("bias") or case.get("sinks") else slice(-1, None)
        self.heads, self.kv_heads = slice(heads - heads // kv_heads, heads), slice(kv_heads - 1, kv_heads)
        cut = jax.eval_shape(self.cut, *work.abstract("both"))
        with jax.enable_x64(True):
            program = in_blocks(case, {name: x.shape for name, x in cut[0].items()})
            self.program = program.lower(*cut).compile(compiler_options=UNTUNED)

    def part(self, name, x):
        """The slice of an array that is called `name`, or of its gradient; queries and the output ``[B, S, H, D]``."""
        name = name.removeprefix("d")
        if name == "bias":
            return x[:, self.heads]
        if name == "softmax_aux":
            return x[self.heads]
        if name == "attention_mask":
            return x[self.entries]
        if x.ndim == 4:
            return x[self.entries, :, self.kv_heads if name in ("key", "value") else self.heads]
        return x

    def cut(self, floats, rest, dout):
        floats, rest = ({name: self.part(name, x) for name, x in tree.items()} for tree in (floats, rest))
        return floats, rest, self.part("out", dout)

    def __call__(self, floats, rest, dout):
        import jax

        cut = jax.jit(self.cut)(floats, rest, dout)
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, self.program(*cut))


def compiled(names, calls, threads):
    """What runs each call: for each of `calls` implementations by name, and a reference; or what they raised."""

    def ready(make, *arguments):
        try:
            return make(*arguments)
        except Exception as error:
            return error

    # One thread for torch: its compiler was not made for several.
    with ThreadPoolExecutor(max(1, threads)) as pool, ThreadPoolExecutor(1) as for_torch:
        found = []
        for _, case in calls:
            able = [name for name in names if refusal(name, case) is None]
            works = {
                name: for_torch.submit(ready, Torch, case) if name == FA4 else pool.submit(ready, Jax, name, case)
                for name in able
            }
            found.append((works, pool.submit(ready, Reference, case)))
        return [
            ({name: work.result() for name, work in works.items()}, reference.result()) for works, reference in found
        ]


# Measuring


def chosen(case):
    """Which of our implementations runs, forward and backward, and with what parameters."""
    from ejkernel import explain

    work = child.JaxJob({"implementation": OURS, "case": case})
    floats, rest = work.abstract("forward")
    found = explain("flash_attention", **floats, **rest, **work.options, gradients=list(floats))
    return {
        direction: {"platform": one.platform.value, "source": one.source, "params": one.params.to_dict()}
        for direction, one in (("forward", found.chosen), ("backward", found.backward.chosen))
    }


def measured(name, works, reference, names, rounds):
    """The row of a call."""
    model, case = CALLS[name]
    rows = {implementation: {"note": refusal(implementation, case)} for implementation in names}
    runners, calls = {}, {}
    arrays = child.JaxJob({"implementation": OURS, "case": case}).arrays()
    for implementation, work in works.items():
        with noted(rows[implementation]):
            if isinstance(work, Exception):
                raise work
            rows[implementation]["note"] = "; ".join(work.notes) or None
            calls[implementation] = work.calls(*arrays)
            runners |= {(implementation, d): call for d, call in calls[implementation].items()}
    for (implementation, direction), times in (
        child.timing().time_bursts(runners, rounds=rounds, seconds=SECONDS).items()
    ):
        with noted(rows[implementation], direction):
            rows[implementation][f"{direction}_ms"] = round(times.best * 1e3, 4)
            rows[implementation][f"{direction}_ms_median"] = round(times.median * 1e3, 4)
    expected = None
    with noted(rows[OURS], "reference"):
        if isinstance(reference, Exception):
            raise reference
        expected = reference(*arrays)
    for implementation in calls:
        found = {d: call for d, call in calls[implementation].items() if f"{d}_ms" in rows[implementation]}
        if expected is not None and "forward" in found:
            with noted(rows[implementation], "errors"):
                results = works[implementation].results(found, reference.part)
                pair = results.pop("out"), {n.removeprefix("d"): x for n, x in results.items()}
                rows[implementation]["error"] = {
                    n: float(f"{x:.3g}") for n, x in relative_errors(expected, pair).items()
                }
    row = {"name": name, "model": model, "shape": words(case), "implementations": rows}
    with noted(rows[OURS], "explain"):
        row["ran"] = chosen(case)
    if "both" in calls.get(OURS, {}):
        with noted(rows[OURS], "rerun"):
            again = calls[OURS]["both"]
            rows[OURS]["repeats"] = bool(child._same_bits(again(), again()))
    for one in rows.values():
        if one["note"] is None:
            del one["note"]
    return row


@contextlib.contextmanager
def noted(row, where=None):
    """What is raised becomes a part of the row's note."""
    try:
        yield
    except Exception as error:
        said = f"{where}: {child.words_of(error)}" if where else child.words_of(error)
        row["note"] = "; ".join(filter(None, (row.get("note"), said)))


def warmed(case, reference):
    """Compiles what makes the arrays and cuts them, by doing so: other processes wait while this one measures."""
    import jax

    arrays = child.JaxJob({"implementation": OURS, "case": case}).arrays()
    if not isinstance(reference, Exception):
        jax.block_until_ready(jax.jit(reference.cut)(*arrays))


def progress(row):
    ours, said = row["implementations"][OURS], []
    for direction in DIRECTIONS:
        ratio = speed(row, direction)
        ahead = f" ({ratio:.2f} × {best_peer(row, direction)[0]})" if ratio else ""
        said.append(f"{direction} {ours.get(f'{direction}_ms', '—')} ms{ahead}")
    if "error" in ours:
        said.append(f"error {max(ours['error'].values()):.1e}")
    said += [f"{d} {one['platform']}" for d, one in row.get("ran", {}).items()]
    said += ["bits differ"] if ours.get("repeats") is False else []
    said += [f"{name}: wrong: {one['error']}" for name, one in row["implementations"].items() if wrong(one, "both")]
    said += [f"{name}: {one['note'][:90]}" for name, one in row["implementations"].items() if "note" in one]
    return "  ".join(said)


def lost(row):
    """Whether an implementation left the device unusable."""
    notes = " ".join(one.get("note", "") for one in row["implementations"].values())
    return any(word in notes for word in child.FATAL)


def known_rows(path):
    """The calls that a file has, by name."""
    return {row["name"]: row for row in json.loads(path.read_text())["calls"]} if path.exists() else {}


def divided(options):
    """Runs this script in several processes, each with some of the calls."""
    left = [name for name in options.only if not (options.missing and name in known_rows(options.out))]
    if not options.missing and options.only == list(CALLS):
        options.out.unlink(missing_ok=True)
    given = {"out": options.out, "peers": options.peers, "fa4": options.fa4, "rounds": options.rounds}
    given |= {"budget": options.budget, "threads": max(1, options.threads // options.processes)}
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    flags += ["--skip-peers"] * options.skip_peers
    parts = [left[i :: options.processes] for i in range(options.processes)]
    command = [sys.executable, __file__, *flags, "--missing"]
    started = [subprocess.Popen([*command, f"--only={','.join(part)}"]) for part in parts if part]
    return max([process.wait() for process in started], default=0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", type=Path, help="a folder with tokamax")
    parser.add_argument("--fa4", type=Path, help="a folder with FlashAttention-4")
    parser.add_argument("--skip-peers", action="store_true", help="time ours alone")
    parser.add_argument("--only", type=lambda s: s.split(","), default=list(CALLS), help="names of calls")
    parser.add_argument("--missing", action="store_true", help="measure what FILE does not have")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=460.0, help="seconds after which no call is begun")
    parser.add_argument("--threads", type=int, default=14, help="that compile; 1 if they crash")
    parser.add_argument("--processes", type=int, default=1, help="that compile")
    options = parser.parse_args()
    if unknown := set(options.only) - set(CALLS):
        parser.error(f"no such call: {', '.join(sorted(unknown))}; there are {', '.join(CALLS)}")
    if options.processes > 1:
        sys.exit(divided(options))
    child.add_peers(options.peers, options.fa4)
    names = [OURS]
    if not options.skip_peers:
        names += [FA4] * bool(options.fa4) + [TOKAMAX] * bool(options.peers) + [CUDNN]

    import jax
    from shared import origin, turn

    begin = time.monotonic()
    versions = {name: version for name, version in child.versions().items() if name != "ejkernel"}
    result = {**origin(), "device": jax.devices()[0].device_kind, "versions": versions, "calls": []}
    keep = options.missing or options.only != list(CALLS)
    rows = known_rows(options.out) if keep else {}
    for name in names:
        with contextlib.suppress(Exception):  # modules are imported by one thread
            child.attention_of(VARIANTS.get(name, (name,))[0])
    left = [name for name in options.only if not (options.missing and name in rows)]
    for group in [left[i : i + GROUP] for i in range(0, len(left), GROUP)]:
        if time.monotonic() - begin > options.budget:
            break
        works = compiled(names, [CALLS[name] for name in group], options.threads)
        print(f"{time.monotonic() - begin:5.0f} s  compiled {', '.join(group)}", flush=True)
        for name, (programs, reference) in zip(group, works, strict=True):
            if time.monotonic() - begin > options.budget:
                break
            with contextlib.suppress(Exception):  # it fails again where it is measured
                warmed(CALLS[name][1], reference)
            with turn(options.out):
                row = measured(name, programs, reference, names, options.rounds)
                rows = {**rows, **(known_rows(options.out) if keep else {}), name: row}
                result["calls"] = [rows[known] for known in CALLS if known in rows]
                options.out.write_text(json.dumps(result, indent=1) + "\n")
            left.remove(name)
            print(f"{time.monotonic() - begin:5.0f} s  {name}  {progress(rows[name])}", flush=True)
            if lost(rows[name]):
                sys.exit(f"the device is lost; go on with --missing, {len(left)} calls are left")
            if torch := sys.modules.get("torch"):
                torch.cuda.empty_cache()
    print(f"{time.monotonic() - begin:.0f} s; not measured: {', '.join(left) or 'none'}")


if __name__ == "__main__":
    main()
