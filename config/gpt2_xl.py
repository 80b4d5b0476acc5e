"""GPT-2 XL, 1.6B: put it beside an attention, `train.py config/sympow_p2.py config/gpt2_xl.py`."""

n_layer = 48
n_head = 25
n_embd = 1600
batch_size = 4
