"""Tokenise texts into `.bin`/`.idx` datasets, with labels that train only what follows a delimiter."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from logging import Logger
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data.tokenise.command import Result, tokenise_files, trained_share, write_metadata
from megatron.data.tokenise.flags import command_options, parse_texts, start_command, text_parser
from megatron.data.tokenise.inputs import find_inputs
from megatron.data.tokenise.masked_texts import Delimiter, MaskedTextEncoder
from megatron.data.tokenise.texts import EncodeOptions
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError, run_cli
from megatron.flags import Parser
from megatron.tokenizer import create_tokenizer

EXAMPLES = """
examples:
  # train what follows the first "Answer:" of every text
  python tools/datasets/preprocess_data_with_mask.py --input qa.jsonl --output-prefix data/qa --append-eod \\
      --tokenizer-type HFTokenizer --vocab-file tokenizer.json --mask-before-token "Answer:"

  # the same by the delimiter's token ids, as GPT-NeoX has it
  python tools/datasets/preprocess_data_with_mask.py --input qa.jsonl --output-prefix data/qa --append-eod \\
      --tokenizer-type HFTokenizer --vocab-file tokenizer.json --mask-before-token 33706,27

output:  <output-prefix>_text_document    tokens
         <output-prefix>_label_document   the same, -100 up to and including the delimiter
         With other --jsonl-keys: <output-prefix>_<key>_document and <output-prefix>_<key>_label_document.
         In the run's YAML: "train_data_paths": ["<output-prefix>_text_document"],
                            "train_label_data_paths": ["<output-prefix>_label_document"]
guide:   documentation/chat_data.md
"""


def parser() -> Parser:
    """The flags of all tools over texts, `--mask-before-token` and `--skip-unmatched`."""
    flags = text_parser(__doc__, EXAMPLES)
    flags.input.add_argument(
        "--mask-before-token",
        metavar="A,B,C",
        help="consecutive token ids, or a string: only what follows its first occurrence is trained",
    )
    flags.input.add_argument(
        "--skip-unmatched", action="store_true", help="leave out texts without it (default: train them whole)"
    )
    return flags.whole


def parse_args(argv: Sequence[str] | None) -> tuple[argparse.Namespace, EncodeOptions]:
    """The flags given, and the options for texts among them. Raises `UserError` for flags that do not go together."""
    args, texts = parse_texts(parser(), argv)
    if taken := [key for key in texts.keys if f"{key}_label" in texts.keys]:
        named = " ".join(texts.keys)
        raise UserError(f"--jsonl-keys {named}: {taken[0]}_label is also the name of the labels of {taken[0]}")
    if args.skip_unmatched and not args.mask_before_token:
        raise UserError("--skip-unmatched needs --mask-before-token")
    return args, texts


def report(result: Result, delimiter: Delimiter, logger: Logger) -> None:
    """Print how much of each data set is trained; warn about texts without the delimiter."""
    print(result.summary())
    for prefix in (name for name in result.datasets if name.endswith("_label_document")):
        labels = IndexedDataset(prefix)
        if not len(labels):  # a shard without texts
            continue
        print(trained_share(prefix, labels))
        firsts = np.cumsum(labels.sizes, dtype=np.int64) - labels.sizes
        whole = int((labels.tokens[firsts] >= 0).sum())
        if delimiter and whole:
            logger.warning(
                f"{whole} of {len(labels)} texts have no {delimiter.text or list(delimiter.ids)!r} and are trained "
                "whole (--skip-unmatched leaves them out)"
            )
    if not delimiter:
        logger.warning("--mask-before-token is not given: every token is trained")


def main(argv: Sequence[str] | None = None) -> None:
    """Check everything, then tokenise."""
    args, texts = parse_args(argv)
    logger = start_command("preprocess_data_with_mask")
    job = command_options(args, os.environ)
    paths = find_inputs(args.input)
    tokenizer = create_tokenizer(args.tokenizer_type, args.vocab_file, args.merge_file)
    delimiter = Delimiter.parse(args.mask_before_token)
    encoder = MaskedTextEncoder(tokenizer, texts, delimiter, drop_unmatched=args.skip_unmatched)
    logger.info(f"tokenizer: {tokenizer.describe()}, vocabulary {tokenizer.vocab_size}, eod {tokenizer.eod}")
    settings = {"skip_unmatched": args.skip_unmatched}
    result = tokenise_files(paths, encoder, args.output_prefix, job, settings=settings, skip_bad=args.skip_bad_lines)
    write_metadata(job.prefix(args.output_prefix), vars(args), result)
    report(result, delimiter, logger)


if __name__ == "__main__":
    run_cli(main)
