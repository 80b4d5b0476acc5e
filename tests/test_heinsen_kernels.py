"""The Triton kernels of Heinsen's log attention against float64: outputs, states and every gradient.

On the CPU in Triton's interpreter; with TEST_GPU=1 on the GPU.
"""

import os

import pytest
import torch
from helpers import ROOT, run
from numerics import relative_error

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from sympow.kernels.heinsen import passes as heinsen  # noqa: E402
from sympow.kernels import heinsen_unsupported_reason  # noqa: E402
from sympow.kernels.heinsen.operator import heinsen_attention  # noqa: E402

GPU = bool(os.environ.get("TEST_GPU"))
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float32]
NAMES = ("y", "S", "z", "dq", "dk", "dv", "dS", "dz")
EMPTY = -1e30


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Let a few tokens be several chunks, each of them several blocks."""
    monkeypatch.setattr(heinsen, "CHUNK", 32)


def oracle(q, k, v, documents=None, m=None, S=None, z=None):
    """Return (y, m, S, z) in float64 from the definition, weights of all pairs and features relative to their row."""
    q, k, v, S, z = (None if x is None else x.double() for x in (q, k, v, S, z))
    (B, T, H, D), HKV = q.shape, k.shape[2]
    documents = torch.zeros(B, T, dtype=torch.int32, device=q.device) if documents is None else documents
    if m is None:
        m, S, z = k.new_full((B, HKV, D), EMPTY), k.new_zeros(B, HKV, D, D), k.new_zeros(B, HKV, D)
    m = m.double()
    heads = lambda x, dim: x.repeat_interleave(H // HKV, dim)
    visible = (documents[:, :, None] == documents[:, None]) & torch.ones(T, T, dtype=bool, device=q.device).tril()
    scores = (q[:, :, None] + heads(k, 2)[:, None]).masked_fill(~visible[..., None, None], float("-inf"))
    of_state = (q + heads(m, 1)[:, None]).masked_fill((documents != 0)[..., None, None], float("-inf"))
    c = torch.maximum(scores.amax((2, 4)), of_state.amax(3)).detach()  # [B, T, H]
    w, w_state = (scores - c[:, :, None, :, None]).exp().sum(-1), (of_state - c[..., None]).exp()
    num = torch.einsum("bijh,bjhe->bihe", w, heads(v, 2)) + torch.einsum("bihd,bhde->bihe", w_state, heads(S, 1))
    den = w.sum(2) + torch.einsum("bihd,bhd->bih", w_state, heads(z, 1))
    inside = (documents == documents[:, -1:])[..., None, None]
    kept = (documents[:, -1] == 0)[:, None, None]
    last = torch.maximum(k.masked_fill(~inside, EMPTY).amax(1), m.masked_fill(~kept, EMPTY)).detach()
    w, old = (k - last[:, None]).exp() * inside, (m - last).exp() * kept
    S, z = torch.einsum("bjhd,bjhe->bhde", w, v) + old[..., None] * S, w.sum(1) + old * z
    return num / den[..., None], last, S, z


def inputs(T, dtype, B=1, H=2, HKV=1, D=16, state=False, documents=None, scale=1.0, grow=0.0, seed=0):
    """Return [q, k, v, documents, m, S, z] and the gradients to (y, S, z); q, k, v are views of one fused projection.

    scale multiplies q and k, grow is by how much keys grow over the T tokens, and the values of all fit dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator)
    qkv = make(B, T, H + 2 * HKV, D)
    qkv[:, :, : H + HKV] *= scale
    qkv[:, :, H : H + HKV] += grow * torch.arange(T).div(max(T - 1, 1))[:, None, None]
    q, k, v = qkv.to(dtype).to(DEVICE).split((H, HKV, HKV), dim=2)
    given = [None] * 3
    if state:  # of 20 keys
        keys, values = scale * make(B, 20, HKV, D), make(B, 20, HKV, D)
        m = keys.amax(1)
        w = (keys - m[:, None]).exp()
        given = [x.to(DEVICE) for x in (m, torch.einsum("bjhd,bjhe->bhde", w, values), w.sum(1))]
    if documents is not None:
        documents = torch.tensor(documents, dtype=torch.int32, device=DEVICE).expand(B, T)
    grads = [make(B, T, H, D).to(dtype), make(B, HKV, D, D), make(B, HKV, D)]
    return [q, k, v, documents, *given], [x.to(DEVICE) for x in grads]


