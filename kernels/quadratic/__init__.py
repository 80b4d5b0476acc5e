"""The quadratic form of power attention: every pair of tokens."""
