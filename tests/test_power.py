"""The forms of power attention against the float64 oracle: outputs, states and every gradient.

test_combinations.py compares pairs of all arguments.
"""

import math
from functools import partial

import pytest
import torch
from helpers import raises_one_line
from numerics import GATES, gradients, relative_error
from test_combinations import assert_equals_float64

from sympow.attention import heinsen_attention, naive, power
from sympow.attention.adaptive_power import adaptive_power_attention
from sympow.attention.embedding import symmetric_power_dim
from sympow.attention.operator import check, dispatch, forms, memory
from sympow.attention.operator.dispatch import FORMS, Problem
from sympow.attention.operator.forms import PowerState, read_cache
from sympow.attention.power import power_attention, power_attention_sums
from sympow.model import GPTConfig

from sympow.module import Attention

CHUNK = 16
COMPUTED = [f for f in FORMS if f != "auto"]


def inputs(T, p, gates, H=4, Hkv=2, D=4, E=6, with_state=False):
    """Return q, k, v, log_g (or None), S0, z0 (or none) of two sequences as float64 leaves."""
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
    tensors = [make(2, T, H, D), make(2, T, Hkv, D), make(2, T, Hkv, E), GATES[gates](make(2, T, Hkv))]
    if with_state:
        tensors += naive.state_after(make(2, 5, Hkv, D), make(2, 5, Hkv, E), p=p)
    return [x if x is None else x.requires_grad_() for x in tensors]


def floats(T, p, gates="none", **sizes):
    """Return q, k, v, log_g (or None) of `inputs` in float32, without gradients."""
    return [x if x is None else x.detach().float() for x in inputs(T, p, gates, **sizes)[:4]]


def cut(tensors, start, end=None):
    """Return the tokens from start to end of each tensor."""
    return [x if x is None else x[:, start:end] for x in tensors]


def oracle64(tensors, p):
    """Return y of q, k, v and perhaps log_g (or None), computed from all pairs in float64."""
    return naive.quadratic(*(x if x is None else x.detach().double() for x in tensors), p=p)


def reset(T, t):
    """Return log_g of zeros, two sequences and two heads, with a document that begins at token t."""
    log_g = torch.zeros(2, T, 2)
    log_g[:, t] = float("-inf")
    return log_g


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("p", [2, 4])
def test_the_specification_is_one_function_in_two_forms(p, gates):
    q, k, v, log_g, *state = inputs(23, p, gates, D=3, with_state=True)
    y = naive.quadratic(q, k, v, log_g, p=p, initial_state=state)
    recurrent, end = naive.recurrent(q, k, v, log_g, p=p, initial_state=state)
    last = naive.state_after(k, v, log_g, p=p, initial_state=state)
    assert torch.allclose(recurrent, y, rtol=1e-9) and all(map(torch.allclose, end, last))


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("form", COMPUTED)
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17])
def test_every_form_equals_float64_around_the_ends_of_chunks_with_any_gates(T, form, gates):
    assert_equals_float64(T=T, form=form, gates=gates, chunk_size=CHUNK, D=4, E="wider", heads=(4, 2), batch=2)


def test_blocks_of_rows_equal_one_block(monkeypatch):
    monkeypatch.setitem(forms.SCORES_AT_ONCE, "cpu", 1)  # blocks of 16 rows, the fewest there are
    monkeypatch.setattr(forms, "FEATURES_AT_ONCE", 1)  # features token by token
    assert_equals_float64(T=53, p=4, gates="zeros", state="both", gradient="of both", D=4, heads=(4, 2), batch=2)


def error_after_rounding(q, k, v, dtype=torch.float32, **options):
    """Return the relative error of power_attention of tensors in dtype."""
    q, k, v = (x.detach().to(dtype) for x in (q, k, v))
    y = power_attention(q, k, v, **options)
    assert y.dtype == dtype
    return relative_error(y, oracle64((q, k, v), options["p"]), 1e-3)


