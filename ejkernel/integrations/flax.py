"""Flax: an ``attention_fn`` for its attention modules, and the weights of its recurrent cells for ``recurrent``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.errors import MissingPackageError, UnsupportedError, how_to_install
from ejkernel.integrations.attention import AttentionOptions, attended, dropout_of
from ejkernel.integrations.recurrent import check_stack, recurrent_stack
from ejkernel.ops.attention import AttentionChecker
from ejkernel.ops.core.checks import Checker, is_array
from ejkernel.ops.recurrent import BIASES, MATRICES
from ejkernel.utils.values import concrete

try:
    from flax import nnx
except ImportError as _error:
    raise MissingPackageError(
        f"ejkernel.integrations.flax needs flax: {how_to_install('flax')}", name="flax"
    ) from _error

__all__ = ["AttentionFn", "attention_fn", "recurrent_stack", "weights_from", "weights_to"]

_check = AttentionChecker("attention_fn")


@dataclass(frozen=True, kw_only=True)
class AttentionFn(AttentionOptions):
    """An ``attention_fn`` for ``flax.nnx.MultiHeadAttention`` and ``flax.linen.MultiHeadDotProductAttention``.

    The options are those of ``AttentionOptions``: ``causal``, ``sliding_window``, ``logits_soft_cap``, ``softmax_scale`` and
    ``platform``. A causal mask that flax makes is an array of length × length, which costs memory and computes what is
    hidden; ``AttentionFn(causal=True)`` states the same. In decoding, flax's masks say which part of the cache is filled,
    and causality and the window count from there.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> from ejkernel.integrations.flax import AttentionFn
        >>> attend = AttentionFn(causal=True, sliding_window=(127, 0))
        >>> layer = nnx.MultiHeadAttention(4, 32, decode=False, attention_fn=attend, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 10, 32))).shape
        (2, 10, 32)
    """

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        # linen drops what a function does not name, so every argument of both packages is named here.
        *,
        is_causal: bool = False,
        promote_dtype: Callable | None = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Callable | None = None,
        qk_attn_weights_einsum: Callable | None = None,
        attn_weights_value_einsum: Callable | None = None,
        input_positions: Array | None = None,
    ) -> Array:
        """What ``flax.nnx.dot_product_attention`` computes, in linear memory. The modules call it.

        Args:
            query: ``[*batch, Sq, H, D]``.
            key: ``[*batch, Sk, Hkv, D]``; ``H`` is a multiple of ``Hkv``.
            value: ``[*batch, Sk, Hkv, Dv]``.
            bias: floats that broadcast to ``[*batch, H, Sq, Sk]``.
            mask: likewise; other than 0 = attend.
            broadcast_dropout: drop the same weights in all batch entries and heads. It costs copies of the arrays, head by
                head; False does not.
            dropout_rng: decides, with the indices of batch, head, query and key, which weights are dropped; not those that
                flax would drop for the same key.
            dropout_rate, deterministic: as there.
            dtype: what query, key and value are cast to; None is what they promote to.
            precision: a ``jax.lax.Precision`` or its name. Products are of full precision for every one of them.
            module: set by ``sow_weights=True``, which raises, for there are no weights to sow.
            is_causal: query ``i`` sees keys ``j <= i``, also where the lengths differ.
            promote_dtype: as there.
            force_fp32_for_softmax: it is float32 in any case.
            einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum, input_positions: raise if they are set.

        Returns:
            ``[*batch, Sq, H, Dv]``.
        """
        if module is not None:
            raise UnsupportedError(
                "attention_fn: sow_weights=True (module) is not supported, for the attention weights never exist as an "
                "array. Call the module without it, or with flax's own attention_fn to look at weights."
            )
        replaced = {
            "einsum_dot_general": einsum_dot_general,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }
        for name, given in replaced.items():
            if given is not None:
                raise UnsupportedError(f"attention_fn: {name} is not supported: kernels multiply in their own way.")
        if input_positions is not None:
            raise UnsupportedError(
                "attention_fn: input_positions is not supported: rotate query and key in a function of your own that "
                "calls this one."
            )
        _check_precision(precision)
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not is_array(x):
                _check.fail(name, x, f"an array {_LAYOUT}: pass jnp.asarray({name})")
        query, key, value = self._promoted(query, key, value, dtype, promote_dtype)
        batch, query, key, value = _one_batch(query, key, value)
        full = (*batch, query.shape[2], query.shape[1], key.shape[1])
        if mask is not None:
            mask = _spread("mask", mask, full)
            mask = mask if mask.dtype == bool else mask != 0
        out = attended(
            self,
            query,
            key,
            value,
            check=_check,
            mask=mask,
            bias=None if bias is None else _spread("bias", bias, full),
            top_left=_check.flag("is_causal", is_causal),
            dropout=dropout_of(
                _check,
                "dropout_rate",
                dropout_rate,
                "dropout_rng",
                dropout_rng,
                off=_check.flag("deterministic", deterministic),
            ),
            same_dropout=_check.flag("broadcast_dropout", broadcast_dropout),
        )
        return out.reshape(*batch, *out.shape[1:])

    def _promoted(self, query: Any, key: Any, value: Any, dtype: Any, promote: Callable | None) -> tuple:
        if promote is not None:
            return promote((query, key, value), dtype=dtype)
        try:
            dtype = jnp.result_type(query, key, value) if dtype is None else jnp.dtype(dtype)
        except TypeError:
            _check.fail("dtype", dtype, "a floating dtype, such as jnp.bfloat16, or None")
        return tuple(jnp.asarray(x, dtype) for x in (query, key, value))


attention_fn: AttentionFn = AttentionFn()
"""``AttentionFn`` without options: what the modules ask for, their masks included."""

_LAYOUT = "[*batch, length, heads, head_dim]"


def _check_precision(precision: Any) -> None:
    for one in precision if isinstance(precision, tuple) else (precision,):
        try:
            known = one is None or jax.lax.Precision(one) is not None
        except ValueError:
            known = False
        if not known:
            raise UnsupportedError(
                f"attention_fn: precision={precision!r} is not supported. Kernels multiply float32 in full precision and "
                "half precision with float32 sums: pass None, or a jax.lax.Precision."
            )


def _one_batch(query: Array, key: Array, value: Array) -> tuple:
    """The sizes in front, and arrays in which those are one axis."""
    batch = query.shape[:-3]
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim < 3 or array.shape[:-3] != batch:
            _check.fail(name, array, f"{_LAYOUT}, with the same sizes in front for all three")
    return batch, *(x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value))


def _spread(name: str, array: Any, full: tuple[int, ...]) -> Array:
    """A mask or bias of four dimensions, the first of them 1 if all batch entries share it."""
    array = _check.converted(name, array)
    if name == "bias" and not jnp.issubdtype(array.dtype, jnp.floating):
        _check.fail(name, array, "floats, which are added to the logits; what may be seen is a mask")
    shape = (1,) * (len(full) - array.ndim) + array.shape
    if len(shape) != len(full) or not all(size in (1, whole) for size, whole in zip(shape, full, strict=True)):
        _check.fail(name, array, f"a shape that broadcasts to {list(full)}")
    array = array.reshape(shape)
    if any(size != 1 for size in shape[:-3]):
        array = jnp.broadcast_to(array, full[:-3] + shape[-3:])
    return array.reshape(math.prod(array.shape[:-3]), *shape[-3:])


_check_weights = Checker("weights_from")
_check_given = Checker("weights_to")


@dataclass(frozen=True)
class _Cell:
    """A cell's layers: those of the inputs and of the state, gate by gate or all gates in one, and which of them have a bias."""

    inputs: tuple[Any, ...]
    state: tuple[Any, ...]
    bias: str

    @property
    def biased(self) -> tuple[Any, ...]:
        return self.inputs if self.bias == "bias_ih" else self.state


