"""Attention and its gradients from the definition, in float64: what benchmarks compare outputs with."""

import functools

import numpy as np

# The most logits that `in_blocks` holds at a time: half a gigabyte.
MOST_LOGITS = 2**26


def reference(case, floats, integers, dout):
    """The output and the gradients by name, from the definition, in float64 numpy: ``[B, H, S, D]`` inside."""
    wide = {name: np.asarray(x, np.float64) for name, x in floats.items()}
    group = case["heads"] // case.get("kv_heads", case["heads"])
    q = wide["query"].swapaxes(1, 2)
    k, v = (np.repeat(wide[name].swapaxes(1, 2), group, 1) for name in ("key", "value"))
    dout = np.asarray(dout, np.float64).swapaxes(1, 2)
    options, scale = case["options"], case["head_dim"] ** -0.5
    cap, probability = options.get("logits_soft_cap"), options.get("dropout_prob", 0)

    capped = logits = scale * q @ k.swapaxes(-1, -2)
    if cap:
        capped = cap * np.tanh(logits / cap)
    scores = np.where(visible(case, integers), capped + wide.get("bias", 0), -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if "softmax_aux" in wide:
        sink = np.exp(wide["softmax_aux"][None, :, None] - top)
        total = total + sink
    weights /= total
    keep = kept(case) / (1 - probability) if probability else 1.0
    out = (weights * keep) @ v

    dweights = dout @ v.swapaxes(-1, -2) * keep
    slope = (weights * dweights).sum(-1, keepdims=True)
    dscores = weights * (dweights - slope)
    dlogits = dscores * (1 - (capped / cap) ** 2) if cap else dscores

    def to_keys(x):
        return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2).swapaxes(1, 2)

    grads = {
        "query": scale * (dlogits @ k).swapaxes(1, 2),
        "key": to_keys(scale * dlogits.swapaxes(-1, -2) @ q),
        "value": to_keys((weights * keep).swapaxes(-1, -2) @ dout),
    }
    if "bias" in wide:
        grads["bias"] = dscores.sum(0, keepdims=True)
    if "softmax_aux" in wide:
        grads["softmax_aux"] = -(sink / total * slope).sum((0, 2))
    return out.swapaxes(1, 2), grads


def visible(case, integers):
    """``[B|1, 1, S, S]``: who may attend to whom."""
    place = np.arange(case["length"])
    distance = place - place[:, None]
    seen = np.ones(distance.shape, bool)
    if case["options"].get("causal"):
        seen &= distance <= 0
    left, right = case["options"].get("sliding_window") or (None, None)
    if left is not None:
        seen &= (distance >= -left) & (distance <= right)
    seen = seen[None, None]
    if "q_segment_ids" in integers:
        ids = integers["q_segment_ids"]
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    if "cum_seqlens_q" in integers:
        ids = np.searchsorted(integers["cum_seqlens_q"], place, "right")
        seen = seen & (ids[:, None] == ids)
    return seen


def in_blocks(case, shapes):
    """The same for lengths whose logits do not fit, compiled for JAX's default device: a block of queries at a time.

    `shapes` are those of the floats by name, of one key head and its query heads. Returns a function of floats,
    integers and the output's cotangent; gradients are JAX's. No dropout.
    """
    import jax
    import jax.numpy as jnp

    batch, length, heads, dim = shapes["query"]
    keys, value_dim = shapes["value"][1], shapes["value"][-1]
    most = max(1, MOST_LOGITS // (batch * heads * keys))
    rows = max(n for n in range(1, length + 1) if length % n == 0 and n <= most)
    options = case["options"]
    left, right = options.get("sliding_window") or (None, None)

    def block(floats, integers, start):
        """The output of some rows, ``[B, rows, H, Dv]``."""
        q = jax.lax.dynamic_slice_in_dim(floats["query"], start, rows, 1)
        k, v = floats["key"][:, :, 0], floats["value"][:, :, 0]
        scores = jnp.einsum("bqhd,bkd->bhqk", q, k) * dim**-0.5
        if cap := options.get("logits_soft_cap"):
            scores = cap * jnp.tanh(scores / cap)
        if "bias" in floats:
            bias = floats["bias"]
            whole = bias.shape[2] == 1
            scores += bias if whole else jax.lax.dynamic_slice_in_dim(bias, start, rows, 2)
        place, row = jnp.arange(keys), start + jnp.arange(rows)[:, None]
        distance = place - row - (keys - length)
        seen = jnp.ones((rows, keys), bool)
        if options.get("causal"):
            seen &= distance <= 0
        if left is not None:
            seen &= (distance >= -left) & (distance <= right)
        if "cum_seqlens_q" in integers:
            ids = jnp.searchsorted(integers["cum_seqlens_q"], place, side="right")
            seen &= ids[row] == ids
        if "attention_mask" in integers:
            seen = seen & integers["attention_mask"]
        scores = jnp.where(seen, scores, -jnp.inf)
        if "softmax_aux" in floats:
            sinks = jnp.broadcast_to(floats["softmax_aux"][:, None], (batch, heads, rows, 1))
            scores = jnp.concatenate([scores, sinks], -1)
        weights = jax.nn.softmax(scores, -1)[..., :keys]
        return jnp.einsum("bhqk,bkd->bqhd", weights, v)

    def forward(floats, integers):
        one = jax.checkpoint(functools.partial(block, floats, integers))
        blocks = jax.lax.map(one, jnp.arange(0, length, rows))
        return jnp.moveaxis(blocks, 0, 1).reshape(batch, length, heads, value_dim)

    @jax.jit
    def both(floats, integers, dout):
        floats, dout = jax.tree.map(lambda x: x.astype(jnp.float64), (floats, dout))
        out, back = jax.vjp(lambda floats: forward(floats, integers), floats)
        return out, back(dout)[0]

    return both


def kept(case):
    """Which weights dropout keeps, ``[B, H, S, S]``."""
    from ejkernel.kernels.common import dropout

    place = np.arange(case["length"])
    keys = dropout.batch_keys(np.uint32(case["options"]["dropout_seed"]), case["batch"])
    rows = dropout.row_keys(keys[:, None, None], np.arange(case["heads"])[:, None], place)
    return np.asarray(dropout.keep(rows[..., None], place, case["options"]["dropout_prob"]))


def relative_errors(expected, actual):
    """Of the output and each gradient; both are pairs ``(out, gradients by name)``."""
    pairs = {"out": (expected[0], actual[0])}
    pairs |= {"d" + name: (expected[1][name], x) for name, x in actual[1].items()}
    return {
        name: float(np.linalg.norm(np.asarray(x, np.float64) - e) / np.linalg.norm(e)) for name, (e, x) in pairs.items()
    }
