"""The network: one list of layers (gpt.py), run as a plain module or as pipeline stages (pipe.py)."""
