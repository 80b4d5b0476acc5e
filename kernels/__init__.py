"""How attention is computed on a GPU: Triton kernels, and the operators that torch knows them by.

quadratic   the kernels of the quadratic form, and functions that launch them
ops         the same as a torch operator: autograd, torch.compile, meta tensors; which sizes it takes
configs     tile sizes, from table.json
check       the kernels against float64, on the GPU at hand
tune        rewrites table.json

Nothing here imports the model, and attention/ imports this only when there is a CUDA tensor to work on.
"""
