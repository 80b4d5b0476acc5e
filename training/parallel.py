"""How the ranks of a run are laid out, how they average gradients, and how they share one model.

    layout = Layout(ranks, shard=cfg.shard)             # the arithmetic alone: sizes can be refused before ranks join
    layout.data_rank, layout.data_world                 # by which the loader deals its batches
    layout.connect(device)                              # after ranks.join: the process groups
    model = layout.make_model(GPT, config, device)      # before the optimizer, which must get the sharded weights
    network = layout.wrap(model, compiled)
    plain = layout.gather(model)                        # for what rank 0 alone does with it

The ranks are a grid of two dimensions, (data, context): rank = data_rank * context_size + context_rank. The ranks of
one context group follow each other, so that they share a node where they can, and read the same rows of data; ranks
with the same context_rank read different ones. Gradients are averaged over all ranks: what a rank of a context group
computes is the share of its slice of tokens, times context_size.

Without sharding each rank has a copy of the model, and DistributedDataParallel averages gradients. A sharded model
(FSDP2) is cut over all ranks, of both dimensions: each holds some rows of every weight, gradient and moment. A block's
weights are gathered when it runs and freed afterwards, in the forward pass and again in the backward pass; the
embeddings, which are the head too, stay from the forward pass to the backward pass. Weights are gathered, and gradients
added, in float32: autocast rounds them to bfloat16 exactly where it does without sharding, so losses are the same but
for the order of sums, and gates and norms never see a rounded weight. Gradients are added at every micro-step, so that
no rank ever holds whole ones.
"""

from contextlib import contextmanager
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ..attention import ATTENTIONS
from ..attention.parallel import pieces_of
from ..attention.positions import check_length
from ..attention.variant import splits_context
from ..runs.parts import own_rows
from ..runs.program import refuse


class Layout:
    """The place of this rank among the others.

    Attributes: data_rank and data_world (the ranks that read different rows, and this one's number among them),
    context_rank and context_size (the ranks that hold slices of the same rows), balanced (True if their slices are an
    early and a late piece each, as split_context says), sharded (True if the model is), mesh (a
    DeviceMesh with the dimensions "data" and "context", None unless both are used).
    """

    def __init__(self, ranks, context_size=1, shard=False):
        """Lay out the ranks (a Ranks, which need not have joined).

        shard: cut the model over the ranks, if there are several. Raises ValueError unless context_size divides their
        number.
        """
        if ranks.world % context_size:
            raise ValueError(
                f"the number of ranks must be a multiple of context_parallel={context_size}, got {ranks.world}"
            )
        self.ranks, self.context_size, self.sharded = ranks, context_size, shard and ranks.world > 1
        self.data_world, self.context_rank = ranks.world // context_size, ranks.rank % context_size
        self.data_rank = ranks.rank // context_size
        self.balanced, self.mesh, self.device = False, None, None

    def connect(self, device):
        """Make the process groups of both dimensions; a collective, called after the ranks have joined."""
        self.device = device
        if self.context_size > 1:
            sizes = self.data_world, self.context_size
            self.mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("data", "context"))

    def spans(self, block_size):
        """Return [(start, end), ...], the tokens of a sequence that this rank holds; None if it holds all of them."""
        if self.context_size == 1:
            return None
        n = block_size // (self.context_size * (1 + self.balanced))
        pieces = pieces_of(self.context_rank, self.context_size, self.balanced)
        return [(piece * n, (piece + 1) * n) for piece in pieces]

    def check(self, cfg, device):
        """Refuse settings that a sharded model does not take."""
        if self.sharded and cfg.backend == "gloo" and device.type == "cuda":
            refuse("shard=True needs backend=nccl on GPUs, got backend=gloo")

    def make_model(self, kind, config, device):
        """Return kind(config), a GPT with fresh weights, the same on every rank, on the device.

        A sharded model exists whole on rank 0 alone, in the CPU's memory, from where each rank gets its rows.
        """
        if not self.sharded:
            return kind(config).to(device)
        from torch.distributed.fsdp import fully_shard  # takes a second to import

        weights = dict(_tensors_of(kind(config))) if self.ranks.master else {}
        with torch.device("meta"):
            model = kind(config)
        mesh = init_device_mesh(device.type, (self.ranks.world,))  # all ranks, in one dimension
        for module in (*model.transformer.h, model):  # the head needs wte of the whole model after the last block
            fully_shard(module, mesh=mesh, reshard_after_forward=module is not model)
        model.to_empty(device=device)
        with torch.no_grad():
            for name, x in _tensors_of(model):
                tensor = torch.empty(x.shape, dtype=x.dtype, device=device)
                if weights:
                    tensor.copy_(weights[name])
                dist.broadcast(tensor, 0)
                rows, first = own_rows(x)
                rows.copy_(tensor[first : first + len(rows)])
        self.make_plain = partial(kind, config)
        return model

    def wrap(self, model, compiled):
        """Return the network to train, which averages gradients."""
        if compiled:
            compile_parts(model)
        if self.sharded or not self.ranks.distributed:
            return model
        averaging = DistributedDataParallel(Averaged([model, model.transformer.h]), gradient_as_bucket_view=True)
        averaging().backward()
        model.zero_grad()
        return averaging

    def average_next(self, network, last):
        """Say if the next backward pass is the last one of its step, with which copies of a model average gradients."""
        if self.ranks.distributed and not self.sharded:
            network.require_backward_grad_sync = last

    def gather(self, model):
        """Return on rank 0 the model, or a plain copy of a sharded one on the device, and None on other ranks.

        Called on every rank. The copy has 4 bytes a weight, for as long as the caller keeps it.
        """
        if not self.sharded:
            return model if self.ranks.master else None
        plain, weights = None, {}
        if self.ranks.master:
            with torch.device(self.device):
                plain = self.make_plain().train(model.training)
            weights = plain.state_dict()
        with torch.no_grad():
            for name, x in model.state_dict().items():  # frees the weights that a forward pass has gathered
                tensor = x.full_tensor()
                if weights:
                    weights[name].copy_(tensor)
        return plain