def weights_from(module: Any) -> list[dict[str, Array]]:
    """The weights of cells of ``flax.nnx`` in the form of ``recurrent``, a dict for each layer.

    Flax's carry of an LSTM is ``(c, h)``; ``recurrent`` takes and gives ``(h, c)``.

    Args:
        module: an ``LSTMCell``, ``OptimizedLSTMCell``, ``GRUCell`` or ``SimpleCell``, an ``RNN`` of one, a ``Bidirectional`` of two,
            or a list of these, one a layer.

    Example:
        >>> from flax import nnx
        >>> from ejkernel.integrations.flax import recurrent_stack, weights_from
        >>> layers = [nnx.RNN(nnx.GRUCell(n, 8, rngs=nnx.Rngs(0))) for n in (5, 8)]
        >>> outputs, final = recurrent_stack(jnp.ones((2, 7, 5)), None, weights_from(layers), "gru")
        >>> outputs.shape
        (2, 7, 8)
    """
    result = []
    for directions in _layers(module, _check_weights):
        layer = {}
        for suffix, cell in zip(("", "_reverse"), directions, strict=False):
            layer |= {name + suffix: array for name, array in _taken(cell).items()}
        result.append(layer)
    return result


def weights_to(module: Any, weights: Sequence[Mapping[str, Any]]) -> None:
    """Put weights in the form of ``recurrent`` into cells of ``flax.nnx``, what ``weights_from`` undoes.

    Flax's cells have one bias. It gets the sum of both; a ``GRUCell`` has none inside of its reset gate, so the last third of
    ``bias_hh`` must be 0 there.

    Args:
        module: as in ``weights_from``; its parameters are replaced.
        weights: a dict for each layer.
    """
    layers = list(_layers(module, _check_given))
    check_stack(_check_given, weights, [len(directions) for directions in layers])
    new = []
    for index, (directions, layer) in enumerate(zip(layers, weights, strict=True)):
        for suffix, cell in zip(("", "_reverse"), directions, strict=False):
            own = {name: layer.get(name + suffix) for name in (*MATRICES, *BIASES)}
            new += _assigned(cell, own, lambda name, at=index, suffix=suffix: f"weights[{at}]['{name}{suffix}']")
    # Only now, so that an error leaves the module as it was.
    for parameter, array in new:
        parameter[...] = array


