"""One process of benchmarks/attention_gpu.py: it reads jobs from standard input and answers each with a line of JSON.

Nothing of ejkernel is imported before a job asks for it, for an older release may stand in its place on the path.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
from attention_float64 import reference, relative_errors

BURSTS = Path(__file__).parents[1] / "ejkernel" / "utils" / "bursts.py"
GIVE_UP_AFTER = 3
LOST = 3
PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "torch", "tokamax", "ejkernel", "flash-attn-4")
# After one of these the device answers nothing any more: a new process is needed.
FATAL = ("CUDA_ERROR", "illegal memory access", "unspecified launch failure", "misaligned address")


# What is asked


def floats_of(case):
    """Names and shapes of the arrays that have gradients."""
    batch, length, heads, dim = (case[name] for name in ("batch", "length", "heads", "head_dim"))
    kv_length = case.get("kv_length", length)
    keys = (batch, kv_length, case.get("kv_heads", heads))
    shapes = {"query": (batch, length, heads, dim), "key": (*keys, dim), "value": (*keys, case.get("value_dim", dim))}
    if case.get("bias"):
        shapes["bias"] = (1, heads, case.get("bias_rows", length), kv_length)
    if case.get("sinks"):
        shapes["softmax_aux"] = (heads, 1)
    return shapes


def integers_of(case):
    """Segment ids, offsets and padding masks, as numpy arrays."""
    batch, length = case["batch"], case["length"]
    made = {}
    if count := case.get("segments"):
        ids = 1 + np.arange(length, dtype=np.int32) * count // length
        made["q_segment_ids"] = made["kv_segment_ids"] = np.broadcast_to(ids, (batch, length)).copy()
    if count := case.get("varlen"):
        made["cum_seqlens_q"] = made["cum_seqlens_k"] = np.arange(count + 1, dtype=np.int32) * (length // count)
    if lengths := case.get("documents"):
        made["cum_seqlens_q"] = made["cum_seqlens_k"] = np.cumsum([0, *lengths], dtype=np.int32)
    if lengths := case.get("padded"):
        seen = np.arange(case.get("kv_length", length)) < np.asarray(lengths)[:, None]
        made["attention_mask"] = seen[:, None, None]
    return made


def flops(case):
    whole = 4 * case["batch"] * case["heads"] * case["head_dim"] * case["length"] ** 2
    return whole / 2 if case["options"].get("causal") else whole


def add_peers(peers, fa4):
    """Make folders with tokamax and FlashAttention-4 importable beside this package; each may be None."""
    sys.path.insert(1, str(Path(__file__).parents[1]))
    if peers:
        sys.path.append(str(peers))  # last: it may have upstream's ejkernel
    if fa4:
        sys.path[2:2] = [str(fa4), str(fa4 / "nvidia_cutlass_dsl" / "dsl_packages")]


# JAX


def attention_of(implementation):
    """``f(query, key, value, **options)`` with the names that flash_attention has for options."""
    library, _, which = implementation.partition(" ")
    if library == "ejkernel":
        from ejkernel import flash_attention

        return functools.partial(flash_attention, platform=None if which in ("", "nondeterministic") else which)
    if library == "upstream":
        from ejkernel.kernels._triton.flash_attention import flash_attention

        return flash_attention
    if library == "tokamax":
        from tokamax import dot_product_attention
    else:
        from jax.nn import dot_product_attention

    def attend(query, key, value, causal=False, sliding_window=None, attention_mask=None, **more):
        if sliding_window:
            more["local_window_size"] = tuple(sliding_window)
        return dot_product_attention(
            query, key, value, mask=attention_mask, is_causal=causal, implementation=which, **more
        )

    return attend


class JaxJob:
    """Programs of one job: built (on any thread), then run."""

    def __init__(self, job):
        import jax
        import jax.numpy as jnp

        self.job, self.case = job, job["case"]
        attention = attention_of(job["implementation"])
        options = {n: tuple(x) if isinstance(x, list) else x for n, x in self.case["options"].items()}
        self.options = options
        given = {
            name: jax.ShapeDtypeStruct(s, jnp.float32 if name == "softmax_aux" else jnp.bfloat16)
            for name, s in floats_of(self.case).items()
        }
        query, value = given["query"], given["value"]
        self.dout = jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), query.dtype)
        fixed = ("bias",) if self.case.get("bias") == "fixed" else ()
        self.floats = {name: x for name, x in given.items() if name not in fixed}
        self.rest = {name: x for name, x in given.items() if name in fixed}
        self.integers = integers_of(self.case)

        def forward(floats, rest):
            given = {**floats, **rest, **options}
            return attention(given.pop("query"), given.pop("key"), given.pop("value"), **given)

        def both(floats, rest, dout):
            return jax.vjp(lambda floats: forward(floats, rest), floats)[1](dout)[0]

        self.programs = {"forward": jax.jit(forward), "both": jax.jit(both)}
        if job.get("forward_only"):
            del self.programs["both"]
        self.compiled, self.failures, self.seconds = {}, {}, {}

    def abstract(self, name):
        import jax

        rest = self.rest | {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in self.integers.items()}
        return (self.floats, rest) if name == "forward" else (self.floats, rest, self.dout)

    def build(self):
        for name, program in self.programs.items():
            start = time.perf_counter()
            try:
                self.compiled[name] = program.lower(*self.abstract(name)).compile()
            except Exception as error:
                self.failures[name] = error
            self.seconds[name] = time.perf_counter() - start
        return self

    def arrays(self):
        """Random values for what is abstract."""
        import jax

        names = [*self.floats, *self.rest]
        keys = dict(zip((*names, "dout"), jax.random.split(jax.random.key(0), len(names) + 1), strict=True))
        make = jax.jit(jax.random.normal, static_argnums=(1, 2))
        floats = {n: make(keys[n], x.shape, x.dtype) for n, x in self.floats.items()}
        rest = {n: make(keys[n], x.shape, x.dtype) for n, x in self.rest.items()}
        rest |= {name: jax.device_put(x) for name, x in self.integers.items()}
        return floats, rest, make(keys["dout"], self.dout.shape, self.dout.dtype)

    def answer(self):
        if "forward" in self.failures:
            raise self.failures["forward"]
        row = measure_jax_errors(self) if self.job["part"] == "errors" else measure_jax(self)
        if self.job["implementation"] == "ejkernel":
            row["ran"] = chosen_platform(self)
        return row


def chosen_platform(work):
    from ejkernel import explain

    floats, rest = work.abstract("forward")
    return explain("flash_attention", **floats, **rest, **work.options).chosen.platform.value


@functools.cache
def timing():
    """The package's own way to time, by its file: the ``ejkernel`` of this process may be another release."""
    spec = importlib.util.spec_from_file_location("bursts", BURSTS)
    module = sys.modules["bursts"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure_jax(work):
    if work.job["part"] == "compile":
        return {"compile_s": work.seconds}
    floats, rest, dout = work.arrays()
    calls = {"forward": functools.partial(work.compiled["forward"], floats, rest)}
    if "both" in work.compiled:
        calls["both"] = functools.partial(work.compiled["both"], floats, rest, dout)
    times = timing().time_bursts(calls)
    forward = times["forward"].best
    row = {"forward_ms": forward * 1e3, "forward_tflops": flops(work.case) / forward / 1e12}
    if "both" in work.failures:
        row["backward_failed"] = words_of(work.failures["both"])
    if "both" in times:
        both = times["both"].best
        backward = max(both - forward, 1e-9)
        row |= {"both_ms": both * 1e3, "backward_ms": backward * 1e3}
        row["backward_tflops"] = 2.5 * flops(work.case) / backward / 1e12
        row["repeats"] = bool(_same_bits(calls["both"](), calls["both"]()))
        with contextlib.suppress(Exception):
            row["temporary_mib"] = round(work.compiled["both"].memory_analysis().temp_size_in_bytes / 2**20, 1)
    return row


def _same_bits(a, b):
    import jax
    import jax.numpy as jnp

    @jax.jit
    def same(a, b):
        def bits(x):
            return jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)

        equal = jax.tree.map(lambda x, y: (bits(x) == bits(y)).all(), a, b)
        return jnp.stack(jax.tree.leaves(equal)).all()

    return same(a, b)


