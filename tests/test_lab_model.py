"""The lab's Gemma 3: prefill, decode with a cache, decode without one and the forward over all tokens agree."""

import gc
import inspect
import subprocess
import sys
import types

import numpy as np
import pytest

try:
    import torch
    import transformers
    from transformers.models.gemma3 import modeling_gemma3 as gemma3
except ImportError:
    torch = None

from ejkernel.errors import InvalidInputError
from ejkernel.lab import extras, model
from ejkernel.lab.model import (
    create_decode_inputs_with_cache,
    create_decode_inputs_without_cache,
    create_prefill_inputs,
    decode_forward,
    get_position_embeddings,
    initialize_kv_cache,
    masks,
    multi_layer_decode_forward,
    multi_layer_prefill_forward,
    notes,
    positions,
    prefill_forward,
)

slow = pytest.mark.slow
NEEDS_TORCH = (pytest.mark.torch, pytest.mark.skipif(torch is None, reason="torch or transformers is not installed"))
WINDOW, LAYERS, BATCH, HIDDEN = 8, 8, 2, 64
SLIDING, FULL = 0, 5  # layers of either type
TYPES = {SLIDING: "sliding_attention", FULL: "full_attention"}

SIGNATURES = {
    "create_prefill_inputs": "batch_size, seq_len, hidden_size, dtype, device",
    "create_decode_inputs_with_cache": "batch_size, current_seq_len, hidden_size, dtype, device",
    "create_decode_inputs_without_cache": "batch_size, current_seq_len, hidden_size, dtype, device",
    "get_position_embeddings": "hidden_states, position_ids, rotary_emb, layer_type",
    "initialize_kv_cache": "config, max_cache_len",
    "prefill_forward": "layer, hidden_states, position_ids, position_embeddings, past_key_values",
    "decode_forward": "layer, hidden_states, position_ids, position_embeddings, use_kv_cache, past_key_values, "
    "cache_positions, prefill_hidden_states",
    "multi_layer_prefill_forward": "num_layers, layer, hidden_states, position_ids, position_embeddings, past_key_values",
    "multi_layer_decode_forward": "num_layers, layer, hidden_states, position_ids, position_embeddings, use_kv_cache, "
    "past_key_values, cache_positions, prefill_hidden_states",
}


def test_signatures():
    assert {name: ", ".join(inspect.signature(getattr(model, name)).parameters) for name in model.__all__} == SIGNATURES


def test_import_loads_neither_torch_nor_transformers():
    code = "import sys, ejkernel.lab.model; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        extras.MissingPackageError, match=r"needs torch: pip install '\.\[torch\]' in a clone of ejkernel"
    ):
        create_prefill_inputs(1, 2, 3, None, "cpu")
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))  # which imports without torch
    for call in (
        lambda: initialize_kv_cache(None, 4),
        lambda: prefill_forward(*[None] * 5),
        lambda: decode_forward(*[None] * 8),
        lambda: multi_layer_prefill_forward(1, *[None] * 5),
        lambda: multi_layer_decode_forward(1, *[None] * 8),
    ):
        with pytest.raises(
            extras.MissingPackageError, match=r"^\w+ needs torch: pip install '\.\[torch\]' in a clone of ejkernel$"
        ):
            call()


def needs_torch(test):
    for mark in NEEDS_TORCH:
        test = mark(test)
    return test


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Torch's threads take longer to wake up than these small layers to compute, and spin meanwhile."""
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        extras.MissingPackageError, match=r"needs transformers: pip install '\.\[torch\]' in a clone of ejkernel"
    ):
        initialize_kv_cache(None, 4)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=NEEDS_TORCH) for name in ("sdpa", "eager")])
def net(request):
    """A small model whose weights are large enough for every key to matter."""
    config = transformers.Gemma3TextConfig(
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        num_hidden_layers=LAYERS,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        vocab_size=32,
        attn_implementation=request.param,
    )
    assert [config.layer_types[index] for index in TYPES] == list(TYPES.values())
    torch.manual_seed(0)
    made = gemma3.Gemma3TextModel(config).double().eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.requires_grad_(False)


def embeddings(net, states, positions, index):
    module = net.rotary_emb if index == FULL else getattr(net, "rotary_emb_local", net.rotary_emb)  # before 5
    return get_position_embeddings(states, positions, module, TYPES[index])


def prefill(net, index, states, cache, passes=None, start=0):
    positions = torch.arange(start, start + states.shape[1])[None]
    rest = net.layers[index], states, positions, embeddings(net, states, positions, index), cache
    return prefill_forward(*rest) if passes is None else multi_layer_prefill_forward(passes, *rest)


