"""examples/serve_paged.py: what a served batch says is what recomputing each text says, and pages are accounted for."""

import jax
import numpy as np
import pytest
import serve_paged as example

SMALL = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 48}


def requests_of(rng):
    made = []
    for index in range(7):
        prompt = rng.integers(0, 256, int(rng.integers(1, 40))).tolist()
        made.append(example.Request(prompt, int(rng.integers(1, 12)), index * 2))
    return made


def test_tokens_equal_recomputation():
    model = example.Model(**SMALL)
    weights = example.weights_of(model, jax.random.key(0))
    # Fewer pages than all requests need at once, a budget smaller than a prompt.
    server = example.Server(model, weights, slots=3, budget=16, page=4, longest=52, pages=30)
    requests = requests_of(np.random.default_rng(0))
    owned = []
    step = server.step

    def watched():
        step()
        pages = [p for r in server.slots if r for p in r.pages]
        assert len(set(pages)) == len(pages)
        assert not set(pages) & set(server.free)
        owned.append(len(pages))

    server.step = watched
    example.serve(server, requests)
    assert all(len(r.tokens) == r.wanted for r in requests)
    assert sorted(server.free) == list(range(30))
    assert max(owned) > 10
    assert max(h["tokens"] for h in server.history) == 16
    # Prompts and decoding share calls.
    assert any(0 < h["decoded"] < h["tokens"] for h in server.history)
    example.check(model, weights, requests)
    requests[3].tokens[0] = (requests[3].tokens[0] + 1) % 256
    with pytest.raises(SystemExit, match="recomputed"):
        example.check(model, weights, requests)


def test_the_large_stack_runs(monkeypatch):
    monkeypatch.setattr(example, "LLAMA", example.Model(**SMALL, vocabulary=300))
    result = example.llama(layers=2, batch=3, context=40, steps=1, page=16)
    assert result["tokens_per_second"] > 0
    assert result["layers"] == 2
