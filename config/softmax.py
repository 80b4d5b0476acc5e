"""GPT-2 124M with softmax attention, context 4096 on LongCrawl64; with --convolution=0 the baseline of the papers."""

dataset = "longcrawl64"
block_size = 4096
batch_size = 8
tokens_per_step = 524288  # 128 documents
attention = "softmax"
