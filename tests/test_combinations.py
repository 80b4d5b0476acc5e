"""Combinations of arguments of power_attention: in every pair of them y, states and every gradient equal float64.

With TEST_GPU=1 on the GPU, in its kernels, where also every three of TRIPLES occur; elsewhere in PyTorch, with short
sequences, and in float32 on the kernels in Triton's interpreter. Most of the time on a GPU kernels are compiled:
`make test-gpu` does it in several processes. A fault of the kernels may need a form, a number of queries, no gates and
a tensor without a gradient at once, so no case was chosen by hand. Two runs must give the same bits. Before each, free
memory is filled with NaN.
"""

from functools import partial
from itertools import accumulate, repeat

import pytest
import torch
from covering import cover
from numerics import DEVICE, GATES, GPU, relative_error, uninitialized_memory_is_nan
from torch.nn.functional import logsigmoid, pad

from sympow.attention import naive
from sympow.attention.embedding import symmetric_power_dim, symmetric_power_embedding
from sympow.attention.operator import check
from sympow.attention.power import power_attention

FACTORS = dict(
    form=("quadratic", "chunked", "recurrent", "auto"),
    p=(2, 4, 6, 8),
    gates=("none", "near one", "learned", "documents"),
    queries=("all", "a third", "one"),
    state=("none", "initial", "returned", "both"),
    needs=("all", "q", "k", "v", "log_g", "S", "k v", "q k log_g"),
    gradient=("of y", "of the state", "of both"),
    packed=(False, True),
    dtype=("bfloat16", "float32", "float16", "float64", "autocast"),
    D=(16, 32, 64, 128) if GPU else (16, 64, 128),
    E=("D", "narrower", "wider"),
    heads=((2, 2), (2, 1), (6, 2)),
    batch=(1, 2),
    layout=("contiguous", "fused", "transposed", "expanded dy"),
    chunk_size=(None, 128, 200) if GPU else (None, 16, 7),
    T=(1, 40, 1019, 1024) if GPU else (1, 40),
)
TRIPLES = ("form", "queries", "gates", "state", "needs") if GPU else ()
INTERPRETED = FACTORS | dict(  # the interpreter takes seconds for each
    form=("quadratic", "chunked"),
    gates=("none", "learned", "strong", "zeros"),
    state=("none", "both"),
    needs=("all", "q", "k v"),
    packed=(False,),
    dtype=("float32",),
    D=(16, 12),
    heads=((1, 1), (2, 1)),
    batch=(1,),
    layout=("fused", "transposed", "expanded dy"),
    chunk_size=(128,),
    T=(1, 65, 130),
)
GATES = GATES | {"documents": lambda x: logsigmoid(x + 4).masked_fill(x > 2, float("-inf"))}
LARGEST = 2**23 if GPU else 2**18  # entries of a state in float64; the features of all tokens may have 4 times as many


def allowed(case):
    """Return True if these arguments go together, and the specification can compute them."""
    form, state, T, features = case["form"], case["state"], case["T"], symmetric_power_dim(case["D"], case["p"])
    return (
        (T <= 40 or form != "recurrent")  # token by token
        and (T > 1 or case["queries"] == "all")
        and (case["queries"] == "all" or not case["packed"])
        and (case["batch"] == 1 or not case["packed"])
        and ("log_g" not in case["needs"] or case["gates"] != "none")
        and (case["needs"] != "S" or state in ("initial", "both"))
        and (case["gradient"] == "of y" or state in ("returned", "both"))
        and (case["gradient"], case["needs"]) != ("of the state", "q")
        and (features * max(T / 4, case["D"]) <= LARGEST or not reads_features(case))
        # features of a higher power cancel to less than float32 has
        and (case["p"] <= 4 or case["dtype"] == "float64" or not reads_features(case))
    )


def reads_features(case):
    """Return True if phi of queries or keys has to be computed for these arguments."""
    return case["state"] != "none" or case["form"] in ("chunked", "recurrent")


CASES = cover(FACTORS, allowed, TRIPLES)
INTERPRETED_CASES = [] if GPU else cover(INTERPRETED, allowed)


