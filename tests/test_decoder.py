"""The decoder against `GPT.step`: on the CPU in Triton's interpreter, in float32; with TEST_GPU=1 on the GPU."""

import warnings
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from helpers import LLAMA  # noqa: E402
from numerics import Largest, relative_error  # noqa: E402
from test_kernels import DEVICE, DTYPES, GPU  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from sympow.attention import ATTENTIONS  # noqa: E402
from sympow.attention.operator import forms, memory  # noqa: E402
from sympow.attention import state as state_of  # noqa: E402
from sympow.attention.embedding import symmetric_power_embedding  # noqa: E402
from sympow.attention.softmax import softmax_attention  # noqa: E402
from sympow.attention.state import LayerState  # noqa: E402
from sympow import code  # noqa: E402
from sympow.generation import decoder as decoder_module  # noqa: E402
from sympow.generation import generate as generate_module  # noqa: E402
from sympow.generation import layers as layers_module  # noqa: E402
from sympow.generation.decoder import Decoder  # noqa: E402
from sympow.generation.generate import generate  # noqa: E402
from sympow.generation.steps import Sampler, read_prompt, sample_next_token  # noqa: E402
from sympow.kernels.decode import cache as decode_cache  # noqa: E402
from sympow.kernels.decode import power as decode  # noqa: E402
from sympow.kernels.decode import qkv as decode_qkv  # noqa: E402
from sympow.kernels.decode import sampling  # noqa: E402
from sympow.kernels.decode.linear import Linear, Norm, linear  # noqa: E402
from sympow.layers.activation import ACTIVATIONS
from sympow.model import GPT, GPTConfig  # noqa: E402

pytestmark = pytest.mark.usefixtures("layer_norms")
GPT2 = dict(p=2, bias=True, embedding_norm=False, activation="gelu_tanh")


def tiny(**kwargs):
    torch.manual_seed(0)
    sizes = dict(vocab_size=40, n_layer=2, n_head=2, n_embd=32, gate_bias=2.0)
    model = GPT(GPTConfig(**{**sizes, **kwargs})).eval()
    for name, p in model.named_parameters():
        if p.dim() > 1 or name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.2)
        elif "_norm" in name:
            torch.nn.init.normal_(p, mean=1, std=0.2)
    return model.to(DEVICE)  # drawn on the CPU, so that a GPU compares the same models