_references = {}


def reference_for(case, floats, integers, dout):
    """Computed once a case: every implementation gets the same numbers."""
    key = json.dumps(case, sort_keys=True)
    if key not in _references:
        _references[key] = reference(case, floats, integers, dout)
    return _references[key]


def measure_jax_errors(work):
    floats, rest, dout = work.arrays()
    biased = {name: rest[name] for name in work.rest}
    expected = reference_for(work.case, {**floats, **biased}, work.integers, dout)
    out = work.compiled["forward"](floats, rest)
    if "both" in work.failures:
        raise work.failures["both"]
    grads, again = (work.compiled["both"](floats, rest, dout) for _ in range(2))
    return {"errors": relative_errors(expected, (out, grads)), "repeats": bool(_same_bits(grads, again))}


# torch


class TorchJob:
    """The same for torch, whose kernels compile when they are first called."""

    def __init__(self, job):
        self.job, self.case = job, job["case"]

    def build(self):
        return self

    def arrays(self):
        """Query, key, value and the output's cotangent, ``[B, S, H, D]``, the same at every call."""
        import torch

        torch.manual_seed(0)
        shape = floats_of(self.case)["query"]
        made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        return [x.requires_grad_() for x in made[:3]], made[3]

    def answer(self):
        import torch

        inputs, dout = self.arrays()
        swap = not self.job["implementation"].startswith("FlashAttention-4")
        if swap:
            inputs = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs]
            dout = dout.transpose(1, 2).contiguous()
        attend = torch_attention(self.job["implementation"], self.case)
        if self.job["part"] == "errors":
            return torch_errors(self.case, attend, inputs, dout, swap)

        def forward():
            with torch.no_grad():
                return attend(*inputs)

        calls, row = {"forward": forward}, {}
        if not self.job.get("forward_only"):
            try:
                out = attend(*inputs)
                calls["backward"] = lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
            except Exception as error:
                row["backward_failed"] = words_of(error)
        times = timing().time_bursts(calls)
        for name, work in (("forward", 1), ("backward", 2.5)):
            if name == "backward" and name in times and times[name].error is not None:
                row["backward_failed"] = words_of(times[name].error)
            elif name in times:
                seconds = times[name].best
                row |= {f"{name}_ms": seconds * 1e3, f"{name}_tflops": work * flops(self.case) / seconds / 1e12}
        if "backward_ms" in row:
            row["repeats"] = all(
                torch.equal(a, b) for a, b in zip(calls["backward"](), calls["backward"](), strict=True)
            )
        return row


