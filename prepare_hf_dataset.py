#!/usr/bin/env python
"""`tools/datasets/prepare_hf_dataset.py` under the name that it has in GPT-NeoX's fork."""

from megatron.errors import run_cli
from tools.datasets.prepare_hf_dataset import main

if __name__ == "__main__":
    run_cli(main)
