"""Generate token ids from token ids. sample.py encodes and decodes text.

    for ids in generate(model, prompt_ids, max_new_tokens=100, num_samples=2): ...     # a list of num_samples ids

    logits, state = read_prompt(model, prompt_ids, max_new_tokens=100)                 # the same in two steps,
    for ids in generate(model, prefix=(logits, state), max_new_tokens=100): ...        # with the state in between

On a GPU, decoder.py generates if there are kernels for all layers of the model, and if it computes this model: its
logits are compared with what `GPT.step` computes at the start. Otherwise `GPT.step` generates, see steps.py.
"""

import torch

from ..attention.operator.dispatch import first_line, warn_once, why_not
from ..attention.variant import decoding_kernels
from .steps import Sampler, Timings, cache_dtype, generate_by_steps, read_prompt

NOT_THIS_MODEL = "the decoder does not compute this model: generating with GPT.step"


def generate(
    model,
    ids=(),
    *,
    max_new_tokens,
    num_samples=1,
    temperature=0.8,
    top_k=200,
    top_p=1.0,
    seed=1337,
    switch_over=None,
    state_dtype=torch.float32,
    timings=None,
    prefix=None,
    cuda_graph=True,
):
    """Read the prompt; return an iterator over max_new_tokens lists, the next token id of each of num_samples samples.

    ids: the prompt. It is read once; every sample then goes on from there by itself.
    prefix: (logits, ModelState) after the text before the prompt; without it the prompt must have at least one id.
    temperature: 0 always takes the likeliest token; top_k (0: all) and top_p (1: all) bound the choice.
    seed: sample i has its own random numbers, from seed + i.
    switch_over: the number of cached tokens at which a state replaces the KV cache (default: the attention's own).
    state_dtype: the dtype of states between flushes, on the kernels.
    cuda_graph: generate with decoder.py on a GPU.

    Raises, before anything is read, MemoryError if the state of generation will not fit, TooLong if the text is longer
    than the model's table of positions, and ValueError for a temperature, top_k or top_p out of its range.
    """
    device = model.transformer.wte.weight.device
    timings = timings or Timings(device)
    sampler = Sampler(device, num_samples, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p)
    if ids or prefix is None:
        prefix = read_prompt(
            model,
            ids,
            prefix,
            max_new_tokens=max_new_tokens,
            num_samples=num_samples,
            switch_over=switch_over,
            state_dtype=state_dtype,
            timings=timings,
        )
    logits, state = prefix
    on_kernels = cuda_graph and max_new_tokens > 0 and decodes_on_kernels(model, state_dtype)
    if on_kernels:
        return _decode(model, logits, state, sampler, max_new_tokens, state_dtype, timings)
    return generate_by_steps(model, logits, state, sampler, max_new_tokens, timings)


def _decode(model, logits, state, sampler, max_new_tokens, state_dtype, timings):
    """Yield the tokens of `generate` from decoder.py, or by steps if the decoder does not compute this model."""
    from ..kernels.decode.sampling import sample_next_token  # Triton is not everywhere

    sampler.kernel = sample_next_token
    decoder = _make_decoder(model, logits, state, sampler, max_new_tokens, state_dtype)
    if decoder is None:
        yield from generate_by_steps(model, logits, state, sampler, max_new_tokens, timings)
        return
    del state  # free it: the decoder has a copy of its own
    sampler.prepare()
    sampler(logits.expand(len(decoder.ids), -1), decoder.ids)
    if max_new_tokens > 1:
        decoder.capture()
    timings.start()
    for tokens in decoder.tokens(max_new_tokens):
        yield tokens.tolist()
        timings.add_step(decoder.bytes())


def _make_decoder(model, logits, state, sampler, max_new_tokens, state_dtype):
    """Return a Decoder that resumes from `state`, or None, with a warning, if its logits differ from GPT.step's."""
    from .decoder import Decoder  # Triton is not everywhere

    try:
        samples = len(sampler.generators)
        decoder = Decoder(model, state, sampler, max_new_tokens, cache_dtype(model), samples, state_dtype)
        problem = decoder.why_not(model, logits, state) if max_new_tokens > 1 else ""
    except (AttributeError, ValueError) as error:  # it has other blocks than model.py
        problem = first_line(error)
    if not problem:
        return decoder
    warn_once(f"{NOT_THIS_MODEL} ({problem})")
    return None


def decodes_on_kernels(model, state_dtype=torch.float32):
    """Return True if decoder.py can generate with this model.

    The model must be on a GPU, with kernels for all its layers and for its position embedding, and each layer must end
    with a projection and an MLP. Before the first use the kernels are compared with float64; if they fail, a warning
    says so.
    """
    embeddings, dtype, D = model.transformer, cache_dtype(model), model.config.head_dim
    device, layers = embeddings.wte.weight.device, [block.attn for block in embeddings.h]
    parts = [layer.mix for layer in layers] + ([embeddings.wpe] if hasattr(embeddings, "wpe") else [])
    if device.type != "cuda" or not all(map(decoding_kernels, parts)) or any(layer.replaces_mlp for layer in layers):
        return False
    powers = {layer.mix.p for layer in layers if decoding_kernels(layer.mix) == "power"}
    reasons = [why_not("quadratic", device, dtype, D, D, p) for p in powers]
    if any(reasons) or why_not("decode", device, dtype, D, D, 2):
        return False
    from .decoder import compare  # Triton is not everywhere

    problem = compare(model, dtype, state_dtype)
    if problem:
        warn_once(f"{NOT_THIS_MODEL} ({problem})")
    return not problem
