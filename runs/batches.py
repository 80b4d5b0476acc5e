"""What a Trainer does with batches of data: reads those of each micro-step, and computes the loss of held-out ones.

    batches = micro_batches(trainer)           # on the device, from the step on at which the run is
    loss = mean_loss(trainer)                  # of the held-out split, over all ranks
    text = sample_text(trainer, model)         # what the model writes

Each takes the Trainer of train.py, whose attributes are the run's settings, data, model, ranks and layout.
"""

from itertools import count

import torch

from attention.double import device_of_doubles, double
from attention.learned_position import most_tokens
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
            spans = trainer.slices.of(stage.block_size)
            batch = train_batch(stage.windows, trainer.cfg.seed, step, *sizes, spans)
            trainer.ranks.beat()
            on_gpu = trainer.device.type == "cuda"
            if on_gpu:  # from pinned memory the copy runs beside the computation
                batch = [x.pin_memory() for x in batch]
            yield [x.to(trainer.device, non_blocking=on_gpu) for x in batch]


def place(trainer):
    """Return (rank, world): which of how many parts of every batch this process reads."""
    return trainer.layout.data_rank, trainer.layout.data_world


@torch.no_grad()
def mean_loss(trainer):
    """Return the mean loss a token over eval_tokens of the held-out split; meaningless if a signal cuts it short."""
    cfg, ranks, device = trainer.cfg, trainer.ranks, trainer.device
    trainer.network.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device_of_doubles(device))
    final = trainer.stages[-1]
    share = *place(trainer), trainer.slices.of(final.block_size)
    for x, y in eval_batches(trainer.val_windows, cfg.eval_tokens, final.batch_size, *share):
        ranks.beat()
        x, y = x.to(device), y.to(device)
        tokens = (y != -1).sum()
        with trainer.autocast:
            _, loss = trainer.eval_network(x, y)
        sums += torch.stack((double(loss) * double(tokens), double(tokens)))
        trainer.share()
        if trainer.signal:
            break
    trainer.network.train()
    loss, tokens = ranks.sum(sums).tolist()
    return loss / tokens


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
