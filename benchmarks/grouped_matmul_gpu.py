"""grouped_matmul on a GPU: our kernels against float64, and beside torch, quack, tokamax, ragged_dot and one dense product.

    python benchmarks/grouped_matmul_gpu.py --out FILE [--quick] [--seconds 145] [--without pallas,quack]

Each part runs in a process of its own with a time limit, so that a kernel that hangs ends its part alone; what was measured
before is kept. First every kernel is checked on small calls of odd sizes: values, both gradients, NaN in rows of no group, equal
reruns. Then the calls of `CASES` are timed, forward and each gradient by itself, all implementations of one in the same
bursts (`ejkernel.utils.bursts` says how), and each is compared with float64 at random places of its result. Our kernels are timed
with several tiles (rows × columns × stages); "api" is a call of the library, with what it prepares.
"""

import argparse
import concurrent.futures
import functools
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
from shared import environment, turn

# name, M, K, N, groups; tiles of the forward, of the gradient of a and of that of b.
BIG, MID, WIDE_FEW, FEW = (128, 256, 16), (128, 128, 16), (64, 256, 16), (64, 128, 16)
CASES = {
    "large": (16384, 4096, 14336, 8, [BIG, MID], [BIG], [BIG]),
    "experts": (16384, 2048, 1408, 64, [BIG, MID, WIDE_FEW], [BIG, MID], [BIG, MID]),
    "narrow": (4096, 2048, 768, 128, [WIDE_FEW, FEW, (64, 64, 16), BIG], [WIDE_FEW, FEW], [BIG, MID]),
    "256 rows": (256, 2048, 1408, 64, [WIDE_FEW, FEW, (64, 64, 16)], [WIDE_FEW, FEW], [BIG]),
    "64 rows": (64, 2048, 1408, 64, [WIDE_FEW, FEW, (64, 64, 16)], [WIDE_FEW], [BIG]),
}
TRITON = {128: [(128, 256, 64, 8, 4), (128, 128, 64, 8, 4)], 64: [(16, 256, 64, 4, 4), (16, 128, 128, 4, 4)]}
DIRECTIONS = ("forward", "a", "b")
WORDS = {"forward": "forward", "a": "gradient of a", "b": "gradient of b"}
SPREADS = ("dirichlet", "equal", "one has all", "half empty")
PLATFORMS = ("pallas", "triton", "xla")