def start(model, B, max_new_tokens, switch_over=None, n=4):
    """Read a prompt of n tokens; return (its state, a greedy decoder that goes on from it)."""
    prompt = torch.randint(4, 40, (B, n), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    prompt[0, 2] = 3
    logits, state = model.read(prompt, model.empty_state(B, switch_over))
    decoder = Decoder(model, state, Sampler(torch.device(DEVICE), B, temperature=0), max_new_tokens)
    decoder.ids.copy_(logits.argmax(-1))
    return state, decoder


def assert_unchanged(state, saved):
    for part, copy in zip(state.parts().values(), saved.parts().values()):
        assert all(torch.equal(x, copy.tensors()[name]) for name, x in part.tensors().items())


def step_both(model, state, decoder, steps=1, tolerance=1e-5):
    """Read tokens in the model and in the decoder, whose logits must agree; return the model's state."""
    for i in range(steps):
        logits, state = model.step(decoder.ids.clone(), state)
        decoder.step()
        assert (decoder.logits - logits).norm() < tolerance * logits.norm(), i
        assert torch.equal(decoder.ids, logits.argmax(-1))
    return state


# attention of each layer, other settings, switch_over of each layer
MIXES = {
    "gated": ("sympow_gating", dict(n_layer=2), [6, 6]),
    "gated, always a state": ("sympow_gating", {}, ["always"]),
    "conformal, one key head, biases": ("conformal_sympow", dict(n_kv_head=1, bias=True), [6]),
    "conformal, always a state": ("conformal_sympow", dict(n_layer=2), ["always", "always"]),
    "conformal, fixed gates": ("conformal_sympow", dict(gate="fixed"), [6]),
    "p=4, resets": ("sympow", dict(n_layer=2, p=4, reset_token=3), None),
    "even power 6": ("even_power", dict(p=6), None),
    "positions in turn": ("sympow_gating", dict(n_layer=2, positions="none,rotary", n_kv_head=1, bias=True), [6, 6]),
    "a convolution, resets": ("sympow_gating", dict(convolution=3, output_gate=False, reset_token=3), [6]),
    "softmax": ("softmax", dict(n_kv_head=1, bias=True, reset_token=3), None),
    "softmax in a window": ("softmax", dict(window=5, n_kv_head=1, reset_token=3), None),
    "a hybrid in a window": ("sympow_gating,softmax", dict(window=2), [6, 2]),
    "GPT-2": ("softmax", dict(positions="learned", **GPT2), None),
    "GPT-2, converted": ("sympow_gating", dict(positions="learned", reset_token=3, **GPT2), [6]),
    "heinsen, signed values, resets": ("heinsen", dict(n_kv_head=1, bias=True, reset_token=3), None),
    "heinsen, log values": ("heinsen", dict(values="log"), None),
    "three": ("sympow_gating,softmax,heinsen", dict(n_kv_head=1, reset_token=3), [6, "never", None]),
    "flushes at different times": ("sympow,sympow_gating", {}, [5, 7]),
    "power with and without a state": ("sympow,even_power", {}, [6, "never"]),
    "Qwen3, a convolution": ("softmax", dict(convolution=3, n_kv_head=1, **LLAMA), None),
    "Llama, converted": ("sympow_gating", dict(positions="rotary", embedding_norm=True, **LLAMA), [6]),
    "Llama, heinsen": ("heinsen", LLAMA, None),
}


@pytest.mark.parametrize("name", MIXES)
@torch.inference_mode()
def test_layers_of_any_attentions_stand_side_by_side(name, monkeypatch):
    """Tokens are the model's, for two samples of each sequence, and the state that was given does not change.

    They are cached, flushed into a first state, cached behind it and flushed again; or always flushed.
    """
    monkeypatch.setattr(state_of, "FLUSH_EVERY", 2)
    monkeypatch.setattr(state_of, "WINDOW_SPARE", 2)
    pattern, settings, limits = MIXES[name]
    B = 2 if pattern == "softmax" or GPU else 1
    model = tiny(**dict(attention=pattern, n_layer=pattern.count(",") + 1) | settings)
    state = model.empty_state(B, "always" if limits and "always" in limits else None)
    for layer, limit in zip(state.layers, limits or ()):
        if isinstance(layer, LayerState) and limit != "always":
            layer.switch_over = limit
    logits, state = model.read(torch.tensor([[5, 6, 3, 7], [8, 9, 10, 11]][:B], device=DEVICE), state)
    saved = state.map(torch.clone)
    decoder = Decoder(model, state, Sampler(torch.device(DEVICE), 2 * B, temperature=0), 5, num_samples=2)
    assert_unchanged(state, saved)
    state, logits = state.repeat(2), logits.repeat_interleave(2, 0)
    decoder.ids.copy_(logits.argmax(-1))
    for i in range(5):
        decoder.ids[0], decoder.ids[1] = 20, 3 if i == 1 else 21  # the samples of one prompt go apart
        state = step_both(model, state, decoder)
    assert decoder.bytes() > 0
    assert limits is None or decoder.layers[0].power is not None


@pytest.mark.parametrize("settings", [dict(attention="sympow_gating"), dict(attention="softmax", window=3)])
@torch.inference_mode()
def test_no_token_waits_for_the_flushes_of_all_layers(settings, monkeypatch):
    """Four layers flush at different ones of each four tokens, whatever the prompt left in their caches."""
    monkeypatch.setattr(state_of, "FLUSH_EVERY", 4)
    monkeypatch.setattr(state_of, "WINDOW_SPARE", 4)
    model = tiny(n_layer=4, **settings)
    ids = torch.arange(6, device=DEVICE)[None]
    _, state = model.read(ids, model.empty_state(1, "always"))
    for layer in state.layers:
        layer.switch_over = "never"  # but for the state that is there
    decoder = Decoder(model, state, Sampler(torch.device(DEVICE), 1, temperature=0), 14)
    for i in range(13):
        before = [layer.cached for layer in decoder.layers]
        decoder.step()
        flushed = [layer.cached <= cached for layer, cached in zip(decoder.layers, before)]
        assert sum(flushed) == 1 or i < 4 and sum(flushed) < 2


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("attention", ["sympow_gating", "softmax", "heinsen"])
@torch.inference_mode()
def test_convolutions_and_output_gates_are_part_of_the_kernels_of_a_layer(attention, B):
    model = tiny(attention=attention, convolution=4, output_gate=True, n_kv_head=1, reset_token=3, bias=True)
    for block in model.transformer.h:
        block.attn.output_gate.weight.normal_(mean=1, std=0.2)
    state, decoder = start(model, B, 8)
    for i in range(7):
        decoder.ids[0] = 3 if i == 4 else 20
        state = step_both(model, state, decoder)


@torch.inference_mode()
def test_a_window_longer_than_the_text_takes_no_more_room_than_the_text():
    model = tiny(attention="softmax", window=10**6)
    state, decoder = start(model, 2, 8)
    assert decoder.layers[0].cache.k.shape[1] == 4 + 8 + state_of.WINDOW_SPARE
    step_both(model, state, decoder, 8)


@pytest.mark.parametrize("parts", [1, 3])
@torch.inference_mode()
def test_softmax_in_parts_and_tiles_is_neutral_to_the_size_of_scores(parts, monkeypatch):
    """Scores differ by hundreds, and the largest are in one of three tiles of 64 tokens, each of them a part or not."""
    monkeypatch.setattr(decode_cache, "parts_of_cache", lambda heads, C: parts)
    model = tiny(attention="softmax", n_layer=1, n_embd=16, head_dim=16, n_kv_head=1)
    model.transformer.h[0].attn.c_attn.weight.mul_(12)
    state, decoder = start(model, 3, 3, n=150)  # in some of these the largest score comes after others of its row
    scores = state.layers[0].k[0, :, 0] @ state.layers[0].k[0, :, 0].t() / 4
    assert scores.max() > 200
    step_both(model, state, decoder, 2, 1e-4)


@pytest.mark.parametrize("values", ["signed", "log"])
@torch.inference_mode()
def test_heinsens_state_is_neutral_to_the_size_of_keys(values):
    """Keys of up to 80 grow from token to token and shrink again."""
    model = tiny(attention="heinsen", n_layer=1, values=values)
    state, decoder = start(model, 2, 5)
    attn, size = model.transformer.h[0].attn, torch.tensor([1.0, 80.0, 8.0, 40.0])
    weight = attn.c_attn.weight.clone()
    for i in range(4):
        decoder.weights[0].qkv.weight[32:64] = attn.c_attn.weight[32:64] = weight[32:64] * size[i]
        state = step_both(model, state, decoder, 1, 1e-4)
    assert state.layers[0].m.max() > 40
    if values == "log":
        decoder.weights[0].qkv.weight[64:].mul_(1000)
        decoder.step()
        assert decoder.logits.isnan().all()  # beyond the bound of log values


@pytest.mark.parametrize(
    "attention,place", [("sympow", "keys"), ("sympow", "S"), ("softmax", "keys"), ("heinsen", "S")]
)
@torch.inference_mode()
def test_nan_in_a_sequences_state_comes_out_as_nan_and_stays_there(attention, place):
    logits = []
    for value in (0.5, float("nan")):
        _, decoder = start(tiny(attention=attention), 2, 2, "always" if place == "S" else None)
        layer = decoder.layers[0]
        S = layer.state[1] if attention == "heinsen" else layer.power and layer.power[0]
        (S if place == "S" else layer.cache[0])[0, 1, :, 0] = value
        decoder.step()
        logits.append(decoder.logits.clone())
    clean, damaged = logits
    assert damaged[0].isnan().all() and torch.equal(damaged[1], clean[1])


@torch.inference_mode()
def test_features_of_more_than_four_indices_are_told_apart():
    model = tiny(attention="sympow", p=6, n_layer=1, n_head=1, n_embd=16, head_dim=16 if GPU else 8)
    state, decoder = start(model, 1, 3, 5)
    step_both(model, state, decoder, 3, 1e-3)  # the first flushes
    assert decoder.layers[0].power


@pytest.mark.parametrize("D,p", [(16, 2), (32, 2), (64, 2), (16, 4), (32, 4), (4, 6), (3, 8)])
def test_coefficients_are_the_embeddings_to_the_bit(D, p):
    packed, coefficients = decode.features(D, p, torch.device("cpu"))
    ones, x = torch.ones(D, dtype=torch.float64), torch.rand(D, dtype=torch.float64) + 0.5
    assert torch.equal(coefficients, symmetric_power_embedding(ones, p).float())
    features = symmetric_power_embedding(ones, p)
    for i in range(p):
        features = features * x[(packed >> 8 * i) & 255]
    assert torch.allclose(features, symmetric_power_embedding(x, p), rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B", [1, 2, 33, 64, 100] if GPU else [33])
def test_a_linear_layer_of_many_sequences_equals_float64(B, dtype):
    N, K = (2304, 768) if GPU else (40, 72)
    weight, bias, norm, x = (torch.randn(*shape, device=DEVICE) for shape in ((N, K), (N,), (2, K), (B, K)))
    weight, out = (weight * K**-0.5).to(dtype), torch.randn(B, N, device=DEVICE)
    normal = F.layer_norm(x.double(), (K,), *norm.double()).to(dtype).double()
    expected = out + F.gelu(F.linear(normal, weight.double(), bias.double()))
    linear(Linear(weight, bias, Norm(*norm)), out, x, gelu=1, add=True)
    assert relative_error(out, expected, 1e-6) < (1e-5 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [2, 4])
def test_caches_of_many_sequences_are_flushed_into_their_states(p, dtype):
    B, tokens, D = (64, 70, 64 if p == 2 else 16) if GPU else (2, 19, 16)
    k, v = (torch.randn(B, tokens + 3, 2, D, device=DEVICE).to(dtype) for _ in range(2))
    log_g = F.logsigmoid(torch.randn(B, tokens + 3, 2, device=DEVICE, dtype=torch.float64) + 4)
    cache = decode_cache.Cache(k, v, log_g.cumsum(1), torch.zeros_like(log_g, dtype=torch.int32), None)
    earlier = forms.flush(*(torch.randn(B, 9, 2, D, device=DEVICE) for _ in range(2)), None, None, p=p)
    state = forms.PowerState(*(x.double() for x in earlier))
    expected = forms.flush(*(x[:, :tokens].double() for x in (k, v, log_g)), state, p=p)
    state = decode.State(*(x.clone() for x in earlier))
    decode.flush(cache, tokens, state, p)
    for x, exact in zip(state, expected):
        assert relative_error(x, exact, 1e-6) < 1e-5


def test_a_state_beyond_32_bits_is_refused():
    with pytest.raises(ValueError, match="p=6 and head dimension 64 has 7,672,158,208 numbers a head"):
        decode.features(64, 6, torch.device("cpu"))


@torch.inference_mode()
def test_the_state_is_counted():
    """Two layers; for two sequences and heads, 9 tokens of 16: keys, values and the gates' sums; counters."""
    _, decoder = start(tiny(attention="sympow_gating", convolution=0), 2, 5)
    assert decoder.bytes() == 2 * (2 * 2 * 9 * (2 * 16 * 4 + 12) + 2 * 8)


@torch.inference_mode()
def test_states_in_bfloat16_are_rounded_when_flushed():
    model = tiny(attention="sympow_gating")
    state, exact = start(model, 2, 3, 5)
    sampler = Sampler(torch.device(DEVICE), 2, temperature=0)
    decoder = Decoder(model, state, sampler, 3, state_dtype=torch.bfloat16)
    decoder.ids.copy_(exact.ids)
    for _ in range(2):
        exact.step()
        decoder.step()
    S, z = (decoder.layers[1].power[i].float() - exact.layers[1].power[i] for i in range(2))
    assert decoder.layers[1].power[0].dtype == torch.bfloat16 and decoder.bytes() < exact.bytes()
    assert 0 < S.norm() < 2**-8 * exact.layers[1].power[0].norm() and z.norm() == 0
    assert 0 < (decoder.logits - exact.logits).norm() < 2e-2 * exact.logits.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@torch.inference_mode()
def test_in_bfloat16_logits_are_the_parallel_forwards():
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=256, attention="conformal_sympow", p=2)).eval().to(DEVICE)
    ids = torch.randint(50257, (1, 5000), device=DEVICE)
    with torch.autocast("cuda", torch.bfloat16):
        expected = model(ids)[0][0].float()
        logits, state = model.read(ids[:, :4000], model.empty_state(1))
    decoder = Decoder(model, state, Sampler(torch.device(DEVICE), temperature=0), 1000, torch.bfloat16)
    for i in range(4000, 4999):
        decoder.ids[0] = ids[0, i]
        decoder.step()
        assert (decoder.logits[0] - expected[i]).norm() < 2e-2 * expected[i].norm(), i


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@torch.inference_mode()
def test_softmax_reads_a_piece_of_a_prompt_without_a_mask():
    q, k, v = (torch.randn(1, n, H, 64, device=DEVICE).bfloat16() for n, H in ((300, 4), (9000, 2), (9000, 2)))
    with Largest() as largest:
        y = softmax_attention(q, k, v)
    assert largest.entries <= k.numel()
    expected = softmax_attention(q.double(), k.double(), v.double())  # with a mask
    assert (y - expected).norm() < 1e-2 * expected.norm()


