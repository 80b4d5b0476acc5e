"""Train and score a model on multi-query associative recall (MQAR). A seed decides the texts.

    recall(model, TASKS["mqar"], rate=3e-3, seed=1337)        # a measurement of measure.py

A text begins with pairs of a key and a value. Then each key comes once more, and the model must answer with its value.
All other tokens are random, and have no loss:

    key value key value key value  .  .  key  .  key  .  .  .  key  .
                                         value  value        value       are the answers

This is the task of Zoology (Arora et al., 2023), with the texts of figure 2 in "Simple linear attention language models
balance the recall-throughput tradeoff" (Arora et al., 2024). As there, a model trains on up to 64 pairs in 256 tokens,
and is asked for up to 256 in 1,024. AdamW has weight decay 0.1, and the rate falls to 0 on a cosine. Training stops
when the mean of the tests' accuracies is above 99%. The longer texts count too, so a model that can read on goes on to
learn it. Here training has at most 16 epochs in place of 32, blocks have an MLP, biases do not decay, the gradient is
clipped, and texts that do not fill a batch are left out.
"""

from statistics import fmean
from typing import NamedTuple

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from sympow.experiments.train import AUTOCAST, DEVICE
from sympow.model import GPT
from sympow.train import TrainConfig
from sympow.training.optimizer import make_optimizer, take_step

BATCH, TEST_TEXTS = 256, 1000  # a test is read at once
EPOCHS, STOP = 16, 0.99  # at most, and the mean accuracy of the tests above which training ends
POWER = 0.01  # of the law by which a question comes soon after the pairs more often than late


class Task(NamedTuple):
    """The sizes of the texts. The first half of the vocabulary has the keys, the second half the values."""

    vocab_size: int
    training: tuple  # of (tokens, pairs, texts)
    tests: tuple  # of (tokens, pairs), the longest last
    width: int  # of the models


TASKS = {
    "mqar": Task(
        8192,
        ((64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000)),
        ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256)),
        128,
    ),
    "mqar_tiny": Task(64, ((16, 2, 6400), (32, 4, 6400)), ((16, 2), (32, 4), (64, 8)), 32),
}


def recall(model, task, rate, seed):
    """Train a model like this one, and return what it recalls.

    rate, epochs: the highest learning rate, and how many epochs training took. accuracy: {test: share of right
    answers}.
    """
    torch.manual_seed(seed)
    model = GPT(model.config).to(DEVICE)
    texts = torch.Generator(DEVICE).manual_seed(seed)
    batches = [
        make_texts(texts, BATCH, length, pairs, task.vocab_size)
        for length, pairs, count in task.training
        for _ in range(count // BATCH)
    ]
    optimizer = make_optimizer(model, TrainConfig(learning_rate=rate, weight_decay=0.1, beta2=0.999))
    schedule = CosineAnnealingLR(optimizer, EPOCHS * len(batches))
    hidden = torch.compile(
        model.hidden,
        dynamic=False,
        mode="reduce-overhead",
        disable=DEVICE == "cpu",
    )
    for epoch in range(EPOCHS):
        for i in torch.randperm(len(batches)):
            ids, places, values = batches[i]
            with AUTOCAST:
                loss = model.loss(read_questions(hidden, ids, places), values)
            loss.backward()
            take_step(model, optimizer, 1.0)
            schedule.step()
        accuracy = {f"{pairs} in {T:,}": right_answers(model, task, T, pairs) for T, pairs in task.tests}
        print(f"epoch {epoch + 1}: {accuracy}", flush=True)
        if fmean(accuracy.values()) > STOP:
            break
    return dict(rate=rate, epochs=epoch + 1, accuracy=accuracy)


def make_texts(generator, texts, length, pairs, vocab_size):
    """Return (ids [texts, length], places [texts, pairs], values [texts, pairs]) int64 on the generator's device.

    Pair i is ids[:, 2 i] and values[:, i] behind it. Its key comes again at places[:, i], an even number.
    """
    half, space = vocab_size // 2, length // 2 - pairs
    options = dict(generator=generator, device=generator.device)
    keys = 1 + torch.rand(texts, half - 1, **options).topk(pairs).indices  # token 0 is no key
    values = half + torch.rand(texts, vocab_size - half, **options).topk(pairs).indices
    share = torch.arange(1, space + 1, device=generator.device) ** (POWER - 1)
    places = 2 * (pairs + share.expand(texts, space).multinomial(pairs, generator=generator))  # without replacement
    ids = torch.randint(vocab_size, (texts, length), **options)
    ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
    return ids.scatter_(1, places, keys), places, values


def read_questions(hidden, ids, places):
    """Return the head's inputs [B, pairs, n_embd] at places [B, pairs]; hidden: a model's, perhaps compiled."""
    x, _ = hidden(ids)
    return x.take_along_dim(places[..., None], 1)


@AUTOCAST
@torch.inference_mode()
def right_answers(model, task, length, pairs):
    """Return the share of right answers in a test."""
    generator = torch.Generator(DEVICE).manual_seed(10**6)  # no seed of training
    ids, places, values = make_texts(generator, TEST_TEXTS, length, pairs, task.vocab_size)
    answers = model.logits(read_questions(model.hidden, ids, places)).argmax(-1)
    return (answers == values).float().mean().item()
