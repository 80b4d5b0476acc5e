"""Heinsen's kernels: documents, states, large numbers and NaN; test_operators.py has sizes and lengths.

On the CPU in Triton's interpreter; with TEST_GPU=1 on the GPU.
"""

import math
import os
from functools import partial

import pytest
import torch
from helpers import ROOT, run
from numerics import relative_error

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from test_kernels import (  # noqa: E402
    DEVICE,
    GPU,
    assert_close,
    compiled_kernels,
    extra_memory,
    leaves_of,
)

from sympow.attention import heinsen_naive as naive  # noqa: E402
from sympow.kernels.heinsen import passes as heinsen  # noqa: E402
from sympow.kernels.support import why_not  # noqa: E402
from sympow.kernels.heinsen.operator import heinsen_attention  # noqa: E402

DTYPES = [torch.bfloat16, torch.float32]
NAMES = ("y", "S", "z", "dq", "dk", "dv", "dS", "dz")
with_states = partial(heinsen_attention, final=True)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Let a few tokens be several chunks, each of them several blocks."""
    monkeypatch.setattr(heinsen, "CHUNK", 32)


def oracle(q, k, v, documents=None, m=None, S=None, z=None):
    """Return (y, m, S, z) by the specification."""
    resets = None if documents is None else documents.diff(dim=1, prepend=torch.zeros_like(documents[:, :1])) > 0
    settings = dict(resets=resets, initial_state=None if m is None else (m, S, z))
    return naive.quadratic(q, k, v, **settings), *naive.state_after(k, v, **settings)


def inputs(T, dtype, B=1, H=2, HKV=1, D=16, state=False, documents=None, scale=1.0, grow=0.0, seed=0):
    """Return [q, k, v, documents, m, S, z] and the gradients to (y, S, z); q, k, v are views of one fused projection.

    scale multiplies q and k, grow is by how much keys grow over the T tokens, and the values of all fit dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE)
    qkv = make(B, T, H + 2 * HKV, D)
    qkv[:, :, : H + HKV] *= scale
    qkv[:, :, H : H + HKV] += grow * torch.arange(T, device=DEVICE).div(max(T - 1, 1))[:, None, None]
    q, k, v = qkv.to(dtype).split((H, HKV, HKV), dim=2)
    initial = naive.state_after(scale * make(B, 20, HKV, D), make(B, 20, HKV, D)) if state else [None] * 3
    if documents is not None:
        documents = torch.tensor(documents, dtype=torch.int32, device=DEVICE).expand(B, T)
    return [q, k, v, documents, *initial], [make(B, T, H, D).to(dtype), make(B, HKV, D, D), make(B, HKV, D)]


def results(attention, tensors, grads, to=lambda x: x):
    """Return {name: tensor} of y, S, z and the gradients to q, k, v and the initial S, z, and m; `to` casts inputs."""
    leaves = leaves_of(tensors, to)
    y, m, S, z = attention(*leaves)
    assert not m.requires_grad
    outputs = [(x, g.to(x.dtype)) for x, g in zip((y, S, z), grads) if g is not None]
    inputs = [x for x in leaves[:3] + leaves[5:] if x is not None]
    gradients = torch.autograd.grad([x for x, _ in outputs], inputs, [g for _, g in outputs])
    return dict(zip(NAMES, (y, S, z, *gradients))), m


def assert_right(tensors, grads, exact=1e-5, attention=heinsen_attention):
    """Compare with float64: in bfloat16 to 4e-3 and gradients to 8e-3, in float32 to `exact`; m is the oracle's."""
    final = any(x is not None for x in grads[1:])
    computed, m = results(partial(attention, final=final), tensors, grads)
    expected, reference = results(oracle, tensors, grads, torch.Tensor.double)
    if final:
        assert (m - reference).abs().max() <= 1e-6 * reference.abs().max()
    for name, x in computed.items():
        if not x.numel():
            continue
        assert x.isfinite().all(), name
        tolerance = exact if tensors[0].dtype == torch.float32 else 8e-3 if name.startswith("d") else 4e-3
        error = relative_error(x, expected[name], 1e-3 * grads[0].double().norm().item())
        assert error <= tolerance, f"{name}: error {error:.1e}"


@pytest.mark.parametrize("B,T", [(1, 0), (0, 3)])
def test_without_tokens_the_state_and_its_gradient_stay_and_without_sequences_nothing_fails(B, T):
    (*tokens, m, S, z), (dy, dS, dz) = inputs(3, torch.float32, H=1, state=True, documents=[0, 0, 1])
    state = [x[:B] for x in (m, S, z)]
    grads = [dy[:B, :T], dS[:B], dz[:B]]
    computed, last = results(with_states, [x[:B, :T] for x in tokens] + state, grads)
    assert computed["y"].shape == computed["dq"].shape == (B, T, 1, 16)
    after = [last, *(computed[name] for name in ("S", "z", "dS", "dz"))]
    assert all(map(torch.equal, after, state + grads[1:]))


DOCUMENTS = {
    "inside blocks": [0] * 5 + [1] * 15 + [4] * 1 + [5] * 19,
    "at blocks and chunks": [0] * 16 + [1] * 16 + [2] * 8,
    "the state's alone": [0] * 40,
    "none of the state's": [3] * 33 + [7] * 7,
    "of each sequence": [[0] * 40, [0] * 5 + [1] * 35],
}


