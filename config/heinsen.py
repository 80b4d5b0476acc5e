"""GPT-2 124M with Heinsen's log attention, context 4096 on LongCrawl64, with GPT-2's residual layers."""

dataset = "longcrawl64"
block_size = 4096
batch_size = 8
tokens_per_step = 524288  # 128 documents
attention = "heinsen"
