"""Packed softmax: each document for itself, without a mask of T x T, in eager mode and under torch.compile."""

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
from helpers import SMALL, assert_same_run, call, dataset  # noqa: F401 (dataset is a fixture)
from numerics import Largest, relative_error

from sympow import train
from sympow.attention import softmax
from sympow.attention.gates import reset_gates
from sympow.attention.operator import packed
from sympow.attention.softmax import packed_softmax_attention, softmax_attention
from sympow.model import GPT, GPTConfig

B, T, H, HKV, D = 2, 24, 4, 2, 8
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
RESETS = {
    "none": [],
    "all": [(b, t) for b in range(B) for t in range(T)],
    "at token 0": [(0, 0), (1, 0), (0, 9)],
    "one token long": [(0, 5), (0, 6), (0, 7), (1, T - 1)],
    "in one sequence": [(1, 10), (1, 13)],
}


def resets_at(places, shape=(B, T)):
    resets = torch.zeros(shape, dtype=torch.bool)
    for b, t in places:
        resets[b, t] = True
    return resets


def inputs(dtype, tokens=T):
    q, k, v = torch.randn(B, tokens, H + 2 * HKV, D).to(dtype).split((H, HKV, HKV), 2)  # strided views, as in the model
    return [x.detach().requires_grad_() for x in (q, k, v)]