def compile_parts(model):
    """Compile the parts of a GPT in their places: the embedding, each block, the loss.

    Blocks of the same kind share the code, so that it takes no longer for more layers. Outside, a model computes as
    before: keys that circulate between ranks, weights that come and go around a block, activations that are computed
    again.
    """
    for owner, name in [(model, "_embed"), (model, "loss"), *((block, "forward") for block in model.transformer.h)]:
        setattr(owner, name, torch.compile(getattr(owner, name), dynamic=False))


class Averaged(torch.nn.ModuleList):
    """Stands for [network, its blocks] in DistributedDataParallel, so that each start adds gradients in one order.

    DistributedDataParallel adds gradients in buckets. The order of a sum over three ranks or more depends on the place
    of a gradient in its bucket. After the first backward pass the buckets are arranged anew, by the order in which
    gradients came. If it belonged to a step, the first step after a resume would have other bits. So the first backward
    pass is through a sum of all parameters, a call without arguments, which no context or attention changes.
    """

    def forward(self, *args, **kwargs):
        network, blocks = self
        if args:
            return network(*args, **kwargs)
        late = {*blocks.parameters()}  # gradients come from the last parameter to the first, as in the network
        return sum(parameter.sum() for parameter in sorted(self.parameters(), key=late.__contains__))


def _tensors_of(model):
    """Yield (name, tensor) of the parameters and buffers of a model."""
    return chain(model.named_parameters(), model.named_buffers())


# ---- context parallel: the mathematics is in attention/parallel/context.py


def check_context(cfg, model_cfg, contexts):
    """Raise ValueError if the model cannot read sequences of these lengths, or not on cfg.context_parallel ranks.

    The number of ranks must be a multiple of it, which training.parallel.Layout checks.
    """
    size = cfg.context_parallel
    check_length(model_cfg, max(contexts), "a context of this run")
    if size == 1:
        return
    if model_cfg.positions == "learned":
        raise ValueError(f"positions=learned cannot be spread over context_parallel={size} ranks")
    if model_cfg.form == "recurrent":
        raise ValueError("form=recurrent cannot be spread over ranks: use form=auto, chunked or quadratic")
    for layer in map(model_cfg.layer, range(model_cfg.n_layer)):
        variant = ATTENTIONS[layer.attention]
        try:
            if not splits_context(variant):
                raise ValueError("its class does not set splits_context (attention/variant.py)")
            for context in contexts:
                variant.context_layout(layer, context, torch.float32, torch.device("cpu"))
        except ValueError as error:
            where = f"attention={layer.attention} cannot be spread over context_parallel={size} ranks"
            raise ValueError(f"{where}: {error}") from error
    for context in contexts:
        if context % (2 * size):
            raise ValueError(
                f"a context must be a multiple of 2 x context_parallel = {2 * size} tokens, so that each rank can hold "
                f"an early and a late piece, got {context}"
            )


def split_context(model, layout, block_size, dtype, compiled):
    """Make the layers of the model compute with this rank's tokens of each sequence.

    layout: the connected Layout; each of its context groups shares sequences. compiled: True if torch.compile will
    compile the model.

    All layers have one layout of tokens. Returns True if it is "balanced", as it is if any layer with block_size tokens
    computes pairs: see attention/parallel/context.py.
    """
    if layout.context_size == 1:
        return False
    from ..attention.parallel.context import Context  # and attention that circulates, where ranks share sequences

    attentions, device = model.attentions(), model.transformer.wte.weight.device
    balanced = "balanced" in [x.context_layout(x.config, block_size, dtype, device) for x in attentions]
    context = Context(layout.mesh.get_group("context"), balanced, compiled)
    for attention in attentions:
        attention.context = context
    return balanced


@contextmanager
def whole_sequences(model):
    """Let the model compute whole sequences, on this rank alone."""
    # a layer without a context stays as it is: an attribute that is set makes torch.compile compile anew
    attentions = [attention for attention in model.attentions() if attention.context is not None]
    context = attentions[0].context if attentions else None  # one for all layers
    try:
        for attention in attentions:
            attention.context = None
        yield
    finally:
        for attention in attentions:
            attention.context = context
