"""GPT-2 124M with symmetric power attention and learned gates, p = 4."""

dataset = "longcrawl64"
block_size = 4096
batch_size = 8
tokens_per_step = 524288  # 128 documents
attention = "sympow_gating"
p = 4