def decode(net, index, token, at, cache, passes=None):
    positions = torch.full((len(token), 1), at)
    pair = embeddings(net, token, positions, index)
    rest = net.layers[index], token, positions, pair, True, cache, torch.tensor([at]), None
    return decode_forward(*rest) if passes is None else multi_layer_decode_forward(passes, *rest)


def decode_again(net, index, token, before, passes=None):
    positions = torch.arange(before.shape[1] + 1)[None]
    pair = embeddings(net, token, positions, index)
    rest = net.layers[index], token, positions, pair, False, None, None, before
    return decode_forward(*rest) if passes is None else multi_layer_decode_forward(passes, *rest)


def by_hand(net, index, states):
    """One layer over all tokens, with the attention written out."""
    layer, attention = net.layers[index], net.layers[index].self_attn
    length = states.shape[1]
    normed = layer.input_layernorm(states)
    cos, sin = embeddings(net, states, torch.arange(length)[None], index)

    def heads(projection):
        return projection(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

    query, key = gemma3.apply_rotary_pos_emb(
        attention.q_norm(heads(attention.q_proj)), attention.k_norm(heads(attention.k_proj)), cos, sin
    )
    scores = query @ key.transpose(-1, -2) * attention.scaling
    back = torch.arange(length)[:, None] - torch.arange(length)
    seen = (back >= 0) & (back < (WINDOW if index == SLIDING else length))
    mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ heads(attention.v_proj)
    states = states + layer.post_attention_layernorm(attention.o_proj(mixed.transpose(1, 2).flatten(-2)))
    return states + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(states)))


def close(actual, expected):
    # Norms and eager attention's softmax compute in float32 whatever the dtype.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def states(length, batch=BATCH, seed=1):
    return torch.randn(batch, length, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cache_of(net, length=32):
    return initialize_kv_cache(net.config, length)


# --- inputs -------------------------------------------------------------------------------------------------


@needs_torch
def test_prefill_inputs():
    hidden, positions = create_prefill_inputs(2, 3, 4, torch.bfloat16, "cpu")
    assert hidden.shape == (2, 3, 4)
    assert hidden.dtype == torch.bfloat16
    assert positions.tolist() == [[0, 1, 2]] * 2
    assert positions.dtype == torch.int64
    assert 0.5 < create_prefill_inputs(8, 64, 64, torch.float32, torch.device("cpu"))[0].std() < 2


@needs_torch
def test_decode_inputs():
    hidden, positions, slots = create_decode_inputs_with_cache(2, 7, 4, torch.float32, "cpu")
    assert (hidden.shape, positions.tolist(), slots.tolist()) == ((2, 1, 4), [[7], [7]], [7])
    hidden, positions, before = create_decode_inputs_without_cache(2, 3, 4, torch.float32, "cpu")
    assert (hidden.shape, positions.tolist(), before.shape) == ((2, 1, 4), [[0, 1, 2, 3]] * 2, (2, 3, 4))
    assert create_decode_inputs_without_cache(1, 0, 4, torch.float32, "cpu")[2].shape == (1, 0, 4)


@needs_torch
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((0, 3, 4, "float32"), "batch_size is 0; expected an integer of at least 1"),
        ((1, -1, 4, "float32"), "len is -1"),
        ((1, 2.5, 4, "float32"), "len is 2.5"),
        ((1, 3, True, "float32"), "hidden_size is True"),
        ((1, 3, 4, "int32"), "dtype is torch.int32; expected a floating-point dtype"),
    ],
)
@pytest.mark.parametrize(
    "create", [create_prefill_inputs, create_decode_inputs_with_cache, create_decode_inputs_without_cache]
)
def test_bad_inputs(create, arguments, match):
    with pytest.raises(InvalidInputError, match=match):
        create(*arguments[:3], getattr(torch, arguments[3]), "cpu")
    with pytest.raises(InvalidInputError, match="dtype is 'float32'"):
        create(1, 2, 4, "float32", "cpu")


@pytest.mark.parametrize("index", TYPES)
def test_position_embeddings(net, index):
    positions = torch.tensor([[0, 1, 5], [2, 3, 4]])
    cos, sin = embeddings(net, states(1), positions, index)
    theta = {SLIDING: 10_000.0, FULL: 1_000_000.0}[index]
    angle = positions[..., None] / theta ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(cos, torch.cat([angle, angle], -1).cos().double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, torch.cat([angle, angle], -1).sin().double(), rtol=0, atol=1e-6)


