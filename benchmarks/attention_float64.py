"""Attention and its gradients from the definition, in float64 numpy: what benchmarks compare outputs with."""

import numpy as np


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
