"""The model as transformers has it: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).

export.py copies this file into the folder as modeling_sympow.py. It needs the package sympow (`pip install .`).
"""

try:
    from sympow.code import warn_of_changes
    from sympow.model import GPT, GPTConfig
except ImportError as error:
    message = "this model needs the package sympow 0.1.0: run `pip install .` in a clone of its repository"
    raise ImportError(f"{message} ({error})") from None

import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

# the name of the argument and of the output in this version of transformers: cache from 5.24 on
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
PIECE = 8192  # tokens of a prompt that are read into a state in one piece


class SympowConfig(PretrainedConfig):
    """Holds `model`, the fields of GPTConfig of model.py, and what transformers asks of every model."""

    model_type = "sympow"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    def __init__(self, model=None, **kwargs):
        self.model = model or {}
        try:
            gpt = GPTConfig(**self.model)
        except TypeError as error:  # a setting that this package does not have
            raise ImportError(f"this model needs another version of the package sympow: {error}") from None
        self.hidden_size, self.num_hidden_layers, self.num_attention_heads = gpt.n_embd, gpt.n_layer, gpt.n_head
        kwargs = {"vocab_size": gpt.vocab_size, **kwargs, "tie_word_embeddings": False}  # the head is no parameter
        self.vocab_size = kwargs.pop("vocab_size")
        super().__init__(**kwargs)


class SympowCache:
    """What generation keeps of a text: the ModelState, which for the sympow attentions does not grow."""

    is_compileable = is_sliding = False

    def __init__(self, state, padded):
        self.state, self.padded = state, padded  # padded: some texts of the batch begin behind padding

    def get_seq_length(self, layer_idx=0):
        """Return how many tokens have been read, padding too."""
        return self.state.n_tokens

    def get_max_cache_shape(self, layer_idx=0):
        return -1  # it is not limited

    def reorder_cache(self, beam_idx):
        """Take the states of these sequences, for beam search."""
        self.state = self.state.map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats):
        """Repeat each sequence's state."""
        self.state = self.state.repeat(repeats)

    def batch_select_indices(self, indices):
        """Take the states of these sequences."""
        self.state = self.state.map(lambda x: x[indices])


class SympowForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = SympowConfig
    base_model_prefix = "gpt"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]

    def __init__(self, config):
        super().__init__(config)
        warn_of_changes("this model was trained with", getattr(config, "code", None))
        self.gpt = GPT(GPTConfig(**config.model))
        self.post_init()

    def _init_weights(self, module):
        # GPT initialises itself. On the meta device, a fixed gate, which is in no checkpoint, was not computed.
        if type(module).__name__ == "FixedGate":
            module.reset_parameters()

    def get_input_embeddings(self):
        return self.gpt.transformer.wte

    def _set_gradient_checkpointing(self, enable=True, **options):
        self.gpt.config.activation_checkpointing = enable

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        cache = kwargs.get(CACHE)
        if cache is not None:
            input_ids = input_ids[:, cache.get_seq_length() :]
        inputs = {"input_ids": input_ids, CACHE: cache, "attention_mask": attention_mask}
        return inputs | {name: kwargs[name] for name in ("use_cache", "logits_to_keep") if name in kwargs}

    def forward(
        self,
        input_ids,
        attention_mask=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        return_dict=True,
        cache=None,
        **kwargs,
    ):
        """Return logits [B, T, vocab_size], or with labels [B, T] the loss of each next token, -100 left out.

        attention_mask [B, T of all tokens up to now]: zeros may stand before a text (left padding) and behind it.
        cache, or past_key_values (its name before transformers 5.24): the SympowCache of the tokens before. In training
        the loss comes without logits, which would not fit into memory for long contexts. transformers' Trainer gives
        num_items_in_batch where it accumulates gradients: the loss is then the sum over the tokens divided by it.
        """
        cache, loss = cache or past_key_values, None
        starts = self._starts(attention_mask, input_ids, cache)
        if cache is None and labels is None and (use_cache or (use_cache is None and not self.training)):
            cache = SympowCache(self.gpt.empty_state(len(input_ids)), starts is not None)
        if cache is None:
            x, _ = self.gpt.hidden(input_ids, None, starts)
        else:
            x, state = [], cache.state
            for i in range(0, input_ids.shape[1], PIECE):
                piece = slice(i, i + PIECE)
                y, state = self.gpt.hidden(input_ids[:, piece], state, None if starts is None else starts[:, piece])
                x = [*x, y] if not logits_to_keep else [torch.cat((*x, y), 1)[:, -logits_to_keep:]]
            x, cache = torch.cat(x, dim=1), SympowCache(state, cache.padded)
        if labels is not None:
            targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
            loss = self.gpt.loss(x, targets.where(targets != -100, -1))
            if (tokens := kwargs.get("num_items_in_batch")) is not None:
                loss = loss * (targets != -100).sum() / tokens
        logits = None if labels is not None and self.training else self.gpt.logits(x[:, -logits_to_keep:])
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
        return output if return_dict else output.to_tuple()

    def _starts(self, mask, ids, cache):
        """Return where texts begin behind padding, [B, T] bool for these ids, or None where no text of the batch does.

        Raises ValueError for a mask that does not fit.
        """
        past = 0 if cache is None else cache.get_seq_length()
        if cache is not None and (mask is None or ids.shape[1] == 1 <= past):  # the texts began before
            return torch.zeros_like(ids, dtype=torch.bool) if cache.padded else None
        if mask is None:
            return None
        if mask.ndim != 2 or mask.shape[1] != past + ids.shape[1]:
            shape = [len(ids), past + ids.shape[1]]
            raise ValueError(f"attention_mask must be of shape {shape}, got {[*mask.shape]}")
        mask = mask.bool()
        first = mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))
        if (first.sum(1) > 1).any():
            raise ValueError("attention_mask must be ones, with zeros only before and behind them, in each row")
        if mask[:, 0].all() and not (cache is not None and cache.padded):
            return None
        if past and not cache.padded:
            raise ValueError("a text must not begin behind padding if its cache was begun without padding")
        return first[:, past:]


SympowConfig.register_for_auto_class()
SympowForCausalLM.register_for_auto_class("AutoModelForCausalLM")