def test_bad_position_embeddings(net):
    positions = torch.arange(3)[None]
    with pytest.raises(InvalidInputError, match=r"layer_type is 'global'; this rotary_emb knows full_attention"):
        get_position_embeddings(states(3), positions, net.rotary_emb, "global")
    with pytest.raises(InvalidInputError, match=r"position_ids has the shape \(3,\)"):
        get_position_embeddings(states(3), positions[0], net.rotary_emb, "full_attention")
    with pytest.raises(InvalidInputError, match="position_ids is None; expected a torch tensor"):
        get_position_embeddings(states(3), None, net.rotary_emb, "full_attention")
    with pytest.raises(InvalidInputError, match="hidden_states is None; expected a torch tensor"):
        get_position_embeddings(None, positions, net.rotary_emb, "full_attention")
    with pytest.raises(InvalidInputError, match="rotary_emb is None; expected a Gemma3RotaryEmbedding"):
        get_position_embeddings(states(3), positions, None, "full_attention")


def test_cache(net):
    cache = initialize_kv_cache(net.config, 20)
    assert isinstance(cache, transformers.StaticCache)
    assert [each.max_cache_len for each in cache.layers] == [8, 8, 8, 8, 8, 20, 8, 8]
    prefill(net, FULL, states(3, batch=3), cache)
    assert cache.layers[FULL].keys.shape == (3, 1, 20, 16)
    assert cache.layers[FULL].keys.dtype == torch.float64
    for length in (0, -1, 2.0, None):
        with pytest.raises(InvalidInputError, match=f"max_cache_len is {length}; expected an integer"):
            initialize_kv_cache(net.config, length)
    with pytest.raises(InvalidInputError, match="config is None; expected a transformers config"):
        initialize_kv_cache(None, 4)


# --- agreement ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [WINDOW + 1, *[pytest.param(n, marks=slow) for n in (1, WINDOW - 1, WINDOW, 19)]])
@pytest.mark.parametrize("index", TYPES)
def test_one_layer(net, index, length):
    tokens, cache = states(length + 4), cache_of(net)
    expected = by_hand(net, index, tokens)
    close(prefill(net, index, tokens, None), expected)
    close(prefill(net, index, tokens[:, :length], cache), expected[:, :length])
    for at in range(length, length + 4):
        token = tokens[:, at : at + 1]
        close(decode(net, index, token, at, cache), expected[:, at : at + 1])
        close(decode_again(net, index, token, tokens[:, :at]), expected[:, : at + 1])


@pytest.mark.parametrize("length", [WINDOW - 1, *[pytest.param(n, marks=slow) for n in (1, WINDOW, WINDOW + 1, 19)]])
@pytest.mark.parametrize("passes", [3, *[pytest.param(n, marks=slow) for n in (1, LAYERS)]])
@pytest.mark.parametrize("index", TYPES)
def test_many_layers(net, index, passes, length):
    tokens, cache = states(length + 4), cache_of(net)
    expected = tokens
    for _ in range(passes):
        expected = by_hand(net, index, expected)
    close(prefill(net, index, tokens, None, passes), expected)
    close(prefill(net, index, tokens[:, :length], cache, passes), expected[:, :length])
    for at in range(length, length + 4):
        token = tokens[:, at : at + 1]
        close(decode(net, index, token, at, cache, passes), expected[:, at : at + 1])
        close(decode_again(net, index, token, tokens[:, :at], passes), expected[:, : at + 1])
    assert net.layers[index].self_attn.layer_idx == index


@pytest.mark.parametrize("length", [5, 13])
def test_layers_compose_to_the_model(net, length):
    """Different layers of both types, one cache: what the model's own forward gives."""
    tokens, cache, total = states(length + 3), cache_of(net), length + 3
    expected = net(inputs_embeds=tokens, use_cache=False).last_hidden_state

    def step(run, chunk, positions):
        by_type = {TYPES[index]: embeddings(net, chunk, positions, index) for index in TYPES}
        for layer in net.layers:
            chunk = run(layer, chunk, positions, by_type)
        return net.norm(chunk)

    def with_cache(layer, chunk, positions, by_type):
        if positions[0, 0] == 0:
            return prefill_forward(layer, chunk, positions, by_type, cache)
        return decode_forward(layer, chunk, positions, by_type, True, cache, positions[0], None)

    def without_cache(layer, chunk, positions, by_type):
        return decode_forward(layer, chunk[:, -1:], positions, by_type, False, None, None, chunk[:, :-1])

    close(step(with_cache, tokens[:, :length], torch.arange(length)[None]), expected[:, :length])
    for at in range(length, total):
        close(step(with_cache, tokens[:, at : at + 1], torch.tensor([[at]])), expected[:, at : at + 1])
    close(step(without_cache, tokens, torch.arange(total)[None]), expected)


