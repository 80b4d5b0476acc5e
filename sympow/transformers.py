"""Power attention inside transformers' own models: an attention for AttentionInterface, and its state as their cache.

    import sympow.transformers
    sympow.transformers.register("sympow", p=2)
    model = LlamaForCausalLM(LlamaConfig(..., attn_implementation="sympow"))
    loss = model(ids, labels=ids).loss                                                    # training
    text = model.generate(ids, cache=sympow.transformers.PowerCache())                    # memory that stops growing

Give attn_implementation="sympow" to from_pretrained too: transformers reads it in a saved config.json from 5.4 on.

It needs transformers 5, which nothing else in this package imports. The model rotates queries and keys itself. An
attention_mask [B, T] may have zeros anywhere: those tokens are seen by no other. Where position_ids do not go on by
one, a packed document begins, which sees nothing before it, as with transformers' own attentions. Whatever power
attention does not have (windows, dropout, masks of four dimensions, ...) is refused with a ValueError of one line.
"""

from functools import partial

import torch
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import causal_mask_function

from . import check_choice
from .attention.operator import sequences
from .attention.operator.arguments import check_power
from .attention.gates import alibi_slopes, reset_gates
from .attention.power import attend_causally
from .attention.state import LayerState, attend_and_append, check_switch_over

with_documents = WeakTensorKeyDictionary()  # position_ids: (its version, whether documents begin in them)
registered = set()  # names that `register` has got
to_dict = PretrainedConfig.to_dict
# Arguments of attentions that power attention does not have, and the values that ask for nothing.
UNSUPPORTED = {
    "dropout": 0.0,
    "is_causal": True,
    "sliding_window": None,
    "softcap": None,
    "s_aux": None,
    "position_bias": None,
    "cu_seq_lens_q": None,  # position_ids say where packed documents begin
    "cache": None,
    "output_attentions": False,
}


def register(name="sympow", p=2, gate="none"):
    """Make power attention of power p available in transformers' models as attn_implementation=name.

    gate: "none", or "fixed" for the gates exp(-2^(-8 h / Hkv)) of key/value heads h = 1..Hkv at every token. For
    several powers in one process, register several names. From then on configurations are saved with a registered
    name, if they have one. Raises ValueError for another p or gate.
    """
    check_power(p)
    check_choice("gate", gate, ("none", "fixed"))
    AttentionInterface.register(name, partial(attend, p=p, gate=gate))
    AttentionMaskInterface.register(name, padding_mask)
    registered.add(name)
    PretrainedConfig.to_dict = dict_with_attention


def dict_with_attention(config):
    """Return the fields that a configuration saves, with the name of its attention if that is registered.

    transformers reads attn_implementation in a config.json, but writes none.
    """
    name = config._attn_implementation
    return to_dict(config) | ({"attn_implementation": name} if name in registered else {})


class PowerCache(Cache):
    """The cache for generation with a registered attention: model.generate(ids, cache=PowerCache()).

    Before transformers 5.24 the argument is past_key_values. switch_over says how many tokens' keys and values are kept
    before a state takes their place: "auto", as many as take its memory; a number; "always", none; or "never", all of
    them, a cache that grows. Beam search, several sequences for a prompt and left padding work; `crop`, which assisted
    generation asks for, is refused.
    """

    def __init__(self, switch_over="auto"):
        check_switch_over(switch_over)
        super().__init__(layer_class_to_replicate=partial(PowerLayer, switch_over))

    def bytes(self):
        """Return the bytes that all layers' keys, values and states take."""
        return sum(layer.state.bytes() for layer in self.layers if layer.state is not None)


