"""Join `.bin/.idx` datasets into one: the shards of a corpus, or all datasets of a folder.

    # the output of `preprocess_data.py --shard i/16 --output-prefix shards/corpus` on 16 machines, to
    # data/corpus_text_document (and a dataset for every other key and for labels)
    python tools/datasets/merge_datasets.py --input shards --output-prefix data/corpus

    # any datasets, in the order of their names (numbers in numeric order)
    python tools/datasets/merge_datasets.py --input data/parts --output-prefix data/corpus_text_document
    python tools/datasets/merge_datasets.py --input 'data/wiki*_text_document' --output-prefix data/all_text_document

    # in an order of chance, so that the tail of the file, GPT-NeoX's validation set (`split`), is a fair sample
    python tools/datasets/merge_datasets.py --input data/corpus_text_document \\
        --output-prefix data/mixed_text_document --shuffle 1234

Joined shards have the bytes of the unsharded dataset. Missing, repeated or mixed shards, damaged datasets, different
tokenizers, options or types are refused. A dataset that is named twice (`--input A A`) is written twice. If every
`X_document` has `X_label_document` or `X_reward_document` next to it, these are joined too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data.tokenise.command import check_writable
from megatron.data.tokenise.flags import start_command
from megatron.data.tokens.merge import merge_groups
from megatron.data.tokens.merge_inputs import find_groups
from megatron.errors import run_cli
from megatron.flags import Parser
from megatron.log import ProgressBar


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument(
        "--input", required=True, nargs="+", metavar="DIR", help="folder with the datasets to join; prefixes or globs"
    )
    flags.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path of the result without suffix")
    flags.add_argument(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="documents in an order of chance, the same for the same seed and texts, however they were divided",
    )
    return flags


def main(argv: Sequence[str] | None = None) -> None:
    """GPT-NeoX's flags."""
    args = parser().parse_args(argv)
    logger = start_command("merge_datasets")
    groups = find_groups(args.input, args.output_prefix)
    check_writable(args.output_prefix)
    for group in groups:
        names = [Path(prefix).name for prefix in group.prefixes]
        shown = names if len(names) <= 8 else [*names[:4], "...", *names[-3:]]
        logger.info(f"{group.output}: joining {len(names)} datasets, {', '.join(shown)}")
    size = sum(Path(f"{prefix}.bin").stat().st_size for group in groups for prefix in group.prefixes)
    shuffled = args.shuffle is not None
    with ProgressBar("shuffling" if shuffled else "joining", size * (2 if shuffled else 1), "B") as progress:
        merged = merge_groups(groups, progress, seed=args.shuffle)
    for group, manifest in zip(groups, merged):
        print(f"{group.output}: {manifest.documents} documents, {manifest.tokens} tokens, {manifest.dtype}")


if __name__ == "__main__":
    run_cli(main)
