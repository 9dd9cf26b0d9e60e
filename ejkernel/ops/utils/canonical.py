"""One text for one value: the canonical JSON behind the keys of the tuning store.

Strings, numbers, None, lists and dicts with plain keys are themselves in JSON. Everything else is an object
with a single key that starts with `$`; a dict that has such a key is itself written as pairs, so no two kinds
of value can meet.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

__all__ = ["short_hash", "stable_json"]


def short_hash(obj: Any) -> str:
    """Sixteen hexadecimal digits for a value: the head of the SHA-256 of its `stable_json`.

    Example:
        >>> short_hash({"block_size": 128, "num_warps": 4})
        '0eab141667be0060'
    """
    return hashlib.sha256(stable_json(obj).encode("ascii")).hexdigest()[:16]


def stable_json(obj: Any) -> str:
    """The value as JSON text that is the same in every process, and distinct for distinct values.

    It takes None, bools, ints, floats, complex numbers, strings, bytes, lists, tuples, named tuples, dicts
    with any keys, sets, ranges, slices, enums, dataclasses (the fields that take part in comparison),
    pydantic models, functions (with their code, defaults and closures), methods, builtins, jitted functions,
    partials, classes, modules, dtypes and numpy scalars. Arrays and `jax.ShapeDtypeStruct`s count by shape
    and dtype only. A function's text holds its bytecode, which is that of one Python version; the options of
    `jax.jit` do not count.

    Raises:
        TypeError: for any other type, instances with `__call__` included, and names it.

    Example:
        >>> stable_json({"b": (1, 2), "a": [1, "1", True]})
        '{"a":[1,"1",true],"b":{"$tuple":[1,2]}}'
        >>> stable_json(np.zeros((2, 3), np.float32))
        '{"$array":[[2,3],"float32"]}'
    """
    return _dump(_encode(obj, ()))


def _dump(encoded: Any) -> str:
    return json.dumps(encoded, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _encode(value: Any, above: tuple[int, ...]) -> Any:
    """The JSON value of `value`, which lies inside the objects whose ids are `above`."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    # A value inside itself (a recursive closure, a list that holds itself) is told by how far up it lies.
    if id(value) in above:
        return {"$inside": len(above) - above.index(id(value))}
    above = (*above, id(value))
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](value, above)
    for applies, encode in _FAMILIES:
        if applies(value):
            return encode(value, above)
    raise _unknown(value)


def _unknown(value: Any) -> TypeError:
    name = _class_name(type(value))
    if callable(value):
        return TypeError(
            f"stable_json cannot tell two instances of the callable {name} apart. "
            "Pass a function, a functools.partial, or make the class a dataclass."
        )
    return TypeError(
        f"stable_json does not know the type {name}. Pass what identifies the value instead: numbers, "
        "strings, containers, enums, dataclasses, pydantic models, functions, dtypes or arrays."
    )


def _class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


# --- values without parts -----------------------------------------------------------------------------------


def _encode_int(value: int) -> Any:
    # Python refuses to print very long integers in decimal, but never in hexadecimal.
    return value if value.bit_length() <= 64 else {"$int": hex(value)}


def _encode_float(value: float) -> Any:
    return value if abs(value) < float("inf") else {"$float": repr(value)}


def _encode_str(value: str) -> Any:
    return value if _is_plain_text(value) else {"$str": [ord(character) for character in value]}


def _is_plain_text(text: str) -> bool:
    # JSON escapes an astral character as two surrogates: a string of lone ones would read the same.
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


_SCALARS: dict[type, Callable[[Any], Any]] = {
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    complex: lambda value: {"$complex": [_encode_float(value.real), _encode_float(value.imag)]},
    bytes: lambda value: {"$bytes": value.hex()},
    bytearray: lambda value: {"$bytearray": value.hex()},
    type(...): lambda value: {"$ellipsis": []},
}


# --- containers, by exact type: a subclass may hold more than its items -------------------------------------


def _encode_items(values: Any, above: tuple[int, ...]) -> list:
    return [_encode(value, above) for value in values]


def _encode_dict(value: dict, above: tuple[int, ...]) -> dict:
    if all(type(key) is str and not key.startswith("$") and _is_plain_text(key) for key in value):
        return {key: _encode(item, above) for key, item in value.items()}
    pairs = [[_encode(key, above), _encode(item, above)] for key, item in value.items()]
    return {"$dict": sorted(pairs, key=_dump)}


def _encode_set(value: set | frozenset, above: tuple[int, ...]) -> dict:
    return {f"${type(value).__name__}": sorted(_encode_items(value, above), key=_dump)}


