"""Equinox: its ``MultiheadAttention`` in linear memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.contracts.support import Platform
from ejkernel.errors import MissingPackageError, how_to_install
from ejkernel.integrations.attention import AttentionOptions, attended, dropout_of
from ejkernel.ops.attention import AttentionChecker
from ejkernel.ops.core.checks import is_array, words

try:
    import equinox as eqx
except ImportError as _error:
    raise MissingPackageError(
        f"ejkernel.integrations.equinox needs equinox: {how_to_install('equinox')}", name="equinox"
    ) from _error

__all__ = ["MultiheadAttention"]

_check = AttentionChecker("MultiheadAttention")


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """``equinox.nn.MultiheadAttention``, which never forms its length × length weights.

    It is made and called with the same arguments, and its parameters have the same places in its tree: saved weights load
    into it.

    Example:
        >>> import equinox as eqx
        >>> import jax
        >>> from ejkernel.integrations.equinox import MultiheadAttention
        >>> layer = MultiheadAttention(num_heads=4, query_size=32, key=jax.random.key(0), causal=True)
        >>> x = jnp.ones((2, 10, 32))
        >>> jax.vmap(layer)(x, x, x).shape
        (2, 10, 32)
    """

    options: AttentionOptions = eqx.field(static=True)

    def __init__(
        self,
        *args: Any,
        causal: bool = False,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        platform: Platform | str | None = None,
        **kwargs: Any,
    ):
        """Take equinox's arguments, and those of ``AttentionOptions`` by name."""
        super().__init__(*args, **kwargs)
        self.options = AttentionOptions(
            causal=causal,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            softmax_scale=softmax_scale,
            platform=platform,
        )

    @classmethod
    def of(cls, module: eqx.nn.MultiheadAttention, **options: Any) -> MultiheadAttention:
        """The module of these parameters; ``options`` are those of ``AttentionOptions``.

        Example:
            >>> import equinox as eqx
            >>> import jax
            >>> theirs = eqx.nn.MultiheadAttention(4, 32, key=jax.random.key(0))
            >>> MultiheadAttention.of(theirs, causal=True).query_proj.weight is theirs.query_proj.weight
            True
        """
        if not isinstance(module, eqx.nn.MultiheadAttention):
            _check.fail("module", type(module), "an equinox.nn.MultiheadAttention")
        sizes = ("num_heads", "query_size", "key_size", "value_size", "output_size", "qk_size", "vo_size")
        sizes += ("use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias")
        arguments = {name: getattr(module, name) for name in sizes}
        empty = eqx.filter_eval_shape(lambda key: cls(**arguments, **options, key=key), jax.random.key(0))

        def parts(module: Any) -> tuple:
            return module.query_proj, module.key_proj, module.value_proj, module.output_proj, module.dropout

        return eqx.tree_at(parts, empty, parts(module))

    def __call__(
        self,
        query: Array,
        key_: Array,
        value: Array,
        mask: Array | None = None,
        *,
        key: Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable | None = None,
    ) -> Array:
        """As ``equinox.nn.MultiheadAttention``, without a batch: ``jax.vmap`` adds one.

        Args:
            query: ``[Sq, query_size]``.
            key_: ``[Sk, key_size]``.
            value: ``[Sk, value_size]``.
            mask: boolean, ``[Sq, Sk]`` or ``[num_heads, Sq, Sk]``, True = attend.
            key: decides which weights are dropped; not those that equinox would drop for the same key.
            inference: no dropout; None is what the module's ``dropout`` says.
            deterministic: the old name of ``inference``.
            process_heads: a function of the heads of query, key and value that returns others of the same shapes.

        Returns:
            ``[Sq, output_size]``. A query that may attend to nothing gets ``output_proj`` of 0.
        """
        if deterministic is not None:
            inference = deterministic
            warnings.warn("MultiheadAttention()(deterministic=...) is deprecated: pass inference", stacklevel=2)
        sizes = {"query": self.query_size, "key_": self.key_size, "value": self.value_size}
        for (name, size), x in zip(sizes.items(), (query, key_, value), strict=True):
            layout = f"[length, {size}], without a batch, which jax.vmap adds"
            _check.array(name, x, layout, ranks=(2,), kinds=(jnp.number,))
            if x.shape[1] != size:
                _check.fail(name, x, layout)
        lengths = (query.shape[0], key_.shape[0])
        if value.shape[0] != lengths[1]:
            _check.fail("value", value, f"the key's length, {lengths[1]}")
        heads = (
            self._heads(self.query_proj, query),
            self._heads(self.key_proj, key_),
            self._heads(self.value_proj, value),
        )
        if process_heads is not None:
            heads = _processed(process_heads, heads)
        if mask is not None:
            whole = (self.num_heads, *lengths)
            if not is_array(mask) or mask.dtype != bool or mask.shape not in (lengths, whole):
                _check.fail("mask", mask, f"booleans, {list(lengths)} or {list(whole)}")
            mask = mask.reshape(1, -1, *lengths)
        dtype = jnp.result_type(*heads)
        inference = self.dropout.inference if inference is None else inference
        out = attended(
            self.options,
            *(x.astype(dtype)[None] for x in heads),
            check=_check,
            mask=mask,
            dropout=dropout_of(
                _check, "dropout_p", self.dropout.p, "key", key, off=_check.flag("inference", inference)
            ),
        )
        return jax.vmap(self.output_proj)(out.reshape(lengths[0], -1))

    def _heads(self, projection: eqx.nn.Linear, x: Array) -> Array:
        return jax.vmap(projection)(x).reshape(x.shape[0], self.num_heads, -1)


def _processed(process_heads: Any, heads: tuple[Array, ...]) -> tuple[Array, ...]:
    """What a user's function makes of the heads, if that is three arrays of their shapes."""
    if not callable(process_heads):
        _check.fail("process_heads", process_heads, "a function of the heads of query, key and value")
    processed = process_heads(*heads)
    many = isinstance(processed, tuple | list)
    found = [list(x.shape) if is_array(x) else type(x).__name__ for x in processed] if many else type(processed)
    expected = [list(x.shape) for x in heads]
    if found != expected:
        given = ", ".join(map(str, found)) if many else words(found).removeprefix("of type ")
        _check.fail("process_heads", process_heads, f"{', '.join(map(str, expected))} from it; it returned {given}")
    return tuple(processed)