@pytest.mark.parametrize("state,dtype", [(True, torch.float32), (False, DTYPES[0])])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_documents_see_only_themselves(documents, state, dtype):
    assert_right(*inputs(40, dtype, B=2, state=state, documents=DOCUMENTS[documents]))


@pytest.mark.parametrize("dtype", DTYPES if GPU else [torch.float32])
@pytest.mark.parametrize("scale,grow", [(30.0, 0.0), (1.0, 80.0), (1.0, -80.0)])
def test_large_inputs_and_keys_that_grow_in_a_chunk(scale, grow, dtype):
    """q and k reach 80; keys grow by 80 in 32 tokens. At a logarithm of 160 a weight in float32 has 1e-5 left."""
    tensors, grads = inputs(32, dtype, H=1, scale=scale, grow=grow, state=True)
    tensors[:2] = [x.clamp(-80, 80) for x in tensors[:2]]
    assert_right(tensors, grads, exact=5e-5)


@pytest.mark.parametrize("tensor,value", [("q", math.nan), ("k", math.nan), ("v", math.nan), ("k", 80.0)])
def test_rows_do_not_depend_on_later_keys_and_nan_stays_in_the_rows_that_see_it(tensor, value):
    tensors, _ = inputs(36, torch.float32, H=2)
    y = heinsen_attention(*tensors)[0]
    tensors["qkv".index(tensor)][:, 20, 0] = value
    changed = heinsen_attention(*tensors)[0]
    rows, heads = (slice(20, 21), slice(0, 1)) if tensor == "q" else (slice(20, None), slice(None))
    seen = changed[:, rows, heads]
    assert seen.isnan().all() if math.isnan(value) else seen.isfinite().all()
    seen.copy_(y[:, rows, heads])
    assert torch.equal(changed, y)


def assert_equal_rows(rows, names, computed, expected):
    for name in names:
        assert torch.equal(computed[name][:, rows], expected[name][:, rows]), name


def test_nan_does_not_cross_documents():
    tensors, grads = inputs(33, torch.float32, H=1, documents=[0] * 20 + [1] * 13)
    expected, _ = results(with_states, tensors, grads)
    for x in tensors[:3]:
        x[:, 18] = math.nan
    computed, _ = results(with_states, tensors, grads)
    assert_equal_rows(slice(20, None), ("y", "dq", "dk", "dv"), computed, expected)
    assert_equal_rows(slice(None), ("S", "z"), computed, expected)
    assert computed["y"][:, 18:20].isnan().all() and computed["y"][:, :18].isfinite().all()


def test_a_gradient_of_nan_reaches_no_later_key_and_no_other_query():
    tensors, (dy, *_) = inputs(18, torch.float32, H=1)
    expected, _ = results(heinsen_attention, tensors, [dy])
    dy[:, 5] = math.nan
    computed, _ = results(heinsen_attention, tensors, [dy])
    assert_equal_rows(slice(6, None), ("dq", "dk", "dv"), computed, expected)
    assert_equal_rows(slice(None, 5), ("dq",), computed, expected)
    assert computed["dk"][:, :6].isnan().all() and computed["dv"][:, :6].isnan().all()


def test_gradients_that_are_expanded_or_transposed_or_of_one_state():
    tensors, (dy, dS, dz) = inputs(10, torch.float32, H=2, HKV=2, state=True)
    expanded = dy[:, :1, :1, :1].expand(dy.shape)
    transposed = dy.transpose(1, 2).contiguous().transpose(1, 2)
    assert not expanded.is_contiguous() and not transposed.is_contiguous()
    for grads in ([expanded, None, None], [transposed, None, None], [dy, dS, None], [dy, None, dz]):
        assert_right(tensors, grads)


def test_the_operator_keeps_torchs_rules():
    tensors, _ = inputs(3, DTYPES[0], H=1, state=True, documents=[0, 0, 1])
    promises = ("test_schema", "test_autograd_registration", "test_faketensor")  # the others: the test below
    torch.library.opcheck(torch.ops.sympow.heinsen.default, (*leaves_of(tensors), True), test_utils=promises)


def test_a_compiled_function_has_no_graph_break():
    tensors, grads = inputs(10, torch.float32, H=1, state=True)
    attention = lambda q, *rest: with_states(2 * q, *rest)
    compiled = torch.compile(attention, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    computed, expected = (results(function, tensors, grads)[0].values() for function in (compiled, attention))
    assert_close(computed, expected, 1e-5)


def test_what_the_kernels_do_not_take_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    reason = partial(why_not, "heinsen", p=0)
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
def test_extra_memory(monkeypatch):
    """At 12 heads of 64 the states need 16 KB each in CHUNK tokens, one set at a time; L and delta 8 bytes a row."""
    monkeypatch.undo()
    T, H, D = 65536, 12, 64
    tensors, (dy, *_) = inputs(T, torch.bfloat16, H=H, HKV=H, D=D)
    extra = extra_memory(lambda *x: heinsen_attention(*x)[0], leaves_of(tensors[:3]), dy)
    assert extra <= 1.1 * H * T * (4 * D * (D + 2) / heinsen.CHUNK + 8), f"{extra / 1e6:.0f} MB"


@pytest.mark.gpu
def test_a_new_length_compiles_nothing():
    counts = []
    for T in (512, 1000, 1, 2049, 333):
        results(with_states, *inputs(T, torch.bfloat16, B=2, H=4, HKV=2, D=64))
        counts.append(compiled_kernels(heinsen))
    assert counts == counts[:1] * len(counts)
