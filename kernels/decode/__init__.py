"""One token of generation on a GPU.

linear     linear layers with a norm or SwiGLU before and GELU, a sum or a convolution after
cache      the KV cache, its parts, which several programs read, and the output gate
qkv        q, k, v and the output gate of the token, its position and gates
power      power attention over the state and the KV cache, and flushing the cache
softmax    softmax over the KV cache
heinsen    Heinsen's log attention, from its state
sampling   the next token from its logits

Of many tokens at once, in prompts and evaluation:

rotary     rotated queries and keys
prompt     the convolution and the output gate
"""