@functools.cache
def _flex():
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flash_attention_4(case):
    """Its function of query, key, value and sinks ``[H]``, where the case has them; packed ones are ``[T, H, D]``."""
    import torch
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    options, integers = case["options"], integers_of(case)
    given = {"causal": options.get("causal", False)}
    if window := options.get("sliding_window"):
        given["window_size"] = tuple(window)
    if cap := options.get("logits_soft_cap"):
        given["softcap"] = cap
    attend = flash_attn_func
    if "cum_seqlens_q" in integers:
        offsets, longest = integers["cum_seqlens_q"], int(np.diff(integers["cum_seqlens_q"]).max())
        given["cu_seqlens_q"] = given["cu_seqlens_k"] = torch.tensor(offsets, device="cuda")
        given["max_seqlen_q"] = given["max_seqlen_k"] = longest
        attend = flash_attn_varlen_func
    if lengths := case.get("padded"):  # it takes no mask
        given["seqused_k"] = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        attend = flash_attn_varlen_func

    def run(q, k, v, sinks=None):
        out = attend(q, k, v, learnable_sink=sinks, **given)
        return out[0] if isinstance(out, tuple) else out

    return run


def torch_attention(implementation, case):
    causal, window = case["options"].get("causal", False), case["options"].get("sliding_window")
    if implementation.startswith("FlashAttention-4"):
        return flash_attention_4(case)
    if implementation == "torch flex":
        from torch.nn.attention.flex_attention import create_block_mask

        reach = window[0] if window else case["length"]

        def seen(batch, head, i, j):
            return (i >= j) & (i - j <= reach)

        def before(batch, head, i, j):
            return i >= j

        seen = seen if window else before

        mask = create_block_mask(seen, None, None, case["length"], case["length"], device="cuda") if causal else None
        return lambda q, k, v: _flex()(q, k, v, block_mask=mask)
    import torch.nn.functional as functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def flash_attention_2(q, k, v):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return flash_attention_2


