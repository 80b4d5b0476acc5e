"""The steps of the chunked form as operators against naive twins in float64: outputs and every gradient.

On the CPU in Triton's interpreter, in float32; with TEST_GPU=1 on the GPU, in bfloat16 and float32.
"""

from itertools import combinations_with_replacement

import pytest
import torch
from numerics import relative_error
from torch.nn.functional import logsigmoid

pytest.importorskip("triton", reason="Triton has no wheel for this system")

import test_heinsen_kernels  # noqa: E402
from test_kernels import DEVICE, DTYPES, GPU  # noqa: E402

from sympow.attention.operator import check, forms  # noqa: E402
from sympow.attention import gates  # noqa: E402
from sympow.attention.operator.check import Size  # noqa: E402
from sympow.attention.power import PowerState  # noqa: E402
from sympow.kernels import HEAD_DIMS, operators, unsupported_reason, width  # noqa: E402
from sympow.kernels.adaptive.operator import adaptive_attention  # noqa: E402
from sympow.kernels.arguments import narrow_state, to_width, widen_state  # noqa: E402
from sympow.kernels.heinsen.operator import heinsen_attention  # noqa: E402
from sympow.kernels.layout import positions_of_narrower  # noqa: E402

CHUNK, T = 128, 300  # a ragged last chunk
CASES = [(D, p, gated) for D, p in ((16, 2), (32, 2), (16, 4), (64, 2), (128, 2), (32, 4)) for gated in (True, False)]
FEW = {  # tokens and heads of the cases in the interpreter, which is slow
    (16, 2, True): dict(), (16, 2, False): dict(T=140), (32, 2, True): dict(T=140, H=2, Hkv=1),
    (32, 2, False): dict(T=60, H=1, Hkv=1), (16, 4, True): dict(T=140, H=1, Hkv=1),
    (16, 4, False): dict(T=60, H=1, Hkv=1),
}  # fmt: skip


# ---- twins: float64, decays written out as products of gates, one chunk after the other


def chunks(x):
    """Return x [B, T, heads, ..] as a list of chunks [B, heads, tokens, ..]."""
    return [part.transpose(1, 2) for part in x.split(CHUNK, dim=1)]


def decays(k, log_g):
    """Return each chunk's decays [B, Hkv, tokens]: from before the chunk to each token, and from each to its end."""
    if log_g is None:
        return [(torch.ones_like(x[..., 0]),) * 2 for x in chunks(k)]
    found = []
    for g in chunks(log_g.exp()):
        into = torch.stack([g[..., : t + 1].prod(-1) for t in range(g.shape[2])], dim=-1)
        after = torch.stack([g[..., t + 1 :].prod(-1) for t in range(g.shape[2])], dim=-1)
        found.append((into, after))
    return found


def naive_update_state(k, v, log_g=None, *, p, chunk):
    S, z = [], []
    for x, y, (_, after) in zip(chunks(k), chunks(v), decays(k, log_g), strict=True):
        S.append(forms.update_state(x, y * after.unsqueeze(-1), p))
        z.append(forms.update_state(x, after.unsqueeze(-1), p).squeeze(-1))
    return torch.stack(S, 1), torch.stack(z, 1)


def naive_discumsum(S, z, log_G=None, S0=None, z0=None):
    def scan(u, first):
        u, shape = u.transpose(1, 2), u.shape[3:]  # [B, Hkv, n, ..]
        g = torch.ones_like(u.flatten(3)[..., 0]) if log_G is None else log_G.exp().transpose(1, 2)
        states, last = forms.discumsum(u.flatten(3), g, None if first is None else first.flatten(2))
        return states.unflatten(3, shape).transpose(1, 2), last.unflatten(2, shape)

    (S, S_last), (z, z_last) = scan(S, S0), scan(z, z0)
    return S, z, S_last, z_last


