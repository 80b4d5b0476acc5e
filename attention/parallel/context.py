"""Context parallel: the tokens of a sequence are spread over several ranks, and each holds its slice alone.

    context = Context(group, balanced=False)                # a process group of N ranks
    for block in model.transformer.h:
        block.attn.mix.context = context                    # from then on `forward` gets this rank's tokens
    y = context.power_attention(q, k, v, log_g, p=2)        # which the layers call

A sequence is cut into pieces of n tokens. Where the cost of a token does not depend on its place there are N, and rank
r holds piece r. Where some layer computes pairs of tokens, there are 2N: rank r holds pieces r and 2N-1-r, so that all
ranks have the same number of pairs. Tensors [B, T / N, ...] hold a rank's pieces one behind the other.

With u_g the state that the tokens of piece g alone give (S and z side by side, canonical) and G_g the product of its
gates, exactly 0 if there is a reset in it, the state before piece g is

    s_0 = 0,   s_{g+1} = G_g s_g + u_g          and its gradient   d_g = G_g d_{g+1} + (what piece g reads from s_g)

Every rank scans 1/N of the features of all pieces: an all-to-all brings them there, another one brings the states back,
so that each rank sends less than two states, however many ranks there are. G_g comes from a sum of log-gates in
float64, resets are counted beside it. Keys are scaled inside each piece's own computation; states travel unscaled.

For forms without such a state, keys and values travel instead: circulate.py.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..operator import backend
from ..operator.arguments import cast_to_autocast_dtype
from ..operator.dispatch import Problem, plan
from ..operator.forms import PowerState, accumulation_dtype, flush
from ..operator.memory import check_chunks_fit
from ..power import attend_causally
from . import pieces_of
from .circulate import PowerPairs, SoftmaxPairs, circulate


def _call(function, *args, **kwargs):
    return function(*args, **kwargs)


class Context:
    """The ranks that share the tokens of a sequence, and which tokens each of them holds.

    Attributes: group (torch.distributed's ProcessGroup), rank and size (of and in it), pieces (how many each rank
    holds), mine (the numbers of this rank's, in the order of the sequence), number (by which operators know it).
    """

    def __init__(self, group, balanced, compiled=False):
        """compiled: True if torch.compile compiles the model.

        `run`, which calls a function with arguments, is then outside of its graphs. What circulates, and PyTorch's
        chunked form, breaks them (blocks that activation checkpointing computes again are then left uncompiled, unless
        each is compiled for itself). All else is operators.
        """
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.balanced, self.mine = balanced, pieces_of(self.rank, self.size, balanced)
        self.pieces, self.number = len(self.mine), backend.register(self)
        self.run = torch.compiler.disable(_call) if compiled else _call

    def pieces_of(self, rank):
        """Return the numbers of the pieces that a rank of the group holds."""
        return pieces_of(rank, self.size, self.balanced)

    def power_attention(self, q, k, v, log_g, *, p, form="auto", chunk_size=None):
        """Compute what `power_attention` of attention/power.py does for a sequence that is spread over the ranks.

        q [B, T / N, H, D], k [B, T / N, Hkv, D], v [B, T / N, Hkv, E], log_g [B, T / N, Hkv] or None belong to this
        rank's tokens; the rest is as for that function, and form="auto" is chosen for T tokens. All ranks must call it,
        and also the backward pass. Returns y [B, T / N, H, E]. Differentiable in every tensor, once.
        """
        q, k, v = cast_to_autocast_dtype(q, k, v)
        T = self.size * q.shape[1]
        problem = Problem(T, q.shape[3], v.shape[3], p, q.dtype, q.device, log_g is not None)
        chosen = plan(problem, form, chunk_size, pieces=self.size * self.pieces)
        if chosen.form == "quadratic":
            return self.run(circulate, PowerPairs(p), self, q, k, v, log_g)
        q, k, v, log_g = map(self.split, (q, k, v, log_g))
        attend = _attend_on_kernels if chosen.on_kernels else partial(self.run, _attend)
        return self.join(attend(q, k, v, log_g, self, p=p, chunk=chosen.chunk_size))

    def softmax_attention(self, q, k, v, log_g):
        """Compute what `softmax_attention` of attention/softmax.py does, for this rank's tokens as above."""
        return self.run(circulate, SoftmaxPairs(), self, q, k, v, log_g)

    def split(self, x):
        """Return x [B, T / N, ...] with its pieces as sequences of their own, [B * pieces, n, ...]; None stays None."""
        return x if x is None else x.unflatten(1, (self.pieces, -1)).flatten(0, 1)

    def join(self, x):
        """Return x [B * pieces, n, ...] as [B, T / N, ...], the inverse of `split`."""
        return x.unflatten(0, (-1, self.pieces)).flatten(1, 2)

    def positions(self, x, speed):
        """Return the positions of the tokens of x [B, T / N, C], float64, as `state.count_positions` does for a whole
        sequence: [T / N], or [B, T / N] with a speed [B, T / N], which may be None. Differentiable in speed."""
        if speed is None:
            n = x.shape[1] // self.pieces
            # no sum with the first token, which is 0 on one rank: the compiler would leave it out there, and the ranks'
            # graphs, by which the order of their exchanges goes, must be the same
            spans = [(piece * n + 1, (piece + 1) * n + 1) for piece in self.mine]
            return torch.cat([torch.arange(*span, dtype=torch.float64, device=x.device) for span in spans])
        sums = self.split(speed.double()).cumsum(1)  # [B * pieces, n]
        offsets = self.sum_before(sums[:, -1].unflatten(0, (-1, self.pieces)))
        return self.join(sums + offsets.flatten().unsqueeze(1))

    def sum_before(self, x):
        """Return the sum of x [B, pieces] over all earlier pieces, like x."""
        totals = self.gather(x.transpose(0, 1))  # [all pieces, B]
        return (totals.cumsum(0) - totals)[list(self.mine)].transpose(0, 1)

    def split_overlapping(self, x, n):
        """Return what `split` does with n tokens before each piece, zeros before the sequence. Differentiable."""
        pieces = self.split(x)
        ends = self.gather(pieces[:, -n:].unflatten(0, (-1, self.pieces)).transpose(0, 1))  # [all pieces, B, m, ...]
        m = ends.shape[2]  # n, or the length of a piece if that is less
        tokens = ends.transpose(0, 1).flatten(1, 2)
        tokens = torch.cat((tokens.new_zeros(tokens.shape[0], n, *tokens.shape[2:]), tokens), dim=1)
        # no slices: the compiler would leave the exchange out where a rank needs the zeros alone
        rows = torch.cat([torch.arange(piece * m, piece * m + n, device=x.device) for piece in self.mine])
        preceding = tokens.index_select(1, rows).unflatten(1, (self.pieces, n)).flatten(0, 1)
        return torch.cat((preceding, pieces), dim=1)

    def gather(self, x):
        """Return x [pieces, ...] of all ranks, in the order of the sequence: [N * pieces, ...]. Differentiable."""
        return self._in_order(_gather(x, self.number))

    def _in_order(self, x):
        """Return x [N, pieces, ...] in the order of the sequence, [N * pieces, ...]."""
        return x.flatten(0, 1) if self.pieces == 1 else torch.cat((x[:, 0], x[:, 1].flip(0)))

    def _by_rank(self, x):
        """Return x [N * pieces, ...] as [N, pieces, ...], the inverse of `_in_order`."""
        return x.unsqueeze(1) if self.pieces == 1 else torch.stack((x[: self.size], x[self.size :].flip(0)), dim=1)

    def scan_states(self, S, z, decay, reverse=False):
        """Begin the exclusive scan s_{g+1} = decay_g s_g + u_g over all pieces, or with `reverse` from the last one on,
        and return a function that returns the PowerState before each of this rank's pieces. Until it is called, a GPU
        goes on with other work while states travel.

        S [B * pieces, Hkv, Dphi, E] and z [B * pieces, Hkv, Dphi]: what the tokens of each piece give; decay
        [B * pieces, Hkv]: the product of each piece's gates, or None for ones. Differentiable in all of them.
        """
        u = torch.cat((S, z.unsqueeze(-1)), dim=-1)
        x, shape = u.flatten(2), u.shape
        x = torch.nn.functional.pad(x, (0, -x.shape[2] % self.size)).unflatten(0, (-1, self.pieces))
        x = x.unflatten(3, (self.size, -1)).permute(3, 1, 0, 2, 4).contiguous()  # [N, pieces, B, Hkv, F / N]
        arrive, decays = self._exchange(x), None
        if decay is not None:
            decays = self.gather(decay.unflatten(0, (-1, self.pieces)).transpose(0, 1)).unsqueeze(-1)

        def finish():
            x = self._in_order(arrive())  # 1/N of the features of all pieces, [N * pieces, B, Hkv, F / N]
            states, state = [None] * len(x), torch.zeros_like(x[0])
            for i in reversed(range(len(x))) if reverse else range(len(x)):
                states[i] = state
                state = (state if decays is None else decays[i] * state) + x[i]
            x = self._exchange(self._by_rank(torch.stack(states)).contiguous())()
            x = x.permute(2, 1, 3, 0, 4).flatten(0, 1).flatten(2)
            x = x[..., : shape[2:].numel()].reshape(shape)
            return PowerState(x[..., :-1], x[..., -1])

        return finish

    def _exchange(self, x):
        """Begin an all-to-all, entry i of x [N, ...] to rank i, and return a function that returns what has come."""
        if torch.is_grad_enabled() and x.requires_grad:
            x = _exchange(x, self.number)
            return lambda: x
        out = torch.empty_like(x)
        work = dist.all_to_all_single(out, x, group=self.group, async_op=True)

        def arrive(sent=x):  # which must live until then
            work.wait()
            return out

        return arrive


@torch.library.custom_op("sympow::exchange", mutates_args=())
def _exchange(x: Tensor, context: int) -> Tensor:
    """All-to-all: entry i of x [N, ...] goes to rank i. The gradient goes back the same way."""
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=backend.registered(context).group)
    return out


