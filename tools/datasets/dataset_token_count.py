"""Print the number of tokens of each dataset, and their sum.

python tools/datasets/dataset_token_count.py data/stdlib/stdlib_text_document data/other_text_document
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data.indexed import IndexedDataset
from megatron.errors import run_cli


def main() -> None:
    """Read the indices only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="prefix of a dataset (with or without .bin/.idx)")
    paths = parser.parse_args().paths
    total = 0
    for path in paths:
        tokens = IndexedDataset(path).num_tokens
        total += tokens
        print(f"{path}: {tokens} tokens")
    if len(paths) > 1:
        print(f"total: {total} tokens")


if __name__ == "__main__":
    run_cli(main)
