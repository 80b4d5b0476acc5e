"""What test_combinations.py does not cover of the quadratic kernels: unusual numbers, views, tiles and long sequences.

On the CPU in Triton's interpreter, mostly in float32; with TEST_GPU=1 on the GPU, in bfloat16 and float32. Tests
marked gpu are too large for the interpreter, or ask for a GPU's promises.
"""

import warnings
from collections import defaultdict
from functools import partial
from itertools import product
from unittest.mock import Mock

import numerics
import pytest
import torch
from numerics import DEVICE, GPU, LARGE, gradients, leaves_of, relative_error
from torch.nn.functional import logsigmoid

from sympow.attention import naive

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from sympow.attention.power import power_attention  # noqa: E402
from sympow.kernels import configs, operators  # noqa: E402
from sympow.kernels.quadratic import passes as quadratic  # noqa: E402
from sympow.kernels.configs import Config  # noqa: E402

DTYPES = [torch.bfloat16, torch.float32] if GPU else [torch.float32]
SHORT = 70 if GPU else 40  # tokens: two tiles, the second not full (in float32 tiles are of 32)
GATES = numerics.GATES | {"rare zeros": lambda x: logsigmoid(x + 6).masked_fill(x > 2.7, float("-inf"))}


def inputs(T, gates, dtype, B=1, H=2, Hkv=1, D=16, mean=0.0):
    """Return [q, k, v, log_g or None] and dy, values exact in dtype; q, k, v are views of one fused projection."""
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE)
    qkv = make(B, T, H + 2 * Hkv, D)
    if mean:  # keys share a mean that the queries are orthogonal to
        direction = torch.nn.functional.normalize(torch.ones(D, device=DEVICE), dim=0)
        qkv[:, :, :H] -= (qkv[:, :, :H] @ direction).unsqueeze(-1) * direction
        qkv[:, :, H : H + Hkv] += mean * direction
    q, k, v = qkv.to(dtype).split((H, Hkv, Hkv), dim=2)
    return [q, k, v, GATES[gates](make(B, T, Hkv))], make(B, T, H, D).to(dtype)


def kernel_gradients(tensors, dy, p):
    """Return y and the gradients by the kernels of the quadratic form."""
    return gradients(partial(operators.quadratic_attention, p=p), tensors, dy)


def assert_close(results, expected, tolerance, floor=1e-6):
    for x, reference in zip(results, expected, strict=True):
        assert relative_error(x, reference, floor) < tolerance


def extra_memory(attention, leaves, dy):
    """Return the bytes that a forward and a backward pass on the GPU take beside their outputs, at their peak."""
    run = lambda: torch.autograd.grad(attention(*leaves), leaves, dy)
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_stats()["requested_bytes.all.current"]  # the allocator rounds up
    outputs = dy.nbytes + sum(x.nbytes for x in run())
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - allocated - outputs


def assert_right(tensors, dy, p, oracle=naive.quadratic):
    """Compare kernel and oracle: bfloat16 to 4e-3, gradients of long sequences to 8e-3; float32 to 1e-5, dlog_g
    to 2e-5, gradients of long sequences to 1e-4 (dP_ij - delta_i is a small difference where gates are strong). In
    the interpreter all gradients of float32 are held to 2e-5: the sums of numpy's products differ between CPUs."""
    results = kernel_gradients(tensors, dy, p)
    ref = gradients(partial(oracle, p=p), tensors, dy, torch.Tensor.double)
    short = tensors[0].shape[1] < 1000
    floor = 1e-3 * dy.double().norm().item()
    for name, x, r in zip(("y", "dq", "dk", "dv", "dlog_g"), results, ref):
        if dy.dtype == torch.float32:
            tolerance = 1e-5 if name == "y" or short else 1e-4
            tolerance = max(tolerance, 2e-5) if name == "dlog_g" or (name != "y" and not x.is_cuda) else tolerance
        else:
            tolerance = 4e-3 if name == "y" else 5e-2 if short else 8e-3
        error = relative_error(x, r, floor)
        assert error <= tolerance, f"{name}: error {error:.1e}"


@pytest.mark.parametrize("p,gates,T", [(8, "learned", 2), (8, "none", 2), (2, "strong", 3)])
def test_rows_that_one_token_dominates_have_exact_gradients(p, gates, T):
    """With delta from the rounded y alone, dq would be off by 8e-3 to 3e-2 here, on other inputs by more than 1."""
    tensors, dy = inputs(T, gates, torch.bfloat16, B=8)
    expected = gradients(partial(naive.quadratic, p=p), tensors, dy, torch.Tensor.double)
    assert_close(kernel_gradients(tensors, dy, p), expected, 6e-3, floor=1e-3 * dy.double().norm().item())