@torch.inference_mode()
def test_what_does_not_fit_is_refused_with_the_memory_of_layers_that_differ(monkeypatch):
    model = tiny(attention="sympow,softmax")
    token, power = 2 * (2 * 16 * 4 + 12), 2 * 136 * 17 * 4
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 * (power + 6 * token + 12 * token))
    start(model, 2, 8, 6)  # a state after 6 tokens in one layer, 12 tokens in the other
    for B, tokens, words in (
        (3, 8, rf"3 samples need .* mostly states of {power:,} bytes .* enough for 2: use fewer samples or tokens"),
        (9, 8, rf"9 samples need {9 * (power + 18 * token):,} bytes.* enough for 2: "),
        (2, 200, "mostly keys and values of"),
    ):
        with pytest.raises(MemoryError, match=words):
            start(model, B, tokens, 6)


@torch.inference_mode()
def test_gates_next_to_one_keep_their_digits():
    model = tiny(attention="sympow_gating", n_layer=1, gate_bias=16.0)
    state, decoder = start(model, 2, 3)
    state = step_both(model, state, decoder)
    log_g = decoder.layers[0].cache.gate_sums[:, 3:5].diff(dim=1)
    assert torch.allclose(log_g, state.layers[0].log_g[:, -1:].double(), rtol=2e-5, atol=0)


