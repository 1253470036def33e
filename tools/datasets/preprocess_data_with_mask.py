"""Tokenise texts into `.bin`/`.idx` datasets, with labels that leave out everything up to a delimiter."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log
from megatron.data.corpus_job import Result, add_job_arguments, job_options, tokenise_files, write_metadata
from megatron.data.encode_masked import Delimiter, MaskedTextEncoder
from megatron.data.encode_text import EncodeOptions
from megatron.data.indexed import IndexedDataset
from megatron.data.inputs import find_inputs
from megatron.errors import UserError, run_cli
from megatron.tokenizer import TOKENIZERS, create_tokenizer

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


def parse_args() -> argparse.Namespace:
    """GPT-NeoX's flags, `--skip-bad-lines` and `--skip-unmatched`."""
    types = ", ".join(sorted(TOKENIZERS))
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_argument_group("input")
    group.add_argument("--input", required=True, nargs="+", metavar="A[,B...]", help="files, lists, globs or folders")
    group.add_argument("--jsonl-keys", nargs="+", default=["text"], metavar="KEY", help="keys to read (default: text)")
    group.add_argument(
        "--mask-before-token",
        metavar="A,B,C",
        help="token ids that follow one another, or a string: nothing up to and including the first is trained",
    )
    group.add_argument("--skip-unmatched", action="store_true", help="leave out texts without it, else trained whole")
    group.add_argument("--skip-bad-lines", action="store_true", help="leave unusable records out, and count them")
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=True, metavar="TYPE", help=f"one of {types}")
    group.add_argument("--vocab-file", metavar="PATH", help="tokenizer.json, vocab.json, .model, ... or a folder")
    group.add_argument("--merge-file", metavar="PATH", help="merges.txt of a BPE vocabulary")
    group.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    group.add_argument("--ftfy", action="store_true", help="mend broken Unicode with ftfy first")
    group = parser.add_argument_group("output")
    group.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path without suffix")
    group.add_argument(
        "--dataset-impl", default="mmap", choices=["lazy", "cached", "mmap"], help="mmap is the one kept"
    )
    add_job_arguments(parser)
    args = parser.parse_args()
    if args.dataset_impl != "mmap":
        raise UserError(f"--dataset-impl {args.dataset_impl}: training reads only mmap datasets; leave the flag out")
    keys = args.jsonl_keys
    if len(set(keys)) < len(keys):
        raise UserError(f"--jsonl-keys {' '.join(keys)}: a key is given twice")
    if taken := [key for key in keys if f"{key}_label" in keys]:
        raise UserError(f"--jsonl-keys {' '.join(keys)}: {taken[0]}_label is the name of the labels of {taken[0]}")
    if args.skip_unmatched and not args.mask_before_token:
        raise UserError("--skip-unmatched needs --mask-before-token")
    return args


def tell(result: Result, delimiter: Delimiter) -> None:
    """How much of each data set is trained, and how many of its texts lack the delimiter."""
    logger = log.get_logger("preprocess_data_with_mask")
    print(result.summary())
    for prefix in (name for name in result.datasets if name.endswith("_label_document")):
        labels = IndexedDataset(prefix)
        if not len(labels):  # a shard on which no text fell
            continue
        values, step = labels.tokens, 1 << 22
        trained = sum(int((values[at : at + step] >= 0).sum()) for at in range(0, len(values), step))
        print(f"{prefix}: {trained} of {len(values)} tokens trained ({100 * trained / len(values):.1f} %)")
        firsts = np.cumsum(labels.sizes, dtype=np.int64) - labels.sizes
        whole = int((values[firsts] >= 0).sum())
        if delimiter and whole:
            logger.warning(
                f"{whole} of {len(labels)} texts have no {delimiter.text or list(delimiter.ids)!r} and are trained "
                "whole (--skip-unmatched leaves them out)"
            )
    if not delimiter:
        logger.warning("--mask-before-token is not given: every token is trained")


def main() -> None:
    """Check everything, then tokenise."""
    args = parse_args()
    log.configure()
    # Leaving by an exception is what removes temporary files.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    logger = log.get_logger("preprocess_data_with_mask")
    job = job_options(args, os.environ)
    paths = find_inputs(args.input)
    tokenizer = create_tokenizer(args.tokenizer_type, args.vocab_file, args.merge_file)
    delimiter = Delimiter.parse(args.mask_before_token)
    options = EncodeOptions(tuple(args.jsonl_keys), args.append_eod, args.ftfy, args.skip_bad_lines)
    encoder = MaskedTextEncoder(tokenizer, options, delimiter, drop_unmatched=args.skip_unmatched)
    logger.info(f"tokenizer: {tokenizer.describe()}, vocabulary {tokenizer.vocab_size}, eod {tokenizer.eod}")
    settings = {"skip_unmatched": args.skip_unmatched}
    result = tokenise_files(paths, encoder, args.output_prefix, job, settings=settings, skip_bad=args.skip_bad_lines)
    write_metadata(args.output_prefix + (job.shard.name if job.shard else ""), vars(args), result)
    tell(result, delimiter)


if __name__ == "__main__":
    run_cli(main)
