"""Kernels that ran on a GPU, counted by category, from what torch's and JAX's profilers write."""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import jax

from ejkernel.errors import InvalidInputError
from ejkernel.lab.arguments import counted
from ejkernel.lab.extras import need

__all__ = ["count_cuda_kernels", "default_schedule"]


def default_schedule(step: int) -> Any:
    """What torch's profiler does in a step: `torch.profiler.schedule(wait=1, warmup=3, active=6)`.

    Pass it as it is: `torch.profiler.profile(schedule=default_schedule)`. Torch is loaded when it is first called.

    Example:
        >>> [default_schedule(step).name for step in (0, 1, 4, 9)]  # doctest: +SKIP
        ['NONE', 'WARMUP', 'RECORD', 'RECORD_AND_SAVE']
    """
    return _schedule()(step)


@functools.cache
def _schedule() -> Callable[[int], Any]:
    return need("torch.profiler", "default_schedule").schedule(wait=1, warmup=3, active=6)


# The first rule that fits a kernel's own name decides, then the first that fits the name with its template arguments:
# an ATen kernel is named after its shape and takes its arithmetic as an argument (an elementwise kernel of a copying
# functor is elementwise), cutlass and cuBLAS tell what they are in the arguments only. Within a name the order counts:
#   - Inductor's prefix says more than the list of fused operations behind it (poi is a pointwise kernel), unless there
#     is a softmax among them;
#   - fused attention is built from gemms and a softmax and is none of them;
#   - a normalisation or a softmax that is fused with elementwise operations is what the kernel is for;
#   - an operation's plain name is the weakest sign: a reduction or a gather that also adds is not elementwise.
# Convolutions are gemms; whatever only moves data (copies, sets, concatenations, transposes) is memory; reductions,
# sorts, gathers, scans and collectives are others.
_NOT_ELEMENTWISE = r"(reduce(?!_precision)|sort|scatter|gather|scan|cumsum|arg_?(max|min))"
_RULES = tuple(
    (category, re.compile(pattern, re.IGNORECASE))
    for category, pattern in (
        ("memory", r"^\[?(CUDA )?(Unified Memory )?mem(cpy|set)"),
        ("softmax", r"^triton_(poi|per|red)_\w*soft_?max"),
        ("elementwise", r"^triton_poi_"),
        ("other", r"flash|fmha|sdpa|attention|attn|\bmha_"),
        ("gemm", r"^triton_tem_\w*(mm|conv)|^triton_(mm|bmm)"),
        ("softmax", r"soft_?max"),
        # Inductor lists the operations of an RMS norm.
        ("layernorm", r"(layer|rms)_?norm|GammaBeta|RowwiseMoments|\bln_(fwd|bwd)|^triton_(per|red)_\w*mean_\w*rsqrt"),
        ("layernorm", r"cuComputeGradInput|ComputeInternalGradients"),
        ("gemm", r"gemm|gemv|nvjet|xmma|matmul|split_?k(?![ve])|cublas|cutlass\w*_tensorop|wmma_tensorop"),
        ("gemm", r"scudnn|cudnn[\w:]*conv(?!ert)|implicit_conv|fprop|dgrad|wgrad|winograd"),
        ("gemm", r"^(?!triton_).*(conv\dd|convol)"),  # Inductor lists a convolution when it fuses what comes after
        # XLA names a fusion after its emitter and its last operations, or with less of that.
        ("gemm", r"^(\w+_)?dot_fusion[._\d]*$"),
        ("other", rf"^((loop|input|wrapped)_(\w*_)?|(?=\w+_fusion[._\d]*$)(\w+_)?){_NOT_ELEMENTWISE}"),
        (
            "memory",
            r"^((loop|input|wrapped)_|(?=\w+_fusion))(copy|concatenate|transpose|slice|dynamic_\w*slice|pad)"
            r"(_fusion)?[._\d]*$",
        ),
        ("elementwise", r"elementwise|pointwise|multi_tensor_apply|^(loop|wrapped)_|^(\w+_)?fusion[._\d]*$"),
        ("memory", r"CatArrayBatchedCopy|copy_kernel|copy_device_to_device|transpose|nchwToNhwc|nhwcToNchw"),
        ("other", rf"{_NOT_ELEMENTWISE}|index|embedding|nccl"),
        (
            "elementwise",
            r"(?<![a-z])(add|sub|mul|div|neg|abs|exp|log|pow|sqrt|rsqrt|tanh|sigmoid|relu|gelu|silu|elu|swish|mish|"
            r"swiglu|geglu|dropout|clamp|fill|cast)(?![a-z])",
        ),
    )
)
# What a profiler puts on a device's time line beside kernels.
_NOT_KERNELS = re.compile(r"^(ProfilerStep|Optimizer\.|(Context|Stream|Event) Sync|Stream Wait|\[memory\]|nccl:)")
# What runs on the host: torch's operations, nodes of its graph and regions, the calls of CUDA and HIP, and what they
# wait for.
_ON_HOST = re.compile(
    r"^(aten|prims?|c10d|autograd|torch::(autograd|jit)|profiler|inductor)::|^\w+Backward\d+$|^record_param_comms$|"
    r"^(nn\.Module: |## |Torch-Compiled|TorchDynamo|enumerate\(DataLoader)|^(cuda|hip)[A-Z]\w*$|"
    r"^cu(Launch|Mem|Stream|Event|Ctx|Device|Graph|Module|Func|Init|Kernel|Library|Get|Occupancy|Pointer|Tensor)\w*$|"
    r"^(Lazy Function Loading|Runtime Triggered Module Loading|Activity Buffer Request|Buffer Flush|"
    r"Command Buffer Full|Instrumentation|Resource)$"
)


