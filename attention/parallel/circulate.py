"""Attention over pairs of tokens that are spread over several ranks: keys and values circulate in a ring.

    y = circulate(PowerPairs(p), context, q, k, v, log_g)       # log_g: the gates, -inf at a reset
    y = circulate(SoftmaxPairs(), context, q, k, v, log_g)      # log_g of 0 and -inf, or None

In step t = 0 .. N-1 rank r has the keys and values of rank r - t, and rank r - t - 1 sends its own to rank r.
Power attention adds numerators and denominators, and needs no maximum; softmax merges exactly, by the maximum and the
sum of the exponentials of each row. A key of piece J reaches a query of a later piece I through the gates of J after
the key, all gates of the pieces in between, and the gates of I up to the query. All ranks know the sum of each piece's
log-gates, in float64; resets are counted beside it. In the backward pass the keys and values circulate again, and the
gradient to them follows one step behind, so that a rank holds the slices of two ranks at any time, and never all.

With two pieces a rank (see context.py) each rank has the same number of pairs of tokens in every step.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ..operator.forms import (
    accumulation_dtype,
    blocks_of_rows,
    by_head,
    by_token,
    normalize,
    without_autocast,
)
from ..operator.packed import takes_flash
from ..power import power_attention_sums

PARTS = 4  # the queries of a piece are computed in so many parts, see `PowerPairs.sums`


def circulate(pairs, context, q, k, v, log_g=None):
    """Return y [B, T / N, H, E] in q's dtype for q [B, T / N, H, D], k [B, T / N, Hkv, D], v [B, T / N, Hkv, E] and
    log_g [B, T / N, Hkv] or None of this rank's tokens. Differentiable in every tensor, once."""
    sums = resets = None
    if log_g is not None:
        by_piece = log_g.unflatten(1, (context.pieces, -1))
        reset = by_piece == float("-inf")
        sums = context.gather(by_piece.masked_fill(reset, 0).double().sum(2).transpose(0, 1))  # [all pieces, B, Hkv]
        resets = context.gather(reset.any(2).transpose(0, 1).to(torch.int32))
    return _Circulate.apply((pairs, context, resets), q, k, v, log_g, sums)


class _Circulate(torch.autograd.Function):
    """The attention `ring` = (pairs, context, resets) of all ranks' tokens; sums, resets: of each piece's gates."""

    @staticmethod
    def forward(ctx, ring, q, k, v, log_g, sums):
        (pairs, context, resets), total = ring, None
        for step, keys in _ring(context, [k, v, log_g]):
            for block in _blocks(context, step, q.shape[1]):
                part = pairs.sums(*_inputs(block, block.take(q, *keys, log_g), sums, resets), own=step == 0)
                total = part if total is None else pairs.add(total, part, block.rows)  # the first has all rows
        y, row = pairs.finish(*total)
        ctx.pairs, ctx.context = pairs, context
        ctx.save_for_backward(q, k, v, log_g, sums, resets, y, row)
        return y.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        pairs, context = ctx.pairs, ctx.context
        q, k, v, log_g, sums, resets, y, row = ctx.saved_tensors
        upstream = pairs.upstream(dy.to(y.dtype), y, row)
        dq, dg, dsums = map(_zeros, (q, log_g, sums))
        arriving, works_back = [None] * 3, []
        for step, keys in _ring(context, [k, v, log_g]):
            dkeys = [*map(_zeros, keys)]
            for block in _blocks(context, step, q.shape[1]):
                leaves = [_leaf(x) for x in (*block.take(q, *keys, log_g), sums)]
                with torch.enable_grad():
                    dnum, dden, *results = (x[:, block.rows] for x in (*upstream, y, row))
                    inputs = _inputs(block, leaves[:-1], leaves[-1], resets)
                    num, den, *_ = pairs.sums(*inputs, own=step == 0, results=results)
                _add_gradients((num, den), (dnum, dden), leaves, (*block.take(dq, *dkeys, dg), dsums))
            _wait(works_back)
            for d, earlier in zip(dkeys, arriving):
                if earlier is not None:
                    d += earlier
            arriving, works_back = _shift(context, dkeys)
        _wait(works_back)
        dk, dv, dg_keys = arriving
        dg = None if dg is None else (dg + dg_keys).to(log_g.dtype)
        return None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg, dsums


def _ring(context, keys):
    """Yield each step and the keys, values and gates that this rank then has; the next ones come meanwhile."""
    for step in range(context.size):
        coming, works = _shift(context, keys) if step + 1 < context.size else (None, [])
        yield step, keys
        _wait(works)
        keys = coming


def _zeros(x):
    """Return zeros like x in the dtype of sums, contiguous; None for None."""
    return None if x is None else x.new_zeros(x.shape, dtype=accumulation_dtype(x))


def _leaf(x):
    return None if x is None else x.detach().requires_grad_()


def _add_gradients(outputs, upstream, leaves, totals):
    """Add the gradients to the leaves to their `totals`; `upstream` are the gradients of the loss to `outputs`."""
    leaves, totals = zip(*(pair for pair in zip(leaves, totals) if pair[0] is not None))
    for d, total in zip(torch.autograd.grad(outputs, leaves, upstream, allow_unused=True), totals):
        if d is not None:
            total += d


