"""Softmax attention within the documents of packed sequences, without a mask of T x T.

    documents = find_documents(resets)                  # once for each batch: resets [B, T] is true where one begins
    y = attend_within(documents, q, k, v)               # in each layer

On a GPU in bfloat16 and float16 all documents go to torch's flash attention in one call, which reads where each begins
from a tensor; or to cuDNN's, which is faster, where all are equally long, as they are if each fills its window.
Elsewhere each document is a call of scaled_dot_product_attention. All cost the pairs within documents.
The host must know how many documents there are and how long the longest is, so it waits for the GPU once a batch.

Under torch.compile the number of documents must not be part of the graph: there only flash attention does without a
mask (softmax.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from .sequences import once

FLASH_WIDTH = 256  # the largest head dimension of torch's flash attention


class Documents(NamedTuple):
    """Where the documents are among B * T tokens, sequence behind sequence; each sequence begins with one."""

    ends: Tensor  # [B * T + 1] int32: 0, the end of each document, and B * T again and again
    sizes: Tensor  # [2] int64 on the CPU: the number of documents, and of the longest one's tokens


def find_documents(resets):
    """Return the Documents of resets [B, T] bool, for the same tensor only once.

    torch.compile removes repeated calls from the graph of a training step itself; in evaluation it makes one a layer.
    """
    if torch.compiler.is_compiling():
        return Documents(*_find_operator(resets))
    return once(_known_documents, resets, lambda resets: Documents(*_find(resets)))


_known_documents = WeakTensorKeyDictionary()  # resets: (its version, the Documents)


def _find(resets):
    starts = resets.clone()
    starts[:, 0] = True
    starts = starts.flatten().nonzero().flatten()
    ends = torch.full((resets.numel() + 1,), resets.numel(), dtype=torch.int32, device=resets.device)
    ends[: len(starts)] = starts
    return ends, torch.tensor([len(starts), int(ends.diff().max())])


@torch.library.custom_op("sympow::find_documents", mutates_args=())
def _find_operator(resets: Tensor) -> tuple[Tensor, Tensor]:
    return _find(resets)


@_find_operator.register_fake
def _(resets):
    ends = resets.new_empty(resets.numel() + 1, dtype=torch.int32)
    return ends, torch.empty(2, dtype=torch.int64, device="cpu")


def attend_within(documents, q, k, v, window=0):
    """Return y [B, T, H, E] in q's dtype: causal softmax attention of each document alone.

    q [B, T, H, D], k [B, T, Hkv, D], v [B, T, Hkv, E], any strides; query head h reads key/value head h // (H / Hkv).
    window: how many tokens each sees, itself among them; 0 for all. Only flash attention has it (see `takes_flash`).
    """
    inputs = [x.flatten(0, 1) for x in (q, k, v)]
    if takes_flash(q, k, v):
        D = q.shape[3]
        y = _flash(*map(flash_rows, inputs), *documents, D**-0.5, window)[0][..., :D]  # of D before the padding
    else:
        y = _one_by_one(*inputs, *documents)
    return y.unflatten(0, q.shape[:2])


def takes_flash(q, k, v):
    """Return True if torch's flash attention takes these tensors, packed."""
    return (
        q.is_cuda
        and q.dtype == k.dtype == v.dtype
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[3] == v.shape[3] <= FLASH_WIDTH
        and _has_flash(q.device)
    )


def flash_rows(x):
    """Return x [..., D] as flash attention takes it: D padded with zeros to a multiple of 8, rows in one piece."""
    D = x.shape[-1]
    return F.pad(x, (0, -D % 8)) if D % 8 or x.stride(-1) != 1 else x


def flash_options(scale, window):
    """Return the keywords of torch's flash attention for this scale and window; it counts the tokens before a token."""
    return dict(scale=scale, window_size_left=window - 1, window_size_right=0) if window else dict(scale=scale)


def _has_flash(device):
    available = torch.backends.cuda.is_flash_attention_available()
    return available and torch.cuda.get_device_capability(device) >= (8, 0)


_has_flash._dynamo_marked_constant = True  # see the end of dispatch.py


# ---- one call for all documents