@pytest.mark.parametrize("p", [4, 8])
def test_bfloat16_in_the_interpreter_too(p):
    assert_right(*inputs(90, "learned", torch.bfloat16), p=p)


@pytest.mark.parametrize("config", [(32, 32, 4, 2), (32, 64, 4, 2), (32, 128, 4, 2), (64, 64, 4, 2), (64, 128, 4, 2)])
def test_tiles_of_any_shape_give_the_same(config):
    tensors, dy = inputs(300 if GPU else 150, "rare zeros", torch.float32)
    config = Config(*config)
    transposed = config._replace(BM=config.BN, BN=config.BM)
    y, l = quadratic.forward(*tensors, p=4, config=transposed)
    grads = quadratic.backward(dy, None, *tensors, y, l, p=4, configs=(transposed, config))
    assert_close([y, *grads], kernel_gradients(tensors, dy, p=4), 1e-5)


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


chunks = partial(operators.chunked_attention, p=2, chunk=128)
nan, inf = float("nan"), float("inf")
NAN = [
    (partial(operators.quadratic_attention, p=p), SHORT, name, value)
    for p, name, value in product((4, 6), ("q", "k", "log_g"), (nan, inf))
]
NAN += [(lambda *x: chunks(*x)[0], 190, *pair) for pair in (("q", inf), ("k", nan), ("v", inf), ("log_g", nan))]


@pytest.mark.parametrize("attention,T,name,value", NAN)
def test_nan_comes_out_as_nan_and_changes_no_row_before_it(attention, T, name, value):
    """In the chunked form, of a token in the second chunk; a value also reaches the rows of its tile."""
    tensors, _ = inputs(T, "near one", DTYPES[0], H=4, Hkv=2)
    y, token = attention(*tensors), T - 15
    tensors[("q", "k", "v", "log_g").index(name)][:, token, 0, ...] = value
    changed = attention(*tensors)
    heads, rows = (slice(0, 1), slice(token, token + 1)) if name == "q" else (slice(0, 2), slice(token, None))
    assert not changed[:, rows, heads].isfinite().any() and (T != SHORT or changed[:, rows, heads].isnan().all())
    rows = 128 if name == "v" else token
    assert torch.equal(changed[:, :rows], y[:, :rows]) and torch.equal(changed[:, :, 2:], y[:, :, 2:])


@pytest.mark.parametrize("gates", ["none", "zeros"])
@pytest.mark.parametrize("p", [4, 6, 8])
def test_rows_before_a_larger_key_do_not_depend_on_it(p, gates):
    tensors, dy = inputs(SHORT, gates, torch.float32)
    token = SHORT - 15
    expected = kernel_gradients(tensors, dy, p)
    tensors[1] = torch.cat((tensors[1][:, :token], 2.0 ** (14 if p == 4 else 20) * tensors[1][:, token:]), 1)
    for x, reference in zip(kernel_gradients(tensors, dy, p)[:2], expected):  # y and dq
        assert torch.equal(x[:, :token], reference[:, :token])
    assert_right(tensors, dy, p)


@pytest.mark.parametrize("p,largest", [(2, 1e15), (4, 1e8), (6, 1e8), (8, 1e8)])
def test_keys_of_the_documented_range(p, largest):
    """The sizes that the quadratic form's "Range" promises, with a row of q of any size."""
    (q, k, *rest), dy = inputs(SHORT, "none", torch.float32)
    for size in (1 / largest, largest):
        assert_right([q, k * size, *rest], dy, p)
        assert_right([q / size, k * size, *rest], dy, p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [3.0, 10.0])
def test_keys_with_a_common_mean(mean, dtype):
    tensors, dy = inputs(200, "none", dtype, D=64, mean=mean)
    assert_right(tensors, dy, p=2)
    assert (quadratic.forward(*tensors, p=2)[1][..., :200] > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_weight_give_zeros_and_zero_gradients(dtype):
    tensors, dy = inputs(100, "none", dtype)
    tensors[0][:, 70], tensors[1][:, :2] = 0, 0
    y, dq, dk, dv = kernel_gradients(tensors, dy, p=4)
    for x in (y, dq):
        assert (x[:, 70] == 0).all() and (x[:, :2] == 0).all() and (x[:, 71:] != 0).any()
    assert dk.isfinite().all() and dv.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_sees_itself_alone_returns_its_value_and_has_no_gradient(dtype):
    tensors, dy = inputs(70, "all zero", dtype, H=1)
    y, dq, dk, dv, dlog_g = kernel_gradients(tensors, dy, p=6)
    assert relative_error(y, tensors[2], 1e-9) < 1e-6 and (dq == 0).all() and (dk == 0).all() and (dlog_g == 0).all()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.cat((x[..., :1], x, x[..., :3]), -1)[..., 1:17],
        lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
        lambda x: x[:, :, :1].expand(-1, -1, 2, -1),
    ],
    ids=["rows at odd addresses", "a feature stride of 2", "keys expanded over the heads"],
)
def test_views_that_no_descriptor_can_describe(view):
    """They go through pointers, and have the results of contiguous copies."""
    (*qkv, log_g), dy = inputs(SHORT, "learned", DTYPES[0], H=2, Hkv=2)
    views = [view(x) for x in qkv]
    assert not any(map(quadratic.aligned, views))
    expected = kernel_gradients([*(x.contiguous() for x in views), log_g], dy, p=2)
    assert_close(kernel_gradients([*views, log_g], dy, p=2), expected, 1e-2 if GPU else 1e-5)