def _encode_code(code: types.CodeType, above: tuple[int, ...]) -> dict:
    # Neither file nor line: they move without the function changing, and paths differ between machines.
    body = [
        code.co_code.hex(),
        code.co_exceptiontable.hex(),
        _encode_items(code.co_consts, above),
        [list(names) for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)],
        [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags],
    ]
    return {"$code": hashlib.sha256(_dump(body).encode("ascii")).hexdigest()}


def _encode_cell(cell: types.CellType, above: tuple[int, ...]) -> dict:
    try:
        content = cell.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return {"$cell": []}
    return {"$cell": [_encode(content, above)]}


def _encode_function(function: types.FunctionType, above: tuple[int, ...]) -> dict:
    return {
        "$function": [
            f"{function.__module__}:{function.__qualname__}",
            _encode(function.__code__, above),
            _encode(function.__defaults__, above),
            _encode(function.__kwdefaults__, above),
            _encode_items(function.__closure__ or (), above),
        ]
    }


def _encode_builtin(function: types.BuiltinFunctionType, above: tuple[int, ...]) -> dict:
    owner = function.__self__
    if owner is None or isinstance(owner, types.ModuleType):
        return {"$builtin": f"{function.__module__}:{function.__qualname__}"}
    return {"$method": [_encode(owner, above), function.__name__]}


def _encode_descriptor(descriptor: Any, above: tuple[int, ...]) -> dict:
    return {"$builtin": f"{_class_name(descriptor.__objclass__)}.{descriptor.__name__}"}


_CONTAINERS: dict[type, Callable[[Any, tuple[int, ...]], Any]] = {
    list: _encode_items,
    tuple: lambda value, above: {"$tuple": _encode_items(value, above)},
    dict: _encode_dict,
    OrderedDict: lambda value, above: {"$ordered": _encode_items(value.items(), above)},
    types.MappingProxyType: lambda value, above: {"$mappingproxy": _encode(dict(value), above)},
    set: _encode_set,
    frozenset: _encode_set,
    range: lambda value, above: {"$range": [_encode_int(part) for part in (value.start, value.stop, value.step)]},
    slice: lambda value, above: {"$slice": _encode_items((value.start, value.stop, value.step), above)},
    types.CodeType: _encode_code,
    types.CellType: _encode_cell,
    types.FunctionType: _encode_function,
    types.MethodType: lambda value, above: {"$method": _encode_items((value.__self__, value.__func__), above)},
    types.BuiltinFunctionType: _encode_builtin,
    types.MethodDescriptorType: _encode_descriptor,
    types.WrapperDescriptorType: _encode_descriptor,
    types.MethodWrapperType: lambda value, above: {"$method": [_encode(value.__self__, above), value.__name__]},
    types.ModuleType: lambda value, above: {"$module": value.__name__},
}


# --- families of types --------------------------------------------------------------------------------------


def _encode_enum(value: enum.Enum, above: tuple[int, ...]) -> dict:
    # The value too, where it can be told: an empty flag has no name, and a functional enum's class is only a name.
    try:
        content = [_encode(value.value, above)]
    except TypeError:
        content = []
    return {"$enum": [_class_name(type(value)), value.name, *content]}


def _encode_attributes(value: Any, names: Any, above: tuple[int, ...]) -> dict:
    return _encode_dict({name: getattr(value, name) for name in names if hasattr(value, name)}, above)


def _encode_dataclass(value: Any, above: tuple[int, ...]) -> dict:
    if isinstance(value, dict | list | tuple | set | frozenset):
        raise _unknown(value)  # it holds more than its fields
    names = [field.name for field in dataclasses.fields(value) if field.compare]
    return {"$dataclass": [_class_name(type(value)), _encode_attributes(value, names, above)]}


def _encode_pydantic(value: Any, above: tuple[int, ...]) -> dict:
    # Attributes rather than model_dump(), which turns a nested model into a dict and so forgets which model
    # it was.
    names = getattr(type(value), "model_fields", None)
    data = value.model_dump() if names is None else {name: getattr(value, name) for name in names}
    hidden = [getattr(value, name, None) or {} for name in ("model_extra", "__pydantic_private__")]
    return {
        "$pydantic": [_class_name(type(value)), _encode_dict(data, above), *(_encode_dict(h, above) for h in hidden)]
    }


def _encode_partial(value: functools.partial, above: tuple[int, ...]) -> dict:
    parts = [
        _encode(value.func, above),
        _encode_items(value.args, above),
        _encode_dict(value.keywords, above),
    ]
    return {"$partial": [_class_name(type(value)), *parts]}


def _dtype_text(dtype: Any) -> str:
    if not isinstance(dtype, np.dtype):  # JAX's own, such as that of random keys
        return str(dtype)
    if dtype.names is not None or dtype.subdtype is not None:
        return repr(dtype)
    return dtype.name if dtype.isnative else f"{dtype.str[0]}{dtype.name}"


