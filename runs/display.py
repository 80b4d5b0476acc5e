"""Show how far training is: a bar on a terminal, otherwise a line for every logged step.

    display = Display(cfg, step, device, shown=ranks.master)
    display.step()                                          # after every optimizer step
    display.log(step, seconds, steps_per_second, loss=2.5, lr=6e-4, tok_per_sec=1e6)
    display.close()

Between two logged steps the bar moves and shows the numbers of the last one, so that training never waits for the GPU
to show them.
"""

import resource
import sys

import torch
from tqdm import tqdm

from sympow.attention import position_schemes
from sympow.data.progress import bar
from sympow.runs.processes import print_to_terminal


def describe_attention(config):
    """Return the attention of a model.GPTConfig, and where its layers' positions come from if that differs."""
    schemes = position_schemes(config.attention.split(","))
    return config.attention + (f" ({schemes})" if schemes else "")


class Display:
    """Shows the progress of a run with the limits cfg.max_iters and cfg.max_seconds, which is at this step."""

    def __init__(self, cfg, step, device, shown):
        self.cfg, self.device, self.shown = cfg, device, shown
        form = "{l_bar}{bar}| {n_fmt}/{total_fmt} steps [{elapsed}{postfix}]"
        self.bar = bar(total=cfg.max_iters, initial=step, bar_format=form) if shown else tqdm(disable=True)

    def step(self):
        """Move the bar by a step."""
        self.bar.update()

    def log(self, step, seconds, steps_per_second, loss, tok_per_sec, lr, mfu=None, stage=""):
        """Show the numbers of a step, on the bar or as a line, with the time that is left at this speed.

        seconds: of training so far. stage: the name of the stage, if the run has several.
        """
        speed = f"{tok_per_sec:,.0f} tok/s" + (f", mfu {mfu:.1%}" if mfu else "")
        left = f"{tqdm.format_interval(self.seconds_left(step, seconds, steps_per_second))} left"
        stage = f", {stage}" if stage else ""
        self.bar.set_postfix_str(f"loss {loss:.4f}, {speed}, {left}{stage}")
        if self.shown and self.bar.disable:
            memory = f"{peak_memory(self.device) / 1e9:.1f} GB"
            print_to_terminal(f"step {step}{stage}: loss {loss:.4f}, {speed}, lr {lr:.2e}, {memory}, {left}")

    def seconds_left(self, step, seconds, steps_per_second):
        """Return the seconds until the first limit at this speed, without evaluations to come."""
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