@pytest.mark.parametrize("p,size", [(p, s) for p in (2, 4, 6, 8) for s in (1e-6 if p < 6 else 1e-4, 1, 1e4)])
@pytest.mark.parametrize("form", ["quadratic", "chunked"])
def test_scores_of_any_size_neither_overflow_nor_vanish(form, p, size):
    q, k, v, *_ = inputs(40, p, "none", H=2, Hkv=2, D=4, E=4)
    factor = size / (0.5 * q * k).sum(-1).abs().mean().item()
    assert error_after_rounding(q * factor, k, v, p=p, form=form, chunk_size=CHUNK) < 1e-4


@pytest.mark.parametrize("form", COMPUTED)
@pytest.mark.parametrize("p", [2, 8])
def test_a_lone_key_that_the_query_is_nearly_orthogonal_to_returns_its_value(p, form):
    q, k, v = torch.tensor([1.0, 0.0]), torch.tensor([1e-4, 1.0]), torch.tensor([-1.73, 0.5])
    y = power_attention(*(x.view(1, 1, 1, 2) for x in (q, k, v)), p=p, form=form)
    assert torch.allclose(y.flatten(), v)


@pytest.mark.parametrize("form", ["quadratic", "chunked"])
@pytest.mark.parametrize("size", [1e-6, 1e4])
def test_asking_for_the_state_does_not_change_the_outputs(form, size):
    q, k, v, _ = floats(40, 8, H=2, Hkv=2, E=4)
    attend = lambda **options: power_attention(q, size * k, v, p=8, form=form, chunk_size=CHUNK, **options)
    y, state = attend(return_state=True)
    assert torch.equal(y, attend()) and attend(initial_state=state).isfinite().all()


def attend_in_pieces(q, k, v, log_g, p):
    """Compute y as generation does: two pieces of a prompt, then token by token, with the cache flushed once."""
    outputs, state, begin, flushed = [], None, 0, 0
    for end in (16, 24, *range(25, q.shape[1] + 1)):
        cached = cut((k, v, log_g), flushed, end)
        y, state = read_cache(q[:, begin:end], *cached, state, p=p, flush_cache=end == 24)
        flushed, begin = 24 if end >= 24 else 0, end
        outputs.append(y)
    return torch.cat(outputs, 1)


def each_form(q, k, v, log_g=None, p=2):
    """Yield (name, y) for all forms, and generation, of one function."""
    for form in COMPUTED:
        yield form, power_attention(q, k, v, log_g, p=p, form=form, chunk_size=CHUNK)
    yield "generation", attend_in_pieces(q, k, v, log_g, p)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["q", "k", "v", "log_g", "one entry of v"])
def test_nan_comes_out_as_nan_and_changes_no_row_before_it(where, value):
    clean = floats(40, 2, "near one")
    dirty = [x.clone() for x in clean]
    entries = 1 if where == "one entry of v" else ...
    name = "v" if entries == 1 else where
    dirty["q k v log_g".split().index(name)][1, 21, 0, entries] = value  # of the second sequence, the first head
    end, heads = (22, 1) if where == "q" else (40, 2)  # two query heads read the first head of keys
    for (form, y), (_, changed) in zip(each_form(*clean), each_form(*dirty)):
        assert torch.equal(changed[0], y[0]) and torch.equal(changed[1, :21], y[1, :21]), form
        assert changed[1, 21:end, :heads].isnan().all(), form
        assert changed[1, :, 2:].isfinite().all(), form


@pytest.mark.parametrize("gates", ["none", "zeros"])
@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_rows_before_a_larger_key_do_not_depend_on_it(p, gates):
    q, k, v, log_g = floats(40, p, gates)
    larger = torch.cat((k[:, :26], 2.0**27 * k[:, 26:]), 1)
    ref = oracle64((q, larger, v, log_g), p)
    for (form, y), (_, changed) in zip(each_form(q, k, v, log_g, p), each_form(q, larger, v, log_g, p)):
        assert torch.equal(changed[:, :26], y[:, :26]), form
        if form != "generation" or p < 6:  # its state does not hold the eighth power
            assert relative_error(changed[:, 26:], ref[:, 26:], 1e-3) < 1e-4, form


