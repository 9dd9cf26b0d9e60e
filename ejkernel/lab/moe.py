"""A mixture-of-experts layer on ``grouped_matmul``: what the lab times, and `examples/moe_layer.py` shows.

Every token has a gated MLP of some experts: ``sum over its experts e of share_e · (silu(x · gate_e) * (x · up_e)) · down_e``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel import grouped_matmul
from ejkernel.lab.extras import need

Weights = dict[str, Array]


@dataclass(frozen=True)
class MoE:
    """The sizes of a layer.

    Attributes:
        experts: how many there are.
        chosen: how many of them a token has.
        width: of a token.
        hidden: the width between an expert's products.
    """

    experts: int
    chosen: int
    width: int
    hidden: int

    def shapes(self, tokens: int) -> dict[str, tuple[int, ...]]:
        """Of the layer's arrays, by name.

        Example:
            >>> MoE(8, 2, 4096, 14336).shapes(512)["gate_up"]
            (8, 4096, 28672)
        """
        return {
            "tokens": (1, tokens, self.width),
            "router": (self.width, self.experts),
            "gate_up": (self.experts, self.width, 2 * self.hidden),
            "down": (self.experts, self.hidden, self.width),
        }

    def flops(self, tokens: int) -> int:
        """Floating-point operations of the forward's products."""
        return 2 * tokens * self.width * (self.experts + 3 * self.chosen * self.hidden)

    def arrays(self, tokens: int, dtype: str, seed: int = 0) -> Weights:
        """Random tokens and weights, of a scale that keeps every product's at 1; made on the device."""
        shapes = self.shapes(tokens)

        @jax.jit
        def made(key: Array) -> Weights:
            keys = jax.random.split(key, len(shapes))
            scales = {name: 1.0 if name == "tokens" else shape[-2] ** -0.5 for name, shape in shapes.items()}
            return {
                name: jax.random.normal(k, shapes[name], dtype) * jnp.asarray(scales[name], dtype)
                for name, k in zip(shapes, keys, strict=True)
            }

        return made(jax.random.key(seed))


MIXTRAL_8X7B = MoE(experts=8, chosen=2, width=4096, hidden=14336)
QWEN3_30B_A3B = MoE(experts=128, chosen=8, width=2048, hidden=768)


def moe_layer(
    tokens: Array,
    router: Array,
    gate_up: Array,
    down: Array,
    *,
    chosen: int,
    product: Callable[..., Array] = grouped_matmul,
) -> Array:
    """A mixture-of-experts layer.

    Args:
        tokens: ``[…, width]``.
        router: ``[width, experts]``.
        gate_up: ``[experts, width, 2 · hidden]``: each expert's gate, then its up projection.
        down: ``[experts, hidden, width]``.
        chosen: how many experts a token has. Their shares are the softmax of their logits alone, as in Mixtral; that is the
            softmax over all experts scaled to a sum of 1, as in Qwen3.
        product: called as ``product(rows, matrices, group_sizes)``.

    Returns:
        As the tokens.

    Example:
        >>> arrays = MoE(experts=4, chosen=2, width=8, hidden=16).arrays(6, "float32")
        >>> moe_layer(**arrays, chosen=2).shape
        (1, 6, 8)
    """
    flat = tokens.reshape(-1, tokens.shape[-1])
    shares, order, places, sizes = routed(flat, router, chosen)
    rows = spread(flat, order, places)
    gate, up = jnp.split(product(rows, gate_up, sizes).astype(jnp.float32), 2, axis=-1)
    share = spread(shares.reshape(-1, 1), order, places.reshape(-1, 1))  # as if each choice were a token
    hidden = (jax.nn.silu(gate) * up * share).astype(tokens.dtype)
    return collect(product(hidden, down, sizes), order, places).reshape(tokens.shape)


def routed(tokens: Array, router: Array, chosen: int) -> tuple[Array, Array, Array, Array]:
    """Which expert has which token, for ``[T, width]`` tokens.

    Returns:
        ``shares [T, chosen]`` in float32, which sum to 1; ``order [T · chosen]``: entry ``token · chosen + n`` of the n-th
        choice of a token, sorted by expert; ``places [T, chosen]``: where in this order each choice is; ``sizes [experts]``.
    """
    logits = jnp.dot(tokens, router, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    best, experts = jax.lax.top_k(logits, chosen)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    sizes = (flat[:, None] == jnp.arange(router.shape[-1])).sum(0, dtype=jnp.int32)
    return jax.nn.softmax(best, axis=-1), order, places.reshape(experts.shape), sizes


# Each is the other's transpose, and both only read: JAX would transpose them into sums at random places.


@jax.custom_vjp
def spread(tokens: Array, order: Array, places: Array) -> Array:
    """Tokens ``[T, width]`` as rows in the order of their experts, ``[T · chosen, width]``."""
    return tokens[order // places.shape[-1]]


@jax.custom_vjp
def collect(rows: Array, order: Array, places: Array) -> Array:
    """The sum of each token's rows, ``[T, width]``."""
    return rows[places].sum(1)


def _saved(f: Callable[..., Array]) -> Callable[..., Any]:
    return lambda x, order, places: (f(x, order, places), (order, places))


spread.defvjp(_saved(spread), lambda saved, dout: (collect(dout, *saved), None, None))
collect.defvjp(_saved(collect), lambda saved, dout: (spread(dout, *saved), None, None))


def dense(tokens: Array, router: Array, gate_up: Array, down: Array, *, chosen: int) -> Array:
    """The definition: every expert for every token, one expert after the other, and the shares of those not chosen are 0."""
    best, experts = jax.lax.top_k(tokens @ router, chosen)
    taken = jax.nn.one_hot(experts, router.shape[-1], dtype=tokens.dtype)
    shares = (jax.nn.softmax(best, axis=-1)[..., None] * taken).sum(-2)

    def expert(out: Array, own: tuple[Array, ...]) -> tuple[Array, None]:
        share, gate_up, down = own
        gate, up = jnp.split(tokens @ gate_up, 2, axis=-1)
        return out + share[..., None] * ((jax.nn.silu(gate) * up) @ down), None

    return jax.lax.scan(expert, jnp.zeros_like(tokens), (jnp.moveaxis(shares, -1, 0), gate_up, down))[0]


def torch_layer(tokens: Any, router: Any, gate_up: Any, down: Any, *, chosen: int) -> Any:
    """The same in torch: in bfloat16 its grouped product, in other dtypes one product after the other."""
    torch = need("torch", "a comparison with torch")
    flat = tokens.flatten(0, -2)
    best, experts = (flat.float() @ router.float()).topk(chosen, dim=-1)
    order = experts.flatten().argsort(stable=True)
    sizes = torch.bincount(experts.flatten(), minlength=router.shape[-1])

    def product(rows: Any, matrices: Any) -> Any:
        if rows.dtype == torch.bfloat16:
            return torch._grouped_mm(rows, matrices, offs=sizes.cumsum(0).to(torch.int32))
        pieces = zip(rows.split(sizes.tolist()), matrices, strict=True)
        return torch.cat([piece @ matrix for piece, matrix in pieces])

    own = order // chosen
    gate, up = product(flat.index_select(0, own), gate_up).chunk(2, dim=-1)
    shares = best.softmax(dim=-1).to(tokens.dtype).flatten()[order, None]
    out = product(torch.nn.functional.silu(gate) * up * shares, down)
    return torch.zeros_like(flat).index_add(0, own, out).reshape(tokens.shape)
