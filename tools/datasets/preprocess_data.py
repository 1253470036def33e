"""Tokenise text into the `.bin`/`.idx` datasets that training reads."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# numpy would start a thread per core for linear algebra, of which there is none here.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from megatron import log
from megatron.data.corpus_job import add_job_arguments, job_options, tokenise_files, write_metadata
from megatron.data.encode_text import EncodeOptions, TextEncoder, sample_of_files
from megatron.data.inputs import find_inputs
from megatron.errors import UserError, run_cli
from megatron.tokenizer import ENCODERS, TOKENIZERS, choose_encoder, create_tokenizer

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

  # shared out among the 16 tasks of a SLURM job, then joined
  srun -n 16 python tools/datasets/preprocess_data.py --shard auto --input corpus.jsonl --output-prefix shards/corpus \\
      --tokenizer-type HFTokenizer --vocab-file tokenizer.json --append-eod --workers 32
  python tools/datasets/merge_datasets.py --input shards --output-prefix data/corpus

input:   .jsonl .ndjson .json .txt (one document per file), also as .gz .zst .xz .bz2; .parquet .arrow;
         files, comma-joined lists, globs (quoted) and folders
output:  <output-prefix>_<key>_document.bin, .idx and .manifest.json. In the run's YAML:
         "data_path": "<output-prefix>_text_document"
         Empty documents are left out and counted; nothing appears before all is done; order and bytes do not depend
         on --workers or the number of shards. <output-prefix>_metadata.json: arguments, counts, seconds.
stopped: a run that was killed leaves <output-prefix>*.partial; the same command goes on from there (--restart: anew)
guide:   documentation/tokenizing.md
"""


def parse_args() -> argparse.Namespace:
    """GPT-NeoX's flags (unambiguous beginnings of a flag work too: `--vocab`), and `--skip-bad-lines`."""
    types = ", ".join(sorted(TOKENIZERS))
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_argument_group("input")
    group.add_argument("--input", required=True, nargs="+", metavar="A[,B...]", help="files, lists, globs or folders")
    group.add_argument("--jsonl-keys", nargs="+", default=["text"], metavar="KEY", help="keys to read (default: text)")
    group.add_argument("--skip-bad-lines", action="store_true", help="leave unusable records out, and count them")
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=True, metavar="TYPE", help=f"one of {types}")
    group.add_argument("--vocab-file", metavar="PATH", help="tokenizer.json, vocab.json, .model, ... or a folder")
    group.add_argument("--merge-file", metavar="PATH", help="merges.txt of a BPE vocabulary")
    group.add_argument(
        "--encoder",
        default="auto",
        choices=ENCODERS,
        help="library that does the work: the fastest that gives the same ids as tokenizers (auto), or this one, "
        "which is refused when it gives others",
    )
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
    if len(set(args.jsonl_keys)) < len(args.jsonl_keys):
        raise UserError(f"--jsonl-keys {' '.join(args.jsonl_keys)}: a key is given twice")
    return args


def main() -> None:
    """Check everything, then tokenise."""
    args = parse_args()
    log.configure()
    # Leaving by an exception is what removes temporary files.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    logger = log.get_logger("preprocess_data")
    options = job_options(args, os.environ)
    paths = find_inputs(args.input)
    tokenizer = create_tokenizer(args.tokenizer_type, args.vocab_file, args.merge_file)
    keys = tuple(args.jsonl_keys)
    encoder = TextEncoder(tokenizer, EncodeOptions(keys, args.append_eod, args.ftfy, args.skip_bad_lines))
    sizes = f"vocabulary {tokenizer.vocab_size}, eod {tokenizer.eod}, ids stored as {encoder.dtype}"
    logger.info(f"tokenizer: {tokenizer.describe()}, {sizes}")
    choose_encoder(tokenizer, args.encoder, sample_of_files(paths, keys))
    result = tokenise_files(paths, encoder, args.output_prefix, options, settings={}, skip_bad=args.skip_bad_lines)
    write_metadata(args.output_prefix + (options.shard.name if options.shard else ""), vars(args), result)
    print(result.summary())


if __name__ == "__main__":
    run_cli(main)