def takes_cudnn(n, longest, q, k, window):
    """Return True if cuDNN computes n documents of at most `longest` tokens, q [N, H, D] and k [N, Hkv, D].

    It does on the GPUs on which torch prefers it. This asks no setting that a program might change between the passes.
    """
    if window or n * longest != len(q) or longest < 128 or q.shape[1] != k.shape[1] or q.shape[2] not in (64, 128):
        return False
    if torch.are_deterministic_algorithms_enabled():
        return False
    return torch.cuda.get_device_capability(q.device) in ((9, 0), (10, 0), (10, 3))


def _by_document(n, *tensors):
    """Return views [n, H, tokens, D] of tensors [N, H, D] that hold n equally long documents."""
    return [x.unflatten(0, (n, -1)).transpose(1, 2) for x in tensors]


@torch.library.custom_op("sympow::packed_flash", mutates_args=())
def _flash(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, sizes: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Return y [N, H, D] and as many log-sum-exps, [H, N] float32, of q [N, H, D], k and v [N, Hkv, D]."""
    n, longest = sizes.tolist()
    if takes_cudnn(n, longest, q, k, window):
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        y, lse, *_ = cudnn(*_by_document(n, q, k, v), None, True, 0.0, True, False, scale=scale)
        return y.transpose(1, 2).flatten(0, 1).contiguous(), lse.reshape(q.shape[1], -1)  # [n, H, tokens] in memory
    ends = ends[: n + 1]
    flash = torch.ops.aten._flash_attention_forward
    y, lse, *_ = flash(q, k, v, ends, ends, longest, longest, 0.0, True, False, **flash_options(scale, window))
    return y, lse


@_flash.register_fake
def _(q, k, v, ends, sizes, scale, window):
    y = torch.empty_like(q, memory_format=torch.contiguous_format)
    return y, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("sympow::packed_flash_backward", mutates_args=())
def _flash_backward(
    dy: Tensor, qkv: list[Tensor], documents: list[Tensor], y: Tensor, lse: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    (q, k, v), (ends, sizes) = qkv, documents
    n, longest = sizes.tolist()
    if takes_cudnn(n, longest, q, k, window):
        dy, q, k, v, y = _by_document(n, dy.contiguous(), q, k, v, y)
        lse, seed = lse.view(n, -1, longest, 1), torch.zeros((), dtype=torch.int64, device=q.device)
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        grads = cudnn(dy, q, k, v, y, lse, seed, seed, None, None, None, longest, longest, 0.0, True, scale=scale)
        return tuple(x.transpose(1, 2).flatten(0, 1).contiguous() for x in grads)
    ends = ends[: n + 1]
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    backward = torch.ops.aten._flash_attention_backward
    options = flash_options(scale, window)
    grads = backward(dy.contiguous(), q, k, v, y, lse, ends, ends, longest, longest, 0.0, True, *no_dropout, **options)
    return tuple(x.contiguous() for x in grads)


@_flash_backward.register_fake
def _(dy, qkv, documents, y, lse, scale, window):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in qkv)


def _save_flash(ctx, inputs, output):
    *tensors, ctx.scale, ctx.window = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _differentiate_flash(ctx, dy, _):
    q, k, v, ends, sizes, y, lse = ctx.saved_tensors
    grads = _flash_backward(dy, [q, k, v], [ends, sizes], y, lse, ctx.scale, ctx.window)
    return *grads, None, None, None, None


_flash.register_autograd(_differentiate_flash, setup_context=_save_flash)


# ---- a call for each document


def _one_by_one(q, k, v, ends, sizes, scale=None):
    """Return y [N, H, E] of q [N, H, D], k [N, Hkv, D] and v [N, Hkv, E] that hold these documents."""
    lengths = ends[: int(sizes[0]) + 1].diff().tolist()
    enable_gqa = q.shape[1] != k.shape[1]
    documents = zip(*(x.transpose(0, 1).unsqueeze(0).split(lengths, dim=2) for x in (q, k, v)))  # [1, H, tokens, D]
    y = [F.scaled_dot_product_attention(*qkv, is_causal=True, scale=scale, enable_gqa=enable_gqa) for qkv in documents]
    return torch.cat(y, dim=2).squeeze(0).transpose(0, 1)
