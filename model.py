"""GPT-2 with the attention of your choice, in one file.

    config = GPTConfig(attention="sympow", p=2)                    # GPT-2 124M
    model = GPT(config)
    logits, loss = model(ids, targets)                             # training: ids, targets [B, T]
    logits, state = model.read(prompt, model.empty_state(B))       # generation: read a prompt,
    logits, state = model.step(ids, state)                         # then one token [B] at a time

Differences from GPT-2: rotary positions instead of learned ones, a LayerNorm after the token embedding, the exact GELU,
no biases, and whatever `attention` says; each can be set to be GPT-2's, or Llama's (config/llama_small.py). Parameter
names are nanoGPT's where the module exists there. generation/decoder.py repeats `GPT.step` on a GPU, and compares its
logits with it before it generates.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sympow import check_choice
from .attention import ATTENTIONS, check_settings, join_positions, layer_pattern, leading_layer
from .attention.positions import POSITIONS, check_length
from .attention.state import ModelState
from .attention.variant import RECIPE
from .layers.activation import ACTIVATIONS, mlp_widths
from .layers.convolution import Convolution
from .layers.loss import head_loss, head_weight
from .layers.mixing import mix_tokens, normalize_heads, projected_heads, split_heads
from .layers.norm import NORMS, HeadNorm, make_norm, norm_linear, norm_weight
from .layers.output_gate import OutputGate


@dataclass
class GPTConfig:
    # auto: what the attention learns best with; a model is saved with the value
    vocab_size: int = 50257  # of the tokenizer; the embedding is padded to a multiple of 64
    n_layer: int = 12  # blocks
    n_head: int = 12  # query heads
    n_embd: int = 768  # width of the residual stream
    n_kv_head: int = 0  # key/value heads, shared by groups of query heads; 0: n_head
    head_dim: int = 0  # 0: n_embd / n_head
    dropout: float = 0.0  # after the embedding, attention and MLP
    bias: bool = False  # in linear layers and LayerNorms
    qkv_bias: bool = False  # in the linear layer of q, k and v, also without `bias`
    norm: str = "layernorm"  # before attention, MLP and head; or rmsnorm, which subtracts no mean and has no bias
    norm_eps: float = 1e-5  # of the norms, added to a variance or mean square
    qk_norm: bool = False  # an RMSNorm of each head of q and of k, before they are rotated
    positions: str = "auto"  # rotary, none or learned (GPT-2's table of n_positions vectors); with commas as attention
    n_positions: int = 1024  # positions=learned: the most tokens that the model reads
    embedding_norm: bool = True  # a norm after the token embedding
    tied_head: bool = True  # the head is the token embedding; False: it has weights of its own
    activation: str = "gelu"  # of the MLP; or gelu_tanh: GPT-2's approximation of it; or swiglu: silu(gate) * up
    mlp_width: int = 0  # of the MLP, after its activation; 0: 4 n_embd
    attention: str = "softmax"  # a name in ATTENTIONS, or several with commas: the layers in turn, again and again
    convolution: int | str = "auto"  # tokens of a convolution over q, k and v before attention; 0: none
    output_gate: bool | str = "auto"  # normalise attention's output, and multiply it by a learned gate
    window: int = 0  # of softmax layers: how many tokens each token sees, itself among them; 0: all before it
    p: int = 2  # the power, even
    gate: str = "auto"  # learned or fixed for sympow_gating; learned, fixed or none for conformal_sympow
    gate_bias: float | str = "auto"  # a fresh learned gate is sigmoid(gate_bias)
    form: str = "auto"  # quadratic, chunked, recurrent or auto: how the sympow variants are computed in training
    chunk_size: int = 0  # tokens a chunk in the chunked form; 0: chosen from p and head_dim
    values: str = "log"  # heinsen: log (logarithms of values in, logarithms of outputs out), or signed
    residual: str = "gpt2"  # heinsen: gpt2 (attention, then an MLP) or glu (a gated linear unit in place of both)
    adaptive: str = "continuous"  # adaptive_power: continuous (|q.k|^p(x)) or mixture (of even powers, linear)
    p_min: float = 2.0  # adaptive_power: the least p(x)
    p_max: float = 4.0  # adaptive_power: the largest p(x)
    rope_base: float = 65536.0  # N: a token turns pair i = 0, 1, ... of a head by N^(-2i/D) units
    rope_unit: str = "turn"  # 2 pi, with the longest document for N; or radian: the customary one, N is Llama's theta
    reset_token: int = -1  # forget everything at this token id; -1: never (set by train.py's pack)
    activation_checkpointing: bool = False  # save one activation per block, compute the rest again in the backward pass

    def __post_init__(self):
        for name, limit in {"n_layer": 10**4, "vocab_size": 2**31, "n_positions": 2**31}.items():
            if not 1 <= getattr(self, name) <= limit:
                raise ValueError(f"{name} must be from 1 to {limit:,}, got {getattr(self, name)}")
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("norm", self.norm, NORMS)
        if not 0 < self.norm_eps < 1:
            raise ValueError(f"norm_eps must be in (0, 1), got {self.norm_eps}")
        check_settings(self)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        self._check_attention()

    def _check_attention(self):
        """Choose what is "auto", and raise ValueError unless the layers' attentions take the other settings."""
        names = layer_pattern("attention", self.attention, ATTENTIONS, self.n_layer)
        positions = layer_pattern("positions", self.positions, ("auto", *POSITIONS), self.n_layer)
        self.attention, self.positions = ",".join(names), ",".join(positions)
        if len(names) == len(positions) == 1:
            ATTENTIONS[self.attention].choose_settings(self)
            return
        different = min(math.lcm(len(names), len(positions)), self.n_layer)
        layers = [self.layer(i) for i in range(different)]  # which chooses and checks
        leading = leading_layer(layers)
        self.positions = join_positions(layers, leading if positions == ["auto"] else None)
        for name in RECIPE:
            if getattr(self, name) == "auto":
                setattr(self, name, getattr(leading, name))
        if self.gate not in {"auto", *(layer.gate for layer in layers)}:
            raise ValueError(f"no layer of attention={self.attention} takes gate={self.gate}: use gate=auto")
        self.gate = layers[0].gate if len(names) == 1 else self.gate
        if self.window and not any(layer.window for layer in layers):
            raise ValueError(f"no layer of attention={self.attention} takes window={self.window}: only softmax does")

    def layer(self, i):
        """Return the GPTConfig of layer i: one attention and its positions, `gate` and `window` if it has them."""
        if "," not in self.attention + self.positions:
            return self
        names, positions = self.attention.split(","), self.positions.split(",")
        name = names[i % len(names)]
        gate = "auto" if ATTENTIONS[name].gates == ("none",) else self.gate
        window = self.window if ATTENTIONS[name].windows else 0
        return replace(self, attention=name, positions=positions[i % len(positions)], gate=gate, window=window)

    @property
    def gated(self):
        """Return True if attention gets log_g, from gates or from resets between packed documents."""
        return self.gate != "none" or self.reset_token >= 0


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.head_dim = projected_heads(config), config.head_dim
        bias = config.bias or config.qkv_bias
        self.c_attn = nn.Linear(config.n_embd, sum(self.heads) * config.head_dim, bias=bias)
        variant = ATTENTIONS[config.attention]
        self.c_proj = variant.output_layer(config)
        self.replaces_mlp = self.c_proj is not None
        if not self.replaces_mlp:
            self.c_proj = nn.Linear(config.n_head * config.head_dim, config.n_embd, bias=config.bias)
        self.mix = variant(config)  # a Variant; saved files have this name
        self.conv = Convolution(self.heads, config.head_dim, config.convolution) if config.convolution else None
        self.output_gate = OutputGate(config.head_dim) if config.output_gate else None
        self.q_norm = HeadNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = HeadNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.dropout = config.dropout

    def project(self, x, norm, shape):
        """Return the inputs of attention for rows x [B T, C]: norm(x) or its products [B, T, ..], and all heads."""
        x, heads = norm_linear(norm, self.c_attn, x, self.mix.input_weight())
        return x.unflatten(0, shape), heads.unflatten(0, shape).unflatten(-1, (-1, self.head_dim))

    def forward(self, x, norm, shape, resets, state):
        y, state = mix_tokens(self, *self.project(x, norm, shape), resets, state)
        return F.dropout(self.c_proj(y.flatten(2)).flatten(0, 1), self.dropout, self.training), state


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, width = mlp_widths(config)
        self.c_fc = nn.Linear(config.n_embd, hidden, bias=config.bias)
        self.c_fc.matrices = hidden // width  # below each other, for Muon
        self.c_proj = nn.Linear(width, config.n_embd, bias=config.bias)
        self.dropout = config.dropout
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x, norm):
        x = self.activation(norm_linear(norm, self.c_fc, x)[1])
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config)
        if not self.attn.replaces_mlp:
            self.ln_2 = make_norm(config)
            self.mlp = MLP(config)

    def forward(self, x, update, shape, resets=None, state=None):
        """Run on rows x + update [B T, C] of (B, T) = shape; return the next x and update, and the state.

        A block compiled for itself adds what the block before computed last, in the pass of its first norm.
        """
        x = x if update is None else x + update
        y, state = self.attn(x, self.ln_1, shape, resets, state)
        if not self.attn.replaces_mlp:
            x = x + y
            y = self.mlp(x, self.ln_2)
        return x, y, state


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        layers = [config.layer(i) for i in range(config.n_layer)]
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(math.ceil(config.vocab_size / 64) * 64, config.n_embd),  # the head too if it is tied
                ln_wte=make_norm(config) if config.embedding_norm else nn.Identity(),
                h=nn.ModuleList(map(Block, layers)),
                ln_f=make_norm(config),
            )
        )
        rows, columns = self.transformer.wte.weight.shape
        self.lm_head = None if config.tied_head else nn.Linear(columns, rows, bias=False)
        for layer in layers:
            if "wpe" not in self.transformer and (embedding := ATTENTIONS[layer.attention].position_embedding(layer)):
                self.transformer["wpe"] = embedding  # one for all layers
        self.apply(self._init_weights)

    def _init_weights(self, module):
        """Initialise as GPT-2: normal 0.02, and 0.02 / sqrt(2 n_layer) where a block adds to the residual."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(getattr(module, "c_proj", None), nn.Linear):
            nn.init.normal_(module.c_proj.weight, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def attentions(self):
        """Return the attentions of all layers, each a Variant."""
        return [block.attn.mix for block in self.transformer.h]

    def empty_state(self, batch, switch_over=None):
        """Return the ModelState before any token.

        switch_over: how many cached tokens a state replaces ("always": 1); by default the attention's own.
        """
        t, device = self.transformer, self.transformer.wte.weight.device
        layers = [attention.empty_state(batch, device, switch_over) for attention in self.attentions()]
        return ModelState(layers, embedding=t.wpe.empty_state(batch, device) if "wpe" in t else None)

    def forward(self, ids, targets=None, teacher=None):
        """Run the model on ids [B, T] int64; targets [B, T] below 0 are left out of the loss. teacher: see `head_loss`.

        Returns (logits [B, T, vocab_size], None), or with targets (None, mean loss in nats). The loss has no second
        derivative (NotImplementedError for create_graph=True); logits have one.
        """
        if targets is None:
            return self.logits(self.hidden(ids)[0]), None
        x, update, _ = self._blocks(ids)
        return None, self.loss(x, targets, update, teacher)

    def step(self, ids, state):
        """Read one token per sequence, ids [B]; return (logits [B, vocab_size] of the next, the state after it)."""
        return self.read(ids.unsqueeze(1), state)

    def read(self, ids, state, piece=1024):
        """Read ids [B, T], `piece` at a time; return (logits [B, vocab_size] of the next token, the state after)."""
        for part in ids.split(piece, dim=1):
            x, state = self.hidden(part, state)
            last = x[:, -1].clone()
            del x  # free it before the next piece needs the memory
        return self.logits(last), state

    def hidden(self, ids, state=None, starts=None):
        """Return the head's input [B, T, n_embd] and the state after the tokens ids [B, T] (None if `state` is None).

        starts [B, T] bool: tokens before which everything is forgotten, besides the reset tokens.
        """
        x, update, state = self._blocks(ids, state, starts)
        return self.transformer.ln_f(x + update).unflatten(0, ids.shape), state

    def _blocks(self, ids, state=None, starts=None):
        """Return x and update, which add up to the rows [B T, n_embd] before the last norm, and the state."""
        x, resets, embedding = self._embed(ids, state, starts)
        x, update, layers = F.dropout(x, self.config.dropout, self.training), None, []
        for i, block in enumerate(self.transformer.h):
            if self.config.activation_checkpointing and torch.is_grad_enabled() and state is None:
                x = x if update is None else x + update  # one activation is saved, not two
                x, update, _ = checkpoint(block, x, None, ids.shape, resets, use_reentrant=False)
            else:
                x, update, layer = block(x, update, ids.shape, resets, state and state.layers[i])
                layers.append(layer)
        return x, update, state and ModelState(layers, state.n_tokens + ids.shape[1], embedding)

    def _embed(self, ids, state=None, resets=None):
        """Return the first layer's input, the resets, and the state of the position embedding after the ids.

        The input has rows [B T, n_embd]. The resets [B, T] bool are `resets` and the reset tokens, or None.
        """
        t = self.transformer
        check_length(self.config, ids.shape[1] + (state.n_tokens if state else 0))
        if self.config.reset_token >= 0:
            tokens = ids == self.config.reset_token
            resets = tokens if resets is None else resets | tokens
        x, embedding = t.ln_wte(t.wte(ids)), None
        if "wpe" in t:
            x, embedding = t.wpe(x, resets, state and state.embedding)
        return x.flatten(0, 1), resets, embedding

    def head_weight(self):
        """Return the weight of the head, [rows of the embedding, n_embd]."""
        return head_weight(self.transformer.wte, self.lm_head)

    def logits(self, x):
        """Return [..., vocab_size] for x [..., n_embd]; the vocabulary's padding, which has no text, is cut off."""
        return F.linear(x, self.head_weight())[..., : self.config.vocab_size]

    def loss(self, x, targets, update=None, teacher=None):
        """Return the mean loss in nats for what `hidden` or, with update, `_blocks` returns, and targets [B, T]."""
        weight = self.head_weight()
        if update is not None:
            x, weight = norm_weight(self.transformer.ln_f, weight, x + update)
        return head_loss(x.flatten(0, -2), weight, targets, self.config.vocab_size, teacher)

    @torch.no_grad()
    def statistics(self, ids):
        """Return {name: [a number for each layer, or None]} for the ids [B, T], without dropout.

        Names are "gate" (mean of gamma), "beta" (mean speed of rotation) and others that an attention reports.
        """
        statistics, training = {}, self.training
        self.eval()
        x, resets, _ = self._embed(ids)
        for i, block in enumerate(self.transformer.h):
            (normed, heads), attention = block.attn.project(x, block.ln_1, ids.shape), block.attn.mix
            q, *_ = normalize_heads(block.attn, *split_heads(block.attn, heads, resets)[:3])
            for name, value in attention.statistics(normed, q).items():
                statistics.setdefault(name, [None] * self.config.n_layer)[i] = value
            x = sum(block(x, None, ids.shape, resets)[:2])
        self.train(training)
        return statistics

    def parameter_count(self):
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, block_size, dtype=torch.bfloat16):
        """Return the FLOPs of one training token, forward and backward.

        They are 6 for each weight that is multiplied, and attention's own products over causal pairs in its form.
        """
        tables = ("transformer.wpe.weight", "transformer.wte.weight")[: 1 + (not self.config.tied_head)]
        weights = sum(p.numel() for n, p in self.named_parameters() if p.dim() == 2 and n not in tables)
        device = self.transformer.wte.weight.device.type
        return 6 * weights + sum(x.attention_flops(block_size, dtype, device) for x in self.attentions())
