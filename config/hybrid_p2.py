"""GPT-2 124M of gated power attention, p = 2, with windowed softmax in every fourth layer, on LongCrawl64.

The losses of docs/measured/results.md are of Muon: put config/muon.py behind this file.
"""

dataset = "longcrawl64"
block_size = 4096
batch_size = 8
tokens_per_step = 524288  # 128 documents
attention = "sympow_gating,sympow_gating,sympow_gating,softmax"
p = 2
window = 2048  # tokens, so that the cost of generation is constant
