"""The five attentions: what the papers say of them."""

import copy
import functools
import math

import pytest
import torch
from test_rotary import matrix
from torch.nn import functional as F

from sympow.attention.conformal_sympow import ConformalSympow
from sympow.attention.embedding import symmetric_power_embedding
from sympow.attention.gates import FixedGate, linear_fp32, make_gate
from sympow.attention.power import power_attention
from sympow.attention.rotary import rotary, rotation_rates
from sympow.model import GPTConfig

B, T, H, D, E, N = 1, 12, 2, 4, 3, 50.0


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return [torch.randn(B, T, H, n, dtype=torch.float64) for n in (D, D, E)]


def recurrence(q, k, v, gamma, mu, p, S_rotates=False):
    """Compute equation 2 (or, with S_rotates, 3) of the conformal paper for one head, token by token.

    gamma [T], mu [T, D/2] the angles after each token. With S_rotates the state is turned instead of the keys, by the
    rotation of tensor features that turns a vector by mu_i - mu_{i-1}.
    """
    S, Z, ys, previous = 0, 0, [], torch.zeros_like(mu[0])
    for i in range(len(q)):
        if S_rotates:
            R = matrix((mu[i] - previous).tolist())
            previous = mu[i]
            R_bar, phi_q, phi_k = (functools.reduce(torch.kron, [x] * p) for x in (R, q[i], k[i]))
            S, Z = (gamma[i] * (R_bar.T @ x) if i else x for x in (S, Z))  # S is transposed here
        else:
            R = matrix(mu[i].tolist())
            phi_q, phi_k = symmetric_power_embedding(R @ q[i], p), symmetric_power_embedding(R @ k[i], p)
            S, Z = gamma[i] * S, gamma[i] * Z
        S, Z = S + torch.outer(phi_k, v[i]), Z + phi_k
        ys.append(phi_q @ S / (phi_q @ Z))
    return torch.stack(ys)


def by_recurrence(q, k, v, gamma, beta, p, **kwargs):
    theta = 2 * math.pi * rotation_rates(D, N)
    mu = beta.cumsum(-1).unsqueeze(-1) * theta  # [T, D/2]
    heads = [recurrence(q[0, :, h], k[0, :, h], v[0, :, h], gamma[:, h], mu, p, **kwargs) for h in range(H)]
    return torch.stack(heads, dim=1).unsqueeze(0)


@pytest.mark.parametrize("S_rotates", [False, True])
@pytest.mark.parametrize("conformal", [False, True])
@pytest.mark.parametrize(
    "p,form,gated",
    [(2, "quadratic", True), (2, "chunked", True), (2, "recurrent", True), (2, "auto", False), (4, "auto", True)],
)
def test_propositions_1_and_2_rotated_and_gated_sympow_is_a_conformal_map_of_its_state(
    qkv, p, form, gated, conformal, S_rotates
):
    q, k, v = qkv
    gamma = torch.rand(T, H, dtype=torch.float64).clamp(min=0 if gated else 1)
    beta = 2 * torch.rand(T, dtype=torch.float64) if conformal else torch.ones(T, dtype=torch.float64)
    u, log_g = beta.cumsum(0), gamma.log().unsqueeze(0) if gated else None
    y = power_attention(rotary(q, u, N), rotary(k, u, N), v, log_g, p=p, form=form, chunk_size=5)
    assert torch.allclose(y, by_recurrence(q, k, v, gamma, beta, p, S_rotates=S_rotates), rtol=1e-8)


@pytest.mark.parametrize("heads", [4, 8])
def test_fixed_gates_are_alibi(heads):
    """Appendix A.1: exp(q.k + m (j - i)) = gamma^(i-j) exp(q.k), with gamma = exp(-m) at every token."""
    log_g = FixedGate(heads)(torch.zeros(B, T, 1))
    assert torch.allclose(log_g, -torch.tensor([2 ** (-8 * h / heads) for h in range(1, heads + 1)]).expand(B, T, -1))


def test_gates_are_log_sigmoid_in_float32_under_autocast():
    gate = make_gate(GPTConfig(n_embd=8, n_head=4, attention="sympow_gating", gate_bias=1.5))
    assert not gate.W_gamma.any()  # a fresh gate is sigmoid(gate_bias) at every token
    torch.nn.init.normal_(gate.W_gamma)
    x = torch.randn(2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        log_g = gate(linear_fp32(x, gate.input_weight()))
    assert log_g.dtype == torch.float32
    assert torch.allclose(log_g, F.logsigmoid(x @ gate.W_gamma.T + 1.5), rtol=1e-6)


def test_rotation_speed_is_in_float32_under_autocast_and_starts_at_one():
    mix = ConformalSympow(GPTConfig(n_embd=8, n_head=4, n_kv_head=2, head_dim=6, attention="conformal_sympow"))
    x = torch.randn(1, 64, 8)
    assert (mix.beta(linear_fp32(x, mix.input_weight())) == 1).all()
    torch.nn.init.normal_(mix.W_beta)
    with torch.autocast("cpu", torch.bfloat16):
        products = linear_fp32(x, mix.input_weight())
        u = mix.positions(products, None, mix.beta(products))
    exact = (1 + torch.tanh(x.double() @ mix.W_beta.double().T)).squeeze(-1).cumsum(1)
    assert u.dtype == torch.float64 and (u - exact).abs().max() < 1e-5


def test_gates_and_positions_of_bfloat16_weights_are_computed_in_float32():
    """In bfloat16 they are 0.3 turns off after 4,096 tokens."""
    mix = ConformalSympow(GPTConfig(n_embd=32, n_head=4, attention="conformal_sympow"))
    torch.nn.init.normal_(mix.W_beta), torch.nn.init.normal_(mix.gate.W_gamma)
    x, results = torch.randn(1, 64, 32).bfloat16(), []
    for layer in (mix.bfloat16(), copy.deepcopy(mix).double()):
        products = linear_fp32(x, layer.input_weight())
        results.append((layer.beta(products).double(), layer.log_gates(products).double()))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(*results))