class StateLayer(CacheLayerMixin):
    """What a cache keeps of texts in the place of keys and values: a state that has `map`.

    A token that was masked when it was read stays so, whatever later masks say of it; they cannot hide another one.
    Attributes: state (None before any token), tokens (how many have been read, masked ones too), seen ([B], how many of
    them were not masked, None before any token).
    """

    is_compileable = is_sliding = is_croppable = supports_early_init = False

    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self):
        """Forget all tokens."""
        self.state = self.seen = None
        self.tokens = 0

    def update(self, key_states, value_states, *args, **kwargs):
        """Raise ValueError: this cache has no keys and values for another model's attention."""
        raise ValueError("this cache belongs to another model: its state has no keys and values")

    def check_mask(self, mask):
        """Raise ValueError for a mask [B, >= tokens] that hides a token which was read: a state cannot forget it."""
        if self.tokens and ((mask[:, : self.tokens] & 1).sum(1) < self.seen).any():
            raise ValueError("attention_mask must not hide tokens of a cache that were not hidden when they were read")

    def lazy_initialization(self, key_states, value_states):
        """Do nothing: the first tokens make the state."""

    def get_seq_length(self):
        """Return how many tokens have been read, masked ones too."""
        return self.tokens

    def get_mask_sizes(self, query_length):
        """Return the number of tokens that a mask has columns for, and 0, the first of them."""
        n = query_length if isinstance(query_length, int) else query_length.shape[0]  # up to 5.2: their positions
        return self.tokens + n, 0

    def get_max_length(self):
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.0

    def reorder_cache(self, beam_idx):
        """Take the states of these sequences."""
        if self.state is not None:
            self.seen = self.seen[beam_idx.to(self.seen.device)]
            self.state = self.state.map(lambda x: x[beam_idx.to(x.device)])

    def crop(self, tokens_to_remove):
        """Raise ValueError: a state cannot forget its newest tokens."""
        raise ValueError("this cache cannot be cropped: its state cannot forget its newest tokens")


class PowerLayer(StateLayer):
    """What one layer of a PowerCache keeps: a LayerState, see attention/state.py.

    A model hands new keys to `update` and what that returns to its attention. Here these are the new keys themselves,
    with this layer as their attribute `power_layer`, by which `attend` finds it.
    """

    def __init__(self, switch_over):
        super().__init__()
        self.switch_over = switch_over

    def reset(self):
        """Forget all tokens."""
        super().reset()
        self.waiting = False

    def update(self, key_states, value_states, *args, **kwargs):
        """Return the new keys and values [B, Hkv, n, D] for `attend`.

        Raises ValueError if another attention got the keys of the last call.
        """
        if self.waiting:
            raise ValueError(
                "a PowerCache needs a registered attn_implementation that gets its keys as they are (see "
                "sympow.transformers.register): the last ones went to another attention"
            )
        self.waiting = True
        keys = key_states.view_as(key_states)
        keys.power_layer = self
        return keys, value_states

    def attend(self, q, k, v, log_g, mask, p):
        """Return y [B, n, H, E] of n new tokens, and take them into the state.

        mask [B, tokens before and new] bool or None: False for tokens that nobody sees.
        """
        B, n = q.shape[:2]
        if self.state is None:
            self.state = LayerState.empty(B, q.device, self.switch_over)
        position = self.state.position
        steps = torch.ones_like(q[..., 0, 0]) if mask is None else mask[:, -n:]
        seen = position.unsqueeze(1) + steps.to(position).cumsum(1)  # tokens that are not masked
        y, self.state = attend_and_append(q, k, v, log_g, seen, self.state, p=p)
        self.seen = self.state.position
        self.tokens += n
        self.waiting = False
        return y


def padding_mask(
    *, kv_length, attention_mask=None, mask_function=causal_mask_function, batch_size=1, device=None, **options
):
    """Return the attention_mask [B, kv_length] for `attend`; see AttentionMaskInterface.

    It is bool, False for a token that nobody sees, or None if there is no such token. For packed documents it is int64:
    0 for a token that nobody sees, else 1, and 2 more for the first token of a document. mask_function says by the
    tokens' numbers which see which. Raises ValueError unless each token sees all earlier ones of its text or document.
    """
    if options.get("use_vmap") or options.get("local_size") is not None:
        raise ValueError("power attention has no windows, no chunks and no mask functions")
    mask = None if attention_mask is None else attention_mask.bool()
    if mask is not None and may_look(mask) and mask.all():
        mask = None
    if mask_function is not causal_mask_function:
        token = torch.arange(kv_length - 1, device=device)
        batch = torch.arange(batch_size, device=token.device).unsqueeze(1)
        if not torch.compiler.is_compiling() and torch.as_tensor(mask_function(batch, 0, token, token + 1)).any():
            raise ValueError("power attention is causal: no token sees a later one")
        starts = ~torch.as_tensor(mask_function(batch, 0, token + 1, token), device=token.device)
        starts = pad(starts.expand(batch_size, -1).long(), (1, 0)) * 2
        mask = starts + (1 if mask is None else mask)
    return mask