def _as_dtype(value: Any) -> Any:
    """The dtype that a dtype or a scalar type (`np.float32`, `jnp.bfloat16`) stands for, else None."""
    if isinstance(value, np.dtype) or _is_extended_dtype(value):
        return value
    if isinstance(value, _JaxScalarType):
        return value.dtype
    if not isinstance(value, type) or not issubclass(value, np.generic) or value in _ABSTRACT_SCALARS:
        return None
    return None if issubclass(value, jax.dtypes.extended) else np.dtype(value)


def _is_extended_dtype(value: Any) -> bool:
    scalar_type = getattr(value, "type", None)
    return isinstance(scalar_type, type) and issubclass(scalar_type, jax.dtypes.extended)


_JaxScalarType = type(jax.numpy.float32)
_ABSTRACT_SCALARS = {
    np.generic,
    np.number,
    np.integer,
    np.signedinteger,
    np.unsignedinteger,
    np.inexact,
    np.floating,
    np.complexfloating,
    np.flexible,
    np.character,
}


def _encode_numpy_scalar(value: np.generic, above: tuple[int, ...]) -> Any:
    if isinstance(value, np.void):
        raise _unknown(value)
    if isinstance(value, np.datetime64 | np.timedelta64):
        content: Any = str(value.astype(np.int64))
    elif isinstance(value, np.longdouble):
        content = np.format_float_scientific(value)
    elif isinstance(value, np.clongdouble):
        content = [np.format_float_scientific(part) for part in (value.real, value.imag)]
    else:
        plain = value.item()
        # The float8 and int4 families give back themselves; they all fit in a float.
        content = _encode(float(plain) if isinstance(plain, np.generic) else plain, above)
    return {"$scalar": [_dtype_text(value.dtype), content]}


def _encode_array(value: Any, above: tuple[int, ...]) -> dict:
    # A dimension of an exported program may be an expression such as `2*b`.
    shape = [int(size) if isinstance(size, int | np.integer) else str(size) for size in value.shape]
    return {"$array": [shape, _dtype_text(value.dtype)]}


def _wraps_a_function(value: Any) -> bool:
    module = type(value).__module__.partition(".")[0]
    return callable(value) and module in ("jax", "jaxlib", "functools") and hasattr(value, "__wrapped__")


def _encode_wrapper(value: Any, above: tuple[int, ...]) -> dict:
    rules = ("jvp", "fwd", "bwd", "nondiff_argnums")
    return {
        "$wrapped": [
            type(value).__name__,
            _encode(value.__wrapped__, above),
            _encode_attributes(value, rules, above),
        ]
    }


def _is_named_callable(value: Any) -> bool:
    return callable(value) and not isinstance(value, type) and _home(value) is not None


def _home(value: Any) -> str | None:
    """The module in which a callable is found under its own name: numpy's functions and ufuncs, scipy's, JAX's."""
    name = getattr(value, "__name__", None)
    if not isinstance(name, str):
        return None
    homes = ("jax.numpy", "numpy", getattr(value, "__module__", None), "scipy.special")
    return next((home for home in homes if home and getattr(sys.modules.get(home), name, None) is value), None)


@functools.cache
def _no_axis_name() -> Any:
    """The bare object by which `jax.vmap` says that no axis was named; every vmapped function's closure holds it."""
    functions = [jax.vmap(lambda x: x)]
    for function in functions:
        for cell in function.__closure__ or ():
            if type(cell.cell_contents) is object:
                return cell.cell_contents
            if isinstance(cell.cell_contents, types.FunctionType):
                functions.append(cell.cell_contents)
    return ...


_FAMILIES: tuple[tuple[Callable[[Any], bool], Callable[[Any, tuple[int, ...]], Any]], ...] = (
    (lambda value: isinstance(value, enum.Enum), _encode_enum),
    (
        lambda value: isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct),
        _encode_array,
    ),
    (lambda value: isinstance(value, np.generic), _encode_numpy_scalar),
    (
        lambda value: _as_dtype(value) is not None,
        lambda value, above: {"$dtype": _dtype_text(_as_dtype(value))},
    ),
    (lambda value: isinstance(value, type), lambda value, above: {"$class": _class_name(value)}),
    (lambda value: isinstance(value, functools.partial), _encode_partial),
    (dataclasses.is_dataclass, _encode_dataclass),
    (lambda value: hasattr(type(value), "model_dump"), _encode_pydantic),
    (
        lambda value: isinstance(value, tuple) and hasattr(type(value), "_fields"),
        lambda value, above: {"$namedtuple": [_class_name(type(value)), _encode_items(value, above)]},
    ),
    (_wraps_a_function, _encode_wrapper),
    (_is_named_callable, lambda value, above: {"$named": f"{_home(value)}:{value.__name__}"}),
    (lambda value: value is _no_axis_name(), lambda value, above: {"$no_axis_name": []}),
)
