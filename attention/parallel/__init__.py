"""Attention over a sequence whose tokens are spread over ranks."""
