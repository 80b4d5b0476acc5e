"""The model as transformers has it: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).

export.py copies this file into the folder as modeling_sympow.py. It needs the package sympow (`pip install .`).
"""

try:
    from sympow import check_choice
    from sympow.attention.operator.sequences import sequence_lengths, sequence_starts
    from sympow.attention.variant import with_defaults
    from sympow.code import warn_of_changes
    from sympow.model import GPT, GPTConfig
    from sympow.transformers import StateLayer, document_starts
except ImportError as error:
    message = "this model needs the package sympow 0.1.0: run `pip install .` in a clone of its repository"
    raise ImportError(f"{message} ({error})") from None

import torch
from torch.nn.functional import embedding, pad
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

# the name of the argument and of the output in this version of transformers: cache from 5.24 on
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
# arguments that repeat what others say, the cache (up to transformers 5.2) and cu_seq_lens_q, or that `generate` has
# read and hands on nevertheless (for stop_strings)
REDUNDANT = "cache_position cu_seq_lens_k max_length_q max_length_k tokenizer".split()
# fields of a SympowConfig that repeat those in `model`
FIXED = "hidden_size num_hidden_layers num_attention_heads vocab_size tie_word_embeddings".split()


class SympowConfig(PretrainedConfig):
    """Holds `model`, the fields of GPTConfig of model.py, and what transformers asks of every model."""

    model_type = "sympow"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    def __init__(self, model=None, use_cache=True, **kwargs):
        self.model = with_defaults(GPTConfig, model) if model else {}
        self.use_cache = use_cache
        try:
            gpt = GPTConfig(**self.model)
        except TypeError as error:  # a setting that this package does not have
            raise ImportError(f"this model needs another version of the package sympow: {error}") from None
        fixed = gpt.n_embd, gpt.n_layer, gpt.n_head, gpt.vocab_size, gpt.tied_head
        super().__init__(**dict(zip(FIXED, fixed)) | kwargs)


class SympowCache(Cache):
    """What generation keeps of texts: the ModelState, which for the sympow attentions does not grow."""

    def __init__(self):
        super().__init__(layers=[StateLayer()])


class SympowForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = SympowConfig
    base_model_prefix = "gpt"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]

    def __init__(self, config, **settings):
        fixed = SympowConfig(config.model)
        changed = {name: getattr(config, name) for name in FIXED if getattr(config, name) != getattr(fixed, name)}
        for name, value in (changed | settings).items():
            raise ValueError(f"this model cannot have {name}={value}: it is what `model` in its config.json says")
        super().__init__(config)
        warn_of_changes("this model was trained with", getattr(config, "code", None))
        self.gpt = GPT(GPTConfig(**config.model))
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, output_loading_info=False, **options):
        """Load a model as every class of transformers does, but raise ValueError if the files lack one of its weights.

        transformers would warn, and begin with random numbers in its place.
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **options)
        for name in sorted(info["missing_keys"]):
            raise ValueError(f"{model.name_or_path} lacks the weight {name}: export the model again")
        return (model, info) if output_loading_info else model

    def _init_weights(self, module):
        # GPT initialises itself. On the meta device, a fixed gate, which is in no checkpoint, was not computed.
        if type(module).__name__ == "FixedGate":
            module.reset_parameters()

    def get_input_embeddings(self):
        return self.gpt.transformer.wte

    def set_input_embeddings(self, value):
        self.gpt.transformer.wte = value

    def get_output_embeddings(self):
        return self.gpt.lm_head

    def set_output_embeddings(self, value):
        self.gpt.lm_head = value

    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, mean_resizing=True):
        """Change the size of the vocabulary; the embedding keeps a multiple of 64 rows, as in every GPT."""
        embeddings = super().resize_token_embeddings(new_num_tokens, 64, mean_resizing)
        if new_num_tokens:
            self.config.vocab_size = self.config.model["vocab_size"] = self.gpt.config.vocab_size = new_num_tokens
        return embeddings

    def _set_gradient_checkpointing(self, enable=True, **options):
        self.gradient_checkpointing = self.gpt.config.activation_checkpointing = enable

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args):
        check_choice("cache_implementation", generation_config.cache_implementation or "dynamic", ("dynamic",))
        if model_kwargs.get(CACHE) is not None:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        elif generation_config.use_cache is not False:
            model_kwargs[CACHE] = SympowCache()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        cache=None,
        cu_seq_lens_q=None,
        seq_idx=None,
        num_items_in_batch=None,
        **kwargs,
    ):
        """Return logits [B, T, vocab_size], or with labels [B, T] the loss of each next token, -100 left out.

        attention_mask [B, T of all tokens up to now]: zeros may stand before a text (left padding) and behind it.
        cache, or past_key_values (its name before transformers 5.24): the SympowCache of the tokens before, which takes
        in these. Packed documents, which see nothing of each other, begin where position_ids [B or 1, T] do not go on
        by one, where seq_idx [B or 1, T] changes, and where cu_seq_lens_q [N + 1] says so of a batch of 1.

        The mean loss of no token is NaN with gradients of zero, as in transformers' models: 0 would be the best loss.
        In training the loss comes without logits, which would not fit into memory for long contexts. transformers'
        Trainer gives num_items_in_batch where it accumulates gradients: the loss is then the sum over the tokens
        divided by it. Raises ValueError for arguments that the model does not have, and IndexError for token ids and
        labels outside the vocabulary; on a GPU these fail an assertion of CUDA.
        """
        for name, value in kwargs.items():
            if value is not None and value is not False and name not in REDUNDANT:
                raise ValueError(f"this model does not take {name}")
        if input_ids is None or not input_ids.numel():
            raise ValueError("input_ids must be [B, T] with at least one token")
        input_ids = check_range("input_ids", input_ids, self.gpt.config.vocab_size)
        cache = past_key_values if cache is None else cache
        if use_cache is None:
            use_cache = labels is None and not self.training and self.config.use_cache
        if cache is None and use_cache:
            cache = SympowCache()
        if not isinstance(cache, SympowCache | None):
            raise ValueError(f"the cache of this model is a SympowCache, got a {type(cache).__name__}")
        documents = find_documents(input_ids, position_ids, cu_seq_lens_q, seq_idx)
        x = self._read(input_ids, attention_mask, documents, cache)
        loss = None
        if labels is not None:
            targets = pad(labels[:, 1:], (0, 1), value=-100)
            counted = targets != -100
            targets = check_range("labels other than -100", targets * counted, self.gpt.config.vocab_size)
            loss = self.gpt.loss(x, targets.where(counted, -1))
            if num_items_in_batch is None:
                loss = loss.where(counted.any(), torch.nan)
            else:
                loss = loss * counted.sum() / num_items_in_batch
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = None if labels is not None and self.training else self.gpt.logits(x[:, keep])
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})

    def _read(self, ids, mask, documents, cache):
        """Return the head's input for ids [B, T], and cache ids."""
        layer = StateLayer() if cache is None else cache.layers[0]
        if layer.seen is None:
            layer.seen = torch.zeros_like(ids[:, 0])
            layer.state = cache and self.gpt.empty_state(len(ids))
        counts, starts, order = arrange(ids, mask, documents, layer)
        if order is not None:
            ids = ids.gather(1, order)
        x, layer.state = self.gpt.hidden(ids, layer.state, starts)
        T = ids.shape[1]
        layer.tokens += T
        layer.seen = layer.seen + (T if counts is None else counts)
        return x if order is None else x.take_along_dim(order.argsort(1).unsqueeze(2), 1)