def count_cuda_kernels(prof: Any) -> dict[str, int]:
    """Count what ran on the GPU by category: every kernel, copy and set.

    Fused attention, reductions, sorts, gathers and collectives are `other`; convolutions are `gemm`; kernels that only
    move data (concatenations, transposes) are `memory`, though ATen's elementwise kernels are `elementwise` whatever
    they do.

    Args:
        prof: a result of `torch.profiler.profile`, or the file that its `export_chrome_trace` wrote (`.json`,
            `.json.gz`); the folder that `jax.profiler.trace` wrote (its latest run), one of its files (`.xplane.pb`,
            `.trace.json.gz`, `.trace.json`) or a loaded `jax.profiler.ProfileData`; the loaded JSON of either; or
            kernels: names, a mapping of names to counts, or objects with a `name` or `key`, and where they stand for
            several a `count`. Of those, what is known to have run elsewhere by its `device_type`, or without one by its
            name (`aten::mm`, `cudaLaunchKernel`), is left out.

    Returns:
        A dict with the keys gemm, elementwise, softmax, layernorm, memory, other and total.

    Raises:
        InvalidInputError: if it is none of those, or a profiler that has not run or not stopped.

    Example:
        >>> count_cuda_kernels(["ampere_sgemm_128x64_tn", "Memset (Device)", "ProfilerStep#3"])
        {'gemm': 1, 'elementwise': 0, 'softmax': 0, 'layernorm': 0, 'memory': 1, 'other': 0, 'total': 2}
    """
    counts = dict.fromkeys(("gemm", "elementwise", "softmax", "layernorm", "memory", "other", "total"), 0)
    for name, count in _kernels(prof):
        if not _NOT_KERNELS.match(name):
            counts[_category(name)] += count
            counts["total"] += count
    return counts


@functools.lru_cache(maxsize=4096)
def _category(name: str) -> str:
    name = name.replace("(anonymous namespace)", "anonymous").removeprefix("void ").strip()
    own = re.split(r"[<(]", name, maxsplit=1)[0]
    return next((category for text in (own, name) for category, rule in _RULES if rule.search(text)), "other")


def _kernels(prof: Any) -> Iterator[tuple[str, int]]:
    if isinstance(prof, Mapping):
        return _kernels_of_mapping(prof)
    if not isinstance(prof, list) and (hasattr(prof, "events") or hasattr(prof, "key_averages")):
        return _kernels_of_events(_profiler_events(prof))
    if isinstance(prof, str | os.PathLike):
        return _kernels_of_trace(Path(prof))
    if hasattr(prof, "planes"):
        return _kernels_of_planes(prof)
    if isinstance(prof, Iterable):
        return _kernels_of_events(prof)
    raise _no_profile(prof)


def _no_profile(prof: Any) -> InvalidInputError:
    return InvalidInputError(
        f"prof is {prof!r} ({type(prof).__name__}); expected a torch profiler's result or its exported trace, a JAX "
        "trace's folder or file, a jax.profiler.ProfileData, or names of kernels."
    )


def _kernels_of_mapping(prof: Mapping[Any, Any]) -> Iterator[tuple[str, int]]:
    if "traceEvents" in prof:
        yield from _kernels_of_json(prof, "prof")
        return
    for name, count in prof.items():
        if not isinstance(name, str):
            raise InvalidInputError(
                f"prof has the key {name!r} ({type(name).__name__}); expected names of kernels and how often each ran, "
                "or a loaded trace with its traceEvents."
            )
        count = counted(f"prof[{name!r}]", count, least=0)
        if not _ON_HOST.match(name):
            yield name, count


def _profiler_events(prof: Any) -> list[Any]:
    # Torch sets it when a profiler stops, and gives no events, without a word, before.
    if getattr(getattr(prof, "profiler", prof), "kineto_results", prof) is None:
        raise InvalidInputError("prof has not run, or is still running: count after its with block.")
    events = None
    try:
        for source in ("events", "key_averages"):
            found = getattr(prof, source, None)
            found = found() if callable(found) else found
            if isinstance(found, Iterable) and (events := list(found)):
                break
    except AssertionError as error:
        raise InvalidInputError(f"prof has not run: {error}; count after its with block.") from error
    if events is None:
        raise _no_profile(prof)
    return events