def sizes_of(spread, rows, groups):
    """How many rows each group has."""
    rng = np.random.RandomState(0)
    if spread == "equal":
        return np.diff(np.linspace(0, rows, groups + 1).astype(int)).astype(np.int32)
    if spread == "one has all":
        return np.eye(groups, dtype=np.int32)[groups // 2] * rows
    weights = rng.dirichlet(np.ones(groups) * 3)
    if spread == "half empty":
        weights = weights * (np.arange(groups) % 2)
        weights /= weights.sum()
    return rng.multinomial(rows, weights).astype(np.int32)


def implementation(platform):
    """What computes on a platform: ``(forward, backward)`` of prepared arrays."""
    if platform == "pallas":
        from ejkernel.kernels._pallas.gpu.grouped_matmul_sm90.matmul import PallasGroupedMatmul as kernel
    elif platform == "triton":
        from ejkernel.kernels._triton.grouped_matmul import TritonGroupedMatmul as kernel
    else:
        from ejkernel.kernels._xla import grouped_matmul as kernel
    return kernel.forward, kernel.backward


def parameters(platform, direction, tiles):
    """The library's, of a tile."""
    from ejkernel import BwdParams, FwdParams

    kind = FwdParams if direction == "forward" else BwdParams
    if tiles is None:
        return kind()
    if platform == "pallas":
        return kind(**dict(zip(("blocksize_m", "blocksize_n", "num_stages"), tiles, strict=True)))
    names = ("blocksize_m", "blocksize_n", "blocksize_k", "num_warps", "num_stages")
    return kind(**dict(zip(names, tiles, strict=True)))


def of_arrays(platform, direction, params, spec):
    """A function of ``a``, ``b``, the bounds and the cotangent that computes one direction."""
    forward, backward = implementation(platform)

    def run(a, b, bounds, dout):
        arrays = {"a": a[None], "b": b[None], "bounds": bounds[None]}
        if direction == "forward":
            return forward(arrays, spec, params)[0][0]
        grads = backward(arrays, spec, params, None, None, dout[None], None, wanted=frozenset({direction}))
        return grads[direction][0]

    return run


def spec_of(dtype, transpose=False, result=None):
    import jax.numpy as jnp

    from ejkernel.ops.grouped_matmul import GroupedSpec

    return GroupedSpec(transpose, jnp.dtype(result or dtype), jnp.dtype("float32"))


def expected(direction, a, b, dout, bounds, transpose):
    """In float64, all of it."""
    groups = [slice(bounds[g], bounds[g + 1]) for g in range(len(b))]
    if direction == "b":
        pairs = [(dout, a) if transpose else (a, dout)] * len(groups)
        return np.stack([x[own].T @ y[own] for own, (x, y) in zip(groups, pairs, strict=True)])
    matrices = b if (direction == "forward") != transpose else b.swapaxes(1, 2)
    rows = a if direction == "forward" else dout
    out = np.zeros((len(rows), matrices.shape[2]))
    for own, matrix in zip(groups, matrices, strict=True):
        out[own] = rows[own] @ matrix
    return out


# --- small calls -----------------------------------------------------------------------------------------------------

SMALL = {
    # before, sizes, after, K, N, transposed, dtype, result
    "odd sizes": (5, [70, 0, 131, 1], 9, 72, 136, False, "bfloat16", None),
    "transposed": (0, [0, 300, 64, 3], 0, 200, 392, True, "bfloat16", None),
    "float16 to float32": (3, [128, 0, 257], 1, 136, 1416, False, "float16", "float32"),
    "one row a group": (0, [1] * 130, 7, 64, 264, False, "bfloat16", None),
    "nothing": (0, [0, 0, 0], 50, 64, 64, False, "bfloat16", None),
    "whole tiles": (0, [256, 128, 1024], 0, 512, 768, False, "bfloat16", None),
}
CHECKED_TILES = {
    "pallas": [BIG, MID, WIDE_FEW, (64, 64, 16)],
    "triton": [(128, 256, 64, 8, 3), (16, 128, 64, 4, 4)],
}
BOUNDS = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 5e-6}


def check(options, write):
    """Our kernels on small calls, against float64."""
    import jax
    import jax.numpy as jnp

    jobs, end = [], time.time() + options.limit - 10
    for platform in ("pallas", "triton"):
        if platform in options.without:
            continue
        for number, (name, call) in enumerate(SMALL.items()):
            tiles = CHECKED_TILES[platform]
            # Triton compiles one kernel after the other.
            if platform == "triton" and number > 2:
                continue
            chosen = [tiles[number % len(tiles)]] if options.quick or number or platform == "triton" else tiles
            jobs += [(platform, name, call, tile) for tile in chosen]
    if "triton" not in options.without:
        call = (0, [70, 0, 131, 1], 9, 72, 136, False, "float32", None)
        jobs.append(("triton", "float32", call, None))

    def arrays_of(before, sizes, after, k, n, transpose, dtype, result):
        rng, kind = np.random.default_rng(0), jnp.dtype(dtype)
        bounds = (before + np.concatenate([[0], np.cumsum(sizes)])).astype(np.int32)
        rows = int(bounds[-1]) + after
        a, dout = (rng.standard_normal((rows, x)) for x in (k, n))
        b = rng.standard_normal((len(sizes), n, k) if transpose else (len(sizes), k, n))
        own = ((np.arange(rows) >= bounds[0]) & (np.arange(rows) < bounds[-1]))[:, None]
        return np.where(own, a, np.nan).astype(kind), b.astype(kind), bounds, np.where(own, dout, np.nan).astype(kind)

    def one(job, direction):
        platform, _, call, tile = job
        a, b, bounds, dout = arrays_of(*call)
        transpose, dtype, result = call[5:]
        spec = spec_of(dtype, transpose, result if direction == "forward" else None)
        params = parameters(platform, direction, tile)
        program = jax.jit(of_arrays(platform, direction, params, spec)).lower(a, b, bounds, dout).compile()
        return program, (a, b, bounds, dout)

    # Modules and the device are ready before threads need them.
    for platform in {job[0] for job in jobs}:
        implementation(platform)
    jnp.zeros(1).block_until_ready()
    pool, alone = concurrent.futures.ThreadPoolExecutor(12), concurrent.futures.ThreadPoolExecutor(1)
    futures = {
        (number, direction): (alone if job[0] == "triton" else pool).submit(one, job, direction)
        for number, job in enumerate(jobs)
        for direction in DIRECTIONS
    }
    for (number, direction), future in futures.items():
        platform, name, call, tile = jobs[number]
        row = {"part": "small", "case": name, "implementation": named(platform, tile), "direction": WORDS[direction]}
        try:
            program, arrays = future.result(timeout=max(0.1, end - time.time()))
            with turn(options.out):
                found = [np.asarray(program(*arrays)).astype(np.float64) for _ in range(2)]
            a, b, bounds, dout = (x.astype(np.float64) for x in arrays)
            exact = expected(direction, a, b, dout, bounds.astype(int), call[5])
            row["relative_error"] = float(np.linalg.norm(found[0] - exact) / max(np.linalg.norm(exact), 1e-30))
            row["repeats"] = bool((found[0] == found[1]).all())
            if not row["relative_error"] < BOUNDS[call[6]] or not row["repeats"]:
                row["note"] = "WRONG"
        except Exception as error:
            row["failed"] = shown(error)
        write(row)
        wrong = row.get("failed") or row.get("note")
        if wrong:
            print(f"small {name} {row['implementation']} {direction}: {wrong} {row.get('relative_error')}", flush=True)
    pool.shutdown(cancel_futures=True)
    print("small calls: checked", len(futures), flush=True)


