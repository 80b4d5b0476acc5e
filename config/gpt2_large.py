"""GPT-2 large, 774M: put it beside an attention, `train.py config/sympow_p2.py config/gpt2_large.py`."""

n_layer = 36
n_head = 20
n_embd = 1280
