"""One token of generation on a GPU.

power      q, k and v of the token, power attention over the state and the KV cache, and flushing the cache
softmax    softmax over the KV cache
heinsen    Heinsen's log attention, from its state
linear     linear layers with LayerNorm before and GELU or a sum after
sampling   the next token from its logits
"""