def named(platform, tile):
    return f"{platform} {'×'.join(map(str, tile))}" if tile else platform


def shown(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# --- times -----------------------------------------------------------------------------------------------------------


class Case:
    """One of `CASES` with its arrays, ours on JAX."""

    def __init__(self, name, dtype="bfloat16"):
        import jax

        self.name, self.dtype = name, dtype
        self.m, self.k, self.n, self.groups, *tiles = CASES[name]
        self.tiles = dict(zip(DIRECTIONS, tiles, strict=True))
        shapes = (self.m, self.k), (self.groups, self.k, self.n), (self.m, self.n)
        self.shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        self.make = jax.jit(lambda: [jax.random.normal(jax.random.key(i), x, dtype) for i, x in enumerate(shapes)])
        self.spec = spec_of(dtype)
        self.flops = 2 * self.m * self.k * self.n

    def text(self, spread):
        return f"{self.dtype} {self.m}×{self.k} · {self.groups}×({self.k}×{self.n}), {spread}"

    def bounds(self, spread):
        import jax.numpy as jnp

        return jnp.asarray(np.concatenate([[0], np.cumsum(sizes_of(spread, self.m, self.groups))]), jnp.int32)


def programs_of(case, direction, options):
    """By name, functions of ``a``, ``b``, the bounds and the cotangent."""
    import jax
    import jax.numpy as jnp

    import ejkernel

    found = {}
    if case.dtype == "float32":
        for platform in ("triton", "xla"):
            found[platform] = of_arrays(platform, direction, parameters(platform, direction, None), case.spec)
        return found
    if "pallas" not in options.without:
        for tiles in case.tiles[direction]:
            params = parameters("pallas", direction, tiles)
            found[named("pallas", tiles)] = of_arrays("pallas", direction, params, case.spec)

        def api(a, b, bounds, dout):
            sizes = jnp.diff(bounds)
            return ejkernel.grouped_matmul(a, b, sizes, platform="pallas")

        if direction == "forward":
            found["pallas api"] = api
    if "triton" not in options.without:
        few = case.m // case.groups < 64
        more = [] if options.quick or direction != "forward" else TRITON[64 if few else 128]
        for tiles in (triton_defaults(case, direction), *more):
            found[named("triton", tiles)] = of_arrays(
                "triton", direction, parameters("triton", direction, tiles), case.spec
            )
    if "xla" not in options.without and not options.quick:
        found["xla"] = of_arrays("xla", direction, parameters("xla", direction, None), case.spec)
    if direction == "forward" and not options.quick:
        found["ragged_dot"] = lambda a, b, bounds, dout: jax.lax.ragged_dot(a, b, jnp.diff(bounds))
    if "tokamax" not in options.without and direction == "forward":
        try:
            import tokamax

            found["tokamax"] = lambda a, b, bounds, dout: tokamax.ragged_dot(
                a, b, jnp.diff(bounds), implementation="mosaic"
            )
        except Exception as error:
            print("tokamax:", shown(error)[:120], flush=True)
            options.without.add("tokamax")
    return found


def triton_defaults(case, direction):
    """The tiles that the library takes."""
    import jax

    from ejkernel.contracts.device import describe
    from ejkernel.kernels._triton.grouped_matmul import TritonGroupedMatmul

    a, b, _ = case.shapes
    shapes = {
        "a": jax.ShapeDtypeStruct((1, *a.shape), a.dtype),
        "b": jax.ShapeDtypeStruct((1, *b.shape), b.dtype),
        "bounds": jax.ShapeDtypeStruct((1, case.groups + 1), np.int32),
    }
    params = TritonGroupedMatmul.defaults(shapes, case.spec, describe(), direction)
    return tuple(getattr(params, x) for x in ("blocksize_m", "blocksize_n", "blocksize_k", "num_warps", "num_stages"))


class Torch:
    """A case's arrays in torch, and what computes on them."""

    def __init__(self, case, options):
        import torch

        self.torch, self.case, self.quack = torch, case, None
        if "quack" not in options.without:
            try:
                from quack.gemm_interface import gemm

                self.quack = gemm
            except Exception as error:
                print("quack:", shown(error)[:120], flush=True)
                options.without.add("quack")
        torch.manual_seed(0)
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        self.a, self.dout = (torch.randn(case.m, x, **kind) for x in (case.k, case.n))
        self.b = torch.randn(case.groups, case.k, case.n, **kind)

    def runners(self, direction, spread, options):
        torch, a, b, dout, gemm = self.torch, self.a, self.b, self.dout, self.quack
        ends = np.concatenate([[0], np.cumsum(sizes_of(spread, self.case.m, self.case.groups))])
        ends = torch.tensor(ends, device="cuda", dtype=torch.int32)
        turned = b.transpose(-2, -1)
        if direction == "forward":
            found = {"torch": lambda: torch._grouped_mm(a, b, offs=ends[1:])}
            if spread == SPREADS[0]:
                found["dense"] = lambda: a @ b[0]
            if gemm:
                found["quack"] = lambda: gemm(a, b, cu_seqlens_m=ends, tuned=options.tuned)
        elif direction == "a":
            found = {"torch": lambda: torch._grouped_mm(dout, turned, offs=ends[1:])}
            if gemm:
                found["quack"] = lambda: gemm(dout, turned, cu_seqlens_m=ends, tuned=options.tuned)
        else:
            found = {"torch": lambda: torch._grouped_mm(a.T, dout, offs=ends[1:])}
            if gemm:
                found["quack"] = lambda: gemm(a.T, dout, cu_seqlens_k=ends, tuned=options.tuned)
        return found


def measure(options, write):
    """Compiles everything at once, then times case by case."""
    import jax

    begin = time.time()
    names = [(name, "bfloat16") for name in options.cases]
    if "experts" in options.cases and not options.quick:
        names.append(("experts", "float32"))
    cases = [Case(*name) for name in names]
    pool, alone = concurrent.futures.ThreadPoolExecutor(14), concurrent.futures.ThreadPoolExecutor(1)
    futures = {}
    for case in cases:
        bounds = jax.ShapeDtypeStruct((case.groups + 1,), np.int32)
        a, b, dout = case.shapes
        for direction in DIRECTIONS:
            try:
                programs = programs_of(case, direction, options)
            except Exception as error:
                print(case.name, direction, shown(error), flush=True)
                programs = {}
            for name, program in programs.items():
                job = functools.partial(lambda f, *x: jax.jit(f).lower(*x).compile(), program, a, b, bounds, dout)
                futures[case, direction, name] = (alone if "triton" in name else pool).submit(job)
    # What is not compiled by then is left out: the times need most of the rest.
    concurrent.futures.wait(futures.values(), timeout=max(20.0, 0.5 * options.limit))
    print(
        f"compiled {sum(x.done() for x in futures.values())} of {len(futures)} in {time.time() - begin:.0f} s",
        flush=True,
    )
    for executor in (pool, alone):
        executor.shutdown(wait=False, cancel_futures=True)
    # All cases with rows drawn at random come first.
    for spreads in (SPREADS[:1], SPREADS[1:]):
        for case in cases:
            if spreads[0] != SPREADS[0] and (options.quick or case.dtype == "float32" or case.m <= 256):
                continue
            try:
                time_case(case, spreads, futures, options, write, begin)
            except Exception as error:
                traceback.print_exc(limit=3)
                write({"part": "times", "case": case.text(", ".join(spreads)), "failed": shown(error)})


def time_case(case, spreads, futures, options, write, begin):
    """All directions of a case, with its rows spread so over the groups."""
    import jax

    a, b, dout = case.make()
    peers = None
    if case.dtype == "bfloat16" and "torch" not in options.without:
        try:
            peers = Torch(case, options)
        except Exception as error:
            print("torch:", shown(error)[:150], flush=True)
    for spread in spreads:
        bounds = jax.block_until_ready(case.bounds(spread))
        for direction in DIRECTIONS:
            if time.time() - begin > options.limit - 8:
                print("no time left for", case.text(spread), direction, flush=True)
                continue
            with turn(options.out):
                rows = time_direction(case, direction, spread, bounds, (a, b, dout), peers, futures, options)
            for row in rows.values():
                write(row)
            best = sorted(rows.values(), key=lambda row: row.get("ms", 1e9))
            print(f"{case.name} {case.dtype} {spread} {direction}: " + "; ".join(map(brief, best)), flush=True)


def time_direction(case, direction, spread, bounds, arrays, peers, futures, options):
    """Rows by implementation."""
    from ejkernel.utils.bursts import time_bursts

    a, b, dout = arrays
    rows, runners = {}, {}

    def row_of(name):
        return {"part": "times", "case": case.text(spread), "implementation": name, "direction": WORDS[direction]}

    for (of, which, name), future in futures.items():
        if of is not case or which != direction:
            continue
        if spread != SPREADS[0] and name != named("pallas", case.tiles[direction][0]):
            continue
        rows[name] = row = row_of(name)
        try:
            if not future.done():
                raise TimeoutError("not compiled in time")
            program = future.result()
            row |= errors(case, direction, bounds, program, (a, b, bounds, dout), repeat=spread == SPREADS[0])
            runners[name] = functools.partial(program, a, b, bounds, dout)
        except Exception as error:
            row["failed"] = shown(error)
    for name, runner in (peers.runners(direction, spread, options) if peers else {}).items():
        rows[name], runners[name] = row_of(name), runner
    rounds = 3 if options.quick or spread != SPREADS[0] else options.rounds
    for name, times in time_bursts(runners, rounds=rounds, seconds=0.25, pause=0.01).items():
        if times.error is not None:
            rows[name]["failed"] = shown(times.error)
            continue
        rows[name] |= {"ms": times.best * 1e3, "median_ms": times.median * 1e3}
        rows[name]["tflops"] = case.flops / times.best / 1e12
    return rows


def brief(row):
    """A row in few characters: its time in microseconds and its rate, an error that is too large, what failed."""
    words = row["implementation"]
    if "ms" in row:
        words += f" {row['ms'] * 1e3:.0f}µs {row['tflops']:.0f}"
    error = row.get("relative_error")
    if error is not None and not error < BOUNDS[row["case"].split()[0]]:
        words += f" WRONG {error:.1e}"
    elif error is not None and "float32" in row["case"]:
        words += f" error {error:.1e}"
    if row.get("repeats") is False:
        words += " RERUN DIFFERS"
    if "failed" in row:
        words += f" FAILED {row['failed'][:150]}"
    return words


@functools.cache
def picked():
    """A program that takes rows and columns of a matrix, or of one of several."""
    import jax
    import jax.numpy as jnp

    def run(x, group, rows, columns):
        return (x if group is None else x[group])[rows][:, columns].astype(jnp.float32)

    return jax.jit(run)


def errors(case, direction, bounds, program, arrays, repeat):
    """The relative error at places drawn at random, against float64; whether a second run gives the same bits."""
    import jax
    import jax.numpy as jnp

    a, b, _, dout = arrays
    rng = np.random.default_rng(1)
    out = program(*arrays)
    found = {}
    if repeat:
        found["repeats"] = bool(jnp.array_equal(out, program(*arrays)))
    ends = np.asarray(bounds)

    def host(x, rows, columns, group=None):
        return np.asarray(picked()(x, group, rows, columns), np.float64)

    def some(length):
        """So many of each axis, whatever its length: nothing is compiled again."""
        return np.sort(np.concatenate([[0, length - 1], rng.integers(0, length, 38)]))

    exact, actual = [], []
    everything = {x: np.arange(x) for x in (case.m, case.k, case.n)}
    for g in rng.permutation(np.flatnonzero(np.diff(ends)))[:6]:
        if direction == "b":
            i, j, own = some(case.k), some(case.n), slice(ends[g], ends[g + 1])
            left, right = (host(x, everything[case.m], at)[own] for x, at in ((a, i), (dout, j)))
            exact.append(left.T @ right)
            actual.append(host(out, i, j, g))
            continue
        # The first and the last row of a group, where tiles end, and others.
        rows = ends[g] + some(ends[g + 1] - ends[g])
        columns = some(case.n if direction == "forward" else case.k)
        if direction == "forward":
            exact.append(host(a, rows, everything[case.k]) @ host(b, everything[case.k], columns, g))
        else:
            exact.append(host(dout, rows, everything[case.n]) @ host(b, columns, everything[case.n], g).T)
        actual.append(host(out, rows, columns))
    exact, actual = (np.concatenate([x.ravel() for x in parts]) for parts in (exact, actual))
    jax.block_until_ready(out)
    found["relative_error"] = float(np.linalg.norm(actual - exact) / np.linalg.norm(exact))
    return found


# --- the parts, each in a process of its own --------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="few tiles, no slow peers")
    parser.add_argument("--tuned", action="store_true", help="let quack search its tiles, which takes long")
    parser.add_argument("--seconds", type=float, default=145, help="for everything")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--without", default="", help="platforms and peers to leave out")
    parser.add_argument("--part", choices=("small", "times"), help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.without = set(filter(None, options.without.split(",")))
    options.cases = options.cases.split(",")
    if options.part:
        lines = options.out.open("a")

        def write(row):
            row = dict(row)
            if "relative_error" in row:
                row["error_" + row["direction"].replace(" ", "_")] = row.pop("relative_error")
            lines.write(json.dumps(row) + "\n")
            lines.flush()

        {"small": check, "times": measure}[options.part](options, write)
        # Threads that still compile do not keep the process.
        sys.stdout.flush()
        os._exit(0)
    parent(options)


def parent(options):
    """Runs the parts, and writes what they found."""
    begin = time.time()
    lines = options.out.with_suffix(".lines")
    lines.unlink(missing_ok=True)
    lines.touch()
    ended = {}
    for part, most in (("small", 0.4), ("times", 1.0)):
        limit = most * options.seconds - (0 if part == "small" else time.time() - begin)
        command = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--limit", str(limit), "--out", str(lines)]
        if options.without:
            command += ["--without", ",".join(options.without)]
        try:
            ended[part] = subprocess.run(command, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            ended[part] = "ran out of time"
        print(f"{part}: {ended[part]} after {time.time() - begin:.0f} s", flush=True)
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    about = environment("torch", "triton", "jax-triton", "tokamax", "quack-kernels")
    result = {**about, "note": f"how the parts ended: {ended}"}
    for part in ("small", "times"):
        own = [{key: value for key, value in row.items() if key != "part"} for row in rows if row["part"] == part]
        if own:
            result[part] = own
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    lines.unlink()


if __name__ == "__main__":
    main()
