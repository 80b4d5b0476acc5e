"""The steps of the chunked form as operators against naive twins in float64: outputs and every gradient.

On the CPU in Triton's interpreter, in float32; with TEST_GPU=1 on the GPU, in bfloat16 and float32.
"""

import pytest
import torch
from numerics import relative_error
from torch.nn.functional import logsigmoid

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from test_kernels import DEVICE, DTYPES, GPU  # noqa: E402

from attention import forms  # noqa: E402
from attention.power import PowerState  # noqa: E402
from kernels import operators  # noqa: E402

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


@pytest.mark.parametrize("n", [1, 12, 16])
def test_gates_product_is_as_exact_as_float32(n):
    """x is bfloat16 already; the gradients are rounded as autocast's are."""
    from attention.gates import _product

    torch.manual_seed(0)
    x = torch.randn(300, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = (3 * torch.randn(n, 64, device=DEVICE)).requires_grad_()
    d = torch.randn(300, n, device=DEVICE)
    y = _product(x, weight)
    assert y.dtype == torch.float32
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = leaves[0] @ leaves[1].t()
    assert relative_error(y, expected, 0) < 1e-6
    for got, want in zip(torch.autograd.grad(y, (x, weight), d), torch.autograd.grad(expected, leaves, d.double())):
        assert relative_error(got, want, 0) < 6e-3
    torch.library.opcheck(_product, (x, weight))
