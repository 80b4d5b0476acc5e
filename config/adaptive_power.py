"""GPT-2 124M with adaptive power attention, each token's power between 2 and 4, computed for all pairs of tokens.

It runs in plain PyTorch, slower than softmax.
"""

dataset = "longcrawl64"
block_size = 4096
batch_size = 8
tokens_per_step = 524288  # 128 documents
attention = "adaptive_power"
