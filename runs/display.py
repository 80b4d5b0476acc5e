"""Show how far training is: a bar on a terminal, otherwise a line for every logged step, and where none comes for 10 s.

    display = Display(cfg, step, device, shown=ranks.master)
    display.step()                                          # after every optimizer step
    display.log(step, numbers, steps_per_second, context)   # numbers: a line of metrics.jsonl
    display.close()

Between two logged steps the bar moves and shows the numbers of the last one, so that training never waits for the GPU
to show them.
"""

import resource
import sys
import time

import torch
from tqdm import tqdm

from ..data.progress import NEXT_LINE, bar
from .processes import print_to_terminal


class Display:
    """Shows the progress of a run with the limits cfg.max_iters and cfg.max_seconds, which is at this step."""

    def __init__(self, cfg, step, device, shown):
        self.cfg, self.device, self.shown, self.first = cfg, device, shown, None
        form = "{l_bar}{bar}| {n_fmt}/{total_fmt} steps [{elapsed}{postfix}]"
        self.bar = bar(total=cfg.max_iters, initial=step, unit="step", bar_format=form, disable=not shown)

    def step(self):
        """Move the bar by a step."""
        self.bar.update()

    def log(self, step, numbers, steps_per_second, context):
        """Show the numbers of a step, on the bar or as a line, with the time that is left at this speed.

        numbers: train_loss, tok_per_sec, lr, seconds (of training so far) and mfu, a number or None.
        """
        speed = f"{numbers['tok_per_sec']:,.0f} tok/s"
        if numbers["mfu"]:
            speed += f", mfu {numbers['mfu']:.1%}"
        left = f"{tqdm.format_interval(self.seconds_left(step, numbers['seconds'], steps_per_second))} left"
        loss = f"loss {numbers['train_loss']:.4f}" + (f" at context {context:,}" if self.cfg.then else "")
        self.bar.set_postfix_str(f"{loss}, {speed}, {left}")
        if not sys.stderr.isatty():
            self.bar.due = time.monotonic() + NEXT_LINE
            memory = f"{peak_memory(self.device) / 1e9:.1f} GB"
            print_to_terminal(f"step {step}: {loss}, {speed}, lr {numbers['lr']:.2e}, {memory}, {left}")

    def seconds_left(self, step, seconds, steps_per_second):
        """Return the seconds until the first limit, at the speed since the first logged step, which counts evaluations
        and checkpoints; in that step, at this speed."""
        self.first = first_step, first_seconds = self.first or (step, seconds)
        if step > first_step:
            steps_per_second = (step - first_step) / (seconds - first_seconds)
        left = (self.cfg.max_iters - step) / steps_per_second
        return max(0.0, min(left, self.cfg.max_seconds - seconds) if self.cfg.max_seconds else left)

    def close(self):
        """Leave the bar as it is, and print the memory that a GPU had in use."""
        self.bar.close()
        if self.shown and self.device.type == "cuda":
            print_to_terminal(f"peak GPU memory {peak_memory(self.device) / 1e9:.1f} GB")


def peak_memory(device):
    """Return the most bytes that were in use at a time: of the GPU's memory, or on a CPU by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
