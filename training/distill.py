"""The teacher of --distill_from: the trained model learns its next-token distribution.

    teacher = Teacher(cfg, dataset, contexts)          # refuses what does not fit; no teacher without cfg.distill_from
    teacher.load(device, dtype, ranks, compiled)       # reads its weights
    _, loss = network(ids, targets, **teacher(ids))    # cross entropy + distill_weight KL(teacher || network)

The loss is computed piece by piece, so that the logits of either model never exist for all tokens. Validation losses
have no teacher.
"""

import torch

from ..attention.positions import check_length
from ..model import GPT, GPTConfig
from ..runs.machine import check_kernels
from ..runs.source import open_source


class Teacher:
    """Reads the tokens of a micro-step for the model that is trained. It has all its weights on every rank.

    Attribute: fingerprint, a hash of its weights, "" without a teacher.
    """

    def __init__(self, cfg, dataset, contexts):
        """Open the weights that cfg.distill_from names. Raises ValueError if there are none, or if they do not fit the
        dataset or the contexts (a list of lengths). Evaluation alone needs no teacher."""
        self.weight, self.contexts, self.model, self.fingerprint = cfg.distill_weight, contexts, None, ""
        if not cfg.distill_from or cfg.eval_only:
            return
        if cfg.context_parallel > 1:
            raise ValueError("distill_from does not take context_parallel: a teacher reads whole sequences")
        self.source = open_source(cfg.distill_from, dataset, "distill_from")
        reset_token = dataset.eot if cfg.pack else -1
        settings = {"vocab_size": dataset.vocab_size, "reset_token": reset_token, "dropout": 0.0}
        self.config = GPTConfig(**{**self.source.model, **settings})
        self.source.check(self.config, fresh=False)
        check_length(self.config, max(contexts), "a context of this run")
        self.fingerprint = self.source.fingerprint()

    def load(self, device, dtype, ranks, compiled):
        """Make the model on the device. Called on every rank."""
        if not self.fingerprint:
            return
        self.model = GPT(self.config).requires_grad_(False).eval()
        self.source.fill(self.model)
        self.model.to(device)
        check_kernels(self.model, self.contexts, dtype, ranks)
        self.hidden = torch.compile(self.model.hidden, dynamic=False) if compiled else self.model.hidden
        ranks.log(f"teacher: {self.source.path}, attention={self.config.attention}")

    @torch.no_grad()
    def __call__(self, ids):
        """Return the keyword argument of GPT.forward for the tokens ids [B, T], an empty dict without a teacher."""
        if self.model is None:
            return {}
        x, _ = self.hidden(ids)
        return {"teacher": (x, self.model.head_weight(), self.weight)}