# ---- a model that is not model.py's


def normalize_queries_and_keys(model, monkeypatch):
    norm = lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:])
    for mix in (block.attn.mix for block in model.transformer.h):
        rotate = mix.rotate
        turn = lambda *x, rotate=rotate: [part if i == 2 else norm(part) for i, part in enumerate(rotate(*x))]
        monkeypatch.setattr(mix, "rotate", turn)


def change_activation(model, monkeypatch):
    for block in model.transformer.h:
        monkeypatch.setattr(block.mlp, "activation", torch.relu)


def add_activation(model, monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "relu2", lambda x: x.relu().square())
    model.config.activation = "relu2"
    change_activation(model, monkeypatch)


def widen_mlp(model, monkeypatch):
    mlp = model.transformer.h[1].mlp
    mlp.c_fc, mlp.c_proj = torch.nn.Linear(32, 256, device=DEVICE), torch.nn.Linear(256, 32, device=DEVICE)


def replace_norm(model, monkeypatch):
    model.transformer.h[0].ln_2 = torch.nn.Identity()


@pytest.fixture
def on_decoder(monkeypatch):
    """Let `generate` choose the decoder, in the interpreter too; return the list of those that it makes."""
    made, load = [], Decoder.load
    monkeypatch.setattr(generate_module, "decodes_on_kernels", lambda *args: True)
    if not GPU:
        monkeypatch.setattr(Decoder, "capture", lambda self: None)
    monkeypatch.setattr(Decoder, "load", lambda self, *args: made.append(self) or load(self, *args))
    return made


