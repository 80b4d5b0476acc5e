"""Softmax in a window: attention against a mask in float64, and models that have it."""

from unittest.mock import Mock

import pytest
import torch
from helpers import SMALL, assert_same_run, call, dataset  # noqa: F401 (dataset is a fixture)
from numerics import Largest, relative_error

from sympow import train
from sympow.attention.operator import packed
from sympow.attention.operator.window import attend_in_window
from sympow.model import GPT, GPTConfig

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}
H, HKV, D, E = 4, 2, 8, 6


def inputs(n, T, dtype, resets):
    q, k, v = torch.randn(2, n, H, D), torch.randn(2, T, HKV, D), torch.randn(2, T, HKV, E)
    resets = torch.rand(2, T) < 0.2 if resets else None
    return [x.to(dtype).requires_grad_() for x in (q, k, v)], resets


def naive(q, k, v, window, resets):
    """Compute softmax with a mask of n x T, in float64."""
    n, T = q.shape[1], k.shape[1]
    i, j = torch.arange(T)[-n:, None], torch.arange(T)
    visible = ((j <= i) & (j > i - window)).expand(2, n, T)
    if resets is not None:
        document = resets.cumsum(1)
        visible = visible & (document[:, -n:, None] == document[:, None])
    k, v = (x.repeat_interleave(H // HKV, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    return torch.einsum("bhij,bjhe->bihe", scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1), v)


def assert_naive(qkv, window, resets, attend=attend_in_window):
    y = attend(*qkv, window, resets)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    expected = naive(*exact, window, resets)
    dy = torch.randn(y.shape, dtype=torch.float64)
    results = y, *torch.autograd.grad(y, qkv, dy.to(y.dtype))
    references = expected, *torch.autograd.grad(expected, exact, dy)
    for name, x, reference in zip(("y", "dq", "dk", "dv"), results, references, strict=True):
        error = relative_error(x, reference, floor=0.1 * dy.norm().item())
        assert x.shape == reference.shape and error < TOLERANCE[y.dtype], (name, error)


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("n,T", [(1, 1), (1, 33), (5, 24), (24, 24), (33, 33), (24, 33)])
def test_outputs_and_gradients_are_those_with_a_mask(n, T, resets):
    for window in (1, 2, 3, 8, 16, 24, 100):
        assert_naive(*with_window(inputs(n, T, torch.float64, resets), window))


@pytest.mark.parametrize("window", [255, 256, 257, 599, 1200])
def test_windows_longer_than_a_block_of_queries(window):
    assert_naive(*with_window(inputs(1300, 1350, torch.float64, True), window))


def with_window(qkv_and_resets, window):
    qkv, resets = qkv_and_resets
    return qkv, window, resets


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_dtype(dtype):
    assert_naive(*with_window(inputs(30, 30, dtype, True), 7))


def test_a_compiled_function_computes_the_same_without_a_graph_break():
    compiled = torch.compile(attend_in_window, backend="aot_eager", fullgraph=True)
    assert_naive(*with_window(inputs(30, 30, torch.float64, True), 7), compiled)


def test_nothing_is_of_size_T_x_T():
    T, window = 4096, 64
    qkv, resets = inputs(T, T, torch.float32, True)
    with Largest() as largest:
        attend_in_window(*qkv, window, resets).sum().backward()
    assert largest.entries <= 2 * T * H * 2 * window * 2 < T * T


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("n,T", [(24, 24), (9, 24)])
def test_flash_attention_gets_the_window_and_the_documents(n, T, resets, monkeypatch):
    """With a stand-in for torch's operator, which needs a GPU."""
    qkv, resets = inputs(n, T, torch.float64, resets)
    qkv[2] = torch.randn(2, T, HKV, D, dtype=torch.float64, requires_grad=True)  # it wants all heads equally wide

    def flash(q, k, v, ends, ends_k, longest, longest_k, *flags, scale, window_size_left, window_size_right):
        assert ends is ends_k and longest == longest_k == int(ends.diff().max()) and flags == (0.0, True, False)
        starts = torch.zeros(1, len(q), dtype=torch.bool)
        starts[0, ends[:-1].long()] = True
        assert window_size_right == 0 and scale == D**-0.5
        window = attend_in_window(q[None], k[None], v[None], window_size_left + 1, starts)
        return window[0], q.new_zeros(H, len(q), dtype=torch.float32), 0, 0, 0

    with torch.no_grad():
        expected = naive(*qkv, 7, resets)
        takes_flash = Mock(side_effect=[True, True, False])  # asked here, in attend_within, and by the stand-in
        monkeypatch.setattr(packed, "takes_flash", takes_flash)
        monkeypatch.setattr("sympow.attention.operator.window.takes_flash", takes_flash)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash, raising=False)
        y = attend_in_window(*qkv, 7, resets)
    assert takes_flash.call_count == 3 and torch.allclose(y, expected, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("window", [2, 100, 256, 1000, 5000])
def test_on_a_gpu_outputs_and_gradients_are_those_with_a_mask(window, resets):
    q, k, v = torch.randn(2, 1500, H + 2 * HKV, 64, device="cuda", dtype=torch.bfloat16).split((H, HKV, HKV), 2)
    qkv = [x.detach().requires_grad_() for x in (q, k, v)]
    starts = (torch.rand(2, 1500) < 0.003) if resets else None
    exact = [x.detach().cpu().double().requires_grad_() for x in qkv]
    y, expected = (
        attend_in_window(*qkv, window, None if starts is None else starts.cuda()),
        naive(*exact, window, starts),
    )
    dy = torch.randn_like(expected)
    results = y, *torch.autograd.grad(y, qkv, dy.bfloat16().cuda())
    for x, reference in zip(results, (expected, *torch.autograd.grad(expected, exact, dy)), strict=True):
        assert relative_error(x.cpu(), reference, floor=0.0) < 8e-3


# ---- models


def model(**settings):
    torch.manual_seed(0)
    sizes = dict(vocab_size=31, n_layer=2, n_head=H, n_kv_head=HKV, n_embd=32, window=7, gate_bias=2.0)
    net = GPT(GPTConfig(**{**sizes, **settings})).double().eval()
    for p in net.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
    return net


@pytest.mark.parametrize("attention", ["softmax", "sympow_gating,softmax"])
@pytest.mark.parametrize("reset_token", [-1, 3])
@torch.inference_mode()
def test_pieces_with_a_state_equal_the_whole_and_the_state_stays_small(attention, reset_token):
    net, ids = model(attention=attention, reset_token=reset_token), torch.randint(31, (3, 60))
    logits, state, read, sizes = net(ids)[0], net.empty_state(3), 0, []
    for n in (1, 5, 1, 1, 14, 1, 1, 16, 20):
        last, state = net.read(ids[:, read : read + n], state)
        read += n
        assert torch.allclose(last, logits[:, read - 1], rtol=1e-8)
        sizes.append(state.layers[-1].bytes())
    assert state.layers[-1].cached_tokens == 7 and len({*sizes[3:]}) == 1
    ids[:, : 60 - 2 * 7 + 1] = 8  # beyond two layers' windows, the last token does not see them
    assert attention != "softmax" or torch.allclose(net(ids)[0][:, -1], logits[:, -1], rtol=1e-8)


@torch.inference_mode()
def test_a_window_as_long_as_the_text_is_no_window():
    """And takes the same kernel: cuDNN's where there is one."""
    ids = torch.randint(31, (2, 20))
    expected = model(window=0)(ids)[0]
    for window in (20, 21, 100):
        assert torch.equal(model(window=window)(ids)[0], expected)
    assert not torch.allclose(model(window=19)(ids)[0], expected)


def test_a_state_in_a_window_takes_the_same_bytes_however_long_the_text():
    mix = model(window=64).transformer.h[0].attn.mix
    few, *sizes = (
        mix.generation_bytes(mix.empty_state(1, "cpu"), n, 2, torch.float32) for n in (10, 64, 4096, 1_000_000)
    )
    assert len({*sizes}) == 1 and few < sizes[0] and mix.empty_state(1, "cpu").switch_over == 64


def test_flops_count_the_pairs_in_the_window():
    def pairs(window, T):
        return sum(min(i + 1, window or T) for i in range(T)) / T

    for window, T in ((7, 60), (64, 60), (0, 60)):
        flops = model(window=window).transformer.h[0].attn.mix.attention_flops(T, torch.float32, torch.device("cpu"))
        assert flops == pytest.approx(12 * 32 * pairs(window, T), rel=0.1)


@pytest.mark.parametrize(
    "settings,message",
    [
        (dict(window=-1), "window must be a whole number of at least 2 tokens, or 0 for all, got -1"),
        (dict(window=1), "at least 2 tokens"),
        (dict(window=2.5), "must be a whole number of at least 2 tokens, or 0 for all, got 2.5"),
        (dict(window="64"), "or 0 for all, got '64'"),
        (dict(attention="sympow", window=8), "attention=sympow has no window, got window=8: only softmax has one"),
        (dict(attention="sympow,even_power", window=8), "no layer of .* has a window, got window=8: only softmax has"),
    ],
)
def test_windows_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        model(**settings)


def test_a_packed_run_with_a_window_goes_on_with_the_same_bits(dataset, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    run = (f"--dataset={dataset}", *SMALL, "--attention=sympow_gating,softmax", "--window=8", "--pack=1")
    run = (*run, "--sample_tokens=0")
    assert call(train.main, *run, "--out_dir=out/a") == 0
    assert call(train.main, *run, "--out_dir=out/b", "--max_iters=3") == 0
    assert call(train.main, *run, "--out_dir=out/b") == 0
    assert_same_run("out/b", "out/a")