def results(attention, tensors, grads, to=lambda x: x):
    """Return {name: tensor} of y, S, z and the gradients to q, k, v and the initial S, z, and m; `to` casts inputs."""
    leaves = [x if x is None or not x.is_floating_point() else to(x).detach().requires_grad_() for x in tensors]
    y, m, S, z = attention(*leaves)
    wanted = [leaves[i] for i in (0, 1, 2, 5, 6) if leaves[i] is not None]
    outputs = [(x, g) for x, g in zip((y, S, z), grads) if x.numel() and g is not None]
    found = torch.autograd.grad([x for x, _ in outputs], wanted, [g.to(x.dtype) for x, g in outputs])
    return dict(zip(NAMES, (y, S, z, *found))), m


def assert_right(tensors, grads, exact=1e-5):
    """Compare with float64: in bfloat16 to 4e-3 and gradients to 8e-3, in float32 to `exact`; m is the oracle's."""
    found, m = results(lambda *x: heinsen_attention(*x, final=grads[1] is not None), tensors, grads)
    expected, reference = results(oracle, tensors, grads, torch.Tensor.double)
    if m.numel():
        assert (m - reference).abs().max() <= 1e-6 * reference.abs().max()
    for name, x in found.items():
        if not x.numel():
            continue
        assert x.isfinite().all(), name
        tolerance = exact if tensors[0].dtype == torch.float32 else 8e-3 if name.startswith("d") else 4e-3
        error = relative_error(x, expected[name], 1e-3 * grads[0].double().norm().item())
        assert error <= tolerance, f"{name}: error {error:.1e}"


@pytest.mark.parametrize("dtype", DTYPES if GPU else [torch.float32])
@pytest.mark.parametrize("T,final", [(1, True), (17, False), (50, True)])
def test_every_length_with_and_without_states(T, final, dtype):
    tensors, grads = inputs(T, dtype, state=final)
    assert_right(tensors, grads if final else [grads[0], None, None])


@pytest.mark.parametrize("D", [16, 32, 64, 128] if GPU else [32, 64, 128])
def test_every_head_dimension(D):
    assert_right(*inputs(17, DTYPES[0], D=D, H=1, state=True))


@pytest.mark.parametrize("B,T", [(1, 0), (0, 3)])
def test_without_tokens_the_state_and_its_gradient_stay_and_without_sequences_nothing_fails(B, T):
    tensors, grads = inputs(3, torch.float32, H=1, state=True, documents=[0, 0, 1])
    q, k, v = (x[:B, :T].detach().requires_grad_() for x in tensors[:3])
    m, *state = (x[:B].detach().requires_grad_(x is not tensors[4]) for x in tensors[4:])
    grads = grads[0][:B, :T], *(x[:B] for x in grads[1:])
    y, last, *after = heinsen_attention(q, k, v, tensors[3][:B, :T], m, *state, final=True)
    dq, *found = torch.autograd.grad((y, *after), (q, *state), grads)
    assert y.shape == dq.shape == (B, T, 1, 16)
    for x, expected in zip((last, *after, *found), (m, *state, *grads[1:]), strict=True):
        assert torch.equal(x, expected)


def test_query_heads_share_heads_of_keys():
    assert_right(*inputs(18, DTYPES[0], H=4, HKV=2, state=True))


DOCUMENTS = {
    "inside blocks": [0] * 5 + [1] * 15 + [4] * 1 + [5] * 19,
    "at blocks and chunks": [0] * 16 + [1] * 16 + [2] * 8,
    "the state's alone": [0] * 40,
    "none of the state's": [3] * 33 + [7] * 7,
}


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_documents_see_only_themselves(documents):
    assert_right(*inputs(40, torch.float32, H=1, state=True, documents=DOCUMENTS[documents]))


def test_documents_of_each_sequence_and_without_a_state():
    tensors, grads = inputs(18, DTYPES[0], B=2, H=2, HKV=1)
    tensors[3] = torch.tensor([[0] * 18, [0] * 5 + [1] * 13], dtype=torch.int32, device=DEVICE)
    assert_right(tensors, grads)


@pytest.mark.parametrize("dtype", DTYPES if GPU else [torch.float32])
@pytest.mark.parametrize("scale,grow", [(30.0, 0.0), (1.0, 80.0), (1.0, -80.0)])
def test_large_inputs_and_keys_that_grow_in_a_chunk(scale, grow, dtype):
    """q and k reach 80; keys grow by 80 in 32 tokens. float32 has 1e-5 left of a weight whose logarithm is 160."""
    tensors, grads = inputs(32, dtype, H=1, scale=scale, grow=grow, state=True)
    tensors[:2] = [x.clamp(-80, 80) for x in tensors[:2]]
    assert_right(tensors, grads, exact=5e-5)