def read_and_generate(model, prompt, switch_over=None, num_samples=1, **options):
    """Return the tokens of each sample; the state after the prompt must be what it was."""
    options |= dict(max_new_tokens=4, num_samples=num_samples)
    logits, state = read_prompt(model, prompt, switch_over=switch_over, max_new_tokens=4)
    saved = state.map(torch.clone)
    samples = list(generate(model, prefix=(logits, state), **options))
    assert_unchanged(state, saved)
    return samples


@pytest.mark.parametrize(
    "change,attention,reason",
    [
        (normalize_queries_and_keys, "sympow_gating", "logits differ by"),
        (normalize_queries_and_keys, "softmax", "logits differ by"),
        (change_activation, "heinsen", "logits differ by"),
        (add_activation, "heinsen", "activation must be one of gelu, gelu_tanh, swiglu, got 'relu2'"),
        (widen_mlp, "softmax", r"a linear layer has the shape \[256, 32\], not \[128, 32\]"),
        (replace_norm, "softmax", "'Identity' object has no attribute 'eps'"),
    ],
)
@torch.inference_mode()
def test_a_changed_model_generates_with_its_own_step(change, attention, reason, monkeypatch, on_decoder):
    """A model that is changed, as one would try an idea, is told from model.py's, in one line, once."""
    model = tiny(attention=attention)
    change(model, monkeypatch)
    message = f"^the decoder does not compute this model: generating with GPT.step .{reason}[^\n]*$"
    with pytest.warns(UserWarning, match=message) as caught:
        samples = read_and_generate(model, [5, 6, 7, 8], temperature=1.0)
    assert len(caught) == 1
    with warnings.catch_warnings(action="error"):
        assert read_and_generate(model, [5, 6, 7, 8], temperature=1.0) == samples
    assert samples == read_and_generate(model, [5, 6, 7, 8], temperature=1.0, cuda_graph=False)


