"""Calls of a user's own, from the command line or a file: read, checked, and given values."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import ejkernel
from ejkernel.errors import EjkernelError, InvalidInputError
from ejkernel.lab import arguments, workloads
from ejkernel.lab.extras import need
from ejkernel.lab.reference import REFERENCES
from ejkernel.lab.workloads import Workload, is_float

# Of an attention whose logits are more than these, the reference computes the last queries alone, or nothing.
MOST_LOGITS = 2**26
LAST_ROWS = 64
_NOT_HERE = {
    "fwd_params": "parameters are what is looked for",
    "bwd_params": "parameters are what is looked for",
    "axis_name": "the ring is all devices",
    "mesh": "the ring is all devices",
}
EXAMPLES = {
    "flash_attention": "query=bf16[2,8192,32,128] key=bf16[2,8192,8,128] causal=True",
    "ring_attention": "query=bf16[1,8192,32,128]",
    "blocksparse_attention": "query=bf16[1,8192,16,128] sparsity_mask=bool[128,128]",
    "page_attention": "query=bf16[8,32,128] key_cache=bf16[512,8,16,128] context_lens=i32[8] block_tables=i32[8,64]",
    "recurrent": "inputs=f32[8,512,64] weights.weight_ih=f32[512,64] weights.weight_hh=f32[512,128]",
    "mean_pooling": "inputs=f32[8,512,512] mask=bool[8,512]",
    "grouped_matmul": "a=bf16[4096,1024] b=bf16[8,1024,4096] group_sizes=i32[8]",
}


class Given(NamedTuple):
    """A call of the user's own, and the arguments of ``ejkernel`` that name it again."""

    workload: Workload
    again: str


def from_words(words: list[str]) -> tuple[list[str], list[Given]]:
    """Operations that are only named, and calls: an operation and its arguments, ``NAME=VALUE`` each.

    Example:
        >>> named, (call,) = from_words(["mean_pooling", "recurrent", "inputs=f32[2,8,4]", "weights.weight_ih=f32[32,4]",
        ...                              "weights.weight_hh=f32[32,8]"])
        >>> named, call.workload.operation, call.workload.arrays["weights"]["weight_hh"].shape
        (['mean_pooling'], 'recurrent', (32, 8))
    """
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        name, equals, _ = word.partition("=")
        if not equals:
            groups.append((workloads.known(name, layers=True), []))
        elif not groups:
            raise InvalidInputError(f"{word!r} stands before any operation; expected OP NAME=VALUE …")
        else:
            groups[-1][1].append(word)
    calls = []
    for operation, texts in groups:
        given: dict[str, Any] = {}
        for text in texts:
            name, _, value = (part.strip() for part in text.partition("="))
            if name in given:
                raise InvalidInputError(f"{operation}: {name} is given twice.")
            given[name] = value
        if given:
            workloads.known(operation)  # a layer has its own sizes
            calls.append(Given(_workload(operation, given, operation), shlex.join([operation, *texts])))
    return [operation for operation, texts in groups if not texts], calls


def from_file(path: str) -> list[Given]:
    """The calls of a YAML file (or JSON, which is YAML): a list, each with an ``operation``, its arguments, and maybe a ``name``."""
    place = Path(path).name
    calls = []
    entries = _read(path)
    if not isinstance(entries, list) or not entries:
        raise InvalidInputError(
            f"{place} holds {_words(entries)}; expected a list of calls, such as "
            '- {operation: flash_attention, query: "bf16[2,8192,32,128]", causal: true}'
        )
    for number, entry in enumerate(entries, 1):
        here = f"{place}, entry {number}"
        if not isinstance(entry, dict):
            raise InvalidInputError(f"{here} is {_words(entry)}; expected an operation and its arguments by name.")
        nameless = [name for name in entry if not isinstance(name, str)]
        if nameless:
            raise InvalidInputError(
                f"{here}: {nameless[0]!r} is no name; expected arguments by name, such as causal: true."
            )
        if "operation" not in entry:
            raise InvalidInputError(f"{here} has no operation; expected one of {', '.join(workloads.OPERATIONS)}.")
        if not isinstance(entry.get("name", ""), str):
            raise InvalidInputError(f"{here}: name is {entry['name']!r}; expected a text, such as name: a layer.")
        given = {name: value for name, value in entry.items() if name not in ("operation", "name")}
        with _placed(here):
            operation = workloads.known(entry["operation"])
        workload = _workload(operation, _flat(given), f"{here} ({operation})", entry.get("name", ""))
        calls.append(Given(workload, shlex.join(["--file", path])))
    return calls


