"""GPT-2 124M's width and depth with Heinsen's log attention as in its source code: gated linear units in place of MLPs,
heads of 32; context 4096 on LongCrawl64."""

dataset = "longcrawl64"
block_size = 4096
batch_size = 8
tokens_per_step = 524288  # 128 documents
attention = "heinsen"
residual = "glu"
n_head = 24
