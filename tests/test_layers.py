"""attention= as a pattern over the layers: each layer has its own attention, gate, state and form."""

from dataclasses import dataclass

import pytest
import torch
from helpers import SMALL, call, dataset, metrics  # noqa: F401 (dataset is a fixture)

from sympow import evaluate
from sympow import sample
from sympow import train
from sympow.attention import ATTENTIONS, Softmax, Sympow, SympowGating
from sympow.attention.state import LayerState, State
from sympow.generation.generate import generate, read_prompt
from sympow.model import GPT, GPTConfig
from sympow.generation import state_file
from sympow.runs.metrics import wandb_row

SHAPE = dict(vocab_size=97, n_head=4, n_kv_head=2, n_embd=32, head_dim=8, rope_base=99.0, gate_bias=2.0)


def hybrid(attention="sympow_gating,sympow_gating,softmax", n_layer=3, **kwargs):
    torch.manual_seed(0)
    model = GPT(GPTConfig(attention=attention, n_layer=n_layer, **{**SHAPE, **kwargs})).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def test_the_pattern_is_repeated_and_each_layer_has_its_own_gate():
    config = GPTConfig(attention="sympow_gating, sympow,softmax", n_layer=6, **SHAPE)
    assert config.attention == "sympow_gating,sympow,softmax"
    kinds = [type(block.attn.mix) for block in GPT(config).transformer.h]
    assert kinds == [SympowGating, Sympow, Softmax] * 2
    assert [config.layer(i).gate for i in range(6)] == ["learned", "none", "none"] * 2
    fixed = GPTConfig(attention="sympow_gating,sympow", n_layer=2, gate="fixed", **SHAPE)
    assert [fixed.layer(i).gate for i in range(2)] == ["fixed", "none"]


@pytest.mark.parametrize(
    "settings,message",
    [
        (
            dict(attention="sympow,softmax,softmax", n_layer=4),
            "3 layers, which does not divide n_layer=4: n_layer=3 wo",
        ),
        (dict(attention="sympow,softmax,softmax", n_layer=5), "n_layer=6 would do"),
        (dict(attention="sympow,softmax", n_layer=1), "n_layer=2 would do"),
        (dict(attention="sympow,", n_layer=2), "got ''"),
        (dict(attention="sympow,soft", n_layer=2), "got 'soft'"),
        (
            dict(attention="sympow,softmax", n_layer=2, gate="learned"),
            "no layer of attention=sympow,softmax takes gate=l",
        ),
        (dict(attention="sympow_gating,softmax", n_layer=2, gate="none"), "is attention=sympow"),
    ],
)
def test_a_wrong_pattern_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**SHAPE, **settings)


@pytest.mark.parametrize("switch_over", [None, 3])
@torch.inference_mode()
def test_generation_and_saved_states_follow_each_layer(switch_over, tmp_path):
    model, prompt, file = hybrid(reset_token=7), [5, 10, 7, 20, 30], str(tmp_path / "a.state")
    options = dict(max_new_tokens=12, temperature=0.0, switch_over=switch_over)
    found = list(zip(*generate(model, prompt, **options)))[0]
    logits, _ = model(torch.tensor([[*prompt, *found]]))
    assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == list(found)
    logits, state = read_prompt(model, prompt, switch_over=switch_over)
    assert [layer.power is not None for layer in state.layers] == [switch_over == 3] * 2 + [False]
    state_file.save_state(file, model, logits, state)
    again = list(
        zip(*generate(model, [], before=state_file.load_state(file, model), max_new_tokens=12, temperature=0.0))
    )
    assert again[0] == found
    with pytest.raises(ValueError, match="another model: attention='sympow_gating,sympow_gating,softmax' there"):
        state_file.load_state(file, hybrid("sympow_gating", reset_token=7))


def test_statistics_name_the_layers_that_report_them():
    ids = torch.randint(0, 97, (1, 9))
    found = hybrid("softmax,sympow_gating,conformal_sympow").statistics(ids)
    assert [x is None for x in found["gate"]] == [True, False, False]
    assert [x is None for x in found["beta"]] == [True, True, False]
    assert wandb_row({"step": 1, **found}).keys() == {"iter", "gate/layer_01", "gate/layer_02", "beta/layer_02"}