@pytest.mark.parametrize("small", [0.0, 2.0**-90])
@pytest.mark.parametrize("p", [2, 4])
def test_rows_that_see_only_zero_or_tiny_keys_are_finite_and_without_weight_zero(p, small):
    leaves = q, k, v, log_g = floats(40, p, "half")
    k[:, :3] *= small
    q[:, 5] = 0  # no weight on any key
    for x in leaves:
        x.requires_grad_()
    ref = oracle64(leaves, p).nan_to_num(0)  # 0 / 0 without weight
    without = [5] if small else [0, 1, 2, 5]
    for form, y in each_form(q, k, v, log_g, p):
        assert (y[:, without] == 0).all(), form
        if form == "generation":  # its state holds p-th powers of keys as they are
            assert y[:, :24].isfinite().all()
            continue
        assert relative_error(y, ref, 1e-3) < 1e-4, form
        grads = torch.autograd.grad(y[:, 3 if small else 0 :].square().sum(), leaves)
        assert all(g.isfinite().all() for g in grads) and (grads[0][:, without] == 0).all(), form


@pytest.mark.parametrize("form", COMPUTED)
@pytest.mark.parametrize("p", [2, 8])
def test_a_document_of_small_keys_follows_one_of_large_keys(form, p):
    q, k, v, _ = floats(40, p)
    scaled = torch.cat((2.0**40 * k[:, :21], k[:, 21:]), 1)
    attend = lambda *x: power_attention(*x, p=p, form=form, chunk_size=CHUNK)
    y = attend(q, k, v, reset(40, 21))
    assert torch.equal(attend(q, scaled, v, reset(40, 21)), y)
    assert torch.allclose(y[:, 21:], attend(*cut((q, k, v), 21)), rtol=1e-3, atol=1e-5)


def test_a_state_out_of_range_gives_nan_not_zeros():
    q, k, v, _ = floats(40, 8, H=2, Hkv=2, E=4)
    _, state = power_attention(q, 1e5 * k, v, p=8, return_state=True)  # 1e40
    assert power_attention(q, k, v, p=8, initial_state=state).isnan().any()


@pytest.mark.parametrize("form", ["quadratic", "chunked"])
@pytest.mark.parametrize("mean", [3.0, 10.0])
def test_keys_with_a_common_mean_that_the_query_is_orthogonal_to(form, mean):
    q, k, v, *_ = inputs(200, 2, "none", H=2, Hkv=2, D=16, E=16)
    direction = torch.full((16,), 0.25, dtype=torch.float64)
    q = q - (q @ direction).unsqueeze(-1) * direction
    assert error_after_rounding(q, k + mean * direction, v, p=2, form=form, chunk_size=32) < 1e-3


def test_gates_lose_nothing_over_65536_tokens():
    T = 65536
    log_g = torch.full((1, T, 1), math.log(1 - 1e-6))
    k = torch.ones(1, T, 1, 2)
    v = torch.zeros(1, T, 1, 1)
    v[:, 0] = 1
    y = power_attention(k, k, v, log_g, p=2, form="chunked", chunk_size=1024)[0, -1, 0, 0].item()
    g = math.exp(log_g[0, 0, 0].item())  # as float32 has it
    assert y == pytest.approx(g ** (T - 1) / ((1 - g**T) / (1 - g)), rel=2e-4)


