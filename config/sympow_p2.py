"""GPT-2 124M with symmetric power attention, p = 2, context 4096 on LongCrawl64, as in the papers."""

dataset = "longcrawl64"
block_size = 4096
batch_size = 8
tokens_per_step = 524288  # 128 documents
attention = "sympow"
p = 2