def _layers(module: Any, check: Checker) -> list[tuple[_Cell, ...]]:
    """One or two cells for each layer."""
    modules = module if isinstance(module, list | tuple | nnx.List) else [module]
    if not len(modules):
        check.fail("module", module, "at least one layer")
    return [_directions(layer, check) for layer in modules]


def _directions(layer: Any, check: Checker) -> tuple[_Cell, ...]:
    if not isinstance(layer, nnx.Bidirectional):
        return (_cell(layer, check),)
    if layer.merge_fn is not nnx.Bidirectional.merge_fn:
        check.fail("module", type(layer), "one with its own merge_fn, which puts outputs side by side")
    return _cell(layer.forward_rnn, check), _cell(layer.backward_rnn, check)


def _cell(layer: Any, check: Checker) -> _Cell:
    if isinstance(layer, nnx.RNN):
        if layer.reverse:
            check.fail("module", type(layer), "one without reverse=True: pass its cell, and reverse=True to recurrent")
        layer = layer.cell
    gated = isinstance(layer, nnx.LSTMCell | nnx.OptimizedLSTMCell | nnx.GRUCell)
    if gated and (layer.gate_fn is not nnx.sigmoid or layer.activation_fn is not nnx.tanh):
        check.fail("module", type(layer), "a cell whose gate_fn is sigmoid and whose activation_fn is tanh")
    if isinstance(layer, nnx.LSTMCell):
        inputs, state = (layer.ii, layer.if_, layer.ig, layer.io), (layer.hi, layer.hf, layer.hg, layer.ho)
        return _Cell(inputs, state, "bias_hh")
    if isinstance(layer, nnx.SimpleCell) and layer.residual:
        check.fail("module", type(layer), "one without residual=True, which recurrent does not compute")
    if not isinstance(layer, nnx.OptimizedLSTMCell | nnx.GRUCell | nnx.SimpleCell):
        check.fail(
            "module",
            type(layer),
            "an LSTMCell, OptimizedLSTMCell, GRUCell or SimpleCell of flax.nnx, an RNN or a Bidirectional of them, or a list "
            "of these",
        )
    bias = "bias_hh" if isinstance(layer, nnx.OptimizedLSTMCell) else "bias_ih"
    return _Cell((layer.dense_i,), (layer.dense_h,), bias)


def _taken(cell: _Cell) -> dict[str, Array]:
    def rows(layers: tuple) -> Array:
        return jnp.concatenate([layer.kernel[...].T for layer in layers])

    bias = jnp.concatenate([layer.bias[...] for layer in cell.biased])
    return {"weight_ih": rows(cell.inputs), "weight_hh": rows(cell.state), cell.bias: bias}


def _assigned(cell: _Cell, own: dict[str, Any], label: Callable[[str], str]) -> list[tuple[Any, Array]]:
    """Parameters, and what they become."""
    now = _taken(cell)
    for name, array in own.items():
        like = now[name] if name in MATRICES else now[cell.bias]
        if array is not None and (jnp.shape(array) != like.shape or jnp.result_type(array) != like.dtype):
            _check_given.fail(label(name), array, f"the cell's {like.dtype}{list(like.shape)}")
    matrices = {"weight_ih": cell.inputs, "weight_hh": cell.state}
    new = [
        (layer.kernel, rows.T)
        for name, layers in matrices.items()
        for layer, rows in zip(layers, jnp.split(jnp.asarray(own[name]), len(layers)), strict=True)
    ]
    bias = _one_bias(cell, own, jnp.zeros_like(now[cell.bias]), label)
    parts = jnp.split(bias, len(cell.biased))
    return new + [(layer.bias, part) for layer, part in zip(cell.biased, parts, strict=True)]


def _one_bias(cell: _Cell, own: dict[str, Any], zeros: Array, label: Callable[[str], str]) -> Array:
    given = [jnp.asarray(own[name]) for name in BIASES if own[name] is not None]
    size = own["weight_hh"].shape[1]
    if own["bias_hh"] is not None and zeros.shape[0] == 3 * size:
        inside = concrete(jnp.asarray(own["bias_hh"])[2 * size :])
        if inside is None or inside.any():
            _check_given.fail(
                label("bias_hh"), own["bias_hh"], f"zeros from {2 * size} on: a GRUCell of flax has no bias there"
            )
    return sum(given, zeros) if len(given) != 1 else given[0]
