"""18.5M parameters of gated power attention, p = 4, with the sizes, tokens and rate of docs/measured/results.md.

One GPU reads its 131 M tokens in two minutes, for example of source code:

    python data/source/prepare.py --root ~/src --tokenizer=bpe:8192 --val_fraction=0.05 --out=data/source_bpe

Give --dataset=NAME for another one, --attention=softmax --output_gate=True to compare, --p=2 for a small state, and for
the hybrid, with a constant cost and nearly softmax's loss:

    python train.py config/small.py --p=2 --attention=sympow_gating,sympow_gating,sympow_gating,softmax --window=2048
"""

dataset = "source_bpe"
n_layer = 8
n_head = 6
n_embd = 384
block_size = 4096
batch_size = 32
tokens_per_step = 131072
max_iters = 1000
eval_interval = 100
optimizer = "muon"
weight_decay = 0.1
learning_rate = 9.6e-3
min_lr = 9.6e-4
schedule = "wsd"
warmup_iters = 100
attention = "sympow_gating"
p = 4
