"""torch.optim.Muon with the matrices of one shape together: a hundred launches a step instead of thousands.

With one matrix after the other the host launches some 28 operators for each, and a GPU that has a step of a small model
waits for it.
"""

import torch

BATCH = 2**26  # the most entries of matrices that are worked on together: 18 bytes for each while a step is taken


class BatchedMuon(torch.optim.Muon):
    """torch.optim.Muon, whose parameters and state these are; the rounding of its bfloat16 products may differ.

    The caller sets `found_inf`, a float32 scalar on the parameters' device, before each step: where it is not 0, the
    step changes nothing.
    """

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            of_shape = {}
            for p in group["params"]:
                of_shape.setdefault(p.shape, []).append(p)
            for shape, matrices in of_shape.items():
                n = max(1, BATCH // shape.numel())
                for i in range(0, len(matrices), n):
                    self._step_together(matrices[i : i + n], group)

    def _step_together(self, matrices, group):
        """Take a step of matrices of one shape."""
        buffers = [self.state[p]["momentum_buffer"] for p in matrices]
        momenta, grads, skip = torch.stack(buffers), torch.stack([p.grad for p in matrices]), self.found_inf != 0
        grads = torch.where(skip, momenta, grads)  # which leaves the momenta as they are
        momenta.lerp_(grads, 1 - group["momentum"])
        update = grads.lerp_(momenta, group["momentum"]) if group["nesterov"] else momenta
        update = orthogonalize(update, group["ns_coefficients"], group["ns_steps"], group["eps"]).to(momenta.dtype)
        rate = group["lr"] * 0.2 * max(matrices[0].shape) ** 0.5  # adjust_lr_fn="match_rms_adamw"
        torch._foreach_copy_(buffers, momenta.unbind())
        torch._foreach_mul_(matrices, torch.where(skip, 1.0, 1 - group["lr"] * group["weight_decay"]))
        torch._foreach_add_(matrices, torch.where(skip, 0.0, update).unbind(), alpha=-rate)


def orthogonalize(x, coefficients, steps, eps):
    """Return for each matrix of x [n, rows, columns] one near the nearest orthogonal one, in bfloat16, by the
    Newton-Schulz iteration of Jordan et al. (2024), with its coefficients (a, b, c)."""
    if x.shape[1] > x.shape[2]:
        return orthogonalize(x.mT, coefficients, steps, eps).mT
    a, b, c = coefficients
    x = x.to(torch.bfloat16)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x
