"""A small byte-level model of Python source, 2 to 5 minutes on two CPU cores. `make demo` trains three of them."""

dataset = "pystdlib"
attention = "sympow_gating"
p = 2
n_layer = 4
n_head = 4
n_embd = 128
block_size = 256
batch_size = 8
tokens_per_step = 2048
optimizer = "muon"
weight_decay = 0.1
learning_rate = 6e-3
warmup_iters = 20
schedule = "cosine"
max_iters = 300
eval_interval = 100
eval_tokens = 16384
log_interval = 3
wandb = "disabled"
