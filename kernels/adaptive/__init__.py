"""Adaptive power attention: its kernels and their launchers (`passes`), and its torch operator."""