@pytest.mark.parametrize("index", TYPES)
@pytest.mark.parametrize("cut", [3, pytest.param(WINDOW, marks=slow), 11])
def test_prefill_in_pieces(net, index, cut):
    tokens, cache = states(17), cache_of(net, 17)
    pieces = [prefill(net, index, tokens[:, :cut], cache, 3), prefill(net, index, tokens[:, cut:], cache, 3, cut)]
    close(torch.cat(pieces, 1), prefill(net, index, tokens, None, 3))


@pytest.mark.parametrize("length", [WINDOW, *[pytest.param(n, marks=slow) for n in (WINDOW - 2, WINDOW - 1, 12)]])
@pytest.mark.parametrize("index", TYPES)
def test_repeating_a_call_changes_nothing(net, index, length):
    """As when it is timed: the same positions are written again."""
    tokens, cache = states(length + 2), cache_of(net, length + 2)
    other = states(length + 2, seed=2)
    expected = prefill(net, index, tokens, None, 3)
    prefill(net, index, other, cache, 3)
    for _ in range(3):
        close(prefill(net, index, tokens[:, :length], cache, 3), expected[:, :length])
    for at in (length, length + 1):
        decode(net, index, other[:, at : at + 1], at, cache, 3)
        for _ in range(3):
            close(decode(net, index, tokens[:, at : at + 1], at, cache, 3), expected[:, at : at + 1])


def test_each_pass_has_its_own_cache_layer(net):
    cache = cache_of(net)
    prefill(net, SLIDING, states(4), cache, 3)
    assert [each.is_initialized for each in cache.layers] == [True] * 3 + [False] * 5
    assert not torch.equal(cache.layers[0].keys, cache.layers[1].keys)


def test_a_full_layer_makes_room_in_sliding_cache_layers(net):
    cache = cache_of(net, 20)
    prefill(net, FULL, states(4), cache, 3)
    assert [each.max_cache_len for each in cache.layers] == [20, 20, 20, 8, 8, 20, 8, 8]
    filled = cache_of(net, 20)
    prefill(net, SLIDING, states(4), filled)
    net.layers[FULL].self_attn.layer_idx = SLIDING
    try:
        prefill(net, FULL, states(4), filled, start=4)  # up to here nothing is lost
        with pytest.raises(InvalidInputError, match=r"layer 0 has room for 8 positions; .* filled from position 0"):
            prefill(net, FULL, states(4), filled, start=8)
    finally:
        net.layers[FULL].self_attn.layer_idx = FULL


def test_the_cache_is_not_touched_without_its_use(net):
    cache, tokens = cache_of(net), states(6)
    positions = torch.arange(6)[None]
    pair = embeddings(net, tokens, positions, SLIDING)
    rest = net.layers[SLIDING], tokens[:, 5:], positions, pair, False, cache, torch.tensor([5]), tokens[:, :5]
    close(decode_forward(*rest), by_hand(net, SLIDING, tokens))
    assert not cache.layers[SLIDING].is_initialized