def check_range(name, ids, vocab_size):
    """Return the ids as int64; raise IndexError unless they are in the vocabulary.

    The ids are looked up in a table of themselves, as in an embedding: a GPU fails an assertion, and nothing waits.
    """
    try:
        return embedding(ids, torch.arange(vocab_size, device=ids.device).unsqueeze(1)).squeeze(-1)
    except IndexError:
        raise IndexError(f"{name} must be in [0, {vocab_size}), got {ids.min()} to {ids.max()}") from None


def find_documents(ids, position_ids, cu_seq_lens_q, seq_idx):
    """Return where packed documents begin, [B, T] bool, or None without any; the arguments are those of `forward`."""
    T = ids.shape[1]
    starts = [] if position_ids is None else [document_starts(position_ids, T)]
    if seq_idx is not None:
        starts.append(pad(seq_idx.diff() != 0, (1, 0)))
    if cu_seq_lens_q is not None:
        sequence_lengths(cu_seq_lens_q, T)  # raises ValueError for ends that do not fit
        starts.append(sequence_starts(cu_seq_lens_q, T))
    starts = [x.expand_as(ids) for x in starts if x is not None]
    return torch.stack(starts).any(0) if starts else None


def arrange(ids, mask, documents, layer):
    """Return (counts, starts, order) of new tokens ids [B, T].

    counts [B]: how many are no padding, None if all are. starts [B, T] bool or None: where everything is forgotten,
    since a document begins, or a text behind padding. order [B, T] or None: in which to read, padding first, so that
    none enters the state behind a text. Raises ValueError for a mask that does not fit the tokens before.
    """
    T = ids.shape[1]
    if mask is not None:
        if [*mask.shape] != (shape := [len(ids), layer.tokens + T]):
            raise ValueError(f"attention_mask must be of shape {shape}, got {[*mask.shape]}")
        mask = None if mask.all() else mask.bool()
    if mask is None:
        return None, documents, None
    layer.check_mask(mask)
    text = mask[:, layer.tokens :]
    begun = layer.seen > 0
    counts = text.sum(1)
    first = text & ~pad(text[:, :-1], (1, 0))
    if ((first.sum(1) > 1) | (begun & (counts < T))).any():
        raise ValueError("attention_mask must be ones, with zeros only before and behind them, in each row")
    if layer.state is None and text[:, 0].all():  # what stands behind a text changes nothing
        return counts, documents, None
    starts = first & ~begun[:, None]
    starts = starts if documents is None else starts | documents
    if text[:, -1].all():
        return counts, starts, None
    order = text.long().argsort(dim=1, stable=True)
    return counts, starts.gather(1, order), order


# Trainer shifts the labels of models with these names for label_smoothing_factor.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["sympow"] = "SympowForCausalLM"
SympowConfig.register_for_auto_class()
SympowForCausalLM.register_for_auto_class("AutoModelForCausalLM")