def test_large_keys_between_keys_of_zero():
    (q, k, v, _), dy = inputs(130, "none", torch.float32)
    k = 1e5 * k * (torch.arange(130, device=DEVICE) % 4 != 0).view(1, -1, 1, 1)
    tensors = [q[:, 1:], k[:, 1:], v[:, 1:], None]
    assert_right(tensors, dy[:, 1:], p=8)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("gates", ["none", "learned"])
def test_the_operator_keeps_torchs_rules(gates, normalize):
    tensors, _ = inputs(40, gates, DTYPES[0])
    torch.library.opcheck(torch.ops.sympow.quadratic.default, (*leaves_of(tensors), 2, 0.25, normalize))


def test_power_attention_uses_the_kernels_where_they_take_the_sizes(on_gpu, monkeypatch):
    kernels = Mock(wraps=operators.quadratic_attention)
    monkeypatch.setattr(operators, "quadratic_attention", kernels)
    attend = partial(power_attention, p=2, form="quadratic")
    tensors, _ = inputs(70, "learned", DTYPES[-1])
    _, state = attend(*tensors, return_state=True)
    assert kernels.called
    with warnings.catch_warnings(action="error"):  # float64 is the reference, no size that is lacking
        _, expected = attend(*(x.double() for x in tensors), return_state=True)
        attend(*tensors, initial_state=state)
    assert_close(state, expected, 1e-5)


def test_every_choice_of_tiles_is_one_the_kernels_take():
    choices = defaultdict(list)  # head dimension 256 has tiles of its own, beside no others
    for rows, kernels in configs.SAFE.items():
        dtype = "float32" if rows.startswith("float32") else "bfloat16"
        for kernel, choice in kernels.items():
            for D, config in choice:
                choices[kernel, dtype, D == 256].append(config)
    for entries in configs._table().values():
        for key, entry in entries.items():
            kernel, dtype, D, *_ = key.split()
            choices[kernel, dtype, D == "D=256"].append(Config(*entry))
            assert kernel != "query_gradient" or "p=4" in key or entry[1] == 64, key  # for p = 2 it has no BN
    sizes = {  # the values of BM, BN and warps, and the largest of stages
        "update_state": ({64}, {16, 32, 64, 128}, {4, 8, 16}, 5),
        "query_state": ({32, 64, 128}, {64, 128, 256}, {4, 8, 16}, 5),
        "query_gradient": ({32, 64, 128}, {64, 128, 256}, {4, 8, 16}, 5),
    }
    for (kernel, dtype, wide), configurations in choices.items():
        BM, BN, warps, stages = sizes.get(kernel, ({32, 64, 128}, {32, 64, 128}, {4, 8}, 4))
        for c in configurations:
            assert c.BM in BM and c.BN in BN and c.warps in warps and 1 <= c.stages <= stages, c
            assert kernel != "dkdv" or c.BN % c.BM == 0, c
            assert kernel != "dq" or c.BM >= max(d.BM for d in choices["dkdv", dtype, wide]), c


# ---- on the GPU only


# It computes float64 block by block; test_power.py compares it with the oracle.
blocked_oracle = partial(power_attention, form="quadratic")


@pytest.mark.gpu
@LARGE
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize(
    "T,D,dtype",
    [(1000, 64, torch.bfloat16), (4000, 128, torch.bfloat16), (65536, 64, torch.bfloat16), (4000, 64, torch.float32)],
)
def test_long_sequences(T, D, dtype, gates):
    assert_right(*inputs(T, gates, dtype, H=1, D=D), p=4, oracle=blocked_oracle)


@pytest.mark.gpu
@LARGE
@pytest.mark.parametrize("gates,limit", [("none", 16), ("learned", 34)])
def test_extra_memory(gates, limit):
    T, H, D = 16384, 12, 64
    tensors, dy = inputs(T, gates, torch.bfloat16, H=H, Hkv=H, D=D)
    leaves = [x for x in leaves_of(tensors) if x is not None]
    extra = extra_memory(partial(operators.quadratic_attention, p=4), leaves, dy)
    assert extra / (T * H) <= limit, f"{extra / (T * H):.1f} bytes a row and head"