def test_rows_do_not_depend_on_later_keys_and_nan_stays_in_the_rows_that_see_it():
    tensors, grads = inputs(36, torch.float32, H=2)
    y, at = heinsen_attention(*tensors)[0], 20
    for i, value in ((0, float("nan")), (1, float("nan")), (2, float("nan")), (1, 80.0)):
        changed = [x if x is None else x.clone() for x in tensors]
        changed[i][:, at, 0] = value
        found = heinsen_attention(*changed)[0]
        assert torch.equal(found[:, :at], y[:, :at])
        if i == 0:  # of one head and row
            assert torch.equal(found[:, at + 1 :], y[:, at + 1 :]) and torch.equal(found[:, :, 1], y[:, :, 1])
        assert not value == value or found.isfinite().all()
        seen = found[:, at : at + 1, :1] if i == 0 else found[:, at:]
        assert value == value or seen.isnan().all()


def test_nan_does_not_cross_documents():
    tensors, grads = inputs(33, torch.float32, H=1, documents=[0] * 20 + [1] * 13)
    expected, _ = results(lambda *x: heinsen_attention(*x, final=True), tensors, grads)
    for x in tensors[:3]:
        x[:, 18] = float("nan")
    found, _ = results(lambda *x: heinsen_attention(*x, final=True), tensors, grads)
    for name in NAMES[:6]:
        x, other = (y if name in "Sz" else y[:, 20:] for y in (found[name], expected[name]))
        assert torch.equal(x, other), name
    assert found["y"][:, 18:20].isnan().all() and found["y"][:, :18].isfinite().all()


def test_a_gradient_of_nan_reaches_no_later_key_and_no_other_query():
    tensors, (dy, *_) = inputs(18, torch.float32, H=1)
    expected, _ = results(heinsen_attention, tensors, [dy, None, None])
    dy[:, 5] = float("nan")
    found, _ = results(heinsen_attention, tensors, [dy, None, None])
    assert torch.equal(found["dq"][:, 6:], expected["dq"][:, 6:]) and torch.equal(
        found["dq"][:, :5], expected["dq"][:, :5]
    )
    for name in ("dk", "dv"):
        assert torch.equal(found[name][:, 6:], expected[name][:, 6:]) and found[name][:, :6].isnan().all()


def test_a_sequence_in_pieces_and_its_gradients_equal_the_whole():
    tensors, grads = inputs(36, torch.float32, H=1)

    def in_pieces(q, k, v, *nothing):
        y, *state = heinsen_attention(q[:, :19], k[:, :19], v[:, :19], final=True)
        rest, *state = heinsen_attention(q[:, 19:], k[:, 19:], v[:, 19:], None, *state, final=True)
        return torch.cat((y, rest), 1), *state

    found, m = results(in_pieces, tensors, grads)
    whole, reference = results(lambda *x: heinsen_attention(*x, final=True), tensors, grads)
    assert torch.equal(m, reference)
    assert all(relative_error(found[name], whole[name], 1e-6) < 1e-5 for name in whole)


def test_values_of_float32_beside_bfloat16():
    tensors, grads = inputs(18, DTYPES[0], H=1)
    tensors[2], grads[0] = tensors[2].float(), grads[0].float()
    y = heinsen_attention(*tensors)[0]
    assert y.dtype == torch.float32
    assert_right(tensors, grads)


def test_gradients_that_are_expanded_or_transposed():
    tensors, grads = inputs(10, torch.float32, H=2, HKV=2)
    for dy in (
        grads[0][:, :1, :1, :1].expand(grads[0].shape),
        torch.stack((grads[0], grads[0]), -1)[..., 0].transpose(1, 2).contiguous().transpose(1, 2),
    ):
        assert not dy.is_contiguous()
        assert_right(tensors, [dy, None, None])


def test_only_the_gradient_to_one_of_the_states():
    tensors, (dy, dS, dz) = inputs(10, torch.float32, H=1, state=True)
    for given in ((torch.zeros_like(dy), dS, None), (torch.zeros_like(dy), None, dz)):
        found, _ = results(lambda *x: heinsen_attention(*x, final=True), tensors, given)
        expected, _ = results(oracle, tensors, given, torch.Tensor.double)
        for name in NAMES[3:]:
            assert relative_error(found[name], expected[name], 1e-3) < 1e-5, name


def test_the_operator_keeps_torchs_rules():
    tensors, _ = inputs(3, DTYPES[0], H=1, state=True, documents=[0, 0, 1])
    leaves = [x if x is None or not x.is_floating_point() else x.detach().requires_grad_() for x in tensors]
    promises = ("test_schema", "test_autograd_registration", "test_faketensor")  # the others: the test below
    torch.library.opcheck(torch.ops.sympow.heinsen.default, (*leaves, True), test_utils=promises)