def tensors_of(shapes):
    """Return {name: tensor of ones} of a text such as "q=2,8,4,4 k=2,8,2,4"."""
    shapes = dict(shape.split("=") for shape in shapes.split())
    return {name: torch.ones(*map(int, shape.split(","))) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(p=3), "p must be a positive even integer, got 3"),
        (dict(p=0), "p must be a positive even integer"),
        (dict(p=10), "p must be a positive even integer, got 10: at most 8"),
        (dict(form="fast"), "form must be one of auto, quadratic, chunked, recurrent, got 'fast'"),
        (dict(chunk_size=0), "chunk_size must be a positive integer, got 0"),
        (dict(chunk_size=True), "chunk_size must be a positive integer, got True"),
        (dict(scale=0.0), "scale must be finite and not zero"),
        (dict(log_g=torch.full((2, 8, 2), 0.5)), "log_g must be <= 0, the logarithm of a gate, got 0.5"),
        (dict(log_g=3.0), "log_g must be a tensor or None, got float"),
        (dict(log_g=False), "log_g must be a tensor or None, got bool"),
        (dict(log_g=torch.zeros(2, 8, 2, dtype=torch.bool)), "floating point, got .* of torch.bool"),
        (dict(log_g=torch.zeros(2, 8, 2, dtype=torch.complex64)), "floating point, got .* of torch.complex64"),
        (dict(initial_state=PowerState(torch.zeros(2, 2, 9, 4), torch.zeros(2, 2, 9))),
         r"initial_state must be S \[2, 2, 10, 4\]"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(change, message):
    with raises_one_line(ValueError, message):
        power_attention(**tensors_of("q=2,8,4,4 k=2,8,2,4 v=2,8,2,4") | change)


def adaptive_attention(q, k, v, log_g=None):
    return adaptive_power_attention(q, k, v, torch.ones(q.shape[:2]), log_g=log_g)


@pytest.mark.parametrize("attention", [power_attention, adaptive_attention, heinsen_attention])
@pytest.mark.parametrize(
    "shapes,message",
    [
        ("log_g=2,8,4", r"log_g must be \[B, T, Hkv\] = \[2, 8, 2\]"),
        ("k=2,8,2,5", r"do not fit: \[2, 8, 4, 4\], \[2, 8, 2, 5\], \[2, 8, 2, 4\]"),
        ("k=2,7,2,4", "do not fit"),
        ("k=2,7,2,4 v=2,7,2,4", "the last n of T tokens, got n=8 above T=7"),
        ("k=2,8,3,4 v=2,8,3,4", "multiple of the key/value heads, got 4 and 3"),
        ("q=2,8,4", r"must be \[B, T, H, D\], got \[2, 8, 4\]"),
        ("q=2,0,4,4 k=2,0,2,4 v=2,0,2,4", "must be positive"),
        ("q=2,8,0,4", "must be positive"),
        ("k=2,8,0,4 v=2,8,0,4", "must be positive"),
        ("q=2,8,4,0 k=2,8,2,0", "must be positive"),
        ("v=2,8,2,0", "must be positive"),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_refused_by_every_attention_in_one_line(attention, shapes, message):
    if "log_g" in shapes and attention is heinsen_attention:
        pytest.skip("it has no gates")
    with raises_one_line(ValueError, message):
        attention(**tensors_of("q=2,8,4,4 k=2,8,2,4 v=2,8,2,4") | tensors_of(shapes))


@pytest.mark.parametrize("attention", [power_attention, adaptive_attention, heinsen_attention])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.int64, torch.int64)])
def test_tensors_of_several_dtypes_or_of_integers_are_refused_by_every_attention(attention, dtypes):
    q, k, v = tensors_of("q=2,8,4,4 k=2,8,2,4 v=2,8,2,4").values()
    with pytest.raises(ValueError, match="share one floating dtype"):
        attention(q.to(dtypes[0]), k.to(dtypes[0]), v.to(dtypes[1]))