def attend(module, query, key, value, attention_mask, *, p, gate, **options):
    """Return (y [B, n, H, E], None) by power attention, as AttentionInterface asks for.

    query [B, H, n, D]; key and value [B, Hkv, m, D]. With a PowerCache the keys are of the n new tokens; without one,
    the last n of the m tokens have queries. attention_mask: from `padding_mask`.

    Options: position_ids [B, n] or [1, n]; scaling, which cancels in y. Raises ValueError for an option that power
    attention does not have.
    """
    check_options(options, getattr(module, "is_causal", True))
    position_ids = options.get("position_ids")
    layer = getattr(key, "power_layer", None)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    q = q.to(v.dtype)  # under autocast the model rotates q and k in float32
    k = k.to(v.dtype)
    n = q.shape[1]
    m = k.shape[1]
    mask = check_mask(attention_mask, m if layer is None else layer.tokens + n)
    if layer is not None and mask is not None and may_look(mask) and getattr(module, "layer_idx", 0) == 0:
        layer.check_mask(mask)
    seen = None if mask is None else (mask[:, -m:] & 1).bool()
    log_g = -alibi_slopes(k.shape[2], k.device).expand(k.shape[:3]) if gate == "fixed" else None
    if seen is not None:  # a key of zeros has no weight, and a token that is not there lets nothing fade
        k = k.masked_fill(~seen[..., None, None], 0)
        log_g = None if log_g is None else log_g.masked_fill(~seen.unsqueeze(-1), 0)
    if mask is not None and mask.dtype != torch.bool:
        log_g = reset_gates(mask >= 2, log_g, k)
    if position_ids is not None:
        starts = document_starts(position_ids, n, None if seen is None else seen[:, -n:])
        if n < m and layer is None:
            check_positions(position_ids, seen, m - n)
        log_g = reset_gates(None if starts is None else pad(starts, (m - n, 0)), log_g, k)
    if layer is not None:
        return layer.attend(q, k, v, log_g, seen, p), None
    return attend_causally(q, k, v, log_g, p=p), None


def check_options(options, is_causal):
    """Raise ValueError for an option of an attention that power attention does not have."""
    if options.get("is_causal") is None:
        options["is_causal"] = is_causal
    for name, neutral in UNSUPPORTED.items():
        value = options.get(name)
        value = "a tensor" if isinstance(value, torch.Tensor) else value
        if value is not None and value != neutral:
            raise ValueError(f"{name} must be {neutral} for power attention, got {value}")


def check_mask(mask, tokens):
    """Return mask, None or of [B, tokens]; raise ValueError for others, as a model's own mask of four dimensions."""
    if mask is not None and (mask.ndim != 2 or mask.shape[1] != tokens):
        raise ValueError(
            f"power attention takes an attention_mask of [B, {tokens}], got {[*mask.shape]}: a cache's tokens count "
            "too, also with use_cache=False"
        )
    return mask


def check_positions(position_ids, seen, n_cached):
    """Raise ValueError unless the first new token comes after all n_cached tokens of another library's cache.

    Such a cache has keys alone. It does not know where documents begin, and a StaticCache has keys of no token.
    """
    expected = n_cached if seen is None else seen[:, :n_cached].sum(1)
    if may_look(position_ids) and (position_ids[:, 0] != expected).any():
        raise ValueError("position_ids must go on from the cached keys (packed or static ones): use a PowerCache")


def document_starts(position_ids, n, seen=None):
    """Return [B or 1, n] bool, True where position_ids [B or 1, n] do not go on by one.

    It may be None if they do everywhere. seen [B, n] bool or None: neither padding nor the token behind it begins a
    document. Raises ValueError for another shape.
    """
    if position_ids.ndim != 2 or position_ids.shape[1] != n:
        raise ValueError(f"position_ids must be [B, {n}], got {[*position_ids.shape]}")
    if n == 1:
        return None
    starts = pad(position_ids.diff() != 1, (1, 0))
    # All layers get the same tensor: the first of them waits for the GPU. Another batch may have it with other padding.
    if may_look(starts) and not sequences.once(with_documents, position_ids, lambda _: bool(starts.any())):
        return None
    return starts if seen is None else starts & seen & pad(seen[:, :-1], (1, 0))


def may_look(x):
    """Return True if values of the tensor x may decide what is computed: not in a compiled or captured graph."""
    return not torch.compiler.is_compiling() and not sequences.is_capturing(x)
