"""Read the batches of a run's micro-steps, and evaluate its model on held-out batches.

for number, inputs, targets in micro_batches(plan, progress):      # from progress.step on
losses = mean_losses(plan, network, interrupt)
statistics, text = examine(plan, model)
"""

from itertools import count, pairwise

import torch

from ..attention.positions import most_tokens
from ..data.loader import eval_batches, train_batch
from ..data.mixture import Mixture
from ..generation.steps import Sampler, generate_by_steps, read_prompt
from .parallel import whole_sequences
from .stages import stage_of


def micro_batches(plan, progress):
    """Yield (number of the stage, inputs, targets) of this and every later micro-step of a run.

    Inputs and targets are int64 [batch_size, block_size] on the device; with context parallel, this rank's tokens of
    them. The stage of a step is chosen, by what progress says then, when its first batch is read.
    """
    layout, on_gpu = plan.layout, plan.device.type == "cuda"
    for step in count(progress.step):
        number = stage_of(plan.stages, plan.cfg, step, progress)
        stage = plan.stages[number]
        for micro in range(stage.accumulation):
            part, parts = micro * layout.data_world + layout.data_rank, stage.accumulation * layout.data_world
            spans = layout.spans(stage.block_size)
            batch = train_batch(stage.windows, plan.cfg.seed, step, part, parts, stage.batch_size, spans)
            plan.ranks.beat()
            if on_gpu:  # from pinned memory the copy runs beside the computation
                batch = [x.pin_memory() for x in batch]
            inputs, targets = (x.to(plan.device, non_blocking=on_gpu) for x in batch)
            yield number, inputs, targets


@torch.no_grad()
def mean_losses(plan, model, interrupt):
    """Return {"val_loss": ..., "val_loss/NAME": ...}, mean losses a token over eval_tokens of each held-out split.

    They are at the final context. interrupt: called after each batch; returns the number of a signal that came, or 0.
    The result is then None.
    """
    layout, stage = plan.layout, plan.stages[-1]
    sums = torch.zeros(len(plan.held_out.parts), 2, dtype=torch.float64, device=plan.device)
    model.eval()
    for part, sum_of_part in zip(plan.held_out.parts, sums):
        batches = eval_batches(
            part.windows,
            plan.cfg.eval_tokens,
            stage.batch_size,
            layout.data_rank,
            layout.data_world,
            layout.spans(stage.block_size),
            plan.ranks.master,
        )
        for inputs, targets in batches:
            plan.ranks.beat()
            inputs, targets = inputs.to(plan.device), targets.to(plan.device)
            with plan.autocast:
                _, loss = model(inputs, targets)
            tokens = (targets != -1).sum().double()
            sum_of_part += torch.stack((loss.double() * tokens, tokens))
            if interrupt():
                return None
    model.train()
    return plan.held_out.losses([loss / tokens for loss, tokens in plan.ranks.sum(sums).tolist()])


def format_losses(losses):
    """Return validation losses as a text for the terminal: "val loss 2.1234, val loss/code 1.9000"."""
    return ", ".join(f"{name.replace('_', ' ', 1)} {loss:.4f}" for name, loss in losses.items())


def count_epochs(plan, progress):
    """Return {"epochs/NAME": how often the run has gone through each dataset of its mixture}; {} without one.

    Every stage has its own order of a dataset: the shares that the stages have read are added up.
    """
    if not isinstance(plan.dataset, Mixture):
        return {}
    borders = [0, *(step for _, step in progress.stages), progress.step]
    epochs = dict.fromkeys(plan.dataset.sets, 0.0)
    for stage, (first, last) in zip(plan.stages, pairwise(borders)):
        rows = plan.cfg.tokens_per_step // stage.block_size
        begins, ends = plan.dataset.counts(first * rows), plan.dataset.counts(last * rows)
        for name, windows, begin, end in zip(epochs, stage.windows.parts, begins, ends):
            epochs[name] += (end - begin) / len(windows)
    return {f"epochs/{name}": times for name, times in epochs.items()}


def examine(plan, model):
    """Return (statistics of the model on the first held-out window, a text that it writes), on this rank alone."""
    ids = plan.held_out.parts[0].windows.batch([0])[0][:, :4096].to(plan.device)
    # blocks may be compiled, and would be for every length
    with torch.compiler.set_stance("force_eager"), plan.autocast, whole_sequences(model):
        return model.statistics(ids), sample_text(model, plan.dataset, plan.cfg)


def sample_text(model, dataset, cfg):
    """Generate sample_tokens tokens after an end of text, by the same random numbers at every evaluation.

    With 0 nothing is generated, so that an attention that does not generate can be trained.
    """
    if not cfg.sample_tokens:
        return ""
    model.eval()
    try:
        with torch.inference_mode():
            length = min(cfg.sample_tokens, most_tokens(model.config))
            logits, state = read_prompt(model, [dataset.eot], max_new_tokens=length)
            tokens = generate_by_steps(model, logits, state, Sampler(logits.device, seed=cfg.seed), length)
            return dataset.tokenizer.decode([token for (token,) in tokens])
    except (MemoryError, torch.OutOfMemoryError) as error:  # training itself may go on
        return f"(no sample: {error})"
    finally:
        model.train()
