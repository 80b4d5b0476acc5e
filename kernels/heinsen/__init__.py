"""Heinsen's log attention: its kernels, and its torch operator."""
