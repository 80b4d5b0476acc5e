"""What a Trainer does with batches of data: reads those of each micro-step, and computes the loss of held-out ones.

    batches = micro_batches(trainer)           # on the device, from the step on at which the run is
    loss = mean_loss(trainer)                  # of the held-out split, over all ranks
    text = sample_text(trainer)                # what the model writes

Each takes the Trainer of train.py, whose attributes are the run's settings, data, model and ranks.
"""

from itertools import count

import torch

from data.loader import eval_batches, train_batch
from generate import generate
from runs.stages import stage_of


def micro_batches(trainer):
    """Yield (inputs, targets) [batch_size, block_size] on the device for this and every later micro-step.

    Notes the index of the stage that a step belongs to as trainer.next_stage before it reads the step's first batch.
    """
    for step in count(trainer.progress.step):
        trainer.next_stage = stage_of(trainer, step)
        stage = trainer.stages[trainer.next_stage]
        for micro in range(stage.accumulation):
            sizes = *place(trainer), micro, stage.accumulation, stage.batch_size
            batch = train_batch(stage.windows, trainer.cfg.seed, step, *sizes)
            if trainer.device.type == "cuda":  # from pinned memory the copy runs beside the computation
                batch = [x.pin_memory() for x in batch]
            yield [x.to(trainer.device, non_blocking=True) for x in batch]


def place(trainer):
    """Return (rank, world): which of how many parts of every batch this process reads."""
    return trainer.ranks.rank, trainer.ranks.world


@torch.no_grad()
def mean_loss(trainer):
    """Return the mean loss a token over eval_tokens of the held-out split; meaningless if a signal cuts it short."""
    cfg, ranks, device = trainer.cfg, trainer.ranks, trainer.device
    trainer.network.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for x, y in eval_batches(trainer.val_windows, cfg.eval_tokens, trainer.stages[-1].batch_size, *place(trainer)):
        ranks.beat()
        x, y = x.to(device), y.to(device)
        tokens = (y != -1).sum()
        with trainer.autocast:
            _, loss = trainer.eval_network(x, y)
        sums += torch.stack((loss.double() * tokens, tokens.double()))
        trainer.share()
        if trainer.signal:
            break
    trainer.network.train()
    loss, tokens = ranks.sum(sums).tolist()
    return loss / tokens


def sample_text(trainer):
    """Generate sample_tokens tokens after an end of text; every evaluation uses the same random numbers."""
    cfg, model, dataset = trainer.cfg, trainer.model, trainer.dataset
    model.eval()
    try:
        with torch.inference_mode(), trainer.autocast:
            options = dict(max_new_tokens=cfg.sample_tokens, seed=cfg.seed, cuda_graph=False)
            ids = [i for (i,) in generate(model, [dataset.eot], **options)]
    except (MemoryError, torch.OutOfMemoryError) as error:  # training itself may go on
        return f"(no sample: {error})"
    finally:
        model.train()
    return dataset.tokenizer.decode(ids)