# ---- blocks of pairs


class _Block(NamedTuple):
    """Some queries of this rank and the keys of a rank, that all of them see unless they are the rank's own."""

    rows: slice  # the queries
    keys: slice
    gate_keys: slice  # the gates of the keys in piece `first`
    gate_rows: slice  # the gates of piece `last`, from its first token to the last query
    start: int  # the first query, in piece `last`
    first: int
    last: int

    def take(self, q, k, v, g_keys, g_rows):
        """Return the block's parts of these tensors; gates may be None."""
        if g_rows is not None:
            g_keys, g_rows = g_keys[:, self.gate_keys], g_rows[:, self.gate_rows]
        return q[:, self.rows], k[:, self.keys], v[:, self.keys], g_keys, g_rows


def _blocks(context, step, tokens):
    """Return the _Blocks of this rank's `tokens` and the keys that it has in a step."""
    n = tokens // context.pieces
    if step == 0:  # its own keys: what its pieces see of themselves and of each other is causal attention
        every = slice(0, tokens)  # a rank of one piece has no gate_rows
        return [_Block(every, every, slice(0, n), slice(n, 2 * n), 0, context.mine[0], context.mine[-1])]
    theirs, part = context.pieces_of((context.rank - step) % context.size), -(-n // PARTS)
    return [
        _Block(
            slice(i * n + a, i * n + min(a + part, n)), keys := slice(j * n, (j + 1) * n), keys,
            slice(i * n, i * n + min(a + part, n)), a, first, last,
        )
        for i, last in enumerate(context.mine) for j, first in enumerate(theirs) if first < last
        for a in range(0, n, part)
    ]  # fmt: skip


def _inputs(block, tensors, sums, resets):
    """Return (q, k, v, the gates of the keys and then of the queries or None) of a block, differentiably.

    The gate of the first query is the product of its own and of all gates between the last key and itself.
    """
    q, k, v, g_keys, g_rows = tensors
    if g_keys is None or not g_rows.shape[1]:
        return q, k, v, g_keys
    between, lead = slice(block.first + 1, block.last), g_rows[:, : block.start + 1]
    reset = lead == float("-inf")
    total = lead.masked_fill(reset, 0).double().sum(1) + sums[between].sum(0)  # [B, Hkv]
    gate = total.to(g_rows.dtype).masked_fill(reset.any(1) | (resets[between] > 0).any(0), float("-inf"))
    return q, k, v, torch.cat((g_keys, gate.unsqueeze(1), g_rows[:, block.start + 1 :]), dim=1)


def _shift(context, tensors):
    """Begin to send tensors (None stays None) to the next rank; return the tensors of the previous rank, and works to
    wait for."""
    to, source = (context.rank + 1) % context.size, (context.rank - 1) % context.size
    sent = [x if x is None else x.contiguous() for x in tensors]
    coming = [x if x is None else torch.empty_like(x) for x in sent]
    ops = []
    for x, y in zip(sent, coming):
        if x is not None:
            ops.append(dist.P2POp(dist.isend, x, group=context.group, group_peer=to))
            ops.append(dist.P2POp(dist.irecv, y, group=context.group, group_peer=source))
    return coming, [*dist.batch_isend_irecv(ops), sent]  # which must live until then


def _wait(works):
    """Wait for what `_shift` began; a GPU waits without the host."""
    for work in works[:-1]:
        work.wait()


# ---- what is computed of pairs


class PowerPairs:
    """Power attention of power p, as sums that are divided at the end."""

    def __init__(self, p):
        self.p = p

    def sums(self, q, k, v, log_g, *, own, results=None):
        """Return the numerators [B, m, H, E] and denominators [B, m, H] of the queries q [B, m, H, D] over the keys.

        own: queries and keys belong to the same tokens, and the sums are causal. Otherwise the queries come after all
        keys, and as many tokens without weight are put behind the keys. Their tiles are computed too, which is why the
        queries come in PARTS parts. results is not read.
        """
        if not own:
            k, v = (torch.cat((x, x.new_zeros(x.shape[0], q.shape[1], *x.shape[2:])), dim=1) for x in (k, v))
        return power_attention_sums(q, k, v, log_g, p=self.p)

    def add(self, total, part, rows):
        for x, y in zip(total, part):
            x[:, rows] += y
        return total

    def finish(self, num, den):
        """Return y and what the backward pass needs of each row."""
        return normalize(num, den), den

    def upstream(self, dy, y, den):
        """Return the gradients to the numerators and denominators."""
        dnum = normalize(dy, den)
        return dnum, -(dnum * y).sum(-1)


class SoftmaxPairs:
    """Softmax attention, as sums of exponentials relative to a number for each row."""

    def sums(self, q, k, v, log_g, *, own, results=None):
        """Return the numerators [B, m, H, E], denominators [B, m, H] and references [B, m, H] of each row.

        log_g holds 0 and -inf, for the keys and then, unless they are `own`, for the queries. results: (y, reference)
        of the forward pass, to compute the first two relative to that reference and differentiate them. Without log_g
        they come from torch's flash attention, which takes no mask.
        """
        if log_g is None and _takes_flash(q, k, v):
            group = q.shape[2] // k.shape[2]
            q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
            if results is not None:
                return _FlashGradients.apply(q, k, v, *results, own)
            y, reference = (x.transpose(1, 2) for x in _flash(q, k, v, own)[:2])
            return y.to(reference.dtype), torch.ones_like(reference), reference.clone()
        with without_autocast(q.device):
            return self._sums(q, k, v, log_g, own, None if results is None else results[1])

    def _sums(self, q, k, v, log_g, own, reference):
        (B, m, H, D), n = q.shape, k.shape[1]
        queries, keys, values, _ = by_head(q, k, v, None)
        queries = queries * D**-0.5
        if reference is not None:
            reference = reference.transpose(1, 2).unflatten(1, queries.shape[1:3]).unsqueeze(-1)
        documents = None if log_g is None else (log_g == float("-inf")).cumsum(1).transpose(1, 2)  # [B, Hkv, n (+ m)]
        ranges, run = blocks_of_rows(B * H, m, n, q.device)
        parts = []
        for start, end in ranges:
            hidden = torch.zeros((), dtype=torch.bool, device=q.device)
            if own:
                tokens = torch.arange(n, device=q.device)
                hidden = tokens[start:end, None] < tokens
            if documents is not None:
                rows = documents[..., -m:][..., start:end]
                hidden = hidden | (rows.unsqueeze(-1) != documents[..., None, :n]).unsqueeze(2)
            references = None if reference is None else reference[..., start:end, :]
            parts.append(run(_softmax_rows, queries[..., start:end, :], keys, values, hidden, references))
        return tuple(by_token(torch.cat(x, dim=3)) for x in zip(*parts))

    def add(self, total, part, rows):
        """Merge the sums of more keys into the total of some rows."""
        num, den, reference = (x[:, rows] for x in total)
        largest = torch.maximum(reference, part[2])
        a, b = (reference - largest).exp(), (part[2] - largest).exp()
        num.copy_(a.unsqueeze(-1) * num + b.unsqueeze(-1) * part[0])
        den.copy_(a * den + b * part[1])
        reference.copy_(largest)
        return total

    def finish(self, num, den, largest):
        """Return y and the logarithm of the sum of the exponentials of each row."""
        return num / den.unsqueeze(-1), largest + den.log()

    def upstream(self, dy, y, reference):
        """Return the gradients to the numerators and denominators relative to `reference`, where these are 1."""
        return dy, -(dy * y).sum(-1)


def _softmax_rows(q, k, v, hidden, reference):
    """Return numerators [B, Hkv, G, r, E], denominators and references [B, Hkv, G, r] of r scaled rows q."""
    scores = (q @ k.transpose(-1, -2).unsqueeze(2)).masked_fill(hidden, float("-inf"))
    if reference is None:
        reference = scores.amax(-1, keepdim=True)
        reference = reference.masked_fill(reference == float("-inf"), torch.finfo(q.dtype).min)  # a row sees no key
    w = (scores - reference).exp()
    return w @ v.unsqueeze(2), w.sum(-1), reference.squeeze(-1)


# ---- torch's flash attention, for tensors [B, H, m, D]


def _takes_flash(q, k, v):
    """Return True if torch's flash attention takes these tensors, without a mask."""
    D, E = q.shape[3], v.shape[3]
    if q.is_cuda:
        return takes_flash(q, k, v) and D % 8 == 0
    return q.device.type == "cpu" and D == E and q.dtype != torch.float16


def _flash(q, k, v, causal):
    """Return attention, the logarithm of each row's sum of exponentials [B, H, m] and what its backward pass needs."""
    aten = torch.ops.aten
    if q.is_cuda:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


class _FlashGradients(torch.autograd.Function):
    """Stand for numerators and denominators of flash attention relative to a reference, and compute only gradients.

    The gradients to q, k and v [B, H, m, D] are what these keys add to the gradients of attention to all keys,
    y [B, m, H, D].
    """

    @staticmethod
    def forward(ctx, q, k, v, y, reference, causal):
        ctx.causal = causal
        ctx.save_for_backward(q, k, v, y.to(q.dtype).transpose(1, 2), reference.transpose(1, 2).contiguous())
        return y.clone(), torch.ones_like(reference)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):  # the gradient to the denominators follows from y and dy
        q, k, v, y, reference = ctx.saved_tensors
        aten, dy = torch.ops.aten, dy.to(q.dtype).transpose(1, 2)
        if q.is_cuda:
            unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout
            grads = aten._scaled_dot_product_flash_attention_backward(
                dy, q, k, v, y, reference, None, None, q.shape[2], k.shape[2], 0.0, ctx.causal, unused, unused[0]
            )
        else:
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dy, q, k, v, y, reference, 0.0, ctx.causal
            )
        return *grads, None, None, None