def test_flops_are_those_of_each_layer():
    flops = {a: hybrid(a, n_layer=2, p=4).flops_per_token(64) for a in ("softmax", "sympow", "softmax,sympow")}
    assert 2 * flops["softmax,sympow"] == flops["softmax"] + flops["sympow"]


def test_a_run_with_a_pattern_trains_resumes_samples_and_evaluates(dataset, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    pattern, out = "--attention=sympow_gating,softmax", "--out_dir=out/a"
    assert call(train.main, f"--dataset={dataset}", *SMALL, pattern, out) == 0
    assert call(train.main, f"--dataset={dataset}", *SMALL, pattern, out, "--max_iters=8") == 0
    assert metrics("out/a", "gate")[8][1] is None
    assert call(train.main, f"--dataset={dataset}", *SMALL, "--attention=softmax", out, "--max_iters=9") == 2
    assert "was trained with attention=sympow_gating,softmax" in capsys.readouterr().err
    assert call(sample.main, "--out_dir=out/a", "--max_new_tokens=5", "--prompt=a") == 0
    assert "sympow_gating,softmax: prompt" in capsys.readouterr().err
    assert call(evaluate.main, "--out_dir=out/a", "--length=32", "--documents=2") == 0


# ---- a position embedding and an output layer of an attention's own


@dataclass
class CountState(State):
    tokens: torch.Tensor  # [B] float32


class Count(torch.nn.Module):
    """A position embedding that adds 1 / (1 + the number of tokens before)."""

    def empty_state(self, batch, device):
        return CountState(torch.zeros(batch, device=device))

    def forward(self, x, resets=None, state=None):
        before = x.new_zeros(len(x), 1) if state is None else state.tokens[:, None]
        at = torch.arange(x.shape[1]) + before
        return x + 1 / (1 + at[..., None]), state and CountState(at[:, -1] + 1)


class Unrotated(Softmax):
    rotates = False

    def rotate(self, qkv, positions):
        return self.split(qkv)

    @classmethod
    def position_embedding(cls, config):
        return Count()

    @classmethod
    def output_layer(cls, config):
        layer = torch.nn.Sequential(torch.nn.Linear(config.n_head * config.head_dim, 8), torch.nn.GELU())
        layer.c_proj = torch.nn.Linear(8, config.n_embd)
        return layer


@pytest.fixture
def unrotated(monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "unrotated", Unrotated)


@torch.inference_mode()
def test_an_attention_may_bring_its_position_embedding_and_output_layer(unrotated, tmp_path):
    model, prompt, file = hybrid("unrotated,sympow", n_layer=2), [5, 10, 7, 20, 30], str(tmp_path / "a.state")
    first, second = model.transformer.h
    assert not hasattr(first, "mlp") and not hasattr(first, "ln_2") and hasattr(second, "mlp")
    assert GPT(model.config).transformer.h[0].attn.c_proj.c_proj.weight.std() < 0.015  # 0.02 / sqrt(2 n_layer)
    found = list(zip(*generate(model, prompt, max_new_tokens=12, temperature=0.0)))[0]
    logits, _ = model(torch.tensor([[*prompt, *found]]))
    assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == list(found)
    logits, state = read_prompt(model, prompt)
    assert (
        state.embedding.tokens == 5
        and type(state.layers[0]) is LayerState
        and state.repeat(2).embedding.tokens.shape == (2,)
    )
    state_file.save_state(file, model, logits, state)
    _, loaded = state_file.load_state(file, model)
    assert loaded.embedding.tokens == 5 and loaded.bytes() == state.bytes()


def test_where_positions_come_from_is_printed_if_the_layers_differ(unrotated, dataset, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    assert call(train.main, f"--dataset={dataset}", *SMALL, "--attention=unrotated,sympow", "--max_iters=1") == 0
    assert "sympow layers rotate q and k; unrotated layers do not, they have" in capsys.readouterr().out