def test_a_compiled_function_has_no_graph_break():
    tensors, grads = inputs(10, torch.float32, H=1, state=True)
    attention = lambda q, *rest: heinsen_attention(2 * q, *rest, final=True)
    compiled = torch.compile(attention, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    for a, b in zip(results(compiled, tensors, grads)[0].values(), results(attention, tensors, grads)[0].values()):
        assert relative_error(a, b, 1e-6) < 1e-5


def test_a_second_derivative_is_refused_and_the_reference_has_no_gradient():
    tensors, (dy, *_) = inputs(5, torch.float32)
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    y, m, S, z = heinsen_attention(q, k, v, final=True)
    assert not m.requires_grad and S.requires_grad and z.requires_grad
    (dq,) = torch.autograd.grad(y, q, dy, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(dq.sum(), k)


@pytest.mark.gpu
def test_two_runs_give_the_same_bits():
    tensors, grads = inputs(3000, DTYPES[0], H=4, HKV=2, state=True)
    runs = [results(lambda *x: heinsen_attention(*x, final=True), tensors, grads)[0] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*(run.values() for run in runs)))


def test_nothing_is_left_unwritten():
    """Every element of every output is written: allocations are filled with NaN first."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        for T in (1, 300) if GPU else (17,):
            assert_right(*inputs(T, DTYPES[0], H=1, state=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_the_kernels_do_not_take_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    reason = heinsen_unsupported_reason
    assert [reason(dtype, 64, 64) for dtype in (torch.bfloat16, torch.float32)] == [""] * 2
    assert reason(torch.float64, 64, 64).startswith("float64 (they take bfloat16, float32")
    assert reason(torch.bfloat16, 130, 8) == "head dimension 130 (they take up to 128)"
    assert reason(torch.bfloat16, 64, 130) == "values 130 wide (they take up to 128)"


# For a process of its own without the interpreter: it compiles every launch of training for a Hopper GPU.
COMPILE = f"""
import sys
from pathlib import Path

sys.path[:0] = [{os.path.join(ROOT, "tests")!r}, {str(ROOT)!r}]
import sass, targets

for kernel, _, compile in targets.launches("sm_90"):
    if kernel.startswith("heinsen."):
        with targets.pretended("sm_90"):
            code = sass.disassemble(compile().asm["cubin"], Path(sys.argv[1]) / "kernel.cubin")
        print(kernel.rpartition(".")[2], len(sass.hazards(code)))
"""


@pytest.mark.slow
def test_no_product_on_hopper_loses_its_registers(tmp_path):
    """test_targets.py asserts that the kernels fit and do not spill."""
    pytest.importorskip("triton.backends.nvidia")
    done = run("-c", COMPILE, tmp_path, env={"TRITON_INTERPRET": None})
    lines = [line.split() for line in done.stdout.strip().splitlines()]
    assert {name for name, _ in lines} == {"chunk_sums", "carry_states", "forward", "dq", "dkdv"}
    assert all(hazards == "0" for _, hazards in lines), lines


# ---- on the GPU only


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D,documents", [(64, False), (64, True), (128, False)])
def test_long_sequences(D, documents, dtype, monkeypatch):
    monkeypatch.undo()  # chunks of the usual length
    documents = [i // 300 for i in range(1000)] if documents else None
    assert_right(*inputs(1000, dtype, D=D, state=True, documents=documents))


@pytest.mark.gpu
def test_extra_memory(monkeypatch):
    """At 12 heads of 64 the states need 16 KB each in CHUNK tokens, one set at a time; L and delta 8 bytes a row."""
    monkeypatch.undo()
    T, H, D = 65536, 12, 64
    tensors, (dy, *_) = inputs(T, torch.bfloat16, H=H, HKV=H, D=D)
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    run = lambda: torch.autograd.grad(heinsen_attention(*leaves)[0], leaves, dy)
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = dy.nbytes + sum(x.nbytes for x in run())
    extra = torch.cuda.max_memory_allocated() - before - outputs
    assert extra <= 1.1 * H * T * (4 * D * (D + 2) / heinsen.CHUNK + 8), f"{extra / 1e6:.0f} MB"


@pytest.mark.gpu
def test_a_new_length_compiles_nothing():
    kernels, counts = [x for x in vars(heinsen).values() if hasattr(x, "device_caches")], []
    for T in (512, 1000, 1, 2049, 333):
        tensors, grads = inputs(T, torch.bfloat16, B=2, H=4, HKV=2, D=64)
        results(lambda *x: heinsen_attention(*x, final=True), tensors, grads)
        counts.append(sum(len(x.device_caches[torch.cuda.current_device()][0]) for x in kernels))
    assert counts == counts[:1] * len(counts)