def naive_query_state(q, S, z, log_g=None, *, p, chunk):
    Hkv, num, den = S.shape[2], [], []
    for i, (x, (into, _)) in enumerate(zip(chunks(q), decays(q[:, :, :Hkv], log_g), strict=True)):
        n, d = forms.query_state(x.unflatten(1, (Hkv, -1)), PowerState(S[:, i], z[:, i]), p)
        num.append((n * into[:, :, None, :, None]).flatten(1, 2).transpose(1, 2))
        den.append((d * into.unsqueeze(2)).flatten(1, 2).transpose(1, 2))
    return torch.cat(num, 1), torch.cat(den, 1)


NAIVE = dict(update_state=naive_update_state, discumsum=naive_discumsum, query_state=naive_query_state)


# ---- comparing


def make(name, **options):
    """Return the arguments of an operator. One of the gates is a reset, the others decay little."""
    options = dict(T=T, H=4, Hkv=2, D=16, chunk=CHUNK, dtype=DTYPES[0], device=DEVICE) | options
    arguments = operators.create_inputs(**options)[name]
    with torch.no_grad():
        if arguments.get("log_g") is not None:
            arguments["log_g"][:, options["T"] // 2, 0] = float("-inf")
        if arguments.get("log_G") is not None:
            arguments["log_G"][:, 1, 0] = float("-inf")
    return arguments


def results(operator, arguments, to=lambda x: x):
    """Return {name: tensor} of the outputs, and of the gradients of a sum of all of them with random weights."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    leaves = {name: to(x).detach().requires_grad_() for name, x in tensors.items()}
    outputs = operator(**(arguments | leaves))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(DEVICE) for x in outputs]
    grads = torch.autograd.grad(outputs, list(leaves.values()), [w.to(x) for w, x in zip(weights, outputs)])
    return {f"output {i}": x for i, x in enumerate(outputs)} | {f"d{name}": x for name, x in zip(leaves, grads)}


def assert_right(name, arguments):
    found = results(getattr(operators, name), arguments)
    expected = results(NAIVE[name], arguments, torch.Tensor.double)
    meta = {part: x.to("meta") if isinstance(x, torch.Tensor) else x for part, x in arguments.items()}
    for i, x in enumerate(getattr(operators, name)(**meta)):
        assert found[f"output {i}"].stride() == x.stride()
    half = torch.bfloat16 in [getattr(x, "dtype", None) for x in arguments.values()]
    for part, r in expected.items():
        x = found[part]
        assert x.shape == r.shape
        assert x.dtype == (arguments[part[1:]].dtype if part[1:] in arguments else torch.float32)
        error = relative_error(x, r, 1e-30)
        forward, backward = (4e-3, 8e-3) if half else (1e-5, 1e-4)
        assert error <= (forward if part.startswith("output") else backward), f"{part}: error {error:.1e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D,p,gated", CASES if GPU else FEW)
@pytest.mark.parametrize("name", ["update_state", "query_state"])
def test_an_operator_is_its_naive_twin(name, D, p, gated, dtype):
    few = {} if GPU else FEW[D, p, gated]
    assert_right(name, make(name, D=D, p=p, gated=gated, dtype=dtype, **few))


@pytest.mark.parametrize(
    "D,p,Hkv,gated,initial",
    [
        (16, 2, 2, True, True),
        (16, 2, 2, False, False),
        (32, 2, 1, True, False),
        (16, 2, 1, False, True),
        (16, 4, 1, True, True),
    ],
)
def test_discumsum_is_its_naive_twin(D, p, Hkv, gated, initial):
    arguments = make("discumsum", B=2 if GPU or p == 2 else 1, D=D, p=p, Hkv=Hkv, gated=gated)
    assert_right("discumsum", arguments if initial else {**arguments, "S0": None, "z0": None})


def test_discumsum_takes_any_strides():
    arguments = make("discumsum", T=400, B=2, Hkv=2)
    mirrored = lambda x: x.detach().permute(*range(x.ndim)[::-1]).contiguous().permute(*range(x.ndim)[::-1])
    assert_right("discumsum", {name: mirrored(x) for name, x in arguments.items()})
    assert_right("discumsum", {name: x.detach().flatten()[0].expand(x.shape) for name, x in arguments.items()})


@pytest.mark.parametrize("p,size", [(2, 1e-3), (2, 1e3), *([(4, 1e-3), (4, 1e3)] if GPU else [])])
def test_rows_and_states_of_any_size(p, size):
    keys, queries = (make(name, T=140, H=1, Hkv=1, p=p) for name in ("update_state", "query_state"))
    with torch.no_grad():
        keys["k"] *= size
        keys["v"] /= size
        queries["q"] *= size
        for state in ("S", "z"):
            queries[state][:, 0] *= size**3  # another power of two for each chunk
    assert_right("update_state", keys)
    assert_right("query_state", queries)


def test_views_of_a_fused_projection_and_heads_first():
    B, T, D = 2, 60, 16
    q, k, v = torch.randn(B, T, 4, D, device=DEVICE, dtype=DTYPES[0]).split((2, 1, 1), dim=2)
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    log_g = logsigmoid(torch.randn(B, 1, T, device=DEVICE) + 3).transpose(1, 2)
    assert_right("update_state", dict(k=k, v=v, log_g=log_g, p=2, chunk=CHUNK))
    q = q.transpose(1, 3).contiguous().transpose(1, 3)
    assert_right("query_state", make("query_state", B=B, T=T, Hkv=1) | dict(q=q, log_g=log_g))


# ---- rows of any width

HALF = torch.bfloat16 if GPU else torch.float16
PADDED = [
    (Size("quadratic", DTYPES[0], 24, 4, True, E=20, n=37), 60),
    (Size("quadratic", HALF, 130, 2, False, E=256), 33),
    (Size("sums", DTYPES[0], 12, 2, True, E=16, n=30), 40),
    (Size("adaptive", DTYPES[0], 20, 0, True, E=8, n=30), 40),
    (Size("chunked", DTYPES[0], 12, 2, True, E=20), 60),
    (Size("states", DTYPES[0], 12, 2, True, E=20), 60),
    *([(Size("states", DTYPES[0], 12, 4, False, E=10), 1500)] if GPU else []),  # the interpreter takes a minute
]


@pytest.mark.parametrize(
    "size,T",
    [pytest.param(*x, marks=[pytest.mark.slow] * (x[0].form in ("chunked", "states"))) for x in PADDED],
)
def test_rows_of_any_width_equal_float64(size, T):
    forward, backward = (1e-5, 1e-4) if size.dtype == torch.float32 else (4e-3, 5e-2)
    for name, error in check.errors(size, 1500 if GPU else T, DEVICE).items():
        assert error <= (forward if name == "y" else backward), f"{name}: error {error:.1e}"


@pytest.mark.parametrize("E", [12, pytest.param(5, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.slow)])
def test_log_attention_takes_rows_of_any_width(E):
    """Features behind a row have no weight: their exponents are far below any other."""
    (q, k, v, documents, m, S, z), grads = test_heinsen_kernels.inputs(20, test_heinsen_kernels.DTYPES[0], D=12, state=True)
    to = lambda x: torch.nn.functional.pad(x, (0, E - 12))  # cuts if that is below zero
    tensors = [q, k, to(v), documents, m, to(S), z]
    test_heinsen_kernels.assert_right(tensors, [to(grads[0]), to(grads[1]), grads[2]])


@pytest.mark.parametrize("name,E", [("update_state", 8), ("query_state", 20)])
def test_the_steps_take_rows_of_any_width(name, E):
    arguments = make(name, D=12, T=60, H=1, Hkv=1)
    of_values = "v" if name == "update_state" else "S"
    arguments[of_values] = torch.nn.functional.pad(arguments[of_values].detach(), (0, E - 12))
    assert_right(name, arguments)


@pytest.mark.parametrize("D,W,p", [(3, 5, 2), (5, 8, 4), (12, 16, 4), (24, 32, 2), (1, 4, 6)])
def test_states_of_narrower_rows_are_part_of_wider_ones(D, W, p):
    place = {index: i for i, index in enumerate(combinations_with_replacement(range(W), p))}
    assert [*positions_of_narrower(D, W, p)] == [place[i] for i in combinations_with_replacement(range(D), p)]
    x, v = torch.randn(7, D), torch.randn(7, D)
    wide, value = (torch.nn.functional.pad(y, (0, W - D)) for y in (x, v))
    sums = lambda x, v: forms.update_state(x[None, None], v[None, None], p)
    (S, z), (wide_S, wide_z) = ((sums(x, v), sums(x, torch.ones(7, 1))[..., 0]) for x, v in ((x, v), (wide, value)))
    for found, expected in (
        (widen_state(S, z, D, W, p), (wide_S, wide_z)),
        (narrow_state(wide_S, wide_z, D, D, p), (S, z)),
    ):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected))


def test_rows_of_a_width_that_the_kernels_have_are_not_copied():
    q, v = torch.zeros(1, 3, 2, 32), torch.zeros(1, 3, 2, 20)
    assert to_width("quadratic", q, q, q)[1] is q and to_width("quadratic", q, v)[0] is q
    assert all(width(form, HALF, D, D) == D for form in ("quadratic", "chunked", "heinsen") for D in HEAD_DIMS)
    assert [width("quadratic", HALF, 48, E) for E in (3, 64, 65, 200, 257)] == [64, 64, 128, 256, 0]
    assert width("quadratic", torch.float32, 129, 3) == width("chunked", HALF, 129, 3) == 0


def test_what_the_kernels_do_not_take_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    reason = lambda form, D, E, p, dtype=torch.bfloat16: unsupported_reason(form, dtype, D, E, p)
    assert [reason("quadratic", *sizes) for sizes in ((80, 96, 8), (256, 3, 2))] == ["", ""]
    assert reason("chunked", 48, 64, 2) == reason("chunked", 48, 20, 4) == reason("adaptive", 200, 80, 0) == ""
    assert reason("quadratic", 257, 3, 2) == "head dimension 257 (they take up to 256)"
    assert reason("quadratic", 3, 257, 2) == "values 257 wide (they take up to 256)"
    assert reason("quadratic", 130, 3, 2, torch.float32) == "head dimension 130 (they take up to 128 in float32)"
    assert reason("chunked", 130, 3, 2) == "head dimension 130 (they take up to 128 in the chunked form)"
    sizes = "(in the chunked form they take p=2 up to 128, p=4 up to 64)"
    assert reason("chunked", 48, 80, 4) == f"head dimension 48 and values 80 wide with p=4 {sizes}"
    assert reason("decode", 48, 48, 2).startswith("head dimension 48 ") and reason("decode", 64, 32, 2)


# ---- torch's rules


@pytest.mark.parametrize(
    "name,gated", [("update_state", True), ("discumsum", True), ("discumsum", False), ("query_state", False)]
)
def test_the_operators_keep_torchs_rules(name, gated):
    arguments = make(name, gated=gated, **(dict(T=300) if name == "discumsum" else dict(T=60, H=2, Hkv=1)))
    if name == "discumsum" and not gated:
        arguments |= dict(S0=None, z0=None)
    torch.library.opcheck(getattr(torch.ops.sympow, name).default, tuple(arguments.values()))


def test_a_compiled_function_has_no_graph_break():
    def steps(k, v, q, log_g):
        S, z = operators.update_state(k, v, log_g, p=2, chunk=CHUNK)
        S, z, *last = operators.discumsum(S, z, torch.stack([x.sum(1) for x in log_g.split(CHUNK, dim=1)], dim=1))
        return *operators.query_state(q, S, z, log_g, p=2, chunk=CHUNK), *last

    arguments = make("update_state", T=60, Hkv=1) | dict(q=make("query_state", T=60, H=1, Hkv=1)["q"])
    arguments = {name: arguments[name] for name in ("k", "v", "q", "log_g")}
    compiled = torch.compile(steps, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    found = results(compiled, arguments)
    for name, r in results(steps, arguments).items():
        assert torch.equal(found[name], r), name


def test_no_second_derivative():
    arguments = make("update_state", T=60, Hkv=1)
    S, _ = operators.update_state(**arguments)
    (dk,) = torch.autograd.grad((S * S).sum(), arguments["k"], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dk.sum().backward()


@pytest.mark.parametrize(
    "name,change,message",
    [
        ("update_state", dict(chunk=100), "chunk must be a multiple of 128, got 100"),
        ("update_state", dict(p=6), "p=2 up to 128, p=4 up to 64 entries a row, got p=6 with D=16"),
        (
            "update_state",
            dict(k=torch.zeros(1, 140, 16)),
            r"k must be \[B, T, heads, D\] .*, got float32 \[1, 140, 16\]",
        ),
        ("update_state", dict(k=torch.zeros(1, 140, 2, 16, dtype=torch.float64)), "got float64"),
        ("update_state", dict(v=torch.zeros(1, 140, 1, 32)), r"v must be .* \[1, 140, 2, 32\], .* \[1, 140, 1, 32\]"),
        (
            "update_state",
            dict(log_g=torch.zeros(1, 140, 1)),
            r"log_g must be float32 \[1, 140, 2\], got .* \[1, 140, 1\]",
        ),
        ("discumsum", dict(z0=None), "S0 and z0 must both be given or both be None, got z0 None"),
        ("discumsum", dict(S=torch.zeros(1, 2, 2, 136)), r"S must be \[B, n, Hkv, Dphi, D\]"),
        ("discumsum", dict(z=torch.zeros(1, 2, 2, 135)), r"z must be float32 \[1, 2, 2, 136\], got .*135\]"),
        ("query_state", dict(S=torch.zeros(1, 2, 3, 136, 16)), "S must be .* Hkv a divisor of q's 4 heads"),
        ("query_state", dict(S=torch.zeros(1, 1, 2, 136, 16)), r"S must be float32 \[1, 2, 2, 136, 16\], got"),
        ("query_state", dict(z=torch.zeros(1, 2, 2, 136).double()), r"z must be float32 .*, got float64"),
    ],
)
def test_arguments_that_do_not_fit(name, change, message):
    with pytest.raises(ValueError, match=message):
        getattr(operators, name)(**(make(name, T=140) | change))


Q, K, G = torch.zeros(1, 9, 4, 16), torch.zeros(1, 9, 2, 16), torch.zeros(1, 9, 2)
WRONG = [
    (dict(q=Q[0]), r"q must be \[B, T, heads, D\] .*, got float32 \[9, 4, 16\]"),
    (dict(v=K[:, :0]), r"v must be .* no size 0, .*, got float32 \[1, 0, 2, 16\]"),
    (dict(k=K.double()), r"k must be .* in bfloat16, float32 or float16, got float64 \[1, 9, 2, 16\]"),
    (dict(v=K.half()), "q, k, v must share one dtype, got float32, float32, float16"),
    (dict(k=K[..., :8]), r"q, k, v must be .*, got \[1, 9, 4, 16\], \[1, 9, 2, 8\], \[1, 9, 2, 16\]"),
    (dict(v=K[:, :, :1]), r"q, k, v must be .*, got .* \[1, 9, 1, 16\]"),
    (dict(k=K[:, :5], v=K[:, :5]), "q, k, v must be .* with n "),
    (dict(q=Q[:, :, :3]), "the query heads must be a multiple of the key/value heads, got 3 and 2"),
    (dict(v=torch.zeros(1, 9, 2, 130)), "E of v must be at most 128 in the .* for float32, got 16 and 130"),
    (dict(v=K.to("meta")), "all tensors must be on one device, got the first on cpu, v on meta"),
]
GATES = [
    (dict(log_g=G.double()), r"log_g must be float32 \[1, 9, 2\], got float64 \[1, 9, 2\]"),
    (dict(log_g=G[:, :, :1]), r"log_g must be float32 \[1, 9, 2\], got float32 \[1, 9, 1\]"),
    (dict(log_g=0.5), r"log_g must be float32 \[1, 9, 2\], got 0.5"),
]
POWERS = [(dict(p=p), f"p must be one of 2, 4, 6, 8, got {p}") for p in (3, 0, 10)]
SCALE = [(dict(scale=0.0), "scale must be finite and not zero, got 0.0")]
S, Z = torch.zeros(1, 2, 136, 16), torch.zeros(1, 2, 136)
CHUNKS = [
    (dict(chunk=64), "chunk must be a multiple of 128, got 64"),
    (dict(chunk=True), "chunk must be a multiple of 128, got True"),
    (dict(p=6), "p=2 up to 128, p=4 up to 64 entries a row, got p=6 with D=16, E=16"),
    (dict(z=Z), "S and z must both be given or both be None, got z float32 .* and S None"),
    (dict(S=S[:, :, 1:], z=Z), r"S must be float32 \[1, 2, 136, 16\], got float32 \[1, 2, 135, 16\]"),
    (dict(S=S, z=Z.half()), r"z must be float32 \[1, 2, 136\], got float16 \[1, 2, 136\]"),
    (dict(S=S, z=Z.to("meta")), "all tensors must be on one device, got the first on cpu, z on meta"),
]
LOG = [
    (dict(documents=G[..., 0]), r"documents must be int32 \[1, 9\], got float32 \[1, 9\]"),
    (dict(m=Z), "m, S and z must all be given or all be None, got m float32 .*, S None, z None"),
    (dict(m=Z, S=S, z=Z), r"m must be float32 \[1, 2, 16\], got float32 \[1, 2, 136\]"),
]
ADAPTIVE = [(dict(powers=G[..., 0].half()), r"powers must be float32 \[1, 9\], got float16 \[1, 9\]")]
TAKES = {
    operators.quadratic_attention: (dict(p=2), WRONG + GATES + POWERS),
    operators.quadratic_sums: (dict(p=2, scale=1.0), WRONG + GATES + POWERS + SCALE),
    operators.chunked_attention: (dict(p=2, chunk=128), WRONG + GATES + CHUNKS),
    adaptive_attention: (dict(powers=G[..., 0]), WRONG + GATES + ADAPTIVE),
    heinsen_attention: (dict(), [x for x in WRONG if "size 0" not in x[1]] + LOG),
}  # fmt: skip


@pytest.mark.parametrize("function", TAKES, ids=lambda f: f.__name__)
def test_bad_input_is_refused_in_one_line_before_anything_is_launched(function):
    options, wrong = TAKES[function]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message) as refusal:
            function(**(dict(q=Q, k=K, v=K) | options | change))
        assert "\n" not in str(refusal.value)


def test_a_state_without_queries_refuses_what_does_not_fit():
    for change, message in (CHUNKS[0], CHUNKS[3], CHUNKS[4], (dict(k=K[0]), "k must be"), (dict(v=K[:, 1:]), "v must")):
        with pytest.raises(ValueError, match=message):
            operators.chunked_state(**(dict(k=K, v=K, p=2, chunk=128) | change))


@pytest.mark.parametrize("compiled", [False, *([True] if DEVICE == "cuda" else [])])
@pytest.mark.parametrize("n", [1, 13, 16])
def test_gates_product_is_as_exact_as_float32(n, compiled, monkeypatch):
    """x is bfloat16 already, and its gradient is rounded as autocast's is."""
    torch.manual_seed(0)
    x = torch.randn(3, 100, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = (3 * torch.randn(n, 64, device=DEVICE)).requires_grad_()
    d = torch.randn(3, 100, n, device=DEVICE)
    assert not gates.runs_on_matrix_unit(x, weight)  # without autocast
    monkeypatch.setattr(gates, "runs_on_matrix_unit", lambda x, weight: True)
    y = (torch.compile(gates.linear_fp32) if compiled else gates.linear_fp32)(x, weight)
    assert y.dtype == torch.float32
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = leaves[0] @ leaves[1].t()
    assert relative_error(y, expected, 0) < 1e-6
    found, wanted = torch.autograd.grad(y, (x, weight), d), torch.autograd.grad(expected, leaves, d.double())
    assert relative_error(found[0], wanted[0], 0) < 6e-3
    assert relative_error(found[1], wanted[1], 0) < 2e-6
    torch.library.opcheck(gates.mm_fp32, (x.detach()[0, :96], x.detach()[1, :96].t()))
