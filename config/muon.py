"""Muon, at the one rate tried with 98M parameters (131,072 tokens a step): put it behind a config of GPT-2's size,
`train.py config/hybrid_p2.py config/muon.py`."""

optimizer = "muon"
weight_decay = 0.1
learning_rate = 4.8e-3
