"""GPT-2 124M with adaptive power as a mixture of the powers 2 and 4, which has a state.

Its heads are of 32, because the state of p = 4 at head dimension 64 takes 14 GB.
"""

dataset = "longcrawl64"
block_size = 4096
batch_size = 8
tokens_per_step = 524288  # 128 documents
attention = "adaptive_power"
adaptive = "mixture"
head_dim = 32  # the states of 12 layers take 2.0 GB in float32; with 16 and 48 heads 157 MB
n_head = 24
