"""The flags that the tools over texts share; those of the job itself are in `corpus_job`."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from megatron.data.tokenise.corpus_job import add_job_arguments
from megatron.data.tokenise.encode_text import EncodeOptions
from megatron.errors import UserError
from megatron.tokenizer import TOKENIZERS


class TextParser(NamedTuple):
    """A parser of such a tool, and the groups of it that the tool may add flags of its own to."""

    whole: argparse.ArgumentParser
    input: argparse._ArgumentGroup
    tokenizer: argparse._ArgumentGroup


def text_parser(description: str | None, examples: str) -> TextParser:
    """GPT-NeoX's flags (unambiguous beginnings of a flag work too: `--vocab`), and `--skip-bad-lines`."""
    parser = argparse.ArgumentParser(
        description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_argument_group("input")
    source.add_argument("--input", required=True, nargs="+", metavar="A[,B...]", help="files, lists, globs or folders")
    source.add_argument("--jsonl-keys", nargs="+", default=["text"], metavar="KEY", help="keys to read (default: text)")
    source.add_argument("--skip-bad-lines", action="store_true", help="leave unusable records out, and count them")
    ids = parser.add_argument_group("tokenizer")
    types = ", ".join(sorted(TOKENIZERS))
    ids.add_argument("--tokenizer-type", required=True, metavar="TYPE", help=f"one of {types}")
    ids.add_argument("--vocab-file", metavar="PATH", help="tokenizer.json, vocab.json, .model, ... or a folder")
    ids.add_argument("--merge-file", metavar="PATH", help="merges.txt of a BPE vocabulary")
    ids.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    ids.add_argument("--ftfy", action="store_true", help="mend broken Unicode with ftfy first")
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path without suffix")
    output.add_argument(
        "--dataset-impl", default="mmap", choices=["lazy", "cached", "mmap"], help="mmap is the one kept"
    )
    add_job_arguments(parser)
    return TextParser(parser, source, ids)


def parse_texts(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, EncodeOptions]:
    """The flags given, and what they say of the texts. Raises `UserError` for what does not go together."""
    args = parser.parse_args()
    if args.dataset_impl != "mmap":
        raise UserError(f"--dataset-impl {args.dataset_impl}: training reads only mmap datasets; leave the flag out")
    if len(set(args.jsonl_keys)) < len(args.jsonl_keys):
        raise UserError(f"--jsonl-keys {' '.join(args.jsonl_keys)}: a key is given twice")
    return args, EncodeOptions(tuple(args.jsonl_keys), args.append_eod, args.ftfy, args.skip_bad_lines)
