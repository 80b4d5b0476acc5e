"""GPT-2 124M with gated power attention, p = 2: context 4096, and 65536 for the last tenth of the steps."""

dataset = "longcrawl64"
block_size = 4096
then = "65536@0.9"
batch_size = 16  # of 4096 tokens; 1 of 65536
tokens_per_step = 524288  # 128 documents, then 8
attention = "sympow_gating"
p = 2