def _kernels_of_events(events: Iterable[Any]) -> Iterator[tuple[str, int]]:
    for event in events:
        named = (event, getattr(event, "name", None), getattr(event, "key", None))
        name = next((name for name in named if isinstance(name, str)), None)
        if name is None:
            raise InvalidInputError(
                f"prof holds {event!r} ({type(event).__name__}); expected names of kernels, or objects with a name or a "
                "key."
            )
        device = _device(getattr(event, "device_type", None))
        on_gpu = not _ON_HOST.match(name) if device is None else device == "cuda"
        if on_gpu and getattr(event, "is_user_annotation", False) is not True:
            count = 1 if name is event else getattr(event, "count", 1)
            yield name, int(count) if isinstance(count, Integral) else 1


def _device(device: Any) -> str | None:
    """The kind of a device by torch's names, from any of the forms in which it is given; None if it is none of them."""
    for text in (device, getattr(device, "name", None), getattr(device, "type", None)):
        if isinstance(text, str):
            return text.lower().rpartition(".")[2].partition(":")[0]
    if isinstance(device, int):
        return {0: "cpu", 1: "cuda"}.get(device, "another")
    return None


# --- traces, of JAX and those that torch exports --------------------------------------------------------------------

_DERIVED_LINES = {
    *(
        "Steps",
        "XLA Modules",
        "XLA Ops",
        "Async XLA Ops",
        "XLA TraceMe",
        "Source code",
        "Launch Stats",
        "CUPTI overhead",
    ),
    *("Framework Ops", "Framework Name Scope", "TensorFlow Ops", "TensorFlow Name Scope"),
}
# Torch's categories of events, in its first versions with the other names.
_TORCH_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")


def _kernels_of_trace(path: Path) -> Iterator[tuple[str, int]]:
    for file in _trace_files(path):
        if file.name.endswith(".pb"):
            yield from _kernels_of_planes(_load(file, jax.profiler.ProfileData.from_file))
        else:
            yield from _kernels_of_json(_load(file, _read_json), f"prof is {str(file)!r}, which")


def _trace_files(path: Path) -> list[Path]:
    """A trace's files: one of each host, from the latest run."""
    if path.is_file() and path.name.endswith((".xplane.pb", ".json", ".json.gz")):
        return [path]
    # The binary comes first: the JSON is cut after a million events.
    for pattern in ("*.xplane.pb", "*.trace.json.gz", "*.trace.json"):
        files = [file for file in path.rglob(pattern) if not file.name.startswith("perfetto")]
        if files:
            latest = max(files, key=lambda file: (file.stat().st_mtime, file)).parent
            return sorted(file for file in files if file.parent == latest)
    raise InvalidInputError(
        f"prof is {str(path)!r}, which is no trace; expected the folder given to jax.profiler.trace, a .xplane.pb, "
        ".trace.json.gz or .trace.json file in it, or a .json or .json.gz file that torch's export_chrome_trace wrote."
    )


def _load(file: Path, read: Callable[[str], Any]) -> Any:
    try:
        return read(str(file))
    except (OSError, EOFError, ValueError, RuntimeError) as error:
        raise InvalidInputError(f"prof is {str(file)!r}, which cannot be read: {error}.") from error


def _kernels_of_planes(profile: Any) -> Iterator[tuple[str, int]]:
    for plane in profile.planes:
        if _is_gpu(plane.name):
            lines = list(plane.lines)
            kept = _kernel_lines([line.name for line in lines])
            yield from ((event.name, 1) for line in lines if line.name in kept for event in line.events)


def _read_json(name: str) -> Any:
    with gzip.open(name, "rt", encoding="utf-8") if name.endswith(".gz") else open(name, encoding="utf-8") as text:
        return json.load(text)


def _kernels_of_json(trace: Any, what: str) -> Iterator[tuple[str, int]]:
    events = trace.get("traceEvents") if isinstance(trace, Mapping) else trace
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise InvalidInputError(f"{what} holds no list of trace events.")
    planes, lines, found = {}, {}, {}
    for event in events:
        name = str((event.get("args") or {}).get("name", "")) if event.get("ph") == "M" else ""
        if event.get("name") == "process_name" and name:
            planes[event.get("pid")] = name
        elif event.get("name") == "thread_name" and name:
            lines[event.get("pid"), event.get("tid")] = name
    for event in events:
        pid, tid, name = event.get("pid"), event.get("tid"), str(event.get("name", ""))
        if event.get("ph") != "X":
            continue
        if event.get("cat") in _TORCH_KERNELS:
            yield name, 1
        elif _is_gpu(planes.get(pid, "")):
            found.setdefault(pid, []).append((lines.get((pid, tid), ""), name))
    for plane in found.values():
        kept = _kernel_lines([line for line, _ in plane])
        yield from ((name, 1) for line, name in plane if line in kept)


def _is_gpu(plane: str) -> bool:
    return plane.startswith("/device:GPU")


def _kernel_lines(names: Iterable[str]) -> set[str]:
    """A GPU's streams, or where they have no names every line but those that XLA derives from them."""
    lines = set(names)
    return {line for line in lines if line.startswith("Stream")} or lines - _DERIVED_LINES
