"""GPT-2 124M with a mixture of the powers 2 and 4, which has a state; that of p = 4 is too large at head dimension 64."""

dataset = "longcrawl64"
block_size = 4096
batch_size = 8
tokens_per_step = 524288  # 128 documents
attention = "adaptive_power"
adaptive = "mixture"
head_dim = 32  # the states of 12 layers take 2 GB in float32; 16 and 48 heads: 166 MB
n_head = 24