@_exchange.register_fake
def _(x, context):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("sympow::gather", mutates_args=())
def _gather(x: Tensor, context: int) -> Tensor:
    """Gather x of all ranks, [N, ...]. The gradients of all ranks are added in the order of the ranks."""
    ranks = backend.registered(context)
    out = x.new_empty(ranks.size, *x.shape)
    dist.all_gather([*out], x.contiguous(), group=ranks.group)
    return out


@_gather.register_fake
def _(x, context):
    return x.new_empty(backend.registered(context).size, *x.shape)


def _keep_context(ctx, inputs, output):
    ctx.context = inputs[1]


_exchange.register_autograd(lambda ctx, d: (_exchange(d, ctx.context), None), setup_context=_keep_context)
_gather.register_autograd(lambda ctx, d: (_exchange(d, ctx.context).sum(0), None), setup_context=_keep_context)


# ---- power attention in chunks


def _attend(q, k, v, log_g, context, *, p, chunk):
    """Return y [B * pieces, n, H, E] in PyTorch: the state of each piece, their scan, then attention from the state."""
    decay, state, step = _piece_decay(log_g, accumulation_dtype(q)), None, partial(flush, p=p)
    if torch.is_grad_enabled():  # only the states between chunks are saved, not the features
        step = partial(checkpoint, step, use_reentrant=False)
    for start in range(0, k.shape[1], chunk):
        part = (None if x is None else x[:, start : start + chunk] for x in (k, v, log_g))
        state = step(*part, state)
    previous = context.scan_states(*state, decay)()
    return attend_causally(q, k, v, log_g, p=p, form="chunked", chunk_size=chunk, initial_state=previous)


def _attend_on_kernels(q, k, v, log_g, context, *, p, chunk):
    """Return y [B * pieces, n, H, E] on the kernels, which compute a piece's state once and go on from it."""
    decay = None
    if log_g is not None:
        decay, log_g = _piece_decay(log_g.detach(), torch.float32), log_g.float()
    check_chunks_fit(q, k, v, p, chunk)
    return backend.operators().chunked_attention_of_piece(q, k, v, log_g, decay, context.number, p=p, chunk=chunk)


def _piece_decay(log_g, dtype):
    """Return the product of the gates of each sequence, [B, Hkv] of `dtype`, for log_g [B, n, Hkv]; None for None."""
    if log_g is None:
        return None
    reset = log_g == float("-inf")
    total = log_g.masked_fill(reset, 0).double().sum(1)
    return total.exp().masked_fill(reset.any(1), 0).to(dtype)
