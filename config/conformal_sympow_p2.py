"""GPT-2 124M with conformal sympow, p = 2: learned gates and learned rotation."""

dataset = "longcrawl64"
block_size = 4096
batch_size = 8
tokens_per_step = 524288  # 128 documents
attention = "conformal_sympow"
p = 2
