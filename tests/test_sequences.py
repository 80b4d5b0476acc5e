"""Packed sequences: with cu_seqlens each sequence is computed as it is alone, in every form, with states in and out.

The kernels in Triton's interpreter, with TEST_GPU=1 on the GPU; test_combinations.py compares all forms with float64.
"""

import gc
from itertools import accumulate

import numpy as np
import pytest
import torch
from numerics import DEVICE, gradients, relative_error
from test_combinations import PLAIN, create

from sympow.attention.operator import dispatch, sequences
from sympow.attention.operator.forms import PowerState
from sympow.attention.power import power_attention

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from sympow.kernels import operators  # noqa: E402


def make(lengths, gates="learned", heads=(2, 1), D=16, p=2, state=True, dtype="float32"):
    """Return cu_seqlens and {name: tensor} of random packed sequences, with log_g and an initial state or None."""
    case = dict(T=sum(lengths), packed=lengths, gates=gates, heads=heads, D=D, p=p, dtype=dtype, batch=1)
    tensors, _ = create(PLAIN | case | dict(state="initial" if state else "none"))
    ends = torch.tensor([0, *accumulate(lengths)], device=DEVICE, dtype=torch.int32)
    return ends, {name: tensors.get(name) for name in ("q", "k", "v", "log_g", "S", "z")}


def results(attend, x, **options):
    """Return attend(**x) and the gradients to x of random weights of it, by name; y is first, then S and z."""
    tensors = {name: t for name, t in x.items() if t is not None}
    function = lambda *leaves: attend(**(x | dict(zip(tensors, leaves))), **options)
    values = gradients(function, tensors.values())
    names = ["y", "S after", "z after"][: len(values) - len(tensors)]
    return dict(zip((*names, *(f"d{name}" for name in tensors)), values, strict=True))


def packed(q, k, v, log_g, S, z, return_state=True, **options):
    state = None if S is None else PowerState(S, z)
    output = power_attention(q, k, v, log_g, initial_state=state, return_state=return_state, **options)
    return (output[0], *output[1]) if return_state else (output,)


def assert_close(values, expected, limit):
    """Compare what two calls of `results` return."""
    assert values.keys() == expected.keys()
    for name, r in expected.items():
        error = relative_error(values[name], r, 1e-3)
        assert error <= limit, f"{name}: error {error:.1e}"


def assert_near_float64(values, x, **options):
    """Compare what `results` returns of the kernels with the same inputs in float64, in PyTorch."""
    exact = {name: t if t is None else t.double() for name, t in x.items()}
    assert_close(values, results(packed, exact, **options), 1e-4)


LENGTHS = [3, 0, 1, 4, 0]


def test_one_sequence_is_what_it_is_without_cu_seqlens():
    cu_seqlens, x = make([7], dtype="float64")
    assert_close(results(packed, x, cu_seqlens=cu_seqlens), results(packed, x), 0)


@pytest.fixture
def on_kernels(monkeypatch):
    """Let power_attention use the kernels in float32, wherever tensors are; return the names of what it called."""
    called = []
    monkeypatch.setattr(dispatch, "why_not", lambda form, device, dtype, *_: "no" * (dtype == torch.float64))
    for name in ("chunked_attention", "quadratic_attention"):
        real = getattr(operators, name)
        call = lambda *a, name=name, real=real, **o: called.append(name) or real(*a, **o)
        monkeypatch.setattr(operators, name, call)
    return called


slow = pytest.mark.slow
# lengths, gates, is there an initial state, p
PACKED = [
    ([129, 0], "strong", True, 2),
    pytest.param([3, 0, 128], "none", False, 2, marks=slow),
    pytest.param([129, 1], "near one", True, 4, marks=slow),
]


@pytest.mark.parametrize("lengths,gates,state,p", PACKED)
def test_with_states_the_kernels_compute_each_sequence_alone(lengths, gates, state, p, on_kernels):
    cu_seqlens, x = make(lengths, gates, heads=(1, 1), p=p, state=state)
    values = results(packed, x, p=p, cu_seqlens=cu_seqlens, form="chunked", chunk_size=128)
    assert on_kernels == ["chunked_attention"] * sum(n > 0 for n in lengths)
    assert_near_float64(values, x, p=p, cu_seqlens=cu_seqlens, form="quadratic")