def _read(path: str) -> Any:
    yaml = need("yaml", "a file of calls")

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            names = [self.construct_object(key, deep=True) for key in keys]
            twice = next((name for n, name in enumerate(names) if name in names[:n]), None)
            if twice is not None:
                second = [key for key, name in zip(keys, names, strict=True) if name == twice][1]
                raise yaml.constructor.ConstructorError(None, None, f"{twice} is given twice", second.start_mark)
            return super().construct_mapping(node, deep)

    try:
        with open(path, encoding="utf-8") as file:
            return yaml.load(file, Loader)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise InvalidInputError(f"--file is {os.fspath(path)!r}: it cannot be read ({why}).") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{Path(path).name}{f', line {mark.line + 1}' if mark else ''}"
        why = getattr(error, "problem", None) or str(error)
        if isinstance(error, yaml.constructor.ConstructorError):  # it is YAML, but says what calls cannot be
            raise InvalidInputError(f"{place}: {why}; expected names with texts, numbers and lists.") from error
        hint = 'Inside braces, shapes need quotes: {query: "bf16[2,8192,32,128]"}.'
        raise InvalidInputError(f"{place}: no YAML ({why}).{f' {hint}' if '[' in why else ''}") from error


def _flat(given: dict[str, Any]) -> dict[str, Any]:
    """With the parts of a mapping under names of their own, ``weights.weight_ih``."""
    flat: dict[str, Any] = {}
    for name, value in given.items():
        flat |= {f"{name}.{part}": inner for part, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _words(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


class _placed:
    """Errors of the library say where the call stands that they are about."""

    def __init__(self, place: str, operation: str = ""):
        self.place, self.operation = place, operation

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, EjkernelError):
            words = str(error).removeprefix(f"{self.operation}: ").replace("ShapeDtypeStruct ", "")
            raise type(error)(f"{self.place}: {words}") from error


def _workload(operation: str, given: Mapping[str, Any], place: str, label: str = "") -> Workload:
    """The call with values for its arrays; what nothing can run here is an error."""
    known = ejkernel.kernel_registry.operation(operation)
    parameters = inspect.signature(known.function).parameters
    abstract, options = {}, {}
    with _placed(place, operation):
        for name, said in given.items():
            argument = name.partition(".")[0]
            if argument not in parameters:
                raise InvalidInputError(f"there is no {argument!r}; expected an argument of {operation}: "
                                        f"{', '.join(n for n in parameters if n not in _NOT_HERE)}.")  # fmt: skip
            if argument in _NOT_HERE:
                raise InvalidInputError(f"{argument} cannot be given here: {_NOT_HERE[argument]}. Leave it out.")
            value = arguments.array(said, argument) if isinstance(said, str) else None
            if value is None:
                value = arguments.value(said) if isinstance(said, str) else said
                value = tuple(value) if isinstance(value, list) else value
                if argument in known.arrays and isinstance(value, tuple | str):
                    value = _listed(argument, value, floats=argument in known.gradients)
            if hasattr(value, "shape") and value.dtype.itemsize == 8 and not jax.config.jax_enable_x64:
                raise InvalidInputError(f"{name} is {value.dtype}; 64 bits need JAX_ENABLE_X64=1.")
            _put(abstract if hasattr(value, "shape") else options, name, value)
        for name, like in (("key", "query"), ("value", "key"), ("value_cache", "key_cache")):
            if name in parameters and name not in abstract and like in abstract:
                abstract[name] = abstract[like]
        missing = [n for n, p in parameters.items() if p.default is p.empty and n not in abstract | options]
        missing += ["weights"] * (operation == "recurrent" and "weights" not in abstract)
        if missing:
            raise InvalidInputError(f"{', '.join(missing)}: missing; expected a call such as: ejkernel bench {operation} "
                                    f"{EXAMPLES[operation]}")  # fmt: skip
        # What the operation takes for granted and the reference does not, such as a ring's causality, is said.
        others = {
            n: p.default for n, p in _reference(operation).items() if n in parameters and p.default is not p.empty
        }
        options = {n: known.defaults[n] for n, default in others.items() if known.defaults[n] != default} | options
        # Before any values are drawn: they follow shapes that fit together.
        decided = ejkernel.explain(operation, **abstract, **options)
        decided.require()
        arrays = _with_values(abstract)
        everything = {**known.defaults, **arrays, **options}
        # A scalar, such as a cache's scale, has no gradient here.
        every = known.differentiable({**everything, **{n: arrays.get(n) for n in known.gradients}})
        wanted = tuple(n for n in known.gradients if n in every and n in arrays and _floats(arrays[n]))
        workload = Workload(operation, label, arrays, options, wanted, 0, _last_rows(arrays), as_given=True)
        known.check_values(everything)  # traced, they would not be
    return workload if label else replace(workload, name=str(decided.call))


def _put(where: dict[str, Any], name: str, value: Any) -> None:
    argument, dot, part = name.partition(".")
    if dot:
        where.setdefault(argument, {})[part] = value
    else:
        where[argument] = value


def _listed(name: str, values: tuple | str, floats: bool) -> np.ndarray:
    """An array whose values are written out: integers of 32 bits, or floats."""
    if floats and isinstance(values, tuple) and all(map(arguments.integer, values)):
        sizes = ",".join(map(str, values))
        raise InvalidInputError(
            f"{name} is {list(values)}, all of them integers; expected a shape behind a dtype, bf16[{sizes}], or floats."
        )
    try:
        array = np.asarray(values)  # a string's kind is none of numbers
        if array.dtype.kind not in "biuf":
            raise ValueError
    except ValueError:
        raise InvalidInputError(
            f"{name} is {values!r}; expected a dtype and a shape, such as bf16[2,1024,8,64], or a list of numbers."
        ) from None
    return array.astype({"f": np.float32, "b": np.bool_}.get(array.dtype.kind, np.int32))


def _floats(tree: Any) -> bool:
    return all(map(is_float, jax.tree.leaves(tree)))


def _last_rows(arrays: Mapping[str, Any]) -> int:
    """How many of the last queries stand for all: an attention's, if nothing but the keys has their length."""
    long = "query" in arrays and "key" in arrays and _logits(arrays) > MOST_LOGITS
    return LAST_ROWS if long and set(arrays) <= {"query", "key", "value", "softmax_aux"} else 0


def _logits(arrays: Mapping[str, Any]) -> int:
    query, key = arrays["query"], arrays["key"]
    return int(np.prod(query.shape[:-1])) * key.shape[-3]


def _reference(operation: str) -> dict[str, inspect.Parameter]:
    """The parameters of an operation's reference."""
    found = dict(inspect.signature(REFERENCES[operation]).parameters)
    if "options" in found:  # passed on to attention's
        found |= inspect.signature(REFERENCES["flash_attention"]).parameters
    return found


def unchecked(workload: Workload) -> str:
    """Why the error of a call is not computed; nothing if it can be."""
    if workload.operation in workloads.LAYERS:
        return ""
    reference = set(_reference(workload.operation))
    given = {n for n, v in workload.options.items() if v is not None and v is not False} - {"platform", "backend"}
    lacks = sorted((given | set(workload.arrays)) - reference)
    if isinstance(workload.arrays.get("weights"), dict):
        lacks += sorted(set(workload.arrays["weights"]) - {"weight_ih", "weight_hh"})
    if lacks:
        return f"the reference in float64 has no {', '.join(lacks)}"
    if "key" in workload.arrays and not workload.last_rows and _logits(workload.arrays) > MOST_LOGITS:
        return "the reference in float64 would be too large"
    return ""


def _with_values(abstract: Mapping[str, Any]) -> dict[str, Any]:
    """Plausible values: normal numbers, and for what has a meaning something that the operation can be asked."""
    rng = np.random.default_rng(0)

    def one(name: str, x: Any) -> np.ndarray:
        if isinstance(x, np.ndarray):
            return x
        if is_float(x):
            scale = 0.1 if name == "weights" else 1.0
            return np.asarray(rng.standard_normal(x.shape, np.float32) * scale).astype(x.dtype)
        values = _VALUES[name](x.shape, abstract, rng) if name in _VALUES else 0
        return np.broadcast_to(np.asarray(values), x.shape).astype(x.dtype)

    return {
        name: {part: one(name, inner) for part, inner in x.items()} if isinstance(x, dict) else one(name, x)
        for name, x in abstract.items()
    }


Shape = tuple[int, ...]
Draw = Callable[[Shape, Mapping[str, Any], np.random.Generator], Any]


def _offsets(of: str) -> Draw:
    """Sequences of about one length that fill the tokens of an array."""
    return lambda shape, a, rng: np.linspace(0, a[of].shape[-3 if of in ("query", "key") else 0], *shape[:1])


def _segments(shape: Shape, a: Mapping[str, Any], rng: np.random.Generator) -> Any:
    return 1 + np.arange(shape[-1]) * 4 // shape[-1]


def _prefixes(shape: Shape, a: Mapping[str, Any], rng: np.random.Generator) -> Any:
    return np.arange(shape[-1]) < rng.integers(1, shape[-1] + 1, (*shape[:-1], 1))


def _contexts(shape: Shape, a: Mapping[str, Any], rng: np.random.Generator) -> Any:
    most = a["block_tables"].shape[1] * a["key_cache"].shape[2]
    return rng.integers(max(1, most // 2), most + 1, shape)


def _tables(shape: Shape, a: Mapping[str, Any], rng: np.random.Generator) -> Any:
    blocks, size = a["key_cache"].shape[0], int(np.prod(shape))
    return (rng.permutation(blocks)[:size] if size <= blocks else rng.integers(0, blocks, size)).reshape(shape)


def _blocks(shape: Shape, a: Mapping[str, Any], rng: np.random.Generator) -> Any:
    return (rng.random(shape) < 0.25) | np.eye(*shape[-2:], dtype=bool)


_VALUES: dict[str, Draw] = {
    "attention_mask": _prefixes,
    "block_tables": _tables,
    "context_lens": _contexts,
    "cu_seqlens": _offsets("inputs"),
    "cum_seqlens_k": _offsets("key"),
    "cum_seqlens_q": _offsets("query"),
    "dropout_seed": lambda shape, a, rng: 0,
    "group_offset": lambda shape, a, rng: 0,
    "group_sizes": lambda shape, a, rng: rng.multinomial(a["a"].shape[0], [1 / shape[0]] * shape[0]),
    "key_cache": lambda shape, a, rng: rng.integers(-127, 128, shape),
    "kv_segment_ids": _segments,
    "lengths": lambda shape, a, rng: rng.integers(1, a["inputs"].shape[1] + 1, shape),
    "mask": _prefixes,
    "q_segment_ids": _segments,
    "sparsity_mask": _blocks,
    "value_cache": lambda shape, a, rng: rng.integers(-127, 128, shape),
}
