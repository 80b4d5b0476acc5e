"""Make operators differentiable: by autograd, under torch.compile, and for modes that look at every operator.

    _quadratic = differentiable(_quadratic_operator, save, differentiate)    # call this in place of the operator

A call goes to torch.library's operator under torch.compile, where a mode looks on and for batches of gradients, and
else to an autograd.Function made of the same pieces: the first call of an operator imports torch._dynamo, which takes
4 s, and a program without torch.compile need not wait for it. Both can be differentiated once. Under torch.func's
transforms and in forward mode attention/operator/dispatch.py takes PyTorch's forms.
"""

import torch
from torch.autograd import forward_ad

ONCE = (
    "the Triton kernels have no second derivative: compute it on float64 tensors or on the CPU, or call "
    "sympow.attention.operator.dispatch.disable_kernels(reason) first, for plain PyTorch"
)


def transforms_active():
    """Return True within torch.func's transforms or forward mode, which custom operators do not take part in."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def differentiable(operator, save, differentiate):
    """Return a function that computes `operator`, a torch.library.custom_op, and can be differentiated.

    save(ctx, inputs, output) and differentiate(ctx, *grads) are as for torch.library.register_autograd.
    """
    operator.register_autograd(differentiate, setup_context=save)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            return operator._init_fn(*args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            save(ctx, inputs, output)

        @staticmethod
        def backward(ctx, *grads):
            return differentiate(ctx, *grads)

    def call(*args):
        if torch.compiler.is_compiling() or not _is_plain(args):
            return operator(*args)
        return Function.apply(*args) if torch.is_grad_enabled() else operator._init_fn(*args)

    return call


def _is_plain(args):
    """Return True if the tensors among args have memory, and no mode (as of torch's FLOP counter) sees operators."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    classes = torch.Tensor, torch.nn.Parameter
    plain = all(type(x) in classes and x.device.type != "meta" and torch._C._has_storage(x) for x in tensors)
    return plain and torch._C._len_torch_dispatch_stack() == 0


def differentiable_once(operator):
    """Return what `differentiable` does for a backward pass: its own derivative is refused."""
    return differentiable(operator, lambda ctx, inputs, output: None, refuse_second_derivative)


def refuse_second_derivative(ctx, *grads):
    """Raise NotImplementedError: for register_autograd of an operator that is a backward pass."""
    raise NotImplementedError(ONCE)


# ---- gradients that are not needed


def fill_unneeded(grads, needs):
    """Return the gradients with an empty tensor for each that is not needed or None: operators must return tensors."""
    like = next(x for x in grads if x is not None)
    none = lambda: like.new_empty(0, dtype=torch.float32)  # results of an operator may not share memory
    return tuple(x if need and x is not None else none() for x, need in zip(grads, needs, strict=True))


def drop_unneeded(grads, needs):
    """Return the gradients with None for those that are not needed."""
    return tuple(x if need else None for x, need in zip(grads, needs, strict=True))


def empty_like(x, dtype=None):
    """Return an uninitialised contiguous tensor like x, in x's dtype or another."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
