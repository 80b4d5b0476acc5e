"""What a Trainer does with batches of data: reads those of each micro-step, and computes the loss of held-out ones.

    batches = micro_batches(trainer)           # on the device, from the step on at which the run is
    losses = mean_losses(trainer)              # of the held-out splits, over all ranks
    text = sample_text(trainer, model)         # what the model writes

Each takes the Trainer of train.py, whose attributes are the run's settings, data, model, ranks and layout.
"""

from itertools import count

import torch

from sympow.attention.double import device_of_doubles, double
from sympow.attention.learned_position import most_tokens
from sympow.data.loader import eval_batches, train_batch
from sympow.data.mixture import Mixture
from sympow.generation.generate import generate
from sympow.training.stages import stage_of


def micro_batches(trainer):
    """Yield (inputs, targets) [batch_size, block_size] on the device for this and every later micro-step.

    Notes the index of the stage that a step belongs to as trainer.next_stage before it reads the step's first batch.
    """
    for step in count(trainer.progress.step):
        trainer.next_stage = stage_of(trainer, step)
        stage = trainer.stages[trainer.next_stage]
        for micro in range(stage.accumulation):
            rank, world = place(trainer)
            part, parts = micro * world + rank, stage.accumulation * world
            spans = trainer.slices.of(stage.block_size)
            batch = train_batch(stage.windows, trainer.cfg.seed, step, part, parts, stage.batch_size, spans)
            trainer.ranks.beat()
            on_gpu = trainer.device.type == "cuda"
            if on_gpu:  # from pinned memory the copy runs beside the computation
                batch = [x.pin_memory() for x in batch]
            yield [x.to(trainer.device, non_blocking=on_gpu) for x in batch]


def place(trainer):
    """Return (rank, world): which of how many parts of every batch this process reads."""
    return trainer.layout.data_rank, trainer.layout.data_world


@torch.no_grad()
def mean_losses(trainer):
    """Return {"val_loss": ..., "val_loss/NAME": ...}, mean losses a token over eval_tokens of each held-out split, or
    None if a signal came meanwhile."""
    cfg, ranks, device, held_out = trainer.cfg, trainer.ranks, trainer.device, trainer.held_out
    trainer.network.eval()
    sums = torch.zeros(len(held_out.parts), 2, dtype=torch.float64, device=device_of_doubles(device))
    final = trainer.stages[-1]
    share = *place(trainer), trainer.slices.of(final.block_size)
    for part, added in zip(held_out.parts, sums):
        for x, y in eval_batches(part.windows, cfg.eval_tokens, final.batch_size, *share):
            ranks.beat()
            x, y = x.to(device), y.to(device)
            tokens = (y != -1).sum()
            with trainer.autocast:
                _, loss = trainer.eval_network(x, y)
            added += torch.stack((double(loss) * double(tokens), double(tokens)))
            trainer.share()
            if trainer.signal:
                break
    trainer.network.train()
    if trainer.signal:
        return None
    return held_out.losses([loss / tokens for loss, tokens in ranks.sum(sums).tolist()])


def format_losses(losses):
    """Return validation losses as a text for the terminal: "val loss 2.1234 (code 1.9000, prose 2.5000)"."""
    named = ", ".join(f"{key.partition('/')[2]} {loss:.4f}" for key, loss in losses.items() if "/" in key)
    return f"val loss {losses['val_loss']:.4f}" + (f" ({named})" if named else "")


def epochs(trainer):
    """Return {"epochs/NAME": how often the run has gone through each dataset of its mixture}; {} without one.

    Stages of other contexts have orders of their own; what they have read of a dataset is added up.
    """
    dataset, stages = trainer.dataset, trainer.stages
    if not isinstance(dataset, Mixture):
        return {}
    borders = [0, *(begun for _, begun in trainer.progress.stages), trainer.progress.step]
    found = dict.fromkeys(dataset.sets, 0.0)
    for stage, first, last in zip(stages, borders, borders[1:]):
        rows = trainer.cfg.tokens_per_step // stage.block_size
        before, after = (dataset.counts(step * rows) for step in (first, last))
        for name, windows, a, b in zip(found, stage.windows.parts, before, after):
            found[name] += (b - a) / len(windows)
    return {f"epochs/{name}": times for name, times in found.items()}


def sample_text(trainer, model):
    """Generate sample_tokens tokens after an end of text; every evaluation uses the same random numbers."""
    cfg, dataset = trainer.cfg, trainer.dataset
    model.eval()
    try:
        with torch.inference_mode(), trainer.autocast:
            most = min(cfg.sample_tokens, most_tokens(model.config))
            options = dict(max_new_tokens=most, seed=cfg.seed, cuda_graph=False)
            ids = [i for (i,) in generate(model, [dataset.eot], **options)]
    except (MemoryError, torch.OutOfMemoryError) as error:  # training itself may go on
        return f"(no sample: {error})"
    finally:
        model.train()
    return dataset.tokenizer.decode(ids)