@pytest.mark.parametrize(
    "settings,switch_over",
    [
        (dict(attention="conformal_sympow,sympow_gating", reset_token=3), 6),
        (dict(attention="sympow", n_kv_head=1), "always"),
        (dict(attention="softmax", positions="learned", n_positions=8, **GPT2), None),
        (dict(attention="heinsen", values="log", convolution=3), None),
    ],
)
@torch.inference_mode()
def test_the_models_tokens_are_read_by_the_decoder(settings, switch_over, on_decoder):
    model = tiny(**settings)
    run = partial(read_and_generate, model, [5, 6, 7, 8], switch_over, 2, temperature=1.0)
    with warnings.catch_warnings(action="error"):
        samples = run()
    assert len(on_decoder) == 1 and len(on_decoder[0].ids) == 2
    assert samples == run(cuda_graph=False)


def test_weights_that_are_vectors_count_in_the_comparison(monkeypatch):
    """A LayerNorm's weights and biases, and gates' biases, are neither ones nor zeros."""
    config = GPTConfig(vocab_size=40, n_layer=1, n_head=1, n_embd=16, attention="sympow_gating", bias=True)
    compare = partial(
        decoder_module.find_wrong_token, config, ATTENTIONS["sympow_gating"], torch.float32, torch.float32, DEVICE
    )
    assert compare() == ""
    norm = lambda layer: Norm(torch.ones_like(layer.weight), None)
    gates = lambda weight, bias, slopes: decode_qkv.Gates(weight, torch.full_like(bias, 6.9), slopes)
    for name, changed in (("_norm", norm), ("Gates", gates)):
        with monkeypatch.context() as patch:
            patch.setattr(decoder_module, name, changed)
            assert "wrong results" in compare(), name