def create(case):
    """Return ({name: tensor} of the arguments of a case, the lengths of its packed sequences or None).

    case["packed"] is True, False or these lengths.
    """
    T, D, B, (H, Hkv) = case["T"], case["D"], case["batch"], case["heads"]
    E = {"D": D, "narrower": D - 11, "wider": min(D + 8, 128)}[case["E"]]
    n = {"all": T, "a third": max(1, T // 3), "one": 1}[case["queries"]]
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)
    dtype = torch.float32 if case["dtype"] == "autocast" else getattr(torch, case["dtype"])
    sums = torch.promote_types(dtype, torch.float32)
    lengths = [T // 3, 0, T - T // 3, 0] if case["packed"] is True else case["packed"] or None
    q, k, v = random(B, T, H + 2 * Hkv, max(D, E)).to(dtype).split((H, Hkv, Hkv), 2)
    x = dict(q=q[:, T - n :, :, :D], k=k[..., :D], v=v[..., :E])
    if case["form"] == "recurrent" and case["p"] == 4 and D > 16:
        # A query that is nearly orthogonal to the few keys before it would leave float32 no digits of phi(q) . z.
        x["q"] += x["k"][:, T - n :].repeat_interleave(H // Hkv, 2)
    if case["layout"] == "transposed":
        x = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in x.items()}
    elif case["layout"] != "fused":
        x = {name: t.contiguous() for name, t in x.items()}
    if case["gates"] != "none":
        x["log_g"] = GATES[case["gates"]](random(B, T, Hkv)).to(sums)
    if case["state"] in ("initial", "both"):  # of random keys, so that denominators are positive
        N = len(lengths) if lengths else B
        state = naive.state_after(random(N, 6, Hkv, D), random(N, 6, Hkv, E), p=case["p"])
        x["S"], x["z"] = (t.to(sums) for t in state)
    return x, lengths


def attend(case, lengths, q, k, v, log_g=None, S=None, z=None):
    """Return [y], or [y, S, z] where the case returns a state, by power_attention."""
    ends = None if lengths is None else torch.tensor([0, *accumulate(lengths)], device=q.device)
    options = {name: case[name] for name in ("p", "form", "chunk_size")}
    returns = case["state"] in ("returned", "both")
    state = None if S is None else (S, z)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=case["dtype"] == "autocast"):
        y = power_attention(q, k, v, log_g, **options, initial_state=state, return_state=returns, cu_seqlens=ends)
    return [y[0], *y[1]] if returns else [y]


def specify(case, lengths, q, k, v, log_g=None, S=None, z=None):
    """Return what `attend` does, as it is defined: naive.quadratic, and a state as the sum over all tokens."""
    earlier = k.shape[1] - q.shape[1]
    lengths = lengths or [k.shape[1]]
    tensors = [t if t is None else t.split(lengths, 1) for t in (pad(q, (0, 0, 0, 0, earlier, 0)), k, v, log_g)]
    tensors += [t if t is None else t.chunk(len(lengths)) for t in (S, z)]
    results = []
    for q, k, v, log_g, *state in zip(*(t or repeat(None) for t in tensors)):
        options = dict(p=case["p"], initial_state=None if S is None else state)
        after = state_after(k, v, log_g, **options) if case["state"] in ("returned", "both") else ()
        results.append([naive.quadratic(q, k, v, log_g, **options), *after])
    y, *state = zip(*results)
    return [torch.cat(y, 1)[:, earlier:], *map(torch.cat, state)]


def state_after(k, v, log_g, *, p, initial_state):
    """Return what naive.state_after does, for all tokens at once."""
    gates = pad(naive.gates(log_g, k), (0, 0, 1, 0))  # the initial state is a token before the first
    decay = naive.gate_products(gates)[0][:, :, -1]  # of each token to the last one
    phi = symmetric_power_embedding(k.transpose(1, 2), p) * decay[:, :, 1:, None]
    S, z = initial_state or (0, 0)
    return phi.mT @ v.transpose(1, 2) + decay[:, :, 0, None, None] * S, phi.sum(2) + decay[:, :, 0, None] * z


def differentiate(function, case, tensors):
    """Return {name: tensor} of the outputs and of the gradients that the case needs, and the norm of the gradients to
    the outputs."""
    needs = {"all": [*tensors], "S": ["S", "z"]}.get(case["needs"], case["needs"].split())
    leaves = {name: x.detach().requires_grad_(name in needs) for name, x in tensors.items()}
    results = dict(zip(("y", "S", "z"), function(**leaves)))
    generator = torch.Generator().manual_seed(1)
    random = lambda x: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    weights = {name: random(x) for name, x in results.items()}
    if case["layout"] == "expanded dy":
        weights["y"] = weights["y"][:, :1, :1].expand(results["y"].shape)
    chosen = {"of y": ["y"], "of the state": ["S", "z"], "of both": [*results]}[case["gradient"]]
    chosen = [name for name in chosen if results[name].requires_grad]  # a state does not depend on queries
    outputs, weights = ([x[name] for name in chosen] for x in (results, weights))
    gradients = torch.autograd.grad(outputs, [leaves[name] for name in needs], weights, materialize_grads=True)
    results |= {f"d{name}": gradient for name, gradient in zip(needs, gradients)}
    return {name: x.detach() for name, x in results.items()}, max(x.norm().item() for x in weights)


def tolerance(case, name):
    """Return the largest error of an output or a gradient.

    For p = 4 phi(q) . z is small beside its terms: float32 loses digits token by token, bfloat16 if gates leave few.
    In bfloat16 so does a query alone for p = 2, if it is nearly orthogonal to the few keys.
    """
    is_output, form, cancels = name in ("y", "S", "z"), case["form"], case["p"] == 4 and reads_features(case)
    if case["dtype"] == "float64":
        return 1e-9
    if case["dtype"] == "float32":
        return 1e-2 if cancels and form == "recurrent" else 1e-5 if is_output else 1e-4
    if case["dtype"] == "float16":  # computed in float32, then rounded
        return 1e-2 if cancels and form == "recurrent" else 2e-3
    cancels |= case["queries"] == "one" and reads_features(case)
    cancels &= case["gates"] in ("learned", "documents")
    short = case["T"] < 1000 or case["gates"] == "documents"
    return (2e-2 if cancels else 4e-3) if is_output else 5e-2 if cancels or short else 8e-3


PLAIN = {name: values[0] for name, values in FACTORS.items()} | dict(dtype="float64", T=40, chunk_size=16)


def assert_equals_float64(limit=None, change=lambda tensors: None, **settings):
    """Compare power_attention, in two runs, with the specification, in a case of PLAIN and these settings.

    limit: the largest error, by default what `tolerance` says. change(tensors) may change the arguments by name.
    """
    case = PLAIN | settings
    tensors, lengths = create(case)
    change(tensors)
    results, repeated = (differentiate(partial(attend, case, lengths), case, tensors)[0] for _ in range(2))
    if case["dtype"] == "autocast":  # gates and states stay float32
        tensors |= {name: tensors[name].bfloat16() for name in "qkv"}
    assert results["y"].dtype == tensors["v"].dtype
    doubles = {name: x.double() for name, x in tensors.items()}
    expected, size = differentiate(partial(specify, case, lengths), case, doubles)
    floor = size * (1e-3 if case["T"] > 1 else 1e-1)  # alone, a token has no gradient but rounding errors
    errors = {name: relative_error(results[name], exact, floor) for name, exact in expected.items()}
    too_large = {
        name: f"{error:.1e}" for name, error in errors.items() if not error <= (limit or tolerance(case, name))
    }
    assert not too_large, too_large
    assert all(torch.equal(x, repeated[name]) for name, x in results.items()), "two runs differ"


def describe(case):
    return "-".join(f"{name}={value}" if name in ("p", "D", "T") else str(value) for name, value in case.items())


@pytest.mark.parametrize("case", CASES, ids=describe)
def test_every_pair_of_arguments_equals_float64(case):
    check.fill_free_memory(DEVICE)
    assert_equals_float64(**case)


def is_slow(case):
    """Return True for what takes the interpreter long: states of p = 4."""
    return case["p"] == 4 and reads_features(case)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=describe(case), marks=[pytest.mark.slow] * is_slow(case)) for case in INTERPRETED_CASES],
)
def test_on_the_kernels_in_the_interpreter_every_pair_equals_float64(case, on_gpu):
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    with uninitialized_memory_is_nan():
        assert_equals_float64(**case)
