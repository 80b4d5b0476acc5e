"""The papers' tables and figures: each is a short file that says its runs, what is measured and what is drawn.

    python -m experiments.loss_ratios --size=tiny               # two minutes on two CPU cores
    python -m experiments.loss_ratios --minutes=9               # on GPUs: one run each, as many beside each other

runs.py trains what is missing, worker.py is one run, report.py writes tables and pictures. docs/experiments.md has
the list and the options.
"""
