"""What computes the attentions: which form, in PyTorch or on the kernels, and whether the kernels are right."""
