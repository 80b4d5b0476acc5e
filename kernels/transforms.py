"""Make operators work with torch's transforms: autograd, torch.compile, torch.func.grad and vmap, and forward mode.

    _quadratic = transformable(_quadratic_operator, save, differentiate)    # call this in place of the operator

torch.library's operators take part in torch.compile and in modes that look at every operator; torch.func wants a
torch.autograd.Function. So a call goes to the operator under torch.compile or such a mode, and else to a
Function made of the same pieces. The first call of an operator imports torch._dynamo, which takes 4 s, and a program
without torch.compile need not wait for it. Both can be differentiated once, and have no forward mode.
"""

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

ONCE = (
    "the attention kernels have no second derivative: compute it on float64 tensors or on the CPU, or call "
    "attention.dispatch.disable_kernels(reason) first, for plain PyTorch"
)
NO_FORWARD_MODE = (
    "the attention kernels have no forward mode (jvp): use reverse mode, or call "
    "attention.dispatch.disable_kernels(reason) first, for plain PyTorch"
)


def transforms_active():
    """Return True within torch.func's transforms or forward mode, which custom operators do not take part in."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def transformable(operator, save, differentiate):
    """Return a function that computes `operator`, and can be differentiated and mapped by every transform of torch.

    operator: a torch.library.custom_op; save(ctx, inputs, output) and differentiate(ctx, *grads) are as for
    torch.library.register_autograd. Every tensor among its arguments and results has the batch, alone or times heads,
    as its first dimension, which vmap makes longer.
    """
    operator.register_autograd(differentiate, setup_context=save)

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            return operator._init_fn(*args) if _is_plain(args) else operator(*args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            save(ctx, inputs, output)

        @staticmethod
        def backward(ctx, *grads):
            return differentiate(ctx, *grads)

        @staticmethod
        def jvp(ctx, *tangents):
            raise NotImplementedError(NO_FORWARD_MODE)

        @staticmethod
        def vmap(info, in_dims, *args):
            n = info.batch_size
            fold = lambda x, dim: _fold(x, dim, n) if isinstance(x, torch.Tensor) else x
            args = [[*map(fold, x, dim)] if isinstance(x, list) else fold(x, dim) for x, dim in zip(args, in_dims)]
            outputs = call(*args)
            return tree_map(lambda x: x.unflatten(0, (n, x.shape[0] // n)), outputs), tree_map(lambda x: 0, outputs)

    def call(*args):
        if transforms_active():
            return call_transformed(*args)
        if torch.compiler.is_compiling() or not _is_plain(args):
            return operator(*args)
        return Transformed.apply(*args)

    def call_transformed(*args):
        return Transformed.apply(*args)

    call_transformed._torchdynamo_disable = True  # torch.compile cannot look inside, and leaves the transform to eager
    return call


def _is_plain(args):
    """Return True if the tensors among args have memory, and no mode (as of torch's FLOP counter) sees operators."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    plain = all(type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type != "meta" for x in tensors)
    return plain and torch._C._len_torch_dispatch_stack() == 0


def transformable_once(operator):
    """Return what `transformable` does for a backward pass: its own derivative is refused."""
    return transformable(operator, lambda ctx, inputs, output: None, refuse_second_derivative)


def refuse_second_derivative(ctx, *grads):
    """Raise NotImplementedError: for register_autograd of an operator that is a backward pass."""
    raise NotImplementedError(ONCE)


def _fold(x, dim, n):
    """Return x, mapped along `dim` or (None) the same for all n, with the mapped dimension in front of the first."""
    x = x.unsqueeze(0).expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


# ---- gradients that are not needed


def asked(grads, needs):
    """Return the gradients with an empty tensor for each that is not needed or None: operators must return tensors."""
    like = next(x for x in grads if x is not None)
    none = lambda: like.new_empty(0, dtype=torch.float32)  # results of an operator may not share memory
    return tuple(x if need and x is not None else none() for x, need in zip(grads, needs, strict=True))


def keep(grads, needs):
    """Return the gradients with None for those that are not needed."""
    return tuple(x if need else None for x, need in zip(grads, needs, strict=True))


def empty_like(x, dtype=None):
    """Return an uninitialised contiguous tensor like x, in x's dtype or another."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
