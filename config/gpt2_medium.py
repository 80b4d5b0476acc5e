"""GPT-2 medium, 350M: put it beside an attention, `train.py config/sympow_p2.py config/gpt2_medium.py`."""

n_layer = 24
n_head = 16
n_embd = 1024