@pytest.mark.parametrize("attention", [power_attention, adaptive_attention, heinsen_attention])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_no_tensor_is_refused_by_every_attention(attention, name):
    tensors = tensors_of("q=2,8,4,4 k=2,8,2,4 v=2,8,2,4")
    with raises_one_line(ValueError, "q, k, v must be tensors, got .*ndarray"):
        attention(**tensors | {name: tensors[name].numpy()})


def test_tensors_as_sdpa_takes_them_are_warned_of_and_short_texts_are_not(recwarn):
    q, k, v, _ = floats(8, 2)
    power_attention(q[:, :1], k[:, :1], v[:, :1])
    Attention(16, 8)(torch.randn(1, 3, 16))
    power_attention(*3 * [q.transpose(1, 2)])
    (warning,) = recwarn
    assert "transpose(1, 2)" in str(warning.message) and warning.filename == __file__


def test_a_state_that_does_not_fit_is_refused_with_its_bytes():
    x = torch.zeros(1, 2, 64, 128)
    need = 64 * symmetric_power_dim(128, 8) * 129 * 4
    with pytest.raises(MemoryError, match=f"{need:,} bytes"):
        power_attention(x, x, x, p=8, return_state=True)


def test_a_device_is_not_asked_for_memory_that_it_surely_has(monkeypatch):
    monkeypatch.delattr(memory, "free_memory")
    power_attention(*3 * [torch.ones(1, 2, 1, 4)], p=2, return_state=True)


@pytest.mark.parametrize("form", COMPUTED)
def test_a_batch_of_nothing_gives_nothing(form):
    tensors = inputs(20, 2, "learned")
    none = [x[:0] for x in tensors]
    y, state = power_attention(*none, form=form, chunk_size=CHUNK, return_state=True)
    assert y.shape == (0, 20, 4, 6) and state.S.shape == (0, 2, 10, 6)
    assert power_attention(*none, form=form, initial_state=state).shape == y.shape
    y.sum().backward()
    assert not tensors[0].grad.any()


def test_a_plain_pair_is_a_state():
    q, k, v, *_ = inputs(9, 2, "none")
    attend = lambda state: power_attention(q, k, v, initial_state=state)
    _, state = power_attention(q, k, v, return_state=True)
    for pair in (tuple, list):
        assert torch.equal(attend(pair(state)), attend(state))
    for value in (state.S, (state.S,), (*state, 1), (1, 2)):
        with pytest.raises(ValueError, match="PowerState or another tuple"):
            attend(value)


@pytest.mark.parametrize("form", FORMS)
def test_the_meta_device_gives_shapes(form):
    tensors = [x.detach().to("meta") for x in inputs(40, 2, "learned")[:4]]
    y, state = power_attention(*tensors, form=form, chunk_size=CHUNK, return_state=True)
    assert y.is_meta and y.shape == (2, 40, 4, 6) and state.z.shape == (2, 2, 10)
    with pytest.raises(ValueError, match="all tensors must be on one device, got q on meta, v on cpu"):
        power_attention(*tensors[:2], torch.ones(2, 40, 2, 6, dtype=torch.float64))


@pytest.mark.parametrize(
    "options", [{"p": 4}, pytest.param({"form": "chunked", "chunk_size": 4}, marks=pytest.mark.slow)]
)
def test_torch_compile_takes_settings_from_outside_and_has_a_graph_for_a_number_of_chunks(options):
    torch.compiler.reset()
    attend = partial(power_attention, **options)  # whole numbers are symbols under dynamic=True
    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (10, 11):
            tensors = inputs(T, 2, "learned")[:4]
            assert torch.allclose(compiled(*tensors), attend(*tensors), rtol=1e-9)


