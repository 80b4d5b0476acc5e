"""A Llama of SmolLM2-135M's sizes: put it beside an attention, `train.py config/softmax.py config/llama_small.py`.

Softmax then has a convolution, unlike in a Llama; --convolution=0 leaves it out.
"""

n_layer = 30
n_head = 9
n_kv_head = 3
n_embd = 576
norm = "rmsnorm"
embedding_norm = False
activation = "swiglu"
mlp_width = 1536
rope_base = 10000.0
rope_unit = "radian"
