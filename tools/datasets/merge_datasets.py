"""Join all `.bin/.idx` datasets of a folder (shards of one corpus) into one.

    python tools/datasets/merge_datasets.py --input data/shards --output-prefix data/corpus_text_document

The shards are taken in the order of their names (numbers in numeric order). Give them the same tokenizer and, if there
are several kinds (text, labels), a folder each.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log
from megatron.data.merge import datasets_in, merge_datasets
from megatron.errors import run_cli


def main() -> None:
    """GPT-NeoX's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, metavar="DIR", help="folder with the datasets to join")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path of the result without suffix")
    args = parser.parse_args()
    log.configure()
    prefixes = datasets_in(Path(args.input), without=args.output_prefix)
    log.get_logger("merge_datasets").info("joining " + ", ".join(Path(prefix).name for prefix in prefixes))
    merged = merge_datasets(prefixes, args.output_prefix)
    print(f"{args.output_prefix}: {merged.documents} documents, {merged.tokens} tokens, {merged.dtype}")


if __name__ == "__main__":
    run_cli(main)
