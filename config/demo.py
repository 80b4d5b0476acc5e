"""A small byte-level model of Python source: at most 3 minutes on two CPU cores."""

dataset = "pystdlib"
attention = "conformal_sympow"
p = 2
n_layer = 4
n_head = 4
n_embd = 128
block_size = 256
batch_size = 16
tokens_per_step = 4096
learning_rate = 3e-3
warmup_iters = 50
decay_lr = True
max_iters = 400
max_seconds = 165
eval_interval = 100
eval_tokens = 65536
log_interval = 5
wandb = "disabled"
