"""Prepare a named corpus for training: find or download it, tokenise it, print the lines for the YAML.

python prepare_data.py stdlib                       # no download: this Python's standard library, its own BPE
python prepare_data.py -d ./data -t GPT2BPETokenizer enwik8
python prepare_data.py pile_subset -t HFTokenizer -v tokenizer.json
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron.data.tokenise.corpora import NAMES
from megatron.data.tokenise.flags import start_command
from megatron.data.tokenise.prepare import prepare
from megatron.errors import run_cli
from megatron.flags import Parser


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    add = flags.add_argument
    add("dataset", nargs="?", default="enwik8", metavar="dataset", help=f"one of {', '.join(NAMES)} (default: enwik8)")
    add("-t", "--tokenizer", metavar="TYPE", help="tokenizer_type (default: GPT2BPETokenizer; stdlib trains its own)")
    add("-d", "--data-dir", default=os.environ.get("DATA_DIR", "./data"), help="default: $DATA_DIR or ./data")
    add("-v", "--vocab-file", metavar="PATH", help="default for GPT2BPETokenizer: downloaded from the Hugging Face Hub")
    add("-m", "--merge-file", metavar="PATH", help="merges of a BPE vocabulary")
    add("-f", "--force-redownload", action="store_true", help="download and tokenise again, even if it exists")
    return flags


def main(argv: Sequence[str] | None = None) -> None:
    """GPT-NeoX's flags."""
    args = parser().parse_args(argv)
    start_command("prepare_data")
    prepared = prepare(
        args.dataset,
        args.data_dir,
        tokenizer_type=args.tokenizer,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        force=args.force_redownload,
    )
    print(prepared.as_yaml())


if __name__ == "__main__":
    run_cli(main)