def test_states_of_sequences_whose_lengths_cannot_be_read_are_refused(monkeypatch):
    cu_seqlens, x = make([3, 2], heads=(1, 1))
    monkeypatch.setattr(sequences, "is_capturing", lambda x: True)
    with pytest.raises(ValueError, match="cannot be read while a CUDA graph is captured"):
        packed(**x, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("form,gates", [("quadratic", "zeros"), pytest.param("chunked", "none", marks=slow)])
def test_without_states_packed_sequences_are_computed_at_once(form, gates, on_kernels):
    lengths = [64, 0, 37, 30, 0]
    cu_seqlens, x = make(lengths, gates, heads=(1, 1), state=False)
    values = results(packed, x, cu_seqlens=cu_seqlens, form=form, return_state=False)
    assert on_kernels == [f"{form}_attention"]
    assert_near_float64(values, x, cu_seqlens=cu_seqlens, return_state=False)


def test_short_sequences_take_the_quadratic_form_and_long_ones_chunks(monkeypatch):
    monkeypatch.setattr(dispatch, "why_not", lambda *_: "")

    def form(*lengths):
        typical = sequences.typical_length(lengths, sum(lengths), len(lengths))
        return dispatch.plan(dispatch.Problem(typical, 64, 64, 2, torch.bfloat16, "cpu", gated=True)).form

    assert form(*64 * [1024]) == "quadratic" and form(*4 * [16384]) == "chunked"
    assert form(32768, *32 * [1024]) == "chunked"  # where half of the tokens are
    assert sequences.typical_length((3, 1), 4, 2) == 2 and sequences.typical_length(None, 100, 4) == 25


def test_lengths_in_memory_of_numpy_are_read_again():
    """torch does not notice what is written there, or through .data."""
    _, x = make([2, 6], state=False)
    ends = np.array([0, 2, 8])
    cu_seqlens = torch.from_numpy(ends)
    tensors = x["q"].cpu(), x["k"].cpu(), x["v"].cpu()
    power_attention(*tensors, cu_seqlens=cu_seqlens)
    ends[1] = 5
    y, expected = (power_attention(*tensors, cu_seqlens=t) for t in (cu_seqlens, torch.tensor([0, 5, 8])))
    assert torch.equal(y, expected)


def test_lengths_on_a_gpu_are_read_once(monkeypatch):
    gc.collect()
    count, reads, read = len(sequences.known_lengths), [], sequences.read_lengths
    monkeypatch.setattr(sequences, "read_lengths", lambda x: reads.append(1) or read(x))
    monkeypatch.setattr(sequences, "READ_WITHOUT_WAITING", set())
    cu_seqlens = torch.tensor([0, 2, 5])
    assert [sequences.sequence_lengths(cu_seqlens, 5) for _ in range(3)] == 3 * [(2, 3)] and len(reads) == 1
    cu_seqlens[1] = 4
    assert sequences.sequence_lengths(cu_seqlens, 5) == (4, 1) and len(reads) == 2
    assert len(sequences.known_lengths) == count + 1
    del cu_seqlens
    assert len(sequences.known_lengths) == count
    with torch.inference_mode():
        assert sequences.sequence_lengths(torch.tensor([0, 1]), 1) == (1,)


@slow
def test_torch_compile_takes_packed_sequences():
    _, x = make(LENGTHS, D=3, state=False, dtype="float64")
    tensors = [x[name] for name in ("q", "k", "v", "log_g")]
    attend = lambda q, k, v, log_g, cu_seqlens: power_attention(q, k, v, log_g, cu_seqlens=cu_seqlens)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="eager")
    for ends in ([0, 3, 3, 4, 8, 8], [0, 8], [0, 0, 4, 5, 8]):
        ends = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        assert torch.allclose(compiled(*tensors, ends), attend(*tensors, ends), rtol=1e-12)


@slow
def test_torch_compile_breaks_its_graph_for_states():
    cu_seqlens, x = make(LENGTHS, D=3, dtype="float64")
    attend = lambda *tensors: packed(*tensors, cu_seqlens=cu_seqlens)
    for a, b in zip(torch.compile(attend, backend="eager")(*x.values()), attend(*x.values())):
        assert torch.equal(a, b)


def test_meta_tensors_give_the_shapes():
    cu_seqlens, x = make(LENGTHS, heads=(4, 2), state=False)
    meta = {name: t if t is None else t.to("meta") for name, t in x.items()}
    y, S, z = packed(**meta, cu_seqlens=cu_seqlens.to("meta"))
    assert y.shape == (1, 8, 4, 16) and S.shape == (5, 2, 136, 16) and z.shape == (5, 2, 136)


@pytest.mark.parametrize(
    "cu_seqlens,message",
    [
        ([0, 8], "must be a tensor of torch.int32 or torch.int64, got list"),
        (torch.tensor([0.0, 8.0]), "must be a tensor of torch.int32 or torch.int64, got torch.float32"),
        (torch.tensor([[0, 8]]), r"must be \[N \+ 1\] for N sequences, N at least 1, got \[1, 2\]"),
        (torch.tensor([0]), r"must be .*, N at least 1, got \[1\]"),
        (torch.tensor([0, 8], device="meta"), "must be on q's device, cpu, got meta"),
        (torch.tensor([1, 8]), "must begin with 0, got 1"),
        (torch.tensor([0, 5, 3, 8]), "must not decrease, got 5 and then 3"),
        (torch.tensor([0, 7]), "must end with the number of tokens, 8, got 7"),
    ],
)
def test_what_cu_seqlens_must_be(cu_seqlens, message):
    q = torch.randn(1, 8, 1, 4)
    with pytest.raises(ValueError, match=f"^cu_seqlens {message}$"):
        power_attention(q, q, q, cu_seqlens=cu_seqlens)


def test_what_must_fit_cu_seqlens():
    q, cu_seqlens = torch.randn(1, 8, 1, 4), torch.tensor([0, 3, 8])
    two = q.expand(2, 8, 1, 4)
    for x in ((two, two, two), (q[:, 4:], q, q)):
        message = r"with cu_seqlens q and k must be \[1, T, H, D\] of the same T tokens, got"
        with pytest.raises(ValueError, match=message):
            power_attention(*x, cu_seqlens=cu_seqlens)
    state = PowerState(torch.zeros(1, 1, 10, 4), torch.zeros(1, 1, 10))
    with pytest.raises(ValueError, match=r"must be S \[2, 1, 10, 4\], z \[2, 1, 10\], got S \[1, 1, 10, 4\]"):
        power_attention(q, q, q, initial_state=state, cu_seqlens=cu_seqlens)