def test_tokens_leave_the_window_that_is_compared(monkeypatch):
    compared, model = [], tiny(attention="softmax", window=100)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(decoder_module, "remember", lambda name, compare, device: compared.append(compare.args))
        decoder_module.compare(model, torch.float32, torch.float32)
    compare = partial(decoder_module.find_wrong_token, *compared[0], DEVICE)
    assert compare() == ""
    attend_softmax = layers_module.decode_softmax.attend_softmax
    monkeypatch.setattr(layers_module.decode_softmax, "attend_softmax", lambda *args: attend_softmax(*args[:-1]))
    assert "wrong results" in compare()


@pytest.mark.parametrize("path", ["model.py", "layers/norm.py", "attention/operator/forms.py", "generation/layers.py"])
def test_an_edit_of_the_model_is_compared_again(path, tmp_path, monkeypatch):
    """A comparison is remembered under a hash of the sources on which it depends."""
    monkeypatch.setattr(code, "PACKAGE", tmp_path)
    (tmp_path / "model.py").touch()
    file, hashes = tmp_path / path, set()
    file.parent.mkdir(parents=True, exist_ok=True)
    for text in ("x = 1", "x = 2"):
        file.write_text(text)
        hashes.add(decoder_module.model_hash.__wrapped__())
    assert len(hashes) == 2


SETTINGS = [(1.0, 0, 1.0), (0.8, 5, 1.0), (1.5, 0, 0.7), (0.5, 30, 0.95), (1.0, 1, 1.0), (1e-8, 5, 1.0)]


@pytest.mark.parametrize(
    "V,temperature,top_k,top_p",
    [(40, *s) for s in SETTINGS]
    + [(9000, *s) for s in (SETTINGS if GPU else SETTINGS[2:4])],  # slow in the interpreter
)
def test_the_kernel_draws_what_draw_does(V, temperature, top_k, top_p):
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p)
    make = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(6, V, generator=make)).to(DEVICE)
    logits[1] = logits[1].round()  # ties
    logits[2, ::2] = float("-inf")
    logits[3, 7] = 300.0  # all others are nothing
    n = 20 if GPU else 10 if V == 40 else 6  # the larger takes long in the interpreter
    numbers = torch.rand(6, n, generator=make, dtype=torch.float64).to(DEVICE)
    numbers[:, 3], numbers[:, 4] = 0.0, 1 - 2.0**-53
    index, ids = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.empty(6, dtype=torch.int64, device=DEVICE)
    for i in range(n):
        sampling.sample_next_token(logits, ids, numbers, index, **options)
        assert torch.equal(ids, sample_next_token(logits, numbers[:, i : i + 1], **options)), i
        index += 1
