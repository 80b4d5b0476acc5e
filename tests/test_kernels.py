"""The Triton kernels against the float64 oracle: outputs and every gradient.

On the CPU in Triton's interpreter, mostly in float32; with TEST_GPU=1 on the GPU, in bfloat16 and float32. Tests
marked gpu are too large for the interpreter, or ask for a GPU's promises.
"""

import os
import warnings

import numerics
import pytest
import torch
from numerics import relative_error
from torch.nn.functional import logsigmoid

from sympow.attention import naive

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from sympow.attention.operator import dispatch  # noqa: E402
from sympow.attention.power import power_attention  # noqa: E402
from sympow.kernels import configs, operators  # noqa: E402
from sympow.kernels.quadratic import gates, passes as quadratic  # noqa: E402
from sympow.kernels.configs import Config  # noqa: E402

GPU = bool(os.environ.get("TEST_GPU"))
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float32] if GPU else [torch.float32]
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHORT = 70 if GPU else 40  # tokens: two tiles, the second not full (in float32 tiles are of 32)
GATES = numerics.GATES | {"rare zeros": lambda x: logsigmoid(x + 6).masked_fill(x > 2.7, float("-inf"))}


def inputs(T, gates, dtype, B=1, H=2, Hkv=1, D=16, seed=0, mean=0.0):
    """Return [q, k, v, log_g or None] and dy, values exact in dtype; q, k, v are views of one fused projection."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE)
    qkv = make(B, T, H + 2 * Hkv, D)
    if mean:  # keys share a mean that the queries are orthogonal to
        direction = torch.nn.functional.normalize(torch.ones(D, device=DEVICE), dim=0)
        qkv[:, :, :H] -= (qkv[:, :, :H] @ direction).unsqueeze(-1) * direction
        qkv[:, :, H : H + Hkv] += mean * direction
    q, k, v = qkv.to(dtype).split((H, Hkv, Hkv), dim=2)
    return [q, k, v, GATES[gates](make(B, T, Hkv))], make(B, T, H, D).to(dtype)


def queries_of_the_last(n, attention):
    """Return `attention` of all queries for the last n tokens: it gets rows of zeros for the others."""

    def attend(q, k, *rest, **options):
        return attention(torch.nn.functional.pad(q, (0, 0, 0, 0, k.shape[1] - n, 0)), k, *rest, **options)[:, -n:]

    return attend


def gradients(attention, tensors, dy, to=lambda x: x):
    leaves = [x if x is None else to(x).detach().requires_grad_() for x in tensors]
    y = attention(*leaves)
    return [y, *torch.autograd.grad(y, [x for x in leaves if x is not None], to(dy), materialize_grads=True)]


def assert_right(tensors, dy, p, oracle=naive.quadratic, short=None):
    """Compare kernel and oracle: bfloat16 to 4e-3, gradients of long sequences to 8e-3; float32 to 1e-5, dlog_g
    to 2e-5, gradients of long sequences to 1e-4 (dP_ij - delta_i is a small difference where gates are strong). In
    the interpreter all gradients of float32 are held to 2e-5: the sums of numpy's products differ between CPUs."""
    results = gradients(lambda *x: operators.quadratic_attention(*x, p=p), tensors, dy)
    ref = gradients(lambda *x: oracle(*x, p=p), tensors, dy, torch.Tensor.double)
    short = tensors[0].shape[1] < 1000 if short is None else short
    floor = 1e-3 * dy.double().norm().item()
    for name, x, r in zip(("y", "dq", "dk", "dv", "dlog_g"), results, ref):
        if dy.dtype == torch.float32:
            tolerance = 1e-5 if name == "y" or short else 1e-4
            tolerance = max(tolerance, 2e-5) if name == "dlog_g" or (name != "y" and not x.is_cuda) else tolerance
        else:
            tolerance = 4e-3 if name == "y" else 5e-2 if short else 8e-3
        error = relative_error(x, r, floor)
        assert error <= tolerance, f"{name}: error {error:.1e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
def test_every_length_and_gate(T, gates, dtype):
    assert_right(*inputs(T, gates, dtype), p=4)