def naive(q, k, v, resets):
    """Compute softmax with a mask of T x T, in float64."""
    document = resets.cumsum(1)
    visible = (document[:, :, None] == document[:, None]).tril()
    k, v = (x.repeat_interleave(H // HKV, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    return torch.einsum("bhij,bjhe->bihe", scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1), v)


def assert_naive(attention, qkv, resets):
    y = attention(*qkv, resets)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    expected, dy = naive(*exact, resets), torch.randn(y.shape, dtype=torch.float64)
    results = y, *torch.autograd.grad(y, qkv, dy.to(y.dtype))
    references = expected, *torch.autograd.grad(expected, exact, dy)
    for name, x, reference, like in zip(("y", "dq", "dk", "dv"), results, references, (qkv[0], *qkv), strict=True):
        assert x.dtype == like.dtype and x.shape == like.shape
        error = relative_error(x, reference, floor=0.1 * dy.norm().item())
        assert error < TOLERANCE[y.dtype], (name, error)


@pytest.mark.parametrize("places", RESETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_packed_softmax_and_its_gradients_are_those_with_a_mask(dtype, places):
    assert_naive(packed_softmax_attention, inputs(dtype), resets_at(RESETS[places]))


def test_a_compiled_function_computes_the_same_with_a_mask():
    compiled = torch.compile(packed_softmax_attention, backend="eager", fullgraph=True)
    assert_naive(compiled, inputs(torch.float64), resets_at(RESETS["one token long"]))


@pytest.mark.parametrize("D", [8, 6])
def test_flash_attention_gets_the_documents_of_all_sequences_in_one_call(D, monkeypatch):
    """With stand-ins for torch's operators, which need a GPU."""
    calls = []

    def forward(q, k, v, ends, ends_k, longest, longest_k, dropout, causal, debug, scale):
        assert ends is ends_k and longest == longest_k and (dropout, causal, debug) == (0.0, True, False)
        assert q.shape[2] % 8 == 0 and q.stride(2) == 1 and ends.dtype == torch.int32
        calls.append((ends.tolist(), longest))
        sizes = torch.tensor([len(ends) - 1, longest])
        return packed._one_by_one(q, k, v, ends, sizes, scale), q.new_zeros(H, len(q), dtype=torch.float32), 0, 0, 0

    def backward(dy, q, k, v, y, lse, ends, ends_k, longest, longest_k, dropout, causal, rng, unused, scale):
        assert dy.is_contiguous() and lse.shape == (H, len(q)) and (dropout, causal) == (0.0, True)
        calls.append((ends.tolist(), longest))

        def differentiate():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            y = packed._one_by_one(*leaves, ends, torch.tensor([len(ends) - 1, longest]), scale)
            return torch.autograd.grad(y, leaves, dy)

        with ThreadPoolExecutor(1) as thread:  # autograd does not work inside an operator
            return thread.submit(differentiate).result()

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward, raising=False)
    monkeypatch.setattr(packed, "takes_flash", lambda *_: True)
    qkv = [x.detach()[..., :D].requires_grad_() for x in inputs(torch.float64)]
    assert_naive(packed_softmax_attention, qkv, resets_at(RESETS["at token 0"]))
    assert calls == [([0, 9, T, 2 * T], T)] * 2


@pytest.fixture
def searches(monkeypatch):
    """Return a Mock that counts how often the documents of a batch are looked for."""
    mock = Mock(wraps=packed._find)
    monkeypatch.setattr(packed, "_find", mock)
    return mock


def test_documents_of_a_batch_are_looked_for_once(searches):
    resets = resets_at(RESETS["at token 0"])
    first = packed.find_documents(resets)
    assert packed.find_documents(resets) is first and searches.call_count == 1
    assert first.sizes.tolist() == [3, T] and first.ends[:5].tolist() == [0, 9, T, 2 * T, 2 * T]
    resets[1, 3] = True
    assert packed.find_documents(resets).sizes.tolist() == [4, T - 3]

    def step(x, resets):
        for _ in range(3):  # layers
            x = x * packed.find_documents(resets).ends[1]
        return x.sum()

    searches.reset_mock()
    compiled = torch.compile(step, backend="aot_eager_decomp_partition", fullgraph=True)
    compiled(torch.ones(3, requires_grad=True), resets).backward()
    assert searches.call_count == 1


@pytest.mark.parametrize("entries", [2**28, 40])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("places", RESETS)
def test_the_last_tokens_see_the_cache_as_with_one_mask(dtype, places, entries, monkeypatch):
    monkeypatch.setattr(softmax, "MASK_ENTRIES", entries)
    resets = resets_at(RESETS[places])
    q, k, v = (x.detach() for x in inputs(dtype))
    for log_g in (reset_gates(resets, None, k), None):
        wanted = naive(*(x.double() for x in (q, k, v)), resets & (log_g is not None))
        for n in (1, 7, T):
            y = softmax_attention(q[:, -n:], k, v, log_g)
            assert y.dtype == dtype and relative_error(y, wanted[:, -n:], floor=1e-3) < TOLERANCE[dtype]


def test_gradients_flow_to_the_cache(monkeypatch):
    monkeypatch.setattr(softmax, "MASK_ENTRIES", 40)
    q, k, v = inputs(torch.float64)
    dy = torch.randn(B, 7, H, D, dtype=torch.float64)
    y, expected = softmax_attention(q[:, -7:], k, v), naive(q, k, v, resets_at([]))[:, -7:]
    for x, reference in zip(torch.autograd.grad(y, (q, k, v), dy), torch.autograd.grad(expected, (q, k, v), dy)):
        assert relative_error(x, reference, floor=1e-3) < 1e-12


def test_64_queries_of_a_long_text_make_no_mask_for_all_of_them(monkeypatch):
    monkeypatch.setattr(softmax, "MASK_ENTRIES", 2**17)
    tokens = 16384
    q, k, v = torch.randn(1, 64, 2, D), torch.randn(1, tokens, 1, D), torch.randn(1, tokens, 1, D)
    with torch.inference_mode(), Largest() as largest:
        y = softmax_attention(q, k, v)
    assert largest.entries <= tokens * 2 * D < tokens * 64
    mask = torch.ones(64, tokens, dtype=torch.bool).tril(tokens - 64)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().expand(-1, -1, 2, -1)) * D**-0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    expected = torch.einsum("bhij,bjhe->bihe", weights, v.double().expand(-1, -1, 2, -1))
    assert relative_error(y, expected, floor=1e-3) < 1e-5


def test_nothing_is_of_size_T_x_T():
    tokens = 2048
    qkv = inputs(torch.float32, tokens)
    resets = resets_at([(0, 700)], (B, tokens))
    with Largest() as largest:
        packed_softmax_attention(*qkv, resets).sum().backward()
    assert largest.entries <= B * tokens * (H + 2 * HKV) * D < tokens**2


def model(**settings):
    torch.manual_seed(0)
    sizes = dict(vocab_size=31, n_layer=2, n_head=H, n_kv_head=HKV, n_embd=16, head_dim=4, attention="softmax")
    return GPT(GPTConfig(**sizes, reset_token=7, **settings))


def gradients(network, parameters, ids):
    _, loss = network(ids, ids.roll(-1, 1))
    return [loss, *torch.autograd.grad(loss, list(parameters))]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_model_learns_the_same(checkpointing):
    net = model(activation_checkpointing=checkpointing)
    compiled = torch.compile(net, backend="aot_eager_decomp_partition", fullgraph=True)
    for _ in range(2):  # other documents, the same graph
        ids = torch.randint(0, 31, (B, T))
        ids[0, 5] = 7
        expected = gradients(net, net.parameters(), ids)
        for x, reference in zip(gradients(compiled, net.parameters(), ids), expected, strict=True):
            assert torch.allclose(x, reference, rtol=1e-4, atol=1e-6)


def test_documents_in_one_sequence_are_what_they_are_alone():
    net = model().double()
    ids = torch.randint(8, 31, (1, T))
    ids[0, 10] = 7
    logits, _ = net(ids)
    alone = [net(document)[0] for document in ids.split((10, T - 10), dim=1)]
    assert torch.allclose(logits, torch.cat(alone, dim=1), rtol=1e-8)
    net.eval()
    with torch.inference_mode():  # a prompt in pieces with a state, which has one mask for all heads
        last, _ = net.read(ids, net.empty_state(1), piece=7)
    assert torch.allclose(last, logits[:, -1], rtol=1e-8)


def test_a_packed_run_goes_on_with_the_same_bits(dataset, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    packed_run = (f"--dataset={dataset}", *SMALL, "--attention=softmax", "--pack=1", "--sample_tokens=0")
    assert call(train.main, *packed_run, "--out_dir=out/a") == 0
    assert call(train.main, *packed_run, "--out_dir=out/b", "--max_iters=3") == 0
    assert call(train.main, *packed_run, "--out_dir=out/b") == 0
    assert_same_run("out/b", "out/a")
