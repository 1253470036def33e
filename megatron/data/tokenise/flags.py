"""The command-line flags that tokenising commands share, and how such a command starts."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron import log
from megatron.data.tokenise.command import SAVE_EVERY, CommandOptions
from megatron.data.tokenise.shards import parse_shard
from megatron.data.tokenise.texts import EncodeOptions
from megatron.errors import UserError
from megatron.flags import Parser
from megatron.tokenizer import TOKENIZERS


def start_command(name: str) -> logging.Logger:
    """Set up logging, and leave by an exception on SIGTERM, which removes temporary files."""
    log.configure()
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    return log.get_logger(name)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the datasets go, and how they are made; see `check_output` and `command_options`."""
    group = parser.add_argument_group("output")
    group.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path without suffix")
    group.add_argument(
        "--dataset-impl", default="mmap", choices=["lazy", "cached", "mmap"], help="only mmap can be written"
    )
    group = parser.add_argument_group("running")
    group.add_argument("--workers", type=int, default=1, metavar="N", help="processes (1: this one, on all its cores)")
    group.add_argument(
        "--shard",
        metavar="I/N",
        help="tokenise part I (from 0) of N only; auto: this process's rank under srun, mpirun, ...",
    )
    group.add_argument("--restart", action="store_true", help="discard what a killed command left")
    group.add_argument(
        "--save-every",
        type=float,
        default=SAVE_EVERY,
        metavar="SECONDS",
        help="seconds between saved states, from which a stopped command resumes (default: 60; 0: never)",
    )
    group.add_argument("--num-docs", type=int, metavar="N", help="expected number of documents (for the display only)")
    group.add_argument("--log-interval", type=int, default=100, metavar="N", help="documents between progress updates")


def check_output(args: argparse.Namespace) -> None:
    """Raise `UserError` for a kind of dataset that cannot be written."""
    if args.dataset_impl != "mmap":
        raise UserError(
            f"--dataset-impl {args.dataset_impl}: this older format is read, but no longer written; leave the flag out"
        )


def command_options(args: argparse.Namespace, env: Mapping[str, str]) -> CommandOptions:
    """From the flags of `add_output_arguments`. Raises `UserError` for impossible values."""
    if args.workers < 1:
        raise UserError(f"--workers {args.workers}: give at least 1")
    if not args.save_every >= 0:  # so that nan is refused too
        raise UserError(f"--save-every {args.save_every:g}: give a number of seconds, 0 or more")
    if args.num_docs is not None and args.num_docs < 0:
        raise UserError(f"--num-docs {args.num_docs}: give a number of documents, or leave it out")
    shard = parse_shard(args.shard, env) if args.shard else None
    return CommandOptions(args.workers, shard, args.save_every, args.restart, args.num_docs, args.log_interval)


class TextParser(NamedTuple):
    """The parser of a command over texts, and the groups to which it may add flags."""

    whole: Parser
    input: argparse._ArgumentGroup
    tokenizer: argparse._ArgumentGroup


def text_parser(description: str | None, examples: str) -> TextParser:
    """GPT-NeoX's flags (unambiguous abbreviations work: `--vocab`), and `--skip-bad-lines`."""
    parser = Parser(description=description, epilog=examples)
    source = parser.add_argument_group("input")
    source.add_argument("--input", required=True, nargs="+", metavar="A[,B...]", help="files, lists, globs or folders")
    source.add_argument("--jsonl-keys", nargs="+", default=["text"], metavar="KEY", help="keys to read (default: text)")
    source.add_argument("--skip-bad-lines", action="store_true", help="leave out and count unusable records")
    ids = parser.add_argument_group("tokenizer")
    types = ", ".join(sorted(TOKENIZERS))
    ids.add_argument("--tokenizer-type", required=True, metavar="TYPE", help=f"one of {types}")
    ids.add_argument("--vocab-file", metavar="PATH", help="tokenizer.json, vocab.json, .model, ... or a folder")
    ids.add_argument("--merge-file", metavar="PATH", help="merges.txt of a BPE vocabulary")
    ids.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    ids.add_argument("--ftfy", action="store_true", help="repair broken Unicode with ftfy first")
    add_output_arguments(parser)
    return TextParser(parser, source, ids)


def parse_texts(parser: Parser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, EncodeOptions]:
    """The flags given, and the options for texts among them. Raises `UserError` for flags that exclude each other."""
    args = parser.parse_args(argv)
    check_output(args)
    if len(set(args.jsonl_keys)) < len(args.jsonl_keys):
        raise UserError(f"--jsonl-keys {' '.join(args.jsonl_keys)}: a key is given twice")
    return args, EncodeOptions(tuple(args.jsonl_keys), args.append_eod, args.ftfy, args.skip_bad_lines)