SIZES = [(p, D) for p in (2, 4, 6, 8) for D in (16, 32, 64, 128)]
ONCE = [(2, 128), (4, 64), (6, 32), (8, 16)]  # without gates each p and each D once, all of them where slow tests run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "p,D,gates",
    [(*size, "learned") for size in SIZES]
    + [pytest.param(*size, "none", marks=[pytest.mark.slow] * (size not in ONCE)) for size in SIZES],
)
def test_every_power_and_head_dimension(p, D, gates, dtype):
    assert_right(*inputs(130, gates, dtype, D=D), p=p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H,Hkv", [(1, 1), (3, 3), (6, 2), (4, 1)])
def test_query_heads_share_key_value_heads(H, Hkv, dtype):
    assert_right(*inputs(100, "zeros", dtype, B=2, H=H, Hkv=Hkv), p=2)


@pytest.mark.parametrize("p,gates,T", [(8, "learned", 2), (8, "none", 2), (2, "strong", 3)])
def test_rows_that_one_token_dominates_have_exact_gradients(p, gates, T):
    """With delta from the rounded y alone, dq would be off by 8e-3 to 3e-2 here, on other inputs by more than 1."""
    tensors, dy = inputs(T, gates, torch.bfloat16, B=8)
    results = gradients(lambda *x: operators.quadratic_attention(*x, p=p), tensors, dy)
    expected = gradients(lambda *x: naive.quadratic(*x, p=p), tensors, dy, torch.Tensor.double)
    for x, r in zip(results, expected):
        assert relative_error(x, r, 1e-3 * dy.double().norm().item()) < 6e-3


@pytest.mark.parametrize("p", [4, 8])
def test_bfloat16_in_the_interpreter_too(p):
    assert_right(*inputs(90, "learned", torch.bfloat16), p=p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n,gates", [(1, "none"), (40, "rare zeros"), (129, "learned")])
def test_fewer_queries_than_keys_are_those_of_the_last_tokens(n, gates, dtype):
    (q, *rest), dy = inputs(200, gates, dtype, H=2, Hkv=1)
    oracle = queries_of_the_last(n, naive.quadratic)
    for p in (2, 8) if GPU or n == 40 else (4,):
        assert_right([q[:, -n:], *rest], dy[:, -n:], p=p, oracle=oracle, short=True)


@pytest.mark.parametrize("config", [(32, 32, 4, 2), (32, 64, 4, 2), (32, 128, 4, 2), (64, 64, 4, 2), (64, 128, 4, 2)])
def test_tiles_of_any_shape_give_the_same(config):
    tensors, dy = inputs(300, "rare zeros", torch.float32)
    ref = gradients(lambda *x: operators.quadratic_attention(*x, p=4), tensors, dy)
    BM, BN, *rest = config
    y, l = quadratic.forward(*tensors, p=4, config=Config(BN, BM, *rest))
    config = Config(*config)
    grads = quadratic.backward(dy, None, *tensors, y, l, p=4, configs=(Config(BN, BM, *rest), config))
    for x, r in zip([y, *grads], ref):
        assert relative_error(x, r, 1e-6) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p,smallest", [(2, 1e-6), (4, 1e-6), (6, 1e-4), (8, 1e-4)])
@pytest.mark.parametrize("size", ["smallest", 1e4])
@pytest.mark.parametrize("tensor", ["q", "k", "both"])
def test_scores_of_any_size_neither_overflow_nor_vanish(p, smallest, size, tensor, dtype):
    (q, k, v, _), dy = inputs(100, "none", torch.float32)
    size = smallest if size == "smallest" else size
    factor = size / (0.25 * (q * k).sum(-1)).abs().mean().item()
    q, k = {"q": (q * factor, k), "k": (q, k * factor), "both": (q * factor**0.5, k * factor**0.5)}[tensor]
    tensors = [q.to(dtype), k.to(dtype), v.to(dtype), None]
    assert_right(tensors, dy.to(dtype), p)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["q", "k", "log_g"])
@pytest.mark.parametrize("p", [4, 6])
def test_nan_comes_out_as_nan_and_changes_no_row_before_it(p, where, value):
    tensors, _ = inputs(SHORT, "near one", DTYPES[0], H=4, Hkv=2)
    y = operators.quadratic_attention(*tensors, p=p)
    x, token = tensors[("q", "k", "v", "log_g").index(where)], SHORT - 15
    x[:, token, 0, ...] = value
    with_nan = operators.quadratic_attention(*tensors, p=p)
    heads, rows = (slice(0, 1), slice(token, token + 1)) if where == "q" else (slice(0, 2), slice(token, None))
    assert torch.equal(with_nan[:, :token], y[:, :token]) and torch.equal(with_nan[:, :, 2:], y[:, :, 2:])
    assert with_nan[:, rows, heads].isnan().all()


@pytest.mark.parametrize("gates", ["none", "zeros"])
@pytest.mark.parametrize("p", [4, 6, 8])
def test_rows_before_a_larger_key_do_not_depend_on_it(p, gates):
    tensors, dy = inputs(SHORT, gates, torch.float32)
    attention = lambda *x: operators.quadratic_attention(*x, p=p)
    y, dq, *_ = gradients(attention, tensors, dy)
    token = SHORT - 15
    tensors[1] = torch.cat((tensors[1][:, :token], 2.0 ** (14 if p == 4 else 20) * tensors[1][:, token:]), 1)
    large_y, large_dq, *_ = gradients(attention, tensors, dy)
    assert torch.equal(large_y[:, :token], y[:, :token]) and torch.equal(large_dq[:, :token], dq[:, :token])
    assert_right(tensors, dy, p)


@pytest.mark.parametrize("p,largest", [(2, 1e15), (4, 1e8), (6, 1e8), (8, 1e8)])
def test_keys_of_the_documented_range(p, largest):
    """The sizes that the quadratic form's "Range" promises, with a row of q of any size."""
    tensors, dy = inputs(SHORT, "none", torch.float32)
    for size in (1 / largest, largest):
        assert_right([tensors[0], tensors[1] * size, *tensors[2:]], dy, p)
        assert_right([tensors[0] / size, tensors[1] * size, *tensors[2:]], dy, p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [3.0, 10.0])
def test_keys_with_a_common_mean(mean, dtype):
    tensors, dy = inputs(200, "none", dtype, D=64, mean=mean)
    assert_right(tensors, dy, p=2)
    assert (quadratic.forward(*tensors, p=2)[1][..., :200] > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_weight_give_zeros_and_zero_gradients(dtype):
    (q, k, v, _), dy = inputs(100, "none", dtype)
    q, k = q.clone(), k.clone()
    q[:, 70], k[:, :2] = 0, 0
    y, dq, dk, dv = gradients(lambda *x: operators.quadratic_attention(*x[:3], p=4), [q, k, v, None], dy)
    for x in (y, dq):
        assert (x[:, 70] == 0).all() and (x[:, :2] == 0).all() and (x[:, 71:] != 0).any()
    assert dk.isfinite().all() and dv.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_sees_itself_alone_returns_its_value_and_has_no_gradient(dtype):
    tensors, dy = inputs(70, "all zero", dtype, H=1)
    y, dq, dk, dv, dlog_g = gradients(lambda *x: operators.quadratic_attention(*x, p=6), tensors, dy)
    assert relative_error(y, tensors[2], 1e-9) < 1e-6 and (dq == 0).all() and (dk == 0).all() and (dlog_g == 0).all()


def test_strided_inputs_and_expanded_gradients():
    tensors, _ = inputs(SHORT, "learned", DTYPES[0], B=2)
    shape = 2, SHORT, 2, 16
    made = torch.randn(2, 2, 16, SHORT).to(DEVICE, DTYPES[0])
    for dy in (made.permute(0, 3, 1, 2), made.permute(0, 3, 1, 2)[:1].expand(shape), torch.ones((), device=DEVICE)):
        dy = dy.to(DTYPES[0]).expand(shape)
        views = [x if x is None else x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
        strided = gradients(lambda *x: operators.quadratic_attention(*x, p=2), views, dy)
        plain = gradients(
            lambda *x: operators.quadratic_attention(*x, p=2), [x.contiguous() for x in tensors], dy.contiguous()
        )
        assert not views[0].is_contiguous() and not dy.is_contiguous()
        for a, b in zip(strided, plain):
            assert relative_error(a, b, 1e-6) < (1e-2 if dy.dtype == torch.bfloat16 else 1e-5)


def test_views_that_no_descriptor_can_describe():
    """Rows that begin at odd addresses, a feature stride of 2 and keys expanded over the heads go through pointers."""
    for view in (
        lambda x: torch.cat((x[..., :1], x, x[..., :3]), -1)[..., 1:17],
        lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
        lambda x: x[:, :, :1].expand(-1, -1, 2, -1),
    ):
        tensors, dy = inputs(SHORT, "learned", DTYPES[0], H=2, Hkv=2)
        views = [view(x) for x in tensors[:3]]
        assert not any(map(quadratic.aligned, views))
        results = [
            gradients(lambda *x: operators.quadratic_attention(*x, p=2), [*qkv, tensors[3]], dy)
            for qkv in (views, [x.contiguous() for x in views])
        ]
        for a, b in zip(*results):
            assert relative_error(a, b, 1e-6) < (1e-2 if dy.dtype == torch.bfloat16 else 1e-5)


def test_large_keys_between_keys_of_zero():
    (q, k, v, _), dy = inputs(130, "none", torch.float32)
    k = 1e5 * k * (torch.arange(130, device=DEVICE) % 4 != 0).view(1, -1, 1, 1)
    tensors = [q[:, 1:], k[:, 1:], v[:, 1:], None]
    assert_right(tensors, dy[:, 1:], p=8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gates,n", [("none", 100), ("zeros", 100), ("zeros", 30)])
def test_sums_that_are_not_divided(gates, n, dtype):
    (q, k, v, log_g), dy = inputs(100, gates, dtype)
    q, dy = q[:, -n:], dy[:, -n:]
    dden = torch.randn(1, 2, n).to(DEVICE)
    scale = 0.3

    def reference(q, k, v, log_g=None):
        T, H = k.shape[1], q.shape[2]
        q = torch.nn.functional.pad(q, (0, 0, 0, 0, T - n, 0))
        k, v = k.repeat_interleave(H, 2), v.repeat_interleave(H, 2)
        w = (scale * torch.einsum("bihd,bjhd->bhij", q, k)) ** 4
        visible = torch.ones(T, T, device=DEVICE, dtype=bool).tril()
        if log_g is not None:
            resets = (log_g == float("-inf")).cumsum(1).transpose(1, 2)
            visible = visible & (resets.unsqueeze(-1) == resets.unsqueeze(-2))
            c = log_g.masked_fill(log_g == float("-inf"), 0).cumsum(1).transpose(1, 2)
            w = w * (c.unsqueeze(-1) - c.unsqueeze(-2)).masked_fill(~visible, float("-inf")).exp()
        w = w.masked_fill(~visible, 0)
        return torch.einsum("bhij,bjhd->bihd", w, v)[:, -n:], w.sum(-1)[..., -n:]

    results = []
    for f, to in (
        (lambda *x: operators.quadratic_sums(*x, p=4, scale=scale), lambda x: x),
        (reference, torch.Tensor.double),
    ):
        leaves = [to(x).detach().requires_grad_() for x in (q, k, v, log_g) if x is not None]
        num, den = f(*leaves)
        total = (num * to(dy.float())).sum() + (den * to(dden)).sum()
        results.append([num, den, *torch.autograd.grad(total, leaves)])
    for x, r in zip(*results):
        assert relative_error(x, r, 1e-3) < (1e-5 if dtype == torch.float32 else 1e-2)
    assert results[0][0].dtype == results[0][1].dtype == torch.float32


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("gates", ["none", "learned"])
def test_the_operator_keeps_torchs_rules(gates, normalize):
    tensors, _ = inputs(40, gates, DTYPES[0])
    leaves = [x if x is None else x.detach().requires_grad_() for x in tensors]
    torch.library.opcheck(torch.ops.sympow.quadratic.default, (*leaves, 2, 0.25, normalize))


def test_meta_tensors_have_the_right_shapes():
    tensors, _ = inputs(40, "learned", DTYPES[0])
    y = operators.quadratic_attention(*(x.to("meta") for x in tensors), p=2)
    assert y.shape == tensors[0].shape and y.dtype == DTYPES[0] and y.is_meta
    num, den = operators.quadratic_sums(*(x.to("meta") for x in tensors), p=2, scale=1.0)
    assert den.shape == (1, 2, 40) and num.dtype == torch.float32


def test_a_compiled_function_has_no_graph_break():
    tensors, dy = inputs(70, "learned", DTYPES[0])
    attention = lambda q, k, v, log_g: operators.quadratic_attention(2 * q, k, v, log_g, p=2) + 1
    compiled = torch.compile(attention, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    for a, b in zip(gradients(compiled, tensors, dy), gradients(attention, tensors, dy)):
        assert relative_error(a, b, 1e-6) < (1e-2 if GPU else 1e-6)


def test_a_second_derivative_is_refused():
    tensors, dy = inputs(40, "none", DTYPES[0])
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    (dq,) = torch.autograd.grad(operators.quadratic_attention(q, k, v, p=2), q, dy, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(dq.sum(), k)


def test_two_runs_give_the_same_bits():
    T, D = (5000, 64) if GPU else (130, 16)
    tensors, dy = inputs(T, "learned", DTYPES[0], H=4, Hkv=2, D=D)
    runs = [gradients(lambda *x: operators.quadratic_attention(*x, p=4), tensors, dy) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_power_attention_uses_the_kernels_where_they_take_the_sizes(monkeypatch):
    """On a GPU as it is; on the CPU by pretending that it is one."""
    if not GPU:
        reason = dispatch.kernel_reason
        monkeypatch.setattr(dispatch, "kernel_reason", lambda form, device, *sizes: reason(form, "cuda", *sizes))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(dispatch, "failure", lambda *size: "")  # it calls the kernels too
    calls = []
    used = operators.quadratic_attention
    monkeypatch.setattr(operators, "quadratic_attention", lambda *a, **k: calls.append(1) or used(*a, **k))
    tensors, dy = inputs(70, "learned", DTYPES[-1])
    y, state = power_attention(*tensors, p=2, form="quadratic", return_state=True)
    assert calls and relative_error(y, naive.quadratic(*(x.double() for x in tensors), p=2), 1e-6) < 1e-5
    with warnings.catch_warnings(action="error"):  # float64 is the reference, no size that is lacking
        ref, ref_state = power_attention(*(x.double() for x in tensors), p=2, form="quadratic", return_state=True)
        power_attention(*tensors, p=2, form="quadratic", initial_state=state)
    assert len(calls) == 1 and all(relative_error(a, b, 1e-6) < 1e-5 for a, b in zip(state, ref_state))
    for change, words in ((dict(D=260), "head dimension 260 "), (dict(E=260), "values 260 wide")):
        q, k = (torch.nn.functional.pad(x, (0, change.get("D", 16) - 16)) for x in tensors[:2])
        v = torch.nn.functional.pad(tensors[2], (0, change.get("E", 16) - 16))
        with pytest.warns(UserWarning, match=words):
            power_attention(q, k, v, p=2, form="quadratic")
        with warnings.catch_warnings(action="error"):  # once
            power_attention(q, k, v, p=2, form="quadratic")
    assert len(calls) == 1
    monkeypatch.setattr(dispatch, "_disabled", "they gave wrong results")
    with pytest.warns(UserWarning, match="wrong results"):
        power_attention(*tensors, p=2, form="quadratic")


def test_autocast_casts_as_sdpa_does():
    tensors, _ = inputs(40, "learned", torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = power_attention(*tensors, p=2, form="quadratic")
    assert y.dtype == torch.bfloat16
    ref = power_attention(*(x.bfloat16() for x in tensors[:3]), tensors[3], p=2, form="quadratic")
    assert torch.equal(y, ref)


def test_every_choice_of_tiles_is_one_the_kernels_take():
    choices = {(name, torch.bfloat16): [] for name in configs.SAFE["wgmma"]}
    choices |= {(name, torch.float32): [] for name in configs.SAFE["float32"]}
    for rows, kernels in configs.SAFE.items():
        for name, choice in kernels.items():
            dtype = torch.float32 if rows.startswith("float32") else torch.bfloat16
            choices[name, dtype] += [c for D, c in choice if D < 256]
    for kernels in configs.SAFE.values():  # head dimension 256 has tiles of its own, beside no others
        widest = {name: choice[-1][1] for name, choice in kernels.items() if choice[-1][0] == 256}
        if widest:
            assert all({c.BM, c.BN} <= {32, 64, 128} for c in widest.values())
            assert widest["dkdv"].BN % widest["dkdv"].BM == 0 and widest["dq"].BM >= widest["dkdv"].BM
    for entries in configs._table().values():
        for key, c in entries.items():
            name, dtype = key.split()[:2]
            choices[name, getattr(torch, dtype)].append(Config(*c))
            assert name != "query_gradient" or "p=4" in key or c[1] == 64, key  # for p = 2 it has no BN
    tokens_or_features = {
        "update_state": (16, 32, 64, 128),
        "query_state": (64, 128, 256),
        "query_gradient": (64, 128, 256),
    }
    for (name, dtype), configurations in choices.items():
        for c in configurations:
            if name in tokens_or_features:
                assert c.BM in (32, 64, 128) and c.BN in tokens_or_features[name], c
                assert name != "update_state" or c.BM == 64, c
                assert c.warps in (4, 8, 16) and 1 <= c.stages <= 5, c
                continue
            assert {c.BM, c.BN} <= {32, 64, 128} and c.warps in (4, 8) and 1 <= c.stages <= 4, c
            assert name != "dkdv" or c.BN % c.BM == 0, c
            assert name != "dq" or c.BM >= max(d.BM for d in choices["dkdv", dtype]), c


# ---- on the GPU only


def blocked_oracle(q, k, v, log_g=None, *, p):
    """Compute the quadratic form in float64, block by block; test_power.py compares it with the oracle."""
    return power_attention(q, k, v, log_g, p=p, form="quadratic")


@pytest.mark.gpu
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize(
    "T,D,dtype",
    [(1000, 64, torch.bfloat16), (4000, 128, torch.bfloat16), (65536, 64, torch.bfloat16), (4000, 64, torch.float32)],
)
def test_long_sequences(T, D, dtype, gates):
    assert_right(*inputs(T, gates, dtype, H=1, D=D), p=4, oracle=blocked_oracle)


@pytest.mark.gpu
@pytest.mark.parametrize("p", [2, 4, 6, 8])
@pytest.mark.parametrize("D", [16, 32, 64, 128])
@pytest.mark.parametrize("gates", ["none", "learned"])
def test_every_size_at_length_1000(gates, D, p):
    assert_right(*inputs(1000, gates, torch.bfloat16, H=4, Hkv=2, D=D), p=p, oracle=blocked_oracle)


@pytest.mark.gpu
def test_nothing_is_left_unwritten():
    """Every element of every output is written: allocations are filled with NaN first."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        for T in (1, 65, 300):
            tensors, dy = inputs(T, "learned", torch.bfloat16)
            assert all(
                x.isfinite().all() for x in gradients(lambda *x: operators.quadratic_attention(*x, p=4), tensors, dy)
            )
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("gates,limit", [("none", 16), ("learned", 34)])
def test_extra_memory(gates, limit):
    T, H, D = 16384, 12, 64
    tensors, dy = inputs(T, gates, torch.bfloat16, H=H, Hkv=H, D=D)
    leaves = [x.detach().requires_grad_() for x in tensors if x is not None]
    run = lambda: torch.autograd.grad(operators.quadratic_attention(*leaves, p=4), leaves, dy)
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_stats()["requested_bytes.all.current"]  # the allocator rounds up
    grads = run()
    outputs = dy.nbytes + sum(x.nbytes for x in grads)
    extra = torch.cuda.memory_stats()["requested_bytes.all.peak"] - allocated - outputs
    assert extra / (T * H) <= limit, f"{extra / (T * H):.1f} bytes a row and head"


@pytest.mark.gpu
def test_a_new_length_compiles_nothing():
    counts = []
    for T in (2048, 512, 1000, 1, 2049, 333):  # more kernels from gates.TOKENS on, others below: these two have all
        tensors, dy = inputs(T, "learned", torch.bfloat16, B=2, H=4, Hkv=2, D=64)
        gradients(lambda *x: operators.quadratic_attention(*x, p=4), tensors, dy)
        caches = (
            k.device_caches[torch.cuda.current_device()][0]
            for k in (vars(quadratic) | vars(gates)).values()
            if hasattr(k, "device_caches")
        )
        counts.append(sum(map(len, caches)))
    assert counts[1:] == counts[1:2] * (len(counts) - 1)
