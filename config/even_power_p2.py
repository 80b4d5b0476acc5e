"""GPT-2 124M with even-power attention, p = 2, computed in its quadratic form."""

dataset = "longcrawl64"
block_size = 4096
batch_size = 8
tokens_per_step = 524288  # 128 documents
attention = "even_power"
p = 2
