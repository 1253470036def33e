"""Tokenise text into the `.bin`/`.idx` datasets that training reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Else numpy starts a thread per core for linear algebra, which is not used here.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from megatron.data.tokenise.command import tokenise_files, tokenise_shuffled, write_metadata
from megatron.data.tokenise.flags import command_options, parse_texts, start_command, text_parser
from megatron.data.tokenise.inputs import find_inputs
from megatron.data.tokenise.texts import TextEncoder, sample_of_files
from megatron.errors import run_cli
from megatron.flags import Parser
from megatron.tokenizer import ENCODERS, choose_encoder, create_tokenizer

EXAMPLES = """
examples:
  # one JSON object per line, its text under "text", with a Hugging Face tokenizer.json
  python tools/datasets/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
      --tokenizer-type HFTokenizer --vocab-file tokenizer.json --append-eod --workers 8

  # GPT-2's vocabulary, many compressed files
  python tools/datasets/preprocess_data.py --input 'shards/*.jsonl.zst' --output-prefix data/corpus \\
      --tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --append-eod

  # two datasets, data/qa_question_document and data/qa_answer_document, of parquet columns
  python tools/datasets/preprocess_data.py --input qa.parquet --jsonl-keys question answer --output-prefix data/qa \\
      --tokenizer-type HFTokenizer --vocab-file tokenizer.json --append-eod

  # divided among the 16 tasks of a SLURM job, then joined
  srun -n 16 python tools/datasets/preprocess_data.py --shard auto --input corpus.jsonl --output-prefix shards/corpus \\
      --tokenizer-type HFTokenizer --vocab-file tokenizer.json --append-eod --workers 32
  python tools/datasets/merge_datasets.py --input shards --output-prefix data/corpus

input:   .jsonl .ndjson .json .txt (one document per file), also as .gz .zst .xz .bz2; .parquet .arrow;
         files, comma-joined lists, globs (quoted) and folders
output:  <output-prefix>_<key>_document.bin, .idx and .manifest.json. In the run's YAML:
         "data_path": "<output-prefix>_text_document"
         Empty documents are left out and counted. The files appear when all is done; order and bytes do not depend on
         --workers or the number of shards. <output-prefix>_metadata.json: arguments, counts, seconds.
resume:  a killed command leaves <output-prefix>*.partial; run it again to resume (--restart: start from zero)
guide:   documentation/tokenizing.md
"""


def parser() -> Parser:
    """The flags of all tools over texts, and `--encoder`."""
    flags = text_parser(__doc__, EXAMPLES)
    flags.tokenizer.add_argument(
        "--encoder",
        default="auto",
        choices=ENCODERS,
        help="library that encodes: the fastest that gives the same ids as tokenizers (auto), or this one, which must "
        "give the same ids",
    )
    flags.whole.add_argument(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="write the documents in an order of chance, the same for the same seed and texts: GPT-NeoX's split takes "
        "the last ones for validation",
    )
    return flags.whole


def main(argv: Sequence[str] | None = None) -> None:
    """Check everything, then tokenise."""
    args, texts = parse_texts(parser(), argv)
    logger = start_command("preprocess_data")
    options = command_options(args, os.environ)
    paths = find_inputs(args.input)
    tokenizer = create_tokenizer(args.tokenizer_type, args.vocab_file, args.merge_file)
    encoder = TextEncoder(tokenizer, texts)
    sizes = f"vocabulary {tokenizer.vocab_size}, eod {tokenizer.eod}, ids stored as {encoder.dtype}"
    logger.info(f"tokenizer: {tokenizer.describe()}, {sizes}")
    choose_encoder(tokenizer, args.encoder, sample_of_files(paths, texts.keys))
    prefix, skip_bad = args.output_prefix, args.skip_bad_lines
    if args.shuffle is None:
        result = tokenise_files(paths, encoder, prefix, options, settings={}, skip_bad=skip_bad)
    else:
        result = tokenise_shuffled(paths, encoder, prefix, options, seed=args.shuffle, skip_bad=skip_bad)
    write_metadata(options.prefix(args.output_prefix), vars(args), result)
    print(result.summary())


if __name__ == "__main__":
    run_cli(main)