@pytest.mark.parametrize("index", TYPES)
def test_gradients_flow(net, index):
    tokens = states(11).requires_grad_()
    decode_again(net, index, tokens[:, 10:], tokens[:, :10], 2)[:, -1].sum().backward()
    found, tokens.grad = tokens.grad, None
    by_hand(net, index, by_hand(net, index, tokens))[:, -1].sum().backward()
    torch.testing.assert_close(found, tokens.grad, rtol=1e-4, atol=1e-4)
    assert found[:, :10].abs().max() > 1e-3

    cache = cache_of(net)
    for _ in range(2):  # the second prefill must not reach into the first one's graph
        tokens.grad = None
        prefill(net, index, tokens, cache, 2)[:, -1].sum().backward()
    torch.testing.assert_close(tokens.grad, found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("index", TYPES)
def test_bfloat16(net, index):
    layer = gemma3.Gemma3DecoderLayer(net.config, index)
    layer.load_state_dict(net.layers[index].state_dict())
    layer.requires_grad_(False).bfloat16()
    tokens, cache = states(12).bfloat16(), cache_of(net)
    positions = torch.arange(12)[None]
    pair = embeddings(net, tokens, positions, index)
    outputs = [prefill_forward(layer, tokens[:, :11], positions[:, :11], [each[:, :11] for each in pair], cache)]
    last = [each[:, 11:] for each in pair]
    outputs.append(decode_forward(layer, tokens[:, 11:], positions[:, 11:], last, True, cache, positions[0, 11:], None))
    assert all(output.dtype == torch.bfloat16 for output in outputs)
    torch.testing.assert_close(torch.cat(outputs, 1).double(), by_hand(net, index, states(12)), rtol=0.05, atol=0.1)


# --- what a call costs --------------------------------------------------------------------------------------


def operations(run):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return {event.key.removeprefix("aten::"): event.count for event in profile.key_averages()}


@pytest.mark.parametrize("index", [SLIDING, pytest.param(FULL, marks=slow)])
def test_decoding_reads_nothing_from_the_device(net, index):
    """On an accelerator each of these would wait for it, and the counts of the cache layers would be a kernel each."""
    tokens, cache = states(7), cache_of(net)
    prefill(net, index, tokens[:, :5], cache, LAYERS)
    setting = []
    for at in (5, 6, 6):
        counts = operations(lambda at=at: decode(net, index, tokens[:, at : at + 1], at, cache, LAYERS))
        assert {"_local_scalar_dense", "item", "is_nonzero"}.isdisjoint(counts)
        setting.append(counts.get("_foreach_copy_", 0))
    in_tensors = isinstance(getattr(cache.layers[0], "cumulative_length", None), torch.Tensor)
    assert setting == ([0, 0, 1] if in_tensors else [0, 0, 0])


@needs_torch
def test_notes_are_of_one_tensor_as_it_is():
    tensor = torch.arange(3)
    notes.notes_of(tensor)["first"] = 0
    assert notes.notes_of(tensor) == {"first": 0}
    assert notes.notes_of(tensor.clone()) == {}
    key, before = id(tensor), len(notes._noted)
    assert key in notes._noted
    tensor += 1
    assert notes.notes_of(tensor) == {}
    assert len(notes._noted) == before
    del tensor
    gc.collect()
    assert key not in notes._noted
    with torch.inference_mode():
        untold = torch.arange(3)
    notes.notes_of(untold)["first"] = 0
    assert notes.notes_of(untold) == {}


@needs_torch
def test_positions_on_an_accelerator_are_read_once(monkeypatch):
    class Far(torch.Tensor):
        device = torch.device("cuda")

    reads = []
    monkeypatch.setattr(positions, "_read_first", lambda torch, tensor: reads.append(1) or tensor.tolist()[0][0])
    far = torch.tensor([[4]]).as_subclass(Far)
    assert [positions.first_of_consecutive(torch, "position_ids", far) for _ in range(3)] == [4, 4, 4]
    assert len(reads) == 1
    far += 1
    assert positions.first_of_consecutive(torch, "position_ids", far) == 5
    assert len(reads) == 2


def test_a_mask_is_made_once_for_all_layers_of_a_step(net, monkeypatch):
    made, new_mask = [], masks._new_mask
    monkeypatch.setattr(masks, "_new_mask", lambda *args: made.append(1) or new_mask(*args))
    tokens, cache, positions = states(6), cache_of(net), torch.tensor([[5]])
    by_type = {TYPES[index]: embeddings(net, tokens, positions, index) for index in TYPES}
    first = torch.arange(5)[None]
    for layer in net.layers:
        prefill_forward(
            layer, tokens[:, :5], first, {TYPES[i]: embeddings(net, tokens, first, i) for i in TYPES}, cache
        )
    made.clear()
    for _ in range(2):
        for layer in net.layers:
            decode_forward(layer, tokens[:, 5:], positions, by_type, True, cache, 5, None)
    assert len(made) == 2  # one for either type of layer
    monkeypatch.setattr(masks, "LARGEST_KEPT", 7)
    fresh = torch.tensor([[5]])
    for _ in range(2):
        decode_forward(net.layers[SLIDING], tokens[:, 5:], fresh, by_type, True, cache, 5, None)
    assert len(made) == 4  # too large to keep


@pytest.mark.parametrize("index", TYPES)
@pytest.mark.parametrize("shared", [False, True])
def test_positions_that_are_changed_in_place(net, index, shared):
    """The same tensors in each step, advanced by torch or, in the memory that they share, by numpy."""
    tokens, cache = states(14), cache_of(net)
    expected = by_hand(net, index, tokens)
    prefill(net, index, tokens[:, :5], cache)
    ids, slots = np.array([[5]]), np.array([5])
    positions, cache_positions = torch.from_numpy(ids), torch.from_numpy(slots)
    for at in range(5, 14):
        token = tokens[:, at : at + 1]
        rest = token, positions, embeddings(net, token, positions, index), True, cache, cache_positions, None
        close(decode_forward(net.layers[index], *rest), expected[:, at : at + 1])
        for array in (ids, slots) if shared else (positions, cache_positions):
            array += 1


@pytest.mark.parametrize("index", TYPES)
def test_a_cache_that_others_write_to(net, index):
    tokens, cache = states(7), cache_of(net)
    expected = by_hand(net, index, tokens)
    prefill(net, index, tokens[:, :5], cache)
    cache.reset()
    with pytest.raises(InvalidInputError, match=f"start at 5, and cache layer {index} holds 0 positions"):
        decode(net, index, tokens[:, 5:6], 5, cache)
    prefill(net, index, tokens[:, :5], cache)
    close(decode(net, index, tokens[:, 5:6], 5, cache), expected[:, 5:6])
    with pytest.raises(InvalidInputError, match=f"start at 7, and cache layer {index} holds 6 positions"):
        decode(net, index, tokens[:, 6:], 7, cache)


@pytest.mark.parametrize("index", TYPES)
def test_gradients_flow_after_inference_with_the_same_positions(net, index):
    """A mask made in inference mode could not be saved for the backward pass."""
    tokens, positions = states(11), torch.arange(11)[None]
    pair = embeddings(net, tokens, positions, index)
    with torch.inference_mode():
        expected = prefill_forward(net.layers[index], tokens, positions, pair, None)
    output = prefill_forward(net.layers[index], tokens.requires_grad_(), positions, pair, None)
    output.sum().backward()
    close(output.detach(), expected.clone())
    assert tokens.grad.abs().max() > 1e-3


@pytest.mark.parametrize("index", TYPES)
def test_inference_mode(net, index):
    with torch.inference_mode():
        tokens, cache = states(12), cache_of(net)
        expected = by_hand(net, index, tokens)
        close(prefill(net, index, tokens[:, :6], cache), expected[:, :6])
        for at in (6, 7, 7, 8, 9, 10, 11, 11):
            close(decode(net, index, tokens[:, at : at + 1], at, cache), expected[:, at : at + 1])


@pytest.mark.parametrize("index", TYPES)
def test_ways_to_write_the_cache_position(net, index):
    tokens, cache = states(7), cache_of(net)
    expected = by_hand(net, index, tokens)[:, 6:]
    prefill(net, index, tokens[:, :6], cache)
    positions = torch.tensor([[6]])
    pair = embeddings(net, tokens, positions, index)
    for given in (6, np.int64(6), *map(torch.tensor, (6, [6], [[6]], [[6], [6]]))):
        rest = tokens[:, 6:], positions, pair, True, cache, given, None
        close(decode_forward(net.layers[index], *rest), expected)


# --- bad input ----------------------------------------------------------------------------------------------


def test_the_layer_keeps_its_index_when_a_pass_fails(net):
    layer, calls = net.layers[FULL], []

    def fail(module, arguments):
        calls.append(module.self_attn.layer_idx)
        if len(calls) == 2:
            raise RuntimeError("no more")

    with layer.register_forward_pre_hook(fail), pytest.raises(RuntimeError, match="no more"):
        prefill(net, FULL, states(3), cache_of(net), 3)
    assert calls == [0, 1]
    assert layer.self_attn.layer_idx == FULL


def prefill_with(net, **changes):
    hidden, positions = states(4), torch.arange(4)[None]
    arguments = {
        "layer": net.layers[SLIDING],
        "hidden_states": hidden,
        "position_ids": positions,
        "position_embeddings": embeddings(net, hidden, positions, SLIDING),
        "past_key_values": cache_of(net),
    }
    return prefill_forward(**arguments | changes)


def test_bad_prefill(net):
    hidden, positions = states(4), torch.arange(4)[None]
    pair = embeddings(net, hidden, positions, SLIDING)
    cases = [
        ({"layer": None}, "layer is None; expected a Gemma3DecoderLayer"),
        (
            {"hidden_states": hidden[0]},
            r"hidden_states has the shape \(4, 64\); expected \[batch ≥ 1, length ≥ 1, 64\]",
        ),
        ({"hidden_states": hidden[..., :32]}, r"hidden_states has the shape \(2, 4, 32\)"),
        ({"hidden_states": hidden[:, :0]}, r"hidden_states has the shape \(2, 0, 64\)"),
        ({"position_ids": positions[:, :3]}, r"position_ids has the shape \(1, 3\); expected \[2, 4\]"),
        ({"position_ids": positions.repeat(3, 1)}, r"position_ids has the shape \(3, 4\); expected \[2, 4\]"),
        ({"position_ids": positions * 2}, r"position_ids is \[\[0, 2, 4, 6\]\]; expected consecutive"),
        ({"position_ids": torch.stack([positions[0], positions[0] + 1])}, "alike in all rows"),
        ({"position_ids": positions - 1}, "expected consecutive"),
        ({"position_ids": positions + 2}, "start at 2, and cache layer 0 holds 0 positions; run prefill_forward"),
        ({"position_embeddings": pair[0]}, r"position_embeddings is of type Tensor; expected \(cos, sin\)"),
        ({"position_embeddings": (pair[0], pair[1][:, :3])}, r"sin of position_embeddings has the shape \(1, 3, 16\)"),
        ({"position_embeddings": (pair[0], None)}, "sin of position_embeddings is None; expected a torch tensor"),
        ({"hidden_states": None}, "hidden_states is None; expected a torch tensor"),
        ({"hidden_states": hidden.numpy()}, "hidden_states is of type ndarray; expected a torch tensor"),
        ({"hidden_states": hidden[:0]}, r"hidden_states has the shape \(0, 4, 64\); expected \[batch ≥ 1"),
        ({"position_ids": None}, "position_ids is None; expected a torch tensor"),
        ({"position_ids": positions.double()}, "position_ids is of torch.float64; expected integers"),
        ({"position_embeddings": {"full_attention": pair}}, "the layer needs 'sliding_attention'"),
        (
            {"past_key_values": transformers.DynamicCache()},
            "past_key_values is of type DynamicCache; expected the StaticC",
        ),
        (
            {"past_key_values": cache_of(net, 3)},
            r"reach 3, and cache layer 0 has room for 3 .* initialize_kv_cache\(config, 4\)",
        ),
    ]
    prefill_with(net)
    for changes, match in cases:
        with pytest.raises(InvalidInputError, match=match):
            prefill_with(net, **changes)


def test_bad_decode(net):
    tokens, cache = states(13), cache_of(net, 13)
    prefill(net, SLIDING, tokens, cache)
    positions = torch.tensor([[12]])
    good = {
        "layer": net.layers[SLIDING],
        "hidden_states": tokens[:, 12:],
        "position_ids": positions,
        "position_embeddings": embeddings(net, tokens, positions, SLIDING),
        "use_kv_cache": True,
        "past_key_values": cache,
        "cache_positions": torch.tensor([12]),
        "prefill_hidden_states": None,
    }
    decode_forward(**good)
    cases = [
        ({"past_key_values": None}, "past_key_values is None; it is needed with use_kv_cache=True"),
        ({"cache_positions": None}, "cache_positions is None; it is needed with use_kv_cache=True"),
        ({"cache_positions": torch.tensor([11])}, r"cache_positions is \[11\]; expected .* \[12\]"),
        ({"cache_positions": torch.tensor(11)}, r"cache_positions is 11; expected .* \[12\]"),
        ({"cache_positions": 11}, r"cache_positions is 11; expected .* \[12\]"),
        ({"cache_positions": torch.tensor([[12], [11]])}, r"cache_positions is \[\[12\], \[11\]\]; expected .* \[12\]"),
        ({"cache_positions": torch.tensor([12, 12])}, r"cache_positions is \[12, 12\]; expected .* \[12\]"),
        ({"cache_positions": torch.tensor([12, 13])}, r"cache_positions is \[12, 13\]; expected .* \[12\]"),
        ({"cache_positions": torch.tensor([12.0])}, "cache_positions is of torch.float32; expected integers"),
        ({"cache_positions": [12]}, r"cache_positions is \[12\]; expected a torch tensor \[1\], or an int\.$"),
        ({"cache_positions": np.array([12])}, r"cache_positions is of type ndarray; .*: pass torch.as_tensor\(cache_positions\)\.$"),
        ({"cache_positions": 2**70}, "cache_positions is 1180591620717411303424; expected the new"),
        ({"cache_positions": torch.empty(0, dtype=int)}, r"cache_positions is \[\]; expected the new"),
        ({"cache_positions": True}, r"cache_positions is True; expected a torch tensor \[1\], or an int\.$"),
        ({"hidden_states": None}, r"hidden_states is None; expected a torch tensor \[batch, length, 64\]\.$"),
        ({"hidden_states": tokens[:, 12:].numpy()}, r"hidden_states is of type ndarray; .*: pass torch.as_tensor\(hidden_states\)\.$"),
        ({"position_ids": None}, r"position_ids is None; expected a torch tensor \[2, 1\]\.$"),
        ({"position_ids": 12}, r"position_ids is 12; expected a torch tensor \[2, 1\]\.$"),
        ({"use_kv_cache": False, "prefill_hidden_states": tokens, "hidden_states": None}, "hidden_states is None; expected a"),
        ({"use_kv_cache": False, "prefill_hidden_states": tokens.numpy()}, "prefill_hidden_states is of type ndarray; expected"),
        ({"use_kv_cache": False}, "prefill_hidden_states is None; without the cache"),
        ({"use_kv_cache": False, "prefill_hidden_states": tokens[:1]}, r"prefill_hidden_states has the shape \(1, 13, 64\)"),
        ({"use_kv_cache": False, "prefill_hidden_states": tokens[:, :12]}, r"position_ids has the shape \(1, 1\); expected \[2, 13\]"),
        ({"hidden_states": tokens[:1, 12:]}, "batch 1 of torch.float64 on cpu, and cache layer 0 began with batch 2 of"),
        ({"hidden_states": tokens[:, 12:].float()}, "use a new cache"),
    ]  # fmt: skip
    for changes, match in cases:
        with pytest.raises(InvalidInputError, match=match):
            decode_forward(**good | changes)
    with pytest.raises(InvalidInputError, match="start at 5, and cache layer 0 keeps only the last 8 of 13 positions"):
        decode(net, SLIDING, tokens[:, 5:6], 5, cache)
    with pytest.raises(InvalidInputError, match="reach 13, and cache layer 0 has room for 13 positions"):
        decode(net, SLIDING, tokens[:, :1], 13, cache)


def test_bad_number_of_layers(net):
    for passes in (0, -1, 1.5, True):
        with pytest.raises(InvalidInputError, match=f"num_layers is {passes}; expected an integer of at least 1"):
            prefill(net, SLIDING, states(3), None, passes)
        with pytest.raises(InvalidInputError, match=f"num_layers is {passes}; expected an integer of at least 1"):
            decode(net, SLIDING, states(1), 0, cache_of(net), passes)
    cache = cache_of(net)
    with pytest.raises(InvalidInputError, match="need cache layer 8, and past_key_values has 8"):
        prefill(net, SLIDING, states(3), cache, LAYERS + 1)
    assert not any(each.is_initialized for each in cache.layers)
    close(
        prefill(net, SLIDING, states(3), None, LAYERS + 1)[:, :1],
        prefill(net, SLIDING, states(3)[:, :1], None, LAYERS + 1),
    )


def test_a_cache_of_sliding_layers_alone_is_too_narrow_for_a_full_one(net):
    config = transformers.Gemma3TextConfig(**net.config.to_dict() | {"layer_types": ["sliding_attention"] * LAYERS})
    cache = initialize_kv_cache(config, 32)
    with pytest.raises(InvalidInputError, match=r"room for 8 positions; .* a config that has layers of this type"):
        prefill(net, FULL, states(9), cache)
    close(prefill(net, FULL, states(8), cache), by_hand(net, FULL, states(8)))
    close(prefill(net, SLIDING, states(40), cache), by_hand(net, SLIDING, states(40)))


def test_a_cache_with_a_narrower_window_than_the_layer_is_widened(net):
    config = transformers.Gemma3TextConfig(**net.config.to_dict() | {"sliding_window": 4})
    cache = initialize_kv_cache(config, 20)
    expected = by_hand(net, SLIDING, states(20))
    close(prefill(net, SLIDING, states(20)[:, :18], cache), expected[:, :18])
    close(decode(net, SLIDING, states(20)[:, 18:19], 18, cache), expected[:, 18:19])


def test_attention_that_cannot_be_masked(net, monkeypatch):
    monkeypatch.setattr(net.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(InvalidInputError, match="attention is 'flash_attention_2'; expected 'eager' or 'sdpa'"):
        prefill_with(net)
    monkeypatch.undo()
    monkeypatch.setattr(net.layers[SLIDING].self_attn, "is_causal", False)
    with pytest.raises(InvalidInputError, match="bidirectional"):
        prefill_with(net)


@needs_torch
def test_the_documented_example_runs():
    if "layer_type" not in inspect.signature(gemma3.Gemma3RotaryEmbedding.forward).parameters:
        pytest.skip("before transformers 5 each layer type has a rotary embedding of its own")
    scope = {}
    exec(inspect.cleandoc(model.__doc__.partition("Example::")[2]), scope)
    assert scope["decoded"].shape == (1, 1, 640)
    assert scope["prefilled"].shape == (1, 16, 640)
