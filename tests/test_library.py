"""What docs/use/library.md shows, run as it stands there, and power attention inside transformers' Llama."""

import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import LLAMA, ROOT, join, raises_one_line, start_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

transformers = pytest.importorskip("transformers")
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.masking_utils import sdpa_mask  # noqa: E402

import sympow.transformers  # noqa: E402
from sympow.modeling import CACHE, SympowConfig, SympowForCausalLM  # noqa: E402

OLD = transformers.__version__.startswith("5.0.")  # a Llama does less there
GATES = {"sympow": "none", "sympow_p4": "none", "sympow_fixed": "fixed"}
POWERS = {"sympow": 2, "sympow_p4": 4, "sympow_fixed": 2}


def assert_close(found, expected, limit=1e-5):
    """Assert that the relative error of a tensor is at most `limit`."""
    assert (found - expected).norm() <= limit * expected.norm()


def naive_attention(module, query, key, value, attention_mask, name, **kwargs):
    """Compute power attention from all pairs, under transformers' own mask of pairs; return (y [B, T, H, D], None)."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    w = (query @ key.transpose(-1, -2)) ** POWERS[name]
    (n, m), Hkv = w.shape[2:], w.shape[1] // groups
    visible = torch.ones(n, m, dtype=torch.bool).tril(m - n) if attention_mask is None else attention_mask
    if GATES[name] == "fixed":  # the gates of the tokens after j that i sees
        slopes = 2.0 ** (-8.0 / Hkv * torch.arange(1, Hkv + 1)).repeat_interleave(groups)
        passed = visible.flip(-1).double().cumsum(-1).flip(-1) - visible.double()
        w = w * (-slopes.to(w)[:, None, None] * passed).exp()
    w = w.where(visible, 0)
    y = (w @ value) / w.sum(-1, keepdim=True).clamp_min(1e-300)
    return y.transpose(1, 2), None


@pytest.fixture(scope="module")
def power():
    """Return the module sympow.transformers with all of GATES registered, and each of them as naive_NAME too."""
    module = sympow.transformers
    for name in GATES:
        module.register(name, p=POWERS[name], gate=GATES[name])
        AttentionInterface.register(f"naive_{name}", partial(naive_attention, name=name))
        AttentionMaskInterface.register(f"naive_{name}", sdpa_mask)
    return module


def llama(name, dtype=torch.float64, **settings):
    """Return a Llama of random weights, large enough for texts that do not repeat one token."""
    torch.manual_seed(0)
    config = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, attn_implementation=name, initializer_range=0.3,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**config | settings)).to(dtype).eval()


def ids(*shape):
    return torch.randint(2, 64, shape)


def greedy(model, tokens, new):
    """Return the tokens that greedy decoding appends, each from all tokens before it, computed anew."""
    for _ in range(new):
        tokens = torch.cat((tokens, logits_of(model, tokens)[:, -1:].argmax(-1)), 1)
    return tokens[:, -new:]


PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8, [1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 0, 1, 1, 1]])
BATCHES = {
    "plain": {},
    "padded": dict(attention_mask=PADDED),
    "padded, as generate counts": dict(
        attention_mask=PADDED, position_ids=(PADDED.cumsum(-1) - 1).masked_fill(PADDED == 0, 0)
    ),
    "packed": dict(
        position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [*range(8)], [0, 0, 1, 2, 3, 0, 0, 1], [*range(8)]])
    ),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", GATES)
def test_a_llama_trains_as_with_naive_attention(power, name, batch):
    tokens, kwargs, results = ids(4, 8), BATCHES[batch], []
    labels = tokens.masked_fill(kwargs.get("attention_mask", torch.ones_like(tokens)) == 0, -100)
    for attention in (name, f"naive_{name}"):
        model = llama(attention)
        loss = model(tokens, labels=labels, use_cache=False, **kwargs).loss
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for found, wanted in zip(*results):
        assert_close(found, wanted, 1e-9)


def test_packed_documents_stay_apart_after_a_batch_whose_padding_hid_their_border(power):
    """The same tensor of position_ids serves both batches."""
    model, tokens, mask = llama("sympow"), ids(1, 8), torch.ones(1, 8, dtype=torch.long)
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    hidden = mask.clone()
    hidden[0, 3] = 0
    first, second = (
        model(tokens, attention_mask=x, position_ids=position_ids, use_cache=False).logits for x in (hidden, mask)
    )
    assert_close(second[:, 4:], model(tokens[:, 4:], use_cache=False).logits, 1e-9)
    assert not torch.allclose(first[:, 4:], second[:, 4:])


def test_packed_documents_stay_apart_where_an_attention_gets_no_position_ids(power):
    q, k, v = torch.randn(3, 2, 2, 9, 4).unbind()
    document = torch.tensor([[0] * 5 + [1] * 4, [0] * 9])
    same_document = lambda b, h, i, j: (document[b, i] == document[b, j]) & (j <= i)
    pairs = (document[:, :, None] == document[:, None]).tril()
    present = torch.ones(2, 9, dtype=torch.long)
    present[0, 5] = present[1, 6] = 0  # the first token of a document, and another
    for padding in (None, present):
        mask = power.padding_mask(kv_length=9, batch_size=2, attention_mask=padding, mask_function=same_document)
        y, _ = power.attend(None, q, k, v, mask, p=2, gate="none")
        visible = pairs if padding is None else pairs & padding[:, None].bool()
        wanted, _ = naive_attention(None, q.double(), k.double(), v.double(), visible[:, None], "sympow")
        assert_close(y, wanted)


@pytest.mark.parametrize("switch_over", ["auto", "always", 5])
@pytest.mark.parametrize("name", GATES)
def test_greedy_text_is_that_of_full_computation_with_left_padding_too(power, name, switch_over):
    model, tokens = llama(name), ids(2, 9)
    tokens[0, :4] = 0
    mask = (tokens > 0).long()
    cache = power.PowerCache(switch_over)
    texts = model.generate(tokens, attention_mask=mask, past_key_values=cache, max_new_tokens=12, do_sample=False)
    found = texts[:, 9:]
    assert len(found[0].unique()) > 3  # a text that repeats itself would show nothing
    naive = llama(f"naive_{name}")
    for row, text in zip(found, (tokens[:1, 4:], tokens[1:])):
        assert torch.equal(row[None], greedy(naive, text, 12))


def test_a_cache_stops_growing_and_packed_documents_stay_apart_in_it(power):
    model, tokens, cache = llama("sympow"), ids(1, 40), power.PowerCache()
    with torch.no_grad():
        whole = logits_of(model, tokens)
        sizes = []
        for t in range(40):
            logits = model(tokens[:, t : t + 1], past_key_values=cache).logits
            assert torch.allclose(logits[:, 0], whole[:, t], rtol=1e-9, atol=1e-12)
            sizes.append(cache.bytes())
        state = 2 * 2 * (36 * 9) * 8 + 2 * 8  # layers, heads, (S, z) of D = 8 and p = 2, and what is counted
        assert cache.get_seq_length() == 40 and max(sizes) <= 2 * state and state in sizes
        for packed in (power.PowerCache(), power.PowerCache("always")):  # the second document goes on alone
            at = torch.tensor([[*range(30), *range(9)]])
            model(tokens[:, :39], position_ids=at, past_key_values=packed)
            last = model(tokens[:, 39:], position_ids=torch.tensor([[9]]), past_key_values=packed).logits
            assert torch.allclose(last, logits_of(model, tokens[:, 30:])[:, -1:], rtol=1e-9)
            packed.reset()
            assert packed.get_seq_length() == packed.bytes() == 0


@pytest.mark.parametrize("name", ["sympow_fixed", "GPT-2"])
def test_a_cache_remembers_which_tokens_were_padding(power, name):
    exported = name == "GPT-2"
    model, tokens, mask, logits = model_of(name) if exported else llama(name), ids(2, 6), torch.ones(2, 6), []
    mask[0, :2] = 0
    for later_mask in (pad(mask, (0, 1), value=1), torch.ones(2, 7), None):
        cache = {"past_key_values": None if exported else power.PowerCache("always"), "use_cache": True}
        cache = model(tokens, attention_mask=mask, **cache)[CACHE]
        logits.append(model(tokens[:, :1], attention_mask=later_mask, past_key_values=cache).logits)
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("name", ["sympow_fixed", "GPT-2"])
def test_a_later_mask_that_hides_tokens_of_a_cache_is_refused(power, name):
    """As of texts that go on where shorter ones were padded behind their ends, which a state has read."""
    model, mask = model_of(name) if name in EXPORTED else llama(name), torch.ones(2, 9)
    mask[0, 4:6] = 0
    for later_mask in (mask, mask[:, :7]):
        cache = {} if name in EXPORTED else {"past_key_values": power.PowerCache("always")}
        cache = model(ids(2, 6), attention_mask=torch.ones(2, 6), use_cache=True, **cache)[CACHE]
        with pytest.raises(ValueError, match="attention_mask must not hide tokens of a cache"):
            model(ids(2, later_mask.shape[1] - 6), attention_mask=later_mask, past_key_values=cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_padding_that_is_read_token_after_token_changes_nothing(power, dtype):
    model, tokens, mask = llama("sympow_fixed", dtype), ids(2, 6), torch.ones(2, 6)
    mask[0, :4] = 0
    whole = model(tokens, attention_mask=mask, past_key_values=power.PowerCache("always")).logits[:, -1]
    cache = power.PowerCache("always")
    for i in range(6):
        logits = model(tokens[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache).logits[:, -1]
    assert_close(logits, whole)


@pytest.mark.parametrize("name", ["sympow", "sympow_fixed"])
def test_a_cache_that_grows_beams_and_several_sequences_give_the_same_text(power, name):
    model, tokens = llama(name), ids(2, 9)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    for how in (dict(num_beams=3, num_return_sequences=2), dict(do_sample=True, num_return_sequences=2)):
        texts = []
        for cache in (dict(use_cache=False), {}, dict(past_key_values=power.PowerCache(5))):
            torch.manual_seed(1)
            texts.append(model.generate(tokens, attention_mask=mask, max_new_tokens=8, **how, **cache))
        assert all(torch.equal(text, texts[0]) for text in texts)
    cache, text = power.PowerCache(), tokens[1:]
    for _ in range(2):  # a text goes on where it ended
        text = model.generate(text, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(text[:, 9:], greedy(model, tokens[1:], 8))


def refusals():
    """Return {message: function of (a Llama, the module, tokens [2, 6]) that is refused with it}."""
    square, later = torch.ones(2, 1, 6, 6, dtype=torch.long), torch.ones(2, 6, dtype=torch.long)
    later[0, :2] = 0

    def other_attention(model, power, tokens):
        model.set_attn_implementation("sdpa")
        model.generate(tokens, past_key_values=power.PowerCache(), max_new_tokens=2)

    def cache_of_no_use(model, power, tokens):
        options = dict(attention_mask=later, use_cache=False, max_new_tokens=2)
        model.generate(tokens, past_key_values=power.PowerCache(), **options)

    def packed_keys(model, power, tokens):
        cache = model(tokens, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]])).past_key_values
        model(tokens[:, :1], position_ids=torch.tensor([[3]]), past_key_values=cache)

    return {
        "takes an attention_mask of [B, 6], got [2, 1, 6, 6]": lambda m, _, x: m(x, attention_mask=square),
        "takes an attention_mask of [B, 6], got [2, 5]": lambda m, _, x: m(x, attention_mask=later[:, :5]),
        "of [B, 13], got [2, 7]: a cache's tokens count too, also with use_cache=False": cache_of_no_use,
        "the last ones went to another attention": other_attention,
        "must go on from the cached keys": packed_keys,
        "packed or static ones": lambda m, _, x: m.generate(x, cache_implementation="static", max_new_tokens=2),
        "dropout must be 0.0 for power attention, got 0.1": lambda m, _, x: m.train()(x),
        "is causal: no token sees a later one": lambda m, power, x: power.padding_mask(
            kv_length=6, batch_size=2, mask_function=lambda b, h, i, j: j >= 0
        ),
        "no windows, no chunks and no mask functions": lambda m, power, x: power.padding_mask(
            kv_length=6, local_size=4
        ),
        "is_causal must be True for power attention, got False": lambda m, power, x: power.attend(
            None, *(torch.ones(1, 1, 3, 4),) * 3, None, is_causal=False, p=2, gate="none"
        ),
        "switch_over must be auto, always, never": lambda m, power, x: power.PowerCache("sometimes"),
        "sliding_window must be None for power attention, got 4": lambda m, _, x: m(x, sliding_window=4),
        "cu_seq_lens_q must be None for power attention, got a tensor": lambda m, _, x: m(x, cu_seq_lens_q=ENDS),
        "p must be a positive even integer, got 3": lambda m, power, x: power.register("odd", p=3),
        "gate must be one of none, fixed, got 'learned'": lambda m, power, x: power.register("odd", gate="learned"),
    }


def test_generation_that_must_take_tokens_back_is_refused_in_one_line(power):
    said = "this cache cannot be cropped|requires a cache that can be cropped"  # since 5.24 transformers asks first
    with pytest.raises(ValueError, match=said) as refusal:
        llama("sympow").generate(
            ids(1, 6), past_key_values=power.PowerCache(), max_new_tokens=2, prompt_lookup_num_tokens=2
        )
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("message", refusals())
def test_what_a_llama_with_power_attention_does_not_take_is_refused_in_one_line(power, message):
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        refusals()[message](llama("sympow", attention_dropout=0.1), power, ids(2, 6))
    assert "\n" not in str(refusal.value)


# ---- an exported model, which does what a Llama does

EXPORTED = {
    "gating and softmax": dict(attention="sympow_gating,softmax", gate_bias=1.0, convolution=3),
    "GPT-2": dict(positions="learned", bias=True, embedding_norm=False),
    "heinsen": dict(attention="heinsen"),
    "a Llama's block": dict(attention="softmax,sympow_gating", **LLAMA),
}
IDS = torch.randint(2, 64, (2, 12), generator=torch.Generator().manual_seed(3))
BOTH, ENDS = IDS.reshape(1, 24), torch.tensor([0, 12, 24], dtype=torch.int32)


def model_of(name):
    """Return a Llama with tied embeddings, or an exported model of EXPORTED, in float64."""
    if name == "Llama":
        return llama("sdpa", tie_word_embeddings=True)
    torch.manual_seed(0)
    sizes = dict(n_layer=2, n_head=4, n_embd=32, vocab_size=64)
    model = SympowForCausalLM(SympowConfig(sizes | EXPORTED[name], pad_token_id=0)).double().eval()
    for x in model.parameters():
        x.data.add_(torch.randn_like(x), alpha=0.3)
    return model


def logits_of(model, tokens=IDS):
    return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("name", ["Llama", *EXPORTED])
@pytest.mark.parametrize(
    "rows", ["111110000 1 1 1/111111111 1 1 1", "0000 1 1 111111/1111 1 1 111111", "00 00111 11111/11 11111 11111"]
)
def test_texts_read_in_pieces_are_what_they_are_without_padding(name, rows):
    model, rows = model_of(name), rows.split("/")
    mask = torch.tensor([[int(digit) for digit in row if digit != " "] for row in rows])
    cache, parts, n = None, [], 0
    for piece in IDS.split([*map(len, rows[0].split())], dim=1):
        n += piece.shape[1]
        positions = (mask[:, :n].cumsum(1) - 1).clamp(min=0)[:, -piece.shape[1] :]
        output = model(piece, mask[:, :n], positions, past_key_values=cache, use_cache=True)
        cache, parts = cache or output[CACHE], [*parts, output.logits]  # it grows in place
    for text, tokens, seen in zip(torch.cat(parts, 1), IDS, mask.bool()):
        assert_close(text[seen], logits_of(model, tokens[None, seen])[0])


OPTIONS = [
    dict(input_ids=BOTH, position_ids=torch.arange(12).repeat(1, 2)),
    dict(input_ids=BOTH, seq_idx=torch.arange(24)[None] // 12),
    dict(input_ids=BOTH, cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS, max_length_q=12, max_length_k=12),
    dict(return_dict=None),  # as PEFT gives it
    dict(return_dict=False, logits_to_keep=torch.arange(12)),
]


@pytest.mark.parametrize("name", ["Llama", *EXPORTED])
@pytest.mark.parametrize("options", OPTIONS)
def test_packed_documents_and_other_options_give_the_same_logits(name, options):
    if name == "Llama" and {"seq_idx", "cu_seq_lens_q"} & options.keys():
        pytest.skip("sdpa drops it")
    model = model_of(name)
    assert_close(model(**dict(input_ids=IDS, use_cache=False) | options)[0].view(2, 12, -1), logits_of(model))


@pytest.mark.parametrize("name", ["Llama", *EXPORTED])
def test_a_vocabulary_grows_and_a_model_is_loaded_without_a_cache(name, tmp_path):
    model = model_of(name)
    model.resize_token_embeddings(70)
    model.save_pretrained(tmp_path)
    output = type(model).from_pretrained(tmp_path, use_cache=False)(IDS)
    assert_close(output.logits[..., :64], logits_of(model_of(name)))
    assert model.config.vocab_size == output.logits.shape[-1] == 70 and CACHE not in output


@pytest.mark.parametrize("name", ["Llama", *EXPORTED])
def test_the_mean_loss_of_no_token_is_nan_and_changes_no_weight(name):
    model, labels = model_of(name), torch.full_like(IDS, -100)
    loss = model(IDS, labels=labels).loss
    loss.backward()
    assert loss.isnan() and not any(x.grad.any() for x in model.parameters() if x.grad is not None)
    assert model(IDS, labels=labels, num_items_in_batch=3).loss == 0  # the sum, where others count


@pytest.mark.parametrize("name", ["Llama", *EXPORTED])
def test_a_text_goes_on_from_the_cache_that_generate_returned(name):
    model = model_of(name)
    generate = partial(model.generate, do_sample=False)
    whole = generate(IDS, max_new_tokens=6)
    for start in (0,) if OLD else (0, 14):  # all tokens, or only those that the cache does not have
        first = generate(IDS, max_new_tokens=3, return_dict_in_generate=True)
        options = {CACHE: first[CACHE], "attention_mask": torch.ones_like(first.sequences)}
        assert torch.equal(generate(first.sequences[:, start:], max_new_tokens=3, **options)[:, -3:], whole[:, -3:])
    if not OLD:
        assert torch.equal(generate(IDS, max_new_tokens=6, prefill_chunk_size=5, cache_implementation="dynamic"), whole)


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_trainer_smooths_the_labels_of_next_tokens(name, tmp_path):
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(tmp_path, label_smoothing_factor=0.1, use_cpu=True)
    trainer = transformers.Trainer(model_of(name), arguments)
    loss = trainer.compute_loss(trainer.model, dict(input_ids=IDS, labels=IDS))
    logits = logits_of(trainer.model)[:, :-1].mT
    assert_close(loss, cross_entropy(logits, IDS[:, 1:], label_smoothing=0.1))


@pytest.mark.parametrize("name", ["num_hidden_layers", "vocab_size", "tie_word_embeddings", "max_position_embeddings"])
def test_a_setting_that_a_loaded_model_cannot_have_is_refused_by_name(name, tmp_path):
    model_of("GPT-2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"this model cannot have {name}=3"):
        SympowForCausalLM.from_pretrained(tmp_path, **{name: 3})


@pytest.mark.parametrize("part", ["attn.mix.gate.b", "attn.conv.weight", "attn.c_proj.weight", "ln_f.weight"])
def test_a_weight_that_a_folder_lacks_is_an_error_that_names_it(part, tmp_path):
    model_of("gating and softmax").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    missing = min(name for name in weights if name.endswith(part))
    rest = {name: x for name, x in weights.items() if name != missing}
    save_file(rest, tmp_path / "other.safetensors", {"format": "pt"})
    model, info = SympowForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(model, SympowForCausalLM) and not info["missing_keys"]
    os.replace(tmp_path / "other.safetensors", tmp_path / "model.safetensors")
    with raises_one_line(ValueError, f"{tmp_path} lacks the weight {missing}: "):
        SympowForCausalLM.from_pretrained(tmp_path)


def test_a_cache_of_keys_is_refused_by_name():
    with pytest.raises(ValueError, match="cache_implementation must be one of dynamic, got 'static'"):
        model_of("GPT-2").generate(IDS, cache_implementation="static")


@pytest.mark.parametrize("target", ["c_proj", "wte", "lm_head"])
def test_an_adapter_of_peft_merges_into_what_was_trained(target):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        model_of("a Llama's block" if target == "lm_head" else "GPT-2"),
        peft.LoraConfig(task_type="CAUSAL_LM", target_modules=[target], init_lora_weights=False),
    )
    logits, loss = logits_of(adapted), adapted(input_ids=IDS, labels=IDS).loss
    merged = adapted.merge_and_unload()
    assert_close(logits_of(merged), logits)
    assert_close(merged(IDS, labels=IDS).loss, loss)


@pytest.mark.parametrize(
    "message, options",
    {
        "does not take inputs_embeds": dict(inputs_embeds=torch.ones(2, 12, 32)),
        "must end with the number of tokens, 12": dict(cu_seq_lens_q=ENDS),
        "at least one token": dict(input_ids=IDS[:, :0]),
        "is a SympowCache, got a DynamicCache": {CACHE: transformers.DynamicCache()},
        "must be ones, with zeros only before and behind": dict(attention_mask=IDS % 2),
        r"must be of shape \[2, 12\], got \[2, 3\]": dict(attention_mask=IDS[:, :3]),
        r"input_ids must be in \[0, 64\), got": dict(input_ids=IDS + 9),
        r"labels other than -100 must be in \[0, 64\), got 0": dict(labels=IDS + 9),
        r"labels other than -100 must be in \[0, 64\), got -": dict(labels=-IDS),
    }.items(),
)
def test_what_an_exported_model_does_not_take_is_refused_by_name(message, options):
    with pytest.raises((ValueError, IndexError), match=message):
        model_of("heinsen")(**{"input_ids": IDS} | options)


@pytest.mark.skipif(OLD, reason="transformers before 5.4 does not read it")
@pytest.mark.parametrize("first, last", [("sympow_p4", "sdpa"), ("sdpa", "sympow_p4")])
def test_a_saved_llama_comes_back_with_the_attention_it_has(power, tmp_path, first, last):
    model = llama(first)
    logits_of(model)
    model.set_attn_implementation(last)
    model.save_pretrained(tmp_path)
    assert_close(logits_of(LlamaForCausalLM.from_pretrained(tmp_path)), logits_of(model))


# ---- the recipes of docs/use/library.md


def recipes():
    """Return {title: the Python code of the section}."""
    sections = re.split(r"^## (.+)\n", Path(ROOT, "docs", "use", "library.md").read_text(), flags=re.M)[1:]
    code = {
        title: "".join(re.findall(r"```python\n(.*?)```", text, re.S)) for title, text in zip(*[iter(sections)] * 2)
    }
    return {title: text for title, text in code.items() if text}


def run_recipe(title):
    """Run the code of a section as a file of its own would run; return its names."""
    names = {"__name__": "recipe"}
    torch.manual_seed(0)
    code = recipes()[title].replace("cache=cache", f"{CACHE}=cache")  # as the recipe says of older versions
    exec(compile(code, f"docs/use/library.md, {title}", "exec"), names)
    return names


def test_every_recipe_is_run_by_a_test():
    here = Path(__file__).read_text()
    assert [title for title in recipes() if f'run_recipe("{title}")' not in here] == ["A trained model in transformers"]


def test_the_recipe_of_the_operator():
    of = run_recipe("The operator")
    q, k, v = of["q"], of["k"], of["v"]
    assert of["y"].shape == (2, 512, 8, 32) and of["state"].S.shape == (2, 4, 528, 32)
    whole = sympow.power_attention(*(torch.cat((x, x), 1) for x in (q, k, v)), p=2)
    assert_close(of["y"], whole[:, 512:])


def test_the_recipe_of_packed_sequences():
    of = run_recipe("Packed sequences")
    q, k, v = (of[name][None, 100:170] for name in "qkv")
    y, state = sympow.power_attention(q, k, v, of["log_g"][:, 100:170], p=2, return_state=True)
    assert_close(of["y"][:, 100:170], y)
    assert_close(of["state"].S[1], state.S[0])


def test_the_recipe_of_a_layer():
    of = run_recipe("A layer")
    whole = of["layer"](of["x"])
    assert of["y"].shape == whole.shape
    assert_close(of["y_t"], whole[:, -1:])
    assert not torch.allclose(of["y"][:, 20:], whole[:, 20:]) and torch.allclose(of["y"][:, :20], whole[:, :20])


def test_the_recipe_of_a_run_in_a_notebook(go):
    assert go("--out_dir=out/first") == 0
    names = run_recipe("A run in a notebook")
    assert names["logits"].shape == (1, 6, 257)


@pytest.mark.filterwarnings("error:.*is deprecated:FutureWarning")
def test_the_recipe_of_a_model_of_transformers(capsys):
    of = run_recipe("In a model of transformers")
    assert all(p.grad.norm() > 0 for p in of["model"].parameters())
    assert of["text"].shape == (2, 52) and int(capsys.readouterr().out) == of["cache"].bytes()
    assert torch.equal(of["text"][:, 32:], greedy(of["model"], of["ids"], 20))


@pytest.mark.slow
def test_the_recipe_of_transforms(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    of = run_recipe("Under PyTorch's transforms")
    layer, x = of["layer"], of["x"]
    assert torch.equal(of["y"], layer(x))
    with torch._dynamo.config.patch(error_on_recompile=True):  # another length takes the same graph
        for length in (20, 13, 7):
            part = x[:, :length].contiguous()
            assert torch.allclose(of["compiled"](part), layer(part), atol=1e-6)


def make_layers():
    """Return two layers with the same weights at every call."""
    torch.manual_seed(1)
    return torch.nn.Sequential(*(sympow.Attention(n_embd=64, n_head=4) for _ in range(2)))


def ranks():
    """Compare gradients of layers on two ranks, copied and sharded, with those of all samples on one rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(2, 4, 20, 64)
    whole, copies, shards = make_layers(), make_layers(), make_layers()
    for layer in (*shards, shards):
        fully_shard(layer)
    own = x[dist.get_rank()]  # each rank has samples of its own
    for layers, samples in ((whole, x.flatten(0, 1)), (DistributedDataParallel(copies), own), (shards, own)):
        layers(samples).square().mean().backward()
    for p, q, r in zip(whole.parameters(), copies.parameters(), shards.parameters(), strict=True):
        assert_close(q.grad, p.grad)
        assert_close(r.grad.full_tensor(), p.grad)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(bool(os.environ.get("TEST_GPU")), reason="the ranks have no GPUs")
def test_layers_on_several_ranks_have_the_gradients_of_one(tmp_path):
    assert join(*start_ranks(2, ranks, cwd=tmp_path)) == [0, 0], (tmp_path / "rank_0").read_text()


@pytest.mark.gpu
def test_the_recipe_of_a_cuda_graph():
    of = run_recipe("In a CUDA graph")
    graphed, leaves = of["attend"], [of[name] for name in "qkv"]
    with torch.no_grad():
        for x in leaves:
            x.copy_(torch.randn_like(x))
    results = []
    for attend in (graphed, lambda *x: sympow.power_attention(*x, p=2)):
        y = attend(*leaves)
        results.append([y.clone(), *torch.autograd.grad(y.sin().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.slow
def test_a_compiled_llama_honours_masks_and_packed_documents(power):
    model, tokens = llama("sympow", num_hidden_layers=1), ids(4, 8)
    for kwargs in BATCHES["padded"], BATCHES["packed"]:
        torch._dynamo.reset()
        compiled = torch.compile(model, dynamic=True, fullgraph=True, backend="eager")
        found, expected = (run(tokens, use_cache=False, **kwargs).logits for run in (compiled, model))
        assert torch.allclose(found, expected)
