"""Checkpoints of GPT-NeoX and our own: a look inside, and writing them for another layout."""