@pytest.mark.parametrize("p,n", [(2, 12), (4, 5)])
def test_sums_before_the_division(p, n):
    q, k, v, log_g = inputs(12, p, "zeros")
    q = (q * torch.logspace(-3, 3, 12, dtype=q.dtype)[:, None, None])[:, -n:]
    leaves = [q, k, v, log_g]

    def naive_sums(q, k, v, log_g, *, p, scale):
        decay = naive.gate_products(log_g.exp())[0][:, :, -n:].repeat_interleave(2, dim=1)
        k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
        w = decay * (scale * torch.einsum("bihd,bjhd->bhij", q, k)) ** p
        return torch.einsum("bhij,bjhe->bihe", w, v), w.sum(-1).transpose(1, 2)

    results = (gradients(partial(sums, p=p, scale=0.3), leaves) for sums in (power_attention_sums, naive_sums))
    assert all(relative_error(a, b, 1e-9) < 1e-10 for a, b in zip(*results))
    y = power_attention(q, k, v, log_g, p=p)
    num, den = power_attention_sums(*(x.half() for x in leaves[:3]), log_g.float(), p=p)
    assert num.dtype == den.dtype == torch.float32 and relative_error(num / den.unsqueeze(-1), y, 1e-9) < 2e-3


def test_the_gpu_of_the_tensors_is_asked_not_the_current_one(monkeypatch):
    devices, second = [], torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 if device == second else 7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(check, "compare", lambda sizes, device: devices.append(device) or "")
    monkeypatch.setattr(dispatch, "_warned", set())
    chosen = lambda device: dispatch.plan(Problem(64, 64, 64, 4, torch.bfloat16, device, gated=False))
    assert check.compare_plans([chosen(second)], torch.bfloat16, second, GPTConfig()) == ""
    assert devices.pop() == second
    with pytest.warns(UserWarning, match="GPU .they take compute capability 8.0"):
        assert not chosen(torch.device("cuda", 0)).on_kernels and not chosen("cuda").on_kernels

    ask = lambda problem, *x, **options: devices.append(problem.device) or dispatch.plan(problem, *x, **options)
    monkeypatch.setattr(power, "plan", ask)
    for function in (power_attention, power_attention_sums):
        function(*inputs(5, 2, "none")[:3])
        assert devices.pop() == torch.device("cpu")


@pytest.mark.parametrize(
    "p,form,dtype,queries",
    [(6, "auto", "float32", "all"), (2, "quadratic", "float32", "a third")]
    + [pytest.param(p, "auto", x, "all", marks=pytest.mark.slow) for p in (6, 8) for x in ("bfloat16", "float16")],
)
def test_a_state_comes_before_the_quadratic_kernels(p, form, dtype, queries, monkeypatch):
    """Sums over pairs on the kernels, which the interpreter runs, and what is read from the state in PyTorch."""
    operators = pytest.importorskip("sympow.kernels.operators", reason="Triton has no wheel for this system")
    monkeypatch.setattr(dispatch, "why_not", lambda form, device, dtype, *sizes: "no" * (form == "chunked"))
    dtypes, real = [], operators.quadratic_sums
    monkeypatch.setattr(operators, "quadratic_sums", lambda *x, **o: dtypes.append(x[0].dtype) or real(*x, **o))
    monkeypatch.setattr(forms, "FEATURES_AT_ONCE", 1)  # the state is read token by token

    def scale(tensors):
        """Give rows and states any size, and keys one with gradients in float16's range."""
        tensors["q"][:, ::3] *= 2.0**10
        tensors["k"] *= 0.5
        for name in "Sz":
            tensors[name] *= 2.0 ** (-4 * p)

    limit = 1e-5 if dtype == "float32" else 4e-2  # of ten seeds dq is worst: 1.2e-2, once 2.1e-2 (bfloat16, p=8)
    sizes = dict(T=24, D=3, E="wider", heads=(4, 2), batch=2)
    settings = dict(p=p, form=form, gates="zeros", state="both", gradient="of both", queries=queries, dtype=dtype)
    assert_equals_float64(limit, scale, **settings, **sizes)
    assert dtypes == 2 * [torch.bfloat16 if dtype == "bfloat16" else torch.float32]