def torch_errors(case, attend, inputs, dout, swap):
    import torch

    def plain(x):
        x = x.detach().transpose(1, 2) if swap else x.detach()
        return x.float().cpu().numpy()

    names = ("query", "key", "value")
    expected = reference_for(case, dict(zip(names, map(plain, inputs), strict=True)), {}, plain(dout))
    out = attend(*inputs)
    first, again = (torch.autograd.grad(out, inputs, dout, retain_graph=True) for _ in range(2))
    grads = dict(zip(names, map(plain, first), strict=True))
    same = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return {"errors": relative_errors(expected, (plain(out), grads)), "repeats": same}


# The process


def words_of(error):
    text = str(error).strip()
    line = next((line for line in text.splitlines() if line.strip()), "")
    if line.endswith("cannot run this call."):  # the table below says why
        rows = [row.partition("refused")[2].strip() for row in text.splitlines()[2:] if "asked for" not in row]
        return f"refused: {'; '.join(rows)}"[:240]
    return f"{type(error).__name__}: {line}"[:240]


def say(**line):
    print(json.dumps(line), flush=True)


def versions():
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def hello(kind):
    if kind == "torch":
        import torch

        say(hello=versions(), device=torch.cuda.get_device_name())
    else:
        import jax

        jax.block_until_ready(jax.numpy.ones(8) + 1)
        say(hello=versions(), device=jax.devices()[0].device_kind, runtime=jax.devices()[0].client.platform_version)


def build(work_class, job):
    """A job ready to run, or the error that it made."""
    try:
        work = work_class(job).build()
    except Exception as error:
        work = error
    say(built=job["number"])
    return work


def run(work, job):
    """Say a job's answer; whether it failed."""
    try:
        if isinstance(work, Exception):
            raise work
        row = work.answer()
    except Exception as error:
        row = {"failed": words_of(error)}
        if any(word in str(error) for word in FATAL):
            say(number=job["number"], row=row)
            sys.exit(LOST)
    say(number=job["number"], row=row)
    return "failed" in row


def end_with(parent):
    """End with the process that reads the answers, so that nothing keeps the device busy."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main():
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    asked = json.load(sys.stdin)
    work_class = TorchJob if asked["kind"] == "torch" else JaxJob
    hello(asked["kind"])
    for _, jobs in itertools.groupby(asked["jobs"], key=lambda job: (job["implementation"], job["part"])):
        answer_all(list(jobs), work_class, asked["threads"], asked["patient"])


def answer_all(jobs, work_class, threads, patient):
    """Jobs of one implementation: built side by side if there are threads, then run one after another."""
    works = dict.fromkeys(range(len(jobs)))
    if threads > 1:
        with contextlib.suppress(Exception):
            attention_of(jobs[0]["implementation"])  # modules are imported by one thread
        with ThreadPoolExecutor(threads) as pool:
            works = dict(enumerate(pool.map(functools.partial(build, work_class), jobs)))
    failures = 0
    for number, job in enumerate(jobs):
        if failures >= GIVE_UP_AFTER and not patient:
            say(number=job["number"], row={"failed": f"left after {GIVE_UP_AFTER} failures"})
            continue
        work = works.pop(number)
        failures += run(work or build(work_class, job), job)


if __name__ == "__main__":
    main()
