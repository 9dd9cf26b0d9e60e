"""``recurrent``: LSTM, GRU and plain recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float, Integer

from ejkernel.callib.integers import power_of_two
from ejkernel.contracts.call import Call, Cost
from ejkernel.contracts.support import Backend, Platform
from ejkernel.ops.core.checks import Checker, is_array
from ejkernel.ops.core.operation import AnyArray, Operation
from ejkernel.utils.values import concrete

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
MATRICES = ("weight_ih", "weight_hh")
BIASES = ("bias_ih", "bias_hh")

_check = Checker("recurrent")


def recurrent(
    inputs: Float[AnyArray, "batch seq_len features"],
    hidden: Float[AnyArray, "..."] | Sequence[Float[AnyArray, "..."]] | None = None,
    weights: Mapping[str, AnyArray | None] | None = None,
    cell_type: str = "lstm",
    *,
    lengths: Integer[AnyArray, " batch"] | None = None,
    bidirectional: bool | np.bool_ = False,
    reverse: bool | np.bool_ = False,
    activation: str | Callable[[Array], Array] = "tanh",
    platform: Platform | str | None = None,
    backend: Backend | str | None = None,
) -> tuple[Array, Any]:
    """A recurrent layer over whole sequences, equal to ``torch.nn.LSTM``, ``GRU`` or ``RNN`` with one layer.

    Half precision keeps the state in float32 from step to step; outputs and final state have the inputs' dtype.

    Args:
        inputs: ``[B, S, I]``.
        hidden: the state to start from, ``[B, H]``, for an LSTM a pair ``(h, c)`` of them; bidirectional: ``[2, B, H]``.
            None is zeros.
        weights: a dict in PyTorch's convention: ``weight_ih [G·H, I]``, ``weight_hh [G·H, H]`` and, if wanted, ``bias_ih`` and
            ``bias_hh`` ``[G·H]``; the gates are i, f, g, o (lstm), r, z, n (gru) or one (rnn). Bidirectional: the same names
            again with ``_reverse``.
        cell_type: ``lstm``, ``gru`` or ``rnn``.
        lengths: ``[B]``: outputs past a sequence's end are 0, its final state is the one at its end, and what the inputs
            hold there does not matter.
        bidirectional: run from the end too; outputs are ``[B, S, 2·H]``, the forward direction's first.
        reverse: run from the end only; outputs stay in the order of the inputs.
        activation: ``tanh``, ``relu`` or a function of an array that keeps its shape, for ``rnn``.
        platform, backend: run exactly this implementation, or raise.

    Returns:
        ``(outputs, final_hidden)``: ``[B, S, H]`` and the state after the last step, of the form of ``hidden``. Inputs, hidden and
        every weight have gradients.

    Example:
        >>> import jax.numpy as jnp
        >>> from ejkernel import recurrent
        >>> weights = {"weight_ih": jnp.ones((4 * 3, 5)), "weight_hh": jnp.ones((4 * 3, 3))}
        >>> outputs, (h, c) = recurrent(jnp.ones((2, 7, 5)), None, weights)
        >>> outputs.shape, h.shape, c.shape
        ((2, 7, 3), (2, 3), (2, 3))
    """
    return OPERATION(locals())


@dataclass(frozen=True)
class RecurrentSpec:
    """What to compute, beside the arrays.

    Attributes:
        cell: ``lstm``, ``gru`` or ``rnn``.
        activation: of ``rnn``: ``tanh``, ``relu`` or a function.
        directions: one pass each, True where it runs from the end. The second one's weights end in ``_reverse``.
    """

    cell: str
    activation: str | Callable[[Array], Array]
    directions: tuple[bool, ...]


class Recurrent(Operation):
    """Arrays for kernels:

    ``inputs`` as passed; ``hidden``, if given, a tuple of ``[B, directions, H]``, for an LSTM the cell second; ``weights`` a dict of
    arrays as passed with an axis of 1 in front, for they have no batch; ``lengths`` int32 ``[B]``.

    A kernel's output is ``(outputs [B, S, directions·H], final states like hidden)``; the residual is an LSTM's cells after each
    step, ``[B, S, directions·H]`` in float32 (float64 for float64), and None for the others.
    """

    name = "recurrent"
    features: ClassVar[dict[str, str]] = {
        "lstm": "long short-term memory cells",
        "gru": "gated recurrent units",
        "rnn": "plain recurrent cells",
        "hidden": "a state to start from",
        "lengths": "sequences of different lengths",
        "bidirectional": "both directions at once",
        "reverse": "from the end to the start",
        "activation": "an activation other than tanh, for plain cells",
        "function": "any function as the activation, for plain cells",
    }
    gradients = ("inputs", "hidden", "weights")
    shareable = frozenset({"weights"})

    def folds(self, names: frozenset[str]) -> bool:
        """Weights have no batch axis to fold into."""
        return "weights" not in names

    def bind(self, arguments: dict[str, Any]) -> Call:
        """Check every argument; see the base class."""
        a = arguments
        spec = self._spec(a)
        _check.array("inputs", a["inputs"], "[batch, seq_len, features]", ranks=(3,), kinds=(jnp.floating,))
        batch, seq_len, features = a["inputs"].shape
        if features == 0:
            _check.fail("inputs", a["inputs"], "[batch, seq_len, features] with at least one feature")
        size = self._check_weights(a["weights"], a["inputs"], spec)
        self._check_hidden(a["hidden"], a["inputs"], size, spec)
        self._check_lengths(a["lengths"], batch)
        self._check_activation(spec.activation, batch, size, a["inputs"].dtype)
        used = {
            spec.cell: (True, f"cell_type={spec.cell!r}"),
            "hidden": (a["hidden"] is not None, "hidden"),
            "lengths": (a["lengths"] is not None, "lengths"),
            "bidirectional": (len(spec.directions) == 2, "bidirectional"),
            "reverse": (spec.directions == (True,), "reverse"),
            "activation": (spec.activation != "tanh", "activation"),
            "function": (callable(spec.activation), "a function as activation"),
        }
        used_features = {name: phrase for name, (is_used, phrase) in used.items() if is_used}
        dtype = jnp.dtype(a["inputs"].dtype).name
        return Call(
            operation=self.name,
            arguments=self.given(a),
            spec=spec,
            dtype=dtype,
            features=used_features,
            bucket=(
                ("dtype", dtype),
                ("hidden_size", size),
                ("input_size", features),
                ("batch", power_of_two(batch)),
                ("seq_len", power_of_two(seq_len)),
                ("features", " ".join(sorted(used_features))),
            ),
        )

    def _spec(self, a: dict[str, Any]) -> RecurrentSpec:
        cell, activation = a["cell_type"], a["activation"]
        if not isinstance(cell, str) or cell not in GATES:
            _check.fail("cell_type", cell, "'lstm', 'gru' or 'rnn'")
        both, reverse = _check.flag("bidirectional", a["bidirectional"]), _check.flag("reverse", a["reverse"])
        if both and reverse:
            _check.fail("reverse", reverse, "False with bidirectional=True, which runs both ways")
        if not callable(activation) and not (isinstance(activation, str) and activation in ("tanh", "relu")):
            _check.fail("activation", activation, "'tanh', 'relu' or a function of an array")
        if activation != "tanh" and cell != "rnn":
            _check.fail("activation", activation, f"the default with cell_type={cell!r}; only 'rnn' takes another")
        return RecurrentSpec(cell, activation, (False, True) if both else (reverse,))

    def _check_weights(self, weights: Any, inputs: Any, spec: RecurrentSpec) -> int:
        """Refuse wrong weights; the hidden size."""
        suffixes = ("", "_reverse")[: len(spec.directions)]
        required = [name + suffix for suffix in suffixes for name in MATRICES]
        allowed = required + [name + suffix for suffix in suffixes for name in BIASES]
        if not isinstance(weights, Mapping):
            _check.fail("weights", weights, f"a dict with {', '.join(required)}")
        for name in required:
            if weights.get(name) is None:
                _check.fail(
                    "weights", weights, f"{name} in it, beside {', '.join(map(str, weights)) or 'nothing else'}"
                )
        for name in weights:
            if name not in allowed:
                hint = " (bidirectional=True takes them)" if str(name).endswith("_reverse") else ""
                _check.fail("weights", weights, f"no {name!r} in it, only {', '.join(allowed)}{hint}")
        first = weights["weight_hh"]
        _check.array("weights['weight_hh']", first, "[gates·hidden, hidden]", ranks=(2,), kinds=(jnp.floating,))
        size = first.shape[1]
        if size == 0:
            _check.fail("weights['weight_hh']", first, "a hidden size of at least 1")
        # The recurrent weights first: they say what the hidden size is.
        for name in sorted(weights, key=lambda name: name != "weight_hh"):
            if weights[name] is not None:
                self._check_weight(name, weights[name], inputs, GATES[spec.cell], size)
        return size

    def _check_weight(self, name: str, weight: Any, inputs: Any, gates: int, size: int) -> None:
        columns = {"weight_ih": (inputs.shape[2],), "weight_hh": (size,)}
        shape = (gates * size, *columns.get(name.removesuffix("_reverse"), ()))
        label = f"weights[{name!r}]"
        layout = f"{list(shape)} ({gates} gates of hidden size {size})"
        _check.array(label, weight, layout, ranks=(len(shape),), kinds=(jnp.floating,))
        if weight.shape != shape:
            _check.fail(label, weight, layout)
        if weight.dtype != inputs.dtype:
            _check.fail(label, weight, f"the inputs' dtype, {inputs.dtype}: cast one of them")

    def _check_hidden(self, hidden: Any, inputs: Any, size: int, spec: RecurrentSpec) -> None:
        if hidden is None:
            return
        shape = (inputs.shape[0], size)
        if len(spec.directions) == 2:
            shape = (2, *shape)
        layout = str(list(shape))
        states: dict[str, Any] = {"hidden": hidden}
        if spec.cell == "lstm":
            if not isinstance(hidden, tuple | list) or len(hidden) != 2:
                _check.fail("hidden", hidden, f"a pair (h, c), each {layout}, for an LSTM")
            states = {"hidden[0]": hidden[0], "hidden[1]": hidden[1]}
        for name, state in states.items():
            _check.array(name, state, layout, ranks=(len(shape),), kinds=(jnp.floating,))
            if state.shape != shape:
                _check.fail(name, state, layout)
            if state.dtype != inputs.dtype:
                _check.fail(name, state, f"the inputs' dtype, {inputs.dtype}: cast one of them")

    def _check_lengths(self, lengths: Any, batch: int) -> None:
        if lengths is None:
            return
        _check.array("lengths", lengths, f"[{batch}]", ranks=(1,), kinds=(jnp.integer,))
        if lengths.shape != (batch,):
            _check.fail("lengths", lengths, f"[{batch}], one for each sequence")

    def _check_activation(self, activation: Any, batch: int, size: int, dtype: Any) -> None:
        if isinstance(activation, str):
            return
        like = jax.ShapeDtypeStruct((batch, size), _state_dtype(dtype))
        out = jax.eval_shape(activation, like)
        if not is_array(out) or out.shape != like.shape or not jnp.issubdtype(out.dtype, jnp.floating):
            _check.fail("activation", activation, f"a function that keeps the shape {list(like.shape)}; it gives {out}")

    def check_values(self, arguments: dict[str, Any]) -> None:
        """Trees must hold arrays, and no sequence is longer than the inputs."""
        inputs, weights = arguments["inputs"], arguments["weights"]
        for name, value in weights.items() if isinstance(weights, Mapping) else ():
            if value is not None and not is_array(value):
                _check.fail(f"weights[{name!r}]", value, "an array")
        hidden = arguments["hidden"]
        for index, value in enumerate(hidden) if isinstance(hidden, tuple | list) else ():
            if not is_array(value):
                _check.fail(f"hidden[{index}]", value, "an array")
        lengths = concrete(arguments["lengths"])
        if lengths is None or lengths.ndim != 1 or not is_array(inputs) or len(inputs.shape) != 3:
            return
        if not np.issubdtype(lengths.dtype, np.integer):
            return
        if ((lengths < 0) | (lengths > inputs.shape[1])).any():
            shown = np.array2string(lengths, threshold=8)
            _check.fail("lengths", arguments["lengths"], f"lengths from 0 to {inputs.shape[1]}; they are {shown}")

    def prepare(self, arguments: dict[str, Any], spec: RecurrentSpec) -> dict[str, Any]:
        """The kernels' arrays; see the class."""
        hidden, weights, lengths = arguments["hidden"], arguments["weights"], arguments["lengths"]
        arrays: dict[str, Any] = {"inputs": arguments["inputs"]}
        if hidden is not None:
            states = hidden if isinstance(hidden, tuple | list) else (hidden,)
            both = len(spec.directions) == 2
            arrays["hidden"] = tuple(s.swapaxes(0, 1) if both else s[:, None] for s in states)
        arrays["weights"] = {name: w[None] for name, w in weights.items() if w is not None}
        if lengths is not None:
            # Clipped before it is narrowed: a length that is too large for int32 is not a negative one.
            arrays["lengths"] = jnp.clip(lengths, 0, arguments["inputs"].shape[1]).astype(jnp.int32)
        return arrays

    def axes(self, arrays: dict[str, Any], spec: RecurrentSpec) -> tuple[dict[str, Any], tuple]:
        """The batch, which shares the weights."""
        return {"weights": "."}, ("b", "b")

    def empty(self, arguments: dict[str, Any]) -> Any:
        """Without sequences or without steps the state stays as it is."""
        batch, steps, _ = arguments["inputs"].shape
        if batch and steps:
            return None
        dtype, size = arguments["inputs"].dtype, arguments["weights"]["weight_hh"].shape[1]
        directions = 2 if arguments["bidirectional"] else 1
        final = arguments["hidden"]
        if final is None:
            zeros = jnp.zeros((2, batch, size) if directions == 2 else (batch, size), dtype)
            final = (zeros, zeros) if arguments["cell_type"] == "lstm" else zeros
        return jnp.zeros((batch, steps, directions * size), dtype), tuple(final) if isinstance(final, list) else final

    def finish(self, arguments: dict[str, Any], out: Any, residual: Any) -> Any:
        """Final states in the form of ``hidden``."""
        outputs, final = out
        states = tuple(s.swapaxes(0, 1) if arguments["bidirectional"] else s[:, 0] for s in final)
        return outputs, states if arguments["cell_type"] == "lstm" else states[0]

    def result_specs(self, arguments: dict[str, Any], spec: tuple) -> Any:
        """Partitioned as the inputs are over batch and time."""
        batch, time, _ = spec
        state = PartitionSpec(None, batch) if arguments["bidirectional"] else PartitionSpec(batch)
        return PartitionSpec(batch, time), (state, state) if arguments["cell_type"] == "lstm" else state

    def work(self, call: Call) -> Cost:
        """Two products a step and direction forward; backward each of them again, and one more for each factor."""
        inputs, weights = call.shapes["inputs"], call.shapes["weights"]
        batch, steps, features = inputs.shape
        rows, size = weights["weight_hh"].shape[1:]
        directions = len(call.spec.directions)
        products = 2 * batch * steps * directions * rows * (features + size)
        read = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(call.shapes))
        states = batch * directions * size * (2 if call.spec.cell == "lstm" else 1) * inputs.dtype.itemsize
        out = batch * steps * directions * size * inputs.dtype.itemsize + states
        kept = batch * steps * directions * size * jnp.dtype(_state_dtype(inputs.dtype)).itemsize
        kept = kept if call.spec.cell == "lstm" else 0
        return Cost(
            flops=products,
            bytes=read + out,
            backward_flops=3 * products,
            backward_bytes=2 * read + 2 * out + kept,
        )

    def sample(self, shapes: dict[str, Any]) -> dict[str, Any]:
        """Random numbers, weights as small as an initialisation makes them, and sequences of full length."""
        leaves, tree = jax.tree.flatten(shapes)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        made = jax.tree.unflatten(
            tree,
            [
                jax.random.normal(key, like.shape, like.dtype)
                if jnp.issubdtype(like.dtype, jnp.floating)
                else jnp.full(like.shape, shapes["inputs"].shape[1], like.dtype)
                for key, like in zip(keys, leaves, strict=True)
            ],
        )
        if "weights" in made:
            scale = made["weights"]["weight_hh"].shape[-1] ** -0.5
            made["weights"] = jax.tree.map(lambda w: w * jnp.asarray(scale, w.dtype), made["weights"])
        return made


def _state_dtype(dtype: Any) -> Any:
    """Of the state from step to step."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


OPERATION = Recurrent(recurrent)
