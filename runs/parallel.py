"""How the ranks of a run are laid out, and how they average gradients.

    layout = Layout(ranks)                              # the arithmetic alone: sizes can be refused before ranks join
    layout.data_rank, layout.data_world                 # by which the loader deals its batches
    layout.connect(device)                              # after ranks.join: the process groups
    model = layout.make_model(GPT, config, device)
    network, eval_network = layout.wrap(model, compiled)

The ranks are a grid of two dimensions, (data, context): rank = data_rank * context_size + context_rank. The ranks of
one context group follow each other, so that they share a node where they can, and read the same rows of data; ranks
with the same context_rank read different ones. Gradients are averaged over all ranks: what a rank of a context group
computes is the share of its slice of tokens, times context_size.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


class Layout:
    """The place of this rank among the others.

    Attributes: data_rank and data_world (the ranks that read different rows, and this one's number among them),
    context_rank and context_size (the ranks that hold slices of the same rows), mesh (a DeviceMesh with the dimensions
    "data" and "context", None unless both are used).
    """

    def __init__(self, ranks, context_size=1):
        """Lay out the ranks (a Ranks, which need not have joined).

        Raises ValueError unless context_size divides their number.
        """
        if ranks.world % context_size:
            near = max(1, round(ranks.world / context_size)) * context_size
            raise ValueError(
                f"the number of ranks must be a multiple of context_parallel={context_size}, got {ranks.world}: "
                f"torchrun --nproc_per_node={near} would do"
            )
        self.ranks, self.context_size = ranks, context_size
        self.data_world, self.context_rank = ranks.world // context_size, ranks.rank % context_size
        self.data_rank = ranks.rank // context_size
        self.mesh = self.device = None

    def connect(self, device):
        """Make the process groups of both dimensions; a collective, called after the ranks have joined."""
        self.device = device
        if self.context_size > 1:
            sizes = self.data_world, self.context_size
            self.mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("data", "context"))

    @property
    def context_group(self):
        """The process group of the ranks that hold slices of the same rows; None if context_size is 1."""
        return self.mesh and self.mesh.get_group("context")

    @property
    def data_group(self):
        """The process group of the ranks with this context_rank; None, the group of all ranks, if context_size is 1."""
        return self.mesh and self.mesh.get_group("data")

    def make_model(self, kind, config, device):
        """Return kind(config), a GPT with fresh weights, the same on every rank, on the device."""
        return kind(config).to(device)

    def wrap(self, model, compiled):
        """Return (the network to train, which averages gradients, and the network to evaluate)."""
        network = torch.compile(model) if compiled else model
        if not self.ranks.distributed:
            return network, network
        ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(network, device_ids=ids, gradient_as_bucket_view=True), network

    def average_next(self, network, last):
        """Say if the next backward pass is the last one of its step, with which gradients are averaged."""
        if self.ranks.distributed:
            network.require_backward_grad_sync = last
